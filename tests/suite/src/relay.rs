//! A way between two processes that a test can close and lead elsewhere.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// Passes connections on to where it leads. A change of that breaks those that there are; while it leads nowhere, new ones break too.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    way: watch::Sender<Option<SocketAddr>>,
    task: JoinHandle<()>,
}

impl Relay {
    /// Leads nowhere yet.
    pub async fn new() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, way) = (listener.local_addr()?, watch::Sender::new(None));
        let ways = way.subscribe();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(pass(stream, ways.clone()));
            }
        });
        Ok(Self { address, way, task })
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn lead_to(&self, url: &str) -> Result<()> {
        let address = url
            .strip_prefix("http://")
            .and_then(|address| address.trim_end_matches('/').parse().ok());
        self.way.send_replace(Some(
            address.with_context(|| format!("'{url}' is not the address of a process here"))?,
        ));
        Ok(())
    }

    pub fn cut(&self) {
        self.way.send_replace(None);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(mut from: TcpStream, mut ways: watch::Receiver<Option<SocketAddr>>) {
    let Some(way) = *ways.borrow_and_update() else {
        return;
    };
    let passed = async {
        let mut to = TcpStream::connect(way).await?;
        tokio::io::copy_bidirectional(&mut from, &mut to).await
    };
    tokio::select! {
        _ = passed => {}
        _ = ways.changed() => {}
    }
}

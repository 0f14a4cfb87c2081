//! A TCP relay between two processes that a test can disconnect and redirect.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// Forwards connections to its target. A change of the target breaks open connections; without a
/// target, new connections break too.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    target: watch::Sender<Option<SocketAddr>>,
    task: JoinHandle<()>,
}

impl Relay {
    /// Creates a relay without a target.
    pub async fn new() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, target) = (listener.local_addr()?, watch::Sender::new(None));
        let targets = target.subscribe();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(forward(stream, targets.clone()));
            }
        });
        Ok(Self {
            address,
            target,
            task,
        })
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn route_to(&self, url: &str) -> Result<()> {
        let address = url
            .strip_prefix("http://")
            .and_then(|address| address.trim_end_matches('/').parse().ok());
        self.target.send_replace(Some(
            address.with_context(|| format!("'{url}' is not a local address"))?,
        ));
        Ok(())
    }

    pub fn cut(&self) {
        self.target.send_replace(None);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward(mut from: TcpStream, mut targets: watch::Receiver<Option<SocketAddr>>) {
    let Some(target) = *targets.borrow_and_update() else {
        return;
    };
    let forwarded = async {
        let mut to = TcpStream::connect(target).await?;
        tokio::io::copy_bidirectional(&mut from, &mut to).await
    };
    tokio::select! {
        _ = forwarded => {}
        _ = targets.changed() => {}
    }
}

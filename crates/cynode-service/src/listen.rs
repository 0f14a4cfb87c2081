//! Listening: plain on loopback, TLS elsewhere.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use axum::{Router, serve::ListenerExt as _};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_rustls::{TlsAcceptor, rustls, server::TlsStream};
use tokio_util::sync::CancellationToken;

const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long open requests may take after the stop was asked for.
const DRAIN: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("{0} is not a loopback address: give tls.cert and tls.key, or --insecure-listen to do without")]
    Insecure(SocketAddr),
    #[error("can't listen on {address}")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("tls.cert and tls.key must be given together")]
    HalfTls,
    #[error("can't read {path} as {what}")]
    Pem { path: PathBuf, what: &'static str, source: rustls::pki_types::pem::Error },
    #[error("the certificate and key can't be used")]
    Tls(#[source] rustls::Error),
}

#[derive(Clone, Debug, Default)]
pub struct Tls {
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub insecure: bool,
}

/// A bound listener, not yet serving.
#[derive(Debug)]
pub struct Bound {
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    pub address: SocketAddr,
}

impl Bound {
    /// The address as a base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }
}

/// A listener whose rules are kept and whose files are read; nothing is open yet.
#[derive(Debug)]
pub struct Prepared {
    address: SocketAddr,
    tls: Option<Arc<rustls::ServerConfig>>,
}

pub fn prepare(address: SocketAddr, tls: &Tls) -> Result<Prepared, ListenError> {
    let tls = match (&tls.cert, &tls.key) {
        (Some(cert), Some(key)) => Some(Arc::new(tls_config(cert, key)?)),
        (None, None) if address.ip().is_loopback() || tls.insecure => None,
        (None, None) => return Err(ListenError::Insecure(address)),
        _ => return Err(ListenError::HalfTls),
    };
    Ok(Prepared { address, tls })
}

impl Prepared {
    pub async fn bind(self) -> Result<Bound, ListenError> {
        let Self { address, tls } = self;
        let failed = |source| ListenError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Bound { listener, tls, address })
    }
}

fn tls_config(cert: &PathBuf, key: &PathBuf) -> Result<rustls::ServerConfig, ListenError> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
    let pem = |path: &PathBuf, what| {
        let path = path.clone();
        move |source| ListenError::Pem { path, what, source }
    };
    let chain = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect).map_err(pem(cert, "a certificate chain"))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(pem(key, "a private key"))?;
    rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).map_err(ListenError::Tls)
}

/// Serves until the token is cancelled, then lets open requests end within a short while.
pub async fn serve(bound: Bound, router: Router, stop: CancellationToken) -> std::io::Result<()> {
    let Bound { listener, tls, .. } = bound;
    let drain = {
        let stop = stop.clone();
        async move {
            stop.cancelled().await;
            tokio::time::sleep(DRAIN).await;
        }
    };
    let shutdown = stop.cancelled_owned();
    let serving = async move {
        match tls {
            None => axum::serve(listener.tap_io(|stream: &mut TcpStream| drop(stream.set_nodelay(true))), router).with_graceful_shutdown(shutdown).await,
            Some(config) => axum::serve(TlsListener::new(listener, config), router).with_graceful_shutdown(shutdown).await,
        }
    };
    tokio::select! {
        served = serving => served,
        () = drain => Ok(()),
    }
}

/// Does handshakes beside one another, so that a slow one holds nobody up.
struct TlsListener {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    address: std::io::Result<SocketAddr>,
}

impl TlsListener {
    fn new(listener: TcpListener, config: Arc<rustls::ServerConfig>) -> Self {
        let (sender, ready) = mpsc::channel(64);
        let address = listener.local_addr();
        let acceptor = TlsAcceptor::from(config);
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = sender.closed() => return,
                };
                let Ok((stream, peer)) = accepted else {
                    // Out of descriptors, most likely: the next moment may be better.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                };
                drop(stream.set_nodelay(true));
                let (acceptor, sender) = (acceptor.clone(), sender.clone());
                tokio::spawn(async move {
                    if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                        drop(sender.send((stream, peer)).await);
                    }
                });
            }
        });
        Self { ready, address }
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(accepted) => accepted,
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        match &self.address {
            Ok(address) => Ok(*address),
            Err(error) => Err(std::io::Error::new(error.kind(), error.to_string())),
        }
    }
}

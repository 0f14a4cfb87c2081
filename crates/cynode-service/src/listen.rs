//! Listeners: plain HTTP on loopback, TLS elsewhere.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use serde::Deserialize;
use tokio::net::{TcpListener, TcpSocket};
use tokio_rustls::rustls;

pub use crate::serve::{CONNECTIONS, CONNECTIONS_RANGE, Peer, raise_open_files, serve};

/// The backlog of unaccepted connections; the kernel may cap it.
const BACKLOG: u32 = 4_096;

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("{0} is not a loopback address: set tls.cert and tls.key, or pass --insecure-listen")]
    Insecure(SocketAddr),
    #[error("can't listen on {address}")]
    Bind {
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("tls.cert and tls.key must be given together")]
    HalfTls,
    #[error("can't read {path} as {kind}")]
    Pem {
        path: PathBuf,
        kind: &'static str,
        source: rustls::pki_types::pem::Error,
    },
    #[error("the certificate and key are unusable")]
    Tls(#[source] rustls::Error),
}

/// The TLS section of a role's configuration: certificate chain, key and authorities, as PEM files.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsFiles {
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    /// The only authorities that this role trusts when it calls its peers. When absent: those of
    /// the system, and those in `CYNODE_CA_FILE`.
    pub ca: Option<PathBuf>,
    /// The name in the certificate, by which callers on this machine connect; the address when
    /// absent.
    pub name: Option<String>,
}

/// A bound listener, not yet serving.
#[derive(Debug)]
pub struct Bound {
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    pub address: SocketAddr,
}

impl Bound {
    pub(crate) fn into_parts(self) -> (TcpListener, Option<Arc<rustls::ServerConfig>>) {
        (self.listener, self.tls)
    }

    /// The address as a base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!(
            "{}://{}",
            if self.tls.is_some() { "https" } else { "http" },
            self.address
        )
    }
}

/// A validated listener with loaded certificates, not yet bound.
#[derive(Debug)]
pub struct Prepared {
    address: SocketAddr,
    tls: Option<Arc<rustls::ServerConfig>>,
}

/// Checks an address and its TLS files. `insecure` allows plain HTTP beyond loopback.
pub fn prepare(
    address: SocketAddr,
    tls: &TlsFiles,
    insecure: bool,
) -> Result<Prepared, ListenError> {
    // The listener does not use the authorities; a bad file must still fail before a port opens.
    if let Some(path) = &tls.ca {
        authorities(path)?;
    }
    let tls = match (&tls.cert, &tls.key) {
        (Some(cert), Some(key)) => Some(Arc::new(tls_config(cert, key)?)),
        (None, None) if address.ip().is_loopback() || insecure => None,
        (None, None) => return Err(ListenError::Insecure(address)),
        _ => return Err(ListenError::HalfTls),
    };
    Ok(Prepared { address, tls })
}

impl Prepared {
    #[expect(
        clippy::unused_async,
        reason = "registering a socket needs a runtime, which an async fn guarantees"
    )]
    pub async fn bind(self) -> Result<Bound, ListenError> {
        let Self { address, tls } = self;
        let failed = |source| ListenError::Bind { address, source };
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }
        .map_err(failed)?;
        socket
            .set_reuseaddr(true)
            .and_then(|()| socket.bind(address))
            .map_err(failed)?;
        let listener = socket.listen(BACKLOG).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Bound {
            listener,
            tls,
            address,
        })
    }
}

/// Checks that a file contains trusted certificates.
fn authorities(path: &PathBuf) -> Result<(), ListenError> {
    use rustls::pki_types::{CertificateDer, pem, pem::PemObject as _};
    let failed = |source| ListenError::Pem {
        path: path.clone(),
        kind: "trusted certificates",
        source,
    };
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(failed)?;
    if found.is_empty() {
        Err(failed(pem::Error::NoItemsFound))
    } else {
        Ok(())
    }
}

fn tls_config(cert: &PathBuf, key: &PathBuf) -> Result<rustls::ServerConfig, ListenError> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
    let pem = |path: &PathBuf, kind| {
        let path = path.clone();
        move |source| ListenError::Pem { path, kind, source }
    };
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .map_err(pem(cert, "a certificate chain"))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(pem(key, "a private key"))?;
    rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(ListenError::Tls)
}

//! One connection to a sandbox's proxies, served as HTTP.

use std::{convert::Infallible, sync::Arc, time::Duration};

use cynode_sba_proto::proxy::{Listener, PREAMBLE_BYTES};
use http::StatusCode;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{io::AsyncReadExt as _, net::UnixStream};

use super::{
    ProxyPeer, ProxyRefusal, ProxyResponse, egress,
    pace::ImpatientStream,
    socket::{ConnectionPermit, SandboxProxies},
};

/// From the connection to the end of its preamble, which arrives with it.
const PREAMBLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a request's head, from when the connection is ready for it.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest head of a request.
const MAX_HEAD_BYTES: usize = 64 * 1024;

pub(super) async fn serve(
    mut stream: UnixStream,
    shared: Arc<SandboxProxies>,
    _permit: ConnectionPermit,
) {
    let mut preamble = [0; PREAMBLE_BYTES];
    let read = tokio::time::timeout(PREAMBLE_TIMEOUT, stream.read_exact(&mut preamble)).await;
    let Ok(Ok(_)) = read else { return };
    let listener = match Listener::parse(&preamble) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::debug!(%error, "Refused a connection to a sandbox's proxies.");
            return;
        }
    };
    let service = service_fn(move |request: http::Request<Incoming>| {
        let shared = Arc::clone(&shared);
        async move { Ok::<_, Infallible>(answer(&shared, listener, request).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_header_size(MAX_HEAD_BYTES)
        // A client that hangs up must not keep a model busy. Elsewhere it may close its direction
        // and wait for the answer.
        .half_close(listener != Listener::Inference);
    let stream = TokioIo::new(ImpatientStream::new(stream));
    // Errors of a connection only concern its client.
    drop(builder.serve_connection(stream, service).await);
}

async fn answer(
    shared: &SandboxProxies,
    listener: Listener,
    request: http::Request<Incoming>,
) -> ProxyResponse {
    shared.rate.wait().await;
    let Some((sandbox, live)) = shared.owner() else {
        // A spare, or a sandbox that has just ended.
        let refusal = ProxyRefusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable",
            "the sandbox does not belong to a session or job",
            "Try again in a moment.",
        );
        return refusal.into_response(&uuid::Uuid::now_v7().to_string());
    };
    let peer = ProxyPeer::new(sandbox, live);
    match listener {
        Listener::Inference => shared.proxies.inference().handle(&peer, request).await,
        Listener::Proxy => egress::handle(&shared.proxies, &peer, request).await,
        Listener::Callback => match shared.proxies.jobs() {
            Some(jobs) => jobs.callback(&peer, request).await,
            None => ProxyRefusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "the worker is stopping",
                "Try again in a moment.",
            )
            .into_response(&peer.request_id),
        },
    }
}

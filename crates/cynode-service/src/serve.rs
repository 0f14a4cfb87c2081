//! Serves connections.
//!
//! Invariant: a client that sends nothing, or half a request, delays nobody else. Heads, bodies and
//! the reading of responses have a minimum pace (`pace.rs`, `body.rs`), and connections are divided
//! into shares (`connections.rs`) that make room for new ones. A request of an authenticated caller
//! that keeps the pace is never cut off, however long its body or response takes.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
};
use http::{StatusCode, header};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

use crate::{
    connections::{Capacity, Connection, Shares},
    listen::Bound,
    pace::{PacedStream, Paces},
};

/// The remote address of a request's connection, in the request's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// How long requests in flight may take after shutdown was requested.
const DRAIN: Duration = Duration::from_secs(5);
/// The longest request head.
const MAX_HEAD: usize = 64 * 1024;
/// The default number of connections of a listener, and the configurable range.
pub const CONNECTIONS: usize = 4_096;
pub const CONNECTIONS_RANGE: std::ops::RangeInclusive<u64> = 64..=65_536;
/// Descriptors reserved for other uses.
const OTHER_DESCRIPTORS: u64 = 256;
/// Descriptors per connection: an orchestrator has two listeners, and forwards each call over
/// another connection.
const DESCRIPTORS_EACH: u64 = 4;

#[derive(Clone, Copy, Debug)]
struct Limits {
    capacity: Capacity,
    /// Timeout of the TLS handshake.
    handshake: Duration,
    /// Timeout of a request head, from when the server is ready for it.
    head: Duration,
    paces: Paces,
}

impl Limits {
    fn new(connections: usize) -> Self {
        Self {
            capacity: Capacity { connections },
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(30),
            paces: Paces::default(),
        }
    }
}

/// Raises the soft limit of open files to the hard limit.
pub fn raise_open_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "Raising the limit of open files failed.");
    }
}

/// The number of connections that the descriptors allow.
fn affordable(connections: usize, descriptors: Option<u64>) -> usize {
    let Some(descriptors) = descriptors else {
        return connections;
    };
    let max = (descriptors.saturating_sub(OTHER_DESCRIPTORS) / DESCRIPTORS_EACH)
        .max(*CONNECTIONS_RANGE.start());
    connections.min(usize::try_from(max).unwrap_or(usize::MAX))
}

/// Serves until the token is cancelled, then drains requests in flight for a short time.
pub async fn serve(
    bound: Bound,
    router: Router,
    stop: CancellationToken,
    connections: usize,
) -> io::Result<()> {
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let affordable = affordable(connections, descriptors);
    if affordable < connections {
        tracing::warn!(
            connections = affordable,
            configured = connections,
            ?descriptors,
            "The limit of open files is too low for all connections."
        );
    }
    serve_within(bound, router, stop, Limits::new(affordable)).await;
    Ok(())
}

async fn serve_within(bound: Bound, router: Router, stop: CancellationToken, limits: Limits) {
    let (listener, tls) = bound.into_parts();
    let tls = tls.map(TlsAcceptor::from);
    let shares = Shares::new(limits.capacity);
    let connections = TaskTracker::new();
    let accepting = async {
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Most likely out of descriptors: close the connection that has waited longest
                    // for its client.
                    tracing::warn!(%error, "Accepting a connection failed.");
                    let pause = if shares.close_oldest() { 1 } else { 100 };
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                    continue;
                }
            };
            shares.make_room().await;
            drop(stream.set_nodelay(true));
            let place = Shares::admit(&shares);
            let (connection, tls, router, stop) = (
                place.connection().clone(),
                tls.clone(),
                router.clone(),
                stop.clone(),
            );
            let stream = PacedStream::new(stream, place, limits.paces);
            connections.spawn(async move {
                tokio::select! {
                    // Handle what has arrived before closing the connection.
                    biased;
                    () = serve_one(stream, Peer(peer), tls, router, &connection, stop, limits) => {}
                    () = connection.close_requested() => {}
                }
            });
        }
    };
    tokio::select! {
        () = accepting => {}
        () = stop.cancelled() => {}
    }
    drop(listener);
    connections.close();
    drop(tokio::time::timeout(DRAIN, connections.wait()).await);
}

async fn serve_one(
    stream: PacedStream,
    peer: Peer,
    tls: Option<TlsAcceptor>,
    router: Router,
    connection: &Connection,
    stop: CancellationToken,
    limits: Limits,
) {
    match tls {
        None => serve_http(stream, peer, router, connection, stop, limits).await,
        Some(tls) => {
            if let Ok(Ok(stream)) = tokio::time::timeout(limits.handshake, tls.accept(stream)).await
            {
                connection.next_head();
                serve_http(stream, peer, router, connection, stop, limits).await;
            }
        }
    }
}

async fn serve_http(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: Peer,
    router: Router,
    connection: &Connection,
    stop: CancellationToken,
    limits: Limits,
) {
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(peer);
        let (router, connection) = (router.clone(), connection.clone());
        async move {
            connection.begin();
            let served = RequestGuard(connection.clone());
            request.extensions_mut().insert(connection.clone());
            let Ok(response) = router.oneshot(request).await;
            connection.set_streams(is_stream(&response));
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                connection.mark_upgraded();
            }
            connection.mark_waiting_for_reader();
            Ok::<_, Infallible>(response.map(|body| {
                Body::new(ResponseBody {
                    body,
                    rest: Bytes::new(),
                    _served: served,
                })
            }))
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_header_size(MAX_HEAD);
    let serving = builder
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut serving = std::pin::pin!(serving);
    // Errors of a connection only concern its client.
    tokio::select! {
        ended = serving.as_mut() => return drop(ended),
        () = stop.cancelled() => serving.as_mut().graceful_shutdown(),
    }
    drop(serving.await);
}

fn is_stream<B>(response: &http::Response<B>) -> bool {
    response
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

struct RequestGuard(Connection);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// A response body; the request is in flight until it has been sent.
struct ResponseBody {
    body: Body,
    /// The rest of a large piece. hyper buffers whole pieces and polls for the next one only when
    /// it has room, so small pieces keep the rest here until nearly all of it is sent.
    rest: Bytes,
    _served: RequestGuard,
}

/// The largest piece handed to hyper.
const PIECE: usize = 64 * 1024;

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(frame) => return Poll::Ready(Some(Ok(frame))),
                },
                other => return other,
            }
        }
        let length = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let left = self.rest.len() as u64;
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + left);
        }
        hint.set_lower(hint.lower() + left);
        hint
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::{
        Extension,
        extract::Request,
        middleware::{self, Next},
        response::{IntoResponse as _, Response},
        routing::{get, post},
    };
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
        sync::Semaphore,
    };
    use uuid::Uuid;

    use super::*;
    use crate::{
        connections::CallerId,
        listen::{TlsFiles, prepare},
        pace::Pace,
    };

    const LARGE: usize = 16 << 20;
    const HEAD: Duration = Duration::from_millis(400);
    const WHOLE: &[u8] =
        b"GET /slow HTTP/1.1\r\nHost: x\r\nX-Caller: 1\r\nConnection: close\r\n\r\n";
    const ECHO: &[u8] =
        b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi";

    fn limits(connections: usize) -> Limits {
        let pace = Pace {
            slack: HEAD,
            rate: 1_000_000,
            total: 2 * HEAD,
        };
        Limits {
            head: HEAD,
            paces: Paces {
                head: pace,
                ..Paces::default()
            },
            ..Limits::new(connections)
        }
    }

    /// Trusts the user named in the request.
    async fn authenticate(request: Request, next: Next) -> Response {
        let number = request
            .headers()
            .get("x-caller")
            .and_then(|value| value.to_str().ok()?.parse().ok());
        let connection = request
            .extensions()
            .get::<Connection>()
            .expect("every request has it");
        match number.map(|number| connection.assign_to(CallerId::User(Uuid::from_u128(number)))) {
            Some(Err(error)) => error.into_response(),
            _ => next.run(request).await,
        }
    }

    /// A server with small limits; `/slow` responds on demand.
    async fn server(
        connections: usize,
    ) -> (
        SocketAddr,
        Arc<Semaphore>,
        CancellationToken,
        tokio::task::JoinHandle<()>,
    ) {
        server_within(limits(connections)).await
    }

    async fn server_within(
        limits: Limits,
    ) -> (
        SocketAddr,
        Arc<Semaphore>,
        CancellationToken,
        tokio::task::JoinHandle<()>,
    ) {
        let bound = prepare(([127, 0, 0, 1], 0).into(), &TlsFiles::default(), false)
            .expect("prepared")
            .bind()
            .await
            .expect("bound");
        let (address, stop, go) = (
            bound.address,
            CancellationToken::new(),
            Arc::new(Semaphore::new(0)),
        );
        let permits = Arc::clone(&go);
        let slow = async move || {
            permits.acquire().await.expect("open").forget();
            "answer"
        };
        let events = async || {
            (
                [(header::CONTENT_TYPE, "text/event-stream")],
                vec![b'x'; LARGE],
            )
        };
        let router = Router::new()
            .route("/large", get(async || vec![b'x'; LARGE]))
            .route("/events", get(events))
            .route("/slow", get(slow))
            .route(
                "/peer",
                get(async |Extension(Peer(peer)): Extension<Peer>| peer.to_string()),
            )
            .route("/echo", post(async |body: String| body))
            .layer(middleware::from_fn(authenticate))
            .layer(middleware::from_fn(crate::body::limit_pauses));
        let serving = tokio::spawn(serve_within(bound, router, stop.clone(), limits));
        (address, go, stop, serving)
    }

    async fn connected(address: SocketAddr, sent: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        stream.write_all(sent).await.expect("sent");
        stream
    }

    /// Everything until the end.
    async fn rest(stream: &mut TcpStream) -> String {
        let mut bytes = Vec::new();
        // A reset is an end, too.
        drop(stream.read_to_end(&mut bytes).await);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    #[tokio::test]
    async fn a_slowly_read_response_is_not_an_idle_connection() {
        let (address, _go, stop, serving) = server(8).await;
        let mut slow = connected(
            address,
            b"GET /large HTTP/1.1\r\nHost: x\r\nX-Caller: 1\r\nConnection: close\r\n\r\n",
        )
        .await;
        let mut first = [0; 1];
        slow.read_exact(&mut first)
            .await
            .expect("the answer begins");
        // A crowd of silent connections.
        let mut crowd = Vec::new();
        for _ in 0..12 {
            crowd.push(connected(address, b"").await);
            tokio::task::yield_now().await;
        }
        assert!(
            rest(&mut slow).await.len() > LARGE,
            "the answer was cut off"
        );
        stop.cancel();
        drop(crowd);
        serving.await.expect("it ends");
    }

    #[tokio::test]
    async fn a_request_knows_where_its_connection_comes_from() {
        let (address, ..) = server(4).await;
        let mut stream = connected(
            address,
            b"GET /peer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        )
        .await;
        let own = stream.local_addr().expect("an address").to_string();
        assert!(rest(&mut stream).await.ends_with(&own));
    }

    #[tokio::test]
    // invariant: deadlines
    async fn a_connection_with_an_unfinished_head_is_closed() {
        let (address, ..) = server(10).await;
        for sent in [&b""[..], b"GET /sl", b"GET /slow HTTP/1.1\r\nHost: x\r\n"] {
            let mut stream = connected(address, sent).await;
            assert!(!rest(&mut stream).await.contains("200"), "{sent:?}");
        }
        // An idle connection is closed soon, too.
        let mut stream = connected(
            address,
            b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi",
        )
        .await;
        assert!(rest(&mut stream).await.ends_with("hi"));
    }

    #[tokio::test]
    // invariant: deadlines
    async fn a_head_below_its_rate_is_cut_off_long_before_its_total_time() {
        let pace = Pace {
            slack: Duration::from_millis(200),
            rate: 1_000,
            total: Duration::from_secs(3_600),
        };
        let hour = Duration::from_secs(3_600);
        let limits = Limits {
            head: hour,
            paces: Paces {
                head: pace,
                ..Paces::default()
            },
            ..Limits::new(64)
        };
        let (address, ..) = server_within(limits).await;
        // The silence before a head does not count.
        let mut late = connected(address, b"").await;
        let mut stream = connected(address, b"GET /").await;
        let trickle = async {
            while stream.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(hour / 60, trickle)
            .await
            .expect("it is cut off");
        // A second request on a keep-alive connection has its own clock.
        late.write_all(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
            .await
            .expect("still open");
        let mut answer = vec![0; 15];
        late.read_exact(&mut answer).await.expect("answered");
        tokio::time::sleep(pace.slack * 2).await;
        late.write_all(ECHO).await.expect("still open");
        assert!(rest(&mut late).await.ends_with("hi"));
    }

    #[tokio::test]
    async fn a_head_that_is_too_long_is_refused() {
        let (address, ..) = server(64).await;
        for (length, expected) in [
            (MAX_HEAD - 1_024, "HTTP/1.1 200"),
            (MAX_HEAD + 1_024, "HTTP/1.1 431"),
        ] {
            let head = format!(
                "POST /echo HTTP/1.1\r\nHost: x\r\nX-Long: {}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
                "x".repeat(length)
            );
            let answer = rest(&mut connected(address, head.as_bytes()).await).await;
            assert!(answer.starts_with(expected), "{length}: {answer}");
        }
    }

    #[tokio::test]
    // invariant: deadlines
    async fn an_unread_response_is_cut_off_and_an_event_stream_is_not() {
        let paces = Paces {
            answer_pause: Duration::from_millis(300),
            stream_pause: Duration::from_secs(3_600),
            ..Paces::default()
        };
        let (address, ..) = server_within(Limits {
            paces,
            ..Limits::new(64)
        })
        .await;
        let ask = |path: &str| {
            format!("GET {path} HTTP/1.1\r\nHost: x\r\nX-Caller: 1\r\nConnection: close\r\n\r\n")
        };
        let mut unread = connected(address, ask("/large").as_bytes()).await;
        let mut events = connected(address, ask("/events").as_bytes()).await;
        tokio::time::sleep(paces.answer_pause * 4).await;
        assert!(
            rest(&mut unread).await.len() < LARGE,
            "an unread response was not cut off"
        );
        assert!(
            rest(&mut events).await.len() > LARGE,
            "an event stream was cut off"
        );
    }

    #[tokio::test]
    async fn slow_bodies_and_slow_answers_are_not_cut_off() {
        let (address, go, ..) = server(10).await;
        let mut slow = connected(address, WHOLE).await;
        let mut stream = connected(
            address,
            b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 6\r\n\r\n",
        )
        .await;
        for byte in b"abcdef" {
            tokio::time::sleep(HEAD / 2).await;
            stream.write_all(&[*byte]).await.expect("still open");
        }
        assert!(rest(&mut stream).await.ends_with("abcdef"));
        go.add_permits(1);
        assert!(rest(&mut slow).await.ends_with("answer"));
    }

    #[tokio::test]
    async fn idle_connections_are_closed_for_new_ones_and_requests_in_flight_are_not() {
        let (address, go, ..) = server(8).await;
        let mut served = connected(address, WHOLE).await;
        let mut crowd = Vec::new();
        for _ in 0..40 {
            crowd.push(connected(address, b"GET").await);
        }
        let mut late = connected(address, ECHO).await;
        assert!(rest(&mut late).await.ends_with("hi"));
        go.add_permits(1);
        assert!(rest(&mut served).await.ends_with("answer"));
    }

    #[tokio::test]
    async fn a_crowd_with_a_valid_token_fills_only_its_own_share() {
        // 64 connections: eight for a caller.
        let (address, go, ..) = server(64).await;
        let head = |caller: u32| {
            format!(
                "POST /echo HTTP/1.1\r\nHost: x\r\nX-Caller: {caller}\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
            )
        };
        let mut crowd = Vec::new();
        for _ in 0..8 {
            crowd.push(connected(address, format!("{}h", head(1)).as_bytes()).await);
        }
        // Served once the whole crowd is.
        let mut refused = loop {
            let mut another = connected(address, format!("{}hi", head(1)).as_bytes()).await;
            let answer = rest(&mut another).await;
            if !answer.ends_with("hi") {
                break answer;
            }
        };
        assert!(
            refused.starts_with("HTTP/1.1 429") && refused.contains("too_many_requests"),
            "{refused}"
        );
        for caller in 2..20 {
            refused =
                rest(&mut connected(address, format!("{}hi", head(caller)).as_bytes()).await).await;
            assert!(refused.ends_with("hi"), "{refused}");
        }
        for stream in &mut crowd {
            stream.write_all(b"i").await.expect("still open");
            assert!(
                rest(stream).await.ends_with("hi"),
                "a call in flight was cut off"
            );
        }
        drop(go);
    }

    #[test]
    fn there_are_no_more_connections_than_descriptors_allow() {
        for (descriptors, expected) in [
            (None, 4_096),
            (Some(1 << 20), 4_096),
            (Some(16_640), 4_096),
            (Some(16_636), 4_095),
            (Some(1_024), 192),
            (Some(100), 64),
        ] {
            assert_eq!(affordable(4_096, descriptors), expected, "{descriptors:?}");
        }
    }

    #[tokio::test]
    async fn a_shutdown_finishes_requests_in_flight_and_accepts_no_new_ones() {
        let (address, go, stop, serving) = server(16).await;
        let mut open = connected(address, WHOLE).await;
        let mut idle = connected(address, b"").await;
        // Both have been accepted once a third one is served.
        let mut third = connected(address, ECHO).await;
        assert!(rest(&mut third).await.ends_with("hi"));
        stop.cancel();
        assert_eq!(rest(&mut idle).await, "");
        go.add_permits(1);
        assert!(rest(&mut open).await.ends_with("answer"));
        serving.await.expect("served to the end");
        assert!(TcpStream::connect(address).await.is_err());
    }
}

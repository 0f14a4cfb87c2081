//! Serving connections.
//!
//! What must stay true: who connects and says nothing, or half of something, holds up nobody else. A request's head has to come
//! within a limit, and so has the next one on a connection that is kept; connections have a number, and when it is reached the
//! one that has been idle longest makes room. A request that is being served is never cut off by any of this, however long its
//! body or its answer takes.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Semaphore,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

use crate::listen::Bound;

/// Where a request's connection comes from; every request has it among its extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// How long open requests may take after the stop was asked for.
const DRAIN: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
struct Limits {
    connections: usize,
    /// For TLS to shake hands.
    handshake: Duration,
    /// For the head of a request, from the moment when one could come.
    head: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 4_096, handshake: Duration::from_secs(10), head: Duration::from_secs(30) }
    }
}

/// Serves until the token is cancelled, then lets open requests end within a short while.
pub async fn serve(bound: Bound, router: Router, stop: CancellationToken) -> io::Result<()> {
    serve_within(bound, router, stop, Limits::default()).await;
    Ok(())
}

async fn serve_within(bound: Bound, router: Router, stop: CancellationToken, limits: Limits) {
    let (listener, tls) = bound.into_parts();
    let tls = tls.map(TlsAcceptor::from);
    let room = Arc::new(Semaphore::new(limits.connections));
    let guests = Arc::new(Guests::default());
    let connections = TaskTracker::new();
    let accepting = async {
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: the next moment may be better.
                    tracing::warn!(%error, "Accepting a connection failed.");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            if room.available_permits() == 0 {
                guests.dismiss_oldest();
            }
            let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
            drop(stream.set_nodelay(true));
            let (guest, tls, router, stop) = (Guests::admit(&guests), tls.clone(), router.clone(), stop.clone());
            connections.spawn(async move {
                let dismissed = guest.dismissed.clone();
                tokio::select! {
                    () = attend(stream, Peer(peer), tls, router, &guest, stop, limits) => {}
                    () = dismissed.cancelled() => {}
                }
                drop(place);
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

async fn attend(stream: TcpStream, peer: Peer, tls: Option<TlsAcceptor>, router: Router, guest: &Arc<Guest>, stop: CancellationToken, limits: Limits) {
    match tls {
        None => attend_http(stream, peer, router, guest, stop, limits).await,
        Some(tls) => {
            if let Ok(Ok(stream)) = tokio::time::timeout(limits.handshake, tls.accept(stream)).await {
                attend_http(stream, peer, router, guest, stop, limits).await;
            }
        }
    }
}

async fn attend_http(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: Peer,
    router: Router,
    guest: &Arc<Guest>,
    stop: CancellationToken,
    limits: Limits,
) {
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(peer);
        let (router, served) = (router.clone(), guest.serve());
        async move {
            let response = router.oneshot(request).await?;
            Ok::<_, Infallible>(response.map(|body| Body::new(Answer { body, rest: Bytes::new(), _served: served })))
        }
    });
    let connection =
        http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(limits.head).serve_connection(TokioIo::new(stream), service).with_upgrades();
    let mut connection = std::pin::pin!(connection);
    // How a connection ends is its client's business.
    tokio::select! {
        ended = connection.as_mut() => return drop(ended),
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    drop(connection.await);
}

/// The connections on which nothing is being served, by how long that has been so.
#[derive(Debug, Default)]
struct Guests(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    last: u64,
    by_age: BTreeMap<u64, CancellationToken>,
}

impl Guests {
    fn admit(guests: &Arc<Self>) -> Arc<Guest> {
        let guest = Arc::new(Guest { guests: Arc::clone(guests), dismissed: CancellationToken::new(), place: AtomicU64::new(0) });
        guest.wait();
        guest
    }

    fn dismiss_oldest(&self) {
        if let Some((_, dismissed)) = self.0.lock().by_age.pop_first() {
            dismissed.cancel();
        }
    }
}

/// One connection.
#[derive(Debug)]
struct Guest {
    guests: Arc<Guests>,
    dismissed: CancellationToken,
    place: AtomicU64,
}

impl Guest {
    fn wait(&self) {
        let mut waiting = self.guests.0.lock();
        waiting.last += 1;
        let place = waiting.last;
        waiting.by_age.insert(place, self.dismissed.clone());
        self.place.store(place, Ordering::Relaxed);
    }

    /// It is being served for as long as what this gives lives.
    fn serve(self: &Arc<Self>) -> Served {
        self.guests.0.lock().by_age.remove(&self.place.load(Ordering::Relaxed));
        Served(Arc::clone(self))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.guests.0.lock().by_age.remove(self.place.get_mut());
    }
}

struct Served(Arc<Guest>);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// An answer's body; it is being served until the body has been sent.
struct Answer {
    body: Body,
    /// What is left of a large piece: hyper takes a piece into its own memory whole, and asks for the next one only when there
    /// is room, so small pieces keep this here until nearly all has been sent.
    rest: Bytes,
    _served: Served,
}

/// The most that is given to hyper at once.
const PIECE: usize = 64 * 1024;

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
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
    use axum::{
        Extension,
        routing::{get, post},
    };
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::listen::{Tls, prepare};

    const LARGE: usize = 16 << 20;
    const HEAD: Duration = Duration::from_millis(400);
    const WHOLE: &[u8] = b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

    /// A server with small limits; `/slow` answers when it is told to.
    async fn server(connections: usize) -> (SocketAddr, Arc<Semaphore>, CancellationToken, tokio::task::JoinHandle<()>) {
        let bound = prepare(([127, 0, 0, 1], 0).into(), &Tls::default()).expect("prepared").bind().await.expect("bound");
        let (address, stop, go) = (bound.address, CancellationToken::new(), Arc::new(Semaphore::new(0)));
        let waits = Arc::clone(&go);
        let slow = async move || {
            waits.acquire().await.expect("open").forget();
            "answer"
        };
        let router = Router::new().route("/large", get(async || vec![b'x'; LARGE])).route("/slow", get(slow)).route("/echo", post(async |body: String| body));
        let router = router.route("/peer", get(async |Extension(Peer(peer)): Extension<Peer>| peer.to_string()));
        let limits = Limits { connections, head: HEAD, ..Limits::default() };
        let serving = tokio::spawn(serve_within(bound, router, stop.clone(), limits));
        (address, go, stop, serving)
    }

    async fn connected(address: SocketAddr, sent: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        stream.write_all(sent).await.expect("sent");
        stream
    }

    #[tokio::test]
    async fn an_answer_that_is_being_read_slowly_is_not_taken_for_an_idle_connection() {
        let (address, _go, stop, serving) = server(4).await;
        let mut slow = connected(address, b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
        let mut first = [0; 1];
        slow.read_exact(&mut first).await.expect("the answer begins");
        // A crowd that says nothing.
        let mut crowd = Vec::new();
        for _ in 0..12 {
            crowd.push(connected(address, b"").await);
            tokio::task::yield_now().await;
        }
        assert!(rest(&mut slow).await.len() > LARGE, "the answer was cut off");
        stop.cancel();
        drop(crowd);
        serving.await.expect("it ends");
    }

    /// All that comes until the end.
    async fn rest(stream: &mut TcpStream) -> String {
        let mut bytes = Vec::new();
        // A reset is an end as well.
        drop(stream.read_to_end(&mut bytes).await);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    #[tokio::test]
    async fn a_request_knows_where_its_connection_comes_from() {
        let (address, ..) = server(4).await;
        let mut stream = connected(address, b"GET /peer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
        let own = stream.local_addr().expect("an address").to_string();
        assert!(rest(&mut stream).await.ends_with(&own));
    }

    #[tokio::test]
    async fn who_does_not_finish_the_head_of_a_request_is_closed() {
        let (address, ..) = server(10).await;
        for sent in [&b""[..], b"GET /sl", b"GET /slow HTTP/1.1\r\nHost: x\r\n"] {
            let mut stream = connected(address, sent).await;
            assert!(!rest(&mut stream).await.contains("200"), "{sent:?}");
        }
        // Nor is a connection kept for long on which nothing more is asked for.
        let mut stream = connected(address, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi").await;
        assert!(rest(&mut stream).await.ends_with("hi"));
    }

    #[tokio::test]
    async fn slow_bodies_and_slow_answers_are_not_cut_off() {
        let (address, go, ..) = server(10).await;
        let mut slow = connected(address, WHOLE).await;
        let mut stream = connected(address, b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 6\r\n\r\n").await;
        for byte in b"abcdef" {
            tokio::time::sleep(HEAD / 2).await;
            stream.write_all(&[*byte]).await.expect("still open");
        }
        assert!(rest(&mut stream).await.ends_with("abcdef"));
        go.add_permits(1);
        assert!(rest(&mut slow).await.ends_with("answer"));
    }

    #[tokio::test]
    async fn idle_connections_make_room_and_those_that_are_served_stay() {
        let (address, go, ..) = server(4).await;
        let mut served = connected(address, WHOLE).await;
        let mut crowd = Vec::new();
        for _ in 0..40 {
            crowd.push(connected(address, b"GET").await);
        }
        let mut late = connected(address, b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi").await;
        assert!(rest(&mut late).await.ends_with("hi"));
        go.add_permits(1);
        assert!(rest(&mut served).await.ends_with("answer"));
    }

    #[tokio::test]
    async fn a_stop_lets_a_request_end_and_takes_no_new_one() {
        let (address, go, stop, serving) = server(4).await;
        let mut open = connected(address, WHOLE).await;
        let mut idle = connected(address, b"").await;
        // Both are accepted once a third one has been served.
        let mut third = connected(address, b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi").await;
        assert!(rest(&mut third).await.ends_with("hi"));
        stop.cancel();
        assert_eq!(rest(&mut idle).await, "");
        go.add_permits(1);
        assert!(rest(&mut open).await.ends_with("answer"));
        serving.await.expect("served to the end");
        assert!(TcpStream::connect(address).await.is_err());
    }
}

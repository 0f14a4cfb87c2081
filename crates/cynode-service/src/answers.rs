//! Responses buffered in memory while clients read them.
//!
//! A client that requests much and reads nothing would fill the memory. Responses are therefore
//! buffered here, within a budget for each caller and one for all.
//!
//! Invariant: a new response is always accepted. When a budget is exhausted, the response whose
//! reader has been idle longest is evicted: its bytes are freed at once, and its connection is
//! closed before the end, so that a client can't mistake the truncated body for the whole.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use cynode_api::ErrorCode;
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;

use crate::ApiError;

/// Buffered responses of all callers.
pub const MAX_BYTES: usize = 64 * 1024 * 1024;
/// Buffered responses of one caller.
pub const MAX_CALLER_BYTES: usize = 24 * 1024 * 1024;
/// Shorter responses are not counted: the number of connections bounds them.
const UNCOUNTED_BYTES: u64 = 64 * 1024;
/// The piece handed to a connection: a copy, so that evicting a response frees its memory.
const PIECE: usize = 64 * 1024;

static RESPONSES: LazyLock<Arc<ResponseBuffer>> = LazyLock::new(Arc::default);

/// The caller whose budget the response to a request counts against.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Payer(pub u128);

/// Buffers the response to a request within the budgets.
pub async fn buffer(request: Request, next: Next) -> Response {
    let payer = request
        .extensions()
        .get::<Payer>()
        .copied()
        .unwrap_or_default();
    let response = next.run(request).await;
    // Only a body that is completely in memory knows its exact size.
    if response
        .body()
        .size_hint()
        .exact()
        .is_none_or(|size| size <= UNCOUNTED_BYTES)
    {
        return response;
    }
    let (parts, body) = response.into_parts();
    match axum::body::to_bytes(body, usize::MAX).await {
        Ok(bytes) => Response::from_parts(
            parts,
            Body::new(ResponseBuffer::insert(&RESPONSES, payer, bytes)),
        ),
        Err(_) => {
            ApiError::new(ErrorCode::Internal, "the response could not be built").into_response()
        }
    }
}

#[derive(Debug, Default)]
struct ResponseBuffer {
    entries: Mutex<HashMap<u64, Entry>>,
    /// A logical clock, to find the least recently read response.
    clock: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    payer: Payer,
    left: Bytes,
    size: usize,
    read_at: u64,
}

impl ResponseBuffer {
    fn insert(this: &Arc<Self>, payer: Payer, bytes: Bytes) -> BufferedBody {
        let now = this.clock.fetch_add(1, Ordering::Relaxed);
        let size = bytes.len();
        let mut entries = this.entries.lock();
        make_room(
            &mut entries,
            MAX_CALLER_BYTES.saturating_sub(size),
            |entry| entry.payer == payer,
        );
        make_room(&mut entries, MAX_BYTES.saturating_sub(size), |_| true);
        entries.insert(
            now,
            Entry {
                payer,
                left: bytes,
                size,
                read_at: now,
            },
        );
        BufferedBody {
            buffer: Arc::clone(this),
            id: now,
            left: size,
        }
    }

    /// The next piece of a response; `None` if it was evicted.
    fn next(&self, id: u64) -> Option<Bytes> {
        let mut entries = self.entries.lock();
        let entry = entries.get_mut(&id)?;
        entry.read_at = self.clock.fetch_add(1, Ordering::Relaxed);
        let length = entry.left.len().min(PIECE);
        Some(Bytes::copy_from_slice(&entry.left.split_to(length)))
    }
}

/// Evicts the least recently read responses until those that count take at most `room`.
fn make_room(entries: &mut HashMap<u64, Entry>, room: usize, counts: impl Fn(&Entry) -> bool) {
    loop {
        let counted = || entries.iter().filter(|(_, entry)| counts(entry));
        if counted().map(|(_, entry)| entry.size).sum::<usize>() <= room {
            return;
        }
        let Some(oldest) = counted()
            .min_by_key(|(_, entry)| entry.read_at)
            .map(|(id, _)| *id)
        else {
            return;
        };
        entries.remove(&oldest);
        metrics::counter!("cynode_answers_dropped_total").increment(1);
    }
}

/// The body of a buffered response.
#[derive(Debug)]
struct BufferedBody {
    buffer: Arc<ResponseBuffer>,
    id: u64,
    left: usize,
}

impl HttpBody for BufferedBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(match self.buffer.next(self.id) {
            Some(piece) => {
                self.left -= piece.len();
                Ok(Frame::data(piece))
            }
            None => Err(std::io::Error::other(
                "the response was not read in time and was evicted",
            )),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left as u64)
    }
}

impl Drop for BufferedBody {
    fn drop(&mut self) {
        self.buffer.entries.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1024 * 1024;

    fn buffered_bytes(buffer: &ResponseBuffer) -> usize {
        buffer.entries.lock().values().map(|entry| entry.size).sum()
    }

    async fn read(body: BufferedBody) -> Option<usize> {
        axum::body::to_bytes(Body::new(body), usize::MAX)
            .await
            .ok()
            .map(|bytes| bytes.len())
    }

    #[tokio::test]
    async fn the_oldest_unread_responses_of_a_caller_are_dropped_for_newer_ones() {
        let buffer = Arc::new(ResponseBuffer::default());
        let take = |payer: u128| ResponseBuffer::insert(&buffer, Payer(payer), vec![7; MIB].into());
        let other = take(1);
        let (capacity, mut unread) = (MAX_CALLER_BYTES / MIB, Vec::new());
        for _ in 0..capacity {
            unread.push(take(2));
        }
        // All responses that fit are buffered.
        assert_eq!(buffered_bytes(&buffer), MAX_CALLER_BYTES + MIB);
        for _ in 0..40 {
            unread.push(take(2));
        }
        assert_eq!(buffered_bytes(&buffer), MAX_CALLER_BYTES + MIB);
        assert_eq!(
            read(unread.remove(0)).await,
            None,
            "the oldest unread response was not cut off"
        );
        assert_eq!(read(unread.pop().expect("the newest")).await, Some(MIB));
        assert_eq!(read(other).await, Some(MIB));
        drop(unread);
        assert_eq!(buffered_bytes(&buffer), 0);
    }

    #[tokio::test]
    async fn all_callers_share_one_budget_and_a_reader_keeps_its_response() {
        let buffer = Arc::new(ResponseBuffer::default());
        let mut reader = Body::new(ResponseBuffer::insert(
            &buffer,
            Payer(0),
            vec![7; MIB].into(),
        ));
        let mut unread = Vec::new();
        for payer in 1..200 {
            unread.push(ResponseBuffer::insert(
                &buffer,
                Payer(payer),
                vec![7; MIB].into(),
            ));
            assert!(buffered_bytes(&buffer) <= MAX_BYTES);
            if payer % 20 == 0 {
                let frame =
                    std::future::poll_fn(|context| Pin::new(&mut reader).poll_frame(context)).await;
                assert!(frame.is_some_and(|frame| frame.is_ok()));
            }
        }
        // The unread rest is still buffered.
        assert_eq!(
            axum::body::to_bytes(reader, usize::MAX)
                .await
                .map(|bytes| bytes.len())
                .ok(),
            Some(MIB - 9 * PIECE)
        );
    }

    #[tokio::test]
    async fn a_buffered_response_is_unchanged() {
        let router = axum::Router::new()
            .route(
                "/{size}",
                axum::routing::get(
                    async |axum::extract::Path(size): axum::extract::Path<usize>| vec![b'x'; size],
                ),
            )
            .layer(axum::middleware::from_fn(buffer));
        for size in [0, 1, 65_536, 65_537, 3 * MIB + 1] {
            let request = Request::get(format!("/{size}"))
                .body(Body::empty())
                .expect("a request");
            let response = tower::ServiceExt::oneshot(router.clone(), request)
                .await
                .expect("an answer");
            assert_eq!(response.body().size_hint().exact(), Some(size as u64));
            assert_eq!(
                axum::body::to_bytes(response.into_body(), usize::MAX)
                    .await
                    .expect("read")
                    .len(),
                size
            );
        }
    }
}

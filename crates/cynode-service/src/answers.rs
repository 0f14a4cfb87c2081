//! Answers that wait in memory while their callers read them.
//!
//! A caller who asks for much and reads nothing would fill the memory with answers. They are held here instead, within a budget
//! for each caller and one for all.
//!
//! What must stay true: a new answer is always taken. When a budget is used up, the answer whose reader has been idle longest
//! makes room: its bytes are dropped at once, and its connection is closed before the end, so that nobody mistakes what came for
//! the whole.

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

/// Answers of all callers together.
pub const MAX_BYTES: usize = 96 * 1024 * 1024;
/// Answers of one caller.
pub const MAX_CALLER_BYTES: usize = 32 * 1024 * 1024;
/// Shorter answers are not counted: the number of connections bounds them.
const UNCOUNTED_BYTES: u64 = 64 * 1024;
/// What a connection gets at once: a copy, so that dropping an answer frees its memory.
const PIECE: usize = 64 * 1024;

static ANSWERS: LazyLock<Arc<Answers>> = LazyLock::new(Arc::default);

/// Whose budget the answer to a request counts against.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Payer(pub u128);

/// Holds the answer to a request within the budgets.
pub async fn hold(request: Request, next: Next) -> Response {
    let payer = request
        .extensions()
        .get::<Payer>()
        .copied()
        .unwrap_or_default();
    let response = next.run(request).await;
    // Only a body that is in memory as a whole knows its size.
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
        Ok(bytes) => Response::from_parts(parts, Body::new(Answers::take(&ANSWERS, payer, bytes))),
        Err(_) => {
            ApiError::new(ErrorCode::Internal, "the answer could not be made").into_response()
        }
    }
}

#[derive(Debug, Default)]
struct Answers {
    held: Mutex<HashMap<u64, Entry>>,
    /// Counts what happens, so that what happened longest ago can be told.
    clock: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    payer: Payer,
    left: Bytes,
    size: usize,
    read_at: u64,
}

impl Answers {
    fn take(this: &Arc<Self>, payer: Payer, bytes: Bytes) -> Held {
        let now = this.clock.fetch_add(1, Ordering::Relaxed);
        let size = bytes.len();
        let mut held = this.held.lock();
        make_room(&mut held, MAX_CALLER_BYTES.saturating_sub(size), |entry| {
            entry.payer == payer
        });
        make_room(&mut held, MAX_BYTES.saturating_sub(size), |_| true);
        held.insert(
            now,
            Entry {
                payer,
                left: bytes,
                size,
                read_at: now,
            },
        );
        Held {
            answers: Arc::clone(this),
            id: now,
            left: size,
        }
    }

    /// The next piece of an answer; `None` when it had to make room.
    fn next(&self, id: u64) -> Option<Bytes> {
        let mut held = self.held.lock();
        let entry = held.get_mut(&id)?;
        entry.read_at = self.clock.fetch_add(1, Ordering::Relaxed);
        let length = entry.left.len().min(PIECE);
        Some(Bytes::copy_from_slice(&entry.left.split_to(length)))
    }
}

/// Drops the answers that were read from longest ago, until those that count take at most `room`.
fn make_room(held: &mut HashMap<u64, Entry>, room: usize, counts: impl Fn(&Entry) -> bool) {
    loop {
        let counted = || held.iter().filter(|(_, entry)| counts(entry));
        if counted().map(|(_, entry)| entry.size).sum::<usize>() <= room {
            return;
        }
        let Some(oldest) = counted()
            .min_by_key(|(_, entry)| entry.read_at)
            .map(|(id, _)| *id)
        else {
            return;
        };
        held.remove(&oldest);
        metrics::counter!("cynode_answers_dropped_total").increment(1);
    }
}

/// The body of an answer that is held.
#[derive(Debug)]
struct Held {
    answers: Arc<Answers>,
    id: u64,
    left: usize,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(match self.answers.next(self.id) {
            Some(piece) => {
                self.left -= piece.len();
                Ok(Frame::data(piece))
            }
            None => Err(std::io::Error::other(
                "the answer was not read in time and made room for others",
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

impl Drop for Held {
    fn drop(&mut self) {
        self.answers.held.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1024 * 1024;

    fn held_bytes(answers: &Answers) -> usize {
        answers.held.lock().values().map(|entry| entry.size).sum()
    }

    async fn read(body: Held) -> Option<usize> {
        axum::body::to_bytes(Body::new(body), usize::MAX)
            .await
            .ok()
            .map(|bytes| bytes.len())
    }

    #[tokio::test]
    async fn unread_answers_of_a_caller_make_room_for_newer_ones_and_others_are_not_touched() {
        let answers = Arc::new(Answers::default());
        let take = |payer: u128| Answers::take(&answers, Payer(payer), vec![7; MIB].into());
        let other = take(1);
        let (most, mut unread) = (MAX_CALLER_BYTES / MIB, Vec::new());
        for _ in 0..most {
            unread.push(take(2));
        }
        // As many as fit are all there.
        assert_eq!(held_bytes(&answers), MAX_CALLER_BYTES + MIB);
        for _ in 0..40 {
            unread.push(take(2));
        }
        assert_eq!(held_bytes(&answers), MAX_CALLER_BYTES + MIB);
        assert_eq!(
            read(unread.remove(0)).await,
            None,
            "it was cut off, not ended"
        );
        assert_eq!(read(unread.pop().expect("the newest")).await, Some(MIB));
        assert_eq!(read(other).await, Some(MIB));
        drop(unread);
        assert_eq!(held_bytes(&answers), 0);
    }

    #[tokio::test]
    async fn all_callers_together_stay_within_the_budget_and_who_reads_keeps_its_answer() {
        let answers = Arc::new(Answers::default());
        let mut reader = Body::new(Answers::take(&answers, Payer(0), vec![7; MIB].into()));
        let mut unread = Vec::new();
        for payer in 1..200 {
            unread.push(Answers::take(&answers, Payer(payer), vec![7; MIB].into()));
            assert!(held_bytes(&answers) <= MAX_BYTES);
            if payer % 20 == 0 {
                let frame =
                    std::future::poll_fn(|context| Pin::new(&mut reader).poll_frame(context)).await;
                assert!(frame.is_some_and(|frame| frame.is_ok()));
            }
        }
        // What it had not read yet is still there.
        assert_eq!(
            axum::body::to_bytes(reader, usize::MAX)
                .await
                .map(|bytes| bytes.len())
                .ok(),
            Some(MIB - 9 * PIECE)
        );
    }

    #[tokio::test]
    async fn an_answer_is_the_same_through_here() {
        let router = axum::Router::new()
            .route(
                "/{size}",
                axum::routing::get(
                    async |axum::extract::Path(size): axum::extract::Path<usize>| vec![b'x'; size],
                ),
            )
            .layer(axum::middleware::from_fn(hold));
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

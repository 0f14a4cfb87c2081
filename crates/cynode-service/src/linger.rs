//! Drains the rest of a refused body, within bounds, so that the refusal arrives. Closing a
//! connection while the client still sends resets it, and the client may lose the response.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, BodyDataStream, Bytes, HttpBody as _},
    extract::Request,
    middleware::Next,
    response::Response,
};
use futures_util::{Stream, StreamExt as _};
use http::header;

const MAX_DRAINED_BYTES: usize = 128 * 1024 * 1024;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Drains the body of every request whose handler drops it early.
pub async fn drain_body(request: Request, next: Next) -> Response {
    let expects_continue = request.headers().contains_key(header::EXPECT);
    let request = request.map(|body| {
        if body.is_end_stream() {
            body
        } else {
            Body::from_stream(DrainedBody {
                rest: Some(body.into_data_stream()),
                expects_continue,
            })
        }
    });
    next.run(request).await
}

/// A body that is drained in the background if its reader drops it early.
struct DrainedBody {
    /// `None` after the end.
    rest: Option<BodyDataStream>,
    /// The client waits for `100 Continue`, which reading would send.
    expects_continue: bool,
}

impl Stream for DrainedBody {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.expects_continue = false;
        let Some(rest) = &mut self.rest else {
            return Poll::Ready(None);
        };
        let piece = rest.poll_next_unpin(context);
        if !matches!(piece, Poll::Pending | Poll::Ready(Some(Ok(_)))) {
            self.rest = None;
        }
        piece
    }
}

impl Drop for DrainedBody {
    fn drop(&mut self) {
        let Some(mut rest) = self.rest.take().filter(|_| !self.expects_continue) else {
            return;
        };
        tokio::spawn(tokio::time::timeout(DRAIN_TIMEOUT, async move {
            let mut left = MAX_DRAINED_BYTES;
            while let Some(Ok(piece)) = rest.next().await {
                left = left.saturating_sub(piece.len());
                if left == 0 {
                    return;
                }
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    fn body(
        seen: &std::sync::Arc<parking_lot::Mutex<usize>>,
        expects_continue: bool,
    ) -> DrainedBody {
        let seen = std::sync::Arc::clone(seen);
        let pieces = stream::iter((0..10).map(Ok::<_, std::io::Error>)).map(move |piece| {
            *seen.lock() += 1;
            piece.map(|_: i32| Bytes::from_static(b"piece"))
        });
        DrainedBody {
            rest: Some(Body::from_stream(pieces).into_data_stream()),
            expects_continue,
        }
    }

    #[tokio::test]
    async fn an_unread_body_is_drained_unless_the_caller_waits_for_100_continue() {
        for (expects_continue, read_before, expected) in [
            (false, 0, 10),
            (false, 3, 10),
            (true, 0, 0),
            (true, 1, 10),
            (false, 10, 10),
        ] {
            let seen = std::sync::Arc::default();
            let mut body = body(&seen, expects_continue);
            for _ in 0..read_before {
                assert!(matches!(body.next().await, Some(Ok(_))));
            }
            drop(body);
            // Lets the background task run.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(
                *seen.lock(),
                expected,
                "expects_continue: {expects_continue}, read before: {read_before}"
            );
        }
    }
}

//! A refusal must arrive. A connection that is closed while its caller still sends takes an answer that the caller has not
//! read yet down with it, so what is left of a body is read away, within bounds, while the answer is on its way.

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

const MOST_BYTES: usize = 128 * 1024 * 1024;
const LONGEST: Duration = Duration::from_secs(10);

pub async fn read_away(request: Request, next: Next) -> Response {
    let waits = request.headers().contains_key(header::EXPECT);
    let request = request.map(|body| {
        if body.is_end_stream() {
            body
        } else {
            Body::from_stream(Lingering {
                rest: Some(body.into_data_stream()),
                waits,
            })
        }
    });
    next.run(request).await
}

/// A body that is read to its end, by whoever it is for or, when they drop it, by nobody.
struct Lingering {
    /// Until its end.
    rest: Option<BodyDataStream>,
    /// The caller sends nothing before it is asked to; reading would ask.
    waits: bool,
}

impl Stream for Lingering {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.waits = false;
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

impl Drop for Lingering {
    fn drop(&mut self) {
        let Some(mut rest) = self.rest.take().filter(|_| !self.waits) else {
            return;
        };
        tokio::spawn(tokio::time::timeout(LONGEST, async move {
            let mut left = MOST_BYTES;
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

    fn body(seen: &std::sync::Arc<parking_lot::Mutex<usize>>, waits: bool) -> Lingering {
        let seen = std::sync::Arc::clone(seen);
        let pieces = stream::iter((0..10).map(Ok::<_, std::io::Error>)).map(move |piece| {
            *seen.lock() += 1;
            piece.map(|_: i32| Bytes::from_static(b"piece"))
        });
        Lingering {
            rest: Some(Body::from_stream(pieces).into_data_stream()),
            waits,
        }
    }

    #[tokio::test]
    async fn what_nobody_reads_is_read_away_unless_the_caller_waits() {
        for (waits, read_before, expected) in [
            (false, 0, 10),
            (false, 3, 10),
            (true, 0, 0),
            (true, 1, 10),
            (false, 10, 10),
        ] {
            let seen = std::sync::Arc::default();
            let mut body = body(&seen, waits);
            for _ in 0..read_before {
                assert!(matches!(body.next().await, Some(Ok(_))));
            }
            drop(body);
            // The reader in the background has its turn.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(
                *seen.lock(),
                expected,
                "waits: {waits}, read before: {read_before}"
            );
        }
    }
}

//! Timeouts of request bodies. A client that stalls in the middle of a body holds a connection, a
//! session and the reader of the body, so a body has a maximum pause, a minimum rate and a total
//! time. Only the client's time counts: the clock runs only while the server waits for the next
//! piece.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    middleware::Next,
    response::Response,
};
use cynode_api::ErrorCode;
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::{ApiError, connections::Connection, pace::Pace};

/// The longest pause between two pieces of a body.
pub const MAX_PAUSE: Duration = Duration::from_secs(30);
/// The time before the minimum rate applies, the rate in bytes per second, and the total time of a
/// body.
const SLACK: Duration = Duration::from_secs(60);
const RATE: u64 = 1_024;
const MAX_TIME: Duration = Duration::from_secs(3_600);
const PACE: Pace = Pace {
    slack: SLACK,
    rate: RATE,
    total: MAX_TIME,
};
/// The total time of an unauthenticated body.
const MAX_UNAUTHENTICATED_TIME: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum BodyTimeout {
    #[error("no data of the body arrived for {} s", .0.as_secs())]
    Pause(Duration),
    #[error(
        "the body arrived too slowly: after {} s it needs a rate of {} bytes per second, \
         and all of it must arrive within {} s",
        .0.slack.as_secs(), .0.rate, .0.total.as_secs()
    )]
    Rate(Pace),
}

/// Applies the timeouts to the body of every request.
pub async fn limit_pauses(request: Request, next: Next) -> Response {
    let connection = request.extensions().get::<Connection>().cloned();
    let limited = |body: Body| {
        if body.is_end_stream() {
            body
        } else {
            Body::new(TimedBody::new(body, MAX_PAUSE, PACE, connection))
        }
    };
    next.run(request.map(limited)).await
}

/// The problem for a failed read of a body: a timeout, or `otherwise` for any other cause.
pub fn problem(error: &(dyn std::error::Error + 'static), otherwise: &str) -> ApiError {
    let mut error = Some(error);
    while let Some(inner) = error {
        if let Some(timeout) = inner.downcast_ref::<BodyTimeout>() {
            return ApiError::new(ErrorCode::RequestTimeout, timeout.to_string());
        }
        error = inner.source();
    }
    ApiError::invalid(otherwise)
}

struct TimedBody {
    body: Body,
    pause: Duration,
    pace: Pace,
    /// Notified while the server waits for an unauthenticated body.
    connection: Option<Connection>,
    is_awaited: bool,
    bytes: u64,
    /// Total time spent waiting for pieces, except the current one.
    waited: Duration,
    /// The start of the current wait, and its timeout.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl TimedBody {
    const fn new(body: Body, pause: Duration, pace: Pace, connection: Option<Connection>) -> Self {
        Self {
            body,
            pause,
            pace,
            connection,
            is_awaited: false,
            bytes: 0,
            waited: Duration::ZERO,
            waiting: None,
        }
    }

    /// The time left for the bytes received so far.
    fn left(&self) -> Duration {
        let is_known = self
            .connection
            .as_ref()
            .is_none_or(Connection::is_authenticated);
        let total = if is_known {
            self.pace.total
        } else {
            self.pace.total.min(MAX_UNAUTHENTICATED_TIME)
        };
        Pace { total, ..self.pace }
            .allowance(self.bytes)
            .saturating_sub(self.waited)
    }

    fn arrived(&mut self) {
        if self.is_awaited
            && let Some(connection) = &self.connection
        {
            connection.mark_body_ended();
        }
        self.is_awaited = false;
    }
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(piece) = Pin::new(&mut self.body).poll_frame(context) {
            if let Some((since, _)) = self.waiting.take() {
                self.waited += since.elapsed();
            }
            match &piece {
                Some(Ok(frame)) => {
                    self.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                }
                Some(Err(_)) | None => self.arrived(),
            }
            return Poll::Ready(piece);
        }
        if !self.is_awaited {
            self.is_awaited = true;
            if let Some(connection) = &self.connection {
                connection.mark_waiting_for_body();
            }
        }
        let limit = self.pause.min(self.left());
        let (_, timer) = self
            .waiting
            .get_or_insert_with(|| (Instant::now(), Box::pin(tokio::time::sleep(limit))));
        ready!(timer.as_mut().poll(context));
        let timeout = if limit < self.pause {
            BodyTimeout::Rate(self.pace)
        } else {
            BodyTimeout::Pause(self.pause)
        };
        Poll::Ready(Some(Err(axum::Error::new(timeout))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TimedBody {
    fn drop(&mut self) {
        self.arrived();
    }
}

#[cfg(test)]
mod tests {
    use axum::{Router, middleware, routing::post};
    use serde::Deserialize;
    use tower::ServiceExt as _;

    use super::*;
    use crate::JsonBody;

    const LIMIT: Duration = Duration::from_millis(200);
    const FOREVER: Duration = Duration::from_secs(3_600);
    const EASY: Pace = Pace {
        slack: FOREVER,
        rate: 0,
        total: FOREVER,
    };

    #[derive(Deserialize)]
    struct Empty {}

    /// A body whose pieces arrive after the given pauses.
    struct Slow(Vec<Duration>, Option<Pin<Box<Sleep>>>);

    impl HttpBody for Slow {
        type Data = Bytes;
        type Error = axum::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
            let Some(pause) = self.0.first().copied() else {
                return Poll::Ready(None);
            };
            ready!(
                self.1
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep(pause)))
                    .as_mut()
                    .poll(context)
            );
            self.1 = None;
            self.0.remove(0);
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b" ")))))
        }
    }

    async fn status(pauses: Vec<Duration>, pace: Pace) -> u16 {
        let limit = move |body| Body::new(TimedBody::new(body, LIMIT, pace, None));
        let limited = move |request: Request, next: Next| next.run(request.map(limit));
        let router = Router::new()
            .route("/", post(async |JsonBody(Empty {}): JsonBody<Empty>| ()))
            .layer(middleware::from_fn(limited));
        let mut body = pauses;
        body.insert(0, Duration::ZERO);
        let request = Request::post("/")
            .body(Body::new(Slow(body, None)))
            .expect("a request");
        router
            .oneshot(request)
            .await
            .expect("an answer")
            .status()
            .as_u16()
    }

    #[tokio::test]
    async fn a_stalled_body_is_refused_and_a_slow_one_is_not() {
        // Blanks alone are not an object: a 400 shows that the body was read to its end.
        assert_eq!(status(vec![LIMIT / 5; 10], EASY).await, 400);
        assert_eq!(status(vec![LIMIT / 5, FOREVER], EASY).await, 408);
    }

    #[tokio::test]
    // invariant: deadlines
    async fn a_body_below_its_rate_or_beyond_its_total_time_is_refused() {
        // Each pause alone is short enough.
        let trickle = vec![LIMIT / 20; 10_000];
        assert_eq!(
            status(
                trickle.clone(),
                Pace {
                    slack: LIMIT,
                    rate: 1_000,
                    total: FOREVER
                }
            )
            .await,
            408
        );
        assert_eq!(
            status(
                trickle,
                Pace {
                    slack: FOREVER,
                    rate: 1,
                    total: LIMIT
                }
            )
            .await,
            408
        );
        assert_eq!(
            status(
                vec![LIMIT / 20; 10],
                Pace {
                    slack: 50 * LIMIT,
                    rate: 1_000,
                    total: FOREVER
                }
            )
            .await,
            400
        );
    }

    #[test]
    fn the_remaining_time_depends_on_bytes_and_waiting() {
        let body = |bytes, waited| {
            let mut body = TimedBody::new(Body::empty(), MAX_PAUSE, PACE, None);
            (body.bytes, body.waited) = (bytes, Duration::from_secs(waited));
            body
        };
        for (bytes, waited, left) in [
            (0, 0, 60),
            (0, 60, 0),
            (1_024, 60, 1),
            (10 << 20, 3_599, 1),
            (1 << 30, 3_600, 0),
        ] {
            assert_eq!(
                body(bytes, waited).left().as_secs(),
                left,
                "{bytes} bytes after {waited} s"
            );
        }
    }

    #[tokio::test]
    async fn only_the_callers_own_pauses_count() {
        let mut body = TimedBody::new(Body::new(Slow(vec![LIMIT / 5; 3], None)), LIMIT, EASY, None);
        let mut piece =
            async || std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        while let Some(next) = piece().await {
            assert!(next.is_ok());
            tokio::time::sleep(2 * LIMIT).await;
        }
    }
}

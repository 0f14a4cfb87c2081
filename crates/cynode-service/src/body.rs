//! Bodies that come too slowly. A caller who sends half a body and then nothing, or a byte now and then, holds a connection, a session
//! and whatever takes the body inside; so a body has a longest pause, a least rate and a total time. Only the caller's time counts: while
//! nobody here asks for the next piece, the clock stands.

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
/// The time before the rate of a body counts, bytes a second, and the time for all of it.
const SLACK: Duration = Duration::from_secs(60);
const RATE: u64 = 1_024;
const MAX_TIME: Duration = Duration::from_secs(3_600);
const PACE: Pace = Pace {
    slack: SLACK,
    rate: RATE,
    total: MAX_TIME,
};
/// The time for all of a body whose caller is not known.
const MAX_UNAUTHENTICATED_TIME: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum Late {
    #[error("no byte of the body came for {} s", .0.as_secs())]
    Pause(Duration),
    #[error("the body came too slowly: after {} s it must come with {} bytes a second, and be whole within {} s", .0.slack.as_secs(), .0.rate, .0.total.as_secs())]
    Rate(Pace),
}

/// Gives every request's body these limits.
pub async fn limit_pauses(request: Request, next: Next) -> Response {
    let connection = request.extensions().get::<Connection>().cloned();
    let limited = |body: Body| {
        if body.is_end_stream() {
            body
        } else {
            Body::new(Impatient::new(body, MAX_PAUSE, PACE, connection))
        }
    };
    next.run(request.map(limited)).await
}

/// The problem of a body that could not be read to its end; `otherwise` says it when the caller's slowness is not the reason.
pub fn problem(error: &(dyn std::error::Error + 'static), otherwise: &str) -> ApiError {
    let mut error = Some(error);
    while let Some(inner) = error {
        if let Some(late) = inner.downcast_ref::<Late>() {
            return ApiError::new(ErrorCode::RequestTimeout, late.to_string());
        }
        error = inner.source();
    }
    ApiError::invalid(otherwise)
}

struct Impatient {
    body: Body,
    pause: Duration,
    pace: Pace,
    /// Told while the body of an unauthenticated request is awaited.
    connection: Option<Connection>,
    is_awaited: bool,
    bytes: u64,
    /// How long pieces were waited for, without the next.
    waited: Duration,
    /// Since when somebody waits for the next piece, and how long that may take.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Impatient {
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

    /// What is left of the time that these many bytes may take.
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
            connection.resume();
        }
        self.is_awaited = false;
    }
}

impl HttpBody for Impatient {
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
                    self.bytes += frame.data_ref().map_or(0, |data| data.len() as u64)
                }
                Some(Err(_)) | None => self.arrived(),
            }
            return Poll::Ready(piece);
        }
        if !self.is_awaited {
            self.is_awaited = true;
            if let Some(connection) = &self.connection {
                connection.await_body();
            }
        }
        let limit = self.pause.min(self.left());
        let (_, timer) = self
            .waiting
            .get_or_insert_with(|| (Instant::now(), Box::pin(tokio::time::sleep(limit))));
        ready!(timer.as_mut().poll(context));
        let late = if limit < self.pause {
            Late::Rate(self.pace)
        } else {
            Late::Pause(self.pause)
        };
        Poll::Ready(Some(Err(axum::Error::new(late))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Impatient {
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

    /// A body whose pieces come one by one after the given pauses.
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
        let limit = move |body| Body::new(Impatient::new(body, LIMIT, pace, None));
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
    async fn a_body_that_stops_coming_is_refused_and_a_slow_one_is_not() {
        // Blanks alone are not an object: that refusal shows that the body was read to its end.
        assert_eq!(status(vec![LIMIT / 5; 10], EASY).await, 400);
        assert_eq!(status(vec![LIMIT / 5, FOREVER], EASY).await, 408);
    }

    #[tokio::test]
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
    fn the_time_that_is_left_follows_from_the_bytes_and_the_waiting() {
        let body = |bytes, waited| {
            let mut body = Impatient::new(Body::empty(), MAX_PAUSE, PACE, None);
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
        let mut body = Impatient::new(Body::new(Slow(vec![LIMIT / 5; 3], None)), LIMIT, EASY, None);
        let mut piece =
            async || std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        while let Some(next) = piece().await {
            assert!(next.is_ok());
            tokio::time::sleep(2 * LIMIT).await;
        }
    }
}

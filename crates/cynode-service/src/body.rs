//! Bodies that stop coming. A caller who sends half a body and then nothing holds a connection, a session and whatever takes
//! the body inside; so a pause between two pieces has a limit. Only the caller's pauses count: while nobody here asks for the
//! next piece, the clock stands.

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
use tokio::time::Sleep;

use crate::ApiError;

/// The longest pause between two pieces of a body.
const MAX_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
#[error("no byte of the body came for {} s", .0.as_secs())]
struct Paused(Duration);

/// Gives every request's body that limit.
pub async fn limit_pauses(request: Request, next: Next) -> Response {
    next.run(request.map(|body| if body.is_end_stream() { body } else { Body::new(Impatient::new(body, MAX_PAUSE)) })).await
}

/// The problem of a body that could not be read to its end; `otherwise` says it when the caller's pause is not the reason.
pub fn problem(error: &(dyn std::error::Error + 'static), otherwise: &str) -> ApiError {
    let mut error = Some(error);
    while let Some(inner) = error {
        if let Some(paused) = inner.downcast_ref::<Paused>() {
            return ApiError::new(ErrorCode::RequestTimeout, paused.to_string());
        }
        error = inner.source();
    }
    ApiError::invalid(otherwise)
}

struct Impatient {
    body: Body,
    limit: Duration,
    /// Since somebody waits for the next piece.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    const fn new(body: Body, limit: Duration) -> Self {
        Self { body, limit, waiting: None }
    }
}

impl HttpBody for Impatient {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(piece) = Pin::new(&mut self.body).poll_frame(context) {
            self.waiting = None;
            return Poll::Ready(piece);
        }
        let limit = self.limit;
        ready!(self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit))).as_mut().poll(context));
        Poll::Ready(Some(Err(axum::Error::new(Paused(limit)))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
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

    #[derive(Deserialize)]
    struct Empty {}

    /// A body whose pieces come one by one after the given pauses.
    struct Slow(Vec<Duration>, Option<Pin<Box<Sleep>>>);

    impl HttpBody for Slow {
        type Data = Bytes;
        type Error = axum::Error;

        fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
            let Some(pause) = self.0.first().copied() else { return Poll::Ready(None) };
            ready!(self.1.get_or_insert_with(|| Box::pin(tokio::time::sleep(pause))).as_mut().poll(context));
            self.1 = None;
            self.0.remove(0);
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b" ")))))
        }
    }

    async fn status(pauses: Vec<Duration>) -> u16 {
        let limited = async |request: Request, next: Next| next.run(request.map(|body| Body::new(Impatient::new(body, LIMIT)))).await;
        let router = Router::new().route("/", post(async |JsonBody(Empty {}): JsonBody<Empty>| ())).layer(middleware::from_fn(limited));
        let mut body = pauses;
        body.insert(0, Duration::ZERO);
        let request = Request::post("/").body(Body::new(Slow(body, None))).expect("a request");
        router.oneshot(request).await.expect("an answer").status().as_u16()
    }

    #[tokio::test]
    async fn a_body_that_stops_coming_is_refused_and_a_slow_one_is_not() {
        // Blanks alone are not an object: that refusal shows that the body was read to its end.
        assert_eq!(status(vec![LIMIT / 5; 10]).await, 400);
        assert_eq!(status(vec![LIMIT / 5, Duration::from_secs(3_600)]).await, 408);
    }

    #[tokio::test]
    async fn only_the_callers_own_pauses_count() {
        let mut body = Impatient::new(Body::new(Slow(vec![LIMIT / 5; 3], None)), LIMIT);
        let mut piece = async || std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        while let Some(next) = piece().await {
            assert!(next.is_ok());
            tokio::time::sleep(2 * LIMIT).await;
        }
    }
}

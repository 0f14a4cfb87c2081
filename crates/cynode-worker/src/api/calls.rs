//! Looks up the outcome of a call.

use axum::{Json, extract::State};
use cynode_api::{Call, CallId, ErrorCode, Problem};
use cynode_service::ApiError;

use super::{
    Api,
    sessions::{Id, parse_id},
};

impl<S: Send + Sync> axum::extract::FromRequestParts<S> for Id<CallId> {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut http::request::Parts,
        state: &S,
    ) -> Result<Self, Self::Rejection> {
        let path =
            axum::extract::Path::<std::collections::HashMap<String, String>>::from_request_parts(
                parts, state,
            )
            .await
            .map_err(|error| ApiError::invalid(error.body_text()))?;
        parse_id(&path, "id", ErrorCode::NotFound).map(Id)
    }
}

/// Look up the outcome of a call by its id in `X-Cynode-Call`. An unknown call is a valid answer,
/// too.
#[utoipa::path(get, path = "/v1/worker/calls/{id}", tag = "calls", params(("id" = CallId, Path)),
    responses(
        (status = 200, body = Call),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(State(api): State<Api>, Id(id): Id<CallId>) -> Json<Call> {
    Json(api.calls.get(id))
}

/// Look up the outcome of a call and, if it has not arrived, reject it should it still arrive.
#[utoipa::path(post, path = "/v1/worker/calls/{id}/bar", tag = "calls",
    params(("id" = CallId, Path)),
    responses(
        (status = 200, body = Call),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn bar(State(api): State<Api>, Id(id): Id<CallId>) -> Json<Call> {
    Json(api.calls.bar(id))
}

//! Lists the images in the node's store. The orchestrator calls this when an image is added, rather
//! than wait for the next heartbeat.

use axum::{Json, extract::State};
use cynode_api::{ErrorCode, LocalImages, Problem};
use cynode_service::ApiError;

use super::Api;

/// List the images in the node's store.
#[utoipa::path(get, path = "/v1/worker/images", tag = "images",
    responses(
        (status = 200, body = LocalImages),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(State(api): State<Api>) -> Result<Json<LocalImages>, ApiError> {
    let items = api
        .sessions
        .runtime
        .images()
        .await
        .map_err(|error| ApiError::new(ErrorCode::RuntimeUnavailable, error.to_string()))?;
    Ok(Json(LocalImages { items }))
}

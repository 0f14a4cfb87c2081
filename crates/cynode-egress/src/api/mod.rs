//! The role's HTTP API, for orchestrators.

mod errors;
mod promotions;
mod repositories;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, FromRef, Request, State},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{get, post, put},
};
use cynode_api::{API_VERSION, Base64Bytes, EgressInfo, EgressState, ErrorCode, egress_limits};
use cynode_service::{
    ApiError, JsonBody, admin,
    auth::{self, Tokens},
    body,
    edge::{self, BodyLimit},
    linger,
};
use http::StatusCode;
use tokio_util::sync::CancellationToken;

use crate::{operation::GitRole, role::ROLE, state::StateError, trail::RoleTrail};

#[derive(Clone, Debug)]
pub(crate) struct Api {
    pub(crate) role: Arc<GitRole>,
    trail: RoleTrail,
    stop: CancellationToken,
}

impl Api {
    pub(crate) fn new(role: Arc<GitRole>, trail: RoleTrail, stop: CancellationToken) -> Self {
        Self { role, trail, stop }
    }
}

impl FromRef<Api> for RoleTrail {
    fn from_ref(api: &Api) -> Self {
        api.trail.clone()
    }
}

impl FromRef<Api> for CancellationToken {
    fn from_ref(api: &Api) -> Self {
        api.stop.clone()
    }
}

pub(crate) fn router(api: Api, tokens: Tokens, metrics: admin::MetricsReader) -> Router {
    let readiness = readiness(api.clone());
    let stop = api.stop.clone();
    let rules = Router::new()
        .route("/v1/egress/state", put(put_state))
        .layer(middleware::from_fn(allow_large_rules));
    Router::new()
        .route("/v1/egress", get(info))
        .route("/v1/egress/git/resolve", post(repositories::resolve))
        .route("/v1/egress/git/seeds", post(repositories::seed))
        .route("/v1/egress/git/pushes", post(promotions::push))
        .route("/v1/egress/git/pulls", post(promotions::pull))
        .merge(crate::trail_api::routes())
        .layer(DefaultBodyLimit::max(edge::MAX_BODY))
        // These enforce their own limits.
        .merge(
            rules
                .route("/v1/egress/git/commits", post(promotions::commit))
                .layer(DefaultBodyLimit::disable()),
        )
        .layer(middleware::from_fn(edge::measure))
        .layer(middleware::from_fn_with_state(stop, reject_when_stopping))
        .layer(middleware::from_fn_with_state(tokens, auth::require))
        .merge(admin::routes(readiness, metrics))
        .fallback(edge::not_found)
        .method_not_allowed_fallback(edge::method_not_allowed)
        .layer(middleware::from_fn(edge::request_id))
        .layer(middleware::from_fn(body::limit_pauses))
        .layer(middleware::from_fn(linger::drain_body))
        .with_state(api)
}

/// Not ready without records or rules. An orchestrator sends the rules within seconds.
fn readiness(api: Api) -> admin::Readiness {
    Arc::new(move || {
        let result = api.trail.check().and_then(|()| {
            api.role
                .rules
                .fresh()
                .map(drop)
                .map_err(|stale| stale.to_string())
        });
        Box::pin(std::future::ready(result))
    })
}

async fn reject_when_stopping(
    State(stop): State<CancellationToken>,
    request: Request,
    next: Next,
) -> Response {
    if stop.is_cancelled() {
        ApiError::new(ErrorCode::ShuttingDown, "the git role is shutting down").into_response()
    } else {
        next.run(request).await
    }
}

async fn allow_large_rules(mut request: Request, next: Next) -> Response {
    request
        .extensions_mut()
        .insert(BodyLimit(egress_limits::MAX_STATE_BYTES));
    next.run(request).await
}

async fn info(State(api): State<Api>) -> Json<EgressInfo> {
    Json(EgressInfo {
        version: API_VERSION,
        role: ROLE.to_owned(),
        key_id: api.role.vault.key_id(),
        public_key: Base64Bytes(api.role.vault.public_key().to_vec()),
        instance: api.role.instance,
    })
}

async fn put_state(
    State(api): State<Api>,
    JsonBody(state): JsonBody<EgressState>,
) -> Result<StatusCode, ApiError> {
    check_version(state.version)?;
    // Compiling policies takes long.
    let put = tokio::task::spawn_blocking(move || api.role.rules.put(state));
    put.await
        .map_err(|_| ApiError::new(ErrorCode::Internal, "compiling the rules failed"))?
        .map_err(|error| {
            let code = match &error {
                StateError::Older { .. } => ErrorCode::StateOutdated,
                StateError::TooMany(_) => ErrorCode::TooLarge,
                StateError::Duplicate(_) | StateError::Listener(_) => ErrorCode::InvalidRequest,
                StateError::Policies(_) => ErrorCode::PolicyInvalid,
            };
            ApiError::new(code, error.to_string())
        })?;
    Ok(StatusCode::NO_CONTENT)
}

/// Refuses bodies of another version.
fn check_version(version: u32) -> Result<(), ApiError> {
    if version == API_VERSION {
        Ok(())
    } else {
        Err(ApiError::new(
            ErrorCode::UnsupportedVersion,
            format!("version {version} is not known here"),
        ))
    }
}

/// Runs an operation to its end even if its caller leaves: what has begun is recorded.
async fn to_the_end<T: Send + 'static>(
    operation: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::spawn(operation)
        .await
        .unwrap_or_else(|_| Err(ApiError::new(ErrorCode::Internal, "the operation failed")))
}

//! The Worker API.

mod calls;
mod edit;
mod execs;
mod files;
mod images;
mod jobs;
mod output;
mod patch;
mod pty;
mod sessions;
mod watch;

use std::sync::Arc;

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::get,
};
use cynode_api::ErrorCode;
use cynode_service::{
    ApiError, JsonBody, admin, answers,
    auth::{self, Tokens},
    body,
    describe::{self, Bearer},
    edge, linger,
};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    calls::{Calls, remember},
    jobs::Jobs,
    sessions::{Live, Sessions},
};

#[derive(Clone, Debug)]
pub(crate) struct Api {
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) stop: CancellationToken,
    /// Set if the shutdown also ends the sandboxes.
    pub(crate) end_sandboxes: Arc<std::sync::atomic::AtomicBool>,
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "CyNode Worker API",
        description = "Sessions, jobs, commands and files on one node. Errors are RFC 9457 problem \
            documents. The header `X-Cynode-Result` of a response reports as JSON what a call on a \
            session changed; the outcome of a call with a UUID in `X-Cynode-Call` can be looked up \
            under that id.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    modifiers(&Bearer),
    components(schemas(cynode_api::Problem, cynode_api::ErrorCode, cynode_api::StreamEvent))
)]
struct ApiDocument;

fn documented() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(ApiDocument::openapi())
        .routes(routes!(sessions::create, sessions::list))
        .routes(routes!(sessions::show, sessions::patch))
        .routes(routes!(sessions::end))
        .routes(routes!(sessions::resume))
        .routes(routes!(sessions::signal))
        .routes(routes!(execs::list))
        .routes(routes!(execs::show))
        .routes(routes!(execs::output))
        .routes(routes!(execs::signal))
        .routes(routes!(execs::stdin))
        .routes(routes!(files::list))
        .routes(routes!(files::search))
        .routes(routes!(edit::edit))
        .routes(routes!(watch::watch))
        .routes(routes!(files::rename))
        .routes(routes!(files::mkdir))
        .routes(routes!(files::export))
        .routes(routes!(pty::open))
        .routes(routes!(jobs::run))
        .routes(routes!(jobs::list))
        .routes(routes!(jobs::show))
        .routes(routes!(jobs::output))
        .routes(routes!(jobs::artifact))
        .routes(routes!(jobs::acknowledge))
        .routes(routes!(jobs::stop))
        .routes(routes!(images::list))
        .routes(routes!(calls::show))
        .routes(routes!(calls::bar))
        .routes(routes!(shutdown))
        .layer(DefaultBodyLimit::max(edge::MAX_BODY))
        // File routes enforce their own limits while streaming.
        .merge(
            OpenApiRouter::new()
                .routes(routes!(
                    files::read,
                    files::stat,
                    files::write,
                    files::delete
                ))
                .routes(routes!(files::import))
                .routes(routes!(patch::patch))
                .routes(routes!(execs::start))
                .layer(DefaultBodyLimit::disable()),
        )
}

/// The OpenAPI document, as served and checked in.
#[must_use]
pub fn openapi() -> serde_json::Value {
    let document = serde_json::to_value(documented().into_openapi()).unwrap_or_default();
    let mut route_errors = describe::in_sessions("/v1/worker/sessions");
    route_errors.extend(
        ROUTE_ERRORS
            .iter()
            .map(|(route, codes)| ((*route).to_owned(), *codes)),
    );
    describe::complete(document, &[ErrorCode::ShuttingDown], &route_errors)
}

/// Error codes of individual routes.
const ROUTE_ERRORS: &[(&str, &[ErrorCode])] = &[
    (
        "POST /v1/worker/sessions",
        &[
            ErrorCode::WorkspaceNotFound,
            ErrorCode::SessionIdInUse,
            ErrorCode::WorkspaceInUse,
            ErrorCode::ImageNotFound,
            ErrorCode::ImageNotCompatible,
            ErrorCode::LimitUnenforceable,
            ErrorCode::RuntimeUnavailable,
            ErrorCode::AgentUnavailable,
            ErrorCode::NoCapacity,
            ErrorCode::NoSpace,
        ],
    ),
    (
        "POST /v1/worker/jobs:run",
        &[
            ErrorCode::JobIdInUse,
            ErrorCode::ImageNotFound,
            ErrorCode::AgentRequired,
            ErrorCode::InferenceUnavailable,
            ErrorCode::LimitUnenforceable,
            ErrorCode::NoCapacity,
            ErrorCode::NoSpace,
        ],
    ),
    ("GET /v1/worker/images", &[ErrorCode::RuntimeUnavailable]),
    (
        "POST /v1/worker/jobs:stop",
        &[ErrorCode::JobNotFound, ErrorCode::JobIdInUse],
    ),
    ("GET /v1/worker/jobs/{job_id}", &[ErrorCode::JobNotFound]),
    (
        "GET /v1/worker/jobs/{job_id}/output",
        &[ErrorCode::JobNotFound, ErrorCode::OutputExpired],
    ),
    (
        "GET /v1/worker/jobs/{job_id}/artifacts",
        &[
            ErrorCode::JobNotFound,
            ErrorCode::NotFound,
            ErrorCode::OutputExpired,
        ],
    ),
    (
        "POST /v1/worker/jobs/{job_id}/ack",
        &[ErrorCode::JobNotFound, ErrorCode::JobNotEnded],
    ),
];

pub(crate) fn router(
    api: Api,
    tokens: Tokens,
    readiness: admin::Readiness,
    metrics: admin::MetricsReader,
) -> Router {
    let (routes, _) = documented().split_for_parts();
    let document = axum::body::Bytes::from(openapi().to_string());
    let stopping = api.stop.clone();
    routes
        .layer(middleware::from_fn_with_state(
            Arc::clone(&api.calls),
            remember,
        ))
        .layer(middleware::from_fn(answers::buffer))
        .layer(middleware::from_fn(set_response_owner))
        .layer(middleware::from_fn(edge::measure))
        .layer(middleware::from_fn_with_state(
            stopping,
            reject_when_stopping,
        ))
        .layer(middleware::from_fn_with_state(tokens, auth::require))
        .route(
            "/openapi.json",
            get(move || {
                std::future::ready((
                    [(http::header::CONTENT_TYPE, "application/json")],
                    document.clone(),
                ))
            }),
        )
        .merge(admin::routes(readiness, metrics))
        .fallback(edge::not_found)
        .method_not_allowed_fallback(edge::method_not_allowed)
        .layer(middleware::from_fn(edge::request_id))
        .layer(middleware::from_fn(body::limit_pauses))
        .layer(middleware::from_fn(linger::drain_body))
        .with_state(api)
}

/// All calls come from the orchestrator, so a response counts against the session or job in its
/// path.
async fn set_response_owner(mut request: Request, next: Next) -> Response {
    let id = request
        .uri()
        .path()
        .split('/')
        .find_map(|part| part.parse::<uuid::Uuid>().ok());
    request
        .extensions_mut()
        .insert(answers::Payer(id.map_or(0, |id| id.as_u128())));
    next.run(request).await
}

/// Waits until the sandbox can no longer answer.
async fn wait_until_gone(live: &Live) {
    while !live.is_gone() {
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    }
}

async fn reject_when_stopping(
    State(stop): State<CancellationToken>,
    request: Request,
    next: Next,
) -> Response {
    if stop.is_cancelled() {
        ApiError::new(ErrorCode::ShuttingDown, "the worker is shutting down").into_response()
    } else {
        next.run(request).await
    }
}

/// What happens to the sandboxes when the worker stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Sandboxes {
    /// Sandboxes end; their workspaces are retained for the grace period.
    #[default]
    End,
    /// Sandboxes keep running, and the next worker adopts them.
    Keep,
}

#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Shutdown {
    version: Option<u32>,
    #[serde(default)]
    sandboxes: Sandboxes,
}

/// Stop this worker.
#[utoipa::path(post, path = "/v1/worker/shutdown", tag = "worker", request_body = Shutdown,
    responses(
        (status = 202, description = "The worker shuts down"),
        (status = "default", body = cynode_api::Problem,
            content_type = "application/problem+json")))]
async fn shutdown(
    State(api): State<Api>,
    JsonBody(request): JsonBody<Shutdown>,
) -> Result<http::StatusCode, ApiError> {
    crate::sessions::check_version(request.version)?;
    api.end_sandboxes.store(
        request.sandboxes == Sandboxes::End,
        std::sync::atomic::Ordering::SeqCst,
    );
    // After the response has been sent.
    tokio::spawn(async move {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        api.stop.cancel();
    });
    Ok(http::StatusCode::ACCEPTED)
}

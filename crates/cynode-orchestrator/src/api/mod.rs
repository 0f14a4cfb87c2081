//! The user API and the control plane for nodes.

mod artifacts;
mod audit;
mod control;
mod credentials;
mod errors;
mod events;
mod identity;
mod images;
mod job_body;
mod jobs;
mod node_audit;
mod nodes;
mod output;
mod patches;
mod policies;
mod promotions;
mod repositories;
mod requests;
mod sessions;
mod settings;
mod work;

use std::str::FromStr;

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Request},
    middleware,
    routing::get,
};
use cynode_api::{ErrorCode, Problem, text_limits};
use cynode_service::{
    ApiError, admin, answers, body, compute,
    describe::{self, Bearer},
    edge, linger,
};
use http::request::Parts;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use utoipa::{IntoParams, OpenApi};
use utoipa_axum::{router::OpenApiRouter, routes};
use uuid::Uuid;

use crate::{
    Orchestrator,
    db::{Order, PageRequest},
    gate,
    identity::{Authenticator, authenticate},
    mcp,
};

/// Length of a complete id.
const MAX_ID_PART: usize = 36;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "CyNode user API",
        description = "Projects, tasks, jobs, sessions and what they need. \
                       Errors are RFC 9457 problem documents.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    modifiers(&Bearer),
    components(schemas(Problem, ErrorCode))
)]
struct Document;

fn documented() -> OpenApiRouter<Orchestrator> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(work::create_project, work::list_projects))
        .routes(routes!(work::show_project, work::patch_project))
        .routes(routes!(work::create_task, work::list_tasks))
        .routes(routes!(work::show_task, work::patch_task))
        .routes(routes!(identity::create_user, identity::list_users))
        .routes(routes!(identity::show_user))
        .routes(routes!(identity::create_group, identity::list_groups))
        .routes(routes!(identity::show_group))
        .routes(routes!(identity::create_token, identity::list_tokens))
        .routes(routes!(identity::show_token, identity::revoke_token))
        .routes(routes!(identity::renew_token))
        .routes(routes!(settings::list_settings))
        .routes(routes!(settings::show_setting, settings::put_setting))
        .routes(routes!(settings::effective))
        .routes(routes!(settings::list_preferences))
        .routes(routes!(settings::put_preference))
        .routes(routes!(images::create, images::list))
        .routes(routes!(images::show, images::patch, images::remove))
        .routes(routes!(nodes::list))
        .routes(routes!(nodes::show))
        .routes(routes!(nodes::drain))
        .routes(routes!(nodes::create_key))
        .routes(routes!(policies::list))
        .routes(routes!(policies::test))
        .routes(routes!(policies::show, policies::put, policies::delete))
        .routes(routes!(audit::list))
        .routes(routes!(audit::checkpoints))
        .routes(routes!(audit::verify))
        .routes(routes!(events::list))
        .routes(routes!(jobs::create, jobs::list))
        .routes(routes!(jobs::show))
        .routes(routes!(jobs::stop))
        .routes(routes!(jobs::output))
        .routes(routes!(artifacts::list))
        .routes(routes!(artifacts::show))
        .routes(routes!(credentials::create, credentials::list))
        .routes(routes!(credentials::show))
        .routes(routes!(credentials::rotate))
        .routes(routes!(credentials::disable))
        .routes(routes!(repositories::create, repositories::list))
        .routes(routes!(repositories::show, repositories::remove))
        .routes(routes!(promotions::create, promotions::list))
        .routes(routes!(promotions::show))
        .routes(routes!(promotions::approve))
        .routes(routes!(promotions::reject))
        .routes(routes!(promotions::cancel))
        .routes(routes!(sessions::create, sessions::list))
        .routes(routes!(sessions::show, sessions::patch))
        .routes(routes!(sessions::end))
        .routes(routes!(sessions::resume))
        .routes(routes!(sessions::export))
        .layer(DefaultBodyLimit::max(edge::MAX_BODY))
        // Forwarded to the node, which enforces the limits.
        .merge(
            OpenApiRouter::new()
                .routes(routes!(sessions::signal))
                .routes(routes!(sessions::exec))
                .routes(routes!(sessions::execs))
                .routes(routes!(sessions::show_exec))
                .routes(routes!(sessions::exec_output))
                .routes(routes!(sessions::signal_exec))
                .routes(routes!(sessions::stdin))
                .routes(routes!(
                    sessions::read_file,
                    sessions::stat_file,
                    sessions::write_file,
                    sessions::delete_file
                ))
                .routes(routes!(sessions::list_files))
                .routes(routes!(sessions::search_files))
                .routes(routes!(sessions::patch_files))
                .routes(routes!(sessions::watch_files))
                .routes(routes!(sessions::edit_file))
                .routes(routes!(sessions::move_file))
                .routes(routes!(sessions::mkdir))
                .routes(routes!(sessions::import))
                .routes(routes!(sessions::pty))
                .routes(routes!(artifacts::put, artifacts::get))
                .routes(routes!(artifacts::content))
                .layer(DefaultBodyLimit::disable()),
        )
}

/// The OpenAPI document, as served and as checked in.
#[must_use]
pub fn openapi() -> Value {
    let document = serde_json::to_value(documented().into_openapi()).unwrap_or_default();
    let common = [
        ErrorCode::Forbidden,
        ErrorCode::DeniedByPolicy,
        ErrorCode::TooManyAttempts,
        ErrorCode::TooManyRequests,
        ErrorCode::StoreUnavailable,
        ErrorCode::OutcomePending,
    ];
    let mut by_route = describe::in_sessions("/v1/sessions");
    by_route.extend(
        ROUTE_ERRORS
            .iter()
            .map(|(route, codes)| ((*route).to_owned(), *codes)),
    );
    describe::complete(document, &common, &by_route)
}

/// The error codes of single routes.
const ROUTE_ERRORS: &[(&str, &[ErrorCode])] = &[
    ("POST /v1/projects", &[ErrorCode::AlreadyExists]),
    (
        "POST /v1/tasks",
        &[ErrorCode::NotFound, ErrorCode::AlreadyExists],
    ),
    ("POST /v1/users", &[ErrorCode::AlreadyExists]),
    ("POST /v1/groups", &[ErrorCode::AlreadyExists]),
    (
        "POST /v1/tokens",
        &[
            ErrorCode::NotFound,
            ErrorCode::SessionNotFound,
            ErrorCode::JobNotFound,
        ],
    ),
    (
        "POST /v1/tokens/{id}/renew",
        &[
            ErrorCode::NotFound,
            ErrorCode::SessionNotFound,
            ErrorCode::JobNotFound,
            ErrorCode::TokenRevoked,
        ],
    ),
    ("PUT /v1/settings/{key}", &[ErrorCode::PreconditionFailed]),
    (
        "PUT /v1/policies/{id}",
        &[ErrorCode::PreconditionFailed, ErrorCode::PolicyInvalid],
    ),
    ("DELETE /v1/policies/{id}", &[ErrorCode::PolicyInvalid]),
    ("POST /v1/policies:test", &[ErrorCode::NotFound]),
    ("GET /v1/preferences", &[ErrorCode::NotFound]),
    (
        "PUT /v1/preferences/{scope}/{scope_id}/{key}",
        &[ErrorCode::PreconditionFailed],
    ),
    ("POST /v1/images", &[ErrorCode::AlreadyExists]),
    ("DELETE /v1/images/{id}", &[ErrorCode::ImageInUse]),
    ("GET /v1/events", &[ErrorCode::CursorExpired]),
    (
        "POST /v1/jobs",
        &[
            ErrorCode::ImageNotAllowed,
            ErrorCode::ModelNotAllowed,
            ErrorCode::InferenceUnavailable,
            ErrorCode::ImagePending,
            ErrorCode::NotFound,
            ErrorCode::WorkspaceNotFound,
            ErrorCode::JobIdInUse,
            ErrorCode::ImageNotCompatible,
            ErrorCode::AgentOutdated,
            ErrorCode::Unavailable,
            ErrorCode::SecretInInput,
        ],
    ),
    (
        "POST /v1/credentials",
        &[
            ErrorCode::NotFound,
            ErrorCode::AlreadyExists,
            ErrorCode::TooLarge,
            ErrorCode::Unavailable,
        ],
    ),
    (
        "POST /v1/credentials/{id}/rotate",
        &[ErrorCode::TooLarge, ErrorCode::Unavailable],
    ),
    (
        "POST /v1/repositories",
        &[
            ErrorCode::NotFound,
            ErrorCode::AlreadyExists,
            ErrorCode::TooLarge,
        ],
    ),
    (
        "DELETE /v1/repositories/{id}",
        &[ErrorCode::RepositoryInUse],
    ),
    (
        "POST /v1/promotions",
        &[
            ErrorCode::NotFound,
            ErrorCode::TooLarge,
            ErrorCode::PatchRejected,
            ErrorCode::PreconditionFailed,
            ErrorCode::Unavailable,
        ],
    ),
    (
        "POST /v1/promotions/{id}/approve",
        &[ErrorCode::PromotionNotWaiting, ErrorCode::ApprovalStale],
    ),
    (
        "POST /v1/promotions/{id}/reject",
        &[ErrorCode::PromotionNotWaiting, ErrorCode::ApprovalStale],
    ),
    (
        "POST /v1/promotions/{id}/cancel",
        &[ErrorCode::PromotionNotWaiting],
    ),
    ("GET /v1/jobs/{id}", &[ErrorCode::JobNotFound]),
    ("POST /v1/jobs/{id}/stop", &[ErrorCode::JobNotFound]),
    (
        "GET /v1/jobs/{id}/output",
        &[
            ErrorCode::JobNotFound,
            ErrorCode::OutputExpired,
            ErrorCode::NodeUnreachable,
        ],
    ),
    ("GET /v1/artifacts", &[ErrorCode::NotFound]),
    (
        "PUT /v1/tasks/{task_id}/artifacts/{path}",
        &[ErrorCode::PreconditionFailed],
    ),
    ("POST /v1/sessions/{id}/export", &[ErrorCode::TooLarge]),
    ("POST /v1/sessions/{id}/resume", &[ErrorCode::NameInUse]),
    (
        "POST /v1/sessions",
        &[
            ErrorCode::ImageNotAllowed,
            ErrorCode::ImagePending,
            ErrorCode::NotFound,
            ErrorCode::WorkspaceNotFound,
            ErrorCode::SessionIdInUse,
            ErrorCode::NameInUse,
            ErrorCode::WorkspaceInUse,
            ErrorCode::ImageDigestMismatch,
            ErrorCode::ImageNotFound,
            ErrorCode::ImageNotCompatible,
            ErrorCode::LimitUnenforceable,
            ErrorCode::NoCapacity,
            ErrorCode::NodeUnreachable,
            ErrorCode::NoSpace,
            ErrorCode::Unavailable,
        ],
    ),
];

pub(crate) fn router(
    orchestrator: Orchestrator,
    readiness: admin::Readiness,
    metrics: admin::MetricsReader,
) -> Router {
    let (routes, _) = documented().split_for_parts();
    let document = Bytes::from(openapi().to_string());
    // Layers added later run earlier: authentication, then the gate, then the handlers.
    let routes = routes
        .method_not_allowed_fallback(edge::method_not_allowed)
        .fallback(edge::not_found)
        .layer(middleware::from_fn_with_state(
            orchestrator.clone(),
            gate::pass,
        ))
        .with_state(orchestrator.clone());
    // Tools act through these routes.
    let tools = mcp::routes(&orchestrator, &routes);
    let routes = routes
        .merge(tools)
        .layer(middleware::from_fn(answers::buffer))
        .layer(middleware::from_fn(edge::measure))
        .layer(middleware::from_fn_with_state(
            Authenticator {
                orchestrator,
                accepts_cached_identity: gate::accepts_cached_identity,
            },
            authenticate,
        ));
    with_common_layers(routes.merge(admin::routes(readiness, metrics)).route(
        "/openapi.json",
        get(async move || ([("content-type", "application/json")], document.clone())),
    ))
}

/// The control plane for nodes, on its own port.
pub(crate) fn control_router(
    orchestrator: Orchestrator,
    readiness: admin::Readiness,
    metrics: admin::MetricsReader,
) -> Router {
    with_common_layers(control::routes(orchestrator).merge(admin::routes(readiness, metrics)))
}

fn with_common_layers(router: Router) -> Router {
    router
        .layer(middleware::from_fn(edge::request_id))
        .layer(middleware::from_fn(body::limit_pauses))
        .layer(middleware::from_fn(linger::drain_body))
}

/// A JSON body, parsed strictly. NUL is refused because PostgreSQL can't store it.
#[derive(Debug)]
pub(crate) struct Body<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let edge::JsonBytes { bytes, .. } = &edge::JsonBytes::from_request(request, state).await?;
        let read = || {
            let value = edge::parse(bytes)?;
            check_no_nul(bytes, None)?;
            Ok(Self(value))
        };
        compute::run(bytes.len(), read).await
    }
}

/// Refuses NUL, except in a member that is stored as JSON text.
fn check_no_nul(bytes: &Bytes, except: Option<&str>) -> Result<(), ApiError> {
    if memchr::memmem::find(bytes, b"\\u0000").is_none() {
        return Ok(());
    }
    let mut value: Value = serde_json::from_slice(bytes).unwrap_or_default();
    if let (Some(name), Some(members)) = (except, value.as_object_mut()) {
        members.remove(name);
    }
    match find_nul(&value, String::new()) {
        Some(path) => Err(ApiError::invalid(format!(
            "{path}: must not contain the character NUL"
        ))),
        None => Ok(()),
    }
}

/// The place of the first text or member name that contains NUL.
fn find_nul(value: &Value, path: String) -> Option<String> {
    match value {
        Value::String(text) => text.contains('\0').then_some(path),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .find_map(|(index, item)| find_nul(item, format!("{path}[{index}]"))),
        Value::Object(members) => members.iter().find_map(|(name, member)| {
            let dot = if path.is_empty() { "" } else { "." };
            if name.contains('\0') {
                Some(format!("{path}{dot}(a name)"))
            } else {
                find_nul(member, format!("{path}{dot}{name}"))
            }
        }),
        _ => None,
    }
}

/// Path parameters. Answers malformed ones with a problem document.
#[derive(Debug)]
pub(crate) struct Path<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let axum::extract::Path(path) = axum::extract::Path::from_request_parts(parts, state)
            .await
            .map_err(|error| ApiError::invalid(error.body_text()))?;
        Ok(Self(path))
    }
}

/// An id in a path. An invalid UUID is answered with 404, like an unknown id.
#[derive(Debug)]
pub(crate) struct Id<T>(pub(crate) T);

impl<S: Send + Sync, T: FromStr> FromRequestParts<S> for Id<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let Path(path) =
            Path::<std::collections::HashMap<String, String>>::from_request_parts(parts, state)
                .await?;
        let text = path.get("id").map(String::as_str).unwrap_or_default();
        text.parse().map(Self).map_err(|_| {
            ApiError::new(
                ErrorCode::NotFound,
                format!(
                    "'{}' is not an id",
                    text.chars().take(100).collect::<String>()
                ),
            )
        })
    }
}

/// The page of a list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Paging {
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
    /// The whole name.
    name: Option<String>,
}

impl Paging {
    pub(crate) fn request(self) -> Result<PageRequest, ApiError> {
        let page = page_request(self.limit, self.cursor.as_deref(), self.order, self.id_part)?;
        page_by_name(page, self.name)
    }
}

/// A page of the objects with a name.
pub(crate) fn page_by_name(
    page: PageRequest,
    name: Option<String>,
) -> Result<PageRequest, ApiError> {
    if name.as_ref().is_some_and(|name| name.contains('\0')) {
        return Err(ApiError::invalid(
            "name: must not contain the character NUL",
        ));
    }
    Ok(PageRequest { name, ..page })
}

/// The page that the parameters of a list ask for.
pub(crate) fn page_request(
    requested: Option<u32>,
    cursor: Option<&str>,
    order: Option<Order>,
    id_part: Option<String>,
) -> Result<PageRequest, ApiError> {
    let is_part = |text: &String| {
        (1..=MAX_ID_PART).contains(&text.len())
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-'))
    };
    if id_part.as_ref().is_some_and(|part| !is_part(part)) {
        return Err(ApiError::invalid(format!(
            "id_part: must be 1 to {MAX_ID_PART} of 0-9, a-f and '-'"
        )));
    }
    Ok(PageRequest {
        after: after(cursor)?,
        limit: limit(requested)?,
        order: order.unwrap_or_default(),
        id_part,
        name: None,
    })
}

/// Parses the states of a filter, separated by commas.
pub(crate) fn states<T: FromStr<Err = String>>(text: Option<&str>) -> Result<Vec<T>, ApiError> {
    text.map_or_else(
        || Ok(Vec::new()),
        |text| text.split(',').map(str::parse).collect(),
    )
    .map_err(|error: String| ApiError::invalid(format!("state: {error}")))
}

/// The page of a list that is sorted by name.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct NamePaging {
    /// 1 to 1000; 1000 by default.
    limit: Option<u32>,
    cursor: Option<String>,
}

impl NamePaging {
    pub(crate) fn limit(&self) -> Result<u32, ApiError> {
        name_limit(self.limit)
    }

    pub(crate) fn after(self) -> Result<Option<String>, ApiError> {
        after_name(self.cursor)
    }
}

/// Parses the page size of a list that was unpaged in earlier versions: its default is the largest
/// page.
pub(crate) fn name_limit(requested: Option<u32>) -> Result<u32, ApiError> {
    limit(Some(requested.unwrap_or(1_000)))
}

pub(crate) fn after_name(cursor: Option<String>) -> Result<Option<String>, ApiError> {
    if cursor.as_ref().is_some_and(|cursor| cursor.contains('\0')) {
        return Err(ApiError::invalid(
            "cursor: must not contain the character NUL",
        ));
    }
    Ok(cursor)
}

pub(crate) fn limit(requested: Option<u32>) -> Result<u32, ApiError> {
    match requested.unwrap_or(100) {
        limit @ 1..=1_000 => Ok(limit),
        _ => Err(ApiError::invalid("limit: must be between 1 and 1000")),
    }
}

pub(crate) fn after(cursor: Option<&str>) -> Result<Option<Uuid>, ApiError> {
    cursor
        .map(|cursor| {
            cursor
                .parse()
                .map_err(|_| ApiError::invalid("cursor is invalid or has expired"))
        })
        .transpose()
}

pub(crate) fn check_version(version: Option<u32>) -> Result<(), ApiError> {
    match version {
        None | Some(cynode_api::API_VERSION) => Ok(()),
        Some(other) => Err(ApiError::new(
            ErrorCode::UnsupportedVersion,
            format!("version {other} is not supported"),
        )),
    }
}

/// Checks a short text on one line.
pub(crate) fn check_name(field: &str, text: &str) -> Result<(), ApiError> {
    if text.trim().is_empty()
        || text.len() > text_limits::MAX_NAME
        || text.chars().any(char::is_control)
    {
        return Err(ApiError::invalid(format!(
            "{field}: must be a single line of 1 to {} bytes",
            text_limits::MAX_NAME
        )));
    }
    Ok(())
}

pub(crate) fn check_text(field: &str, text: Option<&String>) -> Result<(), ApiError> {
    if text.is_some_and(|text| text.len() > text_limits::MAX_TEXT) {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("{field}: exceeds {} bytes", text_limits::MAX_TEXT),
        ));
    }
    Ok(())
}

pub(crate) fn check_metadata(metadata: Option<&Map<String, Value>>) -> Result<(), ApiError> {
    let bytes = metadata.map_or(0, |metadata| {
        serde_json::to_string(metadata).map_or(0, |text| text.len())
    });
    if bytes > text_limits::MAX_METADATA_BYTES {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!(
                "metadata: exceeds {} bytes",
                text_limits::MAX_METADATA_BYTES
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nul_is_found_at_any_depth() {
        for (body, found) in [
            (r#"{"a":"\u0000"}"#, Some("a:")),
            (r#"{"a":{"b":["x","y\u0000"]}}"#, Some("a.b[1]:")),
            (r#"{"a\u0000":1}"#, Some("(a name):")),
            (r#"{"a":"\\u0000"}"#, None),
            (r#"{"a":"x"}"#, None),
        ] {
            let error = check_no_nul(&Bytes::from(body), None)
                .err()
                .map(|error| error.into_problem().detail);
            assert_eq!(error.is_some(), found.is_some(), "{body} {error:?}");
            assert!(
                found.is_none_or(|found| error.is_some_and(|error| error.starts_with(found))),
                "{body}"
            );
        }
        let body = Bytes::from(r#"{"job":{"a":"\u0000"},"b":""}"#);
        assert!(check_no_nul(&body, Some("job")).is_ok() && check_no_nul(&body, None).is_err());
    }
}

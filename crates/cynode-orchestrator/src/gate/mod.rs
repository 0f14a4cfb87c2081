//! The gate: every call of the user API passes through it to be authorized and audited.
//!
//! Invariants:
//!
//! - No call takes effect before it is authorized (`routes.rs` maps routes to actions, `targets.rs`
//!   resolves what a call acts on, the policies decide), scanned for secrets (`request_body.rs`,
//!   `leaks.rs`) and recorded as an intent.
//! - No answer leaves before its outcome is recorded (`answer.rs`).
//! - Refusals are recorded as well (`refusal.rs`), also those of tool calls.
//!
//! The gate depends on `identity` and `caller`; neither depends on the gate.

mod address;
mod admit;
mod answer;
mod call;
mod detail;
mod leaks;
mod patches;
mod policy_calls;
mod records;
mod refusal;
mod request_body;
mod routes;
mod seeds;
mod spool;
mod stage;
mod submitted_jobs;
mod submitted_prompts;
mod targets;

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use cynode_api::{CALL_HEADER, ErrorCode};
use cynode_policy::{Action, Resource};
use cynode_service::{ApiError, edge};
use http::{HeaderName, HeaderValue};
use uuid::Uuid;

pub(crate) use patches::AdmittedPatch;
pub(crate) use policy_calls::policy_limits;
pub(crate) use refusal::Refusal;
pub(crate) use request_body::ToolBody;
pub(crate) use routes::runs_on_node;
pub(crate) use seeds::SeedScan;
pub(crate) use spool::json_body;
pub(crate) use stage::Stage;
pub(crate) use submitted_jobs::{check_context, check_step_diff};
pub(crate) use targets::wants_bytes;

use crate::{
    Orchestrator,
    caller::Caller,
    db::SessionAt,
    identity::{CachedIdentity, StaleIdentity},
};
use call::Call;
use request_body::IncomingBody;
use routes::RouteSpec;

/// The body of a call with a cached identity is read before that identity is verified, so it must
/// be small.
const MAX_UNVERIFIED_BODY_BYTES: u64 = 64 * 1024;

/// The session of a call as it was authorized, for the handler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AuthorizedSession(pub(crate) SessionAt);

/// The middleware.
pub(crate) async fn pass(
    State(orchestrator): State<Orchestrator>,
    request: Request,
    next: Next,
) -> Response {
    // Unknown paths end in the 404 fallback, which has no effect.
    let Some(matched) = request.extensions().get::<MatchedPath>().cloned() else {
        return next.run(request).await;
    };
    let Some(caller) = request.extensions().get::<Caller>().cloned() else {
        return ApiError::new(ErrorCode::Unauthorized, "no bearer token was sent").into_response();
    };
    let Some(route) = routes::find(request.method(), matched.as_str()) else {
        return edge::method_not_allowed().await.into_response();
    };
    let (mut parts, body) = request.into_parts();
    let Some(cached) = parts.extensions.remove::<CachedIdentity>() else {
        let call = Call::new(&orchestrator, route, &caller, &parts);
        let incoming = match parts.extensions.remove::<ToolBody>() {
            Some(body) => IncomingBody::Parsed(body),
            None => IncomingBody::Streaming(body),
        };
        return call
            .attempt(parts, incoming, None, next)
            .await
            .unwrap_or_else(unreachable_stale);
    };
    // The body is kept so that the call can be decided again if the cached identity is stale.
    let body = spool::json_bytes(body).await;
    let attempt = Call::new(&orchestrator, route, &caller, &parts).attempt(
        parts.clone(),
        IncomingBody::Buffered(body.clone()),
        Some(&cached),
        next.clone(),
    );
    let stale = match attempt.await {
        Ok(response) => return response,
        Err(stale) => stale,
    };
    let call_id = stale.call_id;
    match stale.refresh(&orchestrator, &mut parts.extensions).await {
        Ok(caller) => Call::new(&orchestrator, route, &caller, &parts)
            .attempt(parts, IncomingBody::Buffered(body), None, next)
            .await
            .unwrap_or_else(unreachable_stale),
        Err(error) => with_call_id(error.into_response(), call_id),
    }
}

/// Whether a call may reach the gate with a cached identity.
pub(crate) fn accepts_cached_identity(request: &Request) -> bool {
    let route = || {
        request
            .extensions()
            .get::<MatchedPath>()
            .and_then(|matched| routes::find(request.method(), matched.as_str()))
    };
    let headers = request.headers();
    let size = headers
        .get(http::header::CONTENT_LENGTH)
        .and_then(|size| size.to_str().ok()?.parse::<u64>().ok());
    size.is_some_and(|size| size <= MAX_UNVERIFIED_BODY_BYTES)
        && !headers.contains_key(http::header::EXPECT)
        && route().is_some_and(RouteSpec::accepts_cached_identity)
}

/// Unreachable: `attempt` fails only when it was given a cached identity.
fn unreachable_stale(_: StaleIdentity) -> Response {
    ApiError::new(ErrorCode::Internal, "the caller could not be verified").into_response()
}

fn with_call_id(mut response: Response, call_id: Option<Uuid>) -> Response {
    if let Some(value) = call_id.and_then(|id| HeaderValue::from_str(&id.to_string()).ok()) {
        response
            .headers_mut()
            .insert(HeaderName::from_static(CALL_HEADER), value);
    }
    response
}

impl Orchestrator {
    /// Whether audit records must not contain the text.
    pub(crate) fn is_secret(&self, text: &str) -> bool {
        self.record_scanner().find(text.as_bytes()).is_some()
    }

    /// Finds what audit records must not contain. Records may hold strings that look like
    /// credentials only where the operator has turned that detection off.
    fn record_scanner(&self) -> &cynode_policy::Scanner {
        if self.shapes.is_off() {
            &self.system_scanner
        } else {
            &self.scanner
        }
    }

    /// Authorizes an action that becomes known only while a call is carried out.
    pub(crate) fn check(
        &self,
        caller: &Caller,
        action: Action,
        resource: &Resource,
        call: &cynode_policy::CallContext,
    ) -> Result<(), ApiError> {
        let decision = self
            .policies
            .decide(&caller.principal(), action, resource, call);
        if decision.allowed {
            Ok(())
        } else {
            Err(refusal::denied(action, &decision))
        }
    }
}

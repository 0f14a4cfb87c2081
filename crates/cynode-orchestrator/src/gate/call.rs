//! One call of the user API: from its intent to its answer.

use axum::{
    extract::Request,
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use cynode_api::{AuditBody, AuditKind, ErrorCode, Flags, PatchRepair};
use cynode_service::ApiError;
use http::request::Parts;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::{
    Refusal,
    answer::{self, OpenCall},
    leaks::{self, Leak},
    refusal::count_secret,
    request_body::{IncomingBody, SecretHit},
    routes::{Effect, RouteSpec},
    with_call_id,
};
use crate::{
    Orchestrator,
    caller::{Caller, ToolOrigin},
    identity::{CachedIdentity, StaleIdentity},
};

#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) orchestrator: &'a Orchestrator,
    pub(super) route: &'static RouteSpec,
    pub(super) caller: &'a Caller,
    pub(super) tool: Option<ToolOrigin>,
    /// Collects what the gate learns about the call, whether it is admitted or refused.
    pub(super) intent: AuditBody,
}

/// A call that may proceed to its handler.
#[derive(Debug)]
pub(super) struct AdmittedCall {
    pub(super) request: Request,
    /// Set while the body streams through, if it contains a secret.
    pub(super) secret: SecretHit,
    pub(super) flags: Flags,
    /// The hunks of its patch that were repaired.
    pub(super) repaired: Vec<PatchRepair>,
}

impl<'a> Call<'a> {
    pub(super) fn new(
        orchestrator: &'a Orchestrator,
        route: &'static RouteSpec,
        caller: &'a Caller,
        parts: &Parts,
    ) -> Self {
        let tool = parts.extensions.get::<ToolOrigin>().copied();
        // Callers choose their request ids freely, so one may contain a secret.
        let request_id = parts
            .headers
            .get("x-request-id")
            .and_then(|id| id.to_str().ok())
            .filter(|id| !orchestrator.is_secret(id));
        let intent = AuditBody {
            call_id: Some(Uuid::now_v7()),
            request_id: request_id.map(str::to_owned),
            subject: Some(caller.subject()),
            detail: tool_detail(tool),
            ..AuditBody::new(AuditKind::Intent, route.action.as_str())
        };
        Self {
            orchestrator,
            route,
            caller,
            tool,
            intent,
        }
    }

    /// Authorizes, records and runs the call. If the cached identity turns out to be stale, the
    /// call has had no effect.
    pub(super) async fn attempt(
        mut self,
        parts: Parts,
        body: IncomingBody,
        cached: Option<&CachedIdentity>,
        next: Next,
    ) -> Result<Response, StaleIdentity> {
        let call_id = self.intent.call_id;
        let response = match Box::pin(self.admit(parts, body)).await {
            Ok(admitted) => Box::pin(self.run(admitted, cached, next)).await?,
            Err(refusal) => {
                if let Some(cached) = cached {
                    cached.verify(self.orchestrator).await?;
                }
                self.refuse(refusal).await
            }
        };
        Ok(with_call_id(response, call_id))
    }

    /// Records a refusal and answers with it.
    async fn refuse(self, refusal: Refusal) -> Response {
        // An unavailable database is not a refusal, and can't record one.
        if refusal.error.is(ErrorCode::StoreUnavailable) {
            return refusal.error.into_response();
        }
        match refusal.record(self.orchestrator, self.intent).await {
            Ok(()) => {
                let mut response = refusal.error.into_response();
                response.extensions_mut().insert(refusal.stage);
                response
            }
            Err(error) => error.into_response(),
        }
    }

    async fn run(
        self,
        admitted: AdmittedCall,
        cached: Option<&CachedIdentity>,
        next: Next,
    ) -> Result<Response, StaleIdentity> {
        let Self {
            orchestrator,
            route,
            intent,
            ..
        } = self;
        Ok(match route.effect {
            Effect::Read => {
                let (response, outcome) = answer::read(next.run(admitted.request).await).await;
                let outcome = outcome.record(intent.clone());
                match orchestrator.audit.write_all(vec![intent, outcome]).await {
                    Ok(()) => response,
                    Err(error) => error.into_response(),
                }
            }
            // Runs to completion even if the caller disconnects.
            Effect::Local | Effect::Create => {
                let orchestrator = orchestrator.clone();
                let done = tokio::spawn(async move {
                    match OpenCall::open(&orchestrator, intent).await {
                        Ok(open) => carry_out(route, open, admitted, next).await,
                        Err(error) => error.into_response(),
                    }
                });
                done.await.unwrap_or_else(|_| {
                    ApiError::new(ErrorCode::Internal, "the call was interrupted").into_response()
                })
            }
            Effect::Node => {
                let open = match cached {
                    None => OpenCall::open(orchestrator, intent).await,
                    Some(cached) => open_verified(orchestrator, intent, cached).await?,
                };
                match open {
                    Ok(open) => carry_out(route, open, admitted, next).await,
                    Err(error) => error.into_response(),
                }
            }
        })
    }
}

/// Detail for the audit record: the tool through which the call was made.
pub(super) fn tool_detail(tool: Option<ToolOrigin>) -> Map<String, Value> {
    tool.map(|tool| ("tool".to_owned(), json!(tool.name)))
        .into_iter()
        .collect()
}

/// Writes the intent while the cached identity is verified. If the identity is stale, records that
/// the call did not start.
async fn open_verified(
    orchestrator: &Orchestrator,
    intent: AuditBody,
    cached: &CachedIdentity,
) -> Result<Result<OpenCall, ApiError>, StaleIdentity> {
    let (open, verified) = tokio::join!(
        OpenCall::open(orchestrator, intent),
        cached.verify(orchestrator)
    );
    if let Err(mut stale) = verified {
        stale.call_id = match open {
            Ok(open) => open.abort().await,
            Err(_) => None,
        };
        return Err(stale);
    }
    Ok(open)
}

async fn carry_out(
    route: &RouteSpec,
    mut open: OpenCall,
    admitted: AdmittedCall,
    next: Next,
) -> Response {
    let AdmittedCall {
        request,
        secret,
        flags,
        repaired,
    } = admitted;
    open.start();
    let mut response = next.run(request).await;
    if let Some(kind) = secret.kind() {
        count_secret();
        response = Leak::system("body", kind).error().into_response();
    }
    let response = open.conclude(route, response).await;
    let response = leaks::report_repairs(response, &repaired);
    leaks::flag_answer(route.action, response, &flags)
}

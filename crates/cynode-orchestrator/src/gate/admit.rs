//! Admission: the checks that a call passes before it may reach its handler.

use std::collections::BTreeSet;

use axum::extract::Request;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{
    AuditDecision, CallId, ErrorCode, ExecId, Flags, JobId, PatchRepair, ProjectId, SessionId,
    TokenKind,
};
use cynode_policy::{Action, Channel, ShapeAction, ShapePolicy};
use cynode_service::{ApiError, compute, edge, json as service_json};
use http::{HeaderMap, request::Parts};
use serde_json::{Map, Value, json};

use super::{
    AuthorizedSession, Refusal, Stage,
    address::Address,
    call::{AdmittedCall, Call, tool_detail},
    detail,
    leaks::{self, Leak},
    patches::{AdmittedPatch, CallerPatch},
    policy_calls::PolicyCalls,
    refusal::denied,
    request_body::{BodyContext, ForwardedBody, IncomingBody, RequestBody},
    routes::BodyKind,
    submitted_jobs::SubmittedJob,
    targets::{Target, TargetNames},
};
use crate::{db, identity::SessionSnapshot};

/// The findings about a call that is admitted.
struct Admission {
    /// Findings that are reported but not refused.
    flags: Flags,
    patch: Option<AdmittedPatch>,
    /// The hunks of the patch that were repaired.
    repaired: Vec<PatchRepair>,
}

/// The number of paths that one call may touch.
pub(super) const MAX_PATHS: usize = 10_000;
/// More paths than this are decided on a blocking thread.
const INLINE_PATHS: usize = 64;

impl Call<'_> {
    pub(super) async fn admit(
        &mut self,
        mut parts: Parts,
        incoming: IncomingBody,
    ) -> Result<AdmittedCall, Refusal> {
        // The MCP gateway has already checked that a tool is open to its caller.
        if self.tool.is_none() {
            self.check_token_kind().map_err(Stage::AgentType.refuse())?;
        }
        edge::check_query(&parts.uri).map_err(Stage::Arguments.refuse())?;
        let address = Address::from_parts(&mut parts)
            .await
            .map_err(Stage::Arguments.refuse())?;
        let mut snapshot = parts.extensions.remove::<SessionSnapshot>();
        let task = self.check_task().await?;
        let mut project = None;
        if self.route.body.is_upload() {
            project = self
                .authorize_upload(&address, snapshot.take(), task.as_ref())
                .await?;
        }
        let context = BodyContext {
            caller: self.caller,
            route: self.route,
            shapes: self.orchestrator.shapes.for_project(project),
            path: &address.upload_path(self.route.action),
            headers: &parts.headers,
        };
        let mut body = RequestBody::read(self.orchestrator, context, incoming)
            .await
            .map_err(Stage::Arguments.refuse())?;
        let size = body.size();
        let permit = compute::permit(size).await;
        permit.run(|| self.assign_id(&mut body, &address));
        let mut target = self.resolve(&address, body.json(), snapshot).await?;
        if let Err(refusal) = check_ownership(task.as_ref(), &mut target) {
            self.redact();
            return Err(refusal);
        }
        let permit = compute::permit(size).await;
        let mut admission = permit.run(|| self.scan_and_authorize(&address, &body, &target))?;
        self.authorize_implied(&target, &parts.headers, body.json())
            .await?;
        self.read_stdin(&mut body, &target, &mut admission.flags)
            .await?;
        leaks::record_flags(&admission.flags, &mut self.intent.detail);
        Ok(self.admitted(parts, body, &target, admission))
    }

    fn check_token_kind(&self) -> Result<(), ApiError> {
        match self.caller.kind {
            TokenKind::User => Ok(()),
            TokenKind::Sandbox => Err(ApiError::new(
                ErrorCode::Forbidden,
                "sandboxes' tokens are not accepted on this route",
            )),
            TokenKind::ProjectManager | TokenKind::ProjectAnalyst if self.route.accepts_agents => {
                Ok(())
            }
            TokenKind::ProjectManager | TokenKind::ProjectAnalyst => Err(ApiError::new(
                ErrorCode::Forbidden,
                "agents' tokens are not accepted on this route",
            )),
        }
    }

    /// Authorizes the caller for the task that its tool call names. Returns the task, which must
    /// own the target of the call.
    async fn check_task(&mut self) -> Result<Option<Target>, Refusal> {
        let Some(task) = self.tool.and_then(|tool| tool.task) else {
            return Ok(None);
        };
        let target = db::with_timeout(self.orchestrator.task_target(self.caller, task))
            .await
            .map_err(Stage::Task.refuse())?;
        self.record_target(&target);
        // A sandbox may act for its task without permission to show it.
        if self.caller.kind == TokenKind::Sandbox && self.caller.task_ids.first() == Some(&task) {
            return Ok(Some(target));
        }
        let decision = self.orchestrator.policies.decide(
            &self.caller.principal(),
            Action::TaskShow,
            &target.resource,
            &cynode_policy::CallContext::default(),
        );
        if decision.allowed {
            return Ok(Some(target));
        }
        self.intent.decision = Some(AuditDecision::Deny);
        self.intent.rules = decision.rules;
        Err(Refusal {
            stage: Stage::Task,
            error: target.missing(),
        })
    }

    /// Authorizes an upload before its body is read: only authorized callers may send large bodies.
    /// Returns the project whose secret policy applies.
    async fn authorize_upload(
        &mut self,
        address: &Address,
        snapshot: Option<SessionSnapshot>,
        task: Option<&Target>,
    ) -> Result<Option<ProjectId>, Refusal> {
        let mut target = self.resolve(address, &Value::Null, snapshot).await?;
        self.redact();
        check_ownership(task, &mut target)?;
        let calls = PolicyCalls::new(
            self.route.action,
            &Value::Null,
            &address.query,
            std::iter::empty(),
            None,
        )
        .map_err(Stage::Arguments.refuse())?;
        self.authorize(self.route.action, &target, &calls)?;
        Ok(target.project_id)
    }

    /// Resolves the target of the call and records it.
    async fn resolve(
        &mut self,
        address: &Address,
        body: &Value,
        snapshot: Option<SessionSnapshot>,
    ) -> Result<Target, Refusal> {
        let names = TargetNames {
            address,
            body,
            snapshot,
        };
        let target = self
            .orchestrator
            .target(self.route.target, self.caller, &names);
        let target = db::with_timeout(target)
            .await
            .map_err(Stage::Resource.refuse())?;
        self.record_target(&target);
        Ok(target)
    }

    /// Records the target, also if the caller may not know that it exists.
    fn record_target(&mut self, target: &Target) {
        let intent = &mut self.intent;
        intent.project_id = target.project_id.or(intent.project_id);
        intent.task_id = target.task_id.or(intent.task_id);
        intent.session_id = target.session_id.or(intent.session_id);
        intent.job_id = target.job_id.or(intent.job_id);
        intent.resource = target.name.clone().or(intent.resource.take());
    }

    /// Generates the id of an object to be created, so that the intent contains it.
    fn assign_id(&mut self, body: &mut RequestBody, address: &Address) {
        match self.route.action {
            Action::SessionExec => {
                self.intent.exec_id = body
                    .assign_id("exec_id", || ExecId::generate().to_string())
                    .and_then(|id| id.parse().ok());
            }
            Action::SessionCreate => {
                drop(body.assign_id("session_id", || SessionId::generate().to_string()));
            }
            Action::JobCreate => {
                // The id in a specification is that of the job.
                let given = SubmittedJob::of(Action::JobCreate, body.json())
                    .and_then(|job| job.id("job_id")?.parse().ok());
                let id: JobId = given.unwrap_or_else(JobId::generate);
                drop(body.assign_id("job_id", || id.to_string()));
            }
            _ => {
                self.intent.exec_id = address.path.get("exec_id").and_then(|id| id.parse().ok());
            }
        }
    }

    /// Records the call's arguments, scans them for secrets and authorizes the call.
    fn scan_and_authorize(
        &mut self,
        address: &Address,
        body: &RequestBody,
        target: &Target,
    ) -> Result<Admission, Refusal> {
        let action = self.route.action;
        let (patch, calls) = match CallerPatch::read(action, body.json()) {
            Ok(patch) => {
                let paths = || body.archive_paths();
                let calls = address.check_path_bytes(paths()).and_then(|()| {
                    PolicyCalls::new(action, body.json(), &address.query, paths(), patch.as_ref())
                });
                (patch, calls)
            }
            Err(error) => (None, Err(error)),
        };
        let repaired = patch
            .as_ref()
            .map(CallerPatch::repaired)
            .unwrap_or_default();
        let mut detail = detail::describe(action, body.json(), &address.query);
        detail.extend(tool_detail(self.tool));
        if let Ok(calls) = &calls {
            calls.describe(action, &mut detail);
        }
        if let Some(job) = SubmittedJob::of(action, body.json()) {
            detail.insert("job".to_owned(), job.describe());
        }
        if !repaired.is_empty() {
            detail.insert("repaired".to_owned(), json!(repaired.len()));
        }
        body.describe(&mut detail);
        self.intent.detail = detail::bounded(detail);
        let mut flags = Flags::default();
        if self.route.enters_sandbox {
            let shapes = self.orchestrator.shapes.for_project(target.project_id);
            flags = self
                .check_secrets(shapes, body, address, patch.as_ref())
                .map_err(|leak| self.leaked(&leak, target))?;
        }
        self.redact();
        let calls = calls.and_then(|calls| {
            if calls.len() > MAX_PATHS {
                Err(ApiError::new(
                    ErrorCode::TooLarge,
                    format!("the call names more than {MAX_PATHS} paths or programs; split it"),
                ))
            } else {
                Ok(calls)
            }
        });
        // A malformed diff must not reveal that the session exists.
        let calls = calls.map_err(|error| Refusal {
            stage: Stage::Arguments,
            error: target.error_or_missing(error),
        })?;
        self.authorize(action, target, &calls)?;
        let patch = patch.map(|patch| patch.admit()).transpose();
        Ok(Admission {
            flags,
            patch: patch.map_err(Stage::Arguments.refuse())?,
            repaired,
        })
    }

    /// The refusal of a secret. The record names its place and drops everything that could contain
    /// its value.
    fn leaked(&mut self, leak: &Leak, target: &Target) -> Refusal {
        self.intent.detail = leak.record();
        self.intent.resource = None;
        Refusal {
            stage: Stage::Secrets,
            error: target.error_or_missing(leak.error()),
        }
    }

    /// Scans the address and the body of the call for secrets. Returns what may enter but is
    /// flagged.
    fn check_secrets(
        &self,
        shapes: ShapePolicy,
        body: &RequestBody,
        address: &Address,
        patch: Option<&CallerPatch<'_>>,
    ) -> Result<Flags, Leak> {
        let mut flags = Flags::default();
        // The address comes first: a leak in the body is reported by names that appear in it.
        for (name, value) in address.parameters() {
            let decoded = if name.ends_with("_b64") {
                STANDARD.decode(value).ok()
            } else {
                None
            };
            let forms = || std::iter::once(value.as_bytes()).chain(decoded.as_deref());
            let system_scanner = &self.orchestrator.system_scanner;
            if let Some(hit) = forms().find_map(|bytes| system_scanner.find(bytes)) {
                return Err(Leak::system(name, hit.what));
            }
            let treatment = if self.route.action == Action::SessionPty && name == "argv" {
                shapes.action(Channel::Argv)
            } else {
                leaks::name_treatment(shapes)
            };
            let hit = if treatment == ShapeAction::Off {
                None
            } else {
                forms().find_map(|bytes| self.orchestrator.scanner.find(bytes))
            };
            match (hit, treatment) {
                (Some(hit), ShapeAction::Flag) => flags.add(name, hit.what),
                (Some(hit), _) => {
                    return Err(Leak {
                        field: name.clone(),
                        path: None,
                        kind: hit.what,
                        is_system: false,
                    });
                }
                (None, _) => {}
            }
        }
        let body_flags = body.check_secrets(self.orchestrator, self.route.action, shapes, patch)?;
        Ok(if flags.is_empty() { body_flags } else { flags })
    }

    /// Asks the policies about each path that the call touches. Rules of an earlier decision on the
    /// same call stay in its record.
    fn authorize(
        &mut self,
        action: Action,
        target: &Target,
        calls: &PolicyCalls<'_>,
    ) -> Result<(), Refusal> {
        let policies = &self.orchestrator.policies;
        let principal = self.caller.principal();
        let mut rules: BTreeSet<String> = self.intent.rules.iter().cloned().collect();
        let mut decide = || {
            for call in calls.iter() {
                let decision = policies.decide(&principal, action, &target.resource, &call);
                if !decision.allowed {
                    return Some(decision);
                }
                rules.extend(decision.rules);
            }
            None
        };
        let denial = if calls.len() > INLINE_PATHS {
            tokio::task::block_in_place(decide)
        } else {
            decide()
        };
        if let Some(decision) = denial {
            self.intent.decision = Some(AuditDecision::Deny);
            self.intent.rules.clone_from(&decision.rules);
            return Err(Refusal {
                stage: Stage::Policy,
                error: target.error_or_missing(denied(action, &decision)),
            });
        }
        self.intent.decision = Some(AuditDecision::Allow);
        self.intent.rules = rules.into_iter().collect();
        Ok(())
    }

    /// Authorizes what the call does besides its own action.
    async fn authorize_implied(
        &mut self,
        target: &Target,
        headers: &HeaderMap,
        body: &Value,
    ) -> Result<(), Refusal> {
        let implied = self.orchestrator.implied_targets(
            self.route.action,
            self.caller,
            target,
            headers,
            body,
        );
        let implied = db::with_timeout(implied)
            .await
            .map_err(Stage::Resource.refuse())?;
        for (action, target) in implied {
            self.authorize(action, &target, &PolicyCalls::default())?;
        }
        Ok(())
    }

    /// Reads the standard input of an authorized exec and scans it.
    async fn read_stdin(
        &mut self,
        body: &mut RequestBody,
        target: &Target,
        flags: &mut Flags,
    ) -> Result<(), Refusal> {
        let shapes = self.orchestrator.shapes.for_project(target.project_id);
        let stdin = body
            .read_stdin(self.orchestrator, self.caller, shapes)
            .await
            .map_err(Stage::Arguments.refuse())?;
        let Some(stdin) = stdin else { return Ok(()) };
        match stdin.verdict {
            Ok(stdin_flags) => stdin_flags
                .flagged
                .iter()
                .for_each(|file| flags.add(&file.path, &file.shape)),
            Err(leak) => {
                self.intent.detail = leak.record();
                return Err(Refusal {
                    stage: Stage::Secrets,
                    error: leak.error(),
                });
            }
        }
        self.intent.detail.insert("stdin".to_owned(), stdin.record);
        Ok(())
    }

    /// Replaces what audit records must not contain: callers can put a secret anywhere.
    fn redact(&mut self) {
        let detail = Value::Object(std::mem::take(&mut self.intent.detail));
        let has_secret = self
            .orchestrator
            .record_scanner()
            .find_in_json(&detail)
            .is_some();
        if let Value::Object(detail) = detail {
            self.intent.detail = if has_secret {
                Map::from_iter([("redacted".to_owned(), json!(true))])
            } else {
                detail
            };
        }
        self.intent.resource = self
            .intent
            .resource
            .take()
            .filter(|resource| !self.orchestrator.is_secret(resource));
    }

    fn admitted(
        &self,
        mut parts: Parts,
        body: RequestBody,
        target: &Target,
        admission: Admission,
    ) -> AdmittedCall {
        let Admission {
            flags,
            patch,
            repaired,
        } = admission;
        let ForwardedBody {
            body,
            secret,
            scan,
            content_type,
        } = body.into_forwarded();
        if let Some(scan) = scan {
            parts.extensions.insert(scan);
        }
        if let Some(patch) = patch {
            parts.extensions.insert(patch);
        }
        if let Some(content_type) = content_type {
            parts
                .headers
                .insert(http::header::CONTENT_TYPE, content_type);
        }
        parts.headers.remove(http::header::CONTENT_LENGTH);
        if let Some(id) = self.intent.call_id {
            parts.extensions.insert(CallId::from_uuid(id));
        }
        if matches!(self.route.body, BodyKind::Json | BodyKind::Secret) {
            parts.extensions.insert(service_json::Reserved);
        }
        if self.tool.is_some() && self.caller.kind != TokenKind::User {
            parts
                .extensions
                .insert(self.caller.clone().authorized_by_gate());
        }
        if let Some(session) = target.session.filter(|_| target.visible) {
            parts.extensions.insert(AuthorizedSession(session));
        }
        AdmittedCall {
            request: Request::from_parts(parts, body),
            secret,
            flags,
            repaired,
        }
    }
}

/// Refuses a tool call whose target does not belong to its task or to the task's project. A target
/// that does becomes visible: the caller may see the task.
fn check_ownership(task: Option<&Target>, target: &mut Target) -> Result<(), Refusal> {
    let Some(task) = task else { return Ok(()) };
    let belongs = match (target.task_id, target.project_id) {
        (Some(_), _) => target.task_id == task.task_id,
        (None, Some(_)) => target.project_id == task.project_id,
        (None, None) => true,
    };
    target.visible |= belongs;
    if belongs {
        Ok(())
    } else {
        Err(Refusal {
            stage: Stage::Task,
            error: target.missing(),
        })
    }
}

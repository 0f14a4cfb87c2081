//! The one point that every call of the user API passes: who calls what, whether that is allowed, and the record of both.
//!
//! What must stay true: nothing happens to anything before it was decided (`rules.rs` says what a route means, `resources.rs`
//! whose things it touches, the policies whether it may), looked through for secrets (`brought.rs`) and written down as an intent.
//! No answer goes out before its outcome is written (`answer.rs`). A refusal is written like everything else.

mod answer;
mod brought;
mod facts;
mod leaks;
mod resources;
mod rules;
mod seeds;

use std::collections::HashMap;

use axum::{
    extract::{FromRequestParts as _, MatchedPath, Query, RawPathParams, Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditSubject, CALL_HEADER, ErrorCode, ExecId, Flags,
    JobId, SessionId, TokenKind,
};
use cynode_policy::{Action, Channel, Decision, Resource, ShapeAction, ShapePolicy};
use cynode_service::{ApiError, compute, connections::Connection, edge, json, listen::Peer};
use http::{HeaderName, HeaderValue, request::Parts};
use serde_json::{Map, Value, json};
use uuid::Uuid;

pub(crate) use brought::json_body;
pub(crate) use facts::compared;
pub(crate) use resources::wants_bytes;
pub(crate) use rules::runs_on_node;
pub(crate) use seeds::SeedScan;

use crate::{
    Orchestrator,
    audit::{Failure, Surface},
    caller::{self, Caller, Seen},
    db::{self, SessionAt},
    known::{Guess, Wrong},
    mcp::{ByTool, Stage},
};
use answer::{Begun, Said};
use brought::{Brought, Found, Incoming, Intake, Passage};
use facts::Calls;
use leaks::Leak;
use resources::{About, Named};
use rules::{Effect, Rule, Takes};

/// A body that is taken before it was made sure who calls is no longer.
const LITTLE: u64 = 64 * 1024;
/// So many paths may one call touch.
const MAX_PATHS: usize = 10_000;
/// The texts of all of them together.
const MAX_PATHS_BYTES: usize = 16 * 1024 * 1024;
/// And with more than so many, deciding leaves the others' thread.
const MANY_PATHS: usize = 64;

/// The id of a call, for whoever takes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Called(pub(crate) Uuid);

/// The session of a call, as it was when that was decided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decided(pub(crate) SessionAt);

/// Where a call was refused, and with what.
#[derive(Debug)]
struct Refusal {
    stage: &'static str,
    error: ApiError,
}

/// A call that was admitted.
#[derive(Debug)]
struct Admitted {
    request: Request,
    /// What is found while its body passes.
    found: Found,
    flags: Flags,
}

fn at(stage: &'static str) -> impl FnOnce(ApiError) -> Refusal {
    move |error| Refusal { stage, error }
}

pub(crate) async fn pass(
    State(orchestrator): State<Orchestrator>,
    request: Request,
    next: Next,
) -> Response {
    // An address that does not exist does nothing.
    let Some(matched) = request.extensions().get::<MatchedPath>().cloned() else {
        return next.run(request).await;
    };
    let Some(caller) = request.extensions().get::<Caller>().cloned() else {
        return ApiError::new(ErrorCode::Unauthorized, "no bearer token was sent").into_response();
    };
    let Some(rule) = rules::find(request.method(), matched.as_str()) else {
        return edge::method_not_allowed().await.into_response();
    };
    let (mut parts, body) = request.into_parts();
    let Some(guess) = parts.extensions.remove::<Guess>() else {
        return attempt(
            &orchestrator,
            rule,
            &caller,
            parts,
            Incoming::Coming(body),
            None,
            next,
        )
        .await
        .unwrap_or_else(|_| unsure());
    };
    let peer = parts.extensions.get::<Peer>().map(|peer| peer.0.ip());
    let taken = brought::json_bytes(body).await;
    match attempt(
        &orchestrator,
        rule,
        &caller,
        parts.clone(),
        Incoming::Here(taken.clone()),
        Some(&guess),
        next.clone(),
    )
    .await
    {
        Ok(response) => response,
        Err(Wrong {
            found: Ok(Some(facts)),
            at,
            ..
        }) => {
            let caller = caller::introduce(
                &mut parts.extensions,
                guess.token_hash,
                Some(guess.session_id),
                facts,
                at,
            );
            attempt(
                &orchestrator,
                rule,
                &caller,
                parts,
                Incoming::Here(taken),
                None,
                next,
            )
            .await
            .unwrap_or_else(|_| unsure())
        }
        Err(Wrong {
            found: Ok(None),
            call_id,
            ..
        }) => {
            if let Some(connection) = parts.extensions.get::<Connection>() {
                connection.disown();
            }
            let failure = Failure::new(Surface::UserApi, peer, &guess.token_hash);
            let refused = caller::refused(&orchestrator, failure).await;
            called(refused.into_response(), call_id)
        }
        Err(Wrong {
            found: Err(error),
            call_id,
            ..
        }) => called(error.into_response(), call_id),
    }
}

/// Whether a call may come here with a guess of who calls. What it brings is taken before that is made sure of, so it is little.
pub(crate) fn makes_sure(request: &Request) -> bool {
    let rule = || {
        request
            .extensions()
            .get::<MatchedPath>()
            .and_then(|matched| rules::find(request.method(), matched.as_str()))
    };
    let headers = request.headers();
    let size = headers
        .get(http::header::CONTENT_LENGTH)
        .and_then(|size| size.to_str().ok()?.parse::<u64>().ok());
    size.is_some_and(|size| size <= LITTLE)
        && !headers.contains_key(http::header::EXPECT)
        && rule().is_some_and(Rule::makes_sure)
}

/// What can't be: only a guess is wrong.
fn unsure() -> Response {
    ApiError::new(ErrorCode::Internal, "who calls could not be made sure of").into_response()
}

/// Says which call an answer is to.
fn called(mut response: Response, call_id: Option<Uuid>) -> Response {
    if let Some(value) = call_id.and_then(|id| HeaderValue::from_str(&id.to_string()).ok()) {
        response
            .headers_mut()
            .insert(HeaderName::from_static(CALL_HEADER), value);
    }
    response
}

/// Decides, writes down and carries out a call. With a guess that turns out wrong, nothing was done.
async fn attempt(
    orchestrator: &Orchestrator,
    rule: &'static Rule,
    caller: &Caller,
    parts: Parts,
    incoming: Incoming,
    guess: Option<&Guess>,
    next: Next,
) -> Result<Response, Wrong> {
    let mut intent = intent(rule, caller, &parts, orchestrator);
    let call_id = intent.call_id;
    let response = match Box::pin(admit(
        orchestrator,
        rule,
        caller,
        &mut intent,
        parts,
        incoming,
    ))
    .await
    {
        Ok(admitted) => Box::pin(run(orchestrator, rule, intent, admitted, guess, next)).await?,
        Err(refusal) => {
            if let Some(guess) = guess {
                guess.make_sure(orchestrator).await?;
            }
            refuse(orchestrator, intent, refusal).await
        }
    };
    Ok(called(response, call_id))
}

fn intent(rule: &Rule, caller: &Caller, request: &Parts, orchestrator: &Orchestrator) -> AuditBody {
    // What a caller chose as the id of a request may be anything.
    let request_id = request
        .headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok())
        .filter(|id| !orchestrator.is_secret(id));
    AuditBody {
        call_id: Some(Uuid::now_v7()),
        request_id: request_id.map(str::to_owned),
        subject: Some(caller.subject()),
        detail: by_tool(request.extensions.get()),
        ..AuditBody::new(AuditKind::Intent, rule.action.as_str())
    }
}

/// What a record says of the tool by which a call came.
fn by_tool(by: Option<&ByTool>) -> Map<String, Value> {
    by.map(|by| ("tool".to_owned(), json!(by.name)))
        .into_iter()
        .collect()
}

/// Makes sure that a tool's caller is good for the task that the call names. Gives what the call names has to belong to.
async fn check_task(
    orchestrator: &Orchestrator,
    caller: &Caller,
    by: Option<&ByTool>,
    intent: &mut AuditBody,
) -> Result<Option<About>, Refusal> {
    let Some(task) = by.and_then(|by| by.task) else {
        return Ok(None);
    };
    let about = db::soon(orchestrator.about_task(caller, task))
        .await
        .map_err(at("task"))?;
    place(intent, &about);
    // What runs in a sandbox need not see its task to be good for it.
    if caller.kind == TokenKind::Sandbox && caller.task_ids.first() == Some(&task) {
        return Ok(Some(about));
    }
    let decision = orchestrator.policies.decide(
        &caller.principal(),
        Action::TaskShow,
        &about.resource,
        &cynode_policy::Call::default(),
    );
    if decision.allowed {
        return Ok(Some(about));
    }
    intent.decision = Some(AuditDecision::Deny);
    intent.rules = decision.rules;
    Err(Refusal {
        stage: "task",
        error: about.missing(),
    })
}

/// What a tool's call names belongs to its task, or to the project of that. Whoever is good for the task may know of it then.
fn check_belongs(task: Option<&About>, about: &mut About) -> Result<(), Refusal> {
    let Some(task) = task else { return Ok(()) };
    let belongs = match (about.task_id, about.project_id) {
        (Some(_), _) => about.task_id == task.task_id,
        (None, Some(_)) => about.project_id == task.project_id,
        (None, None) => true,
    };
    about.visible |= belongs;
    if belongs {
        Ok(())
    } else {
        Err(Refusal {
            stage: "task",
            error: about.missing(),
        })
    }
}

/// Decides whether a call may go on. What is learnt on the way is in the record, whatever is decided.
async fn admit(
    orchestrator: &Orchestrator,
    rule: &Rule,
    caller: &Caller,
    intent: &mut AuditBody,
    mut parts: Parts,
    incoming: Incoming,
) -> Result<Admitted, Refusal> {
    let by = parts.extensions.get::<ByTool>().copied();
    // A tool was looked at before for whom it is.
    if by.is_none() {
        check_kind(rule, caller).map_err(at("agent_type"))?;
    }
    edge::check_query(&parts.uri).map_err(at("arguments"))?;
    let path = path_of(&mut parts).await.map_err(at("arguments"))?;
    let query = query_of(&parts.uri);
    let mut seen = parts.extensions.remove::<Seen>();
    let task = check_task(orchestrator, caller, by.as_ref(), intent).await?;
    let mut project = None;
    // Bytes of any size are taken only from somebody who may send them there.
    if matches!(rule.takes, Takes::File | Takes::Archive | Takes::Stream) {
        let named = Named {
            path: &path,
            query: &query,
            body: &Value::Null,
            seen: seen.take(),
        };
        let mut about = db::soon(orchestrator.about(rule.on, caller, &named))
            .await
            .map_err(at("resource"))?;
        place(intent, &about);
        keep_clean(orchestrator, intent);
        check_belongs(task.as_ref(), &mut about)?;
        project = about.project_id;
        let calls = Calls::new(rule.action, &Value::Null, &query, std::iter::empty())
            .map_err(at("arguments"))?;
        decide(orchestrator, rule.action, caller, &about, &calls, intent)?;
    }
    let target = target(rule.action, &path, &query);
    let intake = Intake {
        caller,
        rule,
        shapes: orchestrator.shapes.of(project),
        path: &target,
        headers: &parts.headers,
    };
    let mut brought = Brought::take(orchestrator, intake, incoming)
        .await
        .map_err(at("arguments"))?;
    let size = brought.size();
    let permit = compute::permit(size).await;
    permit.run(|| identify(rule, &mut brought, intent, &path));
    let named = Named {
        path: &path,
        query: &query,
        body: brought.json(),
        seen,
    };
    let mut about = db::soon(orchestrator.about(rule.on, caller, &named))
        .await
        .map_err(at("resource"))?;
    place(intent, &about);
    if let Err(refusal) = check_belongs(task.as_ref(), &mut about) {
        keep_clean(orchestrator, intent);
        return Err(refusal);
    }
    let permit_to_judge = compute::permit(size).await;
    let shapes = orchestrator.shapes.of(about.project_id);
    let judge = || {
        let within = check_path_bytes(&query, brought.archive_paths());
        let calls = within.and_then(|()| {
            Calls::new(rule.action, brought.json(), &query, brought.archive_paths())
        });
        let mut detail = facts::detail(rule.action, brought.json(), &query);
        detail.extend(by_tool(by.as_ref()));
        if let Ok(calls) = &calls {
            calls.tell(rule.action, &mut detail);
        }
        brought.tell(&mut detail);
        intent.detail = facts::bounded(detail);
        let mut flags = Flags::default();
        if rule.enters {
            let address = query
                .iter()
                .map(|(name, value)| (name, value))
                .chain(path.iter());
            flags = check_secrets(orchestrator, rule.action, shapes, &brought, address).map_err(
                |leak| {
                    // The record says where, never what; nothing that could hold it stays.
                    intent.detail = leak.record();
                    intent.resource = None;
                    // Who may not know of a thing does not learn of it by this either.
                    Refusal {
                        stage: "secrets",
                        error: if about.visible {
                            leak.error()
                        } else {
                            about.missing()
                        },
                    }
                },
            )?;
        }
        keep_clean(orchestrator, intent);
        let too_many = || {
            ApiError::new(
                ErrorCode::TooLarge,
                format!("names more than {MAX_PATHS} paths; split it"),
            )
        };
        let calls = calls.and_then(|calls| {
            if calls.len() > MAX_PATHS {
                Err(too_many())
            } else {
                Ok(calls)
            }
        });
        // A caller who may not see the session does not learn from a bad diff that it exists.
        let calls = calls.map_err(|error| Refusal {
            stage: "arguments",
            error: if about.visible {
                error
            } else {
                about.missing()
            },
        })?;
        decide(orchestrator, rule.action, caller, &about, &calls, intent)?;
        Ok(flags)
    };
    let mut flags = permit_to_judge.run(judge)?;
    let implied =
        db::soon(orchestrator.implied(rule.action, caller, &about, &parts.headers, brought.json()))
            .await
            .map_err(at("resource"))?;
    for (action, about) in implied {
        decide(
            orchestrator,
            action,
            caller,
            &about,
            &Calls::default(),
            intent,
        )?;
    }
    // Whoever may do something may know of it.
    if let Some(input) = brought
        .take_input(
            orchestrator,
            caller,
            orchestrator.shapes.of(about.project_id),
        )
        .await
        .map_err(at("arguments"))?
    {
        match input.judged {
            Ok(found) => found
                .flagged
                .iter()
                .for_each(|file| flags.add(&file.path, &file.shape)),
            Err(leak) => {
                intent.detail = leak.record();
                return Err(Refusal {
                    stage: "secrets",
                    error: leak.error(),
                });
            }
        }
        intent.detail.insert("stdin".to_owned(), input.record);
    }
    leaks::record(&flags, &mut intent.detail);
    let Passage {
        body,
        found,
        scan,
        content_type,
    } = brought.into_passage();
    if let Some(scan) = scan {
        parts.extensions.insert(scan);
    }
    if let Some(content_type) = content_type {
        parts
            .headers
            .insert(http::header::CONTENT_TYPE, content_type);
    }
    parts.headers.remove(http::header::CONTENT_LENGTH);
    if let Some(id) = intent.call_id {
        parts.extensions.insert(Called(id));
    }
    if matches!(rule.takes, Takes::Json) {
        parts.extensions.insert(json::Reserved);
    }
    if by.is_some() && caller.kind != TokenKind::User {
        parts.extensions.insert(caller.clone().let_through());
    }
    if let Some(at) = about.session.filter(|_| about.visible) {
        parts.extensions.insert(Decided(at));
    }
    Ok(Admitted {
        request: Request::from_parts(parts, body),
        found,
        flags,
    })
}

/// Where a file, an archive or an artifact is to be.
fn target(action: Action, path: &HashMap<String, String>, query: &[(String, String)]) -> String {
    match action {
        Action::ArtifactPut => path.get("path").cloned().unwrap_or_default(),
        Action::FileWrite | Action::FileImport => facts::queried_path(query),
        _ => String::new(),
    }
}

/// Refuses an archive whose paths, each with the directory that it is unpacked into, would take too much memory.
fn check_path_bytes<'a>(
    query: &[(String, String)],
    entries: impl Iterator<Item = &'a str>,
) -> Result<(), ApiError> {
    let directory = query
        .iter()
        .filter(|(name, _)| name.starts_with("path"))
        .map(|(_, value)| value.len() + 1)
        .sum::<usize>();
    let bytes = entries
        .map(|entry| entry.len().saturating_add(directory))
        .fold(0, usize::saturating_add);
    if bytes > MAX_PATHS_BYTES {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("the paths of the archive have more than {MAX_PATHS_BYTES} bytes together"),
        ));
    }
    Ok(())
}

/// Asks the policies; for each path that a call touches. The rules of an earlier decision on the same call stay in its record.
fn decide(
    orchestrator: &Orchestrator,
    action: Action,
    caller: &Caller,
    about: &About,
    calls: &Calls<'_>,
    intent: &mut AuditBody,
) -> Result<(), Refusal> {
    let principal = caller.principal();
    let mut rules: std::collections::BTreeSet<String> = intent.rules.iter().cloned().collect();
    let mut ask = || {
        for call in calls.iter() {
            let decision = orchestrator
                .policies
                .decide(&principal, action, &about.resource, &call);
            if !decision.allowed {
                return Some(decision);
            }
            rules.extend(decision.rules);
        }
        None
    };
    // Many of them take their time; others need not wait for it.
    let refused = if calls.len() > MANY_PATHS {
        tokio::task::block_in_place(ask)
    } else {
        ask()
    };
    if let Some(decision) = refused {
        intent.decision = Some(AuditDecision::Deny);
        intent.rules.clone_from(&decision.rules);
        return Err(Refusal {
            stage: "policy",
            error: if about.visible {
                denied(action, &decision)
            } else {
                about.missing()
            },
        });
    }
    intent.decision = Some(AuditDecision::Allow);
    intent.rules = rules.into_iter().collect();
    Ok(())
}

/// A record never holds a secret, whatever a caller put where.
fn keep_clean(orchestrator: &Orchestrator, intent: &mut AuditBody) {
    let detail = Value::Object(std::mem::take(&mut intent.detail));
    let scanner = if orchestrator.shapes.is_off() {
        &orchestrator.system_scanner
    } else {
        &orchestrator.scanner
    };
    let found = scanner.find_in_json(&detail).is_some();
    if let Value::Object(detail) = detail {
        intent.detail = if found {
            Map::from_iter([("redacted".to_owned(), json!(true))])
        } else {
            detail
        };
    }
    intent.resource = intent
        .resource
        .take()
        .filter(|resource| !orchestrator.is_secret(resource));
}

fn check_kind(rule: &Rule, caller: &Caller) -> Result<(), ApiError> {
    match caller.kind {
        TokenKind::User => Ok(()),
        TokenKind::Sandbox => Err(ApiError::new(
            ErrorCode::Forbidden,
            "this address is not for sandboxes",
        )),
        TokenKind::ProjectManager | TokenKind::ProjectAnalyst if rule.agents => Ok(()),
        TokenKind::ProjectManager | TokenKind::ProjectAnalyst => Err(ApiError::new(
            ErrorCode::Forbidden,
            "this address is not for agents' tokens",
        )),
    }
}

async fn path_of(parts: &mut Parts) -> Result<HashMap<String, String>, ApiError> {
    let params = RawPathParams::from_request_parts(parts, &())
        .await
        .map_err(|error| ApiError::invalid(error.body_text()))?;
    let path: HashMap<String, String> = params
        .iter()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    if let Some(text) = path
        .get("exec_id")
        .filter(|text| text.parse::<ExecId>().is_err())
    {
        return Err(ApiError::new(
            ErrorCode::ExecNotFound,
            format!(
                "'{}' is not an id",
                text.chars().take(100).collect::<String>()
            ),
        ));
    }
    Ok(path)
}

/// The query as far as it can be read; who takes the call reads it strictly.
fn query_of(uri: &http::Uri) -> Vec<(String, String)> {
    Query::<Vec<(String, String)>>::try_from_uri(uri)
        .map(|query| query.0)
        .unwrap_or_default()
}

/// What is made gets its id here, so that its record has it.
fn identify(
    rule: &Rule,
    brought: &mut Brought,
    intent: &mut AuditBody,
    path: &HashMap<String, String>,
) {
    match rule.action {
        Action::SessionExec => {
            intent.exec_id = brought
                .identify("exec_id", || ExecId::generate().to_string())
                .and_then(|id| id.parse().ok())
        }
        Action::SessionCreate => {
            drop(brought.identify("session_id", || SessionId::generate().to_string()))
        }
        Action::JobCreate => drop(brought.identify("job_id", || JobId::generate().to_string())),
        _ => intent.exec_id = path.get("exec_id").and_then(|id| id.parse().ok()),
    }
}

fn place(intent: &mut AuditBody, about: &About) {
    // What somebody may not know of is still what was asked for.
    intent.project_id = about.project_id.or(intent.project_id);
    intent.task_id = about.task_id.or(intent.task_id);
    intent.session_id = about.session_id.or(intent.session_id);
    intent.job_id = about.job_id.or(intent.job_id);
    intent.resource = about.named.clone().or(intent.resource.take());
}

/// Looks for secrets in the address of a call and in what it brings. Gives what is let in and flagged.
fn check_secrets<'a>(
    orchestrator: &Orchestrator,
    action: Action,
    shapes: ShapePolicy,
    brought: &Brought,
    address: impl Iterator<Item = (&'a String, &'a String)>,
) -> Result<Flags, Leak> {
    let mut flags = Flags::default();
    // First: what is found in a body is told by names that stand here.
    for (name, value) in address {
        let decoded = if name.ends_with("_b64") {
            STANDARD.decode(value).ok()
        } else {
            None
        };
        let forms = || std::iter::once(value.as_bytes()).chain(decoded.as_deref());
        if let Some(hit) = forms().find_map(|bytes| orchestrator.system_scanner.find(bytes)) {
            return Err(Leak::of_system(name, hit.what));
        }
        let treatment = if action == Action::SessionPty && name == "argv" {
            shapes.action(Channel::Argv)
        } else {
            leaks::of_names(shapes)
        };
        let hit = if treatment == ShapeAction::Off {
            None
        } else {
            forms().find_map(|bytes| orchestrator.scanner.find(bytes))
        };
        match (hit, treatment) {
            (Some(hit), ShapeAction::Flag) => flags.add(name, hit.what),
            (Some(hit), _) => {
                return Err(Leak {
                    field: name.clone(),
                    path: None,
                    what: hit.what,
                    is_system: false,
                });
            }
            (None, _) => {}
        }
    }
    let brought = brought.judge(orchestrator, action, shapes)?;
    Ok(if flags.is_empty() { brought } else { flags })
}

pub(crate) fn count_secret() {
    metrics::counter!("cynode_secrets_refused_total").increment(1);
}

pub(crate) fn denied(action: Action, decision: &Decision) -> ApiError {
    let detail = match (decision.rules.as_slice(), decision.errors.as_slice()) {
        ([], []) => format!("no rule allows {} here", action.as_str()),
        (_, [error, ..]) => format!(
            "{} is refused, because a rule could not be evaluated: {error}",
            action.as_str()
        ),
        (rules, []) => format!("{} is forbidden by {}", action.as_str(), rules.join(", ")),
    };
    let error = ApiError::new(ErrorCode::DeniedByPolicy, detail);
    ApiError(Box::new(error.0.with("rules", decision.rules.clone())))
}

/// Writes a refusal down, and answers it.
async fn refuse(
    orchestrator: &Orchestrator,
    mut intent: AuditBody,
    Refusal { stage, error }: Refusal,
) -> Response {
    // That the database does not answer is no refusal, and can't be written.
    if error.0.is(ErrorCode::StoreUnavailable) {
        return error.into_response();
    }
    if stage == "secrets" {
        count_secret();
    }
    intent.stage = Some(stage.to_owned());
    if matches!(stage, "agent_type" | "secrets" | "task")
        || intent.decision.is_none() && stage == "resource"
    {
        intent.decision = Some(AuditDecision::Deny);
    }
    let outcome = Said {
        status: error.0.status,
        code: Some(error.0.code.clone()),
        rules: intent.rules.clone(),
        detail: Map::new(),
    };
    let outcome = outcome.outcome(intent.clone());
    match orchestrator.audit.note(vec![intent, outcome]).await {
        Ok(()) => {
            let mut response = error.into_response();
            response.extensions_mut().insert(Stage(stage));
            response
        }
        Err(error) => error.into_response(),
    }
}

async fn run(
    orchestrator: &Orchestrator,
    rule: &'static Rule,
    intent: AuditBody,
    admitted: Admitted,
    guess: Option<&Guess>,
    next: Next,
) -> Result<Response, Wrong> {
    Ok(match rule.effect {
        Effect::Read => {
            let (response, said) = answer::read(next.run(admitted.request).await).await;
            let outcome = said.outcome(intent.clone());
            match orchestrator.audit.note(vec![intent, outcome]).await {
                Ok(()) => response,
                Err(error) => error.into_response(),
            }
        }
        // To its end, even when the caller goes away.
        Effect::Here | Effect::Made => {
            let orchestrator = orchestrator.clone();
            let done = tokio::spawn(async move {
                match begin(&orchestrator, intent).await {
                    Ok(begun) => effect(&orchestrator, rule, begun, admitted, next).await,
                    Err(error) => error.into_response(),
                }
            });
            done.await.unwrap_or_else(|_| {
                ApiError::new(ErrorCode::Internal, "the call was interrupted").into_response()
            })
        }
        Effect::Node => {
            let begun = match guess {
                None => begin(orchestrator, intent).await,
                Some(guess) => begin_surely(orchestrator, intent, guess).await?,
            };
            match begun {
                Ok(begun) => effect(orchestrator, rule, begun, admitted, next).await,
                Err(error) => error.into_response(),
            }
        }
    })
}

/// Writes the intent. From then on a call is begun.
async fn begin(orchestrator: &Orchestrator, intent: AuditBody) -> Result<Begun, ApiError> {
    orchestrator.audit.intent(intent.clone()).await?;
    Ok(Begun::new(orchestrator, intent))
}

/// Writes the intent, and makes sure meanwhile of what it was decided by. If that was wrong, nothing is begun, and that is written.
async fn begin_surely(
    orchestrator: &Orchestrator,
    intent: AuditBody,
    guess: &Guess,
) -> Result<Result<Begun, ApiError>, Wrong> {
    let (begun, sure) = tokio::join!(begin(orchestrator, intent), guess.make_sure(orchestrator));
    if let Err(wrong) = sure {
        let call_id = match begun {
            Ok(begun) => begun.never().await,
            Err(_) => None,
        };
        return Err(Wrong { call_id, ..wrong });
    }
    Ok(begun)
}

async fn effect(
    orchestrator: &Orchestrator,
    rule: &Rule,
    mut begun: Begun,
    admitted: Admitted,
    next: Next,
) -> Response {
    let Admitted {
        request,
        found,
        flags,
    } = admitted;
    begun.carry_out();
    let mut response = next.run(request).await;
    if let Some(what) = found.what() {
        count_secret();
        response = Leak::of_system("body", what).error().into_response();
    }
    leaks::answer(
        rule.action,
        answer::conclude(orchestrator, rule, begun, response).await,
        &flags,
    )
}

impl Orchestrator {
    /// Whether a record must not hold a text.
    pub(crate) fn is_secret(&self, text: &str) -> bool {
        let scanner = if self.shapes.is_off() {
            &self.system_scanner
        } else {
            &self.scanner
        };
        scanner.find(text.as_bytes()).is_some()
    }

    /// Decides something that is known only while a call is carried out.
    pub(crate) fn check(
        &self,
        caller: &Caller,
        action: Action,
        resource: &Resource,
        call: &cynode_policy::Call,
    ) -> Result<(), ApiError> {
        let decision = self
            .policies
            .decide(&caller.principal(), action, resource, call);
        if decision.allowed {
            Ok(())
        } else {
            Err(denied(action, &decision))
        }
    }

    /// Writes down that a node has registered.
    pub(crate) async fn note_registration(
        &self,
        node: &crate::db::NodeRow,
    ) -> Result<(), ApiError> {
        let mut body = AuditBody::new(AuditKind::Authentication, "node.register");
        body.subject = Some(AuditSubject {
            kind: "node".to_owned(),
            name: Some(node.name.clone()),
            user_id: None,
            token_id: None,
            node_id: Some(node.id),
        });
        body.decision = Some(AuditDecision::Allow);
        body.result = Some(cynode_api::AuditResult::Done);
        body.detail
            .insert("api_url".to_owned(), json!(node.api_url));
        self.audit.note(vec![body]).await
    }

    /// Writes down that a node was given the bytes of an artifact.
    pub(crate) async fn note_artifact(
        &self,
        node: &crate::db::NodeRow,
        artifact: &cynode_api::Artifact,
    ) -> Result<(), ApiError> {
        let mut body = AuditBody::new(AuditKind::Event, "artifact.get");
        body.subject = Some(AuditSubject {
            kind: "node".to_owned(),
            name: Some(node.name.clone()),
            user_id: None,
            token_id: None,
            node_id: Some(node.id),
        });
        body.task_id = Some(artifact.task_id);
        body.resource = Some(format!("artifact:{}", artifact.id));
        body.result = Some(cynode_api::AuditResult::Done);
        body.detail
            .insert("sha256".to_owned(), json!(artifact.sha256));
        self.audit.note(vec![body]).await
    }

    /// What to do when a terminal is closed: to say so in the trail.
    pub(crate) fn note_closed_terminal(
        &self,
        caller: &Caller,
        session_id: SessionId,
        called: Option<Called>,
    ) -> impl FnOnce() + Send + use<> {
        let (audit, subject) = (self.audit.clone(), caller.subject());
        move || {
            let event = AuditBody::new(AuditKind::Event, "session.pty.closed");
            audit.tell(AuditBody {
                subject: Some(subject),
                session_id: Some(session_id),
                call_id: called.map(|called| called.0),
                ..event
            });
        }
    }

    /// Notes a command that goes on after its call, so that its end is told too.
    pub(crate) async fn follow_exec(&self, intent: &AuditBody) {
        let (Some(exec_id), Some(session_id), Some(call_id)) =
            (intent.exec_id, intent.session_id, intent.call_id)
        else {
            return;
        };
        let by = intent
            .subject
            .as_ref()
            .and_then(|subject| subject.name.clone())
            .unwrap_or_default();
        if let Err(error) = self.db.insert_exec(exec_id, session_id, call_id, &by).await {
            tracing::warn!(%exec_id, error = %error.0, "The end of a command will not be told.");
        }
    }
}

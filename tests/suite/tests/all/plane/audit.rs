//! The audit trail: what it holds, that nobody changes it unnoticed, that it grows old honestly, and that a crash leaves no call open.

mod crashes;
mod failures;
mod guesses;
mod reading;
mod records;
mod refusals;
mod signing;
mod tampering;
mod truncation;

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use cynode_api::{
    AuditKind, AuditRecord, AuditVerdict, AuditVerifyLine, CALL_HEADER, TaskCreate, event_limits,
};
use cynode_client::{AuditFilter, UserClient};
use cynode_tests::{Answer, Plane, RunningOrchestrator, eventually, hex};
use http::Method;
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

const PATIENCE: Duration = Duration::from_secs(60);

/// What a verification says in the end.
async fn verdict(client: &UserClient) -> Result<AuditVerdict> {
    let mut verification = client.verify_audit().await?;
    let mut last = None;
    while let Some(line) = verification.next().await? {
        if let AuditVerifyLine::Verdict { verdict } = line {
            last = Some(verdict);
        }
    }
    last.context("it ends with a verdict")
}

/// Fails unless nothing was changed.
pub(super) async fn intact(client: &UserClient) -> Result<AuditVerdict> {
    let verdict = verdict(client).await?;
    ensure!(
        verdict.intact && verdict.problems.is_empty(),
        "{verdict:#?}"
    );
    Ok(verdict)
}

/// All the records that somebody asks for.
pub(super) async fn records(client: &UserClient, filter: &AuditFilter) -> Result<Vec<AuditRecord>> {
    let mut all = Vec::new();
    loop {
        let after = all.last().map_or(0, |record: &AuditRecord| record.cursor);
        let page = client.audit(after, filter, Duration::ZERO).await?;
        let is_last = page.items.len() < event_limits::MAX_PAGE as usize;
        all.extend(page.items);
        if is_last {
            return Ok(all);
        }
    }
}

async fn of_action(client: &UserClient, action: &str) -> Result<Vec<AuditRecord>> {
    records(
        client,
        &AuditFilter {
            action: Some(action.to_owned()),
            ..Default::default()
        },
    )
    .await
}

/// What the trail tells of a call.
#[derive(Debug)]
struct Told {
    intent: AuditRecord,
    outcome: AuditRecord,
}

/// One intent and one outcome, in this order, of the same thing by the same caller.
async fn told(client: &UserClient, call_id: &str) -> Result<Told> {
    let found = records(
        client,
        &AuditFilter {
            call: Some(call_id.to_owned()),
            ..Default::default()
        },
    )
    .await?;
    let (mut intents, mut outcomes) = (Vec::new(), Vec::new());
    for record in found {
        match record.body.kind {
            AuditKind::Intent => intents.push(record),
            AuditKind::Outcome => outcomes.push(record),
            _ => {}
        }
    }
    let (Ok([intent]), Ok([outcome])) = (<[_; 1]>::try_from(intents), <[_; 1]>::try_from(outcomes))
    else {
        bail!("call {call_id} has not one intent and one outcome");
    };
    ensure!(intent.cursor < outcome.cursor, "{intent:?} {outcome:?}");
    let about = |record: &AuditRecord| {
        let body = &record.body;
        json!([
            body.action,
            body.subject,
            body.session_id,
            body.task_id,
            body.job_id,
            body.exec_id,
            body.resource
        ])
    };
    ensure!(about(&intent) == about(&outcome), "{intent:?} {outcome:?}");
    Ok(Told { intent, outcome })
}

/// The call that an answer is to.
fn call_of(answer: &Answer) -> Result<String> {
    let call_id = answer.header(CALL_HEADER);
    ensure!(
        !call_id.is_empty(),
        "the answer does not name its call: {answer:?}"
    );
    Ok(call_id.to_owned())
}

/// Calls, and gives the answer and what is told of it.
async fn call(client: &UserClient, request: RequestBuilder) -> Result<(Answer, Told)> {
    let answer = Answer::of(request).await?;
    let told = told(client, &call_of(&answer)?).await?;
    ensure!(
        told.outcome.body.status == Some(answer.status),
        "{}: {told:?}",
        answer.status
    );
    Ok((answer, told))
}

/// The same, when it must be done.
async fn done(client: &UserClient, request: RequestBuilder) -> Result<(Answer, Told)> {
    let (answer, told) = call(client, request).await?;
    ensure!(
        (200..300).contains(&answer.status),
        "{}: {}",
        answer.status,
        String::from_utf8_lossy(&answer.body)
    );
    ensure!(
        told.outcome.body.result == Some(cynode_api::AuditResult::Done),
        "{told:?}"
    );
    Ok((answer, told))
}

fn body(answer: &Answer) -> Result<Value> {
    serde_json::from_slice(&answer.body)
        .with_context(|| String::from_utf8_lossy(&answer.body).into_owned())
}

/// A request to an orchestrator that stands alone.
fn request(
    orchestrator: &RunningOrchestrator,
    token: &str,
    method: Method,
    path: &str,
) -> Result<RequestBuilder> {
    let http = reqwest::Client::builder()
        .no_proxy()
        .timeout(PATIENCE)
        .build()?;
    Ok(http
        .request(method, format!("{}{path}", orchestrator.url()?))
        .bearer_auth(token))
}

fn sha256(bytes: impl AsRef<[u8]>) -> String {
    hex(&Sha256::digest(bytes))
}

/// Waits until all that was written is signed, in the database and in the file outside it. Nobody may call meanwhile.
async fn signed(plane: &Plane, orchestrator: &RunningOrchestrator) -> Result<()> {
    let unsigned = "select count(*) from audit_streams s left join audit_signed g on g.stream = s.stream where s.seq > coalesce(g.seq, 0)";
    let file = orchestrator
        .state_dir()
        .join("orchestrator/audit-checkpoints.jsonl");
    eventually("all that was written is signed", PATIENCE, async || {
        let newest = plane
            .postgres
            .ask("select line from audit_checkpoints order by number desc limit 1")?;
        let outside = fs_err::read_to_string(&file).unwrap_or_default();
        Ok(plane.postgres.ask(unsigned)? == "0" && outside.lines().last() == Some(newest.as_str()))
    })
    .await
}

/// Calls that each leave an intent and an outcome, which are signed then.
async fn tasks(plane: &Plane, orchestrator: &RunningOrchestrator, count: usize) -> Result<()> {
    let client = orchestrator.client()?;
    for number in 0..count {
        client
            .create_task(&TaskCreate {
                name: format!("task {number}"),
                ..Default::default()
            })
            .await?;
    }
    signed(plane, orchestrator).await
}

/// The stream that an orchestrator writes its calls to now.
fn stream(plane: &Plane) -> Result<String> {
    plane.postgres.ask("select stream from audit_streams where writer not like '% events' order by opened_at desc limit 1")
}

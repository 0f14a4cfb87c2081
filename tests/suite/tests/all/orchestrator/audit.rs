//! The audit trail: its content, detection of tampering, retention, and calls that a crash leaves
//! open.

mod cached_identities;
mod crashes;
mod failures;
mod node_streams;
mod reading;
mod records;
mod refusals;
mod role_streams;
mod signing;
mod tampering;
mod truncation;

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use cynode_api::{
    AuditKind, AuditRecord, AuditVerdict, AuditVerifyLine, CALL_HEADER, TaskCreate, event_limits,
};
use cynode_client::{AuditFilter, UserClient};
use cynode_tests::{Answer, ControlPlane, RunningOrchestrator, eventually};
use http::Method;
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a verification and returns its verdict.
async fn verdict(client: &UserClient) -> Result<AuditVerdict> {
    let mut verification = client.verify_audit().await?;
    let mut last = None;
    while let Some(line) = verification.next().await? {
        if let AuditVerifyLine::Verdict { verdict } = line {
            last = Some(verdict);
        }
    }
    last.context("the verification ends with a verdict")
}

/// Fails unless the trail is intact.
pub(super) async fn assert_trail_intact(client: &UserClient) -> Result<AuditVerdict> {
    let verdict = verdict(client).await?;
    ensure!(
        verdict.intact && verdict.problems.is_empty(),
        "{verdict:#?}"
    );
    Ok(verdict)
}

/// Reads all records that a filter selects.
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

async fn records_of_action(client: &UserClient, action: &str) -> Result<Vec<AuditRecord>> {
    records(
        client,
        &AuditFilter {
            action: Some(action.to_owned()),
            ..Default::default()
        },
    )
    .await
}

/// The two records of a call.
#[derive(Debug)]
struct CallRecord {
    intent: AuditRecord,
    outcome: AuditRecord,
}

/// Reads the records of a call: one intent, then one outcome, with the same target and the same
/// subject.
async fn call_record(client: &UserClient, call_id: &str) -> Result<CallRecord> {
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
        bail!("call {call_id} lacks exactly one intent and one outcome");
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
    Ok(CallRecord { intent, outcome })
}

/// The call id in a response.
fn call_id(answer: &Answer) -> Result<String> {
    let call_id = answer.header(CALL_HEADER);
    ensure!(
        !call_id.is_empty(),
        "the response has no call id: {answer:?}"
    );
    Ok(call_id.to_owned())
}

/// Sends a request and returns the response with the records of the call.
async fn call(client: &UserClient, request: RequestBuilder) -> Result<(Answer, CallRecord)> {
    let answer = Answer::of(request).await?;
    let records = call_record(client, &call_id(&answer)?).await?;
    ensure!(
        records.outcome.body.status == Some(answer.status),
        "{}: {records:?}",
        answer.status
    );
    Ok((answer, records))
}

/// Like `call`, and the call must succeed.
async fn call_ok(client: &UserClient, request: RequestBuilder) -> Result<(Answer, CallRecord)> {
    let (answer, call_record) = call(client, request).await?;
    ensure!(
        (200..300).contains(&answer.status),
        "{}: {}",
        answer.status,
        String::from_utf8_lossy(&answer.body)
    );
    ensure!(
        call_record.outcome.body.result == Some(cynode_api::AuditResult::Done),
        "{call_record:?}"
    );
    Ok((answer, call_record))
}

fn body(answer: &Answer) -> Result<Value> {
    serde_json::from_slice(&answer.body)
        .with_context(|| String::from_utf8_lossy(&answer.body).into_owned())
}

/// A request to an orchestrator without a cluster.
fn request(
    orchestrator: &RunningOrchestrator,
    token: &str,
    method: Method,
    path: &str,
) -> Result<RequestBuilder> {
    let http = reqwest::Client::builder()
        .no_proxy()
        .timeout(TIMEOUT)
        .build()?;
    Ok(http
        .request(method, format!("{}{path}", orchestrator.url()?))
        .bearer_auth(token))
}

fn sha256(bytes: impl AsRef<[u8]>) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Waits until every record is signed, in the database and in the file outside it. No calls may be
/// made meanwhile.
async fn wait_until_signed(
    control_plane: &ControlPlane,
    orchestrator: &RunningOrchestrator,
) -> Result<()> {
    let unsigned = "select count(*) from audit_streams s left join audit_signed g on g.stream = \
                    s.stream where s.seq > coalesce(g.seq, 0)";
    let file = orchestrator
        .state_dir()
        .join("orchestrator/audit-checkpoints.jsonl");
    eventually("every record is signed", TIMEOUT, async || {
        let newest = control_plane
            .postgres
            .query("select line from audit_checkpoints order by number desc limit 1")?;
        let outside = fs_err::read_to_string(&file).unwrap_or_default();
        Ok(control_plane.postgres.query(unsigned)? == "0"
            && outside.lines().last() == Some(newest.as_str()))
    })
    .await
}

/// Makes calls that each leave an intent and an outcome, and waits until these are signed.
async fn create_tasks(
    control_plane: &ControlPlane,
    orchestrator: &RunningOrchestrator,
    count: usize,
) -> Result<()> {
    let client = orchestrator.client()?;
    for number in 0..count {
        client
            .create_task(&TaskCreate {
                name: format!("task {number}"),
                ..Default::default()
            })
            .await?;
    }
    wait_until_signed(control_plane, orchestrator).await
}

/// The stream to which an orchestrator currently writes its calls.
fn stream(control_plane: &ControlPlane) -> Result<String> {
    control_plane.postgres.query(
        "select stream from audit_streams where writer not like '% \
         events' order by opened_at desc limit 1",
    )
}

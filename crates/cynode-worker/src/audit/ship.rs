//! Ships the node's records to the orchestrator, in order and in bounded batches.
//!
//! Invariant: a record is dropped only after the orchestrator has acknowledged it. A batch whose
//! answer is lost is sent again; the orchestrator stores each record once.

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use cynode_api::{ErrorCode, NodeAuditAnswer, NodeAuditBatch, NodeAuditRefusal, Problem};
use cynode_service::telemetry::Chain;
use http::StatusCode;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::NodeTrail;
use crate::sessions::{Sessions, Upstream};

const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Collects the records of a busy node into fewer batches.
const BATCH_INTERVAL: Duration = Duration::from_millis(100);
/// How long a stopping worker tries to ship what is left.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
/// The part of an answer that is read.
const MAX_ANSWER_BYTES: usize = 256 * 1024;

#[derive(Debug, thiserror::Error)]
enum ShipError {
    #[error("this node is not registered with an orchestrator yet")]
    Unregistered,
    #[error("the orchestrator was not reached: {0}")]
    Send(String),
    #[error("the orchestrator answered {0}")]
    Answer(String),
    #[error("the node's audit trail can't be read or written: {0}")]
    Store(#[from] io::Error),
}

/// Why the orchestrator does not take a batch.
enum Refusal {
    /// It expects another record; `None` if none of this stream.
    OutOfOrder(Option<u64>),
    Records(BTreeMap<u64, String>),
}

/// What one attempt did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Shipped,
    NothingToShip,
    /// The backlog was chained anew. It is not shipped yet.
    Rebased,
}

/// Ships until the worker stops, then once more.
pub(crate) async fn run(sessions: Arc<Sessions>, stop: CancellationToken) {
    let trail = sessions.audit.clone();
    if sessions.config.orchestrator_url.is_none() {
        stop.cancelled().await;
        trail.flush().await;
        return;
    }
    let mut backoff = FIRST_BACKOFF;
    while !stop.is_cancelled() {
        let shipped = stop.run_until_cancelled(step(&trail, &sessions)).await;
        let pause = match shipped {
            None => break,
            Some(Ok(Step::Rebased)) => {
                backoff = (backoff * 2).min(MAX_BACKOFF);
                backoff
            }
            Some(Ok(step)) => {
                backoff = FIRST_BACKOFF;
                *trail.0.shared.problem.lock() = None;
                if step == Step::NothingToShip {
                    let stored = trail.0.shared.stored.notified();
                    if stop.run_until_cancelled(stored).await.is_none() {
                        break;
                    }
                }
                BATCH_INTERVAL
            }
            Some(Err(error)) => {
                if !matches!(error, ShipError::Unregistered) {
                    tracing::warn!(%error, "Failed to ship audit records; retrying.");
                }
                *trail.0.shared.problem.lock() = Some(error.to_string());
                let pause = backoff;
                backoff = (backoff * 2).min(MAX_BACKOFF);
                pause
            }
        };
        let paused = stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        if paused.is_none() {
            break;
        }
    }
    trail.flush().await;
    let rest = async { while matches!(step(&trail, &sessions).await, Ok(Step::Shipped)) {} };
    drop(timeout(STOP_TIMEOUT, rest).await);
}

/// Ships one batch.
async fn step(trail: &NodeTrail, sessions: &Sessions) -> Result<Step, ShipError> {
    let Some(batch) = trail.next_batch().await? else {
        return Ok(Step::NothingToShip);
    };
    let upstream = sessions.upstream().map_err(|_| ShipError::Unregistered)?;
    let stream = batch.stream;
    match send(&upstream, &batch).await? {
        Ok(answer) if answer.stream == stream => {
            if trail.acknowledge(stream, answer.next).await? {
                return Ok(Step::Shipped);
            }
            rebase(trail, "the orchestrator has other records", BTreeMap::new()).await
        }
        Ok(_) => Err(ShipError::Answer("for another stream".to_owned())),
        Err(Refusal::OutOfOrder(expected)) => resume(trail, stream, expected).await,
        Err(Refusal::Records(refused)) => {
            let sent = batch.records.iter().map(|record| record.seq);
            let refused: BTreeMap<u64, String> = sent
                .filter_map(|seq| Some((seq, refused.get(&seq)?.clone())))
                .collect();
            if refused.is_empty() {
                return Err(ShipError::Answer("with a refusal of no record".to_owned()));
            }
            rebase(trail, "the orchestrator refused records", refused).await
        }
    }
}

/// Continues where the orchestrator wants to. What it has lost and this node has deleted can't be
/// sent again; the rest then continues in a new stream.
async fn resume(trail: &NodeTrail, stream: Uuid, expected: Option<u64>) -> Result<Step, ShipError> {
    if let Some(expected) = expected
        && trail.resend(stream, expected).await?
    {
        return Ok(Step::Shipped);
    }
    rebase(trail, "the orchestrator has lost records", BTreeMap::new()).await
}

async fn rebase(
    trail: &NodeTrail,
    reason: &str,
    refused: BTreeMap<u64, String>,
) -> Result<Step, ShipError> {
    tracing::warn!(
        reason,
        refused = refused.len(),
        "The node's audit records continue in a new stream."
    );
    trail.rebase(reason.to_owned(), refused).await?;
    Ok(Step::Rebased)
}

async fn send(
    upstream: &Upstream,
    batch: &NodeAuditBatch,
) -> Result<Result<NodeAuditAnswer, Refusal>, ShipError> {
    let sent = |error: reqwest::Error| ShipError::Send(Chain(&error.without_url()).to_string());
    let response = upstream
        .http
        .post(format!("{}/v1/nodes/audit:batch", upstream.base))
        .bearer_auth(&upstream.node_token)
        .json(batch)
        .send()
        .await
        .map_err(sent)?;
    let status = response.status();
    let body = read(response).await?;
    if status.is_success() {
        let answer = serde_json::from_slice(&body);
        return answer
            .map(Ok)
            .map_err(|error| ShipError::Answer(format!("with a body that is malformed: {error}")));
    }
    let problem: Option<Problem> = serde_json::from_slice(&body).ok();
    let refusal = problem
        .as_ref()
        .and_then(|problem| refusal(status, problem));
    let detail = || {
        problem
            .as_ref()
            .map_or("", |problem| problem.detail.as_str())
    };
    refusal
        .map(Err)
        .ok_or_else(|| ShipError::Answer(format!("{status}: {}", detail())))
}

fn refusal(status: StatusCode, problem: &Problem) -> Option<Refusal> {
    let member = |name: &str| problem.extensions.get(name).cloned();
    if status == StatusCode::CONFLICT && problem.code == ErrorCode::AuditOutOfOrder.as_str() {
        let expected = member("expected").and_then(|expected| expected.as_u64());
        return Some(Refusal::OutOfOrder(expected));
    }
    if status == StatusCode::UNPROCESSABLE_ENTITY
        && problem.code == ErrorCode::AuditRefused.as_str()
    {
        let refused: Vec<NodeAuditRefusal> = serde_json::from_value(member("refused")?).ok()?;
        let refused = refused.into_iter().map(|one| (one.seq, one.reason));
        return Some(Refusal::Records(refused.collect()));
    }
    None
}

async fn read(mut response: reqwest::Response) -> Result<Vec<u8>, ShipError> {
    let sent = |error: reqwest::Error| ShipError::Send(Chain(&error.without_url()).to_string());
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(sent)? {
        if body.len() + piece.len() > MAX_ANSWER_BYTES {
            return Err(ShipError::Answer("with too long a body".to_owned()));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

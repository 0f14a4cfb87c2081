//! Ships the node's records to the orchestrator, in order and in bounded batches.
//!
//! Invariant: a record is dropped only after the orchestrator has acknowledged it. A batch whose
//! answer is lost is sent again; the orchestrator stores each record once.

use std::{io, sync::Arc, time::Duration};

use cynode_api::{ErrorCode, NodeAuditAnswer, NodeAuditBatch, NodeAuditRefusal, Problem};
use cynode_service::telemetry::Chain;
use cynode_trail::{Conclusion, Verdict};
use http::StatusCode;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

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
                trail.0.set_problem(None);
                let stored = trail.0.stored();
                if step == Step::NothingToShip && stop.run_until_cancelled(stored).await.is_none() {
                    break;
                }
                BATCH_INTERVAL
            }
            Some(Err(error)) => {
                if !matches!(error, ShipError::Unregistered) {
                    tracing::warn!(%error, "Failed to ship audit records; retrying.");
                }
                trail.0.set_problem(Some(error.to_string()));
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
    let mut verdict = send(&upstream, &batch).await?;
    if let Verdict::Refused(refused) = &mut verdict {
        refused.retain(|seq, _| batch.records.iter().any(|record| record.seq == *seq));
    }
    match trail.0.conclude(stream, verdict).await? {
        Conclusion::Continued => Ok(Step::Shipped),
        Conclusion::Rebased => Ok(Step::Rebased),
        Conclusion::Stale => Err(ShipError::Answer("with a refusal of no record".to_owned())),
    }
}

async fn send(upstream: &Upstream, batch: &NodeAuditBatch) -> Result<Verdict, ShipError> {
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
        let answer: NodeAuditAnswer = serde_json::from_slice(&body).map_err(|error| {
            ShipError::Answer(format!("with a body that is malformed: {error}"))
        })?;
        if answer.stream != batch.stream {
            return Err(ShipError::Answer("for another stream".to_owned()));
        }
        return Ok(Verdict::Stored { next: answer.next });
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
    refusal.ok_or_else(|| ShipError::Answer(format!("{status}: {}", detail())))
}

fn refusal(status: StatusCode, problem: &Problem) -> Option<Verdict> {
    let member = |name: &str| problem.extensions.get(name).cloned();
    if status == StatusCode::CONFLICT && problem.code == ErrorCode::AuditOutOfOrder.as_str() {
        let expected = member("expected").and_then(|expected| expected.as_u64());
        return Some(Verdict::OutOfOrder { expected });
    }
    if status == StatusCode::UNPROCESSABLE_ENTITY
        && problem.code == ErrorCode::AuditRefused.as_str()
    {
        let refused: Vec<NodeAuditRefusal> = serde_json::from_value(member("refused")?).ok()?;
        let refused = refused.into_iter().map(|one| (one.seq, one.reason));
        return Some(Verdict::Refused(refused.collect()));
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

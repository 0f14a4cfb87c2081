//! Batches of a node's own audit records.

use axum::{Json, extract::State};
use cynode_api::{
    ErrorCode, NodeAuditAnswer, NodeAuditBatch, NodeAuditRefusal, Problem, node_audit_limits,
};
use cynode_audit::Link;
use cynode_service::ApiError;
use serde_json::json;
use time::OffsetDateTime;

use super::{Body, check_version, control::CallingNode};
use crate::{Orchestrator, audit::node_refusals, db::MergeOutcome};

/// Merges a batch into the trail. Records that are stored already are accepted again; of a batch
/// that is refused nothing is stored.
pub(super) async fn merge(
    State(orchestrator): State<Orchestrator>,
    axum::Extension(CallingNode(node)): axum::Extension<CallingNode>,
    Body(batch): Body<NodeAuditBatch>,
) -> Result<Json<NodeAuditAnswer>, ApiError> {
    check_version(batch.version)?;
    let stream = batch.stream;
    let links = links(batch)?;
    let now = OffsetDateTime::now_utc();
    let refused = node_refusals(&orchestrator.db, node.id, &links, now).await?;
    if !refused.is_empty() {
        tracing::warn!(node_id = %node.id, %stream, refused = refused.len(), "A node sent audit records that it may not write.");
        return Err(refuse(&refused).into());
    }
    let outcome = orchestrator
        .db
        .merge_node_records(node.id, stream, &links)
        .await?;
    let stored = |last: u64| {
        Ok(Json(NodeAuditAnswer {
            stream,
            next: last + 1,
        }))
    };
    match outcome {
        MergeOutcome::Merged(head) => {
            // From now on this process knows what the database must have.
            orchestrator.audit.heads.committed(stream, head);
            stored(head.seq)
        }
        MergeOutcome::Repeated(last) => stored(last),
        MergeOutcome::OutOfOrder { expected } => {
            let detail = expected.map_or_else(
                || format!("stream {stream} has other records, or has ended"),
                |expected| format!("stream {stream} continues with record {expected}"),
            );
            let problem = Problem::new(ErrorCode::AuditOutOfOrder, detail);
            Err(problem.with("expected", json!(expected)).into())
        }
        MergeOutcome::Foreign => Err(ApiError::new(
            ErrorCode::Forbidden,
            format!("stream {stream} is not this node's"),
        )),
        MergeOutcome::TooManyStreams => Err(ApiError::new(
            ErrorCode::TooManyRequests,
            format!(
                "this node has opened {} audit streams within an hour",
                node_audit_limits::MAX_STREAMS_PER_HOUR
            ),
        )),
    }
}

/// The records in their stream. Their hashes are verified against the stored head.
fn links(batch: NodeAuditBatch) -> Result<Vec<Link>, ApiError> {
    if batch.records.is_empty() || batch.records.len() > node_audit_limits::MAX_RECORDS {
        return Err(ApiError::invalid(format!(
            "records: must have 1 to {} records",
            node_audit_limits::MAX_RECORDS
        )));
    }
    let mut links: Vec<Link> = Vec::with_capacity(batch.records.len());
    for (index, record) in batch.records.into_iter().enumerate() {
        let link = Link::from_node_record(batch.stream, record)
            .map_err(|error| ApiError::invalid(format!("records[{index}]: {error}")))?;
        let expected = links
            .last()
            .map_or(Some(link.seq), |last| last.seq.checked_add(1));
        // The database counts in signed numbers.
        let is_countable = (1..i64::MAX.unsigned_abs()).contains(&link.seq);
        if expected != Some(link.seq) || !is_countable {
            return Err(ApiError::invalid(format!(
                "records[{index}].seq: the numbers must be consecutive and begin at 1 or later"
            )));
        }
        links.push(link);
    }
    Ok(links)
}

fn refuse(refused: &[NodeAuditRefusal]) -> Problem {
    let first = refused
        .first()
        .map(|refusal| format!("record {}: {}", refusal.seq, refusal.reason));
    let detail = format!(
        "{} of the records are refused; {}",
        refused.len(),
        first.unwrap_or_default()
    );
    Problem::new(ErrorCode::AuditRefused, detail).with("refused", json!(refused))
}

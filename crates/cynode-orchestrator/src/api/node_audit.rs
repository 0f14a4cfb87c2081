//! Batches of a node's own audit records.

use axum::{Json, extract::State};
use cynode_api::{
    ErrorCode, NodeAuditAnswer, NodeAuditBatch, NodeAuditRefusal, Problem, node_audit_limits,
};
use cynode_service::ApiError;
use serde_json::json;
use time::OffsetDateTime;

use super::{Body, check_version, control::CallingNode};
use crate::{
    Orchestrator,
    audit::{node_refusals, received_links},
    db::{MergeOutcome, StreamWriter},
};

/// Merges a batch into the trail. Records that are stored already are accepted again; of a batch
/// that is refused nothing is stored.
pub(super) async fn merge(
    State(orchestrator): State<Orchestrator>,
    axum::Extension(CallingNode(node)): axum::Extension<CallingNode>,
    Body(batch): Body<NodeAuditBatch>,
) -> Result<Json<NodeAuditAnswer>, ApiError> {
    check_version(batch.version)?;
    let stream = batch.stream;
    let links = received_links(stream, batch.records)
        .map_err(|error| ApiError::invalid(error.to_string()))?;
    let now = OffsetDateTime::now_utc();
    let refused = node_refusals(&orchestrator.db, node.id, &links, now).await?;
    if !refused.is_empty() {
        tracing::warn!(node_id = %node.id, %stream, refused = refused.len(), "A node sent audit records that it may not write.");
        return Err(refuse(&refused).into());
    }
    let outcome = orchestrator
        .db
        .merge_records(StreamWriter::Node(node.id), stream, &links)
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

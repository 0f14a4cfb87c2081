//! The routes by which orchestrators fetch the role's audit records.

use std::time::Duration;

use axum::{
    Json, Router,
    extract::{FromRef, State},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use cynode_api::{EgressAuditAck, ErrorCode, egress_audit_limits};
use cynode_service::{ApiError, JsonBody, edge::QueryParams};
use http::StatusCode;
use serde::Deserialize;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::trail::RoleTrail;

/// The routes, for a router that authenticates.
pub(crate) fn routes<S>() -> Router<S>
where
    S: Clone + Send + Sync + 'static,
    RoleTrail: FromRef<S>,
    CancellationToken: FromRef<S>,
{
    Router::new()
        .route("/v1/egress/audit", get(fetch))
        .route("/v1/egress/audit/ack", post(acknowledge))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FetchQuery {
    /// How long to wait for records if there are none.
    wait_ms: Option<u64>,
}

/// The oldest records that are not acknowledged, or 204.
async fn fetch(
    State(trail): State<RoleTrail>,
    State(stop): State<CancellationToken>,
    QueryParams(query): QueryParams<FetchQuery>,
) -> Result<Response, ApiError> {
    let wait_ms = query.wait_ms.unwrap_or(0);
    if wait_ms > egress_audit_limits::MAX_WAIT_MS {
        return Err(ApiError::invalid(format!(
            "wait_ms: must be at most {}",
            egress_audit_limits::MAX_WAIT_MS
        )));
    }
    let mut batch = trail.next_batch().await.map_err(unreadable)?;
    if batch.is_none() && wait_ms > 0 {
        // The notification may be of a record that was fetched already; then this ends early.
        let stored = timeout(Duration::from_millis(wait_ms), trail.stored());
        drop(stop.run_until_cancelled(stored).await);
        batch = trail.next_batch().await.map_err(unreadable)?;
    }
    Ok(match batch {
        Some(batch) => Json(batch).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}

async fn acknowledge(
    State(trail): State<RoleTrail>,
    JsonBody(ack): JsonBody<EgressAuditAck>,
) -> Result<StatusCode, ApiError> {
    if ack.version != cynode_api::API_VERSION {
        return Err(ApiError::invalid(format!(
            "version: must be {}",
            cynode_api::API_VERSION
        )));
    }
    trail
        .conclude(ack.stream, ack.verdict)
        .await
        .map_err(unreadable)?;
    Ok(StatusCode::NO_CONTENT)
}

fn unreadable(error: std::io::Error) -> ApiError {
    tracing::warn!(%error, "The role's audit trail can't be read or written.");
    ApiError::new(
        ErrorCode::AuditUnavailable,
        format!("the role's audit trail: {error}"),
    )
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use cynode_api::{EgressAuditBatch, EgressAuditVerdict, TaskId};
    use http::{Method, Request};
    use serde_json::{Map, json};
    use tower::ServiceExt as _;
    use uuid::Uuid;

    use super::*;
    use crate::audit::{AuditSink as _, RoleAction, RoleOutcome, RoleRecord};

    #[derive(Clone)]
    struct Served(RoleTrail, CancellationToken);

    impl FromRef<Served> for RoleTrail {
        fn from_ref(served: &Served) -> Self {
            served.0.clone()
        }
    }

    impl FromRef<Served> for CancellationToken {
        fn from_ref(served: &Served) -> Self {
            served.1.clone()
        }
    }

    async fn send(served: &Served, request: Request<Body>) -> (StatusCode, Vec<u8>) {
        let router = routes::<Served>().with_state(served.clone());
        let response = router.oneshot(request).await.expect("an answer");
        let status = response.status();
        let body = to_bytes(response.into_body(), usize::MAX).await;
        (status, body.expect("a body").to_vec())
    }

    async fn fetch(served: &Served, query: &str) -> (StatusCode, Option<EgressAuditBatch>) {
        let request = Request::get(format!("/v1/egress/audit{query}"))
            .body(Body::empty())
            .expect("a request");
        let (status, body) = send(served, request).await;
        (status, serde_json::from_slice(&body).ok())
    }

    async fn acknowledge(served: &Served, stream: Uuid, verdict: EgressAuditVerdict) {
        let ack = EgressAuditAck {
            version: 1,
            stream,
            verdict,
        };
        let request = Request::builder()
            .method(Method::POST)
            .uri("/v1/egress/audit/ack")
            .header("content-type", "application/json")
            .body(Body::from(json!(ack).to_string()))
            .expect("a request");
        let (status, body) = send(served, request).await;
        let body = String::from_utf8_lossy(&body);
        assert_eq!(status, StatusCode::NO_CONTENT, "{body}");
    }

    async fn record(served: &Served) {
        let record = RoleRecord {
            action: RoleAction::Fetch,
            operation: Uuid::now_v7(),
            task_id: TaskId::generate(),
            session_id: None,
            promotion_id: None,
            call_id: None,
            repository: "web".to_owned(),
            outcome: RoleOutcome::Allowed,
            rules: Vec::new(),
            detail: Map::new(),
        };
        served.0.record(record).await.expect("recorded");
    }

    #[tokio::test]
    async fn an_orchestrator_fetches_records_until_it_has_acknowledged_them() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("audit");
        let trail = RoleTrail::open(path, "git", Uuid::now_v7()).expect("opens");
        let served = Served(trail, CancellationToken::new());
        assert_eq!(fetch(&served, "").await, (StatusCode::NO_CONTENT, None));
        let waiting = fetch(&served, "?wait_ms=20000");
        let ((_, first), ()) = tokio::join!(waiting, record(&served));
        let first = first.expect("a batch");
        let (_, again) = fetch(&served, "").await;
        assert_eq!(again.as_ref(), Some(&first), "it was not acknowledged");
        acknowledge(
            &served,
            first.stream,
            EgressAuditVerdict::Stored { next: 2 },
        )
        .await;
        let (_, rest) = fetch(&served, "").await;
        assert_eq!(rest.expect("a batch").records[0].seq, 2);
        // The answer to this acknowledgment is lost, and another orchestrator repeats it.
        for _ in 0..2 {
            acknowledge(
                &served,
                first.stream,
                EgressAuditVerdict::Stored { next: 3 },
            )
            .await;
        }
        assert_eq!(fetch(&served, "").await, (StatusCode::NO_CONTENT, None));
        let (status, _) = fetch(&served, "?wait_ms=20001").await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        // A role that stops keeps nobody waiting.
        let waiting = fetch(&served, "?wait_ms=20000");
        let stopping = async { served.1.cancel() };
        let began = std::time::Instant::now();
        let (answer, ()) = tokio::join!(waiting, stopping);
        assert_eq!(answer, (StatusCode::NO_CONTENT, None));
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}

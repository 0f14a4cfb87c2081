//! Audit records of events that are not calls of the user API.

use cynode_api::{
    Artifact, AuditBody, AuditDecision, AuditKind, AuditResult, AuditSubject, CallId, SessionId,
};
use cynode_service::ApiError;
use serde_json::json;

use crate::{Orchestrator, caller::Caller, db::NodeRow};

fn subject(node: &NodeRow) -> AuditSubject {
    AuditSubject {
        kind: "node".to_owned(),
        name: Some(node.name.clone()),
        node_id: Some(node.id),
        ..AuditSubject::default()
    }
}

impl Orchestrator {
    /// Records the registration of a node.
    pub(crate) async fn record_registration(&self, node: &NodeRow) -> Result<(), ApiError> {
        let mut body = AuditBody::new(AuditKind::Authentication, "node.register");
        body.subject = Some(subject(node));
        body.decision = Some(AuditDecision::Allow);
        body.result = Some(AuditResult::Done);
        body.detail
            .insert("api_url".to_owned(), json!(node.api_url));
        Ok(self.audit.write_all(vec![body]).await?)
    }

    /// Records that a node downloads an artifact.
    pub(crate) async fn record_artifact_download(
        &self,
        node: &NodeRow,
        artifact: &Artifact,
    ) -> Result<(), ApiError> {
        let mut body = AuditBody::new(AuditKind::Event, "artifact.get");
        body.subject = Some(subject(node));
        body.task_id = Some(artifact.task_id);
        body.resource = Some(format!("artifact:{}", artifact.id));
        body.result = Some(AuditResult::Done);
        body.detail
            .insert("sha256".to_owned(), json!(artifact.sha256));
        Ok(self.audit.write_all(vec![body]).await?)
    }

    /// Returns a callback that records the end of a terminal.
    pub(crate) fn terminal_close_recorder(
        &self,
        caller: &Caller,
        session_id: SessionId,
        call_id: Option<CallId>,
    ) -> impl FnOnce() + Send + use<> {
        let (audit, subject) = (self.audit.clone(), caller.subject());
        move || {
            let event = AuditBody::new(AuditKind::Event, "session.pty.closed");
            audit.enqueue_detached(AuditBody {
                subject: Some(subject),
                session_id: Some(session_id),
                call_id: call_id.map(|id| *id.as_uuid()),
                ..event
            });
        }
    }

    /// Tracks a command that outlives its call, so that its exit is recorded too.
    pub(crate) async fn follow_exec(&self, intent: &AuditBody) {
        crate::audit::follow_exec(&self.db, intent).await;
    }
}

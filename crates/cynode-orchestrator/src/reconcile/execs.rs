//! Commands in the background: how they ended is told in the audit trail when their node says so.

use std::time::Duration;

use cynode_api::{AuditBody, AuditKind, AuditResult, ErrorCode, ExecState, SessionId};
use cynode_service::ApiError;
use futures_util::{StreamExt as _, stream};
use serde_json::{Map, Value, json};

use crate::{
    Orchestrator,
    db::{RunningExec, to_json},
    fleet::Failed,
};

const ASK: Duration = Duration::from_secs(5);
const BATCH: i64 = 100;
const AT_ONCE: usize = 8;

pub(super) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    let running = orchestrator.db.lease_execs(BATCH).await?;
    stream::iter(running)
        .for_each_concurrent(AT_ONCE, |exec| async move {
            if let Err(error) = look(orchestrator, &exec).await {
                tracing::debug!(exec_id = %exec.exec_id, error = %error.0, "How a command ended is not known yet.");
            }
        })
        .await;
    Ok(())
}

/// Before a session ends: its node forgets then what became of its commands.
pub(crate) async fn settle(
    orchestrator: &Orchestrator,
    session_id: SessionId,
) -> Result<(), ApiError> {
    for exec in orchestrator.db.running_execs(session_id).await? {
        look(orchestrator, &exec).await?;
    }
    Ok(())
}

async fn look(orchestrator: &Orchestrator, exec: &RunningExec) -> Result<(), ApiError> {
    if exec.is_gone {
        return ended(orchestrator, exec, "lost", None).await;
    }
    let client = orchestrator
        .fleet
        .client(&orchestrator.db, exec.node_id)
        .await?;
    match orchestrator
        .fleet
        .call(
            exec.node_id,
            ASK,
            client.get_exec(exec.session_id, exec.exec_id),
        )
        .await
    {
        Ok(found) if found.state == ExecState::Running => Ok(()),
        Ok(found) if found.state == ExecState::Exited => {
            ended(
                orchestrator,
                exec,
                "exited",
                found.exit.as_ref().map(to_json),
            )
            .await
        }
        Ok(_) => ended(orchestrator, exec, "lost", None).await,
        Err(Failed::Refused(error))
            if [
                ErrorCode::ExecNotFound,
                ErrorCode::SessionNotFound,
                ErrorCode::SessionEnded,
            ]
            .iter()
            .any(|code| error.0.is(*code)) =>
        {
            ended(orchestrator, exec, "lost", None).await
        }
        Err(failed) => Err(failed.problem()),
    }
}

async fn ended(
    orchestrator: &Orchestrator,
    exec: &RunningExec,
    state: &str,
    exit: Option<Value>,
) -> Result<(), ApiError> {
    let mut detail: Map<String, Value> = exit
        .clone()
        .and_then(|exit| exit.as_object().cloned())
        .unwrap_or_default();
    detail.insert("state".to_owned(), json!(state));
    let row = orchestrator.db.any_session(exec.session_id).await?;
    let body = AuditBody {
        task_id: row.map(|row| row.task_id),
        session_id: Some(exec.session_id),
        exec_id: Some(exec.exec_id),
        call_id: Some(exec.call_id),
        result: Some(if state == "exited" {
            AuditResult::Done
        } else {
            AuditResult::Unknown
        }),
        detail,
        ..AuditBody::new(AuditKind::Event, "exec.ended")
    };
    // The record first: whoever dies between the two tells it twice, and never not at all.
    orchestrator.audit.note(vec![body]).await?;
    orchestrator
        .db
        .end_exec(exec.exec_id, state, exit.as_ref())
        .await
        .map(drop)
}

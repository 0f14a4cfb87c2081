//! Background execs: their exit is recorded in the audit trail once their node reports it.

use std::{sync::Arc, time::Duration};

use cynode_api::{AuditBody, AuditKind, AuditResult, ErrorCode, ExecState, SessionId};
use futures_util::{StreamExt as _, stream};
use serde_json::{Map, Value, json};

use super::{Error, Reconciler};
use crate::{
    audit::Audit,
    db::{Db, RunningExec, to_json},
    fleet::Fleet,
};

const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
const BATCH: i64 = 100;
const MAX_CONCURRENT_QUERIES: usize = 8;

#[derive(Clone, Debug)]
pub(crate) struct ExecReconciler {
    pub(crate) db: Db,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) audit: Audit,
}

impl Reconciler for ExecReconciler {
    const NAME: &'static str = "execs";
    const INTERVAL: Duration = Duration::from_secs(1);

    async fn round(&self) -> Result<(), Error> {
        let running = self.db.lease_execs(BATCH).await?;
        stream::iter(running)
            .for_each_concurrent(MAX_CONCURRENT_QUERIES, |exec| async move {
                if let Err(error) = self.check(&exec).await {
                    tracing::debug!(
                        exec_id = %exec.exec_id,
                        %error,
                        "The exit of a background exec is still unknown."
                    );
                }
            })
            .await;
        Ok(())
    }
}

impl ExecReconciler {
    /// Records the exits of a session's execs before it ends, because its node forgets them then.
    pub(crate) async fn record_exits(&self, session_id: SessionId) -> Result<(), Error> {
        for exec in self.db.running_execs(session_id).await? {
            self.check(&exec).await?;
        }
        Ok(())
    }

    async fn check(&self, exec: &RunningExec) -> Result<(), Error> {
        if exec.is_gone {
            return self.record_end(exec, "lost", None).await;
        }
        let client = self.fleet.client(&self.db, exec.node_id).await?;
        let found = self
            .fleet
            .call(
                exec.node_id,
                QUERY_TIMEOUT,
                client.get_exec(exec.session_id, exec.exec_id),
            )
            .await;
        match found {
            Ok(found) if found.state == ExecState::Running => Ok(()),
            Ok(found) if found.state == ExecState::Exited => {
                self.record_end(exec, "exited", found.exit.as_ref().map(to_json))
                    .await
            }
            Ok(_) => self.record_end(exec, "lost", None).await,
            Err(error)
                if error.is_refusal(&[
                    ErrorCode::ExecNotFound,
                    ErrorCode::SessionNotFound,
                    ErrorCode::SessionEnded,
                ]) =>
            {
                self.record_end(exec, "lost", None).await
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn record_end(
        &self,
        exec: &RunningExec,
        state: &str,
        exit: Option<Value>,
    ) -> Result<(), Error> {
        let mut detail: Map<String, Value> = exit
            .clone()
            .and_then(|exit| exit.as_object().cloned())
            .unwrap_or_default();
        detail.insert("state".to_owned(), json!(state));
        let row = self.db.any_session(exec.session_id).await?;
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
        // The record comes first: a crash in between repeats it, but never loses it.
        self.audit.write_all(vec![body]).await?;
        self.db.end_exec(exec.exec_id, state, exit.as_ref()).await?;
        Ok(())
    }
}

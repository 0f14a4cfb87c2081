//! Background execs, which outlive the call that started them.

use cynode_api::{ExecId, NodeId, SessionId};
use serde_json::Value;
use sqlx::{Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error};

#[derive(Clone, Debug)]
pub(crate) struct RunningExec {
    pub(crate) exec_id: ExecId,
    pub(crate) session_id: SessionId,
    pub(crate) node_id: NodeId,
    pub(crate) call_id: Uuid,
    /// The session has ended or its node is lost: nobody will report the exit.
    pub(crate) is_gone: bool,
}

fn running(row: &PgRow) -> Result<RunningExec, sqlx::Error> {
    Ok(RunningExec {
        exec_id: ExecId::from_uuid(row.try_get("exec_id")?),
        session_id: SessionId::from_uuid(row.try_get("session_id")?),
        node_id: NodeId::from_uuid(row.try_get("node_id")?),
        call_id: row.try_get("call_id")?,
        is_gone: row.try_get("is_gone")?,
    })
}

impl Db {
    pub(crate) async fn insert_exec(
        &self,
        exec_id: ExecId,
        session_id: SessionId,
        call_id: Uuid,
        created_by: &str,
    ) -> Result<(), Error> {
        sqlx::query("insert into execs (exec_id, session_id, call_id, state, created_by) values ($1, $2, $3, 'running', $4) on conflict do nothing")
            .bind(exec_id.as_uuid())
            .bind(session_id.as_uuid())
            .bind(call_id)
            .bind(created_by)
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    /// Leases running execs whose nodes should be asked for their state.
    pub(crate) async fn lease_execs(&self, limit: i64) -> Result<Vec<RunningExec>, Error> {
        let rows = sqlx::query(
            "with due as (select exec_id from execs where state = 'running' and lease_until < now() order by lease_until limit $1 for update skip locked),
                  taken as (update execs e set lease_until = now() + interval '10 seconds' from due where e.exec_id = due.exec_id returning e.*)
             select taken.exec_id, taken.session_id, taken.call_id, s.node_id, s.state in ('ended', 'failed') or n.is_lost as is_gone
             from taken join sessions s on s.session_id = taken.session_id join nodes n on n.id = s.node_id",
        )
        .bind(limit)
        .fetch_all(&self.pool)
        .await?;
        rows.iter()
            .map(running)
            .collect::<Result<_, _>>()
            .map_err(Error::from)
    }

    /// The running execs of a session.
    pub(crate) async fn running_execs(
        &self,
        session_id: SessionId,
    ) -> Result<Vec<RunningExec>, Error> {
        let rows = sqlx::query(
            "select e.exec_id, e.session_id, e.call_id, s.node_id, false as is_gone
             from execs e join sessions s on s.session_id = e.session_id where e.session_id = $1 and e.state = 'running'",
        )
        .bind(session_id.as_uuid())
        .fetch_all(&self.pool)
        .await?;
        rows.iter()
            .map(running)
            .collect::<Result<_, _>>()
            .map_err(Error::from)
    }

    /// Records the end of an exec. Returns whether it was still running.
    pub(crate) async fn end_exec(
        &self,
        exec_id: ExecId,
        state: &str,
        exit: Option<&Value>,
    ) -> Result<bool, Error> {
        let done = sqlx::query("update execs set state = $2, exit = $3, ended_at = now() where exec_id = $1 and state = 'running'")
            .bind(exec_id.as_uuid())
            .bind(state)
            .bind(exit)
            .execute(&self.pool)
            .await?;
        Ok(done.rows_affected() > 0)
    }
}

//! What sessions and jobs share: both run in a sandbox, for a task, within quotas.

use cynode_api::{LimitsRequest, Task};
use sqlx::postgres::PgRow;

use super::{Db, Error, NewEvent, Statement, commit, events, quotas, work};
use crate::caller::Scope;

/// A new session or job.
pub(super) struct NewSandbox<'a> {
    /// Inserts the row, unless its id is taken.
    pub(super) insert: Statement,
    /// Its task, if that is new too.
    pub(super) task: Option<&'a Task>,
    pub(super) limits: Option<LimitsRequest>,
    /// Its first state.
    pub(super) event: NewEvent,
}

impl Db {
    /// Inserts a session or job with its event, if quotas allow. `None` when the id is taken.
    pub(super) async fn insert_sandbox(
        &self,
        new: NewSandbox<'_>,
        scope: &Scope,
    ) -> Result<Option<PgRow>, Error> {
        let mut transaction = self.begin().await?;
        if let Some(task) = new.task {
            work::insert_task(&mut *transaction, task, scope).await?;
        }
        let Some(row) = new.insert.fetch_optional(&mut *transaction).await? else {
            return Ok(None);
        };
        quotas::check(
            &mut transaction,
            scope.user_id,
            new.event.task_id,
            quotas::Usage::sandbox(new.limits),
        )
        .await?;
        events::add(&mut transaction, &new.event).await?;
        commit(transaction).await?;
        Ok(Some(row))
    }
}

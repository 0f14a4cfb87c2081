//! Promotions. Calls write how far one goes and what a person decided; the rest is written only by
//! the reconciler that has its lease, so that neither overwrites the other.

use std::time::Duration;

use cynode_api::{
    ArtifactId, Page, Promotion, PromotionId, PromotionStage, PromotionState, RepositoryId, TaskId,
};
use cynode_policy::Place;
use sqlx::{Row as _, postgres::PgRow, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Db, Error, Missing, NewEvent, PageRequest, commit, decode, events, to_json};
use crate::{
    caller::Scope,
    promotions::{Decision, Progress},
};

/// The right to step a promotion, until it expires. Renewed while a step runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromotionLease(OffsetDateTime);

#[cfg(test)]
impl PromotionLease {
    pub(crate) const fn for_tests() -> Self {
        Self(OffsetDateTime::UNIX_EPOCH)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct PromotionRow {
    pub(crate) promotion: Promotion,
    pub(crate) progress: Progress,
    pub(crate) decision: Option<Decision>,
    pub(crate) canceled_by: Option<String>,
    /// Failed attempts at the present stage.
    pub(crate) attempts: i32,
    pub(crate) owner_id: cynode_api::UserId,
    pub(crate) lease: PromotionLease,
}

#[derive(Clone, Debug)]
pub(crate) struct NewPromotion<'a> {
    pub(crate) promotion: &'a Promotion,
    pub(crate) progress: &'a Progress,
}

fn row_of(row: &PgRow) -> Result<PromotionRow, Error> {
    let object: Promotion = decode(row.try_get("object")?)?;
    Ok(PromotionRow {
        promotion: Promotion {
            id: PromotionId::from_uuid(row.try_get("id")?),
            state: super::state(row)?,
            until: decode(row.try_get::<String, _>("until")?.into())?,
            created_at: row.try_get("created_at")?,
            updated_at: row.try_get("updated_at")?,
            ..object
        },
        progress: decode(row.try_get("progress")?)?,
        decision: row
            .try_get::<Option<Json<Decision>>, _>("decision")?
            .map(|decision| decision.0),
        canceled_by: row.try_get("canceled_by")?,
        attempts: row.try_get("attempts")?,
        owner_id: cynode_api::UserId::from_uuid(row.try_get("owner_id")?),
        lease: PromotionLease(row.try_get("lease_until")?),
    })
}

impl Db {
    /// Inserts a promotion. `None` when there is one of the same changeset on the same branch.
    pub(crate) async fn insert_promotion(
        &self,
        new: &NewPromotion<'_>,
        scope: &Scope,
    ) -> Result<Option<PromotionRow>, Error> {
        let promotion = new.promotion;
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "insert into promotions (id, task_id, repository_id, changeset, branch, state, until, object, progress, owner_id, created_by, created_at, updated_at)
             values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $12)
             on conflict (task_id, repository_id, changeset, branch) do nothing returning *",
        )
        .bind(promotion.id.as_uuid())
        .bind(promotion.task_id.as_uuid())
        .bind(promotion.repository_id.as_uuid())
        .bind(promotion.changeset.as_uuid())
        .bind(&promotion.branch)
        .bind(promotion.state.as_str())
        .bind(promotion.until.as_str())
        .bind(to_json(promotion))
        .bind(to_json(new.progress))
        .bind(scope.user_id.as_uuid())
        .bind(&promotion.created_by)
        .bind(promotion.created_at)
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(row) = row else { return Ok(None) };
        events::add(&mut transaction, &NewEvent::promotion(promotion)).await?;
        commit(transaction).await?;
        row_of(&row).map(Some)
    }

    /// The promotion of a changeset on a branch.
    pub(crate) async fn find_promotion(
        &self,
        task_id: TaskId,
        repository_id: RepositoryId,
        changeset: ArtifactId,
        branch: &str,
    ) -> Result<Option<PromotionRow>, Error> {
        let row = sqlx::query(
            "select * from promotions where task_id = $1 and repository_id = $2 and changeset = $3 and branch = $4",
        )
        .bind(task_id.as_uuid())
        .bind(repository_id.as_uuid())
        .bind(changeset.as_uuid())
        .bind(branch)
        .fetch_optional(&self.pool)
        .await?;
        row.as_ref().map(row_of).transpose()
    }

    /// Makes a promotion go further; never less far. One that has ended is not with the reconciler:
    /// `revise` may change it, and says whether it continues.
    pub(crate) async fn extend_promotion(
        &self,
        id: PromotionId,
        until: PromotionStage,
        revise: impl FnOnce(&mut PromotionRow) -> bool,
    ) -> Result<PromotionRow, Error> {
        let mut transaction = self.begin().await?;
        let row = sqlx::query("select * from promotions where id = $1 for update")
            .bind(id.as_uuid())
            .fetch_optional(&mut *transaction)
            .await?;
        let row = row.ok_or(Error::NotFound(Missing::Promotion(id)))?;
        let mut row = row_of(&row)?;
        if !row.promotion.state.is_final() {
            if until > row.promotion.until {
                row.promotion.until = until;
                sqlx::query("update promotions set until = $2, woken = true where id = $1")
                    .bind(id.as_uuid())
                    .bind(until.as_str())
                    .execute(&mut *transaction)
                    .await?;
                commit(transaction).await?;
            }
            return Ok(row);
        }
        if !revise(&mut row) {
            return Ok(row);
        }
        sqlx::query(
            "update promotions set until = $2, state = $3, object = $4, progress = $5, attempts = 0, decision = null,
                 canceled_by = null, woken = true, updated_at = now() where id = $1",
        )
        .bind(id.as_uuid())
        .bind(row.promotion.until.as_str())
        .bind(row.promotion.state.as_str())
        .bind(to_json(&row.promotion))
        .bind(to_json(&row.progress))
        .execute(&mut *transaction)
        .await?;
        events::add(&mut transaction, &NewEvent::promotion(&row.promotion)).await?;
        commit(transaction).await?;
        Ok(row)
    }

    /// Stores a person's decision about a promotion that waits for one. The newest counts.
    pub(crate) async fn decide_promotion(
        &self,
        id: PromotionId,
        decision: &Decision,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "update promotions set decision = $2, woken = true where id = $1 and state = 'awaiting_approval'",
        )
        .bind(id.as_uuid())
        .bind(to_json(decision))
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Asks for a promotion to be canceled, if it has not ended.
    pub(crate) async fn cancel_promotion(&self, id: PromotionId, by: &str) -> Result<bool, Error> {
        let done = sqlx::query(
            "update promotions set canceled_by = coalesce(canceled_by, $2), woken = true
             where id = $1 and state in ('working', 'checking', 'awaiting_approval')",
        )
        .bind(id.as_uuid())
        .bind(by)
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// A promotion, whoever asks.
    pub(crate) async fn any_promotion(
        &self,
        id: PromotionId,
    ) -> Result<Option<PromotionRow>, Error> {
        let row = self
            .row("select * from promotions where id = $1", id.as_uuid())
            .await?;
        row.as_ref().map(row_of).transpose()
    }

    pub(crate) async fn list_promotions(
        &self,
        scope: &Scope,
        states: &[PromotionState],
        task_id: Option<TaskId>,
        page: &PageRequest,
    ) -> Result<Page<Promotion>, Error> {
        let states: Vec<&str> = states.iter().map(|state| state.as_str()).collect();
        let listed = |row: &PgRow| row_of(row).map(|row| row.promotion);
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select * from promotions p where ",
                    visible_by_task!("p"),
                    " and (cardinality($4::text[]) = 0 or p.state = any($4)) and ($5::uuid is null or p.task_id = $5)"
                ],
                "p.id",
                "$1",
                "$6",
                "$7"
            ))
            .bind(after)
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(states.clone())
            .bind(task_id.map(|id| *id.as_uuid()))
            .bind(page.id_part.clone())
            .bind(count)
        };
        self.read_page_of(page, query, listed, |promotion| *promotion.id.as_uuid())
            .await
    }

    /// The task and project of a promotion, and the owners of its task.
    pub(crate) async fn promotion_place(&self, id: PromotionId) -> Result<Option<Place>, Error> {
        let query = "select pr.task_id, t.project_id, t.owner_id, p.owner_id as project_owner_id
                     from promotions pr join tasks t on t.id = pr.task_id left join projects p on p.id = t.project_id where pr.id = $1";
        self.place(query, id.as_uuid()).await
    }

    /// Leases promotions that need a step. No other orchestrator takes them until the lease
    /// expires.
    pub(crate) async fn lease_promotions(
        &self,
        count: usize,
        lease: Duration,
    ) -> Result<Vec<PromotionRow>, Error> {
        let rows = sqlx::query(
            "update promotions set lease_until = clock_timestamp() + make_interval(secs => $2), woken = false where id in (
                 select id from promotions where state in ('working', 'checking', 'awaiting_approval')
                     and (woken or due_at <= now()) and lease_until < now()
                 order by due_at limit $1 for update skip locked)
             returning *",
        )
        .bind(i64::try_from(count).unwrap_or(i64::MAX))
        .bind(lease.as_secs_f64())
        .fetch_all(&self.pool)
        .await?;
        rows.iter().map(row_of).collect()
    }

    /// `None` when the lease was lost.
    pub(crate) async fn renew_promotion(
        &self,
        id: PromotionId,
        lease: PromotionLease,
        duration: Duration,
    ) -> Result<Option<PromotionLease>, Error> {
        let until: Option<OffsetDateTime> = sqlx::query_scalar(
            "update promotions set lease_until = clock_timestamp() + make_interval(secs => $3) where id = $1 and lease_until = $2 returning lease_until",
        )
        .bind(id.as_uuid())
        .bind(lease.0)
        .bind(duration.as_secs_f64())
        .fetch_optional(&self.pool)
        .await?;
        Ok(until.map(PromotionLease))
    }

    /// Stores the result of a step and gives the lease back. False when the lease was lost: then
    /// nothing is stored, and whoever has it repeats the step.
    pub(crate) async fn save_promotion(
        &self,
        row: &PromotionRow,
        before: PromotionState,
        delay: Duration,
    ) -> Result<bool, Error> {
        let promotion = &row.promotion;
        let mut transaction = self.begin().await?;
        let saved = sqlx::query(
            "update promotions set state = $3, object = $4, progress = $5, attempts = $6, updated_at = now(),
                 due_at = now() + make_interval(secs => $7), lease_until = to_timestamp(0)
             where id = $1 and lease_until = $2",
        )
        .bind(promotion.id.as_uuid())
        .bind(row.lease.0)
        .bind(promotion.state.as_str())
        .bind(to_json(promotion))
        .bind(to_json(&row.progress))
        .bind(row.attempts)
        .bind(delay.as_secs_f64())
        .execute(&mut *transaction)
        .await?;
        if saved.rows_affected() == 0 {
            return Ok(false);
        }
        if promotion.state != before {
            events::add(&mut transaction, &NewEvent::promotion(promotion)).await?;
        }
        commit(transaction).await?;
        Ok(true)
    }
}

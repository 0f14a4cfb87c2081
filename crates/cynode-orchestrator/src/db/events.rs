//! Events: written in the transaction of the change that they report, numbered without gaps, read
//! in order.

use cynode_api::{Event, JobId, JobState, ProjectId, Promotion, SessionId, SessionState, TaskId};
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error};

/// The notification channel for readers and reconcilers on every orchestrator. A missed
/// notification is made up for by timers.
pub(crate) const CHANNEL: &str = "cynode_events";

#[derive(Clone, Debug)]
pub(crate) struct NewEvent {
    pub(crate) kind: &'static str,
    pub(crate) task_id: TaskId,
    pub(crate) job_id: Option<JobId>,
    pub(crate) session_id: Option<SessionId>,
    pub(crate) state: String,
    pub(crate) result_ref: Option<String>,
    pub(crate) failure_code: Option<String>,
}

impl NewEvent {
    /// A job has changed its state.
    pub(super) fn job(task_id: TaskId, job_id: JobId, state: JobState) -> Self {
        Self {
            kind: "job.state",
            task_id,
            job_id: Some(job_id),
            session_id: None,
            state: state.to_string(),
            result_ref: state.is_final().then(|| format!("/v1/jobs/{job_id}")),
            failure_code: None,
        }
    }

    pub(super) fn with_failure_code(self, failure_code: Option<String>) -> Self {
        Self {
            failure_code,
            ..self
        }
    }

    /// A session has changed its state.
    pub(super) fn session(task_id: TaskId, session_id: SessionId, state: SessionState) -> Self {
        Self {
            kind: "session.state",
            task_id,
            job_id: None,
            session_id: Some(session_id),
            state: state.to_string(),
            result_ref: Some(format!("/v1/sessions/{session_id}")),
            failure_code: None,
        }
    }
}

impl NewEvent {
    /// A promotion has changed its state.
    pub(super) fn promotion(promotion: &Promotion) -> Self {
        Self {
            kind: "promotion.state",
            task_id: promotion.task_id,
            job_id: None,
            session_id: None,
            state: promotion.state.as_str().to_owned(),
            result_ref: Some(format!("/v1/promotions/{}", promotion.id)),
            failure_code: promotion.error.as_ref().map(|error| error.code.clone()),
        }
    }
}

/// The events that a reader may see.
#[derive(Clone, Debug)]
pub(crate) struct EventScope {
    pub(crate) all: bool,
    /// Events of this user and of the user's projects.
    pub(crate) owner: Option<Uuid>,
    pub(crate) project_id: Option<ProjectId>,
    pub(crate) task_ids: Vec<TaskId>,
    /// Restricts the result to this task.
    pub(crate) only_task: Option<TaskId>,
}

pub(super) fn event(row: &PgRow) -> Result<Event, sqlx::Error> {
    Ok(Event {
        cursor: row.try_get("cursor")?,
        at: row.try_get("at")?,
        kind: row.try_get("type")?,
        project_id: row
            .try_get::<Option<Uuid>, _>("project_id")?
            .map(ProjectId::from_uuid),
        task_id: TaskId::from_uuid(row.try_get("task_id")?),
        job_id: row
            .try_get::<Option<Uuid>, _>("job_id")?
            .map(JobId::from_uuid),
        session_id: row
            .try_get::<Option<Uuid>, _>("session_id")?
            .map(SessionId::from_uuid),
        state: row.try_get("state")?,
        result_ref: row.try_get("result_ref")?,
        failure_code: row.try_get("failure_code")?,
    })
}

/// Adds an event. Must come last in its transaction: it blocks all other events until the commit.
pub(super) async fn add(connection: &mut PgConnection, new: &NewEvent) -> Result<(), Error> {
    sqlx::query(
        "with head as (update event_head set last = last + 1 returning last)
         insert into events (cursor, type, project_id, task_id, job_id, session_id, state, result_ref, failure_code)
         select head.last, $1, (select project_id from tasks where id = $2), $2, $3, $4, $5, $6, $7 from head",
    )
    .bind(new.kind)
    .bind(new.task_id.as_uuid())
    .bind(new.job_id.map(|id| *id.as_uuid()))
    .bind(new.session_id.map(|id| *id.as_uuid()))
    .bind(&new.state)
    .bind(&new.result_ref)
    .bind(&new.failure_code)
    .execute(&mut *connection)
    .await?;
    sqlx::query("select pg_notify($1, '')")
        .bind(CHANNEL)
        .execute(connection)
        .await
        .map(drop)
        .map_err(Error::from)
}

impl Db {
    /// The events after a cursor, and the cursor to continue from. Fails for an expired cursor:
    /// events were missed.
    pub(crate) async fn events(
        &self,
        readable: &EventScope,
        after: i64,
        limit: u32,
    ) -> Result<(Vec<Event>, i64), Error> {
        let head = sqlx::query("select last, expired from event_head")
            .fetch_one(&self.pool)
            .await?;
        let (last, expired): (i64, i64) = (head.try_get("last")?, head.try_get("expired")?);
        // Without a cursor, reading starts with the oldest event that is kept.
        let after = if after == 0 { expired } else { after };
        if after < expired {
            return Err(Error::CursorExpired { expired });
        }
        if after > last {
            return Err(Error::CursorAhead { after, last });
        }
        let tasks: Vec<Uuid> = readable.task_ids.iter().map(|id| *id.as_uuid()).collect();
        let rows = sqlx::query(
            "select e.* from events e where e.cursor > $1 and e.cursor <= $2
               and ($3 or e.project_id = $4 or e.task_id = any($5)
                    or exists (select from tasks t left join projects p on p.id = t.project_id
                               where t.id = e.task_id and (t.owner_id = $6 or p.owner_id = $6)))
               and ($7::uuid is null or e.task_id = $7)
             order by e.cursor limit $8",
        )
        .bind(after)
        .bind(last)
        .bind(readable.all)
        .bind(readable.project_id.map(|id| *id.as_uuid()))
        .bind(tasks)
        .bind(readable.owner)
        .bind(readable.only_task.map(|id| *id.as_uuid()))
        .bind(i64::from(limit))
        .fetch_all(&self.pool)
        .await?;
        let items = rows.iter().map(event).collect::<Result<Vec<_>, _>>()?;
        // The events in between belong to others: skip them.
        let next = if items.len() < limit as usize {
            last
        } else {
            items.last().map_or(after, |event| event.cursor)
        };
        Ok((items, next))
    }

    /// Deletes a batch of events that are older than `days`, oldest first. Returns their number.
    pub(crate) async fn expire_events(&self, days: u32) -> Result<u64, Error> {
        let mut transaction = self.begin().await?;
        let deleted: i64 = sqlx::query_scalar(
            "with oldest as (select cursor, at from events order by cursor limit 5000),
                  gone as (delete from events where cursor <= (select max(cursor) from oldest where at < now() - make_interval(days => $1)) returning cursor),
                  mark as (update event_head set expired = greatest(expired, (select max(cursor) from gone)) where exists (select from gone) returning 1)
             select count(*) from gone",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX))
        .fetch_one(&mut *transaction)
        .await?;
        super::commit(transaction).await?;
        Ok(u64::try_from(deleted).unwrap_or(0))
    }

    /// Listens for events and policy changes.
    pub(crate) async fn listener(&self) -> Result<sqlx::postgres::PgListener, Error> {
        let mut listener = sqlx::postgres::PgListener::connect_with(&self.pool).await?;
        listener
            .listen_all([CHANNEL, super::policies::CHANNEL])
            .await?;
        Ok(listener)
    }
}

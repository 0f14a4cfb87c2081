//! Jobs: their nodes and their states. What nodes report is in `job_reports.rs`.

use std::{collections::BTreeMap, time::Duration};

use cynode_api::{
    ImageVersionId, Job, JobId, JobRun, JobState, NodeId, Page, Retry, TaskId, job_limits,
};
use serde_json::Value;
use sqlx::{Row as _, postgres::PgRow};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    Db, Error, Missing, NewEvent, PageRequest, decode, events, sandboxes::NewSandbox, to_json,
};
use crate::caller::Scope;

/// The right to step a job, until it expires or somebody else schedules the job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease(OffsetDateTime);

#[derive(Clone, Debug)]
pub(crate) struct JobRow {
    pub(crate) job_id: JobId,
    pub(crate) task_id: TaskId,
    pub(crate) node_id: Option<NodeId>,
    pub(crate) state: JobState,
    pub(crate) body: Value,
    pub(crate) request: JobRun,
    pub(crate) retry: Retry,
    pub(crate) stop_requested: bool,
    pub(crate) object: Job,
    pub(crate) late_result: Option<Value>,
    pub(crate) output_sha256: Option<String>,
    /// The result of an SBA job, and of the attempt that was abandoned.
    pub(crate) result_sha256: Option<String>,
    pub(crate) late_result_sha256: Option<String>,
    pub(crate) image_version_id: Option<ImageVersionId>,
    /// The models that its specification allows.
    pub(crate) allowed_models: Vec<String>,
    pub(crate) created_by: String,
    pub(crate) lease: Lease,
}

/// A job that a lost node may still run.
#[derive(Clone, Debug)]
pub(crate) struct OrphanedJob {
    pub(crate) job_id: JobId,
    pub(crate) task_id: TaskId,
    pub(crate) node_id: NodeId,
    pub(crate) created_by: String,
}

#[derive(Clone, Debug)]
pub(crate) struct NewJob<'a> {
    /// The caller's request, with the hash of the specification instead of it.
    pub(crate) body: &'a Value,
    /// The node's request without the specification.
    pub(crate) request: &'a JobRun,
    /// The JSON of the specification.
    pub(crate) spec: Option<&'a str>,
    pub(crate) object: &'a Job,
    pub(crate) retry: Retry,
    /// The models that the specification allows.
    pub(crate) allowed_models: &'a [String],
    /// The only node that can run the job.
    pub(crate) node_id: Option<NodeId>,
    pub(crate) image_version_id: ImageVersionId,
    pub(crate) created_by: &'a str,
}

fn job(row: &PgRow) -> Result<JobRow, Error> {
    let get = |name: &str| row.try_get::<Value, _>(name).map_err(Error::from);
    let text = |name: &str| row.try_get::<String, _>(name).map_err(Error::from);
    let flag = |name: &str| row.try_get::<bool, _>(name).map_err(Error::from);
    let id = |name: &str| row.try_get::<Option<Uuid>, _>(name).map_err(Error::from);
    Ok(JobRow {
        job_id: JobId::from_uuid(row.try_get("job_id")?),
        task_id: TaskId::from_uuid(row.try_get("task_id")?),
        node_id: id("node_id")?.map(NodeId::from_uuid),
        state: super::state(row)?,
        body: get("body")?,
        request: decode(get("request")?)?,
        retry: decode(text("retry")?.into())?,
        stop_requested: flag("stop_requested")?,
        object: decode(get("object")?)?,
        late_result: row.try_get("late_result")?,
        output_sha256: row.try_get("output_sha256")?,
        result_sha256: row.try_get("result_sha256")?,
        late_result_sha256: row.try_get("late_result_sha256")?,
        image_version_id: id("image_version_id")?.map(ImageVersionId::from_uuid),
        allowed_models: row
            .try_get::<Option<Value>, _>("allowed_models")?
            .map(decode)
            .transpose()?
            .unwrap_or_default(),
        created_by: text("created_by")?,
        lease: Lease(row.try_get("lease_until")?),
    })
}

impl JobRow {
    /// Whether the job has a specification.
    pub(crate) fn has_spec(&self) -> bool {
        ["job", "prompt"]
            .iter()
            .any(|name| self.body.get(name).is_some())
    }

    /// The labels that the job requires of its node.
    pub(crate) fn node_labels(&self) -> Result<BTreeMap<String, String>, Error> {
        self.body
            .get("node_labels")
            .map_or_else(|| Ok(BTreeMap::new()), |labels| decode(labels.clone()))
    }

    /// The job as the API shows it.
    pub(crate) fn into_object(self) -> Job {
        Job {
            state: self.state,
            node_id: self.node_id,
            late_result: self.late_result,
            command: self
                .body
                .get("command")
                .and_then(|command| serde_json::from_value(command.clone()).ok()),
            created_by: Some(self.created_by),
            ..self.object
        }
    }
}

impl Db {
    /// Inserts a job, and its task if that is new. `None` when the id is taken.
    pub(crate) async fn insert_job(
        &self,
        new: &NewJob<'_>,
        task: Option<&cynode_api::Task>,
        scope: &Scope,
    ) -> Result<Option<JobRow>, Error> {
        let insert = sqlx::query(
            "with new as (
                 insert into jobs (job_id, task_id, state, body, request, retry, object, image_version_id, owner_id, created_by, node_id, allowed_models)
                 values ($1, $2, 'accepted', $3, $4, $5, $6, $7, $8, $9, $10, $12) on conflict do nothing returning *),
             spec as (insert into job_specs (job_id, spec) select job_id, $11 from new where $11::text is not null)
             select * from new",
        )
        .bind(new.request.job_id.as_uuid())
        .bind(new.request.task_id.as_uuid())
        .bind(new.body)
        .bind(to_json(new.request))
        .bind(to_json(&new.retry).as_str().unwrap_or_default())
        .bind(to_json(new.object))
        .bind(new.image_version_id.as_uuid())
        .bind(scope.user_id.as_uuid())
        .bind(new.created_by)
        .bind(new.node_id.map(|id| *id.as_uuid()))
        .bind(new.spec)
        .bind((!new.allowed_models.is_empty()).then(|| to_json(&new.allowed_models)));
        let new = NewSandbox {
            insert,
            task,
            limits: new.request.sandbox.limits,
            event: NewEvent::job(new.request.task_id, new.request.job_id, JobState::Accepted),
        };
        let row = self.insert_sandbox(new, scope).await?;
        row.as_ref().map(job).transpose()
    }

    pub(crate) async fn job(&self, scope: &Scope, id: JobId) -> Result<JobRow, Error> {
        let row = self
            .visible_row(
                concat!(
                    "select * from jobs j where job_id = $1 and ",
                    visible_by_task!("j")
                ),
                id.as_uuid(),
                scope,
            )
            .await?;
        row.as_ref()
            .map(job)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Job(id)))
    }

    pub(crate) async fn any_job(&self, id: JobId) -> Result<Option<JobRow>, Error> {
        let row = self
            .row("select * from jobs where job_id = $1", id.as_uuid())
            .await?;
        row.as_ref().map(job).transpose()
    }

    /// Jobs without their output streams, which together would be too large.
    pub(crate) async fn list_jobs(
        &self,
        scope: &Scope,
        states: &[JobState],
        task_id: Option<TaskId>,
        page: &PageRequest,
    ) -> Result<Page<Job>, Error> {
        let listed = |row: &PgRow| -> Result<Job, Error> {
            let object: Job = decode(row.try_get("object")?)?;
            Ok(Job {
                job_id: JobId::from_uuid(row.try_get("job_id")?),
                state: super::state(row)?,
                node_id: row
                    .try_get::<Option<Uuid>, _>("node_id")?
                    .map(NodeId::from_uuid),
                command: row.try_get("command")?,
                created_by: row.try_get("created_by")?,
                ..object
            })
        };
        let states: Vec<&str> = states.iter().map(|state| state.as_str()).collect();
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select j.object || '{\"stdout\": \"\", \"stderr\": \"\", \"encoding\": \"utf-8\"}' as object, j.job_id, j.state, j.node_id, j.created_by,
                        array(select left(word, $7) from jsonb_array_elements_text(coalesce(j.body->'command', '[]')) with ordinality as words (word, number)
                              where number <= $8 order by number) as command
                     from jobs j where ",
                    visible_by_task!("j"),
                    " and (cardinality($4::text[]) = 0 or j.state = any($4)) and ($5::uuid is null or j.task_id = $5)"
                ],
                "j.job_id",
                "$1",
                "$6",
                "$9"
            ))
            .bind(after)
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(states.clone())
            .bind(task_id.map(|id| *id.as_uuid()))
            .bind(page.id_part.clone())
            .bind(job_limits::LISTED_WORD_CHARACTERS)
            .bind(i64::from(job_limits::LISTED_WORDS))
            .bind(count)
        };
        self.read_page_of(page, query, listed, |job| *job.job_id.as_uuid())
            .await
    }

    /// Leases jobs that need a step. No other orchestrator takes them until the lease expires.
    pub(crate) async fn lease_jobs(&self, count: usize) -> Result<Vec<JobRow>, Error> {
        let rows = sqlx::query(
            "update jobs set lease_until = now() + interval '30 seconds' where job_id in (
                 select job_id from jobs where (state in ('accepted', 'in_progress') or not acknowledged) and lease_until < now()
                 order by lease_until limit $1 for update skip locked)
             returning *",
        )
        .bind(i64::try_from(count).unwrap_or(i64::MAX))
        .fetch_all(&self.pool)
        .await?;
        rows.iter().map(job).collect()
    }

    /// Extends the lease of a job. `None` when the lease was lost meanwhile: then another reconciler
    /// has the job.
    pub(crate) async fn extend_lease(
        &self,
        id: JobId,
        lease: Lease,
        duration: Duration,
    ) -> Result<Option<Lease>, Error> {
        let until: Option<OffsetDateTime> = sqlx::query_scalar(
            "update jobs set lease_until = now() + make_interval(secs => $3) where job_id = $1 and lease_until = $2 returning lease_until",
        )
        .bind(id.as_uuid())
        .bind(lease.0)
        .bind(duration.as_secs_f64())
        .fetch_optional(&self.pool)
        .await?;
        Ok(until.map(Lease))
    }

    /// Assigns a job to a node, durably, before the node is called. False when the job was assigned
    /// or ended meanwhile.
    pub(crate) async fn assign_job(&self, id: JobId, node_id: NodeId) -> Result<bool, Error> {
        let done = sqlx::query(
            "update jobs set node_id = $2, attempt = attempt + 1, updated_at = now()
             where job_id = $1 and node_id is null and state = 'accepted' and not stop_requested",
        )
        .bind(id.as_uuid())
        .bind(node_id.as_uuid())
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Takes a job back: from a node that certainly does not have it (then `lease` must still
    /// hold), or, by its retry rule, from one that is lost. The next attempt follows after `delay`.
    pub(crate) async fn unassign_job(
        &self,
        id: JobId,
        from: NodeId,
        lease: Option<Lease>,
        delay: Duration,
    ) -> Result<bool, Error> {
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "update jobs j set node_id = null, state = 'accepted', updated_at = now(), lease_until = now() + make_interval(secs => $3)
             from (select job_id, state from jobs where job_id = $1 for update) before
             where j.job_id = before.job_id and j.node_id = $2
               and (before.state = 'accepted' or (before.state = 'in_progress' and $4::timestamptz is null)) and ($4::timestamptz is null or j.lease_until = $4)
             returning j.task_id, before.state",
        )
        .bind(id.as_uuid())
        .bind(from.as_uuid())
        .bind(delay.as_secs_f64())
        .bind(lease.map(|lease| lease.0))
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(row) = row else { return Ok(false) };
        if row.try_get::<String, _>("state")? == "in_progress" {
            let task_id = TaskId::from_uuid(row.try_get("task_id")?);
            events::add(
                &mut transaction,
                &NewEvent::job(task_id, id, JobState::Accepted),
            )
            .await?;
        }
        super::commit(transaction).await?;
        Ok(true)
    }

    pub(crate) async fn request_stop(&self, id: JobId) -> Result<(), Error> {
        sqlx::query("update jobs set stop_requested = true, lease_until = least(lease_until, now()) where job_id = $1 and state in ('accepted', 'in_progress')")
            .bind(id.as_uuid())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    /// Schedules the next step of a node's job, even if another reconciler has leased it.
    pub(crate) async fn wake_job(
        &self,
        id: JobId,
        node_id: NodeId,
        delay: Duration,
    ) -> Result<bool, Error> {
        let woken = sqlx::query("update jobs set lease_until = now() + make_interval(secs => $3) where job_id = $1 and node_id = $2")
            .bind(id.as_uuid())
            .bind(node_id.as_uuid())
            .bind(delay.as_secs_f64())
            .execute(&self.pool)
            .await?;
        Ok(woken.rows_affected() == 1)
    }

    /// Schedules all jobs of a node that is back.
    pub(crate) async fn wake_jobs_on(&self, node_id: NodeId) -> Result<(), Error> {
        sqlx::query(
            "update jobs set lease_until = now() where node_id = $1 and lease_until > now() and (state in ('accepted', 'in_progress') or not acknowledged)",
        )
        .bind(node_id.as_uuid())
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(Error::from)
    }

    /// Records that a lost node may still run a job that is rescheduled now.
    pub(crate) async fn insert_orphan(&self, id: JobId, node_id: NodeId) -> Result<(), Error> {
        sqlx::query(
            "insert into job_leftovers (job_id, node_id) values ($1, $2) on conflict do nothing",
        )
        .bind(id.as_uuid())
        .bind(node_id.as_uuid())
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(Error::from)
    }

    /// Orphaned jobs on nodes that are reachable again, except those that were assigned to them
    /// anew.
    pub(crate) async fn orphaned_jobs(
        &self,
        unreachable_after: Duration,
    ) -> Result<Vec<OrphanedJob>, Error> {
        let rows = sqlx::query(
            "select l.job_id, j.task_id, l.node_id, j.created_by from job_leftovers l join jobs j on j.job_id = l.job_id join nodes n on n.id = l.node_id
             where not l.stopped and not n.is_lost and n.last_heartbeat_at > now() - make_interval(secs => $1)
               and ((j.node_id is not null and j.node_id <> l.node_id) or j.state not in ('accepted', 'in_progress')) limit 100",
        )
        .bind(unreachable_after.as_secs_f64())
        .fetch_all(&self.pool)
        .await?;
        rows.iter()
            .map(|row| {
                let id = |name: &str| row.try_get::<Uuid, _>(name).map_err(Error::from);
                Ok(OrphanedJob {
                    job_id: JobId::from_uuid(id("job_id")?),
                    task_id: TaskId::from_uuid(id("task_id")?),
                    node_id: NodeId::from_uuid(id("node_id")?),
                    created_by: row.try_get("created_by")?,
                })
            })
            .collect()
    }

    /// Records that the orphan was stopped: the node remembers the job as ended.
    pub(crate) async fn mark_orphan_stopped(
        &self,
        id: JobId,
        node_id: NodeId,
    ) -> Result<(), Error> {
        sqlx::query("update job_leftovers set stopped = true where job_id = $1 and node_id = $2")
            .bind(id.as_uuid())
            .bind(node_id.as_uuid())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    /// Nodes on which the job was stopped as an orphan.
    pub(crate) async fn nodes_that_stopped(&self, id: JobId) -> Result<Vec<NodeId>, Error> {
        let ids: Vec<Uuid> =
            sqlx::query_scalar("select node_id from job_leftovers where job_id = $1 and stopped")
                .bind(id.as_uuid())
                .fetch_all(&self.pool)
                .await?;
        Ok(ids.into_iter().map(NodeId::from_uuid).collect())
    }

    pub(crate) async fn delete_orphan(&self, id: JobId, node_id: NodeId) -> Result<(), Error> {
        sqlx::query("delete from job_leftovers where job_id = $1 and node_id = $2")
            .bind(id.as_uuid())
            .bind(node_id.as_uuid())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }
}

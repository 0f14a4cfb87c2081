//! Jobs: who has them, how far they are, what came of them.

use std::collections::BTreeMap;

use cynode_api::{
    ErrorCode, ImageVersionId, Job, JobCreate, JobId, JobOutput, JobRun, JobState, NodeId, Page,
    Retry, TaskId, Truncated, UserId,
};
use cynode_service::ApiError;
use serde_json::Value;
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Db, NewEvent, PageReader, events, problem, quotas, stored, to_json};
use crate::{
    blobs::{Blobs, Staged},
    caller::Scope,
};

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
    pub(crate) image_version_id: Option<ImageVersionId>,
    pub(crate) created_by: String,
    /// Until then whoever leased it has it.
    pub(crate) lease_until: OffsetDateTime,
}

/// A job that a lost node may still have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeftBehind {
    pub(crate) job_id: JobId,
    pub(crate) task_id: TaskId,
    pub(crate) node_id: NodeId,
}

#[derive(Clone, Debug)]
pub(crate) struct NewJob<'a> {
    pub(crate) body: &'a JobCreate,
    pub(crate) request: &'a JobRun,
    pub(crate) object: &'a Job,
    pub(crate) retry: Retry,
    /// The only node that can run it.
    pub(crate) node_id: Option<NodeId>,
    pub(crate) image_version_id: ImageVersionId,
    pub(crate) created_by: &'a str,
}

fn job(row: &PgRow) -> Result<JobRow, ApiError> {
    let get = |name: &str| row.try_get::<Value, _>(name).map_err(problem);
    let text = |name: &str| row.try_get::<String, _>(name).map_err(problem);
    let flag = |name: &str| row.try_get::<bool, _>(name).map_err(problem);
    let id = |name: &str| row.try_get::<Option<Uuid>, _>(name).map_err(problem);
    Ok(JobRow {
        job_id: JobId::from_uuid(row.try_get("job_id").map_err(problem)?),
        task_id: TaskId::from_uuid(row.try_get("task_id").map_err(problem)?),
        node_id: id("node_id")?.map(NodeId::from_uuid),
        state: text("state")?
            .parse()
            .map_err(|error: String| ApiError::new(ErrorCode::Internal, error))?,
        body: get("body")?,
        request: stored(get("request")?)?,
        retry: stored(text("retry")?.into())?,
        stop_requested: flag("stop_requested")?,
        object: stored(get("object")?)?,
        late_result: row.try_get("late_result").map_err(problem)?,
        output_sha256: row.try_get("output_sha256").map_err(problem)?,
        image_version_id: id("image_version_id")?.map(ImageVersionId::from_uuid),
        created_by: text("created_by")?,
        lease_until: row.try_get("lease_until").map_err(problem)?,
    })
}

impl JobRow {
    /// What its node must have.
    pub(crate) fn node_labels(&self) -> Result<BTreeMap<String, String>, ApiError> {
        self.body
            .get("node_labels")
            .map_or_else(|| Ok(BTreeMap::new()), |labels| stored(labels.clone()))
    }

    /// As callers see it.
    pub(crate) fn into_object(self) -> Job {
        Job {
            state: self.state,
            node_id: self.node_id,
            late_result: self.late_result,
            created_by: Some(self.created_by),
            ..self.object
        }
    }
}

fn told(task_id: TaskId, job_id: JobId, state: JobState) -> NewEvent {
    NewEvent {
        kind: "job.state",
        task_id,
        job_id: Some(job_id),
        session_id: None,
        state: state.to_string(),
        result_ref: state.is_final().then(|| format!("/v1/jobs/{job_id}")),
    }
}

/// What of a job's output is not kept.
#[derive(Clone, Copy, Debug)]
enum WithoutOutput {
    /// All of it, but for what the object shows of its streams.
    Whole,
    Streams,
}

impl WithoutOutput {
    fn leave_out(self, output: &mut JobOutput, quota: &str) {
        let Truncated { stdout, stderr } = output.truncated;
        let truncated = Truncated {
            stdout: stdout || !output.stdout.is_empty(),
            stderr: stderr || !output.stderr.is_empty(),
        };
        if !truncated.stdout && !truncated.stderr {
            return;
        }
        if matches!(self, Self::Streams) {
            *output = JobOutput {
                truncated,
                ..JobOutput::default()
            };
        }
        output.truncated_by = Some(quota.to_owned());
    }
}

fn stream_bytes(output: &JobOutput) -> i64 {
    i64::try_from(output.stdout.len() + output.stderr.len()).unwrap_or(i64::MAX)
}

/// Refuses when more is kept than the quota of a task's owner or project allows.
async fn check_bytes(connection: &mut PgConnection, task: TaskId) -> Result<(), ApiError> {
    let owner: Uuid = sqlx::query_scalar("select owner_id from tasks where id = $1")
        .bind(task.as_uuid())
        .fetch_one(&mut *connection)
        .await
        .map_err(problem)?;
    quotas::check(
        connection,
        UserId::from_uuid(owner),
        task,
        quotas::Uses::Bytes,
    )
    .await
}

fn no_job(id: JobId) -> ApiError {
    ApiError::new(ErrorCode::JobNotFound, format!("there is no job {id}"))
}

impl Db {
    /// `None` when the id is taken.
    pub(crate) async fn insert_job(
        &self,
        new: &NewJob<'_>,
        task: Option<&cynode_api::Task>,
        scope: &Scope,
    ) -> Result<Option<JobRow>, ApiError> {
        let mut transaction = self.begin().await?;
        if let Some(task) = task {
            super::work::insert_task(&mut *transaction, task, scope).await?;
        }
        let row = sqlx::query(
            "insert into jobs (job_id, task_id, state, body, request, retry, object, image_version_id, owner_id, created_by, node_id)
             values ($1, $2, 'accepted', $3, $4, $5, $6, $7, $8, $9, $10) on conflict do nothing returning *",
        )
        .bind(new.request.job_id.as_uuid())
        .bind(new.request.task_id.as_uuid())
        .bind(to_json(new.body))
        .bind(to_json(new.request))
        .bind(to_json(&new.retry).as_str().unwrap_or_default())
        .bind(to_json(new.object))
        .bind(new.image_version_id.as_uuid())
        .bind(scope.user_id.as_uuid())
        .bind(new.created_by)
        .bind(new.node_id.map(|id| *id.as_uuid()))
        .fetch_optional(&mut *transaction)
        .await
        .map_err(problem)?;
        let Some(row) = row else { return Ok(None) };
        quotas::check(
            &mut transaction,
            scope.user_id,
            new.request.task_id,
            quotas::Uses::sandbox(new.request.sandbox.limits),
        )
        .await?;
        events::add(
            &mut transaction,
            &told(new.request.task_id, new.request.job_id, JobState::Accepted),
        )
        .await?;
        super::commit(transaction).await?;
        job(&row).map(Some)
    }

    pub(crate) async fn job(&self, scope: &Scope, id: JobId) -> Result<JobRow, ApiError> {
        let row = sqlx::query(concat!(
            "select * from jobs j where job_id = $1 and ",
            visible_by_task!("j")
        ))
        .bind(id.as_uuid())
        .bind(scope.sees_all)
        .bind(scope.user_id.as_uuid())
        .fetch_optional(&self.pool)
        .await
        .map_err(problem)?;
        row.as_ref().map(job).transpose()?.ok_or_else(|| no_job(id))
    }

    pub(crate) async fn any_job(&self, id: JobId) -> Result<Option<JobRow>, ApiError> {
        let row = sqlx::query("select * from jobs where job_id = $1")
            .bind(id.as_uuid())
            .fetch_optional(&self.pool)
            .await
            .map_err(problem)?;
        row.as_ref().map(job).transpose()
    }

    /// Jobs without their streams, which together could be more than anybody wants at once.
    pub(crate) async fn list_jobs(
        &self,
        scope: &Scope,
        state: Option<JobState>,
        task_id: Option<TaskId>,
        after: Option<Uuid>,
        limit: u32,
    ) -> Result<Page<Job>, ApiError> {
        let listed = |row: &PgRow| -> Result<Job, ApiError> {
            let object: Job = stored(row.try_get("object").map_err(problem)?)?;
            Ok(Job {
                job_id: JobId::from_uuid(row.try_get("job_id").map_err(problem)?),
                state: row
                    .try_get::<String, _>("state")
                    .map_err(problem)?
                    .parse()
                    .map_err(|error: String| ApiError::new(ErrorCode::Internal, error))?,
                node_id: row
                    .try_get::<Option<Uuid>, _>("node_id")
                    .map_err(problem)?
                    .map(NodeId::from_uuid),
                created_by: row.try_get("created_by").map_err(problem)?,
                ..object
            })
        };
        let mut pages = PageReader::new(limit, after);
        while let Some(count) = pages.wanted().await {
            let rows = sqlx::query(concat!(
                "select j.object || '{\"stdout\": \"\", \"stderr\": \"\", \"encoding\": \"utf-8\"}' as object, j.job_id, j.state, j.node_id, j.created_by
                 from jobs j where ($1::uuid is null or j.job_id > $1) and ",
                visible_by_task!("j"),
                " and ($4::text is null or j.state = $4) and ($5::uuid is null or j.task_id = $5) order by j.job_id limit $6"
            ))
            .bind(pages.after())
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(state.map(JobState::as_str))
            .bind(task_id.map(|id| *id.as_uuid()))
            .bind(count)
            .fetch_all(&self.pool)
            .await
            .map_err(problem)?;
            pages.add(
                rows.iter().map(listed).collect::<Result<Vec<_>, _>>()?,
                |job| *job.job_id.as_uuid(),
            );
        }
        Ok(pages.finish())
    }

    /// Jobs that wait for something, for this orchestrator to bring forward. Nobody else does so before the lease has passed.
    pub(crate) async fn lease_jobs(&self, count: usize) -> Result<Vec<JobRow>, ApiError> {
        let rows = sqlx::query(
            "update jobs set lease_until = now() + interval '30 seconds' where job_id in (
                 select job_id from jobs where (state in ('accepted', 'in_progress') or not acknowledged) and lease_until < now()
                 order by lease_until limit $1 for update skip locked)
             returning *",
        )
        .bind(i64::try_from(count).unwrap_or(i64::MAX))
        .fetch_all(&self.pool)
        .await
        .map_err(problem)?;
        rows.iter().map(job).collect()
    }

    /// When a leased job shall be looked at again. False when something happened to it meanwhile: then somebody looks already.
    pub(crate) async fn lease_until(
        &self,
        id: JobId,
        leased: OffsetDateTime,
        seconds: f64,
    ) -> Result<bool, ApiError> {
        let set = sqlx::query("update jobs set lease_until = now() + make_interval(secs => $3) where job_id = $1 and lease_until = $2")
            .bind(id.as_uuid())
            .bind(leased)
            .bind(seconds)
            .execute(&self.pool)
            .await
            .map_err(problem)?;
        Ok(set.rows_affected() == 1)
    }

    /// Gives a job to a node: durable before the node hears of it. False when it was given to one, or ended, meanwhile.
    pub(crate) async fn assign_job(&self, id: JobId, node_id: NodeId) -> Result<bool, ApiError> {
        let done = sqlx::query(
            "update jobs set node_id = $2, attempt = attempt + 1, updated_at = now()
             where job_id = $1 and node_id is null and state = 'accepted' and not stop_requested",
        )
        .bind(id.as_uuid())
        .bind(node_id.as_uuid())
        .execute(&self.pool)
        .await
        .map_err(problem)?;
        Ok(done.rows_affected() == 1)
    }

    /// Takes a job back from a node that certainly does not have it (then nobody else may have looked at it since it was `leased`),
    /// or, by its rule, from one that is lost. Another is looked for after so many seconds.
    pub(crate) async fn unassign_job(
        &self,
        id: JobId,
        from: NodeId,
        leased: Option<OffsetDateTime>,
        seconds: f64,
    ) -> Result<bool, ApiError> {
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
        .bind(seconds)
        .bind(leased)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(problem)?;
        let Some(row) = row else { return Ok(false) };
        if row.try_get::<String, _>("state").map_err(problem)? == "in_progress" {
            let task_id = TaskId::from_uuid(row.try_get("task_id").map_err(problem)?);
            events::add(&mut transaction, &told(task_id, id, JobState::Accepted)).await?;
        }
        super::commit(transaction).await?;
        Ok(true)
    }

    /// Writes down how far a job is. Only forwards: what has ended stays as it ended. Says whether anything changed.
    ///
    /// A job ends whatever the quota of its task's owner or project says; then less of its output is kept, and the object says so.
    pub(crate) async fn advance_job(
        &self,
        id: JobId,
        from: Option<NodeId>,
        object: &Job,
        output: Option<(&Staged, &Blobs)>,
        acknowledged: bool,
    ) -> Result<bool, ApiError> {
        let mut advanced = self
            .try_advance_job(id, from, object, output, acknowledged)
            .await;
        if let Some((staged, blobs)) = output
            && !matches!(advanced, Ok(true))
        {
            blobs.discard(staged).await;
        }
        // First without the whole output, then without the streams too.
        let mut object = object.clone();
        for without in [WithoutOutput::Whole, WithoutOutput::Streams] {
            let Err(error) = &advanced else { break };
            if !error.0.is(ErrorCode::QuotaExceeded) {
                break;
            }
            without.leave_out(&mut object.output, &error.0.detail);
            advanced = self
                .try_advance_job(id, from, &object, None, acknowledged)
                .await;
        }
        advanced
    }

    async fn try_advance_job(
        &self,
        id: JobId,
        from: Option<NodeId>,
        object: &Job,
        output: Option<(&Staged, &Blobs)>,
        acknowledged: bool,
    ) -> Result<bool, ApiError> {
        let blob = output.map_or(0, |(staged, _)| {
            i64::try_from(staged.size).unwrap_or(i64::MAX)
        });
        let kept = blob.saturating_add(stream_bytes(&object.output));
        let mut transaction = self.begin().await?;
        if output.is_some() {
            super::artifacts::hold_blobs(&mut transaction).await?;
        }
        let row = sqlx::query(
            "update jobs set state = $3, object = $4, output_sha256 = coalesce($5, output_sha256), output_bytes = output_bytes + $7,
                 acknowledged = $6, updated_at = now()
             where job_id = $1 and node_id is not distinct from $2 and state in ('accepted', 'in_progress') and not (state = 'in_progress' and $3 = 'accepted')
               and state <> $3
             returning task_id",
        )
        .bind(id.as_uuid())
        .bind(from.map(|id| *id.as_uuid()))
        .bind(object.state.as_str())
        .bind(to_json(object))
        .bind(output.map(|(staged, _)| &staged.sha256))
        .bind(acknowledged)
        .bind(kept)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(problem)?;
        let Some(row) = row else { return Ok(false) };
        let task_id = TaskId::from_uuid(row.try_get("task_id").map_err(problem)?);
        if kept > 0 {
            check_bytes(&mut transaction, task_id).await?;
        }
        if let Some((staged, blobs)) = output {
            blobs.place(staged).await?;
        }
        events::add(&mut transaction, &told(task_id, id, object.state)).await?;
        super::commit(transaction).await?;
        Ok(true)
    }

    pub(crate) async fn acknowledge_job(&self, id: JobId) -> Result<(), ApiError> {
        sqlx::query("update jobs set acknowledged = true where job_id = $1")
            .bind(id.as_uuid())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }

    /// Keeps what a node said of a job that had been given up, without its output when that is beyond a quota.
    pub(crate) async fn keep_late_result(
        &self,
        id: JobId,
        mut result: Job,
    ) -> Result<(), ApiError> {
        match self.try_keep_late_result(id, &result).await {
            Err(error) if error.0.is(ErrorCode::QuotaExceeded) => {
                WithoutOutput::Streams.leave_out(&mut result.output, &error.0.detail);
                self.try_keep_late_result(id, &result).await
            }
            kept => kept,
        }
    }

    async fn try_keep_late_result(&self, id: JobId, result: &Job) -> Result<(), ApiError> {
        let kept = stream_bytes(&result.output);
        let mut transaction = self.begin().await?;
        let task = sqlx::query_scalar::<_, Uuid>(
            "update jobs set late_result = $2, output_bytes = output_bytes + $3 where job_id = $1 and late_result is null returning task_id",
        )
        .bind(id.as_uuid())
        .bind(to_json(result))
        .bind(kept)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(problem)?;
        let Some(task) = task else { return Ok(()) };
        if kept > 0 {
            check_bytes(&mut transaction, TaskId::from_uuid(task)).await?;
        }
        super::commit(transaction).await
    }

    pub(crate) async fn ask_stop(&self, id: JobId) -> Result<(), ApiError> {
        sqlx::query("update jobs set stop_requested = true, lease_until = least(lease_until, now()) where job_id = $1 and state in ('accepted', 'in_progress')")
            .bind(id.as_uuid())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }

    /// Something happened to a node's job: it is looked at after so many seconds, whoever has it.
    pub(crate) async fn wake_job(
        &self,
        id: JobId,
        node_id: NodeId,
        seconds: f64,
    ) -> Result<bool, ApiError> {
        let woken = sqlx::query("update jobs set lease_until = now() + make_interval(secs => $3) where job_id = $1 and node_id = $2")
            .bind(id.as_uuid())
            .bind(node_id.as_uuid())
            .bind(seconds)
            .execute(&self.pool)
            .await
            .map_err(problem)?;
        Ok(woken.rows_affected() == 1)
    }

    /// A node is back: what waits for it waits no longer.
    pub(crate) async fn wake_jobs_of(&self, node_id: NodeId) -> Result<(), ApiError> {
        sqlx::query(
            "update jobs set lease_until = now() where node_id = $1 and lease_until > now() and (state in ('accepted', 'in_progress') or not acknowledged)",
        )
        .bind(node_id.as_uuid())
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(problem)
    }

    /// Notes that a lost node may still have a job that goes elsewhere now.
    pub(crate) async fn leave_behind(&self, id: JobId, node_id: NodeId) -> Result<(), ApiError> {
        sqlx::query(
            "insert into job_leftovers (job_id, node_id) values ($1, $2) on conflict do nothing",
        )
        .bind(id.as_uuid())
        .bind(node_id.as_uuid())
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(problem)
    }

    /// What nodes that answer again were left with. Not what they were given once more.
    pub(crate) async fn left_behind(
        &self,
        unreachable_after: f64,
    ) -> Result<Vec<LeftBehind>, ApiError> {
        let rows = sqlx::query(
            "select l.job_id, j.task_id, l.node_id from job_leftovers l join jobs j on j.job_id = l.job_id join nodes n on n.id = l.node_id
             where not l.stopped and not n.is_lost and n.last_heartbeat_at > now() - make_interval(secs => $1)
               and ((j.node_id is not null and j.node_id <> l.node_id) or j.state not in ('accepted', 'in_progress')) limit 100",
        )
        .bind(unreachable_after)
        .fetch_all(&self.pool)
        .await
        .map_err(problem)?;
        rows.iter()
            .map(|row| {
                let id = |name: &str| row.try_get::<Uuid, _>(name).map_err(problem);
                Ok(LeftBehind {
                    job_id: JobId::from_uuid(id("job_id")?),
                    task_id: TaskId::from_uuid(id("task_id")?),
                    node_id: NodeId::from_uuid(id("node_id")?),
                })
            })
            .collect()
    }

    /// The job was stopped on that node, which remembers it as ended.
    pub(crate) async fn note_stopped_on(&self, id: JobId, node_id: NodeId) -> Result<(), ApiError> {
        sqlx::query("update job_leftovers set stopped = true where job_id = $1 and node_id = $2")
            .bind(id.as_uuid())
            .bind(node_id.as_uuid())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }

    /// Nodes on which the job was stopped because it had gone elsewhere.
    pub(crate) async fn stopped_on(&self, id: JobId) -> Result<Vec<NodeId>, ApiError> {
        let ids: Vec<Uuid> =
            sqlx::query_scalar("select node_id from job_leftovers where job_id = $1 and stopped")
                .bind(id.as_uuid())
                .fetch_all(&self.pool)
                .await
                .map_err(problem)?;
        Ok(ids.into_iter().map(NodeId::from_uuid).collect())
    }

    pub(crate) async fn forget_left_behind(
        &self,
        id: JobId,
        node_id: NodeId,
    ) -> Result<(), ApiError> {
        sqlx::query("delete from job_leftovers where job_id = $1 and node_id = $2")
            .bind(id.as_uuid())
            .bind(node_id.as_uuid())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }
}

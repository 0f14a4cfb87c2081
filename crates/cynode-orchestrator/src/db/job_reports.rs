//! The reports of nodes about jobs: how a job proceeds, and what is kept of its end.

use std::time::Duration;

use cynode_api::{
    Job, JobId, JobOutput, JobProgress, JobState, NodeId, TaskId, Truncated, UserId, sba::JobSpec,
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Db, Error, NewEvent, events, quotas, to_json};
use crate::{
    blobs::{Blobs, StagedBlob},
    job_results::ResultSummary,
};

/// Between two events for the progress of a job.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// The blobs of a final report: staged, and placed when the report is stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReportBlobs<'a> {
    pub(crate) store: &'a Blobs,
    pub(crate) output: Option<&'a StagedBlob>,
    /// The result of an SBA job.
    pub(crate) result: Option<&'a StagedBlob>,
    /// What stays of the result.
    pub(crate) summary: Option<&'a ResultSummary>,
}

impl ReportBlobs<'_> {
    fn bytes(&self) -> i64 {
        let staged = [self.output, self.result].into_iter().flatten();
        staged
            .map(|blob| i64::try_from(blob.size).unwrap_or(i64::MAX))
            .fold(0, i64::saturating_add)
    }

    async fn place(&self) -> Result<(), Error> {
        for blob in [self.output, self.result].into_iter().flatten() {
            self.store.place(blob).await?;
        }
        Ok(())
    }

    /// Discards what this has and `kept` has not.
    async fn discard_except(&self, kept: &Self) {
        for (blob, is_kept) in [
            (self.output, kept.output.is_some()),
            (self.result, kept.result.is_some()),
        ] {
            if let Some(blob) = blob.filter(|_| !is_kept) {
                self.store.discard(blob).await;
            }
        }
    }

    const fn without_blobs(self) -> Self {
        Self {
            output: None,
            result: None,
            ..self
        }
    }
}

/// What is dropped to stay within a quota, in this order.
#[derive(Clone, Copy, Debug)]
enum Omitted {
    /// The collected output; the streams in the job's object stay.
    Output,
    Streams,
    Result,
}

impl Omitted {
    fn leave_out(self, object: &mut Job, blobs: Option<&mut ReportBlobs<'_>>, quota: &str) {
        let output = &mut object.output;
        let Truncated { stdout, stderr } = output.truncated;
        let truncated = Truncated {
            stdout: stdout || !output.stdout.is_empty(),
            stderr: stderr || !output.stderr.is_empty(),
        };
        let mut is_less = truncated.stdout || truncated.stderr;
        match self {
            Self::Output => drop(blobs.and_then(|blobs| blobs.output.take())),
            Self::Streams if is_less => {
                *output = JobOutput {
                    truncated,
                    ..JobOutput::default()
                };
            }
            Self::Streams => {}
            Self::Result => {
                is_less |= blobs.and_then(|blobs| blobs.result.take()).is_some();
            }
        }
        if is_less {
            output.truncated_by = Some(quota.to_owned());
        }
    }
}

fn stream_bytes(output: &JobOutput) -> i64 {
    i64::try_from(output.stdout.len() + output.stderr.len()).unwrap_or(i64::MAX)
}

/// Fails when the stored bytes exceed the quota of the task's owner or project.
async fn check_bytes(connection: &mut PgConnection, task: TaskId) -> Result<(), Error> {
    let owner: Uuid = sqlx::query_scalar("select owner_id from tasks where id = $1")
        .bind(task.as_uuid())
        .fetch_one(&mut *connection)
        .await?;
    quotas::check(
        connection,
        UserId::from_uuid(owner),
        task,
        quotas::Usage::Bytes,
    )
    .await
}

/// Why the job failed, for its event.
fn failure_code(object: &Job, summary: Option<&ResultSummary>) -> Option<String> {
    let reported = summary.and_then(|summary| summary.failure_code.clone());
    let error = || object.error.as_ref().map(|error| error.code.clone());
    reported
        .or_else(error)
        .filter(|_| object.state.is_final() && object.state != JobState::Completed)
}

impl Db {
    /// Advances the state of a job. A final state is never changed. Returns whether anything
    /// changed.
    ///
    /// A job ends even when its output exceeds a quota; then less of the output is kept, and the
    /// object says so.
    pub(crate) async fn advance_job(
        &self,
        id: JobId,
        from: Option<NodeId>,
        object: &Job,
        blobs: Option<ReportBlobs<'_>>,
        acknowledged: bool,
    ) -> Result<bool, Error> {
        let (mut object, mut kept) = (object.clone(), blobs);
        let mut advanced = self
            .try_advance_job(id, from, &object, kept, acknowledged)
            .await;
        for omitted in [Omitted::Output, Omitted::Streams, Omitted::Result] {
            let Err(Error::Quota(quota)) = &advanced else {
                break;
            };
            omitted.leave_out(&mut object, kept.as_mut(), &quota.to_string());
            advanced = self
                .try_advance_job(id, from, &object, kept, acknowledged)
                .await;
        }
        discard_unplaced(blobs, kept, matches!(advanced, Ok(true))).await;
        advanced
    }

    async fn try_advance_job(
        &self,
        id: JobId,
        from: Option<NodeId>,
        object: &Job,
        blobs: Option<ReportBlobs<'_>>,
        acknowledged: bool,
    ) -> Result<bool, Error> {
        let kept = blobs
            .map_or(0, |blobs| blobs.bytes())
            .saturating_add(stream_bytes(&object.output));
        let mut transaction = self.begin().await?;
        if blobs.is_some_and(|blobs| blobs.bytes() > 0) {
            super::artifacts::lock_blobs_shared(&mut transaction).await?;
        }
        let summary = blobs.and_then(|blobs| blobs.summary);
        let sha256 = |blob: Option<&StagedBlob>| blob.map(|blob| blob.sha256.clone());
        let task: Option<Uuid> = sqlx::query_scalar(
            "update jobs set state = $3, object = $4, output_sha256 = coalesce($5, output_sha256), result_sha256 = coalesce($8, result_sha256),
                 result_summary = coalesce($9, result_summary), output_bytes = output_bytes + $7, acknowledged = $6, updated_at = now()
             where job_id = $1 and node_id is not distinct from $2 and state in ('accepted', 'in_progress') and not (state = 'in_progress' and $3 = 'accepted')
               and state <> $3
             returning task_id",
        )
        .bind(id.as_uuid())
        .bind(from.map(|id| *id.as_uuid()))
        .bind(object.state.as_str())
        .bind(to_json(object))
        .bind(sha256(blobs.and_then(|blobs| blobs.output)))
        .bind(acknowledged)
        .bind(kept)
        .bind(sha256(blobs.and_then(|blobs| blobs.result)))
        .bind(summary.map(to_json))
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(task) = task else { return Ok(false) };
        let task_id = TaskId::from_uuid(task);
        if acknowledged {
            delete_spec(&mut transaction, id).await?;
        }
        if kept > 0 {
            check_bytes(&mut transaction, task_id).await?;
        }
        if let Some(blobs) = blobs {
            blobs.place().await?;
        }
        let event = NewEvent::job(task_id, id, object.state)
            .with_failure_code(failure_code(object, summary));
        events::add(&mut transaction, &event).await?;
        super::commit(transaction).await?;
        Ok(true)
    }

    /// Adds an event for the progress of a running job, unless there was one recently or it has come
    /// no further since. Returns whether there is a new event.
    pub(crate) async fn note_progress(
        &self,
        id: JobId,
        from: NodeId,
        progress: &JobProgress,
    ) -> Result<bool, Error> {
        // The time left always changes.
        let mut compared = to_json(progress);
        if let Some(members) = compared.as_object_mut() {
            members.remove("remaining_seconds");
        }
        let mut transaction = self.begin().await?;
        let task: Option<Uuid> = sqlx::query_scalar(
            "update jobs set progress = $3, progress_at = now()
             where job_id = $1 and node_id = $2 and state = 'in_progress' and progress is distinct from $3
               and (progress_at is null or progress_at <= now() - make_interval(secs => $4))
             returning task_id",
        )
        .bind(id.as_uuid())
        .bind(from.as_uuid())
        .bind(compared)
        .bind(PROGRESS_INTERVAL.as_secs_f64())
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(task) = task else { return Ok(false) };
        let event = NewEvent::progress(TaskId::from_uuid(task), id, progress.clone());
        events::add(&mut transaction, &event).await?;
        super::commit(transaction).await?;
        Ok(true)
    }

    /// Records that the node may forget the job. Nobody sends its specification any more.
    pub(crate) async fn acknowledge_job(&self, id: JobId) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        sqlx::query("update jobs set acknowledged = true where job_id = $1")
            .bind(id.as_uuid())
            .execute(&mut *transaction)
            .await?;
        delete_spec(&mut transaction, id).await?;
        super::commit(transaction).await
    }

    /// The specification of a job that has not been acknowledged.
    pub(crate) async fn job_spec(&self, id: JobId) -> Result<Option<Box<JobSpec>>, Error> {
        let spec: Option<String> =
            sqlx::query_scalar("select spec from job_specs where job_id = $1")
                .bind(id.as_uuid())
                .fetch_optional(&self.pool)
                .await?;
        let parse = |spec: String| {
            JobSpec::parse(spec.as_bytes())
                .map(Box::new)
                .map_err(|violations| {
                    tracing::error!(job_id = %id, %violations, "A stored specification is not valid.");
                    Error::undecodable()
                })
        };
        spec.map(parse).transpose()
    }

    /// Stores the result that a node reports for an abandoned job, without its output when
    /// that exceeds a quota.
    pub(crate) async fn insert_late_result(
        &self,
        id: JobId,
        result: &Job,
        blobs: ReportBlobs<'_>,
    ) -> Result<(), Error> {
        // Only the streams in the object are kept of the output.
        let (mut result, mut kept) = (result.clone(), Some(blobs));
        let mut stored = self.try_insert_late_result(id, &result, kept).await;
        for omitted in [Omitted::Streams, Omitted::Result] {
            let Err(Error::Quota(quota)) = &stored else {
                break;
            };
            omitted.leave_out(&mut result, kept.as_mut(), &quota.to_string());
            stored = self.try_insert_late_result(id, &result, kept).await;
        }
        discard_unplaced(Some(blobs), kept, matches!(stored, Ok(true))).await;
        stored.map(drop)
    }

    async fn try_insert_late_result(
        &self,
        id: JobId,
        result: &Job,
        blobs: Option<ReportBlobs<'_>>,
    ) -> Result<bool, Error> {
        let kept = blobs
            .map_or(0, |blobs| blobs.bytes())
            .saturating_add(stream_bytes(&result.output));
        let mut transaction = self.begin().await?;
        if blobs.is_some_and(|blobs| blobs.bytes() > 0) {
            super::artifacts::lock_blobs_shared(&mut transaction).await?;
        }
        let task = sqlx::query_scalar::<_, Uuid>(
            "update jobs set late_result = $2, late_result_sha256 = $4, output_bytes = output_bytes + $3
             where job_id = $1 and late_result is null returning task_id",
        )
        .bind(id.as_uuid())
        .bind(to_json(result))
        .bind(kept)
        .bind(blobs.and_then(|blobs| blobs.result).map(|blob| blob.sha256.clone()))
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(task) = task else { return Ok(false) };
        if kept > 0 {
            check_bytes(&mut transaction, TaskId::from_uuid(task)).await?;
        }
        if let Some(blobs) = blobs {
            blobs.place().await?;
        }
        super::commit(transaction).await?;
        Ok(true)
    }
}

/// Discards the blobs that were left out, or all of them if the report was not stored.
async fn discard_unplaced(
    all: Option<ReportBlobs<'_>>,
    kept: Option<ReportBlobs<'_>>,
    is_stored: bool,
) {
    let (Some(all), Some(kept)) = (all, kept) else {
        return;
    };
    let kept = if is_stored {
        kept
    } else {
        kept.without_blobs()
    };
    all.discard_except(&kept).await;
}

async fn delete_spec(connection: &mut PgConnection, id: JobId) -> Result<(), Error> {
    sqlx::query("delete from job_specs where job_id = $1")
        .bind(id.as_uuid())
        .execute(connection)
        .await
        .map(drop)
        .map_err(Error::from)
}

//! The list of artifacts; their bytes are in the blob store.

use cynode_api::{
    Artifact, ArtifactId, ErrorCode, Flags, NodeId, Page, TaskId, UserId, WorkspaceRef,
};
use cynode_service::ApiError;
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, PageReader, problem, quotas};
use crate::blobs::{Blobs, Staged};

/// Held shared by who puts bytes in their place until it is written down who needs them, and alone by who removes bytes that
/// nobody needs.
const BLOBS_LOCK: i64 = 0x6379_6e6f_6465_0001;

/// Until the transaction ends, nobody removes bytes. Comes before any lock of a quota.
pub(super) async fn hold_blobs(connection: &mut PgConnection) -> Result<(), ApiError> {
    sqlx::query("select pg_advisory_xact_lock_shared($1)")
        .bind(BLOBS_LOCK)
        .execute(connection)
        .await
        .map(drop)
        .map_err(problem)
}

fn artifact(row: &PgRow) -> Result<Artifact, sqlx::Error> {
    Ok(Artifact {
        id: ArtifactId::from_uuid(row.try_get("id")?),
        task_id: TaskId::from_uuid(row.try_get("task_id")?),
        path: row.try_get("path")?,
        version: row.try_get("version")?,
        sha256: row.try_get("sha256")?,
        size: row.try_get("size")?,
        media_type: row.try_get("media_type")?,
        created_by: row.try_get("created_by")?,
        created_at: row.try_get("created_at")?,
        flags: row
            .try_get::<Option<sqlx::types::Json<Flags>>, _>("flagged")?
            .map(|flags| flags.0)
            .unwrap_or_default(),
    })
}

/// An artifact whose bytes were taken in.
#[derive(Clone, Debug)]
pub(crate) struct NewArtifact<'a> {
    pub(crate) task_id: TaskId,
    pub(crate) path: &'a str,
    pub(crate) staged: &'a Staged,
    pub(crate) media_type: &'a str,
    pub(crate) created_by: &'a str,
    pub(crate) flags: &'a Flags,
}

impl Db {
    /// The next version of its path, with its bytes put in their place. Two at once become two versions.
    pub(crate) async fn insert_artifact(
        &self,
        new: &NewArtifact<'_>,
        blobs: &Blobs,
    ) -> Result<Artifact, ApiError> {
        let made = self.try_insert_artifact(new, blobs).await;
        if made.is_err() {
            blobs.discard(new.staged).await;
        }
        made
    }

    async fn try_insert_artifact(
        &self,
        new: &NewArtifact<'_>,
        blobs: &Blobs,
    ) -> Result<Artifact, ApiError> {
        let mut transaction = self.begin().await?;
        hold_blobs(&mut transaction).await?;
        // One at a time for each task: the number is the last one's successor.
        sqlx::query("select from tasks where id = $1 for update")
            .bind(new.task_id.as_uuid())
            .execute(&mut *transaction)
            .await
            .map_err(problem)?;
        let row = sqlx::query(
            "insert into artifacts (id, task_id, path, version, sha256, size, media_type, created_by, flagged)
             select $1, $2, $3, coalesce(max(version), 0) + 1, $4, $5, $6, $7, $8 from artifacts where task_id = $2 and path = $3 returning *",
        )
        .bind(Uuid::now_v7())
        .bind(new.task_id.as_uuid())
        .bind(new.path)
        .bind(&new.staged.sha256)
        .bind(i64::try_from(new.staged.size).unwrap_or(i64::MAX))
        .bind(new.media_type)
        .bind(new.created_by)
        .bind((!new.flags.is_empty()).then_some(sqlx::types::Json(new.flags)))
        .fetch_one(&mut *transaction)
        .await
        .map_err(problem)?;
        let made = artifact(&row).map_err(problem)?;
        let owner: Uuid = sqlx::query_scalar("select owner_id from tasks where id = $1")
            .bind(new.task_id.as_uuid())
            .fetch_one(&mut *transaction)
            .await
            .map_err(problem)?;
        quotas::check(
            &mut transaction,
            UserId::from_uuid(owner),
            new.task_id,
            quotas::Uses::Bytes,
        )
        .await?;
        // Only what is kept takes up room in the store.
        blobs.place(new.staged).await?;
        super::commit(transaction).await?;
        Ok(made)
    }

    pub(crate) async fn artifact(&self, id: ArtifactId) -> Result<Artifact, ApiError> {
        let row = sqlx::query("select * from artifacts where id = $1")
            .bind(id.as_uuid())
            .fetch_optional(&self.pool)
            .await
            .map_err(problem)?;
        row.as_ref()
            .map(artifact)
            .transpose()
            .map_err(problem)?
            .ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("there is no artifact {id}")))
    }

    /// A path's version, the newest when none is named.
    pub(crate) async fn artifact_at(
        &self,
        task_id: TaskId,
        path: &str,
        version: Option<i64>,
    ) -> Result<Artifact, ApiError> {
        let row =
            sqlx::query("select * from artifacts where task_id = $1 and path = $2 and ($3::bigint is null or version = $3) order by version desc limit 1")
                .bind(task_id.as_uuid())
                .bind(path)
                .bind(version)
                .fetch_optional(&self.pool)
                .await
                .map_err(problem)?;
        row.as_ref()
            .map(artifact)
            .transpose()
            .map_err(problem)?
            .ok_or_else(|| {
                ApiError::new(
                    ErrorCode::NotFound,
                    format!("the task has no artifact '{path}'"),
                )
            })
    }

    pub(crate) async fn list_artifacts(
        &self,
        task_id: TaskId,
        after: Option<Uuid>,
        limit: u32,
    ) -> Result<Page<Artifact>, ApiError> {
        let mut pages = PageReader::new(limit, after);
        while let Some(count) = pages.wanted().await {
            let rows = sqlx::query("select * from artifacts where task_id = $1 and ($2::uuid is null or id > $2) order by id limit $3")
                .bind(task_id.as_uuid())
                .bind(pages.after())
                .bind(count)
                .fetch_all(&self.pool)
                .await
                .map_err(problem)?;
            pages.add(
                rows.iter()
                    .map(artifact)
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(problem)?,
                |artifact| *artifact.id.as_uuid(),
            );
        }
        Ok(pages.finish())
    }

    /// Whether a node was given work that begins with an artifact and has not ended.
    pub(crate) async fn needs_artifact(
        &self,
        node_id: NodeId,
        id: ArtifactId,
    ) -> Result<bool, ApiError> {
        sqlx::query_scalar(
            "select exists (select from sessions where node_id = $1 and state in ('creating', 'ending') and request->>'workspace_ref' = $2)
                 or exists (select from jobs where node_id = $1 and state in ('accepted', 'in_progress') and request->'sandbox'->>'workspace_ref' = $2)",
        )
        .bind(node_id.as_uuid())
        .bind(WorkspaceRef::Artifact(id).to_string())
        .fetch_one(&self.pool)
        .await
        .map_err(problem)
    }

    /// Forgets artifacts that are older than so many days, some at a time. The newest version of a path stays while its task is
    /// open. Says how many.
    pub(crate) async fn expire_artifacts(&self, days: u32) -> Result<u64, ApiError> {
        let gone = sqlx::query(
            "delete from artifacts where id in (select a.id from artifacts a join tasks t on t.id = a.task_id
                 where a.created_at < now() - make_interval(days => $1)
                   and (t.status in ('done', 'failed', 'canceled')
                        or exists (select from artifacts newer where newer.task_id = a.task_id and newer.path = a.path and newer.version > a.version))
                 limit 1000)",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX))
        .execute(&self.pool)
        .await
        .map_err(problem)?;
        Ok(gone.rows_affected())
    }

    /// Forgets the whole output of jobs that ended so many days ago, some at a time; what their objects hold stays, and counts in
    /// no quota any more.
    pub(crate) async fn expire_outputs(&self, days: u32) -> Result<u64, ApiError> {
        let gone = sqlx::query(
            "update jobs set output_sha256 = null, output_bytes = 0 where job_id in (
                 select job_id from jobs where (output_sha256 is not null or output_bytes > 0) and acknowledged
                     and updated_at < now() - make_interval(days => $1) limit 1000)",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX))
        .execute(&self.pool)
        .await
        .map_err(problem)?;
        Ok(gone.rows_affected())
    }

    /// Looks up how large the kept output of jobs is of which nobody wrote it down.
    pub(crate) async fn measure_outputs(&self, blobs: &Blobs) -> Result<(), ApiError> {
        let mut last = Uuid::nil();
        loop {
            let rows: Vec<(Uuid, String)> = sqlx::query_as(
                "select job_id, output_sha256 from jobs where output_sha256 is not null and output_bytes = 0 and job_id > $1 order by job_id limit 100",
            )
            .bind(last)
            .fetch_all(&self.pool)
            .await
            .map_err(problem)?;
            let Some((newest, _)) = rows.last() else {
                return Ok(());
            };
            last = *newest;
            for (id, sha256) in &rows {
                let Some(size) = blobs.size(sha256).await? else {
                    continue;
                };
                let measured = sqlx::query(
                    "update jobs set output_bytes = $3 + coalesce(octet_length(object ->> 'stdout'), 0) + coalesce(octet_length(object ->> 'stderr'), 0)
                     where job_id = $1 and output_sha256 = $2 and output_bytes = 0",
                );
                let size = i64::try_from(size).unwrap_or(i64::MAX / 2);
                measured
                    .bind(id)
                    .bind(sha256)
                    .bind(size)
                    .execute(&self.pool)
                    .await
                    .map_err(problem)?;
            }
        }
    }

    /// Removes those of some bytes that nobody needs. While this looks and removes, nobody puts bytes in their place.
    pub(crate) async fn remove_unneeded(
        &self,
        blobs: &Blobs,
        hashes: &[String],
    ) -> Result<usize, ApiError> {
        let mut transaction = self.begin().await?;
        sqlx::query("select pg_advisory_xact_lock($1)")
            .bind(BLOBS_LOCK)
            .execute(&mut *transaction)
            .await
            .map_err(problem)?;
        let unneeded: Vec<String> = sqlx::query_scalar(
            "select hash from unnest($1::text[]) as hash
             where not exists (select from artifacts where sha256 = hash) and not exists (select from jobs where output_sha256 = hash)",
        )
        .bind(hashes)
        .fetch_all(&mut *transaction)
        .await
        .map_err(problem)?;
        for hash in &unneeded {
            // Still ours alone? A database that went away has let go of the lock.
            sqlx::query("select")
                .execute(&mut *transaction)
                .await
                .map_err(problem)?;
            blobs.remove(hash).await?;
        }
        super::commit(transaction).await?;
        Ok(unneeded.len())
    }
}

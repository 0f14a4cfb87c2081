//! Artifact metadata; the bytes are in the blob store.

use cynode_api::{
    Artifact, ArtifactId, Flags, NodeId, Page, SessionId, TaskId, UserId, WorkspaceRef,
};
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error, Missing, PageRequest, Statement, quotas};
use crate::blobs::{Blobs, StagedBlob};

/// Held shared while a blob is placed until the row that references it is committed, and
/// exclusively while unreferenced blobs are removed.
const BLOBS_LOCK: i64 = 0x6379_6e6f_6465_0001;

/// Prevents the removal of blobs until the transaction ends. Must precede any quota lock.
pub(super) async fn lock_blobs_shared(connection: &mut PgConnection) -> Result<(), Error> {
    sqlx::query("select pg_advisory_xact_lock_shared($1)")
        .bind(BLOBS_LOCK)
        .execute(connection)
        .await
        .map(drop)
        .map_err(Error::from)
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
        session_id: row
            .try_get::<Option<Uuid>, _>("session_id")?
            .map(SessionId::from_uuid),
        base_commit: row.try_get("base_commit")?,
    })
}

/// An artifact whose bytes are staged.
#[derive(Clone, Debug)]
pub(crate) struct NewArtifact<'a> {
    pub(crate) task_id: TaskId,
    pub(crate) path: &'a str,
    pub(crate) staged: &'a StagedBlob,
    pub(crate) media_type: &'a str,
    pub(crate) created_by: &'a str,
    pub(crate) flags: &'a Flags,
    pub(crate) source: Option<ExportSource<'a>>,
}

/// The session that an artifact was exported from, and the commit that it was exported against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExportSource<'a> {
    pub(crate) session_id: SessionId,
    pub(crate) base_commit: Option<&'a str>,
}

/// An artifact whose bytes are in the store already.
#[derive(Clone, Debug)]
pub(crate) struct StoredArtifact<'a> {
    pub(crate) task_id: TaskId,
    pub(crate) path: &'a str,
    pub(crate) sha256: &'a str,
    pub(crate) size: i64,
    pub(crate) media_type: &'a str,
    pub(crate) created_by: &'a str,
    pub(crate) flags: &'a Flags,
}

fn with_content(task_id: TaskId, path: &str, sha256: &str) -> Statement {
    sqlx::query("select * from artifacts where task_id = $1 and path = $2 and sha256 = $3 order by version desc limit 1")
        .bind(*task_id.as_uuid())
        .bind(path.to_owned())
        .bind(sha256.to_owned())
}

impl Db {
    /// Adds the next version of a path and places its bytes. Concurrent inserts become separate
    /// versions.
    pub(crate) async fn insert_artifact(
        &self,
        new: &NewArtifact<'_>,
        blobs: &Blobs,
    ) -> Result<Artifact, Error> {
        let made = self.try_insert_artifact(new, blobs, false).await;
        if made.is_err() {
            blobs.discard(new.staged).await;
        }
        made
    }

    /// Adds a version of a path unless one has the same content. Repeating it changes nothing.
    pub(crate) async fn ensure_artifact(
        &self,
        new: &NewArtifact<'_>,
        blobs: &Blobs,
    ) -> Result<Artifact, Error> {
        let ensured = self.try_insert_artifact(new, blobs, true).await;
        // Harmless after the bytes were placed.
        blobs.discard(new.staged).await;
        ensured
    }

    /// The newest version of a path with this content.
    pub(crate) async fn artifact_with(
        &self,
        task_id: TaskId,
        path: &str,
        sha256: &str,
    ) -> Result<Option<Artifact>, Error> {
        let row = with_content(task_id, path, sha256)
            .fetch_optional(&self.pool)
            .await?;
        Ok(row.as_ref().map(artifact).transpose()?)
    }

    async fn try_insert_artifact(
        &self,
        new: &NewArtifact<'_>,
        blobs: &Blobs,
        reuses_content: bool,
    ) -> Result<Artifact, Error> {
        let mut transaction = self.begin().await?;
        lock_blobs_shared(&mut transaction).await?;
        // Serialized per task: the version is the successor of the newest one.
        sqlx::query("select from tasks where id = $1 for update")
            .bind(new.task_id.as_uuid())
            .execute(&mut *transaction)
            .await?;
        if reuses_content {
            let row = with_content(new.task_id, new.path, &new.staged.sha256)
                .fetch_optional(&mut *transaction)
                .await?;
            if let Some(row) = row {
                return Ok(artifact(&row)?);
            }
        }
        let row = sqlx::query(
            "insert into artifacts (id, task_id, path, version, sha256, size, media_type, created_by, flagged, session_id, base_commit)
             select $1, $2, $3, coalesce(max(version), 0) + 1, $4, $5, $6, $7, $8, $9, $10 from artifacts where task_id = $2 and path = $3 returning *",
        )
        .bind(Uuid::now_v7())
        .bind(new.task_id.as_uuid())
        .bind(new.path)
        .bind(&new.staged.sha256)
        .bind(i64::try_from(new.staged.size).unwrap_or(i64::MAX))
        .bind(new.media_type)
        .bind(new.created_by)
        .bind((!new.flags.is_empty()).then_some(sqlx::types::Json(new.flags)))
        .bind(new.source.map(|source| *source.session_id.as_uuid()))
        .bind(new.source.and_then(|source| source.base_commit))
        .fetch_one(&mut *transaction)
        .await?;
        let made = artifact(&row)?;
        let owner: Uuid = sqlx::query_scalar("select owner_id from tasks where id = $1")
            .bind(new.task_id.as_uuid())
            .fetch_one(&mut *transaction)
            .await?;
        quotas::check(
            &mut transaction,
            UserId::from_uuid(owner),
            new.task_id,
            quotas::Usage::Bytes,
        )
        .await?;
        // Placed last, so that a failed insert leaves no blob.
        blobs.place(new.staged).await?;
        super::commit(transaction).await?;
        Ok(made)
    }

    /// Adds a version of a path whose bytes are in the store, unless one has the same content.
    /// `None` when they are no longer there.
    pub(crate) async fn ensure_stored_artifact(
        &self,
        new: &StoredArtifact<'_>,
        blobs: &Blobs,
    ) -> Result<Option<Artifact>, Error> {
        let mut transaction = self.begin().await?;
        lock_blobs_shared(&mut transaction).await?;
        sqlx::query("select from tasks where id = $1 for update")
            .bind(new.task_id.as_uuid())
            .execute(&mut *transaction)
            .await?;
        let row = with_content(new.task_id, new.path, new.sha256)
            .fetch_optional(&mut *transaction)
            .await?;
        if let Some(row) = row {
            return Ok(Some(artifact(&row)?));
        }
        // No blob is removed while the lock is held.
        if blobs.size(new.sha256).await?.is_none() {
            return Ok(None);
        }
        let row = sqlx::query(
            "insert into artifacts (id, task_id, path, version, sha256, size, media_type, created_by, flagged)
             select $1, $2, $3, coalesce(max(version), 0) + 1, $4, $5, $6, $7, $8 from artifacts where task_id = $2 and path = $3 returning *",
        )
        .bind(Uuid::now_v7())
        .bind(new.task_id.as_uuid())
        .bind(new.path)
        .bind(new.sha256)
        .bind(new.size)
        .bind(new.media_type)
        .bind(new.created_by)
        .bind((!new.flags.is_empty()).then_some(sqlx::types::Json(new.flags)))
        .fetch_one(&mut *transaction)
        .await?;
        let owner: Uuid = sqlx::query_scalar("select owner_id from tasks where id = $1")
            .bind(new.task_id.as_uuid())
            .fetch_one(&mut *transaction)
            .await?;
        quotas::check(
            &mut transaction,
            UserId::from_uuid(owner),
            new.task_id,
            quotas::Usage::Bytes,
        )
        .await?;
        super::commit(transaction).await?;
        Ok(Some(artifact(&row)?))
    }

    pub(crate) async fn artifact(&self, id: ArtifactId) -> Result<Artifact, Error> {
        let row = self
            .row("select * from artifacts where id = $1", id.as_uuid())
            .await?;
        row.as_ref()
            .map(artifact)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Artifact(id)))
    }

    /// A version of a path, by default the newest.
    pub(crate) async fn artifact_at(
        &self,
        task_id: TaskId,
        path: &str,
        version: Option<i64>,
    ) -> Result<Artifact, Error> {
        let row =
            sqlx::query("select * from artifacts where task_id = $1 and path = $2 and ($3::bigint is null or version = $3) order by version desc limit 1")
                .bind(task_id.as_uuid())
                .bind(path)
                .bind(version)
                .fetch_optional(&self.pool)
                .await?;
        row.as_ref()
            .map(artifact)
            .transpose()?
            .ok_or_else(|| Error::NotFound(Missing::ArtifactPath(path.to_owned())))
    }

    pub(crate) async fn list_artifacts(
        &self,
        task_id: TaskId,
        page: &PageRequest,
    ) -> Result<Page<Artifact>, Error> {
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                ["select * from artifacts where task_id = $1"],
                "id",
                "$2",
                "$3",
                "$4"
            ))
            .bind(task_id.as_uuid())
            .bind(after)
            .bind(page.id_part.clone())
            .bind(count)
        };
        self.read_page_of(page, query, artifact, |artifact| *artifact.id.as_uuid())
            .await
    }

    /// Whether unfinished work of a node starts from an artifact.
    pub(crate) async fn needs_artifact(
        &self,
        node_id: NodeId,
        id: ArtifactId,
    ) -> Result<bool, Error> {
        sqlx::query_scalar(
            "select exists (select from sessions where node_id = $1 and state in ('creating', 'ending') and request->>'workspace_ref' = $2)
                 or exists (select from jobs where node_id = $1 and state in ('accepted', 'in_progress') and request->'sandbox'->>'workspace_ref' = $2)",
        )
        .bind(node_id.as_uuid())
        .bind(WorkspaceRef::Artifact(id).to_string())
        .fetch_one(&self.pool)
        .await
        .map_err(Error::from)
    }

    /// Deletes a batch of artifacts that are older than `days`. The newest version of a path stays
    /// while its task is open. Returns their number.
    pub(crate) async fn expire_artifacts(&self, days: u32) -> Result<u64, Error> {
        let gone = sqlx::query(
            "delete from artifacts where id in (select a.id from artifacts a join tasks t on t.id = a.task_id
                 where a.created_at < now() - make_interval(days => $1)
                   and (t.status in ('done', 'failed', 'canceled')
                        or exists (select from artifacts newer where newer.task_id = a.task_id and newer.path = a.path and newer.version > a.version))
                 limit 1000)",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX))
        .execute(&self.pool)
        .await?;
        Ok(gone.rows_affected())
    }

    /// Drops the collected output and the results of a batch of jobs that ended more than `days`
    /// ago. The streams in their objects stay and no longer count towards quotas.
    pub(crate) async fn expire_outputs(&self, days: u32) -> Result<u64, Error> {
        let gone = sqlx::query(
            "update jobs set output_sha256 = null, result_sha256 = null, late_result_sha256 = null, output_bytes = 0 where job_id in (
                 select job_id from jobs
                 where (output_sha256 is not null or result_sha256 is not null or late_result_sha256 is not null or output_bytes > 0) and acknowledged
                     and updated_at < now() - make_interval(days => $1) limit 1000)",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX))
        .execute(&self.pool)
        .await?;
        Ok(gone.rows_affected())
    }

    /// Backfills the output size of jobs for which it was not recorded.
    pub(crate) async fn backfill_output_sizes(&self, blobs: &Blobs) -> Result<(), Error> {
        let mut last = Uuid::nil();
        loop {
            let rows: Vec<(Uuid, String)> = sqlx::query_as(
                "select job_id, output_sha256 from jobs where output_sha256 is not null and output_bytes = 0 and job_id > $1 order by job_id limit 100",
            )
            .bind(last)
            .fetch_all(&self.pool)
            .await?;
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
                    .await?;
            }
        }
    }

    /// Removes the blobs among `hashes` that nothing references. No blob can be placed meanwhile.
    pub(crate) async fn remove_unreferenced(
        &self,
        blobs: &Blobs,
        hashes: &[String],
    ) -> Result<usize, Error> {
        let mut transaction = self.begin().await?;
        sqlx::query("select pg_advisory_xact_lock($1)")
            .bind(BLOBS_LOCK)
            .execute(&mut *transaction)
            .await?;
        let unneeded: Vec<String> = sqlx::query_scalar(
            "select hash from unnest($1::text[]) as hash
             where not exists (select from artifacts where sha256 = hash) and not exists (select from jobs where output_sha256 = hash)
               and not exists (select from jobs where result_sha256 = hash) and not exists (select from jobs where late_result_sha256 = hash)
               and not exists (select from git_seeds where sha256 = hash)",
        )
        .bind(hashes)
        .fetch_all(&mut *transaction)
        .await?;
        for hash in &unneeded {
            // Check that the lock still holds: a lost database connection has released it.
            sqlx::query("select").execute(&mut *transaction).await?;
            blobs.remove(hash).await?;
        }
        super::commit(transaction).await?;
        Ok(unneeded.len())
    }
}

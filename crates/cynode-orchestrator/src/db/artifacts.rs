//! The list of artifacts; their bytes are in the blob store.

use cynode_api::{Artifact, ArtifactId, ErrorCode, Page, TaskId};
use cynode_service::ApiError;
use sqlx::{Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, page, problem};

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
    })
}

/// An artifact whose bytes are stored already.
#[derive(Clone, Debug)]
pub(crate) struct NewArtifact<'a> {
    pub(crate) task_id: TaskId,
    pub(crate) path: &'a str,
    pub(crate) sha256: &'a str,
    pub(crate) size: u64,
    pub(crate) media_type: &'a str,
    pub(crate) created_by: &'a str,
}

impl Db {
    /// The next version of its path. Two at once become two versions.
    pub(crate) async fn insert_artifact(&self, new: &NewArtifact<'_>) -> Result<Artifact, ApiError> {
        let mut transaction = self.begin().await?;
        // One at a time for each task: the number is the last one's successor.
        sqlx::query("select from tasks where id = $1 for update").bind(new.task_id.as_uuid()).execute(&mut *transaction).await.map_err(problem)?;
        let row = sqlx::query(
            "insert into artifacts (id, task_id, path, version, sha256, size, media_type, created_by)
             select $1, $2, $3, coalesce(max(version), 0) + 1, $4, $5, $6, $7 from artifacts where task_id = $2 and path = $3 returning *",
        )
        .bind(Uuid::now_v7())
        .bind(new.task_id.as_uuid())
        .bind(new.path)
        .bind(new.sha256)
        .bind(i64::try_from(new.size).unwrap_or(i64::MAX))
        .bind(new.media_type)
        .bind(new.created_by)
        .fetch_one(&mut *transaction)
        .await
        .map_err(problem)?;
        let made = artifact(&row).map_err(problem)?;
        super::commit(transaction).await?;
        Ok(made)
    }

    pub(crate) async fn artifact(&self, id: ArtifactId) -> Result<Artifact, ApiError> {
        let row = sqlx::query("select * from artifacts where id = $1").bind(id.as_uuid()).fetch_optional(&self.pool).await.map_err(problem)?;
        row.as_ref().map(artifact).transpose().map_err(problem)?.ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("there is no artifact {id}")))
    }

    /// A path's version, the newest when none is named.
    pub(crate) async fn artifact_at(&self, task_id: TaskId, path: &str, version: Option<i64>) -> Result<Artifact, ApiError> {
        let row =
            sqlx::query("select * from artifacts where task_id = $1 and path = $2 and ($3::bigint is null or version = $3) order by version desc limit 1")
                .bind(task_id.as_uuid())
                .bind(path)
                .bind(version)
                .fetch_optional(&self.pool)
                .await
                .map_err(problem)?;
        row.as_ref().map(artifact).transpose().map_err(problem)?.ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("the task has no artifact '{path}'")))
    }

    pub(crate) async fn list_artifacts(&self, task_id: TaskId, after: Option<Uuid>, limit: u32) -> Result<Page<Artifact>, ApiError> {
        let rows = sqlx::query("select * from artifacts where task_id = $1 and ($2::uuid is null or id > $2) order by id limit $3")
            .bind(task_id.as_uuid())
            .bind(after)
            .bind(i64::from(limit) + 1)
            .fetch_all(&self.pool)
            .await
            .map_err(problem)?;
        let items = rows.iter().map(artifact).collect::<Result<Vec<_>, _>>().map_err(problem)?;
        Ok(page(items, limit, |artifact| artifact.id.to_string()))
    }
}

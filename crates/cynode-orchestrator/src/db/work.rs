//! Projects and tasks.

use cynode_api::{Page, Project, ProjectId, ProjectPatch, Task, TaskId, TaskPatch, TaskStatus};
use serde_json::Value;
use sqlx::{PgExecutor, Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error, Missing, PageRequest, to_json};
use crate::caller::{Scope, TokenScope};

fn project(row: &PgRow) -> Result<Project, sqlx::Error> {
    Ok(Project {
        id: ProjectId::from_uuid(row.try_get("id")?),
        name: row.try_get("name")?,
        slug: row.try_get("slug")?,
        scope: row.try_get("scope")?,
        metadata: object(row.try_get("metadata")?),
        created_by: row.try_get("created_by")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}

fn task(row: &PgRow) -> Result<Task, sqlx::Error> {
    let list = |name: &str| -> Result<Vec<String>, sqlx::Error> {
        serde_json::from_value(row.try_get(name)?)
            .map_err(|error| sqlx::Error::Decode(error.into()))
    };
    Ok(Task {
        id: TaskId::from_uuid(row.try_get("id")?),
        project_id: row
            .try_get::<Option<Uuid>, _>("project_id")?
            .map(ProjectId::from_uuid),
        name: row.try_get("name")?,
        description: row.try_get("description")?,
        requirements: list("requirements")?,
        acceptance_criteria: list("acceptance_criteria")?,
        status: row
            .try_get::<String, _>("status")?
            .parse::<TaskStatus>()
            .map_err(|error| sqlx::Error::Decode(error.into()))?,
        profile: row.try_get("profile")?,
        metadata: object(row.try_get("metadata")?),
        created_by: row.try_get("created_by")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}

fn object(value: Value) -> serde_json::Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => serde_json::Map::new(),
    }
}

impl Db {
    pub(crate) async fn insert_project(
        &self,
        new: &Project,
        scope: &Scope,
    ) -> Result<Project, Error> {
        let row = sqlx::query("insert into projects (id, name, slug, scope, metadata, owner_id, created_by) values ($1, $2, $3, $4, $5, $6, $7) returning *")
            .bind(new.id.as_uuid())
            .bind(&new.name)
            .bind(&new.slug)
            .bind(&new.scope)
            .bind(to_json(&new.metadata))
            .bind(scope.user_id.as_uuid())
            .bind(&new.created_by)
            .fetch_one(&self.pool)
            .await?;
        project(&row).map_err(Error::from)
    }

    pub(crate) async fn project(&self, scope: &Scope, id: ProjectId) -> Result<Project, Error> {
        let row = self
            .visible_row(
                "select * from projects where id = $1 and ($2 or owner_id = $3)",
                id.as_uuid(),
                scope,
            )
            .await?;
        row.as_ref()
            .map(project)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Project(id)))
    }

    pub(crate) async fn list_projects(
        &self,
        scope: &Scope,
        token_scope: &TokenScope,
        page: &PageRequest,
    ) -> Result<Page<Project>, Error> {
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select * from projects where ($1 or owner_id = $2) and ($5 or id = $6)
                       and ($8::text is null or name = $8 or slug = $8)"
                ],
                "id",
                "$3",
                "$7",
                "$4"
            ))
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(after)
            .bind(count)
            .bind(token_scope.all)
            .bind(token_scope.project)
            .bind(page.id_part.clone())
            .bind(page.name.clone())
        };
        self.read_page_of(page, query, project, |project| *project.id.as_uuid())
            .await
    }

    pub(crate) async fn patch_project(
        &self,
        scope: &Scope,
        id: ProjectId,
        patch: &ProjectPatch,
    ) -> Result<Project, Error> {
        let row = sqlx::query(
            "update projects set name = coalesce($4, name), scope = coalesce($5, scope), metadata = coalesce($6, metadata), updated_at = now()
             where id = $1 and ($2 or owner_id = $3) returning *",
        )
        .bind(id.as_uuid())
        .bind(scope.sees_all)
        .bind(scope.user_id.as_uuid())
        .bind(&patch.name)
        .bind(&patch.scope)
        .bind(patch.metadata.as_ref().map(to_json))
        .fetch_optional(&self.pool)
        .await?;
        row.as_ref()
            .map(project)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Project(id)))
    }

    pub(crate) async fn insert_task(&self, new: &Task, scope: &Scope) -> Result<Task, Error> {
        insert_task(&self.pool, new, scope).await
    }

    /// The task, if it is the caller's or belongs to a project of the caller.
    pub(crate) async fn task(&self, scope: &Scope, id: TaskId) -> Result<Task, Error> {
        let row = self
            .visible_row(
                concat!("select * from tasks t where id = $1 and ", visible!("t")),
                id.as_uuid(),
                scope,
            )
            .await?;
        row.as_ref()
            .map(task)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Task(id)))
    }

    pub(crate) async fn list_tasks(
        &self,
        scope: &Scope,
        token_scope: &TokenScope,
        in_project: Option<ProjectId>,
        page: &PageRequest,
    ) -> Result<Page<Task>, Error> {
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select * from tasks t where ",
                    visible!("t"),
                    " and ($4::uuid is null or t.project_id = $4) and ($6 or t.project_id = $7 or t.id = any($8))
                      and ($10::text is null or t.name = $10)"
                ],
                "t.id",
                "$1",
                "$9",
                "$5"
            ))
            .bind(after)
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(in_project.map(|id| *id.as_uuid()))
            .bind(count)
            .bind(token_scope.all)
            .bind(token_scope.project)
            .bind(&token_scope.tasks)
            .bind(page.id_part.clone())
            .bind(page.name.clone())
        };
        self.read_page_of(page, query, task, |task| *task.id.as_uuid())
            .await
    }

    pub(crate) async fn patch_task(
        &self,
        scope: &Scope,
        id: TaskId,
        patch: &TaskPatch,
    ) -> Result<Task, Error> {
        let row = sqlx::query(concat!(
            "update tasks t set name = coalesce($4, name), description = coalesce($5, description), requirements = coalesce($6, requirements),
                 acceptance_criteria = coalesce($7, acceptance_criteria), status = coalesce($8, status), profile = coalesce($9, profile),
                 metadata = coalesce($10, metadata), updated_at = now()
             where id = $1 and ",
            visible!("t"),
            " returning *"
        ))
        .bind(id.as_uuid())
        .bind(scope.sees_all)
        .bind(scope.user_id.as_uuid())
        .bind(&patch.name)
        .bind(&patch.description)
        .bind(patch.requirements.as_ref().map(to_json))
        .bind(patch.acceptance_criteria.as_ref().map(to_json))
        .bind(patch.status.map(TaskStatus::as_str))
        .bind(&patch.profile)
        .bind(patch.metadata.as_ref().map(to_json))
        .fetch_optional(&self.pool)
        .await?;
        row.as_ref()
            .map(task)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Task(id)))
    }
}

pub(super) async fn insert_task(
    executor: impl PgExecutor<'_>,
    new: &Task,
    scope: &Scope,
) -> Result<Task, Error> {
    let row = sqlx::query(
        "insert into tasks (id, project_id, name, description, requirements, acceptance_criteria, status, profile, metadata, owner_id, created_by)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) returning *",
    )
    .bind(new.id.as_uuid())
    .bind(new.project_id.map(|id| *id.as_uuid()))
    .bind(&new.name)
    .bind(&new.description)
    .bind(to_json(&new.requirements))
    .bind(to_json(&new.acceptance_criteria))
    .bind(new.status.as_str())
    .bind(&new.profile)
    .bind(to_json(&new.metadata))
    .bind(scope.user_id.as_uuid())
    .bind(&new.created_by)
    .fetch_one(executor)
    .await?;
    task(&row).map_err(Error::from)
}

//! System settings and preferences.

use cynode_api::{
    ErrorCode, Page, Preference, PreferenceScope, ProjectId, SECRET_SHAPES, Setting, TaskId, UserId,
};
use cynode_service::ApiError;
use serde_json::Value;
use sqlx::{Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, PageReader, problem};

fn setting(row: &PgRow) -> Result<Setting, sqlx::Error> {
    Ok(Setting {
        key: row.try_get("key")?,
        value: row.try_get("value")?,
        revision: row.try_get("revision")?,
        updated_at: row.try_get("updated_at")?,
        updated_by: row.try_get("updated_by")?,
    })
}

fn preference(row: &PgRow) -> Result<Preference, sqlx::Error> {
    Ok(Preference {
        scope: row
            .try_get::<String, _>("scope")?
            .parse::<PreferenceScope>()
            .map_err(|error| sqlx::Error::Decode(error.into()))?,
        scope_id: row.try_get("scope_id")?,
        key: row.try_get("key")?,
        value: row.try_get("value")?,
        revision: row.try_get("revision")?,
        updated_at: row.try_get("updated_at")?,
        updated_by: row.try_get("updated_by")?,
    })
}

fn changed_meanwhile(key: &str) -> ApiError {
    ApiError::new(
        ErrorCode::PreconditionFailed,
        format!("{key}: its revision is another one"),
    )
}

/// Whose preferences count for somebody, from the narrowest to the widest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Of {
    pub(crate) task: Option<TaskId>,
    pub(crate) project: Option<ProjectId>,
    pub(crate) user: Option<UserId>,
}

impl Db {
    pub(crate) async fn list_settings(
        &self,
        after: Option<String>,
        limit: u32,
    ) -> Result<Page<Setting>, ApiError> {
        let mut pages = PageReader::new(limit, after);
        while let Some(count) = pages.wanted().await {
            let rows = sqlx::query("select * from system_settings where ($1::text is null or key > $1) order by key limit $2")
                .bind(pages.after())
                .bind(count)
                .fetch_all(&self.pool)
                .await
                .map_err(problem)?;
            pages.add(
                rows.iter()
                    .map(setting)
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(problem)?,
                |setting| setting.key.clone(),
            );
        }
        Ok(pages.finish())
    }

    pub(crate) async fn setting(&self, key: &str) -> Result<Option<Setting>, ApiError> {
        let row = sqlx::query("select * from system_settings where key = $1")
            .bind(key)
            .fetch_optional(&self.pool)
            .await
            .map_err(problem)?;
        row.as_ref().map(setting).transpose().map_err(problem)
    }

    /// Sets a key that has no value yet.
    pub(crate) async fn seed_setting(&self, key: &str, value: &Value) -> Result<(), ApiError> {
        sqlx::query("insert into system_settings (key, value, updated_by) values ($1, $2, 'system') on conflict do nothing")
            .bind(key)
            .bind(value)
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }

    pub(crate) async fn put_setting(
        &self,
        key: &str,
        value: &Value,
        if_revision: Option<i64>,
        by: &str,
    ) -> Result<Setting, ApiError> {
        let row = sqlx::query(
            "insert into system_settings as s (key, value, updated_by) select $1, $2, $3
             where $4::bigint is null or $4 = 0 or exists (select from system_settings where key = $1)
             on conflict (key) do update set value = excluded.value, revision = s.revision + 1, updated_at = now(), updated_by = excluded.updated_by
             where $4::bigint is null or s.revision = $4 returning *",
        )
        .bind(key)
        .bind(value)
        .bind(by)
        .bind(if_revision)
        .fetch_optional(&self.pool)
        .await
        .map_err(problem)?;
        row.as_ref()
            .map(setting)
            .transpose()
            .map_err(problem)?
            .ok_or_else(|| changed_meanwhile(key))
    }

    /// Those of one scope; with `key` the one that has it.
    pub(crate) async fn list_preferences(
        &self,
        scope: PreferenceScope,
        scope_id: Uuid,
        key: Option<&str>,
        after: Option<String>,
        limit: u32,
    ) -> Result<Page<Preference>, ApiError> {
        let mut pages = PageReader::new(limit, after);
        while let Some(count) = pages.wanted().await {
            let rows = sqlx::query(
                "select * from preferences where scope = $1 and scope_id = $2 and ($3::text is null or key > $3) and ($5::text is null or key = $5)
                 order by key limit $4",
            )
            .bind(scope.as_str())
            .bind(scope_id)
            .bind(pages.after())
            .bind(count)
            .bind(key)
            .fetch_all(&self.pool)
            .await
            .map_err(problem)?;
            pages.add(
                rows.iter()
                    .map(preference)
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(problem)?,
                |preference| preference.key.clone(),
            );
        }
        Ok(pages.finish())
    }

    pub(crate) async fn put_preference(
        &self,
        scope: PreferenceScope,
        scope_id: Uuid,
        key: &str,
        value: &Value,
        if_revision: Option<i64>,
        by: &str,
    ) -> Result<Preference, ApiError> {
        let row = sqlx::query(
            "insert into preferences as p (scope, scope_id, key, value, updated_by) select $1, $2, $3, $4, $5
             where $6::bigint is null or $6 = 0 or exists (select from preferences where scope = $1 and scope_id = $2 and key = $3)
             on conflict (scope, scope_id, key) do update
                 set value = excluded.value, revision = p.revision + 1, updated_at = now(), updated_by = excluded.updated_by
             where $6::bigint is null or p.revision = $6 returning *",
        )
        .bind(scope.as_str())
        .bind(scope_id)
        .bind(key)
        .bind(value)
        .bind(by)
        .bind(if_revision)
        .fetch_optional(&self.pool)
        .await
        .map_err(problem)?;
        row.as_ref()
            .map(preference)
            .transpose()
            .map_err(problem)?
            .ok_or_else(|| changed_meanwhile(key))
    }

    /// What each project says about shapes of credentials.
    pub(crate) async fn shape_settings(&self) -> Result<Vec<(ProjectId, Value)>, ApiError> {
        let rows = sqlx::query_as::<_, (Uuid, Value)>(
            "select scope_id, value from preferences where scope = 'project' and key = $1",
        )
        .bind(SECRET_SHAPES)
        .fetch_all(&self.pool)
        .await
        .map_err(problem)?;
        Ok(rows
            .into_iter()
            .map(|(project, value)| (ProjectId::from_uuid(project), value))
            .collect())
    }

    /// Whether any scope that counts for somebody has a key set to true.
    pub(crate) async fn is_preferred(&self, of: Of, key: &str) -> Result<bool, ApiError> {
        sqlx::query_scalar(
            "select exists (select from preferences p where p.key = $4 and p.value = 'true'::jsonb
                 and ((p.scope = 'task' and p.scope_id = $1) or (p.scope = 'project' and p.scope_id = $2) or (p.scope = 'user' and p.scope_id = $3)
                      or (p.scope = 'group' and exists (select from group_members m where m.group_id = p.scope_id and m.user_id = $3)) or p.scope = 'system'))",
        )
        .bind(of.task.map(|id| *id.as_uuid()))
        .bind(of.project.map(|id| *id.as_uuid()))
        .bind(of.user.map(|id| *id.as_uuid()))
        .bind(key)
        .fetch_one(&self.pool)
        .await
        .map_err(problem)
    }

    /// For each key the value of the narrowest scope. Of several groups the first by name counts.
    pub(crate) async fn effective_preferences(
        &self,
        of: Of,
        after: Option<String>,
        limit: u32,
    ) -> Result<Page<Preference>, ApiError> {
        let mut pages = PageReader::new(limit, after);
        while let Some(count) = pages.wanted().await {
            let rows = sqlx::query(
                "select distinct on (p.key) p.* from preferences p
                 left join groups g on p.scope = 'group' and g.id = p.scope_id
                 where ((p.scope = 'task' and p.scope_id = $1) or (p.scope = 'project' and p.scope_id = $2) or (p.scope = 'user' and p.scope_id = $3)
                        or (p.scope = 'group' and exists (select from group_members m where m.group_id = p.scope_id and m.user_id = $3))
                        or p.scope = 'system')
                   and ($4::text is null or p.key > $4)
                 order by p.key, array_position(array['task', 'project', 'user', 'group', 'system'], p.scope), g.name limit $5",
            )
            .bind(of.task.map(|id| *id.as_uuid()))
            .bind(of.project.map(|id| *id.as_uuid()))
            .bind(of.user.map(|id| *id.as_uuid()))
            .bind(pages.after())
            .bind(count)
            .fetch_all(&self.pool)
            .await
            .map_err(problem)?;
            pages.add(
                rows.iter()
                    .map(preference)
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(problem)?,
                |preference| preference.key.clone(),
            );
        }
        Ok(pages.finish())
    }
}

//! System settings and preferences.

use cynode_api::{
    Page, Preference, PreferenceScope, ProjectId, SECRET_SHAPES, Setting, TaskId, UserId,
};
use serde_json::Value;
use sqlx::{Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error};

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

fn stale_revision(key: &str) -> Error {
    Error::StaleRevision {
        key: key.to_owned(),
    }
}

/// The owners whose preferences apply to a caller, narrowest first.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PreferenceContext {
    pub(crate) task: Option<TaskId>,
    pub(crate) project: Option<ProjectId>,
    pub(crate) user: Option<UserId>,
}

impl Db {
    pub(crate) async fn list_settings(
        &self,
        after: Option<String>,
        limit: u32,
    ) -> Result<Page<Setting>, Error> {
        let query = |after: Option<String>, count: i64| {
            sqlx::query("select * from system_settings where ($1::text is null or key > $1) order by key limit $2")
                .bind(after)
                .bind(count)
        };
        self.read_page(limit, after, query, setting, |setting| setting.key.clone())
            .await
    }

    pub(crate) async fn setting(&self, key: &str) -> Result<Option<Setting>, Error> {
        let row = sqlx::query("select * from system_settings where key = $1")
            .bind(key)
            .fetch_optional(&self.pool)
            .await?;
        row.as_ref().map(setting).transpose().map_err(Error::from)
    }

    /// Sets a key unless it has a value.
    pub(crate) async fn seed_setting(&self, key: &str, value: &Value) -> Result<(), Error> {
        sqlx::query("insert into system_settings (key, value, updated_by) values ($1, $2, 'system') on conflict do nothing")
            .bind(key)
            .bind(value)
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    pub(crate) async fn put_setting(
        &self,
        key: &str,
        value: &Value,
        if_revision: Option<i64>,
        by: &str,
    ) -> Result<Setting, Error> {
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
        .await?;
        row.as_ref()
            .map(setting)
            .transpose()?
            .ok_or_else(|| stale_revision(key))
    }

    /// The preferences of one scope; with `key`, only that one.
    pub(crate) async fn list_preferences(
        &self,
        scope: PreferenceScope,
        scope_id: Uuid,
        key: Option<&str>,
        after: Option<String>,
        limit: u32,
    ) -> Result<Page<Preference>, Error> {
        let query = |after: Option<String>, count: i64| {
            sqlx::query(
                "select * from preferences where scope = $1 and scope_id = $2 and ($3::text is null or key > $3) and ($5::text is null or key = $5)
                 order by key limit $4",
            )
            .bind(scope.as_str())
            .bind(scope_id)
            .bind(after)
            .bind(count)
            .bind(key)
        };
        self.read_page(limit, after, query, preference, |preference| {
            preference.key.clone()
        })
        .await
    }

    pub(crate) async fn put_preference(
        &self,
        scope: PreferenceScope,
        scope_id: Uuid,
        key: &str,
        value: &Value,
        if_revision: Option<i64>,
        by: &str,
    ) -> Result<Preference, Error> {
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
        .await?;
        row.as_ref()
            .map(preference)
            .transpose()?
            .ok_or_else(|| stale_revision(key))
    }

    /// Each project's setting for credential shapes.
    pub(crate) async fn shape_settings(&self) -> Result<Vec<(ProjectId, Value)>, Error> {
        let rows = sqlx::query_as::<_, (Uuid, Value)>(
            "select scope_id, value from preferences where scope = 'project' and key = $1",
        )
        .bind(SECRET_SHAPES)
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .map(|(project, value)| (ProjectId::from_uuid(project), value))
            .collect())
    }

    /// Whether any scope that applies sets the key to true.
    pub(crate) async fn is_preferred(
        &self,
        context: PreferenceContext,
        key: &str,
    ) -> Result<bool, Error> {
        sqlx::query_scalar(
            "select exists (select from preferences p where p.key = $4 and p.value = 'true'::jsonb
                 and ((p.scope = 'task' and p.scope_id = $1) or (p.scope = 'project' and p.scope_id = $2) or (p.scope = 'user' and p.scope_id = $3)
                      or (p.scope = 'group' and exists (select from group_members m where m.group_id = p.scope_id and m.user_id = $3)) or p.scope = 'system'))",
        )
        .bind(context.task.map(|id| *id.as_uuid()))
        .bind(context.project.map(|id| *id.as_uuid()))
        .bind(context.user.map(|id| *id.as_uuid()))
        .bind(key)
        .fetch_one(&self.pool)
        .await
        .map_err(Error::from)
    }

    /// The value of a key in the narrowest scope that has it.
    pub(crate) async fn effective_preference(
        &self,
        context: PreferenceContext,
        key: &str,
    ) -> Result<Option<Value>, Error> {
        sqlx::query_scalar(
            "select p.value from preferences p
             left join groups g on p.scope = 'group' and g.id = p.scope_id
             where p.key = $4
               and ((p.scope = 'task' and p.scope_id = $1) or (p.scope = 'project' and p.scope_id = $2) or (p.scope = 'user' and p.scope_id = $3)
                    or (p.scope = 'group' and exists (select from group_members m where m.group_id = p.scope_id and m.user_id = $3))
                    or p.scope = 'system')
             order by array_position(array['task', 'project', 'user', 'group', 'system'], p.scope), g.name limit 1",
        )
        .bind(context.task.map(|id| *id.as_uuid()))
        .bind(context.project.map(|id| *id.as_uuid()))
        .bind(context.user.map(|id| *id.as_uuid()))
        .bind(key)
        .fetch_optional(&self.pool)
        .await
        .map_err(Error::from)
    }

    /// For each key the value of the narrowest scope. Of several groups the first by name wins.
    pub(crate) async fn effective_preferences(
        &self,
        context: PreferenceContext,
        after: Option<String>,
        limit: u32,
    ) -> Result<Page<Preference>, Error> {
        let query = |after: Option<String>, count: i64| {
            sqlx::query(
                "select distinct on (p.key) p.* from preferences p
                 left join groups g on p.scope = 'group' and g.id = p.scope_id
                 where ((p.scope = 'task' and p.scope_id = $1) or (p.scope = 'project' and p.scope_id = $2) or (p.scope = 'user' and p.scope_id = $3)
                        or (p.scope = 'group' and exists (select from group_members m where m.group_id = p.scope_id and m.user_id = $3))
                        or p.scope = 'system')
                   and ($4::text is null or p.key > $4)
                 order by p.key, array_position(array['task', 'project', 'user', 'group', 'system'], p.scope), g.name limit $5",
            )
            .bind(context.task.map(|id| *id.as_uuid()))
            .bind(context.project.map(|id| *id.as_uuid()))
            .bind(context.user.map(|id| *id.as_uuid()))
            .bind(after)
            .bind(count)
        };
        self.read_page(limit, after, query, preference, |preference| {
            preference.key.clone()
        })
        .await
    }
}

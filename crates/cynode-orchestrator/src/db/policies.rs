//! Policies: documents, every version of them, and a number that rises with every change.

use cynode_api::ErrorCode;
use cynode_service::ApiError;
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use time::OffsetDateTime;

use super::{Db, commit, problem};

/// What wakes the orchestrators.
pub(crate) const CHANNEL: &str = "cynode_policies";

#[derive(Clone, Debug)]
pub(crate) struct PolicyRow {
    pub(crate) id: String,
    pub(crate) text: String,
    pub(crate) revision: i64,
    pub(crate) is_default: bool,
    pub(crate) updated_at: OffsetDateTime,
    pub(crate) updated_by: String,
}

fn policy(row: &PgRow) -> Result<PolicyRow, sqlx::Error> {
    Ok(PolicyRow {
        id: row.try_get("id")?,
        text: row.try_get("text")?,
        revision: row.try_get("revision")?,
        is_default: row.try_get("is_default")?,
        updated_at: row.try_get("updated_at")?,
        updated_by: row.try_get("updated_by")?,
    })
}

/// The next number. The row is locked until the commit: changes come one after another, and each sees all before it.
async fn next(connection: &mut PgConnection) -> Result<i64, ApiError> {
    sqlx::query_scalar("update policy_head set revision = revision + 1 returning revision")
        .fetch_one(connection)
        .await
        .map_err(problem)
}

async fn all(connection: &mut PgConnection) -> Result<Vec<PolicyRow>, ApiError> {
    let rows = sqlx::query("select * from policies order by id")
        .fetch_all(connection)
        .await
        .map_err(problem)?;
    rows.iter()
        .map(policy)
        .collect::<Result<_, _>>()
        .map_err(problem)
}

async fn write(
    connection: &mut PgConnection,
    id: &str,
    text: Option<&str>,
    revision: i64,
    is_default: bool,
    by: &str,
) -> Result<(), ApiError> {
    sqlx::query("insert into policy_versions (policy_id, revision, text, created_by) values ($1, $2, $3, $4)")
        .bind(id)
        .bind(revision)
        .bind(text)
        .bind(by)
        .execute(&mut *connection)
        .await
        .map_err(problem)?;
    match text {
        Some(text) => sqlx::query(
            "insert into policies (id, text, revision, is_default, updated_by) values ($1, $2, $3, $4, $5)
             on conflict (id) do update set text = excluded.text, revision = excluded.revision, is_default = excluded.is_default,
                 updated_at = now(), updated_by = excluded.updated_by",
        )
        .bind(id)
        .bind(text)
        .bind(revision)
        .bind(is_default)
        .bind(by)
        .execute(&mut *connection)
        .await
        .map_err(problem)?,
        None => sqlx::query("delete from policies where id = $1").bind(id).execute(&mut *connection).await.map_err(problem)?,
    };
    sqlx::query("select pg_notify($1, '')")
        .bind(CHANNEL)
        .execute(connection)
        .await
        .map(drop)
        .map_err(problem)
}

impl Db {
    pub(crate) async fn policy_revision(&self) -> Result<i64, ApiError> {
        sqlx::query_scalar("select revision from policy_head")
            .fetch_one(&self.pool)
            .await
            .map_err(problem)
    }

    /// All documents as they are at one moment, and its number.
    pub(crate) async fn policies(&self) -> Result<(i64, Vec<PolicyRow>), ApiError> {
        let mut transaction = self.begin().await?;
        sqlx::query("set transaction isolation level repeatable read read only")
            .execute(&mut *transaction)
            .await
            .map_err(problem)?;
        let revision = sqlx::query_scalar("select revision from policy_head")
            .fetch_one(&mut *transaction)
            .await
            .map_err(problem)?;
        Ok((revision, all(&mut transaction).await?))
    }

    /// Puts the documents that come with the system there, unless somebody changed them.
    pub(crate) async fn seed_policy(&self, id: &str, text: &str) -> Result<(), ApiError> {
        let mut transaction = self.begin().await?;
        let revision = next(&mut transaction).await?;
        let known = all(&mut transaction)
            .await?
            .into_iter()
            .find(|row| row.id == id);
        // One that was removed or changed on purpose stays so.
        let was_there: bool =
            sqlx::query_scalar("select exists (select from policy_versions where policy_id = $1)")
                .bind(id)
                .fetch_one(&mut *transaction)
                .await
                .map_err(problem)?;
        let is_due = match known {
            Some(known) => known.is_default && known.text != text,
            None => !was_there,
        };
        if !is_due {
            return Ok(());
        }
        write(&mut transaction, id, Some(text), revision, true, "system").await?;
        commit(transaction).await
    }

    /// Changes or removes a document, if `check` takes the set as it is then.
    pub(crate) async fn put_policy<T>(
        &self,
        id: &str,
        text: Option<&str>,
        if_revision: Option<i64>,
        is_default: bool,
        by: &str,
        check: impl FnOnce(&[PolicyRow]) -> Result<T, ApiError>,
    ) -> Result<PolicyRow, ApiError> {
        let mut transaction = self.begin().await?;
        let revision = next(&mut transaction).await?;
        let mut rows = all(&mut transaction).await?;
        let known = rows.iter().position(|row| row.id == id);
        if text.is_none() && known.is_none() {
            return Err(ApiError::new(
                ErrorCode::NotFound,
                format!("there is no policy '{id}'"),
            ));
        }
        let before = known.map_or(0, |index| rows[index].revision);
        if if_revision.is_some_and(|expected| expected != before) {
            return Err(ApiError::new(
                ErrorCode::PreconditionFailed,
                format!("the policy is at revision {before}"),
            ));
        }
        let row = PolicyRow {
            id: id.to_owned(),
            text: text.unwrap_or_default().to_owned(),
            revision,
            is_default,
            updated_at: OffsetDateTime::now_utc(),
            updated_by: by.to_owned(),
        };
        if let Some(index) = known {
            rows.remove(index);
        }
        if text.is_some() {
            rows.push(row.clone());
        }
        check(&rows)?;
        write(&mut transaction, id, text, revision, is_default, by).await?;
        commit(transaction).await?;
        Ok(row)
    }
}

//! Policy documents with all their versions, and a revision that rises with every change.

use sqlx::{PgConnection, Row as _, postgres::PgRow};
use time::OffsetDateTime;

use super::{Db, Error, Missing, commit};

/// The notification channel that tells orchestrators of changes.
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

/// The next revision. The row stays locked until the commit: changes are serialized.
async fn next(connection: &mut PgConnection) -> Result<i64, Error> {
    sqlx::query_scalar("update policy_head set revision = revision + 1 returning revision")
        .fetch_one(connection)
        .await
        .map_err(Error::from)
}

async fn all(connection: &mut PgConnection) -> Result<Vec<PolicyRow>, Error> {
    let rows = sqlx::query("select * from policies order by id")
        .fetch_all(connection)
        .await?;
    rows.iter()
        .map(policy)
        .collect::<Result<_, _>>()
        .map_err(Error::from)
}

async fn write(
    connection: &mut PgConnection,
    id: &str,
    text: Option<&str>,
    revision: i64,
    is_default: bool,
    by: &str,
) -> Result<(), Error> {
    sqlx::query("insert into policy_versions (policy_id, revision, text, created_by) values ($1, $2, $3, $4)")
        .bind(id)
        .bind(revision)
        .bind(text)
        .bind(by)
        .execute(&mut *connection)
        .await?;
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
        .await?,
        None => sqlx::query("delete from policies where id = $1").bind(id).execute(&mut *connection).await?,
    };
    sqlx::query("select pg_notify($1, '')")
        .bind(CHANNEL)
        .execute(connection)
        .await
        .map(drop)
        .map_err(Error::from)
}

impl Db {
    pub(crate) async fn policy_revision(&self) -> Result<i64, Error> {
        sqlx::query_scalar("select revision from policy_head")
            .fetch_one(&self.pool)
            .await
            .map_err(Error::from)
    }

    /// A consistent snapshot of all documents, and its revision.
    pub(crate) async fn policies(&self) -> Result<(i64, Vec<PolicyRow>), Error> {
        let mut transaction = self.begin().await?;
        sqlx::query("set transaction isolation level repeatable read read only")
            .execute(&mut *transaction)
            .await?;
        let revision = sqlx::query_scalar("select revision from policy_head")
            .fetch_one(&mut *transaction)
            .await?;
        Ok((revision, all(&mut transaction).await?))
    }

    /// Stores a built-in document, unless somebody has changed or removed it.
    pub(crate) async fn seed_policy(&self, id: &str, text: &str) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        let revision = next(&mut transaction).await?;
        let known = all(&mut transaction)
            .await?
            .into_iter()
            .find(|row| row.id == id);
        let was_there: bool =
            sqlx::query_scalar("select exists (select from policy_versions where policy_id = $1)")
                .bind(id)
                .fetch_one(&mut *transaction)
                .await?;
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

    /// Changes or removes a document, if `check` accepts the resulting set.
    pub(crate) async fn put_policy<T, E: From<Error>>(
        &self,
        id: &str,
        text: Option<&str>,
        if_revision: Option<i64>,
        is_default: bool,
        by: &str,
        check: impl FnOnce(&[PolicyRow]) -> Result<T, E>,
    ) -> Result<PolicyRow, E> {
        let mut transaction = self.begin().await?;
        let revision = next(&mut transaction).await?;
        let mut rows = all(&mut transaction).await?;
        let known = rows.iter().position(|row| row.id == id);
        if text.is_none() && known.is_none() {
            return Err(Error::NotFound(Missing::Policy(id.to_owned())).into());
        }
        let before = known.map_or(0, |index| rows[index].revision);
        if if_revision.is_some_and(|expected| expected != before) {
            return Err(Error::StalePolicy { current: before }.into());
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

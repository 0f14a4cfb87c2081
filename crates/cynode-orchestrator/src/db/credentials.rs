//! Credentials of upstream services, sealed to the role that uses them. No statement here sees a
//! value.

use cynode_api::{
    Base64Bytes, Credential, CredentialId, EgressRole, Page, ProjectId, SealedCredential,
};
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error, Missing, PageRequest, commit, decode, repositories};
use crate::caller::Scope;

/// A credential with its sealed value.
#[derive(Clone, Debug)]
pub(crate) struct CredentialRow {
    pub(crate) credential: Credential,
    pub(crate) username: String,
}

/// What a new value of a credential leaves behind.
#[derive(Clone, Debug)]
pub(crate) struct SealedValue {
    pub(crate) sealed: SealedCredential,
    pub(crate) username: String,
    /// Its keyed hashes, encrypted.
    pub(crate) held: Vec<u8>,
}

#[derive(Clone, Debug)]
pub(crate) struct NewCredential<'a> {
    pub(crate) project_id: ProjectId,
    pub(crate) name: &'a str,
    pub(crate) role: EgressRole,
    pub(crate) url: &'a str,
    pub(crate) value: &'a SealedValue,
    pub(crate) created_by: &'a str,
}

fn credential(row: &PgRow) -> Result<Credential, Error> {
    Ok(Credential {
        id: CredentialId::from_uuid(row.try_get("id")?),
        project_id: ProjectId::from_uuid(row.try_get("project_id")?),
        name: row.try_get("name")?,
        role: decode(row.try_get::<String, _>("role")?.into())?,
        url: row.try_get("url")?,
        key_id: row.try_get("key_id")?,
        created_by: row.try_get("created_by")?,
        created_at: row.try_get("created_at")?,
        rotated_at: row.try_get("rotated_at")?,
        disabled_at: row.try_get("disabled_at")?,
    })
}

/// The credentials that a role may open.
pub(super) async fn enabled(
    connection: &mut PgConnection,
    role: EgressRole,
) -> Result<Vec<SealedCredential>, Error> {
    let rows = sqlx::query(
        "select id, key_id, encapsulated, ciphertext from credentials
         where role = $1 and disabled_at is null order by id",
    )
    .bind(role.as_str())
    .fetch_all(connection)
    .await?;
    rows.iter()
        .map(|row| {
            Ok(SealedCredential {
                id: CredentialId::from_uuid(row.try_get("id")?),
                key_id: row.try_get("key_id")?,
                encapsulated: Base64Bytes(row.try_get("encapsulated")?),
                ciphertext: Base64Bytes(row.try_get("ciphertext")?),
            })
        })
        .collect()
}

impl Db {
    pub(crate) async fn insert_credential(
        &self,
        new: &NewCredential<'_>,
    ) -> Result<Credential, Error> {
        let SealedValue {
            sealed,
            username,
            held,
        } = new.value;
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "insert into credentials (id, project_id, name, role, url, username, key_id, encapsulated, ciphertext, held, created_by)
             values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) returning *",
        )
        .bind(sealed.id.as_uuid())
        .bind(new.project_id.as_uuid())
        .bind(new.name)
        .bind(new.role.as_str())
        .bind(new.url)
        .bind(username)
        .bind(&sealed.key_id)
        .bind(&sealed.encapsulated.0)
        .bind(&sealed.ciphertext.0)
        .bind(held)
        .bind(new.created_by)
        .fetch_one(&mut *transaction)
        .await?;
        repositories::next_revision(&mut transaction).await?;
        commit(transaction).await?;
        credential(&row)
    }

    /// Replaces the value of a credential that is not disabled.
    pub(crate) async fn rotate_credential(
        &self,
        id: CredentialId,
        value: &SealedValue,
    ) -> Result<Credential, Error> {
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "update credentials set username = $2, key_id = $3, encapsulated = $4, ciphertext = $5, held = $6, rotated_at = now()
             where id = $1 and disabled_at is null returning *",
        )
        .bind(id.as_uuid())
        .bind(&value.username)
        .bind(&value.sealed.key_id)
        .bind(&value.sealed.encapsulated.0)
        .bind(&value.sealed.ciphertext.0)
        .bind(&value.held)
        .fetch_optional(&mut *transaction)
        .await?;
        let row = row.ok_or(Error::NotFound(Missing::Credential(id)))?;
        repositories::next_revision(&mut transaction).await?;
        commit(transaction).await?;
        credential(&row)
    }

    /// Disables a credential; repeating it changes nothing. Its value stays refused as input.
    pub(crate) async fn disable_credential(&self, id: CredentialId) -> Result<Credential, Error> {
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "update credentials set disabled_at = coalesce(disabled_at, now()) where id = $1 returning *",
        )
        .bind(id.as_uuid())
        .fetch_optional(&mut *transaction)
        .await?;
        let row = row.ok_or(Error::NotFound(Missing::Credential(id)))?;
        repositories::next_revision(&mut transaction).await?;
        commit(transaction).await?;
        credential(&row)
    }

    pub(crate) async fn credential(&self, id: CredentialId) -> Result<CredentialRow, Error> {
        let row = self
            .row("select * from credentials where id = $1", id.as_uuid())
            .await?;
        let row = row.ok_or(Error::NotFound(Missing::Credential(id)))?;
        Ok(CredentialRow {
            credential: credential(&row)?,
            username: row.try_get("username")?,
        })
    }

    /// Credentials of all projects for administrators; for others, those of their own projects.
    pub(crate) async fn list_credentials(
        &self,
        scope: &Scope,
        project: Option<ProjectId>,
        page: &PageRequest,
    ) -> Result<Page<Credential>, Error> {
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select * from credentials c where ($2 or exists (select from projects own where own.id = c.project_id and own.owner_id = $3))
                       and ($6::text is null or c.name = $6) and ($7::uuid is null or c.project_id = $7)"
                ],
                "c.id",
                "$1",
                "$4",
                "$5"
            ))
            .bind(after)
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(page.id_part.clone())
            .bind(count)
            .bind(page.name.clone())
            .bind(project.map(|id| *id.as_uuid()))
        };
        self.read_page_of(page, query, credential, |credential| {
            *credential.id.as_uuid()
        })
        .await
    }

    /// The encrypted hashes of every credential, also of disabled ones, and the revision that they
    /// are from.
    pub(crate) async fn held_credentials(&self) -> Result<(i64, Vec<Vec<u8>>), Error> {
        let mut transaction = self.begin().await?;
        sqlx::query("set transaction isolation level repeatable read read only")
            .execute(&mut *transaction)
            .await?;
        let revision = sqlx::query_scalar("select revision from egress_head")
            .fetch_one(&mut *transaction)
            .await?;
        let held = sqlx::query_scalar("select held from credentials order by id")
            .fetch_all(&mut *transaction)
            .await?;
        Ok((revision, held))
    }

    pub(crate) async fn credential_revision(&self) -> Result<i64, Error> {
        sqlx::query_scalar("select revision from egress_head")
            .fetch_one(&self.pool)
            .await
            .map_err(Error::from)
    }

    pub(crate) async fn credential_project(
        &self,
        id: CredentialId,
    ) -> Result<Option<ProjectId>, Error> {
        let row = self
            .row(
                "select project_id from credentials where id = $1",
                id.as_uuid(),
            )
            .await?;
        row.map(|row| Ok(ProjectId::from_uuid(row.try_get("project_id")?)))
            .transpose()
    }
}

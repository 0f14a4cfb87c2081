//! Registered repositories, and the revision of what the git role gets a copy of.

use cynode_api::{
    EgressPolicy, EgressRole, EgressState, Page, ProjectId, Repository, RepositoryId,
    repository_limits,
};
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error, Missing, PageRequest, commit, credentials, decode, to_json};
use crate::caller::Scope;

/// Rows that a caller may use: of projects that they own, or have a task in.
macro_rules! usable {
    () => {
        "($2 or exists (select from projects own where own.id = r.project_id and own.owner_id = $3)
             or exists (select from tasks own where own.project_id = r.project_id and own.owner_id = $3))"
    };
}

fn repository(row: &PgRow) -> Result<Repository, Error> {
    let object: Repository = decode(row.try_get("object")?)?;
    Ok(Repository {
        id: RepositoryId::from_uuid(row.try_get("id")?),
        project_id: ProjectId::from_uuid(row.try_get("project_id")?),
        name: row.try_get("name")?,
        credential_id: row
            .try_get::<Option<Uuid>, _>("credential_id")?
            .map(cynode_api::CredentialId::from_uuid),
        revision: row.try_get("revision")?,
        created_by: row.try_get("created_by")?,
        created_at: row.try_get("created_at")?,
        ..object
    })
}

/// The next revision of credentials and repositories. The row stays locked until the commit:
/// changes are serialized.
pub(super) async fn next_revision(connection: &mut PgConnection) -> Result<i64, Error> {
    sqlx::query_scalar("update egress_head set revision = revision + 1 returning revision")
        .fetch_one(connection)
        .await
        .map_err(Error::from)
}

impl Db {
    /// Registers a repository. Its revision is given here.
    pub(crate) async fn insert_repository(&self, new: &Repository) -> Result<Repository, Error> {
        let mut transaction = self.begin().await?;
        let revision = next_revision(&mut transaction).await?;
        let count: i64 = sqlx::query_scalar("select count(*) from repositories")
            .fetch_one(&mut *transaction)
            .await?;
        if count >= i64::try_from(repository_limits::MAX_REPOSITORIES).unwrap_or(i64::MAX) {
            return Err(Error::TooManyRepositories);
        }
        let row = sqlx::query(
            "insert into repositories (id, project_id, name, credential_id, object, revision, created_by)
             values ($1, $2, $3, $4, $5, $6, $7) returning *",
        )
        .bind(new.id.as_uuid())
        .bind(new.project_id.as_uuid())
        .bind(&new.name)
        .bind(new.credential_id.map(|id| *id.as_uuid()))
        .bind(to_json(new))
        .bind(revision)
        .bind(&new.created_by)
        .fetch_one(&mut *transaction)
        .await?;
        commit(transaction).await?;
        repository(&row)
    }

    /// Removes a repository that no promotion is under way to.
    pub(crate) async fn remove_repository(&self, id: RepositoryId) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        next_revision(&mut transaction).await?;
        let under_way: i64 = sqlx::query_scalar(
            "select count(*) from promotions where repository_id = $1 and state in ('working', 'checking', 'awaiting_approval')",
        )
        .bind(id.as_uuid())
        .fetch_one(&mut *transaction)
        .await?;
        if under_way > 0 {
            return Err(Error::RepositoryInUse {
                promotions: under_way,
            });
        }
        let gone = sqlx::query("delete from repositories where id = $1")
            .bind(id.as_uuid())
            .execute(&mut *transaction)
            .await?;
        if gone.rows_affected() == 0 {
            return Err(Error::NotFound(Missing::Repository(id.to_string())));
        }
        commit(transaction).await
    }

    /// A repository, whoever asks.
    pub(crate) async fn any_repository(
        &self,
        id: RepositoryId,
    ) -> Result<Option<Repository>, Error> {
        let row = self
            .row("select * from repositories where id = $1", id.as_uuid())
            .await?;
        row.as_ref().map(repository).transpose()
    }

    pub(crate) async fn repository(
        &self,
        scope: &Scope,
        id: RepositoryId,
    ) -> Result<Repository, Error> {
        let row = self
            .visible_row(
                concat!("select * from repositories r where id = $1 and ", usable!()),
                id.as_uuid(),
                scope,
            )
            .await?;
        row.as_ref()
            .map(repository)
            .transpose()?
            .ok_or_else(|| Error::NotFound(Missing::Repository(id.to_string())))
    }

    /// The repository of a project by its name or id.
    pub(crate) async fn repository_of(
        &self,
        project: ProjectId,
        called: &str,
    ) -> Result<Repository, Error> {
        let row = sqlx::query(
            "select * from repositories where project_id = $1 and (name = $2 or id::text = $2)",
        )
        .bind(project.as_uuid())
        .bind(called)
        .fetch_optional(&self.pool)
        .await?;
        row.as_ref()
            .map(repository)
            .transpose()?
            .ok_or_else(|| Error::NotFound(Missing::Repository(called.to_owned())))
    }

    /// The repositories with a name or id in projects of the caller, at most two.
    pub(crate) async fn repositories_called(
        &self,
        scope: &Scope,
        called: &str,
    ) -> Result<Vec<Repository>, Error> {
        let rows = sqlx::query(
            "select * from repositories r where (name = $1 or id::text = $1)
               and ($2 or exists (select from projects own where own.id = r.project_id and own.owner_id = $3))
             limit 2",
        )
        .bind(called)
        .bind(scope.sees_all)
        .bind(scope.user_id.as_uuid())
        .fetch_all(&self.pool)
        .await?;
        rows.iter().map(repository).collect()
    }

    pub(crate) async fn list_repositories(
        &self,
        scope: &Scope,
        project: Option<ProjectId>,
        page: &PageRequest,
    ) -> Result<Page<Repository>, Error> {
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select * from repositories r where ",
                    usable!(),
                    " and ($4::uuid is null or r.project_id = $4) and ($7::text is null or r.name = $7)"
                ],
                "r.id",
                "$1",
                "$5",
                "$6"
            ))
            .bind(after)
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(project.map(|id| *id.as_uuid()))
            .bind(page.id_part.clone())
            .bind(count)
            .bind(page.name.clone())
        };
        self.read_page_of(page, query, repository, |repository| {
            *repository.id.as_uuid()
        })
        .await
    }

    /// The revision of what the git role has a copy of. Rises with every change of policies,
    /// repositories and credentials.
    pub(crate) async fn egress_revision(&self) -> Result<i64, Error> {
        sqlx::query_scalar(
            "select egress_head.revision + policy_head.revision from egress_head, policy_head",
        )
        .fetch_one(&self.pool)
        .await
        .map_err(Error::from)
    }

    /// A consistent copy of policies, repositories and sealed credentials.
    pub(crate) async fn egress_state(&self) -> Result<EgressState, Error> {
        let mut transaction = self.begin().await?;
        sqlx::query("set transaction isolation level repeatable read read only")
            .execute(&mut *transaction)
            .await?;
        let revision = sqlx::query_scalar(
            "select egress_head.revision + policy_head.revision from egress_head, policy_head",
        )
        .fetch_one(&mut *transaction)
        .await?;
        let policies: Vec<(String, String)> =
            sqlx::query_as("select id, text from policies order by id")
                .fetch_all(&mut *transaction)
                .await?;
        let repositories = sqlx::query("select * from repositories order by id")
            .fetch_all(&mut *transaction)
            .await?;
        let repositories = repositories
            .iter()
            .map(repository)
            .collect::<Result<_, _>>()?;
        let credentials = credentials::enabled(&mut transaction, EgressRole::Git).await?;
        Ok(EgressState {
            version: cynode_api::API_VERSION,
            revision,
            policies: policies
                .into_iter()
                .map(|(id, text)| EgressPolicy { id, text })
                .collect(),
            repositories,
            credentials,
            own_listeners: Vec::new(),
        })
    }
}

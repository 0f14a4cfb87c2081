//! Users, groups and tokens.

use cynode_api::{
    Group, GroupId, JobId, Page, ProjectId, SessionId, TaskId, Token, TokenId, TokenKind, User,
    UserId,
};
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    Db, Error, IdentityLookup, Missing, PageRequest, PlacedSession, dedicated::LookupRequest,
    places,
};
use crate::caller::Scope;

/// The identity of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Authenticated {
    pub(crate) token_id: TokenId,
    /// Names of the user's groups.
    pub(crate) groups: Vec<String>,
    pub(crate) kind: TokenKind,
    pub(crate) user_id: UserId,
    pub(crate) user_name: String,
    pub(crate) is_admin: bool,
    pub(crate) project_id: Option<ProjectId>,
    pub(crate) task_ids: Vec<TaskId>,
}

#[derive(Clone, Debug)]
pub(crate) struct NewToken {
    pub(crate) id: TokenId,
    pub(crate) hash: [u8; 32],
    pub(crate) kind: TokenKind,
    pub(crate) user_id: UserId,
    pub(crate) project_id: Option<ProjectId>,
    pub(crate) task_ids: Vec<TaskId>,
    pub(crate) job_id: Option<JobId>,
    pub(crate) session_id: Option<SessionId>,
    pub(crate) created_by: String,
    pub(crate) expires_at: OffsetDateTime,
}

/// Selects the identities of tokens.
macro_rules! authenticated {
    ($more:literal, $from:literal) => {
        concat!(
            "select ",
            $more,
            " t.id, t.kind, t.user_id, u.name as user_name, u.is_admin, t.project_id, t.task_ids,
                     array(select g.name from group_members m join groups g on g.id = m.group_id where m.user_id = t.user_id order by g.name) as groups
              from ",
            $from,
            " join users u on u.id = t.user_id"
        )
    };
}

fn authenticated(row: &PgRow) -> Result<Authenticated, sqlx::Error> {
    Ok(Authenticated {
        token_id: TokenId::from_uuid(row.try_get("id")?),
        groups: row.try_get("groups")?,
        kind: kind(row)?,
        user_id: UserId::from_uuid(row.try_get("user_id")?),
        user_name: row.try_get("user_name")?,
        is_admin: row.try_get("is_admin")?,
        project_id: row
            .try_get::<Option<Uuid>, _>("project_id")?
            .map(ProjectId::from_uuid),
        task_ids: tasks(row)?,
    })
}

fn answer(row: &PgRow) -> Result<(Authenticated, Option<PlacedSession>), Error> {
    let is_there = row.try_get::<Option<Uuid>, _>("session_id")?.is_some();
    let placed = if is_there {
        Some(places::placed_session(row)?)
    } else {
        None
    };
    Ok((authenticated(row)?, placed))
}

fn user(row: &PgRow) -> Result<User, sqlx::Error> {
    Ok(User {
        id: UserId::from_uuid(row.try_get("id")?),
        name: row.try_get("name")?,
        is_admin: row.try_get("is_admin")?,
        created_by: row.try_get("created_by")?,
        created_at: row.try_get("created_at")?,
    })
}

fn token(row: &PgRow) -> Result<Token, sqlx::Error> {
    Ok(Token {
        id: TokenId::from_uuid(row.try_get("id")?),
        kind: kind(row)?,
        user: row.try_get("user_name")?,
        project_id: row
            .try_get::<Option<Uuid>, _>("project_id")?
            .map(ProjectId::from_uuid),
        task_ids: tasks(row)?,
        job_id: row
            .try_get::<Option<Uuid>, _>("job_id")?
            .map(JobId::from_uuid),
        session_id: row
            .try_get::<Option<Uuid>, _>("session_id")?
            .map(SessionId::from_uuid),
        created_by: row.try_get("created_by")?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get("expires_at")?,
        revoked_at: row.try_get("revoked_at")?,
    })
}

fn kind(row: &PgRow) -> Result<TokenKind, sqlx::Error> {
    row.try_get::<String, _>("kind")?
        .parse()
        .map_err(|error: String| sqlx::Error::Decode(error.into()))
}

fn tasks(row: &PgRow) -> Result<Vec<TaskId>, sqlx::Error> {
    Ok(row
        .try_get::<Vec<Uuid>, _>("task_ids")?
        .into_iter()
        .map(TaskId::from_uuid)
        .collect())
}

impl Db {
    /// Looked up on every call, so that a revoked token is rejected at once. The session of the
    /// call is looked up in the same round trip, because most calls concern one.
    pub(crate) async fn authenticate(
        &self,
        hash: &[u8; 32],
        session: Option<SessionId>,
    ) -> Result<IdentityLookup, Error> {
        self.lookups.ask(*hash, session).await
    }

    /// Answers a batch of lookups with one statement.
    pub(super) async fn authenticate_all(
        connection: &mut PgConnection,
        lookups: &[LookupRequest],
    ) -> Result<Vec<Result<IdentityLookup, Error>>, Error> {
        let (hashes, sessions): (Vec<&[u8]>, Vec<Option<Uuid>>) = lookups
            .iter()
            .map(|lookup| {
                (
                    lookup.hash.as_slice(),
                    lookup.session.map(|id| *id.as_uuid()),
                )
            })
            .unzip();
        let rows = sqlx::query(concat!(
            authenticated!(
                "asked.number, s.session_id, s.task_id, st.project_id as session_project_id, s.owner_id, sp.owner_id as project_owner_id, s.node_id, s.state,",
                "unnest($1::bytea[], $2::uuid[]) with ordinality as asked (hash, session_id, number) join api_tokens t on t.hash = asked.hash"
            ),
            " left join sessions s on s.session_id = asked.session_id left join tasks st on st.id = s.task_id left join projects sp on sp.id = st.project_id
              where t.revoked_at is null and t.expires_at > now()"
        ))
        .bind(hashes)
        .bind(sessions)
        .fetch_all(connection)
        .await?;
        let mut found: Vec<Result<IdentityLookup, Error>> =
            lookups.iter().map(|_| Ok(None)).collect();
        for row in rows {
            let number = usize::try_from(row.try_get::<i64, _>("number")?).unwrap_or_default();
            if let Some(found) = number.checked_sub(1).and_then(|at| found.get_mut(at)) {
                // An undecodable row fails its own lookup, not the batch.
                *found = answer(&row).map(Some);
            }
        }
        Ok(found)
    }

    /// The identity of a valid token, by its id.
    pub(crate) async fn authenticated(&self, id: TokenId) -> Result<Option<Authenticated>, Error> {
        let row = self
            .row(
                concat!(
                    authenticated!("", "api_tokens t"),
                    " where t.id = $1 and t.revoked_at is null and t.expires_at > now()"
                ),
                id.as_uuid(),
            )
            .await?;
        row.as_ref()
            .map(authenticated)
            .transpose()
            .map_err(Error::from)
    }

    pub(crate) async fn groups_of(&self, id: UserId) -> Result<Vec<String>, Error> {
        sqlx::query_scalar("select g.name from group_members m join groups g on g.id = m.group_id where m.user_id = $1")
            .bind(id.as_uuid())
            .fetch_all(&self.pool)
            .await
            .map_err(Error::from)
    }

    /// Ensures that the administrator exists and that the token on disk is valid. Earlier tokens
    /// made this way are revoked.
    pub(crate) async fn ensure_admin(
        &self,
        name: &str,
        hash: &[u8; 32],
        expires_at: OffsetDateTime,
    ) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        let user_id: Uuid = sqlx::query_scalar(
            "insert into users (id, name, is_admin, created_by) values ($1, $2, true, 'system')
             on conflict (name) do update set is_admin = true returning id",
        )
        .bind(Uuid::now_v7())
        .bind(name)
        .fetch_one(&mut *transaction)
        .await?;
        sqlx::query("update api_tokens set revoked_at = now() where user_id = $1 and created_by = 'system' and hash <> $2 and revoked_at is null")
            .bind(user_id)
            .bind(hash.as_slice())
            .execute(&mut *transaction)
            .await?;
        sqlx::query(
            "insert into api_tokens (id, hash, kind, user_id, created_by, expires_at) values ($1, $2, 'user', $3, 'system', $4)
             on conflict (hash) do update set expires_at = excluded.expires_at, revoked_at = null",
        )
        .bind(Uuid::now_v7())
        .bind(hash.as_slice())
        .bind(user_id)
        .bind(expires_at)
        .execute(&mut *transaction)
        .await?;
        super::commit(transaction).await
    }

    pub(crate) async fn insert_token(&self, new: &NewToken) -> Result<(), Error> {
        let tasks: Vec<Uuid> = new.task_ids.iter().map(|id| *id.as_uuid()).collect();
        sqlx::query(
            "insert into api_tokens (id, hash, kind, user_id, project_id, task_ids, job_id, session_id, created_by, expires_at)
             values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        )
        .bind(new.id.as_uuid())
        .bind(new.hash.as_slice())
        .bind(new.kind.as_str())
        .bind(new.user_id.as_uuid())
        .bind(new.project_id.map(|id| *id.as_uuid()))
        .bind(tasks)
        .bind(new.job_id.map(|id| *id.as_uuid()))
        .bind(new.session_id.map(|id| *id.as_uuid()))
        .bind(&new.created_by)
        .bind(new.expires_at)
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(Error::from)
    }

    pub(crate) async fn list_tokens(
        &self,
        scope: &Scope,
        page: &PageRequest,
    ) -> Result<Page<Token>, Error> {
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select t.*, u.name as user_name from api_tokens t join users u on u.id = t.user_id
                     where ($1 or t.user_id = $2)"
                ],
                "t.id",
                "$3",
                "$5",
                "$4"
            ))
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(after)
            .bind(count)
            .bind(page.id_part.clone())
        };
        self.read_page_of(page, query, token, |token| *token.id.as_uuid())
            .await
    }

    pub(crate) async fn token(&self, scope: &Scope, id: TokenId) -> Result<Token, Error> {
        let query = "select t.*, u.name as user_name from api_tokens t join users u on u.id = t.user_id where t.id = $1 and ($2 or t.user_id = $3)";
        let row = self.visible_row(query, id.as_uuid(), scope).await?;
        row.as_ref()
            .map(token)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Token(id)))
    }

    /// Replaces the secret of a token, unless it is revoked.
    pub(crate) async fn renew_token(
        &self,
        scope: &Scope,
        id: TokenId,
        hash: &[u8; 32],
        expires_at: OffsetDateTime,
    ) -> Result<(), Error> {
        let renewed = sqlx::query("update api_tokens set hash = $4, expires_at = $5 where id = $1 and ($2 or user_id = $3) and revoked_at is null")
            .bind(id.as_uuid())
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(hash.as_slice())
            .bind(expires_at)
            .execute(&self.pool)
            .await?;
        if renewed.rows_affected() == 0 {
            self.token(scope, id).await?;
            return Err(Error::TokenRevoked(id));
        }
        Ok(())
    }

    /// Idempotent.
    pub(crate) async fn revoke_token(&self, scope: &Scope, id: TokenId) -> Result<(), Error> {
        let revoked = sqlx::query("update api_tokens set revoked_at = coalesce(revoked_at, now()) where id = $1 and ($2 or user_id = $3)")
            .bind(id.as_uuid())
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .execute(&self.pool)
            .await?;
        if revoked.rows_affected() == 0 {
            return Err(Error::NotFound(Missing::Token(id)));
        }
        Ok(())
    }

    /// The generation of the token's own session; 0 if none has been made.
    pub(crate) async fn session_generation(&self, id: TokenId) -> Result<i64, Error> {
        let generation: Option<i64> =
            sqlx::query_scalar("select session_generation from api_tokens where id = $1")
                .bind(id.as_uuid())
                .fetch_optional(&self.pool)
                .await?;
        generation.ok_or(Error::NotFound(Missing::Token(id)))
    }

    /// Advances the generation by one. Has no effect if another call has already done so.
    pub(crate) async fn advance_session_generation(
        &self,
        id: TokenId,
        from: i64,
    ) -> Result<(), Error> {
        sqlx::query(
            "update api_tokens set session_generation = $2 + 1 where id = $1 and session_generation = $2",
        )
        .bind(id.as_uuid())
        .bind(from)
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(Error::from)
    }

    pub(crate) async fn insert_user(
        &self,
        id: UserId,
        name: &str,
        is_admin: bool,
        created_by: &str,
    ) -> Result<User, Error> {
        let row = sqlx::query("insert into users (id, name, is_admin, created_by) values ($1, $2, $3, $4) returning *")
            .bind(id.as_uuid())
            .bind(name)
            .bind(is_admin)
            .bind(created_by)
            .fetch_one(&self.pool)
            .await?;
        user(&row).map_err(Error::from)
    }

    /// By name or id.
    pub(crate) async fn user(&self, name: &str) -> Result<Option<User>, Error> {
        let row = sqlx::query("select * from users where name = $1 or id::text = lower($1)")
            .bind(name)
            .fetch_optional(&self.pool)
            .await?;
        row.as_ref().map(user).transpose().map_err(Error::from)
    }

    /// Administrators see all, others themselves.
    pub(crate) async fn list_users(
        &self,
        scope: &Scope,
        page: &PageRequest,
    ) -> Result<Page<User>, Error> {
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                ["select * from users where ($1 or id = $2) and ($6::text is null or name = $6)"],
                "id",
                "$3",
                "$5",
                "$4"
            ))
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(after)
            .bind(count)
            .bind(page.id_part.clone())
            .bind(page.name.clone())
        };
        self.read_page_of(page, query, user, |user| *user.id.as_uuid())
            .await
    }

    pub(crate) async fn insert_group(
        &self,
        id: GroupId,
        name: &str,
        members: &[UserId],
        created_by: &str,
    ) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        sqlx::query("insert into groups (id, name, created_by) values ($1, $2, $3)")
            .bind(id.as_uuid())
            .bind(name)
            .bind(created_by)
            .execute(&mut *transaction)
            .await?;
        for member in members {
            sqlx::query("insert into group_members (group_id, user_id) values ($1, $2) on conflict do nothing")
                .bind(id.as_uuid())
                .bind(member.as_uuid())
                .execute(&mut *transaction)
                .await?;
        }
        super::commit(transaction).await
    }

    /// Administrators see all, others those they are in.
    pub(crate) async fn list_groups(
        &self,
        scope: &Scope,
        only: Option<GroupId>,
        page: &PageRequest,
    ) -> Result<Page<Group>, Error> {
        let group = |row: &PgRow| -> Result<Group, sqlx::Error> {
            Ok(Group {
                id: GroupId::from_uuid(row.try_get("id")?),
                name: row.try_get("name")?,
                members: row.try_get("members")?,
                created_by: row.try_get("created_by")?,
                created_at: row.try_get("created_at")?,
            })
        };
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select g.*, array(select u.name from group_members m join users u on u.id = m.user_id where m.group_id = g.id order by u.name) as members
                     from groups g where ($1 or exists (select from group_members own where own.group_id = g.id and own.user_id = $2))
                       and ($3::uuid is null or g.id = $3) and ($7::text is null or g.name = $7)"
                ],
                "g.id",
                "$4",
                "$6",
                "$5"
            ))
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(only.map(|id| *id.as_uuid()))
            .bind(after)
            .bind(count)
            .bind(page.id_part.clone())
            .bind(page.name.clone())
        };
        self.read_page_of(page, query, group, |group| *group.id.as_uuid())
            .await
    }
}

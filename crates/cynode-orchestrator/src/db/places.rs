//! The owners, tasks and projects of resources, as policy decisions need them.

use cynode_api::{
    ArtifactId, GroupId, ImageId, JobId, NodeId, ProjectId, SessionId, SessionState, TaskId,
    TokenId,
};
use cynode_policy::Place;
use sqlx::{Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error};

/// The node and the state of a session when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionAt {
    pub(crate) node_id: NodeId,
    pub(crate) state: SessionState,
}

fn place(row: &PgRow) -> Result<Place, sqlx::Error> {
    Ok(Place {
        project: row.try_get("project_id")?,
        ..owned(row)?
    })
}

fn owned(row: &PgRow) -> Result<Place, sqlx::Error> {
    let mut owners: Vec<Uuid> = Vec::with_capacity(2);
    owners.extend(row.try_get::<Option<Uuid>, _>("owner_id")?);
    owners.extend(row.try_get::<Option<Uuid>, _>("project_owner_id")?);
    owners.dedup();
    Ok(Place {
        task: row.try_get("task_id")?,
        project: None,
        owners,
    })
}

/// A session's place in the hierarchy, and its node.
pub(crate) type PlacedSession = (Place, SessionAt);

/// Reads a row in which `project_id` is the token's and `session_project_id` the session's.
pub(super) fn placed_session(row: &PgRow) -> Result<PlacedSession, Error> {
    let place = Place {
        project: row.try_get("session_project_id")?,
        ..owned(row)?
    };
    Ok((
        place,
        SessionAt {
            node_id: NodeId::from_uuid(row.try_get("node_id")?),
            state: super::state(row)?,
        },
    ))
}

impl Db {
    pub(super) async fn place(
        &self,
        query: &'static str,
        id: &Uuid,
    ) -> Result<Option<Place>, Error> {
        let row = sqlx::query(query)
            .bind(id)
            .fetch_optional(&self.pool)
            .await?;
        row.as_ref().map(place).transpose().map_err(Error::from)
    }

    pub(crate) async fn project_place(&self, id: ProjectId) -> Result<Option<Place>, Error> {
        let query = "select null::uuid as task_id, null::uuid as project_id, owner_id, null::uuid as project_owner_id from projects where id = $1";
        self.place(query, id.as_uuid()).await
    }

    pub(crate) async fn task_place(&self, id: TaskId) -> Result<Option<Place>, Error> {
        let query =
            "select null::uuid as task_id, t.project_id, t.owner_id, p.owner_id as project_owner_id
                     from tasks t left join projects p on p.id = t.project_id where t.id = $1";
        self.place(query, id.as_uuid()).await
    }

    pub(crate) async fn session_place(
        &self,
        id: SessionId,
    ) -> Result<Option<PlacedSession>, Error> {
        let row = self.row(
            "select s.task_id, t.project_id as session_project_id, s.owner_id, p.owner_id as project_owner_id, s.node_id, s.state
             from sessions s join tasks t on t.id = s.task_id left join projects p on p.id = t.project_id where s.session_id = $1", id.as_uuid()).await?;
        row.as_ref().map(placed_session).transpose()
    }

    pub(crate) async fn job_place(&self, id: JobId) -> Result<Option<Place>, Error> {
        let query = "select j.task_id, t.project_id, j.owner_id, p.owner_id as project_owner_id
                     from jobs j join tasks t on t.id = j.task_id left join projects p on p.id = t.project_id where j.job_id = $1";
        self.place(query, id.as_uuid()).await
    }

    pub(crate) async fn artifact_place(&self, id: ArtifactId) -> Result<Option<Place>, Error> {
        let query = "select a.task_id, t.project_id, t.owner_id, p.owner_id as project_owner_id
                     from artifacts a join tasks t on t.id = a.task_id left join projects p on p.id = t.project_id where a.id = $1";
        self.place(query, id.as_uuid()).await
    }

    /// The owner and the kind of a token.
    pub(crate) async fn token_owner(&self, id: TokenId) -> Result<Option<(Uuid, String)>, Error> {
        sqlx::query_as("select user_id, kind from api_tokens where id = $1")
            .bind(id.as_uuid())
            .fetch_optional(&self.pool)
            .await
            .map_err(Error::from)
    }

    /// The members of a group.
    pub(crate) async fn group_members(&self, id: GroupId) -> Result<Option<Vec<Uuid>>, Error> {
        sqlx::query_scalar("select array(select user_id from group_members where group_id = g.id) from groups g where g.id = $1")
            .bind(id.as_uuid())
            .fetch_optional(&self.pool)
            .await
            .map_err(Error::from)
    }

    /// The name of an image, whether any version is agent-compatible, and whether all are pinned.
    pub(crate) async fn image_place(
        &self,
        id: ImageId,
    ) -> Result<Option<(String, bool, bool)>, Error> {
        sqlx::query_as(
            "select i.name, coalesce(bool_or(v.capabilities->'agent_compatible' = 'true'::jsonb), false), coalesce(bool_and(v.image_digest is not null), false)
             from sandbox_images i left join sandbox_image_versions v on v.sandbox_image_id = i.id where i.id = $1 group by i.id",
        )
        .bind(id.as_uuid())
        .fetch_optional(&self.pool)
        .await
        .map_err(Error::from)
    }
}

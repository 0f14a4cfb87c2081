//! Streams that nodes and egress roles write: their batches are merged into the trail.

use std::{
    collections::{HashMap, HashSet},
    fmt,
};

use cynode_api::{JobId, NodeId, SessionId, TaskId, node_audit_limits};
use cynode_audit::{Chain, Head, Link, genesis};
use sqlx::{PgConnection, Row as _};
use uuid::Uuid;

use super::{
    Db, Error,
    audit::{append, hash_of, signed64, unsigned64},
    commit,
};

/// The result of merging a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MergeOutcome {
    /// Records were added up to this head.
    Merged(Head),
    /// All of them were stored already; the stream continues after this number.
    Repeated(u64),
    /// The stream continues with another record; `None` if it takes no more.
    OutOfOrder { expected: Option<u64> },
    /// Another node or role, or an orchestrator, writes this stream.
    Foreign,
    /// The writer opens streams too fast.
    TooManyStreams,
}

/// Who writes a stream and sends it in batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamWriter {
    Node(NodeId),
    /// An instance of an egress role.
    Role(&'static str, Uuid),
}

impl StreamWriter {
    fn id(self) -> Uuid {
        match self {
            Self::Node(id) => *id.as_uuid(),
            Self::Role(_, instance) => instance,
        }
    }

    const fn role(self) -> Option<&'static str> {
        match self {
            Self::Node(_) => None,
            Self::Role(role, _) => Some(role),
        }
    }
}

impl fmt::Display for StreamWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(id) => write!(f, "node {id}"),
            Self::Role(role, instance) => write!(f, "{role} egress {instance}"),
        }
    }
}

/// The tasks of the sessions and jobs of a node.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeSandboxes {
    pub(crate) sessions: HashMap<SessionId, TaskId>,
    pub(crate) jobs: HashMap<JobId, TaskId>,
}

/// The tasks and sessions that exist, of those that a role names.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExistingTasks {
    pub(crate) tasks: HashSet<TaskId>,
    /// With their tasks.
    pub(crate) sessions: HashMap<SessionId, TaskId>,
}

struct StreamState {
    head: Head,
    is_closed: bool,
    node_id: Option<Uuid>,
    role: Option<String>,
}

impl StreamState {
    fn is_of(&self, writer: StreamWriter) -> bool {
        self.node_id == Some(writer.id()) && self.role.as_deref() == writer.role()
    }
}

impl Db {
    /// Those of the sessions and jobs that are or were on the node.
    pub(crate) async fn sandboxes_of_node(
        &self,
        node: NodeId,
        sessions: &[SessionId],
        jobs: &[JobId],
    ) -> Result<NodeSandboxes, Error> {
        let sessions: Vec<Uuid> = sessions.iter().map(|id| *id.as_uuid()).collect();
        let jobs: Vec<Uuid> = jobs.iter().map(|id| *id.as_uuid()).collect();
        let mut found = NodeSandboxes::default();
        if !sessions.is_empty() {
            let rows: Vec<(Uuid, Uuid)> = sqlx::query_as(
                "select session_id, task_id from sessions where session_id = any($1) and node_id = $2",
            )
            .bind(sessions)
            .bind(node.as_uuid())
            .fetch_all(&self.pool)
            .await?;
            found.sessions = rows
                .into_iter()
                .map(|(id, task)| (SessionId::from_uuid(id), TaskId::from_uuid(task)))
                .collect();
        }
        if !jobs.is_empty() {
            let rows: Vec<(Uuid, Uuid)> = sqlx::query_as(
                "select job_id, task_id from jobs j where job_id = any($1)
                   and (node_id = $2 or exists (select from job_leftovers l where l.job_id = j.job_id and l.node_id = $2))",
            )
            .bind(jobs)
            .bind(node.as_uuid())
            .fetch_all(&self.pool)
            .await?;
            found.jobs = rows
                .into_iter()
                .map(|(id, task)| (JobId::from_uuid(id), TaskId::from_uuid(task)))
                .collect();
        }
        Ok(found)
    }

    /// Those of the tasks and sessions that exist.
    pub(crate) async fn existing_tasks(
        &self,
        tasks: &[TaskId],
        sessions: &[SessionId],
    ) -> Result<ExistingTasks, Error> {
        let tasks: Vec<Uuid> = tasks.iter().map(|id| *id.as_uuid()).collect();
        let sessions: Vec<Uuid> = sessions.iter().map(|id| *id.as_uuid()).collect();
        let mut found = ExistingTasks::default();
        if !tasks.is_empty() {
            let ids: Vec<Uuid> = sqlx::query_scalar("select id from tasks where id = any($1)")
                .bind(tasks)
                .fetch_all(&self.pool)
                .await?;
            found.tasks = ids.into_iter().map(TaskId::from_uuid).collect();
        }
        if !sessions.is_empty() {
            let rows: Vec<(Uuid, Uuid)> = sqlx::query_as(
                "select session_id, task_id from sessions where session_id = any($1)",
            )
            .bind(sessions)
            .fetch_all(&self.pool)
            .await?;
            found.sessions = rows
                .into_iter()
                .map(|(id, task)| (SessionId::from_uuid(id), TaskId::from_uuid(task)))
                .collect();
        }
        Ok(found)
    }

    /// The instance of a role whose records were accepted last.
    pub(crate) async fn role_instance(&self, role: &str) -> Result<Option<Uuid>, Error> {
        sqlx::query_scalar("select instance from egress_roles where role = $1")
            .bind(role)
            .fetch_optional(&self.pool)
            .await
            .map_err(Error::from)
    }

    /// Accepts records of this instance of a role from now on, and closes the streams of others.
    pub(crate) async fn set_role_instance(
        &self,
        role: &'static str,
        instance: Uuid,
    ) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        sqlx::query(
            "insert into egress_roles (role, instance) values ($1, $2)
             on conflict (role) do update set instance = excluded.instance, since = now()",
        )
        .bind(role)
        .bind(instance)
        .execute(&mut *transaction)
        .await?;
        sqlx::query(
            "update audit_streams set closed_at = coalesce(closed_at, now()), settled_at = now()
             where role = $1 and node_id <> $2 and settled_at is null",
        )
        .bind(role)
        .bind(instance)
        .execute(&mut *transaction)
        .await?;
        commit(transaction).await
    }

    /// Stores records of a writer's stream that are not stored yet. The records have consecutive
    /// numbers. Either all of them are stored afterwards, or none more than before.
    pub(crate) async fn merge_records(
        &self,
        writer: StreamWriter,
        stream: Uuid,
        links: &[Link],
    ) -> Result<MergeOutcome, Error> {
        let Some((first, last)) = links.first().zip(links.last()) else {
            return Ok(MergeOutcome::OutOfOrder { expected: Some(1) });
        };
        let mut transaction = self.begin().await?;
        let state = match lock_stream(&mut transaction, stream).await? {
            Some(state) => state,
            None if first.seq != 1 => {
                return Ok(MergeOutcome::OutOfOrder { expected: Some(1) });
            }
            None => {
                if !open_stream(&mut transaction, writer, stream).await? {
                    return Ok(MergeOutcome::TooManyStreams);
                }
                lock_stream(&mut transaction, stream)
                    .await?
                    .ok_or(Error::Unavailable)?
            }
        };
        if !state.is_of(writer) {
            return Ok(MergeOutcome::Foreign);
        }
        let head = state.head;
        if first.seq > head.seq + 1 {
            return Ok(MergeOutcome::OutOfOrder {
                expected: Some(head.seq + 1),
            });
        }
        let is_new = |link: &&Link| link.seq > head.seq;
        let repeated = links.iter().filter(|link| !is_new(link));
        if !are_stored(&mut transaction, stream, head, repeated).await? {
            return Ok(MergeOutcome::OutOfOrder { expected: None });
        }
        let new: Vec<Link> = links.iter().filter(is_new).cloned().collect();
        if new.is_empty() {
            return Ok(MergeOutcome::Repeated(head.seq));
        }
        let mut chain = Chain::resume(stream, head);
        if state.is_closed || !new.iter().all(|link| chain.follow(link)) {
            return Ok(MergeOutcome::OutOfOrder { expected: None });
        }
        if append(&mut *transaction, stream, head.seq, last.seq + 1, &new).await? == 0 {
            return Err(Error::Unavailable);
        }
        commit(transaction).await?;
        Ok(MergeOutcome::Merged(chain.head()))
    }
}

async fn lock_stream(
    connection: &mut PgConnection,
    stream: Uuid,
) -> Result<Option<StreamState>, Error> {
    let row = sqlx::query(
        "select seq, hash, node_id, role, closed_at is not null as is_closed from audit_streams where stream = $1 for update",
    )
    .bind(stream)
    .fetch_optional(connection)
    .await?;
    let Some(row) = row else { return Ok(None) };
    Ok(Some(StreamState {
        head: Head {
            seq: unsigned64(row.try_get("seq")?),
            hash: hash_of(&row.try_get::<Vec<u8>, _>("hash")?)?,
        },
        is_closed: row.try_get("is_closed")?,
        node_id: row.try_get("node_id")?,
        role: row.try_get("role")?,
    }))
}

/// Opens a writer's stream, and closes its earlier ones: a writer sends its streams one after the
/// other. Returns false if it has opened too many within an hour.
async fn open_stream(
    connection: &mut PgConnection,
    writer: StreamWriter,
    stream: Uuid,
) -> Result<bool, Error> {
    let opened: i64 = sqlx::query_scalar(
        "select count(*) from audit_streams where node_id = $1 and opened_at > now() - interval '1 hour'",
    )
    .bind(writer.id())
    .fetch_one(&mut *connection)
    .await?;
    if opened >= node_audit_limits::MAX_STREAMS_PER_HOUR {
        return Ok(false);
    }
    sqlx::query(
        "insert into audit_streams (stream, writer, hash, node_id, role, lease_until) values ($1, $2, $3, $4, $5, 'infinity') on conflict do nothing",
    )
    .bind(stream)
    .bind(writer.to_string())
    .bind(genesis(stream).as_slice())
    .bind(writer.id())
    .bind(writer.role())
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "update audit_streams set closed_at = coalesce(closed_at, now()), settled_at = now()
         where node_id = $1 and role is not distinct from $3 and stream <> $2 and settled_at is null",
    )
    .bind(writer.id())
    .bind(stream)
    .bind(writer.role())
    .execute(connection)
    .await?;
    Ok(true)
}

/// Whether repeated records are those that are stored. Retention may have removed some.
async fn are_stored(
    connection: &mut PgConnection,
    stream: Uuid,
    head: Head,
    repeated: impl Iterator<Item = &Link>,
) -> Result<bool, Error> {
    let repeated: HashMap<i64, &Link> = repeated.map(|link| (signed64(link.seq), link)).collect();
    if repeated.is_empty() {
        return Ok(true);
    }
    let seqs: Vec<i64> = repeated.keys().copied().collect();
    let stored: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("select seq, hash from audit_events where stream = $1 and seq = any($2)")
            .bind(stream)
            .bind(seqs)
            .fetch_all(connection)
            .await?;
    let is_same = |seq: i64, hash: &[u8]| repeated.get(&seq).is_some_and(|link| link.hash == hash);
    Ok(stored.iter().all(|(seq, hash)| is_same(*seq, hash))
        && repeated
            .get(&signed64(head.seq))
            .is_none_or(|link| link.hash == head.hash))
}

//! Streams that nodes write: their batches are merged into the trail.

use std::collections::HashMap;

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
    /// Another node, or an orchestrator, writes this stream.
    Foreign,
    /// The node opens streams too fast.
    TooManyStreams,
}

/// The tasks of the sessions and jobs of a node.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeSandboxes {
    pub(crate) sessions: HashMap<SessionId, TaskId>,
    pub(crate) jobs: HashMap<JobId, TaskId>,
}

struct StreamState {
    head: Head,
    is_closed: bool,
    node_id: Option<Uuid>,
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

    /// Stores records of a node's stream that are not stored yet. The records have consecutive
    /// numbers. Either all of them are stored afterwards, or none more than before.
    pub(crate) async fn merge_node_records(
        &self,
        node: NodeId,
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
                if !open_stream(&mut transaction, node, stream).await? {
                    return Ok(MergeOutcome::TooManyStreams);
                }
                lock_stream(&mut transaction, stream)
                    .await?
                    .ok_or(Error::Unavailable)?
            }
        };
        if state.node_id != Some(*node.as_uuid()) {
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
        "select seq, hash, node_id, closed_at is not null as is_closed from audit_streams where stream = $1 for update",
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
    }))
}

/// Opens a node's stream, and closes its earlier ones: a node sends its streams one after the
/// other. Returns false if the node has opened too many within an hour.
async fn open_stream(
    connection: &mut PgConnection,
    node: NodeId,
    stream: Uuid,
) -> Result<bool, Error> {
    let opened: i64 = sqlx::query_scalar(
        "select count(*) from audit_streams where node_id = $1 and opened_at > now() - interval '1 hour'",
    )
    .bind(node.as_uuid())
    .fetch_one(&mut *connection)
    .await?;
    if opened >= node_audit_limits::MAX_STREAMS_PER_HOUR {
        return Ok(false);
    }
    sqlx::query(
        "insert into audit_streams (stream, writer, hash, node_id, lease_until) values ($1, $2, $3, $4, 'infinity') on conflict do nothing",
    )
    .bind(stream)
    .bind(format!("node {node}"))
    .bind(genesis(stream).as_slice())
    .bind(node.as_uuid())
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "update audit_streams set closed_at = coalesce(closed_at, now()), settled_at = now()
         where node_id = $1 and stream <> $2 and settled_at is null",
    )
    .bind(node.as_uuid())
    .bind(stream)
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

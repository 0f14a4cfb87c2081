//! Nodes and their registration keys.

use std::time::Duration;

use cynode_api::{Capability, Heartbeat, Node, NodeId, NodeState};
use sqlx::{Row as _, postgres::PgRow};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Db, Error, Missing, decode, to_json};

#[derive(Clone, Debug)]
pub(crate) struct NodeRow {
    pub(crate) id: NodeId,
    pub(crate) name: String,
    pub(crate) api_url: String,
    pub(crate) capability: Capability,
    pub(crate) draining: bool,
    pub(crate) not_ready: Option<String>,
    pub(crate) is_lost: bool,
    pub(crate) running_sandboxes: i32,
    pub(crate) token_epoch: i64,
    /// The node was offered tokens of the next epoch and has not used them yet.
    pub(crate) rotating: bool,
    pub(crate) tokens_rotated_at: OffsetDateTime,
    pub(crate) config_revision: i64,
    pub(crate) registered_at: OffsetDateTime,
    pub(crate) last_heartbeat_at: OffsetDateTime,
    /// Time since the last heartbeat, by the database's clock, which all orchestrators share.
    pub(crate) silent_for: Duration,
}

impl NodeRow {
    /// Whether the node has sent a heartbeat within this time.
    pub(crate) fn is_responsive(&self, unreachable_after: Duration) -> bool {
        !self.is_lost && self.silent_for <= unreachable_after
    }

    pub(crate) fn state(&self, unreachable_after: Duration) -> (NodeState, Option<String>) {
        if self.is_lost {
            (
                NodeState::Lost,
                Some("no heartbeat for so long that the node was given up".to_owned()),
            )
        } else if self.silent_for > unreachable_after {
            (
                NodeState::Unreachable,
                Some(format!(
                    "no heartbeat for {:.0} s",
                    self.silent_for.as_secs_f64()
                )),
            )
        } else if self.draining {
            (NodeState::Draining, None)
        } else if let Some(reason) = &self.not_ready {
            (NodeState::NotReady, Some(reason.clone()))
        } else {
            (NodeState::Ready, None)
        }
    }

    pub(crate) fn object(&self, unreachable_after: Duration) -> Node {
        let (state, reason) = self.state(unreachable_after);
        Node {
            id: self.id,
            name: self.name.clone(),
            api_url: self.api_url.clone(),
            state,
            reason,
            draining: self.draining,
            capability: self.capability.clone(),
            running_sandboxes: usize::try_from(self.running_sandboxes).unwrap_or(0),
            config_revision: self.config_revision,
            registered_at: self.registered_at,
            last_heartbeat_at: self.last_heartbeat_at,
        }
    }
}

/// A registration request, with the identity that the node will get.
#[derive(Clone, Debug)]
pub(crate) struct Registration {
    pub(crate) node_id: NodeId,
    pub(crate) name: String,
    pub(crate) api_url: String,
    pub(crate) capability: Capability,
    pub(crate) key_hash: [u8; 32],
    /// A reusable key may replace a node that has been silent for this long.
    pub(crate) silent_after: Duration,
}

fn node(row: &PgRow) -> Result<NodeRow, Error> {
    let capability: serde_json::Value = row.try_get("capability")?;
    let read = || -> Result<NodeRow, sqlx::Error> {
        Ok(NodeRow {
            id: NodeId::from_uuid(row.try_get("id")?),
            name: row.try_get("name")?,
            api_url: row.try_get("api_url")?,
            capability: Capability::default(),
            draining: row.try_get("draining")?,
            not_ready: row.try_get("not_ready")?,
            is_lost: row.try_get("is_lost")?,
            running_sandboxes: row.try_get("running_sandboxes")?,
            token_epoch: row.try_get("token_epoch")?,
            rotating: row
                .try_get::<Option<Vec<u8>>, _>("next_token_hash")?
                .is_some(),
            tokens_rotated_at: row.try_get("tokens_rotated_at")?,
            config_revision: row.try_get("config_revision")?,
            registered_at: row.try_get("registered_at")?,
            last_heartbeat_at: row.try_get("last_heartbeat_at")?,
            silent_for: Duration::try_from_secs_f64(row.try_get("silent_seconds")?)
                .unwrap_or_default(),
        })
    };
    Ok(NodeRow {
        capability: decode(capability)?,
        ..read()?
    })
}

macro_rules! columns {
    () => {
        "n.*, extract(epoch from now() - n.last_heartbeat_at)::float8 as silent_seconds"
    };
}

impl Db {
    pub(crate) async fn insert_node_key(
        &self,
        hash: &[u8; 32],
        reusable: bool,
        by: &str,
        expires_at: Option<OffsetDateTime>,
    ) -> Result<Uuid, Error> {
        let id = Uuid::now_v7();
        sqlx::query(
            "insert into node_keys (id, hash, reusable, created_by, expires_at) values ($1, $2, $3, $4, $5)
             on conflict (hash) do update set reusable = excluded.reusable",
        )
        .bind(id)
        .bind(hash.as_slice())
        .bind(reusable)
        .bind(by)
        .bind(expires_at)
        .execute(&self.pool)
        .await?;
        Ok(id)
    }

    /// Consumes a key and stores the node with its images, atomically. A single-use key stays valid
    /// for the node that used it until that node authenticates, because the response may have been
    /// lost. A reusable key can't take over a node that still sends heartbeats. `None` when the key
    /// is invalid.
    pub(crate) async fn register_node(
        &self,
        new: &Registration,
        seeded: &[String],
        tokens: impl Fn(i64) -> [u8; 32],
    ) -> Result<Option<NodeRow>, Error> {
        let mut transaction = self.begin().await?;
        let key = sqlx::query(
            "update node_keys set used_at = now(), used_by = $2
             where hash = $1 and (expires_at is null or expires_at > now())
               and ((reusable and not exists (select from nodes where id = $2 and last_heartbeat_at > tokens_rotated_at
                                                              and last_heartbeat_at > now() - make_interval(secs => $3)))
                    or (not reusable and (used_by = $2 or (used_by is null and not exists (select from nodes where id = $2)))))
             returning id",
        )
        .bind(new.key_hash.as_slice())
        .bind(new.node_id.as_uuid())
        .bind(new.silent_after.as_secs_f64())
        .fetch_optional(&mut *transaction)
        .await?;
        if key.is_none() {
            return Ok(None);
        }
        // Locked, so that concurrent registrations of one node take different epochs.
        let epoch: Option<i64> =
            sqlx::query_scalar("select token_epoch from nodes where id = $1 for update")
                .bind(new.node_id.as_uuid())
                .fetch_optional(&mut *transaction)
                .await?;
        let epoch = epoch.map_or(1, |epoch| epoch + 1);
        let row = sqlx::query(concat!(
            "insert into nodes as n (id, name, api_url, capability, token_epoch, node_token_hash) values ($1, $2, $3, $4, $5, $6)
             on conflict (id) do update set name = excluded.name, api_url = excluded.api_url, capability = excluded.capability,
                 token_epoch = excluded.token_epoch, node_token_hash = excluded.node_token_hash, next_token_hash = null,
                 tokens_rotated_at = now(), last_heartbeat_at = now(), not_ready = null
             returning ",
            columns!()
        ))
        .bind(new.node_id.as_uuid())
        .bind(&new.name)
        .bind(&new.api_url)
        .bind(to_json(&new.capability))
        .bind(epoch)
        .bind(tokens(epoch).as_slice())
        .fetch_one(&mut *transaction)
        .await?;
        let row = node(&row)?;
        // In the same transaction: a node must not be ready without images.
        super::images::report(&mut transaction, row.id, &new.capability.images, seeded).await?;
        super::commit(transaction).await?;
        Ok(Some(row))
    }

    /// The node of a token. A node that presents its next token has received it: the old token
    /// becomes invalid.
    pub(crate) async fn authenticate_node(
        &self,
        hash: &[u8; 32],
    ) -> Result<Option<NodeRow>, Error> {
        let found = sqlx::query(concat!(
            "select ",
            columns!(),
            ", n.next_token_hash = $1 as shows_next from nodes n where n.node_token_hash = $1 or n.next_token_hash = $1"
        ))
        .bind(hash.as_slice())
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = found else { return Ok(None) };
        if row.try_get::<Option<bool>, _>("shows_next")? != Some(true) {
            return node(&row).map(Some);
        }
        let row = sqlx::query(concat!(
            "update nodes n set node_token_hash = $1, next_token_hash = null, token_epoch = token_epoch + 1, tokens_rotated_at = now()
             where next_token_hash = $1 returning ",
            columns!()
        ))
        .bind(hash.as_slice())
        .fetch_optional(&self.pool)
        .await?;
        if let Some(row) = row {
            return node(&row).map(Some);
        }
        // A concurrent call of the same node has rotated the token.
        let row = sqlx::query(concat!(
            "select ",
            columns!(),
            " from nodes n where n.node_token_hash = $1"
        ))
        .bind(hash.as_slice())
        .fetch_optional(&self.pool)
        .await?;
        row.as_ref().map(node).transpose()
    }

    /// Offers a node tokens of the next epoch.
    pub(crate) async fn offer_token(
        &self,
        id: NodeId,
        epoch: i64,
        next_hash: &[u8; 32],
    ) -> Result<(), Error> {
        sqlx::query("update nodes set next_token_hash = $2 where id = $1 and token_epoch = $3")
            .bind(id.as_uuid())
            .bind(next_hash.as_slice())
            .bind(epoch)
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    /// Returns whether the node was lost. Its single-use registration key expires now.
    pub(crate) async fn heartbeat(&self, id: NodeId, beat: &Heartbeat) -> Result<bool, Error> {
        let row = sqlx::query(
            "with spent as (update node_keys set expires_at = now() where used_by = $1 and not reusable and (expires_at is null or expires_at > now()))
             update nodes n set last_heartbeat_at = now(), running_sandboxes = $2, not_ready = $3, config_revision = $4,
                 capability = coalesce($5, n.capability), api_url = coalesce($6, n.api_url), is_lost = false
             from (select id, is_lost from nodes where id = $1 for update) before where n.id = before.id returning before.is_lost",
        )
        .bind(id.as_uuid())
        .bind(i32::try_from(beat.running_sandboxes).unwrap_or(i32::MAX))
        .bind(&beat.not_ready)
        .bind(beat.config_revision)
        .bind(beat.capability.as_ref().map(to_json))
        .bind(&beat.api_url)
        .fetch_one(&self.pool)
        .await?;
        row.try_get("is_lost").map_err(Error::from)
    }

    pub(crate) async fn nodes(&self) -> Result<Vec<NodeRow>, Error> {
        let rows = sqlx::query(concat!(
            "select ",
            columns!(),
            " from nodes n order by n.name"
        ))
        .fetch_all(&self.pool)
        .await?;
        rows.iter().map(node).collect()
    }

    pub(crate) async fn node(&self, id: NodeId) -> Result<NodeRow, Error> {
        let row = self
            .row(
                concat!("select ", columns!(), " from nodes n where n.id = $1"),
                id.as_uuid(),
            )
            .await?;
        row.as_ref()
            .map(node)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Node(id)))
    }

    pub(crate) async fn drain_node(&self, id: NodeId, drain: bool) -> Result<NodeRow, Error> {
        sqlx::query("update nodes set draining = $2 where id = $1")
            .bind(id.as_uuid())
            .bind(drain)
            .execute(&self.pool)
            .await?;
        self.node(id).await
    }

    /// Marks nodes lost that have been silent for too long, and returns them.
    pub(crate) async fn mark_silent_nodes_lost(
        &self,
        after: Duration,
    ) -> Result<Vec<NodeId>, Error> {
        let ids: Vec<Uuid> =
            sqlx::query_scalar("update nodes set is_lost = true where not is_lost and last_heartbeat_at < now() - make_interval(secs => $1) returning id")
                .bind(after.as_secs_f64())
                .fetch_all(&self.pool)
                .await?;
        Ok(ids.into_iter().map(NodeId::from_uuid).collect())
    }
}

//! The audit trail: records are added, never changed; read in the order in which they were committed.

use cynode_audit::{Chain, Checkpoint, DERIVED_COLUMNS, Hash, Head, Link, Signed, SigningKey};
use cynode_service::ApiError;
use serde_json::{Map, Value};
use sqlx::{Connection as _, PgConnection, PgExecutor, Row as _, postgres::PgRow};
use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Db, commit, problem, stored};

/// A writer hears of its commit after at most so many milliseconds, unless its connection broke.
const NOTICED_AFTER: u32 = 50;
/// A writer that was not heard of for so long is gone. It finds out by itself before it writes again.
const GONE_SECONDS: f64 = 15.0;

/// Checkpoints that one statement reads for an answer.
const CHECKPOINTS_AT_ONCE: i64 = 500;
/// So many records are removed at once.
const TRUNCATED_AT_ONCE: i64 = 50_000;

/// What became of records that were to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    /// They are there.
    Written,
    /// Somebody took this writer for dead and closes what it left open.
    Closed,
    /// One of them closes a call that has its outcome already, or stands where another record does.
    Doubled,
    /// The database does not take one of them as it is.
    Refused,
}

/// A call whose outcome nobody wrote.
#[derive(Clone, Debug)]
pub(crate) struct OpenCall {
    /// When its intent was made, by the clock of whoever made it.
    pub(crate) at: OffsetDateTime,
    /// The same, when this process made it: no clock that is set changes it.
    pub(crate) since: Option<Instant>,
    pub(crate) intent: cynode_api::AuditBody,
}

/// How a checkpoint is signed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signs {
    pub(crate) live: Uuid,
    pub(crate) late: bool,
    pub(crate) all: bool,
}

/// What came of signing.
#[derive(Clone, Debug)]
pub(crate) enum Signature {
    /// A checkpoint with these heads.
    Written(BTreeMap<Uuid, Head>),
    /// None: no stream has moved, or somebody else was faster.
    Nothing,
    /// None: the database has records of the live stream that its writer does not know of.
    Ahead,
}

/// An event that the trail does not tell yet.
pub(crate) type Told = cynode_api::Event;

/// The trail at one moment.
#[derive(Debug)]
pub(crate) struct Snapshot {
    transaction: sqlx::Transaction<'static, sqlx::Postgres>,
    pub(crate) checkpoints: Vec<(u64, String)>,
    /// About how many records there are.
    pub(crate) count: u64,
    /// The newest cursor that was given out.
    pub(crate) last: i64,
    after: i64,
}

/// A record with its cursor, and the columns that are derived from it as they are stored.
#[derive(Debug)]
pub(crate) struct StoredRecord {
    pub(crate) cursor: i64,
    pub(crate) link: Link,
    /// In the order of [`DERIVED_COLUMNS`].
    pub(crate) columns: Vec<Option<String>>,
}

impl Snapshot {
    /// The next records in order; none at the end.
    pub(crate) async fn next(&mut self) -> Result<Vec<StoredRecord>, ApiError> {
        const BATCH: i64 = 5_000;
        let rows = sqlx::query(
            "select cursor, stream, seq, at, body, hash,
                    array[kind, action, call_id::text, subject, project_id::text, task_id::text, session_id::text, job_id::text, decision] as columns
             from audit_events where cursor > $1 order by cursor limit $2",
        )
        .bind(self.after)
        .bind(BATCH)
        .fetch_all(&mut *self.transaction)
        .await
        .map_err(problem)?;
        let record = |row: &PgRow| {
            let (cursor, link) = link(row)?;
            Ok(StoredRecord {
                cursor,
                link,
                columns: row.try_get("columns")?,
            })
        };
        let records = rows
            .iter()
            .map(record)
            .collect::<Result<Vec<_>, sqlx::Error>>()
            .map_err(problem)?;
        self.after = records.last().map_or(self.after, |record| record.cursor);
        Ok(records)
    }

    /// What of the tables is no longer as it was made, and could hide records from whoever reads them.
    pub(crate) async fn changed_tables(&mut self) -> Result<Vec<String>, ApiError> {
        const TABLES: [&str; 5] = [
            "audit_events",
            "audit_streams",
            "audit_head",
            "audit_pump",
            "audit_checkpoints",
        ];
        let mut changed: Vec<String> = sqlx::query_scalar(
            "select format('%s %s', c.relname, what.text) from pg_catalog.pg_class c cross join lateral (values
                 (c.relkind <> 'r', 'is no table any more'),
                 (c.relrowsecurity or c.relforcerowsecurity, 'hides rows by policies'),
                 (exists (select from pg_catalog.pg_rewrite r where r.ev_class = c.oid), 'has rules that rewrite queries'),
                 (exists (select from pg_catalog.pg_inherits i where i.inhparent = c.oid), 'has tables that inherit from it')) as what (is_so, text)
             where c.oid = any(select to_regclass(name) from unnest($1::text[]) as name) and what.is_so order by 1",
        )
        .bind(TABLES.as_slice())
        .fetch_all(&mut *self.transaction)
        .await
        .map_err(problem)?;
        let names: Vec<&str> = DERIVED_COLUMNS.iter().map(|(name, _)| *name).collect();
        let loose: Vec<String> = sqlx::query_scalar(
            "select a.attname::text from pg_catalog.pg_attribute a
             where a.attrelid = to_regclass('audit_events') and a.attname = any($1) and a.attgenerated <> 's' order by a.attnum",
        )
        .bind(names)
        .fetch_all(&mut *self.transaction)
        .await
        .map_err(problem)?;
        changed.extend(
            loose
                .into_iter()
                .map(|name| format!("audit_events.{name} is no longer generated from the body")),
        );
        Ok(changed)
    }
}

fn hash_of(bytes: &[u8]) -> Result<Hash, ApiError> {
    bytes.try_into().map_err(|_| {
        ApiError::new(
            cynode_api::ErrorCode::Internal,
            "what the database holds can't be read",
        )
    })
}

pub(crate) fn signed64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn unsigned64(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

pub(super) fn link(row: &PgRow) -> Result<(i64, Link), sqlx::Error> {
    let hash: Vec<u8> = row.try_get("hash")?;
    let link = Link {
        stream: row.try_get("stream")?,
        seq: unsigned64(row.try_get("seq")?),
        at: row.try_get("at")?,
        body: row.try_get("body")?,
        // One of another length is not the hash of anything.
        hash: hash.try_into().unwrap_or_default(),
    };
    Ok((row.try_get("cursor")?, link))
}

/// Adds records to a stream, in one statement: they and where the stream stands then are there together, or not at all.
async fn append(
    executor: impl PgExecutor<'_>,
    stream: Uuid,
    before: u64,
    open_from: u64,
    links: &[Link],
) -> Result<u64, ApiError> {
    let Some(last) = links.last() else {
        return Ok(0);
    };
    let (seqs, times): (Vec<i64>, Vec<OffsetDateTime>) = links
        .iter()
        .map(|link| (signed64(link.seq), link.at))
        .unzip();
    let bodies: Vec<&Value> = links.iter().map(|link| &link.body).collect();
    let hashes: Vec<&[u8]> = links.iter().map(|link| link.hash.as_slice()).collect();
    // No column of an index changes in the two rows: their new versions stay on their page.
    let added = sqlx::query(
        "with own as (update audit_streams set seq = $3, hash = $4, open_from = $5
                      where stream = $1 and seq = $2 and closed_at is null returning stream),
              head as (update audit_head set last = last + $6 where exists (select from own) returning last - $6 as base)
         insert into audit_events (cursor, stream, seq, at, body, hash)
         select head.base + new.number, $1, new.seq, new.at, new.body, new.hash
         from head, unnest($7::bigint[], $8::timestamptz[], $9::jsonb[], $10::bytea[]) with ordinality as new (seq, at, body, hash, number)",
    )
    .bind(stream)
    .bind(signed64(before))
    .bind(signed64(last.seq))
    .bind(last.hash.as_slice())
    .bind(signed64(open_from))
    .bind(i64::try_from(links.len()).unwrap_or(i64::MAX))
    .bind(seqs)
    .bind(times)
    .bind(bodies)
    .bind(hashes)
    .execute(executor)
    .await
    .map_err(problem)?;
    Ok(added.rows_affected())
}

impl Db {
    pub(crate) async fn open_stream(&self, stream: Uuid, writer: &str) -> Result<(), ApiError> {
        sqlx::query("insert into audit_streams (stream, writer, hash) values ($1, $2, $3) on conflict do nothing")
            .bind(stream)
            .bind(writer)
            .bind(cynode_audit::genesis(stream).as_slice())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }

    /// Adds records. When it is not known whether they came, it is tried again with the same ones: they are there once.
    pub(crate) async fn append_audit(
        connection: &mut PgConnection,
        stream: Uuid,
        open_from: u64,
        links: &[Link],
    ) -> Result<Added, ApiError> {
        let Some((first, last)) = links.first().zip(links.last()) else {
            return Ok(Added::Written);
        };
        if append(&mut *connection, stream, first.seq - 1, open_from, links).await? > 0 {
            return Ok(Added::Written);
        }
        let row = sqlx::query("select seq, hash, closed_at is not null as is_closed from audit_streams where stream = $1")
            .bind(stream)
            .fetch_optional(connection)
            .await
            .map_err(problem)?;
        let Some(row) = row else {
            return Ok(Added::Closed);
        };
        let (seq, hash): (i64, Vec<u8>) = (
            row.try_get("seq").map_err(problem)?,
            row.try_get("hash").map_err(problem)?,
        );
        // An attempt whose answer was lost.
        if seq == signed64(last.seq) && hash == last.hash {
            return Ok(Added::Written);
        }
        Ok(Added::Closed)
    }

    /// Says that the writers of these streams are alive.
    pub(crate) async fn seen_streams(
        connection: &mut PgConnection,
        streams: &[Uuid],
    ) -> Result<(), ApiError> {
        sqlx::query(
            "update audit_streams set seen_at = now() where stream = any($1) and closed_at is null",
        )
        .bind(streams)
        .execute(connection)
        .await
        .map(drop)
        .map_err(problem)
    }

    /// Says that a stream gets no more records. What is open in it is closed by whoever looks next.
    pub(crate) async fn close_stream(&self, stream: Uuid) -> Result<(), ApiError> {
        sqlx::query(
            "update audit_streams set closed_at = coalesce(closed_at, now()) where stream = $1",
        )
        .bind(stream)
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(problem)
    }

    /// A stream whose writer is gone and that may hold open calls: this caller's for the next half minute.
    ///
    /// `own` are those of this process. After the database was away nobody could say that they live: then they have the time to.
    pub(crate) async fn take_dead_stream(&self, own: &[Uuid]) -> Result<Option<Uuid>, ApiError> {
        sqlx::query_scalar(
            "update audit_streams set closed_at = coalesce(closed_at, now()), lease_until = now() + interval '30 seconds'
             where stream = (select stream from audit_streams where settled_at is null and lease_until < now()
                               and stream <> all($2)
                               and (closed_at is not null or (seen_at < now() - make_interval(secs => $1) and pg_postmaster_start_time() < now() - make_interval(secs => $1)))
                             order by lease_until limit 1 for update skip locked) returning stream",
        )
        .bind(GONE_SECONDS)
        .bind(own)
        .fetch_optional(&self.pool)
        .await
        .map_err(problem)
    }

    /// Calls of a stream that have no outcome, oldest first.
    pub(crate) async fn open_calls(
        &self,
        stream: Uuid,
        limit: i64,
    ) -> Result<Vec<OpenCall>, ApiError> {
        let rows = sqlx::query(
            "select i.at, i.body from audit_events i
             where i.stream = $1 and i.seq >= (select open_from from audit_streams where stream = $1) and i.kind = 'intent'
               and not exists (select from audit_events o where o.call_id = i.call_id and o.kind = 'outcome')
             order by i.seq limit $2",
        )
        .bind(stream)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(problem)?;
        rows.iter()
            .map(|row| {
                Ok(OpenCall {
                    at: row.try_get("at").map_err(problem)?,
                    since: None,
                    intent: stored(row.try_get("body").map_err(problem)?)?,
                })
            })
            .collect()
    }

    /// Which of these calls have their outcome.
    pub(crate) async fn closed_calls(&self, calls: &[Uuid]) -> Result<Vec<Uuid>, ApiError> {
        sqlx::query_scalar(
            "select call_id from audit_events where call_id = any($1) and kind = 'outcome'",
        )
        .bind(calls)
        .fetch_all(&self.pool)
        .await
        .map_err(problem)
    }

    /// Whether something was made by a user, and not before a time. `None` when there is nothing under that id.
    pub(crate) async fn was_made(
        &self,
        table: &'static str,
        id: Uuid,
        user: Option<Uuid>,
        since: OffsetDateTime,
    ) -> Result<Option<bool>, ApiError> {
        let statement = if table == "jobs" {
            "select coalesce(owner_id = $2 and created_at >= $3, false) from jobs where job_id = $1"
        } else {
            "select coalesce(owner_id = $2 and created_at >= $3, false) from sessions where session_id = $1"
        };
        sqlx::query_scalar(statement)
            .bind(id)
            .bind(user)
            .bind(since)
            .fetch_optional(&self.pool)
            .await
            .map_err(problem)
    }

    /// Makes room after records that somebody else put where the next ones belong.
    pub(crate) async fn skip_foreign_records(&self) -> Result<(), ApiError> {
        sqlx::query("update audit_head set last = greatest(last, (select max(cursor) from audit_events where cursor < 4611686018427387904))")
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }

    /// Keeps a dead stream for a while longer.
    pub(crate) async fn hold_stream(&self, stream: Uuid) -> Result<(), ApiError> {
        sqlx::query("update audit_streams set lease_until = now() + interval '30 seconds' where stream = $1")
            .bind(stream)
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }

    /// Nothing in it is open any more; or, if something is, somebody looks again soon.
    pub(crate) async fn settle_stream(
        &self,
        stream: Uuid,
        is_settled: bool,
    ) -> Result<(), ApiError> {
        sqlx::query(
            "update audit_streams set settled_at = case when $2 then now() end, lease_until = now() + case when $2 then interval '0' else interval '2 seconds' end
             where stream = $1",
        )
        .bind(stream)
        .bind(is_settled)
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(problem)
    }

    /// Tells in the trail what events told, each once: where it has come to is written with the records. Says where the stream stands
    /// then, if there was anything to tell; nothing when the stream is closed.
    pub(crate) async fn audit_events(
        &self,
        stream: Uuid,
        body: impl Fn(&Told, Option<&Map<String, Value>>) -> Value,
    ) -> Result<Option<Option<Head>>, ApiError> {
        let mut transaction = self.begin().await?;
        let from: i64 = sqlx::query_scalar("select event_cursor from audit_pump for update")
            .fetch_one(&mut *transaction)
            .await
            .map_err(problem)?;
        let rows = sqlx::query("select * from events where cursor > $1 order by cursor limit 500")
            .bind(from)
            .fetch_all(&mut *transaction)
            .await
            .map_err(problem)?;
        let told = rows
            .iter()
            .map(super::events::event)
            .collect::<Result<Vec<_>, _>>()
            .map_err(problem)?;
        let Some(last) = told.last().map(|event| event.cursor) else {
            return Ok(Some(None));
        };
        let head = sqlx::query("select seq, hash from audit_streams where stream = $1 and closed_at is null for update")
            .bind(stream)
            .fetch_optional(&mut *transaction)
            .await
            .map_err(problem)?;
        let Some(head) = head else { return Ok(None) };
        let seq = unsigned64(head.try_get("seq").map_err(problem)?);
        let mut chain = Chain::resume(
            stream,
            Head {
                seq,
                hash: hash_of(&head.try_get::<Vec<u8>, _>("hash").map_err(problem)?)?,
            },
        );
        let ended = ends_of(&mut transaction, &told).await?;
        let of = |event: &Told| {
            event
                .job_id
                .filter(|_| event.state != "accepted" && event.state != "in_progress")
                .and_then(|id| ended.get(id.as_uuid()))
        };
        let links: Vec<Link> = told
            .iter()
            .map(|event| chain.append(OffsetDateTime::now_utc(), body(event, of(event))))
            .collect();
        append(&mut *transaction, stream, seq, chain.head().seq + 1, &links).await?;
        sqlx::query("update audit_pump set event_cursor = $1")
            .bind(last)
            .execute(&mut *transaction)
            .await
            .map_err(problem)?;
        commit(transaction).await?;
        Ok(Some(Some(chain.head())))
    }

    /// The trail as it is at this moment, whatever is added or removed meanwhile.
    pub(crate) async fn audit_snapshot(&self) -> Result<Snapshot, ApiError> {
        let mut transaction = self.begin().await?;
        sqlx::query("set transaction isolation level repeatable read read only")
            .execute(&mut *transaction)
            .await
            .map_err(problem)?;
        let checkpoints: Vec<(i64, String)> =
            sqlx::query_as("select number, line from audit_checkpoints order by number")
                .fetch_all(&mut *transaction)
                .await
                .map_err(problem)?;
        let (last, truncated): (i64, i64) =
            sqlx::query_as("select last, truncated from audit_head")
                .fetch_one(&mut *transaction)
                .await
                .map_err(problem)?;
        let checkpoints = checkpoints
            .into_iter()
            .map(|(number, line)| (unsigned64(number), line))
            .collect();
        Ok(Snapshot {
            transaction,
            checkpoints,
            count: unsigned64(last.saturating_sub(truncated)),
            last,
            after: i64::MIN,
        })
    }

    /// Some of the checkpoints after a number: the next in order.
    pub(crate) async fn some_checkpoints(
        &self,
        after: u64,
    ) -> Result<Vec<(u64, String)>, ApiError> {
        let rows: Vec<(i64, String)> = sqlx::query_as(
            "select number, line from audit_checkpoints where number > $1 order by number limit $2",
        )
        .bind(signed64(after))
        .bind(CHECKPOINTS_AT_ONCE)
        .fetch_all(&self.pool)
        .await
        .map_err(problem)?;
        Ok(rows
            .into_iter()
            .map(|(number, line)| (unsigned64(number), line))
            .collect())
    }

    /// The checkpoints after a number, in order, each with its number.
    pub(crate) async fn checkpoints_by(
        connection: &mut PgConnection,
        after: u64,
    ) -> Result<Vec<(u64, String)>, ApiError> {
        checkpoints(connection, after).await
    }

    /// Signs where the streams stand, if any has moved since what is signed.
    ///
    /// No lock decides who signs: whoever is first takes the next number, and the other one's checkpoint is not written. `signed` is
    /// what the checkpoints say and `own` what this process committed, so that neither a row that claims to be signed nor a head that
    /// somebody changed in the database keeps a record from being signed. `live` is the stream of this process's writer: while the
    /// database is ahead of what that remembers, nothing is signed, unless that has lasted too long (`late`): then it is forged, and
    /// what the writer remembers is. `all` looks at streams too that were settled long ago.
    pub(crate) async fn sign_audit(
        connection: &mut PgConnection,
        key: &SigningKey,
        signed: &HashMap<Uuid, u64>,
        own: impl Fn() -> BTreeMap<Uuid, Head>,
        Signs { live, late, all }: Signs,
    ) -> Result<Signature, ApiError> {
        let mut transaction = connection.begin().await.map_err(problem)?;
        // Before all else: whoever signs from here on takes the number that this one is to have.
        let (before, prev) = last_checkpoint(&mut transaction).await?;
        // First how far the records go, then the heads: every record up to there is under one of them.
        let state = sqlx::query("select last, truncated from audit_head")
            .fetch_one(&mut *transaction)
            .await
            .map_err(problem)?;
        let (cursor, truncated): (i64, i64) = (
            state.try_get("last").map_err(problem)?,
            state.try_get("truncated").map_err(problem)?,
        );
        let streams =
            sqlx::query("select stream, seq, hash from audit_streams where seq > 0 and ($1 or settled_at is null or settled_at > now() - interval '1 day')")
                .bind(all)
                .fetch_all(&mut *transaction)
                .await
                .map_err(problem)?;
        let mut heads = heads_of(&streams)?;
        let is_signed =
            |stream: &Uuid, head: &Head| signed.get(stream).is_some_and(|seq| *seq >= head.seq);
        heads.retain(|stream, head| !is_signed(stream, head));
        let is_ahead = |own: &BTreeMap<Uuid, Head>| {
            heads
                .get(&live)
                .filter(|head| own.get(&live).is_none_or(|own| own.seq < head.seq))
                .copied()
        };
        let mut known = own();
        for _ in 0..NOTICED_AFTER {
            if is_ahead(&known).is_none() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            known = own();
        }
        let mut own = known;
        if let Some(head) = is_ahead(&own) {
            if !late {
                return Ok(Signature::Ahead);
            }
            tracing::error!(stream = %live, seq = head.seq, "Records that are not ours stand in the audit trail: 'cynode audit verify' says which.");
            match own.remove(&live) {
                Some(head) => drop(heads.insert(live, head)),
                None => drop(heads.remove(&live)),
            }
        }
        for (stream, own) in own {
            match heads.get_mut(&stream) {
                // Of events, which are written with what the database says.
                Some(head) if head.seq > own.seq => {}
                Some(head) => {
                    if head.seq == own.seq && head.hash != own.hash {
                        tracing::error!(%stream, seq = head.seq, "The audit trail was changed in the database: 'cynode audit verify' says where.");
                    }
                    *head = own;
                }
                None if is_signed(&stream, &own) => {}
                None => drop(heads.insert(stream, own)),
            }
        }
        if heads.is_empty() {
            return Ok(Signature::Nothing);
        }
        let checkpoint = Checkpoint {
            number: before + 1,
            at: OffsetDateTime::now_utc(),
            prev,
            full: false,
            cursor,
            heads: heads.clone(),
            cut: BTreeMap::new(),
            truncated_records: unsigned64(truncated),
        };
        if write_checkpoint(&mut transaction, checkpoint, key)
            .await?
            .is_none()
        {
            return Ok(Signature::Nothing);
        }
        transaction.commit().await.map_err(problem)?;
        Ok(Signature::Written(heads))
    }

    /// Notes how far streams are signed, for retention. Not with the checkpoint: whoever holds one of these rows holds up this alone.
    pub(crate) async fn note_signed(
        connection: &mut PgConnection,
        heads: &BTreeMap<Uuid, Head>,
    ) -> Result<(), ApiError> {
        let (streams, seqs): (Vec<Uuid>, Vec<i64>) = heads
            .iter()
            .map(|(stream, head)| (*stream, signed64(head.seq)))
            .unzip();
        sqlx::query(
            "insert into audit_signed (stream, seq) select * from unnest($1::uuid[], $2::bigint[])
             on conflict (stream) do update set seq = excluded.seq",
        )
        .bind(streams)
        .bind(seqs)
        .execute(connection)
        .await
        .map(drop)
        .map_err(problem)
    }
}

impl Db {
    /// Makes one checkpoint that says what all say together, and removes those below the full one before it: a line a second would be
    /// there for ever. Only if they are whole, and end with the one that the file outside has last: else they are evidence, and stay.
    /// One generation stays too, for orchestrators that have not copied it yet.
    pub(crate) async fn fold_checkpoints(
        connection: &mut PgConnection,
        key: &SigningKey,
        last: (u64, Hash),
    ) -> Result<(), ApiError> {
        let lines = checkpoints(&mut *connection, 0).await?;
        let public = key.public();
        let folded = tokio::task::block_in_place(|| {
            cynode_audit::fold(
                lines.iter().map(|(number, line)| (*number, line.as_str())),
                &public,
            )
        });
        let (folded, newest) = match folded {
            Ok(Some(folded)) => folded,
            Ok(None) => return Ok(()),
            Err(error) => {
                tracing::error!(%error, "The checkpoints of the audit trail are not whole, so they stay as they are: 'cynode audit verify' says what is wrong.");
                return Ok(());
            }
        };
        if newest != last {
            return Ok(());
        }
        let is_full = |line: &str| Signed::parse(line).is_ok_and(|signed| signed.checkpoint.full);
        let before = lines
            .iter()
            .rev()
            .find(|(_, line)| is_full(line))
            .map_or(0, |(number, _)| *number);
        let mut transaction = connection.begin().await.map_err(problem)?;
        if last_checkpoint(&mut transaction).await? != newest {
            return Ok(());
        }
        let removed: Vec<(i64, String)> = sqlx::query_as(
            "delete from audit_checkpoints where number < $1 returning number, line",
        )
        .bind(signed64(before))
        .fetch_all(&mut *transaction)
        .await
        .map_err(problem)?;
        // What goes is what was read: a line that somebody changed in between stays.
        let known: BTreeMap<i64, &str> = lines
            .iter()
            .map(|(number, line)| (signed64(*number), line.as_str()))
            .collect();
        if removed
            .iter()
            .any(|(number, line)| known.get(number) != Some(&line.as_str()))
        {
            return Ok(());
        }
        // Somebody has signed meanwhile: then it is tried again later.
        if write_checkpoint(
            &mut transaction,
            Checkpoint {
                at: OffsetDateTime::now_utc(),
                ..folded
            },
            key,
        )
        .await?
        .is_none()
        {
            return Ok(());
        }
        transaction.commit().await.map_err(problem)
    }

    /// Whether there are records that are older than so many days, and a day more: so it is done about once a day.
    pub(crate) async fn has_old_records(&self, days: u32) -> Result<bool, ApiError> {
        sqlx::query_scalar(
            "select coalesce((select at from audit_events order by cursor limit 1) < now() - make_interval(days => $1 + case when $1 > 0 then 1 else 0 end), false)",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX - 1))
        .fetch_one(&self.pool)
        .await
        .map_err(problem)
    }

    /// Removes the oldest records that are older than so many days, some at a time, and signs that: which streams were cut, and
    /// where. What is open, or not signed yet, stays. Says how many, and the line.
    pub(crate) async fn truncate_audit(
        &self,
        days: u32,
        key: &SigningKey,
    ) -> Result<Option<(u64, String)>, ApiError> {
        let mut transaction = self.begin().await?;
        // Before all else: whoever signs from here on takes the number that this one is to have, and then nothing is removed.
        let (before, prev) = last_checkpoint(&mut transaction).await?;
        let up_to: Option<i64> = sqlx::query_scalar(
            "with first as (select cursor, stream, seq, at from audit_events order by cursor limit $2),
                  stays as (select min(f.cursor) as cursor from first f join audit_streams s on s.stream = f.stream left join audit_signed g on g.stream = f.stream
                            where f.at >= now() - make_interval(days => $1) or f.seq > coalesce(g.seq, 0) or (s.settled_at is null and f.seq >= s.open_from))
             select max(f.cursor) from first f, stays where stays.cursor is null or f.cursor < stays.cursor",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX))
        .bind(TRUNCATED_AT_ONCE)
        .fetch_one(&mut *transaction)
        .await
        .map_err(problem)?;
        let Some(up_to) = up_to else { return Ok(None) };
        let cut = heads_of(
            &sqlx::query("select distinct on (stream) stream, seq, hash from audit_events where cursor <= $1 order by stream, seq desc")
                .bind(up_to)
                .fetch_all(&mut *transaction)
                .await
                .map_err(problem)?,
        )?;
        let removed = sqlx::query("delete from audit_events where cursor <= $1")
            .bind(up_to)
            .execute(&mut *transaction)
            .await
            .map_err(problem)?
            .rows_affected();
        // Streams of which nothing is left are forgotten with their last record.
        sqlx::query("delete from audit_streams s where settled_at is not null and not exists (select from audit_events e where e.stream = s.stream)")
            .execute(&mut *transaction)
            .await
            .map_err(problem)?;
        sqlx::query("delete from audit_signed g where not exists (select from audit_streams s where s.stream = g.stream)")
            .execute(&mut *transaction)
            .await
            .map_err(problem)?;
        let state = sqlx::query(
            "update audit_head set truncated = truncated + $1 returning last, truncated",
        )
        .bind(signed64(removed))
        .fetch_one(&mut *transaction)
        .await
        .map_err(problem)?;
        let (cursor, truncated): (i64, i64) = (
            state.try_get("last").map_err(problem)?,
            state.try_get("truncated").map_err(problem)?,
        );
        let heads = heads_of(
            &sqlx::query("select stream, seq, hash from audit_streams where seq > 0")
                .fetch_all(&mut *transaction)
                .await
                .map_err(problem)?,
        )?;
        // Cuts of streams that are still there go on to count: those that the full checkpoint before this one has.
        let lines: Vec<String> =
            sqlx::query_scalar("select line from audit_checkpoints order by number")
                .fetch_all(&mut *transaction)
                .await
                .map_err(problem)?;
        let mut cuts = BTreeMap::new();
        for signed in lines.iter().filter_map(|line| Signed::parse(line).ok()) {
            cuts.extend(signed.checkpoint.cut);
        }
        cuts.extend(cut);
        cuts.retain(|stream, _| heads.contains_key(stream));
        let checkpoint = Checkpoint {
            number: before + 1,
            at: OffsetDateTime::now_utc(),
            prev,
            full: true,
            cursor,
            heads,
            cut: cuts,
            truncated_records: unsigned64(truncated),
        };
        let number = signed64(checkpoint.number);
        let heads = checkpoint.heads.clone();
        let Some(line) = write_checkpoint(&mut transaction, checkpoint, key).await? else {
            return Ok(None);
        };
        Self::note_signed(&mut transaction, &heads).await?;
        sqlx::query("delete from audit_checkpoints where number < $1")
            .bind(number)
            .execute(&mut *transaction)
            .await
            .map_err(problem)?;
        commit(transaction).await?;
        Ok(Some((removed, line)))
    }
}

/// How jobs ended: code, node, image, and of the output size and hash as it is kept.
async fn ends_of(
    connection: &mut PgConnection,
    told: &[Told],
) -> Result<BTreeMap<Uuid, Map<String, Value>>, ApiError> {
    let ids: Vec<Uuid> = told
        .iter()
        .filter_map(|event| event.job_id)
        .map(|id| *id.as_uuid())
        .collect();
    if ids.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows: Vec<(Uuid, Value)> = sqlx::query_as(
        "select job_id, jsonb_strip_nulls(jsonb_build_object('exit_code', object->'exit_code', 'signal', object->'signal', 'node_id', object->'node_id',
                    'image_ref', object->'image_ref', 'image_digest', object->'image_digest', 'error', object#>'{error,code}',
                    'stdout_sha256', encode(sha256(convert_to(object->>'stdout', 'UTF8')), 'hex'), 'stderr_sha256', encode(sha256(convert_to(object->>'stderr', 'UTF8')), 'hex'),
                    'truncated', object->'truncated', 'output_sha256', output_sha256))
         from jobs where job_id = any($1)",
    )
    .bind(ids)
    .fetch_all(connection)
    .await
    .map_err(problem)?;
    Ok(rows
        .into_iter()
        .filter_map(|(id, end)| Some((id, end.as_object()?.clone())))
        .collect())
}

fn heads_of(rows: &[PgRow]) -> Result<BTreeMap<Uuid, Head>, ApiError> {
    let mut heads = BTreeMap::new();
    for row in rows {
        let seq = unsigned64(row.try_get("seq").map_err(problem)?);
        heads.insert(
            row.try_get::<Uuid, _>("stream").map_err(problem)?,
            Head {
                seq,
                hash: hash_of(&row.try_get::<Vec<u8>, _>("hash").map_err(problem)?)?,
            },
        );
    }
    Ok(heads)
}

/// The number and hash of the newest checkpoint.
async fn last_checkpoint(connection: &mut PgConnection) -> Result<(u64, Hash), ApiError> {
    let last: Option<(i64, String)> =
        sqlx::query_as("select number, line from audit_checkpoints order by number desc limit 1")
            .fetch_optional(connection)
            .await
            .map_err(problem)?;
    let Some((number, line)) = last else {
        return Ok((0, Checkpoint::FIRST));
    };
    // One that can't be read any more is what `verify` is for; signing goes on after it.
    let signed = Signed::parse(&line).inspect_err(
        |error| tracing::error!(%error, number, "A checkpoint of the audit trail can't be read."),
    );
    Ok((
        unsigned64(number),
        signed.map_or([0; 32], |signed| signed.hash),
    ))
}

/// Writes the line of a checkpoint, and says it; not when there is one with its number.
async fn write_checkpoint(
    connection: &mut PgConnection,
    checkpoint: Checkpoint,
    key: &SigningKey,
) -> Result<Option<String>, ApiError> {
    let number = signed64(checkpoint.number);
    let line = checkpoint.sign(key).to_line();
    let written = sqlx::query(
        "insert into audit_checkpoints (number, line) values ($1, $2) on conflict do nothing",
    )
    .bind(number)
    .bind(&line)
    .execute(connection)
    .await
    .map_err(problem)?;
    Ok((written.rows_affected() > 0).then_some(line))
}

async fn checkpoints(
    executor: impl PgExecutor<'_>,
    after: u64,
) -> Result<Vec<(u64, String)>, ApiError> {
    let rows: Vec<(i64, String)> = sqlx::query_as(
        "select number, line from audit_checkpoints where number > $1 order by number",
    )
    .bind(signed64(after))
    .fetch_all(executor)
    .await
    .map_err(problem)?;
    Ok(rows
        .into_iter()
        .map(|(number, line)| (unsigned64(number), line))
        .collect())
}

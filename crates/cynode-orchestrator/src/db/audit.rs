//! The audit trail: records are appended, never changed, and read in commit order.

use cynode_api::Event;
use cynode_audit::{
    Chain, Checkpoint, DERIVED_COLUMNS, Hash, Head, Link, SignedCheckpoint, SigningKey,
};
use serde_json::{Map, Value};
use sqlx::{Connection as _, PgConnection, PgExecutor, Row as _, postgres::PgRow};
use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Db, Error, commit, decode};

/// Milliseconds within which a writer learns of its commit, unless its connection broke.
const COMMIT_NOTICE_MS: u32 = 50;
/// A writer that was silent for this long counts as dead. It finds out before its next write.
const DEAD_WRITER_SECONDS: f64 = 15.0;

/// Checkpoints per statement when they are listed.
const CHECKPOINT_BATCH: i64 = 500;
/// Records per truncation.
const TRUNCATION_BATCH: i64 = 50_000;

/// The result of appending records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AppendOutcome {
    Written,
    /// Another orchestrator considers this writer dead and closes its open calls.
    Closed,
    /// A record closes a call that already has an outcome, or its cursor or sequence number is
    /// taken.
    Duplicate,
    /// The database rejects the content of a record.
    Rejected,
}

/// A call without an outcome.
#[derive(Clone, Debug)]
pub(crate) struct OpenCallRow {
    /// When the intent was recorded, by its writer's clock.
    pub(crate) at: OffsetDateTime,
    /// The same by the monotonic clock, if this process recorded it.
    pub(crate) since: Option<Instant>,
    pub(crate) intent: cynode_api::AuditBody,
}

/// The conditions under which a checkpoint is signed; see `sign_audit`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SigningConditions {
    pub(crate) live: Uuid,
    pub(crate) late: bool,
    pub(crate) all: bool,
}

/// The result of signing.
#[derive(Clone, Debug)]
pub(crate) enum SigningOutcome {
    /// A checkpoint with these heads was stored.
    Written(BTreeMap<Uuid, Head>),
    /// No stream has advanced, or another orchestrator was faster.
    Unchanged,
    /// Nothing was signed: the database has records of the live stream that its writer does not
    /// know.
    Ahead,
}

/// A consistent snapshot of the trail.
#[derive(Debug)]
pub(crate) struct Snapshot {
    transaction: sqlx::Transaction<'static, sqlx::Postgres>,
    pub(crate) checkpoints: Vec<(u64, String)>,
    /// The approximate number of records.
    pub(crate) count: u64,
    /// The newest cursor.
    pub(crate) last: i64,
    after: i64,
}

/// A record with its cursor and the stored values of its derived columns.
#[derive(Debug)]
pub(crate) struct StoredRecord {
    pub(crate) cursor: i64,
    pub(crate) link: Link,
    /// In the order of [`DERIVED_COLUMNS`].
    pub(crate) columns: Vec<Option<String>>,
}

impl Snapshot {
    /// The next batch of records in order; empty at the end.
    pub(crate) async fn next(&mut self) -> Result<Vec<StoredRecord>, Error> {
        const BATCH: i64 = 5_000;
        let rows = sqlx::query(
            "select cursor, stream, seq, at, body, hash,
                    array[kind, action, call_id::text, subject, project_id::text, task_id::text, session_id::text, job_id::text, decision] as columns
             from audit_events where cursor > $1 order by cursor limit $2",
        )
        .bind(self.after)
        .bind(BATCH)
        .fetch_all(&mut *self.transaction)
        .await?;
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
            .collect::<Result<Vec<_>, sqlx::Error>>()?;
        self.after = records.last().map_or(self.after, |record| record.cursor);
        Ok(records)
    }

    /// Changes to the table definitions that could hide records from readers.
    pub(crate) async fn changed_tables(&mut self) -> Result<Vec<String>, Error> {
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
        .await?;
        let names: Vec<&str> = DERIVED_COLUMNS.iter().map(|(name, _)| *name).collect();
        let loose: Vec<String> = sqlx::query_scalar(
            "select a.attname::text from pg_catalog.pg_attribute a
             where a.attrelid = to_regclass('audit_events') and a.attname = any($1) and a.attgenerated <> 's' order by a.attnum",
        )
        .bind(names)
        .fetch_all(&mut *self.transaction)
        .await?;
        changed.extend(
            loose
                .into_iter()
                .map(|name| format!("audit_events.{name} is no longer generated from the body")),
        );
        Ok(changed)
    }
}

pub(super) fn hash_of(bytes: &[u8]) -> Result<Hash, Error> {
    bytes.try_into().map_err(|_| Error::undecodable())
}

pub(crate) fn signed64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn unsigned64(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

pub(super) fn link(row: &PgRow) -> Result<(i64, Link), sqlx::Error> {
    let hash: Vec<u8> = row.try_get("hash")?;
    let link = Link {
        stream: row.try_get("stream")?,
        seq: unsigned64(row.try_get("seq")?),
        at: row.try_get("at")?,
        body: row.try_get("body")?,
        // A value of another length is no valid hash.
        hash: hash.try_into().unwrap_or_default(),
    };
    Ok((row.try_get("cursor")?, link))
}

/// Appends records and updates the stream's head in one statement, so that both are stored or
/// neither.
pub(super) async fn append(
    executor: impl PgExecutor<'_>,
    stream: Uuid,
    before: u64,
    open_from: u64,
    links: &[Link],
) -> Result<u64, Error> {
    let Some(last) = links.last() else {
        return Ok(0);
    };
    let (seqs, times): (Vec<i64>, Vec<OffsetDateTime>) = links
        .iter()
        .map(|link| (signed64(link.seq), link.at))
        .unzip();
    let bodies: Vec<&Value> = links.iter().map(|link| &link.body).collect();
    let hashes: Vec<&[u8]> = links.iter().map(|link| link.hash.as_slice()).collect();
    // Neither row has an indexed column that changes, so the updates stay on their pages.
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
    .await?;
    Ok(added.rows_affected())
}

impl Db {
    pub(crate) async fn open_stream(&self, stream: Uuid, writer: &str) -> Result<(), Error> {
        sqlx::query("insert into audit_streams (stream, writer, hash) values ($1, $2, $3) on conflict do nothing")
            .bind(stream)
            .bind(writer)
            .bind(cynode_audit::genesis(stream).as_slice())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    /// Appends records. Idempotent: an append whose result is unknown is retried with the same
    /// records.
    pub(crate) async fn append_audit(
        connection: &mut PgConnection,
        stream: Uuid,
        open_from: u64,
        links: &[Link],
    ) -> Result<AppendOutcome, Error> {
        let Some((first, last)) = links.first().zip(links.last()) else {
            return Ok(AppendOutcome::Written);
        };
        if append(&mut *connection, stream, first.seq - 1, open_from, links).await? > 0 {
            return Ok(AppendOutcome::Written);
        }
        let row = sqlx::query("select seq, hash, closed_at is not null as is_closed from audit_streams where stream = $1")
            .bind(stream)
            .fetch_optional(connection)
            .await?;
        let Some(row) = row else {
            return Ok(AppendOutcome::Closed);
        };
        let (seq, hash): (i64, Vec<u8>) = (row.try_get("seq")?, row.try_get("hash")?);
        // An earlier attempt succeeded, and its reply was lost.
        if seq == signed64(last.seq) && hash == last.hash {
            return Ok(AppendOutcome::Written);
        }
        Ok(AppendOutcome::Closed)
    }

    /// Heartbeat of the writers of these streams.
    pub(crate) async fn touch_streams(
        connection: &mut PgConnection,
        streams: &[Uuid],
    ) -> Result<(), Error> {
        sqlx::query(
            "update audit_streams set seen_at = now() where stream = any($1) and closed_at is null",
        )
        .bind(streams)
        .execute(connection)
        .await
        .map(drop)
        .map_err(Error::from)
    }

    /// Closes a stream. Its open calls are closed by the next reconciler.
    pub(crate) async fn close_stream(&self, stream: Uuid) -> Result<(), Error> {
        sqlx::query(
            "update audit_streams set closed_at = coalesce(closed_at, now()) where stream = $1",
        )
        .bind(stream)
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(Error::from)
    }

    /// Leases a stream whose writer is dead and that may have open calls, for half a minute.
    ///
    /// `own` are the streams of this process. After an outage of the database no heartbeats could
    /// be stored, so writers get time to send one.
    pub(crate) async fn take_dead_stream(&self, own: &[Uuid]) -> Result<Option<Uuid>, Error> {
        sqlx::query_scalar(
            "update audit_streams set closed_at = coalesce(closed_at, now()), lease_until = now() + interval '30 seconds'
             where stream = (select stream from audit_streams where settled_at is null and lease_until < now()
                               and stream <> all($2)
                               and (closed_at is not null or (seen_at < now() - make_interval(secs => $1) and pg_postmaster_start_time() < now() - make_interval(secs => $1)))
                             order by lease_until limit 1 for update skip locked) returning stream",
        )
        .bind(DEAD_WRITER_SECONDS)
        .bind(own)
        .fetch_optional(&self.pool)
        .await
        .map_err(Error::from)
    }

    /// Calls of a stream without an outcome, oldest first.
    pub(crate) async fn open_calls(
        &self,
        stream: Uuid,
        limit: i64,
    ) -> Result<Vec<OpenCallRow>, Error> {
        let rows = sqlx::query(
            "select i.at, i.body from audit_events i
             where i.stream = $1 and i.seq >= (select open_from from audit_streams where stream = $1) and i.kind = 'intent'
               and not exists (select from audit_events o where o.call_id = i.call_id and o.kind = 'outcome')
             order by i.seq limit $2",
        )
        .bind(stream)
        .bind(limit)
        .fetch_all(&self.pool)
        .await?;
        rows.iter()
            .map(|row| {
                Ok(OpenCallRow {
                    at: row.try_get("at")?,
                    since: None,
                    intent: decode(row.try_get("body")?)?,
                })
            })
            .collect()
    }

    /// Those of `calls` that have an outcome.
    pub(crate) async fn closed_calls(&self, calls: &[Uuid]) -> Result<Vec<Uuid>, Error> {
        sqlx::query_scalar(
            "select call_id from audit_events where call_id = any($1) and kind = 'outcome'",
        )
        .bind(calls)
        .fetch_all(&self.pool)
        .await
        .map_err(Error::from)
    }

    /// Whether a session or job was created by the user and not before `since`. `None` when the id
    /// does not exist.
    pub(crate) async fn was_created(
        &self,
        table: &'static str,
        id: Uuid,
        user: Option<Uuid>,
        since: OffsetDateTime,
    ) -> Result<Option<bool>, Error> {
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
            .map_err(Error::from)
    }

    /// Advances the cursor past records that a third party inserted.
    pub(crate) async fn skip_foreign_records(&self) -> Result<(), Error> {
        sqlx::query("update audit_head set last = greatest(last, (select max(cursor) from audit_events where cursor < 4611686018427387904))")
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    /// Extends the lease of a dead stream.
    pub(crate) async fn extend_stream_lease(&self, stream: Uuid) -> Result<(), Error> {
        sqlx::query("update audit_streams set lease_until = now() + interval '30 seconds' where stream = $1")
            .bind(stream)
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    /// Marks a stream settled, or schedules the next attempt while it has open calls.
    pub(crate) async fn settle_stream(&self, stream: Uuid, is_settled: bool) -> Result<(), Error> {
        sqlx::query(
            "update audit_streams set settled_at = case when $2 then now() end, lease_until = now() + case when $2 then interval '0' else interval '2 seconds' end
             where stream = $1",
        )
        .bind(stream)
        .bind(is_settled)
        .execute(&self.pool)
        .await
        .map(drop)
        .map_err(Error::from)
    }

    /// Copies new events into the trail, each once: the position is stored with the records.
    /// Returns the head of the stream if there were any; `None` when the stream is closed.
    pub(crate) async fn audit_events(
        &self,
        stream: Uuid,
        body: impl Fn(&Event, Option<&Map<String, Value>>) -> Value,
    ) -> Result<Option<Option<Head>>, Error> {
        let mut transaction = self.begin().await?;
        let from: i64 = sqlx::query_scalar("select event_cursor from audit_pump for update")
            .fetch_one(&mut *transaction)
            .await?;
        let rows = sqlx::query("select * from events where cursor > $1 order by cursor limit 500")
            .bind(from)
            .fetch_all(&mut *transaction)
            .await?;
        let events = rows
            .iter()
            .map(super::events::event)
            .collect::<Result<Vec<_>, _>>()?;
        let Some(last) = events.last().map(|event| event.cursor) else {
            return Ok(Some(None));
        };
        let head = sqlx::query("select seq, hash from audit_streams where stream = $1 and closed_at is null for update")
            .bind(stream)
            .fetch_optional(&mut *transaction)
            .await?;
        let Some(head) = head else { return Ok(None) };
        let seq = unsigned64(head.try_get("seq")?);
        let mut chain = Chain::resume(
            stream,
            Head {
                seq,
                hash: hash_of(&head.try_get::<Vec<u8>, _>("hash")?)?,
            },
        );
        let ended = ends_of(&mut transaction, &events).await?;
        let end_of = |event: &Event| {
            event
                .job_id
                .filter(|_| event.state != "accepted" && event.state != "in_progress")
                .and_then(|id| ended.get(id.as_uuid()))
        };
        let links: Vec<Link> = events
            .iter()
            .map(|event| chain.append(OffsetDateTime::now_utc(), body(event, end_of(event))))
            .collect();
        append(&mut *transaction, stream, seq, chain.head().seq + 1, &links).await?;
        sqlx::query("update audit_pump set event_cursor = $1")
            .bind(last)
            .execute(&mut *transaction)
            .await?;
        commit(transaction).await?;
        Ok(Some(Some(chain.head())))
    }

    /// A snapshot of the trail, unaffected by concurrent changes.
    pub(crate) async fn audit_snapshot(&self) -> Result<Snapshot, Error> {
        let mut transaction = self.begin().await?;
        sqlx::query("set transaction isolation level repeatable read read only")
            .execute(&mut *transaction)
            .await?;
        let checkpoints: Vec<(i64, String)> =
            sqlx::query_as("select number, line from audit_checkpoints order by number")
                .fetch_all(&mut *transaction)
                .await?;
        let (last, truncated): (i64, i64) =
            sqlx::query_as("select last, truncated from audit_head")
                .fetch_one(&mut *transaction)
                .await?;
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

    /// The next batch of checkpoints after a number.
    pub(crate) async fn checkpoint_batch(&self, after: u64) -> Result<Vec<(u64, String)>, Error> {
        let rows: Vec<(i64, String)> = sqlx::query_as(
            "select number, line from audit_checkpoints where number > $1 order by number limit $2",
        )
        .bind(signed64(after))
        .bind(CHECKPOINT_BATCH)
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .map(|(number, line)| (unsigned64(number), line))
            .collect())
    }

    /// All checkpoints after a number, in order, with their numbers.
    pub(crate) async fn checkpoints_by(
        connection: &mut PgConnection,
        after: u64,
    ) -> Result<Vec<(u64, String)>, Error> {
        checkpoints(connection, after).await
    }

    /// Signs the heads of the streams, if any has advanced since the last checkpoint.
    ///
    /// No lock decides who signs: the first orchestrator takes the next number, and a later one
    /// stores nothing. `signed` comes from the checkpoints and `own` from this process's commits,
    /// so that neither a forged row nor a changed head in the database keeps a record from being
    /// signed. `live` is the stream of this process's writer: while the database is ahead of the
    /// writer's memory nothing is signed, unless that has lasted too long (`late`): then the
    /// records are forged, and the remembered head is signed. `all` includes streams that were
    /// settled long ago.
    pub(crate) async fn sign_audit(
        connection: &mut PgConnection,
        key: &SigningKey,
        signed: &HashMap<Uuid, u64>,
        own: impl Fn() -> BTreeMap<Uuid, Head>,
        SigningConditions { live, late, all }: SigningConditions,
    ) -> Result<SigningOutcome, Error> {
        let mut transaction = connection.begin().await?;
        // First: an orchestrator that signs from now on takes this checkpoint's number.
        let (before, prev) = last_checkpoint(&mut transaction).await?;
        // The cursor before the heads: so every record up to the cursor is under one of the heads.
        let state = sqlx::query("select last, truncated from audit_head")
            .fetch_one(&mut *transaction)
            .await?;
        let (cursor, truncated): (i64, i64) = (state.try_get("last")?, state.try_get("truncated")?);
        let streams =
            sqlx::query("select stream, seq, hash from audit_streams where seq > 0 and ($1 or settled_at is null or settled_at > now() - interval '1 day')")
                .bind(all)
                .fetch_all(&mut *transaction)
                .await?;
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
        for _ in 0..COMMIT_NOTICE_MS {
            if is_ahead(&known).is_none() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            known = own();
        }
        let mut own = known;
        if let Some(head) = is_ahead(&own) {
            if !late {
                return Ok(SigningOutcome::Ahead);
            }
            tracing::error!(stream = %live, seq = head.seq, "The audit trail contains foreign records; run 'cynode audit verify'.");
            match own.remove(&live) {
                Some(head) => drop(heads.insert(live, head)),
                None => drop(heads.remove(&live)),
            }
        }
        for (stream, own) in own {
            match heads.get_mut(&stream) {
                // Event streams are written from the database's own head.
                Some(head) if head.seq > own.seq => {}
                Some(head) => {
                    if head.seq == own.seq && head.hash != own.hash {
                        tracing::error!(%stream, seq = head.seq, "The audit trail was changed in the database; run 'cynode audit verify'.");
                    }
                    *head = own;
                }
                None if is_signed(&stream, &own) => {}
                None => drop(heads.insert(stream, own)),
            }
        }
        if heads.is_empty() {
            return Ok(SigningOutcome::Unchanged);
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
            return Ok(SigningOutcome::Unchanged);
        }
        transaction.commit().await?;
        Ok(SigningOutcome::Written(heads))
    }

    /// Records how far streams are signed, for retention. Separate from the checkpoint, so that a
    /// lock on these rows can't delay signing.
    pub(crate) async fn record_signed(
        connection: &mut PgConnection,
        heads: &BTreeMap<Uuid, Head>,
    ) -> Result<(), Error> {
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
        .map_err(Error::from)
    }
}

impl Db {
    /// Folds all checkpoints into one full checkpoint, and removes those before the previous full
    /// one: otherwise a line per second would stay for ever. Does so only if the chain is intact
    /// and ends with the last line of the local file; otherwise the lines are evidence and stay.
    /// One generation stays for orchestrators that have not copied it yet.
    pub(crate) async fn fold_checkpoints(
        connection: &mut PgConnection,
        key: &SigningKey,
        last: (u64, Hash),
    ) -> Result<(), Error> {
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
                tracing::error!(%error, "The chain of audit checkpoints is broken, so it is not folded; run 'cynode audit verify'.");
                return Ok(());
            }
        };
        if newest != last {
            return Ok(());
        }
        let is_full =
            |line: &str| SignedCheckpoint::parse(line).is_ok_and(|signed| signed.checkpoint.full);
        let before = lines
            .iter()
            .rev()
            .find(|(_, line)| is_full(line))
            .map_or(0, |(number, _)| *number);
        let mut transaction = connection.begin().await?;
        if last_checkpoint(&mut transaction).await? != newest {
            return Ok(());
        }
        let removed: Vec<(i64, String)> = sqlx::query_as(
            "delete from audit_checkpoints where number < $1 returning number, line",
        )
        .bind(signed64(before))
        .fetch_all(&mut *transaction)
        .await?;
        // Removes only what was read: a line that was changed since stays.
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
        // Another checkpoint was signed meanwhile: retry later.
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
        transaction.commit().await.map_err(Error::from)
    }

    /// Whether there are records older than `days` and one more day, so that truncation runs about
    /// once a day.
    pub(crate) async fn has_expired_records(&self, days: u32) -> Result<bool, Error> {
        sqlx::query_scalar(
            "select coalesce((select at from audit_events order by cursor limit 1) < now() - make_interval(days => $1 + case when $1 > 0 then 1 else 0 end), false)",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX - 1))
        .fetch_one(&self.pool)
        .await
        .map_err(Error::from)
    }

    /// Removes a batch of records older than `days`, and signs which streams were cut, and where.
    /// Open and unsigned records stay. Returns the number of records and the checkpoint line.
    pub(crate) async fn truncate_audit(
        &self,
        days: u32,
        key: &SigningKey,
    ) -> Result<Option<(u64, String)>, Error> {
        let mut transaction = self.begin().await?;
        // First: an orchestrator that signs from now on takes this checkpoint's number, and then
        // nothing is removed.
        let (before, prev) = last_checkpoint(&mut transaction).await?;
        let up_to: Option<i64> = sqlx::query_scalar(
            "with first as (select cursor, stream, seq, at from audit_events order by cursor limit $2),
                  stays as (select min(f.cursor) as cursor from first f join audit_streams s on s.stream = f.stream left join audit_signed g on g.stream = f.stream
                            where f.at >= now() - make_interval(days => $1) or f.seq > coalesce(g.seq, 0) or (s.settled_at is null and f.seq >= s.open_from))
             select max(f.cursor) from first f, stays where stays.cursor is null or f.cursor < stays.cursor",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX))
        .bind(TRUNCATION_BATCH)
        .fetch_one(&mut *transaction)
        .await?;
        let Some(up_to) = up_to else { return Ok(None) };
        let cut = heads_of(
            &sqlx::query("select distinct on (stream) stream, seq, hash from audit_events where cursor <= $1 order by stream, seq desc")
                .bind(up_to)
                .fetch_all(&mut *transaction)
                .await?,
        )?;
        let removed = sqlx::query("delete from audit_events where cursor <= $1")
            .bind(up_to)
            .execute(&mut *transaction)
            .await?
            .rows_affected();
        // Streams without records are deleted.
        sqlx::query("delete from audit_streams s where settled_at is not null and not exists (select from audit_events e where e.stream = s.stream)")
            .execute(&mut *transaction)
            .await?;
        sqlx::query("delete from audit_signed g where not exists (select from audit_streams s where s.stream = g.stream)")
            .execute(&mut *transaction)
            .await?;
        let state = sqlx::query(
            "update audit_head set truncated = truncated + $1 returning last, truncated",
        )
        .bind(signed64(removed))
        .fetch_one(&mut *transaction)
        .await?;
        let (cursor, truncated): (i64, i64) = (state.try_get("last")?, state.try_get("truncated")?);
        let heads = heads_of(
            &sqlx::query("select stream, seq, hash from audit_streams where seq > 0")
                .fetch_all(&mut *transaction)
                .await?,
        )?;
        // Earlier cuts of streams that still exist stay in force: the previous full checkpoint has
        // them.
        let lines: Vec<String> =
            sqlx::query_scalar("select line from audit_checkpoints order by number")
                .fetch_all(&mut *transaction)
                .await?;
        let mut cuts = BTreeMap::new();
        for signed in lines
            .iter()
            .filter_map(|line| SignedCheckpoint::parse(line).ok())
        {
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
        Self::record_signed(&mut transaction, &heads).await?;
        sqlx::query("delete from audit_checkpoints where number < $1")
            .bind(number)
            .execute(&mut *transaction)
            .await?;
        commit(transaction).await?;
        Ok(Some((removed, line)))
    }
}

/// How jobs ended: exit code, node, image, hashes of the stored output and of the result, and what
/// the result says in short.
async fn ends_of(
    connection: &mut PgConnection,
    events: &[Event],
) -> Result<BTreeMap<Uuid, Map<String, Value>>, Error> {
    let ids: Vec<Uuid> = events
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
                    'truncated', object->'truncated', 'output_sha256', output_sha256,
                    'result_sha256', result_summary->'sha256', 'steps', result_summary->'steps', 'failure_code', result_summary->'failure_code',
                    'reported_by', case when result_summary is not null then object->'reported_by' end,
                    'artifacts', nullif(jsonb_array_length(object->'artifacts'), 0)))
         from jobs where job_id = any($1)",
    )
    .bind(ids)
    .fetch_all(connection)
    .await?;
    Ok(rows
        .into_iter()
        .filter_map(|(id, end)| Some((id, end.as_object()?.clone())))
        .collect())
}

fn heads_of(rows: &[PgRow]) -> Result<BTreeMap<Uuid, Head>, Error> {
    let mut heads = BTreeMap::new();
    for row in rows {
        let seq = unsigned64(row.try_get("seq")?);
        heads.insert(
            row.try_get::<Uuid, _>("stream")?,
            Head {
                seq,
                hash: hash_of(&row.try_get::<Vec<u8>, _>("hash")?)?,
            },
        );
    }
    Ok(heads)
}

/// The number and hash of the newest checkpoint.
async fn last_checkpoint(connection: &mut PgConnection) -> Result<(u64, Hash), Error> {
    let last: Option<(i64, String)> =
        sqlx::query_as("select number, line from audit_checkpoints order by number desc limit 1")
            .fetch_optional(connection)
            .await?;
    let Some((number, line)) = last else {
        return Ok((0, Checkpoint::FIRST));
    };
    // Signing continues after an unreadable line; `verify` reports it.
    let signed = SignedCheckpoint::parse(&line).inspect_err(
        |error| tracing::error!(%error, number, "An audit checkpoint can't be parsed."),
    );
    Ok((
        unsigned64(number),
        signed.map_or([0; 32], |signed| signed.hash),
    ))
}

/// Stores a checkpoint and returns its line; `None` when its number is taken.
async fn write_checkpoint(
    connection: &mut PgConnection,
    checkpoint: Checkpoint,
    key: &SigningKey,
) -> Result<Option<String>, Error> {
    let number = signed64(checkpoint.number);
    let line = checkpoint.sign(key).to_line();
    let written = sqlx::query(
        "insert into audit_checkpoints (number, line) values ($1, $2) on conflict do nothing",
    )
    .bind(number)
    .bind(&line)
    .execute(connection)
    .await?;
    Ok((written.rows_affected() > 0).then_some(line))
}

async fn checkpoints(
    executor: impl PgExecutor<'_>,
    after: u64,
) -> Result<Vec<(u64, String)>, Error> {
    let rows: Vec<(i64, String)> = sqlx::query_as(
        "select number, line from audit_checkpoints where number > $1 order by number",
    )
    .bind(signed64(after))
    .fetch_all(executor)
    .await?;
    Ok(rows
        .into_iter()
        .map(|(number, line)| (unsigned64(number), line))
        .collect())
}

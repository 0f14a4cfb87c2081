//! Pages of the audit trail, by what somebody asks for. Each filter has an index, or narrows the cursors: a trail grows long.

use cynode_api::{AuditPage, AuditRecord, JobId, SessionId, TaskId};
use cynode_service::{ApiError, pages::json_size};
use futures_util::TryStreamExt as _;
use sqlx::postgres::PgRow;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::{Db, READING, audit::link, problem, stored};

/// Which records somebody asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) task_id: Option<TaskId>,
    pub(crate) session_id: Option<SessionId>,
    pub(crate) job_id: Option<JobId>,
    pub(crate) call_id: Option<Uuid>,
    /// The name of a user, or the id of a user or a token.
    pub(crate) subject: Option<String>,
    pub(crate) decision: Option<String>,
    pub(crate) action: Option<String>,
    pub(crate) since: Option<OffsetDateTime>,
    pub(crate) until: Option<OffsetDateTime>,
}

/// Records are in the order in which they were committed, and that is about the order of their times: not where clocks differ, or
/// where the database was away. So far apart are they still found.
const APART: Duration = Duration::HOUR;
/// The records of a page, as JSON, have this many bytes at most; a thousand of the usual size have fewer.
const MAX_PAGE_BYTES: usize = 2 * 1024 * 1024;
/// So many records tell the time at a place.
const WINDOW: i64 = 100;

fn record(row: &PgRow) -> Result<AuditRecord, ApiError> {
    let (cursor, link) = link(row).map_err(problem)?;
    Ok(AuditRecord {
        cursor,
        stream: link.stream,
        seq: link.seq,
        at: link.at,
        body: stored(link.body)?,
        hash: crate::blobs::hex(&link.hash),
    })
}

impl Db {
    /// Between which cursors the records are that somebody asks for by time.
    pub(crate) async fn audit_between(&self, wanted: &Wanted) -> Result<(i64, i64), ApiError> {
        let from = match wanted.since.and_then(|since| since.checked_sub(APART)) {
            Some(since) => self.audit_cursor(since, Edge::Latest).await?,
            None => 0,
        };
        let to = match wanted.until.and_then(|until| until.checked_add(APART)) {
            Some(until) => self.audit_cursor(until, Edge::Earliest).await?,
            None => i64::MAX,
        };
        Ok((from, to))
    }

    /// The records after a cursor, and the cursor to go on from.
    pub(crate) async fn audit_page(
        &self,
        wanted: &Wanted,
        after: i64,
        (from, to): (i64, i64),
        limit: u32,
    ) -> Result<AuditPage, ApiError> {
        // Who is named by an id is found by name, and told from others of that name then.
        let id = wanted
            .subject
            .as_ref()
            .and_then(|subject| Uuid::parse_str(subject).ok());
        let named = match id {
            Some(id) => self.subject_name(id).await?,
            None => None,
        };
        // A name may look like an id.
        let (name, id) = if named.is_some() {
            (named, id)
        } else {
            (wanted.subject.clone(), None)
        };
        let _turn = READING.acquire().await;
        let mut rows = sqlx::query(
            "select cursor, stream, seq, at, body, hash from audit_events
             where cursor > $1 and ($2::uuid is null or task_id = $2) and ($3::uuid is null or session_id = $3) and ($4::uuid is null or job_id = $4)
               and ($5::uuid is null or call_id = $5) and ($6::text is null or subject = $6) and ($7::text is null or decision = $7)
               and ($8::text is null or action = $8) and ($9::timestamptz is null or at >= $9) and ($10::timestamptz is null or at < $10)
               and ($12::text is null or body #>> '{subject,user_id}' = $12 or body #>> '{subject,token_id}' = $12) and cursor <= $13
             order by cursor limit $11",
        )
        .bind(after.max(from))
        .bind(wanted.task_id.map(|id| *id.as_uuid()))
        .bind(wanted.session_id.map(|id| *id.as_uuid()))
        .bind(wanted.job_id.map(|id| *id.as_uuid()))
        .bind(wanted.call_id)
        .bind(name)
        .bind(&wanted.decision)
        .bind(&wanted.action)
        .bind(wanted.since)
        .bind(wanted.until)
        .bind(i64::from(limit))
        .bind(id.map(|id| id.to_string()))
        .bind(to)
        // Planned anew each time: which of the conditions count decides which index does.
        .persistent(false)
        .fetch(&self.pool);
        let (mut items, mut bytes, mut truncated) = (Vec::new(), 0, false);
        while let Some(row) = rows.try_next().await.map_err(problem)? {
            let record = record(&row)?;
            bytes += json_size(&record);
            if bytes > MAX_PAGE_BYTES && !items.is_empty() {
                truncated = true;
                break;
            }
            items.push(record);
        }
        let next_cursor = items
            .last()
            .map_or(after, |record: &AuditRecord| record.cursor);
        Ok(AuditPage {
            items,
            next_cursor,
            truncated,
        })
    }

    /// The newest cursor.
    pub(crate) async fn audit_last(&self) -> Result<i64, ApiError> {
        sqlx::query_scalar("select last from audit_head")
            .fetch_one(&self.pool)
            .await
            .map_err(problem)
    }

    /// What a user, or the user of a token, is called.
    async fn subject_name(&self, id: Uuid) -> Result<Option<String>, ApiError> {
        sqlx::query_scalar(
            "select name from users where id = $1 union all select u.name from api_tokens t join users u on u.id = t.user_id where t.id = $1 limit 1",
        )
        .bind(id)
        .fetch_optional(&self.pool)
        .await
        .map_err(problem)
    }

    /// A cursor before all records of this time and later; or, by the earliest of each place, one behind all of this time and before.
    /// Where records are missing nothing is narrowed: somebody removed or put some there, and must not hide others by it.
    async fn audit_cursor(&self, at: OffsetDateTime, edge: Edge) -> Result<i64, ApiError> {
        let all = match edge {
            Edge::Latest => 0,
            Edge::Earliest => i64::MAX,
        };
        let ends: (Option<i64>, i64) = sqlx::query_as(
            "select (select min(cursor) from audit_events where cursor > 0), last from audit_head",
        )
        .fetch_one(&self.pool)
        .await
        .map_err(problem)?;
        let (Some(mut low), last) = ends else {
            return Ok(all);
        };
        let mut high = last;
        while high.saturating_sub(low) > WINDOW {
            let middle = low + (high - low) / 2;
            let times: Vec<OffsetDateTime> = sqlx::query_scalar(
                "select at from audit_events where cursor >= $1 and cursor < $2",
            )
            .bind(middle)
            .bind(middle.saturating_add(WINDOW))
            .fetch_all(&self.pool)
            .await
            .map_err(problem)?;
            if (times.len() as u64) < WINDOW.min(last - middle + 1).unsigned_abs() {
                return Ok(all);
            }
            let is_earlier = match edge {
                Edge::Latest => times.iter().max().is_some_and(|latest| *latest < at),
                Edge::Earliest => times.iter().min().is_some_and(|earliest| *earliest <= at),
            };
            if is_earlier {
                low = middle
            } else {
                high = middle
            }
        }
        Ok(match edge {
            Edge::Latest => low - 1,
            // What comes yet may belong to it.
            Edge::Earliest if high == last => all,
            Edge::Earliest => high.saturating_add(WINDOW),
        })
    }
}

/// Which time of a place counts.
#[derive(Clone, Copy, Debug)]
enum Edge {
    Latest,
    Earliest,
}

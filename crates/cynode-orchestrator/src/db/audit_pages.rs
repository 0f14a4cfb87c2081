//! Filtered pages of the audit trail. Every filter has an index or narrows the cursors, because the
//! trail grows without bound.

use cynode_api::{AuditPage, AuditRecord, JobId, SessionId, TaskId, node_audit_limits};
use cynode_service::pages::json_size;
use futures_util::TryStreamExt as _;
use sqlx::postgres::PgRow;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::{Db, Error, READING, audit::link, decode};

/// Selects audit records.
#[derive(Clone, Debug, Default)]
pub(crate) struct AuditFilter {
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

/// Commit order follows the records' times only roughly: clocks differ, and the database may have
/// been away. Records that are this far out of order are still found.
const MAX_DISORDER: Duration = Duration::hours(1);
/// Records of nodes arrive this much later, if a node was away.
const NODE_DELAY: Duration = Duration::days(node_audit_limits::MAX_AGE_DAYS);
/// Bounds a page, as JSON; a thousand records of the usual size are smaller.
const MAX_PAGE_BYTES: usize = 2 * 1024 * 1024;
/// Records that are sampled for the time at a cursor.
const SAMPLE_RECORDS: i64 = 100;

fn record(row: &PgRow) -> Result<AuditRecord, Error> {
    let (cursor, link) = link(row)?;
    Ok(AuditRecord {
        cursor,
        stream: link.stream,
        seq: link.seq,
        at: link.at,
        body: decode(link.body)?,
        hash: hex::encode(link.hash),
    })
}

impl Db {
    /// The range of cursors for the filter's times.
    pub(crate) async fn audit_between(&self, filter: &AuditFilter) -> Result<(i64, i64), Error> {
        let from = match filter
            .since
            .and_then(|since| since.checked_sub(MAX_DISORDER))
        {
            Some(since) => self.audit_cursor(since, Edge::Latest).await?,
            None => 0,
        };
        let to = match filter
            .until
            .and_then(|until| until.checked_add(MAX_DISORDER + NODE_DELAY))
        {
            Some(until) => self.audit_cursor(until, Edge::Earliest).await?,
            None => i64::MAX,
        };
        Ok((from, to))
    }

    /// The records after a cursor, and the cursor to continue from.
    pub(crate) async fn audit_page(
        &self,
        filter: &AuditFilter,
        after: i64,
        (from, to): (i64, i64),
        limit: u32,
    ) -> Result<AuditPage, Error> {
        // Subjects are indexed by name; an id only narrows the result.
        let id = filter
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
            (filter.subject.clone(), None)
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
        .bind(filter.task_id.map(|id| *id.as_uuid()))
        .bind(filter.session_id.map(|id| *id.as_uuid()))
        .bind(filter.job_id.map(|id| *id.as_uuid()))
        .bind(filter.call_id)
        .bind(name)
        .bind(&filter.decision)
        .bind(&filter.action)
        .bind(filter.since)
        .bind(filter.until)
        .bind(i64::from(limit))
        .bind(id.map(|id| id.to_string()))
        .bind(to)
        // Planned on each execution: the best index depends on the filters that are set.
        .persistent(false)
        .fetch(&self.pool);
        let (mut items, mut bytes, mut truncated) = (Vec::new(), 0, false);
        while let Some(row) = rows.try_next().await? {
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
    pub(crate) async fn audit_last(&self) -> Result<i64, Error> {
        sqlx::query_scalar("select last from audit_head")
            .fetch_one(&self.pool)
            .await
            .map_err(Error::from)
    }

    /// The name of a user, or of a token's user.
    async fn subject_name(&self, id: Uuid) -> Result<Option<String>, Error> {
        sqlx::query_scalar(
            "select name from users where id = $1 union all select u.name from api_tokens t join users u on u.id = t.user_id where t.id = $1 limit 1",
        )
        .bind(id)
        .fetch_optional(&self.pool)
        .await
        .map_err(Error::from)
    }

    /// With `Latest`, a cursor before all records of this time and later; with `Earliest`, one
    /// after all records of this time and before, as the orchestrators wrote them. Gaps disable
    /// narrowing, so that removed or inserted records can't hide others. Records of nodes don't
    /// narrow either: their times are what the nodes say.
    async fn audit_cursor(&self, at: OffsetDateTime, edge: Edge) -> Result<i64, Error> {
        let all = match edge {
            Edge::Latest => 0,
            Edge::Earliest => i64::MAX,
        };
        let ends: (Option<i64>, i64) = sqlx::query_as(
            "select (select min(cursor) from audit_events where cursor > 0), last from audit_head",
        )
        .fetch_one(&self.pool)
        .await?;
        let (Some(mut low), last) = ends else {
            return Ok(all);
        };
        let mut high = last;
        while high.saturating_sub(low) > SAMPLE_RECORDS {
            let middle = low + (high - low) / 2;
            let (count, earliest, latest): (i64, Option<OffsetDateTime>, Option<OffsetDateTime>) =
                sqlx::query_as(
                    "select count(*), min(e.at) filter (where s.node_id is null), max(e.at) filter (where s.node_id is null)
                     from audit_events e left join audit_streams s on s.stream = e.stream where e.cursor >= $1 and e.cursor < $2",
                )
                .bind(middle)
                .bind(middle.saturating_add(SAMPLE_RECORDS))
                .fetch_one(&self.pool)
                .await?;
            if count < SAMPLE_RECORDS.min(last - middle + 1) {
                return Ok(all);
            }
            let (Some(earliest), Some(latest)) = (earliest, latest) else {
                // Only nodes wrote here: the bounds so far are the best there are.
                break;
            };
            let is_earlier = match edge {
                Edge::Latest => latest < at,
                Edge::Earliest => earliest <= at,
            };
            if is_earlier {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(match edge {
            Edge::Latest => low - 1,
            // Records that are still to come may belong to the range.
            Edge::Earliest if high == last => all,
            Edge::Earliest => high.saturating_add(SAMPLE_RECORDS),
        })
    }
}

/// Which time of a sampled window counts.
#[derive(Clone, Copy, Debug)]
enum Edge {
    Latest,
    Earliest,
}

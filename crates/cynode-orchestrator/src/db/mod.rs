//! PostgreSQL, the source of truth. Each file holds the statements of one subject; no other module
//! of this crate contains SQL.

/// The rows that a caller may see: all of them as an administrator ($2), the user's own ($3), and
/// those of the user's projects. For tables with `owner_id` and `project_id`.
macro_rules! visible {
    ($table:literal) => {
        concat!(
            "($2 or ",
            $table,
            ".owner_id = $3 or exists (select from projects own where own.id = ",
            $table,
            ".project_id and own.owner_id = $3))"
        )
    };
}
/// Like `visible!`, for tables with `owner_id` and `task_id`.
macro_rules! visible_by_task {
    ($table:literal) => {
        concat!(
            "($2 or ",
            $table,
            ".owner_id = $3 or exists (select from tasks own join projects p on p.id = own.project_id where own.id = ",
            $table,
            ".task_id and p.owner_id = $3))"
        )
    };
}

/// A list of rows in either order of their ids, after a cursor, with a part of the id's text. The
/// parts are a statement that ends in a condition; `$key` is the id, then the numbers of the
/// parameters for the cursor, the part of the id and the limit.
macro_rules! page_of {
    ($order:expr, [$($statement:tt)*], $key:literal, $after:literal, $id_part:literal, $limit:literal) => {
        match $order {
            $crate::db::Order::Oldest => concat!(
                $($statement)*, " and (", $after, "::uuid is null or ", $key, " > ", $after, ") and (",
                $id_part, "::text is null or strpos(", $key, "::text, ", $id_part, ") > 0) order by ", $key, " limit ", $limit
            ),
            $crate::db::Order::Newest => concat!(
                $($statement)*, " and (", $after, "::uuid is null or ", $key, " < ", $after, ") and (",
                $id_part, "::text is null or strpos(", $key, "::text, ", $id_part, ") > 0) order by ", $key, " desc limit ", $limit
            ),
        }
    };
}

mod artifacts;
mod audit;
mod audit_pages;
mod credentials;
mod dedicated;
mod error;
mod events;
mod execs;
mod identity;
mod images;
mod job_reports;
mod jobs;
mod node_audit;
mod nodes;
mod places;
mod policies;
mod promotions;
mod quotas;
mod repositories;
mod sandboxes;
mod seeds;
mod sessions;
mod settings;
mod work;

use std::{borrow::Cow, str::FromStr as _, sync::Arc, time::Duration};

use cynode_api::Page;
use cynode_service::pages::{PageBuilder, json_size};
use serde::Deserialize;
use sqlx::{
    ConnectOptions as _, Connection as _, PgConnection, PgPool, Postgres, Row as _, Transaction,
    migrate::{Migration, MigrationType, Migrator},
    postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgRow},
    query::Query,
};
use tokio::sync::{Semaphore, SemaphorePermit};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::caller::Scope;

pub(crate) use artifacts::{ExportSource, NewArtifact, StoredArtifact};
pub(crate) use audit::{
    AppendOutcome, OpenCallRow, SigningConditions, SigningOutcome, Snapshot, StoredRecord,
};
pub(crate) use audit_pages::AuditFilter;
pub(crate) use credentials::{NewCredential, SealedValue};
use dedicated::Lookups;
pub(crate) use dedicated::{DedicatedConnection, IdentityLookup};
pub(crate) use error::OpenError;
pub(crate) use error::{Error, Missing, is_visible};
pub(crate) use events::{EventScope, NewEvent};
pub(crate) use execs::RunningExec;
pub(crate) use identity::{Authenticated, NewToken};
pub(crate) use images::{NewImage, ResolvedImage, name_and_tag};
pub(crate) use job_reports::ReportBlobs;
pub(crate) use jobs::{JobRow, Lease, NewJob, OrphanedJob};
pub(crate) use node_audit::{ExistingTasks, MergeOutcome, NodeSandboxes, StreamWriter};
pub(crate) use nodes::{NodeRow, Registration};
pub(crate) use places::{PlacedSession, SessionAt};
pub(crate) use policies::{CHANNEL as POLICY_CHANNEL, PolicyRow};
#[cfg(test)]
pub(crate) use promotions::PromotionLease;
pub(crate) use promotions::{NewPromotion, PromotionRow};
pub(crate) use quotas::QuotaExceeded;
pub(crate) use seeds::{SeedKey, StoredSeed};
pub(crate) use sessions::{
    Load, NewSession, SessionQuery, SessionRow, SessionSource, is_final,
};
pub(crate) use settings::PreferenceContext;

/// Applied in order, each once.
const MIGRATIONS: &[(i64, &str, &str)] = &[
    (
        1,
        "initial",
        include_str!("../../migrations/0001_initial.sql"),
    ),
    (
        2,
        "nodes that hang",
        include_str!("../../migrations/0002_nodes_that_hang.sql"),
    ),
    (
        3,
        "policy and audit",
        include_str!("../../migrations/0003_policy_and_audit.sql"),
    ),
    (
        4,
        "reading a long trail",
        include_str!("../../migrations/0004_reading_a_long_trail.sql"),
    ),
    (
        5,
        "flagged artifacts",
        include_str!("../../migrations/0005_flagged_artifacts.sql"),
    ),
    (
        6,
        "output in quotas",
        include_str!("../../migrations/0006_output_in_quotas.sql"),
    ),
    (
        7,
        "session names",
        include_str!("../../migrations/0007_session_names.sql"),
    ),
    (
        8,
        "sessions of tokens",
        include_str!("../../migrations/0008_sessions_of_tokens.sql"),
    ),
    (
        9,
        "SBA jobs",
        include_str!("../../migrations/0009_sba_jobs.sql"),
    ),
    (
        10,
        "streams of nodes",
        include_str!("../../migrations/0010_streams_of_nodes.sql"),
    ),
    (
        11,
        "job models",
        include_str!("../../migrations/0011_job_models.sql"),
    ),
    (
        12,
        "git egress",
        include_str!("../../migrations/0012_git_egress.sql"),
    ),
];

/// How long a call waits for a free connection before it fails.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a call waits for the lookups that precede its authorization.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// In milliseconds. A slower statement is waiting for a lock that will not be released.
const STATEMENT_TIMEOUT_MS: &str = "30000";

/// The order of a list. Ids are of version 7 unless their caller chose otherwise, so their order
/// is that of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    #[default]
    Oldest,
    Newest,
}

/// The page of a list.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageRequest {
    pub(crate) after: Option<Uuid>,
    pub(crate) limit: u32,
    pub(crate) order: Order,
    /// Digits and hyphens of the ids to list.
    pub(crate) id_part: Option<String>,
    /// The name of the objects to list, of those that have names.
    pub(crate) name: Option<String>,
}

impl PageRequest {
    /// Whether an id comes after the cursor and has the part.
    pub(crate) fn includes(&self, id: &Uuid) -> bool {
        let is_after = self.after.is_none_or(|after| match self.order {
            Order::Oldest => *id > after,
            Order::Newest => *id < after,
        });
        is_after
            && self
                .id_part
                .as_ref()
                .is_none_or(|part| id.to_string().contains(part))
    }
}

/// A statement with its arguments bound.
type Statement = Query<'static, Postgres, PgArguments>;

/// A pool of connections. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Db {
    pool: PgPool,
    options: Arc<PgConnectOptions>,
    lookups: Lookups,
}

impl Db {
    /// Connects and migrates the schema. Of several orchestrators one migrates and the others wait.
    pub(crate) async fn open(url: &str, connections: u32) -> Result<Self, OpenError> {
        let options = PgConnectOptions::from_str(url)
            .map_err(OpenError::Url)?
            .application_name("cynode")
            .disable_statement_logging()
            // Statements run for microseconds; JIT compilation takes a tenth of a second.
            .options([
                ("statement_timeout", STATEMENT_TIMEOUT_MS),
                ("idle_in_transaction_session_timeout", STATEMENT_TIMEOUT_MS),
                ("jit", "off"),
                // The database's owner could otherwise put operators of its own before the built-in
                // ones, and hide rows from every query.
                ("search_path", "public"),
            ]);
        // A second orchestrator waits for the first, and building an index on a large table takes
        // long: no timeouts here.
        let patient = options.clone().options([
            ("statement_timeout", "0"),
            ("idle_in_transaction_session_timeout", "0"),
        ]);
        let mut connection = PgConnection::connect_with(&patient)
            .await
            .map_err(OpenError::Connect)?;
        migrate(&mut connection).await.map_err(OpenError::Migrate)?;
        drop(connection.close().await);
        // Testing a connection before each use costs a round trip. A broken one fails its
        // statement, and the pool replaces it.
        let pool = PgPoolOptions::new()
            .max_connections(connections)
            .min_connections(2)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .test_before_acquire(false);
        let lookups = Lookups::spawn(DedicatedConnection::new(&options));
        Ok(Self {
            pool: pool.connect_lazy_with(options.clone()),
            options: Arc::new(options),
            lookups,
        })
    }

    /// A connection outside the pool.
    pub(crate) fn dedicated(&self) -> DedicatedConnection {
        DedicatedConnection::new(&self.options)
    }

    /// A connection outside the pool that gives up on locks after a second.
    pub(crate) fn with_short_timeouts(&self) -> DedicatedConnection {
        DedicatedConnection::with_short_timeouts(&self.options)
    }

    /// Whether the orchestrators of this database use the key. The first orchestrator's key is
    /// kept.
    pub(crate) async fn has_key(&self, fingerprint: &str) -> Result<bool, Error> {
        sqlx::query("insert into cluster (key_fingerprint) values ($1) on conflict do nothing")
            .bind(fingerprint)
            .execute(&self.pool)
            .await?;
        let known: String = sqlx::query_scalar("select key_fingerprint from cluster")
            .fetch_one(&self.pool)
            .await?;
        Ok(known == fingerprint)
    }

    pub(crate) async fn begin(&self) -> Result<Transaction<'static, Postgres>, Error> {
        self.pool.begin().await.map_err(Error::from)
    }

    /// A row by its id.
    async fn row(&self, statement: &'static str, id: &Uuid) -> Result<Option<PgRow>, Error> {
        Ok(sqlx::query(statement)
            .bind(id)
            .fetch_optional(&self.pool)
            .await?)
    }

    /// A row by its id ($1), if the caller may see it ($2, $3).
    async fn visible_row(
        &self,
        statement: &'static str,
        id: &Uuid,
        scope: &Scope,
    ) -> Result<Option<PgRow>, Error> {
        Ok(sqlx::query(statement)
            .bind(id)
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .fetch_optional(&self.pool)
            .await?)
    }

    /// A page in the order of ids. `query` selects the given number of rows after an id.
    async fn read_page_of<T, E>(
        &self,
        page: &PageRequest,
        query: impl Fn(Option<Uuid>, i64) -> Statement,
        read: impl Fn(&PgRow) -> Result<T, E>,
        id: impl Fn(&T) -> Uuid,
    ) -> Result<Page<T>, Error>
    where
        T: serde::Serialize,
        Error: From<E>,
    {
        self.read_page(page.limit, page.after, query, read, id)
            .await
    }

    /// A page in key order. `query` selects the given number of rows after a key.
    async fn read_page<T, K, E>(
        &self,
        limit: u32,
        after: Option<K>,
        query: impl Fn(Option<K>, i64) -> Statement,
        read: impl Fn(&PgRow) -> Result<T, E>,
        key: impl Fn(&T) -> K,
    ) -> Result<Page<T>, Error>
    where
        T: serde::Serialize,
        K: Clone + ToString,
        Error: From<E>,
    {
        let mut pages = PageReader::new(limit, after);
        while let Some(count) = pages.wanted().await {
            let rows = query(pages.after(), count).fetch_all(&self.pool).await?;
            pages.add(rows.iter().map(&read).collect::<Result<_, _>>()?, &key);
        }
        Ok(pages.finish())
    }

    /// Whether the database answers, both the pool and the identity lookups.
    pub(crate) async fn ping(&self) -> Result<(), String> {
        sqlx::query("select 1")
            .execute(&self.pool)
            .await
            .map_err(|error| format!("the database does not answer: {error}"))?;
        self.lookups
            .ask([0; 32], None)
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    }
}

async fn migrate(connection: &mut PgConnection) -> Result<(), sqlx::migrate::MigrateError> {
    let migrations: Vec<Migration> = MIGRATIONS
        .iter()
        .map(|(version, name, sql)| {
            Migration::new(
                *version,
                Cow::Borrowed(*name),
                MigrationType::Simple,
                sqlx::SqlStr::from_static(sql),
                false,
            )
        })
        .collect();
    Migrator::with_migrations(migrations)
        .run_direct(None, connection, false)
        .await
}

/// Bounds a lookup that precedes authorization: a database that hangs counts as unavailable.
pub(crate) async fn with_timeout<T, E: From<Error>>(
    read: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    tokio::time::timeout(LOOKUP_TIMEOUT, read)
        .await
        .unwrap_or_else(|_| Err(Error::Unavailable.into()))
}

/// Commits. When the reply is lost, the commit may have succeeded: the caller has to retry.
pub(crate) async fn commit(transaction: Transaction<'static, Postgres>) -> Result<(), Error> {
    transaction.commit().await.map_err(Error::from)
}

/// Decodes a JSON column that only the orchestrator writes.
pub(crate) fn decode<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> Result<T, Error> {
    serde_json::from_value(value).map_err(|error| {
        tracing::error!(%error, "A stored value can't be decoded.");
        Error::undecodable()
    })
}

/// The state column of a session or job.
fn state<T: std::str::FromStr<Err = String>>(row: &PgRow) -> Result<T, Error> {
    row.try_get::<String, _>("state")?
        .parse()
        .map_err(Error::Undecodable)
}

pub(crate) fn to_json(value: &impl serde::Serialize) -> serde_json::Value {
    serde_json::to_value(value).unwrap_or_default()
}

/// Rows that one statement reads. The rows of a whole page can be hundreds of MiB, a chunk of the
/// largest is a few.
const CHUNK_ROWS: usize = 16;
/// Chunks that are read concurrently, over all callers.
const MAX_READING: usize = 4;

static READING: Semaphore = Semaphore::const_new(MAX_READING);

/// A page that is read chunk by chunk, in key order: while `wanted` returns a count, the rows
/// `after` the last key are added.
#[derive(Debug)]
pub(crate) struct PageReader<T, K> {
    page: PageBuilder<T>,
    after: Option<K>,
    requested_rows: usize,
    /// Held while a chunk is read.
    permit: Option<SemaphorePermit<'static>>,
    /// Set once the page is complete: whether it is the last one.
    is_last: Option<bool>,
}

impl<T: serde::Serialize, K: Clone + ToString> PageReader<T, K> {
    pub(crate) const fn new(limit: u32, after: Option<K>) -> Self {
        Self {
            page: PageBuilder::new(limit as usize),
            after,
            requested_rows: 0,
            permit: None,
            is_last: None,
        }
    }

    /// The number of rows to read next, if any. Waits for a permit to read them.
    pub(crate) async fn wanted(&mut self) -> Option<i64> {
        if self.is_last.is_some() {
            return None;
        }
        self.permit = READING.acquire().await.ok();
        // One row more than the page shows tells whether there is a next page.
        self.requested_rows = self.page.left().saturating_add(1).min(CHUNK_ROWS);
        i64::try_from(self.requested_rows).ok()
    }

    pub(crate) fn after(&self) -> Option<K> {
        self.after.clone()
    }

    /// Adds the rows of a chunk.
    pub(crate) fn add(&mut self, chunk: Vec<T>, key: impl Fn(&T) -> K) {
        let _permit = self.permit.take();
        if chunk.len() < self.requested_rows {
            self.is_last = Some(true);
        }
        for item in chunk {
            let (next, size) = (key(&item), json_size(&item));
            if !self.page.add(item, size) {
                self.is_last = Some(false);
                return;
            }
            self.after = Some(next);
        }
    }

    pub(crate) fn finish(self) -> Page<T> {
        let next_cursor = if self.is_last == Some(true) {
            None
        } else {
            self.after.map(|key| key.to_string())
        };
        Page {
            items: self.page.into_items(),
            next_cursor,
        }
    }
}

/// A page of items that are already in memory.
pub(crate) fn page<T: serde::Serialize>(
    items: impl IntoIterator<Item = T>,
    limit: u32,
    key: impl Fn(&T) -> String,
) -> Page<T> {
    let mut page = PageBuilder::new(limit as usize);
    for item in items {
        let size = json_size(&item);
        if !page.add(item, size) {
            let items = page.into_items();
            return Page {
                next_cursor: items.last().map(key),
                items,
            };
        }
    }
    Page {
        items: page.into_items(),
        next_cursor: None,
    }
}

#[cfg(test)]
mod tests {
    use cynode_service::pages::MAX_PAGE_BYTES;

    use super::*;

    #[test]
    fn every_migration_is_applied_and_none_is_numbered_twice() {
        let files = fs_err::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations"))
            .expect("migrations")
            .count();
        assert_eq!(
            MIGRATIONS.len(),
            files,
            "a file without an entry in MIGRATIONS is never applied"
        );
        assert!(MIGRATIONS.is_sorted_by(|(one, ..), (next, ..)| one < next));
    }

    /// Pages through texts of these lengths. Returns the number of items per page, and the most
    /// that one statement read.
    async fn pages(lengths: &[usize], limit: u32) -> (Vec<usize>, usize) {
        let (mut after, mut counts, mut most) = (None, Vec::new(), 0);
        loop {
            let mut pages = PageReader::new(limit, after);
            while let Some(count) = pages.wanted().await {
                let from = pages.after().map_or(0, |after: usize| after + 1);
                let found: Vec<(usize, String)> = (from..lengths.len())
                    .take(usize::try_from(count).expect("a count"))
                    .map(|n| (n, "x".repeat(lengths[n])))
                    .collect();
                most = most.max(found.len());
                pages.add(found, |item| item.0);
            }
            let page = pages.finish();
            assert_eq!(
                page.items.first().map(|item| item.0),
                (!lengths.is_empty()).then(|| after.map_or(0, |after| after + 1)),
                "an item was skipped or repeated"
            );
            counts.push(page.items.len());
            let Some(cursor) = page.next_cursor else {
                return (counts, most);
            };
            after = Some(cursor.parse().expect("a key"));
        }
    }

    #[tokio::test]
    async fn a_page_ends_at_its_item_or_byte_limit_and_the_next_one_continues_there() {
        assert_eq!(pages(&[], 10).await, (vec![0], 0));
        assert_eq!(pages(&[1; 10], 10).await, (vec![10], 10));
        assert_eq!(pages(&[1; 11], 10).await.0, [10, 1]);
        assert_eq!(pages(&[1; 100], 1_000).await, (vec![100], CHUNK_ROWS));
        // Around each text there are a few bytes more.
        assert_eq!(
            pages(&[MAX_PAGE_BYTES / 4 - 10; 9], 1_000).await.0,
            [4, 4, 1]
        );
        assert_eq!(pages(&[MAX_PAGE_BYTES / 4; 8], 1_000).await.0, [3, 3, 2]);
        // One that is larger than a page is a page.
        assert_eq!(
            pages(&[1, 2 * MAX_PAGE_BYTES, 1, 1], 1_000).await.0,
            [1, 1, 2]
        );
    }
}

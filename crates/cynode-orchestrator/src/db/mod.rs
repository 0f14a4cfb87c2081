//! PostgreSQL: where the truth is. Each file has the statements of one subject; nothing else in this crate speaks SQL.

/// What a caller may know of: all as an administrator ($2), what belongs to the user ($3), and what belongs to the user's
/// projects. For tables with `owner_id` and `project_id`.
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
/// The same for tables with `owner_id` and `task_id`.
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

mod artifacts;
mod audit;
mod audit_pages;
mod events;
mod execs;
mod identity;
mod images;
mod jobs;
mod nodes;
mod own;
mod places;
mod policies;
mod quotas;
mod sessions;
mod settings;
mod work;

use std::{borrow::Cow, str::FromStr as _, sync::Arc, time::Duration};

use cynode_api::{ErrorCode, Page};
use cynode_service::{
    ApiError,
    pages::{PageBuilder, json_size},
};
use sqlx::{
    ConnectOptions as _, Connection as _, PgConnection, PgPool, Postgres, Transaction,
    migrate::{Migration, MigrationType, Migrator},
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::sync::{Semaphore, SemaphorePermit};

pub(crate) use artifacts::NewArtifact;
pub(crate) use audit::{Added, OpenCall, Signature, Signs};
pub(crate) use audit_pages::Wanted;
pub(crate) use events::{NewEvent, Readable};
pub(crate) use execs::RunningExec;
pub(crate) use identity::{Authenticated, NewToken};
pub(crate) use images::{Chosen, NewImage, name_and_tag};
pub(crate) use jobs::{JobRow, LeftBehind, NewJob};
pub(crate) use nodes::{NodeRow, Registration};
use own::Lookups;
pub(crate) use own::{Found, Own};
pub(crate) use places::{PlacedSession, SessionAt};
pub(crate) use policies::{CHANNEL as POLICY_CHANNEL, PolicyRow};
pub(crate) use sessions::{Load, NewSession, SessionRow, is_over};
pub(crate) use settings::Of;

/// In order; each is applied once.
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
];

/// How long a call waits for a free connection before it is refused.
const ACQUIRE: Duration = Duration::from_secs(5);
/// And how long for what it is about.
const SOON: Duration = Duration::from_secs(10);
/// No statement of ours takes longer; one that does waits for a lock that will not come.
const STATEMENT: &str = "30000";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the database can't be reached")]
    Connect(#[source] sqlx::Error),
    #[error("the database's address is not valid")]
    Url(#[source] sqlx::Error),
    #[error("bringing the database to this version failed")]
    Migrate(#[source] sqlx::migrate::MigrateError),
}

/// A pool of connections. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Db {
    pool: PgPool,
    options: Arc<PgConnectOptions>,
    lookups: Lookups,
}

impl Db {
    /// Connects and brings the tables to this version. Of several orchestrators one does it and the others wait.
    pub(crate) async fn open(url: &str, connections: u32) -> Result<Self, Error> {
        let options = PgConnectOptions::from_str(url)
            .map_err(Error::Url)?
            .application_name("cynode")
            .disable_statement_logging()
            // Statements of ours take microseconds; compiling one takes a tenth of a second.
            .options([
                ("statement_timeout", STATEMENT),
                ("idle_in_transaction_session_timeout", STATEMENT),
                ("jit", "off"),
            ]);
        // Whoever comes second waits for the first, and an index of a large table takes its time.
        let patient = options.clone().options([
            ("statement_timeout", "0"),
            ("idle_in_transaction_session_timeout", "0"),
        ]);
        let mut connection = PgConnection::connect_with(&patient)
            .await
            .map_err(Error::Connect)?;
        migrate(&mut connection).await.map_err(Error::Migrate)?;
        drop(connection.close().await);
        // A lost connection is found out by the statement that fails, and the pool makes a new one: asking before each costs a
        // round trip.
        let pool = PgPoolOptions::new()
            .max_connections(connections)
            .min_connections(2)
            .acquire_timeout(ACQUIRE)
            .test_before_acquire(false);
        let lookups = Lookups::spawn(Own::new(&options));
        Ok(Self {
            pool: pool.connect_lazy_with(options.clone()),
            options: Arc::new(options),
            lookups,
        })
    }

    /// A connection for somebody alone.
    pub(crate) fn own(&self) -> Own {
        Own::new(&self.options)
    }

    /// The same, for what must not wait for locks.
    pub(crate) fn impatient(&self) -> Own {
        Own::impatient(&self.options)
    }

    /// Whether the orchestrators of this database have that key. The first one's counts.
    pub(crate) async fn has_key(&self, fingerprint: &str) -> Result<bool, ApiError> {
        sqlx::query("insert into cluster (key_fingerprint) values ($1) on conflict do nothing")
            .bind(fingerprint)
            .execute(&self.pool)
            .await
            .map_err(problem)?;
        let known: String = sqlx::query_scalar("select key_fingerprint from cluster")
            .fetch_one(&self.pool)
            .await
            .map_err(problem)?;
        Ok(known == fingerprint)
    }

    pub(crate) async fn begin(&self) -> Result<Transaction<'static, Postgres>, ApiError> {
        self.pool.begin().await.map_err(problem)
    }

    /// Whether it answers.
    pub(crate) async fn ping(&self) -> Result<(), String> {
        sqlx::query("select 1")
            .execute(&self.pool)
            .await
            .map_err(|error| format!("the database does not answer: {error}"))?;
        // And so it does to those who ask who calls.
        self.lookups
            .ask([0; 32], None)
            .await
            .map(drop)
            .map_err(|error| error.0.detail)
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

/// What a call needs to know before anything is decided: a database that hangs is one that does not answer.
pub(crate) async fn soon<T>(
    read: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let late = |_| ApiError::new(ErrorCode::StoreUnavailable, "the database does not answer");
    tokio::time::timeout(SOON, read).await.map_err(late)?
}

/// Commits. When the answer does not come, nobody knows whether it was: the caller is told to ask again.
pub(crate) async fn commit(transaction: Transaction<'static, Postgres>) -> Result<(), ApiError> {
    transaction.commit().await.map_err(problem)
}

/// A failure of the database as callers are told of it.
#[expect(clippy::needless_pass_by_value, reason = "it is a step of map_err")]
pub(crate) fn problem(error: sqlx::Error) -> ApiError {
    match &error {
        sqlx::Error::RowNotFound => ApiError::new(ErrorCode::NotFound, "there is no such thing"),
        sqlx::Error::Database(database) if database.is_foreign_key_violation() => {
            ApiError::invalid("it names something that does not exist")
        }
        sqlx::Error::Database(database) if database.is_unique_violation() => {
            ApiError::new(ErrorCode::AlreadyExists, "that name or id is taken")
        }
        // A server that stops or starts says so in these classes, and one where somebody holds a lock.
        sqlx::Error::Database(database)
            if !database.code().is_some_and(|code| {
                ["57", "55", "53", "08", "40", "25"]
                    .iter()
                    .any(|class| code.starts_with(class))
            }) =>
        {
            tracing::error!(error = %error, "A statement failed.");
            ApiError::new(ErrorCode::Internal, "a statement of the database failed")
        }
        _ => {
            tracing::warn!(error = %error, "The database can't be used.");
            ApiError::new(ErrorCode::StoreUnavailable, "the database does not answer")
        }
    }
}

/// A value of a column that only we write.
pub(crate) fn stored<T: serde::de::DeserializeOwned>(
    value: serde_json::Value,
) -> Result<T, ApiError> {
    serde_json::from_value(value).map_err(|error| {
        tracing::error!(%error, "What the database holds can't be read.");
        ApiError::new(ErrorCode::Internal, "what the database holds can't be read")
    })
}

pub(crate) fn to_json(value: &impl serde::Serialize) -> serde_json::Value {
    serde_json::to_value(value).unwrap_or_default()
}

/// Rows that one statement reads. The rows of a whole page could be hundreds of MiB, a chunk of the largest is a few.
const CHUNK: usize = 16;
/// Chunks that are read at once, for all callers.
const MAX_READING: usize = 4;

static READING: Semaphore = Semaphore::const_new(MAX_READING);

/// A page that is read chunk by chunk, in the order of its keys: as long as some are `wanted`, those `after` the last one are added.
#[derive(Debug)]
pub(crate) struct PageReader<T, K> {
    page: PageBuilder<T>,
    after: Option<K>,
    asked: usize,
    /// While a chunk is being read.
    turn: Option<SemaphorePermit<'static>>,
    /// Known once all has been read: whether that was the last page.
    is_last: Option<bool>,
}

impl<T: serde::Serialize, K: Clone + ToString> PageReader<T, K> {
    pub(crate) const fn new(limit: u32, after: Option<K>) -> Self {
        Self {
            page: PageBuilder::new(limit as usize),
            after,
            asked: 0,
            turn: None,
            is_last: None,
        }
    }

    /// How many rows to read next, if any. Waits for its turn to read them.
    pub(crate) async fn wanted(&mut self) -> Option<i64> {
        if self.is_last.is_some() {
            return None;
        }
        self.turn = READING.acquire().await.ok();
        // One more than is shown tells whether there is a next page.
        self.asked = self.page.left().saturating_add(1).min(CHUNK);
        i64::try_from(self.asked).ok()
    }

    pub(crate) fn after(&self) -> Option<K> {
        self.after.clone()
    }

    /// Adds the rows that were read.
    pub(crate) fn add(&mut self, chunk: Vec<T>, key: impl Fn(&T) -> K) {
        let _turn = self.turn.take();
        if chunk.len() < self.asked {
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

/// A page of items that are in memory already.
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
        assert!(
            (1_i64..)
                .zip(MIGRATIONS)
                .all(|(number, (version, ..))| number == *version)
        );
    }

    /// Lists items that are texts of these lengths; says how many the pages have, and the most that one statement read.
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
                "none is left out or comes twice"
            );
            counts.push(page.items.len());
            let Some(cursor) = page.next_cursor else {
                return (counts, most);
            };
            after = Some(cursor.parse().expect("a key"));
        }
    }

    #[tokio::test]
    async fn a_page_ends_at_its_count_or_at_its_bytes_and_the_next_one_goes_on_there() {
        assert_eq!(pages(&[], 10).await, (vec![0], 0));
        assert_eq!(pages(&[1; 10], 10).await, (vec![10], 10));
        assert_eq!(pages(&[1; 11], 10).await.0, [10, 1]);
        assert_eq!(pages(&[1; 100], 1_000).await, (vec![100], CHUNK));
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

//! Errors of the database layer. They name what failed; `api` decides how a caller sees them.

use cynode_api::{
    ArtifactId, CredentialId, ImageId, JobId, NodeId, ProjectId, PromotionId, SessionId, TaskId,
    TokenId,
};

use super::quotas::QuotaExceeded;
use crate::blobs;

/// The unique index of `0007_session_names.sql`.
const LIVE_SESSION_NAMES: &str = "live_session_names";

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("can't connect to the database")]
    Connect(#[source] sqlx::Error),
    #[error("the database URL is invalid")]
    Url(#[source] sqlx::Error),
    #[error("migrating the database failed")]
    Migrate(#[source] sqlx::migrate::MigrateError),
}

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The server can't be reached, is starting or stopping, or a lock or statement timed out.
    #[error("the database does not answer")]
    Unavailable,
    /// The server rejected a statement.
    #[error("a statement of the database failed")]
    Statement,
    #[error("{0}")]
    Undecodable(String),
    /// The object does not exist, or the caller may not see it.
    #[error(transparent)]
    NotFound(#[from] Missing),
    /// A foreign key without its object.
    #[error("it names something that does not exist")]
    DanglingReference,
    /// A unique key that exists already.
    #[error("that name or id is taken")]
    Duplicate,
    /// The index of names of live sessions.
    #[error("another live session has that name")]
    NameTaken,
    #[error("the image already exists; only an administrator can allow or deny it")]
    ImageExists,
    #[error("'{called}' already names the image '{name}' ({reference})")]
    ImageNameTaken {
        called: String,
        name: String,
        reference: String,
    },
    #[error("{sessions} live sessions and {jobs} unfinished jobs use the image")]
    ImageInUse { sessions: i64, jobs: i64 },
    /// A node's next report would add it again, allowed.
    #[error("the image comes with the system (orchestrator.seed_images)")]
    ImageSeeded,
    #[error("token {0} is revoked")]
    TokenRevoked(TokenId),
    #[error("{key}: its revision is another one")]
    StaleRevision { key: String },
    #[error("the policy is at revision {current}")]
    StalePolicy { current: i64 },
    #[error("{promotions} promotions to the repository are under way")]
    RepositoryInUse { promotions: i64 },
    #[error(
        "there may be at most {} repositories",
        cynode_api::repository_limits::MAX_REPOSITORIES
    )]
    TooManyRepositories,
    #[error("events up to {expired} are no longer kept")]
    CursorExpired { expired: i64 },
    #[error("after: {after} lies beyond the newest event, {last}")]
    CursorAhead { after: i64, last: i64 },
    #[error(transparent)]
    Quota(#[from] QuotaExceeded),
    /// The blob store failed within a transaction.
    #[error(transparent)]
    Blob(#[from] blobs::Error),
}

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Missing {
    #[error("there is no such thing")]
    Row,
    #[error("there is no project {0}")]
    Project(ProjectId),
    #[error("there is no task {0}")]
    Task(TaskId),
    #[error("there is no session {0}")]
    Session(SessionId),
    #[error("there is no job {0}")]
    Job(JobId),
    #[error("there is no node {0}")]
    Node(NodeId),
    #[error("there is no token {0}")]
    Token(TokenId),
    #[error("there is no artifact {0}")]
    Artifact(ArtifactId),
    #[error("the task has no artifact '{0}'")]
    ArtifactPath(String),
    #[error("there is no image {0}")]
    Image(ImageId),
    #[error("the image has no such version")]
    ImageVersion,
    #[error("there is no policy '{0}'")]
    Policy(String),
    #[error("there is no credential {0} that is not disabled")]
    Credential(CredentialId),
    /// By name or id.
    #[error("the project has no repository '{0}'")]
    Repository(String),
    #[error("there is no promotion {0}")]
    Promotion(PromotionId),
}

impl Error {
    /// A stored value that this version can't decode.
    pub(super) fn undecodable() -> Self {
        Self::Undecodable("what the database holds can't be read".to_owned())
    }

    /// Whether a retry may succeed.
    pub(crate) const fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Unavailable | Self::Blob(blobs::Error::Unavailable)
        )
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        match &error {
            sqlx::Error::RowNotFound => Self::NotFound(Missing::Row),
            sqlx::Error::Database(database) if database.is_foreign_key_violation() => {
                Self::DanglingReference
            }
            sqlx::Error::Database(database)
                if database.constraint() == Some(LIVE_SESSION_NAMES) =>
            {
                Self::NameTaken
            }
            sqlx::Error::Database(database) if database.is_unique_violation() => Self::Duplicate,
            // Classes for a server that starts or stops, runs out of resources, or times out on a
            // lock.
            sqlx::Error::Database(database)
                if !database.code().is_some_and(|code| {
                    ["57", "55", "53", "08", "40", "25"]
                        .iter()
                        .any(|class| code.starts_with(class))
                }) =>
            {
                tracing::error!(error = %error, "A database statement failed.");
                Self::Statement
            }
            _ => {
                tracing::warn!(error = %error, "The database is unavailable.");
                Self::Unavailable
            }
        }
    }
}

/// Whether a lookup in the caller's scope succeeded. A failing database says nothing about
/// visibility.
pub(crate) fn is_visible<T>(found: Result<T, Error>) -> Result<bool, Error> {
    match found {
        Ok(_) => Ok(true),
        Err(Error::NotFound(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

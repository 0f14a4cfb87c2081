//! What can go wrong between here and a worker.

use cynode_api::{ErrorCode, Problem};

pub type Result<T, E = Error> = std::result::Result<T, E>;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// A failed call. `Display` does not repeat the source.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The other side refused, and said why.
    #[error("{}", .0.detail)]
    Problem(Box<Problem>),
    /// The other side refused with something that is not a problem document.
    #[error("{url} answered {status}{}", note(.body))]
    Status {
        url: String,
        status: u16,
        body: String,
    },
    /// No answer came.
    #[error("can't reach {url}")]
    Unreachable {
        url: String,
        /// True when no connection was made, so that the request can be repeated without doing anything twice.
        never_sent: bool,
        #[source]
        source: Source,
    },
    /// An answer began and stopped too early.
    #[error("the connection to {url} broke")]
    Broken {
        url: String,
        #[source]
        source: Option<Source>,
    },
    /// The answer is not what the API promises.
    #[error("{url} sent an answer that can't be understood")]
    Answer {
        url: String,
        #[source]
        source: Source,
    },
    /// The address, the token or the certificate file can't be used.
    #[error("{0}")]
    Setup(String),
}

impl Error {
    /// Whether the other side refused with this code.
    #[must_use]
    pub fn is(&self, code: ErrorCode) -> bool {
        matches!(self, Self::Problem(problem) if problem.is(code))
    }

    /// The HTTP status of a refusal.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Problem(problem) => Some(problem.status),
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Whether the other side, or the way to it, may be back soon: it is restarting, or the connection broke.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } => true,
            Self::Problem(problem) => [
                ErrorCode::ShuttingDown,
                ErrorCode::AgentUnavailable,
                ErrorCode::RuntimeUnavailable,
                ErrorCode::NodeUnreachable,
            ]
            .iter()
            .any(|code| problem.is(*code)),
            Self::Status { status, .. } => matches!(status, 502..=504),
            Self::Answer { .. } | Self::Setup(_) => false,
        }
    }

    /// The message and its root cause. What lies between says no more than that a connection was tried.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut root = None;
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            root = Some(error);
            source = error.source();
        }
        root.map_or_else(|| self.to_string(), |root| format!("{self}: {root}"))
    }

    pub(crate) fn transport(url: &str, source: reqwest::Error) -> Self {
        let never_sent = source.is_connect();
        Self::Unreachable {
            url: url.to_owned(),
            never_sent,
            source: source.without_url().into(),
        }
    }

    pub(crate) fn broken(url: &str, source: reqwest::Error) -> Self {
        Self::Broken {
            url: url.to_owned(),
            source: Some(source.without_url().into()),
        }
    }

    pub(crate) fn answer(url: &str, source: impl Into<Source>) -> Self {
        Self::Answer {
            url: url.to_owned(),
            source: source.into(),
        }
    }
}

fn note(body: &str) -> String {
    if body.is_empty() {
        String::new()
    } else {
        format!(": {body}")
    }
}

//! Errors of calls.

use cynode_api::{ErrorCode, Problem};

pub type Result<T, E = Error> = std::result::Result<T, E>;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// A failed call. `Display` does not repeat the source.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server refused with a problem document.
    #[error("{}", .0.detail)]
    Problem(Box<Problem>),
    /// The server refused without a problem document.
    #[error("{url} answered {status}{}", after_colon(.body))]
    Status {
        url: String,
        status: u16,
        body: String,
    },
    /// No response arrived.
    #[error("can't reach {url}")]
    Unreachable {
        url: String,
        /// True if the connection failed, so that a retry can't repeat the effect of the request.
        never_sent: bool,
        #[source]
        source: Source,
    },
    /// The response ended prematurely.
    #[error("the connection to {url} broke")]
    Broken {
        url: String,
        #[source]
        source: Option<Source>,
    },
    /// The response does not match the API.
    #[error("{url} sent an invalid response")]
    Answer {
        url: String,
        #[source]
        source: Source,
    },
    /// The URL, the token or the certificate file is invalid.
    #[error("{0}")]
    Setup(String),
}

impl Error {
    /// Whether the server refused with this code.
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

    /// Whether a retry may succeed: the server is restarting, or the connection broke.
    #[must_use]
    pub fn is_transient(&self) -> bool {
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

    /// The message and its root cause. The causes in between only repeat that a connection failed.
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

fn after_colon(body: &str) -> String {
    if body.is_empty() {
        String::new()
    } else {
        format!(": {body}")
    }
}

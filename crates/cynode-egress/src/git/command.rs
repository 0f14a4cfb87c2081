//! What the role asks its runner to execute: git commands in a mirror.
//!
//! Invariant: no argument, variable or URL holds a credential. Arguments come from this crate and
//! from validated object and branch names, never from free text.

use std::{ffi::OsString, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::io::AsyncRead;

/// Standard error that is kept of a command.
pub(crate) const MAX_STDERR_BYTES: usize = 16 * 1024;

/// A bare repository below the runner's directory: `<repository id>-<credential id>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Mirror(pub(crate) String);

/// One git command.
#[derive(Clone, Debug)]
pub(crate) struct GitCommand {
    /// After `git` and the fixed options, such as `cat-file`, `--batch`.
    pub(crate) args: Vec<OsString>,
    /// Complete standard input.
    pub(crate) input: Bytes,
    /// A private index, by a name that is unique to the operation. Created on first use; removed
    /// with [`GitRunner::forget`].
    pub(crate) index: Option<String>,
    /// A quarantine for new objects, by a name that is unique to the operation. The mirror's
    /// objects are visible in it.
    pub(crate) quarantine: Option<String>,
    /// Standard output beyond this fails the command.
    pub(crate) max_output_bytes: u64,
    pub(crate) timeout: Duration,
    /// What the command may dial. `None`: no transport is permitted.
    pub(crate) remote: Option<RemoteAccess>,
}

/// The one remote that a command may dial.
#[derive(Clone)]
pub(crate) struct RemoteAccess {
    pub(crate) scheme: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Checked addresses, for `http.curloptResolve`.
    pub(crate) addresses: Vec<std::net::IpAddr>,
    /// PEM certificates to trust instead of the system's.
    pub(crate) ca: Option<String>,
    pub(crate) credential: Option<Credential>,
}

/// What the credential helper answers, once, and only when git asks for the same host and path.
#[derive(Clone)]
pub(crate) struct Credential {
    pub(crate) path_prefix: String,
    pub(crate) username: String,
    pub(crate) secret: String,
}

impl std::fmt::Debug for RemoteAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteAccess")
            .field("host", &self.host)
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credential").finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct GitOutput {
    pub(crate) stdout: Vec<u8>,
}

/// A command whose output is read while it runs.
pub(crate) struct GitStream {
    pub(crate) stdout: Box<dyn AsyncRead + Send + Unpin>,
    /// Resolves after standard output has ended.
    pub(crate) ended: tokio::sync::oneshot::Receiver<Result<(), GitError>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum GitError {
    /// git ended with a code other than 0. What it printed is bounded by [`MAX_STDERR_BYTES`], and
    /// hostile text.
    #[error("git {command} ended with code {code}: {stderr}")]
    Exit {
        command: String,
        code: i32,
        stderr: String,
    },
    #[error("git {command} was ended by a signal, for example for its use of memory")]
    Killed { command: String },
    #[error("git {command} took longer than {timeout:?}")]
    Timeout { command: String, timeout: Duration },
    #[error("git {command} wrote more than {limit} bytes")]
    TooMuchOutput { command: String, limit: u64 },
    #[error("the process that runs git is not available: {0}")]
    Unavailable(String),
}

/// Runs git. The role talks to the runner process; tests run it in their own process.
#[async_trait]
pub(crate) trait GitRunner: Send + Sync {
    /// Creates the mirror with its fixed configuration unless it exists.
    async fn prepare(&self, mirror: &Mirror) -> Result<(), GitError>;
    /// Runs a command to its end. Fails unless it ends with code 0.
    async fn run(&self, mirror: &Mirror, command: GitCommand) -> Result<GitOutput, GitError>;
    /// Starts a command whose output is streamed.
    async fn stream(&self, mirror: &Mirror, command: GitCommand) -> Result<GitStream, GitError>;
    /// Moves the objects of a quarantine into the mirror.
    async fn accept(&self, mirror: &Mirror, quarantine: &str) -> Result<(), GitError>;
    /// Removes an operation's private index or quarantine, whichever exist under this name.
    async fn forget(&self, mirror: &Mirror, name: &str);
}

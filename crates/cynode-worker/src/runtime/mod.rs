//! The container runtime behind one trait: Podman, Docker, and a fake for tests.
//!
//! Invariants: every call has a timeout; an image's configuration does not affect how a sandbox
//! runs; removing something that is already gone succeeds.

mod attach_error;
mod compat;
mod docker;
mod fake;
mod libpod;
mod podman;
pub(crate) mod seccomp;
mod service;

use std::{collections::BTreeMap, path::PathBuf, pin::Pin, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use cynode_api::{Limits, LocalImage, Stream, Unenforced};
use futures_util::Stream as FuturesStream;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWrite;

pub(crate) use docker::id_space as docker_ids;
pub use docker::{Docker, DockerOptions};
pub use fake::{Fake, FakeImage, Fault};
pub(crate) use podman::id_space as podman_ids;
pub use podman::{Podman, PodmanOptions};
pub use service::ServiceOptions;

/// Terminals of one sandbox. All sandboxes share about 3,000, which one could otherwise exhaust.
pub(crate) const MAX_TERMINALS: u32 = 64;

#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("no such container, image or exec: {0}")]
    NotFound(String),
    #[error("the name {0} is in use")]
    NameInUse(String),
    #[error("the container runtime did not answer '{call}' within {} s", limit.as_secs())]
    Timeout { call: &'static str, limit: Duration },
    #[error("the container runtime is unreachable: {0}")]
    Unavailable(String),
    /// Like `Unavailable`, but the call was never sent, so it is safe to repeat.
    #[error("the container runtime is unreachable: {0}")]
    Unreached(String),
    #[error("the container runtime rejected '{call}': {message}")]
    Refused { call: &'static str, message: String },
}

/// An image in the runtime's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The id that identifies it exactly.
    pub id: String,
    /// The digest that callers pin: the registry's, or the id if the operator loaded the image.
    pub digest: String,
    pub labels: BTreeMap<String, String>,
    pub env: Vec<(String, String)>,
}

/// A block of host ids that maps to the ids from 0 inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMap {
    pub first: u32,
    pub count: u32,
}

/// How a runtime separates the ids of sandboxes from the host's and from one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdSpace {
    /// Each sandbox is mapped to its own block, anywhere on the host.
    Own,
    /// Each sandbox is mapped to its own block within this range.
    Within(IdMap),
    /// One map for all sandboxes, configured in the runtime.
    Shared(IdMap),
    /// No map: ids inside equal those on the host.
    Host,
}

impl IdSpace {
    /// The separations that this id space does not provide.
    #[must_use]
    pub const fn unenforced(self) -> &'static [Unenforced] {
        match self {
            Self::Own | Self::Within(_) => &[],
            Self::Shared(_) => &[Unenforced::IdRange],
            Self::Host => &[Unenforced::Userns, Unenforced::IdRange],
        }
    }
}

#[derive(Clone, Debug)]
pub struct Mount {
    pub source: PathBuf,
    pub target: String,
    pub read_only: bool,
}

/// The complete description of a sandbox's container: anything not listed is off.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub image_id: String,
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    pub ids: IdMap,
    pub mounts: Vec<Mount>,
    pub limits: Limits,
    /// The parent of its cgroup; the runtime's choice if absent.
    pub cgroup_parent: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    pub id: String,
    pub name: String,
    pub running: bool,
    /// Host pid of its process 1; 0 if it is not running.
    pub pid: i32,
    pub exit_code: Option<i64>,
    pub labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default)]
pub struct ExecSpec {
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    pub cwd: String,
    pub stdin: bool,
    /// Columns and rows of a terminal.
    pub tty: Option<(u16, u16)>,
}

/// Output of a runtime exec in order of arrival. With a terminal, all of it is `Stdout`.
pub type ExecOutput =
    Pin<Box<dyn FuturesStream<Item = Result<(Stream, Bytes), RuntimeError>> + Send>>;

pub struct RuntimeExec {
    pub id: String,
    pub input: Pin<Box<dyn AsyncWrite + Send>>,
    pub output: ExecOutput,
}

impl std::fmt::Debug for RuntimeExec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RuntimeExec")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuntimeExecState {
    pub running: bool,
    pub exit_code: Option<i64>,
    /// Host pid; 0 if unknown.
    pub pid: i32,
}

#[async_trait]
pub trait Runtime: Send + Sync + std::fmt::Debug {
    /// Fails if the runtime does not answer or can't read its store. Called frequently, so it must
    /// be cheap: it takes 2 ms, while Podman's version call takes 300 ms.
    async fn ping(&self) -> Result<(), RuntimeError>;
    /// The ids available to sandboxes; those of a `Spec` must lie within.
    async fn ids(&self) -> Result<IdSpace, RuntimeError>;
    async fn image(&self, reference: &str) -> Result<Image, RuntimeError>;
    /// Every tagged image, once per tag.
    async fn images(&self) -> Result<Vec<LocalImage>, RuntimeError>;
    /// Fails with `NameInUse` if a container has this name, which makes creation idempotent.
    async fn create(&self, spec: &Spec) -> Result<String, RuntimeError>;
    async fn start(&self, name: &str) -> Result<(), RuntimeError>;
    async fn inspect(&self, name: &str) -> Result<Container, RuntimeError>;
    /// All containers with this label and value, running or not.
    async fn list(&self, label: &str, value: &str) -> Result<Vec<Container>, RuntimeError>;
    async fn kill(&self, name: &str, signal: &str) -> Result<(), RuntimeError>;
    /// Kills and removes a container; succeeds if it does not exist.
    async fn remove(&self, name: &str) -> Result<(), RuntimeError>;
    async fn exec(&self, name: &str, spec: &ExecSpec) -> Result<RuntimeExec, RuntimeError>;
    async fn exec_state(&self, id: &str) -> Result<RuntimeExecState, RuntimeError>;
    async fn exec_resize(&self, id: &str, columns: u16, rows: u16) -> Result<(), RuntimeError>;
    /// Stops a service that serves only this worker; containers keep running.
    async fn close(&self);
}

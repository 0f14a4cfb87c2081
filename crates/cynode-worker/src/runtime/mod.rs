//! The container runtime, behind one trait: Podman, Docker, and a fake for tests.
//!
//! What must stay true: every call has a deadline; an image's own configuration decides nothing about how a sandbox
//! runs; removing what is gone already is success.

mod compat;
mod docker;
mod fake;
mod last_word;
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

/// Terminals of a sandbox. All sandboxes share some 3,000, which one could take without this.
pub(crate) const TERMINALS: u32 = 64;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no such container, image or exec: {0}")]
    NotFound(String),
    #[error("the name {0} is taken")]
    NameInUse(String),
    #[error("the container runtime did not answer '{call}' within {} s", limit.as_secs())]
    Timeout { call: &'static str, limit: Duration },
    #[error("the container runtime can't be reached: {0}")]
    Unavailable(String),
    /// As `Unavailable`, and the call was never sent: it is safe to repeat.
    #[error("the container runtime can't be reached: {0}")]
    Unreached(String),
    #[error("the container runtime refused '{call}': {message}")]
    Refused { call: &'static str, message: String },
}

/// An image as the runtime knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The id that pins it.
    pub id: String,
    /// What it is pinned by: the digest in its registry, or its id when the operator loaded it.
    pub digest: String,
    pub labels: BTreeMap<String, String>,
    pub env: Vec<(String, String)>,
}

/// A block of ids on the host that stands for the ids from 0 on inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMap {
    pub first: u32,
    pub count: u32,
}

/// How a runtime keeps the ids of sandboxes apart, from the host's and from one another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdSpace {
    /// Each sandbox is mapped to the block that it is given, anywhere on the host.
    Own,
    /// The same, but within these.
    Within(IdMap),
    /// One map for all sandboxes, chosen by whoever set up the runtime.
    Shared(IdMap),
    /// No map: an id inside is the same id outside.
    Host,
}

impl IdSpace {
    /// What this way of keeping apart does not keep apart.
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

/// A sandbox's container, complete: what is not here is off.
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
    /// The cgroup that its own lies below; the runtime's choice when absent.
    pub cgroup_parent: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    pub id: String,
    pub name: String,
    pub running: bool,
    /// Of its process 1, on the host; 0 when it does not run.
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

/// Output of a runtime exec, in the order in which it came. With a terminal all of it is `Stdout`.
pub type ExecOutput = Pin<Box<dyn FuturesStream<Item = Result<(Stream, Bytes), Error>> + Send>>;

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
    /// On the host; 0 when unknown.
    pub pid: i32,
}

#[async_trait]
pub trait Runtime: Send + Sync + std::fmt::Debug {
    /// Fails when the runtime does not answer, or can't read what it keeps. Cheap, as it is asked for ever: two milliseconds, where
    /// Podman's own version costs it a search in the package database, and a third of a second.
    async fn ping(&self) -> Result<(), Error>;
    /// The ids that sandboxes get; those of a `Spec` must lie within.
    async fn ids(&self) -> Result<IdSpace, Error>;
    async fn image(&self, reference: &str) -> Result<Image, Error>;
    /// Every image that has a name, under each of its names.
    async fn images(&self) -> Result<Vec<LocalImage>, Error>;
    /// Fails with `NameInUse` when a container has this name: the name is the once-only gate.
    async fn create(&self, spec: &Spec) -> Result<String, Error>;
    async fn start(&self, name: &str) -> Result<(), Error>;
    async fn inspect(&self, name: &str) -> Result<Container, Error>;
    /// All containers that carry this label with this value, running or not.
    async fn list(&self, label: &str, value: &str) -> Result<Vec<Container>, Error>;
    async fn kill(&self, name: &str, signal: &str) -> Result<(), Error>;
    /// Kills it when it runs, and removes it. One that is not there counts as removed.
    async fn remove(&self, name: &str) -> Result<(), Error>;
    async fn exec(&self, name: &str, spec: &ExecSpec) -> Result<RuntimeExec, Error>;
    async fn exec_state(&self, id: &str) -> Result<RuntimeExecState, Error>;
    async fn exec_resize(&self, id: &str, columns: u16, rows: u16) -> Result<(), Error>;
    /// Ends what serves this worker alone (a private service); containers live on.
    async fn close(&self);
}

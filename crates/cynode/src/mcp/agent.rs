//! The token of an agent: a project manager's token for exactly one task, stored for one directory
//! on one server.
//!
//! Invariants: the file is private to the user. Bridges of one directory share the token. Renewing
//! it ends calls in progress with the old secret, so one bridge at a time renews it, before it
//! expires and while no call uses it. A bridge with an old secret reads the file again.

#[cfg(test)]
mod tests;

use std::{
    fs::Permissions,
    io::{self, Read as _},
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use cynode_api::{
    API_VERSION, ErrorCode, TaskCreate, TaskId, TokenCreate, TokenCreated, TokenId, TokenKind,
    TokenRenew,
};
use cynode_client::UserClient;
use cynode_service::{files, private};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;

use crate::{failure::Failure, output, sanitize};

/// Stored agents; beyond it, the least recently changed ones are deleted.
const MAX_AGENTS: usize = 1_000;
/// Size limit of a file.
const MAX_FILE_BYTES: u64 = 64 * 1024;
/// Other processes hold the lock during a call to the server.
const LOCK_TIMEOUT: Duration = Duration::from_secs(150);
const LOCK_POLL: Duration = Duration::from_millis(20);
/// How long a call waits for a renewal before it tries the old token.
const USE_TIMEOUT: Duration = Duration::from_secs(10);
/// Length of the part of a path that becomes the name of a task, in characters.
const MAX_NAMED_PATH: usize = 50;

/// How long tokens live, and when they are renewed.
#[derive(Clone, Copy, Debug)]
pub struct Lifetime {
    pub token: Duration,
    /// With less time left, the token is renewed while no call uses it.
    pub renew_idle: Duration,
    /// With less time left, it is renewed in any case. Longer than any command.
    pub renew_busy: Duration,
}

impl Lifetime {
    /// For a token in a client's file, which only 'cynode connect' renews.
    pub const IN_FILE: Self = Self {
        token: Duration::from_hours(30 * 24),
        renew_idle: Duration::from_hours(15 * 24),
        renew_busy: Duration::from_hours(15 * 24),
    };
    /// For a bridge, which can renew the token at any time.
    pub const BRIDGE: Self = Self {
        token: Duration::from_hours(48),
        renew_idle: Duration::from_hours(24),
        renew_busy: Duration::from_hours(4),
    };
}

/// Identifies an agent: the server, the directory, and further distinctions.
#[derive(Clone, Debug)]
pub struct AgentKey {
    pub server: String,
    pub directory: PathBuf,
    /// The directory is uploaded into the sandbox.
    pub uploads_directory: bool,
    /// The task that the user named.
    pub task: Option<TaskId>,
    /// Separates agents of the same directory, such as those of different clients.
    pub purpose: String,
}

impl AgentKey {
    fn file_name(&self) -> String {
        let mut hash = Sha256::new();
        for part in [
            self.server.as_bytes(),
            self.directory.as_os_str().as_bytes(),
            if self.uploads_directory {
                b"brought"
            } else {
                b"empty"
            },
            self.task
                .map(|id| id.to_string())
                .unwrap_or_default()
                .as_bytes(),
            self.purpose.as_bytes(),
        ] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hex::encode(hash.finalize())
    }
}

/// The stored state of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agent {
    version: u32,
    pub server: String,
    /// For people who read the file.
    directory: String,
    pub task_id: TaskId,
    pub token_id: TokenId,
    pub token: String,
    #[serde(with = "time::serde::rfc3339")]
    expires_at: OffsetDateTime,
    /// The session of the token was created with the requested workspace.
    #[serde(default)]
    pub has_workspace: bool,
}

impl Agent {
    fn lives_longer_than(&self, span: Duration) -> bool {
        self.expires_at > OffsetDateTime::now_utc() + span
    }
}

/// The file of one agent.
#[derive(Clone, Debug)]
pub struct AgentFile {
    path: PathBuf,
    key: AgentKey,
    lifetime: Lifetime,
}

/// A call that uses the token.
#[derive(Debug)]
pub struct InUse(#[expect(dead_code, reason = "holds the lock")] Option<fs_err::File>);

impl AgentFile {
    /// In the user's client state directory.
    pub fn new(state: &Path, key: AgentKey, lifetime: Lifetime) -> Self {
        let name = format!("{}.json", key.file_name());
        Self {
            path: state.join("agents").join(name),
            key,
            lifetime,
        }
    }

    /// The remembered agent, whether or not its token is still valid.
    pub fn read(&self) -> io::Result<Option<Agent>> {
        let Some(text) = read_private(&self.path)? else {
            return Ok(None);
        };
        let agent = serde_json::from_slice::<Agent>(&text)
            .ok()
            .filter(|agent| agent.server == self.key.server);
        if agent.is_none() {
            output::message(&format!(
                "cynode: {} is damaged and is replaced",
                sanitize::line(&self.path.display().to_string())
            ));
        }
        Ok(agent)
    }

    /// The remembered agent with its file.
    pub fn stored(&self) -> io::Result<Option<StoredAgent>> {
        let path = self.path.clone();
        Ok(self.read()?.map(|agent| StoredAgent { path, agent }))
    }

    fn write(&self, agent: &Agent) -> io::Result<()> {
        files::replace(&self.path, &serde_json::to_vec(agent)?)
    }

    /// The agent, with a token that is valid for a while. It is made or renewed if need be.
    pub async fn current(
        &self,
        user: impl Fn() -> Result<UserClient, Failure>,
    ) -> Result<Agent, Failure> {
        if let Some(agent) = self.read()?
            && agent.lives_longer_than(self.lifetime.renew_idle)
        {
            return Ok(agent);
        }
        let _lock = self.lock("lock").await?;
        let Some(agent) = self.read()? else {
            return self.create(&user()?, None).await;
        };
        // Another bridge may have renewed it.
        if agent.lives_longer_than(self.lifetime.renew_idle) {
            return Ok(agent);
        }
        let is_urgent = !agent.lives_longer_than(self.lifetime.renew_busy);
        let unused = self.open("use")?;
        let is_unused = flock(&unused, FlockOperation::NonBlockingLockExclusive).is_ok();
        if !is_unused && !is_urgent {
            return Ok(agent);
        }
        match self.renew(&user, &agent).await {
            Err(failure) if agent.lives_longer_than(Duration::from_secs(60)) => {
                output::message(&format!(
                    "cynode: the token is not renewed yet: {}",
                    sanitize::line(failure.message())
                ));
                Ok(agent)
            }
            renewed => renewed,
        }
    }

    /// The agent with another token than one that the server refused.
    pub async fn instead_of(
        &self,
        refused: &str,
        user: impl Fn() -> Result<UserClient, Failure>,
    ) -> Result<Agent, Failure> {
        let _lock = self.lock("lock").await?;
        match self.read()? {
            Some(agent) if agent.token != refused => Ok(agent),
            Some(agent) => self.renew(&user, &agent).await,
            None => self.create(&user()?, None).await,
        }
    }

    /// Remembers that the session of the token has its workspace.
    pub async fn set_workspace(&self, token: TokenId) -> Result<(), Failure> {
        let _lock = self.lock("lock").await?;
        match self.read()? {
            Some(agent) if agent.token_id == token => Ok(self.write(&Agent {
                has_workspace: true,
                ..agent
            })?),
            _ => Ok(()),
        }
    }

    /// Forgets the agent. Returns its token, which the caller revokes.
    pub async fn forget(&self) -> Result<Option<TokenId>, Failure> {
        let _lock = self.lock("lock").await?;
        let agent = self.read()?;
        match fs_err::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        Ok(agent.map(|agent| agent.token_id))
    }

    /// Marks a call that uses the token until it is dropped.
    pub async fn in_use(&self) -> Result<InUse, Failure> {
        let file = self.open("use")?;
        let shared = FlockOperation::NonBlockingLockShared;
        match tokio::time::timeout(USE_TIMEOUT, wait_for(&file, shared)).await {
            Ok(taken) => taken?,
            Err(_) => return Ok(InUse(None)),
        }
        Ok(InUse(Some(file)))
    }

    /// A lock that is released when it is dropped, or when its process ends.
    pub async fn lock(&self, name: &str) -> Result<fs_err::File, Failure> {
        let file = self.open(name)?;
        let exclusive = FlockOperation::NonBlockingLockExclusive;
        match tokio::time::timeout(LOCK_TIMEOUT, wait_for(&file, exclusive)).await {
            Ok(taken) => taken?,
            Err(_) => {
                return Err(Failure::internal(format!(
                    "another process holds {} for too long",
                    self.path.with_extension(name).display()
                ))
                .remedy("End other 'cynode mcp' processes of this directory."));
            }
        }
        Ok(file)
    }

    /// The same without a limit: a directory may take long to bring in.
    pub async fn lock_for_long(&self, name: &str) -> Result<fs_err::File, Failure> {
        let file = self.open(name)?;
        wait_for(&file, FlockOperation::NonBlockingLockExclusive).await?;
        Ok(file)
    }

    fn open(&self, name: &str) -> io::Result<fs_err::File> {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let state = directory.parent().unwrap_or(Path::new("/"));
        fs_err::create_dir_all(state.parent().unwrap_or(Path::new("/")))?;
        private::closed_directory(state)?;
        private::closed_directory(directory)?;
        private::open_lock(&self.path.with_extension(name))
    }

    /// Makes a token. The caller holds the lock.
    async fn create(&self, user: &UserClient, task: Option<TaskId>) -> Result<Agent, Failure> {
        let task_id = match task.or(self.key.task) {
            Some(task) => task,
            None => self.create_task(user).await?,
        };
        let request = TokenCreate {
            version: Some(API_VERSION),
            kind: TokenKind::ProjectManager,
            user: None,
            project_id: None,
            task_ids: vec![task_id],
            job_id: None,
            session_id: None,
            expires_in_seconds: Some(self.lifetime.token.as_secs()),
        };
        let issued = user.create_token(&request).await?;
        self.prune();
        self.remember(issued, task_id, false)
    }

    async fn create_task(&self, user: &UserClient) -> Result<TaskId, Failure> {
        let directory = sanitize::line(&self.key.directory.to_string_lossy());
        let skipped = directory.chars().count().saturating_sub(MAX_NAMED_PATH);
        let name: String = directory.chars().skip(skipped).collect();
        let request = TaskCreate {
            name: format!("agent in {name}"),
            ..TaskCreate::default()
        };
        Ok(user.create_task(&request).await?.id)
    }

    /// Renews a token. The caller holds the lock.
    async fn renew(
        &self,
        user: &impl Fn() -> Result<UserClient, Failure>,
        agent: &Agent,
    ) -> Result<Agent, Failure> {
        let user = user()?;
        let request = TokenRenew {
            version: Some(API_VERSION),
            expires_in_seconds: Some(self.lifetime.token.as_secs()),
        };
        match user.renew_token(agent.token_id, &request).await {
            Ok(issued) => self.remember(issued, agent.task_id, agent.has_workspace),
            // The server was set up anew, or the user is another: nothing is left to attach to.
            Err(error) if error.is(ErrorCode::NotFound) => {
                let task = user.task(agent.task_id).await.ok().map(|task| task.id);
                self.create(&user, task).await
            }
            Err(error) if error.is(ErrorCode::TokenRevoked) => {
                Err(Failure::from(error).remedy(format!(
                    "Somebody took this agent's access back. To start over with another token and \
                     session, run 'cynode mcp --forget --workspace {}'.",
                    sanitize::line(&self.key.directory.to_string_lossy())
                )))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn remember(
        &self,
        issued: TokenCreated,
        task_id: TaskId,
        has_workspace: bool,
    ) -> Result<Agent, Failure> {
        let agent = Agent {
            version: 1,
            server: self.key.server.clone(),
            directory: self.key.directory.to_string_lossy().into_owned(),
            task_id,
            token_id: issued.id,
            token: issued.token,
            expires_at: issued.expires_at,
            has_workspace,
        };
        self.write(&agent)?;
        Ok(agent)
    }

    /// Makes room for another agent. What can't be removed stays.
    fn prune(&self) {
        let Some(entries) = self
            .path
            .parent()
            .and_then(|path| fs_err::read_dir(path).ok())
        else {
            return;
        };
        let mut agents: Vec<_> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| {
                path.extension()
                    .is_some_and(|extension| extension == "json")
            })
            .filter_map(|path| Some((fs_err::metadata(&path).ok()?.modified().ok()?, path)))
            .collect();
        agents.sort();
        let excess = (agents.len() + 1).saturating_sub(MAX_AGENTS);
        for (_, path) in agents.drain(..excess.min(agents.len())) {
            for extension in ["json", "lock", "use", "workspace"] {
                drop(fs_err::remove_file(path.with_extension(extension)));
            }
        }
    }
}

/// A remembered agent and its file.
#[derive(Debug)]
pub struct StoredAgent {
    path: PathBuf,
    pub agent: Agent,
}

impl StoredAgent {
    /// Forgets the agent.
    pub fn remove(self) -> io::Result<()> {
        match fs_err::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The remembered agent with a token, in the user's client state directory.
pub fn stored_with_token(state: &Path, token: &str) -> io::Result<Option<StoredAgent>> {
    let entries = match fs_err::read_dir(state.join("agents")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    for entry in entries.take(4 * MAX_AGENTS) {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == "json")
            && let Some(text) = read_private(&path)?
            && let Ok(agent) = serde_json::from_slice::<Agent>(&text)
            && agent.token == token
        {
            return Ok(Some(StoredAgent { path, agent }));
        }
    }
    Ok(None)
}

/// Reads a file with a token. One that others can read is closed to them, and the user is told.
fn read_private(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match fs_err::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mode = file.metadata()?.permissions().mode();
    if mode & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
        output::message(&format!(
            "cynode: {} was open to others (mode {:03o}) and is private now; to be safe, give its \
             agent a new token with 'cynode mcp --forget'",
            sanitize::line(&path.display().to_string()),
            mode & 0o777
        ));
    }
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
    Ok(Some(text))
}

/// Takes a lock without blocking the thread.
async fn wait_for(file: &fs_err::File, operation: FlockOperation) -> io::Result<()> {
    loop {
        match flock(file, operation) {
            Err(rustix::io::Errno::WOULDBLOCK) => tokio::time::sleep(LOCK_POLL).await,
            taken => return Ok(taken?),
        }
    }
}

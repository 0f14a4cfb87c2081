//! The state directory, which `up`, `down` and the client commands share: locks, endpoints and
//! tokens.

use std::{
    io::{self, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use cynode_service::private;
use fs_err::os::unix::fs::OpenOptionsExt;
use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};

use crate::{
    cli::Globals,
    failure::{Failure, USAGE},
};

/// `endpoints.json`, which exists while all roles are ready. Roles that don't run are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoints {
    pub version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<String>,
    /// The git egress role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub git: Option<String>,
    /// The CA of their certificates, if the configuration names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    pub pid: u32,
}

/// The paths below a state directory.
#[derive(Clone, Debug)]
pub struct StateDir(PathBuf);

impl StateDir {
    pub fn new(globals: &Globals) -> Result<Self, Failure> {
        let path = globals.state_dir.clone().unwrap_or_else(|| {
            cynode_service::config::default_state_dir(
                rustix::process::geteuid().is_root(),
                |name| std::env::var(name).ok(),
            )
        });
        Ok(Self(std::path::absolute(path)?))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn log(&self, name: &str) -> PathBuf {
        self.0.join("log").join(name)
    }

    /// Creates the directory and its `log`, for the owner only.
    pub fn create(&self) -> io::Result<()> {
        let path = self.0.join("log");
        std::fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&path)
            .map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("can't create {}: {error}", path.display()),
                )
            })
    }

    pub fn endpoints(&self) -> io::Result<Option<Endpoints>> {
        match fs_err::read(self.endpoints_path()) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).map_err(|error| {
                io::Error::other(format!("{}: {error}", self.endpoints_path().display()))
            })?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn write_endpoints(&self, endpoints: &Endpoints) -> io::Result<()> {
        let mut text = serde_json::to_vec(endpoints)?;
        text.push(b'\n');
        cynode_service::files::replace(&self.endpoints_path(), &text)
    }

    pub fn remove_endpoints(&self) {
        // The file may be missing.
        drop(fs_err::remove_file(self.endpoints_path()));
    }

    /// Reads a token file.
    pub fn token(&self, name: &str) -> io::Result<Option<String>> {
        match fs_err::read_to_string(self.0.join(name)) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Refuses a directory whose restore was interrupted: its state is incomplete.
    pub fn check_restored(&self) -> Result<(), Failure> {
        if !self.unfinished_restore().exists() {
            return Ok(());
        }
        let message = format!(
            "a restore into {} was interrupted and its state is incomplete",
            self.0.display()
        );
        Err(Failure::new(USAGE, "restore_unfinished", message)
            .remedy("Empty the directory and restore again."))
    }

    /// A file that exists while a restore is in progress.
    pub fn unfinished_restore(&self) -> PathBuf {
        self.0.join("restore.unfinished")
    }

    fn endpoints_path(&self) -> PathBuf {
        self.0.join("endpoints.json")
    }

    fn lock_path(&self) -> PathBuf {
        self.0.join("up.lock")
    }
}

/// The lock that allows one `up` per state directory. The kernel releases it when its holder exits.
#[derive(Debug)]
pub struct Lock {
    _file: fs_err::File,
}

#[derive(Debug)]
pub enum LockState {
    Acquired(Lock),
    /// Another process holds the lock; its id, if it can be read.
    HeldBy(Option<u32>),
}

impl Lock {
    pub fn acquire(state: &StateDir) -> io::Result<LockState> {
        let path = state.lock_path();
        let mut file = private::open_lock(&path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(LockState::HeldBy(read_pid(&path))),
            Err(error) => return Err(error.into()),
        }
        file.set_len(0)?;
        writeln!(file, "{}", std::process::id())?;
        Ok(LockState::Acquired(Self { _file: file }))
    }

    /// The current holder, if any. Takes a shared lock for a moment.
    pub fn holder(state: &StateDir) -> io::Result<Option<LockState>> {
        let path = state.lock_path();
        Ok(is_held(&path, FlockOperation::NonBlockingLockShared)?
            .then(|| LockState::HeldBy(read_pid(&path))))
    }

    /// Whether a worker runs on this state directory, with or without `up`. A worker holds its own
    /// lock until it exits.
    pub fn worker_runs(state: &StateDir) -> io::Result<bool> {
        is_held(
            &state.0.join("worker").join("lock"),
            FlockOperation::NonBlockingLockShared,
        )
    }

    /// Whether a git role runs in its default directory. It holds its own lock until it exits.
    pub fn git_runs(state: &StateDir) -> io::Result<bool> {
        is_held(
            &state.0.join("egress/git/lock"),
            FlockOperation::NonBlockingLockShared,
        )
    }

    /// Marks that an orchestrator runs on this state directory until the lock is dropped. The lock
    /// is shared: several may run.
    pub fn mark_orchestrator(state: &StateDir) -> io::Result<Self> {
        let path = orchestrator_lock(state);
        fs_err::create_dir_all(state.0.join("orchestrator"))?;
        let file = private::open_lock(&path)?;
        flock(&file, FlockOperation::LockShared)?;
        Ok(Self { _file: file })
    }

    pub fn orchestrator_runs(state: &StateDir) -> io::Result<bool> {
        is_held(
            &orchestrator_lock(state),
            FlockOperation::NonBlockingLockExclusive,
        )
    }
}

fn orchestrator_lock(state: &StateDir) -> PathBuf {
    state.0.join("orchestrator").join("lock")
}

/// Whether another holder conflicts with this kind of lock.
fn is_held(path: &Path, operation: FlockOperation) -> io::Result<bool> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = match fs_err::OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
    {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    match flock(&file, operation) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

fn read_pid(path: &Path) -> Option<u32> {
    fs_err::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(directory: &tempfile::TempDir) -> StateDir {
        let state = StateDir(directory.path().join("state"));
        state.create().expect("created");
        state
    }

    #[test]
    fn only_one_process_holds_the_lock_and_others_see_its_pid() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let state = state(&directory);
        assert!(Lock::holder(&state).expect("no lock yet").is_none());
        let LockState::Acquired(lock) = Lock::acquire(&state).expect("lock") else {
            panic!("taken")
        };
        let this = Some(std::process::id());
        assert!(
            matches!(Lock::acquire(&state).expect("lock"), LockState::HeldBy(pid) if pid == this)
        );
        assert!(matches!(
            Lock::holder(&state).expect("lock"),
            Some(LockState::HeldBy(pid)) if pid == this
        ));
        drop(lock);
        assert!(Lock::holder(&state).expect("lock").is_none());
        assert!(matches!(
            Lock::acquire(&state).expect("lock"),
            LockState::Acquired(_)
        ));
    }

    #[test]
    fn endpoints_are_private_and_round_trip() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().expect("temporary directory");
        let state = state(&directory);
        assert_eq!(state.endpoints().expect("absent"), None);
        let endpoints = Endpoints {
            version: 1,
            worker: Some("http://127.0.0.1:1".into()),
            pid: 7,
            ..Endpoints::default()
        };
        state.write_endpoints(&endpoints).expect("written");
        assert_eq!(state.endpoints().expect("there"), Some(endpoints));
        assert_eq!(
            fs_err::metadata(state.endpoints_path())
                .expect("there")
                .permissions()
                .mode()
                & 0o777,
            0o600
        );
        assert_eq!(
            fs_err::read_to_string(state.endpoints_path()).expect("text"),
            "{\"version\":1,\"worker\":\"http://127.0.0.1:1\",\"pid\":7}\n"
        );
        state.remove_endpoints();
        assert_eq!(state.endpoints().expect("absent"), None);
    }
}

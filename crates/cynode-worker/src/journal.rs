//! The journal: the worker's identity, sessions, containers, jobs and workspaces, recoverable after
//! any crash.
//!
//! One file per record, replaced atomically. An unreadable file is set aside and reported, never
//! silently dropped.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use cynode_api::{
    JobId, NodeId, SandboxId, Session, SessionCreate, SessionId, SessionState, TaskId, WorkspaceId,
};
use cynode_service::files;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use time::OffsetDateTime;

use crate::{disk, sandbox::InitProcess, tree};

/// The on-disk record of a session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SessionRecord {
    pub(crate) request: SessionCreate,
    pub(crate) session: Session,
    pub(crate) sandbox_id: SandboxId,
    pub(crate) image_id: String,
    /// The image's environment, filtered.
    pub(crate) image_env: Vec<(String, String)>,
    /// The first host id of its block.
    pub(crate) id_block: u32,
    pub(crate) idle_timeout_seconds: u64,
    pub(crate) init: Option<InitProcess>,
    /// Set when the session is to end: the fate of its workspace.
    pub(crate) disposal: Option<Disposal>,
    /// The session had a container before: its workspace holds files, which a failed restart must
    /// not delete.
    #[serde(default)]
    pub(crate) resumed: bool,
    /// The sandbox has a directory for a job. Those that earlier versions started have none.
    #[serde(default)]
    pub(crate) has_job_directory: bool,
    /// The sandbox reaches proxies through listeners on loopback. Those that earlier versions
    /// started, or that have no agent, don't.
    #[serde(default)]
    pub(crate) has_proxies: bool,
    /// The job that owns this sandbox. Only that job sees the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) job_id: Option<JobId>,
}

/// The fate of a workspace when its session ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Disposal {
    #[default]
    Delete,
    /// Retained until deleted explicitly.
    Keep,
    /// Retained for the grace period, so that the session can be resumed.
    KeepForAWhile,
}

impl SessionRecord {
    pub(crate) fn container(&self) -> String {
        container_name(self.sandbox_id)
    }

    /// Returns whether the session may have a container.
    pub(crate) fn is_live(&self) -> bool {
        matches!(
            self.session.state,
            SessionState::Creating | SessionState::Running | SessionState::Ending
        )
    }
}

pub(crate) fn container_name(sandbox_id: SandboxId) -> String {
    format!("cynode-{sandbox_id}")
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WorkspaceRecord {
    pub(crate) workspace_id: WorkspaceId,
    pub(crate) task_id: TaskId,
    pub(crate) id_block: u32,
    /// When it is deleted unless a session uses it; `None` if it is retained until deleted
    /// explicitly.
    #[serde(with = "time::serde::rfc3339::option")]
    pub(crate) delete_at: Option<OffsetDateTime>,
    /// Size of its disk; `None` if it has no disk of its own.
    #[serde(default)]
    pub(crate) disk_bytes: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct NodeRecord {
    node_id: NodeId,
}

#[derive(Clone, Debug)]
pub(crate) struct Journal {
    directory: PathBuf,
    emptying: Arc<Mutex<()>>,
}

impl Journal {
    pub(crate) fn open(directory: PathBuf) -> io::Result<Self> {
        for name in ["sessions", "sandboxes", "workspaces", "jobs", "trash"] {
            fs_err::create_dir_all(directory.join(name))?;
        }
        Ok(Self {
            directory,
            emptying: Arc::default(),
        })
    }

    /// This worker's id, generated at its first start.
    pub(crate) fn node_id(&self) -> io::Result<NodeId> {
        let path = self.directory.join("node.json");
        if let Some(NodeRecord { node_id }) = read(&path)? {
            return Ok(node_id);
        }
        // Containers are labeled with this id. If its file is lost, recover it from the sessions.
        let node_id = self
            .sessions()?
            .first()
            .map_or_else(NodeId::generate, |record| record.session.node_id);
        write(&path, &NodeRecord { node_id })?;
        Ok(node_id)
    }

    pub(crate) fn session_directory(&self, id: SessionId) -> PathBuf {
        self.directory.join("sessions").join(id.to_string())
    }

    pub(crate) fn sandbox_directory(&self, id: SandboxId) -> PathBuf {
        self.directory.join("sandboxes").join(id.to_string())
    }

    pub(crate) fn workspace_directory(&self, id: WorkspaceId) -> PathBuf {
        self.directory.join("workspaces").join(id.to_string())
    }

    /// The image of a workspace's disk, and its mount point. Without a disk, the latter is a plain
    /// directory.
    pub(crate) fn workspace_disk(&self, id: WorkspaceId) -> (PathBuf, PathBuf) {
        let directory = self.workspace_directory(id);
        (directory.join("disk.img"), directory.join("data"))
    }

    /// All mounted disks of this worker, including those left by a crash.
    pub(crate) fn mounts(&self) -> io::Result<Vec<PathBuf>> {
        disk::mounted_below(&self.directory)
    }

    pub(crate) fn trash(&self) -> PathBuf {
        self.directory.join("trash")
    }

    pub(crate) fn write_session(&self, record: &SessionRecord) -> io::Result<()> {
        let directory = self.session_directory(record.session.session_id);
        fs_err::create_dir_all(&directory)?;
        write(&directory.join("session.json"), record)
    }

    pub(crate) fn sessions(&self) -> io::Result<Vec<SessionRecord>> {
        self.records("sessions", "session.json")
    }

    pub(crate) fn write_workspace(&self, record: &WorkspaceRecord) -> io::Result<()> {
        let directory = self.workspace_directory(record.workspace_id);
        fs_err::create_dir_all(&directory)?;
        write(&directory.join("workspace.json"), record)
    }

    pub(crate) fn workspace(&self, id: WorkspaceId) -> io::Result<Option<WorkspaceRecord>> {
        read(&self.workspace_directory(id).join("workspace.json"))
    }

    pub(crate) fn workspaces(&self) -> io::Result<Vec<WorkspaceRecord>> {
        self.records("workspaces", "workspace.json")
    }

    pub(crate) fn sandboxes(&self) -> io::Result<Vec<SandboxId>> {
        Ok(names(&self.directory.join("sandboxes"))?
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect())
    }

    fn job_path(&self, id: JobId) -> PathBuf {
        self.directory.join("jobs").join(format!("{id}.json"))
    }

    /// The files of a job beside its record.
    pub(crate) fn job_directory(&self, id: JobId) -> PathBuf {
        self.directory.join("jobs").join(id.to_string())
    }

    /// Directories of jobs without a record, left by a crash. Call only while no job is being
    /// accepted.
    pub(crate) fn unrecorded_jobs(&self) -> io::Result<Vec<PathBuf>> {
        let names = names(&self.directory.join("jobs"))?;
        let ids = names.iter().filter_map(|name| name.parse::<JobId>().ok());
        Ok(ids
            .filter(|id| !self.job_path(*id).exists() && self.unreadable_job(*id).is_none())
            .map(|id| self.job_directory(id))
            .collect())
    }

    pub(crate) fn write_job<T: Serialize>(&self, id: JobId, record: &T) -> io::Result<()> {
        write(&self.job_path(id), record)
    }

    pub(crate) fn job<T: DeserializeOwned>(&self, id: JobId) -> io::Result<Option<T>> {
        read(&self.job_path(id))
    }

    /// The path of a job's record that was set aside as unreadable, if any.
    pub(crate) fn unreadable_job(&self, id: JobId) -> Option<PathBuf> {
        Some(self.job_path(id).with_extension("unreadable")).filter(|path| path.exists())
    }

    pub(crate) fn forget_job(&self, id: JobId) -> io::Result<()> {
        match fs_err::remove_file(self.job_path(id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// The ids of all recorded jobs. Removes partial files left by a crash.
    pub(crate) fn jobs(&self) -> io::Result<Vec<JobId>> {
        let directory = self.directory.join("jobs");
        let mut found = Vec::new();
        for name in names(&directory)? {
            if name.starts_with('.') {
                fs_err::remove_file(directory.join(&name))?;
            }
            found.extend(
                name.strip_suffix(".json")
                    .and_then(|id| id.parse::<JobId>().ok()),
            );
        }
        Ok(found)
    }

    fn records<T: DeserializeOwned>(&self, kind: &str, file: &str) -> io::Result<Vec<T>> {
        let directory = self.directory.join(kind);
        let mut found = Vec::new();
        for name in names(&directory)? {
            found.extend(read(&directory.join(&name).join(file))?);
        }
        Ok(found)
    }

    /// Session directories without a record, left by a crash and not referenced by anything. Call
    /// only while no session is being created.
    pub(crate) fn unrecorded_sessions(&self) -> io::Result<Vec<PathBuf>> {
        let found = self.unrecorded("sessions", "session.json")?;
        Ok(found
            .into_iter()
            .filter(|directory| !directory.join("session.unreadable").exists())
            .collect())
    }

    /// Workspace directories without a readable record.
    pub(crate) fn unrecorded_workspaces(&self) -> io::Result<Vec<PathBuf>> {
        self.unrecorded("workspaces", "workspace.json")
    }

    fn unrecorded(&self, kind: &str, file: &str) -> io::Result<Vec<PathBuf>> {
        let directory = self.directory.join(kind);
        let paths = names(&directory)?
            .into_iter()
            .map(|name| directory.join(name));
        let is_missing = |path: &Path| {
            fs_err::metadata(path.join(file))
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        Ok(paths.filter(|path| is_missing(path)).collect())
    }

    /// Deletes what was discarded before this call. Serialized: concurrent removals of one tree
    /// would both fail.
    pub(crate) fn empty_trash(&self) {
        let _emptying = self.emptying.lock();
        for entry in fs_err::read_dir(self.trash())
            .into_iter()
            .flatten()
            .flatten()
        {
            if let Err(error) = tree::remove(&entry.path()) {
                tracing::warn!(
                    path = %entry.path().display(),
                    %error,
                    "Failed to empty the trash; will retry."
                );
            }
        }
    }

    /// Moves a directory to the trash atomically; its files are deleted later.
    pub(crate) fn discard(&self, path: &Path) -> io::Result<()> {
        match fs_err::rename(path, self.trash().join(uuid::Uuid::now_v7().to_string())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

fn names(directory: &Path) -> io::Result<Vec<String>> {
    fs_err::read_dir(directory)?
        .filter_map(|entry| {
            entry
                .map(|entry| entry.file_name().into_string().ok())
                .transpose()
        })
        .collect()
}

fn write(path: &Path, record: &impl Serialize) -> io::Result<()> {
    files::replace(path, &serde_json::to_vec(record)?)
}

/// Reads a record; `None` if it does not exist. An unparsable one is set aside.
fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let bytes = match fs_err::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match serde_json::from_slice(&bytes) {
        Ok(record) => Ok(Some(record)),
        Err(error) => {
            let aside = path.with_extension("unreadable");
            tracing::error!(
                path = %path.display(),
                aside = %aside.display(),
                %error,
                "Set an unreadable journal file aside."
            );
            fs_err::rename(path, aside)?;
            Ok(None)
        }
    }
}

/// Runs file operations that sync, and may be slow, off the async threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(interrupted()))
}

pub(crate) fn interrupted() -> io::Error {
    io::Error::other("the work was interrupted")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trash_is_empty_after_concurrent_removals() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = Journal::open(directory.path().to_owned()).expect("opens");
        for _ in 0..20 {
            for number in 0..200 {
                fs_err::create_dir_all(journal.trash().join(format!("tree/{number}/below")))
                    .expect("made");
                fs_err::write(journal.trash().join(format!("tree/{number}/file")), "x")
                    .expect("written");
            }
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        journal.empty_trash();
                        assert_eq!(
                            names(&journal.trash()).expect("listed"),
                            Vec::<String>::new()
                        );
                    });
                }
            });
        }
    }
}

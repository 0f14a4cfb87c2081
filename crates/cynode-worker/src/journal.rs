//! What a worker must find again after any crash: its identity, its sessions and their containers, its workspaces.
//!
//! One file per thing, replaced atomically. A file that can't be read is set aside and reported, never silently dropped.

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

/// A session as it is on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SessionRecord {
    pub(crate) request: SessionCreate,
    pub(crate) session: Session,
    pub(crate) sandbox_id: SandboxId,
    pub(crate) image_id: String,
    /// The environment that the image brings, cleaned.
    pub(crate) image_env: Vec<(String, String)>,
    /// The first id of its block on the host.
    pub(crate) id_block: u32,
    pub(crate) idle_timeout_seconds: u64,
    pub(crate) init: Option<InitProcess>,
    /// Set when it is to end: how the workspace is disposed of.
    pub(crate) disposal: Option<Disposal>,
    /// It had a container before: its workspace holds files, which a failure to start again must not cost.
    #[serde(default)]
    pub(crate) resumed: bool,
    /// The job whose sandbox this is. Only the job knows of such a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) job_id: Option<JobId>,
}

/// What becomes of a workspace when its session ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Disposal {
    #[default]
    Delete,
    /// Until it is asked for.
    Keep,
    /// For the grace period, so that the session can be resumed.
    KeepForAWhile,
}

impl SessionRecord {
    pub(crate) fn container(&self) -> String {
        container_name(self.sandbox_id)
    }

    /// Whether it may have a container.
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
    /// When it is deleted unless a session has it; absent when it is kept until it is asked for.
    #[serde(with = "time::serde::rfc3339::option")]
    pub(crate) delete_at: Option<OffsetDateTime>,
    /// The size of its disk; absent when it has none of its own.
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

    /// This worker's id, made at its first start.
    pub(crate) fn node_id(&self) -> io::Result<NodeId> {
        let path = self.directory.join("node.json");
        if let Some(NodeRecord { node_id }) = read(&path)? {
            return Ok(node_id);
        }
        // Containers are found by this id: when its file is lost, what the sessions remember of it still holds.
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

    /// The image of a workspace's disk, and where it is mounted. Without a disk the second is a plain directory.
    pub(crate) fn workspace_disk(&self, id: WorkspaceId) -> (PathBuf, PathBuf) {
        let directory = self.workspace_directory(id);
        (directory.join("disk.img"), directory.join("data"))
    }

    /// All disks that are mounted for this worker, wherever a crash left them.
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

    pub(crate) fn write_job<T: Serialize>(&self, id: JobId, record: &T) -> io::Result<()> {
        write(&self.job_path(id), record)
    }

    pub(crate) fn job<T: DeserializeOwned>(&self, id: JobId) -> io::Result<Option<T>> {
        read(&self.job_path(id))
    }

    /// Where the record of a job was set aside, if it was.
    pub(crate) fn unreadable_job(&self, id: JobId) -> Option<PathBuf> {
        Some(self.job_path(id).with_extension("unreadable")).filter(|path| path.exists())
    }

    pub(crate) fn forget_job(&self, id: JobId) -> io::Result<()> {
        match fs_err::remove_file(self.job_path(id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// The ids of all jobs that have a record. What a crash left half written goes.
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

    /// Directories of sessions whose record never came: a crash was between the two, and nothing refers to them. To be asked
    /// only while nobody makes new ones.
    pub(crate) fn unrecorded_sessions(&self) -> io::Result<Vec<PathBuf>> {
        let found = self.unrecorded("sessions", "session.json")?;
        Ok(found
            .into_iter()
            .filter(|directory| !directory.join("session.unreadable").exists())
            .collect())
    }

    /// Directories of workspaces without a record that can be read.
    pub(crate) fn unrecorded_workspaces(&self) -> io::Result<Vec<PathBuf>> {
        self.unrecorded("workspaces", "workspace.json")
    }

    fn unrecorded(&self, kind: &str, file: &str) -> io::Result<Vec<PathBuf>> {
        let directory = self.directory.join(kind);
        let paths = names(&directory)?
            .into_iter()
            .map(|name| directory.join(name));
        Ok(paths.filter(|path| matches!(fs_err::metadata(path.join(file)), Err(error) if error.kind() == io::ErrorKind::NotFound)).collect())
    }

    /// Deletes what was thrown away before this was called. One at a time: two at work on the same tree would trip over each
    /// other, and both leave it.
    pub(crate) fn empty_trash(&self) {
        let _emptying = self.emptying.lock();
        for entry in fs_err::read_dir(self.trash())
            .into_iter()
            .flatten()
            .flatten()
        {
            if let Err(error) = tree::remove(&entry.path()) {
                tracing::warn!(path = %entry.path().display(), %error, "Emptying the trash failed; it is tried again.");
            }
        }
    }

    /// Moves a directory to the trash, at once and whole; the files go later.
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

/// Reads a record; `None` when there is none. One that can't be parsed is set aside.
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
            tracing::error!(path = %path.display(), aside = %aside.display(), %error, "A journal file can't be read; it is set aside.");
            fs_err::rename(path, aside)?;
            Ok(None)
        }
    }
}

/// Work on files that are synced, which a slow disk can make long: apart from the threads that serve everybody.
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
    fn whoever_has_emptied_the_trash_finds_it_empty_whoever_else_does_so() {
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

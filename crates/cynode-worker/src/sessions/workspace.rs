//! Workspaces: the files of a session on the host, owned by the ids of its sandbox.
//!
//! A workspace has a home and a job directory beside it on its disk. The worker creates these
//! directories and hands them over. While a sandbox is live, the worker opens nothing below them by
//! name.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use cynode_api::{ErrorCode, SessionId, TaskId, Unenforced, WorkspaceId, WorkspaceRef};
use cynode_service::ApiError;
use rustix::fs::{AtFlags, CWD, Gid, Uid};
use time::OffsetDateTime;

use super::{Sessions, blocking, journal_error, validate};
use crate::{disk, idrange::AGENT_ID, journal::WorkspaceRecord, tree};

/// The requested disk size, and whether the request set it explicitly.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestedDisk {
    pub(super) bytes: u64,
    pub(super) explicit: bool,
}

/// What a sandbox mounts from the disk of its workspace.
#[derive(Debug)]
pub(super) struct Directories {
    pub(super) workspace: PathBuf,
    pub(super) home: PathBuf,
    pub(super) job: PathBuf,
}

impl Sessions {
    /// Resolves the workspace of a request, or creates one with its block of ids.
    pub(super) async fn workspace(
        self: &Arc<Self>,
        reference: &WorkspaceRef,
        task_id: TaskId,
        for_session: SessionId,
        disk: RequestedDisk,
    ) -> Result<WorkspaceRecord, ApiError> {
        match reference {
            WorkspaceRef::New | WorkspaceRef::Artifact(_) => {
                let id_block = self.allocate_id_block().await.ok_or_else(|| {
                    ApiError::new(
                        ErrorCode::NoCapacity,
                        "all blocks of ids are used by sessions and retained workspaces",
                    )
                })?;
                let record = WorkspaceRecord {
                    workspace_id: WorkspaceId::generate(),
                    task_id,
                    id_block,
                    delete_at: None,
                    disk_bytes: self.limits_disks().then_some(disk.bytes),
                };
                let journal = self.journal.clone();
                blocking(move || journal.write_workspace(&record).map(|()| record))
                    .await
                    .map_err(|error| {
                        self.ids.release(id_block);
                        journal_error(&error)
                    })
            }
            WorkspaceRef::Git { .. } => Err(validate::only_orchestrators_resolve()),
            WorkspaceRef::Workspace(id) => {
                let record = self
                    .journal
                    .workspace(*id)
                    .map_err(|error| journal_error(&error))?;
                // A workspace of another task is not found.
                let record = record
                    .filter(|record| record.task_id == task_id)
                    .ok_or_else(|| {
                        ApiError::new(
                            ErrorCode::WorkspaceNotFound,
                            format!("this task has no workspace {id}"),
                        )
                    })?;
                self.check_workspace_unused(*id, for_session)?;
                self.resize_disk(record, disk).await
            }
        }
    }

    /// Refuses a workspace that a live session other than `session` uses.
    pub(super) fn check_workspace_unused(
        &self,
        id: WorkspaceId,
        session: SessionId,
    ) -> Result<(), ApiError> {
        let is_used = self.by_id.lock().values().any(|entry| {
            let other = entry.record.lock();
            other.session.workspace_id == id
                && other.session.session_id != session
                && other.is_live()
        });
        if is_used {
            return Err(ApiError::new(
                ErrorCode::WorkspaceInUse,
                format!("workspace {id} is mounted in another session"),
            ));
        }
        Ok(())
    }

    /// Applies the requested disk size to a retained workspace: it can grow but not shrink.
    async fn resize_disk(
        &self,
        mut record: WorkspaceRecord,
        disk: RequestedDisk,
    ) -> Result<WorkspaceRecord, ApiError> {
        let refused = |reason: String| {
            Err(ApiError::new(
                ErrorCode::LimitUnenforceable,
                format!("limits.disk_bytes: {reason}"),
            ))
        };
        match record.disk_bytes {
            None if self.may_go_unenforced(Unenforced::Disk) => Ok(record),
            None => refused(format!(
                "this workspace has no disk limit; {} allows that",
                self.config.allowance(&[Unenforced::Disk])
            )),
            Some(_) if !self.limits_disks() => refused(
                "this workspace has its own disk, which can't be mounted on this host now"
                    .to_owned(),
            ),
            Some(current) if !disk.explicit || disk.bytes == current => Ok(record),
            Some(current) if disk.bytes < current => refused(format!(
                "this workspace has a disk of {current} bytes and can't be shrunk"
            )),
            Some(_) => {
                record.disk_bytes = Some(disk.bytes);
                let journal = self.journal.clone();
                blocking(move || journal.write_workspace(&record).map(|()| record))
                    .await
                    .map_err(|error| journal_error(&error))
            }
        }
    }

    /// Returns whether workspaces get their own disks on this host.
    pub(super) fn limits_disks(&self) -> bool {
        self.disks.is_ok()
    }

    pub(super) fn may_go_unenforced(&self, name: Unenforced) -> bool {
        self.config.allow_unenforced.contains(&name)
    }

    /// Mounts the disk, and makes it first if there is none.
    pub(super) async fn prepare_disk(
        &self,
        id: WorkspaceId,
        disk_bytes: Option<u64>,
    ) -> io::Result<()> {
        let (image, data) = self.journal.workspace_disk(id);
        fs_err::create_dir_all(&data)?;
        if let Some(bytes) = disk_bytes {
            let disks = self
                .disks
                .as_ref()
                .map_err(|error| io::Error::other(error.clone()))?;
            disks.make(&image, bytes).await?;
            disk::mount(&image, &data).await?;
        }
        Ok(())
    }

    /// Creates the directories for the sandbox's user, where missing.
    pub(super) fn prepare_directories(
        &self,
        id: WorkspaceId,
        id_block: u32,
    ) -> io::Result<Directories> {
        let (_, data) = self.journal.workspace_disk(id);
        let owner = id_block + AGENT_ID;
        let directories = Directories {
            workspace: data.join("workspace"),
            home: data.join("home"),
            job: job_directory(&data),
        };
        if !exists(&directories.job)? {
            make_job_directory(&directories.job, owner)?;
        }
        for directory in [&directories.workspace, &directories.home, &directories.job] {
            hand_over(directory, owner)?;
        }
        Ok(directories)
    }

    /// Returns whether the disk of a workspace has the job directory of an earlier sandbox.
    pub(super) fn has_job_directory(&self, id: WorkspaceId) -> io::Result<bool> {
        exists(&job_directory(&self.journal.workspace_disk(id).1))
    }

    /// Removes the job directory of an earlier sandbox. The workspace has no live one.
    pub(super) async fn remove_job_directory(&self, id: WorkspaceId) -> io::Result<()> {
        let job = job_directory(&self.journal.workspace_disk(id).1);
        blocking(move || tree::remove(&job)).await
    }

    /// Retains a workspace, for the grace period or indefinitely.
    pub(super) async fn keep_workspace(
        &self,
        id: WorkspaceId,
        for_a_while: bool,
    ) -> io::Result<()> {
        let (journal, grace) = (self.journal.clone(), self.config.workspace_grace_seconds);
        blocking(move || {
            let Some(mut record) = journal.workspace(id)? else {
                return Ok(());
            };
            let delete_at = for_a_while.then(|| validate::after(OffsetDateTime::now_utc(), grace));
            if record.delete_at == delete_at {
                return Ok(());
            }
            record.delete_at = delete_at;
            journal.write_workspace(&record)
        })
        .await
    }

    /// Unmounts the disk of a workspace that no sandbox uses any more.
    pub(super) async fn release_workspace(&self, id: WorkspaceId) -> io::Result<()> {
        disk::unmount(&self.journal.workspace_disk(id).1).await
    }

    pub(super) async fn delete_workspace(&self, id: WorkspaceId) -> io::Result<()> {
        self.release_workspace(id).await?;
        if let Some(record) = self.journal.workspace(id)? {
            self.journal
                .discard(&self.journal.workspace_directory(id))?;
            self.ids.release(record.id_block);
        }
        Ok(())
    }
}

/// The job directory on a workspace's disk.
pub(super) fn job_directory(data: &Path) -> PathBuf {
    data.join("job")
}

fn exists(path: &Path) -> io::Result<bool> {
    match fs_err::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Creates a job directory with everything in it, or none.
fn make_job_directory(job: &Path, owner: u32) -> io::Result<()> {
    let staged = job.with_extension("new");
    tree::remove(&staged)?;
    hand_over(&staged, owner)?;
    hand_over(&staged.join("artifacts"), owner)?;
    fs_err::rename(&staged, job)
}

/// Creates a directory owned by `owner`. An existing one is not modified otherwise: hostile code
/// may have put anything in it.
fn hand_over(directory: &Path, owner: u32) -> io::Result<()> {
    match fs_err::create_dir(directory) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    rustix::fs::chownat(
        CWD,
        directory,
        Some(Uid::from_raw(owner)),
        Some(Gid::from_raw(owner)),
        AtFlags::SYMLINK_NOFOLLOW,
    )?;
    Ok(())
}

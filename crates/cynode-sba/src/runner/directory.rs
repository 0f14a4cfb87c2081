//! The job directory.
//!
//! Steps can write everything in it. Therefore no link is followed, no file that may block is
//! opened, files are replaced as a whole, and the space for the result is reserved in an unnamed
//! file.

use std::{
    cell::RefCell,
    ffi::OsStr,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::OwnedFd,
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, fallocate, mkdirat, openat, unlinkat},
    io::Errno,
};

use crate::files::StagedFile;

pub(super) const JOB_FILE: &str = "job.json";
pub(super) const RESULT_FILE: &str = "result.json";
pub(super) const STATUS_FILE: &str = "status.json";
pub(super) const TODO_FILE: &str = "todo.json";
pub(super) const ARTIFACTS: &str = "artifacts";
/// Artifacts of an agent: its conversation with the model, and its changes of the workspace.
pub(super) const TRANSCRIPT: &str = "transcript.jsonl";
pub(super) const CHANGES: &str = "changes.patch";

/// Disk space that is reserved for the result, in case the job fills the disk.
const RESERVE_BYTES: u64 = 1024 * 1024;
const FILE_MODE: u32 = 0o644;

#[derive(Debug)]
pub(super) struct JobDirectory {
    directory: OwnedFd,
    /// Frees its space when dropped.
    reserve: RefCell<Option<StagedFile>>,
}

impl JobDirectory {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            directory: openat(CWD, path, flags, Mode::empty())?,
            reserve: RefCell::default(),
        })
    }

    /// Reserves space for the result, removes the result of an earlier run, and creates the
    /// directory of artifacts. Failures are ignored: the job can run without these.
    pub(super) fn prepare(&self) {
        let _gone = unlinkat(&self.directory, RESULT_FILE, AtFlags::empty());
        let _made = mkdirat(&self.directory, ARTIFACTS, Mode::from_raw_mode(0o755));
        let reserve = self.directory.try_clone().ok().and_then(|directory| {
            let mut reserve = StagedFile::new(directory).ok()?;
            fallocate(reserve.file(), FallocateFlags::empty(), 0, RESERVE_BYTES).ok()?;
            Some(reserve)
        });
        *self.reserve.borrow_mut() = reserve;
    }

    /// Reads a regular file up to its limit plus one byte, which shows that it is too long.
    pub(super) fn read(&self, name: &str, max_bytes: usize) -> io::Result<Vec<u8>> {
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(openat(&self.directory, name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let mut content = Vec::new();
        file.take(max_bytes as u64 + 1).read_to_end(&mut content)?;
        Ok(content)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        rustix::fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Replaces a file without flushing it to disk: a crash of the machine may lose it.
    pub(super) fn replace(&self, name: &str, content: &[u8]) -> io::Result<()> {
        self.stage(content)
            .and_then(|staged| self.publish(name, staged))
    }

    /// Replaces a file durably. The first call frees the reserved space.
    pub(super) fn replace_durably(&self, name: &str, content: &[u8]) -> io::Result<()> {
        self.reserve.borrow_mut().take();
        let mut staged = self.stage(content)?;
        staged.file().sync_all()?;
        self.publish(name, staged)?;
        rustix::fs::fsync(&self.directory)?;
        Ok(())
    }

    /// Replaces an artifact, whatever a step put in its place or in that of their directory.
    pub(super) fn replace_artifact(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let artifacts = if let Ok(artifacts) = self.artifacts() {
            artifacts
        } else {
            self.put_aside(ARTIFACTS).or_else(if_gone)?;
            mkdirat(&self.directory, ARTIFACTS, Mode::from_raw_mode(0o755))?;
            self.artifacts()?
        };
        artifacts.replace(name, content)
    }

    /// Removes an artifact that a step may have put there.
    pub(super) fn remove_artifact(&self, name: &str) {
        if let Ok(artifacts) = self.artifacts()
            && artifacts.has(name)
        {
            let _gone = unlinkat(&artifacts.directory, name, AtFlags::empty());
        }
    }

    fn artifacts(&self) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self {
            directory: openat(&self.directory, ARTIFACTS, flags, Mode::empty())?,
            reserve: RefCell::default(),
        })
    }

    fn stage(&self, content: &[u8]) -> io::Result<StagedFile> {
        let mut staged = StagedFile::new(self.directory.try_clone()?)?;
        staged.file().write_all(content)?;
        Ok(staged)
    }

    fn publish(&self, name: &str, staged: StagedFile) -> io::Result<()> {
        if self.is_directory(name) {
            self.put_aside(name)?;
        }
        staged.publish(&self.directory, OsStr::new(name), FILE_MODE, true)?;
        Ok(())
    }

    fn is_directory(&self, name: &str) -> bool {
        let stat = rustix::fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW);
        stat.is_ok_and(|stat| {
            rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory
        })
    }

    /// Renames a directory that a step has created at the path of a file.
    fn put_aside(&self, name: &str) -> Result<(), Errno> {
        let aside = format!(".{name}.{}", std::process::id());
        rustix::fs::renameat(&self.directory, name, &self.directory, aside)
    }
}

fn if_gone(errno: Errno) -> Result<(), Errno> {
    if errno == Errno::NOENT {
        Ok(())
    } else {
        Err(errno)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn directory() -> (tempfile::TempDir, JobDirectory) {
        let temp = tempfile::tempdir().expect("temp dir");
        let directory = JobDirectory::open(temp.path()).expect("opened");
        (temp, directory)
    }

    #[test]
    fn whatever_a_step_put_in_place_of_a_file_is_replaced_and_not_followed() {
        let (temp, directory) = directory();
        let result = temp.path().join(RESULT_FILE);
        std::fs::write(temp.path().join("secret"), "secret").expect("written");
        directory.replace(RESULT_FILE, b"first").expect("written");
        assert_eq!(std::fs::read(&result).expect("read"), b"first");
        std::fs::remove_file(&result).expect("removed");
        symlink("secret", &result).expect("link");
        directory
            .replace_durably(RESULT_FILE, b"second")
            .expect("written");
        assert_eq!(std::fs::read(&result).expect("read"), b"second");
        std::fs::remove_file(&result).expect("removed");
        std::fs::create_dir_all(result.join("full")).expect("made");
        directory.replace(RESULT_FILE, b"third").expect("written");
        assert_eq!(std::fs::read(&result).expect("read"), b"third");
        assert_eq!(
            std::fs::read(temp.path().join("secret")).expect("read"),
            b"secret"
        );
    }

    #[test]
    fn an_artifact_replaces_what_a_step_put_in_its_place() {
        let (temp, directory) = directory();
        let artifacts = temp.path().join(ARTIFACTS);
        for spoil in [
            (|_: &Path| ()) as fn(&Path),
            |artifacts| std::fs::write(artifacts, "a file").expect("written"),
            |artifacts| symlink("elsewhere", artifacts).expect("link"),
            |artifacts| {
                std::fs::create_dir_all(artifacts.join(CHANGES).join("full")).expect("made");
            },
        ] {
            std::fs::remove_dir_all(&artifacts).ok();
            spoil(&artifacts);
            directory
                .replace_artifact(CHANGES, b"patch")
                .expect("written");
            assert_eq!(
                std::fs::read(artifacts.join(CHANGES)).expect("read"),
                b"patch"
            );
        }
        directory.remove_artifact(CHANGES);
        assert!(!artifacts.join(CHANGES).exists());
        assert!(!temp.path().join("elsewhere").exists());
    }

    #[test]
    fn only_regular_files_are_read_up_to_a_bound() {
        let (temp, directory) = directory();
        std::fs::write(temp.path().join("file"), "12345").expect("written");
        assert_eq!(directory.read("file", 5).expect("read"), b"12345");
        assert_eq!(directory.read("file", 3).expect("read"), b"1234");
        symlink("file", temp.path().join("link")).expect("link");
        rustix::fs::mkfifoat(CWD, temp.path().join("fifo"), Mode::RUSR).expect("fifo");
        for name in ["link", "fifo", ".", "none"] {
            assert!(directory.read(name, 5).is_err(), "{name}");
        }
    }

    #[test]
    fn preparing_removes_an_old_result_and_leaves_no_visible_reserve() {
        let (temp, directory) = directory();
        directory.replace(RESULT_FILE, b"old").expect("written");
        directory.prepare();
        let names: Vec<_> = std::fs::read_dir(temp.path())
            .expect("listed")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        assert_eq!(names, [ARTIFACTS]);
        assert!(directory.reserve.borrow().is_some());
        directory
            .replace_durably(RESULT_FILE, b"new")
            .expect("written");
        assert!(directory.reserve.borrow().is_none() && directory.has(RESULT_FILE));
    }
}

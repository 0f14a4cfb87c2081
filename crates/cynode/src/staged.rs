//! Writes a local file atomically: under an unpredictable name in the same directory, then renamed.
//!
//! Invariants: the file is new (`O_EXCL`), so an existing file or link is never written to or
//! followed; it is removed if the work fails or a signal interrupts it.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use tokio::signal::unix::{SignalKind, signal};

use crate::{failure::Failure, session::transfer::local_failure};

/// A file under construction, which is removed when this is dropped.
#[derive(Debug)]
pub struct StagedFile {
    path: PathBuf,
    target: PathBuf,
}

impl StagedFile {
    /// Creates an empty file in the directory of `target`, with at most these permissions.
    pub fn create(target: &Path, mode: u32) -> Result<(Self, fs_err::File), Failure> {
        let name = target
            .file_name()
            .ok_or_else(|| Failure::usage(format!("{} has no file name", target.display())))?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".cynode-{}", uuid::Uuid::new_v4().simple()));
        let path = target.with_file_name(hidden);
        let file = fs_err::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path)
            .map_err(|error| local_failure(&error))?;
        Ok((
            Self {
                path,
                target: target.to_owned(),
            },
            file,
        ))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the file to its target. Replaces a link, without following it.
    pub fn commit(self) -> io::Result<()> {
        fs_err::rename(&self.path, &self.target)
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        // The file is missing after a commit.
        drop(fs_err::remove_file(&self.path));
    }
}

/// Runs the work until a signal arrives, which drops the work and its staged files.
pub async fn unless_interrupted<T>(
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let (mut interrupt, mut terminate, mut hangup) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
    );
    let received = tokio::select! {
        result = work => return result,
        _ = interrupt.recv() => SignalKind::interrupt(),
        _ = terminate.recv() => SignalKind::terminate(),
        _ = hangup.recv() => SignalKind::hangup(),
    };
    // The exit code that a shell gives to a program that a signal ended.
    Err(Failure::reported(
        u8::try_from(128 + received.as_raw_value()).unwrap_or(u8::MAX),
    ))
}

/// From now on no signal but KILL ends the process: for the rest of its work, which is short and
/// must not stop halfway.
pub fn outlast_signals() -> io::Result<()> {
    for kind in [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
    ] {
        // The handler stays when the stream is dropped.
        drop(signal(kind)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::fs::symlink};

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs_err::read_dir(directory)
            .expect("a directory")
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .into_string()
                    .expect("text")
            })
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let root = tempfile::tempdir().expect("a directory");
        let target = root.path().join("out");
        let (staged, mut file) = StagedFile::create(&target, 0o644).expect("made");
        let (other, _) = StagedFile::create(&target, 0o644).expect("another beside it");
        assert_ne!(staged.path(), other.path());
        assert!(
            !staged
                .path()
                .display()
                .to_string()
                .contains(&std::process::id().to_string())
                && !target.exists()
        );
        drop(other);
        file.write_all(b"whole").expect("written");
        staged.commit().expect("renamed");
        assert_eq!(
            (
                fs_err::read_to_string(&target).expect("there"),
                names(root.path())
            ),
            ("whole".to_owned(), vec!["out".to_owned()])
        );
        // A failed write keeps the existing file.
        let (staged, mut file) = StagedFile::create(&target, 0o644).expect("made");
        file.write_all(b"half").expect("written");
        drop(staged);
        assert_eq!(
            (
                fs_err::read_to_string(&target).expect("there"),
                names(root.path())
            ),
            ("whole".to_owned(), vec!["out".to_owned()])
        );
        assert!(StagedFile::create(Path::new("/"), 0o644).is_err());
    }

    #[test]
    fn a_link_in_the_place_of_the_target_is_replaced_and_not_followed() {
        let root = tempfile::tempdir().expect("a directory");
        let (target, elsewhere) = (root.path().join("out"), root.path().join("elsewhere"));
        fs_err::write(&elsewhere, "untouched").expect("written");
        symlink(&elsewhere, &target).expect("linked");
        let (staged, mut file) = StagedFile::create(&target, 0o644).expect("made");
        file.write_all(b"new").expect("written");
        staged.commit().expect("renamed");
        assert!(
            !fs_err::symlink_metadata(&target)
                .expect("there")
                .is_symlink()
        );
        assert_eq!(
            (
                fs_err::read_to_string(&elsewhere).expect("there"),
                fs_err::read_to_string(&target).expect("there")
            ),
            ("untouched".to_owned(), "new".to_owned())
        );
    }

    #[tokio::test]
    async fn a_signal_removes_what_was_staged() {
        let root = tempfile::tempdir().expect("a directory");
        let target = root.path().join("out");
        for (raw, code) in [
            (SignalKind::interrupt(), 130),
            (SignalKind::terminate(), 143),
            (SignalKind::hangup(), 129),
        ] {
            let work = async {
                let (_staged, _file) = StagedFile::create(&target, 0o644)?;
                assert_eq!(names(root.path()).len(), 1);
                let sent =
                    rustix::process::Signal::from_named_raw(raw.as_raw_value()).expect("a signal");
                rustix::process::kill_process(rustix::process::getpid(), sent).expect("sent");
                std::future::pending::<Result<(), Failure>>().await
            };
            assert_eq!(
                unless_interrupted(work)
                    .await
                    .expect_err("interrupted")
                    .exit,
                code
            );
            assert_eq!(names(root.path()), Vec::<String>::new());
        }
        assert_eq!(unless_interrupted(async { Ok(7) }).await.ok(), Some(7));
    }
}

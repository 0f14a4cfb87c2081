//! A file that is written invisibly and then published atomically under its name.
//!
//! Invariants: nothing is visible until [`StagedFile::publish`], and a killed process leaves
//! nothing behind if the file system supports `O_TMPFILE`; otherwise a hidden file can remain.

use std::{
    ffi::OsStr,
    fs::File,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
    time::SystemTime,
};

use rustix::{
    fs::{
        Access, AtFlags, CWD, Mode, OFlags, RenameFlags, access, fchmod, linkat, openat, renameat,
        renameat_with, unlinkat,
    },
    io::Errno,
};

#[derive(Debug)]
pub(crate) struct StagedFile {
    directory: OwnedFd,
    file: File,
    /// The hidden name, if the file has one.
    name: Option<String>,
}

impl StagedFile {
    /// Creates an empty file on the file system of `directory`.
    pub(crate) fn new(directory: OwnedFd) -> Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        // An unnamed file gets its name through /proc.
        if access("/proc/self/fd", Access::EXISTS).is_ok() {
            match openat(&directory, ".", flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => {
                    return Ok(Self {
                        directory,
                        file: file.into(),
                        name: None,
                    });
                }
                Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        Self::named(directory)
    }

    /// Like [`StagedFile::new`], but with a hidden name from the start.
    pub(super) fn named(directory: OwnedFd) -> Result<Self, Errno> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (name, file) =
            with_hidden_name(|name| openat(&directory, name, flags, Mode::RUSR | Mode::WUSR))?;
        Ok(Self {
            directory,
            file: file.into(),
            name: Some(name),
        })
    }

    pub(crate) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Sets permissions and name in `directory`, which must be on the same file system. Without
    /// `replace`, an existing name is an error, without a race.
    pub(crate) fn publish(
        mut self,
        directory: impl AsFd,
        name: &OsStr,
        mode: u32,
        replace: bool,
    ) -> Result<(), Errno> {
        fchmod(&self.file, Mode::from_raw_mode(mode))?;
        if self.name.is_none() {
            match self.link(&directory, Path::new(name)) {
                Err(Errno::EXIST) if replace => {
                    let (hidden, ()) =
                        with_hidden_name(|hidden| self.link(&self.directory, Path::new(hidden)))?;
                    self.name = Some(hidden);
                }
                result => return result,
            }
        }
        let Some(hidden) = self.name.as_deref() else {
            return Err(Errno::NOENT);
        };
        if replace {
            renameat(&self.directory, hidden, &directory, name)?;
        } else {
            rename_to_free_name(
                &self.directory,
                Path::new(hidden),
                &directory,
                Path::new(name),
            )?;
        }
        self.name = None;
        Ok(())
    }

    /// Keeps the file under its hidden name, for [`super::patch`], which swaps it in later.
    pub(super) fn keep(mut self) -> Option<String> {
        self.name.take()
    }

    fn link(&self, directory: impl AsFd, name: &Path) -> Result<(), Errno> {
        linkat(
            CWD,
            format!("/proc/self/fd/{}", self.file.as_raw_fd()),
            directory,
            name,
            AtFlags::SYMLINK_FOLLOW,
        )
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            // It doesn't matter if the name is gone already.
            let _gone = unlinkat(&self.directory, name, AtFlags::empty());
        }
    }
}

/// Renames only if the new name is free.
pub(super) fn rename_to_free_name(
    from_directory: impl AsFd,
    from: &Path,
    to_directory: impl AsFd,
    to: &Path,
) -> Result<(), Errno> {
    match renameat_with(
        &from_directory,
        from,
        &to_directory,
        to,
        RenameFlags::NOREPLACE,
    ) {
        // The file system doesn't support the flag, or the rename is invalid, which the fallback
        // reports.
        Err(Errno::INVAL | Errno::NOSYS) => {
            match rustix::fs::statat(&to_directory, to, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => Err(Errno::EXIST),
                Err(Errno::NOENT) => renameat(from_directory, from, to_directory, to),
                Err(errno) => Err(errno),
            }
        }
        result => result,
    }
}

/// Tries `make` with hidden names until one is free.
pub(super) fn with_hidden_name<T>(
    mut make: impl FnMut(&str) -> Result<T, Errno>,
) -> Result<(String, T), Errno> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mut attempts = 0;
    loop {
        let nanos = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.subsec_nanos());
        let name = format!(
            ".cynode-{}-{}-{nanos:08x}.tmp",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        match make(&name) {
            Err(Errno::EXIST) if attempts < 100 => attempts += 1,
            result => return result.map(|made| (name, made)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::fs::PermissionsExt};

    use super::*;

    type Make = fn(OwnedFd) -> Result<StagedFile, Errno>;

    fn for_both_kinds(test: impl Fn(&Path, Make)) {
        for make in [StagedFile::new as Make, StagedFile::named] {
            let temp = tempfile::tempdir().expect("temp dir");
            test(temp.path(), make);
        }
    }

    fn directory(path: &Path) -> OwnedFd {
        rustix::fs::open(
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .expect("directory")
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(path)
            .expect("listed")
            .map(|entry| {
                entry
                    .expect("entry")
                    .file_name()
                    .into_string()
                    .expect("text")
            })
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_published_file_replaces_the_old_one_and_leaves_nothing_else() {
        for_both_kinds(|path, make| {
            std::fs::write(path.join("name"), "old").expect("written");
            let mut staged = make(directory(path)).expect("staged");
            staged.file().write_all(b"new").expect("written");
            staged
                .publish(directory(path), OsStr::new("name"), 0o751, true)
                .expect("published");
            assert_eq!(std::fs::read(path.join("name")).expect("read"), b"new");
            assert_eq!(
                std::fs::metadata(path.join("name"))
                    .expect("stat")
                    .permissions()
                    .mode()
                    & 0o7777,
                0o751
            );
            assert_eq!(names(path), ["name"]);
        });
    }

    #[test]
    fn an_existing_file_is_kept_without_replace() {
        for_both_kinds(|path, make| {
            std::fs::write(path.join("name"), "old").expect("written");
            let staged = make(directory(path)).expect("staged");
            assert_eq!(
                staged.publish(directory(path), OsStr::new("name"), 0o644, false),
                Err(Errno::EXIST)
            );
            assert_eq!(std::fs::read(path.join("name")).expect("read"), b"old");
            assert_eq!(names(path), ["name"]);
        });
    }

    #[test]
    fn a_file_dropped_before_publishing_leaves_nothing() {
        for_both_kinds(|path, make| {
            let mut staged = make(directory(path)).expect("staged");
            staged.file().write_all(b"new").expect("written");
            drop(staged);
            assert!(names(path).is_empty());
        });
    }
}

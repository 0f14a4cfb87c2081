//! Writes the changes of a plan.
//!
//! New contents are written to a staging directory in the root first, so that a full disk shows
//! before anything changes. Then every old file moves into the staging directory, and every new one
//! to its place. A failure moves everything back. Only the death of the process in between leaves a
//! part: the old files are then in the staging directory.

use std::{io::Write as _, os::fd::OwnedFd};

use cynode_patch::{Entry, File, Kind, Location, PriorState, escaped};
use rustix::{
    fs::{
        AtFlags, Mode, OFlags, RenameFlags, fchmod, mkdirat, openat, renameat_with, statat,
        symlinkat, unlinkat,
    },
    io::Errno,
};

use super::tree::{LocalTree, Stamp};
use crate::umask;

#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    #[error("{path}: {source}; nothing was changed")]
    Unchanged { path: String, source: Errno },
    #[error("{path} changed while the patch was applied; nothing was changed")]
    Stale { path: String },
    #[error("{path}: {source}; the old files are in {staging}")]
    Partial {
        path: String,
        staging: String,
        source: Errno,
    },
}

/// One thing that was done, to be undone.
enum Done<'a> {
    /// The old file went to the staging directory under this name.
    Taken(&'a Location, String),
    /// The new file came to its place.
    Placed(&'a Location, String),
    /// A directory was made, of this many leading parts.
    Made(&'a Location, usize),
    /// An emptied directory was removed, with this mode.
    Removed(&'a Location, u32),
}

struct Commit<'a> {
    tree: &'a LocalTree,
    staging: OwnedFd,
    name: String,
    done: Vec<Done<'a>>,
}

pub(super) fn commit(
    tree: &LocalTree,
    plan: &cynode_patch::Plan<Stamp>,
) -> Result<(), CommitError> {
    let changed: Vec<(&Location, &Entry<Stamp>)> = plan
        .entries
        .iter()
        .filter(|(_, entry)| entry.changed)
        .collect();
    if changed.is_empty() {
        return Ok(());
    }
    let mut commit = Commit::new(tree)?;
    let result = commit.run(&changed);
    if let Err((location, errno)) = result {
        let path = escaped(location.as_bytes());
        return Err(match commit.undo() {
            Err(source) => CommitError::Partial {
                path,
                staging: commit.name,
                source,
            },
            Ok(()) => {
                commit.discard();
                match errno {
                    Errno::STALE => CommitError::Stale { path },
                    source => CommitError::Unchanged { path, source },
                }
            }
        });
    }
    commit.remove_emptied(&changed);
    commit.discard();
    Ok(())
}

impl<'a> Commit<'a> {
    fn new(tree: &'a LocalTree) -> Result<Self, CommitError> {
        let name = format!(".cynode-apply-{}", uuid::Uuid::new_v4().simple());
        let made = || -> Result<OwnedFd, Errno> {
            let root = tree.directory(&[])?;
            mkdirat(&root, &name, Mode::RWXU)?;
            tree.directory(&[name.as_bytes()])
        };
        match made() {
            Ok(staging) => Ok(Self {
                tree,
                staging,
                name,
                done: Vec::new(),
            }),
            Err(source) => Err(CommitError::Unchanged { path: name, source }),
        }
    }

    fn run(&mut self, changed: &[(&'a Location, &Entry<Stamp>)]) -> Result<(), (&'a Location, Errno)> {
        for (index, (location, entry)) in changed.iter().enumerate() {
            if let Some(file) = &entry.now {
                let is_new = !matches!(entry.before, PriorState::File(_));
                self.stage(index, file, is_new)
                    .map_err(|errno| (*location, errno))?;
            }
        }
        // Files go before the directories that held them, and before new ones come.
        for (index, (location, entry)) in changed.iter().enumerate() {
            if let PriorState::File(before) = &entry.before {
                self.take(index, location, before)
                    .map_err(|errno| (*location, errno))?;
            }
        }
        for (location, entry) in changed.iter().rev() {
            if let PriorState::Directory(before) = &entry.before {
                self.remove_directory(location, before)
                    .map_err(|errno| (*location, errno))?;
            }
        }
        for (index, (location, entry)) in changed.iter().enumerate() {
            if entry.now.is_some() {
                self.place(index, location)
                    .map_err(|errno| (*location, errno))?;
            }
        }
        Ok(())
    }

    /// Writes a new content. An existing file keeps its permissions; a new one gets those that the
    /// umask leaves.
    fn stage(&self, index: usize, file: &File, is_new: bool) -> Result<(), Errno> {
        let name = format!("new-{index}");
        match file.kind {
            Kind::Symlink => symlinkat(file.bytes.as_slice(), &self.staging, &name),
            Kind::Regular(mode) => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let opened = openat(&self.staging, &name, flags, Mode::RUSR | Mode::WUSR)?;
                let mut opened = std::fs::File::from(opened);
                opened.write_all(&file.bytes).map_err(|error| {
                    error
                        .raw_os_error()
                        .map_or(Errno::IO, Errno::from_raw_os_error)
                })?;
                let mode = if is_new {
                    let all = if mode & 0o111 == 0 { 0o666 } else { 0o777 };
                    all & !umask::umask().bits()
                } else {
                    mode & 0o777
                };
                fchmod(&opened, Mode::from_raw_mode(mode))
            }
        }
    }

    /// Moves an old file away, unless it changed since it was read.
    fn take(&mut self, index: usize, location: &'a Location, before: &Stamp) -> Result<(), Errno> {
        let (directory, last) = self.tree.parent(location)?;
        let stat = statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW)?;
        if Stamp::of(&stat) != *before {
            return Err(Errno::STALE);
        }
        let name = format!("old-{index}");
        move_file(&directory, last, &self.staging, name.as_bytes())?;
        self.done.push(Done::Taken(location, name));
        Ok(())
    }

    /// Removes a directory that a file replaces, and the empty directories below it.
    fn remove_directory(&mut self, location: &'a Location, before: &Stamp) -> Result<(), Errno> {
        let (directory, last) = self.tree.parent(location)?;
        let stat = statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW)?;
        if !Stamp::of(&stat).is_same_file(before) {
            return Err(Errno::STALE);
        }
        unlinkat(&directory, last, AtFlags::REMOVEDIR)?;
        self.done
            .push(Done::Removed(location, stat.st_mode & 0o777));
        Ok(())
    }

    fn place(&mut self, index: usize, location: &'a Location) -> Result<(), Errno> {
        let parts = location.parts();
        for count in 1..parts.len() {
            let parent = self.tree.directory(&parts[..count - 1])?;
            match mkdirat(
                &parent,
                parts[count - 1],
                Mode::from_raw_mode(0o777),
            ) {
                Ok(()) => self.done.push(Done::Made(location, count)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        let (directory, last) = self.tree.parent(location)?;
        let name = format!("new-{index}");
        move_file(&self.staging, name.as_bytes(), &directory, last)?;
        self.done.push(Done::Placed(location, name));
        Ok(())
    }

    /// Undoes everything in reverse order.
    fn undo(&mut self) -> Result<(), Errno> {
        while let Some(done) = self.done.pop() {
            match done {
                Done::Placed(location, name) => {
                    let (directory, last) = self.tree.parent(location)?;
                    move_file(&directory, last, &self.staging, name.as_bytes())?;
                }
                Done::Made(location, count) => {
                    let parts = location.parts();
                    let parent = self.tree.directory(&parts[..count - 1])?;
                    unlinkat(&parent, parts[count - 1], AtFlags::REMOVEDIR)?;
                }
                Done::Removed(location, mode) => {
                    let (directory, last) = self.tree.parent(location)?;
                    mkdirat(&directory, last, Mode::from_raw_mode(mode))?;
                }
                Done::Taken(location, name) => {
                    let (directory, last) = self.tree.parent(location)?;
                    move_file(&self.staging, name.as_bytes(), &directory, last)?;
                }
            }
        }
        Ok(())
    }

    /// Removes the directories that the patch emptied, as git does.
    fn remove_emptied(&self, changed: &[(&Location, &Entry<Stamp>)]) {
        for (location, entry) in changed.iter().rev() {
            if entry.now.is_some() {
                continue;
            }
            let parts = location.parts();
            for count in (1..parts.len()).rev() {
                let removed = self.tree.directory(&parts[..count - 1]).and_then(|parent| {
                    unlinkat(&parent, parts[count - 1], AtFlags::REMOVEDIR)
                });
                if removed.is_err() {
                    break;
                }
            }
        }
    }

    /// Removes the staging directory with the old files.
    fn discard(&self) {
        let Ok(entries) = rustix::fs::Dir::read_from(&self.staging) else {
            return;
        };
        for entry in entries.flatten() {
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                // A leftover is harmless.
                let _removed = unlinkat(&self.staging, entry.file_name(), AtFlags::empty());
            }
        }
        if let Ok(root) = self.tree.directory(&[]) {
            let _removed = unlinkat(&root, self.name.as_str(), AtFlags::REMOVEDIR);
        }
    }
}

/// Renames a file, but never over another.
fn move_file(from: &OwnedFd, name: &[u8], to: &OwnedFd, new: &[u8]) -> Result<(), Errno> {
    renameat_with(from, name, to, new, RenameFlags::NOREPLACE)
}

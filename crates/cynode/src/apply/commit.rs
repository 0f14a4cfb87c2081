//! Commits changes to files of a directory: all of them or none.
//!
//! New contents are first written to a staging directory in the root, so that a full disk is
//! noticed before anything changes. Then each old file moves into the staging directory, and each
//! new one to its location. A failure moves everything back. Only the death of the process in
//! between leaves the changes half made; the old files are then in the staging directory.

use std::{io::Write as _, os::fd::OwnedFd};

use cynode_patch::{File, Kind, Location, PriorState, escaped};
use rustix::{
    fs::{
        AtFlags, Gid, Mode, OFlags, RenameFlags, Uid, chownat, fchmod, mkdirat, openat, renameat,
        renameat_with, statat, symlinkat, unlinkat,
    },
    io::Errno,
};

use super::tree::{LocalTree, Stamp, entries};
use crate::umask;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Prefix of the names of staging directories.
pub(super) const STAGING: &str = ".cynode-apply-";

#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    #[error("{path}: {source}; nothing was changed")]
    Unchanged { path: String, source: Errno },
    #[error("{path} changed meanwhile; nothing was changed")]
    Stale { path: String },
    #[error("{path}: {source}; some files were changed, and the old ones are in {staging}")]
    Partial {
        path: String,
        staging: String,
        source: Errno,
    },
}

/// The new state of a location.
#[derive(Debug)]
pub(super) enum New<'a> {
    Content(&'a File),
    /// An already staged file or link, with its name in the staging directory.
    Staged(&'a str),
    /// A directory, created if there is none.
    Directory,
}

/// A change of one location.
#[derive(Debug)]
pub(super) struct PlannedChange<'a> {
    pub(super) location: &'a Location,
    pub(super) before: &'a PriorState<Stamp>,
    pub(super) new: Option<New<'a>>,
}

/// A completed step of a commit, with what is needed to undo it.
enum UndoStep<'a> {
    /// The old file was moved to the staging directory under this name.
    Taken(&'a Location, String),
    /// The new file with this staged name was moved to its location.
    Placed(&'a Location, String),
    /// A directory was created: this many leading parts of the location.
    Made(&'a Location, usize),
    /// An empty directory with this mode was removed.
    Removed(Location, u32),
}

/// A directory in the root that holds the new files before the commit, and the old ones until its
/// end. Removed with its contents when dropped.
pub(super) struct Staging<'a> {
    tree: &'a LocalTree,
    directory: OwnedFd,
    pub(super) name: String,
    is_kept: bool,
}

impl<'a> Staging<'a> {
    pub(super) fn new(tree: &'a LocalTree) -> Result<Self, CommitError> {
        let name = format!("{STAGING}{}", uuid::Uuid::new_v4().simple());
        let make = || -> Result<OwnedFd, Errno> {
            let root = tree.directory(&[])?;
            mkdirat(&root, &name, Mode::RWXU)?;
            tree.directory(&[name.as_bytes()])
        };
        match make() {
            Ok(directory) => Ok(Self {
                tree,
                directory,
                name,
                is_kept: false,
            }),
            Err(source) => Err(CommitError::Unchanged { path: name, source }),
        }
    }

    /// Creates a file that only its owner can read yet.
    pub(super) fn create(&self, name: &str) -> Result<std::fs::File, Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        openat(&self.directory, name, flags, Mode::RUSR | Mode::WUSR).map(std::fs::File::from)
    }

    pub(super) fn link(&self, name: &str, target: &[u8]) -> Result<(), Errno> {
        symlinkat(target, &self.directory, name)
    }

    /// Makes all changes or none.
    pub(super) fn commit(mut self, changes: &[PlannedChange<'a>]) -> Result<(), CommitError> {
        let mut done = Vec::new();
        let Err((location, errno)) = self.run(changes, &mut done) else {
            self.remove_emptied(changes);
            return Ok(());
        };
        let path = escaped(location.as_bytes());
        match (self.undo(done), errno) {
            (Err(source), _) => {
                self.is_kept = true;
                Err(CommitError::Partial {
                    path,
                    staging: self.name.clone(),
                    source,
                })
            }
            (Ok(()), Errno::STALE) => Err(CommitError::Stale { path }),
            (Ok(()), source) => Err(CommitError::Unchanged { path, source }),
        }
    }

    fn run(
        &self,
        changes: &[PlannedChange<'a>],
        done: &mut Vec<UndoStep<'a>>,
    ) -> Result<(), (&'a Location, Errno)> {
        let mut names = Vec::with_capacity(changes.len());
        for (index, change) in changes.iter().enumerate() {
            let staged = self.stage(index, change);
            names.push(staged.map_err(|errno| (change.location, errno))?);
        }
        // Old files move away before their directories are removed, and before new files arrive.
        for (index, change) in changes.iter().enumerate() {
            if let PriorState::File(before) = change.before {
                self.take(index, change.location, before, done)
                    .map_err(|errno| (change.location, errno))?;
            }
        }
        for change in changes.iter().rev() {
            if let PriorState::Directory(before) = change.before {
                self.remove_directory(change.location, before, done)
                    .map_err(|errno| (change.location, errno))?;
            }
        }
        for (change, name) in changes.iter().zip(names) {
            if change.new.is_some() {
                self.place(change.location, name, done)
                    .map_err(|errno| (change.location, errno))?;
            }
        }
        Ok(())
    }

    /// Stages the new state. Returns the staged name of a file or link.
    fn stage(&self, index: usize, change: &PlannedChange<'_>) -> Result<Option<String>, Errno> {
        let name = match &change.new {
            None | Some(New::Directory) => return Ok(None),
            Some(New::Staged(name)) => (*name).to_owned(),
            Some(New::Content(file)) => {
                let name = format!("new-{index}");
                let is_new = !matches!(change.before, PriorState::File(_));
                self.write(&name, file, is_new)?;
                name
            }
        };
        if let PriorState::File(before) = change.before {
            self.give_to(&name, before)?;
        }
        Ok(Some(name))
    }

    /// Stages a file. It gets the permissions of the file that it replaces, or else the default
    /// ones within the umask.
    fn write(&self, name: &str, file: &File, is_new: bool) -> Result<(), Errno> {
        let mode = match file.kind {
            Kind::Symlink => return self.link(name, &file.bytes),
            Kind::Regular(mode) if is_new => new_mode(mode),
            Kind::Regular(mode) => Mode::from_raw_mode(mode & 0o777),
        };
        let mut opened = self.create(name)?;
        opened
            .write_all(&file.bytes)
            .map_err(|error| errno(&error))?;
        fchmod(&opened, mode)
    }

    /// Gives the new file the owner of the old one, if running as root: other users can't change
    /// owners.
    fn give_to(&self, name: &str, before: &Stamp) -> Result<(), Errno> {
        let stat = statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if (stat.st_uid, stat.st_gid) != before.owner {
            let (uid, gid) = before.owner;
            let _tried = chownat(
                &self.directory,
                name,
                Some(Uid::from_raw(uid)),
                Some(Gid::from_raw(gid)),
                AtFlags::SYMLINK_NOFOLLOW,
            );
        }
        Ok(())
    }

    /// Moves an old file to the staging directory. Fails if it changed since it was read.
    fn take(
        &self,
        index: usize,
        location: &'a Location,
        before: &Stamp,
        done: &mut Vec<UndoStep<'a>>,
    ) -> Result<(), Errno> {
        let (directory, last) = self.tree.parent(location)?;
        let stat = statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW).map_err(stale)?;
        if Stamp::of(&stat) != *before {
            return Err(Errno::STALE);
        }
        let name = format!("old-{index}");
        move_file(&directory, last, &self.directory, name.as_bytes())?;
        done.push(UndoStep::Taken(location, name));
        Ok(())
    }

    /// Removes a directory that a file replaces, and its subdirectories. All of them are empty by
    /// now.
    fn remove_directory(
        &self,
        location: &Location,
        before: &Stamp,
        done: &mut Vec<UndoStep<'a>>,
    ) -> Result<(), Errno> {
        let (directory, last) = self.tree.parent(location)?;
        let stat = statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW).map_err(stale)?;
        if !Stamp::of(&stat).is_same_file(before) {
            return Err(Errno::STALE);
        }
        let mut emptied = self.tree.directories_below(location)?;
        emptied.push(location.clone());
        for location in emptied {
            let (directory, last) = self.tree.parent(&location)?;
            let stat = statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW)?;
            unlinkat(&directory, last, AtFlags::REMOVEDIR)?;
            done.push(UndoStep::Removed(location, stat.st_mode & 0o777));
        }
        Ok(())
    }

    /// Moves a staged file to its location, or creates the directory.
    fn place(
        &self,
        location: &'a Location,
        name: Option<String>,
        done: &mut Vec<UndoStep<'a>>,
    ) -> Result<(), Errno> {
        let parts = location.parts();
        let directories = parts.len() - usize::from(name.is_some());
        for count in 1..=directories {
            let parent = self.tree.directory(&parts[..count - 1])?;
            match mkdirat(&parent, parts[count - 1], Mode::from_raw_mode(0o777)) {
                Ok(()) => done.push(UndoStep::Made(location, count)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        let Some(name) = name else {
            return self.tree.directory(&parts).map(drop);
        };
        let (directory, last) = self.tree.parent(location)?;
        move_file(&self.directory, name.as_bytes(), &directory, last)?;
        done.push(UndoStep::Placed(location, name));
        Ok(())
    }

    /// Undoes everything in reverse order.
    fn undo(&self, done: Vec<UndoStep<'_>>) -> Result<(), Errno> {
        for step in done.into_iter().rev() {
            match step {
                UndoStep::Placed(location, name) => {
                    let (directory, last) = self.tree.parent(location)?;
                    move_file(&directory, last, &self.directory, name.as_bytes())?;
                }
                UndoStep::Made(location, count) => {
                    let parts = location.parts();
                    let parent = self.tree.directory(&parts[..count - 1])?;
                    match unlinkat(&parent, parts[count - 1], AtFlags::REMOVEDIR) {
                        // Another program has created an entry in it.
                        Err(Errno::NOTEMPTY) => {}
                        result => result?,
                    }
                }
                UndoStep::Removed(location, mode) => {
                    let (directory, last) = self.tree.parent(&location)?;
                    mkdirat(&directory, last, Mode::from_raw_mode(mode))?;
                    // The umask may have masked some permissions.
                    let made = openat(&directory, last, DIRECTORY, Mode::empty())?;
                    fchmod(&made, Mode::from_raw_mode(mode))?;
                }
                UndoStep::Taken(location, name) => {
                    let (directory, last) = self.tree.parent(location)?;
                    move_file(&self.directory, name.as_bytes(), &directory, last)?;
                }
            }
        }
        Ok(())
    }

    /// Removes the directories that the changes left empty, as git does.
    fn remove_emptied(&self, changes: &[PlannedChange<'_>]) {
        for change in changes.iter().rev().filter(|change| change.new.is_none()) {
            let parts = change.location.parts();
            for count in (1..parts.len()).rev() {
                let removed = self
                    .tree
                    .directory(&parts[..count - 1])
                    .and_then(|parent| unlinkat(&parent, parts[count - 1], AtFlags::REMOVEDIR));
                if removed.is_err() {
                    break;
                }
            }
        }
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Ok(listed) = entries(&self.directory) {
            for entry in listed.flatten() {
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    // A leftover directory is harmless.
                    let _removed = unlinkat(&self.directory, entry.file_name(), AtFlags::empty());
                }
            }
        }
        if let Ok(root) = self.tree.directory(&[]) {
            let _removed = unlinkat(&root, self.name.as_str(), AtFlags::REMOVEDIR);
        }
    }
}

/// The permissions of a new file: 0666 or 0777, masked by the umask.
pub(super) fn new_mode(mode: u32) -> Mode {
    let all = if mode & 0o111 == 0 { 0o666 } else { 0o777 };
    Mode::from_raw_mode(all).difference(umask::umask())
}

pub(super) fn errno(error: &std::io::Error) -> Errno {
    error
        .raw_os_error()
        .map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Treats a missing file as one that was changed concurrently.
fn stale(errno: Errno) -> Errno {
    match errno {
        Errno::NOENT => Errno::STALE,
        errno => errno,
    }
}

/// Renames a file without replacing another.
fn move_file(from: &OwnedFd, name: &[u8], to: &OwnedFd, new: &[u8]) -> Result<(), Errno> {
    match renameat_with(from, name, to, new, RenameFlags::NOREPLACE) {
        // Network file systems don't support the flag.
        Err(Errno::INVAL | Errno::NOSYS) => match statat(to, new, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Err(Errno::EXIST),
            Err(Errno::NOENT) => renameat(from, name, to, new),
            Err(errno) => Err(errno),
        },
        result => result,
    }
}

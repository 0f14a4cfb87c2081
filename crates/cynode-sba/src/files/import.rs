//! Unpacks a tar archive into a directory.
//!
//! Invariants: nothing is written outside the directory, whatever names and links the archive
//! contains; no device, setuid bit or owner is taken from an archive; its headers can't exhaust
//! memory.

use std::{
    ffi::OsStr,
    io::Write as _,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
};

use cynode_api::{ErrorCode, FileChange, FileChanges, FileType};
use cynode_archive::{Archive, Entry, Input, Kind};
use cynode_sba_proto::AgentError;
use rustix::{
    fs::{AtFlags, Mode, chmodat, futimens, linkat, statat, symlinkat, unlinkat, utimensat},
    io::Errno,
};

use super::{
    confined::{self, ConfinedRoot},
    digest,
    error::{Failure, FailureContext, Outcome, shown},
    path::{self, Files},
    staged::StagedFile,
    tree::times,
    write::Body,
};

/// Total length of the names of directories whose permissions and times are set at the end.
const MAX_DIRECTORY_BYTES: usize = 16 * 1024 * 1024;

impl Files {
    pub(super) fn import(&self, path: &[u8], body: Body<'_>) -> Outcome<FileChanges> {
        let full_path = self.locate(path)?;
        let mut archive = Archive::new(ArchiveBody {
            body,
            piece: Vec::new(),
            at: 0,
            ended: false,
        });
        // Input that is not an archive creates nothing. An end marker alone is an archive of an
        // empty directory.
        let first = archive.next_entry()?;
        if first.is_none() && !archive.has_end_marker() {
            return Err(invalid_archive("it is empty"));
        }
        path::make_directories(&full_path)?;
        let root = ConfinedRoot::open(&full_path).doing("opening", path::bytes(&full_path))?;
        let mut import = Import {
            root,
            prefix: path::printed_prefix(path),
            directories: Vec::new(),
            directory_bytes: 0,
            changes: FileChanges::default(),
        };
        match import.unpack(first, &mut archive) {
            Ok(()) => Ok(import.finish()),
            // Entries before the error stay, and are reported.
            Err(Failure::Refused(error)) => Err(Failure::Refused(AgentError {
                changed: Some(import.changes),
                ..error
            })),
            Err(failure) => Err(failure),
        }
    }
}

fn invalid_archive(problem: &str) -> Failure {
    Failure::invalid(format!("the archive can't be unpacked: {problem}"))
}

fn invalid_entry(name: &[u8], problem: &str) -> Failure {
    Failure::invalid(format!(
        "the archive's entry {} can't be unpacked: {problem}; earlier entries stay",
        shown(name)
    ))
}

impl From<cynode_archive::Error> for Failure {
    fn from(error: cynode_archive::Error) -> Self {
        match error {
            cynode_archive::Error::Archive(problem) => invalid_archive(&format!("it {problem}")),
            cynode_archive::Error::Entry { path, problem } => {
                invalid_entry(&path, &format!("it {problem}"))
            }
        }
    }
}

/// The archive's bytes as they arrive.
struct ArchiveBody<'a> {
    body: Body<'a>,
    piece: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Input for ArchiveBody<'_> {
    type Error = Failure;

    fn take(&mut self, limit: usize) -> Outcome<&[u8]> {
        while self.at == self.piece.len() && !self.ended {
            match (self.body)().map_err(Failure::Connection)? {
                Some(piece) => (self.piece, self.at) = (piece, 0),
                None => self.ended = true,
            }
        }
        let end = self.piece.len().min(self.at.saturating_add(limit));
        let bytes = &self.piece[self.at..end];
        self.at = end;
        Ok(bytes)
    }
}

struct Import {
    root: ConfinedRoot,
    /// The directory as the request names it.
    prefix: Vec<u8>,
    /// Permissions and time of each directory, set at the end: before, they could prevent
    /// unpacking, and unpacking would change the time.
    directories: Vec<(Vec<u8>, u32, i64)>,
    directory_bytes: usize,
    changes: FileChanges,
}

impl Import {
    fn unpack(
        &mut self,
        first: Option<Entry>,
        archive: &mut Archive<ArchiveBody<'_>>,
    ) -> Outcome<()> {
        let mut next = first;
        while let Some(entry) = next {
            self.entry(&entry, archive)?;
            next = archive.next_entry()?;
        }
        Ok(())
    }

    /// Reports the change of an entry, within the limit of the report.
    fn report(&mut self, parts: &[&[u8]], change: impl FnOnce(FileChange) -> FileChange) {
        let mut path = self.prefix.clone();
        path::join(&mut path, &parts.join(&b'/'));
        self.changes.add(change(FileChange::new(&path)));
    }

    /// The hash of the regular file with this name, if the report still has room.
    fn hash(&self, directory: &OwnedFd, name: &[u8]) -> Option<String> {
        if self.changes.has_room() {
            digest::of_entry(directory, name)
        } else {
            None
        }
    }

    fn entry(&mut self, entry: &Entry, archive: &mut Archive<ArchiveBody<'_>>) -> Outcome<()> {
        if entry.is_root() {
            return Ok(());
        }
        let name = &entry.path;
        let parts = confined::parts(name).map_err(|reason| invalid_entry(name, reason))?;
        match entry.kind {
            Kind::Directory => self.directory(name, &parts, entry.mode, entry.mtime),
            Kind::File => self.file(entry, &parts, archive),
            Kind::Symlink => self.symlink(name, &parts, &entry.link, entry.mtime),
            Kind::HardLink => self.hard_link(name, &parts, &entry.link),
            Kind::Special => Err(invalid_entry(name, "it is a device or a FIFO")),
        }
    }

    /// The parent directory of an entry, and the entry's name.
    fn parent<'a>(&self, name: &[u8], parts: &[&'a [u8]]) -> Outcome<(OwnedFd, &'a [u8])> {
        let Some((last, parents)) = parts.split_last() else {
            return Err(invalid_entry(name, "the path is empty"));
        };
        Ok((self.make(name, parents)?, last))
    }

    fn make(&self, name: &[u8], parts: &[&[u8]]) -> Outcome<OwnedFd> {
        self.make_with(name, parts, |_| {})
    }

    fn make_with(
        &self,
        name: &[u8],
        parts: &[&[u8]],
        created: impl FnMut(usize),
    ) -> Outcome<OwnedFd> {
        match self
            .root
            .make_directory(parts, Mode::from_raw_mode(0o755), created)
        {
            Ok(directory) => Ok(directory),
            Err(Errno::XDEV) => Err(invalid_entry(
                name,
                "its path passes through a symbolic link that leads outside",
            )),
            Err(Errno::NOTDIR) => Err(invalid_entry(name, "a part of its path is not a directory")),
            Err(errno) => Err(Failure::system(errno, "unpacking", name)),
        }
    }

    fn directory(&mut self, name: &[u8], parts: &[&[u8]], mode: u32, mtime: i64) -> Outcome<()> {
        let mut created = false;
        self.make_with(name, parts, |count| created |= count == parts.len())?;
        if created {
            self.report(parts, |change| change.of_kind(FileType::Dir));
        }
        // An existing directory without permissions must accept its entries.
        let (above, last) = self.parent(name, parts)?;
        if statat(&above, last, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| path::kind(&stat) == FileType::Dir && stat.st_mode & 0o700 != 0o700)
        {
            chmodat(&above, last, Mode::RWXU, AtFlags::empty()).doing("unpacking", name)?;
        }
        if self.directory_bytes + name.len() <= MAX_DIRECTORY_BYTES {
            self.directory_bytes += name.len();
            self.directories.push((parts.join(&b'/'), mode, mtime));
        }
        Ok(())
    }

    /// The content stays hidden until it is complete: if the archive or the disk ends within it,
    /// the old file stays.
    fn file(
        &mut self,
        entry: &Entry,
        parts: &[&[u8]],
        archive: &mut Archive<ArchiveBody<'_>>,
    ) -> Outcome<()> {
        let name = &entry.path;
        let (directory, last) = self.parent(name, parts)?;
        let mut staged = directory
            .try_clone()
            .doing("unpacking", name)
            .and_then(|directory| StagedFile::new(directory).doing("unpacking", name))?;
        let mut hasher = self.changes.has_room().then(digest::Hasher::default);
        archive.read(|bytes| {
            if let Some(hasher) = &mut hasher {
                hasher.update(bytes);
            }
            staged.file().write_all(bytes).doing("unpacking", name)
        })?;
        futimens(staged.file(), &times(entry.mtime, 0)).doing("unpacking", name)?;
        let before = self.hash(&directory, last);
        match staged.publish(&directory, OsStr::from_bytes(last), entry.mode, true) {
            Err(Errno::ISDIR) => return Err(directory_in_the_way(name)),
            result => result.doing("unpacking", name)?,
        }
        self.report(parts, |change| {
            change.before(before).after(hasher.map(digest::Hasher::hex))
        });
        Ok(())
    }

    fn symlink(&mut self, name: &[u8], parts: &[&[u8]], link: &[u8], mtime: i64) -> Outcome<()> {
        let (directory, last) = self.parent(name, parts)?;
        let before = self.hash(&directory, last);
        replacing(name, &directory, last, || symlinkat(link, &directory, last))?;
        self.report(parts, |change| {
            change.of_kind(FileType::Symlink).before(before)
        });
        // Not every file system stores times of links.
        let _tried = utimensat(
            &directory,
            last,
            &times(mtime, 0),
            AtFlags::SYMLINK_NOFOLLOW,
        );
        Ok(())
    }

    fn hard_link(&mut self, name: &[u8], parts: &[&[u8]], link: &[u8]) -> Outcome<()> {
        let target = confined::parts(link).map_err(|reason| {
            invalid_entry(name, &format!("its link target is invalid: {reason}"))
        })?;
        let Some((target_name, target_parents)) = target.split_last() else {
            return Err(invalid_entry(name, "its link target is empty"));
        };
        let gone = |_| invalid_entry(name, "its link target is not in the directory");
        let target_directory = self.root.directory(target_parents).map_err(gone)?;
        let stat =
            statat(&target_directory, *target_name, AtFlags::SYMLINK_NOFOLLOW).map_err(gone)?;
        if path::kind(&stat) != FileType::File {
            return Err(invalid_entry(name, "its link target is not a regular file"));
        }
        let (directory, last) = self.parent(name, parts)?;
        // Replacing a file with a link to itself would delete it.
        if statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|old| (old.st_dev, old.st_ino) == (stat.st_dev, stat.st_ino))
        {
            return Ok(());
        }
        let (before, after) = (
            self.hash(&directory, last),
            self.hash(&target_directory, target_name),
        );
        replacing(name, &directory, last, || {
            linkat(
                &target_directory,
                *target_name,
                &directory,
                last,
                AtFlags::empty(),
            )
        })?;
        self.report(parts, |change| change.before(before).after(after));
        Ok(())
    }

    /// Sets permissions and times of directories, the deepest first. Best effort: all contents are
    /// in place.
    fn finish(self) -> FileChanges {
        for (path, mode, mtime) in self.directories.into_iter().rev() {
            let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
            let Some((last, parents)) = parts.split_last() else {
                continue;
            };
            if let Ok(directory) = self.root.directory(parents)
                && statat(&directory, *last, AtFlags::SYMLINK_NOFOLLOW)
                    .is_ok_and(|stat| path::kind(&stat) == FileType::Dir)
            {
                let _times = utimensat(
                    &directory,
                    *last,
                    &times(mtime, 0),
                    AtFlags::SYMLINK_NOFOLLOW,
                );
                let _mode = chmodat(
                    &directory,
                    *last,
                    Mode::from_raw_mode(mode),
                    AtFlags::empty(),
                );
            }
        }
        self.changes
    }
}

fn directory_in_the_way(name: &[u8]) -> Failure {
    Failure::new(
        ErrorCode::AlreadyExists,
        format!("unpacking {}: a directory has this name", shown(name)),
    )
}

/// Creates an entry, after deleting an existing one that is not a directory.
fn replacing<T>(
    name: &[u8],
    directory: &OwnedFd,
    last: &[u8],
    mut make: impl FnMut() -> Result<T, Errno>,
) -> Outcome<T> {
    match make() {
        Err(Errno::EXIST) => {
            match unlinkat(directory, last, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR) => return Err(directory_in_the_way(name)),
                Err(errno) => return Err(Failure::system(errno, "replacing", name)),
            }
            make().doing("unpacking", name)
        }
        result => result.doing("unpacking", name),
    }
}

#[cfg(test)]
mod tests;

//! Unpacks a tar stream from a sandbox into a local directory. The archive is hostile input.
//!
//! Invariants: no entry writes outside the target directory. [`cynode_archive`] refuses absolute
//! paths, `..` and paths below a link of the same archive, as the gate and the agent do; the tree
//! walks every path from the target's descriptor, one component at a time, and never follows a
//! symbolic link. Links that point outside, hard links and special files are skipped and reported.
//! Files get only permission bits: no setuid, no owner. No header makes memory grow beyond the
//! bounds of `cynode_archive`.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::{self, Read, Write as _},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use cynode_archive::{Archive, Input, Kind, ReadError, Reader, components};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, fchmod, mkdirat, openat, statat, symlinkat, unlinkat},
    io::Errno,
};

/// Skipped entries that are reported by name; the rest is only counted.
const MAX_SKIPPED_NAMES: usize = 50;

#[derive(Debug, Default)]
pub struct Unpacked {
    pub files: u64,
    /// The first skipped entries, each with its reason.
    pub skipped: Vec<String>,
    pub skipped_count: u64,
}

impl Unpacked {
    fn skip(&mut self, name: &[u8], reason: &str) {
        self.skipped_count += 1;
        if self.skipped.len() < MAX_SKIPPED_NAMES {
            self.skipped
                .push(format!("{}: {reason}", String::from_utf8_lossy(name)));
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The archive is malformed, ambiguous, or tries to leave the target.
    #[error("the archive is refused: {0}")]
    Refused(#[from] cynode_archive::Error),
    #[error("{}: {source}", String::from_utf8_lossy(.name))]
    Write { name: Vec<u8>, source: io::Error },
    #[error("can't read the archive: {0}")]
    Read(io::Error),
    #[error("{0}")]
    Target(io::Error),
}

fn refused(path: &[u8], problem: &'static str) -> Error {
    Error::Refused(cynode_archive::Error::Entry {
        path: path.to_vec(),
        problem,
    })
}

/// The archive's bytes, with errors that keep reading apart from writing.
struct Source<R>(Reader<R>);

impl<R: Read> Input for Source<R> {
    type Error = Error;

    fn take(&mut self, limit: usize) -> Result<&[u8], Error> {
        self.0.take(limit).map_err(|error| match error {
            ReadError::Archive(error) => Error::Refused(error),
            ReadError::Io(error) => Error::Read(error),
        })
    }
}

/// Unpacks below `target`, which is created if it is missing. Calls `progress` with the size of
/// each file.
pub fn unpack(
    from: impl Read,
    target: &Path,
    mut progress: impl FnMut(u64),
) -> Result<Unpacked, Error> {
    let mut tree = Tree::open(target)?;
    let mut unpacked = Unpacked::default();
    let mut archive = Archive::new(Source(Reader::new(from)));
    let mut is_empty = true;
    while let Some(entry) = archive.next_entry()? {
        is_empty = false;
        let name = &entry.path;
        let path: Vec<&[u8]> = components(name).collect();
        let mode = Mode::from_bits_truncate(entry.mode);
        match entry.kind {
            Kind::Directory => tree.directory(&path, mode, name)?,
            Kind::File => {
                tree.file(&path, mode, &mut archive, name)?;
                unpacked.files += 1;
                progress(entry.size);
            }
            Kind::Symlink => match check_link_target(&entry.link, path.len()) {
                Ok(()) => tree.symlink(&path, &entry.link, name)?,
                Err(reason) => unpacked.skip(name, reason),
            },
            Kind::HardLink => unpacked.skip(name, "hard link"),
            Kind::Special => unpacked.skip(name, "not a file, directory or link"),
        }
    }
    if is_empty && !archive.has_end_marker() {
        return Err(cynode_archive::Error::Archive("is empty").into());
    }
    tree.finish()?;
    Ok(unpacked)
}

/// Checks that a link at this depth (1 is in the root) points below the root, whatever other links
/// exist. `..` may only come first: after a name, which may itself be a link, it can lead anywhere.
fn check_link_target(target: &[u8], depth: usize) -> Result<(), &'static str> {
    if target.starts_with(b"/") {
        return Err("link to an absolute path");
    }
    let mut ups = 0;
    let mut after_name = false;
    for part in components(target) {
        if part != b".." {
            after_name = true;
        } else if after_name {
            return Err("link with '..' in the middle");
        } else {
            ups += 1;
        }
    }
    // A link in the root has depth 1 and may not go up.
    if ups < depth {
        Ok(())
    } else {
        Err("link out of the directory")
    }
}

/// The target directory.
struct Tree {
    root: OwnedFd,
    /// Modes of created directories. They are set last: a read-only directory can't be filled.
    modes: BTreeMap<Vec<u8>, Mode>,
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

impl Tree {
    fn open(target: &Path) -> Result<Self, Error> {
        let mut modes = BTreeMap::new();
        match fs_err::create_dir(target) {
            Ok(()) => drop(modes.insert(Vec::new(), Mode::from_bits_truncate(0o755))),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::Target(error)),
        }
        // The target itself may be a link: the user named it.
        let root = openat(
            CWD,
            target,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|error| {
            Error::Target(io::Error::other(format!(
                "{}: {}",
                target.display(),
                io::Error::from(error)
            )))
        })?;
        Ok(Self { root, modes })
    }

    /// Opens a directory of the tree and creates missing ones on the way.
    fn walk(&mut self, path: &[&[u8]], name: &[u8]) -> Result<OwnedFd, Error> {
        let mut at = self.root.try_clone().map_err(Error::Target)?;
        for (index, part) in path.iter().enumerate() {
            let part = OsStr::from_bytes(part);
            at = match openat(&at, part, DIRECTORY, Mode::empty()) {
                Ok(next) => next,
                Err(Errno::NOENT) => {
                    mkdirat(&at, part, Mode::RWXU).map_err(|error| write_error(name, error))?;
                    self.modes
                        .insert(path[..=index].join(&b'/'), Mode::from_bits_truncate(0o755));
                    openat(&at, part, DIRECTORY, Mode::empty())
                        .map_err(|error| write_error(name, error))?
                }
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    return Err(refused(
                        name,
                        "leads through something that is not a directory",
                    ));
                }
                Err(error) => return Err(write_error(name, error)),
            };
        }
        Ok(at)
    }

    fn directory(&mut self, path: &[&[u8]], mode: Mode, name: &[u8]) -> Result<(), Error> {
        self.walk(path, name)?;
        // A directory that existed before keeps its mode.
        if let Some(created) = self.modes.get_mut(&path.join(&b'/')) {
            *created = mode;
        }
        Ok(())
    }

    /// Makes room for a new entry: opens its directory and unlinks a file or link in its place.
    fn make_room<'a>(
        &mut self,
        path: &[&'a [u8]],
        name: &[u8],
    ) -> Result<(OwnedFd, &'a OsStr), Error> {
        let (last, parents) = path
            .split_last()
            .ok_or_else(|| refused(name, "has no name"))?;
        let parent = self.walk(parents, name)?;
        let last = OsStr::from_bytes(last);
        match unlinkat(&parent, last, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM)
                if statat(&parent, last, AtFlags::SYMLINK_NOFOLLOW).is_ok() =>
            {
                return Err(Error::Write {
                    name: name.to_vec(),
                    source: io::Error::other("a directory is in the way"),
                });
            }
            Err(error) => return Err(write_error(name, error)),
        }
        Ok((parent, last))
    }

    fn file(
        &mut self,
        path: &[&[u8]],
        mode: Mode,
        archive: &mut Archive<Source<impl Read>>,
        name: &[u8],
    ) -> Result<(), Error> {
        let (parent, last) = self.make_room(path, name)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&parent, last, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| write_error(name, error))?;
        let mut file = std::fs::File::from(file);
        archive.read(|piece| {
            file.write_all(piece).map_err(|source| Error::Write {
                name: name.to_vec(),
                source,
            })
        })?;
        fchmod(&file, mode).map_err(|error| write_error(name, error))
    }

    fn symlink(&mut self, path: &[&[u8]], target: &[u8], name: &[u8]) -> Result<(), Error> {
        let (parent, last) = self.make_room(path, name)?;
        symlinkat(OsStr::from_bytes(target), &parent, last)
            .map_err(|error| write_error(name, error))
    }

    /// Sets the modes of created directories, the deepest first.
    fn finish(mut self) -> Result<(), Error> {
        for (path, mode) in std::mem::take(&mut self.modes).into_iter().rev() {
            let parts: Vec<&[u8]> = path
                .split(|byte| *byte == b'/')
                .filter(|part| !part.is_empty())
                .collect();
            let directory = self.walk(&parts, &path)?;
            fchmod(&directory, mode).map_err(|error| write_error(&path, error))?;
        }
        Ok(())
    }
}

fn write_error(name: &[u8], error: Errno) -> Error {
    Error::Write {
        name: name.to_vec(),
        source: error.into(),
    }
}

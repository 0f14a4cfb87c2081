//! A tar stream from a sandbox into a local directory. The archive is hostile input.
//!
//! Invariants: nothing is written outside the target directory, whatever the archive holds: every path is walked from the
//! target's descriptor, one component at a time, never through a symbolic link; a name that is absolute or has `..` ends
//! the copy. Links that point outside, hard links and special files are left out and reported. Files get at most the
//! permission bits: no setuid, no owner. Nothing that the archive can make large is held in memory.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::{self, Read},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, fchmod, mkdirat, openat, statat, symlinkat, unlinkat},
    io::Errno,
};
use tar::{Archive, EntryType, PaxExtensions};

/// The longest name or link target, as a path may be.
const MAX_NAME: u64 = 4096;
/// The longest record of extended headers.
const MAX_PAX: u64 = 64 * 1024;
/// How many left-out entries are named; the others are only counted.
const MAX_NAMED: usize = 50;

#[derive(Debug, Default)]
pub struct Unpacked {
    pub files: u64,
    /// What was left out, and why.
    pub skipped: Vec<String>,
    pub skipped_count: u64,
}

impl Unpacked {
    fn skip(&mut self, name: &[u8], why: &str) {
        self.skipped_count += 1;
        if self.skipped.len() < MAX_NAMED {
            self.skipped
                .push(format!("{}: {why}", String::from_utf8_lossy(name)));
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The archive tries to leave the target, or is no archive.
    #[error("the archive is refused: '{}' {why}", String::from_utf8_lossy(.name))]
    Refused { name: Vec<u8>, why: &'static str },
    #[error("{}: {source}", String::from_utf8_lossy(.name))]
    Write { name: Vec<u8>, source: io::Error },
    #[error("the archive can't be read: {0}")]
    Read(io::Error),
    #[error("{0}")]
    Target(io::Error),
}

/// Unpacks below `target`, which is made when it is not there. `progress` hears of each file's size.
pub fn unpack(
    from: impl Read,
    target: &Path,
    mut progress: impl FnMut(u64),
) -> Result<Unpacked, Error> {
    let mut tree = Tree::open(target)?;
    let mut unpacked = Unpacked::default();
    let mut archive = Archive::new(from);
    let mut long_name: Option<Vec<u8>> = None;
    let mut long_link: Option<Vec<u8>> = None;
    // Raw: the library would hold extended headers of any size in memory.
    for entry in archive.entries().map_err(Error::Read)?.raw(true) {
        let mut entry = entry.map_err(Error::Read)?;
        let kind = entry.header().entry_type();
        match kind {
            EntryType::GNULongName => {
                long_name = Some(bounded(&mut entry, MAX_NAME)?);
                continue;
            }
            EntryType::GNULongLink => {
                long_link = Some(bounded(&mut entry, MAX_NAME)?);
                continue;
            }
            EntryType::XHeader => {
                let record = bounded(&mut entry, MAX_PAX)?;
                for extension in PaxExtensions::new(&record) {
                    let extension = extension.map_err(Error::Read)?;
                    match extension.key_bytes() {
                        b"path" => long_name = Some(extension.value_bytes().to_vec()),
                        b"linkpath" => long_link = Some(extension.value_bytes().to_vec()),
                        // It would say where the next header is; ours never needs it.
                        b"size" => {
                            return Err(Error::Refused {
                                name: b"pax header".to_vec(),
                                why: "changes a size",
                            });
                        }
                        _ => {}
                    }
                }
                continue;
            }
            EntryType::XGlobalHeader => continue,
            _ => {}
        }
        let name = long_name
            .take()
            .unwrap_or_else(|| entry.header().path_bytes().into_owned());
        let link = long_link
            .take()
            .or_else(|| {
                entry
                    .header()
                    .link_name_bytes()
                    .map(std::borrow::Cow::into_owned)
            })
            .unwrap_or_default();
        let path = components(&name)?;
        let mode = Mode::from_bits_truncate(entry.header().mode().unwrap_or(0o644) & 0o777);
        match kind {
            EntryType::Directory => tree.directory(&path, Some(mode), &name)?,
            EntryType::Regular | EntryType::Continuous => {
                let size = entry.header().size().map_err(Error::Read)?;
                tree.file(&path, mode, &mut entry, size, &name)?;
                unpacked.files += 1;
                progress(size);
            }
            EntryType::Symlink => match stays_inside(&link, path.len()) {
                Ok(()) => tree.symlink(&path, &link, &name)?,
                Err(why) => unpacked.skip(&name, why),
            },
            EntryType::Link => unpacked.skip(&name, "hard link"),
            _ => unpacked.skip(&name, "not a file, directory or link"),
        }
    }
    tree.finish()?;
    Ok(unpacked)
}

fn bounded(entry: &mut impl Read, limit: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    entry
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(Error::Read)?;
    if bytes.len() as u64 > limit {
        return Err(Error::Refused {
            name: b"header".to_vec(),
            why: "is too long",
        });
    }
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    Ok(bytes)
}

/// The parts of a relative name; empty for the root itself.
fn components(name: &[u8]) -> Result<Vec<&[u8]>, Error> {
    let refused = |why| Error::Refused {
        name: name.to_vec(),
        why,
    };
    if name.first() == Some(&b'/') {
        return Err(refused("is an absolute path"));
    }
    if name.contains(&0) || name.len() as u64 > MAX_NAME {
        return Err(refused("is not a file name"));
    }
    let parts: Vec<&[u8]> = name
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .collect();
    if parts.contains(&&b".."[..]) {
        return Err(refused("leads out of the directory"));
    }
    Ok(parts)
}

/// Whether a link at this depth (1 is in the root) points to something below the root, whatever other links there are.
/// `..` is only allowed first: after a name, which may itself be a link, nobody knows where it leads.
fn stays_inside(target: &[u8], depth: usize) -> Result<(), &'static str> {
    if target.is_empty() || target.contains(&0) || target.len() as u64 > MAX_NAME {
        return Err("link to nothing");
    }
    if target[0] == b'/' {
        return Err("link to an absolute path");
    }
    let mut ups = 0;
    let mut named = false;
    for part in target
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
    {
        if part != b".." {
            named = true;
        } else if named {
            return Err("link with '..' in the middle");
        } else {
            ups += 1;
        }
    }
    // A link in the root has depth 1 and may not go up at all.
    if ups < depth {
        Ok(())
    } else {
        Err("link out of the directory")
    }
}

/// The directory that is filled.
struct Tree {
    root: OwnedFd,
    /// Modes of directories that we made, set at the end: a directory that its owner can't write to could not be filled.
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
        // The target itself may be a link: the person named it.
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

    /// Opens a directory of the tree, making what is missing.
    fn walk(&mut self, path: &[&[u8]], name: &[u8]) -> Result<OwnedFd, Error> {
        let mut at = self.root.try_clone().map_err(Error::Target)?;
        for (index, part) in path.iter().enumerate() {
            let part = OsStr::from_bytes(part);
            at = match openat(&at, part, DIRECTORY, Mode::empty()) {
                Ok(next) => next,
                Err(Errno::NOENT) => {
                    mkdirat(&at, part, Mode::RWXU).map_err(|error| written(name, error))?;
                    self.modes
                        .insert(path[..=index].join(&b'/'), Mode::from_bits_truncate(0o755));
                    openat(&at, part, DIRECTORY, Mode::empty())
                        .map_err(|error| written(name, error))?
                }
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    return Err(Error::Refused {
                        name: name.to_vec(),
                        why: "leads through something that is not a directory",
                    });
                }
                Err(error) => return Err(written(name, error)),
            };
        }
        Ok(at)
    }

    fn directory(&mut self, path: &[&[u8]], mode: Option<Mode>, name: &[u8]) -> Result<(), Error> {
        self.walk(path, name)?;
        // One that was there before keeps its mode.
        if let (Some(mode), Some(made)) = (mode, self.modes.get_mut(&path.join(&b'/'))) {
            *made = mode;
        }
        Ok(())
    }

    /// The directory and last part of a path, with whatever stood there removed.
    fn place<'a>(&mut self, path: &[&'a [u8]], name: &[u8]) -> Result<(OwnedFd, &'a OsStr), Error> {
        let (last, parents) = path.split_last().ok_or_else(|| Error::Refused {
            name: name.to_vec(),
            why: "has no name",
        })?;
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
            Err(error) => return Err(written(name, error)),
        }
        Ok((parent, last))
    }

    fn file(
        &mut self,
        path: &[&[u8]],
        mode: Mode,
        from: &mut impl Read,
        size: u64,
        name: &[u8],
    ) -> Result<(), Error> {
        let (parent, last) = self.place(path, name)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&parent, last, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| written(name, error))?;
        let mut file = std::fs::File::from(file);
        let copied = io::copy(from, &mut file).map_err(|source| Error::Write {
            name: name.to_vec(),
            source,
        })?;
        if copied != size {
            return Err(Error::Read(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it ends in the middle of a file",
            )));
        }
        fchmod(&file, mode).map_err(|error| written(name, error))
    }

    fn symlink(&mut self, path: &[&[u8]], target: &[u8], name: &[u8]) -> Result<(), Error> {
        let (parent, last) = self.place(path, name)?;
        symlinkat(OsStr::from_bytes(target), &parent, last).map_err(|error| written(name, error))
    }

    /// Sets the modes of new directories, the deepest first.
    fn finish(mut self) -> Result<(), Error> {
        for (path, mode) in std::mem::take(&mut self.modes).into_iter().rev() {
            let parts: Vec<&[u8]> = path
                .split(|byte| *byte == b'/')
                .filter(|part| !part.is_empty())
                .collect();
            let directory = self.walk(&parts, &path)?;
            fchmod(&directory, mode).map_err(|error| written(&path, error))?;
        }
        Ok(())
    }
}

fn written(name: &[u8], error: Errno) -> Error {
    Error::Write {
        name: name.to_vec(),
        source: error.into(),
    }
}

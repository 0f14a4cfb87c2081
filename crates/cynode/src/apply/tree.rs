//! Adapts a local directory to the `Tree` trait, on which a patch is planned.

use std::{
    collections::BTreeMap,
    io::{self, Read as _},
    os::fd::OwnedFd,
    path::Path,
};

use cynode_patch::{
    File, Kind, Location, MAX_FILE_BYTES, Plan, PriorState, Problem, Reject, Tree, TreeNode,
    escaped,
};
use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2,
        readlinkat, statat,
    },
    io::Errno,
};
use sha2::{Digest as _, Sha256};

use super::earlier::TakenBack;

/// Deeper directories are not searched.
const MAX_DEPTH: usize = 128;

/// Identifies a version of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, i64),
    changed: (i64, i64),
    pub(super) owner: (u32, u32),
}

impl Stamp {
    pub(super) fn of(stat: &Stat) -> Self {
        #[allow(
            clippy::useless_conversion,
            clippy::unnecessary_cast,
            clippy::cast_possible_wrap,
            reason = "the types of these fields depend on the architecture"
        )]
        Self {
            device: stat.st_dev.into(),
            inode: stat.st_ino.into(),
            size: stat.st_size.into(),
            modified: (stat.st_mtime.into(), stat.st_mtime_nsec as i64),
            changed: (stat.st_ctime.into(), stat.st_ctime_nsec as i64),
            owner: (stat.st_uid, stat.st_gid),
        }
    }

    /// Returns whether both stamps belong to the same inode, regardless of its content.
    pub(super) fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

pub struct LocalTree {
    root: OwnedFd,
    /// Files that count as reverted to their original state.
    pub(super) taken_back: BTreeMap<Location, TakenBack>,
}

type TreeResult<T> = Result<T, Problem<io::Error>>;

fn reject<T>(reason: impl Into<String>) -> TreeResult<T> {
    Err(Problem::Reject(reason.into()))
}

fn failure(errno: Errno, location: &Location) -> Problem<io::Error> {
    let path = escaped(location.as_bytes());
    Problem::Failure(io::Error::new(
        io::Error::from(errno).kind(),
        format!("{path}: {errno}"),
    ))
}

impl LocalTree {
    pub(super) fn open(directory: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            root: openat(CWD, directory, flags, Mode::empty())?,
            taken_back: BTreeMap::new(),
        })
    }

    /// Opens a directory below the root. No component may be a link.
    pub(super) fn directory(&self, parts: &[&[u8]]) -> Result<OwnedFd, Errno> {
        let joined = parts.join(&b'/');
        let path: &[u8] = if joined.is_empty() { b"." } else { &joined };
        openat2(
            &self.root,
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
        )
    }

    /// Opens the directory of a location; also returns its last component.
    pub(super) fn parent<'a>(&self, location: &'a Location) -> Result<(OwnedFd, &'a [u8]), Errno> {
        let parts = location.parts();
        let (last, parents) = parts.split_last().ok_or(Errno::INVAL)?;
        Ok((self.directory(parents)?, *last))
    }
}

impl LocalTree {
    /// Calls `visit` with each entry below a directory, until it returns false.
    fn walk(
        &self,
        directory: &Location,
        mut visit: impl FnMut(&Location, FileType) -> bool,
    ) -> TreeResult<()> {
        let mut pending = vec![directory.clone()];
        while let Some(next) = pending.pop() {
            let opened = self
                .directory(&next.parts())
                .and_then(|opened| entries(&opened))
                .map_err(|errno| failure(errno, &next))?;
            for entry in opened {
                let entry = entry.map_err(|errno| failure(errno, &next))?;
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let location = Location::from_parts([next.as_bytes(), name]);
                let kind = self
                    .kind(&location)
                    .map_err(|errno| failure(errno, &location))?;
                if !visit(&location, kind) {
                    return Ok(());
                }
                if kind == FileType::Directory {
                    if location.parts().len() > MAX_DEPTH {
                        return reject("the directory is nested too deeply");
                    }
                    pending.push(location);
                }
            }
        }
        Ok(())
    }

    /// Some file systems don't store the type in directory entries.
    fn kind(&self, location: &Location) -> Result<FileType, Errno> {
        let (directory, last) = self.parent(location)?;
        let stat = statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(FileType::from_raw_mode(stat.st_mode))
    }

    /// Lists the directories below a directory, children before parents.
    pub(super) fn directories_below(&self, directory: &Location) -> Result<Vec<Location>, Errno> {
        let mut found = Vec::new();
        let walked = self.walk(directory, |location, kind| {
            if kind == FileType::Directory {
                found.push(location.clone());
            }
            true
        });
        match walked {
            Ok(()) => {
                found.sort_unstable_by(|one, other| other.cmp(one));
                Ok(found)
            }
            Err(Problem::Reject(_)) => Err(Errno::NAMETOOLONG),
            Err(Problem::Failure(error)) => Err(super::commit::errno(&error)),
        }
    }

    /// Loads the current state in the directory.
    pub(super) fn load_actual(&self, location: &Location) -> TreeResult<TreeNode<Stamp>> {
        let (directory, last) = match self.parent(location) {
            Ok(found) => found,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {
                return Ok(TreeNode::Nothing);
            }
            Err(errno) => return Err(failure(errno, location)),
        };
        let stat = match statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(TreeNode::Nothing),
            Err(Errno::NAMETOOLONG) => return reject("a part of the path is too long"),
            Err(errno) => return Err(failure(errno, location)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => read(&directory, last, location),
            FileType::Symlink => {
                let target = readlinkat(&directory, last, Vec::new())
                    .map_err(|errno| failure(errno, location))?;
                let file = File {
                    kind: Kind::Symlink,
                    bytes: target.into_bytes(),
                };
                Ok(TreeNode::File(Stamp::of(&stat), file))
            }
            FileType::Directory => Ok(TreeNode::Directory(Stamp::of(&stat))),
            _ => reject("the path is not a regular file"),
        }
    }

    /// The current state of a location, without the content of a file.
    pub(super) fn prior_state(&self, location: &Location) -> TreeResult<PriorState<Stamp>> {
        self.locate(location)?;
        let (directory, last) = match self.parent(location) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(PriorState::Nothing),
            Err(errno) => return Err(failure(errno, location)),
        };
        let stat = match statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(PriorState::Nothing),
            Err(Errno::NAMETOOLONG) => return reject("a part of the path is too long"),
            Err(errno) => return Err(failure(errno, location)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Symlink => Ok(PriorState::File(Stamp::of(&stat))),
            FileType::Directory => Ok(PriorState::Directory(Stamp::of(&stat))),
            _ => reject("the path is not a regular file"),
        }
    }
}

impl Tree for LocalTree {
    type Stamp = Stamp;
    type Failure = io::Error;

    fn locate(&self, location: &Location) -> TreeResult<Location> {
        let parts = location.parts();
        // What replaced a directory counts as reverted, and so does the directory.
        let above = (1..parts.len()).find_map(|depth| {
            let above = Location::from_parts(parts[..depth].iter().copied());
            self.taken_back.get(&above)
        });
        match above.map(|file| &file.before) {
            Some(None) => return Ok(location.clone()),
            Some(Some(_)) => return reject("a part of the path is not a directory"),
            None => {}
        }
        // The deepest existing directory decides.
        for depth in (0..parts.len()).rev() {
            match self.directory(&parts[..depth]) {
                Ok(_) => return Ok(location.clone()),
                Err(Errno::NOENT) => {}
                Err(Errno::LOOP | Errno::XDEV) => {
                    return reject("the path passes through a symbolic link");
                }
                Err(Errno::NOTDIR) => return reject("a part of the path is not a directory"),
                Err(Errno::NAMETOOLONG) => return reject("a part of the path is too long"),
                Err(errno) => return Err(failure(errno, location)),
            }
        }
        reject("the directory is gone")
    }

    fn load(&self, location: &Location) -> TreeResult<TreeNode<Stamp>> {
        let Some(taken_back) = self.taken_back.get(location) else {
            return self.load_actual(location);
        };
        let stamp = match &taken_back.state {
            PriorState::File(stamp) => *stamp,
            PriorState::Nothing | PriorState::Directory(_) => Stamp::default(),
        };
        Ok(match taken_back.before.clone() {
            Some(before) => TreeNode::File(stamp, before),
            None => TreeNode::Nothing,
        })
    }

    fn files_below(&self, directory: &Location, limit: usize) -> TreeResult<Vec<Location>> {
        let mut found = Vec::new();
        self.walk(directory, |location, kind| {
            if kind != FileType::Directory {
                found.push(location.clone());
            }
            found.len() <= limit
        })?;
        Ok(found)
    }

    fn digest(&self, bytes: &[u8]) -> String {
        hex::encode(Sha256::digest(bytes))
    }
}

/// Lists the entries of a directory. Opens it again, because `O_PATH` descriptors can't be read.
pub(super) fn entries(directory: &OwnedFd) -> Result<Dir, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Dir::new(openat(directory, ".", flags, Mode::empty())?)
}

fn read(directory: &OwnedFd, last: &[u8], location: &Location) -> TreeResult<TreeNode<Stamp>> {
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file =
        openat(directory, last, flags, Mode::empty()).map_err(|errno| failure(errno, location))?;
    let stat = fstat(&file).map_err(|errno| failure(errno, location))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return reject("the path is not a regular file");
    }
    let mut bytes = Vec::new();
    std::fs::File::from(file)
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(Problem::Failure)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return reject(format!("the file has more than {MAX_FILE_BYTES} bytes"));
    }
    let kind = Kind::Regular(stat.st_mode & 0o777);
    Ok(TreeNode::File(Stamp::of(&stat), File { kind, bytes }))
}

/// Makes a reject for each link in the plan that leads out of the directory.
pub(super) fn links_outside(plan: &Plan<Stamp>) -> Vec<Reject> {
    plan.entries
        .iter()
        .filter(|(_, entry)| entry.changed)
        .filter_map(|(location, entry)| Some((location, entry.now.as_ref()?)))
        .filter(|(location, file)| {
            file.kind == Kind::Symlink && leads_outside(location, &file.bytes)
        })
        .map(|(location, _)| {
            Reject::of_file(
                location.as_bytes().to_vec(),
                "the symbolic link leads out of the directory".to_owned(),
            )
        })
        .collect()
}

/// Returns whether a link's target is absolute, leaves the root, or is below `.git`. `..` is
/// accepted only at the start: after a name, which may be a link, it could lead anywhere.
pub(super) fn leads_outside(location: &Location, target: &[u8]) -> bool {
    let mut depth = location.parts().len() - 1;
    let mut is_after_name = false;
    target.starts_with(b"/")
        || target.split(|byte| *byte == b'/').any(|part| match part {
            b"" | b"." => false,
            b".." if is_after_name || depth == 0 => true,
            b".." => {
                depth -= 1;
                false
            }
            name => {
                is_after_name = true;
                cynode_patch::spells_git(name)
            }
        })
}

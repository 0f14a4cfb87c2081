//! Adapts the workspace to the `Tree` trait, on which `cynode-patch` plans a diff.

use std::{io::Read as _, os::fd::OwnedFd};

use cynode_patch::{File, Kind, Location, MAX_FILE_BYTES, Problem, Tree, TreeNode};
use rustix::{
    fs::{
        Access, AtFlags, FileType, Mode, OFlags, Stat, accessat, fstat, openat, readlinkat, statat,
    },
    io::Errno,
};

use super::super::{
    confined::ConfinedRoot,
    digest,
    error::Failure,
    path,
    walk::{AtLimit, Step, walk},
};

pub(super) struct WorkspaceTree<'a> {
    pub(super) root: &'a ConfinedRoot,
}

type TreeResult<T> = Result<T, Problem<Failure>>;

fn reject<T>(reason: impl Into<String>) -> TreeResult<T> {
    Err(Problem::Reject(reason.into()))
}

impl Tree for WorkspaceTree<'_> {
    type Stamp = Stat;
    type Failure = Failure;

    fn locate(&self, location: &Location) -> TreeResult<Location> {
        let parts = location.parts();
        for depth in (0..parts.len()).rev() {
            let directory = match self.root.directory(&parts[..depth]) {
                Ok(directory) => directory,
                Err(Errno::NOENT) if depth > 0 => continue,
                Err(Errno::XDEV) => {
                    return reject(
                        "the path passes through a symbolic link that leads outside of the \
                         workspace",
                    );
                }
                Err(Errno::NOTDIR) => return reject("a part of the path is not a directory"),
                Err(Errno::NAMETOOLONG) => return reject("a part of the path is too long"),
                Err(errno) => {
                    return Err(Problem::Failure(Failure::system(
                        errno,
                        "opening the directory of",
                        location.as_bytes(),
                    )));
                }
            };
            let is_parent = depth + 1 == parts.len();
            if !is_parent
                && statat(&directory, parts[depth], AtFlags::SYMLINK_NOFOLLOW)
                    .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
            {
                return reject("the path passes through a dangling symbolic link");
            }
            let real = self
                .root
                .real_parts(&directory)
                .unwrap_or_else(|| parts[..depth].iter().map(|part| part.to_vec()).collect());
            if real.iter().any(|part| cynode_patch::spells_git(part)) {
                return reject("the path is in a .git directory");
            }
            return Ok(Location::from_parts(
                real.iter()
                    .map(Vec::as_slice)
                    .chain(parts[depth..].iter().copied()),
            ));
        }
        reject("the path is empty")
    }

    fn load(&self, location: &Location) -> TreeResult<TreeNode<Stat>> {
        let failure =
            |errno| Problem::Failure(Failure::system(errno, "reading", location.as_bytes()));
        let parts = location.parts();
        let Some((last, parents)) = parts.split_last() else {
            return Ok(TreeNode::Nothing);
        };
        let directory = match self.root.real_directory(parents) {
            Ok(directory) => directory,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::XDEV) => return Ok(TreeNode::Nothing),
            Err(errno) => return Err(failure(errno)),
        };
        let stat = match statat(&directory, *last, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(TreeNode::Nothing),
            Err(Errno::NAMETOOLONG) => return reject("a part of the path is too long"),
            Err(errno) => return Err(failure(errno)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => read_file(&directory, last, location, &stat),
            FileType::Symlink => {
                let target = readlinkat(&directory, *last, Vec::new()).map_err(failure)?;
                Ok(TreeNode::File(
                    stat,
                    File {
                        kind: Kind::Symlink,
                        bytes: target.into_bytes(),
                    },
                ))
            }
            FileType::Directory => Ok(TreeNode::Directory(stat)),
            _ => reject("the path is not a regular file"),
        }
    }

    fn files_below(&self, directory: &Location, limit: usize) -> TreeResult<Vec<Location>> {
        let failure =
            |errno| Problem::Failure(Failure::system(errno, "reading", directory.as_bytes()));
        let opened = self
            .root
            .real_directory(&directory.parts())
            .map_err(failure)?;
        let opened = openat(
            &opened,
            ".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(failure)?;
        files_below(opened, directory, limit).map_err(Problem::Failure)
    }

    fn digest(&self, bytes: &[u8]) -> String {
        digest::of_bytes(bytes)
    }
}

/// Lists the files below an open directory. Their locations begin with `location`.
pub(super) fn files_below(
    directory: OwnedFd,
    location: &Location,
    limit: usize,
) -> Result<Vec<Location>, Failure> {
    let mut found = Vec::new();
    walk(directory, None, AtLimit::Fail, |entry| {
        if entry.kind == FileType::Directory {
            return entry
                .open_directory()
                .map(Step::Into)
                .map_err(|errno| Failure::system(errno, "reading", entry.path));
        }
        found.push(Location::from_parts([location.as_bytes(), entry.path]));
        Ok(if found.len() > limit {
            Step::Stop
        } else {
            Step::Over
        })
    })?;
    Ok(found)
}

fn read_file(
    directory: &OwnedFd,
    last: &[u8],
    location: &Location,
    stat: &Stat,
) -> TreeResult<TreeNode<Stat>> {
    let failure = |errno| Problem::Failure(Failure::system(errno, "reading", location.as_bytes()));
    if path::size(stat) > MAX_FILE_BYTES {
        return reject(format!("the file has more than {MAX_FILE_BYTES} bytes"));
    }
    if accessat(
        directory,
        last,
        Access::READ_OK | Access::WRITE_OK,
        AtFlags::empty(),
    )
    .is_err()
    {
        return reject("the sandbox's user may not read or write the file");
    }
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = openat(directory, last, flags, Mode::empty()).map_err(failure)?;
    let stat = fstat(&file).map_err(failure)?;
    let mut bytes = Vec::new();
    let read = std::fs::File::from(file)
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes);
    read.map_err(|error| Problem::Failure(Failure::io(&error, "reading", location.as_bytes())))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return reject(format!("the file has more than {MAX_FILE_BYTES} bytes"));
    }
    Ok(TreeNode::File(
        stat,
        File {
            kind: Kind::Regular(path::permissions(&stat) & 0o1777),
            bytes,
        },
    ))
}

//! Walks a tree in order, from open directory to open directory.
//!
//! Invariants: links are never followed; [`MAX_DEPTH`] and [`MAX_NAME_BYTES`] bound memory and open
//! files for any tree.

use std::{os::fd::OwnedFd, time::Instant};

use cynode_api::ErrorCode;
use rustix::fs::{AtFlags, FileType as Kind, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use super::{
    error::{Failure, FailureContext, Outcome, shown},
    names::{self, DirectoryEntry},
    path,
};

/// The number of open directories below the top.
pub(super) const MAX_DEPTH: usize = 256;
/// Memory for the names of all directories on the current path.
pub(super) const MAX_NAME_BYTES: usize = 64 * 1024 * 1024;

pub(super) struct Entry<'a> {
    pub(super) directory: &'a OwnedFd,
    pub(super) name: &'a [u8],
    /// Relative to the top.
    pub(super) path: &'a [u8],
    pub(super) kind: Kind,
}

impl Entry<'_> {
    /// Opens an entry that is a directory.
    pub(super) fn open_directory(&self) -> Result<OwnedFd, Errno> {
        openat(
            self.directory,
            self.name,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
    }
}

pub(super) enum Step {
    Over,
    Into(OwnedFd),
    Stop,
}

/// The effect of a limit on a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AtLimit {
    Fail,
    Skip,
}

struct OpenDirectory {
    directory: OwnedFd,
    names: std::vec::IntoIter<DirectoryEntry>,
    /// The length of this directory's path.
    path: usize,
    bytes: usize,
}

/// Passes every entry below `top` to `visit`, a directory before its content; true if no limit left
/// anything out.
pub(super) fn walk(
    top: OwnedFd,
    deadline: Option<Instant>,
    at_limit: AtLimit,
    mut visit: impl FnMut(&Entry<'_>) -> Outcome<Step>,
) -> Outcome<bool> {
    let mut complete = true;
    let mut bytes = 0;
    let mut path = Vec::new();
    let mut levels = vec![open_level(
        top,
        &path,
        &mut bytes,
        deadline,
        at_limit,
        &mut complete,
    )?];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.names.next() else {
            bytes -= level.bytes;
            levels.pop();
            continue;
        };
        path.truncate(level.path);
        path::join(&mut path, &name.bytes);
        let kind = match name.kind {
            Kind::Unknown => match statat(
                &level.directory,
                name.bytes.as_slice(),
                AtFlags::SYMLINK_NOFOLLOW,
            ) {
                Ok(stat) => Kind::from_raw_mode(stat.st_mode),
                Err(_) => continue,
            },
            kind => kind,
        };
        match visit(&Entry {
            directory: &level.directory,
            name: &name.bytes,
            path: &path,
            kind,
        })? {
            Step::Over => {}
            Step::Stop => return Ok(complete),
            Step::Into(_) if levels.len() > MAX_DEPTH => {
                if at_limit == AtLimit::Fail {
                    return Err(Failure::new(
                        ErrorCode::TooLarge,
                        format!("{} is more than {MAX_DEPTH} directories deep", shown(&path)),
                    ));
                }
                complete = false;
            }
            Step::Into(directory) => levels.push(open_level(
                directory,
                &path,
                &mut bytes,
                deadline,
                at_limit,
                &mut complete,
            )?),
        }
    }
    Ok(complete)
}

fn open_level(
    directory: OwnedFd,
    path: &[u8],
    bytes: &mut usize,
    deadline: Option<Instant>,
    at_limit: AtLimit,
    complete: &mut bool,
) -> Outcome<OpenDirectory> {
    let (names, all) =
        names::all(&directory, MAX_NAME_BYTES - *bytes, deadline).doing("listing", path)?;
    if !all {
        if at_limit == AtLimit::Fail {
            return Err(Failure::new(
                ErrorCode::TooLarge,
                format!("{} contains too many files", shown(path)),
            ));
        }
        *complete = false;
    }
    let cost = names.iter().map(|name| names::cost(&name.bytes)).sum();
    *bytes += cost;
    Ok(OpenDirectory {
        directory,
        names: names.into_iter(),
        path: path.len(),
        bytes: cost,
    })
}

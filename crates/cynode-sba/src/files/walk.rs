//! Walking a tree in order, from open directory to open directory.
//!
//! What must stay true: links are never followed; memory and open files are bounded by [`MAX_DEPTH`] and
//! [`MAX_NAME_BYTES`], whatever the tree looks like.

use std::{os::fd::OwnedFd, time::Instant};

use cynode_api::ErrorCode;
use rustix::fs::{AtFlags, FileType as Kind, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use super::{
    error::{Doing, Failure, Outcome, shown},
    names::{self, Name},
    path,
};

/// Directories below the top that are open at once.
pub(super) const MAX_DEPTH: usize = 256;
/// What the names of all directories on the way may take.
pub(super) const MAX_NAME_BYTES: usize = 64 * 1024 * 1024;

pub(super) struct Entry<'a> {
    pub(super) directory: &'a OwnedFd,
    pub(super) name: &'a [u8],
    /// From the top.
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

/// What a limit does to a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AtLimit {
    Fail,
    LeaveOut,
}

struct Level {
    directory: OwnedFd,
    names: std::vec::IntoIter<Name>,
    /// Length of the path of this directory.
    path: usize,
    bytes: usize,
}

/// Shows every entry below `top` to `visit`, a directory before what it holds; true when nothing was left out by a limit.
pub(super) fn walk(
    top: OwnedFd,
    deadline: Option<Instant>,
    at_limit: AtLimit,
    mut visit: impl FnMut(&Entry<'_>) -> Outcome<Step>,
) -> Outcome<bool> {
    let mut complete = true;
    let mut bytes = 0;
    let mut path = Vec::new();
    let mut levels = vec![enter(
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
                        format!(
                            "{} lies more than {MAX_DEPTH} directories deep",
                            shown(&path)
                        ),
                    ));
                }
                complete = false;
            }
            Step::Into(directory) => levels.push(enter(
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

fn enter(
    directory: OwnedFd,
    path: &[u8],
    bytes: &mut usize,
    deadline: Option<Instant>,
    at_limit: AtLimit,
    complete: &mut bool,
) -> Outcome<Level> {
    let (names, all) =
        names::all(&directory, MAX_NAME_BYTES - *bytes, deadline).doing("listing", path)?;
    if !all {
        if at_limit == AtLimit::Fail {
            return Err(Failure::new(
                ErrorCode::TooLarge,
                format!("{} holds too many files", shown(path)),
            ));
        }
        *complete = false;
    }
    let cost = names.iter().map(|name| names::cost(&name.bytes)).sum();
    *bytes += cost;
    Ok(Level {
        directory,
        names: names.into_iter(),
        path: path.len(),
        bytes: cost,
    })
}

//! Writes a file atomically, below the workspace.
//!
//! Invariant: the directory of the file is opened below the workspace, and staging and renaming
//! refer to it by its descriptor. A name that becomes a link meanwhile is replaced, not followed.

use std::{
    ffi::OsStr,
    io::Write as _,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
};

use cynode_api::FileType;
use rustix::{
    fs::{Access, AtFlags, Mode, OFlags, accessat, readlinkat, statat},
    io::Errno,
};
use serde_json::json;

use super::{
    super::{
        confined::ConfinedRoot,
        digest,
        error::{FailureContext, Outcome},
        path,
        staged::StagedFile,
        write::MAX_LINKS,
    },
    Output, Workspace, as_path, failure,
};

const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o755);
const DEFAULT_MODE: u32 = 0o644;

/// A name in an open directory, and the permissions of the file that has it.
struct WriteTarget {
    directory: OwnedFd,
    name: Vec<u8>,
    mode: Option<u32>,
}

impl Workspace {
    pub(super) fn write(&self, path: &[u8], content: &[u8], mode: Option<u32>) -> Outcome<Output> {
        let parts = self.parts(path)?;
        let is_directory = parts.is_empty() || path.ends_with(b"/") || path.ends_with(b"/.");
        if is_directory {
            return Err(path::not_a_file(as_path(path), FileType::Dir));
        }
        let target = find(&self.open()?, &parts, path)?;
        let directory = target.directory.try_clone().doing("writing", path)?;
        let mut staged = StagedFile::new(directory).doing("writing", path)?;
        staged.file().write_all(content).doing("writing", path)?;
        let mode = mode.or(target.mode).unwrap_or(DEFAULT_MODE) & 0o1777;
        staged
            .publish(
                &target.directory,
                OsStr::from_bytes(&target.name),
                mode,
                true,
            )
            .doing("writing", path)?;
        Ok(Output {
            value: json!({ "sha256": digest::of_bytes(content), "size": content.len() }),
            truncated: false,
        })
    }
}

/// Finds where to write: follows links in the last part while they stay below the root.
fn find(root: &ConfinedRoot, parts: &[&[u8]], path: &[u8]) -> Outcome<WriteTarget> {
    let failed = |errno| failure(errno, "writing", path);
    let Some((name, parents)) = parts.split_last() else {
        return Err(failed(Errno::ISDIR));
    };
    let mut directory = root
        .make_directory(parents, DIRECTORY_MODE, |_| {})
        .map_err(failed)?;
    let (mut parent, mut name) = (parents.join(&b'/'), name.to_vec());
    for _ in 0..MAX_LINKS {
        let stat = match statat(&directory, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => {
                return Ok(WriteTarget {
                    directory,
                    name,
                    mode: None,
                });
            }
            Err(errno) => return Err(failed(errno)),
        };
        match path::kind(&stat) {
            FileType::File => {
                // Replacing a file needs no write permission on it. A read-only file is meant to
                // stay, so require the permission anyway.
                accessat(
                    &directory,
                    name.as_slice(),
                    Access::WRITE_OK,
                    AtFlags::empty(),
                )
                .map_err(failed)?;
                return Ok(WriteTarget {
                    directory,
                    name,
                    mode: Some(path::permissions(&stat)),
                });
            }
            FileType::Symlink => {
                let link = readlinkat(&directory, name.as_slice(), Vec::new()).map_err(failed)?;
                (parent, name) = beside(&parent, link.as_bytes()).map_err(failed)?;
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let above: &[u8] = if parent.is_empty() { b"." } else { &parent };
                directory = root.open_below(above, flags).map_err(failed)?;
            }
            other => return Err(path::not_a_file(as_path(path), other)),
        }
    }
    Err(failed(Errno::LOOP))
}

/// The directory and the name that a link in `parent` leads to. The directory may contain `..`,
/// which the kernel resolves.
fn beside(parent: &[u8], link: &[u8]) -> Result<(Vec<u8>, Vec<u8>), Errno> {
    if link.starts_with(b"/") {
        return Err(Errno::XDEV);
    }
    let (above, name) = match link.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&link[..at], &link[at + 1..]),
        None => (&b""[..], link),
    };
    if matches!(name, b"" | b"." | b"..") {
        return Err(Errno::ISDIR);
    }
    let parts = [parent, above];
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    Ok((parts.collect::<Vec<_>>().join(&b'/'), name.to_vec()))
}

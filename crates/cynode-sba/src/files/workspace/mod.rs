//! The file steps of a job, which never leave the workspace.
//!
//! Invariants: a path is resolved by the kernel below the open workspace, so neither `..` nor a
//! link leads out, also while another process swaps links; what is returned fits into the room
//! that the job has left for it.

mod read;
#[cfg(test)]
mod tests;
mod write;

use std::{
    io,
    path::{Path, PathBuf},
};

use cynode_api::{ErrorCode, SearchRequest, SearchResult, file_limits};
use cynode_sba_proto::{Reply, WORKSPACE};
use rustix::{fs::OFlags, io::Errno};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub(crate) use self::read::LineRange;
use super::{
    confined::{self, ConfinedRoot},
    error::{Failure, FailureContext, Outcome, shown},
    list::{self, Extent},
    path::{self, Files},
    search,
};
use crate::peer::Peer;

/// Values and names of one entry of a listing.
const NODES_PER_ENTRY: usize = 15;

/// A job's workspace.
#[derive(Clone, Debug)]
pub(crate) struct Workspace {
    path: PathBuf,
}

/// A step's operation on files.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation<'a> {
    /// Missing parents are created. The file changes as a whole.
    Write {
        path: &'a [u8],
        content: &'a [u8],
        mode: Option<u32>,
    },
    /// The content follows as a second document.
    Read {
        path: &'a [u8],
        lines: LineRange,
        max_bytes: u64,
    },
    Patch {
        diff: &'a [u8],
    },
    List {
        path: &'a [u8],
        depth: u32,
        max_entries: u32,
    },
    Search {
        request: &'a SearchRequest,
    },
}

/// What the results of a job's steps may still take, apart from output and content of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Of JSON.
    pub(crate) bytes: usize,
    /// Values and names.
    pub(crate) nodes: usize,
}

/// What an operation returns, without content.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Output {
    pub(crate) value: Value,
    /// A bound left something out.
    pub(crate) truncated: bool,
}

impl Workspace {
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Runs one operation and sends its reply. An error means that the connection broke.
    pub(crate) fn serve(
        &self,
        operation: Operation<'_>,
        room: Room,
        peer: &mut Peer,
    ) -> io::Result<()> {
        match self.run(operation, room) {
            Ok((output, content)) => {
                peer.reply(&Reply::Body)?;
                peer.data(&serde_json::to_vec(&output)?)?;
                peer.end()?;
                if let Some(content) = content {
                    peer.data(&content)?;
                    peer.end()?;
                }
                Ok(())
            }
            Err(Failure::Refused(error)) => peer.reply(&Reply::Error(error)),
            Err(Failure::Connection(error)) => Err(error),
        }
    }

    fn run(&self, operation: Operation<'_>, room: Room) -> Outcome<(Output, Option<Vec<u8>>)> {
        let output = match operation {
            Operation::Write {
                path,
                content,
                mode,
            } => self.write(path, content, mode)?,
            Operation::Read {
                path,
                lines,
                max_bytes,
            } => {
                let (output, content) = self.read(path, lines, max_bytes)?;
                return Ok((output, Some(content)));
            }
            Operation::Patch { diff } => self.patch(diff, room)?,
            Operation::List {
                path,
                depth,
                max_entries,
            } => self.list(path, depth, max_entries, room)?,
            Operation::Search { request } => self.search(request, room)?,
        };
        Ok((output, None))
    }

    fn patch(&self, diff: &[u8], room: Room) -> Outcome<Output> {
        if diff.len() as u64 > file_limits::MAX_PATCH_BYTES {
            return Err(Failure::new(
                ErrorCode::TooLarge,
                format!(
                    "the diff has more than {} bytes",
                    file_limits::MAX_PATCH_BYTES
                ),
            ));
        }
        let result = Files::within(&self.path).patch(diff, 1, false)?;
        let files = result.files.iter().map(|file| json!(file)).collect();
        let (files, truncated) = fitting(files, room);
        Ok(Output {
            value: json!({ "files": files }),
            truncated,
        })
    }

    fn list(&self, path: &[u8], depth: u32, max_entries: u32, room: Room) -> Outcome<Output> {
        let extent = Extent {
            depth: depth as usize,
            max_entries: (max_entries as usize).min(room.nodes / NODES_PER_ENTRY),
            max_bytes: room.bytes.min(file_limits::MAX_ANSWER_BYTES),
            hidden: true,
            skips: |name| name == b".git",
        };
        if extent.max_entries == 0 {
            return Ok(Output {
                value: json!({ "entries": [], "truncated": true }),
                truncated: true,
            });
        }
        let parts = self.parts(path)?;
        let root = self.open()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = if parts.is_empty() {
            root.readable_directory(b".")
        } else {
            root.open_below(&parts.join(&b'/'), flags)
        };
        let result = match opened {
            Ok(top) => list::list_directory(top, parts.join(&b'/'), extent),
            // A file, or a link that leads nowhere.
            Err(Errno::NOTDIR | Errno::NOENT) => match parts.split_last() {
                Some((name, parents)) => root.directory(parents).and_then(|directory| {
                    list::list_entry(&directory, as_path(name), &parts.join(&b'/'))
                }),
                None => Err(Errno::NOENT),
            },
            Err(errno) => Err(errno),
        };
        let result = result.map_err(|errno| failure(errno, "listing", path))?;
        Ok(Output {
            value: json!({ "entries": result.entries, "truncated": result.truncated }),
            truncated: result.truncated,
        })
    }

    fn search(&self, request: &SearchRequest, room: Room) -> Outcome<Output> {
        let path = request.path.as_deref().unwrap_or(".").as_bytes();
        let parts = self.parts(path)?;
        let below = parts.join(&b'/');
        let root = self.open()?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = if parts.is_empty() {
            root.readable_directory(b".")
        } else {
            root.open_below(&below, flags | OFlags::DIRECTORY)
        };
        let found = match opened {
            Ok(top) => search::in_directory(top, &below, request)?,
            Err(Errno::NOTDIR) => {
                let file = root.open_below(&below, flags);
                let file = file.map_err(|errno| failure(errno, "searching", path))?;
                search::in_file(file.into(), &below, request)?
            }
            Err(errno) => return Err(failure(errno, "searching", path)),
        };
        let SearchResult {
            matches,
            truncated,
            files_searched,
        } = found;
        let matches = matches.iter().map(|found| json!(found)).collect();
        let (matches, cut) = fitting(matches, room);
        let truncated = truncated || cut;
        Ok(Output {
            value: json!({
                "matches": matches, "truncated": truncated, "files_searched": files_searched,
            }),
            truncated,
        })
    }

    fn open(&self) -> Outcome<ConfinedRoot> {
        ConfinedRoot::open(&self.path).doing("opening", path::bytes(&self.path))
    }

    /// The parts of a step's path below the workspace; none for the workspace itself.
    fn parts<'a>(&self, path: &'a [u8]) -> Outcome<Vec<&'a [u8]>> {
        let relative = [path::bytes(&self.path), WORKSPACE.as_bytes()]
            .into_iter()
            .find_map(|root| match path.strip_prefix(root)? {
                b"" => Some(&b"."[..]),
                rest => rest
                    .starts_with(b"/")
                    .then(|| without_leading_slashes(rest)),
            })
            .unwrap_or(path);
        if relative
            .split(|byte| *byte == b'/')
            .all(|part| matches!(part, b"" | b"."))
            && !relative.starts_with(b"/")
        {
            return Ok(Vec::new());
        }
        confined::parts(relative).map_err(|reason| {
            let message = format!("{} is not in the workspace: {reason}", shown(path));
            Failure::new(ErrorCode::PermissionDenied, message)
        })
    }
}

fn without_leading_slashes(path: &[u8]) -> &[u8] {
    let slashes = path.iter().take_while(|byte| **byte == b'/').count();
    &path[slashes..]
}

fn as_path(name: &[u8]) -> &Path {
    use std::os::unix::ffi::OsStrExt as _;
    Path::new(std::ffi::OsStr::from_bytes(name))
}

/// A system error; one of the confined lookup names its reason.
fn failure(errno: Errno, doing: &str, path: &[u8]) -> Failure {
    if errno == Errno::XDEV {
        let message = format!(
            "{doing} {}: the path leads out of the workspace",
            shown(path)
        );
        return Failure::new(ErrorCode::PermissionDenied, message);
    }
    Failure::system(errno, doing, path)
}

/// The first items that fit, and whether any were left out.
fn fitting(mut items: Vec<Value>, room: Room) -> (Vec<Value>, bool) {
    let (mut bytes, mut nodes) = (0, 0);
    let fit = items.iter().take_while(|item| {
        bytes += item.to_string().len() + 1;
        nodes += count_nodes(item);
        bytes <= room.bytes && nodes <= room.nodes
    });
    let count = fit.count();
    let cut = count < items.len();
    items.truncate(count);
    (items, cut)
}

/// The values and names in a value.
pub(crate) fn count_nodes(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(count_nodes).sum::<usize>(),
        Value::Object(members) => {
            1 + members
                .values()
                .map(|value| 1 + count_nodes(value))
                .sum::<usize>()
        }
        _ => 1,
    }
}

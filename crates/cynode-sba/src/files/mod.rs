//! File operations, run in a child that process 1 forks for one request.
//!
//! The child runs with the sandbox's own rights, so paths need no boundary here: a caller may touch
//! what the sandbox's user may touch. Patches and imports are the exception: they never leave their
//! target directory, so that a careless diff or archive stays inside it. So are the steps of a job
//! ([`workspace`]).
//!
//! Invariants: nothing here blocks on a FIFO or a device, and nothing panics on unusual files;
//! memory is bounded for any tree; every failure is reported with one of the API's codes and names
//! operation and path.

mod archive;
mod artifacts;
mod confined;
mod digest;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod git;
mod import;
mod list;
mod names;
mod patch;
mod path;
mod read;
mod search;
mod staged;
mod tree;
mod walk;
mod watch;
pub(crate) mod workspace;
mod write;

use std::io;

use cynode_api::{ErrorCode, file_limits};
use cynode_sba_proto::{FileOp, Reply};
use serde::Serialize;

use self::error::{Failure, Outcome};
pub(crate) use self::{
    artifacts::{Artifact, serve_artifacts},
    path::Files,
    staged::StagedFile,
};
use crate::peer::Peer;

/// Runs one operation in `/workspace` and sends its reply. An error means that the connection
/// broke.
pub(crate) fn serve(op: FileOp, peer: &mut Peer) -> io::Result<()> {
    Files::default().serve(op, peer)
}

/// The body that follows the worker's request.
struct RequestBody<'a> {
    peer: &'a mut Peer,
    open: bool,
}

impl RequestBody<'_> {
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let piece = self.peer.next_data()?;
        self.open = piece.is_some();
        Ok(piece)
    }

    /// Discards the rest of the body after a refusal, so that a worker that sends its whole body
    /// before reading gets the reply.
    fn discard(&mut self) {
        let mut left = file_limits::MAX_PUT_BYTES;
        while self.open {
            match self.next() {
                Ok(Some(piece)) if left > piece.len() as u64 => left -= piece.len() as u64,
                _ => return,
            }
        }
    }
}

impl Files {
    pub(crate) fn serve(&self, op: FileOp, peer: &mut Peer) -> io::Result<()> {
        let open = matches!(
            op,
            FileOp::Write { .. } | FileOp::Patch { .. } | FileOp::Import { .. }
        );
        let mut body = RequestBody { peer, open };
        match self.run(op, &mut body) {
            Ok(()) => Ok(()),
            Err(Failure::Refused(error)) => {
                body.peer.reply(&Reply::Error(error))?;
                body.discard();
                Ok(())
            }
            Err(Failure::Connection(error)) => Err(error),
        }
    }

    fn run(&self, op: FileOp, body: &mut RequestBody<'_>) -> Outcome<()> {
        let reply = match op {
            FileOp::Stat { path, hash } => Reply::Stat(self.stat(&path.0, hash)?),
            FileOp::Read { path, start, end } => {
                return self.read(&path.0, start, end, body.peer);
            }
            FileOp::Write {
                path,
                mode,
                if_match,
                if_none_match,
                max_bytes,
            } => {
                let conditions = write::Conditions {
                    if_match,
                    if_none_match,
                };
                Reply::Written(
                    self.write(&path.0, mode, &conditions, max_bytes, &mut || body.next())?,
                )
            }
            FileOp::Delete {
                path,
                recursive,
                if_match,
            } => Reply::Ok {
                changed: Some(self.delete(&path.0, recursive, if_match)?),
            },
            FileOp::List { request } => return send_json(&self.list(&request)?, body.peer),
            FileOp::Search { request } => return send_json(&self.search(&request)?, body.peer),
            FileOp::Patch {
                strip,
                dry_run,
                encoded: false,
            } => {
                let diff = read_to_end(body, file_limits::MAX_PATCH_BYTES)?;
                return send_json(&self.patch(&diff, strip, dry_run)?, body.peer);
            }
            FileOp::Patch {
                dry_run,
                encoded: true,
                ..
            } => {
                let patch = read_to_end(body, cynode_patch::MAX_WIRE_BYTES as u64)?;
                return send_json(&self.encoded_patch(&patch, dry_run)?, body.peer);
            }
            FileOp::Move {
                from,
                to,
                overwrite,
            } => Reply::Ok {
                changed: Some(self.rename(&from.0, &to.0, overwrite)?),
            },
            FileOp::Mkdir { path, parents } => Reply::Ok {
                changed: Some(self.mkdir(&path.0, parents)?),
            },
            FileOp::ExportTar { path } => return self.export_tar(&path.0, body.peer),
            FileOp::ExportPatch { base } => {
                return self.export_patch(base.as_deref(), body.peer);
            }
            FileOp::Snapshot => {
                self.take_snapshot()?;
                Reply::Ok { changed: None }
            }
            FileOp::Watch { path } => return self.watch(&path.0, body.peer),
            FileOp::Import { path } => Reply::Ok {
                changed: Some(self.import(&path.0, &mut || body.next())?),
            },
        };
        body.peer.reply(&reply).map_err(Failure::Connection)
    }
}

fn read_to_end(body: &mut RequestBody<'_>, limit: u64) -> Outcome<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(piece) = body.next().map_err(Failure::Connection)? {
        if (bytes.len() + piece.len()) as u64 > limit {
            return Err(Failure::new(
                ErrorCode::TooLarge,
                format!("the body has more than {limit} bytes"),
            ));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

fn send_json(value: &impl Serialize, peer: &mut Peer) -> Outcome<()> {
    let json = serde_json::to_vec(value).map_err(|error| {
        Failure::new(
            ErrorCode::Internal,
            format!("the result can't be serialized as JSON: {error}"),
        )
    })?;
    peer.reply(&Reply::Body).map_err(Failure::Connection)?;
    peer.data(&json).map_err(Failure::Connection)?;
    peer.end().map_err(Failure::Connection)
}

#[cfg(test)]
mod tests;

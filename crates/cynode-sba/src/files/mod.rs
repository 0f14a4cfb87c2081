//! File operations, run in a child that process 1 forked for one request.
//!
//! The child has the sandbox's own rights, so paths need no boundary here: what the sandbox's user may touch, a caller may
//! touch. Patches and imports are the exception: they never leave the directory they apply to, so that a careless diff or
//! archive stays inside it.
//!
//! What must stay true: nothing here blocks on a FIFO or a device, nothing panics on what it finds, memory is bounded
//! whatever the tree looks like, and every failure is answered in the API's own codes, naming operation and path.

mod archive;
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
mod write;

use std::io;

use cynode_api::{ErrorCode, file_limits};
use cynode_sba_proto::{FileOp, Reply};
use serde::Serialize;

use self::error::{Failure, Outcome};
pub(crate) use self::path::Files;
use crate::peer::Peer;

/// Runs one operation in `/workspace` and answers it. An error means that the connection broke.
pub(crate) fn serve(op: FileOp, peer: &mut Peer) -> io::Result<()> {
    Files::default().serve(op, peer)
}

/// What the worker still has to send after its request.
struct Incoming<'a> {
    peer: &'a mut Peer,
    open: bool,
}

impl Incoming<'_> {
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let piece = self.peer.next_data()?;
        self.open = piece.is_some();
        Ok(piece)
    }

    /// Takes what is left after a refusal, so that a worker that sends its whole body before it reads gets its answer.
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
        let mut incoming = Incoming { peer, open };
        match self.run(op, &mut incoming) {
            Ok(()) => Ok(()),
            Err(Failure::Refused(error)) => {
                incoming.peer.reply(&Reply::Error(error))?;
                incoming.discard();
                Ok(())
            }
            Err(Failure::Connection(error)) => Err(error),
        }
    }

    fn run(&self, op: FileOp, incoming: &mut Incoming<'_>) -> Outcome<()> {
        let reply = match op {
            FileOp::Stat { path, hash } => Reply::Stat(self.stat(&path.0, hash)?),
            FileOp::Read { path, start, end } => {
                return self.read(&path.0, start, end, incoming.peer);
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
                Reply::Written(self.write(&path.0, mode, &conditions, max_bytes, &mut || {
                    incoming.next()
                })?)
            }
            FileOp::Delete {
                path,
                recursive,
                if_match,
            } => Reply::Ok {
                changed: Some(self.delete(&path.0, recursive, if_match)?),
            },
            FileOp::List { request } => return send_json(&self.list(&request)?, incoming.peer),
            FileOp::Search { request } => return send_json(&self.search(&request)?, incoming.peer),
            FileOp::Patch { strip, dry_run } => {
                let diff = whole_body(incoming, file_limits::MAX_PATCH_BYTES)?;
                return send_json(&self.patch(&diff, strip, dry_run)?, incoming.peer);
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
            FileOp::ExportTar { path } => return self.export_tar(&path.0, incoming.peer),
            FileOp::ExportPatch { base } => {
                return self.export_patch(base.as_deref(), incoming.peer);
            }
            FileOp::Import { path } => Reply::Ok {
                changed: Some(self.import(&path.0, &mut || incoming.next())?),
            },
        };
        incoming.peer.reply(&reply).map_err(Failure::Connection)
    }
}

fn whole_body(incoming: &mut Incoming<'_>, limit: u64) -> Outcome<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(piece) = incoming.next().map_err(Failure::Connection)? {
        if (body.len() + piece.len()) as u64 > limit {
            return Err(Failure::new(
                ErrorCode::TooLarge,
                format!("the body has more than {limit} bytes"),
            ));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

fn send_json(value: &impl Serialize, peer: &mut Peer) -> Outcome<()> {
    let json = serde_json::to_vec(value).map_err(|error| {
        Failure::new(
            ErrorCode::Internal,
            format!("the answer can't be written as JSON: {error}"),
        )
    })?;
    peer.reply(&Reply::Body).map_err(Failure::Connection)?;
    peer.data(&json).map_err(Failure::Connection)?;
    peer.end().map_err(Failure::Connection)
}

#[cfg(test)]
mod tests;

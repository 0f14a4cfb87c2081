//! The audit trail: requests, decisions and outcomes, in tamper-evident records.
//!
//! Invariants: every effect has an intent that was durable before it, and exactly one outcome that
//! is durable before the response (`writer.rs`). The heads of the streams are signed every second
//! with a key outside the database, and the signed lines are also kept in a local file
//! (`checkpoints.rs`); a missing checkpoint is noticed (`heads.rs`). A call without an outcome is
//! closed by asking its node (`close.rs`). Records contain names, sizes and hashes, never values of
//! the environment, input or file contents.

mod checkpoints;
mod close;
mod events;
mod failures;
mod heads;
mod node_records;
mod received;
mod role_records;
mod roles;
mod verify;
mod writer;

use crate::{db, fleet};

pub(crate) use checkpoints::{Checkpoints, Signer};
pub(crate) use close::{AbandonedCalls, CallCloser, follow_exec};
pub(crate) use events::{EventCopier, EventPump};
pub(crate) use failures::{EntryPoint, Failure, Failures, keep as keep_failures};
pub(crate) use heads::OwnHeads;
pub(crate) use node_records::refusals as node_refusals;
pub(crate) use received::links as received_links;
pub(crate) use roles::RoleAudit;
pub(crate) use writer::{Audit, not_started};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error(transparent)]
    Fleet(#[from] fleet::Error),
    #[error("the audit trail can't take a record now; nothing was done")]
    Unavailable,
    #[error(
        "this build keeps no audit trail; it is for measurements only, \
         and runs with CYNODE_UNAUDITED set"
    )]
    Unaudited,
    /// The database has records of the live stream that the writer has not acknowledged.
    #[error("the writer does not know yet what it committed")]
    WriterBehind,
    #[error("the checkpoint file can't be written")]
    CheckpointsUnwritable,
    #[error("the checkpoint file can't be read")]
    CheckpointsUnreadable,
    #[error("verifying was interrupted")]
    Interrupted,
}

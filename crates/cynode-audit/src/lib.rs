//! The audit trail as pure code: chaining records, signing checkpoints, verifying both, and
//! rendering them for people. Nothing here does I/O.
//!
//! Invariant: a record's hash covers its position in its stream, its time, its body and the hash of
//! the previous record; a checkpoint's signature covers the heads of the streams and the hash of
//! the previous checkpoint. Without the signing key, nobody can change, remove or add a record at
//! or below a signed head undetected. Records above the newest checkpoint are only chained.
//!
//! The checkpoint writer must guarantee to the verifier:
//! - every record with a cursor up to a checkpoint's `cursor` is covered by a head of that
//!   checkpoint or of an earlier one (so read the cursor first, then the heads);
//! - records named by a `cut` are removed in the transaction that stores the checkpoint;
//! - a `full` checkpoint holds the heads and the cuts of all streams that still have records;
//! - a checkpoint is committed to the table before it is written to the external file; while the
//!   table is unavailable, heads are signed to a separate file ([`Verifier::interim`]).
#![forbid(unsafe_code)]

mod action;
mod canonical;
mod chain;
mod checkpoint;
mod fold;
mod hash_text;
mod key;
mod ocsf;
mod story;
mod verify;

pub use canonical::{NotChainable, canonical};
pub use chain::{Chain, Hash, Head, Link, MalformedRecord, genesis, hash};
pub use checkpoint::{Checkpoint, MalformedCheckpoint, SignedCheckpoint};
pub use fold::{FoldError, Folded, fold};
pub use key::{MalformedKey, PublicKey, SigningKey};
pub use ocsf::ocsf;
pub use story::{
    Story, StoryCommands, StoryLine, StorySummary, escape_line, headline, is_hidden, story,
};
pub use verify::{DERIVED_COLUMNS, Unsigned, Verifier};

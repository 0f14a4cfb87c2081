//! The audit trail as pure code: how records are chained, how checkpoints sign where the chains stood, and how both are
//! verified and told. Nothing here does I/O.
//!
//! What must stay true: a record's hash covers its place in its stream, its time and its body, and stands on the record
//! before it; a checkpoint's signature covers the heads of the streams and stands on the checkpoint before it. So whoever
//! can write the records but not sign can change, remove or add nothing at or below a signed head without being found.
//! What lies above the newest checkpoint is only chained.
//!
//! What the writer of checkpoints owes the verifier:
//! - every record with a cursor up to a checkpoint's `cursor` is under a head of that checkpoint or of one before it
//!   (read the cursor first, then the heads);
//! - records that a `cut` names are removed in the transaction that stores the checkpoint;
//! - a `full` checkpoint has the heads, and the cuts, of all streams that still have records;
//! - a checkpoint is in the table before it is in the file outside; while the table takes none, heads are signed beside it
//!   ([`Verifier::interim`]).
#![forbid(unsafe_code)]

mod action;
mod canonical;
mod chain;
mod checkpoint;
mod fold;
mod hex;
mod key;
mod ocsf;
mod story;
mod verify;

pub use canonical::{NotChainable, canonical};
pub use chain::{Chain, Hash, Head, Link, MalformedRecord, genesis, hash};
pub use checkpoint::{Checkpoint, MalformedCheckpoint, Signed};
pub use fold::{Folded, NotWhole, fold};
pub use key::{MalformedKey, PublicKey, SigningKey};
pub use ocsf::ocsf;
pub use story::{Story, StoryCommands, StoryLine, StorySummary, headline, is_hidden, story};
pub use verify::{DERIVED_COLUMNS, Unsigned, Verifier};

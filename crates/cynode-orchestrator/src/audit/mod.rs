//! The audit trail: what was asked for, who decided it, what came of it, in records that can't be changed unnoticed.
//!
//! What must stay true: every effect has an intent that was durable before it, and exactly one outcome, durable before the
//! answer (`writer.rs`). Where the streams stand is signed each second with a key that is not in the database, and the signed
//! lines are in a file beside it too (`checkpoints.rs`); a checkpoint that does not come is noticed (`heads.rs`). A call whose outcome nobody could write is closed by asking the node
//! (`close.rs`). Values of the environment, input and contents of files are never in it: names, sizes and hashes are.

mod checkpoints;
mod close;
mod events;
mod failures;
mod heads;
mod verify;
mod writer;

use std::time::Duration;

use tokio_util::sync::CancellationToken;

pub(crate) use checkpoints::{Checkpoints, keep as keep_checkpoints, sign_once};
pub(crate) use close::{Abandoned, follow_abandoned, round as close_round};
pub(crate) use events::Pump;
pub(crate) use failures::{Failure, Failures, Surface, keep as keep_failures};
pub(crate) use heads::OwnHeads;
pub(crate) use verify::verify;
pub(crate) use writer::{Audit, not_started};

/// How long the end of the process waits for a database that does not answer.
const LAST_WAIT: Duration = Duration::from_secs(3);

/// Comes when the process is to end and has waited long enough.
async fn given_up(stop: &CancellationToken) {
    stop.cancelled().await;
    tokio::time::sleep(LAST_WAIT).await;
}

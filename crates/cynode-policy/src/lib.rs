//! Policy decisions: authorization, secrets that must not enter a sandbox, and paths as rules see
//! them.
//!
//! Invariant: nothing here does I/O, reads a clock or waits. The same input gives the same
//! decision, so every decision can be reproduced from the audit trail.
#![forbid(unsafe_code)]

mod action;
mod entities;
mod nesting;
mod paths;
mod policies;
mod secrets;

pub use action::{Action, UnknownAction};
pub use entities::{CallContext, CallLimits, Place, Principal, Resource, Role};
pub use paths::within_workspace;
pub use policies::{DEFAULTS, Decision, Effect, Flaw, MAX_DOCUMENT_BYTES, Policies, Rule, SCHEMA};
pub use secrets::{
    Channel, ContentScan, HeldForm, HeldSecrets, Hit, LocalScan, Scanner, ShapeAction, ShapePolicy,
    ShapeSetting, UNSCANNED, Watch, local_directory, local_file,
};

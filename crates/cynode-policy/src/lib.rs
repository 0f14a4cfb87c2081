//! Decisions: who may do what, what must not enter a sandbox, and what a path means to a rule.
//!
//! What must stay true: nothing here reads a file, a clock or a socket, or waits. The same question has the same answer, so that
//! every decision can be made again from what the audit trail holds.
#![forbid(unsafe_code)]

mod action;
mod entities;
mod nesting;
mod paths;
mod policies;
mod secrets;

pub use action::{Action, UnknownAction};
pub use entities::{Call, CallLimits, Place, Principal, Resource, Role};
pub use paths::within_workspace;
pub use policies::{DEFAULTS, Decision, Effect, Flaw, MAX_DOCUMENT_BYTES, Policies, Rule, SCHEMA};
pub use secrets::{
    Channel, ContentScan, Held, Hit, Scanner, ShapeAction, ShapePolicy, ShapeSetting, Watch,
};

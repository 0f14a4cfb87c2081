//! The egress roles: the only processes that dial beyond the machine on behalf of sandboxes, each
//! with its own credentials.
//!
//! Invariant: a role decides by its own copy of the rules, on facts that it derives itself, and
//! records the decision before it takes effect.
#![forbid(unsafe_code)]

mod git;

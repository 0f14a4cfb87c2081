//! Unified diffs and other patches: parsing, touched paths, and application.
//!
//! The gate parses what a caller writes, in any format ([`Patch::parse_any`]), checks
//! [`Patch::paths`] against rules and sends the patch encoded ([`Patch::to_wire`]); the agent applies
//! the same [`Patch`] with [`plan`]. Nothing else parses patches, so the two can't disagree about a
//! path.
//!
//! Invariants: a plan touches only paths in `Patch::paths`; ambiguous input is an error, never a
//! guess; parsing takes time and memory linear in the diff; nothing here does I/O ([`Tree`] does).
#![forbid(unsafe_code)]

mod apply;
mod begin_patch;
mod binary;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod hunk;
mod lines;
mod name;
mod parse;
mod plan;
mod repair;
mod wire;

use std::fmt::Write as _;

pub use self::{
    apply::{HunkFailure, SearchBudget, apply},
    binary::{Binary, BinaryHunk},
    hunk::{Hunk, Line, Place, Side},
    lines::Error,
    name::{Location, spells_git},
    parse::{Change, MAX_HEADER_BYTES, Patch, Section},
    plan::{
        Entry, File, FileEffect, Kind, MAX_FILE_BYTES, Operation, Plan, PlanError, PriorState,
        Problem, Reject, Tree, TreeNode, plan,
    },
    repair::Repair,
    wire::{MAX_WIRE_BYTES, WIRE_VERSION},
};

/// Longest path, and longest target of a symbolic link.
pub const MAX_PATH_BYTES: usize = 4_095;

/// Escapes control characters and undecodable bytes, for messages.
pub fn escaped(bytes: &[u8]) -> String {
    escaped_but(bytes, None)
}

/// Escapes control characters other than `plain`, and undecodable bytes.
fn escaped_but(bytes: &[u8], plain: Option<char>) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character.is_control() && Some(character) != plain {
                out.extend(character.escape_default());
            } else {
                out.push(character);
            }
        }
        for byte in chunk.invalid() {
            // Writing to a string can't fail.
            let _written = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

/// A quoted and truncated text, for messages.
fn excerpt(text: &[u8]) -> String {
    const LENGTH: usize = 80;
    if text.len() <= LENGTH {
        format!("'{}'", escaped(text))
    } else {
        format!("'{}…'", escaped(&text[..LENGTH]))
    }
}

#[cfg(test)]
mod tests;

//! Applies a diff to the workspace atomically.
//!
//! Three steps: parse the diff, compute all new contents in memory (both in `cynode-patch`, which
//! reads the files through [`disk`]), and only then write ([`commit`]).
//!
//! Invariants: a failing diff changes nothing and reports every failing place; no path leaves the
//! workspace or enters a `.git` directory, and no link is written through.

mod commit;
mod disk;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzz;

use cynode_api::{Base64Bytes, ErrorCode, PatchOperation, PatchReject, PatchResult, PatchedFile};
use cynode_patch::{FileEffect, Operation, Patch, PlanError, Reject};

use self::disk::WorkspaceTree;
use super::{
    confined::ConfinedRoot,
    error::{Failure, FailureContext, Outcome},
    path::{self, Files},
};

impl Files {
    pub(super) fn patch(&self, diff: &[u8], strip: u32, dry_run: bool) -> Outcome<PatchResult> {
        let patch = Patch::parse(diff, strip)
            .map_err(|error| Failure::invalid(format!("the diff is invalid: {error}")))?;
        self.apply(&patch, dry_run)
    }

    /// Applies a patch that the gate has parsed.
    pub(super) fn encoded_patch(&self, wire: &[u8], dry_run: bool) -> Outcome<PatchResult> {
        let patch = Patch::from_wire(wire)
            .map_err(|error| Failure::invalid(format!("the encoded patch is invalid: {error}")))?;
        self.apply(&patch, dry_run)
    }

    fn apply(&self, patch: &Patch<'_>, dry_run: bool) -> Outcome<PatchResult> {
        let root = ConfinedRoot::open(&self.root).doing("opening", path::bytes(&self.root))?;
        let plan =
            cynode_patch::plan(&WorkspaceTree { root: &root }, patch).map_err(
                |error| match error {
                    PlanError::TooLarge(message) => Failure::new(ErrorCode::TooLarge, message),
                    PlanError::Tree(failure) => failure,
                },
            )?;
        if !plan.rejects.is_empty() {
            let count = plan.rejects.len();
            let more = if plan.rejects_truncated {
                "at least "
            } else {
                ""
            };
            let places = if count == 1 { "place" } else { "places" };
            let rejects = plan.rejects.into_iter().map(reject).collect();
            return Err(Failure::rejected(
                format!("the diff does not apply in {more}{count} {places}; nothing was changed"),
                rejects,
            ));
        }
        if !dry_run {
            commit::commit(&root, &plan.entries)?;
        }
        Ok(PatchResult {
            files: plan.effects.into_iter().map(patched_file).collect(),
            ..PatchResult::default()
        })
    }
}

fn text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

fn reject(reject: Reject) -> PatchReject {
    PatchReject {
        path: text(&reject.path),
        hunk: reject.hunk,
        line: reject.line,
        reason: reject.reason,
        expected: reject.expected,
        found: reject.found,
    }
}

fn patched_file(effect: FileEffect) -> PatchedFile {
    let bytes = |path: &[u8]| {
        std::str::from_utf8(path)
            .is_err()
            .then(|| Base64Bytes(path.to_vec()))
    };
    PatchedFile {
        path: text(&effect.path),
        path_b64: bytes(&effect.path),
        operation: match effect.operation {
            Operation::Create => PatchOperation::Create,
            Operation::Modify => PatchOperation::Modify,
            Operation::Delete => PatchOperation::Delete,
            Operation::Rename => PatchOperation::Rename,
            Operation::Copy => PatchOperation::Copy,
        },
        sha256_before: effect.digest_before,
        sha256_after: effect.digest_after,
        from: effect.from.as_deref().map(text),
        from_b64: effect.from.as_deref().and_then(bytes),
    }
}

#[cfg(test)]
mod tests;

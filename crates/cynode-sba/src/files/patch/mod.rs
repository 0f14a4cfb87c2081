//! Applying a diff to the workspace: all of it, or nothing.
//!
//! Three steps: the diff is parsed, every new content is worked out in memory (both in `cynode-patch`, which reads the files
//! through [`disk`]), and only then is anything written ([`commit`]).
//!
//! What must stay true: a diff that fails anywhere changes nothing and names every place that failed; no path leaves the
//! workspace or enters a `.git` directory, and no link is ever written through.

mod commit;
mod disk;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzz;

use cynode_api::{Base64Bytes, ErrorCode, PatchOperation, PatchReject, PatchResult, PatchedFile};
use cynode_patch::{Operation, Patch, PlanError, Reject, Touched};

use self::disk::Disk;
use super::{
    confined::Confined,
    error::{Doing, Failure, Outcome},
    path::{self, Files},
};

impl Files {
    pub(super) fn patch(&self, diff: &[u8], strip: u32, dry_run: bool) -> Outcome<PatchResult> {
        let patch = Patch::parse(diff, strip)
            .map_err(|error| Failure::invalid(format!("the diff can't be read: {error}")))?;
        let root = Confined::open(&self.root).doing("opening", path::bytes(&self.root))?;
        let plan =
            cynode_patch::plan(&Disk { root: &root }, &patch).map_err(|error| match error {
                PlanError::TooLarge(message) => Failure::new(ErrorCode::TooLarge, message),
                PlanError::Tree(failure) => failure,
            })?;
        if !plan.rejects.is_empty() {
            let count = plan.rejects.len();
            let more = if plan.rejects_cut { "at least " } else { "" };
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
            files: plan.touched.into_iter().map(patched_file).collect(),
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
    }
}

fn patched_file(touched: Touched) -> PatchedFile {
    let bytes = |path: &[u8]| {
        std::str::from_utf8(path)
            .is_err()
            .then(|| Base64Bytes(path.to_vec()))
    };
    PatchedFile {
        path: text(&touched.path),
        path_b64: bytes(&touched.path),
        operation: match touched.operation {
            Operation::Create => PatchOperation::Create,
            Operation::Modify => PatchOperation::Modify,
            Operation::Delete => PatchOperation::Delete,
            Operation::Rename => PatchOperation::Rename,
            Operation::Copy => PatchOperation::Copy,
        },
        sha256_before: touched.digest_before,
        sha256_after: touched.digest_after,
        from: touched.from.as_deref().map(text),
        from_b64: touched.from.as_deref().and_then(bytes),
    }
}

#[cfg(test)]
mod tests;

//! Applying a diff to the workspace: all of it, or nothing.
//!
//! Three steps: the diff is read ([`parse`]), every new content is worked out in memory ([`plan`], with [`hunks`]), and only
//! then is anything written ([`commit`]).
//!
//! What must stay true: a diff that fails anywhere changes nothing and names every place that failed; no path leaves the
//! workspace or enters a `.git` directory, and no link is ever written or written through.

mod commit;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzz;
mod hunks;
mod parse;
mod plan;

use cynode_api::{PatchReject, PatchResult};

use self::plan::Plan;
use super::{
    confined::Confined,
    error::{Doing, Failure, Outcome},
    path::{self, Files},
};

/// Rejects are cut beyond this, so that the answer fits into a frame.
const MAX_REJECT_BYTES: usize = 256 * 1024;

impl Files {
    pub(super) fn patch(&self, mut diff: Vec<u8>, strip: u32, dry_run: bool) -> Outcome<PatchResult> {
        // Much that passes diffs on loses the last newline.
        if !diff.ends_with(b"\n") {
            diff.push(b'\n');
        }
        let sections = parse::parse(&diff, strip as usize).map_err(|error| Failure::invalid(format!("the diff can't be read: {error}")))?;
        let root = Confined::open(&self.root).doing("opening", path::bytes(&self.root))?;
        let mut plan = Plan::new(&root, &sections);
        for section in &sections {
            plan.add(section)?;
            if plan.rejects.is_full() {
                break;
            }
        }
        if !plan.rejects.list.is_empty() {
            let count = plan.rejects.list.len();
            let more = if plan.rejects.is_full() { "at least " } else { "" };
            let places = if count == 1 { "place" } else { "places" };
            return Err(Failure::rejected(format!("the diff does not apply in {more}{count} {places}; nothing was changed"), plan.rejects.list));
        }
        if !dry_run {
            commit::commit(&root, &plan.entries)?;
        }
        Ok(PatchResult { files: plan.files })
    }
}

/// Why parts of a diff can't be applied.
#[derive(Debug, Default)]
struct Rejects {
    list: Vec<PatchReject>,
    bytes: usize,
}

impl Rejects {
    fn push(&mut self, path: &[u8], hunk: Option<u32>, line: Option<u64>, reason: String) {
        let path = String::from_utf8_lossy(path).into_owned();
        self.bytes += path.len() + reason.len() + 100;
        if !self.is_full() {
            self.list.push(PatchReject { path, hunk, line, reason });
        }
    }

    fn is_full(&self) -> bool {
        self.bytes > MAX_REJECT_BYTES
    }
}

#[cfg(test)]
mod tests;

//! What must hold for any diff; run by the fuzz targets of the agent and by tests.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a panic is how a target tells what it found"
)]

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Before, Effort, File, Found, Hunk, Line, Location, Patch, Problem, Side, Tree, apply, plan,
};

/// A file laid out as hunks describe it gets longer than its diff by this at most.
const MAX_GAP: usize = 2_000;

/// Files in memory. A link is never followed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory(pub BTreeMap<Location, File>);

impl Memory {
    fn has_below(&self, location: &Location) -> bool {
        self.0.keys().any(|other| location.is_above(other))
    }

    /// Applies a diff; false when it is rejected. Panics when it touches a path that the diff does not name.
    pub fn patch(&mut self, diff: &[u8], strip: u32) -> bool {
        let Ok(patch) = Patch::parse(diff, strip) else {
            return false;
        };
        let named: BTreeSet<Location> = patch
            .paths()
            .into_iter()
            .filter_map(|path| Location::parse(path).ok())
            .collect();
        let Ok(plan) = plan(&*self, &patch) else {
            return false;
        };
        if !plan.rejects.is_empty() {
            return false;
        }
        let before = self.clone();
        for (location, entry) in plan.entries {
            assert!(
                named.contains(&location),
                "{location:?} was looked at and is not named"
            );
            if !entry.changed {
                continue;
            }
            if let Before::Directory(()) = entry.before {
                self.0.retain(|other, _| !location.is_above(other));
            }
            match entry.now {
                Some(file) => drop(self.0.insert(location, file)),
                None => drop(self.0.remove(&location)),
            }
        }
        for location in before
            .0
            .keys()
            .chain(self.0.keys())
            .filter(|location| before.0.get(location) != self.0.get(location))
        {
            assert!(
                named.contains(location),
                "{location:?} changed and is not named"
            );
        }
        for touched in &plan.touched {
            assert!(
                patch.paths().contains(touched.path.as_slice())
                    && touched
                        .from
                        .as_ref()
                        .is_none_or(|from| patch.paths().contains(from.as_slice()))
            );
        }
        let below = self
            .0
            .keys()
            .zip(self.0.keys().skip(1))
            .find(|(one, next)| one.is_above(next));
        assert!(below.is_none(), "{below:?} lie one below the other");
        true
    }
}

impl Tree for Memory {
    type Stamp = ();
    type Failure = std::convert::Infallible;

    fn locate(&self, path: &Location) -> Result<Location, Problem<Self::Failure>> {
        if self.0.keys().any(|file| file.is_above(path)) {
            return Err(Problem::Reject(
                "a part of the path is not a directory".to_owned(),
            ));
        }
        Ok(path.clone())
    }

    fn load(&self, location: &Location) -> Result<Found<()>, Problem<Self::Failure>> {
        Ok(match self.0.get(location) {
            Some(file) => Found::File((), file.clone()),
            None if self.has_below(location) => Found::Directory(()),
            None => Found::Nothing,
        })
    }

    fn files_below(
        &self,
        directory: &Location,
        _limit: usize,
    ) -> Result<Vec<Location>, Problem<Self::Failure>> {
        Ok(self
            .0
            .keys()
            .filter(|location| directory.is_above(location))
            .cloned()
            .collect())
    }

    fn digest(&self, bytes: &[u8]) -> String {
        format!("{bytes:?}")
    }
}

/// The diff of two contents leads from the one to the other, and turned around, back.
pub fn there_and_back(old: &[u8], new: &[u8], context: usize) {
    let diff = written(old, new, context, false);
    let back = written(old, new, context, true);
    if old == new {
        assert!(diff.is_none());
        return;
    }
    let (diff, back) = (
        diff.expect("contents that differ"),
        back.expect("contents that differ"),
    );
    assert!(
        applied(old, &diff).expect("it applies to its old side") == new,
        "a diff gives its new side"
    );
    assert!(
        applied(new, &back).expect("it applies to its new side") == old,
        "a diff that is turned around gives its old side"
    );
}

/// A diff applied to something else either fails or does what it says: as many lines go and come as it has.
pub fn anywhere(old: &[u8], new: &[u8], other: &[u8]) {
    let Some(diff) = written(old, new, 1, false) else {
        return;
    };
    let Ok(result) = applied(other, &diff) else {
        return;
    };
    let count = |content: &[u8]| content.split_inclusive(|byte| *byte == b'\n').count();
    assert_eq!(
        count(other) + count(new),
        count(result.as_slice()) + count(old),
        "lines that go and come"
    );
}

fn applied(content: &[u8], diff: &[u8]) -> Result<Vec<u8>, String> {
    let patch = Patch::parse(diff, 1).map_err(|error| error.to_string())?;
    assert_eq!(patch.sections().len(), 1, "one file, one section");
    apply(
        content,
        &patch.sections()[0].hunks,
        false,
        &mut Effort::default(),
    )
    .map_err(|misses| format!("{misses:?}"))
}

/// The diff of two contents as another library works it out; `None` when they are the same. `turned` swaps its sides.
fn written(old: &[u8], new: &[u8], context: usize, turned: bool) -> Option<Vec<u8>> {
    let patch = diffy::DiffOptions::new()
        .set_context_len(context)
        .create_patch_bytes(old, new);
    let mut diff = b"--- a/x\n+++ b/x\n".to_vec();
    for hunk in patch.hunks() {
        let (from, to) = if turned {
            (hunk.new_range(), hunk.old_range())
        } else {
            (hunk.old_range(), hunk.new_range())
        };
        diff.extend(format!("@@ -{from} +{to} @@\n").bytes());
        for line in hunk.lines() {
            let (mark, text) = match line {
                diffy::Line::Context(text) => (b' ', text),
                diffy::Line::Delete(text) => (if turned { b'+' } else { b'-' }, text),
                diffy::Line::Insert(text) => (if turned { b'-' } else { b'+' }, text),
            };
            diff.push(mark);
            diff.extend_from_slice(text);
            if !text.ends_with(b"\n") {
                diff.extend_from_slice(b"\n\\ No newline at end of file\n");
            }
        }
    }
    (!patch.hunks().is_empty()).then_some(diff)
}

/// Whatever can be read as a diff leads a file that is as its hunks describe it to the file that they describe.
pub fn parsed(diff: &[u8], strip: u32) {
    let Ok(patch) = Patch::parse(diff, strip) else {
        return;
    };
    for section in patch.sections() {
        for strip_cr in [false, true] {
            if let Some((old, new)) = laid_out(&section.hunks, strip_cr) {
                let result = apply(&old, &section.hunks, strip_cr, &mut Effort::default());
                assert!(
                    result.expect("hunks that stand where they say") == new,
                    "hunks do what they say"
                );
            }
        }
    }
}

/// The old and the new file that hunks speak of, with lines of our own where they say nothing; `None` when they contradict
/// themselves.
fn laid_out(hunks: &[Hunk<'_>], strip_cr: bool) -> Option<(Vec<u8>, Vec<u8>)> {
    let (mut old, mut new) = (Vec::new(), Vec::new());
    let mut line_number = 0;
    let mut closed = (true, true);
    for hunk in hunks {
        let lines: Vec<Line<'_>> = hunk.lines(strip_cr).collect();
        let start = if hunk.old_count == 0 {
            hunk.old_start
        } else {
            hunk.old_start.checked_sub(1)?
        };
        let gap = start
            .checked_sub(line_number)
            .filter(|gap| *gap <= MAX_GAP)?;
        for filler in 0..gap {
            // No line of a diff is likely to be this one, and each is there once.
            let filler = format!("filler {}\n", line_number + filler);
            old.extend_from_slice(filler.as_bytes());
            new.extend_from_slice(filler.as_bytes());
        }
        // Once a side has ended without a newline nothing may follow on it, also no hunk that would take away what follows.
        if closed != (true, true) {
            return None;
        }
        for line in &lines {
            for (is_on, side, closed) in [
                (line.side != Side::New, &mut old, &mut closed.0),
                (line.side != Side::Old, &mut new, &mut closed.1),
            ] {
                if !is_on {
                    continue;
                }
                if !*closed || (!line.newline && line.text.is_empty()) {
                    return None;
                }
                side.extend_from_slice(line.text);
                if line.newline {
                    side.push(b'\n');
                } else {
                    *closed = false;
                }
            }
        }
        line_number = start + hunk.old_count;
    }
    Some((old, new))
}

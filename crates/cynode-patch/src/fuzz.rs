//! Properties that hold for any diff; checked by the agent's fuzz targets and by tests.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a panic is how a fuzz target reports a failure"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use crate::{
    File, Hunk, Line, Location, Patch, Place, PriorState, Problem, SearchBudget, Section, Side,
    Tree, TreeNode, apply, plan,
};

/// The number of filler lines between two hunks of a reconstructed file.
const MAX_GAP: usize = 2_000;

/// A tree in memory. Links are never followed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory(pub BTreeMap<Location, File>);

impl Memory {
    fn has_below(&self, location: &Location) -> bool {
        self.0.keys().any(|other| location.is_above(other))
    }

    /// Like `apply`, for a diff.
    pub fn patch(&mut self, diff: &[u8], strip: u32) -> bool {
        Patch::parse(diff, strip).is_ok_and(|patch| self.apply(&patch))
    }

    /// Applies a patch; returns false if it is rejected. Panics if it touches a path that the patch
    /// does not name.
    pub fn apply(&mut self, patch: &Patch<'_>) -> bool {
        let named: BTreeSet<Location> = patch
            .paths()
            .into_iter()
            .filter_map(|path| Location::parse(path).ok())
            .collect();
        let Ok(plan) = plan(&*self, patch) else {
            return false;
        };
        if !plan.rejects.is_empty() {
            return false;
        }
        let before = self.clone();
        for (location, entry) in plan.entries {
            assert!(
                named.contains(&location),
                "{location:?} was loaded but is not named"
            );
            if !entry.changed {
                continue;
            }
            if let PriorState::Directory(()) = entry.before {
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
                "{location:?} changed but is not named"
            );
        }
        for effect in &plan.effects {
            assert!(
                patch.paths().contains(effect.path.as_slice())
                    && effect
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
        assert!(below.is_none(), "{below:?}: one is below the other");
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

    fn load(&self, location: &Location) -> Result<TreeNode<()>, Problem<Self::Failure>> {
        Ok(match self.0.get(location) {
            Some(file) => TreeNode::File((), file.clone()),
            None if self.has_below(location) => TreeNode::Directory(()),
            None => TreeNode::Nothing,
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
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        format!("{:x}", hasher.finish())
    }
}

/// The forms of a patch beside strict diffs.
#[derive(Clone, Copy, Debug)]
pub enum PatchForm {
    BeginPatch,
    Lenient,
    Wire,
    /// What callers may write, as the gate tells the forms apart.
    Any,
}

/// The patch of a text in a form; `None` if it is refused.
pub fn parse_form(form: PatchForm, text: &[u8], strip: u32) -> Option<Patch<'_>> {
    match form {
        PatchForm::BeginPatch => Patch::parse_begin_patch(text).ok(),
        PatchForm::Lenient => Patch::parse_lenient(text, strip)
            .ok()
            .map(|(patch, _)| patch),
        PatchForm::Wire => Patch::from_wire(text).ok(),
        PatchForm::Any => Patch::parse_any(text, strip).ok().map(|(patch, _)| patch),
    }
}

/// An agent does nothing with a caller's text but what the gate has checked of it: every path that
/// it touches is one of the gate's, and every line that it brings in was scanned. That holds for
/// agents that read encoded patches, and for older ones, which read diffs only.
pub fn gate_and_agent(text: &[u8], strip: u32, tree: &Memory) {
    let Ok((patch, _)) = Patch::parse_any(text, strip) else {
        return;
    };
    let Ok(wire) = patch.to_wire() else {
        return;
    };
    let mut scanned = Vec::new();
    for section in patch.sections() {
        section.each_added(|bytes| scanned.extend_from_slice(bytes));
        // A content may end without a newline.
        scanned.push(b'\n');
    }
    let known: BTreeSet<&[u8]> = tree
        .0
        .values()
        .map(|file| file.bytes.as_slice())
        .chain([scanned.as_slice()])
        .flat_map(text_lines)
        .collect();
    let diff = Patch::parse(&wire, 0);
    assert_eq!(
        diff.is_err(),
        patch.needs_extensions(),
        "an agent that reads diffs only was taken for another"
    );
    for read in [Patch::from_wire(&wire), diff].into_iter().flatten() {
        assert_eq!(read.paths(), patch.paths(), "an agent reads other paths");
        let mut after = tree.clone();
        if !after.apply(&read) || patch.sections().iter().any(Section::is_partial) {
            continue;
        }
        for line in after.0.values().flat_map(|file| text_lines(&file.bytes)) {
            assert!(known.contains(line), "{line:?} was not scanned");
        }
    }
}

/// The lines of a content. Carriage returns may be lost in transit.
fn text_lines(content: &[u8]) -> impl Iterator<Item = &[u8]> {
    content
        .split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

/// Whatever form a text has, its patch stays within its paths and its declared sizes, survives
/// encoding, and is what strict parsing reads unless something was repaired.
pub fn forms(text: &[u8], strip: u32, tree: &Memory) {
    gate_and_agent(text, strip, tree);
    for form in [PatchForm::BeginPatch, PatchForm::Lenient, PatchForm::Wire] {
        let Some(patch) = parse_form(form, text, strip) else {
            continue;
        };
        tree.clone().apply(&patch);
        wire_round_trip(&patch, tree);
        let mut added = 0;
        for section in patch.sections() {
            section.each_added(|bytes| added += bytes.len());
        }
        // A delta's insertions are a part of it, and so are the copies that separate them.
        assert!(
            added <= text.len() + patch.inflated_bytes(),
            "more was added than the patch has"
        );
    }
    if let Ok((patch, repairs)) = Patch::parse_lenient(text, strip)
        && repairs.is_empty()
    {
        let strict = Patch::parse(text, strip).expect("nothing was repaired");
        assert_eq!(patch, strict, "a diff without repairs was read differently");
    }
}

/// A patch that was encoded and decoded is the same and has the same effect on a tree. An agent that
/// knows only diffs reads the same patch or refuses it.
pub fn wire_round_trip(patch: &Patch<'_>, tree: &Memory) {
    // Some names can't be encoded.
    let Ok(wire) = patch.to_wire() else {
        return;
    };
    let decoded = Patch::from_wire(&wire).expect("it was encoded");
    assert_eq!(decoded, *patch, "another patch was decoded");
    assert_eq!(decoded.paths(), patch.paths());
    if let Ok(diff) = Patch::parse(&wire, 0) {
        assert_eq!(diff, *patch, "the encoded patch is another diff");
    }
    let effect = |patch: &Patch<'_>| {
        plan(tree, patch)
            .map(|plan| (plan.effects, plan.rejects))
            .map_err(|_| ())
    };
    assert_eq!(effect(&decoded), effect(patch));
    let (mut one, mut other) = (tree.clone(), tree.clone());
    assert_eq!(one.apply(patch), other.apply(&decoded));
    assert_eq!(one, other, "the decoded patch has another effect");
}

/// The diff of two contents turns the first into the second, and its reverse undoes that.
pub fn there_and_back(old: &[u8], new: &[u8], context: usize) {
    let diff = unified_diff(old, new, context, false);
    let back = unified_diff(old, new, context, true);
    if old == new {
        assert!(diff.is_none());
        return;
    }
    let (diff, back) = (
        diff.expect("contents that differ"),
        back.expect("contents that differ"),
    );
    assert!(
        apply_diff(old, &diff).expect("it applies to its old side") == new,
        "a diff did not produce its new side"
    );
    assert!(
        apply_diff(new, &back).expect("it applies to its new side") == old,
        "a reversed diff did not produce its old side"
    );
}

/// A diff applied to another content either fails or removes and adds exactly the lines that it
/// has.
pub fn anywhere(old: &[u8], new: &[u8], other: &[u8]) {
    let Some(diff) = unified_diff(old, new, 1, false) else {
        return;
    };
    let Ok(result) = apply_diff(other, &diff) else {
        return;
    };
    let count = |content: &[u8]| content.split_inclusive(|byte| *byte == b'\n').count();
    assert_eq!(
        count(other) + count(new),
        count(result.as_slice()) + count(old),
        "other lines than those of the diff were removed or added"
    );
}

fn apply_diff(content: &[u8], diff: &[u8]) -> Result<Vec<u8>, String> {
    let patch = Patch::parse(diff, 1).map_err(|error| error.to_string())?;
    assert_eq!(
        patch.sections().len(),
        1,
        "a diff of one file has several sections"
    );
    apply(
        content,
        &patch.sections()[0].hunks,
        false,
        &mut SearchBudget::default(),
    )
    .map_err(|misses| format!("{misses:?}"))
}

/// The diff of two contents as another library computes it; `None` if they are equal. `reversed`
/// swaps its sides.
fn unified_diff(old: &[u8], new: &[u8], context: usize, reversed: bool) -> Option<Vec<u8>> {
    let patch = diffy::DiffOptions::new()
        .set_context_len(context)
        .create_patch_bytes(old, new);
    let mut diff = b"--- a/x\n+++ b/x\n".to_vec();
    for hunk in patch.hunks() {
        let (from, to) = if reversed {
            (hunk.new_range(), hunk.old_range())
        } else {
            (hunk.old_range(), hunk.new_range())
        };
        diff.extend(format!("@@ -{from} +{to} @@\n").bytes());
        for line in hunk.lines() {
            let (mark, text) = match line {
                diffy::Line::Context(text) => (b' ', text),
                diffy::Line::Delete(text) => (if reversed { b'+' } else { b'-' }, text),
                diffy::Line::Insert(text) => (if reversed { b'-' } else { b'+' }, text),
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

/// A parsed diff turns the old file that its hunks describe into the new one.
pub fn parsed(diff: &[u8], strip: u32) {
    let Ok(patch) = Patch::parse(diff, strip) else {
        return;
    };
    for section in patch.sections() {
        for strip_cr in [false, true] {
            if let Some((old, new)) = reconstruct(&section.hunks, strip_cr) {
                let result = apply(&old, &section.hunks, strip_cr, &mut SearchBudget::default());
                assert!(
                    result.expect("hunks at their line numbers") == new,
                    "hunks did not produce the file that they describe"
                );
            }
        }
    }
}

/// The old and new file that hunks describe, with filler lines between them; `None` if the hunks
/// contradict each other.
fn reconstruct(hunks: &[Hunk<'_>], strip_cr: bool) -> Option<(Vec<u8>, Vec<u8>)> {
    let (mut old, mut new) = (Vec::new(), Vec::new());
    let mut line_number = 0;
    let mut closed = (true, true);
    for hunk in hunks {
        let lines: Vec<Line<'_>> = hunk.lines(strip_cr).collect();
        let Place::Line(old_start) = hunk.place else {
            return None;
        };
        let start = if hunk.old_count == 0 {
            old_start
        } else {
            old_start.checked_sub(1)?
        };
        let gap = start
            .checked_sub(line_number)
            .filter(|gap| *gap <= MAX_GAP)?;
        for filler in 0..gap {
            // Unique, and unlikely to equal a line of the diff.
            let filler = format!("filler {}\n", line_number + filler);
            old.extend_from_slice(filler.as_bytes());
            new.extend_from_slice(filler.as_bytes());
        }
        // After a line without a newline nothing may follow on that side, not even a hunk that
        // would remove what follows.
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

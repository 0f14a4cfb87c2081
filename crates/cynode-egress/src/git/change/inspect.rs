//! Applies the rules of a repository to a change.
//!
//! Invariants: verdicts come in a fixed order, of rules first, of paths within a rule; a refusal is
//! never left out of the list, however long it becomes (it is bounded by
//! [`super::rules::MAX_CHANGED_FILES`]); content that was not scanned is refused.

use cynode_api::{PromotionVerdict, promotion_limits::MAX_LISTED};
use cynode_patch::escaped;
use cynode_policy::{Scanner, ShapeAction};

use super::{
    branch::BranchNames,
    difference::{ChangedEntry, FileVersion, TreeChange},
    names,
    output::{MODE_EXECUTABLE, MODE_GITLINK, MODE_REGULAR, MODE_SYMLINK},
    rules::RuleSet,
};

/// What a change is inspected with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inspector<'a> {
    pub(crate) rules: &'a RuleSet,
    /// With shapes. The system's own tokens and held secrets are refused whatever a rule says.
    pub(crate) scanner: &'a Scanner,
    pub(crate) branches: BranchNames<'a>,
}

/// The verdicts on a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inspection {
    /// All refusals; permissions only as far as they fit in [`MAX_LISTED`].
    pub(crate) verdicts: Vec<PromotionVerdict>,
    pub(crate) verdicts_total: u64,
    pub(crate) allowed: bool,
}

/// A verdict on one path, or none.
type PathVerdict = Option<(bool, String)>;

impl Inspector<'_> {
    pub(crate) async fn inspect(&self, change: &TreeChange) -> Inspection {
        cynode_service::compute::run(change.content_bytes(), || self.verdicts(change)).await
    }

    fn verdicts(&self, change: &TreeChange) -> Inspection {
        let mut found = vec![match self.branches.refuse(self.rules) {
            Some(reason) => verdict("branch", false, None, reason),
            None => verdict("branch", true, None, "the branch is the task's".to_owned()),
        }];
        let by_path: [(&str, &dyn Fn(&ChangedEntry) -> PathVerdict); 4] = [
            ("paths", &|entry| self.path(entry)),
            ("sensitive", &|entry| self.sensitive(entry)),
            ("symlinks", &|entry| self.symlink(entry, change)),
            ("modes", &|entry| self.mode(entry)),
        ];
        for (rule, judge) in by_path {
            apply(&mut found, rule, change, judge);
        }
        self.sizes(&mut found, change);
        apply(&mut found, "secrets", change, &|entry| self.secrets(entry));
        let verdicts_total = found.len() as u64;
        let allowed = found.iter().all(|verdict| verdict.allowed);
        let refused = found.iter().filter(|verdict| !verdict.allowed).count();
        let mut room = MAX_LISTED.saturating_sub(refused);
        found.retain(|verdict| {
            let is_listed = !verdict.allowed || room > 0;
            if verdict.allowed {
                room = room.saturating_sub(1);
            }
            is_listed
        });
        Inspection {
            verdicts: found,
            verdicts_total,
            allowed,
        }
    }

    fn path(&self, entry: &ChangedEntry) -> PathVerdict {
        if let Err(reason) = names::check(&entry.path) {
            return Some((false, reason));
        }
        if let Some(other) = &entry.collides_with {
            let reason = format!(
                "some file systems take the path for '{}', which exists",
                escaped(other)
            );
            return Some((false, reason));
        }
        self.rules
            .refuse_path(&entry.path)
            .map(|reason| (false, reason.to_owned()))
    }

    fn sensitive(&self, entry: &ChangedEntry) -> PathVerdict {
        if !self.rules.is_sensitive(&entry.path) {
            return None;
        }
        Some(if self.rules.allows_sensitive(&entry.path) {
            (
                true,
                "the file is sensitive; allow_sensitive names it".to_owned(),
            )
        } else {
            let reason = "the file decides what runs in CI, in clones or at the forge; \
                          allow_sensitive does not name it";
            (false, reason.to_owned())
        })
    }

    fn symlink(&self, entry: &ChangedEntry, change: &TreeChange) -> PathVerdict {
        entry.new.filter(|new| new.mode == MODE_SYMLINK)?;
        if !self.rules.allow_symlinks {
            return Some((false, "the rules do not allow symbolic links".to_owned()));
        }
        let Some(target) = &entry.new_content else {
            return Some((false, "the target is too long".to_owned()));
        };
        let is_link = |path: &[u8]| change.links.contains(path);
        match names::check_link(&entry.path, target, is_link) {
            Err(reason) => Some((false, format!("the symbolic link is refused: {reason}"))),
            Ok(()) => Some((true, "the symbolic link stays in the repository".to_owned())),
        }
    }

    fn mode(&self, entry: &ChangedEntry) -> PathVerdict {
        let mode = |version: Option<FileVersion>| version.map(|version| version.mode);
        if [mode(entry.old), mode(entry.new)].contains(&Some(MODE_GITLINK)) {
            return Some((false, "submodules are not promoted".to_owned()));
        }
        match mode(entry.new) {
            None | Some(MODE_REGULAR | MODE_SYMLINK) => None,
            Some(MODE_EXECUTABLE) if mode(entry.old) == Some(MODE_EXECUTABLE) => None,
            Some(MODE_EXECUTABLE) if self.rules.allow_executables => {
                Some((true, "the file becomes executable".to_owned()))
            }
            Some(MODE_EXECUTABLE) => {
                Some((false, "the rules do not allow executable files".to_owned()))
            }
            Some(mode) => Some((false, format!("the mode {mode:06o} is not promoted"))),
        }
    }

    fn sizes(&self, found: &mut Vec<PromotionVerdict>, change: &TreeChange) {
        let rule = "size";
        let before = found.len();
        let (files, max_files) = (change.entries.len() as u64, self.rules.max_files);
        if files > max_files {
            let reason = format!("{files} files are changed, more than {max_files}");
            found.push(verdict(rule, false, None, reason));
        }
        let size = |entry: &ChangedEntry| entry.new.map_or(0, |new| new.size);
        let total = change.entries.iter().map(size).fold(0, u64::saturating_add);
        let max_change_bytes = self.rules.max_change_bytes;
        if total > max_change_bytes {
            let reason =
                format!("the changed files have {total} bytes, more than {max_change_bytes}");
            found.push(verdict(rule, false, None, reason));
        }
        let max_file_bytes = self.rules.max_file_bytes;
        for entry in &change.entries {
            let size = size(entry);
            if size > max_file_bytes {
                let reason = format!("the file has {size} bytes, more than {max_file_bytes}");
                found.push(verdict(rule, false, Some(entry), reason));
            }
        }
        if found.len() == before {
            let reason = format!("{files} files with {total} bytes");
            found.push(verdict(rule, true, None, reason));
        }
    }

    fn secrets(&self, entry: &ChangedEntry) -> PathVerdict {
        let new = entry.new.filter(|new| new.mode != MODE_GITLINK)?;
        let Some(content) = &entry.new_content else {
            return Some((
                false,
                format!("the content of {} bytes was not scanned", new.size),
            ));
        };
        let path = String::from_utf8_lossy(&entry.path);
        let mut system = self.scanner.system_only().watch();
        let pieces = [path.as_bytes(), b"\n", &entry.lines.added];
        if let Some(hit) = pieces.into_iter().find_map(|piece| system.feed(piece)) {
            return Some((false, format!("an added line contains {}", hit.what)));
        }
        // An added line alone, or completing a line that was there.
        let mut shapes = self.shapes(&path, &entry.lines.added);
        let known = entry
            .old_content
            .as_ref()
            .map_or_else(Vec::new, |old| self.shapes(&path, old));
        let whole = self.shapes(&path, content);
        shapes.extend(whole.into_iter().filter(|shape| !known.contains(shape)));
        if let Some(hit) = self.scanner.find(path.as_bytes()) {
            shapes.push(hit.what);
        }
        let shape = shapes.first()?;
        Some(if self.rules.allows_flagged(&entry.path) {
            let reason = format!("an added line looks like {shape}; allow_flagged names the file");
            (true, reason)
        } else {
            let reason =
                format!("an added line looks like {shape}; allow_flagged does not name the file");
            (false, reason)
        })
    }

    fn shapes(&self, path: &str, content: &[u8]) -> Vec<&'static str> {
        let mut scan = self.scanner.content(path, ShapeAction::Flag);
        scan.feed(content);
        scan.finish().unwrap_or_else(|shape| vec![shape])
    }
}

fn verdict(
    rule: &str,
    allowed: bool,
    entry: Option<&ChangedEntry>,
    reason: String,
) -> PromotionVerdict {
    PromotionVerdict {
        rule: rule.to_owned(),
        allowed,
        path: entry.map(|entry| escaped(&entry.path)),
        reason,
    }
}

/// Applies a rule to each path. A rule without a verdict on any path gets one on the whole change.
fn apply(
    found: &mut Vec<PromotionVerdict>,
    rule: &str,
    change: &TreeChange,
    judge: &dyn Fn(&ChangedEntry) -> PathVerdict,
) {
    let before = found.len();
    for entry in &change.entries {
        if let Some((allowed, reason)) = judge(entry) {
            found.push(verdict(rule, allowed, Some(entry), reason));
        }
    }
    if found.len() == before {
        let reason = "no path is concerned".to_owned();
        found.push(verdict(rule, true, None, reason));
    }
}

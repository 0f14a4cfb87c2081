//! Computes the effect of a diff on a tree, without changing the tree.
//!
//! Sections apply in order to an in-memory view of the files, loaded from the tree on demand.
//! Renames and copies read the original files, as in git: other sections of the same diff may
//! change their sources.
//!
//! Invariants: links that the diff creates, changes or deletes are never followed; a link's content
//! is its target.

use std::collections::BTreeMap;

use crate::{
    MAX_PATH_BYTES,
    apply::{SearchBudget, apply},
    binary::Binary,
    hunk::Place,
    name::{Location, Locations},
    parse::{Change, Patch, Section},
};

/// Largest file that a diff may touch.
pub const MAX_FILE_BYTES: u64 = 32 * 1024 * 1024;
/// Total size of the files that a diff touches.
pub(crate) const MAX_TOTAL_BYTES: usize = 128 * 1024 * 1024;
/// Total size of the inputs of all sections.
const MAX_WORKED_BYTES: u64 = 1024 * 1024 * 1024;
/// Rejects are truncated at this size, so that a response stays small.
const MAX_REJECT_BYTES: usize = 256 * 1024;
/// Rejects beyond this size come without the lines that they expected and found.
const MAX_QUOTE_BYTES: usize = 128 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file with its permission bits.
    Regular(u32),
    Symlink,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub kind: Kind,
    /// The content, or the target of a link.
    pub bytes: Vec<u8>,
}

/// The content of a tree at a location. `S` identifies a version of a file.
#[derive(Clone, Debug)]
pub enum TreeNode<S> {
    Nothing,
    Directory(S),
    File(S, File),
}

/// The reason why a tree can't answer a query.
#[derive(Debug)]
pub enum Problem<F> {
    /// The diff can't be applied there.
    Reject(String),
    /// The tree can't be read.
    Failure(F),
}

/// The files that a diff is applied to.
pub trait Tree {
    type Stamp: Clone;
    type Failure;

    /// Resolves links above the last component of a path. They may only lead to other locations in
    /// the tree.
    fn locate(&self, path: &Location) -> Result<Location, Problem<Self::Failure>>;

    /// Loads the file at a location. Follows no links, not even above the last component.
    fn load(&self, location: &Location) -> Result<TreeNode<Self::Stamp>, Problem<Self::Failure>>;

    /// All non-directories below a directory, at most `limit` plus one.
    fn files_below(
        &self,
        directory: &Location,
        limit: usize,
    ) -> Result<Vec<Location>, Problem<Self::Failure>>;

    /// A hash of a content, for reports and audit records.
    fn digest(&self, bytes: &[u8]) -> String;
}

/// The content of the tree at a location before the diff.
#[derive(Clone, Debug)]
pub enum PriorState<S> {
    Nothing,
    File(S),
    /// A directory that the diff empties and replaces.
    Directory(S),
}

/// A location in the view.
#[derive(Debug)]
pub struct Entry<S> {
    pub before: PriorState<S>,
    pub now: Option<File>,
    /// The entry differs from the tree.
    pub changed: bool,
    /// The diff wrote content to it.
    written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Create,
    Modify,
    Delete,
    Rename,
    Copy,
}

/// The effect of one section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEffect {
    pub path: Vec<u8>,
    pub operation: Operation,
    pub digest_before: Option<String>,
    pub digest_after: Option<String>,
    pub from: Option<Vec<u8>>,
}

/// The reason why a part of a diff can't be applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    pub path: Vec<u8>,
    /// From 1; absent if the whole file is rejected.
    pub hunk: Option<u32>,
    /// Line of the old file, from 1.
    pub line: Option<u64>,
    pub reason: String,
    /// The first lines that the hunk expects.
    pub expected: Vec<String>,
    /// The lines of the file where they should be.
    pub found: Vec<String>,
}

impl Reject {
    /// Rejects a whole file.
    pub fn of_file(path: Vec<u8>, reason: String) -> Self {
        Self {
            path,
            hunk: None,
            line: None,
            reason,
            expected: Vec::new(),
            found: Vec::new(),
        }
    }
}

/// The effect of a diff on a tree.
#[derive(Debug)]
pub struct Plan<S> {
    pub entries: BTreeMap<Location, Entry<S>>,
    pub effects: Vec<FileEffect>,
    /// Empty if the diff applies.
    pub rejects: Vec<Reject>,
    /// The list of rejects is truncated.
    pub rejects_truncated: bool,
}

#[derive(Debug)]
pub enum PlanError<F> {
    TooLarge(String),
    Tree(F),
}

/// Computes the effect of a diff on a tree. A diff applies as a whole or not at all.
pub fn plan<T: Tree>(tree: &T, patch: &Patch<'_>) -> Result<Plan<T::Stamp>, PlanError<T::Failure>> {
    let mut planner = Planner::new(tree, patch.sections());
    for section in patch.sections() {
        let step = planner.apply(section);
        planner.collect_reject(step)?;
        if planner.rejects_truncated() {
            break;
        }
    }
    if planner.rejects.is_empty() {
        planner.check_placement()?;
    }
    let rejects_truncated = planner.rejects_truncated();
    Ok(Plan {
        entries: planner.entries,
        effects: planner.effects,
        rejects: planner.rejects,
        rejects_truncated,
    })
}

enum StepError<F> {
    /// Path and reason.
    Reject(Vec<u8>, String),
    TooLarge(String),
    Tree(F),
}

type Step<T, F> = Result<T, StepError<F>>;

fn reject<T, F>(path: &[u8], reason: impl Into<String>) -> Step<T, F> {
    Err(StepError::Reject(path.to_vec(), reason.into()))
}

fn tree_result<T, F>(result: Result<T, Problem<F>>, path: &[u8]) -> Step<T, F> {
    result.map_err(|problem| match problem {
        Problem::Reject(reason) => StepError::Reject(path.to_vec(), reason),
        Problem::Failure(failure) => StepError::Tree(failure),
    })
}

struct Planner<'a, T: Tree> {
    tree: &'a T,
    entries: BTreeMap<Location, Entry<T::Stamp>>,
    effects: Vec<FileEffect>,
    rejects: Vec<Reject>,
    reject_bytes: usize,
    quote_bytes: usize,
    /// Sources of renames: other sections may reuse their names.
    renamed: Locations,
    /// Sources of renames, and deleted files.
    leaving: Locations,
    /// Links that the diff creates, and links that it changes.
    new_links: Locations,
    changed_links: Locations,
    bytes: usize,
    worked: u64,
    budget: SearchBudget,
}

/// The type of a file according to a section's modes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileType {
    Regular,
    Symlink,
}

fn type_of(mode: u32) -> Result<FileType, String> {
    match mode & 0o170_000 {
        0o100_000 => Ok(FileType::Regular),
        0o120_000 => Ok(FileType::Symlink),
        0o160_000 => Err("patches can't change submodules (mode 160000)".to_owned()),
        _ => Err(format!(
            "the mode {mode:o} is not that of a regular file or a symbolic link"
        )),
    }
}

fn is_link(mode: Option<u32>) -> bool {
    mode.is_some_and(|mode| type_of(mode) == Ok(FileType::Symlink))
}

impl<'a, T: Tree> Planner<'a, T> {
    fn new(tree: &'a T, sections: &[Section<'_>]) -> Self {
        // Names that are not locations are rejected with their section.
        let old = |section: &Section<'_>| {
            section
                .old
                .as_deref()
                .and_then(|name| Location::parse(name).ok())
        };
        let new = |section: &Section<'_>| {
            section
                .new
                .as_deref()
                .and_then(|name| Location::parse(name).ok())
        };
        let sections_with = |changes: &[Change]| {
            sections
                .iter()
                .filter(|section| changes.contains(&section.change))
                .collect::<Vec<_>>()
        };
        Self {
            tree,
            entries: BTreeMap::new(),
            effects: Vec::new(),
            rejects: Vec::new(),
            reject_bytes: 0,
            quote_bytes: 0,
            renamed: sections_with(&[Change::Rename])
                .into_iter()
                .filter_map(old)
                .collect(),
            leaving: sections_with(&[Change::Rename, Change::Delete])
                .into_iter()
                .filter_map(old)
                .collect(),
            new_links: sections_with(&[Change::Create])
                .into_iter()
                .filter(|section| is_link(section.new_mode))
                .filter_map(new)
                .collect(),
            changed_links: sections_with(&[Change::Modify])
                .into_iter()
                .filter(|section| is_link(section.old_mode))
                .filter_map(new)
                .collect(),
            bytes: 0,
            worked: 0,
            budget: SearchBudget::default(),
        }
    }

    /// Collects a reject, so that all of them are reported; returns other failures.
    fn collect_reject(&mut self, step: Step<(), T::Failure>) -> Result<(), PlanError<T::Failure>> {
        match step {
            Ok(()) => Ok(()),
            Err(StepError::Reject(path, reason)) => {
                self.reject(Reject::of_file(path, reason));
                Ok(())
            }
            Err(StepError::TooLarge(message)) => Err(PlanError::TooLarge(message)),
            Err(StepError::Tree(failure)) => Err(PlanError::Tree(failure)),
        }
    }

    fn reject(&mut self, mut reject: Reject) {
        self.reject_bytes += reject.path.len() + reject.reason.len() + 100;
        let quoted = reject.expected.iter().chain(&reject.found);
        self.quote_bytes += quoted.map(|line| line.len() + 4).sum::<usize>();
        if self.quote_bytes > MAX_QUOTE_BYTES {
            reject.expected.clear();
            reject.found.clear();
        }
        if !self.rejects_truncated() {
            self.rejects.push(reject);
        }
    }

    fn rejects_truncated(&self) -> bool {
        self.reject_bytes > MAX_REJECT_BYTES
    }

    fn apply(&mut self, section: &Section<'_>) -> Step<(), T::Failure> {
        let named = section
            .new
            .as_deref()
            .or(section.old.as_deref())
            .unwrap_or_default();
        let mut types = [None, None];
        for (slot, mode) in types.iter_mut().zip([section.old_mode, section.new_mode]) {
            *slot = match mode.map(type_of).transpose() {
                Ok(found) => found,
                Err(reason) => return reject(named, reason),
            };
        }
        if let [Some(old), Some(new)] = types
            && old != new
        {
            return reject(
                named,
                "a change between a file and a symbolic link must be written as a deletion and a \
                 creation",
            );
        }
        let wanted = types[0].or(types[1]);
        if section.binary == Some(Binary::Omitted) {
            return reject(
                named,
                "the diff leaves the binary content out; make it with 'git diff --binary', or \
                 write the file instead",
            );
        }
        match section.change {
            Change::Create => self.create(section, named, wanted.unwrap_or(FileType::Regular)),
            Change::Modify => self.modify(section, wanted),
            Change::Delete => self.delete(section, named, wanted),
            Change::Rename | Change::Copy => self.rename_or_copy(section, wanted),
        }
    }

    fn create(
        &mut self,
        section: &Section<'_>,
        name: &[u8],
        wanted: FileType,
    ) -> Step<(), T::Failure> {
        let target = self.target(name)?;
        if self.is_taken(&target, name) {
            return reject(name, "the file already exists");
        }
        let Some(bytes) = self.content_after(name, None, section)? else {
            return Ok(());
        };
        let after = self.tree.digest(&bytes);
        let executable = section.new_mode.is_some_and(|mode| mode & 0o111 != 0);
        let kind = match wanted {
            FileType::Symlink => Kind::Symlink,
            FileType::Regular => Kind::Regular(if executable { 0o755 } else { 0o644 }),
        };
        self.set(name, &target, Some(File { kind, bytes }))?;
        self.touch(name, Operation::Create, None, Some(after), None);
        Ok(())
    }

    fn modify(&mut self, section: &Section<'_>, wanted: Option<FileType>) -> Step<(), T::Failure> {
        let mut candidates: Vec<&[u8]> = section
            .new
            .iter()
            .chain(&section.old)
            .map(Vec::as_slice)
            .collect();
        candidates.dedup();
        let mut present = None;
        for candidate in &candidates {
            // The result replaces the file where it is.
            self.check_above(candidate, &parse(candidate)?)?;
            let location = self.source(candidate)?;
            if let Some(file) = self.now(&location) {
                present = Some((*candidate, location, file.clone()));
                break;
            }
        }
        let name = candidates.first().copied().unwrap_or_default();
        let Some((name, location, old)) = present else {
            // Many tools write a creation without naming /dev/null.
            if matches!(section.hunks.as_slice(), [hunk] if hunk.place == Place::Line(0) && hunk.old_count == 0)
            {
                return self.create(section, name, wanted.unwrap_or(FileType::Regular));
            }
            return reject(name, "no such file");
        };
        check_type(name, &old, Some(wanted.unwrap_or(FileType::Regular)))?;
        let Some(bytes) = self.content_after(name, Some(&old.bytes), section)? else {
            return Ok(());
        };
        let (before, after) = (self.tree.digest(&old.bytes), self.tree.digest(&bytes));
        self.set(
            name,
            &location,
            Some(File {
                kind: new_kind(old.kind, section.new_mode),
                bytes,
            }),
        )?;
        self.touch(name, Operation::Modify, Some(before), Some(after), None);
        Ok(())
    }

    fn delete(
        &mut self,
        section: &Section<'_>,
        name: &[u8],
        wanted: Option<FileType>,
    ) -> Step<(), T::Failure> {
        let location = self.source(name)?;
        let Some(old) = self.now(&location).cloned() else {
            return reject(name, "no such file");
        };
        if section.any_content {
            self.set(name, &location, None)?;
            let before = self.tree.digest(&old.bytes);
            self.touch(name, Operation::Delete, Some(before), None, None);
            return Ok(());
        }
        check_type(name, &old, Some(wanted.unwrap_or(FileType::Regular)))?;
        let Some(left) = self.content_after(name, Some(&old.bytes), section)? else {
            return Ok(());
        };
        if !left.is_empty() {
            return reject(name, "the file has content that the diff does not delete");
        }
        self.set(name, &location, None)?;
        self.touch(
            name,
            Operation::Delete,
            Some(self.tree.digest(&old.bytes)),
            None,
            None,
        );
        Ok(())
    }

    /// A rename or a copy.
    fn rename_or_copy(
        &mut self,
        section: &Section<'_>,
        wanted: Option<FileType>,
    ) -> Step<(), T::Failure> {
        let (from, to) = (
            section.old.as_deref().unwrap_or_default(),
            section.new.as_deref().unwrap_or_default(),
        );
        let (source, target) = (self.source(from)?, self.target(to)?);
        let Some(old) = self.in_tree(&source, from)? else {
            return reject(from, "no such file");
        };
        // A pure rename has no mode, so any type is fine.
        let wanted = if section.hunks.is_empty() && section.binary.is_none() {
            wanted
        } else {
            Some(wanted.unwrap_or(FileType::Regular))
        };
        check_type(from, &old, wanted)?;
        if source != target && self.is_taken(&target, to) {
            return reject(to, "the file already exists");
        }
        let Some(bytes) = self.content_after(to, Some(&old.bytes), section)? else {
            return Ok(());
        };
        let (before, after) = (self.tree.digest(&old.bytes), self.tree.digest(&bytes));
        let is_rename = section.change == Change::Rename;
        if is_rename
            && source != target
            && self
                .entries
                .get(&source)
                .is_some_and(|entry| !entry.written)
        {
            self.set(from, &source, None)?;
        }
        self.set(
            to,
            &target,
            Some(File {
                kind: new_kind(old.kind, section.new_mode),
                bytes,
            }),
        )?;
        self.touch(
            to,
            if is_rename {
                Operation::Rename
            } else {
                Operation::Copy
            },
            Some(before),
            Some(after),
            Some(from),
        );
        Ok(())
    }

    /// Whether the location holds a file that no section of the diff removes.
    fn is_taken(&self, target: &Location, name: &[u8]) -> bool {
        let is_renamed = || Location::parse(name).is_ok_and(|name| self.renamed.contains(&name));
        self.entries
            .get(target)
            .is_some_and(|entry| entry.now.is_some() && (entry.written || !is_renamed()))
    }

    /// The content after a section; `None` if some hunks were rejected.
    fn content_after(
        &mut self,
        name: &[u8],
        old: Option<&[u8]>,
        section: &Section<'_>,
    ) -> Step<Option<Vec<u8>>, T::Failure> {
        let Section { hunks, crlf, .. } = section;
        self.spend(old.map_or(0, <[u8]>::len))?;
        if let Some(Binary::Hunk(hunk)) = &section.binary {
            let result = hunk.apply(old, section.change != Change::Delete);
            self.spend(hunk.size() + result.as_ref().map_or(0, Vec::len))?;
            return result.map(Some).or_else(|reason| reject(name, reason));
        }
        let (old, crlf) = (old.unwrap_or_default(), *crlf);
        // In a converted diff the carriage returns of a new file are not its own; an old file shows
        // whether it has any.
        let first = apply(old, hunks, crlf && old.is_empty(), &mut self.budget);
        let result = if crlf && first.is_err() {
            apply(old, hunks, true, &mut self.budget).or(first)
        } else {
            first
        };
        match result {
            Ok(bytes) => Ok(Some(bytes)),
            Err(failures) => {
                for failure in failures {
                    self.reject(Reject {
                        path: name.to_vec(),
                        hunk: Some(failure.hunk),
                        line: failure.line,
                        reason: failure.reason,
                        expected: failure.expected,
                        found: failure.found,
                    });
                }
                Ok(None)
            }
        }
    }

    /// Counts bytes that were read or made.
    fn spend(&mut self, bytes: usize) -> Step<(), T::Failure> {
        self.worked += bytes as u64;
        if self.worked > MAX_WORKED_BYTES {
            return Err(StepError::TooLarge(
                "the diff changes large files too often; split it. Nothing was changed".to_owned(),
            ));
        }
        Ok(())
    }

    fn set(
        &mut self,
        name: &[u8],
        location: &Location,
        file: Option<File>,
    ) -> Step<(), T::Failure> {
        if let Some(File {
            kind: Kind::Symlink,
            bytes,
        }) = &file
        {
            check_target(name, bytes)?;
        }
        let Some(entry) = self.entries.get_mut(location) else {
            return Ok(());
        };
        self.bytes -= entry.now.as_ref().map_or(0, |file| file.bytes.len());
        self.bytes += file.as_ref().map_or(0, |file| file.bytes.len());
        entry.written = file.is_some();
        entry.changed = true;
        entry.now = file;
        self.check_size()
    }

    fn check_size(&self) -> Step<(), T::Failure> {
        if self.bytes <= MAX_TOTAL_BYTES {
            return Ok(());
        }
        Err(StepError::TooLarge(format!(
            "the files that the diff touches have more than {MAX_TOTAL_BYTES} bytes in total; \
             nothing was changed"
        )))
    }

    fn touch(
        &mut self,
        path: &[u8],
        operation: Operation,
        digest_before: Option<String>,
        digest_after: Option<String>,
        from: Option<&[u8]>,
    ) {
        self.effects.push(FileEffect {
            path: path.to_vec(),
            operation,
            digest_before,
            digest_after,
            from: from.map(<[u8]>::to_vec),
        });
    }

    fn now(&self, location: &Location) -> Option<&File> {
        self.entries
            .get(location)
            .and_then(|entry| entry.now.as_ref())
    }

    /// The location of a file that a section reads or removes.
    fn source(&mut self, name: &[u8]) -> Step<Location, T::Failure> {
        let path = parse(name)?;
        if let Some(link) = self.changed_links.above(&path) {
            return reject(name, below_link(link));
        }
        let location = self.look_up(name, &path)?;
        if self.entries.get(&location).is_some_and(|entry| {
            matches!(entry.before, PriorState::Directory(_)) && entry.now.is_none()
        }) {
            return reject(name, "the path is a directory");
        }
        Ok(location)
    }

    /// The location that a section writes a file to.
    fn target(&mut self, name: &[u8]) -> Step<Location, T::Failure> {
        let path = parse(name)?;
        self.check_above(name, &path)?;
        let location = self.look_up(name, &path)?;
        let is_directory = self
            .entries
            .get(&location)
            .is_some_and(|entry| matches!(entry.before, PriorState::Directory(_)));
        if is_directory && !self.leaving.has_below(&path) {
            return reject(name, "the path is a directory");
        }
        Ok(location)
    }

    fn check_above(&self, name: &[u8], path: &Location) -> Step<(), T::Failure> {
        match self
            .new_links
            .above(path)
            .or_else(|| self.changed_links.above(path))
        {
            Some(link) => reject(name, below_link(link)),
            None => Ok(()),
        }
    }

    /// Loads the file at a path into the view.
    fn look_up(&mut self, name: &[u8], path: &Location) -> Step<Location, T::Failure> {
        let location = self.locate(name, path)?;
        if !self.entries.contains_key(&location) {
            let (before, now) = match tree_result(self.tree.load(&location), name)? {
                TreeNode::Nothing => (PriorState::Nothing, None),
                TreeNode::Directory(stamp) => (PriorState::Directory(stamp), None),
                TreeNode::File(stamp, file) => (PriorState::File(stamp), Some(file)),
            };
            self.bytes += now.as_ref().map_or(0, |file| file.bytes.len());
            self.entries.insert(
                location.clone(),
                Entry {
                    before,
                    now,
                    written: false,
                    changed: false,
                },
            );
            self.check_size()?;
        }
        Ok(location)
    }

    fn locate(&self, name: &[u8], path: &Location) -> Step<Location, T::Failure> {
        // Below a file or link that the diff removes there is nothing yet, wherever the link
        // points.
        if let Some(above) = self.leaving.above(path) {
            let place = tree_result(self.tree.locate(above), name)?;
            return Ok(path.rebased(above, &place));
        }
        tree_result(self.tree.locate(path), name)
    }

    /// The file before the diff, even if the view has changed since.
    fn in_tree(&self, location: &Location, name: &[u8]) -> Step<Option<File>, T::Failure> {
        let Some(entry) = self.entries.get(location) else {
            return Ok(None);
        };
        if !entry.changed || !matches!(entry.before, PriorState::File(_)) {
            return Ok(entry.now.clone());
        }
        match tree_result(self.tree.load(location), name)? {
            TreeNode::File(_, file) => Ok(Some(file)),
            _ => Ok(None),
        }
    }

    /// Rejects files below other files, and files that replace directories with remaining content.
    fn check_placement(&mut self) -> Result<(), PlanError<T::Failure>> {
        let mut found = Vec::new();
        let mut last: Option<(&Location, Kind)> = None;
        for (location, entry) in &self.entries {
            let Some(file) = &entry.now else { continue };
            if let Some((above, kind)) = last
                && above.is_above(location)
            {
                let noun = if kind == Kind::Symlink {
                    "a symbolic link"
                } else {
                    "a file"
                };
                found.push((
                    location.as_bytes().to_vec(),
                    format!(
                        "the path is below {}, which is {noun} after the diff",
                        crate::excerpt(above.as_bytes())
                    ),
                ));
                continue;
            }
            last = Some((location, file.kind));
        }
        let replaced: Vec<&Location> = self
            .entries
            .iter()
            .filter(|(_, entry)| {
                matches!(entry.before, PriorState::Directory(_)) && entry.now.is_some()
            })
            .map(|(location, _)| location)
            .collect();
        for directory in replaced {
            let below = match self.tree.files_below(directory, self.entries.len()) {
                Ok(below) => below,
                Err(Problem::Reject(reason)) => {
                    found.push((directory.as_bytes().to_vec(), reason));
                    continue;
                }
                Err(Problem::Failure(failure)) => return Err(PlanError::Tree(failure)),
            };
            let stays = |location: &&Location| {
                self.entries
                    .get(*location)
                    .is_none_or(|entry| entry.now.is_some())
            };
            if let Some(location) = below.iter().find(stays) {
                let reason = format!(
                    "the path is a directory, and the diff does not delete {} in it",
                    crate::excerpt(location.as_bytes())
                );
                found.push((directory.as_bytes().to_vec(), reason));
            }
        }
        for (path, reason) in found {
            self.reject(Reject::of_file(path, reason));
        }
        Ok(())
    }
}

fn parse<F>(name: &[u8]) -> Step<Location, F> {
    Location::parse(name).or_else(|reason| reject(name, reason))
}

fn below_link(link: &Location) -> String {
    format!(
        "the path is below {}, a symbolic link that the diff creates or changes",
        crate::excerpt(link.as_bytes())
    )
}

fn check_type<F>(name: &[u8], file: &File, wanted: Option<FileType>) -> Step<(), F> {
    match (wanted, file.kind) {
        (Some(FileType::Regular), Kind::Symlink) => reject(
            name,
            "the file is a symbolic link; a diff that changes one must have the mode 120000",
        ),
        (Some(FileType::Symlink), Kind::Regular(_)) => reject(
            name,
            "the file is a regular file, but the diff is of a symbolic link (mode 120000)",
        ),
        _ => Ok(()),
    }
}

fn check_target<F>(name: &[u8], target: &[u8]) -> Step<(), F> {
    if target.is_empty() || target.contains(&0) || target.len() > MAX_PATH_BYTES {
        return reject(
            name,
            "the target of the symbolic link is empty, too long, or contains a NUL byte",
        );
    }
    if target.ends_with(b"\n") {
        return reject(
            name,
            "the target of the symbolic link ends in a newline; write '\\ No newline at end of \
             file' after it",
        );
    }
    Ok(())
}

/// A diff carries only the executable bit; the other permissions stay.
const fn new_kind(old: Kind, new: Option<u32>) -> Kind {
    match (old, new) {
        (Kind::Regular(old), Some(new)) if new & 0o111 != 0 => {
            Kind::Regular(old | ((old & 0o444) >> 2))
        }
        (Kind::Regular(old), Some(_)) => Kind::Regular(old & !0o111),
        _ => old,
    }
}

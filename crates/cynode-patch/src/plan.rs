//! The effect of a diff on a tree, worked out without changing the tree.
//!
//! Sections apply in order to a picture of the files, which is loaded from the tree as needed. Renames and copies take what
//! was in the tree, as git means them: other sections of the same diff may change their sources.
//!
//! Invariants: no symbolic link is followed that the diff creates, changes or deletes; a link's content is its target.

use std::collections::BTreeMap;

use crate::{
    MAX_PATH_BYTES,
    hunks::{Effort, apply},
    name::{Location, Locations},
    parse::{Change, Hunk, Patch, Section},
};

/// Largest file that a diff may touch.
pub const MAX_FILE_BYTES: u64 = 32 * 1024 * 1024;
/// All contents that a diff makes, together.
const MAX_TOTAL_BYTES: usize = 128 * 1024 * 1024;
/// All contents that sections are applied to, one after the other.
const MAX_WORKED_BYTES: u64 = 1024 * 1024 * 1024;
/// Rejects are cut beyond this, so that an answer stays small.
const MAX_REJECT_BYTES: usize = 256 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// With its permission bits.
    Regular(u32),
    Symlink,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub kind: Kind,
    /// The content, or the target of a link.
    pub bytes: Vec<u8>,
}

/// What a tree has at a location. `S` tells one version of a file from another.
#[derive(Clone, Debug)]
pub enum Found<S> {
    Nothing,
    Directory(S),
    File(S, File),
}

/// Why a tree does not give what it is asked for.
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

    /// Where a path leads when links above its last component are followed. They may lead only to other places in the tree.
    fn locate(&self, path: &Location) -> Result<Location, Problem<Self::Failure>>;

    /// What is at a location. No link is followed, also none above the last component.
    fn load(&self, location: &Location) -> Result<Found<Self::Stamp>, Problem<Self::Failure>>;

    /// Everything below a directory that is no directory itself, at most `limit` and one more.
    fn files_below(
        &self,
        directory: &Location,
        limit: usize,
    ) -> Result<Vec<Location>, Problem<Self::Failure>>;

    /// A hash of a content, for people and records.
    fn digest(&self, bytes: &[u8]) -> String;
}

/// What the tree had at a location before the diff.
#[derive(Clone, Debug)]
pub enum Before<S> {
    Nothing,
    File(S),
    /// A directory that the diff empties and replaces.
    Directory(S),
}

/// A location in the picture.
#[derive(Debug)]
pub struct Entry<S> {
    pub before: Before<S>,
    pub now: Option<File>,
    /// Something about it differs from the tree.
    pub changed: bool,
    /// The diff has given it a content.
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

/// What a section did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    pub path: Vec<u8>,
    pub operation: Operation,
    pub digest_before: Option<String>,
    pub digest_after: Option<String>,
    pub from: Option<Vec<u8>>,
}

/// Why a part of a diff can't be applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    pub path: Vec<u8>,
    /// From 1; absent when the whole file is refused.
    pub hunk: Option<u32>,
    /// Of the old file, from 1.
    pub line: Option<u64>,
    pub reason: String,
}

/// What a diff makes of a tree.
#[derive(Debug)]
pub struct Plan<S> {
    pub entries: BTreeMap<Location, Entry<S>>,
    pub touched: Vec<Touched>,
    /// Empty when the diff applies.
    pub rejects: Vec<Reject>,
    /// There may be more rejects than are listed.
    pub rejects_cut: bool,
}

#[derive(Debug)]
pub enum PlanError<F> {
    TooLarge(String),
    Tree(F),
}

/// Works out what a diff makes of a tree. Everything is rejected or nothing.
pub fn plan<T: Tree>(tree: &T, patch: &Patch<'_>) -> Result<Plan<T::Stamp>, PlanError<T::Failure>> {
    let mut planner = Planner::new(tree, patch.sections());
    for section in patch.sections() {
        let step = planner.apply(section);
        planner.settle(step)?;
        if planner.rejects_cut() {
            break;
        }
    }
    if planner.rejects.is_empty() {
        planner.check_places()?;
    }
    let rejects_cut = planner.rejects_cut();
    Ok(Plan {
        entries: planner.entries,
        touched: planner.touched,
        rejects: planner.rejects,
        rejects_cut,
    })
}

enum Stop<F> {
    /// Path and reason.
    Reject(Vec<u8>, String),
    TooLarge(String),
    Tree(F),
}

type Step<T, F> = Result<T, Stop<F>>;

fn reject<T, F>(path: &[u8], reason: impl Into<String>) -> Step<T, F> {
    Err(Stop::Reject(path.to_vec(), reason.into()))
}

fn of_tree<T, F>(result: Result<T, Problem<F>>, path: &[u8]) -> Step<T, F> {
    result.map_err(|problem| match problem {
        Problem::Reject(reason) => Stop::Reject(path.to_vec(), reason),
        Problem::Failure(failure) => Stop::Tree(failure),
    })
}

struct Planner<'a, T: Tree> {
    tree: &'a T,
    entries: BTreeMap<Location, Entry<T::Stamp>>,
    touched: Vec<Touched>,
    rejects: Vec<Reject>,
    reject_bytes: usize,
    /// Sources of renames: others may take their names.
    renamed: Locations,
    /// Sources of renames, and what is deleted.
    leaving: Locations,
    /// Links that the diff creates, and links that it changes.
    new_links: Locations,
    changed_links: Locations,
    bytes: usize,
    worked: u64,
    effort: Effort,
}

/// What the modes of a section say about the type of its file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    Regular,
    Symlink,
}

fn type_of(mode: u32) -> Result<Type, String> {
    match mode & 0o170_000 {
        0o100_000 => Ok(Type::Regular),
        0o120_000 => Ok(Type::Symlink),
        0o160_000 => Err("submodules (mode 160000) are not changed by patches".to_owned()),
        _ => Err(format!(
            "the mode {mode:o} is not one of a regular file or a symbolic link"
        )),
    }
}

fn is_link(mode: Option<u32>) -> bool {
    mode.is_some_and(|mode| type_of(mode) == Ok(Type::Symlink))
}

impl<'a, T: Tree> Planner<'a, T> {
    fn new(tree: &'a T, sections: &[Section<'_>]) -> Self {
        // A name that is no location is rejected with its section.
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
        let of = |changes: &[Change]| {
            sections
                .iter()
                .filter(|section| changes.contains(&section.change))
                .collect::<Vec<_>>()
        };
        Self {
            tree,
            entries: BTreeMap::new(),
            touched: Vec::new(),
            rejects: Vec::new(),
            reject_bytes: 0,
            renamed: of(&[Change::Rename]).into_iter().filter_map(old).collect(),
            leaving: of(&[Change::Rename, Change::Delete])
                .into_iter()
                .filter_map(old)
                .collect(),
            new_links: of(&[Change::Create])
                .into_iter()
                .filter(|section| is_link(section.new_mode))
                .filter_map(new)
                .collect(),
            changed_links: of(&[Change::Modify])
                .into_iter()
                .filter(|section| is_link(section.old_mode))
                .filter_map(new)
                .collect(),
            bytes: 0,
            worked: 0,
            effort: Effort::default(),
        }
    }

    fn settle(&mut self, step: Step<(), T::Failure>) -> Result<(), PlanError<T::Failure>> {
        match step {
            Ok(()) => Ok(()),
            Err(Stop::Reject(path, reason)) => {
                self.reject(Reject {
                    path,
                    hunk: None,
                    line: None,
                    reason,
                });
                Ok(())
            }
            Err(Stop::TooLarge(message)) => Err(PlanError::TooLarge(message)),
            Err(Stop::Tree(failure)) => Err(PlanError::Tree(failure)),
        }
    }

    fn reject(&mut self, reject: Reject) {
        self.reject_bytes += reject.path.len() + reject.reason.len() + 100;
        if !self.rejects_cut() {
            self.rejects.push(reject);
        }
    }

    fn rejects_cut(&self) -> bool {
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
                "a file that becomes a symbolic link, or the reverse, is written as a deletion and a creation",
            );
        }
        let wanted = types[0].or(types[1]);
        if section.binary {
            return reject(
                named,
                "binary changes can't be applied; write the file instead",
            );
        }
        match section.change {
            Change::Create => self.create(section, named, wanted.unwrap_or(Type::Regular)),
            Change::Modify => self.modify(section, wanted),
            Change::Delete => self.delete(section, named, wanted),
            Change::Rename | Change::Copy => self.carry(section, wanted),
        }
    }

    fn create(&mut self, section: &Section<'_>, name: &[u8], wanted: Type) -> Step<(), T::Failure> {
        let target = self.target(name)?;
        if self.is_taken(&target, name) {
            return reject(name, "the file already exists");
        }
        let Some(bytes) = self.changed(name, b"", &section.hunks, section.crlf)? else {
            return Ok(());
        };
        let after = self.tree.digest(&bytes);
        let executable = section.new_mode.is_some_and(|mode| mode & 0o111 != 0);
        let kind = match wanted {
            Type::Symlink => Kind::Symlink,
            Type::Regular => Kind::Regular(if executable { 0o755 } else { 0o644 }),
        };
        self.set(name, &target, Some(File { kind, bytes }))?;
        self.touch(name, Operation::Create, None, Some(after), None);
        Ok(())
    }

    fn modify(&mut self, section: &Section<'_>, wanted: Option<Type>) -> Step<(), T::Failure> {
        let mut candidates: Vec<&[u8]> = section
            .new
            .iter()
            .chain(&section.old)
            .map(Vec::as_slice)
            .collect();
        candidates.dedup();
        let mut present = None;
        for candidate in &candidates {
            // The result lies where the file is.
            self.check_above(candidate, &parse(candidate)?)?;
            let location = self.source(candidate)?;
            if let Some(file) = self.now(&location) {
                present = Some((*candidate, location, file.clone()));
                break;
            }
        }
        let name = candidates.first().copied().unwrap_or_default();
        let Some((name, location, old)) = present else {
            // Many write a creation without naming /dev/null.
            if matches!(section.hunks.as_slice(), [hunk] if hunk.old_start == 0 && hunk.old_count == 0)
            {
                return self.create(section, name, wanted.unwrap_or(Type::Regular));
            }
            return reject(name, "no such file");
        };
        check_type(name, &old, Some(wanted.unwrap_or(Type::Regular)))?;
        let Some(bytes) = self.changed(name, &old.bytes, &section.hunks, section.crlf)? else {
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
        wanted: Option<Type>,
    ) -> Step<(), T::Failure> {
        let location = self.source(name)?;
        let Some(old) = self.now(&location).cloned() else {
            return reject(name, "no such file");
        };
        check_type(name, &old, Some(wanted.unwrap_or(Type::Regular)))?;
        let Some(left) = self.changed(name, &old.bytes, &section.hunks, section.crlf)? else {
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
    fn carry(&mut self, section: &Section<'_>, wanted: Option<Type>) -> Step<(), T::Failure> {
        let (from, to) = (
            section.old.as_deref().unwrap_or_default(),
            section.new.as_deref().unwrap_or_default(),
        );
        let (source, target) = (self.source(from)?, self.target(to)?);
        let Some(old) = self.in_tree(&source, from)? else {
            return reject(from, "no such file");
        };
        // A file that only changes its name says nothing of its type.
        let wanted = if section.hunks.is_empty() {
            wanted
        } else {
            Some(wanted.unwrap_or(Type::Regular))
        };
        check_type(from, &old, wanted)?;
        if source != target && self.is_taken(&target, to) {
            return reject(to, "the file already exists");
        }
        let Some(bytes) = self.changed(to, &old.bytes, &section.hunks, section.crlf)? else {
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

    /// Whether a file is at a location that no section of the diff takes away.
    fn is_taken(&self, target: &Location, name: &[u8]) -> bool {
        let goes = || Location::parse(name).is_ok_and(|name| self.renamed.contains(&name));
        self.entries
            .get(target)
            .is_some_and(|entry| entry.now.is_some() && (entry.written || !goes()))
    }

    /// The content after the hunks; `None` when some were rejected.
    fn changed(
        &mut self,
        name: &[u8],
        old: &[u8],
        hunks: &[Hunk<'_>],
        crlf: bool,
    ) -> Step<Option<Vec<u8>>, T::Failure> {
        self.worked += old.len() as u64;
        if self.worked > MAX_WORKED_BYTES {
            return Err(Stop::TooLarge(
                "the diff changes large files too often; split it. Nothing was changed".to_owned(),
            ));
        }
        // In a converted diff a new file has no carriage returns of its own; an old file shows whether it has.
        let first = apply(old, hunks, crlf && old.is_empty(), &mut self.effort);
        let result = if crlf && first.is_err() {
            apply(old, hunks, true, &mut self.effort).or(first)
        } else {
            first
        };
        match result {
            Ok(bytes) => Ok(Some(bytes)),
            Err(misses) => {
                for miss in misses {
                    self.reject(Reject {
                        path: name.to_vec(),
                        hunk: Some(miss.hunk),
                        line: Some(miss.line),
                        reason: miss.reason,
                    });
                }
                Ok(None)
            }
        }
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
        Err(Stop::TooLarge(format!(
            "the files that the diff touches have more than {MAX_TOTAL_BYTES} bytes together; nothing was changed"
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
        self.touched.push(Touched {
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

    /// The location of a file that a section reads or takes away.
    fn source(&mut self, name: &[u8]) -> Step<Location, T::Failure> {
        let path = parse(name)?;
        if let Some(link) = self.changed_links.above(&path) {
            return reject(name, below_link(link));
        }
        let location = self.look_up(name, &path)?;
        if self.entries.get(&location).is_some_and(|entry| {
            matches!(entry.before, Before::Directory(_)) && entry.now.is_none()
        }) {
            return reject(name, "it is a directory");
        }
        Ok(location)
    }

    /// The location that a section puts a file at.
    fn target(&mut self, name: &[u8]) -> Step<Location, T::Failure> {
        let path = parse(name)?;
        self.check_above(name, &path)?;
        let location = self.look_up(name, &path)?;
        let is_directory = self
            .entries
            .get(&location)
            .is_some_and(|entry| matches!(entry.before, Before::Directory(_)));
        if is_directory && !self.leaving.has_below(&path) {
            return reject(name, "it is a directory");
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

    /// Brings what is at a path into the picture.
    fn look_up(&mut self, name: &[u8], path: &Location) -> Step<Location, T::Failure> {
        let location = self.locate(name, path)?;
        if !self.entries.contains_key(&location) {
            let (before, now) = match of_tree(self.tree.load(&location), name)? {
                Found::Nothing => (Before::Nothing, None),
                Found::Directory(stamp) => (Before::Directory(stamp), None),
                Found::File(stamp, file) => (Before::File(stamp), Some(file)),
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
        // Below a file or link that the diff takes away there is nothing yet, whatever a link leads to.
        if let Some(above) = self.leaving.above(path) {
            let place = of_tree(self.tree.locate(above), name)?;
            return Ok(path.moved(above, &place));
        }
        of_tree(self.tree.locate(path), name)
    }

    /// The content before the diff, which the picture may have lost by now.
    fn in_tree(&self, location: &Location, name: &[u8]) -> Step<Option<File>, T::Failure> {
        let Some(entry) = self.entries.get(location) else {
            return Ok(None);
        };
        if !entry.changed || !matches!(entry.before, Before::File(_)) {
            return Ok(entry.now.clone());
        }
        match of_tree(self.tree.load(location), name)? {
            Found::File(_, file) => Ok(Some(file)),
            _ => Ok(None),
        }
    }

    /// Rejects files that lie below other files, and files in place of directories that stay.
    fn check_places(&mut self) -> Result<(), PlanError<T::Failure>> {
        let mut found = Vec::new();
        let mut last: Option<(&Location, Kind)> = None;
        for (location, entry) in &self.entries {
            let Some(file) = &entry.now else { continue };
            if let Some((above, kind)) = last
                && above.is_above(location)
            {
                let what = if kind == Kind::Symlink {
                    "a symbolic link"
                } else {
                    "a file"
                };
                found.push((
                    location.as_bytes().to_vec(),
                    format!(
                        "the path lies below {}, which is {what} after the diff",
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
                matches!(entry.before, Before::Directory(_)) && entry.now.is_some()
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
                    "it is a directory, and {} in it is not deleted by the diff",
                    crate::excerpt(location.as_bytes())
                );
                found.push((directory.as_bytes().to_vec(), reason));
            }
        }
        for (path, reason) in found {
            self.reject(Reject {
                path,
                hunk: None,
                line: None,
                reason,
            });
        }
        Ok(())
    }
}

fn parse<F>(name: &[u8]) -> Step<Location, F> {
    Location::parse(name).or_else(|reason| reject(name, reason))
}

fn below_link(link: &Location) -> String {
    format!(
        "the path lies below {}, a symbolic link that the diff creates or changes",
        crate::excerpt(link.as_bytes())
    )
}

fn check_type<F>(name: &[u8], file: &File, wanted: Option<Type>) -> Step<(), F> {
    match (wanted, file.kind) {
        (Some(Type::Regular), Kind::Symlink) => reject(
            name,
            "it is a symbolic link; a diff that changes one says so by the mode 120000",
        ),
        (Some(Type::Symlink), Kind::Regular(_)) => reject(
            name,
            "it is a regular file, and the diff is of a symbolic link (mode 120000)",
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
            "the target of the symbolic link ends in a newline; write '\\ No newline at end of file' after it",
        );
    }
    Ok(())
}

/// Only whether a file can be executed is in a diff; the rest of its permissions stays.
const fn new_kind(old: Kind, new: Option<u32>) -> Kind {
    match (old, new) {
        (Kind::Regular(old), Some(new)) if new & 0o111 != 0 => {
            Kind::Regular(old | ((old & 0o444) >> 2))
        }
        (Kind::Regular(old), Some(_)) => Kind::Regular(old & !0o111),
        _ => old,
    }
}

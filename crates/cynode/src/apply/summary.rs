//! Summaries of changes, for people to review.
//!
//! Invariant: the summary of planned changes is made from the plan itself, so that nothing is done
//! that is not shown.

use std::collections::{BTreeMap, BTreeSet};

use cynode_patch::{Change, File, Kind, Location, Patch, PriorState, Section, Side};
use serde::Serialize;

use super::{
    Error, Prepared,
    commit::{New, PlannedChange},
};
use crate::clients::{CLIENTS, Client};

/// One changed file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileSummary {
    pub path: String,
    pub operation: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Number of lines.
    pub added: usize,
    pub removed: usize,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub binary: bool,
    /// Warnings, such as `executable`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<&'static str>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub files: Vec<FileSummary>,
}

impl Summary {
    /// Summarizes a patch, whatever the directory has already.
    pub fn new(patch: &Patch<'_>) -> Self {
        let created = patch
            .sections()
            .iter()
            .filter(|section| section.change != Change::Modify)
            .filter_map(|section| section.new.as_deref());
        let repositories = repositories(created);
        let files = patch
            .sections()
            .iter()
            .map(|section| file_summary(section, &repositories))
            .collect();
        Self { files }
    }

    /// The numbers of files, added lines and removed lines.
    pub fn totals(&self) -> (usize, usize, usize) {
        self.files
            .iter()
            .fold((0, 0, 0), |(files, added, removed), file| {
                (files + 1, added + file.added, removed + file.removed)
            })
    }
}

fn file_summary(section: &Section<'_>, repositories: &BTreeSet<Vec<u8>>) -> FileSummary {
    let is_moved = matches!(section.change, Change::Rename | Change::Copy);
    let path = section.new.as_deref().or(section.old.as_deref());
    let path = path.unwrap_or_default();
    let (added, removed) = counts(section);
    let warnings = if section.change == Change::Delete {
        Vec::new()
    } else {
        warnings(path, section.new_mode, repositories)
    };
    FileSummary {
        path: text(path),
        operation: operation(section.change),
        from: section.old.as_deref().filter(|_| is_moved).map(text),
        added,
        removed,
        binary: section.binary.is_some(),
        warnings,
    }
}

const fn operation(change: Change) -> &'static str {
    match change {
        Change::Create => "create",
        Change::Modify => "modify",
        Change::Delete => "delete",
        Change::Rename => "rename",
        Change::Copy => "copy",
    }
}

fn counts(section: &Section<'_>) -> (usize, usize) {
    let (mut added, mut removed) = (0, 0);
    for line in section.hunks.iter().flat_map(|hunk| hunk.lines(false)) {
        match line.side {
            Side::New => added += 1,
            Side::Old => removed += 1,
            Side::Both => {}
        }
    }
    (added, removed)
}

/// Summarizes planned changes.
pub(super) fn of_changes(prepared: &Prepared, patch: &Patch<'_>) -> Result<Summary, Error> {
    let changes = prepared.changes();
    let written = prepared.plan.entries.iter();
    let written = written.filter(|(_, entry)| entry.changed && entry.now.is_some());
    let summaries = ChangeSummaries {
        prepared,
        deleted: changes
            .iter()
            .filter(|change| change.new.is_none())
            .map(|change| change.location)
            .collect(),
        sections: sections_by_location(patch),
        repositories: repositories(written.map(|(location, _)| location.as_bytes())),
    };
    let moved: BTreeSet<Location> = changes
        .iter()
        .filter_map(|change| summaries.moved_from(change))
        .collect();
    let files = changes
        .iter()
        .filter(|change| !moved.contains(change.location))
        .map(|change| summaries.file_summary(change))
        .collect::<Result<_, _>>()?;
    Ok(Summary { files })
}

/// The sections by the location that they write or delete; `None` if there are several.
fn sections_by_location<'p>(patch: &'p Patch<'_>) -> BTreeMap<Location, Option<&'p Section<'p>>> {
    let mut found = BTreeMap::new();
    for section in patch.sections() {
        let path = section.new.as_deref().or(section.old.as_deref());
        if let Ok(location) = Location::parse(path.unwrap_or_default()) {
            found
                .entry(location)
                .and_modify(|other| *other = None)
                .or_insert(Some(section));
        }
    }
    found
}

/// What the summary of one change depends on.
struct ChangeSummaries<'a> {
    prepared: &'a Prepared,
    deleted: BTreeSet<&'a Location>,
    sections: BTreeMap<Location, Option<&'a Section<'a>>>,
    repositories: BTreeSet<Vec<u8>>,
}

impl ChangeSummaries<'_> {
    /// The section with exactly this change; `None` if the directory has a part of it already.
    fn section(&self, location: &Location) -> Option<&Section<'_>> {
        let is_taken_back = self.prepared.tree.taken_back.contains_key(location);
        let section = self.sections.get(location).copied().flatten();
        section.filter(|_| !is_taken_back)
    }

    /// The deleted file that this change moves to a new location.
    fn moved_from(&self, change: &PlannedChange<'_>) -> Option<Location> {
        let section = self.section(change.location)?;
        let from = Location::parse(section.old.as_deref()?).ok()?;
        let is_moved = section.change == Change::Rename
            && matches!(change.before, PriorState::Nothing)
            && !self.sections.contains_key(&from)
            && !self.prepared.tree.taken_back.contains_key(&from)
            && self.deleted.contains(&from);
        is_moved.then_some(from)
    }

    fn file_summary(&self, change: &PlannedChange<'_>) -> Result<FileSummary, Error> {
        let location = change.location;
        let new = match change.new {
            Some(New::Content(file)) => Some(file),
            _ => None,
        };
        let section = self.section(location);
        let is_new = !matches!(change.before, PriorState::File(_));
        let moved_from = self.moved_from(change);
        let is_copy = section.is_some_and(|section| section.change == Change::Copy) && is_new;
        let is_planned = self
            .prepared
            .plan
            .entries
            .get(location)
            .is_some_and(|entry| entry.changed);
        let operation = match (new, is_new) {
            (None, _) => "delete",
            (Some(_), _) if !is_planned => "restore",
            (Some(_), true) if moved_from.is_some() => "rename",
            (Some(_), true) if is_copy => "copy",
            (Some(_), true) => "create",
            (Some(_), false) => "modify",
        };
        let from = match section {
            Some(section) if is_copy => section.old.clone(),
            _ => moved_from.map(|from| from.as_bytes().to_vec()),
        };
        let is_whole = |section: &&Section<'_>| {
            from.is_some() || !matches!(section.change, Change::Rename | Change::Copy)
        };
        let (added, removed, binary) = match section.filter(is_whole) {
            Some(section) => {
                let (added, removed) = counts(section);
                (added, removed, section.binary.is_some())
            }
            None => compare(
                self.prepared.actual(location)?.as_ref(),
                new.map(|file| &file.bytes[..]),
            ),
        };
        Ok(FileSummary {
            path: text(location.as_bytes()),
            operation,
            from: from.as_deref().map(text),
            added,
            removed,
            binary,
            warnings: new.map_or_else(Vec::new, |file| {
                let mode = match file.kind {
                    Kind::Symlink => 0o120_000,
                    Kind::Regular(mode) => 0o100_000 | mode,
                };
                warnings(location.as_bytes(), Some(mode), &self.repositories)
            }),
        })
    }
}

/// Counts the added and the removed lines between the common beginning and the common end of two
/// contents. Also returns whether one of them is binary.
fn compare(old: Option<&File>, new: Option<&[u8]>) -> (usize, usize, bool) {
    let old = old.map_or(&b""[..], |file| &file.bytes);
    let new = new.unwrap_or_default();
    if old.contains(&0) || new.contains(&0) {
        return (0, 0, true);
    }
    let lines = |bytes| <[u8]>::split_inclusive(bytes, |byte| *byte == b'\n').collect::<Vec<_>>();
    let (old, new) = (lines(old), lines(new));
    let pairs = old.iter().zip(&new);
    let start = pairs.take_while(|(old, new)| old == new).count();
    let (old, new) = (&old[start..], &new[start..]);
    let pairs = old.iter().rev().zip(new.iter().rev());
    let end = pairs.take_while(|(old, new)| old == new).count();
    (new.len() - end, old.len() - end, false)
}

fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// Files that a shell, an editor, an agent, git or a build server executes or obeys implicitly.
const SELF_RUNNING_FILES: &[&str] = &[
    ".aider.conf.yml",
    ".bash_login",
    ".bash_logout",
    ".bash_profile",
    ".bashrc",
    ".cursorrules",
    ".devcontainer.json",
    ".dir-locals.el",
    ".editorconfig",
    ".envrc",
    ".exrc",
    ".gdbinit",
    ".gitattributes",
    ".gitconfig",
    ".gitlab-ci.yml",
    ".gitmodules",
    ".goosehints",
    ".hgrc",
    ".lldbinit",
    ".mcp.json",
    ".mise.toml",
    ".npmrc",
    ".nvim.lua",
    ".nvimrc",
    ".pnpmfile.cjs",
    ".pre-commit-config.yaml",
    ".profile",
    ".roomodes",
    ".roorules",
    ".tool-versions",
    ".vimrc",
    ".windsurfrules",
    ".yarnrc.yml",
    ".zlogin",
    ".zprofile",
    ".zshenv",
    ".zshrc",
    "agents.md",
    "claude.md",
    "gemini.md",
    "jenkinsfile",
    "lefthook.yml",
    "mise.toml",
    "sitecustomize.py",
    "usercustomize.py",
];
/// Suffixes of the names of such files.
const SELF_RUNNING_ENDINGS: &[&str] = &[".code-workspace", ".pth"];
/// Directories with only such files.
const SELF_RUNNING_DIRECTORIES: &[&str] = &[
    ".amazonq",
    ".cargo",
    ".circleci",
    ".claude",
    ".clinerules",
    ".codex",
    ".continue",
    ".cursor",
    ".devcontainer",
    ".direnv",
    ".fleet",
    ".gemini",
    ".git-hooks",
    ".githooks",
    ".github",
    ".hg",
    ".husky",
    ".idea",
    ".junie",
    ".kiro",
    ".mise",
    ".opencode",
    ".openhands",
    ".qwen",
    ".roo",
    ".vscode",
    ".windsurf",
    ".yarn",
    ".zed",
    "git-hooks",
    "hooks",
];

/// What the clients that `cynode connect` knows read: it names the programs that they start.
fn client_files() -> impl Iterator<Item = String> {
    CLIENTS.iter().flat_map(Client::configuration_files)
}

/// Directories that git would take for a repository, because they get a `HEAD`. The configuration
/// of a repository can name programs that git executes.
pub(super) fn repositories<'a>(created: impl Iterator<Item = &'a [u8]>) -> BTreeSet<Vec<u8>> {
    let last = |path: &'a [u8]| {
        let slash = path.iter().rposition(|byte| *byte == b'/');
        slash.map_or((&path[..0], path), |slash| {
            (&path[..slash], &path[slash + 1..])
        })
    };
    created
        .map(last)
        .filter(|(_, name)| name.eq_ignore_ascii_case(b"HEAD"))
        .map(|(directory, _)| directory.to_vec())
        .collect()
}

const EXECUTABLE: &str = "executable";
const SYMBOLIC_LINK: &str = "symbolic link";
const RUNS_BY_ITSELF: &str = "runs by itself";
const IN_REPOSITORY: &str = "part of a git repository";

/// The order in which files are shown: first those that act without being asked, then others with a
/// warning.
pub fn rank(warnings: &[&str]) -> u8 {
    if warnings.contains(&RUNS_BY_ITSELF) || warnings.contains(&IN_REPOSITORY) {
        0
    } else if warnings.is_empty() {
        2
    } else {
        1
    }
}

pub(super) fn warnings(
    path: &[u8],
    mode: Option<u32>,
    repositories: &BTreeSet<Vec<u8>>,
) -> Vec<&'static str> {
    let mut found = Vec::new();
    if mode.is_some_and(|mode| mode & 0o170_000 == 0o120_000) {
        found.push(SYMBOLIC_LINK);
    } else if mode.is_some_and(|mode| mode & 0o111 != 0) {
        found.push(EXECUTABLE);
    }
    if runs_by_itself(path) {
        found.push(RUNS_BY_ITSELF);
    }
    let is_in_repository = |directory: &Vec<u8>| {
        directory.is_empty()
            || path
                .strip_prefix(&directory[..])
                .is_some_and(|rest| rest.starts_with(b"/"))
    };
    if repositories.iter().any(is_in_repository) {
        found.push(IN_REPOSITORY);
    }
    found
}

fn runs_by_itself(path: &[u8]) -> bool {
    let lower = String::from_utf8_lossy(path).to_lowercase();
    let mut parts: Vec<&str> = lower.split('/').collect();
    let last = parts.pop().unwrap_or_default();
    SELF_RUNNING_FILES.contains(&last)
        || SELF_RUNNING_ENDINGS
            .iter()
            .any(|ending| last.ends_with(ending))
        || parts
            .iter()
            .any(|part| SELF_RUNNING_DIRECTORIES.contains(part))
        || client_files().any(|file| {
            let above = lower.strip_suffix(&file.to_lowercase());
            above.is_some_and(|above| above.is_empty() || above.ends_with('/'))
        })
}

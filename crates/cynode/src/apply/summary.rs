//! A summary of planned changes, for people to review.

use std::collections::BTreeSet;

use cynode_patch::{Change, Patch, Section, Side};
use serde::Serialize;

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
    pub fn new(patch: &Patch<'_>) -> Self {
        Self::of_sections(patch, |_| true)
    }

    /// Keeps only the sections whose paths `keep` accepts.
    pub fn of_sections(patch: &Patch<'_>, keep: impl Fn(&[u8]) -> bool) -> Self {
        let created = patch
            .sections()
            .iter()
            .filter(|section| section.change != Change::Modify)
            .filter_map(|section| section.new.as_deref());
        let repositories = repositories(created);
        let files = patch
            .sections()
            .iter()
            .filter(|section| {
                section
                    .new
                    .as_deref()
                    .or(section.old.as_deref())
                    .is_some_and(&keep)
            })
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

impl FileSummary {
    /// A file that the session has since reverted.
    pub fn restored(path: &[u8]) -> Self {
        Self {
            path: String::from_utf8_lossy(path).into_owned(),
            operation: "restore",
            from: None,
            added: 0,
            removed: 0,
            binary: false,
            warnings: Vec::new(),
        }
    }
}

fn file_summary(section: &Section<'_>, repositories: &BTreeSet<Vec<u8>>) -> FileSummary {
    let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
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

/// Files that a shell, an editor, an agent, git or a build server executes or obeys implicitly.
const SELF_RUNNING_FILES: &[&str] = &[
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
    ".lldbinit",
    ".mcp.json",
    ".mise.toml",
    ".npmrc",
    ".nvim.lua",
    ".nvimrc",
    ".pnpmfile.cjs",
    ".pre-commit-config.yaml",
    ".profile",
    ".tool-versions",
    ".vimrc",
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
    ".cargo",
    ".circleci",
    ".claude",
    ".codex",
    ".cursor",
    ".devcontainer",
    ".direnv",
    ".fleet",
    ".gemini",
    ".githooks",
    ".github",
    ".husky",
    ".idea",
    ".mise",
    ".vscode",
    ".yarn",
    ".zed",
    "git-hooks",
    "hooks",
];

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

pub(super) fn warnings(
    path: &[u8],
    mode: Option<u32>,
    repositories: &BTreeSet<Vec<u8>>,
) -> Vec<&'static str> {
    let mut found = Vec::new();
    if mode.is_some_and(|mode| mode & 0o170_000 == 0o120_000) {
        found.push("symbolic link");
    } else if mode.is_some_and(|mode| mode & 0o111 != 0) {
        found.push("executable");
    }
    if runs_by_itself(path) {
        found.push("runs by itself");
    }
    let is_in_repository = |directory: &Vec<u8>| {
        directory.is_empty()
            || path
                .strip_prefix(&directory[..])
                .is_some_and(|rest| rest.starts_with(b"/"))
    };
    if repositories.iter().any(is_in_repository) {
        found.push("part of a git repository");
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
}

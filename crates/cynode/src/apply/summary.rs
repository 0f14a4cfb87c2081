//! What a patch would do, for a person to read before it is applied.

use cynode_patch::{Operation, Patch, Plan, Section, Side};
use serde::Serialize;

use super::tree::Stamp;

/// One changed file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileSummary {
    pub path: String,
    pub operation: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    pub added: usize,
    pub removed: usize,
    /// Reasons to look twice.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<&'static str>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub files: Vec<FileSummary>,
}

impl Summary {
    pub(super) fn new(patch: &Patch<'_>, plan: &Plan<Stamp>) -> Self {
        let files = plan
            .effects
            .iter()
            .zip(patch.sections())
            .map(|(effect, section)| {
                let (added, removed) = counts(section);
                FileSummary {
                    path: String::from_utf8_lossy(&effect.path).into_owned(),
                    operation: operation(effect.operation),
                    from: effect
                        .from
                        .as_ref()
                        .map(|from| String::from_utf8_lossy(from).into_owned()),
                    added,
                    removed,
                    warnings: warnings(&effect.path, effect.operation, section.new_mode),
                }
            })
            .collect();
        Self { files }
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
}

const fn operation(operation: Operation) -> &'static str {
    match operation {
        Operation::Create => "create",
        Operation::Modify => "modify",
        Operation::Delete => "delete",
        Operation::Rename => "rename",
        Operation::Copy => "copy",
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

/// Files that a shell, an editor or git runs without being asked.
const SELF_RUNNING_FILES: &[&str] = &[
    ".bash_profile",
    ".bashrc",
    ".editorconfig",
    ".envrc",
    ".gitattributes",
    ".gitmodules",
    ".mise.toml",
    ".npmrc",
    ".pre-commit-config.yaml",
    ".profile",
    ".tool-versions",
    ".zshrc",
    "sitecustomize.py",
];
/// The same, for everything below such a directory.
const SELF_RUNNING_DIRECTORIES: &[&str] = &[
    ".claude",
    ".cursor",
    ".devcontainer",
    ".direnv",
    ".githooks",
    ".husky",
    ".idea",
    ".vscode",
    "git-hooks",
    "hooks",
];

fn warnings(path: &[u8], operation: Operation, mode: Option<u32>) -> Vec<&'static str> {
    if operation == Operation::Delete {
        return Vec::new();
    }
    let mut found = Vec::new();
    if mode.is_some_and(|mode| mode & 0o170_000 == 0o120_000) {
        found.push("symbolic link");
    } else if mode.is_some_and(|mode| mode & 0o111 != 0) {
        found.push("executable");
    }
    let lower = String::from_utf8_lossy(path).to_lowercase();
    let mut parts: Vec<&str> = lower.split('/').collect();
    let last = parts.pop().unwrap_or_default();
    if SELF_RUNNING_FILES.contains(&last)
        || parts
            .iter()
            .any(|part| SELF_RUNNING_DIRECTORIES.contains(part))
    {
        found.push("runs by itself");
    }
    found
}

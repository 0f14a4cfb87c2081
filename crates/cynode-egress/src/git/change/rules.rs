//! The rules of a repository, compiled.
//!
//! Invariant: what is refused is compared as the most lenient file system compares it, what is
//! allowed exactly as written. A denial wins.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

use cynode_api::{RepositoryRules, repository_limits};
use cynode_patch::MAX_FILE_BYTES;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::{names::fold, objects::MAX_CONTENT_BYTES};

/// Files of one change, whatever a rule says: each has several verdicts.
pub(crate) const MAX_CHANGED_FILES: u64 = 10_000;
/// Of a repository whose rules don't say.
const DEFAULT_FILES: u64 = 1_000;
const DEFAULT_FILE_BYTES: u64 = 10 * 1024 * 1024;
const DEFAULT_CHANGE_BYTES: u64 = 50 * 1024 * 1024;
/// Braces of a glob. Compiling recurses into nested ones.
const MAX_GLOB_BRACES: usize = 16;

/// Files that decide what runs with more rights than a file of the repository has: in CI, in a
/// reviewer's or developer's clone, or in a bot. They are refused unless `allow_sensitive` names
/// them. Compared with the folded path, so all are in lower case.
pub(crate) const SENSITIVE_FILES: &[&str] = &[
    // Definitions of CI. Whatever can change one runs with the secrets of CI.
    ".github/**",
    ".gitlab/**",
    "**/.gitlab-ci*.yml",
    "**/*.gitlab-ci.yml",
    ".gitea/**",
    ".forgejo/**",
    ".circleci/**",
    "**/azure-pipelines*",
    ".azure-pipelines/**",
    ".azuredevops/**",
    ".pipelines/**",
    "**/jenkinsfile*",
    "**/*.jenkinsfile",
    ".travis.y*ml",
    "bitbucket-pipelines.y*ml",
    ".drone*",
    ".drone/**",
    ".woodpecker*",
    ".woodpecker/**",
    ".buildkite/**",
    ".semaphore/**",
    ".teamcity/**",
    ".tekton/**",
    ".cirrus.*",
    ".build.yml",
    ".builds/**",
    "appveyor.yml",
    ".appveyor.yml",
    "wercker.yml",
    "codefresh.y*ml",
    "cloudbuild.y*ml",
    "cloudbuild.json",
    "buildspec*.y*ml",
    "atlantis.yaml",
    // Who must review.
    "**/codeowners",
    "**/owners",
    "**/owners_aliases",
    // What git itself obeys, also under its short names.
    "**/.gitmodules",
    "**/.gitattributes",
    "**/.lfsconfig",
    "**/gitmod~*",
    "**/gi7eba~*",
    "**/gitatt~*",
    "**/gi7d29~*",
    // Hooks and environments that run in a clone.
    "**/.husky/**",
    ".githooks/**",
    ".pre-commit-config.y*ml",
    ".pre-commit-hooks.y*ml",
    ".lefthook*",
    ".lefthook/**",
    "lefthook*.y*ml",
    "lefthook*.toml",
    "lefthook*.json",
    ".devcontainer/**",
    ".devcontainer.json",
    ".gitpod.y*ml",
    // Bots that merge or update.
    ".dependabot/**",
    "renovate.json*",
    ".renovaterc*",
    ".mergify.yml",
    ".mergify/**",
    "bors.toml",
    ".bors.toml",
];

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RuleError {
    #[error("{list} has more than {} globs", repository_limits::MAX_GLOBS)]
    TooMany { list: &'static str },
    #[error(
        "a glob in {list} has more than {} bytes",
        repository_limits::MAX_GLOB_BYTES
    )]
    TooLong { list: &'static str },
    #[error("a glob in {list} has more than {MAX_GLOB_BRACES} braces")]
    TooDeep { list: &'static str },
    #[error("a glob in {list} is invalid: {reason}")]
    Invalid { list: &'static str, reason: String },
}

/// The rules of one repository.
#[derive(Debug)]
pub(crate) struct RuleSet {
    /// `None` allows all.
    allow_paths: Option<GlobSet>,
    deny_paths: GlobSet,
    sensitive: GlobSet,
    allow_sensitive: GlobSet,
    allow_flagged: GlobSet,
    protected_branches: GlobSet,
    pub(crate) allow_symlinks: bool,
    pub(crate) allow_executables: bool,
    pub(crate) max_files: u64,
    pub(crate) max_file_bytes: u64,
    pub(crate) max_change_bytes: u64,
}

#[derive(Clone, Copy)]
enum Case {
    Exact,
    Folded,
}

impl RuleSet {
    pub(crate) fn new(rules: &RepositoryRules) -> Result<Self, RuleError> {
        let list = |list, globs: &[String], case| {
            if globs.len() > repository_limits::MAX_GLOBS {
                return Err(RuleError::TooMany { list });
            }
            compile(list, globs, case)
        };
        let allow_paths = if rules.allow_paths.is_empty() {
            None
        } else {
            Some(list("allow_paths", &rules.allow_paths, Case::Exact)?)
        };
        Ok(Self {
            allow_paths,
            deny_paths: list("deny_paths", &rules.deny_paths, Case::Folded)?,
            sensitive: compile("the sensitive files", SENSITIVE_FILES, Case::Folded)?,
            allow_sensitive: list("allow_sensitive", &rules.allow_sensitive, Case::Exact)?,
            allow_flagged: list("allow_flagged", &rules.allow_flagged, Case::Exact)?,
            protected_branches: list(
                "protected_branches",
                &rules.protected_branches,
                Case::Folded,
            )?,
            allow_symlinks: rules.allow_symlinks,
            allow_executables: rules.allow_executables,
            max_files: rules
                .max_files
                .map_or(DEFAULT_FILES, u64::from)
                .min(MAX_CHANGED_FILES),
            max_file_bytes: rules
                .max_file_bytes
                .unwrap_or(DEFAULT_FILE_BYTES)
                .min(MAX_FILE_BYTES),
            max_change_bytes: rules
                .max_change_bytes
                .unwrap_or(DEFAULT_CHANGE_BYTES)
                .min(MAX_CONTENT_BYTES),
        })
    }

    /// Why no change may touch the path, if so.
    pub(crate) fn refuse_path(&self, path: &[u8]) -> Option<&'static str> {
        if is_match_folded(&self.deny_paths, path) {
            Some("the path is in deny_paths")
        } else if self
            .allow_paths
            .as_ref()
            .is_some_and(|allowed| !is_match(allowed, path))
        {
            Some("the path is not in allow_paths")
        } else {
            None
        }
    }

    pub(crate) fn is_sensitive(&self, path: &[u8]) -> bool {
        // A file or link in the place of a sensitive directory is sensitive too.
        is_match_folded(&self.sensitive, path)
            || is_match_folded(&self.sensitive, &[path, b"/_"].concat())
    }

    pub(crate) fn allows_sensitive(&self, path: &[u8]) -> bool {
        is_match(&self.allow_sensitive, path)
    }

    pub(crate) fn allows_flagged(&self, path: &[u8]) -> bool {
        is_match(&self.allow_flagged, path)
    }

    pub(crate) fn protects(&self, branch: &str) -> bool {
        is_match_folded(&self.protected_branches, branch.as_bytes())
    }
}

fn is_match(globs: &GlobSet, path: &[u8]) -> bool {
    globs.is_match(OsStr::from_bytes(path))
}

fn is_match_folded(globs: &GlobSet, path: &[u8]) -> bool {
    !globs.is_empty() && (is_match(globs, path) || is_match(globs, fold(path).as_bytes()))
}

fn compile(
    list: &'static str,
    globs: &[impl AsRef<str>],
    case: Case,
) -> Result<GlobSet, RuleError> {
    let invalid = |error: &globset::Error| RuleError::Invalid {
        list,
        reason: error.kind().to_string(),
    };
    let mut set = GlobSetBuilder::new();
    for glob in globs {
        let glob = glob.as_ref();
        if glob.len() > repository_limits::MAX_GLOB_BYTES {
            return Err(RuleError::TooLong { list });
        }
        if glob.matches('{').count() > MAX_GLOB_BRACES {
            return Err(RuleError::TooDeep { list });
        }
        let glob = GlobBuilder::new(glob)
            .literal_separator(true)
            .backslash_escape(true)
            .case_insensitive(matches!(case, Case::Folded))
            .build()
            .map_err(|error| invalid(&error))?;
        set.add(glob);
    }
    set.build().map_err(|error| invalid(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(edit: impl FnOnce(&mut RepositoryRules)) -> RuleSet {
        let mut rules = RepositoryRules::default();
        edit(&mut rules);
        RuleSet::new(&rules).expect("rules")
    }

    fn globs(globs: &[&str]) -> Vec<String> {
        globs.iter().map(|glob| (*glob).to_owned()).collect()
    }

    #[test]
    fn a_star_stays_within_a_component() {
        let rules = rules(|rules| rules.allow_paths = globs(&["src/*.rs", "docs/**"]));
        let allowed = |path: &str| rules.refuse_path(path.as_bytes()).is_none();
        assert!(allowed("src/main.rs") && allowed("docs/a/b.md"));
        assert!(!allowed("src/a/main.rs") && !allowed("docs") && !allowed("SRC/main.rs"));
    }

    #[test]
    fn a_denial_wins_and_ignores_case() {
        let rules = rules(|rules| {
            rules.allow_paths = globs(&["**"]);
            rules.deny_paths = globs(&["Deploy/**", "**/*.pem"]);
        });
        for path in [
            "Deploy/a",
            "deploy/a",
            "DEPLOY/b/c",
            "deploy./a",
            "x/KEY.PEM",
        ] {
            assert!(rules.refuse_path(path.as_bytes()).is_some(), "{path}");
        }
        assert!(rules.refuse_path(b"src/deploy.rs").is_none());
    }

    #[test]
    fn sensitive_files_are_known_in_every_spelling() {
        let rules = rules(|_| {});
        for path in [
            ".github/workflows/ci.yml",
            ".GitHub/workflows/ci.yml",
            ".github./workflows/ci.yml",
            ".gitlab-ci.yml",
            "sub/.gitlab-ci.yml",
            ".gitlab/ci/build.yml",
            ".forgejo/workflows/a.yaml",
            "Jenkinsfile",
            "ci/Jenkinsfile.release",
            "azure-pipelines.yml",
            "bitbucket-pipelines.yml",
            ".drone.yml",
            ".woodpecker/a.yml",
            "CODEOWNERS",
            "docs/codeowners",
            ".gitmodules",
            "GITMOD~1",
            "a/b/.gitattributes",
            ".husky/pre-commit",
            ".github",
            ".pre-commit-config.yaml",
            "renovate.json5",
        ] {
            assert!(rules.is_sensitive(path.as_bytes()), "{path}");
        }
        for path in [
            "src/github.rs",
            "README.md",
            ".gitignore",
            "docs/Jenkins.md",
            "drone.rs",
        ] {
            assert!(!rules.is_sensitive(path.as_bytes()), "{path}");
        }
        assert!(!rules.allows_sensitive(b".gitlab-ci.yml"));
    }

    #[test]
    fn globs_that_are_too_many_or_too_deep_are_refused() {
        let refused = |list: Vec<String>| {
            let rules = RepositoryRules {
                deny_paths: list,
                ..RepositoryRules::default()
            };
            RuleSet::new(&rules).expect_err("refused")
        };
        let list = "deny_paths";
        assert_eq!(
            refused(vec!["a".to_owned(); 257]),
            RuleError::TooMany { list }
        );
        assert_eq!(
            refused(vec!["a".repeat(1_025)]),
            RuleError::TooLong { list }
        );
        assert_eq!(refused(vec!["{".repeat(300)]), RuleError::TooDeep { list });
        assert!(matches!(
            refused(vec!["[".to_owned()]),
            RuleError::Invalid { .. }
        ));
    }

    #[test]
    fn no_rule_lifts_the_bounds_of_the_role() {
        let rules = rules(|rules| {
            rules.max_files = Some(u32::MAX);
            rules.max_file_bytes = Some(u64::MAX);
            rules.max_change_bytes = Some(u64::MAX);
        });
        assert_eq!(rules.max_files, MAX_CHANGED_FILES);
        assert_eq!(rules.max_file_bytes, MAX_FILE_BYTES);
        assert_eq!(rules.max_change_bytes, MAX_CONTENT_BYTES);
    }
}

//! Which branches are pushed to.

use cynode_api::{TaskId, promotion_limits::MAX_BRANCH_BYTES};

use super::rules::RuleSet;

/// Components after the task.
const MAX_COMPONENTS: usize = 4;

/// The branches that a promotion concerns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BranchNames<'a> {
    pub(crate) task: TaskId,
    /// To be pushed: `cynode/<task>/…`.
    pub(crate) branch: &'a str,
    /// The pull request's target.
    pub(crate) target: &'a str,
    pub(crate) default: Option<&'a str>,
}

impl BranchNames<'_> {
    /// Why the branch may not be pushed, if so.
    pub(crate) fn refuse(&self, rules: &RuleSet) -> Option<String> {
        let prefix = format!("cynode/{}/", self.task);
        let Some(rest) = self.branch.strip_prefix(&prefix) else {
            return Some(format!("the branch does not begin with '{prefix}'"));
        };
        if self.branch.len() > MAX_BRANCH_BYTES {
            return Some(format!("the branch has more than {MAX_BRANCH_BYTES} bytes"));
        }
        if !is_plain(rest) {
            return Some(
                "a component of the branch is empty, or has other characters than letters, digits, \
                 '-', '_' and '.', or begins or ends in one of these"
                    .to_owned(),
            );
        }
        let is_named = |other: &str| other.eq_ignore_ascii_case(self.branch);
        if self.default.is_some_and(is_named) {
            return Some("the branch is the default branch".to_owned());
        }
        if is_named(self.target) {
            return Some("the branch is the pull request's target".to_owned());
        }
        rules
            .protects(self.branch)
            .then(|| "the branch is protected".to_owned())
    }
}

/// A part of what git and the forges accept, without anything that one of them interprets.
fn is_plain(rest: &str) -> bool {
    let parts: Vec<&str> = rest.split('/').collect();
    parts.len() <= MAX_COMPONENTS
        && parts.iter().all(|part| {
            let is_letter = |byte: u8| byte.is_ascii_alphanumeric();
            part.bytes().next().is_some_and(is_letter)
                && part.bytes().last().is_some_and(is_letter)
                && part
                    .bytes()
                    .all(|byte| is_letter(byte) || matches!(byte, b'-' | b'_' | b'.'))
                && !part.contains("..")
                && !part.to_ascii_lowercase().ends_with(".lock")
        })
}

#[cfg(test)]
mod tests {
    use cynode_api::RepositoryRules;

    use super::*;

    #[test]
    fn only_a_branch_of_the_task_is_pushed() {
        let rules = RuleSet::new(&RepositoryRules {
            protected_branches: vec!["cynode/*/release*".to_owned()],
            ..RepositoryRules::default()
        })
        .expect("rules");
        let task = TaskId::generate();
        let refused = |branch: &str| {
            BranchNames {
                task,
                branch,
                target: "main",
                default: Some("main"),
            }
            .refuse(&rules)
            .is_some()
        };
        let other = TaskId::generate();
        for branch in [
            "main".to_owned(),
            "refs/heads/main".to_owned(),
            format!("cynode/{other}/x"),
            format!("cynode/{task}"),
            format!("cynode/{task}/"),
            format!("cynode/{task}/../main"),
            format!("cynode/{task}/a..b"),
            format!("cynode/{task}/a.lock"),
            format!("cynode/{task}/a/"),
            format!("cynode/{task}//a"),
            format!("cynode/{task}/-a"),
            format!("cynode/{task}/.a"),
            format!("cynode/{task}/a b"),
            format!("cynode/{task}/a:main"),
            format!("cynode/{task}/a^{{}}"),
            format!("cynode/{task}/@{{u}}"),
            format!("cynode/{task}/*"),
            format!("cynode/{task}/ä"),
            format!("cynode/{task}/a\n"),
            format!("cynode/{task}/{}", "a".repeat(200)),
            format!("cynode/{task}/a/b/c/d/e"),
            format!("Cynode/{task}/a"),
            format!("cynode/{task}/Release-1"),
        ] {
            assert!(refused(&branch), "{branch}");
        }
        assert!(!refused(&format!("cynode/{task}/fix-1.2_x/part")));
    }
}

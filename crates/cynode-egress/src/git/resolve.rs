//! Finds the commit of a reference, at the remote and with the repository's credential, each time.

use super::{
    change::{ObjectId, RemoteRef, UnexpectedOutput, is_branch_name, remote_refs},
    command::{GitCommand, GitRunner as _},
    mirror::{MAX_LINES_BYTES, Mirrors, RepositoryAccess, RepositoryError, remote_problem},
};

const HEADS: &str = "refs/heads/";
const TAGS: &str = "refs/tags/";

/// What a caller asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    Default,
    Commit(ObjectId),
    /// A branch, or a tag if there is no such branch.
    Short(String),
    /// `refs/heads/…` or `refs/tags/…`.
    Full(String),
}

/// A commit that the remote has under a head or a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResolvedCommit {
    pub(crate) commit: ObjectId,
    pub(crate) reference: String,
    pub(crate) default_branch: String,
}

/// What the remote says of its head and of the references that were asked for.
#[derive(Debug)]
struct Advertisement {
    /// `refs/heads/main`.
    head: Option<String>,
    refs: Vec<RemoteRef>,
}

impl Mirrors {
    /// The commit of a branch, a tag or a commit id; of the default branch without a reference.
    pub(crate) async fn resolve(
        &self,
        access: &RepositoryAccess,
        reference: Option<&str>,
    ) -> Result<ResolvedCommit, RepositoryError> {
        let wanted = wanted(reference)?;
        let registered = access.repository.default_branch.as_deref();
        let names = match (&wanted, registered) {
            (Wanted::Default, Some(branch)) => vec![format!("{HEADS}{branch}")],
            (Wanted::Default | Wanted::Commit(_), _) => Vec::new(),
            (Wanted::Short(name), _) => vec![format!("{HEADS}{name}"), format!("{TAGS}{name}")],
            (Wanted::Full(name), _) => vec![name.clone()],
        };
        let advertisement = self.advertised(access, &names).await?;
        let default_branch = registered.map(str::to_owned).or_else(|| {
            let head = advertisement.head.as_deref()?;
            head.strip_prefix(HEADS).map(str::to_owned)
        });
        let Some(default_branch) = default_branch else {
            return Err(RepositoryError::RefNotFound(
                "the repository is empty or names no default branch: push a first commit, or \
                 register its default branch"
                    .to_owned(),
            ));
        };
        let candidates = match wanted {
            Wanted::Commit(commit) => {
                self.fetch(access).await?;
                let reference = self.containing(&access.mirror, commit).await?;
                return Ok(ResolvedCommit {
                    commit,
                    reference,
                    default_branch,
                });
            }
            Wanted::Default if names.is_empty() => vec![format!("{HEADS}{default_branch}")],
            _ => names,
        };
        let found = candidates
            .iter()
            .find_map(|name| Some((name, advertisement.commit_of(name)?)));
        match found {
            Some((name, commit)) => Ok(ResolvedCommit {
                commit,
                reference: name.clone(),
                default_branch,
            }),
            None => Err(RepositoryError::RefNotFound(format!(
                "the repository has no {}",
                candidates.join(" and no ")
            ))),
        }
    }

    async fn advertised(
        &self,
        access: &RepositoryAccess,
        names: &[String],
    ) -> Result<Advertisement, RepositoryError> {
        let mut args = vec!["ls-remote", "--symref", "--", access.location.url(), "HEAD"];
        let peeled: Vec<String> = names
            .iter()
            .filter(|name| name.starts_with(TAGS))
            .map(|name| format!("{name}^{{}}"))
            .collect();
        args.extend(names.iter().chain(&peeled).map(String::as_str));
        let list = GitCommand {
            timeout: self.limits.command,
            remote: Some(access.remote.clone()),
            // An old server lists everything, and git filters it.
            ..self.command(args, MAX_LINES_BYTES)
        };
        self.runner.prepare(&access.mirror).await?;
        let output = self
            .runner
            .run(&access.mirror, list)
            .await
            .map_err(remote_problem)?;
        Ok(Advertisement::parse(&output.stdout)?)
    }
}

impl Advertisement {
    fn parse(output: &[u8]) -> Result<Self, UnexpectedOutput> {
        let (mut head, mut rest) = (None, Vec::new());
        for line in output.split_inclusive(|byte| *byte == b'\n') {
            match line.strip_prefix(b"ref: ") {
                Some(symbolic) => {
                    let text = std::str::from_utf8(symbolic)
                        .map_err(|_| UnexpectedOutput("a reference that is not UTF-8"))?;
                    if let Some(target) = text.trim_end_matches('\n').strip_suffix("\tHEAD") {
                        let branch = target.strip_prefix(HEADS);
                        head = branch
                            .filter(|branch| is_branch_name(branch))
                            .map(|_| target.to_owned());
                    }
                }
                None => rest.extend_from_slice(line),
            }
        }
        Ok(Self {
            head,
            refs: remote_refs(&rest)?,
        })
    }

    /// The commit of a reference by its whole name; of a tag that has its own object, the one that
    /// it points to.
    fn commit_of(&self, name: &str) -> Option<ObjectId> {
        let id_of = |name: &str| {
            self.refs
                .iter()
                .find(|reference| reference.name == name)
                .map(|reference| reference.id)
        };
        if let Some(head) = &self.head
            && head == name
            && let Some(id) = id_of("HEAD")
        {
            return Some(id);
        }
        id_of(&format!("{name}^{{}}")).or_else(|| id_of(name))
    }
}

fn wanted(reference: Option<&str>) -> Result<Wanted, RepositoryError> {
    let Some(reference) = reference else {
        return Ok(Wanted::Default);
    };
    if let Some(commit) = ObjectId::parse(reference) {
        return Ok(Wanted::Commit(commit));
    }
    let short = reference
        .strip_prefix(HEADS)
        .or_else(|| reference.strip_prefix(TAGS));
    if !is_branch_name(short.unwrap_or(reference)) {
        return Err(RepositoryError::RefNotFound(
            "the reference is not a valid name of a branch or tag, nor the whole id of a commit"
                .to_owned(),
        ));
    }
    Ok(match short {
        Some(_) => Wanted::Full(reference.to_owned()),
        None => Wanted::Short(reference.to_owned()),
    })
}

/// The branch that a seed has: that of the reference, or one of the tag's name.
pub(crate) fn branch_of(reference: &str) -> Option<&str> {
    reference
        .strip_prefix(HEADS)
        .or_else(|| reference.strip_prefix(TAGS))
        .filter(|name| is_branch_name(name))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::git::mirror::tests::Origin;

    async fn resolve(origin: &Origin, reference: Option<&str>) -> Result<ResolvedCommit, String> {
        origin
            .mirrors
            .resolve(&origin.access, reference)
            .await
            .map_err(|error| error.to_string())
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn branches_tags_and_commits_are_found_at_the_remote() {
        let origin = Origin::new().await;
        origin.write("a", "1");
        let first = origin.commit("one");
        origin.git(&["tag", "light"]);
        origin.git(&["tag", "-a", "heavy", "-m", "annotated"]);
        origin.git(&["branch", "topic/x"]);
        origin.write("a", "2");
        let second = origin.commit("two");
        origin.git(&["tag", "both"]);
        origin.git(&["branch", "both", &first.to_string()]);
        for (reference, commit, name) in [
            (None, second, "refs/heads/main"),
            (Some("main"), second, "refs/heads/main"),
            (Some("topic/x"), first, "refs/heads/topic/x"),
            (Some("refs/heads/topic/x"), first, "refs/heads/topic/x"),
            (Some("light"), first, "refs/tags/light"),
            (Some("heavy"), first, "refs/tags/heavy"),
            (Some("both"), first, "refs/heads/both"),
            (Some("refs/tags/both"), second, "refs/tags/both"),
        ] {
            let found = resolve(&origin, reference).await.expect("found");
            assert_eq!((found.commit, found.reference.as_str()), (commit, name));
            assert_eq!(found.default_branch, "main");
        }
        let by_id = resolve(&origin, Some(&first.to_string()))
            .await
            .expect("found");
        assert_eq!(by_id.commit, first);
        for missing in ["nowhere", "refs/heads/nowhere", "x", "refs/pull/1/head"] {
            assert!(
                resolve(&origin, Some(missing))
                    .await
                    .is_err_and(|error| error.contains("has no")),
                "{missing}"
            );
        }
        for invalid in [
            "--upload-pack=x",
            "a..b",
            "a b",
            "",
            "*",
            "HEAD^",
            "refs/heads/",
        ] {
            assert!(resolve(&origin, Some(invalid)).await.is_err(), "{invalid}");
        }
        let unknown = "0123456789012345678901234567890123456789";
        assert!(
            resolve(&origin, Some(unknown))
                .await
                .is_err_and(|error| error.contains("no branch or tag"))
        );
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_registered_default_branch_wins_and_an_empty_repository_has_none() {
        let mut origin = Origin::new().await;
        assert!(
            resolve(&origin, None)
                .await
                .is_err_and(|error| error.contains("empty"))
        );
        origin.write("a", "1");
        let first = origin.commit("one");
        origin.git(&["branch", "stable"]);
        origin.write("a", "2");
        origin.commit("two");
        let mut registered = (*origin.access.repository).clone();
        registered.default_branch = Some("stable".to_owned());
        origin.access.repository = Arc::new(registered);
        let found = resolve(&origin, None).await.expect("found");
        assert_eq!(found.commit, first);
        assert_eq!(found.default_branch, "stable");
    }
}

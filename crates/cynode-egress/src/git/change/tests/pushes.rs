//! One branch, one commit, once.

use super::*;
use crate::git::push::{PushError, PushOutcome, RemoteBranch, push};

struct RemoteRepository {
    repository: MirroredRepository,
    url: String,
    branch: String,
    first: ObjectId,
    second: ObjectId,
}

impl RemoteRepository {
    async fn new() -> Self {
        let repository = MirroredRepository::new().await;
        let base = repository.id("HEAD");
        let mut commits = Vec::new();
        for content in ["first\n", "second\n"] {
            let files = tar(&[("new", 0o644, content)]);
            let built = repository.build(ChangesetFormat::Files, files, base).await;
            commits.push(built.expect("built").commit);
        }
        let bare = repository.root.path().join("remote.git");
        repository.git(&["clone", "-q", "--bare", ".", &bare.to_string_lossy()]);
        Self {
            url: format!("file://{}", bare.display()),
            branch: format!("cynode/{}/x", repository.task),
            first: commits[0],
            second: commits[1],
            repository,
        }
    }

    async fn push(
        &self,
        commit: ObjectId,
        previous: Option<ObjectId>,
    ) -> Result<PushOutcome, PushError> {
        let to = RemoteBranch {
            access: &local_remote(),
            url: &self.url,
            branch: &self.branch,
        };
        push(&self.repository.runner, &mirror(), &to, commit, previous).await
    }

    fn bare(&self, args: &[&str]) -> String {
        git(&self.repository.root.path().join("remote.git"), args)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_branch_is_pushed_once_and_never_over_anybody() {
    let remote = RemoteRepository::new().await;
    let main = remote.bare(&["rev-parse", "main"]);
    let pushed = remote.push(remote.first, None).await.expect("pushed");
    assert!(pushed.pushed);
    let refs = remote.bare(&["for-each-ref", "--format=%(refname) %(objectname)"]);
    assert_eq!(
        refs,
        format!(
            "refs/heads/{} {}\nrefs/heads/main {main}",
            remote.branch, remote.first
        )
    );
    let again = remote.push(remote.first, None).await.expect("there");
    assert!(!again.pushed, "pushed twice");

    let refused = remote.push(remote.second, None).await.expect_err("taken");
    assert!(
        matches!(refused, PushError::BranchExists { current } if current == remote.first),
        "{refused:?}"
    );
    let other = remote.push(remote.second, Some(remote.second)).await;
    assert!(
        matches!(other, Err(PushError::BranchExists { .. })),
        "{other:?}"
    );
    let replaced = remote.push(remote.second, Some(remote.first)).await;
    assert!(replaced.expect("replaced").pushed);
    let tip = remote.bare(&["rev-parse", &remote.branch]);
    assert_eq!(tip, remote.second.to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_branch_whose_name_only_ends_alike_is_another_one() {
    let remote = RemoteRepository::new().await;
    let other = format!("refs/heads/other/refs/heads/{}", remote.branch);
    remote.bare(&["update-ref", &other, "main"]);
    let pushed = remote.push(remote.first, None).await.expect("pushed");
    assert!(pushed.pushed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_remote_that_refuses_is_reported() {
    let remote = RemoteRepository::new().await;
    let hook = remote
        .repository
        .root
        .path()
        .join("remote.git/hooks/pre-receive");
    fs_err::create_dir_all(hook.parent().expect("a parent")).expect("a directory");
    fs_err::write(&hook, "#!/bin/sh\necho no >&2\nexit 1\n").expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs_err::set_permissions(&hook, mode).expect("a mode");
    let refused = remote.push(remote.first, None).await;
    assert!(
        matches!(refused, Err(PushError::Rejected(_))),
        "{refused:?}"
    );
    fs_err::remove_file(hook).expect("removed");
    assert!(
        remote
            .push(remote.first, None)
            .await
            .expect("pushed")
            .pushed
    );
}

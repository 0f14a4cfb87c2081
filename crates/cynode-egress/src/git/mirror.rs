//! Bare copies of repositories, one for each repository and credential.
//!
//! Invariant: a mirror holds what one credential was shown, and only heads and tags. It is a cache:
//! losing one costs a fetch.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use cynode_api::{Repository, RepositoryId};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::{
    change::{ObjectId, UnexpectedOutput},
    command::{GitCommand, GitError, GitRunner as _, Mirror, RemoteAccess},
    runner::RunnerClient,
};
use crate::location::RepositoryLocation;

/// Packs of a mirror before they are joined. Each fetch adds one.
const MAX_PACKS: u64 = 32;
/// Output of a command that prints ids or a few lines.
pub(super) const MAX_LINES_BYTES: u64 = 64 * 1024;

/// Paths that differ between two commits.
const MAX_PATHS_BYTES: u64 = 64 * 1024 * 1024;

/// Why an operation on a repository failed. Nothing here quotes a remote: it may have been sent a
/// credential, and could send it back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RepositoryError {
    #[error("{0}")]
    RefNotFound(String),
    #[error("no branch or tag of the repository contains {0}")]
    NotAdvertised(ObjectId),
    #[error("{0}")]
    Unreachable(&'static str),
    /// Trying again would not help.
    #[error("{0}")]
    Refused(&'static str),
    #[error("{0}")]
    TooLarge(String),
    /// The commit can't be unpacked anywhere.
    #[error("the commit can't be unpacked: {0}")]
    Unusable(String),
    #[error("running git failed")]
    Git(#[from] GitError),
    #[error("reading the output of git failed")]
    Output(#[from] UnexpectedOutput),
}

/// A repository as one operation uses it: after the decision, with checked addresses.
#[derive(Clone, Debug)]
pub(crate) struct RepositoryAccess {
    pub(crate) repository: Arc<Repository>,
    pub(crate) location: RepositoryLocation,
    pub(crate) mirror: Mirror,
    pub(crate) remote: RemoteAccess,
}

/// The mirror of a repository and a credential.
pub(crate) fn mirror_of(repository: &Repository) -> Mirror {
    let credential = repository
        .credential_id
        .map_or_else(|| "none".to_owned(), |id| id.to_string());
    let id: RepositoryId = repository.id;
    Mirror(format!("{id}-{credential}"))
}

/// What mirrors may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MirrorLimits {
    pub(crate) bytes: u64,
    pub(crate) command: Duration,
    pub(crate) transfer: Duration,
}

/// All mirrors of the role.
pub(crate) struct Mirrors {
    pub(super) runner: RunnerClient,
    pub(super) limits: MirrorLimits,
    fetching: Mutex<HashMap<Mirror, Arc<tokio::sync::Mutex<()>>>>,
}

impl std::fmt::Debug for Mirrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mirrors").finish_non_exhaustive()
    }
}

impl Mirrors {
    pub(crate) fn new(runner: RunnerClient, limits: MirrorLimits) -> Self {
        Self {
            runner,
            limits,
            fetching: Mutex::default(),
        }
    }

    pub(crate) fn runner(&self) -> &RunnerClient {
        &self.runner
    }

    /// A command that dials nobody.
    pub(super) fn command<T: Into<OsString>>(
        &self,
        args: impl IntoIterator<Item = T>,
        max_output_bytes: u64,
    ) -> GitCommand {
        GitCommand {
            args: args.into_iter().map(Into::into).collect(),
            input: Bytes::new(),
            index: None,
            quarantine: None,
            max_output_bytes,
            timeout: self.limits.command,
            remote: None,
        }
    }

    /// Brings the mirror up to date with the remote's heads and tags.
    pub(crate) async fn fetch(&self, access: &RepositoryAccess) -> Result<(), RepositoryError> {
        let lock = {
            let mut fetching = self.fetching.lock();
            // Nobody waits for these.
            fetching.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(fetching.entry(access.mirror.clone()).or_default())
        };
        let Ok(_turn) = timeout(self.limits.transfer, lock.lock()).await else {
            return Err(RepositoryError::Unreachable(
                "other fetches of this repository take too long",
            ));
        };
        let mirror = &access.mirror;
        self.runner.prepare(mirror).await?;
        if self.runner.measure(mirror).await?.0 > self.limits.bytes {
            // Deleted branches may have left that much.
            self.runner.remove(mirror).await?;
            self.runner.prepare(mirror).await?;
        }
        let fetch = GitCommand {
            timeout: self.limits.transfer,
            remote: Some(access.remote.clone()),
            ..self.command(
                [
                    "fetch",
                    "--quiet",
                    "--prune",
                    "--no-tags",
                    "--no-write-fetch-head",
                    "--no-auto-maintenance",
                    "--no-recurse-submodules",
                    "--refmap=",
                    "--",
                    access.location.url(),
                    "+refs/heads/*:refs/heads/*",
                    "+refs/tags/*:refs/tags/*",
                ],
                MAX_LINES_BYTES,
            )
        };
        self.runner
            .run(mirror, fetch)
            .await
            .map_err(remote_problem)?;
        let (bytes, packs) = self.runner.measure(mirror).await?;
        if bytes > self.limits.bytes {
            self.runner.remove(mirror).await?;
            return Err(RepositoryError::TooLarge(format!(
                "the repository has more than {} bytes (egress.git.mirror_bytes)",
                self.limits.bytes
            )));
        }
        if packs > MAX_PACKS {
            // Unreachable objects stay: a promotion's commit has no branch before it is pushed.
            let repack = GitCommand {
                timeout: self.limits.transfer,
                ..self.command(["repack", "-A", "-d", "-q", "-n"], MAX_LINES_BYTES)
            };
            if let Err(error) = self.runner.run(mirror, repack).await {
                tracing::warn!(%error, "Joining the packs of a mirror failed.");
            }
        }
        Ok(())
    }

    /// Makes sure that there is a mirror to run commands in.
    pub(crate) async fn prepare(&self, access: &RepositoryAccess) -> Result<(), RepositoryError> {
        Ok(self.runner.prepare(&access.mirror).await?)
    }

    /// The commit of a branch, as of the last fetch.
    pub(crate) async fn head_of(
        &self,
        mirror: &Mirror,
        branch: &str,
    ) -> Result<ObjectId, RepositoryError> {
        let name = format!("refs/heads/{branch}^{{commit}}");
        self.single_id(mirror, ["rev-parse", "--verify", "--quiet", &name])
            .await?
            .ok_or_else(|| {
                RepositoryError::RefNotFound(format!("the repository has no branch '{branch}'"))
            })
    }

    /// The only parent of a commit.
    pub(crate) async fn parent_of(
        &self,
        mirror: &Mirror,
        commit: ObjectId,
    ) -> Result<Option<ObjectId>, RepositoryError> {
        let name = format!("{commit}^1");
        self.single_id(mirror, ["rev-parse", "--verify", "--quiet", &name])
            .await
    }

    /// Whether a commit is another or one of its ancestors.
    pub(crate) async fn is_ancestor(
        &self,
        mirror: &Mirror,
        ancestor: ObjectId,
        commit: ObjectId,
    ) -> Result<bool, RepositoryError> {
        let (ancestor, commit) = (ancestor.to_string(), commit.to_string());
        let args = ["merge-base", "--is-ancestor", &ancestor, &commit];
        match self
            .runner
            .run(mirror, self.command(args, MAX_LINES_BYTES))
            .await
        {
            Ok(_) => Ok(true),
            // 128: there is no such commit.
            Err(GitError::Exit { code: 1 | 128, .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The paths that differ between two commits.
    pub(crate) async fn changed_paths(
        &self,
        mirror: &Mirror,
        old: ObjectId,
        new: ObjectId,
    ) -> Result<HashSet<Vec<u8>>, RepositoryError> {
        let (old, new) = (old.to_string(), new.to_string());
        let args = [
            "diff-tree",
            "-r",
            "-z",
            "--name-only",
            "--no-renames",
            &old,
            &new,
        ];
        let output = self
            .runner
            .run(mirror, self.command(args, MAX_PATHS_BYTES))
            .await?;
        let paths = output.stdout.split(|byte| *byte == 0);
        Ok(paths
            .filter(|path| !path.is_empty())
            .map(<[u8]>::to_vec)
            .collect())
    }

    async fn single_id<const N: usize>(
        &self,
        mirror: &Mirror,
        args: [&str; N],
    ) -> Result<Option<ObjectId>, RepositoryError> {
        match self
            .runner
            .run(mirror, self.command(args, MAX_LINES_BYTES))
            .await
        {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout);
                Ok(ObjectId::parse(text.trim()))
            }
            Err(GitError::Exit { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// A head or tag of the mirror that contains the commit.
    pub(crate) async fn containing(
        &self,
        mirror: &Mirror,
        commit: ObjectId,
    ) -> Result<String, RepositoryError> {
        let contains = format!("--contains={commit}");
        let args = [
            "for-each-ref",
            "--count=1",
            "--format=%(refname)",
            &contains,
            "refs/heads",
            "refs/tags",
        ];
        let output = match self
            .runner
            .run(mirror, self.command(args, MAX_LINES_BYTES))
            .await
        {
            Ok(output) => output,
            // Not there, or not a commit.
            Err(GitError::Exit { .. }) => return Err(RepositoryError::NotAdvertised(commit)),
            Err(error) => return Err(error.into()),
        };
        let name = String::from_utf8_lossy(&output.stdout);
        match name.trim_end() {
            "" => Err(RepositoryError::NotAdvertised(commit)),
            name => Ok(name.to_owned()),
        }
    }
}

/// Why a command failed that dialled a remote: one of a few sentences of our own.
pub(crate) fn remote_problem(error: GitError) -> RepositoryError {
    let GitError::Exit { stderr, .. } = &error else {
        return match error {
            GitError::Timeout { .. } => {
                RepositoryError::Unreachable("the remote did not finish in time")
            }
            GitError::TooMuchOutput { .. } => {
                RepositoryError::TooLarge("the remote lists too many branches and tags".to_owned())
            }
            GitError::Killed { .. } => RepositoryError::TooLarge(
                "git needed more than its limits of memory, time or file size permit".to_owned(),
            ),
            other => RepositoryError::Git(other),
        };
    };
    let text = stderr.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
    let refused = if has(&["redirect"]) {
        "the remote redirects to another address, and redirects are not followed: register the \
         repository's final URL"
    } else if has(&[
        "authentication failed",
        "could not read username",
        "could not read password",
        "returned error: 401",
        "returned error: 403",
        "access denied",
    ]) {
        "the remote refuses the credential, or requires one: see 'cynode credential list'"
    } else if has(&[
        "returned error: 404",
        "not found",
        "does not appear to be a git",
    ]) {
        "the remote has no such repository, or hides it from this credential"
    } else if has(&["certificate", "ssl", "tls", "gnutls"]) {
        "the remote's certificate is not trusted: register the repository with its 'ca'"
    } else if has(&["fsck", "unpack failed", "index-pack", "bad object"]) {
        "the remote sent objects that fail git's checks, or more than egress.git.mirror_bytes"
    } else if has(&["remote rejected", "hook declined"]) {
        "the remote's own rules refuse the push"
    } else if has(&[
        "file too large",
        "file size limit",
        "out of memory",
        "mmap failed",
    ]) {
        return RepositoryError::TooLarge(
            "the repository needs more than egress.git.mirror_bytes or egress.git.memory_bytes"
                .to_owned(),
        );
    } else if has(&[
        "could not resolve",
        "failed to connect",
        "connection",
        "timed out",
        "low speed",
    ]) {
        return RepositoryError::Unreachable("the remote does not answer");
    } else {
        return RepositoryError::Unreachable("git could not talk to the remote");
    };
    RepositoryError::Refused(refused)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::{Path, PathBuf};

    use cynode_api::ProjectId;

    use super::*;
    use crate::{
        git::runner::{LocalRunner, git, local_remote},
        state::testing::repository,
    };

    /// A repository on this machine and a role's mirrors.
    pub(crate) struct Origin {
        pub(crate) root: tempfile::TempDir,
        pub(crate) path: PathBuf,
        pub(crate) mirrors: Arc<Mirrors>,
        pub(crate) access: RepositoryAccess,
    }

    impl Origin {
        pub(crate) async fn new() -> Self {
            let root = tempfile::tempdir().expect("a directory");
            let path = root.path().join("origin");
            fs_err::create_dir(&path).expect("made");
            git(&path, &["init", "--quiet"]);
            let url = format!("file://{}", path.display());
            let registered = repository(ProjectId::generate(), &url);
            let runner = LocalRunner::new(&root.path().join("role")).await;
            let limits = MirrorLimits {
                bytes: 64 << 20,
                command: Duration::from_secs(60),
                transfer: Duration::from_secs(60),
            };
            Self {
                mirrors: Arc::new(Mirrors::new(runner.client().clone(), limits)),
                access: RepositoryAccess {
                    location: RepositoryLocation::parse(&url).expect("a location"),
                    mirror: mirror_of(&registered),
                    repository: Arc::new(registered),
                    remote: local_remote(),
                },
                path,
                root,
            }
        }

        pub(crate) fn git(&self, args: &[&str]) -> String {
            git(&self.path, args)
        }

        pub(crate) fn write(&self, path: &str, content: impl AsRef<[u8]>) {
            let path = self.path.join(path);
            fs_err::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs_err::write(path, content).expect("written");
        }

        /// Commits everything, and returns the commit.
        pub(crate) fn commit(&self, message: &str) -> ObjectId {
            self.git(&["add", "--all", "--force"]);
            self.git(&["commit", "--quiet", "--allow-empty", "-m", message]);
            ObjectId::parse(&self.git(&["rev-parse", "HEAD"])).expect("an id")
        }

        pub(crate) fn mirror_path(&self) -> PathBuf {
            self.root
                .path()
                .join("role/mirrors")
                .join(format!("{}.git", self.access.mirror.0))
        }
    }

    fn refs(path: &Path) -> Vec<String> {
        git(path, &["for-each-ref", "--format=%(refname)"])
            .lines()
            .map(str::to_owned)
            .collect()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_fetch_brings_heads_and_tags_only_and_drops_those_that_are_gone() {
        let origin = Origin::new().await;
        origin.write("a", "1");
        let first = origin.commit("one");
        origin.git(&["tag", "v1"]);
        origin.git(&["branch", "side/one"]);
        for special in ["refs/pull/1/head", "refs/replace/x", "refs/notes/commits"] {
            origin.git(&["update-ref", special, &first.to_string()]);
        }
        origin.mirrors.fetch(&origin.access).await.expect("fetched");
        assert_eq!(
            refs(&origin.mirror_path()),
            ["refs/heads/main", "refs/heads/side/one", "refs/tags/v1"]
        );
        // A branch in the place of a directory of branches.
        origin.git(&["branch", "-D", "side/one"]);
        origin.git(&["branch", "side"]);
        origin.git(&["tag", "-d", "v1"]);
        origin.mirrors.fetch(&origin.access).await.expect("fetched");
        assert_eq!(
            refs(&origin.mirror_path()),
            ["refs/heads/main", "refs/heads/side"]
        );
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn only_commits_that_a_head_or_tag_reaches_are_advertised() {
        let origin = Origin::new().await;
        origin.write("a", "1");
        let first = origin.commit("one");
        origin.write("a", "2");
        let second = origin.commit("two");
        origin.git(&["reset", "--quiet", "--hard", &first.to_string()]);
        origin.git(&["update-ref", "refs/pull/1/head", &second.to_string()]);
        origin.mirrors.fetch(&origin.access).await.expect("fetched");
        let containing = async |commit| {
            origin
                .mirrors
                .containing(&origin.access.mirror, commit)
                .await
        };
        assert_eq!(containing(first).await.expect("there"), "refs/heads/main");
        assert!(matches!(
            containing(second).await,
            Err(RepositoryError::NotAdvertised(_))
        ));
        // It was fetched once, and then its branch was deleted.
        origin.git(&["branch", "gone", &second.to_string()]);
        origin.mirrors.fetch(&origin.access).await.expect("fetched");
        assert!(containing(second).await.is_ok());
        origin.git(&["branch", "-D", "gone"]);
        origin.mirrors.fetch(&origin.access).await.expect("fetched");
        assert!(matches!(
            containing(second).await,
            Err(RepositoryError::NotAdvertised(_))
        ));
        let tree = ObjectId::parse(&origin.git(&["rev-parse", "HEAD^{tree}"])).expect("an id");
        assert!(matches!(
            containing(tree).await,
            Err(RepositoryError::NotAdvertised(_))
        ));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_repository_that_is_too_large_leaves_nothing() {
        let origin = Origin::new().await;
        origin.write("a", "1");
        origin.commit("one");
        let small = Mirrors::new(
            origin.mirrors.runner().clone(),
            MirrorLimits {
                bytes: 100,
                ..origin.mirrors.limits
            },
        );
        assert!(matches!(
            small.fetch(&origin.access).await,
            Err(RepositoryError::TooLarge(_))
        ));
        assert!(!origin.mirror_path().exists());
        origin.mirrors.fetch(&origin.access).await.expect("fetched");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn packs_of_many_fetches_are_joined_and_unreferenced_commits_stay() {
        let origin = Origin::new().await;
        origin.write("a", "0");
        origin.commit("zero");
        origin.mirrors.fetch(&origin.access).await.expect("fetched");
        let mirror = &origin.access.mirror;
        let built = GitCommand {
            input: Bytes::from_static(b"built"),
            ..origin
                .mirrors
                .command(["hash-object", "-w", "--stdin"], 100)
        };
        let built = origin
            .mirrors
            .runner
            .run(mirror, built)
            .await
            .expect("stored");
        let built = String::from_utf8(built.stdout).expect("an id");
        for number in 1..=MAX_PACKS {
            origin.write("a", number.to_string());
            origin.commit("more");
            origin.mirrors.fetch(&origin.access).await.expect("fetched");
        }
        let (_, packs) = origin.mirrors.runner.measure(mirror).await.expect("read");
        assert_eq!(packs, 1);
        let read = origin
            .mirrors
            .command(["cat-file", "-e", built.trim()], 100);
        origin.mirrors.runner.run(mirror, read).await.expect("kept");
    }

    #[test]
    fn what_a_remote_says_is_never_repeated() {
        let problem = |stderr: &str| {
            remote_problem(GitError::Exit {
                command: "fetch".to_owned(),
                code: 128,
                stderr: stderr.to_owned(),
            })
            .to_string()
        };
        for (stderr, expected) in [
            (
                "fatal: remote error: planted-secret-value",
                "could not talk",
            ),
            (
                "fatal: Authentication failed for 'https://git.example/planted-secret-value'",
                "refuses the credential",
            ),
            (
                "fatal: could not read Username for 'https://git.example': terminal prompts \
                 disabled",
                "requires one",
            ),
            (
                "fatal: unable to access 'https://x/': The requested URL returned error: 404",
                "no such repository",
            ),
            (
                "fatal: unable to access 'https://x/': SSL certificate problem",
                "certificate is not trusted",
            ),
            (
                "fatal: unable to update url base from redirection",
                "redirects are not followed",
            ),
            (
                "fatal: unable to access 'https://x/': Failed to connect to x port 443",
                "does not answer",
            ),
        ] {
            let shown = problem(stderr);
            assert!(shown.contains(expected), "{stderr}: {shown}");
            assert!(!shown.contains("planted"), "{shown}");
        }
    }
}

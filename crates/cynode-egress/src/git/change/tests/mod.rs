//! Tests with real git: a person's repository, and a mirror of it.

mod building;
mod bundles;
mod inspection;
mod pushes;

use std::path::PathBuf;

use bytes::Bytes;
use cynode_api::{ChangesetFormat, PromotionId, TaskId};

use super::{BuiltChange, ChangeError, ChangeRequest, CommitText, ObjectId, build};
use crate::git::{
    command::{GitCommand, GitRunner as _, RemoteAccess},
    runner::{LocalRunner, git, local_remote, mirror},
};

/// A repository with a mirror.
struct MirroredRepository {
    root: tempfile::TempDir,
    runner: LocalRunner,
    task: TaskId,
    promotion: PromotionId,
}

/// Contents of the first commit: files of every kind.
const NUMBERS: &str = "one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\nten\n";

impl MirroredRepository {
    async fn new() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let runner = LocalRunner::new(root.path()).await;
        runner.prepare(&mirror()).await.expect("prepared");
        let repository = Self {
            root,
            runner,
            task: TaskId::generate(),
            promotion: PromotionId::generate(),
        };
        fs_err::create_dir(repository.work()).expect("a directory");
        repository.git(&["init", "-q"]);
        repository.write("numbers", NUMBERS);
        repository.write("src/main.rs", "fn main() {}\n");
        repository.write("old/name.txt", &"a line of text\n".repeat(20));
        repository.write("gone", "gone\n");
        repository.write("image", "\0\u{1}\u{2}binary");
        repository.commit("first");
        repository.fetch().await;
        repository
    }

    fn work(&self) -> PathBuf {
        self.root.path().join("work")
    }

    fn git(&self, args: &[&str]) -> String {
        git(&self.work(), args)
    }

    fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.work().join(path);
        fs_err::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs_err::write(path, content).expect("written");
    }

    fn commit(&self, message: &str) -> ObjectId {
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "--allow-empty", "-m", message]);
        self.id("HEAD")
    }

    fn id(&self, name: &str) -> ObjectId {
        ObjectId::parse(&self.git(&["rev-parse", name])).expect("an id")
    }

    /// Takes all branches into the mirror.
    async fn fetch(&self) {
        let url = format!("file://{}", self.work().display());
        let refs = "+refs/heads/*:refs/heads/*";
        self.in_mirror(&["fetch", "-q", "--", &url, refs], Some(local_remote()))
            .await;
    }

    async fn in_mirror(&self, args: &[&str], remote: Option<RemoteAccess>) -> String {
        let command = GitCommand {
            args: args.iter().map(Into::into).collect(),
            input: Bytes::new(),
            index: None,
            quarantine: None,
            max_output_bytes: 1 << 20,
            timeout: std::time::Duration::from_secs(30),
            remote,
        };
        let output = self.runner.run(&mirror(), command).await.expect("run");
        String::from_utf8_lossy(&output.stdout)
            .trim_end()
            .to_owned()
    }

    async fn build(
        &self,
        format: ChangesetFormat,
        bytes: impl Into<Bytes>,
        base: ObjectId,
    ) -> Result<BuiltChange, ChangeError> {
        let request = ChangeRequest {
            format,
            bytes: bytes.into(),
            base,
            commit: CommitText {
                task: self.task,
                promotion: self.promotion,
                author: "Ada's agent",
                message: "Change it, fixes #12",
                at: 1_700_000_000,
            },
        };
        build(&self.runner, &mirror(), &request).await
    }

    async fn patch(&self, patch: &str, base: ObjectId) -> Result<BuiltChange, ChangeError> {
        let bytes = Bytes::copy_from_slice(patch.as_bytes());
        self.build(ChangesetFormat::Patch, bytes, base).await
    }

    /// The uncommitted changes as git's own diff. Its lines must all end.
    fn diff(&self) -> String {
        self.git(&["add", "-A"]);
        format!(
            "{}\n\n",
            self.git(&["diff", "--cached", "--binary", "-M", "-C"])
        )
    }
}

/// A tar of files: names ending in `@` are symbolic links to their content.
fn tar(files: &[(&str, u32, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, mode, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(*mode);
        if let Some(path) = path.strip_suffix('@') {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            builder
                .append_link(&mut header, path, content)
                .expect("appended");
        } else {
            header.set_size(content.len() as u64);
            builder
                .append_data(&mut header, path, content.as_bytes())
                .expect("appended");
        }
    }
    builder.into_inner().expect("a tar")
}

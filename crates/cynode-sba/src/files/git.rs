//! Exports the workspace's changes as a git diff, against a commit or against a snapshot.
//!
//! The snapshot is a git repository outside the workspace that holds everything the session began
//! with, so that changes can be exported whether or not the workspace is a repository. Files of
//! repositories within the workspace are files like all others; only `.git` itself is left out.
//!
//! git runs inside the sandbox with its rights, so the repository's configuration adds no danger
//! beyond that of the sandbox's code; it must not corrupt the result, though. Invariants: the
//! user's own index and objects stay untouched (a private copy of the index takes the untracked
//! files, without their contents), and git never prompts or waits for input.

mod untracked;

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use cynode_api::ErrorCode;
use cynode_sba_proto::{AgentError, BROUGHT, BROUGHT_NOTHING, MAX_DATA, Reply};
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};

use super::{
    error::{Failure, FailureContext, Outcome, escaped},
    path::{self, Files},
    staged::with_hidden_name,
    tree::remove_tree,
};
use crate::peer::Peer;

/// Overrides settings that could hang git, run programs, or change the diff's format.
const SETTINGS: &[&str] = &[
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.untrackedCache=false",
    "core.quotePath=true",
    "core.pager=cat",
    // Names that only other systems take for `.git` must not fail the command.
    "core.protectHFS=false",
    "core.protectNTFS=false",
    "diff.orderFile=/dev/null",
    "submodule.recurse=false",
    "safe.directory=*",
];
const DIFF: &[&str] = &[
    "diff",
    "--binary",
    "--full-index",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-relative",
    "--find-renames",
    "--submodule=short",
    // Uncommitted changes in a submodule can't be written as a change of the submodule.
    "--ignore-submodules=dirty",
    "--src-prefix=a/",
    "--dst-prefix=b/",
];
/// The part of git's error output that is reported.
const MAX_STDERR_BYTES: usize = 2_048;
const MAX_BASE_BYTES: usize = 1_024;
/// The tree of the snapshot, in its own repository.
const SNAPSHOT_REF: &str = "refs/cynode/brought";
/// Everything but `.git`, in all spellings that git refuses or that could replace it elsewhere.
const ALL_BUT_GIT: &[&str] = &[
    "--",
    ".",
    ":(exclude,icase,glob)**/.git",
    ":(exclude,icase,glob)**/.git/**",
    ":(exclude,icase,glob)**/git~1",
    ":(exclude,icase,glob)**/git~1/**",
];
/// Take precedence over the attributes of the workspace.
const SNAPSHOT_ATTRIBUTES: &[u8] = b"* -text -filter -ident !working-tree-encoding\n";

impl Files {
    pub(super) fn export_patch(&self, base: Option<&str>, peer: &mut Peer) -> Outcome<()> {
        if let Some(base) = base
            && (base.is_empty()
                || base.len() > MAX_BASE_BYTES
                || base.starts_with('-')
                || base.chars().any(char::is_control))
        {
            return Err(Failure::invalid(format!(
                "'{}' is not the name of a commit",
                escaped(base.as_bytes())
            )));
        }
        match base {
            Some(BROUGHT) => return self.export_since_snapshot(false, peer),
            Some(BROUGHT_NOTHING) => return self.export_since_snapshot(true, peer),
            _ => {}
        }
        let git = Git::new(&self.root, None)?;
        if git
            .line(&["rev-parse", "--is-inside-work-tree"])?
            .is_none_or(|line| line != "true")
        {
            return Err(Failure::new(
                ErrorCode::NotARepository,
                format!(
                    "{} is not a git repository with a work tree",
                    self.root.display()
                ),
            ));
        }
        let base = git.base(base)?;
        git.copy_index()?;
        git.add_untracked()?;
        git.diff(&base, peer)
    }

    /// Exports what changed since the snapshot. Without one, everything is new if the session is
    /// known to have begun empty. A failed snapshot shows that it did not.
    fn export_since_snapshot(&self, began_empty: bool, peer: &mut Peer) -> Outcome<()> {
        let git = self.snapshot_git()?;
        let Some(base) = git.line(&["rev-parse", "--verify", "--quiet", SNAPSHOT_REF])? else {
            let failure = self.snapshot_failure();
            if began_empty && failure.is_none() {
                return self.export_everything(peer);
            }
            return Err(Failure::new(
                ErrorCode::NotARepository,
                format!(
                    "{} has no snapshot: {}",
                    self.root.display(),
                    failure.unwrap_or_else(|| {
                        "the session began with the workspace of another, which has none".to_owned()
                    })
                ),
            ));
        };
        git.copy_index()?;
        git.add_untracked()?;
        git.diff(&base, peer)
    }

    /// Compares with the empty tree of a repository that lasts as long as the export.
    fn export_everything(&self, peer: &mut Peer) -> Outcome<()> {
        let scratch = ScratchDirectory::new()?;
        let repository = scratch.path.join("empty.git");
        let git = Git::new(&self.root, Some(&repository))?;
        git.init(&repository)?;
        let base = git
            .line(&["hash-object", "-t", "tree", "-w", "/dev/null"])?
            .ok_or_else(|| Failure::new(ErrorCode::Internal, "git hash-object failed"))?;
        git.add_untracked()?;
        git.diff(&base, peer)
    }

    /// Stores the workspace as it is now. Replaces an earlier snapshot.
    pub(super) fn take_snapshot(&self) -> Outcome<()> {
        let mut git = self.snapshot_git()?;
        // Later exports start from this index, which knows the files by their stat data.
        git.index = self.snapshot.join("index");
        self.remove_snapshot();
        let taken = self.store_snapshot(&git);
        if let Err(failure) = &taken {
            // Half a snapshot would only take space.
            self.remove_snapshot();
            self.record_snapshot_failure(failure);
        }
        taken
    }

    /// Keeps the reason for later exports, which fail without a snapshot.
    fn record_snapshot_failure(&self, failure: &Failure) {
        let (Failure::Refused(refused), Some(parent)) = (failure, self.snapshot.parent()) else {
            return;
        };
        // Without the file, the message of later exports is less precise.
        let _recorded = path::make_directories(parent).and_then(|_| {
            let path = self.snapshot_failure_path();
            create(&path)?
                .write_all(refused.message.as_bytes())
                .doing("writing", path::bytes(&path))
        });
    }

    /// Why the snapshot could not be taken, if it was tried.
    fn snapshot_failure(&self) -> Option<String> {
        let (file, _) = path::open_file(&self.snapshot_failure_path()).ok()?;
        let mut text = Vec::new();
        file.take(MAX_STDERR_BYTES as u64)
            .read_to_end(&mut text)
            .ok()?;
        Some(escaped(&text))
    }

    fn snapshot_failure_path(&self) -> PathBuf {
        self.snapshot.with_extension("failure")
    }

    fn store_snapshot(&self, git: &Git<'_>) -> Outcome<()> {
        if let Some(parent) = self.snapshot.parent() {
            path::make_directories(parent)?;
        }
        git.init(&self.snapshot)?;
        git.enter_repositories(false)?;
        // The low threshold makes git write one pack instead of a file for each object.
        let add = ["-c", "core.bigFileThreshold=1", "add", "--all", "--force"];
        git.run(&[&add, ALL_BUT_GIT].concat())?;
        let tree = git
            .line(&["write-tree"])?
            .ok_or_else(|| Failure::new(ErrorCode::Internal, "git write-tree failed"))?;
        git.run(&["update-ref", SNAPSHOT_REF, &tree])
    }

    fn snapshot_git(&self) -> Outcome<Git<'_>> {
        Git::new(&self.root, Some(&self.snapshot))
    }

    fn remove_snapshot(&self) {
        remove_directory(&self.snapshot);
    }
}

struct Git<'a> {
    root: &'a Path,
    /// The repository's directory, if it is not the one that `root` belongs to.
    repository: Option<&'a Path>,
    /// A private copy in the scratch directory, unless the repository is ours.
    index: PathBuf,
    scratch: ScratchDirectory,
}

impl<'a> Git<'a> {
    fn new(root: &'a Path, repository: Option<&'a Path>) -> Outcome<Self> {
        let scratch = ScratchDirectory::new()?;
        Ok(Self {
            root,
            repository,
            index: scratch.path.join("index"),
            scratch,
        })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("git");
        command
            .env_clear()
            .current_dir(self.root)
            .stdin(Stdio::null());
        for name in ["PATH", "HOME"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if std::env::var_os("PATH").is_none() {
            command.env(
                "PATH",
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            );
        }
        command
            .env("LC_ALL", "C")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("GIT_OPTIONAL_LOCKS", "0")
            .env("GIT_ATTR_NOSYSTEM", "1")
            .env("GIT_NO_LAZY_FETCH", "1")
            .env("GIT_INDEX_FILE", &self.index);
        if let Some(parent_directory) = self.root.parent() {
            command.env("GIT_CEILING_DIRECTORIES", parent_directory);
        }
        if let Some(repository) = self.repository {
            command
                .env("GIT_DIR", repository)
                .env("GIT_WORK_TREE", self.root);
        }
        for setting in SETTINGS {
            command.args(["-c", setting]);
        }
        command.args(arguments);
        command
    }

    /// Makes a repository outside of the work tree.
    fn init(&self, repository: &Path) -> Outcome<()> {
        self.run(&["init", "--quiet", "--template="])?;
        let info = repository.join("info");
        path::make_directories(&info)?;
        // Attributes of the workspace must not convert contents.
        let attributes = info.join("attributes");
        create(&attributes)?
            .write_all(SNAPSHOT_ATTRIBUTES)
            .doing("writing", path::bytes(&attributes))
    }

    fn spawn(&self, arguments: &[&str]) -> Outcome<Child> {
        self.start(self.command(arguments).stdout(Stdio::piped()))
    }

    fn start(&self, command: &mut Command) -> Outcome<Child> {
        command
            .stderr(self.scratch.create("stderr")?)
            .spawn()
            .map_err(|error| {
                let mut failure = AgentError::new(
                    ErrorCode::ExecFailed,
                    format!("git can't be started in this sandbox: {error}"),
                );
                failure.errno =
                    (error.kind() == io::ErrorKind::NotFound).then(|| "ENOENT".to_owned());
                Failure::Refused(failure)
            })
    }

    /// An error with git's output.
    fn git_failure(&self, doing: &str, status: ExitStatus) -> Failure {
        let mut text = vec![0; MAX_STDERR_BYTES];
        let read = self
            .scratch
            .open("stderr")
            .and_then(|mut file| file.read(&mut text).doing("reading", b"stderr"));
        text.truncate(read.unwrap_or(0));
        Failure::new(
            ErrorCode::Internal,
            format!(
                "git {doing} failed ({status}): {}",
                escaped(text.trim_ascii())
            ),
        )
    }

    /// The output of a command without its trailing newline; `None` if the command fails.
    fn line(&self, arguments: &[&str]) -> Outcome<Option<String>> {
        let mut child = self.spawn(arguments)?;
        let mut output = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            stdout
                .take(MAX_DATA as u64)
                .read_to_end(&mut output)
                .doing("reading from", b"git")?;
        }
        let status = child.wait().doing("waiting for", b"git")?;
        Ok(status
            .success()
            .then(|| String::from_utf8_lossy(&output).trim_end().to_owned()))
    }

    /// Runs a command without output.
    fn run(&self, arguments: &[&str]) -> Outcome<()> {
        self.run_with(Stdio::null(), arguments)
    }

    /// Runs a command without output.
    fn run_with(&self, stdin: Stdio, arguments: &[&str]) -> Outcome<()> {
        let mut command = self.command(arguments);
        let mut child = self.start(command.stdin(stdin).stdout(Stdio::null()))?;
        let status = child.wait().doing("waiting for", b"git")?;
        if status.success() {
            Ok(())
        } else {
            Err(self.git_failure(&arguments.join(" "), status))
        }
    }

    /// The hash of the tree to compare with.
    fn base(&self, base: Option<&str>) -> Outcome<String> {
        let name = base.unwrap_or("HEAD");
        if let Some(tree) = self.line(&[
            "rev-parse",
            "--verify",
            "--quiet",
            &format!("{name}^{{tree}}"),
        ])? {
            return Ok(tree);
        }
        if base.is_none_or(|base| base == "HEAD")
            && self.line(&["symbolic-ref", "--quiet", "HEAD"])?.is_some()
        {
            // No commit yet: everything is new.
            if let Some(empty) = self.line(&["hash-object", "-t", "tree", "/dev/null"])? {
                return Ok(empty);
            }
        }
        Err(Failure::invalid(format!(
            "the repository has no commit '{}'",
            escaped(name.as_bytes())
        )))
    }

    fn copy_index(&self) -> Outcome<()> {
        let Some(directory) = self.line(&["rev-parse", "--absolute-git-dir"])? else {
            return Ok(());
        };
        let index = Path::new(&directory).join("index");
        if path::stat_if_any(&index)?.is_none() {
            return Ok(());
        }
        let (mut from, _) = path::open_file(&index)?;
        let mut to = self.scratch.create("index")?;
        io::copy(&mut from, &mut to).doing("copying", path::bytes(&index))?;
        Ok(())
    }

    fn diff(&self, base: &str, peer: &mut Peer) -> Outcome<()> {
        let mut child = self.spawn(&[DIFF, &[base], ALL_BUT_GIT].concat())?;
        let sent = match child.stdout.take() {
            Some(stdout) => send(stdout, peer),
            None => Ok(()),
        };
        if sent.is_err() {
            // It may have exited already.
            let _killed = child.kill();
        }
        let status = child.wait().doing("waiting for", b"git")?;
        sent?;
        if !status.success() {
            return Err(self.git_failure("diff", status));
        }
        peer.end().map_err(Failure::Connection)
    }
}

fn send(mut stdout: impl io::Read, peer: &mut Peer) -> Outcome<()> {
    peer.reply(&Reply::Body).map_err(Failure::Connection)?;
    let mut buffer = vec![0; MAX_DATA];
    loop {
        match stdout.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => peer.data(&buffer[..count]).map_err(Failure::Connection)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failure::io(&error, "reading from", b"git")),
        }
    }
}

/// A private directory for the index and git's error output.
struct ScratchDirectory {
    path: PathBuf,
}

impl ScratchDirectory {
    fn new() -> Outcome<Self> {
        // Outside the work tree, where the diff would include it.
        let mut last = None;
        for parent in [
            Path::new("/tmp"),
            Path::new("/dev/shm"),
            Path::new("/var/tmp"),
        ] {
            match with_hidden_name(|name| mkdirat(CWD, parent.join(name), Mode::RWXU)) {
                Ok((name, ())) => {
                    return Ok(Self {
                        path: parent.join(name),
                    });
                }
                Err(errno) => last = Some((errno, parent)),
            }
        }
        let (errno, parent) = last.unwrap_or((rustix::io::Errno::NOENT, Path::new("/tmp")));
        Err(Failure::system(
            errno,
            "creating a temporary directory in",
            parent.as_os_str().as_bytes(),
        ))
    }

    fn create(&self, name: &str) -> Outcome<File> {
        create(&self.path.join(name))
    }

    fn open(&self, name: &str) -> Outcome<File> {
        Ok(path::open_file(&self.path.join(name))?.0)
    }
}

/// Creates or empties a file of ours.
fn create(path: &Path) -> Outcome<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(CWD, path, flags, Mode::RUSR | Mode::WUSR)
        .doing("creating", path::bytes(path))?
        .into())
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        remove_directory(&self.path);
    }
}

/// Removes a directory of ours. What is left behind is harmless.
fn remove_directory(directory: &Path) {
    let Ok((parent, name)) = path::split(directory) else {
        return;
    };
    if let Ok(parent) = openat(
        CWD,
        parent,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        let _gone = remove_tree(parent, name, directory);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::{super::tests::*, *};

    pub(super) fn git(workspace: &TestWorkspace, arguments: &[&str]) {
        let output = Command::new("git")
            .args([
                "-c",
                "user.name=x",
                "-c",
                "user.email=x@example.org",
                "-c",
                "init.defaultBranch=main",
            ])
            .args(arguments)
            .current_dir(&workspace.files.root)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").expect("PATH"))
            .env("HOME", "/nonexistent")
            .output()
            .expect("git runs");
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    pub(super) fn ask(workspace: &TestWorkspace, base: Option<&str>) -> Answer {
        workspace.ask(
            FileOp::ExportPatch {
                base: base.map(str::to_owned),
            },
            b"",
        )
    }

    pub(super) fn exported(workspace: &TestWorkspace, base: Option<&str>) -> String {
        String::from_utf8(ask(workspace, base).body().to_vec()).expect("text")
    }

    pub(super) fn repository() -> TestWorkspace {
        let workspace = TestWorkspace::new();
        git(&workspace, &["init", "--quiet"]);
        workspace.put("kept", "same\n");
        workspace.put("modified", "one\n");
        workspace.put("deleted", "gone\n");
        workspace.put("old-name", "a\nb\nc\nd\ne\nf\n");
        workspace.put(".gitignore", "ignored\n");
        git(&workspace, &["add", "."]);
        git(&workspace, &["commit", "--quiet", "-m", "first"]);
        workspace
    }

    #[test]
    fn the_diff_holds_changes_and_untracked_files_and_applies_elsewhere() {
        let workspace = repository();
        let copy = repository();
        workspace.put("modified", "two\n");
        workspace.put("untracked/dir/file é", "new\n");
        workspace.put("empty", "");
        workspace.put("ignored", "secret\n");
        workspace.put("staged", "s\n");
        git(&workspace, &["add", "staged"]);
        std::fs::remove_file(workspace.path("deleted")).expect("removed");
        std::fs::rename(workspace.path("old-name"), workspace.path("new-name")).expect("renamed");
        std::fs::set_permissions(
            workspace.path("kept"),
            std::fs::Permissions::from_mode(0o755),
        )
        .expect("mode");
        let index = workspace.get(".git/index");
        let objects = || walkdir(&workspace.path(".git/objects"));
        let before = objects();
        let diff = exported(&workspace, None);
        assert_eq!(workspace.get(".git/index"), index);
        assert_eq!(objects(), before);
        assert!(!diff.contains("secret"));
        copy.files
            .patch(diff.as_bytes(), 1, false)
            .unwrap_or_else(|failure| panic!("{failure:?}\n{diff}"));
        assert_eq!(
            copy.names("."),
            [
                ".git",
                ".gitignore",
                "empty",
                "kept",
                "modified",
                "new-name",
                "staged",
                "untracked"
            ]
        );
        assert_eq!(
            (copy.get("modified"), copy.get("untracked/dir/file é")),
            (b"two\n".to_vec(), b"new\n".to_vec())
        );
        assert_eq!(
            std::fs::metadata(copy.path("kept"))
                .expect("stat")
                .permissions()
                .mode()
                & 0o111,
            0o111
        );
        assert_eq!(exported(&workspace, Some("HEAD")), diff);
    }

    fn walkdir(path: &Path) -> Vec<PathBuf> {
        let mut found: Vec<_> = std::fs::read_dir(path)
            .expect("listed")
            .flat_map(|entry| {
                let path = entry.expect("entry").path();
                if path.is_dir() {
                    walkdir(&path)
                } else {
                    vec![path]
                }
            })
            .collect();
        found.sort();
        found
    }

    #[test]
    fn an_unchanged_work_tree_gives_an_empty_diff() {
        assert_eq!(exported(&repository(), None), "");
    }

    #[test]
    fn binary_files_and_links_are_in_the_diff() {
        let workspace = repository();
        workspace.put("binary", b"\0\x01\x02");
        symlink("kept", workspace.path("link")).expect("link");
        let diff = exported(&workspace, None);
        assert!(
            diff.contains("GIT binary patch") && diff.contains("new file mode 120000"),
            "{diff}"
        );
    }

    #[test]
    fn a_repository_without_commits_exports_everything_as_new() {
        let workspace = TestWorkspace::new();
        git(&workspace, &["init", "--quiet"]);
        workspace.put("file", "x\n");
        assert!(exported(&workspace, None).contains("+++ b/file"));
    }

    #[test]
    fn the_base_can_be_chosen_and_must_exist() {
        let workspace = repository();
        workspace.put("second", "2\n");
        git(&workspace, &["add", "."]);
        git(&workspace, &["commit", "--quiet", "-m", "second"]);
        assert_eq!(exported(&workspace, None), "");
        assert!(exported(&workspace, Some("HEAD~1")).contains("b/second"));
        for base in ["nonsense", "--output=/tmp/x", "", "HEAD~1..HEAD", "a\nb"] {
            assert_eq!(
                ask(&workspace, Some(base)).error().code,
                ErrorCode::InvalidRequest,
                "{base:?}"
            );
        }
    }

    pub(super) fn snapshot(workspace: &TestWorkspace) {
        let answer = workspace.ask(FileOp::Snapshot, b"");
        assert_eq!(answer.first(), &Reply::Ok { changed: None });
    }

    #[test]
    fn changes_since_a_snapshot_are_exported_without_a_repository() {
        let (workspace, copy) = (TestWorkspace::new(), TestWorkspace::new());
        for place in [&workspace, &copy] {
            place.put("kept", "same\n");
            place.put("crlf.txt", "one\r\ntwo\r\n");
            place.put(".gitattributes", "* text=auto\n*.txt filter=lfs\n");
            place.put(".gitignore", "build/\nignored\n");
            place.put("ignored", "but brought\n");
            place.put("binary", b"\0\x01\x02");
            place.put("deleted", "gone\n");
        }
        snapshot(&workspace);
        assert_eq!(exported(&workspace, Some("brought")), "");
        workspace.put("crlf.txt", "one\r\nthree\r\n");
        workspace.put("ignored", "changed\n");
        workspace.put("binary", b"\0\x01\x02\x03");
        workspace.put("new/file", "new\n");
        workspace.put("build/output", "not exported\n");
        std::fs::remove_file(workspace.path("deleted")).expect("removed");
        let diff = exported(&workspace, Some("brought"));
        for part in [
            "b/crlf.txt",
            "b/ignored",
            "b/binary",
            "b/new/file",
            "a/deleted",
        ] {
            assert!(diff.contains(part), "{part} is missing:\n{diff}");
        }
        assert!(!diff.contains("not exported"), "{diff}");
        assert!(!diff.contains("b/kept"), "{diff}");
        assert!(diff.contains("-two\r\n+three\r\n"), "{diff}");
        // A second export gives the same: the snapshot is not changed by the first.
        assert_eq!(exported(&workspace, Some("brought")), diff);
    }

    #[test]
    fn the_snapshot_of_a_repository_holds_its_uncommitted_changes() {
        let workspace = repository();
        workspace.put("modified", "before the session\n");
        snapshot(&workspace);
        assert_eq!(exported(&workspace, Some("brought")), "");
        workspace.put("modified", "in the session\n");
        git(&workspace, &["add", "."]);
        git(&workspace, &["commit", "--quiet", "-m", "second"]);
        let diff = exported(&workspace, Some("brought"));
        assert!(
            diff.contains("-before the session\n+in the session\n"),
            "{diff}"
        );
        assert_eq!(diff.matches("diff --git").count(), 1, "{diff}");
    }

    #[test]
    fn without_a_snapshot_the_base_is_refused() {
        let workspace = repository();
        assert_eq!(
            ask(&workspace, Some("brought")).error().code,
            ErrorCode::NotARepository
        );
    }

    #[test]
    fn everything_is_new_in_a_session_that_began_empty() {
        let workspace = TestWorkspace::new();
        assert_eq!(exported(&workspace, Some(BROUGHT_NOTHING)), "");
        workspace.put("crlf.txt", "one\r\n");
        workspace.put(".gitattributes", "* text=auto\n");
        workspace.put(".gitignore", "build/\n");
        workspace.put("build/output", "not exported\n");
        workspace.put("inner/file", "inner\n");
        git(&workspace, &["init", "--quiet", "inner"]);
        let diff = exported(&workspace, Some(BROUGHT_NOTHING));
        for part in ["b/crlf.txt", "+one\r\n", "b/.gitignore", "b/inner/file"] {
            assert!(diff.contains(part), "{part} is missing:\n{diff}");
        }
        assert!(!diff.contains("not exported"), "{diff}");
        // Commits make no difference, and nothing is left for a later session.
        git(&workspace, &["init", "--quiet"]);
        git(&workspace, &["add", "crlf.txt"]);
        git(&workspace, &["commit", "--quiet", "-m", "first"]);
        assert_eq!(exported(&workspace, Some(BROUGHT_NOTHING)), diff);
        assert_eq!(
            ask(&workspace, Some("brought")).error().code,
            ErrorCode::NotARepository
        );
        // A kept workspace still has the snapshot of its first session.
        snapshot(&workspace);
        assert_eq!(exported(&workspace, Some(BROUGHT_NOTHING)), "");
    }

    #[test]
    fn a_failed_snapshot_is_no_empty_beginning() {
        let workspace = TestWorkspace::new();
        workspace.put("brought", "x\n");
        let failure = Failure::new(ErrorCode::ExecFailed, "git can't be started");
        workspace.files.record_snapshot_failure(&failure);
        let refused = ask(&workspace, Some(BROUGHT_NOTHING));
        assert_eq!(refused.error().code, ErrorCode::NotARepository);
        assert!(refused.error().message.contains("git can't be started"));
    }

    #[test]
    fn a_later_snapshot_replaces_the_first() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "one\n");
        snapshot(&workspace);
        workspace.put("file", "two\n");
        snapshot(&workspace);
        assert_eq!(exported(&workspace, Some("brought")), "");
    }

    #[test]
    fn a_directory_without_a_repository_is_refused() {
        let workspace = TestWorkspace::new();
        assert_eq!(
            ask(&workspace, None).error().code,
            ErrorCode::NotARepository
        );
        let outer = repository();
        let inner = Files::new(outer.path("sub"));
        std::fs::create_dir(&inner.root).expect("made");
        let (agent, _worker) = std::os::unix::net::UnixStream::pair().expect("pair");
        assert_eq!(
            code(inner.export_patch(None, &mut Peer::from_stream(agent))),
            ErrorCode::NotARepository
        );
    }

    #[test]
    fn the_repositorys_settings_do_not_change_the_format() {
        let workspace = repository();
        for (key, value) in [
            ("diff.noprefix", "true"),
            ("color.ui", "always"),
            ("diff.external", "false"),
            ("diff.mnemonicPrefix", "true"),
            ("core.fsmonitor", "false"),
        ] {
            git(&workspace, &["config", key, value]);
        }
        workspace.put("modified", "two\n");
        let diff = exported(&workspace, None);
        assert!(
            diff.starts_with("diff --git a/modified b/modified\n"),
            "{diff}"
        );
    }
}

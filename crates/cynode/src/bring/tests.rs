//! Tests of which files are uploaded and which are skipped.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use super::{
    select::{Selection, UploadLimits},
    *,
};

fn scanner() -> Scanner {
    Scanner::new(HeldSecrets::new([0; 32]), true)
}

struct Directory(tempfile::TempDir);

impl Directory {
    fn with(files: &[(&str, &str)]) -> Self {
        let this = Self(tempfile::tempdir().expect("a directory"));
        for (name, content) in files {
            this.put(name, content);
        }
        this
    }

    fn put(&self, name: &str, content: &str) {
        let path = self.root().join(name);
        fs_err::create_dir_all(path.parent().expect("below the root")).expect("made");
        fs_err::write(path, content).expect("written");
    }

    fn root(&self) -> PathBuf {
        fs_err::canonicalize(self.0.path()).expect("there")
    }

    fn select(
        &self,
        listed: Option<BTreeSet<PathBuf>>,
        bounds: UploadLimits,
    ) -> Result<Selection, Failure> {
        Selection::new(&self.root(), listed, &scanner(), bounds)
    }

    /// Packs the selection. Returns the files and links in the archive with their contents, and the
    /// skipped entries with their reasons.
    fn pack(&self, listed: Option<BTreeSet<PathBuf>>) -> (Vec<(String, String)>, Left) {
        let selection = self
            .select(listed, UploadLimits::default())
            .expect("selected");
        let estimate = selection.archive_bytes;
        let mut bytes = Vec::new();
        let packed = pack::pack(selection, &scanner(), &mut bytes).expect("packed");
        assert!(
            estimate >= bytes.len() as u64 || packed.skipped.is_empty(),
            "a wrong estimate"
        );
        let mut entries = Vec::new();
        let mut archive = tar::Archive::new(&bytes[..]);
        for entry in archive.entries().expect("an archive") {
            let mut entry = entry.expect("an entry");
            let name = entry.path().expect("a path").display().to_string();
            let link = entry.link_name().expect("valid");
            let link = link.map(|target| format!("-> {}", target.display()));
            let mut content = Vec::new();
            entry.read_to_end(&mut content).expect("readable");
            let content = String::from_utf8_lossy(&content).into_owned();
            if entry.header().entry_type().is_dir() {
                entries.push((name, "directory".to_owned()));
            } else {
                entries.push((name, link.unwrap_or(content)));
            }
        }
        let left = packed
            .skipped
            .into_iter()
            .map(|skipped| (skipped.path, skipped.reason));
        (entries, left.collect())
    }

    fn git(&self, arguments: &[&str]) {
        #[expect(clippy::disallowed_methods, reason = "tests need a repository")]
        let mut git = std::process::Command::new("git");
        let output = git
            .args(["-c", "user.name=t", "-c", "user.email=t@example.org"])
            .args(arguments)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .current_dir(self.root())
            .output()
            .expect("git runs");
        assert!(output.status.success(), "{output:?}");
    }
}

type Left = BTreeMap<String, String>;

fn token() -> String {
    ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat()
}

fn owned(entries: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = |(name, content): &(&str, &str)| ((*name).to_owned(), (*content).to_owned());
    entries.iter().map(owned).collect()
}

#[test]
fn everything_comes_in_with_modes_and_links() {
    let directory = Directory::with(&[("a", "one"), ("sub/deep/b", "two")]);
    fs_err::create_dir(directory.root().join("empty")).expect("made");
    symlink("../a", directory.root().join("sub/link")).expect("link");
    symlink("/etc/hostname", directory.root().join("absolute")).expect("link");
    let executable = std::fs::Permissions::from_mode(0o4755);
    fs_err::set_permissions(directory.root().join("a"), executable).expect("mode");
    let (entries, left) = directory.pack(None);
    assert_eq!(
        entries,
        owned(&[
            ("a", "one"),
            ("absolute", "-> /etc/hostname"),
            ("empty", "directory"),
            ("sub", "directory"),
            ("sub/deep", "directory"),
            ("sub/deep/b", "two"),
            ("sub/link", "-> ../a"),
        ])
    );
    assert_eq!(left, Left::new());
}

#[test]
// invariant: no-secrets-inside
fn files_that_hold_secrets_stay_out_and_are_named() {
    let secret = format!("KEY={}\n", token());
    let directory = Directory::with(&[
        ("src/main.rs", "fn main() {}"),
        ("src/sample.rs", &secret),
        (".env", "PASSWORD=hunter2"),
        (".env.example", "PASSWORD="),
        ("deploy/.env.sample", &secret),
        (".npmrc", "save-exact=true"),
        ("web/.npmrc", "//registry.example.org/:_authToken=abc"),
        (".netrc", "machine example.org"),
        (".aws/credentials", "x"),
        (".ssh/config", "x"),
        (".docker/config.json", "{}"),
        ("keys/id_ed25519", "x"),
        (
            ".git/config",
            "[remote \"o\"]\n\turl = https://me:hunter2@example.org/a.git\n",
        ),
        (".git/HEAD", "ref: refs/heads/main\n"),
    ]);
    directory.put(&format!("names/{}", token()), "x");
    symlink(token(), directory.root().join("link")).expect("link");
    let (entries, left) = directory.pack(None);
    let names: Vec<&str> = entries
        .iter()
        .filter(|(_, content)| content != "directory")
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            ".env.example",
            ".git/HEAD",
            ".npmrc",
            "src/main.rs",
            "src/sample.rs"
        ]
    );
    let reasons: Vec<String> = left
        .iter()
        .map(|(path, reason)| format!("{path}: {reason}"))
        .collect();
    assert_eq!(
        reasons,
        [
            ".aws: it is a directory for credentials",
            ".docker/config.json: it is a file for credentials",
            ".env: it is a file for credentials",
            ".git/config: it contains a password in a URL; in the sandbox the repository has no \
             remotes and default settings",
            ".netrc: it is a file for credentials",
            ".ssh: it is a directory for credentials",
            "deploy/.env.sample: it contains a GitHub token",
            "keys/id_ed25519: it is a private key",
            "link: its target contains what looks like a GitHub token",
            "names/(name): its name contains what looks like a GitHub token",
            "web/.npmrc: it contains an npm credential",
        ]
    );
    assert!(!format!("{left:?}").contains(&token()));
}

#[test]
// invariant: no-secrets-inside
fn a_large_file_is_scanned_to_its_end() {
    let directory = Directory::with(&[]);
    let filler = "x".repeat(5 * 1024 * 1024);
    directory.put(".env.example", &format!("{filler}\nKEY={}\n", token()));
    directory.put("large", &filler);
    let (entries, left) = directory.pack(None);
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].1.len(), filler.len());
    assert_eq!(
        left.get(".env.example").map(String::as_str),
        Some("it contains a GitHub token")
    );
}

#[test]
fn what_is_no_file_and_what_can_not_be_used_stays_out() {
    let directory = Directory::with(&[
        ("worktree/.git", "gitdir: /elsewhere/.git/worktrees/x\n"),
        ("module/.git", "gitdir: ../.git/modules/module\n"),
        (".git/modules/module/HEAD", "ref: refs/heads/main\n"),
        ("a", "x"),
    ]);
    let _socket = std::os::unix::net::UnixListener::bind(directory.root().join("socket"));
    let _monitor = std::os::unix::net::UnixListener::bind(directory.root().join(".git/monitor"));
    let (entries, left) = directory.pack(None);
    assert!(entries.iter().any(|(name, _)| name == "module/.git"));
    assert_eq!(
        left.into_iter().collect::<Vec<_>>(),
        owned(&[
            ("socket", "it is not a file, directory or link"),
            (
                "worktree/.git",
                "it names a repository outside of the directory"
            ),
        ])
    );
}

#[test]
fn a_directory_that_changes_while_it_is_packed_is_packed_as_it_is() {
    let directory = Directory::with(&[("gone", "x"), ("replaced", "x"), ("kept", "x")]);
    let selection = directory
        .select(None, UploadLimits::default())
        .expect("selected");
    fs_err::remove_file(directory.root().join("gone")).expect("removed");
    fs_err::remove_file(directory.root().join("replaced")).expect("removed");
    symlink("/etc/passwd", directory.root().join("replaced")).expect("link");
    let mut bytes = Vec::new();
    let packed = pack::pack(selection, &scanner(), &mut bytes).expect("packed");
    assert_eq!((packed.files, packed.bytes), (1, 1));
    assert!(!bytes.windows(4).any(|window| window == b"root"));
}

#[test]
// invariant: bounded
fn what_comes_in_is_bounded() {
    let directory = Directory::with(&[("a", "x"), ("sub/b", "x")]);
    let bounds = |entries: usize, bytes: u64| UploadLimits { entries, bytes };
    let is_too_large = |bounds: UploadLimits| match directory.select(None, bounds) {
        Ok(_) => false,
        Err(failure) => {
            assert!(failure.is("too_large") && failure.remedy_text().is_some());
            true
        }
    };
    // A header for each of three entries, two contents, and the end.
    let size = 3 * 512 + 2 * 512 + 1_024;
    assert!(!is_too_large(bounds(3, size)));
    assert!(is_too_large(bounds(2, size)));
    assert!(is_too_large(bounds(3, size - 1)));
    // Skipped because of its size, without being read.
    let huge = fs_err::File::create(directory.root().join("huge")).expect("made");
    huge.set_len(artifact_limits::MAX_BYTES).expect("grown");
    assert!(is_too_large(UploadLimits::default()));
    huge.set_len(artifact_limits::MAX_BYTES / 2)
        .expect("shrunk");
    assert!(!is_too_large(UploadLimits::default()));
}

#[tokio::test]
async fn git_says_what_it_ignores() {
    let directory = Directory::with(&[
        (".gitignore", "target/\n*.log\n"),
        ("src/main.rs", "x"),
        ("src/new.rs", "not added"),
        ("src/deleted.rs", "x"),
        ("target/debug/app", "ignored"),
        ("build.log", "ignored"),
        ("tracked.log", "ignored, but tracked"),
        (".env", "PASSWORD=hunter2"),
        ("odd \"name\"\n\u{e9}", "x"),
        ("nested/.gitignore", "*.tmp\n"),
        ("nested/a", "x"),
        ("nested/b.tmp", "ignored there"),
    ]);
    fs_err::create_dir(directory.root().join("empty")).expect("made");
    directory.git(&["init", "--quiet"]);
    directory.git(&["add", "src/main.rs", "src/deleted.rs", ".gitignore"]);
    directory.git(&["add", "--force", "tracked.log"]);
    directory.git(&["-C", "nested", "init", "--quiet"]);
    fs_err::remove_file(directory.root().join("src/deleted.rs")).expect("removed");
    let listed = git::list(&directory.root()).await.expect("listed");
    let (entries, left) = directory.pack(Some(listed));
    let names: Vec<&str> = entries
        .iter()
        .filter(|(_, content)| content != "directory")
        .map(|(name, _)| name.as_str())
        .filter(|name| !name.contains(".git/"))
        .collect();
    assert_eq!(
        names,
        [
            ".gitignore",
            "nested/.gitignore",
            "nested/a",
            "odd \"name\"\n\u{e9}",
            "src/main.rs",
            "src/new.rs",
            "tracked.log",
        ]
    );
    let has = |name: &str| entries.iter().any(|(other, _)| other == name);
    assert!(has(".git/HEAD") && has("nested/.git/HEAD") && !has("empty"));
    assert_eq!(left.keys().collect::<Vec<_>>(), [".env"]);

    // A subdirectory of a repository is listed alone.
    let part = Directory(tempfile::tempdir_in(directory.root()).expect("a directory"));
    part.put("kept", "x");
    part.put("dropped.log", "x");
    let listed = git::list(&part.root()).await.expect("listed");
    let (entries, _) = part.pack(Some(listed));
    assert_eq!(entries, owned(&[("kept", "x")]));
}

#[tokio::test]
async fn a_directory_without_a_repository_is_an_error() {
    let directory = Directory::with(&[("a", "x")]);
    let failure = git::list(&directory.root())
        .await
        .expect_err("no repository");
    assert!(failure.is("no_repository"), "{failure:?}");
    assert!(failure.message().contains("is not in a git repository"));
}

#[test]
fn a_directory_must_exist() {
    let directory = Directory::with(&[("a", "x")]);
    assert!(root(&directory.root().join("a")).is_err());
    assert!(root(&directory.root().join("none")).is_err_and(|failure| failure.is("local_file")));
    symlink(directory.root(), directory.root().join("link")).expect("link");
    assert_eq!(
        root(&directory.root().join("link")).ok(),
        Some(directory.root())
    );
}

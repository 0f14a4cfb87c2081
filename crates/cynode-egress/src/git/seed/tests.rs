//! Seeds of real repositories, unpacked with `tar` and looked at with git.

use std::{
    io::Write as _,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::{Path, PathBuf},
    process::Stdio,
};

use super::*;
use crate::git::{
    mirror::tests::Origin,
    runner::{git, tests::program},
};

struct Unpacked {
    path: PathBuf,
    notes: SeedNotes,
}

impl Unpacked {
    fn git(&self, args: &[&str]) -> String {
        git(&self.path, args)
    }

    fn assert_clean(&self) {
        assert_eq!(self.git(&["status", "--porcelain", "--ignored"]), "");
        self.git(&["fsck", "--strict", "--no-dangling"]);
    }
}

async fn try_seed(
    origin: &Origin,
    commit: ObjectId,
    branch: &str,
    depth: Option<u32>,
) -> Result<(SeedNotes, Vec<u8>), RepositoryError> {
    let request = SeedRequest {
        commit,
        branch: branch.to_owned(),
        depth,
    };
    let mut seed = origin.mirrors.seed(&origin.access, request).await?;
    let mut archive = Vec::new();
    while let Some(piece) = seed.pieces.recv().await {
        archive.extend_from_slice(&piece.map_err(broken)?);
    }
    Ok((seed.notes, archive))
}

async fn seed(origin: &Origin, commit: ObjectId, branch: &str, depth: Option<u32>) -> Unpacked {
    let (notes, archive) = try_seed(origin, commit, branch, depth)
        .await
        .expect("a seed");
    let path = origin.root.path().join(format!("seed-{}", Uuid::new_v4()));
    fs_err::create_dir(&path).expect("made");
    let mut tar = program("tar")
        .args(["-x", "-f", "-", "-C"])
        .arg(&path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("tar runs");
    let mut input = tar.stdin.take().expect("piped");
    input.write_all(&archive).expect("read");
    drop(input);
    assert!(tar.wait().expect("ends").success());
    Unpacked { path, notes }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_is_a_clean_checkout_with_its_history_and_nothing_else() {
    let origin = Origin::new().await;
    origin.write("readme", "one\n");
    origin.write("src/deep/er/main.rs", "fn main() {}\n");
    origin.write("run.sh", "#!/bin/sh\n");
    origin.write("empty", "");
    origin.write("large", vec![b'x'; 3_000_000]);
    origin.write(".gitattributes", "*.txt text eol=crlf\n*.bin filter=evil\n");
    origin.write("windows.txt", "a\nb\n");
    origin.write("a.bin", "content\n");
    origin.write(".gitignore", "ignored\n");
    origin.write("ignored", "but tracked\n");
    let path = origin.path.join("run.sh");
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("set");
    symlink("src/deep", origin.path.join("link")).expect("linked");
    symlink("/nowhere", origin.path.join("src/dangling")).expect("linked");
    for odd in [
        &b"tab\tand\nline"[..],
        b"quote\"back\\slash",
        b"\xff\xfe",
        "ünïcode".as_bytes(),
    ] {
        let path = origin.path.join(std::ffi::OsStr::from_bytes(odd));
        fs_err::write(path, "odd\n").expect("written");
    }
    origin.write(
        &format!("{}/{}", "d".repeat(120), "f".repeat(120)),
        "long\n",
    );
    origin.commit("one");
    origin.git(&["tag", "v1"]);
    origin.git(&["checkout", "--quiet", "-b", "secret"]);
    origin.write("secret", "of another branch\n");
    let secret = origin.commit("secret");
    origin.git(&["checkout", "--quiet", "main"]);
    origin.write("readme", "two\n");
    let head = origin.commit("two");
    let seeded = seed(&origin, head, "main", None).await;
    seeded.assert_clean();
    assert_eq!(seeded.notes, SeedNotes::default());
    assert_eq!(seeded.git(&["rev-parse", "HEAD"]), head.to_string());
    assert_eq!(seeded.git(&["symbolic-ref", "HEAD"]), "refs/heads/main");
    assert_eq!(seeded.git(&["rev-list", "--count", "HEAD"]), "2");
    assert_eq!(
        seeded.git(&["for-each-ref", "--format=%(refname)"]),
        "refs/heads/main"
    );
    assert_eq!(seeded.git(&["remote"]), "");
    assert!(!seeded.path.join(".git/hooks").exists());
    let all = seeded.git(&["cat-file", "--batch-check", "--batch-all-objects"]);
    assert!(!all.contains(&secret.to_string()), "{all}");
    // Every file as the origin has it.
    let compare = program("diff")
        .args(["-r", "--no-dereference", "--exclude=.git"])
        .arg(&origin.path)
        .arg(&seeded.path)
        .output()
        .expect("diff runs");
    assert!(
        compare.status.success(),
        "{}",
        String::from_utf8_lossy(&compare.stdout)
    );
    let mode = |path: &Path| fs_err::symlink_metadata(path).expect("there").mode() & 0o111;
    assert_ne!(mode(&seeded.path.join("run.sh")), 0);
    assert_eq!(mode(&seeded.path.join("readme")), 0);
    // It is a repository to work in.
    fs_err::write(seeded.path.join("new"), "work\n").expect("written");
    seeded.git(&["add", "--all"]);
    seeded.git(&["commit", "--quiet", "-m", "work"]);
    assert_eq!(seeded.git(&["rev-list", "--count", "HEAD"]), "3");
    // The operation left nothing.
    let work = origin.root.path().join("role/mirrors/work");
    let left = || -> usize {
        fs_err::read_dir(&work)
            .expect("there")
            .flatten()
            .map(|mirror| fs_err::read_dir(mirror.path()).map_or(0, Iterator::count))
            .sum()
    };
    for _ in 0..500 {
        if left() == 0 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("{} operations left their files", left());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_depth_cuts_the_history_where_git_would() {
    let origin = Origin::new().await;
    for number in 0..5 {
        origin.write("a", number.to_string());
        origin.commit("line");
    }
    origin.git(&["checkout", "--quiet", "-b", "side", "HEAD~3"]);
    origin.write("b", "side");
    origin.commit("side");
    origin.git(&["checkout", "--quiet", "main"]);
    origin.git(&["merge", "--quiet", "--no-edit", "side"]);
    let head = ObjectId::parse(&origin.git(&["rev-parse", "HEAD"])).expect("an id");
    let url = format!("file://{}", origin.path.display());
    for depth in [1, 2, 3, 4, 100] {
        let seeded = seed(&origin, head, "main", Some(depth)).await;
        seeded.assert_clean();
        let clone = origin.root.path().join(format!("clone-{depth}"));
        git(
            origin.root.path(),
            &[
                "clone",
                "--quiet",
                "--depth",
                &depth.to_string(),
                &url,
                clone.to_str().expect("text"),
            ],
        );
        assert_eq!(
            seeded.git(&["rev-list", "HEAD"]),
            git(&clone, &["rev-list", "HEAD"]),
            "depth {depth}"
        );
        let shallow = |path: &Path| {
            let text = fs_err::read_to_string(path.join(".git/shallow")).unwrap_or_default();
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            lines.sort_unstable();
            lines
        };
        assert_eq!(shallow(&seeded.path), shallow(&clone), "depth {depth}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn submodules_and_lfs_pointers_are_named_and_not_fetched() {
    let origin = Origin::new().await;
    let pointer = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 12345\n",
        "a".repeat(64)
    );
    origin.write("media/video.mp4", &pointer);
    origin.write("media/copy.mp4", &pointer);
    origin.write("plain", pointer.replace("version", "Version"));
    let first = origin.commit("one");
    for number in 0..30 {
        let entry = format!("160000,{first},libs/module-{number:02}");
        origin.git(&["update-index", "--add", "--cacheinfo", &entry]);
    }
    origin.git(&["commit", "--quiet", "-m", "submodules"]);
    let head = ObjectId::parse(&origin.git(&["rev-parse", "HEAD"])).expect("an id");
    let seeded = seed(&origin, head, "main", None).await;
    seeded.assert_clean();
    assert_eq!(seeded.notes.submodules_total, 30);
    assert_eq!(seeded.notes.submodules.len(), MAX_NOTED);
    assert_eq!(seeded.notes.submodules[0], "libs/module-00");
    assert_eq!(seeded.notes.lfs_files_total, 2);
    assert_eq!(
        seeded.notes.lfs_files,
        ["media/copy.mp4", "media/video.mp4"]
    );
    let module = seeded.path.join("libs/module-00");
    assert_eq!(fs_err::read_dir(module).expect("a directory").count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_without_files_is_a_seed_and_an_unadvertised_one_is_none() {
    let origin = Origin::new().await;
    let empty = origin.commit("nothing");
    let seeded = seed(&origin, empty, "topic/deep", None).await;
    seeded.assert_clean();
    assert_eq!(
        seeded.git(&["symbolic-ref", "HEAD"]),
        "refs/heads/topic/deep"
    );
    origin.write("a", "hidden");
    let hidden = origin.commit("hidden");
    origin.git(&["update-ref", "refs/pull/1/head", &hidden.to_string()]);
    origin.git(&["reset", "--quiet", "--hard", &empty.to_string()]);
    assert!(matches!(
        try_seed(&origin, hidden, "main", None).await,
        Err(RepositoryError::NotAdvertised(_))
    ));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repositories_that_would_break_out_are_refused() {
    let origin = Origin::new().await;
    origin.write("a", "1");
    origin.commit("one");
    // A tree with `.GIT/config`, which no git would add.
    let blob = origin.git(&["hash-object", "-w", "a"]);
    let raw = |entries: &[(&str, &str, &str)]| {
        let mut tree = Vec::new();
        for (mode, name, id) in entries {
            tree.extend_from_slice(format!("{mode} {name}\0").as_bytes());
            tree.extend_from_slice(&hex::decode(id).expect("hex"));
        }
        let path = origin.root.path().join("tree");
        fs_err::write(&path, tree).expect("written");
        origin.git(&[
            "hash-object",
            "-w",
            "--literally",
            "-t",
            "tree",
            path.to_str().expect("text"),
        ])
    };
    let inner = raw(&[("100644", "config", &blob)]);
    let outer = raw(&[("40000", ".GIT", &inner)]);
    let evil = origin.git(&["commit-tree", &outer, "-m", "evil"]);
    origin.git(&["update-ref", "refs/heads/evil", &evil]);
    let evil = ObjectId::parse(&evil).expect("an id");
    // git's own checks refuse it with the fetch.
    assert!(matches!(
        try_seed(&origin, evil, "evil", None).await,
        Err(RepositoryError::Refused(_))
    ));
    for path in [
        &b".git/config"[..],
        b"a/.GIT/x",
        b"../x",
        b"a//b",
        b"./a",
        b"",
    ] {
        assert!(check_path(path).is_err(), "{path:?}");
    }
    assert!(check_path(&vec![b'a'; 4_096]).is_err());
    for path in [&b".gitignore"[..], b"a/.github/x", b"..a/b", b".git2"] {
        assert!(check_path(path).is_ok(), "{path:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_leaves_ends_the_building() {
    let origin = Origin::new().await;
    origin.write("large", vec![b'x'; 20_000_000]);
    let head = origin.commit("one");
    let request = SeedRequest {
        commit: head,
        branch: "main".to_owned(),
        depth: None,
    };
    let seed = origin
        .mirrors
        .seed(&origin.access, request)
        .await
        .expect("planned");
    drop(seed);
    let work = origin
        .root
        .path()
        .join("role/mirrors/work")
        .join(&origin.access.mirror.0);
    for _ in 0..500 {
        if fs_err::read_dir(&work).map_or(0, Iterator::count) == 0 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("the files of an abandoned seed stayed");
}

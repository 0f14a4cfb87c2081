use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;

struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn root(&self) -> std::path::PathBuf {
        self.0.path().join("root")
    }

    fn with(files: &[(&str, &str)]) -> Self {
        let this = Self::new();
        fs_err::create_dir(this.root()).expect("made");
        for (name, content) in files {
            let path = this.root().join(name);
            fs_err::create_dir_all(path.parent().expect("below the root")).expect("made");
            fs_err::write(path, content).expect("written");
        }
        this
    }

    fn apply(&self, patch: &str) -> Result<(), Error> {
        prepare(&self.root(), patch.as_bytes())?.commit()
    }

    fn get(&self, name: &str) -> Option<String> {
        fs_err::read_to_string(self.root().join(name)).ok()
    }

    /// Every path below the root, with the contents of files and the targets of links.
    fn everything(&self) -> Vec<(String, String)> {
        fn walk(directory: &Path, root: &Path, found: &mut Vec<(String, String)>) {
            for entry in fs_err::read_dir(directory).expect("listed") {
                let path = entry.expect("an entry").path();
                let stat = fs_err::symlink_metadata(&path).expect("stat");
                let name = path.strip_prefix(root).expect("below").display().to_string();
                if stat.is_dir() {
                    found.push((name, "directory".to_owned()));
                    walk(&path, root, found);
                } else if stat.is_symlink() {
                    let target = fs_err::read_link(&path).expect("a link");
                    found.push((name, format!("-> {}", target.display())));
                } else {
                    found.push((name, fs_err::read_to_string(&path).expect("text")));
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.root(), &self.root(), &mut found);
        found.sort();
        found
    }
}

fn create(name: &str, mode: &str, content: &str) -> String {
    format!(
        "diff --git a/{name} b/{name}\nnew file mode {mode}\n--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+{content}\n"
    )
}

fn modify(name: &str, old: &str, new: &str) -> String {
    format!("--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-{old}\n+{new}\n")
}

fn delete(name: &str, old: &str) -> String {
    format!(
        "diff --git a/{name} b/{name}\ndeleted file mode 100644\n--- a/{name}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{old}\n"
    )
}

#[test]
fn a_patch_changes_creates_and_deletes_files() {
    let directory = Directory::with(&[("a", "one\n"), ("sub/gone", "old\n"), ("kept", "same\n")]);
    fs_err::set_permissions(
        directory.root().join("a"),
        std::fs::Permissions::from_mode(0o640),
    )
    .expect("mode");
    let patch = modify("a", "one", "two")
        + &create("new/deep/file", "100755", "hello")
        + &delete("sub/gone", "old");
    directory.apply(&patch).expect("applied");
    assert_eq!(
        directory.everything(),
        [
            ("a", "two\n"),
            ("kept", "same\n"),
            ("new", "directory"),
            ("new/deep", "directory"),
            ("new/deep/file", "hello\n"),
        ]
        .map(|(name, content)| (name.to_owned(), content.to_owned()))
    );
    let mode = |name: &str| {
        fs_err::metadata(directory.root().join(name))
            .expect("stat")
            .permissions()
            .mode()
            & 0o7777
    };
    assert_eq!(mode("a"), 0o640);
    assert_eq!(mode("new/deep/file"), 0o777 & !crate::umask::umask().bits());
}

#[test]
fn a_patch_that_fits_only_in_part_changes_nothing() {
    let directory = Directory::with(&[("a", "one\n"), ("b", "one\n")]);
    let before = directory.everything();
    let error = directory
        .apply(&(modify("a", "one", "two") + &modify("b", "other", "two")))
        .expect_err("rejected");
    assert!(matches!(&error, Error::Rejected(rejects) if rejects.len() == 1));
    assert_eq!(directory.everything(), before);
}

#[test]
fn a_failure_in_the_middle_restores_every_file() {
    let directory = Directory::with(&[("a", "one\n"), ("b", "one\n"), ("sub/c", "one\n")]);
    let patch = modify("a", "one", "two")
        + &create("new/file", "100644", "hello")
        + &delete("sub/c", "one")
        + &modify("b", "one", "two");
    let prepared = prepare(&directory.root(), patch.as_bytes()).expect("fits");
    // Another program changes a file between the check and the commit.
    fs_err::write(directory.root().join("sub/c"), "changed\n").expect("written");
    let before = directory.everything();
    let error = prepared.commit().expect_err("stale");
    assert!(
        matches!(&error, Error::Commit(CommitError::Stale { path }) if path == "sub/c"),
        "{error}"
    );
    assert_eq!(directory.everything(), before);

    let prepared = prepare(
        &directory.root(),
        (modify("a", "one", "two") + &create("new/file", "100644", "hello")).as_bytes(),
    )
    .expect("fits");
    // The place of a new file is taken meanwhile.
    fs_err::create_dir(directory.root().join("new")).expect("made");
    fs_err::write(directory.root().join("new/file"), "mine\n").expect("written");
    let before = directory.everything();
    prepared.commit().expect_err("taken");
    assert_eq!(directory.everything(), before);
}

#[test]
fn links_are_not_followed() {
    let directory = Directory::with(&[("a", "one\n")]);
    let outside = directory.0.path().join("outside");
    fs_err::create_dir(&outside).expect("made");
    fs_err::write(outside.join("file"), "one\n").expect("written");
    symlink(&outside, directory.root().join("out")).expect("link");
    symlink(outside.join("file"), directory.root().join("link")).expect("link");
    for patch in [
        modify("out/file", "one", "two"),
        create("out/new", "100644", "x"),
        delete("out/file", "one"),
        modify("link", "one", "two"),
    ] {
        assert!(
            matches!(directory.apply(&patch), Err(Error::Rejected(_))),
            "{patch}"
        );
    }
    assert_eq!(
        fs_err::read_to_string(outside.join("file")).expect("there"),
        "one\n"
    );
    assert_eq!(fs_err::read_dir(&outside).expect("listed").count(), 1);
}

#[test]
fn a_directory_that_becomes_a_link_before_the_commit_is_not_followed() {
    let directory = Directory::with(&[("sub/a", "one\n")]);
    let outside = directory.0.path().join("outside");
    fs_err::create_dir(&outside).expect("made");
    let prepared = prepare(
        &directory.root(),
        create("sub/new", "100644", "x").as_bytes(),
    )
    .expect("fits");
    fs_err::remove_dir_all(directory.root().join("sub")).expect("removed");
    symlink(&outside, directory.root().join("sub")).expect("link");
    prepared.commit().expect_err("a link is in the way");
    assert_eq!(fs_err::read_dir(&outside).expect("listed").count(), 0);
}

#[test]
fn new_links_may_not_lead_outside() {
    let link = |name: &str, target: &str| {
        format!(
            "diff --git a/{name} b/{name}\nnew file mode 120000\n--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+{target}\n\\ No newline at end of file\n"
        )
    };
    for (name, target) in [
        ("l", "/etc/passwd"),
        ("l", ".."),
        ("l", "../x"),
        ("sub/l", "../../x"),
        ("l", "a/../../x"),
        ("l", ".git/hooks"),
        ("l", ".GIT/config"),
    ] {
        let directory = Directory::with(&[("a", "one\n")]);
        assert!(
            matches!(directory.apply(&link(name, target)), Err(Error::Rejected(_))),
            "{name} -> {target}"
        );
    }
    let directory = Directory::with(&[("a", "one\n")]);
    directory.apply(&link("sub/l", "../a")).expect("applied");
    assert_eq!(directory.get("sub/l").as_deref(), Some("one\n"));
}

#[test]
fn nothing_in_git_directories_is_touched_in_any_spelling() {
    for name in [
        ".git/config",
        ".GIT/config",
        "sub/.git/hooks/post-commit",
        ".g\u{200c}it/config",
        ".git\u{feff}/config",
        "git~1/config",
        ".git./config",
        ".git /config",
        ".git::$INDEX_ALLOCATION/config",
        ".git",
    ] {
        let directory = Directory::with(&[("a", "one\n")]);
        let before = directory.everything();
        assert!(directory.apply(&create(name, "100644", "x")).is_err(), "{name}");
        assert_eq!(directory.everything(), before, "{name}");
    }
    for name in [".github/x", ".gitignore", "git/x", ".gitmodules", "agit~1"] {
        Directory::with(&[])
            .apply(&create(name, "100644", "x"))
            .expect(name);
    }
}

#[test]
fn no_file_gets_a_set_id_bit() {
    let directory = Directory::with(&[("a", "one\n")]);
    for mode in ["104755", "106755", "102755"] {
        // Refused or without the bit.
        drop(directory.apply(&create("tool", mode, "x")));
        if let Ok(stat) = fs_err::metadata(directory.root().join("tool")) {
            assert_eq!(stat.permissions().mode() & 0o7000, 0, "{mode}");
            fs_err::remove_file(directory.root().join("tool")).expect("removed");
        }
    }
}

#[test]
fn a_file_can_replace_a_directory_and_the_reverse() {
    let directory = Directory::with(&[("thing/a", "one\n"), ("other", "one\n")]);
    let patch = delete("thing/a", "one")
        + &create("thing", "100644", "now a file")
        + &delete("other", "one")
        + &create("other/b", "100644", "now below");
    directory.apply(&patch).expect("applied");
    assert_eq!(directory.get("thing").as_deref(), Some("now a file\n"));
    assert_eq!(directory.get("other/b").as_deref(), Some("now below\n"));
}

#[test]
fn the_summary_counts_lines_and_marks_what_runs() {
    let directory = Directory::with(&[("a", "one\n")]);
    let patch = modify("a", "one", "two")
        + &create("tool", "100755", "#!/bin/sh")
        + &create(".envrc", "100644", "x")
        + &create("sub/.vscode/tasks.json", "100644", "x");
    let summary = prepare(&directory.root(), patch.as_bytes())
        .expect("fits")
        .summary;
    let lines: Vec<String> = summary
        .files
        .iter()
        .map(|file| {
            format!(
                "{} {} +{} -{} {}",
                file.operation,
                file.path,
                file.added,
                file.removed,
                file.warnings.join(",")
            )
        })
        .collect();
    assert_eq!(
        lines,
        [
            "modify a +1 -1 ",
            "create tool +1 -0 executable",
            "create .envrc +1 -0 runs by itself",
            "create sub/.vscode/tasks.json +1 -0 runs by itself",
        ]
    );
}

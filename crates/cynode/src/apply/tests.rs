use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

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

    fn prepare(&self, patch: &str) -> Result<Prepared, Error> {
        prepare(&self.root(), &parse(patch.as_bytes())?, &Earlier::default())
    }

    fn apply(&self, patch: &str) -> Result<(), Error> {
        self.prepare(patch)?.commit().map(drop)
    }

    /// Applies a patch after earlier ones.
    fn apply_again(&self, patch: &str, earlier: &Earlier) -> Result<Earlier, Error> {
        let patch = parse(patch.as_bytes())?;
        let record = prepare(&self.root(), &patch, earlier)?.commit()?;
        Ok(record.expect("small"))
    }

    /// Applies a patch after earlier ones, and checks that the summary shows all changes and no
    /// others. Returns the summary's lines.
    fn show_and_apply(&self, patch: &str, earlier: &mut Earlier) -> Vec<String> {
        let patch = parse(patch.as_bytes()).expect("valid");
        let prepared = prepare(&self.root(), &patch, earlier).expect("fits");
        let summary = prepared.summary(&patch).expect("readable");
        let before = self.everything();
        *earlier = prepared.commit().expect("applied").expect("small");
        let after = self.everything();
        let is_directory = |entry: &&(String, String)| entry.1 == "directory";
        let mut done: Vec<String> = before
            .iter()
            .filter(|entry| !after.contains(entry))
            .chain(after.iter().filter(|entry| !before.contains(entry)))
            .filter(|entry| !is_directory(entry))
            .map(|(name, _)| name.clone())
            .collect();
        done.sort();
        done.dedup();
        let mut shown: Vec<String> = summary
            .files
            .iter()
            .flat_map(|file| file.from.iter().chain([&file.path]).cloned())
            .collect();
        shown.sort();
        assert_eq!(shown, done);
        lines(&summary)
    }

    fn get(&self, name: &str) -> Option<String> {
        fs_err::read_to_string(self.root().join(name)).ok()
    }

    /// Returns all paths below the root, with the contents of files and the targets of links.
    fn everything(&self) -> Vec<(String, String)> {
        fn walk(directory: &Path, root: &Path, found: &mut Vec<(String, String)>) {
            for entry in fs_err::read_dir(directory).expect("listed") {
                let path = entry.expect("an entry").path();
                let stat = fs_err::symlink_metadata(&path).expect("stat");
                let name = path
                    .strip_prefix(root)
                    .expect("below")
                    .display()
                    .to_string();
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

fn lines(summary: &Summary) -> Vec<String> {
    let line = |file: &FileSummary| {
        format!(
            "{} {} +{} -{} {}",
            file.operation,
            file.path,
            file.added,
            file.removed,
            file.warnings.join(",")
        )
    };
    summary.files.iter().map(line).collect()
}

fn rename(from: &str, to: &str) -> String {
    format!(
        "diff --git a/{from} b/{to}\nsimilarity index 100%\nrename from {from}\nrename to {to}\n"
    )
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
    assert!(matches!(&error, Error::Rejected { rejects, .. } if rejects.len() == 1));
    assert_eq!(directory.everything(), before);
}

#[test]
fn a_failure_in_the_middle_restores_every_file() {
    let directory = Directory::with(&[("a", "one\n"), ("b", "one\n"), ("sub/c", "one\n")]);
    let patch = modify("a", "one", "two")
        + &create("new/file", "100644", "hello")
        + &delete("sub/c", "one")
        + &modify("b", "one", "two");
    let prepared = directory.prepare(&patch).expect("fits");
    // Another program changes a file between the check and the commit.
    fs_err::write(directory.root().join("sub/c"), "changed\n").expect("written");
    let before = directory.everything();
    let error = prepared.commit().expect_err("stale");
    assert!(
        matches!(&error, Error::Commit(CommitError::Stale { path }) if path == "sub/c"),
        "{error}"
    );
    assert_eq!(directory.everything(), before);

    let patch = modify("a", "one", "two") + &create("new/file", "100644", "hello");
    let prepared = directory.prepare(&patch).expect("fits");
    // Another program creates the new file's location first.
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
            matches!(directory.apply(&patch), Err(Error::Rejected { .. })),
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
    let prepared = directory
        .prepare(&create("sub/new", "100644", "x"))
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
            matches!(
                directory.apply(&link(name, target)),
                Err(Error::Rejected { .. })
            ),
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
        assert!(
            directory.apply(&create(name, "100644", "x")).is_err(),
            "{name}"
        );
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
        // Either refused or created without the bit.
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
    let patch = modify("a", "one", "two")
        + &create("tool", "100755", "#!/bin/sh")
        + &create(".envrc", "100644", "x")
        + &create("sub/.VSCode/tasks.json", "100644", "x")
        + &create("l", "120000", "a")
        + &create("bare/HEAD", "100644", "ref: refs/heads/main")
        + &create("bare/config", "100644", "[core]")
        + &create("barely", "100644", "x")
        + &delete(".npmrc", "x");
    let patch = parse(patch.as_bytes()).expect("valid");
    let summary = Summary::new(&patch);
    assert_eq!(
        lines(&summary),
        [
            "modify a +1 -1 ",
            "create tool +1 -0 executable",
            "create .envrc +1 -0 runs by itself",
            "create sub/.VSCode/tasks.json +1 -0 runs by itself",
            "create l +1 -0 symbolic link",
            "create bare/HEAD +1 -0 part of a git repository",
            "create bare/config +1 -0 part of a git repository",
            "create barely +1 -0 ",
            "delete .npmrc +0 -1 ",
        ]
    );
    assert_eq!(summary.totals(), (9, 8, 2));
}

#[test]
fn a_link_behind_a_link_may_not_lead_outside() {
    let link = |name: &str, target: &str| {
        create(name, "120000", target) + "\\ No newline at end of file\n"
    };
    let directory = Directory::with(&[("d/e/a", "one\n")]);
    let before = directory.everything();
    // Each link alone stays inside; combined they lead outside.
    let patch = link("d/e/up", "../..") + &link("out", "d/e/up/../file");
    assert!(matches!(
        directory.apply(&patch),
        Err(Error::Rejected { rejects, .. }) if rejects[0].path == b"out"
    ));
    assert_eq!(directory.everything(), before);
    directory.apply(&link("d/e/up", "../..")).expect("inside");
    assert!(directory.apply(&link("out", "d/e/up/../file")).is_err());
}

#[test]
fn a_file_replaces_a_directory_with_empty_directories_and_all_come_back() {
    let directory = Directory::with(&[("thing/sub/a", "one\n"), ("z", "one\n")]);
    fs_err::create_dir_all(directory.root().join("thing/empty/deep")).expect("made");
    let patch = delete("thing/sub/a", "one")
        + &create("thing", "100644", "now a file")
        + &modify("z", "one", "two");
    let prepared = directory.prepare(&patch).expect("fits");
    let before = directory.everything();
    // Another program creates the file's location at the last moment, so the commit is rolled back.
    let changes = prepared.changes();
    let staging = Staging::new(&prepared.tree).expect("made");
    fs_err::write(directory.root().join("z"), "mine\n").expect("written");
    assert!(staging.commit(&changes).is_err());
    fs_err::write(directory.root().join("z"), "one\n").expect("written");
    assert_eq!(directory.everything(), before);
    directory.apply(&patch).expect("applied");
    assert_eq!(directory.get("thing").as_deref(), Some("now a file\n"));
}

#[test]
fn what_is_no_file_is_neither_opened_nor_replaced() {
    let directory = Directory::with(&[]);
    let pipe = directory.root().join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .expect("made");
    let _socket = std::os::unix::net::UnixListener::bind(directory.root().join("socket"));
    for name in ["pipe", "socket"] {
        for patch in [
            modify(name, "one", "two"),
            delete(name, "one"),
            create(name, "100644", "x"),
        ] {
            assert!(matches!(
                directory.apply(&patch),
                Err(Error::Rejected { .. })
            ));
        }
    }
}

#[test]
fn a_name_that_another_spelling_has_taken_is_refused() {
    // As on a case-insensitive file system: the new name exists already.
    let directory = Directory::with(&[]);
    let prepared = directory
        .prepare(&(create("README", "100644", "x") + &create("other", "100644", "x")))
        .expect("fits");
    fs_err::write(directory.root().join("README"), "mine\n").expect("written");
    let before = directory.everything();
    assert!(matches!(
        prepared.commit(),
        Err(Error::Commit(CommitError::Unchanged { .. }))
    ));
    assert_eq!(directory.everything(), before);
}

#[test]
// invariant: bounded
fn patches_are_bounded() {
    let many = |count: usize| -> String {
        (0..count)
            .map(|number| create(&format!("d/{number}"), "100644", "x"))
            .collect()
    };
    let directory = Directory::with(&[]);
    directory.apply(&many(10_000)).expect("as many as allowed");
    assert_eq!(directory.everything().len(), 10_001);
    let directory = Directory::with(&[]);
    assert!(matches!(
        directory.apply(&many(10_001)),
        Err(Error::Invalid(_))
    ));
    // A file above the size limit of patches, which is not read completely.
    let huge = fs_err::File::create(directory.root().join("huge")).expect("made");
    huge.set_len(cynode_patch::MAX_FILE_BYTES + 1)
        .expect("grown");
    assert!(matches!(
        directory.apply(&modify("huge", "one", "two")),
        Err(Error::Rejected { .. })
    ));
    assert_eq!(leftovers(&directory.root()), Vec::<PathBuf>::new());
}

#[test]
fn a_changed_file_keeps_its_owner() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let directory = Directory::with(&[("a", "one\n")]);
    let path = directory.root().join("a");
    std::os::unix::fs::chown(&path, Some(1234), Some(1235)).expect("given away");
    fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o4755)).expect("set-id");
    directory
        .apply(&modify("a", "one", "two"))
        .expect("applied");
    let stat = fs_err::metadata(&path).expect("there");
    assert_eq!((stat.uid(), stat.gid()), (1234, 1235));
    assert_eq!(stat.mode() & 0o7777, 0o755, "the set-id bit stayed");
}

#[test]
fn leftovers_of_an_interrupted_command_are_found() {
    let directory = Directory::with(&[("a", "one\n")]);
    let left = directory.root().join(format!("{STAGING}x"));
    fs_err::create_dir(&left).expect("made");
    assert_eq!(leftovers(&directory.root()), [left]);
}

#[test]
fn what_was_applied_before_comes_again_without_a_conflict() {
    let directory = Directory::with(&[("a", "one\n"), ("b", "one\n"), ("c", "one\n")]);
    let first = modify("a", "one", "two")
        + &create("new/x", "100755", "hello")
        + &delete("b", "one")
        + &modify("c", "one", "two");
    let none = Earlier::default();
    let earlier = directory.apply_again(&first, &none).expect("applied");
    // The patch starts from the beginning of the session, so it conflicts without the record.
    assert!(matches!(
        directory.apply(&first),
        Err(Error::Rejected { .. })
    ));
    let before = directory.everything();
    let same = directory
        .apply_again(&first, &earlier)
        .expect("nothing to do");
    assert_eq!((directory.everything(), &same), (before, &earlier));

    // The session continues: one file changes again, one is created anew, two are reverted.
    let second = modify("a", "one", "three") + &create("new/y", "100644", "more");
    let prepared = prepare(
        &directory.root(),
        &parse(second.as_bytes()).expect("valid"),
        &earlier,
    )
    .expect("fits");
    let parsed = parse(second.as_bytes()).expect("valid");
    assert_eq!(
        lines(&prepared.summary(&parsed).expect("readable")),
        [
            "modify a +1 -1 ",
            "restore b +1 -0 ",
            "restore c +1 -1 ",
            "delete new/x +0 -1 ",
            "create new/y +1 -0 ",
        ]
    );
    let earlier = prepared.commit().expect("applied").expect("small");
    let expected = [
        ("a", "three\n"),
        ("b", "one\n"),
        ("c", "one\n"),
        ("new", "directory"),
        ("new/y", "more\n"),
    ];
    let owned = expected.map(|(name, content)| (name.to_owned(), content.to_owned()));
    assert_eq!(directory.everything(), owned);

    // A file that somebody else has changed since is not reverted.
    fs_err::write(directory.root().join("a"), "mine\n").expect("written");
    let third = modify("a", "one", "four") + &create("new/y", "100644", "more");
    assert!(matches!(
        directory.apply_again(&third, &earlier),
        Err(Error::Rejected { rejects, .. }) if rejects.len() == 1 && rejects[0].path == b"a"
    ));
    assert_eq!(directory.get("a").as_deref(), Some("mine\n"));
    // Reverted by hand, the file is in its original state.
    fs_err::write(directory.root().join("a"), "one\n").expect("written");
    directory.apply_again(&third, &earlier).expect("applied");
    assert_eq!(directory.get("a").as_deref(), Some("four\n"));
}

#[test]
// invariant: bounded
fn a_record_of_earlier_changes_is_bounded() {
    let content = |size: usize| {
        Some(File {
            kind: cynode_patch::Kind::Regular(0o644),
            bytes: vec![0; size],
        })
    };
    let location = Location::parse(b"a").expect("valid");
    let record = |sizes: &[usize]| {
        Earlier::record(sizes.iter().map(|size| (&location, content(*size), None)))
    };
    let most = earlier::MAX_KEPT_BYTES;
    assert!(record(&[most / 2, most / 2]).is_some());
    assert!(record(&[most / 2, most / 2 + 1]).is_none());
}

const EIGHT: &str = "1\n2\n3\n4\n5\n6\n7\n8\n";

#[test]
fn a_rename_of_which_one_half_is_done_shows_the_other_half() {
    let directory = Directory::with(&[("a", EIGHT), ("z", "one\n")]);
    let mut earlier = Earlier::default();
    let body = EIGHT.lines().map(|line| format!("+{line}\n"));
    let body = body.collect::<Vec<_>>().concat();
    let copied = format!(
        "diff --git a/b b/b\nnew file mode 100644\n--- /dev/null\n+++ b/b\n@@ -0,0 +1,8 @@\n{body}"
    );
    let shown = directory.show_and_apply(&copied, &mut earlier);
    assert_eq!(shown, ["create b +8 -0 "]);
    // The session now deletes the original: git reports a rename to the file that is here already.
    let shown = directory.show_and_apply(&rename("a", "b"), &mut earlier);
    assert_eq!(shown, ["delete a +0 -8 "]);
    assert_eq!(directory.get("a"), None);
    assert_eq!(
        directory.show_and_apply(&rename("a", "b"), &mut earlier),
        [""; 0]
    );
    // A rename to another name undoes the first one.
    let shown = directory.show_and_apply(&rename("a", "c"), &mut earlier);
    assert_eq!(shown, ["delete b +0 -8 ", "create c +8 -0 "]);
    let shown = directory.show_and_apply(&rename("z", "y"), &mut earlier);
    assert_eq!(
        shown,
        ["restore a +8 -0 ", "delete c +0 -8 ", "rename y +0 -0 "]
    );
}

#[test]
fn marks_come_from_the_files_after_the_change() {
    let directory = Directory::with(&[("tool", "one\n"), ("moved", EIGHT), ("plain", "one\n")]);
    for name in ["tool", "moved"] {
        let mode = std::fs::Permissions::from_mode(0o755);
        fs_err::set_permissions(directory.root().join(name), mode).expect("mode");
    }
    symlink("plain", directory.root().join("link")).expect("link");
    let patch = modify("tool", "one", "two")
        + &modify("plain", "one", "two")
        + &rename("moved", "bin/moved")
        + &rename("link", "other");
    let shown = directory.show_and_apply(&patch, &mut Earlier::default());
    assert_eq!(
        shown,
        [
            "rename bin/moved +0 -0 executable",
            "rename other +0 -0 symbolic link",
            "modify plain +1 -1 ",
            "modify tool +1 -1 executable",
        ]
    );
}

#[test]
fn files_that_make_agents_and_other_tools_run_programs_are_marked() {
    for path in [
        ".kiro/settings/mcp.json",
        "sub/.qwen/settings.json",
        "opencode.json",
        "sub/OpenCode.jsonc",
        ".opencode/plugin/x.ts",
        ".openhands/setup.sh",
        ".hg/hgrc",
        ".git-hooks/pre-commit",
        ".windsurfrules",
        ".roo/rules/x.md",
        ".amazonq/mcp.json",
        ".husky/pre-commit",
        ".claude.json",
        ".config/goose/config.yaml",
        ".codex/config.toml",
        "AGENTS.md",
    ] {
        let patch = create(path, "100644", "x");
        let summary = Summary::new(&parse(patch.as_bytes()).expect("valid"));
        assert_eq!(summary.files[0].warnings, ["runs by itself"], "{path}");
    }
    for path in [
        "Makefile",
        "my-opencode.json",
        "settings.json",
        "src/kiro.rs",
        "hgrc.txt",
    ] {
        let patch = create(path, "100644", "x");
        let summary = Summary::new(&parse(patch.as_bytes()).expect("valid"));
        assert_eq!(summary.files[0].warnings, [""; 0], "{path}");
    }
}

#[test]
fn every_client_that_is_connected_to_is_marked() {
    for file in crate::clients::CLIENTS
        .iter()
        .flat_map(crate::clients::Client::configuration_files)
    {
        let patch = create(&format!("sub/{file}"), "100644", "x");
        let summary = Summary::new(&parse(patch.as_bytes()).expect("valid"));
        assert_eq!(summary.files[0].warnings, ["runs by itself"], "{file}");
    }
}

#[test]
fn swaps_of_files_and_directories_that_were_applied_come_again_without_a_conflict() {
    let directory = Directory::with(&[("d/f", "one\n"), ("d/g", "one\n"), ("x", "one\n")]);
    let begin = directory.everything();
    let swapped = delete("d/f", "one")
        + &delete("d/g", "one")
        + &create("d", "100644", "now a file")
        + &delete("x", "one")
        + &create("x/y", "100644", "now below");
    let mut earlier = Earlier::default();
    directory.show_and_apply(&swapped, &mut earlier);
    let applied = directory.everything();
    assert_eq!(directory.show_and_apply(&swapped, &mut earlier), [""; 0]);
    assert_eq!(directory.everything(), applied);
    // The session goes on beside and in the swapped places.
    let more = swapped.replace("now below", "changed") + &create("x/z", "100644", "more");
    assert_eq!(
        directory.show_and_apply(&more, &mut earlier),
        ["modify x/y +1 -1 ", "create x/z +1 -0 "]
    );
    // One of them is reverted, then all.
    let half = delete("x", "one") + &create("x/y", "100644", "now below");
    assert_eq!(
        directory.show_and_apply(&half, &mut earlier),
        [
            "delete d +0 -1 ",
            "restore d/f +1 -0 ",
            "restore d/g +1 -0 ",
            "modify x/y +1 -1 ",
            "delete x/z +0 -1 ",
        ]
    );
    assert_eq!(
        directory.show_and_apply("", &mut earlier),
        ["restore x +1 -0 ", "delete x/y +0 -1 "]
    );
    assert_eq!(directory.everything(), begin);
}

#[test]
fn a_link_in_the_place_of_a_directory_comes_again_without_a_conflict() {
    let directory = Directory::with(&[("d/f", "one\n"), ("e/f", "one\n")]);
    let begin = directory.everything();
    let link = create("d", "120000", "e") + "\\ No newline at end of file\n";
    let swapped = delete("d/f", "one") + &link;
    let mut earlier = Earlier::default();
    directory.show_and_apply(&swapped, &mut earlier);
    assert_eq!(directory.show_and_apply(&swapped, &mut earlier), [""; 0]);
    directory.show_and_apply("", &mut earlier);
    assert_eq!(directory.everything(), begin);
}

#[test]
fn a_directory_with_files_of_somebody_else_is_not_replaced() {
    let directory = Directory::with(&[("x", "one\n")]);
    let mut earlier = Earlier::default();
    let swapped = delete("x", "one") + &create("x/y", "100644", "now below");
    directory.show_and_apply(&swapped, &mut earlier);
    fs_err::write(directory.root().join("x/mine"), "mine\n").expect("written");
    assert_eq!(directory.show_and_apply(&swapped, &mut earlier), [""; 0]);
    let before = directory.everything();
    assert!(directory.apply_again("", &earlier).is_err());
    assert_eq!(directory.everything(), before);
}

#[test]
fn names_of_staging_directories_are_refused() {
    for name in [".cynode-apply-x/y", ".cynode-apply-", ".CYNODE-Apply-x"] {
        let directory = Directory::with(&[]);
        assert!(
            matches!(
                directory.apply(&create(name, "100644", "x")),
                Err(Error::Rejected { .. })
            ),
            "{name}"
        );
        assert_eq!(leftovers(&directory.root()), Vec::<PathBuf>::new());
    }
    for name in [".cynode", "sub/.cynode-apply-x"] {
        let created = Directory::with(&[]).apply(&create(name, "100644", "x"));
        created.expect(name);
    }
}

#[test]
fn what_is_excluded_stays_as_it_is_and_is_remembered() {
    let directory = Directory::with(&[("a", "one\n"), ("b", "one\n")]);
    let mut earlier = Earlier::default();
    let both = modify("a", "one", "two") + &modify("b", "one", "two");
    directory.show_and_apply(&both, &mut earlier);
    fs_err::write(directory.root().join("b"), "mine\n").expect("written");
    // Without b, nothing conflicts, and a changes again.
    let text = modify("a", "one", "three") + &modify("b", "one", "three");
    let keep = |path: &[u8]| path != b"b";
    let mut patch = parse(text.as_bytes()).expect("valid");
    patch.retain(keep);
    let left_out = earlier.split_off(keep);
    let prepared = prepare(&directory.root(), &patch, &earlier).expect("fits");
    let summary = prepared.summary(&patch).expect("readable");
    assert_eq!(lines(&summary), ["modify a +1 -1 "]);
    let mut earlier = prepared.commit().expect("applied").expect("small");
    earlier.append(left_out);
    assert_eq!(directory.get("b").as_deref(), Some("mine\n"));
    // The record of b is still there: as it was pulled, it changes again.
    fs_err::write(directory.root().join("b"), "two\n").expect("written");
    assert_eq!(
        directory.show_and_apply(&text, &mut earlier),
        ["modify b +1 -1 "]
    );
}

use std::os::unix::fs::{PermissionsExt, symlink};

use cynode_api::PatchOperation::{Copy, Create, Delete, Modify, Rename};
use cynode_api::{ErrorCode, PatchOperation, PatchResult};
use cynode_sba_proto::AgentError;
use proptest::prelude::*;

use super::super::{digest, tests::*};

fn patch(workspace: &TestWorkspace, diff: &str) -> PatchResult {
    workspace
        .files
        .patch(diff.as_bytes(), 1, false)
        .unwrap_or_else(|failure| panic!("{failure:?}"))
}

fn rejected(workspace: &TestWorkspace, diff: &str) -> AgentError {
    let error = refused(workspace.files.patch(diff.as_bytes(), 1, false));
    assert_eq!(error.code, ErrorCode::PatchRejected, "{error:?}");
    error
}

fn reason(workspace: &TestWorkspace, diff: &str) -> String {
    let error = rejected(workspace, diff);
    assert_eq!(error.rejects.len(), 1, "{error:?}");
    error.rejects[0].reason.clone()
}

fn summary(result: &PatchResult) -> Vec<(&str, PatchOperation)> {
    result
        .files
        .iter()
        .map(|file| (file.path.as_str(), file.operation))
        .collect()
}

fn mode(workspace: &TestWorkspace, path: &str) -> u32 {
    std::fs::metadata(workspace.path(path))
        .expect("stat")
        .permissions()
        .mode()
        & 0o7777
}

#[test]
fn a_git_diff_of_every_kind_applies() {
    let workspace = TestWorkspace::new();
    workspace.put("modified", "one\ntwo\n");
    workspace.put("deleted", "gone\n");
    workspace.put("old/name", "same\nhere\n");
    workspace.put("script", "#!\n");
    workspace.put("empty", "");
    let result = patch(
        &workspace,
        "diff --git a/created b/created\nnew file mode 100755\nindex 0000000..1\n--- /dev/null\n+++ b/created\n@@ -0,0 +1 @@\n+new\n\
         diff --git a/deep/er/nothing b/deep/er/nothing\nnew file mode 100644\nindex 0000000..e69de29\n\
         diff --git a/deleted b/deleted\ndeleted file mode 100644\nindex 1..0\n--- a/deleted\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n\
         diff --git a/empty b/empty\ndeleted file mode 100644\nindex e69de29..0000000\n\
         diff --git a/modified b/copied\nsimilarity index 100%\ncopy from modified\ncopy to copied\n\
         diff --git a/modified b/modified\nindex 1..2 100644\n--- a/modified\n+++ b/modified\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n\
         diff --git a/old/name b/new/name\nsimilarity index 50%\nrename from old/name\nrename to new/name\nindex 1..2 100644\n--- a/old/name\n+++ b/new/name\n@@ -1,2 +1,2 @@\n same\n-here\n+there\n\
         diff --git a/script b/script\nold mode 100644\nnew mode 100755\n",
    );
    let expected = [
        ("created", Create),
        ("deep/er/nothing", Create),
        ("deleted", Delete),
        ("empty", Delete),
        ("copied", Copy),
        ("modified", Modify),
        ("new/name", Rename),
        ("script", Modify),
    ];
    assert_eq!(summary(&result), expected);
    assert_eq!(
        workspace.names("."),
        [
            "copied", "created", "deep", "modified", "new", "old", "script"
        ]
    );
    assert_eq!(
        (workspace.get("created"), mode(&workspace, "created")),
        (b"new\n".to_vec(), 0o755)
    );
    assert_eq!(
        (workspace.get("copied"), workspace.get("modified")),
        (b"one\ntwo\n".to_vec(), b"one\n2\n".to_vec())
    );
    assert_eq!(
        (workspace.get("new/name"), workspace.names("old").len()),
        (b"same\nthere\n".to_vec(), 0)
    );
    assert_eq!(
        (
            workspace.get("deep/er/nothing").len(),
            mode(&workspace, "script")
        ),
        (0, 0o755)
    );
    let renamed = &result.files[6];
    assert_eq!(renamed.from.as_deref(), Some("old/name"));
    assert_eq!(
        (renamed.sha256_before.clone(), renamed.sha256_after.clone()),
        (
            Some(digest::of_bytes(b"same\nhere\n")),
            Some(digest::of_bytes(b"same\nthere\n"))
        )
    );
}

#[test]
fn a_plain_diff_applies_and_names_may_differ_by_a_suffix() {
    let workspace = TestWorkspace::new();
    workspace.put("dir/file.c", b"a\n\xff\nc\n");
    let diff = b"--- dir/file.c.orig\t2024-01-01\n+++ dir/file.c\t2024-01-02\n@@ -1,3 +1,3 @@\n a\n \xff\n-c\n+C";
    let result = workspace.files.patch(diff, 0, false).expect("applied");
    assert_eq!(summary(&result), [("dir/file.c", PatchOperation::Modify)]);
    assert_eq!(workspace.get("dir/file.c"), b"a\n\xff\nC\n");
    let created = patch(&workspace, "--- a/fresh\n+++ b/fresh\n@@ -0,0 +1 @@\n+x\n");
    assert_eq!(summary(&created), [("fresh", PatchOperation::Create)]);
}

#[test]
fn a_rejected_diff_changes_nothing_and_names_every_failed_hunk() {
    let workspace = TestWorkspace::new();
    workspace.put("one", "a\nb\n");
    workspace.put("two", "x\n");
    let diff = "--- a/one\n+++ b/one\n@@ -1 +1 @@\n-a\n+A\n@@ -2 +2 @@\n-zzz\n+B\n--- a/two\n+++ b/two\n@@ -1 +1 @@\n-x\n+X\n--- a/none\n+++ b/none\n@@ -1 +1 @@\n-x\n+X\n--- /dev/null\n+++ b/two\n@@ -0,0 +1 @@\n+x\n";
    let error = rejected(&workspace, diff);
    let places: Vec<_> = error
        .rejects
        .iter()
        .map(|reject| {
            (
                reject.path.as_str(),
                reject.hunk,
                reject.line,
                reject.reason.as_str(),
            )
        })
        .collect();
    let expected = [
        (
            "one",
            Some(2),
            Some(2),
            "line 2 is 'b' where the diff expects 'zzz'",
        ),
        ("none", None, None, "no such file"),
        ("two", None, None, "the file already exists"),
    ];
    assert_eq!(places, expected);
    assert_eq!(
        (workspace.get("one"), workspace.get("two")),
        (b"a\nb\n".to_vec(), b"x\n".to_vec())
    );
    assert_eq!(workspace.names("."), ["one", "two"]);
}

#[test]
fn a_dry_run_answers_the_same_and_changes_nothing() {
    let workspace = TestWorkspace::new();
    workspace.put("file", "a\n");
    let diff = "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/new/file\n@@ -0,0 +1 @@\n+x\n";
    let dry = workspace
        .files
        .patch(diff.as_bytes(), 1, true)
        .expect("applies");
    assert_eq!(workspace.names("."), ["file"]);
    assert_eq!(workspace.get("file"), b"a\n");
    assert_eq!(patch(&workspace, diff), dry);
    assert_eq!(workspace.get("new/file"), b"x\n");
}

#[test]
fn paths_stay_in_the_workspace_and_out_of_git() {
    let workspace = TestWorkspace::new();
    std::fs::create_dir(workspace.outside("outside")).expect("made");
    symlink(workspace.outside("outside"), workspace.path("link")).expect("link");
    symlink("../outside", workspace.path("up")).expect("link");
    workspace.put(".git/config", "x\n");
    symlink(".git", workspace.path("git")).expect("link");
    symlink("target", workspace.path("final")).expect("link");
    workspace.put("file", "x\n");
    let create = |path: &str| format!("--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n");
    for (path, expected) in [
        ("../evil", "'..'"),
        ("a/../../evil", "'..'"),
        ("/etc/evil", "absolute"),
        ("link/evil", "leads outside"),
        ("up/evil", "leads outside"),
        (".git/hooks/x", ".git"),
        ("sub/.GIT/config", ".git"),
        ("git/hooks/x", ".git"),
        ("final", "already exists"),
        ("file/x", "not a directory"),
    ] {
        let diff = if path.starts_with('/') {
            format!("--- /dev/null\n+++ b//{path}\n@@ -0,0 +1 @@\n+x\n").replace("b//", "")
        } else {
            create(path)
        };
        let strip = u32::from(!path.starts_with('/'));
        let error = refused(workspace.files.patch(diff.as_bytes(), strip, false));
        assert!(
            error.code == ErrorCode::PatchRejected && error.rejects[0].reason.contains(expected),
            "{path}: {error:?}"
        );
    }
    let out = "diff --git a/file b/../evil\nrename from file\nrename to ../evil\n";
    assert!(reason(&workspace, out).contains("'..'"));
    assert!(
        !workspace.outside("evil").exists()
            && std::fs::read_dir(workspace.outside("outside"))
                .expect("listed")
                .count()
                == 0
    );
    assert!(workspace.path("file").exists());
}

#[test]
fn a_link_inside_the_workspace_leads_to_the_same_file() {
    let workspace = TestWorkspace::new();
    workspace.put("real/file", "1\n");
    symlink("real", workspace.path("alias")).expect("link");
    patch(
        &workspace,
        "--- a/alias/file\n+++ b/alias/file\n@@ -1 +1 @@\n-1\n+2\n--- a/real/file\n+++ b/real/file\n@@ -1 +1 @@\n-2\n+3\n",
    );
    assert_eq!(workspace.get("real/file"), b"3\n");
}

#[test]
fn submodules_and_binary_changes_without_content_are_rejected() {
    let workspace = TestWorkspace::new();
    workspace.put("file", "x\n");
    for (diff, expected) in [
        (
            "diff --git a/s b/s\nnew file mode 160000\n--- /dev/null\n+++ b/s\n@@ -0,0 +1 @@\n+Subproject commit 1\n",
            "160000",
        ),
        (
            "diff --git a/file b/file\nold mode 100644\nnew mode 040755\n",
            "regular file",
        ),
        (
            "diff --git a/file b/file\nindex 1..2 100644\nBinary files a/file and b/file differ\n",
            "binary",
        ),
    ] {
        assert!(reason(&workspace, diff).contains(expected), "{diff}");
    }
    assert_eq!(workspace.names("."), ["file"]);
}

/// git's diff between two versions of the file `file`; `None` stands for no file.
fn git_diff(old: Option<&[u8]>, new: Option<&[u8]>) -> Vec<u8> {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = |name: &str, content: Option<&[u8]>| {
        let Some(content) = content else {
            return "/dev/null".to_owned();
        };
        let directory = scratch.path().join(name);
        std::fs::create_dir(&directory).expect("made");
        std::fs::write(directory.join("file"), content).expect("written");
        format!("{name}/file")
    };
    let (old, new) = (path("old", old), path("new", new));
    let output = std::process::Command::new("git")
        .args(["diff", "--no-index", "--binary", "--no-prefix", &old, &new])
        .current_dir(scratch.path())
        .env_clear()
        .env("PATH", std::env::var_os("PATH").expect("PATH"))
        .env("HOME", "/nonexistent")
        .output()
        .expect("git runs");
    assert!(
        output.status.code().is_some_and(|code| code <= 1),
        "{output:?}"
    );
    output.stdout
}

#[test]
fn a_binary_diff_of_git_applies_to_the_content_that_it_was_made_for() {
    let old: Vec<u8> = (0..40_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut new = old.clone();
    new.splice(70_000..70_100, *b"another\0piece");
    for (old, new, form) in [
        (Some(&old), Some(&new), &b"delta"[..]),
        (None, Some(&new), b"literal"),
        (Some(&old), None, b"literal"),
    ] {
        let (old, new) = (old.map(Vec::as_slice), new.map(Vec::as_slice));
        let diff = git_diff(old, new);
        assert!(
            diff.windows(form.len()).any(|window| window == form),
            "{}",
            diff.escape_ascii()
        );
        let workspace = TestWorkspace::new();
        if let Some(old) = old {
            workspace.put("file", old);
        }
        workspace
            .files
            .patch(&diff, 1, false)
            .unwrap_or_else(|failure| panic!("{failure:?}"));
        match new {
            Some(new) => assert!(workspace.get("file") == new),
            None => assert!(workspace.names(".").is_empty()),
        }
        workspace.put("file", "other");
        let error = refused(workspace.files.patch(&diff, 1, false));
        assert_eq!(error.code, ErrorCode::PatchRejected);
        assert_eq!(workspace.get("file"), b"other");
    }
}

#[test]
fn a_deletion_must_match_the_whole_file() {
    let workspace = TestWorkspace::new();
    workspace.put("file", "a\nb\n");
    assert!(
        reason(&workspace, "--- a/file\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n")
            .contains("does not delete")
    );
    assert!(
        reason(
            &workspace,
            "diff --git a/file b/file\ndeleted file mode 100644\n"
        )
        .contains("does not delete")
    );
    assert_eq!(
        reason(&workspace, "--- a/none\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"),
        "no such file"
    );
}

#[test]
fn sections_for_one_file_apply_in_order_and_names_can_be_swapped() {
    let workspace = TestWorkspace::new();
    workspace.put("file", "1\n");
    let result = patch(
        &workspace,
        "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-1\n+2\n--- a/file\n+++ b/file\n@@ -1 +1 @@\n-2\n+3\n",
    );
    assert_eq!(workspace.get("file"), b"3\n");
    assert_eq!(result.files[1].sha256_before, result.files[0].sha256_after);
    workspace.put("a", "A\n");
    workspace.put("b", "B\n");
    patch(
        &workspace,
        "diff --git a/a b/b\nrename from a\nrename to b\ndiff --git a/b b/a\nrename from b\nrename to a\n",
    );
    assert_eq!(
        (workspace.get("a"), workspace.get("b")),
        (b"B\n".to_vec(), b"A\n".to_vec())
    );
    patch(
        &workspace,
        "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n--- a/new\n+++ b/new\n@@ -1 +1 @@\n-x\n+y\n--- a/new\n+++ /dev/null\n@@ -1 +0,0 @@\n-y\n",
    );
    assert!(!workspace.path("new").exists());
    assert_eq!(
        reason(
            &workspace,
            "diff --git a/a b/b\nrename from a\nrename to b\n"
        ),
        "the file already exists"
    );
}

#[test]
fn permissions_stay_but_for_the_executable_bit() {
    let workspace = TestWorkspace::new();
    workspace.put("file", "1\n");
    std::fs::set_permissions(
        workspace.path("file"),
        std::fs::Permissions::from_mode(0o640),
    )
    .expect("mode");
    patch(&workspace, "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-1\n+2\n");
    assert_eq!(mode(&workspace, "file"), 0o640);
    patch(
        &workspace,
        "diff --git a/file b/file\nold mode 100644\nnew mode 100755\n",
    );
    assert_eq!(mode(&workspace, "file"), 0o750);
    patch(
        &workspace,
        "diff --git a/file b/file\nold mode 100755\nnew mode 100644\n",
    );
    assert_eq!(mode(&workspace, "file"), 0o640);
}

#[test]
fn a_converted_diff_applies_to_files_of_both_kinds() {
    let workspace = TestWorkspace::new();
    workspace.put("unix", "a\n");
    workspace.put("dos", "a\r\n");
    let diff = "--- a/unix\n+++ b/unix\n@@ -1 +1 @@\n-a\n+b\n--- a/dos\n+++ b/dos\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n";
    patch(&workspace, &diff.replace('\n', "\r\n"));
    assert_eq!(
        (
            workspace.get("unix"),
            workspace.get("dos"),
            workspace.get("new")
        ),
        (b"b\n".to_vec(), b"b\r\n".to_vec(), b"x\n".to_vec())
    );
    let kept = "--- a/dos\n+++ b/dos\n@@ -1 +1 @@\n-b\r\n+c\r\n";
    patch(&workspace, kept);
    assert_eq!(workspace.get("dos"), b"c\r\n");
}

#[test]
fn a_text_without_a_valid_diff_is_an_invalid_request() {
    let workspace = TestWorkspace::new();
    for diff in ["", "\n", "hello\n", "--- a/x\n+++ b/x\n@@ -1,5 +1 @@\n-a\n"] {
        assert_eq!(
            code(workspace.files.patch(diff.as_bytes(), 1, false)),
            ErrorCode::InvalidRequest,
            "{diff:?}"
        );
    }
}

#[test]
fn a_failure_in_the_middle_is_rolled_back() {
    let workspace = TestWorkspace::new();
    workspace.put("a", "1\n");
    workspace.put("b", "1\n");
    let diff = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n--- a/b\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n--- /dev/null\n+++ b/new/c\n@@ -0,0 +1 @@\n+x\n--- /dev/null\n+++ b/z\n@@ -0,0 +1 @@\n+x\n";
    let inode = |path: &str| {
        std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(workspace.path(path)).expect("stat"))
    };
    let before = (inode("a"), inode("b"));
    let error = race(&workspace, diff, || workspace.put("z", "theirs"));
    assert!(error.message.contains("nothing was changed"), "{error:?}");
    assert_eq!(workspace.names("."), ["a", "b", "z"]);
    assert_eq!(
        (workspace.get("a"), workspace.get("b"), workspace.get("z")),
        (b"1\n".to_vec(), b"1\n".to_vec(), b"theirs".to_vec())
    );
    assert_eq!((inode("a"), inode("b")), before);
}

/// Plans a diff, calls `meanwhile` to change the workspace, and returns the refusal to write.
fn race(workspace: &TestWorkspace, diff: &str, meanwhile: impl FnOnce()) -> AgentError {
    let patch = cynode_patch::Patch::parse(diff.as_bytes(), 1).expect("parsed");
    let root = super::ConfinedRoot::open(&workspace.files.root).expect("opened");
    let plan = cynode_patch::plan(&super::WorkspaceTree { root: &root }, &patch)
        .unwrap_or_else(|error| panic!("{error:?}"));
    assert!(plan.rejects.is_empty(), "{:?}", plan.rejects);
    meanwhile();
    refused(super::commit::commit(&root, &plan.entries))
}

fn create_link(path: &str, target: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\nnew file mode 120000\nindex 0000000..1\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{target}\n\\ No newline at end of file\n"
    )
}

fn delete_link(path: &str, target: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\ndeleted file mode 120000\nindex 1..0000000\n--- a/{path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{target}\n\\ No newline at end of file\n"
    )
}

fn create(path: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    )
}

fn delete(path: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\ndeleted file mode 100644\n--- a/{path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    )
}

fn target(workspace: &TestWorkspace, path: &str) -> String {
    std::fs::read_link(workspace.path(path))
        .expect("a link")
        .into_os_string()
        .into_string()
        .expect("text")
}

#[test]
fn a_link_is_created_changed_renamed_and_deleted_and_never_followed() {
    let workspace = TestWorkspace::new();
    std::fs::write(workspace.outside("secret"), "secret").expect("written");
    workspace.put("file", "x\n");
    let result = patch(&workspace, &create_link("l", "../secret"));
    assert_eq!(
        (summary(&result), target(&workspace, "l")),
        (vec![("l", Create)], "../secret".to_owned())
    );
    assert_eq!(
        result.files[0].sha256_after,
        Some(digest::of_bytes(b"../secret"))
    );
    let change = "diff --git a/l b/l\nindex 1..2 120000\n--- a/l\n+++ b/l\n@@ -1 +1 @@\n-../secret\n\\ No newline at end of file\n+file\n\\ No newline at end of file\n";
    assert_eq!(summary(&patch(&workspace, change)), [("l", Modify)]);
    assert_eq!(target(&workspace, "l"), "file");
    patch(
        &workspace,
        "diff --git a/l b/d/m\nsimilarity index 100%\nrename from l\nrename to d/m\n",
    );
    assert_eq!(
        (target(&workspace, "d/m"), workspace.path("l").exists()),
        ("file".to_owned(), false)
    );
    assert!(reason(&workspace, &delete_link("d/m", "other")).contains("expects 'other'"));
    patch(&workspace, &delete_link("d/m", "file"));
    assert!(workspace.names("d").is_empty());
    assert_eq!(
        std::fs::read(workspace.outside("secret")).expect("read"),
        b"secret"
    );
    assert_eq!(workspace.get("file"), b"x\n");
}

#[test]
fn files_links_and_directories_can_replace_each_other() {
    let workspace = TestWorkspace::new();
    workspace.put("f", "x\n");
    workspace.put("kept/x", "kept\n");
    // A file becomes a link, and a link a file.
    patch(&workspace, &(delete("f") + &create_link("f", "kept")));
    assert_eq!(target(&workspace, "f"), "kept");
    // A link becomes a directory: its target stays.
    patch(
        &workspace,
        &(delete_link("f", "kept") + &create("f/x") + &create("f/deep/y")),
    );
    assert_eq!(
        (
            workspace.get("f/x"),
            workspace.get("f/deep/y"),
            workspace.get("kept/x")
        ),
        (b"x\n".to_vec(), b"x\n".to_vec(), b"kept\n".to_vec())
    );
    // A directory becomes a link.
    patch(
        &workspace,
        &(create_link("f", "kept") + &delete("f/x") + &delete("f/deep/y")),
    );
    assert_eq!(
        (target(&workspace, "f"), workspace.names(".")),
        ("kept".to_owned(), vec!["f".to_owned(), "kept".to_owned()])
    );
    patch(&workspace, &(delete_link("f", "kept") + &create("f")));
    assert_eq!(workspace.get("f"), b"x\n");
    // A directory with other content stays.
    workspace.put("d/x", "x\n");
    workspace.put("d/untracked", "");
    assert!(
        reason(&workspace, &(create_link("d", "kept") + &delete("d/x")))
            .contains("does not delete 'd/untracked' in it")
    );
    assert_eq!(workspace.names("d"), ["untracked", "x"]);
}

#[test]
fn a_diff_cannot_write_below_a_link_that_it_creates() {
    let workspace = TestWorkspace::new();
    workspace.put("protected/x", "x\n");
    symlink(".", workspace.path("here")).expect("link");
    for diff in [
        create_link("l", "protected") + &create("l/y"),
        create("l/y") + &create_link("l", "protected"),
        create_link("l", "protected") + "--- a/l/x\n+++ b/l/x\n@@ -1 +1 @@\n-x\n+y\n",
        create_link("l", "protected") + &create("here/l/y"),
    ] {
        let error = rejected(&workspace, &diff);
        assert!(
            error
                .rejects
                .iter()
                .any(|reject| reject.reason.contains("symbolic link")),
            "{error:?}"
        );
    }
    assert_eq!(
        (workspace.names("protected"), workspace.names(".")),
        (
            vec!["x".to_owned()],
            vec!["here".to_owned(), "protected".to_owned()]
        )
    );
    symlink("nowhere", workspace.path("dangling")).expect("link");
    assert!(reason(&workspace, &create("dangling/x")).contains("dangling"));
}

#[test]
fn a_type_change_that_races_with_a_writer_is_rolled_back() {
    let workspace = TestWorkspace::new();
    workspace.put("d/x", "x\n");
    symlink("d", workspace.path("l")).expect("link");
    let diff = create_link("d", "t")
        + &delete("d/x")
        + &delete_link("l", "d")
        + &create("l/deep/y")
        + &create("z");
    let error = race(&workspace, &diff, || workspace.put("z", "theirs"));
    assert!(error.message.contains("nothing was changed"), "{error:?}");
    assert_eq!(
        (workspace.get("d/x"), target(&workspace, "l")),
        (b"x\n".to_vec(), "d".to_owned())
    );
    let error = race(
        &workspace,
        &(create_link("d", "t") + &delete("d/x")),
        || {
            workspace.put("d/theirs", "");
        },
    );
    assert!(error.message.contains("changed while"), "{error:?}");
    assert_eq!(
        (workspace.names("d"), workspace.names(".")),
        (
            vec!["theirs".to_owned(), "x".to_owned()],
            vec!["d".to_owned(), "l".to_owned(), "z".to_owned()]
        )
    );
}

#[test]
fn many_rejects_still_fit_into_one_frame() {
    let workspace = TestWorkspace::new();
    let diff = (0..10_000)
        .map(|number| format!("--- a/{number:0100}\n+++ b/{number:0100}\n@@ -1 +1 @@\n-x\n+y\n"))
        .collect::<Vec<_>>()
        .concat();
    let error = workspace
        .ask(
            FileOp::Patch {
                strip: 1,
                dry_run: false,
                encoded: false,
            },
            diff.as_bytes(),
        )
        .error();
    assert!(
        error.rejects.len() > 1_000 && error.message.contains("at least"),
        "{}",
        error.message
    );
}

#[test]
fn a_diff_over_the_connection_is_answered_with_its_files() {
    let workspace = TestWorkspace::new();
    let answer = workspace.ask(
        FileOp::Patch {
            strip: 1,
            dry_run: false,
            encoded: false,
        },
        b"--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+hello\n",
    );
    let result: PatchResult = serde_json::from_slice(answer.body()).expect("a result");
    assert_eq!(summary(&result), [("x", PatchOperation::Create)]);
    let too_large = workspace.ask(
        FileOp::Patch {
            strip: 1,
            dry_run: false,
            encoded: false,
        },
        &vec![b'x'; 11 * 1024 * 1024],
    );
    assert_eq!(too_large.error().code, ErrorCode::TooLarge);
}

#[test]
fn an_encoded_patch_over_the_connection_applies_where_it_fits_once() {
    let workspace = TestWorkspace::new();
    workspace.put("file", "a\nb\na\nc\n");
    workspace.put("gone", "whatever\n");
    let ask = |text: &str| {
        let (patch, _) = cynode_patch::Patch::parse_any(text.as_bytes(), 1).expect("parsed");
        let wire = patch.to_wire().expect("encoded");
        workspace.ask(
            FileOp::Patch {
                strip: 0,
                dry_run: false,
                encoded: true,
            },
            &wire,
        )
    };
    let answer = ask("*** Begin Patch\n*** Update File: file\n@@\n-a\n+x\n*** End Patch\n");
    let error = answer.error();
    assert_eq!(error.code, ErrorCode::PatchRejected);
    let reject = &error.rejects[0];
    assert!(reject.reason.contains("fits 2 places"), "{reject:?}");
    assert_eq!(
        (reject.expected.as_slice(), reject.found.len()),
        (&["a".to_owned()][..], 0)
    );
    let answer = ask(
        "*** Begin Patch\n*** Update File: file\n@@\n-b\n-a\n+x\n*** Delete File: gone\n*** End Patch\n",
    );
    let result: PatchResult = serde_json::from_slice(answer.body()).expect("a result");
    assert_eq!(summary(&result), [("file", Modify), ("gone", Delete)]);
    assert_eq!(workspace.get("file"), b"a\nx\nc\n");
    let answer = ask("--- a/file\n+++ b/file\n@@ -1,9 +1,9 @@\n-a\n+y\n x\n");
    assert_eq!(answer.body().first(), Some(&b'{'));
    assert_eq!(workspace.get("file"), b"y\nx\nc\n");
    let invalid = workspace.ask(
        FileOp::Patch {
            strip: 0,
            dry_run: false,
            encoded: true,
        },
        b"--- a/file\n+++ b/file\n@@ -1 +1 @@\n-y\n+z\n",
    );
    assert_eq!(invalid.error().code, ErrorCode::InvalidRequest);
}

/// Contents that share pieces, so that git writes deltas; with a NUL byte, so that they are binary.
fn binary_contents() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let piece = proptest::collection::vec(any::<u8>(), 1..300);
    let order = || proptest::collection::vec(any::<proptest::sample::Index>(), 0..30);
    (proptest::collection::vec(piece, 1..12), order(), order()).prop_map(|(pieces, old, new)| {
        let content = |order: &[proptest::sample::Index]| {
            order.iter().fold(b"\0".to_vec(), |mut content, index| {
                content.extend_from_slice(index.get(&pieces).as_slice());
                content
            })
        };
        (content(&old), content(&new))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_binary_diff_of_git_leads_to_its_target((old, new) in binary_contents()) {
        prop_assume!(old != new);
        let diff = git_diff(Some(&old), Some(&new));
        let workspace = TestWorkspace::new();
        workspace.put("file", &old);
        workspace
            .files
            .patch(&diff, 1, false)
            .unwrap_or_else(|failure| panic!("{failure:?}"));
        prop_assert!(workspace.get("file") == new);
    }

    #[test]
    fn diffs_with_arbitrary_names_never_leave_the_workspace(
        names in proptest::collection::vec("[a-c./\\\\\"]{0,8}", 1..5),
        strip in 0_u32..3,
    ) {
        let workspace = TestWorkspace::new();
        symlink("..", workspace.path("a")).expect("link");
        let diff = names
            .iter()
            .map(|name| format!("--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n"))
            .collect::<Vec<_>>()
            .concat();
        let _result = workspace.files.patch(diff.as_bytes(), strip, false);
        let outside: Vec<_> = std::fs::read_dir(workspace.outside("."))
            .expect("listed")
            .map(|entry| entry.expect("entry").file_name())
            .collect();
        prop_assert_eq!(outside, vec![std::ffi::OsString::from("workspace")]);
    }
}

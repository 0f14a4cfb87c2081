//! Every format becomes the tree that git itself would make, on the base alone.

use super::{super::read_built, *};

/// Edits of every kind in the worktree.
fn edit(repository: &MirroredRepository) {
    repository.write(
        "numbers",
        NUMBERS.replace("five", "5").replace("ten\n", "ten"),
    );
    repository.write("new/file.txt", "new\n");
    repository.write("image", b"\0\x03other\xff");
    repository.write("src/run.sh", "#!/bin/sh\n");
    repository.git(&["rm", "-q", "gone"]);
    repository.git(&["mv", "old/name.txt", "renamed.txt"]);
    let work = repository.work();
    fs_err::os::unix::fs::symlink("../numbers", work.join("new/link")).expect("a link");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs_err::set_permissions(work.join("src/run.sh"), mode).expect("a mode");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_format_becomes_the_tree_that_git_makes() {
    let repository = MirroredRepository::new().await;
    let base = repository.id("HEAD");
    edit(&repository);
    let diff = repository.diff();
    let tree = repository.git(&["write-tree"]);

    let patched = repository.patch(&diff, base).await.expect("built");
    assert_eq!(patched.tree.to_string(), tree);

    let content = |path: &str| fs_err::read_to_string(repository.work().join(path));
    let text = |path: &str| content(path).expect("text");
    let mut files = tar(&[
        (".cynode/deleted", 0o644, "gone\nold/name.txt\n"),
        ("./numbers", 0o644, &text("numbers")),
        ("new/file.txt", 0o600, "new\n"),
        ("new/link@", 0o777, "../numbers"),
        ("src/run.sh", 0o700, "#!/bin/sh\n"),
        ("renamed.txt", 0o644, &text("renamed.txt")),
    ]);
    // Text can't hold the image.
    files.truncate(files.len() - 1_024);
    let mut builder = tar::Builder::new(files);
    let image = fs_err::read(repository.work().join("image")).expect("read");
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(image.len() as u64);
    builder
        .append_data(&mut header, "image", image.as_slice())
        .expect("appended");
    let files = builder.into_inner().expect("a tar");
    let written = repository
        .build(ChangesetFormat::Files, files, base)
        .await
        .expect("built");

    repository.commit("the agent's own");
    let bundle = repository.root.path().join("change.bundle");
    let path = bundle.to_string_lossy();
    repository.git(&["bundle", "create", "-q", &path, &format!("{base}..HEAD")]);
    let bundle = fs_err::read(bundle).expect("a bundle");
    let bundled = repository
        .build(ChangesetFormat::Bundle, bundle, base)
        .await
        .expect("built");
    for built in [&written, &bundled] {
        assert_eq!(built.tree.to_string(), tree);
        assert_eq!(built.commit, patched.commit, "a repeated build differs");
    }

    let commit = patched.commit.to_string();
    let text = repository
        .in_mirror(&["cat-file", "commit", &commit], None)
        .await;
    assert!(
        text.contains(&format!("\nparent {base}\nauthor Ada's agent <")),
        "{text}"
    );
    assert!(
        text.contains(&format!("\nCyNode-Task: {}\n", repository.task)),
        "{text}"
    );
    assert!(!text.contains("#12"), "{text}");
    let agents = repository.id("HEAD").to_string();
    let refs = repository.in_mirror(&["for-each-ref"], None).await;
    assert!(!refs.contains(&commit) && !refs.contains(&agents));
    let known = repository
        .in_mirror(&["cat-file", "--batch-all-objects", "--batch-check"], None)
        .await;
    assert!(
        known.contains(&commit) && !known.contains(&agents),
        "the agent's own commit is in the mirror"
    );

    let shown: Vec<(String, String)> = patched
        .change
        .files()
        .map(|file| (file.operation, file.path))
        .collect();
    let shown: Vec<(&str, &str)> = shown
        .iter()
        .map(|(operation, path)| (operation.as_str(), path.as_str()))
        .collect();
    assert_eq!(
        shown,
        [
            ("delete", "gone"),
            ("modify", "image"),
            ("create", "new/file.txt"),
            ("create", "new/link"),
            ("modify", "numbers"),
            ("delete", "old/name.txt"),
            ("create", "renamed.txt"),
            ("create", "src/run.sh"),
        ]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_hunk_is_a_conflict_that_can_be_repaired() {
    let repository = MirroredRepository::new().await;
    repository.write("numbers", NUMBERS.replace("five", "5"));
    let diff = repository.diff();
    repository.write("numbers", NUMBERS.replace("five", "FIVE"));
    let base = repository.commit("meanwhile");
    repository.fetch().await;
    let error = repository.patch(&diff, base).await.expect_err("a conflict");
    let ChangeError::Conflict(conflict) = error else {
        panic!("{error:?}")
    };
    assert_eq!(conflict.base, base.to_string());
    let [rejected] = conflict.rejects.as_slice() else {
        panic!("{conflict:?}")
    };
    assert_eq!(rejected.reject.path, "numbers");
    assert_eq!(rejected.reject.hunk, Some(1));
    assert!(rejected.reject.expected.contains(&"five".to_owned()));
    assert!(rejected.reject.found.contains(&"FIVE".to_owned()));
    let current = repository.id("HEAD:numbers").to_string();
    assert_eq!(rejected.current.as_deref(), Some(current.as_str()));
    let value = serde_json::to_value(&conflict).expect("JSON");
    assert_eq!(value["rejects"][0]["path"], "numbers");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_without_effect_is_refused() {
    let repository = MirroredRepository::new().await;
    let base = repository.id("HEAD");
    for files in [tar(&[]), tar(&[("numbers", 0o644, NUMBERS)])] {
        let result = repository.build(ChangesetFormat::Files, files, base).await;
        assert!(matches!(result, Err(ChangeError::Empty)), "{result:?}");
    }
    let result = repository
        .build(ChangesetFormat::Files, "no archive", base)
        .await;
    assert!(matches!(result, Err(ChangeError::Invalid(_))), "{result:?}");
    let result = repository.patch("no patch", base).await;
    assert!(matches!(result, Err(ChangeError::Invalid(_))), "{result:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_no_rule_admits_are_refused_before_git_sees_them() {
    let repository = MirroredRepository::new().await;
    let base = repository.id("HEAD");
    for path in [
        ".git/config",
        "a/.GIT/hooks/x",
        ".gi\u{200c}t/x",
        "a\\..\\b",
        "git~1",
    ] {
        let files = tar(&[(path, 0o644, "x")]);
        let result = repository.build(ChangesetFormat::Files, files, base).await;
        assert!(
            matches!(result, Err(ChangeError::Refused(_))),
            "{path}: {result:?}"
        );
        let diff = format!(
            "diff --git \"a/{0}\" \"b/{0}\"\nnew file mode 100644\n--- /dev/null\n+++ \
             \"b/{0}\"\n@@ -0,0 +1 @@\n+x\n",
            path.replace('\\', "\\\\")
        );
        let result = repository.patch(&diff, base).await;
        assert!(
            matches!(result, Err(ChangeError::Refused(_))),
            "{path}: {result:?}"
        );
    }
    let diff = "--- /dev/null\n+++ b/../../evil\n@@ -0,0 +1 @@\n+x\n";
    let result = repository.patch(diff, base).await;
    assert!(matches!(result, Err(ChangeError::Refused(_))), "{result:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_set_is_read_strictly() {
    let repository = MirroredRepository::new().await;
    let base = repository.id("HEAD");
    let build = |files: Vec<u8>| repository.build(ChangesetFormat::Files, files, base);
    for files in [
        tar(&[(".cynode/other", 0o644, "x")]),
        tar(&[(".cynode/deleted@", 0o644, "x")]),
        tar(&[("a", 0o644, "x"), ("./a", 0o644, "y")]),
        tar(&[("gone", 0o644, "x"), (".cynode/deleted", 0o644, "gone\n")]),
    ] {
        let result = build(files).await;
        assert!(matches!(result, Err(ChangeError::Invalid(_))), "{result:?}");
    }
    for files in [
        tar(&[(".cynode/deleted", 0o644, "missing\n")]),
        tar(&[(".cynode/deleted", 0o644, "src\n")]),
        tar(&[("numbers/x", 0o644, "x")]),
        tar(&[("src", 0o644, "x")]),
    ] {
        let result = build(files).await;
        assert!(
            matches!(result, Err(ChangeError::Conflict(_))),
            "{result:?}"
        );
    }
    let replaced = tar(&[
        ("src", 0o644, "x"),
        (".cynode/deleted", 0o644, "src/main.rs\n"),
    ]);
    let built = build(replaced)
        .await
        .expect("a file in the place of a directory");
    assert_eq!(built.change.entries.len(), 2);
    let replaced = tar(&[("gone/x", 0o644, "x"), (".cynode/deleted", 0o644, "gone\n")]);
    build(replaced)
        .await
        .expect("a directory in the place of a file");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_commit_of_this_promotion_is_read_back() {
    let repository = MirroredRepository::new().await;
    let base = repository.id("HEAD");
    repository.write("numbers", "1\n");
    let diff = repository.diff();
    let built = repository.patch(&diff, base).await.expect("built");
    let upstream = repository.commit("upstream");
    repository.fetch().await;
    let read = |commit, base, task, promotion| {
        let runner = &repository.runner;
        async move { read_built(runner, &mirror(), commit, base, task, promotion).await }
    };
    let (task, promotion) = (repository.task, repository.promotion);
    let again = read(built.commit, base, task, promotion)
        .await
        .expect("ours");
    assert_eq!(again.tree, built.tree);
    assert_eq!(again.change.entries.len(), 1);
    for result in [
        read(upstream, base, task, promotion).await,
        read(built.commit, upstream, task, promotion).await,
        read(built.commit, base, TaskId::generate(), promotion).await,
        read(built.commit, base, task, PromotionId::generate()).await,
    ] {
        assert!(
            matches!(result, Err(ChangeError::ForeignCommit(_))),
            "{result:?}"
        );
    }
}

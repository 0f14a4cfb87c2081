//! A bundle publishes nothing that it does not bring.

use std::process::Stdio;

use super::*;

/// Text that does not compress well, so that a pack shows whether it has it.
fn plans() -> String {
    let line = |number: u64| format!("{:016x}\n", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (1..500).map(line).collect()
}

/// A branch that the agent was not given.
async fn with_secret_branch() -> (MirroredRepository, ObjectId) {
    let repository = MirroredRepository::new().await;
    let base = repository.id("HEAD");
    repository.git(&["checkout", "-q", "-b", "secret"]);
    repository.write("plans", plans());
    repository.commit("secret");
    repository.fetch().await;
    repository.git(&["checkout", "-q", "main"]);
    (repository, base)
}

/// A pack of these objects alone, or of what revisions say.
fn pack(repository: &MirroredRepository, args: &[&str], input: &str) -> Vec<u8> {
    #[expect(clippy::disallowed_methods, reason = "git() has no standard input")]
    let mut child = std::process::Command::new("git")
        .args(["pack-objects", "-q", "--stdout"])
        .args(args)
        .current_dir(repository.work())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("git runs");
    let mut stdin = child.stdin.take().expect("input");
    std::io::Write::write_all(&mut stdin, input.as_bytes()).expect("written");
    drop(stdin);
    child.wait_with_output().expect("ended").stdout
}

fn bundle(prerequisite: ObjectId, head: ObjectId, pack: &[u8]) -> Vec<u8> {
    let header = format!("# v2 git bundle\n-{prerequisite} x\n{head} refs/heads/x\n\n");
    [header.as_bytes(), pack].concat()
}

/// A commit of the files, without those of the worktree.
fn commit_of(
    repository: &MirroredRepository,
    base: ObjectId,
    files: &[(&str, ObjectId)],
) -> ObjectId {
    repository.git(&["read-tree", &base.to_string()]);
    for (path, id) in files {
        let info = format!("100644,{id},{path}");
        repository.git(&["update-index", "--add", "--cacheinfo", &info]);
    }
    let tree = repository.git(&["write-tree"]);
    let base = base.to_string();
    let commit = repository.git(&["commit-tree", &tree, "-p", &base, "-m", "x"]);
    repository.git(&["reset", "-q", "--hard", "main"]);
    ObjectId::parse(&commit).expect("an id")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blob_of_another_branch_must_be_brought() {
    let (repository, base) = with_secret_branch().await;
    let secret = repository.id("secret:plans");
    let commit = commit_of(&repository, base, &[("copied", secret)]);
    let tree = repository.id(&format!("{commit}^{{tree}}"));
    let alone = pack(&repository, &[], &format!("{commit}\n{tree}\n"));
    let refused = repository
        .build(ChangesetFormat::Bundle, bundle(base, commit, &alone), base)
        .await;
    let reason = refused.expect_err("refused").to_string();
    assert!(reason.contains(&secret.to_string()), "{reason}");

    let whole = pack(&repository, &[], &format!("{commit}\n{tree}\n{secret}\n"));
    repository
        .build(ChangesetFormat::Bundle, bundle(base, commit, &whole), base)
        .await
        .expect("it has the blob");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delta_must_not_build_on_another_branch() {
    let (repository, base) = with_secret_branch().await;
    let secret = repository.id("secret");
    repository.git(&["checkout", "-q", "--detach", "secret"]);
    repository.write("plans", format!("{}one more line\n", plans()));
    let commit = repository.commit("similar");
    // A thin pack, whose deltas build on what the secret branch has.
    let thin = pack(
        &repository,
        &["--revs", "--thin", "--delta-base-offset"],
        &format!("{commit}\n^{secret}\n"),
    );
    assert!(
        thin.len() < 1_000,
        "the pack has the whole file: {}",
        thin.len()
    );
    for (garbage, expected) in [
        (0, "neither in the bundle"),
        (1, "data follows its pack"),
        (100_000, "data follows its pack"),
    ] {
        let mut bytes = bundle(secret, commit, &thin);
        bytes.extend(vec![0; garbage]);
        let refused = repository.build(ChangesetFormat::Bundle, bytes, base).await;
        let reason = refused.expect_err("refused").to_string();
        assert!(
            reason.contains(expected),
            "with {garbage} bytes more: {reason}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_of_another_branch_must_be_brought() {
    let (repository, base) = with_secret_branch().await;
    repository.git(&["checkout", "-q", "secret"]);
    // Its blob is in the base, only its names are not.
    repository.write("hidden/name-of-a-customer", NUMBERS);
    repository.commit("names");
    repository.fetch().await;
    let hidden = repository.id("secret:hidden");
    repository.git(&["checkout", "-q", "main"]);
    repository.git(&["read-tree", "--prefix=public/", &hidden.to_string()]);
    let tree = repository.git(&["write-tree"]);
    let parent = base.to_string();
    let commit = repository.git(&["commit-tree", &tree, "-p", &parent, "-m", "x"]);
    let commit = ObjectId::parse(&commit).expect("an id");
    let alone = pack(&repository, &[], &format!("{commit}\n{tree}\n"));
    let refused = repository
        .build(ChangesetFormat::Bundle, bundle(base, commit, &alone), base)
        .await;
    let reason = refused.expect_err("refused").to_string();
    assert!(reason.contains(&hidden.to_string()), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_of_the_history_of_the_base_need_not_be_brought() {
    let repository = MirroredRepository::new().await;
    let old = repository.id("HEAD:numbers");
    repository.write("numbers", "1\n2\n");
    let base = repository.commit("second");
    repository.fetch().await;
    let commit = commit_of(&repository, base, &[("numbers", old)]);
    let tree = repository.id(&format!("{commit}^{{tree}}"));
    let alone = pack(&repository, &[], &format!("{commit}\n{tree}\n"));
    let built = repository
        .build(ChangesetFormat::Bundle, bundle(base, commit, &alone), base)
        .await
        .expect("reachable");
    assert_eq!(built.tree, tree);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_bundles_are_refused() {
    let (repository, base) = with_secret_branch().await;
    let head = repository.id("HEAD");
    let unknown = ObjectId::parse(&"1".repeat(40)).expect("an id");
    let good = pack(&repository, &["--revs"], &format!("{head}\n"));
    for bytes in [
        Vec::new(),
        b"no bundle".to_vec(),
        b"# v2 git bundle\n".to_vec(),
        b"# v2 git bundle\n\n".to_vec(),
        format!("# v2 git bundle\n{head} a\n{head} b\n\n").into_bytes(),
        format!("# v3 git bundle\n@filter=blob:none\n{head} a\n\n").into_bytes(),
        bundle(unknown, head, &good),
        bundle(base, unknown, &good),
        bundle(base, head, &good[..good.len() / 2]),
        bundle(base, head, b""),
        [b"# v2 git bundle\n".as_slice(), &b"a".repeat(100_000)].concat(),
    ] {
        let result = repository.build(ChangesetFormat::Bundle, bytes, base).await;
        assert!(matches!(result, Err(ChangeError::Invalid(_))), "{result:?}");
    }
    let same = repository
        .build(ChangesetFormat::Bundle, bundle(base, head, &good), base)
        .await;
    assert!(matches!(same, Err(ChangeError::Empty)), "{same:?}");
}

//! Applying diffs.

use anyhow::Result;
use cynode_api::{ENCODED_PATCH, PatchOperation, PatchReject, PatchResult};
use cynode_patch::MAX_WIRE_BYTES;
use cynode_tests::Answer;
use http::Method;
use serde_json::{Value, json};

use super::{Sandbox, sha256};

impl Sandbox {
    async fn patch(&self, body: Value) -> Result<PatchResult> {
        let answer = self.call("files:patch", &body).await?;
        assert_eq!(answer.status, 200, "{answer:?}");
        Ok(serde_json::from_slice(&answer.body)?)
    }

    /// Returns the rejects of a diff that must not apply.
    async fn rejects(&self, body: Value) -> Result<Vec<PatchReject>> {
        let answer = self.call("files:patch", &body).await?;
        assert_eq!(
            answer.outcome(),
            (409, "patch_rejected".to_owned()),
            "{body}"
        );
        let problem = answer.problem()?;
        assert!(
            problem.detail.contains("nothing was changed"),
            "{}",
            problem.detail
        );
        Ok(serde_json::from_value(
            problem.extensions["rejects"].clone(),
        )?)
    }
}

/// A diff from git: creates a file, changes one, deletes one, renames and changes one, makes one
/// executable.
const DIFF: &str = "\
diff --git a/changed b/changed
index 1111111..2222222 100644
--- a/changed
+++ b/changed
@@ -1,3 +1,4 @@
 one
-two
+zwei
 three
+four
diff --git a/gone b/gone
deleted file mode 100644
index 3333333..0000000
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-gone
diff --git a/new/file with space b/new/file with space
new file mode 100755
index 0000000..4444444
--- /dev/null
+++ b/new/file with space	
@@ -0,0 +1,2 @@
+made
+here
\\ No newline at end of file
diff --git a/old b/renamed
similarity index 66%
rename from old
rename to renamed
index 5555555..6666666 100644
--- a/old
+++ b/renamed
@@ -1,3 +1,3 @@
 a
 b
-c
+C
diff --git a/tool b/tool
old mode 100644
new mode 100755
";

async fn sandbox_before_patch() -> Result<Sandbox> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh(
            "printf 'one\\ntwo\\nthree\\n' > changed; echo gone > gone; printf 'a\\nb\\nc\\n' \
             > old; echo run > tool; echo same > same",
        )
        .await?;
    Ok(sandbox)
}

// part of: ISC-05
#[tokio::test]
async fn a_diff_makes_changes_deletes_and_renames_files() -> Result<()> {
    let sandbox = sandbox_before_patch().await?;
    let untouched = sandbox.snapshot("/workspace").await?;
    let dry = sandbox
        .patch(json!({"diff": DIFF, "dry_run": true}))
        .await?;
    assert_eq!(sandbox.snapshot("/workspace").await?, untouched);
    let done = sandbox.patch(json!({"diff": DIFF})).await?;
    assert_eq!(done, dry);

    let files: Vec<_> = done
        .files
        .iter()
        .map(|file| {
            (
                file.path.as_str(),
                file.operation,
                file.sha256_before.clone(),
                file.sha256_after.clone(),
            )
        })
        .collect();
    let hash = |content: &str| Some(sha256(content.as_bytes()));
    assert_eq!(
        files,
        [
            (
                "changed",
                PatchOperation::Modify,
                hash("one\ntwo\nthree\n"),
                hash("one\nzwei\nthree\nfour\n")
            ),
            ("gone", PatchOperation::Delete, hash("gone\n"), None),
            (
                "new/file with space",
                PatchOperation::Create,
                None,
                hash("made\nhere")
            ),
            (
                "renamed",
                PatchOperation::Rename,
                hash("a\nb\nc\n"),
                hash("a\nb\nC\n")
            ),
            ("tool", PatchOperation::Modify, hash("run\n"), hash("run\n")),
        ]
    );
    assert_eq!(done.files[3].from.as_deref(), Some("old"));
    assert_eq!(
        sandbox
            .sh(
                "cat changed renamed 'new/file with space'; echo; find . -type f | sort; stat \
                 -c %a tool 'new/file with space'"
            )
            .await?,
        "one\nzwei\nthree\nfour\na\nb\nC\nmade\nhere\n./changed\n./new/file with \
         space\n./renamed\n./same\n./tool\n755\n755\n"
    );

    // A plain diff without a prefix, and one with an offset.
    sandbox
        .patch(json!({"diff": "--- same\n+++ same\n@@ -1 +1 @@\n-same\n+other\n", "strip": 0}))
        .await?;
    sandbox.sh("(seq 20; cat changed) > longer").await?;
    sandbox
        .patch(
            json!({"diff": "--- a/longer\n+++ b/longer\n@@ -1,3 +1,3 @@\n \
                            one\n-zwei\n+two\n three"}),
        )
        .await?;
    assert_eq!(
        sandbox.sh("cat same; tail -n 4 longer").await?,
        "other\none\ntwo\nthree\nfour\n"
    );
    Ok(())
}

// part of: ISC-05
#[tokio::test]
async fn a_diff_that_does_not_apply_names_every_place_and_changes_nothing() -> Result<()> {
    let sandbox = sandbox_before_patch().await?;
    let untouched = sandbox.snapshot("/workspace").await?;
    let diff = "--- a/same\n+++ b/same\n@@ -1 +1 @@\n-same\n+fine\n\
        --- a/changed\n+++ b/changed\n@@ -1,2 +1,2 @@\n one\n-wrong\n+x\n@@ -3 +3 @@\n-three\n+fine\n\
        --- a/missing\n+++ b/missing\n@@ -1 +1 @@\n-x\n+y\n\
        --- /dev/null\n+++ b/gone\n@@ -0,0 +1 @@\n+it is there already\n\
        --- a/old\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n";
    let rejects = sandbox.rejects(json!({"diff": diff})).await?;
    let places: Vec<_> = rejects
        .iter()
        .map(|reject| (reject.path.as_str(), reject.hunk, reject.line))
        .collect();
    assert_eq!(
        places,
        [
            ("changed", Some(1), Some(1)),
            ("missing", None, None),
            ("gone", None, None),
            ("old", None, None)
        ]
    );
    assert!(rejects.iter().all(|reject| !reject.reason.is_empty()));
    assert_eq!(
        sandbox
            .rejects(json!({"diff": diff, "dry_run": true}))
            .await?,
        rejects
    );

    sandbox
        .sh("mkdir dir; ln -s same link; chmod 444 same")
        .await?;
    let untouched = [untouched, sandbox.snapshot("/workspace").await?];
    for (diff, reason) in [
        ("--- a/dir\n+++ b/dir\n@@ -1 +1 @@\n-x\n+y\n", "directory"),
        (
            "--- a/link\n+++ b/link\n@@ -1 +1 @@\n-same\n+y\n",
            "symbolic link",
        ),
        (
            "--- a/same\n+++ b/same\n@@ -1 +1 @@\n-same\n+y\n",
            "may not",
        ),
        (
            "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 \
             @@\n+/etc/passwd\n",
            "No newline at end of file",
        ),
        (
            "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+dir\n\\ No newline at end of file\n\
             diff --git a/l/x b/l/x\nnew file mode 100644\n--- /dev/null\n+++ b/l/x\n@@ -0,0 +1 @@\n+x\n",
            "below 'l', a symbolic link",
        ),
        (
            "diff --git a/changed b/changed\n\
             index 8352675d67aed6625ece79af41c27fdb4ee2e867..eaf36c1daccfdf325514461cd1a2ffbc139b5464 100644\n\
             GIT binary patch\nliteral 4\nLcmZQzWMT#Y01f~L\n\nliteral 3\nKcmZQzWC8#H2LJ>B\n\n",
            "differs from the one the diff was made for",
        ),
    ] {
        let rejects = sandbox.rejects(json!({"diff": diff})).await?;
        assert!(
            rejects.len() == 1 && rejects[0].reason.contains(reason),
            "{reason}: {rejects:?}"
        );
    }
    assert_eq!(sandbox.snapshot("/workspace").await?, untouched[1]);
    Ok(())
}

#[tokio::test]
async fn a_binary_patch_of_git_creates_and_changes_a_file() -> Result<()> {
    let sandbox = sandbox_before_patch().await?;
    let create = "diff --git a/b b/b\nnew file mode 100644\n\
        index 0000000000000000000000000000000000000000..8352675d67aed6625ece79af41c27fdb4ee2e867\n\
        GIT binary patch\nliteral 3\nKcmZQzWC8#H2LJ>B\n\nliteral 0\nHcmV?d00001\n\n";
    let change = "diff --git a/b b/b\n\
        index 8352675d67aed6625ece79af41c27fdb4ee2e867..eaf36c1daccfdf325514461cd1a2ffbc139b5464 100644\n\
        GIT binary patch\nliteral 4\nLcmZQzWMT#Y01f~L\n\nliteral 3\nKcmZQzWC8#H2LJ>B\n\n";
    for (diff, bytes) in [(create, "000102"), (change, "00010203")] {
        sandbox.patch(json!({"diff": diff})).await?;
        assert_eq!(sandbox.sh("od -An -tx1 b | tr -d ' \\n'").await?, bytes);
    }
    Ok(())
}

#[tokio::test]
// invariant: no-host-paths
async fn no_diff_reaches_out_of_the_workspace_or_into_git() -> Result<()> {
    let sandbox = sandbox_before_patch().await?;
    sandbox
        .sh(
            "mkdir -p /tmp/outside .git/hooks sub; echo kept > /tmp/outside/file; ln -s \
             /tmp/outside out; ln -s ../.. sub/up; ln -s .git alias; echo x > .git/config",
        )
        .await?;
    let state = async || {
        Ok::<_, anyhow::Error>((
            sandbox.snapshot("/workspace").await?,
            sandbox.snapshot("/tmp").await?,
        ))
    };
    let untouched = state().await?;
    for (path, strip) in [
        ("b/../evil", 1),
        ("b/sub/../../evil", 1),
        ("b/../tmp/outside/evil", 1),
        ("/tmp/outside/evil", 0),
        ("b//tmp/outside/evil/..", 1),
        ("b/out/evil", 1),
        ("b/sub/up/tmp/evil", 1),
        ("b/.git/hooks/pre-commit", 1),
        ("b/.GIT/config2", 1),
        ("b/alias/hooks/pre-commit", 1),
        ("b/sub/.git/config", 1),
    ] {
        let rejects = sandbox
            .rejects(json!({
                "diff": format!("--- /dev/null\n+++ {path}\n@@ -0,0 +1 @@\n+evil\n"),
                "strip": strip
            }))
            .await?;
        assert_eq!(rejects.len(), 1, "{path}: {rejects:?}");
    }
    for diff in [
        "--- a/out/file\n+++ b/out/file\n@@ -1 +1 @@\n-kept\n+evil\n",
        "--- a/out/file\n+++ /dev/null\n@@ -1 +0,0 @@\n-kept\n",
        "--- a/.git/config\n+++ b/.git/config\n@@ -1 +1 @@\n-x\n+evil\n",
        "diff --git a/out/file b/stolen\nsimilarity index 100%\nrename from out/file\nrename to \
         stolen\n",
        "diff --git a/same b/../evil\nsimilarity index 100%\ncopy from same\ncopy to ../evil\n",
        "diff --git a/same b/out/evil\nsimilarity index 100%\nrename from same\nrename to \
         out/evil\n",
    ] {
        assert!(
            !sandbox.rejects(json!({"diff": diff})).await?.is_empty(),
            "{diff}"
        );
    }
    assert_eq!(state().await?, untouched);
    Ok(())
}

#[tokio::test]
async fn a_text_that_is_no_diff_is_not_half_applied() -> Result<()> {
    let sandbox = sandbox_before_patch().await?;
    let untouched = sandbox.snapshot("/workspace").await?;
    for diff in [
        "",
        "not a diff",
        "@@ -1 +1 @@\n-same\n+x\n",
        "--- a/same\n+++ b/same\n",
        // Where a hunk with wrong counts ends must be beyond doubt.
        "--- a/same\n+++ b/same\n@@ -1,5 +1 @@\n-same\ntext\n+x\n",
        "--- a/same\n+++ b/same\n@@ -1 +1,9 @@\n-same\n--- x\n+++ x\n",
        "--- a/same\n+++ b/same\n@@ nonsense @@\n-same\n+x\n",
        "--- a/same\n+++ b/same\n@@ -1 +1 @@\n-same\n+x\n--- a/changed\n+++ b/changed\n@@ -1,9 +1 \
         @@\n",
        "*** Begin Patch\n*** Update File: same\n@@\n-same\n+x\n",
        "*** Begin Patch\n*** Update File: same\n@@\n-same\n+x\n*** End Patch\ntext\n",
        "--- /dev/null\n+++ /dev/null\n@@ -0,0 +1 @@\n+x\n",
        "diff --git a/same b/same\n",
        "--- \"a/same\n+++ b/same\n@@ -1 +1 @@\n-same\n+x\n",
    ] {
        let answer = sandbox.call("files:patch", &json!({"diff": diff})).await?;
        assert_eq!(
            answer.outcome(),
            (400, "invalid_request".to_owned()),
            "{diff:?}"
        );
    }
    assert_eq!(
        sandbox
            .call("files:patch", &json!({"diff": DIFF, "strip": 33}))
            .await?
            .outcome(),
        (400, "invalid_request".to_owned())
    );
    // Over 10 MiB of diff: the body limit applies first.
    let large = format!(
        "--- /dev/null\n+++ b/large\n@@ -0,0 +1 @@\n+{}\n",
        "x".repeat(10 << 20)
    );
    assert_eq!(
        sandbox
            .call("files:patch", &json!({"diff": large}))
            .await?
            .outcome(),
        (413, "too_large".to_owned())
    );
    assert_eq!(sandbox.snapshot("/workspace").await?, untouched);
    Ok(())
}

#[tokio::test]
async fn a_text_is_read_in_any_form_and_repaired_by_the_worker() -> Result<()> {
    let sandbox = sandbox_before_patch().await?;
    let wrong = "--- a/changed\n+++ b/changed\n@@ @@\n-two\n+2\n--- a/same\n+++ b/same\n\
                 @@ -1,5 +1,5 @@\n-same\n+other\n";
    let dry = sandbox
        .patch(json!({"diff": wrong, "dry_run": true}))
        .await?;
    let done = sandbox.patch(json!({"diff": wrong})).await?;
    assert_eq!(done, dry);
    let repaired: Vec<_> = done
        .repaired
        .iter()
        .map(|repair| (repair.path.as_str(), repair.hunk, repair.what.as_str()))
        .collect();
    assert_eq!(
        repaired,
        [
            ("changed", 1, "without line numbers"),
            ("same", 1, "its header says -5 +5 lines, but it has -1 +1"),
        ]
    );
    let begin = "*** Begin Patch\n*** Update File: changed\n@@ one\n 2\n+and\n*** Delete File: \
                 gone\n*** End Patch\n";
    assert_eq!(
        sandbox.patch(json!({"diff": begin})).await?.repaired.len(),
        0
    );
    assert_eq!(
        sandbox.sh("cat changed same; ls").await?,
        "one\n2\nand\nthree\nother\nchanged\nold\nsame\ntool\n"
    );
    // A rejection says what was repaired too.
    let twice = "--- a/changed\n+++ b/changed\n@@ @@\n-none\n+x\n";
    let rejected = sandbox.call("files:patch", &json!({"diff": twice})).await?;
    let problem: Value = serde_json::from_slice(&rejected.body)?;
    assert_eq!(
        (rejected.status, &problem["repaired"][0]["path"]),
        (409, &json!("changed"))
    );
    Ok(())
}

#[tokio::test]
// invariant: bounded
async fn an_encoded_patch_has_a_limit_of_its_own() -> Result<()> {
    let sandbox = sandbox_before_patch().await?;
    let send = async |media_type: &str, query: &str, body: Vec<u8>| -> Result<Answer> {
        let path = format!("/v1/worker/sessions/{}/files:patch{query}", sandbox.id);
        let request = sandbox.http.request(Method::POST, &path);
        Answer::of(request.header("content-type", media_type).body(body)).await
    };
    let of = |size: usize| {
        let mut patch = b"cynode-patch 1\n--- \"same\"\n+++ \"same\"\n@@ -1,1 +0,0 @@\n-".to_vec();
        patch.resize(size - 1, b'x');
        patch.push(b'\n');
        patch
    };
    // The agent reads all of it, and finds another line in the file.
    let most = send(ENCODED_PATCH, "", of(MAX_WIRE_BYTES)).await?;
    assert_eq!(most.outcome(), (409, "patch_rejected".to_owned()));
    let more = send(ENCODED_PATCH, "", of(MAX_WIRE_BYTES + 1)).await?;
    assert_eq!(more.outcome(), (413, "too_large".to_owned()));
    assert!(more.problem()?.detail.contains("20971520"));
    for (media_type, query, body) in [
        (
            ENCODED_PATCH,
            "",
            &b"--- a/same\n+++ b/same\n@@ -1 +1 @@\n-same\n+x\n"[..],
        ),
        (
            ENCODED_PATCH,
            "",
            b"cynode-patch 2\n--- \"same\"\n+++ \"same\"\n@@ -1,1 +0,0 @@\n-same\n",
        ),
        (ENCODED_PATCH, "", b""),
        (ENCODED_PATCH, "?strip=1", &of(100)),
        (ENCODED_PATCH, "?dry_run=x", &of(100)),
    ] {
        let answer = send(media_type, query, body.to_vec()).await?;
        assert_eq!(
            answer.outcome(),
            (400, "invalid_request".to_owned()),
            "{query} {}",
            String::from_utf8_lossy(body)
        );
    }
    let text = send("text/plain", "", of(100)).await?;
    assert_eq!(text.outcome(), (415, "unsupported_media_type".to_owned()));
    assert_eq!(sandbox.sh("cat same").await?, "same\n");
    Ok(())
}

//! The workspace's changes as a git diff, on the image that has git.

use anyhow::Result;
use cynode_tests::{BASE, session};
use serde_json::json;

use super::Sandbox;

#[tokio::test]
async fn the_changes_of_a_repository_are_exported_with_untracked_files() -> Result<()> {
    let mut request = session();
    request.image_ref = BASE.to_owned();
    let sandbox = Sandbox::with(&request).await?;
    let export = async |base: Option<&str>| {
        sandbox
            .call("export", &json!({"format": "patch", "base": base}))
            .await
    };
    assert_eq!(
        export(None).await?.outcome(),
        (409, "not_a_repository".to_owned())
    );
    // The session began empty, which needs no repository.
    assert_eq!(export(Some("brought")).await?.outcome().0, 200);

    sandbox
        .sh("git init -q -b main . && git config user.name x && git config user.email x@example.org
            printf 'one\\ntwo\\n' > tracked; echo gone > deleted; seq 20 > old; echo ignored > .gitignore
            git add . && git commit -q -m first && git tag base
            echo second > second && git add . && git commit -q -m second
            printf 'one\\nTWO\\n' > tracked; rm deleted; mv old new; mkdir sub; echo fresh > 'sub/un tracked'; echo secret > ignored
            echo staged > staged; git add staged; printf 'a\\0b' > binary; chmod +x tracked")
        .await?;
    let state =
        "sha256sum .git/index; git status --porcelain; find .git -type f | sort | xargs sha256sum";
    let before = sandbox.sh(state).await?;
    let exported = export(None).await?;
    assert_eq!(
        (exported.status, exported.header("content-type")),
        (200, "text/x-diff")
    );
    let diff = String::from_utf8(exported.body.to_vec())?;
    assert_eq!(
        sandbox.sh(state).await?,
        before,
        "the user's index or objects changed"
    );
    for part in [
        "+TWO",
        "new mode 100755",
        "deleted file mode 100644",
        "rename from old",
        "+++ b/sub/un tracked",
        "+fresh",
        "+++ b/staged",
        "GIT binary patch",
    ] {
        assert!(diff.contains(part), "{part} is missing in\n{diff}");
    }
    assert!(
        !diff.contains("secret") && !diff.contains("second"),
        "{diff}"
    );
    let since = String::from_utf8(export(Some("brought")).await?.body.to_vec())?;
    assert!(
        since.contains("+second") && since.contains("+fresh") && !since.contains("+secret"),
        "{since}"
    );
    let against = String::from_utf8(export(Some("base")).await?.body.to_vec())?;
    assert!(
        against.contains("+second") && against.contains("+fresh"),
        "{against}"
    );
    for base in ["nonsense", "--output=/tmp/x", "", "a b"] {
        assert_eq!(
            export(Some(base)).await?.outcome(),
            (400, "invalid_request".to_owned()),
            "{base:?}"
        );
    }
    assert_eq!(sandbox.sh("ls -A /tmp").await?, "");

    // Git applies the diff to a fresh copy, which then equals the original.
    sandbox.write("/tmp/changes.diff", diff).await?;
    let applied = sandbox
        .sh(
            "git clone -q . /tmp/copy && cd /tmp/copy && git apply --index \
             /tmp/changes.diff && rm -rf .git && cd /workspace && diff -r -x \
             .git -x ignored . /tmp/copy && echo same",
        )
        .await?;
    assert_eq!(applied, "same\n");
    Ok(())
}

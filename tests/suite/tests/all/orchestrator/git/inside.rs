//! What git can and can't do in a sandbox.

use anyhow::Result;

use super::GitFixture;

// proves: CYNAI.SANDBX.GitLocalOnly, REQ-SANDBX-0123 with orchestrator::git::promotion::*
#[tokio::test]
async fn git_works_on_the_workspace_and_reaches_no_remote() -> Result<()> {
    let fixture = GitFixture::start("git").await?;
    let session = fixture.session("shop")?;
    let head = fixture.served.tip("main")?;
    let url = fixture.server.url(&format!("{}.git", super::PATH));

    let printed = fixture
        .sh(
            &session,
            "git rev-parse HEAD; git symbolic-ref --short HEAD; git status --porcelain; \
             git remote; git log --format=%s",
        )?
        .success()?;
    assert_eq!(printed, format!("{head}\nmain\nBegin\n"));
    let configured = fixture
        .sh(
            &session,
            "git config --local --list; ls .git/hooks 2>/dev/null || true",
        )?
        .success()?;
    for word in [
        "remote.",
        "credential",
        "url.",
        "hookspath",
        "fsmonitor",
        "filter.",
    ] {
        assert!(!configured.contains(word), "{word}: {configured}");
    }
    let printed = fixture
        .sh(
            &session,
            "echo more >> README.md; git status --porcelain; git diff --numstat; \
             git add README.md; \
             git -c user.name=a -c user.email=a@example.org commit -qm 'Add more'; \
             git log --format=%s; git fsck --strict >&2",
        )?
        .success()?;
    assert_eq!(printed, " M README.md\n1\t0\tREADME.md\nAdd more\nBegin\n");

    let requests = fixture.server.requests().len();
    for command in [
        format!("git clone {url} elsewhere"),
        format!("git fetch {url}"),
        format!("git pull {url} main"),
        format!("git push {url} HEAD:refs/heads/cynode/stolen"),
        format!("git submodule add {url} sub"),
        format!("git ls-remote {url}"),
        format!("git remote add origin {url} && git fetch origin"),
        format!("git archive --remote={url} HEAD"),
        // Not installed, or without a way to its server.
        "git lfs fetch --all".to_owned(),
        "git clone git://localhost/shop elsewhere".to_owned(),
        "git clone ssh://git@localhost/shop elsewhere".to_owned(),
    ] {
        let ran = fixture.sh(
            &session,
            &format!("export GIT_TERMINAL_PROMPT=0; {command}"),
        )?;
        assert!(ran.code.is_some_and(|code| code != 0), "{command}: {ran:?}");
    }
    assert_eq!(fixture.server.requests().len(), requests);
    fixture.assert_untouched()?;
    fixture.down()
}

#[tokio::test]
async fn submodules_and_lfs_files_are_named_and_not_fetched() -> Result<()> {
    let fixture = GitFixture::start("git").await?;
    let other = fixture.server.create("team/other.git", &[("a", "b\n")])?;
    let commit = other.tip("main")?;
    fixture.served.commit(
        "main",
        &[
            (
                ".gitmodules",
                "[submodule \"other\"]\n\tpath = other\n\turl = ../other.git\n",
            ),
            (
                "large.bin",
                "version https://git-lfs.github.com/spec/v1\noid sha256:\
                 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\nsize 12345\n",
            ),
        ],
        "Name others",
    )?;
    let name = "refs/heads/main";
    let stream = format!(
        "commit {name}\ncommitter t <t@example.org> now\ndata 3\nSub\nfrom {name}^0\nM 160000 \
         {commit} other\n"
    );
    fixture.served.git(
        &["fast-import", "--quiet", "--date-format=now"],
        stream.as_bytes(),
    )?;
    let created = fixture.json(&[
        "session",
        "create",
        "--repo",
        "shop",
        "--task",
        &fixture.task,
    ])?;
    let session = created["session_id"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let source = created.to_string();
    assert!(
        source.contains("large.bin") && source.contains("\"other\""),
        "{source}"
    );
    let printed = fixture
        .sh(&session, "head -n 1 large.bin; ls -A other | wc -l")?
        .success()?;
    assert_eq!(printed, "version https://git-lfs.github.com/spec/v1\n0\n");
    let seen = fixture.server.requests();
    assert!(
        seen.iter().all(|request| !request.path.contains("other")),
        "{seen:?}"
    );
    fixture.down()
}

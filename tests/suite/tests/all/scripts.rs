//! The scripts that build images and start CyNode, with small inputs and without a network.

use std::{
    collections::BTreeMap,
    io::Read as _,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::repository;
use tar::{Archive, Builder, EntryType, Header};

/// An entry of an archive: its type, its mode, and its content or what it links to.
type Entry = (EntryType, u32, String);

fn succeeded(output: &Output) -> Result<()> {
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

fn write(path: &Path, entries: &[(&str, EntryType, u32, &str)]) -> Result<()> {
    let mut builder = Builder::new(fs_err::File::create(path)?);
    for (name, kind, mode, content) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(*mode);
        if matches!(kind, EntryType::Link | EntryType::Symlink) {
            header.set_size(0);
            builder.append_link(&mut header, name, content)?;
        } else {
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, name, content.as_bytes())?;
        }
    }
    builder.into_inner()?.sync_all()?;
    Ok(())
}

fn read(path: &Path) -> Result<BTreeMap<String, Entry>> {
    let mut archive = Archive::new(fs_err::File::open(path)?);
    let mut found = BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        let (kind, mode) = (entry.header().entry_type(), entry.header().mode()?);
        let mut content = String::new();
        if let Some(target) = entry.link_name()? {
            let target = target.display().to_string();
            target.trim_start_matches("./").clone_into(&mut content);
        } else {
            entry.read_to_string(&mut content)?;
        }
        let name = name.trim_start_matches("./").trim_end_matches('/');
        found.insert(name.to_owned(), (kind, mode, content));
    }
    Ok(found)
}

#[test]
fn a_layer_has_what_changed_and_whiteouts_for_what_is_gone() -> Result<()> {
    use EntryType::{Directory, Link, Regular, Symlink};
    let scratch = tempfile::tempdir()?;
    let path = |name: &str| scratch.path().join(name);
    write(
        &path("lower.tar"),
        &[
            ("./etc/", Directory, 0o755, ""),
            ("./etc/same", Regular, 0o644, "same"),
            ("./etc/edited", Regular, 0o644, "before"),
            ("./etc/mode", Regular, 0o644, "x"),
            ("./etc/gone", Regular, 0o644, "x"),
            ("./etc/link", Symlink, 0o777, "same"),
            ("./old/", Directory, 0o755, ""),
            ("./old/inner", Regular, 0o644, "x"),
            ("./usr/", Directory, 0o755, ""),
            ("./usr/one", Regular, 0o755, "linked"),
        ],
    )?;
    write(
        &path("upper.tar"),
        &[
            ("./etc/", Directory, 0o755, ""),
            ("./etc/same", Regular, 0o644, "same"),
            ("./etc/edited", Regular, 0o644, "after"),
            ("./etc/mode", Regular, 0o755, "x"),
            ("./etc/link", Symlink, 0o777, "edited"),
            ("./usr/", Directory, 0o755, ""),
            ("./usr/one", Regular, 0o755, "linked"),
            // A link to a file of the lower layer is a copy; one to a new file stays a link.
            ("./usr/two", Link, 0o755, "usr/one"),
            ("./usr/new", Regular, 0o700, "new"),
            ("./usr/newer", Link, 0o700, "usr/new"),
        ],
    )?;
    let difference = || {
        Command::new(repository().join("images/difference"))
            .args([path("lower.tar"), path("upper.tar"), path("out.tar")])
            .output()
    };
    succeeded(&difference()?)?;
    let first = fs_err::read(path("out.tar"))?;
    let file = |mode: u32, content: &str| (Regular, mode, content.to_owned());
    let expected = [
        ("etc", (Directory, 0o755, String::new())),
        ("etc/.wh.gone", file(0o644, "")),
        ("etc/edited", file(0o644, "after")),
        ("etc/link", (Symlink, 0o777, "edited".to_owned())),
        ("etc/mode", file(0o755, "x")),
        (".wh.old", file(0o644, "")),
        ("usr", (Directory, 0o755, String::new())),
        ("usr/new", file(0o700, "new")),
        ("usr/newer", (Link, 0o700, "usr/new".to_owned())),
        ("usr/two", file(0o755, "linked")),
    ];
    let expected: BTreeMap<_, _> = expected
        .into_iter()
        .map(|(name, entry)| (name.to_owned(), entry))
        .collect();
    assert_eq!(read(&path("out.tar"))?, expected);
    succeeded(&difference()?)?;
    ensure!(fs_err::read(path("out.tar"))? == first, "not reproducible");
    Ok(())
}

/// A program that stands in for another.
fn program(path: &Path, script: &str) -> Result<()> {
    fs_err::create_dir_all(path.parent().context("a directory")?)?;
    fs_err::write(path, format!("#!/usr/bin/env bash\nset -eu\n{script}"))?;
    Ok(fs_err::set_permissions(
        path,
        PermissionsExt::from_mode(0o755),
    )?)
}

#[test]
// invariant: fail-closed
fn a_package_with_another_digest_is_not_used() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let path = |name: &str| scratch.path().join(name);
    // An npm that packs what it was told to, wherever it would come from.
    program(
        &path("bin/npm"),
        "mkdir package
         echo '{\"name\": \"left\", \"version\": \"1.0.0\"}' > package/package.json
         tar --create --gzip --file left-1.0.0.tgz package
         rm -r package\n",
    )?;
    let fetch = |digest: &str| -> Result<Output> {
        let list = path("packages");
        fs_err::write(&list, format!("npm left@1.0.0 {digest}\n"))?;
        let out = path("out");
        drop(fs_err::remove_dir_all(&out));
        fs_err::create_dir(&out)?;
        let search = std::env::var("PATH").unwrap_or_default();
        Ok(Command::new(repository().join("images/fetch"))
            .arg(&list)
            .arg(&out)
            .env("PATH", format!("{}:{search}", path("bin").display()))
            .output()?)
    };
    let installed = path("out/root/usr/local/lib/node_modules/left/package.json");
    let wrong = fetch(&format!("sha512-{}==", "A".repeat(86)))?;
    let message = String::from_utf8_lossy(&wrong.stderr).into_owned();
    ensure!(
        !wrong.status.success() && message.contains("is not the package that"),
        "{message}"
    );
    ensure!(!installed.exists(), "it was unpacked");
    let (_, found) = message.split_once("its digest is ").context("the digest")?;
    ensure!(found.trim().starts_with("sha512-"), "{found}");
    for bad in ["", "sha256-abc", "none"] {
        let refused = fetch(bad)?;
        ensure!(!refused.status.success() && !installed.exists(), "{bad}");
    }
    Ok(())
}

#[test]
fn the_smoke_test_of_up_leaves_the_session_of_the_directory_alone() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let path = |name: &str| scratch.path().join(name);
    fs_err::create_dir(path("scripts"))?;
    // Nothing may be linked onto the PATH of this machine.
    let script = fs_err::read_to_string(repository().join("scripts/up"))?;
    ensure!(script.contains("bin=/usr/local/bin"), "{script}");
    let bin = path("bin").display().to_string();
    fs_err::write(path("scripts/up"), script.replace("/usr/local/bin", &bin))?;
    fs_err::create_dir_all(path("state"))?;
    fs_err::write(path("state/admin.token"), "token")?;
    fs_err::write(path("state/endpoints.json"), r#"{"api": "http://x"}"#)?;
    program(
        &path("target/up/cynode"),
        "echo \"${XDG_STATE_HOME:-}|${CYNODE_STATE_DIR:-}|$*\" >> \"$CALLS\"
         case $1-${2:-} in
           run-*) echo 'hello from a job'; exit 3 ;;
           session-create) echo '{\"session_id\": \"sid\"}' ;;
           session-exec) echo 'hello from the sandbox' ;;
           session-cp) case $4 in sid:*) cp \"$3\" \"$CALLS.file\" ;; *) cp \"$CALLS.file\" \"$4\" ;; esac ;;
         esac\n",
    )?;
    let state = path("state").display().to_string();
    let home = path("home").display().to_string();
    let output = Command::new("bash")
        .arg(path("scripts/up"))
        .env("CALLS", path("calls"))
        .env("CYNODE_STATE_DIR", &state)
        .env("XDG_STATE_HOME", &home)
        .env("HOME", path("home"))
        .env_remove("FOREGROUND")
        .output()?;
    succeeded(&output)?;
    let calls = fs_err::read_to_string(path("calls"))?;
    let mut sessions = 0;
    for call in calls.lines() {
        let mut parts = call.splitn(3, '|');
        let (Some(client), Some(server), Some(command)) =
            (parts.next(), parts.next(), parts.next())
        else {
            anyhow::bail!("{call}");
        };
        ensure!(server == state, "{call}");
        if command.starts_with("session ") || command.starts_with("run ") {
            sessions += 1;
            ensure!(client != home && client.ends_with("/state"), "{call}");
        }
    }
    ensure!(sessions == 6, "{calls}");
    Ok(())
}

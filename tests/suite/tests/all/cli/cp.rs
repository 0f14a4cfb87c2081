//! `session cp`: files and trees in both directions, with the semantics of `cp`.

use std::{
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use anyhow::{Context as _, Result};
use cynode_tests::World;
use tar::{EntryType, Header};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use super::{Cli, CommandResult, cynode, run};

/// Every entry below a directory, with its type or mode and its content or target.
fn tree(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(directory) = pending.pop() {
        for entry in fs_err::read_dir(&directory)? {
            let path = entry?.path();
            let name = path.strip_prefix(root)?.display().to_string();
            let metadata = fs_err::symlink_metadata(&path)?;
            let mode = metadata.permissions().mode() & 0o7777;
            if metadata.is_symlink() {
                found.push(format!("{name} -> {}", fs_err::read_link(&path)?.display()));
            } else if metadata.is_dir() {
                found.push(format!("{name}/ {mode:o}"));
                pending.push(path);
            } else {
                found.push(format!(
                    "{name} {mode:o} {:?}",
                    String::from_utf8_lossy(&fs_err::read(&path)?)
                ));
            }
        }
    }
    found.sort();
    Ok(found)
}

fn write(path: &Path, content: &str, mode: u32) -> Result<()> {
    fs_err::create_dir_all(path.parent().context("a parent")?)?;
    fs_err::write(path, content)?;
    Ok(fs_err::set_permissions(
        path,
        std::fs::Permissions::from_mode(mode),
    )?)
}

impl Cli {
    fn cp(&self, arguments: &[&str]) -> Result<CommandResult> {
        self.run(&[&["session", "cp"], arguments].concat())
    }
}

#[tokio::test]
async fn files_go_both_ways_with_mode_and_name() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    let here = cli.world.directory().join("here");
    let local = |name: &str| here.join(name).display().to_string();
    let there = |path: &str| format!("{id}:{path}");
    write(&here.join("a file"), "content\n", 0o751)?;

    let up = cli.cp(&[&local("a file"), &there("new dir/named")])?;
    assert_eq!((up.code, up.text().as_str()), (Some(0), ""), "{up:?}");
    assert_eq!(
        cli.sh(&id, "stat -c '%a %u' 'new dir/named'; cat 'new dir/named'")?,
        "751 1000\ncontent\n"
    );
    cli.cp(&[&local("a file"), &there("new dir")])?.success()?;
    cli.cp(&[&local("a file"), &there("new dir/other/")])?
        .success()?;
    cli.cp(&[&local("a file"), &there("")])?.success()?;
    assert_eq!(
        cli.sh(&id, "find . -type f | sort")?,
        "./a file\n./new dir/a file\n./new dir/named\n./new dir/other/a file\n"
    );

    cli.sh(
        &id,
        "printf 'from \\0 inside' > 'out file'; chmod 640 'out file'; ln -s 'out file' \
         link; chmod 4755 'new dir/named'",
    )?;
    cli.cp(&[&there("out file"), &local("back")])?.success()?;
    cli.cp(&[&there("/workspace/out file"), &local("")])?
        .success()?;
    cli.cp(&[&there("link"), &local("followed")])?.success()?;
    cli.cp(&[&there("new dir/named"), &local("plain")])?
        .success()?;
    assert_eq!(
        tree(&here)?,
        [
            r#"a file 751 "content\n""#,
            r#"back 640 "from \0 inside""#,
            r#"followed 640 "from \0 inside""#,
            r#"out file 640 "from \0 inside""#,
            r#"plain 755 "content\n""#
        ]
    );
    // Through standard input and output.
    assert_eq!(
        cli.cp(&[&there("out file"), "-"])?.success()?,
        "from \0 inside"
    );
    assert_eq!(
        cli.run_with(&["session", "cp", "-", &there("piped")], b"typed")?
            .code,
        Some(0)
    );
    assert_eq!(cli.sh(&id, "cat piped")?, "typed");

    for (source, target, expected) in [
        (local("missing"), there("x"), (64, "local_file")),
        (there("missing"), local("x"), (64, "not_found")),
        (local(""), there("x"), (64, "usage")),
        (there("new dir"), local("x"), (64, "usage")),
        (local("a file"), there("/etc/x"), (77, "permission_denied")),
        (
            there("out file"),
            local("no/such/place"),
            (64, "local_file"),
        ),
        (there("out file"), "/proc/x".to_owned(), (64, "local_file")),
        ("-".to_owned(), there("new dir/"), (64, "usage")),
    ] {
        let ran = cli.cp(&[&source, &target])?;
        assert_eq!(
            ran.failure(),
            (expected.0, expected.1.to_owned()),
            "{source} {target}: {ran:?}"
        );
    }
    assert_eq!(tree(&here)?.len(), 5, "a failed copy left files");
    Ok(())
}

#[tokio::test]
async fn the_umask_restricts_what_is_copied_out() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    let here = cli.world.directory().join("here");
    fs_err::create_dir(&here)?;
    cli.sh(
        &id,
        "mkdir -p tree/open; echo x > tree/open/file; echo x > tree/run; \
         chmod 777 tree/open tree/run; chmod 666 tree/open/file",
    )?;
    let cp = |umask: &str, arguments: &[&str]| {
        let plain = cli.command()?;
        let mut command = std::process::Command::new("sh");
        // The shell sets the umask and becomes the program.
        command
            .args(["-c", "umask \"$0\" && exec \"$@\"", umask])
            .arg(plain.get_program())
            .args(["session", "cp"])
            .args(arguments);
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        run(&mut command, b"")?.success()
    };
    for (umask, expected) in [
        (
            "077",
            [
                "file 600 \"x\\n\"",
                "tree/ 700",
                "tree/open/ 700",
                "tree/open/file 600 \"x\\n\"",
                "tree/run 700 \"x\\n\"",
            ],
        ),
        (
            "002",
            [
                "file 664 \"x\\n\"",
                "tree/ 755",
                "tree/open/ 775",
                "tree/open/file 664 \"x\\n\"",
                "tree/run 775 \"x\\n\"",
            ],
        ),
    ] {
        let target = here.join(umask);
        fs_err::create_dir(&target)?;
        let target_name = target.display().to_string();
        cp(umask, &["-r", &format!("{id}:tree"), &target_name])?;
        cp(umask, &[&format!("{id}:tree/open/file"), &target_name])?;
        assert_eq!(tree(&target)?, expected, "{umask}");
    }
    Ok(())
}

#[tokio::test]
async fn trees_go_both_ways_with_links_and_modes() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    let here = cli.world.directory().join("here");
    let source = here.join("my tree");
    write(&source.join("sub dir/file with space"), "one\n", 0o644)?;
    write(&source.join("sub dir/run"), "#!/bin/sh\n", 0o755)?;
    write(&source.join("private"), "two\n", 0o600)?;
    write(&source.join("gr\u{fc}n \u{1f331}"), "", 0o644)?;
    write(&source.join("n".repeat(120)).join("deep"), "three\n", 0o644)?;
    fs_err::create_dir(source.join("empty"))?;
    symlink("sub dir/run", source.join("link"))?;
    symlink("../private", source.join("sub dir/up"))?;
    let before = tree(&source)?;
    let local = |name: &str| here.join(name).display().to_string();
    let there = |path: &str| format!("{id}:{path}");

    cli.cp(&["-r", &local("my tree"), &there("copy")])?
        .success()?;
    assert_eq!(
        cli.sh(
            &id,
            "cat 'copy/link' 'copy/sub dir/up'; readlink copy/link; stat -c '%a %u' \
             copy/private; find copy | wc -l"
        )?
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" "),
        "#!/bin/sh two sub dir/run 600 1000 11"
    );
    cli.cp(&["-r", &there("copy"), &local("back")])?.success()?;
    assert_eq!(tree(&here.join("back"))?, before);
    // Into an existing directory, in both directions, and again over existing files.
    fs_err::create_dir(here.join("into"))?;
    for _ in 0..2 {
        cli.cp(&["-r", &there("copy"), &local("into")])?.success()?;
    }
    assert_eq!(tree(&here.join("into/copy"))?, before);
    for _ in 0..2 {
        cli.cp(&["-r", &local("my tree"), &there("copy")])?
            .success()?;
    }
    assert_eq!(
        cli.sh(&id, "ls copy | wc -l; cat 'copy/my tree/private'")?
            .split_whitespace()
            .collect::<Vec<_>>(),
        ["7", "two"]
    );
    // The contents of a directory instead of the directory itself.
    cli.cp(&["-r", &local("my tree/."), &there("flat")])?
        .success()?;
    assert_eq!(cli.sh(&id, "ls flat | wc -l")?.trim(), "6");
    let special = here.join("with-pipe");
    fs_err::create_dir(&special)?;
    assert!(
        std::process::Command::new("mkfifo")
            .arg(special.join("pipe"))
            .status()?
            .success()
    );
    let partly = cli.cp(&["-r", &local("with-pipe"), &there("with-pipe")])?;
    assert_eq!(partly.failure(), (70, "partial_copy".to_owned()));
    assert!(
        partly.stderr.contains("skipped: ") && partly.stderr.contains("pipe"),
        "{partly:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_file_larger_than_one_call_takes_goes_both_ways() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    let (large, back) = (
        cli.world.directory().join("large"),
        cli.world.directory().join("back"),
    );
    let file = fs_err::File::create(&large)?;
    file.set_len((100 << 20) + 7)?;
    std::os::unix::fs::FileExt::write_all_at(file.file(), b"the end", 100 << 20)?;
    cli.cp(&[&large.display().to_string(), &format!("{id}:deep/er/large")])?
        .success()?;
    assert_eq!(
        cli.sh(&id, "stat -c %s deep/er/large; tail -c 7 deep/er/large")?,
        format!("{}\nthe end", (100 << 20) + 7)
    );
    cli.cp(&[&format!("{id}:deep/er/large"), &back.display().to_string()])?
        .success()?;
    assert!(
        std::process::Command::new("cmp")
            .arg(&large)
            .arg(&back)
            .status()?
            .success()
    );
    Ok(())
}

// part of: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test]
async fn nothing_that_a_sandbox_makes_is_written_outside_of_the_target() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    let here = cli.world.directory().join("here");
    let outside = cli.world.directory().join("outside");
    fs_err::create_dir_all(&here)?;
    write(&outside.join("file"), "kept\n", 0o644)?;
    let untouched = tree(&outside)?;
    cli.sh(
        &id,
        &format!(
            "mkdir -p tree/sub; cd tree; ln -s {outside} out; ln -s ../.. up; ln -s sub/../../.. mixed; ln -s sub inside; ln -s /etc/passwd passwd; mkfifo pipe
             echo x > plain; chmod 4777 plain; echo x > \"$(printf 'esc\\033[31m')\"; ln -s / \"$(printf 'bad\\033]0;x\\007')\"",
            outside = outside.display()
        ),
    )?;
    let target = here.join("copy").display().to_string();
    let copied = cli.cp(&["-r", &format!("{id}:tree"), &target])?;
    assert_eq!(copied.failure(), (70, "partial_copy".to_owned()));
    for name in ["out", "up", "mixed", "passwd"] {
        assert!(
            copied.stderr.contains(&format!("skipped: {name}: ")),
            "{name}: {}",
            copied.stderr
        );
    }
    assert!(
        !copied.stderr.contains('\u{1b}') && !copied.stderr.contains('\u{7}'),
        "a name is not escaped: {:?}",
        copied.stderr
    );
    assert_eq!(
        tree(&here.join("copy"))?,
        [
            "esc\u{1b}[31m 644 \"x\\n\"",
            "inside -> sub",
            "plain 755 \"x\\n\"",
            "sub/ 755"
        ]
    );

    // A link in an archive doesn't redirect later entries.
    cli.sh(
        &id,
        "cd tree; rm inside; mkdir inside; echo evil > inside/evil",
    )?;
    let refused = cli.cp(&["-r", &format!("{id}:tree/."), &target])?;
    assert_eq!(
        refused.failure(),
        (70, "unsafe_archive".to_owned()),
        "{refused:?}"
    );
    // Neither does a link that the user has in the target.
    let mine = here.join("mine");
    fs_err::create_dir(&mine)?;
    symlink(&outside, mine.join("out"))?;
    symlink(outside.join("file"), mine.join("file"))?;
    cli.sh(
        &id,
        "mkdir -p second/out; echo evil > second/out/evil; echo evil > second/file",
    )?;
    assert_eq!(
        cli.cp(&["-r", &format!("{id}:second/."), &mine.display().to_string()])?
            .failure(),
        (70, "unsafe_archive".to_owned())
    );
    assert_eq!(tree(&outside)?, untouched);
    assert!(!here.join("copy/sub/evil").exists());
    Ok(())
}

/// A malicious worker: it announces a directory and sends this archive.
async fn hostile_worker(archive: Vec<u8>) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut request = vec![0; 16 * 1024];
            let count = socket.read(&mut request).await.unwrap_or(0);
            let is_export = String::from_utf8_lossy(&request[..count]).starts_with("POST");
            let head = if is_export {
                format!("content-length: {}", archive.len())
            } else {
                "content-length: 0\r\nx-type: dir".to_owned()
            };
            drop(
                socket
                    .write_all(
                        format!("HTTP/1.1 200 OK\r\nconnection: close\r\n{head}\r\n\r\n")
                            .as_bytes(),
                    )
                    .await,
            );
            if is_export {
                drop(socket.write_all(&archive).await);
            }
            drop(socket.shutdown().await);
        }
    });
    Ok(url)
}

// part of: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_was_forged_is_refused() -> Result<()> {
    let world = World::new()?;
    let outside = world.directory().join("outside");
    write(&outside.join("file"), "kept\n", 0o644)?;
    let beside = outside.join("evil").display().to_string();
    let entry = |kind: EntryType, name: &str, link: &str, content: &[u8]| {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o6777);
        header.set_size(content.len() as u64);
        let old = header.as_old_mut();
        old.name[..name.len()].copy_from_slice(name.as_bytes());
        old.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        let mut bytes = [header.as_bytes().as_slice(), content].concat();
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    };
    for entries in [
        vec![entry(EntryType::Regular, "../outside/evil", "", b"x")],
        vec![entry(EntryType::Regular, &beside, "", b"x")],
        vec![
            entry(EntryType::Symlink, "link", "sub", b""),
            entry(EntryType::Regular, "link/evil", "", b"x"),
        ],
        vec![entry(EntryType::Directory, "a/../../outside/evil", "", b"")],
    ] {
        let mut archive = entries.concat();
        archive.resize(archive.len() + 1_024, 0);
        let url = hostile_worker(archive).await?;
        let target = world.directory().join("copy");
        let id = "01890000-0000-7000-8000-000000000001";
        let ran = run(
            cynode(&world)?
                .env("CYNODE_URL", url)
                .env("CYNODE_TOKEN", "x")
                .args(["session", "cp", "-r", &format!("{id}:tree")])
                .arg(&target),
            b"",
        )?;
        assert_eq!(ran.failure(), (70, "unsafe_archive".to_owned()), "{ran:?}");
        assert_eq!(tree(&outside)?, ["file 644 \"kept\\n\""]);
    }
    Ok(())
}

//! The private PostgreSQL.

use std::{
    os::unix::fs::{MetadataExt as _, PermissionsExt},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};
use cynode_tests::{TEST_USER, World, eventually, postgres_programs};
use rustix::process::Signal;

use super::stack::{Stack, kill};
use crate::cli::{cynode, run};

/// The role on its own.
fn start(world: &World, state: &Path) -> Result<Child> {
    let log = fs_err::OpenOptions::new()
        .create(true)
        .append(true)
        .open(world.directory().join("postgres.log"))?
        .into_parts()
        .0;
    let mut command = cynode(world)?;
    command
        .arg("postgres")
        .arg("--state-dir")
        .arg(state)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let child = command.spawn()?;
    world.kill_on_cleanup(child.id())?;
    Ok(child)
}

fn is_ready(state: &Path, child: &Child) -> bool {
    let text =
        fs_err::read_to_string(state.join("postgres/data/postmaster.pid")).unwrap_or_default();
    text.lines().next() == Some(&child.id().to_string())
        && text
            .lines()
            .nth(7)
            .is_some_and(|line| line.trim() == "ready")
}

async fn ready(world: &World, state: &Path, child: &Child) -> Result<()> {
    eventually("PostgreSQL is ready", Duration::from_secs(60), async || {
        Ok(is_ready(state, child))
    })
    .await
    .with_context(|| {
        fs_err::read_to_string(world.directory().join("postgres.log")).unwrap_or_default()
    })
}

/// Runs a statement as a user of this machine.
pub(super) fn psql(
    user: Option<&str>,
    socket: &Path,
    statement: &str,
) -> Result<crate::cli::CommandResult> {
    let program = postgres_programs()?.join("psql");
    let mut command = match user {
        None => Command::new(program),
        Some(user) => {
            let mut command = Command::new("setpriv");
            command
                .args([
                    format!("--reuid={user}"),
                    format!("--regid={user}"),
                    "--clear-groups".to_owned(),
                ])
                .arg(program);
            command
        }
    };
    command
        .current_dir("/")
        .args([
            "-X", "-A", "-t", "-U", "cynode", "-d", "cynode", "-c", statement, "-h",
        ])
        .arg(socket);
    run(&mut command, b"")
}

#[tokio::test]
async fn the_private_server_belongs_to_its_user_and_listens_only_on_its_socket() -> Result<()> {
    let world = World::new()?;
    let state = world.state_dir();
    let mut child = start(&world, &state)?;
    ready(&world, &state, &child).await?;
    let process = fs_err::metadata(format!("/proc/{}", child.id()))?;
    assert_ne!(process.uid(), 0, "PostgreSQL runs as root");
    for name in ["postgres", "postgres/data", "postgres/socket"] {
        let found = fs_err::metadata(state.join(name))?;
        assert_eq!(
            (found.uid(), found.permissions().mode() & 0o777),
            (process.uid(), 0o700),
            "{name}"
        );
    }
    let socket = state.join("postgres/socket");
    for (name, value) in [
        ("listen_addresses", ""),
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("data_checksums", "on"),
        ("server_encoding", "UTF8"),
    ] {
        assert_eq!(
            psql(None, &socket, &format!("show {name}"))?.success()?,
            format!("{value}\n"),
            "{name}"
        );
    }
    // Access to the socket is not enough without being one of its users.
    for path in [state.join("postgres"), socket.clone()] {
        fs_err::set_permissions(path, PermissionsExt::from_mode(0o755))?;
    }
    fs_err::set_permissions(
        socket.join(".s.PGSQL.5432"),
        PermissionsExt::from_mode(0o777),
    )?;
    let stranger = psql(Some(TEST_USER), &socket, "select 1")?;
    assert!(
        stranger.code != Some(0) && stranger.stderr.contains("authentication failed"),
        "{stranger:?}"
    );
    // A second server doesn't replace it, though no `up` runs.
    let second = run(cynode(&world)?.arg("postgres"), b"")?;
    assert_eq!(
        second.failure(),
        (64, "already_running".to_owned()),
        "{second:?}"
    );
    assert!(
        is_ready(&state, &child) && second.stderr.contains(&format!("pid {}", child.id())),
        "{second:?}"
    );
    kill(child.id(), Signal::INT)?;
    assert!(child.wait()?.success());
    Ok(())
}

#[tokio::test]
async fn the_user_of_the_server_traverses_a_closed_state_directory_and_reads_nothing() -> Result<()>
{
    let world = World::new()?;
    let state = world.state_dir();
    fs_err::set_permissions(&state, PermissionsExt::from_mode(0o700))?;
    let mut child = start(&world, &state)?;
    ready(&world, &state, &child).await?;
    assert_eq!(
        fs_err::metadata(&state)?.permissions().mode() & 0o777,
        0o710
    );
    let looked = Command::new("setpriv")
        .args([
            "--reuid=postgres",
            "--regid=postgres",
            "--clear-groups",
            "ls",
        ])
        .arg(&state)
        .output()?;
    assert!(!looked.status.success(), "{looked:?}");
    kill(child.id(), Signal::INT)?;
    child.wait()?;
    Ok(())
}

#[tokio::test]
async fn an_ordinary_user_has_a_private_server() -> Result<()> {
    let world = World::new()?;
    let (home, program) = (
        world.directory().join("own"),
        world.directory().join("cynode"),
    );
    fs_err::copy(World::cynode()?, &program)?;
    fs_err::create_dir(&home)?;
    assert!(
        Command::new("chown")
            .arg(TEST_USER)
            .arg(&home)
            .status()?
            .success()
    );
    let state = home.join("state");
    let log = fs_err::File::create(world.directory().join("postgres.log"))?
        .into_parts()
        .0;
    let mut command = Command::new("setpriv");
    command.args([
        format!("--reuid={TEST_USER}"),
        format!("--regid={TEST_USER}"),
        "--clear-groups".to_owned(),
    ]);
    command
        .args([
            "sh",
            "-c",
            r#"mkdir -m 700 "$2" && exec "$1" postgres --state-dir "$2""#,
            "sh",
        ])
        .arg(&program)
        .arg(&state);
    let mut child = command
        .current_dir(&home)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    world.kill_on_cleanup(child.id())?;
    ready(&world, &state, &child).await?;
    let socket = state.join("postgres/socket");
    assert_eq!(
        psql(Some(TEST_USER), &socket, "select current_user")?.success()?,
        "cynode\n"
    );
    kill(child.id(), Signal::INT)?;
    child.wait()?;
    Ok(())
}

#[tokio::test]
// invariant: supervisor
async fn an_interrupted_initialization_of_a_cluster_is_repeated() -> Result<()> {
    let world = World::new()?;
    let state = world.state_dir();
    let begun = |state: &Path| -> Vec<String> {
        let entries = fs_err::read_dir(state.join("postgres"))
            .into_iter()
            .flatten()
            .flatten();
        entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with("init-"))
            .collect()
    };
    let mut first = start(&world, &state)?;
    eventually(
        "the server has started",
        Duration::from_secs(30),
        async || Ok(!begun(&state).is_empty()),
    )
    .await?;
    first.kill()?;
    first.wait()?;
    assert!(!state.join("postgres/data").exists());
    let mut second = start(&world, &state)?;
    ready(&world, &state, &second).await?;
    assert_eq!(begun(&state), Vec::<String>::new());
    kill(second.id(), Signal::INT)?;
    second.wait()?;
    Ok(())
}

#[tokio::test]
// invariant: supervisor
async fn a_killed_server_recovers_although_another_process_has_its_pid() -> Result<()> {
    let world = World::new()?;
    let state = world.state_dir();
    let mut first = start(&world, &state)?;
    ready(&world, &state, &first).await?;
    let socket = state.join("postgres/socket");
    psql(
        None,
        &socket,
        "create table kept (n int); insert into kept values (7)",
    )?
    .success()?;
    first.kill()?;
    first.wait()?;
    // An unrelated process of the same user.
    let uid = fs_err::metadata(state.join("postgres"))?.uid();
    let mut other = Command::new("setpriv")
        .args([format!("--reuid={uid}"), "--clear-groups".to_owned()])
        .args(["sleep", "600"])
        .current_dir("/")
        .spawn()?;
    world.kill_on_cleanup(other.id())?;
    let file = state.join("postgres/data/postmaster.pid");
    let text = fs_err::read_to_string(&file)?;
    fs_err::write(
        &file,
        text.replacen(&first.id().to_string(), &other.id().to_string(), 1),
    )?;
    let mut second = start(&world, &state)?;
    ready(&world, &state, &second).await?;
    assert_eq!(psql(None, &socket, "select n from kept")?.success()?, "7\n");
    assert!(
        other.try_wait()?.is_none(),
        "an unrelated process was killed"
    );
    other.kill()?;
    other.wait()?;
    kill(second.id(), Signal::INT)?;
    second.wait()?;
    Ok(())
}

#[tokio::test]
async fn a_state_directory_with_a_path_too_long_for_a_socket_works() -> Result<()> {
    let world = World::new()?;
    let state = world.directory().join("long".repeat(25));
    fs_err::create_dir(&state)?;
    let mut child = start(&world, &state)?;
    ready(&world, &state, &child).await?;
    let text = fs_err::read_to_string(state.join("postgres/data/postmaster.pid"))?;
    let socket = Path::new(text.lines().nth(4).context("the socket's directory")?).to_owned();
    assert!(
        !socket.starts_with(&state)
            && fs_err::metadata(&socket)?.permissions().mode() & 0o777 == 0o700,
        "{socket:?}"
    );
    assert_eq!(psql(None, &socket, "select 1")?.success()?, "1\n");
    kill(child.id(), Signal::INT)?;
    child.wait()?;
    fs_err::remove_dir_all(socket)?;
    Ok(())
}

#[tokio::test]
async fn an_unusable_setting_is_refused_with_a_remedy_before_anything_starts() -> Result<()> {
    let stack = Stack::new()?;
    let missing = run(
        stack
            .command()?
            .args(["up", "--detach"])
            .env("PG_BIN", "/nowhere"),
        b"",
    )?;
    assert_eq!(missing.failure(), (64, "postgres_missing".to_owned()));
    assert!(
        missing.stderr.contains("DATABASE_URL")
            && missing.stderr.contains("apt-get install postgresql"),
        "{missing:?}"
    );
    let doctor = run(
        stack.command()?.arg("doctor").env("PG_BIN", "/nowhere"),
        b"",
    )?;
    assert!(
        doctor.code == Some(1)
            && doctor
                .text()
                .lines()
                .any(|line| line.starts_with("problem   PostgreSQL")),
        "{doctor:?}"
    );
    let doctor = run(
        stack
            .command()?
            .args(["doctor", "--worker-only"])
            .env("PG_BIN", "/nowhere"),
        b"",
    )?;
    assert!(
        doctor.code == Some(0) && !doctor.text().contains("PostgreSQL"),
        "{doctor:?}"
    );

    let data = stack.world.state_dir().join("postgres/data");
    fs_err::create_dir_all(&data)?;
    fs_err::write(data.join("PG_VERSION"), "9.6\n")?;
    let other = stack.run(&["up", "--detach"])?;
    assert_eq!(other.failure(), (64, "postgres_version".to_owned()));
    assert!(
        other.stderr.contains("needs PostgreSQL 9") && other.stderr.contains("cynode backup"),
        "{other:?}"
    );
    assert_eq!(
        fs_err::read_to_string(data.join("PG_VERSION"))?,
        "9.6\n",
        "a refused start changed files"
    );
    stack.assert_clean().await
}

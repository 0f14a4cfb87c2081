//! The `postgres` role: creates the cluster if there is none, and becomes the server.
//!
//! Files of the server are only touched as the server's user, never as root. A cluster is created
//! in a staging directory and renamed when it is complete, so an interrupted one is created again.

use std::{
    io::{self, Write as _},
    os::unix::{
        fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::{fs::Mode, process::Signal};

use super::{
    NAME, Programs, SOCKET, Server, UNFINISHED, leftovers,
    owner::{self, Owner},
};
use crate::{
    failure::{Failure, USAGE},
    roles,
    state::StateDir,
};

/// Sized for a small machine, and durable: no acknowledged write is lost.
const SETTINGS: &[(&str, &str)] = &[
    ("listen_addresses", ""),
    ("unix_socket_permissions", "0700"),
    ("fsync", "on"),
    ("synchronous_commit", "on"),
    ("full_page_writes", "on"),
    ("shared_buffers", "64MB"),
    ("max_connections", "100"),
    ("max_wal_size", "512MB"),
    ("min_wal_size", "64MB"),
    // The write-ahead log is only for crash recovery.
    ("wal_level", "minimal"),
    ("max_wal_senders", "0"),
    ("jit", "off"),
    ("timezone", "UTC"),
    ("log_timezone", "UTC"),
    // `up` stores standard error.
    ("logging_collector", "off"),
    ("log_destination", "stderr"),
    ("log_line_prefix", "%m [%p] "),
    ("log_checkpoints", "off"),
    ("cluster_name", "cynode"),
];

/// Last lines of a failed program that its failure quotes.
const MAX_ERROR_LINES: usize = 6;

/// Becomes the server. Returns only on failure.
pub fn run(state: &StateDir, parent: Option<i32>) -> Result<std::convert::Infallible, Failure> {
    let server = Server::new(state);
    let programs = Programs::find(&server)?;
    let owner = Owner::find()?;
    let mut names = vec![owner::current_user()?];
    // Must be computed before the change of user: the path depends on the user of the clients.
    let sockets = server.socket_directory();
    prepare(&server, &sockets, state, owner.as_ref())?;
    if let Some(owner) = &owner {
        names.push(owner.name.clone());
        owner.assume().map_err(|error| {
            Failure::internal(format!("can't switch to the user {}: {error}", owner.name))
        })?;
    }
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    if let Some(parent) = parent {
        // The kernel drops this setting when the user changes, so set it afterwards. SIGINT is a
        // fast shutdown.
        roles::end_with(parent, Signal::INT)?;
    }
    check_reachable(&server, owner.as_ref())?;
    leftovers::end(&server.data())?;
    if !server.exists() {
        initialise(&server, &programs)?;
    }
    write_access_rules(&server.data(), &names)?;
    let mut command = programs.command("postgres");
    command
        .current_dir(server.directory())
        .arg("-D")
        .arg(server.data());
    command
        .arg("-c")
        .arg(setting("unix_socket_directories", &quote(&sockets)));
    for (name, value) in SETTINGS {
        command.arg("-c").arg(setting(name, value));
    }
    // A killed server leaves its socket behind.
    drop(fs_err::remove_file(sockets.join(format!("{SOCKET}.lock"))));
    drop(fs_err::remove_file(sockets.join(SOCKET)));
    Err(Failure::internal(format!(
        "can't start {}: {}",
        programs.path("postgres").display(),
        command.exec()
    )))
}

fn setting(name: &str, value: &str) -> String {
    format!("{name}={value}")
}

/// Quotes a path as a list of one element: it may contain commas.
fn quote(path: &Path) -> String {
    format!("\"{}\"", path.display().to_string().replace('"', "\"\""))
}

/// Creates the directories, for the server's user only. Runs as root.
fn prepare(
    server: &Server,
    sockets: &Path,
    state: &StateDir,
    owner: Option<&Owner>,
) -> Result<(), Failure> {
    server.secure_sockets()?;
    for directory in [server.directory(), sockets.to_owned()] {
        match fs_err::symlink_metadata(&directory) {
            Ok(metadata) if !metadata.is_dir() => {
                return Err(Failure::internal(format!(
                    "{} is not a directory",
                    directory.display()
                )));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create_private_directory(&directory)?;
            }
            Err(error) => return Err(error.into()),
        }
        if let Some(owner) = owner {
            std::os::unix::fs::lchown(&directory, Some(owner.uid), Some(owner.gid))?;
        }
        let metadata = fs_err::symlink_metadata(&directory)?;
        let expected = owner.map_or_else(|| rustix::process::geteuid().as_raw(), |owner| owner.uid);
        if metadata.uid() != expected {
            return Err(Failure::internal(format!(
                "{} belongs to another user",
                directory.display()
            ))
            .remedy("Remove it."));
        }
        fs_err::set_permissions(&directory, PermissionsExt::from_mode(0o700))?;
    }
    let Some(owner) = owner else { return Ok(()) };
    // The server's user must be able to traverse the state directory, but not list it.
    let metadata = fs_err::metadata(state.path())?;
    let mode = metadata.mode();
    if mode & 0o001 == 0 && (metadata.gid() != owner.gid || mode & 0o010 == 0) {
        std::os::unix::fs::chown(state.path(), None, Some(owner.gid))?;
        fs_err::set_permissions(state.path(), PermissionsExt::from_mode(0o710))?;
    }
    Ok(())
}

fn create_private_directory(directory: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(directory)
        .map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("can't create {}: {error}", directory.display()),
            )
        })
}

/// Checks that the server's user can reach its directory.
fn check_reachable(server: &Server, owner: Option<&Owner>) -> Result<(), Failure> {
    let Err(error) = fs_err::metadata(server.directory().join(".")) else {
        return Ok(());
    };
    let user = owner.map_or("this user", |owner| owner.name.as_str());
    let message =
        format!("PostgreSQL runs as the user {user}, who can't access its directory: {error}");
    Err(Failure::new(USAGE, "postgres_unreachable", message).remedy(
        "Choose a state directory whose parents every user can traverse, such as \
         /var/lib/cynode, or set DATABASE_URL to use another server.",
    ))
}

/// Creates the cluster with its database.
fn initialise(server: &Server, programs: &Programs) -> Result<(), Failure> {
    for interrupted in server.unfinished() {
        leftovers::end(&interrupted)?;
        if interrupted.exists() {
            fs_err::remove_dir_all(interrupted)?;
        }
    }
    if server.data().exists() {
        // Clusters of CyNode appear complete, so this is another program's directory.
        return Err(Failure::new(
            USAGE,
            "postgres_data",
            format!("{} is not a PostgreSQL cluster", server.data().display()),
        )
        .remedy("Remove the directory, if you don't need its files."));
    }
    let staged = server
        .directory()
        .join(format!("{UNFINISHED}{}", std::process::id()));
    // It is the working directory of both programs, by which orphans are found.
    create_private_directory(&staged)?;
    let mut command = programs.command("initdb");
    command.current_dir(&staged).arg("-D").arg(&staged).args([
        "-U",
        NAME,
        "-E",
        "UTF8",
        "--locale=C",
        "--data-checksums",
    ]);
    command.args([
        "--auth-local=peer",
        "--auth-host=reject",
        "--no-instructions",
    ]);
    run_checked(command.stdin(Stdio::null()), b"")?;
    let mut command = programs.command("postgres");
    command
        .current_dir(&staged)
        .args(["--single", "-D"])
        .arg(&staged)
        .args(["-c", "exit_on_error=on", "postgres"]);
    run_checked(
        command.stdin(Stdio::piped()),
        format!("create database {NAME}\n").as_bytes(),
    )?;
    fs_err::rename(&staged, server.data())?;
    fs_err::File::open(server.directory())?.sync_all()?;
    Ok(())
}

fn run_checked(command: &mut Command, input: &[u8]) -> Result<(), Failure> {
    let program = PathBuf::from(command.get_program());
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that exits without reading reports why.
        drop(stdin.write_all(input));
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed);
    let lines: Vec<&str> = printed
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    Err(Failure::internal(format!(
        "{} failed ({}): {}",
        program.display(),
        output.status,
        lines[lines.len().saturating_sub(MAX_ERROR_LINES)..].join("; ")
    )))
}

/// Allows connections only over the socket, and only from these users. Rewritten at every start.
fn write_access_rules(data: &Path, names: &[String]) -> io::Result<()> {
    let map = names
        .iter()
        .map(|name| format!("{NAME} \"{name}\" {NAME}\n"))
        .collect::<Vec<_>>()
        .concat();
    cynode_service::files::replace(&data.join("pg_ident.conf"), map.as_bytes())?;
    cynode_service::files::replace(
        &data.join("pg_hba.conf"),
        format!("local all {NAME} peer map={NAME}\n").as_bytes(),
    )
}

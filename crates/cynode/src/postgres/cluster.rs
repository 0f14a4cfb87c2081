//! The role `postgres`: makes the cluster when there is none, and becomes the server.
//!
//! What belongs to the server is touched as the server's user only, never as root. A cluster is made beside its place and moved
//! there when it is whole, so one that was cut off is made again.

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

/// For a small machine, and so that nothing that was answered is lost.
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
    // Nobody reads the log of changes but this server after a crash.
    ("wal_level", "minimal"),
    ("max_wal_senders", "0"),
    ("jit", "off"),
    ("timezone", "UTC"),
    ("log_timezone", "UTC"),
    // To its standard error, which `up` keeps.
    ("logging_collector", "off"),
    ("log_destination", "stderr"),
    ("log_line_prefix", "%m [%p] "),
    ("log_checkpoints", "off"),
    ("cluster_name", "cynode"),
];

/// Becomes the server. Returns only on failure.
pub fn run(state: &StateDir, parent: Option<i32>) -> Result<std::convert::Infallible, Failure> {
    let server = Server::of(state);
    let programs = Programs::find(&server)?;
    let owner = Owner::find()?;
    let mut names = vec![owner::own_name()?];
    // Found out while we are who clients are: where it is depends on that.
    let sockets = server.socket_directory();
    prepare(&server, &sockets, state, owner.as_ref())?;
    if let Some(owner) = &owner {
        names.push(owner.name.clone());
        owner.assume().map_err(|error| {
            Failure::internal(format!("can't go on as the user {}: {error}", owner.name))
        })?;
    }
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    if let Some(parent) = parent {
        // After the change of user, with which the kernel forgets it. A fast shutdown.
        roles::end_with(parent, Signal::INT)?;
    }
    reachable(&server, owner.as_ref())?;
    leftovers::end(&server.data())?;
    if !server.exists() {
        initialise(&server, &programs)?;
    }
    admit(&server.data(), &names)?;
    let mut command = programs.command("postgres");
    command
        .current_dir(server.directory())
        .arg("-D")
        .arg(server.data());
    command
        .arg("-c")
        .arg(setting("unix_socket_directories", &quoted(&sockets)));
    for (name, value) in SETTINGS {
        command.arg("-c").arg(setting(name, value));
    }
    // What a killed one left there.
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

/// A list of one path that may hold commas.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display().to_string().replace('"', "\"\""))
}

/// The directories, for the server's user alone. As root.
fn prepare(
    server: &Server,
    sockets: &Path,
    state: &StateDir,
    owner: Option<&Owner>,
) -> Result<(), Failure> {
    server.secure_sockets()?;
    for directory in [server.directory(), sockets.to_owned()] {
        match fs_err::symlink_metadata(&directory) {
            Ok(found) if !found.is_dir() => {
                return Err(Failure::internal(format!(
                    "{} is in the way",
                    directory.display()
                )));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => private(&directory)?,
            Err(error) => return Err(error.into()),
        }
        if let Some(owner) = owner {
            std::os::unix::fs::lchown(&directory, Some(owner.uid), Some(owner.gid))?;
        }
        let found = fs_err::symlink_metadata(&directory)?;
        let wanted = owner.map_or_else(|| rustix::process::geteuid().as_raw(), |owner| owner.uid);
        if found.uid() != wanted {
            return Err(Failure::internal(format!(
                "{} belongs to somebody else",
                directory.display()
            ))
            .remedy("Remove it."));
        }
        fs_err::set_permissions(&directory, PermissionsExt::from_mode(0o700))?;
    }
    let Some(owner) = owner else { return Ok(()) };
    // The server's user must get through the state directory to its own part, and see nothing else of it.
    let found = fs_err::metadata(state.path())?;
    if found.mode() & 0o001 == 0 && (found.gid() != owner.gid || found.mode() & 0o010 == 0) {
        std::os::unix::fs::chown(state.path(), None, Some(owner.gid))?;
        fs_err::set_permissions(state.path(), PermissionsExt::from_mode(0o710))?;
    }
    Ok(())
}

fn private(directory: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(directory)
        .map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("can't make {}: {error}", directory.display()),
            )
        })
}

/// Whether the server's user gets to its own directory.
fn reachable(server: &Server, owner: Option<&Owner>) -> Result<(), Failure> {
    let Err(error) = fs_err::metadata(server.directory().join(".")) else {
        return Ok(());
    };
    let who = owner.map_or("this user", |owner| owner.name.as_str());
    Err(Failure::new(USAGE, "postgres_unreachable", format!("the user {who}, as whom PostgreSQL runs, can't get to its directory: {error}"))
        .remedy("Choose a state directory whose parents let everybody through, such as /var/lib/cynode, or use another server by DATABASE_URL."))
}

/// Makes the cluster with its database.
fn initialise(server: &Server, programs: &Programs) -> Result<(), Failure> {
    for cut_off in server.unfinished() {
        leftovers::end(&cut_off)?;
        if cut_off.exists() {
            fs_err::remove_dir_all(cut_off)?;
        }
    }
    if server.data().exists() {
        // Never by us: ours comes whole.
        return Err(Failure::new(
            USAGE,
            "postgres_data",
            format!("{} is not a PostgreSQL cluster", server.data().display()),
        )
        .remedy("Remove it, if nothing in it is needed."));
    }
    let staged = server
        .directory()
        .join(format!("{UNFINISHED}{}", std::process::id()));
    // Both programs work in it, and so they are found when they are left alone.
    private(&staged)?;
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
    said_well(command.stdin(Stdio::null()), b"")?;
    let mut command = programs.command("postgres");
    command
        .current_dir(&staged)
        .args(["--single", "-D"])
        .arg(&staged)
        .args(["-c", "exit_on_error=on", "postgres"]);
    said_well(
        command.stdin(Stdio::piped()),
        format!("create database {NAME}\n").as_bytes(),
    )?;
    fs_err::rename(&staged, server.data())?;
    fs_err::File::open(server.directory())?.sync_all()?;
    Ok(())
}

fn said_well(command: &mut Command, input: &[u8]) -> Result<(), Failure> {
    let program = PathBuf::from(command.get_program());
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read says why.
        drop(stdin.write_all(input));
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let tail: Vec<&str> = said
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    Err(Failure::internal(format!(
        "{} failed ({}): {}",
        program.display(),
        output.status,
        tail[tail.len().saturating_sub(6)..].join("; ")
    )))
}

/// Who may connect: by the socket alone, our own users as the database's. Written at every start.
fn admit(data: &Path, names: &[String]) -> io::Result<()> {
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

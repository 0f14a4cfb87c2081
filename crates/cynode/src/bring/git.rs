//! Lists the files of a directory that git does not ignore.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
};

use super::too_large;
use crate::{
    failure::{Failure, USAGE},
    output, sanitize,
};

const TIMEOUT: Duration = Duration::from_mins(5);
/// Size of git's list of names.
const MAX_LIST_BYTES: u64 = 64 * 1024 * 1024;
/// Length of git's error output in a message.
const MAX_STDERR_BYTES: u64 = 2 * 1024;
/// Nested repositories, including submodules.
const MAX_REPOSITORIES: usize = 1_000;

/// Lists the tracked files and those that are not ignored, relative to the directory, which may be
/// part of a repository. Includes the files of nested repositories.
pub(super) async fn list(root: &Path) -> Result<BTreeSet<PathBuf>, Failure> {
    let mut found = BTreeSet::new();
    let mut bytes = 0;
    let mut repositories = vec![PathBuf::new()];
    let mut asked = 0;
    while let Some(repository) = repositories.pop() {
        asked += 1;
        if asked > MAX_REPOSITORIES {
            return Err(too_large(format!(
                "the directory has more than {MAX_REPOSITORIES} repositories"
            )));
        }
        let names = list_one(&root.join(&repository)).await?;
        bytes += names.len() as u64;
        if bytes > MAX_LIST_BYTES {
            return Err(list_too_long());
        }
        for name in names
            .split(|byte| *byte == 0)
            .filter(|name| !name.is_empty())
        {
            let path = repository.join(OsStr::from_bytes(name));
            // The entry of a nested repository ends in a slash; that of a submodule does not.
            let full_path = root.join(&path);
            let is_directory =
                fs_err::symlink_metadata(&full_path).is_ok_and(|metadata| metadata.is_dir());
            if is_directory && fs_err::symlink_metadata(full_path.join(".git")).is_ok() {
                repositories.push(path);
            } else {
                found.insert(path);
            }
        }
        found.insert(repository.join(".git"));
    }
    Ok(found)
}

fn list_too_long() -> Failure {
    too_large(format!(
        "the names of the files take more than {}",
        output::size(MAX_LIST_BYTES)
    ))
}

async fn list_one(directory: &Path) -> Result<Vec<u8>, Failure> {
    let mut command = git();
    command
        .current_dir(directory)
        // The repository's configuration can name programs that git executes for a listing.
        .args(["-c", "core.fsmonitor=false", "ls-files"])
        .args(["--cached", "--others", "--exclude-standard", "-z"]);
    let run = async {
        let mut child = command.spawn()?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (names, complaints) = tokio::join!(
            read(stdout, MAX_LIST_BYTES + 1),
            read(stderr, MAX_STDERR_BYTES)
        );
        let names = names?;
        if names.len() as u64 > MAX_LIST_BYTES {
            return Ok(Err(list_too_long()));
        }
        let status = child.wait().await?;
        std::io::Result::Ok(if status.success() {
            Ok(names)
        } else {
            Err(refused(directory, &complaints.unwrap_or_default()))
        })
    };
    match tokio::time::timeout(TIMEOUT, run).await {
        Ok(Ok(listed)) => listed,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Err(Failure::new(
            USAGE,
            "no_git",
            "--gitignore needs git, and there is none here",
        )
        .remedy("Install git, or omit --gitignore.")),
        Ok(Err(error)) => Err(Failure::internal(format!("git can't be run: {error}"))),
        Err(_) => Err(Failure::internal(format!(
            "git did not list the files within {} s",
            TIMEOUT.as_secs()
        ))
        .remedy("Omit --gitignore.")),
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one place that starts the user's git, without variables that redirect it"
)]
fn git() -> Command {
    let mut command = Command::new("git");
    for (name, _) in std::env::vars_os() {
        // If a git hook runs this program, these variables point to the hook's repository.
        if name.as_bytes().starts_with(b"GIT_") {
            command.env_remove(name);
        }
    }
    command
        .env("LC_ALL", "C")
        .env("GIT_OPTIONAL_LOCKS", "0")
        .env("GIT_TERMINAL_PROMPT", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Reads up to a limit and then closes the pipe, which ends a program that writes more.
async fn read(pipe: Option<impl AsyncRead + Unpin>, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(limit).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

fn refused(directory: &Path, complaints: &[u8]) -> Failure {
    let directory = sanitize::line(&directory.to_string_lossy());
    let complaints = String::from_utf8_lossy(complaints);
    if complaints.contains("not a git repository") {
        return Failure::new(
            USAGE,
            "no_repository",
            format!("{directory} is not in a git repository, so git ignores nothing in it"),
        )
        .remedy("Omit --gitignore.");
    }
    Failure::new(
        USAGE,
        "git_failed",
        format!(
            "git can't list the files of {directory}: {}",
            sanitize::line(complaints.trim())
        ),
    )
    .remedy("Correct what git complains about, or omit --gitignore.")
}

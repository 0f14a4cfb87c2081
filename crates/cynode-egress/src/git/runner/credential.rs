//! One command's way to its credential.
//!
//! The role listens on a socket of its own for each command that has a credential. git's helper
//! connects to it, says what git asks for, and gets one answer, only if that is the host and the
//! path that the credential is for.
//!
//! Invariant: the credential is in no argument, variable, URL, file or log, and the runner process
//! never has it.

use std::{
    ffi::OsString,
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::AsRawFd as _,
        unix::net::{UnixListener as StdListener, UnixStream as StdStream},
    },
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
};

use super::environment::CREDENTIAL_SOCKET;
use crate::git::command::{Credential, RemoteAccess};

/// What git says of the credential that it needs.
const MAX_QUESTION_BYTES: u64 = 16 * 1024;
/// Timeout of the helper's question and of its answer.
const HELPER_TIMEOUT: Duration = Duration::from_secs(10);

/// The socket of one command. Closed and removed when dropped.
#[derive(Debug)]
pub(super) struct CredentialSocket {
    path: PathBuf,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for CredentialSocket {
    fn drop(&mut self) {
        self.task.abort();
        drop(fs_err::remove_file(&self.path));
    }
}

impl CredentialSocket {
    /// Listens below `directory` for processes of one user.
    pub(super) fn open(
        directory: &Path,
        remote: &RemoteAccess,
        credential: &Credential,
        uid: u32,
    ) -> io::Result<Self> {
        let name = uuid::Uuid::new_v4().simple().to_string();
        let path = directory.join(&name);
        let listener = reachable(directory, &name, StdListener::bind)?;
        listener.set_nonblocking(true)?;
        // The directory admits the runner's group alone, and its peer's user is checked.
        fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
        let listener = UnixListener::from_std(listener)?;
        let (remote, credential) = (remote.clone(), credential.clone());
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                if stream.peer_cred().is_ok_and(|peer| peer.uid() == uid) {
                    // The first question is the last.
                    drop(listener);
                    let answered =
                        tokio::time::timeout(HELPER_TIMEOUT, answer(stream, &remote, &credential));
                    if !matches!(answered.await, Ok(Ok(true))) {
                        tracing::warn!(
                            host = remote.host,
                            "git asked for a credential that is not for this remote."
                        );
                    }
                    return;
                }
            }
        });
        Ok(Self { path, task })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Names a socket by its directory's descriptor: addresses of sockets are short, paths are not.
fn reachable<T>(
    directory: &Path,
    name: &str,
    open: impl FnOnce(PathBuf) -> io::Result<T>,
) -> io::Result<T> {
    let directory = rustix::fs::open(
        directory,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    open(PathBuf::from(format!(
        "/proc/self/fd/{}/{name}",
        directory.as_raw_fd()
    )))
}

/// Reads the question and answers it, if it is for this remote.
async fn answer(
    mut stream: UnixStream,
    remote: &RemoteAccess,
    credential: &Credential,
) -> io::Result<bool> {
    let mut question = Vec::new();
    (&mut stream)
        .take(MAX_QUESTION_BYTES)
        .read_to_end(&mut question)
        .await?;
    let is_meant =
        std::str::from_utf8(&question).is_ok_and(|question| is_for(question, remote, credential));
    if is_meant {
        let text = format!(
            "username={}\npassword={}\n",
            credential.username, credential.secret
        );
        stream.write_all(text.as_bytes()).await?;
    }
    stream.shutdown().await?;
    Ok(is_meant)
}

/// Whether a question in git's credential format names the remote and a path below the
/// credential's.
fn is_for(question: &str, remote: &RemoteAccess, credential: &Credential) -> bool {
    let value = |key: &str| {
        let mut values = question.lines().filter_map(|line| {
            let (name, value) = line.split_once('=')?;
            (name == key).then_some(value)
        });
        // Two values would leave open which one git means.
        values.next().filter(|_| values.next().is_none())
    };
    let (Some(protocol), Some(host), Some(path)) =
        (value("protocol"), value("host"), value("path"))
    else {
        return false;
    };
    let with_port = format!("{}:{}", remote.host, remote.port);
    protocol == remote.scheme
        && remote.scheme == "https"
        && (host.eq_ignore_ascii_case(&with_port)
            || (remote.port == 443 && host.eq_ignore_ascii_case(&remote.host)))
        && crate::vault::is_below(&format!("/{path}"), &credential.path_prefix)
}

/// The hidden subcommand `git-credential`, which git starts: asks the role and prints its answer.
#[must_use]
pub fn run_credential_helper(args: &[OsString]) -> ExitCode {
    // The role keeps the credential; git has nothing to store or erase.
    if args.last().is_none_or(|operation| operation != "get") {
        return ExitCode::SUCCESS;
    }
    match ask() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            drop(writeln!(io::stderr(), "cynode git-credential: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn ask() -> io::Result<()> {
    let path = std::env::var_os(CREDENTIAL_SOCKET)
        .map(PathBuf::from)
        .ok_or_else(|| io::Error::other("is started by git, which the git role runs"))?;
    let (Some(directory), Some(name)) = (
        path.parent(),
        path.file_name().and_then(|name| name.to_str()),
    ) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let mut question = Vec::new();
    io::stdin()
        .lock()
        .take(MAX_QUESTION_BYTES)
        .read_to_end(&mut question)?;
    let mut stream = reachable(directory, name, StdStream::connect)?;
    stream.set_read_timeout(Some(HELPER_TIMEOUT))?;
    stream.write_all(&question)?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.take(64 * 1024).read_to_end(&mut answer)?;
    let mut stdout = io::stdout().lock();
    stdout.write_all(&answer)?;
    stdout.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(port: u16) -> RemoteAccess {
        RemoteAccess {
            scheme: "https".to_owned(),
            host: "git.example".to_owned(),
            port,
            addresses: Vec::new(),
            ca: None,
            credential: None,
        }
    }

    fn credential() -> Credential {
        Credential {
            path_prefix: "/team".to_owned(),
            username: "robot".to_owned(),
            secret: "planted-secret-value".to_owned(),
        }
    }

    #[test]
    fn a_question_is_answered_for_the_host_port_and_path_of_the_credential_only() {
        let is_for = |question: &str, port| is_for(question, &remote(port), &credential());
        for (question, port) in [
            ("protocol=https\nhost=git.example\npath=team/a.git\n", 443),
            ("protocol=https\nhost=git.example:443\npath=team\n", 443),
            (
                "protocol=https\nhost=git.example:8443\npath=team/a\nwwwauth[]=Basic\n",
                8443,
            ),
        ] {
            assert!(is_for(question, port), "{question}");
        }
        for (question, port) in [
            ("protocol=http\nhost=git.example\npath=team/a.git\n", 443),
            ("protocol=https\nhost=other.example\npath=team/a.git\n", 443),
            ("protocol=https\nhost=git.example\npath=team/a.git\n", 8443),
            (
                "protocol=https\nhost=git.example:8443\npath=team/a.git\n",
                443,
            ),
            (
                "protocol=https\nhost=git.example\npath=teammate/a.git\n",
                443,
            ),
            ("protocol=https\nhost=git.example\npath=other/team\n", 443),
            ("protocol=https\nhost=git.example\n", 443),
            (
                "protocol=https\nhost=git.example\nhost=evil.example\npath=team/a\n",
                443,
            ),
            ("", 443),
        ] {
            assert!(!is_for(question, port), "{question}");
        }
    }

    #[tokio::test]
    async fn a_socket_answers_once() {
        let root = tempfile::tempdir().expect("a directory");
        let long = root.path().join("a".repeat(150));
        fs_err::create_dir(&long).expect("made");
        let uid = rustix::process::geteuid().as_raw();
        let socket =
            CredentialSocket::open(&long, &remote(443), &credential(), uid).expect("listening");
        let name = socket.path().file_name().expect("a name").to_owned();
        let question = async |text: &str| -> io::Result<String> {
            let stream = reachable(&long, name.to_str().expect("ascii"), StdStream::connect)?;
            stream.set_nonblocking(true)?;
            let mut stream = UnixStream::from_std(stream)?;
            stream.write_all(text.as_bytes()).await?;
            stream.shutdown().await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            Ok(answer)
        };
        let text = "protocol=https\nhost=git.example\npath=team/a.git\n";
        assert_eq!(
            question(text).await.expect("answered"),
            "username=robot\npassword=planted-secret-value\n"
        );
        assert!(question(text).await.is_err());
        let path = socket.path().to_owned();
        drop(socket);
        assert!(!path.exists());
        // A wrong question is the last too, and gets nothing.
        let socket =
            CredentialSocket::open(&long, &remote(443), &credential(), uid).expect("listening");
        let name = socket.path().file_name().expect("a name").to_owned();
        let stream =
            reachable(&long, name.to_str().expect("ascii"), StdStream::connect).expect("connected");
        stream.set_nonblocking(true).expect("set");
        let mut stream = UnixStream::from_std(stream).expect("a stream");
        stream
            .write_all(b"protocol=https\nhost=evil.example\npath=team/a.git\n")
            .await
            .expect("sent");
        stream.shutdown().await.expect("closed");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("ended");
        assert_eq!(answer, "");
    }
}

//! The private PostgreSQL of a state directory: one cluster below it, reached by a Unix socket that only its owner can open.
//!
//! Invariants: it never runs as root; nothing but that socket leads to it; whoever holds the lock of `up` is the only one who
//! starts or ends it. A server that somebody else runs (`DATABASE_URL`, `orchestrator.database_url`) is none of this module's
//! business.

mod cluster;
mod leftovers;
mod owner;
mod programs;
mod temporary;

use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

pub use cluster::run;
pub use programs::{Programs, newest_client};
pub use temporary::Temporary;

use crate::{failure::Failure, state::StateDir};

/// The database, and the user who owns it.
const NAME: &str = "cynode";
/// What the server appends to the directory of its socket.
const SOCKET: &str = ".s.PGSQL.5432";
/// The kernel takes no longer path for a socket.
const LONGEST_SOCKET: usize = 107;

/// How the names begin of clusters that are being made.
const UNFINISHED: &str = "init-";

/// Where the private server of a state directory lives.
#[derive(Clone, Debug)]
pub struct Server {
    state: PathBuf,
}

impl Server {
    pub fn of(state: &StateDir) -> Self {
        Self {
            state: state.path().to_owned(),
        }
    }

    fn directory(&self) -> PathBuf {
        self.state.join("postgres")
    }

    fn data(&self) -> PathBuf {
        self.directory().join("data")
    }

    /// Whether there may be anything of it.
    pub fn has_directory(&self) -> bool {
        self.directory().exists()
    }

    /// Whether there is a cluster.
    pub fn exists(&self) -> bool {
        self.data().join("PG_VERSION").exists()
    }

    /// Whether it was started and has not ended in order.
    pub fn was_started(&self) -> bool {
        self.data().join("postmaster.pid").exists()
    }

    /// The directory of the socket: below the state directory, or, where that path is too long for the kernel, where the system
    /// keeps what lives until the next boot. It does not depend on the environment: every command must find the same one.
    pub fn socket_directory(&self) -> PathBuf {
        let beside = self.directory().join("socket");
        if fits(&beside) {
            return beside;
        }
        let digest = Sha256::digest(self.state.as_os_str().as_encoded_bytes());
        owner::RuntimeDirectory::find()
            .path()
            .join(crate::output::hex(&digest[..8]))
    }

    /// Makes sure that nobody else can put a socket where ours is looked for. For everybody who is about to make or use it.
    pub fn secure_sockets(&self) -> Result<(), Failure> {
        if self.socket_directory().starts_with(&self.state) {
            Ok(())
        } else {
            owner::RuntimeDirectory::find().secure()
        }
    }

    /// How clients reach it.
    pub fn url(&self) -> String {
        format!(
            "postgres://{NAME}@localhost/{NAME}?host={}",
            encoded(&self.socket_directory())
        )
    }

    /// Whether the postmaster with this process id takes connections. It says so in its own file.
    pub fn is_ready(&self, pid: u32) -> bool {
        let text = fs_err::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines
            .first()
            .is_some_and(|line| line.trim() == pid.to_string())
            && lines.get(7).is_some_and(|line| line.trim() == "ready")
    }

    /// The process id of the postmaster that runs here, whether or not it takes connections yet.
    pub fn postmaster(&self) -> Option<u32> {
        let text = fs_err::read_to_string(self.data().join("postmaster.pid")).ok()?;
        let pid = text.lines().next()?.trim().parse().ok()?;
        leftovers::runs_in(&self.data(), pid).then_some(pid)
    }

    /// The process id of a postmaster that runs here and takes connections.
    pub fn running(&self) -> Option<u32> {
        self.postmaster().filter(|pid| self.is_ready(*pid))
    }

    /// Ends a server, and processes of one, that a killed `up` left. For whoever holds the lock of `up`.
    pub fn end_leftovers(&self) -> Result<bool, Failure> {
        let mut ended = leftovers::end(&self.data())?;
        for unfinished in self.unfinished() {
            ended |= leftovers::end(&unfinished)?;
        }
        Ok(ended)
    }

    /// Clusters whose making was cut off.
    fn unfinished(&self) -> Vec<PathBuf> {
        let entries = fs_err::read_dir(self.directory())
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(UNFINISHED))
            .map(|entry| entry.path())
            .collect()
    }
}

fn fits(directory: &Path) -> bool {
    directory.as_os_str().len() + 1 + SOCKET.len() <= LONGEST_SOCKET
}

/// A path as a URL carries it.
fn encoded(path: &Path) -> String {
    path.as_os_str()
        .as_encoded_bytes()
        .iter()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() || b"/-_.".contains(byte) {
                char::from(*byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(path: &str) -> Server {
        Server {
            state: PathBuf::from(path),
        }
    }

    #[test]
    fn the_socket_lies_in_the_state_directory_while_the_kernel_takes_the_path() {
        let short = server("/var/lib/cynode");
        assert_eq!(
            short.socket_directory(),
            Path::new("/var/lib/cynode/postgres/socket")
        );
        assert_eq!(
            short.url(),
            "postgres://cynode@localhost/cynode?host=/var/lib/cynode/postgres/socket"
        );
        let long = format!("/{}", "x".repeat(100));
        let elsewhere = server(&long).socket_directory();
        assert!(
            !elsewhere.starts_with(&long) && fits(&elsewhere),
            "{elsewhere:?}"
        );
        assert_ne!(elsewhere, server(&format!("{long}y")).socket_directory());
    }

    #[test]
    fn an_odd_path_is_still_an_address() {
        assert!(
            server("/a b/ä&c")
                .url()
                .ends_with("?host=/a%20b/%C3%A4%26c/postgres/socket")
        );
    }
}

//! The private PostgreSQL of a state directory: one cluster, reached over a Unix socket that only
//! its owner can open.
//!
//! Invariants: the server never runs as root; it listens only on that socket; only the holder of
//! the lock of `up` starts or ends it. This module does not manage external servers
//! (`DATABASE_URL`, `orchestrator.database_url`).

mod cluster;
mod leftovers;
mod owner;
mod programs;
mod temporary;

use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use sha2::{Digest as _, Sha256};

pub use cluster::run;
pub use programs::{Programs, newest_client};
pub use temporary::TemporaryServer;

use crate::{failure::Failure, state::StateDir};

/// The name of the database and of its owner.
const NAME: &str = "cynode";
/// The file name of the socket.
const SOCKET: &str = ".s.PGSQL.5432";
/// The longest socket path that the kernel accepts.
const MAX_SOCKET_PATH: usize = 107;

/// Name prefix of clusters under construction.
const UNFINISHED: &str = "init-";

/// The private server of a state directory.
#[derive(Clone, Debug)]
pub struct Server {
    state: PathBuf,
}

impl Server {
    pub fn new(state: &StateDir) -> Self {
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

    /// Whether the server's directory exists, even without a cluster.
    pub fn has_directory(&self) -> bool {
        self.directory().exists()
    }

    /// Whether the cluster exists.
    pub fn exists(&self) -> bool {
        self.data().join("PG_VERSION").exists()
    }

    /// Whether the server was started and has not shut down cleanly.
    pub fn was_started(&self) -> bool {
        self.data().join("postmaster.pid").exists()
    }

    /// The directory of the socket: in the state directory, or in a runtime directory if that path
    /// is too long. Independent of the environment: every command must find the same one.
    pub fn socket_directory(&self) -> PathBuf {
        let beside = self.directory().join("socket");
        if fits(&beside) {
            return beside;
        }
        let digest = Sha256::digest(self.state.as_os_str().as_encoded_bytes());
        owner::RuntimeDirectory::find()
            .path()
            .join(hex::encode(&digest[..8]))
    }

    /// Ensures that no other user can create a socket at our path. Call this before creating or
    /// using the socket.
    pub fn secure_sockets(&self) -> Result<(), Failure> {
        if self.socket_directory().starts_with(&self.state) {
            Ok(())
        } else {
            owner::RuntimeDirectory::find().secure()
        }
    }

    /// The connection URL.
    pub fn url(&self) -> String {
        format!(
            "postgres://{NAME}@localhost/{NAME}?host={}",
            encode_path(&self.socket_directory())
        )
    }

    /// Whether the postmaster with this process id accepts connections, according to its pid file.
    pub fn is_ready(&self, pid: u32) -> bool {
        let text = fs_err::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines
            .first()
            .is_some_and(|line| line.trim() == pid.to_string())
            && lines.get(7).is_some_and(|line| line.trim() == "ready")
    }

    /// The process id of the running postmaster, which may not accept connections yet.
    pub fn postmaster(&self) -> Option<u32> {
        let text = fs_err::read_to_string(self.data().join("postmaster.pid")).ok()?;
        let pid = text.lines().next()?.trim().parse().ok()?;
        leftovers::runs_in(&self.data(), pid).then_some(pid)
    }

    /// The process id of a running postmaster that accepts connections.
    pub fn running(&self) -> Option<u32> {
        self.postmaster().filter(|pid| self.is_ready(*pid))
    }

    /// Ends the processes that a killed `up` left. The caller holds the lock of `up`.
    pub fn end_leftovers(&self) -> Result<bool, Failure> {
        let mut ended = leftovers::end(&self.data())?;
        for unfinished in self.unfinished() {
            ended |= leftovers::end(&unfinished)?;
        }
        Ok(ended)
    }

    /// Clusters whose construction was interrupted.
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
    directory.as_os_str().len() + 1 + SOCKET.len() <= MAX_SOCKET_PATH
}

/// Encodes a path for a URL.
fn encode_path(path: &Path) -> String {
    const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
        .remove(b'/')
        .remove(b'-')
        .remove(b'_')
        .remove(b'.');
    percent_encode(path.as_os_str().as_encoded_bytes(), PLAIN).to_string()
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
    fn the_socket_is_in_the_state_directory_unless_the_path_is_too_long() {
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
    fn a_path_with_special_characters_is_encoded() {
        assert!(
            server("/a b/ä&c")
                .url()
                .ends_with("?host=/a%20b/%C3%A4%26c/postgres/socket")
        );
    }
}

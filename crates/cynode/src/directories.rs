//! The session of a directory: `session create` remembers the session that it made, and commands
//! without a session mean it, also in directories below.
//!
//! The file belongs to the user and holds no secret. It is lost without harm: a session can always
//! be named. So a file that can't be read or written is reported and otherwise ignored.

use std::{
    io::{self, Read as _},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use cynode_api::SessionId;
use cynode_service::{files, private};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{failure::Failure, output, pulled, sanitize};

/// Directories that are remembered; the one that was remembered first goes.
const MAX_DIRECTORIES: usize = 1_000;
/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Default, Serialize, Deserialize)]
struct DirectoryRecords {
    version: u32,
    /// The newest last.
    directories: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    /// Identifies server and directory: paths need not be UTF-8.
    key: String,
    server: String,
    /// For people who read the file, and to find the directory of a session.
    directory: String,
    session_id: SessionId,
    /// The session began with the files of this directory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    brought: bool,
}

/// The remembered sessions of one server.
#[derive(Debug)]
pub struct Directories {
    file: PathBuf,
    server: String,
}

impl Directories {
    /// `None` if the user has no home directory.
    pub fn of(server: &str) -> Option<Self> {
        Some(Self {
            file: client_state()?.join("directories.json"),
            server: server.to_owned(),
        })
    }

    /// Remembers the session that an agent works in, with the files of a directory.
    pub fn remember_agents(&self, directory: &Path, session: SessionId) {
        report(self.insert(directory, session, true));
    }

    /// Remembers the session of the current directory.
    pub fn remember(&self, session: SessionId) {
        report(current().and_then(|directory| self.insert(&directory, session, false)));
    }

    /// Remembers the session that a directory was brought into: it is the session of that
    /// directory, and of the current one.
    pub fn remember_brought(&self, directory: &Path, session: SessionId) {
        let remembered = current().and_then(|current| {
            if current != directory {
                self.insert(&current, session, false)?;
            }
            self.insert(directory, session, true)
        });
        report(remembered);
    }

    /// The directory that was brought into a session, if it is known.
    pub fn brought_from(&self, session: SessionId) -> Option<PathBuf> {
        let entries = self.read().ok()?.directories;
        let entry = entries
            .into_iter()
            .find(|entry| entry.brought && self.is_of(entry, session))?;
        // A path that is not UTF-8 is found again from within only.
        let known = [PathBuf::from(&entry.directory)];
        let above = current().unwrap_or_default();
        let candidates = known.iter().map(PathBuf::as_path).chain(above.ancestors());
        candidates
            .filter(|directory| self.key(directory) == entry.key)
            .map(Path::to_owned)
            .next()
    }

    fn is_of(&self, entry: &Entry, session: SessionId) -> bool {
        entry.session_id == session && entry.server == self.server
    }

    /// Forgets a session wherever it is remembered.
    pub fn forget(&self, session: SessionId) {
        pulled::forget(session);
        let forgotten = self.change(|entries| entries.retain(|entry| !self.is_of(entry, session)));
        if let Err(error) = forgotten {
            output::message(&format!(
                "cynode: the session is still remembered: {}",
                sanitize::line(&error.to_string())
            ));
        }
    }

    /// The session of the current directory, or of the nearest directory above that has one.
    pub fn current_session(&self) -> Result<SessionId, Failure> {
        let found = current().and_then(|directory| self.find(&directory));
        found
            .map_err(|error| Failure::internal(error.to_string()).remedy("Name a session."))?
            .ok_or_else(none_here)
    }

    fn find(&self, directory: &Path) -> io::Result<Option<SessionId>> {
        let entries = self.read()?.directories;
        Ok(directory.ancestors().find_map(|directory| {
            let key = self.key(directory);
            entries
                .iter()
                .find(|entry| entry.key == key)
                .map(|entry| entry.session_id)
        }))
    }

    fn insert(&self, directory: &Path, session: SessionId, brought: bool) -> io::Result<()> {
        let entry = Entry {
            key: self.key(directory),
            server: self.server.clone(),
            directory: directory.to_string_lossy().into_owned(),
            session_id: session,
            brought,
        };
        self.change(|entries| {
            entries.retain(|other| other.key != entry.key);
            entries.push(entry);
            let excess = entries.len().saturating_sub(MAX_DIRECTORIES);
            entries.drain(..excess);
        })
    }

    fn key(&self, directory: &Path) -> String {
        let mut hash = Sha256::new();
        hash.update(self.server.as_bytes());
        hash.update([0]);
        hash.update(directory.as_os_str().as_bytes());
        hex::encode(hash.finalize())
    }

    fn read(&self) -> io::Result<DirectoryRecords> {
        let file = match fs_err::File::open(&self.file) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(DirectoryRecords::default());
            }
            Err(error) => return Err(error),
        };
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
        serde_json::from_slice(&text)
            .map_err(|error| io::Error::other(format!("{}: {error}", self.file.display())))
    }

    /// Changes the file as one step among concurrent commands.
    fn change(&self, change: impl FnOnce(&mut Vec<Entry>)) -> io::Result<()> {
        let directory = self.file.parent().unwrap_or(Path::new("/"));
        fs_err::create_dir_all(directory.parent().unwrap_or(Path::new("/")))?;
        private::closed_directory(directory)?;
        let lock = private::open_lock(&directory.join("directories.lock"))?;
        wait_for(&lock)?;
        // A damaged file is replaced.
        let mut content = self.read().unwrap_or_default();
        let before = content.directories.clone();
        change(&mut content.directories);
        if content.directories == before {
            return Ok(());
        }
        content.version = 1;
        files::replace(&self.file, &serde_json::to_vec(&content)?)
    }
}

/// The directory for what the client commands remember. `None` if the user has no home directory.
pub fn client_state() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let state = variable("XDG_STATE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("cynode-client"))
}

/// Takes the lock, which others hold for milliseconds.
fn wait_for(lock: &fs_err::File) -> io::Result<()> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            taken => return Ok(taken?),
        }
    }
}

fn report(remembered: io::Result<()>) {
    if let Err(error) = remembered {
        output::message(&format!(
            "cynode: the session of this directory is not remembered: {}",
            sanitize::line(&error.to_string())
        ));
    }
}

fn current() -> io::Result<PathBuf> {
    fs_err::canonicalize(std::env::current_dir()?)
}

pub fn none_here() -> Failure {
    Failure::usage("no session belongs to this directory")
        .remedy("Create one with 'cynode session create', or name one: see 'cynode session list'.")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn directories(home: &Path, server: &str) -> Directories {
        Directories {
            file: home.join("state/cynode-client/directories.json"),
            server: server.to_owned(),
        }
    }

    #[test]
    fn a_directory_has_its_own_session_or_that_of_the_nearest_one_above() {
        let home = tempfile::tempdir().expect("a directory");
        let one = directories(home.path(), "http://one");
        let (outer, inner) = (SessionId::generate(), SessionId::generate());
        assert_eq!(one.find(Path::new("/a")).expect("no file"), None);
        one.insert(Path::new("/a"), outer, false).expect("written");
        one.insert(Path::new("/a/b"), inner, false)
            .expect("written");
        let find = |path: &str| one.find(Path::new(path)).expect("read");
        assert_eq!(find("/a"), Some(outer));
        assert_eq!(find("/a/c/d"), Some(outer));
        assert_eq!(find("/a/b/c"), Some(inner));
        assert_eq!(find("/ab"), None);
        let other = directories(home.path(), "http://two");
        assert_eq!(other.find(Path::new("/a")).expect("read"), None);
        other.forget(inner);
        assert_eq!(find("/a/b"), Some(inner), "another server's session");
        one.forget(inner);
        assert_eq!(find("/a/b"), Some(outer));
        let mode = fs_err::metadata(&one.file).expect("a file").permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
    }

    #[test]
    fn the_directory_that_a_session_was_brought_from_is_known() {
        let home = tempfile::tempdir().expect("a directory");
        let one = directories(home.path(), "http://one");
        let (brought, plain) = (SessionId::generate(), SessionId::generate());
        one.remember_brought(Path::new("/a/b"), brought);
        one.insert(Path::new("/a"), plain, false).expect("written");
        assert_eq!(one.brought_from(brought), Some("/a/b".into()));
        assert_eq!(one.brought_from(plain), None);
        let find = |path: &Path| one.find(path).expect("read");
        assert_eq!(find(Path::new("/a/b/c")), Some(brought));
        assert_eq!(find(&current().expect("a directory")), Some(brought));
        assert_eq!(
            directories(home.path(), "http://two").brought_from(brought),
            None
        );
        // Another session without the directory's files replaces it.
        one.insert(Path::new("/a/b"), plain, false)
            .expect("written");
        assert_eq!(one.brought_from(brought), None);
        let odd = Path::new(std::ffi::OsStr::from_bytes(b"/a/\xff"));
        one.remember_brought(odd, brought);
        assert_eq!(one.brought_from(brought), None);
        assert_eq!(find(odd), Some(brought));
    }

    #[test]
    fn the_oldest_directory_goes_and_a_damaged_file_is_replaced() {
        let home = tempfile::tempdir().expect("a directory");
        let one = directories(home.path(), "http://one");
        let session = SessionId::generate();
        one.insert(Path::new("/first"), session, false)
            .expect("written");
        one.change(|entries| {
            let entry = entries[0].clone();
            entries.extend((1..MAX_DIRECTORIES).map(|number| Entry {
                key: format!("{number}"),
                ..entry.clone()
            }));
        })
        .expect("written");
        assert_eq!(one.find(Path::new("/first")).expect("read"), Some(session));
        one.insert(Path::new("/new"), session, false)
            .expect("written");
        assert_eq!(one.find(Path::new("/first")).expect("read"), None);
        assert_eq!(one.read().expect("read").directories.len(), MAX_DIRECTORIES);
        fs_err::write(&one.file, "{").expect("damaged");
        assert!(one.find(Path::new("/new")).is_err());
        one.insert(Path::new("/new"), session, false)
            .expect("written");
        assert_eq!(one.find(Path::new("/new")).expect("read"), Some(session));
    }
}

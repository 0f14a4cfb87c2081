//! Remembers what was written to the clients' files, so that it can be undone to the byte.
//!
//! A change is kept as what it replaced and where: the text around it, which may hold the secrets
//! of other servers, is not copied.

use std::{
    io::{self, Read as _},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use cynode_service::{files, private};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Changes that are remembered; the one that was made first goes.
const MAX_CHANGES: usize = 1_000;
/// The largest file that is read.
const MAX_JOURNAL_BYTES: u64 = 16 * 1024 * 1024;

#[derive(Debug, Default, Serialize, Deserialize)]
struct JournalContent {
    version: u32,
    /// The newest last.
    changes: Vec<ClientChange>,
}

/// What a file was before a change: its text, or nothing if there was no file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Before(pub Option<String>);

/// One entry in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientChange {
    /// Identifies the file: paths need not be UTF-8.
    key: String,
    /// For people who read the journal.
    path: String,
    name: String,
    /// The hash of the text that was written.
    after_sha256: String,
    /// In that text, the bytes that were added, and what they replaced.
    start: usize,
    length: usize,
    replaced: String,
    /// There was no file before.
    created: bool,
    /// The directory that the entry is for.
    #[serde(default)]
    pub directory: Option<String>,
    /// Directories that were made for it, innermost first.
    pub directories: Vec<PathBuf>,
}

impl ClientChange {
    /// The change from one text to another.
    pub fn between(path: &Path, name: &str, before: Option<&str>, after: &str) -> Self {
        let text = before.unwrap_or_default();
        let common = |one: &mut dyn Iterator<Item = u8>, other: &mut dyn Iterator<Item = u8>| {
            one.zip(other)
                .take_while(|(one, other)| one == other)
                .count()
        };
        let mut start = common(&mut text.bytes(), &mut after.bytes());
        while !text.is_char_boundary(start) || !after.is_char_boundary(start) {
            start -= 1;
        }
        let (rest, rest_after) = (&text[start..], &after[start..]);
        let mut end = common(&mut rest.bytes().rev(), &mut rest_after.bytes().rev());
        while !rest.is_char_boundary(rest.len() - end)
            || !rest_after.is_char_boundary(rest_after.len() - end)
        {
            end -= 1;
        }
        Self {
            key: key(path),
            path: path.to_string_lossy().into_owned(),
            name: name.to_owned(),
            after_sha256: hash(after),
            start,
            length: rest_after.len() - end,
            replaced: rest[..rest.len() - end].to_owned(),
            created: before.is_none(),
            directory: None,
            directories: Vec::new(),
        }
    }

    /// What was before the change, if the file still has the text after it.
    pub fn undone(&self, current: &str) -> Option<Before> {
        if hash(current) != self.after_sha256 {
            return None;
        }
        if self.created {
            return Some(Before(None));
        }
        let end = self.start.checked_add(self.length)?;
        let (before, after) = (current.get(..self.start)?, current.get(end..)?);
        Some(Before(Some(format!("{before}{}{after}", self.replaced))))
    }
}

fn key(path: &Path) -> String {
    hex::encode(Sha256::digest(path.as_os_str().as_bytes()))
}

fn hash(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

/// The changes of this user.
#[derive(Debug)]
pub struct Journal(PathBuf);

impl Journal {
    /// In the user's client state directory.
    pub fn new(state: &Path) -> Self {
        Self(state.join("connections.json"))
    }

    pub fn find(&self, path: &Path, name: &str) -> io::Result<Option<ClientChange>> {
        let key = key(path);
        let changes = self.read()?.changes;
        Ok(changes
            .into_iter()
            .find(|change| change.key == key && change.name == name))
    }

    pub fn put(&self, change: ClientChange) -> io::Result<()> {
        self.change(|changes| {
            changes.retain(|other| other.key != change.key || other.name != change.name);
            changes.push(change);
            let excess = changes.len().saturating_sub(MAX_CHANGES);
            changes.drain(..excess);
        })
    }

    pub fn forget(&self, path: &Path, name: &str) -> io::Result<()> {
        let key = key(path);
        self.change(|changes| changes.retain(|other| other.key != key || other.name != name))
    }

    fn read(&self) -> io::Result<JournalContent> {
        let file = match fs_err::File::open(&self.0) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(JournalContent::default());
            }
            Err(error) => return Err(error),
        };
        let mut text = Vec::new();
        file.take(MAX_JOURNAL_BYTES).read_to_end(&mut text)?;
        // Without the journal, entries are still found by their names.
        Ok(serde_json::from_slice(&text).unwrap_or_default())
    }

    fn change(&self, change: impl FnOnce(&mut Vec<ClientChange>)) -> io::Result<()> {
        let directory = self.0.parent().unwrap_or(Path::new("/"));
        fs_err::create_dir_all(directory.parent().unwrap_or(Path::new("/")))?;
        private::closed_directory(directory)?;
        let lock = private::open_lock(&directory.join("connections.lock"))?;
        // Others hold it for milliseconds.
        flock(&lock, FlockOperation::LockExclusive)?;
        let mut content = self.read()?;
        change(&mut content.changes);
        content.version = 1;
        files::replace(&self.0, &serde_json::to_vec(&content)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_undone_to_the_byte_and_only_where_it_was_made() {
        let path = Path::new("/a");
        for (before, after) in [
            ("", "new"),
            ("{}", "{\"a\":{}}"),
            ("abc", "abXc"),
            ("aaaa", "aaaaaa"),
            ("é", "è"),
            ("x: 1\r\n", "x: 1\r\ny: 2\n"),
            ("same", "same"),
        ] {
            let change = ClientChange::between(path, "n", Some(before), after);
            assert_eq!(
                change.undone(after),
                Some(Before(Some(before.to_owned()))),
                "{before:?}"
            );
            assert_eq!(change.undone(&format!("{after} ")), None);
        }
        let change = ClientChange::between(path, "n", None, "new");
        assert_eq!(change.undone("new"), Some(Before(None)));
        // The rest of the file is not copied.
        let change =
            ClientChange::between(path, "n", Some("secret {} secret"), "secret {a} secret");
        assert!(
            !serde_json::to_string(&change)
                .expect("JSON")
                .contains("secret")
        );
    }

    #[test]
    fn changes_are_remembered_by_file_and_name() {
        let home = tempfile::tempdir().expect("a directory");
        let journal = Journal::new(&home.path().join("state/cynode-client"));
        let (one, two) = (Path::new("/one"), Path::new("/two"));
        assert_eq!(journal.find(one, "n").expect("read"), None);
        for (path, name) in [(one, "n"), (one, "m"), (two, "n")] {
            let change = ClientChange::between(path, name, Some(""), name);
            journal.put(change).expect("written");
        }
        let newer = ClientChange::between(one, "n", Some("b"), "c");
        journal.put(newer.clone()).expect("written");
        assert_eq!(journal.find(one, "n").expect("read"), Some(newer));
        journal.forget(one, "n").expect("written");
        assert_eq!(journal.find(one, "n").expect("read"), None);
        assert!(journal.find(one, "m").expect("read").is_some());
        assert!(journal.find(two, "n").expect("read").is_some());
        // A damaged journal is begun anew.
        fs_err::write(&journal.0, "{").expect("written");
        assert_eq!(journal.find(two, "n").expect("read"), None);
        journal
            .put(ClientChange::between(two, "n", None, "x"))
            .expect("written");
        assert!(journal.find(two, "n").expect("read").is_some());
    }

    #[test]
    // invariant: bounded
    fn the_oldest_change_goes() {
        let home = tempfile::tempdir().expect("a directory");
        let journal = Journal::new(&home.path().join("cynode-client"));
        let change = |number: usize| ClientChange {
            key: number.to_string(),
            ..ClientChange::between(Path::new("/a"), "n", None, "x")
        };
        journal
            .change(|changes| changes.extend((0..MAX_CHANGES).map(change)))
            .expect("written");
        journal.put(change(MAX_CHANGES)).expect("written");
        let changes = journal.read().expect("read").changes;
        assert_eq!(changes.len(), MAX_CHANGES);
        assert_eq!(changes.first().map(|it| it.key.as_str()), Some("1"));
    }
}

//! Remembers what `session pull` did to a directory, for the next pull from the same session.
//!
//! A record is lost without harm: changes that were applied then conflict with themselves, and
//! nothing is overwritten.

use std::{
    io::{self, Read as _},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use cynode_api::SessionId;
use cynode_service::{files, private};
use sha2::{Digest as _, Sha256};

use crate::{apply::Earlier, directories, output, sanitize};

/// The largest record that is read.
const MAX_RECORD_BYTES: u64 = 128 * 1024 * 1024;
/// Records that are kept; the oldest goes.
const MAX_RECORDS: usize = 20;

/// The record of one session and one directory.
#[derive(Debug)]
pub struct Pulled {
    file: PathBuf,
}

impl Pulled {
    /// `None` if the user has no home directory.
    pub fn of(server: &str, session: SessionId, directory: &Path) -> Option<Self> {
        let mut hash = Sha256::new();
        hash.update(server.as_bytes());
        hash.update([0]);
        hash.update(directory.as_os_str().as_bytes());
        let key = &hex::encode(hash.finalize())[..16];
        Some(Self {
            file: directory_of_records()?.join(format!("{session}.{key}.json")),
        })
    }

    pub fn read(&self) -> Earlier {
        let read = || -> io::Result<Earlier> {
            let mut text = Vec::new();
            let file = fs_err::File::open(&self.file)?;
            file.take(MAX_RECORD_BYTES).read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        match read() {
            Ok(earlier) => earlier,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Earlier::default(),
            Err(error) => {
                report("can't be read", &error);
                Earlier::default()
            }
        }
    }

    /// Replaces the record; removes it if there is nothing to record.
    pub fn write(&self, earlier: Option<&Earlier>) {
        let write = || -> io::Result<()> {
            let Some(earlier) = earlier.filter(|earlier| !earlier.is_empty()) else {
                return match fs_err::remove_file(&self.file) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                    _ => Ok(()),
                };
            };
            let directory = self.file.parent().unwrap_or(Path::new("/"));
            let above = directory.parent().unwrap_or(Path::new("/"));
            fs_err::create_dir_all(above.parent().unwrap_or(Path::new("/")))?;
            private::closed_directory(above)?;
            private::closed_directory(directory)?;
            files::replace(&self.file, &serde_json::to_vec(earlier)?)?;
            evict(directory)
        };
        if let Err(error) = write() {
            report("is not remembered", &error);
        }
    }
}

fn report(problem: &str, error: &io::Error) {
    output::message(&format!(
        "cynode: what was pulled before {problem}, and may conflict with itself the next time: {}",
        sanitize::line(&error.to_string())
    ));
}

fn directory_of_records() -> Option<PathBuf> {
    directories::client_state().map(|state| state.join("pulled"))
}

/// Removes the records of a session that has ended.
pub fn forget(session: SessionId) {
    let Some(entries) = directory_of_records().and_then(|it| fs_err::read_dir(it).ok()) else {
        return;
    };
    let prefix = format!("{session}.");
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            // A leftover is evicted later.
            drop(fs_err::remove_file(entry.path()));
        }
    }
}

fn evict(directory: &Path) -> io::Result<()> {
    let mut records: Vec<(SystemTime, PathBuf)> = fs_err::read_dir(directory)?
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    records.sort();
    let excess = records.len().saturating_sub(MAX_RECORDS);
    for (_, record) in records.drain(..excess) {
        // Another command may have evicted it.
        drop(fs_err::remove_file(record));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn earlier() -> Earlier {
        let file = serde_json::json!({
            "path": "YQ==",
            "before": null,
            "after": {"executable": true, "sha256": "x"},
        });
        serde_json::from_value(serde_json::json!({ "files": [file] })).expect("valid")
    }

    #[test]
    fn a_record_is_private_and_is_lost_without_harm() {
        let home = tempfile::tempdir().expect("a directory");
        let pulled = Pulled {
            file: home.path().join("cynode-client/pulled/a.json"),
        };
        assert_eq!(pulled.read(), Earlier::default());
        pulled.write(Some(&earlier()));
        assert_eq!(pulled.read(), earlier());
        let mode = fs_err::metadata(&pulled.file).expect("there").permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        fs_err::write(&pulled.file, "{").expect("damaged");
        assert_eq!(pulled.read(), Earlier::default());
        pulled.write(None);
        assert!(!pulled.file.exists());
        pulled.write(None);
    }

    #[test]
    // invariant: bounded
    fn the_oldest_record_goes() {
        let home = tempfile::tempdir().expect("a directory");
        let pulled = |number: usize| Pulled {
            file: home
                .path()
                .join(format!("cynode-client/pulled/{number}.json")),
        };
        let begin = SystemTime::UNIX_EPOCH;
        for number in 0..MAX_RECORDS {
            pulled(number).write(Some(&earlier()));
            let time = begin + std::time::Duration::from_secs(number as u64);
            let file = fs_err::File::open(pulled(number).file).expect("there");
            file.set_modified(time).expect("set");
        }
        assert!(pulled(0).file.exists());
        pulled(MAX_RECORDS).write(Some(&earlier()));
        assert!(!pulled(0).file.exists());
        assert!(pulled(1).file.exists() && pulled(MAX_RECORDS).file.exists());
    }
}

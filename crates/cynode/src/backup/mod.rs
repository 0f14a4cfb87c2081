//! `backup`: saves the state of the control plane to one file, and restores it.
//!
//! The file is a tar archive: the database as `pg_dump` writes it, the keys and tokens, the
//! artifacts, and last a manifest with the hash of each file. The database is dumped before the
//! artifacts are copied: artifacts are immutable and stored before the database refers to them, so
//! the backup has every artifact that its database refers to. State of workers (sandboxes,
//! workspaces, their journal) is not included.

mod database;
mod restore;
mod save;

use std::{
    io::{self, Read},
    path::PathBuf,
    process::ExitCode,
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    cli::{Backup, Globals, OutputFormat},
    failure::Failure,
    output, roles,
    state::StateDir,
    up::REGISTRATION_KEY,
};

const FORMAT: u32 = 1;
const MANIFEST: &str = "manifest.json";
const DATABASE: &str = "database.dump";
const ARTIFACTS: &str = "artifacts";
const GIT_KEY: &str = "keys/egress-git.key";

/// The last file of a backup.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Manifest {
    /// The version of the format.
    version: u32,
    /// The version of the program that wrote the backup.
    cynode: String,
    made_at: String,
    /// False if artifacts are in an external store, which needs its own backup.
    has_artifacts: bool,
    files: Vec<FileEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileEntry {
    path: String,
    size: u64,
    sha256: String,
}

pub async fn run(globals: &Globals, args: &Backup) -> Result<ExitCode, Failure> {
    let config = roles::orchestrator_config(globals, &args.settings)?;
    let state = StateDir::new(globals)?;
    let keys = keys(
        &state,
        &config,
        &roles::git_config(globals, &args.settings)?,
    );
    let manifest = if args.restore {
        restore::run(&args.file, &state, &config, keys).await?
    } else {
        save::run(&args.file, args.force, &state, &config, keys).await?
    };
    let verb = if args.restore {
        "restored from"
    } else {
        "saved to"
    };
    match globals.output {
        OutputFormat::Json => output::json(&manifest)?,
        OutputFormat::Table => {
            let artifacts = manifest
                .files
                .iter()
                .filter(|entry| entry.path.starts_with(ARTIFACTS))
                .count();
            let contents = if manifest.has_artifacts {
                format!("{artifacts} artifacts and outputs")
            } else {
                "no artifacts (they are in an external store)".to_owned()
            };
            output::message(&format!(
                "{verb} {}: the database, keys and tokens, {contents}",
                args.file.display()
            ));
            output::message(
                "a backup does not include sandboxes, workspaces and images of workers",
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The name of a key or token in the backup, and its path.
type KeyPath = (&'static str, PathBuf);

/// Keys and tokens. Without the git role's key no stored credential can be opened.
fn keys(
    state: &StateDir,
    config: &cynode_orchestrator::Config,
    git: &cynode_egress::Config,
) -> Vec<KeyPath> {
    let registration = config
        .registration_key_file
        .clone()
        .unwrap_or_else(|| state.path().join(REGISTRATION_KEY));
    vec![
        ("keys/admin.token", state.path().join("admin.token")),
        ("keys/worker.token", state.path().join("worker.token")),
        ("keys/orchestrator.key", config.key_file()),
        ("keys/registration.key", registration),
        (GIT_KEY, git.directory().join("key")),
    ]
}

/// The local artifact store; `None` if the store is external.
fn artifacts(state: &StateDir, config: &cynode_orchestrator::Config) -> Option<PathBuf> {
    match &config.artifact_store {
        Some(store) if store.contains("://") => None,
        Some(directory) => Some(state.path().join(directory)),
        None => Some(state.path().join(ARTIFACTS)),
    }
}

/// Size and hash of a file's content so far.
#[derive(Debug, Default)]
struct ContentDigest {
    hash: Sha256,
    size: u64,
}

impl ContentDigest {
    fn update(&mut self, piece: &[u8]) {
        self.hash.update(piece);
        self.size += piece.len() as u64;
    }

    fn finish(self, path: &str) -> FileEntry {
        FileEntry {
            path: path.to_owned(),
            size: self.size,
            sha256: hex::encode(self.hash.finalize()),
        }
    }
}

/// Hashes what it reads.
#[derive(Debug)]
struct HashingReader<R> {
    inner: R,
    digest: ContentDigest,
}

impl<R> HashingReader<R> {
    fn new(inner: R) -> Self {
        Self {
            inner,
            digest: ContentDigest::default(),
        }
    }

    fn finish(self, path: &str) -> FileEntry {
        self.digest.finish(path)
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.digest.update(&buffer[..count]);
        Ok(count)
    }
}

/// Whether a backup may hold an entry of this name. Entries of other names are never unpacked.
fn is_backup_path(path: &str) -> bool {
    let is_blob = |rest: &str| {
        let mut parts = rest.split('/');
        let (kind, prefix, hash) = (parts.next(), parts.next(), parts.next());
        let hexadecimal = |text: &str| {
            text.bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        kind == Some("sha256")
            && parts.next().is_none()
            && hash.is_some_and(|hash| {
                hash.len() == 64
                    && hexadecimal(hash)
                    && prefix.is_some_and(|prefix| prefix.len() == 2 && hash.starts_with(prefix))
            })
    };
    matches!(
        path,
        DATABASE
            | MANIFEST
            | GIT_KEY
            | "keys/admin.token"
            | "keys/worker.token"
            | "keys/orchestrator.key"
            | "keys/registration.key"
    ) || path.strip_prefix("artifacts/").is_some_and(is_blob)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_that_save_writes_are_backup_paths() {
        let hash = "ab".repeat(32);
        assert!(
            is_backup_path(&format!("artifacts/sha256/ab/{hash}"))
                && is_backup_path(DATABASE)
                && is_backup_path("keys/admin.token")
                && is_backup_path("keys/egress-git.key")
        );
        for path in [
            "keys/../../etc/passwd".to_owned(),
            "/etc/passwd".to_owned(),
            format!("artifacts/sha256/cd/{hash}"),
            format!("artifacts/sha256/ab/{hash}/x"),
            "artifacts/incoming/x".to_owned(),
            "artifacts/sha256/../x".to_owned(),
            "keys/other".to_owned(),
            String::new(),
        ] {
            assert!(!is_backup_path(&path), "{path}");
        }
    }
}

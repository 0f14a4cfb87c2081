//! `backup`: the whole state of the control plane in one file, and back.
//!
//! The file is a tar: the database as `pg_dump` wrote it, the keys and tokens, the artifacts, and last a manifest with the hash of each.
//! The database is saved before the artifacts, which never change and are stored before the database names them: whatever it names is
//! there. What workers have (sandboxes, workspaces, their journal) is not in it.

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
    cli::{Backup, Format, Globals},
    failure::Failure,
    output, roles,
    state::StateDir,
    up::REGISTRATION_KEY,
};

const FORMAT: u32 = 1;
const MANIFEST: &str = "manifest.json";
const DATABASE: &str = "database.dump";
const ARTIFACTS: &str = "artifacts";

/// The last file of a backup.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Manifest {
    /// Of the format.
    version: u32,
    /// Of the program that wrote it.
    cynode: String,
    made_at: String,
    /// False when they are in a store elsewhere, which has its own backup.
    has_artifacts: bool,
    files: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    path: String,
    size: u64,
    sha256: String,
}

pub async fn run(globals: &Globals, args: &Backup) -> Result<ExitCode, Failure> {
    let config = roles::orchestrator_config(globals, &args.settings)?;
    let state = StateDir::new(globals)?;
    let manifest = if args.restore {
        restore::run(&args.file, &state, &config).await?
    } else {
        save::run(&args.file, args.force, &state, &config).await?
    };
    let done = if args.restore {
        "restored from"
    } else {
        "saved to"
    };
    match globals.output {
        Format::Json => output::json(&manifest)?,
        Format::Table => {
            let artifacts = manifest
                .files
                .iter()
                .filter(|entry| entry.path.starts_with(ARTIFACTS))
                .count();
            let kept = if manifest.has_artifacts {
                format!("{artifacts} artifacts and outputs")
            } else {
                "no artifacts, which are in a store elsewhere".to_owned()
            };
            output::note(&format!(
                "{done} {}: the database, keys and tokens, {kept}",
                args.file.display()
            ));
            output::note("sandboxes, workspaces and images of workers are not in a backup");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The files besides the database and the artifacts: their names in the backup, and where they belong.
fn keys(state: &StateDir, config: &cynode_orchestrator::Config) -> Vec<(&'static str, PathBuf)> {
    let registration = config
        .registration_key_file
        .clone()
        .unwrap_or_else(|| state.path().join(REGISTRATION_KEY));
    vec![
        ("keys/admin.token", state.path().join("admin.token")),
        ("keys/worker.token", state.path().join("worker.token")),
        ("keys/orchestrator.key", config.key_file()),
        ("keys/registration.key", registration),
    ]
}

/// Where artifacts are on this machine; `None` when they are elsewhere.
fn artifacts(state: &StateDir, config: &cynode_orchestrator::Config) -> Option<PathBuf> {
    match &config.artifact_store {
        Some(store) if store.contains("://") => None,
        Some(directory) => Some(state.path().join(directory)),
        None => Some(state.path().join(ARTIFACTS)),
    }
}

/// Reads and hashes.
#[derive(Debug)]
struct Hashing<R> {
    inner: R,
    hash: Sha256,
    size: u64,
}

impl<R: Read> Hashing<R> {
    fn new(inner: R) -> Self {
        Self {
            inner,
            hash: Sha256::new(),
            size: 0,
        }
    }

    fn finish(self, path: &str) -> Entry {
        Entry {
            path: path.to_owned(),
            size: self.size,
            sha256: output::hex(&self.hash.finalize()),
        }
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hash.update(&buffer[..count]);
        self.size += count as u64;
        Ok(count)
    }
}

/// Whether a name in a backup is one that we give. Nothing else is ever written to disk.
fn is_known(path: &str) -> bool {
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
    fn only_names_that_we_give_are_taken() {
        let hash = "ab".repeat(32);
        assert!(
            is_known(&format!("artifacts/sha256/ab/{hash}"))
                && is_known(DATABASE)
                && is_known("keys/admin.token")
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
            assert!(!is_known(&path), "{path}");
        }
    }
}

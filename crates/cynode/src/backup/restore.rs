//! Restores a backup into an empty state directory.
//!
//! The whole file is staged and compared with its manifest before anything is moved into place. A
//! marker file exists meanwhile: `up` refuses a directory with an interrupted restore.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use cynode_archive::{Archive, Kind, ReadError, Reader};
use fs_err::os::unix::fs::OpenOptionsExt as _;

use super::{
    ARTIFACTS, ContentDigest, DATABASE, FORMAT, FileEntry, MANIFEST, Manifest, artifacts,
    database::Database, is_backup_path, keys,
};
use crate::{
    failure::{Failure, USAGE},
    output::Progress,
    state::{LockState, StateDir},
    up,
};

/// A manifest has one line for each artifact.
const MAX_MANIFEST: u64 = 1 << 30;

pub async fn run(
    file: &Path,
    state: &StateDir,
    config: &cynode_orchestrator::Config,
) -> Result<Manifest, Failure> {
    let archive = fs_err::File::open(file)
        .map_err(|error| Failure::new(USAGE, "usage", error.to_string()))?;
    refuse_unless_empty(state)?;
    state.create()?;
    let LockState::Acquired(lock) = up::acquire(state).await? else {
        return Err(Failure::new(
            USAGE,
            "already_running",
            "CyNode runs on this state directory",
        )
        .remedy("Restore into another state directory."));
    };
    cynode_service::files::replace(&state.unfinished_restore(), b"")?;
    let staged = state.path().join("restore");
    let progress = Progress::start("reading the backup");
    let manifest = match unpack(archive, &staged) {
        Ok(manifest) => manifest,
        Err(failure) => {
            // Nothing was moved into place yet: leave the directory as empty as it was.
            drop(fs_err::remove_dir_all(&staged));
            drop(fs_err::remove_file(state.unfinished_restore()));
            drop(lock);
            drop(fs_err::remove_file(state.path().join("up.lock")));
            drop(fs_err::remove_dir(state.path().join("log")));
            return Err(failure);
        }
    };
    progress.set_message("moving files into place");
    for (name, path) in keys(state, config) {
        if staged.join(name).exists() {
            cynode_service::files::replace(&path, &fs_err::read(staged.join(name))?)?;
        }
    }
    if let Some(store) = artifacts(state, config).filter(|_| staged.join(ARTIFACTS).exists()) {
        fs_err::rename(staged.join(ARTIFACTS), store)?;
    }
    progress.set_message("restoring the database");
    Database::open(
        state,
        config.database_url.as_deref(),
        config.database_url.is_none(),
    )?
    .restore(&staged.join(DATABASE))?;
    fs_err::remove_dir_all(&staged)?;
    fs_err::remove_file(state.unfinished_restore())?;
    drop(lock);
    Ok(manifest)
}

fn refuse_unless_empty(state: &StateDir) -> Result<(), Failure> {
    match fs_err::read_dir(state.path()) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(Failure::new(
                USAGE,
                "not_empty",
                format!("{} is not empty", state.path().display()),
            )
            .remedy("Pass an empty state directory with --state-dir, or move its files away.")),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn damaged(message: impl Into<String>) -> Failure {
    Failure::new(USAGE, "damaged", message).remedy("Use another backup; nothing was changed.")
}

/// Unpacks the files that a backup must have below `to`, and refuses any other.
fn unpack(archive: fs_err::File, to: &Path) -> Result<Manifest, Failure> {
    let broken = |error: ReadError| damaged(format!("the backup can't be read: {error}"));
    let mut archive = Archive::new(Reader::new(archive));
    let mut unpacked = BTreeMap::new();
    let mut manifest = None;
    while let Some(entry) = archive.next_entry().map_err(broken)? {
        let name = String::from_utf8_lossy(&entry.path).into_owned();
        if !is_backup_path(&name) || entry.kind != Kind::File {
            return Err(damaged(format!("unexpected entry '{name}'")));
        }
        if name == MANIFEST {
            if entry.size > MAX_MANIFEST {
                return Err(damaged(format!("{MANIFEST} is too large")));
            }
            let mut text = Vec::new();
            archive
                .read(|piece| {
                    text.extend_from_slice(piece);
                    Ok(())
                })
                .map_err(broken)?;
            manifest = Some(
                serde_json::from_slice::<Manifest>(&text)
                    .map_err(|error| damaged(format!("{MANIFEST} can't be read: {error}")))?,
            );
            continue;
        }
        let path = to.join(&name);
        create_parent(&path)?;
        let mut file = fs_err::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|error| broken(error.into()))?;
        let mut digest = ContentDigest::default();
        archive
            .read(|piece| {
                digest.update(piece);
                Ok(file.write_all(piece)?)
            })
            .map_err(broken)?;
        file.sync_all()?;
        unpacked.insert(name.clone(), digest.finish(&name));
    }
    let manifest =
        manifest.ok_or_else(|| damaged("the backup has no manifest: it is truncated"))?;
    check(&manifest, &unpacked)?;
    Ok(manifest)
}

fn create_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().map_or_else(PathBuf::new, Path::to_owned);
    std::fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(parent)
}

fn check(manifest: &Manifest, unpacked: &BTreeMap<String, FileEntry>) -> Result<(), Failure> {
    if manifest.version != FORMAT {
        return Err(Failure::new(
            USAGE,
            "unsupported_version",
            format!(
                "the backup has format {}; this program reads format {FORMAT}",
                manifest.version
            ),
        )
        .remedy(format!("Restore it with CyNode {}.", manifest.cynode)));
    }
    let this_version = env!("CARGO_PKG_VERSION");
    if numbers(&manifest.cynode) > numbers(this_version) {
        return Err(Failure::new(
            USAGE,
            "unsupported_version",
            format!(
                "the backup is from CyNode {}, which is newer than this program ({this_version})",
                manifest.cynode
            ),
        )
        .remedy("Restore it with that version or a newer one."));
    }
    for entry in &manifest.files {
        match unpacked.get(&entry.path) {
            Some(present) if present == entry => {}
            Some(_) => {
                return Err(damaged(format!(
                    "{} differs from its hash in the manifest",
                    entry.path
                )));
            }
            None => return Err(damaged(format!("{} is missing", entry.path))),
        }
    }
    if unpacked.len() != manifest.files.len() || !unpacked.contains_key(DATABASE) {
        return Err(damaged("the files differ from the manifest"));
    }
    Ok(())
}

fn numbers(version: &str) -> Vec<u64> {
    version
        .split(['.', '-'])
        .map_while(|part| part.parse().ok())
        .collect()
}

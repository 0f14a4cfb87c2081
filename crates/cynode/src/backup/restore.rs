//! Bringing a backup back, into an empty state directory.
//!
//! All of the file is read and compared with its manifest before anything is put in its place. A marker stands in the directory
//! meanwhile: `up` refuses one in which a restore was cut off.

use std::{
    collections::BTreeMap,
    io::{self, Read as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use fs_err::os::unix::fs::OpenOptionsExt as _;

use super::{
    ARTIFACTS, DATABASE, Entry, FORMAT, Hashing, MANIFEST, Manifest, artifacts, database::Database,
    is_known, keys,
};
use crate::{
    failure::{Failure, USAGE},
    output::Progress,
    state::{Locked, StateDir},
    up,
};

/// A manifest is a line for each artifact.
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
    let Locked::Ours(lock) = up::acquire(state).await? else {
        return Err(Failure::new(
            USAGE,
            "already_running",
            "CyNode runs on this state directory",
        )
        .remedy("Restore into another one."));
    };
    cynode_service::files::replace(&state.unfinished_restore(), b"")?;
    let staged = state.path().join("restore");
    let progress = Progress::start("reading the backup");
    let manifest = match unpack(archive, &staged) {
        Ok(manifest) => manifest,
        Err(failure) => {
            // Nothing was put in its place yet: the directory is as empty as it was.
            drop(fs_err::remove_dir_all(&staged));
            drop(fs_err::remove_file(state.unfinished_restore()));
            drop(lock);
            drop(fs_err::remove_file(state.path().join("up.lock")));
            drop(fs_err::remove_dir(state.path().join("log")));
            return Err(failure);
        }
    };
    progress.say("putting it in its place");
    for (name, path) in keys(state, config) {
        if staged.join(name).exists() {
            cynode_service::files::replace(&path, &fs_err::read(staged.join(name))?)?;
        }
    }
    if let Some(store) = artifacts(state, config).filter(|_| staged.join(ARTIFACTS).exists()) {
        fs_err::rename(staged.join(ARTIFACTS), store)?;
    }
    progress.say("restoring the database");
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
            .remedy("Name an empty state directory by --state-dir, or move what is there away.")),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn damaged(what: impl Into<String>) -> Failure {
    Failure::new(USAGE, "damaged", what).remedy("Use another backup; nothing was changed.")
}

/// Unpacks below `to` what must be there, and nothing else.
fn unpack(archive: fs_err::File, to: &Path) -> Result<Manifest, Failure> {
    let broken = |error: &io::Error| damaged(format!("this is not a whole backup: {error}"));
    let mut archive = tar::Archive::new(io::BufReader::with_capacity(1 << 20, archive));
    let mut found = BTreeMap::new();
    let mut manifest = None;
    for entry in archive.entries().map_err(|error| broken(&error))? {
        let entry = entry.map_err(|error| broken(&error))?;
        let name = entry
            .path()
            .ok()
            .and_then(|path| path.to_str().map(ToOwned::to_owned))
            .unwrap_or_default();
        if !is_known(&name) || entry.header().entry_type() != tar::EntryType::Regular {
            return Err(damaged(format!("a backup has no '{name}'")));
        }
        if name == MANIFEST {
            let mut text = Vec::new();
            entry
                .take(MAX_MANIFEST)
                .read_to_end(&mut text)
                .map_err(|error| broken(&error))?;
            manifest = Some(
                serde_json::from_slice::<Manifest>(&text)
                    .map_err(|error| damaged(format!("{MANIFEST} can't be read: {error}")))?,
            );
            continue;
        }
        let path = to.join(&name);
        private(&path)?;
        let mut file = fs_err::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|error| broken(&error))?;
        let mut reader = Hashing::new(entry);
        io::copy(&mut reader, &mut file).map_err(|error| broken(&error))?;
        file.sync_all()?;
        found.insert(name.clone(), reader.finish(&name));
    }
    let manifest = manifest.ok_or_else(|| damaged("it has no manifest: it was cut off"))?;
    check(&manifest, &found)?;
    Ok(manifest)
}

fn private(path: &Path) -> io::Result<()> {
    let parent = path.parent().map_or_else(PathBuf::new, Path::to_owned);
    std::fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(parent)
}

fn check(manifest: &Manifest, found: &BTreeMap<String, Entry>) -> Result<(), Failure> {
    if manifest.version != FORMAT {
        return Err(Failure::new(
            USAGE,
            "unsupported_version",
            format!(
                "the backup has format {}; this program knows {FORMAT}",
                manifest.version
            ),
        )
        .remedy(format!("Restore it with CyNode {}.", manifest.cynode)));
    }
    let own = env!("CARGO_PKG_VERSION");
    if numbers(&manifest.cynode) > numbers(own) {
        return Err(Failure::new(
            USAGE,
            "unsupported_version",
            format!(
                "the backup is of CyNode {}, which is newer than this one, {own}",
                manifest.cynode
            ),
        )
        .remedy("Restore it with that version or a newer one."));
    }
    for entry in &manifest.files {
        match found.get(&entry.path) {
            Some(present) if present == entry => {}
            Some(_) => return Err(damaged(format!("{} is not what was saved", entry.path))),
            None => return Err(damaged(format!("{} is missing", entry.path))),
        }
    }
    if found.len() != manifest.files.len() || !found.contains_key(DATABASE) {
        return Err(damaged("its files are not those of its manifest"));
    }
    Ok(())
}

fn numbers(version: &str) -> Vec<u64> {
    version
        .split(['.', '-'])
        .map_while(|part| part.parse().ok())
        .collect()
}

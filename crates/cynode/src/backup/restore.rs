//! Restores a backup into an empty state directory.
//!
//! The whole file is staged and compared with its manifest before anything is moved into place. A
//! marker file exists meanwhile: `up` refuses a directory with an interrupted restore. Keys and
//! artifacts may have their places outside the state directory: files that exist there are not
//! replaced, and keys are installed after the database, so a failed restore changes nothing there.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use cynode_archive::{Archive, Kind, ReadError, Reader};
use fs_err::os::unix::fs::OpenOptionsExt as _;

use super::{
    ARTIFACTS, ContentDigest, DATABASE, FORMAT, FileEntry, GIT_KEY, KeyPath, MANIFEST, Manifest,
    artifacts, database::Database, is_backup_path,
};
use crate::{
    failure::{Failure, USAGE},
    output::Progress,
    staged::StagedFile,
    state::{LockState, StateDir},
    up,
};

/// A manifest has one line for each artifact.
const MAX_MANIFEST: u64 = 1 << 30;

pub async fn run(
    file: &Path,
    state: &StateDir,
    config: &cynode_orchestrator::Config,
    keys: Vec<KeyPath>,
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
    let blobs = staged.join(ARTIFACTS);
    let store = artifacts(state, config);
    let prepared = unpack(archive, &staged).and_then(|manifest| {
        let missing = missing_keys(&staged, keys)?;
        let store = store.filter(|_| blobs.exists());
        if let Some(store) = &store {
            refuse_unless_vacant(store)?;
            fs_err::rename(&blobs, store)?;
        }
        Ok((manifest, missing, store))
    });
    let (manifest, missing, store) = match prepared {
        Ok(prepared) => prepared,
        Err(failure) => {
            // Nothing is in place yet: leave the directory as empty as it was.
            drop(fs_err::remove_dir_all(&staged));
            drop(fs_err::remove_file(state.unfinished_restore()));
            drop(lock);
            drop(fs_err::remove_file(state.path().join("up.lock")));
            for directory in ["log", "egress/git", "egress"] {
                drop(fs_err::remove_dir(state.path().join(directory)));
            }
            return Err(failure);
        }
    };
    progress.set_message("restoring the database");
    let restored = Database::open(
        state,
        config.database_url.as_deref(),
        config.database_url.is_none(),
    )
    .and_then(|database| database.restore(&staged.join(DATABASE)));
    if let Err(failure) = restored {
        if let Some(store) = store {
            // The next attempt must find the place vacant.
            drop(fs_err::rename(store, blobs));
        }
        return Err(failure);
    }
    progress.set_message("installing keys");
    for (from, to) in missing {
        cynode_service::files::replace(&to, &fs_err::read(from)?)?;
    }
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

/// The keys to install: their paths in the backup and their places. A key that is in its place
/// already is not among them; refuses a place with anything else, or that can't be written to.
fn missing_keys(staged: &Path, keys: Vec<KeyPath>) -> Result<Vec<(PathBuf, PathBuf)>, Failure> {
    let mut missing = Vec::new();
    for (name, to) in keys {
        let from = staged.join(name);
        if !from.exists() {
            continue;
        }
        if name == GIT_KEY {
            // The role's directory; under root the role takes it over when it starts.
            create_parent(&to)?;
        }
        match fs_err::symlink_metadata(&to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Find out now whether files can be created there.
                drop(StagedFile::create(&to, 0o600)?);
                missing.push((from, to));
            }
            Err(error) => return Err(error.into()),
            Ok(_) if is_copy(&from, &to)? => {}
            Ok(_) => return Err(occupied(&to)),
        }
    }
    Ok(missing)
}

/// Whether `other` is a regular file with the content of `file`.
fn is_copy(file: &Path, other: &Path) -> io::Result<bool> {
    let size = fs_err::metadata(file)?.len();
    Ok(
        fs_err::metadata(other).is_ok_and(|other| other.is_file() && other.len() == size)
            && fs_err::read(file)? == fs_err::read(other)?,
    )
}

/// Refuses a place of artifacts with anything but an empty directory.
fn refuse_unless_vacant(store: &Path) -> Result<(), Failure> {
    match fs_err::symlink_metadata(store) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
        Ok(entry) if entry.is_dir() && fs_err::read_dir(store)?.next().is_none() => Ok(()),
        Ok(_) => Err(occupied(store)),
    }
}

fn occupied(path: &Path) -> Failure {
    let path = path.display();
    Failure::new(
        USAGE,
        "already_exists",
        format!("{path} exists, and is not what the backup has"),
    )
    .remedy(format!(
        "Move {path} away, or configure another path; nothing was changed."
    ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_outside_the_state_directory_is_kept_or_the_restore_is_refused() {
        let root = tempfile::tempdir().expect("a directory");
        let (staged, elsewhere) = (root.path().join("restore"), root.path().join("elsewhere"));
        let name = "keys/orchestrator.key";
        fs_err::create_dir_all(staged.join("keys")).expect("made");
        fs_err::create_dir(&elsewhere).expect("made");
        fs_err::write(staged.join(name), "saved").expect("written");
        let place = elsewhere.join("key");
        let missing = || missing_keys(&staged, vec![(name, place.clone())]);

        assert_eq!(
            missing().expect("vacant"),
            [(staged.join(name), place.clone())]
        );
        assert_eq!(fs_err::read_dir(&elsewhere).expect("listed").count(), 0);
        fs_err::write(&place, "saved").expect("written");
        assert_eq!(missing().expect("the same key"), []);
        for other in ["owned", "longer than it"] {
            fs_err::write(&place, other).expect("written");
            let refused = missing().expect_err("another key");
            assert!(
                refused.exit == USAGE
                    && refused
                        .remedy_text()
                        .is_some_and(|remedy| remedy.contains(&place.display().to_string())),
                "{refused:?}"
            );
            assert_eq!(fs_err::read_to_string(&place).expect("there"), other);
        }
        fs_err::remove_file(&place).expect("removed");
        std::os::unix::fs::symlink("nowhere", &place).expect("linked");
        assert!(missing().is_err());
        // A backup without this key does not need the place.
        fs_err::remove_file(staged.join(name)).expect("removed");
        assert_eq!(missing().expect("nothing to install"), []);
        // A place in a directory that does not exist.
        fs_err::write(staged.join(name), "saved").expect("written");
        let nowhere = vec![(name, root.path().join("none/key"))];
        assert!(missing_keys(&staged, nowhere).is_err());
    }

    #[test]
    fn artifacts_are_restored_only_into_an_empty_directory() {
        let root = tempfile::tempdir().expect("a directory");
        let store = root.path().join("store");
        refuse_unless_vacant(&store).expect("missing");
        fs_err::create_dir(&store).expect("made");
        refuse_unless_vacant(&store).expect("empty");
        fs_err::write(store.join("file"), "").expect("written");
        assert!(refuse_unless_vacant(&store).is_err());
        assert!(refuse_unless_vacant(&store.join("file")).is_err());
    }
}

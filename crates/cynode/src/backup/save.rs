//! Writes a backup, also while CyNode runs.

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    ARTIFACTS, DATABASE, FORMAT, FileEntry, HashingReader, KeyPath, MANIFEST, Manifest, artifacts,
    database::Database, is_backup_path,
};
use crate::{
    failure::{Failure, USAGE},
    output::Progress,
    postgres::Server,
    staged::{StagedFile, unless_interrupted},
    state::{LockState, StateDir},
    up,
};

pub async fn run(
    file: &Path,
    force: bool,
    state: &StateDir,
    config: &cynode_orchestrator::Config,
    keys: Vec<KeyPath>,
) -> Result<Manifest, Failure> {
    state.check_restored()?;
    if config.database_url.is_none() && !Server::new(state).exists() {
        return Err(Failure::new(
            USAGE,
            "nothing_to_save",
            format!("{} has no orchestrator database", state.path().display()),
        )
        .remedy("Pass the state directory with --state-dir, or set DATABASE_URL."));
    }
    check_target(file, force)?;
    let progress = Progress::start("saving the database");
    unless_interrupted(async {
        // Both files hold secrets: only their owner may read them.
        let (staged, archive) = StagedFile::create(file, 0o600)?;
        let (dump, _) = StagedFile::create(file, 0o600)?;
        save_database(dump.path(), state, config).await?;
        progress.set_message("saving artifacts");
        let (from, state, config) = (dump.path().to_owned(), state.clone(), config.clone());
        let manifest = blocking(move || write(archive, &from, &state, &config, keys)).await?;
        publish(staged.path(), file, force)?;
        Ok(manifest)
    })
    .await
}

/// Runs blocking work on its own thread, so that this one keeps handling signals.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Failure::internal(error.to_string()))?
}

fn exists(file: &Path) -> Failure {
    Failure::new(
        USAGE,
        "already_exists",
        format!("{} exists", file.display()),
    )
    .remedy("Choose another file, or replace this one with --force.")
}

/// Refuses a target that must not be overwritten, before the work starts.
fn check_target(file: &Path, force: bool) -> Result<(), Failure> {
    match fs_err::symlink_metadata(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Failure::usage(error.to_string())),
        Ok(existing) if existing.is_file() && force => Ok(()),
        Ok(existing) if existing.is_file() => Err(exists(file)),
        Ok(_) => Err(Failure::usage(format!(
            "{} exists and is not a regular file",
            file.display()
        ))
        .remedy("Choose the path of a regular or a new file.")),
    }
}

/// Renames the finished file to its target. Without `force` never replaces an existing file.
fn publish(staged: &Path, file: &Path, force: bool) -> Result<(), Failure> {
    use rustix::{
        fs::{CWD, RenameFlags, renameat_with},
        io::Errno,
    };
    if force {
        return Ok(fs_err::rename(staged, file)?);
    }
    match renameat_with(CWD, staged, CWD, file, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => Err(exists(file)),
        // The file system does not support RENAME_NOREPLACE.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => match fs_err::hard_link(staged, file) {
            Ok(()) => Ok(fs_err::remove_file(staged)?),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(exists(file)),
            Err(error) => Err(error.into()),
        },
        Err(error) => Err(io::Error::from(error).into()),
    }
}

async fn save_database(
    dump: &Path,
    state: &StateDir,
    config: &cynode_orchestrator::Config,
) -> Result<(), Failure> {
    let lock = match config.database_url {
        Some(_) => None,
        None => Some(up::acquire(state).await?),
    };
    // If `up` holds the lock, its server runs already.
    let may_start = matches!(lock, Some(LockState::Acquired(_)));
    let (dump, state, url) = (dump.to_owned(), state.clone(), config.database_url.clone());
    blocking(move || Database::open(&state, url.as_deref(), may_start)?.dump(&dump)).await
}

fn write(
    file: fs_err::File,
    dump: &Path,
    state: &StateDir,
    config: &cynode_orchestrator::Config,
    keys: Vec<KeyPath>,
) -> Result<Manifest, Failure> {
    let mut archive = tar::Builder::new(io::BufWriter::with_capacity(1 << 20, file));
    let mut files = vec![append(&mut archive, DATABASE, dump)?];
    for (name, path) in keys {
        if path.exists() {
            files.push(append(&mut archive, name, &path)?);
        }
    }
    let store = artifacts(state, config);
    for (name, path) in store.iter().flat_map(|store| blobs(store)) {
        match append(&mut archive, &name, &path) {
            Ok(entry) => files.push(entry),
            // Retention deleted the artifact meanwhile: the database no longer refers to it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    let made_at = OffsetDateTime::now_utc()
        .format(&Rfc3339)
        .unwrap_or_default();
    let manifest = Manifest {
        version: FORMAT,
        cynode: env!("CARGO_PKG_VERSION").to_owned(),
        made_at,
        has_artifacts: store.is_some(),
        files,
    };
    let text = serde_json::to_vec_pretty(&manifest).map_err(io::Error::other)?;
    archive.append_data(&mut header(text.len() as u64), MANIFEST, &text[..])?;
    let mut file = archive.into_inner()?;
    file.flush()?;
    file.into_inner()
        .map_err(io::IntoInnerError::into_error)?
        .sync_all()?;
    Ok(manifest)
}

fn header(size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(size);
    header.set_mode(0o600);
    header.set_entry_type(tar::EntryType::Regular);
    header
}

fn append(
    archive: &mut tar::Builder<impl io::Write>,
    name: &str,
    path: &Path,
) -> io::Result<FileEntry> {
    let file = fs_err::File::open(path)?;
    let size = file.metadata()?.len();
    let mut reader = HashingReader::new(io::Read::take(file, size));
    archive.append_data(&mut header(size), name, &mut reader)?;
    let entry = reader.finish(name);
    if entry.size == size {
        Ok(entry)
    } else {
        Err(io::Error::other(format!(
            "{} shrank while it was read",
            path.display()
        )))
    }
}

/// Complete artifacts, sorted. Uploads in flight are not part of the store yet.
fn blobs(store: &Path) -> Vec<(String, PathBuf)> {
    let entries = |directory: &Path| {
        fs_err::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect::<Vec<_>>()
    };
    let mut blobs: Vec<(String, PathBuf)> = entries(&store.join("sha256"))
        .iter()
        .flat_map(|prefix| entries(prefix))
        .filter_map(|path| {
            Some((
                format!("{ARTIFACTS}/{}", path.strip_prefix(store).ok()?.to_str()?),
                path,
            ))
        })
        .filter(|(name, _)| is_backup_path(name))
        .collect();
    blobs.sort();
    blobs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_exists_is_replaced_only_by_force() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let (staged, file) = (
            directory.path().join("staged"),
            directory.path().join("file"),
        );
        let read = |path: &Path| fs_err::read_to_string(path).expect("readable");
        fs_err::write(&staged, "new").expect("written");
        assert!(check_target(&file, false).is_ok());
        // The file appears while the backup is being written.
        fs_err::write(&file, "old").expect("written");
        let refused = publish(&staged, &file, false).expect_err("it exists");
        assert!(
            refused.exit == USAGE
                && refused
                    .remedy_text()
                    .is_some_and(|remedy| remedy.contains("--force")),
            "{refused:?}"
        );
        assert!(check_target(&file, false).is_err() && check_target(&file, true).is_ok());
        assert_eq!(
            (read(&file), read(&staged)),
            ("old".to_owned(), "new".to_owned())
        );
        publish(&staged, &file, true).expect("by force");
        assert_eq!(read(&file), "new");
        assert!(!staged.exists());
    }

    #[test]
    fn only_a_regular_file_is_replaced() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).expect("linked");
        for target in [directory.path(), Path::new("/dev/null"), &link] {
            assert!(check_target(target, true).is_err(), "{}", target.display());
        }
    }
}

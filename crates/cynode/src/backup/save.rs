//! Writing a backup. Works while everything runs.

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{ARTIFACTS, DATABASE, Entry, FORMAT, Hashing, MANIFEST, Manifest, artifacts, database::Database, is_known, keys};
use crate::{
    failure::{Failure, USAGE},
    output::Progress,
    postgres::Server,
    staged::{Staged, unless_interrupted},
    state::{Locked, StateDir},
    up,
};

pub async fn run(file: &Path, state: &StateDir, config: &cynode_orchestrator::Config) -> Result<Manifest, Failure> {
    state.check_restored()?;
    if config.database_url.is_none() && !Server::of(state).exists() {
        return Err(Failure::new(USAGE, "nothing_to_save", format!("there is no orchestrator's database in {}", state.path().display()))
            .remedy("Name the state directory by --state-dir, or the database by DATABASE_URL."));
    }
    let progress = Progress::start("saving the database");
    unless_interrupted(async {
        // The dump is for nobody else, and neither is the file that it becomes a part of.
        let (staged, archive) = Staged::create(file, 0o600)?;
        let (dump, _) = Staged::create(file, 0o600)?;
        save_database(dump.path(), state, config).await?;
        progress.say("saving artifacts");
        let (from, state, config) = (dump.path().to_owned(), state.clone(), config.clone());
        let manifest = blocking(move || write(archive, &from, &state, &config)).await?;
        staged.commit()?;
        Ok(manifest)
    })
    .await
}

/// Does what can't be awaited in a thread of its own, so that a signal is heard meanwhile.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Failure::internal(error.to_string()))?
}

async fn save_database(dump: &Path, state: &StateDir, config: &cynode_orchestrator::Config) -> Result<(), Failure> {
    let lock = match config.database_url {
        Some(_) => None,
        None => Some(up::acquire(state).await?),
    };
    // While `up` runs, so does its server.
    let may_start = matches!(lock, Some(Locked::Ours(_)));
    let (dump, state, url) = (dump.to_owned(), state.clone(), config.database_url.clone());
    blocking(move || Database::open(&state, url.as_deref(), may_start)?.dump(&dump)).await
}

fn write(file: fs_err::File, dump: &Path, state: &StateDir, config: &cynode_orchestrator::Config) -> Result<Manifest, Failure> {
    let mut archive = tar::Builder::new(io::BufWriter::with_capacity(1 << 20, file));
    let mut files = vec![append(&mut archive, DATABASE, dump)?];
    for (name, path) in keys(state, config) {
        if path.exists() {
            files.push(append(&mut archive, name, &path)?);
        }
    }
    let store = artifacts(state, config);
    for (name, path) in store.iter().flat_map(|store| blobs(store)) {
        match append(&mut archive, &name, &path) {
            Ok(entry) => files.push(entry),
            // Dropped by retention meanwhile: the database had let go of it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    let made_at = OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default();
    let manifest = Manifest { version: FORMAT, cynode: env!("CARGO_PKG_VERSION").to_owned(), made_at, has_artifacts: store.is_some(), files };
    let text = serde_json::to_vec_pretty(&manifest).map_err(io::Error::other)?;
    archive.append_data(&mut header(text.len() as u64), MANIFEST, &text[..])?;
    let mut file = archive.into_inner()?;
    file.flush()?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    Ok(manifest)
}

fn header(size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(size);
    header.set_mode(0o600);
    header.set_entry_type(tar::EntryType::Regular);
    header
}

fn append(archive: &mut tar::Builder<impl io::Write>, name: &str, path: &Path) -> io::Result<Entry> {
    let file = fs_err::File::open(path)?;
    let size = file.metadata()?.len();
    let mut reader = Hashing::new(io::Read::take(file, size));
    archive.append_data(&mut header(size), name, &mut reader)?;
    let entry = reader.finish(name);
    if entry.size == size { Ok(entry) } else { Err(io::Error::other(format!("{} became shorter while it was read", path.display()))) }
}

/// Whole artifacts, in order; what is still coming in is nobody's yet.
fn blobs(store: &Path) -> Vec<(String, PathBuf)> {
    let entries = |directory: &Path| fs_err::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>();
    let mut found: Vec<(String, PathBuf)> = entries(&store.join("sha256"))
        .iter()
        .flat_map(|prefix| entries(prefix))
        .filter_map(|path| Some((format!("{ARTIFACTS}/{}", path.strip_prefix(store).ok()?.to_str()?), path)))
        .filter(|(name, _)| is_known(name))
        .collect();
    found.sort();
    found
}

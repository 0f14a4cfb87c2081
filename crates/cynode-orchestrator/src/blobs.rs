//! Content-addressed storage of artifacts and job output, in local files by default or in any
//! S3-compatible store.

use std::{path::PathBuf, pin::pin, sync::Arc};

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use object_store::{
    ObjectStore, ObjectStoreExt as _, PutPayload, WriteMultipart, local::LocalFileSystem,
    path::Path, prefix::PrefixStore,
};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;

use crate::Config;

const INCOMING: &str = "incoming";
const BY_HASH: &str = "sha256";

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the store of artifacts does not answer")]
    Unavailable,
    #[error("the bytes are no longer there")]
    NotFound,
    #[error("more than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("the bytes have the hash {actual}, not {expected}")]
    HashMismatch { actual: String, expected: String },
    #[error(
        "{free} bytes are free where artifacts are kept, {min} are wanted \
         (orchestrator.min_free_bytes)"
    )]
    NoSpace { free: u64, min: u64 },
}

/// Why a stream could not be staged.
#[derive(Debug)]
pub(crate) enum StageError<E> {
    Store(Error),
    /// The stream itself failed.
    Source(E),
}

impl<E> From<Error> for StageError<E> {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Blobs {
    store: Arc<dyn ObjectStore>,
    /// The local directory, and the free space to leave there.
    local: Option<(PathBuf, u64)>,
}

/// A complete upload that is not yet at its content address.
#[derive(Debug)]
pub(crate) struct StagedBlob {
    at: Path,
    /// In hexadecimal digits.
    pub(crate) sha256: String,
    pub(crate) size: u64,
}

impl Blobs {
    pub(crate) fn open(config: &Config) -> Result<Self, String> {
        match &config.artifact_store {
            Some(url) if url.contains("://") => {
                let url = url.parse().map_err(|error| format!("{url}: {error}"))?;
                let environment = std::env::vars()
                    .filter(|(name, _)| name.starts_with("AWS_"))
                    .map(|(name, value)| (name.to_lowercase(), value));
                let (store, prefix) = object_store::parse_url_opts(&url, environment)
                    .map_err(|error| error.to_string())?;
                Ok(Self {
                    store: Arc::new(PrefixStore::new(store, prefix)),
                    local: None,
                })
            }
            directory => {
                let directory = directory.as_ref().map_or_else(
                    || config.state_dir.join("artifacts"),
                    |name| config.state_dir.join(name),
                );
                fs_err::create_dir_all(&directory).map_err(|error| error.to_string())?;
                let store = LocalFileSystem::new_with_prefix(&directory)
                    .map_err(|error| error.to_string())?
                    .with_fsync(true);
                Ok(Self {
                    store: Arc::new(store),
                    local: Some((directory, config.min_free_bytes)),
                })
            }
        }
    }

    /// Stores a stream of at most `limit` bytes. It is invisible until it is complete, verified and
    /// placed.
    pub(crate) async fn stage<E>(
        &self,
        bytes: impl Stream<Item = Result<Bytes, E>>,
        limit: u64,
        expected: Option<&str>,
    ) -> Result<StagedBlob, StageError<E>> {
        self.check_room()?;
        let at = Path::from(format!("{INCOMING}/{}", uuid::Uuid::now_v7()));
        match self.write(&at, bytes, limit, expected).await {
            Ok((sha256, size)) => Ok(StagedBlob { at, sha256, size }),
            Err(error) => {
                drop(self.store.delete(&at).await);
                Err(error)
            }
        }
    }

    /// The upload's part size. S3 accepts no parts below 5 MiB.
    const fn chunk(&self) -> usize {
        if self.local.is_some() {
            1 << 20
        } else {
            5 << 20
        }
    }

    /// The memory that one stream holds while its sender pauses.
    pub(crate) const fn buffered(&self) -> u64 {
        self.chunk() as u64
    }

    /// Moves a staged blob to its content address. Must run in the transaction that stores the
    /// reference, because unreferenced blobs are removed.
    pub(crate) async fn place(&self, staged: &StagedBlob) -> Result<(), Error> {
        self.store
            .rename(&staged.at, &place(&staged.sha256))
            .await
            .map_err(|error| failed(&error))
    }

    /// The bytes of a staged blob.
    pub(crate) async fn staged(
        &self,
        staged: &StagedBlob,
    ) -> Result<impl Stream<Item = Result<Bytes, std::io::Error>> + use<>, Error> {
        let found = self
            .store
            .get(&staged.at)
            .await
            .map_err(|error| failed(&error))?;
        Ok(found.into_stream().map_err(std::io::Error::other))
    }

    /// Removes a staged blob that will not be placed.
    pub(crate) async fn discard(&self, staged: &StagedBlob) {
        match self.store.delete(&staged.at).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => {
                tracing::warn!(%error, "A staged upload could not be removed; it is swept later.");
            }
        }
    }

    /// The size of a blob; `None` when it does not exist.
    pub(crate) async fn size(&self, sha256: &str) -> Result<Option<u64>, Error> {
        match self.store.head(&place(sha256)).await {
            Ok(found) => Ok(Some(found.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed(&error)),
        }
    }

    async fn write<E>(
        &self,
        staged: &Path,
        bytes: impl Stream<Item = Result<Bytes, E>>,
        limit: u64,
        expected: Option<&str>,
    ) -> Result<(String, u64), StageError<E>> {
        let mut bytes = pin!(bytes);
        let upload = self
            .store
            .put_multipart(staged)
            .await
            .map_err(|error| failed(&error))?;
        let mut writer = WriteMultipart::new_with_chunk_size(upload, self.chunk());
        let mut hash = Sha256::new();
        let mut size = 0_u64;
        let read = async {
            while let Some(piece) = bytes.next().await {
                let piece = piece.map_err(StageError::Source)?;
                size += piece.len() as u64;
                if size > limit {
                    return Err(Error::TooLarge { limit }.into());
                }
                hash.update(&piece);
                // Applies back-pressure when the store is slower than the sender.
                writer
                    .wait_for_capacity(4)
                    .await
                    .map_err(|error| failed(&error))?;
                writer.put(piece);
            }
            Ok(())
        };
        if let Err(error) = read.await {
            drop(writer.abort().await);
            return Err(error);
        }
        let sha256 = hex::encode(hash.finalize());
        if let Some(expected) = expected.filter(|expected| !expected.eq_ignore_ascii_case(&sha256))
        {
            drop(writer.abort().await);
            return Err(Error::HashMismatch {
                actual: sha256,
                expected: expected.to_owned(),
            }
            .into());
        }
        if size == 0 {
            // Some stores reject multipart uploads without parts.
            drop(writer.abort().await);
            self.store
                .put(staged, PutPayload::new())
                .await
                .map_err(|error| failed(&error))?;
        } else {
            writer.finish().await.map_err(|error| failed(&error))?;
        }
        Ok((sha256, size))
    }

    pub(crate) async fn get(
        &self,
        sha256: &str,
    ) -> Result<impl Stream<Item = Result<Bytes, std::io::Error>> + use<>, Error> {
        let found = self
            .store
            .get(&place(sha256))
            .await
            .map_err(|error| failed(&error))?;
        Ok(found.into_stream().map_err(std::io::Error::other))
    }

    /// Fails while the disk is nearly full: the database may be on it too.
    pub(crate) fn check_room(&self) -> Result<(), Error> {
        let Some((directory, least)) = &self.local else {
            return Ok(());
        };
        let found = rustix::fs::statvfs(directory).map_err(|error| {
            tracing::warn!(%error, "The free space of the artifact store can't be read.");
            Error::Unavailable
        })?;
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        if free < *least {
            return Err(Error::NoSpace { free, min: *least });
        }
        Ok(())
    }

    /// Removes uploads that were never completed.
    pub(crate) async fn sweep_incoming(&self, older_than: OffsetDateTime) -> Result<usize, Error> {
        if let Some((directory, _)) = &self.local {
            return sweep(&directory.join(INCOMING), older_than);
        }
        let old: Vec<Path> = self.older(INCOMING, older_than).try_collect().await?;
        for path in &old {
            self.store
                .delete(path)
                .await
                .map_err(|error| failed(&error))?;
        }
        Ok(old.len())
    }

    /// The hashes of blobs that were stored before a moment.
    pub(crate) fn stored_before(
        &self,
        moment: OffsetDateTime,
    ) -> impl Stream<Item = Result<String, Error>> {
        self.older(BY_HASH, moment)
            .try_filter_map(|path| std::future::ready(Ok(path.filename().map(str::to_owned))))
    }

    fn older(
        &self,
        prefix: &str,
        moment: OffsetDateTime,
    ) -> impl Stream<Item = Result<Path, Error>> + use<> {
        self.store
            .list(Some(&Path::from(prefix)))
            .map_err(|error| failed(&error))
            .try_filter(move |found| {
                std::future::ready(found.last_modified.timestamp() < moment.unix_timestamp())
            })
            .map_ok(|found| found.location)
    }

    /// Removes a blob.
    pub(crate) async fn remove(&self, sha256: &str) -> Result<(), Error> {
        match self.store.delete(&place(sha256)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }
}

/// Sweeps the directory itself, because the store's list omits files that are being written.
fn sweep(directory: &std::path::Path, older_than: OffsetDateTime) -> Result<usize, Error> {
    let broken = |error: std::io::Error| {
        tracing::warn!(%error, "Incomplete uploads can't be swept.");
        Error::Unavailable
    };
    let entries = match fs_err::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        entries => entries.map_err(broken)?,
    };
    let mut swept = 0;
    for entry in entries {
        let entry = entry.map_err(broken)?;
        let modified = entry
            .metadata()
            .and_then(|found| found.modified())
            .map_err(broken)?;
        if OffsetDateTime::from(modified) < older_than {
            fs_err::remove_file(entry.path()).map_err(broken)?;
            swept += 1;
        }
    }
    Ok(swept)
}

fn place(sha256: &str) -> Path {
    Path::from(format!(
        "{BY_HASH}/{}/{sha256}",
        sha256.get(..2).unwrap_or("00")
    ))
}

fn failed(error: &object_store::Error) -> Error {
    if matches!(error, object_store::Error::NotFound { .. }) {
        return Error::NotFound;
    }
    tracing::warn!(%error, "The artifact store failed.");
    Error::Unavailable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn uploads_are_refused_when_the_disk_is_nearly_full() {
        let directory = tempfile::tempdir().expect("a directory");
        let with = |least| {
            Blobs::open(&Config {
                state_dir: directory.path().to_owned(),
                min_free_bytes: least,
                ..Config::default()
            })
            .expect("opens")
        };
        let bytes = || futures_util::stream::iter([Ok::<_, Error>(Bytes::from_static(b"some"))]);
        let staged = with(1)
            .stage(bytes(), 10, None)
            .await
            .expect("there is room");
        assert_eq!(staged.size, 4);
        let refused = with(u64::MAX)
            .stage(bytes(), 10, None)
            .await
            .expect_err("no room");
        assert!(
            matches!(refused, StageError::Store(Error::NoSpace { .. })),
            "{refused:?}"
        );
    }

    #[tokio::test]
    async fn unfinished_uploads_are_swept_even_if_the_store_does_not_list_them() {
        let directory = tempfile::tempdir().expect("a directory");
        let blobs = Blobs::open(&Config {
            state_dir: directory.path().to_owned(),
            min_free_bytes: 0,
            ..Config::default()
        })
        .expect("opens");
        let incoming = directory.path().join("artifacts/incoming");
        fs_err::create_dir_all(&incoming).expect("made");
        // As the store leaves it when the process dies during an upload.
        fs_err::write(
            incoming.join("01a1e083-847e-72c6-bdc2-0d7bddf97bdf#1"),
            "half",
        )
        .expect("written");
        let soon = OffsetDateTime::now_utc() + time::Duration::minutes(1);
        assert_eq!(
            blobs
                .sweep_incoming(OffsetDateTime::UNIX_EPOCH)
                .await
                .expect("swept"),
            0
        );
        assert_eq!(blobs.sweep_incoming(soon).await.expect("swept"), 1);
        assert_eq!(fs_err::read_dir(incoming).expect("there").count(), 0);
    }
}

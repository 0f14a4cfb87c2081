//! Bytes by their hash: artifacts and the output of jobs. On local files by default, or in any store that speaks S3.

use std::{path::PathBuf, pin::pin, sync::Arc};

use bytes::Bytes;
use cynode_api::ErrorCode;
use cynode_service::ApiError;
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

#[derive(Clone, Debug)]
pub(crate) struct Blobs {
    store: Arc<dyn ObjectStore>,
    /// Where it is on this machine, and how much room it leaves there.
    local: Option<(PathBuf, u64)>,
}

/// What was taken in whole, and is not yet where anybody looks.
#[derive(Debug)]
pub(crate) struct Staged {
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

    /// Takes a stream in, up to a limit. Until all of it has come and is what it should be, and is put in its place, nobody can
    /// find it.
    pub(crate) async fn stage<E: Into<ApiError>>(
        &self,
        bytes: impl Stream<Item = Result<Bytes, E>>,
        limit: u64,
        expected: Option<&str>,
    ) -> Result<Staged, ApiError> {
        self.check_room()?;
        let at = Path::from(format!("{INCOMING}/{}", uuid::Uuid::now_v7()));
        match self.write(&at, bytes, limit, expected).await {
            Ok((sha256, size)) => Ok(Staged { at, sha256, size }),
            Err(error) => {
                drop(self.store.delete(&at).await);
                Err(error)
            }
        }
    }

    /// What is written at once. A store that speaks S3 takes no smaller parts than 5 MiB.
    const fn chunk(&self) -> usize {
        if self.local.is_some() {
            1 << 20
        } else {
            5 << 20
        }
    }

    /// The memory that one stream takes while its sender pauses.
    pub(crate) const fn buffered(&self) -> u64 {
        self.chunk() as u64
    }

    /// Puts it where its hash says. Comes within the transaction that writes down who needs it: what nobody needs is removed.
    pub(crate) async fn place(&self, staged: &Staged) -> Result<(), ApiError> {
        self.store
            .rename(&staged.at, &place(&staged.sha256))
            .await
            .map_err(|error| failed(&error))
    }

    /// The bytes of what was staged.
    pub(crate) async fn staged(
        &self,
        staged: &Staged,
    ) -> Result<impl Stream<Item = Result<Bytes, std::io::Error>> + use<>, ApiError> {
        let found = self
            .store
            .get(&staged.at)
            .await
            .map_err(|error| failed(&error))?;
        Ok(found.into_stream().map_err(std::io::Error::other))
    }

    /// Removes what nobody will put in its place.
    pub(crate) async fn discard(&self, staged: &Staged) {
        match self.store.delete(&staged.at).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => {
                tracing::warn!(%error, "What was taken in and is not kept could not be removed; it is swept later.")
            }
        }
    }

    /// How large stored bytes are; `None` when they are gone.
    pub(crate) async fn size(&self, sha256: &str) -> Result<Option<u64>, ApiError> {
        match self.store.head(&place(sha256)).await {
            Ok(found) => Ok(Some(found.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed(&error)),
        }
    }

    async fn write<E: Into<ApiError>>(
        &self,
        staged: &Path,
        bytes: impl Stream<Item = Result<Bytes, E>>,
        limit: u64,
        expected: Option<&str>,
    ) -> Result<(String, u64), ApiError> {
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
                let piece = piece.map_err(Into::into)?;
                size += piece.len() as u64;
                if size > limit {
                    return Err(ApiError::new(
                        ErrorCode::TooLarge,
                        format!("more than {limit} bytes"),
                    ));
                }
                hash.update(&piece);
                // Waits while the store is slower than the sender.
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
        let sha256 = hex(&hash.finalize());
        if let Some(expected) = expected.filter(|expected| !expected.eq_ignore_ascii_case(&sha256))
        {
            drop(writer.abort().await);
            return Err(ApiError::new(
                ErrorCode::PreconditionFailed,
                format!("the bytes have the hash {sha256}, not {expected}"),
            ));
        }
        if size == 0 {
            // Some stores know no upload without parts.
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
    ) -> Result<impl Stream<Item = Result<Bytes, std::io::Error>> + use<>, ApiError> {
        let found = self
            .store
            .get(&place(sha256))
            .await
            .map_err(|error| failed(&error))?;
        Ok(found.into_stream().map_err(std::io::Error::other))
    }

    /// Refuses more while the disk is nearly full: the database may be on it too.
    pub(crate) fn check_room(&self) -> Result<(), ApiError> {
        let Some((directory, least)) = &self.local else {
            return Ok(());
        };
        let found = rustix::fs::statvfs(directory).map_err(|error| {
            tracing::warn!(%error, "The disk of artifacts can't be looked at.");
            ApiError::new(
                ErrorCode::StoreUnavailable,
                "the store of artifacts does not answer",
            )
        })?;
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        if free < *least {
            let detail = format!(
                "{free} bytes are free where artifacts are kept, {least} are wanted (orchestrator.min_free_bytes)"
            );
            return Err(ApiError::new(ErrorCode::NoSpace, detail));
        }
        Ok(())
    }

    /// Removes what somebody began to send and never finished.
    pub(crate) async fn sweep_incoming(
        &self,
        older_than: OffsetDateTime,
    ) -> Result<usize, ApiError> {
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

    /// The hashes of what was put here before a moment.
    pub(crate) fn stored_before(
        &self,
        moment: OffsetDateTime,
    ) -> impl Stream<Item = Result<String, ApiError>> {
        self.older(BY_HASH, moment)
            .try_filter_map(|path| std::future::ready(Ok(path.filename().map(str::to_owned))))
    }

    fn older(
        &self,
        prefix: &str,
        moment: OffsetDateTime,
    ) -> impl Stream<Item = Result<Path, ApiError>> + use<> {
        self.store
            .list(Some(&Path::from(prefix)))
            .map_err(|error| failed(&error))
            .try_filter(move |found| {
                std::future::ready(found.last_modified.timestamp() < moment.unix_timestamp())
            })
            .map_ok(|found| found.location)
    }

    /// Removes bytes that nobody needs.
    pub(crate) async fn remove(&self, sha256: &str) -> Result<(), ApiError> {
        match self.store.delete(&place(sha256)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }
}

/// The store's own list leaves out what is still being written.
fn sweep(directory: &std::path::Path, older_than: OffsetDateTime) -> Result<usize, ApiError> {
    let broken = |error: std::io::Error| {
        tracing::warn!(%error, "What was never finished can't be swept.");
        ApiError::new(
            ErrorCode::StoreUnavailable,
            "the store of artifacts does not answer",
        )
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

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

fn failed(error: &object_store::Error) -> ApiError {
    if matches!(error, object_store::Error::NotFound { .. }) {
        return ApiError::new(ErrorCode::NotFound, "the bytes are no longer there");
    }
    tracing::warn!(%error, "The store of artifacts failed.");
    ApiError::new(
        ErrorCode::StoreUnavailable,
        "the store of artifacts does not answer",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_more_is_taken_when_the_disk_is_nearly_full() {
        let directory = tempfile::tempdir().expect("a directory");
        let with = |least| {
            Blobs::open(&Config {
                state_dir: directory.path().to_owned(),
                min_free_bytes: least,
                ..Config::default()
            })
            .expect("opens")
        };
        let bytes = || futures_util::stream::iter([Ok::<_, ApiError>(Bytes::from_static(b"some"))]);
        let staged = with(1)
            .stage(bytes(), 10, None)
            .await
            .expect("there is room");
        assert_eq!(staged.size, 4);
        let refused = with(u64::MAX)
            .stage(bytes(), 10, None)
            .await
            .expect_err("no room");
        assert!(refused.0.is(ErrorCode::NoSpace), "{refused:?}");
    }

    #[tokio::test]
    async fn what_was_never_finished_is_swept_also_while_the_store_does_not_list_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let blobs = Blobs::open(&Config {
            state_dir: directory.path().to_owned(),
            min_free_bytes: 0,
            ..Config::default()
        })
        .expect("opens");
        let incoming = directory.path().join("artifacts/incoming");
        fs_err::create_dir_all(&incoming).expect("made");
        // As the store leaves it when the process dies in the middle.
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

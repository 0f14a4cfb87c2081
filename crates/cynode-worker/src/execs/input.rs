//! Standard input sent with a request: in memory when short, otherwise in an unnamed file.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use cynode_api::{ErrorCode, exec_limits::MAX_INPUT_PER_SESSION};
use cynode_sba_proto::MAX_DATA;
use cynode_service::ApiError;
use sha2::{Digest as _, Sha256};
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _},
};

/// Longer input spills to a file.
const MAX_IN_MEMORY_BYTES: usize = 256 * 1024;

/// Input that has been received completely.
#[derive(Debug, Default)]
pub(crate) struct ExecInput {
    /// The beginning of the input, in memory; precedes the part in the file.
    bytes: Vec<u8>,
    /// How much of `bytes` has been read.
    read: usize,
    rest: Option<File>,
    size: u64,
    reservation: Option<InputReservation>,
}

/// Input that is being received.
#[derive(Debug)]
pub(crate) struct InputSpool {
    input: ExecInput,
    reservation: InputReservation,
    hash: Sha256,
}

/// Bytes of a session's input that its commands have not read yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct InputUsage(Arc<AtomicU64>);

#[derive(Debug)]
struct InputReservation {
    usage: InputUsage,
    bytes: u64,
}

impl Drop for InputReservation {
    fn drop(&mut self) {
        self.usage.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl InputReservation {
    fn grow(&mut self, by: u64) -> Result<(), ApiError> {
        let all = self.usage.0.fetch_add(by, Ordering::Relaxed) + by;
        self.bytes += by;
        if all > MAX_INPUT_PER_SESSION {
            let detail = format!(
                "the unread input of this session's commands exceeds {MAX_INPUT_PER_SESSION} bytes"
            );
            return Err(ApiError::new(ErrorCode::NoSpace, detail));
        }
        Ok(())
    }
}

impl ExecInput {
    pub(crate) fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// The next piece, within the agent's limit; `None` at the end.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.read < self.bytes.len() {
            let piece = &self.bytes[self.read..self.bytes.len().min(self.read + MAX_DATA)];
            self.read += piece.len();
            return Ok(Some(piece.to_vec()));
        }
        self.bytes = Vec::new();
        self.read = 0;
        let Some(file) = &mut self.rest else {
            return Ok(None);
        };
        let mut piece = vec![0; MAX_DATA];
        let count = file.read(&mut piece).await?;
        piece.truncate(count);
        Ok((count > 0).then_some(piece))
    }
}

impl InputSpool {
    pub(crate) fn new(usage: &InputUsage) -> Self {
        Self {
            input: ExecInput::default(),
            reservation: InputReservation {
                usage: usage.clone(),
                bytes: 0,
            },
            hash: Sha256::new(),
        }
    }

    pub(crate) async fn push(&mut self, piece: &[u8], directory: &Path) -> Result<(), ApiError> {
        self.reservation.grow(piece.len() as u64)?;
        self.hash.update(piece);
        self.input.size += piece.len() as u64;
        if self.input.rest.is_none() && self.input.bytes.len() + piece.len() <= MAX_IN_MEMORY_BYTES
        {
            self.input.bytes.extend_from_slice(piece);
            return Ok(());
        }
        let file = if let Some(file) = &mut self.input.rest {
            file
        } else {
            let file = tempfile::tempfile_in(directory).map_err(spill_failed)?;
            let mut file = File::from_std(file);
            // The file keeps its buffer until the command reads, so a large one would take memory
            // for as long.
            file.set_max_buf_size(MAX_DATA);
            self.input.rest.insert(file)
        };
        file.write_all(piece).await.map_err(spill_failed)
    }

    /// Returns the whole input and its hash.
    pub(crate) async fn finish(mut self) -> Result<(ExecInput, String), ApiError> {
        if let Some(file) = &mut self.input.rest {
            file.flush().await.map_err(spill_failed)?;
            file.rewind().await.map_err(spill_failed)?;
        }
        self.input.reservation = Some(self.reservation);
        Ok((self.input, hex::encode(self.hash.finalize())))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used with map_err")]
fn spill_failed(error: io::Error) -> ApiError {
    tracing::warn!(%error, "Failed to spill a command's standard input.");
    ApiError::new(ErrorCode::NoSpace, "the node has no room for the input")
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn spooled(
        bytes: &[u8],
        piece: usize,
        usage: &InputUsage,
    ) -> Result<(ExecInput, String), ApiError> {
        let directory = tempfile::tempdir().expect("a directory");
        let mut spooling = InputSpool::new(usage);
        for piece in bytes.chunks(piece) {
            spooling.push(piece, directory.path()).await?;
        }
        spooling.finish().await
    }

    #[tokio::test]
    async fn input_round_trips() {
        for size in [
            0,
            1,
            MAX_DATA,
            MAX_IN_MEMORY_BYTES,
            MAX_IN_MEMORY_BYTES + 1,
            3 * MAX_IN_MEMORY_BYTES,
        ] {
            let bytes: Vec<u8> = (0..=250).cycle().take(size).collect();
            let usage = InputUsage::default();
            let (mut input, sha256) = spooled(&bytes, 10_000, &usage).await.expect("room");
            assert_eq!(
                (input.is_empty(), input.rest.is_some()),
                (size == 0, size > MAX_IN_MEMORY_BYTES)
            );
            assert_eq!(
                (usage.0.load(Ordering::Relaxed), sha256),
                (size as u64, hex::encode(Sha256::digest(&bytes)))
            );
            let mut read = Vec::new();
            while let Some(piece) = input.next().await.expect("read") {
                assert!((1..=MAX_DATA).contains(&piece.len()));
                read.extend(piece);
            }
            assert!(read == bytes);
            drop(input);
            assert_eq!(usage.0.load(Ordering::Relaxed), 0);
        }
    }

    #[tokio::test]
    async fn unread_input_is_limited_per_session() {
        let usage = InputUsage::default();
        usage.0.store(MAX_INPUT_PER_SESSION - 10, Ordering::Relaxed);
        let (input, _) = spooled(&[7; 10], 5, &usage).await.expect("room");
        assert!(
            spooled(&[7], 1, &usage)
                .await
                .is_err_and(|error| error.is(ErrorCode::NoSpace))
        );
        drop(input);
        assert!(spooled(&[7; 10], 5, &usage).await.is_ok());
        assert_eq!(usage.0.load(Ordering::Relaxed), MAX_INPUT_PER_SESSION - 10);
    }
}

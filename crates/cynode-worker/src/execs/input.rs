//! Standard input that comes with a request: in memory when it is short, else in a file without a name.

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

use super::hex;

/// Longer input goes to a file.
const IN_MEMORY: usize = 256 * 1024;

/// Input that has come whole.
#[derive(Debug, Default)]
pub(crate) struct Input {
    /// What has not been read yet; before what is in the file.
    bytes: Vec<u8>,
    taken: usize,
    rest: Option<File>,
    size: u64,
    room: Option<Room>,
}

/// Input on its way.
#[derive(Debug)]
pub(crate) struct Spooling {
    input: Input,
    room: Room,
    hash: Sha256,
}

/// What a session's inputs take that their commands have not read yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rooms(Arc<AtomicU64>);

#[derive(Debug)]
struct Room {
    all: Rooms,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Room {
    fn grow(&mut self, by: u64) -> Result<(), ApiError> {
        let all = self.all.0.fetch_add(by, Ordering::Relaxed) + by;
        self.bytes += by;
        if all > MAX_INPUT_PER_SESSION {
            let detail = format!(
                "the commands of this session have not read {MAX_INPUT_PER_SESSION} bytes of their input yet, and there is room for no more"
            );
            return Err(ApiError::new(ErrorCode::NoSpace, detail));
        }
        Ok(())
    }
}

impl From<Vec<u8>> for Input {
    fn from(bytes: Vec<u8>) -> Self {
        Self {
            size: bytes.len() as u64,
            bytes,
            ..Self::default()
        }
    }
}

impl Input {
    pub(crate) fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// The next piece, none longer than the agent takes; `None` at the end.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.taken < self.bytes.len() {
            let piece = &self.bytes[self.taken..self.bytes.len().min(self.taken + MAX_DATA)];
            self.taken += piece.len();
            return Ok(Some(piece.to_vec()));
        }
        self.bytes = Vec::new();
        self.taken = 0;
        let Some(file) = &mut self.rest else {
            return Ok(None);
        };
        let mut piece = vec![0; MAX_DATA];
        let count = file.read(&mut piece).await?;
        piece.truncate(count);
        Ok((count > 0).then_some(piece))
    }
}

impl Spooling {
    pub(crate) fn new(rooms: &Rooms) -> Self {
        Self {
            input: Input::default(),
            room: Room {
                all: rooms.clone(),
                bytes: 0,
            },
            hash: Sha256::new(),
        }
    }

    pub(crate) async fn push(&mut self, piece: &[u8], directory: &Path) -> Result<(), ApiError> {
        self.room.grow(piece.len() as u64)?;
        self.hash.update(piece);
        self.input.size += piece.len() as u64;
        if self.input.rest.is_none() && self.input.bytes.len() + piece.len() <= IN_MEMORY {
            self.input.bytes.extend_from_slice(piece);
            return Ok(());
        }
        let file = match &mut self.input.rest {
            Some(file) => file,
            None => self.input.rest.insert(File::from_std(
                tempfile::tempfile_in(directory).map_err(not_kept)?,
            )),
        };
        file.write_all(piece).await.map_err(not_kept)
    }

    /// The whole input, and its hash.
    pub(crate) async fn finish(mut self) -> Result<(Input, String), ApiError> {
        if let Some(file) = &mut self.input.rest {
            file.flush().await.map_err(not_kept)?;
            file.rewind().await.map_err(not_kept)?;
        }
        self.input.room = Some(self.room);
        Ok((self.input, hex(&self.hash.finalize())))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is a step of map_err")]
fn not_kept(error: io::Error) -> ApiError {
    tracing::warn!(%error, "The input of a command could not be kept.");
    ApiError::new(ErrorCode::NoSpace, "the node has no room for the input")
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn spooled(
        bytes: &[u8],
        piece: usize,
        rooms: &Rooms,
    ) -> Result<(Input, String), ApiError> {
        let directory = tempfile::tempdir().expect("a directory");
        let mut spooling = Spooling::new(rooms);
        for piece in bytes.chunks(piece) {
            spooling.push(piece, directory.path()).await?;
        }
        spooling.finish().await
    }

    #[tokio::test]
    async fn input_comes_out_as_it_went_in_whether_short_or_long() {
        for size in [0, 1, MAX_DATA, IN_MEMORY, IN_MEMORY + 1, 3 * IN_MEMORY] {
            let bytes: Vec<u8> = (0..=250).cycle().take(size).collect();
            let rooms = Rooms::default();
            let (mut input, sha256) = spooled(&bytes, 10_000, &rooms).await.expect("room");
            assert_eq!(
                (input.is_empty(), input.rest.is_some()),
                (size == 0, size > IN_MEMORY)
            );
            assert_eq!(
                (rooms.0.load(Ordering::Relaxed), sha256),
                (size as u64, hex(&Sha256::digest(&bytes)))
            );
            let mut read = Vec::new();
            while let Some(piece) = input.next().await.expect("read") {
                assert!((1..=MAX_DATA).contains(&piece.len()));
                read.extend(piece);
            }
            assert!(read == bytes);
            drop(input);
            assert_eq!(rooms.0.load(Ordering::Relaxed), 0);
        }
    }

    #[tokio::test]
    async fn a_session_holds_so_much_input_and_no_more() {
        let rooms = Rooms::default();
        rooms.0.store(MAX_INPUT_PER_SESSION - 10, Ordering::Relaxed);
        let (input, _) = spooled(&[7; 10], 5, &rooms).await.expect("room");
        assert!(
            spooled(&[7], 1, &rooms)
                .await
                .is_err_and(|error| error.0.is(ErrorCode::NoSpace))
        );
        drop(input);
        assert!(spooled(&[7; 10], 5, &rooms).await.is_ok());
        assert_eq!(rooms.0.load(Ordering::Relaxed), MAX_INPUT_PER_SESSION - 10);
    }
}

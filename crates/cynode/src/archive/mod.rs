//! Packs and unpacks directory trees as tar streams.
//!
//! Packing and unpacking run on a blocking thread and exchange pieces with the HTTP body over a
//! bounded channel, so memory never holds more than a few pieces.

mod pack;
#[cfg(test)]
mod tests;
mod unpack;

use std::io::{self, Read, Write};

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;

pub use pack::{Exactly, entry_bytes, header, pack_file, pack_tree, tree_bytes};
pub use unpack::{Error as UnpackError, unpack};

const PIECE_BYTES: usize = 64 * 1024;
const CHANNEL_CAPACITY: usize = 16;

/// A channel of pieces. An error in it marks the stream as incomplete.
pub fn channel() -> (
    mpsc::Sender<io::Result<Bytes>>,
    mpsc::Receiver<io::Result<Bytes>>,
) {
    mpsc::channel(CHANNEL_CAPACITY)
}

/// The receiving end as the stream of a body.
pub fn stream(
    mut from: mpsc::Receiver<io::Result<Bytes>>,
) -> impl futures_util::Stream<Item = io::Result<Bytes>> {
    futures_util::stream::poll_fn(move |context| from.poll_recv(context))
}

/// Writes into the channel from a blocking thread.
#[derive(Debug)]
pub struct PieceWriter {
    to: mpsc::Sender<io::Result<Bytes>>,
    piece: BytesMut,
}

impl PieceWriter {
    pub fn new(to: mpsc::Sender<io::Result<Bytes>>) -> Self {
        Self {
            to,
            piece: BytesMut::with_capacity(PIECE_BYTES),
        }
    }

    /// Ends the stream with an error.
    pub fn fail(self, error: &io::Error) {
        // The reader may be gone already.
        drop(
            self.to
                .blocking_send(Err(io::Error::new(error.kind(), error.to_string()))),
        );
    }
}

impl Write for PieceWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let count = data.len().min(PIECE_BYTES - self.piece.len());
        self.piece.extend_from_slice(&data[..count]);
        if self.piece.len() == PIECE_BYTES {
            self.flush()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece =
            std::mem::replace(&mut self.piece, BytesMut::with_capacity(PIECE_BYTES)).freeze();
        self.to
            .blocking_send(Ok(piece))
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Reads from the channel on a blocking thread.
#[derive(Debug)]
pub struct PieceReader {
    from: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl PieceReader {
    pub fn new(from: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self {
            from,
            piece: Bytes::new(),
        }
    }
}

impl Read for PieceReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.from.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.piece.len());
        buffer[..count].copy_from_slice(&self.piece.split_to(count));
        Ok(count)
    }
}

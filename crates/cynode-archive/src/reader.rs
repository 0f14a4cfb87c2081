//! Reads archives from any [`std::io::Read`].

use std::io::{self, Read};

use crate::{Error, Input};

const BUFFER_BYTES: usize = 64 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Archive(#[from] Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// An [`Input`] that reads ahead into a buffer.
#[derive(Debug)]
pub struct Reader<R> {
    source: R,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<R: Read> Reader<R> {
    pub fn new(source: R) -> Self {
        Self {
            source,
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }
}

impl<R: Read> Input for Reader<R> {
    type Error = ReadError;

    fn take(&mut self, limit: usize) -> Result<&[u8], ReadError> {
        while self.start == self.end {
            match self.source.read(&mut self.buffer) {
                Ok(0) => return Ok(&[]),
                Ok(count) => (self.start, self.end) = (0, count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        let start = self.start;
        self.start = self.end.min(start.saturating_add(limit));
        Ok(&self.buffer[start..self.start])
    }
}

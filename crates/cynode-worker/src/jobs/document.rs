//! Documents that arrive from a sandbox in pieces: bounded, and in a file until there is memory to
//! parse them.

use std::{
    io::{self, Read as _, Seek as _, Write as _},
    path::Path,
};

use cynode_service::{compute, json};
use tempfile::SpooledTempFile;

/// Documents that are longer spill to a file until parsing is admitted.
const MAX_IN_MEMORY_BYTES: usize = 64 * 1024;

#[derive(Debug, thiserror::Error)]
pub(super) enum DocumentError {
    #[error("a document has more than {bytes} bytes or {nodes} values")]
    TooLarge { bytes: usize, nodes: usize },
    #[error("storing a document")]
    Stored(#[source] io::Error),
    #[error("{0}")]
    Invalid(String),
}

/// A document, or what has arrived of it.
#[derive(Debug)]
pub(super) struct Document {
    file: SpooledTempFile,
    scan: json::Scan,
    size: usize,
    max_bytes: usize,
    max_nodes: usize,
}

impl Document {
    /// An empty document, whose file is in `directory`.
    pub(super) fn new(directory: &Path, max_bytes: usize, max_nodes: usize) -> Self {
        Self {
            file: tempfile::spooled_tempfile_in(MAX_IN_MEMORY_BYTES, directory),
            scan: json::Scan::up_to(max_nodes),
            size: 0,
            max_bytes,
            max_nodes,
        }
    }

    pub(super) fn push(&mut self, piece: &[u8]) -> Result<(), DocumentError> {
        self.size = self.size.saturating_add(piece.len());
        if self.size > self.max_bytes || self.scan.feed(piece).is_err() {
            return Err(DocumentError::TooLarge {
                bytes: self.max_bytes,
                nodes: self.max_nodes,
            });
        }
        self.file.write_all(piece).map_err(DocumentError::Stored)
    }

    /// Parses the whole document when there is memory for it.
    pub(super) async fn parse<T, E: std::fmt::Display>(
        mut self,
        parse: impl FnOnce(&[u8]) -> Result<T, E>,
    ) -> Result<T, DocumentError> {
        let _room = json::room(self.size, self.scan.nodes()).await;
        let read = move || {
            let mut bytes = Vec::with_capacity(self.size);
            self.file
                .rewind()
                .and_then(|()| self.file.read_to_end(&mut bytes))
                .map_err(DocumentError::Stored)?;
            parse(&bytes).map_err(|error| DocumentError::Invalid(error.to_string()))
        };
        compute::run(self.size, read).await
    }
}

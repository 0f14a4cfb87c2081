//! SHA-256 of contents, in lowercase hex.

use std::{fmt::Write as _, fs::File, io, os::unix::fs::FileExt};

use cynode_sba_proto::MAX_DATA;
use sha2::{Digest, Sha256};

#[derive(Clone, Default)]
pub(super) struct Hasher(Sha256);

impl Hasher {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn hex(self) -> String {
        self.0.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
            // Writing to a string can't fail.
            let _written = write!(hex, "{byte:02x}");
            hex
        })
    }
}

pub(super) fn of(bytes: &[u8]) -> String {
    let mut hasher = Hasher::default();
    hasher.update(bytes);
    hasher.hex()
}

/// Hash and length of the first `limit` bytes, or of all when there are fewer. The file's position stays.
pub(super) fn of_file(file: &File, limit: u64) -> io::Result<(String, u64)> {
    let mut hasher = Hasher::default();
    let mut count = 0;
    for_each_piece(file, 0, limit, |piece| {
        hasher.update(piece);
        count += piece.len() as u64;
        Ok::<_, io::Error>(())
    })?;
    Ok((hasher.hex(), count))
}

/// Reads from `start` up to `end`, or to the end of the file when it comes first.
pub(super) fn for_each_piece<E: From<io::Error>>(file: &File, start: u64, end: u64, mut take: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
    let mut buffer = vec![0; MAX_DATA];
    let mut at = start;
    while at < end {
        let want = usize::try_from(end - at).map_or(MAX_DATA, |left| left.min(MAX_DATA));
        let count = match file.read_at(&mut buffer[..want], at) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        };
        take(&buffer[..count])?;
        at += count as u64;
    }
    Ok(())
}

//! SHA-256 digests in lowercase hex.

use std::{
    fs::File,
    io,
    os::{fd::AsFd, unix::fs::FileExt},
};

use cynode_api::{FileType, file_limits::MAX_PUT_BYTES};
use cynode_sba_proto::MAX_DATA;
use rustix::{
    fs::{Mode, OFlags, fstat, openat},
    path::Arg,
};
use sha2::{Digest, Sha256};

use super::path;

#[derive(Clone, Default)]
pub(super) struct Hasher(Sha256);

impl Hasher {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn hex(self) -> String {
        hex::encode(self.0.finalize())
    }
}

pub(super) fn of_bytes(bytes: &[u8]) -> String {
    let mut hasher = Hasher::default();
    hasher.update(bytes);
    hasher.hex()
}

/// Hash and length of the first `limit` bytes, or of the whole file if it is shorter. Keeps the
/// file's position.
pub(super) fn of_file(file: &File, limit: u64) -> io::Result<(String, u64)> {
    let mut hasher = Hasher::default();
    let mut count = 0;
    for_each_chunk(file, 0, limit, |piece| {
        hasher.update(piece);
        count += piece.len() as u64;
        Ok::<_, io::Error>(())
    })?;
    Ok((hasher.hex(), count))
}

/// The hash of a file for a change report; `None` if it can't be read or exceeds the limit of a
/// write.
///
/// Processes in the sandbox can change the file between this and the change itself; that can't be
/// prevented here.
pub(super) fn for_record(file: &File) -> Option<String> {
    if path::size(&fstat(file).ok()?) > MAX_PUT_BYTES {
        return None;
    }
    // One byte more, to detect that it grew meanwhile.
    of_file(file, MAX_PUT_BYTES + 1)
        .ok()
        .filter(|(_, count)| *count <= MAX_PUT_BYTES)
        .map(|(sha256, _)| sha256)
}

/// Like [`for_record`], for the regular file with this name; doesn't follow a link.
pub(super) fn of_entry(directory: impl AsFd, name: impl Arg) -> Option<String> {
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(openat(directory, name, flags, Mode::empty()).ok()?);
    let stat = fstat(&file).ok()?;
    (path::kind(&stat) == FileType::File)
        .then(|| for_record(&file))
        .flatten()
}

/// Reads from `start` up to `end` or the end of the file, whichever comes first.
pub(super) fn for_each_chunk<E: From<io::Error>>(
    file: &File,
    start: u64,
    end: u64,
    mut take: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
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

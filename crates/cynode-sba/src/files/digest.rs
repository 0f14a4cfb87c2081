//! SHA-256 of contents, in lowercase hex.

use std::{
    fmt::Write as _,
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
        self.0
            .finalize()
            .iter()
            .fold(String::with_capacity(64), |mut hex, byte| {
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

/// Hash of a whole file for the record of a change; `None` when it can't be read or is larger than what can be written.
///
/// What runs in the sandbox can change a file between this and the change itself, which nothing here can prevent.
pub(super) fn for_record(file: &File) -> Option<String> {
    if path::size(&fstat(file).ok()?) > MAX_PUT_BYTES {
        return None;
    }
    // One more, to see that it has grown meanwhile.
    of_file(file, MAX_PUT_BYTES + 1)
        .ok()
        .filter(|(_, count)| *count <= MAX_PUT_BYTES)
        .map(|(sha256, _)| sha256)
}

/// As [`for_record`], of the regular file that has this name; a link is not followed.
pub(super) fn of_entry(directory: impl AsFd, name: impl Arg) -> Option<String> {
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(openat(directory, name, flags, Mode::empty()).ok()?);
    let stat = fstat(&file).ok()?;
    (path::kind(&stat) == FileType::File)
        .then(|| for_record(&file))
        .flatten()
}

/// Reads from `start` up to `end`, or to the end of the file when it comes first.
pub(super) fn for_each_piece<E: From<io::Error>>(
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

//! Reads the names in a directory, sorted and bounded.

use std::{collections::BinaryHeap, os::fd::OwnedFd, time::Instant};

use rustix::{
    fs::{FileType as Kind, RawDir},
    io::Errno,
};

const READ_BUFFER_BYTES: usize = 32 * 1024;
/// The number of names between two checks of the clock.
const NAMES_PER_CLOCK_CHECK: u32 = 1_024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DirectoryEntry {
    pub(super) bytes: Vec<u8>,
    /// The type from the directory entry; some file systems don't store it.
    pub(super) kind: Kind,
}

/// Returns the `limit` smallest names that `wanted` accepts, sorted, and whether the result is
/// complete. `directory` must be freshly opened.
pub(super) fn smallest(
    directory: &OwnedFd,
    limit: usize,
    deadline: Instant,
    wanted: impl Fn(&[u8]) -> bool,
) -> Result<(Vec<DirectoryEntry>, bool), Errno> {
    let mut heap: BinaryHeap<(Vec<u8>, u8)> = BinaryHeap::new();
    let mut is_complete = true;
    for_each(
        directory,
        |name, kind| {
            if !wanted(name) {
                return true;
            }
            if heap.len() >= limit {
                is_complete = false;
                if heap
                    .peek()
                    .is_none_or(|(largest, _)| largest.as_slice() <= name)
                {
                    return true;
                }
                heap.pop();
            }
            heap.push((name.to_vec(), to_code(kind)));
            true
        },
        deadline,
    )
    .map(|complete| {
        (
            heap.into_sorted_vec()
                .into_iter()
                .map(|(bytes, kind)| DirectoryEntry {
                    bytes,
                    kind: from_code(kind),
                })
                .collect(),
            is_complete && complete,
        )
    })
}

/// Returns the names that fit into `max_bytes`, sorted, and whether the result is complete.
/// `directory` must be freshly opened.
pub(super) fn all(
    directory: &OwnedFd,
    max_bytes: usize,
    deadline: Option<Instant>,
) -> Result<(Vec<DirectoryEntry>, bool), Errno> {
    let mut names = Vec::new();
    let mut bytes = 0;
    let complete = for_each_until(directory, deadline, |name, kind| {
        bytes += cost(name);
        if bytes > max_bytes {
            return false;
        }
        names.push(DirectoryEntry {
            bytes: name.to_vec(),
            kind,
        });
        true
    })?;
    names.sort_unstable_by(|one, other| one.bytes.cmp(&other.bytes));
    Ok((names, complete))
}

/// The approximate memory of a name.
pub(super) const fn cost(name: &[u8]) -> usize {
    name.len() + size_of::<DirectoryEntry>()
}

fn for_each(
    directory: &OwnedFd,
    take: impl FnMut(&[u8], Kind) -> bool,
    deadline: Instant,
) -> Result<bool, Errno> {
    for_each_until(directory, Some(deadline), take)
}

/// Passes every name except `.` and `..` to `take`, until `take` returns false or the deadline
/// passes. Returns whether every name was passed.
pub(super) fn for_each_until(
    directory: &OwnedFd,
    deadline: Option<Instant>,
    mut take: impl FnMut(&[u8], Kind) -> bool,
) -> Result<bool, Errno> {
    let mut buffer = Vec::with_capacity(READ_BUFFER_BYTES);
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    let mut count = 0_u32;
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if !take(name, entry.file_type()) {
            return Ok(false);
        }
        count = count.wrapping_add(1);
        if count.is_multiple_of(NAMES_PER_CLOCK_CHECK)
            && deadline.is_some_and(|deadline| Instant::now() >= deadline)
        {
            return Ok(false);
        }
    }
    Ok(true)
}

// `BinaryHeap` needs `Ord`, which `FileType` lacks.
const fn to_code(kind: Kind) -> u8 {
    match kind {
        Kind::RegularFile => 1,
        Kind::Directory => 2,
        Kind::Symlink => 3,
        Kind::Unknown => 0,
        _ => 4,
    }
}

const fn from_code(code: u8) -> Kind {
    match code {
        1 => Kind::RegularFile,
        2 => Kind::Directory,
        3 => Kind::Symlink,
        0 => Kind::Unknown,
        // Stands for every other kind.
        _ => Kind::Fifo,
    }
}

//! Packs a local tree into a tar stream: files, directories and symbolic links with their modes.

use std::{
    io::{self, Read, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use tar::{Builder, EntryType, Header};

/// The sandbox's user: local owners mean nothing there.
const SANDBOX_UID: u64 = 1000;

/// The unit of tar.
const BLOCK_BYTES: u64 = 512;

#[derive(Debug, Default)]
pub struct PackedTree {
    /// Skipped entries, each with its reason.
    pub skipped: Vec<String>,
}

/// Packs everything below `root` under names relative to it.
pub fn pack_tree(root: &Path, to: &mut impl Write) -> io::Result<PackedTree> {
    let mut builder = Builder::new(to);
    let mut packed = PackedTree::default();
    // Directories still to read, deepest last. No recursion: depth must not cost stack.
    let mut directories = vec![PathBuf::new()];
    while let Some(relative) = directories.pop() {
        let directory = root.join(&relative);
        let mut entries = fs_err::read_dir(&directory)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs_err::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let name = relative.join(entry.file_name());
            let metadata = fs_err::symlink_metadata(&path)?;
            let kind = metadata.file_type();
            let mut header = header(&metadata);
            if kind.is_dir() {
                header.set_entry_type(EntryType::Directory);
                header.set_size(0);
                builder.append_data(&mut header, &name, io::empty())?;
                directories.push(name);
            } else if kind.is_symlink() {
                header.set_entry_type(EntryType::Symlink);
                header.set_size(0);
                builder.append_link(&mut header, &name, fs_err::read_link(&path)?)?;
            } else if kind.is_file() {
                append_file(&mut builder, &path, &name)?;
            } else {
                packed
                    .skipped
                    .push(format!("{}: not a file, directory or link", path.display()));
            }
        }
    }
    builder.into_inner()?;
    Ok(packed)
}

/// The bytes of an archive of everything below `root`. Long names need a few more.
pub fn tree_bytes(root: &Path) -> io::Result<u64> {
    let mut total = 2 * BLOCK_BYTES;
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs_err::read_dir(&directory)? {
            let path = entry?.path();
            let metadata = fs_err::symlink_metadata(&path)?;
            let is_file = metadata.is_file();
            total += entry_bytes(if is_file { metadata.len() } else { 0 });
            if metadata.is_dir() {
                directories.push(path);
            }
        }
    }
    Ok(total)
}

/// The bytes of an entry with content of this size: a header, and whole blocks.
pub const fn entry_bytes(size: u64) -> u64 {
    BLOCK_BYTES + size.div_ceil(BLOCK_BYTES) * BLOCK_BYTES
}

/// Packs one file as an archive of one entry.
pub fn pack_file(path: &Path, name: &Path, to: &mut impl Write) -> io::Result<()> {
    let mut builder = Builder::new(to);
    append_file(&mut builder, path, name)?;
    builder.into_inner()?;
    Ok(())
}

fn append_file(builder: &mut Builder<impl Write>, path: &Path, name: &Path) -> io::Result<()> {
    // A pipe that replaced the file meanwhile must not block the open.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = fs_err::OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other(format!(
            "{} changed while it was copied",
            path.display()
        )));
    }
    let mut header = header(&metadata);
    header.set_entry_type(EntryType::Regular);
    header.set_size(metadata.len());
    builder.append_data(&mut header, name, Exactly::new(file, metadata.len(), path))
}

/// A header with the permissions and the time of a file.
pub fn header(metadata: &std::fs::Metadata) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(metadata.mode() & 0o777);
    header.set_uid(SANDBOX_UID);
    header.set_gid(SANDBOX_UID);
    header.set_mtime(u64::try_from(metadata.mtime()).unwrap_or(0));
    header
}

/// Reads as many bytes as the header declares. A file that grew is truncated; one that shrank is an
/// error, because the archive would be malformed.
pub struct Exactly<'a> {
    from: fs_err::File,
    left: u64,
    path: &'a Path,
}

impl<'a> Exactly<'a> {
    pub const fn new(from: fs_err::File, size: u64, path: &'a Path) -> Self {
        Self {
            from,
            left: size,
            path,
        }
    }
}

impl Read for Exactly<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 || buffer.is_empty() {
            return Ok(0);
        }
        let limit = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let count = self.from.read(&mut buffer[..limit])?;
        if count == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{} shrank while it was copied", self.path.display()),
            ));
        }
        self.left -= count as u64;
        Ok(count)
    }
}

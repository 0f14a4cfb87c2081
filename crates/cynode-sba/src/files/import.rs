//! Unpacking a tar archive into a directory.
//!
//! What must stay true: nothing is written outside of the directory, whatever names and links the archive holds; no
//! device, no setuid bit and no owner comes out of an archive; its headers can't make memory grow.

use std::{
    ffi::OsStr,
    io::Write as _,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
};

use cynode_api::{ErrorCode, FileChange, FileChanges, FileType};
use cynode_sba_proto::AgentError;
use rustix::{
    fs::{AtFlags, Mode, chmodat, futimens, linkat, statat, symlinkat, unlinkat, utimensat},
    io::Errno,
};
use tar::{EntryType, Header};

use super::{
    archive::BLOCK,
    confined::{self, Confined},
    digest,
    error::{Doing, Failure, Outcome, shown},
    path::{self, Files},
    staged::Staged,
    tree::times,
    write::Body,
};

/// Longest name in an extension header, and longest set of attributes.
const MAX_EXTENSION: u64 = 1024 * 1024;
/// Directories whose permissions and times are set at the end, in bytes of their names.
const MAX_DIRECTORY_BYTES: usize = 16 * 1024 * 1024;

impl Files {
    pub(super) fn import(&self, path: &[u8], body: Body<'_>) -> Outcome<FileChanges> {
        let place = self.locate(path)?;
        let mut source = Source { body, piece: Vec::new(), at: 0, ended: false };
        // Nothing is made for what is no archive. One that only says that it ends is one of an empty directory.
        let first = source.header()?;
        if first.is_none() && source.ended {
            return Err(broken("it is empty"));
        }
        path::make_directories(&place)?;
        let root = Confined::open(&place).doing("opening", path::bytes(&place))?;
        let mut import = Import { root, prefix: path::printed_prefix(path), directories: Vec::new(), directory_bytes: 0, changes: FileChanges::default() };
        match import.all(first, &mut source) {
            Ok(()) => Ok(import.finish()),
            // What came before the fault stays, and is told.
            Err(Failure::Refused(error)) => Err(Failure::Refused(AgentError { changed: Some(import.changes), ..error })),
            Err(failure) => Err(failure),
        }
    }
}

fn broken(what: &str) -> Failure {
    Failure::invalid(format!("the archive can't be unpacked: {what}"))
}

fn refuse(name: &[u8], what: &str) -> Failure {
    Failure::invalid(format!("the archive's entry {} can't be unpacked: {what}; what came before it stays", shown(name)))
}

/// The archive as it arrives.
struct Source<'a> {
    body: Body<'a>,
    piece: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Source<'_> {
    /// At most `limit` bytes of what comes next; empty at the end.
    fn some(&mut self, limit: usize) -> Outcome<&[u8]> {
        while self.at == self.piece.len() && !self.ended {
            match (self.body)().map_err(Failure::Connection)? {
                Some(piece) => (self.piece, self.at) = (piece, 0),
                None => self.ended = true,
            }
        }
        let end = self.piece.len().min(self.at.saturating_add(limit));
        let bytes = &self.piece[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    /// The next header; `None` at the end of the archive.
    fn header(&mut self) -> Outcome<Option<Box<[u8; BLOCK]>>> {
        let mut block = Box::new([0; BLOCK]);
        let mut filled = 0;
        while filled < BLOCK {
            let bytes = self.some(BLOCK - filled)?;
            if bytes.is_empty() {
                return if filled == 0 { Ok(None) } else { Err(broken("it ends within a header")) };
            }
            block[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let sum = block.iter().enumerate().map(|(index, byte)| if (148..156).contains(&index) { 32 } else { u32::from(*byte) }).sum::<u32>();
        if Header::from_byte_slice(block.as_slice()).cksum().ok() != Some(sum) {
            return Err(broken("a header's checksum is wrong; is it a tar archive without compression?"));
        }
        Ok(Some(block))
    }

    /// Passes the content of an entry on, and skips what fills its last block.
    fn content(&mut self, size: u64, name: &[u8], mut take: impl FnMut(&[u8]) -> Outcome<()>) -> Outcome<()> {
        let mut left = size;
        while left > 0 {
            let bytes = self.some(usize::try_from(left).unwrap_or(usize::MAX))?;
            if bytes.is_empty() {
                return Err(refuse(name, "the archive ends within it"));
            }
            left -= bytes.len() as u64;
            take(bytes)?;
        }
        let block = BLOCK as u64;
        let mut padding = usize::try_from((block - size % block) % block).unwrap_or(0);
        while padding > 0 {
            let count = self.some(padding)?.len();
            if count == 0 {
                return Err(refuse(name, "the archive ends within it"));
            }
            padding -= count;
        }
        Ok(())
    }

    fn drain(&mut self) -> Outcome<()> {
        while !self.some(usize::MAX)?.is_empty() {}
        Ok(())
    }
}

/// What extension headers say about the next entry.
#[derive(Default)]
struct Attributes {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<i64>,
    sparse: bool,
}

impl Attributes {
    /// Takes POSIX records: `<length> <key>=<value>\n`.
    fn take_records(&mut self, records: &[u8]) -> Option<()> {
        let mut rest = records;
        while !rest.is_empty() {
            let space = rest.iter().position(|byte| *byte == b' ')?;
            let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
            let record = rest.get(space + 1..length)?.strip_suffix(b"\n")?;
            rest = &rest[length..];
            let equals = record.iter().position(|byte| *byte == b'=')?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            let text = || std::str::from_utf8(value).ok();
            match key {
                b"path" => self.name = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(text()?.parse().ok()?),
                b"mtime" => self.mtime = text()?.split('.').next()?.parse().ok(),
                key => self.sparse |= key.starts_with(b"GNU.sparse."),
            }
        }
        Some(())
    }
}

struct Import {
    root: Confined,
    /// How the call names the directory.
    prefix: Vec<u8>,
    /// Permissions and time of each directory: they would be in the way, or change, before all is unpacked.
    directories: Vec<(Vec<u8>, u32, i64)>,
    directory_bytes: usize,
    changes: FileChanges,
}

impl Import {
    fn all(&mut self, first: Option<Box<[u8; BLOCK]>>, source: &mut Source<'_>) -> Outcome<()> {
        let mut next = first;
        let mut attributes = Attributes::default();
        while let Some(header) = next {
            self.entry(&header, &mut attributes, source)?;
            next = source.header()?;
        }
        source.drain()
    }

    /// Says what became of an entry, as far as there is room to say it.
    fn tell(&mut self, parts: &[&[u8]], change: impl FnOnce(FileChange) -> FileChange) {
        let mut path = self.prefix.clone();
        path::join(&mut path, &parts.join(&b'/'));
        self.changes.add(change(FileChange::new(&path)));
    }

    /// Hash of the regular file that has this name, when there is room to say it.
    fn hash(&self, directory: &OwnedFd, name: &[u8]) -> Option<String> {
        if self.changes.has_room() { digest::of_entry(directory, name) } else { None }
    }

    fn entry(&mut self, header: &[u8; BLOCK], attributes: &mut Attributes, source: &mut Source<'_>) -> Outcome<()> {
        let header = Header::from_byte_slice(header);
        let kind = header.entry_type();
        let header_name = header.path_bytes().into_owned();
        let size = header.entry_size().map_err(|_| refuse(&header_name, "its size is not valid"))?;
        if matches!(kind, EntryType::GNULongName | EntryType::GNULongLink | EntryType::XHeader) {
            if size > MAX_EXTENSION {
                return Err(broken("an extension header is too large"));
            }
            let mut value = Vec::new();
            source.content(size, &header_name, |bytes| {
                value.extend_from_slice(bytes);
                Ok(())
            })?;
            if kind == EntryType::XHeader {
                return attributes.take_records(&value).ok_or_else(|| broken("an extension header is not valid"));
            }
            value.truncate(value.iter().position(|byte| *byte == 0).unwrap_or(value.len()));
            *(if kind == EntryType::GNULongName { &mut attributes.name } else { &mut attributes.link }) = Some(value);
            return Ok(());
        }
        if kind == EntryType::XGlobalHeader {
            return source.content(size, &header_name, |_| Ok(()));
        }

        let attributes = std::mem::take(attributes);
        let name = attributes.name.unwrap_or(header_name);
        let size = attributes.size.unwrap_or(size);
        let mode = header.mode().unwrap_or(0o644) & 0o777;
        let mtime = attributes.mtime.unwrap_or_else(|| header.mtime().ok().and_then(|mtime| i64::try_from(mtime).ok()).unwrap_or(0));
        let link = attributes.link.or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned)).unwrap_or_default();
        if attributes.sparse {
            return Err(refuse(&name, "sparse files are not supported"));
        }
        // The oldest archives mark directories by a slash only.
        let is_directory = kind == EntryType::Directory || (kind == EntryType::Regular && name.ends_with(b"/"));
        if is_directory && name.split(|byte| *byte == b'/').all(|part| part.is_empty() || part == b".") && !name.starts_with(b"/") {
            return source.content(size, &name, |_| Ok(()));
        }
        let parts = confined::parts(&name).map_err(|reason| refuse(&name, reason))?;
        match kind {
            _ if is_directory => self.directory(&name, &parts, mode, mtime)?,
            EntryType::Regular | EntryType::Continuous => return self.file(&name, &parts, mode, mtime, size, source),
            EntryType::Symlink => self.symlink(&name, &parts, &link, mtime)?,
            EntryType::Link => self.hard_link(&name, &parts, &link)?,
            EntryType::GNUSparse => return Err(refuse(&name, "sparse files are not supported")),
            EntryType::Char | EntryType::Block | EntryType::Fifo => return Err(refuse(&name, "it is a device or a FIFO")),
            _ => return Err(refuse(&name, "its type is unknown")),
        }
        source.content(size, &name, |_| Ok(()))
    }

    /// The directory that an entry goes into, and the entry's own name.
    fn parent<'a>(&self, name: &[u8], parts: &[&'a [u8]]) -> Outcome<(OwnedFd, &'a [u8])> {
        let Some((last, parents)) = parts.split_last() else { return Err(refuse(name, "the path is empty")) };
        Ok((self.make(name, parents)?, last))
    }

    fn make(&self, name: &[u8], parts: &[&[u8]]) -> Outcome<OwnedFd> {
        self.make_with(name, parts, |_| {})
    }

    fn make_with(&self, name: &[u8], parts: &[&[u8]], made: impl FnMut(usize)) -> Outcome<OwnedFd> {
        match self.root.make_directory(parts, Mode::from_raw_mode(0o755), made) {
            Ok(directory) => Ok(directory),
            Err(Errno::XDEV) => Err(refuse(name, "its path passes through a symbolic link that leads outside")),
            Err(Errno::NOTDIR) => Err(refuse(name, "a part of its path is not a directory")),
            Err(errno) => Err(Failure::system(errno, "unpacking", name)),
        }
    }

    fn directory(&mut self, name: &[u8], parts: &[&[u8]], mode: u32, mtime: i64) -> Outcome<()> {
        let mut made = false;
        self.make_with(name, parts, |count| made |= count == parts.len())?;
        if made {
            self.tell(parts, |change| change.of_kind(FileType::Dir));
        }
        // One that was closed before must let its entries in.
        let (above, last) = self.parent(name, parts)?;
        if statat(&above, last, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| path::kind(&stat) == FileType::Dir && stat.st_mode & 0o700 != 0o700) {
            chmodat(&above, last, Mode::RWXU, AtFlags::empty()).doing("unpacking", name)?;
        }
        if self.directory_bytes + name.len() <= MAX_DIRECTORY_BYTES {
            self.directory_bytes += name.len();
            self.directories.push((parts.join(&b'/'), mode, mtime));
        }
        Ok(())
    }

    /// The content waits out of sight until it is whole: an archive or a disk that ends within it leaves what was there.
    fn file(&mut self, name: &[u8], parts: &[&[u8]], mode: u32, mtime: i64, size: u64, source: &mut Source<'_>) -> Outcome<()> {
        let (directory, last) = self.parent(name, parts)?;
        let mut staged = directory.try_clone().doing("unpacking", name).and_then(|directory| Staged::new(directory).doing("unpacking", name))?;
        let mut hasher = self.changes.has_room().then(digest::Hasher::default);
        source.content(size, name, |bytes| {
            if let Some(hasher) = &mut hasher {
                hasher.update(bytes);
            }
            staged.file().write_all(bytes).doing("unpacking", name)
        })?;
        futimens(staged.file(), &times(mtime, 0)).doing("unpacking", name)?;
        let before = self.hash(&directory, last);
        match staged.publish(&directory, OsStr::from_bytes(last), mode, true) {
            Err(Errno::ISDIR) => return Err(directory_in_the_way(name)),
            result => result.doing("unpacking", name)?,
        }
        self.tell(parts, |change| change.before(before).after(hasher.map(digest::Hasher::hex)));
        Ok(())
    }

    fn symlink(&mut self, name: &[u8], parts: &[&[u8]], link: &[u8], mtime: i64) -> Outcome<()> {
        if link.is_empty() || link.contains(&0) {
            return Err(refuse(name, "its link target is not valid"));
        }
        let (directory, last) = self.parent(name, parts)?;
        let before = self.hash(&directory, last);
        replacing(name, &directory, last, || symlinkat(link, &directory, last))?;
        self.tell(parts, |change| change.of_kind(FileType::Symlink).before(before));
        // Not every file system keeps times of links.
        let _tried = utimensat(&directory, last, &times(mtime, 0), AtFlags::SYMLINK_NOFOLLOW);
        Ok(())
    }

    fn hard_link(&mut self, name: &[u8], parts: &[&[u8]], link: &[u8]) -> Outcome<()> {
        let target = confined::parts(link).map_err(|reason| refuse(name, &format!("its link target is not valid: {reason}")))?;
        let Some((target_name, target_parents)) = target.split_last() else { return Err(refuse(name, "its link target is empty")) };
        let gone = |_| refuse(name, "its link target is not in the directory");
        let target_directory = self.root.directory(target_parents).map_err(gone)?;
        let stat = statat(&target_directory, *target_name, AtFlags::SYMLINK_NOFOLLOW).map_err(gone)?;
        if path::kind(&stat) != FileType::File {
            return Err(refuse(name, "its link target is not a regular file"));
        }
        let (directory, last) = self.parent(name, parts)?;
        // Replacing a file by a link to itself would lose it.
        if statat(&directory, last, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|old| (old.st_dev, old.st_ino) == (stat.st_dev, stat.st_ino)) {
            return Ok(());
        }
        let (before, after) = (self.hash(&directory, last), self.hash(&target_directory, target_name));
        replacing(name, &directory, last, || linkat(&target_directory, *target_name, &directory, last, AtFlags::empty()))?;
        self.tell(parts, |change| change.before(before).after(after));
        Ok(())
    }

    /// Gives directories their permissions and times, the deepest first. Best effort: the contents are all there.
    fn finish(self) -> FileChanges {
        for (path, mode, mtime) in self.directories.into_iter().rev() {
            let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
            let Some((last, parents)) = parts.split_last() else { continue };
            if let Ok(directory) = self.root.directory(parents)
                && statat(&directory, *last, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| path::kind(&stat) == FileType::Dir)
            {
                let _times = utimensat(&directory, *last, &times(mtime, 0), AtFlags::SYMLINK_NOFOLLOW);
                let _mode = chmodat(&directory, *last, Mode::from_raw_mode(mode), AtFlags::empty());
            }
        }
        self.changes
    }
}

fn directory_in_the_way(name: &[u8]) -> Failure {
    Failure::new(ErrorCode::AlreadyExists, format!("unpacking {}: a directory has its name", shown(name)))
}

/// Makes an entry, after deleting what has its name when that is no directory.
fn replacing<T>(name: &[u8], directory: &OwnedFd, last: &[u8], mut make: impl FnMut() -> Result<T, Errno>) -> Outcome<T> {
    match make() {
        Err(Errno::EXIST) => {
            match unlinkat(directory, last, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR) => return Err(directory_in_the_way(name)),
                Err(errno) => return Err(Failure::system(errno, "replacing", name)),
            }
            make().doing("unpacking", name)
        }
        result => result.doing("unpacking", name),
    }
}

#[cfg(test)]
mod tests;

//! The one reader of tar archives.
//!
//! The gate reads an archive to check its paths against rules, the agent reads the same bytes to unpack them. Both use
//! [`Archive`], so that neither sees an entry, a name or a size that the other does not.
//!
//! Invariants: input that two common readers could understand differently is an [`Error`], never a guess; an entry's path is
//! relative, has no `..`, and never leads through a symbolic link of the same archive; no header makes memory grow beyond
//! the constants below.
#![forbid(unsafe_code)]

mod header;
mod pax;
mod reader;

use std::collections::HashSet;

pub use self::reader::{ReadError, Reader};
use self::{
    header::{Header, Type},
    pax::Records,
};

/// Headers and contents are padded to multiples of this.
pub const BLOCK: usize = 512;
/// Largest extension header: a GNU long name, or all POSIX records of one entry.
pub const MAX_EXTENSION_BYTES: u64 = 1024 * 1024;
/// Longest path of an entry, and longest target of a link.
pub const MAX_PATH_BYTES: usize = 4_095;
/// Paths of all symbolic links of an archive together: they are kept to refuse entries below them.
pub const MAX_LINK_BYTES: usize = 16 * 1024 * 1024;

/// Why an archive is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("it {0}")]
    Archive(&'static str),
    #[error("the entry '{}' {problem}", printable(.path))]
    Entry {
        path: Vec<u8>,
        problem: &'static str,
    },
}

/// Escapes what a terminal or a log must not get.
fn printable(path: &[u8]) -> String {
    let end = path.len().min(256);
    let dots = if end < path.len() { "…" } else { "" };
    format!("{}{dots}", path[..end].escape_ascii())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    HardLink,
    /// A device or a FIFO.
    Special,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// As the archive spells it; relative and without `..`.
    pub path: Vec<u8>,
    pub kind: Kind,
    /// The target of a link, as the archive spells it. That of a hard link is relative and without `..`.
    pub link: Vec<u8>,
    /// Only a [`Kind::File`] has content.
    pub size: u64,
    /// Permission bits, without setuid, setgid and sticky.
    pub mode: u32,
    pub mtime: i64,
}

impl Entry {
    /// Whether this is the archive's own directory (`./`).
    pub fn is_root(&self) -> bool {
        components(&self.path).next().is_none()
    }
}

/// The components of a path, without empty ones and `.`.
pub fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
}

/// Where the bytes of an archive come from.
pub trait Input {
    type Error: From<Error>;

    /// The next bytes, at most `limit`; empty at the end.
    fn take(&mut self, limit: usize) -> Result<&[u8], Self::Error>;
}

/// An archive that is read entry by entry.
#[derive(Debug)]
pub struct Archive<I> {
    input: I,
    /// Content and padding of the current entry.
    content: u64,
    padding: u64,
    current: Vec<u8>,
    /// Normalized paths of symbolic links so far.
    links: HashSet<Vec<u8>>,
    link_bytes: usize,
    ended: bool,
    has_end_marker: bool,
}

impl<I: Input> Archive<I> {
    pub fn new(input: I) -> Self {
        Self {
            input,
            content: 0,
            padding: 0,
            current: Vec::new(),
            links: HashSet::new(),
            link_bytes: 0,
            ended: false,
            has_end_marker: false,
        }
    }

    /// Whether the archive ended with a block of zeros. One without entries that has no such block is no archive.
    pub fn has_end_marker(&self) -> bool {
        self.has_end_marker
    }

    /// The next entry; `None` at the end. Skips what was not read of the content of the entry before.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, I::Error> {
        self.read(|_| Ok(()))?;
        let mut records = Records::default();
        while let Some(header) = self.header()? {
            match header.kind {
                Type::Records => records.take_local(&self.extension(&header)?)?,
                Type::GlobalRecords => pax::check_global(&self.extension(&header)?)?,
                Type::LongPath => records.take_long_path(self.extension(&header)?)?,
                Type::LongLink => records.take_long_link(self.extension(&header)?)?,
                Type::Entry(kind) => return self.entry(header, kind, records).map(Some),
            }
        }
        if records.is_empty() {
            Ok(None)
        } else {
            Err(Error::Archive(
                "ends after an extension header, before the entry that it describes",
            )
            .into())
        }
    }

    /// Passes the content of the current entry on, piece by piece.
    pub fn read(
        &mut self,
        mut piece: impl FnMut(&[u8]) -> Result<(), I::Error>,
    ) -> Result<(), I::Error> {
        while self.content > 0 {
            let bytes = self
                .input
                .take(usize::try_from(self.content).unwrap_or(usize::MAX))?;
            if bytes.is_empty() {
                return Err(self.cut_off());
            }
            self.content -= bytes.len() as u64;
            piece(bytes)?;
        }
        while self.padding > 0 {
            let count = self
                .input
                .take(usize::try_from(self.padding).unwrap_or(BLOCK))?
                .len();
            if count == 0 {
                return Err(self.cut_off());
            }
            self.padding -= count as u64;
        }
        Ok(())
    }

    fn cut_off(&mut self) -> I::Error {
        Error::Entry {
            path: std::mem::take(&mut self.current),
            problem: "is cut off: the archive ends within it",
        }
        .into()
    }

    fn header(&mut self) -> Result<Option<Header>, I::Error> {
        if self.ended {
            return Ok(None);
        }
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            let bytes = self.input.take(BLOCK - filled)?;
            if bytes.is_empty() && filled > 0 {
                return Err(Error::Archive("ends within a header").into());
            }
            if bytes.is_empty() {
                self.ended = true;
                return Ok(None);
            }
            block[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        }
        if block.iter().any(|byte| *byte != 0) {
            return Ok(Some(Header::parse(&block)?));
        }
        (self.ended, self.has_end_marker) = (true, true);
        loop {
            let bytes = self.input.take(usize::MAX)?;
            if bytes.is_empty() {
                return Ok(None);
            }
            // Some readers stop at the first block of zeros, others go on behind it.
            if bytes.iter().any(|byte| *byte != 0) {
                return Err(Error::Archive(
                    "goes on after its end marker; archives can't be concatenated",
                )
                .into());
            }
        }
    }

    fn extension(&mut self, header: &Header) -> Result<Vec<u8>, I::Error> {
        if header.size > MAX_EXTENSION_BYTES {
            return Err(Error::Archive("has an extension header of more than 1 MiB").into());
        }
        self.start(header.size, b"(extension header)");
        let mut value = Vec::new();
        self.read(|bytes| {
            value.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(value)
    }

    fn start(&mut self, size: u64, path: &[u8]) {
        let block = BLOCK as u64;
        (self.content, self.padding) = (size, (block - size % block) % block);
        self.current = path.to_vec();
    }

    fn entry(&mut self, header: Header, kind: Kind, records: Records) -> Result<Entry, I::Error> {
        let path = records.path.unwrap_or(header.path);
        let problem = |problem: &'static str| {
            Err(Error::Entry {
                path: path.clone(),
                problem,
            }
            .into())
        };
        // The oldest archives mark directories by a slash only.
        let kind = if kind == Kind::File && path.ends_with(b"/") {
            Kind::Directory
        } else {
            kind
        };
        if let Err(reason) = check_path(&path) {
            return problem(reason);
        }
        let is_root = components(&path).next().is_none();
        if is_root && kind != Kind::Directory {
            return problem("has no name");
        }
        if records.size.is_some_and(|size| size != header.size) {
            return problem(
                "has two sizes that differ, one in its header and one in its extension header",
            );
        }
        if kind != Kind::File && header.size != 0 {
            return problem("is not a file but has content");
        }
        let link = match kind {
            Kind::Symlink | Kind::HardLink => records.link.unwrap_or(header.link),
            _ => Vec::new(),
        };
        match kind {
            Kind::Symlink | Kind::HardLink
                if link.is_empty() || link.contains(&0) || link.len() > MAX_PATH_BYTES =>
            {
                return problem(
                    "has a link target that is not valid: it is empty, too long, or contains a NUL byte",
                );
            }
            Kind::HardLink if check_path(&link).is_err() || components(&link).next().is_none() => {
                return problem(
                    "has a link target that is not valid: that of a hard link is relative, without '..'",
                );
            }
            _ => {}
        }
        if self.leads_through_link(&path, kind == Kind::Directory)
            || (kind == Kind::HardLink && self.leads_through_link(&link, false))
        {
            return problem("leads through a symbolic link of the same archive");
        }
        self.note_link(&path, kind)?;
        self.start(header.size, &path);
        Ok(Entry {
            path,
            kind,
            link,
            size: header.size,
            mode: header.mode & 0o777,
            mtime: records.mtime.unwrap_or(header.mtime),
        })
    }

    /// Whether a component above the last one, or with `last` also that one, is a symbolic link.
    fn leads_through_link(&self, path: &[u8], last: bool) -> bool {
        if self.links.is_empty() {
            return false;
        }
        let whole = normalized(path);
        let ends = whole
            .iter()
            .enumerate()
            .filter(|(_, byte)| **byte == b'/')
            .map(|(index, _)| index)
            .chain(last.then_some(whole.len()));
        ends.into_iter()
            .any(|end| self.links.contains(&whole[..end]))
    }

    fn note_link(&mut self, path: &[u8], kind: Kind) -> Result<(), I::Error> {
        if kind == Kind::Symlink {
            let path = normalized(path);
            self.link_bytes += path.len();
            if self.link_bytes > MAX_LINK_BYTES {
                return Err(Error::Archive(
                    "has symbolic links whose paths have more than 16 MiB together",
                )
                .into());
            }
            self.links.insert(path);
        } else if !self.links.is_empty() {
            // A file takes the place of a link.
            self.links.remove(&normalized(path));
        }
        Ok(())
    }
}

fn normalized(path: &[u8]) -> Vec<u8> {
    components(path).collect::<Vec<_>>().join(&b'/')
}

/// Checks that a path stays below the directory that it is unpacked into, as far as its text shows.
fn check_path(path: &[u8]) -> Result<(), &'static str> {
    if path.is_empty() {
        return Err("has no name");
    }
    if path.starts_with(b"/") {
        return Err("has an absolute path");
    }
    if path.contains(&0) {
        return Err("has a NUL byte in its path");
    }
    if path.len() > MAX_PATH_BYTES {
        return Err("has a path of more than 4095 bytes");
    }
    if components(path).any(|part| part == b"..") {
        return Err("has '..' in its path");
    }
    Ok(())
}

#[cfg(test)]
mod tests;

//! The only tar reader in this workspace.
//!
//! The gate reads an archive to check its paths against rules; the agent reads the same bytes to
//! unpack them. Both use [`Archive`], so they can't disagree about an entry, a name or a size.
//!
//! Invariants: input that two common tar readers could interpret differently is an [`Error`]; an
//! entry's path is relative, contains no `..`, and never passes through a symbolic link of the same
//! archive; the constants below bound the memory that headers can allocate.
#![forbid(unsafe_code)]

mod header;
mod pax;
mod reader;

use std::collections::HashSet;

pub use self::reader::{ReadError, Reader};
use self::{
    header::{Header, HeaderKind},
    pax::Records,
};

/// Headers and contents are padded to multiples of this.
pub const BLOCK: usize = 512;
/// Largest extension header: a GNU long name, or all pax records of one entry.
pub const MAX_EXTENSION_BYTES: u64 = 1024 * 1024;
/// Longest path of an entry, and longest target of a link.
pub const MAX_PATH_BYTES: usize = 4_095;
/// Total length of all symbolic link paths in an archive. They stay in memory so that entries below
/// them can be refused.
pub const MAX_LINK_BYTES: usize = 16 * 1024 * 1024;

/// The reason for refusing an archive.
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

/// Escapes control characters for terminals and logs, and truncates long paths.
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
    /// Verbatim from the archive; relative, without `..`.
    pub path: Vec<u8>,
    pub kind: Kind,
    /// A link's target, verbatim from the archive. A hard link's target is relative, without `..`.
    pub link: Vec<u8>,
    /// Zero unless this is a [`Kind::File`].
    pub size: u64,
    /// Permission bits, without setuid, setgid and sticky.
    pub mode: u32,
    pub mtime: i64,
}

impl Entry {
    /// Whether this entry is the archive's root directory (`./`).
    pub fn is_root(&self) -> bool {
        components(&self.path).next().is_none()
    }
}

/// The components of a path, without empty ones and `.`.
pub fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
}

/// A source of archive bytes.
pub trait Input {
    type Error: From<Error>;

    /// The next bytes, at most `limit`; empty at the end.
    fn take(&mut self, limit: usize) -> Result<&[u8], Self::Error>;
}

/// Reads an archive entry by entry.
#[derive(Debug)]
pub struct Archive<I> {
    input: I,
    /// Unread content and padding of the current entry.
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

    /// Whether the archive ended with a block of zeros. Input without entries and without such a
    /// block is not an archive.
    pub fn has_end_marker(&self) -> bool {
        self.has_end_marker
    }

    /// The next entry; `None` at the end. Skips unread content of the previous entry.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, I::Error> {
        self.read(|_| Ok(()))?;
        let mut records = Records::default();
        while let Some(header) = self.header()? {
            match header.kind {
                HeaderKind::Records => records.take_local(&self.extension(&header)?)?,
                HeaderKind::GlobalRecords => pax::check_global(&self.extension(&header)?)?,
                HeaderKind::LongPath => records.take_long_path(self.extension(&header)?)?,
                HeaderKind::LongLink => records.take_long_link(self.extension(&header)?)?,
                HeaderKind::Entry(kind) => return self.entry(header, kind, records).map(Some),
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

    /// Passes the content of the current entry to `piece`, chunk by chunk.
    pub fn read(
        &mut self,
        mut piece: impl FnMut(&[u8]) -> Result<(), I::Error>,
    ) -> Result<(), I::Error> {
        while self.content > 0 {
            let bytes = self
                .input
                .take(usize::try_from(self.content).unwrap_or(usize::MAX))?;
            if bytes.is_empty() {
                return Err(self.truncated());
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
                return Err(self.truncated());
            }
            self.padding -= count as u64;
        }
        Ok(())
    }

    fn truncated(&mut self) -> I::Error {
        Error::Entry {
            path: std::mem::take(&mut self.current),
            problem: "is truncated: the archive ends within it",
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
            // Some readers stop at the first block of zeros, others continue after it.
            if bytes.iter().any(|byte| *byte != 0) {
                return Err(Error::Archive(
                    "continues after its end marker; concatenated archives are not supported",
                )
                .into());
            }
        }
    }

    fn extension(&mut self, header: &Header) -> Result<Vec<u8>, I::Error> {
        if header.size > MAX_EXTENSION_BYTES {
            return Err(Error::Archive("has an extension header larger than 1 MiB").into());
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
        // V7 archives mark directories only by a trailing slash.
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
            return problem("has different sizes in its header and its extension header");
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
                    "has an invalid link target: it is empty, too long, or contains a NUL byte",
                );
            }
            Kind::HardLink if check_path(&link).is_err() || components(&link).next().is_none() => {
                return problem(
                    "has an invalid link target: a hard link's target must be relative, without \
                     '..'",
                );
            }
            _ => {}
        }
        if self.passes_through_link(&path, kind == Kind::Directory)
            || (kind == Kind::HardLink && self.passes_through_link(&link, false))
        {
            return problem("passes through a symbolic link of the same archive");
        }
        self.track_link(&path, kind)?;
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

    /// Whether a parent of the path is a symbolic link of this archive. With `last`, the path
    /// itself counts too.
    fn passes_through_link(&self, path: &[u8], last: bool) -> bool {
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

    fn track_link(&mut self, path: &[u8], kind: Kind) -> Result<(), I::Error> {
        if kind == Kind::Symlink {
            let path = normalized(path);
            self.link_bytes += path.len();
            if self.link_bytes > MAX_LINK_BYTES {
                return Err(
                    Error::Archive("has symbolic link paths of more than 16 MiB in total").into(),
                );
            }
            self.links.insert(path);
        } else if !self.links.is_empty() {
            // This entry replaces a link of the same path.
            self.links.remove(&normalized(path));
        }
        Ok(())
    }
}

fn normalized(path: &[u8]) -> Vec<u8> {
    components(path).collect::<Vec<_>>().join(&b'/')
}

/// Checks lexically that a path stays below the directory that it is unpacked into.
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
        return Err("has a path longer than 4095 bytes");
    }
    if components(path).any(|part| part == b"..") {
        return Err("has '..' in its path");
    }
    Ok(())
}

#[cfg(test)]
mod tests;

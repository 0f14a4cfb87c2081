//! Writes a tar as a stream of pieces.
//!
//! Invariant: an entry's header names the exact length of its content; a content of another length
//! ends the stream with an error, which its reader sees as a body that was cut off.

use std::io;

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    sync::mpsc,
};

/// Headers and contents are padded to this.
const BLOCK: usize = 512;
/// The field of a name in a header.
const NAME_BYTES: usize = 100;
/// Pieces in which the archive is sent.
const PIECE: usize = 128 * 1024;
/// The name of headers that carry a long name.
const LONG_NAME: &[u8] = b"././@LongLink";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TarKind {
    File,
    Executable,
    Directory,
    Symlink,
}

/// What a header says, besides the name.
#[derive(Clone, Copy, Debug)]
struct Fields<'a> {
    kind: u8,
    mode: u32,
    size: u64,
    mtime: u64,
    link: &'a [u8],
}

/// An archive whose pieces go to a reader.
#[derive(Debug)]
pub(super) struct TarStream {
    to: mpsc::Sender<io::Result<Bytes>>,
    buffer: BytesMut,
    /// Of every entry.
    mtime: u64,
}

impl TarStream {
    pub(super) fn new(to: mpsc::Sender<io::Result<Bytes>>, mtime: u64) -> Self {
        Self {
            to,
            buffer: BytesMut::with_capacity(PIECE + BLOCK),
            mtime,
        }
    }

    /// Writes an entry without content: a directory or a link.
    pub(super) async fn empty(
        &mut self,
        kind: TarKind,
        path: &[u8],
        link: &[u8],
    ) -> io::Result<()> {
        self.header(kind, path, 0, link).await
    }

    /// Writes a file whose content is in memory.
    pub(super) async fn bytes(&mut self, path: &[u8], content: &[u8]) -> io::Result<()> {
        self.file(TarKind::File, path, content.len() as u64, content)
            .await
    }

    /// Writes a file of an announced length.
    pub(super) async fn file(
        &mut self,
        kind: TarKind,
        path: &[u8],
        size: u64,
        mut content: impl AsyncRead + Unpin,
    ) -> io::Result<()> {
        self.header(kind, path, size, b"").await?;
        let mut left = size;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
            let start = self.buffer.len();
            self.buffer.resize(start + most, 0);
            let length = content.read(&mut self.buffer[start..]).await?;
            self.buffer.truncate(start + length);
            if length == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
            }
            left -= length as u64;
            self.flush_full().await?;
        }
        self.pad(size);
        self.flush_full().await
    }

    /// Writes the end of the archive.
    pub(super) async fn finish(mut self) -> io::Result<()> {
        self.buffer.resize(self.buffer.len() + 2 * BLOCK, 0);
        self.flush().await
    }

    /// Tells the reader that the archive is not whole.
    pub(super) async fn fail(to: &mpsc::Sender<io::Result<Bytes>>, error: io::Error) {
        // The reader may be what failed.
        drop(to.send(Err(error)).await);
    }

    async fn header(
        &mut self,
        kind: TarKind,
        path: &[u8],
        size: u64,
        link: &[u8],
    ) -> io::Result<()> {
        let mut name = path.to_vec();
        if kind == TarKind::Directory {
            name.push(b'/');
        }
        if link.len() > NAME_BYTES {
            self.long(b'K', link);
        }
        if name.len() > NAME_BYTES {
            self.long(b'L', &name);
        }
        let (flag, mode) = match kind {
            TarKind::File => (b'0', 0o644),
            TarKind::Executable => (b'0', 0o755),
            TarKind::Directory => (b'5', 0o755),
            TarKind::Symlink => (b'2', 0o777),
        };
        let fields = Fields {
            kind: flag,
            mode,
            size,
            mtime: self.mtime,
            link,
        };
        self.buffer.extend_from_slice(&block(&name, fields));
        self.flush_full().await
    }

    /// A header whose content is the name of the next entry.
    fn long(&mut self, kind: u8, name: &[u8]) {
        let fields = Fields {
            kind,
            mode: 0o644,
            size: name.len() as u64 + 1,
            mtime: 0,
            link: b"",
        };
        self.buffer.extend_from_slice(&block(LONG_NAME, fields));
        self.buffer.extend_from_slice(name);
        self.buffer.extend_from_slice(&[0]);
        self.pad(name.len() as u64 + 1);
    }

    fn pad(&mut self, size: u64) {
        let over = usize::try_from(size % BLOCK as u64).unwrap_or(0);
        if over > 0 {
            self.buffer.resize(self.buffer.len() + BLOCK - over, 0);
        }
    }

    async fn flush_full(&mut self) -> io::Result<()> {
        if self.buffer.len() >= PIECE {
            self.flush().await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> io::Result<()> {
        let piece = self.buffer.split().freeze();
        self.buffer.reserve(PIECE + BLOCK);
        self.to
            .send(Ok(piece))
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }
}

/// A GNU header. Longer names are cut: a header before it has the whole one.
fn block(name: &[u8], fields: Fields<'_>) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &name[..name.len().min(NAME_BYTES)]);
    put(100, format!("{:07o}\0", fields.mode).as_bytes());
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{:011o}\0", fields.size).as_bytes());
    put(136, format!("{:011o}\0", fields.mtime).as_bytes());
    put(148, b"        ");
    put(156, &[fields.kind]);
    put(157, &fields.link[..fields.link.len().min(NAME_BYTES)]);
    put(257, b"ustar  \0");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

#[cfg(test)]
mod tests {
    use cynode_archive::{Archive, Input, Kind};

    use super::*;

    struct Whole(Vec<u8>, usize);

    impl Input for Whole {
        type Error = cynode_archive::Error;

        fn take(&mut self, limit: usize) -> Result<&[u8], Self::Error> {
            let end = self.0.len().min(self.1.saturating_add(limit));
            let taken = &self.0[self.1..end];
            self.1 = end;
            Ok(taken)
        }
    }

    async fn collect(mut pieces: mpsc::Receiver<io::Result<Bytes>>) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(piece) = pieces.recv().await {
            all.extend_from_slice(&piece?);
        }
        Ok(all)
    }

    #[tokio::test]
    async fn an_archive_is_read_back_with_long_and_odd_names() {
        let (to, pieces) = mpsc::channel(1_000);
        let long = vec![b'n'; 3_000];
        let odd = b"a \xff\n'\"\\ name";
        let mut tar = TarStream::new(to, 1_700_000_000);
        tar.empty(TarKind::Directory, b"d", b"")
            .await
            .expect("written");
        tar.bytes(b"d/empty", b"").await.expect("written");
        let large = vec![7; 300_001];
        tar.file(TarKind::Executable, &long, 300_001, large.as_slice())
            .await
            .expect("written");
        tar.bytes(odd, b"x").await.expect("written");
        tar.empty(TarKind::Symlink, b"link", &long)
            .await
            .expect("written");
        tar.finish().await.expect("written");
        let bytes = collect(pieces).await.expect("whole");
        assert_eq!(bytes.len() % BLOCK, 0);
        let mut archive = Archive::new(Whole(bytes, 0));
        let mut found = Vec::new();
        while let Some(entry) = archive.next_entry().expect("an archive") {
            let mut content = Vec::new();
            archive
                .read(|piece| {
                    content.extend_from_slice(piece);
                    Ok(())
                })
                .expect("content");
            assert_eq!(entry.mtime, 1_700_000_000);
            found.push((entry.path, entry.kind, entry.mode, entry.link, content));
        }
        assert!(archive.has_end_marker());
        assert_eq!(
            found,
            [
                (b"d/".to_vec(), Kind::Directory, 0o755, vec![], vec![]),
                (b"d/empty".to_vec(), Kind::File, 0o644, vec![], vec![]),
                (long.clone(), Kind::File, 0o755, vec![], large),
                (odd.to_vec(), Kind::File, 0o644, vec![], b"x".to_vec()),
                (b"link".to_vec(), Kind::Symlink, 0o777, long, vec![]),
            ]
        );
    }

    #[tokio::test]
    async fn a_content_that_is_too_short_is_an_error() {
        let (to, _pieces) = mpsc::channel(10);
        let mut tar = TarStream::new(to, 0);
        let short = tar.file(TarKind::File, b"a", 10, &b"123"[..]).await;
        assert_eq!(
            short.expect_err("cut off").kind(),
            io::ErrorKind::UnexpectedEof
        );
    }
}

//! Artifacts are looked through while they are stored: a workspace can begin with one.
//!
//! What must stay true: nothing becomes an artifact before it was judged.

use std::{
    io::{self, Read},
    sync::Arc,
};

use axum::body::Body;
use bytes::{Buf as _, Bytes};
use cynode_api::{ErrorCode, Flags};
use cynode_archive::{Archive, ReadError, Reader};
use cynode_policy::{ContentScan, ShapeAction, Watch};
use cynode_service::ApiError;
use futures_util::{Stream, StreamExt as _};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};

use super::{
    brought::Found,
    count_secret,
    leaks::{ArchiveScan, Leak, judge},
};
use crate::{Orchestrator, blobs::Staged};

/// Where an archive is unpacked that a workspace begins with.
const WORKSPACE: &str = "/workspace";
/// Archives that are read again at once.
static READ_AGAIN: Semaphore = Semaphore::const_new(4);
/// Pieces that wait for their reader.
const PIECES: usize = 4;

/// What was seen of an artifact on its way into the store.
#[derive(Clone, Debug)]
pub(crate) struct SeedScan(Arc<Mutex<Option<Seen>>>);

#[derive(Debug)]
struct Seen {
    content: ContentScan,
    action: ShapeAction,
    /// An archive may hold a configuration of git's, which is looked at for more than shapes.
    names_git: bool,
    last: Vec<u8>,
}

impl SeedScan {
    pub(crate) fn new(content: ContentScan, action: ShapeAction) -> Self {
        Self(Arc::new(Mutex::new(Some(Seen {
            content,
            action,
            names_git: false,
            last: Vec::new(),
        }))))
    }

    fn feed(&self, piece: &[u8]) {
        if let Some(seen) = &mut *self.0.lock() {
            seen.feed(piece);
        }
    }
}

impl Seen {
    fn feed(&mut self, piece: &[u8]) {
        const GIT: &[u8] = b".git";
        if self.action == ShapeAction::Off {
            return;
        }
        self.content.feed(piece);
        if !self.names_git {
            let border = GIT.len() - 1;
            self.last
                .extend_from_slice(&piece[..piece.len().min(border)]);
            self.names_git = [&self.last, piece]
                .iter()
                .any(|bytes| memchr::memmem::find(bytes, GIT).is_some());
            if piece.len() > border {
                self.last = piece[piece.len() - border..].to_vec();
            }
            let excess = self.last.len().saturating_sub(border);
            self.last.drain(..excess);
        }
    }
}

/// A body that breaks off where a secret of the system is, and is looked through for shapes.
pub(crate) fn watched(mut watch: Watch, body: Body, found: Found, scan: SeedScan) -> Body {
    Body::from_stream(body.into_data_stream().map(move |piece| {
        let piece = piece.map_err(io::Error::other)?;
        if let Some(hit) = watch.feed(&piece) {
            found.set(hit.what);
            return Err(io::Error::other("a secret was found"));
        }
        scan.feed(&piece);
        Ok(piece)
    }))
}

impl Orchestrator {
    /// Judges an artifact that was taken in whole. In an archive each entry counts by its own path.
    pub(crate) async fn judge_seed(
        &self,
        scan: Option<&SeedScan>,
        path: &str,
        staged: &Staged,
    ) -> Result<Flags, ApiError> {
        let Some(Seen {
            content,
            action,
            names_git,
            ..
        }) = scan.and_then(|scan| scan.0.lock().take())
        else {
            return Ok(Flags::default());
        };
        let mut flags = Flags::default();
        let mut judged = judge("body", path, content, &mut flags).map(|()| flags);
        let looks_clean = judged.as_ref().is_ok_and(Flags::is_empty) && !names_git;
        if action != ShapeAction::Off && !looks_clean {
            let scan = ArchiveScan {
                scanner: self.scanner.clone(),
                action,
                base: WORKSPACE.to_owned(),
                flags: Flags::default(),
            };
            let pieces = self.blobs.staged(staged).await?;
            judged = judge_archive(pieces, scan).await?.unwrap_or(judged);
        }
        judged.map_err(|leak| {
            count_secret();
            leak.error()
        })
    }
}

/// `None` when it is no archive, or can't be read to its end.
async fn judge_archive(
    pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    scan: ArchiveScan,
) -> Result<Option<Result<Flags, Leak>>, ApiError> {
    let interrupted = || ApiError::new(ErrorCode::Internal, "reading the archive was interrupted");
    let _permit = READ_AGAIN.acquire().await.map_err(|_| interrupted())?;
    let (sender, receiver) = mpsc::channel(PIECES);
    let reading = tokio::task::spawn_blocking(move || {
        read_archive(
            Pieces {
                receiver,
                current: Bytes::new(),
            },
            scan,
        )
    });
    let mut pieces = std::pin::pin!(pieces);
    while let Some(piece) = pieces.next().await {
        if sender.send(piece).await.is_err() {
            break;
        }
    }
    drop(sender);
    reading.await.map_err(|_| interrupted())
}

fn read_archive(pieces: Pieces, mut scan: ArchiveScan) -> Option<Result<Flags, Leak>> {
    let mut archive = Archive::new(Reader::new(pieces));
    let mut entries = 0_u64;
    loop {
        let entry = match archive.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) => return (entries > 0 || archive.has_end_marker()).then_some(Ok(scan.flags)),
            Err(_) => return None,
        };
        entries += 1;
        match scan.entry(&mut archive, &entry, |_| {}) {
            Ok(()) => {}
            Err(EntryError::Leak(leak)) => return Some(Err(leak)),
            Err(EntryError::Read(_)) => return None,
        }
    }
}

/// Why the content of an entry was not let in.
#[derive(Debug)]
pub(crate) enum EntryError {
    Leak(Leak),
    Read(ReadError),
}

impl ArchiveScan {
    /// Looks through an entry, and shows its content to somebody else as well.
    pub(crate) fn entry<R: Read>(
        &mut self,
        archive: &mut Archive<Reader<R>>,
        entry: &cynode_archive::Entry,
        mut piece: impl FnMut(&[u8]),
    ) -> Result<(), EntryError> {
        self.check_name(&entry.path)
            .and_then(|()| self.check_name(&entry.link))
            .map_err(EntryError::Leak)?;
        let name = String::from_utf8_lossy(&entry.path).into_owned();
        let mut content = self.content(&name);
        let read = archive.read(|bytes| {
            content.feed(bytes);
            piece(bytes);
            Ok(())
        });
        read.map_err(EntryError::Read)?;
        self.judge(&name, content).map_err(EntryError::Leak)
    }
}

/// Bytes that somebody sends, for a reader that waits for them.
struct Pieces {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.receiver.blocking_recv() {
                Some(piece) => self.current = piece?,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.current.len());
        self.current.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use cynode_policy::{Held, Scanner};

    use super::*;

    #[test]
    fn a_name_of_git_is_seen_in_any_split() {
        let scanner = Scanner::new(Held::new([7; 32]), true);
        let text = b"some .gi and .git and more";
        for size in 1..text.len() {
            let mut seen = Seen {
                content: scanner.content("a", ShapeAction::Flag),
                action: ShapeAction::Flag,
                names_git: false,
                last: Vec::new(),
            };
            text[..9].chunks(size).for_each(|piece| seen.feed(piece));
            assert!(!seen.names_git, "{size}");
            text[9..].chunks(size).for_each(|piece| seen.feed(piece));
            assert!(seen.names_git, "{size}");
        }
    }
}

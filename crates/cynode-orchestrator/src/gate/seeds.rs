//! Scans artifacts while they are stored, because a workspace can be seeded from one.
//!
//! Invariant: content becomes an artifact only once it has been scanned and accepted.

use std::{
    io::{self, Read},
    sync::Arc,
};

use axum::body::Body;
use bytes::{Buf as _, Bytes};
use cynode_api::{ErrorCode, Flags, ProjectId};
use cynode_archive::{Archive, ReadError, Reader};
use cynode_policy::{Channel, ContentScan, ShapeAction, Watch};
use cynode_service::ApiError;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};

use super::{
    leaks::{ArchiveScan, Leak, refuse_or_flag},
    refusal::count_secret,
    request_body::SecretHit,
};
use crate::{Orchestrator, blobs::StagedBlob};

/// The directory that a seed archive is unpacked into.
const WORKSPACE: &str = "/workspace";
/// Bounds how many stored archives are scanned entry by entry at once.
static ARCHIVE_SCANS: Semaphore = Semaphore::const_new(4);
const PIECE_CHANNEL_CAPACITY: usize = 4;

/// The scan of an artifact on its way into the store.
#[derive(Clone, Debug)]
pub(crate) struct SeedScan(Arc<Mutex<Option<ScanState>>>);

#[derive(Debug)]
struct ScanState {
    content: ContentScan,
    action: ShapeAction,
    /// The content mentions `.git`. Git configurations are scanned for more than shapes, so an
    /// archive that may contain one is scanned entry by entry.
    mentions_git: bool,
    /// The last bytes of the previous piece.
    tail: Vec<u8>,
}

impl SeedScan {
    pub(crate) fn new(content: ContentScan, action: ShapeAction) -> Self {
        Self(Arc::new(Mutex::new(Some(ScanState {
            content,
            action,
            mentions_git: false,
            tail: Vec::new(),
        }))))
    }

    fn feed(&self, piece: &[u8]) {
        if let Some(state) = &mut *self.0.lock() {
            state.feed(piece);
        }
    }
}

impl ScanState {
    fn feed(&mut self, piece: &[u8]) {
        const GIT: &[u8] = b".git";
        if self.action == ShapeAction::Off {
            return;
        }
        self.content.feed(piece);
        if !self.mentions_git {
            let border = GIT.len() - 1;
            self.tail
                .extend_from_slice(&piece[..piece.len().min(border)]);
            self.mentions_git = [&self.tail, piece]
                .iter()
                .any(|bytes| memchr::memmem::find(bytes, GIT).is_some());
            if piece.len() > border {
                self.tail = piece[piece.len() - border..].to_vec();
            }
            let excess = self.tail.len().saturating_sub(border);
            self.tail.drain(..excess);
        }
    }
}

/// Scans a body while it streams. The stream fails if it contains a secret of the system.
pub(crate) fn scan_stream(mut watch: Watch, body: Body, secret: SecretHit, scan: SeedScan) -> Body {
    Body::from_stream(body.into_data_stream().map(move |piece| {
        let piece = piece.map_err(io::Error::other)?;
        if let Some(hit) = watch.feed(&piece) {
            secret.set(hit.what);
            return Err(io::Error::other("the body contains a secret"));
        }
        scan.feed(&piece);
        Ok(piece)
    }))
}

impl Orchestrator {
    /// How shapes of secrets are treated in the seeds of a project's workspaces.
    pub(crate) fn seed_shapes(&self, project: ProjectId) -> ShapeAction {
        self.shapes
            .for_project(Some(project))
            .action(Channel::Seeds)
    }

    /// Stages an archive that the orchestrator itself brings, and scans it as one that a caller
    /// brings. What is refused is not stored.
    pub(crate) async fn stage_seed(
        &self,
        body: Body,
        path: &str,
        action: ShapeAction,
        limit: u64,
    ) -> Result<(StagedBlob, Flags), ApiError> {
        let (secret, scan) = (
            SecretHit::default(),
            SeedScan::new(self.scanner.content(path, action), action),
        );
        let pieces = scan_stream(
            self.system_scanner.watch(),
            body,
            secret.clone(),
            scan.clone(),
        )
        .into_data_stream()
        .map_err(|error| {
            ApiError::new(
                ErrorCode::Unavailable,
                format!("the archive was interrupted: {error}"),
            )
        });
        let staged = self.blobs.stage(pieces, limit, None).await;
        if let Some(kind) = secret.kind() {
            if let Ok(staged) = &staged {
                self.blobs.discard(staged).await;
            }
            count_secret();
            return Err(Leak::system("workspace_ref", kind).error());
        }
        let staged = staged?;
        match self.check_seed(Some(&scan), path, &staged).await {
            Ok(flags) => Ok((staged, flags)),
            Err(error) => {
                self.blobs.discard(&staged).await;
                Err(error)
            }
        }
    }

    /// Decides whether to accept a staged artifact. An archive is checked entry by entry, each at
    /// its own path.
    pub(crate) async fn check_seed(
        &self,
        scan: Option<&SeedScan>,
        path: &str,
        staged: &StagedBlob,
    ) -> Result<Flags, ApiError> {
        let Some(ScanState {
            content,
            action,
            mentions_git,
            ..
        }) = scan.and_then(|scan| scan.0.lock().take())
        else {
            return Ok(Flags::default());
        };
        let mut flags = Flags::default();
        let mut verdict = refuse_or_flag("body", path, content, &mut flags).map(|()| flags);
        let looks_clean = verdict.as_ref().is_ok_and(Flags::is_empty) && !mentions_git;
        if action != ShapeAction::Off && !looks_clean {
            let scan = ArchiveScan {
                scanner: self.scanner.clone(),
                action,
                base: WORKSPACE.to_owned(),
                flags: Flags::default(),
            };
            let pieces = self.blobs.staged(staged).await?;
            verdict = check_archive(pieces, scan).await?.unwrap_or(verdict);
        }
        verdict.map_err(|leak| {
            count_secret();
            leak.error()
        })
    }
}

/// Returns `None` if the artifact is not an archive or is malformed.
async fn check_archive(
    pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    scan: ArchiveScan,
) -> Result<Option<Result<Flags, Leak>>, ApiError> {
    let interrupted = || ApiError::new(ErrorCode::Internal, "reading the archive was interrupted");
    let _permit = ARCHIVE_SCANS.acquire().await.map_err(|_| interrupted())?;
    let (sender, receiver) = mpsc::channel(PIECE_CHANNEL_CAPACITY);
    let reading = tokio::task::spawn_blocking(move || {
        scan_archive(
            PieceReader {
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

fn scan_archive(pieces: PieceReader, mut scan: ArchiveScan) -> Option<Result<Flags, Leak>> {
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

/// Why an entry was not admitted.
#[derive(Debug)]
pub(crate) enum EntryError {
    Leak(Leak),
    Read(ReadError),
}

impl ArchiveScan {
    /// Scans an entry, and passes its content to `on_piece` as well.
    pub(crate) fn entry<R: Read>(
        &mut self,
        archive: &mut Archive<Reader<R>>,
        entry: &cynode_archive::Entry,
        mut on_piece: impl FnMut(&[u8]),
    ) -> Result<(), EntryError> {
        self.check_name(&entry.path)
            .and_then(|()| self.check_name(&entry.link))
            .map_err(EntryError::Leak)?;
        let name = String::from_utf8_lossy(&entry.path).into_owned();
        let mut content = self.content(&name);
        let read = archive.read(|bytes| {
            content.feed(bytes);
            on_piece(bytes);
            Ok(())
        });
        read.map_err(EntryError::Read)?;
        self.refuse_or_flag(&name, content)
            .map_err(EntryError::Leak)
    }
}

/// Reads the pieces that an async task sends.
struct PieceReader {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Read for PieceReader {
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
    use cynode_policy::{HeldSecrets, Scanner};

    use super::*;

    #[test]
    fn dot_git_is_found_across_pieces() {
        let scanner = Scanner::new(HeldSecrets::new([7; 32]), true);
        let text = b"some .gi and .git and more";
        for size in 1..text.len() {
            let mut state = ScanState {
                content: scanner.content("a", ShapeAction::Flag),
                action: ShapeAction::Flag,
                mentions_git: false,
                tail: Vec::new(),
            };
            text[..9].chunks(size).for_each(|piece| state.feed(piece));
            assert!(!state.mentions_git, "{size}");
            text[9..].chunks(size).for_each(|piece| state.feed(piece));
            assert!(state.mentions_git, "{size}");
        }
    }
}

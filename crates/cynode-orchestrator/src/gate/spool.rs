//! Spooled bodies: buffered in memory up to a limit, then in a file, so that they can be scanned
//! before any of their bytes are forwarded.

use std::io::{Read, Seek as _, SeekFrom, Write as _};

use axum::body::{Body, HttpBody as _};
use bytes::{Bytes, BytesMut};
use cynode_api::{ErrorCode, Flags};
use cynode_archive::{Archive, Kind, Reader};
use cynode_policy::Hit;
use cynode_service::{
    ApiError, compute, edge,
    json::{self, Room},
};
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio_util::io::ReaderStream;

use super::{
    leaks::{ArchiveScan, Leak},
    seeds::EntryError,
};
use crate::{
    Orchestrator,
    budget::{self, MAX_BUFFERED_BYTES, Reservation, SPOOLED},
    caller::Caller,
    fair_permits::FairPermits,
};

const MAX_ENTRIES: usize = 10_000;
/// The total size of the paths and hard link targets of all entries of an archive.
const MAX_ENTRY_PATH_BYTES: usize = 4 * 1024 * 1024;
/// The number of an archive's entries that a record lists.
const RECORDED_ENTRIES: usize = 100;

/// Bodies that are written to files at once; further ones take turns.
const MAX_CONCURRENT_SPOOLS: usize = 8;
static SPOOLS: FairPermits = FairPermits::new(MAX_CONCURRENT_SPOOLS);
/// Re-checks free space every 16 MiB.
const FREE_SPACE_CHECK_BYTES: u64 = 16 * 1024 * 1024;

#[derive(Debug)]
pub(crate) struct SpooledBody {
    head: Bytes,
    /// The bytes after `head`.
    file: Option<std::fs::File>,
    /// The file's share of its caller's budget.
    reservation: Option<Reservation>,
    pub(crate) size: u64,
    pub(crate) sha256: String,
    pub(crate) leak: Option<Leak>,
    pub(crate) flags: Flags,
    /// The paths of an archive's entries.
    pub(crate) entries: Vec<String>,
    /// The targets of an archive's hard links.
    pub(crate) link_targets: Vec<String>,
    /// The first entries, as the record lists them.
    pub(crate) entry_records: Vec<Value>,
}

/// Reads a JSON body. A long one waits in a file until there is memory to parse it.
pub(crate) async fn json_body(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: Body,
) -> Result<(Bytes, Room), ApiError> {
    json_body_up_to(orchestrator, caller, body, edge::MAX_BODY).await
}

pub(super) async fn json_body_up_to(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: Body,
    limit: usize,
) -> Result<(Bytes, Room), ApiError> {
    if body
        .size_hint()
        .upper()
        .is_some_and(|size| size <= MAX_BUFFERED_BYTES as u64)
    {
        let bytes = json_bytes(body).await?;
        let room = room_for(&bytes).await?;
        return Ok((bytes, room));
    }
    let mut scan = json::Scan::default();
    let mut spooled = spool(orchestrator, caller, body, limit as u64, |piece| {
        scan.feed(piece).map(|()| None)
    })
    .await?;
    let size = usize::try_from(spooled.size).unwrap_or(usize::MAX);
    let room = json::room(size, scan.nodes()).await;
    let read = move || {
        let mut bytes = Vec::with_capacity(size);
        spooled.reader()?.read_to_end(&mut bytes)?;
        std::io::Result::Ok(Bytes::from(bytes))
    };
    let bytes = compute::run(size, read)
        .await
        .map_err(|error| no_room(&error))?;
    Ok((bytes, room))
}

/// Reserves the memory that parsing a JSON text takes.
pub(super) async fn room_for(bytes: &Bytes) -> Result<Room, ApiError> {
    let nodes = json::count(bytes)?;
    Ok(json::room(bytes.len(), nodes).await)
}

/// Reads a JSON body into memory.
pub(super) async fn json_bytes(body: Body) -> Result<Bytes, ApiError> {
    let mut pieces = body.into_data_stream();
    let mut bytes = BytesMut::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| budget::problem(&error))?;
        if bytes.len() + piece.len() > edge::MAX_BODY {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("the body exceeds {} bytes", edge::MAX_BODY),
            ));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.freeze())
}

/// Spools a body, and stops where `inspect` finds a secret.
pub(super) async fn spool(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: Body,
    limit: u64,
    mut inspect: impl FnMut(&[u8]) -> Result<Option<Hit>, ApiError> + Send,
) -> Result<SpooledBody, ApiError> {
    let announced = body.size_hint().exact();
    let mut pieces = SPOOLS.read(caller.id(), body.into_data_stream());
    let mut reservation = SPOOLED.reservation(caller.id());
    let mut space_checked_up_to = 0;
    let mut head = BytesMut::new();
    let mut file: Option<std::fs::File> = None;
    let (mut size, mut hash, mut hit) = (0_u64, Sha256::new(), None);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| budget::problem(&error))?;
        size += piece.len() as u64;
        if size > limit {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("the body exceeds {limit} bytes"),
            ));
        }
        hash.update(&piece);
        hit = inspect(&piece)?;
        if hit.is_some() {
            break;
        }
        if file.is_none() && head.len() + piece.len() <= MAX_BUFFERED_BYTES {
            head.extend_from_slice(&piece);
            continue;
        }
        if !reservation.covers(size) {
            // Gives up the permit while this body waits for the caller's other bodies.
            pieces.release();
            reservation
                .grow_to(
                    announced
                        .unwrap_or(size + FREE_SPACE_CHECK_BYTES)
                        .min(limit),
                )
                .await?;
        }
        pieces.require_permit().await;
        if file.is_none() {
            let directory = orchestrator.config.state_dir.join("orchestrator");
            file = Some(tempfile::tempfile_in(directory).map_err(|error| no_room(&error))?);
        }
        if size > space_checked_up_to {
            orchestrator.blobs.check_room()?;
            space_checked_up_to = size + FREE_SPACE_CHECK_BYTES;
        }
        if let Some(file) = &mut file {
            tokio::task::block_in_place(|| file.write_all(&piece))
                .map_err(|error| no_room(&error))?;
        }
    }
    let reservation = file.is_some().then_some(reservation);
    let leak = hit.map(|hit| Leak::system("body", hit.what));
    Ok(SpooledBody {
        head: head.freeze(),
        file,
        reservation,
        size,
        sha256: hex::encode(hash.finalize()),
        leak,
        flags: Flags::default(),
        entries: Vec::new(),
        link_targets: Vec::new(),
        entry_records: Vec::new(),
    })
}

fn unreadable(problem: &impl std::fmt::Display) -> ApiError {
    ApiError::invalid(format!("the archive can't be read: {problem}"))
}

fn no_room(error: &std::io::Error) -> ApiError {
    tracing::warn!(%error, "Spooling a body failed.");
    ApiError::new(
        ErrorCode::NoSpace,
        "the orchestrator has no space for the body",
    )
}

impl SpooledBody {
    fn reader(&mut self) -> std::io::Result<Box<dyn Read + '_>> {
        let head = std::io::Cursor::new(self.head.clone());
        match &mut self.file {
            Some(file) => {
                file.seek(SeekFrom::Start(0))?;
                Ok(Box::new(head.chain(file)))
            }
            None => Ok(Box::new(head)),
        }
    }

    /// Reads an archive with the reader that unpacks it, collects its paths, and scans each entry
    /// as the file that it becomes. What the reader refuses is refused here.
    pub(super) fn with_entries(mut self, mut scan: ArchiveScan) -> Result<Self, ApiError> {
        if self.leak.is_some() {
            return Ok(self);
        }
        let mut leak = None;
        let (mut entries, mut link_targets) = (Vec::new(), Vec::new());
        let mut entry_records = Vec::new();
        let mut path_bytes = 0;
        let mut archive = Archive::new(Reader::new(
            self.reader().map_err(|error| unreadable(&error))?,
        ));
        while let Some(entry) = archive.next_entry().map_err(|error| unreadable(&error))? {
            if entries.len() >= MAX_ENTRIES {
                return Err(unreadable(&format!(
                    "it has more than {MAX_ENTRIES} entries; split it"
                )));
            }
            path_bytes += entry.path.len()
                + if entry.kind == Kind::HardLink {
                    entry.link.len()
                } else {
                    0
                };
            if path_bytes > MAX_ENTRY_PATH_BYTES {
                return Err(unreadable(&format!(
                    "the paths of its entries exceed {MAX_ENTRY_PATH_BYTES} bytes in total; \
                     split it"
                )));
            }
            let name = String::from_utf8_lossy(&entry.path).into_owned();
            let target = (entry.kind == Kind::HardLink)
                .then(|| String::from_utf8_lossy(&entry.link).into_owned());
            if entry.kind == Kind::Special {
                return Err(unreadable(&format!(
                    "the entry '{}' is a device or a FIFO",
                    entry.path.escape_ascii()
                )));
            }
            let mut hash = (entry_records.len() < RECORDED_ENTRIES).then(Sha256::new);
            match scan.entry(&mut archive, &entry, |piece| {
                if let Some(hash) = &mut hash {
                    hash.update(piece);
                }
            }) {
                Ok(()) => {}
                Err(EntryError::Leak(found)) => {
                    leak = Some(found);
                    break;
                }
                Err(EntryError::Read(error)) => return Err(unreadable(&error)),
            }
            if let Some(hash) = hash {
                entry_records.push(match (&target, entry.kind) {
                    (Some(target), _) => json!({"path": name, "hard_link": target}),
                    (None, Kind::File) => {
                        json!({"path": name, "sha256_after": hex::encode(hash.finalize())})
                    }
                    (None, _) => json!({"path": name}),
                });
            }
            entries.push(name);
            link_targets.extend(target);
        }
        drop(archive);
        Ok(Self {
            leak,
            flags: scan.flags,
            entries,
            link_targets,
            entry_records,
            ..self
        })
    }

    pub(super) fn into_body(mut self) -> Body {
        let head = stream::iter([Ok::<_, std::io::Error>(self.head.clone())]);
        match self.file.take() {
            Some(mut file) => {
                let reservation = self.reservation.take();
                let rest = match file.seek(SeekFrom::Start(0)) {
                    Ok(_) => ReaderStream::new(tokio::fs::File::from_std(file)).left_stream(),
                    Err(error) => stream::iter([Err(error)]).right_stream(),
                };
                // The file is deleted with the end of the body, and counts until then.
                Body::from_stream(head.chain(rest).inspect(move |_| {
                    let _reserved = &reservation;
                }))
            }
            None => Body::from(self.head),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;
    use tar::{EntryType, Header};

    use super::{super::request_body::RequestBody, *};

    #[derive(Default)]
    struct ArchiveBuilder(Vec<u8>);

    impl ArchiveBuilder {
        fn add(mut self, kind: EntryType, name: &[u8], link: &[u8], content: &[u8]) -> Self {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(content.len() as u64);
            header.as_old_mut().name[..name.len()].copy_from_slice(name);
            header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
            header.set_cksum();
            self.0.extend_from_slice(header.as_bytes());
            self.0.extend_from_slice(content);
            self.0.resize(self.0.len().next_multiple_of(512), 0);
            self
        }

        fn file(self, name: &str) -> Self {
            self.add(EntryType::Regular, name.as_bytes(), b"", b"x")
        }

        /// A file whose path is in a GNU long name entry.
        fn long(self, path: &str) -> Self {
            self.add(
                EntryType::GNULongName,
                b"L",
                b"",
                format!("{path}\0").as_bytes(),
            )
            .file("x")
        }

        fn read(self) -> Result<RequestBody, String> {
            let spooled = SpooledBody {
                size: self.0.len() as u64,
                head: self.0.into(),
                file: None,
                reservation: None,
                sha256: String::new(),
                leak: None,
                flags: Flags::default(),
                entries: Vec::new(),
                link_targets: Vec::new(),
                entry_records: Vec::new(),
            };
            let scanner =
                cynode_policy::Scanner::new(cynode_policy::HeldSecrets::new([7; 32]), true);
            let scan = ArchiveScan {
                scanner,
                action: cynode_policy::ShapeAction::Flag,
                base: ".".to_owned(),
                flags: Flags::default(),
            };
            spooled
                .with_entries(scan)
                .map(RequestBody::Spooled)
                .map_err(|error| error.detail.clone())
        }
    }

    fn paths(body: &RequestBody) -> Vec<&str> {
        body.archive_paths().collect()
    }

    #[test]
    fn an_archive_names_every_path_that_the_agent_unpacks() {
        // The length of the comment spans the newline: only the second record is a path.
        let records = b"26 comment=x\n14 path=fine\n20 path=protected/x\n";
        let read = ArchiveBuilder::default()
            .add(EntryType::XHeader, b"x", b"", records)
            .file("fine")
            .read()
            .expect("read");
        assert_eq!(paths(&read), ["protected/x"]);
        let mut detail = Map::new();
        read.describe(&mut detail);
        assert_eq!(
            (&detail["entries"][0]["path"], &detail["entry_count"]),
            (&json!("protected/x"), &json!(1))
        );
        let linked = ArchiveBuilder::default()
            .file("a")
            .add(EntryType::Link, b"hard", b"protected/kept", b"")
            .read()
            .expect("read");
        assert_eq!(paths(&linked), ["a", "hard", "protected/kept"]);
        for (archive, expected) in [
            (
                ArchiveBuilder::default()
                    .add(EntryType::Symlink, b"l", b"protected", b"")
                    .file("l/x"),
                "symbolic link of the same archive",
            ),
            (
                ArchiveBuilder::default()
                    .add(
                        EntryType::XGlobalHeader,
                        b"g",
                        b"",
                        b"20 path=protected/x\n",
                    )
                    .file("fine"),
                "global",
            ),
            (
                ArchiveBuilder::default().add(EntryType::Fifo, b"p", b"", b""),
                "FIFO",
            ),
            (ArchiveBuilder::default().file("../x"), "'..'"),
        ] {
            let refused = archive.read().expect_err(expected);
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn entries_and_their_paths_are_bounded() {
        let files = |count: usize| {
            (0..count).fold(ArchiveBuilder::default(), |archive, number| {
                archive.file(&number.to_string())
            })
        };
        assert_eq!(
            paths(&files(MAX_ENTRIES).read().expect("read")).len(),
            MAX_ENTRIES
        );
        assert!(
            files(MAX_ENTRIES + 1)
                .read()
                .expect_err("refused")
                .contains("10000 entries")
        );
        let rest = MAX_ENTRY_PATH_BYTES % 4_000;
        let exact = |extra: usize| {
            let path = "p".repeat(4_000);
            let archive = (0..MAX_ENTRY_PATH_BYTES / path.len())
                .fold(ArchiveBuilder::default(), |archive, _| archive.long(&path));
            archive.long(&"r".repeat(rest + extra))
        };
        assert!(exact(0).read().is_ok());
        assert!(
            exact(1)
                .read()
                .expect_err("refused")
                .contains("bytes in total")
        );
    }
}

//! Reads files and their metadata.
//!
//! Invariant: the reported hash is the hash of the bytes that the reader gets, or the reply ends
//! with an error. A file that only grows is read as of its opening, so that logs can be read while
//! they are written.

use std::{fs::File, io, ops::Range, path::Path};

use cynode_api::{ErrorCode, FileType, file_limits};
use cynode_sba_proto::{FileStat, Reply};
use rustix::fs::{Stat, fstat};

use super::{
    digest,
    error::{Failure, FailureContext, Outcome, shown},
    path::{self, Files},
};
use crate::peer::Peer;

/// Files up to this size are read once, into memory.
const SMALL_FILE_BYTES: u64 = 1024 * 1024;
/// Files up to this size are hashed as a whole before a range is sent.
pub(super) const MAX_HASHED_FOR_RANGE_BYTES: u64 = 64 * 1024 * 1024;
/// Files in kernel file systems report size 0; their content is read up to this size.
const MAX_UNSIZED_BYTES: u64 = 16 * 1024 * 1024;

impl Files {
    pub(super) fn stat(&self, path: &[u8], hash: bool) -> Outcome<FileStat> {
        let full_path = self.locate(path)?;
        let stat = path::stat(&full_path)?;
        // Metadata may be accessible where the content isn't: then there is no hash.
        let sha256 = if hash
            && path::kind(&stat) == FileType::File
            && path::size(&stat) <= file_limits::MAX_PUT_BYTES
        {
            path::open_file(&full_path)
                .ok()
                .and_then(|(file, _)| digest::of_file(&file, file_limits::MAX_PUT_BYTES).ok())
                .map(|(sha256, _)| sha256)
        } else {
            None
        };
        Ok(file_stat(&stat, path::size(&stat), sha256))
    }

    pub(super) fn read(
        &self,
        path: &[u8],
        start: u64,
        end: Option<u64>,
        peer: &mut Peer,
    ) -> Outcome<()> {
        let full_path = self.locate(path)?;
        let (file, stat) = path::open_file(&full_path)?;
        if path::size(&stat) <= SMALL_FILE_BYTES {
            let content = read_small(&file, &stat, &full_path)?;
            let range = bounds(start, end, content.len() as u64)?;
            let piece = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(content.len());
            let stat = file_stat(
                &stat,
                content.len() as u64,
                Some(digest::of_bytes(&content)),
            );
            return send(peer, stat, |peer| {
                peer.data(&content[piece(range.start)..piece(range.end)])
                    .map_err(Failure::Connection)
            });
        }
        if end.is_some() && path::size(&stat) > MAX_HASHED_FOR_RANGE_BYTES {
            let size = path::size(&stat);
            return send_part(
                peer,
                &file,
                file_stat(&stat, size, None),
                bounds(start, end, size)?,
                &full_path,
            );
        }
        let (sha256, size) =
            digest::of_file(&file, path::size(&stat)).doing("reading", path::bytes(&full_path))?;
        let range = bounds(start, end, size)?;
        send(peer, file_stat(&stat, size, Some(sha256.clone())), |peer| {
            let whole = range == (0..size);
            let mut hasher = digest::Hasher::default();
            digest::for_each_chunk(&file, range.start, range.end, |piece| {
                if whole {
                    hasher.update(piece);
                }
                peer.data(piece).map_err(SendError::Peer)
            })
            .map_err(|error| error.reading(&full_path))?;
            let now = if whole {
                hasher.hex()
            } else if same_version(
                &stat,
                &fstat(&file).doing("inspecting", path::bytes(&full_path))?,
            ) {
                return Ok(());
            } else {
                digest::of_file(&file, size)
                    .doing("reading", path::bytes(&full_path))?
                    .0
            };
            if now == sha256 {
                return Ok(());
            }
            Err(changed(&full_path))
        })
    }
}

fn changed(full_path: &Path) -> Failure {
    Failure::new(
        ErrorCode::Internal,
        format!(
            "{} changed while it was read",
            shown(path::bytes(full_path))
        ),
    )
}

/// Sends a range of a file that is too large to be hashed. Only guarantees that the range is
/// complete.
fn send_part(
    peer: &mut Peer,
    file: &File,
    stat: FileStat,
    range: Range<u64>,
    full_path: &Path,
) -> Outcome<()> {
    send(peer, stat, |peer| {
        let mut left = range.end - range.start;
        digest::for_each_chunk(file, range.start, range.end, |piece| {
            left -= piece.len() as u64;
            peer.data(piece).map_err(SendError::Peer)
        })
        .map_err(|error| error.reading(full_path))?;
        if left == 0 {
            Ok(())
        } else {
            Err(changed(full_path))
        }
    })
}

/// The side that failed while sending a chunk.
enum SendError {
    Peer(io::Error),
    File(io::Error),
}

impl SendError {
    fn reading(self, full_path: &Path) -> Failure {
        match self {
            Self::Peer(error) => Failure::Connection(error),
            Self::File(error) => Failure::io(&error, "reading", path::bytes(full_path)),
        }
    }
}

impl From<io::Error> for SendError {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

fn send(
    peer: &mut Peer,
    stat: FileStat,
    body: impl FnOnce(&mut Peer) -> Outcome<()>,
) -> Outcome<()> {
    peer.reply(&Reply::Stat(stat))
        .map_err(Failure::Connection)?;
    body(peer)?;
    peer.end().map_err(Failure::Connection)
}

fn read_small(file: &File, stat: &Stat, full_path: &Path) -> Outcome<Vec<u8>> {
    let unsized_file = path::size(stat) == 0;
    let limit = if unsized_file {
        MAX_UNSIZED_BYTES + 1
    } else {
        path::size(stat)
    };
    let mut content = Vec::new();
    digest::for_each_chunk(file, 0, limit, |piece| {
        content.extend_from_slice(piece);
        Ok::<_, io::Error>(())
    })
    .doing("reading", path::bytes(full_path))?;
    if unsized_file && content.len() as u64 > MAX_UNSIZED_BYTES {
        return Err(Failure::new(
            ErrorCode::TooLarge,
            format!(
                "{} reports no size and has more than {MAX_UNSIZED_BYTES} bytes",
                shown(path::bytes(full_path))
            ),
        ));
    }
    Ok(content)
}

/// The range to send of a file of `size` bytes.
fn bounds(start: u64, end: Option<u64>, size: u64) -> Outcome<Range<u64>> {
    if start > 0 && start >= size {
        return Err(Failure::new(
            ErrorCode::RangeNotSatisfiable,
            format!("the range starts at {start}, but the file has {size} bytes"),
        ));
    }
    match end {
        Some(end) if end < start => Err(Failure::invalid(format!(
            "the range ends at {end}, before its start at {start}"
        ))),
        Some(end) => Ok(start..end.min(size)),
        None => Ok(start..size),
    }
}

/// Whether two snapshots of a file's metadata show no write in between.
pub(super) fn same_version(one: &Stat, other: &Stat) -> bool {
    let key = |stat: &Stat| {
        (
            stat.st_dev,
            stat.st_ino,
            stat.st_size,
            stat.st_mtime,
            stat.st_mtime_nsec,
            stat.st_ctime,
            stat.st_ctime_nsec,
        )
    };
    key(one) == key(other)
}

fn file_stat(stat: &Stat, size: u64, sha256: Option<String>) -> FileStat {
    FileStat {
        kind: path::kind(stat),
        size,
        mode: path::permissions(stat),
        mtime: stat.st_mtime,
        sha256,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read as _,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::{super::tests::*, *};

    #[test]
    fn stat_follows_links_and_hashes_only_on_request() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "hello");
        symlink("file", workspace.path("link")).expect("link");
        symlink("nowhere", workspace.path("dangling")).expect("link");
        std::fs::set_permissions(
            workspace.path("file"),
            std::fs::Permissions::from_mode(0o640),
        )
        .expect("mode");
        let stat = workspace.files.stat(b"link", true).expect("stat");
        assert_eq!(
            (stat.kind, stat.size, stat.mode),
            (FileType::File, 5, 0o640)
        );
        assert_eq!(stat.sha256.as_deref(), Some(HELLO));
        assert_eq!(
            workspace.files.stat(b"file", false).expect("stat").sha256,
            None
        );
        assert_eq!(
            workspace.files.stat(b".", true).expect("stat").kind,
            FileType::Dir
        );
        assert_eq!(
            code(workspace.files.stat(b"dangling", true)),
            ErrorCode::NotFound
        );
        assert_eq!(
            workspace.files.stat(b"/dev/null", true).expect("stat").kind,
            FileType::Other
        );
    }

    #[test]
    fn a_file_is_sent_with_its_hash_and_in_ranges() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "hello");
        let read = |start, end| {
            workspace.ask(
                FileOp::Read {
                    path: raw("file"),
                    start,
                    end,
                },
                &[],
            )
        };
        for (start, end, expected) in [
            (0, None, "hello"),
            (1, Some(3), "el"),
            (4, Some(100), "o"),
            (2, Some(2), ""),
        ] {
            let answer = read(start, end);
            assert_eq!(answer.body(), expected.as_bytes());
            assert!(
                matches!(answer.first(), Reply::Stat(stat) if stat.size == 5 && stat.sha256.as_deref() == Some(HELLO))
            );
        }
        assert_eq!(read(5, None).error().code, ErrorCode::RangeNotSatisfiable);
        assert_eq!(
            read(6, Some(9)).error().code,
            ErrorCode::RangeNotSatisfiable
        );
        assert_eq!(read(2, Some(1)).error().code, ErrorCode::InvalidRequest);
    }

    #[test]
    fn an_empty_file_has_an_empty_body() {
        let workspace = TestWorkspace::new();
        workspace.put("empty", "");
        assert_eq!(
            workspace
                .ask(
                    FileOp::Read {
                        path: raw("empty"),
                        start: 0,
                        end: None
                    },
                    &[]
                )
                .body(),
            b""
        );
        assert_eq!(
            workspace
                .ask(
                    FileOp::Read {
                        path: raw("empty"),
                        start: 1,
                        end: None
                    },
                    &[]
                )
                .error()
                .code,
            ErrorCode::RangeNotSatisfiable
        );
    }

    #[test]
    fn a_large_file_is_streamed_whole_and_in_part() {
        let workspace = TestWorkspace::new();
        let content: Vec<u8> = (0..3 * 1024 * 1024_u32).map(|n| (n % 251) as u8).collect();
        workspace.put("large", &content);
        let answer = workspace.ask(
            FileOp::Read {
                path: raw("large"),
                start: 0,
                end: None,
            },
            &[],
        );
        assert!(
            matches!(answer.first(), Reply::Stat(stat) if stat.sha256 == Some(digest::of_bytes(&content)))
        );
        assert!(answer.body() == content);
        let part = workspace.ask(
            FileOp::Read {
                path: raw("large"),
                start: 2_000_000,
                end: Some(2_000_100),
            },
            &[],
        );
        assert_eq!(part.body(), &content[2_000_000..2_000_100]);
    }

    #[test]
    fn a_range_of_a_huge_file_has_no_hash_of_the_whole() {
        let workspace = TestWorkspace::new();
        workspace.put("huge", "start");
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(workspace.path("huge"))
            .expect("opened");
        // A whole terabyte can't be read within a test.
        file.set_len(1 << 40).expect("sparse");
        let read = |start, end| {
            workspace.ask(
                FileOp::Read {
                    path: raw("huge"),
                    start,
                    end,
                },
                &[],
            )
        };
        let part = read(0, Some(5));
        assert!(
            matches!(part.first(), Reply::Stat(stat) if stat.sha256.is_none() && stat.size == 1 << 40),
            "{part:?}"
        );
        assert_eq!(part.body(), b"start");
        assert_eq!(read((1 << 40) - 3, Some(u64::MAX)).body(), [0; 3]);
        assert_eq!(
            read(1 << 40, Some(u64::MAX)).error().code,
            ErrorCode::RangeNotSatisfiable
        );
    }

    #[test]
    fn only_regular_files_are_read_and_a_fifo_does_not_hang() {
        let workspace = TestWorkspace::new();
        workspace.fifo("fifo");
        for path in ["fifo", ".", "/dev/zero", "/dev/tty"] {
            let error = workspace
                .ask(
                    FileOp::Read {
                        path: raw(path),
                        start: 0,
                        end: None,
                    },
                    &[],
                )
                .error();
            assert_eq!(error.code, ErrorCode::NotAFile, "{path}: {}", error.message);
        }
        let _socket =
            std::os::unix::net::UnixListener::bind(workspace.path("socket")).expect("bound");
        assert_eq!(
            workspace
                .ask(
                    FileOp::Read {
                        path: raw("socket"),
                        start: 0,
                        end: None
                    },
                    &[]
                )
                .error()
                .code,
            ErrorCode::NotAFile
        );
        assert_eq!(
            workspace
                .ask(
                    FileOp::Read {
                        path: raw("missing"),
                        start: 0,
                        end: None
                    },
                    &[]
                )
                .error()
                .code,
            ErrorCode::NotFound
        );
    }

    #[test]
    fn files_without_a_size_are_read_too() {
        let workspace = TestWorkspace::new();
        let answer = workspace.ask(
            FileOp::Read {
                path: raw("/proc/version"),
                start: 0,
                end: None,
            },
            &[],
        );
        assert!(answer.body().starts_with(b"Linux version"));
        assert!(
            matches!(answer.first(), Reply::Stat(stat) if stat.size == answer.body().len() as u64)
        );
    }

    #[test]
    fn a_change_between_two_snapshots_is_noticed_by_size_or_time() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "one");
        let before = path::stat(&workspace.path("file")).expect("stat");
        assert!(same_version(
            &before,
            &path::stat(&workspace.path("file")).expect("stat")
        ));
        workspace.put("file", "three");
        assert!(!same_version(
            &before,
            &path::stat(&workspace.path("file")).expect("stat")
        ));
    }

    /// Reads a file of 3 MiB and calls `meddle` after the first byte of the reply, long before the
    /// last byte.
    fn read_while(meddle: impl FnOnce(&TestWorkspace)) -> (Vec<u8>, Result<(), ErrorCode>) {
        let workspace = TestWorkspace::new();
        workspace.put("large", vec![7; 3 * 1024 * 1024]);
        let (agent, mut worker) = std::os::unix::net::UnixStream::pair().expect("socket pair");
        std::thread::scope(|scope| {
            let files = &workspace.files;
            let agent = scope.spawn(move || {
                files.serve(
                    FileOp::Read {
                        path: raw("large"),
                        start: 0,
                        end: None,
                    },
                    &mut Peer::from_stream(agent),
                )
            });
            let mut first = [0];
            worker.read_exact(&mut first).expect("an answer");
            meddle(&workspace);
            let mut bytes = first.to_vec();
            worker.read_to_end(&mut bytes).expect("received");
            agent
                .join()
                .expect("the agent's thread")
                .expect("the connection holds");
            let answer = decode(&bytes);
            let end = if answer.has_ended() {
                Ok(())
            } else {
                Err(answer.error().code)
            };
            (answer.data().to_vec(), end)
        })
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_ends_in_an_error() {
        let overwritten = read_while(|workspace| workspace.put("large", vec![8; 3 * 1024 * 1024]));
        assert_eq!(overwritten.1, Err(ErrorCode::Internal));
        let cut = read_while(|workspace| workspace.put("large", "short"));
        assert_eq!(cut.1, Err(ErrorCode::Internal));
    }

    #[test]
    fn a_file_that_grows_is_read_as_it_was() {
        let (data, end) = read_while(|workspace| {
            let mut file = std::fs::OpenOptions::new()
                .append(true)
                .open(workspace.path("large"))
                .expect("opened");
            io::Write::write_all(&mut file, b"more").expect("appended");
        });
        assert_eq!((data.len(), end), (3 * 1024 * 1024, Ok(())));
    }
}

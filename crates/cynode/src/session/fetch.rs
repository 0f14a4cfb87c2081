//! Fetches a file or a directory of a workspace into a local directory, as a whole or not at all.

use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use cynode_api::{API_VERSION, ErrorCode, ExportFormat, ExportRequest, FileType, SessionId};
use cynode_client::{FileBody, SessionClient};
use cynode_patch::Location;
use tar::{EntryType, Header};

use crate::{
    apply::{self, CommitError, FilesError, Received},
    archive::{self, PieceReader},
    failure::{Failure, INTERNAL, USAGE},
    output::Progress,
    sanitize,
    staged::unless_interrupted,
};

const WORKSPACE: &str = "/workspace";
/// The unit of tar.
const BLOCK_BYTES: u64 = 512;
const END_OF_ARCHIVE: [u8; 1_024] = [0; 1_024];

/// A path of the workspace, relative to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkspacePath(PathBuf);

impl WorkspacePath {
    /// Parses a path that is relative to the workspace, or absolute and in it.
    pub fn parse(path: &Path) -> Result<Self, Failure> {
        let refused = |reason: &str| {
            let path = sanitize::line(&path.to_string_lossy());
            Failure::usage(format!("{path} can't be fetched: {reason}"))
                .remedy("Name a file or a directory of the workspace.")
        };
        let relative = if path.is_absolute() {
            path.strip_prefix(WORKSPACE)
                .map_err(|_| refused("it is not in /workspace"))?
        } else {
            path
        };
        let bytes = relative.as_os_str().as_bytes();
        let parts: Vec<&[u8]> = bytes
            .split(|byte| *byte == b'/')
            .filter(|part| !part.is_empty() && *part != b".")
            .collect();
        if parts.is_empty() {
            return Ok(Self(PathBuf::new()));
        }
        let location = Location::parse(&parts.join(&b'/')).map_err(refused)?;
        Ok(Self(PathBuf::from(OsStr::from_bytes(location.as_bytes()))))
    }

    fn in_session(&self) -> PathBuf {
        Path::new(WORKSPACE).join(&self.0)
    }
}

impl std::fmt::Display for WorkspacePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.as_os_str().is_empty() {
            f.write_str(".")
        } else {
            f.write_str(&sanitize::line(&self.0.to_string_lossy()))
        }
    }
}

/// The type of a file; `None` if it does not exist.
pub async fn kind(
    client: &SessionClient,
    id: SessionId,
    path: &Path,
) -> Result<Option<FileType>, Failure> {
    match client.head_file(id, path).await {
        Ok(info) => Ok(Some(info.kind.unwrap_or(FileType::File))),
        Err(error) => match error.status() {
            Some(404) => {
                // A HEAD response has no body, so check for a missing session.
                client.get_session(id).await?;
                Ok(None)
            }
            // Not a regular file.
            Some(409) => match client.get_file(id, path).await {
                Err(error) if error.is(ErrorCode::NotAFile) => Ok(Some(FileType::Dir)),
                Err(error) => Err(error.into()),
                Ok(_) => Ok(Some(FileType::File)),
            },
            // GET has a body with the reason.
            _ => Err(client
                .get_file(id, path)
                .await
                .err()
                .unwrap_or(error)
                .into()),
        },
    }
}

/// Fetches a path to the same path below `directory`. Calls `show` with what would change before
/// anything does.
pub async fn fetch(
    client: &SessionClient,
    id: SessionId,
    path: &WorkspacePath,
    directory: &Path,
    show: impl FnOnce(&Received) + Send + 'static,
) -> Result<Received, Failure> {
    let (sender, receiver) = archive::channel();
    let (prefix, download) = unless_interrupted(open(client, id, path)).await?;
    let directory = directory.to_owned();
    let unpacker = tokio::task::spawn_blocking(move || {
        apply::receive(&directory, &prefix, PieceReader::new(receiver), show)
    });
    let sent = unless_interrupted(download.send(&sender)).await;
    if sent.is_err() {
        // An archive may end after any entry: this end is none.
        let interrupted = io::Error::other("the transfer was interrupted");
        drop(sender.send(Err(interrupted)).await);
    }
    drop(sender);
    // It removes what it staged.
    let received = unpacker
        .await
        .map_err(|error| Failure::internal(error.to_string()))?;
    match (sent, received) {
        // The reader stopped, and says why.
        (_, Err(error)) if !matches!(error, FilesError::Read(_)) => Err(failure(&error)),
        (Err(error), _) => Err(error),
        (Ok(()), received) => received.map_err(|error| failure(&error)),
    }
}

/// A file or an archive on its way.
struct Download {
    body: FileBody,
    /// What comes before a single file, and the file's size.
    file: Option<(Vec<u8>, u64)>,
}

/// Begins a download. Also returns the directory that it belongs to.
async fn open(
    client: &SessionClient,
    id: SessionId,
    path: &WorkspacePath,
) -> Result<(Vec<u8>, Download), Failure> {
    let full_path = path.in_session();
    let missing = || {
        Failure::new(
            USAGE,
            "not_found",
            format!("the workspace has no file or directory {path}"),
        )
    };
    let prefix = |path: &Path| path.as_os_str().as_bytes().to_vec();
    if kind(client, id, &full_path).await?.ok_or_else(missing)? == FileType::Dir {
        let text = full_path.to_str().ok_or_else(|| {
            Failure::usage(format!("the directory {path} has a name that is not UTF-8"))
                .remedy("Fetch a directory above it.")
        })?;
        let request = ExportRequest {
            version: Some(API_VERSION),
            format: ExportFormat::Tar,
            base: None,
            path: Some(text.to_owned()),
        };
        let body = client.export(id, &request).await?;
        return Ok((prefix(&path.0), Download { body, file: None }));
    }
    let (Some(name), Some(parent)) = (path.0.file_name(), path.0.parent()) else {
        return Err(missing());
    };
    let body = client.get_file(id, &full_path).await?;
    let size = body
        .info
        .size
        .ok_or_else(|| Failure::internal(format!("the server does not say how long {path} is")))?;
    let header = header(Path::new(name), body.info.mode.unwrap_or(0o644), size)?;
    let file = Some((header, size));
    Ok((prefix(parent), Download { body, file }))
}

/// The beginning of an archive of one file.
fn header(name: &Path, mode: u32, size: u64) -> io::Result<Vec<u8>> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(mode & 0o777);
    header.set_size(size);
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_data(&mut header, name, io::empty())?;
    Ok(builder.get_ref().clone())
}

type Pieces = tokio::sync::mpsc::Sender<io::Result<bytes::Bytes>>;

impl Download {
    /// Passes an archive on, until its reader has enough.
    async fn send(mut self, to: &Pieces) -> Result<(), Failure> {
        let progress = Progress::start("fetching");
        let mut total = 0;
        if let Some((header, _)) = &self.file {
            drop(to.send(Ok(header.clone().into())).await);
        }
        while let Some(piece) = self.body.chunk().await? {
            total += piece.len() as u64;
            progress.set_bytes("fetching", total);
            if to.send(Ok(piece)).await.is_err() {
                return Ok(());
            }
        }
        if let Some((_, size)) = self.file {
            let padding = size.next_multiple_of(BLOCK_BYTES) - size;
            let mut end = vec![0; usize::try_from(padding).unwrap_or(0)];
            end.extend(END_OF_ARCHIVE);
            drop(to.send(Ok(end.into())).await);
        }
        Ok(())
    }
}

fn failure(error: &FilesError) -> Failure {
    match error {
        FilesError::Refused(_) => Failure::new(INTERNAL, "unsafe_archive", error.to_string())
            .remedy("Fetch single files: an entry leaves the directory, or is malformed."),
        FilesError::TooLarge(_) => Failure::new(USAGE, "too_large", error.to_string())
            .remedy("Fetch parts of it, or pack it in the sandbox."),
        FilesError::InTheWay { .. } => Failure::new(USAGE, "in_the_way", error.to_string())
            .remedy("Remove or rename what is there."),
        FilesError::Commit(commit) => {
            let failure = Failure::new(INTERNAL, "not_fetched", error.to_string());
            match commit {
                CommitError::Partial { .. } => {
                    failure.remedy("Move the old files back from there, and remove the directory.")
                }
                _ => failure.remedy("Remove what is in the way, or make room, and retry."),
            }
        }
        FilesError::Read(source) | FilesError::Directory(source) => {
            Failure::internal(format!("{error}: {source}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_in_the_workspace() {
        let parse = |path: &str| WorkspacePath::parse(Path::new(path)).map(|path| path.to_string());
        for (path, expected) in [
            ("dist", "dist"),
            ("./dist/", "dist"),
            ("a//b/./c", "a/b/c"),
            ("/workspace/out.txt", "out.txt"),
            ("/workspace", "."),
            (".", "."),
            ("a b", "a b"),
            ("out ", "out "),
            (" ", " "),
            ("out /", "out "),
        ] {
            assert_eq!(parse(path).ok().as_deref(), Some(expected), "{path}");
        }
        for path in [
            "/etc/passwd",
            "/workspacex",
            "..",
            "a/../b",
            ".git/config",
            "sub/.GIT",
        ] {
            assert!(parse(path).is_err(), "{path}");
        }
    }

    #[test]
    fn one_file_is_an_archive_whatever_its_name() {
        for name in ["a", &"long".repeat(60)] {
            let mut archive = header(Path::new(name), 0o6755, 3).expect("a header");
            archive.extend(b"abc");
            archive.resize(archive.len().next_multiple_of(512), 0);
            archive.extend(END_OF_ARCHIVE);
            let root = tempfile::tempdir().expect("a directory");
            let received =
                apply::receive(root.path(), b"sub", &archive[..], |_| {}).expect("received");
            assert_eq!(received.files[0].path, format!("sub/{name}"));
            let written = fs_err::read(root.path().join("sub").join(name)).expect("there");
            assert_eq!(written, b"abc");
        }
    }
}

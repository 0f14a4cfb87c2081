//! `session cp`: copies files and trees into and out of a session, like `cp`.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::MetadataExt,
    },
    path::{Path, PathBuf},
    process::ExitCode,
};

use cynode_api::{
    API_VERSION, ErrorCode, ExportFormat, ExportRequest, FileType, ListRequest, MkdirRequest,
    SessionId, file_limits, is_session_name,
};
use cynode_client::{FileBody, PutOptions, SessionClient};
use cynode_patch::spells_git;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{
    stdio,
    transfer::{
        body, feed, join_transfer, local_failure, print_flagged, report_skipped, send_tree,
    },
};
use crate::{
    archive::{self, PieceReader, PieceWriter},
    cli::Cp,
    failure::{Failure, INTERNAL, USAGE},
    output::{self, Progress},
    resolve, sanitize,
    staged::{StagedFile, unless_interrupted},
    umask::umask,
};

/// Digits of an id that stand for a session: fewer are a local file's name.
const MIN_ID_PART: usize = 4;

/// One side of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CopySide {
    /// `SESSION:PATH`, or `:PATH` for the session of the directory.
    Session(Option<String>, PathBuf),
    Local(PathBuf),
    /// `-`.
    Stdio,
}

impl CopySide {
    fn parse(text: &OsStr) -> Self {
        let bytes = text.as_bytes();
        if bytes == b"-" {
            return Self::Stdio;
        }
        let session = bytes
            .iter()
            .position(|byte| *byte == b':')
            .and_then(|colon| Some((colon, std::str::from_utf8(&bytes[..colon]).ok()?)))
            .filter(|(_, name)| {
                let is_part = name.len() >= MIN_ID_PART && resolve::id_part(name).is_some();
                matches!(*name, "" | ".") || is_session_name(name) || is_part
            });
        let Some((colon, name)) = session else {
            return Self::Local(text.into());
        };
        let path = OsString::from_vec(bytes[colon + 1..].to_vec());
        Self::Session(
            (!name.is_empty()).then(|| name.to_owned()),
            if path.is_empty() {
                PathBuf::from(".")
            } else {
                path.into()
            },
        )
    }
}

pub async fn run(client: &SessionClient, args: &Cp) -> Result<ExitCode, Failure> {
    let (session, path, local, is_download) =
        match (CopySide::parse(&args.source), CopySide::parse(&args.target)) {
            (CopySide::Session(..), CopySide::Session(..)) => {
                return Err(Failure::usage("both sides are in a session")
                    .remedy("Copy to a local file first, or run cp in a session."));
            }
            (CopySide::Session(session, path), target) => (session, path, target, true),
            (source, CopySide::Session(session, path)) => (session, path, source, false),
            _ => {
                return Err(Failure::usage("neither side is in a session").remedy(
                    "Write one side as SESSION:PATH, or as :PATH for the session of this \
                     directory.",
                ));
            }
        };
    let remote = Remote {
        client,
        id: super::target(client, session.as_deref()).await?,
        path,
    };
    if is_download {
        remote.download(local, args).await?;
    } else {
        remote.upload(local, args).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A path in a session.
struct Remote<'a> {
    client: &'a SessionClient,
    id: SessionId,
    path: PathBuf,
}

impl Remote<'_> {
    async fn kind(&self, path: &Path) -> Result<Option<FileType>, Failure> {
        super::fetch::kind(self.client, self.id, path).await
    }

    /// Like `cp`: copies into a target directory, or replaces a target file.
    async fn upload(&self, source: CopySide, args: &Cp) -> Result<(), Failure> {
        let is_dir =
            ends_in_slash(&self.path) || self.kind(&self.path).await? == Some(FileType::Dir);
        let source = match source {
            CopySide::Local(path) => path,
            _ if is_dir => {
                return Err(Failure::usage("standard input needs a file as its target")
                    .remedy("Add a file name to the path in the session."));
            }
            _ => return self.upload_stdin().await,
        };
        let metadata = fs_err::metadata(&source).map_err(|error| local_failure(&error))?;
        let target = if is_dir {
            into_dir(&self.path, &source)
        } else {
            self.path.clone()
        };
        if metadata.is_file() {
            return self.upload_file(&source, &target, &metadata).await;
        }
        if !metadata.is_dir() {
            return Err(Failure::usage(format!(
                "{} is neither a file nor a directory",
                source.display()
            )));
        }
        if !args.recursive {
            return Err(needs_recursive(&source));
        }
        self.upload_tree(&source, &target).await
    }

    async fn upload_stdin(&self) -> Result<(), Failure> {
        let (to, from) = archive::channel();
        let reader = tokio::spawn(async move {
            let mut stdin = tokio::io::stdin();
            loop {
                let mut piece = bytes::BytesMut::with_capacity(64 * 1024);
                let read = stdin.read_buf(&mut piece).await;
                let at_end = matches!(read, Ok(0) | Err(_));
                let sent = match read {
                    Ok(0) => break,
                    Ok(_) => to.send(Ok(piece.freeze())).await,
                    Err(error) => to.send(Err(error)).await,
                };
                if at_end || sent.is_err() {
                    break;
                }
            }
        });
        let progress = Progress::start("copying");
        let put = self
            .client
            .put_file(
                self.id,
                &self.path,
                body(from, progress),
                &PutOptions::default(),
            )
            .await;
        reader.abort();
        put?;
        Ok(())
    }

    async fn upload_file(
        &self,
        source: &Path,
        target: &Path,
        metadata: &std::fs::Metadata,
    ) -> Result<(), Failure> {
        let mode = metadata.mode() & 0o777;
        let is_large = metadata.len() > file_limits::MAX_PUT_BYTES;
        let (to, from) = archive::channel();
        let progress = Progress::start("copying");
        let path = source.to_owned();
        if !is_large {
            let reader = tokio::task::spawn_blocking(move || {
                feed(PieceWriter::new(to), |writer| {
                    io::copy(&mut fs_err::File::open(&path)?, writer).map(drop)
                })
            });
            let options = PutOptions {
                mode: Some(mode),
                ..PutOptions::default()
            };
            let sent = self
                .client
                .put_file(self.id, target, body(from, progress), &options)
                .await
                .map(drop);
            return join_transfer(reader.await, sent).map(drop);
        }
        // Too large for a PUT: import an archive of one entry, which has no such limit.
        let (parent, name) = split(target)?;
        self.mkdir(&parent).await?;
        let reader = tokio::task::spawn_blocking(move || {
            feed(PieceWriter::new(to), |writer| {
                archive::pack_file(&path, &name, writer)
            })
        });
        let sent = self
            .client
            .import(self.id, &parent, body(from, progress))
            .await;
        join_transfer(reader.await, sent).map(|((), imported)| print_flagged(&imported.flags))
    }

    async fn upload_tree(&self, source: &Path, target: &Path) -> Result<(), Failure> {
        self.mkdir(target).await?;
        let (imported, skipped) = send_tree(source, async |body| {
            self.client.import(self.id, target, body).await
        })
        .await?;
        print_flagged(&imported.flags);
        report_skipped(&skipped, skipped.len() as u64)
    }

    async fn mkdir(&self, path: &Path) -> Result<(), Failure> {
        let path = utf8(path)?;
        Ok(self
            .client
            .make_dir(
                self.id,
                &MkdirRequest {
                    version: Some(API_VERSION),
                    path,
                    parents: true,
                },
            )
            .await?)
    }

    async fn download(&self, target: CopySide, args: &Cp) -> Result<(), Failure> {
        if args.recursive && self.kind(&self.path).await? == Some(FileType::Dir) {
            return match target {
                CopySide::Local(target) => self.download_tree(&target).await,
                _ => Err(
                    Failure::usage("a directory can't be copied to standard output")
                        .remedy("Choose a local directory."),
                ),
            };
        }
        let file = match self.client.get_file(self.id, &self.path).await {
            Err(error)
                if error.is(ErrorCode::NotAFile)
                    && self.kind(&self.path).await? == Some(FileType::Dir) =>
            {
                return Err(needs_recursive(&self.path));
            }
            file => file?,
        };
        match target {
            CopySide::Local(target) if target.is_dir() => {
                let target = into_dir(&target, &self.path);
                refuse_git(&target)?;
                save(file, &target).await
            }
            CopySide::Local(target) if ends_in_slash(&target) => Err(Failure::usage(format!(
                "{} is not a directory",
                target.display()
            ))),
            CopySide::Local(target) => {
                refuse_git(&target)?;
                save(file, &target).await
            }
            _ => show(file, args.raw).await,
        }
    }

    /// About the bytes of a tree's archive, if somebody watches and the tree is not too large to
    /// list.
    async fn tree_bytes(&self) -> Option<u64> {
        if !output::shows_progress() {
            return None;
        }
        let request = ListRequest {
            version: Some(API_VERSION),
            path: Some(utf8(&self.path).ok()?),
            depth: Some(file_limits::MAX_DEPTH),
            max_entries: Some(file_limits::MAX_ENTRIES),
            hidden: Some(true),
            ..ListRequest::default()
        };
        let listed = self.client.list_files(self.id, &request).await.ok()?;
        let sizes = listed
            .entries
            .iter()
            .map(|entry| archive::entry_bytes(entry.size));
        (!listed.truncated).then(|| sizes.sum())
    }

    async fn download_tree(&self, target: &Path) -> Result<(), Failure> {
        let target = if target.is_dir() {
            into_dir(target, &self.path)
        } else {
            target.to_owned()
        };
        refuse_git(&target)?;
        let request = ExportRequest {
            version: Some(API_VERSION),
            format: ExportFormat::Tar,
            base: None,
            path: Some(utf8(&self.path)?),
        };
        let total = self.tree_bytes().await;
        let mut tar = self.client.export(self.id, &request).await?;
        let (to, from) = archive::channel();
        let unpacker = tokio::task::spawn_blocking(move || {
            archive::unpack(PieceReader::new(from), &target, umask(), |_| {})
        });
        let progress = Progress::of_total("copying", total);
        let mut total = 0;
        let received = loop {
            match tar.chunk().await {
                Ok(Some(piece)) => {
                    total += piece.len() as u64;
                    progress.set_bytes("copying", total);
                    // The unpacker failed, and its result says why.
                    if to.send(Ok(piece)).await.is_err() {
                        break Ok(());
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => {
                    drop(to.send(Err(io::Error::other(error.chain()))).await);
                    break Err(error);
                }
            }
        };
        drop(to);
        let unpacked = unpacker
            .await
            .map_err(|error| Failure::internal(error.to_string()))?;
        received?;
        let unpacked = unpacked.map_err(|error| match error {
            archive::UnpackError::Refused(_) => {
                Failure::new(INTERNAL, "unsafe_archive", error.to_string()).remedy(
                    "Copy single files: an entry leaves the target directory, or is malformed.",
                )
            }
            archive::UnpackError::TooDeep(_) | archive::UnpackError::TooManyDirectories => {
                Failure::new(USAGE, "too_large", error.to_string())
                    .remedy("Copy its subdirectories one by one, or pack it in the session.")
            }
            archive::UnpackError::Target(error) => local_failure(&error),
            _ => Failure::internal(error.to_string()),
        })?;
        for directory in &unpacked.git_directories {
            output::message(&format!(
                "cynode: not copied: {}: git runs programs that are named there",
                sanitize::line(&String::from_utf8_lossy(directory))
            ));
        }
        report_skipped(&unpacked.skipped, unpacked.skipped_count)
    }
}

/// Refuses to write into a `.git` directory on this machine: its configuration and its hooks name
/// programs that git runs.
fn refuse_git(target: &Path) -> Result<(), Failure> {
    // What exists may be a link, or the current directory.
    let above = target.parent().filter(|above| *above != Path::new(""));
    let resolved = fs_err::canonicalize(target)
        .or_else(|_| fs_err::canonicalize(above.unwrap_or(Path::new("."))))
        .ok();
    let is_git = |path: &Path| path.iter().any(|part| spells_git(part.as_bytes()));
    if !is_git(target) && !resolved.as_deref().is_some_and(is_git) {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{} is in a .git directory, where git finds programs to run",
        sanitize::line(&target.to_string_lossy())
    ))
    .remedy("Copy it to another name, read it, and move it."))
}

/// Writes a local file atomically: a failed copy keeps the existing file.
async fn save(mut file: FileBody, target: &Path) -> Result<(), Failure> {
    let mode = file.info.mode.unwrap_or(0o644) & 0o777 & !umask().bits();
    let existing = fs_err::metadata(target).ok();
    if existing
        .as_ref()
        .is_some_and(|existing| !existing.is_file())
    {
        // Write to a device or a pipe instead of replacing it.
        let mut out = fs_err::tokio::OpenOptions::new()
            .write(true)
            .open(target)
            .await
            .map_err(|error| local_failure(&error))?;
        return copy(&mut file, &mut out).await;
    }
    let target = if existing.is_some() {
        fs_err::canonicalize(target).map_err(|error| local_failure(&error))?
    } else {
        target.to_owned()
    };
    unless_interrupted(async {
        let (staged, out) = StagedFile::create(&target, 0o600)?;
        copy(
            &mut file,
            &mut tokio::fs::File::from_std(out.into_parts().0),
        )
        .await?;
        fs_err::set_permissions(
            staged.path(),
            std::os::unix::fs::PermissionsExt::from_mode(mode),
        )
        .map_err(|error| local_failure(&error))?;
        staged.commit().map_err(|error| local_failure(&error))
    })
    .await
}

async fn copy(
    file: &mut FileBody,
    out: &mut (impl tokio::io::AsyncWrite + Unpin),
) -> Result<(), Failure> {
    let progress = Progress::start("copying");
    let mut total = 0;
    while let Some(piece) = file.chunk().await? {
        out.write_all(&piece).await?;
        total += piece.len() as u64;
        progress.set_bytes("copying", total);
    }
    Ok(out.flush().await?)
}

async fn show(mut file: FileBody, raw: bool) -> Result<(), Failure> {
    let mut stdout = stdio::stdout(raw);
    while let Some(piece) = file.chunk().await? {
        stdout.write(&piece).await?;
    }
    Ok(stdout.finish().await?)
}

fn ends_in_slash(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/")
}

/// The path of `source` in `directory`. A source without a name (`.`, `..`, `/`) stands for its
/// contents.
fn into_dir(directory: &Path, source: &Path) -> PathBuf {
    // `a/.` means the contents of `a`, but `Path::file_name` returns `a`.
    let last = source
        .as_os_str()
        .as_bytes()
        .rsplit(|byte| *byte == b'/')
        .find(|part| !part.is_empty());
    match last {
        None | Some(b"." | b"..") => directory.to_owned(),
        Some(name) => directory.join(OsStr::from_bytes(name)),
    }
}

fn split(path: &Path) -> Result<(PathBuf, PathBuf), Failure> {
    let name = path
        .file_name()
        .ok_or_else(|| Failure::usage(format!("{} has no file name", path.display())))?;
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    Ok((parent.to_owned(), name.into()))
}

fn utf8(path: &Path) -> Result<String, Failure> {
    path.to_str().map(ToOwned::to_owned).ok_or_else(|| {
        Failure::usage(format!(
            "{} is not UTF-8, which copying a directory requires",
            path.display()
        ))
    })
}

fn needs_recursive(path: &Path) -> Failure {
    Failure::usage(format!("{} is a directory", path.display()))
        .remedy("Add -r to copy it recursively.")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "01890000-0000-7000-8000-000000000001";

    #[test]
    fn a_side_is_in_a_session_with_a_name_or_digits_before_the_colon() {
        let parse = |text: &str| CopySide::parse(OsStr::new(text));
        let session =
            |name: &str, path: &str| CopySide::Session(Some(name.to_owned()), path.into());
        assert_eq!(parse(&format!("{ID}:a/b:c")), session(ID, "a/b:c"));
        assert_eq!(parse(&format!("{ID}:")), session(ID, "."));
        assert_eq!(parse(&format!("{ID}:/etc/x")), session(ID, "/etc/x"));
        assert_eq!(parse("brave-otter:x"), session("brave-otter", "x"));
        assert_eq!(parse("7f3a:x"), session("7f3a", "x"));
        assert_eq!(parse(".:x"), session(".", "x"));
        assert_eq!(parse(":x"), CopySide::Session(None, "x".into()));
        assert_eq!(parse(":"), CopySide::Session(None, ".".into()));
        assert_eq!(parse("-"), CopySide::Stdio);
        for local in [
            "./a:b",
            "host:path",
            "c:x",
            "abc:x",
            ID,
            "x",
            "./brave-otter:x",
            &format!("./{ID}:a"),
        ] {
            assert_eq!(parse(local), CopySide::Local(local.into()));
        }
        assert_eq!(
            CopySide::parse(OsStr::from_bytes(&[ID.as_bytes(), b":\xff"].concat())),
            CopySide::Session(Some(ID.to_owned()), OsStr::from_bytes(b"\xff").into())
        );
    }

    #[test]
    fn nothing_is_copied_to_a_git_directory() {
        let root = tempfile::tempdir().expect("a directory");
        fs_err::create_dir_all(root.path().join("repo/.git/hooks")).expect("made");
        std::os::unix::fs::symlink("repo/.git", root.path().join("link")).expect("link");
        for refused in [
            "repo/.git",
            "repo/.git/config",
            "repo/.GIT/hooks/x",
            "repo/git~1",
            "link/config",
        ] {
            assert!(refuse_git(&root.path().join(refused)).is_err(), "{refused}");
        }
        for accepted in ["repo/.github", "repo/x", "repo/.gitignore", "missing/x"] {
            refuse_git(&root.path().join(accepted)).expect(accepted);
        }
    }

    #[test]
    fn a_directory_as_target_takes_the_name_of_the_source() {
        for (directory, source, expected) in [
            ("d", "a/b.txt", "d/b.txt"),
            ("d/", "b", "d/b"),
            ("d", "a/", "d/a"),
            ("d", "a/.", "d/"),
            ("d", ".", "d"),
            ("d", "/", "d"),
            ("d", "..", "d"),
        ] {
            assert_eq!(
                into_dir(Path::new(directory), Path::new(source)),
                Path::new(expected),
                "{directory} {source}"
            );
        }
    }

    #[tokio::test]
    async fn a_failed_producer_ends_the_stream_with_an_error() {
        let (to, mut from) = archive::channel();
        let failed = tokio::task::spawn_blocking(move || {
            feed(PieceWriter::new(to), |writer| {
                io::Write::write_all(writer, b"half")?;
                Err::<(), _>(io::Error::other("no more"))
            })
        });
        let mut pieces = Vec::new();
        while let Some(piece) = from.recv().await {
            pieces.push(piece.is_ok());
        }
        assert_eq!(pieces.last(), Some(&false));
        assert!(failed.await.expect("joined").is_err());
    }
}

//! Writes a file atomically.
//!
//! Invariants: nothing changes until the worker's `End`, not even a parent directory; preconditions
//! are checked before the body is read and again right before the new content is published;
//! `If-None-Match` is free of races.

use std::{
    io::{self, Write as _},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use cynode_api::{ErrorCode, FileType};
use cynode_sba_proto::WriteReport;
use rustix::{
    fs::{Access, AtFlags, CWD, Mode, OFlags, Stat, accessat, openat, readlinkat},
    io::Errno,
};

use super::{
    digest,
    error::{Failure, FailureContext, Outcome, shown},
    path::{self, Files},
    read::same_version,
    staged::StagedFile,
};

/// The number of links followed from one path.
pub(super) const MAX_LINKS: usize = 40;

/// The source of a body: chunks, then `None`. An error means that the sender disconnected.
pub(super) type Body<'a> = &'a mut dyn FnMut() -> io::Result<Option<Vec<u8>>>;

#[derive(Clone, Debug, Default)]
pub(super) struct Conditions {
    /// One of these hashes (in hex) must be the file's, or `*` matches any file.
    pub(super) if_match: Option<Vec<String>>,
    /// The path must not exist yet.
    pub(super) if_none_match: bool,
}

/// An existing file.
#[derive(Debug)]
pub(super) struct ExistingFile {
    stat: Stat,
    pub(super) sha256: Option<String>,
}

impl Files {
    pub(super) fn write(
        &self,
        path: &[u8],
        mode: Option<u32>,
        conditions: &Conditions,
        max_bytes: u64,
        body: Body<'_>,
    ) -> Outcome<WriteReport> {
        let full_path = self.locate(path)?;
        if path.ends_with(b"/") {
            return Err(path::not_a_file(&full_path, FileType::Dir));
        }
        let target = follow(&full_path)?;
        let (parent, name) = path::split(&target)?;
        let mut existing = find(&target, conditions)?;
        conditions.check(existing.as_ref(), &full_path)?;

        // The new content is staged in the deepest existing directory: it is on the same file
        // system, and nothing changes yet.
        let mut staged = StagedFile::new(deepest_directory(parent)?)
            .doing("writing", path::bytes(&full_path))?;
        let mut hasher = digest::Hasher::default();
        let mut size = 0;
        while let Some(piece) = body().map_err(Failure::Connection)? {
            size += piece.len() as u64;
            if size > max_bytes {
                return Err(Failure::new(
                    ErrorCode::TooLarge,
                    format!(
                        "{} would be larger than {max_bytes} bytes",
                        shown(path::bytes(&full_path))
                    ),
                ));
            }
            hasher.update(&piece);
            staged
                .file()
                .write_all(&piece)
                .doing("writing", path::bytes(&full_path))?;
        }

        path::make_directories(parent)?;
        let directory =
            open_directory(parent).doing("opening the directory", path::bytes(parent))?;
        if !unchanged(&target, existing.as_ref(), conditions)? {
            existing = find(&target, conditions)?;
        }
        conditions.check(existing.as_ref(), &full_path)?;
        let mode = mode
            .or(existing
                .as_ref()
                .map(|existing| path::permissions(&existing.stat)))
            .unwrap_or(0o644)
            & 0o1777;
        match staged.publish(&directory, name, mode, !conditions.if_none_match) {
            Ok(()) => Ok(WriteReport {
                sha256: hasher.hex(),
                size,
                mode,
                created: existing.is_none(),
                sha256_before: existing.and_then(|existing| existing.sha256),
            }),
            Err(Errno::EXIST) if conditions.if_none_match => Err(exists(&full_path)),
            Err(errno) => Err(Failure::system(errno, "writing", path::bytes(&full_path))),
        }
    }
}

impl Conditions {
    fn names_hashes(&self) -> bool {
        self.if_match
            .as_ref()
            .is_some_and(|list| list.iter().any(|entry| entry != "*"))
    }

    pub(super) fn check(&self, existing: Option<&ExistingFile>, full_path: &Path) -> Outcome<()> {
        if self.if_none_match && existing.is_some() {
            return Err(exists(full_path));
        }
        let Some(list) = &self.if_match else {
            return Ok(());
        };
        let full_path = shown(path::bytes(full_path));
        let Some(existing) = existing else {
            return Err(Failure::new(
                ErrorCode::PreconditionFailed,
                format!("{full_path} does not exist"),
            ));
        };
        let fits = |entry: &String| {
            entry == "*"
                || existing
                    .sha256
                    .as_ref()
                    .is_some_and(|sha256| sha256.eq_ignore_ascii_case(entry))
        };
        if list.iter().any(fits) {
            return Ok(());
        }
        let sha256 = existing.sha256.as_deref().unwrap_or("unknown");
        Err(Failure::new(
            ErrorCode::PreconditionFailed,
            format!("{full_path} does not match the precondition; its sha256 is {sha256}"),
        ))
    }
}

fn exists(full_path: &Path) -> Failure {
    Failure::new(
        ErrorCode::PreconditionFailed,
        format!("{} already exists", shown(path::bytes(full_path))),
    )
}

/// The regular file at `target`, if any, with its hash for conditions and change reports.
pub(super) fn find(target: &Path, conditions: &Conditions) -> Outcome<Option<ExistingFile>> {
    let Some(stat) = path::stat_if_any(target)? else {
        return Ok(None);
    };
    if path::kind(&stat) != FileType::File {
        return Err(path::not_a_file(target, path::kind(&stat)));
    }
    // Replacing a file needs no write permission on it. A read-only file is meant to stay, so
    // require the permission anyway.
    accessat(CWD, target, Access::WRITE_OK, AtFlags::empty())
        .doing("writing", path::bytes(target))?;
    if conditions.names_hashes() {
        return find_any(target);
    }
    let sha256 = path::open_file(target)
        .ok()
        .and_then(|(file, _)| digest::for_record(&file));
    Ok(Some(ExistingFile { stat, sha256 }))
}

/// Any file at `full_path`, with its hash if it is a regular file.
pub(super) fn find_any(full_path: &Path) -> Outcome<Option<ExistingFile>> {
    let Some(stat) = path::stat_if_any(full_path)? else {
        return Ok(None);
    };
    if path::kind(&stat) != FileType::File {
        return Ok(Some(ExistingFile { stat, sha256: None }));
    }
    let (file, stat) = path::open_file(full_path)?;
    let (sha256, _) =
        digest::of_file(&file, path::size(&stat)).doing("reading", path::bytes(full_path))?;
    Ok(Some(ExistingFile {
        stat,
        sha256: Some(sha256),
    }))
}

/// Whether `existing` still describes the target. Times are too coarse for a condition on the
/// content.
fn unchanged(
    target: &Path,
    existing: Option<&ExistingFile>,
    conditions: &Conditions,
) -> Outcome<bool> {
    let now = path::stat_if_any(target)?;
    Ok(match (existing, &now) {
        (None, None) => true,
        (Some(existing), Some(now)) => {
            !conditions.names_hashes() && same_version(&existing.stat, now)
        }
        _ => false,
    })
}

/// The final path of a write to `full_path`: follows links in the last component, even to a missing
/// target.
fn follow(full_path: &Path) -> Outcome<PathBuf> {
    // Anything but a file is refused here: it could be a link in /proc whose target has no name.
    if let Some(stat) = path::stat_if_any(full_path)?
        && path::kind(&stat) != FileType::File
    {
        return Err(path::not_a_file(full_path, path::kind(&stat)));
    }
    let mut at = full_path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match readlinkat(CWD, &at, Vec::new()) {
            Ok(link) => {
                let link = std::ffi::OsStr::from_bytes(link.as_bytes());
                at = at.parent().unwrap_or(Path::new("/")).join(link);
            }
            Err(Errno::INVAL | Errno::NOENT) => return Ok(at),
            Err(errno) => return Err(Failure::system(errno, "writing", path::bytes(full_path))),
        }
    }
    Err(Failure::system(
        Errno::LOOP,
        "writing",
        path::bytes(full_path),
    ))
}

fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    openat(
        CWD,
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

fn deepest_directory(path: &Path) -> Outcome<OwnedFd> {
    for ancestor in path.ancestors() {
        match open_directory(ancestor) {
            Err(Errno::NOENT) => {}
            result => return result.doing("opening the directory", path::bytes(ancestor)),
        }
    }
    Err(Failure::system(
        Errno::NOENT,
        "opening the directory",
        path::bytes(path),
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use cynode_sba_proto::Reply;

    use super::{super::tests::*, *};

    fn put(workspace: &TestWorkspace, path: &str, content: &str) -> Outcome<WriteReport> {
        put_if(workspace, path, content, &Conditions::default())
    }

    fn put_if(
        workspace: &TestWorkspace,
        path: &str,
        content: &str,
        conditions: &Conditions,
    ) -> Outcome<WriteReport> {
        let mut pieces = vec![content.as_bytes().to_vec()].into_iter();
        workspace
            .files
            .write(path.as_bytes(), None, conditions, 1_000, &mut || {
                Ok(pieces.next())
            })
    }

    fn mode(workspace: &TestWorkspace, path: &str) -> u32 {
        std::fs::metadata(workspace.path(path))
            .expect("stat")
            .permissions()
            .mode()
            & 0o7777
    }

    #[test]
    fn a_write_creates_parents_and_reports_its_change() {
        let workspace = TestWorkspace::new();
        let written = put(&workspace, "a/b/file", "hello").expect("written");
        assert_eq!(
            written,
            WriteReport {
                sha256: HELLO.to_owned(),
                size: 5,
                mode: 0o644,
                created: true,
                sha256_before: None
            }
        );
        let again = put(&workspace, "a/b/file", "other").expect("written");
        assert_eq!(
            (again.created, again.sha256_before.as_deref()),
            (false, Some(HELLO))
        );
        assert_eq!(workspace.get("a/b/file"), b"other");
        assert_eq!(workspace.names("a/b"), ["file"]);
    }

    #[test]
    fn a_write_keeps_the_mode_and_strips_setuid_from_a_given_one() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "");
        std::fs::set_permissions(
            workspace.path("file"),
            std::fs::Permissions::from_mode(0o750),
        )
        .expect("mode");
        assert_eq!(put(&workspace, "file", "x").expect("written").mode, 0o750);
        assert_eq!(mode(&workspace, "file"), 0o750);
        let written = workspace
            .files
            .write(
                b"file",
                Some(0o106_711),
                &Conditions::default(),
                10,
                &mut || Ok(None),
            )
            .expect("written");
        assert_eq!(written.mode, 0o711);
        assert_eq!(mode(&workspace, "file"), 0o711);
    }

    #[test]
    fn a_link_is_written_through_even_when_its_target_is_missing() {
        let workspace = TestWorkspace::new();
        workspace.put("real", "old");
        symlink("real", workspace.path("link")).expect("link");
        symlink("sub/new", workspace.path("dangling")).expect("link");
        symlink("loop", workspace.path("loop")).expect("link");
        put(&workspace, "link", "new").expect("written");
        put(&workspace, "dangling", "made").expect("written");
        assert_eq!(workspace.get("real"), b"new");
        assert_eq!(workspace.get("sub/new"), b"made");
        assert!(
            std::fs::symlink_metadata(workspace.path("link"))
                .expect("stat")
                .is_symlink()
        );
        assert_eq!(
            code(put(&workspace, "loop", "x")),
            ErrorCode::InvalidRequest
        );
    }

    #[test]
    fn only_regular_files_are_written() {
        let workspace = TestWorkspace::new();
        workspace.put("dir/file", "");
        workspace.fifo("fifo");
        symlink("dir", workspace.path("link")).expect("link");
        for path in [
            "dir",
            "dir/",
            "new/",
            "link",
            "fifo",
            "/dev/null",
            "/dev/stdout",
            "/",
        ] {
            assert_eq!(
                code(put(&workspace, path, "x")),
                ErrorCode::NotAFile,
                "{path}"
            );
        }
        assert_eq!(
            code(put(&workspace, "dir/file/x", "x")),
            ErrorCode::NotADirectory
        );
        assert_eq!(
            code(put(&workspace, &"n".repeat(300), "x")),
            ErrorCode::InvalidRequest
        );
        assert!(!workspace.path("new").exists());
    }

    #[test]
    fn preconditions_hold_and_a_failed_one_changes_nothing() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "hello");
        let matching = |list: &[&str]| Conditions {
            if_match: Some(list.iter().map(|&entry| entry.to_owned()).collect()),
            if_none_match: false,
        };
        let absent = Conditions {
            if_match: None,
            if_none_match: true,
        };
        assert_eq!(
            code(put_if(&workspace, "file", "x", &matching(&["0000"]))),
            ErrorCode::PreconditionFailed
        );
        assert_eq!(
            code(put_if(&workspace, "file", "x", &matching(&[]))),
            ErrorCode::PreconditionFailed
        );
        assert_eq!(
            code(put_if(&workspace, "none/file", "x", &matching(&["*"]))),
            ErrorCode::PreconditionFailed
        );
        assert_eq!(
            code(put_if(&workspace, "file", "x", &absent)),
            ErrorCode::PreconditionFailed
        );
        assert_eq!(workspace.get("file"), b"hello");
        assert!(!workspace.path("none").exists());
        put_if(&workspace, "file", "one", &matching(&["0000", HELLO])).expect("the hash fits");
        put_if(&workspace, "file", "two", &matching(&["*"])).expect("it exists");
        put_if(&workspace, "new", "three", &absent).expect("it is new");
        assert_eq!(
            (workspace.get("file"), workspace.get("new")),
            (b"two".to_vec(), b"three".to_vec())
        );
    }

    #[test]
    fn a_change_during_the_upload_fails_the_precondition() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "hello");
        let conditions = Conditions {
            if_match: Some(vec![HELLO.to_owned()]),
            if_none_match: false,
        };
        let mut pieces = vec![b"mine".to_vec()].into_iter();
        let result = workspace
            .files
            .write(b"file", None, &conditions, 100, &mut || {
                workspace.put("file", "their");
                Ok(pieces.next())
            });
        assert_eq!(code(result), ErrorCode::PreconditionFailed);
        assert_eq!(workspace.get("file"), b"their");

        let conditions = Conditions {
            if_match: None,
            if_none_match: true,
        };
        let result = workspace
            .files
            .write(b"fresh", None, &conditions, 100, &mut || {
                workspace.put("fresh", "their");
                Ok(None)
            });
        assert_eq!(code(result), ErrorCode::PreconditionFailed);
        assert_eq!(workspace.get("fresh"), b"their");
    }

    #[test]
    // invariant: bounded
    fn a_body_over_the_limit_changes_nothing() {
        let workspace = TestWorkspace::new();
        let mut pieces = vec![vec![0; 600], vec![0; 401]].into_iter();
        let result =
            workspace
                .files
                .write(b"a/file", None, &Conditions::default(), 1_000, &mut || {
                    Ok(pieces.next())
                });
        assert_eq!(code(result), ErrorCode::TooLarge);
        assert!(workspace.names(".").is_empty());
    }

    #[test]
    fn a_sender_that_disconnects_before_the_end_changes_nothing() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "old");
        let write = |path: &str| FileOp::Write {
            path: raw(path),
            mode: None,
            if_match: None,
            if_none_match: false,
            max_bytes: 100,
        };
        assert!(workspace.ask_and_disconnect(write("file"), b"new").is_err());
        assert!(workspace.ask_and_disconnect(write("a/b"), b"new").is_err());
        assert_eq!(workspace.get("file"), b"old");
        assert_eq!(workspace.names("."), ["file"]);
    }

    #[test]
    fn the_answer_to_a_write_comes_over_the_connection() {
        let workspace = TestWorkspace::new();
        let op = FileOp::Write {
            path: raw("file"),
            mode: Some(0o600),
            if_match: None,
            if_none_match: true,
            max_bytes: 100,
        };
        let answer = workspace.ask(op.clone(), b"hello");
        assert!(
            matches!(answer.first(), Reply::Written(written) if written.sha256 == HELLO && written.created && written.mode == 0o600)
        );
        assert_eq!(
            workspace.ask(op, b"hello").error().code,
            ErrorCode::PreconditionFailed
        );
    }

    #[test]
    fn no_space_is_its_own_error() {
        let workspace = TestWorkspace::new();
        symlink("/dev/full", workspace.path("full")).expect("link");
        assert_eq!(code(put(&workspace, "full", "x")), ErrorCode::NotAFile);
        let mut full = std::fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("opened");
        let failure = full.write_all(b"x").doing("writing", b"x");
        assert_eq!(code(failure), ErrorCode::NoSpace);
    }
}

//! Moves, creates and deletes files and directories.
//!
//! Invariants: deleting never follows a link, keeps one directory open however deep the tree is,
//! and refuses the workspace and its ancestors.

use std::{
    ffi::OsStr,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use cynode_api::{ErrorCode, FileChange, FileChanges, FileType};
use rustix::{
    fs::{
        AtFlags, CWD, FileType as Kind, Mode, OFlags, Stat, Timespec, Timestamps, chmodat, fchmod,
        fstat, futimens, mkdirat, openat, readlinkat, renameat, statat, symlinkat, unlinkat,
    },
    io::Errno,
};

use super::{
    digest,
    error::{Failure, FailureContext, Outcome, shown},
    names::for_each_until,
    path::{self, Files},
    staged::{StagedFile, rename_to_free_name},
    write::{Conditions, find_any},
};

/// The number of attempts at emptying a directory.
const MAX_PASSES: u32 = 16;

impl Files {
    pub(super) fn mkdir(&self, path: &[u8], parents: bool) -> Outcome<FileChanges> {
        let full_path = self.locate(path)?;
        let made = if parents {
            path::make_directories(&full_path)?
        } else {
            match mkdirat(CWD, &full_path, Mode::from_raw_mode(0o755)) {
                Err(Errno::NOENT) => {
                    let message = format!(
                        "the directory above {} does not exist (ENOENT)",
                        shown(path::bytes(&full_path))
                    );
                    return Err(Failure::new(ErrorCode::NotFound, message));
                }
                result => result.doing("creating the directory", path::bytes(&full_path))?,
            }
            true
        };
        Ok(made
            .then(|| FileChange::new(path).of_kind(FileType::Dir))
            .into_iter()
            .collect())
    }

    pub(super) fn rename(&self, from: &[u8], to: &[u8], overwrite: bool) -> Outcome<FileChanges> {
        let (source, target) = (self.locate(from)?, self.locate(to)?);
        self.refuse_workspace(&source, "moved")?;
        let look = |full_path: &Path| statat(CWD, full_path, AtFlags::SYMLINK_NOFOLLOW).ok();
        let (was, replaced) = (look(&source), look(&target));
        let kind = was.as_ref().map_or(FileType::File, path::kind);
        let sha256 = digest::of_entry(CWD, &source);
        let before = if overwrite {
            digest::of_entry(CWD, &target)
        } else {
            None
        };
        move_to(&source, &target, overwrite)?;
        // Two names of one file: renaming has no effect.
        if was.as_ref().map(identity) == replaced.as_ref().map(identity) {
            return Ok(FileChanges::default());
        }
        let removed = FileChange::new(from).of_kind(kind).before(sha256.clone());
        Ok([
            removed,
            FileChange::new(to)
                .of_kind(kind)
                .before(before)
                .after(sha256),
        ]
        .into_iter()
        .collect())
    }

    pub(super) fn delete(
        &self,
        path: &[u8],
        recursive: bool,
        if_match: Option<Vec<String>>,
    ) -> Outcome<FileChanges> {
        let full_path = self.locate(path)?;
        self.refuse_workspace(&full_path, "deleted")?;
        if if_match.is_some() {
            let conditions = Conditions {
                if_match,
                if_none_match: false,
            };
            conditions.check(find_any(&full_path)?.as_ref(), &full_path)?;
        }
        let (parent, name) = path::split(&full_path)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent =
            openat(CWD, parent, flags, Mode::empty()).doing("deleting", path::bytes(&full_path))?;
        let stat = statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)
            .doing("deleting", path::bytes(&full_path))?;
        let change = FileChange::new(path).of_kind(path::kind(&stat));
        if path::kind(&stat) != FileType::Dir {
            if path.ends_with(b"/") {
                return Err(Failure::system(
                    Errno::NOTDIR,
                    "deleting",
                    path::bytes(&full_path),
                ));
            }
            let before = digest::of_entry(&parent, name);
            unlinkat(&parent, name, AtFlags::empty()).doing("deleting", path::bytes(&full_path))?;
            return Ok(FileChanges::from_iter([change.before(before)]));
        }
        match unlinkat(&parent, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => {
                remove_tree(parent, name, &full_path)?;
            }
            Err(Errno::EXIST) => {
                return Err(Failure::system(
                    Errno::NOTEMPTY,
                    "deleting",
                    path::bytes(&full_path),
                ));
            }
            result => result.doing("deleting", path::bytes(&full_path))?,
        }
        Ok(FileChanges::from_iter([change]))
    }

    /// Refuses the workspace and its ancestors.
    fn refuse_workspace(&self, full_path: &Path, operation: &str) -> Outcome<()> {
        let Ok(stat) = statat(CWD, full_path, AtFlags::SYMLINK_NOFOLLOW) else {
            return Ok(());
        };
        let same = |ancestor: &Path| {
            statat(CWD, ancestor, AtFlags::empty())
                .is_ok_and(|other| identity(&stat) == identity(&other))
        };
        if path::kind(&stat) == FileType::Dir && self.root.ancestors().any(same) {
            return Err(Failure::new(
                ErrorCode::PermissionDenied,
                format!(
                    "{} contains the workspace and can't be {operation}",
                    shown(path::bytes(full_path))
                ),
            ));
        }
        Ok(())
    }
}

fn move_to(from: &Path, to: &Path, overwrite: bool) -> Outcome<()> {
    let result = if overwrite {
        renameat(CWD, from, CWD, to)
    } else {
        rename_to_free_name(CWD, from, CWD, to)
    };
    match result {
        Ok(()) => Ok(()),
        Err(Errno::XDEV) => move_across(from, to, overwrite),
        Err(Errno::NOENT) => {
            statat(CWD, from, AtFlags::SYMLINK_NOFOLLOW).doing("moving", path::bytes(from))?;
            Err(Failure::system(
                Errno::NOENT,
                "moving into the directory of",
                path::bytes(to),
            ))
        }
        Err(errno @ (Errno::EXIST | Errno::NOTEMPTY | Errno::ISDIR)) => {
            Err(Failure::system(errno, "moving to", path::bytes(to)))
        }
        Err(errno) => Err(Failure::system(errno, "moving", path::bytes(from))),
    }
}

/// Between file systems, copies the file and deletes the original.
fn move_across(from: &Path, to: &Path, overwrite: bool) -> Outcome<()> {
    let stat = statat(CWD, from, AtFlags::SYMLINK_NOFOLLOW).doing("moving", path::bytes(from))?;
    match path::kind(&stat) {
        FileType::File => {
            let (mut source, stat) = path::open_file(from)?;
            let (parent, name) = path::split(to)?;
            let directory = openat(
                CWD,
                parent,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .doing("moving to", path::bytes(to))?;
            let mut staged =
                StagedFile::new(directory.try_clone().doing("moving to", path::bytes(to))?)
                    .doing("moving to", path::bytes(to))?;
            io::copy(&mut source, staged.file()).doing("moving to", path::bytes(to))?;
            futimens(
                staged.file(),
                &times(
                    stat.st_mtime,
                    i64::try_from(stat.st_mtime_nsec).unwrap_or(0),
                ),
            )
            .doing("moving to", path::bytes(to))?;
            staged
                .publish(
                    &directory,
                    name,
                    path::permissions(&stat) & 0o1777,
                    overwrite,
                )
                .doing("moving to", path::bytes(to))?;
        }
        FileType::Symlink => {
            if overwrite {
                match unlinkat(CWD, to, AtFlags::empty()) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(errno) => return Err(Failure::system(errno, "moving to", path::bytes(to))),
                }
            }
            let target = readlinkat(CWD, from, Vec::new()).doing("moving", path::bytes(from))?;
            symlinkat(target, CWD, to).doing("moving to", path::bytes(to))?;
        }
        _ => {
            let message = format!(
                "{} and {} are on different file systems, and only files can be moved between \
                 them; copy it with a command (EXDEV)",
                shown(path::bytes(from)),
                shown(path::bytes(to))
            );
            return Err(Failure::invalid(message));
        }
    }
    unlinkat(CWD, from, AtFlags::empty()).doing("deleting after the copy", path::bytes(from))
}

pub(super) fn times(seconds: i64, nanoseconds: i64) -> Timestamps {
    let at = Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds.clamp(0, 999_999_999),
    };
    Timestamps {
        last_access: at,
        last_modification: at,
    }
}

const fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Deletes the directory `name` in `parent` recursively. `full_path` names it in messages.
pub(super) fn remove_tree(parent: OwnedFd, name: &OsStr, full_path: &Path) -> Outcome<()> {
    Removal {
        parent,
        levels: Vec::new(),
    }
    .run(full_path, name)
}

/// Trees can be deeper than the limits of open files and path length, so only the current directory
/// is open: the way back up is `..`, verified against the identity from the way down.
struct Removal {
    parent: OwnedFd,
    levels: Vec<RemovalLevel>,
}

struct RemovalLevel {
    name: Vec<u8>,
    identity: (u64, u64),
    passes: u32,
}

impl Removal {
    fn run(mut self, full_path: &Path, name: &OsStr) -> Outcome<()> {
        let mut at = self
            .open_level(None, name.as_bytes())
            .map_err(|errno| self.failure(errno, full_path))?;
        loop {
            if let Some(name) =
                remove_entries(&at).map_err(|errno| self.failure(errno, full_path))?
            {
                at = self
                    .open_level(Some(&at), &name)
                    .map_err(|errno| self.failure(errno, full_path))?;
                continue;
            }
            let (above, is_top) = match self.levels.len() {
                1 => (None, true),
                _ => (Some(self.open_parent(&at, full_path)?), false),
            };
            let Some(level) = self.levels.last_mut() else {
                return Ok(());
            };
            match unlinkat(
                above.as_ref().unwrap_or(&self.parent),
                level.name.as_slice(),
                AtFlags::REMOVEDIR,
            ) {
                Ok(()) => {}
                // Deleting while reading can make a file system skip names, and other processes may
                // add some.
                Err(Errno::NOTEMPTY | Errno::EXIST) if level.passes < MAX_PASSES => {
                    level.passes += 1;
                    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                    at = openat(&at, ".", flags, Mode::empty())
                        .map_err(|errno| self.failure(errno, full_path))?;
                    continue;
                }
                Err(errno) => return Err(self.failure(errno, full_path)),
            }
            self.levels.pop();
            match above {
                Some(above) if !is_top => at = above,
                _ => return Ok(()),
            }
        }
    }

    /// Opens a directory below `at`, after granting access to it if it is ours.
    fn open_level(&mut self, at: Option<&OwnedFd>, name: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let at = at.unwrap_or(&self.parent);
        let fd = match openat(at, name, flags, Mode::empty()) {
            Err(Errno::ACCESS) => {
                chmodat(at, name, Mode::RWXU, AtFlags::empty())?;
                openat(at, name, flags, Mode::empty())?
            }
            result => result?,
        };
        let stat = fstat(&fd)?;
        if stat.st_mode & 0o700 != 0o700 {
            // If it isn't ours, deleting its content reports the error.
            let _tried = fchmod(&fd, Mode::from_raw_mode(path::permissions(&stat) | 0o700));
        }
        self.levels.push(RemovalLevel {
            name: name.to_vec(),
            identity: identity(&stat),
            passes: 0,
        });
        Ok(fd)
    }

    /// Opens the parent directory. Fails if it is no longer the one that we came from.
    fn open_parent(&self, at: &OwnedFd, full_path: &Path) -> Outcome<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let above = openat(at, "..", flags, Mode::empty())
            .map_err(|errno| self.failure(errno, full_path))?;
        let stat = fstat(&above).map_err(|errno| self.failure(errno, full_path))?;
        let expected = self
            .levels
            .len()
            .checked_sub(2)
            .and_then(|index| self.levels.get(index))
            .map(|level| level.identity);
        if expected == Some(identity(&stat)) {
            return Ok(above);
        }
        Err(Failure::new(
            ErrorCode::Internal,
            format!(
                "{} was moved while it was deleted; a part of it is gone",
                shown(path::bytes(full_path))
            ),
        ))
    }

    fn failure(&self, errno: Errno, full_path: &Path) -> Failure {
        let mut path = full_path.parent().map(PathBuf::from).unwrap_or_default();
        path.extend(
            self.levels
                .iter()
                .map(|level| OsStr::from_bytes(&level.name)),
        );
        Failure::system(
            errno,
            "deleting (a part of it may be gone) at",
            path::bytes(&path),
        )
    }
}

/// Deletes files and empty directories; stops at a directory that is not empty and returns its
/// name.
fn remove_entries(directory: &OwnedFd) -> Result<Option<Vec<u8>>, Errno> {
    let mut result = Ok(None);
    for_each_until(directory, None, |name, kind| {
        let removed = match kind {
            Kind::Directory => Err(Errno::ISDIR),
            _ => unlinkat(directory, name, AtFlags::empty()),
        };
        let removed = match removed {
            Err(Errno::ISDIR) => match unlinkat(directory, name, AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY | Errno::EXIST) => {
                    result = Ok(Some(name.to_vec()));
                    return false;
                }
                removed => removed,
            },
            removed => removed,
        };
        match removed {
            Ok(()) | Err(Errno::NOENT) => true,
            Err(errno) => {
                result = Err(errno);
                false
            }
        }
    })?;
    result
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::{super::tests::*, *};

    #[test]
    fn files_links_and_empty_directories_are_deleted() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "");
        workspace.put("target/file", "");
        symlink("target", workspace.path("link")).expect("link");
        std::fs::create_dir(workspace.path("empty")).expect("made");
        for path in ["file", "link", "empty"] {
            workspace
                .files
                .delete(path.as_bytes(), false, None)
                .expect("deleted");
        }
        assert_eq!(workspace.names("."), ["target"]);
        assert_eq!(
            code(workspace.files.delete(b"target", false, None)),
            ErrorCode::NotEmpty
        );
        assert_eq!(
            code(workspace.files.delete(b"gone", true, None)),
            ErrorCode::NotFound
        );
        assert_eq!(
            code(workspace.files.delete(b"target/file/", true, None)),
            ErrorCode::NotADirectory
        );
    }

    #[test]
    fn a_deletion_reports_what_was_deleted() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "hello");
        workspace.put("dir/file", "hello");
        workspace.fifo("fifo");
        symlink("file", workspace.path("link")).expect("link");
        // One byte more than is hashed.
        std::fs::File::create(workspace.path("huge"))
            .expect("made")
            .set_len(cynode_api::file_limits::MAX_PUT_BYTES + 1)
            .expect("length");
        let reported = |path: &str| {
            workspace
                .files
                .delete(path.as_bytes(), true, None)
                .expect("deleted")
                .changes
        };
        assert_eq!(
            reported("link"),
            [FileChange::new(b"link").of_kind(FileType::Symlink)]
        );
        assert_eq!(
            reported("./file"),
            [FileChange::new(b"./file").before(Some(HELLO.into()))]
        );
        assert_eq!(
            reported("dir"),
            [FileChange::new(b"dir").of_kind(FileType::Dir)]
        );
        assert_eq!(
            reported("fifo"),
            [FileChange::new(b"fifo").of_kind(FileType::Other)]
        );
        assert_eq!(reported("huge"), [FileChange::new(b"huge")]);
        let odd = workspace.path("").join(OsStr::from_bytes(b"\xff"));
        std::fs::write(odd, "hello").expect("written");
        let reported = workspace
            .files
            .delete(b"\xff", false, None)
            .expect("deleted")
            .changes;
        assert_eq!(
            (
                &reported[0].path,
                reported[0]
                    .path_b64
                    .as_ref()
                    .map(|bytes| bytes.0.as_slice())
            ),
            (&None, Some(&b"\xff"[..]))
        );
    }

    #[test]
    fn a_move_reports_both_names_and_the_replaced_file() {
        let workspace = TestWorkspace::new();
        let reported = |from: &str, to: &str| {
            workspace
                .files
                .rename(from.as_bytes(), to.as_bytes(), true)
                .expect("moved")
                .changes
        };
        workspace.put("file", "hello");
        assert_eq!(
            reported("file", "moved"),
            [
                FileChange::new(b"file").before(Some(HELLO.into())),
                FileChange::new(b"moved").after(Some(HELLO.into()))
            ]
        );
        workspace.put("other", "other");
        let other = Some(digest::of_bytes(b"other"));
        let expected = [
            FileChange::new(b"other").before(other.clone()),
            FileChange::new(b"moved")
                .before(Some(HELLO.into()))
                .after(other),
        ];
        assert_eq!(reported("other", "moved"), expected);
        std::fs::create_dir(workspace.path("dir")).expect("made");
        assert_eq!(
            reported("dir", "there"),
            [b"dir", &b"there"[..]].map(|path| FileChange::new(path).of_kind(FileType::Dir))
        );
        symlink("moved", workspace.path("link")).expect("link");
        assert_eq!(
            reported("link", "soft"),
            [b"link", &b"soft"[..]].map(|path| FileChange::new(path).of_kind(FileType::Symlink))
        );
        // The system call has no effect in this case.
        std::fs::hard_link(workspace.path("moved"), workspace.path("twin")).expect("link");
        assert_eq!(
            (reported("moved", "twin"), reported("moved", "moved")),
            (vec![], vec![])
        );
        assert_eq!(workspace.names("."), ["moved", "soft", "there", "twin"]);
    }

    #[test]
    fn a_created_directory_is_reported() {
        let workspace = TestWorkspace::new();
        let reported = |path: &str, parents| {
            workspace
                .files
                .mkdir(path.as_bytes(), parents)
                .expect("made")
                .changes
        };
        assert_eq!(
            reported("a/b/c", true),
            [FileChange::new(b"a/b/c").of_kind(FileType::Dir)]
        );
        assert_eq!(
            (reported("a/b/c", true), reported("a", true)),
            (vec![], vec![])
        );
        assert_eq!(
            reported("d", false),
            [FileChange::new(b"d").of_kind(FileType::Dir)]
        );
    }

    #[test]
    fn a_tree_is_deleted_without_following_links() {
        let workspace = TestWorkspace::new();
        std::fs::create_dir(workspace.outside("keep")).expect("made");
        std::fs::write(workspace.outside("keep/file"), "").expect("written");
        for number in 0..300 {
            workspace.put(&format!("tree/{number}/x/y"), "");
        }
        symlink(workspace.outside("keep"), workspace.path("tree/link")).expect("link");
        workspace.fifo("tree/fifo");
        workspace
            .files
            .delete(b"tree", true, None)
            .expect("deleted");
        assert!(workspace.names(".").is_empty());
        assert!(workspace.outside("keep/file").exists());
    }

    #[test]
    fn a_tree_of_ten_thousand_levels_is_deleted() {
        let workspace = TestWorkspace::new();
        std::fs::create_dir(workspace.path("deep")).expect("made");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = openat(CWD, workspace.path("deep"), flags, Mode::empty()).expect("opened");
        for _ in 0..10_000 {
            mkdirat(&at, "d", Mode::RWXU).expect("made");
            at = openat(&at, "d", flags, Mode::empty()).expect("opened");
        }
        drop(at);
        workspace
            .files
            .delete(b"deep", true, None)
            .expect("deleted");
        assert!(workspace.names(".").is_empty());
    }

    #[test]
    fn directories_without_permissions_are_deleted() {
        let workspace = TestWorkspace::new();
        workspace.put("tree/closed/deeper/file", "");
        for path in ["tree/closed/deeper", "tree/closed", "tree"] {
            std::fs::set_permissions(workspace.path(path), std::fs::Permissions::from_mode(0o000))
                .expect("mode");
        }
        workspace
            .files
            .delete(b"tree", true, None)
            .expect("deleted");
        assert!(workspace.names(".").is_empty());
    }

    #[test]
    fn the_workspace_and_its_ancestors_cannot_be_deleted_or_moved() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "");
        let root = workspace.files.root.clone();
        for path in [&b"/"[..], b".", b"./", path::bytes(&root), b"sub/..", b".."] {
            std::fs::create_dir_all(workspace.path("sub")).expect("made");
            assert_eq!(
                code(workspace.files.delete(path, true, None)),
                ErrorCode::PermissionDenied,
                "{}",
                shown(path)
            );
        }
        assert_eq!(
            code(workspace.files.rename(b".", b"/tmp/x", false)),
            ErrorCode::PermissionDenied
        );
        assert!(workspace.path("file").exists());
    }

    #[test]
    fn a_delete_checks_its_precondition() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "hello");
        workspace.put("dir/file", "");
        let list = |entry: &str| Some(vec![entry.to_owned()]);
        assert_eq!(
            code(workspace.files.delete(b"file", false, list("0000"))),
            ErrorCode::PreconditionFailed
        );
        assert_eq!(
            code(workspace.files.delete(b"dir", true, list(HELLO))),
            ErrorCode::PreconditionFailed
        );
        assert_eq!(
            code(workspace.files.delete(b"none", false, list("*"))),
            ErrorCode::PreconditionFailed
        );
        workspace
            .files
            .delete(b"file", false, list(HELLO))
            .expect("deleted");
        workspace
            .files
            .delete(b"dir", true, list("*"))
            .expect("deleted");
        assert!(workspace.names(".").is_empty());
    }

    #[test]
    fn a_move_overwrites_its_target_only_on_request() {
        let workspace = TestWorkspace::new();
        workspace.put("one", "1");
        workspace.put("two", "2");
        workspace.put("dir/file", "");
        assert_eq!(
            code(workspace.files.rename(b"one", b"two", false)),
            ErrorCode::AlreadyExists
        );
        workspace.files.rename(b"one", b"two", true).expect("moved");
        assert_eq!(workspace.get("two"), b"1");
        workspace
            .files
            .rename(b"dir", b"moved", false)
            .expect("moved");
        assert_eq!(workspace.names("moved"), ["file"]);
        assert_eq!(
            code(workspace.files.rename(b"moved", b"moved/below", false)),
            ErrorCode::InvalidRequest
        );
        assert_eq!(
            code(workspace.files.rename(b"two", b"moved", true)),
            ErrorCode::NotAFile
        );
        let missing = refused(workspace.files.rename(b"gone", b"x", false));
        assert!(
            missing.code == ErrorCode::NotFound && missing.message.contains("gone"),
            "{missing:?}"
        );
        let no_parent = refused(workspace.files.rename(b"two", b"no/such/dir", false));
        assert!(
            no_parent.code == ErrorCode::NotFound && no_parent.message.contains("no/such/dir"),
            "{no_parent:?}"
        );
    }

    #[test]
    fn a_file_moves_between_file_systems_with_mode_and_time() {
        let workspace = TestWorkspace::new();
        let Ok(other) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        if std::fs::metadata(other.path()).expect("stat").dev()
            == std::fs::metadata(&workspace.files.root)
                .expect("stat")
                .dev()
        {
            return;
        }
        workspace.put("file", "hello");
        std::fs::set_permissions(
            workspace.path("file"),
            std::fs::Permissions::from_mode(0o711),
        )
        .expect("mode");
        let before = std::fs::metadata(workspace.path("file")).expect("stat");
        let target = other.path().join("file");
        workspace
            .files
            .rename(b"file", path::bytes(&target), false)
            .expect("moved");
        let after = std::fs::metadata(&target).expect("stat");
        assert_eq!(
            (after.mode(), after.mtime(), after.len()),
            (before.mode(), before.mtime(), 5)
        );
        assert!(!workspace.path("file").exists());
        workspace.put("file", "again");
        assert_eq!(
            code(workspace.files.rename(b"file", path::bytes(&target), false)),
            ErrorCode::AlreadyExists
        );
        assert_eq!(workspace.get("file"), b"again");
        symlink("x", workspace.path("link")).expect("link");
        workspace
            .files
            .rename(b"link", path::bytes(&other.path().join("link")), false)
            .expect("moved");
        workspace.put("dir/x", "");
        let refusal = refused(workspace.files.rename(
            b"dir",
            path::bytes(&other.path().join("dir")),
            false,
        ));
        assert!(refusal.message.contains("different file systems"));
    }

    #[test]
    fn a_directory_that_cannot_be_made_names_the_obstacle() {
        let workspace = TestWorkspace::new();
        workspace.files.mkdir(b"a", false).expect("made");
        assert_eq!(
            code(workspace.files.mkdir(b"a", false)),
            ErrorCode::AlreadyExists
        );
        workspace.files.mkdir(b"a", true).expect("there already");
        workspace.files.mkdir(b"b/c/d/", true).expect("made");
        assert_eq!(
            code(workspace.files.mkdir(b"x/y", false)),
            ErrorCode::NotFound
        );
        workspace.put("file", "");
        assert_eq!(
            code(workspace.files.mkdir(b"file/x", true)),
            ErrorCode::NotADirectory
        );
        assert_eq!(
            code(workspace.files.mkdir(b"file", true)),
            ErrorCode::AlreadyExists
        );
    }
}

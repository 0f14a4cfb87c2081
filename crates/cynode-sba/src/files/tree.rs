//! Moving, making and deleting what the tree consists of.
//!
//! What must stay true: deleting never follows a link, holds one directory open however deep the tree is, and refuses the
//! workspace itself and what it lies in.

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
    error::{Doing, Failure, Outcome, shown},
    names::for_each_until,
    path::{self, Files},
    staged::{Staged, rename_to_free_name},
    write::{Conditions, find_any},
};

/// How often a directory that won't become empty is read again.
const MAX_PASSES: u32 = 16;

impl Files {
    pub(super) fn mkdir(&self, path: &[u8], parents: bool) -> Outcome<FileChanges> {
        let place = self.locate(path)?;
        let made = if parents {
            path::make_directories(&place)?
        } else {
            match mkdirat(CWD, &place, Mode::from_raw_mode(0o755)) {
                Err(Errno::NOENT) => {
                    let message = format!(
                        "the directory above {} does not exist (ENOENT)",
                        shown(path::bytes(&place))
                    );
                    return Err(Failure::new(ErrorCode::NotFound, message));
                }
                result => result.doing("making the directory", path::bytes(&place))?,
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
        self.spare(&source, "moved")?;
        let look = |place: &Path| statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW).ok();
        let (was, replaced) = (look(&source), look(&target));
        let kind = was.as_ref().map_or(FileType::File, path::kind);
        let sha256 = digest::of_entry(CWD, &source);
        let before = if overwrite {
            digest::of_entry(CWD, &target)
        } else {
            None
        };
        move_to(&source, &target, overwrite)?;
        // Two names of one file: there is nothing to do, and the system does nothing.
        if was.as_ref().map(identity) == replaced.as_ref().map(identity) {
            return Ok(FileChanges::default());
        }
        let gone = FileChange::new(from).of_kind(kind).before(sha256.clone());
        Ok([
            gone,
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
        let place = self.locate(path)?;
        self.spare(&place, "deleted")?;
        if if_match.is_some() {
            let conditions = Conditions {
                if_match,
                if_none_match: false,
            };
            conditions.check(find_any(&place)?.as_ref(), &place)?;
        }
        let (parent, name) = path::split(&place)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent =
            openat(CWD, parent, flags, Mode::empty()).doing("deleting", path::bytes(&place))?;
        let stat = statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)
            .doing("deleting", path::bytes(&place))?;
        let change = FileChange::new(path).of_kind(path::kind(&stat));
        if path::kind(&stat) != FileType::Dir {
            if path.ends_with(b"/") {
                return Err(Failure::system(
                    Errno::NOTDIR,
                    "deleting",
                    path::bytes(&place),
                ));
            }
            let before = digest::of_entry(&parent, name);
            unlinkat(&parent, name, AtFlags::empty()).doing("deleting", path::bytes(&place))?;
            return Ok(FileChanges::from_iter([change.before(before)]));
        }
        match unlinkat(&parent, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => remove_tree(parent, name, &place)?,
            Err(Errno::EXIST) => {
                return Err(Failure::system(
                    Errno::NOTEMPTY,
                    "deleting",
                    path::bytes(&place),
                ));
            }
            result => result.doing("deleting", path::bytes(&place))?,
        }
        Ok(FileChanges::from_iter([change]))
    }

    /// Refuses the workspace and every directory that it lies in.
    fn spare(&self, place: &Path, what: &str) -> Outcome<()> {
        let Ok(stat) = statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW) else {
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
                    "{} holds the workspace and can't be {what}",
                    shown(path::bytes(place))
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

/// Between file systems a file is copied and the old one deleted.
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
                Staged::new(directory.try_clone().doing("moving to", path::bytes(to))?)
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
                "{} and {} are on different file systems, between which only files can be moved; copy it with a command (EXDEV)",
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

/// Deletes the directory `name` in `parent`, which `place` names for people, with all that is below it.
pub(super) fn remove_tree(parent: OwnedFd, name: &OsStr, place: &Path) -> Outcome<()> {
    Removal {
        parent,
        levels: Vec::new(),
    }
    .run(place, name)
}

/// Trees can be deeper than the number of files that may be open, and than a path may be long, so only the directory at
/// hand is open: the way back up is `..`, checked against what was seen on the way down.
struct Removal {
    parent: OwnedFd,
    levels: Vec<Level>,
}

struct Level {
    name: Vec<u8>,
    identity: (u64, u64),
    passes: u32,
}

impl Removal {
    fn run(mut self, place: &Path, name: &OsStr) -> Outcome<()> {
        let mut at = self
            .enter(None, name.as_bytes())
            .map_err(|errno| self.failure(errno, place))?;
        loop {
            if let Some(name) = remove_entries(&at).map_err(|errno| self.failure(errno, place))? {
                at = self
                    .enter(Some(&at), &name)
                    .map_err(|errno| self.failure(errno, place))?;
                continue;
            }
            let (above, is_top) = match self.levels.len() {
                1 => (None, true),
                _ => (Some(self.leave(&at, place)?), false),
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
                // Deleting while reading can make a file system skip names, and others may still be adding some.
                Err(Errno::NOTEMPTY | Errno::EXIST) if level.passes < MAX_PASSES => {
                    level.passes += 1;
                    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                    at = openat(&at, ".", flags, Mode::empty())
                        .map_err(|errno| self.failure(errno, place))?;
                    continue;
                }
                Err(errno) => return Err(self.failure(errno, place)),
            }
            self.levels.pop();
            match above {
                Some(above) if !is_top => at = above,
                _ => return Ok(()),
            }
        }
    }

    /// Opens a directory below `at`, making it usable first when it is ours but closed.
    fn enter(&mut self, at: Option<&OwnedFd>, name: &[u8]) -> Result<OwnedFd, Errno> {
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
            // When it is not ours, deleting what it holds says so.
            let _tried = fchmod(&fd, Mode::from_raw_mode(path::permissions(&stat) | 0o700));
        }
        self.levels.push(Level {
            name: name.to_vec(),
            identity: identity(&stat),
            passes: 0,
        });
        Ok(fd)
    }

    /// The directory above, if it is still the one that we came from.
    fn leave(&self, at: &OwnedFd, place: &Path) -> Outcome<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let above =
            openat(at, "..", flags, Mode::empty()).map_err(|errno| self.failure(errno, place))?;
        let stat = fstat(&above).map_err(|errno| self.failure(errno, place))?;
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
                shown(path::bytes(place))
            ),
        ))
    }

    fn failure(&self, errno: Errno, place: &Path) -> Failure {
        let mut path = place.parent().map(PathBuf::from).unwrap_or_default();
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

/// Deletes what is no directory, and empty directories; stops at one that is not empty and names it.
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
        let sandbox = Sandbox::new();
        sandbox.put("file", "");
        sandbox.put("target/file", "");
        symlink("target", sandbox.path("link")).expect("link");
        std::fs::create_dir(sandbox.path("empty")).expect("made");
        for path in ["file", "link", "empty"] {
            sandbox
                .files
                .delete(path.as_bytes(), false, None)
                .expect("deleted");
        }
        assert_eq!(sandbox.names("."), ["target"]);
        assert_eq!(
            code(sandbox.files.delete(b"target", false, None)),
            ErrorCode::NotEmpty
        );
        assert_eq!(
            code(sandbox.files.delete(b"gone", true, None)),
            ErrorCode::NotFound
        );
        assert_eq!(
            code(sandbox.files.delete(b"target/file/", true, None)),
            ErrorCode::NotADirectory
        );
    }

    #[test]
    fn what_is_deleted_is_told_as_it_was() {
        let sandbox = Sandbox::new();
        sandbox.put("file", "hello");
        sandbox.put("dir/file", "hello");
        sandbox.fifo("fifo");
        symlink("file", sandbox.path("link")).expect("link");
        // One byte more than what is read for it.
        std::fs::File::create(sandbox.path("huge"))
            .expect("made")
            .set_len(cynode_api::file_limits::MAX_PUT_BYTES + 1)
            .expect("length");
        let told = |path: &str| {
            sandbox
                .files
                .delete(path.as_bytes(), true, None)
                .expect("deleted")
                .changes
        };
        assert_eq!(
            told("link"),
            [FileChange::new(b"link").of_kind(FileType::Symlink)]
        );
        assert_eq!(
            told("./file"),
            [FileChange::new(b"./file").before(Some(HELLO.into()))]
        );
        assert_eq!(
            told("dir"),
            [FileChange::new(b"dir").of_kind(FileType::Dir)]
        );
        assert_eq!(
            told("fifo"),
            [FileChange::new(b"fifo").of_kind(FileType::Other)]
        );
        assert_eq!(told("huge"), [FileChange::new(b"huge")]);
        let odd = sandbox.path("").join(OsStr::from_bytes(b"\xff"));
        std::fs::write(odd, "hello").expect("written");
        let told = sandbox
            .files
            .delete(b"\xff", false, None)
            .expect("deleted")
            .changes;
        assert_eq!(
            (
                &told[0].path,
                told[0].path_b64.as_ref().map(|bytes| bytes.0.as_slice())
            ),
            (&None, Some(&b"\xff"[..]))
        );
    }

    #[test]
    fn what_is_moved_is_told_under_both_names_with_what_it_replaced() {
        let sandbox = Sandbox::new();
        let told = |from: &str, to: &str| {
            sandbox
                .files
                .rename(from.as_bytes(), to.as_bytes(), true)
                .expect("moved")
                .changes
        };
        sandbox.put("file", "hello");
        assert_eq!(
            told("file", "moved"),
            [
                FileChange::new(b"file").before(Some(HELLO.into())),
                FileChange::new(b"moved").after(Some(HELLO.into()))
            ]
        );
        sandbox.put("other", "other");
        let other = Some(digest::of(b"other"));
        let expected = [
            FileChange::new(b"other").before(other.clone()),
            FileChange::new(b"moved")
                .before(Some(HELLO.into()))
                .after(other),
        ];
        assert_eq!(told("other", "moved"), expected);
        std::fs::create_dir(sandbox.path("dir")).expect("made");
        assert_eq!(
            told("dir", "there"),
            [b"dir", &b"there"[..]].map(|path| FileChange::new(path).of_kind(FileType::Dir))
        );
        symlink("moved", sandbox.path("link")).expect("link");
        assert_eq!(
            told("link", "soft"),
            [b"link", &b"soft"[..]].map(|path| FileChange::new(path).of_kind(FileType::Symlink))
        );
        // The system does nothing then.
        std::fs::hard_link(sandbox.path("moved"), sandbox.path("twin")).expect("link");
        assert_eq!(
            (told("moved", "twin"), told("moved", "moved")),
            (vec![], vec![])
        );
        assert_eq!(sandbox.names("."), ["moved", "soft", "there", "twin"]);
    }

    #[test]
    fn a_directory_is_told_when_it_was_made() {
        let sandbox = Sandbox::new();
        let told = |path: &str, parents| {
            sandbox
                .files
                .mkdir(path.as_bytes(), parents)
                .expect("made")
                .changes
        };
        assert_eq!(
            told("a/b/c", true),
            [FileChange::new(b"a/b/c").of_kind(FileType::Dir)]
        );
        assert_eq!((told("a/b/c", true), told("a", true)), (vec![], vec![]));
        assert_eq!(
            told("d", false),
            [FileChange::new(b"d").of_kind(FileType::Dir)]
        );
    }

    #[test]
    fn a_tree_is_deleted_without_following_links() {
        let sandbox = Sandbox::new();
        std::fs::create_dir(sandbox.outside("keep")).expect("made");
        std::fs::write(sandbox.outside("keep/file"), "").expect("written");
        for number in 0..300 {
            sandbox.put(&format!("tree/{number}/x/y"), "");
        }
        symlink(sandbox.outside("keep"), sandbox.path("tree/link")).expect("link");
        sandbox.fifo("tree/fifo");
        sandbox.files.delete(b"tree", true, None).expect("deleted");
        assert!(sandbox.names(".").is_empty());
        assert!(sandbox.outside("keep/file").exists());
    }

    #[test]
    fn a_tree_of_ten_thousand_levels_is_deleted() {
        let sandbox = Sandbox::new();
        std::fs::create_dir(sandbox.path("deep")).expect("made");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = openat(CWD, sandbox.path("deep"), flags, Mode::empty()).expect("opened");
        for _ in 0..10_000 {
            mkdirat(&at, "d", Mode::RWXU).expect("made");
            at = openat(&at, "d", flags, Mode::empty()).expect("opened");
        }
        drop(at);
        sandbox.files.delete(b"deep", true, None).expect("deleted");
        assert!(sandbox.names(".").is_empty());
    }

    #[test]
    fn closed_directories_are_opened_to_be_deleted() {
        let sandbox = Sandbox::new();
        sandbox.put("tree/closed/deeper/file", "");
        for path in ["tree/closed/deeper", "tree/closed", "tree"] {
            std::fs::set_permissions(sandbox.path(path), std::fs::Permissions::from_mode(0o000))
                .expect("mode");
        }
        sandbox.files.delete(b"tree", true, None).expect("deleted");
        assert!(sandbox.names(".").is_empty());
    }

    #[test]
    fn the_workspace_and_what_holds_it_stay() {
        let sandbox = Sandbox::new();
        sandbox.put("file", "");
        let root = sandbox.files.root.clone();
        for path in [&b"/"[..], b".", b"./", path::bytes(&root), b"sub/..", b".."] {
            std::fs::create_dir_all(sandbox.path("sub")).expect("made");
            assert_eq!(
                code(sandbox.files.delete(path, true, None)),
                ErrorCode::PermissionDenied,
                "{}",
                shown(path)
            );
        }
        assert_eq!(
            code(sandbox.files.rename(b".", b"/tmp/x", false)),
            ErrorCode::PermissionDenied
        );
        assert!(sandbox.path("file").exists());
    }

    #[test]
    fn a_delete_keeps_to_its_precondition() {
        let sandbox = Sandbox::new();
        sandbox.put("file", "hello");
        sandbox.put("dir/file", "");
        let list = |entry: &str| Some(vec![entry.to_owned()]);
        assert_eq!(
            code(sandbox.files.delete(b"file", false, list("0000"))),
            ErrorCode::PreconditionFailed
        );
        assert_eq!(
            code(sandbox.files.delete(b"dir", true, list(HELLO))),
            ErrorCode::PreconditionFailed
        );
        assert_eq!(
            code(sandbox.files.delete(b"none", false, list("*"))),
            ErrorCode::PreconditionFailed
        );
        sandbox
            .files
            .delete(b"file", false, list(HELLO))
            .expect("deleted");
        sandbox
            .files
            .delete(b"dir", true, list("*"))
            .expect("deleted");
        assert!(sandbox.names(".").is_empty());
    }

    #[test]
    fn a_move_keeps_what_is_at_its_target_unless_told() {
        let sandbox = Sandbox::new();
        sandbox.put("one", "1");
        sandbox.put("two", "2");
        sandbox.put("dir/file", "");
        assert_eq!(
            code(sandbox.files.rename(b"one", b"two", false)),
            ErrorCode::AlreadyExists
        );
        sandbox.files.rename(b"one", b"two", true).expect("moved");
        assert_eq!(sandbox.get("two"), b"1");
        sandbox
            .files
            .rename(b"dir", b"moved", false)
            .expect("moved");
        assert_eq!(sandbox.names("moved"), ["file"]);
        assert_eq!(
            code(sandbox.files.rename(b"moved", b"moved/below", false)),
            ErrorCode::InvalidRequest
        );
        assert_eq!(
            code(sandbox.files.rename(b"two", b"moved", true)),
            ErrorCode::NotAFile
        );
        let missing = refused(sandbox.files.rename(b"gone", b"x", false));
        assert!(
            missing.code == ErrorCode::NotFound && missing.message.contains("gone"),
            "{missing:?}"
        );
        let no_parent = refused(sandbox.files.rename(b"two", b"no/such/dir", false));
        assert!(
            no_parent.code == ErrorCode::NotFound && no_parent.message.contains("no/such/dir"),
            "{no_parent:?}"
        );
    }

    #[test]
    fn a_file_moves_between_file_systems_with_mode_and_time() {
        let sandbox = Sandbox::new();
        let Ok(other) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        if std::fs::metadata(other.path()).expect("stat").dev()
            == std::fs::metadata(&sandbox.files.root).expect("stat").dev()
        {
            return;
        }
        sandbox.put("file", "hello");
        std::fs::set_permissions(sandbox.path("file"), std::fs::Permissions::from_mode(0o711))
            .expect("mode");
        let before = std::fs::metadata(sandbox.path("file")).expect("stat");
        let target = other.path().join("file");
        sandbox
            .files
            .rename(b"file", path::bytes(&target), false)
            .expect("moved");
        let after = std::fs::metadata(&target).expect("stat");
        assert_eq!(
            (after.mode(), after.mtime(), after.len()),
            (before.mode(), before.mtime(), 5)
        );
        assert!(!sandbox.path("file").exists());
        sandbox.put("file", "again");
        assert_eq!(
            code(sandbox.files.rename(b"file", path::bytes(&target), false)),
            ErrorCode::AlreadyExists
        );
        assert_eq!(sandbox.get("file"), b"again");
        symlink("x", sandbox.path("link")).expect("link");
        sandbox
            .files
            .rename(b"link", path::bytes(&other.path().join("link")), false)
            .expect("moved");
        sandbox.put("dir/x", "");
        let refusal = refused(sandbox.files.rename(
            b"dir",
            path::bytes(&other.path().join("dir")),
            false,
        ));
        assert!(refusal.message.contains("different file systems"));
    }

    #[test]
    fn making_a_directory_tells_what_is_in_the_way() {
        let sandbox = Sandbox::new();
        sandbox.files.mkdir(b"a", false).expect("made");
        assert_eq!(
            code(sandbox.files.mkdir(b"a", false)),
            ErrorCode::AlreadyExists
        );
        sandbox.files.mkdir(b"a", true).expect("there already");
        sandbox.files.mkdir(b"b/c/d/", true).expect("made");
        assert_eq!(
            code(sandbox.files.mkdir(b"x/y", false)),
            ErrorCode::NotFound
        );
        sandbox.put("file", "");
        assert_eq!(
            code(sandbox.files.mkdir(b"file/x", true)),
            ErrorCode::NotADirectory
        );
        assert_eq!(
            code(sandbox.files.mkdir(b"file", true)),
            ErrorCode::AlreadyExists
        );
    }
}

//! A directory that paths can't escape, for patches, imports and the steps of jobs.
//!
//! Invariants: a path has no `..` and is not absolute; links on it are followed only while they
//! stay below the root; where the kernel can't guarantee that (no `openat2`), no link is followed.

use std::{
    ffi::OsStr,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType as Kind, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2,
        readlinkat, statat,
    },
    io::Errno,
};

const DIRECTORY_FLAGS: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// The number of attempts at a lookup that races with renames.
const MAX_LOOKUP_ATTEMPTS: usize = 8;

#[derive(Debug)]
pub(super) struct ConfinedRoot {
    root: OwnedFd,
    /// For tests of the fallback.
    pub(super) without_openat2: bool,
}

impl ConfinedRoot {
    pub(super) fn open(path: &Path) -> Result<Self, Errno> {
        Ok(Self {
            root: openat(CWD, path, DIRECTORY_FLAGS, Mode::empty())?,
            without_openat2: false,
        })
    }

    /// The root is a directory that is open already.
    pub(super) const fn at(root: OwnedFd) -> Self {
        Self {
            root,
            without_openat2: false,
        }
    }

    /// Opens a directory below the root, as the base of other calls. `EXDEV` means that the path
    /// leads outside.
    pub(super) fn directory(&self, parts: &[&[u8]]) -> Result<OwnedFd, Errno> {
        if parts.is_empty() {
            return openat(&self.root, ".", DIRECTORY_FLAGS, Mode::empty());
        }
        self.look_up(&parts.join(&b'/'), DIRECTORY_FLAGS)
            .unwrap_or_else(|| self.real_directory(parts))
    }

    /// Opens what a path names, which may contain `..`. `EXDEV` means that it leads outside.
    pub(super) fn open_below(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        if let Some(result) = self.look_up(path, flags) {
            return result;
        }
        let parts = parts(path).map_err(|_| Errno::XDEV)?;
        let Some((name, parents)) = parts.split_last() else {
            return Err(Errno::NOENT);
        };
        let directory = self.real_directory(parents)?;
        openat(directory, *name, flags | OFlags::NOFOLLOW, Mode::empty()).map_err(|errno| {
            if errno == Errno::LOOP {
                Errno::XDEV
            } else {
                errno
            }
        })
    }

    /// Opens a directory below the root for listing; follows no links.
    pub(super) fn readable_directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        const FLAGS: OFlags = OFlags::RDONLY
            .union(OFlags::DIRECTORY)
            .union(OFlags::CLOEXEC);
        if !self.without_openat2 {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            match openat2(&self.root, path, FLAGS, Mode::empty(), resolve) {
                Err(Errno::NOSYS | Errno::PERM) => {}
                result => return result,
            }
        }
        let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        openat(self.real_directory(&parts)?, ".", FLAGS, Mode::empty())
    }

    /// Lets the kernel resolve a path; `None` if it can't keep the path below the root.
    fn look_up(&self, path: &[u8], flags: OFlags) -> Option<Result<OwnedFd, Errno>> {
        if self.without_openat2 {
            return None;
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..MAX_LOOKUP_ATTEMPTS {
            match openat2(&self.root, path, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN) => {}
                // Some seccomp filters return EPERM for unknown calls.
                Err(Errno::NOSYS | Errno::PERM) => return None,
                result => return Some(result),
            }
        }
        Some(Err(Errno::AGAIN))
    }

    /// Like [`ConfinedRoot::directory`], but follows no links: `EXDEV` means that the path contains
    /// one.
    pub(super) fn real_directory(&self, parts: &[&[u8]]) -> Result<OwnedFd, Errno> {
        let mut at = openat(&self.root, ".", DIRECTORY_FLAGS, Mode::empty())?;
        for part in parts {
            at = match openat(
                &at,
                *part,
                DIRECTORY_FLAGS | OFlags::NOFOLLOW,
                Mode::empty(),
            ) {
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    let stat = statat(&at, *part, AtFlags::SYMLINK_NOFOLLOW)?;
                    return Err(if Kind::from_raw_mode(stat.st_mode) == Kind::Symlink {
                        Errno::XDEV
                    } else {
                        Errno::NOTDIR
                    });
                }
                result => result?,
            };
        }
        Ok(at)
    }

    /// Like [`ConfinedRoot::directory`], but creates missing directories. `made` gets the number of
    /// leading parts of each new directory.
    pub(super) fn make_directory(
        &self,
        parts: &[&[u8]],
        mode: Mode,
        made: impl FnMut(usize),
    ) -> Result<OwnedFd, Errno> {
        self.make_with(parts, mode, made, Self::directory)
    }

    /// Like [`ConfinedRoot::real_directory`], but creates missing directories.
    pub(super) fn make_real_directory(
        &self,
        parts: &[&[u8]],
        mode: Mode,
        made: impl FnMut(usize),
    ) -> Result<OwnedFd, Errno> {
        self.make_with(parts, mode, made, Self::real_directory)
    }

    fn make_with(
        &self,
        parts: &[&[u8]],
        mode: Mode,
        mut made: impl FnMut(usize),
        open: impl Fn(&Self, &[&[u8]]) -> Result<OwnedFd, Errno>,
    ) -> Result<OwnedFd, Errno> {
        match open(self, parts) {
            Err(Errno::NOENT) => {}
            result => return result,
        }
        let mut at = self.directory(&[])?;
        for count in 1..=parts.len() {
            match mkdirat(&at, parts[count - 1], mode) {
                Ok(()) => made(count),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            at = open(self, &parts[..count])?;
        }
        Ok(at)
    }

    /// The real location of an open directory, in parts from the root; `None` if the system doesn't
    /// tell.
    pub(super) fn real_parts(&self, directory: &OwnedFd) -> Option<Vec<Vec<u8>>> {
        let path = |fd: &OwnedFd| {
            readlinkat(CWD, format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).ok()
        };
        let (root, path) = (path(&self.root)?, path(directory)?);
        let path = Path::new(OsStr::from_bytes(path.as_bytes()));
        let rest = path.strip_prefix(OsStr::from_bytes(root.as_bytes())).ok()?;
        Some(rest.iter().map(|part| part.as_bytes().to_vec()).collect())
    }
}

/// The parts of a relative path without `.`, or the reason why it may leave its root.
pub(super) fn parts(path: &[u8]) -> Result<Vec<&[u8]>, &'static str> {
    if path.starts_with(b"/") {
        return Err("the path is absolute");
    }
    if path.contains(&0) {
        return Err("the path contains a NUL byte");
    }
    if path.len() > cynode_api::file_limits::MAX_PATH_BYTES {
        return Err("the path is too long");
    }
    let mut parts = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err("the path contains '..'"),
            part => parts.push(part),
        }
    }
    if parts.is_empty() {
        Err("the path is empty")
    } else {
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;

    use super::*;

    fn tree() -> (tempfile::TempDir, ConfinedRoot) {
        let temp = tempfile::tempdir().expect("temp dir");
        let root = temp.path().join("root");
        std::fs::create_dir_all(root.join("a/b")).expect("made");
        std::fs::create_dir(temp.path().join("outside")).expect("made");
        symlink("a", root.join("inside")).expect("link");
        symlink("../outside", root.join("up")).expect("link");
        symlink(temp.path().join("outside"), root.join("absolute")).expect("link");
        symlink("gone", root.join("dangling")).expect("link");
        std::fs::write(root.join("file"), "").expect("written");
        let confined = ConfinedRoot::open(&root).expect("opened");
        (temp, confined)
    }

    #[test]
    fn links_are_followed_only_while_they_stay_inside() {
        let (_temp, mut confined) = tree();
        assert!(confined.directory(&[b"a", b"b"]).is_ok());
        assert!(confined.directory(&[b"inside", b"b"]).is_ok());
        for without_openat2 in [false, true] {
            confined.without_openat2 = without_openat2;
            assert!(confined.directory(&[b"a", b"b"]).is_ok());
            assert_eq!(confined.directory(&[b"up"]).err(), Some(Errno::XDEV));
            assert_eq!(confined.directory(&[b"absolute"]).err(), Some(Errno::XDEV));
            assert_eq!(
                confined.directory(&[b"file", b"x"]).err(),
                Some(Errno::NOTDIR)
            );
            assert_eq!(confined.directory(&[b"none"]).err(), Some(Errno::NOENT));
        }
    }

    #[test]
    fn missing_directories_are_made_and_reported() {
        let (temp, mut confined) = tree();
        for (without_openat2, top) in [(false, &b"new"[..]), (true, b"other")] {
            confined.without_openat2 = without_openat2;
            let mut made = Vec::new();
            confined
                .make_directory(&[b"a", top, b"deep"], Mode::RWXU, |count| made.push(count))
                .expect("made");
            assert_eq!(made, [2, 3]);
            assert!(
                confined
                    .make_directory(&[b"up", b"x"], Mode::RWXU, |_| {})
                    .is_err()
            );
            assert!(
                confined
                    .make_directory(&[b"dangling", b"x"], Mode::RWXU, |_| {})
                    .is_err()
            );
        }
        assert_eq!(
            std::fs::read_dir(temp.path().join("outside"))
                .expect("listed")
                .count(),
            0
        );
    }

    #[test]
    fn the_real_location_of_a_directory_behind_links_is_known() {
        let (_temp, confined) = tree();
        let directory = confined.directory(&[b"inside", b"b"]).expect("opened");
        assert_eq!(
            confined.real_parts(&directory),
            Some(vec![b"a".to_vec(), b"b".to_vec()])
        );
    }

    #[test]
    fn paths_that_could_leave_are_refused() {
        for path in [
            &b"/a"[..],
            b"..",
            b"a/../b",
            b"a/..",
            b"",
            b".",
            b"./",
            b"a\0b",
        ] {
            assert!(parts(path).is_err(), "{path:?}");
        }
        assert_eq!(parts(b"./a//b/"), Ok(vec![&b"a"[..], b"b"]));
    }

    proptest! {
        #[test]
        fn accepted_paths_have_only_plain_names(
            path in proptest::collection::vec(
                prop_oneof![Just(b'.'), Just(b'/'), Just(b'a'), any::<u8>()],
                0..40,
            ),
        ) {
            if let Ok(parts) = parts(&path) {
                prop_assert!(!parts.is_empty());
                for part in parts {
                    prop_assert!(
                        !part.is_empty()
                            && part != b"."
                            && part != b".."
                            && !part.contains(&b'/')
                            && !part.contains(&0)
                    );
                }
            }
        }
    }
}

//! Directories and lock files that are private to one user, even in places where others can write.
//!
//! Invariants: a symbolic link as the last component is never followed, and checks apply to the
//! open descriptor, not to the name. A lock file must not be readable by others: any descriptor
//! suffices for `flock`.

use std::{fs::File, io, path::Path};

use rustix::{
    fs::{FileType, Mode, OFlags, Stat, fchmod, fstat, lstat, mkdir, open},
    io::Errno,
    process::geteuid,
};

const OTHERS: u32 = 0o077;

/// Creates a private directory. An existing one must be a directory, owned by this user, with mode
/// 0700. For places where others can write, such as `/tmp`: another user may have created it first
/// and planted files.
pub fn private_directory(path: &Path) -> io::Result<()> {
    make(path)?;
    // The name could refer to another file by now.
    let directory = open(
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(at(path))?;
    let found = fstat(&directory).map_err(at(path))?;
    check_owner(path, &found)?;
    match found.st_mode & 0o777 {
        0o700 => Ok(()),
        mode => Err(refused(
            path,
            &format!(
                "is open to others (mode {mode:03o}): look at what is in it, then run 'chmod 700 \
                 {}'",
                path.display()
            ),
        )),
    }
}

/// Creates a private directory, or removes the permissions of others from an existing one of this
/// user. For places where nobody else can write.
pub fn closed_directory(path: &Path) -> io::Result<()> {
    make(path)?;
    let directory = match open(
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Err(Errno::NOTDIR | Errno::LOOP) => {
            return Err(refused(path, "is not a directory: remove it"));
        }
        opened => opened.map_err(at(path))?,
    };
    let found = fstat(&directory).map_err(at(path))?;
    check_owner(path, &found)?;
    if found.st_mode & OTHERS != 0 {
        fchmod(&directory, Mode::RWXU).map_err(at(path))?;
    }
    Ok(())
}

/// Opens or creates a lock file that nobody else can open. It belongs to this user or to the owner
/// of its directory.
pub fn open_lock(path: &Path) -> io::Result<fs_err::File> {
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match open(path, flags, Mode::RUSR | Mode::WUSR) {
        Err(Errno::LOOP) => return Err(refused(path, "is a symbolic link: remove it")),
        opened => opened.map_err(at(path))?,
    };
    let found = fstat(&file).map_err(at(path))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(refused(path, "is not a file: remove it"));
    }
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    if found.st_uid != geteuid().as_raw()
        && found.st_uid != lstat(directory).map_err(at(directory))?.st_uid
    {
        return Err(refused(
            path,
            &format!("belongs to another user ({}): remove it", found.st_uid),
        ));
    }
    if found.st_mode & OTHERS != 0 {
        fchmod(&file, Mode::RUSR | Mode::WUSR).map_err(at(path))?;
    }
    Ok(fs_err::File::from_parts(File::from(file), path))
}

fn make(path: &Path) -> io::Result<()> {
    match mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(at(path)(error)),
    }
}

fn check_owner(path: &Path, found: &Stat) -> io::Result<()> {
    if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
        return Err(refused(path, "is not a directory: remove it"));
    }
    if found.st_uid != geteuid().as_raw() {
        return Err(refused(
            path,
            &format!(
                "belongs to another user ({}), who must remove it",
                found.st_uid
            ),
        ));
    }
    Ok(())
}

fn refused(path: &Path, why: &str) -> io::Error {
    io::Error::other(format!("{} {why}", path.display()))
}

fn at(path: &Path) -> impl FnOnce(Errno) -> io::Error + use<> {
    let path = path.to_owned();
    move |error| {
        io::Error::new(
            io::Error::from(error).kind(),
            format!("{}: {}", path.display(), io::Error::from(error)),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use rustix::fs::{FlockOperation, flock};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs_err::symlink_metadata(path).expect("there").mode() & 0o777
    }

    fn set_mode(path: &Path, mode: u32) {
        fs_err::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("set");
    }

    /// Changes the owner, if the test has the privilege.
    fn give_away(path: &Path) -> bool {
        geteuid().is_root() && std::os::unix::fs::lchown(path, Some(65_534), Some(65_534)).is_ok()
    }

    #[test]
    fn a_private_directory_is_created_closed_and_refused_if_another_user_may_own_it() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("own");
        private_directory(&path).expect("made");
        assert_eq!(mode(&path), 0o700);
        private_directory(&path).expect("the same again");
        for open in [0o755, 0o770, 0o777, 0o711, 0o701] {
            set_mode(&path, open);
            let message = private_directory(&path)
                .expect_err("open to others")
                .to_string();
            assert!(
                message.contains("chmod 700") && message.contains(&format!("{open:03o}")),
                "{message}"
            );
            assert_eq!(
                mode(&path),
                open,
                "the mode of a refused directory was changed"
            );
        }
        set_mode(&path, 0o700);
        symlink(&path, root.path().join("link")).expect("linked");
        assert!(
            private_directory(&root.path().join("link"))
                .expect_err("a link")
                .to_string()
                .contains("is not a directory")
        );
        fs_err::write(root.path().join("file"), "").expect("written");
        assert!(
            private_directory(&root.path().join("file"))
                .expect_err("a file")
                .to_string()
                .contains("is not a directory")
        );
        assert_eq!(
            private_directory(&root.path().join("missing/own"))
                .expect_err("no parent")
                .kind(),
            io::ErrorKind::NotFound
        );
        if give_away(&path) {
            assert!(
                private_directory(&path)
                    .expect_err("another's")
                    .to_string()
                    .contains("belongs to another user (65534)")
            );
        }
    }

    #[test]
    fn a_closed_directory_of_ours_is_closed_and_no_link_is_followed() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("own");
        closed_directory(&path).expect("made");
        assert_eq!(mode(&path), 0o700);
        set_mode(&path, 0o755);
        closed_directory(&path).expect("closed");
        assert_eq!(mode(&path), 0o700);
        set_mode(&path, 0o755);
        symlink(&path, root.path().join("link")).expect("linked");
        assert!(
            closed_directory(&root.path().join("link"))
                .expect_err("a link")
                .to_string()
                .contains("is not a directory")
        );
        assert_eq!(
            mode(&path),
            0o755,
            "the mode of the target of a link was changed"
        );
        if give_away(&path) {
            assert!(
                closed_directory(&path)
                    .expect_err("another's")
                    .to_string()
                    .contains("belongs to another user")
            );
        }
    }

    #[test]
    fn a_lock_can_be_opened_by_its_owner_alone() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("lock");
        let lock = open_lock(&path).expect("opened");
        assert_eq!(mode(&path), 0o600);
        flock(&lock, FlockOperation::NonBlockingLockExclusive).expect("held");
        assert!(
            flock(
                open_lock(&path).expect("opened again"),
                FlockOperation::NonBlockingLockExclusive
            )
            .is_err()
        );
        drop(lock);
        // As an earlier version created it.
        set_mode(&path, 0o644);
        drop(open_lock(&path).expect("opened"));
        assert_eq!(mode(&path), 0o600);
        let elsewhere = root.path().join("elsewhere");
        symlink(&elsewhere, root.path().join("link")).expect("linked");
        assert!(
            open_lock(&root.path().join("link"))
                .expect_err("a link")
                .to_string()
                .contains("symbolic link")
        );
        assert!(!elsewhere.exists(), "the target of a link was created");
        fs_err::create_dir(root.path().join("directory")).expect("made");
        assert!(open_lock(&root.path().join("directory")).is_err());
        if give_away(&path) {
            assert!(
                open_lock(&path)
                    .expect_err("another's")
                    .to_string()
                    .contains("belongs to another user")
            );
            // The owner of the directory controls its locks anyway; root accepts them.
            assert!(give_away(root.path()));
            assert!(open_lock(&path).is_ok());
        }
    }
}

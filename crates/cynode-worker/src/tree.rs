//! Removes directory trees created by hostile code: symlinks are never followed, and any depth
//! works.

use std::{ffi::CString, io, os::fd::OwnedFd, path::Path};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RawMode};

/// Removes `path` and everything below it. Directories are moved to the top one by one and emptied
/// there, so that neither the stack nor the number of open files grows with the depth.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let top = match open_directory(rustix::fs::CWD, path) {
        Ok(top) => top,
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => {
            return fs_err::remove_file(path);
        }
        Err(error) => return Err(error.into()),
    };
    let mut counter: u64 = 0;
    loop {
        let directories = empty(&top, None, &mut counter)?;
        if directories.is_empty() {
            break;
        }
        for name in directories {
            let below = open_directory(&top, name.as_c_str())?;
            empty(&below, Some(&top), &mut counter)?;
            rustix::fs::unlinkat(&top, name.as_c_str(), AtFlags::REMOVEDIR)?;
        }
    }
    fs_err::remove_dir(path)
}

fn open_directory(
    at: impl rustix::fd::AsFd,
    path: impl rustix::path::Arg,
) -> Result<OwnedFd, rustix::io::Errno> {
    rustix::fs::openat(
        at,
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// Unlinks everything in a directory except directories. Those are moved to `top`, or returned if
/// this is the top.
fn empty(
    directory: &OwnedFd,
    top: Option<&OwnedFd>,
    counter: &mut u64,
) -> io::Result<Vec<CString>> {
    let mut directories = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let is_directory = match entry.file_type() {
            FileType::Directory => true,
            FileType::Unknown => {
                FileType::from_raw_mode(
                    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode
                        as RawMode,
                ) == FileType::Directory
            }
            _ => false,
        };
        match (is_directory, top) {
            (false, _) => rustix::fs::unlinkat(directory, name, AtFlags::empty())?,
            (true, None) => directories.push(name.to_owned()),
            (true, Some(top)) => loop {
                *counter += 1;
                match rustix::fs::renameat_with(
                    directory,
                    name,
                    top,
                    format!("\u{1}{counter}"),
                    rustix::fs::RenameFlags::NOREPLACE,
                ) {
                    Ok(()) => break,
                    Err(rustix::io::Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
            },
        }
    }
    Ok(directories)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    // invariant: no-host-paths
    fn a_tree_of_any_depth_is_removed_and_links_are_not_followed() {
        let outside = tempfile::tempdir().expect("a directory");
        fs_err::write(outside.path().join("precious"), b"x").expect("a file");
        let base = tempfile::tempdir().expect("a directory");
        let top = base.path().join("top");
        fs_err::create_dir(&top).expect("a directory");
        fs_err::os::unix::fs::symlink(outside.path(), top.join("link")).expect("a link");
        let mut at = rustix::fs::open(&top, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())
            .expect("opens");
        for _ in 0..5_000 {
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).expect("a directory");
            rustix::fs::symlinkat(outside.path(), &at, "l").expect("a link");
            at = rustix::fs::openat(&at, "d", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())
                .expect("opens");
        }
        remove(&top).expect("removes");
        assert!(!top.exists());
        assert!(outside.path().join("precious").exists());
        remove(&top).expect("removing a missing tree succeeds");
    }
}

//! Paths that try to escape.

use std::{
    ffi::OsStr,
    fs,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            ffi::OsStrExt as _,
            fs::{MetadataExt as _, symlink},
        },
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{Mode, fstat},
    io::Errno,
};

use super::{
    super::{
        confined::{self, ConfinedRoot},
        error::{escaped, shown},
        path::{self, printed_prefix},
    },
    FuzzWorkspace,
};
use crate::fuzz::{fields, split};

/// Directories for links.
const DIRECTORIES: [&str; 3] = ["", "a", "a/b"];

/// No path resolves outside its root, whatever links exist, with or without `openat2`; and all
/// functions on paths are consistent.
pub fn paths(input: &[u8]) {
    let (options, rest) = split(input);
    let scratch = FuzzWorkspace::new();
    fs::create_dir_all(scratch.root().join("a/b")).expect("made");
    scratch.put("file", "");
    let mut confined = ConfinedRoot::open(scratch.root()).expect("opened");
    for (index, field) in fields(rest).take(16).enumerate() {
        if let Some(link) = field.strip_prefix(b"\n") {
            put_link(
                &scratch,
                DIRECTORIES[(usize::from(options) + index) % DIRECTORIES.len()],
                link,
            );
        } else {
            check_text(&scratch, field);
            lookup(&scratch, &mut confined, field);
        }
    }
    scratch.assert_outside_is_untouched();
}

/// Creates the link `name target` in a real directory.
fn put_link(scratch: &FuzzWorkspace, directory: &str, link: &[u8]) {
    let Some(space) = link.iter().position(|byte| *byte == b' ') else {
        return;
    };
    let (name, target) = (&link[..space], &link[space + 1..]);
    if name.contains(&b'/') || name == b"a" || name == b"b" {
        return;
    }
    // Invalid and existing names don't matter.
    let _made = symlink(
        OsStr::from_bytes(target),
        scratch.root().join(directory).join(OsStr::from_bytes(name)),
    );
}

/// Checks the purely lexical functions.
fn check_text(scratch: &FuzzWorkspace, name: &[u8]) {
    assert!(
        !shown(name).chars().any(char::is_control) && !escaped(name).chars().any(char::is_control)
    );

    let components = |path: &[u8]| -> Vec<Vec<u8>> {
        let parts = Path::new(OsStr::from_bytes(path))
            .components()
            .filter(|part| *part != Component::CurDir);
        parts
            .map(|part| part.as_os_str().as_bytes().to_vec())
            .collect()
    };
    assert_eq!(
        components(&printed_prefix(name)),
        components(name),
        "a printed prefix names another path"
    );

    let is_plain = Path::new(OsStr::from_bytes(name))
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    match confined::parts(name) {
        Ok(parts) => {
            assert!(is_plain && !parts.is_empty() && !name.contains(&0));
            assert_eq!(
                parts.iter().map(|part| part.to_vec()).collect::<Vec<_>>(),
                components(name)
            );
        }
        Err(_) => assert!(
            !is_plain || components(name).is_empty() || name.contains(&0) || name.len() > 4_095,
            "{} was refused",
            shown(name)
        ),
    }

    if let Ok(place) = scratch.files.locate(name) {
        assert!(place.is_absolute() && !path::bytes(&place).contains(&0));
        assert_eq!(
            place.starts_with(scratch.root()),
            !name.starts_with(b"/")
                || Path::new(OsStr::from_bytes(name)).starts_with(scratch.root())
        );
        if let Ok((parent, last)) = path::split(&place) {
            assert!(
                !last.is_empty() && last != "." && last != ".." && !last.as_bytes().contains(&b'/')
            );
            assert_eq!(
                components(path::bytes(&parent.join(last))),
                components(path::bytes(&place)),
                "the directory and the name of a path do not make up the path"
            );
        }
    }
}

/// Finds and creates the directory of a path, with and without `openat2`.
fn lookup(scratch: &FuzzWorkspace, confined: &mut ConfinedRoot, name: &[u8]) {
    let Ok(parts) = confined::parts(name) else {
        return;
    };
    confined.without_openat2 = false;
    let found = confined.directory(&parts);
    confined.without_openat2 = true;
    let fallback = confined.directory(&parts);
    if let Ok(found) = &found {
        assert_inside(scratch, confined, found, name);
    }
    match (&found, &fallback) {
        (Ok(found), Ok(fallback)) => {
            assert_eq!(
                inode(found),
                inode(fallback),
                "the lookups found different directories"
            );
        }
        // The fallback follows no links at all.
        (
            Ok(_)
            | Err(
                Errno::LOOP
                | Errno::NOENT
                | Errno::XDEV
                | Errno::NOTDIR
                | Errno::ACCESS
                | Errno::NAMETOOLONG,
            ),
            Err(Errno::XDEV),
        ) => {}
        (Err(found), Err(fallback)) => {
            assert_eq!(found, fallback, "the lookups failed differently");
        }
        (found, fallback) => panic!("{} gives {found:?}, the fallback {fallback:?}", shown(name)),
    }
    for without_openat2 in [true, false] {
        confined.without_openat2 = without_openat2;
        if let Ok(made) = confined.make_directory(&parts, Mode::RWXU, |_| {}) {
            assert_inside(scratch, confined, &made, name);
        }
    }
}

fn inode(directory: &OwnedFd) -> (u64, u64) {
    let stat = fstat(directory).expect("open");
    (stat.st_dev, stat.st_ino)
}

/// An open directory is the one that the system resolves the name to, and it is below the root.
fn assert_inside(
    scratch: &FuzzWorkspace,
    confined: &ConfinedRoot,
    directory: &OwnedFd,
    name: &[u8],
) {
    let real = fs::canonicalize(scratch.root().join(OsStr::from_bytes(name))).expect("there");
    assert!(
        real.starts_with(scratch.root()),
        "{} leads to {}",
        shown(name),
        real.display()
    );
    let metadata = fs::metadata(&real).expect("there");
    assert_eq!(inode(directory), (metadata.dev(), metadata.ino()));
    let opened = fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd())).expect("open");
    assert_eq!(opened, real);
    let parts = confined.real_parts(directory).expect("known");
    assert_eq!(
        parts
            .iter()
            .map(|part| OsStr::from_bytes(part))
            .collect::<PathBuf>(),
        real.strip_prefix(scratch.root()).expect("below")
    );
}

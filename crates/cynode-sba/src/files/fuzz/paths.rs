//! Names that want to get out.

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
        confined::{self, Confined},
        error::{escaped, shown},
        path::{self, printed_prefix},
    },
    Scratch,
};
use crate::fuzz::{fields, split};

/// Where links are put.
const DIRECTORIES: [&str; 3] = ["", "a", "a/b"];

/// No path resolves outside of its root, whatever links are there, with `openat2` or without; and what is said about a
/// path is true.
pub fn paths(input: &[u8]) {
    let (knob, rest) = split(input);
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.root().join("a/b")).expect("made");
    scratch.put("file", "");
    let mut confined = Confined::open(scratch.root()).expect("opened");
    for (index, field) in fields(rest).take(16).enumerate() {
        if let Some(link) = field.strip_prefix(b"\n") {
            put_link(
                &scratch,
                DIRECTORIES[(usize::from(knob) + index) % DIRECTORIES.len()],
                link,
            );
        } else {
            words(&scratch, field);
            lookup(&scratch, &mut confined, field);
        }
    }
    scratch.assert_outside_is_untouched();
}

/// `name target`, in a directory of ours that is no link.
fn put_link(scratch: &Scratch, directory: &str, link: &[u8]) {
    let Some(space) = link.iter().position(|byte| *byte == b' ') else {
        return;
    };
    let (name, target) = (&link[..space], &link[space + 1..]);
    if name.contains(&b'/') || name == b"a" || name == b"b" {
        return;
    }
    // Names that the system does not take, or that are taken, are no loss.
    let _made = symlink(
        OsStr::from_bytes(target),
        scratch.root().join(directory).join(OsStr::from_bytes(name)),
    );
}

/// What is worked out from the text of a path alone.
fn words(scratch: &Scratch, name: &[u8]) {
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
        "a printed prefix names the same place"
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
            "{} is refused",
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
                "a path is its directory and its name"
            );
        }
    }
}

/// Finds and makes the directory that a path names, in both ways.
fn lookup(scratch: &Scratch, confined: &mut Confined, name: &[u8]) {
    let Ok(parts) = confined::parts(name) else {
        return;
    };
    confined.without_openat2 = false;
    let found = confined.directory(&parts);
    confined.without_openat2 = true;
    let by_steps = confined.directory(&parts);
    if let Ok(found) = &found {
        assert_inside(scratch, confined, found, name);
    }
    match (&found, &by_steps) {
        (Ok(found), Ok(by_steps)) => {
            assert_eq!(inode(found), inode(by_steps), "both ways lead to one place")
        }
        // The simple way follows no links at all.
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
        (Err(found), Err(by_steps)) => assert_eq!(found, by_steps, "both ways fail alike"),
        (found, by_steps) => panic!("{} gives {found:?} and by steps {by_steps:?}", shown(name)),
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

/// An open directory is where the system's own resolution of the name leads, and that is below the root.
fn assert_inside(scratch: &Scratch, confined: &Confined, directory: &OwnedFd, name: &[u8]) {
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

//! Archives that try to escape.

use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use cynode_archive::{Archive, Reader, components};
use tar::Header;

use super::{
    super::{archive::BLOCK, error::Failure},
    FuzzWorkspace, Tree,
};
use crate::fuzz::split;

/// An archive writes only below its directory, sets no special permissions, creates no devices, and
/// its effect doesn't depend on how the input is split.
pub fn archives(input: &[u8]) {
    let (knob, rest) = split(input);
    let mut archive = rest.to_vec();
    // Wrong checksums would keep the fuzzer from getting further.
    if knob & 1 == 0 {
        correct_checksums(&mut archive);
    }
    let pieces = [(archive.len() + 1), usize::from(knob) * 4 + 1];
    let [(one, first), (other, second)] = pieces.map(|size| unpacked(&archive, size));
    let named_paths = named_paths(&archive);
    let was_there = ["beside", "into", "into/file", "into/out"].map(Path::new);
    for path in first
        .keys()
        .filter(|path| !was_there.contains(&path.as_path()))
    {
        assert!(
            named_paths.iter().any(|name| name.starts_with(path)),
            "{} was created, but the archive does not name it",
            path.display()
        );
    }
    assert_eq!(one, other, "the result does not depend on the pieces");
    assert_eq!(first, second, "the files do not depend on the pieces");
}

/// The paths that the gate would check against rules.
fn named_paths(archive: &[u8]) -> Vec<PathBuf> {
    let mut archive = Archive::new(Reader::new(archive));
    let mut named_paths = Vec::new();
    while let Ok(Some(entry)) = archive.next_entry() {
        let parts = components(&entry.path).map(OsStr::from_bytes);
        named_paths.push(std::iter::once(OsStr::new("into")).chain(parts).collect());
    }
    named_paths
}

/// The result of an import, and the files that it created.
fn unpacked(archive: &[u8], size: usize) -> (Option<String>, Tree) {
    let scratch = FuzzWorkspace::new();
    // A file to replace, and a link outside to refuse.
    scratch.put("into/file", "old\n");
    scratch.link("into/out", "../../outside");
    scratch.put("beside", "beside\n");
    let mut pieces = archive.chunks(size).map(<[u8]>::to_vec);
    let ended = match scratch.files.import(b"into", &mut || Ok(pieces.next())) {
        Ok(_) => None,
        Err(Failure::Refused(error)) => Some(format!("{}: {}", error.code, error.message)),
        Err(Failure::Connection(error)) => panic!("unexpected connection error: {error}"),
    };
    scratch.assert_outside_is_untouched();
    assert_eq!(
        fs::read(scratch.root().join("beside")).expect("there"),
        b"beside\n"
    );
    open_up(&scratch);
    let made = scratch.inside();
    for (path, (mode, _)) in &made {
        assert!(
            path.starts_with("into") || path.as_os_str() == "beside",
            "{} was created",
            path.display()
        );
        assert_eq!(
            mode & 0o7000,
            0,
            "{} has special permissions",
            path.display()
        );
    }
    (ended, made)
}

/// Makes everything that an archive closed readable and removable again.
fn open_up(scratch: &FuzzWorkspace) {
    use std::os::unix::fs::PermissionsExt as _;
    let mut open = vec![scratch.root().to_owned()];
    while let Some(directory) = open.pop() {
        let mode = fs::metadata(&directory)
            .expect("there")
            .permissions()
            .mode()
            & 0o7777;
        if mode & 0o700 != 0o700 {
            fs::set_permissions(&directory, fs::Permissions::from_mode(mode | 0o700))
                .expect("ours");
        }
        for entry in fs::read_dir(&directory).expect("listed") {
            let entry = entry.expect("entry");
            let kind = entry.file_type().expect("a type");
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                let mode = entry.metadata().expect("there").permissions().mode() & 0o7777;
                fs::set_permissions(entry.path(), fs::Permissions::from_mode(mode | 0o400))
                    .expect("ours");
            }
        }
    }
}

/// Sets the checksum of every block where a header is expected.
fn correct_checksums(archive: &mut [u8]) {
    let mut at = 0_usize;
    while let Some(block) = archive.get_mut(at..at.saturating_add(BLOCK)) {
        if block.iter().all(|byte| *byte == 0) {
            return;
        }
        let mut header = Header::new_old();
        header.as_mut_bytes().copy_from_slice(block);
        header.set_cksum();
        block.copy_from_slice(header.as_bytes());
        let Some(content) = header
            .entry_size()
            .ok()
            .and_then(|size| usize::try_from(size).ok())
            .and_then(|size| size.checked_next_multiple_of(BLOCK))
        else {
            return;
        };
        let Some(next) = at.checked_add(BLOCK).and_then(|at| at.checked_add(content)) else {
            return;
        };
        at = next;
    }
}

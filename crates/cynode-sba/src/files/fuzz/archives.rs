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
    let (options, rest) = split(input);
    let mut archive = rest.to_vec();
    // Wrong checksums would keep the fuzzer from getting further.
    if options & 1 == 0 {
        correct_checksums(&mut archive);
    }
    let piece_sizes = [(archive.len() + 1), usize::from(options) * 4 + 1];
    let [(whole_result, whole_files), (split_result, split_files)] =
        piece_sizes.map(|size| unpacked(&archive, size));
    let named_paths = named_paths(&archive);
    let preexisting = ["beside", "into", "into/file", "into/out"].map(Path::new);
    for path in whole_files
        .keys()
        .filter(|path| !preexisting.contains(&path.as_path()))
    {
        assert!(
            named_paths.iter().any(|name| name.starts_with(path)),
            "{} was created, but the archive does not name it",
            path.display()
        );
    }
    assert_eq!(
        whole_result, split_result,
        "the result depends on the pieces"
    );
    assert_eq!(whole_files, split_files, "the files depend on the pieces");
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
fn unpacked(archive: &[u8], piece_size: usize) -> (Option<String>, Tree) {
    let scratch = FuzzWorkspace::new();
    // A file to replace, and a symlink that leads outside.
    scratch.put("into/file", "old\n");
    scratch.link("into/out", "../../outside");
    scratch.put("beside", "beside\n");
    let mut pieces = archive.chunks(piece_size).map(<[u8]>::to_vec);
    let refusal = match scratch.files.import(b"into", &mut || Ok(pieces.next())) {
        Ok(_) => None,
        Err(Failure::Refused(error)) => Some(format!("{}: {}", error.code, error.message)),
        Err(Failure::Connection(error)) => panic!("unexpected connection error: {error}"),
    };
    scratch.assert_outside_is_untouched();
    assert_eq!(
        fs::read(scratch.root().join("beside")).expect("there"),
        b"beside\n"
    );
    restore_permissions(&scratch);
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
    (refusal, made)
}

/// Restores the owner's permissions, so that everything can be read and removed.
fn restore_permissions(scratch: &FuzzWorkspace) {
    use std::os::unix::fs::PermissionsExt as _;
    let mut directories = vec![scratch.root().to_owned()];
    while let Some(directory) = directories.pop() {
        let mode = fs::metadata(&directory)
            .expect("there")
            .permissions()
            .mode()
            & 0o7777;
        if mode & 0o700 != 0o700 {
            fs::set_permissions(&directory, fs::Permissions::from_mode(mode | 0o700))
                .expect("permissions");
        }
        for entry in fs::read_dir(&directory).expect("listed") {
            let entry = entry.expect("entry");
            let kind = entry.file_type().expect("a type");
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_file() {
                let mode = entry.metadata().expect("there").permissions().mode() & 0o7777;
                fs::set_permissions(entry.path(), fs::Permissions::from_mode(mode | 0o400))
                    .expect("permissions");
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

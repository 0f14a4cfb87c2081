//! Resolves callers' paths and opens files.
//!
//! Invariants: relative paths start at the workspace; nothing that can block (a FIFO, a device) is
//! opened for reading without `O_NONBLOCK`, and only regular files are read.

use std::{
    ffi::OsStr,
    fs::File,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use cynode_api::{ErrorCode, FileType, file_limits};
use rustix::{
    fs::{AtFlags, CWD, FileType as Kind, Mode, OFlags, Stat, fstat, mkdirat, openat, statat},
    io::Errno,
};

use super::error::{Failure, FailureContext, Outcome, shown};

#[derive(Clone, Debug)]
pub(crate) struct Files {
    /// The base of relative paths, which patches may not leave.
    pub(super) root: PathBuf,
    /// The git directory of the snapshot that exports compare with.
    pub(super) snapshot: PathBuf,
}

impl Default for Files {
    fn default() -> Self {
        Self {
            root: PathBuf::from(cynode_sba_proto::WORKSPACE),
            snapshot: Path::new(cynode_sba_proto::HOME).join(".cynode/brought.git"),
        }
    }
}

impl Files {
    /// Files of another workspace.
    pub(crate) fn within(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            ..Self::default()
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        let root: PathBuf = root.into();
        Self {
            snapshot: root.with_extension("brought.git"),
            root,
        }
    }

    /// The absolute form of a caller's path.
    pub(super) fn locate(&self, path: &[u8]) -> Outcome<PathBuf> {
        if path.is_empty() {
            return Err(Failure::invalid("the path is empty"));
        }
        if path.contains(&0) {
            return Err(Failure::invalid(format!(
                "the path {} contains a NUL byte",
                shown(path)
            )));
        }
        if path.len() > file_limits::MAX_PATH_BYTES {
            return Err(Failure::invalid(format!(
                "the path {} is longer than {} bytes",
                shown(path),
                file_limits::MAX_PATH_BYTES
            )));
        }
        Ok(self.root.join(OsStr::from_bytes(path)))
    }
}

pub(super) fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// The prefix of entries below a listed or searched directory, as the request named it.
pub(super) fn printed_prefix(path: &[u8]) -> Vec<u8> {
    let mut prefix = Vec::with_capacity(path.len());
    if path.starts_with(b"/") {
        prefix.push(b'/');
    }
    for part in path
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
    {
        join(&mut prefix, part);
    }
    prefix
}

/// Appends a component, with a slash if needed.
pub(super) fn join(prefix: &mut Vec<u8>, name: &[u8]) {
    if !prefix.is_empty() && !prefix.ends_with(b"/") {
        prefix.push(b'/');
    }
    prefix.extend_from_slice(name);
}

/// Directory and last component. The name is never empty, `.` or `..`.
pub(super) fn split(path: &Path) -> Outcome<(&Path, &OsStr)> {
    match (path.parent(), path.file_name()) {
        // `file_name` skips a trailing `/.`, which names the directory itself.
        (Some(parent), Some(name)) if !bytes(path).ends_with(b"/.") => Ok((parent, name)),
        _ => Err(Failure::invalid(format!(
            "the path {} does not end in a name",
            shown(bytes(path))
        ))),
    }
}

pub(super) fn kind(stat: &Stat) -> FileType {
    match Kind::from_raw_mode(stat.st_mode) {
        Kind::RegularFile => FileType::File,
        Kind::Directory => FileType::Dir,
        Kind::Symlink => FileType::Symlink,
        _ => FileType::Other,
    }
}

pub(super) fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

pub(super) const fn permissions(stat: &Stat) -> u32 {
    stat.st_mode & 0o7777
}

/// The metadata of a path, following links.
pub(super) fn stat(path: &Path) -> Outcome<Stat> {
    statat(CWD, path, AtFlags::empty()).doing("inspecting", bytes(path))
}

/// Like [`stat`], but `None` if the path doesn't exist.
pub(super) fn stat_if_any(path: &Path) -> Outcome<Option<Stat>> {
    match statat(CWD, path, AtFlags::empty()) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(Failure::system(errno, "inspecting", bytes(path))),
    }
}

/// Opens a regular file for reading; refuses anything else without blocking.
pub(super) fn open_file(path: &Path) -> Outcome<(File, Stat)> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = openat(CWD, path, flags, Mode::empty()).doing("opening", bytes(path))?;
    let stat = fstat(&fd).doing("inspecting", bytes(path))?;
    match kind(&stat) {
        FileType::File => Ok((File::from(fd), stat)),
        other => Err(not_a_file(path, other)),
    }
}

pub(super) fn not_a_file(path: &Path, kind: FileType) -> Failure {
    let problem = if kind == FileType::Dir {
        "is a directory"
    } else {
        "is not a regular file"
    };
    Failure::new(
        ErrorCode::NotAFile,
        format!("{} {problem}", shown(bytes(path))),
    )
}

/// Like `mkdir -p`: an existing directory is fine. Returns whether it was created.
pub(super) fn make_directories(path: &Path) -> Outcome<bool> {
    const DIRECTORY: Mode = Mode::from_raw_mode(0o755);
    // Goes up to the first directory that exists or can be created, then down again.
    let mut missing = Vec::new();
    let mut at = path;
    let mut made = false;
    loop {
        match mkdirat(CWD, at, DIRECTORY) {
            Ok(()) => {
                made = true;
                break;
            }
            Err(Errno::NOENT) => {
                missing.push(at);
                let Some(parent) = at.parent() else {
                    return Err(Failure::system(
                        Errno::NOENT,
                        "creating the directory",
                        bytes(path),
                    ));
                };
                at = parent;
            }
            Err(errno) => match statat(CWD, at, AtFlags::empty()) {
                Ok(stat) if kind(&stat) == FileType::Dir => break,
                Ok(_) if at == path => {
                    return Err(Failure::system(
                        Errno::EXIST,
                        "creating the directory",
                        bytes(at),
                    ));
                }
                Ok(_) => {
                    return Err(Failure::system(
                        Errno::NOTDIR,
                        "creating the directory",
                        bytes(at),
                    ));
                }
                Err(_) => return Err(Failure::system(errno, "creating the directory", bytes(at))),
            },
        }
    }
    while let Some(directory) = missing.pop() {
        made = match mkdirat(CWD, directory, DIRECTORY) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => {
                return Err(Failure::system(
                    errno,
                    "creating the directory",
                    bytes(directory),
                ));
            }
        };
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn relative_paths_start_at_the_root_and_absolute_ones_stay() {
        let files = Files::new("/somewhere");
        assert_eq!(
            files.locate(b"a/b").expect("valid"),
            Path::new("/somewhere/a/b")
        );
        assert_eq!(files.locate(b"/etc/x").expect("valid"), Path::new("/etc/x"));
        assert_eq!(
            Files::default().locate(b"a").expect("valid"),
            Path::new("/workspace/a")
        );
    }

    #[test]
    fn paths_that_no_file_can_have_are_refused() {
        let files = Files::new("/somewhere");
        for path in [&b""[..], b"a\0b", &[b'a'; 4_096]] {
            assert!(
                matches!(files.locate(path), Err(Failure::Refused(error)) if error.code == ErrorCode::InvalidRequest)
            );
        }
    }

    #[test]
    fn entries_are_named_as_the_request_named_their_directory() {
        for (path, prefix) in [
            ("", ""),
            (".", ""),
            ("./", ""),
            ("src/", "src"),
            ("./a//b/.", "a/b"),
            ("/", "/"),
            ("/etc//x/", "/etc/x"),
            ("../x", "../x"),
        ] {
            assert_eq!(
                printed_prefix(path.as_bytes()),
                prefix.as_bytes(),
                "{path:?}"
            );
        }
        let mut path = printed_prefix(b"/");
        join(&mut path, b"etc");
        assert_eq!(path, b"/etc");
    }

    #[test]
    fn a_path_must_end_in_a_name() {
        for path in ["/", "/a/..", "/a/."] {
            assert!(split(Path::new(path)).is_err(), "{path}");
        }
        assert_eq!(
            split(Path::new("/a/b")).expect("a name"),
            (Path::new("/a"), OsStr::new("b"))
        );
    }

    #[test]
    fn existing_directories_are_accepted_and_a_file_in_the_way_is_named() {
        let temp = tempfile::tempdir().expect("temp dir");
        let deep = temp.path().join("a/b/c");
        assert!(make_directories(&deep).expect("made"));
        assert!(!make_directories(&deep).expect("there already"));
        assert!(make_directories(&deep.join("d")).expect("made"));
        std::fs::write(temp.path().join("file"), "").expect("written");
        let through = make_directories(&temp.path().join("file/x"));
        assert!(
            matches!(through, Err(Failure::Refused(error)) if error.code == ErrorCode::NotADirectory)
        );
        let onto = make_directories(&temp.path().join("file"));
        assert!(
            matches!(onto, Err(Failure::Refused(error)) if error.code == ErrorCode::AlreadyExists)
        );
    }

    proptest! {
        #[test]
        fn a_printed_prefix_names_the_same_place(path in "[a./]{1,30}") {
            let printed = printed_prefix(path.as_bytes());
            let normal = |path: &[u8]| {
                Path::new(OsStr::from_bytes(path))
                    .components()
                    .filter(|part| *part != std::path::Component::CurDir)
                    .map(|part| part.as_os_str().to_owned())
                    .collect::<Vec<_>>()
            };
            prop_assert_eq!(normal(&printed), normal(path.as_bytes()));
        }
    }
}

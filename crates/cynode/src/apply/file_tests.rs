//! Tests of fetching files as an archive.

use std::os::unix::fs::{PermissionsExt as _, symlink};

use tar::{Builder, EntryType, Header};

use super::{files::*, *};

/// Builds an archive entry by entry, with names that `tar` itself would refuse.
struct Tar(Builder<Vec<u8>>);

impl Tar {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    fn entry(mut self, name: &str, kind: EntryType, mode: u32, link: &str, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.append(&header, content).expect("written");
        self
    }

    fn file(self, name: &str, content: &str) -> Self {
        self.entry(name, EntryType::Regular, 0o644, "", content.as_bytes())
    }

    fn link(self, name: &str, target: &str) -> Self {
        self.entry(name, EntryType::Symlink, 0o777, target, b"")
    }

    fn directory(self, name: &str) -> Self {
        self.entry(name, EntryType::Directory, 0o000, "", b"")
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().expect("whole")
    }

    fn receive(self, directory: &Path, prefix: &str) -> Result<Received, FilesError> {
        receive(directory, prefix.as_bytes(), &self.bytes()[..], |_| {})
    }
}

fn read(path: impl AsRef<Path>) -> String {
    fs_err::read_to_string(path.as_ref()).expect("readable")
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs_err::read_dir(directory)
        .expect("listed")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("text")
        })
        .collect();
    names.sort();
    names
}

#[test]
fn files_come_below_their_prefix_and_replace_older_ones() {
    let root = tempfile::tempdir().expect("a directory");
    fs_err::create_dir_all(root.path().join("out/old")).expect("made");
    fs_err::write(root.path().join("out/a"), "before").expect("written");
    fs_err::write(root.path().join("out/kept"), "kept").expect("written");
    let archive = Tar::new()
        .directory("./")
        .file("./a", "after")
        .directory("./empty")
        .entry("./bin/tool", EntryType::Regular, 0o6755, "", b"#!/bin/sh")
        .link("./bin/alias", "tool")
        .link("./up", "../elsewhere")
        .directory("./old");
    let mut shown = None;
    let received = receive(root.path(), b"out", &archive.bytes()[..], |received| {
        assert_eq!(read(root.path().join("out/a")), "before", "shown too late");
        shown = Some(received.clone());
    })
    .expect("received");
    assert_eq!(shown.as_ref(), Some(&received));
    assert_eq!(read(root.path().join("out/a")), "after");
    assert_eq!(read(root.path().join("out/kept")), "kept");
    assert!(root.path().join("out/empty").is_dir());
    assert_eq!(read(root.path().join("out/bin/alias")), "#!/bin/sh");
    let tool = fs_err::metadata(root.path().join("out/bin/tool")).expect("there");
    assert_eq!(tool.permissions().mode() & 0o7000, 0);
    assert_ne!(tool.permissions().mode() & 0o100, 0);
    assert_eq!(names(root.path()), ["out"]);
    let lines: Vec<String> = received
        .files
        .iter()
        .map(|file| {
            format!(
                "{} {} {} {}",
                file.operation,
                file.path,
                file.size,
                file.warnings.join(",")
            )
        })
        .collect();
    assert_eq!(
        lines,
        [
            "replace out/a 5 ",
            "create out/bin/alias 0 symbolic link",
            "create out/bin/tool 9 executable",
            "create out/up 0 symbolic link",
        ]
    );
}

#[test]
fn what_may_not_come_out_stays_and_is_named() {
    let root = tempfile::tempdir().expect("a directory");
    let received = Tar::new()
        .file("fine", "x")
        .file(".git/config", "x")
        .file("sub/.GIT/hooks/post-commit", "x")
        .file("g\u{200c}it", "fine as a name")
        .file(".g\u{200c}it/config", "x")
        .file("git~1/config", "x")
        .link("absolute", "/etc/passwd")
        .link("out", "../x")
        .link("sub/up", "../..")
        .link("git", ".git/hooks")
        .link("around", "fine/../../x")
        .entry("hard", EntryType::Link, 0o644, "fine", b"")
        .entry("pipe", EntryType::Fifo, 0o644, "", b"")
        .entry("device", EntryType::Char, 0o644, "", b"")
        .receive(root.path(), "")
        .expect("the rest is received");
    assert_eq!(names(root.path()), ["fine", "g\u{200c}it"]);
    assert_eq!(received.left_behind.len(), 12, "{received:?}");
    assert!(
        received
            .left_behind
            .iter()
            .all(|left| !left.reason.is_empty())
    );
}

#[test]
fn an_archive_that_tries_to_leave_the_directory_changes_nothing() {
    let outside = tempfile::tempdir().expect("a directory");
    for archive in [
        Tar::new().file("a", "x").file("../escaped", "x"),
        Tar::new().file("a", "x").file("/escaped", "x"),
        Tar::new()
            .file("a", "x")
            .link("l", ".")
            .file("l/escaped", "x"),
        Tar::new().file("a", "x").file("a/below", "x"),
        Tar::new().file("a", "x").file("./a", "twice"),
        Tar::new().directory("a").file("a", "twice"),
    ] {
        let root = tempfile::tempdir().expect("a directory");
        assert!(matches!(
            archive.receive(root.path(), "p"),
            Err(FilesError::Refused(_))
        ));
        assert_eq!(names(root.path()), Vec::<String>::new());
    }
    let root = tempfile::tempdir().expect("a directory");
    symlink(outside.path(), root.path().join("link")).expect("link");
    for (prefix, name) in [("link", "a"), ("", "link/a"), ("link/deep", "a")] {
        assert!(
            matches!(
                Tar::new()
                    .file("b", "x")
                    .file(name, "x")
                    .receive(root.path(), prefix),
                Err(FilesError::InTheWay { .. })
            ),
            "{prefix} {name}"
        );
    }
    assert_eq!(names(root.path()), ["link"]);
    assert_eq!(names(outside.path()), Vec::<String>::new());
    // A link at the location of a file is replaced, not followed.
    let target = outside.path().join("target");
    fs_err::write(&target, "untouched").expect("written");
    symlink(&target, root.path().join("a")).expect("link");
    Tar::new()
        .file("a", "new")
        .receive(root.path(), "")
        .expect("received");
    assert_eq!(
        (read(&target), read(root.path().join("a"))),
        ("untouched".to_owned(), "new".to_owned())
    );
    assert!(
        !fs_err::symlink_metadata(root.path().join("a"))
            .expect("there")
            .is_symlink()
    );
}

#[test]
fn a_directory_in_the_way_changes_nothing() {
    let root = tempfile::tempdir().expect("a directory");
    fs_err::create_dir_all(root.path().join("z/sub")).expect("made");
    fs_err::write(root.path().join("file"), "mine").expect("written");
    for archive in [
        Tar::new().file("a", "x").file("z", "x"),
        Tar::new().file("a", "x").directory("file"),
        Tar::new().file("a", "x").file("file/below", "x"),
    ] {
        assert!(matches!(
            archive.receive(root.path(), ""),
            Err(FilesError::InTheWay { .. })
        ));
        assert_eq!(names(root.path()), ["file", "z"]);
        assert_eq!(read(root.path().join("file")), "mine");
    }
}

#[test]
fn a_truncated_archive_changes_nothing() {
    let bytes = Tar::new()
        .file("a", "x")
        .file("b", &"y".repeat(2_000))
        .bytes();
    for length in [0, 100, 512, 1_024, 1_600, 2_048, 3_000] {
        let root = tempfile::tempdir().expect("a directory");
        let result = receive(root.path(), b"", &bytes[..length], |_| {});
        // Without an end marker, an archive may end after any entry.
        if length == 1_024 {
            assert_eq!(result.expect("one entry").files.len(), 1);
            continue;
        }
        assert!(result.is_err(), "{length}");
        assert_eq!(names(root.path()), Vec::<String>::new(), "{length}");
    }
}

#[test]
// invariant: bounded
fn what_is_received_is_bounded() {
    let limits = FetchLimits {
        entries: 3,
        bytes: 10,
        path_bytes: 20,
    };
    let receive = |archive: Tar| {
        let root = tempfile::tempdir().expect("a directory");
        let result = receive_within(root.path(), b"", &archive.bytes()[..], limits, |_| {});
        if result.is_err() {
            assert_eq!(names(root.path()), Vec::<String>::new());
        }
        result
    };
    let too_large = |archive: Tar| matches!(receive(archive), Err(FilesError::TooLarge(_)));
    let three = || {
        Tar::new()
            .file("a", "12345")
            .file("b", "12345")
            .directory("c")
    };
    assert!(receive(three()).is_ok());
    assert!(too_large(three().directory("d")));
    assert!(too_large(Tar::new().file("a", "12345").file("b", "123456")));
    // Each counted path begins with a slash.
    assert!(receive(Tar::new().file(&"n".repeat(19), "x")).is_ok());
    assert!(too_large(Tar::new().file(&"n".repeat(20), "x")));
    // The claimed size counts, so nothing is written.
    let mut header = Header::new_gnu();
    header.as_old_mut().name[..1].copy_from_slice(b"a");
    header.set_size(1 << 40);
    header.set_entry_type(EntryType::Regular);
    header.set_cksum();
    let root = tempfile::tempdir().expect("a directory");
    assert!(matches!(
        super::receive(root.path(), b"", &header.as_bytes()[..], |_| {}),
        Err(FilesError::TooLarge(_))
    ));
}

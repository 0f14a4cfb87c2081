use std::{
    ffi::OsStr,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    path::{Path, PathBuf},
};

use cynode_archive::{Archive, MAX_EXTENSION_BYTES, Reader};
use proptest::prelude::*;
use rustix::fs::Mode;
use tar::{Builder, EntryType, Header};

use super::{UnpackError, pack_file, pack_tree, tree_bytes, unpack, unpack::Unpacked};

/// A directory with a target and a file beside it.
struct Scratch {
    _temporary: tempfile::TempDir,
    root: PathBuf,
}

impl Scratch {
    fn new() -> Self {
        let temporary = tempfile::tempdir().expect("temporary directory");
        let root = temporary.path().to_owned();
        fs_err::create_dir(root.join("target")).expect("target");
        fs_err::write(root.join("outside"), "untouched").expect("outside");
        Self {
            _temporary: temporary,
            root,
        }
    }

    fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    fn unpack(&self, archive: &[u8]) -> Result<Unpacked, UnpackError> {
        self.unpack_with(archive, 0o022)
    }

    fn unpack_with(&self, archive: &[u8], umask: u32) -> Result<Unpacked, UnpackError> {
        let umask = Mode::from_bits_truncate(umask);
        unpack(archive, &self.target(), umask, |_| {})
    }

    fn mode(&self, name: &str) -> u32 {
        fs_err::metadata(self.target().join(name))
            .expect("there")
            .permissions()
            .mode()
            & 0o7777
    }

    /// Whether nothing beside the target was created or changed.
    fn is_untouched(&self) -> bool {
        let names: Vec<_> = fs_err::read_dir(&self.root)
            .expect("root")
            .map(|entry| entry.expect("entry").file_name())
            .collect();
        names.len() == 2
            && fs_err::read_to_string(self.root.join("outside")).expect("outside") == "untouched"
    }
}

/// An entry with any name: `tar` refuses to write hostile ones.
fn raw(kind: EntryType, name: &[u8], link: &[u8], data: &[u8]) -> Vec<u8> {
    let mut header = Header::new_gnu();
    let old = header.as_old_mut();
    old.name[..name.len()].copy_from_slice(name);
    old.linkname[..link.len()].copy_from_slice(link);
    header.set_entry_type(kind);
    header.set_mode(0o6755);
    header.set_size(data.len() as u64);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = entries.concat();
    bytes.extend_from_slice(&[0; 1024]);
    bytes
}

fn file(name: &[u8]) -> Vec<u8> {
    raw(EntryType::Regular, name, b"", b"evil")
}

fn symlink(name: &[u8], target: &[u8]) -> Vec<u8> {
    raw(EntryType::Symlink, name, target, b"")
}

fn pax(records: &[u8]) -> Vec<u8> {
    raw(EntryType::XHeader, b"pax", b"", records)
}

/// A pax record.
fn record(text: &str) -> String {
    // The length counts its own digits.
    let rest = text.len() + 2;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length += 1;
    }
    format!("{length} {text}\n")
}

/// The paths that the gate checks; `None` if it refuses the archive.
fn gate_paths(archive: &[u8]) -> Option<Vec<String>> {
    let mut archive = Archive::new(Reader::new(archive));
    let mut paths = Vec::new();
    while let Some(entry) = archive.next_entry().ok()? {
        paths.push(String::from_utf8(entry.path).expect("text"));
    }
    Some(paths)
}

/// The files below the target, sorted.
fn files(root: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs_err::read_dir(&directory).expect("directory") {
            let path = entry.expect("entry").path();
            if fs_err::symlink_metadata(&path).expect("there").is_dir() {
                directories.push(path);
            } else {
                let name = path.strip_prefix(root).expect("below the root");
                files.push(name.display().to_string());
            }
        }
    }
    files.sort();
    files
}

#[test]
fn text_in_a_comment_record_names_no_file() {
    for hidden in ["path=b/evil", "path=../evil", "path=/etc/evil", "size=0"] {
        let scratch = Scratch::new();
        let records = record(&format!("comment=x\n{}", record(hidden).trim_end()));
        let bytes = archive(&[pax(records.as_bytes()), file(b"innocent")]);
        assert_eq!(gate_paths(&bytes), Some(vec!["innocent".to_owned()]));
        scratch.unpack(&bytes).expect("unpacked");
        assert_eq!(files(&scratch.target()), ["innocent"], "{hidden}");
        assert!(scratch.is_untouched(), "{hidden}");
    }
}

#[test]
fn archives_that_readers_could_read_differently_are_refused() {
    let path = record("path=b/evil");
    for entries in [
        vec![pax(b"12 path=b/evil\n"), file(b"innocent")],
        vec![
            pax([path.as_bytes(), path.as_bytes()].concat().as_slice()),
            file(b"innocent"),
        ],
        vec![pax(record("size=0").as_bytes()), file(b"innocent")],
        vec![
            raw(EntryType::XGlobalHeader, b"g", b"", path.as_bytes()),
            file(b"innocent"),
        ],
        vec![pax(path.as_bytes())],
        vec![file(b"innocent"), vec![0; 512], file(b"evil")],
        vec![symlink(b"l", b"d"), file(b"l/evil")],
        vec![symlink(b"l", b"d"), file(b"./l//evil")],
        vec![file(b"/etc/evil")],
        vec![file(b"a/../../evil")],
    ] {
        let scratch = Scratch::new();
        let bytes = archive(&entries);
        assert_eq!(gate_paths(&bytes), None, "{entries:?}");
        let result = scratch.unpack(&bytes);
        assert!(matches!(result, Err(UnpackError::Refused(_))), "{result:?}");
        assert!(scratch.is_untouched() && !scratch.target().join("l/evil").exists());
    }
}

#[test]
fn a_path_of_a_record_is_the_path_that_the_gate_checks() {
    let scratch = Scratch::new();
    let bytes = archive(&[pax(record("path=b/long").as_bytes()), file(b"short")]);
    scratch.unpack(&bytes).expect("unpacked");
    assert_eq!(gate_paths(&bytes), Some(vec!["b/long".to_owned()]));
    assert_eq!(files(&scratch.target()), ["b/long"]);
}

#[test]
fn nothing_in_a_git_directory_is_written_in_any_spelling() {
    let scratch = Scratch::new();
    fs_err::create_dir(scratch.target().join(".git")).expect("made");
    fs_err::write(scratch.target().join(".git/config"), "mine").expect("written");
    let bytes = archive(&[
        raw(EntryType::Directory, b"./.git/", b"", b""),
        file(b".git/config"),
        file(b".git/hooks/post-checkout"),
        file(b"sub/.GIT/config"),
        file(b"sub/git~1/config"),
        file(b"module/.git"),
        symlink(b"hooks", b".git/hooks"),
        symlink(b".git.", b"elsewhere"),
        file(b".github/x"),
        file(b"kept"),
    ]);
    let unpacked = scratch.unpack(&bytes).expect("unpacked");
    assert_eq!(
        fs_err::read_to_string(scratch.target().join(".git/config")).expect("there"),
        "mine"
    );
    assert_eq!(
        files(&scratch.target()),
        [".git/config", ".github/x", "kept"]
    );
    let named: Vec<_> = unpacked.git_directories.iter().map(Vec::as_slice).collect();
    let expected = [".git", ".git.", "module/.git", "sub/.GIT", "sub/git~1"];
    assert_eq!(named, expected.map(str::as_bytes));
    // The link is skipped like others that lead out.
    assert_eq!(unpacked.skipped_count, 1);
}

#[test]
fn an_empty_stream_is_no_archive_and_an_end_marker_is_an_empty_one() {
    let scratch = Scratch::new();
    assert!(matches!(scratch.unpack(b""), Err(UnpackError::Refused(_))));
    assert_eq!(scratch.unpack(&archive(&[])).expect("unpacked").files, 0);
}

#[test]
fn paths_that_leave_the_target_fail_the_copy() {
    for name in [
        "/etc/evil",
        "../evil",
        "a/../../evil",
        "a/..",
        "..",
        "./../evil",
    ] {
        let scratch = Scratch::new();
        let result = scratch.unpack(&archive(&[file(name.as_bytes())]));
        assert!(
            matches!(result, Err(UnpackError::Refused(_))),
            "{name}: {result:?}"
        );
        assert!(scratch.is_untouched(), "{name}");
    }
}

#[test]
fn long_paths_that_leave_the_target_fail_the_copy() {
    let long = [b"a/".repeat(60), b"../".repeat(61), b"evil".to_vec()].concat();
    let gnu = archive(&[
        raw(
            EntryType::GNULongName,
            b"././@LongLink",
            b"",
            &[&long[..], b"\0"].concat(),
        ),
        file(b"innocent"),
    ]);
    let path = record(&format!("path={}", String::from_utf8_lossy(&long)));
    let posix = archive(&[pax(path.as_bytes()), file(b"innocent")]);
    for bytes in [gnu, posix] {
        let scratch = Scratch::new();
        let result = scratch.unpack(&bytes);
        assert!(matches!(result, Err(UnpackError::Refused(_))), "{result:?}");
        assert!(scratch.is_untouched());
    }
}

#[test]
fn links_that_point_outside_are_skipped() {
    for (name, target) in [
        ("l", "/etc/passwd"),
        ("l", "../outside"),
        ("d/l", "../../outside"),
        ("l", ".."),
        ("l", "d/../../outside"),
        ("l", "x/.."),
    ] {
        let scratch = Scratch::new();
        let unpacked = scratch
            .unpack(&archive(&[symlink(name.as_bytes(), target.as_bytes())]))
            .expect("unpacked");
        assert_eq!(unpacked.skipped_count, 1, "{name} -> {target}");
        assert!(
            fs_err::symlink_metadata(scratch.target().join(name)).is_err(),
            "{name} -> {target}"
        );
    }
}

#[test]
fn nothing_is_written_through_a_link() {
    // One link comes from the archive and points inside; the other existed and points outside.
    let scratch = Scratch::new();
    let result = scratch.unpack(&archive(&[
        raw(EntryType::Directory, b"d", b"", b""),
        symlink(b"l", b"d"),
        file(b"l/evil"),
    ]));
    assert!(matches!(result, Err(UnpackError::Refused(_))), "{result:?}");
    let scratch = Scratch::new();
    std::os::unix::fs::symlink(&scratch.root, scratch.target().join("up")).expect("link");
    let result = scratch.unpack(&archive(&[file(b"up/evil")]));
    assert!(matches!(result, Err(UnpackError::Refused(_))), "{result:?}");
    assert!(scratch.is_untouched());
    // Directory entries must not follow links either.
    let result = scratch.unpack(&archive(&[raw(EntryType::Directory, b"up", b"", b"")]));
    assert!(result.is_err(), "{result:?}");
}

#[test]
fn a_file_replaces_a_link_without_following_it() {
    let scratch = Scratch::new();
    std::os::unix::fs::symlink(scratch.root.join("outside"), scratch.target().join("f"))
        .expect("link");
    scratch.unpack(&archive(&[file(b"f")])).expect("unpacked");
    assert!(scratch.is_untouched());
    assert_eq!(
        fs_err::read_to_string(scratch.target().join("f")).expect("file"),
        "evil"
    );
}

#[test]
fn hard_links_and_special_files_are_skipped() {
    let scratch = Scratch::new();
    let entries = [
        raw(EntryType::Link, b"h", b"good", b""),
        raw(EntryType::Char, b"c", b"", b""),
        raw(EntryType::Block, b"b", b"", b""),
        raw(EntryType::Fifo, b"p", b"", b""),
        file(b"good"),
    ];
    let unpacked = scratch.unpack(&archive(&entries)).expect("unpacked");
    assert_eq!((unpacked.skipped_count, unpacked.files), (4, 1));
    let names: Vec<_> = fs_err::read_dir(scratch.target())
        .expect("target")
        .map(|entry| entry.expect("entry").file_name())
        .collect();
    assert_eq!(names, ["good"]);
}

#[test]
fn hard_links_that_leave_the_target_and_sparse_files_fail_the_copy() {
    for entry in [
        raw(EntryType::Link, b"h", b"../outside", b""),
        raw(EntryType::Link, b"h", b"/etc/passwd", b""),
        raw(EntryType::GNUSparse, b"s", b"", b""),
    ] {
        let scratch = Scratch::new();
        let result = scratch.unpack(&archive(&[entry, file(b"good")]));
        assert!(matches!(result, Err(UnpackError::Refused(_))), "{result:?}");
        assert!(scratch.is_untouched() && files(&scratch.target()).is_empty());
    }
}

#[test]
fn set_id_bits_are_dropped() {
    let scratch = Scratch::new();
    scratch
        .unpack(&archive(&[
            file(b"f"),
            raw(EntryType::Directory, b"d", b"", b""),
        ]))
        .expect("unpacked");
    for name in ["f", "d"] {
        assert_eq!(scratch.mode(name), 0o755, "{name}");
    }
}

/// An entry with a path that its header has no room for.
fn long(kind: EntryType, path: &[u8]) -> Vec<u8> {
    let name = [path, b"\0"].concat();
    [
        raw(EntryType::GNULongName, b"././@LongLink", b"", &name),
        raw(kind, b"short", b"", b""),
    ]
    .concat()
}

#[test]
fn permissions_in_the_umask_are_dropped() {
    let open_to_all = |kind, name: &[u8]| {
        let mut bytes = raw(kind, name, b"", b"");
        let mut header = Header::from_byte_slice(&bytes[..512]).clone();
        header.set_mode(0o777);
        header.set_cksum();
        bytes[..512].copy_from_slice(header.as_bytes());
        bytes
    };
    for (umask, expected, implied) in [
        (0o077, 0o700, 0o700),
        (0o027, 0o750, 0o750),
        (0o000, 0o777, 0o755),
    ] {
        let scratch = Scratch::new();
        let bytes = archive(&[
            open_to_all(EntryType::Directory, b"d"),
            open_to_all(EntryType::Regular, b"d/f"),
            open_to_all(EntryType::Regular, b"implied/f"),
        ]);
        scratch.unpack_with(&bytes, umask).expect("unpacked");
        for (name, mode) in [("d", expected), ("d/f", expected), ("implied", implied)] {
            assert_eq!(scratch.mode(name), mode, "{name} with umask {umask:o}");
        }
    }
}

#[test]
fn an_entry_that_is_too_deep_is_refused() {
    let scratch = Scratch::new();
    let below = |depth: usize| [&b"d/".repeat(depth)[..], b"x"].concat();
    scratch
        .unpack(&archive(&[
            long(EntryType::Directory, &below(255)),
            long(EntryType::Regular, &below(256)),
        ]))
        .expect("unpacked");
    for (kind, path) in [
        (EntryType::Directory, below(256)),
        (EntryType::Regular, below(257)),
    ] {
        let scratch = Scratch::new();
        let result = scratch.unpack(&archive(&[long(kind, &path)]));
        assert!(matches!(result, Err(UnpackError::TooDeep(_))), "{result:?}");
        assert!(!scratch.target().join("d").exists());
        let message = result.expect_err("refused").to_string();
        assert!(
            message.contains("256 directories deep") && message.len() < 200,
            "{message}"
        );
    }
}

#[test]
fn directories_take_bounded_memory() {
    // Each entry creates 256 directories, whose paths have half a megabyte together.
    let chain = |index: usize| {
        let name = format!("{index:015}/").repeat(255);
        long(EntryType::Directory, format!("{name}end").as_bytes())
    };
    let scratch = Scratch::new();
    let entries: Vec<Vec<u8>> = (0..200).map(chain).collect();
    let result = scratch.unpack(&archive(&entries));
    assert!(
        matches!(result, Err(UnpackError::TooManyDirectories)),
        "{result:?}"
    );
    let message = result.expect_err("refused").to_string();
    assert!(message.contains("64 MiB"), "{message}");
}

#[test]
fn modes_of_directories_are_set_in_every_order_of_their_names() {
    // `-` is before `/`, so `a-b` is between `a` and `a/b` in the order of bytes.
    let names = ["a", "a-b", "a/b", "a/b/c", "a/b-c", "a0", "a-b/c"];
    let scratch = Scratch::new();
    let entries: Vec<Vec<u8>> = names
        .iter()
        .map(|name| {
            let mut header = Header::new_gnu();
            header.set_path(name).expect("a short path");
            header.set_entry_type(EntryType::Directory);
            header.set_mode(0o555);
            header.set_size(0);
            header.set_cksum();
            header.as_bytes().to_vec()
        })
        .collect();
    scratch.unpack(&archive(&entries)).expect("unpacked");
    for name in names {
        assert_eq!(scratch.mode(name), 0o555, "{name}");
    }
}

#[test]
fn endless_headers_take_bounded_memory() {
    for kind in [
        EntryType::GNULongName,
        EntryType::GNULongLink,
        EntryType::XHeader,
    ] {
        let scratch = Scratch::new();
        let size = usize::try_from(MAX_EXTENSION_BYTES).expect("small") + 1;
        let result = scratch.unpack(&archive(&[
            raw(kind, b"x", b"", &vec![b'a'; size]),
            file(b"f"),
        ]));
        assert!(
            matches!(result, Err(UnpackError::Refused(_))),
            "{kind:?}: {result:?}"
        );
    }
}

#[test]
fn an_archive_that_stops_in_a_file_is_an_error() {
    let scratch = Scratch::new();
    let mut bytes = raw(EntryType::Regular, b"f", b"", &[7; 2000]);
    bytes.truncate(1024);
    assert!(matches!(
        scratch.unpack(&bytes),
        Err(UnpackError::Refused(_))
    ));
}

fn sample(root: &Path) {
    fs_err::create_dir_all(root.join("a/b")).expect("directories");
    fs_err::write(root.join("a/run.sh"), "#!/bin/sh\n").expect("file");
    fs_err::set_permissions(root.join("a/run.sh"), PermissionsExt::from_mode(0o750)).expect("mode");
    fs_err::write(root.join("a/b").join("n".repeat(200)), vec![1; 100_000]).expect("long name");
    fs_err::write(root.join(OsStr::from_bytes(b"odd\xff")), "").expect("odd name");
    std::os::unix::fs::symlink("b", root.join("a/link")).expect("link");
    std::os::unix::fs::symlink("../a", root.join("a/up")).expect("link");
    fs_err::create_dir(root.join("readonly")).expect("directory");
    fs_err::write(root.join("readonly/f"), "x").expect("file");
    fs_err::set_permissions(root.join("readonly"), PermissionsExt::from_mode(0o555)).expect("mode");
}

#[test]
fn trees_round_trip_with_modes_and_links() {
    let scratch = Scratch::new();
    let source = tempfile::tempdir().expect("temporary directory");
    sample(source.path());
    let mut bytes = Vec::new();
    assert!(
        pack_tree(source.path(), &mut bytes)
            .expect("packed")
            .skipped
            .is_empty()
    );
    let fresh = scratch.target().join("fresh");
    let unpacked = unpack(&bytes[..], &fresh, Mode::empty(), |_| {}).expect("unpacked");
    assert_eq!((unpacked.files, unpacked.skipped_count), (4, 0));
    assert_eq!(
        fs_err::metadata(fresh.join("a/run.sh"))
            .expect("there")
            .permissions()
            .mode()
            & 0o777,
        0o750
    );
    assert_eq!(
        fs_err::metadata(fresh.join("readonly"))
            .expect("there")
            .permissions()
            .mode()
            & 0o777,
        0o555
    );
    assert_eq!(
        fs_err::read(fresh.join("a/b").join("n".repeat(200))).expect("there"),
        vec![1; 100_000]
    );
    assert_eq!(
        fs_err::read_link(fresh.join("a/up")).expect("link"),
        Path::new("../a")
    );
    assert!(fs_err::metadata(fresh.join(OsStr::from_bytes(b"odd\xff"))).is_ok());
    // Unpacking again replaces the files.
    fs_err::set_permissions(fresh.join("readonly"), PermissionsExt::from_mode(0o755))
        .expect("mode");
    unpack(&bytes[..], &fresh, Mode::empty(), |_| {}).expect("unpacked again");
}

#[test]
fn the_size_of_an_archive_is_known_before_it_is_packed() {
    let scratch = Scratch::new();
    let target = scratch.target();
    let packed = || {
        let mut archive = Vec::new();
        pack_tree(&target, &mut archive).expect("packed");
        (tree_bytes(&target).expect("counted"), archive.len() as u64)
    };
    let (expected, actual) = packed();
    assert_eq!(expected, actual, "an empty directory");
    for size in [0, 1, 511, 512, 513, 70_000] {
        fs_err::write(target.join(format!("of-{size}")), vec![b'x'; size]).expect("written");
    }
    fs_err::create_dir_all(target.join("a/b")).expect("made");
    std::os::unix::fs::symlink("of-1", target.join("a/link")).expect("link");
    let (expected, actual) = packed();
    assert_eq!(expected, actual);
    // A name that needs an entry of its own adds that, and no more.
    fs_err::write(target.join("n".repeat(200)), "x").expect("written");
    let (expected, actual) = packed();
    assert_eq!(expected + 1_024, actual);
}

#[test]
fn one_file_is_an_archive_of_one_entry() {
    let scratch = Scratch::new();
    let mut bytes = Vec::new();
    pack_file(&scratch.root.join("outside"), Path::new("name"), &mut bytes).expect("packed");
    assert_eq!(scratch.unpack(&bytes).expect("unpacked").files, 1);
    assert_eq!(
        fs_err::read_to_string(scratch.target().join("name")).expect("file"),
        "untouched"
    );
}

#[test]
fn sockets_and_pipes_are_not_packed() {
    let source = tempfile::tempdir().expect("temporary directory");
    let _socket = std::os::unix::net::UnixListener::bind(source.path().join("s")).expect("socket");
    let packed = pack_tree(source.path(), &mut Vec::new()).expect("packed");
    assert_eq!(packed.skipped.len(), 1);
}

fn kinds() -> impl Strategy<Value = EntryType> {
    prop::sample::select(vec![
        EntryType::Regular,
        EntryType::Directory,
        EntryType::Symlink,
        EntryType::Link,
        EntryType::Fifo,
        EntryType::GNULongName,
        EntryType::GNULongLink,
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn no_archive_writes_outside(
        entries in prop::collection::vec((kinds(), "[ab./]{1,9}", "[ab./]{0,9}"), 1..8),
    ) {
        let scratch = Scratch::new();
        let entry = |(kind, name, link): &(EntryType, String, String)| {
            let data = match kind {
                EntryType::Regular => b"evil",
                EntryType::GNULongName | EntryType::GNULongLink => link.as_bytes(),
                _ => b"",
            };
            raw(*kind, name.as_bytes(), link.as_bytes(), data)
        };
        let entries: Vec<Vec<u8>> = entries.iter().map(entry).collect();
        // The archive may be refused or not; either way nothing changes outside.
        drop(scratch.unpack(&archive(&entries)));
        prop_assert!(scratch.is_untouched());
        // No created link leads out.
        let mut directories = vec![scratch.target()];
        while let Some(directory) = directories.pop() {
            for entry in fs_err::read_dir(&directory).expect("directory") {
                let path = entry.expect("entry").path();
                let metadata = fs_err::symlink_metadata(&path).expect("there");
                if metadata.is_symlink() {
                    if let Ok(real) = fs_err::canonicalize(&path) {
                        let root = fs_err::canonicalize(scratch.target()).expect("target");
                        prop_assert!(real.starts_with(root), "{path:?} -> {real:?}");
                    }
                } else if metadata.is_dir() {
                    directories.push(path);
                }
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_write_outside(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
        let scratch = Scratch::new();
        drop(scratch.unpack(&bytes));
        prop_assert!(scratch.is_untouched());
    }
}

#[test]
fn an_archive_of_the_tar_crate_is_read() {
    let mut builder = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_size(2);
    header.set_mode(0o600);
    builder
        .append_data(&mut header, Path::new("./x/y"), &b"hi"[..])
        .expect("appended");
    let scratch = Scratch::new();
    scratch
        .unpack(&builder.into_inner().expect("archive"))
        .expect("unpacked");
    assert_eq!(
        fs_err::read_to_string(scratch.target().join("x/y")).expect("file"),
        "hi"
    );
}

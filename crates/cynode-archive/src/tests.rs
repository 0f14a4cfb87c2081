use proptest::prelude::*;
use tar::{EntryType, Header as TarHeader};

use super::*;

/// Builds archives without validating the entries.
#[derive(Clone, Default)]
struct ArchiveBuilder(Vec<u8>);

impl ArchiveBuilder {
    fn add(self, kind: EntryType, path: &[u8], link: &[u8], content: &[u8]) -> Self {
        self.sized(kind, path, link, content.len() as u64, content)
    }

    fn sized(self, kind: EntryType, path: &[u8], link: &[u8], size: u64, content: &[u8]) -> Self {
        let mut header = TarHeader::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o6754);
        header.set_mtime(7);
        header.set_size(size);
        let old = header.as_old_mut();
        old.name[..path.len()].copy_from_slice(path);
        old.linkname[..link.len()].copy_from_slice(link);
        self.header(&mut header).content(content)
    }

    fn header(mut self, header: &mut TarHeader) -> Self {
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self
    }

    fn content(mut self, content: &[u8]) -> Self {
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.add(EntryType::Regular, path.as_bytes(), b"", content.as_bytes())
    }

    fn symlink(self, path: &str, target: &str) -> Self {
        self.add(EntryType::Symlink, path.as_bytes(), target.as_bytes(), b"")
    }

    fn records(self, records: &[u8]) -> Self {
        self.add(EntryType::XHeader, b"x", b"", records)
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * BLOCK, 0);
        self.0
    }
}

/// A pax record.
fn record(key: &str, value: &str) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let length = (rest..rest + 10)
        .find(|length| length.to_string().len() + rest == *length)
        .expect("a length");
    format!("{length} {key}={value}\n").into_bytes()
}

type Entries = Vec<(String, Kind, Vec<u8>)>;

fn list(bytes: &[u8]) -> Result<Entries, ReadError> {
    let mut archive = Archive::new(Reader::new(bytes));
    let mut listed = Vec::new();
    while let Some(entry) = archive.next_entry()? {
        let mut content = Vec::new();
        archive.read(|piece| {
            content.extend_from_slice(piece);
            Ok(())
        })?;
        assert_eq!(content.len() as u64, entry.size);
        listed.push((
            String::from_utf8_lossy(&entry.path).into_owned(),
            entry.kind,
            content,
        ));
    }
    Ok(listed)
}

fn names(bytes: &[u8]) -> Vec<String> {
    list(bytes)
        .expect("read")
        .into_iter()
        .map(|(path, ..)| path)
        .collect()
}

fn refusal(bytes: &[u8]) -> String {
    list(bytes).expect_err("refused").to_string()
}

#[test]
fn a_newline_in_a_comment_hides_no_record() {
    // A parser that splits on newlines sees only 'path=fine'. By its length, the comment ends
    // before the last record.
    let comment = record("comment", "x\n14 path=fine");
    let hidden = [comment.as_slice(), &record("path", "protected/x")].concat();
    assert_eq!(
        names(
            &ArchiveBuilder::default()
                .records(&hidden)
                .file("fine", "x")
                .end()
        ),
        ["protected/x"]
    );
    // A parser that splits on newlines sees 'path=protected/x'. By its length, everything is a
    // comment.
    let shown = record("comment", "x\n20 path=protected/x");
    assert_eq!(
        names(
            &ArchiveBuilder::default()
                .records(&shown)
                .file("fine", "x")
                .end()
        ),
        ["fine"]
    );
}

#[test]
fn a_size_in_a_record_never_moves_the_next_header() {
    let smuggled = ArchiveBuilder::default().file("smuggled", "x").0;
    let size = |size: usize| record("size", &size.to_string());
    let hidden = [record("comment", "x\n13 size=1024").as_slice(), &size(0)].concat();
    let archive = ArchiveBuilder::default()
        .records(&hidden)
        .add(EntryType::Regular, b"fine", b"", &smuggled)
        .end();
    assert!(
        refusal(&archive).contains("different sizes"),
        "{}",
        refusal(&archive)
    );
    let larger = ArchiveBuilder::default()
        .records(&size(1024))
        .sized(EntryType::Regular, b"fine", b"", 0, b"")
        .content(&smuggled)
        .end();
    assert!(refusal(&larger).contains("different sizes"));
    assert_eq!(
        names(
            &ArchiveBuilder::default()
                .records(&size(5))
                .file("fine", "hello")
                .end()
        ),
        ["fine"]
    );
}

#[test]
fn every_form_of_a_name_is_read() {
    let long = "n".repeat(300);
    let mut ustar = TarHeader::new_ustar();
    ustar.set_size(0);
    ustar.as_ustar_mut().expect("ustar").prefix[..3].copy_from_slice(b"pre");
    ustar.as_ustar_mut().expect("ustar").name[..4].copy_from_slice(b"name");
    let mut old = TarHeader::new_old();
    old.set_size(0);
    old.as_old_mut().name[..4].copy_from_slice(b"dir/");
    let archive = ArchiveBuilder::default()
        .add(EntryType::Directory, b"./", b"", b"")
        .header(&mut ustar)
        .header(&mut old)
        .add(
            EntryType::GNULongName,
            b"././@LongLink",
            b"",
            format!("{long}\0").as_bytes(),
        )
        .file("short", "1")
        .records(
            &[
                record("path", "é/x"),
                record("mtime", "12345.678"),
                record("hdrcharset", "BINARY"),
                record("uname", "u"),
            ]
            .concat(),
        )
        .file("short", "2")
        .add(EntryType::GNULongLink, b"././@LongLink", b"", b"far\0\0")
        .symlink("link", "near");
    let listed = list(&archive.clone().end()).expect("read");
    let expected = [
        ("./", Kind::Directory, ""),
        ("pre/name", Kind::File, ""),
        ("dir/", Kind::Directory, ""),
        (long.as_str(), Kind::File, "1"),
        ("é/x", Kind::File, "2"),
        ("link", Kind::Symlink, ""),
    ];
    assert_eq!(
        listed,
        expected.map(|(path, kind, content)| (path.to_owned(), kind, content.as_bytes().to_vec()))
    );
    // The end marker is optional.
    assert_eq!(names(&archive.0).len(), 6);
    let mut archive = Archive::new(Reader::new(&archive.0[..]));
    assert!(
        archive
            .next_entry()
            .expect("read")
            .expect("an entry")
            .is_root()
    );
    let entry = archive.next_entry().expect("read").expect("an entry");
    assert!(!entry.is_root() && entry.mode == 0o644 && entry.mtime == 0);
    for _ in 0..2 {
        archive.next_entry().expect("read");
    }
    let entry = archive.next_entry().expect("read").expect("an entry");
    assert_eq!((entry.mode, entry.mtime), (0o754, 12_345));
    assert_eq!(
        archive.next_entry().expect("read").expect("an entry").link,
        b"far"
    );
}

#[test]
fn only_git_archives_global_comment_is_accepted() {
    let global = |records: &[u8]| {
        ArchiveBuilder::default()
            .add(EntryType::XGlobalHeader, b"pax_global_header", b"", records)
            .file("x", "")
            .end()
    };
    assert_eq!(names(&global(&record("comment", "94b57340c3"))), ["x"]);
    for key in ["path", "size", "linkpath", "mtime", "anything"] {
        assert!(
            refusal(&global(&record(key, "1"))).contains("global extension header"),
            "{key}"
        );
    }
    assert!(refusal(&global(b"nonsense")).contains("invalid"));
}

#[test]
// invariant: one-reader
fn ambiguous_archives_are_refused() {
    let path = record("path", "a");
    let mut negative = TarHeader::new_gnu();
    negative.as_old_mut().name[0] = b'x';
    negative.as_old_mut().size = [0xff; 12];
    let mut magic = TarHeader::new_ustar();
    magic.set_size(0);
    magic.as_ustar_mut().expect("ustar").version = *b" 1";
    let long = |content: &[u8]| {
        ArchiveBuilder::default()
            .add(EntryType::GNULongName, b"L", b"", content)
            .file("x", "")
            .end()
    };
    for (archive, expected) in [
        (
            ArchiveBuilder::default()
                .records(&[path.clone(), path.clone()].concat())
                .file("x", "")
                .end(),
            "two paths",
        ),
        (
            ArchiveBuilder::default()
                .records(&path)
                .records(&record("mtime", "1"))
                .file("x", "")
                .end(),
            "two extension headers",
        ),
        (
            ArchiveBuilder::default()
                .add(EntryType::GNULongName, b"L", b"", b"b\0")
                .records(&path)
                .file("x", "")
                .end(),
            "two paths",
        ),
        (
            ArchiveBuilder::default()
                .records(&record("linkpath", "a"))
                .add(EntryType::GNULongLink, b"K", b"", b"b\0")
                .symlink("x", "c")
                .end(),
            "two link targets",
        ),
        (
            ArchiveBuilder::default().records(&path).end(),
            "ends after an extension header",
        ),
        (
            ArchiveBuilder::default()
                .records(&record("path", ""))
                .file("x", "")
                .end(),
            "empty",
        ),
        (
            ArchiveBuilder::default()
                .records(&record("path", "a\0b"))
                .file("x", "")
                .end(),
            "NUL",
        ),
        (
            ArchiveBuilder::default()
                .records(&record("size", "+1"))
                .file("x", "1")
                .end(),
            "size",
        ),
        (
            ArchiveBuilder::default()
                .records(&record("size", "01"))
                .file("x", "1")
                .end(),
            "size",
        ),
        (
            ArchiveBuilder::default()
                .records(&record("hdrcharset", "EBCDIC"))
                .file("x", "")
                .end(),
            "character set",
        ),
        (
            ArchiveBuilder::default()
                .records(&record("GNU.sparse.major", "1"))
                .file("x", "")
                .end(),
            "sparse",
        ),
        (
            ArchiveBuilder::default()
                .records(b"011 path=ab\n")
                .file("x", "")
                .end(),
            "invalid",
        ),
        (
            ArchiveBuilder::default()
                .records(b"+11 path=ab\n")
                .file("x", "")
                .end(),
            "invalid",
        ),
        (
            ArchiveBuilder::default()
                .records(b"10 path=ab\n")
                .file("x", "")
                .end(),
            "invalid",
        ),
        (
            ArchiveBuilder::default()
                .records(b"99 path=ab\n")
                .file("x", "")
                .end(),
            "invalid",
        ),
        (
            ArchiveBuilder::default()
                .records(b"5 =a\n")
                .file("x", "")
                .end(),
            "invalid",
        ),
        (
            ArchiveBuilder::default()
                .records(b"5 aa\n")
                .file("x", "")
                .end(),
            "invalid",
        ),
        (
            ArchiveBuilder::default()
                .records(b"1 a=\n")
                .file("x", "")
                .end(),
            "invalid",
        ),
        (long(b"a\0b\0"), "continues after a NUL"),
        (long(b"\0"), "empty"),
        (
            ArchiveBuilder::default().header(&mut negative).end(),
            "invalid size",
        ),
        (
            ArchiveBuilder::default().header(&mut magic).end(),
            "unknown format",
        ),
        (
            ArchiveBuilder::default()
                .add(EntryType::Directory, b"d", b"", b"x")
                .end(),
            "not a file but has content",
        ),
        (
            ArchiveBuilder::default()
                .add(EntryType::Symlink, b"l", b"t", b"x")
                .end(),
            "not a file but has content",
        ),
        (
            ArchiveBuilder::default()
                .add(EntryType::Link, b"l", b"t", b"x")
                .end(),
            "not a file but has content",
        ),
        (
            ArchiveBuilder::default().file("d/", "x").end(),
            "not a file but has content",
        ),
        (
            [
                ArchiveBuilder::default().file("a", "").end(),
                ArchiveBuilder::default().file("b", "").end(),
            ]
            .concat(),
            "concatenated",
        ),
        (
            ArchiveBuilder::default()
                .add(EntryType::GNUSparse, b"s", b"", b"")
                .end(),
            "sparse",
        ),
        (
            ArchiveBuilder::default()
                .add(EntryType::new(b'V'), b"v", b"", b"")
                .end(),
            "unknown type",
        ),
    ] {
        let message = refusal(&archive);
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn entries_stay_below_the_target_and_never_traverse_own_symlinks() {
    for (archive, expected) in [
        (ArchiveBuilder::default().file("../x", ""), "'..'"),
        (ArchiveBuilder::default().file("a/../x", ""), "'..'"),
        (ArchiveBuilder::default().file("/x", ""), "absolute"),
        (ArchiveBuilder::default().file("", ""), "no name"),
        (ArchiveBuilder::default().file(".", ""), "no name"),
        (
            ArchiveBuilder::default().add(EntryType::Link, b"x", b"/etc/passwd", b""),
            "link target",
        ),
        (
            ArchiveBuilder::default().add(EntryType::Link, b"x", b"../y", b""),
            "link target",
        ),
        (ArchiveBuilder::default().symlink("x", ""), "link target"),
        (
            ArchiveBuilder::default()
                .symlink("l", "protected")
                .file("l/x", ""),
            "symbolic link of the same archive",
        ),
        (
            ArchiveBuilder::default()
                .symlink("./a//l", "protected")
                .file("a/./l/deep/x", ""),
            "symbolic link of the same archive",
        ),
        (
            ArchiveBuilder::default().symlink("l", "protected").add(
                EntryType::Directory,
                b"l/",
                b"",
                b"",
            ),
            "symbolic link of the same archive",
        ),
        (
            ArchiveBuilder::default().symlink("l", "protected").add(
                EntryType::Link,
                b"x",
                b"l/y",
                b"",
            ),
            "symbolic link of the same archive",
        ),
    ] {
        let message = refusal(&archive.end());
        assert!(message.contains(expected), "{expected}: {message}");
    }
    // A file may replace a link, and a name that only shares a prefix with a link is unrelated.
    let fine = ArchiveBuilder::default()
        .symlink("l", "a")
        .file("l", "x")
        .symlink("m", "..")
        .file("mm/x", "")
        .add(EntryType::Fifo, b"p", b"", b"");
    assert_eq!(names(&fine.end()), ["l", "l", "m", "mm/x", "p"]);
}

#[test]
fn limits_accept_the_maximum_and_refuse_one_more() {
    let long = |length: usize| {
        let path = "p".repeat(length);
        ArchiveBuilder::default()
            .add(
                EntryType::GNULongName,
                b"L",
                b"",
                format!("{path}\0").as_bytes(),
            )
            .file("x", "")
            .end()
    };
    assert_eq!(names(&long(MAX_PATH_BYTES))[0].len(), MAX_PATH_BYTES);
    assert!(refusal(&long(MAX_PATH_BYTES + 1)).contains("4095"));

    let largest = usize::try_from(MAX_EXTENSION_BYTES).expect("small");
    // '1048576 comment=' and a newline are 17 bytes.
    let extended = |value: usize| {
        ArchiveBuilder::default()
            .records(&record("comment", &"c".repeat(value)))
            .file("x", "")
            .end()
    };
    assert_eq!(names(&extended(largest - 17)), ["x"]);
    assert!(refusal(&extended(largest - 16)).contains("1 MiB"));

    let links = |count: usize| {
        let path = |number: usize| format!("{number:0>MAX_PATH_BYTES$}");
        let add = |archive: ArchiveBuilder, number: usize| {
            archive
                .add(
                    EntryType::GNULongName,
                    b"L",
                    b"",
                    format!("{}\0", path(number)).as_bytes(),
                )
                .symlink("x", "t")
        };
        (0..count).fold(ArchiveBuilder::default(), add).end()
    };
    let most = MAX_LINK_BYTES / MAX_PATH_BYTES;
    assert_eq!(names(&links(most)).len(), most);
    assert!(refusal(&links(most + 1)).contains("16 MiB"));
}

#[test]
fn a_truncated_archive_reports_where_it_ends() {
    let whole = ArchiveBuilder::default().file("a", &"x".repeat(2_000)).0;
    assert!(refusal(&whole[..1_000]).contains("the entry 'a' is truncated"));
    assert!(refusal(&whole[..300]).contains("within a header"));
    assert!(refusal(&[b'x'; 2_048]).contains("checksum"));
    assert_eq!(list(b"").expect("read"), []);
    let mut empty = Archive::new(Reader::new(&b""[..]));
    assert!(empty.next_entry().expect("read").is_none() && !empty.has_end_marker());
    let mut marked = Archive::new(Reader::new(&[0; 2 * BLOCK][..]));
    assert!(marked.next_entry().expect("read").is_none() && marked.has_end_marker());
}

#[test]
fn an_error_prints_no_control_characters() {
    let message = refusal(&ArchiveBuilder::default().file("/\u{1b}[2Jx\n", "").end());
    assert!(
        !message.chars().any(char::is_control) && message.contains("\\x1b"),
        "{message}"
    );
}

fn valid_entries() -> impl Strategy<Value = Vec<(String, Vec<u8>)>> {
    let path =
        proptest::collection::vec("[a-zé \n=]{1,60}", 1..5).prop_map(|parts| parts.join("/"));
    proptest::collection::vec(
        (path, proptest::collection::vec(any::<u8>(), 0..1_500)),
        0..6,
    )
}

proptest! {
    #[test]
    fn archives_of_another_library_round_trip(entries in valid_entries()) {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, content) in &entries {
            let mut header = TarHeader::new_gnu();
            header.set_size(content.len() as u64);
            builder
                .append_data(&mut header, path, &content[..])
                .expect("appended");
        }
        let listed = list(&builder.into_inner().expect("finished")).expect("read");
        prop_assert_eq!(
            listed,
            entries
                .into_iter()
                .map(|(path, content)| (path, Kind::File, content))
                .collect::<Vec<_>>()
        );
    }

    #[test]
    fn corrupt_archives_never_panic_or_escape(
        position in 0_usize..4_096,
        byte in any::<u8>(),
        fix_checksum in any::<bool>(),
    ) {
        let mut bytes = ArchiveBuilder::default()
            .records(&record("path", "a/b"))
            .file("x", "hello")
            .symlink("l", "..")
            .file("l2/x", "")
            .end();
        let position = position % bytes.len();
        bytes[position] = byte;
        if fix_checksum {
            let block = position / BLOCK * BLOCK;
            let mut header = TarHeader::new_old();
            header
                .as_mut_bytes()
                .copy_from_slice(&bytes[block..block + BLOCK]);
            header.set_cksum();
            bytes[block..block + BLOCK].copy_from_slice(header.as_bytes());
        }
        for (path, ..) in list(&bytes).unwrap_or_default() {
            prop_assert!(!path.starts_with('/') && path.split('/').all(|part| part != ".."));
        }
    }
}

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use cynode_archive::BLOCK;
use proptest::prelude::*;
use tar::{EntryType, Header};

use super::{super::tests::*, *};

/// A pax record.
fn record(key: &str, value: &str) -> String {
    let rest = key.len() + value.len() + 3;
    let length = (rest..rest + 10)
        .find(|length| length.to_string().len() + rest == *length)
        .expect("a length");
    format!("{length} {key}={value}\n")
}

/// Builds archives without validating the entries.
#[derive(Default)]
struct ArchiveBuilder(Vec<u8>);

impl ArchiveBuilder {
    fn add(mut self, kind: EntryType, name: &[u8], link: &[u8], mode: u32, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(1_000_000);
        header.set_size(content.len() as u64);
        let old = header.as_old_mut();
        old.name[..name.len()].copy_from_slice(name);
        old.linkname[..link.len()].copy_from_slice(link);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
        self
    }

    fn file(self, name: &str, content: &str) -> Self {
        self.add(
            EntryType::Regular,
            name.as_bytes(),
            b"",
            0o644,
            content.as_bytes(),
        )
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * BLOCK, 0);
        self.0
    }
}

fn import(workspace: &TestWorkspace, bytes: &[u8]) -> Outcome<FileChanges> {
    let mut pieces = bytes.chunks(700).map(<[u8]>::to_vec);
    workspace.files.import(b"into", &mut || Ok(pieces.next()))
}

fn refusal(workspace: &TestWorkspace, bytes: &[u8]) -> AgentError {
    let error = refused(import(workspace, bytes));
    assert_eq!(error.code, ErrorCode::InvalidRequest, "{error:?}");
    error
}

#[test]
fn an_archive_is_unpacked_with_modes_times_and_links() {
    let workspace = TestWorkspace::new();
    let archive = ArchiveBuilder::default()
        .add(EntryType::Directory, b"./", b"", 0o700, b"")
        .add(EntryType::Directory, b"closed/", b"", 0o555, b"")
        .file("closed/file", "hello")
        .add(EntryType::Regular, b"./suid", b"", 0o6755, b"x")
        .add(EntryType::Link, b"hard", b"closed/file", 0o644, b"")
        .add(EntryType::Symlink, b"soft", b"/anywhere", 0o777, b"")
        .end();
    import(&workspace, &archive).expect("unpacked");
    import(&workspace, &archive).expect("unpacked over itself");
    assert_eq!(workspace.get("into/closed/file"), b"hello");
    let stat = |path: &str| std::fs::symlink_metadata(workspace.path(path)).expect("stat");
    assert_eq!(stat("into/closed").permissions().mode() & 0o7777, 0o555);
    assert_eq!(stat("into/suid").permissions().mode() & 0o7777, 0o755);
    assert_eq!(
        (stat("into/suid").mtime(), stat("into/closed").mtime()),
        (1_000_000, 1_000_000)
    );
    assert_eq!(stat("into/hard").ino(), stat("into/closed/file").ino());
    assert!(stat("into/soft").is_symlink());
}

#[test]
fn the_changes_of_an_archive_are_reported() {
    let workspace = TestWorkspace::new();
    let archive = ArchiveBuilder::default()
        .add(EntryType::Directory, b"./", b"", 0o700, b"")
        .add(EntryType::Directory, b"dir/", b"", 0o755, b"")
        .file("dir/file", "hello")
        .file("deep/er/file", "")
        .add(EntryType::Link, b"hard", b"dir/file", 0o644, b"")
        .add(EntryType::Symlink, b"soft", b"/anywhere", 0o777, b"")
        .end();
    let hash = |text: &str| Some(digest::of_bytes(text.as_bytes()));
    let named = |path: &str| FileChange::new(format!("into/{path}").as_bytes());
    let first = import(&workspace, &archive).expect("unpacked");
    let expected = [
        named("dir").of_kind(FileType::Dir),
        named("dir/file").after(hash("hello")),
        named("deep/er/file").after(hash("")),
        named("hard").after(hash("hello")),
        named("soft").of_kind(FileType::Symlink),
    ];
    assert_eq!((first.changes.as_slice(), first.more), (&expected[..], 0));
    workspace.put("into/soft2", "old");
    let over = ArchiveBuilder::default()
        .file("./dir//file", "new")
        .add(EntryType::Symlink, b"soft2", b"x", 0o777, b"")
        .end();
    let second = import(&workspace, &over).expect("unpacked").changes;
    assert_eq!(
        second,
        [
            named("dir/file").before(hash("hello")).after(hash("new")),
            named("soft2")
                .of_kind(FileType::Symlink)
                .before(hash("old"))
        ]
    );
}

#[test]
fn entries_unpacked_before_an_error_are_reported_with_it() {
    let workspace = TestWorkspace::new();
    let error = refusal(
        &workspace,
        &ArchiveBuilder::default()
            .file("good", "hello")
            .file("../evil", "x")
            .end(),
    );
    let reported = error.changed.expect("something was changed").changes;
    assert_eq!(
        reported,
        [FileChange::new(b"into/good").after(Some(HELLO.to_owned()))]
    );
    assert_eq!(workspace.names("into"), ["good"]);
    let nothing = refusal(
        &workspace,
        &ArchiveBuilder::default().file("../evil", "x").end(),
    );
    assert_eq!(nothing.changed, None);
}

#[test]
fn changes_are_reported_up_to_the_limit_and_the_others_counted() {
    let workspace = TestWorkspace::new();
    let archive = (0..500)
        .fold(ArchiveBuilder::default(), |archive, number| {
            archive.file(&format!("file-{number}"), "hello")
        })
        .end();
    let reported = import(&workspace, &archive).expect("unpacked");
    assert!(
        reported.changes.len() > 40
            && reported
                .changes
                .iter()
                .all(|change| change.sha256_after.as_deref() == Some(HELLO)),
        "{}",
        reported.changes.len()
    );
    assert_eq!(reported.changes.len() as u64 + reported.more, 500);
}

#[test]
fn no_entry_leaves_the_directory() {
    let workspace = TestWorkspace::new();
    let outside = workspace.outside("secret");
    std::fs::write(&outside, "secret").expect("written");
    let outside = outside.to_str().expect("text").to_owned();
    std::fs::create_dir(workspace.path("into")).expect("made");
    symlink("../..", workspace.path("into/out")).expect("link");
    for (archive, expected) in [
        (ArchiveBuilder::default().file("../evil", "x"), "'..'"),
        (ArchiveBuilder::default().file("a/../../evil", "x"), "'..'"),
        (ArchiveBuilder::default().file("/evil", "x"), "absolute"),
        (
            ArchiveBuilder::default()
                .add(EntryType::Symlink, b"up", b"../..", 0o777, b"")
                .file("up/evil", "x"),
            "symbolic link of the same archive",
        ),
        (
            ArchiveBuilder::default().file("out/evil", "x"),
            "leads outside",
        ),
        (
            ArchiveBuilder::default()
                .add(EntryType::Symlink, b"abs", b"/tmp", 0o777, b"")
                .add(EntryType::Directory, b"abs/evil/", b"", 0o755, b""),
            "symbolic link of the same archive",
        ),
        (
            ArchiveBuilder::default().add(
                EntryType::Link,
                b"steal",
                outside.as_bytes(),
                0o644,
                b"",
            ),
            "link target",
        ),
        (
            ArchiveBuilder::default().add(EntryType::Link, b"steal", b"../../secret", 0o644, b""),
            "link target",
        ),
        (
            ArchiveBuilder::default()
                .add(EntryType::Symlink, b"s", b"../../secret", 0o777, b"")
                .add(EntryType::Link, b"steal", b"s", 0o644, b""),
            "regular file",
        ),
        (
            ArchiveBuilder::default().add(EntryType::Char, b"device", b"", 0o644, b""),
            "device",
        ),
        (
            ArchiveBuilder::default().add(EntryType::Fifo, b"fifo", b"", 0o644, b""),
            "device",
        ),
        (
            ArchiveBuilder::default().add(EntryType::new(b'Q'), b"odd", b"", 0o644, b""),
            "unknown",
        ),
    ] {
        let error = refusal(&workspace, &archive.end());
        assert!(
            error.message.contains(expected),
            "{expected}: {}",
            error.message
        );
    }
    assert!(
        !workspace.outside("evil").exists()
            && !workspace.path("evil").exists()
            && !std::path::Path::new("/tmp/evil").exists()
    );
    assert_eq!(
        std::fs::read(workspace.outside("secret")).expect("read"),
        b"secret"
    );
}

#[test]
fn a_file_replaces_a_link_instead_of_writing_through_it() {
    let workspace = TestWorkspace::new();
    std::fs::write(workspace.outside("secret"), "secret").expect("written");
    std::fs::create_dir(workspace.path("into")).expect("made");
    symlink(workspace.outside("secret"), workspace.path("into/file")).expect("link");
    import(
        &workspace,
        &ArchiveBuilder::default().file("file", "new").end(),
    )
    .expect("unpacked");
    assert_eq!(
        std::fs::read(workspace.outside("secret")).expect("read"),
        b"secret"
    );
    assert_eq!(workspace.get("into/file"), b"new");
    workspace.put("into/dir/x", "");
    assert_eq!(
        code(import(
            &workspace,
            &ArchiveBuilder::default().file("dir", "new").end()
        )),
        ErrorCode::AlreadyExists
    );
}

#[test]
fn extension_headers_name_the_next_entry() {
    let workspace = TestWorkspace::new();
    let name = "n".repeat(150);
    let records = record("path", &name) + &record("mtime", "12345.678") + &record("comment", "x");
    let archive = ArchiveBuilder::default()
        .add(EntryType::XGlobalHeader, b"g", b"", 0, b"12 comment=\n")
        .add(EntryType::XHeader, b"x", b"", 0, records.as_bytes())
        .file("short", "hello")
        .file("other", "");
    import(&workspace, &archive.end()).expect("unpacked");
    assert_eq!(workspace.names("into"), [name.as_str(), "other"]);
    assert_eq!(
        std::fs::metadata(workspace.path("into").join(&name))
            .expect("stat")
            .mtime(),
        12_345
    );
    for records in ["nonsense", "99 path=x\n", "5 x\n"] {
        refusal(
            &workspace,
            &ArchiveBuilder::default()
                .add(EntryType::XHeader, b"x", b"", 0, records.as_bytes())
                .end(),
        );
    }
}

#[test]
fn a_newline_in_a_record_hides_no_other_record() {
    let workspace = TestWorkspace::new();
    let records = record("comment", "x\n14 path=fine") + &record("path", "other");
    import(
        &workspace,
        &ArchiveBuilder::default()
            .add(EntryType::XHeader, b"x", b"", 0, records.as_bytes())
            .file("fine", "hello")
            .end(),
    )
    .expect("unpacked");
    assert_eq!(workspace.names("into"), ["other"]);
    let smuggled = ArchiveBuilder::default().file("smuggled", "x").0;
    let records = record("comment", "x\n13 size=1024") + &record("size", "0");
    let archive = ArchiveBuilder::default()
        .add(EntryType::XHeader, b"x", b"", 0, records.as_bytes())
        .add(EntryType::Regular, b"fine", b"", 0o644, &smuggled);
    assert!(
        refusal(&workspace, &archive.end())
            .message
            .contains("different sizes")
    );
    assert_eq!(workspace.names("into"), ["other"]);
}

#[test]
fn an_empty_archive_makes_an_empty_directory() {
    let workspace = TestWorkspace::new();
    import(&workspace, &ArchiveBuilder::default().end()).expect("unpacked");
    assert!(workspace.names("into").is_empty());
}

#[test]
fn a_broken_archive_is_refused() {
    let workspace = TestWorkspace::new();
    refusal(&workspace, b"");
    refusal(&workspace, b"short");
    refusal(&workspace, &[b'x'; 2_048]);
    assert!(!workspace.path("into").exists());
    let archive = ArchiveBuilder::default()
        .file("file", &"x".repeat(2_000))
        .end();
    workspace.put("into/file", "old");
    assert!(
        refusal(&workspace, &archive[..1_000])
            .message
            .contains("ends within")
    );
    assert_eq!(
        (workspace.get("into/file"), workspace.names("into")),
        (b"old".to_vec(), vec!["file".to_owned()])
    );
    let mut pieces = vec![archive[..1_000].to_vec()].into_iter();
    let interrupted = workspace.files.import(b"into", &mut || {
        pieces
            .next()
            .map(Some)
            .ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
    });
    assert!(matches!(interrupted, Err(Failure::Connection(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn corrupt_archives_never_panic_or_escape_the_directory(
        position in 0_usize..2_000,
        byte in any::<u8>(),
        fix in any::<bool>(),
    ) {
        let workspace = TestWorkspace::new();
        let mut archive = ArchiveBuilder::default()
            .add(EntryType::Symlink, b"link", b"..", 0o777, b"")
            .file("link/file", "hello")
            .end();
        let position = position % archive.len();
        archive[position] = byte;
        if fix {
            let block = position / BLOCK * BLOCK;
            let mut header = Header::new_old();
            header
                .as_mut_bytes()
                .copy_from_slice(&archive[block..block + BLOCK]);
            header.set_cksum();
            archive[block..block + BLOCK].copy_from_slice(header.as_bytes());
        }
        let _result = import(&workspace, &archive);
        prop_assert!(!workspace.path("file").exists());
    }
}

use super::*;
use crate::{Patch, fuzz::Memory, tests::*};

const DIGITS: &[u8; 85] =
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";

/// A hunk as git writes it, with a size of the test's choice.
fn hunk(form: &str, size: usize, zlib: &[u8]) -> String {
    let mut text = format!("{form} {size}\n");
    for bytes in zlib.chunks(52) {
        let length = u8::try_from(bytes.len()).expect("short");
        text.push(char::from(if length <= 26 {
            b'A' + length - 1
        } else {
            b'a' + length - 27
        }));
        for four in bytes.chunks(4) {
            let mut padded = [0; 4];
            padded[..four.len()].copy_from_slice(four);
            let value = u32::from_be_bytes(padded);
            for power in (0..5).rev() {
                text.push(char::from(
                    DIGITS[(value / 85_u32.pow(power) % 85) as usize],
                ));
            }
        }
        text.push('\n');
    }
    text + "\n"
}

fn deflated(content: &[u8]) -> Vec<u8> {
    miniz_oxide::deflate::compress_to_vec_zlib(content, 6)
}

fn literal(content: &[u8]) -> String {
    hunk("literal", content.len(), &deflated(content))
}

fn delta(delta: &[u8]) -> String {
    hunk("delta", delta.len(), &deflated(delta))
}

fn hex(id: BlobId) -> String {
    format!("{id:02x?}").replace(['[', ']', ',', ' '], "")
}

/// A section that changes the file `f`, with the ids of these contents.
fn section(old: &[u8], new: &[u8], hunks: &str) -> String {
    let (old, new) = (hex(blob_id(old)), hex(blob_id(new)));
    format!("diff --git a/f b/f\nindex {old}..{new} 100644\nGIT binary patch\n{hunks}")
}

fn without_ids(hunks: &str) -> String {
    format!("diff --git a/f b/f\nindex 1234567..89abcde 100644\nGIT binary patch\n{hunks}")
}

fn file(content: &[u8]) -> Memory {
    Memory([(at("f"), bytes(content))].into())
}

fn after(old: &[u8], diff: &str) -> Vec<u8> {
    patched(file(old), diff)
        .0
        .remove(&at("f"))
        .expect("a file")
        .bytes
}

fn parse_error(diff: &str) -> String {
    Patch::parse(diff.as_bytes(), 1)
        .expect_err("refused")
        .to_string()
}

const OLD: &[u8] = b"old\0content";
const NEW: &[u8] = b"new\0\xff";

#[test]
fn a_literal_replaces_the_content() {
    let both = literal(NEW) + &literal(OLD);
    assert_eq!(after(OLD, &section(OLD, NEW, &both)), NEW);
    assert_eq!(after(OLD, &section(OLD, NEW, &literal(NEW))), NEW);
    assert_eq!(after(b"anything", &without_ids(&both)), NEW);
    // The empty line at the end is what a caller trims.
    assert_eq!(after(OLD, section(OLD, NEW, &both).trim_end()), NEW);
    assert_eq!(
        after(OLD, &section(OLD, NEW, &both).replace('\n', "\r\n")),
        NEW
    );
    let long: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(after(b"", &section(b"", &long, &literal(&long))), long);
}

#[test]
fn a_binary_file_is_created_deleted_and_renamed() {
    let (absent, id) = (hex(ABSENT), hex(blob_id(NEW)));
    let create = format!(
        "diff --git a/d/f b/d/f\nnew file mode 100755\nindex {absent}..{id}\nGIT binary patch\n{}{}",
        literal(NEW),
        literal(b"")
    );
    let created = patched(Memory::default(), &create);
    assert_eq!(created.0[&at("d/f")].bytes, NEW);
    let rename = format!(
        "diff --git a/d/f b/g\nsimilarity index 60%\nrename from d/f\nrename to g\nindex {id}..{} 100755\nGIT binary patch\n{}",
        hex(blob_id(b"new\0!")),
        delta(b"\x05\x05\x90\x04\x01!"),
    );
    let renamed = patched(created, &rename);
    assert_eq!(renamed.0.keys().collect::<Vec<_>>(), [&at("g")]);
    assert_eq!(renamed.0[&at("g")].bytes, b"new\0!");
    let delete = |old: &[u8]| {
        format!(
            "diff --git a/g b/g\ndeleted file mode 100755\nindex {}..{absent}\nGIT binary patch\n{}{}",
            hex(blob_id(old)),
            literal(b""),
            literal(old)
        )
    };
    assert!(reason(&renamed, &delete(b"other")).contains("the one the diff was made for"));
    assert!(patched(renamed.clone(), &delete(b"new\0!")).0.is_empty());
    let left = delete(b"new\0!").replace(&literal(b""), &literal(b"x"));
    assert!(reason(&renamed, &left).contains("does not delete"));
    assert!(reason(&file(b"x"), &create.replace("d/f", "f")).contains("already exists"),);
    let wrong = create.replace(&absent, &hex(blob_id(b"x")));
    assert!(reason(&Memory::default(), &wrong).contains("the one the diff was made for"));
}

#[test]
fn a_delta_copies_and_inserts() {
    // Copies "content" from offset 4, inserts "\0\xff", copies "old".
    let steps = b"\x0b\x0c\x91\x04\x07\x02\0\xff\x90\x03";
    let new = b"content\0\xffold";
    assert_eq!(after(OLD, &section(OLD, new, &delta(steps))), new);
    // No length stands for 64 KiB.
    let old = vec![b'x'; 0x1_0001];
    let steps = b"\x81\x80\x04\x80\x80\x04\x81\x01";
    assert_eq!(
        after(&old, &section(&old, &old[1..], &delta(steps))),
        old[1..]
    );
}

#[test]
fn a_content_other_than_the_named_one_is_rejected() {
    let literal_diff = section(OLD, NEW, &literal(NEW));
    assert_eq!(
        reason(&file(b"other"), &literal_diff),
        "the file differs from the one the diff was made for"
    );
    assert_eq!(
        reason(&file(OLD), &section(OLD, b"another", &literal(NEW))),
        "the result differs from the one the diff was made from"
    );
    assert_eq!(reason(&Memory::default(), &literal_diff), "no such file");
    let steps = b"\x0b\x01\x01!";
    assert!(reason(&file(OLD), &without_ids(&delta(steps))).contains("needs the ids"));
    assert_eq!(after(OLD, &section(OLD, b"!", &delta(steps))), b"!");
}

#[test]
fn a_delta_stays_within_its_bounds() {
    for steps in [
        &b""[..],
        b"\x0b",
        b"\x0b\xff\xff\xff\xff\xff\x01",
        b"\x0c\x01\x01!",    // The old content is shorter.
        b"\x0b\x02\x01!",    // The new content is shorter.
        b"\x0b\x01\x02!!",   // The new content is longer.
        b"\x0b\x01\0",       // Reserved.
        b"\x0b\x05\x05!",    // The insertion is cut.
        b"\x0b\x0c\x90",     // The copy is cut.
        b"\x0b\x0c\x90\x0c", // Copies past the end.
        b"\x0b\x01\x8f\xff\xff\xff\xff\x01",
    ] {
        let why = reason(&file(OLD), &section(OLD, b"!", &delta(steps)));
        assert!(why.contains("delta is invalid"), "{steps:?}: {why}");
    }
    // Sizes of 32 MiB and of one byte more.
    let huge = |size: &[u8]| {
        let steps = [b"\x0b", size].concat();
        reason(&file(OLD), &section(OLD, b"!", &delta(&steps)))
    };
    assert!(huge(b"\x80\x80\x80\x10").contains("delta is invalid"));
    assert!(huge(b"\x81\x80\x80\x10").contains("too large"));
}

#[test]
fn inflating_stops_at_the_declared_size() {
    let zeros = vec![0; 1 << 20];
    let zlib = deflated(&zeros);
    assert!(zlib.len() < 2_000);
    let why =
        |size: usize, zlib: &[u8]| reason(&file(OLD), &without_ids(&hunk("literal", size, zlib)));
    assert!(why(zeros.len() - 1, &zlib).contains("longer than the diff says"));
    assert!(why(0, &zlib).contains("longer than the diff says"));
    assert!(why(zeros.len() + 1, &zlib).contains("shorter than the diff says"));
    assert!(why(zeros.len(), &[&zlib[..], b"x"].concat()).contains("bytes follow"));
    assert!(why(zeros.len(), &zlib[..zlib.len() - 1]).contains("invalid"));
    let mut damaged = zlib.clone();
    *damaged.last_mut().expect("a checksum") ^= 1;
    assert!(why(zeros.len(), &damaged).contains("invalid"));
    let fed = |size: usize| {
        let diff = without_ids(&hunk("literal", size, &zlib));
        let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
        let mut bytes = 0;
        patch.sections()[0].each_added(|piece| bytes += piece.len());
        bytes
    };
    assert_eq!(fed(zeros.len()), zeros.len());
    assert!(fed(100_000) <= 100_000);
}

#[test]
fn declared_sizes_are_bounded() {
    let declared = |size: u64| without_ids(&format!("literal {size}\nHcmV?d00001\n\n"));
    assert!(Patch::parse(declared(MAX_FILE_BYTES).as_bytes(), 1).is_ok());
    assert!(parse_error(&declared(MAX_FILE_BYTES + 1)).contains("more than 33554432 bytes"));
    let four = declared(MAX_FILE_BYTES).repeat(4);
    let patch = Patch::parse(four.as_bytes(), 1).expect("parsed");
    assert_eq!(patch.inflated_bytes(), crate::plan::MAX_TOTAL_BYTES);
    let more = four + &declared(1);
    assert!(parse_error(&more).contains("more than 134217728 bytes"));
}

#[test]
fn a_damaged_binary_patch_is_an_error_that_names_the_line() {
    for (hunks, expected) in [
        ("", "line 4: a binary patch begins with"),
        (
            "literal\nHcmV?d00001\n\n",
            "line 4: a binary patch begins with",
        ),
        ("literal x\nHcmV?d00001\n\n", "line 4: the size"),
        ("literal -1\nHcmV?d00001\n\n", "line 4: the size"),
        (
            "literal 99999999999999999999\nHcmV?d00001\n\n",
            "line 4: the size",
        ),
        ("literal 0\n\n", "the binary content is missing"),
        ("literal 0\n", "the binary content is missing"),
        ("literal 0\nHcmV?d0000\n\n", "line 5: the line is not valid"),
        (
            "literal 0\nHcmV?d000011\n\n",
            "line 5: the line is not valid",
        ),
        (
            "literal 0\nHcmV?d0000\"\n\n",
            "line 5: the line is not valid",
        ),
        (
            "literal 0\n0cmV?d00001\n\n",
            "line 5: the line is not valid",
        ),
        ("literal 0\nD~~~~~\n\n", "line 5: the line is not valid"),
        (
            "literal 0\nHcmV?d00001\nindex 1..2\n",
            "line 6: the line is not valid",
        ),
        ("literal 0\nHcmV?d00001\n\nliteral x\n", "line 7: the size"),
    ] {
        let error = parse_error(&without_ids(hunks));
        assert!(error.contains(expected), "{hunks:?}: {error}");
    }
    let both = "diff --git a/f b/f\nBinary files a/f and b/f differ\nGIT binary patch\nliteral 0\nHcmV?d00001\n\n";
    assert!(parse_error(both).contains("two binary changes"));
    let ids = format!("index {0}..{0}\nindex {0}..{0}\n", hex(ABSENT));
    let twice = format!("diff --git a/f b/f\n{ids}GIT binary patch\nliteral 0\nHcmV?d00001\n\n");
    assert!(parse_error(&twice).contains("repeats a field"));
}

#[test]
fn added_content_is_what_the_change_brings() {
    let added = |diff: &str| {
        let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
        let mut bytes = Vec::new();
        patch.sections()[0].each_added(|piece| bytes.extend_from_slice(piece));
        bytes
    };
    assert_eq!(added(&without_ids(&literal(NEW))), NEW);
    // Two adjacent insertions, a copy, and another insertion.
    let steps = b"\x0b\x08\x02ab\x02cd\x90\x03\x01e";
    assert_eq!(added(&without_ids(&delta(steps))), b"abcd\ne");
    assert_eq!(
        added(&without_ids(&delta(b"\x0b\x08\x02ab\0\x02cd"))),
        b"ab"
    );
    let text = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n x\n-y\n+z\n";
    assert_eq!(added(text), b"z\n");
}

#[test]
fn insertions_are_also_known_without_the_copies_between_them() {
    let partial = |diff: &str| {
        let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
        let mut joined = Vec::new();
        patch.sections()[0].each_added_joined(|piece| joined.extend_from_slice(piece));
        (patch.sections()[0].is_partial(), joined)
    };
    let steps = b"\x0b\x08\x02ab\x90\x03\x02cd\x90\x03\x01e";
    assert_eq!(
        partial(&without_ids(&delta(steps))),
        (true, b"abcde".to_vec())
    );
    // The new content is known from the patch, or nothing is added.
    for diff in [
        without_ids(&literal(NEW)),
        without_ids(&delta(b"\x0b\x02\x02ab")),
        without_ids(&delta(b"\x0b\x03\x90\x03")),
        "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n x\n-y\n+z\n".to_owned(),
    ] {
        assert_eq!(partial(&diff), (false, Vec::new()), "{diff}");
    }
}

#[test]
fn binary_sections_count_towards_the_bound_of_work() {
    // Each section inflates little and copies the old content 32 times, or a part of it.
    let old = vec![b'x'; 1 << 20];
    let new = old.repeat(32);
    let mut steps = b"\x80\x80\x40\x80\x80\x80\x10".to_vec();
    steps.extend(b"\xc0\x10".repeat(32));
    let grow = section(&old, &new, &delta(&steps));
    assert_eq!(after(&old, &grow).len(), new.len());
    let shrink = section(&new, &old, &delta(b"\x80\x80\x80\x10\x80\x80\x40\xc0\x10"));
    let times = |count: usize| (grow.clone() + &shrink).repeat(count);
    assert_eq!(after(&old, &times(15)), old);
    let diff = times(16);
    let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
    assert!(matches!(
        crate::plan(&file(&old), &patch),
        Err(crate::PlanError::TooLarge(message)) if message.contains("too often")
    ));
}

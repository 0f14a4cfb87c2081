//! Parses what git prints.
//!
//! Invariant: output that is not exactly of the expected form is an error. A skipped entry would be
//! one that nobody inspects.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("git printed {0}")]
pub(crate) struct UnexpectedOutput(pub(crate) &'static str);

type Parsed<T> = Result<T, UnexpectedOutput>;

/// The id of an object: SHA-1 or SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ObjectId {
    bytes: [u8; 32],
    length: usize,
}

impl ObjectId {
    /// Accepts whole ids in lower case only: nothing else may reach an argument of git.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let length = text.len() / 2;
        let is_lower = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if !matches!(text.len(), 40 | 64) || !text.bytes().all(is_lower) {
            return None;
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes[..length]).ok()?;
        Some(Self { bytes, length })
    }

    /// The id that stands for no object.
    pub(crate) fn is_null(self) -> bool {
        self.bytes == [0; 32]
    }

    /// The null id of the same hash.
    pub(crate) const fn to_null(self) -> Self {
        Self {
            bytes: [0; 32],
            length: self.length,
        }
    }

    /// The size of the hash.
    pub(crate) const fn hash_bytes(self) -> usize {
        self.length
    }

    fn read(text: &[u8]) -> Parsed<Self> {
        std::str::from_utf8(text)
            .ok()
            .and_then(Self::parse)
            .ok_or(UnexpectedOutput("an invalid object id"))
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&hex::encode(&self.bytes[..self.length]))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

pub(crate) const MODE_TREE: u32 = 0o040_000;
pub(crate) const MODE_REGULAR: u32 = 0o100_644;
pub(crate) const MODE_EXECUTABLE: u32 = 0o100_755;
pub(crate) const MODE_SYMLINK: u32 = 0o120_000;
pub(crate) const MODE_GITLINK: u32 = 0o160_000;

/// An entry of a tree, with its whole path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TreeEntry {
    pub(crate) mode: u32,
    pub(crate) id: ObjectId,
    pub(crate) path: Vec<u8>,
}

/// A difference of two trees. A side without the path is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TreeDifference {
    pub(crate) old: Option<(u32, ObjectId)>,
    pub(crate) new: Option<(u32, ObjectId)>,
    pub(crate) path: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteRef {
    pub(crate) id: ObjectId,
    pub(crate) name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    Blob,
    Tree,
    Commit,
    Tag,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObjectHeader {
    pub(crate) id: ObjectId,
    pub(crate) kind: ObjectKind,
    pub(crate) size: u64,
}

/// An object of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedObject {
    pub(crate) id: ObjectId,
    /// Where it begins in the pack.
    pub(crate) offset: u64,
}

fn mode(text: &[u8]) -> Parsed<u32> {
    let is_octal = |byte: &u8| matches!(byte, b'0'..=b'7');
    if text.len() != 6 || !text.iter().all(is_octal) {
        return Err(UnexpectedOutput("an invalid mode"));
    }
    Ok(text
        .iter()
        .fold(0, |mode, digit| mode * 8 + u32::from(digit - b'0')))
}

fn number(text: &[u8]) -> Parsed<u64> {
    let has_zeros = text.len() > 1 && text.starts_with(b"0");
    if text.is_empty() || has_zeros || !text.iter().all(u8::is_ascii_digit) {
        return Err(UnexpectedOutput("an invalid number"));
    }
    std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or(UnexpectedOutput("an invalid number"))
}

/// Records that each end in a byte.
fn records(output: &[u8], end: u8) -> Parsed<impl Iterator<Item = &[u8]>> {
    let body = match output.split_last() {
        None => None,
        Some((last, body)) if *last == end => Some(body),
        Some(_) => return Err(UnexpectedOutput("an incomplete record")),
    };
    Ok(body
        .into_iter()
        .flat_map(move |body| body.split(move |byte| *byte == end)))
}

fn path(text: &[u8]) -> Parsed<Vec<u8>> {
    if text.is_empty() {
        return Err(UnexpectedOutput("an empty path"));
    }
    Ok(text.to_vec())
}

/// Of `ls-tree -z`.
pub(crate) fn tree_entries(output: &[u8]) -> Parsed<Vec<TreeEntry>> {
    records(output, 0)?
        .map(|record| {
            let tab = record
                .iter()
                .position(|byte| *byte == b'\t')
                .ok_or(UnexpectedOutput("an entry without a path"))?;
            let head: Vec<&[u8]> = record[..tab].split(|byte| *byte == b' ').collect();
            let [mode_text, kind, id] = head.as_slice() else {
                return Err(UnexpectedOutput("an invalid entry of a tree"));
            };
            let mode = mode(mode_text)?;
            let expected: &[u8] = match mode {
                MODE_TREE => b"tree",
                MODE_GITLINK => b"commit",
                _ => b"blob",
            };
            if *kind != expected {
                return Err(UnexpectedOutput("an entry whose mode and type differ"));
            }
            Ok(TreeEntry {
                mode,
                id: ObjectId::read(id)?,
                path: path(&record[tab + 1..])?,
            })
        })
        .collect()
}

/// Of `diff-tree -z --raw --no-renames --no-abbrev`.
pub(crate) fn tree_differences(output: &[u8]) -> Parsed<Vec<TreeDifference>> {
    let mut records = records(output, 0)?;
    let mut found = Vec::new();
    while let Some(head) = records.next() {
        let fields: Vec<&[u8]> = head
            .strip_prefix(b":")
            .ok_or(UnexpectedOutput("an invalid difference"))?
            .split(|byte| *byte == b' ')
            .collect();
        let [old_mode, new_mode, old, new, status] = fields.as_slice() else {
            return Err(UnexpectedOutput("an invalid difference"));
        };
        let side = |mode_text: &[u8], id: &[u8]| -> Parsed<Option<(u32, ObjectId)>> {
            let (mode, id) = (mode(mode_text)?, ObjectId::read(id)?);
            match (mode == 0, id.is_null()) {
                (true, true) => Ok(None),
                (false, false) => Ok(Some((mode, id))),
                _ => Err(UnexpectedOutput("a difference with half a side")),
            }
        };
        let (old, new) = (side(old_mode, old)?, side(new_mode, new)?);
        match (*status, old.is_some(), new.is_some()) {
            (b"A", false, true) | (b"D", true, false) | (b"M" | b"T", true, true) => {}
            _ => return Err(UnexpectedOutput("a difference of an unknown kind")),
        }
        let path = path(
            records
                .next()
                .ok_or(UnexpectedOutput("a difference without a path"))?,
        )?;
        found.push(TreeDifference { old, new, path });
    }
    Ok(found)
}

/// Of `ls-remote`.
pub(crate) fn remote_refs(output: &[u8]) -> Parsed<Vec<RemoteRef>> {
    records(output, b'\n')?
        .map(|line| {
            let tab = line
                .iter()
                .position(|byte| *byte == b'\t')
                .ok_or(UnexpectedOutput("a ref without a name"))?;
            let name = std::str::from_utf8(&line[tab + 1..])
                .ok()
                .filter(|name| !name.is_empty() && !name.contains(char::is_control))
                .ok_or(UnexpectedOutput("a ref with an invalid name"))?;
            Ok(RemoteRef {
                id: ObjectId::read(&line[..tab])?,
                name: name.to_owned(),
            })
        })
        .collect()
}

/// A line of `cat-file --batch-check`; `None` for a missing object.
fn object_header(line: &[u8]) -> Parsed<Option<ObjectHeader>> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    match fields.as_slice() {
        [id, b"missing"] => ObjectId::read(id).map(|_| None),
        [id, kind, size] => Ok(Some(ObjectHeader {
            id: ObjectId::read(id)?,
            kind: match *kind {
                b"blob" => ObjectKind::Blob,
                b"tree" => ObjectKind::Tree,
                b"commit" => ObjectKind::Commit,
                b"tag" => ObjectKind::Tag,
                _ => return Err(UnexpectedOutput("an object of an unknown type")),
            },
            size: number(size)?,
        })),
        _ => Err(UnexpectedOutput("an invalid description of an object")),
    }
}

/// Of `cat-file --batch-check`, in the order of the request.
pub(crate) fn object_headers(output: &[u8]) -> Parsed<Vec<Option<ObjectHeader>>> {
    records(output, b'\n')?.map(object_header).collect()
}

/// Of `cat-file --batch`: headers, and where the contents are in the output.
pub(crate) fn object_contents(
    output: &[u8],
) -> Parsed<Vec<(ObjectHeader, std::ops::Range<usize>)>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < output.len() {
        let line = output[at..]
            .iter()
            .position(|byte| *byte == b'\n')
            .ok_or(UnexpectedOutput("an incomplete object"))?;
        let header = object_header(&output[at..at + line])?
            .ok_or(UnexpectedOutput("that an object is missing"))?;
        let start = at + line + 1;
        let end = usize::try_from(header.size)
            .ok()
            .and_then(|size| start.checked_add(size))
            .filter(|end| output.get(*end) == Some(&b'\n'))
            .ok_or(UnexpectedOutput("an object of another size"))?;
        found.push((header, start..end));
        at = end + 1;
    }
    Ok(found)
}

/// Of `verify-pack -v`: the objects, without the statistics after them.
pub(crate) fn packed_objects(output: &[u8]) -> Parsed<Vec<PackedObject>> {
    let mut found = Vec::new();
    for line in records(output, b'\n')? {
        let fields: Vec<&[u8]> = line
            .split(|byte| *byte == b' ')
            .filter(|field| !field.is_empty())
            .collect();
        let Some(Ok(id)) = fields.first().map(|id| ObjectId::read(id)) else {
            break;
        };
        let offset = match fields.as_slice() {
            [_, _, _, _, offset] | [_, _, _, _, offset, _, _] => number(offset)?,
            _ => return Err(UnexpectedOutput("an invalid description of a pack")),
        };
        found.push(PackedObject { id, offset });
    }
    Ok(found)
}

/// The only object id that a command prints.
pub(crate) fn single_id(output: &[u8]) -> Parsed<ObjectId> {
    ObjectId::read(output.strip_suffix(b"\n").unwrap_or(output))
}

/// One object id in each line.
pub(crate) fn object_ids(output: &[u8]) -> Parsed<Vec<ObjectId>> {
    records(output, b'\n')?.map(ObjectId::read).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ONE: &str = "1111111111111111111111111111111111111111";
    const NULL: &str = "0000000000000000000000000000000000000000";

    #[test]
    fn only_whole_ids_in_lower_case_are_ids() {
        assert_eq!(
            ObjectId::parse(ONE).map(|id| id.to_string()),
            Some(ONE.to_owned())
        );
        assert!(ObjectId::parse(&"a".repeat(64)).is_some());
        for text in [
            "",
            "HEAD",
            "111",
            &ONE[1..],
            &"A".repeat(40),
            &"g".repeat(40),
        ] {
            assert!(ObjectId::parse(text).is_none(), "{text}");
        }
    }

    #[test]
    fn a_listing_is_read_whole_or_not_at_all() {
        let listing = format!("100644 blob {ONE}\ta\nb\0040000 tree {ONE}\tc d\0");
        let entries = tree_entries(listing.as_bytes()).expect("a listing");
        assert_eq!(entries[0].path, b"a\nb");
        assert_eq!(entries[1].mode, MODE_TREE);
        assert_eq!(tree_entries(b""), Ok(vec![]));
        for broken in [
            listing.trim_end_matches('\0').to_owned(),
            format!("100644 tree {ONE}\ta\0"),
            format!("100644 blob {ONE}\t\0"),
            format!("100644 blob {ONE} a\0"),
            format!("644 blob {ONE}\ta\0"),
            "100644 blob 11\ta\0".to_owned(),
        ] {
            assert!(tree_entries(broken.as_bytes()).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn a_difference_has_the_sides_that_its_status_says() {
        let difference = |head: &str| tree_differences(format!(":{head}\0path\0").as_bytes());
        let added = difference(&format!("000000 100644 {NULL} {ONE} A")).expect("added");
        assert_eq!(added[0].old, None);
        assert_eq!(
            added[0].new,
            ObjectId::parse(ONE).map(|id| (MODE_REGULAR, id))
        );
        for broken in [
            format!("000000 100644 {NULL} {ONE} M"),
            format!("100644 100644 {NULL} {ONE} M"),
            format!("000000 100644 {ONE} {ONE} A"),
            format!("100644 100644 {ONE} {ONE} R100"),
            format!("100644 100644 {ONE} {ONE}"),
        ] {
            assert!(difference(&broken).is_err(), "{broken}");
        }
        assert!(tree_differences(format!(":000000 100644 {NULL} {ONE} A\0").as_bytes()).is_err());
    }

    #[test]
    fn contents_are_as_long_as_their_headers_say() {
        let output = format!("{ONE} blob 3\na\nb\n{ONE} blob 0\n\n");
        let contents = object_contents(output.as_bytes()).expect("contents");
        assert_eq!(&output[contents[0].1.clone()], "a\nb");
        assert!(contents[1].1.is_empty());
        for broken in [
            format!("{ONE} blob 2\na\nb\n"),
            format!("{ONE} blob 9\na\n"),
            format!("{ONE} missing\n"),
            format!("{ONE} blob 18446744073709551615\na\n"),
            format!("{ONE} blob 1\na"),
        ] {
            assert!(object_contents(broken.as_bytes()).is_err(), "{broken:?}");
        }
        assert_eq!(
            object_headers(format!("{ONE} missing\n").as_bytes()),
            Ok(vec![None])
        );
    }

    #[test]
    fn the_objects_of_a_pack_precede_its_statistics() {
        let output = format!(
            "{ONE} commit 169 128 12\n{ONE} blob   13 42 209 1 {ONE}\nnon delta: 1 object\n\
             /x.pack: ok\n"
        );
        let offsets: Vec<u64> = packed_objects(output.as_bytes())
            .expect("objects")
            .iter()
            .map(|object| object.offset)
            .collect();
        assert_eq!(offsets, [12, 209]);
    }

    proptest! {
        #[test]
        fn a_listing_survives_a_round_trip(
            paths in proptest::collection::vec(
                proptest::collection::vec(1_u8..=255, 1..20), 0..8)
        ) {
            let mut output = Vec::new();
            for path in &paths {
                output.extend(format!("100755 blob {ONE}\t").bytes());
                output.extend_from_slice(path);
                output.push(0);
            }
            let read: Vec<Vec<u8>> = tree_entries(&output)
                .expect("a listing")
                .into_iter()
                .map(|entry| entry.path)
                .collect();
            prop_assert_eq!(read, paths);
        }
    }
}

//! File names: their syntax in diffs, and locations in a tree.

use std::cmp::Ordering;

use crate::MAX_PATH_BYTES;

/// A path below the root of a tree: components joined by single slashes, none of them empty, `.` or
/// `..`.
///
/// Ordered by components, so that everything below a location follows it immediately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Location(Vec<u8>);

impl Location {
    /// Parses a name, or returns the reason why it names nothing below a root.
    pub fn parse(name: &[u8]) -> Result<Self, &'static str> {
        if name.starts_with(b"/") {
            return Err("the path is absolute");
        }
        if name.contains(&0) {
            return Err("the path contains a NUL byte");
        }
        if name.len() > MAX_PATH_BYTES {
            return Err("the path is too long");
        }
        if name.ends_with(b"/") {
            return Err("the path names a directory");
        }
        let mut joined = Vec::with_capacity(name.len());
        for part in name.split(|byte| *byte == b'/') {
            match part {
                b"" | b"." => {}
                b".." => return Err("the path contains '..'"),
                part if spells_git(part) => {
                    return Err("the path is in a .git directory");
                }
                part => {
                    if !joined.is_empty() {
                        joined.push(b'/');
                    }
                    joined.extend_from_slice(part);
                }
            }
        }
        if joined.is_empty() {
            Err("the path is empty")
        } else {
            Ok(Self(joined))
        }
    }

    /// Builds a location from validated components.
    pub fn from_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Self(parts.into_iter().collect::<Vec<_>>().join(&b'/'))
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn parts(&self) -> Vec<&[u8]> {
        self.0.split(|byte| *byte == b'/').collect()
    }

    /// Whether `self` is a directory somewhere above `other`.
    pub fn is_above(&self, other: &Self) -> bool {
        other.0.get(self.0.len()) == Some(&b'/') && other.0.starts_with(&self.0)
    }

    /// The same path with its prefix `above` replaced by `to`.
    pub(crate) fn rebased(&self, above: &Self, to: &Self) -> Self {
        Self([to.as_bytes(), &self.0[above.0.len()..]].concat())
    }
}

/// Whether a file system could take a name for `.git`: in any case, with characters that HFS+
/// ignores, as the short name or with the endings and streams that NTFS ignores.
pub fn spells_git(part: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(part) else {
        return part.eq_ignore_ascii_case(b".git");
    };
    let visible: String = text
        .chars()
        .filter(|character| {
            !matches!(
                character,
                '\u{200c}'..='\u{200f}'
                    | '\u{202a}'..='\u{202e}'
                    | '\u{206a}'..='\u{206f}'
                    | '\u{feff}'
            )
        })
        .collect();
    let name = visible.split(':').next().unwrap_or_default();
    let name = name.trim_end_matches(['.', ' ']);
    name.eq_ignore_ascii_case(".git") || name.eq_ignore_ascii_case("git~1")
}

impl Ord for Location {
    fn cmp(&self, other: &Self) -> Ordering {
        let rank = |byte: &u8| {
            if *byte == b'/' {
                0
            } else {
                u16::from(*byte) + 1
            }
        };
        self.0.iter().map(rank).cmp(other.0.iter().map(rank))
    }
}

impl PartialOrd for Location {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A sorted set of locations that supports queries for ancestors and descendants.
#[derive(Debug, Default)]
pub(crate) struct Locations(Vec<Location>);

impl FromIterator<Location> for Locations {
    fn from_iter<I: IntoIterator<Item = Location>>(locations: I) -> Self {
        let mut sorted: Vec<Location> = locations.into_iter().collect();
        sorted.sort_unstable();
        sorted.dedup();
        Self(sorted)
    }
}

impl Locations {
    pub(crate) fn contains(&self, location: &Location) -> bool {
        self.0.binary_search(location).is_ok()
    }

    /// Whether the set contains a location below this one.
    pub(crate) fn has_below(&self, location: &Location) -> bool {
        let next = self.0.partition_point(|other| other <= location);
        self.0
            .get(next)
            .is_some_and(|other| location.is_above(other))
    }

    /// The topmost ancestor of a path in the set, in time proportional to the path's length and the
    /// logarithm of the set's size.
    pub(crate) fn above(&self, path: &Location) -> Option<&Location> {
        let mut range = self.0.as_slice();
        let mut start = 0;
        for end in path
            .0
            .iter()
            .enumerate()
            .filter(|(_, byte)| **byte == b'/')
            .map(|(index, _)| index)
        {
            let part = &path.0[start..end];
            // All locations in the range share the components so far, so each has this component at
            // the same offset.
            let part_of = |other: &Location| {
                other.0[start..]
                    .split(|byte| *byte == b'/')
                    .next()
                    .unwrap_or_default()
                    .cmp(part)
            };
            let low = range.partition_point(|other| part_of(other) == Ordering::Less);
            let high = range.partition_point(|other| part_of(other) != Ordering::Greater);
            range = &range[low..high];
            let first = range.first()?;
            if first.0.len() == end {
                return Some(first);
            }
            start = end + 1;
        }
        None
    }
}

/// Drops leading components, but never the last one. Consecutive slashes count as one; an absolute
/// name stays unchanged.
pub(crate) fn strip_components(name: &[u8], count: usize) -> Vec<u8> {
    let mut rest = name;
    if rest.starts_with(b"/") {
        return rest.to_vec();
    }
    for _ in 0..count {
        let Some(slash) = rest.iter().position(|byte| *byte == b'/') else {
            break;
        };
        let after = &rest[slash..];
        let next = &after[after.iter().take_while(|byte| **byte == b'/').count()..];
        if next.is_empty() {
            break;
        }
        rest = next;
    }
    rest.to_vec()
}

/// Unquotes a name in double quotes with C escapes, and returns the rest.
pub(crate) fn unquote(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut rest = text.strip_prefix(b"\"")?;
    let mut name = Vec::new();
    loop {
        let (byte, after) = rest.split_first()?;
        rest = after;
        match byte {
            b'"' => return Some((name, rest)),
            b'\\' => {
                let (escape, after) = rest.split_first()?;
                rest = after;
                name.push(match escape {
                    b'a' => 7,
                    b'b' => 8,
                    b't' => b'\t',
                    b'n' => b'\n',
                    b'v' => 11,
                    b'f' => 12,
                    b'r' => b'\r',
                    b'\\' | b'"' => *escape,
                    b'0'..=b'3' => {
                        let (digits, after) = rest.split_at_checked(2)?;
                        rest = after;
                        digits.iter().try_fold(escape - b'0', |value, digit| {
                            matches!(digit, b'0'..=b'7').then(|| value * 8 + (digit - b'0'))
                        })?
                    }
                    _ => return None,
                });
            }
            byte => name.push(*byte),
        }
    }
}

/// Quotes a name for `unquote`. The result is UTF-8 without control characters.
pub(crate) fn quote(name: &[u8]) -> Vec<u8> {
    let mut out = vec![b'"'];
    let octal = |byte: u8| format!("\\{byte:03o}").into_bytes();
    for chunk in name.utf8_chunks() {
        for byte in chunk.valid().bytes() {
            match byte {
                b'"' | b'\\' => out.extend([b'\\', byte]),
                byte if byte.is_ascii_control() => out.extend(octal(byte)),
                byte => out.push(byte),
            }
        }
        out.extend(chunk.invalid().iter().flat_map(|byte| octal(*byte)));
    }
    out.push(b'"');
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn location(path: &str) -> Location {
        Location::parse(path.as_bytes()).expect("a location")
    }

    #[test]
    fn components_are_dropped_but_never_the_name() {
        for (name, count, expected) in [
            ("a/b/c", 0, "a/b/c"),
            ("a/b/c", 2, "c"),
            ("a/b/c", 9, "c"),
            ("a//b", 1, "b"),
            ("a/", 1, "a/"),
            ("zz", 1, "zz"),
            ("/p/x", 1, "/p/x"),
            ("/p/x", 2, "/p/x"),
        ] {
            assert_eq!(
                strip_components(name.as_bytes(), count),
                expected.as_bytes(),
                "{name} without {count}"
            );
        }
    }

    #[test]
    fn a_location_is_below_its_root_and_has_one_spelling() {
        for (name, expected) in [
            ("/a", "absolute"),
            ("..", "'..'"),
            ("a/../b", "'..'"),
            ("", "empty"),
            (".", "empty"),
            ("a/", "directory"),
            ("a\0b", "NUL"),
            (".GIT/x", ".git"),
            ("a/.git", ".git"),
        ] {
            assert!(
                Location::parse(name.as_bytes())
                    .expect_err(name)
                    .contains(expected),
                "{name}"
            );
        }
        assert_eq!(location("./a//b").as_bytes(), b"a/b");
        assert_eq!(location("a/b").parts(), [b"a", b"b"]);
        assert!(
            Location::parse(&[b'x'; MAX_PATH_BYTES]).is_ok()
                && Location::parse(&[b'x'; MAX_PATH_BYTES + 1]).is_err()
        );
    }

    proptest! {
        #[test]
        fn a_quoted_name_is_text_and_unquotes_to_the_name(name in any::<Vec<u8>>()) {
            let quoted = quote(&name);
            let text = std::str::from_utf8(&quoted).expect("UTF-8");
            prop_assert!(!text.bytes().any(|byte| byte.is_ascii_control()));
            prop_assert_eq!(unquote(&quoted), Some((name, &b""[..])));
        }

        #[test]
        fn ancestors_and_descendants_are_found(
            paths in proptest::collection::vec("[ab](/[ab-]){0,4}", 0..8),
            path in "[ab](/[ab-]){0,4}",
        ) {
            let all: Vec<Location> = paths.iter().map(|path| location(path)).collect();
            let path = location(&path);
            let set: Locations = all.iter().cloned().collect();
            let above = all
                .iter()
                .filter(|other| other.is_above(&path))
                .min_by_key(|other| other.as_bytes().len());
            prop_assert_eq!(set.above(&path), above);
            prop_assert_eq!(
                set.has_below(&path),
                all.iter().any(|other| path.is_above(other))
            );
            prop_assert_eq!(set.contains(&path), all.contains(&path));
        }
    }
}

//! One header block, in the three formats that are in use: V7, POSIX ustar, and GNU.

use crate::{BLOCK, Error, Kind};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderKind {
    Entry(Kind),
    /// pax records that describe the next entry.
    Records,
    /// pax records that describe all following entries.
    GlobalRecords,
    /// GNU: the content is the path of the next entry.
    LongPath,
    /// GNU: the content is the link target of the next entry.
    LongLink,
}

#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) kind: HeaderKind,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) size: u64,
    pub(crate) mode: u32,
    pub(crate) mtime: i64,
}

impl Header {
    pub(crate) fn parse(block: &[u8; BLOCK]) -> Result<Self, Error> {
        let sum = block
            .iter()
            .enumerate()
            .map(|(index, byte)| {
                // The checksum field itself counts as spaces.
                if (148..156).contains(&index) {
                    32
                } else {
                    u64::from(*byte)
                }
            })
            .sum::<u64>();
        if octal(&block[148..156]) != Some(sum) {
            return Err(Error::Archive(
                "has a header with a wrong checksum; is it a tar archive without compression?",
            ));
        }
        let has_prefix = match &block[257..265] {
            b"ustar\x0000" => true,
            b"ustar  \0" | [0, 0, 0, 0, 0, 0, 0, 0] => false,
            _ => {
                return Err(Error::Archive(
                    "has a header in an unknown format; ustar, GNU and V7 are supported",
                ));
            }
        };
        let name = until_nul(&block[..100]);
        let prefix = until_nul(&block[345..500]);
        let path = if has_prefix && !prefix.is_empty() {
            [prefix, b"/", name].concat()
        } else {
            name.to_vec()
        };
        let problem = |problem| Error::Entry {
            path: path.clone(),
            problem,
        };
        let kind = match block[156] {
            b'0' | b'7' | 0 => HeaderKind::Entry(Kind::File),
            b'1' => HeaderKind::Entry(Kind::HardLink),
            b'2' => HeaderKind::Entry(Kind::Symlink),
            b'3' | b'4' | b'6' => HeaderKind::Entry(Kind::Special),
            b'5' => HeaderKind::Entry(Kind::Directory),
            b'x' => HeaderKind::Records,
            b'g' => HeaderKind::GlobalRecords,
            b'L' => HeaderKind::LongPath,
            b'K' => HeaderKind::LongLink,
            b'S' => return Err(problem("is a sparse file; sparse files are not supported")),
            _ => return Err(problem("has an unknown type")),
        };
        let size = number(&block[124..136]).ok_or_else(|| problem("has an invalid size"))?;
        Ok(Self {
            kind,
            link: until_nul(&block[157..257]).to_vec(),
            size,
            mode: number(&block[100..108])
                .and_then(|mode| u32::try_from(mode).ok())
                .unwrap_or(0o644),
            mtime: number(&block[136..148])
                .and_then(|mtime| i64::try_from(mtime).ok())
                .unwrap_or(0),
            path,
        })
    }
}

/// A field up to its first NUL.
fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// An octal number, or GNU's binary form for values that octal digits can't hold.
fn number(field: &[u8]) -> Option<u64> {
    match field {
        [0x80, rest @ ..] => {
            let (high, low) = rest.split_at_checked(rest.len().checked_sub(8)?)?;
            if high.iter().any(|byte| *byte != 0) {
                return None;
            }
            Some(u64::from_be_bytes(low.try_into().ok()?))
        }
        _ => octal(field),
    }
}

/// Octal digits with optional leading spaces; only spaces and NULs may follow.
fn octal(field: &[u8]) -> Option<u64> {
    let start = field.iter().position(|byte| *byte != b' ')?;
    let digits = &field[start..];
    let end = digits
        .iter()
        .position(|byte| !matches!(byte, b'0'..=b'7'))
        .unwrap_or(digits.len());
    let (digits, rest) = digits.split_at(end);
    if digits.is_empty() || rest.iter().any(|byte| !matches!(byte, b' ' | 0)) {
        return None;
    }
    // Can't overflow: a field holds at most 12 digits of three bits each.
    Some(
        digits
            .iter()
            .fold(0, |value, digit| value * 8 + u64::from(digit - b'0')),
    )
}

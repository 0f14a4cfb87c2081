//! git's binary patches: a whole new content (`literal`), or a delta to the old one (`delta`), each
//! deflated and written in base 85.
//!
//! A section has a hunk for each direction; only the one that leads to the new content is kept.
//!
//! Invariants: a content is inflated piece by piece and never past its declared size, which is
//! bounded; a delta is applied only to the content that it was made for, known by its blob id.

use std::fmt;

use miniz_oxide::inflate::{
    TINFLStatus,
    core::{DecompressorOxide, decompress, inflate_flags::TINFL_FLAG_PARSE_ZLIB_HEADER},
};
use sha1::{Digest as _, Sha1};

use crate::{
    lines::{Error, Lines, error, trim},
    plan::MAX_FILE_BYTES,
};

/// The binary change of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary<'a> {
    /// `Binary files … differ`: the diff leaves the content out.
    Omitted,
    Hunk(BinaryHunk<'a>),
}

/// The content that a file gets, encoded.
#[derive(Clone, Copy, Debug)]
pub struct BinaryHunk<'a> {
    pub(crate) form: Form,
    /// The number of bytes that inflating produces.
    pub(crate) size: usize,
    /// Lines in base 85, all of them valid.
    pub(crate) encoded: &'a [u8],
    pub(crate) ids: Option<BlobIds>,
}

impl PartialEq for BinaryHunk<'_> {
    fn eq(&self, other: &Self) -> bool {
        // The lines may end in other ways.
        (self.form, self.size, self.ids) == (other.form, other.size, other.ids)
            && self.lines().eq(other.lines())
    }
}

impl Eq for BinaryHunk<'_> {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Literal,
    Delta,
}

/// git's ids of the old and new content; zero for a file that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobIds {
    pub(crate) old: BlobId,
    pub(crate) new: BlobId,
}

pub(crate) type BlobId = [u8; 20];

const ABSENT: BlobId = [0; 20];

impl BlobIds {
    /// Parses `<old>..<new>`. Returns `None` for abbreviated ids: they identify nothing for sure.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let (old, rest) = text.split_at_checked(40)?;
        let new = rest.strip_prefix(b"..")?;
        Some(Self {
            old: blob_id_of_hex(old)?,
            new: blob_id_of_hex(new)?,
        })
    }
}

impl fmt::Display for BlobIds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.old {
            write!(formatter, "{byte:02x}")?;
        }
        formatter.write_str("..")?;
        for byte in self.new {
            write!(formatter, "{byte:02x}")?;
        }
        Ok(())
    }
}

fn blob_id_of_hex(text: &[u8]) -> Option<BlobId> {
    let text: &[u8; 40] = text.try_into().ok()?;
    let mut id = ABSENT;
    for (byte, pair) in id.iter_mut().zip(text.chunks_exact(2)) {
        for digit in pair {
            let value = match digit {
                b'0'..=b'9' => digit - b'0',
                b'a'..=b'f' => digit - b'a' + 10,
                _ => return None,
            };
            *byte = *byte << 4 | value;
        }
    }
    Some(id)
}

/// git's id of a content.
fn blob_id(content: &[u8]) -> BlobId {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", content.len()));
    hash.update(content);
    hash.finalize().into()
}

/// Reads the hunks after a line `GIT binary patch`.
pub(crate) fn read_binary<'a>(
    lines: &mut Lines<'a>,
    ids: Option<BlobIds>,
) -> Result<BinaryHunk<'a>, Error> {
    let number = lines.number + 1;
    let Some(mut hunk) = read_hunk(lines)? else {
        return error(
            number,
            "a binary patch begins with 'literal' or 'delta' and a size",
        );
    };
    hunk.ids = ids;
    // The hunk of the other direction.
    read_hunk(lines)?;
    Ok(hunk)
}

fn read_hunk<'a>(lines: &mut Lines<'a>) -> Result<Option<BinaryHunk<'a>>, Error> {
    let header = lines.peek().map(trim).unwrap_or_default();
    let (form, size) = match (
        header.strip_prefix(b"literal "),
        header.strip_prefix(b"delta "),
    ) {
        (Some(size), _) => (Form::Literal, size),
        (_, Some(size)) => (Form::Delta, size),
        _ => return Ok(None),
    };
    lines.next();
    let Some(size) = number(size) else {
        return error(lines.number, "the size of the binary content is invalid");
    };
    if size > MAX_FILE_BYTES {
        return error(
            lines.number,
            &format!("the binary content has more than {MAX_FILE_BYTES} bytes"),
        );
    }
    let encoded = lines.rest;
    let mut length = 0;
    // An empty line ends the hunk. The end of the text does too: the size tells what is missing.
    while let Some(line) = lines.next() {
        let text = trim(line);
        if text.is_empty() {
            break;
        }
        if decode_line(text).is_none() {
            return error(lines.number, "the line is not valid base 85");
        }
        length += line.len();
    }
    if length == 0 {
        return error(lines.number, "the binary content is missing");
    }
    Ok(Some(BinaryHunk {
        form,
        size: usize::try_from(size).unwrap_or(usize::MAX),
        encoded: &encoded[..length],
        ids: None,
    }))
}

fn number(digits: &[u8]) -> Option<u64> {
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number
        .then(|| std::str::from_utf8(digits).ok()?.parse().ok())
        .flatten()
}

/// The bytes of one line, at most 52: a letter for their number, then groups of five digits for
/// four bytes each.
fn decode_line(text: &[u8]) -> Option<([u8; 52], usize)> {
    let (letter, digits) = text.split_first()?;
    let length = usize::from(match letter {
        b'A'..=b'Z' => letter - b'A' + 1,
        b'a'..=b'z' => letter - b'a' + 27,
        _ => return None,
    });
    if digits.len() != length.div_ceil(4) * 5 {
        return None;
    }
    let mut bytes = [0; 52];
    for (group, four) in digits.chunks_exact(5).zip(bytes.chunks_exact_mut(4)) {
        let mut value = 0_u64;
        for digit in group {
            value = value * 85 + u64::from(digit_value(*digit)?);
        }
        four.copy_from_slice(&u32::try_from(value).ok()?.to_be_bytes());
    }
    Some((bytes, length))
}

const fn digit_value(digit: u8) -> Option<u8> {
    const VALUES: [u8; 128] = {
        let digits = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";
        let mut values = [u8::MAX; 128];
        let mut value = 0;
        while value < 85 {
            values[digits[value as usize] as usize] = value;
            value += 1;
        }
        values
    };
    if digit >= 128 || VALUES[digit as usize] == u8::MAX {
        return None;
    }
    Some(VALUES[digit as usize])
}

impl<'a> BinaryHunk<'a> {
    /// The number of bytes that inflating the content produces.
    pub fn size(&self) -> usize {
        self.size
    }

    fn lines(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.encoded
            .split_inclusive(|byte| *byte == b'\n')
            .map(trim)
    }

    /// Calls `sink` with the pieces of the inflated bytes, at most `size` in total.
    fn inflate(&self, mut sink: impl FnMut(&[u8])) -> Result<(), &'static str> {
        const INVALID: &str = "the compressed content is invalid";
        const WINDOW: usize = 32 * 1024;
        let mut input = Vec::with_capacity(self.encoded.len() / 5 * 4);
        for line in self.lines() {
            let (bytes, length) = decode_line(line).ok_or(INVALID)?;
            input.extend_from_slice(&bytes[..length]);
        }
        let mut input = input.as_slice();
        let mut inflator = Box::new(DecompressorOxide::new());
        let mut window = vec![0; WINDOW];
        let (mut position, mut left) = (0, self.size);
        loop {
            let (status, read, written) = decompress(
                &mut inflator,
                input,
                &mut window,
                position,
                TINFL_FLAG_PARSE_ZLIB_HEADER,
            );
            input = &input[read..];
            left = left
                .checked_sub(written)
                .ok_or("the content is longer than the diff says")?;
            sink(&window[position..position + written]);
            position = (position + written) % WINDOW;
            match status {
                TINFLStatus::Done => break,
                TINFLStatus::HasMoreOutput => {}
                _ => return Err(INVALID),
            }
        }
        match (left, input) {
            (0, []) => Ok(()),
            (0, _) => Err("bytes follow the compressed content"),
            _ => Err("the content is shorter than the diff says"),
        }
    }

    fn inflated(&self) -> Result<Vec<u8>, &'static str> {
        let mut bytes = Vec::with_capacity(self.size);
        self.inflate(|piece| bytes.extend_from_slice(piece))?;
        Ok(bytes)
    }

    /// Calls `feed` with all bytes that are not from the old content. With `joined`, copies between
    /// them leave no trace; otherwise a line end stands for them. Invalid content is fed up to the
    /// place where it becomes invalid; it can't be applied.
    pub(crate) fn each_added(&self, joined: bool, mut feed: impl FnMut(&[u8])) {
        if self.form == Form::Literal {
            let _end = self.inflate(feed);
            return;
        }
        // Insertions are short, so a long one comes in pieces.
        let mut is_cut = false;
        self.each_step(|step| match step {
            DeltaStep::Insert(bytes) => {
                if is_cut && !joined {
                    feed(b"\n");
                }
                is_cut = false;
                feed(bytes);
            }
            DeltaStep::Copy { .. } => is_cut = true,
        });
    }

    /// Whether the new content mixes insertions with bytes of the old content.
    pub(crate) fn is_partial(&self) -> bool {
        let (mut inserts, mut copies) = (false, false);
        if self.form == Form::Delta {
            self.each_step(|step| match step {
                DeltaStep::Insert(_) => inserts = true,
                DeltaStep::Copy { .. } => copies = true,
            });
        }
        inserts && copies
    }

    /// Calls `take` with the steps of a delta, up to the place where it becomes invalid.
    fn each_step(&self, mut take: impl FnMut(DeltaStep<'_>)) {
        let mut delta = Vec::with_capacity(self.size);
        let _end = self.inflate(|piece| delta.extend_from_slice(piece));
        let Ok(delta) = Delta::parse(&delta) else {
            return;
        };
        for step in delta {
            match step {
                Ok(step) => take(step),
                Err(_) => return,
            }
        }
    }

    /// The new content, or the reason why there is none. `old` and `new` tell whether the file
    /// exists before and after the change.
    pub(crate) fn apply(&self, old: Option<&[u8]>, has_new: bool) -> Result<Vec<u8>, &'static str> {
        let id_of = |content: Option<&[u8]>| content.map_or(ABSENT, blob_id);
        if self.ids.is_some_and(|ids| ids.old != id_of(old)) {
            return Err("the file differs from the one the diff was made for");
        }
        let old = old.unwrap_or_default();
        let new = match (self.form, self.ids) {
            (Form::Literal, _) => self.inflated()?,
            (Form::Delta, None) => {
                return Err(
                    "a binary delta needs the ids of both contents ('index' with 40 digits each); \
                     make the diff with 'git diff --binary'",
                );
            }
            (Form::Delta, Some(_)) => Delta::parse(&self.inflated()?)?.apply(old)?,
        };
        let result = has_new.then_some(new.as_slice());
        if self.ids.is_some_and(|ids| ids.new != id_of(result)) {
            return Err("the result differs from the one the diff was made from");
        }
        Ok(new)
    }
}

/// A delta as in git's packs: the sizes of both contents, then copies from the old content and
/// insertions.
struct Delta<'a> {
    old_size: usize,
    new_size: usize,
    steps: &'a [u8],
}

enum DeltaStep<'a> {
    Copy { offset: usize, length: usize },
    Insert(&'a [u8]),
}

const INVALID_DELTA: &str = "the binary delta is invalid";

impl<'a> Delta<'a> {
    fn parse(mut bytes: &'a [u8]) -> Result<Self, &'static str> {
        let mut size = || {
            let mut value = 0_u64;
            for shift in (0..35).step_by(7) {
                let (byte, rest) = bytes.split_first().ok_or(INVALID_DELTA)?;
                bytes = rest;
                value |= u64::from(byte & 0x7f) << shift;
                if byte & 0x80 == 0 {
                    return if value > MAX_FILE_BYTES {
                        Err("the delta is of a file that is too large")
                    } else {
                        usize::try_from(value).map_err(|_| INVALID_DELTA)
                    };
                }
            }
            Err(INVALID_DELTA)
        };
        let (old_size, new_size) = (size()?, size()?);
        Ok(Self {
            old_size,
            new_size,
            steps: bytes,
        })
    }

    fn apply(self, old: &[u8]) -> Result<Vec<u8>, &'static str> {
        if self.old_size != old.len() {
            return Err(INVALID_DELTA);
        }
        let size = self.new_size;
        let mut new = Vec::with_capacity(size);
        for step in self {
            let bytes = match step? {
                DeltaStep::Copy { offset, length } => offset
                    .checked_add(length)
                    .and_then(|end| old.get(offset..end))
                    .ok_or(INVALID_DELTA)?,
                DeltaStep::Insert(bytes) => bytes,
            };
            if bytes.len() > size - new.len() {
                return Err(INVALID_DELTA);
            }
            new.extend_from_slice(bytes);
        }
        if new.len() == size {
            Ok(new)
        } else {
            Err(INVALID_DELTA)
        }
    }
}

impl<'a> Iterator for Delta<'a> {
    type Item = Result<DeltaStep<'a>, &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        let (operation, rest) = self.steps.split_first()?;
        self.steps = rest;
        let step = if operation & 0x80 != 0 {
            self.copy(*operation)
        } else {
            // Zero is reserved.
            self.steps
                .split_at_checked(usize::from(*operation))
                .filter(|(bytes, _)| !bytes.is_empty())
                .map(|(bytes, rest)| {
                    self.steps = rest;
                    DeltaStep::Insert(bytes)
                })
        };
        if step.is_none() {
            self.steps = &[];
        }
        Some(step.ok_or(INVALID_DELTA))
    }
}

impl Delta<'_> {
    /// A copy's operands: the bits of the operation tell which bytes of the offset and of the
    /// length follow; others are zero.
    fn copy(&mut self, operation: u8) -> Option<DeltaStep<'static>> {
        let mut operand = |bits: std::ops::Range<u8>| {
            let mut value = 0;
            for (index, bit) in bits.enumerate() {
                if operation & (1 << bit) != 0 {
                    let (byte, rest) = self.steps.split_first()?;
                    self.steps = rest;
                    value |= usize::from(*byte) << (8 * index);
                }
            }
            Some(value)
        };
        let (offset, length) = (operand(0..4)?, operand(4..7)?);
        let length = if length == 0 { 0x1_0000 } else { length };
        Some(DeltaStep::Copy { offset, length })
    }
}

#[cfg(test)]
mod tests;

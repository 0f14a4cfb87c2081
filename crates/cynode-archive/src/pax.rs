//! What extension headers say about the next entry.
//!
//! A POSIX record is `<length> <key>=<value>\n`. Its end is known by its length only: a value may contain newlines and text
//! that looks like another record.

use crate::Error;

#[derive(Debug, Default)]
pub(crate) struct Records {
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
    pub(crate) mtime: Option<i64>,
    /// Records were there, whatever they said.
    is_local: bool,
}

const NOT_VALID: Error = Error::Archive(
    "has an extension header that is not valid: a record is '<length> <key>=<value>' and a newline",
);
const NAMED_TWICE: Error = Error::Archive("names an entry twice before it begins");
const LINKED_TWICE: Error = Error::Archive("gives an entry two link targets");

impl Records {
    pub(crate) fn is_empty(&self) -> bool {
        !self.is_local && self.path.is_none() && self.link.is_none()
    }

    pub(crate) fn take_long_path(&mut self, value: Vec<u8>) -> Result<(), Error> {
        set(&mut self.path, long(value)?, NAMED_TWICE)
    }

    pub(crate) fn take_long_link(&mut self, value: Vec<u8>) -> Result<(), Error> {
        set(&mut self.link, long(value)?, LINKED_TWICE)
    }

    pub(crate) fn take_local(&mut self, records: &[u8]) -> Result<(), Error> {
        if std::mem::replace(&mut self.is_local, true) {
            return Err(Error::Archive(
                "has two extension headers of the same kind before one entry",
            ));
        }
        for_each(records, |key, value| match key {
            b"path" => set(&mut self.path, filled(value)?, NAMED_TWICE),
            b"linkpath" => set(&mut self.link, filled(value)?, LINKED_TWICE),
            b"size" => set(
                &mut self.size,
                decimal(value).ok_or(Error::Archive(
                    "has an extension header with a size that is not valid",
                ))?,
                NOT_VALID,
            ),
            b"mtime" => {
                self.mtime = seconds(value);
                Ok(())
            }
            // Names stay bytes here, so both of these mean the same.
            b"hdrcharset" if matches!(value, b"BINARY" | b"ISO-IR 10646 2000 UTF-8") => Ok(()),
            b"hdrcharset" => Err(Error::Archive("has names in an unknown character set")),
            _ if key.starts_with(b"GNU.sparse.") || key == b"SCHILY.realsize" => Err(
                Error::Archive("has a sparse file; sparse files are not supported"),
            ),
            _ => Ok(()),
        })
    }
}

/// Accepts a global header that changes nothing, such as the commit that `git archive` writes.
pub(crate) fn check_global(records: &[u8]) -> Result<(), Error> {
    for_each(records, |key, _| {
        if key == b"comment" {
            return Ok(());
        }
        Err(Error::Archive(
            "has a global extension header with more than a comment; write it without (GNU tar: --format=gnu)",
        ))
    })
}

fn set<T>(field: &mut Option<T>, value: T, twice: Error) -> Result<(), Error> {
    if field.replace(value).is_some() {
        Err(twice)
    } else {
        Ok(())
    }
}

/// A GNU name: it ends in NULs.
fn long(mut value: Vec<u8>) -> Result<Vec<u8>, Error> {
    let end = value
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(value.len());
    if end == 0 || value[end..].iter().any(|byte| *byte != 0) {
        return Err(Error::Archive(
            "has a long name that is empty or goes on after a NUL byte",
        ));
    }
    value.truncate(end);
    Ok(value)
}

/// A name in a record. An empty one would take back what came before.
fn filled(value: &[u8]) -> Result<Vec<u8>, Error> {
    if value.is_empty() || value.contains(&0) {
        return Err(Error::Archive(
            "has an extension header with a name that is empty or contains a NUL byte",
        ));
    }
    Ok(value.to_vec())
}

fn for_each(
    records: &[u8],
    mut take: impl FnMut(&[u8], &[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut rest = records;
    while !rest.is_empty() {
        let (record, after) = split(rest).ok_or(NOT_VALID)?;
        let equals = record
            .iter()
            .position(|byte| *byte == b'=')
            .filter(|equals| *equals > 0)
            .ok_or(NOT_VALID)?;
        take(&record[..equals], &record[equals + 1..])?;
        rest = after;
    }
    Ok(())
}

/// `<key>=<value>` of the first record, and what follows it.
fn split(records: &[u8]) -> Option<(&[u8], &[u8])> {
    // No length of a header within bounds has more digits.
    let space = records.iter().take(9).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(&records[..space])?).ok()?;
    let (record, after) = records.split_at_checked(length)?;
    Some((record.get(space + 1..)?.strip_suffix(b"\n")?, after))
}

/// Digits without a sign and without zeros in front.
fn decimal(text: &[u8]) -> Option<u64> {
    let is_plain =
        text.iter().all(u8::is_ascii_digit) && (text.len() == 1 || !text.starts_with(b"0"));
    if is_plain {
        std::str::from_utf8(text).ok()?.parse().ok()
    } else {
        None
    }
}

/// The whole seconds of a time.
fn seconds(value: &[u8]) -> Option<i64> {
    std::str::from_utf8(value)
        .ok()?
        .split('.')
        .next()?
        .parse()
        .ok()
}

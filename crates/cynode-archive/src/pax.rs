//! Extension headers, which override fields of the next entry.
//!
//! A pax record is `<length> <key>=<value>\n`. Only the length ends a record: a value may contain
//! newlines and text that looks like another record.

use crate::Error;

#[derive(Debug, Default)]
pub(crate) struct Records {
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
    pub(crate) mtime: Option<i64>,
    /// A pax extension header came before the entry, even if it set no field.
    is_local: bool,
}

const MALFORMED_RECORD: Error = Error::Archive(
    "has an invalid extension header: a record is '<length> <key>=<value>' and a newline",
);
const DUPLICATE_PATH: Error = Error::Archive("gives an entry two paths");
const DUPLICATE_LINK: Error = Error::Archive("gives an entry two link targets");

impl Records {
    pub(crate) fn is_empty(&self) -> bool {
        !self.is_local && self.path.is_none() && self.link.is_none()
    }

    pub(crate) fn take_long_path(&mut self, value: Vec<u8>) -> Result<(), Error> {
        set(&mut self.path, gnu_name(value)?, DUPLICATE_PATH)
    }

    pub(crate) fn take_long_link(&mut self, value: Vec<u8>) -> Result<(), Error> {
        set(&mut self.link, gnu_name(value)?, DUPLICATE_LINK)
    }

    pub(crate) fn take_local(&mut self, records: &[u8]) -> Result<(), Error> {
        if std::mem::replace(&mut self.is_local, true) {
            return Err(Error::Archive(
                "has two extension headers of the same kind before one entry",
            ));
        }
        for_each(records, |key, value| match key {
            b"path" => set(&mut self.path, name(value)?, DUPLICATE_PATH),
            b"linkpath" => set(&mut self.link, name(value)?, DUPLICATE_LINK),
            b"size" => set(
                &mut self.size,
                decimal(value).ok_or(Error::Archive(
                    "has an extension header with an invalid size",
                ))?,
                MALFORMED_RECORD,
            ),
            b"mtime" => {
                self.mtime = seconds(value);
                Ok(())
            }
            // Names stay raw bytes here, so both values mean the same.
            b"hdrcharset" if matches!(value, b"BINARY" | b"ISO-IR 10646 2000 UTF-8") => Ok(()),
            b"hdrcharset" => Err(Error::Archive("uses an unknown character set for names")),
            _ if key.starts_with(b"GNU.sparse.") || key == b"SCHILY.realsize" => Err(
                Error::Archive("has a sparse file; sparse files are not supported"),
            ),
            _ => Ok(()),
        })
    }
}

/// Accepts only a global header without effect, such as the commit id that `git archive` writes.
pub(crate) fn check_global(records: &[u8]) -> Result<(), Error> {
    for_each(records, |key, _| {
        if key == b"comment" {
            return Ok(());
        }
        Err(Error::Archive(
            "has a global extension header with more than a comment; write it without one (GNU \
             tar: --format=gnu)",
        ))
    })
}

fn set<T>(field: &mut Option<T>, value: T, duplicate: Error) -> Result<(), Error> {
    if field.replace(value).is_some() {
        Err(duplicate)
    } else {
        Ok(())
    }
}

/// A GNU long name, terminated by NULs.
fn gnu_name(mut value: Vec<u8>) -> Result<Vec<u8>, Error> {
    let end = value
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(value.len());
    if end == 0 || value[end..].iter().any(|byte| *byte != 0) {
        return Err(Error::Archive(
            "has a long name that is empty or continues after a NUL byte",
        ));
    }
    value.truncate(end);
    Ok(value)
}

/// A name from a record. An empty value is refused: POSIX lets it cancel an earlier record.
fn name(value: &[u8]) -> Result<Vec<u8>, Error> {
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
        let (record, after) = split(rest).ok_or(MALFORMED_RECORD)?;
        let equals = record
            .iter()
            .position(|byte| *byte == b'=')
            .filter(|equals| *equals > 0)
            .ok_or(MALFORMED_RECORD)?;
        take(&record[..equals], &record[equals + 1..])?;
        rest = after;
    }
    Ok(())
}

/// Splits off the `<key>=<value>` of the first record.
fn split(records: &[u8]) -> Option<(&[u8], &[u8])> {
    // `MAX_EXTENSION_BYTES` has seven digits; longer numbers are out of bounds anyway.
    let space = records.iter().take(9).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(&records[..space])?).ok()?;
    let (record, after) = records.split_at_checked(length)?;
    Some((record.get(space + 1..)?.strip_suffix(b"\n")?, after))
}

/// Decimal digits without sign or leading zeros.
fn decimal(text: &[u8]) -> Option<u64> {
    let is_plain =
        text.iter().all(u8::is_ascii_digit) && (text.len() == 1 || !text.starts_with(b"0"));
    if is_plain {
        std::str::from_utf8(text).ok()?.parse().ok()
    } else {
        None
    }
}

/// The time in whole seconds.
fn seconds(value: &[u8]) -> Option<i64> {
    std::str::from_utf8(value)
        .ok()?
        .split('.')
        .next()?
        .parse()
        .ok()
}

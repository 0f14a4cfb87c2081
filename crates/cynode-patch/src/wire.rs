//! The form in which the gate sends a parsed patch to the agent: a unified diff with one spelling
//! for everything, read by the parser of diffs.
//!
//! It begins with a line that names its version. Names are quoted and complete, counts are right,
//! nothing stands between sections, and two things exist that a diff can't say: a hunk that must fit
//! exactly one place, and a deletion of whatever a file contains. An agent that does not know them
//! refuses them; the rest it reads as any diff without leading components in its names.
//!
//! Invariant: reading what was written gives the same patch. [`Patch::to_wire`] checks that.

use crate::{
    binary::{Binary, Form},
    hunk::{Hunk, Place, Side, number, read_counted},
    lines::{Error, Lines, error, trim},
    name::{quote, unquote},
    parse::{Change, Patch, Reader, Section},
};

/// The version of this form. Workers and agents report the newest that they read.
pub const WIRE_VERSION: u32 = 1;
/// The first line.
const VERSION: &[u8] = b"cynode-patch 1\n";
/// Longest patch in this form. Quoting makes a diff longer.
pub const MAX_WIRE_BYTES: usize = 20 * 1024 * 1024;
/// A header line: the file is deleted whatever it contains.
pub(crate) const ANY_CONTENT: &[u8] = b"deleted file any content";
const UNIQUE: &[u8] = b"@@ unique -";

impl<'a> Patch<'a> {
    /// Encodes the patch. Fails if the result is too long, or a name in it.
    pub fn to_wire(&self) -> Result<Vec<u8>, Error> {
        let mut out = VERSION.to_vec();
        for section in &self.sections {
            write_section(&mut out, section);
            if out.len() > MAX_WIRE_BYTES {
                return Err(too_long());
            }
        }
        if Patch::from_wire(&out)? != *self {
            return Err(Error(
                "the patch can't be encoded; write it as a plain diff".to_owned(),
            ));
        }
        Ok(out)
    }

    /// Whether the encoded patch has parts that a reader of plain diffs refuses.
    pub fn needs_extensions(&self) -> bool {
        self.sections.iter().any(|section| {
            let is_unique = |hunk: &Hunk<'_>| matches!(hunk.place, Place::Unique { .. });
            section.any_content || section.hunks.iter().any(is_unique)
        })
    }

    /// Decodes a patch. Checks everything that parsing a diff checks.
    pub fn from_wire(wire: &'a [u8]) -> Result<Self, Error> {
        if wire.len() > MAX_WIRE_BYTES {
            return Err(too_long());
        }
        let Some(rest) = wire.strip_prefix(VERSION) else {
            return error(1, "the version of the encoded patch is unknown");
        };
        let lines = Lines { rest, number: 1 };
        Self::read(lines, 0, &mut Reader::Wire)
    }
}

fn too_long() -> Error {
    Error(format!(
        "the encoded patch has more than {MAX_WIRE_BYTES} bytes"
    ))
}

/// Reads a hunk, which has a line number or must be unique.
pub(crate) fn read_wire_hunk<'a>(lines: &mut Lines<'a>) -> Result<Hunk<'a>, Error> {
    let header = lines.peek().unwrap_or_default();
    if !header.starts_with(UNIQUE) {
        return crate::hunk::read_hunk(lines);
    }
    lines.next();
    let Some((place, old, new)) = parse_unique(trim(header)) else {
        return error(lines.number, "the header of the unique hunk is invalid");
    };
    read_counted(lines, place, old, new)
}

fn parse_unique(header: &[u8]) -> Option<(Place, usize, usize)> {
    let count = |text: &mut &[u8]| {
        let (digits, rest) = text.split_at(text.iter().take_while(|b| b.is_ascii_digit()).count());
        *text = rest;
        number(std::str::from_utf8(digits).ok()?)
    };
    let mut text = header.strip_prefix(UNIQUE)?;
    let old = count(&mut text)?;
    text = text.strip_prefix(b" +")?;
    let new = count(&mut text)?;
    let at_end = text.starts_with(b" end ");
    text = text.strip_prefix(b" end").unwrap_or(text);
    let mut after = Vec::new();
    while text.starts_with(b" \"") && after.len() < crate::begin_patch::MAX_ANCHORS {
        let (anchor, rest) = unquote(&text[1..])?;
        after.push(anchor);
        text = rest;
    }
    (text == b" @@").then_some((Place::Unique { after, at_end }, old, new))
}

fn write_section(out: &mut Vec<u8>, section: &Section<'_>) {
    let end: &[u8] = if section.crlf { b"\r\n" } else { b"\n" };
    let name =
        |name: Option<&Vec<u8>>| name.map_or_else(|| b"/dev/null".to_vec(), |name| quote(name));
    let (old, new) = (section.old.as_ref(), section.new.as_ref());
    let mut line = |parts: &[&[u8]]| {
        for part in parts {
            out.extend_from_slice(part);
        }
        out.extend_from_slice(end);
    };
    let is_plain = section.old_mode.is_none()
        && section.new_mode.is_none()
        && matches!(
            section.change,
            Change::Create | Change::Modify | Change::Delete
        )
        && !section.hunks.is_empty();
    if !is_plain {
        line(&[b"diff --git ", &name(old.or(new)), b" ", &name(new.or(old))]);
        write_git_header(&mut line, section);
    }
    if !section.hunks.is_empty() {
        line(&[b"--- ", &name(old)]);
        line(&[b"+++ ", &name(new)]);
    }
    for hunk in &section.hunks {
        write_hunk(out, hunk);
    }
    match &section.binary {
        None => {}
        Some(Binary::Omitted) => out.extend_from_slice(b"Binary files differ\n"),
        Some(Binary::Hunk(hunk)) => {
            let form = match hunk.form {
                Form::Literal => "literal",
                Form::Delta => "delta",
            };
            out.extend(format!("GIT binary patch\n{form} {}\n", hunk.size).bytes());
            write_lines(out, hunk.encoded);
            out.push(b'\n');
        }
    }
}

fn write_git_header(line: &mut impl FnMut(&[&[u8]]), section: &Section<'_>) {
    let octal = |mode: u32| format!("{mode:06o}").into_bytes();
    let name = |name: Option<&Vec<u8>>| name.map_or_else(Vec::new, |name| quote(name));
    for (change, from, to) in [
        (Change::Rename, &b"rename from "[..], &b"rename to "[..]),
        (Change::Copy, b"copy from ", b"copy to "),
    ] {
        if section.change == change {
            line(&[from, &name(section.old.as_ref())]);
            line(&[to, &name(section.new.as_ref())]);
        }
    }
    if section.any_content {
        line(&[ANY_CONTENT]);
    }
    let mut index_mode = None;
    match (section.change, section.old_mode, section.new_mode) {
        (Change::Create, old, Some(new)) => {
            line(&[b"new file mode ", &octal(new)]);
            index_mode = old;
        }
        (Change::Delete, Some(old), None) => line(&[b"deleted file mode ", &octal(old)]),
        (_, old, Some(new)) => {
            if let Some(old) = old {
                line(&[b"old mode ", &octal(old)]);
            }
            line(&[b"new mode ", &octal(new)]);
        }
        (_, old, None) => index_mode = old,
    }
    let ids = match &section.binary {
        Some(Binary::Hunk(hunk)) => hunk.ids,
        _ => None,
    };
    let ids = ids.map(|ids| ids.to_string());
    match (ids, index_mode) {
        (None, None) => {}
        (ids, mode) => {
            let ids = ids.unwrap_or_else(|| "0..0".to_owned());
            let mode = mode.map_or_else(Vec::new, |mode| [b" ", &octal(mode)[..]].concat());
            line(&[b"index ", ids.as_bytes(), &mode]);
        }
    }
}

fn write_hunk(out: &mut Vec<u8>, hunk: &Hunk<'_>) {
    let old = hunk.old_count;
    let new = hunk
        .lines(false)
        .filter(|line| line.side != Side::Old)
        .count();
    match &hunk.place {
        Place::Line(line) => out.extend(format!("@@ -{line},{old} +{line},{new} @@\n").bytes()),
        Place::Unique { after, at_end } => {
            out.extend_from_slice(UNIQUE);
            out.extend(format!("{old} +{new}").bytes());
            if *at_end {
                out.extend_from_slice(b" end");
            }
            for anchor in after {
                out.push(b' ');
                out.extend_from_slice(&quote(anchor));
            }
            out.extend_from_slice(b" @@\n");
        }
    }
    write_lines(out, hunk.body);
}

/// Writes lines of which the last may lack its newline.
fn write_lines(out: &mut Vec<u8>, lines: &[u8]) {
    out.extend_from_slice(lines);
    if !lines.ends_with(b"\n") {
        out.push(b'\n');
    }
}

#[cfg(test)]
mod tests;

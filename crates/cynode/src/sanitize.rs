//! What a sandbox wrote, made safe to show on a terminal.
//!
//! Control characters other than newline and tab are shown escaped: a sandbox must not be able to move the cursor, set
//! the title, or make the terminal answer. Bytes that are not UTF-8 are shown as `\xNN`: a terminal in an 8-bit mode
//! reads 0x9b as a control sequence. What comes out does not depend on where the bytes were split.

use std::fmt::Write as _;

/// The longest UTF-8 character.
const LONGEST: usize = 4;

/// Escapes a stream of bytes that comes in pieces.
#[derive(Debug, Default)]
pub struct Sanitizer {
    /// The beginning of a character whose rest has not come yet.
    pending: Vec<u8>,
}

impl Sanitizer {
    /// Takes the next bytes and appends what can be shown.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut joined;
        let mut rest = bytes;
        if !self.pending.is_empty() {
            joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            rest = &joined;
        }
        for chunk in rest.utf8_chunks() {
            text(chunk.valid(), out);
            let invalid = chunk.invalid();
            // At the very end it may be only cut short.
            let at_end = !invalid.is_empty() && std::ptr::eq(invalid.as_ptr_range().end, rest.as_ptr_range().end);
            if at_end && may_go_on(invalid) {
                self.pending = invalid.to_vec();
            } else {
                raw(invalid, out);
            }
        }
    }

    /// There will be no more: shows what is left.
    pub fn finish(&mut self, out: &mut String) {
        raw(&std::mem::take(&mut self.pending), out);
    }
}

/// One line of text that may hold names a sandbox chose.
#[must_use]
pub fn line(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    text(value, &mut out);
    out.replace('\n', "\\n").replace('\t', " ")
}

fn text(valid: &str, out: &mut String) {
    for character in valid.chars() {
        match character {
            '\n' | '\t' => out.push(character),
            '\r' => out.push_str("\\r"),
            '\0'..='\x1f' | '\x7f' => raw(&[character as u8], out),
            // The C1 controls: a terminal takes them for ESC and a letter.
            '\u{80}'..='\u{9f}' => escape(format_args!("\\u{{{:x}}}", u32::from(character)), out),
            _ => out.push(character),
        }
    }
}

fn raw(bytes: &[u8], out: &mut String) {
    for byte in bytes {
        escape(format_args!("\\x{byte:02x}"), out);
    }
}

fn escape(arguments: std::fmt::Arguments<'_>, out: &mut String) {
    out.write_fmt(arguments).expect("writing to a string does not fail");
}

/// Whether more bytes could make this a character.
fn may_go_on(bytes: &[u8]) -> bool {
    bytes.len() < LONGEST && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(pieces: &[&[u8]]) -> String {
        let mut sanitizer = Sanitizer::default();
        let mut out = String::new();
        for piece in pieces {
            sanitizer.push(piece, &mut out);
        }
        sanitizer.finish(&mut out);
        out
    }

    #[test]
    fn text_newlines_and_tabs_pass() {
        assert_eq!(shown(&["héllo\t✓\n日本".as_bytes()]), "héllo\t✓\n日本");
    }

    #[test]
    fn controls_are_shown_escaped() {
        assert_eq!(shown(&[b"\x1b[2J\x07\rx\x7f\0\x08"]), "\\x1b[2J\\x07\\rx\\x7f\\x00\\x08");
        assert_eq!(shown(&["\u{9b}31m\u{85}".as_bytes()]), "\\u{9b}31m\\u{85}");
    }

    #[test]
    fn bytes_that_are_not_utf8_are_shown_as_hex() {
        assert_eq!(shown(&[b"a\xffb\x9bc\xc3"]), "a\\xffb\\x9bc\\xc3");
        assert_eq!(shown(&[b"\xc0\xaf\xed\xa0\x80"]), "\\xc0\\xaf\\xed\\xa0\\x80");
    }

    #[test]
    fn a_split_character_is_whole_again() {
        assert_eq!(shown(&[b"\xe2", b"\x9c", b"\x93"]), "✓");
        assert_eq!(shown(&[b"\xe2\x9c", b"x"]), "\\xe2\\x9cx");
        assert_eq!(shown(&[b"\xc2", b"\x9b"]), "\\u{9b}");
    }

    #[test]
    fn a_line_stays_one_line() {
        assert_eq!(line("a\nb\x1bc\td"), "a\\nb\\x1bc d");
    }

    proptest! {
        #[test]
        fn nothing_dangerous_comes_out_and_splits_do_not_matter(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"\x1b\xc2\x9b\xe2\x9c\x93\xf0\x9f\x98\x80\n\r".to_vec())], 0..120),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let whole = shown(&[&bytes]);
            prop_assert!(whole.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'), "{whole:?}");
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.sort_unstable();
            at.insert(0, 0);
            at.push(bytes.len());
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(shown(&pieces), whole);
        }
    }
}

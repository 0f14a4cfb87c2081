//! Makes untrusted text safe to show on a terminal.
//!
//! Control characters other than newline and tab are escaped: a sandbox must not be able to move
//! the cursor, set the title, or make the terminal respond. Invisible and reordering characters
//! (bidirectional controls, zero-width characters, tags) are escaped too: the reader must see what
//! the text contains. Bytes that are not UTF-8 are shown as `\xNN`: a terminal in an 8-bit mode
//! reads 0x9b as a control sequence. The result does not depend on how the bytes are split into
//! pieces.

use std::fmt::Write as _;

use cynode_audit::is_hidden;

/// Length of the longest UTF-8 character.
const LONGEST_CHAR_BYTES: usize = 4;

/// Escapes a stream of bytes that arrives in pieces.
#[derive(Debug, Default)]
pub struct Sanitizer {
    /// The start of a character whose remaining bytes have not arrived yet.
    pending: Vec<u8>,
    /// Whether a presentation selector may follow the last character.
    after_symbol: bool,
}

impl Sanitizer {
    /// Escapes the next bytes and appends the result.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut joined;
        let mut rest = bytes;
        if !self.pending.is_empty() {
            joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            rest = &joined;
        }
        for chunk in rest.utf8_chunks() {
            self.text(chunk.valid(), out);
            let invalid = chunk.invalid();
            // At the end of a piece the character may be incomplete.
            let at_end = !invalid.is_empty()
                && std::ptr::eq(invalid.as_ptr_range().end, rest.as_ptr_range().end);
            if at_end && may_be_incomplete(invalid) {
                self.pending = invalid.to_vec();
            } else if !invalid.is_empty() {
                self.after_symbol = false;
                raw(invalid, out);
            }
        }
    }

    /// Appends an incomplete character at the end of the stream.
    pub fn finish(&mut self, out: &mut String) {
        raw(&std::mem::take(&mut self.pending), out);
    }

    fn text(&mut self, valid: &str, out: &mut String) {
        for character in valid.chars() {
            let after_symbol = std::mem::replace(&mut self.after_symbol, is_symbol(character));
            match character {
                '\n' | '\t' => out.push(character),
                '\r' => out.push_str("\\r"),
                '\0'..='\x1f' | '\x7f' => raw(&[character as u8], out),
                // Only selects whether the preceding symbol is coloured, and is common in output.
                '\u{fe0e}' | '\u{fe0f}' if after_symbol => out.push(character),
                _ if is_hidden(character) => {
                    escape(format_args!("\\u{{{:x}}}", u32::from(character)), out);
                }
                _ => out.push(character),
            }
        }
    }
}

/// Escapes untrusted text to one line.
#[must_use]
pub fn line(value: &str) -> String {
    lines(value).replace('\n', "\\n").replace('\t', " ")
}

/// Escapes untrusted text of several lines.
#[must_use]
pub fn lines(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    Sanitizer::default().text(value, &mut out);
    out
}

/// Escapes hidden characters in a JSON document. Parsers read the same strings.
#[must_use]
pub fn json(document: String) -> String {
    // JSON is ASCII outside of strings, and serde escapes all controls below U+0020 in strings.
    if document.is_ascii() && !document.contains('\x7f') {
        return document;
    }
    let mut out = String::with_capacity(document.len());
    for character in document.chars() {
        if character == '\x7f' || is_hidden(character) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                escape(format_args!("\\u{unit:04x}"), &mut out);
            }
        } else {
            out.push(character);
        }
    }
    out
}

/// Whether a character has a coloured presentation.
const fn is_symbol(character: char) -> bool {
    matches!(character, '\u{2122}'..='\u{2bff}' | '\u{1f000}'..='\u{1faff}')
        || matches!(
            character,
            '\u{a9}'
                | '\u{ae}'
                | '\u{203c}'
                | '\u{2049}'
                | '\u{3030}'
                | '\u{303d}'
                | '\u{3297}'
                | '\u{3299}'
        )
}

fn raw(bytes: &[u8], out: &mut String) {
    for byte in bytes {
        escape(format_args!("\\x{byte:02x}"), out);
    }
}

fn escape(arguments: std::fmt::Arguments<'_>, out: &mut String) {
    out.write_fmt(arguments)
        .expect("writing to a string does not fail");
}

/// Whether more bytes could complete this character.
fn may_be_incomplete(bytes: &[u8]) -> bool {
    bytes.len() < LONGEST_CHAR_BYTES
        && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
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
    fn controls_are_escaped() {
        assert_eq!(
            shown(&[b"\x1b[2J\x07\rx\x7f\0\x08"]),
            "\\x1b[2J\\x07\\rx\\x7f\\x00\\x08"
        );
        assert_eq!(shown(&["\u{9b}31m\u{85}".as_bytes()]), "\\u{9b}31m\\u{85}");
    }

    #[test]
    fn invisible_characters_are_escaped() {
        // Bidirectional overrides, embeddings, isolates and marks; zero-width characters; fillers;
        // separators; tags; the soft hyphen.
        for hidden in "\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\
            \u{2066}\u{2067}\u{2068}\u{2069}\u{200e}\u{200f}\u{61c}\
            \u{200b}\u{200c}\u{200d}\u{2060}\u{2064}\u{feff}\u{ad}\u{34f}\
            \u{180e}\u{115f}\u{1160}\u{3164}\u{ffa0}\u{2028}\u{2029}\
            \u{fff9}\u{fffb}\u{fe00}\u{e0001}\u{e0041}\u{e007f}\u{e0100}\u{85}\u{9b}"
            .chars()
        {
            let shown = format!("a\\u{{{:x}}}b", u32::from(hidden));
            let text = format!("a{hidden}b");
            let streamed = super::tests::shown(&[text.as_bytes()]);
            assert_eq!([line(&text), lines(&text), streamed], [shown.as_str(); 3]);
        }
        assert_eq!(line("evil\u{202e}gpj.exe"), "evil\\u{202e}gpj.exe");
        // Neighbours of those ranges, letters of both directions, and spaces of any width pass.
        for text in [
            "\u{a0}\u{200a}\u{202f}\u{205f}\u{3000}",
            "שלום مرحبا",
            "é e\u{301}",
            "\u{2027}\u{2070}\u{fdff}\u{fffc}\u{fffd}",
            "⠀⠋",
        ] {
            assert_eq!(line(text), text);
        }
        // A presentation selector passes after a symbol and is escaped elsewhere.
        assert_eq!(
            lines("⚠\u{fe0f} ❤\u{fe0f} ©\u{fe0f} 🖥\u{fe0f}"),
            "⚠\u{fe0f} ❤\u{fe0f} ©\u{fe0f} 🖥\u{fe0f}"
        );
        assert_eq!(
            lines("a\u{fe0f} ⚠\u{fe0f}\u{fe0f}"),
            "a\\u{fe0f} ⚠\u{fe0f}\\u{fe0f}"
        );
        assert_eq!(shown(&["⚠".as_bytes(), "\u{fe0f}".as_bytes()]), "⚠\u{fe0f}");
        assert_eq!(
            shown(&["⚠".as_bytes(), b"\xff", "\u{fe0f}".as_bytes()]),
            "⚠\\xff\\u{fe0f}"
        );
    }

    #[test]
    fn json_stays_the_same_document() {
        let value = serde_json::json!({
            "na\u{202e}me": [
                "\u{200b}", "\u{9b}31m\u{1b}", "\u{7f}", "\u{e0041}", "é\u{fe0f}", "\\u202e",
                "plain ⚠",
            ],
            "n": 1,
        });
        for text in [
            value.to_string(),
            serde_json::to_string_pretty(&value).expect("text"),
        ] {
            let shown = json(text);
            assert!(
                !shown
                    .chars()
                    .any(|c| is_hidden(c) || (c.is_control() && c != '\n')),
                "{shown}"
            );
            assert!(
                shown.contains("na\\u202eme")
                    && shown.contains("\\udb40\\udc41")
                    && shown.contains("plain ⚠"),
                "{shown}"
            );
            assert_eq!(
                serde_json::from_str::<serde_json::Value>(&shown).expect("JSON"),
                value
            );
        }
    }

    #[test]
    fn bytes_that_are_not_utf8_are_shown_as_hex() {
        assert_eq!(shown(&[b"a\xffb\x9bc\xc3"]), "a\\xffb\\x9bc\\xc3");
        assert_eq!(
            shown(&[b"\xc0\xaf\xed\xa0\x80"]),
            "\\xc0\\xaf\\xed\\xa0\\x80"
        );
    }

    #[test]
    fn a_split_character_is_joined() {
        assert_eq!(shown(&[b"\xe2", b"\x9c", b"\x93"]), "✓");
        assert_eq!(shown(&[b"\xe2\x9c", b"x"]), "\\xe2\\x9cx");
        assert_eq!(shown(&[b"\xc2", b"\x9b"]), "\\u{9b}");
    }

    #[test]
    fn a_line_stays_one_line() {
        assert_eq!(line("a\nb\x1bc\td"), "a\\nb\\x1bc d");
    }

    /// Bytes of controls and of split or hidden characters.
    fn special_bytes() -> impl Strategy<Value = u8> {
        prop::sample::select(
            b"\x1b\xc2\x9b\xe2\x9c\x93\xf0\x9f\x98\x80\n\r\x80\xae\xef\xb8\x8f".to_vec(),
        )
    }

    proptest! {
        #[test]
        fn sanitized_output_is_safe_and_the_same_in_any_split(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), special_bytes()], 0..120),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let whole = shown(&[&bytes]);
            let is_safe = |c: char| {
                (!c.is_control() || c == '\n' || c == '\t')
                    && (!is_hidden(c) || c == '\u{fe0e}' || c == '\u{fe0f}')
            };
            prop_assert!(whole.chars().all(is_safe), "{whole:?}");
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.sort_unstable();
            at.insert(0, 0);
            at.push(bytes.len());
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(shown(&pieces), whole);
        }
    }
}

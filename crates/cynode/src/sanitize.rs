//! What others wrote, made safe to show on a terminal.
//!
//! Control characters other than newline and tab are shown escaped: a sandbox must not be able to move the cursor, set
//! the title, or make the terminal answer. So are characters that can't be seen or that change where others stand (bidirectional
//! controls, zero-width characters, tags): what is read must be what is there. Bytes that are not UTF-8 are shown as `\xNN`: a
//! terminal in an 8-bit mode reads 0x9b as a control sequence. What comes out does not depend on where the bytes were split.

use std::fmt::Write as _;

use cynode_audit::is_hidden;

/// The longest UTF-8 character.
const LONGEST: usize = 4;

/// Escapes a stream of bytes that comes in pieces.
#[derive(Debug, Default)]
pub struct Sanitizer {
    /// The beginning of a character whose rest has not come yet.
    pending: Vec<u8>,
    /// The last character was one that a presentation selector may follow.
    after_symbol: bool,
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
            self.text(chunk.valid(), out);
            let invalid = chunk.invalid();
            // At the very end it may be only cut short.
            let at_end = !invalid.is_empty()
                && std::ptr::eq(invalid.as_ptr_range().end, rest.as_ptr_range().end);
            if at_end && may_go_on(invalid) {
                self.pending = invalid.to_vec();
            } else if !invalid.is_empty() {
                self.after_symbol = false;
                raw(invalid, out);
            }
        }
    }

    /// There will be no more: shows what is left.
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
                // Says only whether the symbol before it is shown in colour; programs write it a lot.
                '\u{fe0e}' | '\u{fe0f}' if after_symbol => out.push(character),
                _ if is_hidden(character) => {
                    escape(format_args!("\\u{{{:x}}}", u32::from(character)), out)
                }
                _ => out.push(character),
            }
        }
    }
}

/// One line of text that may hold names that others chose.
#[must_use]
pub fn line(value: &str) -> String {
    lines(value).replace('\n', "\\n").replace('\t', " ")
}

/// Lines of text that may hold what others wrote.
#[must_use]
pub fn lines(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    Sanitizer::default().text(value, &mut out);
    out
}

/// The same JSON document in which nothing hidden stands as it is: a reader gets the same strings, a terminal shows the escapes.
#[must_use]
pub fn json(document: String) -> String {
    // Outside of strings JSON is ASCII, and inside serde has escaped all controls below U+0020.
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

/// Whether a character is one of those that have a form in colour.
const fn is_symbol(character: char) -> bool {
    matches!(character, '\u{a9}' | '\u{ae}' | '\u{203c}' | '\u{2049}' | '\u{2122}'..='\u{2bff}' | '\u{3030}' | '\u{303d}' | '\u{3297}' | '\u{3299}' | '\u{1f000}'..='\u{1faff}')
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

/// Whether more bytes could make this a character.
fn may_go_on(bytes: &[u8]) -> bool {
    bytes.len() < LONGEST
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
    fn controls_are_shown_escaped() {
        assert_eq!(
            shown(&[b"\x1b[2J\x07\rx\x7f\0\x08"]),
            "\\x1b[2J\\x07\\rx\\x7f\\x00\\x08"
        );
        assert_eq!(shown(&["\u{9b}31m\u{85}".as_bytes()]), "\\u{9b}31m\\u{85}");
    }

    #[test]
    fn what_can_not_be_seen_is_shown_escaped() {
        // Overrides, embeddings, isolates and marks of direction; zero-width characters; fillers; separators; tags; the soft hyphen.
        for hidden in "\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}\u{200e}\u{200f}\u{61c}\u{200b}\u{200c}\u{200d}\u{2060}\u{2064}\u{feff}\u{ad}\u{34f}\
            \u{180e}\u{115f}\u{1160}\u{3164}\u{ffa0}\u{2028}\u{2029}\u{fff9}\u{fffb}\u{fe00}\u{e0001}\u{e0041}\u{e007f}\u{e0100}\u{85}\u{9b}"
            .chars()
        {
            let shown = format!("a\\u{{{:x}}}b", u32::from(hidden));
            let text = format!("a{hidden}b");
            assert_eq!((line(&text), lines(&text), super::tests::shown(&[text.as_bytes()])), (shown.clone(), shown.clone(), shown));
        }
        assert_eq!(line("evil\u{202e}gpj.exe"), "evil\\u{202e}gpj.exe");
        // The neighbours of those ranges, letters of every direction, and spaces of every width are text.
        for text in [
            "\u{a0}\u{200a}\u{202f}\u{205f}\u{3000}",
            "שלום مرحبا",
            "é e\u{301}",
            "\u{2027}\u{2070}\u{fdff}\u{fffc}\u{fffd}",
            "⠀⠋",
        ] {
            assert_eq!(line(text), text);
        }
        // A selector of presentation is text after a symbol, and hidden anywhere else.
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
    fn json_is_the_same_document_with_nothing_hidden_in_it() {
        let value = serde_json::json!({"na\u{202e}me": ["\u{200b}", "\u{9b}31m\u{1b}", "\u{7f}", "\u{e0041}", "é\u{fe0f}", "\\u202e", "plain ⚠"], "n": 1});
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
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"\x1b\xc2\x9b\xe2\x9c\x93\xf0\x9f\x98\x80\n\r\x80\xae\xef\xb8\x8f".to_vec())], 0..120),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let whole = shown(&[&bytes]);
            prop_assert!(whole.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'), "{whole:?}");
            prop_assert!(whole.chars().all(|c| !is_hidden(c) || c == '\u{fe0e}' || c == '\u{fe0f}'), "{whole:?}");
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.sort_unstable();
            at.insert(0, 0);
            at.push(bytes.len());
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(shown(&pieces), whole);
        }
    }
}

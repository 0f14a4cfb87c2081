//! Text without terminal control, for models.
//!
//! Texts with one item per line must not let a sandbox forge lines: names are escaped like those
//! that the CLI prints ([`name`]), and the content of lines stays on them ([`line`]).

use std::{fmt::Write as _, iter::Peekable, str::Chars};

use cynode_audit::{escape_line, is_hidden};

/// Longer control strings are not skipped as a whole: they may never end.
const MAX_CONTROL_CHARS: usize = 1_024;

/// Removes escape sequences and control characters, except line ends and tabs. A carriage return
/// ends a line.
pub(super) fn text(raw: &str) -> String {
    let is_plain = |c: char| matches!(c, '\n' | '\t') || !c.is_control();
    if raw.chars().all(is_plain) {
        return raw.to_owned();
    }
    let mut plain = String::with_capacity(raw.len());
    let mut chars = raw.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => skip_escape(&mut chars),
            '\u{9b}' => skip_sequence(&mut chars),
            '\u{90}' | '\u{98}' | '\u{9d}' | '\u{9e}' | '\u{9f}' => skip_string(&mut chars),
            '\r' if chars.peek() != Some(&'\n') => plain.push('\n'),
            c if is_plain(c) => plain.push(c),
            _ => {}
        }
    }
    plain
}

/// A name from a sandbox, on one line. What can't be seen is escaped and not removed, since the
/// text names the file.
pub(super) fn name(raw: &str) -> String {
    escape_line(raw)
}

/// The content of one line, on one line.
pub(super) fn line(raw: &str) -> String {
    let content = raw.strip_suffix('\n').unwrap_or(raw);
    let content = content.strip_suffix('\r').unwrap_or(content);
    text(content)
        .replace('\n', "\\n")
        .replace('\u{2028}', "\\u{2028}")
        .replace('\u{2029}', "\\u{2029}")
}

/// Escapes hidden characters in a JSON document. Parsers read the same strings.
pub(super) fn json(document: String) -> String {
    let needs_escape = |c: char| c == '\u{7f}' || is_hidden(c);
    if !document.contains(needs_escape) {
        return document;
    }
    let mut escaped = String::with_capacity(document.len());
    for c in document.chars() {
        if needs_escape(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(escaped, "\\u{unit:04x}").expect("a String takes everything");
            }
        } else {
            escaped.push(c);
        }
    }
    escaped
}

fn skip_escape(chars: &mut Peekable<Chars<'_>>) {
    match chars.peek() {
        Some('[') => {
            chars.next();
            skip_sequence(chars);
        }
        Some(']' | 'P' | 'X' | '^' | '_') => {
            chars.next();
            skip_string(chars);
        }
        // Intermediate bytes, then one more: character sets and the like.
        Some(' '..='/') => {
            while chars.next_if(|c| matches!(c, ' '..='/')).is_some() {}
            chars.next_if(|c| !c.is_control());
        }
        Some('0'..='~') => drop(chars.next()),
        _ => {}
    }
}

/// Skips parameters and the final character of a control sequence.
fn skip_sequence(chars: &mut Peekable<Chars<'_>>) {
    for _ in 0..MAX_CONTROL_CHARS {
        if chars.next_if(|c| matches!(c, ' '..='?')).is_none() {
            break;
        }
    }
    chars.next_if(|c| matches!(c, '@'..='~'));
}

/// Skips a control string, if it ends on the same line.
fn skip_string(chars: &mut Peekable<Chars<'_>>) {
    let mut ahead = chars.clone();
    for _ in 0..MAX_CONTROL_CHARS {
        match ahead.next() {
            Some('\u{7}' | '\u{9c}') => {
                *chars = ahead;
                return;
            }
            Some('\u{1b}') if ahead.peek() == Some(&'\\') => {
                ahead.next();
                *chars = ahead;
                return;
            }
            Some('\n') | None => return,
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_and_control_characters_are_removed() {
        for (raw, expected) in [
            ("plain\ttext\n", "plain\ttext\n"),
            ("\u{1b}[1;31mred\u{1b}[0m", "red"),
            ("\u{1b}[38;2;1;2;3mx\u{1b}[?25l\u{1b}[2K", "x"),
            ("\u{1b}]0;title\u{7}a", "a"),
            ("\u{1b}]8;;https://x\u{1b}\\link\u{1b}]8;;\u{1b}\\", "link"),
            ("\u{1b}(Bb\u{1b}=c\u{1b}7d", "bcd"),
            ("\u{9b}31mc1", "c1"),
            ("a\u{0}b\u{8}c\u{7f}d\u{85}e", "abcde"),
            ("10%\r50%\rdone\r\n", "10%\n50%\ndone\n"),
            ("end\u{1b}", "end"),
            ("end\u{1b}[", "end"),
        ] {
            assert_eq!(text(raw), expected, "{raw:?}");
        }
    }

    #[test]
    fn names_and_lines_stay_on_their_line() {
        for (raw, expected) in [
            ("src/main.rs", "src/main.rs"),
            ("x\nfake.txt 99", "x\\nfake.txt 99"),
            ("a\rb\tc", "a\\rb\\tc"),
            ("\u{1b}[31mred", "\\x1b[31mred"),
            ("safe\u{202e}txt.exe", "safe\\u{202e}txt.exe"),
            ("a\u{2028}b\u{200b}", "a\\u{2028}b\\u{200b}"),
        ] {
            assert_eq!(name(raw), expected, "{raw:?}");
        }
        for (raw, expected) in [
            ("let x = 1;\r\n", "let x = 1;"),
            ("one\rfake.txt:2: two\n", "one\\nfake.txt:2: two"),
            ("a\u{2028}b\u{1b}[0m", "a\\u{2028}b"),
        ] {
            assert_eq!(line(raw), expected, "{raw:?}");
        }
        let document = serde_json::json!({"path": "a\u{202e}b\u{e0041}\n"});
        let shown = json(document.to_string());
        assert_eq!(shown, r#"{"path":"a\u202eb\udb40\udc41\n"}"#);
        let read: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
        assert_eq!(read, document);
    }

    #[test]
    fn a_control_string_without_an_end_hides_no_text() {
        assert_eq!(text("\u{1b}]0;never ends\nnext"), "0;never ends\nnext");
        let long = format!("\u{1b}P{}", "x".repeat(MAX_CONTROL_CHARS * 2));
        assert_eq!(text(&long).len(), MAX_CONTROL_CHARS * 2);
    }
}

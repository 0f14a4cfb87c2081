//! Shortens texts of JSON documents to a size that they take as JSON.

use serde_json::Value;

/// The size of a value as JSON.
pub(crate) fn json_size(value: &Value) -> usize {
    struct Counter(usize);
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(0);
    // Counting can't fail.
    let _counted = serde_json::to_writer(&mut counter, value);
    counter.0
}

/// The size of a character in a JSON text, as this system writes it.
const fn escaped_size(character: char) -> usize {
    match character {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        _ => character.len_utf8(),
    }
}

/// The beginning of a text, with `keeps_end` also its end, in so many bytes of JSON.
pub(crate) fn cut(text: &str, room: usize, keeps_end: bool, is_base64: bool) -> String {
    let for_head = if keeps_end { room / 2 } else { room };
    if is_base64 {
        // Groups of four letters are decoded on their own.
        let head = text.floor_char_boundary(for_head / 4 * 4);
        let tail = if keeps_end { for_head / 4 * 4 } else { 0 };
        let tail = text.len().saturating_sub(tail).max(head);
        return [&text[..head], text.get(tail..).unwrap_or_default()].concat();
    }
    let fits = |characters: &mut dyn Iterator<Item = char>, room: usize| -> usize {
        let (mut used, mut bytes) = (0, 0);
        for character in characters {
            used += escaped_size(character);
            if used > room {
                break;
            }
            bytes += character.len_utf8();
        }
        bytes
    };
    let head = fits(&mut text.chars(), for_head);
    let tail = if keeps_end {
        fits(&mut text[head..].chars().rev(), for_head)
    } else {
        0
    };
    [&text[..head], &text[text.len() - tail..]].concat()
}

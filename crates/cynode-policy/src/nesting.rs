//! How deeply a text is nested, told before it is read.
//!
//! Cedar reads by recursion: a text of a few kilobytes could use up the stack and end the process, or be so deep that the validator
//! gives up and lets it pass. And for an `if` the validator may look at what follows twice, so that a few dozen of them within one
//! another would take it years. What is handed to Cedar is shallow enough for a thread's stack and for somebody who waits.

/// Brackets within one another.
const BRACKETS: usize = 32;
/// Signs of operators that apply to one another, those within brackets included. `&&` is two, and a bracket one.
const OPERATORS: usize = 300;
/// What one `if` counts for, so that there are few of them.
const IF: usize = 40;

/// What is between two brackets, as far as it was read.
#[derive(Default)]
struct Level {
    /// In the part since the last comma.
    operators: usize,
    /// Of what is in brackets in that part.
    inner: usize,
    /// Of the parts before it.
    parts: usize,
}

impl Level {
    fn end_part(&mut self) {
        self.parts = self.depth();
        self.operators = 0;
        self.inner = 0;
    }

    /// The first of a chain of operators lies deepest, so that what comes after a bracket counts as much as what came before it.
    fn depth(&self) -> usize {
        self.parts.max(self.operators + self.inner)
    }
}

/// The offset where a text gets too deep.
pub(crate) fn too_deep(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut levels = vec![Level::default()];
    let mut offset = 0;
    while let Some(byte) = bytes.get(offset) {
        let mut next = offset + 1;
        let level = levels.last_mut()?;
        match byte {
            b'"' => next = end_of_string(bytes, next),
            b'/' if bytes.get(next) == Some(&b'/') => next = end_of_line(bytes, next),
            b'(' | b'[' | b'{' => {
                level.operators += 1;
                levels.push(Level::default());
            }
            b')' | b']' | b'}' => {
                let depth = level.depth();
                // A bracket too many is Cedar's to tell.
                if levels.len() > 1 {
                    levels.pop();
                    let level = levels.last_mut()?;
                    level.inner = level.inner.max(depth);
                }
            }
            b',' | b';' => level.end_part(),
            b'&' | b'|' | b'+' | b'-' | b'*' | b'!' | b'.' => level.operators += 1,
            byte if byte.is_ascii_alphabetic() => {
                next = bytes[offset..]
                    .iter()
                    .position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_')
                    .map_or(bytes.len(), |length| offset + length);
                level.operators += match &bytes[offset..next] {
                    b"if" => IF,
                    b"when" | b"unless" => 1,
                    _ => 0,
                };
            }
            _ => {}
        }
        if levels.len() > BRACKETS || levels.last()?.depth() > OPERATORS {
            return Some(offset);
        }
        offset = next;
    }
    None
}

fn end_of_string(bytes: &[u8], mut offset: usize) -> usize {
    while let Some(byte) = bytes.get(offset) {
        match byte {
            b'"' => return offset + 1,
            b'\\' => offset += 2,
            _ => offset += 1,
        }
    }
    bytes.len()
}

fn end_of_line(bytes: &[u8], offset: usize) -> usize {
    bytes[offset..]
        .iter()
        .position(|byte| matches!(byte, b'\n' | b'\r'))
        .map_or(bytes.len(), |length| offset + length)
}

/// For whoever wrote it.
pub(crate) fn remedy() -> String {
    let ifs = OPERATORS / IF;
    format!(
        "nested too deeply: at most {BRACKETS} brackets or {ifs} ifs within one another, and {OPERATORS} signs of operators in one expression; make more rules of it, or use a set"
    )
}

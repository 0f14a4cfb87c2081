//! Bounds the nesting of a policy document before Cedar parses it.
//!
//! Cedar's parser recurses: a few kilobytes of text could overflow the stack and end the process,
//! or be so deep that the validator gives up and accepts it. The validator may also evaluate the
//! branches of an `if` twice, so a few dozen nested ones would take years. Documents that pass this
//! check fit a thread's stack and validate in reasonable time.

/// Nested brackets.
const MAX_BRACKETS: usize = 32;
/// Operator characters in one expression, including those in brackets. `&&` counts twice, a bracket
/// once.
const MAX_OPERATORS: usize = 300;
/// The number of operators that one `if` counts for.
const IF_COST: usize = 40;

/// The text between two brackets, up to the current position.
#[derive(Default)]
struct Level {
    /// Operators since the last comma.
    operators: usize,
    /// The deepest bracket since the last comma.
    inner: usize,
    /// The deepest part before the last comma.
    parts: usize,
}

impl Level {
    fn end_part(&mut self) {
        self.parts = self.depth();
        self.operators = 0;
        self.inner = 0;
    }

    /// The first operator of a chain is nested deepest, so operators after a bracket count like
    /// those before it.
    fn depth(&self) -> usize {
        self.parts.max(self.operators + self.inner)
    }
}

/// The offset at which a text is nested too deeply.
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
                // Cedar reports unbalanced brackets.
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
                    b"if" => IF_COST,
                    b"when" | b"unless" => 1,
                    _ => 0,
                };
            }
            _ => {}
        }
        if levels.len() > MAX_BRACKETS || levels.last()?.depth() > MAX_OPERATORS {
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

/// The message for the author.
pub(crate) fn remedy() -> String {
    let ifs = MAX_OPERATORS / IF_COST;
    format!(
        "nested too deeply: at most {MAX_BRACKETS} nested brackets or {ifs} nested ifs, and \
         {MAX_OPERATORS} operator characters in one expression; split the rule, or use a set"
    )
}

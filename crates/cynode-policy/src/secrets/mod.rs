//! What must not enter a sandbox: the system's own secrets, its tokens, and what looks like somebody's key.
//!
//! What must stay true: no secret is kept here, only keyed hashes of it; nothing that is answered holds any part of what was found;
//! a secret is found wherever it stands, however the bytes come in pieces. This keeps accidents out. Whoever means to carry a secret
//! in can always write it in a way that nobody looks for.
//!
//! Secrets that the system holds and its own tokens are refused everywhere. Tokens of others are known by their shape alone, and
//! samples of them stand in the tests of many a repository: `channels.rs` says where they are refused, flagged or ignored.

mod channels;
mod content;
mod encoded;
mod held;
mod places;
mod shapes;

use std::{fmt, sync::Arc};

use serde_json::Value;

pub use channels::{Channel, ShapeAction, ShapePolicy, ShapeSetting};
pub use content::ContentScan;
pub use held::Held;
use shapes::Shapes;

/// What was found. It says what it is, never what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// As in "a GitHub token": it is for a sentence that tells the caller.
    pub what: &'static str,
}

/// Looks for secrets. Cheap to clone.
#[derive(Clone)]
pub struct Scanner(Arc<Looked>);

struct Looked {
    held: Arc<Held>,
    shapes: Shapes,
}

/// Looks for secrets in a stream.
pub struct Watch {
    scanner: Scanner,
    /// The end of what has come, as much as a secret that is not yet whole can need.
    recent: Vec<u8>,
    /// Whether something came before `recent`.
    is_cut: bool,
}

/// How many bytes before a token tell whether a word begins there.
const BEFORE: usize = 6;
/// How much of a stream is looked at in one go: large enough to be quick, small enough to stay near the processor.
const PIECE: usize = 65_536;
/// How much of a member's name stands in a path.
const NAME: usize = 64;

impl Scanner {
    /// Tokens of this system are always looked for; with `shapes` those of well-known others, too.
    #[must_use]
    pub fn new(held: Held, shapes: bool) -> Self {
        Self(Arc::new(Looked {
            held: Arc::new(held),
            shapes: Shapes::new(shapes),
        }))
    }

    /// Looks for secrets that the system holds and for its own tokens, not for shapes of others.
    #[must_use]
    pub fn of_the_system(&self) -> Self {
        Self(Arc::new(Looked {
            held: Arc::clone(&self.0.held),
            shapes: Shapes::new(false),
        }))
    }

    #[must_use]
    pub fn find(&self, bytes: &[u8]) -> Option<Hit> {
        self.find_from(bytes, 0, true)
    }

    /// Looks through a request's body; what is found comes with its place, as in `env.TOKEN` or `argv[2]`. A name that holds a secret
    /// is itself not named: its place is `env.(name)`. Members whose names end in `_b64` are looked at decoded as well.
    #[must_use]
    pub fn find_in_json(&self, value: &Value) -> Option<(String, Hit)> {
        self.find_in_value(value, false)
            .map(|(place, hit)| (place.strip_prefix('.').unwrap_or(&place).to_owned(), hit))
    }

    /// Every place in a member of a request's body with the shape of somebody else's token. Names and `_b64` count as in `find_in_json`.
    pub fn each_shape_in_member(
        &self,
        name: &str,
        value: &Value,
        found: &mut dyn FnMut(&str, &'static str),
    ) {
        self.each_shape_in_named(name, value, "", &mut |place, shape| {
            found(place.strip_prefix('.').unwrap_or(place), shape)
        });
    }

    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch {
            scanner: self.clone(),
            recent: Vec::new(),
            is_cut: false,
        }
    }

    /// Shapes are looked for from an offset; what is before it only tells where words begin. `is_end`: what stands at the end of the
    /// bytes ends there.
    fn find_from(&self, bytes: &[u8], from: usize, is_end: bool) -> Option<Hit> {
        let what = self
            .0
            .held
            .find(bytes)
            .or_else(|| self.0.shapes.find(bytes, from, is_end))?;
        Some(Hit { what })
    }

    fn each_shape(&self, bytes: &[u8], found: &mut dyn FnMut(&'static str)) {
        self.0.shapes.each(bytes, 0, true, |shape| {
            if !shape.is_ours {
                found(shape.what);
            }
            true
        });
    }

    fn each_shape_in(
        &self,
        value: &Value,
        is_base64: bool,
        place: &str,
        found: &mut dyn FnMut(&str, &'static str),
    ) {
        match value {
            // No number has the shape of a token.
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
            Value::String(text) => {
                self.each_shape(text.as_bytes(), &mut |shape| found(place, shape));
                if let Some(decoded) = if is_base64 {
                    encoded::decode(text)
                } else {
                    None
                } {
                    self.each_shape(&decoded, &mut |shape| found(place, shape));
                }
            }
            Value::Array(values) => {
                for (index, value) in values.iter().enumerate() {
                    // The place of a long list is made only for what can hold something.
                    if !matches!(value, Value::String(text) if self.find_shape(text, is_base64).is_none())
                    {
                        self.each_shape_in(value, is_base64, &format!("{place}[{index}]"), found);
                    }
                }
            }
            Value::Object(members) => {
                for (name, value) in members {
                    self.each_shape_in_named(name, value, place, found);
                }
            }
        }
    }

    fn each_shape_in_named(
        &self,
        name: &str,
        value: &Value,
        place: &str,
        found: &mut dyn FnMut(&str, &'static str),
    ) {
        let mut holds_one = false;
        self.each_shape(name.as_bytes(), &mut |shape| {
            holds_one = true;
            found(&format!("{place}.(name)"), shape);
        });
        let shown = if holds_one {
            "(name)".to_owned()
        } else {
            name.chars().take(NAME).collect()
        };
        self.each_shape_in(
            value,
            name.ends_with("_b64"),
            &format!("{place}.{shown}"),
            found,
        );
    }

    fn find_shape(&self, text: &str, is_base64: bool) -> Option<&'static str> {
        let find = |bytes: &[u8]| self.0.shapes.find(bytes, 0, true);
        find(text.as_bytes()).or_else(|| {
            if is_base64 {
                find(&encoded::decode(text)?)
            } else {
                None
            }
        })
    }

    fn find_in_value(&self, value: &Value, is_base64: bool) -> Option<(String, Hit)> {
        match value {
            Value::Null | Value::Bool(_) => None,
            Value::Number(number) => {
                Some((String::new(), self.find(number.to_string().as_bytes())?))
            }
            Value::String(text) => {
                let decoded = || self.find(&encoded::decode(text)?);
                let hit = self
                    .find(text.as_bytes())
                    .or_else(|| if is_base64 { decoded() } else { None })?;
                Some((String::new(), hit))
            }
            Value::Array(values) => values.iter().enumerate().find_map(|(index, value)| {
                Some(under(
                    &format!("[{index}]"),
                    self.find_in_value(value, is_base64)?,
                ))
            }),
            Value::Object(members) => members.iter().find_map(|(name, value)| {
                if let Some(hit) = self.find(name.as_bytes()) {
                    return Some((".(name)".to_owned(), hit));
                }
                let found = self.find_in_value(value, name.ends_with("_b64"))?;
                Some(under(
                    &format!(".{}", name.chars().take(NAME).collect::<String>()),
                    found,
                ))
            }),
        }
    }
}

impl Watch {
    /// Looks at the next bytes together with those before them. Nobody can know here whether more will follow, so that a token which
    /// is whole at the end of these bytes counts, although the next ones could make it too long for one.
    pub fn feed(&mut self, bytes: &[u8]) -> Option<Hit> {
        let mut pieces = bytes.chunks(PIECE).peekable();
        while let Some(piece) = pieces.next() {
            self.recent.extend_from_slice(piece);
            let from = if self.is_cut { BEFORE } else { 0 };
            let hit = self
                .scanner
                .find_from(&self.recent, from, pieces.peek().is_none());
            let keep = BEFORE
                + self
                    .scanner
                    .0
                    .held
                    .longest()
                    .max(self.scanner.0.shapes.longest());
            if self.recent.len() > keep {
                self.recent.drain(..self.recent.len() - keep);
                self.is_cut = true;
            }
            if hit.is_some() {
                return hit;
            }
        }
        None
    }
}

impl fmt::Debug for Scanner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Scanner")
            .field("held", &self.0.held)
            .finish_non_exhaustive()
    }
}

/// Without the bytes, which may be of a secret.
impl fmt::Debug for Watch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Watch")
            .field("scanner", &self.scanner)
            .finish_non_exhaustive()
    }
}

fn under(parent: &str, (place, hit): (String, Hit)) -> (String, Hit) {
    (format!("{parent}{place}"), hit)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream can be long, and there can be many of them.
    #[test]
    fn a_watch_keeps_no_more_of_a_stream_than_a_secret_can_need() {
        let mut held = Held::new([7; 32]);
        assert!(held.add("a secret", &[b'x'; 1_000]));
        let scanner = Scanner::new(held, true);
        let mut watch = scanner.watch();
        for size in [1, 999, 5_000, PIECE, PIECE + 1, 3 * PIECE, 1] {
            assert_eq!(watch.feed(&vec![b'.'; size]), None);
            // Base64 of a thousand bytes is the longest form.
            assert!(
                watch.recent.len() <= BEFORE + 1_334,
                "{}",
                watch.recent.len()
            );
        }
        assert!(Scanner::new(Held::new([7; 32]), true).0.shapes.longest() < 400);
    }
}

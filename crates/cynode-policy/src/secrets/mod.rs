//! Detects secrets on their way into a sandbox: the system's own secrets and tokens, and text with
//! the shape of a well-known credential.
//!
//! Invariants: this module keeps keyed hashes of secrets, never the secrets; results contain no
//! part of a detected secret; detection doesn't depend on offsets or on how input is split into
//! chunks. It prevents accidents only: a determined caller can always encode a secret beyond
//! recognition.
//!
//! Held secrets and the system's own tokens are refused everywhere. Third-party tokens are
//! recognized by shape alone, and samples of them occur in the tests of many repositories:
//! `channels.rs` defines where they are refused, flagged or ignored.

mod channels;
mod content;
mod encoded;
mod held;
mod local;
mod paths;
mod shapes;

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use serde_json::Value;

pub use channels::{Channel, ShapeAction, ShapePolicy, ShapeSetting};
pub use content::{ContentScan, UNSCANNED};
pub use held::{HeldForm, HeldSecrets};
pub use local::{LocalScan, local_directory, local_file};
use shapes::Shapes;

/// A detected secret, without its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// A noun phrase for messages, as in "a GitHub token".
    pub what: &'static str,
}

/// Scans for secrets. Cheap to clone.
#[derive(Clone)]
pub struct Scanner(Arc<ScannerInner>);

struct ScannerInner {
    /// Replaced as a whole when secrets come or go; shared with the scanners made from this one.
    held: Arc<RwLock<Arc<HeldSecrets>>>,
    shapes: Shapes,
}

/// Scans a stream for secrets.
pub struct Watch {
    scanner: Scanner,
    /// The tail of the stream so far, long enough for an incomplete secret.
    recent: Vec<u8>,
    /// Whether bytes before `recent` were dropped.
    is_cut: bool,
}

/// The number of bytes before a token that determine whether a word begins there.
const WORD_CONTEXT_BYTES: usize = 6;
/// The chunk size of a scan: large enough to be fast, small enough for the CPU cache.
const SCAN_CHUNK_BYTES: usize = 65_536;
/// The length of a member's name in a reported path.
const MAX_NAME_CHARS: usize = 64;

impl Scanner {
    /// Always scans for tokens of this system; with `shapes`, also for those of well-known
    /// services.
    #[must_use]
    pub fn new(held: HeldSecrets, shapes: bool) -> Self {
        Self(Arc::new(ScannerInner {
            held: Arc::new(RwLock::new(Arc::new(held))),
            shapes: Shapes::new(shapes),
        }))
    }

    /// A scanner for held secrets and the system's own tokens only.
    #[must_use]
    pub fn system_only(&self) -> Self {
        Self(Arc::new(ScannerInner {
            held: Arc::clone(&self.0.held),
            shapes: Shapes::new(false),
        }))
    }

    /// Replaces the held secrets, also of the scanners that share them.
    pub fn hold(&self, held: HeldSecrets) {
        *self.0.held.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(held);
    }

    fn held(&self) -> Arc<HeldSecrets> {
        Arc::clone(&self.0.held.read().unwrap_or_else(PoisonError::into_inner))
    }

    #[must_use]
    pub fn find(&self, bytes: &[u8]) -> Option<Hit> {
        self.find_from(bytes, 0, true)
    }

    /// Scans a request's body. Returns the path of the hit, as in `env.TOKEN` or `argv[2]`. The
    /// path does not repeat a member's name that contains a secret: it is `env.(name)`. Members
    /// whose names end in `_b64` are also scanned decoded.
    #[must_use]
    pub fn find_in_json(&self, value: &Value) -> Option<(String, Hit)> {
        self.find_in_value(value, false)
            .map(|(place, hit)| (place.strip_prefix('.').unwrap_or(&place).to_owned(), hit))
    }

    /// Reports every path in a member of a request's body with the shape of a third-party token.
    /// Treats names and `_b64` like `find_in_json`.
    pub fn each_shape_in_member(
        &self,
        name: &str,
        value: &Value,
        found: &mut dyn FnMut(&str, &'static str),
    ) {
        self.each_shape_in_named(name, value, "", &mut |place, shape| {
            found(place.strip_prefix('.').unwrap_or(place), shape);
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

    /// Scans for shapes from an offset; earlier bytes only determine where words begin. With
    /// `is_end`, the end of the bytes ends a token.
    fn find_from(&self, bytes: &[u8], from: usize, is_end: bool) -> Option<Hit> {
        let what = self
            .held()
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
                    // Formats paths only for items that can have a hit: lists can be long.
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
        let mut name_has_shape = false;
        self.each_shape(name.as_bytes(), &mut |shape| {
            name_has_shape = true;
            found(&format!("{place}.(name)"), shape);
        });
        let shown = if name_has_shape {
            "(name)".to_owned()
        } else {
            name.chars().take(MAX_NAME_CHARS).collect()
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
                Some(with_parent(
                    &format!("[{index}]"),
                    self.find_in_value(value, is_base64)?,
                ))
            }),
            Value::Object(members) => members.iter().find_map(|(name, value)| {
                if let Some(hit) = self.find(name.as_bytes()) {
                    return Some((".(name)".to_owned(), hit));
                }
                let found = self.find_in_value(value, name.ends_with("_b64"))?;
                Some(with_parent(
                    &format!(".{}", name.chars().take(MAX_NAME_CHARS).collect::<String>()),
                    found,
                ))
            }),
        }
    }
}

impl Watch {
    /// Scans the next bytes together with the ones before. The end of the stream is unknown here,
    /// so a token that is complete at the end of these bytes is a hit, although the next bytes
    /// could make it too long for one.
    pub fn feed(&mut self, bytes: &[u8]) -> Option<Hit> {
        let mut pieces = bytes.chunks(SCAN_CHUNK_BYTES).peekable();
        while let Some(piece) = pieces.next() {
            self.recent.extend_from_slice(piece);
            let from = if self.is_cut { WORD_CONTEXT_BYTES } else { 0 };
            let hit = self
                .scanner
                .find_from(&self.recent, from, pieces.peek().is_none());
            let keep = WORD_CONTEXT_BYTES
                + self
                    .scanner
                    .held()
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
            .field("held", &self.held())
            .finish_non_exhaustive()
    }
}

/// Omits the bytes: they may belong to a secret.
impl fmt::Debug for Watch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Watch")
            .field("scanner", &self.scanner)
            .finish_non_exhaustive()
    }
}

fn with_parent(parent: &str, (place, hit): (String, Hit)) -> (String, Hit) {
    (format!("{parent}{place}"), hit)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams can be long and numerous.
    #[test]
    fn the_memory_of_a_watch_is_bounded() {
        let mut held = HeldSecrets::new([7; 32]);
        assert!(held.add("a secret", &[b'x'; 1_000]));
        let scanner = Scanner::new(held, true);
        let mut watch = scanner.watch();
        for size in [
            1,
            999,
            5_000,
            SCAN_CHUNK_BYTES,
            SCAN_CHUNK_BYTES + 1,
            3 * SCAN_CHUNK_BYTES,
            1,
        ] {
            assert_eq!(watch.feed(&vec![b'.'; size]), None);
            // The base64 form of a thousand bytes is the longest.
            assert!(
                watch.recent.len() <= WORD_CONTEXT_BYTES + 1_334,
                "{}",
                watch.recent.len()
            );
        }
        assert!(
            Scanner::new(HeldSecrets::new([7; 32]), true)
                .0
                .shapes
                .longest()
                < 400
        );
    }
}

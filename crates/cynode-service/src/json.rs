//! Bounds of JSON texts, checked before parsing.
//!
//! A parsed value takes many times the memory of its text: ten million zeros are 10 MiB of text and
//! 400 MiB of values. The scan counts the nodes that a parser would create, in one pass and without
//! allocating. It does not validate the JSON; the parser does that afterwards.
//!
//! Invariant: a caller that parses more than `compute::INLINE_BYTES` holds a share of one budget
//! meanwhile, which bounds the parsed values of all callers together and is shared fairly among
//! them.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::{Body, Bytes, HttpBody};
use cynode_api::ErrorCode;
use hyper::body::{Frame, SizeHint};

use crate::{
    ApiError, compute,
    fair::{FairBudget, Share},
};

/// Values and member names in one text. Allows every argv that `execve` accepts: 2 MiB hold at most
/// 233,016 arguments.
pub const MAX_NODES: usize = 250_000;
/// Nesting of objects and lists.
pub const MAX_DEPTH: usize = 127;
/// Estimated memory of a parsed value beyond its text.
const NODE_BYTES: usize = 128;
/// Memory for all texts and values being parsed, in KiB.
const MAX_PARSING_KIB: usize = 64 * 1024;
/// The size of the pieces in which a buffered body is read.
const PIECE: usize = 64 * 1024;

static PARSING: FairBudget = FairBudget::new(MAX_PARSING_KIB);

/// Counts the nodes and the depth of a text that arrives in pieces.
#[derive(Clone, Debug)]
pub struct Scan {
    max_nodes: usize,
    separators: usize,
    depth: usize,
    deepest: usize,
    is_in_string: bool,
    is_escaped: bool,
}

impl Default for Scan {
    fn default() -> Self {
        Self::up_to(MAX_NODES)
    }
}

impl Scan {
    #[must_use]
    pub const fn up_to(max_nodes: usize) -> Self {
        Self {
            max_nodes,
            separators: 0,
            depth: 0,
            deepest: 0,
            is_in_string: false,
            is_escaped: false,
        }
    }

    /// Fails as soon as the text has too many nodes.
    pub fn feed(&mut self, piece: &[u8]) -> Result<(), ApiError> {
        let mut rest = piece;
        while !rest.is_empty() {
            if self.is_escaped {
                self.is_escaped = false;
                rest = &rest[1..];
                continue;
            }
            if self.is_in_string {
                let Some(at) = memchr::memchr2(b'"', b'\\', rest) else {
                    return Ok(());
                };
                self.is_in_string = rest[at] != b'"';
                self.is_escaped = rest[at] == b'\\';
                rest = &rest[at + 1..];
                continue;
            }
            let Some(at) = rest
                .iter()
                .position(|byte| matches!(byte, b'"' | b',' | b':' | b'[' | b'{' | b']' | b'}'))
            else {
                return Ok(());
            };
            match rest[at] {
                b'"' => self.is_in_string = true,
                b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                opening_or_separator => {
                    self.separators += 1;
                    self.depth += usize::from(matches!(opening_or_separator, b'[' | b'{'));
                    self.deepest = self.deepest.max(self.depth);
                }
            }
            if self.nodes() > self.max_nodes {
                return Err(ApiError::new(
                    ErrorCode::TooLarge,
                    format!(
                        "the body contains more than {} values and names",
                        self.max_nodes
                    ),
                ));
            }
            rest = &rest[at + 1..];
        }
        Ok(())
    }

    /// An upper bound of the nodes that a parser would create.
    #[must_use]
    pub const fn nodes(&self) -> usize {
        self.separators + 1
    }
}

/// Counts the nodes of a text; fails if there are too many.
pub fn count(text: &[u8]) -> Result<usize, ApiError> {
    let mut scan = Scan::default();
    scan.feed(text)?;
    Ok(scan.nodes())
}

/// Fails if a text has too many nodes or is nested too deeply.
pub fn check(text: &[u8]) -> Result<(), ApiError> {
    let mut scan = Scan::default();
    scan.feed(text)?;
    if scan.deepest > MAX_DEPTH {
        return Err(ApiError::invalid(format!(
            "the body is nested deeper than {MAX_DEPTH} levels"
        )));
    }
    Ok(())
}

/// A share of the parsing budget.
#[derive(Debug, Default)]
pub struct Room(#[expect(dead_code, reason = "held for its drop")] Option<Share>);

/// Waits for budget to parse a text of this size. Small texts need none: the number of requests in
/// flight bounds them.
pub async fn room(bytes: usize, nodes: usize) -> Room {
    if bytes <= compute::INLINE_BYTES {
        return Room::default();
    }
    let kib = (2 * bytes)
        .saturating_add(NODE_BYTES * nodes)
        .div_ceil(1024);
    Room(Some(PARSING.acquire(kib).await))
}

/// Marks a request whose body already holds its share of the budget.
#[derive(Clone, Copy, Debug)]
pub struct Reserved;

/// A buffered body that returns its share of the budget once it has been read.
pub fn body(bytes: Bytes, room: Room) -> Body {
    if bytes.len() <= PIECE {
        Body::from(bytes)
    } else {
        Body::new(Reading { bytes, _room: room })
    }
}

struct Reading {
    bytes: Bytes,
    _room: Room,
}

impl HttpBody for Reading {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let length = self.bytes.len().min(PIECE);
        Poll::Ready((length > 0).then(|| Ok(Frame::data(self.bytes.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> Option<String> {
        check(text.as_bytes())
            .err()
            .map(|error| error.into_problem().code)
    }

    #[test]
    fn a_body_may_have_the_maximum_of_values_and_no_more() {
        let list = |count: usize| format!("[{}0]", "0,".repeat(count - 1));
        // The list itself counts as a value too.
        assert_eq!(count(list(MAX_NODES - 1).as_bytes()).ok(), Some(MAX_NODES));
        assert_eq!(code(&list(MAX_NODES)).as_deref(), Some("too_large"));
        let names = |count: usize| format!("{{{}\"x\":0}}", "\"x\":0,".repeat(count - 1));
        assert_eq!(code(&names((MAX_NODES - 1) / 2)), None);
        assert_eq!(
            code(&names(MAX_NODES / 2 + 1)).as_deref(),
            Some("too_large")
        );
    }

    #[test]
    fn a_body_may_nest_as_deep_as_the_parser_and_no_deeper() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(code(&nested(MAX_DEPTH)), None);
        assert!(serde_json::from_str::<serde_json::Value>(&nested(MAX_DEPTH)).is_ok());
        assert_eq!(
            code(&nested(MAX_DEPTH + 1)).as_deref(),
            Some("invalid_request")
        );
        // Siblings do not add to the depth.
        assert_eq!(code(&format!("[{}0]", "[],".repeat(1_000))), None);
    }

    #[test]
    fn strings_are_not_counted_as_values_in_any_split() {
        let text = format!(
            r#"{{"a":"{}","b\"[":["\\",",[{{:"]}}"#,
            r#"[[[[,,,,::::\"{{{{\\"#.repeat(100_000)
        );
        assert_eq!(count(text.as_bytes()).ok(), Some(7));
        for size in [1, 2, 3, 7, 4_096] {
            let mut scan = Scan::default();
            for piece in text.as_bytes()[..text.len().min(20_000)]
                .chunks(size)
                .chain(text.as_bytes()[text.len().min(20_000)..].chunks(4_096))
            {
                scan.feed(piece).expect("within the bounds");
            }
            assert_eq!(scan.nodes(), 7, "{size}");
        }
    }

    #[test]
    fn the_count_is_at_least_that_of_the_parser() {
        fn nodes(value: &serde_json::Value) -> usize {
            1 + match value {
                serde_json::Value::Array(items) => items.iter().map(nodes).sum(),
                serde_json::Value::Object(members) => {
                    members.values().map(|member| 1 + nodes(member)).sum()
                }
                _ => 0,
            }
        }
        for text in [
            "0",
            "[]",
            "{}",
            "[0]",
            "[0,1]",
            r#"{"a":0}"#,
            r#"{"a":[{},{"b":[]}],"c":"d,e"}"#,
        ] {
            let value = serde_json::from_str(text).expect("JSON");
            assert!(
                count(text.as_bytes()).is_ok_and(|counted| counted >= nodes(&value)),
                "{text}"
            );
        }
    }

    #[tokio::test]
    async fn a_body_keeps_its_room_until_it_has_been_read() {
        let before = PARSING.free();
        let size = 3 * PIECE + 1;
        let body = body(Bytes::from(vec![b'x'; size]), room(size, 1).await);
        assert!(PARSING.free() < before);
        assert_eq!(body.size_hint().exact(), Some(size as u64));
        assert_eq!(
            axum::body::to_bytes(body, usize::MAX)
                .await
                .expect("bytes")
                .len(),
            size
        );
        assert_eq!(PARSING.free(), before);
    }
}

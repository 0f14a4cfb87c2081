//! Streams of OpenAI's API as clients expect them.
//!
//! The node asks every stream for its usage. A client that did not ask may take the first of the
//! `choices` of every chunk, and the chunk with the usage has none: it is left out.

use bytes::{Bytes, BytesMut};
use cynode_inference::limits::MAX_LINE_BYTES;
use memchr::memmem;

/// The longest end of an event.
const END_BYTES: usize = 4;

/// Leaves the chunk with the usage out of a stream of events.
#[derive(Debug, Default)]
pub(super) struct UsageFilter {
    /// The beginning of an event.
    pending: BytesMut,
    /// Passes the rest of an event that is too long to inspect.
    is_passing: bool,
}

impl UsageFilter {
    /// Takes the next bytes, and returns those that are to be sent.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Bytes {
        // The end of an event may be split.
        let mut from = self.pending.len().saturating_sub(END_BYTES - 1);
        self.pending.extend_from_slice(bytes);
        let mut out = BytesMut::new();
        while let Some(end) = event_end(&self.pending[from..]) {
            let event = self.pending.split_to(from + end);
            from = 0;
            if std::mem::take(&mut self.is_passing) || !is_usage(&event) {
                out.extend_from_slice(&event);
            }
        }
        if self.is_passing || self.pending.len() as u64 > MAX_LINE_BYTES {
            let keep = self.pending.len().min(END_BYTES - 1);
            let passed = self.pending.split_to(self.pending.len() - keep);
            out.extend_from_slice(&passed);
            self.is_passing = true;
        }
        out.freeze()
    }

    /// What is left at the end of the stream.
    pub(super) fn finish(self) -> Bytes {
        self.pending.freeze()
    }
}

/// The position behind the first event.
fn event_end(bytes: &[u8]) -> Option<usize> {
    let ends = [b"\n\n".as_slice(), b"\r\n\r\n", b"\r\r"];
    let found = ends.iter().filter_map(|end| {
        let at = memmem::find(bytes, end)?;
        Some(at + end.len())
    });
    found.min()
}

/// Whether an event is the chunk with the usage: no choices. In a text the quotes would be escaped.
fn is_usage(event: &[u8]) -> bool {
    let has = |part: &[u8]| memmem::find(event, part).is_some();
    has(b"\"usage\":") && (has(b"\"choices\":[]") || has(b"\"choices\": []"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: &str =
        "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"choices\\\":[]\"}}],\"usage\":null}\n\n";
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    fn filtered(stream: &str, size: usize) -> String {
        let mut filter = UsageFilter::default();
        let mut out = Vec::new();
        for piece in stream.as_bytes().chunks(size) {
            out.extend_from_slice(&filter.push(piece));
        }
        out.extend_from_slice(&filter.finish());
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn only_the_chunk_with_the_usage_is_left_out_in_any_split() {
        let stream = [CHUNK, CHUNK, USAGE, DONE].concat();
        let expected = [CHUNK, CHUNK, DONE].concat();
        for size in [1, 2, 3, 7, 50, 10_000] {
            assert_eq!(filtered(&stream, size), expected, "{size}");
            let windows = stream.replace('\n', "\r\n");
            assert_eq!(
                filtered(&windows, size),
                expected.replace('\n', "\r\n"),
                "{size}"
            );
        }
        assert_eq!(filtered("data: [DONE]", 4), "data: [DONE]");
    }

    #[test]
    fn an_event_passes_as_soon_as_it_is_whole_and_one_that_is_too_long_at_once() {
        let mut filter = UsageFilter::default();
        assert_eq!(filter.push(CHUNK.as_bytes()), CHUNK.as_bytes());
        let long = "x".repeat(usize::try_from(MAX_LINE_BYTES).expect("small") + 10);
        let passed = filter.push(long.as_bytes()).len();
        assert_eq!(passed, long.len() - 3);
        assert_eq!(filter.push(b"\n\n"), "xxx\n\n".as_bytes());
        assert_eq!(filter.push(USAGE.as_bytes()), Bytes::new());
    }
}

//! Bounds the output of steps by the limits of the job and of its result.

use std::cell::Cell;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{
    json_text_bytes,
    sba::{StepResult, StreamEncoding},
};
use serde_json::Value;

use crate::files::workspace::{Room, count_nodes};

/// Space for output and file contents in the JSON of a result: the largest output limit in base64,
/// and some room for text that escapes make longer than that.
const MAX_ENCODED_BYTES: usize = 22 * 1024 * 1024;
/// Space for other data of steps, such as lists of files, as JSON.
const MAX_STRUCTURED_BYTES: usize = 5 * 1024 * 1024;
/// Values and names in that data.
const MAX_STRUCTURED_NODES: usize = 350_000;

/// The remaining budget of the job, shared by all steps.
#[derive(Debug)]
pub(super) struct Budget {
    /// `max_output_bytes`.
    limit: u64,
    /// The remaining bytes of output and file contents.
    left: Cell<u64>,
    encoded_left: Cell<usize>,
    room: Cell<Room>,
}

/// Several streams in one encoding: text or base64.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Encoded<const N: usize> {
    pub(super) texts: [String; N],
    pub(super) encoding: StreamEncoding,
}

impl Budget {
    pub(super) const fn new(limit: u64) -> Self {
        Self {
            limit,
            left: Cell::new(limit),
            encoded_left: Cell::new(MAX_ENCODED_BYTES),
            room: Cell::new(Room {
                bytes: MAX_STRUCTURED_BYTES,
                nodes: MAX_STRUCTURED_NODES,
            }),
        }
    }

    pub(super) const fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) const fn left(&self) -> u64 {
        self.left.get()
    }

    pub(super) const fn room(&self) -> Room {
        self.room.get()
    }

    /// Takes up to `bytes` from the limit. Returns less if the limit is exceeded.
    pub(super) fn take(&self, bytes: usize) -> usize {
        let taken = self.left.get().min(bytes as u64);
        self.left.set(self.left.get() - taken);
        usize::try_from(taken).unwrap_or(bytes)
    }

    /// Encodes bytes that were taken from the limit. Uses base64 only if they are not UTF-8, or if
    /// escapes would make the text so long that the result lacks room for the rest of the limit.
    pub(super) fn encode<const N: usize>(&self, bytes: [Vec<u8>; N]) -> Encoded<N> {
        let reserved = base64_bytes(usize::try_from(self.left.get()).unwrap_or(usize::MAX));
        let room = self.encoded_left.get().saturating_sub(reserved);
        let text_bytes: Option<usize> = bytes
            .iter()
            .map(|bytes| std::str::from_utf8(bytes).ok().map(json_text_bytes))
            .sum();
        let (texts, encoding, used) = if let Some(used) = text_bytes.filter(|bytes| *bytes <= room)
        {
            (
                bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
                StreamEncoding::Utf8,
                used,
            )
        } else {
            let used = bytes.iter().map(|bytes| base64_bytes(bytes.len())).sum();
            let texts = bytes.map(|bytes| STANDARD.encode(bytes));
            (texts, StreamEncoding::Base64, used)
        };
        self.encoded_left
            .set(self.encoded_left.get().saturating_sub(used));
        Encoded { texts, encoding }
    }

    /// Whether there is room for what a step returns apart from output and content.
    pub(super) fn has_room_for(&self, value: &Value) -> bool {
        let room = self.room.get();
        value.to_string().len() <= room.bytes && count_nodes(value) <= room.nodes
    }

    /// Counts what a step returned apart from output and content.
    pub(super) fn take_structured(&self, value: &Value) {
        let room = self.room.get();
        self.room.set(Room {
            bytes: room.bytes.saturating_sub(value.to_string().len()),
            nodes: room.nodes.saturating_sub(count_nodes(value)),
        });
    }

    /// Subtracts the result of a step that an earlier runner finished.
    pub(super) fn count(&self, step: &StepResult) {
        let is_base64 = step.encoding == StreamEncoding::Base64;
        for text in [&step.stdout, &step.stderr].into_iter().flatten() {
            self.count_text(text, is_base64);
        }
        let Some(Value::Object(output)) = &step.output else {
            return;
        };
        for (name, value) in output {
            match (name.as_str(), value) {
                ("content", Value::String(text)) => self.count_text(text, false),
                ("content_b64", Value::String(text)) => self.count_text(text, true),
                _ => self.take_structured(value),
            }
        }
    }

    fn count_text(&self, text: &str, is_base64: bool) {
        let bytes = if is_base64 {
            STANDARD
                .decode(text)
                .map_or(text.len(), |bytes| bytes.len())
        } else {
            text.len()
        };
        self.take(bytes);
        let used = json_text_bytes(text);
        self.encoded_left
            .set(self.encoded_left.get().saturating_sub(used));
    }
}

/// The length in JSON of this many bytes in base64.
const fn base64_bytes(bytes: usize) -> usize {
    bytes.div_ceil(3).saturating_mul(4).saturating_add(24)
}

#[cfg(test)]
mod tests {
    use cynode_api::sba::{StepStatus, limits::MAX_OUTPUT_BYTES};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn encoded(budget: &Budget, bytes: &[u8]) -> (String, StreamEncoding) {
        assert_eq!(budget.take(bytes.len()), bytes.len());
        let Encoded {
            texts: [text],
            encoding,
        } = budget.encode([bytes.to_vec()]);
        (text, encoding)
    }

    #[test]
    fn a_limit_is_reached_exactly() {
        let budget = Budget::new(10);
        assert_eq!((budget.take(4), budget.left()), (4, 6));
        assert_eq!((budget.take(6), budget.left()), (6, 0));
        assert_eq!(budget.take(0), 0);
        assert_eq!(budget.take(1), 0);
        assert_eq!(Budget::new(10).take(11), 10);
    }

    #[test]
    fn streams_that_are_not_text_are_both_in_base64() {
        let budget = Budget::new(100);
        let streams = budget.encode([b"text".to_vec(), vec![0xff]]);
        assert_eq!(streams.texts, ["dGV4dA==", "/w=="]);
        assert_eq!(streams.encoding, StreamEncoding::Base64);
        let streams = budget.encode([b"text\0".to_vec(), Vec::new()]);
        assert_eq!(streams.texts, ["text\0", ""]);
    }

    #[test]
    fn the_largest_output_fits_into_a_result_whatever_it_is() {
        let limit = u64::try_from(MAX_OUTPUT_BYTES).expect("positive");
        for byte in [b'\x01', b'\n', b'x', 0xff] {
            let budget = Budget::new(limit);
            let mut length = 0;
            for size in [0, 1_000, 1 << 20, 5 << 20, 9 << 20] {
                length += json_text_bytes(&encoded(&budget, &vec![byte; size]).0);
                let (_, encoding) = encoded(&budget, b"short\n");
                assert!(size > 1 << 20 || encoding == StreamEncoding::Utf8);
            }
            assert!(length <= MAX_ENCODED_BYTES, "{byte}: {length}");
        }
    }

    #[test]
    fn finished_steps_count_as_if_they_had_just_run() {
        let step = StepResult {
            index: 0,
            id: None,
            kind: "read_file".to_owned(),
            status: StepStatus::Success,
            exit_code: None,
            stdout: Some("/w==".to_owned()),
            stderr: Some(String::new()),
            encoding: StreamEncoding::Base64,
            output: Some(json!({"content": "12345", "size": 5})),
            error: None,
            truncated: false,
            started_at: None,
            ended_at: None,
        };
        let budget = Budget::new(100);
        budget.count(&step);
        assert_eq!(budget.left(), 94);
        assert_eq!(budget.room().nodes, MAX_STRUCTURED_NODES - 1);
    }

    proptest! {
        #[test]
        fn encoded_output_stays_within_its_bound(
            sizes in proptest::collection::vec((0_usize..3_000_000, any::<u8>()), 0..12),
        ) {
            let budget = Budget::new(u64::try_from(MAX_OUTPUT_BYTES).expect("positive"));
            let mut length = 0;
            for (size, byte) in sizes {
                let size = budget.take(size);
                let Encoded { texts: [text], .. } = budget.encode([vec![byte; size]]);
                length += json_text_bytes(&text);
            }
            prop_assert!(length <= MAX_ENCODED_BYTES + 12 * 24, "{length}");
        }
    }
}

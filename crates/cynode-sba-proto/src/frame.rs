//! Frames: a 4-byte little-endian length of the rest, a 1-byte kind, and the payload.

use cynode_api::Stream;
use serde::Serialize;

const JSON: u8 = 1;
const STDOUT: u8 = 2;
const STDERR: u8 = 3;
const DATA: u8 = 4;
const END: u8 = 5;
const ACK: u8 = 6;

const HEADER_BYTES: usize = 5;
const OUTPUT_HEADER_BYTES: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A control message: a `Request` from the worker, a `Reply` from the agent.
    Json(Vec<u8>),
    /// A chunk of a command's output. `at_ms` is the agent's wall clock in milliseconds since 1970.
    Output {
        stream: Stream,
        seq: u64,
        at_ms: u64,
        data: Vec<u8>,
    },
    /// Bytes of standard input, of a file, or of a long body.
    Data(Vec<u8>),
    /// The end of `Data`.
    End,
    /// Acknowledges all output up to this sequence number. `u64::MAX` acknowledges the exit too.
    Ack(u64),
}

impl Frame {
    /// The acknowledgement of an exit.
    pub const ACK_EXIT: Self = Self::Ack(u64::MAX);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {size} bytes exceeds the limit of {limit}")]
    TooLarge { size: usize, limit: usize },
    #[error("a frame of unknown kind {0}")]
    UnknownKind(u8),
    #[error("a frame of kind {0} has the wrong length")]
    WrongLength(u8),
}

fn header(kind: u8, payload: usize, out: &mut Vec<u8>) {
    let length = u32::try_from(payload + 1).expect(
        "frames are far below 4 GiB: every caller's data is bounded by MAX_DATA or a message limit",
    );
    out.reserve(HEADER_BYTES + payload);
    out.extend_from_slice(&length.to_le_bytes());
    out.push(kind);
}

/// Appends a frame.
pub fn encode(frame: &Frame, out: &mut Vec<u8>) {
    match frame {
        Frame::Json(json) => {
            header(JSON, json.len(), out);
            out.extend_from_slice(json);
        }
        Frame::Output {
            stream,
            seq,
            at_ms,
            data,
        } => encode_output(*stream, *seq, *at_ms, data, out),
        Frame::Data(data) => encode_data(data, out),
        Frame::End => header(END, 0, out),
        Frame::Ack(seq) => {
            header(ACK, 8, out);
            out.extend_from_slice(&seq.to_le_bytes());
        }
    }
}

/// Appends an output frame from borrowed data.
pub fn encode_output(stream: Stream, seq: u64, at_ms: u64, data: &[u8], out: &mut Vec<u8>) {
    let kind = match stream {
        Stream::Stdout => STDOUT,
        Stream::Stderr => STDERR,
    };
    header(kind, OUTPUT_HEADER_BYTES + data.len(), out);
    out.extend_from_slice(&seq.to_le_bytes());
    out.extend_from_slice(&at_ms.to_le_bytes());
    out.extend_from_slice(data);
}

/// Appends a data frame from borrowed data.
pub fn encode_data(data: &[u8], out: &mut Vec<u8>) {
    header(DATA, data.len(), out);
    out.extend_from_slice(data);
}

/// Appends a control message.
pub fn encode_message(message: &impl Serialize, out: &mut Vec<u8>) {
    let json = serde_json::to_vec(message)
        .expect("control messages have string keys only, so they always serialize");
    header(JSON, json.len(), out);
    out.extend_from_slice(&json);
}

/// Decodes frames from a byte stream. After an error the frame boundary is lost, so close the
/// connection.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    limit: usize,
}

impl Decoder {
    /// `limit` is the largest accepted frame, kind and payload together.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            limit,
        }
    }

    /// The same bytes under another limit, for a connection that gets another purpose.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    pub fn extend(&mut self, bytes: &[u8]) {
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
        } else if self.start > 256 * 1024 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Whether the buffer holds an incomplete frame.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.start < self.buffer.len()
    }

    /// The next complete frame, if there is one.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = &self.buffer[self.start..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.limit {
            return Err(FrameError::TooLarge {
                size: length,
                limit: self.limit,
            });
        }
        if length == 0 {
            return Err(FrameError::WrongLength(0));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let (kind, payload) = (rest[0], &rest[1..length]);
        let frame = match kind {
            JSON => Frame::Json(payload.to_vec()),
            STDOUT | STDERR => {
                let (seq, rest) = payload
                    .split_first_chunk::<8>()
                    .ok_or(FrameError::WrongLength(kind))?;
                let (at_ms, data) = rest
                    .split_first_chunk::<8>()
                    .ok_or(FrameError::WrongLength(kind))?;
                Frame::Output {
                    stream: if kind == STDOUT {
                        Stream::Stdout
                    } else {
                        Stream::Stderr
                    },
                    seq: u64::from_le_bytes(*seq),
                    at_ms: u64::from_le_bytes(*at_ms),
                    data: data.to_vec(),
                }
            }
            DATA => Frame::Data(payload.to_vec()),
            END if payload.is_empty() => Frame::End,
            ACK => Frame::Ack(u64::from_le_bytes(
                payload
                    .try_into()
                    .map_err(|_| FrameError::WrongLength(kind))?,
            )),
            END => return Err(FrameError::WrongLength(kind)),
            unknown => return Err(FrameError::UnknownKind(unknown)),
        };
        self.start += 4 + length;
        if self.start == self.buffer.len() {
            // A large buffer must not stay allocated on an idle connection.
            if self.buffer.capacity() > 256 * 1024 {
                self.buffer = Vec::new();
            } else {
                self.buffer.clear();
            }
            self.start = 0;
        }
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_frame() -> impl Strategy<Value = Frame> {
        let data = proptest::collection::vec(any::<u8>(), 0..300);
        prop_oneof![
            data.clone().prop_map(Frame::Json),
            (any::<bool>(), any::<u64>(), any::<u64>(), data.clone()).prop_map(
                |(out, seq, at_ms, data)| Frame::Output {
                    stream: if out { Stream::Stdout } else { Stream::Stderr },
                    seq,
                    at_ms,
                    data
                }
            ),
            data.prop_map(Frame::Data),
            Just(Frame::End),
            any::<u64>().prop_map(Frame::Ack),
        ]
    }

    proptest! {
        #[test]
        fn frames_decode_in_any_split(
            frames in proptest::collection::vec(any_frame(), 0..20),
            cut in 1_usize..50,
        ) {
            let mut bytes = Vec::new();
            for frame in &frames {
                encode(frame, &mut bytes);
            }
            let mut decoder = Decoder::new(MAX);
            let mut seen = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.extend(piece);
                while let Some(frame) = decoder.next_frame().expect("valid frames") {
                    seen.push(frame);
                }
            }
            prop_assert_eq!(seen, frames);
            prop_assert!(!decoder.is_partial());
        }

        #[test]
        fn arbitrary_bytes_never_panic_nor_grow_past_the_limit(
            bytes in proptest::collection::vec(any::<u8>(), 0..2_000),
        ) {
            let mut decoder = Decoder::new(MAX);
            decoder.extend(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Large enough that consumed bytes are dropped from the buffer while frames are pending.
        #[test]
        fn a_decoder_that_lags_behind_keeps_its_position(
            sizes in proptest::collection::vec(0_usize..120_000, 1..10),
            piece in 1_000_usize..200_000,
            lag in 1_usize..4,
        ) {
            let frames: Vec<Frame> = (0_u8..)
                .zip(&sizes)
                .map(|(number, size)| Frame::Data(vec![number; *size]))
                .collect();
            let mut bytes = Vec::new();
            for frame in &frames {
                encode(frame, &mut bytes);
            }
            let mut decoder = Decoder::new(200_000);
            let mut seen = Vec::new();
            for (count, piece) in bytes.chunks(piece).enumerate() {
                decoder.extend(piece);
                if count % lag == 0
                    && let Some(frame) = decoder.next_frame().expect("valid frames")
                {
                    seen.push(frame);
                }
            }
            while let Some(frame) = decoder.next_frame().expect("valid frames") {
                seen.push(frame);
            }
            prop_assert!(seen == frames);
            prop_assert!(!decoder.is_partial());
        }
    }

    const MAX: usize = 1_024;

    #[test]
    fn a_new_limit_holds_for_bytes_that_came_before() {
        let mut bytes = Vec::new();
        for size in [10, 100] {
            encode(&Frame::Data(vec![0; size]), &mut bytes);
        }
        let mut decoder = Decoder::new(MAX);
        decoder.extend(&bytes);
        let mut decoder = decoder.with_limit(50);
        assert_eq!(decoder.next_frame(), Ok(Some(Frame::Data(vec![0; 10]))));
        let too_large = FrameError::TooLarge {
            size: 101,
            limit: 50,
        };
        assert_eq!(decoder.next_frame(), Err(too_large));
    }

    #[test]
    // invariant: bounded
    fn a_frame_over_the_limit_is_refused_by_its_header_alone() {
        let mut decoder = Decoder::new(MAX);
        decoder.extend(&u32::MAX.to_le_bytes());
        assert_eq!(
            decoder.next_frame(),
            Err(FrameError::TooLarge {
                size: u32::MAX as usize,
                limit: MAX
            })
        );
    }
}

//! The protocol between worker and agent, decoded by both ends.

use std::fmt::Debug;

use cynode_api::{ListResult, PatchResult, SearchResult};
use cynode_sba_proto::{
    Decoder, Frame, FrameError, MAX_AGENT_FRAME, MAX_WORKER_FRAME, Reply, Request, encode,
    encode_message,
};
use serde::{Serialize, de::DeserializeOwned};

use super::{fields, split};
use cynode_api::Stream;

/// The input of a worker: frames, replies, and the JSON of long bodies.
pub fn replies(input: &[u8]) {
    let mut body = Vec::new();
    for frame in frames(input, MAX_AGENT_FRAME) {
        match frame {
            Frame::Json(json) => message::<Reply>(&json),
            Frame::Data(data) => body.extend(data),
            Frame::End => {
                message::<ListResult>(&body);
                message::<SearchResult>(&body);
                message::<PatchResult>(&body);
                body.clear();
            }
            Frame::Output { .. } | Frame::Ack(_) => {}
        }
    }
}

/// The input of an agent: frames and requests.
pub fn requests(input: &[u8]) {
    for frame in frames(input, MAX_WORKER_FRAME) {
        if let Frame::Json(json) = frame {
            message::<Request>(&json);
        }
    }
}

/// How a byte stream ended for its reader.
#[derive(Debug, PartialEq, Eq)]
enum StreamEnd {
    /// After a whole frame.
    Whole,
    Partial,
    Refused(FrameError),
}

/// Decodes the frames of an input, and asserts that they don't depend on how the bytes are split.
fn frames(input: &[u8], limit: usize) -> Vec<Frame> {
    let (options, rest) = split(input);
    // The real limits are far above an input's size; small ones get exercised.
    let limit = match options >> 6 {
        0 => 64,
        1 => 700,
        _ => limit,
    };
    // Half of the inputs are raw frames, half are payloads for well-formed frames.
    let bytes = if options & 1 == 0 {
        rest.to_vec()
    } else {
        frames_of_payloads(rest)
    };

    let (expected, end, consumed) = reference_decode(&bytes, limit);
    let whole = decoded(std::iter::once(bytes.as_slice()), limit);
    assert_eq!(
        (&whole.0, &whole.1),
        (&expected, &end),
        "decoding at once differs from the reference"
    );
    let pieces = decoded(bytes.chunks(usize::from(options >> 1 & 31) + 1), limit);
    assert_eq!(
        (&pieces.0, &pieces.1),
        (&expected, &end),
        "decoding in pieces differs from the reference"
    );

    let mut again = Vec::new();
    for frame in &expected {
        encode(frame, &mut again);
    }
    assert!(
        again == bytes[..consumed],
        "frames are encoded differently than they were decoded"
    );
    expected
}

fn frames_of_payloads(payloads: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for payload in fields(payloads) {
        let frame = match payload {
            [] => Frame::End,
            [b'{', ..] => Frame::Json(payload.to_vec()),
            // The body of a long reply is an object too.
            [b' ', body @ ..] => Frame::Data(body.to_vec()),
            [stream, data @ ..] => Frame::Output {
                stream: if *stream & 1 == 0 {
                    Stream::Stdout
                } else {
                    Stream::Stderr
                },
                seq: u64::from(*stream),
                at_ms: 0,
                data: data.to_vec(),
            },
        };
        encode(&frame, &mut bytes);
    }
    bytes
}

fn decoded<'a>(pieces: impl Iterator<Item = &'a [u8]>, limit: usize) -> (Vec<Frame>, StreamEnd) {
    let mut decoder = Decoder::new(limit);
    let mut frames = Vec::new();
    for piece in pieces {
        decoder.extend(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, StreamEnd::Refused(error)),
            }
        }
    }
    let end = if decoder.is_partial() {
        StreamEnd::Partial
    } else {
        StreamEnd::Whole
    };
    (frames, end)
}

/// A minimal reference decoder for comparison. Also returns the length of the decoded frames.
fn reference_decode(bytes: &[u8], limit: usize) -> (Vec<Frame>, StreamEnd, usize) {
    let number = |bytes: &[u8]| {
        bytes
            .iter()
            .rev()
            .fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
    };
    let mut frames = Vec::new();
    let mut at = 0;
    loop {
        let rest = &bytes[at..];
        if rest.len() < 4 {
            return (
                frames,
                if rest.is_empty() {
                    StreamEnd::Whole
                } else {
                    StreamEnd::Partial
                },
                at,
            );
        }
        let length = usize::try_from(number(&rest[..4])).expect("32 bits");
        if length > limit {
            return (
                frames,
                StreamEnd::Refused(FrameError::TooLarge {
                    size: length,
                    limit,
                }),
                at,
            );
        }
        if length == 0 {
            return (frames, StreamEnd::Refused(FrameError::WrongLength(0)), at);
        }
        if rest.len() < 4 + length {
            return (frames, StreamEnd::Partial, at);
        }
        let (kind, payload) = (rest[4], &rest[5..4 + length]);
        frames.push(match (kind, payload.len()) {
            (1, _) => Frame::Json(payload.to_vec()),
            (2 | 3, 16..) => Frame::Output {
                stream: if kind == 2 {
                    Stream::Stdout
                } else {
                    Stream::Stderr
                },
                seq: number(&payload[..8]),
                at_ms: number(&payload[8..16]),
                data: payload[16..].to_vec(),
            },
            (4, _) => Frame::Data(payload.to_vec()),
            (5, 0) => Frame::End,
            (6, 8) => Frame::Ack(number(payload)),
            (2 | 3 | 5 | 6, _) => {
                return (
                    frames,
                    StreamEnd::Refused(FrameError::WrongLength(kind)),
                    at,
                );
            }
            _ => {
                return (
                    frames,
                    StreamEnd::Refused(FrameError::UnknownKind(kind)),
                    at,
                );
            }
        });
        at += 4 + length;
    }
}

/// Asserts that a parsed message survives a round trip.
fn message<M: Serialize + DeserializeOwned + PartialEq + Debug>(json: &[u8]) {
    let Ok(read) = serde_json::from_slice::<M>(json) else {
        return;
    };
    let mut written = Vec::new();
    encode_message(&read, &mut written);
    let mut decoder = Decoder::new(usize::MAX);
    decoder.extend(&written);
    let Ok(Some(Frame::Json(json))) = decoder.next_frame() else {
        panic!("a message is one frame")
    };
    assert_eq!(
        serde_json::from_slice::<M>(&json).expect("an encoded message can be decoded"),
        read
    );
}

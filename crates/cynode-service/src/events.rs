//! The event stream of a command's output, in both APIs.

use axum::response::{IntoResponse as _, Response};
use cynode_api::{Chunk, ExecExit, ExecId, Stream, StreamEvent};
use http::{HeaderMap, header};
use time::OffsetDateTime;

pub const EVENT_HEADERS: [(header::HeaderName, &str); 2] = [
    (header::CONTENT_TYPE, "text/event-stream"),
    (header::CACHE_CONTROL, "no-store"),
];

/// Whether the client wants events instead of a page.
#[must_use]
pub fn accepts_events(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains("text/event-stream"))
}

#[must_use]
pub const fn empty_event(seq: u64, at: OffsetDateTime) -> StreamEvent {
    StreamEvent {
        seq,
        at,
        data: None,
        data_b64: None,
        exec_id: None,
        exit: None,
        lost_before_seq: None,
    }
}

pub fn write_event(name: &str, event: &StreamEvent, out: &mut Vec<u8>) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(format!("\nid: {}\ndata: ", event.seq).as_bytes());
    // The fields of an exit also appear in the event itself, beside the object.
    let written = match &event.exit {
        None => serde_json::to_writer(&mut *out, event),
        Some(exit) => serde_json::to_value(exit).and_then(|mut fields| {
            if let (serde_json::Value::Object(fields), serde_json::Value::Object(own)) =
                (&mut fields, serde_json::to_value(event)?)
            {
                fields.extend(own);
            }
            serde_json::to_writer(&mut *out, &fields)
        }),
    };
    if let Err(error) = written {
        tracing::error!(%error, "Writing an event failed.");
    }
    out.extend_from_slice(b"\n\n");
}

/// Writes a piece of output as an event.
pub fn write_chunk(chunk: Chunk, out: &mut Vec<u8>) {
    let name = match chunk.stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
    };
    let event = StreamEvent {
        data: chunk.data,
        data_b64: chunk.data_b64,
        ..empty_event(chunk.seq, chunk.at)
    };
    write_event(name, &event, out);
}

/// Writes the last event of a stream, under the number of the last piece.
pub fn write_exit(
    exec_id: ExecId,
    seq: u64,
    exit: ExecExit,
    at: OffsetDateTime,
    out: &mut Vec<u8>,
) {
    let event = StreamEvent {
        exec_id: Some(exec_id),
        exit: Some(exit),
        ..empty_event(seq, at)
    };
    write_event("exit", &event, out);
}

/// The complete stream of a command without output; `ended` if it has ended.
pub fn without_output(
    exec_id: ExecId,
    from_start: bool,
    ended: Option<(ExecExit, OffsetDateTime)>,
) -> Response {
    let mut events = Vec::new();
    if let Some((exit, at)) = ended {
        if from_start {
            let start = StreamEvent {
                exec_id: Some(exec_id),
                ..empty_event(0, at)
            };
            write_event("start", &start, &mut events);
        }
        write_exit(exec_id, 0, exit, at, &mut events);
    }
    (EVENT_HEADERS, events).into_response()
}

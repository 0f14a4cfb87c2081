//! The event stream of a command's output, as both APIs send it.

use axum::response::{IntoResponse as _, Response};
use cynode_api::{ExecExit, ExecId, StreamEvent};
use http::{HeaderMap, header};
use time::OffsetDateTime;

pub const EVENT_HEADERS: [(header::HeaderName, &str); 2] = [
    (header::CONTENT_TYPE, "text/event-stream"),
    (header::CACHE_CONTROL, "no-store"),
];

/// Whether the caller wants events, and not a page.
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
    // An exit's fields stand in the event itself too, beside the object.
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

/// The whole stream of a command that has not been started; `ended` when it never will be.
pub fn without_output(
    exec_id: ExecId,
    from_start: bool,
    ended: Option<(ExecExit, OffsetDateTime)>,
) -> Response {
    let mut events = Vec::new();
    if let Some((exit, at)) = ended {
        let of_it = StreamEvent {
            exec_id: Some(exec_id),
            ..empty_event(0, at)
        };
        if from_start {
            write_event("start", &of_it, &mut events);
        }
        write_event(
            "exit",
            &StreamEvent {
                exit: Some(exit),
                ..of_it
            },
            &mut events,
        );
    }
    (EVENT_HEADERS, events).into_response()
}

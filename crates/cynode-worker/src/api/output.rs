//! Output as events.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use cynode_api::{Base64Bytes, Chunk, Stream, StreamEvent};
use futures_util::stream;
use http::{HeaderMap, header};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use crate::execs::{Next, Piece, Reader};

const KEEPALIVE: Duration = Duration::from_secs(15);
/// Events are sent together up to about this size.
const BATCH: usize = 256 * 1024;

pub(super) fn accepts_events(headers: &HeaderMap) -> bool {
    headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).any(|value| value.contains("text/event-stream"))
}

fn at(millis: u64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(millis) * 1_000_000).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// Text where it is UTF-8. A character that was split between two pieces makes both base64, which loses nothing.
fn text_or_bytes(data: Vec<u8>) -> (Option<String>, Option<Base64Bytes>) {
    match String::from_utf8(data) {
        Ok(text) => (Some(text), None),
        Err(error) => (None, Some(Base64Bytes(error.into_bytes()))),
    }
}

pub(super) fn chunk(piece: Piece) -> Chunk {
    let (data, data_b64) = text_or_bytes(piece.data);
    Chunk { seq: piece.seq, stream: piece.stream, at: at(piece.at_ms), data, data_b64 }
}

fn write_event(name: &str, event: &StreamEvent, out: &mut Vec<u8>) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(format!("\nid: {}\ndata: ", event.seq).as_bytes());
    // An exit's fields stand in the event itself too, beside the object.
    let written = match &event.exit {
        None => serde_json::to_writer(&mut *out, event),
        Some(exit) => serde_json::to_value(exit).and_then(|mut fields| {
            if let (serde_json::Value::Object(fields), serde_json::Value::Object(own)) = (&mut fields, serde_json::to_value(event)?) {
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

const fn empty(seq: u64, at: OffsetDateTime) -> StreamEvent {
    StreamEvent { seq, at, data: None, data_b64: None, exec_id: None, exit: None, lost_before_seq: None }
}

/// Follows an exec as an event stream to its end. A reader who does not read stops the stream, and so the program.
pub(super) fn stream(reader: Reader, from_start: bool, stop: CancellationToken) -> Response {
    let mut first = Vec::new();
    if from_start {
        let record = &reader.exec().record;
        write_event(
            "start",
            &StreamEvent { exec_id: Some(record.exec_id), lost_before_seq: reader.lost_before_seq, ..empty(0, record.started_at) },
            &mut first,
        );
    }
    let state = Some((reader, first, stop));
    let events = stream::unfold(state, async |state| {
        let (mut reader, mut batch, stop) = state?;
        let mut changes = reader.exec().changes();
        loop {
            match reader.next() {
                Ok(Next::Piece(piece)) => {
                    let name = match piece.stream {
                        Stream::Stdout => "stdout",
                        Stream::Stderr => "stderr",
                    };
                    let (data, data_b64) = text_or_bytes(piece.data);
                    write_event(name, &StreamEvent { data, data_b64, ..empty(piece.seq, at(piece.at_ms)) }, &mut batch);
                    if batch.len() < BATCH {
                        continue;
                    }
                }
                Ok(Next::Exit(exit, ended_at)) => {
                    let seq = reader.last_seq();
                    write_event("exit", &StreamEvent { exit: Some(exit), exec_id: Some(reader.exec().id()), ..empty(seq, ended_at) }, &mut batch);
                    return Some((Ok::<_, Infallible>(Bytes::from(batch)), None));
                }
                Ok(Next::Nothing) if batch.is_empty() => {
                    let changed = tokio::select! {
                        changed = tokio::time::timeout(KEEPALIVE, changes.changed()) => changed,
                        // The client comes back with the last event's id.
                        () = stop.cancelled() => return None,
                    };
                    match changed {
                        Ok(Ok(())) => continue,
                        Ok(Err(_)) => return None,
                        Err(_) => batch.extend_from_slice(b": keepalive\n\n"),
                    }
                }
                Ok(Next::Nothing) => {}
                Err(error) => {
                    // Too late for a status: the stream ends without an exit event, and the reason is in it.
                    batch.extend_from_slice(
                        format!("event: error\ndata: {}\n\n", serde_json::json!({ "code": error.0.code, "detail": error.0.detail })).as_bytes(),
                    );
                    return Some((Ok(Bytes::from(batch)), None));
                }
            }
            return Some((Ok(Bytes::from(batch)), Some((reader, Vec::new(), stop))));
        }
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(events)).into_response()
}

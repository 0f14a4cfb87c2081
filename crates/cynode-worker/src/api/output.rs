//! Output of a command, in pages or as events.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use cynode_api::{
    Base64Bytes, Chunk, ExecExit, ExecId, OutputPage, Stream, StreamEvent,
    exec_limits::{MAX_OUTPUT_BYTES, MAX_WAIT_MS},
};
use cynode_service::{
    ApiError,
    events::{EVENT_HEADERS, accepts_events, empty_event, without_output, write_event},
};
use futures_util::stream;
use http::HeaderMap;
use serde::Deserialize;
use time::OffsetDateTime;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use utoipa::IntoParams;

use crate::execs::{Exec, Next, Piece, Reader};

const KEEPALIVE: Duration = Duration::from_secs(15);
/// Events are sent together up to about this size.
const BATCH: usize = 256 * 1024;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct OutputQuery {
    /// Exclusive; 0 is the start.
    after_seq: Option<u64>,
    /// About how much to return; 1 MiB by default. A page ends at about 4 MiB of JSON, with at least one piece when there is one.
    max_bytes: Option<u64>,
    /// How long to wait for something new, at most 60,000.
    wait_ms: Option<u64>,
    /// Only the newest pieces that hold this much.
    tail_bytes: Option<u64>,
}

/// What a caller wants to read, with everything that a request can say about it looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    after_seq: u64,
    tail_bytes: Option<u64>,
    max_bytes: u64,
    pub(super) deadline: Instant,
    pub(super) events: bool,
    from_start: bool,
}

impl Asked {
    pub(super) fn new(query: &OutputQuery, headers: &HeaderMap) -> Result<Self, ApiError> {
        let resumed =
            match headers.get("last-event-id") {
                Some(value) => {
                    let seq = value
                        .to_str()
                        .ok()
                        .and_then(|text| text.parse::<u64>().ok());
                    Some(seq.ok_or_else(|| {
                        ApiError::invalid("Last-Event-ID: is not a sequence number")
                    })?)
                }
                None => None,
            };
        let wait = query.wait_ms.unwrap_or(0);
        if wait > MAX_WAIT_MS {
            return Err(ApiError::invalid(format!("wait_ms: at most {MAX_WAIT_MS}")));
        }
        Ok(Self {
            after_seq: resumed.or(query.after_seq).unwrap_or(0),
            tail_bytes: query.tail_bytes,
            max_bytes: query
                .max_bytes
                .unwrap_or(1 << 20)
                .clamp(1, MAX_OUTPUT_BYTES),
            deadline: Instant::now() + Duration::from_millis(wait),
            events: accepts_events(headers),
            from_start: resumed.is_none(),
        })
    }

    pub(super) async fn answer(
        self,
        exec: &Arc<Exec>,
        stop: CancellationToken,
    ) -> Result<Response, ApiError> {
        let mut after_seq = self.after_seq;
        if let Some(bytes) = self.tail_bytes {
            after_seq = after_seq.max(exec.before_tail(bytes)?);
        }
        if self.events {
            return Ok(stream(exec.attach(after_seq)?, self.from_start, stop));
        }
        let _watching = exec.watch();
        let mut changes = exec.changes();
        let page = loop {
            let page = exec.page(after_seq, self.max_bytes)?;
            if !page.pieces.is_empty()
                || page.exit.is_some()
                || tokio::time::timeout_at(self.deadline, changes.changed())
                    .await
                    .is_err()
            {
                break page;
            }
        };
        let chunks = page.pieces.into_iter().map(chunk).collect();
        Ok(Json(OutputPage {
            chunks,
            next_seq: page.next_seq,
            lost_before_seq: page.lost_before_seq,
            exit: page.exit,
        })
        .into_response())
    }

    /// Of a command that has not been started; `ended` when it never will be.
    pub(super) fn nothing(
        self,
        exec_id: ExecId,
        ended: Option<(ExecExit, OffsetDateTime)>,
    ) -> Response {
        if self.events {
            return without_output(exec_id, self.from_start, ended);
        }
        Json(OutputPage {
            chunks: Vec::new(),
            next_seq: 0,
            lost_before_seq: None,
            exit: ended.map(|(exit, _)| exit),
        })
        .into_response()
    }
}

fn at(millis: u64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(millis) * 1_000_000)
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// Text where it is UTF-8. A character that was split between two pieces makes both base64, which loses nothing.
fn text_or_bytes(data: Vec<u8>) -> (Option<String>, Option<Base64Bytes>) {
    match String::from_utf8(data) {
        Ok(text) => (Some(text), None),
        Err(error) => (None, Some(Base64Bytes(error.into_bytes()))),
    }
}

fn chunk(piece: Piece) -> Chunk {
    let (data, data_b64) = text_or_bytes(piece.data);
    Chunk {
        seq: piece.seq,
        stream: piece.stream,
        at: at(piece.at_ms),
        data,
        data_b64,
    }
}

/// Follows an exec as an event stream to its end. A reader who does not read stops the stream, and so the program.
pub(super) fn stream(reader: Reader, from_start: bool, stop: CancellationToken) -> Response {
    let mut first = Vec::new();
    if from_start {
        let record = &reader.exec().record;
        write_event(
            "start",
            &StreamEvent {
                exec_id: Some(record.exec_id),
                lost_before_seq: reader.lost_before_seq,
                ..empty_event(0, record.started_at)
            },
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
                    write_event(
                        name,
                        &StreamEvent {
                            data,
                            data_b64,
                            ..empty_event(piece.seq, at(piece.at_ms))
                        },
                        &mut batch,
                    );
                    if batch.len() < BATCH {
                        continue;
                    }
                }
                Ok(Next::Exit(exit, ended_at)) => {
                    let seq = reader.last_seq();
                    write_event(
                        "exit",
                        &StreamEvent {
                            exit: Some(exit),
                            exec_id: Some(reader.exec().id()),
                            ..empty_event(seq, ended_at)
                        },
                        &mut batch,
                    );
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
                        format!(
                            "event: error\ndata: {}\n\n",
                            serde_json::json!({ "code": error.0.code, "detail": error.0.detail })
                        )
                        .as_bytes(),
                    );
                    return Some((Ok(Bytes::from(batch)), None));
                }
            }
            return Some((Ok(Bytes::from(batch)), Some((reader, Vec::new(), stop))));
        }
    });
    (EVENT_HEADERS, Body::from_stream(events)).into_response()
}

//! Output of a command, as pages or as events.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use cynode_api::{Chunk, OutputPage, StreamEvent, exec_limits::MAX_OUTPUT_BYTES};
use cynode_service::{
    ApiError,
    events::{EVENT_HEADERS, empty_event, write_chunk, write_event, write_exit},
    output::{DEFAULT_PAGE_BYTES, OutputRequest},
};
use futures_util::stream;
use time::OffsetDateTime;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::execs::{Exec, Piece, Reader, ReaderEvent};

const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Events are batched up to about this size.
const BATCH_BYTES: usize = 256 * 1024;

/// A page or the event stream of an exec's output. A page waits for output until `deadline`.
pub(super) async fn answer(
    request: OutputRequest,
    deadline: Instant,
    exec: &Arc<Exec>,
    stop: CancellationToken,
) -> Result<Response, ApiError> {
    let mut after_seq = request.after_seq;
    if let Some(bytes) = request.tail_bytes {
        after_seq = after_seq.max(exec.before_tail(bytes)?);
    }
    if request.events {
        return Ok(stream(exec.attach(after_seq)?, request.from_start, stop));
    }
    let max_bytes = request
        .max_bytes
        .unwrap_or(DEFAULT_PAGE_BYTES)
        .clamp(1, MAX_OUTPUT_BYTES);
    let _watch_guard = exec.watch();
    let mut changes = exec.changes();
    let page = loop {
        let page = exec.page(after_seq, max_bytes)?;
        if !page.pieces.is_empty()
            || page.exit.is_some()
            || tokio::time::timeout_at(deadline, changes.changed())
                .await
                .is_err()
        {
            break page;
        }
    };
    Ok(Json(OutputPage {
        chunks: page.pieces.into_iter().map(chunk).collect(),
        next_seq: page.next_seq,
        lost_before_seq: page.lost_before_seq,
        exit: page.exit,
    })
    .into_response())
}

fn timestamp(millis: u64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(millis) * 1_000_000)
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

fn chunk(piece: Piece) -> Chunk {
    Chunk::new(piece.seq, piece.stream, timestamp(piece.at_ms), piece.data)
}

/// Streams an exec's events to its end. A client that does not read blocks the stream, and thereby
/// the program.
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
                Ok(ReaderEvent::Piece(piece)) => {
                    write_chunk(chunk(piece), &mut batch);
                    if batch.len() < BATCH_BYTES {
                        continue;
                    }
                }
                Ok(ReaderEvent::Exit(exit, ended_at)) => {
                    let (id, seq) = (reader.exec().id(), reader.last_seq());
                    write_exit(id, seq, exit, ended_at, &mut batch);
                    return Some((Ok::<_, Infallible>(Bytes::from(batch)), None));
                }
                Ok(ReaderEvent::Pending) if batch.is_empty() => {
                    let change = tokio::time::timeout(KEEPALIVE_INTERVAL, changes.changed());
                    let changed = tokio::select! {
                        changed = change => changed,
                        // The client reconnects with the last event's id.
                        () = stop.cancelled() => return None,
                    };
                    match changed {
                        Ok(Ok(())) => continue,
                        Ok(Err(_)) => return None,
                        Err(_) => batch.extend_from_slice(b": keepalive\n\n"),
                    }
                }
                Ok(ReaderEvent::Pending) => {}
                Err(error) => {
                    // The status has been sent already: report the error in the stream, which ends
                    // without an exit event.
                    batch.extend_from_slice(
                        format!(
                            "event: error\ndata: {}\n\n",
                            serde_json::json!({ "code": error.code, "detail": error.detail })
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

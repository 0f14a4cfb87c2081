//! The output of ended jobs, as a page or as an event stream.

use std::collections::VecDeque;

use axum::{
    Json,
    body::Body,
    response::{IntoResponse as _, Response},
};
use base64::Engine as _;
use bytes::Bytes;
use cynode_api::{
    Base64Bytes, Chunk, ErrorCode, ExecExit, ExecId, ExecVia, Job, OutputPage,
    Stream as OutputStream, StreamEvent,
};
use cynode_service::{
    ApiError,
    events::{EVENT_HEADERS, empty_event, write_chunk, write_event, write_exit},
    output::{DEFAULT_PAGE_BYTES, OutputRequest},
    pages::json_size,
};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use time::OffsetDateTime;

use crate::{
    blobs::Blobs,
    output::{OutputLine, stored_lines},
};

/// Bounds a page, whatever was requested.
const MAX_PAGE_BYTES: u64 = 4 << 20;

/// The response when no output is stored: nothing ran, or the output was lost.
pub(crate) fn empty_response(request: OutputRequest, job: &Job) -> Response {
    let ended = job.state.is_final().then(|| {
        (
            exit_of(job),
            job.ended_at.unwrap_or_else(OffsetDateTime::now_utc),
        )
    });
    let exec_id = ExecId::from_uuid(*job.job_id.as_uuid());
    request.empty_response(exec_id, request.after_seq, ended)
}

/// The exit of a job whose process was never reported. If it ran, the exit is unknown.
fn exit_of(job: &Job) -> ExecExit {
    ExecExit {
        exit_code: job.exit_code,
        signal: job.signal.clone(),
        timed_out: job.state == cynode_api::JobState::Timeout,
        lost: job.started_at.is_some() && job.exit_code.is_none(),
        ..ExecExit::never_ran(ExecVia::Agent)
    }
}

/// A page or the event stream of stored output.
pub(crate) async fn stored_output(
    blobs: &Blobs,
    sha256: &str,
    job: &Job,
    mut request: OutputRequest,
) -> Result<Response, ApiError> {
    if let Some(tail_bytes) = request.tail_bytes {
        let before = before_tail(stored_lines(blobs, sha256).await?, tail_bytes).await?;
        request.after_seq = request.after_seq.max(before);
    }
    answer(stored_lines(blobs, sha256).await?, job, request).await
}

/// The sequence number before the newest chunks that hold at least `tail_bytes`, as nodes count.
async fn before_tail(
    lines: impl Stream<Item = Result<OutputLine, std::io::Error>>,
    tail_bytes: u64,
) -> Result<u64, ApiError> {
    let (mut tail, mut bytes, mut before) = (VecDeque::new(), 0, 0);
    let mut lines = std::pin::pin!(lines);
    while let Some(line) = lines.try_next().await.map_err(unreadable)? {
        let OutputLine::Chunk(chunk) = line else {
            break;
        };
        before = if tail.is_empty() {
            chunk.seq - 1
        } else {
            before
        };
        bytes += data_bytes(&chunk);
        tail.push_back((chunk.seq, data_bytes(&chunk)));
        while let Some((seq, size)) = tail.front().copied()
            && bytes - size >= tail_bytes
        {
            (bytes, before) = (bytes - size, seq);
            tail.pop_front();
        }
    }
    Ok(before)
}

#[expect(clippy::needless_pass_by_value, reason = "an argument of map_err")]
fn unreadable(error: std::io::Error) -> ApiError {
    ApiError::new(ErrorCode::StoreUnavailable, error.to_string())
}

/// The response for a job whose only stored output is in its object: one chunk per stream.
pub(crate) async fn object_output(
    job: &Job,
    mut request: OutputRequest,
) -> Result<Response, ApiError> {
    let at = job.ended_at.unwrap_or_else(OffsetDateTime::now_utc);
    let streams = [
        (OutputStream::Stdout, &job.output.stdout),
        (OutputStream::Stderr, &job.output.stderr),
    ];
    let mut lines: Vec<OutputLine> = Vec::new();
    for (stream, text) in streams.into_iter().filter(|(_, text)| !text.is_empty()) {
        let (data, data_b64) = if job.output.encoding == "base64" {
            let bytes = base64::engine::general_purpose::STANDARD
                .decode(text)
                .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
            (None, Some(Base64Bytes(bytes)))
        } else {
            (Some(text.clone()), None)
        };
        lines.push(OutputLine::Chunk(Chunk {
            seq: lines.len() as u64 + 1,
            stream,
            at,
            data,
            data_b64,
        }));
    }
    lines.push(OutputLine::End { exit: exit_of(job) });
    if let Some(tail_bytes) = request.tail_bytes {
        let before = before_tail(stream::iter(lines.iter().cloned().map(Ok)), tail_bytes).await?;
        request.after_seq = request.after_seq.max(before);
    }
    answer(stream::iter(lines.into_iter().map(Ok)), job, request).await
}

/// A page or the event stream of lines.
async fn answer(
    lines: impl Stream<Item = Result<OutputLine, std::io::Error>> + Send + 'static,
    job: &Job,
    request: OutputRequest,
) -> Result<Response, ApiError> {
    if request.events {
        return Ok(events(lines, job, request));
    }
    let limit = request
        .max_bytes
        .unwrap_or(DEFAULT_PAGE_BYTES)
        .clamp(1, MAX_PAGE_BYTES);
    let mut kept = Vec::new();
    let (mut bytes, mut first, mut exit) = (0, None, None);
    let mut lines = std::pin::pin!(lines);
    while let Some(line) = lines.try_next().await.map_err(unreadable)? {
        let chunk = match line {
            OutputLine::Chunk(chunk) => chunk,
            OutputLine::End { exit: ended } => {
                exit = Some(ended);
                break;
            }
        };
        first.get_or_insert(chunk.seq);
        if chunk.seq <= request.after_seq {
            continue;
        }
        let length = size(&chunk);
        if bytes + length > limit && !kept.is_empty() {
            break;
        }
        bytes += length;
        kept.push(chunk);
    }
    let lost_before_seq = first.filter(|first| *first > request.after_seq.saturating_add(1));
    let next_seq = kept.last().map_or(request.after_seq, |chunk| chunk.seq);
    Ok(Json(OutputPage {
        chunks: kept,
        next_seq,
        lost_before_seq,
        exit,
    })
    .into_response())
}

/// The size of a chunk; half of its size as JSON, if that is larger.
fn size(chunk: &Chunk) -> u64 {
    data_bytes(chunk).max(json_size(&chunk.data) as u64 / 2)
}

fn data_bytes(chunk: &Chunk) -> u64 {
    let bytes = chunk.data.as_ref().map_or_else(
        || chunk.data_b64.as_ref().map_or(0, |data| data.0.len()),
        String::len,
    );
    bytes as u64
}

fn events(
    lines: impl Stream<Item = Result<OutputLine, std::io::Error>> + Send + 'static,
    job: &Job,
    request: OutputRequest,
) -> Response {
    let exec_id = ExecId::from_uuid(*job.job_id.as_uuid());
    let ended_at = job.ended_at.unwrap_or_else(OffsetDateTime::now_utc);
    let (mut last, mut is_first) = (request.after_seq, true);
    let events = lines.map(move |line| {
        let mut out = Vec::new();
        let line = line?;
        if std::mem::take(&mut is_first) && request.from_start {
            // The output before the first chunk is lost.
            let lost_before_seq = if let OutputLine::Chunk(chunk) = &line {
                Some(chunk.seq).filter(|seq| *seq > request.after_seq.saturating_add(1))
            } else {
                None
            };
            let at = job_started(&line, ended_at);
            write_event(
                "start",
                &StreamEvent {
                    exec_id: Some(exec_id),
                    lost_before_seq,
                    ..empty_event(0, at)
                },
                &mut out,
            );
        }
        match line {
            OutputLine::Chunk(chunk) if chunk.seq <= request.after_seq => {}
            OutputLine::Chunk(chunk) => {
                last = chunk.seq;
                write_chunk(chunk, &mut out);
            }
            OutputLine::End { exit } => write_exit(exec_id, last, exit, ended_at, &mut out),
        }
        Ok::<_, std::io::Error>(Bytes::from(out))
    });
    (EVENT_HEADERS, Body::from_stream(events)).into_response()
}

fn job_started(line: &OutputLine, ended_at: OffsetDateTime) -> OffsetDateTime {
    if let OutputLine::Chunk(chunk) = line {
        chunk.at
    } else {
        ended_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(sizes: &[usize]) -> impl Stream<Item = Result<OutputLine, std::io::Error>> {
        let lines: Vec<_> = (1..)
            .zip(sizes)
            .map(|(seq, size)| {
                let data = vec![b'x'; *size];
                let at = OffsetDateTime::UNIX_EPOCH;
                Ok(OutputLine::Chunk(Chunk::new(
                    seq,
                    OutputStream::Stdout,
                    at,
                    data,
                )))
            })
            .collect();
        stream::iter(lines)
    }

    #[tokio::test]
    async fn the_tail_holds_at_least_the_requested_bytes() {
        for (sizes, tail_bytes, before) in [
            (&[][..], 5, 0),
            (&[10, 10, 10], 0, 3),
            (&[10, 10, 10], 1, 2),
            (&[10, 10, 10], 10, 2),
            (&[10, 10, 10], 11, 1),
            (&[10, 10, 10], 30, 0),
            (&[10, 10, 10], 1_000, 0),
        ] {
            let found = before_tail(lines(sizes), tail_bytes)
                .await
                .expect("readable");
            assert_eq!(found, before, "{sizes:?} {tail_bytes}");
        }
    }
}

//! The kept output of jobs that have ended: a blob of lines, each a chunk, as their node numbered them, and last how it ended.

use std::time::Duration;

use axum::{
    Json,
    body::Body,
    response::{IntoResponse as _, Response},
};
use base64::Engine as _;
use bytes::Bytes;
use cynode_api::{
    Base64Bytes, Bytes as Counts, Chunk, ErrorCode, ExecExit, ExecId, ExecVia, Job, JobId, NodeId,
    OutputPage, Stream as Which, StreamEvent, exec_limits::MAX_WAIT_MS,
};
use cynode_client::{OutputQuery as ClientQuery, WorkerClient};
use cynode_service::{
    ApiError,
    events::{EVENT_HEADERS, accepts_events, empty_event, without_output, write_event},
    pages::json_size,
};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use http::HeaderMap;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use tokio::io::AsyncBufReadExt as _;
use tokio_util::io::StreamReader;
use utoipa::IntoParams;

use crate::{
    Orchestrator,
    blobs::Staged,
    fleet::{Failed, Fleet},
};

/// What a node keeps of a job, as lines of JSON in base64, and then some.
const MAX_BYTES: u64 = 128 << 20;
const PAGE_BYTES: u64 = 1 << 20;
/// What a page may hold, whatever was asked for.
const MAX_PAGE_BYTES: u64 = 4 << 20;
/// How long a node may take for a page.
const PAGE_WAIT: Duration = Duration::from_secs(30);

#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OutputQuery {
    /// Exclusive; 0 is the start.
    after_seq: Option<u64>,
    /// About how much to return; 1 MiB by default. A page ends at about 4 MiB of JSON, with at least one piece when there is one.
    max_bytes: Option<u64>,
    /// How long to wait for something new, at most 60,000.
    wait_ms: Option<u64>,
    /// Only the newest pieces that hold this much.
    tail_bytes: Option<u64>,
}

/// What a caller wants to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    after_seq: u64,
    max_bytes: Option<u64>,
    tail_bytes: Option<u64>,
    events: bool,
    from_start: bool,
    /// How long to wait for a job that no node has yet.
    pub(crate) wait: Duration,
}

impl Asked {
    pub(crate) fn new(query: &OutputQuery, headers: &HeaderMap) -> Result<Self, ApiError> {
        let resumed = match headers.get("last-event-id") {
            None => None,
            Some(id) => Some(
                id.to_str()
                    .ok()
                    .and_then(|id| id.parse().ok())
                    .ok_or_else(|| ApiError::invalid("Last-Event-ID: is not a sequence number"))?,
            ),
        };
        if query.wait_ms.is_some_and(|wait| wait > MAX_WAIT_MS) {
            return Err(ApiError::invalid(format!("wait_ms: at most {MAX_WAIT_MS}")));
        }
        let events = accepts_events(headers);
        // Who reads events waits for them; one who was told nothing for so long asks again.
        let wait = if events {
            MAX_WAIT_MS
        } else {
            query.wait_ms.unwrap_or(0)
        };
        Ok(Self {
            after_seq: resumed.or(query.after_seq).unwrap_or(0),
            max_bytes: query.max_bytes,
            tail_bytes: query.tail_bytes,
            events,
            from_start: resumed.is_none(),
            wait: Duration::from_millis(wait),
        })
    }

    /// The answer when nothing is kept: nothing ran, or nobody knows what.
    pub(crate) fn nothing(self, job: &Job) -> Response {
        let ended = job.state.is_final().then(|| {
            (
                exit_of(job),
                job.ended_at.unwrap_or_else(OffsetDateTime::now_utc),
            )
        });
        if self.events {
            return without_output(
                ExecId::from_uuid(*job.job_id.as_uuid()),
                self.from_start,
                ended,
            );
        }
        Json(OutputPage {
            chunks: Vec::new(),
            next_seq: self.after_seq,
            lost_before_seq: None,
            exit: ended.map(|(exit, _)| exit),
        })
        .into_response()
    }
}

/// How a job ended of whose process nobody said anything. One that ran may have come to any end.
fn exit_of(job: &Job) -> ExecExit {
    ExecExit {
        exit_code: job.exit_code,
        signal: job.signal.clone(),
        timed_out: job.state == cynode_api::JobState::Timeout,
        oom_killed: false,
        bytes: Counts::default(),
        sha256: None,
        duration_ms: 0,
        via: ExecVia::Agent,
        lost: job.started_at.is_some() && job.exit_code.is_none(),
        no_space: false,
    }
}

/// A line of the blob.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    End { exit: ExecExit },
    Chunk(Chunk),
}

impl Orchestrator {
    /// Fetches all that a node has kept of a job's output. `None` when it keeps none.
    pub(crate) async fn collect_output(
        &self,
        node_id: NodeId,
        client: &WorkerClient,
        id: JobId,
    ) -> Result<Option<Staged>, ApiError> {
        let Some(first) = page(&self.fleet, node_id, client, id, 0).await? else {
            return Ok(None);
        };
        self.blobs
            .stage(
                lines(&self.fleet, node_id, client, id, first),
                MAX_BYTES,
                None,
            )
            .await
            .map(Some)
    }

    /// A page, or the stream, of output that was collected.
    pub(crate) async fn kept_output(
        &self,
        sha256: &str,
        job: &Job,
        asked: Asked,
    ) -> Result<Response, ApiError> {
        answer(self.kept_lines(sha256).await?, job, asked).await
    }

    async fn kept_lines(
        &self,
        sha256: &str,
    ) -> Result<impl Stream<Item = Result<Line, std::io::Error>> + use<>, ApiError> {
        let bytes = self.blobs.get(sha256).await?;
        let lines = StreamReader::new(Box::pin(bytes)).lines();
        Ok(stream::try_unfold(lines, async |mut lines| {
            let Some(text) = lines.next_line().await? else {
                return Ok(None);
            };
            let line: Line = serde_json::from_str(&text)?;
            Ok(Some((line, lines)))
        }))
    }
}

/// The answer for a job of whose output no more is kept than its object shows: one piece for each stream.
pub(crate) async fn shown_output(job: &Job, asked: Asked) -> Result<Response, ApiError> {
    let at = job.ended_at.unwrap_or_else(OffsetDateTime::now_utc);
    let streams = [
        (Which::Stdout, &job.output.stdout),
        (Which::Stderr, &job.output.stderr),
    ];
    let mut lines: Vec<Line> = Vec::new();
    for (stream, text) in streams.into_iter().filter(|(_, text)| !text.is_empty()) {
        let (data, data_b64) = if job.output.encoding == "base64" {
            let bytes = base64::engine::general_purpose::STANDARD
                .decode(text)
                .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
            (None, Some(Base64Bytes(bytes)))
        } else {
            (Some(text.clone()), None)
        };
        lines.push(Line::Chunk(Chunk {
            seq: lines.len() as u64 + 1,
            stream,
            at,
            data,
            data_b64,
        }));
    }
    lines.push(Line::End { exit: exit_of(job) });
    answer(stream::iter(lines.into_iter().map(Ok)), job, asked).await
}

/// A page, or the stream, of lines.
async fn answer(
    lines: impl Stream<Item = Result<Line, std::io::Error>> + Send + 'static,
    job: &Job,
    asked: Asked,
) -> Result<Response, ApiError> {
    if asked.events {
        return Ok(events(lines, job, asked));
    }
    let limit = asked
        .tail_bytes
        .or(asked.max_bytes)
        .unwrap_or(PAGE_BYTES)
        .clamp(1, MAX_PAGE_BYTES);
    let mut kept = std::collections::VecDeque::new();
    let (mut bytes, mut first, mut exit) = (0, None, None);
    let mut lines = std::pin::pin!(lines);
    while let Some(line) = lines
        .try_next()
        .await
        .map_err(|error| ApiError::new(ErrorCode::StoreUnavailable, error.to_string()))?
    {
        let chunk = match line {
            Line::Chunk(chunk) => chunk,
            Line::End { exit: ended } => {
                exit = Some(ended);
                break;
            }
        };
        first.get_or_insert(chunk.seq);
        if chunk.seq <= asked.after_seq {
            continue;
        }
        let length = size(&chunk);
        if asked.tail_bytes.is_none() && bytes + length > limit && !kept.is_empty() {
            break;
        }
        bytes += length;
        kept.push_back(chunk);
        while asked.tail_bytes.is_some() && bytes > limit && kept.len() > 1 {
            bytes -= kept.pop_front().map_or(0, |chunk| size(&chunk));
        }
    }
    let lost_before_seq = first.filter(|first| *first > asked.after_seq.saturating_add(1));
    let next_seq = kept.back().map_or(asked.after_seq, |chunk| chunk.seq);
    Ok(Json(OutputPage {
        chunks: kept.into(),
        next_seq,
        lost_before_seq,
        exit,
    })
    .into_response())
}

/// A page of a job's output; `None` when the node keeps none.
async fn page(
    fleet: &Fleet,
    node_id: NodeId,
    client: &WorkerClient,
    id: JobId,
    after_seq: u64,
) -> Result<Option<OutputPage>, ApiError> {
    let query = ClientQuery {
        after_seq: Some(after_seq),
        ..Default::default()
    };
    match fleet
        .call(node_id, PAGE_WAIT, client.job_output(id, &query))
        .await
    {
        Ok(page) => Ok(Some(page)),
        Err(Failed::Refused(error))
            if error.0.is(ErrorCode::OutputExpired) || error.0.is(ErrorCode::JobNotFound) =>
        {
            Ok(None)
        }
        Err(failed) => Err(failed.problem()),
    }
}

/// Every chunk as a line, page after page.
fn lines(
    fleet: &Fleet,
    node_id: NodeId,
    client: &WorkerClient,
    id: JobId,
    first: OutputPage,
) -> impl Stream<Item = Result<Bytes, ApiError>> {
    stream::try_unfold(Some(first), move |held| async move {
        let Some(held) = held else { return Ok(None) };
        let mut text = Vec::new();
        let is_last = held.exit.is_some() || held.chunks.is_empty();
        for line in held
            .chunks
            .into_iter()
            .map(Line::Chunk)
            .chain(held.exit.map(|exit| Line::End { exit }))
        {
            serde_json::to_writer(&mut text, &line)
                .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
            text.push(b'\n');
        }
        let next = if is_last {
            None
        } else {
            page(fleet, node_id, client, id, held.next_seq).await?
        };
        Ok(Some((Bytes::from(text), next)))
    })
}

/// How long a chunk is; as JSON, when that is more than twice as long.
fn size(chunk: &Chunk) -> u64 {
    let bytes = chunk.data.as_ref().map_or_else(
        || chunk.data_b64.as_ref().map_or(0, |data| data.0.len()),
        String::len,
    );
    (bytes as u64).max(json_size(&chunk.data) as u64 / 2)
}

fn events(
    lines: impl Stream<Item = Result<Line, std::io::Error>> + Send + 'static,
    job: &Job,
    asked: Asked,
) -> Response {
    let exec_id = ExecId::from_uuid(*job.job_id.as_uuid());
    let ended_at = job.ended_at.unwrap_or_else(OffsetDateTime::now_utc);
    let (mut last, mut is_first) = (asked.after_seq, true);
    let events = lines.map(move |line| {
        let mut out = Vec::new();
        let line = line?;
        if std::mem::take(&mut is_first) && asked.from_start {
            // Output before the first line is no longer kept.
            let lost_before_seq = if let Line::Chunk(chunk) = &line {
                Some(chunk.seq).filter(|seq| *seq > asked.after_seq.saturating_add(1))
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
            Line::Chunk(chunk) if chunk.seq <= asked.after_seq => {}
            Line::Chunk(Chunk {
                seq,
                stream,
                at,
                data,
                data_b64,
            }) => {
                last = seq;
                let name = if stream == Which::Stderr {
                    "stderr"
                } else {
                    "stdout"
                };
                write_event(
                    name,
                    &StreamEvent {
                        data,
                        data_b64,
                        ..empty_event(seq, at)
                    },
                    &mut out,
                );
            }
            Line::End { exit } => write_event(
                "exit",
                &StreamEvent {
                    exit: Some(exit),
                    exec_id: Some(exec_id),
                    ..empty_event(last, ended_at)
                },
                &mut out,
            ),
        }
        Ok::<_, std::io::Error>(Bytes::from(out))
    });
    (EVENT_HEADERS, Body::from_stream(events)).into_response()
}

fn job_started(line: &Line, ended_at: OffsetDateTime) -> OffsetDateTime {
    if let Line::Chunk(chunk) = line {
        chunk.at
    } else {
        ended_at
    }
}

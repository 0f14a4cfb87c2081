//! The kept output of jobs that have ended: a blob of lines, each a chunk, as their node numbered them.

use axum::{
    Json,
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use cynode_api::{Chunk, ErrorCode, JobId, OutputPage};
use cynode_client::{OutputQuery as ClientQuery, WorkerClient};
use cynode_service::ApiError;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use http::{HeaderMap, header};
use serde::Deserialize;
use tokio::io::AsyncBufReadExt as _;
use tokio_util::io::StreamReader;
use utoipa::IntoParams;

use crate::{Orchestrator, fleet::Failed};

/// What a node keeps of a job, as lines of JSON in base64, and then some.
const MAX_BYTES: u64 = 128 << 20;
const PAGE_BYTES: u64 = 1 << 20;

#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OutputQuery {
    pub(crate) after_seq: Option<u64>,
    pub(crate) max_bytes: Option<u64>,
    /// For the node, while it has the output; what has ended needs no waiting.
    #[expect(dead_code, reason = "it is checked and passed on with the rest of the query")]
    wait_ms: Option<u64>,
    pub(crate) tail_bytes: Option<u64>,
}

impl Orchestrator {
    /// Fetches all that a node has kept of a job's output. The hash of the blob; `None` when there was nothing.
    pub(crate) async fn collect_output(&self, client: &WorkerClient, id: JobId) -> Result<Option<String>, ApiError> {
        let first = page(client, id, 0).await?;
        if first.as_ref().is_none_or(|page| page.chunks.is_empty()) {
            return Ok(None);
        }
        let stored = self.blobs.put(lines(client.clone(), id, first), MAX_BYTES, None).await?;
        Ok(Some(stored.sha256))
    }

    /// A page, or the stream, of output that was collected.
    pub(crate) async fn kept_output(&self, sha256: &str, query: &OutputQuery, headers: &HeaderMap) -> Result<Response, ApiError> {
        let chunks = self.chunks(sha256).await?;
        let streams = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).is_some_and(|accept| accept.contains("text/event-stream"));
        if streams {
            let after = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok()).or(query.after_seq).unwrap_or(0);
            return Ok(sse(chunks, after));
        }
        let after = query.after_seq.unwrap_or(0);
        let limit = query.tail_bytes.or(query.max_bytes).unwrap_or(PAGE_BYTES).clamp(1, 16 << 20);
        let mut kept = std::collections::VecDeque::new();
        let mut bytes = 0;
        let mut first = None;
        let mut chunks = std::pin::pin!(chunks);
        while let Some(chunk) = chunks.try_next().await.map_err(|error| ApiError::new(ErrorCode::StoreUnavailable, error.to_string()))? {
            first.get_or_insert(chunk.seq);
            if chunk.seq <= after {
                continue;
            }
            let length = size(&chunk);
            if query.tail_bytes.is_none() && bytes + length > limit && !kept.is_empty() {
                break;
            }
            bytes += length;
            kept.push_back(chunk);
            while query.tail_bytes.is_some() && bytes > limit && kept.len() > 1 {
                bytes -= kept.pop_front().map_or(0, |chunk| size(&chunk));
            }
        }
        let lost_before_seq = first.filter(|first| *first > after.saturating_add(1));
        let next_seq = kept.back().map_or(after, |chunk| chunk.seq);
        Ok(Json(OutputPage { chunks: kept.into(), next_seq, lost_before_seq, exit: None }).into_response())
    }

    async fn chunks(&self, sha256: &str) -> Result<impl Stream<Item = Result<Chunk, std::io::Error>> + use<>, ApiError> {
        let bytes = self.blobs.get(sha256, None).await?;
        let lines = StreamReader::new(Box::pin(bytes)).lines();
        Ok(stream::try_unfold(lines, async |mut lines| {
            let Some(line) = lines.next_line().await? else { return Ok(None) };
            let chunk: Chunk = serde_json::from_str(&line)?;
            Ok(Some((chunk, lines)))
        }))
    }
}

fn size(chunk: &Chunk) -> u64 {
    chunk.data.as_ref().map_or_else(|| chunk.data_b64.as_ref().map_or(0, |data| data.0.len()), String::len) as u64
}

/// A page of a job's output; `None` when the node keeps none.
async fn page(client: &WorkerClient, id: JobId, after_seq: u64) -> Result<Option<OutputPage>, ApiError> {
    match client.job_output(id, &ClientQuery { after_seq: Some(after_seq), ..Default::default() }).await.map_err(Failed::from) {
        Ok(page) => Ok(Some(page)),
        Err(Failed::Refused(error)) if error.0.is(ErrorCode::OutputExpired) || error.0.is(ErrorCode::JobNotFound) => Ok(None),
        Err(failed) => Err(failed.problem()),
    }
}

/// Every chunk as a line, page after page.
fn lines(client: WorkerClient, id: JobId, first: Option<OutputPage>) -> impl Stream<Item = Result<Bytes, ApiError>> {
    stream::try_unfold((client, first), move |(client, held)| async move {
        let Some(held) = held.filter(|page| !page.chunks.is_empty()) else { return Ok(None) };
        let mut text = Vec::new();
        for chunk in &held.chunks {
            serde_json::to_writer(&mut text, chunk).map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
            text.push(b'\n');
        }
        let next = page(&client, id, held.next_seq).await?;
        Ok(Some((Bytes::from(text), (client, next))))
    })
}

fn sse(chunks: impl Stream<Item = Result<Chunk, std::io::Error>> + Send + 'static, after: u64) -> Response {
    let events = chunks.try_filter(move |chunk| std::future::ready(chunk.seq > after)).map(|chunk| {
        let chunk = chunk?;
        let name = serde_json::to_value(chunk.stream)?;
        let data = serde_json::to_string(&chunk)?;
        Ok::<_, std::io::Error>(Bytes::from(format!("id: {}\nevent: {}\ndata: {data}\n\n", chunk.seq, name.as_str().unwrap_or("stdout"))))
    });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}

//! The stored output of ended jobs: a blob of JSON lines, one chunk each, numbered by the node, and
//! last the exit.

use std::time::Duration;

use bytes::Bytes;
use cynode_api::{Chunk, ErrorCode, ExecExit, JobId, NodeId, OutputPage, OutputQuery};
use cynode_client::SessionClient;
use futures_util::{Stream, stream};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncBufReadExt as _;
use tokio_util::io::StreamReader;

use crate::{
    blobs::{self, Blobs, StageError, StagedBlob},
    fleet::{CallError, Fleet},
};

/// Bounds a job's output, as base64 in JSON lines, with some slack.
const MAX_OUTPUT_BYTES: u64 = 128 << 20;
/// How long a node may take for a page.
const PAGE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Store(#[from] blobs::Error),
    #[error(transparent)]
    Encode(#[from] serde_json::Error),
}

impl Error {
    /// Whether the output exceeds what is kept.
    pub(crate) fn is_too_large(&self) -> bool {
        match self {
            Self::Call(call) => call.is_refusal(&[ErrorCode::TooLarge]),
            Self::Store(error) => matches!(error, blobs::Error::TooLarge { .. }),
            Self::Encode(_) => false,
        }
    }
}

/// A line of the blob.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum OutputLine {
    End { exit: ExecExit },
    Chunk(Chunk),
}

/// Fetches a job's output from its node and stages it. `None` when the node has none.
pub(crate) async fn collect(
    fleet: &Fleet,
    blobs: &Blobs,
    node_id: NodeId,
    client: &SessionClient,
    id: JobId,
) -> Result<Option<StagedBlob>, Error> {
    let Some(first) = page(fleet, node_id, client, id, 0).await? else {
        return Ok(None);
    };
    let lines = lines(fleet, node_id, client, id, first);
    match blobs.stage(lines, MAX_OUTPUT_BYTES, None).await {
        Ok(staged) => Ok(Some(staged)),
        Err(StageError::Store(error)) => Err(error.into()),
        Err(StageError::Source(error)) => Err(error),
    }
}

/// The lines of collected output.
pub(crate) async fn stored_lines(
    blobs: &Blobs,
    sha256: &str,
) -> Result<impl Stream<Item = Result<OutputLine, std::io::Error>> + use<>, blobs::Error> {
    let bytes = blobs.get(sha256).await?;
    let lines = StreamReader::new(Box::pin(bytes)).lines();
    Ok(stream::try_unfold(lines, async |mut lines| {
        let Some(text) = lines.next_line().await? else {
            return Ok(None);
        };
        let line: OutputLine = serde_json::from_str(&text)?;
        Ok(Some((line, lines)))
    }))
}

/// A page of a job's output from its node; `None` when the node has none.
async fn page(
    fleet: &Fleet,
    node_id: NodeId,
    client: &SessionClient,
    id: JobId,
    after_seq: u64,
) -> Result<Option<OutputPage>, CallError> {
    let query = OutputQuery {
        after_seq: Some(after_seq),
        ..Default::default()
    };
    match fleet
        .call(node_id, PAGE_TIMEOUT, client.job_output(id, &query))
        .await
    {
        Ok(page) => Ok(Some(page)),
        Err(error) if error.is_refusal(&[ErrorCode::OutputExpired, ErrorCode::JobNotFound]) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// All chunks as JSON lines, page by page.
fn lines(
    fleet: &Fleet,
    node_id: NodeId,
    client: &SessionClient,
    id: JobId,
    first: OutputPage,
) -> impl Stream<Item = Result<Bytes, Error>> {
    stream::try_unfold(Some(first), move |held| async move {
        let Some(held) = held else { return Ok(None) };
        let mut text = Vec::new();
        let is_last = held.exit.is_some() || held.chunks.is_empty();
        for line in held
            .chunks
            .into_iter()
            .map(OutputLine::Chunk)
            .chain(held.exit.map(|exit| OutputLine::End { exit }))
        {
            serde_json::to_writer(&mut text, &line)?;
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

//! Typed requests to the agent.

use std::{
    io::{Read as _, Seek as _, Write as _},
    path::Path,
    time::Duration,
};

use axum::{
    Json,
    response::{IntoResponse as _, Response},
};
use cynode_api::{ErrorCode, FileChanges, Problem};
use cynode_sba_proto::{
    AgentError, Frame, MAX_DATA, Reply, Request, encode, encode_data, encode_message,
};
use cynode_service::{ApiError, compute, json};
use tempfile::SpooledTempFile;
use tokio::{io::AsyncWriteExt as _, net::UnixStream};

use super::{
    link::{AgentConnection, AgentLink, LinkError},
    validate_changes,
};

/// Longest error message of the agent, which may be hostile, that is forwarded.
const MAX_MESSAGE: usize = 4_096;
/// Largest JSON body of the agent. Listings and searches are smaller; a large patch lists many
/// files.
const MAX_BODY: u64 = 16 * 1024 * 1024;
/// Values and names in a body.
const MAX_BODY_NODES: usize = 500_000;
/// Larger bodies spill to a file until parsing is admitted.
const MAX_IN_MEMORY_BYTES: usize = 64 * 1024;
const BODY_TIMEOUT: Duration = Duration::from_secs(120);
/// Reply timeout for operations without a limit of their own.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a write may stall without progress: hostile code can stop the receiver.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection that carries one request.
#[derive(Debug)]
pub(crate) struct Channel(AgentConnection);

impl AgentLink {
    /// Sends a request on a parked connection, which is dedicated to it from then on.
    pub(crate) async fn open(&self, request: &Request) -> Result<Channel, LinkError> {
        let mut bytes = Vec::new();
        encode_message(request, &mut bytes);
        // A connection may break between the check and the write while the agent reconnects to a
        // restarted worker.
        for _ in 0..3 {
            let mut connection = self.take().await?;
            // The length prefix is not part of the frame.
            let (size, limit) = (bytes.len() - 4, connection.max_frame);
            if size > limit {
                return Err(LinkError::TooLarge { size, limit });
            }
            match write_all(&mut connection.stream, &bytes, SEND_TIMEOUT).await {
                Ok(()) => return Ok(Channel(connection)),
                Err(LinkError::Gone) => {}
                Err(error) => return Err(error),
            }
        }
        Err(LinkError::Gone)
    }

    /// Sends a request and waits for its single reply.
    pub(crate) async fn call(&self, request: &Request) -> Result<Reply, ApiError> {
        let mut channel = self.open(request).await.map_err(unavailable)?;
        channel.reply(REPLY_TIMEOUT).await
    }
}

impl Channel {
    /// The newest version of encoded patches that the agent reads; 0 if it reads diffs only.
    pub(crate) const fn encoded_patches(&self) -> u32 {
        self.0.encoded_patches
    }

    /// The newest version of the runner's protocol that the agent relays; 0 if it has no runner.
    pub(crate) const fn runner(&self) -> u32 {
        self.0.runner
    }

    pub(crate) async fn next(&mut self) -> Result<Frame, LinkError> {
        self.0.read().await
    }

    pub(crate) async fn send(&mut self, frame: &Frame) -> Result<(), LinkError> {
        let mut bytes = Vec::new();
        encode(frame, &mut bytes);
        write_all(&mut self.0.stream, &bytes, SEND_TIMEOUT).await
    }

    /// The next control message; an error reply becomes an error.
    pub(crate) async fn reply(&mut self, limit: Duration) -> Result<Reply, ApiError> {
        let frame = tokio::time::timeout(limit, self.next())
            .await
            .map_err(|_| {
                ApiError::new(
                    ErrorCode::AgentUnavailable,
                    "the agent did not reply in time",
                )
            })?;
        match frame.map_err(unavailable)? {
            Frame::Json(json) => match serde_json::from_slice(&json) {
                Ok(Reply::Error(error)) => Err(agent_problem(error).into()),
                Ok(reply) => Ok(reply),
                Err(error) => Err(unavailable(LinkError::Protocol(error.to_string()))),
            },
            _ => Err(unexpected("data instead of a reply")),
        }
    }

    /// The next piece of a body; `None` at the end.
    pub(crate) async fn data(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, ApiError> {
        let frame = tokio::time::timeout(limit, self.next())
            .await
            .map_err(|_| ApiError::new(ErrorCode::AgentUnavailable, "the agent stopped sending"))?;
        match frame.map_err(unavailable)? {
            Frame::Data(data) => Ok(Some(data)),
            Frame::End => Ok(None),
            Frame::Json(json) => match serde_json::from_slice(&json) {
                Ok(Reply::Error(error)) => Err(agent_problem(error).into()),
                _ => Err(unexpected("a reply instead of data")),
            },
            _ => Err(unexpected("output instead of data")),
        }
    }

    /// Reads a `Body` reply and the JSON that follows it.
    pub(crate) async fn body<T: serde::de::DeserializeOwned>(
        &mut self,
        limit: Duration,
        directory: &Path,
    ) -> Result<AgentBody<T>, ApiError> {
        match self.reply(limit).await? {
            Reply::Body => {}
            other => return Err(unexpected(&format!("{other:?}"))),
        }
        let timed_out = |_| {
            ApiError::new(
                ErrorCode::AgentUnavailable,
                "the agent did not send its whole reply in time",
            )
        };
        let (mut file, size, nodes) =
            tokio::time::timeout(BODY_TIMEOUT, self.spool_body(directory))
                .await
                .map_err(timed_out)??;
        let room = json::room(size, nodes).await;
        let parse = move || {
            let mut bytes = Vec::with_capacity(size);
            file.rewind()
                .and_then(|()| file.read_to_end(&mut bytes))
                .map_err(|error| spool_failed(&error))?;
            serde_json::from_slice(&bytes)
                .map_err(|error| unavailable(LinkError::Protocol(error.to_string())))
        };
        Ok(AgentBody {
            value: compute::run(size, parse).await?,
            size,
            room,
        })
    }

    /// Spools the rest of a body; returns its size and its number of values.
    async fn spool_body(
        &mut self,
        directory: &Path,
    ) -> Result<(SpooledTempFile, usize, usize), ApiError> {
        let mut file = tempfile::spooled_tempfile_in(MAX_IN_MEMORY_BYTES, directory);
        let (mut size, mut scan) = (0, json::Scan::up_to(MAX_BODY_NODES));
        while let Some(piece) = self.data(REPLY_TIMEOUT).await? {
            size += piece.len() as u64;
            let scanned = scan.feed(&piece);
            if size > MAX_BODY || scanned.is_err() {
                let detail =
                    format!("the reply has more than {MAX_BODY} bytes or {MAX_BODY_NODES} values");
                return Err(Problem::new(ErrorCode::TooLarge, detail)
                    .with_remedy("Request less: a narrower path, fewer entries or results.")
                    .into());
            }
            file.write_all(&piece)
                .map_err(|error| spool_failed(&error))?;
        }
        Ok((
            file,
            usize::try_from(size).unwrap_or(usize::MAX),
            scan.nodes(),
        ))
    }

    /// Sends bytes in frames within the agent's limit. An agent that stops reading replies with an
    /// error, which takes precedence.
    pub(crate) async fn send_data(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        let mut frame = Vec::with_capacity(bytes.len().min(MAX_DATA) + 16);
        for piece in bytes.chunks(MAX_DATA) {
            frame.clear();
            encode_data(piece, &mut frame);
            write_all(&mut self.0.stream, &frame, SEND_TIMEOUT).await?;
        }
        Ok(())
    }
}

/// The agent's parsed reply, with the memory admission that it holds.
#[derive(Debug)]
pub(crate) struct AgentBody<T> {
    pub(crate) value: T,
    size: usize,
    room: json::Room,
}

impl<T: serde::Serialize> AgentBody<T> {
    /// The response to the caller.
    pub(crate) async fn into_response(self) -> Response {
        let Self { value, size, room } = self;
        let response = compute::run(size, || Json(value).into_response()).await;
        drop(room);
        response
    }
}

fn spool_failed(error: &std::io::Error) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("storing the agent's reply: {error}"),
    )
}

/// Writes all bytes as long as the peer makes progress.
async fn write_all(
    stream: &mut UnixStream,
    mut bytes: &[u8],
    limit: Duration,
) -> Result<(), LinkError> {
    while !bytes.is_empty() {
        match tokio::time::timeout(limit, stream.write(bytes)).await {
            Ok(Ok(count)) if count > 0 => bytes = &bytes[count..],
            Ok(_) => return Err(LinkError::Gone),
            Err(_) => return Err(LinkError::Stalled(limit)),
        }
    }
    Ok(())
}

/// Maps a link error to the error that callers see.
#[expect(clippy::needless_pass_by_value, reason = "used in map_err")]
pub(crate) fn unavailable(error: LinkError) -> ApiError {
    if matches!(error, LinkError::TooLarge { .. }) {
        let problem = Problem::new(ErrorCode::TooLarge, error.to_string());
        return problem
            .with_remedy(
                "Pass less in argv and env, or use a new session: agents of earlier versions \
                 have a lower limit.",
            )
            .into();
    }
    ApiError::new(ErrorCode::AgentUnavailable, error.to_string())
}

pub(crate) fn unexpected(received: &str) -> ApiError {
    unavailable(LinkError::Protocol(format!(
        "unexpected {}",
        received.chars().take(200).collect::<String>()
    )))
}

/// Maps an error of the agent to a problem. Its text may be hostile: it is truncated and treated as
/// plain text.
pub(crate) fn agent_problem(error: AgentError) -> Problem {
    let AgentError {
        code,
        mut message,
        errno,
        rejects,
        changed,
    } = error;
    if message.len() > MAX_MESSAGE {
        message = message.chars().take(MAX_MESSAGE / 4).collect();
    }
    let mut problem = Problem::new(code, message);
    if let Some(errno) = errno.filter(|errno| errno.len() <= 32) {
        problem = problem.with("errno", errno);
    }
    if code == ErrorCode::PatchRejected {
        problem = problem.with("rejects", serde_json::to_value(rejects).unwrap_or_default());
    }
    if let Some(FileChanges { changes, more }) = changed
        .map(validate_changes)
        .filter(|changed| !changed.changes.is_empty())
    {
        problem = problem
            .with("changes", serde_json::to_value(changes).unwrap_or_default())
            .with("more", more);
    }
    problem
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);

    #[tokio::test]
    async fn writing_to_a_stalled_agent_times_out_and_to_a_slow_one_does_not() {
        let bytes = vec![7; 4 * 1024 * 1024];
        let (mut worker, agent) = UnixStream::pair().expect("a pair");
        assert!(matches!(
            write_all(&mut worker, &bytes, LIMIT).await,
            Err(LinkError::Stalled(LIMIT))
        ));
        drop(agent);
        assert!(matches!(
            write_all(&mut worker, &bytes, LIMIT).await,
            Err(LinkError::Gone)
        ));

        // The whole write takes far longer than the limit, but no single step does.
        let (mut worker, mut agent) = UnixStream::pair().expect("a pair");
        let reading = async {
            let mut taken = 0;
            let mut buffer = vec![0; 512 * 1024];
            while taken < bytes.len() {
                tokio::time::sleep(LIMIT / 6).await;
                taken += agent.read(&mut buffer).await.expect("read");
            }
        };
        let (written, ()) = tokio::join!(write_all(&mut worker, &bytes, LIMIT), reading);
        assert!(written.is_ok(), "{written:?}");
    }
}

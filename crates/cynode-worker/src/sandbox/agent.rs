//! Requests to the agent, typed.

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
    checked,
    link::{AgentLink, Greeted, LinkError},
};

/// Longest text of a hostile agent that is passed on.
const MAX_MESSAGE: usize = 4_096;
/// Longest JSON body of an agent's answer. Listings and searches are shorter; a large patch names many files.
const MAX_BODY: u64 = 16 * 1024 * 1024;
/// Values and names in it.
const MAX_BODY_NODES: usize = 500_000;
/// What of it stays in memory while it comes; more is in a file until there is room to parse it.
const IN_MEMORY: usize = 64 * 1024;
/// How long all of it may take.
const WHOLE_BODY: Duration = Duration::from_secs(120);
/// How long an answer may take where the operation itself has no limit of its own.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// How long what is sent may wait without a byte of it being taken: hostile code can stop whoever should take it.
const SEND: Duration = Duration::from_secs(30);

/// A connection with a request on it.
#[derive(Debug)]
pub(crate) struct Channel(Greeted);

impl AgentLink {
    /// Writes a request on a parked connection, which belongs to it from then on.
    pub(crate) async fn open(&self, request: &Request) -> Result<Channel, LinkError> {
        let mut bytes = Vec::new();
        encode_message(request, &mut bytes);
        // A connection may break between the check and the write while a worker and its agent find each other again.
        for _ in 0..3 {
            let mut connection = self.take().await?;
            // The length itself is no part of a frame.
            let (size, limit) = (bytes.len() - 4, connection.max_frame);
            if size > limit {
                return Err(LinkError::TooLarge { size, limit });
            }
            match write_all(&mut connection.stream, &bytes, SEND).await {
                Ok(()) => return Ok(Channel(connection)),
                Err(LinkError::Gone) => {}
                Err(error) => return Err(error),
            }
        }
        Err(LinkError::Gone)
    }

    /// A request with one reply.
    pub(crate) async fn call(&self, request: &Request) -> Result<Reply, ApiError> {
        let mut channel = self.open(request).await.map_err(unavailable)?;
        channel.reply(ANSWER).await
    }
}

impl Channel {
    pub(crate) async fn next(&mut self) -> Result<Frame, LinkError> {
        self.0.read().await
    }

    pub(crate) async fn send(&mut self, frame: &Frame) -> Result<(), LinkError> {
        let mut bytes = Vec::new();
        encode(frame, &mut bytes);
        write_all(&mut self.0.stream, &bytes, SEND).await
    }

    /// The next control message; a refusal of the agent is an error.
    pub(crate) async fn reply(&mut self, limit: Duration) -> Result<Reply, ApiError> {
        let frame = tokio::time::timeout(limit, self.next())
            .await
            .map_err(|_| {
                ApiError::new(
                    ErrorCode::AgentUnavailable,
                    "the agent did not answer in time",
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

    /// The next piece of a body; `None` at its end.
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

    /// A `Body` reply with the JSON that follows it.
    pub(crate) async fn body<T: serde::de::DeserializeOwned>(
        &mut self,
        limit: Duration,
        directory: &Path,
    ) -> Result<AgentBody<T>, ApiError> {
        match self.reply(limit).await? {
            Reply::Body => {}
            other => return Err(unexpected(&format!("{other:?}"))),
        }
        let late = |_| {
            ApiError::new(
                ErrorCode::AgentUnavailable,
                "the agent did not send its whole answer in time",
            )
        };
        let (mut file, size, nodes) = tokio::time::timeout(WHOLE_BODY, self.spooled(directory))
            .await
            .map_err(late)??;
        let room = json::room(size, nodes).await;
        let parse = move || {
            let mut bytes = Vec::with_capacity(size);
            file.rewind()
                .and_then(|()| file.read_to_end(&mut bytes))
                .map_err(|error| spooling(&error))?;
            serde_json::from_slice(&bytes)
                .map_err(|error| unavailable(LinkError::Protocol(error.to_string())))
        };
        Ok(AgentBody {
            value: compute::apart(size, parse).await?,
            size,
            room,
        })
    }

    /// The rest of a body, its size and how many values it holds.
    async fn spooled(
        &mut self,
        directory: &Path,
    ) -> Result<(SpooledTempFile, usize, usize), ApiError> {
        let mut file = tempfile::spooled_tempfile_in(IN_MEMORY, directory);
        let (mut size, mut scan) = (0, json::Scan::up_to(MAX_BODY_NODES));
        while let Some(piece) = self.data(ANSWER).await? {
            size += piece.len() as u64;
            let scanned = scan.feed(&piece);
            if size > MAX_BODY || scanned.is_err() {
                let detail =
                    format!("the answer has more than {MAX_BODY} bytes or {MAX_BODY_NODES} values");
                return Err(Problem::new(ErrorCode::TooLarge, detail)
                    .with_remedy("Ask for less: a narrower path, fewer entries or results.")
                    .into());
            }
            file.write_all(&piece).map_err(|error| spooling(&error))?;
        }
        Ok((
            file,
            usize::try_from(size).unwrap_or(usize::MAX),
            scan.nodes(),
        ))
    }

    /// Sends bytes in pieces that the agent takes. An agent that stops reading answers with an error, which counts.
    pub(crate) async fn send_data(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        let mut frame = Vec::with_capacity(bytes.len().min(MAX_DATA) + 16);
        for piece in bytes.chunks(MAX_DATA) {
            frame.clear();
            encode_data(piece, &mut frame);
            write_all(&mut self.0.stream, &frame, SEND).await?;
        }
        Ok(())
    }
}

/// What an agent answered, with the room that it takes.
#[derive(Debug)]
pub(crate) struct AgentBody<T> {
    pub(crate) value: T,
    size: usize,
    room: json::Room,
}

impl<T: serde::Serialize> AgentBody<T> {
    /// The answer to the caller.
    pub(crate) async fn into_response(self) -> Response {
        let Self { value, size, room } = self;
        let response = compute::apart(size, || Json(value).into_response()).await;
        drop(room);
        response
    }
}

fn spooling(error: &std::io::Error) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("holding the agent's answer: {error}"),
    )
}

/// Writes all of it, as long as the other side goes on taking it.
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

/// An agent that can't be reached, as a caller sees it.
#[expect(clippy::needless_pass_by_value, reason = "used in map_err")]
pub(crate) fn unavailable(error: LinkError) -> ApiError {
    if matches!(error, LinkError::TooLarge { .. }) {
        let problem = Problem::new(ErrorCode::TooLarge, error.to_string());
        return problem.with_remedy("Pass less in argv and env. An agent that an earlier version started takes less than a new session's.").into();
    }
    ApiError::new(ErrorCode::AgentUnavailable, error.to_string())
}

pub(crate) fn unexpected(what: &str) -> ApiError {
    unavailable(LinkError::Protocol(format!(
        "unexpected {}",
        what.chars().take(200).collect::<String>()
    )))
}

/// A refusal of the agent. Its text is of hostile origin: cut, and never taken for more than text.
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
        .map(checked)
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
    async fn an_agent_that_takes_nothing_is_given_up_and_a_slow_one_is_not() {
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

        // All of it takes far longer than the limit; no single step does.
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

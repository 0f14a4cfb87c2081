//! The answer to a foreground exec. Long output is streamed as JSON, piece by piece.

use std::io;

use axum::{
    Json,
    body::{Body, Bytes},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{ErrorCode, ExecExit, ExecId, ExecResult, Truncated, encode_streams};
use cynode_service::{ApiError, compute};
use futures_util::stream;
use http::header;

use super::collect::CollectedStream;

/// Bytes of output per read. A multiple of three, so that each read encodes to base64 without
/// padding.
const READ_BYTES: usize = 48 * 1024;

/// How a command ended, and its output.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) exec_id: ExecId,
    pub(crate) exit: ExecExit,
    pub(super) stdout: CollectedStream,
    pub(super) stderr: CollectedStream,
    pub(super) truncated: Truncated,
}

fn unreadable(error: &io::Error) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("reading stored output: {error}"),
    )
}

impl Answer {
    /// Reads the whole answer into memory.
    pub(crate) fn into_result(self) -> Result<ExecResult, ApiError> {
        let whole = |stream: CollectedStream| stream.whole().map_err(|error| unreadable(&error));
        let (stdout, stderr, encoding) = encode_streams(whole(self.stdout)?, whole(self.stderr)?);
        Ok(ExecResult {
            exec_id: self.exec_id,
            exit: self.exit,
            stdout,
            stderr,
            encoding: encoding.to_owned(),
            truncated: self.truncated,
        })
    }

    pub(crate) async fn into_response(self) -> Result<Response, ApiError> {
        if self.stdout.is_in_memory() && self.stderr.is_in_memory() {
            return Ok(Json(self.into_result()?).into_response());
        }
        let Self {
            exec_id,
            exit,
            stdout,
            stderr,
            truncated,
        } = self;
        let size = usize::try_from(stdout.len() + stderr.len()).unwrap_or(usize::MAX);
        let is_text = || Ok(is_utf8(&stdout)? && is_utf8(&stderr)?);
        let is_text = compute::run(size, is_text)
            .await
            .map_err(|error| unreadable(&error))?;
        let encoding = if is_text { "utf-8" } else { "base64" };
        let rest = ExecResult {
            exec_id,
            exit,
            stdout: String::new(),
            stderr: String::new(),
            encoding: encoding.to_owned(),
            truncated,
        };
        let mut members = serde_json::to_value(&rest)
            .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        if let Some(members) = members.as_object_mut() {
            members.remove("stdout");
            members.remove("stderr");
        }
        let mut begin = members.to_string();
        begin.truncate(begin.len() - 1);
        begin.push_str(",\"stdout\":\"");
        let body = JsonBody {
            begin: Some(begin),
            streams: vec![(stderr, "\"}"), (stdout, "\",\"stderr\":\"")],
            at: 0,
            is_text,
        };
        let pieces = stream::unfold(Some(body), async |body| {
            let mut body = body?;
            match body.next() {
                Ok(Some(piece)) => Some((Ok(Bytes::from(piece)), Some(body))),
                Ok(None) => None,
                Err(error) => Some((Err(error), None)),
            }
        });
        Ok((
            [(header::CONTENT_TYPE, "application/json")],
            Body::from_stream(pieces),
        )
            .into_response())
    }
}

/// The JSON of an answer as it is streamed.
struct JsonBody {
    begin: Option<String>,
    /// The remaining streams in reverse order, each with the JSON that follows it.
    streams: Vec<(CollectedStream, &'static str)>,
    at: u64,
    is_text: bool,
}

impl JsonBody {
    fn next(&mut self) -> io::Result<Option<String>> {
        if let Some(begin) = self.begin.take() {
            return Ok(Some(begin));
        }
        let Some((stream, follows)) = self.streams.last() else {
            return Ok(None);
        };
        let mut bytes = stream.read(self.at, READ_BYTES)?;
        if bytes.is_empty() {
            let follows = (*follows).to_owned();
            self.streams.pop();
            self.at = 0;
            return Ok(Some(follows));
        }
        if !self.is_text {
            self.at += bytes.len() as u64;
            return Ok(Some(STANDARD.encode(bytes)));
        }
        bytes.truncate(whole_characters(&bytes)?);
        self.at += bytes.len() as u64;
        let text = String::from_utf8(bytes).map_err(io::Error::other)?;
        let quoted = serde_json::to_string(&text).map_err(io::Error::other)?;
        Ok(Some(quoted[1..quoted.len() - 1].to_owned()))
    }
}

/// The length of the prefix that consists of whole characters.
fn whole_characters(bytes: &[u8]) -> io::Result<usize> {
    match std::str::from_utf8(bytes) {
        Ok(_) => Ok(bytes.len()),
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
            Ok(error.valid_up_to())
        }
        Err(error) => Err(io::Error::other(error)),
    }
}

fn is_utf8(stream: &CollectedStream) -> io::Result<bool> {
    let mut at = 0;
    loop {
        let bytes = stream.read(at, READ_BYTES)?;
        if bytes.is_empty() {
            return Ok(true);
        }
        let Ok(length) = whole_characters(&bytes) else {
            return Ok(false);
        };
        // A character truncated by the end of the stream is invalid.
        if length < bytes.len() && at + bytes.len() as u64 == stream.len() {
            return Ok(false);
        }
        at += length as u64;
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{ExecVia, Stream};
    use serde_json::Value;

    use super::{
        super::collect::{Collector, SpillSpace},
        *,
    };

    async fn answer(stdout: &[u8], stderr: &[u8]) -> (Value, Value, bool) {
        let directory = tempfile::tempdir().expect("a directory");
        let spill_space = SpillSpace::new(directory.path().to_owned(), 1 << 30);
        let mut collector = Collector::new(1 << 20, &spill_space);
        for piece in stdout.chunks(10_007) {
            collector.push(Stream::Stdout, piece);
        }
        collector.push(Stream::Stderr, stderr);
        let make = || {
            let (stdout, stderr, truncated) = collector.finish();
            let exit = ExecExit {
                exit_code: Some(0),
                duration_ms: 1,
                ..ExecExit::never_ran(ExecVia::Agent)
            };
            Answer {
                exec_id: ExecId::from_uuid(uuid::Uuid::nil()),
                exit,
                stdout,
                stderr,
                truncated,
            }
        };
        let is_in_memory = make().stdout.is_in_memory();
        let response = make().into_response().await.expect("an answer");
        let sent = axum::body::to_bytes(response.into_body(), usize::MAX)
            .await
            .expect("read");
        (
            serde_json::from_slice(&sent).expect("JSON"),
            serde_json::to_value(make().into_result().expect("a result")).expect("JSON"),
            is_in_memory,
        )
    }

    #[tokio::test]
    async fn a_streamed_answer_equals_the_one_built_in_memory() {
        let words = "ab\"\\\n\u{1}ü€𐍈".repeat(30_000);
        let binary: Vec<u8> = (0..=255).cycle().take(200_001).collect();
        let cut = "€".repeat(100_000);
        for (stdout, stderr) in [
            (b"short".as_slice(), b"".as_slice()),
            (words.as_bytes(), b"x"),
            (words.as_bytes(), b"\xff"),
            (&binary, b"x"),
            (&cut.as_bytes()[..200_000], b""),
            (&b"x".repeat(3 << 20), b""),
        ] {
            let (streamed, whole, is_in_memory) = answer(stdout, stderr).await;
            assert_eq!(is_in_memory, stdout.len() < 100);
            assert!(streamed == whole, "{} bytes", stdout.len());
        }
    }
}

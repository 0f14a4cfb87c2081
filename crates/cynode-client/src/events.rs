//! The typed event streams of execs and watches.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use cynode_api::{ErrorCode, ExecExit, ExecId, FileEvent, Problem, Stream, StreamEvent};
use reqwest::Response;
use serde::Deserialize;

use crate::{
    Error, Result,
    client::display_url,
    sse::{self, Parser},
};

/// Keepalives arrive far more often, so a stream silent for this long is dead.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(90);

/// An event of a running command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecEvent {
    /// The first event, except on a resumed stream.
    Start {
        exec_id: ExecId,
        /// Set if earlier chunks are no longer retained.
        lost_before_seq: Option<u64>,
    },
    Output {
        seq: u64,
        stream: Stream,
        data: Bytes,
        /// Set if chunks before this one are no longer retained.
        lost_before_seq: Option<u64>,
    },
    /// The last event.
    Exit(ExecExit),
}

/// The events of a response, whatever they mean.
#[derive(Debug)]
pub(crate) struct RawEvents {
    response: Response,
    pub(crate) url: String,
    parser: Parser,
    parsed: VecDeque<sse::Event>,
}

impl RawEvents {
    pub(crate) fn new(response: Response) -> Self {
        Self {
            url: display_url(response.url()),
            response,
            parser: Parser::default(),
            parsed: VecDeque::new(),
        }
    }

    /// The next event; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<sse::Event>> {
        loop {
            if let Some(event) = self.parsed.pop_front() {
                return Ok(Some(event));
            }
            let chunk = match tokio::time::timeout(SILENCE_TIMEOUT, self.response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => return Ok(None),
                Ok(Err(error)) => return Err(Error::broken(&self.url, error)),
                Err(silence) => {
                    return Err(Error::Broken {
                        url: self.url.clone(),
                        source: Some(silence.into()),
                    });
                }
            };
            let mut events = Vec::new();
            self.parser
                .push(&chunk, &mut events)
                .map_err(|error| Error::answer(&self.url, error))?;
            self.parsed.extend(events);
        }
    }
}

/// The events of one exec, in order. After an error that [`Error::is_transient`], resume with
/// [`exec_output_stream`](crate::SessionClient::exec_output_stream) from [`Self::last_seq`].
#[derive(Debug)]
pub struct ExecEvents {
    events: RawEvents,
    last_seq: u64,
    finished: bool,
}

impl ExecEvents {
    pub(crate) fn new(response: Response, last_seq: u64) -> Self {
        Self {
            events: RawEvents::new(response),
            last_seq,
            finished: false,
        }
    }

    /// The number of the last chunk yielded.
    #[must_use]
    pub fn last_seq(&self) -> u64 {
        self.last_seq
    }

    /// The next event; `None` after `Exit`. A stream that stops without one is [`Error::Broken`].
    pub async fn next(&mut self) -> Result<Option<ExecEvent>> {
        while !self.finished {
            let Some(event) = self.events.next().await? else {
                return Err(Error::Broken {
                    url: self.events.url.clone(),
                    source: None,
                });
            };
            let Some(event) = typed(&event).map_err(|error| error.at(&self.events.url))? else {
                continue;
            };
            match &event {
                // A resumed stream may repeat chunks.
                ExecEvent::Output { seq, .. } if *seq <= self.last_seq => continue,
                ExecEvent::Output { seq, .. } => self.last_seq = *seq,
                ExecEvent::Exit(_) => self.finished = true,
                ExecEvent::Start { .. } => {}
            }
            return Ok(Some(event));
        }
        Ok(None)
    }
}

/// The changes of files below a watched path.
#[derive(Debug)]
pub struct FileEvents(RawEvents);

impl FileEvents {
    pub(crate) fn new(response: Response) -> Self {
        Self(RawEvents::new(response))
    }

    /// The next change; `None` when the watch has ended, as it does with its session and after an
    /// hour.
    pub async fn next(&mut self) -> Result<Option<FileEvent>> {
        while let Some(event) = self.0.next().await? {
            if let Some(change) = change(&event).map_err(|error| error.at(&self.0.url))? {
                return Ok(Some(change));
            }
        }
        Ok(None)
    }
}

/// `None` for events that are no changes: the start, and kinds that newer servers may send.
fn change(event: &sse::Event) -> Result<Option<FileEvent>, Malformed> {
    match event.event.as_str() {
        "created" | "modified" | "deleted" | "moved" | "overflow" => {
            serde_json::from_str(&event.data)
                .map(Some)
                .map_err(Malformed::Json)
        }
        "error" => Err(Malformed::Problem(Box::new(problem(&event.data)?))),
        _ => Ok(None),
    }
}

enum Malformed {
    Problem(Box<Problem>),
    Json(serde_json::Error),
    Missing(&'static str),
}

impl Malformed {
    fn at(self, url: &str) -> Error {
        match self {
            Self::Problem(problem) => Error::Problem(problem),
            Self::Json(error) => Error::answer(url, error),
            Self::Missing(message) => Error::answer(url, message),
        }
    }
}

/// An error in the middle of a stream has only a code and a detail.
fn problem(data: &str) -> Result<Problem, Malformed> {
    #[derive(Deserialize)]
    struct StreamProblem {
        code: ErrorCode,
        #[serde(default)]
        detail: String,
    }
    serde_json::from_str::<Problem>(data)
        .or_else(|_| {
            serde_json::from_str::<StreamProblem>(data)
                .map(|problem| Problem::new(problem.code, problem.detail))
        })
        .map_err(Malformed::Json)
}

/// `None` for unknown kinds of events, which newer servers may send.
fn typed(event: &sse::Event) -> Result<Option<ExecEvent>, Malformed> {
    let parse = || serde_json::from_str::<StreamEvent>(&event.data).map_err(Malformed::Json);
    let stream = match event.event.as_str() {
        "start" => {
            let StreamEvent {
                exec_id,
                lost_before_seq,
                ..
            } = parse()?;
            let exec_id = exec_id.ok_or(Malformed::Missing("a start event without exec_id"))?;
            return Ok(Some(ExecEvent::Start {
                exec_id,
                lost_before_seq,
            }));
        }
        "exit" => {
            return parse()?
                .exit
                .map(|exit| Some(ExecEvent::Exit(exit)))
                .ok_or(Malformed::Missing("an exit event without exit"));
        }
        "error" => return Err(Malformed::Problem(Box::new(problem(&event.data)?))),
        "stdout" => Stream::Stdout,
        "stderr" => Stream::Stderr,
        _ => return Ok(None),
    };
    let StreamEvent {
        seq,
        data,
        data_b64,
        lost_before_seq,
        ..
    } = parse()?;
    let data = match (data, data_b64) {
        (Some(text), None) => Bytes::from(text),
        (None, Some(bytes)) => Bytes::from(bytes.0),
        _ => return Err(Malformed::Missing("an output event needs data or data_b64")),
    };
    Ok(Some(ExecEvent::Output {
        seq,
        stream,
        data,
        lost_before_seq,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(event: &str, data: &str) -> Result<Option<ExecEvent>, Malformed> {
        typed(&sse::Event {
            event: event.into(),
            data: data.into(),
            id: None,
        })
    }

    #[test]
    fn output_is_decoded_from_text_and_from_base64() {
        let at = "2030-01-01T00:00:00Z";
        for (field, value) in [("data", "hi"), ("data_b64", "aGk=")] {
            let Ok(Some(ExecEvent::Output {
                seq: 4,
                stream: Stream::Stderr,
                data,
                ..
            })) = parse(
                "stderr",
                &format!(r#"{{"seq":4,"at":"{at}","{field}":"{value}"}}"#),
            )
            else {
                panic!("{field} was not understood")
            };
            assert_eq!(&data[..], b"hi");
        }
    }

    #[test]
    fn an_error_in_the_stream_is_a_problem() {
        assert!(matches!(
            parse("error", r#"{"code":"output_expired","detail":"gone"}"#),
            Err(Malformed::Problem(problem))
                if problem.is(ErrorCode::OutputExpired) && problem.detail == "gone"
        ));
        assert!(matches!(parse("error", "oops"), Err(Malformed::Json(_))));
    }

    #[test]
    fn changes_of_files_are_told_from_other_events() {
        let parse = |event: &str, data: &str| {
            change(&sse::Event {
                event: event.into(),
                data: data.into(),
                id: None,
            })
        };
        let moved = parse("moved", r#"{"path":"b","kind":"moved","from":"a"}"#);
        assert!(
            matches!(moved, Ok(Some(change)) if change.path == "b" && change.from.as_deref() == Some("a"))
        );
        assert!(matches!(parse("start", "{}"), Ok(None)));
        assert!(matches!(parse("weather", "sunny"), Ok(None)));
        assert!(matches!(parse("created", "sunny"), Err(Malformed::Json(_))));
        assert!(matches!(
            parse("error", r#"{"code":"session_ended","detail":"gone"}"#),
            Err(Malformed::Problem(problem)) if problem.is(ErrorCode::SessionEnded)
        ));
    }

    #[test]
    fn unknown_events_are_skipped_and_malformed_ones_are_errors() {
        assert!(matches!(parse("weather", "sunny"), Ok(None)));
        assert!(matches!(parse("stdout", "sunny"), Err(Malformed::Json(_))));
        assert!(matches!(
            parse("exit", r#"{"seq":1,"at":"2030-01-01T00:00:00Z"}"#),
            Err(Malformed::Missing(_))
        ));
    }
}

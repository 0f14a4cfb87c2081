//! Requests for the output of a command in both APIs: a page, or an event stream.

use std::time::Duration;

use axum::{
    Json,
    response::{IntoResponse as _, Response},
};
use cynode_api::{ExecExit, ExecId, OutputPage, OutputQuery, exec_limits::MAX_WAIT_MS};
use http::HeaderMap;
use time::OffsetDateTime;

use crate::{
    ApiError,
    events::{accepts_events, without_output},
};

/// The size of a page whose request does not name one.
pub const DEFAULT_PAGE_BYTES: u64 = 1 << 20;

/// A validated request for output.
#[derive(Clone, Copy, Debug)]
pub struct OutputRequest {
    pub after_seq: u64,
    pub max_bytes: Option<u64>,
    pub tail_bytes: Option<u64>,
    /// How long to wait for new output.
    pub wait: Duration,
    /// The client wants an event stream instead of a page.
    pub events: bool,
    /// False if the client resumes a stream.
    pub from_start: bool,
}

impl OutputRequest {
    pub fn new(query: &OutputQuery, headers: &HeaderMap) -> Result<Self, ApiError> {
        let resumed = match headers.get("last-event-id") {
            None => None,
            Some(id) => Some(
                id.to_str()
                    .ok()
                    .and_then(|id| id.parse().ok())
                    .ok_or_else(|| ApiError::invalid("Last-Event-ID: is not a sequence number"))?,
            ),
        };
        let wait = query.wait_ms.unwrap_or(0);
        if wait > MAX_WAIT_MS {
            return Err(ApiError::invalid(format!("wait_ms: at most {MAX_WAIT_MS}")));
        }
        Ok(Self {
            after_seq: resumed.or(query.after_seq).unwrap_or(0),
            max_bytes: query.max_bytes,
            tail_bytes: query.tail_bytes,
            wait: Duration::from_millis(wait),
            events: accepts_events(headers),
            from_start: resumed.is_none(),
        })
    }

    /// The response for a command without output; `ended` if it has ended.
    pub fn empty_response(
        self,
        exec_id: ExecId,
        next_seq: u64,
        ended: Option<(ExecExit, OffsetDateTime)>,
    ) -> Response {
        if self.events {
            return without_output(exec_id, self.from_start, ended);
        }
        Json(OutputPage {
            chunks: Vec::new(),
            next_seq,
            lost_before_seq: None,
            exit: ended.map(|(exit, _)| exit),
        })
        .into_response()
    }
}

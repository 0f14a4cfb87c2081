//! `files:watch`: changes of files as they happen.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::State,
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{ErrorCode, FileEvent, Problem, SessionId, file_limits::MAX_WATCHES};
use cynode_sba_proto::{FileOp, Reply, Request};
use cynode_service::{ApiError, QueryParams, events::EVENT_HEADERS};
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use utoipa::IntoParams;

use super::{
    Api,
    files::{FILE_TIMEOUT, check_path, check_text_path},
    sessions::Id,
};
use crate::{
    sandbox::{Channel, unavailable, unexpected},
    sessions::OpenWatch,
};

const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WatchQuery {
    /// A directory, or a file; `/workspace` by default.
    path: Option<String>,
    /// A path that is not UTF-8, in base64.
    path_b64: Option<String>,
}

/// Watch a file, or a directory with what is below it, up to 1,000 directories. The events
/// `created`, `modified`, `deleted` and `moved` carry a `FileEvent`, and `overflow` says that some
/// were left out; `start` comes first. Events are numbered and not replayed. A watch ends with its
/// session, and after an hour.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/files:watch", tag = "files",
    params(("id" = SessionId, Path), WatchQuery),
    responses(
        (status = 200, content_type = "text/event-stream", body = serde_json::Value),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn watch(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    QueryParams(query): QueryParams<WatchQuery>,
) -> Result<Response, ApiError> {
    let path = match (&query.path, &query.path_b64) {
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "path and path_b64 are mutually exclusive",
            ));
        }
        (None, Some(path)) => check_path(
            STANDARD
                .decode(path)
                .map_err(|error| ApiError::invalid(format!("path_b64: not base64: {error}")))?,
            "path_b64",
        )?,
        (path, None) => check_text_path(path.as_deref().unwrap_or("."), "path")?,
    };
    let (_, live) = api.sessions.live(id)?;
    let slot = live.open_watch().ok_or_else(|| {
        ApiError::new(
            ErrorCode::TooManyRequests,
            format!("the session has {MAX_WATCHES} watches already"),
        )
        .with_remedy("End a watch first, or watch a common parent directory.")
    })?;
    let request = Request::File {
        op: FileOp::Watch { path },
    };
    let mut channel = live.link()?.open(&request).await.map_err(unavailable)?;
    match channel.reply(FILE_TIMEOUT).await {
        Ok(Reply::Body) => Ok(events(channel, slot, api.stop.clone())),
        Ok(other) => Err(unexpected(&format!("{other:?}"))),
        // The path was checked: the agent does not know the operation.
        Err(error)
            if error.is(ErrorCode::InvalidRequest) && error.detail.starts_with("not a request") =>
        {
            Err(ApiError::new(
                ErrorCode::AgentRequired,
                "the agent of this session is older and can't watch files",
            )
            .with_remedy("Use a new session, or list the files at intervals."))
        }
        Err(error) => Err(error),
    }
}

fn events(channel: Channel, slot: OpenWatch, stop: CancellationToken) -> Response {
    let state = Some((channel, slot, stop, 0_u64, true));
    let events = stream::unfold(state, async |state| {
        let (mut channel, slot, stop, mut number, is_first) = state?;
        let mut text = String::new();
        if is_first {
            text.push_str("event: start\nid: 0\ndata: {}\n\n");
        } else {
            let next = tokio::select! {
                next = tokio::time::timeout(KEEPALIVE_INTERVAL, channel.data(FILE_TIMEOUT)) => next,
                () = stop.cancelled() => return None,
            };
            match next {
                Err(_) => text.push_str(": keepalive\n\n"),
                Ok(Ok(Some(batch))) => {
                    // The sandbox may send anything: only what is a change gets through.
                    let changes: Vec<FileEvent> = serde_json::from_slice(&batch).ok()?;
                    let events = changes.iter().zip(number + 1..).map(|(change, id)| {
                        let kind = json!(change.kind);
                        let kind = kind.as_str().unwrap_or_default();
                        format!("event: {kind}\nid: {id}\ndata: {}\n\n", json!(change))
                    });
                    text.extend(events);
                    number += changes.len() as u64;
                }
                Ok(_) => return None,
            }
        }
        Some((
            Ok::<_, Infallible>(Bytes::from(text)),
            Some((channel, slot, stop, number, false)),
        ))
    });
    (EVENT_HEADERS, Body::from_stream(events)).into_response()
}

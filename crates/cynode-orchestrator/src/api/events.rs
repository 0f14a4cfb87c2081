//! Events: long poll and stream.

use std::{convert::Infallible, time::Duration};

use axum::{
    Json,
    extract::State,
    response::{
        IntoResponse as _, Response,
        sse::{Event as SseEvent, KeepAlive, Sse},
    },
};
use cynode_api::{Event, EventPage, Problem, TaskId, TokenKind, event_limits};
use cynode_service::{ApiError, QueryParams};
use futures_util::{Stream, stream};
use http::{HeaderMap, header};
use serde::Deserialize;
use tokio::time::Instant;
use utoipa::IntoParams;

use crate::{
    Orchestrator,
    caller::{AnyCaller, Caller},
    db::EventScope,
};

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventQuery {
    /// The cursor of the last event that the reader has; 0 for all that are kept.
    after: Option<i64>,
    /// How long to wait for an event, up to 60,000.
    wait_ms: Option<u64>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    task_id: Option<TaskId>,
}

/// State changes of jobs and sessions, in order, each delivered at least once to a reader that
/// continues from its last cursor. With `Accept: text/event-stream`, a stream whose ids are
/// cursors.
#[utoipa::path(get, path = "/v1/events", tag = "events", params(EventQuery),
    responses((status = 200, content((EventPage = "application/json"), (String = "text/event-stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    AnyCaller(caller): AnyCaller,
    headers: HeaderMap,
    QueryParams(query): QueryParams<EventQuery>,
) -> Result<Response, ApiError> {
    let readable = readable(&caller, query.task_id);
    let limit = super::limit(Some(query.limit.unwrap_or(event_limits::DEFAULT_PAGE)))?;
    if query
        .wait_ms
        .is_some_and(|wait| wait > event_limits::MAX_WAIT_MS)
    {
        return Err(ApiError::invalid(format!(
            "wait_ms: must be at most {}",
            event_limits::MAX_WAIT_MS
        )));
    }
    if query.after.is_some_and(|after| after < 0) {
        return Err(ApiError::invalid("after: must not be negative"));
    }
    let streams = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("text/event-stream"));
    if streams {
        let resumed = match headers.get("last-event-id") {
            None => None,
            Some(id) => Some(
                id.to_str()
                    .ok()
                    .and_then(|id| id.parse().ok())
                    .ok_or_else(|| ApiError::invalid("Last-Event-ID: must be a cursor"))?,
            ),
        };
        let after = resumed.or(query.after).unwrap_or(0);
        // An invalid cursor must fail before the stream starts.
        let first = orchestrator.db.events(&readable, after, limit).await?;
        return Ok(
            Sse::new(streamed(orchestrator, caller, readable, first, limit))
                .keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
                .into_response(),
        );
    }
    let deadline = Instant::now() + Duration::from_millis(query.wait_ms.unwrap_or(0));
    let mut after = query.after.unwrap_or(0);
    let mut news = orchestrator.readers.subscribe();
    loop {
        let (items, next_cursor) = orchestrator.db.events(&readable, after, limit).await?;
        if !items.is_empty() || Instant::now() >= deadline || orchestrator.stop.is_cancelled() {
            return Ok(Json(EventPage { items, next_cursor }).into_response());
        }
        after = next_cursor;
        wait(&orchestrator, &mut news, deadline).await;
        if !caller.is_token_valid(&orchestrator).await {
            return Err(ApiError::new(
                cynode_api::ErrorCode::Unauthorized,
                "the token is no longer valid",
            ));
        }
    }
}

/// Waits for new events, at most for a second: a notification of another orchestrator may be lost.
async fn wait(
    orchestrator: &Orchestrator,
    news: &mut tokio::sync::watch::Receiver<u64>,
    deadline: Instant,
) {
    let next = (Instant::now() + Duration::from_secs(1)).min(deadline);
    tokio::select! {
        _ = tokio::time::timeout_at(next, news.changed()) => {}
        () = orchestrator.stop.cancelled() => {}
    }
}

fn readable(caller: &Caller, only_task: Option<TaskId>) -> EventScope {
    match caller.kind {
        TokenKind::User => EventScope {
            all: caller.scope.is_admin,
            owner: Some(*caller.scope.user_id.as_uuid()),
            project_id: None,
            task_ids: Vec::new(),
            only_task,
        },
        _ => EventScope {
            all: false,
            owner: None,
            project_id: caller.project_id,
            task_ids: caller.task_ids.clone(),
            only_task,
        },
    }
}

/// Streams events with their cursors as ids, until the reader or the orchestrator goes away.
fn streamed(
    orchestrator: Orchestrator,
    caller: Caller,
    readable: EventScope,
    first: (Vec<Event>, i64),
    limit: u32,
) -> impl Stream<Item = Result<SseEvent, Infallible>> {
    let news = orchestrator.readers.subscribe();
    let is_full = move |items: &[Event]| items.len() == limit as usize;
    let (items, after) = first;
    let more = is_full(&items);
    stream::unfold(
        (items.into_iter(), after, news, more),
        move |(mut items, mut after, mut news, mut more)| {
            let (orchestrator, caller, readable) =
                (orchestrator.clone(), caller.clone(), readable.clone());
            async move {
                loop {
                    if let Some(event) = items.next() {
                        let sent = SseEvent::default()
                            .id(event.cursor.to_string())
                            .event(event.kind.clone())
                            .json_data(&event)
                            .ok()?;
                        return Some((Ok(sent), (items, after, news, more)));
                    }
                    if orchestrator.stop.is_cancelled() {
                        return None;
                    }
                    // After a full page the next one is available already.
                    if !more {
                        wait(
                            &orchestrator,
                            &mut news,
                            Instant::now() + Duration::from_secs(60),
                        )
                        .await;
                    }
                    if !caller.is_token_valid(&orchestrator).await {
                        return None;
                    }
                    // While the database is unavailable, the stream stays open.
                    more = false;
                    if let Ok((found, next)) = orchestrator.db.events(&readable, after, limit).await
                    {
                        more = is_full(&found);
                        (items, after) = (found.into_iter(), next);
                    }
                }
            }
        },
    )
}

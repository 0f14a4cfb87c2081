//! Remembers calls, so that a caller that lost the response can look up the outcome.
//!
//! Invariants: a call with an id is recorded before it has any effect, and is not evicted while in
//! flight. Every call that arrived after [`Call::remembered_since`] is recorded. A call reported as
//! not received is barred: if it arrives later, it is rejected. The memory is bounded and not
//! persistent: a restarted worker reports that it remembers nothing earlier.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Instant,
};

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cynode_api::{
    CALL_HEADER, Call, CallId, CallState, ErrorCode, Problem, RESULT_HEADER, ascii_json,
    call_limits::{MAX_REMEMBERED_BYTES, MAX_REMEMBERED_CALLS, MAX_RESULT_BYTES},
};
use cynode_service::ApiError;
use http::{HeaderMap, HeaderValue, Method};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Map, Value};
use time::OffsetDateTime;

/// Problem members that describe what a call did, besides why it failed.
const RESULT_MEMBERS: &[&str] = &["errno", "taken", "changes", "more"];

#[derive(Debug)]
struct RememberedCall {
    arrived_at: Instant,
    state: CallState,
    status: Option<u16>,
    result: Option<Box<str>>,
}

impl RememberedCall {
    fn bytes(&self) -> usize {
        self.result.as_ref().map_or(0, |result| result.len())
    }
}

#[derive(Debug)]
struct CallMemory {
    calls: HashMap<CallId, RememberedCall>,
    /// Finished calls in eviction order.
    finished: VecDeque<CallId>,
    /// Calls that must not run any more, and their eviction order.
    barred: HashSet<CallId>,
    barred_order: VecDeque<CallId>,
    bytes: usize,
    /// Monotonic, so that setting the clock can't move it back.
    since: Instant,
    max_calls: usize,
    max_bytes: usize,
}

impl CallMemory {
    fn get(&self, id: CallId) -> Call {
        let unknown = Call {
            call_id: id,
            state: CallState::NotFound,
            status: None,
            result: None,
            remembered_since: None,
            now: None,
        };
        let Some(call) = self.calls.get(&id) else {
            let now = OffsetDateTime::now_utc();
            return Call {
                remembered_since: Some(now - self.since.elapsed()),
                now: Some(now),
                ..unknown
            };
        };
        let result = call
            .result
            .as_ref()
            .and_then(|result| serde_json::from_str(result).ok());
        Call {
            state: call.state,
            status: call.status,
            result,
            ..unknown
        }
    }

    fn change(&mut self, id: CallId, change: impl FnOnce(&mut RememberedCall)) {
        if let Some(call) = self.calls.get_mut(&id) {
            self.bytes -= call.bytes();
            change(call);
            self.bytes += call.bytes();
        }
    }

    fn end(&mut self, id: CallId, change: impl FnOnce(&mut RememberedCall)) {
        self.change(id, change);
        self.finished.push_back(id);
        self.evict();
    }

    /// Evicts finished calls beyond the limits.
    fn evict(&mut self) {
        while self.calls.len() > self.max_calls || self.bytes > self.max_bytes {
            let Some(call) = self
                .finished
                .pop_front()
                .and_then(|id| self.calls.remove(&id))
            else {
                return;
            };
            self.bytes -= call.bytes();
            self.since = self.since.max(call.arrived_at);
        }
    }
}

/// The remembered calls of one worker.
#[derive(Debug)]
pub struct Calls(Mutex<CallMemory>);

impl Default for Calls {
    fn default() -> Self {
        Self::bounded(MAX_REMEMBERED_CALLS, MAX_REMEMBERED_BYTES)
    }
}

impl Calls {
    fn bounded(max_calls: usize, max_bytes: usize) -> Self {
        let since = Instant::now();
        let (calls, barred, finished, barred_order) = Default::default();
        Self(Mutex::new(CallMemory {
            calls,
            finished,
            barred,
            barred_order,
            bytes: 0,
            since,
            max_calls,
            max_bytes,
        }))
    }

    /// Looks up a call.
    #[must_use]
    pub fn get(&self, id: CallId) -> Call {
        self.0.lock().get(id)
    }

    /// Looks up a call and, if it has not arrived, bars it: the caller relies on the answer.
    #[must_use]
    pub fn bar(&self, id: CallId) -> Call {
        let mut memory = self.0.lock();
        let call = memory.get(id);
        if call.state == CallState::NotFound && memory.barred.insert(id) {
            memory.barred_order.push_back(id);
            if memory.barred_order.len() > memory.max_calls
                && let Some(oldest) = memory.barred_order.pop_front()
            {
                memory.barred.remove(&oldest);
            }
        }
        call
    }

    /// Records a call. Returns `None` if its id is taken by an earlier call, or if the memory is
    /// full of calls in flight. Fails if the call was barred.
    fn begin(self: &Arc<Self>, id: CallId) -> Result<Option<RunningCall>, ApiError> {
        let mut memory = self.0.lock();
        if memory.barred.contains(&id) {
            return Err(ApiError::new(
                ErrorCode::CallTooLate,
                format!("call {id} arrived after it was reported as lost; it had no effect"),
            ));
        }
        if memory.calls.contains_key(&id) {
            return Ok(None);
        }
        let arrived_at = Instant::now();
        if memory.calls.len() >= memory.max_calls && memory.finished.is_empty() {
            memory.since = arrived_at;
            return Ok(None);
        }
        memory.calls.insert(
            id,
            RememberedCall {
                arrived_at,
                state: CallState::Running,
                status: None,
                result: None,
            },
        );
        memory.evict();
        Ok(Some(RunningCall(ResultRecorder {
            calls: Arc::clone(self),
            id,
        })))
    }
}

/// Records the result of a call before its response is complete.
#[derive(Clone, Debug)]
pub struct ResultRecorder {
    calls: Arc<Calls>,
    id: CallId,
}

impl ResultRecorder {
    pub fn record(&self, result: &impl Serialize) {
        let result = ascii_json(result).into_boxed_str();
        self.calls
            .0
            .lock()
            .change(self.id, |call| call.result = Some(result));
    }
}

/// A call in flight. Dropping it without a response marks the call abandoned.
#[derive(Debug)]
struct RunningCall(ResultRecorder);

impl RunningCall {
    fn finish(self, response: &Response) {
        let result = response
            .headers()
            .get(RESULT_HEADER)
            .and_then(|value| value.to_str().ok())
            .map(Box::from);
        self.0.calls.0.lock().change(self.0.id, |call| {
            (call.state, call.status) = (CallState::Answered, Some(response.status().as_u16()));
            call.result = result.or(call.result.take());
        });
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        self.0.calls.0.lock().end(self.0.id, |call| {
            if call.state == CallState::Running {
                call.state = CallState::Abandoned;
            }
        });
    }
}

/// The call id in the request's header.
fn call_id(headers: &HeaderMap) -> Result<Option<CallId>, ApiError> {
    let mut values = headers.get_all(CALL_HEADER).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    let id = value
        .to_str()
        .ok()
        .and_then(|text| text.parse().ok())
        .filter(|_| values.next().is_none());
    id.map(Some)
        .ok_or_else(|| ApiError::invalid("X-Cynode-Call: must be one UUID"))
}

/// Middleware that records a call with an id, and adds the result header to failed calls other than
/// reads.
pub async fn remember(
    State(calls): State<Arc<Calls>>,
    mut request: Request,
    next: Next,
) -> Response {
    let open_call =
        match call_id(request.headers()).and_then(|id| id.map_or(Ok(None), |id| calls.begin(id))) {
            Ok(open_call) => open_call,
            Err(error) => return error.into_response(),
        };
    if let Some(open_call) = &open_call {
        request.extensions_mut().insert(open_call.0.clone());
    }
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let mut response = next.run(request).await;
    if !is_read && let Some(problem) = response.extensions().get::<ApiError>() {
        let result = failure_result(problem);
        insert_result(&result, &mut response);
    }
    if let Some(open_call) = open_call {
        open_call.finish(&response);
    }
    response
}

fn failure_result(problem: &Problem) -> Map<String, Value> {
    let members = RESULT_MEMBERS
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), problem.extensions.get(*name)?.clone())));
    std::iter::once(("code".to_owned(), problem.code.clone().into()))
        .chain(members)
        .collect()
}

/// Adds the result of a call to the headers of its response.
pub fn with_result(result: &impl Serialize, response: impl IntoResponse) -> Response {
    let mut response = response.into_response();
    insert_result(result, &mut response);
    response
}

fn insert_result(result: &impl Serialize, response: &mut Response) {
    let json = ascii_json(result);
    match HeaderValue::from_str(&json) {
        Ok(value) if json.len() <= MAX_RESULT_BYTES => {
            drop(response.headers_mut().insert(RESULT_HEADER, value));
        }
        _ => tracing::error!(
            bytes = json.len(),
            "The result of a call exceeds the header limit."
        ),
    }
}

#[cfg(test)]
mod tests;

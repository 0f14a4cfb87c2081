//! Calls that are remembered, for whoever lost their answer and has to know what came of them.
//!
//! What must stay true: a call that bears an id is known before it does anything, and until it is forgotten; while it is being
//! answered it is not forgotten; whatever came after [`Call::remembered_since`] is known; one that was barred, because somebody was told
//! that it did not come, does not come any more. Memory is bounded, and in memory only: a
//! worker that starts anew says that it remembers nothing of before.

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
    call_limits::{MAX_RESULT_BYTES, REMEMBERED, REMEMBERED_BYTES},
};
use cynode_service::ApiError;
use http::{HeaderMap, HeaderValue, Method};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Map, Value};
use time::OffsetDateTime;

/// Members of a problem that belong to what a call did, and not only to why it was refused.
const TOLD_OF_REFUSALS: &[&str] = &["errno", "taken", "changes", "more"];

#[derive(Debug)]
struct Remembered {
    came_at: Instant,
    state: CallState,
    status: Option<u16>,
    result: Option<Box<str>>,
}

impl Remembered {
    fn bytes(&self) -> usize {
        self.result.as_ref().map_or(0, |result| result.len())
    }
}

#[derive(Debug)]
struct Memory {
    known: HashMap<CallId, Remembered>,
    /// Those that are over, in the order in which they are forgotten.
    over: VecDeque<CallId>,
    /// Those that may not come any more, and the order in which that is forgotten.
    barred: HashSet<CallId>,
    bars: VecDeque<CallId>,
    bytes: usize,
    /// No clock that is set makes this earlier than it is.
    since: Instant,
    most: usize,
    most_bytes: usize,
}

impl Memory {
    fn get(&self, id: CallId) -> Call {
        let nothing = Call {
            call_id: id,
            state: CallState::NotFound,
            status: None,
            result: None,
            remembered_since: None,
            now: None,
        };
        let Some(call) = self.known.get(&id) else {
            let now = OffsetDateTime::now_utc();
            return Call {
                remembered_since: Some(now - self.since.elapsed()),
                now: Some(now),
                ..nothing
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
            ..nothing
        }
    }

    fn change(&mut self, id: CallId, change: impl FnOnce(&mut Remembered)) {
        if let Some(call) = self.known.get_mut(&id) {
            self.bytes -= call.bytes();
            change(call);
            self.bytes += call.bytes();
        }
    }

    fn end(&mut self, id: CallId, change: impl FnOnce(&mut Remembered)) {
        self.change(id, change);
        self.over.push_back(id);
        self.forget();
    }

    /// Keeps to the limits.
    fn forget(&mut self) {
        while self.known.len() > self.most || self.bytes > self.most_bytes {
            let Some(call) = self.over.pop_front().and_then(|id| self.known.remove(&id)) else {
                return;
            };
            self.bytes -= call.bytes();
            self.since = self.since.max(call.came_at);
        }
    }
}

/// The calls of one worker.
#[derive(Debug)]
pub struct Calls(Mutex<Memory>);

impl Default for Calls {
    fn default() -> Self {
        Self::bounded(REMEMBERED, REMEMBERED_BYTES)
    }
}

impl Calls {
    fn bounded(most: usize, most_bytes: usize) -> Self {
        let since = Instant::now();
        let (known, barred, over, bars) = Default::default();
        Self(Mutex::new(Memory {
            known,
            over,
            barred,
            bars,
            bytes: 0,
            since,
            most,
            most_bytes,
        }))
    }

    /// What is known of a call.
    #[must_use]
    pub fn get(&self, id: CallId) -> Call {
        self.0.lock().get(id)
    }

    /// The same; and if it has not come, it does not come any more: whoever is told so goes by it.
    #[must_use]
    pub fn bar(&self, id: CallId) -> Call {
        let mut memory = self.0.lock();
        let call = memory.get(id);
        if call.state == CallState::NotFound && memory.barred.insert(id) {
            memory.bars.push_back(id);
            if memory.bars.len() > memory.most
                && let Some(oldest) = memory.bars.pop_front()
            {
                memory.barred.remove(&oldest);
            }
        }
        call
    }

    /// Begins to remember a call. `None` when its id is taken, by a call that stays what is known under it, or when so many are being
    /// answered that there is no room. Refused when somebody was told that it did not come.
    fn begin(self: &Arc<Self>, id: CallId) -> Result<Option<Answering>, ApiError> {
        let mut memory = self.0.lock();
        if memory.barred.contains(&id) {
            return Err(ApiError::new(
                ErrorCode::CallTooLate,
                format!("call {id} was taken for lost before it came; nothing was done"),
            ));
        }
        if memory.known.contains_key(&id) {
            return Ok(None);
        }
        let came_at = Instant::now();
        if memory.known.len() >= memory.most && memory.over.is_empty() {
            memory.since = came_at;
            return Ok(None);
        }
        memory.known.insert(
            id,
            Remembered {
                came_at,
                state: CallState::Running,
                status: None,
                result: None,
            },
        );
        memory.forget();
        Ok(Some(Answering(Noting {
            calls: Arc::clone(self),
            id,
        })))
    }
}

/// By which the one who answers a call says what is known of it before there is an answer.
#[derive(Clone, Debug)]
pub struct Noting {
    calls: Arc<Calls>,
    id: CallId,
}

impl Noting {
    pub fn note(&self, result: &impl Serialize) {
        let result = ascii_json(result).into_boxed_str();
        self.calls
            .0
            .lock()
            .change(self.id, |call| call.result = Some(result));
    }
}

/// A call that is being answered. When this goes before there is an answer, its caller has gone.
#[derive(Debug)]
struct Answering(Noting);

impl Answering {
    fn answered(self, answer: &Response) {
        let result = answer
            .headers()
            .get(RESULT_HEADER)
            .and_then(|value| value.to_str().ok())
            .map(Box::from);
        self.0.calls.0.lock().change(self.0.id, |call| {
            (call.state, call.status) = (CallState::Answered, Some(answer.status().as_u16()));
            call.result = result.or(call.result.take());
        });
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.calls.0.lock().end(self.0.id, |call| {
            if call.state == CallState::Running {
                call.state = CallState::Abandoned;
            }
        });
    }
}

/// The id that a call bears.
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

/// Remembers a call that bears an id, whatever it asks for, and has refusals of what would have changed something say so in the header too.
pub async fn remember(
    State(calls): State<Arc<Calls>>,
    mut request: Request,
    next: Next,
) -> Response {
    let answering =
        match call_id(request.headers()).and_then(|id| id.map_or(Ok(None), |id| calls.begin(id))) {
            Ok(answering) => answering,
            Err(error) => return error.into_response(),
        };
    if let Some(answering) = &answering {
        request.extensions_mut().insert(answering.0.clone());
    }
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    let mut answer = next.run(request).await;
    if !reads && let Some(ApiError(problem)) = answer.extensions().get() {
        let refusal = refusal(problem);
        insert(&refusal, &mut answer);
    }
    if let Some(answering) = answering {
        answering.answered(&answer);
    }
    answer
}

fn refusal(problem: &Problem) -> Map<String, Value> {
    let told = TOLD_OF_REFUSALS
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), problem.extensions.get(*name)?.clone())));
    std::iter::once(("code".to_owned(), problem.code.clone().into()))
        .chain(told)
        .collect()
}

/// An answer that says in its header what the call did.
pub fn told(result: &impl Serialize, answer: impl IntoResponse) -> Response {
    let mut answer = answer.into_response();
    insert(result, &mut answer);
    answer
}

fn insert(result: &impl Serialize, answer: &mut Response) {
    let json = ascii_json(result);
    match HeaderValue::from_str(&json) {
        Ok(value) if json.len() <= MAX_RESULT_BYTES => {
            drop(answer.headers_mut().insert(RESULT_HEADER, value))
        }
        _ => tracing::error!(
            bytes = json.len(),
            "The result of a call does not fit into a header."
        ),
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use serde_json::json;

    use super::*;

    fn begin(calls: &Arc<Calls>, id: CallId) -> Answering {
        calls.begin(id).expect("in time").expect("room")
    }

    fn answer(calls: &Arc<Calls>, result: &Value) -> CallId {
        let id = CallId::generate();
        begin(calls, id).answered(&told(result, StatusCode::OK));
        id
    }

    fn state(calls: &Calls, id: CallId) -> CallState {
        calls.get(id).state
    }

    #[test]
    fn a_call_is_known_while_it_is_answered_and_after() {
        let calls = Arc::new(Calls::default());
        let id = CallId::generate();
        let unknown = calls.get(id);
        assert_eq!(
            (
                unknown.state,
                unknown.remembered_since <= unknown.now,
                unknown.result
            ),
            (CallState::NotFound, true, None)
        );
        let answering = begin(&calls, id);
        let running = calls.get(id);
        assert_eq!(
            (
                running.state,
                running.status,
                running.result,
                running.remembered_since
            ),
            (CallState::Running, None, None, None)
        );
        answering.0.note(&json!({ "exec_id": "x" }));
        assert_eq!(
            (state(&calls, id), calls.get(id).result),
            (CallState::Running, Some(json!({ "exec_id": "x" })))
        );
        answering.answered(&told(
            &json!({ "exit_code": 0, "path": "ü" }),
            StatusCode::CREATED,
        ));
        let answered = calls.get(id);
        assert_eq!(
            (answered.state, answered.status, answered.result),
            (
                CallState::Answered,
                Some(201),
                Some(json!({ "exit_code": 0, "path": "ü" }))
            )
        );
    }

    #[test]
    fn a_call_whose_caller_went_away_is_abandoned_with_what_was_known_of_it() {
        let calls = Arc::new(Calls::default());
        let (noted, silent) = (CallId::generate(), CallId::generate());
        let answering = begin(&calls, noted);
        answering.0.note(&json!({ "exec_id": "x" }));
        drop((answering, begin(&calls, silent)));
        let abandoned = calls.get(noted);
        assert_eq!(
            (abandoned.state, abandoned.status, abandoned.result),
            (CallState::Abandoned, None, Some(json!({ "exec_id": "x" })))
        );
        assert_eq!(
            (state(&calls, silent), calls.get(silent).result),
            (CallState::Abandoned, None)
        );
    }

    #[test]
    fn what_came_first_under_an_id_stays() {
        let calls = Arc::new(Calls::default());
        let id = CallId::generate();
        let answering = begin(&calls, id);
        assert!(calls.begin(id).expect("in time").is_none());
        answering.answered(&told(&json!({ "first": true }), StatusCode::OK));
        assert!(calls.begin(id).expect("in time").is_none());
        assert_eq!(calls.get(id).result, Some(json!({ "first": true })));
    }

    #[test]
    fn what_was_said_not_to_have_come_does_not_come_any_more() {
        let calls = Arc::new(Calls::bounded(100, usize::MAX));
        let (asked, other) = (CallId::generate(), CallId::generate());
        let first = calls.bar(asked);
        assert_eq!(
            (first.state, calls.bar(asked).state),
            (CallState::NotFound, CallState::NotFound)
        );
        assert!(first.remembered_since <= first.now);
        assert!(
            calls
                .begin(asked)
                .is_err_and(|error| error.0.is(ErrorCode::CallTooLate))
        );
        drop(begin(&calls, other));
        assert_eq!(calls.bar(other).state, CallState::Abandoned);
        // Asking about many takes a bounded place, and none from what is remembered.
        for _ in 0..300 {
            drop(calls.bar(CallId::generate()));
        }
        let memory = calls.0.lock();
        assert_eq!(
            (memory.barred.len(), memory.bars.len(), memory.known.len()),
            (100, 100, 1)
        );
        drop(memory);
        assert_eq!(calls.get(other).state, CallState::Abandoned);
    }

    #[test]
    fn the_oldest_are_forgotten_at_the_bound_and_nothing_that_is_being_answered() {
        let calls = Arc::new(Calls::bounded(100, usize::MAX));
        let long = CallId::generate();
        let answering = begin(&calls, long);
        let ids: Vec<CallId> = (0..300)
            .map(|number| answer(&calls, &json!({ "number": number })))
            .collect();
        assert_eq!(calls.0.lock().known.len(), 100);
        let kept = |id: &CallId| state(&calls, *id) == CallState::Answered;
        assert!(!ids[..201].iter().any(kept) && ids[201..].iter().all(kept));
        assert_eq!(state(&calls, long), CallState::Running);
        // What is said of the time holds for each: those that came later than it are all known.
        assert!(
            calls.get(ids[0]).remembered_since.is_some(),
            "it is not found"
        );
        let memory = calls.0.lock();
        let since = memory.since;
        assert!(
            ids[201..]
                .iter()
                .all(|id| memory.known[id].came_at >= since)
        );
        drop(memory);
        // It is the newest of what is over, although it came first.
        answering.answered(&StatusCode::OK.into_response());
        assert_eq!(
            (state(&calls, long), state(&calls, ids[201])),
            (CallState::Answered, CallState::Answered)
        );
        for _ in 0..99 {
            answer(&calls, &json!({}));
        }
        assert_eq!(
            (state(&calls, long), state(&calls, ids[299])),
            (CallState::Answered, CallState::NotFound)
        );
        answer(&calls, &json!({}));
        assert_eq!(state(&calls, long), CallState::NotFound);
        assert!(
            calls.0.lock().since >= since,
            "forgetting one that came early does not turn the time back"
        );
    }

    #[test]
    fn long_results_are_forgotten_before_they_fill_the_memory() {
        let calls = Arc::new(Calls::bounded(1_000, 10_000));
        let ids: Vec<CallId> = (0..50)
            .map(|_| answer(&calls, &json!({ "x": "y".repeat(980) })))
            .collect();
        let memory = calls.0.lock();
        let bytes: usize = memory.known.values().map(Remembered::bytes).sum();
        assert!(
            (9_000..=10_000).contains(&bytes)
                && bytes == memory.bytes
                && memory.known.len() == memory.over.len(),
            "{bytes}"
        );
        drop(memory);
        assert_eq!(
            (state(&calls, ids[49]), state(&calls, ids[0])),
            (CallState::Answered, CallState::NotFound)
        );
    }

    #[test]
    fn what_finds_no_room_is_not_taken_for_what_never_came() {
        let calls = Arc::new(Calls::bounded(2, usize::MAX));
        let _held = [
            begin(&calls, CallId::generate()),
            begin(&calls, CallId::generate()),
        ];
        let (before, id) = (Instant::now(), CallId::generate());
        assert!(calls.begin(id).expect("in time").is_none());
        assert!(calls.0.lock().since >= before);
    }

    #[test]
    fn an_id_is_one_uuid() {
        let id = CallId::generate();
        let headers = |values: &[&str]| {
            values
                .iter()
                .map(|value| {
                    (
                        http::HeaderName::from_static(CALL_HEADER),
                        value.parse().expect("a value"),
                    )
                })
                .collect()
        };
        assert_eq!(call_id(&headers(&[])).ok(), Some(None));
        assert_eq!(call_id(&headers(&[&id.to_string()])).ok(), Some(Some(id)));
        for bad in [
            &[""][..],
            &["nonsense"],
            &[&id.to_string(), &CallId::generate().to_string()],
        ] {
            assert!(
                call_id(&headers(bad)).is_err_and(|error| error.0.is(ErrorCode::InvalidRequest)),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_refusal_says_its_code_and_what_was_done_all_the_same() {
        let problem = Problem::new(ErrorCode::StdinFull, "it is ü")
            .with("taken", 3)
            .with("rejects", json!(["much"]));
        assert_eq!(
            Value::Object(refusal(&problem)),
            json!({ "code": "stdin_full", "taken": 3 })
        );
    }

    #[test]
    fn what_does_not_fit_into_a_header_is_left_out() {
        let answer = told(
            &json!({ "x": "y".repeat(MAX_RESULT_BYTES) }),
            StatusCode::OK,
        );
        assert!(!answer.headers().contains_key(RESULT_HEADER));
    }
}

use http::StatusCode;
use serde_json::json;

use super::*;

fn begin(calls: &Arc<Calls>, id: CallId) -> RunningCall {
    calls.begin(id).expect("in time").expect("room")
}

fn answer(calls: &Arc<Calls>, result: &Value) -> CallId {
    let id = CallId::generate();
    begin(calls, id).finish(&with_result(result, StatusCode::OK));
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
    let open_call = begin(&calls, id);
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
    open_call.0.record(&json!({ "exec_id": "x" }));
    assert_eq!(
        (state(&calls, id), calls.get(id).result),
        (CallState::Running, Some(json!({ "exec_id": "x" })))
    );
    open_call.finish(&with_result(
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
fn a_call_without_a_response_is_abandoned_with_its_recorded_result() {
    let calls = Arc::new(Calls::default());
    let (recorded, silent) = (CallId::generate(), CallId::generate());
    let open_call = begin(&calls, recorded);
    open_call.0.record(&json!({ "exec_id": "x" }));
    drop((open_call, begin(&calls, silent)));
    let abandoned = calls.get(recorded);
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
fn the_first_call_under_an_id_is_retained() {
    let calls = Arc::new(Calls::default());
    let id = CallId::generate();
    let open_call = begin(&calls, id);
    assert!(calls.begin(id).expect("in time").is_none());
    open_call.finish(&with_result(&json!({ "first": true }), StatusCode::OK));
    assert!(calls.begin(id).expect("in time").is_none());
    assert_eq!(calls.get(id).result, Some(json!({ "first": true })));
}

#[test]
fn a_call_reported_as_lost_is_rejected_if_it_arrives_later() {
    let calls = Arc::new(Calls::bounded(100, usize::MAX));
    let (barred, other) = (CallId::generate(), CallId::generate());
    let first = calls.bar(barred);
    assert_eq!(
        (first.state, calls.bar(barred).state),
        (CallState::NotFound, CallState::NotFound)
    );
    assert!(first.remembered_since <= first.now);
    assert!(
        calls
            .begin(barred)
            .is_err_and(|error| error.is(ErrorCode::CallTooLate))
    );
    drop(begin(&calls, other));
    assert_eq!(calls.bar(other).state, CallState::Abandoned);
    // Bars are bounded too, and evict no recorded call.
    for _ in 0..300 {
        drop(calls.bar(CallId::generate()));
    }
    let memory = calls.0.lock();
    assert_eq!(
        (
            memory.barred.len(),
            memory.barred_order.len(),
            memory.calls.len()
        ),
        (100, 100, 1)
    );
    drop(memory);
    assert_eq!(calls.get(other).state, CallState::Abandoned);
}

#[test]
fn finished_calls_are_evicted_oldest_first_and_calls_in_flight_are_kept() {
    let calls = Arc::new(Calls::bounded(100, usize::MAX));
    let long = CallId::generate();
    let open_call = begin(&calls, long);
    let ids: Vec<CallId> = (0..300)
        .map(|number| answer(&calls, &json!({ "number": number })))
        .collect();
    assert_eq!(calls.0.lock().calls.len(), 100);
    let kept = |id: &CallId| state(&calls, *id) == CallState::Answered;
    assert!(!ids[..201].iter().any(kept) && ids[201..].iter().all(kept));
    assert_eq!(state(&calls, long), CallState::Running);
    // `since` holds for every call: all that arrived later are recorded.
    assert!(
        calls.get(ids[0]).remembered_since.is_some(),
        "an evicted call has no start of memory"
    );
    let memory = calls.0.lock();
    let since = memory.since;
    assert!(
        ids[201..]
            .iter()
            .all(|id| memory.calls[id].arrived_at >= since)
    );
    drop(memory);
    // It finishes last although it arrived first.
    open_call.finish(&StatusCode::OK.into_response());
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
        "evicting an early call moved `since` back"
    );
}

#[test]
fn long_results_are_evicted_within_the_byte_limit() {
    let calls = Arc::new(Calls::bounded(1_000, 10_000));
    let ids: Vec<CallId> = (0..50)
        .map(|_| answer(&calls, &json!({ "x": "y".repeat(980) })))
        .collect();
    let memory = calls.0.lock();
    let bytes: usize = memory.calls.values().map(RememberedCall::bytes).sum();
    assert!(
        (9_000..=10_000).contains(&bytes)
            && bytes == memory.bytes
            && memory.calls.len() == memory.finished.len(),
        "{bytes}"
    );
    drop(memory);
    assert_eq!(
        (state(&calls, ids[49]), state(&calls, ids[0])),
        (CallState::Answered, CallState::NotFound)
    );
}

#[test]
fn a_call_that_was_not_recorded_is_not_reported_as_lost() {
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
            call_id(&headers(bad)).is_err_and(|error| error.is(ErrorCode::InvalidRequest)),
            "{bad:?}"
        );
    }
}

#[test]
fn a_failure_reports_its_code_and_partial_effects() {
    let problem = Problem::new(ErrorCode::StdinFull, "it is ü")
        .with("taken", 3)
        .with("rejects", json!(["much"]));
    assert_eq!(
        Value::Object(failure_result(&problem)),
        json!({ "code": "stdin_full", "taken": 3 })
    );
}

#[test]
fn a_result_beyond_the_header_limit_is_omitted() {
    let answer = with_result(
        &json!({ "x": "y".repeat(MAX_RESULT_BYTES) }),
        StatusCode::OK,
    );
    assert!(!answer.headers().contains_key(RESULT_HEADER));
}

//! Each bound of a request, at the bound and beyond it.

mod common;

use common::{
    CHAT, CHAT_COMPLETIONS, COMPLETIONS, EMBED, GENERATE, LIMITS, SHOW, TEXT_EMBEDDINGS, judge,
    judge_by, with,
};
use cynode_api::sba::limits::MAX_MODEL_BYTES;
use cynode_inference::{
    AllowedModels, Endpoint, Refusal, RefusalCode, Rules, TokenLimits, Upstream,
    limits::{
        MAX_BODY_BYTES, MAX_BODY_DEPTH, MAX_BODY_NODES, MAX_CHOICES, MAX_COMPLETION_TOKENS,
        MAX_CONTEXT_TOKENS, MAX_DIMENSIONS, MAX_IMAGES, MAX_INDEX, MAX_INPUTS,
        MAX_KEEP_ALIVE_SECONDS, MAX_MESSAGES, MAX_NAME_BYTES, MAX_PARTS, MAX_PROMPTS,
        MAX_STOP_BYTES, MAX_STOPS, MAX_TOOL_CALLS, MAX_TOOLS, MAX_TOP_LOGPROBS,
    },
};
use serde_json::{Value, json};

/// Asserts that a field may reach a bound but not exceed it.
fn assert_bound<N: TryInto<i64>>(path: &str, field: &str, most: N, value: impl Fn(i64) -> Value) {
    let most = most.try_into().unwrap_or_else(|_| panic!("{field}"));
    let judge = |count| judge(path, with(path, field, value(count)).as_bytes());
    let at_bound = judge(most);
    assert!(at_bound.is_ok(), "{path} {field} at {most}: {at_bound:?}");
    let refusal = judge(most + 1).expect_err("beyond the bound");
    assert_eq!(
        refusal.code,
        RefusalCode::InvalidRequest,
        "{path} {field}: {refusal}"
    );
    assert!(refusal.message.starts_with(field), "{refusal}");
}

fn repeated(item: &Value, count: i64) -> Value {
    Value::Array(vec![item.clone(); usize::try_from(count).expect("a count")])
}

fn long(count: i64) -> Value {
    "x".repeat(usize::try_from(count).expect("a count")).into()
}

#[test]
fn lists_are_bounded() {
    let message = json!({"role": "user", "content": "x"});
    assert_bound(CHAT, "messages", MAX_MESSAGES, |count| {
        repeated(&message, count)
    });
    assert_bound(CHAT_COMPLETIONS, "messages", MAX_MESSAGES, |count| {
        repeated(&message, count)
    });
    let part = json!({"type": "text", "text": "x"});
    assert_bound(
        CHAT_COMPLETIONS,
        "messages",
        MAX_PARTS,
        |count| json!([{"role": "user", "content": repeated(&part, count)}]),
    );
    let image = json!("AAAA");
    assert_bound(GENERATE, "images", MAX_IMAGES, |count| {
        repeated(&image, count)
    });
    assert_bound(
        CHAT,
        "messages",
        MAX_IMAGES,
        |count| json!([{"role": "user", "images": repeated(&image, count)}]),
    );
    let tool = json!({"type": "function", "function": {"name": "f"}});
    assert_bound(CHAT, "tools", MAX_TOOLS, |count| repeated(&tool, count));
    assert_bound(CHAT_COMPLETIONS, "tools", MAX_TOOLS, |count| {
        repeated(&tool, count)
    });
    let call = json!({"function": {"name": "f", "arguments": {}}});
    assert_bound(
        CHAT,
        "messages",
        MAX_TOOL_CALLS,
        |count| json!([{"role": "assistant", "tool_calls": repeated(&call, count)}]),
    );
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}});
    assert_bound(
        CHAT_COMPLETIONS,
        "messages",
        MAX_TOOL_CALLS,
        |count| json!([{"role": "assistant", "tool_calls": repeated(&call, count)}]),
    );
    let stop = json!("x");
    assert_bound(CHAT_COMPLETIONS, "stop", MAX_STOPS, |count| {
        repeated(&stop, count)
    });
    assert_bound(
        CHAT,
        "options",
        MAX_STOPS,
        |count| json!({"stop": repeated(&stop, count)}),
    );
    assert_bound(COMPLETIONS, "prompt", MAX_PROMPTS, |count| {
        repeated(&stop, count)
    });
    assert_bound(EMBED, "input", MAX_INPUTS, |count| repeated(&stop, count));
    assert_bound(TEXT_EMBEDDINGS, "input", MAX_INPUTS, |count| {
        repeated(&stop, count)
    });
}

#[test]
fn texts_are_bounded() {
    assert_bound(CHAT_COMPLETIONS, "stop", MAX_STOP_BYTES, long);
    assert_bound(CHAT_COMPLETIONS, "stop", MAX_STOP_BYTES, |count| {
        json!([long(count)])
    });
    assert_bound(
        CHAT_COMPLETIONS,
        "tools",
        MAX_NAME_BYTES,
        |count| json!([{"type": "function", "function": {"name": long(count)}}]),
    );
    assert_bound(
        CHAT,
        "messages",
        MAX_NAME_BYTES,
        |count| json!([{"role": "tool", "tool_name": long(count)}]),
    );
}

#[test]
fn numbers_are_bounded() {
    assert_bound(CHAT_COMPLETIONS, "n", MAX_CHOICES, Value::from);
    assert_bound(COMPLETIONS, "n", MAX_CHOICES, Value::from);
    assert_bound(
        CHAT_COMPLETIONS,
        "top_logprobs",
        MAX_TOP_LOGPROBS,
        Value::from,
    );
    assert_bound(CHAT, "top_logprobs", MAX_TOP_LOGPROBS, Value::from);
    assert_bound(COMPLETIONS, "logprobs", MAX_TOP_LOGPROBS, Value::from);
    assert_bound(EMBED, "dimensions", MAX_DIMENSIONS, Value::from);
    assert_bound(TEXT_EMBEDDINGS, "dimensions", MAX_DIMENSIONS, Value::from);
    assert_bound(CHAT, "messages", MAX_INDEX, |index| {
        let function = json!({"index": index, "name": "f", "arguments": {}});
        json!([{"role": "assistant", "tool_calls": [{"function": function}]}])
    });
}

#[test]
fn tokens_and_durations_are_bounded_by_the_limits_of_the_sandbox() {
    let tokens = LIMITS.completion_tokens;
    assert_bound(CHAT_COMPLETIONS, "max_tokens", tokens, Value::from);
    assert_bound(
        CHAT_COMPLETIONS,
        "max_completion_tokens",
        tokens,
        Value::from,
    );
    assert_bound(COMPLETIONS, "max_tokens", tokens, Value::from);
    assert_bound(
        CHAT,
        "options",
        tokens,
        |count| json!({"num_predict": count}),
    );
    assert_bound(
        GENERATE,
        "options",
        LIMITS.context_tokens,
        |count| json!({"num_ctx": count}),
    );
    assert_bound(EMBED, "keep_alive", LIMITS.keep_alive_seconds, Value::from);
    assert_bound(
        EMBED,
        "keep_alive",
        LIMITS.keep_alive_seconds * 1_000,
        |time| json!(format!("{time}ms")),
    );
    for (path, field) in [
        (CHAT_COMPLETIONS, "max_tokens"),
        (COMPLETIONS, "max_tokens"),
        (EMBED, "keep_alive"),
    ] {
        for (value, is_valid) in [(1, true), (0, false), (-1, false)] {
            let body = with(path, field, json!(value));
            assert_eq!(judge(path, body.as_bytes()).is_ok(), is_valid, "{body}");
        }
    }
}

#[test]
fn without_other_limits_the_constants_are_the_limits() {
    let accepts = |path: &str, field: &str, value: Value| {
        let body = with(path, field, value);
        judge_by(
            TokenLimits::default(),
            Upstream::Local,
            path,
            body.as_bytes(),
        )
        .is_ok()
    };
    for (more, is_valid) in [(0, true), (1, false)] {
        let tokens = MAX_COMPLETION_TOKENS + more;
        assert_eq!(accepts(COMPLETIONS, "max_tokens", json!(tokens)), is_valid);
        let options = json!({"num_ctx": MAX_CONTEXT_TOKENS + more});
        assert_eq!(accepts(CHAT, "options", options), is_valid);
        let seconds = MAX_KEEP_ALIVE_SECONDS + more;
        assert_eq!(
            accepts(CHAT, "keep_alive", json!(format!("{seconds}s"))),
            is_valid
        );
    }
    // Ollama's own default is to keep a model for five minutes.
    assert_eq!(MAX_KEEP_ALIVE_SECONDS, 300);
}

#[test]
fn a_body_is_bounded_in_bytes() {
    let body = |length: usize| {
        let empty = with(GENERATE, "prompt", json!("")).len();
        with(GENERATE, "prompt", json!("x".repeat(length - empty)))
    };
    let judge = |length| judge(GENERATE, body(length).as_bytes());
    assert_eq!(body(MAX_BODY_BYTES).len(), MAX_BODY_BYTES);
    assert!(judge(MAX_BODY_BYTES).is_ok());
    let refusal = judge(MAX_BODY_BYTES + 1).expect_err("too large");
    assert_eq!(refusal.code, RefusalCode::TooLarge);
    assert_eq!(refusal.status(), 413);
    assert_eq!(
        refusal.message,
        format!("$: has more than {MAX_BODY_BYTES} bytes")
    );
}

#[test]
fn a_body_is_bounded_in_values() {
    let judge = |nodes: usize| {
        // The body, the format and two lists, four names and the name of the model count too.
        let body = with(CHAT, "format", json!({"enum": vec![0; nodes - 9]}));
        judge(CHAT, body.as_bytes())
    };
    assert!(judge(MAX_BODY_NODES).is_ok());
    let refusal = judge(MAX_BODY_NODES + 1).expect_err("too large");
    assert_eq!(refusal.code, RefusalCode::TooLarge, "{refusal}");
    assert!(
        refusal.message.contains("100000 values and names"),
        "{refusal}"
    );
}

#[test]
fn a_body_is_bounded_in_depth() {
    let judge = |depth: usize| {
        let lists = depth - 2;
        let value = format!("{}{}", "[".repeat(lists), "]".repeat(lists));
        let body = with(CHAT, "format", json!({"enum": "X"}));
        judge(CHAT, body.replace("\"X\"", &value).as_bytes())
    };
    assert!(judge(MAX_BODY_DEPTH).is_ok());
    let refusal = judge(MAX_BODY_DEPTH + 1).expect_err("too deep");
    assert_eq!(refusal.code, RefusalCode::InvalidRequest);
    assert!(
        refusal.message.contains("deeper than 64 levels"),
        "{refusal}"
    );
    // A text that is only depth is refused as soon as the bound is reached.
    assert!(judge(1_000_000).is_err());
}

#[test]
fn names_of_models_are_bounded() {
    let judge = |length: usize| -> Result<_, Refusal> {
        let name = "x".repeat(length);
        let models = AllowedModels::new([name.clone()]);
        let rules = Rules {
            models: &models,
            limits: LIMITS,
            upstream: Upstream::Local,
        };
        let body = with(SHOW, "model", json!(name));
        rules.judge(&Endpoint::Show, body.as_bytes())
    };
    assert!(judge(MAX_MODEL_BYTES).is_ok());
    assert!(judge(MAX_MODEL_BYTES + 1).is_err());
    assert_eq!(MAX_MODEL_BYTES, MAX_NAME_BYTES);
}

#[test]
fn a_hostile_body_takes_linear_time() {
    let unknown = (0..40_000).map(|index| format!("\"f{index}\":0,"));
    let unknown = unknown.collect::<Vec<_>>().concat();
    let twice = "\"model\":\"m\",".repeat(40_000);
    for fields in [unknown, twice] {
        let started = std::time::Instant::now();
        let body = format!("{{{fields}\"model\":\"m\"}}");
        let refusal = judge(SHOW, body.as_bytes()).expect_err("refused");
        assert!(refusal.message.len() < 2_000);
        assert!(started.elapsed() < std::time::Duration::from_secs(5));
    }
}

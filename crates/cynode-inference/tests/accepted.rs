//! Accepted requests, each with the body that is forwarded.

mod common;

use common::{
    CHAT, CHAT_COMPLETIONS, COMPLETIONS, EMBED, EMBEDDINGS, GENERATE, LIMITS, SHOW,
    TEXT_EMBEDDINGS, WITH_BODY, forwarded, judge, judge_by, smallest, with,
};
use cynode_inference::{AnswerFormat, Upstream};
use serde_json::json;

/// A path, a body, and the forwarded body; empty if the body is forwarded unchanged.
const ACCEPTED: &[(&str, &str, &str)] = &[
    // Ollama's chat.
    (
        CHAT,
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"options":{"num_predict":1000}}"#,
    ),
    (
        CHAT,
        r#"{"options":{"num_predict":5,"stop":[]},"messages":[],"stream":false,"model":"m"}"#,
        r#"{"messages":[],"stream":false,"model":"m","options":{"num_predict":5,"stop":[]}}"#,
    ),
    (
        CHAT,
        r#"{"model":"m","messages":[{"role":"user","content":"what?","images":["iVBORw0KGgo="]}],"options":{"num_predict":1}}"#,
        "",
    ),
    (
        CHAT,
        r#"{"model":"m","messages":[{"role":"assistant","content":"","thinking":"…","tool_calls":[{"id":"1","type":"function","function":{"index":0,"name":"fetch","arguments":{"url":"https://example.com","deep":[{"file":"file:///etc/passwd"}]}}}]},{"role":"tool","tool_name":"fetch","tool_call_id":"1","content":"http://x"}],"options":{"num_predict":1}}"#,
        "",
    ),
    (
        CHAT,
        r##"{"model":"m","messages":[],"tools":[{"type":"function","function":{"name":"f","description":"See https://example.com.","parameters":{"type":"object","$defs":{"p":{"type":"string"}},"properties":{"url":{"$ref":"#/$defs/p"},"id":{"type":"string","format":"uri"},"$ref":{"type":"string"}},"required":["url"]}}}],"options":{"num_predict":1}}"##,
        "",
    ),
    (
        CHAT,
        r#"{"model":"m","messages":[],"format":"json","think":true,"truncate":true,"shift":false,"logprobs":true,"top_logprobs":20,"options":{"num_predict":1}}"#,
        "",
    ),
    (
        CHAT,
        r#"{"model":"m","messages":[],"format":{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","additionalProperties":false},"think":"high","options":{"num_predict":1}}"#,
        "",
    ),
    (
        CHAT,
        r#"{"model":"m","messages":[],"options":{"num_ctx":4096,"num_predict":1000,"num_keep":-1,"repeat_last_n":64,"seed":-7,"temperature":0.8,"top_k":40,"top_p":0.9,"min_p":0.0,"typical_p":1,"repeat_penalty":1.1,"presence_penalty":-2,"frequency_penalty":1e-2,"stop":["\n","user:"]}}"#,
        r#"{"model":"m","messages":[],"options":{"num_ctx":4096,"num_predict":1000,"num_keep":-1,"repeat_last_n":64,"seed":-7,"temperature":0.8,"top_k":40,"top_p":0.9,"min_p":0.0,"typical_p":1,"repeat_penalty":1.1,"presence_penalty":-2,"frequency_penalty":0.01,"stop":["\n","user:"]}}"#,
    ),
    // Durations, rounded up to seconds.
    (
        CHAT,
        r#"{"model":"m","messages":[],"keep_alive":"1m0s","options":{"num_predict":1}}"#,
        r#"{"model":"m","messages":[],"keep_alive":60,"options":{"num_predict":1}}"#,
    ),
    (
        CHAT,
        r#"{"model":"m","messages":[],"keep_alive":1.5,"options":{"num_predict":1}}"#,
        r#"{"model":"m","messages":[],"keep_alive":2,"options":{"num_predict":1}}"#,
    ),
    // Fields that Ollama's own client sends without using them.
    (
        GENERATE,
        r#"{"model":"m","prompt":"hi","suffix":"","system":"","template":"","raw":false,"context":null,"images":null,"format":null,"options":null,"keep_alive":null}"#,
        r#"{"model":"m","prompt":"hi","system":"","options":{"num_predict":1000}}"#,
    ),
    (
        SHOW,
        r#"{"model":"m","system":"","template":"","verbose":false,"options":null,"name":""}"#,
        r#"{"model":"m"}"#,
    ),
    (
        GENERATE,
        r#"{"model":"m","prompt":"","system":"Be brief.","images":["AAAA"],"options":{"num_predict":1}}"#,
        "",
    ),
    (
        EMBED,
        r#"{"model":"m","input":["a","b"],"truncate":true,"dimensions":256,"options":{"num_ctx":512},"keep_alive":1}"#,
        "",
    ),
    (EMBED, r#"{"model":"m","input":"http://x"}"#, ""),
    (
        EMBEDDINGS,
        r#"{"model":"m","prompt":"a","keep_alive":"60s"}"#,
        r#"{"model":"m","prompt":"a","keep_alive":60}"#,
    ),
    // OpenAI's chat.
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","messages":[{"role":"developer","content":"Be brief."},{"role":"user","name":"ann","content":[{"type":"text","text":"see https://example.com"},{"type":"image_url","image_url":{"url":"data:image/png;base64,iVBORw0KGgo=","detail":"low"}},{"type":"input_audio","input_audio":{"data":"UklGRg==","format":"wav"}}]}]}"#,
        "",
    ),
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"url\":\"https://example.com\"}"}}]},{"role":"tool","tool_call_id":"1","content":"ok"}]}"#,
        "",
    ),
    // An answer of vLLM, sent back as a message.
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","messages":[{"role":"assistant","content":"hi","refusal":null,"annotations":[],"audio":null,"function_call":null,"tool_calls":[],"reasoning_content":null}]}"#,
        r#"{"model":"m","messages":[{"role":"assistant","content":"hi","tool_calls":[]}]}"#,
    ),
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","messages":[{"role":"assistant","content":[{"type":"refusal","refusal":"no"}],"reasoning":"…","reasoning_content":"…"}]}"#,
        "",
    ),
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"sandbox.session.exec","strict":true,"parameters":{}}},{"type":"function","function":{"name":"g"}}],"tool_choice":{"type":"function","function":{"name":"g"}},"parallel_tool_calls":false}"#,
        "",
    ),
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","messages":[{"role":"user","content":"x"}],"tool_choice":"required","response_format":{"type":"json_object"},"reasoning_effort":"none","verbosity":"low"}"#,
        "",
    ),
    (
        CHAT_COMPLETIONS,
        r##"{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"s","description":"d","strict":true,"schema":{"$ref":"#","$id":"s","default":{"url":"https://x"}}}}}"##,
        "",
    ),
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":1000,"n":8,"temperature":2,"top_p":1.0,"frequency_penalty":-2,"presence_penalty":2.0,"seed":9223372036854775807,"stop":"\n","logprobs":true,"top_logprobs":0,"response_format":{"type":"text"}}"#,
        "",
    ),
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","messages":[{"role":"user","content":"x"}],"tools":null,"stop":null,"max_tokens":null,"stream":null,"stream_options":null,"seed":null}"#,
        r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#,
    ),
    // The usage of streams is always requested.
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}"#,
        r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}],"stream_options":{"include_usage":true}}"#,
    ),
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","stream":true,"stream_options":{"include_usage":false},"messages":[{"role":"user","content":"x"}]}"#,
        r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"x"}]}"#,
    ),
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","stream":false,"messages":[{"role":"user","content":"x"}]}"#,
        "",
    ),
    // Local servers may know only `max_tokens`.
    (
        CHAT_COMPLETIONS,
        r#"{"model":"m","max_completion_tokens":7,"messages":[{"role":"user","content":"x"}]}"#,
        r#"{"model":"m","max_tokens":7,"messages":[{"role":"user","content":"x"}]}"#,
    ),
    (
        COMPLETIONS,
        r#"{"model":"m","prompt":["a","b"],"max_tokens":5,"n":2,"echo":true,"logprobs":5,"stop":["a","b"],"seed":0,"suffix":""}"#,
        r#"{"model":"m","prompt":["a","b"],"max_tokens":5,"n":2,"echo":true,"logprobs":5,"stop":["a","b"],"seed":0}"#,
    ),
    (
        COMPLETIONS,
        r#"{"model":"m","prompt":"a","stream":true}"#,
        r#"{"model":"m","prompt":"a","stream":true,"stream_options":{"include_usage":true}}"#,
    ),
    (
        TEXT_EMBEDDINGS,
        r#"{"model":"m","input":["a"],"encoding_format":"base64","dimensions":1}"#,
        "",
    ),
    // Models are forwarded by their name in the list.
    (SHOW, r#"{"model":"m:latest"}"#, r#"{"model":"m"}"#),
    (
        SHOW,
        r#"{"model":"llama3.2"}"#,
        r#"{"model":"llama3.2:latest"}"#,
    ),
    (
        TEXT_EMBEDDINGS,
        r#"{"model":"Org/Big-7B:latest","input":"x"}"#,
        r#"{"model":"Org/Big-7B","input":"x"}"#,
    ),
    // The body is serialized again: no white space, no needless escapes, the same order.
    (
        TEXT_EMBEDDINGS,
        " {\t\"in\\u0070ut\" : \"\\u00e9\\/\\u0000\\ud83d\\ude00\" ,\r\n\"m\\u006fdel\":\"\\u006d\"} ",
        "{\"input\":\"\u{e9}/\\u0000\u{1f600}\",\"model\":\"m\"}",
    ),
];

#[test]
fn every_request_of_the_table_is_forwarded_as_it_says() {
    for (path, body, expected) in ACCEPTED {
        let expected = if expected.is_empty() { body } else { expected };
        assert_eq!(forwarded(path, body), *expected, "{path} {body}");
    }
}

#[test]
fn what_is_forwarded_is_forwarded_unchanged_the_second_time() {
    for (path, body, _) in ACCEPTED {
        for upstream in [Upstream::Local, Upstream::Provider] {
            let judge = |body: &[u8]| {
                let request = judge_by(LIMITS, upstream, path, body);
                request.unwrap_or_else(|refusal| panic!("{path}: {refusal}"))
            };
            let request = judge(body.as_bytes());
            let again = judge(request.body.as_deref().expect("a body"));
            assert_eq!(again.body, request.body, "{path} {body}");
            assert_eq!(again.most_completion_tokens, request.most_completion_tokens);
        }
    }
}

#[test]
fn a_provider_gets_the_limit_under_the_name_that_was_sent() {
    let body = with(CHAT_COMPLETIONS, "max_completion_tokens", json!(7));
    let request = judge_by(
        LIMITS,
        Upstream::Provider,
        CHAT_COMPLETIONS,
        body.as_bytes(),
    );
    let request = request.expect("accepted");
    let body = String::from_utf8(request.body.expect("a body")).expect("text");
    assert!(body.contains("max_completion_tokens") && !body.contains("max_tokens"));
    assert_eq!(request.most_completion_tokens, Some(7));
}

#[test]
fn the_format_of_the_answer_follows_from_the_request() {
    for (path, stream, format, asks_for_usage) in [
        (CHAT, None, AnswerFormat::Lines, false),
        (CHAT, Some(true), AnswerFormat::Lines, false),
        (GENERATE, Some(false), AnswerFormat::Json, false),
        (GENERATE, None, AnswerFormat::Lines, false),
        (CHAT_COMPLETIONS, None, AnswerFormat::Json, false),
        (CHAT_COMPLETIONS, Some(true), AnswerFormat::Events, false),
        (COMPLETIONS, Some(false), AnswerFormat::Json, false),
        (COMPLETIONS, Some(true), AnswerFormat::Events, false),
    ] {
        let body = stream.map_or_else(
            || smallest(path).to_string(),
            |stream| with(path, "stream", json!(stream)),
        );
        let request = judge(path, body.as_bytes()).expect("accepted");
        assert_eq!(request.answer, format, "{path} {stream:?}");
        assert_eq!(request.asks_for_usage, asks_for_usage);
    }
    for path in [EMBED, EMBEDDINGS, SHOW, TEXT_EMBEDDINGS] {
        let request = judge(path, smallest(path).to_string().as_bytes()).expect("accepted");
        assert_eq!(request.answer, AnswerFormat::Json);
        assert_eq!(request.most_completion_tokens, Some(0));
    }
    let body =
        r#"{"model":"m","prompt":"a","stream":true,"stream_options":{"include_usage":true}}"#;
    let request = judge(COMPLETIONS, body.as_bytes()).expect("accepted");
    assert!(request.asks_for_usage);
}

#[test]
fn the_most_tokens_of_all_answers_are_known_where_the_request_states_them() {
    for (path, body, expected) in [
        (CHAT, smallest(CHAT), Some(1_000)),
        (
            GENERATE,
            json!({"model": "m", "prompt": "", "options": {"num_predict": 3}}),
            Some(3),
        ),
        (CHAT_COMPLETIONS, smallest(CHAT_COMPLETIONS), None),
        (
            CHAT_COMPLETIONS,
            json!({"model": "m", "max_tokens": 9, "n": 3, "messages": [{"role": "user"}]}),
            Some(27),
        ),
        (
            COMPLETIONS,
            json!({"model": "m", "max_tokens": 9, "n": 2, "prompt": ["a", "b", "c"]}),
            Some(54),
        ),
    ] {
        let request = judge(path, body.to_string().as_bytes()).expect("accepted");
        assert_eq!(request.most_completion_tokens, expected, "{body}");
    }
}

#[test]
fn requests_without_a_body_are_forwarded_to_their_own_path() {
    for (path, forwarded, model) in [
        ("/api/tags", "/api/tags", None),
        ("/api/version", "/api/version", None),
        ("/v1/models", "/v1/models", None),
        ("/v1/models/m:latest", "/v1/models/m", Some("m")),
        (
            "/v1/models/llama3.2",
            "/v1/models/llama3.2:latest",
            Some("llama3.2:latest"),
        ),
        (
            "/v1/models/Org/Big-7B",
            "/v1/models/Org/Big-7B",
            Some("Org/Big-7B"),
        ),
    ] {
        let request = judge(path, b"").expect("accepted");
        assert_eq!(request.endpoint.path(), forwarded);
        assert_eq!(request.model.as_deref(), model);
        assert_eq!(request.body, None);
    }
}

#[test]
fn a_log_of_a_request_shows_no_content() {
    for path in WITH_BODY {
        let body = smallest(path).to_string().replace("hi", "SECRET");
        let request = judge(path, body.as_bytes()).expect("accepted");
        assert!(!format!("{request:?}").contains("SECRET"));
    }
}

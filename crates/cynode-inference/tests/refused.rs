//! Refused requests, each with its code and the start of its message.

mod common;

use common::{
    CHAT, CHAT_COMPLETIONS, COMPLETIONS, EMBED, EMBEDDINGS, GENERATE, SHOW, TEXT_EMBEDDINGS,
    WITH_BODY, judge, smallest, with,
};
use cynode_inference::RefusalCode;
use serde_json::{Value, json};

fn refusal(path: &str, body: &str) -> (RefusalCode, String) {
    match judge(path, body.as_bytes()) {
        Err(refusal) => (refusal.code, refusal.message),
        Ok(request) => panic!("{path} {body} is accepted: {request:?}"),
    }
}

/// Asserts that a body is refused as invalid, with the given start of the message.
fn assert_invalid(path: &str, body: &str, message: &str) {
    let (code, actual) = refusal(path, body);
    assert_eq!(code, RefusalCode::InvalidRequest, "{path} {body}: {actual}");
    assert!(actual.starts_with(message), "{path} {body}: {actual}");
}

/// A path, a field, its value in JSON, and the start of the message.
const FIELDS: &[(&str, &str, &str, &str)] = &[
    // Fields that make Ollama load, keep or replace something.
    (
        CHAT,
        "keep_alive",
        "-1",
        "keep_alive: must be a duration between 1s and 60s",
    ),
    (
        CHAT,
        "keep_alive",
        "\"-1\"",
        "keep_alive: must be a duration",
    ),
    (
        CHAT,
        "keep_alive",
        "\"-5m\"",
        "keep_alive: must be a duration",
    ),
    (CHAT, "keep_alive", "0", "keep_alive: must be a duration"),
    (
        CHAT,
        "keep_alive",
        "\"0s\"",
        "keep_alive: must be a duration",
    ),
    (CHAT, "keep_alive", "61", "keep_alive: must be a duration"),
    (
        CHAT,
        "keep_alive",
        "\"60s1ms\"",
        "keep_alive: must be a duration",
    ),
    (
        CHAT,
        "keep_alive",
        "\"24h\"",
        "keep_alive: must be a duration",
    ),
    (
        CHAT,
        "keep_alive",
        "true",
        "keep_alive: must be a number of seconds or a duration",
    ),
    (
        CHAT,
        "template",
        "\"{{ .Prompt }}\"",
        "template: is not accepted: it replaces",
    ),
    (CHAT, "from", "\"m\"", "from: is not accepted"),
    (CHAT, "adapters", "{}", "adapters: is not accepted"),
    (
        CHAT,
        "_debug_render_only",
        "true",
        "_debug_render_only: unknown field of a chat",
    ),
    (CHAT, "Model", "\"other\"", "Model: unknown field"),
    (
        CHAT,
        "remote_host",
        "\"https://example.com\"",
        "remote_host: unknown field",
    ),
    (
        GENERATE,
        "template",
        "\"x\"",
        "template: is not accepted here; leave it out",
    ),
    (GENERATE, "raw", "true", "raw: is not accepted here"),
    (GENERATE, "suffix", "\"x\"", "suffix: is not accepted here"),
    (
        GENERATE,
        "context",
        "[1,2]",
        "context: is not accepted here",
    ),
    (
        GENERATE,
        "images",
        "[\"https://example.com/x.png\"]",
        "images[0]: must be base64",
    ),
    (
        GENERATE,
        "images",
        "[\"data:image/png;base64,AAAA\"]",
        "images[0]: must be base64",
    ),
    (GENERATE, "images", "[\"\"]", "images[0]: must be base64"),
    (
        GENERATE,
        "images",
        "\"AAAA\"",
        "images: must be a list, not a string",
    ),
    (
        GENERATE,
        "think",
        "\"ultra\"",
        "think: \"ultra\" is not one of",
    ),
    (
        GENERATE,
        "think",
        "1",
        "think: must be true or false or a string, not a number",
    ),
    (
        GENERATE,
        "stream",
        "\"true\"",
        "stream: must be true or false, not a string",
    ),
    (SHOW, "verbose", "true", "verbose: is not accepted here"),
    (SHOW, "name", "\"other\"", "name: is not accepted here"),
    // Options about the node's hardware.
    (
        CHAT,
        "options",
        "{\"num_ctx\":4097}",
        "options.num_ctx: 4097 is not between 1 and 4096",
    ),
    (
        CHAT,
        "options",
        "{\"num_ctx\":0}",
        "options.num_ctx: 0 is not",
    ),
    (
        CHAT,
        "options",
        "{\"num_ctx\":4096.0}",
        "options.num_ctx: must be a whole number",
    ),
    (
        CHAT,
        "options",
        "{\"num_predict\":-1}",
        "options.num_predict: -1 is not between 1 and 1000",
    ),
    (
        CHAT,
        "options",
        "{\"num_predict\":-2}",
        "options.num_predict: -2 is not",
    ),
    (
        CHAT,
        "options",
        "{\"num_predict\":1001}",
        "options.num_predict: 1001 is not",
    ),
    (
        CHAT,
        "options",
        "{\"num_gpu\":99}",
        "options.num_gpu: unknown field of options",
    ),
    (
        CHAT,
        "options",
        "{\"main_gpu\":1}",
        "options.main_gpu: unknown field",
    ),
    (
        CHAT,
        "options",
        "{\"num_thread\":64}",
        "options.num_thread: unknown field",
    ),
    (
        CHAT,
        "options",
        "{\"num_batch\":1}",
        "options.num_batch: unknown field",
    ),
    (
        CHAT,
        "options",
        "{\"use_mmap\":true}",
        "options.use_mmap: unknown field",
    ),
    (
        CHAT,
        "options",
        "{\"stop\":\"x\"}",
        "options.stop: must be a list",
    ),
    (
        CHAT,
        "options",
        "[]",
        "options: must be an object, not a list",
    ),
    (
        EMBED,
        "options",
        "{\"numa\":true}",
        "options.numa: unknown field",
    ),
    (
        EMBED,
        "input",
        "[[1,2]]",
        "input[0]: must be a string, not a list",
    ),
    (EMBED, "input", "[]", "input: must not be empty"),
    (EMBEDDINGS, "prompt", "[\"a\"]", "prompt: must be a string"),
    // Fields that make a provider keep data or choose for the operator.
    (
        CHAT_COMPLETIONS,
        "store",
        "false",
        "store: is not accepted: it makes a provider keep data",
    ),
    (
        CHAT_COMPLETIONS,
        "metadata",
        "{}",
        "metadata: is not accepted",
    ),
    (
        CHAT_COMPLETIONS,
        "previous_response_id",
        "\"r\"",
        "previous_response_id: is not accepted",
    ),
    (
        CHAT_COMPLETIONS,
        "prompt_cache_key",
        "\"k\"",
        "prompt_cache_key: is not accepted",
    ),
    (
        CHAT_COMPLETIONS,
        "service_tier",
        "\"priority\"",
        "service_tier: is not accepted: the operator",
    ),
    (CHAT_COMPLETIONS, "user", "\"u\"", "user: is not accepted"),
    (
        CHAT_COMPLETIONS,
        "safety_identifier",
        "\"u\"",
        "safety_identifier: is not accepted",
    ),
    (
        CHAT_COMPLETIONS,
        "web_search_options",
        "{}",
        "web_search_options: is not accepted",
    ),
    (
        CHAT_COMPLETIONS,
        "plugins",
        "[]",
        "plugins: is not accepted",
    ),
    (
        CHAT_COMPLETIONS,
        "modalities",
        "[\"audio\"]",
        "modalities: unknown field",
    ),
    (CHAT_COMPLETIONS, "audio", "{}", "audio: unknown field"),
    (
        CHAT_COMPLETIONS,
        "prediction",
        "{}",
        "prediction: unknown field",
    ),
    (
        CHAT_COMPLETIONS,
        "functions",
        "[]",
        "functions: unknown field",
    ),
    (
        CHAT_COMPLETIONS,
        "logit_bias",
        "{}",
        "logit_bias: unknown field",
    ),
    (
        CHAT_COMPLETIONS,
        "chat_template",
        "\"x\"",
        "chat_template: is not accepted",
    ),
    (
        CHAT_COMPLETIONS,
        "guided_regex",
        "\"x\"",
        "guided_regex: unknown field",
    ),
    (
        CHAT_COMPLETIONS,
        "logits_processors",
        "[]",
        "logits_processors: unknown field",
    ),
    (
        CHAT_COMPLETIONS,
        "prompt_embeds",
        "\"AAAA\"",
        "prompt_embeds: unknown field",
    ),
    (CHAT_COMPLETIONS, "n", "9", "n: 9 is not between 1 and 8"),
    (CHAT_COMPLETIONS, "n", "0", "n: 0 is not"),
    (CHAT_COMPLETIONS, "n", "1.5", "n: must be a whole number"),
    (
        CHAT_COMPLETIONS,
        "max_tokens",
        "1001",
        "max_tokens: 1001 is not between 1 and 1000",
    ),
    (
        CHAT_COMPLETIONS,
        "max_tokens",
        "-1",
        "max_tokens: -1 is not",
    ),
    (
        CHAT_COMPLETIONS,
        "max_tokens",
        "1e2",
        "max_tokens: must be a whole number",
    ),
    (
        CHAT_COMPLETIONS,
        "max_completion_tokens",
        "18446744073709551615",
        "max_completion_tokens: 184",
    ),
    (
        CHAT_COMPLETIONS,
        "temperature",
        "2.1",
        "temperature: 2.1 is not between 0 and 2",
    ),
    (
        CHAT_COMPLETIONS,
        "temperature",
        "\"1\"",
        "temperature: must be a number, not a string",
    ),
    (
        CHAT_COMPLETIONS,
        "stream",
        "1",
        "stream: must be true or false",
    ),
    (
        CHAT_COMPLETIONS,
        "stream_options",
        "{\"include_usage\":true}",
        "stream_options: needs stream",
    ),
    (
        CHAT_COMPLETIONS,
        "tools",
        "[{\"type\":\"web_search\"}]",
        "tools[0].type: \"web_search\" is not",
    ),
    (
        CHAT_COMPLETIONS,
        "tools",
        "[{\"type\":\"code_interpreter\"}]",
        "tools[0].type: \"code_inter",
    ),
    (
        CHAT_COMPLETIONS,
        "tools",
        "[{\"type\":\"custom\",\"custom\":{}}]",
        "tools[0].type: \"custom\"",
    ),
    (
        CHAT_COMPLETIONS,
        "tools",
        "[{\"type\":\"mcp\",\"server_url\":\"x\"}]",
        "tools[0].type: \"mcp\"",
    ),
    (
        CHAT_COMPLETIONS,
        "tools",
        "[{\"function\":{\"name\":\"f\"}}]",
        "tools[0].type: is missing",
    ),
    (
        CHAT_COMPLETIONS,
        "tools",
        "[{\"type\":1}]",
        "tools[0].type: must be a string, not a number",
    ),
    (
        CHAT_COMPLETIONS,
        "tools",
        "[{\"type\":\"function\"}]",
        "tools[0].function: is missing",
    ),
    (
        CHAT_COMPLETIONS,
        "tool_choice",
        "{\"type\":\"allowed_tools\"}",
        "tool_choice.type: \"allow",
    ),
    (
        CHAT_COMPLETIONS,
        "tool_choice",
        "\"web_search\"",
        "tool_choice: \"web_search\" is not one of",
    ),
    (
        CHAT_COMPLETIONS,
        "response_format",
        "{\"type\":\"grammar\"}",
        "response_format.type: \"gram",
    ),
    (
        CHAT_COMPLETIONS,
        "response_format",
        "{\"type\":\"text\",\"x\":1}",
        "response_format.x: unknown",
    ),
    (
        CHAT_COMPLETIONS,
        "messages",
        "[]",
        "messages: must not be empty",
    ),
    (
        CHAT_COMPLETIONS,
        "messages",
        "null",
        "messages: must be a list, not null",
    ),
    (
        CHAT_COMPLETIONS,
        "messages",
        "[\"hi\"]",
        "messages[0]: must be an object, not a string",
    ),
    (
        COMPLETIONS,
        "prompt",
        "[1,2,3]",
        "prompt[0]: must be a string, not a number",
    ),
    (COMPLETIONS, "best_of", "2", "best_of: is not accepted"),
    (
        COMPLETIONS,
        "suffix",
        "\"x\"",
        "suffix: is not accepted here",
    ),
    (
        TEXT_EMBEDDINGS,
        "input",
        "[1,2,3]",
        "input[0]: must be a string",
    ),
    (
        TEXT_EMBEDDINGS,
        "encoding_format",
        "\"hex\"",
        "encoding_format: \"hex\" is not one of",
    ),
    (TEXT_EMBEDDINGS, "dimensions", "0", "dimensions: 0 is not"),
];

#[test]
fn every_field_of_the_table_is_refused_by_its_name() {
    for (path, field, value, message) in FIELDS {
        let value: Value = serde_json::from_str(value).expect("JSON");
        assert_invalid(path, &with(path, field, value), message);
    }
}

/// A message of a chat completion, and the start of the refusal after `messages[0]`.
const MESSAGES: &[(&str, &str)] = &[
    (r#"{"content":"x"}"#, ".role: is missing"),
    (
        r#"{"role":"function","content":"x"}"#,
        ".role: \"function\" is not one of",
    ),
    (
        r#"{"role":"User","content":"x"}"#,
        ".role: \"User\" is not one of",
    ),
    (
        r#"{"role":"user","content":{}}"#,
        ".content: must be a string or a list or null, not an obj",
    ),
    (
        r#"{"role":"user","content":["x"]}"#,
        ".content[0]: must be an object",
    ),
    (
        r#"{"role":"user","content":[{"text":"x"}]}"#,
        ".content[0].type: is missing",
    ),
    (
        r#"{"role":"user","content":[{"type":"text","text":"x","url":"http://x"}]}"#,
        ".content[0].url: unknown field of a part with text",
    ),
    (
        r#"{"role":"user","content":[{"type":"file","file":{"file_id":"f"}}]}"#,
        ".content[0].type: \"file\" is not accepted, only text",
    ),
    (
        r#"{"role":"user","content":[{"type":"input_file","file_id":"f"}]}"#,
        ".content[0].type: \"input_file\"",
    ),
    (
        r#"{"role":"user","content":[{"type":"video_url","video_url":{"url":"x"}}]}"#,
        ".content[0].type: \"video_url\"",
    ),
    (
        r#"{"role":"user","content":[{"type":"audio_url","audio_url":{"url":"x"}}]}"#,
        ".content[0].type: \"audio_url\"",
    ),
    (
        r#"{"role":"user","content":[{"type":"image_embeds","image_embeds":"AAAA"}]}"#,
        ".content[0].type: \"image_embeds\"",
    ),
    (
        r#"{"role":"user","content":[{"type":"image_url","image_url":"data:image/png;base64,AAAA"}]}"#,
        ".content[0].image_url: must be an object",
    ),
    (
        r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://169.254.169.254/"}}]}"#,
        ".content[0].image_url.url: must be data:",
    ),
    (
        r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]}"#,
        ".content[0].image_url.url: must be data:",
    ),
    (
        r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"\u0068ttp://x"}}]}"#,
        ".content[0].image_url.url: must be data:",
    ),
    (
        r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:text/html,x"}}]}"#,
        ".content[0].image_url.url: must be data:",
    ),
    (
        r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA","uuid":"x"}}]}"#,
        ".content[0].image_url.uuid: unknown field",
    ),
    (
        r#"{"role":"user","content":[{"type":"image_url","image_url":{"file_id":"f"}}]}"#,
        ".content[0].image_url.url: is missing",
    ),
    (
        r#"{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"http://x","format":"mp3"}}]}"#,
        ".content[0].input_audio.data: must be base64",
    ),
    (
        r#"{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"AAAA","format":"aiff"}}]}"#,
        ".content[0].input_audio.format: \"aiff\"",
    ),
    (
        r#"{"role":"assistant","content":"x","audio":{"id":"a"}}"#,
        ".audio: is not accepted here",
    ),
    (
        r#"{"role":"assistant","content":"x","annotations":[{"type":"url_citation"}]}"#,
        ".annotations: is not accepted here",
    ),
    (
        r#"{"role":"assistant","tool_calls":[{"id":"1","type":"custom","custom":{}}]}"#,
        ".tool_calls[0].type: \"custom\"",
    ),
    (
        r#"{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":{}}}]}"#,
        ".tool_calls[0].function.arguments: must be a string",
    ),
    (
        r#"{"role":"user","content":"x","images":["AAAA"]}"#,
        ".images: unknown field of a message",
    ),
];

#[test]
fn every_message_of_the_table_is_refused_with_the_path_to_its_fault() {
    for (message, expected) in MESSAGES {
        let body = format!(r#"{{"model":"m","messages":[{message}]}}"#);
        assert_invalid(CHAT_COMPLETIONS, &body, &format!("messages[0]{expected}"));
    }
}

#[test]
fn messages_of_ollama_are_refused_likewise() {
    for (message, expected) in [
        (
            r#"{"role":"user","images":["http://x"]}"#,
            ".images[0]: must be base64",
        ),
        (r#"{"role":"developer"}"#, ".role: \"developer\""),
        (
            r#"{"role":"user","content":[]}"#,
            ".content: must be a string, not a list",
        ),
        (
            r#"{"role":"user","content":"x","name":"n"}"#,
            ".name: unknown field",
        ),
        (
            r#"{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}"#,
            ".tool_calls[0].function.arguments: must be an object",
        ),
    ] {
        let body = format!(r#"{{"model":"m","messages":[{message}]}}"#);
        assert_invalid(CHAT, &body, &format!("messages[0]{expected}"));
    }
}

#[test]
fn schemas_that_lead_to_other_documents_are_refused_wherever_they_are() {
    for (schema, fault) in [
        (
            json!({"$ref": "https://example.com/s.json"}),
            ".$ref: must refer",
        ),
        (
            json!({"items": [{"$dynamicRef": "file:///x"}]}),
            ".items[0].$dynamicRef: must refer",
        ),
        (
            json!({"properties": {"a": {"$ref": "x.json#/b"}}}),
            ".properties.a.$ref: must refer",
        ),
        (
            json!({"$id": "http://127.0.0.1/s", "$ref": "#/a"}),
            ".$id: must not be a URL",
        ),
        (
            json!({"$schema": "http://127.0.0.1/s"}),
            ".$schema: is not a known dialect",
        ),
    ] {
        let tool = json!([{"type": "function", "function": {"name": "f", "parameters": schema}}]);
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        let parameters = "tools[0].function.parameters";
        for (path, field, value, at) in [
            (CHAT, "tools", &tool, parameters),
            (CHAT_COMPLETIONS, "tools", &tool, parameters),
            (CHAT, "format", &schema, "format"),
            (GENERATE, "format", &schema, "format"),
            (
                CHAT_COMPLETIONS,
                "response_format",
                &format,
                "response_format.json_schema.schema",
            ),
        ] {
            let message = format!("{at}{fault}").replace(".$", "[\"$");
            let message = message.replace("ef:", "ef\"]:").replace("$id:", "$id\"]:");
            let message = message.replace("$schema:", "$schema\"]:");
            assert_invalid(path, &with(path, field, value.clone()), &message);
        }
    }
}

#[test]
fn models_that_are_not_on_the_list_are_refused_on_every_endpoint() {
    for path in WITH_BODY {
        for name in [
            "other",
            "M",
            "m ",
            "m:1b",
            "m:cloud",
            "../m",
            "org/big-7b",
            "Big-7B",
            "m\u{0}",
            "llama3.2:1b",
            "hf.co/x/m",
            "http://x/m",
            "",
        ] {
            let (code, message) = refusal(path, &with(path, "model", json!(name)));
            assert_eq!(
                code,
                RefusalCode::ModelNotAllowed,
                "{path} {name}: {message}"
            );
            assert!(message.contains("\"llama3.2:latest\""), "{message}");
        }
        assert_invalid(
            path,
            &with(path, "model", json!(null)),
            "model: must be a string",
        );
        assert_invalid(
            path,
            &with(path, "model", json!(["m"])),
            "model: must be a string",
        );
        let mut body = smallest(path);
        body.as_object_mut().expect("an object").remove("model");
        assert_invalid(path, &body.to_string(), "model: is missing");
    }
    let refusal = judge("/v1/models/other", b"").expect_err("refused");
    assert_eq!(refusal.code, RefusalCode::ModelNotAllowed);
}

#[test]
fn fields_that_are_given_twice_are_refused_at_any_depth() {
    for (path, body, at) in [
        (SHOW, r#"{"model":"other","model":"m"}"#, "model"),
        (SHOW, r#"{"model":"m","m\u006fdel":"other"}"#, "model"),
        (
            CHAT,
            r#"{"model":"m","messages":[{"role":"user","role":"system"}]}"#,
            "messages[0].role",
        ),
        (
            CHAT,
            r#"{"model":"m","messages":[],"options":{"seed":1,"seed":2}}"#,
            "options.seed",
        ),
        (
            CHAT,
            r#"{"model":"m","messages":[],"format":{"a":[{"b":1,"b":2}]}}"#,
            "format.a[0].b",
        ),
        (
            CHAT,
            r#"{"model":"m","messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a":{"b":1,"b":2}}}}]}]}"#,
            "messages[0].tool_calls[0].function.arguments.a.b",
        ),
        (
            CHAT_COMPLETIONS,
            r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","type":"image_url","text":"x"}]}]}"#,
            "messages[0].content[0].type",
        ),
    ] {
        assert_invalid(path, body, &format!("{at}: is given twice"));
    }
}

#[test]
fn both_names_of_the_token_limit_at_once_are_refused() {
    let mut body = smallest(CHAT_COMPLETIONS);
    body["max_tokens"] = json!(1);
    body["max_completion_tokens"] = json!(2);
    assert_invalid(
        CHAT_COMPLETIONS,
        &body.to_string(),
        "max_tokens: is the older name",
    );
}

#[test]
fn what_is_not_one_json_object_is_refused() {
    for path in WITH_BODY {
        let valid = smallest(path).to_string();
        for body in [
            " ".to_owned(),
            "null".to_owned(),
            "[]".to_owned(),
            "\"m\"".to_owned(),
            "{".to_owned(),
            format!("{valid}{valid}"),
            format!("{valid}\n{valid}"),
            format!("[{valid}]"),
            format!("\u{feff}{valid}"),
            valid.replace('"', "'"),
            valid.replace(':', "="),
            valid.replace('}', ",}"),
            valid.replace("\"m\"", "\"\\ud800\""),
            valid.replace("\"m\"", "\"\n\""),
        ] {
            assert_invalid(path, &body, "$: ");
        }
        let mut bytes = valid.into_bytes();
        bytes.insert(2, 0xff);
        let refusal = judge(path, &bytes).expect_err("not UTF-8");
        assert_eq!(refusal.code, RefusalCode::InvalidRequest);
    }
    let refusal = judge("/api/tags", b"{}").expect_err("a POST");
    assert_eq!(refusal.code, RefusalCode::MethodNotAllowed);
}

#[test]
fn a_get_has_no_body() {
    use cynode_inference::{Endpoint, Rules, Upstream};
    let models = common::allowed();
    let rules = Rules {
        models: &models,
        limits: common::LIMITS,
        upstream: Upstream::Local,
    };
    for path in ["/api/tags", "/api/version", "/v1/models", "/v1/models/m"] {
        let endpoint = Endpoint::find("GET", path).expect("found");
        let refusal = rules.judge(&endpoint, b"{}").expect_err("refused");
        assert_eq!(refusal.code, RefusalCode::InvalidRequest);
        assert_eq!(refusal.message, format!("{path} takes no body"));
    }
}

#[test]
fn a_refusal_lists_several_faults_and_hides_control_characters() {
    let body = r#"{"model":"m","messages":[],"\u001b[31m":1,"b":2,"c":3,"d":4,"e":5}"#;
    let (_, message) = refusal(CHAT, body);
    assert!(
        message.starts_with(r#"["\u{1b}[31m"]: unknown field"#),
        "{message}"
    );
    assert!(message.ends_with("; and 1 more"), "{message}");
}

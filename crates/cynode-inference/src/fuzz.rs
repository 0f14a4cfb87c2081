//! The fuzz target: requests of a sandbox, and answers of a server.
//!
//! The target takes arbitrary bytes and panics if an invariant is violated. `fuzz/fuzz_targets`
//! calls it from libFuzzer, the tests below with every input of `fuzz/corpus/inference`.
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a panic is how a fuzz target reports a failure"
)]

use serde_json::Value;

use crate::{
    AllowedModels, AnswerFormat, AnswerScan, AnswerScanner, Endpoint, ModelList, Refusal, Rules,
    ServedModel, ShownModel, TokenLimits, Upstream, UpstreamRequest, server_version,
};

/// The models that the target allows.
pub const MODELS: &[&str] = &["m", "llama3.2:latest", "Org/Big-7B"];

/// Small, so that inputs reach them.
pub const LIMITS: TokenLimits = TokenLimits {
    completion_tokens: 1_000,
    context_tokens: 4_096,
    keep_alive_seconds: 60,
};

/// The first byte selects how the rest is used: as a body for one of the endpoints, a target, a
/// stream in one of the formats (whose first byte decides how it is split), or an answer to filter.
pub fn inference(input: &[u8]) {
    let (option, rest) = input
        .split_first()
        .map_or((0, input), |(option, rest)| (usize::from(*option), rest));
    let kinds = Endpoint::FIXED.len();
    match option % (kinds + 9) {
        kind if kind < kinds => {
            for upstream in [Upstream::Local, Upstream::Provider] {
                drop(request(&Endpoint::FIXED[kind], rest, upstream));
            }
        }
        kind => match kind - kinds {
            0 => target(&String::from_utf8_lossy(rest)),
            1 => stream(AnswerFormat::Json, rest),
            2 => stream(AnswerFormat::Lines, rest),
            3 => stream(AnswerFormat::Events, rest),
            4 => filtered(rest, |json| {
                ModelList::read_tags(json).map(|list| list.to_json())
            }),
            5 => filtered(rest, |json| {
                ModelList::read_models(json).map(|list| list.to_json())
            }),
            6 => filtered(rest, |json| {
                ServedModel::read(json).map(|model| model.to_json())
            }),
            7 => filtered(rest, |json| {
                ShownModel::read(json).map(|model| model.to_json())
            }),
            _ => filtered(rest, server_version),
        },
    }
}

/// Checks that a forwarded request is a fixed point, names an allowed model, and makes no server
/// fetch anything, and that a refusal is printable and bounded.
pub fn request(
    endpoint: &Endpoint,
    body: &[u8],
    upstream: Upstream,
) -> Result<UpstreamRequest, Refusal> {
    let models = AllowedModels::new(MODELS.iter().map(|name| (*name).to_owned()));
    let rules = Rules {
        models: &models,
        limits: LIMITS,
        upstream,
    };
    let judged = rules.judge(endpoint, body);
    match &judged {
        Err(refusal) => check_refusal(refusal),
        Ok(request) => {
            let Some(json) = &request.body else {
                assert_eq!(endpoint.method(), "GET", "a POST has a body");
                return judged;
            };
            let again = rules
                .judge(endpoint, json)
                .expect("what is forwarded is valid");
            let asks_for_usage = request.asks_for_usage;
            let again = UpstreamRequest {
                asks_for_usage,
                ..again
            };
            assert_eq!(again.body, request.body, "a round trip changes the body");
            assert_eq!(&again, request, "a round trip changes the request");
            let value: Value = serde_json::from_slice(json).expect("a body is JSON");
            let model = value["model"].as_str().expect("a body has a model");
            assert!(MODELS.contains(&model), "{model} is not allowed");
            assert_fetches_nothing(&value);
        }
    }
    judged
}

fn check_refusal(refusal: &Refusal) {
    let is_printable = |byte| matches!(byte, b' '..=b'~');
    assert!(refusal.message.bytes().all(is_printable), "{refusal:?}");
    // A message has at most four violations, with paths of at most 64 names of 64 characters.
    assert!(
        refusal.message.len() < 4 * 64 * 700,
        "{}",
        refusal.message.len()
    );
    let body: Value = serde_json::from_slice(&refusal.body("id")).expect("a body is JSON");
    assert_eq!(body["code"], refusal.code.as_str());
}

/// Searches a forwarded body for URLs in fields that servers fetch. Independent of the tables.
pub fn assert_fetches_nothing(body: &Value) {
    content(body);
}

fn content(value: &Value) {
    match value {
        Value::Array(items) => items.iter().for_each(content),
        Value::Object(members) => {
            for (name, value) in members {
                match (name.as_str(), value) {
                    // Arguments of the model's own calls are only text to the model.
                    ("arguments", Value::Object(_)) => {}
                    ("parameters" | "schema" | "format", Value::Object(_)) => schema(value),
                    ("url" | "image_url", Value::String(url)) => {
                        assert!(url.starts_with("data:image/"), "{url} would be fetched");
                    }
                    ("images", Value::Array(images)) => {
                        for image in images {
                            assert_is_data(image);
                        }
                    }
                    ("data", value) => assert_is_data(value),
                    (
                        "file" | "file_id" | "file_url" | "video_url" | "audio_url" | "store"
                        | "metadata" | "template" | "raw" | "web_search_options" | "functions",
                        _,
                    ) => panic!("{name} is forwarded"),
                    ("type", Value::String(kind)) => assert!(
                        matches!(
                            kind.as_str(),
                            "text"
                                | "refusal"
                                | "image_url"
                                | "input_audio"
                                | "function"
                                | "json_object"
                                | "json_schema"
                        ),
                        "type {kind} is forwarded"
                    ),
                    _ => content(value),
                }
            }
        }
        _ => {}
    }
}

fn schema(value: &Value) {
    match value {
        Value::Array(items) => items.iter().for_each(schema),
        Value::Object(members) => {
            for (name, value) in members {
                if let ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(reference)) =
                    (name.as_str(), value)
                {
                    assert!(reference.starts_with('#'), "{reference} would be fetched");
                }
                if let ("$id" | "id", Value::String(id)) = (name.as_str(), value) {
                    assert!(!has_scheme(id), "{id} would turn references into fetches");
                }
                schema(value);
            }
        }
        _ => {}
    }
}

fn assert_is_data(value: &Value) {
    let text = value.as_str().expect("data is text");
    assert!(!has_scheme(text) && !text.starts_with("//"), "{text}");
}

/// Returns whether a string starts like a URL, also after white space.
#[must_use]
pub fn has_scheme(text: &str) -> bool {
    text.trim_start()
        .split_once(':')
        .is_some_and(|(scheme, _)| {
            scheme.starts_with(|first: char| first.is_ascii_alphabetic())
                && scheme
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
        })
}

/// Checks that the path of a found endpoint leads to the same endpoint, and that no server can
/// interpret it differently.
fn target(target: &str) {
    for method in ["GET", "POST"] {
        match Endpoint::find(method, target) {
            Ok(endpoint) => {
                assert_eq!(endpoint.path(), target);
                assert_eq!(endpoint.method(), method);
                assert!(!target.contains(['%', '?', '#', '\\', ' ', ';']));
                assert!(!target.contains("//") && !target.contains("/.") && !target.ends_with('/'));
            }
            Err(refusal) => check_refusal(&refusal),
        }
    }
}

/// Checks that the scan of a stream does not depend on its pieces, and that the scan of a document
/// agrees with a parser.
fn stream(format: AnswerFormat, input: &[u8]) {
    let (cut, bytes) = input
        .split_first()
        .map_or((0, input), |(cut, bytes)| (usize::from(*cut), bytes));
    let scan = |size: usize| -> AnswerScan {
        let mut scanner = AnswerScanner::new(format);
        for piece in bytes.chunks(size) {
            scanner.push(piece);
        }
        scanner.finish()
    };
    let whole = scan(bytes.len().max(1));
    assert_eq!(scan(cut % 16 + 1), whole, "pieces are scanned differently");
    if format != AnswerFormat::Json {
        return;
    }
    if let Ok(document) = serde_json::from_slice::<Value>(bytes) {
        assert!(!whole.is_malformed, "a document is malformed");
        let usage = &document["usage"];
        if let Some(tokens) = usage["prompt_tokens"].as_u64() {
            assert_eq!(whole.usage.expect("usage").prompt_tokens, tokens);
        }
        let has_error = document.get("error").is_some_and(|error| !error.is_null());
        assert_eq!(whole.has_error, has_error);
    }
}

/// Checks that filtering a filtered answer changes nothing.
fn filtered(json: &[u8], filter: impl Fn(&[u8]) -> Result<Vec<u8>, Refusal>) {
    match filter(json) {
        Ok(shown) => {
            let again = filter(&shown).expect("what is shown can be read");
            assert_eq!(again, shown, "a round trip changes what is shown");
            let shown: Value = serde_json::from_slice(&shown).expect("JSON");
            for name in [
                "remote_host",
                "remote_model",
                "modelfile",
                "template",
                "system",
            ] {
                assert!(!has_field(&shown, name), "{name} is shown");
            }
        }
        Err(refusal) => check_refusal(&refusal),
    }
}

fn has_field(value: &Value, name: &str) -> bool {
    match value {
        Value::Array(items) => items.iter().any(|item| has_field(item, name)),
        Value::Object(members) => members
            .iter()
            .any(|(field, value)| field == name || has_field(value, name)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    #[expect(
        clippy::disallowed_methods,
        reason = "reads files of this repository, and this crate has no fs_err"
    )]
    fn what_fuzzing_found_is_handled() {
        let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/inference");
        let mut inputs: Vec<PathBuf> = std::fs::read_dir(corpus)
            .expect("a corpus")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "the corpus is empty");
        for input in inputs {
            let bytes = std::fs::read(&input).expect("a file");
            let outcome = std::panic::catch_unwind(|| inference(&bytes));
            assert!(outcome.is_ok(), "{} fails", input.display());
        }
    }

    #[test]
    fn the_oracle_finds_what_servers_fetch() {
        for body in [
            r#"{"messages":[{"content":[{"type":"image_url","image_url":{"url":"http://x"}}]}]}"#,
            r#"{"messages":[{"content":[{"type":"image_url","image_url":"file:///x"}]}]}"#,
            r#"{"messages":[{"content":[{"type":"file","file":{}}]}]}"#,
            r#"{"messages":[{"images":["http://x"]}]}"#,
            r#"{"images":["https://x"]}"#,
            r#"{"tools":[{"function":{"parameters":{"a":{"$ref":"http://x"}}}}]}"#,
            r#"{"format":{"$id":"http://x"}}"#,
            r#"{"response_format":{"json_schema":{"schema":{"items":[{"$ref":"x"}]}}}}"#,
            r#"{"tools":[{"type":"web_search"}]}"#,
        ] {
            let value: Value = serde_json::from_str(body).expect("JSON");
            let found = std::panic::catch_unwind(|| assert_fetches_nothing(&value));
            assert!(found.is_err(), "{body}");
        }
    }
}

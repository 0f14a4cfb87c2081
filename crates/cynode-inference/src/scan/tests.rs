use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn scanned(format: AnswerFormat, bytes: &[u8]) -> AnswerScan {
    let mut scanner = AnswerScanner::new(format);
    scanner.push(bytes);
    scanner.finish()
}

fn of_json(text: &str) -> AnswerScan {
    scanned(AnswerFormat::Json, text.as_bytes())
}

fn of_lines(text: &str) -> AnswerScan {
    scanned(AnswerFormat::Lines, text.as_bytes())
}

fn of_events(text: &str) -> AnswerScan {
    scanned(AnswerFormat::Events, text.as_bytes())
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "compared with usage, which may be absent"
)]
const fn used(prompt_tokens: u64, completion_tokens: u64) -> Option<Usage> {
    Some(Usage {
        prompt_tokens,
        completion_tokens,
    })
}

const NOTHING: AnswerScan = AnswerScan {
    usage: None,
    has_ended: false,
    has_error: false,
    is_overlong: false,
    is_malformed: false,
    is_external: false,
};

fn ended(usage: Option<Usage>) -> AnswerScan {
    AnswerScan {
        usage,
        has_ended: true,
        ..NOTHING
    }
}

const OLLAMA: &str = concat!(
    r#"{"model":"x","created_at":"2026-11-18T08:00:00Z","message":{"role":"assistant","content":"#,
    r#""{\"eval_count\":9}"},"done":false}"#,
    "\n",
    r#"{"model":"x","message":{"role":"assistant","content":""},"done":true,"#,
    r#""done_reason":"stop","total_duration":12,"prompt_eval_count":26,"eval_count":298}"#,
    "\n",
);

const OPENAI: &str = concat!(
    r#"data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"#,
    r#""usage"}}],"usage":null}"#,
    "\n\n",
    r#"data: {"id":"1","choices":[],"usage":{"prompt_tokens":26,"completion_tokens":298,"#,
    r#""total_tokens":324,"prompt_tokens_details":{"cached_tokens":7}}}"#,
    "\n\ndata: [DONE]\n\n",
);

const DOCUMENT: &str = concat!(
    r#"{"id":"1","choices":[{"message":{"content":"{\"usage\":{\"prompt_tokens\":1}}","#,
    r#""usage":{"prompt_tokens":5}}}],"usage":{"prompt_tokens":26,"completion_tokens":298}}"#,
    "\n",
);

#[test]
fn usage_is_read_from_each_format() {
    assert_eq!(of_lines(OLLAMA), ended(used(26, 298)));
    assert_eq!(of_events(OPENAI), ended(used(26, 298)));
    assert_eq!(of_json(DOCUMENT), ended(used(26, 298)));
    assert_eq!(
        of_json(r#"{"embeddings":[[1e-3,-0.5]],"prompt_eval_count":8}"#),
        ended(used(8, 0))
    );
    assert_eq!(
        of_json(r#"{"data":[{"embedding":"AAAA"}],"usage":{"prompt_tokens":8,"total_tokens":8}}"#),
        ended(used(8, 0))
    );
    assert_eq!(of_json(r#"{"embedding":[0.1]}"#), ended(None));
}

#[test]
fn ollama_leaves_out_counts_that_are_zero() {
    assert_eq!(
        of_json(r#"{"done":true,"eval_count":4}"#),
        ended(used(0, 4))
    );
    assert_eq!(of_lines("{\"done\":true}"), ended(used(0, 0)));
    assert_eq!(of_lines("{\"done\":false}\n").usage, None);
}

#[test]
fn the_last_usage_of_a_stream_counts() {
    let chunk = |usage: &str| format!("data: {{\"usage\":{usage}}}\n\n");
    let stream = [
        chunk(r#"{"prompt_tokens":0,"completion_tokens":0}"#),
        chunk(r#"{"prompt_tokens":3,"completion_tokens":1}"#),
        chunk("null"),
        chunk("{}"),
    ]
    .concat();
    let scan = of_events(&stream);
    assert_eq!(scan.usage, used(3, 1));
    assert!(!scan.has_ended);
}

#[test]
fn an_answer_that_breaks_off_has_not_ended() {
    for length in 1..OLLAMA.len() - 1 {
        assert!(!of_lines(&OLLAMA[..length]).has_ended, "{length}");
    }
    let end = OPENAI.len() - "\n\n".len();
    for length in 0..end {
        assert!(!of_events(&OPENAI[..length]).has_ended, "{length}");
    }
    assert!(of_events(&OPENAI[..end]).has_ended);
    for length in 0..DOCUMENT.len() - 1 {
        assert!(!of_json(&DOCUMENT[..length]).has_ended, "{length}");
    }
}

#[test]
fn what_follows_the_end_takes_it_back() {
    for more in ["{\"done\":false}", "x", "{", "{\"error\":\"late\"}"] {
        assert!(!of_lines(&format!("{OLLAMA}{more}")).has_ended, "{more}");
        assert!(!of_json(&format!("{DOCUMENT}{more}")).has_ended, "{more}");
        let more = format!("{OPENAI}data: {more}\n\n");
        assert!(!of_events(&more).has_ended, "{more}");
    }
    assert!(of_lines(&format!("{OLLAMA}\n \r\n")).has_ended);
    assert!(of_events(&format!("{OPENAI}: bye\n\n\n")).has_ended);
    assert!(of_json(&format!("{DOCUMENT} \r\n\t")).has_ended);
}

#[test]
fn errors_inside_an_answer_are_reported() {
    let error = AnswerScan {
        has_error: true,
        ..NOTHING
    };
    assert_eq!(of_json(r#"{"error":"model not found"}"#), error);
    assert_eq!(of_lines("{\"done\":false}\n{\"error\":\"gone\"}\n"), error);
    assert_eq!(
        of_events("data: {\"error\":{\"message\":\"gone\"}}\n\n"),
        error
    );
    let ended_all_the_same = of_events("data: {\"error\":{}}\n\ndata: [DONE]\n\n");
    assert!(ended_all_the_same.has_error && !ended_all_the_same.has_ended);
    assert!(of_json(r#"{"error":null}"#).has_ended);
    assert!(of_json(r#"{"choices":[{"error":"quoted"}]}"#).has_ended);
}

#[test]
fn an_answer_from_another_host_is_external() {
    for text in [
        r#"{"remote_host":"https://ollama.com:443","done":true}"#,
        r#"{"remote_model":"gpt-oss:120b","done":true}"#,
        r#"{"remote_host":"","remote_model":"\u0041","done":true}"#,
        r#"{"done":true,"rem\u006fte_host":"h"}"#,
    ] {
        assert!(of_json(text).is_external, "{text}");
        assert!(of_lines(text).is_external, "{text}");
    }
    for text in [
        r#"{"remote_host":"","done":true}"#,
        r#"{"remote_host":null}"#,
        r#"{"remote_host":"h","remote_host":""}"#,
        r#"{"message":{"remote_host":"h"}}"#,
        r#"{"response":"remote_host"}"#,
        r#"[{"remote_host":"h"}]"#,
    ] {
        assert!(!of_json(text).is_external, "{text}");
    }
}

#[test]
fn events_are_framed_as_the_standard_says() {
    let usage = r#"{"usage":{"prompt_tokens":1,"completion_tokens":2}}"#;
    for stream in [
        format!("data: {usage}\n\ndata: [DONE]\n\n"),
        format!("data:{usage}\r\n\r\ndata:[DONE]\r\n\r\n"),
        format!("data: {usage}\r\rdata: [DONE]\r\r"),
        format!(": ping\n\nevent: x\nid: 7\ndata: {usage}\nretry: 9\n\ndata: [DONE]"),
        "data: {\"usage\":{\"prompt_tokens\":1,\ndata: \"completion_tokens\":2}}\n\ndata: [DONE]\n"
            .to_owned(),
        format!("data: {usage}\n\ndata\ndata:\n\ndata: [DONE]\n\n"),
        format!("dat: x\ndata2: y\n data: z\ndata: {usage}\n\ndata: [DONE]\n\n"),
    ] {
        assert_eq!(of_events(&stream), ended(used(1, 2)), "{stream}");
    }
    for stream in [
        "[DONE]\n\n",
        "data: [DONE\n\n",
        "data: [DONE]x\n\n",
        "data: [DON\ndata: E]\n\n",
        "event: [DONE]\n\n",
    ] {
        assert!(!of_events(stream).has_ended, "{stream}");
    }
}

#[test]
fn garbage_is_flagged_and_later_lines_count() {
    for garbage in [
        "{",
        "}",
        "[1,]",
        "{\"a\"}",
        "{a:1}",
        "nul",
        "01",
        "1.",
        "-",
        "\"\u{1}\"",
        "\"\\x\"",
        "\"\\u12g4\"",
        "{\"a\":1,}",
        "[1 2]",
        "1 2",
        "<html>",
        "tru e",
    ] {
        let scan = of_lines(&format!("{garbage}\n{OLLAMA}"));
        let expected = AnswerScan {
            is_malformed: true,
            ..ended(used(26, 298))
        };
        assert_eq!(scan, expected, "{garbage}");
        let scan = of_json(garbage);
        let expected = AnswerScan {
            is_malformed: true,
            ..NOTHING
        };
        assert_eq!(scan, expected, "{garbage}");
    }
    assert!(of_json("").is_malformed);
    assert_eq!(of_lines(""), NOTHING);
    assert_eq!(of_events(""), NOTHING);
}

#[test]
fn a_line_may_have_its_longest_length_and_no_more() {
    let longest = usize::try_from(MAX_LINE_BYTES).expect("fits");
    let line = |length: usize| {
        let start = r#"{"done":true,"eval_count":7,"response":""#;
        let text = "x".repeat(length - start.len() - 2);
        format!("{start}{text}\"}}")
    };
    assert_eq!(of_lines(&line(longest)), ended(used(0, 7)));
    let overlong = AnswerScan {
        is_overlong: true,
        ..NOTHING
    };
    assert_eq!(of_lines(&line(longest + 1)), overlong);
    // The usage stays unknown: the unread line may contain counts.
    let scan = of_lines(&format!("{}\n{OLLAMA}", line(longest + 1)));
    assert_eq!(scan.usage, None);
    assert!(scan.is_overlong && scan.has_ended);
    assert_eq!(
        of_events(&format!("data: {}\n\ndata: [DONE]\n\n", line(longest))),
        ended(used(0, 7))
    );
    assert!(of_events(&format!("data: {}", line(longest + 1))).is_overlong);
}

#[test]
fn an_endless_line_takes_no_memory() {
    assert!(size_of::<AnswerScanner>() < 512);
    for format in [
        AnswerFormat::Lines,
        AnswerFormat::Events,
        AnswerFormat::Json,
    ] {
        let mut scanner = AnswerScanner::new(format);
        scanner.push(b"data: {\"response\":\"");
        let chunk = vec![b'x'; 64 * 1024];
        for _ in 0..=MAX_LINE_BYTES / 64 / 1024 {
            scanner.push(&chunk);
        }
        let scan = scanner.finish();
        assert_eq!(scan.usage, None);
        assert!(
            scan.is_overlong || format == AnswerFormat::Json,
            "{format:?}"
        );
    }
}

#[test]
fn the_length_of_a_document_is_bounded() {
    for (longest, is_overlong) in [(10, false), (9, true)] {
        let mut json = JsonScanner::new(longest);
        json.push_all(b"[1,2,3,45]");
        let mut scan = NOTHING;
        assert_eq!(json.end(&mut scan).is_none(), is_overlong);
        assert_eq!(scan.is_overlong, is_overlong);
    }
}

#[test]
fn nesting_is_bounded() {
    let depth = usize::try_from(crate::limits::MAX_ANSWER_DEPTH).expect("fits");
    let nested = |depth: usize| {
        let inner = format!("{}{}", "[".repeat(depth - 1), "]".repeat(depth - 1));
        format!("{{\"a\":{inner},\"eval_count\":7}}")
    };
    assert_eq!(of_json(&nested(depth)), ended(used(0, 7)));
    let malformed = AnswerScan {
        is_malformed: true,
        ..NOTHING
    };
    assert_eq!(of_json(&nested(depth + 1)), malformed);
    assert_eq!(of_json(&"[".repeat(1_000_000)), malformed);
}

#[test]
fn formats_have_content_types() {
    for (content_type, format) in [
        ("application/json", Some(AnswerFormat::Json)),
        ("application/json; charset=utf-8", Some(AnswerFormat::Json)),
        ("Application/X-NDJSON", Some(AnswerFormat::Lines)),
        (
            "text/event-stream;charset=utf-8",
            Some(AnswerFormat::Events),
        ),
        ("text/html", None),
        ("", None),
    ] {
        assert_eq!(AnswerFormat::of_content_type(content_type), format);
    }
}

/// Scans a document with a parser that builds the whole value.
fn oracle(document: &Value) -> AnswerScan {
    let count = |value: &Value| value.as_u64();
    let usage = &document["usage"];
    let (prompt, completion) = (
        count(&usage["prompt_tokens"]),
        count(&usage["completion_tokens"]),
    );
    let (prompt_eval, eval) = (
        count(&document["prompt_eval_count"]),
        count(&document["eval_count"]),
    );
    let usage = if prompt.or(completion).is_some() {
        used(prompt.unwrap_or(0), completion.unwrap_or(0))
    } else if prompt_eval.or(eval).is_some() || document["done"] == true {
        used(prompt_eval.unwrap_or(0), eval.unwrap_or(0))
    } else {
        None
    };
    let is_remote = |field: &str| {
        document[field]
            .as_str()
            .is_some_and(|text| !text.is_empty())
    };
    let has_error = document.get("error").is_some_and(|error| !error.is_null());
    AnswerScan {
        usage,
        has_ended: !has_error,
        has_error,
        is_external: is_remote("remote_host") || is_remote("remote_model"),
        ..NOTHING
    }
}

fn value() -> impl Strategy<Value = Value> {
    let name = || {
        prop_oneof![
            4 => proptest::sample::select(
                &[
                    "done", "error", "remote_host", "remote_model", "prompt_eval_count",
                    "eval_count", "usage", "prompt_tokens", "completion_tokens", "message",
                ][..],
            )
            .prop_map(str::to_owned),
            1 => ".{0,20}",
        ]
    };
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0_u64..50).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, move |inner| {
        prop_oneof![
            1 => proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            3 => proptest::collection::btree_map(name(), inner, 0..6)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// A piece of a stream.
fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => value().prop_map(|value| value.to_string()),
        1 => value().prop_map(|value| format!("{value:#}")),
        2 => proptest::sample::select(
            &[
                "data: ", "data:", "\n", "\n\n", "\r\n", "\r", "[DONE]", "data: [DONE]\n\n", ": x",
                "{\"done\":true}", "{\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}",
                "{", "}", "\"", "\\", "\u{feff}",
            ][..],
        )
        .prop_map(str::to_owned),
        1 => ".{0,9}",
    ]
}

proptest! {
    #[test]
    fn a_document_is_scanned_as_a_parser_reads_it(value in value(), is_pretty in any::<bool>()) {
        let text = if is_pretty { format!("{value:#}") } else { value.to_string() };
        prop_assert_eq!(of_json(&text), oracle(&value), "{}", text);
    }

    #[test]
    fn whatever_a_parser_refuses_is_malformed(text in r#"[\[\]{}",:0-9.eE+\-\\utrfalsn ]{0,12}"#) {
        let is_valid = serde_json::from_str::<Value>(&text).is_ok();
        // The scanner does not judge surrogates and the range of numbers.
        let is_judged = is_valid || !text.contains(['\\', 'e', 'E']);
        if is_judged {
            prop_assert_eq!(of_json(&text).is_malformed, !is_valid, "{}", text);
        }
    }

    #[test]
    fn a_scan_does_not_depend_on_how_the_bytes_are_split(
        pieces in proptest::collection::vec(piece(), 0..12),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6),
    ) {
        let stream = pieces.concat().into_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        for format in [AnswerFormat::Json, AnswerFormat::Lines, AnswerFormat::Events] {
            let mut in_pieces = AnswerScanner::new(format);
            for window in cuts.windows(2) {
                in_pieces.push(&stream[window[0]..window[1]]);
            }
            let mut in_bytes = AnswerScanner::new(format);
            for byte in &stream {
                in_bytes.push(&[*byte]);
            }
            let whole = scanned(format, &stream);
            prop_assert_eq!(in_pieces.finish(), whole);
            prop_assert_eq!(in_bytes.finish(), whole);
        }
    }

    #[test]
    fn lines_and_events_frame_the_same_documents(
        documents in proptest::collection::vec(value(), 1..5),
    ) {
        let mut lines = String::new();
        let mut events = String::new();
        for document in &documents {
            lines.extend([document.to_string().as_str(), "\n"]);
            events.extend(["data: ", document.to_string().as_str(), "\n\n"]);
        }
        let (lines, events) = (of_lines(&lines), of_events(&events));
        prop_assert!(!events.has_ended);
        prop_assert_eq!(AnswerScan { has_ended: false, ..lines }, events);
    }
}

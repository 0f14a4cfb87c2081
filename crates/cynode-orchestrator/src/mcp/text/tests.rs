use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::json;

use super::*;
use crate::mcp::{surface::ToolSet, view::MAX_TEXT};

const DOTTED: ToolSet = ToolSet::Full { underscored: false };

/// The view of a call.
fn view(surface: ToolSet, tool: &str, arguments: &Value) -> View {
    let arguments = arguments.as_object().cloned().unwrap_or_default();
    View::new(surface, surface.find(tool).expect("a tool"), &arguments)
}

fn shown(result: &Value) -> String {
    rendered(result, &view(DOTTED, "help.list", &json!({})))
}

fn rendered(result: &Value, view: &View) -> String {
    let text = render(&result.clone().into(), view);
    assert!(text.len() <= view.limit, "{} bytes", text.len());
    text
}

/// The call after these words, as a tool and its arguments.
fn call_in(text: &str, words: &str) -> (String, Value) {
    let (_, call) = text
        .split_once(words)
        .unwrap_or_else(|| panic!("no '{words}' in {text}"));
    let (tool, arguments) = call.split_once(' ').expect("arguments");
    let arguments = arguments.lines().next().expect("a line");
    (
        tool.to_owned(),
        serde_json::from_str(arguments).expect("JSON"),
    )
}

#[test]
fn a_command_is_rendered_as_its_end_and_its_output() {
    let result = json!({
        "exit_code": 3, "signal": null, "stdout": "out\n", "stderr": "", "encoding": "utf-8",
        "truncated": {"stdout": true}, "timed_out": true,
    });
    assert_eq!(
        shown(&result),
        "exit code 3 (timed out, output truncated)\nstdout:\nout\n"
    );
    assert_eq!(
        shown(&json!({"exit_code": null, "signal": "KILL", "stdout": "", "stderr": ""})),
        "ended by signal KILL"
    );
    assert_eq!(shown(&json!({"content": "fn main() {}"})), "fn main() {}");
    assert_eq!(shown(&json!({"items": []})), "{\"items\":[]}");
    let job = json!({
        "job_id": "1", "state": "failed", "exit_code": null, "signal": null,
        "stdout": "", "stderr": "", "error": {"code": "node_lost"},
    });
    assert_eq!(
        shown(&job),
        "job 1: failed\nerror: {\"code\":\"node_lost\"}"
    );
}

#[test]
fn the_gap_in_the_output_of_a_command_is_marked_and_the_call_that_reads_it_is_named() {
    let view = view(
        ToolSet::Coding,
        "sandbox_session_exec",
        &json!({"command": "x", "max_output_bytes": 8}),
    );
    let result = json!({
        "exec_id": "e", "exit_code": 0, "encoding": "utf-8", "stdout": "headTAIL", "stderr": "",
        "truncated": {"stdout": true, "stderr": false}, "bytes": {"stdout": 1_000, "stderr": 0},
    });
    let text = rendered(&result, &view);
    assert!(
        text.contains("stdout:\nhead\n… 992 bytes left out …\nTAIL\n"),
        "{text}"
    );
    assert_eq!(
        call_in(&text, "Read all: "),
        (
            "sandbox_session_output".to_owned(),
            json!({"exec_id": "e", "after_seq": 0, "max_bytes": 1_000})
        )
    );
}

#[test]
fn calls_that_read_on_have_the_names_and_arguments_of_the_client() {
    let long = json!({
        "exec_id": "e", "exit_code": 0, "encoding": "utf-8", "stderr": "err\n",
        "stdout": "line\n".repeat(4_000), "truncated": {"stdout": false, "stderr": false},
    });
    let here = json!({"task_id": "t", "session_id": "s", "argv": ["x"]});
    for (surface, name, expected) in [
        (DOTTED, "sandbox.session.exec", "sandbox.session.output"),
        (
            ToolSet::Full { underscored: true },
            "sandbox_session_exec",
            "sandbox_session_output",
        ),
    ] {
        let text = rendered(&long, &view(surface, name, &here));
        let (tool, arguments) = call_in(&text, "Read all: ");
        assert_eq!(tool, expected);
        assert_eq!(
            arguments,
            json!({"task_id": "t", "session_id": "s", "exec_id": "e", "after_seq": 0, "max_bytes": 20_004})
        );
        assert!(text.contains("omitted here") && text.contains("stderr:\nerr\n"));
    }
    let by_job = view(
        DOTTED,
        "sandbox.exec",
        &json!({"task_id": "t", "job_id": "j"}),
    );
    let (tool, arguments) = call_in(&rendered(&long, &by_job), "Read all: ");
    assert_eq!(
        (tool.as_str(), &arguments["job_id"]),
        ("sandbox.stream_logs", &json!("j"))
    );
}

#[test]
fn binary_output_is_named_and_not_shown() {
    let result = json!({
        "exec_id": "e", "exit_code": 0, "encoding": "base64", "stdout": STANDARD.encode([0xff; 9]),
        "stderr": STANDARD.encode("words"), "bytes": {"stdout": 9, "stderr": 5},
    });
    assert_eq!(
        shown(&result),
        "exit code 0\nstdout:\n(binary, 9 bytes)\n\nstderr:\nwords"
    );
    let file = json!({"content_b64": "/wD+", "sha256": "abc", "size": 3, "truncated": false});
    let text = shown(&file);
    assert!(
        text.starts_with("(binary, 3 bytes, sha256 abc") && !text.contains("/wD+"),
        "{text}"
    );
    let nul = json!({"content": "a\u{0}b", "sha256": "abc", "size": 3, "truncated": false});
    assert_eq!(
        shown(&nul),
        "(binary, 3 bytes, sha256 abc; the bytes are in content)"
    );
    // A character that the gap splits does not make a stream binary.
    let cut = view(
        DOTTED,
        "sandbox.session.exec",
        &json!({"max_output_bytes": 4}),
    );
    let bytes = ["aü".as_bytes()[..2].to_vec(), "üb".as_bytes()[1..].to_vec()].concat();
    let result = json!({
        "exec_id": "e", "exit_code": 0, "encoding": "base64", "stdout": STANDARD.encode(&bytes),
        "stderr": "", "truncated": {"stdout": true}, "bytes": {"stdout": 6, "stderr": 0},
    });
    let text = rendered(&result, &cut);
    assert!(
        text.contains("stdout:\na\n… 2 bytes left out …\nb\n"),
        "{text}"
    );
}

#[test]
fn terminal_control_is_removed_from_text() {
    let result = json!({
        "exit_code": 0, "stdout": "\u{1b}[31mred\u{1b}[0m\r\n", "stderr": "", "encoding": "utf-8",
    });
    assert_eq!(shown(&result), "exit code 0\nstdout:\nred\n");
}

#[test]
fn a_long_file_ends_with_whole_lines_and_the_call_that_reads_the_next() {
    let lines: Vec<String> = (1..=2_000)
        .map(|number| format!("line {number}\n"))
        .collect();
    let content = lines.concat();
    let result = json!({
        "content": content, "sha256": "abc", "size": 90_000, "truncated": true,
    });
    let here = json!({"task_id": "t", "session_id": "s", "path": "a.txt", "start_line": 11});
    let text = rendered(&result, &view(DOTTED, "sandbox.workspace.read_file", &here));
    let (tool, arguments) = call_in(&text, "Read on: ");
    let next = arguments["start_line"].as_u64().expect("a line");
    assert_eq!(
        (tool.as_str(), &arguments["path"], &arguments["task_id"]),
        ("sandbox.workspace.read_file", &json!("a.txt"), &json!("t"))
    );
    // The file begins at line 11, which is the first of the content.
    assert!(
        text.contains(&format!("line {}\n… 90000 bytes", next - 11)),
        "{text}"
    );
    assert!(!text.contains(&format!("line {}\n", next - 10)));

    let line = json!({
        "content": "x".repeat(7_168), "sha256": "abc", "size": 20_000, "truncated": true,
    });
    let here = json!({"path": "a.txt"});
    let text = rendered(
        &line,
        &view(ToolSet::Coding, "sandbox_workspace_read_file", &here),
    );
    assert_eq!(
        call_in(&text, "Read on: "),
        (
            "sandbox_workspace_read_file".to_owned(),
            json!({"path": "a.txt", "max_bytes": 20_000})
        )
    );
    // What was asked for is in the text too.
    let whole = json!({
        "content": "x".repeat(20_000), "sha256": "abc", "size": 20_000, "truncated": false,
    });
    let here = json!({"path": "a.txt", "max_bytes": 20_000});
    let view = view(ToolSet::Coding, "sandbox_workspace_read_file", &here);
    assert_eq!(rendered(&whole, &view).len(), 20_000);
}

#[test]
fn a_page_of_output_shows_whole_chunks_and_where_the_next_begins() {
    let here = json!({"exec_id": "e"});
    let view = view(ToolSet::Coding, "sandbox_session_output", &here);
    let chunk = |seq: u64, data: &str| json!({"seq": seq, "stream": "stdout", "data": data});
    let page = json!({"chunks": [chunk(1, "one\n"), chunk(2, "two")], "next_seq": 2});
    let text = rendered(&page, &view);
    assert!(text.starts_with("one\ntwo\nRead on: "), "{text}");
    assert_eq!(
        call_in(&text, "Read on: ").1,
        json!({"exec_id": "e", "after_seq": 2, "wait_ms": 10_000})
    );
    let ended = json!({
        "chunks": [chunk(3, "x\n")], "next_seq": 3, "exit": {"exit_code": 1, "signal": null},
    });
    assert_eq!(rendered(&ended, &view), "x\nexit code 1");

    let (first, second) = ("a".repeat(5_000), "b".repeat(5_000));
    let mut long = json!({
        "chunks": [chunk(1, &first), chunk(2, &second)], "next_seq": 2, "exit": {"exit_code": 0},
    });
    let text = rendered(&long, &view);
    assert_eq!(
        call_in(&text, "Read on: ").1,
        json!({"exec_id": "e", "after_seq": 1})
    );
    assert!(!text.contains("bbb"));
    bound(&mut long, &view);
    assert_eq!(
        (
            long["chunks"].as_array().map(Vec::len),
            &long["next_seq"],
            long.get("exit")
        ),
        (Some(1), &json!(1), None)
    );
    // One chunk that is too long is cut, and the call that reads all of it is named.
    let mut single = json!({
        "chunks": [chunk(1, &"c".repeat(60_000))], "next_seq": 1, "exit": {"exit_code": 0},
    });
    let text = rendered(&single, &view);
    assert_eq!(
        call_in(&text, "Read all: ").1,
        json!({"exec_id": "e", "max_bytes": 60_000})
    );
    bound(&mut single, &view);
    assert!(single.to_string().len() <= MAX_TEXT && single["chunks"][0]["truncated"] == true);
}

#[test]
fn lists_are_lines_and_their_structure_is_bounded_on_the_short_surface() {
    let entries: Vec<Value> = (0..1_000)
        .map(|number| json!({"path": format!("file-{number}"), "type": "file", "size": number}))
        .collect();
    let result = json!({"entries": entries, "truncated": false});
    for (surface, name) in [
        (DOTTED, "sandbox.workspace.list"),
        (ToolSet::Coding, "sandbox_workspace_list"),
    ] {
        let text = rendered(&result, &view(surface, name, &json!({})));
        assert!(
            text.starts_with("file-0 0\nfile-1 1\n") && text.contains("\nThere are more"),
            "{text}"
        );
    }
    let mut bounded = result.clone();
    let default = view(ToolSet::Coding, "sandbox_workspace_list", &json!({}));
    bound(&mut bounded, &default);
    assert!(bounded.to_string().len() <= MAX_TEXT + 32 && bounded["truncated"] == true);
    let mut asked = result.clone();
    let more = view(
        ToolSet::Coding,
        "sandbox_workspace_list",
        &json!({"max_entries": 1_000}),
    );
    bound(&mut asked, &more);
    assert_eq!(asked, result);
    assert!(rendered(&result, &more).contains("file-999 999"));
    assert_eq!(
        rendered(&json!({"entries": [], "truncated": false}), &default),
        "(no files)"
    );
    let found = json!({
        "matches": [{"path": "a", "line": 2, "column": 1, "text": "two", "before": ["one"], "after": ["three"]}],
        "truncated": false, "files_searched": 1,
    });
    assert_eq!(shown(&found), "a-1- one\na:2: two\na-3- three\n");
}

#[test]
fn a_list_that_is_cut_names_the_call_that_lists_more() {
    let entries = |count: usize| -> Vec<Value> {
        (0..count)
            .map(|number| json!({"path": format!("file-{number}"), "type": "file", "size": 1}))
            .collect()
    };
    let told = |surface, tool: &str, arguments: &Value, result: &Value| {
        let text = rendered(result, &view(surface, tool, arguments));
        text.lines().last().unwrap_or_default().to_owned()
    };
    let whole = json!({"entries": entries(1_000), "truncated": false});
    let cut = json!({"entries": entries(1_000), "truncated": true});
    let here = json!({"path": "src", "depth": 3});
    let list = |result: &Value| told(ToolSet::Coding, "sandbox_workspace_list", &here, result);
    for (result, count) in [(&whole, 1_000), (&cut, 4_000)] {
        assert_eq!(
            call_in(&list(result), "Or list more: "),
            (
                "sandbox_workspace_list".to_owned(),
                json!({"path": "src", "depth": 3, "max_entries": count})
            )
        );
    }
    // Nobody lists more than the most.
    let most = json!({"max_entries": 10_000});
    assert_eq!(
        told(ToolSet::Coding, "sandbox_workspace_list", &most, &cut),
        "There are more. List a directory below."
    );
    let dotted = |result: &Value| told(DOTTED, "sandbox.workspace.list", &json!({}), result);
    assert_eq!(
        dotted(&whole),
        "There are more; structuredContent has all 1000."
    );
    assert_eq!(
        call_in(&dotted(&cut), "Or list more: ").1,
        json!({"max_entries": 4_000})
    );
    let matches = json!({
        "matches": [{"path": "a", "line": 2, "text": "two", "before": [], "after": []}],
        "truncated": true, "files_searched": 1,
    });
    let here = json!({"pattern": "t.*", "glob": "*.rs", "max_results": 1});
    assert_eq!(
        call_in(
            &told(ToolSet::Coding, "sandbox_workspace_search", &here, &matches),
            "Or list more: "
        ),
        (
            "sandbox_workspace_search".to_owned(),
            json!({"pattern": "t.*", "glob": "*.rs", "max_results": 4})
        )
    );
}

#[test]
fn a_command_in_the_background_names_the_call_that_reads_its_output() {
    let here = json!({"task_id": "t", "session_id": "s", "argv": ["x"], "background": true});
    let text = rendered(
        &json!({"exec_id": "e"}),
        &view(DOTTED, "sandbox.session.exec", &here),
    );
    assert!(text.starts_with("running in the background, exec_id e. "));
    assert_eq!(
        call_in(&text, "Read its output: "),
        (
            "sandbox.session.output".to_owned(),
            json!({"task_id": "t", "session_id": "s", "exec_id": "e", "after_seq": 0, "wait_ms": 10_000})
        )
    );
}

#[test]
fn repaired_hunks_are_named_with_a_patch_and_with_its_rejects() {
    let view = view(ToolSet::Coding, "sandbox_workspace_apply_patch", &json!({}));
    let repair =
        |number: usize| json!({"path": "a", "hunk": number, "what": "without line numbers"});
    let applied = json!({
        "files": [{"path": "a", "operation": "modify"}], "repaired": [repair(1)],
    });
    assert_eq!(
        rendered(&applied, &view),
        "modify a\nrepaired a, hunk 1: without line numbers\n"
    );
    let rejected = json!({
        "code": "patch_rejected", "stage": "run", "message": "1 hunk", "remedy": "Read again.",
        "repaired": (1..=30).map(repair).collect::<Vec<_>>(),
        "rejects": [{"path": "a", "hunk": 2, "line": null, "reason": "it fits 2 places"}],
    });
    let text = failure(&rejected, &view);
    assert!(
        text.contains(
            "\nrepaired a, hunk 20: without line numbers\nrepaired 10 more\na, hunk 2: it fits"
        ) && !text.contains("hunk 21"),
        "{text}"
    );
}

#[test]
fn rejected_hunks_show_what_was_expected_and_found() {
    let problem = json!({
        "code": "patch_rejected", "stage": "run", "message": "1 hunk", "remedy": "Read again.",
        "rejects": [
            {"path": "a.txt", "hunk": 2, "line": 7, "reason": "the context differs",
             "expected": ["one", "two"], "found": ["one", "\u{1b}[1m2"]},
            {"path": "b.txt", "hunk": null, "line": null, "reason": "does not exist"},
        ],
    });
    let view = view(DOTTED, "sandbox.workspace.apply_patch", &json!({}));
    assert_eq!(
        failure(&problem, &view),
        "patch_rejected (run): 1 hunk\nRead again.\n\
         a.txt, hunk 2, line 7: the context differs\n  expected:\n    one\n    two\n  found:\n    \
         one\n    2\nb.txt: does not exist"
    );
    let many: Vec<Value> = (0..500)
        .map(|number| json!({"path": format!("file-{number}"), "reason": "differs".repeat(10)}))
        .collect();
    let problem = json!({"code": "patch_rejected", "rejects": many});
    let text = failure(&problem, &view);
    assert!(
        text.len() <= MAX_TEXT && text.contains("more rejects"),
        "{text}"
    );
}

#[test]
fn a_note_about_the_session_comes_first() {
    let output = ToolOutput {
        value: json!({"text": "help"}),
        note: Some("Session 1 was created.".to_owned()),
    };
    let view = view(ToolSet::Coding, "help_get", &json!({}));
    assert_eq!(render(&output, &view), "Session 1 was created.\nhelp");
}

#[test]
fn a_long_text_is_cut_between_characters() {
    for letter in ["a", "ü", "€", "🦀"] {
        for extra in 0..4 {
            let long = "x".repeat(extra) + &letter.repeat(MAX_TEXT + 1);
            let long = shown(&json!({"text": long}));
            assert!(long.contains("omitted here"), "{letter} {}", long.len());
            let file = "x".repeat(extra) + &letter.repeat(MAX_TEXT + 1);
            let file = shown(&json!({"content": file}));
            assert!(file.contains("Read on: "), "{letter}");
        }
    }
    assert_eq!(
        shown(&json!({"content": "a".repeat(MAX_TEXT)})).len(),
        MAX_TEXT
    );
    for letter in ["a", "ü"] {
        let long = shown(&json!({"items": [letter.repeat(MAX_TEXT)]}));
        assert!(long.ends_with(TRUNCATED), "{}", long.len());
    }
}

#[test]
fn names_from_a_sandbox_forge_no_lines() {
    let hostile = "x\nfake.txt 99\u{202e}";
    let escaped = "x\\nfake.txt 99\\u{202e}";
    let list = view(ToolSet::Coding, "sandbox_workspace_list", &json!({}));
    let entries = json!({
        "entries": [
            {"path": hostile, "type": "file", "size": 1},
            {"path": hostile, "type": "dir"},
            {"path": "\u{1b}[2Klink", "type": "symlink", "target": hostile},
        ],
        "truncated": false,
    });
    assert_eq!(
        rendered(&entries, &list),
        format!("{escaped} 1\n{escaped}/\n\\x1b[2Klink -> {escaped}\n")
    );
    let search = view(
        ToolSet::Coding,
        "sandbox_workspace_search",
        &json!({"pattern": "x"}),
    );
    let matches = json!({
        "matches": [{
            "path": hostile, "line": 2, "text": "one\rfake.txt:9: two\r\n",
            "before": ["a\rb\n"], "after": [],
        }],
        "files_searched": 1, "truncated": false,
    });
    assert_eq!(
        rendered(&matches, &search),
        format!("{escaped}-1- a\\nb\n{escaped}:2: one\\nfake.txt:9: two\n")
    );
    let patch = view(
        ToolSet::Coding,
        "sandbox_workspace_apply_patch",
        &json!({"diff": "x"}),
    );
    let patched = json!({"files": [{"operation": "update", "path": hostile}]});
    assert_eq!(rendered(&patched, &patch), format!("update {escaped}\n"));
    let failed = failure(
        &json!({
            "code": "c", "stage": "run", "message": hostile, "remedy": "r",
            "rejects": [{"path": hostile, "reason": hostile, "expected": ["a\rb\n"]}],
        }),
        &patch,
    );
    assert_eq!(
        failed,
        format!("c (run): {escaped}\nr\n{escaped}: {escaped}\n  expected:\n    a\\nb")
    );
}

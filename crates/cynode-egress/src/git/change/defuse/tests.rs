//! Directives, one by one and mixed at random.

use proptest::prelude::*;

use super::*;

/// The text as a reader sees it.
fn seen(text: &str) -> String {
    text.replace(BREAK, "")
}

#[test]
fn directives_are_broken_and_stay_readable() {
    for text in [
        "Ping @octocat and @org/team",
        "email me@example.org",
        "fixes #12, closes group/project!3 and resolves GH-4",
        "Closes https://example.org/a/b/issues/5",
        "Closes issue [this](https://example.org/a/b/issues/5)",
        "Fixes: ABC-12",
        "/merge",
        "text\n  /approve\n> /lgtm\n- /close",
        "wip [skip ci]",
        "[CI Skip] a",
        "***NO_CI***",
        "a\n\nskip-checks: true",
        "a\n\nCo-authored-by: X <x@example.org>",
        "a\n\nSigned-off-by : X",
        "CyNode-Task: 1",
        "%{source_branch}",
        "&#64;octocat &commat;octocat",
        "::error::x",
        "##[error]x and ##vso[task.x]",
    ] {
        let defused = body(text);
        assert_ne!(defused, text, "{text:?}");
        assert_harmless(&defused);
        assert_eq!(seen(&defused), text);
    }
}

#[test]
fn ordinary_text_is_left_alone() {
    for text in [
        "Fix the parser of dates",
        "# Heading\n\n- a list: b/c\n- https://example.org/a/b",
        "Use `#include` and `a != b`, ![image](a.png), 50% & more",
        "The colour #fff, C#, and a #tag!",
        "Close the file before renaming it",
        "Skip empty lines",
    ] {
        assert_eq!(body(text), text);
    }
}

#[test]
fn hidden_characters_go() {
    assert_eq!(
        body("a\u{202e}b\u{200b}c\u{0}\u{1b}[31md\r\ne\rf"),
        "abc[31md\ne\nf"
    );
    assert_eq!(title("  a\n b\u{2028}c\t"), "a b c");
    assert_eq!(body("@\u{200d}octocat"), format!("@{BREAK}octocat"));
    assert_eq!(title("\u{200b}\n"), "Change");
    assert_eq!(
        author("\"Eve\" <eve@example.org>\nparent 1"),
        format!("Eve\" eve@{BREAK}example.org parent 1")
    );
    assert_eq!(author("<>"), "agent");
}

#[test]
fn texts_are_bounded() {
    let long = "@a ".repeat(100_000);
    for (text, limit) in [
        (title(&long), MAX_TITLE_BYTES),
        (body(&long), MAX_BODY_BYTES),
        (message(&long), MAX_MESSAGE_BYTES),
        (author(&long), MAX_AUTHOR_BYTES),
        (title(&"ä".repeat(1_000)), MAX_TITLE_BYTES),
    ] {
        assert!(
            text.len() <= limit && text.len() > limit / 2,
            "{}",
            text.len()
        );
        assert_harmless(&text);
    }
}

fn fragments() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        prop::sample::select(vec![
            "@",
            "#",
            "!",
            "%",
            "{",
            "&",
            "#64;",
            "1",
            "12",
            "a",
            "name",
            "/",
            "merge",
            "close",
            "closes",
            "fixes",
            "[",
            "]",
            "skip",
            "ci",
            "no",
            "_",
            "-",
            " ",
            "\n",
            "\r",
            "\t",
            ":",
            "by",
            "Signed-off-by",
            "co-authored-by:",
            "GH-",
            "http://",
            "https://a/issues/1",
            "ABC-1",
            "\u{200b}",
            "\u{202e}",
            "\u{200d}",
            "ä",
            "::",
            "error",
            "##",
            "vso[",
            "commat;",
            "***NO_CI***",
            "skip-checks",
            ".",
            ">",
            "*",
            "\\",
            "<",
            "CyNode-Task",
        ])
        .prop_map(str::to_owned),
        any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(fragment, 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn no_directive_survives_and_repeating_changes_nothing(text in fragments()) {
        for defuse in [title, body, message, author] {
            let once = defuse(&text);
            assert_harmless(&once);
            prop_assert_eq!(defuse(&once), once);
        }
    }
}

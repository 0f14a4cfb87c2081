//! Removes the directives from text that an agent wrote and a forge, git or CI interprets: titles,
//! bodies, commit messages and names of authors.
//!
//! A directive stays readable: U+200B, a space without width, goes into it where its syntax allows
//! none. Forges look for directives in the raw text or in the rendered one, so quoting in Markdown
//! would not do in commit messages, and entities would not do in either: U+200B is in both. All
//! characters without width are removed from the text first, so an author can't bring them, and
//! repeating this changes nothing.
//!
//! Defused are mentions (`@name`), references (`#12`, `!3`, `GH-4`) and with them what closes an
//! issue, closing keywords before a URL or a ticket, commands at the beginning of a line (`/merge`,
//! `::error::`), requests to skip CI, trailers, `%{…}` of GitLab, commands in logs (`##[…]`), and
//! entities that are rendered as one of these characters.

use std::collections::BTreeSet;

use cynode_api::promotion_limits::{MAX_BODY_BYTES, MAX_MESSAGE_BYTES, MAX_TITLE_BYTES};

use super::names::is_hidden;

const BREAK: char = '\u{200b}';
const MAX_AUTHOR_BYTES: usize = 128;
/// Text after a closing keyword in which a URL is looked for.
const KEYWORD_WINDOW_BYTES: usize = 64;
/// Text in brackets that is taken for a request to CI.
const MAX_BRACKETED_BYTES: usize = 64;

const CLOSING_KEYWORDS: &[&str] = &[
    "close",
    "closes",
    "closed",
    "closing",
    "fix",
    "fixes",
    "fixed",
    "fixing",
    "resolve",
    "resolves",
    "resolved",
    "resolving",
    "implement",
    "implements",
    "implemented",
    "implementing",
    "reopen",
    "reopens",
    "reopened",
];
/// Besides those that end in `-by`.
const TRAILERS: &[&str] = &[
    "change-id",
    "cynode-promotion",
    "cynode-task",
    "changelog",
    "depends-on",
    "request-checks",
    "skip-checks",
    "skip-ci",
];
/// Words that, beside `skip` or `no`, keep CI from running.
const CI_WORDS: &[&str] = &[
    "actions",
    "appveyor",
    "azp",
    "azurepipelines",
    "build",
    "builds",
    "checks",
    "ci",
    "circleci",
    "cd",
    "deploy",
    "drone",
    "github",
    "netlify",
    "pipeline",
    "pipelines",
    "tests",
    "travis",
    "vercel",
    "woodpecker",
    "workflow",
    "workflows",
];
/// Names of the characters that directives begin with.
const ENTITIES: &[&str] = &[
    "amp",
    "colon",
    "commat",
    "excl",
    "lbrace",
    "lbrack",
    "lcub",
    "lsqb",
    "num",
    "percnt",
    "sol",
    "zerowidthspace",
];

/// One line.
pub(crate) fn title(text: &str) -> String {
    let title = defuse(&one_line(text), MAX_TITLE_BYTES, str::trim_end);
    if title.is_empty() {
        "Change".to_owned()
    } else {
        title
    }
}

pub(crate) fn body(text: &str) -> String {
    defuse(&visible(text), MAX_BODY_BYTES, str::trim_end)
}

pub(crate) fn message(text: &str) -> String {
    let message = defuse(visible(text).trim_start(), MAX_MESSAGE_BYTES, str::trim_end);
    if message.is_empty() {
        "Change".to_owned()
    } else {
        message
    }
}

/// The name in a commit's header, without what ends it there.
pub(crate) fn author(text: &str) -> String {
    let plain = one_line(&text.replace(['<', '>'], " "));
    let author = defuse(&plain, MAX_AUTHOR_BYTES, trim_crud);
    if author.is_empty() {
        "agent".to_owned()
    } else {
        author
    }
}

/// Drops from both ends what git drops from names.
fn trim_crud(name: &str) -> &str {
    name.trim_matches(|letter: char| {
        letter.is_whitespace() || matches!(letter, '.' | ',' | ':' | ';' | '"' | '\'' | '\\')
    })
}

/// The text without hidden and control characters, with `\n` as its only end of line.
fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut previous = ' ';
    for letter in text.chars() {
        match letter {
            '\n' if previous == '\r' => {}
            '\r' | '\u{85}' | '\u{2028}' | '\u{2029}' | '\n' => out.push('\n'),
            '\t' => out.push('\t'),
            letter if letter.is_control() || is_hidden(letter) => {}
            letter => out.push(letter),
        }
        previous = letter;
    }
    out
}

fn one_line(text: &str) -> String {
    let words: Vec<String> = visible(text)
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    words.join(" ")
}

/// Breaks the directives of a visible text, and cuts the text before so that the result fits.
fn defuse(text: &str, max_bytes: usize, trim: fn(&str) -> &str) -> String {
    let mut end = text.len().min(max_bytes);
    loop {
        let kept = trim(&text[..text.floor_char_boundary(end)]);
        let out = broken(kept);
        if out.len() <= max_bytes {
            return out;
        }
        end = (kept.len() * max_bytes / out.len()).min(kept.len() - 1);
    }
}

fn broken(text: &str) -> String {
    let mut breaks = Breaks {
        text,
        at: BTreeSet::new(),
    };
    breaks.characters();
    for (start, line) in lines(text) {
        breaks.line(start, line);
    }
    breaks.words();
    let mut out = String::with_capacity(text.len() + 3 * breaks.at.len());
    let mut last = 0;
    for at in breaks.at {
        out.push_str(&text[last..at]);
        out.push(BREAK);
        last = at;
    }
    out.push_str(&text[last..]);
    out
}

/// Lines with their offsets.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut start = 0;
    text.split('\n').map(move |line| {
        let at = start;
        start += line.len() + 1;
        (at, line)
    })
}

/// The offsets before which a text is broken.
struct Breaks<'a> {
    text: &'a str,
    at: BTreeSet<usize>,
}

impl Breaks<'_> {
    fn characters(&mut self) {
        let bytes = self.text.as_bytes();
        for (at, letter) in self.text.char_indices() {
            let after = at + letter.len_utf8();
            let Some(next) = self.text[after..].chars().next() else {
                continue;
            };
            let is_directive = match letter {
                '@' => !next.is_whitespace(),
                // Also with markup before the number, which rendering may remove.
                '#' | '!' => {
                    next.is_numeric() || matches!(next, '<' | '\\' | '&' | '*' | '_' | '`')
                }
                '%' => next == '{',
                '&' => self.is_entity(after),
                '-' => {
                    next.is_ascii_digit()
                        && at >= 2
                        && bytes[at - 2..at].eq_ignore_ascii_case(b"gh")
                }
                '[' => self.is_bracketed_request(after),
                _ => false,
            };
            if is_directive {
                self.at.insert(after);
            }
            let rest = &self.text[after..];
            if letter == '#' && (starts_with(rest, "#vso") || rest.starts_with("#[")) {
                self.at.insert(after);
            }
        }
    }

    /// Whether the text after `&` makes it an entity that matters.
    fn is_entity(&self, after: usize) -> bool {
        let rest = &self.text[after..];
        let name: String = rest
            .chars()
            .take_while(char::is_ascii_alphanumeric)
            .take(32)
            .map(|letter| letter.to_ascii_lowercase())
            .collect();
        rest.starts_with('#') || ENTITIES.contains(&name.as_str())
    }

    /// Whether the text after `[` asks CI for something.
    fn is_bracketed_request(&self, after: usize) -> bool {
        let rest = &self.text[after..];
        let end = rest.floor_char_boundary(rest.len().min(MAX_BRACKETED_BYTES));
        let Some((inner, _)) = rest[..end].split_once([']', '\n']) else {
            return false;
        };
        words(inner).any(|(_, word)| {
            let word = word.to_lowercase();
            matches!(word.as_str(), "skip" | "ci" | "actions" | "noci" | "skipci")
        })
    }

    fn line(&mut self, start: usize, line: &str) {
        // What precedes a command may be a quote or a list.
        let is_mark = |letter: char| !letter.is_alphabetic() && !matches!(letter, '/' | ':');
        let command = line.trim_start_matches(is_mark);
        let at = start + line.len() - command.len();
        let next = command.chars().nth(1);
        if command.starts_with('/') && next.is_some_and(|next| !next.is_whitespace())
            || command.starts_with("::")
        {
            self.at.insert(at + 1);
        }
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
        let rest = command.trim_start_matches(is_name);
        let name = command[..command.len() - rest.len()].to_ascii_lowercase();
        if rest.trim_start_matches([' ', '\t']).starts_with(':')
            && (name.ends_with("-by") || TRAILERS.contains(&name.as_str()))
        {
            self.at.insert(at + name.len());
        }
    }

    fn words(&mut self) {
        let all: Vec<(usize, &str)> = words(self.text).collect();
        for (index, (start, word)) in all.iter().enumerate() {
            let end = start + word.len();
            let word = word.to_lowercase();
            let is_ci = |word: &str| CI_WORDS.contains(&word);
            if let Some((next, other)) = all.get(index + 1)
                && *next - end <= 3
            {
                let other = other.to_lowercase();
                let skips = |one: &str| matches!(one, "skip" | "no");
                if skips(&word) && is_ci(&other) || is_ci(&word) && other == "skip" {
                    self.at.insert(end);
                }
            }
            // Not every forge agrees on where a word begins.
            let is_keyword = CLOSING_KEYWORDS
                .iter()
                .any(|keyword| word.ends_with(keyword));
            if is_keyword && self.closes(end) {
                self.at.insert(end);
            }
        }
    }

    /// Whether a URL or a ticket follows a closing keyword.
    fn closes(&self, end: usize) -> bool {
        let rest = &self.text[end..];
        let window = &rest[..rest.floor_char_boundary(rest.len().min(KEYWORD_WINDOW_BYTES))];
        let object = window.trim_start_matches(|letter: char| !letter.is_alphanumeric());
        if object.len() == window.len() {
            return false;
        }
        let key = object
            .trim_start_matches(|letter: char| letter.is_ascii_alphanumeric() || letter == '_');
        let is_ticket = key.len() < object.len()
            && key
                .strip_prefix('-')
                .is_some_and(|number| number.starts_with(|digit: char| digit.is_ascii_digit()));
        let window = window.to_lowercase();
        is_ticket
            || ["http", "://", "www."]
                .iter()
                .any(|url| window.contains(url))
    }
}

/// Words of letters and digits, with their offsets. An underscore separates them.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split(|letter: char| !letter.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(|word| (word.as_ptr().addr() - text.as_ptr().addr(), word))
}

fn starts_with(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// Fails if a defused text has a directive. Does not share code with what removes them.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn assert_harmless(text: &str) {
    let chars: Vec<char> = text.chars().collect();
    for pair in chars.windows(2) {
        let is_directive = match pair[0] {
            '@' => pair[1] != BREAK && !pair[1].is_whitespace(),
            '#' | '!' => pair[1].is_ascii_digit(),
            '%' => pair[1] == '{',
            '&' => pair[1] == '#',
            _ => false,
        };
        assert!(!is_directive, "{pair:?} in {text:?}");
    }
    for letter in chars {
        assert!(
            letter == BREAK || matches!(letter, '\n' | '\t') || !letter.is_control(),
            "{letter:?} in {text:?}"
        );
        assert!(
            !matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'),
            "{letter:?} in {text:?}"
        );
    }
    let lower = text.to_lowercase();
    for directive in [
        "[skip ci]",
        "[ci skip]",
        "[no ci]",
        "[skip actions]",
        "[actions skip]",
        "[skip-ci]",
        "[ci-skip]",
        "***no_ci***",
        "##[",
        "##vso[",
        "gh-1",
        "fixes http",
        "closes: http",
        "&commat;",
    ] {
        assert!(!lower.contains(directive), "{directive} in {text:?}");
    }
    for line in lower.lines() {
        let line = line.trim_start();
        for directive in [
            "/merge",
            "/approve",
            "/close",
            "/lgtm",
            "::error",
            "signed-off-by:",
            "co-authored-by:",
            "skip-checks:",
            "cynode-task:",
        ] {
            assert!(!line.starts_with(directive), "{directive} in {text:?}");
        }
    }
}

#[cfg(test)]
mod tests;

//! Patterns and globs that try to run forever, and texts to search.

use cynode_api::{SearchMatch, SearchRequest, file_limits};
use grep_matcher::Matcher as _;
use grep_regex::RegexMatcherBuilder;

use super::FuzzWorkspace;
use crate::fuzz::{fields, split};

const NAMES: [&str; 2] = ["a.rs", "src/b-1.txt"];

/// A search finds exactly the matching lines, in order, with correct context.
pub fn searches(input: &[u8]) {
    let (options, rest) = split(input);
    let mut parts = fields(rest);
    let (pattern, glob) = (
        parts.next().unwrap_or_default(),
        parts.next().unwrap_or_default(),
    );
    let (Ok(pattern), Ok(glob)) = (std::str::from_utf8(pattern), std::str::from_utf8(glob)) else {
        return;
    };
    let content = parts.next().unwrap_or_default();
    let request = SearchRequest {
        pattern: pattern.to_owned(),
        glob: (!glob.is_empty()).then(|| glob.to_owned()),
        case: (options & 1 != 0).then_some(options & 2 != 0),
        context_lines: Some(u32::from(options >> 2 & 3)),
        max_results: (options & 0x10 != 0).then_some(u32::from(options >> 5)),
        ..SearchRequest::default()
    };
    let scratch = FuzzWorkspace::new();
    for name in NAMES {
        scratch.put(name, content);
    }
    let Ok(result) = scratch.files.search(&request) else {
        return;
    };

    let wanted: Vec<&str> = NAMES
        .into_iter()
        .filter(|name| may_match(glob, name))
        .collect();
    let limit = request.max_results.unwrap_or(file_limits::DEFAULT_RESULTS) as usize;
    let context = request.context_lines.unwrap_or(0) as usize;
    assert!(result.matches.len() <= limit);
    assert!(result.files_searched <= wanted.len() as u64);
    let lines = lines(content);
    let matcher = RegexMatcherBuilder::new()
        .case_insensitive(!request.case.unwrap_or(true))
        .multi_line(true)
        .crlf(true)
        .build(pattern)
        .expect("a pattern that was searched for");
    let is_binary = content.contains(&0);
    for found in &result.matches {
        assert!(
            wanted.contains(&found.path.as_str()),
            "{} was not requested",
            found.path
        );
        assert!(!is_binary, "a binary file was searched");
        check(found, &lines, context, content);
        let line = lines[index(found)];
        assert!(
            matcher.is_match(line).expect("matched"),
            "line {} does not match",
            found.line
        );
    }
    for pair in result.matches.windows(2) {
        assert!(
            (pair[0].path.as_bytes(), pair[0].line) < (pair[1].path.as_bytes(), pair[1].line),
            "matches are unsorted or repeated"
        );
    }
    // A plain word can be searched without a regular expression.
    let is_word = !pattern.is_empty() && pattern.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if is_word && request.case.unwrap_or(true) && !result.truncated && !is_binary && is_plain(glob)
    {
        let holds = |line: &[u8]| {
            line.windows(pattern.len())
                .position(|window| window == pattern.as_bytes())
        };
        let expected: Vec<(String, u64, u64)> = wanted
            .iter()
            .flat_map(|name| {
                (1..).zip(&lines).filter_map(|(number, line)| {
                    Some(((*name).to_owned(), number, holds(line)? as u64 + 1))
                })
            })
            .collect();
        let seen: Vec<(String, u64, u64)> = result
            .matches
            .iter()
            .map(|found| (found.path.clone(), found.line, found.column))
            .collect();
        assert_eq!(
            seen, expected,
            "other lines than those with the word were found"
        );
        assert_eq!(result.files_searched, wanted.len() as u64);
    }
}

/// The lines of a text, without their newlines.
fn lines(content: &[u8]) -> Vec<&[u8]> {
    let ends = |line: &'_ [u8]| {
        line.strip_suffix(b"\n").map_or(line.len(), |line| {
            line.strip_suffix(b"\r").map_or(line.len(), <[u8]>::len)
        })
    };
    content
        .split_inclusive(|byte| *byte == b'\n')
        .map(|line| &line[..ends(line)])
        .collect()
}

fn index(found: &SearchMatch) -> usize {
    usize::try_from(found.line).expect("small") - 1
}

/// Asserts that a match and its context equal the lines of the file.
fn check(found: &SearchMatch, lines: &[&[u8]], context: usize, content: &[u8]) {
    let at = index(found);
    assert!(at < lines.len(), "line {} of {}", found.line, lines.len());
    // The last line may end in a lone carriage return, which is stripped too.
    let text = |line: &[u8]| {
        String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line)).into_owned()
    };
    let short = content.len() <= file_limits::MAX_LINE_BYTES;
    let same = |shown: &str, line: &[u8]| {
        !short || shown == String::from_utf8_lossy(line) || shown == text(line)
    };
    assert!(
        same(&found.text, lines[at]),
        "{:?} is not line {}",
        found.text,
        found.line
    );
    assert!(
        found.column >= 1 && found.column <= lines[at].len() as u64 + 1,
        "column {} of line {}",
        found.column,
        found.line
    );
    assert!(
        found.before.len() == context.min(at),
        "{} lines before line {}",
        found.before.len(),
        found.line
    );
    for (shown, line) in found.before.iter().rev().zip(lines[..at].iter().rev()) {
        assert!(
            same(shown, line),
            "{shown:?} is not before line {}",
            found.line
        );
    }
    assert!(
        found.after.len() == context.min(lines.len() - at - 1),
        "{} lines after line {}",
        found.after.len(),
        found.line
    );
    for (shown, line) in found.after.iter().zip(&lines[at + 1..]) {
        assert!(
            same(shown, line),
            "{shown:?} is not after line {}",
            found.line
        );
    }
}

fn is_plain(glob: &str) -> bool {
    glob.bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte))
}

/// Whether a glob may match a file: a plain glob matches only a file of that name.
fn may_match(glob: &str, name: &str) -> bool {
    let glob = glob.strip_prefix("./").unwrap_or(glob);
    let last = name.rsplit('/').next().unwrap_or(name);
    glob.is_empty() || !is_plain(glob) || glob == name || glob == last
}

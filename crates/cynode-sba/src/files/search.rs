//! Searches file contents.
//!
//! Invariants: no file can hide itself (`.gitignore` and dot files are irrelevant; only `.git`
//! directories are skipped); only regular files are opened; time, memory and response size are
//! bounded, and `truncated` reports when a bound cut the result.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use cynode_api::{
    FileType, SearchMatch, SearchRequest, SearchResult, file_limits, json_text_bytes,
};
use globset::{GlobBuilder, GlobSet};
use grep_matcher::{LineTerminator, Matcher};
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{
    BinaryDetection, Searcher, SearcherBuilder, Sink, SinkContext, SinkFinish, SinkMatch,
};
use rustix::fs::{CWD, FileType as Kind, Mode, OFlags, fstat, openat};

use super::{
    error::{Failure, FailureContext, Outcome},
    list::text,
    path::{self, Files},
    walk::{AtLimit, Step, walk},
};

/// Size of a compiled expression and of its tables.
const MAX_REGEX_BYTES: usize = 8 * 1024 * 1024;
/// Longest line that is searched.
const MAX_LINE_BUFFER_BYTES: usize = 16 * 1024 * 1024;
/// The JSON size of a match without its texts.
const MATCH_OVERHEAD_BYTES: usize = 250;

impl Files {
    pub(super) fn search(&self, request: &SearchRequest) -> Outcome<SearchResult> {
        let requested = request.path.as_deref().unwrap_or(".").as_bytes();
        let full_path = self.locate(requested)?;
        let prefix = path::printed_prefix(requested);
        if path::kind(&path::stat(&full_path)?) != FileType::Dir {
            let (file, _) = path::open_file(&full_path)?;
            return in_file(file, &prefix, request);
        }
        let top = openat(
            CWD,
            &full_path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .doing("searching", path::bytes(&full_path))?;
        in_directory(top, &prefix, request)
    }
}

/// Searches an open file, which is called `name` in the result.
pub(super) fn in_file(file: File, name: &[u8], request: &SearchRequest) -> Outcome<SearchResult> {
    let mut search = Search::new(request)?;
    search.file(file, name);
    Ok(search.finish())
}

/// Searches below an open directory; `prefix` is its name in the result.
pub(super) fn in_directory(
    top: OwnedFd,
    prefix: &[u8],
    request: &SearchRequest,
) -> Outcome<SearchResult> {
    let mut search = Search::new(request)?;
    let complete = walk(top, Some(search.deadline), AtLimit::Skip, |entry| {
        if search.has_reached_limit() {
            return Ok(Step::Stop);
        }
        match entry.kind {
            Kind::Directory if entry.name != b".git" => match entry.open_directory() {
                Ok(directory) => return Ok(Step::Into(directory)),
                // Directories that the sandbox's user can't read are skipped.
                Err(_) => return Ok(Step::Over),
            },
            Kind::RegularFile => {}
            _ => return Ok(Step::Over),
        }
        let mut printed = prefix.to_vec();
        path::join(&mut printed, entry.path);
        if search.wants(entry.path, &printed, entry.name) {
            let flags = OFlags::RDONLY
                | OFlags::NONBLOCK
                | OFlags::NOCTTY
                | OFlags::NOFOLLOW
                | OFlags::CLOEXEC;
            if let Ok(fd) = openat(entry.directory, entry.name, flags, Mode::empty()) {
                search.file(fd.into(), &printed);
            }
        }
        Ok(Step::Over)
    })?;
    search.result.truncated |= !complete;
    Ok(search.finish())
}

struct Search {
    matcher: RegexMatcher,
    searcher: Searcher,
    glob: Option<GlobSet>,
    context_lines: u64,
    max_results: usize,
    bytes_left: usize,
    deadline: Instant,
    result: SearchResult,
}

impl Search {
    fn new(request: &SearchRequest) -> Outcome<Self> {
        if request.pattern.is_empty() || request.pattern.len() > file_limits::MAX_PATTERN_BYTES {
            return Err(Failure::invalid(format!(
                "pattern must have from 1 to {} bytes",
                file_limits::MAX_PATTERN_BYTES
            )));
        }
        let context_lines = request.context_lines.unwrap_or(0);
        if context_lines > file_limits::MAX_CONTEXT_LINES {
            return Err(Failure::invalid(format!(
                "context_lines must be at most {}",
                file_limits::MAX_CONTEXT_LINES
            )));
        }
        let max_results = request.max_results.unwrap_or(file_limits::DEFAULT_RESULTS);
        if max_results == 0 || max_results > file_limits::MAX_RESULTS {
            return Err(Failure::invalid(format!(
                "max_results must be from 1 to {}",
                file_limits::MAX_RESULTS
            )));
        }
        let matcher = RegexMatcherBuilder::new()
            .case_insensitive(!request.case.unwrap_or(true))
            .multi_line(true)
            .crlf(true)
            .size_limit(MAX_REGEX_BYTES)
            .dfa_size_limit(MAX_REGEX_BYTES)
            .build(&request.pattern)
            .map_err(|error| Failure::invalid(format!("the pattern is invalid: {error}")))?;
        let glob = match &request.glob {
            Some(glob) if glob.len() > file_limits::MAX_PATTERN_BYTES => {
                return Err(Failure::invalid(format!(
                    "glob must have at most {} bytes",
                    file_limits::MAX_PATTERN_BYTES
                )));
            }
            Some(glob) => {
                let built = GlobBuilder::new(glob.strip_prefix("./").unwrap_or(glob))
                    .literal_separator(true)
                    .build();
                // Built as a set of one: a parsed glob may still be too deep or too large to
                // compile, and only sets report that.
                let set = built.and_then(|glob| GlobSet::builder().add(glob).build());
                Some(set.map_err(|error| {
                    Failure::invalid(format!("the glob is invalid: {}", error.kind()))
                })?)
            }
            None => None,
        };
        let searcher = SearcherBuilder::new()
            .line_terminator(LineTerminator::crlf())
            .binary_detection(BinaryDetection::quit(0))
            .heap_limit(Some(MAX_LINE_BUFFER_BYTES))
            .before_context(context_lines as usize)
            .after_context(context_lines as usize)
            .line_number(true)
            .build();
        Ok(Self {
            matcher,
            searcher,
            glob,
            context_lines: u64::from(context_lines),
            max_results: max_results as usize,
            bytes_left: file_limits::MAX_ANSWER_BYTES,
            deadline: Instant::now() + Duration::from_millis(file_limits::SEARCH_MS),
            result: SearchResult::default(),
        })
    }

    /// Whether the search has reached a limit.
    fn has_reached_limit(&mut self) -> bool {
        if Instant::now() >= self.deadline || self.bytes_left == 0 {
            self.result.truncated = true;
            return true;
        }
        // With a full result, continue until one more match shows that it is truncated.
        self.result.truncated && self.result.matches.len() >= self.max_results
    }

    fn wants(&self, relative: &[u8], printed: &[u8], name: &[u8]) -> bool {
        let fits = |glob: &GlobSet, path: &[u8]| {
            glob.is_match(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(path))
        };
        self.glob
            .as_ref()
            .is_none_or(|glob| fits(glob, relative) || fits(glob, printed) || fits(glob, name))
    }

    fn file(&mut self, file: File, printed: &[u8]) {
        let fits = fstat(&file).is_ok_and(|stat| {
            path::kind(&stat) == FileType::File
                && path::size(&stat) <= file_limits::MAX_SEARCHED_FILE_BYTES
        });
        if !fits {
            return;
        }
        self.result.files_searched += 1;
        let mut sink = Collector {
            matcher: &self.matcher,
            path: printed,
            context_lines: self.context_lines,
            room: self.max_results - self.result.matches.len(),
            bytes_left: self.bytes_left,
            recent: VecDeque::new(),
            matches: Vec::new(),
            binary: false,
            cut: false,
        };
        let reader = DeadlineReader {
            inner: file.take(file_limits::MAX_SEARCHED_FILE_BYTES),
            deadline: self.deadline,
        };
        // A file that can't be read completely (the deadline passed, or a line exceeds the limit)
        // leaves the result incomplete.
        let failed = self
            .searcher
            .search_reader(&self.matcher, reader, &mut sink)
            .is_err();
        if sink.binary {
            return;
        }
        self.result.truncated |= failed || sink.cut;
        self.bytes_left = sink.bytes_left;
        self.result.matches.append(&mut sink.matches);
    }

    fn finish(mut self) -> SearchResult {
        self.result.matches.sort_by(|one, other| {
            (one.path.as_bytes(), one.line).cmp(&(other.path.as_bytes(), other.line))
        });
        self.result
    }
}

/// A reader that fails after a deadline.
struct DeadlineReader<R> {
    inner: R,
    deadline: Instant,
}

impl<R: Read> Read for DeadlineReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if Instant::now() >= self.deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.inner.read(buffer)
    }
}

/// Collects the matches of one file.
struct Collector<'a> {
    matcher: &'a RegexMatcher,
    path: &'a [u8],
    context_lines: u64,
    room: usize,
    bytes_left: usize,
    /// The last lines seen, for the context before a match.
    recent: VecDeque<(u64, String)>,
    matches: Vec<SearchMatch>,
    binary: bool,
    cut: bool,
}

impl Collector<'_> {
    /// Adds a line as context to the matches around it.
    fn add_context(&mut self, line: u64, text: &str) {
        if self.context_lines == 0 {
            return;
        }
        for found in self
            .matches
            .iter_mut()
            .rev()
            .take_while(|found| found.line + self.context_lines >= line)
        {
            self.bytes_left = self.bytes_left.saturating_sub(json_text_bytes(text));
            found.after.push(text.to_owned());
        }
        if self.recent.len() as u64 == self.context_lines {
            self.recent.pop_front();
        }
        self.recent.push_back((line, text.to_owned()));
    }

    /// Whether more lines are needed: there is room, or the last match lacks context after it.
    fn needs_more(&self, line: u64) -> bool {
        if self.bytes_left == 0 {
            return false;
        }
        !self.cut
            || self
                .matches
                .last()
                .is_some_and(|last| line < last.line + self.context_lines)
    }
}

impl Sink for Collector<'_> {
    type Error = io::Error;

    fn matched(&mut self, _searcher: &Searcher, found: &SinkMatch<'_>) -> Result<bool, io::Error> {
        let line = found.line_number().unwrap_or(0);
        let shown = shorten(found.bytes());
        if self.matches.len() >= self.room || self.bytes_left == 0 {
            self.cut = true;
            self.add_context(line, &shown);
            return Ok(self.needs_more(line));
        }
        let column = self
            .matcher
            .find(found.bytes())
            .ok()
            .flatten()
            .map_or(1, |range| range.start() as u64 + 1);
        let before = self
            .recent
            .iter()
            .filter(|(number, _)| number + self.context_lines >= line)
            .map(|(_, text)| text.clone())
            .collect::<Vec<_>>();
        let (path, path_b64) = text(self.path);
        let path_bytes = json_text_bytes(&path)
            + path_b64
                .as_ref()
                .map_or(0, |bytes| bytes.0.len().div_ceil(3) * 4);
        let bytes = MATCH_OVERHEAD_BYTES
            + path_bytes
            + json_text_bytes(&shown)
            + before
                .iter()
                .map(|line| json_text_bytes(line))
                .sum::<usize>();
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
        self.add_context(line, &shown);
        self.matches.push(SearchMatch {
            path,
            path_b64,
            line,
            column,
            text: shown,
            before,
            after: Vec::new(),
        });
        self.cut |= self.bytes_left == 0;
        Ok(self.needs_more(line))
    }

    fn context(
        &mut self,
        _searcher: &Searcher,
        context: &SinkContext<'_>,
    ) -> Result<bool, io::Error> {
        let line = context.line_number().unwrap_or(0);
        self.add_context(line, &shorten(context.bytes()));
        Ok(self.needs_more(line))
    }

    fn finish(&mut self, _searcher: &Searcher, finish: &SinkFinish) -> Result<(), io::Error> {
        self.binary = finish.binary_byte_offset().is_some();
        Ok(())
    }
}

/// A line as text, without its newline, truncated between characters if it is long.
fn shorten(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut end = line.len().min(file_limits::MAX_LINE_BYTES);
    if end < line.len() {
        let lowest = end - 3;
        while end > lowest && line[end] & 0xc0 == 0x80 {
            end -= 1;
        }
    }
    String::from_utf8_lossy(&line[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use cynode_api::ErrorCode;

    use super::{super::tests::*, *};

    fn request(pattern: &str) -> SearchRequest {
        SearchRequest {
            pattern: pattern.to_owned(),
            ..SearchRequest::default()
        }
    }

    fn found(workspace: &TestWorkspace, request: &SearchRequest) -> Vec<(String, u64, u64)> {
        let result = workspace.files.search(request).expect("searched");
        result
            .matches
            .into_iter()
            .map(|found| (found.path, found.line, found.column))
            .collect()
    }

    fn at(path: &str, line: u64, column: u64) -> (String, u64, u64) {
        (path.to_owned(), line, column)
    }

    #[test]
    fn matches_come_sorted_with_line_and_column() {
        let workspace = TestWorkspace::new();
        workspace.put("b/file", "x\n  needle needle\nneedle\r\n");
        workspace.put("b-c", "needle");
        workspace.put("a", "é needle\n");
        assert_eq!(
            found(&workspace, &request("needle")),
            [
                at("a", 1, 4),
                at("b-c", 1, 1),
                at("b/file", 2, 3),
                at("b/file", 3, 1)
            ]
        );
        assert_eq!(
            found(&workspace, &request("^needle$")),
            [at("b-c", 1, 1), at("b/file", 3, 1)]
        );
    }

    #[test]
    fn only_git_directories_are_skipped() {
        let workspace = TestWorkspace::new();
        workspace.put(".gitignore", "ignored\n");
        workspace.put(".ignore", "ignored\n");
        for path in [
            "ignored",
            ".dot/file",
            ".git/config",
            "sub/.git/config",
            "plain",
        ] {
            workspace.put(path, "needle\n");
        }
        assert_eq!(
            found(&workspace, &request("needle")),
            [
                at(".dot/file", 1, 1),
                at("ignored", 1, 1),
                at("plain", 1, 1)
            ]
        );
        let inside = SearchRequest {
            path: Some(".git".to_owned()),
            ..request("needle")
        };
        assert_eq!(found(&workspace, &inside), [at(".git/config", 1, 1)]);
    }

    #[test]
    fn binary_files_links_and_fifos_are_skipped() {
        let workspace = TestWorkspace::new();
        workspace.put("binary", b"needle\n\0needle\n");
        workspace.put("latin", b"\xe9 needle\n");
        workspace.fifo("fifo");
        symlink("latin", workspace.path("link")).expect("link");
        let result = workspace
            .files
            .search(&request("needle"))
            .expect("searched");
        assert_eq!(result.matches.len(), 1);
        assert_eq!(result.matches[0].text, "\u{fffd} needle");
        assert!(!result.truncated);
        let fifo = SearchRequest {
            path: Some("fifo".to_owned()),
            ..request("x")
        };
        assert_eq!(code(workspace.files.search(&fifo)), ErrorCode::NotAFile);
    }

    #[test]
    fn case_glob_and_path_narrow_the_search() {
        let workspace = TestWorkspace::new();
        for path in ["src/a.rs", "src/deep/b.rs", "src/c.txt"] {
            workspace.put(path, "Needle\n");
        }
        assert!(found(&workspace, &request("needle")).is_empty());
        let search = |glob: &str, path: Option<&str>| {
            let request = SearchRequest {
                case: Some(false),
                glob: Some(glob.to_owned()),
                path: path.map(str::to_owned),
                ..request("needle")
            };
            found(&workspace, &request)
                .into_iter()
                .map(|(path, _, _)| path)
                .collect::<Vec<_>>()
        };
        assert_eq!(search("*.rs", None), ["src/a.rs", "src/deep/b.rs"]);
        assert_eq!(search("src/*.rs", None), ["src/a.rs"]);
        assert_eq!(search("**/*.{rs,txt}", Some("src/deep")), ["src/deep/b.rs"]);
        assert_eq!(search("src/*.rs", Some("src")), ["src/a.rs"]);
        assert_eq!(search("deep/*", Some("src")), ["src/deep/b.rs"]);
        assert_eq!(search("*", Some("src/c.txt")), ["src/c.txt"]);
        let absolute = workspace.path("src").to_str().expect("text").to_owned();
        assert_eq!(search("a.*", Some(&absolute)), [format!("{absolute}/a.rs")]);
    }

    #[test]
    fn context_is_given_around_each_match_even_when_it_overlaps() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "1\n2\nx3\n4\nx5\n6\n7\n8\n9\nx10");
        let result = workspace
            .files
            .search(&SearchRequest {
                context_lines: Some(2),
                ..request("x")
            })
            .expect("searched");
        let context: Vec<_> = result
            .matches
            .iter()
            .map(|found| (found.before.join(","), found.after.join(",")))
            .collect();
        let expected = [("1,2", "4,x5"), ("x3,4", "6,7"), ("8,9", "")];
        assert_eq!(
            context,
            expected.map(|(before, after)| (before.to_owned(), after.to_owned()))
        );
    }

    #[test]
    fn the_result_limit_truncates_and_the_last_match_keeps_its_context() {
        let workspace = TestWorkspace::new();
        workspace.put("a", "x1\nx2\nx3\n");
        workspace.put("b", "x4\n");
        let result = workspace
            .files
            .search(&SearchRequest {
                context_lines: Some(1),
                max_results: Some(2),
                ..request("x")
            })
            .expect("searched");
        assert!(result.truncated);
        assert_eq!(result.matches.len(), 2);
        assert_eq!(
            (
                result.matches[1].text.as_str(),
                result.matches[1].after.as_slice()
            ),
            ("x2", &["x3".to_owned()][..])
        );
        let exact = workspace
            .files
            .search(&SearchRequest {
                max_results: Some(4),
                ..request("x")
            })
            .expect("searched");
        assert!(!exact.truncated);
        assert_eq!(exact.files_searched, 2);
    }

    #[test]
    fn long_lines_are_cut_between_characters_and_the_answer_is_bounded() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "é".repeat(3_000));
        let result = workspace.files.search(&request("é")).expect("searched");
        assert_eq!(result.matches[0].text, "é".repeat(1_024));
        assert_eq!(shorten(&[b'a'; 2_048]).len(), 2_048);
        assert_eq!(shorten(&[0x80; 3_000]).chars().count(), 2_045);
        workspace.put("many", format!("{}\n", "m".repeat(2_000)).repeat(10_000));
        let many = workspace
            .files
            .search(&SearchRequest {
                max_results: Some(10_000),
                context_lines: Some(20),
                ..request("m")
            })
            .expect("searched");
        let written = serde_json::to_string(&many).expect("JSON").len();
        assert!(
            many.truncated && written < file_limits::MAX_ANSWER_BYTES + 200_000,
            "{written}"
        );
        // Characters that take six bytes each in JSON, and short lines that consist almost only of
        // overhead.
        workspace.put(
            "many",
            format!("m{}\n", "\u{1}".repeat(2_000)).repeat(2_000),
        );
        let odd = workspace
            .files
            .search(&SearchRequest {
                max_results: Some(10_000),
                ..request("m")
            })
            .expect("searched");
        let written = serde_json::to_string(&odd).expect("JSON").len();
        assert!(
            odd.truncated && written < file_limits::MAX_ANSWER_BYTES + 200_000,
            "{written}"
        );
        workspace.put("many", "m\n".repeat(10_000));
        let short = workspace
            .files
            .search(&SearchRequest {
                max_results: Some(10_000),
                context_lines: Some(20),
                ..request("m")
            })
            .expect("searched");
        let written = serde_json::to_string(&short).expect("JSON").len();
        assert!(
            short.truncated && written < file_limits::MAX_ANSWER_BYTES + 200_000,
            "{written}"
        );
    }

    #[test]
    fn a_search_stops_at_its_time_limit() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "x\n");
        let mut search = Search::new(&request("x")).expect("valid");
        search.deadline = Instant::now();
        search.file(File::open(workspace.path("file")).expect("opened"), b"file");
        assert!(search.has_reached_limit());
        let result = search.finish();
        assert!(result.truncated && result.matches.is_empty());
    }

    #[test]
    fn an_invalid_glob_is_refused() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "x\n");
        let glob = format!("{}a{}", "{".repeat(300), "}".repeat(300));
        let error = refused(workspace.files.search(&SearchRequest {
            glob: Some(glob),
            ..request("x")
        }));
        assert!(
            error.code == ErrorCode::InvalidRequest && error.message.contains("glob"),
            "{error:?}"
        );
    }

    #[test]
    fn invalid_requests_are_refused_with_the_reason() {
        let workspace = TestWorkspace::new();
        let bad = refused(workspace.files.search(&request("(")));
        assert!(
            bad.code == ErrorCode::InvalidRequest && bad.message.contains("pattern"),
            "{bad:?}"
        );
        let bad = refused(workspace.files.search(&SearchRequest {
            glob: Some("[".to_owned()),
            ..request("x")
        }));
        assert!(
            bad.code == ErrorCode::InvalidRequest && bad.message.contains("glob"),
            "{bad:?}"
        );
        assert_eq!(
            code(workspace.files.search(&request("(a{1000}){1000}"))),
            ErrorCode::InvalidRequest
        );
        assert_eq!(
            code(workspace.files.search(&request(""))),
            ErrorCode::InvalidRequest
        );
        assert_eq!(
            code(workspace.files.search(&SearchRequest {
                context_lines: Some(21),
                ..request("x")
            })),
            ErrorCode::InvalidRequest
        );
        assert_eq!(
            code(workspace.files.search(&SearchRequest {
                path: Some("none".to_owned()),
                ..request("x")
            })),
            ErrorCode::NotFound
        );
    }
}

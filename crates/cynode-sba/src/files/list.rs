//! Lists a directory.
//!
//! Invariants: entries are sorted by the bytes of their paths, and a truncated list has the first
//! ones; memory holds at most as many entries and bytes as a response may have, however large the
//! directories are; links are listed, never followed, except for the listed path itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{CStr, OsStr},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use cynode_api::{
    Base64Bytes, FileEntry, FileType, ListRequest, ListResult, file_limits, json_text_bytes,
};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, Stat, openat, readlinkat, statat},
    io::Errno,
};

use super::{
    confined::ConfinedRoot,
    error::{Failure, FailureContext, Outcome},
    names,
    path::{self, Files},
};

const MAX_LISTING_TIME: Duration = Duration::from_secs(10);

impl Files {
    pub(super) fn list(&self, request: &ListRequest) -> Outcome<ListResult> {
        let requested = match (&request.path, &request.path_b64) {
            (Some(_), Some(_)) => return Err(Failure::invalid("give path or path_b64, not both")),
            (Some(path), None) => path.as_bytes(),
            (None, Some(path)) => &path.0,
            (None, None) => b".",
        };
        let depth = request.depth.unwrap_or(1);
        if depth == 0 || depth > file_limits::MAX_DEPTH {
            return Err(Failure::invalid(format!(
                "depth must be from 1 to {}",
                file_limits::MAX_DEPTH
            )));
        }
        let max_entries = request.max_entries.unwrap_or(file_limits::DEFAULT_ENTRIES);
        if max_entries == 0 || max_entries > file_limits::MAX_ENTRIES {
            return Err(Failure::invalid(format!(
                "max_entries must be from 1 to {}",
                file_limits::MAX_ENTRIES
            )));
        }

        let full_path = self.locate(requested)?;
        let prefix = path::printed_prefix(requested);
        let top = match openat(
            CWD,
            &full_path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        ) {
            Ok(top) => top,
            Err(Errno::NOTDIR | Errno::NOENT) => return single(&full_path, &prefix),
            Err(errno) => return Err(Failure::system(errno, "listing", path::bytes(&full_path))),
        };
        let extent = Extent {
            depth: depth as usize,
            max_entries: max_entries as usize,
            max_bytes: file_limits::MAX_ANSWER_BYTES,
            hidden: request.hidden.unwrap_or(false),
            skips: |_| false,
        };
        list_directory(top, prefix, extent).doing("listing", path::bytes(&full_path))
    }
}

/// How much of a tree is listed.
pub(super) struct Extent {
    pub(super) depth: usize,
    pub(super) max_entries: usize,
    /// Of the JSON.
    pub(super) max_bytes: usize,
    pub(super) hidden: bool,
    /// Directories with such a name are listed without what they contain.
    pub(super) skips: fn(&[u8]) -> bool,
}

/// Lists an open directory. Replacing directories with links meanwhile leads nowhere else.
pub(super) fn list_directory(
    top: OwnedFd,
    prefix: Vec<u8>,
    extent: Extent,
) -> Result<ListResult, Errno> {
    let depth = extent.depth;
    let mut listing = Listing {
        prefix,
        extent,
        deadline: Instant::now() + MAX_LISTING_TIME,
        kept: BTreeMap::new(),
        pending: BTreeSet::new(),
        bytes: 0,
        truncated: false,
    };
    listing.add_directory(&top, b"")?;
    let top = ConfinedRoot::at(top);
    while let Some(directory) = listing.pending.pop_first() {
        if directory.split(|byte| *byte == b'/').count() >= depth {
            continue;
        }
        if Instant::now() >= listing.deadline {
            listing.truncated = true;
            break;
        }
        listing.descend(&top, &directory);
    }
    Ok(listing.finish())
}

/// A path that is not a directory is its own only entry.
fn single(full_path: &Path, prefix: &[u8]) -> Outcome<ListResult> {
    list_entry(CWD, full_path, prefix).doing("listing", path::bytes(full_path))
}

/// Lists one name of a directory, whatever it is.
pub(super) fn list_entry(
    directory: impl AsFd,
    name: &Path,
    prefix: &[u8],
) -> Result<ListResult, Errno> {
    let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let target = (path::kind(&stat) == FileType::Symlink)
        .then(|| readlinkat(&directory, name, Vec::new()).ok())
        .flatten();
    let entry = entry(prefix, &stat, target.as_deref().map(CStr::to_bytes));
    Ok(ListResult {
        entries: vec![entry],
        truncated: false,
    })
}

struct Listing {
    prefix: Vec<u8>,
    extent: Extent,
    deadline: Instant,
    /// By path relative to the listed directory.
    kept: BTreeMap<Vec<u8>, FileEntry>,
    /// Unread directories in `kept`. The entries of a directory sort after it, so a directory
    /// dropped from `kept` need not be read.
    pending: BTreeSet<Vec<u8>>,
    /// The JSON size of the kept entries.
    bytes: usize,
    truncated: bool,
}

impl Listing {
    fn descend(&mut self, top: &ConfinedRoot, relative: &[u8]) {
        match top
            .readable_directory(relative)
            .and_then(|directory| self.add_directory(&directory, relative))
        {
            // Unreadable and deleted directories have no entries.
            Ok(())
            | Err(
                Errno::ACCESS
                | Errno::PERM
                | Errno::NOENT
                | Errno::NOTDIR
                | Errno::LOOP
                | Errno::XDEV,
            ) => {}
            Err(_) => self.truncated = true,
        }
    }

    fn add_directory(&mut self, directory: &OwnedFd, relative: &[u8]) -> Result<(), Errno> {
        let (names, complete) =
            names::smallest(directory, self.extent.max_entries, self.deadline, |name| {
                self.extent.hidden || !name.starts_with(b".")
            })?;
        self.truncated |= !complete;
        for name in names {
            let mut path = relative.to_vec();
            path::join(&mut path, &name.bytes);
            let full = self.kept.len() >= self.extent.max_entries;
            if full
                && self
                    .kept
                    .last_key_value()
                    .is_some_and(|(last, _)| *last < path)
            {
                self.truncated = true;
                break;
            }
            let stat = match statat(directory, name.bytes.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(errno),
            };
            if full {
                self.drop_last();
            }
            let kind = path::kind(&stat);
            let target = (kind == FileType::Symlink)
                .then(|| readlinkat(directory, name.bytes.as_slice(), Vec::new()).ok())
                .flatten();
            let mut printed = self.prefix.clone();
            path::join(&mut printed, &path);
            if kind == FileType::Dir && !(self.extent.skips)(&name.bytes) {
                self.pending.insert(path.clone());
            }
            let entry = entry(&printed, &stat, target.as_deref().map(CStr::to_bytes));
            self.bytes += json_bytes(&entry);
            self.kept.insert(path, entry);
            while self.bytes > self.extent.max_bytes {
                self.drop_last();
            }
        }
        Ok(())
    }

    fn drop_last(&mut self) {
        if let Some((path, entry)) = self.kept.pop_last() {
            self.bytes -= json_bytes(&entry);
            self.truncated = true;
            self.pending.remove(&path);
        }
    }

    fn finish(self) -> ListResult {
        ListResult {
            entries: self.kept.into_values().collect(),
            truncated: self.truncated,
        }
    }
}

/// The JSON size of an entry, approximately.
fn json_bytes(entry: &FileEntry) -> usize {
    // Member names, numbers and time.
    const OVERHEAD_BYTES: usize = 128;
    let bytes = entry
        .path_b64
        .as_ref()
        .map_or(0, |bytes| bytes.0.len().div_ceil(3) * 4);
    OVERHEAD_BYTES
        + json_text_bytes(&entry.path)
        + bytes
        + entry.target.as_deref().map_or(0, json_text_bytes)
}

/// A path as text, with its bytes if it is not UTF-8.
pub(super) fn text(path: &[u8]) -> (String, Option<Base64Bytes>) {
    match std::str::from_utf8(path) {
        Ok(text) => (text.to_owned(), None),
        Err(_) => (
            String::from_utf8_lossy(path).into_owned(),
            Some(Base64Bytes(path.to_vec())),
        ),
    }
}

fn entry(path: &[u8], stat: &Stat, target: Option<&[u8]>) -> FileEntry {
    let (path, path_b64) = text(path);
    FileEntry {
        path,
        path_b64,
        kind: path::kind(stat),
        size: path::size(stat),
        mode: format!("{:04o}", path::permissions(stat)),
        mtime: modified(stat).into(),
        target: target.map(|target| OsStr::from_bytes(target).to_string_lossy().into_owned()),
    }
}

/// The time of the last change, clamped to the years that RFC 3339 can represent.
fn modified(stat: &Stat) -> SystemTime {
    const YEAR_1: i64 = -62_135_596_800;
    const YEAR_9999_ENDS: i64 = 253_402_300_799;
    let seconds = stat.st_mtime.clamp(YEAR_1, YEAR_9999_ENDS);
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(whole)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(whole)
    };
    let nanos = Duration::from_nanos(stat.st_mtime_nsec.min(999_999_999));
    base.and_then(|base| base.checked_add(nanos))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use std::os::unix::{ffi::OsStringExt, fs::symlink};

    use cynode_api::ErrorCode;

    use super::{super::tests::*, *};

    fn listed(
        workspace: &TestWorkspace,
        path: Option<&str>,
        change: impl FnOnce(&mut ListRequest),
    ) -> ListResult {
        let mut request = ListRequest {
            path: path.map(str::to_owned),
            ..ListRequest::default()
        };
        change(&mut request);
        workspace.files.list(&request).expect("listed")
    }

    fn paths(result: &ListResult) -> Vec<&str> {
        result
            .entries
            .iter()
            .map(|entry| entry.path.as_str())
            .collect()
    }

    fn tree() -> TestWorkspace {
        let workspace = TestWorkspace::new();
        for path in ["a/x", "a/y/z", "a-b", "b", ".hidden/file", "a/.secret"] {
            workspace.put(path, "12345");
        }
        symlink("a", workspace.path("link")).expect("link");
        workspace
    }

    #[test]
    fn a_listing_is_sorted_by_bytes_and_omits_hidden_names() {
        let workspace = tree();
        assert_eq!(
            paths(&listed(&workspace, None, |_| {})),
            ["a", "a-b", "b", "link"]
        );
        assert_eq!(
            paths(&listed(&workspace, None, |request| request.depth = Some(2))),
            ["a", "a-b", "a/x", "a/y", "b", "link"]
        );
        assert_eq!(
            paths(&listed(&workspace, None, |request| request.depth = Some(64))),
            ["a", "a-b", "a/x", "a/y", "a/y/z", "b", "link"]
        );
        let hidden = listed(&workspace, None, |request| {
            (request.depth, request.hidden) = (Some(2), Some(true));
        });
        assert_eq!(
            paths(&hidden),
            [
                ".hidden",
                ".hidden/file",
                "a",
                "a-b",
                "a/.secret",
                "a/x",
                "a/y",
                "b",
                "link"
            ]
        );
    }

    #[test]
    fn listed_paths_are_relative_or_absolute_like_the_request() {
        let workspace = tree();
        assert_eq!(
            paths(&listed(&workspace, Some("./a/"), |_| {})),
            ["a/x", "a/y"]
        );
        let absolute = workspace.path("a").to_str().expect("text").to_owned();
        assert_eq!(
            paths(&listed(&workspace, Some(&absolute), |_| {})),
            [format!("{absolute}/x"), format!("{absolute}/y")]
        );
        assert_eq!(paths(&listed(&workspace, Some("a/x"), |_| {})), ["a/x"]);
        assert_eq!(
            paths(&listed(&workspace, Some("link"), |_| {})),
            ["link/x", "link/y"]
        );
    }

    #[test]
    fn an_entry_has_its_type_and_attributes() {
        let workspace = tree();
        workspace.fifo("pipe");
        symlink("nowhere", workspace.path("dangling")).expect("link");
        let result = listed(&workspace, None, |_| {});
        let entry = |path: &str| {
            result
                .entries
                .iter()
                .find(|entry| entry.path == path)
                .expect("listed")
        };
        assert_eq!(
            (entry("a").kind, entry("b").kind, entry("pipe").kind),
            (FileType::Dir, FileType::File, FileType::Other)
        );
        assert_eq!((entry("b").size, entry("b").mode.len()), (5, 4));
        assert_eq!(
            (entry("link").kind, entry("link").target.as_deref()),
            (FileType::Symlink, Some("a"))
        );
        let dangling = listed(&workspace, Some("dangling"), |_| {});
        assert_eq!(dangling.entries[0].target.as_deref(), Some("nowhere"));
    }

    #[test]
    fn a_listing_is_truncated_to_the_first_entries() {
        let workspace = TestWorkspace::new();
        for number in (0..50).rev() {
            workspace.put(&format!("d{number:02}/file"), "");
        }
        let result = listed(&workspace, None, |request| {
            (request.depth, request.max_entries) = (Some(5), Some(5));
        });
        assert_eq!(
            paths(&result),
            ["d00", "d00/file", "d01", "d01/file", "d02"]
        );
        assert!(result.truncated);
        let exact = listed(&workspace, Some("d00"), |request| {
            request.max_entries = Some(1);
        });
        assert!(!exact.truncated);
    }

    #[test]
    fn a_listing_of_long_names_ends_when_the_response_is_full() {
        let workspace = TestWorkspace::new();
        // Each takes six bytes in JSON.
        let name = |number: usize| format!("{number:04}{}", "\u{1}".repeat(200));
        for number in 0..4_000 {
            workspace.put(&name(number), "");
        }
        let most = |request: &mut ListRequest| request.max_entries = Some(10_000);
        let result = listed(&workspace, None, most);
        let written = serde_json::to_string(&result).expect("JSON").len();
        assert!(
            result.truncated
                && written <= file_limits::MAX_ANSWER_BYTES
                && written > file_limits::MAX_ANSWER_BYTES * 3 / 4,
            "{written}"
        );
        let expected: Vec<String> = (0..result.entries.len()).map(name).collect();
        assert_eq!(
            paths(&result),
            expected,
            "other entries than the first were kept"
        );
        for number in 2_000..4_000 {
            std::fs::remove_file(workspace.path(&name(number))).expect("removed");
        }
        let result = listed(&workspace, None, most);
        assert!(!result.truncated && result.entries.len() == 2_000);
    }

    #[test]
    fn names_that_are_not_utf8_carry_their_bytes() {
        let workspace = TestWorkspace::new();
        let name = std::ffi::OsString::from_vec(b"x\xff".to_vec());
        std::fs::create_dir(workspace.files.root.join(&name)).expect("made");
        let result = listed(&workspace, None, |_| {});
        assert_eq!(result.entries[0].path, "x\u{fffd}");
        assert_eq!(
            result.entries[0].path_b64,
            Some(Base64Bytes(b"x\xff".to_vec()))
        );
        let below = listed(&workspace, None, |request| {
            request.path_b64 = Some(Base64Bytes(b"x\xff".to_vec()));
        });
        assert!(below.entries.is_empty());
    }

    #[test]
    fn requests_out_of_bounds_and_missing_paths_are_refused() {
        let workspace = TestWorkspace::new();
        let list = |request: ListRequest| code(workspace.files.list(&request));
        assert_eq!(
            list(ListRequest {
                depth: Some(0),
                ..ListRequest::default()
            }),
            ErrorCode::InvalidRequest
        );
        assert_eq!(
            list(ListRequest {
                max_entries: Some(10_001),
                ..ListRequest::default()
            }),
            ErrorCode::InvalidRequest
        );
        assert_eq!(
            list(ListRequest {
                path: Some("none".to_owned()),
                ..ListRequest::default()
            }),
            ErrorCode::NotFound
        );
        workspace.put("file", "");
        assert_eq!(
            list(ListRequest {
                path: Some("file/x".to_owned()),
                ..ListRequest::default()
            }),
            ErrorCode::NotADirectory
        );
    }

    #[test]
    fn times_outside_of_the_calendar_are_clamped() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "");
        let mut stat = path::stat(&workspace.path("file")).expect("stat");
        for seconds in [i64::MIN, i64::MAX, -1, 0] {
            stat.st_mtime = seconds;
            let json = serde_json::to_string(&entry(b"file", &stat, None))
                .expect("every entry can be written");
            assert!(json.contains("mtime"), "{json}");
        }
    }

    #[test]
    fn the_answer_is_json_over_the_connection() {
        let workspace = tree();
        let answer = workspace.ask(
            FileOp::List {
                request: ListRequest::default(),
            },
            b"",
        );
        let result: ListResult = serde_json::from_slice(answer.body()).expect("a result");
        assert_eq!(result.entries.len(), 4);
    }
}

//! Results of calls, for audit: the effect of a call, in a header of its response, and the state of
//! a call whose response was lost.
//!
//! Invariant: the header is plain ASCII and at most [`call_limits::MAX_RESULT_BYTES`] long; entries
//! left out to fit are counted.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{
    Base64Bytes, CallId, ExecExit, ExecId, FileType, PatchOperation, PatchResult, Session,
    SessionId, SessionState, SignalName, SignalScope, WorkspaceId,
};

/// Identifies a call by a UUID that the orchestrator's gate generates, so that its state can be
/// queried later.
pub const CALL_HEADER: &str = "x-cynode-call";
/// The effect of a call, as one JSON object.
pub const RESULT_HEADER: &str = "x-cynode-result";

/// Bounds of call results and of the calls that a node remembers.
pub mod call_limits {
    /// The longest result.
    pub const MAX_RESULT_BYTES: usize = 8 * 1024;
    /// A node remembers this many calls, the newest.
    pub const MAX_REMEMBERED_CALLS: usize = 20_000;
    /// Total size of the remembered results; if they are long, a node remembers fewer calls.
    pub const MAX_REMEMBERED_BYTES: usize = 16 * 1024 * 1024;
}

/// The longest path written as text, escapes included. Longer ones are written as base64, which is
/// shorter for the longest possible path.
const MAX_PATH_TEXT: usize = 5_600;
/// Share of a result for file changes; the rest is for the surrounding object.
const MAX_CHANGES_BYTES: usize = call_limits::MAX_RESULT_BYTES - 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    /// The call is in flight.
    Running,
    Answered,
    /// The caller disconnected before the response. Effects may continue: a command runs on for a
    /// while.
    Abandoned,
    /// The call never arrived, or is no longer remembered.
    NotFound,
}

/// The record of a call on a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Call {
    pub call_id: CallId,
    pub state: CallState,
    /// The status of the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The result header of the response. Before the response: what is already known, such as the
    /// id of a running command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    /// With `not_found`: the node remembers every call that arrived after this time, so a call sent
    /// later has not arrived.
    #[serde(
        default,
        with = "time::serde::rfc3339::option",
        skip_serializing_if = "Option::is_none"
    )]
    pub remembered_since: Option<OffsetDateTime>,
    /// With `not_found`: the time on the node's clock, to correct for skew.
    #[serde(
        default,
        with = "time::serde::rfc3339::option",
        skip_serializing_if = "Option::is_none"
    )]
    pub now: Option<OffsetDateTime>,
}

/// The result of a command that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecOutcome {
    pub exec_id: ExecId,
    #[serde(flatten)]
    pub exit: ExecExit,
}

/// The result of a call that creates, ends or changes a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionOutcome {
    pub session_id: SessionId,
    pub state: SessionState,
    pub workspace_id: WorkspaceId,
}

impl From<&Session> for SessionOutcome {
    fn from(session: &Session) -> Self {
        Self {
            session_id: session.session_id,
            state: session.state,
            workspace_id: session.workspace_id,
        }
    }
}

/// The result of a signal to one command or to all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SignalOutcome {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<ExecId>,
    pub signal: SignalName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<SignalScope>,
}

/// The result of a write to standard input; never contains the data itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StdinOutcome {
    pub exec_id: ExecId,
    pub bytes: StdinField<u64>,
    /// In hexadecimal.
    pub sha256: StdinField<String>,
    pub eof: bool,
}

/// A value for standard input, shaped like those of the output streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StdinField<T> {
    pub stdin: T,
}

/// One file, directory or link that a call created, changed or removed. The hashes are present for
/// regular files of at most 100 MiB that the sandbox's user can read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    /// As given in the call; relative paths are below the workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Replaces `path` if that is not UTF-8, or too long once escaped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<Base64Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256_before: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256_after: Option<String>,
    /// Absent for a regular file.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<FileType>,
}

impl FileChange {
    #[must_use]
    pub fn new(path: &[u8]) -> Self {
        let text = std::str::from_utf8(path)
            .ok()
            .filter(|text| ascii_json(text).len() <= MAX_PATH_TEXT);
        Self {
            path: text.map(str::to_owned),
            path_b64: text.is_none().then(|| Base64Bytes(path.to_vec())),
            ..Self::default()
        }
    }

    #[must_use]
    pub fn before(self, sha256: Option<String>) -> Self {
        Self {
            sha256_before: sha256,
            ..self
        }
    }

    #[must_use]
    pub fn after(self, sha256: Option<String>) -> Self {
        Self {
            sha256_after: sha256,
            ..self
        }
    }

    #[must_use]
    pub fn of_kind(self, kind: FileType) -> Self {
        Self {
            kind: (kind != FileType::File).then_some(kind),
            ..self
        }
    }
}

/// The result of a call that changes files: the first changes, as many as fit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChanges {
    pub changes: Vec<FileChange>,
    /// The number of changes left out.
    #[serde(default)]
    pub more: u64,
}

impl FileChanges {
    /// Whether the next change may still fit. If not, callers can skip computing its details.
    #[must_use]
    pub const fn has_room(&self) -> bool {
        self.more == 0
    }

    pub fn add(&mut self, change: FileChange) {
        if self.has_room() {
            self.changes.push(change);
            if ascii_json(&self.changes).len() <= MAX_CHANGES_BYTES {
                return;
            }
            self.changes.pop();
        }
        self.more = self.more.saturating_add(1);
    }
}

impl FromIterator<FileChange> for FileChanges {
    fn from_iter<I: IntoIterator<Item = FileChange>>(changes: I) -> Self {
        let mut all = Self::default();
        changes.into_iter().for_each(|change| all.add(change));
        all
    }
}

impl From<&PatchResult> for FileChanges {
    fn from(result: &PatchResult) -> Self {
        let named = |path: &str, bytes: &Option<Base64Bytes>| {
            FileChange::new(bytes.as_ref().map_or(path.as_bytes(), |bytes| &bytes.0))
        };
        let mut changes = Self::default();
        for file in &result.files {
            let (mut before, after) = (file.sha256_before.clone(), file.sha256_after.clone());
            if let Some(from) = &file.from {
                // The hash before belongs to the source of the rename.
                let before = before.take();
                if file.operation == PatchOperation::Rename {
                    changes.add(named(from, &file.from_b64).before(before));
                }
            }
            changes.add(
                named(&file.path, &file.path_b64)
                    .before(before)
                    .after(after),
            );
        }
        changes
    }
}

/// JSON in plain ASCII, fit for a header.
#[must_use]
pub fn ascii_json(value: &(impl Serialize + ?Sized)) -> String {
    // Types made of strings, numbers and lists always serialize.
    let json = serde_json::to_string(value).unwrap_or_default();
    let mut ascii = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() && !character.is_ascii_control() {
            ascii.push(character);
        } else {
            // Outside strings JSON is ASCII, so this is in a string. Writing to a string can't
            // fail.
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _written = write!(ascii, "\\u{unit:04x}");
            }
        }
    }
    ascii
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{PatchedFile, file_limits::MAX_PATH_BYTES};

    const HASH: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    fn change(path: &[u8]) -> FileChange {
        FileChange::new(path)
            .before(Some(HASH.to_owned()))
            .after(Some(HASH.to_owned()))
    }

    #[test]
    fn the_longest_path_fits_in_any_escaping() {
        for byte in [b'a', 0x01, 0x7f, b'"', 0xff] {
            let path = [byte; MAX_PATH_BYTES];
            let changes = FileChanges::from_iter([change(&path)]);
            assert_eq!((changes.changes.len(), changes.more), (1, 0), "{byte}");
            let change = &changes.changes[0];
            let named = change.path.clone().map_or_else(
                || change.path_b64.clone().expect("bytes").0,
                String::into_bytes,
            );
            assert_eq!(named, path);
        }
        let wide = "ü".repeat(MAX_PATH_BYTES / 2);
        assert_eq!(
            FileChange::new(wide.as_bytes()).path_b64,
            Some(Base64Bytes(wide.into_bytes()))
        );
    }

    #[test]
    fn changes_are_listed_from_the_first_and_the_excess_is_counted() {
        let changes: FileChanges = (0..1_000)
            .map(|number| change(format!("file-{number}").as_bytes()))
            .collect();
        assert!(
            changes.changes.len() > 30
                && ascii_json(&changes).len() <= call_limits::MAX_RESULT_BYTES,
            "{}",
            changes.changes.len()
        );
        assert_eq!(changes.changes.len() as u64 + changes.more, 1_000);
        for (number, change) in changes.changes.iter().enumerate() {
            assert_eq!(change.path, Some(format!("file-{number}")));
        }
        assert!(!changes.has_room());
    }

    #[test]
    fn a_change_omits_unknown_fields() {
        let value = |change: FileChange| serde_json::to_value(change).expect("changes serialise");
        assert_eq!(
            value(FileChange::new(b"a")),
            serde_json::json!({ "path": "a" })
        );
        assert_eq!(
            value(
                FileChange::new(b"a")
                    .of_kind(FileType::File)
                    .after(Some(HASH.to_owned()))
            ),
            serde_json::json!({ "path": "a", "sha256_after": HASH })
        );
        assert_eq!(
            value(FileChange::new(b"\xff").of_kind(FileType::Dir)),
            serde_json::json!({ "path_b64": "/w==", "type": "dir" })
        );
        assert_eq!(
            serde_json::to_value(FileChanges::default()).expect("changes serialise"),
            serde_json::json!({ "changes": [], "more": 0 })
        );
    }

    #[test]
    fn a_renamed_file_is_reported_as_removed_under_its_old_name() {
        let file = |operation, from: Option<&str>| PatchedFile {
            path: "new".to_owned(),
            path_b64: None,
            operation,
            sha256_before: Some("b".to_owned()),
            sha256_after: Some("a".to_owned()),
            from: from.map(str::to_owned),
            from_b64: None,
        };
        let of = |file| {
            FileChanges::from(&PatchResult {
                files: vec![file],
                ..PatchResult::default()
            })
            .changes
        };
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(
            of(file(PatchOperation::Modify, None)),
            [FileChange::new(b"new").before(text("b")).after(text("a"))]
        );
        assert_eq!(
            of(file(PatchOperation::Copy, Some("old"))),
            [FileChange::new(b"new").after(text("a"))]
        );
        let renamed = [
            FileChange::new(b"old").before(text("b")),
            FileChange::new(b"new").after(text("a")),
        ];
        assert_eq!(of(file(PatchOperation::Rename, Some("old"))), renamed);
    }

    proptest! {
        #[test]
        fn escaped_json_is_plain_ascii_and_round_trips(text in any::<String>()) {
            let ascii = ascii_json(&text);
            prop_assert!(ascii.bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{ascii}");
            prop_assert_eq!(serde_json::from_str::<String>(&ascii).expect("JSON"), text);
        }

        #[test]
        fn any_changes_fit_into_a_header(
            paths in proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), 1..4_096),
                0..12,
            ),
        ) {
            let changes: FileChanges = paths.iter().map(|path| change(path)).collect();
            prop_assert!(ascii_json(&changes).len() <= call_limits::MAX_RESULT_BYTES);
            prop_assert_eq!(changes.changes.len() as u64 + changes.more, paths.len() as u64);
            prop_assert!(paths.is_empty() || !changes.changes.is_empty());
        }
    }
}

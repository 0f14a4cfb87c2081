//! Files in a sandbox.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{Base64Bytes, Flags};

/// Bounds and defaults of file calls.
pub mod file_limits {
    pub const MAX_PUT_BYTES: u64 = 100 * 1024 * 1024;
    pub const MAX_PATCH_BYTES: u64 = 10 * 1024 * 1024;
    /// Size of an edited file, before and after the edit.
    pub const MAX_EDITED_FILE_BYTES: u64 = 32 * 1024 * 1024;
    /// Lines that a rejected edit names.
    pub const MAX_EDIT_LINES: usize = 10;
    /// Leading path components that a patch strips.
    pub const DEFAULT_STRIP: u32 = 1;
    pub const MAX_STRIP: u32 = 32;
    pub const MAX_PATH_BYTES: usize = 4_095;
    pub const DEFAULT_ENTRIES: u32 = 1_000;
    pub const MAX_ENTRIES: u32 = 10_000;
    pub const MAX_DEPTH: u32 = 64;
    pub const DEFAULT_RESULTS: u32 = 1_000;
    pub const MAX_RESULTS: u32 = 10_000;
    pub const MAX_CONTEXT_LINES: u32 = 20;
    pub const MAX_PATTERN_BYTES: usize = 4_096;
    pub const SEARCH_MS: u64 = 10_000;
    /// Listings and searches are truncated at about this many bytes of JSON.
    pub const MAX_ANSWER_BYTES: usize = 4 * 1024 * 1024;
    /// Longer matching and context lines are truncated.
    pub const MAX_LINE_BYTES: usize = 2_048;
    /// Directories that one watch covers.
    pub const MAX_WATCHED_DIRECTORIES: usize = 1_000;
    /// Watches of a session at once.
    pub const MAX_WATCHES: usize = 4;
    /// File changes queued for one watch; further ones are reported as an overflow.
    pub const MAX_PENDING_CHANGES: usize = 1_000;
    /// Larger files are not searched.
    pub const MAX_SEARCHED_FILE_BYTES: u64 = 64 * 1024 * 1024;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileType {
    File,
    Dir,
    Symlink,
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEntry {
    /// Has replacement characters if the name is not UTF-8; `path_b64` then holds the bytes.
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<Base64Bytes>,
    #[serde(rename = "type")]
    pub kind: FileType,
    pub size: u64,
    /// Permission bits in octal, such as `0644`.
    pub mode: String,
    #[serde(with = "time::serde::rfc3339")]
    pub mtime: OffsetDateTime,
    /// The target of a symbolic link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ListRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<Base64Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_entries: Option<u32>,
    /// Include names that begin with a dot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ListResult {
    pub entries: Vec<FileEntry>,
    pub truncated: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SearchRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// A regular expression.
    pub pattern: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub glob: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Match case; true by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub case: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_lines: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_results: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SearchMatch {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<Base64Bytes>,
    /// Starts at 1.
    pub line: u64,
    /// In bytes, starting at 1.
    pub column: u64,
    pub text: String,
    pub before: Vec<String>,
    pub after: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SearchResult {
    pub matches: Vec<SearchMatch>,
    /// True if the result limit or the time limit ended the search.
    pub truncated: bool,
    pub files_searched: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PatchRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// A unified diff, with git's extensions, or a patch that begins with `*** Begin Patch`. A
    /// symbolic link (mode 120000) is itself patched, never followed. Wrong hunk headers of a diff
    /// are repaired, and a hunk without line numbers must fit exactly one place.
    pub diff: String,
    /// Leading path components to strip from the names of a diff; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strip: Option<u32>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PatchOperation {
    Create,
    Modify,
    Delete,
    Rename,
    Copy,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PatchedFile {
    /// Has replacement characters if the name is not UTF-8; `path_b64` then holds the bytes.
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<Base64Bytes>,
    pub operation: PatchOperation,
    /// Hash of the content; for a symbolic link, of its target.
    pub sha256_before: Option<String>,
    pub sha256_after: Option<String>,
    /// The source of a renamed or copied file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_b64: Option<Base64Bytes>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PatchResult {
    pub files: Vec<PatchedFile>,
    /// Hunks whose wrong headers were corrected. Also a field of the `patch_rejected` problem.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repaired: Vec<PatchRepair>,
    #[serde(flatten)]
    pub flags: Flags,
}

/// A hunk whose wrong header was corrected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PatchRepair {
    /// Escaped, and truncated if it is long.
    pub path: String,
    /// Starts at 1.
    pub hunk: u32,
    /// The correction that was made.
    pub what: String,
}

/// The media type of a patch that an orchestrator has parsed and encoded. Workers accept it in
/// place of a [`PatchRequest`].
pub const ENCODED_PATCH: &str = "application/vnd.cynode.patch";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PatchReject {
    pub path: String,
    /// Starts at 1; null if the whole file was rejected.
    pub hunk: Option<u32>,
    /// The line of the old file where the hunk should apply.
    pub line: Option<u64>,
    pub reason: String,
    /// The first lines that the hunk expects in the old file, with control characters escaped;
    /// long lines are cut.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expected: Vec<String>,
    /// The lines of the old file where the hunk should apply, escaped and cut as in `expected`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub found: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EditRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub path: String,
    /// The exact text to replace. Unless `all` is set, it must occur exactly once.
    pub old: String,
    pub new: String,
    /// Replace every occurrence.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// The SHA-256 that the file must have, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_match: Option<String>,
}

/// The result of an edit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEdited {
    pub sha256: String,
    pub size: u64,
    /// The number of replaced occurrences.
    pub replaced: u64,
    /// Hash of the previous content.
    pub sha256_before: Option<String>,
    #[serde(flatten)]
    pub flags: Flags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileEventKind {
    Created,
    Modified,
    Deleted,
    Moved,
    /// Changes were left out: list the directory to see the current state.
    Overflow,
}

/// A change below a watched path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEvent {
    /// Has replacement characters if the name is not UTF-8; `path_b64` then holds the bytes.
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<Base64Bytes>,
    pub kind: FileEventKind,
    /// The former path of what was moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub from: String,
    pub to: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overwrite: bool,
}

/// The result of a write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileWritten {
    pub sha256: String,
    pub size: u64,
    pub mode: String,
    pub created: bool,
    /// Hash of the previous content.
    pub sha256_before: Option<String>,
    #[serde(flatten)]
    pub flags: Flags,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MkdirRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub path: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub parents: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportFormat {
    Patch,
    Tar,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub format: ExportFormat,
    /// The base of the patch: a commit, `HEAD` by default, or `brought` for the initial state of the
    /// session's workspace (the contents of an artifact or repository).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The directory to archive; `/workspace` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// The length of a string in JSON, with an allowance for the field around it.
#[must_use]
pub fn json_text_bytes(text: &str) -> usize {
    let escaped = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 2,
        0..=0x1f => 6,
        _ => 1,
    };
    text.bytes().map(escaped).sum::<usize>() + 24
}

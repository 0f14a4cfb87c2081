//! `sandbox.workspace.*`: files of a session, below `/workspace` only.

use bytes::Bytes;
use cynode_api::{
    Artifact, Base64Bytes, ExportFormat, ExportRequest, FileWritten, ListRequest, ListResult,
    PatchRequest, PatchResult, SearchRequest, SearchResult, SessionId, TaskId,
};
use cynode_policy::within_workspace;
use cynode_service::ApiError;
use http::Method;
use serde::Serialize;
use utoipa::ToSchema;

use super::{Arguments, Kind, MANAGERS, Tool, arguments};
use crate::mcp::plan::{Call, Part, Plan, Shape};

const WORKSPACE: &str = "/workspace";
/// What is read of a file when nothing is said, and at most.
pub(super) const DEFAULT_READ: u64 = 262_144;
pub(super) const MAX_READ: u64 = 1024 * 1024;

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<ReadFile, FileContent>(
            "sandbox.workspace.read_file",
            MANAGERS,
            Kind::Reads,
            "Read a file of the workspace, or some of its lines. sha256 and size are the whole file's; pass sha256 to write_file as if_match.",
        ),
        Tool::new::<WriteFile, FileWritten>(
            "sandbox.workspace.write_file",
            MANAGERS,
            Kind::Changes,
            "Write a whole file of the workspace, at once; directories above it are made. With if_match only when the file is still the one that was read.",
        ),
        Tool::new::<ApplyPatch, PatchResult>(
            "sandbox.workspace.apply_patch",
            MANAGERS,
            Kind::Changes,
            "Apply a unified diff to the workspace: all of it or nothing. What does not apply is named hunk by hunk.",
        ),
        Tool::new::<List, ListResult>(
            "sandbox.workspace.list",
            MANAGERS,
            Kind::Reads,
            "List files of the workspace.",
        ),
        Tool::new::<Search, SearchResult>(
            "sandbox.workspace.search",
            MANAGERS,
            Kind::Reads,
            "Search the files of the workspace for a regular expression.",
        ),
        Tool::new::<ExportPatch, Artifact>(
            "sandbox.workspace.export_patch",
            MANAGERS,
            Kind::Adds,
            "Keep what changed in the workspace's git repository, untracked files too, as a patch: an artifact of the task.",
        ),
    ]
}

/// A file, or a part of it. `content` when it is text, `content_b64` when it is not.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FileContent {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content_b64: Option<Base64Bytes>,
    /// Of the whole file.
    pub(crate) sha256: String,
    /// Of the whole file, in bytes.
    pub(crate) size: u64,
    /// Whether there is more of what was asked for.
    pub(crate) truncated: bool,
}

arguments! {
    ReadFile {
        task_id: TaskId,
        session_id: SessionId,
        path: String,
        /// From 1.
        start_line: Option<u64>,
        /// The last one that is wanted.
        end_line: Option<u64>,
        /// 262,144 by default, 1,048,576 at most.
        max_bytes: Option<u64>,
    }
    WriteFile {
        task_id: TaskId,
        session_id: SessionId,
        path: String,
        content: Option<String>,
        content_b64: Option<Base64Bytes>,
        /// The sha256 that the file must have; `none` when there must be none.
        if_match: Option<String>,
        /// In octal, such as `0755`.
        mode: Option<String>,
    }
    ApplyPatch {
        task_id: TaskId,
        session_id: SessionId,
        /// A unified diff, git's extensions included; paths from the workspace, with one leading part (`a/`, `b/`).
        diff: String,
    }
    List {
        task_id: TaskId,
        session_id: SessionId,
        /// The workspace when absent.
        path: Option<String>,
        /// 1 by default.
        depth: Option<u32>,
        /// 1,000 by default.
        max_entries: Option<u32>,
    }
    Search {
        task_id: TaskId,
        session_id: SessionId,
        /// A regular expression.
        pattern: String,
        /// Which files, such as `*.rs`.
        glob: Option<String>,
        context_lines: Option<u32>,
        /// 1,000 by default.
        max_results: Option<u32>,
    }
    ExportPatch {
        task_id: TaskId,
        session_id: SessionId,
        /// What the patch is made against; `HEAD` by default.
        base: Option<String>,
    }
}

/// A path below the workspace, by its words.
fn inside(path: &str) -> Result<String, ApiError> {
    let full = within_workspace(path);
    if full == WORKSPACE
        || full
            .strip_prefix(WORKSPACE)
            .is_some_and(|rest| rest.starts_with('/'))
    {
        return Ok(full);
    }
    Err(ApiError::invalid(format!(
        "path: '{}' is not inside /workspace",
        path.chars().take(200).collect::<String>()
    )))
}

/// The bytes that one of two arguments has.
pub(super) fn content(text: Option<String>, bytes: Option<Base64Bytes>) -> Result<Bytes, ApiError> {
    match (text, bytes) {
        (Some(text), None) => Ok(text.into()),
        (None, Some(bytes)) => Ok(bytes.0.into()),
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "content: only one of content and content_b64 can be sent",
        )),
        (None, None) => Err(ApiError::invalid(
            "content: missing; send content, or content_b64 for bytes",
        )),
    }
}

/// How much of something may be asked for by a tool: its result is held whole.
pub(super) fn at_most(name: &str, bytes: Option<u64>) -> Result<(), ApiError> {
    if bytes.is_none_or(|bytes| (1..=MAX_READ).contains(&bytes)) {
        Ok(())
    } else {
        Err(ApiError::invalid(format!(
            "{name}: must be 1 to {MAX_READ}"
        )))
    }
}

/// Which part of a file is wanted.
pub(super) fn part(
    start_line: Option<u64>,
    end_line: Option<u64>,
    max_bytes: Option<u64>,
) -> Result<Part, ApiError> {
    let start = start_line.unwrap_or(1);
    if start == 0 {
        return Err(ApiError::invalid("start_line: lines are counted from 1"));
    }
    if end_line.is_some_and(|end| end < start) {
        return Err(ApiError::invalid("end_line: is before start_line"));
    }
    let most = max_bytes.unwrap_or(DEFAULT_READ);
    at_most("max_bytes", Some(most))?;
    Ok(Part {
        start_line: start,
        end_line,
        max_bytes: usize::try_from(most).unwrap_or(usize::MAX),
    })
}

pub(super) fn read(task_id: TaskId, session_id: SessionId, path: &str, part: Part) -> Plan {
    Plan::Call(
        Call::get(format!("/v1/sessions/{session_id}/files"), task_id)
            .query("path", Some(path))
            .shaped(Shape::File(part)),
    )
}

pub(super) fn write(
    task_id: TaskId,
    session_id: SessionId,
    path: &str,
    bytes: Bytes,
    if_match: Option<&str>,
    mode: Option<&str>,
) -> Result<Plan, ApiError> {
    let (matches, none) = match if_match {
        Some("none") => (None, Some("*")),
        Some(hash) => (
            Some(format!("\"sha256:{}\"", hash.trim_start_matches("sha256:"))),
            None,
        ),
        None => (None, None),
    };
    let call = Call::new(
        Method::PUT,
        format!("/v1/sessions/{session_id}/files"),
        task_id,
    )
    .query("path", Some(path))
    .bytes(bytes);
    Ok(Plan::Call(
        call.header("if-match", matches.as_deref())?
            .header("if-none-match", none)?
            .header("x-mode", mode)?,
    ))
}

impl Arguments for ReadFile {
    fn plan(self) -> Result<Plan, ApiError> {
        let part = part(self.start_line, self.end_line, self.max_bytes)?;
        Ok(read(
            self.task_id,
            self.session_id,
            &inside(&self.path)?,
            part,
        ))
    }
}

impl Arguments for WriteFile {
    fn plan(self) -> Result<Plan, ApiError> {
        let bytes = content(self.content, self.content_b64)?;
        write(
            self.task_id,
            self.session_id,
            &inside(&self.path)?,
            bytes,
            self.if_match.as_deref(),
            self.mode.as_deref(),
        )
    }
}

impl Arguments for ApplyPatch {
    fn plan(self) -> Result<Plan, ApiError> {
        let body = PatchRequest {
            diff: self.diff,
            ..PatchRequest::default()
        };
        Ok(Plan::Call(
            Call::new(
                Method::POST,
                format!("/v1/sessions/{}/files:patch", self.session_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

impl Arguments for List {
    fn plan(self) -> Result<Plan, ApiError> {
        let path = self.path.as_deref().map(inside).transpose()?;
        let body = ListRequest {
            path,
            depth: self.depth,
            max_entries: self.max_entries,
            hidden: Some(true),
            ..ListRequest::default()
        };
        Ok(Plan::Call(
            Call::new(
                Method::POST,
                format!("/v1/sessions/{}/files:list", self.session_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

impl Arguments for Search {
    fn plan(self) -> Result<Plan, ApiError> {
        let body = SearchRequest {
            pattern: self.pattern,
            glob: self.glob,
            context_lines: self.context_lines,
            max_results: self.max_results,
            ..SearchRequest::default()
        };
        Ok(Plan::Call(
            Call::new(
                Method::POST,
                format!("/v1/sessions/{}/files:search", self.session_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

impl Arguments for ExportPatch {
    fn plan(self) -> Result<Plan, ApiError> {
        let body = ExportRequest {
            version: None,
            format: ExportFormat::Patch,
            base: self.base,
            path: None,
        };
        Ok(Plan::Call(
            Call::new(
                Method::POST,
                format!("/v1/sessions/{}/export", self.session_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_below_the_workspace_are_taken() {
        for (path, full) in [
            ("a/b", "/workspace/a/b"),
            ("/workspace/./a", "/workspace/a"),
            ("a/../b", "/workspace/b"),
            ("", "/workspace"),
        ] {
            assert_eq!(inside(path).expect(path), full);
        }
        for path in [
            "/etc/passwd",
            "..",
            "../x",
            "a/../../x",
            "/workspaces",
            "/workspace/../etc",
            "/",
        ] {
            inside(path).expect_err(path);
        }
    }
}

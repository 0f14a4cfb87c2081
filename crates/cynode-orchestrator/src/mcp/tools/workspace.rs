//! `sandbox.workspace.*`: the files of a session below `/workspace`.

use bytes::Bytes;
use cynode_api::{
    Artifact, Base64Bytes, EditRequest, ExportFormat, ExportRequest, FileEdited, FileWritten,
    ListRequest, ListResult, PatchRequest, PatchResult, SearchRequest, SearchResult, SessionId,
    TaskId,
};
use cynode_policy::within_workspace;
use cynode_service::ApiError;
use http::Method;
use serde::Serialize;
use utoipa::ToSchema;

use super::{Arguments, MANAGERS, Tool, ToolEffect, arguments};
use crate::mcp::plan::{ApiRequest, FilePart, Plan, ResultFormat};

const WORKSPACE: &str = "/workspace";
pub(super) const DEFAULT_READ: u64 = 262_144;
pub(crate) const MAX_READ: u64 = 1024 * 1024;

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<ReadFile, FileContent>(
            "sandbox.workspace.read_file",
            MANAGERS,
            ToolEffect::ReadOnly,
            "Read a file of the workspace, or some of its lines. sha256 and size are those of the \
             whole file; pass sha256 to sandbox.workspace.write_file as if_match.",
        ),
        Tool::new::<WriteFile, FileWritten>(
            "sandbox.workspace.write_file",
            MANAGERS,
            ToolEffect::Destructive,
            "Write a file of the workspace atomically; parent directories are created. \
             With if_match, only if the file has not changed since it was read.",
        ),
        Tool::new::<EditFile, FileEdited>(
            "sandbox.workspace.edit_file",
            MANAGERS,
            ToolEffect::Destructive,
            "Replace an exact text in a file of the workspace. The text must occur exactly once, \
             unless all is true. With if_match, only if the file has not changed since it was read.",
        ),
        Tool::new::<ApplyPatch, PatchResult>(
            "sandbox.workspace.apply_patch",
            MANAGERS,
            ToolEffect::Destructive,
            "Apply a patch to the workspace atomically: a unified diff, or one that begins with \
             '*** Begin Patch'. If it does not apply, the error lists the failed hunks.",
        ),
        Tool::new::<List, ListResult>(
            "sandbox.workspace.list",
            MANAGERS,
            ToolEffect::ReadOnly,
            "List files of the workspace.",
        ),
        Tool::new::<Search, SearchResult>(
            "sandbox.workspace.search",
            MANAGERS,
            ToolEffect::ReadOnly,
            "Search the files of the workspace for a regular expression.",
        ),
        Tool::new::<ExportPatch, Artifact>(
            "sandbox.workspace.export_patch",
            MANAGERS,
            ToolEffect::Additive,
            "Store the changes in the workspace's git repository, including untracked files, \
             as a patch artifact of the task.",
        ),
    ]
}

/// A file, or a part of it: `content` for text, `content_b64` for other bytes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FileContent {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content_b64: Option<Base64Bytes>,
    /// The hash of the whole file.
    pub(crate) sha256: String,
    /// The size of the whole file in bytes.
    pub(crate) size: u64,
    /// Whether the requested part is incomplete.
    pub(crate) truncated: bool,
}

arguments! {
    ReadFile {
        task_id: TaskId,
        session_id: SessionId,
        path: String,
        /// Counted from 1.
        start_line: Option<u64>,
        /// Inclusive.
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
        /// The sha256 that the file must have; `none` if it must not exist.
        if_match: Option<String>,
        /// In octal, such as `0755`.
        mode: Option<String>,
    }
    EditFile {
        task_id: TaskId,
        session_id: SessionId,
        path: String,
        /// The exact text to replace, with its spaces and line ends.
        old: String,
        new: String,
        /// Replace every occurrence.
        all: Option<bool>,
        /// The sha256 that the file must have.
        if_match: Option<String>,
    }
    ApplyPatch {
        task_id: TaskId,
        session_id: SessionId,
        /// A unified diff, optionally with git's extensions, whose paths have one leading component
        /// (`a/`, `b/`); or a patch that begins with `*** Begin Patch`, whose paths have none.
        /// Paths are relative to the workspace. Wrong hunk headers are repaired.
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
        /// The files to search, such as `*.rs`.
        glob: Option<String>,
        context_lines: Option<u32>,
        /// 1,000 by default.
        max_results: Option<u32>,
    }
    ExportPatch {
        task_id: TaskId,
        session_id: SessionId,
        /// The base of the patch: a commit, `HEAD` by default, or `brought` for what the session
        /// began with.
        base: Option<String>,
    }
}

/// The normalized path, if it is below the workspace.
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

/// The content from either of its two arguments.
pub(super) fn content(text: Option<String>, bytes: Option<Base64Bytes>) -> Result<Bytes, ApiError> {
    match (text, bytes) {
        (Some(text), None) => Ok(text.into()),
        (None, Some(bytes)) => Ok(bytes.0.into()),
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "content: send either content or content_b64, not both",
        )),
        (None, None) => Err(ApiError::invalid(
            "content: missing; send content, or content_b64 for binary data",
        )),
    }
}

/// Bounds the size of a result, which is buffered.
pub(super) fn at_most(name: &str, bytes: Option<u64>) -> Result<(), ApiError> {
    if bytes.is_none_or(|bytes| (1..=MAX_READ).contains(&bytes)) {
        Ok(())
    } else {
        Err(ApiError::invalid(format!(
            "{name}: must be 1 to {MAX_READ}"
        )))
    }
}

/// Checks and collects the requested part of a file.
pub(super) fn part(
    start_line: Option<u64>,
    end_line: Option<u64>,
    max_bytes: Option<u64>,
) -> Result<FilePart, ApiError> {
    let start = start_line.unwrap_or(1);
    if start == 0 {
        return Err(ApiError::invalid("start_line: lines are counted from 1"));
    }
    if end_line.is_some_and(|end| end < start) {
        return Err(ApiError::invalid("end_line: is before start_line"));
    }
    let max_bytes = max_bytes.unwrap_or(DEFAULT_READ);
    at_most("max_bytes", Some(max_bytes))?;
    Ok(FilePart {
        start_line: start,
        end_line,
        max_bytes: usize::try_from(max_bytes).unwrap_or(usize::MAX),
    })
}

pub(super) fn read(task_id: TaskId, session_id: SessionId, path: &str, part: FilePart) -> Plan {
    Plan::Request(
        ApiRequest::get(format!("/v1/sessions/{session_id}/files"), task_id)
            .query("path", Some(path))
            .with_format(ResultFormat::File(part)),
    )
}

/// A file to be written.
#[derive(Debug)]
pub(super) struct FileWrite<'a> {
    pub(super) task_id: TaskId,
    pub(super) session_id: SessionId,
    pub(super) path: &'a str,
    pub(super) content: Bytes,
    pub(super) if_match: Option<&'a str>,
    pub(super) mode: Option<&'a str>,
}

pub(super) fn write(file: FileWrite<'_>) -> Result<Plan, ApiError> {
    let FileWrite {
        task_id,
        session_id,
        path,
        content,
        if_match,
        mode,
    } = file;
    let (if_match, if_none_match) = match if_match {
        Some("none") => (None, Some("*")),
        Some(hash) => (
            Some(format!("\"sha256:{}\"", hash.trim_start_matches("sha256:"))),
            None,
        ),
        None => (None, None),
    };
    let request = ApiRequest::new(
        Method::PUT,
        format!("/v1/sessions/{session_id}/files"),
        task_id,
    )
    .query("path", Some(path))
    .bytes(content);
    Ok(Plan::Request(
        request
            .header("if-match", if_match.as_deref())?
            .header("if-none-match", if_none_match)?
            .header("x-mode", mode)?,
    ))
}

impl Arguments for ReadFile {
    fn into_plan(self) -> Result<Plan, ApiError> {
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
    fn into_plan(self) -> Result<Plan, ApiError> {
        let content = content(self.content, self.content_b64)?;
        write(FileWrite {
            task_id: self.task_id,
            session_id: self.session_id,
            path: &inside(&self.path)?,
            content,
            if_match: self.if_match.as_deref(),
            mode: self.mode.as_deref(),
        })
    }
}

impl Arguments for EditFile {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let body = EditRequest {
            version: None,
            path: inside(&self.path)?,
            old: self.old,
            new: self.new,
            all: self.all.unwrap_or_default(),
            if_match: self.if_match,
        };
        Ok(Plan::Request(
            ApiRequest::new(
                Method::POST,
                format!("/v1/sessions/{}/files:edit", self.session_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

/// The request that applies a patch. All tools that take the text of a patch send it from here.
fn patch(task_id: TaskId, session_id: SessionId, text: String) -> Result<Plan, ApiError> {
    let body = PatchRequest {
        diff: text,
        ..PatchRequest::default()
    };
    Ok(Plan::Request(
        ApiRequest::new(
            Method::POST,
            format!("/v1/sessions/{session_id}/files:patch"),
            task_id,
        )
        .json(&body)?,
    ))
}

impl Arguments for ApplyPatch {
    fn into_plan(self) -> Result<Plan, ApiError> {
        patch(self.task_id, self.session_id, self.diff)
    }
}

impl Arguments for List {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let path = self.path.as_deref().map(inside).transpose()?;
        let body = ListRequest {
            path,
            depth: self.depth,
            max_entries: self.max_entries,
            hidden: Some(true),
            ..ListRequest::default()
        };
        Ok(Plan::Request(
            ApiRequest::new(
                Method::POST,
                format!("/v1/sessions/{}/files:list", self.session_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

impl Arguments for Search {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let body = SearchRequest {
            pattern: self.pattern,
            glob: self.glob,
            context_lines: self.context_lines,
            max_results: self.max_results,
            ..SearchRequest::default()
        };
        Ok(Plan::Request(
            ApiRequest::new(
                Method::POST,
                format!("/v1/sessions/{}/files:search", self.session_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

/// The request for the changes since a base.
pub(super) fn export(
    task_id: TaskId,
    session_id: SessionId,
    base: Option<String>,
) -> Result<ApiRequest, ApiError> {
    let body = ExportRequest {
        version: None,
        format: ExportFormat::Patch,
        base,
        path: None,
    };
    let path = format!("/v1/sessions/{session_id}/export");
    ApiRequest::new(Method::POST, path, task_id).json(&body)
}

impl Arguments for ExportPatch {
    fn into_plan(self) -> Result<Plan, ApiError> {
        export(self.task_id, self.session_id, self.base).map(Plan::Request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_below_the_workspace_are_accepted() {
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

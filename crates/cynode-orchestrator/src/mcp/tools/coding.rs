//! The tools of `/mcp/coding`: few, short, and with defaults.
//!
//! Each fills in what the tool of the same name on `/mcp` requires: the task of the token, the
//! token's own session unless one is named, and defaults. Invariant: without arguments that ask for
//! more, a result fits the text that models read.

use std::collections::BTreeMap;

use cynode_api::{Base64Bytes, ExecId, ExecRequest, SessionId, WorkspaceDisposal};
use cynode_service::ApiError;

use super::{
    Arguments as _, CodingArguments, Tool, ToolEffect, arguments, later,
    sessions::{self, Constraints},
    workspace::{self, at_most},
};
use crate::mcp::plan::{ExecPlan, ExportPlan, OwnSession, Plan};

/// The base of an export that stands for what the session began with.
const BROUGHT: &str = "brought";
/// The deadline of a command, unless the call names another.
const DEFAULT_TIMEOUT_MS: u64 = 120_000;
/// The part of a file or a page of output, unless the call names another.
pub(crate) const DEFAULT_READ: u64 = 7_168;
/// The part of each output stream of a command, unless the call names another.
pub(crate) const DEFAULT_OUTPUT: u64 = 3_584;

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::coding::<Create>(
            "sandbox.session.create",
            ToolEffect::Additive,
            "Start your session explicitly. Other tools start it on first use. Answers the running \
             session, resumes a kept one, or starts a new one with an empty workspace.",
        ),
        Tool::coding::<Exec>(
            "sandbox.session.exec",
            ToolEffect::Destructive,
            "Run a command and wait for its end. Give command (a shell line) or argv (no shell).",
        ),
        Tool::coding::<Output>(
            "sandbox.session.output",
            ToolEffect::ReadOnly,
            "Read output of a command: after after_seq, or its end (tail_bytes).",
        ),
        Tool::coding::<ReadFile>(
            "sandbox.workspace.read_file",
            ToolEffect::ReadOnly,
            "Read a file, or some of its lines.",
        ),
        Tool::coding::<WriteFile>(
            "sandbox.workspace.write_file",
            ToolEffect::Destructive,
            "Write a whole file; makes parent directories.",
        ),
        Tool::coding::<EditFile>(
            "sandbox.workspace.edit_file",
            ToolEffect::Destructive,
            "Replace an exact text in a file. It must occur once, unless all is true.",
        ),
        Tool::coding::<ApplyPatch>(
            "sandbox.workspace.apply_patch",
            ToolEffect::Destructive,
            "Apply a patch, whole or not at all.",
        ),
        Tool::coding::<List>(
            "sandbox.workspace.list",
            ToolEffect::ReadOnly,
            "List files.",
        ),
        Tool::coding::<Search>(
            "sandbox.workspace.search",
            ToolEffect::ReadOnly,
            "Search files for a regular expression.",
        ),
        Tool::coding::<ExportPatch>(
            "sandbox.workspace.export_patch",
            ToolEffect::Additive,
            "Store the changes in /workspace as a patch for a person.",
        ),
        Tool::coding::<End>(
            "sandbox.session.end",
            ToolEffect::Destructive,
            "End your session. Deletes the workspace unless workspace is keep.",
        ),
        Tool::coding::<Help>(
            "help.get",
            ToolEffect::ReadOnly,
            "Help: the topics, or one.",
        ),
    ]
}

arguments! {
    Create {
        /// `new` or a UUID for another session than your own.
        session_id: Option<String>,
        image_ref: Option<String>,
        /// `workspace:<uuid>`, `artifact:<uuid>` or `git:<repository>[@<ref>]` to start from.
        workspace_ref: Option<String>,
        /// `limits {memory_bytes, cpus, pids, disk_bytes}`, `max_lifetime_seconds`,
        /// `idle_timeout_seconds`.
        #[schema(value_type = Option<Object>)]
        constraints: Option<Constraints>,
    }
    Exec {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        /// Run by bash, or by sh where there is no bash.
        command: Option<String>,
        argv: Option<Vec<String>>,
        /// Default 120000.
        timeout_ms: Option<u64>,
        /// Default /workspace.
        cwd: Option<String>,
        env: Option<BTreeMap<String, String>>,
        stdin: Option<String>,
        /// Return an exec_id at once.
        background: Option<bool>,
        /// Of each stream; default 3584.
        max_output_bytes: Option<u64>,
    }
    Output {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        #[schema(value_type = String)]
        exec_id: ExecId,
        after_seq: Option<u64>,
        tail_bytes: Option<u64>,
        max_bytes: Option<u64>,
        /// Wait for output, at most 60000.
        wait_ms: Option<u64>,
    }
    ReadFile {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        /// Below /workspace.
        path: String,
        /// From 1.
        start_line: Option<u64>,
        end_line: Option<u64>,
        /// Default 7168.
        max_bytes: Option<u64>,
    }
    WriteFile {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        path: String,
        content: Option<String>,
        #[schema(value_type = Option<String>)]
        content_b64: Option<Base64Bytes>,
        /// The sha256 that the file has, or `none`.
        if_match: Option<String>,
        /// Octal.
        mode: Option<String>,
    }
    EditFile {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        path: String,
        old: String,
        new: String,
        all: Option<bool>,
        if_match: Option<String>,
    }
    ApplyPatch {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        /// A unified diff with a/ and b/ paths, or a patch that begins with *** Begin Patch.
        diff: String,
    }
    List {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        path: Option<String>,
        depth: Option<u32>,
        max_entries: Option<u32>,
    }
    Search {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        pattern: String,
        /// Such as `*.rs`.
        glob: Option<String>,
        context_lines: Option<u32>,
        max_results: Option<u32>,
    }
    ExportPatch {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        /// A commit. Default: what the session began with, or else HEAD.
        base: Option<String>,
    }
    End {
        #[schema(value_type = Option<String>)]
        session_id: Option<SessionId>,
        reason: Option<String>,
        /// `delete` or `keep`.
        #[schema(value_type = Option<String>)]
        workspace: Option<WorkspaceDisposal>,
    }
    Help {
        topic: Option<String>,
    }
}

/// The plan in the named session, or in the token's own.
fn in_session(
    own: OwnSession,
    named: Option<SessionId>,
    plan: impl FnOnce(SessionId) -> Result<Plan, ApiError>,
) -> Result<Plan, ApiError> {
    match named {
        Some(id) => plan(id),
        None => Ok(Plan::InOwnSession(own, Box::new(plan(own.id)?))),
    }
}

impl CodingArguments for Create {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        let (image, workspace) = (
            self.image_ref.as_deref().unwrap_or("default"),
            self.workspace_ref.as_deref().unwrap_or("new"),
        );
        let constraints = self.constraints.unwrap_or_default();
        match self.session_id {
            None => {
                let body = sessions::new_session(own.task, None, image, workspace, &constraints)?;
                Ok(Plan::CreateOwnSession(own, Box::new(body)))
            }
            Some(session_id) => sessions::Create {
                task_id: own.task,
                session_id,
                image_ref: image.to_owned(),
                workspace_ref: workspace.to_owned(),
                constraints,
            }
            .into_plan(),
        }
    }
}

impl CodingArguments for Exec {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        at_most("max_output_bytes", self.max_output_bytes)?;
        let (argv, fallback) = match (self.command, self.argv) {
            (Some(command), None) => {
                let shell = |name: &str| vec![name.to_owned(), "-c".to_owned(), command.clone()];
                (shell("bash"), Some(shell("sh")))
            }
            (None, Some(argv)) => (argv, None),
            (Some(_), Some(_)) => {
                return Err(ApiError::invalid(
                    "command: send either command or argv, not both",
                ));
            }
            (None, None) => {
                return Err(ApiError::invalid(
                    "command: missing; send command for a shell line, or argv",
                ));
            }
        };
        let request = ExecRequest {
            argv,
            cwd: Some(self.cwd.unwrap_or_else(|| ".".to_owned())),
            env: self.env.unwrap_or_default(),
            timeout_ms: self.timeout_ms.unwrap_or(DEFAULT_TIMEOUT_MS),
            stdin: self.stdin,
            background: self.background.unwrap_or_default(),
            max_output_bytes: Some(self.max_output_bytes.unwrap_or(DEFAULT_OUTPUT)),
            ..ExecRequest::default()
        };
        in_session(own, self.session_id, |session| {
            Ok(Plan::Exec(Box::new(ExecPlan {
                fallback,
                ..ExecPlan::new(own.task, session, request)
            })))
        })
    }
}

impl CodingArguments for Output {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        let asked = self.max_bytes.or(self.tail_bytes);
        // A session without a command has no output.
        let own = OwnSession {
            creates: false,
            ..own
        };
        in_session(own, self.session_id, |session_id| {
            sessions::Output {
                task_id: own.task,
                session_id,
                exec_id: self.exec_id,
                after_seq: self.after_seq,
                tail_bytes: self.tail_bytes,
                max_bytes: asked.or(Some(DEFAULT_READ)),
                wait_ms: self.wait_ms,
            }
            .into_plan()
        })
    }
}

impl CodingArguments for ReadFile {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        in_session(own, self.session_id, |session_id| {
            workspace::ReadFile {
                task_id: own.task,
                session_id,
                path: self.path,
                start_line: self.start_line,
                end_line: self.end_line,
                max_bytes: self.max_bytes.or(Some(DEFAULT_READ)),
            }
            .into_plan()
        })
    }
}

impl CodingArguments for WriteFile {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        in_session(own, self.session_id, |session_id| {
            workspace::WriteFile {
                task_id: own.task,
                session_id,
                path: self.path,
                content: self.content,
                content_b64: self.content_b64,
                if_match: self.if_match,
                mode: self.mode,
            }
            .into_plan()
        })
    }
}

impl CodingArguments for EditFile {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        in_session(own, self.session_id, |session_id| {
            workspace::EditFile {
                task_id: own.task,
                session_id,
                path: self.path,
                old: self.old,
                new: self.new,
                all: self.all,
                if_match: self.if_match,
            }
            .into_plan()
        })
    }
}

impl CodingArguments for ApplyPatch {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        in_session(own, self.session_id, |session_id| {
            workspace::ApplyPatch {
                task_id: own.task,
                session_id,
                diff: self.diff,
            }
            .into_plan()
        })
    }
}

impl CodingArguments for List {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        in_session(own, self.session_id, |session_id| {
            workspace::List {
                task_id: own.task,
                session_id,
                path: self.path,
                depth: self.depth,
                max_entries: self.max_entries,
            }
            .into_plan()
        })
    }
}

impl CodingArguments for Search {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        in_session(own, self.session_id, |session_id| {
            workspace::Search {
                task_id: own.task,
                session_id,
                pattern: self.pattern,
                glob: self.glob,
                context_lines: self.context_lines,
                max_results: self.max_results,
            }
            .into_plan()
        })
    }
}

impl CodingArguments for ExportPatch {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        in_session(own, self.session_id, |session_id| {
            let since = |base: Option<String>| workspace::export(own.task, session_id, base);
            if self.base.is_some() {
                return since(self.base).map(Plan::Request);
            }
            Ok(Plan::Export(Box::new(ExportPlan {
                since_start: since(Some(BROUGHT.to_owned()))?,
                since_commit: since(None)?,
            })))
        })
    }
}

impl CodingArguments for End {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError> {
        let own = OwnSession {
            creates: false,
            ..own
        };
        in_session(own, self.session_id, |session_id| {
            sessions::End {
                task_id: own.task,
                session_id,
                reason: self.reason.unwrap_or_else(|| "done".to_owned()),
                workspace: self.workspace,
            }
            .into_plan()
        })
    }
}

impl CodingArguments for Help {
    fn into_plan(self, _: OwnSession) -> Result<Plan, ApiError> {
        later::help_for_coding(self.topic.as_deref())
    }
}

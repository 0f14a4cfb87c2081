//! Errors as RFC 9457 problem documents, each with a stable code and a remedy.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

macro_rules! codes {
    ($(
        $(#[$doc:meta])*
        $variant:ident = $code:literal, $status:literal, $title:literal, $remedy:literal;
    )*) => {
        /// Stable error codes. A code never changes its meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        pub enum ErrorCode { $($(#[$doc])* #[serde(rename = $code)] $variant,)* }

        impl ErrorCode {
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $code,)* }
            }

            #[must_use]
            pub const fn status(self) -> u16 { match self { $(Self::$variant => $status,)* } }

            #[must_use]
            pub const fn title(self) -> &'static str {
                match self { $(Self::$variant => $title,)* }
            }

            /// The default remedy; the code that raises an error may give a better one.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                match self { $(Self::$variant => $remedy,)* }
            }
        }
    };
}

codes! {
    InvalidRequest = "invalid_request", 400,
        "The request is not valid",
        "Correct the request as the detail says.";
    Unauthorized = "unauthorized", 401,
        "No valid token",
        "Send 'Authorization: Bearer <token>' with a token that is valid here.";
    PermissionDenied = "permission_denied", 403,
        "The sandbox's user lacks permission",
        "Use a path that the sandbox's user (uid 1000) can access.";
    Forbidden = "forbidden", 403,
        "The caller is not authorized",
        "Ask an administrator, or use a token of another kind.";
    DeniedByPolicy = "denied_by_policy", 403,
        "Denied by policy",
        "Ask an administrator: 'cynode policy test' shows which rules decide.";
    ImageNotAllowed = "image_not_allowed", 403,
        "The image is not allowed",
        "Choose one that 'cynode image list' shows as allowed, or ask an administrator to allow \
         it.";
    ModelNotAllowed = "model_not_allowed", 403,
        "No model that the job names is allowed",
        "Name a model of the preference inference.allowed_models, or ask a person to allow it there.";
    ToolDisabled = "tool_disabled", 403,
        "The tool is disabled",
        "Ask an administrator to enable it.";
    PtyNotAllowed = "pty_not_allowed", 403,
        "This session has no terminal",
        "Create the session with --pty (in the API pty_allowed: true); it can't be changed \
         later.";
    NotAdvertised = "not_advertised", 403,
        "No branch or tag of the repository contains the commit",
        "Name a branch or tag, or push a branch that contains the commit.";
    AddressRefused = "address_refused", 403,
        "The address of the repository's host is not dialled",
        "Register the repository with 'addresses' if the host is meant to be private.";
    CredentialUnusable = "credential_unusable", 403,
        "The credential can't be used for this repository",
        "Add a credential for the repository's URL and project, or rotate it ('cynode \
         credential rotate').";
    NotFound = "not_found", 404,
        "Not found",
        "Check the path.";
    SessionNotFound = "session_not_found", 404,
        "Session not found",
        "Check the id, or create the session.";
    UnknownTool = "unknown_tool", 404,
        "Unknown tool",
        "List the tools: the list contains those that this caller may use.";
    JobNotFound = "job_not_found", 404,
        "Job not found",
        "Check the ids; a node forgets a job a day after it was acknowledged.";
    ExecNotFound = "exec_not_found", 404,
        "Exec not found in this session",
        "Check the id; a session evicts its oldest finished execs when its records are full.";
    WorkspaceNotFound = "workspace_not_found", 404,
        "Workspace not found for this task",
        "Use 'new', or the workspace_id of a session of the same task that ended with \
         workspace: \"keep\".";
    RepositoryNotFound = "repository_not_found", 404,
        "Repository not found in this project",
        "Check the id: 'cynode repository list' shows the repositories of a project.";
    RefNotFound = "ref_not_found", 404,
        "The repository has no such branch, tag or commit",
        "Check the reference; without one the default branch is used.";
    MethodNotAllowed = "method_not_allowed", 405,
        "Method not allowed for this path",
        "See /openapi.json.";
    RequestTimeout = "request_timeout", 408,
        "Timed out reading the request body",
        "Send the whole body without long pauses; the detail names the limit.";
    SessionIdInUse = "session_id_in_use", 409,
        "Another request uses this session id",
        "Use a new session_id, or repeat the first request unchanged.";
    NameInUse = "name_in_use", 409,
        "Another live session of the owner has this name",
        "Choose another name, or end that session.";
    JobIdInUse = "job_id_in_use", 409,
        "Another request uses this job id",
        "Use a new job_id, or repeat the first request unchanged.";
    ExecIdInUse = "exec_id_in_use", 409,
        "Another request uses this exec id",
        "Use a new exec_id, or repeat the first request unchanged.";
    WorkspaceInUse = "workspace_in_use", 409,
        "Another session uses this workspace",
        "End that session first, or use another workspace.";
    JobNotEnded = "job_not_ended", 409,
        "The job has not ended",
        "Wait for it to end, or stop it.";
    NotRunning = "not_running", 409,
        "The session is not running",
        "Wait until its state is running, or resume it if it is lost.";
    ImageDigestMismatch = "image_digest_mismatch", 409,
        "The image on the node is not the pinned one",
        "Load the pinned image on the node, or pin the one that is there ('cynode image add').";
    ImageInUse = "image_in_use", 409,
        "The image is in use",
        "End the sessions and jobs that use it, or deny it ('cynode image deny').";
    RepositoryInUse = "repository_in_use", 409,
        "Promotions to the repository are under way",
        "Wait until they have ended, or cancel them: 'cynode promotion list'.";
    PromotionNotWaiting = "promotion_not_waiting", 409,
        "The promotion does not wait for this",
        "Look at its state: 'cynode promotion show'.";
    ApprovalStale = "approval_stale", 409,
        "The promotion is no longer what was shown",
        "Look at it again, and decide about the commit that it has now.";
    TokenRevoked = "token_revoked", 409,
        "The token is revoked",
        "Create another token.";
    NotResumable = "not_resumable", 409,
        "The session can't be resumed",
        "Create a new session.";
    AgentRequired = "agent_required", 409,
        "This needs the in-sandbox agent, which is disabled",
        "Set worker.exec_via to \"agent\".";
    AgentOutdated = "agent_outdated", 409,
        "The session's agent, or its node, is too old for this",
        "Create a new session, or have the node upgraded; a unified diff with line numbers works \
         on old ones too.";
    NotAFile = "not_a_file", 409,
        "The path is not a regular file",
        "Name a regular file.";
    NotADirectory = "not_a_directory", 409,
        "The path, or a part of it, is not a directory",
        "Name a directory.";
    NotEmpty = "not_empty", 409,
        "The directory is not empty",
        "Add recursive=true to delete its contents too.";
    CallTooLate = "call_too_late", 409,
        "The call arrived after it was given up as lost",
        "Send it again: it had no effect.";
    AlreadyExists = "already_exists", 409,
        "The target exists",
        "Choose another target, or allow overwriting.";
    PatchRejected = "patch_rejected", 409,
        "The patch does not apply; nothing was changed",
        "Regenerate the diff against the current files; 'rejects' lists each failed hunk.";
    EditRejected = "edit_rejected", 409,
        "The text to replace is missing or ambiguous; nothing was changed",
        "Read the file again and copy the text exactly, with enough lines around it to occur \
         once.";
    NotARepository = "not_a_repository", 409,
        "The workspace is not a git repository",
        "Run 'git init' in the workspace, or read its files instead.";
    StdinClosed = "stdin_closed", 409,
        "Standard input of the exec is closed",
        "Start it with stdin_open: true, and write before it ends.";
    StdinFull = "stdin_full", 409,
        "The command is not reading its input",
        "Resend the data after the first 'taken' bytes once the command reads again.";
    ExecEnded = "exec_ended", 409,
        "The exec has ended",
        "There is nothing left to signal.";
    AuditOutOfOrder = "audit_out_of_order", 409,
        "The audit records do not continue the node's stream",
        "Send the records from the number that 'expected' names.";
    BaseStale = "base_stale", 409,
        "The target has changed what the change touches, or dropped its base",
        "Start a session from the new base, apply the change there, export it, and promote that.";
    BranchExists = "branch_exists", 409,
        "The branch exists, and this promotion did not push it",
        "Choose another branch.";
    StateOutdated = "state_outdated", 409,
        "The role has newer rules",
        "Send the current rules; restart the role if the database was restored.";
    SessionEnded = "session_ended", 410,
        "The session has ended",
        "Create a new session; a kept workspace can be mounted again.";
    OutputExpired = "output_expired", 410,
        "The output is no longer kept",
        "Read output sooner; the oldest finished execs are dropped first.";
    CursorExpired = "cursor_expired", 410,
        "The events after this cursor are no longer kept",
        "Read the current state of jobs and sessions, then continue from the newest cursor.";
    PreconditionFailed = "precondition_failed", 412,
        "The precondition failed",
        "Read the file again and retry with its current ETag.";
    TooLarge = "too_large", 413,
        "Larger than the limit",
        "Send less; the detail names the limit.";
    UnsupportedMediaType = "unsupported_media_type", 415,
        "Unsupported media type",
        "Send 'Content-Type: application/json'.";
    RangeNotSatisfiable = "range_not_satisfiable", 416,
        "The range is outside the file",
        "Request a range within the file's size.";
    ExecFailed = "exec_failed", 422,
        "The command could not be started",
        "Check argv[0], cwd and permissions; 'errno' says what failed.";
    ImageNotFound = "image_not_found", 422,
        "The image is not on this node",
        "Load the image on the node, or name another.";
    ImageNotCompatible = "image_not_compatible", 422,
        "The image is not marked for sessions",
        "Use an image with the label io.cynodeai.sandbox.agent-compatible=true.";
    JobKindUnsupported = "job_kind_unsupported", 422,
        "This node runs plain commands only",
        "Send sandbox.command instead of job.";
    UnsupportedVersion = "unsupported_version", 422,
        "The body's version is unknown",
        "Send \"version\": 1.";
    LimitUnenforceable = "limit_unenforceable", 422,
        "This host can't enforce that limit",
        "Request a smaller limit; 'cynode doctor' shows what this host supports.";
    PolicyInvalid = "policy_invalid", 422,
        "The policy is not valid",
        "Fix each error that the detail lists; the previous policy stays in force.";
    ChangeRefused = "change_refused", 422,
        "A rule of the repository refuses the change",
        "See the verdicts: change what they name, or ask an administrator about the rules.";
    SecretInInput = "secret_in_input", 422,
        "The request contains a secret",
        "Remove the secret that the detail locates; a sandbox must not hold credentials.";
    AuditRefused = "audit_refused", 422,
        "The batch has audit records that this node may not write",
        "See 'refused': each record with the reason. Nothing of the batch was stored.";
    ForgeRefused = "forge_refused", 422,
        "The repository's host refuses the request",
        "Check the credential's rights, and the host's own rules for branches and pull requests.";
    SeedUnusable = "seed_unusable", 422,
        "The repository's files can't be unpacked",
        "Remove from the repository what the detail names.";
    QuotaExceeded = "quota_exceeded", 429,
        "Quota exceeded",
        "End sessions that are no longer needed.";
    TooManyAttempts = "too_many_attempts", 429,
        "Too many failed attempts",
        "Wait a moment, and use a valid token.";
    TooManyRequests = "too_many_requests", 429,
        "Too many requests at once",
        "Let calls in flight finish, send bodies without pauses, read responses promptly, then \
         retry.";
    Internal = "internal", 500,
        "Internal error",
        "Try again; the worker's log has the details under this request_id.";
    AgentUnavailable = "agent_unavailable", 503,
        "The in-sandbox agent did not answer",
        "Try again; if it lasts, end the session.";
    RuntimeUnavailable = "runtime_unavailable", 503,
        "The container runtime did not answer",
        "Run 'cynode doctor' on the node.";
    NoCapacity = "no_capacity", 503,
        "The node has no room for another sandbox",
        "End sessions, or raise worker.max_sandboxes.";
    Unavailable = "unavailable", 503,
        "A dependency is unavailable",
        "See the remedy of each failure.";
    InferenceUnavailable = "inference_unavailable", 503,
        "No allowed model is served",
        "Start a model server with one of the models, or name others; 'cynode node show' lists what a \
         node serves.";
    ImagePending = "image_pending", 503,
        "No node has reported the image yet",
        "Load the image on a node; nodes report what they have every few seconds. 'cynode image \
         show' shows what it waits for.";
    NodeUnreachable = "node_unreachable", 503,
        "The node is unreachable",
        "Try again; see 'cynode node list'.";
    StoreUnavailable = "store_unavailable", 503,
        "The database is unavailable",
        "Try again; nothing was lost. See 'cynode status'.";
    EgressStale = "egress_stale", 503,
        "The role's copy of the rules is too old",
        "Try again; see 'cynode status': an orchestrator renews the copy every few seconds.";
    RepositoryUnreachable = "repository_unreachable", 503,
        "The repository's host can't be used",
        "Try again; check the URL, the credential and the certificate that the detail names.";
    PidsExhausted = "pids_exhausted", 503,
        "The sandbox's process table is full",
        "Signal its processes (session signal KILL), then try again.";
    ShuttingDown = "shutting_down", 503,
        "The worker is stopping",
        "Try again when it is back.";
    OutcomePending = "outcome_pending", 503,
        "The outcome of the call could not be recorded yet",
        "Check the effect of the call before retrying: it may have succeeded; the audit records \
         its outcome laterr.";
    AuditUnavailable = "audit_unavailable", 503,
        "The node can't record its decisions, so it does nothing that needs a record",
        "Free space on the node's state directory; see /readyz of the node.";
    AuditBacklogFull = "audit_backlog_full", 503,
        "The sandbox has used its share of the node's unshipped audit records",
        "Try again when the node has reached its orchestrator; see /readyz of the node.";
    NoSpace = "no_space", 507,
        "No space left",
        "Delete files in the sandbox, or create the session with a larger disk; if the detail \
         names the node, free space there.";
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An RFC 9457 problem document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// `urn:cynode:error:<code>`
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    pub detail: String,
    pub code: String,
    /// What the caller can do.
    pub remedy: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Members specific to a code, such as `errno` or `rejects`.
    #[serde(flatten)]
    #[schema(additional_properties)]
    pub extensions: Map<String, Value>,
}

/// The longest detail, in characters. Details may quote the request.
const MAX_DETAIL: usize = 900;

/// Elides the middle of a long text: the beginning tells what is wrong, the end often what is
/// expected.
fn shortened(text: String) -> String {
    let length = text.chars().count();
    if length <= MAX_DETAIL {
        return text;
    }
    let begin: String = text.chars().take(MAX_DETAIL / 2).collect();
    let end: String = text.chars().skip(length - MAX_DETAIL / 2).collect();
    format!("{begin} … {end}")
}

impl Problem {
    #[must_use]
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        Self {
            kind: format!("urn:cynode:error:{code}"),
            title: code.title().to_owned(),
            status: code.status(),
            detail: shortened(detail.into()),
            code: code.as_str().to_owned(),
            remedy: code.remedy().to_owned(),
            request_id: None,
            extensions: Map::new(),
        }
    }

    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.extensions.insert(name.to_owned(), value.into());
        self
    }

    #[must_use]
    pub fn is(&self, code: ErrorCode) -> bool {
        self.code == code.as_str()
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.title, self.detail)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_own_name_and_an_error_status() {
        let mut names: Vec<_> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ErrorCode::ALL.len());
        assert!(
            ErrorCode::ALL
                .iter()
                .all(|code| (400..600).contains(&code.status()) && code.remedy().ends_with('.'))
        );
    }

    #[test]
    fn a_long_detail_is_truncated_in_the_middle() {
        let problem = Problem::new(
            ErrorCode::InvalidRequest,
            format!("kind: unknown `{}`, expected `user`", "ü".repeat(100_000)),
        );
        assert!(
            problem.detail.chars().count() < 1_000
                && problem.detail.starts_with("kind:")
                && problem.detail.ends_with("expected `user`")
        );
    }

    #[test]
    fn the_page_of_errors_lists_every_code() {
        let page = include_str!("../../../docs/errors.md");
        for code in ErrorCode::ALL {
            let row = format!(
                "| `{code}` | {} | {} | {} |",
                code.status(),
                code.title(),
                code.remedy()
            );
            assert!(page.contains(&row), "docs/errors.md lacks the row {row}");
        }
    }

    #[test]
    fn problems_round_trip_with_their_extensions() {
        let problem =
            Problem::new(ErrorCode::ExecFailed, "no such command").with("errno", "ENOENT");
        let text = serde_json::to_string(&problem).expect("problems serialise");
        assert!(
            text.contains(r#""type":"urn:cynode:error:exec_failed""#)
                && text.contains(r#""errno":"ENOENT""#),
            "{text}"
        );
        assert_eq!(
            serde_json::from_str::<Problem>(&text).expect("problems parse"),
            problem
        );
    }
}

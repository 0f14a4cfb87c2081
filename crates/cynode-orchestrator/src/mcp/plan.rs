//! The plan of a tool call: a request to the user API, which passes the same gate as any other.

use bytes::Bytes;
use cynode_api::{ExecId, ExecRequest, SessionId, TaskId, UserSessionCreate, WorkspaceDisposal};
use cynode_service::ApiError;
use http::{HeaderName, HeaderValue, Method};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde_json::Value;

use crate::budget::MAX_BUFFERED_BYTES;

/// Characters that are percent-encoded in a URL: all but the unreserved ones.
const PERCENT_ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// What a tool does once its arguments are parsed.
#[derive(Clone, Debug)]
pub(crate) enum Plan {
    Request(ApiRequest),
    Exec(Box<ExecPlan>),
    Export(Box<ExportPlan>),
    /// Ends a session. The answer says what becomes of its workspace.
    End(Box<ApiRequest>, WorkspaceDisposal),
    /// Does this in the token's own session.
    InOwnSession(OwnSession, Box<Self>),
    /// Answers the token's own session if it lives, else resumes it or creates the next one.
    CreateOwnSession(OwnSession, Box<UserSessionCreate>),
    /// Answers without a request.
    Answer(Value),
    /// Creates a task, in the caller's project if none is named.
    NewTask(Box<cynode_api::TaskCreate>),
    /// Shows the project of a task.
    TaskProject(TaskId),
    /// Looks up the most recent command and reads its output.
    LastOutput(ApiRequest),
    /// Fails with a remedy, because the required service does not exist yet.
    Unavailable(TaskId, &'static str),
}

/// A command to be run in a session.
#[derive(Clone, Debug)]
pub(crate) struct ExecPlan {
    pub(crate) task: TaskId,
    pub(crate) session: SessionId,
    pub(crate) exec_id: ExecId,
    pub(crate) request: ExecRequest,
    /// Runs instead if the program does not exist.
    pub(crate) fallback: Option<Vec<String>>,
}

impl ExecPlan {
    /// A plan under a new id: progress follows it, and a call that is repeated in a resumed
    /// session can't run the command twice.
    pub(crate) fn new(task: TaskId, session: SessionId, request: ExecRequest) -> Self {
        let exec_id = request.exec_id.unwrap_or_else(ExecId::generate);
        Self {
            task,
            session,
            exec_id,
            request: ExecRequest {
                exec_id: Some(exec_id),
                ..request
            },
            fallback: None,
        }
    }

    /// Turns to the fallback, which is another command and has another id.
    pub(crate) fn fall_back(self) -> Option<Self> {
        let argv = self.fallback?;
        let request = ExecRequest {
            argv,
            exec_id: None,
            ..self.request
        };
        Some(Self::new(self.task, self.session, request))
    }

    pub(crate) fn request(&self) -> Result<ApiRequest, ApiError> {
        let path = format!("/v1/sessions/{}/exec", self.session);
        ApiRequest::new(Method::POST, path, self.task).json(&self.request)
    }
}

/// An export of the changes since the session began or, without a snapshot of that state, since the
/// last commit.
#[derive(Clone, Debug)]
pub(crate) struct ExportPlan {
    pub(crate) since_start: ApiRequest,
    pub(crate) since_commit: ApiRequest,
}

/// The session of the caller's token, which calls without a session id use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnSession {
    pub(crate) task: TaskId,
    pub(crate) id: SessionId,
    /// 0 before the first session is created; `id` is then the id that it will get.
    pub(crate) generation: i64,
    /// Whether this call may create the first session.
    pub(crate) creates: bool,
}

/// A request to the user API.
#[derive(Clone, Debug)]
pub(crate) struct ApiRequest {
    /// The caller must have access to this task, and the task must own the target of the request.
    pub(crate) task: Option<TaskId>,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: Vec<(&'static str, String)>,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: ApiBody,
    pub(crate) format: ResultFormat,
}

#[derive(Clone, Debug)]
pub(crate) enum ApiBody {
    Empty,
    /// Handed to the gate already parsed.
    Json {
        bytes: Bytes,
        value: Value,
    },
    Bytes(Bytes),
}

/// How an answer becomes the result of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ResultFormat {
    /// The JSON object, unchanged.
    Object,
    File(FilePart),
    /// The preference with this key in a list.
    Preference(String),
}

/// The part of a file to return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FilePart {
    /// Counted from 1.
    pub(crate) start_line: u64,
    /// Inclusive; to the end of the file when absent.
    pub(crate) end_line: Option<u64>,
    pub(crate) max_bytes: usize,
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, PERCENT_ENCODED).to_string()
}

/// Encodes a path segment. An empty one is refused because it would name another route.
pub(crate) fn segment(name: &str, text: &str) -> Result<String, ApiError> {
    if text.is_empty() {
        Err(ApiError::invalid(format!("{name}: must not be empty")))
    } else {
        Ok(encoded(text))
    }
}

/// Encodes a relative path of several segments.
pub(crate) fn segments(name: &str, text: &str) -> Result<String, ApiError> {
    let segments: Result<Vec<String>, ApiError> =
        text.split('/').map(|part| segment(name, part)).collect();
    segments
        .map(|segments| segments.join("/"))
        .map_err(|_| ApiError::invalid(format!("{name}: must be relative, without empty parts")))
}

impl ApiRequest {
    pub(crate) fn new(
        method: Method,
        path: impl Into<String>,
        task: impl Into<Option<TaskId>>,
    ) -> Self {
        Self {
            task: task.into(),
            method,
            path: path.into(),
            query: Vec::new(),
            headers: Vec::new(),
            body: ApiBody::Empty,
            format: ResultFormat::Object,
        }
    }

    pub(crate) fn get(path: impl Into<String>, task: impl Into<Option<TaskId>>) -> Self {
        Self::new(Method::GET, path, task)
    }

    /// Adds a query parameter, if it has a value.
    pub(crate) fn query(mut self, name: &'static str, value: Option<impl ToString>) -> Self {
        self.query
            .extend(value.map(|value| (name, value.to_string())));
        self
    }

    pub(crate) fn header(
        mut self,
        name: &'static str,
        value: Option<&str>,
    ) -> Result<Self, ApiError> {
        if let Some(value) = value {
            let value = HeaderValue::from_str(value).map_err(|_| {
                ApiError::invalid(format!(
                    "{}: contains characters that are not allowed in a header",
                    name.replace('-', "_")
                ))
            })?;
            self.headers.push((HeaderName::from_static(name), value));
        }
        Ok(self)
    }

    pub(crate) fn json(mut self, body: &impl Serialize) -> Result<Self, ApiError> {
        let invalid = |error: serde_json::Error| ApiError::invalid(error.to_string());
        let bytes = Bytes::from(serde_json::to_vec(body).map_err(invalid)?);
        // The gate spools and parses a large body, and accounts for the memory that it takes.
        self.body = if bytes.len() > MAX_BUFFERED_BYTES {
            ApiBody::Bytes(bytes)
        } else {
            let value = serde_json::to_value(body).map_err(invalid)?;
            ApiBody::Json { bytes, value }
        };
        self.headers.push((
            http::header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        ));
        Ok(self)
    }

    pub(crate) fn bytes(mut self, body: Bytes) -> Self {
        self.body = ApiBody::Bytes(body);
        self
    }

    pub(crate) fn with_format(mut self, format: ResultFormat) -> Self {
        self.format = format;
        self
    }

    /// The path with the query.
    pub(crate) fn uri(&self) -> String {
        let query: Vec<String> = self
            .query
            .iter()
            .map(|(name, value)| format!("{name}={}", encoded(value)))
            .collect();
        if query.is_empty() {
            self.path.clone()
        } else {
            format!("{}?{}", self.path, query.join("&"))
        }
    }
}

//! What a tool call becomes: a call of the user API, which passes the same gate as everybody's.

use bytes::Bytes;
use cynode_api::TaskId;
use cynode_service::ApiError;
use http::{HeaderName, HeaderValue, Method};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde_json::Value;

/// What stays as it is in an address.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// What a tool does with arguments that were read.
#[derive(Debug)]
pub(crate) enum Plan {
    /// Calls the user API.
    Call(Call),
    /// Answers from what is here.
    Answer(Value),
    /// Makes a task, in the caller's project when none is named.
    NewTask(Box<cynode_api::TaskCreate>),
    /// Shows the project of a task.
    OwnProject(TaskId),
    /// Looks up which command was run last, and reads its output.
    LastOutput(Call),
    /// The service that it needs is not there; and what to do meanwhile.
    Missing(TaskId, &'static str),
}

/// A call of the user API.
#[derive(Debug)]
pub(crate) struct Call {
    /// The task that it is about: the caller must be good for it, and what the call names must belong to it.
    pub(crate) task: Option<TaskId>,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: Vec<(&'static str, String)>,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: Bytes,
    pub(crate) shape: Shape,
}

/// How an answer becomes the result of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// As it is.
    Object,
    /// The bytes of a file, or some of its lines.
    File(Part),
    /// The one of a list of preferences that has this key.
    Preference(String),
}

/// Which part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Counted from 1.
    pub(crate) start_line: u64,
    /// The last one; all that follow when absent.
    pub(crate) end_line: Option<u64>,
    pub(crate) max_bytes: usize,
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

/// A word in an address. Without one the address would be another.
pub(crate) fn word(name: &str, text: &str) -> Result<String, ApiError> {
    if text.is_empty() {
        Err(ApiError::invalid(format!("{name}: must not be empty")))
    } else {
        Ok(encoded(text))
    }
}

/// Words with slashes between them.
pub(crate) fn words(name: &str, text: &str) -> Result<String, ApiError> {
    let words: Result<Vec<String>, ApiError> =
        text.split('/').map(|part| word(name, part)).collect();
    words
        .map(|words| words.join("/"))
        .map_err(|_| ApiError::invalid(format!("{name}: must be relative, without empty parts")))
}

impl Call {
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
            body: Bytes::new(),
            shape: Shape::Object,
        }
    }

    pub(crate) fn get(path: impl Into<String>, task: impl Into<Option<TaskId>>) -> Self {
        Self::new(Method::GET, path, task)
    }

    /// With what a parameter has, if it has something.
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
                    "{}: holds what no header can",
                    name.replace('-', "_")
                ))
            })?;
            self.headers.push((HeaderName::from_static(name), value));
        }
        Ok(self)
    }

    pub(crate) fn json(mut self, body: &impl Serialize) -> Result<Self, ApiError> {
        self.body = serde_json::to_vec(body)
            .map_err(|error| ApiError::invalid(error.to_string()))?
            .into();
        self.headers.push((
            http::header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        ));
        Ok(self)
    }

    pub(crate) fn bytes(mut self, body: Bytes) -> Self {
        self.body = body;
        self
    }

    pub(crate) fn shaped(mut self, shape: Shape) -> Self {
        self.shape = shape;
        self
    }

    /// The address, with its parameters.
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

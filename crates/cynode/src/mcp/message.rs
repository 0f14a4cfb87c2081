//! The messages of a client (JSON-RPC 2.0) and the answers that the bridge makes itself.
//!
//! A message is forwarded as it came. Only what the bridge needs is looked at: the method, the id,
//! and what the gateway expects in headers.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use cynode_client::McpHeaders;
use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};

use super::refusal::Refusal;

pub const PARSE_ERROR: i64 = -32_700;
pub const INVALID_REQUEST: i64 = -32_600;
pub const INTERNAL_ERROR: i64 = -32_603;
/// A failure of the bridge or of the way to the server.
pub const SERVER_ERROR: i64 = -32_000;

/// The longest text that a header repeats. Names of tools are far shorter.
const MAX_HEADER_TEXT: usize = 1_024;
/// The first revision without a handshake.
const FIRST_WITHOUT_HANDSHAKE: &str = "2026-07-28";
const VERSION_KEY: &str = "io.modelcontextprotocol/protocolVersion";

/// A request or a notification.
#[derive(Clone, Debug)]
pub struct Message {
    pub line: Bytes,
    pub method: String,
    /// `None` for a notification.
    pub id: Option<Value>,
    params: Params,
}

/// What the bridge reads of the parameters.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Params {
    name: Value,
    uri: Value,
    #[serde(rename = "taskId")]
    task_id: Value,
    #[serde(rename = "requestId")]
    request_id: Value,
    #[serde(rename = "_meta")]
    meta: Value,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(default)]
    jsonrpc: Value,
    #[serde(default, deserialize_with = "present")]
    id: Option<Value>,
    #[serde(default)]
    method: Option<Value>,
    #[serde(default, borrow)]
    params: Option<&'a RawValue>,
    #[serde(default, borrow)]
    result: Option<&'a RawValue>,
    #[serde(default, borrow)]
    error: Option<&'a RawValue>,
}

/// Tells an id that is null from none.
fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// A line that is no message, and the id that its error names, if it has one.
#[derive(Debug)]
pub struct Malformed {
    pub id: Option<Value>,
    pub code: i64,
    pub message: String,
}

impl Malformed {
    fn new(id: Option<Value>, code: i64, message: impl Into<String>) -> Self {
        Self {
            id,
            code,
            message: message.into(),
        }
    }
}

impl Message {
    /// Parses a line. `None` is an answer to a request of the server, which makes none.
    pub fn parse(line: Bytes) -> Result<Option<Self>, Malformed> {
        if line.first() == Some(&b'[') {
            return Err(Malformed::new(
                None,
                INVALID_REQUEST,
                "batches are not supported: send one message per line",
            ));
        }
        let envelope: Envelope<'_> = serde_json::from_slice(&line).map_err(|error| {
            let code = if error.is_data() {
                INVALID_REQUEST
            } else {
                PARSE_ERROR
            };
            Malformed::new(None, code, format!("the line is not a message: {error}"))
        })?;
        // An error repeats what the client would recognize.
        let id = envelope
            .id
            .clone()
            .filter(|id| id.is_string() || id.is_number());
        if envelope.jsonrpc != "2.0" {
            return Err(Malformed::new(
                id,
                INVALID_REQUEST,
                "jsonrpc: must be \"2.0\"",
            ));
        }
        let is_answer =
            envelope.method.is_none() && (envelope.result.is_some() || envelope.error.is_some());
        if !is_answer && envelope.id.is_some_and(|id| !is_id(&id)) {
            return Err(Malformed::new(
                id,
                INVALID_REQUEST,
                "id: must be a string or an integer",
            ));
        }
        let method = match envelope.method {
            Some(Value::String(method)) => method,
            None if is_answer => return Ok(None),
            _ => {
                return Err(Malformed::new(
                    id,
                    INVALID_REQUEST,
                    "method: must be a string",
                ));
            }
        };
        let params = envelope
            .params
            .map(RawValue::get)
            .filter(|params| params.starts_with('{'))
            .and_then(|params| serde_json::from_str(params).ok())
            .unwrap_or_default();
        Ok(Some(Self {
            line,
            method,
            id,
            params,
        }))
    }

    pub fn is_tool_call(&self) -> bool {
        self.id.is_some() && self.method == "tools/call"
    }

    /// The tool that a call names.
    pub fn tool(&self) -> &str {
        self.params.name.as_str().unwrap_or_default()
    }

    /// The request that a notification cancels.
    pub fn cancelled(&self) -> Option<&Value> {
        (self.method == "notifications/cancelled").then_some(&self.params.request_id)
    }

    /// Where progress is reported to.
    pub fn progress_token(&self) -> Option<&Value> {
        let token = &self.params.meta["progressToken"];
        is_id(token).then_some(token)
    }

    /// The revision that a message without a handshake names.
    fn version(&self) -> Option<&str> {
        self.params.meta[VERSION_KEY].as_str()
    }

    fn has_no_handshake(&self) -> bool {
        self.version()
            .is_some_and(|version| version >= FIRST_WITHOUT_HANDSHAKE)
    }

    /// The headers of the POST. `negotiated` is the revision of the handshake.
    pub fn headers(&self, negotiated: Option<&str>) -> McpHeaders {
        let version = match self.version() {
            // The handshake itself names its revision in the body.
            None if self.method == "initialize" => None,
            own => own.or(negotiated),
        };
        let name = match self.method.as_str() {
            "tools/call" | "prompts/get" => self.params.name.as_str(),
            "resources/read" | "resources/subscribe" | "resources/unsubscribe" => {
                self.params.uri.as_str()
            }
            "tasks/get" | "tasks/update" | "tasks/cancel" => self.params.task_id.as_str(),
            _ => None,
        };
        McpHeaders {
            protocol_version: version.and_then(bounded).map(str::to_owned),
            method: bounded(&self.method).map(str::to_owned),
            name: name.and_then(bounded).map(encoded),
        }
    }

    /// Whether a tool call has an argument.
    pub fn has_argument(&self, name: &str) -> bool {
        let message: Value = serde_json::from_slice(&self.line).unwrap_or_default();
        !message["params"]["arguments"][name].is_null()
    }

    /// The same call with arguments where it lacks them.
    pub fn with_arguments(&self, added: Map<String, Value>) -> Bytes {
        let mut message: Value = serde_json::from_slice(&self.line).unwrap_or_default();
        let arguments = &mut message["params"]["arguments"];
        if arguments.is_null() {
            *arguments = json!({});
        }
        // The server refuses arguments of another shape.
        let Some(arguments) = arguments.as_object_mut().filter(|_| !added.is_empty()) else {
            return self.line.clone();
        };
        for (name, value) in added {
            let argument = arguments.entry(name).or_insert(Value::Null);
            if argument.is_null() {
                *argument = value;
            }
        }
        Bytes::from(message.to_string())
    }

    /// The result of a tool call that the bridge could not forward.
    pub fn tool_failure(&self, refusal: &Refusal) -> Vec<u8> {
        let mut result = json!({
            "content": [{"type": "text", "text": refusal.text()}],
            "structuredContent": refusal.structure("workspace"),
            "isError": true,
        });
        if self.has_no_handshake()
            && let Value::Object(members) = &mut result
        {
            members.insert("resultType".to_owned(), json!("complete"));
        }
        line(&json!({"jsonrpc": "2.0", "id": self.id, "result": result}))
    }
}

fn is_id(value: &Value) -> bool {
    value.is_string() || value.is_i64()
}

fn bounded(text: &str) -> Option<&str> {
    (text.len() <= MAX_HEADER_TEXT).then_some(text)
}

/// A text as a header: what a header can't hold is in base64.
fn encoded(text: &str) -> String {
    let is_plain = text.bytes().all(|byte| (b' '..=b'~').contains(&byte))
        && text.trim() == text
        && !(text.starts_with("=?base64?") && text.ends_with("?="));
    if is_plain {
        text.to_owned()
    } else {
        format!("=?base64?{}?=", STANDARD.encode(text))
    }
}

/// The error of a request.
pub fn error(id: Option<&Value>, code: i64, refusal: &Refusal) -> Vec<u8> {
    line(&json!({
        "jsonrpc": "2.0",
        "id": id,
        "error": {"code": code, "message": refusal.text(), "data": refusal.structure("bridge")},
    }))
}

/// A message about the progress of a request.
pub fn progress(token: &Value, progress: f64, text: &str) -> Vec<u8> {
    line(&json!({
        "jsonrpc": "2.0",
        "method": "notifications/progress",
        "params": {"progressToken": token, "progress": progress, "message": text},
    }))
}

fn line(message: &Value) -> Vec<u8> {
    message.to_string().into_bytes()
}

/// A message of the server, as far as the bridge looks at it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Outline {
    pub id: Value,
    method: Option<Value>,
    pub result: Option<Box<RawValue>>,
    pub error: Option<Value>,
}

impl Outline {
    /// `None` if the text is no message.
    pub fn of(text: &[u8]) -> Option<Self> {
        let is_object = text.trim_ascii_start().first() == Some(&b'{');
        is_object
            .then(|| serde_json::from_slice(text).ok())
            .flatten()
    }

    /// Whether the message answers a request.
    pub const fn is_answer(&self) -> bool {
        self.method.is_none() && (self.result.is_some() || self.error.is_some())
    }
}

/// A message on one line.
pub fn on_one_line(text: Vec<u8>) -> Vec<u8> {
    if !text.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
        return text;
    }
    match serde_json::from_slice::<Value>(&text) {
        Ok(message) => line(&message),
        Err(_) => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Option<Message>, (Option<Value>, i64)> {
        Message::parse(Bytes::copy_from_slice(line.as_bytes()))
            .map_err(|malformed| (malformed.id, malformed.code))
    }

    fn message(line: &str) -> Message {
        parse(line).expect("valid").expect("a message")
    }

    #[test]
    fn lines_that_are_no_messages_are_refused_with_the_id_that_they_name() {
        for (line, id, code) in [
            ("nonsense", None, PARSE_ERROR),
            ("{\"jsonrpc\":\"2.0\",", None, PARSE_ERROR),
            ("\u{1f600}", None, PARSE_ERROR),
            ("7", None, INVALID_REQUEST),
            ("[]", None, INVALID_REQUEST),
            (
                r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#,
                None,
                INVALID_REQUEST,
            ),
            ("{}", None, INVALID_REQUEST),
            (
                r#"{"id":3,"method":"ping"}"#,
                Some(json!(3)),
                INVALID_REQUEST,
            ),
            (
                r#"{"jsonrpc":"1.0","id":"a","method":"ping"}"#,
                Some(json!("a")),
                INVALID_REQUEST,
            ),
            (
                r#"{"jsonrpc":"2.0","id":4}"#,
                Some(json!(4)),
                INVALID_REQUEST,
            ),
            (
                r#"{"jsonrpc":"2.0","id":4,"method":5}"#,
                Some(json!(4)),
                INVALID_REQUEST,
            ),
            (
                r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#,
                None,
                INVALID_REQUEST,
            ),
            (
                r#"{"jsonrpc":"2.0","id":{"a":1},"method":"ping"}"#,
                None,
                INVALID_REQUEST,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1.5,"method":"ping"}"#,
                Some(json!(1.5)),
                INVALID_REQUEST,
            ),
            (
                r#"{"jsonrpc":"2.0","id":18446744073709551615,"method":"ping"}"#,
                Some(json!(u64::MAX)),
                INVALID_REQUEST,
            ),
            (
                r#"{"jsonrpc":"2.0","id":4,"id":5,"method":"ping"}"#,
                None,
                INVALID_REQUEST,
            ),
        ] {
            assert_eq!(parse(line).expect_err(line), (id, code), "{line}");
        }
        let not_text = Message::parse(Bytes::from_static(b"{\"jsonrpc\":\"\xff\"}"));
        assert_eq!(not_text.expect_err("no text").code, PARSE_ERROR);
    }

    #[test]
    fn requests_notifications_and_answers_are_told_apart() {
        let request = message(r#"{"method":"ping","jsonrpc":"2.0","id":0}"#);
        assert_eq!(
            (request.id, request.method.as_str()),
            (Some(json!(0)), "ping")
        );
        let notification = message(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
        assert_eq!(notification.id, None);
        assert!(
            parse(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#)
                .expect("valid")
                .is_none()
        );
        let cancelled = message(
            r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"x"}}"#,
        );
        assert_eq!(cancelled.cancelled(), Some(&json!("x")));
        // Parameters of another shape are the server's to refuse.
        for params in ["[1,2]", "7", "null", "{\"name\":[1],\"_meta\":3}"] {
            let call = message(&format!(
                r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#
            ));
            assert_eq!((call.tool(), call.progress_token()), ("", None), "{params}");
        }
    }

    #[test]
    fn each_revision_gets_the_headers_that_it_wants() {
        let headers = |line: &str, negotiated| message(line).headers(negotiated);
        let none = headers(
            r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#,
            None,
        );
        assert_eq!(none.protocol_version, None);
        let old = headers(
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"exec"}}"#,
            Some("2025-06-18"),
        );
        assert_eq!(
            (old.protocol_version.as_deref(), old.name.as_deref()),
            (Some("2025-06-18"), Some("exec"))
        );
        let new = |name: &str| {
            let params = json!({"name": name, "_meta": {VERSION_KEY: "2026-07-28"}});
            let call = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params});
            headers(&call.to_string(), Some("2025-06-18"))
        };
        assert_eq!(
            new("exec"),
            McpHeaders {
                protocol_version: Some("2026-07-28".into()),
                method: Some("tools/call".into()),
                name: Some("exec".into()),
            }
        );
        for (name, header) in [
            ("a b", "a b"),
            (" a", "=?base64?IGE=?="),
            ("é\n", "=?base64?w6kK?="),
            ("=?base64?x?=", "=?base64?PT9iYXNlNjQ/eD89?="),
        ] {
            assert_eq!(new(name).name.as_deref(), Some(header), "{name:?}");
        }
        assert_eq!(
            new(&"x".repeat(MAX_HEADER_TEXT)).name.map(|it| it.len()),
            Some(1_024)
        );
        assert_eq!(new(&"x".repeat(MAX_HEADER_TEXT + 1)).name, None);
    }

    #[test]
    fn arguments_are_added_only_where_they_are_missing() {
        let with = |params: &str| {
            let call = message(&format!(
                r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#
            ));
            let mut added = Map::new();
            added.insert("w".to_owned(), json!("a"));
            let line = call.with_arguments(added);
            let message: Value = serde_json::from_slice(&line).expect("JSON");
            (
                call.has_argument("w"),
                message["params"]["arguments"].clone(),
            )
        };
        for (params, expected) in [
            (r#"{"name":"c"}"#, (false, json!({"w": "a"}))),
            (
                r#"{"name":"c","arguments":null}"#,
                (false, json!({"w": "a"})),
            ),
            (
                r#"{"name":"c","arguments":{"w":null,"v":1}}"#,
                (false, json!({"w": "a", "v": 1})),
            ),
            (
                r#"{"name":"c","arguments":{"w":"b"}}"#,
                (true, json!({"w": "b"})),
            ),
            (r#"{"name":"c","arguments":[]}"#, (false, json!([]))),
        ] {
            assert_eq!(with(params), expected, "{params}");
        }
    }

    #[test]
    fn answers_are_on_one_line() {
        assert_eq!(on_one_line(b"{\"a\":1}".to_vec()), b"{\"a\":1}");
        assert_eq!(on_one_line(b"{\n \"a\": 1\r\n}".to_vec()), b"{\"a\":1}");
        let refusal = Refusal::new("code", "two\nlines");
        assert!(!error(None, PARSE_ERROR, &refusal).contains(&b'\n'));
    }
}

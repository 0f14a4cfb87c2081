//! Commands in a session: requests, results, output and signals.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::{IntoParams, ToSchema};

use crate::{Base64Bytes, ExecId};

/// Bounds and defaults of an exec.
pub mod exec_limits {
    pub const MAX_TIMEOUT_MS: u64 = 10_800_000;
    /// Per stream, in the response to a foreground exec.
    pub const DEFAULT_OUTPUT_BYTES: u64 = 262_144;
    pub const MAX_OUTPUT_BYTES: u64 = 16 * 1024 * 1024;
    /// Output that a node retains for one exec, and for all execs of a session.
    pub const KEPT_PER_EXEC: u64 = 16 * 1024 * 1024;
    pub const KEPT_PER_SESSION: u64 = 256 * 1024 * 1024;
    /// argv and environment together, as `execve` counts them: each string with its terminator and
    /// a pointer.
    pub const MAX_ARGUMENT_BYTES: usize = 2 * 1024 * 1024;
    /// The longest argument, and the longest `NAME=value`, with its terminator.
    pub const MAX_ARGUMENT_LENGTH: usize = 128 * 1024;
    /// The size of a pointer to a string.
    pub const POINTER_BYTES: usize = 8;
    /// The JSON of an exec request: argv and environment at their limits with every byte escaped,
    /// plus the other fields.
    pub const MAX_REQUEST_BYTES: usize = 16 * 1024 * 1024;
    /// The part of argv that lists and records show.
    pub const MAX_SHOWN_ARGV_BYTES: usize = 512 * 1024;
    /// Arguments of a job's command.
    pub const MAX_ARGV: usize = 4_096;
    pub const MAX_ARGV_BYTES: usize = 512 * 1024;
    pub const MAX_ENV: usize = 512;
    pub const MAX_ENV_BYTES: usize = 256 * 1024;
    /// Input of one `stdin` call, or of the `stdin` field of a request.
    pub const MAX_STDIN_BYTES: usize = 4 * 1024 * 1024;
    /// The `stdin` part of a form.
    pub const MAX_FORM_STDIN_BYTES: u64 = 100 * 1024 * 1024;
    /// Request input that the commands of a session have not consumed yet.
    pub const MAX_INPUT_PER_SESSION: u64 = 1 << 30;
    pub const MAX_WAIT_MS: u64 = 60_000;
    /// How long the pipes are drained after the main process has exited.
    pub const DRAIN_MS: u64 = 250;
    /// Time between TERM at the deadline and KILL.
    pub const GRACE_MS: u64 = 1_000;
    /// A foreground exec without a reader is terminated after this time.
    pub const ABANDONED_MS: u64 = 30_000;
    /// Concurrent execs of one session.
    pub const MAX_RUNNING: usize = 256;
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub argv: Vec<String>,
    /// The working directory; relative paths are resolved against `/workspace`, the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// 1 to 10,800,000. With `background`, 0 means until the session ends.
    pub timeout_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_b64: Option<Base64Bytes>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stdin_open: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub background: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<ExecId>,
}

/// An exec and its standard input, as `multipart/form-data`.
#[derive(Debug, ToSchema)]
pub struct ExecForm {
    /// The first part: the JSON request, without `stdin` and `stdin_b64`.
    pub request: ExecRequest,
    /// The second part: at most 100 MiB, received completely before the command starts.
    #[schema(value_type = String, format = Binary)]
    pub stdin: Vec<u8>,
}

/// The bytes before and after the input in the form of an exec. The boundary must not occur in the
/// input.
#[must_use]
pub fn exec_form(boundary: &str, request: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let [mut head, between, tail] = exec_form_frame(boundary);
    head.extend_from_slice(request);
    head.extend_from_slice(&between);
    (head, tail)
}

/// The bytes before the request, between the request and the input, and after the input.
#[must_use]
pub fn exec_form_frame(boundary: &str) -> [Vec<u8>; 3] {
    form_frame(boundary, "stdin")
}

/// The bytes around the two parts of a form: `request`, which is JSON, and one of bytes.
#[must_use]
pub fn form_frame(boundary: &str, bytes_part: &str) -> [Vec<u8>; 3] {
    let part = |name: &str, media_type: &str| {
        let disposition = format!("Content-Disposition: form-data; name=\"{name}\"");
        format!("--{boundary}\r\n{disposition}\r\nContent-Type: {media_type}\r\n\r\n")
    };
    [
        part("request", "application/json").into_bytes(),
        format!("\r\n{}", part(bytes_part, "application/octet-stream")).into_bytes(),
        format!("\r\n--{boundary}--\r\n").into_bytes(),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecAccepted {
    pub exec_id: ExecId,
}

/// How a command was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExecVia {
    Agent,
    Runtime,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Truncated {
    pub stdout: bool,
    pub stderr: bool,
}

/// Bytes that the command wrote, retained or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ByteCounts {
    pub stdout: u64,
    pub stderr: u64,
}

/// SHA-256 of each stream, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamHashes {
    pub stdout: String,
    pub stderr: String,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecExit {
    /// Null if a signal ended the command.
    pub exit_code: Option<i32>,
    /// The name of the signal without `SIG`, such as `KILL`.
    pub signal: Option<String>,
    pub timed_out: bool,
    pub oom_killed: bool,
    pub bytes: ByteCounts,
    /// Covers everything that the command wrote, retained or not. Absent if part of it was not
    /// seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<StreamHashes>,
    pub duration_ms: u64,
    pub via: ExecVia,
    /// True if the end was not observed: the process that supervised the command was killed from
    /// inside the sandbox, or the sandbox is gone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// True if the command was killed because its sandbox filled the node's disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_space: bool,
}

impl ExecExit {
    /// The exit of a command that was never started. A reader of its output still needs an end.
    #[must_use]
    pub const fn never_ran(via: ExecVia) -> Self {
        Self {
            exit_code: None,
            signal: None,
            timed_out: false,
            oom_killed: false,
            bytes: ByteCounts {
                stdout: 0,
                stderr: 0,
            },
            sha256: None,
            duration_ms: 0,
            via,
            lost: false,
            no_space: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    pub exec_id: ExecId,
    #[serde(flatten)]
    pub exit: ExecExit,
    pub stdout: String,
    pub stderr: String,
    /// `utf-8`; `base64` for both streams if either is not UTF-8.
    pub encoding: String,
    pub truncated: Truncated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExecState {
    Running,
    Exited,
    Lost,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Exec {
    pub exec_id: ExecId,
    pub state: ExecState,
    /// At most the first 512 KiB and 4,096 arguments.
    pub argv: Vec<String>,
    /// True if `argv` is incomplete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub argv_truncated: bool,
    pub cwd: String,
    pub background: bool,
    #[serde(with = "time::serde::rfc3339")]
    pub started_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    pub ended_at: Option<OffsetDateTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExecExit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    Stdout,
    Stderr,
}

/// A part of the output. `seq` numbers the chunks of both streams, starting at 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Chunk {
    pub seq: u64,
    pub stream: Stream,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_b64: Option<Base64Bytes>,
}

impl Chunk {
    /// Text if the data is UTF-8, base64 otherwise. A character split between two chunks makes both
    /// of them base64.
    #[must_use]
    pub fn new(seq: u64, stream: Stream, at: OffsetDateTime, data: Vec<u8>) -> Self {
        let (data, data_b64) = match String::from_utf8(data) {
            Ok(text) => (Some(text), None),
            Err(error) => (None, Some(Base64Bytes(error.into_bytes()))),
        };
        Self {
            seq,
            stream,
            at,
            data,
            data_b64,
        }
    }
}

/// The part of the output to return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OutputQuery {
    /// Return chunks after this one; 0 is the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_seq: Option<u64>,
    /// Approximate amount to return; 1 MiB by default. A page ends at about 4 MiB of JSON and holds
    /// at least one chunk, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// How long to wait for new output; at most 60,000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// Skip to the newest chunks that hold at least this many bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tail_bytes: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutputPage {
    pub chunks: Vec<Chunk>,
    /// Pass this as `after_seq` to get the next page.
    pub next_seq: u64,
    /// Set if chunks before this one are no longer retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_before_seq: Option<u64>,
    /// Set if the command has ended and this page holds the last of its output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExecExit>,
}

/// The `data` of one event in an event stream. `start` and `exit` have fields of their own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamEvent {
    pub seq: u64,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_b64: Option<Base64Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<ExecId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExecExit>,
    /// On the first event after a gap: chunks before this one are no longer retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_before_seq: Option<u64>,
}

/// A signal by name, with or without `SIG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ToSchema)]
#[schema(value_type = String, example = "TERM")]
pub struct SignalName(i32);

const SIGNALS: &[(&str, i32)] = &[
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("PWR", 30),
    ("SYS", 31),
];

impl SignalName {
    pub const TERM: Self = Self(15);
    pub const KILL: Self = Self(9);

    #[must_use]
    pub const fn number(self) -> i32 {
        self.0
    }

    /// The name of a signal in responses; real-time signals are shown by number.
    #[must_use]
    pub fn name_of(number: i32) -> String {
        SIGNALS
            .iter()
            .find(|(_, n)| *n == number)
            .map_or_else(|| number.to_string(), |(name, _)| (*name).to_owned())
    }

    /// The number of a signal named in a response.
    #[must_use]
    pub fn number_of(name: &str) -> Option<i32> {
        SIGNALS
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, number)| *number)
            .or_else(|| name.parse().ok())
    }
}

impl std::str::FromStr for SignalName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = text.strip_prefix("SIG").unwrap_or(text);
        SIGNALS
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, number)| Self(*number))
            .ok_or_else(|| {
                format!("unknown signal '{text}'; use a name such as TERM, KILL, INT, HUP, USR1")
            })
    }
}

impl Serialize for SignalName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&Self::name_of(self.0))
    }
}

impl<'de> Deserialize<'de> for SignalName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        std::borrow::Cow::<'de, str>::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// The processes that a signal to an exec reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SignalScope {
    /// The process group of the main process.
    #[default]
    Group,
    /// Every running process that the exec started, daemons included.
    Tree,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalExec {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub signal: SignalName,
    #[serde(default)]
    pub scope: SignalScope,
}

/// Signals every process in the sandbox except process 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalSession {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub signal: SignalName,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StdinWrite {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_b64: Option<Base64Bytes>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub eof: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_named_with_or_without_their_prefix() {
        assert_eq!("SIGTERM".parse(), Ok(SignalName::TERM));
        assert_eq!("KILL".parse(), Ok(SignalName::KILL));
        assert!("kill".parse::<SignalName>().is_err());
        assert!("9".parse::<SignalName>().is_err());
    }

    #[test]
    fn a_result_is_one_flat_object() {
        let result = ExecResult {
            exec_id: ExecId::generate(),
            exit: ExecExit {
                exit_code: Some(0),
                signal: None,
                timed_out: false,
                oom_killed: false,
                bytes: ByteCounts::default(),
                sha256: Some(StreamHashes {
                    stdout: "aa".into(),
                    stderr: "bb".into(),
                }),
                duration_ms: 1,
                via: ExecVia::Agent,
                lost: false,
                no_space: false,
            },
            stdout: "hi".into(),
            stderr: String::new(),
            encoding: "utf-8".into(),
            truncated: Truncated::default(),
        };
        let value = serde_json::to_value(&result).expect("results serialise");
        assert_eq!(value["exit_code"], 0);
        assert_eq!(value["via"], "agent");
        assert_eq!(
            (&value["bytes"]["stdout"], &value["sha256"]["stderr"]),
            (&0.into(), &"bb".into())
        );
        assert_eq!(
            serde_json::from_value::<ExecResult>(value).expect("results parse"),
            result
        );
    }
}

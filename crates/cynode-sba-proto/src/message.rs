//! Control messages.

use cynode_api::{
    Base64Bytes, ErrorCode, ExecId, FileChanges, ListRequest, PatchReject, SearchRequest,
    SignalScope,
};
use serde::{Deserialize, Serialize};

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Stays open and idle for the agent's lifetime: when it closes, the agent is gone.
    Watch,
    /// Parked until the worker sends a request.
    Request,
}

/// The first message on every connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub protocol: u32,
    /// The agent's version, for logs.
    pub version: String,
    pub role: Role,
    /// Largest frame that the agent accepts. Older agents omit it and accept 8 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_frame: Option<usize>,
    /// The newest version of encoded patches that the agent reads. Older agents omit it and read
    /// those that are diffs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoded_patches: Option<u32>,
    /// The newest version of the protocol with a runner. Older agents omit it and have no runner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<u32>,
    /// The version of the preamble with which the agent's listeners reach the worker's proxies.
    /// Agents without listeners omit it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listeners: Option<u8>,
}

/// A worker's request, one per connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// Runs a command. Answered by `Started` or `Error`, then output, then `Exited`; the worker
    /// acknowledges output and exit with `Ack` frames and sends standard input as `Data` and `End`,
    /// one chunk at a time, each answered by `StdinTaken`.
    Exec(ExecStart),
    /// Re-attaches to a command after the worker was disconnected: resends output after
    /// `after_seq`, then continues.
    Attach { exec_id: ExecId, after_seq: u64 },
    /// Lists running commands, and ended ones that the worker has not acknowledged.
    Execs,
    Signal {
        exec_id: ExecId,
        signal: i32,
        scope: SignalScope,
    },
    /// Signals every process except process 1.
    SignalAll { signal: i32 },
    /// Runs a file operation in a child process.
    File { op: FileOp },
    /// Connects to the runner that an exec with [`ExecStart::runner`] started. Answered by `Ok` or
    /// `Error`; from then on whole frames are relayed both ways, as [`ToRunner`] and
    /// [`FromRunner`](crate::runner::FromRunner). A newer connection replaces an older one.
    ///
    /// [`ToRunner`]: crate::runner::ToRunner
    Runner { exec_id: ExecId },
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStart {
    pub exec_id: ExecId,
    pub argv: Vec<String>,
    pub cwd: String,
    pub env: Vec<(String, String)>,
    /// 0 for no timeout.
    pub timeout_ms: u64,
    /// Time from SIGTERM to SIGKILL after the timeout.
    pub grace_ms: u64,
    /// How long to drain the pipes after the command's own process has exited.
    pub drain_ms: u64,
    /// Whether standard input follows; without it the command reads end of file.
    pub stdin: bool,
    /// The command is the job runner: it gets one end of a socket pair, [`RUNNER_FD`], whose other
    /// end process 1 keeps and relays.
    ///
    /// [`RUNNER_FD`]: crate::runner::RUNNER_FD
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub runner: bool,
}

/// Paths are bytes; relative ones are resolved against the workspace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum FileOp {
    /// → `Stat`.
    Stat {
        path: Base64Bytes,
        hash: bool,
    },
    /// → `Stat` with the hash, then `Data`…, `End`. `start` and `end` (exclusive) select the range.
    Read {
        path: Base64Bytes,
        start: u64,
        end: Option<u64>,
    },
    /// Then `Data`…, `End` from the worker → `Written`. Without the `End`, the file stays
    /// unchanged.
    Write {
        path: Base64Bytes,
        mode: Option<u32>,
        if_match: Option<Vec<String>>,
        if_none_match: bool,
        max_bytes: u64,
    },
    Delete {
        path: Base64Bytes,
        recursive: bool,
        if_match: Option<Vec<String>>,
    },
    /// → `Body`, then a `ListResult` as JSON in `Data`…, `End`.
    List {
        request: ListRequest,
    },
    /// → `Body` with a `SearchResult`.
    Search {
        request: SearchRequest,
    },
    /// Then the diff as `Data`…, `End` from the worker → `Body` with a `PatchResult`.
    Patch {
        strip: u32,
        dry_run: bool,
        /// The data is not a diff but a patch that the gate has parsed and encoded; `strip` is then
        /// 0. An agent that does not know this field reads it as the same diff, or refuses it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        encoded: bool,
    },
    Move {
        from: Base64Bytes,
        to: Base64Bytes,
        overwrite: bool,
    },
    Mkdir {
        path: Base64Bytes,
        parents: bool,
    },
    /// → `Body`, then a tar archive of everything that the sandbox's user can read.
    ExportTar {
        path: Base64Bytes,
    },
    /// → `Body`, then git's diff of the workspace, including untracked files, against a commit, or
    /// against the snapshot if `base` is [`BROUGHT`] or [`BROUGHT_NOTHING`].
    ExportPatch {
        base: Option<String>,
    },
    /// Takes a snapshot of the workspace for later exports → `Ok`. Older agents reply with an
    /// error.
    Snapshot,
    /// Then a tar archive as `Data`…, `End` from the worker → `Ok`. Like all operations that change
    /// files, it reports its changes.
    Import {
        path: Base64Bytes,
    },
    /// → `Body`, then one list of `FileEvent` as JSON in each `Data`, until the worker disconnects.
    /// Older agents reject it as `InvalidRequest`.
    Watch {
        path: Base64Bytes,
    },
}

/// An agent's reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Hello(Hello),
    Started {
        pid: i32,
    },
    StdinTaken {
        bytes: u64,
    },
    /// Standard input is closed; the agent drops further data.
    StdinClosed,
    Exited(ExitReport),
    Execs {
        execs: Vec<ExecStatus>,
    },
    Stat(FileStat),
    Written(WriteReport),
    /// `Data`… and `End` follow.
    Body,
    /// The operation succeeded.
    Ok {
        /// The changes of a file operation. Older agents omit them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        changed: Option<FileChanges>,
    },
    Error(AgentError),
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub timed_out: bool,
    /// The agent did not observe the exit.
    pub lost: bool,
    pub duration_ms: u64,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    pub last_seq: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStatus {
    pub exec_id: ExecId,
    pub last_seq: u64,
    /// All of its output is acknowledged or discarded, and its exit status is known.
    pub exited: bool,
    /// The command's own process has exited, or its tree was killed at the timeout: only its output
    /// is left, and a slow reader can delay that indefinitely.
    #[serde(default)]
    pub ended: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStat {
    #[serde(rename = "type")]
    pub kind: cynode_api::FileType,
    pub size: u64,
    pub mode: u32,
    /// Seconds since 1970.
    pub mtime: i64,
    /// The SHA-256 of the content, in hex; absent if not requested or not applicable.
    pub sha256: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteReport {
    pub sha256: String,
    pub size: u64,
    pub mode: u32,
    pub created: bool,
    pub sha256_before: Option<String>,
}

/// An error with one of the API's codes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentError {
    pub code: ErrorCode,
    pub message: String,
    /// The name of the system error, such as `ENOENT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejects: Vec<PatchReject>,
    /// Changes made before the failure that were not rolled back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<FileChanges>,
}

impl AgentError {
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            errno: None,
            rejects: Vec::new(),
            changed: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use cynode_api::{FileChange, FileType};
    use proptest::{collection::vec, option, prelude::*, sample::select};
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::{Decoder, Frame, encode_message};

    fn bytes() -> impl Strategy<Value = Base64Bytes> {
        vec(any::<u8>(), 0..40).prop_map(Base64Bytes)
    }

    fn exec_id() -> impl Strategy<Value = ExecId> {
        any::<u128>().prop_map(|number| {
            let hex = format!("{number:032x}");
            let id = format!(
                "\"{}-{}-{}-{}-{}\"",
                &hex[..8],
                &hex[8..12],
                &hex[12..16],
                &hex[16..20],
                &hex[20..]
            );
            serde_json::from_str(&id).expect("an id")
        })
    }

    fn file_op() -> impl Strategy<Value = FileOp> {
        let hashes = || option::of(vec("[0-9a-f]{0,8}", 0..3));
        prop_oneof![
            (bytes(), any::<bool>()).prop_map(|(path, hash)| FileOp::Stat { path, hash }),
            (bytes(), any::<u64>(), any::<Option<u64>>())
                .prop_map(|(path, start, end)| FileOp::Read { path, start, end }),
            (
                bytes(),
                any::<Option<u32>>(),
                hashes(),
                any::<bool>(),
                any::<u64>()
            )
                .prop_map(|(path, mode, if_match, if_none_match, max_bytes)| {
                    FileOp::Write {
                        path,
                        mode,
                        if_match,
                        if_none_match,
                        max_bytes,
                    }
                }),
            (bytes(), any::<bool>(), hashes()).prop_map(|(path, recursive, if_match)| {
                FileOp::Delete {
                    path,
                    recursive,
                    if_match,
                }
            }),
            (
                any::<Option<String>>(),
                any::<Option<u32>>(),
                option::of(bytes())
            )
                .prop_map(|(path, depth, path_b64)| FileOp::List {
                    request: ListRequest {
                        path,
                        depth,
                        path_b64,
                        ..ListRequest::default()
                    }
                }),
            (
                any::<String>(),
                any::<Option<String>>(),
                any::<Option<bool>>()
            )
                .prop_map(|(pattern, glob, case)| FileOp::Search {
                    request: SearchRequest {
                        pattern,
                        glob,
                        case,
                        ..SearchRequest::default()
                    }
                }),
            (any::<u32>(), any::<bool>(), any::<bool>()).prop_map(|(strip, dry_run, encoded)| {
                FileOp::Patch {
                    strip,
                    dry_run,
                    encoded,
                }
            }),
            (bytes(), bytes(), any::<bool>()).prop_map(|(from, to, overwrite)| FileOp::Move {
                from,
                to,
                overwrite
            }),
            (bytes(), any::<bool>()).prop_map(|(path, parents)| FileOp::Mkdir { path, parents }),
            bytes().prop_map(|path| FileOp::ExportTar { path }),
            any::<Option<String>>().prop_map(|base| FileOp::ExportPatch { base }),
            Just(FileOp::Snapshot),
            bytes().prop_map(|path| FileOp::Import { path }),
        ]
    }

    fn changes() -> impl Strategy<Value = FileChanges> {
        let hash = || option::of("[0-9a-f]{64}");
        let change = (
            vec(any::<u8>(), 1..40),
            hash(),
            hash(),
            select(&[FileType::File, FileType::Dir, FileType::Symlink][..]),
        )
            .prop_map(|(path, before, after, kind)| {
                FileChange::new(&path)
                    .before(before)
                    .after(after)
                    .of_kind(kind)
            });
        (vec(change, 0..4), any::<u64>()).prop_map(|(changes, more)| FileChanges { changes, more })
    }

    fn request() -> impl Strategy<Value = Request> {
        let words = || vec(any::<String>(), 0..4);
        let start = (
            exec_id(),
            words(),
            any::<String>(),
            vec(any::<(String, String)>(), 0..3),
            any::<[u64; 3]>(),
            any::<[bool; 2]>(),
        );
        prop_oneof![
            start.prop_map(
                |(exec_id, argv, cwd, env, [timeout_ms, grace_ms, drain_ms], [stdin, runner])| {
                    Request::Exec(ExecStart {
                        exec_id,
                        argv,
                        cwd,
                        env,
                        timeout_ms,
                        grace_ms,
                        drain_ms,
                        stdin,
                        runner,
                    })
                }
            ),
            (exec_id(), any::<u64>())
                .prop_map(|(exec_id, after_seq)| Request::Attach { exec_id, after_seq }),
            Just(Request::Execs),
            (
                exec_id(),
                any::<i32>(),
                select(&[SignalScope::Group, SignalScope::Tree][..])
            )
                .prop_map(|(exec_id, signal, scope)| Request::Signal {
                    exec_id,
                    signal,
                    scope
                }),
            any::<i32>().prop_map(|signal| Request::SignalAll { signal }),
            file_op().prop_map(|op| Request::File { op }),
            exec_id().prop_map(|exec_id| Request::Runner { exec_id }),
            Just(Request::Unknown),
        ]
    }

    fn reply() -> impl Strategy<Value = Reply> {
        let hash = || "[0-9a-f]{0,64}";
        let report = (
            any::<Option<i32>>(),
            any::<Option<i32>>(),
            any::<(bool, bool)>(),
            any::<[u64; 4]>(),
        );
        let status = (exec_id(), any::<u64>(), any::<(bool, bool)>()).prop_map(
            |(exec_id, last_seq, (exited, ended))| ExecStatus {
                exec_id,
                last_seq,
                exited,
                ended,
            },
        );
        let reject = (
            any::<String>(),
            any::<Option<u32>>(),
            any::<Option<u64>>(),
            any::<String>(),
            any::<[Vec<String>; 2]>(),
        )
            .prop_map(
                |(path, hunk, line, reason, [expected, found])| PatchReject {
                    path,
                    hunk,
                    line,
                    reason,
                    expected,
                    found,
                },
            );
        prop_oneof![
            (
                any::<u32>(),
                any::<String>(),
                select(&[Role::Watch, Role::Request][..]),
                any::<Option<usize>>(),
                any::<[Option<u32>; 2]>(),
                any::<Option<u8>>()
            )
                .prop_map(
                    |(protocol, version, role, max_frame, [encoded_patches, runner], listeners)| {
                        Reply::Hello(Hello {
                            protocol,
                            version,
                            role,
                            max_frame,
                            encoded_patches,
                            runner,
                            listeners,
                        })
                    }
                ),
            any::<i32>().prop_map(|pid| Reply::Started { pid }),
            any::<u64>().prop_map(|bytes| Reply::StdinTaken { bytes }),
            select(&[Reply::StdinClosed, Reply::Body, Reply::Unknown][..]),
            option::of(changes()).prop_map(|changed| Reply::Ok { changed }),
            report.prop_map(
                |(
                    code,
                    signal,
                    (timed_out, lost),
                    [duration_ms, stdout_bytes, stderr_bytes, last_seq],
                )| {
                    Reply::Exited(ExitReport {
                        code,
                        signal,
                        timed_out,
                        lost,
                        duration_ms,
                        stdout_bytes,
                        stderr_bytes,
                        last_seq,
                    })
                }
            ),
            vec(status, 0..4).prop_map(|execs| Reply::Execs { execs }),
            (
                select(
                    &[
                        FileType::File,
                        FileType::Dir,
                        FileType::Symlink,
                        FileType::Other
                    ][..]
                ),
                any::<u64>(),
                any::<u32>(),
                any::<i64>(),
                option::of(hash())
            )
                .prop_map(|(kind, size, mode, mtime, sha256)| Reply::Stat(FileStat {
                    kind,
                    size,
                    mode,
                    mtime,
                    sha256
                })),
            (
                hash(),
                any::<u64>(),
                any::<u32>(),
                any::<bool>(),
                option::of(hash())
            )
                .prop_map(|(sha256, size, mode, created, sha256_before)| {
                    Reply::Written(WriteReport {
                        sha256,
                        size,
                        mode,
                        created,
                        sha256_before,
                    })
                }),
            (
                select(ErrorCode::ALL),
                any::<String>(),
                any::<Option<String>>(),
                vec(reject, 0..3),
                option::of(changes())
            )
                .prop_map(|(code, message, errno, rejects, changed)| Reply::Error(
                    AgentError {
                        code,
                        message,
                        errno,
                        rejects,
                        changed
                    }
                )),
        ]
    }

    fn round_trip<M: Serialize + DeserializeOwned + Debug>(message: &M) -> M {
        let mut bytes = Vec::new();
        encode_message(message, &mut bytes);
        let mut decoder = Decoder::new(bytes.len());
        decoder.extend(&bytes);
        match decoder.next_frame() {
            Ok(Some(Frame::Json(json))) => serde_json::from_slice(&json).expect("a message"),
            other => panic!("expected a message, got {other:?}"),
        }
    }

    #[test]
    fn old_and_new_peers_understand_ok() {
        #[derive(Debug, PartialEq, Deserialize)]
        #[serde(tag = "reply", rename_all = "snake_case")]
        enum OldReply {
            Ok,
            #[serde(other)]
            Unknown,
        }
        let changed = Some(FileChanges::from_iter([FileChange::new(b"a")]));
        let json = serde_json::to_string(&Reply::Ok { changed }).expect("JSON");
        assert_eq!(
            serde_json::from_str::<OldReply>(&json).expect("a reply"),
            OldReply::Ok,
            "{json}"
        );
        assert_eq!(
            serde_json::from_str::<Reply>(r#"{"reply":"ok"}"#).expect("a reply"),
            Reply::Ok { changed: None }
        );
    }

    proptest! {
        #[test]
        fn requests_round_trip(request in request()) {
            prop_assert_eq!(round_trip(&request), request);
        }

        #[test]
        fn replies_round_trip(reply in reply()) {
            prop_assert_eq!(round_trip(&reply), reply);
        }

        #[test]
        fn unknown_fields_of_a_newer_peer_are_ignored(
            request in request(),
            name in "x_[a-z]{1,8}",
            value in any::<i64>(),
        ) {
            let mut json = serde_json::to_value(&request).expect("JSON");
            json.as_object_mut()
                .expect("an object")
                .insert(name, value.into());
            let read: Request = serde_json::from_value(json).expect("still a request");
            prop_assert_eq!(read, request);
        }
    }
}

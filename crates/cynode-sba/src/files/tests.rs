//! Shared by the tests of all file operations: a workspace in a temporary directory, and a worker's
//! end of a connection.

use std::{
    io::{self, Read, Write},
    os::unix::{ffi::OsStrExt, net::UnixStream},
    path::PathBuf,
};

use cynode_api::Base64Bytes;
use cynode_sba_proto::{AgentError, Decoder, Frame, MAX_AGENT_FRAME, encode};

pub(super) use super::error::{Failure, Outcome};
use super::*;
pub(super) use cynode_sba_proto::FileOp;

/// The hash of `hello`.
pub(super) const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

pub(super) struct TestWorkspace {
    directory: tempfile::TempDir,
    pub(super) files: Files,
}

/// Everything that the agent sent.
#[derive(Debug)]
pub(super) struct Answer {
    replies: Vec<Reply>,
    data: Vec<u8>,
    ended: bool,
}

impl Answer {
    pub(super) fn first(&self) -> &Reply {
        self.replies.first().expect("a reply")
    }

    /// The data of a complete answer.
    pub(super) fn body(&self) -> &[u8] {
        assert!(self.ended && self.replies.len() == 1, "{self:?}");
        &self.data
    }

    /// The data, however the answer ended.
    pub(super) fn data(&self) -> &[u8] {
        &self.data
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    pub(super) fn error(&self) -> AgentError {
        assert!(!self.ended, "{self:?}");
        match self.replies.last() {
            Some(Reply::Error(error)) => error.clone(),
            other => panic!("expected an error, got {other:?}"),
        }
    }
}

impl TestWorkspace {
    pub(super) fn new() -> Self {
        let directory = tempfile::tempdir().expect("temp dir");
        let files = Files::new(directory.path().join("workspace"));
        std::fs::create_dir(&files.root).expect("workspace");
        Self { directory, files }
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.files.root.join(path)
    }

    /// A path outside the workspace.
    pub(super) fn outside(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    pub(super) fn put(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("parents");
        std::fs::write(path, content).expect("written");
    }

    pub(super) fn get(&self, path: &str) -> Vec<u8> {
        std::fs::read(self.path(path)).expect("read")
    }

    pub(super) fn fifo(&self, path: &str) {
        rustix::fs::mkfifoat(
            rustix::fs::CWD,
            self.path(path),
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        )
        .expect("fifo");
    }

    /// The names in a directory, sorted.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(self.path(path))
            .expect("listed")
            .map(|entry| {
                String::from_utf8_lossy(entry.expect("entry").file_name().as_bytes()).into_owned()
            })
            .collect();
        names.sort();
        names
    }

    /// Runs an operation over a socket, as a worker would.
    pub(super) fn ask(&self, op: FileOp, body: &[u8]) -> Answer {
        let takes_body = matches!(
            op,
            FileOp::Write { .. } | FileOp::Patch { .. } | FileOp::Import { .. }
        );
        let (agent, worker) = UnixStream::pair().expect("socket pair");
        let body = body.to_vec();
        let worker = std::thread::spawn(move || {
            if takes_body {
                send(&worker, &body, true);
            }
            receive(worker)
        });
        self.files
            .serve(op, &mut Peer::from_stream(agent))
            .expect("the connection holds");
        worker.join().expect("the worker's thread")
    }

    /// Sends a part of the body and closes the connection.
    pub(super) fn ask_and_disconnect(&self, op: FileOp, body: &[u8]) -> io::Result<()> {
        let (agent, worker) = UnixStream::pair().expect("socket pair");
        send(&worker, body, false);
        drop(worker);
        self.files.serve(op, &mut Peer::from_stream(agent))
    }
}

fn send(mut stream: &UnixStream, body: &[u8], end: bool) {
    for piece in body.chunks(1_000) {
        let mut out = Vec::new();
        encode(&Frame::Data(piece.to_vec()), &mut out);
        stream.write_all(&out).expect("sent");
    }
    if end {
        let mut out = Vec::new();
        encode(&Frame::End, &mut out);
        stream.write_all(&out).expect("sent");
    }
}

fn receive(mut stream: UnixStream) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("received");
    decode(&bytes)
}

pub(super) fn decode(bytes: &[u8]) -> Answer {
    let mut decoder = Decoder::new(MAX_AGENT_FRAME);
    decoder.extend(bytes);
    let mut answer = Answer {
        replies: Vec::new(),
        data: Vec::new(),
        ended: false,
    };
    while let Some(frame) = decoder.next_frame().expect("valid frames") {
        match frame {
            Frame::Json(json) => answer
                .replies
                .push(serde_json::from_slice(&json).expect("a reply")),
            Frame::Data(data) => answer.data.extend(data),
            Frame::End => answer.ended = true,
            other => panic!("unexpected {other:?}"),
        }
    }
    assert!(!decoder.is_partial());
    answer
}

pub(super) fn raw(path: &str) -> Base64Bytes {
    Base64Bytes(path.as_bytes().to_vec())
}

pub(super) fn refused<T: std::fmt::Debug>(outcome: Outcome<T>) -> AgentError {
    match outcome {
        Err(Failure::Refused(error)) => error,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

pub(super) fn code<T: std::fmt::Debug>(outcome: Outcome<T>) -> ErrorCode {
    refused(outcome).code
}

#[test]
fn a_refused_write_drains_the_body_so_the_worker_gets_the_error() {
    let workspace = TestWorkspace::new();
    let op = FileOp::Write {
        path: raw("."),
        mode: None,
        if_match: None,
        if_none_match: false,
        max_bytes: 10,
    };
    assert_eq!(
        workspace.ask(op, &vec![0; 3_000_000]).error().code,
        ErrorCode::NotAFile
    );
}

#[test]
fn small_operations_answer_over_the_connection() {
    let workspace = TestWorkspace::new();
    let ok = |op| {
        assert!(matches!(
            workspace.ask(op, b"").first(),
            Reply::Ok { changed: Some(_) }
        ));
    };
    ok(FileOp::Mkdir {
        path: raw("a/b"),
        parents: true,
    });
    ok(FileOp::Move {
        from: raw("a/b"),
        to: raw("c"),
        overwrite: false,
    });
    ok(FileOp::Delete {
        path: raw("c"),
        recursive: false,
        if_match: None,
    });
    assert!(matches!(
        workspace
            .ask(
                FileOp::Stat {
                    path: raw("a"),
                    hash: true
                },
                b""
            )
            .first(),
        Reply::Stat(_)
    ));
    assert_eq!(
        workspace
            .ask(
                FileOp::Stat {
                    path: raw("c"),
                    hash: true
                },
                b""
            )
            .error()
            .errno
            .as_deref(),
        Some("ENOENT")
    );
    assert_eq!(workspace.names("."), ["a"]);
}

#[test]
fn the_default_root_is_the_workspace() {
    assert_eq!(Files::default().root, PathBuf::from("/workspace"));
}

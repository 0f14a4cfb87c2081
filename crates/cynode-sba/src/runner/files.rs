//! Runs the steps that work on files. Each runs in a forked child, which needs the memory, so that
//! an out-of-memory kill ends the step but not the runner.

use std::{io, os::unix::net::UnixStream, path::Path, rc::Rc, time::Duration};

use cynode_api::{
    SearchRequest, file_limits,
    sba::{
        ApplyUnifiedDiff, ListTree, ReadFile, StreamEncoding, WriteFile, limits::MAX_TREE_DEPTH,
    },
};
use cynode_sba_proto::{AgentError, BROUGHT, Decoder, FileOp, Frame, MAX_AGENT_FRAME, Reply};
use serde_json::json;
use tokio::time::Instant;

use super::{
    output::Encoded,
    steps::{StepEnd, StepOutcome, Work},
};
use crate::{
    file_child,
    files::{
        Artifact, Files, serve_artifacts,
        workspace::{LineRange, Operation, Output},
    },
    peer::Peer,
    processes::Processes,
    relay::FrameReader,
};

/// Size limit of one document of a child's answer.
const MAX_DOCUMENT_BYTES: usize = 32 * 1024 * 1024;

impl Work {
    pub(super) async fn write_file(&self, file: &WriteFile, deadline: Instant) -> StepOutcome {
        let operation = Operation::Write {
            path: file.path.as_bytes(),
            content: file.content.bytes(),
            mode: file.mode,
        };
        match self.serve(operation, 1, deadline).await {
            Ok((output, _)) => self.done(output),
            Err(outcome) => outcome,
        }
    }

    pub(super) async fn apply_diff(
        &self,
        patch: &ApplyUnifiedDiff,
        deadline: Instant,
    ) -> StepOutcome {
        let diff = patch.diff.as_bytes();
        match self.serve(Operation::Patch { diff }, 1, deadline).await {
            Ok((output, _)) => self.done(output),
            Err(outcome) => outcome,
        }
    }

    pub(super) async fn list_tree(&self, tree: &ListTree, deadline: Instant) -> StepOutcome {
        let deepest = u32::try_from(MAX_TREE_DEPTH).unwrap_or(u32::MAX);
        let operation = Operation::List {
            path: tree.path.as_deref().unwrap_or(".").as_bytes(),
            depth: tree.max_depth.unwrap_or(deepest),
            max_entries: tree.max_entries.unwrap_or(file_limits::DEFAULT_ENTRIES),
        };
        match self.serve(operation, 1, deadline).await {
            Ok((output, _)) => self.done(output),
            Err(outcome) => outcome,
        }
    }

    pub(super) async fn search(&self, request: &SearchRequest, deadline: Instant) -> StepOutcome {
        match self.serve(Operation::Search { request }, 1, deadline).await {
            Ok((output, _)) => self.done(output),
            Err(outcome) => outcome,
        }
    }

    pub(super) async fn read_file(&self, file: &ReadFile, deadline: Instant) -> StepOutcome {
        let left = self.budget.left();
        let operation = Operation::Read {
            path: file.path.as_bytes(),
            lines: LineRange {
                start: file.start_line.unwrap_or(1),
                end: file.end_line,
            },
            // Reads one byte more, which shows that the job's limit is exceeded.
            max_bytes: file.max_bytes.unwrap_or(u64::MAX).min(left + 1),
        };
        let (output, mut content) = match self.serve(operation, 2, deadline).await {
            Ok(answer) => answer,
            Err(outcome) => return outcome,
        };
        let Output {
            mut value,
            truncated,
        } = output;
        let taken = self.budget.take(content.len());
        let end = if taken < content.len() {
            content.truncate(taken);
            StepEnd::TooMuchOutput
        } else {
            if truncated {
                drop_split_character(&mut content);
            }
            StepEnd::Success
        };
        self.budget.take_structured(&value);
        let Encoded {
            texts: [text],
            encoding,
        } = self.budget.encode([content]);
        value[match encoding {
            StreamEncoding::Utf8 => "content",
            StreamEncoding::Base64 => "content_b64",
        }] = text.into();
        let truncated = truncated || end == StepEnd::TooMuchOutput;
        value["truncated"] = truncated.into();
        StepOutcome {
            output: Some(value),
            truncated,
            ..StepOutcome::new(end)
        }
    }

    fn done(&self, output: Output) -> StepOutcome {
        self.budget.take_structured(&output.value);
        StepOutcome {
            output: Some(output.value),
            truncated: output.truncated,
            ..StepOutcome::new(StepEnd::Success)
        }
    }

    /// Runs an operation in a child that answers with `documents`. The error is the step's outcome.
    async fn serve(
        &self,
        operation: Operation<'_>,
        documents: usize,
        deadline: Instant,
    ) -> Result<(Output, Vec<u8>), StepOutcome> {
        let room = self.budget.room();
        let failed = |error: String| StepOutcome::new(StepEnd::Failure(error));
        let child = FileChild::start(&self.execs.processes, |peer| {
            self.workspace.serve(operation, room, peer)
        });
        let mut child = child.map_err(|error| failed(format!("starting the step: {error}")))?;
        let answer = tokio::select! {
            answer = child.answer(documents) => answer,
            () = tokio::time::sleep_until(deadline) => {
                child.kill().await;
                return Err(StepOutcome::new(StepEnd::TimedOut));
            }
            reason = self.stopped() => {
                child.kill().await;
                return Err(StepOutcome::new(StepEnd::Stopped(reason)));
            }
        };
        let mut documents = match answer {
            Ok(documents) => documents.into_iter(),
            Err(ChildFailure::Refused(refusal)) => {
                let mut outcome = failed(refusal.message.clone());
                if !refusal.rejects.is_empty() {
                    let value = json!({ "rejects": refusal.rejects });
                    if self.budget.has_room_for(&value) {
                        self.budget.take_structured(&value);
                        outcome.output = Some(value);
                    }
                }
                return Err(outcome);
            }
            Err(ChildFailure::Died) => {
                return Err(failed(
                    "the step's process was killed; it may have run out of memory".to_owned(),
                ));
            }
        };
        let output = documents.next().unwrap_or_default();
        let output = serde_json::from_slice(&output)
            .map_err(|error| failed(format!("the step's process sent no answer: {error}")))?;
        Ok((output, documents.next().unwrap_or_default()))
    }
}

/// Lists the artifacts with their hashes. Returns an empty list if that takes too long.
pub(super) async fn artifacts(
    processes: &Rc<Processes>,
    directory: &Path,
    time: Duration,
) -> Vec<Artifact> {
    let serve = |peer: &mut Peer| serve_artifacts(directory, time / 2, peer);
    let Ok(mut child) = FileChild::start(processes, serve) else {
        return Vec::new();
    };
    match tokio::time::timeout(time, child.answer(1)).await {
        Ok(Ok(documents)) => documents
            .first()
            .and_then(|json| serde_json::from_slice(json).ok())
            .unwrap_or_default(),
        Ok(Err(_)) => Vec::new(),
        Err(_) => {
            child.kill().await;
            Vec::new()
        }
    }
}

/// The changes of the workspace as a patch, against what was brought into it or, without that, the
/// last commit. `None` without changes, or without a patch in time.
pub(super) async fn changes(
    processes: &Rc<Processes>,
    workspace: &Path,
    time: Duration,
) -> Option<Vec<u8>> {
    let until = Instant::now() + time;
    for base in [Some(BROUGHT.to_owned()), None] {
        let files = Files::within(workspace);
        let serve = |peer: &mut Peer| files.serve(FileOp::ExportPatch { base }, peer);
        let mut child = FileChild::start(processes, serve).ok()?;
        match tokio::time::timeout_at(until, child.answer(1)).await {
            Ok(Ok(mut documents)) => return documents.pop().filter(|patch| !patch.is_empty()),
            Ok(Err(_)) => {}
            Err(_) => {
                child.kill().await;
                return None;
            }
        }
    }
    None
}

/// Truncation may have split the last character of a text.
fn drop_split_character(content: &mut Vec<u8>) {
    if let Err(error) = std::str::from_utf8(content)
        && error.error_len().is_none()
    {
        content.truncate(error.valid_up_to());
    }
}

struct FileChild {
    processes: Rc<Processes>,
    /// `None` if the fork failed.
    pid: Option<i32>,
    answer: FrameReader,
    /// Keeps the connection open; the child ends when it closes.
    _writer: tokio::net::unix::OwnedWriteHalf,
}

enum ChildFailure {
    Refused(AgentError),
    Died,
}

impl FileChild {
    fn start(
        processes: &Rc<Processes>,
        serve: impl FnOnce(&mut Peer) -> io::Result<()>,
    ) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let (reader, writer) = tokio::net::UnixStream::from_std(ours)?.into_split();
        Ok(Self {
            processes: Rc::clone(processes),
            pid: file_child::start(processes, theirs, Decoder::new(0), serve),
            answer: FrameReader::new(reader, Decoder::new(MAX_AGENT_FRAME)),
            _writer: writer,
        })
    }

    /// Receives the documents of the answer.
    async fn answer(&mut self, count: usize) -> Result<Vec<Vec<u8>>, ChildFailure> {
        let (mut documents, mut document) = (Vec::new(), Vec::new());
        while documents.len() < count {
            match self.answer.next().await {
                Ok(Some(Frame::Data(piece)))
                    if document.len() + piece.len() <= MAX_DOCUMENT_BYTES =>
                {
                    document.extend_from_slice(&piece);
                }
                Ok(Some(Frame::End)) => documents.push(std::mem::take(&mut document)),
                Ok(Some(Frame::Json(json))) => match serde_json::from_slice(&json) {
                    Ok(Reply::Body) => {}
                    Ok(Reply::Error(refusal)) => return Err(ChildFailure::Refused(refusal)),
                    _ => return Err(ChildFailure::Died),
                },
                _ => return Err(ChildFailure::Died),
            }
        }
        Ok(documents)
    }

    /// Kills the child and waits until it is gone.
    async fn kill(&self) {
        if let Some(pid) = self.pid {
            self.processes.end_tree(pid).await;
        }
    }
}

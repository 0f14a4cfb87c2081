//! An agent that continues after its runner was killed, with a worker that speaks the protocol.

use std::{
    io::{Read as _, Write as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Stdio},
};

use cynode_api::sba::{FailureCode, JobResult, ResultStatus};
use cynode_sba_proto::{
    Decoder, Frame, encode, encode_data, encode_message,
    runner::{Event, FromRunner, MAX_FRAME, ToRunner},
};
use serde_json::{Value, json};

use crate::{
    model_server::{ModelServer, Reply, calls, finishes, prompt_text},
    support::{PATIENCE, Sandbox, as_user, job},
};

/// The worker's end of the conversation.
struct Worker {
    stream: UnixStream,
    decoder: Decoder,
    events: Vec<Event>,
    documents: Vec<Vec<u8>>,
    tokens: u64,
}

impl Worker {
    /// Starts a runner for its second attempt.
    fn start(
        sandbox: &Sandbox,
        url: &str,
        in_flight: Option<u64>,
        finished: &Value,
    ) -> (Self, Child) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        ours.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        // The shell moves the socket to the descriptor where the runner expects it.
        let child = as_user("sh")
            .args([
                "-c",
                "exec \"$@\" 3<&0 </dev/null",
                "sh",
                env!("CARGO_BIN_EXE_cynode-sba"),
            ])
            .args(["run", "--supervised", "--job-dir"])
            .arg(sandbox.path("job"))
            .arg("--workspace")
            .arg(sandbox.path("workspace"))
            .env("OLLAMA_BASE_URL", url)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("started");
        let mut worker = Self {
            stream: ours,
            decoder: Decoder::new(MAX_FRAME),
            events: Vec::new(),
            documents: Vec::new(),
            tokens: 0,
        };
        worker.send(&ToRunner::Attach { received: 0 });
        worker.send(&ToRunner::Job {
            attempt: 2,
            in_flight,
            remaining_ms: 60_000,
        });
        let mut job = job(json!([]));
        job["inference"] = json!({"allowed_models": ["m"]});
        worker.send_document(&job);
        worker.send_document(finished);
        (worker, child)
    }

    fn send(&mut self, message: &ToRunner) {
        let mut bytes = Vec::new();
        encode_message(message, &mut bytes);
        self.stream.write_all(&bytes).expect("sent");
    }

    fn send_document(&mut self, document: &Value) {
        let mut bytes = Vec::new();
        encode_data(document.to_string().as_bytes(), &mut bytes);
        encode(&Frame::End, &mut bytes);
        self.stream.write_all(&bytes).expect("sent");
    }

    fn next(&mut self) -> Frame {
        loop {
            if let Some(frame) = self.decoder.next_frame().expect("a frame") {
                return frame;
            }
            let mut buffer = [0; 65_536];
            let count = self.stream.read(&mut buffer).expect("read");
            assert!(count > 0, "the runner is gone");
            self.decoder.extend(&buffer[..count]);
        }
    }

    /// Acknowledges everything up to the result, and returns that.
    fn result(mut self, mut child: Child) -> (Vec<Event>, JobResult, u64) {
        loop {
            let Frame::Json(json) = self.next() else {
                panic!("a message")
            };
            let (number, event) = match serde_json::from_slice(&json).expect("a message") {
                FromRunner::Event { number, event } => (number, event),
                FromRunner::Progress { progress } => {
                    self.tokens = progress.tokens;
                    assert_eq!(progress.steps, None);
                    continue;
                }
                FromRunner::Attached { .. } | FromRunner::Unknown => continue,
            };
            self.events.push(event);
            if event.has_document() {
                let mut document = Vec::new();
                loop {
                    match self.next() {
                        Frame::Data(piece) => document.extend_from_slice(&piece),
                        Frame::End => break,
                        other => panic!("{other:?}"),
                    }
                }
                self.documents.push(document);
            }
            self.send(&ToRunner::Acknowledge { number });
            if event == Event::Result {
                child.wait().expect("ended");
                let result = JobResult::parse(&self.documents[self.documents.len() - 1]);
                return (self.events, result.expect("a result"), self.tokens);
            }
        }
    }
}

fn finished() -> Value {
    json!([
        {"index": 0, "type": "write_file", "status": "success", "output": {"size": 5}},
        {"index": 1, "type": "run_command", "status": "failure", "exit_code": 7,
         "stdout": "seven", "stderr": "", "error": "the command exited with 7"},
    ])
}

#[test]
fn an_agent_that_continues_knows_its_finished_steps_and_repeats_none() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |number, request| {
        let text = prompt_text(request);
        assert!(
            text.contains("You began to work on the job before"),
            "{text}"
        );
        assert!(
            text.contains("run_command failed: error: the command exited with 7"),
            "{text}"
        );
        match number {
            0 => calls("list_tree", &json!({})),
            _ => finishes(),
        }
    });
    let (worker, child) = Worker::start(&sandbox, &server.url(), None, &finished());
    let (events, result, tokens) = worker.result(child);
    assert_eq!(
        events,
        [
            Event::Accepted,
            Event::StepStarted { index: 2 },
            Event::StepEnded { index: 2 },
            Event::Result,
        ]
    );
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    assert_eq!(
        (result.steps.len(), result.steps[1].exit_code),
        (3, Some(7))
    );
    assert!(tokens > 0);
}

#[test]
fn an_agents_step_in_flight_ends_the_job() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |_, _| -> Reply { panic!("asked") });
    let (worker, child) = Worker::start(&sandbox, &server.url(), Some(2), &finished());
    let (events, result, _) = worker.result(child);
    assert_eq!(
        events,
        [
            Event::Accepted,
            Event::StepEnded { index: 2 },
            Event::Result
        ]
    );
    assert_eq!(result.failure_code, Some(FailureCode::RunnerInterrupted));
    assert_eq!(result.steps[2].kind, "tool_call");
    assert!(server.requests().is_empty());
}

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
    support::{PATIENCE, Sandbox, as_user, eventually, job},
};

/// The socket of the node's proxies.
const PROXY: &str = "proxy.sock";

/// The worker's end of the conversation.
struct Worker {
    stream: UnixStream,
    decoder: Decoder,
    events: Vec<Event>,
    documents: Vec<Vec<u8>>,
    tokens: u64,
    /// Listens on loopback, as a process that a step left behind can.
    forger: ModelServer,
}

impl Worker {
    /// Starts a runner for its second attempt.
    fn start(sandbox: &Sandbox, in_flight: Option<u64>, finished: &Value) -> (Self, Child) {
        Self::start_job(sandbox, &agent_job(), 2, in_flight, finished)
    }

    /// Starts a runner. The node's socket is in the sandbox, and somebody else listens on loopback.
    fn start_job(
        sandbox: &Sandbox,
        job: &Value,
        attempt: u32,
        in_flight: Option<u64>,
        finished: &Value,
    ) -> (Self, Child) {
        let forger = ModelServer::start(&["m"], |_, _| panic!("loopback was asked"));
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
            .arg("--proxy")
            .arg(sandbox.path(PROXY))
            .env("OLLAMA_BASE_URL", forger.url())
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
            forger,
        };
        worker.send(&ToRunner::Attach { received: 0 });
        worker.send(&ToRunner::Job {
            attempt,
            in_flight,
            remaining_ms: 60_000,
        });
        worker.send_document(job);
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
            let mut buffer = vec![0; 65_536];
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
                assert_eq!(self.forger.requests(), Vec::<Value>::new());
                let result = JobResult::parse(&self.documents[self.documents.len() - 1]);
                return (self.events, result.expect("a result"), self.tokens);
            }
        }
    }
}

/// Starts the models of the node.
fn node_models(
    sandbox: &Sandbox,
    script: impl FnMut(usize, &Value) -> Reply + Send + 'static,
) -> ModelServer {
    ModelServer::start_at(&sandbox.path(PROXY), &["m"], script)
}

fn agent_job() -> Value {
    let mut job = job(json!([]));
    job["inference"] = json!({"allowed_models": ["m"]});
    job
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
    let _server = node_models(&sandbox, |number, request| {
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
    let (worker, child) = Worker::start(&sandbox, None, &finished());
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
    let server = node_models(&sandbox, |_, _| -> Reply { panic!("asked") });
    let (worker, child) = Worker::start(&sandbox, Some(2), &finished());
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

#[test]
// invariant: fail-closed
fn a_process_that_answers_on_loopback_can_not_speak_for_the_model() {
    let sandbox = Sandbox::new();
    let server = node_models(&sandbox, |number, _| match number {
        0 => calls("list_tree", &json!({})),
        _ => finishes(),
    });
    let (worker, child) = Worker::start_job(&sandbox, &agent_job(), 1, None, &json!([]));
    let (_, result, _) = worker.result(child);
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    assert_eq!(server.requests().len(), 2);

    // Without the node there is no model at all.
    let sandbox = Sandbox::new();
    let mut job = agent_job();
    job["constraints"]["max_runtime_seconds"] = json!(1);
    let (worker, child) = Worker::start_job(&sandbox, &job, 1, None, &json!([]));
    let (_, result, _) = worker.result(child);
    assert_ne!(result.status, ResultStatus::Success, "{result:?}");
}

#[test]
fn an_item_that_an_agent_added_is_in_the_list_of_its_second_runner() {
    let sandbox = Sandbox::new();
    let (asked, again) = std::sync::mpsc::channel();
    let server = node_models(&sandbox, move |number, request| match number {
        0 => calls("todo_add", &json!({"title": "Sweep the floor"})),
        1 => {
            asked.send(prompt_text(request)).expect("the test waits");
            Reply::Disconnect
        }
        _ => {
            asked.send(prompt_text(request)).ok();
            finishes()
        }
    });
    let (worker, mut child) = Worker::start_job(&sandbox, &agent_job(), 1, None, &json!([]));
    let listed = again.recv_timeout(PATIENCE).expect("a second request");
    assert!(listed.contains("Sweep the floor"), "{listed}");
    eventually("the list is in its file", || {
        std::fs::read_to_string(sandbox.path("job/todo.json"))
            .is_ok_and(|list| list.contains("Sweep the floor"))
    });
    child.kill().expect("killed");
    child.wait().expect("ended");
    drop((worker, server));
    std::fs::remove_file(sandbox.path(PROXY)).expect("removed");

    let (asked, first) = std::sync::mpsc::channel();
    let _server = node_models(&sandbox, move |_, request| {
        asked.send(prompt_text(request)).ok();
        finishes()
    });
    let (worker, child) = Worker::start(&sandbox, None, &json!([]));
    let (_, result, _) = worker.result(child);
    let prompt = first.recv_timeout(PATIENCE).expect("a request");
    assert!(prompt.contains("Sweep the floor"), "{prompt}");
    let todo = result.todo.expect("a summary");
    assert!(
        todo.open.contains(&"Sweep the floor".to_owned()),
        "{todo:?}"
    );
}

#[test]
fn a_step_that_failed_before_ends_the_job_as_it_did_whether_its_output_was_kept_or_not() {
    let sandbox = Sandbox::new();
    let mut job = job(json!([{"type": "run_command", "args": {"argv": ["false"]}}]));
    job["constraints"]["max_output_bytes"] = json!(1_000);
    let too_much = "the steps returned more than the max_output_bytes of 1000";
    for (error, truncated, code) in [
        ("the command exited with 1", false, FailureCode::StepFailed),
        // The node drops output that it has no room for.
        ("the command exited with 1", true, FailureCode::StepFailed),
        (too_much, true, FailureCode::ConstraintViolation),
    ] {
        let finished = json!([{
            "index": 0, "type": "run_command", "status": "failure", "exit_code": 1,
            "error": error, "truncated": truncated,
        }]);
        let (worker, child) = Worker::start_job(&sandbox, &job, 2, None, &finished);
        let (_, result, _) = worker.result(child);
        assert_eq!(result.failure_code, Some(code), "{error} {truncated}");
    }
}

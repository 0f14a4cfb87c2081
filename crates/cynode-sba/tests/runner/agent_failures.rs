//! How the job of an agent ends without success.

use std::time::{Duration, Instant};

use cynode_api::sba::{FailureCode, ResultStatus, StepStatus};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    agent::{agent_job, failed_with, kinds},
    model_server::{ModelServer, Reply, calls, finishes, says},
    support::{Sandbox, eventually, signal},
};

#[test]
// part of: CYNAI.SBAGNT.JobInferenceModel
fn only_allowed_models_are_asked_and_without_one_the_job_fails() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["other"], |_, _| panic!("asked"));
    let message = failed_with(
        &sandbox.run_agent(&agent_job(), &server.url()),
        &FailureCode::InferenceUnavailable,
    );
    assert!(
        message.contains("none of the allowed models: m"),
        "{message}"
    );
    assert!(server.requests().is_empty());
    let url = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        format!("http://{}", listener.local_addr().expect("an address"))
    };
    let result = sandbox.run_agent(&agent_job(), &url);
    let message = failed_with(&result, &FailureCode::InferenceUnavailable);
    assert!(
        message.contains("no model server at 127.0.0.1"),
        "{message}"
    );
    let result = sandbox.run_agent(&agent_job(), "http://models.example.org");
    let message = failed_with(&result, &FailureCode::InferenceUnavailable);
    assert!(
        message.contains("neither localhost nor an address"),
        "{message}"
    );
    let mut job = agent_job();
    job["inference"]["source"] = json!("api_egress");
    let result = sandbox.run_agent(&job, &server.url());
    failed_with(&result, &FailureCode::InferenceUnavailable);
}

#[test]
fn the_first_model_that_answers_is_used_and_failures_are_retried() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["second", "first", "third"], |number, request| {
        match (number, request["model"].as_str()) {
            (0, Some("first")) => Reply::Status(400, json!({"error": "no tools"}).to_string()),
            (1, Some("second")) => Reply::Status(503, "busy".to_owned()),
            (2, Some("second")) => Reply::Disconnect,
            (3, Some("second")) => calls("list_tree", &json!({})),
            (4, Some("second")) => finishes(),
            other => panic!("{other:?}"),
        }
    });
    let mut job = agent_job();
    job["inference"]["allowed_models"] = json!(["none", "first", "second", "third"]);
    let result = sandbox.run_agent(&job, &server.url());
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    let usage = result.usage.expect("usage");
    assert_eq!((usage.model.as_str(), usage.requests), ("second", 5));
    let errors: Vec<Value> = sandbox
        .transcript()
        .into_iter()
        .filter(|entry| entry["type"] == "error")
        .collect();
    assert_eq!(errors.len(), 3);
    assert_eq!(
        errors[0]["message"],
        "the model server answered 400: no tools"
    );
}

#[test]
fn garbage_ends_in_a_definite_failure_after_a_few_attempts() {
    let sandbox = Sandbox::new();
    for (garbage, reason) in [
        ("data: what?\n\n", "not one of a chat completion"),
        ("\u{0}\u{1}\u{2} no events", "ended too early"),
        (
            "data: {\"choices\": [{\"delta\": {\"content\": \"half an\"}}]}\n\n",
            "ended too early",
        ),
        (
            "data: {\"error\": {\"message\": \"out of memory\"}}\n\n",
            "out of memory",
        ),
    ] {
        let server = ModelServer::start(&["m"], move |_, _| Reply::Stream(garbage.to_owned()));
        let result = sandbox.run_agent(&agent_job(), &server.url());
        let message = failed_with(&result, &FailureCode::InferenceUnavailable);
        assert!(message.contains(reason), "{message}");
        assert_eq!(server.requests().len(), 4);
        assert_eq!(result.usage.expect("usage").requests, 4);
    }
}

#[test]
fn an_answer_without_end_is_cut_off() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |_, _| Reply::EndlessText);
    let message = failed_with(
        &sandbox.run_agent(&agent_job(), &server.url()),
        &FailureCode::InferenceUnavailable,
    );
    assert!(message.contains("the answer is too long"), "{message}");
}

#[test]
fn a_model_that_never_answers_ends_with_the_jobs_time() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |_, _| Reply::EndlessPause);
    let mut job = agent_job();
    job["constraints"]["max_runtime_seconds"] = json!(1);
    let begun = Instant::now();
    let result = sandbox.run_agent(&job, &server.url());
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(result.status, ResultStatus::Timeout);
    let message = failed_with(&result, &FailureCode::Timeout);
    assert!(message.contains("max_runtime_seconds of 1"), "{message}");
    assert_eq!(
        sandbox.transcript().last().expect("a line")["code"],
        "timeout"
    );
}

#[test]
fn a_job_is_canceled_while_the_model_thinks() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |_, _| Reply::EndlessPause);
    sandbox.put("job/job.json", agent_job().to_string());
    let child = sandbox
        .command(&[])
        .env("OLLAMA_BASE_URL", server.url())
        .spawn()
        .expect("started");
    eventually("the model is asked", || !server.requests().is_empty());
    signal(child.id(), Signal::TERM);
    let (result, _) = sandbox.finish(child);
    failed_with(&result, &FailureCode::Canceled);
}

#[test]
fn a_model_that_repeats_itself_ends_with_no_progress() {
    let sandbox = Sandbox::new();
    sandbox.put("workspace/file", "text");
    let server = ModelServer::start(&["m"], |number, _| match number % 2 {
        0 => calls("read_file", &json!({"path": "file"})),
        _ => calls("run_command", &json!({"argv": ["date", "+%N"]})),
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    let message = failed_with(&result, &FailureCode::NoProgress);
    assert!(message.contains("repeated itself"), "{message}");
    assert_eq!(result.steps.len(), 8);
    let server = ModelServer::start(&["m"], |_, _| says("  "));
    let result = sandbox.run_agent(&agent_job(), &server.url());
    failed_with(&result, &FailureCode::NoProgress);
    assert_eq!(server.requests().len(), 6);
}

#[test]
fn a_job_has_a_limit_of_tokens_and_of_turns() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |_, _| Reply::Answer {
        text: String::new(),
        calls: vec![(
            "run_command".to_owned(),
            "{\"argv\": [\"touch\", \"made\"]}".to_owned(),
        )],
        tokens: 5_000_000,
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    let message = failed_with(&result, &FailureCode::TurnLimit);
    assert!(message.contains("5000000 tokens"), "{message}");
    assert!(!sandbox.workspace("made").exists());

    let server = ModelServer::start(&["m"], |number, _| {
        let path = format!("{}-{}", "x".repeat(number / 20), "y".repeat(number % 20));
        calls("write_file", &json!({"path": path, "content": ""}))
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    let message = failed_with(&result, &FailureCode::TurnLimit);
    assert!(message.contains("200 turns"), "{message}");
    assert_eq!((result.steps.len(), server.requests().len()), (200, 200));
}

#[test]
fn output_beyond_the_jobs_limit_is_a_violation() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |_, _| {
        calls(
            "run_command",
            &json!({"argv": ["yes | head -c 2000000"], "shell": true}),
        )
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    let message = failed_with(&result, &FailureCode::ConstraintViolation);
    assert!(message.contains("max_output_bytes"), "{message}");
}

#[test]
fn an_agents_job_without_a_worker_is_not_continued_after_its_runner_was_killed() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |_, _| {
        calls(
            "run_command",
            &json!({"argv": ["echo ran >>runs; sleep 1000"], "shell": true}),
        )
    });
    sandbox.put("job/job.json", agent_job().to_string());
    let mut child = sandbox
        .command(&[])
        .env("OLLAMA_BASE_URL", server.url())
        .spawn()
        .expect("started");
    eventually("the command runs", || sandbox.workspace("runs").exists());
    child.kill().expect("killed");
    child.wait().expect("ended");
    let result = sandbox.run_agent(&agent_job(), &server.url());
    failed_with(&result, &FailureCode::RunnerInterrupted);
    assert_eq!(
        kinds(&result.steps),
        [("tool_call", StepStatus::Interrupted)]
    );
    assert_eq!(sandbox.get("workspace/runs").lines().count(), 1);
}

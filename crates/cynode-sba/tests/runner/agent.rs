//! Jobs that an agent works, with a scripted model.

use cynode_api::sba::{FailureCode, JobResult, ResultStatus, StepResult, StepStatus, Verifier};
use serde_json::{Value, json};

use crate::{
    model_server::{
        ModelServer, Reply, calls, calls_all, finishes, last_results, prompt_text, says,
    },
    support::{Sandbox, as_user, eventually, job},
};

pub(crate) fn agent_job() -> Value {
    let mut job = job(json!([]));
    job["inference"] = json!({"allowed_models": ["m"]});
    job
}

/// A job with a criterion that this script checks.
fn checked_job(script: &str) -> Value {
    let mut job = agent_job();
    let check = json!({"argv": [script], "shell": true});
    job["context"] = json!({
        "acceptance_criteria": ["The code is clean", {"text": "The tests pass", "check": check}],
    });
    job
}

impl Sandbox {
    pub(crate) fn run_agent(&self, job: &Value, url: &str) -> JobResult {
        self.put("job/job.json", job.to_string());
        let child = self
            .command(&[])
            .env("OLLAMA_BASE_URL", url)
            .spawn()
            .expect("started");
        self.finish(child).0
    }

    pub(crate) fn transcript(&self) -> Vec<Value> {
        let text = self.get("job/artifacts/transcript.jsonl");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect()
    }

    fn git(&self, arguments: &[&str]) {
        let output = as_user("git")
            .args(["-c", "user.name=x", "-c", "user.email=x@example.org"])
            .args(arguments)
            .current_dir(self.path("workspace"))
            .env("HOME", self.path(""))
            .output()
            .expect("git runs");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
}

pub(crate) fn failed_with(result: &JobResult, code: &FailureCode) -> String {
    assert_eq!(
        result.failure_code.as_ref(),
        Some(code),
        "{:?}",
        result.failure_message
    );
    result.failure_message.clone().expect("a message")
}

pub(crate) fn kinds(steps: &[StepResult]) -> Vec<(&str, StepStatus)> {
    steps
        .iter()
        .map(|step| (step.kind.as_str(), step.status))
        .collect()
}

#[test]
// part of: CYNAI.SBAGNT.JobInferenceModel
// part of: CYNAI.SBAGNT.TodoList
// part of: CYNAI.SBAGNT.ResultContract
fn an_agent_repairs_a_program_until_the_jobs_check_succeeds() {
    let sandbox = Sandbox::new();
    sandbox.put("workspace/add.sh", "echo $(($1 - $2))\n");
    sandbox.put(
        "workspace/test.sh",
        "got=$(sh add.sh 2 3); [ \"$got\" = 5 ] || { echo got $got; exit 1; }\n",
    );
    sandbox.git(&["init", "--quiet"]);
    sandbox.git(&["add", "."]);
    sandbox.git(&["commit", "--quiet", "--message", "begin"]);
    let test = json!({"argv": ["sh", "test.sh"]});
    let server = ModelServer::start(&["other", "m"], move |number, request| {
        let seen = last_results(request);
        match number {
            0 => calls_all(&[
                ("run_command", test.clone()),
                ("search", json!({"pattern": "\\$1"})),
            ]),
            1 => {
                assert!(
                    seen[0].contains("exited with 1") && seen[0].contains("got -1"),
                    "{seen:?}"
                );
                assert!(seen[1].contains("add.sh"), "{seen:?}");
                calls_all(&[
                    ("read_file", json!({"path": "add.sh"})),
                    ("todo_add", json!({"title": "Add instead of subtracting"})),
                    ("todo_split", json!({"id": 2, "parts": ["edit", "test"]})),
                ])
            }
            2 => {
                assert!(
                    seen[0].ends_with("echo $(($1 - $2))\n") && seen[1] == "added as 2",
                    "{seen:?}"
                );
                let diff = "--- a/add.sh\n+++ b/add.sh\n@@ -1 +1 @@\n-echo $(($1 - $2))\n+echo $(($1 + $2))\n";
                calls_all(&[
                    ("apply_unified_diff", json!({"diff": diff})),
                    ("todo_complete", json!({"id": 3})),
                    ("todo_reorder", json!({"ids": [2, 3, 4, 0, 1]})),
                ])
            }
            3 => calls_all(&[
                ("run_command", test.clone()),
                ("todo_complete", json!({"id": 4})),
            ]),
            4 => {
                assert!(seen[0].contains("exited with 0"), "{seen:?}");
                assert!(prompt_text(request).contains("[x] 2: Add instead of subtracting"));
                let claim = json!({"index": 0, "is_met": true, "detail": "I read it"});
                calls(
                    "finish",
                    &json!({"summary": "It adds now.", "criteria": [claim]}),
                )
            }
            _ => panic!("the job has ended"),
        }
    });
    let result = sandbox.run_agent(&checked_job("sh test.sh"), &server.url());
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    let expected = [
        ("run_command", StepStatus::Failure),
        ("search", StepStatus::Success),
        ("read_file", StepStatus::Success),
        ("apply_unified_diff", StepStatus::Success),
        ("run_command", StepStatus::Success),
    ];
    assert_eq!(kinds(&result.steps), expected);
    assert!(
        (0..)
            .zip(&result.steps)
            .all(|(index, step)| step.index == index)
    );
    let criteria: Vec<_> = result
        .criteria
        .iter()
        .map(|criterion| (criterion.is_met, criterion.verified_by))
        .collect();
    assert_eq!(criteria, [(true, Verifier::Model), (true, Verifier::Job)]);
    let todo = result.todo.expect("a summary");
    assert_eq!((todo.total, todo.done), (5, 5));
    let usage = result.usage.expect("usage");
    assert_eq!((usage.model.as_str(), usage.requests), ("m", 5));
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (50, 5));
    let artifacts: Vec<&str> = result
        .artifacts
        .iter()
        .map(|artifact| artifact.path.as_str())
        .collect();
    assert_eq!(artifacts, ["changes.patch", "transcript.jsonl"]);
    let patch = sandbox.get("job/artifacts/changes.patch");
    assert!(
        patch.contains("-echo $(($1 - $2))\n+echo $(($1 + $2))\n"),
        "{patch}"
    );
    let transcript = sandbox.transcript();
    let of = |kind: &str| {
        transcript
            .iter()
            .filter(|entry| entry["type"] == kind)
            .count()
    };
    assert_eq!(
        (
            of("context"),
            of("answer"),
            of("result"),
            of("finish"),
            of("end")
        ),
        (1, 5, 10, 1, 1)
    );
    assert_eq!(transcript.last().expect("a line")["status"], "success");
    assert!(
        server
            .requests()
            .iter()
            .all(|request| request["model"] == "m" && request["stream"] == true)
    );
}

#[test]
fn a_last_message_without_a_tool_call_ends_the_job() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m:latest"], |_, _| says("There is nothing to do."));
    let result = sandbox.run_agent(&agent_job(), &server.url());
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    assert_eq!((result.steps.len(), result.criteria.len()), (0, 0));
    // Without a repository there is no patch, also none that the job left in its place.
    assert_eq!(result.artifacts.len(), 1);
}

#[test]
fn paths_outside_the_workspace_are_refused_and_the_model_hears_why() {
    let sandbox = Sandbox::new();
    std::os::unix::fs::symlink("/etc", sandbox.workspace("link")).expect("link");
    let server = ModelServer::start(&["m"], |number, request| {
        if number == 0 {
            calls_all(&[
                ("read_file", json!({"path": "/etc/passwd"})),
                ("write_file", json!({"path": "/etc/motd", "content": "x"})),
                ("list_tree", json!({"path": "/etc"})),
                ("search", json!({"pattern": "root", "path": "/etc"})),
                ("search", json!({"pattern": "root", "path": "link"})),
                ("search", json!({"pattern": "root", "path": "../job"})),
                ("read_file", json!({"path": "link/passwd"})),
                ("search", json!({"pattern": "root"})),
            ])
        } else {
            let seen = last_results(request);
            assert_eq!(seen.len(), 8);
            for result in &seen[..4] {
                assert!(result.contains("is not in the workspace"), "{result}");
            }
            assert!(seen[4].contains("leads out of the workspace"), "{seen:?}");
            assert!(seen[5].contains("is not in the workspace"), "{seen:?}");
            assert!(seen[6].contains("leads out of the workspace"), "{seen:?}");
            assert!(!prompt_text(request).contains("root:"), "{seen:?}");
            finishes()
        }
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    let failed = result
        .steps
        .iter()
        .filter(|step| step.status == StepStatus::Failure);
    assert_eq!((result.steps.len(), failed.count()), (8, 7));
    // One that knows nothing else makes no progress.
    let server = ModelServer::start(&["m"], |_, _| {
        calls("read_file", &json!({"path": "/etc/shadow"}))
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    failed_with(&result, &FailureCode::NoProgress);
    assert!(
        result
            .steps
            .iter()
            .all(|step| step.status == StepStatus::Failure)
    );
}

#[test]
fn broken_calls_run_nothing_and_are_explained_to_the_model() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |number, request| {
        if number > 0 {
            let seen = last_results(request);
            let reasons = [
                "not a JSON object",
                "not a JSON object",
                "argv",
                "unknown field",
                "no tool",
            ];
            assert_eq!(seen.len(), reasons.len());
            for (result, reason) in seen.iter().zip(reasons) {
                assert!(
                    result.starts_with("error: ") && result.contains(reason),
                    "{result}"
                );
            }
            let messages = request["messages"].as_array().expect("messages");
            let calls = messages[2]["tool_calls"].as_array().expect("calls");
            for call in calls {
                let arguments = call["function"]["arguments"].as_str().expect("a text");
                let arguments: Value = serde_json::from_str(arguments).expect("JSON");
                assert!(arguments.is_object(), "{call}");
            }
            assert_eq!(calls[4]["function"]["name"], "unknown");
            return finishes();
        }
        let call = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned());
        Reply::Answer {
            text: String::new(),
            calls: vec![
                call("run_command", "{\"argv\": [\"touch\", \"made\""),
                call("run_command", "[\"touch\", \"made\"]"),
                call("run_command", "{\"argv\": \"touch made\"}"),
                call(
                    "write_file",
                    "{\"path\": \"made\", \"content\": \"\", \"now\": true}",
                ),
                call("rm -rf /", "{}"),
            ],
            tokens: 10,
        }
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    assert!(result.steps.is_empty() && !sandbox.workspace("made").exists());
}

#[test]
fn a_command_that_is_too_slow_fails_and_the_job_goes_on() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |number, request| {
        if number == 0 {
            calls(
                "run_command",
                &json!({"argv": ["sleep", "1000"], "timeout_seconds": 1}),
            )
        } else {
            let seen = last_results(request);
            assert!(
                seen[0].contains("exceeded its timeout_seconds of 1"),
                "{seen:?}"
            );
            finishes()
        }
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    assert_eq!(result.steps[0].status, StepStatus::Timeout);
}

#[test]
fn the_jobs_checks_decide_and_the_models_word_does_not() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |number, request| {
        if number > 0 {
            let text = prompt_text(request);
            assert!(text.contains("You have not finished") && text.contains("made is missing"));
        }
        let claim = json!({"index": 1, "is_met": true, "detail": "believe me"});
        calls("finish", &json!({"summary": "done", "criteria": [claim]}))
    });
    let job = checked_job("[ -e made ] || { echo made is missing; exit 1; }");
    let result = sandbox.run_agent(&job, &server.url());
    let message = failed_with(&result, &FailureCode::NoProgress);
    assert!(
        message.contains("3 times") && message.ends_with("fail: 1"),
        "{message}"
    );
    let criteria: Vec<_> = result
        .criteria
        .iter()
        .map(|criterion| (criterion.is_met, criterion.verified_by))
        .collect();
    assert_eq!(criteria, [(false, Verifier::Model), (false, Verifier::Job)]);
    let detail = result.criteria[1].detail.as_deref().expect("a detail");
    assert!(detail.contains("made is missing"), "{detail}");
    assert_eq!(result.todo.expect("a summary").done, 0);

    let server = ModelServer::start(&["m"], |number, _| match number {
        0 | 2 => says("I think that I am done."),
        _ => calls("write_file", &json!({"path": "made", "content": ""})),
    });
    let result = sandbox.run_agent(&job, &server.url());
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    assert!(result.criteria[1].is_met);

    // A job that ends otherwise says how far it is, but has not succeeded.
    let server = ModelServer::start(&["m"], |_, _| calls("list_tree", &json!({})));
    let result = sandbox.run_agent(&job, &server.url());
    failed_with(&result, &FailureCode::NoProgress);
    assert!(result.criteria[1].is_met);
}

#[test]
// part of: CYNAI.SBAGNT.JobContext
fn every_prompt_has_the_whole_context_in_order_then_time_and_todo_list() {
    let sandbox = Sandbox::new();
    let text = "a line of text that is neither short nor long\n".repeat(300);
    sandbox.put("workspace/file", &text);
    let mut job = agent_job();
    job["constraints"]["max_output_bytes"] = json!(16 * 1024 * 1024);
    let long = format!("{}requirement-end", "requirement ".repeat(2_000));
    job["context"] = json!({
        "skills": [{"name": "skill-name", "content": "skill-content"}],
        "additional_context": "additional-context",
        "preferences": {"style.indent": "four spaces"},
        "acceptance_criteria": ["criterion-text"],
        "requirements": [long],
        "task_context": "task-context",
        "project_context": "project-context",
        "baseline_context": "baseline-context",
    });
    let server = ModelServer::start(&["m"], |number, _| match number {
        30 => finishes(),
        _ => calls(
            "read_file",
            &json!({"path": "file", "start_line": number + 1}),
        ),
    });
    let result = sandbox.run_agent(&job, &server.url());
    assert_eq!(
        result.status,
        ResultStatus::Success,
        "{:?}",
        result.failure_message
    );
    let requests = server.requests();
    assert_eq!(requests.len(), 31);
    for request in &requests {
        let text = prompt_text(request);
        let order = [
            "baseline-context",
            "project-context",
            "task-context",
            "requirement-end",
            "criterion-text",
            "four spaces",
            "additional-context",
            "skill-name",
            "skill-content",
        ];
        let places: Vec<_> = order.iter().map(|part| text.find(part)).collect();
        assert!(
            places.iter().all(Option::is_some) && places.is_sorted(),
            "{places:?}"
        );
        assert!(text.contains(&long));
        let last = request["messages"]
            .as_array()
            .and_then(|messages| messages.last());
        let last = last
            .and_then(|message| message["content"].as_str())
            .expect("a text");
        let time = last.find("Time left: ").expect("the time left");
        assert!(last[time..].contains("[ ] 1: criterion-text"), "{last}");
        assert!(text.len() < 110_000, "{}", text.len());
    }
    // Old output is cut, and the newest is whole.
    let results: Vec<usize> = requests[30]["messages"]
        .as_array()
        .expect("messages")
        .iter()
        .filter(|message| message["role"] == "tool")
        .map(|message| message["content"].as_str().expect("a text").len())
        .collect();
    assert!(results.len() > 10 && results[0] < 600, "{results:?}");
    assert!(*results.last().expect("a result") > 8_000, "{results:?}");
}

#[test]
fn an_agent_without_a_baseline_in_its_job_knows_what_it_is() {
    let sandbox = Sandbox::new();
    let server = ModelServer::start(&["m"], |_, request| {
        let system = &request["messages"][0];
        assert_eq!(system["role"], "system");
        assert!(
            system["content"]
                .as_str()
                .is_some_and(|text| text.contains("sandbox agent"))
        );
        finishes()
    });
    let result = sandbox.run_agent(&agent_job(), &server.url());
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
}

#[test]
fn commands_can_not_change_the_transcript_and_progress_is_visible() {
    let sandbox = Sandbox::new();
    let artifacts = sandbox.path("job/artifacts").display().to_string();
    let script = format!(
        "cd {artifacts} && mkdir changes.patch && ln -s /etc/passwd transcript.jsonl; \
         (while :; do echo forged >transcript.jsonl; done) >/dev/null 2>&1 & \
         while [ ! -e go ]; do sleep 0.01; done",
    );
    let server = ModelServer::start(&["m"], move |number, _| match number {
        0 => calls("run_command", &json!({"argv": [script], "shell": true})),
        _ => finishes(),
    });
    sandbox.put("job/job.json", agent_job().to_string());
    let child = sandbox
        .command(&[])
        .env("OLLAMA_BASE_URL", server.url())
        .spawn()
        .expect("started");
    let status = || -> Option<Value> {
        let text = std::fs::read(sandbox.path("job/status.json")).ok()?;
        serde_json::from_slice(&text).ok()
    };
    eventually("the command runs", || {
        status().is_some_and(|status| status["activity"] == "turn 1: run_command")
    });
    let status = status().expect("a status");
    assert_eq!(
        (&status["step"], &status["tokens"]),
        (&json!(0), &json!(11))
    );
    assert!(status.get("steps").is_none());
    eventually("the directory is spoiled", || {
        sandbox.path("job/artifacts/changes.patch").exists()
    });
    sandbox.put("job/artifacts/go", "");
    let (result, _) = sandbox.finish(child);
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    assert_eq!(sandbox.transcript().last().expect("a line")["type"], "end");
}

use cynode_api::sba::{Action, ResultStatus, StepStatus};
use serde_json::json;

use super::*;

/// A step that lists this path panics, to test the handling of panics.
const PANIC: &str = "a path that panics";

/// Called before each step.
pub(super) fn panic_on_request(action: &Action) {
    if let Action::ListTree(tree) = action
        && tree.path.as_deref() == Some(PANIC)
    {
        panic!("as the test asks");
    }
}

#[test]
fn options_are_given_once_and_paths_are_absolute() {
    let options = Options::parse(&[]).expect("valid");
    assert_eq!(options.mode, Mode::File);
    assert_eq!(options.job_directory, PathBuf::from("/job"));
    assert_eq!(options.workspace, PathBuf::from("/workspace"));
    let options = Options::parse(&["--workspace", "w/.", "--stdio", "--job-dir", "/j/"]);
    let options = options.expect("valid");
    assert_eq!(options.mode, Mode::Stdio);
    let here = std::env::current_dir().expect("a directory");
    assert_eq!(options.workspace.as_os_str(), here.join("w").as_os_str());
    assert_eq!(options.job_directory.as_os_str(), "/j");
    assert_eq!(options.proxy, None);
    let proxy = |arguments: &[&str]| Options::parse(arguments).expect("valid").proxy;
    assert_eq!(proxy(&["--supervised"]), Some(PROXY_SOCKET.into()));
    assert_eq!(proxy(&["--supervised", "--proxy", "/p"]), Some("/p".into()));
    for bad in [
        &["--stdio", "--supervised"][..],
        &["--stdio", "--stdio"],
        &["--job-dir"],
        &["--job-dir", "/a", "--job-dir", "/b"],
        &["--workspace", ""],
        &["job.json"],
        &["--unknown"],
    ] {
        assert_eq!(Options::parse(bad), None, "{bad:?}");
    }
}

#[tokio::test]
async fn a_panic_of_a_step_ends_in_a_complete_result() {
    let temp = tempfile::tempdir().expect("temp dir");
    for name in ["job", "workspace"] {
        std::fs::create_dir(temp.path().join(name)).expect("made");
    }
    let job = json!({
        "protocol_version": "1.0",
        "job_id": "01936f3e-7c4a-7b1e-9a55-0242ac120002",
        "task_id": "01936f3e-7c4a-7b1e-9a55-0242ac120003",
        "constraints": {"max_runtime_seconds": 60, "max_output_bytes": 1000},
        "steps": [
            {"type": "run_command", "args": {"argv": ["echo", "before"]}},
            {"type": "list_tree", "args": {"path": PANIC}},
            {"type": "run_command", "args": {"argv": ["echo", "after"]}},
        ],
    });
    let options = Options {
        mode: Mode::File,
        job_directory: temp.path().join("job"),
        workspace: temp.path().join("workspace"),
        proxy: None,
    };
    let directory = Rc::new(JobDirectory::open(&options.job_directory).expect("opened"));
    let input = Input::Json(serde_json::to_vec(&job).map_err(io::Error::other));
    let code = LocalSet::new()
        .run_until(async {
            let runner = Runner::start(&options, Some(Rc::clone(&directory))).expect("started");
            runner.run(input).await
        })
        .await;
    assert_eq!(code, EXIT_INTERNAL);
    let json = std::fs::read(temp.path().join("job/result.json")).expect("a result");
    let result = JobResult::parse(&json).expect("a valid result");
    assert_eq!(result.status, ResultStatus::Failure);
    assert_eq!(result.failure_code, Some(FailureCode::Internal));
    assert_eq!(result.steps.len(), 1);
    assert_eq!(result.steps[0].status, StepStatus::Success);
    assert_eq!(result.steps[0].stdout.as_deref(), Some("before\n"));
}

#[test]
fn the_largest_result_of_a_job_can_be_read_again() {
    use cynode_api::sba::limits::{MAX_OUTPUT_BYTES, MAX_RESULT_BYTES, MAX_STEPS};
    let steps: Vec<_> = (0..MAX_STEPS)
        .map(|index| {
            let id = format!("{index:0>127}\"");
            json!({"type": "run_command", "args": {"argv": ["true"]}, "id": id})
        })
        .collect();
    let job = json!({
        "protocol_version": "1.0",
        "job_id": "01936f3e-7c4a-7b1e-9a55-0242ac120002",
        "task_id": "01936f3e-7c4a-7b1e-9a55-0242ac120003",
        "constraints": {"max_runtime_seconds": 60, "max_output_bytes": MAX_OUTPUT_BYTES},
        "steps": steps,
    });
    let job = JobSpec::from_value(job).expect("a job");
    let budget = Budget::new(job.constraints.max_output_bytes);
    let each = usize::try_from(MAX_OUTPUT_BYTES).expect("positive") / MAX_STEPS;
    let room = budget.room();
    let list = json!(vec![json!(vec!["\u{1}".repeat(80); 2]); room.bytes / 1_000]);
    let mut results = Vec::new();
    for (index, step) in job.steps.iter().enumerate() {
        let mut result = steps::forgotten(index, step);
        assert_eq!(budget.take(each), each);
        let encoded = budget.encode([vec![b'\n'; each / 2], vec![0xff; each / 2]]);
        let [stdout, stderr] = encoded.texts;
        (result.stdout, result.stderr) = (Some(stdout), Some(stderr));
        result.encoding = encoded.encoding;
        result.error = (index == 0).then(|| "\u{1}".repeat(64 * 1024));
        results.push(result);
    }
    budget.take_structured(&list);
    results[0].output = Some(list);
    let report = JobReport {
        job_id: Some(job.job_id),
        ending: Ending::failure(FailureCode::StepFailed, "\u{1}".repeat(1 << 20)),
        steps: results,
        artifacts: Vec::new(),
        todo: Some(TodoList::of(&job).summary()),
        criteria: Vec::new(),
        usage: None,
    };
    let json = result::to_json(&report.into_result());
    assert!(json.len() <= MAX_RESULT_BYTES, "{}", json.len());
    let read = JobResult::parse(&json).expect("a valid result");
    assert_eq!(read.steps.len(), MAX_STEPS);
}

#[test]
fn the_largest_result_of_an_agents_job_can_be_read_again() {
    use cynode_api::sba::{
        CriterionResult, ResultArtifact, Step, Verifier,
        limits::{MAX_ARTIFACTS, MAX_CONTEXT_ITEMS, MAX_OUTPUT_BYTES, MAX_RESULT_BYTES},
    };
    let step = Step::parse(br#"{"type": "apply_unified_diff", "args": {"diff": "x"}}"#);
    let step = step.expect("a step");
    let budget = Budget::new(MAX_OUTPUT_BYTES.unsigned_abs());
    let each = usize::try_from(MAX_OUTPUT_BYTES).expect("positive") / agent::MAX_AGENT_STEPS;
    let criteria = (0..MAX_CONTEXT_ITEMS as u64).map(|index| CriterionResult {
        index,
        is_met: false,
        verified_by: Verifier::Job,
        detail: Some(result::bounded_to(&"\u{1}".repeat(9_999), 512)),
    });
    let room = budget.room();
    let list = json!(vec![json!(vec!["\u{1}".repeat(80); 2]); room.bytes / 1_000]);
    let steps = (0..agent::MAX_AGENT_STEPS).map(|index| {
        let mut result = steps::forgotten(index, &step);
        assert_eq!(budget.take(each), each);
        let [stdout, stderr] = budget
            .encode([vec![b'\n'; each / 2], vec![0xff; each / 2]])
            .texts;
        (result.stdout, result.stderr) = (Some(stdout), Some(stderr));
        result.error = Some(result::bounded_to(&"\u{1}".repeat(9_999), 300));
        result.output = Some(if index == 0 {
            list.clone()
        } else {
            json!({"sha256": "0".repeat(64), "size": 5})
        });
        result
    });
    let report = JobReport {
        job_id: None,
        ending: Ending::failure(FailureCode::NoProgress, "\u{1}".repeat(1 << 20)),
        steps: steps.collect(),
        artifacts: Vec::new(),
        todo: None,
        criteria: criteria.collect(),
        usage: None,
    };
    let mut result = report.into_result();
    let artifacts = (0..MAX_ARTIFACTS).map(|_| ResultArtifact {
        path: "x".repeat(1_024),
        size: Some(u64::from(u32::MAX)),
        sha256: Some("0".repeat(64)),
    });
    result.artifacts = artifacts.collect();
    let json = result::to_json(&result);
    assert!(json.len() <= MAX_RESULT_BYTES, "{}", json.len());
    assert!(JobResult::parse(&json).is_ok());
}

#[test]
fn results_of_finished_steps_are_checked_like_a_result() {
    let step = r#"{"index":0,"type":"run_command","status":"success","exit_code":0}"#;
    let steps = finished_steps(format!("[{step},{step}]").as_bytes()).expect("valid");
    assert_eq!(steps.len(), 2);
    assert!(finished_steps(b"[]").is_some_and(|steps| steps.is_empty()));
    for bad in ["", "{}", "[1]", r#"[{"index":0}]"#, "[]]", "null"] {
        assert!(finished_steps(bad.as_bytes()).is_none(), "{bad}");
    }
}

use cynode_api::{
    ByteCounts, ErrorCode, ExecExit, ExecId, ExecResult, ExecVia, JobId, Problem, TaskId,
    Truncated, sba::JobSpec,
};
use cynode_service::ApiError;

use super::{
    super::outcome::{JobOutcome, NODE_STOPPED, OOM_KILLED, RUNNER_INTERRUPTED},
    *,
};

fn run() -> JobRun {
    JobRun::command(TaskId::generate(), JobId::generate(), "default", ["true"])
}

fn result(change: impl FnOnce(&mut ExecExit)) -> ExecResult {
    let mut exit = ExecExit {
        exit_code: Some(0),
        signal: None,
        timed_out: false,
        oom_killed: false,
        no_space: false,
        bytes: ByteCounts::default(),
        sha256: None,
        duration_ms: 1,
        via: ExecVia::Agent,
        lost: false,
    };
    change(&mut exit);
    let (stdout, stderr, encoding) = ("out".to_owned(), "err".to_owned(), "utf-8".to_owned());
    ExecResult {
        exec_id: ExecId::generate(),
        exit,
        stdout,
        stderr,
        encoding,
        truncated: Truncated::default(),
    }
}

fn concluded(stop: Option<StopRequester>, outcome: JobOutcome) -> Job {
    let request = run();
    let mut record = JobRecord::new(
        request.clone(),
        fingerprint(&request),
        NodeId::generate(),
        None,
    );
    record.stop = stop;
    record.set_outcome(outcome);
    assert!(record.is_final() && record.request.is_none());
    record.job
}

#[test]
fn each_end_of_a_command_is_one_state_of_its_job() {
    let code = |job: &Job| job.error.as_ref().map(|error| error.code.clone());
    for (outcome, state, error) in [
        (
            JobOutcome::from_exec(Ok(result(|_| {}))),
            JobState::Completed,
            None,
        ),
        (
            JobOutcome::from_exec(Ok(result(|exit| exit.exit_code = Some(3)))),
            JobState::Failed,
            None,
        ),
        (
            JobOutcome::from_exec(Ok(result(|exit| {
                (exit.exit_code, exit.signal) = (None, Some("SEGV".to_owned()));
            }))),
            JobState::Failed,
            None,
        ),
        (
            JobOutcome::from_exec(Ok(result(|exit| exit.timed_out = true))),
            JobState::Timeout,
            None,
        ),
        (
            JobOutcome::from_exec(Ok(result(|exit| {
                (exit.exit_code, exit.oom_killed) = (Some(137), true);
            }))),
            JobState::Failed,
            Some(OOM_KILLED),
        ),
        (
            JobOutcome::from_exec(Ok(result(|exit| {
                (exit.exit_code, exit.lost) = (None, true);
            }))),
            JobState::Failed,
            Some(RUNNER_INTERRUPTED),
        ),
        (
            JobOutcome::failed(&ApiError::new(ErrorCode::ImageNotFound, "none")),
            JobState::Failed,
            Some("image_not_found"),
        ),
        (JobOutcome::canceled(), JobState::Canceled, None),
    ] {
        let job = concluded(None, outcome.clone());
        assert_eq!(
            (job.state, code(&job).as_deref()),
            (state, error),
            "{outcome:?}"
        );
        assert_eq!(
            concluded(Some(StopRequester::Caller), outcome.clone()).state,
            JobState::Canceled
        );
        let stopped = concluded(Some(StopRequester::Node), outcome);
        assert_eq!(
            (stopped.state, code(&stopped).as_deref()),
            (JobState::Canceled, Some(NODE_STOPPED))
        );
    }
}

#[test]
fn a_failed_start_reports_its_errno() {
    let error: ApiError = Problem::new(ErrorCode::ExecFailed, "no such command")
        .with("errno", "ENOENT")
        .into();
    let job = concluded(None, JobOutcome::failed(&error));
    let error = job.error.expect("an error");
    assert_eq!(
        (error.code.as_str(), error.detail.as_str()),
        ("exec_failed", "ENOENT: no such command")
    );
}

#[test]
fn an_acknowledged_job_is_retained_for_a_day_without_its_output() {
    let request = run();
    let mut record = JobRecord::new(
        request.clone(),
        fingerprint(&request),
        NodeId::generate(),
        None,
    );
    record.set_outcome(JobOutcome::from_exec(Ok(result(|_| {}))));
    let now = OffsetDateTime::now_utc();
    assert!(
        !record.is_expired(now + time::Duration::days(1_000)),
        "a job without an acknowledgement was forgotten"
    );
    record.acknowledge();
    assert!(
        record.job.output.stdout.is_empty()
            && record.job.output.stderr.is_empty()
            && record.job.acknowledged
    );
    assert!(
        !record.is_expired(now + time::Duration::hours(23))
            && record.is_expired(now + time::Duration::hours(25))
    );
}

#[test]
fn the_fingerprint_covers_every_member_but_the_version() {
    let first = run();
    assert_eq!(
        fingerprint(&first),
        fingerprint(&JobRun {
            version: None,
            ..first.clone()
        })
    );
    let mut other = first.clone();
    other.sandbox.command.push("x".to_owned());
    assert_ne!(fingerprint(&first), fingerprint(&other));
    assert_ne!(
        fingerprint(&first),
        fingerprint(&JobRun {
            task_id: TaskId::generate(),
            ..first.clone()
        })
    );
    let job = |steps: &str| {
        let json = format!(
            r#"{{"protocol_version": "1.0", "job_id": "{}", "task_id": "{}",
                "constraints": {{"max_runtime_seconds": 1, "max_output_bytes": 1}},
                "steps": [{steps}]}}"#,
            first.job_id, first.task_id
        );
        Some(Box::new(JobSpec::parse(json.as_bytes()).expect("valid")))
    };
    let with_job = |job| {
        fingerprint(&JobRun {
            job,
            ..first.clone()
        })
    };
    let steps = [
        r#"{"type": "list_tree", "args": {}}"#,
        r#"{"args": {}, "type": "list_tree"}"#,
        r#"{"type": "list_tree", "args": {"path": "a"}}"#,
    ];
    let [one, same, other] = steps.map(|steps| with_job(job(steps)));
    assert_eq!(one, same);
    assert!(one != other && one != fingerprint(&first));
}

//! Job specifications of `cynode-sba`.

use cynode_api::{JobId, JobRun, TaskId, sba::JobSpec};
use serde_json::{Value, json};

/// A specification with these steps and ids of its own.
#[must_use]
pub fn specification(steps: &[Value]) -> Value {
    json!({
        "protocol_version": "1.0",
        "job_id": JobId::generate(),
        "task_id": TaskId::generate(),
        "constraints": {"max_runtime_seconds": 120, "max_output_bytes": 1 << 20},
        "steps": steps,
    })
}

#[must_use]
pub fn step(kind: &str, args: &Value) -> Value {
    json!({"type": kind, "args": args})
}

/// A step that runs a shell script.
#[must_use]
pub fn run_step(script: &str) -> Value {
    step("run_command", &json!({"argv": [script], "shell": true}))
}

/// A step, or another object, with one more member.
#[must_use]
pub fn with(mut object: Value, name: &str, value: impl Into<Value>) -> Value {
    object[name] = value.into();
    object
}

/// A request that runs a specification on the busybox image with small limits.
///
/// # Panics
/// If the specification is not valid.
#[must_use]
pub fn sba_job(specification: &Value) -> JobRun {
    let spec = JobSpec::from_value(specification.clone()).expect("a valid specification");
    let mut request = crate::job("");
    request.sandbox.command.clear();
    request.sandbox.timeout_seconds = None;
    JobRun {
        job_id: spec.job_id,
        task_id: spec.task_id,
        job: Some(Box::new(spec)),
        ..request
    }
}

//! The file of `job run`: a specification of `cynode-sba`, or a request for a job.

use cynode_api::{
    JobCreate, JobId, TaskId,
    sba::{JobIds, JobSpec, Violation, Violations},
};
use serde_json::{Map, Value, json};

use crate::failure::Failure;

/// Members that only a specification has.
const OF_SPECIFICATIONS: [&str; 3] = ["protocol_version", "constraints", "steps"];

/// A job as its file describes it.
#[derive(Debug)]
pub struct JobFile {
    pub request: JobCreate,
    pub job_id: JobId,
    /// The task that the file does not name, and that has to be created under this id.
    pub new_task: Option<TaskId>,
}

/// Reads a file. `task` is the task to use, if the user names one.
pub fn parse(text: &[u8], name: &str, task: Option<TaskId>) -> Result<JobFile, Failure> {
    let file = if is_specification(text) {
        specification(text, name, task)?
    } else {
        request(text, name, task)?
    };
    let named = file.request.task_id;
    if let (Some(task), Some(named)) = (task, named)
        && task != named
    {
        return Err(Failure::usage(format!(
            "--task: {name} is for the task {named}"
        )));
    }
    Ok(file)
}

fn is_specification(text: &[u8]) -> bool {
    serde_json::from_slice::<Map<String, Value>>(text).is_ok_and(|members| {
        OF_SPECIFICATIONS
            .iter()
            .any(|name| members.contains_key(*name))
    })
}

fn specification(text: &[u8], name: &str, task: Option<TaskId>) -> Result<JobFile, Failure> {
    let absent = JobIds {
        job_id: JobId::generate(),
        task_id: task.unwrap_or_else(TaskId::generate),
    };
    let spec = JobSpec::parse_with_ids(text, absent)
        .map_err(|violations| invalid(name, &violations, ""))?;
    let is_new = task.is_none() && spec.task_id == absent.task_id;
    Ok(JobFile {
        job_id: spec.job_id,
        new_task: is_new.then_some(spec.task_id),
        request: JobCreate {
            task_id: Some(spec.task_id),
            job_id: Some(spec.job_id),
            job: Some(Box::new(spec)),
            ..JobCreate::default()
        },
    })
}

fn request(text: &[u8], name: &str, task: Option<TaskId>) -> Result<JobFile, Failure> {
    let mut request: JobCreate = serde_json::from_slice(text).map_err(|error| {
        match JobSpec::violations_in(text, "job") {
            Some(violations) => invalid(name, &violations, "job."),
            None => Failure::usage(format!("{name}: {error}"))
                .remedy("See POST /v1/jobs in /openapi.json."),
        }
    })?;
    let spec = request.job.as_deref();
    request.task_id = request.task_id.or(spec.map(|spec| spec.task_id)).or(task);
    let given = request.job_id.or(spec.map(|spec| spec.job_id));
    let job_id = given.unwrap_or_else(JobId::generate);
    request.job_id = Some(job_id);
    Ok(JobFile {
        request,
        job_id,
        new_task: None,
    })
}

fn invalid(name: &str, violations: &Violations, prefix: &str) -> Failure {
    let place = |violation: &Violation| match violation.path.as_str() {
        "$" => prefix.trim_end_matches('.').to_owned(),
        path => format!("{prefix}{path}"),
    };
    let listed: Vec<Value> = violations
        .errors
        .iter()
        .map(|violation| {
            json!({
                "path": place(violation), "code": violation.code, "message": violation.message,
            })
        })
        .collect();
    let count = violations.errors.len() + violations.omitted;
    let errors = if count == 1 { "error" } else { "errors" };
    Failure::usage(format!("{name}: the job is not valid: {count} {errors}"))
        .remedy("Correct the fields named above; 'cynode-sba schema' describes all of them.")
        .with_extension("violations", Value::Array(listed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB_ID: &str = "01890000-0000-7000-8000-000000000001";
    const TASK_ID: &str = "01890000-0000-7000-8000-000000000002";

    fn spec() -> Value {
        json!({
            "protocol_version": "1.0",
            "constraints": {"max_runtime_seconds": 60, "max_output_bytes": 1_000},
            "steps": [{"type": "run_command", "args": {"argv": ["true"]}}],
        })
    }

    fn parsed(value: &Value, task: Option<TaskId>) -> Result<JobFile, Failure> {
        parse(value.to_string().as_bytes(), "file", task)
    }

    #[test]
    fn ids_that_a_specification_lacks_are_made_up_and_others_are_kept() {
        let file = parsed(&spec(), None).expect("valid");
        let job = file.request.job.as_deref().expect("a specification");
        assert_eq!(
            (Some(job.job_id), Some(job.task_id)),
            (file.request.job_id, file.request.task_id)
        );
        assert_eq!(file.new_task, Some(job.task_id));

        let task: TaskId = TASK_ID.parse().expect("an id");
        let file = parsed(&spec(), Some(task)).expect("valid");
        assert_eq!((file.request.task_id, file.new_task), (Some(task), None));

        let mut named = spec();
        named["job_id"] = json!(JOB_ID);
        named["task_id"] = json!(TASK_ID);
        let file = parsed(&named, None).expect("valid");
        assert_eq!(file.job_id.to_string(), JOB_ID);
        assert_eq!((file.request.task_id, file.new_task), (Some(task), None));
        let other = parsed(&named, Some(TaskId::generate())).expect_err("another task");
        assert!(other.message().starts_with("--task: "), "{other:?}");
    }

    #[test]
    fn an_invalid_specification_is_listed_with_its_paths() {
        let mut broken = spec();
        broken["steps"][0]["args"] = json!({"cmd": "x"});
        for (value, path) in [
            (broken.clone(), "steps[0].args.argv"),
            (json!({ "job": broken }), "job.steps[0].args.argv"),
        ] {
            let failure = parsed(&value, None).expect_err("invalid");
            assert!(failure.message().contains("not valid"), "{failure:?}");
            assert!(
                failure
                    .violations()
                    .any(|(found, message)| found == path && !message.is_empty()),
                "{failure:?}"
            );
        }
        assert!(parse(b"{", "file", None).is_err());
    }

    #[test]
    fn a_request_is_read_as_before() {
        let file = parsed(&json!({"command": ["true"], "image_ref": "x"}), None).expect("valid");
        assert_eq!(file.request.command, ["true"]);
        assert_eq!((file.request.task_id, file.new_task), (None, None));
        assert_eq!(file.request.job_id, Some(file.job_id));
        let failure = parsed(&json!({"comand": ["true"]}), None).expect_err("a typing error");
        assert!(failure.message().contains("comand"), "{failure:?}");
    }
}

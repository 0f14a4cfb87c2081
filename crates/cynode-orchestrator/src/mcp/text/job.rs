//! What an SBA job did, in a few lines: its steps, why it failed, and what it left.

use serde_json::Value;

use super::add;
use crate::mcp::plain;

/// Steps that did not succeed, and artifacts, that a text names.
const SHOWN_STEPS: usize = 10;
const SHOWN_ARTIFACTS: usize = 20;
/// Characters of a message, and of a name.
const MESSAGE_CHARACTERS: usize = 1_000;
const NAME_CHARACTERS: usize = 120;

/// Lines for below the end of a job. Empty for a job without any of that.
pub(super) fn describe(job: &Value) -> String {
    let mut shown = String::new();
    if let Some(progress) = job.get("progress").filter(|progress| progress.is_object()) {
        add(&mut shown, running(progress));
    }
    if let Some(result) = job.get("sba_result").filter(|result| result.is_object()) {
        // The error of the job says it already, unless another runner reported nothing else.
        if job.get("error").is_none_or(Value::is_null)
            && let Some(code) = result["failure_code"].as_str()
        {
            let message = cut(&result["failure_message"], MESSAGE_CHARACTERS, plain::line);
            add(&mut shown, format!("\nfailure: {}: {message}", name(code)));
        }
        add(&mut shown, steps(result));
        if let Some(todo) = result.get("todo").filter(|todo| todo.is_object()) {
            add(
                &mut shown,
                format!("\ntodo: {} of {} done", todo["done"], todo["total"]),
            );
        }
    }
    add(&mut shown, artifacts(job));
    plain::text(&shown)
}

fn running(progress: &Value) -> String {
    let mut shown = String::from("\nprogress:");
    if let Some(step) = progress["step"].as_u64() {
        let of = progress["steps"].as_u64();
        let of = of.map(|steps| format!(" of {steps}")).unwrap_or_default();
        add(&mut shown, format!(" step {}{of},", step.saturating_add(1)));
    }
    if let Some(activity) = progress["activity"].as_str() {
        add(&mut shown, format!(" {},", name(activity)));
    }
    add(
        &mut shown,
        format!(
            " {} s left",
            progress["remaining_seconds"].as_u64().unwrap_or_default()
        ),
    );
    shown
}

fn steps(result: &Value) -> String {
    let none = Vec::new();
    let steps = result["steps"].as_array().unwrap_or(&none);
    let omitted = result["steps_omitted"].as_u64().unwrap_or_default();
    let failed: Vec<&Value> = steps
        .iter()
        .filter(|step| step["status"] != "success")
        .collect();
    let total = steps.len() as u64 + omitted;
    let mut shown = match failed.len() {
        0 => format!("\nsteps: {total}, all successful"),
        count => format!("\nsteps: {total}, {count} not successful"),
    };
    for step in failed.iter().take(SHOWN_STEPS) {
        let text = |member: &str| step[member].as_str().map(name);
        let id = step["id"].as_str().map(|id| format!(" {:?}", short(id)));
        let id = id.unwrap_or_default();
        let exit = step["exit_code"].as_i64();
        let exit = exit
            .map(|code| format!(", exit code {code}"))
            .unwrap_or_default();
        let error = match &step["error"] {
            Value::Null => String::new(),
            error => format!(": {}", cut(error, MESSAGE_CHARACTERS, plain::line)),
        };
        add(
            &mut shown,
            format!(
                "\n  [{}]{id} {}: {}{exit}{error}",
                step["index"],
                text("type").unwrap_or_default(),
                text("status").unwrap_or_default()
            ),
        );
    }
    if failed.len() > SHOWN_STEPS {
        add(
            &mut shown,
            format!("\n  and {} more", failed.len() - SHOWN_STEPS),
        );
    }
    shown
}

fn artifacts(job: &Value) -> String {
    let Some(artifacts) = job["artifacts"].as_array().filter(|list| !list.is_empty()) else {
        return String::new();
    };
    let mut shown = format!("\nartifacts: {}", artifacts.len());
    for artifact in artifacts.iter().take(SHOWN_ARTIFACTS) {
        let path = cut(&artifact["path"], MESSAGE_CHARACTERS, plain::name);
        let line = match artifact["dropped"].as_str() {
            Some(reason) => format!("\n  {path}: not kept: {reason}"),
            None => format!(
                "\n  {path} ({} bytes, id {})",
                artifact["size"],
                artifact["artifact_id"].as_str().unwrap_or_default()
            ),
        };
        add(&mut shown, line);
    }
    if artifacts.len() > SHOWN_ARTIFACTS {
        let left = artifacts.len() - SHOWN_ARTIFACTS;
        add(&mut shown, format!("\n  and {left} more"));
    }
    shown
}

fn name(text: &str) -> String {
    plain::name(&short(text))
}

fn short(text: &str) -> String {
    text.chars().take(NAME_CHARACTERS).collect()
}

/// Truncates a text, and lets `show` keep it on one line.
fn cut(value: &Value, characters: usize, show: fn(&str) -> String) -> String {
    let text = value.as_str().unwrap_or_default();
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}…", show(&text[..end])),
        None => show(text),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_failed_job_is_told_by_the_steps_that_failed_and_its_artifacts() {
        let job = json!({
            "error": {"code": "step_failed", "detail": "x"},
            "sba_result": {
                "failure_code": "step_failed", "failure_message": "x",
                "steps": [
                    {"index": 0, "id": null, "type": "write_file", "status": "success"},
                    {"index": 1, "id": "test", "type": "run_command", "status": "failure",
                     "exit_code": 2, "error": "no \u{1b}[31mtests\u{1b}[0m"},
                ],
                "todo": {"total": 3, "done": 1, "open": []},
            },
            "artifacts": [
                {"artifact_id": "a", "path": "jobs/j/log", "size": 7},
                {"path": "jobs/j/huge", "dropped": "quota"},
            ],
        });
        assert_eq!(
            describe(&job),
            "\nsteps: 2, 1 not successful\n  [1] \"test\" run_command: failure, exit code 2: no \
             tests\ntodo: 1 of 3 done\nartifacts: 2\n  jobs/j/log (7 bytes, id a)\n  jobs/j/huge: \
             not kept: quota"
        );
    }

    #[test]
    fn a_running_job_is_told_by_its_progress_and_a_plain_one_not_at_all() {
        let job = json!({
            "progress": {"step": 2, "steps": 5, "activity": "run_command", "remaining_seconds": 9},
        });
        assert_eq!(
            describe(&job),
            "\nprogress: step 3 of 5, run_command, 9 s left"
        );
        assert_eq!(describe(&json!({"artifacts": [], "exit_code": 0})), "");
        let other = json!({"sba_result": {"failure_code": "odd", "failure_message": "why"}});
        assert_eq!(
            describe(&other),
            "\nfailure: odd: why\nsteps: 0, all successful"
        );
    }

    #[test]
    fn hostile_results_are_bounded() {
        let step = json!({"index": "x".repeat(10), "id": "i".repeat(9_000), "type": 1,
                          "status": "failure", "error": "e".repeat(9_000)});
        let job = json!({
            "sba_result": {"steps": vec![step; 500], "todo": {}},
            "artifacts": vec![json!({"path": "p".repeat(5_000)}); 500],
        });
        assert!(describe(&job).len() < 40_000);
        for odd in [
            json!(null),
            json!({"sba_result": [], "artifacts": {}}),
            json!({"progress": {}}),
        ] {
            describe(&odd);
        }
    }
}

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
        add(&mut shown, criteria(result));
        add(&mut shown, todo(&result["todo"]));
        add(&mut shown, usage(result));
    }
    add(&mut shown, artifacts(job));
    plain::text(&shown)
}

fn todo(todo: &Value) -> String {
    if !todo.is_object() {
        return String::new();
    }
    format!("\ntodo: {} of {} done", todo["done"], todo["total"])
}

/// The acceptance criteria: how many are met, and which of them a command of the job did not find
/// so.
fn criteria(result: &Value) -> String {
    let Some(criteria) = result["criteria"]
        .as_array()
        .filter(|list| !list.is_empty())
    else {
        return String::new();
    };
    let is_met = |criterion: &&Value| criterion["is_met"] == true;
    let is_checked = |criterion: &&Value| criterion["verified_by"] == "job";
    let mut shown = format!(
        "\ncriteria: {} of {} met, {} of them checked by the job's commands",
        criteria.iter().filter(is_met).count(),
        criteria.len(),
        criteria.iter().filter(is_met).filter(is_checked).count(),
    );
    let unmet = criteria.iter().filter(|criterion| !is_met(criterion));
    for criterion in unmet.take(SHOWN_STEPS) {
        let detail = cut(&criterion["detail"], MESSAGE_CHARACTERS, plain::line);
        add(
            &mut shown,
            format!("\n  [{}] not met: {detail}", criterion["index"]),
        );
    }
    shown
}

fn usage(result: &Value) -> String {
    let usage = &result["usage"];
    let tokens = |name: &str| usage[name].as_u64();
    match (tokens("prompt_tokens"), tokens("completion_tokens")) {
        (Some(prompt), Some(completion)) => format!(
            "\ntokens: {} ({})",
            prompt.saturating_add(completion),
            name(usage["model"].as_str().unwrap_or_default())
        ),
        _ => String::new(),
    }
}

fn running(progress: &Value) -> String {
    let mut shown = String::from("\nprogress:");
    // An agent has turns, which the activity names.
    let has_steps = progress["steps"].is_u64() || progress["activity"].is_null();
    if let Some(step) = progress["step"].as_u64().filter(|_| has_steps) {
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
    if let Some(tokens @ 1..) = progress["tokens"].as_u64() {
        add(&mut shown, format!(", {tokens} tokens"));
    }
    add(&mut shown, todo(&progress["todo"]));
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
    fn an_agents_job_is_told_by_its_turn_and_its_criteria() {
        let job = json!({
            "progress": {
                "step": 4, "activity": "turn 3: thinking", "remaining_seconds": 9, "tokens": 1_200,
                "todo": {"total": 3, "done": 1, "open": ["edit"]},
            },
        });
        assert_eq!(
            describe(&job),
            "\nprogress: turn 3: thinking, 9 s left, 1200 tokens\ntodo: 1 of 3 done"
        );
        let job = json!({
            "error": {"code": "no_progress", "detail": "x"},
            "sba_result": {
                "failure_code": "no_progress", "steps": [],
                "criteria": [
                    {"index": 0, "is_met": true, "verified_by": "job"},
                    {"index": 1, "is_met": false, "verified_by": "job", "detail": "exit 1"},
                    {"index": 2, "is_met": true, "verified_by": "model"},
                ],
                "usage": {"model": "m", "prompt_tokens": 7, "completion_tokens": 3},
            },
        });
        assert_eq!(
            describe(&job),
            "\nsteps: 0, all successful\ncriteria: 2 of 3 met, 1 of them checked by the job's \
             commands\n  [1] not met: exit 1\ntokens: 10 (m)"
        );
    }

    #[test]
    fn hostile_results_are_bounded() {
        let step = json!({"index": "x".repeat(10), "id": "i".repeat(9_000), "type": 1,
                          "status": "failure", "error": "e".repeat(9_000)});
        let criterion = json!({"index": [1], "is_met": "x", "detail": "d".repeat(9_000)});
        let job = json!({
            "sba_result": {
                "steps": vec![step; 500], "todo": {}, "criteria": vec![criterion; 500],
            },
            "artifacts": vec![json!({"path": "p".repeat(5_000)}); 500],
        });
        assert!(describe(&job).len() < 60_000);
        for odd in [
            json!(null),
            json!({"sba_result": [], "artifacts": {}}),
            json!({"progress": {}}),
        ] {
            describe(&odd);
        }
    }
}

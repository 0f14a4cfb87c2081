//! A picture of an SBA job: a line for each step, why it failed, and what it left.
//!
//! A result comes from inside a sandbox: nothing of it is taken for granted, and what is printed is
//! bounded and escaped.

use cynode_api::{Job, JobProgress};
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::output;

/// Of more steps only the first and the last are printed, and those that did not succeed.
const MAX_LINES: usize = 40;
const ENDS: usize = 10;
/// Artifacts that are printed.
const SHOWN_ARTIFACTS: usize = 20;
/// Acceptance criteria that are printed.
const SHOWN_CRITERIA: usize = 20;
/// Open items that are printed.
const SHOWN_ITEMS: usize = 10;
/// Characters of a message and of a name.
const MESSAGE_CHARACTERS: usize = 500;
const NAME_CHARACTERS: usize = 60;

pub const HEADER: [&str; 8] = [
    "STEP", "ID", "TYPE", "STATUS", "TIME", "EXIT", "FILES", "OUTPUT",
];
pub type Row = [String; 8];

/// A row for each step.
pub fn rows(job: &Job) -> Vec<Row> {
    let steps = job
        .sba_result
        .as_ref()
        .and_then(|result| result["steps"].as_array());
    let steps: &[Value] = steps.map_or(&[], Vec::as_slice);
    if steps.len() <= MAX_LINES {
        return steps.iter().map(row).collect();
    }
    let mut rows = Vec::new();
    let mut hidden = 0;
    for (position, step) in steps.iter().enumerate() {
        let is_end = position < ENDS || position + ENDS >= steps.len();
        let is_shown = is_end || (step["status"] != "success" && rows.len() < 2 * MAX_LINES);
        if !is_shown {
            hidden += 1;
            continue;
        }
        gap(&mut rows, &mut hidden);
        rows.push(row(step));
    }
    rows
}

/// Stands for steps that are not printed.
fn gap(rows: &mut Vec<Row>, hidden: &mut usize) {
    if *hidden > 0 {
        let mut row = Row::default();
        "…".clone_into(&mut row[0]);
        row[3] = format!("{hidden} more");
        rows.push(row);
        *hidden = 0;
    }
}

fn row(step: &Value) -> Row {
    let text = |name: &str| name_of(&step[name]);
    let index = step["index"].as_u64();
    [
        index.map_or_else(
            || "?".to_owned(),
            |index| index.saturating_add(1).to_string(),
        ),
        text("id"),
        text("type"),
        text("status"),
        duration(step).unwrap_or_default(),
        step["exit_code"]
            .as_i64()
            .map(|code| code.to_string())
            .unwrap_or_default(),
        changed(step)
            .map(|files| files.to_string())
            .unwrap_or_default(),
        returned(step),
    ]
}

/// How long a step took.
fn duration(step: &Value) -> Option<String> {
    let at = |name: &str| OffsetDateTime::parse(step[name].as_str()?, &Rfc3339).ok();
    let took = at("ended_at")? - at("started_at")?;
    let ms = took.whole_milliseconds().clamp(0, i128::from(u32::MAX));
    Some(milliseconds(u64::try_from(ms).unwrap_or_default()))
}

fn milliseconds(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{}.{}s", ms / 1_000, ms % 1_000 / 100),
        _ => output::span(i64::try_from(ms / 1_000).unwrap_or(i64::MAX)),
    }
}

/// The number of files that a step changed, if its type says so.
fn changed(step: &Value) -> Option<usize> {
    match step["type"].as_str()? {
        "write_file" => Some(usize::from(step["status"] == "success")),
        "apply_unified_diff" => Some(step["output"]["files"].as_array().map_or(0, Vec::len)),
        _ => None,
    }
}

/// The size of what a step returned.
fn returned(step: &Value) -> String {
    let is_base64 = step["encoding"] == "base64";
    let stream = |name: &str| {
        let length = step[name].as_str().map_or(0, str::len);
        if is_base64 { length / 4 * 3 } else { length }
    };
    let other = match &step["output"] {
        _ if changed(step).is_some() => 0,
        Value::Null => 0,
        value => value.to_string().len(),
    };
    let bytes = stream("stdout") + stream("stderr") + other;
    let cut = if step["truncated"] == true {
        ", cut"
    } else {
        ""
    };
    if bytes == 0 && cut.is_empty() {
        return String::new();
    }
    format!("{}{cut}", output::size(bytes as u64))
}

/// What is printed above the steps: names and values.
pub fn fields(job: &Job) -> Vec<(&'static str, String)> {
    let mut fields = Vec::new();
    if let Some(progress) = &job.progress {
        now(progress, &mut fields);
    }
    if let Some(result) = &job.sba_result {
        // Runners in other images may fail without an error of the job.
        if job.error.is_none()
            && let Some(code) = result["failure_code"].as_str()
        {
            let message = cut(result["failure_message"].as_str().unwrap_or_default());
            fields.push(("failure", format!("{}: {message}", cut(code))));
        }
        criteria(result, &mut fields);
        todo(&result["todo"], &mut fields);
        usage(result, &mut fields);
    }
    artifacts(job, &mut fields);
    fields
}

/// What a running job does.
fn now(progress: &JobProgress, fields: &mut Vec<(&'static str, String)>) {
    let activity = progress.activity.as_deref().map(cut);
    match (progress.steps, activity) {
        // An agent has turns, which the activity names.
        (None, Some(activity)) => fields.push(("now", activity)),
        (steps, activity) => {
            let step = progress.step.map(|step| step.saturating_add(1).to_string());
            let steps = steps.map(|steps| format!(" of {steps}"));
            let activity = activity.map(|name| format!(", {name}"));
            let parts = [step, steps, activity].into_iter().flatten();
            fields.push(("step", parts.collect()));
        }
    }
    let left = i64::try_from(progress.remaining_seconds).unwrap_or(i64::MAX);
    fields.push(("left", output::span(left)));
    if progress.tokens > 0 {
        fields.push(("tokens", progress.tokens.to_string()));
    }
    if let Some(summary) = &progress.todo {
        todo(&json!(summary), fields);
    }
}

/// Which criteria an agent's job meets, and who says so.
fn criteria(result: &Value, fields: &mut Vec<(&'static str, String)>) {
    let criteria = result["criteria"].as_array();
    let criteria = criteria.map_or(&[][..], Vec::as_slice);
    for criterion in criteria.iter().take(SHOWN_CRITERIA) {
        let number = criterion["index"].as_u64().unwrap_or_default();
        let met = if criterion["is_met"] == true {
            "met"
        } else {
            "not met"
        };
        let verifier = if criterion["verified_by"] == "job" {
            "checked by the job"
        } else {
            "the model's word"
        };
        let detail = criterion["detail"].as_str().unwrap_or_default();
        let detail = detail.lines().next().filter(|line| !line.is_empty());
        let detail = detail.map(|line| format!(": {}", cut(line)));
        let text = format!(
            "{} {met}, {verifier}{}",
            number.saturating_add(1),
            detail.unwrap_or_default()
        );
        fields.push(("criterion", text));
    }
    if let Some(more @ 1..) = criteria.len().checked_sub(SHOWN_CRITERIA) {
        fields.push(("criteria", format!("{more} more")));
    }
}

fn todo(todo: &Value, fields: &mut Vec<(&'static str, String)>) {
    let (Some(done), Some(total)) = (todo["done"].as_u64(), todo["total"].as_u64()) else {
        return;
    };
    fields.push(("todo", format!("{done} of {total} done")));
    let open = todo["open"].as_array().into_iter().flatten();
    for title in open.filter_map(Value::as_str).take(SHOWN_ITEMS) {
        fields.push(("open", cut(title)));
    }
}

fn usage(result: &Value, fields: &mut Vec<(&'static str, String)>) {
    let usage = &result["usage"];
    let number = |name: &str| usage[name].as_u64();
    if let (Some(prompt), Some(completion)) = (number("prompt_tokens"), number("completion_tokens"))
    {
        let tokens = prompt.saturating_add(completion);
        let requests = number("requests").unwrap_or_default();
        let took = milliseconds(number("duration_ms").unwrap_or_default());
        let model = name_of(&usage["model"]);
        fields.push((
            "tokens",
            format!("{tokens} ({model}, {requests} requests in {took})"),
        ));
    }
}

fn artifacts(job: &Job, fields: &mut Vec<(&'static str, String)>) {
    for artifact in job.artifacts.iter().take(SHOWN_ARTIFACTS) {
        let path = cut(artifact["path"].as_str().unwrap_or_default());
        let text = if let Some(reason) = artifact["dropped"].as_str() {
            format!("{path} was not kept: {}", cut(reason))
        } else {
            let size = artifact["size"].as_u64().unwrap_or_default();
            format!("{path} ({})", output::size(size))
        };
        fields.push(("artifact", text));
    }
    let omitted = (job.artifacts.len().saturating_sub(SHOWN_ARTIFACTS) as u64)
        .saturating_add(job.artifacts_omitted);
    if omitted > 0 {
        fields.push(("artifacts", format!("{omitted} more")));
    }
}

fn name_of(value: &Value) -> String {
    let text = value.as_str().unwrap_or_default();
    text.chars().take(NAME_CHARACTERS).collect()
}

/// A message, as far as it is printed.
pub fn cut(text: &str) -> String {
    match text.char_indices().nth(MESSAGE_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::run::tests::job;

    fn step(index: u64, status: &str) -> Value {
        json!({
            "index": index, "id": "build", "type": "run_command", "status": status, "exit_code": 2,
            "stdout": "x".repeat(1_500), "stderr": "", "encoding": "utf-8", "output": null,
            "truncated": false, "started_at": "2026-01-01T00:00:00Z",
            "ended_at": "2026-01-01T00:00:01.25Z",
        })
    }

    fn with_result(result: Value) -> Job {
        Job {
            sba_result: Some(result),
            ..job()
        }
    }

    #[test]
    fn a_step_is_one_line() {
        let job = with_result(json!({"steps": [step(0, "failure")]}));
        assert_eq!(
            rows(&job),
            [[
                "1",
                "build",
                "run_command",
                "failure",
                "1.2s",
                "2",
                "",
                "1.4 KiB"
            ]
            .map(str::to_owned)]
        );
    }

    #[test]
    fn steps_that_change_files_say_how_many() {
        let mut patched = step(0, "success");
        patched["type"] = json!("apply_unified_diff");
        patched["output"] = json!({"files": [{"path": "a"}, {"path": "b"}]});
        let mut written = step(1, "success");
        written["type"] = json!("write_file");
        let mut failed = written.clone();
        failed["status"] = json!("failure");
        let job = with_result(json!({"steps": [patched, written, failed, step(3, "success")]}));
        let files: Vec<String> = rows(&job).into_iter().map(|row| row[6].clone()).collect();
        assert_eq!(files, ["2", "1", "0", ""]);
    }

    #[test]
    fn of_many_steps_the_ends_and_the_failures_are_lines() {
        let mut steps: Vec<Value> = (0..1_000).map(|index| step(index, "success")).collect();
        steps[500] = step(500, "timeout");
        let rows = rows(&with_result(json!({ "steps": steps })));
        let first: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
        assert_eq!(first.len(), 2 * ENDS + 3);
        assert_eq!(&first[9..14], ["10", "…", "501", "…", "991"]);
        let all = (0..4_000)
            .map(|index| step(index, "failure"))
            .collect::<Vec<_>>();
        assert!(super::rows(&with_result(json!({ "steps": all }))).len() < 120);
    }

    #[test]
    fn failures_artifacts_and_the_todo_list_are_fields() {
        let mut job = with_result(json!({
            "failure_code": "step_failed", "failure_message": "m".repeat(9_000),
            "todo": {"total": 2, "done": 1, "open": ["rest"]},
        }));
        job.artifacts = vec![
            json!({"path": "jobs/j/a", "size": 2_048}),
            json!({"path": "jobs/j/b", "dropped": "too large"}),
        ];
        job.artifacts_omitted = 3;
        let fields = fields(&job);
        let text = |name: &str| {
            let named = fields.iter().filter(|field| field.0 == name);
            named.map(|field| field.1.clone()).collect::<Vec<_>>()
        };
        assert!(text("failure")[0].starts_with("step_failed: mmm"));
        assert!(text("failure")[0].chars().count() < MESSAGE_CHARACTERS + 20);
        assert_eq!(
            text("artifact"),
            ["jobs/j/a (2 KiB)", "jobs/j/b was not kept: too large"]
        );
        assert_eq!(text("artifacts"), ["3 more"]);
        assert_eq!(
            (text("todo"), text("open")),
            (vec!["1 of 2 done".to_owned()], vec!["rest".to_owned()])
        );
    }

    #[test]
    fn an_agents_job_says_who_verified_what_and_what_its_models_did() {
        let job = with_result(json!({
            "criteria": [
                {"index": 0, "is_met": true, "verified_by": "job"},
                {"index": 1, "is_met": false, "verified_by": "job", "detail": "exited with 1\nx"},
                {"index": 2, "is_met": true, "verified_by": "model", "detail": "I read it"},
            ],
            "usage": {
                "model": "m", "requests": 5, "prompt_tokens": 35, "completion_tokens": 15,
                "duration_ms": 1_250,
            },
        }));
        assert_eq!(
            fields(&job),
            [
                ("criterion", "1 met, checked by the job".to_owned()),
                (
                    "criterion",
                    "2 not met, checked by the job: exited with 1".to_owned()
                ),
                ("criterion", "3 met, the model's word: I read it".to_owned()),
                ("tokens", "50 (m, 5 requests in 1.2s)".to_owned()),
            ]
        );
        let running = Job {
            progress: Some(JobProgress {
                step: Some(4),
                activity: Some("turn 3: run_command".to_owned()),
                remaining_seconds: 90,
                todo: serde_json::from_value(json!({"total": 3, "done": 1, "open": ["edit"]}))
                    .expect("a summary"),
                tokens: 1_200,
                ..JobProgress::default()
            }),
            ..super::super::run::tests::job()
        };
        assert_eq!(
            fields(&running),
            [
                ("now", "turn 3: run_command".to_owned()),
                ("left", output::span(90)),
                ("tokens", "1200".to_owned()),
                ("todo", "1 of 3 done".to_owned()),
                ("open", "edit".to_owned()),
            ]
        );
    }

    #[test]
    fn odd_results_break_nothing() {
        for odd in [
            json!(null),
            json!([1]),
            json!({"steps": {}}),
            json!({"steps": [1, null, {"index": -1, "started_at": "x", "stdout": 7}]}),
            json!({"todo": [], "usage": 1, "failure_code": 7, "criteria": [1, {"index": -1}]}),
        ] {
            let job = with_result(odd);
            rows(&job);
            fields(&job);
        }
    }
}

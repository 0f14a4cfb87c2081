//! The results of SBA jobs: blobs beside the job's row, because they may be large.
//!
//! Invariant: a result is never in a row, and only the answer about its one job has it.

use std::{collections::BTreeMap, io, pin::Pin};

use axum::body::Body;
use bytes::Bytes;
use cynode_api::{Job, sba::limits::MAX_RESULT_BYTES};
use cynode_service::{compute, json};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    blobs::{self, Blobs, StageError, StagedBlob},
    db::JobRow,
    shorten::{cut, json_size},
};

/// The longest result to keep. A node may add members to one of the largest size.
const MAX_KEPT_RESULT_BYTES: u64 = 36 << 20;
const _: () = assert!(MAX_KEPT_RESULT_BYTES > MAX_RESULT_BYTES as u64);
/// The longest failure code to repeat.
const MAX_CODE_BYTES: usize = 64;
/// What a shortened result keeps of the message of a failure.
const SHORT_MESSAGE_BYTES: usize = 4 * 1024;
/// The pieces in which a result is stored.
const PIECE: usize = 256 * 1024;

/// What a result says in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ResultSummary {
    /// Of the stored JSON, in hexadecimal digits.
    pub(crate) sha256: String,
    pub(crate) size: u64,
    /// The number of steps by their status.
    pub(crate) steps: BTreeMap<&'static str, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failure_code: Option<String>,
}

impl ResultSummary {
    fn new(result: &Value, staged: &StagedBlob) -> Self {
        let mut steps = BTreeMap::new();
        for step in result["steps"].as_array().into_iter().flatten() {
            let known = ["success", "failure", "timeout", "interrupted"];
            let status = known.iter().find(|status| step["status"] == **status);
            *steps.entry(*status.unwrap_or(&"other")).or_insert(0) += 1;
        }
        let code = result["failure_code"].as_str().filter(|code| is_code(code));
        Self {
            sha256: staged.sha256.clone(),
            size: staged.size,
            steps,
            failure_code: code.map(str::to_owned),
        }
    }
}

fn is_code(code: &str) -> bool {
    (1..=MAX_CODE_BYTES).contains(&code.len())
        && code
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'))
}

/// Takes the result out of a node's report and stages it. `None` when there is none, or when it is
/// too long to keep.
pub(crate) async fn stage(
    blobs: &Blobs,
    report: &mut Job,
) -> Result<Option<(StagedBlob, ResultSummary)>, blobs::Error> {
    let Some(result) = report.sba_result.take() else {
        return Ok(None);
    };
    let bytes = Bytes::from(result.to_string());
    let pieces = (0..bytes.len()).step_by(PIECE);
    let pieces = pieces.map(|at| Ok(bytes.slice(at..(at + PIECE).min(bytes.len()))));
    match blobs
        .stage::<blobs::Error>(stream::iter(pieces), MAX_KEPT_RESULT_BYTES, None)
        .await
    {
        Ok(staged) => {
            let summary = ResultSummary::new(&result, &staged);
            Ok(Some((staged, summary)))
        }
        Err(StageError::Store(blobs::Error::TooLarge { limit })) => {
            tracing::warn!(job_id = %report.job_id, limit, "A node's result of a job is too long and is not kept.");
            Ok(None)
        }
        Err(StageError::Store(error) | StageError::Source(error)) => Err(error),
    }
}

/// A job as JSON, with its results.
#[derive(Debug)]
pub(crate) enum Shown {
    Object(Box<Job>),
    /// Results are inserted while they are read.
    Stream(Body),
}

/// Shows a job with its results, each shortened to `max_bytes` if that is given; 0 leaves them out.
pub(crate) async fn show(
    blobs: &Blobs,
    row: JobRow,
    max_bytes: Option<usize>,
) -> Result<Shown, blobs::Error> {
    let (result, late) = (row.result_sha256.clone(), row.late_result_sha256.clone());
    let mut job = row.into_object();
    if max_bytes == Some(0) || (result.is_none() && late.is_none()) {
        return Ok(Shown::Object(Box::new(job)));
    }
    let Some(max) = max_bytes else {
        let result = open(blobs, result.as_deref()).await?;
        let late = open(blobs, late.as_deref()).await?;
        return Ok(Shown::Stream(whole(job, result, late)));
    };
    job.sba_result = read_shortened(blobs, result.as_deref(), max).await?;
    let late = read_shortened(blobs, late.as_deref(), max).await?;
    if let (Some(late), Some(members)) = (
        late,
        job.late_result.as_mut().and_then(Value::as_object_mut),
    ) {
        members.insert("sba_result".to_owned(), late);
    }
    Ok(Shown::Object(Box::new(job)))
}

type Pieces = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// A result that may have expired.
async fn open(blobs: &Blobs, sha256: Option<&str>) -> Result<Option<Pieces>, blobs::Error> {
    let Some(sha256) = sha256 else {
        return Ok(None);
    };
    match blobs.get(sha256).await {
        Ok(pieces) => Ok(Some(Box::pin(pieces))),
        Err(blobs::Error::NotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

fn text(bytes: impl Into<Bytes>) -> Pieces {
    Box::pin(stream::iter([Ok(bytes.into())]))
}

/// The JSON of a job into which its results are inserted, without holding them in memory.
fn whole(mut job: Job, result: Option<Pieces>, late: Option<Pieces>) -> Body {
    let late_result = job.late_result.take();
    let mut parts = vec![text("{")];
    if let Some(result) = result {
        parts.extend([text("\"sba_result\":"), result, text(",")]);
    }
    if let Some(object) = late_result {
        parts.push(text("\"late_result\":{"));
        if let Some(late) = late {
            parts.extend([text("\"sba_result\":"), late, text(",")]);
        }
        parts.extend([text(after_brace(&object)), text(",")]);
    }
    parts.push(text(after_brace(&job)));
    Body::from_stream(stream::iter(parts).flatten())
}

/// The JSON of an object that has members, without its first brace.
fn after_brace(object: &impl Serialize) -> Bytes {
    let json = Bytes::from(serde_json::to_vec(object).unwrap_or_default());
    json.slice(json.len().min(1)..)
}

async fn read_shortened(
    blobs: &Blobs,
    sha256: Option<&str>,
    max: usize,
) -> Result<Option<Value>, blobs::Error> {
    let Some(pieces) = open(blobs, sha256).await? else {
        return Ok(None);
    };
    let size = match sha256 {
        Some(sha256) => blobs.size(sha256).await?.unwrap_or_default(),
        None => 0,
    };
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    // One value in so many bytes, as in lists of files.
    let _room = json::room(size, size / 64).await;
    let bytes: Vec<u8> = pieces
        .try_fold(Vec::with_capacity(size), async |mut bytes, piece| {
            bytes.extend_from_slice(&piece);
            Ok(bytes)
        })
        .await
        .map_err(|error| {
            tracing::warn!(%error, "A stored result can't be read.");
            blobs::Error::Unavailable
        })?;
    let read = move || {
        let mut result = serde_json::from_slice(&bytes).ok()?;
        shorten(&mut result, max);
        Some(result)
    };
    Ok(compute::run(size, read).await)
}

/// Shortens a result to about so many bytes of JSON: first the texts that steps returned, all to
/// the same length, then the list of steps, of which those stay that did not succeed.
pub(crate) fn shorten(result: &mut Value, max: usize) {
    let size = json_size(result);
    if size <= max {
        return;
    }
    let rest = shorten_texts(result, max, size);
    shorten_steps(result, max, rest);
    for (list, omitted) in [
        ("artifacts", "artifacts_omitted"),
        ("criteria", "criteria_omitted"),
    ] {
        shorten_list(result, list, omitted, max);
    }
    if let Some(Value::String(message)) = result.get_mut("failure_message") {
        *message = cut(message, SHORT_MESSAGE_BYTES, false, false);
    }
    if let Some(members) = result.as_object_mut() {
        members.insert("truncated".to_owned(), json!(true));
    }
}

/// The texts of a step, and its structured output.
const STEP_TEXTS: [&str; 3] = ["stdout", "stderr", "error"];
const STEP_OUTPUT: &str = "output";

/// Cuts the texts of all steps to one length. Returns the size of the result then.
fn shorten_texts(result: &mut Value, max: usize, size: usize) -> usize {
    let Some(steps) = result.get_mut("steps").and_then(Value::as_array_mut) else {
        return size;
    };
    let names = || STEP_TEXTS.iter().chain([&STEP_OUTPUT]);
    let size_of = |step: &Value, name: &str| step.get(name).map_or(0, json_size);
    let mut sizes: Vec<usize> = steps
        .iter()
        .flat_map(|step| names().map(|name| size_of(step, name)))
        .collect();
    let texts: usize = sizes.iter().sum();
    let cap = cap(&mut sizes, max.saturating_sub(size - texts));
    for step in steps {
        let is_base64 = step["encoding"] == "base64";
        let mut is_cut = false;
        for name in names() {
            if size_of(step, name) <= cap {
                continue;
            }
            is_cut = true;
            match step.get_mut(*name) {
                Some(Value::String(text)) => {
                    let room = cap.saturating_sub(2);
                    *text = cut(text, room, true, is_base64 && *name != "error");
                }
                Some(value) => *value = Value::Null,
                None => {}
            }
        }
        if let Some(members) = step.as_object_mut().filter(|_| is_cut) {
            members.insert("truncated".to_owned(), json!(true));
        }
    }
    json_size(result)
}

/// The largest length to which texts of these sizes can be cut to fit together.
fn cap(sizes: &mut [usize], budget: usize) -> usize {
    sizes.sort_unstable();
    let mut left = budget;
    for (position, size) in sizes.iter().enumerate() {
        let share = left / (sizes.len() - position);
        if *size > share {
            return share;
        }
        left -= size;
    }
    usize::MAX
}

/// Drops steps that succeeded, the last ones first, until the result fits.
fn shorten_steps(result: &mut Value, max: usize, size: usize) {
    let Some(steps) = result.get_mut("steps").and_then(Value::as_array_mut) else {
        return;
    };
    let (mut size, before) = (size, steps.len());
    for is_success in [true, false] {
        // The last step shows how the job ended.
        let mut position = steps.len().saturating_sub(1);
        while size > max && position > 0 {
            position -= 1;
            if (steps[position]["status"] == "success") == is_success {
                size = size.saturating_sub(json_size(&steps[position]) + 1);
                steps.remove(position);
            }
        }
    }
    let omitted = before - steps.len();
    if let Some(members) = result.as_object_mut().filter(|_| omitted > 0) {
        members.insert("steps_omitted".to_owned(), json!(omitted));
    }
}

fn shorten_list(result: &mut Value, list: &str, omitted: &str, max: usize) {
    let mut size = json_size(result);
    let Some(items) = result.get_mut(list).and_then(Value::as_array_mut) else {
        return;
    };
    let before = items.len();
    while size > max
        && let Some(item) = items.pop()
    {
        size = size.saturating_sub(json_size(&item) + 1);
    }
    let count = before - items.len();
    if let Some(members) = result.as_object_mut().filter(|_| count > 0) {
        members.insert(omitted.to_owned(), json!(count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(index: usize, status: &str, stdout: &str) -> Value {
        json!({
            "index": index, "id": null, "type": "run_command", "status": status, "exit_code": 0,
            "stdout": stdout, "stderr": "", "encoding": "utf-8", "output": null, "error": null,
            "truncated": false,
        })
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "callers make the list in place"
    )]
    fn result(steps: Vec<Value>) -> Value {
        json!({
            "protocol_version": "1.0", "status": "failure", "steps": steps, "artifacts": [],
            "failure_code": "step_failed", "failure_message": "x",
        })
    }

    #[test]
    fn a_result_that_fits_is_left_alone() {
        let original = result(vec![step(0, "success", "hello")]);
        let mut shortened = original.clone();
        shorten(&mut shortened, 10_000);
        assert_eq!(shortened, original);
    }

    #[test]
    fn long_texts_are_cut_before_steps_are_dropped_and_short_ones_stay_whole() {
        let long = format!("begin{}end", "x".repeat(50_000));
        let mut shortened = result(vec![
            step(0, "success", "short"),
            step(1, "success", &long),
            step(2, "failure", &long),
        ]);
        shorten(&mut shortened, 8_000);
        assert!(json_size(&shortened) <= 8_200, "{}", json_size(&shortened));
        let steps = shortened["steps"].as_array().expect("steps");
        assert_eq!((steps.len(), &shortened["truncated"]), (3, &json!(true)));
        assert_eq!(
            (&steps[0]["stdout"], &steps[0]["truncated"]),
            (&json!("short"), &json!(false))
        );
        for step in &steps[1..] {
            let text = step["stdout"].as_str().expect("a text");
            assert!(text.starts_with("begin") && text.ends_with("end") && text.len() > 3_000);
            assert_eq!(step["truncated"], true);
        }
    }

    #[test]
    fn of_many_steps_those_that_failed_and_the_last_one_stay() {
        let mut steps: Vec<Value> = (0..4_000)
            .map(|index| step(index, "success", "x"))
            .collect();
        steps[1_234]["status"] = json!("failure");
        let mut shortened = result(steps);
        shorten(&mut shortened, 16_000);
        assert!(json_size(&shortened) <= 16_200, "{}", json_size(&shortened));
        let kept: Vec<u64> = shortened["steps"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|step| step["index"].as_u64())
            .collect();
        assert!(kept.contains(&0) && kept.contains(&1_234) && kept.contains(&3_999));
        assert_eq!(shortened["steps_omitted"], 4_000 - kept.len());
    }

    #[test]
    fn a_result_of_many_failures_and_long_lists_is_bounded_too() {
        let mut long = result(
            (0..4_000)
                .map(|index| step(index, "failure", "x"))
                .collect(),
        );
        long["artifacts"] = json!(vec![json!({"path": "a".repeat(100)}); 1_000]);
        long["criteria"] = json!(vec![
            json!({"index": 0, "detail": "a".repeat(1_000)});
            1_000
        ]);
        long["failure_message"] = json!("\u{1}".repeat(60_000));
        shorten(&mut long, 20_000);
        assert!(
            json_size(&long) <= 20_000 + SHORT_MESSAGE_BYTES,
            "{}",
            json_size(&long)
        );
        for odd in [
            json!(null),
            json!([]),
            json!({"steps": {}}),
            json!({"steps": [1, "x"]}),
        ] {
            let mut odd = odd;
            shorten(&mut odd, 0);
        }
    }

    #[test]
    fn a_code_that_is_no_code_is_not_repeated() {
        assert!(is_code("step_failed") && is_code("e_2"));
        for bad in ["", "Step", "a b", "\u{1b}[2J", &"a".repeat(65)] {
            assert!(!is_code(bad), "{bad:?}");
        }
    }
}

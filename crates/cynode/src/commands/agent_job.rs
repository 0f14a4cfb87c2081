//! `job run --agent`: the request for an agent's job, and what its end left behind.
//!
//! A patch comes from inside a sandbox: its names are escaped, and nothing of it is applied.

use std::{io::Read as _, path::Path};

use cynode_api::{API_VERSION, ArtifactId, Job, JobCreate, JobId, TaskId};
use cynode_client::UserClient;

use super::artifact;
use crate::{
    apply::{self, FileSummary, Summary},
    cli::JobRun,
    failure::Failure,
    output, sanitize,
};

/// The artifacts that the runner makes, below the directory of the job.
const CHANGES: &str = "changes.patch";
const TRANSCRIPT: &str = "transcript.jsonl";
/// The longest patch that is summarized.
const MAX_SUMMARIZED_BYTES: usize = 16 * 1024 * 1024;
/// Files of it that are named.
const SHOWN_FILES: usize = 20;

/// The request of `job run --agent`.
pub(super) fn request(
    args: &JobRun,
    task: Option<TaskId>,
    id: JobId,
) -> Result<JobCreate, Failure> {
    let prompt = if args.file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .map_err(|error| Failure::usage(format!("standard input: {error}")))?;
        text
    } else {
        let text = args.file.to_str();
        text.ok_or_else(|| Failure::usage("TEXT is not UTF-8"))?
            .to_owned()
    };
    Ok(JobCreate {
        version: Some(API_VERSION),
        task_id: task,
        job_id: Some(id),
        image_ref: args.image.clone(),
        prompt: Some(prompt),
        allowed_models: args.agent.models.clone(),
        checks: args.agent.checks.clone(),
        timeout_seconds: super::seconds(args.agent.timeout),
        ..JobCreate::default()
    })
}

/// Says what an agent changed and where its transcript is, and writes the patch to a file if the
/// user asked for one.
pub(super) async fn report(
    client: &UserClient,
    job: &Job,
    patch: Option<&Path>,
) -> Result<(), Failure> {
    if let Some(id) = artifact_id(job, TRANSCRIPT) {
        output::message(&format!(
            "cynode: the transcript is the artifact {id}: 'cynode artifact get {id}'"
        ));
    }
    let Some(id) = artifact_id(job, CHANGES) else {
        output::message("cynode: the agent left no changes");
        return Ok(());
    };
    match changes(client, job).await {
        Ok(Some(summary)) => {
            let (files, added, removed) = summary.totals();
            output::message(&format!(
                "cynode: {files} files changed, {added} lines added, {removed} removed"
            ));
            for line in lines(&summary) {
                output::message(&sanitize::line(&format!("cynode:   {line}")));
            }
        }
        Ok(None) => {}
        Err(failure) if patch.is_none() => {
            let why = sanitize::line(failure.message());
            output::message(&format!("cynode: the changes can't be shown: {why}"));
        }
        Err(failure) => return Err(failure),
    }
    let Some(file) = patch else {
        output::message(&format!(
            "cynode: the patch is the artifact {id}: 'cynode artifact get {id} FILE', then 'git \
             apply FILE'"
        ));
        return Ok(());
    };
    artifact::to_file(client.artifact_content(id).await?, file).await?;
    let name = sanitize::line(&file.to_string_lossy());
    output::message(&format!(
        "cynode: the patch is in {name}; review it, then 'git apply {name}'"
    ));
    Ok(())
}

/// Lines for the files that a job changed, for `job show`. Empty if nobody knows.
pub(super) async fn changed_files(client: &UserClient, job: &Job) -> Vec<String> {
    let summary = changes(client, job).await.ok().flatten();
    summary.as_ref().map(lines).unwrap_or_default()
}

/// What the patch of a job changes; `None` if it has no patch, or one that is too long.
async fn changes(client: &UserClient, job: &Job) -> Result<Option<Summary>, Failure> {
    let Some(id) = artifact_id(job, CHANGES) else {
        return Ok(None);
    };
    let mut body = client.artifact_content(id).await?;
    let mut patch = Vec::new();
    while let Some(piece) = body.chunk().await? {
        if patch.len() + piece.len() > MAX_SUMMARIZED_BYTES {
            return Ok(None);
        }
        patch.extend_from_slice(&piece);
    }
    let parsed = apply::parse(&patch)
        .map_err(|error| Failure::usage(format!("the patch is not valid: {error}")))?;
    Ok(Some(Summary::new(&parsed)))
}

fn lines(summary: &Summary) -> Vec<String> {
    let files = summary.files.iter();
    let mut lines: Vec<String> = files.take(SHOWN_FILES).map(line).collect();
    let more = summary.files.len().saturating_sub(SHOWN_FILES);
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines
}

/// `modify src/add.py (+1 -1)`.
fn line(file: &FileSummary) -> String {
    let size = if file.binary {
        "binary".to_owned()
    } else {
        format!("+{} -{}", file.added, file.removed)
    };
    let from = file.from.as_ref().map(|from| format!(" from {from}"));
    let warnings = file.warnings.iter().map(|warning| format!(", {warning}"));
    let warnings = warnings.collect::<Vec<_>>().concat();
    format!(
        "{} {}{} ({size}{warnings})",
        file.operation,
        file.path,
        from.unwrap_or_default()
    )
}

/// The artifact that the runner of a job left under this name.
fn artifact_id(job: &Job, name: &str) -> Option<ArtifactId> {
    let path = format!("jobs/{}/{name}", job.job_id);
    let mut artifacts = job.artifacts.iter();
    let artifact = artifacts.find(|artifact| artifact["path"] == path.as_str())?;
    artifact["artifact_id"].as_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::commands::run::tests::job;

    #[test]
    fn the_runners_artifacts_are_found_by_their_whole_path() {
        let mut job = job();
        let (patch, other) = (ArtifactId::generate(), ArtifactId::generate());
        job.artifacts = vec![
            json!({"path": "jobs/x/changes.patch", "artifact_id": other}),
            json!({"path": format!("jobs/{}/out/changes.patch", job.job_id), "artifact_id": other}),
            json!({"path": format!("jobs/{}/changes.patch", job.job_id), "artifact_id": patch}),
            json!({"path": format!("jobs/{}/transcript.jsonl", job.job_id), "dropped": "quota"}),
        ];
        assert_eq!(artifact_id(&job, CHANGES), Some(patch));
        assert_eq!(artifact_id(&job, TRANSCRIPT), None);
    }

    #[test]
    fn a_changed_file_is_one_line() {
        let text = "--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n-a\n+b\n+c\n";
        let many = |count: usize| {
            let files = (0..count).map(|number| text.replace("/x", &format!("/{number}")));
            files.collect::<String>()
        };
        let shown = |patch: &str| {
            lines(&Summary::new(
                &apply::parse(patch.as_bytes()).expect("a patch"),
            ))
        };
        assert_eq!(shown(text), ["modify x (+2 -1)"]);
        let lines = shown(&many(SHOWN_FILES + 3));
        assert_eq!(lines.len(), SHOWN_FILES + 1);
        assert_eq!(lines[SHOWN_FILES], "and 3 more");
    }
}

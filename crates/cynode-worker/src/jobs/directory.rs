//! The job directory of a sandbox, `/job`: the worker puts the specification and its context there,
//! and reads the result file.
//!
//! Invariants: the worker writes there only through the agent, and before any process of the job
//! runs. Every process of the job can write what the worker reads there, so that is bounded, parsed
//! strictly, and proves nothing.

use std::{
    io,
    os::fd::OwnedFd,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::body::Bytes;
use cynode_api::{
    Base64Bytes, ErrorCode, SignalName,
    sba::{Criterion, JobContext, JobResult, JobSpec, limits::MAX_RESULT_BYTES},
};
use cynode_sba_proto::{FileOp, JOB, MAX_DATA, Reply, Request};
use cynode_service::{ApiError, compute};
use futures_util::stream;

use super::artifacts;
use crate::{
    sandbox::{Channel, REPLY_TIMEOUT, unavailable, unexpected},
    sessions::Live,
};

/// The result file that runners write.
const RESULT: &str = "result.json";
/// Longest part of a file name that is taken from a skill's name, in characters.
const MAX_FILE_NAME: usize = 64;

/// Fills the directory. No process of the job runs yet, so the files are complete when one reads
/// them.
pub(super) async fn fill(
    live: &Live,
    job: &JobSpec,
    specification: Vec<u8>,
    needs_runner: bool,
) -> Result<(), ApiError> {
    let size = specification.len();
    let archive = compute::run(size, || archive(job, &specification))
        .await
        .map_err(|error| ApiError::new(ErrorCode::Internal, format!("packing the job: {error}")))?;
    drop(specification);
    let path = Base64Bytes(JOB.as_bytes().to_vec());
    let op = FileOp::Import { path };
    let mut channel = open(live, op).await?;
    if needs_runner && channel.runner() == 0 {
        return Err(ApiError::new(
            ErrorCode::AgentOutdated,
            "the agent in the job's sandbox is of an earlier version and has no runner",
        ));
    }
    let archive = Bytes::from(archive);
    let pieces = (0..archive.len())
        .step_by(MAX_DATA)
        .map(|at| Ok(archive.slice(at..archive.len().min(at + MAX_DATA))));
    channel.import(stream::iter(pieces)).await.map(drop)
}

pub(super) async fn open(live: &Live, op: FileOp) -> Result<Channel, ApiError> {
    live.link()?
        .open(&Request::File { op })
        .await
        .map_err(unavailable)
}

/// The files of the directory, as a tar archive.
fn archive(job: &JobSpec, specification: &[u8]) -> io::Result<Vec<u8>> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let mut archive = tar::Builder::new(Vec::new());
    let mut file = |path: &str, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(now);
        archive.append_data(&mut header, path, content)
    };
    file("job.json", specification)?;
    if let Some(context) = &job.context {
        for (name, content) in context_files(context) {
            file(&format!("context/{name}"), content.as_bytes())?;
        }
    }
    archive.into_inner()
}

/// The texts of a job's context, one file each.
fn context_files(context: &JobContext) -> Vec<(String, String)> {
    let texts = [
        ("baseline.md", &context.baseline_context),
        ("project.md", &context.project_context),
        ("task.md", &context.task_context),
        ("additional.md", &context.additional_context),
    ];
    let mut files: Vec<(String, String)> = texts
        .into_iter()
        .filter_map(|(name, text)| Some((name.to_owned(), text.clone()?)))
        .collect();
    if !context.requirements.is_empty() {
        let items = context.requirements.iter().map(String::as_str);
        files.push(("requirements.md".to_owned(), items.map(item).collect()));
    }
    if !context.acceptance_criteria.is_empty() {
        let items = context.acceptance_criteria.iter().map(Criterion::text);
        files.push((
            "acceptance_criteria.md".to_owned(),
            items.map(item).collect(),
        ));
    }
    if !context.preferences.is_empty() {
        let json = serde_json::to_string_pretty(&context.preferences).unwrap_or_default();
        files.push(("preferences.json".to_owned(), json + "\n"));
    }
    for (number, skill) in context.skills.iter().enumerate() {
        let name = format!("skills/{}-{}.md", number + 1, file_name(&skill.name));
        files.push((name, skill.content.clone()));
    }
    files
}

/// An item of a Markdown list.
fn item(text: &str) -> String {
    format!("- {}\n", text.trim_end().replace('\n', "\n  "))
}

/// Replaces the characters that are special to file systems or shells.
fn file_name(name: &str) -> String {
    let plain = |character: char| {
        if character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-') {
            character
        } else {
            '_'
        }
    };
    name.chars().take(MAX_FILE_NAME).map(plain).collect()
}

/// Kills every process except process 1, so that files no longer change.
pub(super) async fn kill_everything(live: &Live) -> Result<(), ApiError> {
    let signal = SignalName::KILL.number();
    let request = Request::SignalAll { signal };
    live.link()?.call(&request).await.map(drop)
}

/// The content of a result file, or the reason why it is invalid.
pub(super) type ClaimedResult = Result<JobResult, String>;

/// Reads the result file through the agent. The outer error means that the agent failed.
pub(super) async fn read_result(live: &Live) -> Result<ClaimedResult, ApiError> {
    let path = Base64Bytes(format!("{JOB}/{RESULT}").into_bytes());
    let op = FileOp::Read {
        path,
        start: 0,
        end: None,
    };
    let mut channel = open(live, op).await?;
    let stat = match channel.reply(REPLY_TIMEOUT).await {
        Ok(Reply::Stat(stat)) => stat,
        Ok(other) => return Err(unexpected(&format!("{other:?}"))),
        Err(error) if error.is(ErrorCode::AgentUnavailable) => return Err(error),
        Err(error) => return Ok(Err(missing(&error.into_problem().detail))),
    };
    if stat.size > MAX_RESULT_BYTES as u64 {
        return Ok(Err(too_large()));
    }
    let mut json = Vec::new();
    while let Some(piece) = channel.data(REPLY_TIMEOUT).await? {
        json.extend_from_slice(&piece);
        if json.len() > MAX_RESULT_BYTES {
            return Ok(Err(too_large()));
        }
    }
    Ok(compute::run(json.len(), || parse(&json)).await)
}

/// Reads the result file of a sandbox that is gone, from its job directory.
pub(super) fn read_result_on_disk(job: &OwnedFd) -> ClaimedResult {
    let read = artifacts::open_beneath(job, RESULT).and_then(|file| {
        use io::Read as _;
        let mut json = Vec::new();
        file.take(MAX_RESULT_BYTES as u64 + 1)
            .read_to_end(&mut json)
            .map(|_| json)
    });
    match read {
        Ok(json) if json.len() > MAX_RESULT_BYTES => Err(too_large()),
        Ok(json) => parse(&json),
        Err(error) => Err(missing(&error.to_string())),
    }
}

fn missing(reason: &str) -> String {
    format!("{JOB}/{RESULT} can't be read: {reason}")
}

fn too_large() -> String {
    format!("{JOB}/{RESULT} has more than {MAX_RESULT_BYTES} bytes")
}

fn parse(json: &[u8]) -> ClaimedResult {
    JobResult::parse(json).map_err(|error| format!("{JOB}/{RESULT} is not a valid result: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn the_directory_has_a_file_for_each_text_of_the_context() {
        let json = serde_json::json!({
            "protocol_version": "1.0",
            "job_id": "01936f3e-7c4a-7b1e-9a55-0242ac120002",
            "task_id": "01936f3e-7c4a-7b1e-9a55-0242ac120003",
            "constraints": {"max_runtime_seconds": 1, "max_output_bytes": 1},
            "context": {
                "baseline_context": "who\n",
                "requirements": ["one\nmore", "two"],
                "acceptance_criteria": ["met", {"text": "checked", "check": {"argv": ["true"]}}],
                "preferences": {"a": 1},
                "skills": [{"name": "../a b/ü", "content": "how"}],
            },
            "steps": [{"type": "list_tree", "args": {}}],
        });
        let job = JobSpec::from_value(json).expect("valid");
        let packed = archive(&job, b"{}").expect("packed");
        let mut found = Vec::new();
        for entry in tar::Archive::new(packed.as_slice())
            .entries()
            .expect("entries")
        {
            let mut entry = entry.expect("an entry");
            assert_eq!(entry.header().mode().expect("a mode"), 0o644);
            let path = entry.path().expect("a path").display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).expect("text");
            found.push((path, text));
        }
        let expected = [
            ("job.json", "{}"),
            ("context/baseline.md", "who\n"),
            ("context/requirements.md", "- one\n  more\n- two\n"),
            ("context/acceptance_criteria.md", "- met\n- checked\n"),
            ("context/preferences.json", "{\n  \"a\": 1\n}\n"),
            ("context/skills/1-.._a_b__.md", "how"),
        ]
        .map(|(path, text)| (path.to_owned(), text.to_owned()));
        assert_eq!(found, expected);
    }
}

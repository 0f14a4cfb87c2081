//! `audit show`: summarizes a session, a job or a task.

use std::process::ExitCode;

use cynode_api::{AuditRecord, JobId, SessionId, TaskId};
use cynode_audit::story;
use cynode_client::{AuditFilter, UserClient};

use crate::{
    cli::{AuditSubjectId, Format, Globals},
    commands::CommandResult,
    failure::{Failure, USAGE},
    output::{self, Progress},
};

/// Nobody reads a summary of more records.
const MAX_RECORDS: usize = 200_000;

pub async fn run(client: &UserClient, globals: &Globals, subject: AuditSubjectId) -> CommandResult {
    let progress = Progress::start("reading");
    for filter in filters(subject) {
        let (records, is_truncated) = match records(client, &filter, &progress).await {
            // The id may be of another kind.
            Err(failure) if failure.exit == USAGE && matches!(subject, AuditSubjectId::Any(_)) => {
                continue;
            }
            result => result?,
        };
        if records.is_empty() {
            continue;
        }
        drop(progress);
        let story = story(&records);
        match globals.output {
            Format::Json => output::json(&story)?,
            Format::Table => output::line(story.to_text().trim_end())?,
        }
        if is_truncated {
            output::message(&format!(
                "showing only the first {MAX_RECORDS} records; see 'cynode audit export'"
            ));
        }
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::new(
        USAGE,
        "not_found",
        "the audit trail has no records of this id",
    )
    .remedy("Check the id; see 'cynode audit tail'."))
}

/// One filter for each kind that the id may be of, the likeliest first.
fn filters(subject: AuditSubjectId) -> Vec<AuditFilter> {
    let session = |id| AuditFilter {
        session: Some(id),
        ..AuditFilter::default()
    };
    let job = |id| AuditFilter {
        job: Some(id),
        ..AuditFilter::default()
    };
    let task = |id| AuditFilter {
        task: Some(id),
        ..AuditFilter::default()
    };
    match subject {
        AuditSubjectId::Session(id) => vec![session(id)],
        AuditSubjectId::Job(id) => vec![job(id)],
        AuditSubjectId::Task(id) => vec![task(id)],
        AuditSubjectId::Any(id) => vec![
            session(SessionId::from_uuid(id)),
            job(JobId::from_uuid(id)),
            task(TaskId::from_uuid(id)),
        ],
    }
}

async fn records(
    client: &UserClient,
    filter: &AuditFilter,
    progress: &Progress,
) -> Result<(Vec<AuditRecord>, bool), Failure> {
    let mut records = Vec::new();
    let mut after = Some(0);
    while let Some(page) = super::next_page(client, &mut after, filter).await? {
        for record in page.items {
            if records.len() == MAX_RECORDS {
                return Ok((records, true));
            }
            records.push(
                serde_json::from_value(record).map_err(|error| {
                    Failure::internal(format!("a record can't be read: {error}"))
                })?,
            );
        }
        progress.set_message(format!("reading: {} records", records.len()));
    }
    Ok((records, false))
}

//! `audit show`: summarizes a session, a job or a task.

use std::process::ExitCode;

use cynode_api::AuditRecord;
use cynode_audit::story;
use cynode_client::{AuditFilter, UserClient};

use crate::{
    cli::{AuditSubject, Globals, OutputFormat},
    commands::CommandResult,
    failure::{Failure, USAGE},
    output::{self, Progress},
    resolve,
};

/// Nobody reads a summary of more records.
const MAX_RECORDS: usize = 200_000;

pub async fn run(client: &UserClient, globals: &Globals, subject: AuditSubject) -> CommandResult {
    let progress = Progress::start("reading");
    let is_of_unknown_kind = matches!(subject, AuditSubject::Any(_));
    for filter in filters(client, &subject).await? {
        let (records, is_truncated) = match records(client, &filter, &progress).await {
            // The id may be of another kind.
            Err(failure) if failure.exit == USAGE && is_of_unknown_kind => {
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
            OutputFormat::Json => output::json(&story)?,
            OutputFormat::Table => output::line(story.to_text().trim_end())?,
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

/// One filter for each kind that the subject may be of, the likeliest first. The trail outlives
/// what it is about, so a whole id need not name anything that still exists.
async fn filters(client: &UserClient, subject: &AuditSubject) -> Result<Vec<AuditFilter>, Failure> {
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
    Ok(match subject {
        AuditSubject::Session(text) => {
            vec![session(resolve::session(client.sessions(), text).await?)]
        }
        AuditSubject::Job(text) => vec![job(resolve::job(client, text).await?)],
        AuditSubject::Task(text) => vec![task(resolve::task(client, text).await?)],
        AuditSubject::Any(text) => {
            let found = [
                resolve::session(client.sessions(), text).await.map(session),
                resolve::job(client, text).await.map(job),
                resolve::task(client, text).await.map(task),
            ];
            let mut filters = Vec::new();
            let mut failure = None;
            for found in found {
                match found {
                    Ok(filter) => filters.push(filter),
                    Err(error) => drop(failure.get_or_insert(error)),
                }
            }
            match failure {
                Some(failure) if filters.is_empty() => return Err(failure),
                _ => filters,
            }
        }
    })
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

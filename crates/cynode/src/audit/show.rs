//! `audit show`.

use std::process::ExitCode;

use cynode_api::{AuditRecord, JobId, SessionId, TaskId};
use cynode_audit::story;
use cynode_client::{AuditFilter, UserClient};

use crate::{
    cli::{AuditSubjectId, Format, Globals},
    failure::{Failure, USAGE},
    output::{self, Progress},
    plane::Outcome,
};

/// A story of more is not one that a person reads.
const MAX_RECORDS: usize = 200_000;

pub async fn run(client: &UserClient, globals: &Globals, of: AuditSubjectId) -> Outcome {
    let progress = Progress::start("reading");
    for filter in filters(of) {
        let (records, is_cut) = match records(client, &filter, &progress).await {
            // An id that names nothing of this kind; it may name something of another.
            Err(failure) if failure.exit == USAGE && matches!(of, AuditSubjectId::Any(_)) => {
                continue;
            }
            found => found?,
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
        if is_cut {
            output::note(&format!(
                "only the first {MAX_RECORDS} records are told; see 'cynode audit export' for all"
            ));
        }
        return Ok(ExitCode::SUCCESS);
    }
    Err(
        Failure::new(USAGE, "not_found", "nothing is recorded of it")
            .remedy("Check the id; see 'cynode audit tail'."),
    )
}

/// What may be meant, the likeliest first.
fn filters(of: AuditSubjectId) -> Vec<AuditFilter> {
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
    match of {
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
    let mut rest = Some(0);
    while let Some(page) = super::next_page(client, &mut rest, filter).await? {
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
        progress.say(format!("reading: {} records", records.len()));
    }
    Ok((records, false))
}

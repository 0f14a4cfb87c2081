//! `audit`: reads the audit trail and verifies it, on the server or offline.

mod export;
mod offline;
mod show;
mod tail;
mod verify;

use std::time::Duration;

use cynode_api::event_limits;
use cynode_client::{AuditFilter, RawAuditPage, UserClient};

use crate::{
    cli::{Audit, AuditFilterArgs, Globals},
    commands::CommandResult,
    connect,
    failure::Failure,
    resolve,
};

pub async fn run(globals: &Globals, command: Audit) -> CommandResult {
    match command {
        Audit::Tail(args) => tail::run(&connect::user_client(globals)?, globals, &args).await,
        Audit::Show { subject } => {
            show::run(&connect::user_client(globals)?, globals, subject).await
        }
        Audit::Verify(args) => match (&args.file, args.key) {
            // Offline: needs no connection.
            (Some(file), Some(key)) => offline::run(globals, file, key),
            _ => verify::run(&connect::user_client(globals)?, globals, args.key).await,
        },
        Audit::Export(args) => export::run(&connect::user_client(globals)?, &args).await,
    }
}

/// The records that the arguments select.
async fn filter(client: &UserClient, args: &AuditFilterArgs) -> Result<AuditFilter, Failure> {
    Ok(AuditFilter {
        task: resolve::optional(args.task.as_deref(), async |task| {
            resolve::task(client, task).await
        })
        .await?,
        session: resolve::optional(args.session.as_deref(), async |session| {
            resolve::session(client.sessions(), session).await
        })
        .await?,
        job: resolve::optional(args.job.as_deref(), async |job| {
            resolve::job(client, job).await
        })
        .await?,
        call: None,
        subject: resolve::optional(args.subject.as_deref(), async |subject| {
            resolve::subject_text(client, subject).await
        })
        .await?,
        decision: args.decision,
        action: args.action.clone(),
        since: args.since,
        until: args.until,
    })
}

/// The next page of existing records; `None` after the last. A page that is neither full nor
/// truncated is the last: reading the trail appends records to it, so the cursor never stops.
async fn next_page(
    client: &UserClient,
    after: &mut Option<i64>,
    filter: &AuditFilter,
) -> Result<Option<RawAuditPage>, Failure> {
    let Some(from) = *after else { return Ok(None) };
    let page = client.raw_audit(from, filter, Duration::ZERO).await?;
    *after = (page.truncated || page.items.len() >= event_limits::MAX_PAGE as usize)
        .then_some(page.next_cursor);
    Ok(Some(page))
}

//! `audit tail`: prints records, and follows new ones.

use std::{process::ExitCode, time::Duration};

use cynode_api::AuditRecord;
use cynode_audit::headline;
use cynode_client::UserClient;
use serde_json::Value;
use time::OffsetDateTime;
use tokio::time::sleep;

use crate::{
    cli::{AuditTail, Globals, OutputFormat},
    commands::{CommandResult, format_time},
    failure::Failure,
    output, sanitize,
};

/// How long the server holds a request until there are new records.
const POLL_TIMEOUT: Duration = Duration::from_secs(30);
/// Between attempts while the orchestrator is unreachable.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Prints a line for each record. With `follow`, continues forever and reconnects after the last
/// printed record.
pub async fn run(client: &UserClient, globals: &Globals, args: &AuditTail) -> CommandResult {
    let mut filter = super::filter(client, &args.filter).await?;
    if filter.since.is_none() && !args.filter.is_narrow() {
        filter.since = Some(OffsetDateTime::now_utc() - time::Duration::HOUR);
    }
    let (mut next, mut after) = (Some(0), 0);
    while let Some(page) = super::next_page(client, &mut next, &filter).await? {
        print(globals, page.items)?;
        after = page.next_cursor;
    }
    if !args.follow {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        match client.raw_audit(after, &filter, POLL_TIMEOUT).await {
            Ok(page) => {
                // Reading the trail appends records to it: don't spin on our own.
                let only_reads = page
                    .items
                    .iter()
                    .all(|record| record["action"] == "audit.read");
                print(globals, page.items)?;
                after = page.next_cursor;
                if only_reads {
                    sleep(RETRY_DELAY).await;
                }
            }
            Err(error) if error.is_transient() => sleep(RETRY_DELAY).await,
            Err(error) => return Err(error.into()),
        }
    }
}

fn print(globals: &Globals, records: Vec<Value>) -> Result<(), Failure> {
    for record in records {
        match globals.output {
            OutputFormat::Json => output::json_line(&record)?,
            OutputFormat::Table => {
                let record: AuditRecord = serde_json::from_value(record).map_err(|error| {
                    Failure::internal(format!("a record can't be read: {error}"))
                })?;
                output::line(&sanitize::line(&format!(
                    "{}  {}  {}",
                    record.cursor,
                    format_time(record.at),
                    headline(&record)
                )))?;
            }
        }
    }
    Ok(())
}

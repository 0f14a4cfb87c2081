//! `audit tail`.

use std::{process::ExitCode, time::Duration};

use cynode_api::AuditRecord;
use cynode_audit::headline;
use cynode_client::UserClient;
use serde_json::Value;
use time::OffsetDateTime;
use tokio::time::sleep;

use crate::{
    cli::{AuditTail, Format, Globals},
    failure::Failure,
    output,
    plane::{Outcome, moment},
    sanitize,
};

const WAIT: Duration = Duration::from_secs(30);
/// Between two tries while the orchestrator is away.
const PAUSE: Duration = Duration::from_secs(1);

/// Each as a line; with `follow` for ever, from the last one again when the connection broke.
pub async fn run(client: &UserClient, globals: &Globals, args: &AuditTail) -> Outcome {
    let mut filter = args.filter.filter();
    if filter.since.is_none() && !args.filter.is_narrow() {
        filter.since = Some(OffsetDateTime::now_utc() - time::Duration::HOUR);
    }
    let (mut rest, mut after) = (Some(0), 0);
    while let Some(page) = super::next_page(client, &mut rest, &filter).await? {
        print(globals, page.items)?;
        after = page.next_cursor;
    }
    if !args.follow {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        match client.raw_audit(after, &filter, WAIT).await {
            Ok(page) => {
                // To read the trail is in it too: what only we caused is no news to hurry for.
                let is_ours = page
                    .items
                    .iter()
                    .all(|record| record["action"] == "audit.read");
                print(globals, page.items)?;
                after = page.next_cursor;
                if is_ours {
                    sleep(PAUSE).await;
                }
            }
            Err(error) if error.is_passing() => sleep(PAUSE).await,
            Err(error) => return Err(error.into()),
        }
    }
}

fn print(globals: &Globals, records: Vec<Value>) -> Result<(), Failure> {
    for record in records {
        match globals.output {
            Format::Json => output::json_line(&record)?,
            Format::Table => {
                let record: AuditRecord = serde_json::from_value(record).map_err(|error| {
                    Failure::internal(format!("a record can't be read: {error}"))
                })?;
                output::line(&sanitize::line(&format!(
                    "{}  {}  {}",
                    record.cursor,
                    moment(record.at),
                    headline(&record)
                )))?;
            }
        }
    }
    Ok(())
}

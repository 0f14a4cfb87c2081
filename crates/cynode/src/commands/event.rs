//! `event`: lists and follows events.

use std::{process::ExitCode, time::Duration};

use cynode_api::{Event as ApiEvent, TaskId};
use cynode_client::UserClient;
use tokio::time::sleep;

use super::{CommandResult, format_time, print_list};
use crate::{
    cli::{Event, EventFilter, Globals, OutputFormat},
    connect,
    failure::Failure,
    output::{self, TableStyle},
    resolve, sanitize,
};

/// How long the server holds a request until there are new events.
const POLL_TIMEOUT: Duration = Duration::from_secs(30);
/// Between attempts while the orchestrator is unreachable.
const RETRY_DELAY: Duration = Duration::from_secs(1);

pub async fn run(globals: &Globals, command: Event) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Event::List(filter) => {
            let task = task(&client, &filter).await?;
            let mut events = Vec::new();
            let mut after = filter.after;
            loop {
                let page = client.events(after, task, Duration::ZERO).await?;
                if page.items.is_empty() && page.next_cursor == after {
                    break;
                }
                after = page.next_cursor;
                events.extend(page.items);
            }
            print_list(
                globals,
                // Events are for programs too: their ids stay whole.
                TableStyle::new(true),
                &events,
                ["CURSOR", "AT", "TYPE", "STATE", "SUBJECT", "TASK"],
                |event: &ApiEvent| {
                    [
                        event.cursor.to_string(),
                        format_time(event.at),
                        event.kind.clone(),
                        event.state.clone(),
                        subject(event),
                        event.task_id.to_string(),
                    ]
                },
            )
        }
        Event::Follow(filter) => follow(&client, globals, &filter).await,
    }
}

async fn task(client: &UserClient, filter: &EventFilter) -> Result<Option<TaskId>, Failure> {
    resolve::optional(filter.task.as_deref(), async |task| {
        resolve::task(client, task).await
    })
    .await
}

fn subject(event: &ApiEvent) -> String {
    event
        .job_id
        .map(|id| id.to_string())
        .or_else(|| event.session_id.map(|id| id.to_string()))
        .unwrap_or_default()
}

/// Prints a line for each event, forever. Reconnects after the last printed event.
async fn follow(
    client: &UserClient,
    globals: &Globals,
    filter: &EventFilter,
) -> Result<ExitCode, Failure> {
    let task = task(client, filter).await?;
    let mut after = filter.after;
    let mut connected = false;
    loop {
        let page = match client.events(after, task, POLL_TIMEOUT).await {
            Ok(page) => page,
            Err(error) if connected && error.is_transient() => {
                sleep(RETRY_DELAY).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        connected = true;
        after = page.next_cursor;
        for event in &page.items {
            match globals.output {
                OutputFormat::Json => output::json_line(event)?,
                OutputFormat::Table => {
                    let line = format!(
                        "{}  {}  {}  {}  {}",
                        event.cursor,
                        format_time(event.at),
                        event.kind,
                        event.state,
                        subject(event)
                    );
                    output::line(&sanitize::line(&line))?;
                }
            }
        }
    }
}

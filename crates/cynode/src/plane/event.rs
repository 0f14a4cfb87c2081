//! `event`.

use std::{process::ExitCode, time::Duration};

use cynode_api::Event as Object;
use cynode_client::UserClient;
use tokio::time::sleep;

use super::{Outcome, list, moment};
use crate::{
    cli::{Event, EventFilter, Format, Globals},
    connect,
    failure::Failure,
    output, sanitize,
};

const WAIT: Duration = Duration::from_secs(30);
/// Between two tries while the orchestrator is away.
const PAUSE: Duration = Duration::from_secs(1);

pub async fn run(globals: &Globals, command: Event) -> Outcome {
    let client = connect::plane(globals)?;
    match command {
        Event::List(filter) => {
            let mut events = Vec::new();
            let mut after = filter.after;
            loop {
                let page = client.events(after, filter.task, Duration::ZERO).await?;
                if page.items.is_empty() && page.next_cursor == after {
                    break;
                }
                after = page.next_cursor;
                events.extend(page.items);
            }
            list(
                globals,
                &events,
                ["CURSOR", "AT", "TYPE", "STATE", "OF", "TASK"],
                |event: &Object| {
                    [
                        event.cursor.to_string(),
                        moment(event.at),
                        event.kind.clone(),
                        event.state.clone(),
                        of(event),
                        event.task_id.to_string(),
                    ]
                },
            )
        }
        Event::Follow(filter) => follow(&client, globals, &filter).await,
    }
}

fn of(event: &Object) -> String {
    event
        .job_id
        .map(|id| id.to_string())
        .or_else(|| event.session_id.map(|id| id.to_string()))
        .unwrap_or_default()
}

/// Each as a line, for ever; from the last one again when the connection broke.
async fn follow(
    client: &UserClient,
    globals: &Globals,
    filter: &EventFilter,
) -> Result<ExitCode, Failure> {
    let mut after = filter.after;
    let mut seen = false;
    loop {
        let page = match client.events(after, filter.task, WAIT).await {
            Ok(page) => page,
            Err(error) if seen && error.is_passing() => {
                sleep(PAUSE).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        seen = true;
        after = page.next_cursor;
        for event in &page.items {
            match globals.output {
                Format::Json => output::json_line(event)?,
                Format::Table => {
                    let line = format!(
                        "{}  {}  {}  {}  {}",
                        event.cursor,
                        moment(event.at),
                        event.kind,
                        event.state,
                        of(event)
                    );
                    output::line(&sanitize::line(&line))?;
                }
            }
        }
    }
}

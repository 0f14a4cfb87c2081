//! `session watch`: prints changes of files as they happen.

use std::process::ExitCode;

use cynode_api::{FileEvent, FileEventKind, SessionState};
use cynode_client::SessionClient;

use crate::{
    cli::{Globals, OutputFormat, Watch},
    failure::Failure,
    output,
    sanitize::line,
};

pub async fn run(
    client: &SessionClient,
    globals: &Globals,
    args: Watch,
) -> Result<ExitCode, Failure> {
    let id = super::target(client, args.session.as_deref()).await?;
    loop {
        let mut events = client.watch_files(id, &args.path).await?;
        output::message(&format!(
            "watching {}; Ctrl-C ends it",
            line(&args.path.to_string_lossy())
        ));
        while let Some(change) = events.next().await? {
            print(globals, &change)?;
        }
        // A watch ends with its session, and after an hour.
        if client.get_session(id).await?.state != SessionState::Running {
            output::message("the session has ended");
            return Ok(ExitCode::SUCCESS);
        }
        output::message("the watch begins anew; changes in between are not shown");
    }
}

fn print(globals: &Globals, change: &FileEvent) -> std::io::Result<()> {
    if globals.output == OutputFormat::Json {
        return output::json_line(change);
    }
    let path = line(&change.path);
    let text = match change.kind {
        FileEventKind::Created => format!("created {path}"),
        FileEventKind::Modified => format!("modified {path}"),
        FileEventKind::Deleted => format!("deleted {path}"),
        FileEventKind::Moved => {
            let from = change.from.as_deref().unwrap_or_default();
            format!("moved {path} from {}", line(from))
        }
        FileEventKind::Overflow => "overflow: some changes are not shown".to_owned(),
    };
    output::line(&text)
}

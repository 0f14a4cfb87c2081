//! `mcp`: connects an MCP client on standard input and output with the gateway of the server.
//!
//! The user's credential makes and renews the agent's token and brings the directory in. Everything
//! that the client asks for goes with that token, which is good for one task. Only messages of the
//! protocol go to standard output.

pub mod agent;
mod bridge;
mod lines;
mod message;
mod refusal;
mod upstream;
mod workspace;

use std::{process::ExitCode, sync::Arc};

use serde_json::json;

pub use upstream::PATH;

use self::{
    bridge::Bridge,
    upstream::{AgentOptions, Upstream},
    workspace::{SessionOptions, Workspace},
};
use crate::{
    bring,
    cli::{Globals, Mcp},
    commands::{CommandResult, print_done},
    directories,
    failure::Failure,
    sanitize,
};

pub async fn run(globals: &Globals, args: Mcp) -> CommandResult {
    let workspace = args.workspace.as_deref().map(bring::root).transpose()?;
    let directory = match &workspace {
        Some(directory) => directory.clone(),
        None => bring::root(&std::env::current_dir()?)?,
    };
    let options = AgentOptions {
        directory,
        uploads_directory: workspace.is_some(),
        task: args.task,
    };
    let upstream = Arc::new(Upstream::new(globals, state_directory()?, options.clone()));
    if args.forget {
        let was_known = workspace::forget(&upstream).await?;
        let directory = sanitize::line(&options.directory.to_string_lossy());
        let note = if was_known {
            format!("forgot the agent of {directory}; the next one starts over")
        } else {
            format!("no agent of {directory} is known")
        };
        return print_done(globals, &json!({ "forgotten": was_known }), &note);
    }
    let session = SessionOptions {
        directory: workspace,
        image: args.image,
        gitignore: args.gitignore,
    };
    let workspace = Workspace::new(Arc::clone(&upstream), session);
    let (output, writer) = lines::write_to(tokio::io::stdout());
    let bridge = Bridge::new(upstream, workspace, output);
    bridge.run(tokio::io::stdin(), writer).await;
    Ok(ExitCode::SUCCESS)
}

pub fn state_directory() -> Result<std::path::PathBuf, Failure> {
    directories::client_state().ok_or_else(|| {
        Failure::usage("no home directory: HOME and XDG_STATE_HOME are not set")
            .remedy("Set HOME to an absolute path.")
    })
}

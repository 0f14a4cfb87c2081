//! `session`: manages sandboxes that run many commands.

mod control;
mod cp;
pub mod create;
mod diff;
mod end;
pub mod exec;
pub mod fetch;
mod follow;
mod input;
mod list;
mod pull;
mod shell;
pub mod stdio;
pub mod transfer;
mod watch;

use std::process::ExitCode;

use cynode_api::SessionId;
use cynode_client::SessionClient;

use crate::{
    cli::{Globals, Session},
    connect,
    directories::Directories,
    failure::Failure,
    resolve,
};

pub async fn run(globals: &Globals, command: Session) -> Result<ExitCode, Failure> {
    let client = connect::client(globals).await?;
    match command {
        Session::Create(args) => create::create(&client, globals, *args).await,
        Session::Resume(args) => {
            let id = target(&client, args.session.as_deref()).await?;
            create::resume(&client, globals, id).await
        }
        Session::Exec(args) => {
            let id = target(&client, args.session.as_deref()).await?;
            exec::run(&client, globals, id, args).await
        }
        Session::Shell(args) => {
            let id = target(&client, args.session.as_deref()).await?;
            shell::run(&client, id, args).await
        }
        Session::List(args) => list::list(&client, globals, args).await,
        Session::Show(args) => {
            let id = target(&client, args.session.as_deref()).await?;
            list::show(&client, globals, id).await
        }
        Session::End(args) => end::run(&client, globals, args).await,
        Session::Cp(args) => cp::run(&client, &args).await,
        Session::Logs(args) => follow::logs(&client, globals, args).await,
        Session::Attach(args) => follow::attach(&client, globals, args).await,
        Session::Kill(args) => control::kill(&client, globals, args).await,
        Session::Extend(args) => control::extend(&client, globals, args).await,
        Session::Watch(args) => watch::run(&client, globals, args).await,
        Session::Diff(args) => diff::run(&client, globals, args).await,
        Session::Pull(args) => pull::run(&client, globals, args).await,
    }
}

/// The session that a command names, or that of the current directory.
async fn target(client: &SessionClient, session: Option<&str>) -> Result<SessionId, Failure> {
    resolve::session(client, session.unwrap_or(".")).await
}

/// Remembers a session as that of the current directory.
fn remember(client: &SessionClient, id: SessionId) {
    if let Some(directories) = Directories::of(client.base()) {
        directories.remember(id);
    }
}

/// The exit code that a shell would report: the command's, or 128 plus the signal's number.
pub fn exit_code(code: Option<i32>, signal: Option<&str>) -> Option<ExitCode> {
    let number = match (code, signal) {
        (Some(code), _) => code & 0xff,
        (None, Some(signal)) => 128 + cynode_api::SignalName::number_of(signal).unwrap_or(0),
        (None, None) => return None,
    };
    Some(ExitCode::from(u8::try_from(number & 0xff).unwrap_or(1)))
}

//! `session`: manages sandboxes that run many commands.

mod cp;
mod create;
mod exec;
mod input;
mod list;
mod shell;
pub mod stdio;
pub mod transfer;

use std::process::ExitCode;

use crate::{
    cli::{Globals, Session},
    connect,
    failure::Failure,
};

pub async fn run(globals: &Globals, command: Session) -> Result<ExitCode, Failure> {
    let client = connect::client(globals).await?;
    match command {
        Session::Create(args) => create::create(&client, globals, *args).await,
        Session::Resume { id } => create::resume(&client, globals, id).await,
        Session::Exec(args) => exec::run(&client, globals, args).await,
        Session::Shell(args) => shell::run(&client, args).await,
        Session::List(args) => list::list(&client, globals, args).await,
        Session::Show { id } => list::show(&client, globals, id).await,
        Session::End(args) => list::end(&client, globals, args).await,
        Session::Cp(args) => cp::run(&client, &args).await,
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

//! `cynode`: starts and stops CyNode on this machine, and is the client of a running one.
#![forbid(unsafe_code)]
#![allow(unreachable_pub, reason = "a binary has no outside")]

mod archive;
mod audit;
mod backup;
mod cli;
mod connect;
mod doctor;
mod down;
mod failure;
mod output;
mod parse;
mod plane;
mod policy;
mod postgres;
mod roles;
mod sanitize;
mod session;
mod staged;
mod state;
mod status;
mod up;

use std::process::ExitCode;

use crate::{
    cli::{Cli, Command, Globals, Invocation, Role, RoleCli},
    failure::Failure,
};

fn main() -> ExitCode {
    // Only fails when one is installed already, and then that one counts.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let invocation = match Invocation::parse(std::env::args_os()) {
        Ok(invocation) => invocation,
        Err(error) => {
            return failure::usage(&error, failure::format_of(std::env::args_os().skip(1)));
        }
    };
    let format = invocation.globals().output;
    match run(invocation) {
        Ok(code) => code,
        Err(failure) => failure.report(format),
    }
}

fn run(invocation: Invocation) -> Result<ExitCode, Failure> {
    let mut builder = match invocation {
        Invocation::Role(RoleCli {
            role: Role::Worker(_) | Role::Orchestrator(_),
            ..
        }) => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(threads());
            builder
        }
        // The rest waits for others. `up` also needs its children started by the main thread: they end with that thread.
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().build()?;
    let result = runtime.block_on(Box::pin(async {
        match invocation {
            Invocation::Command(cli) => dispatch(cli).await,
            Invocation::Role(cli) => play(cli).await,
        }
    }));
    // A read of the terminal can't be cancelled; don't wait for it.
    runtime.shutdown_background();
    result
}

/// Half of the processors: a call goes from one process to the next, and a thread that is woken for each step of it takes the processor
/// from the one that the call waits for. On two cores an exec takes a fifth less with one thread than with two.
fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let wanted = std::env::var("TOKIO_WORKER_THREADS")
        .ok()
        .and_then(|text| text.parse().ok());
    wanted.unwrap_or(cores / 2).max(1)
}

async fn dispatch(cli: Cli) -> Result<ExitCode, Failure> {
    let globals = cli.globals;
    // These find whom to talk to by other means, and say themselves what is wrong with it.
    let is_local = matches!(
        cli.command,
        Command::Up(_)
            | Command::Down(_)
            | Command::Status
            | Command::Doctor(_)
            | Command::Backup(_)
    );
    match perform(&globals, cli.command).await {
        Err(failure) if !is_local => Err(connect::explain(&globals, failure).await),
        result => result,
    }
}

async fn perform(globals: &Globals, command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Up(args) => up::run(globals, args).await,
        Command::Down(args) => down::run(globals, &args).await,
        Command::Status => status::run(globals).await,
        Command::Doctor(args) => doctor::run(globals, &args).await,
        Command::Backup(args) => backup::run(globals, &args).await,
        Command::Run(args) => plane::run::run(globals, args).await,
        Command::Job { command } => plane::job::run(globals, command).await,
        Command::Task { command } => plane::task::run(globals, command).await,
        Command::Image { command } => plane::image::run(globals, command).await,
        Command::Node { command } => plane::node::run(globals, command).await,
        Command::Token { command } => plane::token::run(globals, command).await,
        Command::Setting { command } => plane::setting::setting(globals, command).await,
        Command::Preference { command } => plane::setting::preference(globals, command).await,
        Command::Artifact { command } => plane::artifact::run(globals, command).await,
        Command::Event { command } => plane::event::run(globals, command).await,
        Command::Audit { command } => audit::run(globals, command).await,
        Command::Policy { command } => policy::run(globals, command).await,
        Command::Session { command } => session::run(globals, command).await,
        Command::Completions { shell } => {
            clap_complete::generate(
                shell,
                &mut <Cli as clap::CommandFactory>::command(),
                "cynode",
                &mut std::io::stdout(),
            );
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn play(cli: RoleCli) -> Result<ExitCode, Failure> {
    match cli.role {
        Role::Worker(args) => roles::run_worker(&cli.globals, args).await,
        Role::Orchestrator(args) => roles::run_orchestrator(&cli.globals, args).await,
        Role::Postgres { parent } => roles::run_postgres(&cli.globals, parent),
    }
}

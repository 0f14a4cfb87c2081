//! `cynode`: starts and stops CyNode on this machine, and is the command-line client.
#![forbid(unsafe_code)]
#![allow(unreachable_pub, reason = "a binary has no outside")]

mod apply;
mod archive;
mod audit;
mod backup;
mod bring;
mod cli;
mod clients;
mod commands;
mod connect;
mod directories;
mod doctor;
mod down;
mod failure;
mod git_program;
mod mcp;
mod output;
mod parse;
mod policy;
mod postgres;
mod pulled;
mod resolve;
mod retry;
mod roles;
mod sanitize;
mod secret_input;
mod session;
mod staged;
mod state;
mod status;
mod terminal;
mod umask;
mod up;

use std::process::ExitCode;

use crate::{
    cli::{Cli, Command, Globals, Invocation, RoleCli, RoleCommand},
    failure::Failure,
};

fn main() -> ExitCode {
    if let Some(exit) = run_internal() {
        return exit;
    }
    // Fails only if a provider is installed already; that one is used then.
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

/// The programs that the git role starts, and git for it. They are in no help and need no runtime.
fn run_internal() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let run = match arguments.next()?.to_str()? {
        "egress-runner" => cynode_egress::run_runner,
        "git-credential" => cynode_egress::run_credential_helper,
        _ => return None,
    };
    Some(run(&arguments.collect::<Vec<_>>()))
}

fn run(invocation: Invocation) -> Result<ExitCode, Failure> {
    if let Invocation::Role(RoleCli {
        globals,
        role: RoleCommand::Egress(args),
    }) = &invocation
    {
        return roles::run_egress(globals, args);
    }
    let mut builder = match invocation {
        Invocation::Role(RoleCli {
            role: RoleCommand::Worker(_) | RoleCommand::Orchestrator(_),
            ..
        }) => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(threads());
            builder
        }
        // Clients mostly wait. `up` must start its children on the main thread: they are signalled
        // when the thread that started them exits.
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().build()?;
    let result = runtime.block_on(Box::pin(async {
        match invocation {
            Invocation::Command(cli) => dispatch(cli).await,
            Invocation::Role(cli) => run_role(cli).await,
        }
    }));
    // A read of the terminal can't be cancelled: don't wait for it.
    runtime.shutdown_background();
    result
}

/// Half of the processors: a call passes from process to process, and an extra thread that wakes
/// for each step competes with the process that the call waits for. On two cores an exec takes a
/// fifth less time with one thread than with two.
fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let configured = std::env::var("TOKIO_WORKER_THREADS")
        .ok()
        .and_then(|text| text.parse().ok());
    configured.unwrap_or(cores / 2).max(1)
}

async fn dispatch(cli: Cli) -> Result<ExitCode, Failure> {
    let globals = cli.globals;
    // These commands find their server themselves and report its problems.
    let is_local = matches!(
        cli.command,
        Command::Up(_)
            | Command::Down(_)
            | Command::Status
            | Command::Doctor(_)
            | Command::Backup(_)
    );
    match run_command(&globals, cli.command).await {
        Err(failure) if !is_local => Err(connect::explain(&globals, failure).await),
        result => result,
    }
}

async fn run_command(globals: &Globals, command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Up(args) => up::run(globals, args).await,
        Command::Down(args) => down::run(globals, &args).await,
        Command::Status => status::run(globals).await,
        Command::Doctor(args) => doctor::run(globals, &args).await,
        Command::Backup(args) => backup::run(globals, &args).await,
        Command::Connect(args) => clients::run(globals, args).await,
        Command::Mcp(args) => mcp::run(globals, args).await,
        Command::Run(args) => commands::run::run(globals, args).await,
        Command::Job { command } => commands::job::run(globals, command).await,
        Command::Task { command } => commands::task::run(globals, command).await,
        Command::Image { command } => commands::image::run(globals, command).await,
        Command::Node { command } => commands::node::run(globals, command).await,
        Command::Project { command } => commands::project::run(globals, command).await,
        Command::User { command } => commands::user::run(globals, command).await,
        Command::Group { command } => commands::group::run(globals, command).await,
        Command::Token { command } => commands::token::run(globals, command).await,
        Command::Setting { command } => commands::setting::setting(globals, command).await,
        Command::Preference { command } => commands::setting::preference(globals, command).await,
        Command::Artifact { command } => commands::artifact::run(globals, command).await,
        Command::Repository { command } => commands::repository::run(globals, command).await,
        Command::Credential { command } => commands::credential::run(globals, command).await,
        Command::Promote(args) => commands::promote::run(globals, *args).await,
        Command::Promotion { command } => commands::promotion::run(globals, command).await,
        Command::Event { command } => commands::event::run(globals, command).await,
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

async fn run_role(cli: RoleCli) -> Result<ExitCode, Failure> {
    match cli.role {
        RoleCommand::Worker(args) => roles::run_worker(&cli.globals, args).await,
        RoleCommand::Orchestrator(args) => roles::run_orchestrator(&cli.globals, args).await,
        RoleCommand::Egress(args) => roles::run_egress(&cli.globals, &args),
        RoleCommand::Postgres { parent } => roles::run_postgres(&cli.globals, parent),
    }
}

//! `make bench`: the cost of sessions, compared with Podman's own ways into the same container.
//!
//! One worker with its own state directory and Podman store, with interleaved rounds, so that noise
//! affects all sides alike. Nothing asserts a time; `benches/README.md` explains the table.
#![forbid(unsafe_code)]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a command-line tool that starts programs as people do"
)]
#![allow(
    clippy::cast_precision_loss,
    reason = "sizes and times as people read them"
)]

mod bombs;
mod create;
mod exec;
mod first_token;
mod jobs;
mod memory;
mod report;
mod throughput;

use anyhow::{Context as _, Result};
use clap::Parser;
use cynode_bench::{
    Output, clean_up, machine, ours, ours::Ours, print_progress, rivals, rivals::Rivals, samples,
    through, through::Stack,
};
use cynode_tests::{Options, World};

use crate::report::Report;

/// Measures sessions against Podman, in one run on this machine.
#[derive(Debug, Parser)]
struct Arguments {
    /// Rounds of measurements in milliseconds; slower ones get a fraction of them.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    rounds: u32,
    /// Run for less time, with less accurate figures.
    #[arg(long)]
    quick: bool,
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

/// The number of rounds and the sizes.
#[derive(Clone, Copy, Debug)]
struct Plan {
    exec_rounds: u32,
    /// Rounds of slow commands such as `podman exec`.
    slow_rounds: u32,
    create_rounds: u32,
    transfer_rounds: u32,
    transfer_bytes: usize,
    idle_sessions: [usize; 3],
    /// Sessions created concurrently.
    burst: usize,
    /// How long the bombs run.
    bomb_seconds: u64,
    /// Jobs, and the steps of each.
    job_rounds: u32,
    job_steps: usize,
    /// Jobs of one step, for the start of the runner.
    job_starts: u32,
}

impl Plan {
    fn new(rounds: u32, quick: bool) -> Self {
        let exec_rounds = if quick { rounds.min(40) } else { rounds };
        Self {
            exec_rounds,
            slow_rounds: (exec_rounds * 3 / 20).max(5),
            create_rounds: if quick { 4 } else { 15 },
            transfer_rounds: if quick { 2 } else { 5 },
            transfer_bytes: if quick { 16 << 20 } else { 64 << 20 },
            idle_sessions: if quick { [1, 3, 6] } else { [1, 10, 50] },
            burst: if quick { 10 } else { 100 },
            bomb_seconds: if quick { 10 } else { 60 },
            job_rounds: if quick { 2 } else { 5 },
            job_steps: if quick { 200 } else { 1_000 },
            job_starts: if quick { 10 } else { 50 },
        }
    }
}

fn main() -> Result<()> {
    let called: Vec<_> = std::env::args_os().skip(1).collect();
    if let [name, server] = called.as_slice()
        && name == first_token::PROBE
    {
        return first_token::probe(server.as_ref());
    }
    let arguments = Arguments::parse();
    // One thread for the client: it only waits for servers, and a hop between threads would count
    // as latency.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let report = runtime.block_on(run(Plan::new(arguments.rounds, arguments.quick)))?;
    match arguments.output {
        Output::Table => println!("{report}"),
        Output::Json => println!("{}", serde_json::to_string_pretty(&report.json())?),
    }
    Ok(())
}

async fn run(plan: Plan) -> Result<Report> {
    let world = World::new()?;
    let stack = Stack::start(&world)
        .await
        .context("starting a stack of its own")?;
    let mut report = Report::new(machine::Facts::collect(&world)?);

    print_progress("exec");
    let session = stack.session().await?;
    let sandbox = stack.ours.sandbox(session)?;
    let rivals = Rivals::of(&world, &sandbox).await?;
    report.exec = exec::measure(&plan, &stack, session, &rivals).await?;
    report.parallel = exec::in_parallel(&plan, &stack.ours).await?;
    print_progress("streams and files");
    report.passed = stack.pass(session).await?;
    report.transfers =
        throughput::measure(&plan, &stack.ours, session, &rivals, world.directory()).await?;
    let mut ours = stack.ours;
    ours.end(session).await?;

    print_progress("steps of jobs");
    report.jobs = jobs::measure(&plan, &ours).await?;
    print_progress("first tokens");
    report.first_token = first_token::measure(&plan).await?;
    print_progress("create and end");
    let beside = World::new()?;
    let mut pooled = Ours::start(&beside, &Options::default().set("pool_size", "1")).await?;
    (report.create, report.end) = create::measure(&plan, &ours, &pooled, &rivals, &world).await?;
    pooled.shut_down().await?;
    clean_up(beside).await;
    report.burst = create::burst(&plan, &ours, &world).await?;
    print_progress("a neighbour of ten bombs");
    report.neighbour = bombs::measure(&plan, &ours).await?;
    ours.shut_down().await?;
    clean_up(world).await;

    print_progress("memory of idle sessions");
    // A fresh worker: free heap in a busy one would hide the growth.
    let world = World::new()?;
    let mut ours = Ours::start(&world, &Options::default()).await?;
    report.memory = memory::measure(&plan, &ours).await?;
    ours.shut_down().await?;
    clean_up(world).await;
    Ok(report)
}

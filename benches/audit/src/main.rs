//! `make bench-audit`: the cost of the audit trail, compared with a build without one, and the cost
//! of a long trail.
//!
//! All stacks run in one process with interleaved rounds, so that noise affects them alike. Nothing
//! asserts a time; `benches/README.md` explains the figures.
#![forbid(unsafe_code)]
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a command-line tool that starts programs as people do"
)]
#![allow(
    clippy::cast_precision_loss,
    reason = "times and rates as people read them"
)]

mod cost;
mod fill;
mod growth;
mod load;
mod report;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use cynode_bench::{Output, clean_up, machine::Facts, ours, print_progress, through::Stack};
use cynode_tests::World;

use crate::report::Report;

/// Measures the audit trail: its cost per exec, the sustained rate, the speed of verification, and
/// the effect of its length.
#[derive(Debug, Parser)]
struct Arguments {
    /// Rounds of each kind of exec.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    rounds: u32,
    /// Number of records in the long trail.
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1_000..=1_000_000_000))]
    records: u64,
    /// Seconds of load from twenty concurrent sessions.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    // One thread for the client: it only waits for servers, and a hop between threads would count
    // as latency.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let report = runtime.block_on(run(&arguments))?;
    match arguments.output {
        Output::Table => println!("{report}"),
        Output::Json => println!("{}", serde_json::to_string_pretty(&report.json())?),
    }
    Ok(())
}

async fn run(arguments: &Arguments) -> Result<Report> {
    let program = ours::program()?;
    let unaudited = program.with_file_name("cynode-unaudited");
    ensure!(
        unaudited.is_file(),
        "{} is missing; 'make bench-audit' builds it",
        unaudited.display()
    );
    let (world, beside) = (World::new()?, World::new()?);
    let facts = Facts::collect(&world)?;
    let mut audited = Stack::start(&world).await.context("starting a stack")?;
    print_progress("exec, one after the other");
    let alone = cost::alone(arguments.rounds, &world, &audited).await?;
    let mut without = Stack::of(&beside, &unaudited)
        .await
        .context("starting a stack that keeps no audit trail")?;

    print_progress("what the trail adds to an exec");
    let cost = cost::measure(arguments.rounds, &world, &audited, &without).await?;
    print_progress("twenty sessions at once");
    let load = load::measure(arguments.seconds, &audited).await?;
    let load_without = load::measure(arguments.seconds, &without).await?;
    without.ours.shut_down().await?;
    clean_up(beside).await;

    print_progress(&format!(
        "filling a trail with {} records",
        arguments.records
    ));
    let filled = fill::fill(&audited, arguments.records).await?;
    let beside = World::new()?;
    let mut empty = Stack::start(&beside)
        .await
        .context("starting a stack whose trail is empty")?;
    print_progress("exec beside a long trail and an empty one");
    let growth = growth::measure(arguments.rounds, &audited, &empty).await?;
    empty.ours.shut_down().await?;
    clean_up(beside).await;
    let read = growth::read(&audited).await?;
    print_progress("verifying it");
    let verified = growth::verify(&audited).await?;
    audited.ours.shut_down().await?;
    clean_up(world).await;
    Ok(Report {
        facts,
        alone,
        cost,
        load,
        load_without,
        filled,
        growth,
        read,
        verified,
    })
}

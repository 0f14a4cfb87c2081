//! The table of escape attempts by runtime, from what the tests of the last run wrote below `target/escape`.

use std::{collections::BTreeMap, fmt::Write as _};

use anyhow::{Context as _, Result, ensure};

/// Prints how many attempts each runtime refused, by topic, and writes every attempt into `target/escape.md`.
pub(crate) fn table() -> Result<()> {
    let directory = crate::root().join("target/escape");
    let mut runtimes = Vec::new();
    let mut outcomes: BTreeMap<(String, String), BTreeMap<String, String>> = BTreeMap::new();
    for entry in fs_err::read_dir(&directory).context("no attempts were recorded; run the tests first")? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        let runtime = entry.file_name().to_string_lossy().into_owned();
        for topic in fs_err::read_dir(entry.path())? {
            let topic = topic?;
            for line in fs_err::read_to_string(topic.path())?.lines() {
                let (attempt, outcome) = line.split_once('\t').with_context(|| format!("{}: {line}", topic.path().display()))?;
                let key = (topic.file_name().to_string_lossy().into_owned(), attempt.to_owned());
                outcomes.entry(key).or_default().insert(runtime.clone(), outcome.to_owned());
            }
        }
        runtimes.push(runtime);
    }
    runtimes.sort();
    ensure!(!outcomes.is_empty(), "no attempts were recorded; run the tests first");

    let mut text = format!("| topic | attempt | {} |\n|---|---|{}\n", runtimes.join(" | "), "---|".repeat(runtimes.len()));
    let mut counts: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    for ((topic, attempt), by_runtime) in &outcomes {
        let cells: Vec<&str> = runtimes.iter().map(|runtime| by_runtime.get(runtime).map_or("not tried", String::as_str)).collect();
        writeln!(text, "| {topic} | {} | {} |", attempt.replace('|', "\\|"), cells.join(" | "))?;
        for runtime in by_runtime.keys() {
            *counts.entry(topic).or_default().entry(runtime).or_default() += 1;
        }
    }
    let path = crate::root().join("target/escape.md");
    fs_err::write(&path, text)?;
    println!("{:<16} {}", "refused", runtimes.join("  "));
    for (topic, by_runtime) in &counts {
        let cells: Vec<String> =
            runtimes.iter().map(|runtime| format!("{:>width$}", by_runtime.get(runtime.as_str()).unwrap_or(&0), width = runtime.len())).collect();
        println!("{topic:<16} {}", cells.join("  "));
    }
    println!("every attempt: {}", path.display());
    Ok(())
}

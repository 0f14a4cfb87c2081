//! The table of escape attempts by runtime, from the records of the last test run below
//! `target/escape`.

use std::{collections::BTreeMap, fmt::Write as _, path::Path};

use anyhow::{Context as _, Result, bail, ensure};

/// All supported runtimes, as the tests name them. Every attempt must be tried on each.
const RUNTIMES: [&str; 3] = ["podman-root", "podman-rootless", "docker"];

/// The prefix of an outcome: the attempt was refused, or only a limit would have stopped it that
/// this host does not enforce. A worker refuses to run without that limit unless the configuration
/// allows it by name.
const OUTCOMES: [&str; 2] = ["refused", "not enforced, refused by default"];

/// The outcome on each runtime, by topic and attempt.
type Outcomes = BTreeMap<(String, String), BTreeMap<String, String>>;

/// Prints the number of attempts that each runtime refused, by topic, and writes every attempt to
/// `target/escape.md`. Fails if an attempt was not tried on every runtime.
pub(crate) fn table() -> Result<()> {
    let outcomes = read(&crate::root().join("target/escape"))?;
    let mut text = format!(
        "| topic | attempt | {} |\n|---|---|{}\n",
        RUNTIMES.join(" | "),
        "---|".repeat(RUNTIMES.len())
    );
    let mut counts: BTreeMap<&str, BTreeMap<&str, [usize; OUTCOMES.len()]>> = BTreeMap::new();
    for ((topic, attempt), by_runtime) in &outcomes {
        let cells =
            RUNTIMES.map(|runtime| by_runtime.get(runtime).map_or("not tried", String::as_str));
        writeln!(
            text,
            "| {topic} | {} | {} |",
            attempt.replace('|', "\\|"),
            cells.join(" | ")
        )?;
        for (runtime, outcome) in by_runtime {
            let kind = OUTCOMES
                .iter()
                .position(|known| outcome.starts_with(known))
                .with_context(|| format!("{topic}: {attempt}: {outcome}"))?;
            counts.entry(topic).or_default().entry(runtime).or_default()[kind] += 1;
        }
    }
    let path = crate::root().join("target/escape.md");
    fs_err::write(&path, text)?;
    println!(
        "{:<16} {}",
        "refused",
        RUNTIMES.map(|runtime| format!("{runtime:>22}")).concat()
    );
    for (topic, by_runtime) in &counts {
        let cell = |runtime: &str| match by_runtime.get(runtime) {
            Some([refused, 0]) => format!("{refused}"),
            Some([refused, unenforced]) => format!("{refused}, not enforced {unenforced}"),
            None => "-".to_owned(),
        };
        println!(
            "{topic:<16} {}",
            RUNTIMES
                .map(|runtime| format!("{:>22}", cell(runtime)))
                .concat()
        );
    }
    println!("every attempt: {}", path.display());
    let missing = missing(&outcomes);
    ensure!(missing.is_empty(), "not tried:\n{}", missing.join("\n"));
    Ok(())
}

fn read(directory: &Path) -> Result<Outcomes> {
    let mut outcomes = Outcomes::new();
    for entry in
        fs_err::read_dir(directory).context("no attempts were recorded; run the tests first")?
    {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        let runtime = entry.file_name().to_string_lossy().into_owned();
        ensure!(
            RUNTIMES.contains(&runtime.as_str()),
            "{}: unknown runtime",
            entry.path().display()
        );
        for topic in fs_err::read_dir(entry.path())? {
            let topic = topic?;
            for line in fs_err::read_to_string(topic.path())?.lines() {
                let Some((attempt, outcome)) = line.split_once('\t') else {
                    bail!("{}: {line}", topic.path().display())
                };
                let key = (
                    topic.file_name().to_string_lossy().into_owned(),
                    attempt.to_owned(),
                );
                outcomes
                    .entry(key)
                    .or_default()
                    .insert(runtime.clone(), outcome.to_owned());
            }
        }
    }
    ensure!(
        !outcomes.is_empty(),
        "no attempts were recorded; run the tests first"
    );
    Ok(outcomes)
}

/// Attempts that were not tried on every runtime.
fn missing(outcomes: &Outcomes) -> Vec<String> {
    let lacking = |by_runtime: &BTreeMap<String, String>| {
        RUNTIMES
            .into_iter()
            .filter(|runtime| !by_runtime.contains_key(*runtime))
            .collect::<Vec<_>>()
    };
    let found = outcomes
        .iter()
        .map(|((topic, attempt), by_runtime)| (topic, attempt, lacking(by_runtime)));
    found
        .filter(|(.., lacking)| !lacking.is_empty())
        .map(|(topic, attempt, lacking)| format!("{topic}: {attempt}: {}", lacking.join(", ")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, runtime: &str, lines: &str) {
        fs_err::create_dir_all(directory.join(runtime)).expect("a directory");
        fs_err::write(directory.join(runtime).join("topic"), lines).expect("a file");
    }

    #[test]
    fn an_attempt_missing_on_a_runtime_is_reported() {
        let directory = tempfile::tempdir().expect("a directory");
        let missed = || missing(&read(directory.path()).expect("reads"));
        write(
            directory.path(),
            "podman-root",
            "one\trefused\ntwo\trefused, errno 1\n",
        );
        write(
            directory.path(),
            "podman-rootless",
            "one\tnot enforced, refused by default: memory\ntwo\trefused\n",
        );
        assert_eq!(
            missed(),
            ["topic: one: docker", "topic: two: docker"],
            "a runtime without attempts was not reported"
        );
        write(directory.path(), "docker", "two\trefused\n");
        assert_eq!(missed(), ["topic: one: docker"]);
        write(directory.path(), "docker", "one\trefused\ntwo\trefused\n");
        assert_eq!(missed(), [""; 0]);
        write(directory.path(), "lxc", "one\trefused\n");
        assert!(
            read(directory.path()).is_err(),
            "an unknown runtime was accepted"
        );
    }
}

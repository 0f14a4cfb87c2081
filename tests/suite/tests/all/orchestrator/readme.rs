//! Runs the examples of README.md and docs/first-patch.md, in their order, and compares what they
//! print.

use std::{path::Path, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{World, repository};

use super::stack::Stack;

/// The whole sequence takes some twenty seconds on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(240);
/// Ends the output of one command. No command prints it.
const SEPARATOR: char = '\u{1e}';
/// Prints [`SEPARATOR`].
const SEPARATE: &str = "\nprintf '\\036'\n";

/// One command of a ```` ```console ```` block, with the output that the block shows.
#[derive(Debug, Default, PartialEq)]
struct Example {
    command: String,
    output: Vec<String>,
}

/// The commands of all ```` ```console ```` blocks. `$ ` begins a command and `> ` continues it, as
/// do lines after a trailing backslash; all other lines are output.
fn examples(markdown: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut in_block = false;
    for line in markdown.lines() {
        if line.starts_with("```") {
            in_block = line == "```console";
            continue;
        }
        if !in_block {
            continue;
        }
        if let Some(command) = line.strip_prefix("$ ") {
            examples.push(Example {
                command: command.to_owned(),
                output: Vec::new(),
            });
            continue;
        }
        let Some(example) = examples.last_mut() else {
            continue;
        };
        let continued = if example.command.ends_with('\\') {
            Some(line)
        } else {
            line.strip_prefix("> ")
        };
        match continued {
            Some(more) => {
                example.command.push('\n');
                example.command.push_str(more);
            }
            None => example.output.push(line.to_owned()),
        }
    }
    examples
}

/// Whether a line matches a pattern in which each `…` stands for any text.
fn line_matches(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split('…');
    let Some(mut rest) = parts.next().and_then(|start| line.strip_prefix(start)) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(end) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else {
            return false;
        };
        rest = after;
    }
    rest.ends_with(end)
}

/// Whether the output matches. A line that is only `…` stands for any number of lines.
fn output_matches(patterns: &[String], lines: &[&str]) -> bool {
    match patterns.split_first() {
        None => lines.is_empty(),
        Some((pattern, others)) if pattern == "…" => {
            (0..=lines.len()).any(|skipped| output_matches(others, &lines[skipped..]))
        }
        Some((pattern, others)) => lines.split_first().is_some_and(|(line, rest)| {
            line_matches(pattern, line) && output_matches(others, rest)
        }),
    }
}

/// A program that finds this build's `cynode` on its PATH and the stack in its environment.
pub(super) fn program(stack: &Stack, program: &Path) -> Result<tokio::process::Command> {
    let cynode = stack.command()?;
    let mut command = tokio::process::Command::new(program);
    for (name, value) in cynode.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let built = World::cynode()?;
    let directory = built.parent().context("the directory of cynode")?;
    let path = std::env::var("PATH").unwrap_or_default();
    command
        .env("PATH", format!("{}:{path}", directory.display()))
        .env("no_proxy", "127.0.0.1")
        .kill_on_drop(true);
    Ok(command)
}

/// Runs all commands in one shell, in a directory with the examples of a clone, with both streams in
/// one pipe, and returns what each printed.
async fn run_in_one_shell(stack: &Stack, name: &str, examples: &[Example]) -> Result<Vec<String>> {
    let script: String = examples
        .iter()
        .flat_map(|example| [example.command.as_str(), SEPARATE])
        .collect();
    let directory = stack.world.directory().join(name).join("clone");
    let shop = directory.join("examples/shop");
    fs_err::create_dir_all(&shop)?;
    for entry in fs_err::read_dir(repository().join("examples/shop"))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs_err::copy(entry.path(), shop.join(entry.file_name()))?;
        }
    }
    let file = directory.join("script");
    fs_err::write(&file, format!("exec 2>&1\n{script}"))?;
    let mut command = program(stack, Path::new("bash"))?;
    command
        .arg(&file)
        .current_dir(&directory)
        .stdin(Stdio::null());
    let ran = tokio::time::timeout(TIMEOUT, command.output())
        .await
        .with_context(|| format!("the examples of {name} take too long"))??;
    let printed = String::from_utf8_lossy(&ran.stdout).into_owned();
    let outputs: Vec<String> = printed
        .split_terminator(SEPARATOR)
        .map(str::to_owned)
        .collect();
    ensure!(
        outputs.len() == examples.len(),
        "the shell ended after {} of {} commands: {printed}",
        outputs.len(),
        examples.len()
    );
    Ok(outputs)
}

/// Runs the examples of a document against a stack, and compares what they print.
async fn check_examples(stack: &Stack, url: &str, name: &str, at_least: usize) -> Result<()> {
    let state = stack.world.state_dir();
    // The address and the state directory of a default installation.
    let markdown = fs_err::read_to_string(repository().join(name))?
        .replace("http://127.0.0.1:12080", url)
        .replace("/var/lib/cynode", &state.display().to_string());
    let examples = examples(&markdown);
    ensure!(
        examples.len() >= at_least,
        "{name} has {} examples",
        examples.len()
    );
    let outputs = run_in_one_shell(stack, name, &examples).await?;
    let mut faults = Vec::new();
    for (example, output) in examples.iter().zip(&outputs) {
        let lines: Vec<&str> = output.lines().collect();
        if !output_matches(&example.output, &lines) {
            faults.push(format!(
                "$ {}\n{name} shows:\n{}\nprinted:\n{output}",
                example.command,
                example.output.join("\n")
            ));
        }
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n\n"));
    Ok(())
}

#[tokio::test]
async fn the_examples_of_the_documents_run_in_order_and_print_what_they_show() -> Result<()> {
    let stack = Stack::new()?;
    let url = stack.up()?;
    check_examples(&stack, &url, "README.md", 15).await?;
    check_examples(&stack, &url, "docs/first-patch.md", 8).await?;
    stack.down()?;
    stack.assert_clean().await
}

#[test]
fn five_minutes_need_at_most_eight_commands_until_the_patch_is_applied() -> Result<()> {
    let markdown = fs_err::read_to_string(repository().join("README.md"))?;
    let (_, section) = markdown
        .split_once("\n## Five minutes\n")
        .context("the section")?;
    let section = section.split("\n## ").next().unwrap_or_default();
    // A line may have several commands.
    let commands: Vec<String> = examples(section)
        .iter()
        .flat_map(|example| example.command.split("&&"))
        .map(|command| command.trim().to_owned())
        .collect();
    let applied = commands
        .iter()
        .position(|command| command == "cynode session pull --apply")
        .context("no pull")?;
    ensure!(applied < 8, "{:?}", &commands[..=applied]);
    // The transcript has the same ones.
    let transcript = fs_err::read_to_string(repository().join("docs/first-patch.md"))?;
    let shown = examples(&transcript);
    for command in commands[..=applied]
        .iter()
        .filter(|it| it.starts_with("cynode "))
    {
        ensure!(
            shown.iter().any(|example| example.command == *command),
            "docs/first-patch.md lacks '{command}'"
        );
    }
    Ok(())
}

#[test]
fn every_relative_link_of_a_document_leads_to_a_file() -> Result<()> {
    let mut documents = vec![repository().join("docs")];
    let mut files: Vec<_> = [
        "README",
        "ARCHITECTURE",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
    ]
    .map(|name| repository().join(format!("{name}.md")))
    .to_vec();
    files.extend(
        ["images", "examples", "dist", "benches"]
            .map(|name| repository().join(name).join("README.md")),
    );
    while let Some(directory) = documents.pop() {
        for entry in fs_err::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                documents.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                files.push(path);
            }
        }
    }
    let mut dead = Vec::new();
    for file in files {
        let text = fs_err::read_to_string(&file)?;
        let directory = file.parent().unwrap_or(Path::new("/"));
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            let target = link.split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !directory.join(target).exists() {
                dead.push(format!("{}: {link}", file.display()));
            }
        }
    }
    ensure!(dead.is_empty(), "{}", dead.join("\n"));
    Ok(())
}

#[test]
fn a_console_block_is_commands_and_their_output() {
    let text =
        "```sh\n$ not run\n```\n```console\n$ a \\\n    b\nout\n$ cat <<E\n> x\n> E\n…\n```\n";
    let read = examples(text);
    assert_eq!(
        read,
        [
            Example {
                command: "a \\\n    b".to_owned(),
                output: vec!["out".to_owned()],
            },
            Example {
                command: "cat <<E\nx\nE".to_owned(),
                output: vec!["…".to_owned()],
            },
        ]
    );
    assert!(line_matches("in … ms, …", "in 9 ms, from the pool"));
    assert!(line_matches("plain", "plain") && !line_matches("plain", "plain text"));
    assert!(!line_matches("a…b", "ab c") && line_matches("a…b", "ab"));
    let patterns = ["a", "…", "z"].map(str::to_owned);
    assert!(output_matches(&patterns, &["a", "z"]));
    assert!(output_matches(&patterns, &["a", "b", "c", "z"]));
    assert!(!output_matches(&patterns, &["a", "b"]));
}

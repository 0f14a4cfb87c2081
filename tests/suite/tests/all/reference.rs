//! The reference documents that are generated from the code: `docs/configuration.md` and
//! `docs/cli.md`. `cargo xtask docs` writes them, by running these tests with
//! `CYNODE_REGENERATE=1`.

use std::{collections::BTreeMap, fmt::Debug, process::Command};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{World, repository};

/// Compares a generated document with the checked-in one, or writes it.
fn check_generated(name: &str, current: &str) -> Result<()> {
    let path = repository().join("docs").join(name);
    if std::env::var_os("CYNODE_REGENERATE").is_some_and(|value| value == "1") {
        fs_err::write(&path, current)?;
    }
    ensure!(
        fs_err::read_to_string(&path)? == current,
        "docs/{name} is out of date; run: cargo xtask docs"
    );
    Ok(())
}

/// A field of a configuration struct.
#[derive(Debug, PartialEq)]
struct Field {
    name: String,
    kind: String,
    description: String,
}

/// The fields of a struct with public ones, as rustfmt writes it. Fields that serde skips are left
/// out.
fn fields(source: &str, name: &str) -> Option<Vec<Field>> {
    let (_, body) = source.split_once(&format!("pub struct {name} {{\n"))?;
    let (body, _) = body.split_once("\n}")?;
    let (mut fields, mut description, mut is_skipped) = (Vec::new(), Vec::new(), false);
    for line in body.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            description.push(text.trim());
        } else if line.starts_with("#[serde(skip") {
            is_skipped = true;
        } else if let Some((name, kind)) = line
            .strip_prefix("pub ")
            .and_then(|field| field.trim_end_matches(',').split_once(": "))
        {
            if !is_skipped {
                fields.push(Field {
                    name: name.to_owned(),
                    kind: kind.to_owned(),
                    description: description.join(" "),
                });
            }
            description.clear();
            is_skipped = false;
        }
    }
    Some(fields)
}

/// The names that serde gives the variants of an enum without payloads.
fn variants(source: &str, name: &str) -> Option<Vec<String>> {
    let (_, body) = source.split_once(&format!("pub enum {name} {{\n"))?;
    let (body, _) = body.split_once("\n}")?;
    let names = body
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with("//") && !line.starts_with("#["));
    names
        .map(|line| {
            let name = line.trim_end_matches(',');
            name.chars().all(char::is_alphanumeric).then(|| {
                let mut snake = String::new();
                for c in name.chars() {
                    if c.is_uppercase() && !snake.is_empty() {
                        snake.push('_');
                    }
                    snake.extend(c.to_lowercase());
                }
                snake
            })
        })
        .collect()
}

/// How the value of a type is written in TOML.
fn kind(rust: &str, sources: &[String]) -> String {
    let within = |prefix: &str| {
        rust.strip_prefix(prefix)
            .and_then(|inner| inner.strip_suffix('>'))
    };
    if let Some(inner) = within("Option<") {
        return kind(inner, sources);
    }
    if let Some(inner) = within("Vec<").or_else(|| within("BTreeSet<")) {
        return format!("list: {}", kind(inner, sources));
    }
    if rust.starts_with("BTreeMap<") {
        return "table".to_owned();
    }
    match rust {
        "bool" => "boolean".to_owned(),
        "String" => "string".to_owned(),
        "PathBuf" => "path".to_owned(),
        "SocketAddr" => "address".to_owned(),
        "f64" => "number".to_owned(),
        "u16" | "u32" | "u64" | "usize" => "integer".to_owned(),
        other => {
            let name = other.rsplit("::").next().unwrap_or(other);
            sources
                .iter()
                .find_map(|source| variants(source, name))
                .map_or_else(
                    || "see right".to_owned(),
                    |names| {
                        names
                            .iter()
                            .map(|name| format!("`{name}`"))
                            .collect::<Vec<_>>()
                            .join(", ")
                    },
                )
        }
    }
}

/// The values of a struct's fields by name, each on one line, from its pretty `Debug` form.
fn values(of: &impl Debug) -> BTreeMap<String, String> {
    let printed = format!("{of:#?}");
    let mut values: BTreeMap<String, String> = BTreeMap::new();
    let mut last = String::new();
    for line in printed.lines().skip(1) {
        let indent = line.len() - line.trim_start().len();
        match line.trim().split_once(": ") {
            Some((name, value)) if indent == 4 => {
                name.clone_into(&mut last);
                values.insert(last.clone(), value.to_owned());
            }
            _ if line != "}" => {
                if let Some(value) = values.get_mut(&last) {
                    value.push_str(line.trim());
                }
            }
            _ => {}
        }
    }
    values
}

/// The values of a struct without structs in it, from its form on one line.
fn nested_values(line: &str) -> BTreeMap<&str, &str> {
    let inside = line.split_once('{').map_or("", |(_, inside)| inside);
    inside
        .split(',')
        .filter_map(|field| field.split_once(": "))
        .collect()
}

/// A default as people read it.
fn shown(value: &str) -> String {
    let value = value
        .trim_end_matches(',')
        .replace(",]", "]")
        .replace(",)", ")");
    match value.as_str() {
        "None" | "[]" | "{}" | "\"\"" => String::new(),
        value => {
            let value = value
                .strip_prefix("Some(")
                .and_then(|inner| inner.strip_suffix(')'))
                .unwrap_or(value);
            // An enum: `All(true)` is written `true`, `Podman` is written `podman`.
            let inner = value
                .split_once('(')
                .and_then(|(_, inner)| inner.strip_suffix(')'))
                .unwrap_or(value);
            if inner.starts_with(char::is_uppercase) {
                format!("`{}`", inner.to_lowercase())
            } else {
                format!("`{inner}`")
            }
        }
    }
}

/// Descriptions of keys that have no doc comment.
const DESCRIPTIONS: &[(&str, &str)] = &[
    (
        "orchestrator.tls",
        "Certificate of both listeners; needed beyond loopback.",
    ),
    (
        "worker.tls",
        "Certificate of the Worker API; needed beyond loopback.",
    ),
    ("tls.cert", "The certificate chain (PEM)."),
    ("tls.key", "The private key (PEM)."),
    (
        "insecure_listen",
        "Allows a listener beyond loopback without TLS.",
    ),
    ("database_connections", "Size of the connection pool."),
    ("heartbeat_seconds", "How often nodes send heartbeats."),
    ("worker.listen", "The Worker API."),
    (
        "exec_via",
        "What runs commands: the agent, or the container runtime's exec.",
    ),
    ("max_sandboxes", "Concurrent sandboxes on this node."),
    (
        "workspace_grace_seconds",
        "How long the workspace of a session that expired or was lost is kept.",
    ),
    ("engine", "The container engine."),
    (
        "docker_socket",
        "Docker's socket, with `engine = \"docker\"`.",
    ),
    ("podman", "The Podman program."),
    (
        "podman_root",
        "Podman's storage; its own default when absent.",
    ),
    (
        "podman_runroot",
        "Podman's run directory; its own default when absent.",
    ),
    ("labels", "Labels that work can require of a node."),
];

fn description(section: &str, key: &str, field: &Field) -> Result<String> {
    if !field.description.is_empty() {
        return Ok(field.description.replace('|', "\\|"));
    }
    let full = format!("{section}.{key}");
    DESCRIPTIONS
        .iter()
        .find(|(known, _)| *known == full || *known == key)
        .map(|(_, text)| (*text).to_owned())
        .with_context(|| format!("{full} has no doc comment"))
}

/// The table of one section.
fn section(name: &str, role: &str, defaults: &impl Debug, sources: &[String]) -> Result<String> {
    let source =
        fs_err::read_to_string(repository().join(format!("crates/cynode-{role}/src/config.rs")))?;
    let keys = fields(&source, "Config").context("struct Config")?;
    // Its own, before one of the same name elsewhere.
    let mut structs = vec![source];
    structs.extend_from_slice(sources);
    let values = values(defaults);
    let mut text = format!("\n## `[{name}]`\n\n| key | type | default | |\n|---|---|---|---|\n");
    let mut row = |key: &str, field: &Field, default: &str| -> Result<()> {
        let kind = kind(&field.kind, &structs);
        let description = description(name, key, field)?;
        text.extend([
            "| `",
            key,
            "` | ",
            &kind,
            " | ",
            default,
            " | ",
            &description,
            " |\n",
        ]);
        Ok(())
    };
    for field in &keys {
        let nested = structs
            .iter()
            .find_map(|source| fields(source, &field.kind));
        if let Some(nested) = nested {
            let defaults = nested_values(values.get(&field.name).context("a default")?);
            for inner in nested {
                let default = defaults
                    .get(inner.name.as_str())
                    .copied()
                    .unwrap_or_default();
                row(
                    &format!("{}.{}", field.name, inner.name),
                    &inner,
                    &shown(default),
                )?;
            }
        } else {
            let default = values.get(&field.name).context("a default")?;
            row(&field.name, field, &shown(default))?;
        }
    }
    Ok(text)
}

const CONFIGURATION: &str = "\
# Configuration

Generated from the configuration types by `cargo xtask docs`.

Settings come from one TOML file (`--config FILE`, `CYNODE_CONFIG`), overridden by the environment,
overridden by flags. Unknown keys are errors, and an invalid configuration exits with 64 before a port
opens.

| in the file | in the environment | as a flag of `up` |
|---|---|---|
| `listen = \"…\"` in `[worker]` | `CYNODE_WORKER_LISTEN=…` | `--set worker.listen=…` |
| `tls = { cert = \"…\" }` in `[orchestrator]` | `CYNODE_ORCHESTRATOR_TLS__CERT=…` | `--set orchestrator.tls.cert=…` |

A key without a default is optional.
";

#[test]
fn the_reference_of_the_configuration_is_current() -> Result<()> {
    let mut sources = Vec::new();
    for path in [
        "crates/cynode-service/src",
        "crates/cynode-api/src",
        "crates/cynode-policy/src/secrets",
        "crates/cynode-worker/src/inference",
    ] {
        for entry in fs_err::read_dir(repository().join(path))? {
            let path = entry?.path();
            if path.is_file() {
                sources.push(fs_err::read_to_string(path)?);
            }
        }
    }
    let orchestrator = cynode_orchestrator::Config::default();
    let worker = cynode_worker::Config::default();
    let text = [
        CONFIGURATION.to_owned(),
        section("orchestrator", "orchestrator", &orchestrator, &sources)?,
        section("worker", "worker", &worker, &sources)?,
    ]
    .concat();
    check_generated("configuration.md", &text)
}

/// What `cynode … --help` prints, whatever the environment of the tests.
fn help(command: &[String]) -> Result<String> {
    let mut program = Command::new(World::cynode()?);
    for name in ["CYNODE_STATE_DIR", "CYNODE_CONFIG", "CYNODE_CA_FILE"] {
        program.env_remove(name);
    }
    let ran = program
        .args(command)
        .arg("--help")
        .env("NO_COLOR", "1")
        .env("COLUMNS", "100")
        .output()?;
    ensure!(
        ran.status.success(),
        "cynode {} --help: {}",
        command.join(" "),
        String::from_utf8_lossy(&ran.stderr)
    );
    let text = String::from_utf8(ran.stdout)?;
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    Ok(lines.join("\n"))
}

/// The names in the section `Commands:` of a help text.
fn subcommands(help: &str) -> Vec<String> {
    help.lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// Adds the help of a command and of all below it.
fn describe(command: &[String], text: &mut String) -> Result<()> {
    let help = help(command)?;
    let title = [&["cynode".to_owned()], command].concat().join(" ");
    text.extend([
        "\n## `",
        &title,
        "`\n\n```text\n",
        help.trim_end(),
        "\n```\n",
    ]);
    for name in subcommands(&help) {
        describe(&[command, &[name]].concat(), text)?;
    }
    Ok(())
}

#[test]
fn the_reference_of_the_command_line_is_current() -> Result<()> {
    let mut text =
        "# Command line\n\nGenerated from `cynode --help` by `cargo xtask docs`.\n".to_owned();
    describe(&[], &mut text)?;
    check_generated("cli.md", &text)
}

#[test]
fn a_configuration_type_is_read_as_rustfmt_writes_it() {
    let source = "pub struct C {\n    #[serde(skip)]\n    pub a: u32,\n    /// One\n    /// line.\n    pub b: Option<u64>,\n}\npub enum E {\n    #[default]\n    OneTwo,\n    Three,\n}\n";
    let read = fields(source, "C").unwrap_or_default();
    assert_eq!(
        read,
        [Field {
            name: "b".to_owned(),
            kind: "Option<u64>".to_owned(),
            description: "One line.".to_owned(),
        }]
    );
    let sources = [source.to_owned()];
    assert_eq!(kind("Option<u64>", &sources), "integer");
    assert_eq!(kind("BTreeSet<E>", &sources), "list: `one_two`, `three`");
    assert_eq!(
        (shown("None,"), shown("[],")),
        (String::new(), String::new())
    );
    assert_eq!(
        (shown("200,"), shown("Podman,")),
        ("`200`".to_owned(), "`podman`".to_owned())
    );
    assert_eq!(
        (shown("All(true,),"), shown("[\"x\",],")),
        ("`true`".to_owned(), "`[\"x\"]`".to_owned())
    );
}

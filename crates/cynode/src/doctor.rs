//! `doctor`: what this machine can do, what was adapted to it, and what must be put right.

use std::process::ExitCode;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    cli::{Doctor, Format, Globals},
    failure::Failure,
    output::{self, Colour},
    postgres, roles, sanitize,
    state::StateDir,
};

#[derive(Debug, Deserialize)]
struct Report {
    checks: Vec<Check>,
}

#[derive(Debug, Deserialize)]
struct Check {
    name: String,
    status: String,
    detail: String,
    #[serde(default)]
    fix: Option<String>,
}

impl Check {
    fn is_problem(&self) -> bool {
        self.status.eq_ignore_ascii_case("problem")
    }
}

pub async fn run(globals: &Globals, args: &Doctor) -> Result<ExitCode, Failure> {
    let config = roles::worker_config(globals, &args.settings)?;
    let mut value = roles::examine(&config).await?;
    if !args.worker_only
        && let Some(checks) = value.get_mut("checks").and_then(Value::as_array_mut)
    {
        checks.push(database(globals, args)?);
    }
    let report = Report::deserialize(&value)
        .map_err(|error| Failure::internal(format!("the report can't be read: {error}")))?;
    match globals.output {
        Format::Json => output::json(&value)?,
        Format::Table => print(&report)?,
    }
    Ok(if report.checks.iter().any(Check::is_problem) {
        ExitCode::from(1)
    } else {
        ExitCode::SUCCESS
    })
}

/// Where the orchestrator's data will be.
fn database(globals: &Globals, args: &Doctor) -> Result<Value, Failure> {
    let check = |status: &str, detail: String, fix: Option<&str>| json!({ "name": "PostgreSQL", "status": status, "detail": detail, "fix": fix });
    if roles::orchestrator_config(globals, &args.settings)?
        .database_url
        .is_some()
    {
        return Ok(check(
            "ok",
            "another server's database is used, as configured".to_owned(),
            None,
        ));
    }
    Ok(
        match postgres::Programs::find(&postgres::Server::of(&StateDir::new(globals)?)) {
            Ok(programs) => check(
                "ok",
                format!(
                    "version {} in {}, for a private server",
                    programs.major,
                    programs.directory().display()
                ),
                None,
            ),
            Err(failure) => check(
                "problem",
                failure.message().to_owned(),
                failure.remedy_text(),
            ),
        },
    )
}

fn print(report: &Report) -> Result<(), Failure> {
    let width = report
        .checks
        .iter()
        .map(|check| check.name.len())
        .max()
        .unwrap_or(0);
    for check in &report.checks {
        let word = format!("{:<8}", check.status.to_lowercase());
        let colour = match check.status.to_lowercase().as_str() {
            "ok" => Colour::Green,
            "adapted" => Colour::Yellow,
            _ => Colour::Red,
        };
        output::painted(
            &word,
            colour,
            &format!(
                "  {:<width$}  {}",
                sanitize::line(&check.name),
                sanitize::line(&check.detail)
            ),
        )?;
        if let Some(fix) = &check.fix {
            output::line(&format!(
                "{:10}{:width$}  fix: {}",
                "",
                "",
                sanitize::line(fix)
            ))?;
        }
    }
    let problems = report
        .checks
        .iter()
        .filter(|check| check.is_problem())
        .count();
    output::note(&match problems {
        0 => "this machine can run CyNode".to_owned(),
        1 => "1 problem must be put right first".to_owned(),
        n => format!("{n} problems must be put right first"),
    });
    Ok(())
}

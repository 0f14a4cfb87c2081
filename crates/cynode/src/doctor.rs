//! `doctor`: checks this machine, and reports adaptations and problems.

use std::process::ExitCode;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    cli::{Doctor, Globals, OutputFormat},
    failure::Failure,
    git_program::{self, Unusable},
    output::{self, Colour},
    postgres, roles, sanitize,
    state::StateDir,
};

#[derive(Debug, Deserialize)]
struct DoctorReport {
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
        checks.push(git(globals, args)?);
    }
    let report = DoctorReport::deserialize(&value)
        .map_err(|error| Failure::internal(format!("the report can't be read: {error}")))?;
    match globals.output {
        OutputFormat::Json => output::json(&value)?,
        OutputFormat::Table => print(&report)?,
    }
    Ok(if report.checks.iter().any(Check::is_problem) {
        ExitCode::from(1)
    } else {
        ExitCode::SUCCESS
    })
}

/// Checks for the program of the git role, without which `up` starts the other roles.
fn git(globals: &Globals, args: &Doctor) -> Result<Value, Failure> {
    let config = roles::git_config(globals, &args.settings)?;
    Ok(match git_program::version(&config.git) {
        Ok(version) => json!({
            "name": "git",
            "status": "ok",
            "detail": format!("version {version}, for the git role"),
            "fix": null,
        }),
        Err(unusable) => json!({
            "name": "git",
            "status": "adapted",
            "detail": format!("'up' starts without the git role: {}", unusable.message()),
            "fix": Unusable::remedy(),
        }),
    })
}

/// Checks for the database of the orchestrator.
fn database(globals: &Globals, args: &Doctor) -> Result<Value, Failure> {
    let check = |status: &str, detail: String, fix: Option<&str>| {
        let name = "PostgreSQL";
        json!({ "name": name, "status": status, "detail": detail, "fix": fix })
    };
    if roles::orchestrator_config(globals, &args.settings)?
        .database_url
        .is_some()
    {
        return Ok(check(
            "ok",
            "an external server is configured".to_owned(),
            None,
        ));
    }
    Ok(
        match postgres::Programs::find(&postgres::Server::new(&StateDir::new(globals)?)) {
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

fn print(report: &DoctorReport) -> Result<(), Failure> {
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
        output::line_with_colored_start(
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
    output::message(&match problems {
        0 => "this machine can run CyNode".to_owned(),
        1 => "1 problem must be fixed first".to_owned(),
        n => format!("{n} problems must be fixed first"),
    });
    Ok(())
}

//! `image check`: runs the checklist of sandbox images in a sandbox of the image.
//!
//! The sandbox is that of a plain job, because an image without the agent label gets no other. What
//! it prints is hostile: lines that are no result of a probe count for nothing, and every probe that
//! has no result has failed.

use std::process::ExitCode;

use cynode_api::{
    API_VERSION, ImageVersion, Job, JobCreate, JobId, LABEL_AGENT_COMPATIBLE, LABEL_PURPOSE,
};
use cynode_client::UserClient;
use serde::Serialize;
use serde_json::Value;

use super::{CommandResult, image, run};
use crate::{
    cli::{Globals, ImageCheck, OutputFormat},
    failure::Failure,
    output::{self, Progress, TableStyle},
    sanitize,
};

const PROBES: &str = include_str!("image_check.sh");
const TIMEOUT_SECONDS: u64 = 120;
/// The exit code of the probes, which shows that exit codes arrive.
const EXIT_CODE: i32 = 42;
/// Results of probes that are read, and the characters of a text in one.
const MAX_RESULTS: usize = 200;
const MAX_CHARACTERS: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Level {
    /// Every sandbox image must pass.
    Baseline,
    /// Images for agents must pass.
    Runner,
    Recommended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Ok,
    Missing,
    /// Missing, and not required.
    Absent,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: String,
    required: Level,
    result: Outcome,
    detail: String,
}

#[derive(Debug, Serialize)]
struct Report {
    image_ref: String,
    image_digest: Option<String>,
    /// The requirements of images for agents were checked, too.
    is_runner: bool,
    passed: bool,
    checks: Vec<Check>,
}

pub async fn run(client: &UserClient, globals: &Globals, args: &ImageCheck) -> CommandResult {
    let version = version(client, &args.image).await?;
    let progress = Progress::start("running the checks in a sandbox");
    let job = run_probes(client, &version.image_ref).await?;
    drop(progress);
    let labels = Labels {
        is_agent: version.agent_compatible() == Some(true),
        purpose: version
            .capabilities
            .get("purpose")
            .map(purpose)
            .unwrap_or_default(),
    };
    let is_runner = args.runner || (labels.is_agent && !args.baseline);
    let checks = checks(&job, &labels, is_runner);
    let report = Report {
        image_ref: job.image_ref,
        image_digest: job.image_digest,
        is_runner,
        passed: checks.iter().all(|check| check.result != Outcome::Missing),
        checks,
    };
    print(globals, &report)?;
    Ok(if report.passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The version that is named, or the only one of the image.
async fn version(client: &UserClient, wanted: &str) -> Result<ImageVersion, Failure> {
    let (mut found, named) = image::find(client, wanted).await?;
    if let Some(named) = named {
        found.versions.retain(|version| version.version == named);
    }
    if found.versions.len() > 1 {
        let message = format!("image '{}' has more than one version", found.name);
        return Err(
            Failure::usage(message).remedy("Give the reference of one; see 'cynode image show'.")
        );
    }
    found.versions.pop().ok_or_else(|| {
        Failure::usage(format!("image '{}' has no version", found.name))
            .remedy("Add one with 'cynode image add'.")
    })
}

fn print(globals: &Globals, report: &Report) -> Result<(), Failure> {
    if globals.output == OutputFormat::Json {
        output::json(report)?;
        return Ok(());
    }
    let row = |check: &Check| {
        [
            check.name.clone(),
            super::api_name(&check.required),
            super::api_name(&check.result),
            check.detail.clone(),
        ]
    };
    let header = ["CHECK", "REQUIRED", "RESULT", "DETAIL"];
    let rows = report.checks.iter().map(row);
    output::table(TableStyle::new(false), header, rows)?;
    let purpose = match (report.passed, report.is_runner) {
        (true, true) => "meets the requirements of images for agents",
        (true, false) => "meets the requirements of every sandbox image",
        (false, true) => "does not meet the requirements of images for agents",
        (false, false) => "does not meet the requirements of every sandbox image",
    };
    let image = sanitize::line(&report.image_ref);
    output::message(&format!("cynode: {image} {purpose}"));
    Ok(())
}

/// Runs the probes to their end, as a job.
async fn run_probes(client: &UserClient, reference: &str) -> Result<Job, Failure> {
    let id = JobId::generate();
    let request = JobCreate {
        version: Some(API_VERSION),
        job_id: Some(id),
        image_ref: Some(reference.to_owned()),
        command: ["/bin/sh", "-c", PROBES].map(str::to_owned).to_vec(),
        timeout_seconds: Some(TIMEOUT_SECONDS),
        ..JobCreate::default()
    };
    run::to_end(client, &request, id).await
}

struct Labels {
    is_agent: bool,
    purpose: String,
}

/// The tokens of the purpose label.
fn purpose(tokens: &Value) -> String {
    let tokens = tokens.as_array().into_iter().flatten();
    let tokens: Vec<&str> = tokens.filter_map(Value::as_str).collect();
    tokens.join(",")
}

/// All checks, in the order of the specification's list.
fn checks(job: &Job, labels: &Labels, is_runner: bool) -> Vec<Check> {
    let check = |name: &str, required, is_met: bool, detail: String| Check {
        name: name.to_owned(),
        required,
        result: match (is_met, required) {
            (true, _) => Outcome::Ok,
            (false, Level::Recommended) => Outcome::Absent,
            (false, _) => Outcome::Missing,
        },
        detail,
    };
    let mut checks = vec![
        check(
            "agent label",
            if is_runner {
                Level::Runner
            } else {
                Level::Recommended
            },
            labels.is_agent,
            format!("{LABEL_AGENT_COMPATIBLE}=true"),
        ),
        check(
            "purpose label",
            Level::Recommended,
            !labels.purpose.is_empty(),
            format!("{LABEL_PURPOSE}={}", labels.purpose),
        ),
    ];
    let is_whole = job.output.stdout.ends_with("end\n");
    checks.extend(
        job.output
            .stdout
            .lines()
            .filter_map(parse)
            .filter(|check| is_runner || check.required != Level::Runner)
            .take(MAX_RESULTS),
    );
    if !checks.iter().any(|check| check.name == "/bin/sh") {
        let error = job.error.as_ref().map(|error| error.detail.as_str());
        let detail = shown(error.unwrap_or("printed no results"));
        checks.push(check("/bin/sh", Level::Baseline, false, detail));
        return checks;
    }
    if !is_whole {
        let detail = "the probes ended before all had run".to_owned();
        checks.push(check("all probes", Level::Baseline, false, detail));
    }
    let code = job
        .exit_code
        .map_or_else(|| "none".to_owned(), |code| code.to_string());
    let detail = format!("{code} of {EXIT_CODE} arrived");
    let arrived = job.exit_code == Some(EXIT_CODE);
    checks.push(check("exit codes", Level::Baseline, arrived, detail));
    let is_apart = is_whole && job.output.stderr.ends_with("end\n");
    checks.push(check(
        "stdout and stderr",
        Level::Baseline,
        is_apart,
        String::new(),
    ));
    checks
}

/// Reads the result of one probe.
fn parse(line: &str) -> Option<Check> {
    let mut parts = line.splitn(4, '\t');
    let required = match parts.next()? {
        "baseline" => Level::Baseline,
        "runner" => Level::Runner,
        "recommended" => Level::Recommended,
        _ => return None,
    };
    let result = match parts.next()? {
        "ok" => Outcome::Ok,
        "absent" if required == Level::Recommended => Outcome::Absent,
        _ => Outcome::Missing,
    };
    Some(Check {
        required,
        result,
        name: shown(parts.next()?),
        detail: shown(parts.next()?),
    })
}

fn shown(text: &str) -> String {
    text.chars().take(MAX_CHARACTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::run::tests::job;

    fn labels(is_agent: bool) -> Labels {
        Labels {
            is_agent,
            purpose: String::new(),
        }
    }

    fn ended(stdout: &str, stderr: &str, exit_code: Option<i32>) -> Job {
        let mut job = job();
        (job.output.stdout, job.output.stderr) = (stdout.to_owned(), stderr.to_owned());
        job.exit_code = exit_code;
        job
    }

    fn failed(job: &Job, is_runner: bool) -> Vec<String> {
        let checks = checks(job, &labels(true), is_runner).into_iter();
        let missing = checks.filter(|check| check.result == Outcome::Missing);
        missing.map(|check| check.name).collect()
    }

    #[test]
    fn an_image_passes_when_nothing_that_it_must_have_is_missing() {
        let printed = "baseline\tok\t/bin/sh\truns\nbaseline\tok\tzip\t/bin/zip\n\
                       recommended\tabsent\tdate\t\nrunner\tmissing\tjq\tnot in the PATH\nend\n";
        let job = ended(printed, "end\n", Some(42));
        assert!(failed(&job, false).is_empty());
        assert_eq!(failed(&job, true), ["jq"]);
        let unlabelled = checks(&job, &labels(false), true);
        assert_eq!(unlabelled[0].result, Outcome::Missing);
        assert_eq!(
            checks(&job, &labels(false), false)[0].result,
            Outcome::Absent
        );
    }

    #[test]
    fn probes_that_did_not_run_to_their_end_have_failed() {
        let begun = "baseline\tok\t/bin/sh\truns\n";
        assert_eq!(
            failed(&ended(begun, "", None), false),
            ["all probes", "exit codes", "stdout and stderr"]
        );
        assert_eq!(
            failed(&ended("end\n", "end\n", Some(42)), false),
            ["/bin/sh"]
        );
        let both = format!("{begun}end\n");
        assert_eq!(
            failed(&ended(&both, "", Some(0)), false),
            ["exit codes", "stdout and stderr"]
        );
    }

    #[test]
    fn lines_that_are_no_results_count_for_nothing() {
        assert_eq!(parse("hello"), None);
        assert_eq!(parse("baseline\tok"), None);
        assert_eq!(parse("other\tok\tx\ty"), None);
        let odd = parse("baseline\tabsent\tx\ty").expect("a result");
        assert_eq!(odd.result, Outcome::Missing);
        let long = format!("runner\tok\t{}\t{}", "n".repeat(500), "d\t".repeat(500));
        let long = parse(&long).expect("a result");
        assert!(long.name.len() == MAX_CHARACTERS && long.detail.len() == MAX_CHARACTERS);
    }
}

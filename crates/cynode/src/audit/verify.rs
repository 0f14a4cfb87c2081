//! `audit verify`: the server verifies its trail against the checkpoints that it keeps outside the
//! database.

use std::process::ExitCode;

use cynode_api::{AuditProblem, AuditVerdict, AuditVerifyLine};
use cynode_audit::PublicKey;
use cynode_client::UserClient;

use crate::{
    cli::{Globals, OutputFormat},
    commands::{CommandResult, format_time},
    failure::{Failure, UNREACHABLE},
    output::{self, Progress},
    sanitize,
};

/// The exit code for a trail that is not intact.
const NOT_INTACT: u8 = 1;

pub async fn run(client: &UserClient, globals: &Globals, key: Option<PublicKey>) -> CommandResult {
    let progress = Progress::start("verifying");
    let mut verification = client.verify_audit().await?;
    while let Some(line) = verification.next().await? {
        match line {
            AuditVerifyLine::Progress { checked, of } => {
                progress.set_message(format!("verifying: {checked} of {of} records"));
            }
            AuditVerifyLine::Verdict { mut verdict } => {
                drop(progress);
                if let Some(key) = key {
                    compare_key(&mut verdict, &key);
                }
                return print_verdict(globals, &verdict);
            }
        }
    }
    Err(Failure::new(
        UNREACHABLE,
        "unreachable",
        "the verification ended without a verdict",
    )
    .remedy("Retry."))
}

/// Reports a wrong key: an attacker who rewrote the trail must sign it with another key.
fn compare_key(verdict: &mut AuditVerdict, key: &PublicKey) {
    if verdict.key != key.to_text() {
        verdict.intact = false;
        let detail = format!(
            "the checkpoints are signed with {}, not with {key}: the key is another CyNode's, \
             or the trail was signed again",
            verdict.key
        );
        verdict.problems.insert(
            0,
            AuditProblem {
                what: "signature_bad".to_owned(),
                stream: None,
                seq: None,
                cursor: None,
                checkpoint: None,
                detail,
            },
        );
    }
}

/// Prints the verdict: as JSON, or as a line for each problem, or as one line if it is intact.
pub fn print_verdict(globals: &Globals, verdict: &AuditVerdict) -> CommandResult {
    match globals.output {
        OutputFormat::Json => output::json(verdict)?,
        OutputFormat::Table if verdict.intact => {
            output::line(&sanitize::line(&format!("intact: {}", summary(verdict))))?;
        }
        OutputFormat::Table => {
            for problem in &verdict.problems {
                output::line(&sanitize::line(&problem_line(problem)))?;
            }
            if verdict.more_problems {
                output::line("… and more")?;
            }
            output::message(&sanitize::line(&format!(
                "NOT intact: {}",
                summary(verdict)
            )));
        }
    }
    if verdict.records > 0 && verdict.checkpoints == 0 {
        output::message("there are no checkpoints: only the hash chain was verified");
    }
    Ok(if verdict.intact {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NOT_INTACT)
    })
}

fn summary(verdict: &AuditVerdict) -> String {
    let signed = verdict
        .last_signed_at
        .map(|at| format!(", signed up to {} with {}", format_time(at), verdict.key))
        .unwrap_or_default();
    let removed = if verdict.truncated > 0 {
        format!(", {} removed by retention", verdict.truncated)
    } else {
        String::new()
    };
    let count =
        |count: u64, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    format!(
        "{} in {}, {}{removed}, {} without an outcome{signed}, {}",
        count(verdict.records, "record"),
        count(verdict.streams, "stream"),
        count(verdict.checkpoints, "checkpoint"),
        count(verdict.open, "call"),
        match (verdict.unsigned, verdict.unsigned_since) {
            (0, _) => "none after the last checkpoint".to_owned(),
            (unsigned, Some(since)) => format!(
                "{unsigned} after the last checkpoint (from {} on, chained but not signed)",
                format_time(since)
            ),
            (unsigned, None) =>
                format!("{unsigned} after the last checkpoint (chained but not signed)"),
        }
    )
}

fn problem_line(problem: &AuditProblem) -> String {
    let mut text = problem.what.clone();
    let places = [
        problem
            .checkpoint
            .map(|number| format!("checkpoint {number}")),
        problem.stream.map(|stream| format!("stream {stream}")),
        problem.seq.map(|seq| format!("number {seq}")),
        problem.cursor.map(|cursor| format!("cursor {cursor}")),
    ];
    let places: Vec<String> = places.into_iter().flatten().collect();
    if !places.is_empty() {
        text = format!("{text}  {}", places.join(" "));
    }
    format!("{text}: {}", problem.detail)
}

#[cfg(test)]
mod tests {
    use cynode_audit::{SigningKey, Verifier};

    use super::*;

    #[test]
    fn a_verdict_shows_its_counts() {
        let verdict = AuditVerdict {
            records: 2,
            streams: 1,
            truncated: 4,
            ..Verifier::new(SigningKey::from_seed([1; 32]).public()).finish()
        };
        assert_eq!(
            summary(&verdict),
            "2 records in 1 stream, 0 checkpoints, 4 removed by retention, \
             0 calls without an outcome, none after the last checkpoint"
        );
        let verdict = AuditVerdict {
            unsigned: 2,
            ..verdict
        };
        assert!(
            summary(&verdict).ends_with(", 2 after the last checkpoint (chained but not signed)")
        );
    }

    #[test]
    fn a_problem_is_one_line_with_its_location() {
        let problem = AuditProblem {
            what: "record_changed".into(),
            stream: None,
            seq: Some(3),
            cursor: Some(9),
            checkpoint: None,
            detail: "x".into(),
        };
        assert_eq!(
            problem_line(&problem),
            "record_changed  number 3 cursor 9: x"
        );
    }

    #[test]
    fn a_trail_signed_by_another_key_is_not_intact() {
        let (ours, other) = (
            SigningKey::from_seed([1; 32]).public(),
            SigningKey::from_seed([2; 32]).public(),
        );
        let mut verdict = Verifier::new(ours).finish();
        compare_key(&mut verdict, &ours);
        assert!(verdict.intact);
        compare_key(&mut verdict, &other);
        assert!(!verdict.intact && verdict.problems[0].what == "signature_bad");
    }
}

//! `audit verify`: the server verifies its own trail, with the file that it keeps outside the database.

use std::process::ExitCode;

use cynode_api::{AuditProblem, AuditVerdict, AuditVerifyLine};
use cynode_audit::PublicKey;
use cynode_client::UserClient;

use crate::{
    cli::{Format, Globals},
    failure::{Failure, UNREACHABLE},
    output::{self, Progress},
    plane::{Outcome, moment},
    sanitize,
};

/// Something was changed.
const BROKEN: u8 = 1;

pub async fn run(client: &UserClient, globals: &Globals, key: Option<PublicKey>) -> Outcome {
    let progress = Progress::start("verifying");
    let mut verification = client.verify_audit().await?;
    while let Some(line) = verification.next().await? {
        match line {
            AuditVerifyLine::Progress { checked, of } => {
                progress.say(format!("verifying: {checked} of {of} records"))
            }
            AuditVerifyLine::Verdict { mut verdict } => {
                drop(progress);
                if let Some(key) = key {
                    hold_against(&mut verdict, &key);
                }
                return tell(globals, &verdict);
            }
        }
    }
    Err(Failure::new(
        UNREACHABLE,
        "unreachable",
        "the verification ended without a verdict",
    )
    .remedy("Try again."))
}

/// Whoever could change everything could also sign anew, with another key.
fn hold_against(verdict: &mut AuditVerdict, key: &PublicKey) {
    if verdict.key != key.to_text() {
        verdict.intact = false;
        let detail = format!(
            "the checkpoints are signed with {}, not with {key}: another CyNode's key was given, or somebody signed the trail anew",
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

/// The verdict on stdout: as JSON, or a line for each problem, or one that says that all is well.
pub fn tell(globals: &Globals, verdict: &AuditVerdict) -> Outcome {
    match globals.output {
        Format::Json => output::json(verdict)?,
        Format::Table if verdict.intact => {
            output::line(&sanitize::line(&format!("intact: {}", counted(verdict))))?
        }
        Format::Table => {
            for problem in &verdict.problems {
                output::line(&sanitize::line(&line(problem)))?;
            }
            if verdict.more_problems {
                output::line("… and more")?;
            }
            output::note(&sanitize::line(&format!(
                "NOT intact: {}",
                counted(verdict)
            )));
        }
    }
    if verdict.records > 0 && verdict.checkpoints == 0 {
        output::note("no checkpoint is there: only that the records fit one another was verified");
    }
    Ok(if verdict.intact {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(BROKEN)
    })
}

fn counted(verdict: &AuditVerdict) -> String {
    let signed = verdict
        .last_signed_at
        .map(|at| format!(", signed up to {} with {}", moment(at), verdict.key))
        .unwrap_or_default();
    let removed = if verdict.truncated > 0 {
        format!(", {} removed by retention", verdict.truncated)
    } else {
        String::new()
    };
    let count =
        |count: u64, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    format!(
        "{} in {}, {}{removed}, {} without an outcome{signed}, {}",
        count(verdict.records, "record"),
        count(verdict.streams, "stream"),
        count(verdict.checkpoints, "checkpoint"),
        count(verdict.open, "call"),
        match (verdict.unsigned, verdict.unsigned_since) {
            (0, _) => "none after the last checkpoint".to_owned(),
            (unsigned, Some(since)) => format!(
                "{unsigned} after the last checkpoint (from {} on, chained and not signed)",
                moment(since)
            ),
            (unsigned, None) =>
                format!("{unsigned} after the last checkpoint (chained and not signed)"),
        }
    )
}

fn line(problem: &AuditProblem) -> String {
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
    fn a_verdict_counts_what_it_saw() {
        let verdict = AuditVerdict {
            records: 2,
            streams: 1,
            truncated: 4,
            ..Verifier::new(SigningKey::from_seed([1; 32]).public()).finish()
        };
        assert_eq!(
            counted(&verdict),
            "2 records in 1 stream, 0 checkpoints, 4 removed by retention, 0 calls without an outcome, none after the last checkpoint"
        );
        let verdict = AuditVerdict {
            unsigned: 2,
            ..verdict
        };
        assert!(
            counted(&verdict).ends_with(", 2 after the last checkpoint (chained and not signed)")
        );
    }

    #[test]
    fn a_problem_is_a_line_that_says_where() {
        let problem = AuditProblem {
            what: "record_changed".into(),
            stream: None,
            seq: Some(3),
            cursor: Some(9),
            checkpoint: None,
            detail: "x".into(),
        };
        assert_eq!(line(&problem), "record_changed  number 3 cursor 9: x");
    }

    #[test]
    fn a_trail_that_another_key_signed_is_not_intact() {
        let (ours, other) = (
            SigningKey::from_seed([1; 32]).public(),
            SigningKey::from_seed([2; 32]).public(),
        );
        let mut verdict = Verifier::new(ours).finish();
        hold_against(&mut verdict, &ours);
        assert!(verdict.intact);
        hold_against(&mut verdict, &other);
        assert!(!verdict.intact && verdict.problems[0].what == "signature_bad");
    }
}

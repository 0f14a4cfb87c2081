//! `audit verify --file`: verifies an export with its proof offline.
//!
//! An unreadable line is a problem like any other: the damage may be deliberate.

use std::{
    io::{self, BufRead, BufReader, Read as _},
    path::Path,
};

use cynode_api::{AuditProblem, AuditVerdict, MAX_AUDIT_PROBLEMS};
use cynode_audit::{Link, PublicKey, SignedCheckpoint, Verifier};
use serde_json::Value;
use time::OffsetDateTime;

use super::verify::print_verdict;
use crate::{
    cli::Globals,
    commands::CommandResult,
    failure::Failure,
    output::{self, Progress},
};

/// The longest line: a full checkpoint of very many streams.
const MAX_LINE: u64 = 256 * 1024 * 1024;
/// Lines between updates of the progress.
const PROGRESS_INTERVAL: u64 = 10_000;

pub fn run(globals: &Globals, file: &Path, key: PublicKey) -> CommandResult {
    let progress = Progress::start("verifying");
    let verdict = if file == Path::new("-") {
        verify(io::stdin().lock(), key, &progress)?
    } else {
        let file = fs_err::File::open(file).map_err(|error| Failure::usage(error.to_string()))?;
        verify(BufReader::with_capacity(1024 * 1024, file), key, &progress)?
    };
    drop(progress);
    if verdict.records == 0 && verdict.intact {
        output::message("the file has no records");
    }
    print_verdict(globals, &verdict)
}

fn verify(
    mut lines: impl BufRead,
    key: PublicKey,
    progress: &Progress,
) -> io::Result<AuditVerdict> {
    let mut verifier = Verifier::new(key);
    let mut checkpoints = CheckpointFeed::new(key);
    let mut unreadable = UnreadableLines::default();
    let mut in_records = false;
    let mut line = Vec::new();
    for number in 1_u64.. {
        line.clear();
        if lines.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if number % PROGRESS_INTERVAL == 0 {
            progress.set_message(format!("verifying: {number} lines"));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match read(&line) {
            Ok(ExportLine::Checkpoint(signed)) if !in_records => {
                checkpoints.next(*signed, &mut verifier);
            }
            Ok(ExportLine::Checkpoint(_)) => {
                unreadable.add(number, "checkpoint_changed", "a checkpoint follows records");
            }
            Ok(ExportLine::Record(cursor, link)) => {
                in_records = true;
                verifier.record(cursor, &link);
            }
            Err((kind, reason)) => unreadable.add(number, kind, &reason),
        }
    }
    Ok(unreadable.join(checkpoints.finish(verifier.finish())))
}

/// Passes checkpoints to the verifier once one of them is signed with the key. If none is, the key
/// belongs to another trail, which is one problem, not one for each checkpoint.
#[derive(Debug)]
struct CheckpointFeed {
    key: PublicKey,
    is_signer: bool,
    /// At most as many as the verdict lists as problems.
    withheld: Vec<SignedCheckpoint>,
    withheld_count: u64,
    last: Option<OffsetDateTime>,
}

impl CheckpointFeed {
    const fn new(key: PublicKey) -> Self {
        Self {
            key,
            is_signer: false,
            withheld: Vec::new(),
            withheld_count: 0,
            last: None,
        }
    }

    fn next(&mut self, signed: SignedCheckpoint, verifier: &mut Verifier) {
        if !self.is_signer && !signed.verify(&self.key) {
            self.withheld_count += 1;
            self.last = Some(signed.checkpoint.at);
            // One more than the verdict lists, so that it reports that there are more.
            if self.withheld.len() <= MAX_AUDIT_PROBLEMS {
                self.withheld.push(signed);
            }
            return;
        }
        self.is_signer = true;
        for signed in self.withheld.drain(..).chain([signed]) {
            verifier.checkpoint(&signed);
        }
    }

    fn finish(self, mut verdict: AuditVerdict) -> AuditVerdict {
        if self.is_signer || self.withheld_count == 0 {
            return verdict;
        }
        let subject = match self.withheld_count {
            1 => "the checkpoint was not".to_owned(),
            count => format!("none of the {count} checkpoints was"),
        };
        let until = self
            .last
            .map(|last| format!(", up to {},", crate::commands::format_time(last)))
            .unwrap_or_default();
        let detail = format!(
            "{subject} signed with {}{until}: another key signed this trail, or it was changed",
            self.key
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
        AuditVerdict {
            intact: false,
            checkpoints: self.withheld_count,
            ..verdict
        }
    }
}

enum ExportLine {
    Checkpoint(Box<SignedCheckpoint>),
    Record(i64, Link),
}

fn read(line: &[u8]) -> Result<ExportLine, (&'static str, String)> {
    let value: Value =
        serde_json::from_slice(line).map_err(|error| ("record_changed", error.to_string()))?;
    match value.get("checkpoint").and_then(Value::as_str) {
        Some(text) => SignedCheckpoint::parse(text)
            .map(|signed| ExportLine::Checkpoint(Box::new(signed)))
            .map_err(|error| ("checkpoint_changed", error.to_string())),
        None => Link::from_record(value)
            .map(|(cursor, link)| ExportLine::Record(cursor, link))
            .map_err(|error| ("record_changed", error.to_string())),
    }
}

/// Lines that are neither a checkpoint nor a record.
#[derive(Debug, Default)]
struct UnreadableLines {
    problems: Vec<AuditProblem>,
    more: bool,
}

impl UnreadableLines {
    fn add(&mut self, number: u64, kind: &str, reason: &str) {
        if self.problems.len() >= MAX_AUDIT_PROBLEMS {
            self.more = true;
            return;
        }
        let detail = format!("line {number} of the file is invalid: {reason}");
        self.problems.push(AuditProblem {
            what: kind.to_owned(),
            stream: None,
            seq: None,
            cursor: None,
            checkpoint: None,
            detail,
        });
    }

    fn join(mut self, mut verdict: AuditVerdict) -> AuditVerdict {
        self.problems.append(&mut verdict.problems);
        let more = verdict.more_problems || self.more || self.problems.len() > MAX_AUDIT_PROBLEMS;
        self.problems.truncate(MAX_AUDIT_PROBLEMS);
        AuditVerdict {
            intact: self.problems.is_empty(),
            problems: self.problems,
            more_problems: more,
            ..verdict
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cynode_audit::{Chain, Checkpoint, SigningKey};
    use serde_json::json;
    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;

    fn key() -> SigningKey {
        SigningKey::from_seed([5; 32])
    }

    /// An export of ten records with a proof, as lines.
    fn export() -> Vec<String> {
        export_with(1)
    }

    fn export_with(checkpoints: u64) -> Vec<String> {
        let mut chain = Chain::new(Uuid::now_v7());
        let now = OffsetDateTime::now_utc();
        let records: Vec<String> = (1..=10)
            .map(|cursor| {
                let link = chain.append(
                    now,
                    json!({"version": 1, "kind": "event", "action": "x", "detail": {"n": cursor}}),
                );
                serde_json::to_string(&link.to_record(cursor).expect("a record"))
                    .expect("records serialise")
            })
            .collect();
        let mut prev = Checkpoint::FIRST;
        let mut lines = Vec::new();
        for number in 1..=checkpoints {
            let heads = BTreeMap::from([(chain.stream(), chain.head())]);
            let signed = Checkpoint {
                number,
                at: now,
                prev,
                full: true,
                cursor: 10,
                heads,
                cut: BTreeMap::new(),
                truncated_records: 0,
            }
            .sign(&key());
            prev = signed.hash;
            lines.push(json!({"checkpoint": signed.to_line()}).to_string());
        }
        lines.extend(records);
        lines
    }

    fn verdict(lines: &[String], key: PublicKey) -> AuditVerdict {
        verify(lines.join("\n").as_bytes(), key, &Progress::start("")).expect("memory can be read")
    }

    #[test]
    fn an_export_is_verified_offline() {
        let verdict = verdict(&export(), key().public());
        assert!(
            verdict.intact && verdict.records == 10 && verdict.checkpoints == 1,
            "{verdict:?}"
        );
    }

    #[test]
    fn an_export_with_unknown_members_is_verified() {
        let mut chain = Chain::new(Uuid::now_v7());
        let link = chain.append(
            OffsetDateTime::now_utc(),
            json!({"version": 9, "kind": "weather", "mood": {"b": 1, "a": 2}}),
        );
        let mut record = link.body.clone();
        for (name, value) in [
            ("cursor", json!(1)),
            ("seq", json!(1)),
            ("stream", json!(link.stream)),
        ] {
            record[name] = value;
        }
        record["at"] = crate::commands::format_time(link.at).into();
        record["hash"] = hex::encode(link.hash).into();
        assert!(verdict(&[record.to_string()], key().public()).intact);
    }

    #[test]
    fn a_changed_export_is_detected() {
        let found = |change: &dyn Fn(&mut Vec<String>)| {
            let mut lines = export();
            change(&mut lines);
            let verdict = verdict(&lines, key().public());
            assert!(!verdict.intact);
            verdict.problems[0].what.clone()
        };
        assert_eq!(
            found(&|lines| lines[3] = lines[3].replace("\"n\":3", "\"n\":4")),
            "record_changed"
        );
        assert_eq!(found(&|lines| drop(lines.remove(4))), "record_missing");
        assert_eq!(found(&|lines| lines.truncate(8)), "tail_missing");
        assert_eq!(found(&|lines| lines.truncate(1)), "stream_missing");
        assert_eq!(found(&|lines| lines.swap(2, 3)), "order_changed");
        assert_eq!(found(&|lines| lines[5].truncate(20)), "record_changed");
        assert_eq!(
            found(&|lines| lines[0] = lines[0].replace("10", "11")),
            "signature_bad"
        );
        assert_eq!(
            found(&|lines| lines[0] = json!({"checkpoint": "x"}).to_string()),
            "checkpoint_changed"
        );
        assert_eq!(found(&|lines| lines.rotate_left(1)), "checkpoint_changed");
        assert_eq!(
            found(&|lines| lines.push("{}".to_owned())),
            "record_changed"
        );
    }

    #[test]
    fn another_key_is_one_problem_for_all_checkpoints() {
        let other = SigningKey::from_seed([6; 32]).public();
        for count in [1, 2, MAX_AUDIT_PROBLEMS as u64 + 50] {
            let lines = export_with(count);
            assert!(verdict(&lines, key().public()).intact, "{count}");
            let verdict = verdict(&lines, other);
            assert!(
                !verdict.intact
                    && !verdict.more_problems
                    && verdict.checkpoints == count
                    && verdict.records == 10,
                "{verdict:?}"
            );
            assert_eq!(
                verdict
                    .problems
                    .iter()
                    .map(|problem| problem.what.as_str())
                    .collect::<Vec<_>>(),
                ["signature_bad"]
            );
            assert!(
                verdict.problems[0].detail.contains(&other.to_text()),
                "{verdict:?}"
            );
        }
        // Damage to the records is reported beside the wrong key.
        let mut lines = export();
        lines[3] = lines[3].replace("\"n\":3", "\"n\":4");
        let found: Vec<String> = verdict(&lines, other)
            .problems
            .into_iter()
            .map(|problem| problem.what)
            .collect();
        assert_eq!(found, ["signature_bad", "record_changed"]);
    }

    #[test]
    fn bad_signatures_before_a_good_one_are_each_a_problem() {
        let spoil = |line: &String| line.replace(":10,", ":11,");
        let mut lines = export_with(3);
        lines[0] = spoil(&lines[0]);
        let verdict_of = |lines: &[String]| verdict(lines, key().public());
        let found = verdict_of(&lines);
        assert!(
            found
                .problems
                .iter()
                .filter(|problem| problem.what == "signature_bad")
                .count()
                == 1
                && found.problems[0].checkpoint == Some(1),
            "{found:?}"
        );
        let mut lines = export_with(MAX_AUDIT_PROBLEMS as u64 + 3);
        for line in &mut lines[..=MAX_AUDIT_PROBLEMS] {
            *line = spoil(line);
        }
        let found = verdict_of(&lines);
        assert!(
            found.more_problems && found.problems.len() == MAX_AUDIT_PROBLEMS,
            "{found:?}"
        );
    }

    #[test]
    fn a_file_of_garbage_lists_a_bounded_number_of_problems() {
        let verdict = verdict(&vec!["garbage".to_owned(); 1_000], key().public());
        assert!(
            !verdict.intact
                && verdict.more_problems
                && verdict.problems.len() == MAX_AUDIT_PROBLEMS
        );
    }
}

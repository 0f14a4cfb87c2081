//! Describes a call in one line.

use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditRecord, AuditResult, AuditSubject, EGRESS_SUBJECT,
};
use serde_json::Value;

use super::{
    Call,
    text::{duration, plural, quoted, shown, size, truncate},
};
use crate::action::{TargetKind, Verb, target_kind, verb};

/// The number of changed files that a line names.
const MAX_FILES: usize = 5;
/// The digits of a commit that a line names.
const COMMIT_DIGITS: usize = 12;

pub(super) fn actor(subject: Option<&AuditSubject>) -> String {
    let Some(subject) = subject else {
        return "system".to_owned();
    };
    let name = subject.name.as_deref().map(shown);
    match (subject.kind.as_str(), name) {
        ("user", Some(name)) => name,
        (kind, Some(name)) if kind != name => format!("{}({name})", shown(kind)),
        ("user", None) => subject
            .user_id
            .map_or_else(|| "user".to_owned(), |id| format!("user({id})")),
        ("node", None) => subject
            .node_id
            .map_or_else(|| "node".to_owned(), |id| format!("node({id})")),
        (kind, _) => shown(kind),
    }
}

pub(super) fn summary(call: &Call<'_>) -> String {
    let body = &call.first().body;
    let request = match target_kind(body) {
        TargetKind::Exec => exec(call),
        TargetKind::File => file(call),
        TargetKind::Artifact | TargetKind::Other => other(call),
    };
    if call.is_denied() {
        return denied(call);
    }
    let end = if call.is_open() {
        " → no outcome yet".to_owned()
    } else {
        match target_kind(body) {
            TargetKind::Exec => exec_end(call),
            _ if is_of_role(body) => role_end(call),
            _ => end(call),
        }
    };
    format!("{}{end}", truncate(&request))
}

/// One record on its own: `intent  ada  session.exec make test → allowed by rule default/owners`.
pub(super) fn headline(record: &AuditRecord) -> String {
    let body = &record.body;
    let is_outcome = body.kind == AuditKind::Outcome;
    let call = Call {
        intent: (!is_outcome).then_some(record),
        outcome: is_outcome.then_some(record),
    };
    let changes: Vec<String> = call.changes().iter().take(MAX_FILES).map(change).collect();
    let request = if changes.is_empty() {
        other(&call)
    } else {
        format!("{} {}", shown(&body.action), changes.join(", "))
    };
    let end = if is_outcome {
        match (target_kind(body), call.result()) {
            (TargetKind::Exec, _) => exec_end(&call),
            (_, Some(result)) => format!(" → {}", failure(&call, result)),
            (_, None) => String::new(),
        }
    } else if is_of_role(body) {
        role_end(&call)
    } else {
        let word = body.decision.map(|decision| {
            if decision == AuditDecision::Deny {
                " → denied"
            } else {
                " → allowed"
            }
        });
        word.map(|word| format!("{word}{}", decided_by(body)))
            .unwrap_or_default()
    };
    format!(
        "{}  {}  {}{end}",
        body.kind.as_str(),
        actor(body.subject.as_ref()),
        truncate(&request)
    )
}

fn target(call: &Call<'_>) -> Option<String> {
    if let Some(argv) = argv(call) {
        return Some(argv);
    }
    if let (Some(from), Some(to)) = (call.text("from"), call.text("to")) {
        return Some(format!("{} → {}", quoted(from), quoted(to)));
    }
    let resource = call.first().body.resource.as_deref().or_else(|| {
        call.outcome
            .and_then(|outcome| outcome.body.resource.as_deref())
    });
    call.text("path")
        .map(quoted)
        .or_else(|| resource.map(shown))
}

fn argv(call: &Call<'_>) -> Option<String> {
    let argv = call.get("argv")?.as_array()?;
    Some(
        argv.iter()
            .map(|word| quoted(word.as_str().unwrap_or("?")))
            .collect::<Vec<_>>()
            .join(" "),
    )
}

fn exec(call: &Call<'_>) -> String {
    format!(
        "exec  {}",
        target(call).unwrap_or_else(|| "(unknown command)".to_owned())
    )
}

fn exec_end(call: &Call<'_>) -> String {
    let failed = call.result().filter(|result| *result != AuditResult::Done);
    let end = if call.is_true("timed_out") {
        "timed out".to_owned()
    } else if call.is_true("oom_killed") {
        "out of memory".to_owned()
    } else if let Some(signal) = call.text("signal") {
        format!("killed by {}", shown(signal))
    } else if let Some(code) = call.get("exit_code").and_then(Value::as_i64) {
        format!("exit {code}")
    } else if let Some(failed) = failed {
        failure(call, failed)
    } else if call.is_true("background") {
        "in the background".to_owned()
    } else {
        "done".to_owned()
    };
    let took = call.get("duration_ms").and_then(Value::as_u64);
    let out = call.get("bytes").and_then(Value::as_object).map(|bytes| {
        bytes
            .values()
            .filter_map(Value::as_u64)
            .fold(0, u64::saturating_add)
    });
    let facts: Vec<String> = took
        .map(duration)
        .into_iter()
        .chain(out.map(|out| format!("{} out", size(out))))
        .collect();
    if facts.is_empty() {
        format!(" → {end}")
    } else {
        format!(" → {end} ({})", facts.join(", "))
    }
}

fn file(call: &Call<'_>) -> String {
    let body = &call.first().body;
    let word = match verb(&body.action) {
        Verb::Create => "create",
        Verb::Read => "read",
        Verb::Update if body.action.contains("patch") => "patch",
        Verb::Update => "write",
        Verb::Delete => "delete",
        Verb::Move => "move",
        Verb::Other => &shown(&body.action),
    };
    let changes = call.changes();
    match changes {
        [] => target(call).map_or_else(|| word.to_owned(), |target| format!("{word} {target}")),
        [one] => format!("{word} {}", change(one)),
        [first, ..] => {
            let named: Vec<String> = changes.iter().take(MAX_FILES).map(change).collect();
            let more = changes.len() - named.len();
            let rest = if more > 0 {
                format!(", and {more} more")
            } else {
                String::new()
            };
            // Paths can be long; name at least the first one in full.
            let listed = format!(
                "{word} {}: {}{rest}",
                plural(changes.len() as u64, "file", "files"),
                named.join(", ")
            );
            if listed.chars().count() > 400 {
                format!(
                    "{word} {}: {}, …",
                    plural(changes.len() as u64, "file", "files"),
                    change(first)
                )
            } else {
                listed
            }
        }
    }
}

fn change(change: &Value) -> String {
    let hash = |name: &str| {
        change
            .get(name)
            .and_then(Value::as_str)
            .map(|hash| format!("{}…", shown(&hash.chars().take(4).collect::<String>())))
    };
    let path = quoted(change.get("path").and_then(Value::as_str).unwrap_or("?"));
    match (hash("sha256_before"), hash("sha256_after")) {
        (Some(before), Some(after)) => format!("{path} (sha256 {before} → {after})"),
        (None, Some(after)) => format!("{path} (new, sha256 {after})"),
        (Some(before), None) => format!("{path} (sha256 {before} → gone)"),
        (None, None) => path,
    }
}

fn other(call: &Call<'_>) -> String {
    let body = &call.first().body;
    let action = shown(&body.action);
    let state = (body.kind == AuditKind::Event)
        .then(|| call.text("state"))
        .flatten()
        .map(|state| format!(" {}", shown(state)));
    match target(call) {
        Some(target) if is_of_role(body) => format!("{action} {target}{}", role_facts(call)),
        Some(target) => format!("{action} {target}{}", state.unwrap_or_default()),
        None => format!("{action}{}", state.unwrap_or_default()),
    }
}

fn is_of_role(body: &AuditBody) -> bool {
    let subject = body.subject.as_ref();
    body.kind == AuditKind::Event && subject.is_some_and(|subject| subject.kind == EGRESS_SUBJECT)
}

/// What an egress role did it to: ` (cynode/1/fix, 0123456789ab)`.
fn role_facts(call: &Call<'_>) -> String {
    let commit = call
        .text("commit")
        .map(|commit| commit.chars().take(COMMIT_DIGITS).collect::<String>());
    let named = ["reference", "branch", "url"]
        .into_iter()
        .filter_map(|name| call.text(name).map(shown));
    let facts: Vec<String> = named.chain(commit.as_deref().map(shown)).collect();
    if facts.is_empty() {
        String::new()
    } else {
        format!(" ({})", facts.join(", "))
    }
}

/// A role records its decision before an effect, and the result after it.
fn role_end(call: &Call<'_>) -> String {
    let body = &call.first().body;
    match (body.decision, call.result()) {
        (Some(AuditDecision::Deny), _) => format!(" → denied{}", decided_by(body)),
        (_, Some(result)) => format!(" → {}", failure(call, result)),
        (Some(AuditDecision::Allow), None) => format!(" → allowed{}", decided_by(body)),
        (None, None) => String::new(),
    }
}

fn end(call: &Call<'_>) -> String {
    match call.result() {
        Some(AuditResult::Done) | None => String::new(),
        Some(result) => format!(" → {}", failure(call, result)),
    }
}

fn failure(call: &Call<'_>, result: AuditResult) -> String {
    let word = match result {
        AuditResult::Done => "done",
        AuditResult::Failed => "failed",
        AuditResult::Refused => "refused",
        AuditResult::NotStarted => "not started",
        AuditResult::Unknown => "outcome unknown",
    };
    call.code().map_or_else(
        || word.to_owned(),
        |code| format!("{word}: {}", shown(code)),
    )
}

fn denied(call: &Call<'_>) -> String {
    let body = &call.first().body;
    let target = target(call)
        .map(|target| format!(" {}", truncate(&target)))
        .unwrap_or_default();
    format!("denied {}{target}{}", shown(&body.action), decided_by(body))
}

/// The rules that decided, or else the stage that denied the call.
fn decided_by(body: &AuditBody) -> String {
    match (body.rules.as_slice(), &body.stage) {
        ([], Some(stage)) => format!(" at stage {}", shown(stage)),
        ([], None) => String::new(),
        ([rule], _) => format!(" by rule {}", shown(rule)),
        (rules, _) => format!(
            " by rules {}",
            rules
                .iter()
                .map(|rule| shown(rule))
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}

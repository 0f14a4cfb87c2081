//! What the record of a call says of it, and what rules may look at. Names, sizes and hashes; never the value of a variable,
//! input, or the content of a file.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_policy::{Action, Call, within_workspace};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::blobs::hex;

/// The longest text that a record repeats, and how many of a list.
const MAX_TEXT: usize = 4_096;
const MAX_ITEMS: usize = 256;
/// What a diff may strip of its paths; nodes take no more.
const MAX_STRIP: u64 = 32;
/// All the texts of one record together.
const MAX_TOTAL: usize = 16_384;

/// What of a body a record repeats as it is, by action. Nothing else gets in.
fn repeated(action: Action) -> &'static [&'static str] {
    match action {
        Action::SessionExec => &["argv", "cwd", "timeout_ms", "background", "stdin_open", "max_output_bytes"],
        Action::SessionCreate => {
            &["image_ref", "workspace_ref", "limits", "network_policy", "max_lifetime_seconds", "idle_timeout_seconds", "pty_allowed", "labels", "node_labels"]
        }
        Action::JobCreate => &["command", "image_ref", "workspace_ref", "timeout_seconds", "limits", "network_policy", "retry", "node_labels"],
        Action::SessionUpdate => &["max_lifetime_seconds", "idle_timeout_seconds", "labels"],
        Action::SessionEnd => &["reason", "workspace"],
        Action::SessionSignal | Action::ExecSignal => &["signal", "scope"],
        Action::ExecStdin => &["eof"],
        Action::SessionExport => &["format", "base"],
        Action::FileMove => &["from", "to", "overwrite"],
        Action::FileMkdir => &["path", "parents"],
        Action::FileList => &["path", "depth", "hidden"],
        Action::FileSearch => &["pattern", "glob", "path"],
        Action::FilePatch => &["strip", "dry_run"],
        Action::ProjectCreate | Action::ProjectUpdate => &["name", "slug"],
        Action::TaskCreate | Action::TaskUpdate => &["name", "project_id", "status", "profile"],
        Action::UserCreate => &["name", "is_admin"],
        Action::GroupCreate => &["name", "members"],
        Action::TokenCreate => &["kind", "user", "project_id", "task_ids", "job_id", "session_id", "expires_in_seconds"],
        Action::ImageAdd | Action::ImageUpdate => &["name", "image_ref", "image_digest", "image_version", "is_allowed", "description"],
        Action::NodeDrain => &["drain"],
        Action::NodeKey => &["reusable", "expires_in_seconds"],
        Action::PolicyTest => &["user", "token_id", "action"],
        _ => &[],
    }
}

/// What of a body is said by size and hash only.
fn hashed(action: Action) -> &'static [&'static str] {
    match action {
        Action::SessionExec => &["stdin", "stdin_b64"],
        Action::ExecStdin => &["data_b64"],
        Action::FilePatch => &["diff"],
        Action::PolicyPut => &["text"],
        Action::SettingPut | Action::PreferencePut => &["value"],
        _ => &[],
    }
}

/// What the record of a call says, from its body and query.
pub(crate) fn detail(action: Action, body: &Value, query: &[(String, String)]) -> Map<String, Value> {
    let mut detail = Map::new();
    for name in repeated(action) {
        if let Some(value) = body.get(*name).filter(|value| !value.is_null()) {
            detail.insert((*name).to_owned(), value.clone());
        }
    }
    for name in hashed(action) {
        if let Some(value) = body.get(*name).filter(|value| !value.is_null()) {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let (name, bytes) = match name.strip_suffix("_b64") {
                Some(name) => (name, STANDARD.decode(&text).unwrap_or_else(|_| text.into_bytes())),
                None => (*name, text.into_bytes()),
            };
            detail.insert(name.to_owned(), sized(&bytes));
        }
    }
    if let Some(env) = body.get("env").and_then(Value::as_object).filter(|env| !env.is_empty()) {
        detail.insert("env".to_owned(), env.keys().cloned().collect());
    }
    for (name, value) in query {
        if matches!(name.as_str(), "path" | "path_b64" | "recursive" | "cols" | "rows" | "version") {
            detail.insert(name.clone(), json!(value));
        } else if name == "argv" {
            let argv = detail.entry("argv").or_insert_with(|| json!([]));
            argv.as_array_mut().map(|argv| argv.push(json!(value))).unwrap_or_default();
        }
    }
    bounded(detail)
}

pub(crate) fn sized(bytes: &[u8]) -> Value {
    json!({"size": bytes.len(), "sha256": hex(&Sha256::digest(bytes))})
}

/// A record stays small whatever a caller sends, and holds nothing that PostgreSQL or the chain can't: no NUL, no fractions.
pub(crate) fn bounded(detail: Map<String, Value>) -> Map<String, Value> {
    let mut left = MAX_TOTAL;
    detail.into_iter().map(|(name, value)| (name, shortened(value, &mut left))).collect()
}

fn shortened(value: Value, left: &mut usize) -> Value {
    // Every value counts, also one that is no text: a list of lists is not free.
    if *left < 8 {
        return Value::Null;
    }
    *left -= 8;
    match value {
        Value::String(text) => Value::String(short(text, left)),
        Value::Number(number) if !number.is_i64() && !number.is_u64() => Value::String(number.to_string()),
        Value::Array(items) => {
            let more = items.len().saturating_sub(MAX_ITEMS);
            let mut kept: Vec<Value> = items.into_iter().take(MAX_ITEMS).map(|item| shortened(item, left)).collect();
            if more > 0 {
                kept.push(json!(format!("… and {more} more")));
            }
            Value::Array(kept)
        }
        Value::Object(members) => {
            Value::Object(members.into_iter().take(MAX_ITEMS).map(|(name, member)| (short(name, left), shortened(member, left))).collect())
        }
        other => other,
    }
}

/// A text, or its beginning with the size and hash of the whole.
fn short(text: String, left: &mut usize) -> String {
    let text = if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text };
    let most = MAX_TEXT.min(*left);
    if text.len() <= most {
        *left -= text.len();
        return text;
    }
    let mut end = most.min(256);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    *left -= end;
    format!("{}… ({} bytes, sha256 {})", &text[..end], text.len(), hex(&Sha256::digest(text.as_bytes())))
}

/// What rules may look at: one for each path that a call touches.
pub(crate) fn calls(action: Action, body: &Value, query: &[(String, String)], entries: &[String]) -> Vec<Call> {
    let text = |name: &str| body.get(name).and_then(Value::as_str).map(str::to_owned);
    let mut call = Call::default();
    match action {
        Action::SessionExec => call.program = body["argv"][0].as_str().map(str::to_owned),
        Action::JobCreate => {
            call.program = body["command"][0].as_str().map(str::to_owned);
            call.image = text("image_ref");
            call.network = text("network_policy");
        }
        Action::SessionCreate => {
            call.image = text("image_ref");
            call.network = text("network_policy");
            call.pty = body["pty_allowed"].as_bool().unwrap_or(false);
        }
        Action::SessionPty => {
            call.pty = true;
            call.program = query.iter().find(|(name, _)| name == "argv").map(|(_, value)| value.clone());
        }
        Action::TokenCreate => call.token_kind = text("kind"),
        _ => {}
    }
    let paths = paths(action, body, query, entries);
    if paths.is_empty() {
        return vec![call];
    }
    paths.into_iter().map(|path| Call { path: Some(within_workspace(&path)), ..call.clone() }).collect()
}

fn paths(action: Action, body: &Value, query: &[(String, String)], entries: &[String]) -> Vec<String> {
    // A name stands there as text or, when it is none, as bytes in base64.
    let named = |name: &str| -> Vec<String> {
        let text = |name: &str| body.get(name).and_then(Value::as_str);
        let bytes = text(&format!("{name}_b64")).and_then(|text| STANDARD.decode(text).ok()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        text(name).map(str::to_owned).into_iter().chain(bytes).collect()
    };
    match action {
        Action::FileRead | Action::FileStat | Action::FileWrite | Action::FileDelete => vec![queried_path(query)],
        Action::FileList | Action::FileSearch | Action::FileMkdir => {
            let named = named("path");
            if named.is_empty() { vec![".".to_owned()] } else { named }
        }
        Action::FileMove => [named("from"), named("to")].into_iter().flatten().collect(),
        Action::FilePatch => patched(body["diff"].as_str().unwrap_or_default(), body["strip"].as_u64().unwrap_or(1)),
        Action::FileImport => {
            let base = queried_path(query);
            let mut paths: Vec<String> = entries.iter().map(|entry| format!("{base}/{entry}")).collect();
            paths.push(base);
            paths
        }
        _ => Vec::new(),
    }
}

fn queried_path(query: &[(String, String)]) -> String {
    let value = |wanted: &str| query.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.clone());
    let from_bytes = || value("path_b64").and_then(|text| STANDARD.decode(text).ok()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    value("path").or_else(from_bytes).unwrap_or_else(|| ".".to_owned())
}

/// Every path that a diff could mean. Rather one too many: each of them must be allowed.
fn patched(diff: &str, strip: u64) -> Vec<String> {
    let strip = usize::try_from(strip.min(MAX_STRIP)).unwrap_or_default();
    let mut found = std::collections::BTreeSet::new();
    let mut add = |name: &str, strip: usize| {
        let name = unquoted(name);
        let parts: Vec<&str> = name.split('/').filter(|part| !part.is_empty()).skip(strip).collect();
        if !parts.is_empty() && name != "/dev/null" {
            found.insert(parts.join("/"));
        }
    };
    for line in diff.lines() {
        if let Some(name) = line.strip_prefix("--- ").or_else(|| line.strip_prefix("+++ ")) {
            add(name.split('\t').next().unwrap_or_default(), strip);
            add(name, strip);
        } else if let Some(names) = line.strip_prefix("diff --git ") {
            // Where one name ends and the other begins can't be told from the line alone.
            for (at, _) in names.match_indices(' ') {
                add(&names[..at], strip);
                add(&names[at + 1..], strip);
            }
        } else if let Some(name) = ["rename from ", "rename to ", "copy from ", "copy to "].iter().find_map(|start| line.strip_prefix(start)) {
            add(name, 0);
            add(name, strip.saturating_sub(1));
        }
    }
    found.into_iter().collect()
}

/// A name as git writes it: in quotes, with escapes, when it holds anything unusual.
fn unquoted(name: &str) -> String {
    let name = name.trim_end_matches('\r');
    let Some(inner) = name.strip_prefix('"').and_then(|rest| rest.rfind('"').map(|end| &rest[..end])) else { return name.to_owned() };
    let (mut bytes, mut rest) = (Vec::new(), inner.as_bytes());
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'\\' {
            bytes.push(first);
            continue;
        }
        let octal: Vec<u8> = rest.iter().copied().take(3).take_while(|byte| (b'0'..=b'7').contains(byte)).collect();
        if octal.is_empty() {
            let escaped = rest.first().copied().unwrap_or(b'\\');
            bytes.push(match escaped {
                b'n' => b'\n',
                b't' => b'\t',
                b'r' => b'\r',
                other => other,
            });
            rest = rest.get(1..).unwrap_or_default();
        } else {
            bytes.push(octal.iter().fold(0_u8, |number, digit| number.wrapping_mul(8).wrapping_add(digit - b'0')));
            rest = &rest[octal.len()..];
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_environment_and_input_are_never_in_a_record() {
        let body = json!({"argv": ["printenv", "A"], "env": {"A": "hidden value", "B": "another"}, "stdin": "hidden input", "timeout_ms": 1000, "cwd": "/tmp"});
        let detail = Value::Object(detail(Action::SessionExec, &body, &[]));
        assert!(!detail.to_string().contains("hidden") && !detail.to_string().contains("another"), "{detail}");
        assert_eq!(detail["env"], json!(["A", "B"]));
        assert_eq!(detail["stdin"]["size"], 12);
        assert_eq!(detail["argv"], json!(["printenv", "A"]));
    }

    #[test]
    fn input_in_base64_is_measured_as_the_bytes_it_means() {
        let plain = detail(Action::SessionExec, &json!({"stdin": "abc"}), &[]);
        let encoded = detail(Action::SessionExec, &json!({"stdin_b64": "YWJj"}), &[]);
        assert_eq!(plain["stdin"], encoded["stdin"]);
        assert_eq!(plain["stdin"]["size"], 3);
    }

    #[test]
    fn a_record_stays_small_and_holds_no_nul_and_no_fraction() {
        let large = json!({"argv": vec!["x".repeat(100_000); 5_000]});
        let lists = json!({"argv": vec![vec![1; 10_000]; 1_000]});
        for body in [large, lists] {
            let size = Value::Object(detail(Action::SessionExec, &body, &[])).to_string().len();
            assert!(size < 64 * 1024, "{size}");
        }
        let odd = Value::Object(detail(Action::SessionExec, &json!({"cwd": "a\u{0}b", "timeout_ms": 0.5}), &[])).to_string();
        assert!(!odd.contains("\\u0000") && odd.contains("\"0.5\""), "{odd}");
    }

    #[test]
    fn a_patch_names_every_path_that_it_could_touch() {
        let diff = "diff --git a/x b/y\nrename from x\nrename to sub/y\n--- a/x\n+++ b/sub/y\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/new file\t2026\n";
        let found = patched(diff, 1);
        assert!(["new file", "sub/y", "x", "y"].iter().all(|path| found.contains(&(*path).to_owned())), "{found:?}");
        assert!(patched("+++ \"b/protect\\145d/x\"\n", 1).contains(&"protected/x".to_owned()));
        assert!(patched("diff --git a/p/x b/p/x\nnew file mode 100644\n", 1).contains(&"p/x".to_owned()));
        let calls = calls(Action::FilePatch, &json!({"diff": diff}), &[], &[]);
        assert!(calls.iter().any(|call| call.path.as_deref() == Some("/workspace/sub/y")));
    }
}

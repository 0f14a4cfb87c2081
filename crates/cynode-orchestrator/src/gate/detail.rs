//! The detail of a call's audit record: names, sizes and hashes, never the value of an environment
//! variable, standard input, or the content of a file.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_policy::Action;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

/// The longest text that a record repeats, in bytes.
const MAX_RECORDED_TEXT: usize = 4_096;
const MAX_ITEMS: usize = 256;
/// The total size of all texts in one record.
const MAX_TOTAL: usize = 16_384;

/// The fields of a body that a record repeats verbatim, by action. All others are left out.
fn repeated(action: Action) -> &'static [&'static str] {
    match action {
        Action::SessionExec => &[
            "argv",
            "cwd",
            "timeout_ms",
            "background",
            "stdin_open",
            "max_output_bytes",
        ],
        Action::SessionCreate => &[
            "name",
            "image_ref",
            "workspace_ref",
            "workspace_depth",
            "limits",
            "network_policy",
            "max_lifetime_seconds",
            "idle_timeout_seconds",
            "pty_allowed",
            "labels",
            "node_labels",
        ],
        Action::JobCreate => &[
            "command",
            "image_ref",
            "workspace_ref",
            "workspace_depth",
            "timeout_seconds",
            "limits",
            "network_policy",
            "retry",
            "node_labels",
        ],
        Action::SessionUpdate => &["max_lifetime_seconds", "idle_timeout_seconds", "labels"],
        Action::SessionEnd => &["reason", "workspace"],
        Action::SessionSignal | Action::ExecSignal => &["signal", "scope"],
        Action::ExecStdin => &["eof"],
        Action::SessionExport => &["format", "base"],
        // Of an edit; a write has no fields.
        Action::FileWrite => &["path", "all", "if_match"],
        Action::FileMove => &["from", "to", "overwrite"],
        Action::FileMkdir => &["path", "parents"],
        Action::FileList => &["path", "depth", "hidden"],
        Action::FileSearch => &["pattern", "glob", "path"],
        Action::FilePatch => &["strip", "dry_run"],
        Action::ProjectCreate | Action::ProjectUpdate => &["name", "slug"],
        Action::TaskCreate | Action::TaskUpdate => &["name", "project_id", "status", "profile"],
        Action::UserCreate => &["name", "is_admin"],
        Action::GroupCreate => &["name", "members"],
        Action::TokenCreate => &[
            "kind",
            "user",
            "project_id",
            "task_ids",
            "job_id",
            "session_id",
            "expires_in_seconds",
        ],
        Action::TokenRenew => &["expires_in_seconds"],
        Action::ImageAdd | Action::ImageUpdate => &[
            "name",
            "image_ref",
            "image_digest",
            "image_version",
            "is_allowed",
            "description",
        ],
        Action::NodeDrain => &["drain"],
        Action::NodeKey => &["reusable", "expires_in_seconds"],
        Action::PolicyTest => &["user", "token_id", "action"],
        // Never the secret, nor a URL, which somebody may have put one into.
        Action::CredentialAdd => &["project_id", "name", "role", "username"],
        Action::RepositoryAdd => &[
            "project_id",
            "name",
            "provider",
            "credential_id",
            "default_branch",
            "addresses",
            "rules",
            "checks",
        ],
        Action::PromotionCreate => &[
            "repository",
            "changeset",
            "format",
            "base",
            "target",
            "branch",
            "title",
            "until",
            "dry_run",
        ],
        Action::PromotionApprove => &["commit", "reason"],
        _ => &[],
    }
}

/// The fields of a body that a record describes by size and hash.
fn hashed(action: Action) -> &'static [&'static str] {
    match action {
        Action::SessionExec => &["stdin", "stdin_b64"],
        Action::ExecStdin => &["data_b64"],
        Action::FilePatch => &["diff"],
        Action::FileWrite => &["old", "new"],
        Action::PolicyPut => &["text"],
        Action::SettingPut | Action::PreferencePut => &["value"],
        Action::PromotionCreate => &["message", "body"],
        _ => &[],
    }
}

/// The detail of a call's record, from its body and query.
pub(crate) fn describe(
    action: Action,
    body: &Value,
    query: &[(String, String)],
) -> Map<String, Value> {
    let mut detail = Map::new();
    for name in repeated(action) {
        if let Some(value) = body.get(*name).filter(|value| !value.is_null()) {
            detail.insert((*name).to_owned(), value.clone());
        }
    }
    for name in hashed(action) {
        if let Some(value) = body.get(*name).filter(|value| !value.is_null()) {
            let text = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            let (name, bytes) = match name.strip_suffix("_b64") {
                Some(name) => (
                    name,
                    STANDARD.decode(&text).unwrap_or_else(|_| text.into_bytes()),
                ),
                None => (*name, text.into_bytes()),
            };
            detail.insert(name.to_owned(), sized(&bytes));
        }
    }
    if let Some(env) = body
        .get("env")
        .and_then(Value::as_object)
        .filter(|env| !env.is_empty())
    {
        detail.insert("env".to_owned(), env.keys().cloned().collect());
    }
    for (name, value) in query {
        if matches!(
            name.as_str(),
            "path" | "path_b64" | "recursive" | "cols" | "rows" | "version" | "image_version"
        ) {
            // A stray parameter must not hide the field that the call acts on.
            detail.entry(name.clone()).or_insert_with(|| json!(value));
        } else if name == "argv" {
            let argv = detail.entry("argv").or_insert_with(|| json!([]));
            argv.as_array_mut()
                .map(|argv| argv.push(json!(value)))
                .unwrap_or_default();
        }
    }
    if let Some(secret) = body["secret"].as_str() {
        let secret = json!(secret.trim()).to_string();
        let secret = secret.trim_matches('"');
        detail.retain(|_, value| secret.is_empty() || !value.to_string().contains(secret));
    }
    bounded(detail)
}

fn sized(bytes: &[u8]) -> Value {
    json!({"size": bytes.len(), "sha256": hex::encode(Sha256::digest(bytes))})
}

/// Bounds the size of a record, and replaces what PostgreSQL or the audit chain can't store: NUL
/// and fractions.
pub(crate) fn bounded(detail: Map<String, Value>) -> Map<String, Value> {
    let mut left = MAX_TOTAL;
    detail
        .into_iter()
        .map(|(name, value)| (name, bounded_value(value, &mut left)))
        .collect()
}

fn bounded_value(value: Value, left: &mut usize) -> Value {
    // Every value has a cost, so that nested lists are bounded too.
    if *left < 8 {
        return Value::Null;
    }
    *left -= 8;
    match value {
        Value::String(text) => Value::String(truncated(text, left)),
        Value::Number(number) if !number.is_i64() && !number.is_u64() => {
            Value::String(number.to_string())
        }
        Value::Array(items) => {
            let more = items.len().saturating_sub(MAX_ITEMS);
            let mut kept: Vec<Value> = items
                .into_iter()
                .take(MAX_ITEMS)
                .map(|item| bounded_value(item, left))
                .collect();
            if more > 0 {
                kept.push(json!(format!("… and {more} more")));
            }
            Value::Array(kept)
        }
        Value::Object(members) => Value::Object(
            members
                .into_iter()
                .take(MAX_ITEMS)
                .map(|(name, member)| (truncated(name, left), bounded_value(member, left)))
                .collect(),
        ),
        other => other,
    }
}

/// Truncates a long text and appends its size and hash.
fn truncated(text: String, left: &mut usize) -> String {
    let text = if text.contains('\0') {
        text.replace('\0', "\u{fffd}")
    } else {
        text
    };
    let limit = MAX_RECORDED_TEXT.min(*left);
    if text.len() <= limit {
        *left -= text.len();
        return text;
    }
    let mut end = limit.min(256);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    *left -= end;
    format!(
        "{}… ({} bytes, sha256 {})",
        &text[..end],
        text.len(),
        hex::encode(Sha256::digest(text.as_bytes()))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_environment_and_input_are_never_in_a_record() {
        let body = json!({
            "argv": ["printenv", "A"], "env": {"A": "hidden value", "B": "another"},
            "stdin": "hidden input", "timeout_ms": 1000, "cwd": "/tmp",
        });
        let detail = Value::Object(describe(Action::SessionExec, &body, &[]));
        assert!(
            !detail.to_string().contains("hidden") && !detail.to_string().contains("another"),
            "{detail}"
        );
        assert_eq!(detail["env"], json!(["A", "B"]));
        assert_eq!(detail["stdin"]["size"], 12);
        assert_eq!(detail["argv"], json!(["printenv", "A"]));
    }

    #[test]
    fn a_credential_is_in_no_record_whatever_field_it_was_put_into() {
        let body = json!({
            "project_id": "p", "name": "hidden-hidden", "username": "a hidden-hidden b",
            "url": "https://a:hidden-hidden@forge.example", "secret": "hidden-hidden",
        });
        for action in [Action::CredentialAdd, Action::CredentialRotate] {
            let detail = Value::Object(describe(action, &body, &[])).to_string();
            assert!(!detail.contains("hidden"), "{detail}");
        }
        let detail = describe(Action::CredentialAdd, &body, &[]);
        assert_eq!(detail["project_id"], "p");
    }

    #[test]
    fn base64_input_is_measured_in_decoded_bytes() {
        let plain = describe(Action::SessionExec, &json!({"stdin": "abc"}), &[]);
        let encoded = describe(Action::SessionExec, &json!({"stdin_b64": "YWJj"}), &[]);
        assert_eq!(plain["stdin"], encoded["stdin"]);
        assert_eq!(plain["stdin"]["size"], 3);
    }

    #[test]
    fn a_record_stays_small_and_holds_no_nul_and_no_fraction() {
        let large = json!({"argv": vec!["x".repeat(100_000); 5_000]});
        let lists = json!({"argv": vec![vec![1; 10_000]; 1_000]});
        for body in [large, lists] {
            let size = Value::Object(describe(Action::SessionExec, &body, &[]))
                .to_string()
                .len();
            assert!(size < 64 * 1024, "{size}");
        }
        let odd = Value::Object(describe(
            Action::SessionExec,
            &json!({"cwd": "a\u{0}b", "timeout_ms": 0.5}),
            &[],
        ))
        .to_string();
        assert!(!odd.contains("\\u0000") && odd.contains("\"0.5\""), "{odd}");
    }
}

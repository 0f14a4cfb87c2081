//! What the record of a call says of it, and what rules may look at. Names, sizes and hashes; never the value of a variable,
//! input, or the content of a file.

use std::borrow::Cow;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{LimitsRequest, file_limits};
use cynode_patch::Patch;
use cynode_policy::{Action, Call, CallLimits, within_workspace};
use cynode_service::ApiError;
use serde::Deserialize as _;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::blobs::hex;

/// The longest text that a record repeats, and how many of a list.
const MAX_TEXT: usize = 4_096;
const MAX_ITEMS: usize = 256;
/// Paths of a diff that a record names.
const TOLD_PATHS: usize = 100;
/// A diff of more bytes is parsed off the async threads.
const LARGE_DIFF: usize = 64 * 1024;
/// All the texts of one record together.
const MAX_TOTAL: usize = 16_384;

/// What of a body a record repeats as it is, by action. Nothing else gets in.
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
            "image_ref",
            "workspace_ref",
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
pub(crate) fn detail(
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
            "path" | "path_b64" | "recursive" | "cols" | "rows" | "version"
        ) {
            detail.insert(name.clone(), json!(value));
        } else if name == "argv" {
            let argv = detail.entry("argv").or_insert_with(|| json!([]));
            argv.as_array_mut()
                .map(|argv| argv.push(json!(value)))
                .unwrap_or_default();
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
    detail
        .into_iter()
        .map(|(name, value)| (name, shortened(value, &mut left)))
        .collect()
}

fn shortened(value: Value, left: &mut usize) -> Value {
    // Every value counts, also one that is no text: a list of lists is not free.
    if *left < 8 {
        return Value::Null;
    }
    *left -= 8;
    match value {
        Value::String(text) => Value::String(short(text, left)),
        Value::Number(number) if !number.is_i64() && !number.is_u64() => {
            Value::String(number.to_string())
        }
        Value::Array(items) => {
            let more = items.len().saturating_sub(MAX_ITEMS);
            let mut kept: Vec<Value> = items
                .into_iter()
                .take(MAX_ITEMS)
                .map(|item| shortened(item, left))
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
                .map(|(name, member)| (short(name, left), shortened(member, left)))
                .collect(),
        ),
        other => other,
    }
}

/// A text, or its beginning with the size and hash of the whole.
fn short(text: String, left: &mut usize) -> String {
    let text = if text.contains('\0') {
        text.replace('\0', "\u{fffd}")
    } else {
        text
    };
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
    format!(
        "{}… ({} bytes, sha256 {})",
        &text[..end],
        text.len(),
        hex(&Sha256::digest(text.as_bytes()))
    )
}

/// The limits that a body asks for. What can't be read is refused by whoever reads the body.
fn limits(body: &Value) -> CallLimits {
    compared(LimitsRequest::deserialize(&body["limits"]).unwrap_or_default())
}

/// Limits as rules compare them.
pub(crate) fn compared(asked: LimitsRequest) -> CallLimits {
    let limits = asked.or_default();
    // Rounded up: a rule that allows two processors does not allow a little more.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "saturates, and what is beyond any machine is refused afterwards"
    )]
    let millicpus = (limits.cpus * 1_000.0).ceil() as i64;
    CallLimits {
        memory_bytes: i64::try_from(limits.memory_bytes).unwrap_or(i64::MAX),
        millicpus,
        pids: limits.pids.into(),
    }
}

/// What rules may look at: one [`Call`] for each path that is touched.
#[derive(Debug, Default)]
pub(crate) struct Calls<'a> {
    call: Call,
    /// The directory that relative paths start from. Kept apart: thousands of paths share it.
    base: Option<String>,
    paths: Vec<Cow<'a, str>>,
}

impl<'a> Calls<'a> {
    pub(crate) fn new(
        action: Action,
        body: &Value,
        query: &[(String, String)],
        archive_paths: impl Iterator<Item = &'a str>,
    ) -> Result<Self, ApiError> {
        let base = (action == Action::FileImport).then(|| queried_path(query));
        let paths = match action {
            // The first is the directory itself.
            Action::FileImport => std::iter::once("")
                .chain(archive_paths)
                .map(Cow::Borrowed)
                .collect(),
            Action::FilePatch => patched_paths(body)?.into_iter().map(Cow::Owned).collect(),
            _ => paths(action, body, query)
                .into_iter()
                .map(Cow::Owned)
                .collect(),
        };
        Ok(Self {
            call: call(action, body, query),
            base,
            paths,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.paths.len().max(1)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Call> {
        let of_path = |path: &Cow<'_, str>| {
            let path = match &self.base {
                Some(base) => within_workspace(&format!("{base}/{path}")),
                None => within_workspace(path),
            };
            Call {
                path: Some(path),
                ..self.call.clone()
            }
        };
        let without_path = self.paths.is_empty().then(|| self.call.clone());
        self.paths.iter().map(of_path).chain(without_path)
    }

    /// Names the files that a diff touches; those of other calls are in their query or body.
    pub(crate) fn tell(&self, action: Action, detail: &mut Map<String, Value>) {
        if action == Action::FilePatch {
            detail.insert(
                "paths".to_owned(),
                self.paths
                    .iter()
                    .take(TOLD_PATHS)
                    .map(|path| json!(path))
                    .collect(),
            );
            detail.insert("path_count".to_owned(), json!(self.paths.len()));
        }
    }
}

fn call(action: Action, body: &Value, query: &[(String, String)]) -> Call {
    let text = |name: &str| body.get(name).and_then(Value::as_str).map(str::to_owned);
    let mut call = Call::default();
    match action {
        Action::SessionExec => call.program = body["argv"][0].as_str().map(str::to_owned),
        Action::JobCreate => {
            call.program = body["command"][0].as_str().map(str::to_owned);
            call.image = text("image_ref");
            call.network = text("network_policy");
            call.limits = Some(limits(body));
        }
        Action::SessionCreate => {
            call.image = text("image_ref");
            call.network = text("network_policy");
            call.limits = Some(limits(body));
            call.pty = body["pty_allowed"].as_bool().unwrap_or(false);
        }
        Action::SessionPty => {
            call.pty = true;
            call.program = query
                .iter()
                .find(|(name, _)| name == "argv")
                .map(|(_, value)| value.clone());
        }
        Action::TokenCreate => call.token_kind = text("kind"),
        _ => {}
    }
    call
}

fn paths(action: Action, body: &Value, query: &[(String, String)]) -> Vec<String> {
    // A name stands there as text or, when it is none, as bytes in base64.
    let named = |name: &str| -> Vec<String> {
        let text = |name: &str| body.get(name).and_then(Value::as_str);
        let bytes = text(&format!("{name}_b64"))
            .and_then(|text| STANDARD.decode(text).ok())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        text(name)
            .map(str::to_owned)
            .into_iter()
            .chain(bytes)
            .collect()
    };
    match action {
        Action::FileRead | Action::FileStat | Action::FileWrite | Action::FileDelete => {
            vec![queried_path(query)]
        }
        Action::FileList | Action::FileSearch | Action::FileMkdir => {
            let named = named("path");
            if named.is_empty() {
                vec![".".to_owned()]
            } else {
                named
            }
        }
        Action::FileMove => [named("from"), named("to")].into_iter().flatten().collect(),
        _ => Vec::new(),
    }
}

pub(super) fn queried_path(query: &[(String, String)]) -> String {
    let value = |wanted: &str| {
        query
            .iter()
            .find(|(name, _)| name == wanted)
            .map(|(_, value)| value.clone())
    };
    let from_bytes = || {
        value("path_b64")
            .and_then(|text| STANDARD.decode(text).ok())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    };
    value("path")
        .or_else(from_bytes)
        .unwrap_or_else(|| ".".to_owned())
}

/// The diff of a body and how much of its names is dropped. A body of another shape is refused by whoever takes the call.
pub(super) fn diff(body: &Value) -> Option<(&str, u32)> {
    let strip = match body.get("strip") {
        None | Some(Value::Null) => file_limits::DEFAULT_STRIP,
        Some(strip) => u32::try_from(strip.as_u64()?).ok()?,
    };
    Some((body.get("diff")?.as_str()?, strip))
}

/// The paths that a diff touches, by the parser that the agent applies it with.
fn patched_paths(body: &Value) -> Result<Vec<String>, ApiError> {
    let Some((diff, strip)) = diff(body) else {
        return Ok(Vec::new());
    };
    let read = || -> Result<Vec<String>, cynode_patch::Error> {
        let patch = Patch::parse(diff.as_bytes(), strip)?;
        Ok(patch
            .paths()
            .into_iter()
            .map(|path| String::from_utf8_lossy(path).into_owned())
            .collect())
    };
    let paths = if diff.len() > LARGE_DIFF {
        tokio::task::block_in_place(read)
    } else {
        read()
    };
    paths.map_err(|error| ApiError::invalid(format!("the diff can't be read: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_see_the_limits_that_a_sandbox_will_have() {
        let seen = |action, limits: Value| {
            call(action, &json!({"limits": limits}), &[])
                .limits
                .map(|seen| (seen.memory_bytes, seen.millicpus, seen.pids))
        };
        for action in [Action::SessionCreate, Action::JobCreate] {
            assert_eq!(seen(action, Value::Null), Some((2 << 30, 1_000, 512)));
            assert_eq!(
                seen(
                    action,
                    json!({"memory_bytes": 1_u64 << 45, "cpus": 2.0001, "pids": 9})
                ),
                Some((1 << 45, 2_001, 9))
            );
            assert_eq!(
                seen(action, json!({"memory_bytes": u64::MAX, "cpus": 1e300})),
                Some((i64::MAX, i64::MAX, 512))
            );
        }
        assert_eq!(seen(Action::SessionExec, json!({"pids": 9})), None);
    }

    #[test]
    fn values_of_the_environment_and_input_are_never_in_a_record() {
        let body = json!({"argv": ["printenv", "A"], "env": {"A": "hidden value", "B": "another"}, "stdin": "hidden input", "timeout_ms": 1000, "cwd": "/tmp"});
        let detail = Value::Object(detail(Action::SessionExec, &body, &[]));
        assert!(
            !detail.to_string().contains("hidden") && !detail.to_string().contains("another"),
            "{detail}"
        );
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
            let size = Value::Object(detail(Action::SessionExec, &body, &[]))
                .to_string()
                .len();
            assert!(size < 64 * 1024, "{size}");
        }
        let odd = Value::Object(detail(
            Action::SessionExec,
            &json!({"cwd": "a\u{0}b", "timeout_ms": 0.5}),
            &[],
        ))
        .to_string();
        assert!(!odd.contains("\\u0000") && odd.contains("\"0.5\""), "{odd}");
    }

    fn patch_paths(diff: &str, strip: Option<u32>) -> Result<Vec<String>, String> {
        let calls = Calls::new(
            Action::FilePatch,
            &json!({"diff": diff, "strip": strip}),
            &[],
            std::iter::empty(),
        );
        calls
            .map(|calls| calls.iter().filter_map(|call| call.path).collect())
            .map_err(|error| error.0.detail.clone())
    }

    fn created(name: &str) -> String {
        format!("--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n")
    }

    #[test]
    fn rules_are_asked_about_exactly_the_paths_that_a_patch_touches() {
        let diff =
            "diff --git a/x b/sub/y\nrename from x\nrename to sub/y\n--- a/x\n+++ b/sub/y\n@@ -1 +1 @@\n-a\n+b\n".to_owned() + &created("b/new file\t2026");
        assert_eq!(
            patch_paths(&diff, None).expect("read"),
            ["/workspace/new file", "/workspace/sub/y", "/workspace/x"]
        );
        for (name, strip, expected) in [
            ("zz", 1, "/workspace/zz"),
            ("zz", 32, "/workspace/zz"),
            ("b//p/x", 1, "/workspace/p/x"),
            ("b/./p//x", 1, "/workspace/p/x"),
            ("\"b/protect\\145d/x\"", 1, "/workspace/protected/x"),
            ("p/x", 0, "/workspace/p/x"),
            // Absolute names are never stripped, and rejected by the agent.
            ("/protected/x", 1, "/protected/x"),
        ] {
            assert_eq!(
                patch_paths(&created(name), Some(strip)).expect("read"),
                [expected],
                "{name} at {strip}"
            );
        }
        assert_eq!(
            patch_paths("diff --git a/p/x b/p/x\nnew file mode 100644\n", None).expect("read"),
            ["/workspace/p/x"]
        );
        assert!(
            patch_paths("no diff\n", None)
                .expect_err("refused")
                .contains("the diff can't be read")
        );
    }

    #[test]
    fn a_line_of_many_spaces_is_refused_in_linear_memory() {
        let line = format!(
            "diff --git {}\nnew file mode 100644\n",
            "a/b ".repeat(22_000)
        );
        assert!(
            patch_paths(&line, None)
                .expect_err("refused")
                .contains("line 1")
        );
    }

    #[test]
    fn the_base_of_an_import_is_joined_to_each_path_when_it_is_asked_about() {
        let query = [("path".to_owned(), "sub/".to_owned())];
        let calls = Calls::new(
            Action::FileImport,
            &Value::Null,
            &query,
            ["a", "./b//c"].into_iter(),
        )
        .expect("read");
        assert_eq!(calls.len(), 3);
        assert_eq!(
            calls
                .iter()
                .filter_map(|call| call.path)
                .collect::<Vec<_>>(),
            ["/workspace/sub", "/workspace/sub/a", "/workspace/sub/b/c"]
        );
        let none = Calls::new(
            Action::SessionExec,
            &json!({"argv": ["ls"]}),
            &[],
            std::iter::empty(),
        )
        .expect("read");
        assert_eq!(
            (
                none.len(),
                none.iter().map(|call| call.program).collect::<Vec<_>>()
            ),
            (1, vec![Some("ls".to_owned())])
        );
    }
}

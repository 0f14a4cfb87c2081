//! Credentials in the content of a call: refused, or admitted and flagged.
//!
//! Invariant: a refusal and a flag state the place and the kind of a credential, never its value. A
//! name that itself contains a credential is not repeated.

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::{Bytes, BytesMut};
use cynode_api::{ErrorCode, Flags, PatchRepair};
use cynode_policy::{Action, Channel, ContentScan, Scanner, ShapeAction, ShapePolicy, UNSCANNED};
use cynode_service::ApiError;
use futures_util::{StreamExt as _, stream};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{patches::CallerPatch, policy_calls, submitted_jobs::SubmittedJob};

/// The number of flagged files, also for answers that are not JSON objects.
const FLAGGED_HEADER: HeaderName = HeaderName::from_static("x-cynode-flagged");

/// A credential that is refused, by its place in the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leak {
    pub(crate) field: String,
    /// The file that contains it, if the field holds several.
    pub(crate) path: Option<String>,
    /// For example "a GitHub token".
    pub(crate) kind: &'static str,
    /// A secret or token of this system. Otherwise it only has the shape of a credential.
    pub(crate) is_system: bool,
}

impl Leak {
    pub(crate) fn system(field: &str, kind: &'static str) -> Self {
        Self {
            field: field.to_owned(),
            path: None,
            kind,
            is_system: true,
        }
    }

    pub(crate) fn shape(field: &str, path: Option<&str>, kind: &'static str) -> Self {
        // PostgreSQL can't store NUL.
        Self {
            field: field.to_owned(),
            path: path.map(|path| path.replace('\0', "\u{fffd}")),
            kind,
            is_system: false,
        }
    }

    pub(crate) fn error(&self) -> ApiError {
        let Self {
            field,
            path,
            kind,
            is_system,
        } = self;
        let detail = match (is_system, path) {
            (true, _) => {
                format!(
                    "{field}: contains {kind}, a secret of the system; it must not enter a sandbox"
                )
            }
            (false, Some(path)) if *kind == UNSCANNED => format!(
                "{field}: a binary delta completes the content of {path} with its old content, so \
                 it can't be scanned, which is refused at that path"
            ),
            (false, Some(path)) => format!(
                "{field}: the content of {path} looks like {kind}, which is refused at that path"
            ),
            (false, None) => {
                format!("{field}: contains what looks like {kind}, which is refused there")
            }
        };
        let mut problem = ApiError::new(ErrorCode::SecretInInput, detail)
            .with("field", field.as_str())
            .with("what", *kind);
        if let Some(path) = path {
            problem = problem.with("path", path.as_str());
        }
        if *kind == UNSCANNED {
            problem = problem.with_remedy("Write the whole file instead.");
        } else if !is_system {
            problem = problem.with_remedy(
                "Leave it out: a sandbox must not hold credentials. If it is only a sample, put it \
                 into another file, or ask an operator about orchestrator.secret_shapes.",
            );
        }
        problem
    }

    /// The detail of the record of a call that is refused because of this leak.
    pub(crate) fn record(&self) -> Map<String, Value> {
        let mut detail = Map::from_iter([
            ("field".to_owned(), json!(self.field)),
            ("what".to_owned(), json!(self.kind)),
        ]);
        if let Some(path) = &self.path {
            detail.insert(
                "path".to_owned(),
                json!(path.chars().take(1_024).collect::<String>()),
            );
        }
        detail
    }
}

/// How shapes in names, labels and paths are treated. Lists and records repeat these, so shapes in
/// them are refused or ignored, never flagged.
pub(crate) fn name_treatment(policy: ShapePolicy) -> ShapeAction {
    if policy.action(Channel::Argv) == ShapeAction::Off {
        ShapeAction::Off
    } else {
        ShapeAction::Refuse
    }
}

/// How shapes in a field of the body are treated.
fn field_treatment(policy: ShapePolicy, action: Action, field: &str) -> ShapeAction {
    match (action, field) {
        (_, "env") => policy.action(Channel::Env),
        (Action::SessionExec, "stdin" | "stdin_b64") | (Action::ExecStdin, "data_b64") => {
            policy.action(Channel::Stdin)
        }
        (Action::SessionExec, "argv") | (Action::JobCreate, "command" | "checks") => {
            policy.action(Channel::Argv)
        }
        _ => name_treatment(policy),
    }
}

/// Scans a JSON body for shapes. Its patch, if any, is scanned by the content that it adds; one
/// that can't be read is refused where its paths are extracted.
pub(crate) fn scan_json(
    scanner: &Scanner,
    policy: ShapePolicy,
    action: Action,
    body: &Value,
    patch: Option<&CallerPatch<'_>>,
) -> Result<Flags, Leak> {
    let mut flags = Flags::default();
    for (name, value) in body.as_object().into_iter().flatten() {
        if action == Action::FilePatch && name == "diff" {
            if let Some(patch) = patch {
                patch.scan(scanner, policy.action(Channel::Patches), &mut flags)?;
            }
            continue;
        }
        if action == Action::FileWrite && name == "new" {
            scan_edit(scanner, policy.action(Channel::Files), body, &mut flags)?;
            continue;
        }
        // The text that an edit replaces enters no sandbox, as the lines that a diff removes.
        if action == Action::FileWrite && name == "old" {
            continue;
        }
        if name == "job"
            && let Some(job) = SubmittedJob::of(action, body)
        {
            job.scan(scanner, policy, &mut flags)?;
            continue;
        }
        let treatment = field_treatment(policy, action, name);
        scan_member(scanner, treatment, name, value, &mut flags)?;
    }
    Ok(flags)
}

/// Scans every text in a member of a body.
pub(super) fn scan_member(
    scanner: &Scanner,
    treatment: ShapeAction,
    name: &str,
    value: &Value,
    flags: &mut Flags,
) -> Result<(), Leak> {
    if treatment == ShapeAction::Off {
        return Ok(());
    }
    let (mut leak, mut last) = (None, None);
    scanner.each_shape_in_member(name, value, &mut |place, kind| {
        // Records repeat the name of a flagged field, so a name that is a token is refused.
        if treatment == ShapeAction::Refuse || place.ends_with("(name)") {
            leak.get_or_insert_with(|| Leak::shape(place, None, kind));
        } else if last.as_ref() != Some(&(place.to_owned(), kind)) {
            flags.add(place, kind);
            last = Some((place.to_owned(), kind));
        }
    });
    leak.map_or(Ok(()), Err)
}

/// Scans the content of a file.
pub(super) fn scan_file(
    scanner: &Scanner,
    action: ShapeAction,
    field: &str,
    path: &str,
    content: &[u8],
    flags: &mut Flags,
) -> Result<(), Leak> {
    if action == ShapeAction::Off {
        return Ok(());
    }
    // Flags and refusals repeat the path.
    if let Some(hit) = scanner.find(path.as_bytes()) {
        let place = field
            .rsplit_once('.')
            .map(|(parent, _)| format!("{parent}.path"));
        let place = place.as_deref().unwrap_or("path");
        return Err(Leak::shape(place, None, hit.what));
    }
    let mut scan = scanner.content(path, action);
    scan.feed(content);
    refuse_or_flag(field, path, scan, flags)
}

/// Scans the text that an edit inserts as content of its file.
fn scan_edit(
    scanner: &Scanner,
    action: ShapeAction,
    body: &Value,
    flags: &mut Flags,
) -> Result<(), Leak> {
    let new = body.get("new").and_then(Value::as_str);
    let (Some(new), Some(path)) = (new, policy_calls::edited_path(body)) else {
        return Ok(());
    };
    scan_file(scanner, action, "new", &path, new.as_bytes(), flags)
}

/// Refuses a scanned file, or admits it with flags.
pub(crate) fn refuse_or_flag(
    field: &str,
    path: &str,
    scan: ContentScan,
    flags: &mut Flags,
) -> Result<(), Leak> {
    let shapes = scan
        .finish()
        .map_err(|kind| Leak::shape(field, Some(path), kind))?;
    for shape in &shapes {
        flags.add(path, shape);
    }
    Ok(())
}

/// Scans an archive entry by entry.
#[derive(Debug)]
pub(crate) struct ArchiveScan {
    pub(crate) scanner: Scanner,
    pub(crate) action: ShapeAction,
    /// The directory that the archive is unpacked into.
    pub(crate) base: String,
    pub(crate) flags: Flags,
}

impl ArchiveScan {
    /// Checks the name of an entry or the target of a link.
    pub(crate) fn check_name(&self, name: &[u8]) -> Result<(), Leak> {
        let hit = if self.action == ShapeAction::Off {
            None
        } else {
            self.scanner.find(name)
        };
        hit.map_or(Ok(()), |hit| Err(Leak::shape("body", None, hit.what)))
    }

    pub(crate) fn content(&self, name: &str) -> ContentScan {
        self.scanner
            .content(&format!("{}/{name}", self.base), self.action)
    }

    pub(crate) fn refuse_or_flag(&mut self, name: &str, scan: ContentScan) -> Result<(), Leak> {
        refuse_or_flag("body", name, scan, &mut self.flags)
    }
}

/// Adds flags to the record of a call.
pub(crate) fn record_flags(flags: &Flags, detail: &mut Map<String, Value>) {
    if let Ok(Value::Object(members)) = serde_json::to_value(flags) {
        detail.extend(members);
    }
}

/// Adds flags to the answer of a call.
pub(crate) fn flag_answer(action: Action, mut response: Response, flags: &Flags) -> Response {
    if flags.is_empty() || !response.status().is_success() {
        return response;
    }
    if is(&response, "application/json") {
        response = with_members(response, flags);
    } else if action == Action::FileImport && response.status() == StatusCode::NO_CONTENT {
        let headers = std::mem::take(response.headers_mut());
        response = axum::Json(flags).into_response();
        response.headers_mut().extend(headers);
    }
    if let Ok(total) = HeaderValue::from_str(&flags.flagged_total.to_string()) {
        response.headers_mut().insert(FLAGGED_HEADER, total);
    }
    response
}

/// Adds what was repaired of a patch to the answer, also of a patch that does not apply: the caller
/// learns how its hunks were read.
pub(crate) fn report_repairs(response: Response, repaired: &[PatchRepair]) -> Response {
    let is_answer = response.status().is_success() && is(&response, "application/json");
    let is_rejection =
        response.status() == StatusCode::CONFLICT && is(&response, "application/problem+json");
    if repaired.is_empty() || !(is_answer || is_rejection) {
        return response;
    }
    with_members(response, &json!({ "repaired": repaired }))
}

fn is(response: &Response, kind: &str) -> bool {
    let found = response.headers().get(header::CONTENT_TYPE);
    found.is_some_and(|found| found.as_bytes().starts_with(kind.as_bytes()))
}

fn with_members(response: Response, members: &impl Serialize) -> Response {
    let (mut parts, body) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, splice(body, members))
}

/// Inserts the members of an object into a JSON object of any length while it streams.
fn splice(body: Body, members: &impl Serialize) -> Body {
    let mut members = serde_json::to_vec(members).unwrap_or_default();
    members.pop();
    let state = Some((body.into_data_stream(), BytesMut::new(), Some(members)));
    Body::from_stream(stream::unfold(state, async |state| {
        let (mut pieces, mut begin, mut members) = state?;
        loop {
            let Some(piece) = pieces.next().await else {
                return (!begin.is_empty()).then(|| (Ok(begin.freeze()), None));
            };
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) => return Some((Err(error), None)),
            };
            let Some(more) = members.take() else {
                return Some((Ok(piece), Some((pieces, begin, None))));
            };
            begin.extend_from_slice(&piece);
            // Whether a comma is needed depends on what follows the brace.
            let Some(rest) = begin
                .strip_prefix(b"{")
                .filter(|rest| !rest.trim_ascii_start().is_empty())
            else {
                members = Some(more);
                continue;
            };
            let comma: &[u8] = if rest.trim_ascii_start().starts_with(b"}") {
                b""
            } else {
                b","
            };
            let whole = Bytes::from([&more, comma, rest].concat());
            return Some((Ok(whole), Some((pieces, BytesMut::new(), None))));
        }
    }))
}

#[cfg(test)]
mod tests {
    use cynode_policy::{HeldSecrets, ShapeSetting};

    use super::*;

    fn scanner() -> Scanner {
        Scanner::new(HeldSecrets::new([7; 32]), true)
    }

    fn token() -> String {
        ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat()
    }

    fn policy(setting: Value) -> ShapePolicy {
        (&serde_json::from_value::<ShapeSetting>(setting).expect("a setting")).into()
    }

    fn named(flags: &Flags) -> Vec<&str> {
        flags
            .flagged
            .iter()
            .map(|file| file.path.as_str())
            .collect()
    }

    #[test]
    fn fields_are_refused_flagged_or_ignored_by_their_channel() {
        let body = json!({
            "argv": ["echo", token()], "env": {"KEY": token()}, "stdin": token(), "cwd": "/tmp",
        });
        let look = |setting: Value| {
            scan_json(
                &scanner(),
                policy(setting),
                Action::SessionExec,
                &body,
                None,
            )
        };
        assert!(
            look(json!(true)).is_err_and(|leak| leak.kind == "a GitHub token" && !leak.is_system)
        );
        assert!(
            look(json!({"env": "flag", "stdin": "off"})).is_err_and(|leak| leak.field == "argv[1]")
        );
        let flags = look(json!({"env": "flag", "argv": "flag", "stdin": "flag"})).expect("flagged");
        assert_eq!(named(&flags), ["argv[1]", "env.KEY", "stdin"]);
        assert!(look(json!(false)).is_ok_and(|flags| flags.is_empty()));
        // Names are refused because records would repeat them.
        let cwd =
            json!({"argv": ["ls"], "cwd": format!("/tmp/{}", token()), "env": {token(): "x"}});
        let look = |setting: Value| {
            scan_json(&scanner(), policy(setting), Action::SessionExec, &cwd, None)
        };
        assert_eq!(
            look(json!({"argv": "flag"})),
            Err(Leak::shape("cwd", None, "a GitHub token"))
        );
        assert_eq!(
            look(json!({"argv": "off", "env": "flag"})),
            Err(Leak::shape("env.(name)", None, "a GitHub token"))
        );
    }

    #[tokio::test]
    async fn flags_are_inserted_into_an_object_in_any_split() {
        let mut flags = Flags::default();
        flags.add("a", "a GitHub token");
        for (object, pieces) in [
            ("{\"x\":1}", 1),
            ("{\"x\":1}", 2),
            (" {\"x\":1}", 3),
            ("{}", 1),
            ("{ }", 1),
            ("{\"x\":{}}", 100),
        ] {
            let object = object.trim_start();
            let body = Body::from_stream(stream::iter(
                object
                    .as_bytes()
                    .chunks(pieces)
                    .map(|piece| Ok::<_, std::io::Error>(piece.to_vec())),
            ));
            let bytes = axum::body::to_bytes(splice(body, &flags), 10_000)
                .await
                .expect("whole");
            let mut value: Value = serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                panic!("{object}: {error}: {}", String::from_utf8_lossy(&bytes))
            });
            assert_eq!(
                (&value["flagged"][0]["path"], &value["flagged_total"]),
                (&json!("a"), &json!(1))
            );
            let members = value.as_object_mut().expect("an object");
            members.retain(|name, _| name == "x");
            assert_eq!(value, serde_json::from_str::<Value>(object).expect("valid"));
        }
    }
}

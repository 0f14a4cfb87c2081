//! Credentials in what a call brings: refused, or let in and flagged.
//!
//! What must stay true: a refusal and a flag name the place and the kind, never the value; a name that holds a value is not
//! repeated.

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::{Bytes, BytesMut};
use cynode_api::{ErrorCode, Flags};
use cynode_patch::{Patch, Side};
use cynode_policy::{Action, Channel, ContentScan, Scanner, ShapeAction, ShapePolicy};
use cynode_service::ApiError;
use futures_util::{StreamExt as _, stream};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde_json::{Map, Value, json};

use super::facts;

/// How many files of an answer are flagged. Answers that are no JSON object have only this.
const FLAGGED_HEADER: HeaderName = HeaderName::from_static("x-cynode-flagged");

/// A credential that may not enter, by its place in the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leak {
    pub(crate) field: String,
    /// The file that would hold it, where the field brings several.
    pub(crate) path: Option<String>,
    /// As in "a GitHub token".
    pub(crate) what: &'static str,
    /// Held by the system, or a token of its own; else it only has the shape of a credential.
    pub(crate) is_system: bool,
}

impl Leak {
    pub(crate) fn of_system(field: &str, what: &'static str) -> Self {
        Self {
            field: field.to_owned(),
            path: None,
            what,
            is_system: true,
        }
    }

    fn shape(field: &str, path: Option<&str>, what: &'static str) -> Self {
        // A record can't hold the character NUL.
        Self {
            field: field.to_owned(),
            path: path.map(|path| path.replace('\0', "\u{fffd}")),
            what,
            is_system: false,
        }
    }

    pub(crate) fn error(&self) -> ApiError {
        let Self {
            field,
            path,
            what,
            is_system,
        } = self;
        let detail = match (is_system, path) {
            (true, _) => {
                format!("{field}: holds {what}, a secret of the system; no secret enters a sandbox")
            }
            (false, Some(path)) => format!(
                "{field}: what {path} holds looks like {what}, which is refused at that path"
            ),
            (false, None) => {
                format!("{field}: holds what looks like {what}, which is refused there")
            }
        };
        let mut problem = ApiError::new(ErrorCode::SecretInInput, detail)
            .0
            .with("field", field.as_str())
            .with("what", *what);
        if let Some(path) = path {
            problem = problem.with("path", path.as_str());
        }
        if !is_system {
            problem = problem.with_remedy(
                "Leave it out: a sandbox reaches services without holding their credentials. If it is only a sample, put it into another file, or ask an \
                 operator about orchestrator.secret_shapes.",
            );
        }
        ApiError(Box::new(problem))
    }

    /// All that a record says of a refused call.
    pub(crate) fn record(&self) -> Map<String, Value> {
        let mut detail = Map::from_iter([
            ("field".to_owned(), json!(self.field)),
            ("what".to_owned(), json!(self.what)),
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

/// What happens to texts that are no content: names, labels, paths. They are repeated in lists and records, so that there is nothing
/// between refusing and ignoring.
pub(crate) fn of_names(policy: ShapePolicy) -> ShapeAction {
    if policy.action(Channel::Argv) == ShapeAction::Off {
        ShapeAction::Off
    } else {
        ShapeAction::Refuse
    }
}

/// The action for a field of a body.
fn of_field(policy: ShapePolicy, action: Action, field: &str) -> ShapeAction {
    match (action, field) {
        (_, "env") => policy.action(Channel::Env),
        (Action::SessionExec, "stdin" | "stdin_b64") | (Action::ExecStdin, "data_b64") => {
            policy.action(Channel::Stdin)
        }
        (Action::SessionExec, "argv") | (Action::JobCreate, "command") => {
            policy.action(Channel::Argv)
        }
        _ => of_names(policy),
    }
}

/// Shapes in a body of JSON.
pub(crate) fn in_json(
    scanner: &Scanner,
    policy: ShapePolicy,
    action: Action,
    body: &Value,
) -> Result<Flags, Leak> {
    let mut flags = Flags::default();
    let mut leak = None;
    for (name, value) in body.as_object().into_iter().flatten() {
        if action == Action::FilePatch && name == "diff" {
            in_diff(scanner, policy.action(Channel::Patches), body, &mut flags)?;
            continue;
        }
        let treatment = of_field(policy, action, name);
        if treatment == ShapeAction::Off {
            continue;
        }
        let mut last = None;
        scanner.each_shape_in_member(name, value, &mut |place, what| {
            // What a flag names stands in a record: a name that is itself a token can't.
            if treatment == ShapeAction::Refuse || place.ends_with("(name)") {
                leak.get_or_insert_with(|| Leak::shape(place, None, what));
            } else if last.as_ref() != Some(&(place.to_owned(), what)) {
                flags.add(place, what);
                last = Some((place.to_owned(), what));
            }
        });
        if let Some(leak) = leak.take() {
            return Err(leak);
        }
    }
    Ok(flags)
}

/// Shapes in the lines that a diff adds. What it removes or leaves does not enter by it. A diff that can't be read is refused by
/// whoever asks for its paths.
fn in_diff(
    scanner: &Scanner,
    action: ShapeAction,
    body: &Value,
    flags: &mut Flags,
) -> Result<(), Leak> {
    let Some((diff, strip)) = facts::diff(body).filter(|_| action != ShapeAction::Off) else {
        return Ok(());
    };
    let Ok(patch) = Patch::parse(diff.as_bytes(), strip) else {
        return Ok(());
    };
    for section in patch.sections() {
        let Some(path) = &section.new else { continue };
        if let Some(hit) = scanner.find(path) {
            return Err(Leak::shape("diff", None, hit.what));
        }
        let path = String::from_utf8_lossy(path);
        let mut scan = scanner.content(&path, action);
        for line in section
            .hunks
            .iter()
            .flat_map(|hunk| hunk.lines(section.crlf))
            .filter(|line| line.side == Side::New)
        {
            scan.feed(line.text);
            scan.feed(b"\n");
        }
        judge("diff", &path, scan, flags)?;
    }
    Ok(())
}

/// What comes of a file that was looked through.
pub(crate) fn judge(
    field: &str,
    path: &str,
    scan: ContentScan,
    flags: &mut Flags,
) -> Result<(), Leak> {
    let shapes = scan
        .finish()
        .map_err(|what| Leak::shape(field, Some(path), what))?;
    for shape in &shapes {
        flags.add(path, shape);
    }
    Ok(())
}

/// Looks through an archive entry by entry.
#[derive(Debug)]
pub(crate) struct ArchiveScan {
    pub(crate) scanner: Scanner,
    pub(crate) action: ShapeAction,
    /// Where the archive is unpacked.
    pub(crate) base: String,
    pub(crate) flags: Flags,
}

impl ArchiveScan {
    /// A name of an entry, or what a link leads to.
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

    pub(crate) fn judge(&mut self, name: &str, scan: ContentScan) -> Result<(), Leak> {
        judge("body", name, scan, &mut self.flags)
    }
}

/// Puts what was flagged into the record of a call.
pub(crate) fn record(flags: &Flags, detail: &mut Map<String, Value>) {
    if let Ok(Value::Object(members)) = serde_json::to_value(flags) {
        detail.extend(members);
    }
}

/// Puts what was flagged into the answer of a call.
pub(crate) fn answer(action: Action, mut response: Response, flags: &Flags) -> Response {
    if flags.is_empty() || !response.status().is_success() {
        return response;
    }
    let is_json = response
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    if is_json {
        let (mut parts, body) = response.into_parts();
        parts.headers.remove(header::CONTENT_LENGTH);
        response = Response::from_parts(parts, spliced(body, flags));
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

/// A JSON object with more members, of any length.
fn spliced(body: Body, flags: &Flags) -> Body {
    let mut members = serde_json::to_vec(flags).unwrap_or_default();
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
            // Whether a member follows shows in what comes after the brace.
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
    use cynode_policy::{Held, ShapeSetting};

    use super::*;

    fn scanner() -> Scanner {
        Scanner::new(Held::new([7; 32]), true)
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
        let body = json!({"argv": ["echo", token()], "env": {"KEY": token()}, "stdin": token(), "cwd": "/tmp"});
        let look =
            |setting: Value| in_json(&scanner(), policy(setting), Action::SessionExec, &body);
        assert!(
            look(json!(true)).is_err_and(|leak| leak.what == "a GitHub token" && !leak.is_system)
        );
        assert!(
            look(json!({"env": "flag", "stdin": "off"})).is_err_and(|leak| leak.field == "argv[1]")
        );
        let flags = look(json!({"env": "flag", "argv": "flag", "stdin": "flag"})).expect("flagged");
        assert_eq!(named(&flags), ["argv[1]", "env.KEY", "stdin"]);
        assert!(look(json!(false)).is_ok_and(|flags| flags.is_empty()));
        // Names stay refused: they would be repeated.
        let cwd =
            json!({"argv": ["ls"], "cwd": format!("/tmp/{}", token()), "env": {token(): "x"}});
        let look = |setting: Value| in_json(&scanner(), policy(setting), Action::SessionExec, &cwd);
        assert_eq!(
            look(json!({"argv": "flag"})),
            Err(Leak::shape("cwd", None, "a GitHub token"))
        );
        assert_eq!(
            look(json!({"argv": "off", "env": "flag"})),
            Err(Leak::shape("env.(name)", None, "a GitHub token"))
        );
    }

    #[test]
    fn a_diff_is_judged_by_the_files_it_changes_and_the_lines_it_adds() {
        let diff = format!(
            "--- a/old.rs\n+++ b/src/a.rs\n@@ -1,2 +1,2 @@\n context {0}\n-{0}\n+{0}\n--- a/.env\n+++ b/.env\n@@ -1 +1 @@\n-{0}\n+A=b\n",
            token()
        );
        let look = |diff: &str| {
            in_json(
                &scanner(),
                ShapePolicy::default(),
                Action::FilePatch,
                &json!({"diff": diff}),
            )
        };
        assert_eq!(
            named(&look(&diff).expect("flagged")),
            ["src/a.rs"],
            "removing a token from .env is no leak"
        );
        let leak = look(&diff.replace("+A=b", &format!("+A={}", token()))).expect_err("refused");
        assert_eq!(
            (leak.field.as_str(), leak.path.as_deref()),
            ("diff", Some(".env"))
        );
        assert!(
            leak.error().0.detail.contains(".env")
                && leak.error().0.detail.contains("looks like a GitHub token")
        );
        let named = diff.replace("src/a.rs", &token());
        assert_eq!(look(&named).expect_err("a name").path, None, "not repeated");
    }

    #[tokio::test]
    async fn flags_are_put_into_an_object_however_it_comes() {
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
            let bytes = axum::body::to_bytes(spliced(body, &flags), 10_000)
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

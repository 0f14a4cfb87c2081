//! Converts records to events of the Open Cybersecurity Schema Framework, for external collectors.
//!
//! Data that the schema has no field for goes to `unmapped`, so that nothing is lost.

use cynode_api::{AuditBody, AuditDecision, AuditKind, AuditRecord, AuditResult, AuditSubject};
use serde_json::{Map, Value, json};

use crate::action::{TargetKind, Verb, target_kind, verb};

/// The schema version of the events.
const VERSION: &str = "1.6.0";

/// Event classes. The thousands are the category.
const FILE_SYSTEM: u64 = 1_001;
const PROCESS: u64 = 1_007;
const AUTHENTICATION: u64 = 3_002;
const API: u64 = 6_003;

const OTHER: u64 = 99;

#[must_use]
pub fn ocsf(record: &AuditRecord) -> Value {
    let body = &record.body;
    let (class, activity) = class(body);
    let mut event = Map::new();
    let mut put = |name: &str, value: Value| drop(event.insert(name.to_owned(), value));
    put("activity_id", activity.into());
    if activity == OTHER {
        put("activity_name", body.action.clone().into());
    }
    put("category_uid", (class / 1_000).into());
    put("class_uid", class.into());
    put("type_uid", (class * 100 + activity).into());
    put("severity_id", severity(body).into());
    put("time", milliseconds(record).into());
    put("message", message(body).into());
    put("metadata", metadata(record));
    put("actor", actor(body));
    let (status_id, status) = status(body);
    put("status_id", status_id.into());
    put("status", status.into());
    if let Some(code) = &body.code {
        put("status_code", code.clone().into());
    }
    if let Some(decision) = body.decision {
        let (id, name) = match decision {
            AuditDecision::Allow => (1, "Allowed"),
            AuditDecision::Deny => (2, "Denied"),
        };
        put("action_id", id.into());
        put("action", name.into());
    }
    match class {
        FILE_SYSTEM => {
            put("device", device(body));
            let (file, result) = file(body);
            put("file", file);
            if let Some(result) = result {
                put("file_result", result);
            }
        }
        PROCESS => {
            put("device", device(body));
            put("process", process(body));
            if let Some(code) = body.detail.get("exit_code").filter(|code| code.is_i64()) {
                put("exit_code", code.clone());
            }
        }
        AUTHENTICATION => {
            put("user", user(body.subject.as_ref()));
            put("service", json!({"name": "cynode"}));
            put("is_remote", true.into());
            // A network prefix is not an endpoint.
            if let Some(address) = body
                .detail
                .get("address")
                .and_then(Value::as_str)
                .filter(|address| !address.contains('/'))
            {
                put("src_endpoint", json!({"ip": address}));
            }
        }
        _ => {
            put("api", api(body));
            put("src_endpoint", source(body.subject.as_ref()));
            put("dst_endpoint", json!({"svc_name": "cynode"}));
            let resources = resources(body);
            if !resources.is_empty() {
                put("resources", resources.into());
            }
        }
    }
    put("unmapped", unmapped(record));
    Value::Object(event)
}

fn class(body: &AuditBody) -> (u64, u64) {
    if body.kind == AuditKind::Authentication {
        return (AUTHENTICATION, 1);
    }
    let verb = verb(&body.action);
    match target_kind(body) {
        TargetKind::Exec if body.kind == AuditKind::Outcome && has_ended(body) => (PROCESS, 2),
        TargetKind::Exec => (PROCESS, 1),
        TargetKind::File => {
            let change = |name: &str| {
                body.detail
                    .get("changes")
                    .and_then(|changes| changes.get(0))
                    .map(|change| change.get(name).is_some())
            };
            let activity = match (verb, change("sha256_before"), change("sha256_after")) {
                (Verb::Move, ..) => 5,
                (Verb::Read, ..) => 2,
                (Verb::Create, ..) | (_, Some(false), Some(true)) => 1,
                (Verb::Delete, ..) | (_, Some(true), Some(false)) => 4,
                (Verb::Update, ..) => 3,
                (Verb::Other, ..) => OTHER,
            };
            (FILE_SYSTEM, activity)
        }
        TargetKind::Artifact | TargetKind::Other => {
            let activity = match verb {
                Verb::Create => 1,
                Verb::Read => 2,
                Verb::Update | Verb::Move => 3,
                Verb::Delete => 4,
                Verb::Other => OTHER,
            };
            (API, activity)
        }
    }
}

fn has_ended(body: &AuditBody) -> bool {
    ["exit_code", "signal"]
        .iter()
        .any(|name| body.detail.get(*name).is_some_and(|value| !value.is_null()))
}

/// Informational, low or medium: collectors decide for themselves what raises an alarm.
fn severity(body: &AuditBody) -> u64 {
    match (body.decision, body.result) {
        (Some(AuditDecision::Deny), _) => 3,
        (_, Some(AuditResult::Refused | AuditResult::Failed | AuditResult::Unknown)) => 2,
        _ => 1,
    }
}

fn status(body: &AuditBody) -> (u64, &'static str) {
    match (body.decision, body.result) {
        (Some(AuditDecision::Deny), _)
        | (_, Some(AuditResult::Failed | AuditResult::Refused | AuditResult::NotStarted)) => {
            (2, "Failure")
        }
        (_, Some(AuditResult::Done)) => (1, "Success"),
        (Some(AuditDecision::Allow), None) if body.kind == AuditKind::Authentication => {
            (1, "Success")
        }
        (_, None) if body.kind == AuditKind::Intent => (OTHER, "Intended"),
        (_, Some(AuditResult::Unknown) | None) => (0, "Unknown"),
    }
}

fn milliseconds(record: &AuditRecord) -> i64 {
    i64::try_from(record.at.unix_timestamp_nanos().div_euclid(1_000_000)).unwrap_or(i64::MAX)
}

fn message(body: &AuditBody) -> String {
    let word = match (body.decision, body.result) {
        (Some(AuditDecision::Deny), _) => "deny",
        (_, Some(result)) => result.as_str(),
        (Some(AuditDecision::Allow), None) => "allow",
        (None, None) => "",
    };
    format!("{} {} {word}", body.kind.as_str(), body.action)
        .trim_end()
        .to_owned()
}

fn metadata(record: &AuditRecord) -> Value {
    let mut metadata = json!({
        "version": VERSION,
        "product": {"name": "CyNode", "vendor_name": "CyNode"},
        "uid": format!("{}/{}", record.stream, record.seq),
        "sequence": record.cursor,
        "event_code": record.body.action,
        "log_name": "audit",
    });
    if record.body.decision.is_some() {
        metadata["profiles"] = json!(["security_control"]);
    }
    if let Some(call) = record.body.call_id {
        metadata["correlation_uid"] = call.to_string().into();
    }
    metadata
}

/// The id of a node or of an egress role.
fn component(subject: &AuditSubject) -> Option<String> {
    let node = subject.node_id.map(|id| id.to_string());
    node.or_else(|| subject.instance.map(|id| id.to_string()))
}

fn user(subject: Option<&AuditSubject>) -> Value {
    let Some(subject) = subject else {
        return json!({"name": "system", "type": "system", "type_id": 3});
    };
    let type_id = match subject.kind.as_str() {
        "user" => 1,
        "egress" | "node" | "system" => 3,
        "nobody" => 0,
        _ => OTHER,
    };
    let mut user = json!({
        "name": subject.name.as_ref().unwrap_or(&subject.kind),
        "type": subject.kind,
        "type_id": type_id,
    });
    if let Some(id) = subject
        .user_id
        .map(|id| id.to_string())
        .or_else(|| component(subject))
    {
        user["uid"] = id.into();
    }
    if let Some(token) = subject.token_id {
        user["credential_uid"] = token.to_string().into();
    }
    user
}

fn actor(body: &AuditBody) -> Value {
    let mut actor = json!({"user": user(body.subject.as_ref())});
    if let Some(decision) = body.decision {
        let authorization =
            |rule: &String| json!({"decision": decision.as_str(), "policy": {"name": rule}});
        let authorizations: Vec<Value> = body.rules.iter().map(authorization).collect();
        actor["authorizations"] = if authorizations.is_empty() {
            json!([{"decision": decision.as_str()}])
        } else {
            authorizations.into()
        };
    }
    actor
}

/// The caller's token, node or egress role: the audit trail doesn't know the address.
fn source(subject: Option<&AuditSubject>) -> Value {
    let Some(subject) = subject else {
        return json!({"svc_name": "cynode"});
    };
    let id = subject
        .token_id
        .map(|id| id.to_string())
        .or_else(|| component(subject));
    id.map_or_else(
        || json!({"name": subject.kind}),
        |id| json!({"name": subject.kind, "uid": id}),
    )
}

fn api(body: &AuditBody) -> Value {
    let mut api = json!({"operation": body.action, "service": {"name": "cynode"}});
    if let Some(uid) = body
        .request_id
        .clone()
        .or_else(|| body.call_id.map(|call| call.to_string()))
    {
        api["request"] = json!({"uid": uid});
    }
    if body.status.is_some() || body.code.is_some() {
        let mut response = Map::new();
        response.extend(body.status.map(|status| ("code".to_owned(), status.into())));
        response.extend(
            body.code
                .as_ref()
                .map(|code| ("error".to_owned(), code.clone().into())),
        );
        api["response"] = response.into();
    }
    api
}

/// The ids in a record with their kinds.
fn ids(body: &AuditBody) -> impl Iterator<Item = (&'static str, String)> {
    [
        ("project", body.project_id.map(|id| id.to_string())),
        ("task", body.task_id.map(|id| id.to_string())),
        ("session", body.session_id.map(|id| id.to_string())),
        ("job", body.job_id.map(|id| id.to_string())),
        ("exec", body.exec_id.map(|id| id.to_string())),
    ]
    .into_iter()
    .filter_map(|(kind, id)| Some((kind, id?)))
}

fn resources(body: &AuditBody) -> Vec<Value> {
    let named = body
        .resource
        .as_deref()
        .map(|resource| resource.split_once(':').unwrap_or(("other", resource)));
    let named = named.map(|(kind, id)| json!({"type": kind, "uid": id}));
    named
        .into_iter()
        .chain(ids(body).map(|(kind, id)| json!({"type": kind, "uid": id})))
        .collect()
}

/// The sandbox.
fn device(body: &AuditBody) -> Value {
    let id = body
        .session_id
        .map(|id| id.to_string())
        .or_else(|| body.job_id.map(|id| id.to_string()));
    id.map_or_else(
        || json!({"type_id": 6, "type": "Virtual", "name": "sandbox"}),
        |id| json!({"type_id": 6, "type": "Virtual", "name": "sandbox", "uid": id}),
    )
}

fn process(body: &AuditBody) -> Value {
    let mut process = json!({});
    if let Some(uid) = body
        .exec_id
        .map(|id| id.to_string())
        .or_else(|| body.call_id.map(|call| call.to_string()))
    {
        process["uid"] = uid.into();
    }
    let argv: Vec<&str> = body
        .detail
        .get("argv")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    if let Some(program) = argv.first() {
        process["name"] = name_of(program).into();
        process["cmd_line"] = argv
            .iter()
            .map(|word| crate::story::quoted(word))
            .collect::<Vec<_>>()
            .join(" ")
            .into();
    }
    process
}

fn name_of(path: &str) -> &str {
    path.trim_end_matches('/')
        .rsplit('/')
        .next()
        .filter(|name| !name.is_empty())
        .unwrap_or(path)
}

fn file_object(path: &str, sha256: Option<&Value>) -> Value {
    let mut file = json!({"name": name_of(path), "path": path, "type_id": 0});
    if let Some(hash) = sha256.and_then(Value::as_str) {
        file["hashes"] = json!([{"algorithm": "SHA-256", "algorithm_id": 3, "value": hash}]);
    }
    file
}

/// The file before and after. Uses the first of several changes: `detail` has all of them.
fn file(body: &AuditBody) -> (Value, Option<Value>) {
    let text = |value: &Value, name: &str| {
        value
            .get(name)
            .and_then(Value::as_str)
            .map(ToOwned::to_owned)
    };
    if let Some(change) = body
        .detail
        .get("changes")
        .and_then(|changes| changes.get(0))
    {
        let path = text(change, "path").unwrap_or_default();
        let after = change
            .get("sha256_after")
            .map(|hash| file_object(&path, Some(hash)));
        return (file_object(&path, change.get("sha256_before")), after);
    }
    let path = ["path", "from"]
        .iter()
        .find_map(|name| body.detail.get(*name).and_then(Value::as_str))
        .unwrap_or_default();
    let to = body
        .detail
        .get("to")
        .and_then(Value::as_str)
        .map(|to| file_object(to, None));
    (file_object(path, body.detail.get("sha256")), to)
}

fn unmapped(record: &AuditRecord) -> Value {
    let body = &record.body;
    let mut unmapped = json!({
        "kind": body.kind.as_str(),
        "stream": record.stream,
        "seq": record.seq,
        "hash": record.hash,
    });
    for (kind, id) in ids(body) {
        unmapped[format!("{kind}_id")] = id.into();
    }
    for (name, value) in [
        ("stage", &body.stage),
        ("resource", &body.resource),
        ("request_id", &body.request_id),
    ] {
        if let Some(value) = value {
            unmapped[name] = value.clone().into();
        }
    }
    if !body.detail.is_empty() {
        unmapped["detail"] = body.detail.clone().into();
    }
    unmapped
}

//! Completes OpenAPI documents beyond what routes declare: the error statuses of each route, binary
//! bodies, and optional bodies.

use std::collections::BTreeMap;

use cynode_api::ErrorCode;
use serde_json::{Map, Value, json};
use utoipa::{
    Modify,
    openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme},
};

/// Makes every route require a bearer token.
#[derive(Debug)]
pub struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        components.add_security_scheme(
            "bearer",
            SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)),
        );
        document.security = Some(vec![SecurityRequirement::new(
            "bearer",
            Vec::<String>::new(),
        )]);
    }
}

/// The error codes of one route, such as `POST /v1/things`.
pub type Refusals = (String, &'static [ErrorCode]);

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

/// Errors of every route.
const ANY: &[ErrorCode] = &[
    ErrorCode::InvalidRequest,
    ErrorCode::Unauthorized,
    ErrorCode::Internal,
];
/// Errors of routes with a body.
const BODY: &[ErrorCode] = &[ErrorCode::RequestTimeout, ErrorCode::TooLarge];

/// Errors of the session calls of both APIs, by method and path below `…/sessions`.
const SESSION: &[(&str, &[ErrorCode])] = &[
    ("GET /{id}", &[ErrorCode::SessionNotFound]),
    (
        "PATCH /{id}",
        &[
            ErrorCode::SessionNotFound,
            ErrorCode::SessionEnded,
            ErrorCode::NotRunning,
        ],
    ),
    (
        "POST /{id}/end",
        &[ErrorCode::SessionNotFound, ErrorCode::RuntimeUnavailable],
    ),
    (
        "POST /{id}/resume",
        &[
            ErrorCode::SessionNotFound,
            ErrorCode::SessionEnded,
            ErrorCode::NotResumable,
            ErrorCode::RuntimeUnavailable,
            ErrorCode::NoCapacity,
            ErrorCode::NoSpace,
        ],
    ),
    ("POST /{id}/signal", SANDBOX),
    ("POST /{id}/exec", SANDBOX),
    (
        "POST /{id}/exec",
        &[
            ErrorCode::ExecIdInUse,
            ErrorCode::ExecFailed,
            ErrorCode::PidsExhausted,
            ErrorCode::RuntimeUnavailable,
            ErrorCode::NoSpace,
        ],
    ),
    (
        "GET /{id}/execs",
        &[
            ErrorCode::SessionNotFound,
            ErrorCode::SessionEnded,
            ErrorCode::NotRunning,
        ],
    ),
    ("GET /{id}/execs/{exec_id}", EXEC),
    ("GET /{id}/execs/{exec_id}/output", EXEC),
    (
        "GET /{id}/execs/{exec_id}/output",
        &[ErrorCode::OutputExpired],
    ),
    ("POST /{id}/execs/{exec_id}/signal", EXEC),
    (
        "POST /{id}/execs/{exec_id}/signal",
        &[
            ErrorCode::ExecEnded,
            ErrorCode::AgentUnavailable,
            ErrorCode::RuntimeUnavailable,
        ],
    ),
    ("POST /{id}/execs/{exec_id}/stdin", EXEC),
    (
        "POST /{id}/execs/{exec_id}/stdin",
        &[
            ErrorCode::ExecEnded,
            ErrorCode::StdinClosed,
            ErrorCode::StdinFull,
            ErrorCode::AgentUnavailable,
        ],
    ),
    ("GET /{id}/files", FILES),
    ("GET /{id}/files", &[ErrorCode::RangeNotSatisfiable]),
    ("HEAD /{id}/files", FILES),
    ("PUT /{id}/files", FILES),
    ("PUT /{id}/files", CHANGED),
    ("DELETE /{id}/files", FILES),
    ("DELETE /{id}/files", CHANGED),
    ("POST /{id}/files:list", FILES),
    ("POST /{id}/files:search", FILES),
    ("POST /{id}/files:patch", FILES),
    (
        "POST /{id}/files:patch",
        &[
            ErrorCode::AgentOutdated,
            ErrorCode::PatchRejected,
            ErrorCode::NoSpace,
        ],
    ),
    ("POST /{id}/files:edit", FILES),
    (
        "POST /{id}/files:edit",
        &[
            ErrorCode::EditRejected,
            ErrorCode::PreconditionFailed,
            ErrorCode::NoSpace,
        ],
    ),
    ("GET /{id}/files:watch", FILES),
    ("GET /{id}/files:watch", &[ErrorCode::TooManyRequests]),
    ("POST /{id}/files:move", FILES),
    ("POST /{id}/files:move", CHANGED),
    ("POST /{id}/files:mkdir", FILES),
    ("POST /{id}/files:mkdir", CHANGED),
    ("POST /{id}/export", FILES),
    ("POST /{id}/export", &[ErrorCode::NotARepository]),
    ("POST /{id}/import", FILES),
    ("POST /{id}/import", CHANGED),
    ("GET /{id}/pty", SANDBOX),
    (
        "GET /{id}/pty",
        &[ErrorCode::PtyNotAllowed, ErrorCode::RuntimeUnavailable],
    ),
];

/// Errors of calls that need a running sandbox.
const SANDBOX: &[ErrorCode] = &[
    ErrorCode::SessionNotFound,
    ErrorCode::NotRunning,
    ErrorCode::AgentRequired,
    ErrorCode::SessionEnded,
    ErrorCode::AgentUnavailable,
];
const EXEC: &[ErrorCode] = &[
    ErrorCode::SessionNotFound,
    ErrorCode::ExecNotFound,
    ErrorCode::NotRunning,
    ErrorCode::SessionEnded,
];
/// Errors of calls on files.
const FILES: &[ErrorCode] = &[
    ErrorCode::PermissionDenied,
    ErrorCode::SessionNotFound,
    ErrorCode::NotFound,
    ErrorCode::NotRunning,
    ErrorCode::AgentRequired,
    ErrorCode::NotAFile,
    ErrorCode::NotADirectory,
    ErrorCode::SessionEnded,
    ErrorCode::AgentUnavailable,
    ErrorCode::PidsExhausted,
];
const CHANGED: &[ErrorCode] = &[
    ErrorCode::NotEmpty,
    ErrorCode::AlreadyExists,
    ErrorCode::PreconditionFailed,
    ErrorCode::NoSpace,
];

/// The errors of the session calls below the path `sessions`.
#[must_use]
pub fn in_sessions(sessions: &str) -> Vec<Refusals> {
    let place = |route: &str| route.replacen(' ', &format!(" {sessions}"), 1);
    SESSION
        .iter()
        .map(|(route, codes)| (place(route), *codes))
        .collect()
}

/// Completes a document. `any` lists the errors of every route of the role, `some` those of single
/// routes. `default` stays, for errors of newer versions.
#[must_use]
pub fn complete(mut document: Value, any: &[ErrorCode], some: &[Refusals]) -> Value {
    let schemas = document["components"]["schemas"].take();
    let paths = document["paths"].take();
    // Responses that several routes share are written once.
    let (mut described, mut shared) = (Map::new(), Map::new());
    for (path, mut operations) in object(paths) {
        let path = path.replace("{*", "{");
        for (method, operation) in operations.as_object_mut().into_iter().flatten() {
            let route = format!("{} {path}", method.to_uppercase());
            let mut codes = [ANY, any].concat();
            codes.extend(
                some.iter()
                    .filter(|(named, _)| *named == route)
                    .flat_map(|(_, codes)| codes.iter()),
            );
            complete_operation(operation, &schemas, &mut shared, method == "head", codes);
        }
        described.insert(path, operations);
    }
    document["paths"] = described.into();
    document["components"]["schemas"] = schemas;
    document["components"]["responses"] = shared.into();
    // Sorted, because the document is checked in and the order of maps depends on features.
    document.sort_all_objects();
    document
}

fn object(value: Value) -> Map<String, Value> {
    if let Value::Object(members) = value {
        members
    } else {
        Map::new()
    }
}

fn complete_operation(
    operation: &mut Value,
    schemas: &Value,
    shared: &mut Map<String, Value>,
    is_head: bool,
    mut codes: Vec<ErrorCode>,
) {
    // Operation ids must be unique, and several tags have a `list`.
    if let (Some(tag), Some(name)) = (
        operation["tags"][0].as_str(),
        operation["operationId"].as_str(),
    ) {
        operation["operationId"] = format!("{tag}_{name}").into();
    }
    for parameter in operation
        .get_mut("parameters")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if parameter["in"] == "path" {
            codes.push(ErrorCode::NotFound);
        }
        if parameter["in"] == "query" && parameter["name"] == "limit" {
            parameter["schema"] =
                json!({"type": "integer", "format": "int32", "minimum": 1, "maximum": 1_000});
        }
    }
    if operation["requestBody"].is_object() {
        codes.extend(BODY);
        let body = &mut operation["requestBody"];
        bytes_as_such(&mut body["content"]);
        if let Some(name) = body["content"][JSON]["schema"]["$ref"]
            .as_str()
            .and_then(|name| name.rsplit('/').next())
        {
            codes.push(ErrorCode::UnsupportedMediaType);
            if schemas[name]["properties"]["version"].is_object() {
                codes.push(ErrorCode::UnsupportedVersion);
            }
            // A missing body means an empty object.
            body["required"] = schemas[name]["required"].is_array().into();
        }
    }
    let Some(responses) = operation["responses"].as_object_mut() else {
        return;
    };
    for (status, response) in responses.iter_mut() {
        // The standard requires a description.
        if response["description"].as_str().is_none_or(str::is_empty) {
            let status = status
                .parse::<u16>()
                .ok()
                .and_then(|status| http::StatusCode::from_u16(status).ok());
            response["description"] = status
                .and_then(|status| status.canonical_reason())
                .unwrap_or("Any other error")
                .into();
        }
        bytes_as_such(&mut response["content"]);
        if response["content"].is_null() {
            response
                .as_object_mut()
                .map(|members| members.remove("content"));
        }
    }
    let mut by_status: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
    for code in codes {
        let names = by_status.entry(code.status()).or_default();
        if !names.contains(&code.as_str()) {
            names.push(code.as_str());
        }
    }
    for (status, names) in by_status {
        let described: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        let mut response = json!({"description": described.join(", ")});
        let mut name = names.join(".");
        if is_head {
            name += ".head";
        } else {
            response["content"] =
                json!({PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}});
        }
        if !responses.contains_key(&status.to_string()) {
            responses.insert(
                status.to_string(),
                json!({"$ref": format!("#/components/responses/{name}")}),
            );
            shared.insert(name, response);
        }
    }
}

/// Marks byte arrays as binary strings.
fn bytes_as_such(content: &mut Value) {
    for (kind, content) in content.as_object_mut().into_iter().flatten() {
        if !kind.ends_with("json") && content["schema"]["type"] == "array" {
            content["schema"] = json!({"type": "string", "format": "binary"});
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_is_named_with_its_codes() {
        let document = json!({
            "paths": {"/v1/things/{*path}": {"put": {
                "tags": ["things"], "operationId": "put",
                "parameters": [{"in": "path", "name": "path"}],
                "requestBody": {
                    "required": true,
                    "content": {"application/json": {
                        "schema": {"$ref": "#/components/schemas/Thing"},
                    }},
                },
                "responses": {
                    "200": {
                        "description": "",
                        "content": {"application/octet-stream": {"schema": {"type": "array"}}},
                    },
                    "default": {"description": ""},
                },
            }}},
            "components": {"schemas": {"Thing": {"properties": {"version": {}}}}},
        });
        let done = complete(
            document,
            &[ErrorCode::StoreUnavailable],
            &[(
                "PUT /v1/things/{path}".to_owned(),
                &[ErrorCode::NotAFile, ErrorCode::AlreadyExists],
            )],
        );
        let put = &done["paths"]["/v1/things/{path}"]["put"];
        assert_eq!(
            (&put["operationId"], &put["requestBody"]["required"]),
            (&json!("things_put"), &json!(false))
        );
        let statuses: Vec<_> = put["responses"]
            .as_object()
            .expect("responses")
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(
            statuses,
            [
                "200", "400", "401", "404", "408", "409", "413", "415", "422", "500", "503",
                "default"
            ]
        );
        assert_eq!(
            put["responses"]["409"]["$ref"],
            "#/components/responses/not_a_file.already_exists"
        );
        assert_eq!(
            done["components"]["responses"]["not_a_file.already_exists"]["description"],
            "`not_a_file`, `already_exists`"
        );
        assert_eq!(put["responses"]["200"]["description"], "OK");
        assert_eq!(
            put["responses"]["200"]["content"]["application/octet-stream"]["schema"]["format"],
            "binary"
        );
        assert!(done["components"]["schemas"]["Thing"].is_object());
    }
}

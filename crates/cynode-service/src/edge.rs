//! The HTTP edge: problems as answers, strict bodies and queries, request ids.

use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Request, rejection::BytesRejection},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cynode_api::{ErrorCode, Problem};
use http::{HeaderName, HeaderValue, StatusCode, header, request::Parts};
use serde::de::DeserializeOwned;

use crate::{body, unique::doubled};

/// Largest JSON body.
pub const MAX_BODY: usize = 10 * 1024 * 1024;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A problem on its way to the caller.
#[derive(Clone, Debug)]
pub struct ApiError(pub Box<Problem>);

impl ApiError {
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        Problem::new(code, detail).into()
    }

    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, detail)
    }
}

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        Self(Box::new(problem))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = render(&self.0);
        response.extensions_mut().insert(self);
        response
    }
}

fn render(problem: &Problem) -> Response {
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body = serde_json::to_vec(problem).unwrap_or_default();
    let mut response = (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response();
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// Gives every request an id, puts it into the answer and into problems, and logs failures of ours under it. A request that is
/// passed on to another role carries it there.
pub async fn request_id(mut request: Request, next: Next) -> Response {
    let given = request
        .headers()
        .get(&REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| (1..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()));
    let id = given.map_or_else(|| uuid::Uuid::now_v7().to_string(), str::to_owned);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let value = HeaderValue::from_str(&id).ok();
    if let Some(value) = &value {
        request.headers_mut().insert(REQUEST_ID, value.clone());
    }
    let mut response = next.run(request).await;
    if let Some(ApiError(mut problem)) = response.extensions_mut().remove::<ApiError>() {
        if problem.status >= 500 {
            tracing::warn!(request_id = id, %method, path, code = problem.code, detail = problem.detail, "A request failed.");
        }
        problem.request_id = Some(id.clone());
        let headers = std::mem::take(response.headers_mut());
        response = render(&problem);
        for (name, value) in headers {
            if let Some(name) = name.filter(|name| !response.headers().contains_key(name) && *name != header::CONTENT_LENGTH) {
                response.headers_mut().insert(name, value);
            }
        }
    }
    if let Some(value) = value {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// A JSON body, read strictly: bounded, unknown and doubled fields refused, the fault named by its place.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let JsonBytes(bytes) = JsonBytes::from_request(request, state).await?;
        parse(&bytes).map(Self)
    }
}

/// The bytes of a body that says that it is JSON, or says nothing.
#[derive(Debug)]
pub struct JsonBytes(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for JsonBytes {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        if let Some(kind) = request.headers().get(header::CONTENT_TYPE) {
            let kind = kind.to_str().unwrap_or_default().to_ascii_lowercase();
            let essence = kind.split(';').next().unwrap_or_default().trim();
            if essence != "application/json" && !essence.ends_with("+json") {
                return Err(ApiError::new(ErrorCode::UnsupportedMediaType, format!("expected application/json, got '{essence}'")));
            }
        }
        Bytes::from_request(request, state).await.map(Self).map_err(|rejection| body_error(&rejection, MAX_BODY as u64))
    }
}

/// The problem of a body that could not be read.
fn body_error(rejection: &BytesRejection, limit: u64) -> ApiError {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        ApiError::new(ErrorCode::TooLarge, format!("the body exceeds {limit} bytes"))
    } else {
        body::problem(rejection, "the body could not be read to its end")
    }
}

/// Parses JSON as bodies are parsed. An empty body is an empty object.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    // A derived type would also take a list of its fields' values, by their order.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(ApiError::invalid("the body must be a JSON object"));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let message = error.into_inner().to_string();
        ApiError::invalid(if path == "." { message } else { format!("{path}: {message}") })
    })?;
    deserializer.end().map_err(|error| ApiError::invalid(format!("after the body's object: {error}")))?;
    doubled(bytes).map_or(Ok(value), |error| Err(ApiError::invalid(error)))
}

/// A query string, read strictly.
#[derive(Debug)]
pub struct QueryParams<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Self::Rejection> {
        if let Some(name) = not_utf8(parts.uri.query().unwrap_or_default()) {
            return Err(ApiError::invalid(format!("{name}: is not UTF-8; where bytes are taken, {name}_b64 takes them in base64")));
        }
        axum::extract::Query::try_from_uri(&parts.uri).map(|query| Self(query.0)).map_err(|error| ApiError::invalid(format!("query: {}", source_text(&error))))
    }
}

/// The name of a parameter whose value is not UTF-8. Decoding would put something else in its place.
fn not_utf8(query: &str) -> Option<String> {
    let decode = |text: &str| {
        let mut decoded = Vec::with_capacity(text.len());
        let mut rest = text.as_bytes();
        while let Some((&first, after)) = rest.split_first() {
            let escaped = if first == b'%' { after.split_at_checked(2) } else { None };
            let escaped = escaped.and_then(|(digits, after)| Some((u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?, after)));
            let (byte, after) = escaped.unwrap_or((first, after));
            decoded.push(byte);
            rest = after;
        }
        String::from_utf8(decoded)
    };
    query.split('&').find_map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let shown = decode(name).map(|name| name.chars().take(50).collect());
        match (shown, decode(value)) {
            (Ok(name), Err(_)) => Some(name),
            (Err(_), _) => Some("query".to_owned()),
            (Ok(_), Ok(_)) => None,
        }
    })
}

fn source_text(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest.to_string()
}

/// Times every request by its route.
pub async fn measure(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<axum::extract::MatchedPath>().map_or_else(|| "unknown".to_owned(), |path| path.as_str().to_owned());
    let method = request.method().as_str().to_owned();
    let started = std::time::Instant::now();
    let response = next.run(request).await;
    metrics::histogram!("cynode_http_request_seconds", "route" => route, "method" => method).record(started.elapsed().as_secs_f64());
    response
}

/// The answer to an address that does not exist.
pub fn not_found() -> std::future::Ready<ApiError> {
    std::future::ready(ApiError(Box::new(Problem::new(ErrorCode::NotFound, "no such address").with_remedy("See /openapi.json for the addresses."))))
}

/// The answer to a method that an address does not have.
pub fn method_not_allowed() -> std::future::Ready<ApiError> {
    std::future::ready(ApiError::new(ErrorCode::MethodNotAllowed, "this address does not take that method"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_that_is_not_utf8_is_found_by_name() {
        for (query, found) in [
            ("", None),
            ("path=%C3%BC&x=%", None),
            ("path=a%2", None),
            ("path=100%+%zz", None),
            ("path=%FF", Some("path")),
            ("x=1&pa%74h=a%C3b", Some("path")),
            ("%FF=1", Some("query")),
        ] {
            assert_eq!(not_utf8(query).as_deref(), found, "{query}");
        }
    }
}

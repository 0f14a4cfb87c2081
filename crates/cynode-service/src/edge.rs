//! The HTTP edge: problem responses, strict bodies and queries, request ids.

use axum::{
    RequestExt as _,
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Request},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cynode_api::{ErrorCode, Problem, file_limits};
use futures_util::StreamExt as _;
use http::{HeaderName, HeaderValue, StatusCode, header, request::Parts};
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{body, compute, connections::Connection, json, unique::duplicate_member};

/// The largest JSON body.
pub const MAX_BODY: usize = 10 * 1024 * 1024;
/// The longest decoded value of a query parameter. The arguments of a terminal's command are
/// bounded only by the length of the URL.
pub const MAX_PARAMETER_BYTES: usize = 4_096;
/// The longest value of a base64 parameter.
const MAX_BASE64_PARAMETER_BYTES: usize = 5_464;
/// Bodies over `compute::INLINE_BYTES` that are buffered concurrently; others wait.
const MAX_LARGE_BODIES: usize = 6;

static LARGE_BODIES: Semaphore = Semaphore::const_new(MAX_LARGE_BODIES);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A problem as a response.
#[derive(Clone, Debug)]
pub struct ApiError(Box<Problem>);

impl ApiError {
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        Problem::new(code, detail).into()
    }

    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, detail)
    }

    #[must_use]
    pub fn with_remedy(self, remedy: impl Into<String>) -> Self {
        self.0.with_remedy(remedy).into()
    }

    #[must_use]
    pub fn with(self, name: &str, value: impl Into<serde_json::Value>) -> Self {
        self.0.with(name, value).into()
    }

    #[must_use]
    pub fn into_problem(self) -> Box<Problem> {
        self.0
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&self.0, f)
    }
}

impl std::ops::Deref for ApiError {
    type Target = Problem;

    fn deref(&self) -> &Problem {
        &self.0
    }
}

impl std::ops::DerefMut for ApiError {
    fn deref_mut(&mut self) -> &mut Problem {
        &mut self.0
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
    let mut response = (
        status,
        [(header::CONTENT_TYPE, "application/problem+json")],
        body,
    )
        .into_response();
    if status == StatusCode::UNAUTHORIZED {
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// Gives every request an id, returns it in the response and in problems, and logs server errors
/// under it. A forwarded request carries the id to the next role.
pub async fn request_id(mut request: Request, next: Next) -> Response {
    let given = request
        .headers()
        .get(&REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| {
            (1..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
        });
    let id = given.map_or_else(|| uuid::Uuid::now_v7().to_string(), str::to_owned);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let value = HeaderValue::from_str(&id).ok();
    if let Some(value) = &value {
        request.headers_mut().insert(REQUEST_ID, value.clone());
    }
    let mut response = next.run(request).await;
    if let Some(ApiError(mut problem)) = response.extensions_mut().remove::<ApiError>() {
        if problem.status >= 500 {
            tracing::warn!(
                request_id = id, %method, path, code = problem.code, detail = problem.detail,
                "A request failed."
            );
        }
        problem.request_id = Some(id.clone());
        let headers = std::mem::take(response.headers_mut());
        response = render(&problem);
        for (name, value) in headers {
            if let Some(name) = name.filter(|name| {
                !response.headers().contains_key(name) && *name != header::CONTENT_LENGTH
            }) {
                response.headers_mut().insert(name, value);
            }
        }
    }
    if let Some(value) = value {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// A strictly parsed JSON body: bounded, without unknown or duplicate fields; errors name the
/// location.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let JsonBytes { bytes, .. } = &JsonBytes::from_request(request, state).await?;
        compute::run(bytes.len(), || parse(bytes)).await.map(Self)
    }
}

/// The bytes of a JSON body (by content type, or without one). Holds the permits for its size while
/// it lives.
#[derive(Debug)]
pub struct JsonBytes {
    pub bytes: Bytes,
    _large: Option<SemaphorePermit<'static>>,
    _room: json::Room,
}

impl<S: Send + Sync> FromRequest<S> for JsonBytes {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Self::Rejection> {
        if let Some(kind) = request.headers().get(header::CONTENT_TYPE) {
            let kind = kind.to_str().unwrap_or_default().to_ascii_lowercase();
            let essence = kind.split(';').next().unwrap_or_default().trim();
            if essence != "application/json" && !essence.ends_with("+json") {
                return Err(ApiError::new(
                    ErrorCode::UnsupportedMediaType,
                    format!("expected application/json, got '{essence}'"),
                ));
            }
        }
        let is_reserved = request.extensions().get::<json::Reserved>().is_some();
        let (bytes, nodes, large) = take(request, is_reserved).await?;
        let room = if is_reserved {
            json::Room::default()
        } else {
            json::room(bytes.len(), nodes).await
        };
        Ok(Self {
            bytes,
            _large: large,
            _room: room,
        })
    }
}

/// The bytes of a body that is not JSON. Holds the permit for its size while it lives.
#[derive(Debug)]
pub struct RawBytes {
    pub bytes: Bytes,
    _large: Option<SemaphorePermit<'static>>,
}

impl RawBytes {
    /// Reads a body to its end, up to a limit.
    pub async fn read(request: Request, max_bytes: usize) -> Result<Self, ApiError> {
        let (bytes, large) = buffer(request, max_bytes, false, |_| Ok(())).await?;
        Ok(Self {
            bytes,
            _large: large,
        })
    }
}

/// The body limit of a route, instead of the default.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimit(pub usize);

/// Reads a body to its end and counts its JSON nodes.
async fn take(
    request: Request,
    is_reserved: bool,
) -> Result<(Bytes, usize, Option<SemaphorePermit<'static>>), ApiError> {
    let max_bytes = request
        .extensions()
        .get::<BodyLimit>()
        .map_or(MAX_BODY, |limit| limit.0);
    // An unauthenticated client that stalls must not hold a permit that others wait for; such
    // bodies are short and few.
    let is_reserved = is_reserved
        || request
            .extensions()
            .get::<Connection>()
            .is_some_and(|connection| !connection.is_authenticated());
    let mut scan = json::Scan::default();
    let inspect = |piece: &[u8]| scan.feed(piece);
    let (bytes, large) = buffer(request, max_bytes, is_reserved, inspect).await?;
    Ok((bytes, scan.nodes(), large))
}

/// Reads a body to its end. A long one needs a permit unless its caller holds one.
async fn buffer(
    request: Request,
    max_bytes: usize,
    is_reserved: bool,
    mut inspect: impl FnMut(&[u8]) -> Result<(), ApiError>,
) -> Result<(Bytes, Option<SemaphorePermit<'static>>), ApiError> {
    let mut pieces = request.into_limited_body().into_data_stream();
    let (mut bytes, mut large) = (Vec::new(), None);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| body_error(&error))?;
        inspect(&piece)?;
        if large.is_none() && !is_reserved && bytes.len() + piece.len() > compute::INLINE_BYTES {
            large = LARGE_BODIES.acquire().await.ok();
        }
        if bytes.len() + piece.len() > max_bytes {
            return Err(too_large(max_bytes));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok((bytes.into(), large))
}

fn too_large(max_bytes: usize) -> ApiError {
    ApiError::new(
        ErrorCode::TooLarge,
        format!("the body exceeds {max_bytes} bytes"),
    )
}

/// The problem for a failed read of a body.
fn body_error(error: &axum::Error) -> ApiError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.is::<http_body_util::LengthLimitError>() {
            return too_large(MAX_BODY);
        }
        cause = error.source();
    }
    body::problem(error, "the body could not be read to its end")
}

/// Parses JSON like a body. An empty body is an empty object.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    // A derived type would also accept a list of its fields' values, in order.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(ApiError::invalid("the body must be a JSON object"));
    }
    json::check(bytes)?;
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let message = error.into_inner().to_string();
        ApiError::invalid(if path == "." {
            message
        } else {
            format!("{path}: {message}")
        })
    })?;
    deserializer
        .end()
        .map_err(|error| ApiError::invalid(format!("after the body's object: {error}")))?;
    duplicate_member(bytes).map_or(Ok(value), |error| Err(ApiError::invalid(error)))
}

/// A strictly parsed query string.
#[derive(Debug)]
pub struct QueryParams<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Self::Rejection> {
        check_query(&parts.uri)?;
        if let Some(name) = not_utf8(parts.uri.query().unwrap_or_default()) {
            return Err(ApiError::invalid(format!(
                "{name}: is not UTF-8; where bytes are allowed, send them as {name}_b64 in base64"
            )));
        }
        axum::extract::Query::try_from_uri(&parts.uri)
            .map(|query| Self(query.0))
            .map_err(|error| ApiError::invalid(format!("query: {}", source_text(&error))))
    }
}

/// Refuses queries with overlong parameters.
pub fn check_query(uri: &http::Uri) -> Result<(), ApiError> {
    for pair in uri.query().unwrap_or_default().split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let max_bytes = match name {
            "argv" => continue,
            "path" => file_limits::MAX_PATH_BYTES,
            _ if name.ends_with("_b64") => MAX_BASE64_PARAMETER_BYTES,
            _ => MAX_PARAMETER_BYTES,
        };
        // A three-character escape is one byte.
        let length = |text: &str| {
            text.len()
                - 2 * memchr::memchr_iter(b'%', text.as_bytes())
                    .count()
                    .min(text.len() / 3)
        };
        if length(name) > MAX_PARAMETER_BYTES || length(value) > max_bytes {
            let name: String = name.chars().take(50).collect();
            return Err(ApiError::invalid(format!(
                "{name}: must have at most {max_bytes} bytes"
            )));
        }
    }
    Ok(())
}

/// The name of a parameter whose value is not UTF-8. Lossy decoding would change the value.
fn not_utf8(query: &str) -> Option<String> {
    let decode = |text: &str| String::from_utf8(percent_decode_str(text).collect());
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

/// Records the duration of every request by route.
pub async fn measure(request: Request, next: Next) -> Response {
    let route = request
        .extensions()
        .get::<axum::extract::MatchedPath>()
        .map_or_else(|| "unknown".to_owned(), |path| path.as_str().to_owned());
    let method = request.method().as_str().to_owned();
    let started = std::time::Instant::now();
    let response = next.run(request).await;
    metrics::histogram!("cynode_http_request_seconds", "route" => route, "method" => method)
        .record(started.elapsed().as_secs_f64());
    response
}

/// The response for an unknown path.
pub fn not_found() -> std::future::Ready<ApiError> {
    std::future::ready(ApiError(Box::new(
        Problem::new(ErrorCode::NotFound, "no such address")
            .with_remedy("See /openapi.json for the paths."),
    )))
}

/// The response for an unsupported method.
pub fn method_not_allowed() -> std::future::Ready<ApiError> {
    std::future::ready(ApiError::new(
        ErrorCode::MethodNotAllowed,
        "the path does not support this method",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_is_accepted_up_to_its_limit() {
        let check = |query: &str| {
            check_query(&format!("/x?{query}").parse().expect("an address"))
                .map_err(|error| error.0.detail)
        };
        let longest = file_limits::MAX_PATH_BYTES;
        assert_eq!(check(&format!("x=1&path={}", "a".repeat(longest))), Ok(()));
        assert_eq!(
            check(&format!("path={}", "%C3%BC".repeat(longest / 2))),
            Ok(())
        );
        assert_eq!(
            check(&format!("x=1&path={}", "a".repeat(longest + 1))),
            Err(format!("path: must have at most {longest} bytes"))
        );
        assert!(check(&format!("path={}", "%61".repeat(longest + 1))).is_err());
        assert_eq!(
            check(&format!(
                "path_b64={}",
                "A".repeat(MAX_BASE64_PARAMETER_BYTES)
            )),
            Ok(())
        );
        assert!(
            check(&format!(
                "path_b64={}",
                "A".repeat(MAX_BASE64_PARAMETER_BYTES + 1)
            ))
            .is_err()
        );
        assert_eq!(
            check(&format!("cursor={}", "a".repeat(MAX_PARAMETER_BYTES))),
            Ok(())
        );
        assert!(check(&format!("cursor={}", "a".repeat(MAX_PARAMETER_BYTES + 1))).is_err());
        assert!(check(&"a".repeat(MAX_PARAMETER_BYTES + 1)).is_err());
        assert_eq!(
            check(&format!("argv=sh&argv={}", "a".repeat(60_000))),
            Ok(())
        );
    }

    #[tokio::test]
    async fn a_body_of_many_values_is_refused_and_one_long_text_is_not() {
        #[derive(serde::Deserialize)]
        struct Anything {
            #[expect(dead_code, reason = "only its size matters")]
            x: serde_json::Value,
        }
        let router = axum::Router::new()
            .route(
                "/",
                axum::routing::post(async |JsonBody(_): JsonBody<Anything>| ()),
            )
            .layer(axum::extract::DefaultBodyLimit::max(MAX_BODY));
        let status = async |body: String| {
            let request = Request::post("/")
                .body(axum::body::Body::from(body))
                .expect("a request");
            tower::ServiceExt::oneshot(router.clone(), request)
                .await
                .expect("an answer")
                .status()
                .as_u16()
        };
        assert_eq!(
            status(format!(r#"{{"x":[{}0]}}"#, "0,".repeat(5_000_000))).await,
            413
        );
        assert_eq!(
            status(format!(
                r#"{{"x":[{}0]}}"#,
                "0,".repeat(json::MAX_NODES - 10)
            ))
            .await,
            200
        );
        assert_eq!(
            status(format!(r#"{{"x":"{}"}}"#, "a".repeat(MAX_BODY - 8))).await,
            200
        );
        assert_eq!(
            status(format!(r#"{{"x":"{}"}}"#, "a".repeat(MAX_BODY))).await,
            413
        );
    }

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

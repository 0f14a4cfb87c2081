//! The HTTP edge: problems as answers, strict bodies and queries, request ids.

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
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{body, compute, connections::Connection, json, unique::doubled};

/// Largest JSON body.
pub const MAX_BODY: usize = 10 * 1024 * 1024;
/// Longest value of a query parameter, decoded. Words of a terminal's command are bounded with the address alone.
pub const MAX_PARAMETER_BYTES: usize = 4_096;
/// And of one that is base64.
const MAX_BASE64_PARAMETER_BYTES: usize = 5_464;
/// Bodies over `compute::INLINE_BYTES` that are taken into memory at once; others wait.
const MAX_LARGE_BODIES: usize = 6;

static LARGE_BODIES: Semaphore = Semaphore::const_new(MAX_LARGE_BODIES);

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

/// Gives every request an id, puts it into the answer and into problems, and logs failures of ours under it. A request that is
/// passed on to another role carries it there.
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
            tracing::warn!(request_id = id, %method, path, code = problem.code, detail = problem.detail, "A request failed.");
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

/// A JSON body, read strictly: bounded, unknown and doubled fields refused, the fault named by its place.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let JsonBytes { bytes, .. } = &JsonBytes::from_request(request, state).await?;
        compute::apart(bytes.len(), || parse(bytes)).await.map(Self)
    }
}

/// The bytes of a body that says that it is JSON, or says nothing. While it lives, it holds what its size costs.
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

/// The limit of a route whose JSON bodies are shorter or longer than others'.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimit(pub usize);

/// Reads a body to its end, and counts its nodes on the way.
async fn take(
    request: Request,
    is_reserved: bool,
) -> Result<(Bytes, usize, Option<SemaphorePermit<'static>>), ApiError> {
    let most = request
        .extensions()
        .get::<BodyLimit>()
        .map_or(MAX_BODY, |limit| limit.0);
    // Whoever may stall without being known must not hold what others wait for: such bodies are short, and few at once.
    let is_reserved = is_reserved
        || request
            .extensions()
            .get::<Connection>()
            .is_some_and(|connection| !connection.is_authenticated());
    let mut pieces = request.into_limited_body().into_data_stream();
    let (mut bytes, mut scan, mut large) = (Vec::new(), json::Scan::default(), None);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| body_error(&error))?;
        scan.feed(&piece)?;
        if large.is_none() && !is_reserved && bytes.len() + piece.len() > compute::INLINE_BYTES {
            large = LARGE_BODIES.acquire().await.ok();
        }
        if bytes.len() + piece.len() > most {
            return Err(too_large(most));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok((bytes.into(), scan.nodes(), large))
}

fn too_large(most: usize) -> ApiError {
    ApiError::new(
        ErrorCode::TooLarge,
        format!("the body exceeds {most} bytes"),
    )
}

/// The problem of a body that could not be read.
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

/// Parses JSON as bodies are parsed. An empty body is an empty object.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    // A derived type would also take a list of its fields' values, by their order.
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
    doubled(bytes).map_or(Ok(value), |error| Err(ApiError::invalid(error)))
}

/// A query string, read strictly.
#[derive(Debug)]
pub struct QueryParams<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Self::Rejection> {
        check_query(&parts.uri)?;
        if let Some(name) = not_utf8(parts.uri.query().unwrap_or_default()) {
            return Err(ApiError::invalid(format!(
                "{name}: is not UTF-8; where bytes are taken, {name}_b64 takes them in base64"
            )));
        }
        axum::extract::Query::try_from_uri(&parts.uri)
            .map(|query| Self(query.0))
            .map_err(|error| ApiError::invalid(format!("query: {}", source_text(&error))))
    }
}

/// Refuses a query with a parameter that is longer than any that means something.
pub fn check_query(uri: &http::Uri) -> Result<(), ApiError> {
    for pair in uri.query().unwrap_or_default().split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let most = match name {
            "argv" => continue,
            "path" => file_limits::MAX_PATH_BYTES,
            _ if name.ends_with("_b64") => MAX_BASE64_PARAMETER_BYTES,
            _ => MAX_PARAMETER_BYTES,
        };
        // An escape of three letters stands for one byte.
        let length = |text: &str| {
            text.len()
                - 2 * memchr::memchr_iter(b'%', text.as_bytes())
                    .count()
                    .min(text.len() / 3)
        };
        if length(name) > MAX_PARAMETER_BYTES || length(value) > most {
            let name: String = name.chars().take(50).collect();
            return Err(ApiError::invalid(format!(
                "{name}: must have at most {most} bytes"
            )));
        }
    }
    Ok(())
}

/// The name of a parameter whose value is not UTF-8. Decoding would put something else in its place.
fn not_utf8(query: &str) -> Option<String> {
    let decode = |text: &str| {
        let mut decoded = Vec::with_capacity(text.len());
        let mut rest = text.as_bytes();
        while let Some((&first, after)) = rest.split_first() {
            let escaped = if first == b'%' {
                after.split_at_checked(2)
            } else {
                None
            };
            let escaped = escaped.and_then(|(digits, after)| {
                Some((
                    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?,
                    after,
                ))
            });
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

/// The answer to an address that does not exist.
pub fn not_found() -> std::future::Ready<ApiError> {
    std::future::ready(ApiError(Box::new(
        Problem::new(ErrorCode::NotFound, "no such address")
            .with_remedy("See /openapi.json for the addresses."),
    )))
}

/// The answer to a method that an address does not have.
pub fn method_not_allowed() -> std::future::Ready<ApiError> {
    std::future::ready(ApiError::new(
        ErrorCode::MethodNotAllowed,
        "this address does not take that method",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_is_taken_up_to_its_bound_and_not_beyond() {
        let asked = |query: &str| {
            check_query(&format!("/x?{query}").parse().expect("an address"))
                .map_err(|error| error.0.detail)
        };
        let longest = file_limits::MAX_PATH_BYTES;
        assert_eq!(asked(&format!("x=1&path={}", "a".repeat(longest))), Ok(()));
        assert_eq!(
            asked(&format!("path={}", "%C3%BC".repeat(longest / 2))),
            Ok(())
        );
        assert_eq!(
            asked(&format!("x=1&path={}", "a".repeat(longest + 1))),
            Err(format!("path: must have at most {longest} bytes"))
        );
        assert!(asked(&format!("path={}", "%61".repeat(longest + 1))).is_err());
        assert_eq!(
            asked(&format!(
                "path_b64={}",
                "A".repeat(MAX_BASE64_PARAMETER_BYTES)
            )),
            Ok(())
        );
        assert!(
            asked(&format!(
                "path_b64={}",
                "A".repeat(MAX_BASE64_PARAMETER_BYTES + 1)
            ))
            .is_err()
        );
        assert_eq!(
            asked(&format!("cursor={}", "a".repeat(MAX_PARAMETER_BYTES))),
            Ok(())
        );
        assert!(asked(&format!("cursor={}", "a".repeat(MAX_PARAMETER_BYTES + 1))).is_err());
        assert!(asked(&"a".repeat(MAX_PARAMETER_BYTES + 1)).is_err());
        assert_eq!(
            asked(&format!("argv=sh&argv={}", "a".repeat(60_000))),
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

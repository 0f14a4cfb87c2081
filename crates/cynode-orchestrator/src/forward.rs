//! Calls that are passed on to a node as they are: streamed both ways, never held whole.

use std::io;

use axum::{
    body::{Body, HttpBody as _},
    extract::Request,
    response::Response,
};
use bytes::Bytes;
use cynode_api::{CALL_HEADER, ErrorCode, RESULT_HEADER};
use cynode_client::WorkerClient;
use cynode_service::ApiError;
use futures_util::{Stream, StreamExt as _, stream};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, request::Parts};
use hyper_util::rt::TokioIo;

use crate::{caller::Over, gate::Called};

/// Headers that are between two neighbours only, or that say who the caller is to us.
const NOT_PASSED: &[HeaderName] = &[
    header::AUTHORIZATION,
    header::CONNECTION,
    header::COOKIE,
    header::EXPECT,
    header::HOST,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers that CyNode's own parts exchange begin with this. Callers can't send them, and their `Connection` can't name them away.
const INTERNAL: &str = "x-cynode-";
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A body of known size up to this is sent with its length.
const WHOLE: u64 = 256 * 1024;

/// The end-to-end headers, without internal ones: those are added afterwards, by [`to_node`] and [`from_node`].
fn passed(headers: &HeaderMap) -> HeaderMap {
    // What `Connection` names is between neighbours too.
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    let is_hop_by_hop = |name: &HeaderName| {
        NOT_PASSED.contains(name)
            || matches!(name.as_str(), "keep-alive" | "proxy-connection")
            || named.iter().any(|named| named == name.as_str())
    };
    headers
        .iter()
        .filter(|(name, _)| !is_hop_by_hop(name) && !name.as_str().starts_with(INTERNAL))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// The headers of a request to a node: the caller's, and the id of the call. Without an id nothing is sent, because nobody could
/// find out afterwards whether the node did it.
fn to_node(parts: &Parts) -> Result<HeaderMap, ApiError> {
    let missing = || {
        ApiError::new(
            ErrorCode::Internal,
            "the call has no id, so it is not sent to the node",
        )
    };
    let Called(id) = parts
        .extensions
        .get::<Called>()
        .copied()
        .ok_or_else(missing)?;
    let mut headers = passed(&parts.headers);
    headers.insert(
        CALL_HEADER,
        HeaderValue::from_str(&id.to_string()).map_err(|_| missing())?,
    );
    if let Some(id) = parts.headers.get(REQUEST_ID) {
        headers.insert(REQUEST_ID, id.clone());
    }
    Ok(headers)
}

/// The headers of a node's answer, with the result that the gate records.
fn from_node(answer: &HeaderMap) -> HeaderMap {
    let mut headers = passed(answer);
    if let Some(result) = answer.get(RESULT_HEADER) {
        headers.insert(RESULT_HEADER, result.clone());
    }
    headers
}

/// Passes a request on to a path of a node, and the answer back, until the caller's token is no longer good or the node is gone.
pub(crate) async fn forward(
    client: &WorkerClient,
    path: &str,
    request: Request,
    over: impl Future<Output = Over> + Send + 'static,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let mut sent = client
        .request(parts.method.clone(), path)
        .headers(to_node(&parts)?);
    match body.size_hint().exact() {
        Some(0) => {}
        // What is here already goes in one piece.
        Some(size) if size <= WHOLE => {
            let bytes = axum::body::to_bytes(body, usize::MAX)
                .await
                .map_err(|error| ApiError::invalid(format!("the body broke off: {error}")))?;
            sent = sent.body(bytes);
        }
        _ => sent = sent.body(reqwest::Body::wrap_stream(body.into_data_stream())),
    }
    let mut over = Box::pin(over);
    let answer = tokio::select! {
        answer = sent.send() => known(answer.map_err(unreachable)?)?,
        over = &mut over => return Err(over.problem()),
    };
    let (status, headers) = (answer.status(), from_node(answer.headers()));
    let mut response = Response::new(Body::from_stream(until(answer.bytes_stream(), over)));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    Ok(response)
}

/// A stream that breaks off when the caller may have no more of it.
fn until<E: std::error::Error + Send + Sync + 'static>(
    bytes: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
    over: impl Future<Output = Over> + Send + Unpin + 'static,
) -> impl Stream<Item = Result<Bytes, io::Error>> + Send {
    stream::unfold(Some((Box::pin(bytes), over)), async |held| {
        let (mut bytes, mut over) = held?;
        tokio::select! {
            biased;
            why = &mut over => Some((Err(io::Error::other(why.problem().0.detail)), None)),
            piece = bytes.next() => piece.map(|piece| (piece.map_err(io::Error::other), Some((bytes, over)))),
        }
    })
}

/// Passes a WebSocket on: the handshake is the node's, and then bytes go both ways.
pub(crate) async fn upgrade(
    client: &WorkerClient,
    path: &str,
    request: Request,
    over: impl Future<Output = Over> + Send + 'static,
    closed: impl FnOnce() + Send + 'static,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let mut headers = to_node(&parts)?;
    let mut request = Request::from_parts(parts, body);
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(
        header::CONNECTION,
        http::HeaderValue::from_static("Upgrade"),
    );
    headers.insert(header::UPGRADE, http::HeaderValue::from_static("websocket"));
    let mut over = Box::pin(over);
    let sent = client
        .request(request.method().clone(), path)
        .headers(headers)
        .send();
    let answer = tokio::select! {
        answer = sent => answer.map_err(unreachable).and_then(known)?,
        over = &mut over => return Err(over.problem()),
    };
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (status, headers) = (answer.status(), from_node(answer.headers()));
        let mut response = Response::new(Body::from_stream(answer.bytes_stream()));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        return Ok(response);
    }
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *response.headers_mut() = from_node(answer.headers());
    response.headers_mut().insert(
        header::CONNECTION,
        http::HeaderValue::from_static("Upgrade"),
    );
    response
        .headers_mut()
        .insert(header::UPGRADE, http::HeaderValue::from_static("websocket"));
    let ours = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let (Ok(ours), Ok(mut theirs)) = tokio::join!(ours, answer.upgrade()) else {
            return;
        };
        // It ends when either side goes, or when the caller may no longer be there; the other is closed with it.
        let mut ours = TokioIo::new(ours);
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut ours, &mut theirs) => {}
            _ = over => {}
        }
        closed();
    });
    Ok(response)
}

/// A node that does not know us for the moment (it took over new tokens) says nothing about the caller.
fn known(answer: reqwest::Response) -> Result<reqwest::Response, ApiError> {
    if answer.status() == StatusCode::UNAUTHORIZED {
        return Err(ApiError::new(
            ErrorCode::NodeUnreachable,
            "the node does not take this orchestrator's token now",
        ));
    }
    Ok(answer)
}

#[expect(clippy::needless_pass_by_value, reason = "it is a step of map_err")]
fn unreachable(error: reqwest::Error) -> ApiError {
    if error.is_body() || error.is_request() && !error.is_connect() {
        tracing::debug!(%error, "Passing a call on broke off.");
    }
    let problem = ApiError::new(
        ErrorCode::NodeUnreachable,
        "the node of this session does not answer",
    );
    // Without a connection nothing was sent, and nothing happened.
    if error.is_connect() {
        ApiError(Box::new(problem.0.with("sent", false)))
    } else {
        problem
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_between_neighbours_is_not_passed_on() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("authorization", "Bearer x"),
            ("connection", "X-Mine, close"),
            ("x-mine", "1"),
            ("host", "here"),
            ("keep-alive", "5"),
            ("range", "bytes=1-2"),
            ("x-mode", "0755"),
        ] {
            headers.append(
                HeaderName::from_static(name),
                value.parse().expect("a value"),
            );
        }
        let mut left: Vec<_> = passed(&headers).keys().map(ToString::to_string).collect();
        left.sort();
        assert_eq!(left, ["range", "x-mode"]);
    }

    fn headers(of: &[(&'static str, &str)]) -> HeaderMap {
        of.iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    value.parse().expect("a value"),
                )
            })
            .collect()
    }

    #[test]
    fn a_caller_neither_names_internal_headers_away_nor_sends_its_own() {
        let id = uuid::Uuid::now_v7();
        let (mut parts, ()) = http::Request::new(()).into_parts();
        parts.headers = headers(&[
            (
                "connection",
                "keep-alive, X-Cynode-Call, x-request-id, X-CYNODE-RESULT",
            ),
            ("x-cynode-call", "00000000-0000-0000-0000-000000000001"),
            ("x-cynode-result", "{}"),
            ("x-cynode-later", "1"),
            ("x-request-id", "r-1"),
            ("range", "bytes=1-2"),
        ]);
        assert!(to_node(&parts).is_err(), "a call without an id is not sent");
        parts.extensions.insert(Called(id));
        let sent = to_node(&parts).expect("it has an id");
        assert_eq!(
            sent,
            headers(&[
                ("range", "bytes=1-2"),
                ("x-request-id", "r-1"),
                ("x-cynode-call", &id.to_string())
            ])
        );

        let answer = headers(&[
            ("connection", "x-cynode-result"),
            ("x-cynode-result", "{\"exit_code\":0}"),
            ("x-cynode-call", "1"),
            ("content-type", "text/plain"),
        ]);
        assert_eq!(
            from_node(&answer),
            headers(&[
                ("content-type", "text/plain"),
                ("x-cynode-result", "{\"exit_code\":0}")
            ])
        );
    }
}

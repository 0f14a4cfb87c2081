//! Forwards calls to a node. Bodies stream both ways and are never buffered whole.

use std::io;

use axum::{
    body::{Body, HttpBody as _},
    extract::Request,
    response::Response,
};
use bytes::Bytes;
use cynode_api::{CALL_HEADER, CallId, ErrorCode, RESULT_HEADER};
use cynode_client::SessionClient;
use cynode_service::ApiError;
use futures_util::{Stream, StreamExt as _, stream};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, request::Parts};
use hyper_util::rt::TokioIo;

use crate::caller::EndReason;

/// Hop-by-hop headers, and the caller's credentials.
const DROPPED_HEADERS: &[HeaderName] = &[
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

/// The prefix of headers between CyNode's own services. Callers can't send them, nor remove them by
/// naming them in `Connection`.
const INTERNAL_PREFIX: &str = "x-cynode-";
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A body of known size up to this is sent in one piece, with its length.
const BUFFERED_BODY_BYTES: u64 = 256 * 1024;

/// The end-to-end headers without internal ones, which [`to_node`] and [`from_node`] add.
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    // Headers named in `Connection` are hop-by-hop too.
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    let is_hop_by_hop = |name: &HeaderName| {
        DROPPED_HEADERS.contains(name)
            || matches!(name.as_str(), "keep-alive" | "proxy-connection")
            || named.iter().any(|named| named == name.as_str())
    };
    headers
        .iter()
        .filter(|(name, _)| !is_hop_by_hop(name) && !name.as_str().starts_with(INTERNAL_PREFIX))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// The headers of a request to a node: the caller's, and the id of the call. A call without an id
/// is not sent, because its outcome could not be determined afterwards.
fn to_node(parts: &Parts) -> Result<HeaderMap, ApiError> {
    let missing = || {
        ApiError::new(
            ErrorCode::Internal,
            "the call has no id, so it is not sent to the node",
        )
    };
    let id = parts
        .extensions
        .get::<CallId>()
        .copied()
        .ok_or_else(missing)?;
    let mut headers = end_to_end(&parts.headers);
    headers.insert(
        CALL_HEADER,
        HeaderValue::from_str(&id.to_string()).map_err(|_| missing())?,
    );
    if let Some(id) = parts.headers.get(REQUEST_ID) {
        headers.insert(REQUEST_ID, id.clone());
    }
    Ok(headers)
}

/// The headers of a node's answer, including the result that the gate records.
fn from_node(answer: &HeaderMap) -> HeaderMap {
    let mut headers = end_to_end(answer);
    if let Some(result) = answer.get(RESULT_HEADER) {
        headers.insert(RESULT_HEADER, result.clone());
    }
    headers
}

/// Forwards a request to a path on a node and streams the answer back, until the call must end.
pub(crate) async fn forward(
    client: &SessionClient,
    path: &str,
    request: Request,
    must_end: impl Future<Output = EndReason> + Send + 'static,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let mut sent = client
        .request(parts.method.clone(), path)
        .headers(to_node(&parts)?);
    match body.size_hint().exact() {
        Some(0) => {}
        Some(size) if size <= BUFFERED_BODY_BYTES => {
            let bytes = axum::body::to_bytes(body, usize::MAX)
                .await
                .map_err(|error| ApiError::invalid(format!("reading the body failed: {error}")))?;
            sent = sent.body(bytes);
        }
        _ => sent = sent.body(reqwest::Body::wrap_stream(body.into_data_stream())),
    }
    let mut must_end = Box::pin(must_end);
    let answer = tokio::select! {
        answer = sent.send() => check_node_auth(answer.map_err(unreachable)?)?,
        reason = &mut must_end => return Err(reason.problem()),
    };
    let (status, headers) = (answer.status(), from_node(answer.headers()));
    let mut response = Response::new(Body::from_stream(abort_when(
        answer.bytes_stream(),
        must_end,
    )));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    Ok(response)
}

/// Aborts a stream when its call must end.
fn abort_when<E: std::error::Error + Send + Sync + 'static>(
    bytes: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
    must_end: impl Future<Output = EndReason> + Send + Unpin + 'static,
) -> impl Stream<Item = Result<Bytes, io::Error>> + Send {
    stream::unfold(Some((Box::pin(bytes), must_end)), async |state| {
        let (mut bytes, mut must_end) = state?;
        tokio::select! {
            biased;
            reason = &mut must_end => {
                Some((Err(io::Error::other(reason.problem().into_problem().detail)), None))
            }
            piece = bytes.next() => {
                piece.map(|piece| (piece.map_err(io::Error::other), Some((bytes, must_end))))
            }
        }
    })
}

/// Forwards a WebSocket: the node answers the handshake, and then bytes are copied both ways.
pub(crate) async fn upgrade(
    client: &SessionClient,
    path: &str,
    request: Request,
    must_end: impl Future<Output = EndReason> + Send + 'static,
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
    let mut must_end = Box::pin(must_end);
    let sent = client
        .request(request.method().clone(), path)
        .headers(headers)
        .send();
    let answer = tokio::select! {
        answer = sent => answer.map_err(unreachable).and_then(check_node_auth)?,
        reason = &mut must_end => return Err(reason.problem()),
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
    let caller_side = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let (Ok(caller_side), Ok(mut node_side)) = tokio::join!(caller_side, answer.upgrade())
        else {
            return;
        };
        // Both sides are closed when either disconnects or the call must end.
        let mut caller_side = TokioIo::new(caller_side);
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut caller_side, &mut node_side) => {}
            _ = must_end => {}
        }
        closed();
    });
    Ok(response)
}

/// Turns the node's 401 into `node_unreachable`: the node rejects this orchestrator's token, which
/// happens while tokens rotate, not the caller's.
fn check_node_auth(answer: reqwest::Response) -> Result<reqwest::Response, ApiError> {
    if answer.status() == StatusCode::UNAUTHORIZED {
        return Err(ApiError::new(
            ErrorCode::NodeUnreachable,
            "the node does not accept this orchestrator's token now",
        ));
    }
    Ok(answer)
}

#[expect(clippy::needless_pass_by_value, reason = "passed to map_err")]
fn unreachable(error: reqwest::Error) -> ApiError {
    if error.is_body() || error.is_request() && !error.is_connect() {
        tracing::debug!(%error, "Forwarding a call to a node failed.");
    }
    let problem = ApiError::new(
        ErrorCode::NodeUnreachable,
        "the node of this session does not answer",
    );
    // Without a connection the call was not sent and has had no effect.
    if error.is_connect() {
        problem.with("sent", false)
    } else {
        problem
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hop_by_hop_headers_are_not_forwarded() {
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
        let mut left: Vec<_> = end_to_end(&headers)
            .keys()
            .map(ToString::to_string)
            .collect();
        left.sort();
        assert_eq!(left, ["range", "x-mode"]);
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    value.parse().expect("a value"),
                )
            })
            .collect()
    }

    #[test]
    fn a_caller_can_neither_remove_nor_send_internal_headers() {
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
        assert!(to_node(&parts).is_err(), "a call without an id was sent");
        parts.extensions.insert(CallId::from_uuid(id));
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

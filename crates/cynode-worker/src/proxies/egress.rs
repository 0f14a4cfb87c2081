//! The HTTP proxy of a sandbox. There is no egress yet: every destination is denied and recorded.
//!
//! Invariant: a denial is recorded before the sandbox learns of it, so a step that fails because of
//! it has not ended yet.

use std::{net::IpAddr, time::Duration};

use http::{HeaderValue, Method, StatusCode, Uri, header};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};

use super::{Proxies, ProxyPeer, ProxyRefusal, ProxyResponse};

/// The longest name of a host in DNS.
const MAX_HOST_BYTES: usize = 253;
/// A body that is read and dropped, so that its sender gets to read the refusal.
const MAX_IGNORED_BYTES: usize = 64 * 1024;
const IGNORE_TIMEOUT: Duration = Duration::from_millis(500);

/// The rule that denies what no other allows.
const DENY_ALL: &str = "default/deny-all";
const REMEDY: &str = "Bring what the command needs in the image or the workspace: this node has no \
                      access to other networks yet.";

/// Some programs don't know `NO_PROXY`.
const LOCAL_REMEDY: &str = "Connect directly: the proxy does not lead back into the sandbox.";

/// A destination that was denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeniedTarget {
    /// As the sandbox named it, in lower case.
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) rule: &'static str,
}

pub(super) async fn handle(
    proxies: &Proxies,
    peer: &ProxyPeer,
    request: http::Request<Incoming>,
) -> ProxyResponse {
    let target = target(request.method(), request.uri());
    let refusal = match target {
        Ok(target) => {
            record_denial(proxies, peer, &target).await;
            let remedy = if is_local(&target.host) {
                LOCAL_REMEDY
            } else {
                REMEDY
            };
            ProxyRefusal::new(
                StatusCode::FORBIDDEN,
                "egress_denied",
                format!("{}:{} is not allowed", target.host, target.port),
                remedy,
            )
            .with("host", target.host)
            .with("port", target.port)
            .with("rule", target.rule)
        }
        Err(reason) => ProxyRefusal::new(
            StatusCode::BAD_REQUEST,
            "invalid_request",
            reason,
            "This is an HTTP proxy: send CONNECT host:port, or a request with an absolute URL.",
        ),
    };
    let is_read = ignore_body(request).await;
    let mut response = refusal.into_response(&peer.request_id);
    if !is_read {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}

/// Records a denial where the job and the node's trail find it.
async fn record_denial(proxies: &Proxies, peer: &ProxyPeer, target: &DeniedTarget) {
    metrics::counter!("cynode_egress_denied_total").increment(1);
    tracing::debug!(
        session_id = %peer.session_id,
        job_id = peer.job_id.map(tracing::field::display),
        task_id = %peer.task_id,
        request_id = peer.request_id,
        host = target.host,
        port = target.port,
        rule = target.rule,
        "Denied a connection of a sandbox."
    );
    super::trail::record_denial(proxies, peer, target, "egress_denied").await;
    // The way back into the sandbox is no network that a job needs.
    if !is_local(&target.host)
        && let Some(job_id) = peer.job_id
        && let Some(jobs) = proxies.jobs()
    {
        jobs.denied(job_id, target).await;
    }
}

/// The destination of a request to a proxy.
fn target(method: &Method, uri: &Uri) -> Result<DeniedTarget, String> {
    let Some(authority) = uri.authority() else {
        return Err("the request names no host".to_owned());
    };
    let default_port = match uri.scheme_str() {
        None if method == Method::CONNECT => None,
        Some("http") => Some(80),
        Some("https") => Some(443),
        _ => return Err("only http and https go through this proxy".to_owned()),
    };
    let host = authority.host();
    if host.is_empty() || host.len() > MAX_HOST_BYTES {
        return Err("the request names no valid host".to_owned());
    }
    let Some(port) = authority.port_u16().or(default_port) else {
        return Err("CONNECT names no port".to_owned());
    };
    let address = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    Ok(DeniedTarget {
        host: address.unwrap_or(host).to_ascii_lowercase(),
        port,
        rule: DENY_ALL,
    })
}

fn is_local(host: &str) -> bool {
    let address: Result<IpAddr, _> = host.parse();
    let name = host.strip_suffix('.').unwrap_or(host);
    let is_own = |address: IpAddr| address.is_loopback() || address.is_unspecified();
    name == "localhost"
        || name.ends_with(".localhost")
        || address.is_ok_and(|address| is_own(address.to_canonical()))
}

/// Reads and drops a short body. Returns whether all of it was read.
async fn ignore_body(request: http::Request<Incoming>) -> bool {
    let awaits_permission = request.headers().contains_key(header::EXPECT);
    let mut body = request.into_body();
    if awaits_permission {
        return body.is_end_stream();
    }
    let reading = async {
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return false };
            bytes += frame.data_ref().map_or(0, bytes::Bytes::len);
            if bytes > MAX_IGNORED_BYTES {
                return false;
            }
        }
        true
    };
    tokio::time::timeout(IGNORE_TIMEOUT, reading)
        .await
        .unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_what_the_request_line_names() {
        let parsed = |method: &str, uri: &str| {
            let method = method.parse().expect("a method");
            let uri = uri.parse().map_err(|_| "no URI".to_owned())?;
            target(&method, &uri).map(|target| (target.host, target.port))
        };
        for (method, uri, expected) in [
            ("CONNECT", "example.com:443", Some(("example.com", 443))),
            ("CONNECT", "Example.COM:8443", Some(("example.com", 8_443))),
            ("CONNECT", "[::1]:443", Some(("::1", 443))),
            ("CONNECT", "example.com", None),
            ("GET", "http://example.com/a?b", Some(("example.com", 80))),
            ("GET", "https://example.com", Some(("example.com", 443))),
            // The name and password of a URL are nobody's business.
            (
                "GET",
                "http://name:secret@example.com:8080/",
                Some(("example.com", 8_080)),
            ),
            ("GET", "ftp://example.com/", None),
            ("GET", "/path", None),
            ("OPTIONS", "*", None),
        ] {
            let expected = expected.map(|(host, port)| (host.to_owned(), port));
            assert_eq!(parsed(method, uri).ok(), expected, "{method} {uri}");
        }
        for (host, expected) in [
            ("localhost", true),
            ("a.localhost.", true),
            ("127.8.8.8", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("0.0.0.0", true),
            ("localhost.example.com", false),
            ("10.0.0.1", false),
        ] {
            assert_eq!(is_local(host), expected, "{host}");
        }
        let long = format!("http://{}/", "h".repeat(MAX_HOST_BYTES + 1));
        assert_eq!(parsed("GET", &long).ok(), None);
    }
}

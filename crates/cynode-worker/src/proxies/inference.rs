//! The way to models: requests that arrived on the inference listener.

use async_trait::async_trait;
use http::{StatusCode, header};
use hyper::body::Incoming;
use serde_json::json;

use super::{ProxyBody, ProxyPeer, ProxyResponse};

/// Answers the requests of sandboxes to models.
///
/// The caller bounds connections, heads and the pace of the reader; the handler bounds bodies, time
/// and concurrent requests. Dropping the future means that the sandbox is gone or has hung up.
#[async_trait]
pub(crate) trait InferenceHandler: std::fmt::Debug + Send + Sync {
    async fn handle(&self, peer: &ProxyPeer, request: http::Request<Incoming>) -> ProxyResponse;
}

/// Stands in on a node without a model server.
#[derive(Debug)]
pub(crate) struct NoInference;

#[async_trait]
impl InferenceHandler for NoInference {
    async fn handle(&self, peer: &ProxyPeer, _request: http::Request<Incoming>) -> ProxyResponse {
        let message = "this node serves no models";
        let body = json!({
            "code": "inference_unavailable",
            "message": message,
            "error": message,
            "remedy": "Try again later; 'cynode doctor' on the node shows its model server.",
            "request_id": peer.request_id,
        });
        let mut response = ProxyResponse::new(ProxyBody::from(body.to_string()));
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        let json = header::HeaderValue::from_static("application/json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        response
    }
}

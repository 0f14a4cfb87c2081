//! The proxies of a sandbox: everything that its processes reach beyond the sandbox.
//!
//! A sandbox has no network. Its agent listens on three ports of loopback and forwards each
//! connection to the worker's `proxy.sock` of that sandbox (`socket.rs`), where it is served as
//! HTTP (`connection.rs`): requests to models, an HTTP proxy, and the callback for runners of jobs.
//!
//! Invariants: a request is attributed to a sandbox by the socket it came through and the kernel's
//! word about its peer, never by what it says. Each sandbox has connections of its own that no
//! other sandbox can take, and its requests have a rate. No answer waits for a slow reader for
//! ever.

mod connection;
mod egress;
mod inference;
mod pace;
mod peer;
mod socket;
mod trail;

use std::sync::{Arc, OnceLock, Weak};

use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::{audit::NodeTrail, jobs::Jobs};

pub(crate) use egress::DeniedTarget;
pub(crate) use inference::{InferenceHandler, NoInference};
pub(crate) use peer::ProxyPeer;
pub(crate) use socket::ProxySocket;

/// The body of a proxy's answer, whole or streamed.
pub(crate) type ProxyBody = axum::body::Body;
pub(crate) type ProxyResponse = http::Response<ProxyBody>;

/// Connections of all sandboxes beyond those that each may have in any case.
const MAX_EXTRA_CONNECTIONS: usize = 1_024;

/// What the proxies of all sandboxes share.
#[derive(Debug)]
pub(crate) struct Proxies {
    inference: OnceLock<Arc<dyn InferenceHandler>>,
    jobs: OnceLock<Weak<Jobs>>,
    trail: OnceLock<NodeTrail>,
    extra: Arc<Semaphore>,
}

impl Default for Proxies {
    fn default() -> Self {
        Self {
            inference: OnceLock::new(),
            jobs: OnceLock::new(),
            trail: OnceLock::new(),
            extra: Arc::new(Semaphore::new(MAX_EXTRA_CONNECTIONS)),
        }
    }
}

impl Proxies {
    /// Sets who answers requests to models. Called once, before the first sandbox is served.
    pub(crate) fn set_inference(&self, handler: Arc<dyn InferenceHandler>) {
        if self.inference.set(handler).is_err() {
            tracing::error!("The handler of requests to models was set twice.");
        }
    }

    /// Sets the jobs that callbacks and denials concern. Called once, before the first sandbox is
    /// served.
    pub(crate) fn set_jobs(&self, jobs: &Arc<Jobs>) {
        if self.jobs.set(Arc::downgrade(jobs)).is_err() {
            tracing::error!("The jobs of the proxies were set twice.");
        }
    }

    /// Sets where denials are recorded. Called once, before the first sandbox is served.
    pub(crate) fn set_trail(&self, trail: NodeTrail) {
        if self.trail.set(trail).is_err() {
            tracing::error!("The audit trail of the proxies was set twice.");
        }
    }

    fn inference(&self) -> &dyn InferenceHandler {
        self.inference
            .get()
            .map_or(&NoInference, |handler| handler.as_ref())
    }

    fn jobs(&self) -> Option<Arc<Jobs>> {
        self.jobs.get()?.upgrade()
    }
}

/// A refusal as a process in a sandbox reads it. `members` are those that only this kind has.
#[derive(Clone, Debug)]
pub(crate) struct ProxyRefusal {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) remedy: &'static str,
    pub(crate) members: Vec<(&'static str, Value)>,
}

impl ProxyRefusal {
    pub(crate) fn new(
        status: StatusCode,
        code: &'static str,
        message: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            remedy,
            members: Vec::new(),
        }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.members.push((name, value.into()));
        self
    }

    pub(crate) fn into_response(self, request_id: &str) -> ProxyResponse {
        let mut body = json!({
            "code": self.code,
            "message": self.message,
            "remedy": self.remedy,
            "request_id": request_id,
        });
        for (name, value) in self.members {
            body[name] = value;
        }
        let mut response = ProxyResponse::new(ProxyBody::from(body.to_string()));
        *response.status_mut() = self.status;
        let json = HeaderValue::from_static("application/json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        response
    }
}

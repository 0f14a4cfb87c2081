//! The proxies of a sandbox: what its processes reach through listeners on loopback.

mod inference;
mod peer;

pub(crate) use inference::{InferenceHandler, NoInference};
pub(crate) use peer::ProxyPeer;

/// The body of a proxy's answer, whole or streamed.
pub(crate) type ProxyBody = axum::body::Body;
pub(crate) type ProxyResponse = http::Response<ProxyBody>;

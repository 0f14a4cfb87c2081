//! A typed HTTP client over `cynode-api`.
//!
//! One constructor, [`WorkerClient::trusting`], of which [`UserClient`] is made too: a connect timeout, no redirects (a bearer token must not follow one), and no
//! overall timeout on streams. Everything that the other side sends is bounded before it is kept. A rustls provider must
//! be installed before an `https` address is used.
#![forbid(unsafe_code)]

mod audit;
mod calls;
mod client;
mod error;
mod events;
mod execs;
mod files;
mod jobs;
mod plane;
mod policies;
mod pty;
mod sessions;
pub mod sse;

pub use audit::{AuditFilter, AuditVerification, RawAuditPage};
pub use client::{Peer, Readiness, Sandboxes, Surface, Trust, WorkerClient, check_base};
pub use error::{Error, Result};
pub use events::{ExecEvent, ExecEvents};
pub use execs::OutputQuery;
pub use files::{FileBody, FileInfo, PutOptions};
pub use jobs::JobFilter;
pub use plane::{ArtifactBody, UserClient};
pub use pty::{Pty, PtyMessage, PtyOpen};
pub use reqwest::Body;
pub use sessions::SessionFilter;

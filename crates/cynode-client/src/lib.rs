//! Typed HTTP clients over `cynode-api`.
//!
//! [`SessionClient::trusting`] is the one constructor, also for [`UserClient`]: a connect timeout,
//! no redirects (they would leak the bearer token), and no overall timeout on streams. Every
//! response is bounded before it is buffered. Callers must install a rustls provider before they
//! use an `https` URL.
#![forbid(unsafe_code)]

mod audit;
mod calls;
mod client;
mod egress;
mod error;
mod events;
mod execs;
mod files;
mod git_role;
mod jobs;
mod lists;
mod mcp;
mod policies;
mod pty;
mod role_audit;
mod sessions;
pub mod sse;
mod user;

pub use audit::{AuditFilter, AuditVerification, RawAuditPage};
pub use client::{Peer, Readiness, Sandboxes, SessionClient, Surface, Trust, check_base};
pub use cynode_api::OutputQuery;
pub use error::{Error, Result};
pub use events::{ExecEvent, ExecEvents, FileEvents};
pub use files::{FileBody, FileInfo, PutOptions};
pub use git_role::{GitRole, SeedBody};
pub use jobs::JobFilter;
pub use lists::{ListItem, Listing};
pub use mcp::{McpAnswer, McpEvents, McpHeaders};
pub use pty::{Pty, PtyMessage, PtyOpen};
pub use reqwest::Body;
pub use sessions::SessionFilter;
pub use user::{ArtifactBody, UserClient};

//! Code shared by all roles of CyNode: configuration, telemetry, the HTTP edge (problems, bodies,
//! authentication, admin routes, TLS) and shutdown.
#![forbid(unsafe_code)]

pub mod admin;
pub mod allocator;
pub mod answers;
pub mod auth;
pub mod body;
pub mod checks;
pub mod compute;
pub mod config;
pub mod connections;
pub mod describe;
pub mod edge;
pub mod events;
pub mod fair;
pub mod files;
pub mod json;
pub mod linger;
pub mod listen;
pub mod multipart;
pub mod output;
mod pace;
pub mod pages;
pub mod private;
pub mod seal;
mod serve;
pub mod shutdown;
pub mod telemetry;
mod unique;

pub use config::ConfigError;
pub use edge::{ApiError, JsonBody, QueryParams};

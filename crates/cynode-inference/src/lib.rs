//! Validates the requests that sandboxes send to model servers, and filters the answers.
//!
//! A sandbox connects to `http://localhost:11434`, and the worker forwards its requests to the node's
//! Ollama or to any server with OpenAI's API. This crate decides, on bytes and without I/O, which
//! endpoints exist (`endpoint`), which requests are forwarded and in which form (`request`, with the
//! tables of fields in `ollama` and `openai`), which models a list shows (`models`, `list`, `show`),
//! and how many tokens an answer used (`scan`).
//!
//! Invariants: a server never receives bytes of a sandbox, only parsed values that are serialized
//! again. It receives no field that is not in a table, and no URL where it would fetch one. Nothing
//! here stores the content of an answer.
#![forbid(unsafe_code)]

mod check;
mod endpoint;
mod form;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod limits;
mod list;
mod models;
mod ollama;
mod openai;
#[cfg(test)]
mod properties;
mod refusal;
mod request;
mod scan;
mod schema;
mod shape;
mod show;
mod usage;

pub use endpoint::Endpoint;
pub use list::{Locality, ModelList, ServedModel};
pub use models::{AllowedModels, has_cloud_suffix, same_model};
pub use refusal::{Refusal, RefusalCode};
pub use request::{Rules, TokenLimits, Upstream, UpstreamRequest};
pub use scan::{AnswerFormat, AnswerScan, AnswerScanner};
pub use show::{ShownModel, server_version};
pub use usage::{Usage, UsageCounter};

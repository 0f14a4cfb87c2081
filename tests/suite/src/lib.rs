//! The harness of the end-to-end tests: a real worker with its own state directory and its own Podman store.
//!
//! What a test makes is removed even when the test is killed: a small watcher process, started before anything else, waits
//! for the end of a pipe that only the test holds, and then cleans up.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "tests start programs and look at files as people do")]

mod requests;
mod world;

pub use requests::{Answer, Http};
pub use world::{Options, RunningWorker, World, eventually, repository};

use cynode_api::{ExecRequest, SessionCreate, SessionId, TaskId};

/// The busybox image of `images/fixture`.
pub const IMAGE: &str = "localhost/cynode/test-busybox:latest";
pub const UNLABELLED: &str = "localhost/cynode/test-unlabelled:latest";
pub const HOSTILE: &str = "localhost/cynode/test-hostile:latest";
pub const RUNNER: &str = "localhost/cynode/sba-runner:latest";

/// A session with small limits on the busybox image.
#[must_use]
pub fn session() -> SessionCreate {
    let mut request = SessionCreate::new(TaskId::generate(), SessionId::generate(), IMAGE);
    request.limits = Some(cynode_api::LimitsRequest { memory_bytes: Some(256 << 20), ..Default::default() });
    request
}

/// A command with a minute to run.
pub fn exec<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> ExecRequest {
    ExecRequest { argv: argv.into_iter().map(Into::into).collect(), timeout_ms: 60_000, ..Default::default() }
}

/// Bytes in hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

/// A shell script as a command.
pub fn sh(script: &str) -> ExecRequest {
    exec(["/bin/sh", "-c", script])
}

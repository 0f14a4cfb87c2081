//! The harness of the end-to-end tests: a real worker with its own state directory and its own store or daemon.
//!
//! What a test makes is removed even when the test is killed: a small watcher process, started before anything else, waits
//! for the end of a pipe that only the test holds, and then cleans up.
#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    reason = "tests start programs and look at files as people do"
)]

mod audit;
mod dockerd;
mod plane;
mod random;
mod relay;
mod requests;
mod simulated;
mod user;
mod world;

pub use audit::{Answered, Told, Trail, Witness, until_settled, whole_trail};
pub use dockerd::{OTHER_RUNTIME, TEST_USER};
pub use plane::{Held, Plane, Postgres, RunningOrchestrator, postgres_programs};
pub use random::Random;
pub use relay::Relay;
pub use requests::{Answer, Http};
pub use simulated::{Fault, LARGEST, PROMISED_MEMORY_BYTES, SimulatedWorker};
pub use world::{
    Engine, Options, RunningWorker, World, eventually, forget_memory_peak, memory, repository,
};

/// Makes a test of each of these functions for each runtime, in modules named after them. A function is given its world.
#[macro_export]
macro_rules! on_every_runtime {
    ($($test:ident),+ $(,)?) => {
        $crate::on_every_runtime!(@ podman, Podman, $($test),+);
        $crate::on_every_runtime!(@ rootless, Rootless, $($test),+);
        $crate::on_every_runtime!(@ docker, Docker, $($test),+);
    };
    (@ $module:ident, $engine:ident, $($test:ident),+) => {
        mod $module {
            $(
                #[tokio::test]
                async fn $test() -> anyhow::Result<()> {
                    super::$test($crate::World::on($crate::Engine::$engine).await?).await
                }
            )+
        }
    };
}

use cynode_api::{ExecRequest, JobId, JobRun, SessionCreate, SessionId, TaskId};

/// The busybox image of `images/fixture`.
pub const IMAGE: &str = "localhost/cynode/test-busybox:latest";
pub const UNLABELLED: &str = "localhost/cynode/test-unlabelled:latest";
pub const HOSTILE: &str = "localhost/cynode/test-hostile:latest";
pub const RUNNER: &str = "localhost/cynode/sba-runner:latest";

/// What sandboxes do that burn something, each without end.
pub const BOMBS: [&str; 10] = [
    "bomb() { bomb | bomb & }; while :; do bomb; wait; done",
    "while :; do setsid sh -c 'sleep 1000' & done",
    "while :; do tail /dev/zero; done",
    "while :; do dd if=/dev/zero of=/tmp/big bs=1M; rm -f /tmp/big; done",
    "while :; do dd if=/dev/zero of=big bs=1M; rm -f big; done",
    "while :; do i=0; while [ $i -lt 5000 ]; do echo > f$i; i=$((i+1)); done; rm -f f*; done",
    "yes flood & yes flood >&2",
    // Not at once: it would stop what has to say that it was started.
    "sleep 1; while :; do kill -STOP -1; done",
    "while :; do :; done & while :; do :; done & while :; do :; done",
    "while :; do cd /tmp; i=0; while [ $i -lt 2000 ]; do mkdir d && cd d; i=$((i+1)); done; rm -rf /tmp/d; done",
];

/// A session with small limits on the busybox image.
#[must_use]
pub fn session() -> SessionCreate {
    let mut request = SessionCreate::new(TaskId::generate(), SessionId::generate(), IMAGE);
    request.limits = Some(cynode_api::LimitsRequest {
        memory_bytes: Some(256 << 20),
        ..Default::default()
    });
    request
}

/// A job of a shell script with small limits on the busybox image.
#[must_use]
pub fn job(script: &str) -> JobRun {
    let mut request = JobRun::command(
        TaskId::generate(),
        JobId::generate(),
        IMAGE,
        ["/bin/sh", "-c", script],
    );
    request.sandbox.limits = Some(cynode_api::LimitsRequest {
        memory_bytes: Some(64 << 20),
        ..Default::default()
    });
    request.sandbox.timeout_seconds = Some(120);
    request
}

/// A command with a minute to run.
pub fn exec<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> ExecRequest {
    ExecRequest {
        argv: argv.into_iter().map(Into::into).collect(),
        timeout_ms: 60_000,
        ..Default::default()
    }
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

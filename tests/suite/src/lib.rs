//! The harness of the end-to-end tests: a real worker with its own state directory and its own
//! image store or Docker daemon.
//!
//! Everything that a test creates is removed even when the test is killed: a watcher process,
//! started first, waits for EOF on a pipe that only the test holds open, and then cleans up.
#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    reason = "tests start programs and inspect files directly"
)]

mod audit;
mod certificates;
mod dockerd;
mod forges;
mod git_server;
pub mod models;
mod orchestrator;
mod random;
mod relay;
mod requests;
mod scripted_role;
mod simulated;
mod specifications;
mod user;
mod world;

pub use audit::{
    AuditTrail, CallRecords, RecordedAnswer, RecordingCaller, wait_until_settled, whole_trail,
};
pub use certificates::Certificates;
pub use dockerd::{OTHER_RUNTIME, TEST_USER};
pub use forges::PullRequest;
pub use git_server::{GitBehaviour, GitRequest, GitServer, Hold, ServedRepository};
pub use orchestrator::{ControlPlane, HoldGuard, Postgres, RunningOrchestrator, postgres_programs};
pub use random::Random;
pub use relay::Relay;
pub use requests::{Answer, Http};
pub use scripted_role::{RoleFault, ScriptedRole};
pub use simulated::{Fault, LARGEST_LIMITS, PROMISED_MEMORY_BYTES, ReceivedPatch, SimulatedWorker};
pub use specifications::{run_step, sba_job, specification, step, with};
pub use world::{
    Engine, Options, RunningWorker, World, eventually, memory, repository, reset_memory_peak,
};

/// Defines a test for each function and each runtime, in modules named after the runtimes. Each
/// function receives its world.
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
/// The default image, and the smaller one that it is a layer on.
pub const RUNNER: &str = "localhost/cynode/sba-runner:latest";
pub const BASE: &str = "localhost/cynode/base:latest";

/// Scripts that exhaust a resource; none of them ends.
pub const BOMBS: [&str; 10] = [
    "bomb() { bomb | bomb & }; while :; do bomb; wait; done",
    "while :; do setsid sh -c 'sleep 1000' & done",
    "while :; do tail /dev/zero; done",
    "while :; do dd if=/dev/zero of=/tmp/big bs=1M; rm -f /tmp/big; done",
    "while :; do dd if=/dev/zero of=big bs=1M; rm -f big; done",
    "while :; do i=0; while [ $i -lt 5000 ]; do echo > f$i; i=$((i+1)); done; rm -f f*; done",
    "yes flood & yes flood >&2",
    // Delayed: it would also stop the process that reports the start.
    "sleep 1; while :; do kill -STOP -1; done",
    "while :; do :; done & while :; do :; done & while :; do :; done",
    "while :; do cd /tmp; i=0; while [ $i -lt 2000 ]; do mkdir d && cd d; i=$((i+1)); done; rm \
     -rf /tmp/d; done",
];

/// A session on the busybox image with small limits.
#[must_use]
pub fn session() -> SessionCreate {
    let mut request = SessionCreate::new(TaskId::generate(), SessionId::generate(), IMAGE);
    request.limits = Some(cynode_api::LimitsRequest {
        memory_bytes: Some(256 << 20),
        ..Default::default()
    });
    request
}

/// A job that runs a shell script on the busybox image with small limits.
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

/// A command with a timeout of one minute.
pub fn exec<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> ExecRequest {
    ExecRequest {
        argv: argv.into_iter().map(Into::into).collect(),
        timeout_ms: 60_000,
        ..Default::default()
    }
}

/// A command that runs a shell script.
pub fn sh(script: &str) -> ExecRequest {
    exec(["/bin/sh", "-c", script])
}

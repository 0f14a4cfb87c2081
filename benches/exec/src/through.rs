//! The orchestrator between a caller and a session: its overhead, and its memory under heavy
//! traffic.

use std::{
    fmt::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ExecRequest, SessionId, UserSessionCreate};
use cynode_client::{ExecEvent, SessionClient, UserClient};
use cynode_tests::{IMAGE, Options, World, exec, memory, reset_memory_peak, sh};
use serde_json::Value;

use crate::{
    ours::{Ours, program},
    samples::timed,
};

/// A stack as `cynode up` runs it: PostgreSQL, an orchestrator, a worker.
#[derive(Debug)]
pub struct Stack {
    /// The worker, called directly.
    pub ours: Ours,
    /// The same sessions through the orchestrator.
    pub through: SessionClient,
    /// The orchestrator, as an administrator.
    pub user: UserClient,
    orchestrator: u32,
    database: String,
}

/// The volume of traffic, and the orchestrator's memory meanwhile.
#[derive(Clone, Copy, Debug, Default)]
pub struct Passed {
    pub bytes: u64,
    pub time: Duration,
    /// The orchestrator's resident memory before, and its peak.
    pub before: u64,
    pub peak: u64,
}

impl Stack {
    pub async fn start(world: &World) -> Result<Self> {
        Self::of(world, &program()?).await
    }

    /// Starts a stack of another build of `cynode`.
    pub async fn of(world: &World, program: &Path) -> Result<Self> {
        let config = world.config(&Options::default())?;
        let mut text = fs_err::read_to_string(&config)?;
        write!(
            text,
            "[orchestrator]\nlisten = \"127.0.0.1:0\"\ncontrol_listen = \
             \"127.0.0.1:0\"\ndefault_image = {IMAGE:?}\nseed_images = [{IMAGE:?}]\n\
             [egress.git]\nlisten = \"127.0.0.1:0\"\n"
        )?;
        fs_err::write(&config, text)?;
        let up = Ours::spawn(world, program, "up", &config)?;
        let endpoints = world.state_dir().join("endpoints.json");
        let deadline = Instant::now() + Duration::from_mins(2);
        while !endpoints.exists() {
            let log = world.directory().join("worker.log");
            ensure!(
                Instant::now() < deadline,
                "the stack did not become ready:\n{}",
                fs_err::read_to_string(log).unwrap_or_default()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let endpoints: Value = serde_json::from_slice(&fs_err::read(endpoints)?)?;
        let token = fs_err::read_to_string(world.state_dir().join("admin.token"))?;
        let user = UserClient::new(
            endpoints["api"].as_str().context("no address of the API")?,
            &token,
        )?;
        let through = user.sessions().clone();
        // PostgreSQL's pid file names its socket directory.
        let server =
            fs_err::read_to_string(world.state_dir().join("postgres/data/postmaster.pid"))?;
        let socket = server
            .lines()
            .nth(4)
            .context("no directory of the database's socket")?;
        let database = format!("postgres://cynode@localhost/cynode?host={socket}");
        let (worker, orchestrator) = (child(up.id(), "worker")?, child(up.id(), "orchestrator")?);
        Ok(Self {
            ours: Ours::of(world, up, worker)?,
            through,
            user,
            orchestrator,
            database,
        })
    }

    /// The URL of the stack's database.
    #[must_use]
    pub fn database(&self) -> &str {
        &self.database
    }

    /// A session, known to orchestrator and worker.
    pub async fn session(&self) -> Result<SessionId> {
        let request = UserSessionCreate {
            limits: cynode_tests::session().limits,
            ..UserSessionCreate::default()
        };
        let session = self
            .through
            .create_user_session(&request)
            .await
            .context("creating a session through the orchestrator")?;
        ensure!(
            session.state == cynode_api::SessionState::Running,
            "a session is {}",
            session.state
        );
        Ok(session.session_id)
    }

    /// Streams a gibibyte of output.
    pub async fn pass(&self, session: SessionId) -> Result<Passed> {
        let bytes = 1 << 30;
        let request = ExecRequest {
            timeout_ms: 600_000,
            ..sh(&format!(
                "yes 'a line of output, as programs write them' | head -c {bytes}"
            ))
        };
        reset_memory_peak(self.orchestrator)?;
        let (before, _) = memory(self.orchestrator)?;
        let reading = async {
            let mut events = self.through.exec_stream(session, &request).await?;
            let mut total = 0_u64;
            while let Some(event) = events.next().await? {
                if let ExecEvent::Output { data, .. } = event {
                    total += data.len() as u64;
                }
            }
            Ok::<_, anyhow::Error>(total)
        };
        let (time, total) = timed(reading).await;
        ensure!(total? == bytes, "the output is incomplete");
        let (_, peak) = memory(self.orchestrator)?;
        Ok(Passed {
            bytes,
            time,
            before,
            peak,
        })
    }
}

/// Runs one short command.
pub async fn run_true(client: &SessionClient, session: SessionId) -> Result<()> {
    let result = client.exec(session, &exec(["true"])).await?;
    ensure!(
        result.exit.exit_code == Some(0),
        "true ended with {:?}",
        result.exit
    );
    Ok(())
}

/// The supervisor's child process for a role.
fn child(up: u32, role: &str) -> Result<u32> {
    let children = fs_err::read_to_string(format!("/proc/{up}/task/{up}/children"))?;
    let is = |pid: &&str| {
        fs_err::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.split(|byte| *byte == 0).nth(1) == Some(role.as_bytes()))
    };
    Ok(children
        .split_ascii_whitespace()
        .find(is)
        .with_context(|| format!("no {role} runs"))?
        .parse()?)
}

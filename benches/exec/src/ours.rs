//! Our side: a separate worker, and sessions on it.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{SessionCreate, SessionEnd, SessionId, SessionState};
use cynode_client::{Readiness, Sandboxes, SessionClient};
use cynode_tests::{Options, World};
use serde_json::Value;

/// A session's container, from the worker's journal.
#[derive(Clone, Debug)]
pub struct Sandbox {
    pub container: String,
    /// The host's pid of process 1.
    pub pid: u64,
}

#[derive(Debug)]
pub struct Ours {
    pub client: SessionClient,
    /// The worker, or the supervisor that runs it.
    child: Child,
    /// The worker.
    pid: u32,
    state_dir: PathBuf,
}

impl Ours {
    /// Starts a worker with default logging: the tests' harness would log everything, which takes
    /// time.
    pub async fn start(world: &World, options: &Options) -> Result<Self> {
        let child = Self::spawn(world, &program()?, "worker", &world.config(options)?)?;
        let deadline = Instant::now() + Duration::from_mins(1);
        loop {
            if let Some(client) = client(&world.state_dir())
                && matches!(client.readyz().await, Ok(Readiness::Ready))
            {
                let pid = child.id();
                return Ok(Self {
                    client,
                    child,
                    pid,
                    state_dir: world.state_dir(),
                });
            }
            let log = world.directory().join("worker.log");
            ensure!(
                Instant::now() < deadline,
                "the worker did not become ready:\n{}",
                fs_err::read_to_string(log).unwrap_or_default()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Attaches to a worker that is ready, and to its supervisor.
    pub fn of(world: &World, child: Child, pid: u32) -> Result<Self> {
        let client = client(&world.state_dir()).context("the worker's address and token")?;
        Ok(Self {
            client,
            child,
            pid,
            state_dir: world.state_dir(),
        })
    }

    pub fn spawn(world: &World, program: &Path, role: &str, config: &Path) -> Result<Child> {
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let log = fs_err::File::create(world.directory().join("worker.log"))?
            .into_parts()
            .0;
        let mut command = Command::new(program);
        command
            .arg(role)
            .arg("--state-dir")
            .arg(world.state_dir())
            .arg("--config")
            .arg(config);
        for name in [
            "CYNODE_LOG",
            "CYNODE_LOG_FORMAT",
            "CYNODE_URL",
            "CYNODE_TOKEN",
            "DATABASE_URL",
        ] {
            command.env_remove(name);
        }
        // Only the build without an audit trail reads this.
        command.env("CYNODE_UNAUDITED", "to compare");
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        world.kill_on_cleanup(child.id())?;
        Ok(child)
    }

    /// Creates a cold session with the limits of the tests.
    pub async fn session(&self) -> Result<SessionId> {
        self.create(&cynode_tests::session())
            .await
            .context("creating a session; 'make bench' builds the image")
    }

    pub async fn create(&self, request: &SessionCreate) -> Result<SessionId> {
        let session = self.client.create_session(request).await?;
        ensure!(
            session.state == SessionState::Running && !session.warm,
            "a session is {} (warm: {}) instead of running and cold",
            session.state,
            session.warm
        );
        Ok(session.session_id)
    }

    /// Creates a session from the warm pool.
    pub async fn warm_session(&self) -> Result<SessionId> {
        let request = SessionCreate::new(
            cynode_api::TaskId::generate(),
            SessionId::generate(),
            "default",
        );
        let session = self.client.create_session(&request).await?;
        ensure!(session.warm, "the pool had no sandbox ready");
        Ok(session.session_id)
    }

    /// Waits until the warm pool has `count` sandboxes.
    pub async fn wait_for_spares(&self, count: f64) -> Result<()> {
        let deadline = Instant::now() + Duration::from_mins(2);
        loop {
            let text = reqwest::get(format!("{}/metrics", self.client.base()))
                .await?
                .text()
                .await?;
            let ready = text
                .lines()
                .find_map(|line| line.strip_prefix("cynode_pool_ready ")?.parse::<f64>().ok());
            if ready.is_some_and(|ready| ready >= count) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the pool did not fill");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn end(&self, session: SessionId) -> Result<()> {
        self.client
            .end_session(session, &SessionEnd::default())
            .await?;
        Ok(())
    }

    pub fn sandbox(&self, session: SessionId) -> Result<Sandbox> {
        let path = self
            .state_dir
            .join(format!("worker/sessions/{session}/session.json"));
        let record: Value = serde_json::from_slice(&fs_err::read(path)?)?;
        let sandbox_id = record["sandbox_id"]
            .as_str()
            .context("no sandbox_id in the journal")?;
        Ok(Sandbox {
            container: format!("cynode-{sandbox_id}"),
            pid: record["init"]["pid"]
                .as_u64()
                .context("no process in the journal")?,
        })
    }

    /// The socket of the Podman service that the worker itself uses.
    pub fn podman_socket(world: &World) -> PathBuf {
        world.state_dir().join("worker/podman/podman.sock")
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub async fn shut_down(&mut self) -> Result<()> {
        self.client.shutdown(Sandboxes::End).await?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the worker ended with {status}");
        Ok(())
    }
}

/// The build of `cynode` next to this program.
pub fn program() -> Result<PathBuf> {
    World::cynode().context("no release build of cynode next to this program; run 'make bench'")
}

fn client(state_dir: &Path) -> Option<SessionClient> {
    let url = fs_err::read_to_string(state_dir.join("worker/url")).ok()?;
    let token = fs_err::read_to_string(state_dir.join("worker.token")).ok()?;
    SessionClient::new(&url, &token).ok()
}

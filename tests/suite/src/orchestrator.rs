//! A control plane for one test: a private PostgreSQL and any number of orchestrators, all on free
//! ports.

use std::{
    io::{Read as _, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cynode_client::{SessionClient, UserClient};

use crate::{World, world::probe_client};

const POLL: Duration = Duration::from_millis(20);
const STARTUP: Duration = Duration::from_secs(60);

/// The `bin` directory of the newest installed PostgreSQL.
pub fn postgres_programs() -> Result<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = fs_err::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            Some((
                entry.file_name().to_str()?.parse().ok()?,
                entry.path().join("bin"),
            ))
        })
        .collect();
    found.sort();
    let on_path = || {
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .find(|directory| directory.join("initdb").is_file())
    };
    found
        .pop()
        .map(|(_, directory)| directory)
        .or_else(on_path)
        .context("no PostgreSQL server is installed; 'scripts/setup test' installs it")
}

/// A program of the PostgreSQL server, run as another user because it refuses to run as root.
fn server_program(name: &str) -> Result<Command> {
    let program = postgres_programs()?.join(name);
    if !rustix::process::geteuid().is_root() {
        return Ok(Command::new(program));
    }
    let mut command = Command::new("setpriv");
    command
        .args([
            "--reuid=postgres",
            "--regid=postgres",
            "--clear-groups",
            "--",
        ])
        .arg(program);
    Ok(command)
}

/// A private PostgreSQL server. It runs without fsync, so it loses data on a power cut but not when
/// it is killed.
#[derive(Debug)]
pub struct Postgres {
    directory: PathBuf,
    child: Child,
}

impl Postgres {
    fn start(world: &World) -> Result<Self> {
        let directory = world.directory().join("pg");
        fs_err::create_dir_all(&directory)?;
        if rustix::process::geteuid().is_root() {
            let chown = Command::new("chown")
                .arg("postgres:postgres")
                .arg(&directory)
                .status()?;
            ensure!(
                chown.success(),
                "the directory could not be given to postgres"
            );
        }
        let mut command = server_program("initdb")?;
        command.arg("-D").arg(directory.join("data")).args([
            "-U",
            "cynode",
            "-E",
            "UTF8",
            "--locale=C",
            "-A",
            "trust",
            "--no-sync",
        ]);
        let made = command.current_dir("/").output()?;
        ensure!(
            made.status.success(),
            "initdb: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        let child = Self::spawn(&directory)?;
        world.kill_on_cleanup(child.id())?;
        Ok(Self { directory, child })
    }

    fn spawn(directory: &Path) -> Result<Child> {
        let log = fs_err::OpenOptions::new()
            .create(true)
            .append(true)
            .open(directory.with_extension("log"))?
            .into_parts()
            .0;
        let mut command = server_program("postgres")?;
        command.arg("-D").arg(directory.join("data")).args([
            "-c",
            "listen_addresses=",
            "-c",
            "fsync=off",
            "-c",
            "shared_buffers=16MB",
        ]);
        command
            .arg("-c")
            .arg(format!("unix_socket_directories={}", directory.display()));
        command
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        Ok(command.spawn()?)
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!(
            "postgres://cynode@localhost/postgres?host={}",
            self.directory.display()
        )
    }

    pub async fn wait_until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + STARTUP;
        let file = self.directory.join("data/postmaster.pid");
        loop {
            let text = fs_err::read_to_string(&file).unwrap_or_default();
            let mut lines = text.lines();
            if lines
                .next()
                .is_some_and(|pid| pid.trim() == self.child.id().to_string())
                && lines.nth(6).is_some_and(|line| line.trim() == "ready")
            {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "PostgreSQL is not ready: {}",
                fs_err::read_to_string(self.directory.with_extension("log"))?
            );
            tokio::time::sleep(POLL).await;
        }
    }

    /// Kills the server with SIGKILL and starts it again.
    pub async fn kill_and_restart(&mut self, world: &World) -> Result<()> {
        self.kill()?;
        self.restart(world).await
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Shuts the server down cleanly, whatever is connected.
    pub fn stop(&mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_raw(self.child.id().cast_signed())
            .context("a process id")?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        let ended = self.child.wait()?;
        ensure!(ended.success(), "PostgreSQL ended with {ended}");
        Ok(())
    }

    /// Starts the server again after it was killed or stopped.
    pub async fn restart(&mut self, world: &World) -> Result<()> {
        // A new server refuses to start until the last child of the old one has exited.
        let deadline = Instant::now() + STARTUP;
        loop {
            self.child = Self::spawn(&self.directory)?;
            world.kill_on_cleanup(self.child.id())?;
            let ended = loop {
                if self.child.try_wait()?.is_some() {
                    break true;
                }
                if tokio::time::timeout(POLL, self.wait_until_ready())
                    .await
                    .is_ok()
                {
                    break false;
                }
            };
            if !ended {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "PostgreSQL does not restart");
        }
    }

    /// Stops all processes of the server with SIGSTOP until the guard is dropped or the test ends.
    pub fn freeze(&self) -> Result<HoldGuard> {
        // A stopped postmaster can't fork, so the list of children is complete.
        let script = "kill -STOP $1; all=\"$1 $(cat /proc/$1/task/$1/children)\"; kill -STOP \
                      $all; echo; cat >/dev/null; kill -CONT $all";
        let mut command = Command::new("sh");
        command
            .args(["-c", script, "sh"])
            .arg(self.child.id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0);
        HoldGuard::after_first_output(command.spawn()?).context("freezing PostgreSQL")
    }

    /// Locks a table exclusively, against readers too, until the guard is dropped.
    pub fn lock_table(&self, table: &str) -> Result<HoldGuard> {
        self.hold_locks_of(&format!("lock table {table} in access exclusive mode"))
    }

    /// Holds the locks that a statement takes until the guard is dropped.
    pub fn hold_locks_of(&self, statement: &str) -> Result<HoldGuard> {
        let mut command = self.psql()?;
        command
            .args(["-q", "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut held = command.spawn()?;
        let words = format!("begin;\n\\o /dev/null\n{statement};\n\\o\n\\echo held\n");
        held.stdin
            .as_mut()
            .context("its input")?
            .write_all(words.as_bytes())?;
        HoldGuard::after_first_output(held)
            .with_context(|| format!("holding the locks of {statement}"))
    }

    /// Executes a statement while the server is stopped.
    pub fn execute_while_stopped(&self, statement: &str) -> Result<()> {
        let mut command = server_program("postgres")?;
        command
            .arg("--single")
            .arg("-D")
            .arg(self.directory.join("data"))
            .args(["-c", "fsync=off", "postgres"]);
        let mut child = command
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        child
            .stdin
            .take()
            .context("its input")?
            .write_all(format!("{statement}\n").as_bytes())?;
        let ran = child.wait_with_output()?;
        let stderr = String::from_utf8_lossy(&ran.stderr);
        ensure!(
            ran.status.success() && !stderr.contains("ERROR"),
            "{statement}: {stderr}"
        );
        Ok(())
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs a statement with psql and returns its output.
    pub fn query(&self, statement: &str) -> Result<String> {
        let ran = self.psql()?.args(["-c", statement]).output()?;
        ensure!(
            ran.status.success(),
            "{statement}: {}",
            String::from_utf8_lossy(&ran.stderr)
        );
        Ok(String::from_utf8(ran.stdout)?.trim().to_owned())
    }

    fn psql(&self) -> Result<Command> {
        let mut command = Command::new(postgres_programs()?.join("psql"));
        command
            .current_dir("/")
            .args([
                "-X",
                "-A",
                "-t",
                "-v",
                "ON_ERROR_STOP=1",
                "-U",
                "cynode",
                "-d",
                "postgres",
                "-h",
            ])
            .arg(&self.directory);
        Ok(command)
    }
}

/// A process that holds locks, or stopped processes, until this guard is dropped.
#[derive(Debug)]
pub struct HoldGuard(Child);

impl HoldGuard {
    fn after_first_output(child: Child) -> Result<Self> {
        let mut held = Self(child);
        held.0
            .stdout
            .as_mut()
            .context("its output")?
            .read_exact(&mut [0])?;
        Ok(held)
    }
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

/// An orchestrator process.
#[derive(Debug)]
pub struct RunningOrchestrator {
    child: Child,
    state_dir: PathBuf,
    log: PathBuf,
}

impl RunningOrchestrator {
    pub fn url(&self) -> Result<String> {
        Ok(fs_err::read_to_string(
            self.state_dir.join("orchestrator/url"),
        )?)
    }

    /// The address that nodes register with.
    pub fn control_url(&self) -> Result<String> {
        Ok(fs_err::read_to_string(
            self.state_dir.join("orchestrator/control-url"),
        )?)
    }

    /// The administrator's token.
    pub fn token(&self) -> Result<String> {
        Ok(fs_err::read_to_string(self.state_dir.join("admin.token"))?
            .trim()
            .to_owned())
    }

    pub fn client(&self) -> Result<UserClient> {
        // Installed once per process; a second call has no effect.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        Ok(UserClient::new(&self.url()?, &self.token()?)?)
    }

    /// A client for the calls on sessions.
    pub fn sessions(&self) -> Result<SessionClient> {
        Ok(self.client()?.sessions().clone())
    }

    #[must_use]
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The log file.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.log.clone()
    }

    pub async fn wait_until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + STARTUP;
        let client = probe_client()?;
        loop {
            if let Ok(url) = self.url()
                && let Ok(response) = client.get(format!("{url}/readyz")).send().await
                && response.status().is_success()
            {
                return Ok(());
            }
            if !Path::new(&format!("/proc/{}", self.child.id())).exists()
                || Instant::now() > deadline
            {
                bail!(
                    "the orchestrator did not become ready:\n{}",
                    fs_err::read_to_string(&self.log).unwrap_or_default()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Sends SIGTERM and waits for a clean exit.
    pub async fn stop(&mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_raw(self.child.id().cast_signed())
            .context("a process id")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let deadline = Instant::now() + STARTUP;
        loop {
            if let Some(ended) = self.child.try_wait()? {
                ensure!(ended.success(), "the orchestrator ended with {ended}");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the orchestrator does not exit");
            tokio::time::sleep(POLL).await;
        }
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

/// A database and the orchestrators that share it.
#[derive(Debug)]
pub struct ControlPlane {
    // Dropped before the world, whose watcher removes its directory.
    pub postgres: Postgres,
    pub world: World,
}

impl ControlPlane {
    pub async fn new() -> Result<Self> {
        Self::within(World::new()?).await
    }

    pub async fn within(world: World) -> Result<Self> {
        let postgres = Postgres::start(&world)?;
        postgres.wait_until_ready().await?;
        Ok(Self { postgres, world })
    }

    /// Starts an orchestrator and waits until it is ready. Each name has its own state directory;
    /// the key is shared. An empty name selects the world's state directory.
    pub async fn orchestrator(
        &self,
        name: &str,
        settings: &[(&str, &str)],
    ) -> Result<RunningOrchestrator> {
        let state_dir = if name.is_empty() {
            self.world.state_dir()
        } else {
            self.world.directory().join(format!("orchestrator-{name}"))
        };
        fs_err::create_dir_all(&state_dir)?;
        // A stale address must not be mistaken for the new one.
        drop(fs_err::remove_file(state_dir.join("orchestrator/url")));
        let log = self
            .world
            .directory()
            .join(format!("orchestrator{name}.log"));
        let output = fs_err::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)?
            .into_parts()
            .0;
        let mut command = self.world.command()?;
        command
            .arg("orchestrator")
            .arg("--state-dir")
            .arg(&state_dir);
        let key = self
            .world
            .directory()
            .join("orchestrator.key")
            .display()
            .to_string();
        let url = self.postgres.url();
        let defaults = [
            ("listen", "127.0.0.1:0"),
            ("control_listen", "127.0.0.1:0"),
            ("database_url", url.as_str()),
            ("key_file", key.as_str()),
            ("default_image", crate::IMAGE),
        ];
        for (key, value) in defaults.iter().chain(settings) {
            command
                .arg("--set")
                .arg(format!("orchestrator.{key}={value}"));
        }
        command
            .envs(cynode_service::allocator::ORCHESTRATOR)
            .env("CYNODE_LOG", "debug")
            .env_remove("CYNODE_URL")
            .env_remove("CYNODE_TOKEN")
            .env_remove("DATABASE_URL");
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0);
        let child = command.spawn().context("starting the orchestrator")?;
        self.world.kill_on_cleanup(child.id())?;
        let orchestrator = RunningOrchestrator {
            child,
            state_dir,
            log,
        };
        orchestrator.wait_until_ready().await?;
        Ok(orchestrator)
    }
}

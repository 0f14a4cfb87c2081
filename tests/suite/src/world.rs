//! The part of the machine that belongs to one test.

use std::{
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cynode_client::SessionClient;
use serde_json::Value;

use crate::dockerd::is_docker_file;

/// The repository's root.
#[must_use]
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("tests/suite lies two levels below the root")
        .to_path_buf()
}

/// The interval between two evaluations of a condition.
const POLL: Duration = Duration::from_millis(20);

/// Polls until a condition holds.
pub async fn eventually(
    what: &str,
    limit: Duration,
    mut holds: impl AsyncFnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !holds().await? {
        ensure!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

/// Images that every world has; tests load others when they need them.
pub(crate) const IMAGES: [&str; 3] = [crate::IMAGE, crate::UNLABELLED, crate::HOSTILE];

/// Options of a worker that differ from the defaults.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Keys of the `[worker]` section.
    pub settings: Vec<(String, String)>,
    /// Environment variables of the worker.
    pub env: Vec<(String, String)>,
}

impl Options {
    #[must_use]
    pub fn set(mut self, key: &str, value: &str) -> Self {
        self.settings.push((key.to_owned(), value.to_owned()));
        self
    }

    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// The container engine of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Podman as root.
    Podman,
    /// Podman as an ordinary user.
    Rootless,
    /// Rootless Podman without a login session: no `XDG_RUNTIME_DIR`. The fallback directories
    /// exist once per user, so only one test may use this.
    RootlessWithoutSession,
    /// A private Docker daemon with `userns-remap`.
    Docker,
    /// A private Docker daemon without `userns-remap`: ids inside are the host's.
    DockerUnmapped,
}

/// A state directory, a container store, and a watcher that removes both.
#[derive(Debug)]
pub struct World {
    directory: PathBuf,
    engine: Engine,
    watcher: Child,
    /// Closing it tells the watcher to clean up.
    lifeline: Option<ChildStdin>,
}

/// Kills every process of a world and removes its directory. Arguments: the directory, Podman's
/// program.
const CLEANUP: &str = include_str!("cleanup.sh");

impl World {
    /// A world with Podman as root.
    pub fn new() -> Result<Self> {
        Self::with(Engine::Podman)
    }

    pub async fn on(engine: Engine) -> Result<Self> {
        let world = Self::with(engine)?;
        match engine {
            Engine::Podman => {}
            Engine::Rootless | Engine::RootlessWithoutSession => world.prepare_user()?,
            Engine::Docker | Engine::DockerUnmapped => {
                world.start_docker(engine == Engine::Docker).await?;
            }
        }
        Ok(world)
    }

    fn with(engine: Engine) -> Result<Self> {
        let directory = std::env::temp_dir().join(format!("cyn-{}", uuid::Uuid::new_v4().simple()));
        let mut watcher = Command::new("/bin/sh");
        watcher
            .args(["-c", CLEANUP, "cynode-test-cleanup"])
            .arg(&directory)
            .arg("podman");
        // A separate process group: Ctrl-C at the test must not end the cleanup.
        watcher
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut watcher = watcher.spawn().context("starting the cleanup watcher")?;
        let lifeline = watcher.stdin.take();
        for name in ["state", "cwd"] {
            fs_err::create_dir_all(directory.join(name))?;
        }
        Ok(Self {
            directory,
            engine,
            watcher,
            lifeline,
        })
    }

    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    #[must_use]
    pub const fn engine(&self) -> Engine {
        self.engine
    }

    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// The cgroup above this world's sandboxes.
    #[must_use]
    pub fn cgroup_parent(&self) -> String {
        self.directory
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// The working directory of workers, which they must not use.
    #[must_use]
    pub(crate) fn working_directory(&self) -> PathBuf {
        self.directory.join("cwd")
    }

    /// The store in which `scripts/test` puts the images.
    #[must_use]
    pub fn image_store() -> PathBuf {
        std::env::var_os("CYNODE_TEST_IMAGE_STORE").map_or_else(
            || repository().join("target/test-store/root"),
            PathBuf::from,
        )
    }

    /// The `cynode` binary of this build.
    pub fn cynode() -> Result<PathBuf> {
        let program = std::env::current_exe()?;
        let directory = program
            .ancestors()
            .find(|path| path.join("cynode").is_file());
        Ok(directory
            .context("the cynode binary is not built; run 'make test', which builds it first")?
            .join("cynode"))
    }

    /// A `cynode` command that runs as the world's user.
    pub fn command(&self) -> Result<Command> {
        Ok(if self.is_rootless() {
            self.as_user(&self.directory.join("bin/cynode"))
        } else {
            Command::new(Self::cynode()?)
        })
    }

    /// A Podman command on this world's store.
    #[must_use]
    pub fn podman(&self) -> Command {
        let mut command = if self.is_rootless() {
            self.in_namespace()
        } else {
            Command::new("env")
        };
        command
            .arg("podman")
            .arg("--root")
            .arg(self.directory.join("root"))
            .arg("--runroot")
            .arg(self.directory.join("run"));
        command.args(["--storage-driver", "overlay"]);
        if self.engine == Engine::Podman {
            command.arg("--storage-opt").arg(format!(
                "additionalimagestore={}",
                Self::image_store().display()
            ));
        }
        command.args([
            "--runtime",
            "runc",
            "--cgroup-manager",
            "cgroupfs",
            "--events-backend",
            "none",
        ]);
        command
    }

    /// Writes the worker's configuration file.
    pub fn config(&self, options: &Options) -> Result<PathBuf> {
        let path = self.directory.join("cynode.toml");
        let mut text = String::from("[worker]\n");
        let own = |key: &str| options.settings.iter().any(|(set, _)| set == key);
        let mut line = |key: &str, value: &str| text.extend([key, " = ", value, "\n"]);
        let quoted = |path: &Path| format!("{:?}", path.display().to_string());
        let mut defaults = vec![
            ("listen", "\"127.0.0.1:0\"".to_owned()),
            ("default_image", format!("{:?}", crate::IMAGE)),
            ("oci_runtime", "\"runc\"".to_owned()),
            // Tests count containers, so no spares.
            ("pool_size", "0".to_owned()),
            // Removed together with the world.
            ("cgroup_parent", format!("{:?}", self.cgroup_parent())),
        ];
        match self.engine {
            Engine::Podman => defaults.extend([
                ("podman_root", quoted(&self.directory.join("root"))),
                ("podman_runroot", quoted(&self.directory.join("run"))),
                ("podman_image_store", quoted(&Self::image_store())),
            ]),
            Engine::Rootless | Engine::RootlessWithoutSession => defaults.extend([
                ("podman_root", quoted(&self.directory.join("root"))),
                ("podman_runroot", quoted(&self.directory.join("run"))),
                (
                    "agent_binary",
                    quoted(&self.directory.join("bin/cynode-sba")),
                ),
                (
                    "allow_unenforced",
                    r#"["memory", "cpus", "pids", "disk"]"#.to_owned(),
                ),
            ]),
            Engine::Docker | Engine::DockerUnmapped => {
                let allowed = if self.engine == Engine::Docker {
                    r#"["id_range"]"#
                } else {
                    r#"["id_range", "userns"]"#
                };
                defaults.extend([
                    ("engine", "\"docker\"".to_owned()),
                    ("docker_socket", quoted(&self.docker_socket())),
                    ("allow_unenforced", allowed.to_owned()),
                ]);
            }
        }
        for (key, value) in defaults {
            if !own(key) {
                line(key, &value);
            }
        }
        for (key, value) in &options.settings {
            line(key, value);
        }
        fs_err::write(&path, text)?;
        Ok(path)
    }

    /// Starts a worker and waits until it is ready.
    pub async fn worker(&self, options: &Options) -> Result<RunningWorker> {
        let worker = self.start_worker(options)?;
        worker.wait_until_ready().await?;
        Ok(worker)
    }

    /// Starts a worker without waiting.
    pub fn start_worker(&self, options: &Options) -> Result<RunningWorker> {
        let config = self.config(options)?;
        // A stale address must not be mistaken for the new worker's.
        drop(fs_err::remove_file(self.state_dir().join("worker/url")));
        let log = fs_err::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.directory.join("worker.log"))?
            .into_parts()
            .0;
        let mut command = self.command()?;
        command
            .arg("worker")
            .arg("--state-dir")
            .arg(self.state_dir())
            .arg("--config")
            .arg(config);
        command
            .envs(cynode_service::allocator::WORKER)
            .envs(options.env.iter().cloned())
            .env("CYNODE_LOG", "debug")
            .env_remove("CYNODE_URL")
            .env_remove("CYNODE_TOKEN");
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .current_dir(self.working_directory());
        let child = command.spawn().context("starting the worker")?;
        self.kill_on_cleanup(child.id())?;
        Ok(RunningWorker {
            child,
            state_dir: self.state_dir(),
            log: self.directory.join("worker.log"),
        })
    }

    /// Registers a process that the watcher must kill.
    pub fn kill_on_cleanup(&self, pid: u32) -> Result<()> {
        let mut pids = fs_err::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.directory.join("pids"))?;
        writeln!(pids, "{pid}")?;
        Ok(())
    }

    /// All containers in this world's store.
    pub fn containers(&self) -> Result<Vec<String>> {
        if self.is_docker() {
            return self.docker_containers();
        }
        let output = self
            .podman()
            .args(["ps", "--all", "--quiet", "--external"])
            .output()?;
        ensure!(
            output.status.success(),
            "podman ps: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(str::to_owned)
            .collect())
    }

    const fn is_docker(&self) -> bool {
        matches!(self.engine, Engine::Docker | Engine::DockerUnmapped)
    }

    /// Makes an image available. Podman as root reads the tests' store directly; the other engines
    /// need copies.
    pub async fn load(&self, image: &str) -> Result<()> {
        if IMAGES.contains(&image) || self.engine == Engine::Podman {
            Ok(())
        } else if self.is_docker() {
            self.load_into_docker(image).await
        } else {
            self.load_for_user(image)
        }
    }

    /// The socket of this world's engine.
    #[must_use]
    pub fn engine_socket(&self) -> PathBuf {
        if self.is_docker() {
            self.docker_socket()
        } else {
            self.state_dir().join("worker/podman/podman.sock")
        }
    }

    /// Inspects each container. Callers rely only on fields that Podman and Docker share.
    pub fn inspect(&self) -> Result<Vec<Value>> {
        let containers = self.containers()?;
        if self.is_docker() {
            return containers
                .iter()
                .map(|id| self.docker_get(&format!("containers/{id}/json")))
                .collect();
        }
        let output = self
            .podman()
            .args(["container", "inspect"])
            .args(containers)
            .output()?;
        ensure!(
            output.status.success(),
            "podman inspect: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Volumes on the host's disk.
    pub fn volumes(&self) -> Result<Vec<String>> {
        if self.is_docker() {
            let listed = self.docker_get("volumes")?;
            return Ok(listed["Volumes"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|volume| volume["Name"].to_string())
                .collect());
        }
        let output = self.podman().args(["volume", "ls", "--quiet"]).output()?;
        ensure!(
            output.status.success(),
            "podman volume ls: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(str::to_owned)
            .collect())
    }

    /// Lists what a worker left behind after a full shutdown: containers, mounts, processes,
    /// sockets.
    pub fn leftovers(&self) -> Result<Vec<String>> {
        let mut left: Vec<String> = self
            .containers()?
            .into_iter()
            .map(|id| format!("container {id}"))
            .collect();
        let directory = self.directory.display().to_string();
        for line in fs_err::read_to_string("/proc/self/mountinfo")?.lines() {
            let mounted = line.split(' ').nth(4).unwrap_or_default();
            // Mounts and processes of the store and the daemon are removed with them.
            if mounted.starts_with(&directory)
                && mounted != format!("{directory}/root/overlay")
                && !self.is_docker_mount(mounted)
            {
                left.push(format!("mount {mounted}"));
            }
        }
        for entry in fs_err::read_dir("/proc")? {
            let path = entry?.path();
            let Ok(command) = fs_err::read(path.join("cmdline")) else {
                continue;
            };
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            if command.contains(&directory)
                && !command.contains("cynode-test-cleanup")
                && !is_docker_file(&command)
            {
                left.push(format!("process {}: {command}", path.display()));
            }
        }
        let places =
            ["sandboxes", "trash"].map(|place| self.state_dir().join("worker").join(place));
        for place in places.into_iter().chain([self.working_directory()]) {
            for entry in fs_err::read_dir(place).into_iter().flatten() {
                left.push(format!("on disk: {}", entry?.path().display()));
            }
        }
        Ok(left)
    }

    /// Waits until no leftovers remain.
    pub async fn assert_clean(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let left = self.leftovers()?;
            if left.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "left over: {left:#?}");
            tokio::time::sleep(POLL).await;
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["worker.log", "docker/log"] {
                let log = fs_err::read_to_string(self.directory.join(name)).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(60).collect();
                #[expect(
                    clippy::print_stderr,
                    reason = "the output helps to diagnose a failure"
                )]
                {
                    eprintln!("--- the end of {name} ---");
                    for line in tail.iter().rev() {
                        eprintln!("{line}");
                    }
                }
            }
        }
        drop(self.lifeline.take());
        drop(self.watcher.wait());
    }
}

/// A worker process.
#[derive(Debug)]
pub struct RunningWorker {
    child: Child,
    state_dir: PathBuf,
    log: PathBuf,
}

impl RunningWorker {
    pub fn url(&self) -> Result<String> {
        Ok(fs_err::read_to_string(self.state_dir.join("worker/url"))?)
    }

    pub fn token(&self) -> Result<String> {
        Ok(fs_err::read_to_string(self.state_dir.join("worker.token"))?
            .trim()
            .to_owned())
    }

    pub fn client(&self) -> Result<SessionClient> {
        // Installed once per process; a second call has no effect.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        Ok(SessionClient::new(&self.url()?, &self.token()?)?)
    }

    /// The log file.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.log.clone()
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub async fn wait_until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
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
                    "the worker did not become ready:\n{}",
                    fs_err::read_to_string(&self.log).unwrap_or_default()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Sends a signal to the worker.
    pub fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        let pid = rustix::process::Pid::from_raw(self.child.id().cast_signed())
            .context("a process id")?;
        Ok(rustix::process::kill_process(pid, signal)?)
    }

    /// Waits until the worker exits.
    pub async fn wait(&mut self, limit: Duration) -> Result<std::process::ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(
                Instant::now() < deadline,
                "the worker did not exit within {limit:?}"
            );
            tokio::time::sleep(POLL).await;
        }
    }

    /// Shuts the worker down with all its sandboxes and waits for its exit.
    pub async fn shut_down(&mut self) -> Result<()> {
        let client = reqwest::Client::new();
        let response = client
            .post(format!("{}/v1/worker/shutdown", self.url()?))
            .bearer_auth(self.token()?)
            .header("content-type", "application/json")
            .body(r#"{"version":1,"sandboxes":"end"}"#)
            .send()
            .await?;
        ensure!(
            response.status().as_u16() == 202,
            "shutdown answered {}",
            response.status()
        );
        let status = self.wait(Duration::from_secs(60)).await?;
        ensure!(status.success(), "the worker ended with {status}");
        Ok(())
    }

    /// The worker's resident memory in bytes: current and peak.
    pub fn memory(&self) -> Result<(u64, u64)> {
        memory(self.child.id())
    }
}

/// A process's resident memory in bytes: current and peak.
pub fn memory(pid: u32) -> Result<(u64, u64)> {
    let status = fs_err::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| {
                line.strip_prefix(name)?
                    .trim()
                    .strip_suffix("kB")?
                    .trim()
                    .parse::<u64>()
                    .ok()
            })
            .map(|kilobytes| kilobytes * 1024)
            .with_context(|| format!("no {name}"))
    };
    Ok((field("VmRSS:")?, field("VmHWM:")?))
}

/// Resets the peak of a process's resident memory.
pub fn reset_memory_peak(pid: u32) -> Result<()> {
    Ok(fs_err::write(format!("/proc/{pid}/clear_refs"), "5")?)
}

/// A client for readiness probes; it accepts any certificate.
pub(crate) fn probe_client() -> Result<reqwest::Client> {
    // Installed once per process; a second call has no effect.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    Ok(reqwest::Client::builder()
        .timeout(Duration::from_secs(5))
        .no_proxy()
        .tls_danger_accept_invalid_certs(true)
        .build()?)
}

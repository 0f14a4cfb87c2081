//! The worker: sandboxes on one node, behind the Worker API.
//!
//! The path of one exec: `api/execs.rs` receives the request, `execs/` records it and talks to the
//! agent through `sandbox/`, and `execs/spool.rs` stores its output. `sessions/` creates and ends
//! the containers through `runtime/`, and writes every step to `journal.rs` first.
#![forbid(unsafe_code)]
#![recursion_limit = "256"]

mod api;
pub mod audit;
pub mod calls;
mod capacity;
mod config;
mod control;
mod disk;
pub mod edit;
mod execs;
pub mod host;
mod idrange;
mod inference;
mod jobs;
mod journal;
mod limits;
mod process;
mod proxies;
mod readiness;
mod rootless;
pub mod runtime;
mod sandbox;
mod sessions;
mod tree;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use cynode_service::{
    admin, auth,
    files::read_or_create_token,
    listen::{self, ListenError},
    shutdown,
};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};

pub use api::openapi;
pub use config::{Config, DEFAULT_IMAGE, Engine};
use inference::Inference;
pub use inference::InferenceConfig;
use jobs::Jobs;
use journal::Journal;
pub use rootless::enter_user_namespace;
use runtime::{Docker, DockerOptions, IdSpace, Podman, PodmanOptions, Runtime, ServiceOptions};
use sessions::{Sessions, SessionsConfig};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another worker uses the state directory {0}")]
    Locked(PathBuf),
    #[error("{operation}")]
    State {
        operation: String,
        source: std::io::Error,
    },
    #[error("this host can't run containers: {0}; run 'cynode doctor' for details")]
    Host(String),
    #[error(
        "this runtime does not enforce {guarantee}, and worker.allow_unenforced does not permit \
         that. Remedy: {remedy}"
    )]
    Unenforced { guarantee: String, remedy: String },
    #[error("{0}")]
    Agent(String),
    #[error(transparent)]
    Ids(#[from] idrange::IdRangeError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Runtime(#[from] runtime::RuntimeError),
}

fn state(operation: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
    let operation = operation.into();
    move |source| Error::State { operation, source }
}

/// The journal of a state directory, locked for this process while it lives.
#[derive(Debug)]
struct LockedState {
    journal: Journal,
    _lock: fs_err::File,
}

/// How long to wait for the lock before the state directory counts as used by another worker.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

fn lock_state(config: &Config) -> Result<LockedState, Error> {
    let directory = config.directory();
    fs_err::create_dir_all(&directory).map_err(state("creating the state directory"))?;
    fs_err::set_permissions(
        &directory,
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )
    .map_err(state("restricting access to the state directory"))?;
    let lock = cynode_service::private::open_lock(&directory.join("lock"))
        .map_err(state("opening the lock"))?;
    // A process that checks whether a worker runs here takes the lock only briefly (`idrange`); a
    // running worker keeps it.
    let deadline = std::time::Instant::now() + LOCK_TIMEOUT;
    while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        if std::time::Instant::now() >= deadline {
            return Err(Error::Locked(config.state_dir.clone()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let journal = Journal::open(directory).map_err(state("opening the journal"))?;
    Ok(LockedState {
        journal,
        _lock: lock,
    })
}

/// The configured container runtime, with the options chosen for this host.
fn engine(config: &Config, choice: &host::Choice) -> Arc<dyn Runtime> {
    match config.engine {
        Engine::Podman => podman(config, choice),
        Engine::Docker => Arc::new(docker(config)),
    }
}

fn docker(config: &Config) -> Docker {
    Docker::new(DockerOptions {
        socket: config.docker_socket.clone(),
        directory: config.directory().join("docker"),
        oci_runtime: config.oci_runtime.clone(),
        call_limit: Duration::from_secs(config.runtime_timeout_seconds),
    })
}

/// The id blocks for sandboxes. Fails if the runtime separates ids less than the configuration
/// allows.
fn ids(config: &Config, space: IdSpace) -> Result<idrange::IdBlocks, Error> {
    let missing = host::missing_allowances(config, space);
    if missing.is_empty() {
        let registry = rootless::id_registry(matches!(space, IdSpace::Within(_)))
            .map_err(state("finding a runtime directory"))?;
        return Ok(idrange::IdBlocks::new(space, &registry, &config.state_dir)?);
    }
    let guarantee = match space {
        IdSpace::Host => "the separation of sandbox ids from the host's",
        _ => "the separation of sandbox ids from one another",
    };
    Err(Error::Unenforced {
        guarantee: guarantee.to_owned(),
        remedy: format!(
            "set {}, or use another engine; run 'cynode doctor' for details",
            config.allowance(&missing)
        ),
    })
}

fn podman(config: &Config, choice: &host::Choice) -> Arc<dyn Runtime> {
    let mut command = config.podman_command();
    command.extend(
        [
            "--runtime",
            &choice.oci_runtime,
            "--cgroup-manager",
            &choice.cgroup_manager,
            "--events-backend",
            "none",
        ]
        .map(str::to_owned),
    );
    Arc::new(Podman::new(PodmanOptions {
        socket: config.podman_socket.clone(),
        service: ServiceOptions {
            command,
            directory: config.directory().join("podman"),
        },
        oci_runtime: Some(choice.oci_runtime.clone()),
        call_limit: Duration::from_secs(config.runtime_timeout_seconds),
    }))
}

/// Runs a worker until it is told to stop.
pub async fn run(config: Config) -> Result<(), Error> {
    // Check first what depends only on the configuration: errors there don't depend on the host.
    let listener = listen::prepare(config.listen, &config.tls, config.insecure_listen)?;
    listen::raise_open_files();
    let locked = lock_state(&config)?;
    let agent_binary = store_agent(&config)?;
    let choice = host::choose(&config).await.map_err(|report| {
        Error::Host(
            report
                .problems()
                .iter()
                .map(|check| format!("{}: {}", check.name, check.detail))
                .collect::<Vec<_>>()
                .join("; "),
        )
    })?;
    let ids = ids(&config, choice.ids)?;
    let runtime = engine(&config, &choice);
    let node_id = locked
        .journal
        .node_id()
        .map_err(state("reading the node's id"))?;
    let token = read_or_create_token(&config.state_dir.join("worker.token"))
        .map_err(state("reading the token"))?;
    let metrics_token = admin::metrics_token(config.metrics_token_file.as_deref())
        .map_err(state("reading worker.metrics_token_file"))?;
    let bound = listener.bind().await?;
    let connections = config.max_connections;
    let stop = shutdown::on_signals().map_err(state("watching signals"))?;
    let url = bound.url();
    cynode_service::files::replace(&config.directory().join("url"), url.as_bytes())
        .map_err(state("writing the address"))?;

    let capacity = capacity::Capacity::of(&config, choice.max_nofile);
    let disks = disk::Disks::new(
        config.directory().join("disks"),
        capacity.default_limits().disk_bytes,
    );
    let disks = match disks.probe().await {
        Ok(()) => Ok(disks),
        Err(reason) => {
            tracing::warn!(
                reason,
                "Workspaces can't have their own disks on this host."
            );
            Err(reason)
        }
    };
    let rootless = matches!(choice.ids, IdSpace::Within(_));
    let parent =
        match capacity::ParentCgroup::prepare(&config, &choice.cgroup_manager, rootless, &capacity)
            .await
        {
            Ok(parent) => Some(parent),
            Err(reason) => {
                tracing::warn!(
                    reason,
                    "The total memory and processes of all sandboxes are not limited on this host."
                );
                None
            }
        };
    let audit = match config.orchestrator_url {
        Some(_) => audit::NodeTrail::open(config.directory().join("audit"), node_id),
        None => audit::NodeTrail::open_local(config.directory().join("audit"), node_id),
    };
    let audit = audit.map_err(state("opening the audit trail"))?;
    let trail = Arc::new(audit.clone());
    let inference = Inference::new(config.inference.clone(), trail, &config.directory())
        .map_err(|error| state("preparing the way to models")(std::io::Error::other(error)))?;
    let options = SessionsConfig {
        runtime: Arc::clone(&runtime),
        journal: locked.journal.clone(),
        audit,
        inference: Arc::clone(&inference),
        node_id,
        ids,
        agent_binary,
        capacity,
        parent,
        disks,
        config,
    };
    let sessions = Sessions::new(options).map_err(state("reading the journal"))?;
    let (job_changes, changed_jobs) = tokio::sync::mpsc::channel(1024);
    let jobs = Jobs::open(Arc::clone(&sessions), locked.journal.clone(), job_changes)
        .map_err(state("reading the journal of jobs"))?;
    sessions.proxies.set_jobs(&jobs);
    sessions.proxies.set_trail(sessions.audit.clone());
    let handler = Arc::clone(&sessions.inference);
    sessions.proxies.set_inference(Arc::new(handler));
    let api = api::Api {
        sessions: Arc::clone(&sessions),
        jobs: Arc::clone(&jobs),
        calls: Arc::default(),
        stop: stop.clone(),
        end_sandboxes: Arc::default(),
    };
    let end_sandboxes = Arc::clone(&api.end_sandboxes);
    let ready = Arc::new(readiness::Readiness::new(Arc::clone(&sessions)));
    let readiness: admin::Readiness = {
        let readiness = Arc::clone(&ready);
        Arc::new(move || {
            let readiness = Arc::clone(&readiness);
            Box::pin(async move { readiness.check().await })
        })
    };
    let tokens = auth::Tokens::new(vec![auth::Token::new(&token)]);
    let router = api::router(
        api,
        tokens.clone(),
        readiness,
        admin::by_tokens(metrics_token, tokens.clone()),
    );
    let control =
        control::ControlClient::new(&sessions, ready, &url, auth::Token::new(&token), tokens)
            .map_err(state("reading the registration"))?;
    jobs.resume();
    tokio::spawn({
        let sessions = Arc::clone(&sessions);
        async move { sessions.reconcile().await }
    });
    let pool = tokio::spawn(Arc::clone(&sessions).run_pool(stop.clone()));
    let control = tokio::spawn(control::run(control, changed_jobs, stop.clone()));
    let inference = tokio::spawn(inference.run(stop.clone()));
    let audit_shipper = tokio::spawn(audit::ship(Arc::clone(&sessions), stop.clone()));
    let disk_watcher = tokio::spawn(Arc::clone(&sessions).watch_disk(stop.clone()));
    let session_timers = tokio::spawn(Arc::clone(&sessions).run_timers(stop.clone()));
    let job_timers = tokio::spawn(Arc::clone(&jobs).run_timers(stop.clone()));
    tracing::info!(%url, %node_id, "The worker is ready to serve.");
    listen::serve(bound, router, stop, connections)
        .await
        .map_err(state("serving"))?;
    drop(session_timers.await);
    drop(job_timers.await);
    drop(disk_watcher.await);
    drop(pool.await);
    drop(control.await);
    drop(inference.await);
    drop(audit_shipper.await);
    if end_sandboxes.load(Ordering::SeqCst) {
        jobs.stop_all().await;
        let ended = sessions.end_all("the worker was stopped").await;
        tracing::info!(ended, "Ended all sandboxes.");
        // Delete synchronously what would otherwise be deleted in the background.
        drop(sessions.empty_trash().await);
    }
    runtime.close().await;
    Ok(())
}

/// Copies the agent's binary into this worker's store under its hash: rebuilding it does not affect
/// a running worker, and sandboxes keep the binary that they started with.
fn store_agent(config: &Config) -> Result<PathBuf, Error> {
    let source = host::agent_binary(config).map_err(Error::Agent)?;
    let bytes = fs_err::read(&source).map_err(state("reading the agent's binary"))?;
    let directory = config
        .directory()
        .join("agents")
        .join(hex::encode(Sha256::digest(&bytes)));
    let path = directory.join("cynode-sba");
    remove_unused_agents(&config.directory().join("agents"), &directory);
    if !path.is_file() {
        let stored = fs_err::create_dir_all(&directory).and_then(|()| {
            let staged = directory.join(format!(".{}", uuid::Uuid::new_v4().simple()));
            fs_err::write(&staged, &bytes)?;
            // Executable by the sandbox's user, but not readable inside.
            fs_err::set_permissions(&staged, std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
            fs_err::rename(&staged, &path)
        });
        stored.map_err(state("storing the agent's binary"))?;
    }
    Ok(path)
}

/// Removes binaries that no sandbox links to.
fn remove_unused_agents(agents: &Path, current: &Path) {
    use std::os::unix::fs::MetadataExt as _;
    for entry in fs_err::read_dir(agents).into_iter().flatten().flatten() {
        let unused = fs_err::metadata(entry.path().join("cynode-sba"))
            .is_ok_and(|metadata| metadata.nlink() == 1);
        if unused && entry.path() != current {
            drop(fs_err::remove_dir_all(entry.path()));
        }
    }
}

/// The result of a cleanup.
#[derive(Clone, Copy, Debug, Default)]
pub struct CleanupReport {
    pub containers: usize,
}

impl std::fmt::Display for CleanupReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.containers {
            0 => f.write_str("nothing to remove"),
            1 => f.write_str("removed 1 container"),
            count => write!(f, "removed {count} containers"),
        }
    }
}

/// Removes everything that belongs to a state directory without a running worker.
pub async fn cleanup(config: &Config) -> Result<CleanupReport, Error> {
    if !config.directory().join("node.json").is_file() {
        return Ok(CleanupReport::default());
    }
    let locked = lock_state(config)?;
    let node_id = locked
        .journal
        .node_id()
        .map_err(state("reading the node's id"))?;
    let choice = host::choose(config).await.map_err(|report| {
        Error::Host(
            report
                .problems()
                .iter()
                .map(|check| check.detail.clone())
                .collect::<Vec<_>>()
                .join("; "),
        )
    })?;
    let runtime = engine(config, &choice);
    let containers = runtime
        .list(cynode_api::LABEL_NODE_ID, &node_id.to_string())
        .await?;
    for container in &containers {
        runtime.remove(&container.name).await?;
    }
    for id in locked
        .journal
        .sandboxes()
        .map_err(state("reading the journal"))?
    {
        locked
            .journal
            .discard(&locked.journal.sandbox_directory(id))
            .map_err(state("removing sockets"))?;
    }
    for mounted in locked
        .journal
        .mounts()
        .map_err(state("listing mounted disks"))?
    {
        disk::unmount(&mounted)
            .await
            .map_err(state("unmounting a disk"))?;
    }
    runtime.close().await;
    tree::remove(&locked.journal.trash()).map_err(state("emptying the trash"))?;
    Ok(CleanupReport {
        containers: containers.len(),
    })
}

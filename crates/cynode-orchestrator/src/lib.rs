//! The orchestrator: the user API, the control plane for nodes, and the reconcilers that drive work
//! to completion.
//!
//! One exec, from a caller to its node: `caller.rs` authenticates the caller, `api/sessions.rs`
//! handles the request, and `forward.rs` streams it to the Worker API of the node that
//! `db/sessions.rs` names, and the response back. The orchestrator keeps no state of its own:
//! several share one database, and any of them may die at any moment.
#![forbid(unsafe_code)]
#![recursion_limit = "256"]

mod api;
mod audit;
mod blobs;
mod budget;
mod caller;
mod checks;
mod config;
mod db;
mod egress;
mod fair_permits;
mod fleet;
mod forward;
mod gate;
mod git_workspaces;
mod held;
mod identity;
mod job_artifacts;
mod job_context;
mod job_results;
mod jobs;
mod keys;
mod mcp;
mod models;
mod names;
mod output;
mod placement;
mod policies;
mod promotions;
mod reconcile;
mod sessions;
mod shapes;
mod shorten;
mod signal;

use std::{path::Path, sync::Arc, time::Duration};

use cynode_service::{
    admin,
    files::{read_or_create_token, replace},
    listen::{self, ListenError},
    shutdown,
};
use time::OffsetDateTime;
use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinHandle,
    time::{timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

pub use api::openapi;
pub use config::Config;

use cynode_policy::{HeldSecrets, Scanner};

use crate::{
    audit::{
        AbandonedCalls, Audit, CallCloser, Checkpoints, EventCopier, EventPump, Failures,
        RoleAudit, Signer,
    },
    blobs::Blobs,
    db::Db,
    egress::GitEgress,
    fleet::Fleet,
    held::HeldCredentials,
    job_artifacts::Collector,
    keys::Keys,
    placement::Placement,
    policies::Policies,
    reconcile::{
        ExecReconciler, JobReconciler, Lanes, NodeReconciler, PromotionReconciler, Reachability,
        Retention, SessionReconciler, ShapeReconciler,
    },
    sessions::Sessions,
    shapes::ShapePolicies,
    signal::EventSignal,
};

/// The first user.
const ADMIN: &str = "admin";
/// How long each phase of shutdown waits for a database that does not answer. `up` kills an
/// orchestrator after all of them.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no database is configured. Remedy: set orchestrator.database_url or DATABASE_URL, or start everything with 'cynode up'"
    )]
    NoDatabase,
    #[error(
        "the other orchestrators of this database use a different key. Remedy: copy their key to {0} (orchestrator.key_file), or use another database"
    )]
    OtherKey(String),
    #[error(transparent)]
    Database(#[from] db::OpenError),
    #[error("{what}")]
    State {
        what: &'static str,
        source: std::io::Error,
    },
    #[error("{what}: {problem}")]
    Start {
        what: &'static str,
        problem: Box<cynode_api::Problem>,
    },
    #[error("the artifact store can't be opened: {0}")]
    Artifacts(String),
    #[error(transparent)]
    Listen(#[from] ListenError),
}

fn state(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::State { what, source }
}

fn start<E: Into<cynode_service::ApiError>>(what: &'static str) -> impl FnOnce(E) -> Error {
    move |error| Error::Start {
        what,
        problem: error.into().into_problem(),
    }
}

/// The shared state of an orchestrator. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Orchestrator(Arc<Inner>);

impl std::ops::Deref for Orchestrator {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) db: Db,
    pub(crate) identities: identity::IdentityCache,
    pub(crate) keys: Keys,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) blobs: Blobs,
    pub(crate) config: Arc<Config>,
    pub(crate) policies: Policies,
    /// Finds content that must not enter a sandbox: the system's secrets and credential shapes.
    pub(crate) scanner: Scanner,
    /// Finds the system's secrets only.
    pub(crate) system_scanner: Scanner,
    /// How credential shapes are treated, per channel and project.
    pub(crate) shapes: Arc<ShapePolicies>,
    pub(crate) audit: Audit,
    pub(crate) abandoned: AbandonedCalls,
    /// Failed authentications that are not recorded yet.
    pub(crate) failures: Failures,
    pub(crate) signer: Signer,
    pub(crate) placement: Placement,
    pub(crate) sessions: Sessions,
    /// Wakes the job reconciler.
    pub(crate) jobs_due: Arc<Notify>,
    /// Wakes the session reconciler.
    pub(crate) sessions_due: Arc<Notify>,
    /// Wakes the promotion reconciler.
    pub(crate) promotions_due: Arc<Notify>,
    /// The git role.
    pub(crate) egress: GitEgress,
    /// Keeps the credentials among the secrets that the scanners find.
    pub(crate) held: HeldCredentials,
    pub(crate) readers: EventSignal,
    /// Changes whenever policies may have changed.
    pub(crate) policy_news: watch::Sender<u64>,
    pub(crate) stop: CancellationToken,
    /// Cancelled once all calls are answered: the last audit records are written now.
    pub(crate) closing: CancellationToken,
}

/// Runs an orchestrator until it receives a signal to stop.
pub async fn run(config: Config) -> Result<(), Error> {
    let listener = listen::prepare(config.listen, &config.tls, config.insecure_listen)?;
    let control = listen::prepare(config.control_listen, &config.tls, config.insecure_listen)?;
    let url = config.database_url.clone().ok_or(Error::NoDatabase)?;
    let connections = config.max_connections;
    listen::raise_open_files();
    let directory = config.state_dir.join("orchestrator");
    fs_err::create_dir_all(&directory).map_err(state("creating the state directory"))?;
    let keys = Keys::open(&config.key_file()).map_err(state("reading the orchestrators' key"))?;
    let blobs = Blobs::open(&config).map_err(Error::Artifacts)?;
    let db = Db::open(&url, config.database_connections).await?;
    if !db
        .has_key(&keys.fingerprint())
        .await
        .map_err(start("comparing the orchestrators' keys"))?
    {
        return Err(Error::OtherKey(config.key_file().display().to_string()));
    }
    seed(&db, &config).await?;
    let metrics_token = admin::metrics_token(config.metrics_token_file.as_deref())
        .map_err(state("reading orchestrator.metrics_token_file"))?;

    let bound = listener.bind().await?;
    let control = control.bind().await?;
    let stop = shutdown::on_signals().map_err(state("watching signals"))?;
    let (url, control_url) = (bound.url(), control.url());
    replace(&directory.join("url"), url.as_bytes()).map_err(state("writing the address"))?;
    replace(&directory.join("control-url"), control_url.as_bytes())
        .map_err(state("writing the address"))?;
    let (jobs_due, sessions_due, promotions_due): (Arc<Notify>, Arc<Notify>, Arc<Notify>) =
        Default::default();
    let closing = CancellationToken::new();
    let policies = Policies::open(&db)
        .await
        .map_err(start("reading the policies"))?;
    let writer = format!("{}:{}", hostname(), std::process::id());
    let (audit, written) = Audit::open(&db, writer.clone(), closing.clone())
        .await
        .map_err(start("opening the audit trail"))?;
    let signing = cynode_audit::SigningKey::from_seed(keys.audit_seed());
    let lines = directory.join("audit-checkpoints.jsonl");
    let checkpoints = Checkpoints::open(signing, lines, config.audit_checkpoints)
        .map_err(state("reading the audit checkpoints"))?;
    let (abandoned, left) = AbandonedCalls::new();
    let own_secrets = held_secrets(&keys, &config);
    let scanner = Scanner::new(own_secrets.clone(), true);
    let held = HeldCredentials::new(keys.clone(), own_secrets, scanner.clone());
    held.refresh(&db)
        .await
        .map_err(start("reading the hashes of credentials"))?;
    let shapes = ShapePolicies::open(&db, &config.secret_shapes)
        .await
        .map_err(start("reading the settings for credential shapes"))?;
    let config = Arc::new(config);
    let listeners = egress::socket_addresses([&url, &control_url]);
    let egress = GitEgress::new(db.clone(), Arc::clone(&config), listeners);
    let fleet = Arc::new(Fleet::new(keys.clone(), config.tls.ca.clone()));
    let (pump, readers) = (EventPump::new(), EventSignal::new());
    let signer = Signer {
        db: db.clone(),
        audit: audit.clone(),
        pump: pump.clone(),
        checkpoints,
    };
    let placement = Placement {
        db: db.clone(),
        fleet: Arc::clone(&fleet),
        config: Arc::clone(&config),
    };
    let sessions = Sessions {
        db: db.clone(),
        fleet: Arc::clone(&fleet),
        config: Arc::clone(&config),
        execs: ExecReconciler {
            db: db.clone(),
            fleet: Arc::clone(&fleet),
            audit: audit.clone(),
        },
        due: Arc::clone(&sessions_due),
        readers: readers.clone(),
    };
    let orchestrator = Orchestrator(Arc::new(Inner {
        identities: identity::IdentityCache::default(),
        db,
        fleet,
        keys,
        blobs,
        config,
        placement,
        sessions,
        jobs_due,
        sessions_due,
        promotions_due,
        egress,
        held,
        readers,
        policy_news: watch::Sender::new(0),
        policies,
        system_scanner: scanner.system_only(),
        scanner,
        shapes: Arc::new(shapes),
        audit,
        abandoned,
        failures: Failures::default(),
        signer,
        stop: stop.clone(),
        closing: closing.clone(),
    }));
    let last = orchestrator.clone();
    let mut closers = spawn_closers(&orchestrator, left, writer);
    let reconcilers = spawn_reconcilers(&orchestrator);
    let readiness: admin::Readiness = {
        let (db, blobs, heads) = (
            orchestrator.db.clone(),
            orchestrator.blobs.clone(),
            orchestrator.audit.heads.clone(),
        );
        Arc::new(move || {
            let (db, blobs, heads) = (db.clone(), blobs.clone(), heads.clone());
            Box::pin(async move {
                tokio::time::timeout(Duration::from_secs(5), db.ping())
                    .await
                    .unwrap_or_else(|_| Err("the database does not answer".to_owned()))?;
                if let Some(age) = heads.overdue() {
                    return Err(format!(
                        "audit records have been unsigned for {} s; run 'cynode audit verify'",
                        age.as_secs()
                    ));
                }
                blobs.check_room().map_err(|error| error.to_string())
            })
        })
    };
    let metrics = identity::metrics_reader(&orchestrator, metrics_token);
    let user_routes = api::router(
        orchestrator.clone(),
        Arc::clone(&readiness),
        Arc::clone(&metrics),
    );
    let control_routes = api::control_router(orchestrator, readiness, metrics);
    tracing::info!(%url, control = %control_url, "The orchestrator is listening.");
    let (served, controlled) = tokio::join!(
        listen::serve(bound, user_routes, stop.clone(), connections),
        listen::serve(control, control_routes, stop.clone(), connections)
    );
    served.and(controlled).map_err(state("serving"))?;
    // A round may wait for a database that does not answer. Any round can be repeated, so it can
    // be aborted.
    finish(reconcilers, SHUTDOWN_TIMEOUT).await;
    for body in last.failures.rest() {
        last.audit.enqueue_detached(body);
    }
    // All calls are answered: flush the audit trail and sign it.
    closing.cancel();
    closers.push(written);
    finish(closers, SHUTDOWN_TIMEOUT).await;
    match timeout(SHUTDOWN_TIMEOUT, last.signer.sign_once()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(%error, "The last audit records are not signed; the next orchestrator signs them.");
        }
        Err(_) => {
            tracing::debug!(
                "The database does not answer; the next orchestrator signs the last audit records."
            );
        }
    }
    Ok(())
}

/// Waits for tasks to end, and aborts those that take longer.
async fn finish(tasks: Vec<JoinHandle<()>>, patience: Duration) {
    let deadline = tokio::time::Instant::now() + patience;
    for mut task in tasks {
        if timeout_at(deadline, &mut task).await.is_err() {
            task.abort();
        }
    }
}

/// Starts the tasks that write and sign the audit trail until all calls are answered.
fn spawn_closers(
    orchestrator: &Orchestrator,
    left: mpsc::UnboundedReceiver<db::OpenCallRow>,
    writer: String,
) -> Vec<JoinHandle<()>> {
    let Inner {
        signer,
        audit,
        db,
        readers,
        failures,
        closing,
        ..
    } = &*orchestrator.0;
    let copier = EventCopier {
        db: db.clone(),
        pump: signer.pump.clone(),
        heads: audit.heads.clone(),
        writer,
    };
    vec![
        tokio::spawn(signer.clone().run(closing.clone())),
        tokio::spawn(copier.run(readers.subscribe(), closing.clone())),
        tokio::spawn(call_closer(orchestrator).follow_abandoned(left, closing.clone())),
        tokio::spawn(audit::keep_failures(
            failures.clone(),
            audit.clone(),
            closing.clone(),
        )),
    ]
}

fn call_closer(orchestrator: &Orchestrator) -> CallCloser {
    CallCloser {
        db: orchestrator.db.clone(),
        fleet: Arc::clone(&orchestrator.fleet),
        audit: orchestrator.audit.clone(),
        pump: orchestrator.signer.pump.clone(),
    }
}

/// Starts the reconcilers. They end when the orchestrator stops.
fn spawn_reconcilers(orchestrator: &Orchestrator) -> Vec<JoinHandle<()>> {
    let Inner {
        db,
        audit,
        fleet,
        config,
        blobs,
        placement,
        sessions,
        signer,
        shapes,
        readers,
        jobs_due,
        sessions_due,
        promotions_due,
        egress,
        held,
        policy_news,
        stop,
        ..
    } = &*orchestrator.0;
    let collector = Collector::new(db.clone(), Arc::clone(fleet), blobs.clone());
    let jobs = JobReconciler {
        db: db.clone(),
        fleet: Arc::clone(fleet),
        collector: collector.clone(),
        config: Arc::clone(config),
        placement: placement.clone(),
        lanes: Lanes::new(128, 16, Arc::clone(jobs_due)),
        readers: readers.clone(),
    };
    let session_reconciler = SessionReconciler {
        db: db.clone(),
        fleet: Arc::clone(fleet),
        config: Arc::clone(config),
        sessions: sessions.clone(),
        lanes: Lanes::new(128, 32, Arc::clone(sessions_due)),
        observer_lanes: Lanes::new(128, 1, Arc::default()),
    };
    let nodes = NodeReconciler {
        db: db.clone(),
        fleet: Arc::clone(fleet),
        collector,
        config: Arc::clone(config),
        lanes: Lanes::new(64, 4, Arc::default()),
        jobs_due: Arc::clone(jobs_due),
        sessions_due: Arc::clone(sessions_due),
    };
    let reach = Reachability {
        db: db.clone(),
        fleet: Arc::clone(fleet),
        config: Arc::clone(config),
    };
    let shapes = ShapeReconciler {
        db: db.clone(),
        shapes: Arc::clone(shapes),
    };
    let retention = Retention {
        db: db.clone(),
        blobs: blobs.clone(),
        config: Arc::clone(config),
        signer: signer.clone(),
    };
    let promotions = PromotionReconciler {
        orchestrator: orchestrator.clone(),
        lanes: Lanes::new(16, 16, Arc::clone(promotions_due)),
    };
    let role_audit = RoleAudit::new(db.clone(), audit.clone(), egress.clone());
    let never = Arc::<Notify>::default;
    vec![
        reconcile::spawn(jobs, Arc::clone(jobs_due), stop.clone()),
        reconcile::spawn(session_reconciler, Arc::clone(sessions_due), stop.clone()),
        reconcile::spawn(promotions, Arc::clone(promotions_due), stop.clone()),
        reconcile::spawn(nodes, never(), stop.clone()),
        reconcile::spawn(reach, never(), stop.clone()),
        reconcile::spawn(sessions.execs.clone(), never(), stop.clone()),
        reconcile::spawn(call_closer(orchestrator), never(), stop.clone()),
        reconcile::spawn(shapes, never(), stop.clone()),
        reconcile::spawn(retention, never(), stop.clone()),
        tokio::spawn(reconcile::listen(
            db.clone(),
            readers.clone(),
            policy_news.clone(),
            stop.clone(),
        )),
        tokio::spawn(egress.clone().follow(stop.clone())),
        tokio::spawn(role_audit.run(stop.clone())),
        tokio::spawn(held.clone().follow(db.clone(), stop.clone())),
        tokio::spawn(orchestrator.policies.clone().follow(
            db.clone(),
            policy_news.subscribe(),
            stop.clone(),
        )),
    ]
}

fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// Secrets of this process that must never enter a sandbox. Tokens are recognized by their shape.
fn held_secrets(keys: &Keys, config: &Config) -> HeldSecrets {
    let mut held = HeldSecrets::new(keys.secrets_seed());
    let password = config
        .database_url
        .as_deref()
        .and_then(|url| reqwest::Url::parse(url).ok())
        .and_then(|url| url.password().map(str::to_owned));
    let environment = |name: &str| std::env::var(name).ok();
    for (what, secret) in [
        ("the database's password", password),
        ("the database's password", environment("PGPASSWORD")),
        (
            "the key of the artifact store",
            environment("AWS_SECRET_ACCESS_KEY"),
        ),
        (
            "the token of the artifact store",
            environment("AWS_SESSION_TOKEN"),
        ),
        (
            "the token for the metrics",
            config
                .metrics_token_file
                .as_ref()
                .and_then(|path| Some(fs_err::read_to_string(path).ok()?.trim().to_owned())),
        ),
    ] {
        if let Some(secret) = secret.filter(|secret| !secret.is_empty())
            && !held.add(what, secret.as_bytes())
        {
            tracing::warn!(
                what,
                "A secret is too short to be recognized: it can enter sandboxes."
            );
        }
    }
    held
}

/// Creates what the first call depends on: the administrator, the registration key, and the
/// settings with defaults.
async fn seed(db: &Db, config: &Config) -> Result<(), Error> {
    let token = read_or_create_token(&config.state_dir.join("admin.token"))
        .map_err(state("reading the administrator's token"))?;
    let expires_at = OffsetDateTime::now_utc() + Duration::from_secs(cynode_api::MAX_TOKEN_SECONDS);
    db.ensure_admin(ADMIN, &caller::hash(&token), expires_at)
        .await
        .map_err(start("creating the administrator"))?;
    if let Some(path) = &config.registration_key_file {
        let key = registration_key(path)?;
        db.insert_node_key(&caller::hash(&key), true, "system", None)
            .await
            .map_err(start("creating the registration key"))?;
    }
    db.seed_setting(
        cynode_api::DEFAULT_IMAGE_KEY,
        &config.default_image.clone().into(),
    )
    .await
    .map_err(start("setting the default image"))?;
    db.seed_setting(cynode_api::ALLOW_PM_IMAGES, &false.into())
        .await
        .map_err(start("setting whether agents may add images"))
}

fn registration_key(path: &Path) -> Result<String, Error> {
    read_or_create_token(path).map_err(state("reading the registration key"))
}

//! The orchestrator: the user API, the control plane for nodes, and the reconcilers that bring work to its end.
//!
//! One exec, from a caller to its node: `caller.rs` finds out who calls, `api/sessions.rs` takes the request, `forward.rs` streams
//! it to the Worker API of the node that `db/sessions.rs` names, and the answer back. It keeps nothing: two orchestrators on one
//! database share the work, and either can die at any moment.
#![forbid(unsafe_code)]
#![recursion_limit = "256"]

mod api;
mod audit;
mod blobs;
mod budget;
mod caller;
mod config;
mod db;
mod fleet;
mod forward;
mod gate;
mod jobs;
mod keys;
mod known;
mod mcp;
mod output;
mod placement;
mod policies;
mod reconcile;
mod sessions;
mod shapes;
mod turns;

use std::{path::Path, sync::Arc, time::Duration};

use cynode_service::{
    admin,
    files::{read_or_create_token, replace},
    listen::{self, ListenError, Tls},
    shutdown,
};
use time::OffsetDateTime;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

pub use api::openapi;
pub use config::{Config, TlsFiles};

use cynode_policy::{Held, Scanner};

use crate::{
    audit::{Abandoned, Audit, Checkpoints, Failures, Pump},
    blobs::Blobs,
    db::Db,
    fleet::Fleet,
    keys::Keys,
    policies::Policies,
    reconcile::Lanes,
    shapes::ShapePolicies,
};

/// The first user.
const ADMIN: &str = "admin";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no database is named. Remedy: set orchestrator.database_url or DATABASE_URL, or start everything with 'cynode up'"
    )]
    NoDatabase,
    #[error(
        "the orchestrators of this database have another key. Remedy: copy theirs to {0} (orchestrator.key_file), or name another database"
    )]
    OtherKey(String),
    #[error(transparent)]
    Database(#[from] db::Error),
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
    #[error("where artifacts are kept can't be used: {0}")]
    Artifacts(String),
    #[error(transparent)]
    Listen(#[from] ListenError),
}

fn state(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::State { what, source }
}

fn start(what: &'static str) -> impl FnOnce(cynode_service::ApiError) -> Error {
    move |error| Error::Start {
        what,
        problem: error.0,
    }
}

/// What every part of it has. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Orchestrator(Arc<Parts>);

impl std::ops::Deref for Orchestrator {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) db: Db,
    pub(crate) known: known::Known,
    pub(crate) keys: Keys,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) blobs: Blobs,
    pub(crate) config: Arc<Config>,
    pub(crate) policies: Policies,
    /// What must not enter a sandbox: secrets of the system, and shapes of others'.
    pub(crate) scanner: Scanner,
    /// Secrets of the system alone.
    pub(crate) system_scanner: Scanner,
    /// Where shapes are refused, flagged or ignored.
    pub(crate) shapes: ShapePolicies,
    pub(crate) audit: Audit,
    pub(crate) abandoned: Abandoned,
    /// Tokens that were not good, and are not recorded yet.
    pub(crate) failures: Failures,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) pump: Pump,
    /// Room for what reconcilers do on nodes.
    pub(crate) job_lanes: Lanes,
    pub(crate) session_lanes: Lanes,
    pub(crate) observer_lanes: Lanes,
    pub(crate) leftover_lanes: Lanes,
    /// Jobs wait to be brought forward.
    pub(crate) jobs_wait: Arc<Notify>,
    /// Sessions do.
    pub(crate) sessions_wait: Arc<Notify>,
    /// Rises whenever there may be new events.
    pub(crate) news: watch::Sender<u64>,
    /// Rises whenever policies may have changed.
    pub(crate) policy_news: watch::Sender<u64>,
    pub(crate) stop: CancellationToken,
    /// All calls have been answered: what is written until the end is written now.
    pub(crate) closing: CancellationToken,
}

/// Runs an orchestrator until it is told to stop.
pub async fn run(config: Config) -> Result<(), Error> {
    let tls = Tls {
        cert: config.tls.cert.clone(),
        key: config.tls.key.clone(),
        ca: config.tls.ca.clone(),
        insecure: config.insecure_listen,
    };
    let listener = listen::prepare(config.listen, &tls)?;
    let control = listen::prepare(config.control_listen, &tls)?;
    let url = config.database_url.clone().ok_or(Error::NoDatabase)?;
    let connections = config.max_connections;
    listen::raise_open_files();
    let directory = config.state_dir.join("orchestrator");
    fs_err::create_dir_all(&directory).map_err(state("making the state directory"))?;
    let keys = Keys::open(&config.key_file()).map_err(state("reading the orchestrators' key"))?;
    let blobs = Blobs::open(&config).map_err(Error::Artifacts)?;
    let db = Db::open(&url, config.database_connections).await?;
    if !db
        .has_key(&keys.fingerprint())
        .await
        .map_err(start("comparing keys"))?
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
    let (jobs_wait, sessions_wait): (Arc<Notify>, Arc<Notify>) = Default::default();
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
        .map_err(state("reading the checkpoints of the audit trail"))?;
    let (abandoned, left) = Abandoned::new();
    let scanner = Scanner::new(held(&keys, &config), true);
    let shapes = ShapePolicies::open(&db, &config.secret_shapes)
        .await
        .map_err(start("reading how shapes of secrets are treated"))?;
    let orchestrator = Orchestrator(Arc::new(Parts {
        known: known::Known::default(),
        job_lanes: Lanes::new(128, 16, Arc::clone(&jobs_wait)),
        session_lanes: Lanes::new(128, 32, Arc::clone(&sessions_wait)),
        observer_lanes: Lanes::new(128, 1, Arc::default()),
        leftover_lanes: Lanes::new(64, 4, Arc::default()),
        db,
        fleet: Arc::new(Fleet::new(keys.clone(), config.tls.ca.clone())),
        keys,
        blobs,
        config: Arc::new(config),
        jobs_wait,
        sessions_wait,
        news: watch::Sender::new(0),
        policy_news: watch::Sender::new(0),
        policies,
        system_scanner: scanner.of_the_system(),
        scanner,
        shapes,
        audit,
        abandoned,
        failures: Failures::default(),
        checkpoints,
        pump: Pump::new(),
        stop: stop.clone(),
        closing: closing.clone(),
    }));
    let last = orchestrator.clone();
    let closers = vec![
        tokio::spawn(audit::keep_checkpoints(orchestrator.clone())),
        tokio::spawn(Pump::run(orchestrator.clone(), writer)),
        tokio::spawn(audit::follow_abandoned(orchestrator.clone(), left)),
        tokio::spawn(audit::keep_failures(orchestrator.clone())),
    ];
    let reconcilers = reconcile::spawn(&orchestrator);
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
                        "records of the audit trail have not been signed for {} s: 'cynode audit verify' says more",
                        age.as_secs()
                    ));
                }
                blobs.check_room().map_err(|error| error.0.detail)
            })
        })
    };
    let metrics = caller::metrics_reader(&orchestrator, metrics_token);
    let user_routes = api::router(
        orchestrator.clone(),
        Arc::clone(&readiness),
        Arc::clone(&metrics),
    );
    let control_routes = api::control_router(orchestrator, readiness, metrics);
    tracing::info!(%url, control = %control_url, "The orchestrator serves.");
    let (served, controlled) = tokio::join!(
        listen::serve(bound, user_routes, stop.clone(), connections),
        listen::serve(control, control_routes, stop.clone(), connections)
    );
    served.and(controlled).map_err(state("serving"))?;
    for task in reconcilers {
        drop(task.await);
    }
    for body in last.failures.rest() {
        last.audit.tell(body);
    }
    // Every call is answered: what is not written yet is written, and then signed.
    closing.cancel();
    drop(written.await);
    for task in closers {
        drop(task.await);
    }
    if let Err(error) = audit::sign_once(&last).await {
        tracing::debug!(error = %error.0, "The last records are signed by whoever comes next.");
    }
    Ok(())
}

fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// What this process holds and must never be in a sandbox. Tokens are known by their shape.
fn held(keys: &Keys, config: &Config) -> Held {
    let mut held = Held::new(keys.secrets_seed());
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
                "A secret is too short to be known again: it is not kept out of sandboxes."
            );
        }
    }
    held
}

/// What must be there before the first call: the administrator, the keys of nodes, the settings that have defaults.
async fn seed(db: &Db, config: &Config) -> Result<(), Error> {
    let token = read_or_create_token(&config.state_dir.join("admin.token"))
        .map_err(state("reading the administrator's token"))?;
    let expires_at = OffsetDateTime::now_utc() + Duration::from_secs(cynode_api::MAX_TOKEN_SECONDS);
    db.ensure_admin(ADMIN, &caller::hash(&token), expires_at)
        .await
        .map_err(start("making the administrator"))?;
    if let Some(path) = &config.registration_key_file {
        let key = registration_key(path)?;
        db.insert_node_key(&caller::hash(&key), true, "system", None)
            .await
            .map_err(start("making the key for nodes"))?;
    }
    db.seed_setting(
        cynode_api::DEFAULT_IMAGE_KEY,
        &config.default_image.clone().into(),
    )
    .await
    .map_err(start("setting the default image"))?;
    db.seed_setting(cynode_api::ALLOW_PM_IMAGES, &false.into())
        .await
        .map_err(start("setting what agents may add"))
}

fn registration_key(path: &Path) -> Result<String, Error> {
    read_or_create_token(path).map_err(state("reading the key for nodes"))
}

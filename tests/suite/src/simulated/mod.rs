//! A simulated node: the Worker API in this process, with faults that a real worker can't be made
//! to show on demand. `tests/all/contract.rs` checks that it behaves like the real one.

mod files;
mod jobs;
mod node;
mod patches;
mod run;
mod sessions;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use anyhow::Result;
use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Request, State as FromState},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use cynode_api::{
    API_VERSION, Call, Capability, ErrorCode, ExecRequest, JobId, JobRun, LABEL_AGENT_COMPATIBLE,
    LargestLimits, LimitsRequest, LocalImage, NodeConfig, NodeId, Session, SessionCreate,
    SessionId, TaskId, WorkspaceId,
};
use cynode_client::SessionClient;
use cynode_service::{
    ApiError, admin,
    auth::{self, Token, Tokens},
    edge,
};
use cynode_worker::calls::{self, Calls};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use sha2::{Digest as _, Sha256};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tower::ServiceExt as _;

pub use patches::ReceivedPatch;
use run::{Files, Run};

/// A fault injected into a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call has no effect and no response until the faults are cleared; then the connection
    /// breaks.
    Hang,
    /// The connection breaks before the call takes effect.
    DropBefore,
    /// The call takes effect, and the connection breaks before the response.
    DropAfter,
    /// The call is refused with this code and has no effect.
    Refuse(ErrorCode),
    /// The call is delayed.
    Slow(Duration),
}

#[derive(Clone, Debug)]
struct PlannedFault {
    call: String,
    times: usize,
    fault: Fault,
}

#[derive(Debug)]
struct SessionEntry {
    request: SessionCreate,
    session: Session,
    execs: Vec<(ExecRequest, Arc<Run>)>,
}

#[derive(Debug)]
struct JobEntry {
    /// `None` if the job was stopped before its request arrived.
    request: Option<JobRun>,
    job: cynode_api::Job,
    run: Option<Arc<Run>>,
    stopped: bool,
}

/// The state that a real node would keep on disk.
#[derive(Debug, Default)]
struct Disk {
    sessions: BTreeMap<SessionId, SessionEntry>,
    workspaces: BTreeMap<WorkspaceId, (TaskId, Files)>,
    jobs: BTreeMap<JobId, JobEntry>,
}

/// The credentials that the orchestrator issued.
#[derive(Clone, Debug, Default)]
struct Registration {
    node_token: String,
    worker_token: String,
    previous_worker_token: Option<String>,
}

#[derive(Debug)]
struct Shared {
    node_id: NodeId,
    name: String,
    address: SocketAddr,
    own_token: String,
    tokens: Tokens,
    images: Vec<LocalImage>,
    state: Mutex<Disk>,
    /// Incremented at every change of a job.
    changed: watch::Sender<u64>,
    job_updates: mpsc::UnboundedSender<JobId>,
    /// Durations of the `sleep` commands that end immediately.
    finished_sleeps: watch::Sender<BTreeSet<String>>,
    holds_creates: watch::Sender<bool>,
    cut_off: watch::Sender<bool>,
    faults: watch::Sender<Vec<PlannedFault>>,
    calls: Mutex<Vec<String>>,
    /// Calls with an id, and their outcomes.
    remembered: Mutex<Arc<Calls>>,
    started: Mutex<Vec<JobId>>,
    /// The newest version of encoded patches that the node reads; 0 for diffs only.
    encoded_patches: Mutex<u32>,
    patches: Mutex<Vec<ReceivedPatch>>,
    registration: Mutex<Registration>,
    config: Mutex<NodeConfig>,
}

/// A simulated worker. Dropping it ends its listener and its heartbeats.
#[derive(Debug)]
pub struct SimulatedWorker {
    shared: Arc<Shared>,
    job_updates: Mutex<Option<mpsc::UnboundedReceiver<JobId>>>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl SimulatedWorker {
    /// Starts a node with these images. Images whose names contain "unlabelled" can't run sessions.
    pub async fn start(name: &str, images: &[&str]) -> Result<Self> {
        // Installed once per process; a second call has no effect.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let own_token = format!("simulated-{}", uuid::Uuid::new_v4());
        let (job_updates, update_receiver) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            node_id: NodeId::generate(),
            name: name.to_owned(),
            address: listener.local_addr()?,
            tokens: Tokens::new(vec![Token::new(&own_token)]),
            own_token,
            images: images.iter().map(|name| image(name)).collect(),
            state: Mutex::default(),
            changed: watch::Sender::new(0),
            job_updates,
            finished_sleeps: watch::Sender::default(),
            holds_creates: watch::Sender::new(false),
            cut_off: watch::Sender::new(false),
            faults: watch::Sender::new(Vec::new()),
            calls: Mutex::default(),
            remembered: Mutex::default(),
            started: Mutex::default(),
            encoded_patches: Mutex::new(cynode_patch::WIRE_VERSION),
            patches: Mutex::default(),
            registration: Mutex::default(),
            config: Mutex::new(NodeConfig {
                heartbeat_seconds: 1,
                ..NodeConfig::default()
            }),
        });
        let serving = tokio::spawn(serve(listener, Arc::clone(&shared)));
        Ok(Self {
            shared,
            job_updates: Mutex::new(Some(update_receiver)),
            tasks: Mutex::new(vec![serving]),
        })
    }

    #[must_use]
    pub fn node_id(&self) -> NodeId {
        self.shared.node_id
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.shared.address)
    }

    /// A client of the Worker API with the node's own token.
    pub fn client(&self) -> Result<SessionClient> {
        Ok(SessionClient::new(&self.url(), &self.shared.own_token)?)
    }

    /// Injects a fault into the next `times` calls whose method and path contain this text. Faults
    /// planned first apply first.
    pub fn plan(&self, call: &str, times: usize, fault: Fault) {
        self.shared.faults.send_modify(|planned| {
            planned.push(PlannedFault {
                call: call.to_owned(),
                times,
                fault,
            });
        });
    }

    /// Removes all planned faults and breaks the calls that hang.
    pub fn clear_faults(&self) {
        self.shared.faults.send_replace(Vec::new());
    }

    /// Disconnects the node from everybody, or connects it again. Its work goes on meanwhile.
    pub fn cut_off(&self, cut: bool) {
        self.shared.cut_off.send_replace(cut);
    }

    /// Keeps new sessions in the state `creating`, or lets them proceed.
    pub fn hold_creates(&self, hold: bool) {
        self.shared.holds_creates.send_replace(hold);
    }

    /// Ends every current and future `sleep` of this duration.
    pub fn finish_sleeps(&self, seconds: u32) {
        self.shared
            .finished_sleeps
            .send_modify(|finished_sleeps| finished_sleeps.extend([seconds.to_string()]));
    }

    /// Simulates the loss of the disk.
    pub fn lose_disk(&self) {
        let state = std::mem::take(&mut *self.shared.state());
        let runs = state.jobs.into_values().filter_map(|job| job.run).chain(
            state
                .sessions
                .into_values()
                .flat_map(|entry| entry.execs)
                .map(|(_, run)| run),
        );
        for run in runs {
            run.kill(cynode_api::SignalName::KILL);
        }
    }

    /// Simulates a restart of the process: the memory of calls is lost.
    pub fn lose_call_memory(&self) {
        *self.shared.remembered.lock().expect("not poisoned") = Arc::default();
    }

    /// The calls received so far, as `METHOD /path`.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.shared.calls.lock().expect("not poisoned").clone()
    }

    /// Makes the node behave like an earlier version, which reads strict diffs only. Must precede
    /// the registration.
    pub fn read_diffs_only(&self) {
        *self.shared.encoded_patches.lock().expect("not poisoned") = 0;
    }

    /// The patches received so far.
    #[must_use]
    pub fn patches(&self) -> Vec<ReceivedPatch> {
        self.shared.patches.lock().expect("not poisoned").clone()
    }

    /// The number of times that a job's command was started.
    #[must_use]
    pub fn starts(&self, id: JobId) -> usize {
        self.shared
            .started
            .lock()
            .expect("not poisoned")
            .iter()
            .filter(|started| **started == id)
            .count()
    }

    /// All sessions, including ended ones.
    #[must_use]
    pub fn sessions(&self) -> Vec<Session> {
        self.shared
            .state()
            .sessions
            .values()
            .map(SessionEntry::object)
            .collect()
    }

    /// The node's token at the control plane, and the token that orchestrators present to the node.
    #[must_use]
    pub fn tokens(&self) -> (String, String) {
        let registration = self.shared.registration.lock().expect("not poisoned");
        (
            registration.node_token.clone(),
            registration.worker_token.clone(),
        )
    }

    /// The configuration in effect.
    #[must_use]
    pub fn config(&self) -> NodeConfig {
        self.shared.config.lock().expect("not poisoned").clone()
    }
}

impl Drop for SimulatedWorker {
    fn drop(&mut self) {
        for task in self.tasks.get_mut().expect("not poisoned") {
            task.abort();
        }
    }
}

/// The largest limits of one sandbox: a machine with 8 GiB, one of them reserved,
/// and a disk of 64 GiB.
pub const LARGEST_LIMITS: LargestLimits = LargestLimits {
    memory_bytes: 7 << 30,
    cpus: 2.0,
    pids: 4_096,
    disk_bytes: Some(64 << 30),
};
/// The memory of two hundred default sandboxes.
pub const PROMISED_MEMORY_BYTES: u64 = 200 * (2 << 30);

/// Refuses limits that exceed the machine.
fn check_limits(requested: Option<LimitsRequest>) -> Result<(), ApiError> {
    let requested = requested.unwrap_or_default();
    cynode_service::checks::check_limits(&requested)?;
    match LARGEST_LIMITS.requested_excess(requested) {
        Some(excess) => Err(ApiError::new(
            ErrorCode::LimitUnenforceable,
            format!(
                "limits.{}: this node gives a sandbox at most {}",
                excess.limit, excess.max
            ),
        )),
        None => Ok(()),
    }
}

fn image(name: &str) -> LocalImage {
    let marked = !name.contains("unlabelled");
    let labels = marked
        .then(|| (LABEL_AGENT_COMPATIBLE.to_owned(), "true".to_owned()))
        .into_iter()
        .collect();
    LocalImage {
        reference: name.to_owned(),
        digest: format!("sha256:{}", hex::encode(Sha256::digest(name))),
        labels,
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, Disk> {
        self.state.lock().expect("not poisoned")
    }

    fn capability(&self) -> Capability {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let encoded_patches = *self.encoded_patches.lock().expect("not poisoned");
        Capability {
            version,
            encoded_patches: Some(encoded_patches).filter(|version| *version > 0),
            engine: "simulated".to_owned(),
            cpus: 2,
            memory_bytes: 8 << 30,
            max_sandboxes: 200,
            largest: Some(LARGEST_LIMITS),
            promised_memory_bytes: Some(PROMISED_MEMORY_BYTES),
            images: self.images.clone(),
            ..Default::default()
        }
    }

    fn image(&self, reference: &str) -> Result<&LocalImage, ApiError> {
        let default = self
            .config
            .lock()
            .expect("not poisoned")
            .default_image
            .clone();
        let wanted = if reference == "default" {
            default.unwrap_or_else(|| crate::IMAGE.to_owned())
        } else {
            reference.to_owned()
        };
        let found = self.images.iter().find(|image| image.reference == wanted);
        found.ok_or_else(|| {
            ApiError::new(
                ErrorCode::ImageNotFound,
                format!("the image {wanted} is not on this node"),
            )
        })
    }

    fn remembered(&self) -> Arc<Calls> {
        Arc::clone(&self.remembered.lock().expect("not poisoned"))
    }

    /// Takes the next fault planned for a call.
    fn fault(&self, call: &str) -> Option<Fault> {
        let mut found = None;
        self.faults.send_if_modified(|planned| {
            if let Some(first) = planned
                .iter_mut()
                .find(|planned| planned.times > 0 && call.contains(&planned.call))
            {
                found = Some(first.fault);
                first.times -= 1;
            }
            false
        });
        found
    }
}

fn check_version(version: Option<u32>) -> Result<(), ApiError> {
    match version {
        None | Some(API_VERSION) => Ok(()),
        Some(other) => Err(ApiError::new(
            ErrorCode::UnsupportedVersion,
            format!("version {other} is unknown here"),
        )),
    }
}

/// Parses an id from a path. An invalid UUID is treated as an unknown id.
fn id<T: std::str::FromStr>(text: &str, missing: ErrorCode) -> Result<T, ApiError> {
    text.parse()
        .map_err(|_| ApiError::new(missing, "this is not an id"))
}

fn router(shared: &Arc<Shared>) -> Router {
    sessions::routes()
        .merge(jobs::routes())
        .route("/v1/worker/calls/{id}", get(show_call))
        .route("/v1/worker/calls/{id}/bar", post(bar_call))
        .layer(middleware::from_fn_with_state(Arc::clone(shared), remember))
        .layer(middleware::from_fn_with_state(
            shared.tokens.clone(),
            auth::require,
        ))
        .merge(admin::routes(
            Arc::new(|| Box::pin(std::future::ready(Ok(())))),
            admin::by_tokens(None, shared.tokens.clone()),
        ))
        .fallback(edge::not_found)
        .method_not_allowed_fallback(edge::method_not_allowed)
        .layer(middleware::from_fn(edge::request_id))
        .with_state(Arc::clone(shared))
}

async fn remember(
    FromState(shared): FromState<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let calls = shared.remembered();
    calls::remember(FromState(calls), request, next).await
}

async fn show_call(
    FromState(shared): FromState<Arc<Shared>>,
    Path(text): Path<String>,
) -> Result<Json<Call>, ApiError> {
    Ok(Json(
        shared.remembered().get(id(&text, ErrorCode::NotFound)?),
    ))
}

async fn bar_call(
    FromState(shared): FromState<Arc<Shared>>,
    Path(text): Path<String>,
) -> Result<Json<Call>, ApiError> {
    Ok(Json(
        shared.remembered().bar(id(&text, ErrorCode::NotFound)?),
    ))
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let router = router(&shared);
    while let Ok((stream, _)) = listener.accept().await {
        let (router, shared) = (router.clone(), Arc::clone(&shared));
        tokio::spawn(async move {
            let mut cut_off = shared.cut_off.subscribe();
            tokio::select! {
                () = serve_connection(stream, router, &shared) => {}
                _ = cut_off.wait_for(|cut| *cut) => {}
            }
        });
    }
}

async fn serve_connection(stream: TcpStream, router: Router, shared: &Arc<Shared>) {
    // An error here closes the connection without a response.
    let service = service_fn(|request: http::Request<hyper::body::Incoming>| {
        let (router, shared) = (router.clone(), Arc::clone(shared));
        async move {
            respond(&shared, router, request.map(Body::new))
                .await
                .ok_or_else(|| std::io::Error::other("the connection breaks"))
        }
    });
    drop(
        http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .await,
    );
}

async fn respond(shared: &Shared, router: Router, request: Request) -> Option<Response> {
    let call = format!("{} {}", request.method(), request.uri().path());
    shared
        .calls
        .lock()
        .expect("not poisoned")
        .push(call.clone());
    let served = async || {
        router
            .oneshot(request)
            .await
            .unwrap_or_else(|never| match never {})
    };
    match shared.fault(&call) {
        None => Some(served().await),
        Some(Fault::Slow(duration)) => {
            tokio::time::sleep(duration).await;
            Some(served().await)
        }
        Some(Fault::Refuse(code)) => Some(ApiError::new(code, "a planned fault").into_response()),
        Some(Fault::DropBefore) => None,
        Some(Fault::DropAfter) => {
            drop(served().await);
            None
        }
        Some(Fault::Hang) => {
            drop(shared.faults.subscribe().wait_for(Vec::is_empty).await);
            None
        }
    }
}

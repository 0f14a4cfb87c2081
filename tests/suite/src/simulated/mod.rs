//! A node that is played: the Worker API as orchestrators use it, in this process, with faults that a real worker can't be made
//! to show at will. `tests/all/contract.rs` holds it to what the real one does.

mod files;
mod jobs;
mod node;
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
use cynode_client::WorkerClient;
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

use run::{Files, Run};

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done and no answer comes until the node is mended; then the connection breaks.
    Hang,
    /// The connection breaks before anything is done.
    DropBefore,
    /// It is done, and the connection breaks before the answer.
    DropAfter,
    /// It is refused with this code, and nothing is done.
    Refuse(ErrorCode),
    /// It is done after a while.
    Slow(Duration),
}

#[derive(Clone, Debug)]
struct Planned {
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
    /// None when it was stopped before anybody asked to run it.
    request: Option<JobRun>,
    job: cynode_api::Job,
    run: Option<Arc<Run>>,
    stopped: bool,
}

/// What the node has on its disk.
#[derive(Debug, Default)]
struct State {
    sessions: BTreeMap<SessionId, SessionEntry>,
    workspaces: BTreeMap<WorkspaceId, (TaskId, Files)>,
    jobs: BTreeMap<JobId, JobEntry>,
}

/// What an orchestrator gave it.
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
    state: Mutex<State>,
    /// Counts changes of jobs.
    changed: watch::Sender<u64>,
    news: mpsc::UnboundedSender<JobId>,
    /// How long the sleeps are that last no more.
    awake: watch::Sender<BTreeSet<String>>,
    holds_creates: watch::Sender<bool>,
    cut_off: watch::Sender<bool>,
    faults: watch::Sender<Vec<Planned>>,
    calls: Mutex<Vec<String>>,
    /// Those that bear an id.
    remembered: Mutex<Arc<Calls>>,
    started: Mutex<Vec<JobId>>,
    registration: Mutex<Registration>,
    config: Mutex<NodeConfig>,
}

/// Its listener and its heartbeats end with it.
#[derive(Debug)]
pub struct SimulatedWorker {
    shared: Arc<Shared>,
    news: Mutex<Option<mpsc::UnboundedReceiver<JobId>>>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl SimulatedWorker {
    /// A node with these images. Those whose names hold "unlabelled" are not for sessions.
    pub async fn start(name: &str, images: &[&str]) -> Result<Self> {
        // Installed once per process; a second time changes nothing.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let own_token = format!("simulated-{}", uuid::Uuid::new_v4());
        let (news, heard) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            node_id: NodeId::generate(),
            name: name.to_owned(),
            address: listener.local_addr()?,
            tokens: Tokens::new(vec![Token::new(&own_token)]),
            own_token,
            images: images.iter().map(|name| image(name)).collect(),
            state: Mutex::default(),
            changed: watch::Sender::new(0),
            news,
            awake: watch::Sender::default(),
            holds_creates: watch::Sender::new(false),
            cut_off: watch::Sender::new(false),
            faults: watch::Sender::new(Vec::new()),
            calls: Mutex::default(),
            remembered: Mutex::default(),
            started: Mutex::default(),
            registration: Mutex::default(),
            config: Mutex::new(NodeConfig {
                heartbeat_seconds: 1,
                ..NodeConfig::default()
            }),
        });
        let serving = tokio::spawn(serve(listener, Arc::clone(&shared)));
        Ok(Self {
            shared,
            news: Mutex::new(Some(heard)),
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

    /// Of the Worker API, with the node's own token.
    pub fn client(&self) -> Result<WorkerClient> {
        Ok(WorkerClient::new(&self.url(), &self.shared.own_token)?)
    }

    /// What becomes of the next calls, so many, whose method and path hold this text. What was planned first goes first.
    pub fn plan(&self, call: &str, times: usize, fault: Fault) {
        self.shared.faults.send_modify(|planned| {
            planned.push(Planned {
                call: call.to_owned(),
                times,
                fault,
            })
        });
    }

    /// No fault any more; calls that hang break.
    pub fn mend(&self) {
        self.shared.faults.send_replace(Vec::new());
    }

    /// Whether the node is reached by nobody and reaches nobody. It goes on with what it has.
    pub fn cut_off(&self, cut: bool) {
        self.shared.cut_off.send_replace(cut);
    }

    /// Whether new sessions stay as they are while they are made.
    pub fn hold_creates(&self, hold: bool) {
        self.shared.holds_creates.send_replace(hold);
    }

    /// From now on no `sleep` of so many seconds lasts.
    pub fn wake(&self, seconds: u32) {
        self.shared
            .awake
            .send_modify(|awake| awake.extend([seconds.to_string()]));
    }

    /// As after the loss of its disk.
    pub fn forget(&self) {
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

    /// As after a restart of its process: what it remembers of calls is gone.
    pub fn forget_calls(&self) {
        *self.shared.remembered.lock().expect("not poisoned") = Arc::default();
    }

    /// Calls that came in, as `METHOD /path`.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.shared.calls.lock().expect("not poisoned").clone()
    }

    /// How often a job's command was started.
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

    /// Every session that it ever had, with those that ended.
    #[must_use]
    pub fn sessions(&self) -> Vec<Session> {
        self.shared
            .state()
            .sessions
            .values()
            .map(SessionEntry::object)
            .collect()
    }

    /// Its own token at the control plane, and the one that orchestrators show it.
    #[must_use]
    pub fn tokens(&self) -> (String, String) {
        let known = self.shared.registration.lock().expect("not poisoned");
        (known.node_token.clone(), known.worker_token.clone())
    }

    /// What it keeps to.
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

/// What it gives one sandbox at most: a machine with 8 GiB, of which one is reserved.
pub const LARGEST: LargestLimits = LargestLimits {
    memory_bytes: 7 << 30,
    cpus: 2.0,
    pids: 4_096,
};
/// Two hundred default sandboxes.
pub const PROMISED_MEMORY_BYTES: u64 = 200 * (2 << 30);

/// Refuses limits beyond the machine.
fn check_limits(asked: Option<LimitsRequest>) -> Result<(), ApiError> {
    let asked = asked.unwrap_or_default();
    cynode_service::checks::check_limits(&asked)?;
    match LARGEST.excess_of(asked) {
        Some(excess) => Err(ApiError::new(
            ErrorCode::LimitUnenforceable,
            format!(
                "limits.{}: this node gives a sandbox at most {}",
                excess.limit, excess.most
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
        digest: format!("sha256:{}", crate::hex(&Sha256::digest(name))),
        labels,
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("not poisoned")
    }

    fn capability(&self) -> Capability {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Capability {
            version,
            engine: "simulated".to_owned(),
            cpus: 2,
            memory_bytes: 8 << 30,
            max_sandboxes: 200,
            largest: Some(LARGEST),
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

    /// The fault that was planned for a call, used up by one.
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

/// An id in a path; one that is not a UUID names nothing.
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
                () = attend(stream, router, &shared) => {}
                _ = cut_off.wait_for(|cut| *cut) => {}
            }
        });
    }
}

async fn attend(stream: TcpStream, router: Router, shared: &Arc<Shared>) {
    // An error here ends the connection without an answer.
    let service = service_fn(|request: http::Request<hyper::body::Incoming>| {
        let (router, shared) = (router.clone(), Arc::clone(shared));
        async move {
            answer(&shared, router, request.map(Body::new))
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

async fn answer(shared: &Shared, router: Router, request: Request) -> Option<Response> {
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

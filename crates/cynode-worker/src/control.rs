//! The node's client of the orchestrator: registers, sends heartbeats with the node's capability,
//! and rotates tokens.
//!
//! Invariant: sandboxes don't depend on this. While the orchestrator is unreachable, the node keeps
//! working, retains its results and retries. Tokens are on disk before they are used.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{
    API_VERSION, Capability, ExecVia, Heartbeat, HeartbeatAnswer, JobId, NodeConfig, NodeRegister,
    NodeRegistered,
};
use cynode_service::{auth, files, telemetry::Chain};
use http::StatusCode;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    Config, Engine,
    readiness::Readiness,
    sessions::{Sessions, Upstream},
};

const CALL_TIMEOUT: Duration = Duration::from_secs(20);
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const LONGEST_BACKOFF: Duration = Duration::from_secs(15);
/// How long the previous worker token stays valid after a rotation. Orchestrators reload tokens
/// every few seconds.
const TOKEN_OVERLAP: Duration = Duration::from_secs(10);

/// The node's registration with an orchestrator, persisted across restarts.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Registration {
    orchestrator_url: String,
    api_url: String,
    node_token: String,
    worker_token: String,
    /// Valid until every orchestrator has learned of the new token.
    previous_worker_token: Option<String>,
}

#[derive(Debug)]
pub(crate) struct ControlClient {
    sessions: Arc<Sessions>,
    ready: Arc<Readiness>,
    http: reqwest::Client,
    api_url: String,
    path: PathBuf,
    registration: Option<Registration>,
    /// The orchestrator rejected the tokens of the last heartbeat.
    was_rejected: bool,
    /// The token on disk, for callers on this machine.
    local_token: auth::Token,
    accepted: auth::Tokens,
    /// When the current tokens were first used with an orchestrator.
    tokens_used_since: Option<Instant>,
    /// The capability in the last report.
    reported_capability: Option<Capability>,
    config: NodeConfig,
}

#[derive(Debug, thiserror::Error)]
enum ControlError {
    #[error("the orchestrator does not know this node")]
    UnknownNode,
    #[error("{0}")]
    Other(String),
}

fn other(error: impl std::fmt::Display) -> ControlError {
    ControlError::Other(error.to_string())
}

/// Includes the causes, such as an untrusted certificate.
fn send_failed(error: reqwest::Error) -> ControlError {
    ControlError::Other(Chain(&error.without_url()).to_string())
}

/// Returns whether a URL's host is the loopback interface.
pub(crate) fn is_on_this_machine(url: &str) -> bool {
    let url: Option<reqwest::Url> = url.parse().ok();
    match url.as_ref().and_then(reqwest::Url::host_str) {
        Some("localhost") => true,
        Some(host) => host
            .trim_matches(['[', ']'])
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback()),
        None => false,
    }
}

impl ControlClient {
    /// Loads an earlier registration; its tokens are accepted at once.
    pub(crate) fn new(
        sessions: &Arc<Sessions>,
        ready: Arc<Readiness>,
        url: &str,
        local_token: auth::Token,
        accepted: auth::Tokens,
    ) -> io::Result<Self> {
        let config = &sessions.config;
        let path = config.directory().join("registration.json");
        let api_url = config.api_url.clone().unwrap_or_else(|| url.to_owned());
        let registration = match fs_err::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let orchestrator = config
            .orchestrator_url
            .as_deref()
            .map(|url| url.trim_end_matches('/'));
        let registration = registration.filter(|registration: &Registration| {
            Some(registration.orchestrator_url.trim_end_matches('/')) == orchestrator
        });
        let mut builder = reqwest::Client::builder()
            .timeout(CALL_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none());
        let certificates = |path: &Path| {
            reqwest::Certificate::from_pem_bundle(&fs_err::read(path)?).map_err(io::Error::other)
        };
        if let Some(path) = &config.tls.ca {
            builder = builder.tls_certs_only(certificates(path)?);
        } else if let Some(path) =
            std::env::var_os("CYNODE_CA_FILE").filter(|path| !path.is_empty())
        {
            builder = builder.tls_certs_merge(certificates(Path::new(&path))?);
        }
        if config
            .orchestrator_url
            .as_deref()
            .is_some_and(is_on_this_machine)
        {
            builder = builder.no_proxy();
        }
        let http = builder.build().map_err(io::Error::other)?;
        let client = Self {
            sessions: Arc::clone(sessions),
            ready,
            http,
            api_url,
            path,
            registration,
            was_rejected: false,
            local_token,
            accepted,
            tokens_used_since: None,
            reported_capability: None,
            config: NodeConfig {
                heartbeat_seconds: 5,
                ..NodeConfig::default()
            },
        };
        client.apply_registration();
        Ok(client)
    }

    fn apply_registration(&self) {
        let mut tokens = vec![self.local_token.clone()];
        if let Some(registration) = &self.registration {
            tokens.push(auth::Token::new(&registration.worker_token));
            tokens.extend(
                registration
                    .previous_worker_token
                    .as_ref()
                    .map(|token| auth::Token::new(token)),
            );
        }
        self.accepted.set(tokens);
        let upstream = |registration: &Registration| Upstream {
            http: self.http.clone(),
            base: registration
                .orchestrator_url
                .trim_end_matches('/')
                .to_owned(),
            node_token: registration.node_token.clone(),
        };
        self.sessions
            .set_upstream(self.registration.as_ref().map(upstream));
    }

    fn store(&mut self, registration: Registration) -> Result<(), ControlError> {
        let bytes = serde_json::to_vec(&registration).map_err(other)?;
        files::replace(&self.path, &bytes).map_err(other)?;
        self.registration = Some(registration);
        self.apply_registration();
        Ok(())
    }

    /// Registers if the node is unknown, then sends a heartbeat. The registration key may be spent
    /// and a rejection a mistake, so the current tokens are retained, and tried again after a
    /// failed registration.
    async fn sync(&mut self, base: &str) -> Result<(), ControlError> {
        if std::mem::take(&mut self.was_rejected) || self.registration.is_none() {
            self.register(base).await?;
        }
        let outcome = self.heartbeat(base).await;
        self.was_rejected = matches!(outcome, Err(ControlError::UnknownNode));
        outcome
    }

    async fn register(&mut self, base: &str) -> Result<(), ControlError> {
        let config = &self.sessions.config;
        let path = config
            .registration_key_file
            .as_ref()
            .ok_or_else(|| other("worker.registration_key_file is not set"))?;
        let psk = fs_err::read_to_string(path)
            .map_err(other)?
            .trim()
            .to_owned();
        let capability = self.capability().await?;
        let request = NodeRegister {
            version: Some(API_VERSION),
            psk,
            node_id: Some(self.sessions.node_id),
            node_name: config
                .name
                .clone()
                .unwrap_or_else(|| host_name(self.sessions.node_id)),
            api_url: self.api_url.clone(),
            capability: capability.clone(),
        };
        let response: NodeRegistered = self
            .post(&format!("{base}/v1/nodes/register"), None, &request)
            .await?;
        self.store(Registration {
            orchestrator_url: base.to_owned(),
            api_url: self.api_url.clone(),
            node_token: response.node_token,
            worker_token: response.worker_token,
            previous_worker_token: None,
        })?;
        self.reported_capability = Some(capability);
        self.apply(response.config);
        tracing::info!("Registered with the orchestrator.");
        Ok(())
    }

    async fn heartbeat(&mut self, base: &str) -> Result<(), ControlError> {
        let Some(registration) = self.registration.clone() else {
            return Err(ControlError::UnknownNode);
        };
        let capability = self.capability().await;
        let not_ready = match &capability {
            Ok(_) => self.ready.check().await.err(),
            Err(error) => Some(error.to_string()),
        };
        let capability = capability
            .ok()
            .filter(|capability| self.reported_capability.as_ref() != Some(capability));
        let heartbeat = Heartbeat {
            version: Some(API_VERSION),
            running_sandboxes: self.sessions.live_count(),
            not_ready,
            config_revision: self.config.revision,
            capability: capability.clone(),
            api_url: (registration.api_url != self.api_url).then(|| self.api_url.clone()),
            adopted: Vec::new(),
        };
        let response: HeartbeatAnswer = self
            .post(
                &format!("{base}/v1/nodes/heartbeat"),
                Some(&registration.node_token),
                &heartbeat,
            )
            .await?;
        if capability.is_some() {
            self.reported_capability = capability;
        }
        if response.resend_capability {
            self.reported_capability = None;
        }
        let registration = Registration {
            api_url: self.api_url.clone(),
            ..registration
        };
        if let Some(new) = response.rotate {
            let previous = if new.worker_token == registration.worker_token {
                registration.previous_worker_token
            } else {
                Some(registration.worker_token)
            };
            let registration = Registration {
                node_token: new.node_token,
                worker_token: new.worker_token,
                previous_worker_token: previous,
                ..registration
            };
            self.store(registration)?;
            self.tokens_used_since = None;
        } else if registration.previous_worker_token.is_some()
            && self
                .tokens_used_since
                .get_or_insert_with(Instant::now)
                .elapsed()
                > TOKEN_OVERLAP
        {
            // By now every orchestrator has reloaded the tokens.
            self.store(Registration {
                previous_worker_token: None,
                ..registration
            })?;
        } else if heartbeat.api_url.is_some() {
            self.store(registration)?;
        }
        if response.config_revision != self.config.revision {
            let token = self
                .registration
                .as_ref()
                .map(|registration| registration.node_token.clone());
            let request = self
                .http
                .get(format!("{base}/v1/nodes/config"))
                .bearer_auth(token.unwrap_or_default());
            let config = read(request.send().await.map_err(send_failed)?).await?;
            self.apply(config);
        }
        Ok(())
    }

    /// Notifies the orchestrator that a job changed; it then fetches the job.
    async fn report(&self, base: &str, id: JobId) -> Result<(), ControlError> {
        let Some(registration) = &self.registration else {
            return Ok(());
        };
        let body = serde_json::json!({ "version": API_VERSION });
        let request = self
            .http
            .post(format!("{base}/v1/nodes/jobs/{id}/status"))
            .bearer_auth(&registration.node_token)
            .json(&body);
        request.send().await.map(drop).map_err(send_failed)
    }

    fn apply(&mut self, config: NodeConfig) {
        if let Some(image) = &config.default_image {
            self.sessions.default_image.lock().clone_from(image);
        }
        self.config = config;
    }

    async fn post<T: DeserializeOwned>(
        &self,
        url: &str,
        token: Option<&str>,
        body: &impl Serialize,
    ) -> Result<T, ControlError> {
        let mut request = self.http.post(url).json(body);
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        read(request.send().await.map_err(send_failed)?).await
    }

    async fn capability(&self) -> Result<Capability, ControlError> {
        let config = &self.sessions.config;
        let mut images = self.sessions.runtime.images().await.map_err(other)?;
        images.sort_by(|one, two| one.reference.cmp(&two.reference));
        Ok(Capability {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            engine: engine(config).to_owned(),
            // Podman sets this variable in a user's namespace.
            rootless: std::env::var_os("_CONTAINERS_ROOTLESS_UID").is_some(),
            cpus: std::thread::available_parallelism()
                .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX)),
            memory_bytes: self.sessions.capacity.memory_bytes,
            max_sandboxes: config.max_sandboxes,
            largest: Some(self.sessions.capacity.largest),
            promised_memory_bytes: Some(self.sessions.capacity.promised_memory_bytes),
            encoded_patches: Some(cynode_patch::WIRE_VERSION),
            runner: (config.exec_via == ExecVia::Agent)
                .then_some(cynode_sba_proto::runner::VERSION),
            inference: self.sessions.inference.report().await,
            unenforced: config.allow_unenforced.clone(),
            labels: config.labels.clone(),
            images,
        })
    }
}

async fn read<T: DeserializeOwned>(response: reqwest::Response) -> Result<T, ControlError> {
    let status = response.status();
    let bytes = response.bytes().await.map_err(other)?;
    if status == StatusCode::UNAUTHORIZED {
        return Err(ControlError::UnknownNode);
    }
    if !status.is_success() {
        let body: String = String::from_utf8_lossy(&bytes).chars().take(300).collect();
        return Err(ControlError::Other(format!("status {status}: {body}")));
    }
    serde_json::from_slice(&bytes).map_err(other)
}

const fn engine(config: &Config) -> &'static str {
    match config.engine {
        Engine::Podman => "podman",
        Engine::Docker => "docker",
    }
}

fn host_name(id: cynode_api::NodeId) -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let id = id.to_string();
    // Two workers on one host must have different names.
    format!("{name}-{}", &id[id.len() - 6..])
}

/// Keeps the node registered until the worker stops.
pub(crate) async fn run(
    mut client: ControlClient,
    mut jobs: mpsc::Receiver<JobId>,
    stop: CancellationToken,
) {
    let Some(base) = client.sessions.config.orchestrator_url.clone() else {
        return;
    };
    let base = base.trim_end_matches('/').to_owned();
    let mut backoff = FIRST_BACKOFF;
    loop {
        let delay = match stop.run_until_cancelled(client.sync(&base)).await {
            None => return,
            Some(Ok(())) => {
                backoff = FIRST_BACKOFF;
                Duration::from_secs(client.config.heartbeat_seconds.max(1))
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "Failed to register or send a heartbeat; retrying.");
                backoff = (backoff * 2).min(LONGEST_BACKOFF);
                backoff
            }
        };
        let next = tokio::time::Instant::now() + delay;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(id) = jobs.recv() => {
                    let report = client.report(&base, id);
                    if let Some(Err(error)) = stop.run_until_cancelled(report).await {
                        tracing::debug!(
                            %error,
                            "Failed to report a job; the orchestrator polls for it."
                        );
                    }
                }
                () = tokio::time::sleep_until(next) => break,
            }
        }
    }
}

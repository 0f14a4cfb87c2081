//! The node's side of the control plane: it registers, says that it is alive and what it has, and takes over new tokens.
//!
//! What must stay true: nothing here is needed for sandboxes to go on. While no orchestrator answers, the node does its work,
//! keeps its results, and asks again. Tokens are on disk before they are used.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{
    API_VERSION, Capability, Heartbeat, HeartbeatAnswer, JobId, NodeConfig, NodeRegister,
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

const CALL: Duration = Duration::from_secs(20);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// How long the token before the present one stays good. Orchestrators look for a new one every few seconds.
const OVERLAP: Duration = Duration::from_secs(10);

/// What an orchestrator gave us, kept over restarts.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Registration {
    orchestrator_url: String,
    api_url: String,
    node_token: String,
    worker_token: String,
    /// Good for as long as an orchestrator may not have heard that we have the new one.
    previous_worker_token: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Node {
    sessions: Arc<Sessions>,
    ready: Arc<Readiness>,
    http: reqwest::Client,
    api_url: String,
    path: PathBuf,
    registration: Option<Registration>,
    /// Whether its tokens were refused when they were last shown.
    was_refused: bool,
    /// The one on disk for people on this machine.
    own_token: auth::Token,
    accepted: auth::Tokens,
    /// When the present tokens were first shown to an orchestrator.
    shown_since: Option<Instant>,
    /// What was last said.
    said: Option<Capability>,
    config: NodeConfig,
}

#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("the orchestrator does not know this node")]
    Unknown,
    #[error("{0}")]
    Other(String),
}

fn other(error: impl std::fmt::Display) -> Failed {
    Failed::Other(error.to_string())
}

/// With its causes: a certificate that is not trusted is one.
fn unsent(error: reqwest::Error) -> Failed {
    Failed::Other(Chain(&error.without_url()).to_string())
}

/// Whether an address leads to nobody but ourselves.
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

impl Node {
    /// Reads what is known from before: its tokens are good at once.
    pub(crate) fn new(
        sessions: &Arc<Sessions>,
        ready: Arc<Readiness>,
        url: &str,
        own_token: auth::Token,
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
        let registration = registration.filter(|known: &Registration| {
            Some(known.orchestrator_url.trim_end_matches('/')) == orchestrator
        });
        let mut builder = reqwest::Client::builder()
            .timeout(CALL)
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
        let node = Self {
            sessions: Arc::clone(sessions),
            ready,
            http,
            api_url,
            path,
            registration,
            was_refused: false,
            own_token,
            accepted,
            shown_since: None,
            said: None,
            config: NodeConfig {
                heartbeat_seconds: 5,
                ..NodeConfig::default()
            },
        };
        node.accept();
        Ok(node)
    }

    fn accept(&self) {
        let mut tokens = vec![self.own_token.clone()];
        if let Some(known) = &self.registration {
            tokens.push(auth::Token::new(&known.worker_token));
            tokens.extend(
                known
                    .previous_worker_token
                    .as_ref()
                    .map(|token| auth::Token::new(token)),
            );
        }
        self.accepted.set(tokens);
        let upstream = |known: &Registration| Upstream {
            http: self.http.clone(),
            base: known.orchestrator_url.trim_end_matches('/').to_owned(),
            node_token: known.node_token.clone(),
        };
        self.sessions
            .set_upstream(self.registration.as_ref().map(upstream));
    }

    fn keep(&mut self, registration: Registration) -> Result<(), Failed> {
        let bytes = serde_json::to_vec(&registration).map_err(other)?;
        files::replace(&self.path, &bytes).map_err(other)?;
        self.registration = Some(registration);
        self.accept();
        Ok(())
    }

    /// One word with the orchestrator: registration when it does not know us, a heartbeat when it does. A key may be spent,
    /// and a refusal a mistake: so what we have is kept, and shown again after a registration that was refused.
    async fn speak(&mut self, base: &str) -> Result<(), Failed> {
        if std::mem::take(&mut self.was_refused) || self.registration.is_none() {
            self.register(base).await?;
        }
        let outcome = self.beat(base).await;
        self.was_refused = matches!(outcome, Err(Failed::Unknown));
        outcome
    }

    async fn register(&mut self, base: &str) -> Result<(), Failed> {
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
        let answer: NodeRegistered = self
            .post(&format!("{base}/v1/nodes/register"), None, &request)
            .await?;
        self.keep(Registration {
            orchestrator_url: base.to_owned(),
            api_url: self.api_url.clone(),
            node_token: answer.node_token,
            worker_token: answer.worker_token,
            previous_worker_token: None,
        })?;
        self.said = Some(capability);
        self.apply(answer.config);
        tracing::info!("Registered with the orchestrator.");
        Ok(())
    }

    async fn beat(&mut self, base: &str) -> Result<(), Failed> {
        let Some(known) = self.registration.clone() else {
            return Err(Failed::Unknown);
        };
        let capability = self.capability().await;
        let not_ready = match &capability {
            Ok(_) => self.ready.check().await.err(),
            Err(error) => Some(error.to_string()),
        };
        let capability = capability
            .ok()
            .filter(|capability| self.said.as_ref() != Some(capability));
        let beat = Heartbeat {
            version: Some(API_VERSION),
            running_sandboxes: self.sessions.live_count(),
            not_ready,
            config_revision: self.config.revision,
            capability: capability.clone(),
            api_url: (known.api_url != self.api_url).then(|| self.api_url.clone()),
            adopted: Vec::new(),
        };
        let answer: HeartbeatAnswer = self
            .post(
                &format!("{base}/v1/nodes/heartbeat"),
                Some(&known.node_token),
                &beat,
            )
            .await?;
        if capability.is_some() {
            self.said = capability;
        }
        if answer.resend_capability {
            self.said = None;
        }
        let known = Registration {
            api_url: self.api_url.clone(),
            ..known
        };
        if let Some(new) = answer.rotate {
            let previous = if new.worker_token == known.worker_token {
                known.previous_worker_token
            } else {
                Some(known.worker_token)
            };
            let registration = Registration {
                node_token: new.node_token,
                worker_token: new.worker_token,
                previous_worker_token: previous,
                ..known
            };
            self.keep(registration)?;
            self.shown_since = None;
        } else if known.previous_worker_token.is_some()
            && self.shown_since.get_or_insert_with(Instant::now).elapsed() > OVERLAP
        {
            // The new one was shown to an orchestrator so long ago that every one of them has looked again.
            self.keep(Registration {
                previous_worker_token: None,
                ..known
            })?;
        } else if beat.api_url.is_some() {
            self.keep(known)?;
        }
        if answer.config_revision != self.config.revision {
            let token = self
                .registration
                .as_ref()
                .map(|known| known.node_token.clone());
            let request = self
                .http
                .get(format!("{base}/v1/nodes/config"))
                .bearer_auth(token.unwrap_or_default());
            let config = read(request.send().await.map_err(unsent)?).await?;
            self.apply(config);
        }
        Ok(())
    }

    /// Says that something happened to a job. What it is, the orchestrator asks.
    async fn report(&self, base: &str, id: JobId) -> Result<(), Failed> {
        let Some(known) = &self.registration else {
            return Ok(());
        };
        let body = serde_json::json!({ "version": API_VERSION });
        let request = self
            .http
            .post(format!("{base}/v1/nodes/jobs/{id}/status"))
            .bearer_auth(&known.node_token)
            .json(&body);
        request.send().await.map(drop).map_err(unsent)
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
    ) -> Result<T, Failed> {
        let mut request = self.http.post(url).json(body);
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        read(request.send().await.map_err(unsent)?).await
    }

    async fn capability(&self) -> Result<Capability, Failed> {
        let config = &self.sessions.config;
        let mut images = self.sessions.runtime.images().await.map_err(other)?;
        images.sort_by(|one, two| one.reference.cmp(&two.reference));
        Ok(Capability {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            engine: engine(config).to_owned(),
            // Podman's own mark for whoever lives in a user's namespace.
            rootless: std::env::var_os("_CONTAINERS_ROOTLESS_UID").is_some(),
            cpus: std::thread::available_parallelism()
                .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX)),
            memory_bytes: self.sessions.capacity.memory_bytes,
            max_sandboxes: config.max_sandboxes,
            largest: Some(self.sessions.capacity.largest),
            promised_memory_bytes: Some(self.sessions.capacity.promised_memory_bytes),
            unenforced: config.allow_unenforced.clone(),
            labels: config.labels.clone(),
            images,
        })
    }
}

async fn read<T: DeserializeOwned>(answer: reqwest::Response) -> Result<T, Failed> {
    let status = answer.status();
    let bytes = answer.bytes().await.map_err(other)?;
    if status == StatusCode::UNAUTHORIZED {
        return Err(Failed::Unknown);
    }
    if !status.is_success() {
        let said: String = String::from_utf8_lossy(&bytes).chars().take(300).collect();
        return Err(Failed::Other(format!("it answered {status}: {said}")));
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
    // Two workers on one host have one name between them.
    format!("{name}-{}", &id[id.len() - 6..])
}

/// Speaks with the orchestrator until the worker stops.
pub(crate) async fn keep(mut node: Node, mut jobs: mpsc::Receiver<JobId>, stop: CancellationToken) {
    let Some(base) = node.sessions.config.orchestrator_url.clone() else {
        return;
    };
    let base = base.trim_end_matches('/').to_owned();
    let mut pause = FIRST_PAUSE;
    loop {
        let next = match stop.run_until_cancelled(node.speak(&base)).await {
            None => return,
            Some(Ok(())) => {
                pause = FIRST_PAUSE;
                Duration::from_secs(node.config.heartbeat_seconds.max(1))
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "The orchestrator can't be spoken to; trying again.");
                pause = (pause * 2).min(LONGEST_PAUSE);
                pause
            }
        };
        let next = tokio::time::Instant::now() + next;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(id) = jobs.recv() => {
                    if let Some(Err(error)) = stop.run_until_cancelled(node.report(&base, id)).await {
                        tracing::debug!(%error, "The orchestrator was not told of a job; it will ask.");
                    }
                }
                () = tokio::time::sleep_until(next) => break,
            }
        }
    }
}

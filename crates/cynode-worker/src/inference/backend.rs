//! The node's model server: which API it has, which models it serves, and whether it may be used.
//!
//! Invariants: a server that others than this machine can reach is not used unless that is allowed
//! by name. The list of models is never older than [`STALE_AFTER`].

use std::{sync::Arc, time::Duration};

use cynode_api::{ModelServerKind, NodeInference};
use cynode_inference::{
    Locality, ModelList, Refusal, RefusalCode, has_cloud_suffix, limits::MAX_LIST_BYTES,
    server_version,
};
use cynode_service::telemetry::Chain;
use http::StatusCode;
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    InferenceConfig,
    config::{is_loopback, server_url},
    listeners,
};

/// How often the list of models is read.
const REFRESH_INTERVAL: Duration = Duration::from_secs(10);
/// How long a list is used after a server has stopped answering: it may be restarting.
const STALE_AFTER: Duration = Duration::from_secs(60);
/// A list that is older is read again when a model is not in it.
const FRESH_FOR: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For answers that no model computes.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Models that a node reports to its orchestrator.
const MAX_REPORTED_MODELS: usize = 256;
/// Why a server is not used, in characters.
const MAX_PROBLEM_CHARACTERS: usize = 300;

/// What is known of the server.
#[derive(Clone, Debug, Default)]
struct Known {
    kind: Option<ModelServerKind>,
    /// As `kind` lists them: Ollama's list says which models run elsewhere.
    list: Option<Arc<ModelList>>,
    listed_at: Option<Instant>,
    problem: Option<String>,
}

#[derive(Debug)]
pub(super) struct Backend {
    /// Without a slash at its end.
    base: String,
    config: InferenceConfig,
    http: reqwest::Client,
    known: watch::Sender<Known>,
    refreshing: tokio::sync::Mutex<()>,
    /// Models whose answers said that another host computed them, although the list did not.
    external: Mutex<Vec<String>>,
}

fn unavailable(message: impl Into<String>) -> Refusal {
    Refusal::new(RefusalCode::InferenceUnavailable, message)
}

impl Backend {
    /// `config` is valid and has a URL.
    pub(super) fn new(config: InferenceConfig, url: &str) -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .http1_only()
            .build()?;
        Ok(Self {
            base: url.trim_end_matches('/').to_owned(),
            config,
            http,
            known: watch::Sender::default(),
            refreshing: tokio::sync::Mutex::default(),
            external: Mutex::default(),
        })
    }

    pub(super) fn kind(&self) -> Option<ModelServerKind> {
        self.known.borrow().kind
    }

    /// Reads the list of models until stopped.
    pub(super) async fn watch(&self, stop: CancellationToken) {
        loop {
            self.refresh().await;
            let pause = tokio::time::sleep(REFRESH_INTERVAL);
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    /// Waits until the server was asked once, or a limit.
    pub(super) async fn asked(&self, limit: Duration) {
        let mut known = self.known.subscribe();
        let is_known = |known: &Known| known.list.is_some() || known.problem.is_some();
        drop(tokio::time::timeout(limit, known.wait_for(is_known)).await);
    }

    /// What the node reports.
    pub(super) fn report(&self) -> NodeInference {
        let known = self.known.borrow().clone();
        let listed = known.list.iter().flat_map(|list| &list.models);
        let external = self.external.lock();
        let models = listed
            .filter(|model| model.locality != Locality::External && !has_cloud_suffix(&model.name))
            .map(|model| model.name.clone())
            .filter(|name| !external.contains(name));
        NodeInference {
            kind: known.kind,
            models: models.take(MAX_REPORTED_MODELS).collect(),
            problem: known.problem,
        }
    }

    /// Asks the server, and whether it may be used.
    pub(super) async fn refresh(&self) {
        let _one_at_a_time = self.refreshing.lock().await;
        let read = self.read().await;
        let mut next = self.known.borrow().clone();
        match read {
            Ok((kind, list)) => {
                next = Known {
                    kind: Some(kind),
                    list: Some(Arc::new(list)),
                    listed_at: Some(Instant::now()),
                    problem: None,
                };
            }
            Err(problem) => {
                let is_stale = next.listed_at.is_none_or(|at| at.elapsed() > STALE_AFTER);
                if is_stale || problem.forbids_use {
                    next.list = None;
                }
                let reason: String = problem
                    .reason
                    .chars()
                    .take(MAX_PROBLEM_CHARACTERS)
                    .collect();
                if next.problem.as_ref() != Some(&reason) {
                    tracing::warn!(reason, "The model server can't be used.");
                }
                next.problem = Some(reason);
            }
        }
        self.known.send_replace(next);
    }

    async fn read(&self) -> Result<(ModelServerKind, ModelList), ServerProblem> {
        self.check_listeners().await?;
        let kind = match self.config.kind.or(self.kind()) {
            Some(kind) => kind,
            None => self.detect().await?,
        };
        let list = match kind {
            ModelServerKind::Ollama => ModelList::read_tags(&self.get("/api/tags").await?),
            ModelServerKind::Openai => ModelList::read_models(&self.get("/v1/models").await?),
        };
        let list = list.map_err(|refusal| ServerProblem::passing(refusal.message))?;
        Ok((kind, list))
    }

    async fn check_listeners(&self) -> Result<(), ServerProblem> {
        if self.config.allow_beyond_loopback {
            return Ok(());
        }
        let base = self.base.clone();
        let exposed = tokio::task::spawn_blocking(move || exposed_listener(&base));
        match exposed.await {
            Ok(None) => Ok(()),
            Ok(Some(reason)) => Err(ServerProblem {
                reason,
                forbids_use: true,
            }),
            Err(_) => Err(ServerProblem::passing(
                "the check of its listeners was interrupted",
            )),
        }
    }

    /// Only Ollama has this endpoint; it has OpenAI's, too.
    async fn detect(&self) -> Result<ModelServerKind, ServerProblem> {
        match self.get("/api/version").await {
            Ok(answer) if server_version(&answer).is_ok() => Ok(ModelServerKind::Ollama),
            Ok(_) => Ok(ModelServerKind::Openai),
            Err(error) if error.was_answered => Ok(ModelServerKind::Openai),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads a description from the server.
    pub(super) async fn get(&self, path: &str) -> Result<Vec<u8>, CallError> {
        self.described(self.http.get(format!("{}{path}", self.base)))
            .await
    }

    pub(super) async fn post(&self, path: &str, body: Vec<u8>) -> Result<Vec<u8>, CallError> {
        self.described(self.computation(path).body(body)).await
    }

    /// The request for a computation, without its body.
    pub(super) fn computation(&self, path: &str) -> reqwest::RequestBuilder {
        let json = http::HeaderValue::from_static("application/json");
        self.http
            .post(format!("{}{path}", self.base))
            .header(http::header::CONTENT_TYPE, json)
    }

    async fn described(&self, request: reqwest::RequestBuilder) -> Result<Vec<u8>, CallError> {
        let call = async {
            let response = request.send().await.map_err(|error| CallError {
                reason: format!("it does not answer: {}", Chain(&error.without_url())),
                was_answered: false,
            })?;
            let status = response.status();
            let body = read_bounded(response, MAX_LIST_BYTES).await?;
            if status == StatusCode::OK {
                Ok(body)
            } else {
                Err(CallError::answered(format!(
                    "it answers with the status {status}"
                )))
            }
        };
        tokio::time::timeout(CALL_TIMEOUT, call)
            .await
            .unwrap_or_else(|_| {
                let reason = format!("it has not answered for {} s", CALL_TIMEOUT.as_secs());
                Err(CallError {
                    reason,
                    was_answered: false,
                })
            })
    }

    /// The models of the server, read again if they are older than `age`.
    pub(super) async fn list(&self, age: Duration) -> Result<Arc<ModelList>, Refusal> {
        let is_old = |known: &Known| known.listed_at.is_none_or(|at| at.elapsed() > age);
        if is_old(&self.known.borrow()) {
            self.refresh_once(age).await;
        }
        let known = self.known.borrow();
        known.list.clone().ok_or_else(|| {
            unavailable("the node's model server can't be used now; its operator can see why")
        })
    }

    /// Of several that find the list too old, one reads it.
    async fn refresh_once(&self, age: Duration) {
        let asked_at = Instant::now();
        drop(self.refreshing.lock().await);
        let listed_at = self.known.borrow().listed_at;
        if listed_at.is_none_or(|at| at < asked_at && at.elapsed() > age) {
            self.refresh().await;
        }
    }

    /// Refuses a model that the server does not serve, or that it has another host run.
    pub(super) async fn require_local(&self, name: &str) -> Result<(), Refusal> {
        let mut list = self.list(STALE_AFTER).await?;
        if list.find(name).is_none() {
            list = self.list(FRESH_FOR).await?;
        }
        let Some(model) = list.find(name) else {
            return Err(unavailable(format!(
                "the node's model server does not serve {}",
                cynode_api::document::quote(name)
            )));
        };
        if model.locality == Locality::External
            || has_cloud_suffix(name)
            || has_cloud_suffix(&model.name)
            || self.external.lock().contains(&model.name)
        {
            return Err(external(name));
        }
        Ok(())
    }

    /// Whether the server serves one of these models itself.
    pub(super) async fn serves_any(&self, models: &[String]) -> Result<(), String> {
        self.asked(CALL_TIMEOUT).await;
        let mut reasons = Vec::new();
        for name in models {
            match self.require_local(name).await {
                Ok(()) => return Ok(()),
                Err(refusal) if !reasons.contains(&refusal.message) => {
                    reasons.push(refusal.message);
                }
                Err(_) => {}
            }
        }
        Err(reasons.join("; "))
    }

    /// Removes what sandboxes must not see.
    pub(super) fn remove_external(&self, list: &mut ModelList, known: &ModelList) {
        list.remove_external();
        let external = self.external.lock();
        list.models.retain(|model| {
            !has_cloud_suffix(&model.name)
                && !external.contains(&model.name)
                && known
                    .find(&model.name)
                    .is_some_and(|known| known.locality != Locality::External)
        });
    }

    /// Remembers that another host computed the answer of a model.
    pub(super) async fn mark_external(&self, name: &str) {
        let listed = match self.list(STALE_AFTER).await {
            Ok(list) => list.find(name).map(|model| model.name.clone()),
            Err(_) => None,
        };
        let name = listed.unwrap_or_else(|| name.to_owned());
        tracing::warn!(model = name, "A model of the server runs on another host.");
        let mut external = self.external.lock();
        if !external.contains(&name) {
            external.push(name);
        }
    }
}

pub(super) fn external(name: &str) -> Refusal {
    Refusal::new(
        RefusalCode::ModelNotAllowed,
        format!(
            "the node's model server has another host run {}; external models can't be used yet",
            cynode_api::document::quote(name)
        ),
    )
}

/// Why the server at an address must not be used: others can reach it.
pub(super) fn exposed_listener(base: &str) -> Option<String> {
    let url = server_url(base).ok()?;
    if !is_loopback(url.host_str().unwrap_or_default()) {
        return Some(format!("{base} is beyond loopback"));
    }
    let port = url.port_or_known_default()?;
    listeners::beyond_loopback(port).map(|address| {
        format!(
            "port {port} of this machine listens on {address} too: others can use the models, past \
             every rule of this node"
        )
    })
}

/// Why a description could not be read.
#[derive(Debug)]
pub(super) struct CallError {
    pub(super) reason: String,
    was_answered: bool,
}

impl CallError {
    fn answered(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            was_answered: true,
        }
    }

    pub(super) fn refusal(&self) -> Refusal {
        unavailable(if self.was_answered {
            "the node's model server can't answer this"
        } else {
            "the node's model server does not answer"
        })
    }
}

/// Why the server can't be used.
#[derive(Debug)]
struct ServerProblem {
    reason: String,
    /// Not even with an earlier list.
    forbids_use: bool,
}

impl ServerProblem {
    fn passing(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            forbids_use: false,
        }
    }
}

impl From<CallError> for ServerProblem {
    fn from(error: CallError) -> Self {
        Self::passing(error.reason)
    }
}

/// Reads a body of at most this many bytes.
pub(super) async fn read_bounded(
    mut response: reqwest::Response,
    most: usize,
) -> Result<Vec<u8>, CallError> {
    let mut body = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(piece)) if body.len() + piece.len() <= most => body.extend_from_slice(&piece),
            Ok(Some(_)) => {
                return Err(CallError::answered(format!(
                    "its answer has more than {most} bytes"
                )));
            }
            Ok(None) => return Ok(body),
            Err(error) => {
                let reason = format!("its answer broke off: {}", Chain(&error.without_url()));
                return Err(CallError::answered(reason));
            }
        }
    }
}

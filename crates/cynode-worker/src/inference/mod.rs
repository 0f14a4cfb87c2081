//! The way of sandboxes to the node's model server.
//!
//! A sandbox reaches it at `http://localhost:11434`. `cynode-inference` decides on every request,
//! without I/O; this module does the I/O around it: bodies within bounds (`body.rs`), the server and
//! its models (`backend.rs`), computations with their records and limits (`call.rs`), the usage of
//! jobs (`usage.rs`).
//!
//! Invariants: the models of a sandbox are those of its session's record, whatever it says; nothing
//! of a request or an answer is kept, logged or recorded but names of models and counts.

mod backend;
mod body;
mod call;
mod config;
mod events;
mod handler;
mod listeners;
mod rate;
mod usage;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use cynode_api::{
    ErrorCode, JobId, NodeInference, Problem, SessionId,
    sba::{Inference as JobInference, InferenceSource},
};
use cynode_inference::{AllowedModels, Refusal, RefusalCode};
use cynode_service::ApiError;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::{
    audit::{AuditedSandbox, NodeDecision, NodeTrail, RecordError},
    sessions::Activity,
};

use backend::Backend;
pub use config::InferenceConfig;
use rate::ComputationRate;
pub(crate) use usage::{JobUsage, UsageBook};

/// The address of Ollama's default configuration.
pub(crate) const DEFAULT_URL: &str = "http://127.0.0.1:11434";
/// How long a worker that starts waits for the model server's first answer before it registers.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Where model calls are recorded.
#[async_trait]
pub(crate) trait ModelTrail: std::fmt::Debug + Send + Sync {
    async fn record(&self, decision: NodeDecision) -> Result<(), RecordError>;
}

#[async_trait]
impl ModelTrail for NodeTrail {
    async fn record(&self, decision: NodeDecision) -> Result<(), RecordError> {
        Self::record(self, decision).await
    }
}

/// The inference path of a node.
#[derive(Debug)]
pub(crate) struct Inference {
    config: InferenceConfig,
    /// Absent if none is configured.
    backend: Option<Arc<Backend>>,
    trail: Arc<dyn ModelTrail>,
    usage: UsageBook,
    in_flight: Mutex<InFlight>,
    rate: ComputationRate,
    large_bodies: tokio::sync::Semaphore,
    /// Where long bodies arrive.
    spool_directory: PathBuf,
}

/// The sandbox that sends a request, as the node knows it.
#[derive(Debug)]
pub(crate) struct ModelClient {
    session_id: SessionId,
    sandbox: AuditedSandbox,
    models: AllowedModels,
    request_id: String,
    /// Of a job.
    usage: Option<Arc<JobUsage>>,
    /// Keeps the session from being idle.
    _activity: Option<Activity>,
}

impl Inference {
    /// `config` is valid. Long requests are spooled into files without names in a directory.
    pub(crate) fn new(
        config: InferenceConfig,
        trail: Arc<dyn ModelTrail>,
        spool_directory: &Path,
    ) -> Result<Arc<Self>, reqwest::Error> {
        let backend = match &config.url {
            Some(url) => Some(Arc::new(Backend::new(config.clone(), url)?)),
            None => None,
        };
        Ok(Arc::new(Self {
            config,
            backend,
            trail,
            usage: UsageBook::default(),
            in_flight: Mutex::default(),
            rate: ComputationRate::default(),
            large_bodies: tokio::sync::Semaphore::new(body::LARGE_BODIES),
            spool_directory: spool_directory.to_owned(),
        }))
    }

    /// Keeps the list of models current until stopped.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) {
        if let Some(backend) = &self.backend {
            backend.watch(stop).await;
        }
    }

    /// The usage of a job, whose files are in `directory`.
    pub(crate) fn usage_of(&self, id: JobId, directory: &Path) -> Arc<JobUsage> {
        self.usage.of(id, directory)
    }

    /// Drops the usage of a job that can't call models any more.
    pub(crate) fn forget(&self, id: JobId) {
        self.usage.forget(id);
    }

    /// What the node reports of its model server; `None` if there is none.
    pub(crate) async fn report(&self) -> Option<NodeInference> {
        let backend = self.backend.as_ref()?;
        backend.asked(FIRST_ANSWER_TIMEOUT).await;
        Some(backend.report())
    }

    /// Rejects a job none of whose models can be reached from here.
    pub(crate) async fn check_job(&self, inference: &JobInference) -> Result<(), ApiError> {
        check_source(inference)?;
        let unavailable = |reason: String| {
            let detail = format!("job.inference: {reason}");
            Problem::new(ErrorCode::InferenceUnavailable, detail).into()
        };
        let Some(backend) = &self.backend else {
            let reason = "this node has no model server (worker.inference.url)";
            return Err(unavailable(reason.to_owned()));
        };
        let served = backend.serves_any(&inference.allowed_models).await;
        served.map_err(unavailable)
    }

    /// Refuses a computation of a sandbox that starts too many.
    fn pace(&self, session_id: SessionId) -> Result<(), Refusal> {
        let counted = self.rate.count(session_id, tokio::time::Instant::now());
        counted.map_err(|early| {
            let message = format!(
                "this sandbox has started {} computations at once; the next one may start in {} s",
                rate::BURST,
                early.as_secs() + 1
            );
            Refusal::new(RefusalCode::TooManyRequests, message)
        })
    }

    /// Admits a request of a sandbox.
    fn admit(self: &Arc<Self>, session_id: SessionId) -> Result<Admitted, Refusal> {
        let mut in_flight = self.in_flight.lock();
        let own = in_flight.by_sandbox.get(&session_id).copied().unwrap_or(0);
        let refuse = |message: String| Err(Refusal::new(RefusalCode::TooManyRequests, message));
        let most = self.config.max_requests_per_sandbox;
        if own >= most {
            return refuse(format!(
                "this sandbox has {own} requests in flight, at most {most}"
            ));
        }
        let most = self.config.max_requests;
        // The last quarter is for sandboxes that have no request yet.
        let room = if own == 0 { most } else { most - most / 4 };
        if in_flight.total >= room {
            return refuse(format!(
                "the sandboxes of this node have {most} requests in flight"
            ));
        }
        in_flight.total += 1;
        *in_flight.by_sandbox.entry(session_id).or_default() += 1;
        Ok(Admitted {
            inference: Arc::clone(self),
            session_id,
        })
    }
}

/// Rejects a source of models that this version does not have.
pub(crate) fn check_source(inference: &JobInference) -> Result<(), ApiError> {
    if inference.source == Some(InferenceSource::ApiEgress) {
        let detail = "job.inference.source: models of providers can't be reached yet";
        return Err(Problem::new(ErrorCode::InvalidRequest, detail)
            .with_remedy("Leave it out, or use \"worker\": models that nodes serve.")
            .into());
    }
    Ok(())
}

#[derive(Debug, Default)]
struct InFlight {
    total: usize,
    by_sandbox: HashMap<SessionId, usize>,
}

/// The place of one request.
#[derive(Debug)]
struct Admitted {
    inference: Arc<Inference>,
    session_id: SessionId,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut in_flight = self.inference.in_flight.lock();
        in_flight.total -= 1;
        if let Some(own) = in_flight.by_sandbox.get_mut(&self.session_id) {
            *own -= 1;
            if *own == 0 {
                in_flight.by_sandbox.remove(&self.session_id);
            }
        }
    }
}

/// What a host's model server says to a check, and whether others can reach it.
#[derive(Debug)]
pub(crate) struct ServerCheck {
    pub(crate) url: String,
    pub(crate) report: NodeInference,
    /// Why others can reach it.
    pub(crate) exposed: Option<String>,
}

/// Asks the model server of a configuration, or one at the default address.
pub(crate) async fn probe(config: &InferenceConfig) -> Option<ServerCheck> {
    let url = config.url.clone().unwrap_or_else(|| DEFAULT_URL.to_owned());
    let backend = Backend::new(config.clone(), &url).ok()?;
    backend.refresh().await;
    let checked = url.clone();
    let exposed = tokio::task::spawn_blocking(move || backend::exposed_listener(&checked));
    Some(ServerCheck {
        url,
        report: backend.report(),
        exposed: exposed.await.ok().flatten(),
    })
}

#[cfg(test)]
mod tests;

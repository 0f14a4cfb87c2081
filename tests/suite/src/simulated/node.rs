//! The node's side of the control plane, like the real worker's `control.rs`.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    API_VERSION, Heartbeat, HeartbeatAnswer, JobId, NodeConfig, NodeRegister, NodeRegistered,
    SessionState,
};
use cynode_service::auth::Token;
use http::StatusCode;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::{Registration, Shared, SimulatedWorker};

impl SimulatedWorker {
    /// Registers with a control plane and starts to send heartbeats.
    pub async fn join(&self, control_url: &str, key: &str) -> Result<()> {
        let http = reqwest::Client::builder()
            .timeout(Duration::from_secs(20))
            .no_proxy()
            .build()?;
        let control = Control {
            shared: Arc::clone(&self.shared),
            http,
            base: control_url.trim_end_matches('/').to_owned(),
            key: key.trim().to_owned(),
        };
        control.register().await?;
        let job_updates = self
            .job_updates
            .lock()
            .expect("not poisoned")
            .take()
            .context("the node has already joined a control plane")?;
        self.tasks
            .lock()
            .expect("not poisoned")
            .push(tokio::spawn(control.run(job_updates)));
        Ok(())
    }
}

struct Control {
    shared: Arc<Shared>,
    http: reqwest::Client,
    base: String,
    key: String,
}

impl Control {
    async fn register(&self) -> Result<()> {
        let shared = &self.shared;
        let request = NodeRegister {
            version: Some(API_VERSION),
            psk: self.key.clone(),
            node_id: Some(shared.node_id),
            node_name: shared.name.clone(),
            api_url: format!("http://{}", shared.address),
            capability: shared.capability(),
        };
        let answer: NodeRegistered = read(
            self.http
                .post(format!("{}/v1/nodes/register", self.base))
                .json(&request),
        )
        .await?;
        shared.store(Registration {
            node_token: answer.node_token,
            worker_token: answer.worker_token,
            previous_worker_token: None,
        });
        *shared.config.lock().expect("not poisoned") = answer.config;
        Ok(())
    }

    async fn run(self, mut job_updates: mpsc::UnboundedReceiver<JobId>) {
        let mut cut_off = self.shared.cut_off.subscribe();
        loop {
            if cut_off.wait_for(|cut| !cut).await.is_err() {
                return;
            }
            // A lost heartbeat needs no retry: the next one carries the same state.
            if let Err(error) = self.send_heartbeat().await
                && error
                    .downcast_ref::<reqwest::Error>()
                    .is_some_and(|error| error.status() == Some(StatusCode::UNAUTHORIZED))
            {
                drop(self.register().await);
            }
            let next = tokio::time::Instant::now()
                + Duration::from_secs(
                    self.shared
                        .config
                        .lock()
                        .expect("not poisoned")
                        .heartbeat_seconds
                        .max(1),
                );
            while let Ok(Some(id)) = tokio::time::timeout_at(next, job_updates.recv()).await {
                if !*cut_off.borrow() {
                    drop(self.report(id).await);
                }
            }
        }
    }

    async fn send_heartbeat(&self) -> Result<()> {
        let shared = &self.shared;
        let registration = shared.registration.lock().expect("not poisoned").clone();
        let running = {
            let state = shared.state();
            let sessions = state
                .sessions
                .values()
                .filter(|entry| entry.session.state == SessionState::Running)
                .count();
            sessions
                + state
                    .jobs
                    .values()
                    .filter(|entry| !entry.job.state.is_final())
                    .count()
        };
        let revision = shared.config.lock().expect("not poisoned").revision;
        let send_heartbeat = Heartbeat {
            version: Some(API_VERSION),
            running_sandboxes: running,
            config_revision: revision,
            ..Default::default()
        };
        let request = self
            .http
            .post(format!("{}/v1/nodes/heartbeat", self.base))
            .bearer_auth(&registration.node_token)
            .json(&send_heartbeat);
        let answer: HeartbeatAnswer = read(request).await?;
        if let Some(new) = answer.rotate {
            let previous = if new.worker_token == registration.worker_token {
                registration.previous_worker_token
            } else {
                Some(registration.worker_token)
            };
            shared.store(Registration {
                node_token: new.node_token,
                worker_token: new.worker_token,
                previous_worker_token: previous,
            });
        }
        if answer.config_revision != revision {
            let token = shared
                .registration
                .lock()
                .expect("not poisoned")
                .node_token
                .clone();
            let config: NodeConfig = read(
                self.http
                    .get(format!("{}/v1/nodes/config", self.base))
                    .bearer_auth(token),
            )
            .await?;
            *shared.config.lock().expect("not poisoned") = config;
        }
        Ok(())
    }

    /// Reports a job's change of state.
    async fn report(&self, id: JobId) -> Result<()> {
        let token = self
            .shared
            .registration
            .lock()
            .expect("not poisoned")
            .node_token
            .clone();
        let body = serde_json::json!({ "version": API_VERSION });
        self.http
            .post(format!("{}/v1/nodes/jobs/{id}/status", self.base))
            .bearer_auth(token)
            .json(&body)
            .send()
            .await?;
        Ok(())
    }
}

impl Shared {
    fn store(&self, registration: Registration) {
        let tokens = [
            Some(&self.own_token),
            Some(&registration.worker_token),
            registration.previous_worker_token.as_ref(),
        ];
        self.tokens.set(
            tokens
                .into_iter()
                .flatten()
                .map(|token| Token::new(token))
                .collect(),
        );
        *self.registration.lock().expect("not poisoned") = registration;
    }
}

async fn read<T: DeserializeOwned>(request: reqwest::RequestBuilder) -> Result<T> {
    let answer = request.send().await?.error_for_status()?;
    let bytes = answer.bytes().await?;
    ensure!(!bytes.is_empty(), "the response is empty");
    Ok(serde_json::from_slice(&bytes)?)
}

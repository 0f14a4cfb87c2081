//! A minimal deployment: one orchestrator and one registered worker.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{
    Answer, ControlPlane, IMAGE, Options, RunningOrchestrator, RunningWorker, eventually,
};
use http::Method;
use reqwest::RequestBuilder;
use serde_json::{Value, json};

pub(super) struct Cluster {
    pub(super) control_plane: ControlPlane,
    pub(super) orchestrator: RunningOrchestrator,
    pub(super) worker: RunningWorker,
    http: reqwest::Client,
}

impl Cluster {
    pub(super) async fn start() -> Result<Self> {
        Self::with_image(IMAGE).await
    }

    /// The same with another default image.
    pub(super) async fn with_image(image: &str) -> Result<Self> {
        Self::with_options(image, |options| options).await
    }

    /// The same with more settings of the worker.
    pub(super) async fn with_options(
        image: &str,
        adjust: impl FnOnce(Options) -> Options,
    ) -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let key = control_plane
            .world
            .directory()
            .join("registration.key")
            .display()
            .to_string();
        let images = format!("[{image:?}]");
        let settings = [
            ("registration_key_file", key.as_str()),
            ("seed_images", images.as_str()),
            ("heartbeat_seconds", "1"),
        ];
        let orchestrator = control_plane.orchestrator("", &settings).await?;
        let options = Options::default()
            .set(
                "orchestrator_url",
                &format!("{:?}", orchestrator.control_url()?),
            )
            .set("registration_key_file", &format!("{key:?}"))
            .set("name", "\"node-1\"");
        let worker = control_plane.world.worker(&adjust(options)).await?;
        let client = orchestrator.client()?;
        let ready = async || {
            Ok(client
                .nodes()
                .await?
                .iter()
                .any(|node| node.state == cynode_api::NodeState::Ready))
        };
        eventually("the node has registered", Duration::from_secs(60), ready).await?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(60))
            .build()?;
        Ok(Self {
            control_plane,
            orchestrator,
            worker,
            http,
        })
    }

    /// Starts another orchestrator on the same database.
    pub(super) async fn second(&self) -> Result<RunningOrchestrator> {
        let directory = self.control_plane.world.directory();
        let state = directory.join("orchestrator-two");
        fs_err::create_dir_all(&state)?;
        // Another token of the administrator would revoke the first.
        fs_err::copy(
            self.orchestrator.state_dir().join("admin.token"),
            state.join("admin.token"),
        )?;
        let key = directory.join("registration.key").display().to_string();
        let images = format!("[{IMAGE:?}]");
        let settings = [
            ("registration_key_file", key.as_str()),
            ("seed_images", images.as_str()),
            ("heartbeat_seconds", "1"),
        ];
        self.control_plane.orchestrator("two", &settings).await
    }

    /// A request to the user API with the administrator's token.
    pub(super) fn request(&self, method: Method, path: &str) -> Result<RequestBuilder> {
        self.request_by(&self.orchestrator.token()?, method, path)
    }

    /// A request to the user API with a given token.
    pub(super) fn request_by(
        &self,
        token: &str,
        method: Method,
        path: &str,
    ) -> Result<RequestBuilder> {
        Ok(self
            .http
            .request(method, format!("{}{path}", self.orchestrator.url()?))
            .bearer_auth(token))
    }

    /// A request to the control plane with a given token.
    pub(super) fn control(
        &self,
        token: &str,
        method: Method,
        path: &str,
    ) -> Result<RequestBuilder> {
        Ok(self
            .http
            .request(
                method,
                format!("{}{path}", self.orchestrator.control_url()?),
            )
            .bearer_auth(token))
    }

    /// Creates something with a POST request and returns the response.
    pub(super) async fn make(&self, token: &str, path: &str, body: &Value) -> Result<Value> {
        let answer = Answer::of(self.request_by(token, Method::POST, path)?.json(body)).await?;
        ensure!(
            (200..300).contains(&answer.status),
            "{path}: {}",
            String::from_utf8_lossy(&answer.body)
        );
        Ok(serde_json::from_slice(&answer.body)?)
    }

    /// Creates a session and waits until it runs.
    pub(super) async fn session(&self, token: &str, body: &Value) -> Result<String> {
        let id = text(&self.make(token, "/v1/sessions", body).await?["session_id"])?;
        eventually("the session runs", Duration::from_secs(60), async || {
            let answer =
                Answer::of(self.request_by(token, Method::GET, &format!("/v1/sessions/{id}"))?)
                    .await?;
            Ok(serde_json::from_slice::<Value>(&answer.body)?["state"] == "running")
        })
        .await?;
        Ok(id)
    }

    /// Creates a user, and a token for them.
    pub(super) async fn user(&self, name: &str) -> Result<(String, String)> {
        let admin = self.orchestrator.token()?;
        let user = self
            .make(&admin, "/v1/users", &json!({"name": name}))
            .await?;
        let token = self
            .make(&admin, "/v1/tokens", &json!({"kind": "user", "user": name}))
            .await?;
        Ok((text(&user["id"])?, text(&token["token"])?))
    }
}

/// A JSON value that must be a string.
pub(super) fn text(value: &Value) -> Result<String> {
    value
        .as_str()
        .map(str::to_owned)
        .with_context(|| format!("{value} is not a string"))
}

/// The body of a session with small limits.
pub(super) fn session() -> Value {
    json!({"limits": {"memory_bytes": 64 << 20, "disk_bytes": 32 << 20}})
}

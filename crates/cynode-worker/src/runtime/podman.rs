//! Podman over its REST socket: the Docker-compatible calls by bollard, creation by libpod's own.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bollard::{
    API_DEFAULT_VERSION, Docker,
    container::LogOutput,
    exec::{CreateExecOptions, ResizeExecOptions, StartExecOptions, StartExecResults},
    query_parameters::{KillContainerOptions, RemoveContainerOptions},
};
use cynode_api::Stream;
use futures_util::StreamExt as _;
use http::{
    StatusCode,
    header::{CONNECTION, UPGRADE},
};
use serde_json::Value;
use tokio::sync::OnceCell;
use tokio_util::io::ReaderStream;

use super::{
    Container, Error, ExecSpec, Image, Runtime, RuntimeExec, RuntimeExecState, ServiceOptions, Spec, last_word, libpod,
    service::{self, Service},
};
use crate::process;

const REMOVE_TRIES: u32 = 8;
/// How long a new size is offered to a terminal that is about to start.
const RESIZE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct PodmanOptions {
    /// A service that somebody else runs; without it a private one is started.
    pub socket: Option<PathBuf>,
    pub service: ServiceOptions,
    /// The OCI runtime that works here; Podman's default when absent.
    pub oci_runtime: Option<String>,
    /// What a call may take; creation, which waits for others under Podman's locks, twice that.
    pub call_limit: Duration,
}

#[derive(Debug)]
pub struct Podman {
    call_limit: Duration,
    socket: PathBuf,
    service: Option<Service>,
    oci_runtime: Option<String>,
    clients: OnceCell<Clients>,
}

#[derive(Debug)]
struct Clients {
    docker: Docker,
    libpod: reqwest::Client,
}

impl Podman {
    #[must_use]
    pub fn new(options: PodmanOptions) -> Self {
        let service = options.socket.is_none().then(|| Service::new(options.service));
        let socket = options.socket.unwrap_or_else(|| service.as_ref().map(Service::socket).unwrap_or_default());
        Self { socket, service, oci_runtime: options.oci_runtime, clients: OnceCell::new(), call_limit: options.call_limit }
    }

    async fn clients(&self) -> Result<&Clients, Error> {
        self.clients
            .get_or_try_init(|| async {
                match &self.service {
                    Some(service) => service.ensure().await?,
                    None if service::answers(&self.socket).await => {}
                    None => return Err(Error::Unavailable(format!("nothing answers on {}", self.socket.display()))),
                }
                let unavailable = |error: &dyn std::fmt::Display| Error::Unavailable(error.to_string());
                let docker = Docker::connect_with_unix(&self.socket.to_string_lossy(), 3_600, API_DEFAULT_VERSION).map_err(|error| unavailable(&error))?;
                let docker = tokio::time::timeout(self.call_limit, docker.negotiate_version())
                    .await
                    .map_err(|_| Error::Timeout { call: "version", limit: self.call_limit })?
                    .map_err(|error| unavailable(&error))?;
                let libpod = reqwest::Client::builder().unix_socket(self.socket.as_path()).build().map_err(|error| unavailable(&error))?;
                Ok(Clients { docker, libpod })
            })
            .await
    }

    /// Runs a call under its deadline. A service of ours that hangs or is gone is started anew; a call that is safe to
    /// repeat is then repeated once.
    async fn call<T, F>(&self, call: &'static str, limit: Duration, repeat: bool, run: impl Fn(&Clients) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let started = std::time::Instant::now();
        let result = self.try_call(call, limit, &run).await;
        let result = match (result, &self.service) {
            (Err(error @ (Error::Timeout { .. } | Error::Unavailable(_))), Some(service)) => {
                service.restart(if matches!(error, Error::Timeout { .. }) { service::HUNG } else { "it is gone" }).await?;
                if repeat { self.try_call(call, limit, &run).await } else { Err(error) }
            }
            (result, _) => result,
        };
        metrics::histogram!("cynode_runtime_call_seconds", "call" => call).record(started.elapsed().as_secs_f64());
        result
    }

    /// A reading libpod call.
    async fn libpod_get(&self, call: &'static str, path: &str, query: &[(&str, &str)]) -> Result<Value, Error> {
        self.call(call, self.call_limit, true, |clients| {
            let request = clients.libpod.get(format!("http://podman/v4.0.0/libpod/{path}")).query(query);
            async move {
                let response = request.send().await.map_err(|error| Error::Unavailable(error.to_string()))?;
                let status = response.status().as_u16();
                let answer: Value = response.json().await.map_err(|error| Error::Unavailable(error.to_string()))?;
                match status {
                    200 => Ok(answer),
                    404 => Err(Error::NotFound(path.to_owned())),
                    _ => Err(Error::Refused { call, message: text(&answer["message"]) }),
                }
            }
        })
        .await
    }

    async fn try_call<T, F>(&self, call: &'static str, limit: Duration, run: &impl Fn(&Clients) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let clients = self.clients().await?;
        tokio::time::timeout(limit, run(clients)).await.map_err(|_| Error::Timeout { call, limit })?
    }
}

fn translate(call: &'static str, what: &str) -> impl Fn(bollard::errors::Error) -> Error {
    let what = what.to_owned();
    move |error| match error {
        bollard::errors::Error::DockerResponseServerError { status_code: 404, .. } => Error::NotFound(what.clone()),
        bollard::errors::Error::DockerResponseServerError { status_code: 409, message } if call == "create" => Error::NameInUse(message),
        bollard::errors::Error::DockerResponseServerError { message, .. } => Error::Refused { call, message },
        bollard::errors::Error::RequestTimeoutError => Error::Unavailable("the request timed out".to_owned()),
        other => Error::Unavailable(other.to_string()),
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn labels(value: &Value) -> BTreeMap<String, String> {
    value.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), text(value))).collect()
}

/// Starts an exec with a terminal. Not by bollard, which has no words for the terminal's size: set afterwards it comes later
/// still, and is refused when the program has ended by then.
async fn start_terminal(libpod: &reqwest::Client, id: String, (columns, rows): (u16, u16)) -> Result<RuntimeExec, Error> {
    let unavailable = |error: reqwest::Error| Error::Unavailable(error.to_string());
    let request = libpod.post(format!("http://podman/v4.0.0/libpod/exec/{id}/start")).header(CONNECTION, "Upgrade").header(UPGRADE, "tcp");
    let body = serde_json::json!({ "Detach": false, "Tty": true, "h": rows, "w": columns });
    let response = request.json(&body).send().await.map_err(unavailable)?;
    match response.status() {
        StatusCode::SWITCHING_PROTOCOLS => {}
        StatusCode::NOT_FOUND => return Err(Error::NotFound(id)),
        _ => {
            let answer: Value = response.json().await.map_err(unavailable)?;
            return Err(Error::Refused { call: "exec", message: text(&answer["message"]) });
        }
    }
    let (output, input) = tokio::io::split(response.upgrade().await.map_err(unavailable)?);
    let output = ReaderStream::with_capacity(output, 64 * 1024)
        .map(|piece| piece.map(|data| (Stream::Stdout, data)).map_err(|error| Error::Unavailable(error.to_string())));
    Ok(RuntimeExec { id, input: Box::pin(input), output: last_word::dropped(Box::pin(output)) })
}

#[async_trait]
impl Runtime for Podman {
    async fn version(&self) -> Result<String, Error> {
        self.call("version", self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move {
                let version = docker.version().await.map_err(translate("version", "version"))?;
                let name = version
                    .components
                    .and_then(|components| components.into_iter().next())
                    .map_or_else(|| "container engine".to_owned(), |component| component.name);
                Ok(format!("{name} {}", version.version.unwrap_or_default()))
            }
        })
        .await
    }

    async fn image(&self, reference: &str) -> Result<Image, Error> {
        self.call("image", self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move {
                let found = docker.inspect_image(reference).await.map_err(translate("image", reference))?;
                let config = found.config.unwrap_or_default();
                Ok(Image {
                    id: found.id.unwrap_or_default(),
                    digest: found
                        .repo_digests
                        .unwrap_or_default()
                        .into_iter()
                        .next()
                        .and_then(|digest| digest.split_once('@').map(|(_, digest)| digest.to_owned())),
                    labels: config.labels.unwrap_or_default().into_iter().collect(),
                    env: config
                        .env
                        .unwrap_or_default()
                        .iter()
                        .filter_map(|variable| variable.split_once('='))
                        .map(|(name, value)| (name.to_owned(), value.to_owned()))
                        .collect(),
                })
            }
        })
        .await
    }

    async fn create(&self, spec: &Spec) -> Result<String, Error> {
        let body = libpod::create_body(spec, self.oci_runtime.as_deref());
        self.call("create", 2 * self.call_limit, false, |clients| {
            let request = clients.libpod.post("http://podman/v4.0.0/libpod/containers/create").json(&body);
            async move {
                let response = request.send().await.map_err(|error| Error::Unavailable(error.to_string()))?;
                let status = response.status().as_u16();
                let answer: Value = response.json().await.map_err(|error| Error::Unavailable(error.to_string()))?;
                let message = text(&answer["message"]);
                // 4.x answers a taken name and a missing image with 500.
                if status == 201 {
                    Ok(text(&answer["Id"]))
                } else if status == 409 || message.contains("already in use") {
                    Err(Error::NameInUse(spec.name.clone()))
                } else if status == 404 || message.contains("no such image") || message.contains("image not known") {
                    Err(Error::NotFound(spec.image_id.clone()))
                } else {
                    Err(Error::Refused { call: "create", message })
                }
            }
        })
        .await
    }

    async fn start(&self, name: &str) -> Result<(), Error> {
        self.call("start", 2 * self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move { docker.start_container(name, None).await.map_err(translate("start", name)) }
        })
        .await
    }

    // Not by bollard: Podman has states that the Docker API does not know ("stopped", "initialized").
    async fn inspect(&self, name: &str) -> Result<Container, Error> {
        let found = self.libpod_get("inspect", &format!("containers/{name}/json"), &[]).await?;
        let running = found["State"]["Running"].as_bool().unwrap_or_default();
        Ok(Container {
            id: text(&found["Id"]),
            name: text(&found["Name"]),
            running,
            pid: if running { found["State"]["Pid"].as_i64().and_then(|pid| pid.try_into().ok()).unwrap_or_default() } else { 0 },
            exit_code: found["State"]["ExitCode"].as_i64().filter(|_| !running),
            labels: labels(&found["Config"]["Labels"]),
        })
    }

    async fn list(&self, label: &str, value: &str) -> Result<Vec<Container>, Error> {
        let filters = serde_json::json!({ "label": [format!("{label}={value}")] }).to_string();
        let found = self.libpod_get("list", "containers/json", &[("all", "true"), ("filters", &filters)]).await?;
        Ok(found
            .as_array()
            .into_iter()
            .flatten()
            .map(|summary| Container {
                id: text(&summary["Id"]),
                name: text(&summary["Names"][0]),
                running: summary["State"] == "running",
                pid: 0,
                exit_code: None,
                labels: labels(&summary["Labels"]),
            })
            .collect())
    }

    async fn kill(&self, name: &str, signal: &str) -> Result<(), Error> {
        self.call("kill", self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            let options = KillContainerOptions { signal: signal.to_owned() };
            async move { docker.kill_container(name, Some(options)).await.map_err(translate("kill", name)) }
        })
        .await
    }

    async fn remove(&self, name: &str) -> Result<(), Error> {
        let mut pause = Duration::from_millis(50);
        for attempt in 1.. {
            let removed = self
                .call("remove", self.call_limit, true, |clients| {
                    let docker = clients.docker.clone();
                    let options = RemoveContainerOptions { force: true, v: true, ..Default::default() };
                    async move { docker.remove_container(name, Some(options)).await.map_err(translate("remove", name)) }
                })
                .await;
            match removed {
                Ok(()) | Err(Error::NotFound(_)) => {
                    process::kill_monitors(name);
                    return Ok(());
                }
                // "Busy", or a removal by somebody else under way: often the container is gone at the next look.
                Err(error) if attempt < REMOVE_TRIES => {
                    tracing::debug!(name, %error, attempt, "Removing a container again.");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(2));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn exec(&self, name: &str, spec: &ExecSpec) -> Result<RuntimeExec, Error> {
        self.call("exec", self.call_limit, false, |clients| {
            let (docker, libpod) = (clients.docker.clone(), clients.libpod.clone());
            let options = CreateExecOptions {
                attach_stdin: Some(spec.stdin),
                attach_stdout: Some(true),
                attach_stderr: Some(spec.tty.is_none()),
                tty: Some(spec.tty.is_some()),
                env: Some(spec.env.iter().map(|(name, value)| format!("{name}={value}")).collect()),
                cmd: Some(spec.argv.clone()),
                privileged: Some(false),
                user: Some("1000:1000".to_owned()),
                working_dir: Some(spec.cwd.clone()),
                ..Default::default()
            };
            async move {
                let created = docker.create_exec(name, options).await.map_err(translate("exec", name))?;
                if let Some(size) = spec.tty {
                    return start_terminal(&libpod, created.id, size).await;
                }
                let options = StartExecOptions { detach: false, tty: false, output_capacity: Some(64 * 1024) };
                match docker.start_exec(&created.id, Some(options)).await.map_err(translate("exec", name))? {
                    StartExecResults::Attached { output, input } => {
                        let output = output.filter_map(async |piece| match piece {
                            Ok(LogOutput::StdErr { message }) => Some(Ok((Stream::Stderr, message))),
                            Ok(LogOutput::StdOut { message } | LogOutput::Console { message }) => Some(Ok((Stream::Stdout, message))),
                            Ok(LogOutput::StdIn { .. }) => None,
                            Err(error) => Some(Err(Error::Unavailable(error.to_string()))),
                        });
                        Ok(RuntimeExec { id: created.id, input, output: last_word::dropped(Box::pin(output)) })
                    }
                    StartExecResults::Detached => Err(Error::Refused { call: "exec", message: "the exec came back detached".to_owned() }),
                }
            }
        })
        .await
    }

    async fn exec_state(&self, id: &str) -> Result<RuntimeExecState, Error> {
        self.call("exec_state", self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move {
                let state = docker.inspect_exec(id).await.map_err(translate("exec_state", id))?;
                let running = state.running.unwrap_or_default();
                Ok(RuntimeExecState {
                    running,
                    exit_code: state.exit_code.filter(|_| !running),
                    pid: state.pid.and_then(|pid| pid.try_into().ok()).unwrap_or_default(),
                })
            }
        })
        .await
    }

    async fn exec_resize(&self, id: &str, columns: u16, rows: u16) -> Result<(), Error> {
        let until = Instant::now() + RESIZE;
        loop {
            let resized = self
                .call("exec_resize", self.call_limit, true, |clients| {
                    let docker = clients.docker.clone();
                    async move { docker.resize_exec(id, ResizeExecOptions { height: rows, width: columns }).await.map_err(translate("exec_resize", id)) }
                })
                .await;
            match resized {
                // Podman refuses until it has noted that the exec runs, which is after it has said that it has started.
                Err(Error::Refused { .. }) if Instant::now() < until => tokio::time::sleep(Duration::from_millis(50)).await,
                resized => return resized,
            }
        }
    }

    async fn close(&self) {
        if let Some(service) = &self.service {
            service.kill();
        }
    }
}

//! Podman over its REST socket: Docker-compatible calls through bollard, creation through libpod.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bollard::Docker;
use cynode_api::LocalImage;
use serde_json::Value;
use tokio::sync::OnceCell;

use super::{
    Container, ExecSpec, IdMap, IdSpace, Image, Runtime, RuntimeError, RuntimeExec,
    RuntimeExecState, ServiceOptions, Spec, attach_error,
    compat::{self, translate},
    libpod, seccomp,
    service::{self, Service},
};
use crate::process;

/// How long a resize of a terminal that is about to start is retried.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(5);
const SECOND_RESIZE_DELAY: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub struct PodmanOptions {
    /// The socket of an external service; without it, a private one is started.
    pub socket: Option<PathBuf>,
    pub service: ServiceOptions,
    /// The OCI runtime that works here; Podman's default if absent.
    pub oci_runtime: Option<String>,
    /// Timeout of a call; creation, which waits for Podman's locks, gets twice that.
    pub call_limit: Duration,
}

#[derive(Debug)]
pub struct Podman {
    call_limit: Duration,
    socket: PathBuf,
    service: Option<Service>,
    oci_runtime: Option<String>,
    /// Where the seccomp profile is written.
    directory: PathBuf,
    clients: OnceCell<PodmanClients>,
}

#[derive(Debug)]
struct PodmanClients {
    docker: Docker,
    libpod: reqwest::Client,
    seccomp_profile: PathBuf,
    hosts: PathBuf,
}

/// Writes the file that sandboxes see as `/etc/hosts`.
fn write_hosts(directory: &Path) -> io::Result<PathBuf> {
    let path = directory.join("hosts");
    cynode_service::files::replace(&path, libpod::HOSTS.as_bytes())?;
    // It is not secret, and other users read it.
    fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    Ok(path)
}

impl Podman {
    #[must_use]
    pub fn new(options: PodmanOptions) -> Self {
        let directory = options.service.directory.clone();
        let service = options
            .socket
            .is_none()
            .then(|| Service::new(options.service));
        let socket = options
            .socket
            .unwrap_or_else(|| service.as_ref().map(Service::socket).unwrap_or_default());
        Self {
            socket,
            service,
            oci_runtime: options.oci_runtime,
            directory,
            clients: OnceCell::new(),
            call_limit: options.call_limit,
        }
    }

    async fn clients(&self) -> Result<&PodmanClients, RuntimeError> {
        self.clients
            .get_or_try_init(|| async {
                match &self.service {
                    Some(service) => service.ensure().await?,
                    None if service::answers(&self.socket).await => {}
                    None => {
                        return Err(RuntimeError::Unavailable(format!(
                            "no service answers on {}",
                            self.socket.display()
                        )));
                    }
                }
                let unavailable =
                    |error: &dyn std::fmt::Display| RuntimeError::Unavailable(error.to_string());
                let seccomp_profile =
                    seccomp::write(&self.directory).map_err(|error| unavailable(&error))?;
                let hosts = write_hosts(&self.directory).map_err(|error| unavailable(&error))?;
                let docker = compat::connect(&self.socket, self.call_limit).await?;
                let libpod = reqwest::Client::builder()
                    .unix_socket(self.socket.as_path())
                    .build()
                    .map_err(|error| unavailable(&error))?;
                Ok(PodmanClients {
                    docker,
                    libpod,
                    seccomp_profile,
                    hosts,
                })
            })
            .await
    }

    /// Runs a call with a timeout. A private service that hangs or is gone is restarted; a call
    /// that is safe to repeat is then repeated once.
    async fn call<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        repeat: bool,
        run: impl Fn(&PodmanClients) -> F,
    ) -> Result<T, RuntimeError>
    where
        F: Future<Output = Result<T, RuntimeError>>,
    {
        let started = std::time::Instant::now();
        let result = self.try_call(call, limit, &run).await;
        let result = match (result, &self.service) {
            (
                Err(
                    error @ (RuntimeError::Timeout { .. }
                    | RuntimeError::Unavailable(_)
                    | RuntimeError::Unreached(_)),
                ),
                Some(service),
            ) => {
                service
                    .restart(if matches!(error, RuntimeError::Timeout { .. }) {
                        service::HUNG
                    } else {
                        "it is not running"
                    })
                    .await?;
                if repeat || matches!(error, RuntimeError::Unreached(_)) {
                    self.try_call(call, limit, &run).await
                } else {
                    Err(error)
                }
            }
            (result, _) => result,
        };
        metrics::histogram!("cynode_runtime_call_seconds", "call" => call)
            .record(started.elapsed().as_secs_f64());
        result
    }

    /// A read-only libpod call.
    async fn libpod_get(
        &self,
        call: &'static str,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<Value, RuntimeError> {
        self.call(call, self.call_limit, true, |clients| {
            let request = clients
                .libpod
                .get(format!("http://podman/v4.0.0/libpod/{path}"))
                .query(query);
            async move {
                let response = request
                    .send()
                    .await
                    .map_err(|error| RuntimeError::Unavailable(error.to_string()))?;
                let status = response.status().as_u16();
                let body: Value = response
                    .json()
                    .await
                    .map_err(|error| RuntimeError::Unavailable(error.to_string()))?;
                match status {
                    200 => Ok(body),
                    404 => Err(RuntimeError::NotFound(path.to_owned())),
                    _ => Err(RuntimeError::Refused {
                        call,
                        message: text(&body["message"]),
                    }),
                }
            }
        })
        .await
    }

    async fn try_call<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        run: &impl Fn(&PodmanClients) -> F,
    ) -> Result<T, RuntimeError>
    where
        F: Future<Output = Result<T, RuntimeError>>,
    {
        let clients = self.clients().await?;
        tokio::time::timeout(limit, run(clients))
            .await
            .map_err(|_| RuntimeError::Timeout { call, limit })?
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn labels(value: &Value) -> BTreeMap<String, String> {
    value
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| (name.clone(), text(value)))
        .collect()
}

/// The ids available to sandboxes, from Podman's information about itself.
pub(crate) fn id_space(info: &Value) -> IdSpace {
    let host = &info["host"];
    if !host["security"]["rootless"].as_bool().unwrap_or_default() {
        return IdSpace::Own;
    }
    // As seen in Podman's namespace, where 0 is the user and subordinate ids start at 1.
    let count = |kind: &str| {
        let ranges = host["idMappings"][kind].as_array().into_iter().flatten();
        ranges
            .filter(|range| range["container_id"] != 0)
            .filter_map(|range| range["size"].as_u64())
            .sum::<u64>()
    };
    IdSpace::Within(IdMap {
        first: 1,
        count: u32::try_from(count("uidmap").min(count("gidmap"))).unwrap_or(u32::MAX),
    })
}

#[async_trait]
impl Runtime for Podman {
    async fn ping(&self) -> Result<(), RuntimeError> {
        self.call("ping", self.call_limit, true, |clients| {
            compat::ping(clients.docker.clone())
        })
        .await
    }

    async fn ids(&self) -> Result<IdSpace, RuntimeError> {
        self.libpod_get("ids", "info", &[])
            .await
            .map(|info| id_space(&info))
    }

    async fn image(&self, reference: &str) -> Result<Image, RuntimeError> {
        self.call("image", self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move {
                docker
                    .inspect_image(reference)
                    .await
                    .map(|inspected| compat::image(inspected, reference))
                    .map_err(translate("image", reference))
            }
        })
        .await
    }

    async fn images(&self) -> Result<Vec<LocalImage>, RuntimeError> {
        self.call("images", self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move { compat::images(docker).await }
        })
        .await
    }

    async fn create(&self, spec: &Spec) -> Result<String, RuntimeError> {
        self.call("create", 2 * self.call_limit, false, |clients| {
            let mut body =
                libpod::create_body(spec, self.oci_runtime.as_deref(), &clients.seccomp_profile);
            libpod::mount_hosts(&mut body, &clients.hosts);
            let request = clients
                .libpod
                .post("http://podman/v4.0.0/libpod/containers/create")
                .json(&body);
            async move {
                let send_failed = |error: reqwest::Error| {
                    if error.is_connect() {
                        RuntimeError::Unreached(error.to_string())
                    } else {
                        RuntimeError::Unavailable(error.to_string())
                    }
                };
                let response = request.send().await.map_err(send_failed)?;
                let status = response.status().as_u16();
                let body: Value = response
                    .json()
                    .await
                    .map_err(|error| RuntimeError::Unavailable(error.to_string()))?;
                let message = text(&body["message"]);
                // Podman 4 reports a name conflict and a missing image with status 500.
                if status == 201 {
                    Ok(text(&body["Id"]))
                } else if status == 409 || message.contains("already in use") {
                    Err(RuntimeError::NameInUse(spec.name.clone()))
                } else if status == 404
                    || message.contains("no such image")
                    || message.contains("image not known")
                {
                    Err(RuntimeError::NotFound(spec.image_id.clone()))
                } else {
                    Err(RuntimeError::Refused {
                        call: "create",
                        message,
                    })
                }
            }
        })
        .await
    }

    async fn start(&self, name: &str) -> Result<(), RuntimeError> {
        self.call("start", 2 * self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move {
                docker
                    .start_container(name, None)
                    .await
                    .map_err(translate("start", name))
            }
        })
        .await
    }

    // Not through bollard: Podman has states that the Docker API lacks ("stopped", "initialized").
    async fn inspect(&self, name: &str) -> Result<Container, RuntimeError> {
        let inspected = self
            .libpod_get("inspect", &format!("containers/{name}/json"), &[])
            .await?;
        let running = inspected["State"]["Running"].as_bool().unwrap_or_default();
        Ok(Container {
            id: text(&inspected["Id"]),
            name: text(&inspected["Name"]),
            running,
            pid: if running {
                inspected["State"]["Pid"]
                    .as_i64()
                    .and_then(|pid| pid.try_into().ok())
                    .unwrap_or_default()
            } else {
                0
            },
            exit_code: inspected["State"]["ExitCode"].as_i64().filter(|_| !running),
            labels: labels(&inspected["Config"]["Labels"]),
        })
    }

    async fn list(&self, label: &str, value: &str) -> Result<Vec<Container>, RuntimeError> {
        let filters = serde_json::json!({ "label": [format!("{label}={value}")] }).to_string();
        let summaries = self
            .libpod_get(
                "list",
                "containers/json",
                &[("all", "true"), ("filters", &filters)],
            )
            .await?;
        Ok(summaries
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

    async fn kill(&self, name: &str, signal: &str) -> Result<(), RuntimeError> {
        self.call("kill", self.call_limit, true, |clients| {
            compat::kill(clients.docker.clone(), name, signal)
        })
        .await
    }

    async fn remove(&self, name: &str) -> Result<(), RuntimeError> {
        compat::remove_with_retries(name, || {
            self.call("remove", self.call_limit, true, |clients| {
                compat::remove(clients.docker.clone(), name)
            })
        })
        .await?;
        process::kill_monitors(name).await;
        Ok(())
    }

    async fn exec(&self, name: &str, spec: &ExecSpec) -> Result<RuntimeExec, RuntimeError> {
        self.call("exec", self.call_limit, false, |clients| {
            let (docker, libpod) = (clients.docker.clone(), clients.libpod.clone());
            async move {
                let id = compat::create_exec(&docker, name, spec).await?;
                if let Some(size) = spec.tty {
                    return compat::start_terminal(
                        &libpod,
                        "http://podman/v4.0.0/libpod",
                        id,
                        size,
                    )
                    .await;
                }
                let started = compat::start_exec(&docker, id, name).await?;
                Ok(RuntimeExec {
                    output: attach_error::strip(started.output),
                    ..started
                })
            }
        })
        .await
    }

    async fn exec_state(&self, id: &str) -> Result<RuntimeExecState, RuntimeError> {
        self.call("exec_state", self.call_limit, true, |clients| {
            compat::exec_state(clients.docker.clone(), id)
        })
        .await
    }

    async fn exec_resize(&self, id: &str, columns: u16, rows: u16) -> Result<(), RuntimeError> {
        let resize = || {
            self.call("exec_resize", self.call_limit, true, |clients| {
                compat::exec_resize(clients.docker.clone(), id, columns, rows)
            })
        };
        let deadline = Instant::now() + RESIZE_TIMEOUT;
        loop {
            match resize().await {
                // Podman refuses until it has recorded that the exec runs, which is after reporting
                // its start.
                Err(RuntimeError::Refused { .. }) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Ok(()) => break,
                other => return other,
            }
        }
        // When two resizes reach conmon at once (the initial one and the next, or a dragged
        // window), it applies the older and drops the newer. So each is repeated after the previous
        // one has been read.
        tokio::time::sleep(SECOND_RESIZE_DELAY).await;
        match resize().await {
            // The exec has ended meanwhile.
            Err(RuntimeError::NotFound(_) | RuntimeError::Refused { .. }) => Ok(()),
            other => other,
        }
    }

    async fn close(&self) {
        if let Some(service) = &self.service
            && let Err(error) = service.close().await
        {
            tracing::warn!(%error, "Failed to stop the private Podman service.");
        }
    }
}

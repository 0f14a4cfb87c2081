//! Podman over its REST socket: the Docker-compatible calls by bollard, creation by libpod's own.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bollard::Docker;
use cynode_api::LocalImage;
use serde_json::Value;
use tokio::sync::OnceCell;

use super::{
    Container, Error, ExecSpec, IdMap, IdSpace, Image, Runtime, RuntimeExec, RuntimeExecState,
    ServiceOptions, Spec,
    compat::{self, translate},
    last_word, libpod, seccomp,
    service::{self, Service},
};
use crate::process;

/// How long a new size is offered to a terminal that is about to start.
const RESIZE: Duration = Duration::from_secs(5);
const RESIZE_AGAIN: Duration = Duration::from_millis(100);

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
    /// Where the profile of system calls is written.
    directory: PathBuf,
    clients: OnceCell<Clients>,
}

#[derive(Debug)]
struct Clients {
    docker: Docker,
    libpod: reqwest::Client,
    seccomp_profile: PathBuf,
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

    async fn clients(&self) -> Result<&Clients, Error> {
        self.clients
            .get_or_try_init(|| async {
                match &self.service {
                    Some(service) => service.ensure().await?,
                    None if service::answers(&self.socket).await => {}
                    None => {
                        return Err(Error::Unavailable(format!(
                            "nothing answers on {}",
                            self.socket.display()
                        )));
                    }
                }
                let unavailable =
                    |error: &dyn std::fmt::Display| Error::Unavailable(error.to_string());
                let seccomp_profile =
                    seccomp::write(&self.directory).map_err(|error| unavailable(&error))?;
                let docker = compat::connect(&self.socket, self.call_limit).await?;
                let libpod = reqwest::Client::builder()
                    .unix_socket(self.socket.as_path())
                    .build()
                    .map_err(|error| unavailable(&error))?;
                Ok(Clients {
                    docker,
                    libpod,
                    seccomp_profile,
                })
            })
            .await
    }

    /// Runs a call under its deadline. A service of ours that hangs or is gone is started anew; a call that is safe to
    /// repeat is then repeated once.
    async fn call<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        repeat: bool,
        run: impl Fn(&Clients) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let started = std::time::Instant::now();
        let result = self.try_call(call, limit, &run).await;
        let result = match (result, &self.service) {
            (
                Err(error @ (Error::Timeout { .. } | Error::Unavailable(_) | Error::Unreached(_))),
                Some(service),
            ) => {
                service
                    .restart(if matches!(error, Error::Timeout { .. }) {
                        service::HUNG
                    } else {
                        "it is gone"
                    })
                    .await?;
                if repeat || matches!(error, Error::Unreached(_)) {
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

    /// A reading libpod call.
    async fn libpod_get(
        &self,
        call: &'static str,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<Value, Error> {
        self.call(call, self.call_limit, true, |clients| {
            let request = clients
                .libpod
                .get(format!("http://podman/v4.0.0/libpod/{path}"))
                .query(query);
            async move {
                let response = request
                    .send()
                    .await
                    .map_err(|error| Error::Unavailable(error.to_string()))?;
                let status = response.status().as_u16();
                let answer: Value = response
                    .json()
                    .await
                    .map_err(|error| Error::Unavailable(error.to_string()))?;
                match status {
                    200 => Ok(answer),
                    404 => Err(Error::NotFound(path.to_owned())),
                    _ => Err(Error::Refused {
                        call,
                        message: text(&answer["message"]),
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
        run: &impl Fn(&Clients) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let clients = self.clients().await?;
        tokio::time::timeout(limit, run(clients))
            .await
            .map_err(|_| Error::Timeout { call, limit })?
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

/// The ids that sandboxes can have, by what Podman says of itself.
pub(crate) fn id_space(info: &Value) -> IdSpace {
    let host = &info["host"];
    if !host["security"]["rootless"].as_bool().unwrap_or_default() {
        return IdSpace::Own;
    }
    // As seen in Podman's own namespace, where 0 is the user and those from 1 on are the subordinate ones.
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
    async fn ping(&self) -> Result<(), Error> {
        self.call("ping", self.call_limit, true, |clients| {
            compat::ping(clients.docker.clone())
        })
        .await
    }

    async fn ids(&self) -> Result<IdSpace, Error> {
        self.libpod_get("ids", "info", &[])
            .await
            .map(|info| id_space(&info))
    }

    async fn image(&self, reference: &str) -> Result<Image, Error> {
        self.call("image", self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move {
                docker
                    .inspect_image(reference)
                    .await
                    .map(|found| compat::image(found, reference))
                    .map_err(translate("image", reference))
            }
        })
        .await
    }

    async fn images(&self) -> Result<Vec<LocalImage>, Error> {
        self.call("images", self.call_limit, true, |clients| {
            let docker = clients.docker.clone();
            async move { compat::images(docker).await }
        })
        .await
    }

    async fn create(&self, spec: &Spec) -> Result<String, Error> {
        self.call("create", 2 * self.call_limit, false, |clients| {
            let body =
                libpod::create_body(spec, self.oci_runtime.as_deref(), &clients.seccomp_profile);
            let request = clients
                .libpod
                .post("http://podman/v4.0.0/libpod/containers/create")
                .json(&body);
            async move {
                let unreached = |error: reqwest::Error| {
                    if error.is_connect() {
                        Error::Unreached(error.to_string())
                    } else {
                        Error::Unavailable(error.to_string())
                    }
                };
                let response = request.send().await.map_err(unreached)?;
                let status = response.status().as_u16();
                let answer: Value = response
                    .json()
                    .await
                    .map_err(|error| Error::Unavailable(error.to_string()))?;
                let message = text(&answer["message"]);
                // 4.x answers a taken name and a missing image with 500.
                if status == 201 {
                    Ok(text(&answer["Id"]))
                } else if status == 409 || message.contains("already in use") {
                    Err(Error::NameInUse(spec.name.clone()))
                } else if status == 404
                    || message.contains("no such image")
                    || message.contains("image not known")
                {
                    Err(Error::NotFound(spec.image_id.clone()))
                } else {
                    Err(Error::Refused {
                        call: "create",
                        message,
                    })
                }
            }
        })
        .await
    }

    async fn start(&self, name: &str) -> Result<(), Error> {
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

    // Not by bollard: Podman has states that the Docker API does not know ("stopped", "initialized").
    async fn inspect(&self, name: &str) -> Result<Container, Error> {
        let found = self
            .libpod_get("inspect", &format!("containers/{name}/json"), &[])
            .await?;
        let running = found["State"]["Running"].as_bool().unwrap_or_default();
        Ok(Container {
            id: text(&found["Id"]),
            name: text(&found["Name"]),
            running,
            pid: if running {
                found["State"]["Pid"]
                    .as_i64()
                    .and_then(|pid| pid.try_into().ok())
                    .unwrap_or_default()
            } else {
                0
            },
            exit_code: found["State"]["ExitCode"].as_i64().filter(|_| !running),
            labels: labels(&found["Config"]["Labels"]),
        })
    }

    async fn list(&self, label: &str, value: &str) -> Result<Vec<Container>, Error> {
        let filters = serde_json::json!({ "label": [format!("{label}={value}")] }).to_string();
        let found = self
            .libpod_get(
                "list",
                "containers/json",
                &[("all", "true"), ("filters", &filters)],
            )
            .await?;
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
            compat::kill(clients.docker.clone(), name, signal)
        })
        .await
    }

    async fn remove(&self, name: &str) -> Result<(), Error> {
        compat::remove_by(name, || {
            self.call("remove", self.call_limit, true, |clients| {
                compat::remove(clients.docker.clone(), name)
            })
        })
        .await?;
        process::kill_monitors(name);
        Ok(())
    }

    async fn exec(&self, name: &str, spec: &ExecSpec) -> Result<RuntimeExec, Error> {
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
                    output: last_word::dropped(started.output),
                    ..started
                })
            }
        })
        .await
    }

    async fn exec_state(&self, id: &str) -> Result<RuntimeExecState, Error> {
        self.call("exec_state", self.call_limit, true, |clients| {
            compat::exec_state(clients.docker.clone(), id)
        })
        .await
    }

    async fn exec_resize(&self, id: &str, columns: u16, rows: u16) -> Result<(), Error> {
        let resize = || {
            self.call("exec_resize", self.call_limit, true, |clients| {
                compat::exec_resize(clients.docker.clone(), id, columns, rows)
            })
        };
        let until = Instant::now() + RESIZE;
        loop {
            match resize().await {
                // Podman refuses until it has noted that the exec runs, which is after it has said that it has started.
                Err(Error::Refused { .. }) if Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(50)).await
                }
                Ok(()) => break,
                refused => return refused,
            }
        }
        // Of two sizes that reach conmon at once (the first one of a terminal and its next, or a window that is dragged) it
        // takes the older and forgets the newer. So each is said again when the one before has been read.
        tokio::time::sleep(RESIZE_AGAIN).await;
        match resize().await {
            // It has ended meanwhile.
            Err(Error::NotFound(_) | Error::Refused { .. }) => Ok(()),
            other => other,
        }
    }

    async fn close(&self) {
        if let Some(service) = &self.service
            && let Err(error) = service.close().await
        {
            tracing::warn!(%error, "Ending the private Podman service failed.");
        }
    }
}

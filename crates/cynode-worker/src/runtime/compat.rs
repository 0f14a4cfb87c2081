//! The calls of Docker's API that Podman supports in the same way.

use std::time::Duration;

use bollard::{
    API_DEFAULT_VERSION, Docker,
    container::LogOutput,
    exec::{CreateExecOptions, ResizeExecOptions, StartExecOptions, StartExecResults},
    models::ImageInspect,
    query_parameters::{KillContainerOptions, ListImagesOptions, RemoveContainerOptions},
};
use cynode_api::{LocalImage, Stream};
use futures_util::StreamExt as _;
use http::{
    StatusCode,
    header::{CONNECTION, UPGRADE},
};
use tokio_util::io::ReaderStream;

use super::{ExecSpec, Image, RuntimeError, RuntimeExec, RuntimeExecState, attach_error};

/// The sandbox's user and group; a bare `1000` would imply group 0.
pub(super) const USER: &str = "1000:1000";

pub(super) fn translate(
    call: &'static str,
    name: &str,
) -> impl Fn(bollard::errors::Error) -> RuntimeError {
    let name = name.to_owned();
    move |error| match error {
        bollard::errors::Error::DockerResponseServerError {
            status_code: 404, ..
        } => RuntimeError::NotFound(name.clone()),
        bollard::errors::Error::DockerResponseServerError {
            status_code: 409,
            message,
        } if call == "create" => RuntimeError::NameInUse(message),
        bollard::errors::Error::DockerResponseServerError { message, .. } => {
            RuntimeError::Refused { call, message }
        }
        bollard::errors::Error::RequestTimeoutError => {
            RuntimeError::Unavailable("the request timed out".to_owned())
        }
        other => RuntimeError::Unavailable(other.to_string()),
    }
}

/// Connects a client that has negotiated the API version.
pub(super) async fn connect(
    socket: &std::path::Path,
    limit: Duration,
) -> Result<Docker, RuntimeError> {
    let unavailable = |error: bollard::errors::Error| RuntimeError::Unavailable(error.to_string());
    // One hour limits only output streams; calls have their own timeouts.
    let docker = Docker::connect_with_unix(&socket.to_string_lossy(), 3_600, API_DEFAULT_VERSION)
        .map_err(unavailable)?;
    tokio::time::timeout(limit, docker.negotiate_version())
        .await
        .map_err(|_| RuntimeError::Timeout {
            call: "version",
            limit,
        })?
        .map_err(unavailable)
}

/// Names that no image and no container has.
const MISSING_IMAGE: &str = "localhost/cynode/nobody:never";
const MISSING_CONTAINER: &str = "cynode-nothing";

/// Inspects a missing container and a missing image: unlike a plain ping, this fails if the
/// service's database or image store hangs.
pub(super) async fn ping(docker: Docker) -> Result<(), RuntimeError> {
    let container = docker
        .inspect_container(MISSING_CONTAINER, None)
        .await
        .map(drop)
        .map_err(translate("ping", MISSING_CONTAINER));
    let image = docker
        .inspect_image(MISSING_IMAGE)
        .await
        .map(drop)
        .map_err(translate("ping", MISSING_IMAGE));
    [container, image]
        .into_iter()
        .find(|result| !matches!(result, Ok(()) | Err(RuntimeError::NotFound(_))))
        .unwrap_or(Ok(()))
}

pub(super) fn image(inspected: ImageInspect, reference: &str) -> Image {
    let config = inspected.config.unwrap_or_default();
    let id = inspected.id.unwrap_or_default();
    Image {
        digest: pinned_digest(reference, &id, &inspected.repo_digests.unwrap_or_default()),
        id,
        labels: config.labels.unwrap_or_default().into_iter().collect(),
        env: config
            .env
            .unwrap_or_default()
            .iter()
            .filter_map(|variable| variable.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
    }
}

pub(super) async fn images(docker: Docker) -> Result<Vec<LocalImage>, RuntimeError> {
    let summaries = docker
        .list_images(None::<ListImagesOptions>)
        .await
        .map_err(translate("images", ""))?;
    let mut images = Vec::new();
    for image in summaries {
        for reference in image.repo_tags {
            // Untagged images can't be used here.
            if reference.contains("<none>") {
                continue;
            }
            let digest = pinned_digest(&reference, &image.id, &image.repo_digests);
            images.push(LocalImage {
                reference,
                digest,
                labels: image.labels.clone().into_iter().collect(),
            });
        }
    }
    Ok(images)
}

/// The digest that callers pin: the id for images that the operator loaded, otherwise the
/// registry's.
fn pinned_digest(reference: &str, id: &str, repo_digests: &[String]) -> String {
    let without_digest = reference.split('@').next().unwrap_or(reference);
    // A colon followed by a path starts a port.
    let repository = without_digest
        .rsplit_once(':')
        .filter(|(_, tag)| !tag.contains('/'))
        .map_or(without_digest, |(repository, _)| repository);
    let digest = repo_digests
        .iter()
        .find_map(|digest| digest.strip_prefix(repository)?.strip_prefix('@'));
    digest
        .filter(|_| !reference.starts_with("localhost/"))
        .map_or_else(|| with_algorithm(id), str::to_owned)
}

fn with_algorithm(id: &str) -> String {
    if id.contains(':') {
        id.to_owned()
    } else {
        format!("sha256:{id}")
    }
}

pub(super) async fn kill(docker: Docker, name: &str, signal: &str) -> Result<(), RuntimeError> {
    docker
        .kill_container(
            name,
            Some(KillContainerOptions {
                signal: signal.to_owned(),
            }),
        )
        .await
        .map_err(translate("kill", name))
}

pub(super) async fn remove(docker: Docker, name: &str) -> Result<(), RuntimeError> {
    let options = RemoveContainerOptions {
        force: true,
        v: true,
        ..Default::default()
    };
    docker
        .remove_container(name, Some(options))
        .await
        .map_err(translate("remove", name))
}

const REMOVE_ATTEMPTS: u32 = 8;

/// Retries a removal until the container is gone: "busy" or a concurrent removal usually resolves
/// itself.
pub(super) async fn remove_with_retries<F>(
    name: &str,
    mut remove: impl FnMut() -> F,
) -> Result<(), RuntimeError>
where
    F: Future<Output = Result<(), RuntimeError>>,
{
    let mut pause = Duration::from_millis(50);
    for attempt in 1.. {
        match remove().await {
            Ok(()) | Err(RuntimeError::NotFound(_)) => break,
            Err(error) if attempt < REMOVE_ATTEMPTS => {
                tracing::debug!(name, %error, attempt, "Failed to remove a container; retrying.");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(2));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

pub(super) async fn create_exec(
    docker: &Docker,
    name: &str,
    spec: &ExecSpec,
) -> Result<String, RuntimeError> {
    let options = CreateExecOptions {
        attach_stdin: Some(spec.stdin),
        attach_stdout: Some(true),
        attach_stderr: Some(spec.tty.is_none()),
        tty: Some(spec.tty.is_some()),
        env: Some(
            spec.env
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect(),
        ),
        cmd: Some(spec.argv.clone()),
        privileged: Some(false),
        user: Some(USER.to_owned()),
        working_dir: Some(spec.cwd.clone()),
        ..Default::default()
    };
    Ok(docker
        .create_exec(name, options)
        .await
        .map_err(translate("exec", name))?
        .id)
}

/// Starts an exec without a terminal.
pub(super) async fn start_exec(
    docker: &Docker,
    id: String,
    name: &str,
) -> Result<RuntimeExec, RuntimeError> {
    let options = StartExecOptions {
        detach: false,
        tty: false,
        output_capacity: Some(64 * 1024),
    };
    match docker
        .start_exec(&id, Some(options))
        .await
        .map_err(translate("exec", name))?
    {
        StartExecResults::Attached { output, input } => {
            let output = output.filter_map(async |piece| match piece {
                Ok(LogOutput::StdErr { message }) => Some(Ok((Stream::Stderr, message))),
                Ok(LogOutput::StdOut { message } | LogOutput::Console { message }) => {
                    Some(Ok((Stream::Stdout, message)))
                }
                Ok(LogOutput::StdIn { .. }) => None,
                Err(error) => Some(Err(RuntimeError::Unavailable(error.to_string()))),
            });
            Ok(RuntimeExec {
                id,
                input,
                output: Box::pin(output),
            })
        }
        StartExecResults::Detached => Err(RuntimeError::Refused {
            call: "exec",
            message: "the exec started detached".to_owned(),
        }),
    }
}

pub(super) async fn exec_state(docker: Docker, id: &str) -> Result<RuntimeExecState, RuntimeError> {
    let state = docker
        .inspect_exec(id)
        .await
        .map_err(translate("exec_state", id))?;
    let running = state.running.unwrap_or_default();
    Ok(RuntimeExecState {
        running,
        exit_code: state.exit_code.filter(|_| !running),
        pid: state
            .pid
            .and_then(|pid| pid.try_into().ok())
            .unwrap_or_default(),
    })
}

pub(super) async fn exec_resize(
    docker: Docker,
    id: &str,
    columns: u16,
    rows: u16,
) -> Result<(), RuntimeError> {
    docker
        .resize_exec(
            id,
            ResizeExecOptions {
                height: rows,
                width: columns,
            },
        )
        .await
        .map_err(translate("exec_resize", id))
}

/// Starts an exec with a terminal. Not through bollard, which can't pass the terminal's size (a
/// later resize fails if the program has ended) and misreads control characters in terminal output
/// as its own frames.
pub(super) async fn start_terminal(
    http: &reqwest::Client,
    base: &str,
    id: String,
    (columns, rows): (u16, u16),
) -> Result<RuntimeExec, RuntimeError> {
    let unavailable = |error: reqwest::Error| RuntimeError::Unavailable(error.to_string());
    let request = http
        .post(format!("{base}/exec/{id}/start"))
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "tcp");
    let body = serde_json::json!({
        "Detach": false, "Tty": true, "h": rows, "w": columns, "ConsoleSize": [rows, columns],
    });
    let response = request.json(&body).send().await.map_err(unavailable)?;
    match response.status() {
        StatusCode::SWITCHING_PROTOCOLS => {}
        StatusCode::NOT_FOUND => return Err(RuntimeError::NotFound(id)),
        _ => {
            let body: serde_json::Value = response.json().await.map_err(unavailable)?;
            return Err(RuntimeError::Refused {
                call: "exec",
                message: body["message"].as_str().unwrap_or_default().to_owned(),
            });
        }
    }
    let (output, input) = tokio::io::split(response.upgrade().await.map_err(unavailable)?);
    let output = ReaderStream::with_capacity(output, 64 * 1024).map(|piece| {
        piece
            .map(|data| (Stream::Stdout, data))
            .map_err(|error| RuntimeError::Unavailable(error.to_string()))
    });
    Ok(RuntimeExec {
        id,
        input: Box::pin(input),
        output: attach_error::strip(Box::pin(output)),
    })
}

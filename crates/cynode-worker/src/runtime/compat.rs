//! The calls of Docker's API that Podman answers in the same way.

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

use super::{Error, ExecSpec, Image, RuntimeExec, RuntimeExecState, last_word};

/// The sandbox's user and group; a bare `1000` would leave the group 0.
pub(super) const USER: &str = "1000:1000";

pub(super) fn translate(
    call: &'static str,
    what: &str,
) -> impl Fn(bollard::errors::Error) -> Error {
    let what = what.to_owned();
    move |error| match error {
        bollard::errors::Error::DockerResponseServerError {
            status_code: 404, ..
        } => Error::NotFound(what.clone()),
        bollard::errors::Error::DockerResponseServerError {
            status_code: 409,
            message,
        } if call == "create" => Error::NameInUse(message),
        bollard::errors::Error::DockerResponseServerError { message, .. } => {
            Error::Refused { call, message }
        }
        bollard::errors::Error::RequestTimeoutError => {
            Error::Unavailable("the request timed out".to_owned())
        }
        other => Error::Unavailable(other.to_string()),
    }
}

/// A client that has agreed on a version with the service.
pub(super) async fn connect(socket: &std::path::Path, limit: Duration) -> Result<Docker, Error> {
    let unavailable = |error: bollard::errors::Error| Error::Unavailable(error.to_string());
    // The hour is no limit on calls, which have their own, but on streams of output.
    let docker = Docker::connect_with_unix(&socket.to_string_lossy(), 3_600, API_DEFAULT_VERSION)
        .map_err(unavailable)?;
    tokio::time::timeout(limit, docker.negotiate_version())
        .await
        .map_err(|_| Error::Timeout {
            call: "version",
            limit,
        })?
        .map_err(unavailable)
}

/// Nobody has an image or a container of these names.
const NOBODY: &str = "localhost/cynode/nobody:never";
const NOTHING: &str = "cynode-nothing";

/// Asks for what is not there: a service whose database or store of images hangs does not answer that, though it may say that it is there.
pub(super) async fn ping(docker: Docker) -> Result<(), Error> {
    let container = docker
        .inspect_container(NOTHING, None)
        .await
        .map(drop)
        .map_err(translate("ping", NOTHING));
    let image = docker
        .inspect_image(NOBODY)
        .await
        .map(drop)
        .map_err(translate("ping", NOBODY));
    [container, image]
        .into_iter()
        .find(|answer| !matches!(answer, Ok(()) | Err(Error::NotFound(_))))
        .unwrap_or(Ok(()))
}

pub(super) fn image(found: ImageInspect, reference: &str) -> Image {
    let config = found.config.unwrap_or_default();
    let id = found.id.unwrap_or_default();
    Image {
        digest: pin(reference, &id, &found.repo_digests.unwrap_or_default()),
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

pub(super) async fn images(docker: Docker) -> Result<Vec<LocalImage>, Error> {
    let found = docker
        .list_images(None::<ListImagesOptions>)
        .await
        .map_err(translate("images", ""))?;
    let mut images = Vec::new();
    for image in found {
        for reference in image.repo_tags {
            // What has no name has no use here.
            if reference.contains("<none>") {
                continue;
            }
            let digest = pin(&reference, &image.id, &image.repo_digests);
            images.push(LocalImage {
                reference,
                digest,
                labels: image.labels.clone().into_iter().collect(),
            });
        }
    }
    Ok(images)
}

/// What the operator loaded is pinned by its id, the rest by the registry's digest.
fn pin(reference: &str, id: &str, repo_digests: &[String]) -> String {
    let without_digest = reference.split('@').next().unwrap_or(reference);
    // The colon of a port is followed by a path.
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

pub(super) async fn kill(docker: Docker, name: &str, signal: &str) -> Result<(), Error> {
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

pub(super) async fn remove(docker: Docker, name: &str) -> Result<(), Error> {
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

const REMOVE_TRIES: u32 = 8;

/// Removes until it is gone. "Busy", or a removal by somebody else under way: often the container is gone at the next look.
pub(super) async fn remove_by<F>(name: &str, mut remove: impl FnMut() -> F) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let mut pause = Duration::from_millis(50);
    for attempt in 1.. {
        match remove().await {
            Ok(()) | Err(Error::NotFound(_)) => break,
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

pub(super) async fn create_exec(
    docker: &Docker,
    name: &str,
    spec: &ExecSpec,
) -> Result<String, Error> {
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
) -> Result<RuntimeExec, Error> {
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
                Err(error) => Some(Err(Error::Unavailable(error.to_string()))),
            });
            Ok(RuntimeExec {
                id,
                input,
                output: Box::pin(output),
            })
        }
        StartExecResults::Detached => Err(Error::Refused {
            call: "exec",
            message: "the exec came back detached".to_owned(),
        }),
    }
}

pub(super) async fn exec_state(docker: Docker, id: &str) -> Result<RuntimeExecState, Error> {
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
) -> Result<(), Error> {
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

/// Starts an exec with a terminal. Not by bollard, which has no words for the terminal's size (set afterwards it comes later
/// still, and is refused when the program has ended by then) and takes control characters at a terminal for its own frames.
pub(super) async fn start_terminal(
    http: &reqwest::Client,
    base: &str,
    id: String,
    (columns, rows): (u16, u16),
) -> Result<RuntimeExec, Error> {
    let unavailable = |error: reqwest::Error| Error::Unavailable(error.to_string());
    let request = http
        .post(format!("{base}/exec/{id}/start"))
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "tcp");
    let body = serde_json::json!({ "Detach": false, "Tty": true, "h": rows, "w": columns, "ConsoleSize": [rows, columns] });
    let response = request.json(&body).send().await.map_err(unavailable)?;
    match response.status() {
        StatusCode::SWITCHING_PROTOCOLS => {}
        StatusCode::NOT_FOUND => return Err(Error::NotFound(id)),
        _ => {
            let answer: serde_json::Value = response.json().await.map_err(unavailable)?;
            return Err(Error::Refused {
                call: "exec",
                message: answer["message"].as_str().unwrap_or_default().to_owned(),
            });
        }
    }
    let (output, input) = tokio::io::split(response.upgrade().await.map_err(unavailable)?);
    let output = ReaderStream::with_capacity(output, 64 * 1024).map(|piece| {
        piece
            .map(|data| (Stream::Stdout, data))
            .map_err(|error| Error::Unavailable(error.to_string()))
    });
    Ok(RuntimeExec {
        id,
        input: Box::pin(input),
        output: last_word::dropped(Box::pin(output)),
    })
}

//! Jobs and sessions through an orchestrator with a real node.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    Artifact, ErrorCode, ExportFormat, ExportRequest, Job, JobCreate, JobId, JobState,
    LimitsRequest, PreferenceScope, Session, SessionCreate, SessionEnd, SessionId, SessionState,
    TaskCreate, TaskId, TokenCreate, TokenKind, UserSessionCreate, WorkspaceRef,
};
use cynode_client::{OutputQuery, SessionFilter, UserClient};
use cynode_tests::{Answer, IMAGE, eventually, sh};
use http::Method;

use super::cluster::{Cluster, text};
use crate::cli::{cynode, run};

const TIMEOUT: Duration = Duration::from_secs(60);

fn limits() -> LimitsRequest {
    LimitsRequest {
        memory_bytes: Some(64 << 20),
        disk_bytes: Some(32 << 20),
        ..Default::default()
    }
}

fn script(text: &str) -> JobCreate {
    JobCreate {
        job_id: Some(JobId::generate()),
        command: ["/bin/sh", "-c", text].map(str::to_owned).to_vec(),
        timeout_seconds: Some(60),
        limits: Some(limits()),
        ..Default::default()
    }
}

async fn run_to_end(client: &UserClient, request: &JobCreate) -> Result<Job> {
    let id = client.create_job(request).await?.job_id;
    eventually("the job ends", TIMEOUT, async || {
        Ok(client.job(id).await?.state.is_final())
    })
    .await?;
    Ok(client.job(id).await?)
}

async fn session(client: &UserClient, request: UserSessionCreate) -> Result<Session> {
    Ok(client
        .sessions()
        .create_user_session(&UserSessionCreate {
            limits: Some(limits()),
            ..request
        })
        .await?)
}

async fn task(client: &UserClient) -> Result<TaskId> {
    Ok(client
        .create_task(&TaskCreate {
            name: "work".to_owned(),
            ..Default::default()
        })
        .await?
        .id)
}

/// A tar archive of one file.
fn archive(name: &str, text: &str) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(text.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, name, text.as_bytes())?;
    Ok(tar.into_inner()?)
}

#[tokio::test]
async fn stored_output_of_a_job_has_its_exit_in_pages_and_in_events() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let job = run_to_end(&client, &script("echo out; echo err >&2; exit 3")).await?;
    let id = job.job_id;
    let listed = client
        .jobs(None, Some(job.task_id))
        .await?
        .pop()
        .context("the job is listed")?;
    assert_eq!(
        (
            listed.job_id,
            listed.exit_code,
            listed.output.stdout.as_str()
        ),
        (id, Some(3), ""),
        "a list has streams"
    );
    assert_eq!((job.state, job.exit_code), (JobState::Failed, Some(3)));
    let page = client.job_output(id, &OutputQuery::default()).await?;
    assert_eq!(
        page.exit.as_ref().and_then(|exit| exit.exit_code),
        Some(3),
        "{page:?}"
    );
    assert_eq!(
        page.exit.map(|exit| (exit.bytes.stdout, exit.bytes.stderr)),
        Some((4, 4))
    );
    // A page that doesn't reach the end of the output has no exit.
    let first = client
        .job_output(
            id,
            &OutputQuery {
                max_bytes: Some(1),
                ..Default::default()
            },
        )
        .await?;
    assert!(first.chunks.len() == 1 && first.exit.is_none(), "{first:?}");
    let rest = client
        .job_output(
            id,
            &OutputQuery {
                after_seq: Some(first.next_seq),
                wait_ms: Some(60_000),
                ..Default::default()
            },
        )
        .await?;
    assert!(rest.chunks.len() == 1 && rest.exit.is_some(), "{rest:?}");

    let cluster = &cluster;
    let events = |last: Option<u64>| async move {
        let mut request = cluster
            .request(Method::GET, &format!("/v1/jobs/{id}/output"))?
            .header("accept", "text/event-stream");
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        Ok::<_, anyhow::Error>(request.send().await?.error_for_status()?.text().await?)
    };
    let names = |text: &str| {
        text.lines()
            .filter_map(|line| line.strip_prefix("event: ").map(str::to_owned))
            .collect::<Vec<_>>()
    };
    let (whole, resumed) = (events(None).await?, events(Some(1)).await?);
    let mut streams = names(&whole);
    ensure!(
        streams.first().is_some_and(|name| name == "start")
            && streams.last().is_some_and(|name| name == "exit"),
        "{whole}"
    );
    streams.sort();
    assert_eq!(streams, ["exit", "start", "stderr", "stdout"], "{whole}");
    assert!(whole.contains("\"exit_code\":3"), "{whole}");
    assert_eq!(
        names(&resumed).len(),
        2,
        "earlier events were repeated: {resumed}"
    );
    Ok(())
}

#[tokio::test]
async fn a_job_that_never_ran_has_an_end_to_follow() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let node = client.nodes().await?.pop().context("a node")?;
    client.drain_node(node.id, true).await?;
    let id = client.create_job(&script("true")).await?.job_id;
    // No node has it yet: a caller that doesn't wait is told so at once.
    let page = client.job_output(id, &OutputQuery::default()).await?;
    assert!(page.chunks.is_empty() && page.exit.is_none(), "{page:?}");
    let followed = cluster
        .request(Method::GET, &format!("/v1/jobs/{id}/output"))?
        .header("accept", "text/event-stream")
        .send();
    let (stopped, followed) = tokio::join!(client.stop_job(id), followed);
    assert_eq!(stopped?.state, JobState::Canceled);
    let text = followed?.error_for_status()?.text().await?;
    assert!(text.contains("event: exit"), "{text}");
    assert!(
        client
            .job_output(id, &OutputQuery::default())
            .await?
            .exit
            .is_some()
    );
    Ok(())
}

#[tokio::test]
async fn a_session_that_its_node_refused_is_listed_shown_and_can_be_ended() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let sessions = client.sessions();
    let task = task(&client).await?;
    let mut request = SessionCreate::new(task, SessionId::generate(), "default");
    request.limits = Some(LimitsRequest {
        nofile: Some(u64::MAX),
        ..limits()
    });
    let refused = sessions
        .create_session(&request)
        .await
        .expect_err("more than any host has");
    assert!(
        refused
            .status()
            .is_some_and(|status| (400..500).contains(&status)),
        "{refused}"
    );
    let id = request.session_id;
    let shown = sessions.get_session(id).await?;
    assert_eq!((shown.state, shown.task_id), (SessionState::Failed, task));
    assert!(
        shown
            .end_reason
            .is_some_and(|reason| reason.contains("nofile"))
            && shown.ended_at.is_some()
    );
    let listed = sessions
        .list_sessions(&SessionFilter {
            task_id: Some(task),
            ..Default::default()
        })
        .await?;
    assert_eq!(
        listed
            .iter()
            .map(|session| session.session_id)
            .collect::<Vec<_>>(),
        [id]
    );
    assert_eq!(
        sessions
            .end_session(id, &SessionEnd::default())
            .await?
            .state,
        SessionState::Failed
    );
    // An identical request returns the same session, which has failed.
    assert_eq!(
        sessions.create_session(&request).await?.state,
        SessionState::Failed
    );
    Ok(())
}

// part of: REQ-SANDBX-0114, CYNAI.SANDBX.ArtifactsDataExchange
#[tokio::test]
// invariant: control-plane
async fn a_workspace_starts_with_the_contents_of_an_artifact() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let task = task(&client).await?;
    let artifact = client
        .put_artifact(
            task,
            "seed.tar",
            Some("application/x-tar"),
            archive("dir/hello", "from an artifact")?,
        )
        .await?;
    let reference = WorkspaceRef::Artifact(artifact.id);
    let made = session(
        &client,
        UserSessionCreate {
            task_id: Some(task),
            workspace_ref: Some(reference.clone()),
            ..Default::default()
        },
    )
    .await?;
    assert_eq!(made.state, SessionState::Running);
    let result = client
        .sessions()
        .exec(
            made.session_id,
            &sh("cat dir/hello; id -u; stat -c %u dir/hello"),
        )
        .await?;
    assert_eq!(result.stdout, "from an artifact1000\n1000\n", "{result:?}");
    let job = run_to_end(
        &client,
        &JobCreate {
            task_id: Some(task),
            workspace_ref: Some(reference),
            ..script("cat dir/hello")
        },
    )
    .await?;
    assert_eq!(
        (job.state, job.output.stdout.as_str()),
        (JobState::Completed, "from an artifact"),
        "{job:?}"
    );

    // Neither invalid archives nor other users' artifacts create a session.
    let broken = client
        .put_artifact(task, "broken", None, b"no archive at all".to_vec())
        .await?;
    let request = UserSessionCreate {
        task_id: Some(task),
        workspace_ref: Some(WorkspaceRef::Artifact(broken.id)),
        ..Default::default()
    };
    let refused = session(&client, request).await.expect_err("no archive");
    assert!(
        format!("{refused:#}").contains("archive") || format!("{refused:#}").contains("tar"),
        "{refused:#}"
    );
    let (_, other) = cluster.user("other").await?;
    let other = UserClient::new(&cluster.orchestrator.url()?, &other)?;
    let stolen = UserSessionCreate {
        workspace_ref: Some(WorkspaceRef::Artifact(artifact.id)),
        ..Default::default()
    };
    let refused = other
        .sessions()
        .create_user_session(&stolen)
        .await
        .expect_err("another's artifact");
    assert!(refused.is(ErrorCode::NotFound), "{refused}");
    client
        .sessions()
        .end_session(made.session_id, &SessionEnd::default())
        .await?;
    Ok(())
}

#[tokio::test]
async fn run_uploads_its_workspace_directory() -> Result<()> {
    let cluster = Cluster::start().await?;
    let directory = cluster.control_plane.world.directory().join("along");
    fs_err::create_dir_all(directory.join("deep"))?;
    fs_err::write(directory.join("deep/file"), "carried")?;
    let mut command = cynode(&cluster.control_plane.world)?;
    command
        .env("CYNODE_URL", cluster.orchestrator.url()?)
        .env("CYNODE_TOKEN", cluster.orchestrator.token()?);
    let ran = run(
        command
            .args(["run", "--memory", "64m", "--workspace"])
            .arg(&directory)
            .args(["--", "/bin/sh", "-c", "cat deep/file; exit 7"]),
        b"",
    )?;
    assert_eq!(
        (ran.code, ran.text().as_str()),
        (Some(7), "carried"),
        "{ran:?}"
    );
    let mut command = cynode(&cluster.control_plane.world)?;
    command
        .env("CYNODE_URL", cluster.orchestrator.url()?)
        .env("CYNODE_TOKEN", cluster.orchestrator.token()?);
    let missing = run(
        command.args(["run", "--workspace", "nowhere", "--", "true"]),
        b"",
    )?;
    assert_eq!(missing.code, Some(64), "{missing:?}");
    Ok(())
}

#[tokio::test]
async fn a_job_runs_from_a_file() -> Result<()> {
    let cluster = Cluster::start().await?;
    let from = |text: &str| -> Result<crate::cli::CommandResult> {
        let mut command = cynode(&cluster.control_plane.world)?;
        command
            .env("CYNODE_URL", cluster.orchestrator.url()?)
            .env("CYNODE_TOKEN", cluster.orchestrator.token()?);
        run(command.args(["job", "run", "-"]), text.as_bytes())
    };
    let ran = from(
        r#"{"command": ["/bin/sh", "-c", "echo from a file; exit 5"], "limits": {"memory_bytes": 67108864}}"#,
    )?;
    assert_eq!(
        (ran.code, ran.text().as_str()),
        (Some(5), "from a file\n"),
        "{ran:?}"
    );
    let refused = from(r#"{"comand": ["true"]}"#)?;
    assert!(
        refused.code == Some(64) && refused.stderr.contains("comand"),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_job_works_in_a_workspace_that_a_session_kept() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let task = task(&client).await?;
    let made = session(
        &client,
        UserSessionCreate {
            task_id: Some(task),
            ..Default::default()
        },
    )
    .await?;
    client
        .sessions()
        .exec(made.session_id, &sh("echo one > kept"))
        .await?;
    let keep = SessionEnd {
        workspace: Some(cynode_api::WorkspaceDisposal::Keep),
        ..Default::default()
    };
    client
        .sessions()
        .end_session(made.session_id, &keep)
        .await?;
    let reference = Some(WorkspaceRef::Workspace(made.workspace_id));
    let job = run_to_end(
        &client,
        &JobCreate {
            task_id: Some(task),
            workspace_ref: reference.clone(),
            ..script("cat kept; echo two >> kept")
        },
    )
    .await?;
    assert_eq!(job.output.stdout, "one\n", "{job:?}");
    // The workspace outlives the job, with the job's changes. The job's sandbox is still being
    // removed.
    let again = async || {
        let request = UserSessionCreate {
            task_id: Some(task),
            workspace_ref: reference.clone(),
            ..Default::default()
        };
        match session(&client, request).await {
            Ok(made) => Ok(Some(
                client
                    .sessions()
                    .exec(made.session_id, &sh("cat kept"))
                    .await?
                    .stdout,
            )),
            Err(error) if format!("{error:#}").contains("another session") => Ok(None),
            Err(error) => Err(error),
        }
    };
    let mut result = None;
    eventually("the workspace is free", TIMEOUT, async || {
        result = again().await?;
        Ok(result.is_some())
    })
    .await?;
    assert_eq!(result.as_deref(), Some("one\ntwo\n"));
    Ok(())
}

// part of: REQ-SANDBX-0114, CYNAI.SANDBX.ArtifactsDataExchange
#[tokio::test]
async fn an_export_returns_an_artifact_or_its_bytes() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let made = session(&client, UserSessionCreate::default()).await?;
    let id = made.session_id;
    client.sessions().exec(id, &sh("echo text > file")).await?;
    let request = ExportRequest {
        version: None,
        format: ExportFormat::Tar,
        base: None,
        path: None,
    };
    let answer = Answer::of(
        cluster
            .request(Method::POST, &format!("/v1/sessions/{id}/export"))?
            .json(&request),
    )
    .await?;
    assert_eq!(answer.status, 201);
    let artifact: Artifact = serde_json::from_slice(&answer.body)?;
    assert_eq!(
        (
            artifact.task_id,
            artifact.version,
            artifact.media_type.as_str()
        ),
        (made.task_id, 1, "application/x-tar")
    );
    let mut bytes = Vec::new();
    let mut content = client.artifact_content(artifact.id).await?;
    while let Some(piece) = content.chunk().await? {
        bytes.extend_from_slice(&piece);
    }
    let names: Vec<String> = tar::Archive::new(bytes.as_slice())
        .entries()?
        .map(|entry| Ok(entry?.path()?.display().to_string()))
        .collect::<Result<_>>()?;
    assert!(
        names
            .iter()
            .any(|name| name.trim_start_matches("./") == "file"),
        "{names:?}"
    );
    // The client requests the bytes directly, which creates no artifact.
    let mut direct = client.sessions().export(id, &request).await?;
    let mut length = 0;
    while let Some(piece) = direct.chunk().await? {
        length += piece.len();
    }
    assert!(length > 0 && client.artifacts(made.task_id).await?.len() == 1);
    // The node refuses a patch from an image without git, and no artifact is created.
    let patch = ExportRequest {
        format: ExportFormat::Patch,
        ..request
    };
    let refused = Answer::of(
        cluster
            .request(Method::POST, &format!("/v1/sessions/{id}/export"))?
            .json(&patch),
    )
    .await?;
    assert!(
        refused.status == 422 && client.artifacts(made.task_id).await?.len() == 1,
        "{}",
        String::from_utf8_lossy(&refused.body)
    );
    Ok(())
}

// part of: REQ-SANDBX-0118
#[tokio::test]
// invariant: images
async fn only_the_pinned_image_runs() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let made = session(&client, UserSessionCreate::default()).await?;
    let image = client
        .images()
        .await?
        .into_iter()
        .find(|image| {
            image
                .versions
                .iter()
                .any(|version| version.image_ref == IMAGE)
        })
        .context("the image")?;
    assert_eq!(
        made.image_digest, image.versions[0].image_digest,
        "another digest than the registered one ran"
    );
    client
        .sessions()
        .end_session(made.session_id, &SessionEnd::default())
        .await?;

    // The registry pins another image than the node has under that name, so the node doesn't have
    // it.
    let digest = format!("sha256:{}", "ab".repeat(32));
    cluster.control_plane.postgres.query(&format!(
        "update sandbox_image_versions set image_digest = '{digest}' where image_ref = '{IMAGE}'"
    ))?;
    let refused = client
        .sessions()
        .create_user_session(&UserSessionCreate::default())
        .await
        .expect_err("no node has that image");
    assert!(
        refused.is(ErrorCode::NoCapacity)
            && refused.to_string().contains("does not have the image"),
        "{refused}"
    );
    let worker = cluster.worker.client()?;
    let mut request = SessionCreate::new(TaskId::generate(), SessionId::generate(), IMAGE);
    request.image_digest = Some(digest.clone());
    let refused = worker
        .create_session(&request)
        .await
        .expect_err("another image");
    assert!(refused.is(ErrorCode::ImageDigestMismatch), "{refused}");
    let mut job = cynode_tests::job("true");
    job.sandbox.image_digest = Some(digest);
    let job = worker.run_job(&job).await?;
    assert_eq!(
        job.error.map(|error| error.code).as_deref(),
        Some("image_digest_mismatch")
    );

    // With required pinning, unpinned images are refused.
    cluster.control_plane.postgres.query(&format!(
        "update sandbox_image_versions set image_digest = null where image_ref = '{IMAGE}'"
    ))?;
    client
        .put_preference(
            PreferenceScope::System,
            "-",
            "sandbox_images.require_digest_pinning",
            true.into(),
        )
        .await?;
    let me = text(
        &cluster
            .request(Method::GET, "/v1/users")?
            .send()
            .await?
            .json::<serde_json::Value>()
            .await?["items"][0]["id"],
    )?;
    // A narrower scope doesn't override it.
    client
        .put_preference(
            PreferenceScope::User,
            &me,
            "sandbox_images.require_digest_pinning",
            false.into(),
        )
        .await?;
    let refused = client
        .sessions()
        .create_user_session(&UserSessionCreate::default())
        .await
        .expect_err("not pinned");
    assert!(refused.is(ErrorCode::ImageNotAllowed), "{refused}");
    Ok(())
}

#[tokio::test]
// invariant: control-plane
async fn streams_of_a_token_end_when_it_is_revoked() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let made = session(&client, UserSessionCreate::default()).await?;
    let token = client
        .create_token(&TokenCreate {
            kind: TokenKind::User,
            expires_in_seconds: Some(3_600),
            ..token_defaults()
        })
        .await?;
    let theirs = UserClient::new(&cluster.orchestrator.url()?, &token.token)?;
    let mut events = cluster
        .request_by(&token.token, Method::GET, "/v1/events")?
        .header("accept", "text/event-stream")
        .send()
        .await?
        .error_for_status()?;
    let mut output = theirs
        .sessions()
        .exec_stream(made.session_id, &sh("while :; do echo line; sleep 1; done"))
        .await?;
    let waiting = cluster
        .request_by(
            &token.token,
            Method::GET,
            "/v1/events?after=0&wait_ms=60000&task_id=01890000-0000-7000-8000-000000000001",
        )?
        .send();
    let revoked = async {
        ensure!(output.next().await?.is_some(), "the stream did not start");
        client.revoke_token(token.id).await?;
        Ok(())
    };
    let (revoked, waited) = tokio::join!(revoked, waiting);
    revoked?;
    assert_eq!(waited?.status(), 401);
    while events.chunk().await?.is_some() {}
    while let Ok(Some(_)) = output.next().await {}
    assert!(theirs.tasks(None).await.is_err());
    client
        .sessions()
        .end_session(made.session_id, &SessionEnd::default())
        .await?;
    Ok(())
}

fn token_defaults() -> TokenCreate {
    serde_json::from_value(serde_json::json!({"kind": "user"})).expect("a token")
}

// proves: REQ-SANDBX-0113
#[tokio::test]
async fn a_sandbox_does_not_reach_the_database() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let made = session(&client, UserSessionCreate::default()).await?;
    let socket = cluster
        .control_plane
        .world
        .directory()
        .join("pg/.s.PGSQL.5432");
    ensure!(socket.exists(), "no server listens at {}", socket.display());
    let tried = format!(
        "test -e {} && echo socket; nc -w 2 127.0.0.1 5432 </dev/null && echo port; env | grep -i \
         -e postgres -e database -e PG; find / -xdev -name '.s.PGSQL*' 2>/dev/null",
        socket.display()
    );
    let result = client.sessions().exec(made.session_id, &sh(&tried)).await?;
    assert_eq!(result.stdout, "", "{result:?}");
    client
        .sessions()
        .end_session(made.session_id, &SessionEnd::default())
        .await?;
    Ok(())
}

#[tokio::test]
// invariant: control-plane
async fn a_multi_use_key_cannot_take_over_a_registered_node() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let node = client.nodes().await?.pop().context("a node")?;
    let is_used = async || {
        Ok(cluster
            .control_plane
            .postgres
            .query("select count(*) from nodes where last_heartbeat_at > tokens_rotated_at")?
            == "1")
    };
    eventually("the node has shown its token", TIMEOUT, is_used).await?;
    let psk = fs_err::read_to_string(
        cluster
            .control_plane
            .world
            .directory()
            .join("registration.key"),
    )?
    .trim()
    .to_owned();
    let request = |id: Option<cynode_api::NodeId>, name: &str| {
        serde_json::json!({
            "psk": psk,
            "node_id": id,
            "node_name": name,
            "api_url": "http://127.0.0.1:1",
            "capability": node.capability
        })
    };
    let stolen = Answer::of(
        cluster
            .control("none", Method::POST, "/v1/nodes/register")?
            .json(&request(Some(node.id), "thief")),
    )
    .await?;
    assert_eq!(stolen.status, 401);
    let after = client.nodes().await?.pop().context("a node")?;
    assert_eq!(
        (after.name, after.api_url),
        (node.name.clone(), node.api_url.clone())
    );
    let another = Answer::of(
        cluster
            .control("none", Method::POST, "/v1/nodes/register")?
            .json(&request(None, "another")),
    )
    .await?;
    assert_eq!(another.status, 201);
    Ok(())
}

//! Several workers under one orchestrator on one machine: isolated from one another, and work is
//! placed where it fits.

use std::{collections::BTreeMap, net::TcpListener, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, JobCreate, JobState, LimitsRequest, Node, NodeState, SessionEnd, SessionId,
    SessionState, TaskCreate, UserSessionCreate, WorkspaceDisposal, WorkspaceRef,
};
use cynode_client::UserClient;
use cynode_tests::{
    ControlPlane, IMAGE, Options, RunningOrchestrator, RunningWorker, World, eventually, sh,
};
use serde_json::Value;

use crate::cli::{CommandResult, cynode, run};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// An address with a free port, known before anybody listens there.
pub(crate) fn free_address() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

/// An orchestrator that workers can join.
pub(crate) struct Fleet {
    pub(crate) orchestrator: RunningOrchestrator,
    key: String,
    pub(crate) control_plane: ControlPlane,
}

impl Fleet {
    pub(crate) async fn new() -> Result<Self> {
        Self::with(&[]).await
    }

    pub(crate) async fn with(settings: &[(&str, &str)]) -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let key = control_plane
            .world
            .directory()
            .join("registration.key")
            .display()
            .to_string();
        let seeds = format!("[{IMAGE:?}]");
        let own = [
            ("registration_key_file", key.as_str()),
            ("seed_images", seeds.as_str()),
            ("heartbeat_seconds", "1"),
        ];
        let orchestrator = control_plane
            .orchestrator("", &[&own, settings].concat())
            .await?;
        Ok(Self {
            orchestrator,
            key,
            control_plane,
        })
    }

    /// Options that make a worker a node of this fleet.
    pub(crate) fn options(&self, name: &str, control: &str) -> Options {
        Options::default()
            .set("orchestrator_url", &format!("{control:?}"))
            .set("registration_key_file", &format!("{:?}", self.key))
            .set("name", &format!("{name:?}"))
    }

    /// Starts a worker on the orchestrator's machine and waits until the node is ready.
    pub(crate) async fn node(&self, name: &str) -> Result<RunningWorker> {
        self.node_with(name, |options| options).await
    }

    /// The same with more settings.
    pub(crate) async fn node_with(
        &self,
        name: &str,
        settings: impl FnOnce(Options) -> Options,
    ) -> Result<RunningWorker> {
        let worker = self
            .control_plane
            .world
            .worker(&settings(
                self.options(name, &self.orchestrator.control_url()?),
            ))
            .await?;
        let client = self.orchestrator.client()?;
        wait_for_node(&client, name, |node| node.state == NodeState::Ready).await?;
        Ok(worker)
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Result<CommandResult> {
        let mut command = cynode(&self.control_plane.world)?;
        command
            .env("CYNODE_URL", self.orchestrator.url()?)
            .env("CYNODE_TOKEN", self.orchestrator.token()?);
        run(command.args(arguments), b"")
    }
}

/// Waits until a node meets a condition.
pub(crate) async fn wait_for_node(
    client: &UserClient,
    name: &str,
    mut is: impl FnMut(&Node) -> bool,
) -> Result<Node> {
    let mut last = None;
    let found = async || {
        last = client
            .nodes()
            .await?
            .into_iter()
            .find(|node| node.name == name);
        Ok(last.as_ref().is_some_and(&mut is))
    };
    eventually("the node meets the condition", TIMEOUT, found)
        .await
        .with_context(|| format!("{last:?}"))?;
    last.context("a node")
}

fn small_limits() -> LimitsRequest {
    LimitsRequest {
        memory_bytes: Some(64 << 20),
        disk_bytes: Some(32 << 20),
        ..Default::default()
    }
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

/// A session for a node with these labels.
pub(crate) fn session_with_labels(pairs: &[(&str, &str)]) -> UserSessionCreate {
    UserSessionCreate {
        session_id: Some(SessionId::generate()),
        limits: Some(small_limits()),
        node_labels: labels(pairs),
        ..Default::default()
    }
}

pub(crate) fn job(script: &str, pairs: &[(&str, &str)]) -> JobCreate {
    let command = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    JobCreate {
        command,
        limits: Some(small_limits()),
        node_labels: labels(pairs),
        timeout_seconds: Some(120),
        ..Default::default()
    }
}

/// Runs a job to its end.
pub(crate) async fn run_to_end(
    client: &UserClient,
    request: &JobCreate,
) -> Result<cynode_api::Job> {
    let id = client.create_job(request).await?.job_id;
    eventually("the job ends", TIMEOUT, async || {
        Ok(client.job(id).await?.state.is_final())
    })
    .await?;
    Ok(client.job(id).await?)
}

/// Two workers on one machine with one Podman store: (first, second).
async fn start_two_workers(fleet: &Fleet, other: &World) -> Result<(RunningWorker, RunningWorker)> {
    let control = fleet.orchestrator.control_url()?;
    let quoted = |name: &str| {
        format!(
            "{:?}",
            fleet
                .control_plane
                .world
                .directory()
                .join(name)
                .display()
                .to_string()
        )
    };
    let near = fleet
        .options("near", &control)
        .set("labels", r#"{ zone = "a", disk = "fast" }"#);
    let far = fleet
        .options("far", &control)
        .set("labels", r#"{ zone = "b", disk = "fast" }"#);
    let far = far
        .set("podman_root", &quoted("root"))
        .set("podman_runroot", &quoted("run"));
    Ok((
        fleet.control_plane.world.worker(&near).await?,
        other.worker(&far).await?,
    ))
}

#[tokio::test]
// invariant: control-plane
async fn two_workers_on_one_machine_share_the_work_and_nothing_else() -> Result<()> {
    let fleet = Fleet::new().await?;
    let other = World::new()?;
    let (mut near, mut far) = start_two_workers(&fleet, &other).await?;
    let client = fleet.orchestrator.client()?;
    let first = wait_for_node(&client, "near", |node| node.state == NodeState::Ready).await?;
    let second = wait_for_node(&client, "far", |node| node.state == NodeState::Ready).await?;
    assert!(
        first.id != second.id && first.api_url != second.api_url,
        "{first:?} {second:?}"
    );
    assert_eq!(
        first.capability.labels,
        labels(&[("zone", "a"), ("disk", "fast")])
    );
    assert_eq!(second.capability.labels["zone"], "b");

    // Placed by label; and no two sandboxes share ids, whichever worker created them.
    let sessions = client.sessions();
    let mut owners = BTreeMap::new();
    let mut made = Vec::new();
    for (zone, node) in [("a", &first), ("b", &second), ("a", &first), ("b", &second)] {
        let session = sessions
            .create_user_session(&session_with_labels(&[("zone", zone), ("disk", "fast")]))
            .await?;
        ensure!(
            session.node_id == node.id && session.state == SessionState::Running,
            "{session:?}"
        );
        let map = sessions
            .exec(session.session_id, &sh("cat /proc/self/uid_map"))
            .await?
            .stdout;
        let owner = map
            .split_whitespace()
            .nth(1)
            .context("an id map")?
            .to_owned();
        assert_eq!(owners.insert(owner, session.session_id), None, "{owners:?}");
        made.push(session);
        let job = run_to_end(&client, &job("echo here", &[("zone", zone)])).await?;
        assert_eq!(
            (job.state, job.node_id, job.output.stdout.as_str()),
            (JobState::Completed, Some(node.id), "here\n")
        );
    }
    // Without labels, placed where most room is.
    let anywhere = sessions
        .create_user_session(&session_with_labels(&[]))
        .await?;
    assert_eq!(fleet.control_plane.world.containers()?.len(), 5);

    // A restarted worker recovers its own sandboxes and leaves the other's alone; so does one that
    // shuts down.
    near.kill()?;
    near = fleet
        .control_plane
        .world
        .worker(
            &fleet
                .options("near", &fleet.orchestrator.control_url()?)
                .set("labels", r#"{ zone = "c" }"#),
        )
        .await?;
    let relabelled = wait_for_node(&client, "near", |node| {
        node.capability.labels == labels(&[("zone", "c")])
    })
    .await?;
    assert_eq!(relabelled.id, first.id);
    for session in made.iter().chain([&anywhere]) {
        let answered = async || {
            Ok(sessions
                .exec(session.session_id, &sh("echo on"))
                .await
                .is_ok_and(|answer| answer.stdout == "on\n"))
        };
        eventually("every session answers", TIMEOUT, answered).await?;
    }
    far.shut_down().await?;
    let left: Vec<_> = made
        .iter()
        .chain([&anywhere])
        .filter(|session| session.node_id == first.id)
        .collect();
    assert_eq!(fleet.control_plane.world.containers()?.len(), left.len());
    for session in left {
        assert_eq!(
            sessions
                .exec(session.session_id, &sh("echo on"))
                .await?
                .stdout,
            "on\n"
        );
    }
    near.shut_down().await?;
    other.assert_clean().await?;
    eventually("no container is left", TIMEOUT, async || {
        Ok(fleet.control_plane.world.containers()?.is_empty())
    })
    .await
}

#[tokio::test]
// invariant: control-plane
async fn work_waits_for_a_node_that_fits_and_a_draining_one_gets_none() -> Result<()> {
    let fleet = Fleet::new().await?;
    let other = World::new()?;
    let (near, _far) = start_two_workers(&fleet, &other).await?;
    let client = fleet.orchestrator.client()?;
    let first = wait_for_node(&client, "near", |node| node.state == NodeState::Ready).await?;
    let second = wait_for_node(&client, "far", |node| node.state == NodeState::Ready).await?;
    let sessions = client.sessions();

    // No node matches: a session is refused with every node's reason, a job waits.
    let nowhere = sessions
        .create_user_session(&session_with_labels(&[("zone", "c")]))
        .await
        .expect_err("no node is in that zone");
    assert!(nowhere.is(ErrorCode::NoCapacity), "{nowhere}");
    for said in [
        "near: does not have the label zone=c",
        "far: does not have the label zone=c",
    ] {
        assert!(nowhere.to_string().contains(said), "{nowhere}");
    }
    let waiting = client
        .create_job(&job("echo late", &[("zone", "c")]))
        .await?
        .job_id;
    let passed = run_to_end(&client, &job("echo passed", &[])).await?;
    assert_eq!(
        (passed.state, client.job(waiting).await?.state),
        (JobState::Completed, JobState::Accepted),
        "the waiting job blocked another one"
    );
    for bad in [
        labels(&[("", "x")]),
        (0..65)
            .map(|number| (format!("l{number}"), String::new()))
            .collect(),
    ] {
        let refused = sessions
            .create_user_session(&UserSessionCreate {
                node_labels: bad.clone(),
                ..session_with_labels(&[])
            })
            .await
            .expect_err("no label");
        assert!(matches!(refused.status(), Some(400 | 413)), "{refused}");
        let refused = client
            .create_job(&JobCreate {
                node_labels: bad,
                ..job("true", &[])
            })
            .await
            .expect_err("no label");
        assert!(matches!(refused.status(), Some(400 | 413)), "{refused}");
    }

    // A workspace stays on its node, whatever the labels.
    let task = client
        .create_task(&TaskCreate {
            name: "kept".to_owned(),
            ..Default::default()
        })
        .await?
        .id;
    let session = sessions
        .create_user_session(&UserSessionCreate {
            task_id: Some(task),
            ..session_with_labels(&[("zone", "b")])
        })
        .await?;
    let end = SessionEnd {
        workspace: Some(WorkspaceDisposal::Keep),
        ..Default::default()
    };
    sessions.end_session(session.session_id, &end).await?;
    let again = |zone| UserSessionCreate {
        task_id: Some(task),
        workspace_ref: Some(WorkspaceRef::Workspace(session.workspace_id)),
        ..session_with_labels(&[("zone", zone)])
    };
    let elsewhere = sessions
        .create_user_session(&again("a"))
        .await
        .expect_err("the workspace is on another node");
    assert!(
        elsewhere.is(ErrorCode::NoCapacity)
            && elsewhere
                .to_string()
                .contains("far, which has the workspace, does not have the label zone=a"),
        "{elsewhere}"
    );
    assert_eq!(
        sessions.create_user_session(&again("b")).await?.node_id,
        second.id
    );

    // On the command line: the nodes, their labels, and draining one.
    let list = fleet.run(&["node", "list"])?.success()?;
    let row = |name: &str| {
        list.lines()
            .find(|line| line.contains(name))
            .unwrap_or_default()
            .to_owned()
    };
    assert!(
        row("near").contains("disk=fast,zone=a")
            && row("near").contains("ready")
            && row("far").contains("disk=fast,zone=b"),
        "{list}"
    );
    let shown = fleet.run(&["node", "show", "far"])?.success()?;
    assert!(
        shown.contains("labels      disk=fast,zone=b") && shown.contains(IMAGE),
        "{shown}"
    );
    let refused = fleet.run(&["session", "create", "--node-label", "zone=c"])?;
    assert!(
        refused.failure().1 == "no_capacity" && refused.stderr.contains("zone=c"),
        "{refused:?}"
    );
    let id = fleet
        .run(&[
            "session",
            "create",
            "--memory",
            "64m",
            "--node-label",
            "zone=a",
        ])?
        .success()?;
    let object: Value = fleet
        .run(&["session", "show", id.trim_end(), "--output", "json"])?
        .json()?;
    assert_eq!(object["node_id"], first.id.to_string());
    let ran = fleet.run(&[
        "run",
        "--memory",
        "64m",
        "--node-label",
        "zone=b",
        "--",
        "sh",
        "-c",
        "echo by run; exit 3",
    ])?;
    assert_eq!(
        (ran.code, ran.text().as_str()),
        (Some(3), "by run\n"),
        "{ran:?}"
    );

    let drained = fleet.run(&["node", "drain", "far"])?;
    assert!(
        drained.code == Some(0) && drained.stderr.contains("'far' accepts no new work"),
        "{drained:?}"
    );
    assert_eq!(
        fleet
            .run(&["node", "show", "far", "--output", "json"])?
            .json()?["state"],
        "draining"
    );
    for _ in 0..4 {
        assert_eq!(
            sessions
                .create_user_session(&session_with_labels(&[("disk", "fast")]))
                .await?
                .node_id,
            first.id
        );
    }
    let refused = sessions
        .create_user_session(&session_with_labels(&[("zone", "b")]))
        .await
        .expect_err("the only node drains");
    assert!(
        refused.is(ErrorCode::NoCapacity) && refused.to_string().contains("far: is draining"),
        "{refused}"
    );
    fleet
        .run(&["node", "drain", second.id.to_string().as_str(), "--undo"])?
        .success()?;
    assert_eq!(
        sessions
            .create_user_session(&session_with_labels(&[("zone", "b")]))
            .await?
            .node_id,
        second.id
    );

    // A standalone worker can't select nodes.
    let mut alone = cynode(&fleet.control_plane.world)?;
    alone
        .env("CYNODE_URL", near.url()?)
        .env("CYNODE_TOKEN", near.token()?)
        .args(["session", "create", "--node-label", "zone=a"]);
    assert_eq!(run(&mut alone, b"")?.failure(), (64, "usage".to_owned()));
    client.stop_job(waiting).await?;
    eventually("the waiting job is stopped", TIMEOUT, async || {
        Ok(client.job(waiting).await?.state == JobState::Canceled)
    })
    .await
}

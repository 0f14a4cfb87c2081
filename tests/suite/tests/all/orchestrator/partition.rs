//! A real node that is partitioned from its control plane, in both directions, and returns.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, Event, Job, JobCreate, JobId, JobState, NodeState, Retry, SessionEnd,
    UserSessionCreate,
};
use cynode_client::{JobFilter, SessionClient, UserClient};
use cynode_tests::{
    ControlPlane, IMAGE, Options, Relay, RunningOrchestrator, RunningWorker, eventually, sh,
};
use serde_json::{Value, json};

use super::faults::{TIMEOUT, small_limits};

/// A node behind two relays that can be cut.
struct PartitionedNode {
    client: UserClient,
    orchestrator: RunningOrchestrator,
    worker: RunningWorker,
    /// From the orchestrator to the node, and from the node to the control plane.
    ways: [Relay; 2],
    control_plane: ControlPlane,
}

impl PartitionedNode {
    async fn start() -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let key = control_plane
            .world
            .directory()
            .join("registration.key")
            .display()
            .to_string();
        let seeds = format!("[{IMAGE:?}]");
        let settings = [
            ("registration_key_file", key.as_str()),
            ("seed_images", seeds.as_str()),
            ("heartbeat_seconds", "1"),
            ("node_lost_after", "4"),
        ];
        let orchestrator = control_plane.orchestrator("", &settings).await?;
        let ways = [Relay::new().await?, Relay::new().await?];
        let options = Options::default()
            .set("orchestrator_url", &format!("{:?}", ways[1].url()))
            .set("api_url", &format!("{:?}", ways[0].url()))
            .set("registration_key_file", &format!("{key:?}"));
        let worker = control_plane.world.worker(&options).await?;
        let partition = Self {
            client: orchestrator.client()?,
            orchestrator,
            worker,
            ways,
            control_plane,
        };
        partition.connect()?;
        eventually("the node has reported its images", TIMEOUT, async || {
            Ok(!partition.client.images().await?.is_empty())
        })
        .await?;
        Ok(partition)
    }

    fn connect(&self) -> Result<()> {
        self.ways[0].route_to(&self.worker.url()?)?;
        self.ways[1].route_to(&self.orchestrator.control_url()?)
    }

    fn cut(&self) {
        self.ways.iter().for_each(Relay::cut);
    }

    async fn node_until(&self, state: NodeState) -> Result<()> {
        eventually(&format!("the node is {state:?}"), TIMEOUT, async || {
            Ok(self
                .client
                .nodes()
                .await?
                .iter()
                .any(|node| node.state == state))
        })
        .await
    }

    /// The worker token in the node's registration file.
    fn worker_token(&self) -> Result<String> {
        let registration: Value = serde_json::from_slice(&fs_err::read(
            self.control_plane
                .world
                .state_dir()
                .join("worker/registration.json"),
        )?)?;
        Ok(registration["worker_token"]
            .as_str()
            .context("the node has registered")?
            .to_owned())
    }

    async fn job(&self, seconds: u32, retry: Retry) -> Result<JobId> {
        let script = format!("cat /proc/sys/kernel/random/uuid; sleep {seconds}; echo done");
        let command = ["sh", "-c", &script].map(str::to_owned).to_vec();
        let request = JobCreate {
            command,
            limits: Some(small_limits()),
            retry: Some(retry),
            ..Default::default()
        };
        let id = self.client.create_job(&request).await?.job_id;
        self.wait_for_job(id, JobState::InProgress).await?;
        Ok(id)
    }

    async fn wait_for_job(&self, id: JobId, state: JobState) -> Result<Job> {
        eventually(&format!("job {id} is {state}"), TIMEOUT, async || {
            Ok(self.client.job(id).await?.state == state)
        })
        .await?;
        Ok(self.client.job(id).await?)
    }

    /// The states of every job, by the events.
    async fn states(&self) -> Result<BTreeMap<JobId, Vec<String>>> {
        let events: Vec<Event> = self.client.events(0, None, Duration::ZERO).await?.items;
        let mut states: BTreeMap<JobId, Vec<String>> = BTreeMap::new();
        for event in events {
            if let Some(id) = event.job_id {
                states.entry(id).or_default().push(event.state);
            }
        }
        Ok(states)
    }
}

/// Waits for a job's result on the node itself, unseen by the orchestrator.
async fn wait_for_end_on_node(node: &SessionClient, id: JobId) -> Result<Job> {
    eventually("the job ends on the node", TIMEOUT, async || {
        Ok(node.job(id).await?.state.is_final())
    })
    .await?;
    Ok(node.job(id).await?)
}

// part of: CYNAI.SBAGNT.JobLifecycle
#[tokio::test]
// invariant: exactly-once
async fn a_partitioned_node_returns_without_losing_or_repeating_results() -> Result<()> {
    let mut partition = PartitionedNode::start().await?;
    let node = partition.worker.client()?;
    let session = partition
        .client
        .sessions()
        .create_user_session(&UserSessionCreate {
            limits: Some(small_limits()),
            ..Default::default()
        })
        .await?
        .session_id;
    let exec = async |script: &str| partition.client.sessions().exec(session, &sh(script)).await;
    exec("echo mark >> marks").await?;
    let old_token = partition.worker_token()?;
    partition
        .control_plane
        .postgres
        .query("update nodes set tokens_rotated_at = now() - interval '2 days'")?;
    let changed = async || Ok(exec("true").await.map(|_| partition.worker_token())?? != old_token);
    eventually(
        "the token is rotated, and calls still succeed",
        TIMEOUT,
        changed,
    )
    .await?;

    // Briefly: no node or job counts as lost.
    let short = [
        partition.job(2, Retry::Never).await?,
        partition.job(2, Retry::OnNodeLoss).await?,
    ];
    partition.cut();
    let refused = exec("echo mark >> marks").await;
    ensure!(
        refused
            .as_ref()
            .is_err_and(|error| error.is(ErrorCode::NodeUnreachable)),
        "{refused:?}"
    );
    let mut results = Vec::new();
    for id in short {
        results.push(wait_for_end_on_node(&node, id).await?);
    }
    partition.connect()?;
    for (id, there) in short.into_iter().zip(results) {
        let job = partition.wait_for_job(id, JobState::Completed).await?;
        assert_eq!(
            (job.output, job.reported_by.as_str(), job.late_result),
            (there.output, "worker", None)
        );
    }
    partition.node_until(NodeState::Ready).await?;

    // Until the node counts as lost, while its jobs end.
    let (never, again) = (
        partition.job(8, Retry::Never).await?,
        partition.job(8, Retry::OnNodeLoss).await?,
    );
    partition.cut();
    let lost = partition.wait_for_job(never, JobState::Failed).await?;
    assert_eq!(
        (
            lost.error.map(|error| error.code).as_deref(),
            lost.reported_by.as_str()
        ),
        (Some("node_lost"), "orchestrator")
    );
    partition.wait_for_job(again, JobState::Accepted).await?;
    partition.node_until(NodeState::Lost).await?;
    let (never_there, again_there) = (
        wait_for_end_on_node(&node, never).await?,
        wait_for_end_on_node(&node, again).await?,
    );
    partition.connect()?;
    eventually("the late result is kept", TIMEOUT, async || {
        Ok(partition.client.job(never).await?.late_result.is_some())
    })
    .await?;
    let late = partition.client.job(never).await?;
    let late_result: Value = late.late_result.context("the late result was just seen")?;
    assert_eq!(
        (late.state, &late_result["state"], &late_result["stdout"]),
        (
            JobState::Failed,
            &json!("completed"),
            &json!(never_there.output.stdout)
        )
    );
    // The only node has already run this job.
    let job = partition.wait_for_job(again, JobState::Completed).await?;
    assert_eq!((job.output, job.late_result), (again_there.output, None));
    eventually("every result is acknowledged", TIMEOUT, async || {
        Ok(node.list_jobs(&JobFilter::default()).await?.is_empty())
    })
    .await?;
    let settled = async || {
        Ok(partition
            .control_plane
            .postgres
            .query("select count(*) from job_leftovers")?
            == "0")
    };
    eventually("nothing is left behind", TIMEOUT, settled).await?;
    assert_eq!(
        partition.client.job(again).await?.late_result,
        None,
        "the result was reported twice"
    );

    assert_eq!(exec("cat marks").await?.stdout, "mark\n");
    partition
        .client
        .sessions()
        .end_session(session, &SessionEnd::default())
        .await?;
    let states = partition.states().await?;
    for id in short {
        assert_eq!(states[&id], ["accepted", "in_progress", "completed"]);
    }
    assert_eq!(states[&never], ["accepted", "in_progress", "failed"]);
    assert_eq!(
        (
            states[&again][..3].join(" "),
            states[&again].last().map(String::as_str)
        ),
        (
            "accepted in_progress accepted".to_owned(),
            Some("completed")
        )
    );
    assert_eq!(
        states[&again]
            .iter()
            .filter(|state| *state == "completed")
            .count(),
        1
    );
    // The tokens were rotated long ago: the previous one is invalid.
    ensure!(
        partition.worker_token()? != old_token,
        "the token was not rotated"
    );
    let stranger = SessionClient::new(&partition.worker.url()?, &old_token)?;
    let closed = async || {
        Ok(stranger
            .list_jobs(&JobFilter::default())
            .await
            .is_err_and(|error| error.is(ErrorCode::Unauthorized)))
    };
    eventually("the old token is refused", TIMEOUT, closed).await?;
    eventually("no container is left", TIMEOUT, async || {
        Ok(partition.control_plane.world.containers()?.is_empty())
    })
    .await?;
    partition.worker.shut_down().await
}

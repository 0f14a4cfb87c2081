//! A real node that is cut off from its control plane, both ways, and comes back.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, Event, Job, JobCreate, JobId, JobState, NodeState, Retry, SessionEnd,
    UserSessionCreate,
};
use cynode_client::{JobFilter, UserClient, WorkerClient};
use cynode_tests::{
    IMAGE, Options, Plane, Relay, RunningOrchestrator, RunningWorker, eventually, sh,
};
use serde_json::{Value, json};

use super::faults::{PATIENCE, small};

/// A node behind two ways that can be closed.
struct Away {
    client: UserClient,
    orchestrator: RunningOrchestrator,
    worker: RunningWorker,
    /// From the orchestrator to the node, and from the node to the control plane.
    ways: [Relay; 2],
    plane: Plane,
}

impl Away {
    async fn start() -> Result<Self> {
        let plane = Plane::new().await?;
        let key = plane
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
        let orchestrator = plane.orchestrator("", &settings).await?;
        let ways = [Relay::new().await?, Relay::new().await?];
        let options = Options::default()
            .set("orchestrator_url", &format!("{:?}", ways[1].url()))
            .set("api_url", &format!("{:?}", ways[0].url()))
            .set("registration_key_file", &format!("{key:?}"));
        let worker = plane.world.worker(&options).await?;
        let away = Self {
            client: orchestrator.client()?,
            orchestrator,
            worker,
            ways,
            plane,
        };
        away.connect()?;
        eventually("the node has said what it has", PATIENCE, async || {
            Ok(!away.client.images().await?.is_empty())
        })
        .await?;
        Ok(away)
    }

    fn connect(&self) -> Result<()> {
        self.ways[0].lead_to(&self.worker.url()?)?;
        self.ways[1].lead_to(&self.orchestrator.control_url()?)
    }

    fn cut(&self) {
        self.ways.iter().for_each(Relay::cut);
    }

    async fn node_until(&self, state: NodeState) -> Result<()> {
        eventually(&format!("the node is {state:?}"), PATIENCE, async || {
            Ok(self
                .client
                .nodes()
                .await?
                .iter()
                .any(|node| node.state == state))
        })
        .await
    }

    /// What orchestrators show the node, as it has it on disk.
    fn worker_token(&self) -> Result<String> {
        let known: Value = serde_json::from_slice(&fs_err::read(
            self.plane
                .world
                .state_dir()
                .join("worker/registration.json"),
        )?)?;
        Ok(known["worker_token"]
            .as_str()
            .context("it has registered")?
            .to_owned())
    }

    async fn job(&self, seconds: u32, retry: Retry) -> Result<JobId> {
        let script = format!("cat /proc/sys/kernel/random/uuid; sleep {seconds}; echo done");
        let command = ["sh", "-c", &script].map(str::to_owned).to_vec();
        let request = JobCreate {
            command,
            limits: Some(small()),
            retry: Some(retry),
            ..Default::default()
        };
        let id = self.client.create_job(&request).await?.job_id;
        self.until(id, JobState::InProgress).await?;
        Ok(id)
    }

    async fn until(&self, id: JobId, state: JobState) -> Result<Job> {
        eventually(&format!("job {id} is {state}"), PATIENCE, async || {
            Ok(self.client.job(id).await?.state == state)
        })
        .await?;
        Ok(self.client.job(id).await?)
    }

    /// Every job's states as they were told.
    async fn told(&self) -> Result<BTreeMap<JobId, Vec<String>>> {
        let events: Vec<Event> = self.client.events(0, None, Duration::ZERO).await?.items;
        let mut told: BTreeMap<JobId, Vec<String>> = BTreeMap::new();
        for event in events {
            if let Some(id) = event.job_id {
                told.entry(id).or_default().push(event.state);
            }
        }
        Ok(told)
    }
}

/// Its result at the node itself, which nobody else hears of.
async fn ended_there(node: &WorkerClient, id: JobId) -> Result<Job> {
    eventually("it ends at the node", PATIENCE, async || {
        Ok(node.job(id).await?.state.is_final())
    })
    .await?;
    Ok(node.job(id).await?)
}

// proves: CYNAI.SBAGNT.JobLifecycle
#[tokio::test]
async fn a_node_that_was_cut_off_and_is_back_has_lost_nothing_and_says_nothing_twice() -> Result<()>
{
    let mut away = Away::start().await?;
    let node = away.worker.client()?;
    let session = away
        .client
        .sessions()
        .create_user_session(&UserSessionCreate {
            limits: Some(small()),
            ..Default::default()
        })
        .await?
        .session_id;
    let exec = async |script: &str| away.client.sessions().exec(session, &sh(script)).await;
    exec("echo mark >> marks").await?;
    let old_token = away.worker_token()?;
    away.plane
        .postgres
        .ask("update nodes set tokens_rotated_at = now() - interval '2 days'")?;
    let changed = async || Ok(exec("true").await.map(|_| away.worker_token())?? != old_token);
    eventually("it has another token, and calls go on", PATIENCE, changed).await?;

    // For a moment: nobody is given up.
    let short = [
        away.job(2, Retry::Never).await?,
        away.job(2, Retry::OnNodeLoss).await?,
    ];
    away.cut();
    let refused = exec("echo mark >> marks").await;
    ensure!(
        refused
            .as_ref()
            .is_err_and(|error| error.is(ErrorCode::NodeUnreachable)),
        "{refused:?}"
    );
    let mut results = Vec::new();
    for id in short {
        results.push(ended_there(&node, id).await?);
    }
    away.connect()?;
    for (id, there) in short.into_iter().zip(results) {
        let job = away.until(id, JobState::Completed).await?;
        assert_eq!(
            (job.output, job.reported_by.as_str(), job.late_result),
            (there.output, "worker", None)
        );
    }
    away.node_until(NodeState::Ready).await?;

    // For so long that it is given up, while its jobs end.
    let (never, again) = (
        away.job(8, Retry::Never).await?,
        away.job(8, Retry::OnNodeLoss).await?,
    );
    away.cut();
    let lost = away.until(never, JobState::Failed).await?;
    assert_eq!(
        (
            lost.error.map(|error| error.code).as_deref(),
            lost.reported_by.as_str()
        ),
        (Some("node_lost"), "orchestrator")
    );
    away.until(again, JobState::Accepted).await?;
    away.node_until(NodeState::Lost).await?;
    let (never_there, again_there) = (
        ended_there(&node, never).await?,
        ended_there(&node, again).await?,
    );
    away.connect()?;
    eventually("what it says late is kept", PATIENCE, async || {
        Ok(away.client.job(never).await?.late_result.is_some())
    })
    .await?;
    let late = away.client.job(never).await?;
    let said: Value = late.late_result.context("it was just there")?;
    assert_eq!(
        (late.state, &said["state"], &said["stdout"]),
        (
            JobState::Failed,
            &json!("completed"),
            &json!(never_there.output.stdout)
        )
    );
    // It is the only node, and has run this one already.
    let job = away.until(again, JobState::Completed).await?;
    assert_eq!((job.output, job.late_result), (again_there.output, None));
    eventually("every result is known", PATIENCE, async || {
        Ok(node.list_jobs(&JobFilter::default()).await?.is_empty())
    })
    .await?;
    let settled = async || {
        Ok(away
            .plane
            .postgres
            .ask("select count(*) from job_leftovers")?
            == "0")
    };
    eventually("nothing is left behind", PATIENCE, settled).await?;
    assert_eq!(
        away.client.job(again).await?.late_result,
        None,
        "it was said once"
    );

    assert_eq!(exec("cat marks").await?.stdout, "mark\n");
    away.client
        .sessions()
        .end_session(session, &SessionEnd::default())
        .await?;
    let told = away.told().await?;
    for id in short {
        assert_eq!(told[&id], ["accepted", "in_progress", "completed"]);
    }
    assert_eq!(told[&never], ["accepted", "in_progress", "failed"]);
    assert_eq!(
        (
            told[&again][..3].join(" "),
            told[&again].last().map(String::as_str)
        ),
        (
            "accepted in_progress accepted".to_owned(),
            Some("completed")
        )
    );
    assert_eq!(
        told[&again]
            .iter()
            .filter(|state| *state == "completed")
            .count(),
        1
    );
    // It changed its tokens long ago: the one before opens nothing any more.
    ensure!(away.worker_token()? != old_token, "it has another");
    let stranger = WorkerClient::new(&away.worker.url()?, &old_token)?;
    let closed = async || {
        Ok(stranger
            .list_jobs(&JobFilter::default())
            .await
            .is_err_and(|error| error.is(ErrorCode::Unauthorized)))
    };
    eventually("the old token is refused", PATIENCE, closed).await?;
    eventually("no container is left", PATIENCE, async || {
        Ok(away.plane.world.containers()?.is_empty())
    })
    .await?;
    away.worker.shut_down().await
}

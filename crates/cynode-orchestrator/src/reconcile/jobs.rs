//! Jobs: dispatched to a node, followed, collected, acknowledged.

use std::{borrow::Cow, sync::Arc, time::Duration};

use cynode_api::{
    ErrorCode, Job, JobError, JobProgress, JobState, NodeId, Reporter, Retry, sba::TodoSummary,
};
use cynode_client::SessionClient;
use time::OffsetDateTime;

use super::{Error, Lanes, Reconciler};
use crate::{
    Config,
    db::{Db, JobRow},
    fleet::{CallError, Fleet, is_transient_refusal},
    job_artifacts::{self, Collector, ReportSource, Wanted},
    placement::{self, NodeRequirements, Placement},
    signal::EventSignal,
};

/// Characters of the step or turn in an event.
const MAX_ACTIVITY_CHARACTERS: usize = 64;
/// Jobs per lease statement.
const BATCH: usize = 64;
/// Interval of polls of a running job. The node reports changes, so polls only cover lost reports.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Next check of a job on a lost or silent node. The return of the node schedules it earlier.
const LOST_NODE_INTERVAL: Duration = Duration::from_secs(60);
/// Next attempt while no node has capacity for the job.
const CAPACITY_INTERVAL: Duration = Duration::from_secs(2);
/// Next attempt while other jobs occupy the node's lane.
const LANE_INTERVAL: Duration = Duration::from_secs(1);
/// Bounds each call of a step. A lease lasts longer.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Clone, Debug)]
pub(crate) struct JobReconciler {
    pub(crate) db: Db,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) collector: Collector,
    pub(crate) config: Arc<Config>,
    pub(crate) placement: Placement,
    pub(crate) lanes: Lanes,
    pub(crate) readers: EventSignal,
}

impl Reconciler for JobReconciler {
    const NAME: &'static str = "jobs";
    const INTERVAL: Duration = Duration::from_millis(500);

    async fn round(&self) -> Result<(), Error> {
        loop {
            let room = self.lanes.free().min(BATCH);
            if room == 0 {
                return Ok(());
            }
            let jobs = self.db.lease_jobs(room).await?;
            let full = jobs.len() == room;
            for row in jobs {
                let (id, node_id, lease) = (row.job_id, row.node_id, row.lease);
                let Some(permit) = self.lanes.try_acquire(node_id) else {
                    let is_backed_off = node_id.is_some_and(|id| self.fleet.is_backed_off(id));
                    let delay = if is_backed_off {
                        POLL_INTERVAL
                    } else {
                        LANE_INTERVAL
                    };
                    self.db.extend_lease(id, lease, delay).await?;
                    continue;
                };
                let reconciler = self.clone();
                tokio::spawn(async move {
                    let next = match Box::pin(reconciler.step(row)).await {
                        Ok(next) => next,
                        Err(error) => {
                            tracing::debug!(job_id = %id, %error, "A step of a job failed.");
                            Some(RETRY_DELAY)
                        }
                    };
                    if let Some(delay) = next {
                        drop(reconciler.db.extend_lease(id, lease, delay).await);
                    }
                    drop(permit);
                });
            }
            if !full {
                return Ok(());
            }
        }
    }
}

impl JobReconciler {
    /// Runs one step. Returns when to run the next one; `None` when nothing is left to do.
    async fn step(&self, row: JobRow) -> Result<Option<Duration>, Error> {
        match (row.node_id, row.state.is_final()) {
            (None, true) => {
                self.db.acknowledge_job(row.job_id).await?;
                Ok(None)
            }
            (None, false) if row.stop_requested => {
                let object = ended_by_orchestrator(&row, JobState::Canceled, None);
                self.db
                    .advance_job(row.job_id, None, &object, None, true)
                    .await?;
                Ok(None)
            }
            (None, false) => Box::pin(self.dispatch(&row)).await,
            (Some(node_id), false) => Box::pin(self.follow(&row, node_id)).await,
            (Some(node_id), true) => self.settle(&row, node_id).await,
        }
    }

    async fn dispatch(&self, row: &JobRow) -> Result<Option<Duration>, Error> {
        let Some(version) = row.image_version_id else {
            return Err(Error::NoImage);
        };
        let labels = row.node_labels()?;
        // A node that stopped the job considers it ended.
        let excluded = self.db.nodes_that_stopped(row.job_id).await?;
        let wanted = NodeRequirements {
            labels: &labels,
            limits: row.request.sandbox.limits.unwrap_or_default(),
            needs_runner: row.has_spec(),
            models: &row.allowed_models,
        };
        if let Some(reason) = self.placement.unserved(&wanted).await? {
            return self.fail_unserved(row, reason).await;
        }
        let node = match self
            .placement
            .choose_node(version, &wanted, &excluded)
            .await
        {
            Ok(node) => node,
            // The job waits for capacity.
            Err(placement::Error::NoNode(_)) => return Ok(Some(CAPACITY_INTERVAL)),
            Err(error) => return Err(error.into()),
        };
        // A node that hangs delays only its own work; one that is backed off gets no new work.
        let Some(_place) = self
            .lanes
            .try_acquire(Some(node.id))
            .filter(|_| !self.fleet.is_backed_off(node.id))
        else {
            return Ok(Some(RETRY_DELAY));
        };
        let client = self.fleet.client_for(&node)?;
        // Durable before the node is called: after a crash, the next reconciler asks this node and
        // no other.
        if !self.db.assign_job(row.job_id, node.id).await? {
            return Ok(Some(Duration::ZERO));
        }
        Box::pin(self.send(row, node.id, &client, true)).await
    }

    /// Fails a job whose models no node serves.
    async fn fail_unserved(&self, row: &JobRow, reason: String) -> Result<Option<Duration>, Error> {
        let error = JobError {
            code: ErrorCode::InferenceUnavailable.as_str().to_owned(),
            detail: reason,
        };
        let object = ended_by_orchestrator(row, JobState::Failed, Some(error));
        self.db
            .advance_job(row.job_id, None, &object, None, true)
            .await?;
        self.readers.notify();
        Ok(None)
    }

    /// Sends the job to its node, repeatedly if necessary: the node runs it once. Only on the first
    /// attempt it is certain that no node has it.
    async fn send(
        &self,
        row: &JobRow,
        node_id: NodeId,
        client: &SessionClient,
        is_first: bool,
    ) -> Result<Option<Duration>, Error> {
        let mut request = Cow::Borrowed(&row.request);
        if row.has_spec() {
            request.to_mut().job = self.db.job_spec(row.job_id).await?;
        }
        match self
            .fleet
            .call(node_id, CALL_TIMEOUT, client.run_job_async(&request))
            .await
        {
            Ok(job) => Box::pin(self.store_report(row, node_id, client, job)).await,
            // No node has the job: another one may fit better.
            Err(CallError::NotSent(_)) if is_first => {
                self.db
                    .unassign_job(row.job_id, node_id, Some(row.lease), RETRY_DELAY)
                    .await?;
                Ok(None)
            }
            Err(error)
                if is_first && error.is_refusal(&[ErrorCode::NoCapacity, ErrorCode::NoSpace]) =>
            {
                self.db
                    .unassign_job(row.job_id, node_id, Some(row.lease), RETRY_DELAY)
                    .await?;
                Ok(None)
            }
            Err(CallError::Refused(problem))
                if !is_transient_refusal(&problem)
                    && !problem.is(ErrorCode::NoCapacity)
                    && !problem.is(ErrorCode::NoSpace) =>
            {
                let object = ended_by_orchestrator(
                    row,
                    JobState::Failed,
                    Some(JobError {
                        code: problem.code,
                        detail: problem.detail,
                    }),
                );
                self.db
                    .advance_job(
                        row.job_id,
                        Some(node_id),
                        &Job {
                            node_id: Some(node_id),
                            ..object
                        },
                        None,
                        true,
                    )
                    .await?;
                Ok(None)
            }
            Err(_) => Ok(Some(RETRY_DELAY)),
        }
    }

    /// Asks the node for the state of the job.
    async fn follow(&self, row: &JobRow, node_id: NodeId) -> Result<Option<Duration>, Error> {
        let node = self.db.node(node_id).await?;
        if node.is_lost {
            return self.handle_lost_node(row, node_id).await;
        }
        if node.silent_for > self.config.unreachable_after() {
            return Ok(Some(POLL_INTERVAL));
        }
        let client = self.fleet.client_for(&node)?;
        if row.stop_requested {
            // Even if the node does not know the job: it must not start it later.
            if let Err(error) = self
                .fleet
                .call(
                    node_id,
                    CALL_TIMEOUT,
                    client.stop_job(row.task_id, row.job_id),
                )
                .await
                && error.is_refusal(&[ErrorCode::JobNotFound])
            {
                let object = ended_by_orchestrator(row, JobState::Canceled, None);
                // Not acknowledged: a request in flight may still reach the node, and has to be
                // stopped then.
                self.db
                    .advance_job(row.job_id, Some(node_id), &object, None, false)
                    .await?;
                return Ok(Some(POLL_INTERVAL));
            }
        }
        match self
            .fleet
            .call(node_id, CALL_TIMEOUT, client.job(row.job_id))
            .await
        {
            Ok(job) => Box::pin(self.store_report(row, node_id, &client, job)).await,
            // The job has started and must not run twice: a node that lost its disk does not get it
            // again.
            Err(error)
                if error.is_refusal(&[ErrorCode::JobNotFound])
                    && row.state == JobState::InProgress
                    && row.retry == Retry::Never =>
            {
                self.fail_lost(row, node_id, "the node no longer knows the job")
                    .await
            }
            Err(error) if error.is_refusal(&[ErrorCode::JobNotFound]) => {
                Box::pin(self.send(row, node_id, &client, false)).await
            }
            Err(_) => Ok(Some(RETRY_DELAY)),
        }
    }

    /// Stores the node's report. A final report is stored with the output, and only then may the
    /// node forget the job.
    async fn store_report(
        &self,
        row: &JobRow,
        node_id: NodeId,
        client: &SessionClient,
        job: Job,
    ) -> Result<Option<Duration>, Error> {
        let mut job = restrict_report(row, node_id, job);
        let progress = job.progress.take().filter(|_| row.has_spec());
        let job = storable(job);
        if !job.state.is_final() {
            let job = Job {
                sba_result: None,
                artifacts: Vec::new(),
                ..job
            };
            self.db
                .advance_job(row.job_id, Some(node_id), &job, None, false)
                .await?;
            if let Some(progress) = progress
                && self
                    .db
                    .note_progress(row.job_id, node_id, &counted(progress))
                    .await?
            {
                self.readers.notify();
            }
            return Ok(Some(POLL_INTERVAL));
        }
        let source = ReportSource::new(row, node_id, client);
        let collected = match self
            .collector
            .collect(source, job, Wanted::Output, Some(row.lease))
            .await
        {
            Ok(collected) => collected,
            Err(job_artifacts::Error::LeaseLost) => return Ok(None),
            Err(error) => {
                tracing::debug!(job_id = %row.job_id, %error, "The output of a job can't be fetched.");
                self.db.wake_job(row.job_id, node_id, RETRY_DELAY).await?;
                return Ok(None);
            }
        };
        let blobs = collected.blobs(&self.collector.blobs);
        self.db
            .advance_job(
                row.job_id,
                Some(node_id),
                &collected.job,
                Some(blobs),
                false,
            )
            .await?;
        self.readers.notify();
        let next = self.acknowledge(row, node_id, client).await?;
        if let Some(delay) = next {
            self.db.wake_job(row.job_id, node_id, delay).await?;
        }
        Ok(None)
    }

    async fn acknowledge(
        &self,
        row: &JobRow,
        node_id: NodeId,
        client: &SessionClient,
    ) -> Result<Option<Duration>, Error> {
        match self
            .fleet
            .call(node_id, CALL_TIMEOUT, client.ack_job(row.job_id))
            .await
        {
            Ok(()) => {}
            Err(error) if error.is_refusal(&[ErrorCode::JobNotFound]) => {}
            Err(_) => return Ok(Some(POLL_INTERVAL)),
        }
        self.db.acknowledge_job(row.job_id).await?;
        Ok(None)
    }

    /// Retries or fails the job of a lost node, as its retry rule decides.
    async fn handle_lost_node(
        &self,
        row: &JobRow,
        node_id: NodeId,
    ) -> Result<Option<Duration>, Error> {
        if row.retry == Retry::OnNodeLoss && !row.stop_requested {
            self.db.insert_orphan(row.job_id, node_id).await?;
            self.db
                .unassign_job(row.job_id, node_id, None, Duration::ZERO)
                .await?;
            return Ok(None);
        }
        self.fail_lost(row, node_id, "the node is lost: no heartbeat for too long")
            .await
    }

    async fn fail_lost(
        &self,
        row: &JobRow,
        node_id: NodeId,
        detail: &str,
    ) -> Result<Option<Duration>, Error> {
        let error = JobError {
            code: "node_lost".to_owned(),
            detail: detail.to_owned(),
        };
        let object = ended_by_orchestrator(row, JobState::Failed, Some(error));
        // Not acknowledged: if the node returns with a result, it is stored as a late result.
        self.db
            .advance_job(row.job_id, Some(node_id), &object, None, false)
            .await?;
        Ok(Some(LOST_NODE_INTERVAL))
    }

    /// Acknowledges an ended job to its node, which may have to stop it or report a late result
    /// first.
    async fn settle(&self, row: &JobRow, node_id: NodeId) -> Result<Option<Duration>, Error> {
        let node = self.db.node(node_id).await?;
        if !node.is_responsive(self.config.unreachable_after()) {
            return Ok(Some(LOST_NODE_INTERVAL));
        }
        let client = self.fleet.client_for(&node)?;
        if row.object.reported_by == Reporter::Orchestrator {
            match self
                .fleet
                .call(node_id, CALL_TIMEOUT, client.job(row.job_id))
                .await
            {
                Ok(job) if job.acknowledged => {}
                Ok(job) if job.state.is_final() => {
                    let source = ReportSource::new(row, node_id, &client);
                    match self
                        .collector
                        .store_late(source, storable(job), Some(row.lease))
                        .await
                    {
                        Ok(()) => {}
                        Err(job_artifacts::Error::LeaseLost) => return Ok(None),
                        Err(error) => {
                            tracing::debug!(job_id = %row.job_id, %error, "A late result can't be fetched.");
                            self.db.wake_job(row.job_id, node_id, POLL_INTERVAL).await?;
                            return Ok(None);
                        }
                    }
                    // The lease was extended meanwhile.
                    if let Some(delay) = self.acknowledge(row, node_id, &client).await? {
                        self.db.wake_job(row.job_id, node_id, delay).await?;
                    }
                    return Ok(None);
                }
                Ok(_) => {
                    drop(
                        self.fleet
                            .call(
                                node_id,
                                CALL_TIMEOUT,
                                client.stop_job(row.task_id, row.job_id),
                            )
                            .await,
                    );
                    return Ok(Some(RETRY_DELAY));
                }
                Err(error) if error.is_refusal(&[ErrorCode::JobNotFound]) => {}
                Err(_) => return Ok(Some(POLL_INTERVAL)),
            }
        }
        self.acknowledge(row, node_id, &client).await
    }
}

/// The job object for an end that the orchestrator ended_by_orchestrator itself.
fn ended_by_orchestrator(row: &JobRow, state: JobState, error: Option<JobError>) -> Job {
    Job {
        state,
        error,
        ended_at: Some(OffsetDateTime::now_utc()),
        node_id: row.node_id,
        reported_by: Reporter::Orchestrator,
        ..row.object.clone()
    }
}

/// A node's report, restricted to the fields that a node decides.
fn restrict_report(row: &JobRow, node_id: NodeId, job: Job) -> Job {
    Job {
        job_id: row.job_id,
        task_id: row.task_id,
        node_id: Some(node_id),
        image_ref: row.object.image_ref.clone(),
        reported_by: match job.reported_by {
            // Only the orchestrator itself decides without a node.
            Reporter::Orchestrator => Reporter::Worker,
            reporter => reporter,
        },
        late_result: None,
        command: None,
        created_by: None,
        acknowledged: false,
        ..job
    }
}

/// The progress of a job as an event has it: without texts that a sandbox chose.
fn counted(progress: JobProgress) -> JobProgress {
    let todo = progress.todo.map(|todo| TodoSummary {
        open: Vec::new(),
        ..todo
    });
    let shown = |character: &char| !character.is_control();
    let activity = progress.activity.map(|name| {
        let name = name.chars().filter(shown);
        name.take(MAX_ACTIVITY_CHARACTERS).collect()
    });
    JobProgress {
        todo,
        activity,
        ..progress
    }
}

/// The job as PostgreSQL can store it: its texts can't contain NUL, so streams that do are stored
/// as base64.
pub(super) fn storable(mut job: Job) -> Job {
    use base64::Engine as _;
    // Shown by the node while the job runs.
    job.progress = None;
    let output = &mut job.output;
    // The orchestrator decides what it keeps.
    output.truncated_by = None;
    if output.encoding == "utf-8" && (output.stdout.contains('\0') || output.stderr.contains('\0'))
    {
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        (output.stdout, output.stderr) = (encode(&output.stdout), encode(&output.stderr));
        "base64".clone_into(&mut output.encoding);
    }
    for text in job
        .error
        .iter_mut()
        .flat_map(|error| [&mut error.detail, &mut error.code])
        .chain(&mut job.signal)
        .chain(&mut job.image_digest)
    {
        if text.contains('\0') {
            *text = text.replace('\0', " ");
        }
    }
    job
}

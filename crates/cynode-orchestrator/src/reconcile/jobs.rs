//! Jobs: given to a node, asked after, collected, acknowledged.

use std::time::Duration;

use cynode_api::{ErrorCode, Job, JobError, JobState, NodeId, Retry};
use cynode_client::WorkerClient;
use cynode_service::ApiError;
use time::OffsetDateTime;

use crate::{
    Orchestrator, db::JobRow, fleet::Failed, placement::NodeRequirements, sessions::is_passing,
};

/// So many are taken at once.
const BATCH: usize = 64;
/// How soon a running job is looked at again. Its node says when something happens, so this is for words that were lost.
const LOOK: f64 = 5.0;
const SOON: f64 = 1.0;
/// A node that is given up, or that says nothing, is not asked for each of its jobs again and again; its return wakes them.
const LATER: f64 = 60.0;
/// No node can take it now.
const WAITING: f64 = 2.0;
/// A job waits for others of its node.
const IN_LINE: f64 = 1.0;
/// No call of a step takes longer. A lease holds for longer than that.
const CALL: Duration = Duration::from_secs(15);
/// While its output is fetched.
const COLLECTING: f64 = 60.0;

pub(super) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    loop {
        let room = orchestrator.job_lanes.free().min(BATCH);
        if room == 0 {
            return Ok(());
        }
        let jobs = orchestrator.db.lease_jobs(room).await?;
        let full = jobs.len() == room;
        for row in jobs {
            let (id, node_id, leased) = (row.job_id, row.node_id, row.lease_until);
            let Some(place) = orchestrator.job_lanes.enter(node_id) else {
                let quiet = node_id.is_some_and(|id| orchestrator.fleet.is_quiet(id));
                orchestrator
                    .db
                    .lease_until(id, leased, if quiet { LOOK } else { IN_LINE })
                    .await?;
                continue;
            };
            let orchestrator = orchestrator.clone();
            tokio::spawn(async move {
                let next = match Box::pin(step(&orchestrator, row)).await {
                    Ok(next) => next,
                    Err(error) => {
                        tracing::debug!(job_id = %id, error = %error.0, "A job did not get further.");
                        Some(SOON)
                    }
                };
                if let Some(seconds) = next {
                    drop(orchestrator.db.lease_until(id, leased, seconds).await);
                }
                drop(place);
            });
        }
        if !full {
            return Ok(());
        }
    }
}

/// One step. Says in how many seconds to look again; not at all when there is nothing left to do.
async fn step(orchestrator: &Orchestrator, row: JobRow) -> Result<Option<f64>, ApiError> {
    match (row.node_id, row.state.is_final()) {
        (None, true) => {
            orchestrator.db.acknowledge_job(row.job_id).await?;
            Ok(None)
        }
        (None, false) if row.stop_requested => {
            let object = decided(&row, JobState::Canceled, None);
            orchestrator
                .db
                .advance_job(row.job_id, None, &object, None, true)
                .await?;
            Ok(None)
        }
        (None, false) => dispatch(orchestrator, &row).await,
        (Some(node_id), false) => follow(orchestrator, &row, node_id).await,
        (Some(node_id), true) => settle(orchestrator, &row, node_id).await,
    }
}

/// The job as the orchestrator itself says it ended.
fn decided(row: &JobRow, state: JobState, error: Option<JobError>) -> Job {
    Job {
        state,
        error,
        ended_at: Some(OffsetDateTime::now_utc()),
        node_id: row.node_id,
        reported_by: "orchestrator".to_owned(),
        ..row.object.clone()
    }
}

async fn dispatch(orchestrator: &Orchestrator, row: &JobRow) -> Result<Option<f64>, ApiError> {
    let Some(version) = row.image_version_id else {
        return Err(ApiError::new(ErrorCode::Internal, "the job has no image"));
    };
    let labels = row.node_labels()?;
    // Where it was stopped, it counts as ended.
    let not = orchestrator.db.stopped_on(row.job_id).await?;
    let wanted = NodeRequirements {
        labels: &labels,
        limits: row.request.sandbox.limits.unwrap_or_default(),
    };
    let node = match orchestrator.choose_node(version, &wanted, &not).await {
        Ok(node) => node,
        // It waits until there is room.
        Err(error) if error.0.is(ErrorCode::NoCapacity) => return Ok(Some(WAITING)),
        Err(error) => return Err(error),
    };
    // One that hangs holds up its own work only; one that does not answer is given nothing new.
    let Some(_place) = orchestrator
        .job_lanes
        .enter(Some(node.id))
        .filter(|_| !orchestrator.fleet.is_quiet(node.id))
    else {
        return Ok(Some(SOON));
    };
    let client = orchestrator.fleet.client_of(&node)?;
    // Durable before the node hears of it: if we die now, whoever comes next asks this node and no other.
    if !orchestrator.db.assign_job(row.job_id, node.id).await? {
        return Ok(Some(0.0));
    }
    send(orchestrator, row, node.id, &client, true).await
}

/// Gives the job to its node, again if need be: the node runs it once. Only at the first try it is certain that nobody has it.
async fn send(
    orchestrator: &Orchestrator,
    row: &JobRow,
    node_id: NodeId,
    client: &WorkerClient,
    is_first: bool,
) -> Result<Option<f64>, ApiError> {
    match orchestrator
        .fleet
        .call(node_id, CALL, client.run_job_async(&row.request))
        .await
    {
        Ok(job) => note(orchestrator, row, node_id, client, job).await,
        // Nobody has it: another node may be better.
        Err(Failed::NotSent(_)) if is_first => {
            orchestrator
                .db
                .unassign_job(row.job_id, node_id, Some(row.lease_until), SOON)
                .await?;
            Ok(None)
        }
        Err(Failed::Refused(error))
            if is_first
                && (error.0.is(ErrorCode::NoCapacity) || error.0.is(ErrorCode::NoSpace)) =>
        {
            orchestrator
                .db
                .unassign_job(row.job_id, node_id, Some(row.lease_until), SOON)
                .await?;
            Ok(None)
        }
        Err(Failed::Refused(error))
            if !is_passing(&error)
                && !error.0.is(ErrorCode::NoCapacity)
                && !error.0.is(ErrorCode::NoSpace) =>
        {
            let object = decided(
                row,
                JobState::Failed,
                Some(JobError {
                    code: error.0.code.clone(),
                    detail: error.0.detail.clone(),
                }),
            );
            orchestrator
                .db
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
        Err(_) => Ok(Some(SOON)),
    }
}

/// Asks the node how far it is.
async fn follow(
    orchestrator: &Orchestrator,
    row: &JobRow,
    node_id: NodeId,
) -> Result<Option<f64>, ApiError> {
    let node = orchestrator.db.node(node_id).await?;
    if node.is_lost {
        return give_up(orchestrator, row, node_id).await;
    }
    if node.silent_seconds > orchestrator.config.unreachable_after() {
        return Ok(Some(LOOK));
    }
    let client = orchestrator.fleet.client_of(&node)?;
    if row.stop_requested {
        // Also one that the node does not know: it must not take it up later.
        if let Err(Failed::Refused(error)) = orchestrator
            .fleet
            .call(node_id, CALL, client.stop_job(row.task_id, row.job_id))
            .await
            && error.0.is(ErrorCode::JobNotFound)
        {
            let object = decided(row, JobState::Canceled, None);
            // Not acknowledged: a request that was on its way may still arrive there, and is then stopped.
            orchestrator
                .db
                .advance_job(row.job_id, Some(node_id), &object, None, false)
                .await?;
            return Ok(Some(LOOK));
        }
    }
    match orchestrator
        .fleet
        .call(node_id, CALL, client.job(row.job_id))
        .await
    {
        Ok(job) => note(orchestrator, row, node_id, &client, job).await,
        // It had begun, and may do so once: a node that lost its disk does not get it again.
        Err(Failed::Refused(error))
            if error.0.is(ErrorCode::JobNotFound)
                && row.state == JobState::InProgress
                && row.retry == Retry::Never =>
        {
            fail_lost(
                orchestrator,
                row,
                node_id,
                "its node does not know it any more",
            )
            .await
        }
        Err(Failed::Refused(error)) if error.0.is(ErrorCode::JobNotFound) => {
            send(orchestrator, row, node_id, &client, false).await
        }
        Err(_) => Ok(Some(SOON)),
    }
}

/// Writes down what the node says. An end is written with its output, and only then may the node forget it.
async fn note(
    orchestrator: &Orchestrator,
    row: &JobRow,
    node_id: NodeId,
    client: &WorkerClient,
    job: Job,
) -> Result<Option<f64>, ApiError> {
    let job = storable(of_row(row, node_id, job));
    if !job.state.is_final() {
        orchestrator
            .db
            .advance_job(row.job_id, Some(node_id), &job, None, false)
            .await?;
        return Ok(Some(LOOK));
    }
    if !orchestrator
        .db
        .lease_until(row.job_id, row.lease_until, COLLECTING)
        .await?
    {
        // Somebody else looks at it.
        return Ok(None);
    }
    let output = match orchestrator
        .collect_output(node_id, client, row.job_id)
        .await
    {
        Ok(output) => output,
        // More than is kept for anybody: what its object holds is what there is.
        Err(error) if error.0.is(ErrorCode::TooLarge) => None,
        Err(error) => {
            tracing::debug!(job_id = %row.job_id, error = %error.0, "The output of a job can't be fetched.");
            orchestrator.db.wake_job(row.job_id, node_id, SOON).await?;
            return Ok(None);
        }
    };
    let output = output.as_ref().map(|staged| (staged, &orchestrator.blobs));
    orchestrator
        .db
        .advance_job(row.job_id, Some(node_id), &job, output, false)
        .await?;
    orchestrator.told();
    let next = acknowledge(orchestrator, row, node_id, client).await?;
    if let Some(seconds) = next {
        orchestrator
            .db
            .wake_job(row.job_id, node_id, seconds)
            .await?;
    }
    Ok(None)
}

/// What a node says of a job, as far as it has a say in it.
fn of_row(row: &JobRow, node_id: NodeId, job: Job) -> Job {
    Job {
        job_id: row.job_id,
        task_id: row.task_id,
        node_id: Some(node_id),
        image_ref: row.object.image_ref.clone(),
        reported_by: "worker".to_owned(),
        late_result: None,
        created_by: None,
        acknowledged: false,
        ..job
    }
}

/// The job as the database can hold it: it has no NUL in texts, so streams with one are kept as bytes.
pub(super) fn storable(mut job: Job) -> Job {
    use base64::Engine as _;
    let output = &mut job.output;
    // What is kept here is decided here.
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

async fn acknowledge(
    orchestrator: &Orchestrator,
    row: &JobRow,
    node_id: NodeId,
    client: &WorkerClient,
) -> Result<Option<f64>, ApiError> {
    match orchestrator
        .fleet
        .call(node_id, CALL, client.ack_job(row.job_id))
        .await
    {
        Ok(()) => {}
        Err(Failed::Refused(error)) if error.0.is(ErrorCode::JobNotFound) => {}
        Err(_) => return Ok(Some(LOOK)),
    }
    orchestrator.db.acknowledge_job(row.job_id).await?;
    Ok(None)
}

/// The node is gone. What becomes of the job is its own rule.
async fn give_up(
    orchestrator: &Orchestrator,
    row: &JobRow,
    node_id: NodeId,
) -> Result<Option<f64>, ApiError> {
    if row.retry == Retry::OnNodeLoss && !row.stop_requested {
        orchestrator.db.leave_behind(row.job_id, node_id).await?;
        orchestrator
            .db
            .unassign_job(row.job_id, node_id, None, 0.0)
            .await?;
        return Ok(None);
    }
    fail_lost(
        orchestrator,
        row,
        node_id,
        "its node was not heard of for too long",
    )
    .await
}

async fn fail_lost(
    orchestrator: &Orchestrator,
    row: &JobRow,
    node_id: NodeId,
    detail: &str,
) -> Result<Option<f64>, ApiError> {
    let error = JobError {
        code: "node_lost".to_owned(),
        detail: detail.to_owned(),
    };
    let object = decided(row, JobState::Failed, Some(error));
    // Not acknowledged: should the node come back with a result, it is kept beside.
    orchestrator
        .db
        .advance_job(row.job_id, Some(node_id), &object, None, false)
        .await?;
    Ok(Some(LATER))
}

/// The job has ended here; its node may still have to hear of it, or to say something late.
async fn settle(
    orchestrator: &Orchestrator,
    row: &JobRow,
    node_id: NodeId,
) -> Result<Option<f64>, ApiError> {
    let node = orchestrator.db.node(node_id).await?;
    if node.is_lost || node.silent_seconds > orchestrator.config.unreachable_after() {
        return Ok(Some(LATER));
    }
    let client = orchestrator.fleet.client_of(&node)?;
    if row.object.reported_by == "orchestrator" {
        match orchestrator
            .fleet
            .call(node_id, CALL, client.job(row.job_id))
            .await
        {
            Ok(job) if job.acknowledged => {}
            Ok(job) if job.state.is_final() => {
                orchestrator
                    .db
                    .keep_late_result(row.job_id, storable(job))
                    .await?
            }
            Ok(_) => {
                drop(
                    orchestrator
                        .fleet
                        .call(node_id, CALL, client.stop_job(row.task_id, row.job_id))
                        .await,
                );
                return Ok(Some(SOON));
            }
            Err(Failed::Refused(error)) if error.0.is(ErrorCode::JobNotFound) => {}
            Err(_) => return Ok(Some(LOOK)),
        }
    }
    acknowledge(orchestrator, row, node_id, &client).await
}

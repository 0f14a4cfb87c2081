//! Jobs of many steps: what the runner adds to the commands it runs.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{JobId, JobRun, JobState, TaskId, sba::JobSpec};
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{Plan, ours::Ours, rivals::time_of, samples::Samples};

pub(crate) const STEP: &str = "a step of a job";
pub(crate) const FIRST_STEP: &str = "the runner's start to the first step";
pub(crate) const SPAWN: &str = "plain spawn on the host";

/// Two measurements, each with plain spawns of the same run.
#[derive(Debug, Default)]
pub(crate) struct JobTimes {
    pub(crate) steps: Vec<Samples>,
    pub(crate) starts: Vec<Samples>,
}

pub(crate) async fn measure(plan: &Plan, ours: &Ours) -> Result<JobTimes> {
    let (mut step, mut beside_steps) = (Samples::new(STEP), Samples::new(SPAWN));
    for _ in 0..plan.job_rounds {
        let (_, periods) = run(ours, plan.job_steps).await?;
        for period in periods {
            step.push(period);
        }
        spawn(plan.job_steps / 10, &mut beside_steps)?;
    }
    let (mut first, mut beside_starts) = (Samples::new(FIRST_STEP), Samples::new(SPAWN));
    for _ in 0..plan.job_starts {
        first.push(run(ours, 1).await?.0);
        spawn(10, &mut beside_starts)?;
    }
    Ok(JobTimes {
        steps: vec![step, beside_steps],
        starts: vec![first, beside_starts],
    })
}

fn spawn(number: usize, samples: &mut Samples) -> Result<()> {
    for _ in 0..number {
        samples.push(time_of(Command::new("true").stdin(Stdio::null()))?);
    }
    Ok(())
}

/// Runs a job of `true`: from the start of its runner to its first step, and from each step to the
/// next.
async fn run(ours: &Ours, steps: usize) -> Result<(Duration, Vec<Duration>)> {
    let (task_id, job_id) = (TaskId::generate(), JobId::generate());
    let step = json!({ "type": "run_command", "args": { "argv": ["true"] } });
    let specification = json!({
        "protocol_version": "1.0",
        "job_id": job_id,
        "task_id": task_id,
        "constraints": { "max_runtime_seconds": 600, "max_output_bytes": 65536 },
        "steps": vec![step; steps],
    });
    let image = cynode_tests::session().image_ref;
    let mut request = JobRun::command(task_id, job_id, image, Vec::<String>::new());
    request.job = Some(Box::new(JobSpec::from_value(specification)?));
    let job = ours.client.run_job(&request).await?;
    ensure!(
        job.state == JobState::Completed,
        "a job of {steps} steps is {}: {:?}",
        job.state,
        job.error
    );
    let result = job.sba_result.context("a job without a result")?;
    let starts = result["steps"]
        .as_array()
        .context("a result without steps")?
        .iter()
        .map(|step| time_in(step, "started_at"))
        .collect::<Result<Vec<_>>>()?;
    let begun = job.started_at.context("a job that did not start")?;
    let first = starts.first().context("a job without steps")?;
    Ok((
        between(begun, *first),
        starts
            .windows(2)
            .map(|pair| between(pair[0], pair[1]))
            .collect(),
    ))
}

fn between(from: OffsetDateTime, to: OffsetDateTime) -> Duration {
    (to - from).unsigned_abs()
}

fn time_in(step: &Value, field: &str) -> Result<OffsetDateTime> {
    let text = step[field].as_str().context("a step without its times")?;
    Ok(OffsetDateTime::parse(text, &Rfc3339)?)
}

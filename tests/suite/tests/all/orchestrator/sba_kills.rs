//! Runner, worker and orchestrator are killed at random moments of jobs with ten steps.
//!
//! Each job has one definite end, delivered once. Which end is right follows from what was killed:
//! only the death of a runner may fail a job, and only during a step that must not run twice, or
//! when the second runner dies, too.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    Event, JobCreate, JobId, JobState, TaskCreate, TaskId,
    sba::{JobSpec, StepStatus},
};
use cynode_client::{JobFilter, UserClient};
use cynode_tests::{Answer, Http, Random, World, eventually, run_step, specification, with};
use http::Method;
use serde_json::json;

use super::faults::{InFlight, KillableStack, TIMEOUT, Victim, retry_until_answered, small_limits};
use crate::sba::{
    Ended,
    restarts::{kill, runners},
};

const STEPS: u64 = 10;

/// A job, and what happened to it.
#[derive(Debug)]
struct Tested {
    id: JobId,
    request: JobCreate,
    is_idempotent: Vec<bool>,
    /// Deaths of its runners.
    kills: usize,
}

impl Tested {
    /// A job whose steps leave their numbers in an artifact. A step whose bit is set may run twice.
    fn new(task: TaskId, bits: u64, random: &mut Random) -> Result<Self> {
        let is_idempotent: Vec<bool> = (0..STEPS).map(|step| bits >> step & 1 == 1).collect();
        let steps: Vec<_> = is_idempotent
            .iter()
            .enumerate()
            .map(|(index, is_idempotent)| {
                let pause = random.below(400);
                let script = format!(
                    "echo {index} >> /job/artifacts/log; sleep 0.{pause:03}; echo step {index}"
                );
                with(run_step(&script), "idempotent", *is_idempotent)
            })
            .collect();
        let spec = with(specification(&steps), "task_id", json!(task));
        let spec = JobSpec::from_value(spec)?;
        Ok(Self {
            id: spec.job_id,
            request: JobCreate {
                job: Some(Box::new(spec)),
                limits: Some(small_limits()),
                ..Default::default()
            },
            is_idempotent,
            kills: 0,
        })
    }

    /// Checks the end of the job against what was killed. Returns a word for it.
    fn check(&self, ended: &Ended, log: &[usize]) -> Result<&'static str> {
        let statuses = ended.statuses();
        let done = statuses
            .iter()
            .take_while(|status| **status == StepStatus::Success)
            .count();
        for (index, step) in ended.result.steps[..done].iter().enumerate() {
            let printed = step.stdout.as_deref().unwrap_or_default();
            ensure!(
                printed == format!("step {index}\n"),
                "step {index} printed {printed:?}"
            );
        }
        ensure!(log.is_sorted(), "steps ran out of order");
        let runs = |index: usize| log.iter().filter(|found| **found == index).count();
        let mut repeated = 0;
        for (index, may_repeat) in self.is_idempotent.iter().enumerate() {
            let count = runs(index);
            ensure!(
                count <= if *may_repeat { 2 } else { 1 },
                "step {index} ran {count} times"
            );
            ensure!(count > 0 || index >= done, "step {index} did not run");
            repeated += count.saturating_sub(1);
        }
        ensure!(
            repeated <= self.kills,
            "{repeated} repeated for {} kills",
            self.kills
        );
        if ended.job.state == JobState::Completed {
            ensure!(done == self.is_idempotent.len(), "not every step succeeded");
            return Ok(if self.kills == 0 {
                "undisturbed"
            } else {
                "continued"
            });
        }
        let (state, code, reporter) = ended.verdict();
        ensure!(state == JobState::Failed && code == "runner_interrupted" && reporter == "worker");
        let is_in_flight = match &statuses[done..] {
            [] => false,
            [StepStatus::Interrupted] => true,
            other => anyhow::bail!("{other:?}"),
        };
        let must_fail = is_in_flight && !self.is_idempotent[done];
        ensure!(
            self.kills >= 2 || self.kills == 1 && must_fail,
            "its runner was killed {} times",
            self.kills
        );
        let last = log.last().map_or(0, |last| last + 1);
        ensure!(
            last <= done + usize::from(is_in_flight),
            "steps ran after step {done}"
        );
        Ok("interrupted")
    }
}

/// Kills one of the runners, if there is one.
fn kill_a_runner(world: &World, jobs: &mut [Tested], random: &mut Random) -> Result<bool> {
    let found = runners(world)?;
    if found.is_empty() {
        return Ok(false);
    }
    let pid = found[usize::try_from(random.below(found.len() as u64))?];
    let environment = fs_err::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let environment = String::from_utf8_lossy(&environment).into_owned();
    let id = environment
        .split('\0')
        .find_map(|variable| variable.strip_prefix("CYNODE_JOB_ID="));
    let Some(job) = jobs
        .iter_mut()
        .find(|job| Some(job.id.to_string().as_str()) == id)
    else {
        // It has just ended.
        return Ok(false);
    };
    // Counted even if it was about to exit.
    job.kills += 1;
    kill(pid).ok();
    Ok(true)
}

async fn events(client: &UserClient) -> Result<Vec<Event>> {
    let (mut events, mut cursor) = (Vec::new(), 0);
    loop {
        let page = client.events(cursor, None, Duration::ZERO).await?;
        if page.items.is_empty() {
            return Ok(events);
        }
        cursor = page.next_cursor;
        events.extend(page.items);
    }
}

async fn kill_again_and_again(rounds: usize) -> Result<()> {
    let mut random = Random::seeded();
    let mut stack = KillableStack::start().await?;
    let open = InFlight::default();
    let mut outcomes: BTreeMap<&str, usize> = BTreeMap::new();
    let mut victims: BTreeMap<&str, usize> = BTreeMap::new();
    for round in 0..rounds {
        let client = stack.orchestrator.client()?;
        let task = client
            .create_task(&TaskCreate {
                name: format!("round {round}"),
                ..Default::default()
            })
            .await?
            .id;
        let mut jobs = Vec::new();
        for bits in [0, u64::MAX, random.number()] {
            jobs.push(Tested::new(task, bits, &mut random)?);
        }
        for job in &jobs {
            client.create_job(&job.request).await?;
        }
        for _ in 0..=random.below(3) {
            let until = Instant::now() + Duration::from_millis(random.below(1_500));
            tokio::time::sleep_until(until.into()).await;
            let world = &stack.control_plane.world;
            let name = match random.below(5) {
                0 => "orchestrator",
                1 => "worker",
                2 => "runner and worker",
                _ => "runner",
            };
            if name.starts_with("runner") && !kill_a_runner(world, &mut jobs, &mut random)? {
                continue;
            }
            *victims.entry(name).or_default() += 1;
            match name {
                "orchestrator" => stack.kill(Victim::Orchestrator).await?,
                "worker" | "runner and worker" => stack.kill(Victim::Worker).await?,
                _ => {}
            }
        }
        let client = stack.orchestrator.client()?;
        let http = Http::to(&stack.orchestrator.url()?, &stack.orchestrator.token()?)?;
        for job in &jobs {
            let id = job.id;
            eventually("the job ends", TIMEOUT, async || {
                let found = retry_until_answered(&open.execs, async || client.job(id).await);
                Ok(found.await?.state.is_final())
            })
            .await?;
            let ended = Ended::of(client.job(id).await?)?;
            let path = format!("/v1/tasks/{task}/artifacts/jobs/{id}/log");
            let log = Answer::of(http.request(Method::GET, &path)).await?;
            let log: Vec<usize> = String::from_utf8(log.body.to_vec())?
                .lines()
                .map(str::parse)
                .collect::<Result<_, _>>()
                .with_context(|| format!("round {round}: {ended:#?}"))?;
            let outcome = job
                .check(&ended, &log)
                .with_context(|| format!("round {round}: {job:?} {ended:#?} {log:?}"))?;
            *outcomes.entry(outcome).or_default() += 1;
            ensure!(
                ended.job.artifacts[0]["version"] == 1,
                "stored twice: {ended:#?}"
            );
            let ends = events(&client).await?.into_iter().filter(|event| {
                event.job_id == Some(id)
                    && !matches!(event.state.as_str(), "accepted" | "in_progress")
            });
            ensure!(ends.count() == 1, "round {round}: {id} did not end once");
        }
        let node = stack.worker.client()?;
        eventually("the node may forget the jobs", TIMEOUT, async || {
            let containers = stack.control_plane.world.containers()?;
            Ok(containers.is_empty() && node.list_jobs(&JobFilter::default()).await?.is_empty())
        })
        .await?;
    }
    #[expect(clippy::print_stdout, reason = "the report of the run")]
    {
        println!("{rounds} rounds; killed: {victims:?}; jobs: {outcomes:?}");
    }
    stack.worker.shut_down().await?;
    Ok(())
}

// part of: CYNAI.SBAGNT.ResultAndArtifactDelivery, CYNAI.SBAGNT.JobLifecycle
// invariant: nothing-lost
#[tokio::test]
async fn jobs_of_ten_steps_have_one_end_whatever_is_killed() -> Result<()> {
    kill_again_and_again(5).await
}

#[tokio::test]
async fn soak_jobs_of_ten_steps_have_one_end_whatever_is_killed() -> Result<()> {
    kill_again_and_again(30).await
}

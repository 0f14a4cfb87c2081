//! Runs a specification with the built-in runner, and starts it a second time if it dies without a
//! result.
//!
//! Invariants: a runner is started at most twice. The second one gets its state from the journal of
//! steps, never from files in the sandbox, which every step can write. A job therefore ends with a
//! result that a runner reported through process 1, or with one that the worker makes from the
//! journal. The result file counts only if the journal has every step as successful and the runner
//! could not report the result itself.

use std::{pin::pin, sync::Arc, time::Duration};

use cynode_api::{
    ExecExit, ExecId, ExecRequest, JobProgress, JobRun, Reporter, job_limits::OBJECT_BYTES,
};
use cynode_sba_proto::{AGENT_BINARY, runner::RUNNER_ARGUMENTS};
use time::OffsetDateTime;
use tokio::time::Instant;

use super::{
    Jobs, directory,
    drive::{Specification, exec_id, stopped, until_live},
    files::JobFiles,
    outcome::JobOutcome,
    plan::Plan,
    record::JobEntry,
    runner::{Conversation, Ending},
    steps::{Attempt, Steps},
};
use crate::{
    execs::Exec,
    journal::blocking,
    sessions::{Live, SessionEntry as Sandbox},
};

/// How often the runner is started.
const MAX_ATTEMPTS: usize = 2;
/// The runner enforces the job's deadline itself; the agent ends the runner this much later.
const DEADLINE_SLACK: Duration = Duration::from_secs(10);
/// Time for a stopped runner to end its step and to report its result.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// Time for a runner to exit after it has reported its result.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to receive the last reports of a runner that has exited.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Shortest interval between progress notifications to the orchestrator.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// A job that the built-in runner runs.
pub(super) struct RunnerJob<'a> {
    pub(super) jobs: &'a Arc<Jobs>,
    pub(super) entry: &'a Arc<JobEntry>,
    pub(super) plan: Plan,
    pub(super) files: JobFiles,
    run: &'a JobRun,
    sandbox: &'a Arc<Sandbox>,
    specification: Option<Specification>,
}

impl Jobs {
    pub(super) async fn run_builtin_runner(
        self: &Arc<Self>,
        entry: &Arc<JobEntry>,
        run: &JobRun,
        sandbox: &Arc<Sandbox>,
        specification: Specification,
    ) -> JobOutcome {
        let plan = Plan::of(&specification.job);
        let files = self.files(plan.job_id);
        let path = files.steps();
        let steps = match blocking(move || Steps::open(&path)).await {
            Ok(steps) => steps,
            Err(error) => {
                return JobOutcome::interrupted(format!(
                    "the journal of the job's steps is unreadable: {error}"
                ));
            }
        };
        entry.denials.lock().set_step(steps.in_flight());
        let job = RunnerJob {
            jobs: self,
            entry,
            plan,
            files,
            run,
            sandbox,
            specification: Some(specification),
        };
        job.run(steps).await
    }
}

impl RunnerJob<'_> {
    async fn run(mut self, mut steps: Steps) -> JobOutcome {
        if let Some(first) = steps.attempts().first().filter(|_| steps.is_accepted()) {
            self.accepted(first).await;
        }
        let live = until_live(self.entry, self.sandbox, steps.attempts().is_empty()).await;
        loop {
            let attempt = match (steps.attempts().last(), &live) {
                (Some(attempt), _) => attempt.clone(),
                (None, Ok(live)) => match self.begin(live, &mut steps).await {
                    Ok(attempt) => attempt,
                    Err(outcome) => return outcome,
                },
                (None, Err(outcome)) => return outcome.clone(),
            };
            // Only the first start fills the job directory with it.
            self.specification = None;
            let known = self.sandbox.execs.get(attempt.exec_id).ok();
            let exec = match (known.filter(|exec| !exec.is_running()), &live) {
                (Some(exec), _) => exec,
                (None, Ok(live)) => {
                    let request = self.request(&attempt);
                    let started = self.jobs.start(self.sandbox, live, &request, true).await;
                    match started {
                        Ok((exec, _)) => exec,
                        Err(outcome) => return outcome,
                    }
                }
                (None, Err(_)) => match self.sandbox.execs.get(attempt.exec_id) {
                    Ok(exec) => exec,
                    Err(_) => return Self::lost(),
                },
            };
            let _watch_guard = exec.watch();
            let refusal = match &live {
                Ok(live) if exec.is_running() => {
                    self.attend(live, &attempt, &exec, &mut steps).await
                }
                _ => None,
            };
            exec.ended().await;
            let live = live.as_ref().ok().filter(|live| !live.is_gone());
            let outcome = match refusal {
                Some(reason) => Some(JobOutcome::broken(reason)),
                None => self.outcome(live, &exec, &steps).await,
            };
            let outcome = match (outcome, live) {
                (Some(outcome), _) => outcome,
                (None, None) => Self::lost(),
                (None, Some(live)) => match self.begin_again(live, &exec, &mut steps).await {
                    Ok(()) => continue,
                    Err(outcome) => outcome,
                },
            };
            return self.with_output(outcome, &exec, &steps);
        }
    }

    fn lost() -> JobOutcome {
        JobOutcome::interrupted("the sandbox was lost before the runner reported a result")
    }

    /// The time limit of the job: the smaller of the request's and the specification's.
    fn limit(&self) -> Duration {
        let requested = self.run.sandbox.timeout_seconds;
        let seconds = self.plan.max_runtime_seconds;
        Duration::from_secs(requested.map_or(seconds, |requested| requested.min(seconds)))
    }

    /// The job's deadline, which both attempts share.
    fn deadline(&self, attempt: &Attempt) -> OffsetDateTime {
        attempt
            .job_began_at
            .saturating_add(time::Duration::try_from(self.limit()).unwrap_or(time::Duration::MAX))
    }

    /// The exec request of the runner. Must be the same for each retry of one attempt.
    fn request(&self, attempt: &Attempt) -> ExecRequest {
        let argv = std::iter::once(AGENT_BINARY).chain(RUNNER_ARGUMENTS);
        ExecRequest {
            argv: argv.map(str::to_owned).collect(),
            env: self.run.sandbox.env.clone(),
            timeout_ms: attempt.timeout_ms,
            max_output_bytes: Some(OBJECT_BYTES),
            exec_id: Some(attempt.exec_id),
            ..Default::default()
        }
    }

    /// Prepares the first start of the runner.
    async fn begin(&self, live: &Live, steps: &mut Steps) -> Result<Attempt, JobOutcome> {
        if let Some(specification) = &self.specification {
            self.jobs.fill_directory(live, specification, true).await?;
        }
        let attempt = Attempt {
            number: 1,
            exec_id: exec_id(&self.entry.record()),
            timeout_ms: millis(self.limit() + DEADLINE_SLACK),
            job_began_at: OffsetDateTime::now_utc(),
        };
        steps
            .begin(attempt.clone())
            .map_err(|error| not_journaled(&error))?;
        Ok(attempt)
    }

    /// Prepares the second start of the runner: kills all processes of the first and records the
    /// attempt.
    async fn begin_again(
        &self,
        live: &Live,
        exec: &Exec,
        steps: &mut Steps,
    ) -> Result<(), JobOutcome> {
        let Some(last) = steps.attempts().last() else {
            return Err(Self::lost());
        };
        let left = self.deadline(last) - OffsetDateTime::now_utc();
        let Ok(left) = Duration::try_from(left) else {
            return Err(self.timed_out());
        };
        tracing::warn!(
            job_id = %self.plan.job_id,
            "The runner of a job ended without a result; starting it again."
        );
        self.jobs.kill(live, exec).await;
        directory::kill_everything(live).await.ok();
        let attempt = Attempt {
            number: last.number + 1,
            exec_id: ExecId::generate(),
            timeout_ms: millis(left + DEADLINE_SLACK),
            job_began_at: last.job_began_at,
        };
        let id = attempt.exec_id;
        steps
            .begin(attempt)
            .map_err(|error| not_journaled(&error))?;
        // Readers of the output find the second exec through the job's record.
        let set = move |record: &mut super::JobRecord| {
            record.second_exec = Some(id);
            true
        };
        if let Err(error) = self.jobs.update(self.entry, set).await {
            tracing::error!(%error, "Failed to record the second exec of a job.");
        }
        Ok(())
    }

    /// Communicates with the runner until it has ended. Returns the reason if the runner violated
    /// the protocol.
    async fn attend(
        &self,
        live: &Live,
        attempt: &Attempt,
        exec: &Exec,
        steps: &mut Steps,
    ) -> Option<String> {
        let mut conversation = Conversation {
            live,
            exec,
            job: self,
            attempt,
            steps,
            deadline: self.deadline(attempt),
        };
        let mut talking = pin!(conversation.run());
        let mut stopping = pin!(async {
            stopped(self.entry).await;
            self.jobs.terminate(live, exec, STOP_GRACE).await;
        });
        let (mut ending, mut is_stopped, mut kill_at) = (None, false, None);
        loop {
            tokio::select! {
                told = &mut talking, if ending.is_none() => {
                    kill_at = match &told {
                        Ending::Reported(_) => Some(Instant::now() + EXIT_TIMEOUT),
                        Ending::Refused(_) => Some(Instant::now()),
                        Ending::Gone => None,
                    };
                    ending = Some(told);
                }
                () = exec.ended() => break,
                () = &mut stopping, if !is_stopped => is_stopped = true,
                () = sleep_until(kill_at) => {
                    kill_at = None;
                    self.jobs.kill(live, exec).await;
                }
            }
        }
        if ending.is_none() {
            ending = tokio::time::timeout(DRAIN_TIMEOUT, talking).await.ok();
        }
        match ending {
            Some(Ending::Refused(reason)) => Some(reason),
            _ => None,
        }
    }

    /// Determines the outcome after the end of a runner; `None` if the runner must be started again,
    /// or if the sandbox is gone.
    async fn outcome(
        &self,
        live: Option<&Arc<Live>>,
        exec: &Exec,
        steps: &Steps,
    ) -> Option<JobOutcome> {
        if steps.has_result() {
            let files = self.files.clone();
            return Some(match blocking(move || files.verdict()).await {
                Ok(verdict) => JobOutcome::from_verdict(verdict, Reporter::Worker),
                Err(error) => JobOutcome::broken(format!("the result is unreadable: {error}")),
            });
        }
        if self.entry.record().stop.is_some() {
            return Some(JobOutcome::canceled());
        }
        let exit = exec.exit()?;
        if exit.timed_out {
            return Some(self.timed_out());
        }
        let has_said_nothing = live.is_none() || exit.exit_code == Some(0);
        if has_said_nothing
            && self.plan.is_complete(steps.succeeded())
            && let Some(outcome) = self.claimed(live).await
        {
            return Some(outcome);
        }
        (live.is_some() && steps.attempts().len() >= MAX_ATTEMPTS)
            .then(|| JobOutcome::interrupted(interruption(&exit)))
    }

    /// The outcome by the result file, if that is a valid result of this job.
    async fn claimed(&self, live: Option<&Arc<Live>>) -> Option<JobOutcome> {
        let claimed = match live {
            Some(live) => directory::read_result(live).await.ok()?,
            None => self.jobs.read_result_on_disk(self.entry).await?,
        };
        let checked = claimed.and_then(|result| {
            self.plan.check_result(&result, None)?;
            Ok(result)
        });
        match checked {
            Ok(result) => {
                let reported_by = Reporter::File;
                self.jobs.keep_result(self.entry, result, reported_by).await
            }
            Err(reason) => {
                tracing::debug!(job_id = %self.plan.job_id, reason, "Ignored a result file.");
                None
            }
        }
    }

    fn timed_out(&self) -> JobOutcome {
        JobOutcome::timed_out(format!(
            "the job did not end within {} s",
            self.limit().as_secs()
        ))
    }

    /// Adds the exit of the last runner and the output of all of them.
    fn with_output(&self, outcome: JobOutcome, exec: &Exec, steps: &Steps) -> JobOutcome {
        let earlier: Vec<Arc<Exec>> = steps
            .attempts()
            .iter()
            .filter(|attempt| attempt.exec_id != exec.id())
            .filter_map(|attempt| self.sandbox.execs.get(attempt.exec_id).ok())
            .collect();
        match exec.result_after(&earlier) {
            Ok(result) => outcome.with_exec(result),
            Err(error) => {
                tracing::error!(error = %error, "Failed to read the output of a job.");
                outcome
            }
        }
    }

    /// Handles the runner's acceptance of the job.
    pub(super) async fn accepted(&self, attempt: &Attempt) {
        self.jobs
            .set_in_progress(self.entry, attempt.job_began_at)
            .await;
    }

    /// Handles a progress report of the runner.
    pub(super) fn progressed(&self, progress: JobProgress, attempt: &Attempt) {
        let deadline = self.deadline(attempt);
        if self
            .entry
            .set_progress(progress, deadline, PROGRESS_INTERVAL)
        {
            self.jobs.announce(self.plan.job_id);
        }
    }
}

/// The error detail of a job whose second runner ended without a result.
fn interruption(exit: &ExecExit) -> String {
    let end = match (exit.exit_code, &exit.signal) {
        _ if exit.oom_killed => "was killed because the sandbox's memory limit was reached".into(),
        _ if exit.lost => "was lost".to_owned(),
        (Some(code), _) => format!("exited with {code} without a result"),
        (None, Some(signal)) => format!("was killed by {signal}"),
        (None, None) => "ended without a result".to_owned(),
    };
    format!("the runner {end}, after it had been started again")
}

fn not_journaled(error: &std::io::Error) -> JobOutcome {
    JobOutcome::failed(&crate::sessions::journal_error(error))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

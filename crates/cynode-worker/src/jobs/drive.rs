//! Drives one job from its acceptance to its end, with or without waiters, across worker restarts.
//!
//! Each step is idempotent. The container is named after the job, so there is only one. The command
//! has a fixed exec id, which is in the sandbox's log before the agent is called, and the agent
//! starts an id only once. A worker that resumes a job therefore finds its end in the log, follows
//! the running command, or starts it because it never started. If the sandbox is gone, the outcome
//! is unknown: the job fails and is not run again. A job with a specification has more to resume
//! from (`attempts.rs`).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use cynode_api::{
    ErrorCode, ExecId, ExecRequest, ExecVia, JobRun, JobState, SessionState, SignalName,
    SignalScope,
    exec_limits::GRACE_MS,
    job_limits::{DEFAULT_TIMEOUT_SECONDS, OBJECT_BYTES},
    sba::JobSpec,
};
use cynode_sba_proto::{Request, WORKSPACE, runner::CONTEXT_TOKENS_VARIABLE};
use cynode_service::{ApiError, checks, compute};
use time::OffsetDateTime;

use super::{
    Jobs, allowed_models, directory,
    outcome::JobOutcome,
    record::{JobEntry, JobRecord},
};
use crate::{
    execs::{self, Exec, ExecCommand, ExecInput, OpenExec, WatchGuard},
    sessions::{JobAdmission, JobSandboxRequest, Live, SessionEntry, exec_environment},
};

/// Attempts to start the command while the agent does not answer.
const START_ATTEMPTS: u32 = 5;
/// Time between SIGKILL for the exec and the kill of the whole container.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The exec id of the job's command, or of the first attempt of the built-in runner.
pub(super) fn exec_id(record: &JobRecord) -> ExecId {
    ExecId::from_uuid(*record.job.job_id.as_uuid())
}

/// The exec of the caller's command, with a deadline.
fn exec_request(record: &JobRecord, run: &JobRun, seconds: u64) -> ExecRequest {
    ExecRequest {
        argv: run.sandbox.command.clone(),
        env: run.sandbox.env.clone(),
        timeout_ms: seconds * 1_000,
        max_output_bytes: Some(OBJECT_BYTES),
        exec_id: Some(exec_id(record)),
        ..Default::default()
    }
}

/// A parsed specification, and its JSON as runners receive it.
#[derive(Debug)]
pub(super) struct Specification {
    pub(super) job: JobSpec,
    pub(super) json: Vec<u8>,
}

impl Jobs {
    pub(super) fn spawn_drive(self: &Arc<Self>, entry: &Arc<JobEntry>) {
        let (jobs, entry) = (Arc::clone(self), Arc::clone(entry));
        self.drivers.spawn(async move {
            if !entry.is_final() {
                let mut outcome = jobs.run_to_end(&entry).await;
                outcome.artifacts = jobs.take_artifacts(&entry).await;
                jobs.complete_result(&entry, &outcome).await;
                jobs.conclude(&entry, outcome).await;
            }
            jobs.clean_up(&entry).await;
        });
    }

    async fn run_to_end(self: &Arc<Self>, entry: &Arc<JobEntry>) -> JobOutcome {
        let record = entry.record();
        let Some(run) = record.request.clone() else {
            return JobOutcome::interrupted("the job's record lacks its request");
        };
        let sandbox = match self.sandbox(&record, &run).await {
            Ok(sandbox) => sandbox,
            Err(outcome) => return outcome,
        };
        if record.has_specification {
            let specification = match self.specification(&record).await {
                Ok(specification) => specification,
                Err(outcome) => return outcome,
            };
            return if run.sandbox.command.is_empty() {
                Box::pin(self.run_builtin_runner(entry, &run, &sandbox, specification)).await
            } else {
                Box::pin(self.run_custom_runner(entry, &run, &sandbox, specification)).await
            };
        }
        let seconds = run.sandbox.timeout_seconds;
        let seconds = seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
        match self.run_command(entry, &run, &sandbox, seconds, None).await {
            Ok(exec) => JobOutcome::from_exec(exec.result().await),
            Err(outcome) => outcome,
        }
    }

    /// Reads the job's specification from disk and parses it.
    async fn specification(&self, record: &JobRecord) -> Result<Specification, JobOutcome> {
        let unreadable = |reason: String| {
            JobOutcome::interrupted(format!("the job's specification is unreadable: {reason}"))
        };
        let json = self
            .files(record.job.job_id)
            .specification()
            .map_err(|error| unreadable(error.to_string()))?;
        let job = compute::run(json.len(), || JobSpec::parse(&json))
            .await
            .map_err(|error| unreadable(error.to_string()))?;
        Ok(Specification { job, json })
    }

    /// Runs the caller's command to its end. Copies the specification, if any, into the sandbox
    /// before the command starts.
    pub(super) async fn run_command(
        self: &Arc<Self>,
        entry: &Arc<JobEntry>,
        run: &JobRun,
        sandbox: &Arc<SessionEntry>,
        seconds: u64,
        specification: Option<&Specification>,
    ) -> Result<Arc<Exec>, JobOutcome> {
        let record = entry.record();
        // An earlier worker process may have started the exec. It is watched from here on, so that it
        // is never ended as abandoned.
        let exec = sandbox.execs.get(exec_id(&record)).ok();
        let _watch_guard = exec.as_ref().map(Exec::watch);
        if let Some(exec) = exec.as_ref().filter(|exec| !exec.is_running()) {
            return Ok(Arc::clone(exec));
        }
        let live = match (until_live(entry, sandbox, exec.is_none()).await, exec) {
            (Ok(live), None) => {
                if let Some(specification) = specification {
                    self.fill_directory(&live, specification, false).await?;
                }
                live
            }
            (Ok(live), Some(_)) => live,
            (Err(_), Some(exec)) => {
                exec.ended().await;
                return Ok(exec);
            }
            (Err(outcome), None) => return Err(outcome),
        };
        let request = exec_request(&record, run, seconds);
        let (exec, _watch_guard) = self.start(sandbox, &live, &request, false).await?;
        self.set_in_progress(entry, exec.record.started_at).await;
        tokio::select! {
            () = exec.ended() => {}
            () = stopped(entry) => {
                self.terminate(&live, &exec, Duration::from_millis(GRACE_MS)).await;
                exec.ended().await;
            }
        }
        Ok(exec)
    }

    /// Fills the job directory of a sandbox in which nothing has run yet.
    pub(super) async fn fill_directory(
        &self,
        live: &Live,
        specification: &Specification,
        needs_runner: bool,
    ) -> Result<(), JobOutcome> {
        let mut attempts = 0;
        loop {
            let json = specification.json.clone();
            let filled = directory::fill(live, &specification.job, json, needs_runner).await;
            let Err(error) = filled else { return Ok(()) };
            attempts += 1;
            if !error.is(ErrorCode::AgentUnavailable)
                || attempts >= START_ATTEMPTS
                || live.is_gone()
            {
                return Err(JobOutcome::failed(&error));
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    /// Looks up the job's sandbox. Creates it if the worker died between admitting the job and
    /// recording the sandbox: nothing has run in it.
    async fn sandbox(
        self: &Arc<Self>,
        record: &JobRecord,
        run: &JobRun,
    ) -> Result<Arc<SessionEntry>, JobOutcome> {
        if let Some(sandbox) = self.sessions.job_sandbox(record.session_id) {
            return Ok(sandbox);
        }
        if self.sessions.is_unreadable(record.session_id) {
            return Err(JobOutcome::interrupted(
                "the record of the job's sandbox is unreadable",
            ));
        }
        let allowed_models = if record.has_specification {
            allowed_models(&self.specification(record).await?.job)
        } else {
            Vec::new()
        };
        self.sessions.reconciled().await;
        let made = async {
            let image = self
                .sessions
                .any_image(&run.sandbox.image_ref, run.sandbox.image_digest.as_deref())
                .await?;
            let admitted = JobSandboxRequest {
                run,
                session_id: record.session_id,
                allowed_models,
            };
            self.sessions
                .reserve(admitted, image, JobAdmission::AlreadyGranted)
                .await?
                .commit()
                .await
        };
        made.await
            .map_err(|error: ApiError| JobOutcome::failed(&error))
    }

    /// Starts an exec of the job, unless it has started already.
    pub(super) async fn start(
        &self,
        sandbox: &SessionEntry,
        live: &Arc<Live>,
        request: &ExecRequest,
        is_runner: bool,
    ) -> Result<(Arc<Exec>, WatchGuard), JobOutcome> {
        let mut attempts = 0;
        loop {
            let (OpenExec::New(exec) | OpenExec::Existing(exec)) = sandbox
                .execs
                .register(request, WORKSPACE.to_owned(), None)
                .map_err(|error| JobOutcome::failed(&error))?;
            let watch_guard = exec.watch();
            if exec.is_started() || !exec.is_running() {
                return Ok((exec, watch_guard));
            }
            tracing::debug!(exec_id = %exec.id(), "Starting the command of a job.");
            let mut env = exec_environment(&sandbox.record(), &request.env);
            let window = self.sessions.config.inference.context_tokens;
            if let Some(tokens) = window.filter(|_| is_runner) {
                env.push((CONTEXT_TOKENS_VARIABLE.to_owned(), tokens.to_string()));
            }
            let command = ExecCommand {
                argv: request.argv.clone(),
                env,
                input: ExecInput::default(),
                stdin_open: false,
                is_runner,
                may_be_running: true,
            };
            let (live, execs, started) = (
                Arc::clone(live),
                Arc::clone(&sandbox.execs),
                Arc::clone(&exec),
            );
            let via = self.sessions.config.exec_via;
            let result = match via {
                ExecVia::Agent => {
                    execs::start_by_agent(Arc::clone(&live), execs, started, command).await
                }
                ExecVia::Runtime => {
                    execs::start_by_runtime(Arc::clone(&live), execs, started, command).await
                }
            };
            attempts += 1;
            match result {
                Ok(()) => return Ok((exec, watch_guard)),
                // The command may have started. A retry is safe, because the agent starts an exec id
                // only once.
                Err(error) if error.is(ErrorCode::AgentUnavailable) => {
                    if attempts >= START_ATTEMPTS || live.is_gone() || via == ExecVia::Runtime {
                        return Err(JobOutcome::interrupted(format!(
                            "the agent failed before confirming the start of the command: {}",
                            error.detail
                        )));
                    }
                    tokio::time::sleep(RETRY_DELAY).await;
                }
                Err(error) => return Err(JobOutcome::failed(&error)),
            }
        }
    }

    pub(super) async fn set_in_progress(&self, entry: &Arc<JobEntry>, started_at: OffsetDateTime) {
        let set = move |record: &mut JobRecord| {
            let is_new = record.job.state == JobState::Accepted;
            if is_new {
                record.job.state = JobState::InProgress;
                record.job.started_at = Some(started_at);
            }
            is_new
        };
        if let Err(error) = self.update(entry, set).await {
            // The sandbox's exec log already has the start, so nothing is lost.
            tracing::error!(%error, "Failed to record the start of a job.");
            let mut record = entry.record();
            set(&mut record);
            entry.set(record);
        }
    }

    /// Sends TERM, waits the grace period, sends KILL, and as a last resort kills the container.
    pub(super) async fn terminate(&self, live: &Live, exec: &Exec, grace: Duration) {
        self.signal(live, exec, SignalName::TERM, SignalScope::Group)
            .await;
        if tokio::time::timeout(grace, exec.ended()).await.is_err() {
            self.kill(live, exec).await;
        }
    }

    /// Sends KILL to all processes of an exec, and as a last resort kills the container.
    pub(super) async fn kill(&self, live: &Live, exec: &Exec) {
        self.signal(live, exec, SignalName::KILL, SignalScope::Tree)
            .await;
        if tokio::time::timeout(KILL_TIMEOUT, exec.ended())
            .await
            .is_err()
        {
            live.kill_container().await;
        }
    }

    async fn signal(&self, live: &Live, exec: &Exec, signal: SignalName, scope: SignalScope) {
        match live.link() {
            // An error means that the exec has ended in the meantime.
            Ok(link) => drop(
                link.call(&Request::Signal {
                    exec_id: exec.id(),
                    signal: signal.number(),
                    scope,
                })
                .await,
            ),
            Err(_) => execs::signal_by_runtime(live, exec.id(), signal.number()).await,
        }
    }

    /// Records the end of the job. Retries until it succeeds: a result must not be lost.
    pub(super) async fn conclude(&self, entry: &Arc<JobEntry>, outcome: JobOutcome) {
        loop {
            let outcome = outcome.clone();
            let written = self
                .update(entry, move |record| {
                    let open = !record.is_final();
                    if open {
                        record.set_outcome(outcome);
                    }
                    open
                })
                .await;
            match written {
                Ok(()) => break,
                Err(error) => {
                    tracing::error!(%error, "Failed to record the end of a job; retrying.");
                }
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        metrics::counter!("cynode_jobs_total", "state" => entry.job().state.as_str()).increment(1);
    }

    /// Ends the sandbox of an ended job, and drops its output if the result is acknowledged.
    async fn clean_up(self: &Arc<Self>, entry: &Arc<JobEntry>) {
        let id = entry.record().session_id;
        self.sessions.reconciled().await;
        while let Err(error) = self.sessions.end_job_sandbox(id).await {
            tracing::warn!(
                session_id = %id,
                error = %error,
                "Failed to end the sandbox of a job; retrying."
            );
            tokio::time::sleep(RETRY_DELAY).await;
        }
        self.sessions.inference.forget(entry.record().job.job_id);
        if entry.is_acknowledged() {
            self.drop_output(entry).await;
        }
    }
}

/// Waits until commands can run in the sandbox. If `can_stop` is set, a requested stop ends the wait
/// and cancels the job.
pub(super) async fn until_live(
    entry: &JobEntry,
    sandbox: &SessionEntry,
    can_stop: bool,
) -> Result<Arc<Live>, JobOutcome> {
    let live = tokio::select! {
        live = sandbox.until_live() => live,
        () = stopped(entry), if can_stop => return Err(JobOutcome::canceled()),
    };
    live.map_err(|state| match state {
        SessionState::Failed => JobOutcome::failed(&sandbox.failure()),
        _ => JobOutcome::interrupted("the sandbox was lost before the command started"),
    })
}

pub(super) async fn stopped(entry: &JobEntry) {
    entry.wait_until(|record| record.stop.is_some()).await;
}

/// Validates a job's command.
pub(super) fn check_command(run: &JobRun) -> Result<(), ApiError> {
    use cynode_api::{
        exec_limits::{MAX_ENV, MAX_ENV_BYTES},
        job_limits::MAX_TIMEOUT_SECONDS,
    };
    let prefix = |mut error: ApiError| {
        error.detail.insert_str(0, "sandbox.");
        error
    };
    let env: &BTreeMap<String, String> = &run.sandbox.env;
    // Without a command, the built-in runner runs the specification.
    if run.job.is_none() || !run.sandbox.command.is_empty() {
        checks::check_argv("command", &run.sandbox.command).map_err(prefix)?;
    }
    checks::check_env(env, MAX_ENV, MAX_ENV_BYTES).map_err(prefix)?;
    match run.sandbox.timeout_seconds {
        None | Some(1..=MAX_TIMEOUT_SECONDS) => Ok(()),
        Some(_) => Err(ApiError::invalid(format!(
            "sandbox.timeout_seconds: must be between 1 and {MAX_TIMEOUT_SECONDS}"
        ))),
    }
}

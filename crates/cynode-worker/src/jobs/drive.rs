//! One job from its acceptance to its end: whoever waits, and whichever worker does it.
//!
//! Each step can be done again. The container bears the job's id, so there is one. The command has one exec id, which is in
//! the sandbox's log before the agent is asked, and the agent starts an id once: so a worker that takes a job up either finds
//! its end in the log, or follows the command that runs, or starts it because nobody did. A sandbox that is gone takes the
//! answer with it: then the job has failed, and is not run again.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use cynode_api::{
    ErrorCode, ExecId, ExecRequest, ExecVia, JobRun, JobState, SessionState, SignalName,
    SignalScope,
    exec_limits::GRACE_MS,
    job_limits::{DEFAULT_TIMEOUT_SECONDS, OBJECT_BYTES},
};
use cynode_sba_proto::{Request, WORKSPACE};
use cynode_service::{ApiError, checks};
use time::OffsetDateTime;

use super::{
    Jobs,
    record::{Entry, JobRecord, Outcome},
};
use crate::{
    execs::{self, Begun, Command, Exec, Input, Watching},
    sessions::{Entry as Sandbox, Live, Room, exec_environment},
};

/// How often a start is tried while the agent does not answer.
const START_TRIES: u32 = 5;
/// From KILL until the container goes too.
const KILLED: Duration = Duration::from_secs(5);
/// Before something that failed is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// The one exec of a job.
pub(super) fn exec_id(record: &JobRecord) -> ExecId {
    ExecId::from_uuid(*record.job.job_id.as_uuid())
}

fn exec_request(record: &JobRecord, run: &JobRun) -> ExecRequest {
    ExecRequest {
        argv: run.sandbox.command.clone(),
        env: run.sandbox.env.clone(),
        timeout_ms: run
            .sandbox
            .timeout_seconds
            .unwrap_or(DEFAULT_TIMEOUT_SECONDS)
            * 1_000,
        max_output_bytes: Some(OBJECT_BYTES),
        exec_id: Some(exec_id(record)),
        ..Default::default()
    }
}

impl Jobs {
    pub(super) fn spawn_drive(self: &Arc<Self>, entry: &Arc<Entry>) {
        let (jobs, entry) = (Arc::clone(self), Arc::clone(entry));
        self.drivers.spawn(async move {
            if !entry.is_final() {
                let outcome = jobs.run_to_end(&entry).await;
                jobs.conclude(&entry, outcome).await;
            }
            jobs.clear(&entry).await;
        });
    }

    async fn run_to_end(self: &Arc<Self>, entry: &Arc<Entry>) -> Outcome {
        let record = entry.record();
        let Some(run) = record.request.clone() else {
            return Outcome::interrupted("the job's record lacks its request");
        };
        let sandbox = match self.sandbox(&record, &run).await {
            Ok(sandbox) => sandbox,
            Err(outcome) => return outcome,
        };
        // From an earlier worker. Somebody waits for it from the first moment, so that it is never taken for abandoned.
        let found = sandbox.execs.get(exec_id(&record)).ok();
        let _watching = found.as_ref().map(Exec::watch);
        if let Some(exec) = found.as_ref().filter(|exec| !exec.is_running()) {
            return Outcome::of(exec.result().await);
        }
        let live = tokio::select! {
            live = sandbox.until_live() => live,
            () = stopped(entry), if found.is_none() => return Outcome::canceled(),
        };
        let live = match (live, found) {
            (Ok(live), _) => live,
            (Err(_), Some(exec)) => return Outcome::of(exec.result().await),
            (Err(SessionState::Failed), None) => return Outcome::failed(&sandbox.failure()),
            (Err(_), None) => {
                return Outcome::interrupted(
                    "the sandbox went away before the command was started",
                );
            }
        };
        let (exec, _watching) = match self.start(&sandbox, &live, &record, &run).await {
            Ok(started) => started,
            Err(outcome) => return outcome,
        };
        self.set_in_progress(entry, exec.record.started_at).await;
        tokio::select! {
            result = exec.result() => return Outcome::of(result),
            () = stopped(entry) => {}
        }
        self.terminate(&live, &exec).await;
        Outcome::of(exec.result().await)
    }

    /// The job's sandbox. One that was promised and never written down is made now: nothing has run.
    async fn sandbox(
        self: &Arc<Self>,
        record: &JobRecord,
        run: &JobRun,
    ) -> Result<Arc<Sandbox>, Outcome> {
        if let Some(sandbox) = self.sessions.of_job(record.session_id) {
            return Ok(sandbox);
        }
        if self.sessions.is_unreadable(record.session_id) {
            return Err(Outcome::interrupted(
                "the record of the job's sandbox can't be read",
            ));
        }
        self.sessions.settled().await;
        let made = async {
            let image = self
                .sessions
                .any_image(&run.sandbox.image_ref, run.sandbox.image_digest.as_deref())
                .await?;
            self.sessions
                .place(run, record.session_id, image, Room::WasPromised)
                .await?
                .take()
                .await
        };
        made.await
            .map_err(|error: ApiError| Outcome::failed(&error))
    }

    /// Starts the command, unless it was.
    async fn start(
        &self,
        sandbox: &Sandbox,
        live: &Arc<Live>,
        record: &JobRecord,
        run: &JobRun,
    ) -> Result<(Arc<Exec>, Watching), Outcome> {
        let request = exec_request(record, run);
        let mut tries = 0;
        loop {
            let (Begun::New(exec) | Begun::Existing(exec)) = sandbox
                .execs
                .begin(&request, WORKSPACE.to_owned(), None)
                .map_err(|error| Outcome::failed(&error))?;
            let watching = exec.watch();
            if exec.is_started() || !exec.is_running() {
                return Ok((exec, watching));
            }
            tracing::debug!(job_id = %record.job.job_id, "Starting the command of a job.");
            let env = exec_environment(&sandbox.record(), &request.env);
            let command = Command {
                argv: request.argv.clone(),
                env,
                input: Input::default(),
                stdin_open: false,
                again: true,
            };
            let (live, execs, started) = (
                Arc::clone(live),
                Arc::clone(&sandbox.execs),
                Arc::clone(&exec),
            );
            let via = self.sessions.config.exec_via;
            let begun = match via {
                ExecVia::Agent => {
                    execs::start_by_agent(Arc::clone(&live), execs, started, command).await
                }
                ExecVia::Runtime => {
                    execs::start_by_runtime(Arc::clone(&live), execs, started, command).await
                }
            };
            tries += 1;
            match begun {
                Ok(()) => return Ok((exec, watching)),
                // It may have been started or not; to ask again is safe, because the agent starts an id once.
                Err(error) if error.0.is(ErrorCode::AgentUnavailable) => {
                    if tries >= START_TRIES || live.is_gone() || via == ExecVia::Runtime {
                        return Err(Outcome::interrupted(format!(
                            "whether the command was started is not known: {}",
                            error.0.detail
                        )));
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(Outcome::failed(&error)),
            }
        }
    }

    async fn set_in_progress(&self, entry: &Arc<Entry>, started_at: OffsetDateTime) {
        let set = move |record: &mut JobRecord| {
            record.job.state = JobState::InProgress;
            record.job.started_at = Some(started_at);
            true
        };
        if let Err(error) = self.update(entry, set).await {
            // The sandbox's own log has the start; this only says so.
            tracing::error!(%error, "Recording that a job has started failed.");
            let mut record = entry.record();
            set(&mut record);
            entry.set(record);
        }
    }

    /// TERM, a grace, KILL; and when even that is not obeyed, the container.
    async fn terminate(&self, live: &Live, exec: &Exec) {
        self.signal(live, exec, SignalName::TERM, SignalScope::Group)
            .await;
        if tokio::time::timeout(Duration::from_millis(GRACE_MS), exec.result())
            .await
            .is_ok()
        {
            return;
        }
        self.signal(live, exec, SignalName::KILL, SignalScope::Tree)
            .await;
        if tokio::time::timeout(KILLED, exec.result()).await.is_err() {
            live.kill_container().await;
        }
    }

    async fn signal(&self, live: &Live, exec: &Exec, signal: SignalName, scope: SignalScope) {
        match live.link() {
            // That it has ended meanwhile is what is wanted.
            Ok(link) => drop(
                link.call(&Request::Signal {
                    exec_id: exec.id(),
                    signal: signal.number(),
                    scope,
                })
                .await,
            ),
            Err(_) => execs::signal_by_runtime(live, exec.id(), signal.number()),
        }
    }

    /// Records the end, as often as it takes: a result is never lost.
    pub(super) async fn conclude(&self, entry: &Arc<Entry>, outcome: Outcome) {
        loop {
            let outcome = outcome.clone();
            let written = self
                .update(entry, move |record| {
                    let open = !record.is_final();
                    if open {
                        record.conclude(outcome);
                    }
                    open
                })
                .await;
            match written {
                Ok(()) => break,
                Err(error) => {
                    tracing::error!(%error, "Recording the end of a job failed; trying again.")
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        metrics::counter!("cynode_jobs_total", "state" => entry.job().state.as_str()).increment(1);
    }

    /// Ends the sandbox of a job that has ended; and drops its output when that is not needed any more.
    async fn clear(self: &Arc<Self>, entry: &Arc<Entry>) {
        let id = entry.record().session_id;
        self.sessions.settled().await;
        while let Err(error) = self.sessions.end_of_job(id).await {
            tracing::warn!(session_id = %id, error = %error.0, "Ending the sandbox of a job failed; trying again.");
            tokio::time::sleep(PAUSE).await;
        }
        if entry.is_acknowledged() {
            self.sessions.forget_of_job(id);
        }
    }
}

async fn stopped(entry: &Entry) {
    entry.until(|record| record.stop.is_some()).await;
}

/// Bounds of what a plain command may be.
pub(super) fn check_command(run: &JobRun) -> Result<(), ApiError> {
    use cynode_api::{
        exec_limits::{MAX_ENV, MAX_ENV_BYTES},
        job_limits::MAX_TIMEOUT_SECONDS,
    };
    let within = |mut error: ApiError| {
        error.0.detail.insert_str(0, "sandbox.");
        error
    };
    let env: &BTreeMap<String, String> = &run.sandbox.env;
    checks::check_argv("command", &run.sandbox.command).map_err(within)?;
    checks::check_env(env, MAX_ENV, MAX_ENV_BYTES).map_err(within)?;
    match run.sandbox.timeout_seconds {
        None | Some(1..=MAX_TIMEOUT_SECONDS) => Ok(()),
        Some(_) => Err(ApiError::invalid(format!(
            "sandbox.timeout_seconds: must lie between 1 and {MAX_TIMEOUT_SECONDS}"
        ))),
    }
}

//! Progress reports of a job: `status.json`, `todo.json`, and messages to the worker.
//!
//! `status.json` is written before each step, so that a restarted runner without a worker knows
//! where to resume. With a worker, the files only inform people.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    time::Duration,
};

use cynode_api::{
    JobId, JobProgress, TaskId,
    sba::{FailureCode, JobResult, JobSpec, ResultStatus},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use tokio::{sync::Notify, time::Instant};

use super::{
    control::Control,
    directory::{JobDirectory, RESULT_FILE, STATUS_FILE, TODO_FILE},
    todo::TodoList,
};

/// Shortest interval between writes of `todo.json`.
const TODO_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of reports of the remaining time to the worker.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// Open items in a report to the worker.
const MAX_REPORTED_TITLES: usize = 10;
/// Size limits of `status.json` and `todo.json` when a runner resumes.
const MAX_STATUS_BYTES: usize = 64 * 1024;
const MAX_TODO_BYTES: usize = 16 * 1024 * 1024;

/// The content of `status.json`.
#[derive(Debug, Serialize)]
struct Status<'a> {
    job_id: JobId,
    task_id: TaskId,
    /// `in_progress`, or the status of the result.
    status: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure_code: Option<&'a FailureCode>,
    attempt: u32,
    /// Distinguishes the job from others with the same id.
    job_sha256: &'a str,
    /// The index of the current step. All earlier ones succeeded.
    step: u64,
    /// Unless an agent makes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    activity: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<u64>,
    remaining_seconds: u64,
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
}

/// The fields of `status.json` that a restarted runner needs.
#[derive(Debug, Deserialize)]
struct StoredStatus {
    status: String,
    attempt: u32,
    job_sha256: String,
    step: u64,
}

/// The state in which an earlier runner of the same job was killed.
#[derive(Debug)]
pub(super) struct Resumption {
    /// The attempt of the resuming runner.
    pub(super) attempt: u32,
    /// The step that was in flight. All earlier ones succeeded.
    pub(super) step: usize,
    pub(super) todo: Option<TodoList>,
}

/// Returns the state of an earlier runner if it was killed while it ran this job.
pub(super) fn resumption(
    directory: &JobDirectory,
    sha256: &str,
    job: &JobSpec,
) -> Option<Resumption> {
    if directory.has(RESULT_FILE) {
        return None;
    }
    let status = directory.read(STATUS_FILE, MAX_STATUS_BYTES).ok()?;
    let status: StoredStatus = serde_json::from_slice(&status).ok()?;
    let step = usize::try_from(status.step).ok()?;
    let is_same = status.status == IN_PROGRESS && status.job_sha256 == sha256;
    let is_agents = job.steps.is_empty();
    (is_same && (is_agents || step < job.steps.len())).then(|| Resumption {
        attempt: status.attempt.saturating_add(1),
        step,
        todo: stored_todo(directory, job),
    })
}

/// The todo list of an earlier runner, if it is one of this job.
pub(super) fn stored_todo(directory: &JobDirectory, job: &JobSpec) -> Option<TodoList> {
    let json = directory.read(TODO_FILE, MAX_TODO_BYTES).ok()?;
    TodoList::resumed(&json, job)
}

const IN_PROGRESS: &str = "in_progress";

/// The hash that identifies a job's specification.
pub(super) fn digest(json: &[u8]) -> String {
    hex::encode(Sha256::digest(json))
}

#[derive(Debug)]
pub(super) struct Progress {
    job_id: JobId,
    task_id: TaskId,
    job_sha256: String,
    attempt: u32,
    steps: Option<u64>,
    deadline: Instant,
    directory: Option<Rc<JobDirectory>>,
    control: Option<Rc<Control>>,
    pub(super) todo: RefCell<TodoList>,
    todo_written: Cell<Option<Instant>>,
    /// A step began too soon after the last write.
    todo_is_stale: Notify,
    step: Cell<u64>,
    activity: RefCell<Option<String>>,
    /// Of an agent: its turn, and the tokens of its models.
    turn: Cell<Option<u64>>,
    tokens: Cell<u64>,
}

impl Progress {
    pub(super) fn new(
        job: &JobSpec,
        job_sha256: String,
        attempt: u32,
        deadline: Instant,
        directory: Option<Rc<JobDirectory>>,
        control: Option<Rc<Control>>,
        todo: TodoList,
    ) -> Self {
        Self {
            job_id: job.job_id,
            task_id: job.task_id,
            job_sha256,
            attempt,
            steps: (!job.steps.is_empty()).then_some(job.steps.len() as u64),
            deadline,
            directory,
            control,
            todo: RefCell::new(todo),
            todo_written: Cell::new(None),
            todo_is_stale: Notify::new(),
            step: Cell::new(0),
            activity: RefCell::new(None),
            turn: Cell::new(None),
            tokens: Cell::new(0),
        }
    }

    /// Records the step that runs next.
    pub(super) fn begin(&self, index: usize, activity: &'static str) {
        self.step.set(index as u64);
        self.set_activity(activity);
    }

    /// An agent's next turn.
    pub(super) fn begin_turn(&self, turn: u64) {
        self.turn.set(Some(turn));
        self.set_activity("thinking");
    }

    pub(super) fn set_tokens(&self, tokens: u64) {
        self.tokens.set(tokens);
    }

    pub(super) fn set_activity(&self, activity: &str) {
        *self.activity.borrow_mut() = Some(match self.turn.get() {
            Some(turn) => format!("turn {turn}: {activity}"),
            None => activity.to_owned(),
        });
        self.write_status(IN_PROGRESS, None);
        let is_due = self
            .todo_written
            .get()
            .is_none_or(|written| written.elapsed() >= TODO_INTERVAL);
        if is_due {
            self.write_todo();
        } else {
            // The step may take long.
            self.todo_is_stale.notify_one();
        }
        self.report();
    }

    /// Reports the remaining time at intervals, and writes the todo list when it is stale, forever.
    pub(super) async fn report_regularly(self: Rc<Self>) {
        let mut report_at = Instant::now() + REPORT_INTERVAL;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(report_at) => {
                    report_at = Instant::now() + REPORT_INTERVAL;
                    self.report();
                }
                () = self.todo_is_stale.notified() => {
                    tokio::time::sleep(TODO_INTERVAL).await;
                    self.write_todo();
                }
            }
        }
    }

    /// Writes the final status of the job.
    pub(super) fn end(&self, result: &JobResult) {
        self.activity.take();
        self.write_todo();
        let status = match result.status {
            ResultStatus::Success => "success",
            ResultStatus::Failure => "failure",
            ResultStatus::Timeout => "timeout",
        };
        self.write_status(status, result.failure_code.as_ref());
    }

    pub(super) fn remaining_seconds(&self) -> u64 {
        self.deadline
            .saturating_duration_since(Instant::now())
            .as_secs()
    }

    fn report(&self) {
        if let Some(control) = &self.control {
            control.progress(JobProgress {
                step: Some(self.step.get()),
                steps: self.steps,
                activity: self.activity.borrow().clone(),
                remaining_seconds: self.remaining_seconds(),
                todo: Some(self.todo.borrow().short_summary(MAX_REPORTED_TITLES)),
                tokens: self.tokens.get(),
            });
        }
    }

    // Failures are ignored: a full disk must not end a job that needs no disk.
    fn write_status(&self, status: &str, failure_code: Option<&FailureCode>) {
        let Some(directory) = &self.directory else {
            return;
        };
        let activity = self.activity.borrow();
        let status = Status {
            job_id: self.job_id,
            task_id: self.task_id,
            status,
            failure_code,
            attempt: self.attempt,
            job_sha256: &self.job_sha256,
            step: self.step.get(),
            steps: self.steps,
            activity: activity.as_deref(),
            tokens: self.turn.get().map(|_| self.tokens.get()),
            remaining_seconds: self.remaining_seconds(),
            updated_at: OffsetDateTime::now_utc(),
        };
        if let Ok(json) = serde_json::to_vec(&status) {
            drop(directory.replace(STATUS_FILE, &json));
        }
    }

    fn write_todo(&self) {
        let Some(directory) = &self.directory else {
            return;
        };
        if let Ok(json) = serde_json::to_vec(&*self.todo.borrow()) {
            drop(directory.replace(TODO_FILE, &json));
        }
        self.todo_written.set(Some(Instant::now()));
    }
}

//! Runs the steps of a job in order until one fails.
//!
//! Invariants: with a worker, a step starts only after the worker has its start in the journal. A
//! step that was in flight when an earlier runner was killed runs again only if it is idempotent.

use std::{cell::RefCell, rc::Rc};

use cynode_api::sba::{Action, FailureCode, JobSpec, Step, StepResult, StepStatus};
use cynode_sba_proto::runner::Event;
use serde_json::Value;
use time::OffsetDateTime;
use tokio::{sync::watch, time::Instant};

use super::{
    after,
    control::Control,
    live::LiveOutput,
    output::{Budget, Encoded},
    progress::Progress,
    result::bounded,
};
use crate::{exec::Execs, files::workspace::Workspace};

/// Why a job is stopped early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopReason {
    Canceled,
    /// Process 1 has closed the runner's socket.
    Disconnected,
}

impl StopReason {
    pub(super) fn ending(self) -> Ending {
        match self {
            Self::Canceled => Ending::failure(FailureCode::Canceled, self.message()),
            Self::Disconnected => Ending::failure(FailureCode::Internal, self.message()),
        }
    }

    const fn message(self) -> &'static str {
        match self {
            Self::Canceled => "the job was stopped",
            Self::Disconnected => "the connection to the node was lost",
        }
    }
}

/// The end of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Success,
    Failure { code: FailureCode, message: String },
}

impl Ending {
    pub(super) fn failure(code: FailureCode, message: impl Into<String>) -> Self {
        Self::Failure {
            code,
            message: message.into(),
        }
    }
}

/// The end of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StepEnd {
    Success,
    Failure(String),
    /// The steps exceeded the job's output limit.
    TooMuchOutput,
    TimedOut,
    Stopped(StopReason),
}

/// The outcome of a step.
#[derive(Debug)]
pub(super) struct StepOutcome {
    pub(super) end: StepEnd,
    pub(super) exit_code: Option<i32>,
    /// Standard output and standard error of a command.
    pub(super) streams: Option<Encoded<2>>,
    pub(super) output: Option<Value>,
    pub(super) truncated: bool,
}

impl StepOutcome {
    pub(super) fn new(end: StepEnd) -> Self {
        Self {
            end,
            exit_code: None,
            streams: None,
            output: None,
            truncated: false,
        }
    }
}

/// The job, with the state and services that its steps need.
pub(super) struct Work {
    pub(super) job: JobSpec,
    /// The step that an earlier runner started but did not end.
    pub(super) in_flight: Option<u64>,
    pub(super) deadline: Instant,
    pub(super) workspace: Workspace,
    pub(super) environment: Vec<(String, String)>,
    pub(super) execs: Rc<Execs>,
    pub(super) live: Rc<LiveOutput>,
    pub(super) control: Option<Rc<Control>>,
    pub(super) progress: Rc<Progress>,
    pub(super) budget: Budget,
    /// The results of the ended steps, including those of an earlier runner.
    pub(super) results: RefCell<Vec<StepResult>>,
    pub(super) stop: watch::Receiver<Option<StopReason>>,
}

impl Work {
    pub(super) async fn run(&self) -> Ending {
        self.report(Event::Accepted, None);
        if self.job.steps.is_empty() {
            return Ending::failure(
                FailureCode::InferenceUnavailable,
                "the job has no steps, and this version has no agent that could work it",
            );
        }
        let finished = self.results.borrow().len();
        if let Some(ending) = self.earlier_ending() {
            return ending;
        }
        for index in 0..finished {
            self.progress.todo.borrow_mut().set_step(index, true);
        }
        for (index, step) in self.job.steps.iter().enumerate().skip(finished) {
            let is_interrupted = self.in_flight == Some(index as u64) && !step.idempotent;
            if is_interrupted {
                return self.interrupted(index, step);
            }
            if let Err(ending) = self.begin(index, step).await {
                return ending;
            }
            let started_at = OffsetDateTime::now_utc();
            let step_deadline = step
                .timeout_seconds
                .map(|seconds| after(std::time::Duration::from_secs(seconds)))
                .filter(|deadline| *deadline < self.deadline);
            let deadline = step_deadline.unwrap_or(self.deadline);
            let outcome = self.perform(&step.action, deadline).await;
            let ending = self.ending_of(index, step, &outcome.end, step_deadline.is_some());
            let error = self.error_of(step, &outcome.end, step_deadline.is_some());
            let result = step_result(index, step, outcome, error, Some(started_at));
            self.end(index, result);
            if let Some(ending) = ending {
                return ending;
            }
        }
        Ending::Success
    }

    /// Reports the start of a step and waits for the acknowledgement.
    async fn begin(&self, index: usize, step: &Step) -> Result<(), Ending> {
        self.progress.begin(index, step.action.name());
        let started = Event::StepStarted {
            index: index as u64,
        };
        let number = self.report(started, None);
        let acknowledged = async {
            if let (Some(control), Some(number)) = (&self.control, number) {
                control.acknowledged(number).await;
            }
        };
        tokio::select! {
            biased;
            reason = self.stopped() => Err(reason.ending()),
            () = tokio::time::sleep_until(self.deadline) => Err(self.out_of_time()),
            () = acknowledged => Ok(()),
        }
    }

    async fn perform(&self, action: &Action, deadline: Instant) -> StepOutcome {
        #[cfg(test)]
        super::tests::panic_on_request(action);
        match action {
            Action::RunCommand(command) => self.run_command(command, deadline).await,
            Action::WriteFile(file) => self.write_file(file, deadline).await,
            Action::ReadFile(file) => self.read_file(file, deadline).await,
            Action::ApplyUnifiedDiff(patch) => self.apply_diff(patch, deadline).await,
            Action::ListTree(tree) => self.list_tree(tree, deadline).await,
        }
    }

    /// Completes when the job must stop.
    pub(super) async fn stopped(&self) -> StopReason {
        match self.stop.clone().wait_for(Option::is_some).await.as_deref() {
            Ok(Some(reason)) => *reason,
            // The sender is gone, so no stop can come.
            _ => std::future::pending().await,
        }
    }

    fn end(&self, index: usize, result: StepResult) {
        let succeeded = result.status == StepStatus::Success;
        self.progress.todo.borrow_mut().set_step(index, succeeded);
        if self.control.is_some() {
            let document = serde_json::to_vec(&result)
                .expect("a result has string keys only, so it always serializes");
            let index = index as u64;
            self.report(Event::StepEnded { index }, Some(document));
        }
        self.results.borrow_mut().push(result);
    }

    /// Ends the job because a step was interrupted: an earlier runner started it, its end is
    /// unknown, and it may not be repeated.
    fn interrupted(&self, index: usize, step: &Step) -> Ending {
        let error = "the runner was killed while the step ran; it is not idempotent, so it was \
                     not run again";
        let mut result = step_result(
            index,
            step,
            StepOutcome::new(StepEnd::Success),
            Some(error.to_owned()),
            None,
        );
        result.status = StepStatus::Interrupted;
        self.end(index, result);
        Ending::failure(FailureCode::RunnerInterrupted, named(index, step, error))
    }

    /// The end of the job if a step of an earlier runner failed.
    fn earlier_ending(&self) -> Option<Ending> {
        let results = self.results.borrow();
        let last = results.last()?;
        let code = match last.status {
            StepStatus::Success => return None,
            StepStatus::Timeout => FailureCode::Timeout,
            StepStatus::Interrupted => FailureCode::RunnerInterrupted,
            // The result of a failed step is truncated only by the output limit.
            StepStatus::Failure if last.truncated => FailureCode::ConstraintViolation,
            StepStatus::Failure => FailureCode::StepFailed,
        };
        let index = usize::try_from(last.index).ok()?;
        let error = last.error.as_deref().unwrap_or("failed");
        Some(Ending::failure(
            code,
            named(index, self.job.steps.get(index)?, error),
        ))
    }

    fn report(&self, event: Event, document: Option<Vec<u8>>) -> Option<u64> {
        let control = self.control.as_ref()?;
        Some(control.report(event, document))
    }

    fn out_of_time(&self) -> Ending {
        Ending::failure(FailureCode::Timeout, self.time_is_over())
    }

    fn time_is_over(&self) -> String {
        format!(
            "the job exceeded its max_runtime_seconds of {}",
            self.job.constraints.max_runtime_seconds
        )
    }

    /// The error in the result of a failed step.
    fn error_of(&self, step: &Step, end: &StepEnd, own_deadline: bool) -> Option<String> {
        Some(match end {
            StepEnd::Success => return None,
            StepEnd::Failure(error) => error.clone(),
            StepEnd::TooMuchOutput => format!(
                "the steps returned more than the max_output_bytes of {}",
                self.budget.limit()
            ),
            StepEnd::TimedOut if own_deadline => format!(
                "the step exceeded its timeout_seconds of {}",
                step.timeout_seconds.unwrap_or_default()
            ),
            StepEnd::TimedOut => self.time_is_over(),
            StepEnd::Stopped(reason) => reason.message().to_owned(),
        })
    }

    fn ending_of(
        &self,
        index: usize,
        step: &Step,
        end: &StepEnd,
        own_deadline: bool,
    ) -> Option<Ending> {
        let code = match end {
            StepEnd::Success => return None,
            StepEnd::Failure(_) => FailureCode::StepFailed,
            StepEnd::TooMuchOutput => FailureCode::ConstraintViolation,
            StepEnd::TimedOut => FailureCode::Timeout,
            StepEnd::Stopped(reason) => return Some(reason.ending()),
        };
        let error = self.error_of(step, end, own_deadline)?;
        Some(Ending::failure(code, named(index, step, &error)))
    }
}

/// Prefixes an error with the index, type and id of its step.
fn named(index: usize, step: &Step, error: &str) -> String {
    let kind = step.action.name();
    let id = step.id.as_ref().map(|id| format!(", {id:?}"));
    format!("step {index} ({kind}{}): {error}", id.unwrap_or_default())
}

fn step_result(
    index: usize,
    step: &Step,
    outcome: StepOutcome,
    error: Option<String>,
    started_at: Option<OffsetDateTime>,
) -> StepResult {
    let status = match outcome.end {
        StepEnd::Success => StepStatus::Success,
        StepEnd::Failure(_) | StepEnd::TooMuchOutput => StepStatus::Failure,
        StepEnd::TimedOut => StepStatus::Timeout,
        StepEnd::Stopped(_) => StepStatus::Interrupted,
    };
    let (stdout, stderr, encoding) = match outcome.streams {
        Some(Encoded {
            texts: [stdout, stderr],
            encoding,
        }) => (Some(stdout), Some(stderr), encoding),
        None => Default::default(),
    };
    StepResult {
        index: index as u64,
        id: step.id.clone(),
        kind: step.action.name().to_owned(),
        status,
        exit_code: outcome.exit_code,
        stdout,
        stderr,
        encoding,
        output: outcome.output,
        error: error.map(|error| bounded(&error)),
        truncated: outcome.truncated,
        started_at,
        ended_at: started_at.map(|_| OffsetDateTime::now_utc()),
    }
}

/// The result of a step that succeeded in an earlier attempt, whose results are lost.
pub(super) fn forgotten(index: usize, step: &Step) -> StepResult {
    let outcome = StepOutcome {
        truncated: true,
        ..StepOutcome::new(StepEnd::Success)
    };
    step_result(index, step, outcome, None, None)
}

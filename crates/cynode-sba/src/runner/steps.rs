//! Runs steps: those of a job, in order, until one fails, and the tool calls of an agent.
//!
//! Invariants: with a worker, a step starts only after the worker has its start in the journal. A
//! step that was in flight when an earlier runner was killed runs again only if it is idempotent.

use std::{cell::RefCell, path::PathBuf, rc::Rc};

use cynode_api::{
    SearchRequest,
    sba::{Action, FailureCode, JobSpec, Step, StepResult, StepStatus},
};
use cynode_sba_proto::runner::Event;
use serde_json::Value;
use time::OffsetDateTime;
use tokio::{sync::watch, time::Instant};

use super::{
    after,
    agent::AgentRecord,
    control::Control,
    live::LiveOutput,
    output::{Budget, Encoded},
    progress::Progress,
    result::{bounded, bounded_to},
};
use crate::{exec::Execs, files::workspace::Workspace};

/// The error of an agent's step.
const MAX_AGENT_ERROR_BYTES: usize = 300;

/// Why a job ends before its time.
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

/// What runs as a step.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task<'a> {
    Step(&'a Step),
    /// Only an agent searches: a step of a job runs a command.
    Search(&'a SearchRequest),
    /// A tool call of an earlier runner, which did not say what it was.
    Unknown,
}

impl Task<'_> {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Step(step) => step.action.name(),
            Self::Search(_) => "search",
            Self::Unknown => "tool_call",
        }
    }

    fn id(&self) -> Option<&str> {
        match self {
            Self::Step(step) => step.id.as_deref(),
            Self::Search(_) | Self::Unknown => None,
        }
    }

    const fn timeout_seconds(self) -> Option<u64> {
        match self {
            Self::Step(step) => step.timeout_seconds,
            Self::Search(_) | Self::Unknown => None,
        }
    }
}

/// What the end of a step means for the job.
#[derive(Debug)]
pub(super) enum Effect {
    /// The step succeeded.
    None,
    /// A job of steps ends so; an agent may try something else.
    Failure(Ending),
    /// The job is out of time or output, or was stopped.
    End(Ending),
}

/// Everything that the steps of a job need.
pub(super) struct Work {
    pub(super) job: JobSpec,
    /// The step that an earlier runner started but did not end.
    pub(super) in_flight: Option<u64>,
    pub(super) deadline: Instant,
    pub(super) workspace: Workspace,
    pub(super) environment: Vec<(String, String)>,
    /// The socket of the node's proxies.
    pub(super) node_socket: Option<PathBuf>,
    pub(super) execs: Rc<Execs>,
    pub(super) live: Rc<LiveOutput>,
    pub(super) control: Option<Rc<Control>>,
    pub(super) progress: Rc<Progress>,
    pub(super) budget: Budget,
    /// The results of the ended steps, including those of an earlier runner.
    pub(super) results: RefCell<Vec<StepResult>>,
    pub(super) stop: watch::Receiver<Option<StopReason>>,
    /// What is reported of an agent, apart from its steps.
    pub(super) agent: RefCell<AgentRecord>,
}

impl Work {
    pub(super) async fn run(&self) -> Ending {
        self.report(Event::Accepted, None);
        if self.job.steps.is_empty() {
            return self.run_agent().await;
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
                return self.interrupted(index, Task::Step(step));
            }
            match self.run_task(index, Task::Step(step)).await {
                Effect::None => {}
                Effect::Failure(ending) | Effect::End(ending) => return ending,
            }
        }
        Ending::Success
    }

    /// Runs one step, and keeps its result.
    pub(super) async fn run_task(&self, index: usize, task: Task<'_>) -> Effect {
        if let Err(ending) = self.begin(index, task).await {
            return Effect::End(ending);
        }
        let started_at = OffsetDateTime::now_utc();
        let own_deadline = task
            .timeout_seconds()
            .map(|seconds| after(std::time::Duration::from_secs(seconds)))
            .filter(|deadline| *deadline < self.deadline);
        let deadline = own_deadline.unwrap_or(self.deadline);
        let outcome = self.perform(task, deadline).await;
        let effect = self.effect_of(index, task, &outcome.end, own_deadline.is_some());
        let error = self.error_of(task, &outcome.end, own_deadline.is_some());
        let result = step_result(index, task, outcome, error, Some(started_at));
        self.end(index, result);
        effect
    }

    /// Waits until a step may start.
    async fn begin(&self, index: usize, task: Task<'_>) -> Result<(), Ending> {
        self.progress.begin(index, task.name());
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

    async fn perform(&self, task: Task<'_>, deadline: Instant) -> StepOutcome {
        let action = match task {
            Task::Step(step) => &step.action,
            Task::Search(request) => return self.search(request, deadline).await,
            Task::Unknown => return StepOutcome::new(StepEnd::Success),
        };
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

    fn end(&self, index: usize, mut result: StepResult) {
        if self.job.steps.is_empty() {
            // All steps of an agent may fail, and one result has to hold them.
            result.error = result
                .error
                .map(|error| bounded_to(&error, MAX_AGENT_ERROR_BYTES));
        }
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

    /// A step that an earlier runner started, which nobody saw the end of.
    pub(super) fn interrupted(&self, index: usize, task: Task<'_>) -> Ending {
        let error = "the runner was killed while the step ran; it is not idempotent, so it was \
                     not run again";
        let mut result = step_result(
            index,
            task,
            StepOutcome::new(StepEnd::Success),
            Some(error.to_owned()),
            None,
        );
        result.status = StepStatus::Interrupted;
        self.end(index, result);
        Ending::failure(FailureCode::RunnerInterrupted, named(index, task, error))
    }

    /// The end of the job if a step of an earlier runner failed.
    fn earlier_ending(&self) -> Option<Ending> {
        let results = self.results.borrow();
        let last = results.last()?;
        let code = match last.status {
            StepStatus::Success => return None,
            StepStatus::Timeout => FailureCode::Timeout,
            StepStatus::Interrupted => FailureCode::RunnerInterrupted,
            // The node truncates results too, so only the error tells.
            StepStatus::Failure if last.error.as_ref() == Some(&self.too_much_output()) => {
                FailureCode::ConstraintViolation
            }
            StepStatus::Failure => FailureCode::StepFailed,
        };
        let index = usize::try_from(last.index).ok()?;
        let error = last.error.as_deref().unwrap_or("failed");
        Some(Ending::failure(
            code,
            named(index, Task::Step(self.job.steps.get(index)?), error),
        ))
    }

    fn report(&self, event: Event, document: Option<Vec<u8>>) -> Option<u64> {
        let control = self.control.as_ref()?;
        Some(control.report(event, document))
    }

    pub(super) fn out_of_time(&self) -> Ending {
        Ending::failure(FailureCode::Timeout, self.time_is_over())
    }

    fn time_is_over(&self) -> String {
        format!(
            "the job exceeded its max_runtime_seconds of {}",
            self.job.constraints.max_runtime_seconds
        )
    }

    fn too_much_output(&self) -> String {
        format!(
            "the steps returned more than the max_output_bytes of {}",
            self.budget.limit()
        )
    }

    /// What a step's result says about its failure.
    pub(super) fn error_of(
        &self,
        task: Task<'_>,
        end: &StepEnd,
        own_deadline: bool,
    ) -> Option<String> {
        Some(match end {
            StepEnd::Success => return None,
            StepEnd::Failure(error) => error.clone(),
            StepEnd::TooMuchOutput => self.too_much_output(),
            StepEnd::TimedOut if own_deadline => format!(
                "the step exceeded its timeout_seconds of {}",
                task.timeout_seconds().unwrap_or_default()
            ),
            StepEnd::TimedOut => self.time_is_over(),
            StepEnd::Stopped(reason) => reason.message().to_owned(),
        })
    }

    pub(super) fn effect_of(
        &self,
        index: usize,
        task: Task<'_>,
        end: &StepEnd,
        own_deadline: bool,
    ) -> Effect {
        let code = match end {
            StepEnd::Success => return Effect::None,
            StepEnd::Failure(_) => FailureCode::StepFailed,
            StepEnd::TooMuchOutput => FailureCode::ConstraintViolation,
            StepEnd::TimedOut => FailureCode::Timeout,
            StepEnd::Stopped(reason) => return Effect::End(reason.ending()),
        };
        let error = self.error_of(task, end, own_deadline).unwrap_or_default();
        let ending = Ending::failure(code, named(index, task, &error));
        let is_final = match end {
            StepEnd::TooMuchOutput => true,
            StepEnd::TimedOut => !own_deadline,
            _ => false,
        };
        if is_final {
            Effect::End(ending)
        } else {
            Effect::Failure(ending)
        }
    }
}

/// An error that names its step as people count and call it.
fn named(index: usize, task: Task<'_>, error: &str) -> String {
    let kind = task.name();
    let id = task.id().map(|id| format!(", {id:?}"));
    let number = index + 1;
    format!("step {number} ({kind}{}): {error}", id.unwrap_or_default())
}

fn step_result(
    index: usize,
    task: Task<'_>,
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
        id: task.id().map(str::to_owned),
        kind: task.name().to_owned(),
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
    step_result(index, Task::Step(step), outcome, None, None)
}

//! `cynode-sba run`: runs one job and reports its result.
//!
//! Three modes differ in the source of the job and the destination of the result: files in the job
//! directory, standard input and output, or the worker. In the last mode the runner is a command in
//! the sandbox, and process 1 relays between it and the worker ([`control`]).
//!
//! Invariants: commands and file operations use the same code as those of sessions. Like process 1,
//! the runner is single-threaded, reaps its descendants, and has no rights that steps lack. It
//! reports a complete result however the job ends, even if it panics.

mod agent;
mod command;
mod control;
mod directory;
mod files;
mod live;
mod output;
mod progress;
mod result;
mod steps;
mod todo;

use std::{
    cell::RefCell,
    io::{self, Read as _},
    os::fd::OwnedFd,
    path::PathBuf,
    process::ExitCode,
    rc::Rc,
    time::Duration,
};

use cynode_api::sba::{
    FailureCode, JobResult, JobSpec, StepResult, job_id_of, limits::MAX_JOB_BYTES,
};
use cynode_sba_proto::{JOB, WORKSPACE, proxy::PROXY_SOCKET, runner};
use rustix::fs::{FileType, fstat};
use tokio::{io::Interest, net::UnixStream, sync::watch, task::LocalSet, time::Instant};

use self::{
    agent::AgentRecord,
    control::{Assignment, Control},
    directory::{ARTIFACTS, CHANGES, JOB_FILE, JobDirectory, TRANSCRIPT},
    live::LiveOutput,
    output::Budget,
    progress::{Progress, Resumption},
    result::{EXIT_FAILURE, EXIT_INTERNAL, JobReport},
    steps::{Ending, StopReason, Work},
    todo::TodoList,
};
use crate::{
    EXIT_UNSAFE, EXIT_USAGE, exec::Execs, fail, files::workspace::Workspace, harden, processes, sys,
};

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::agent::{
    answer::Answer,
    events::{EventReader, events_of},
};

/// How long the runner waits for a reader of its streams at the end of the job.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for hashing artifacts. The node hashes them again.
const ARTIFACTS_TIMEOUT: Duration = Duration::from_secs(6);
/// Time limit for hashing artifacts of a stopped job: the node waits one second for the whole job.
const STOPPED_TIMEOUT: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    File,
    Stdio,
    Supervised,
}

/// The arguments of `cynode-sba run`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    mode: Mode,
    job_directory: PathBuf,
    workspace: PathBuf,
    /// The socket of the node's proxies. Without one, models are at the URL of the environment.
    proxy: Option<PathBuf>,
}

impl Options {
    pub(crate) fn parse(arguments: &[&str]) -> Option<Self> {
        let (mut mode, mut job_directory, mut workspace, mut proxy) = (None, None, None, None);
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let is_first = match *argument {
                "--stdio" => mode.replace(Mode::Stdio).is_none(),
                "--supervised" => mode.replace(Mode::Supervised).is_none(),
                "--job-dir" => job_directory.replace(arguments.next()?).is_none(),
                "--workspace" => workspace.replace(arguments.next()?).is_none(),
                "--proxy" => proxy.replace(arguments.next()?).is_none(),
                _ => false,
            };
            if !is_first {
                return None;
            }
        }
        // `components` also drops a trailing slash.
        let absolute = |path: &str| {
            let path = std::path::absolute(path).ok()?;
            Some(path.components().collect())
        };
        let mode = mode.unwrap_or(Mode::File);
        let proxy = proxy.or((mode == Mode::Supervised).then_some(&PROXY_SOCKET));
        Some(Self {
            mode,
            job_directory: absolute(job_directory.unwrap_or(&JOB))?,
            workspace: absolute(workspace.unwrap_or(&WORKSPACE))?,
            proxy: match proxy {
                Some(proxy) => Some(absolute(proxy)?),
                None => None,
            },
        })
    }
}

/// The source of the job.
enum Input {
    /// The JSON of the job, or the error of reading it.
    Json(io::Result<Vec<u8>>),
    Worker(OwnedFd),
}

/// Runs a job. The exit code tells how it ended.
pub(crate) fn main(options: &Options) -> ExitCode {
    // Must come first, before another descriptor gets this number.
    let channel = match options.mode {
        Mode::Supervised => match worker_channel() {
            Ok(channel) => Some(channel),
            Err(error) => {
                let number = runner::RUNNER_FD;
                let message = format!("descriptor {number} is no socket to process 1: {error}");
                return fail(EXIT_USAGE, &message);
            }
        },
        Mode::File | Mode::Stdio => None,
    };
    if let Err(reason) = harden() {
        return fail(EXIT_UNSAFE, &format!("refusing to run: {reason}"));
    }
    let directory = match (options.mode, JobDirectory::open(&options.job_directory)) {
        (Mode::Stdio, _) => None,
        (_, Ok(directory)) => Some(Rc::new(directory)),
        (_, Err(error)) => {
            let path = options.job_directory.display();
            return fail(EXIT_USAGE, &format!("can't open {path}: {error}"));
        }
    };
    let input = match (channel, &directory) {
        (Some(channel), _) => Input::Worker(channel),
        (None, Some(directory)) => Input::Json(directory.read(JOB_FILE, MAX_JOB_BYTES)),
        (None, None) => Input::Json(read_stdin()),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_INTERNAL, &format!("can't start: {error}")),
    };
    let runner = async {
        match Runner::start(options, directory.clone()) {
            Ok(runner) => runner.run(input).await,
            Err(error) => {
                fail(EXIT_INTERNAL, &format!("can't watch signals: {error}"));
                EXIT_INTERNAL
            }
        }
    };
    let run = || runtime.block_on(LocalSet::new().run_until(runner));
    let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    ExitCode::from(code.unwrap_or_else(|_| {
        // A panic of a step becomes a result earlier. This one happened while the result was built.
        let result = JobResult::failed(None, FailureCode::Internal, PANICKED);
        let published = async {
            let live = LiveOutput::start(options.mode != Mode::Stdio);
            publish(directory.as_deref(), &live, &result).await
        };
        runtime.block_on(LocalSet::new().run_until(published));
        EXIT_INTERNAL
    }))
}

const PANICKED: &str = "the runner panicked; its standard error says where";

fn worker_channel() -> io::Result<OwnedFd> {
    let channel = sys::inherited(runner::RUNNER_FD)?;
    if FileType::from_raw_mode(fstat(&channel)?.st_mode) == FileType::Socket {
        rustix::io::ioctl_fionbio(&channel, true)?;
        Ok(channel)
    } else {
        Err(io::Error::from_raw_os_error(libc::ENOTSOCK))
    }
}

/// Reads a job up to its limit plus one byte, which shows that it is too long.
fn read_stdin() -> io::Result<Vec<u8>> {
    let mut json = Vec::new();
    let stdin = io::stdin().lock();
    stdin
        .take(MAX_JOB_BYTES as u64 + 1)
        .read_to_end(&mut json)?;
    Ok(json)
}

/// Leaves the result in the job's directory, or on standard output; returns whether it is there.
async fn publish(directory: Option<&JobDirectory>, live: &LiveOutput, result: &JobResult) -> bool {
    let published = if let Some(directory) = directory {
        result::write(directory, result)
    } else {
        let stdout = live.stdout();
        stdout.push(&[&result::to_json(result)[..], b"\n"].concat());
        stdout.flush().await
    };
    if let Err(error) = &published {
        fail(EXIT_INTERNAL, &format!("can't write the result: {error}"));
    }
    published.is_ok()
}

/// A validated job with its starting state.
struct ReadyJob {
    job: JobSpec,
    sha256: String,
    attempt: u32,
    deadline: Instant,
    in_flight: Option<u64>,
    finished: Vec<StepResult>,
    todo: TodoList,
}

struct Runner<'a> {
    options: &'a Options,
    directory: Option<Rc<JobDirectory>>,
    execs: Rc<Execs>,
    live: Rc<LiveOutput>,
    stop: watch::Sender<Option<StopReason>>,
}

impl<'a> Runner<'a> {
    fn start(options: &'a Options, directory: Option<Rc<JobDirectory>>) -> io::Result<Self> {
        let execs = Rc::new(Execs::default());
        let stop = watch::Sender::new(None);
        let signals = sys::signal_fd(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT])
            .and_then(|fd| sys::watch(fd, Interest::READABLE))?;
        // With a worker, only its processes may stop the job: steps can send signals too.
        let senders = (options.mode == Mode::Supervised).then(processes::ancestors);
        tokio::task::spawn_local({
            let (execs, stop) = (Rc::clone(&execs), stop.clone());
            async move {
                while let Ok(received) =
                    signals.async_io(Interest::READABLE, sys::read_signal).await
                {
                    let is_trusted = senders.as_ref().is_none_or(|senders| {
                        received
                            .sender
                            .is_some_and(|sender| senders.contains(&sender))
                    });
                    if received.signal == libc::SIGCHLD {
                        execs.processes.reap();
                    } else if is_trusted {
                        stop_job(&stop, StopReason::Canceled);
                    }
                }
            }
        });
        Ok(Self {
            options,
            directory,
            execs,
            live: Rc::new(LiveOutput::start(options.mode != Mode::Stdio)),
            stop,
        })
    }

    async fn run(&self, input: Input) -> u8 {
        let (control, json) = match input {
            Input::Json(Ok(json)) => (None, json),
            Input::Json(Err(error)) => {
                let message = format!("the job can't be read: {error}");
                let result = JobResult::failed(None, FailureCode::SchemaValidation, message);
                publish(self.directory.as_deref(), &self.live, &result).await;
                return EXIT_USAGE;
            }
            Input::Worker(channel) => match UnixStream::from_std(channel.into()) {
                Ok(stream) => (Some(Control::start(stream)), Vec::new()),
                Err(error) => {
                    fail(EXIT_INTERNAL, &format!("can't watch the socket: {error}"));
                    return EXIT_INTERNAL;
                }
            },
        };
        let Some(control) = control else {
            return self.work(self.read_job(&json), None).await;
        };
        self.stop_when_lost(&control);
        let mut stopped = self.stop.subscribe();
        tokio::select! {
            assignment = control.assignment() => {
                let ready = from_worker(&assignment, self.directory.as_deref());
                self.work(ready, Some(control)).await
            }
            // Without a job, no result is reported.
            _ = stopped.wait_for(Option::is_some) => EXIT_FAILURE,
        }
    }

    fn stop_when_lost(&self, control: &Rc<Control>) {
        let (stop, control) = (self.stop.clone(), Rc::clone(control));
        tokio::task::spawn_local(async move {
            control.lost().await;
            stop_job(&stop, StopReason::Disconnected);
        });
    }

    #[expect(
        clippy::result_large_err,
        reason = "the result of a refused job, made once"
    )]
    fn read_job(&self, json: &[u8]) -> Result<ReadyJob, JobResult> {
        let job = parse(json)?;
        let sha256 = progress::digest(json);
        let deadline = after(Duration::from_secs(job.constraints.max_runtime_seconds));
        let directory = self.directory.as_deref();
        let resumption = directory.and_then(|found| progress::resumption(found, &sha256, &job));
        let mut ready = ReadyJob {
            attempt: 1,
            deadline,
            in_flight: None,
            finished: Vec::new(),
            todo: TodoList::of(&job),
            job,
            sha256,
        };
        if let Some(Resumption {
            attempt,
            step,
            todo,
        }) = resumption
        {
            let steps = ready.job.steps.iter().enumerate().take(step);
            ready.finished = steps
                .map(|(index, step)| steps::forgotten(index, step))
                .collect();
            ready.in_flight = Some(step as u64);
            ready.attempt = attempt;
            ready.todo = todo.unwrap_or(ready.todo);
        }
        Ok(ready)
    }

    /// Runs the steps and reports the result.
    async fn work(&self, ready: Result<ReadyJob, JobResult>, control: Option<Rc<Control>>) -> u8 {
        if let Some(directory) = &self.directory {
            directory.prepare();
        }
        let ready = match ready {
            Ok(ready) => ready,
            Err(result) => return self.deliver(result, None, control.as_deref()).await,
        };
        let progress = Rc::new(Progress::new(
            &ready.job,
            ready.sha256,
            ready.attempt,
            ready.deadline,
            self.directory.clone(),
            control.clone(),
            ready.todo,
        ));
        let budget = Budget::new(ready.job.constraints.max_output_bytes);
        for step in &ready.finished {
            budget.count(step);
        }
        let work = Rc::new(Work {
            in_flight: ready.in_flight,
            deadline: ready.deadline,
            workspace: Workspace::new(&self.options.workspace),
            environment: environment(),
            node_socket: self.options.proxy.clone(),
            execs: Rc::clone(&self.execs),
            live: Rc::clone(&self.live),
            control: control.clone(),
            progress: Rc::clone(&progress),
            budget,
            results: ready.finished.into(),
            stop: self.stop.subscribe(),
            agent: RefCell::default(),
            job: ready.job,
        });
        let reporting = tokio::task::spawn_local(Rc::clone(&progress).report_regularly());
        let steps = tokio::task::spawn_local({
            let work = Rc::clone(&work);
            async move { work.run().await }
        });
        let ending = steps
            .await
            .unwrap_or_else(|_| Ending::failure(FailureCode::Internal, PANICKED));
        reporting.abort();
        // Processes that steps left behind must not change the reported files.
        self.execs.end_all().await;
        let is_stopped = self.stop.borrow().is_some();
        let agent = work.agent.take();
        if work.job.steps.is_empty() {
            self.leave_artifacts(&agent, is_stopped).await;
        }
        let report = JobReport {
            job_id: Some(work.job.job_id),
            ending,
            steps: work.results.take(),
            artifacts: files::artifacts(
                &self.execs.processes,
                &self.options.job_directory.join(ARTIFACTS),
                if is_stopped {
                    STOPPED_TIMEOUT
                } else {
                    ARTIFACTS_TIMEOUT
                },
            )
            .await,
            todo: Some(progress.todo.borrow().summary()),
            criteria: agent.criteria,
            usage: agent.usage,
        };
        self.deliver(report.into_result(), Some(&progress), control.as_deref())
            .await
    }

    /// Leaves what an agent has done, in place of whatever its commands put there.
    async fn leave_artifacts(&self, agent: &AgentRecord, is_stopped: bool) {
        let Some(directory) = &self.directory else {
            return;
        };
        // Like a full disk, an artifact that can't be written must not end the job.
        drop(directory.replace_artifact(TRANSCRIPT, agent.transcript.lines()));
        let time = if is_stopped {
            STOPPED_TIMEOUT
        } else {
            ARTIFACTS_TIMEOUT
        };
        let workspace = &self.options.workspace;
        match files::changes(&self.execs.processes, workspace, time).await {
            Some(patch) => drop(directory.replace_artifact(CHANGES, &patch)),
            None => directory.remove_artifact(CHANGES),
        }
    }

    /// Reports the result, and waits until the worker has it.
    async fn deliver(
        &self,
        result: JobResult,
        progress: Option<&Progress>,
        control: Option<&Control>,
    ) -> u8 {
        let mut code = result::exit_code(&result);
        if let Some(progress) = progress {
            progress.end(&result);
        }
        let is_published = publish(self.directory.as_deref(), &self.live, &result).await;
        match control {
            // The worker also waits for this process to exit, so the output is flushed before that.
            Some(control) => {
                let document = result::to_json(&result);
                drop(result);
                let number = control.report(runner::Event::Result, Some(document));
                tokio::select! {
                    () = control.acknowledged(number) => {}
                    () = control.lost() => {}
                }
            }
            None if !is_published => code = EXIT_INTERNAL,
            None => {}
        }
        self.live.flush(FLUSH_TIMEOUT).await;
        code
    }
}

/// The environment of this process, which steps inherit.
fn environment() -> Vec<(String, String)> {
    let variables = std::env::vars_os();
    let texts =
        variables.map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    texts.flatten().collect()
}

/// Stops the job. Of several reasons, the first counts.
fn stop_job(stop: &watch::Sender<Option<StopReason>>, reason: StopReason) {
    stop.send_if_modified(|stopped| {
        let is_first = stopped.is_none();
        stopped.get_or_insert(reason);
        is_first
    });
}

#[expect(
    clippy::result_large_err,
    reason = "the result of a refused job, made once"
)]
fn parse(json: &[u8]) -> Result<JobSpec, JobResult> {
    JobSpec::parse(json).map_err(|violations| {
        let message = result::bounded(&violations.to_string());
        JobResult::failed(job_id_of(json), FailureCode::SchemaValidation, message)
    })
}

#[expect(
    clippy::result_large_err,
    reason = "the result of a refused job, made once"
)]
fn from_worker(
    assignment: &Assignment,
    directory: Option<&JobDirectory>,
) -> Result<ReadyJob, JobResult> {
    let job = parse(&assignment.job)?;
    let finished = finished_steps(&assignment.finished).ok_or_else(|| {
        let message = "the results of the finished steps can't be read";
        JobResult::failed(Some(job.job_id), FailureCode::Internal, message)
    })?;
    let longest = after(Duration::from_secs(job.constraints.max_runtime_seconds));
    // An agent's notes. Steps can write them, but they prove nothing.
    let notes = directory.filter(|_| assignment.attempt > 1 && job.steps.is_empty());
    let todo = notes.and_then(|directory| progress::stored_todo(directory, &job));
    Ok(ReadyJob {
        sha256: progress::digest(&assignment.job),
        attempt: assignment.attempt,
        deadline: assignment.deadline.min(longest),
        in_flight: assignment.in_flight,
        finished,
        todo: todo.unwrap_or_else(|| TodoList::of(&job)),
        job,
    })
}

/// Parses a list of step results with the bounds and checks of a whole result.
fn finished_steps(json: &[u8]) -> Option<Vec<StepResult>> {
    let before = br#"{"protocol_version":"1.0","job_id":null,"status":"success","steps":"#;
    let after = br#","artifacts":[],"failure_code":null,"failure_message":null}"#;
    let result = JobResult::parse(&[before, json, after].concat()).ok()?;
    Some(result.steps)
}

fn after(time: Duration) -> Instant {
    Instant::now() + time
}

#[cfg(test)]
mod tests;

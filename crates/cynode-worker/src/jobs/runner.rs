//! The worker's side of the protocol with a job's runner. Process 1 of the sandbox relays it.
//!
//! Invariants: an event is in the job's journal before it is acknowledged, so a step is not repeated
//! when the worker or the runner dies. All input is hostile: it is bounded, parsed strictly, and
//! checked against the journal; a runner that contradicts the journal is killed. After a broken
//! connection the worker reconnects, and the runner resends the events that were not acknowledged.

use std::time::Duration;

use cynode_api::{
    ErrorCode, JobProgress,
    sba::{
        JobResult, StepResult, TodoSummary,
        limits::{MAX_CONTEXT_ITEMS, MAX_RESULT_BYTES, MAX_RESULT_NODES, MAX_STEPS},
    },
};
use cynode_sba_proto::{
    Frame, MAX_DATA, Reply, Request,
    runner::{Event, FromRunner, ToRunner},
};
use cynode_service::{ApiError, compute};
use time::OffsetDateTime;

use super::{
    attempts::RunnerJob,
    document::{Document, DocumentError},
    files::JobFiles,
    steps::{Attempt, Novelty, Steps},
};
use crate::{
    execs::Exec,
    sandbox::{Channel, REPLY_TIMEOUT, unavailable, unexpected},
    sessions::Live,
};

/// How long the runner may take to answer a new connection.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// Delay between attempts to write to the node's disk.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Text that progress repeats of what the runner says: the type of a step, the title of an item.
const MAX_SHOWN_CHARACTERS: usize = 200;
/// Open items of a todo list in a progress report.
const MAX_OPEN_ITEMS: usize = 100;
/// Longest description of a protocol violation, in characters.
const MAX_REASON_CHARACTERS: usize = 500;
/// Longest error of a step result that is stored without its output, in characters.
const MAX_SHORT_ERROR: usize = 200;

/// The connection to one start of the runner, and the state that its events change.
pub(super) struct Conversation<'a> {
    pub(super) live: &'a Live,
    pub(super) exec: &'a Exec,
    pub(super) job: &'a RunnerJob<'a>,
    pub(super) attempt: &'a Attempt,
    pub(super) steps: &'a mut Steps,
    /// The job's deadline.
    pub(super) deadline: OffsetDateTime,
}

/// The end of the communication with a runner.
#[derive(Debug)]
pub(super) enum Ending {
    /// The result is in the journal. The channel still carries its acknowledgement.
    Reported(#[expect(dead_code, reason = "kept open until the runner has read it")] Channel),
    /// The runner violated the protocol.
    Refused(String),
    /// The runner has exited, or the sandbox is gone.
    Gone,
}

#[derive(Debug)]
enum TalkError {
    /// The connection failed. The runner resends unacknowledged events on the next one.
    Broken(ApiError),
    Refused(String),
}

impl From<ApiError> for TalkError {
    fn from(error: ApiError) -> Self {
        Self::Broken(error)
    }
}

type Talk<T> = Result<T, TalkError>;

/// Makes the error for a protocol violation. `reason` may quote the runner, so it is cut, and its
/// control characters are replaced.
fn refused(reason: impl std::fmt::Display) -> TalkError {
    let reason = reason.to_string();
    let shown = reason.chars().take(MAX_REASON_CHARACTERS);
    let plain = shown.map(|shown| if shown.is_control() { '?' } else { shown });
    TalkError::Refused(format!(
        "the runner broke its protocol: {}",
        plain.collect::<String>()
    ))
}

fn spool_failed(error: &std::io::Error) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("storing what the runner reports: {error}"),
    )
}

fn unusable(error: DocumentError) -> TalkError {
    match error {
        DocumentError::Stored(error) => TalkError::Broken(spool_failed(&error)),
        error => refused(error),
    }
}

impl Conversation<'_> {
    /// Communicates until the result is stored. Returns `Gone` once the runner or the sandbox is
    /// gone.
    pub(super) async fn run(&mut self) -> Ending {
        loop {
            let error = match self.connect().await {
                Ok(mut channel) => match self.listen(&mut channel).await {
                    Ok(()) => return Ending::Reported(channel),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            match error {
                TalkError::Refused(reason) => return Ending::Refused(reason),
                TalkError::Broken(error) => tracing::debug!(
                    exec_id = %self.exec.id(),
                    error = %error,
                    "Lost the connection to a job's runner."
                ),
            }
            if self.live.is_gone() || !self.exec.is_running() {
                return Ending::Gone;
            }
            tokio::time::sleep(RECONNECT_DELAY).await;
        }
    }

    /// Attaches to the runner, and sends it the job if it has none yet.
    async fn connect(&mut self) -> Talk<Channel> {
        let request = Request::Runner {
            exec_id: self.exec.id(),
        };
        let mut channel = self
            .live
            .link()?
            .open(&request)
            .await
            .map_err(unavailable)?;
        match channel.reply(REPLY_TIMEOUT).await? {
            Reply::Ok { .. } => {}
            other => return Err(unexpected(&format!("{other:?}")).into()),
        }
        let received = self.steps.received();
        send(&mut channel, &ToRunner::Attach { received }).await?;
        let attached = async {
            loop {
                // Frames before the answer belong to an earlier connection.
                let Frame::Json(json) = channel.next().await.map_err(unavailable)? else {
                    continue;
                };
                if let Ok(FromRunner::Attached { has_job }) = serde_json::from_slice(&json) {
                    return Ok::<_, TalkError>(has_job);
                }
            }
        };
        let has_job = tokio::time::timeout(ATTACH_TIMEOUT, attached)
            .await
            .map_err(|_| {
                ApiError::new(
                    ErrorCode::AgentUnavailable,
                    "the runner did not answer in time",
                )
            })??;
        if !has_job {
            self.send_job(&mut channel).await?;
        } else if received > 0 {
            // The earlier connection may have broken before it delivered this acknowledgement.
            let number = received;
            send(&mut channel, &ToRunner::Acknowledge { number }).await?;
        }
        Ok(channel)
    }

    /// Sends the specification, and the results of the steps that an earlier runner finished.
    async fn send_job(&self, channel: &mut Channel) -> Talk<()> {
        let left = self.deadline - OffsetDateTime::now_utc();
        let job = ToRunner::Job {
            attempt: self.attempt.number,
            in_flight: self.steps.in_flight(),
            remaining_ms: u64::try_from(left.whole_milliseconds()).unwrap_or(0),
        };
        let unreadable = |error: std::io::Error| {
            ApiError::new(ErrorCode::Internal, format!("reading the job: {error}"))
        };
        send(channel, &job).await?;
        let specification = self.job.files.specification().map_err(unreadable)?;
        send_data(channel, &specification).await?;
        send_end(channel).await?;
        send_data(channel, b"[").await?;
        for index in 0..self.steps.ended() {
            if index > 0 {
                send_data(channel, b",").await?;
            }
            send_data(channel, &self.steps.result(index).map_err(unreadable)?).await?;
        }
        send_data(channel, b"]").await?;
        send_end(channel).await
    }

    /// Receives events until the result is stored. Has no timeout of its own, because a step may take
    /// as long as the whole job; the end of the exec ends the wait.
    async fn listen(&mut self, channel: &mut Channel) -> Talk<()> {
        if self.steps.has_result() {
            return Ok(());
        }
        loop {
            let Frame::Json(json) = channel.next().await.map_err(unavailable)? else {
                return Err(refused("a document without an event"));
            };
            let message = serde_json::from_slice(&json);
            match message.map_err(|error| refused(format!("not a message: {error}")))? {
                FromRunner::Event { number, event } => {
                    self.take(channel, number, event).await?;
                    if self.steps.has_result() {
                        return Ok(());
                    }
                }
                FromRunner::Progress { progress } => {
                    let progress = shown_progress(progress, self.job.plan.count());
                    self.job.progressed(progress, self.attempt);
                }
                FromRunner::Attached { .. } | FromRunner::Unknown => {}
            }
        }
    }

    /// Handles one event: checks it, stores it, and acknowledges it.
    async fn take(&mut self, channel: &mut Channel, number: u64, event: Event) -> Talk<()> {
        let novelty = self
            .steps
            .check(number, event, &self.job.plan)
            .map_err(refused)?;
        let document = if event.has_document() {
            match read_document(channel, &self.job.files).await? {
                Some(document) => Some(document),
                // The runner was attached to again, and resends the event.
                None => return Ok(()),
            }
        } else {
            None
        };
        if novelty == Novelty::New {
            match (event, document) {
                (Event::StepEnded { index }, Some(document)) => {
                    self.store_step(number, index, document).await?;
                }
                (Event::Result, Some(document)) => self.store_result(number, document).await?,
                _ => self.record(number, event).await?,
            }
            self.announce(event).await;
        }
        let number = self.steps.received();
        send(channel, &ToRunner::Acknowledge { number }).await
    }

    async fn store_step(&mut self, number: u64, index: u64, document: Document) -> Talk<()> {
        let mut result = document.parse(StepResult::parse).await.map_err(unusable)?;
        self.job
            .plan
            .check_step_result(index, &result)
            .and_then(|()| self.steps.check_end(result.status))
            .map_err(refused)?;
        let status = result.status;
        let mut json = to_json(&result)?;
        if !self.steps.has_room_for(json.len() as u64) {
            shorten(&mut result);
            json = to_json(&result)?;
        }
        while let Err(error) = {
            let steps = &mut *self.steps;
            compute::run(json.len(), || steps.record_end(number, status, &json)).await
        } {
            self.pause_after(error).await?;
        }
        Ok(())
    }

    async fn store_result(&mut self, number: u64, document: Document) -> Talk<()> {
        let mut result = document.parse(JobResult::parse).await.map_err(unusable)?;
        self.job
            .plan
            .check_result(&result, Some(self.steps.succeeded()))
            .map_err(refused)?;
        let job = self.job;
        job.entry
            .explain_failure(&mut result, &job.plan, self.steps, &job.files);
        // What the worker saw, not what the sandbox says.
        result.usage = job.entry.usage.settled().await;
        let json = to_json(&result)?;
        drop(result);
        let files = &self.job.files;
        while let Err(error) = compute::run(json.len(), || files.write_result(&json)).await {
            self.pause_after(error).await?;
        }
        // The file counts as the result only once the journal has this event.
        self.record(number, Event::Result).await
    }

    async fn record(&mut self, number: u64, event: Event) -> Talk<()> {
        while let Err(error) = self.steps.record(number, event) {
            self.pause_after(error).await?;
        }
        Ok(())
    }

    /// Waits before the next attempt to write to the node's disk; the runner waits for its
    /// acknowledgement.
    async fn pause_after(&self, error: std::io::Error) -> Talk<()> {
        if self.live.is_gone() {
            return Err(TalkError::Broken(spool_failed(&error)));
        }
        tracing::error!(
            %error,
            job_id = %self.job.plan.job_id,
            "Failed to store what the runner of a job reports; the job waits."
        );
        tokio::time::sleep(RETRY_DELAY).await;
        Ok(())
    }

    async fn announce(&self, event: Event) {
        match event {
            Event::Accepted => self.job.accepted(self.attempt).await,
            Event::StepStarted { index } => {
                // Before the runner hears that it may start the step.
                self.job.entry.denials.lock().set_step(Some(index));
                // An agent's runner reports what it does itself.
                if self.job.plan.is_agents {
                    return;
                }
                let activity = self.job.plan.step(index).map(|step| step.kind.to_owned());
                let progress = JobProgress {
                    step: Some(index),
                    steps: self.job.plan.count(),
                    activity,
                    ..JobProgress::default()
                };
                self.job.progressed(progress, self.attempt);
            }
            Event::StepEnded { .. } => self.job.entry.denials.lock().set_step(None),
            Event::Result => {}
        }
    }
}

/// Progress as the runner reports it, within bounds.
pub(super) fn shown_progress(progress: JobProgress, steps: Option<u64>) -> JobProgress {
    let cut = |text: String| -> String { text.chars().take(MAX_SHOWN_CHARACTERS).collect() };
    JobProgress {
        step: progress
            .step
            .map(|step| step.min(steps.unwrap_or(MAX_STEPS as u64))),
        steps: progress.steps.and(steps),
        activity: progress.activity.map(cut),
        remaining_seconds: 0,
        todo: progress.todo.map(|todo| TodoSummary {
            total: todo.total.min(MAX_CONTEXT_ITEMS as u64),
            done: todo.done.min(MAX_CONTEXT_ITEMS as u64),
            open: todo
                .open
                .into_iter()
                .take(MAX_OPEN_ITEMS)
                .map(cut)
                .collect(),
        }),
        tokens: progress.tokens,
    }
}

/// Removes the output from the result of a step.
fn shorten(result: &mut StepResult) {
    (result.stdout, result.stderr, result.output) = (None, None, None);
    result.error = result
        .error
        .take()
        .map(|error| error.chars().take(MAX_SHORT_ERROR).collect());
    result.truncated = true;
}

fn to_json(value: &impl serde::Serialize) -> Talk<Vec<u8>> {
    serde_json::to_vec(value).map_err(refused)
}

/// Reads the document of an event; `None` if the runner was attached to again in the meantime.
async fn read_document(channel: &mut Channel, files: &JobFiles) -> Talk<Option<Document>> {
    let mut document = Document::new(files.directory(), MAX_RESULT_BYTES, MAX_RESULT_NODES);
    loop {
        let frame = tokio::time::timeout(REPLY_TIMEOUT, channel.next())
            .await
            .map_err(|_| {
                ApiError::new(ErrorCode::AgentUnavailable, "the runner stopped sending")
            })?;
        match frame.map_err(unavailable)? {
            Frame::Data(piece) if piece.len() <= MAX_DATA => {
                document.push(&piece).map_err(unusable)?;
            }
            Frame::End => return Ok(Some(document)),
            Frame::Json(json)
                if matches!(
                    serde_json::from_slice(&json),
                    Ok(FromRunner::Attached { .. })
                ) =>
            {
                return Ok(None);
            }
            _ => return Err(refused("something else within a document")),
        }
    }
}

async fn send(channel: &mut Channel, message: &ToRunner) -> Talk<()> {
    let json = serde_json::to_vec(message).map_err(refused)?;
    channel
        .send(&Frame::Json(json))
        .await
        .map_err(|error| unavailable(error).into())
}

async fn send_data(channel: &mut Channel, bytes: &[u8]) -> Talk<()> {
    channel
        .send_data(bytes)
        .await
        .map_err(|error| unavailable(error).into())
}

async fn send_end(channel: &mut Channel) -> Talk<()> {
    channel
        .send(&Frame::End)
        .await
        .map_err(|error| unavailable(error).into())
}

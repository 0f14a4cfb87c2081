//! The journal of a job's steps: the events that its runner has reported, in order.
//!
//! Invariants: an event is in the journal before the runner hears that it was received. A runner
//! that is started again therefore learns from here what has happened, and never from files in the
//! sandbox, which steps can write. Lines are appended whole and are as durable as an exec's log: one
//! that a crash cut off was never acknowledged, and is dropped. Steps run in their order, each once,
//! unless the job says that it may be repeated, and none after a failed one, unless an agent makes
//! the steps; a report that contradicts this is refused.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use cynode_api::{ExecId, sba::StepStatus};
use cynode_sba_proto::runner::Event;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::plan::Plan;

/// Length of one line, without the result of a step.
const MAX_LINE_BYTES: u64 = 4_096;
/// Total size of step results that are stored with their output. Later results are stored without
/// it, so that all of them fit into one job result.
pub(super) const MAX_STEP_RESULTS_BYTES: u64 = 20 * 1024 * 1024;

/// One start of the runner.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Attempt {
    /// Counts from 1.
    pub(super) number: u32,
    pub(super) exec_id: ExecId,
    pub(super) timeout_ms: u64,
    /// The start of the job's time limit, the same for every attempt.
    #[serde(with = "time::serde::rfc3339")]
    pub(super) job_began_at: OffsetDateTime,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Attempt(Attempt),
    Event {
        number: u64,
        event: Event,
        /// Present if the result of a step follows on the next line.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        result: Option<ResultLine>,
    },
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct ResultLine {
    bytes: u64,
    status: StepStatus,
}

/// The location of a step's result in the file.
#[derive(Clone, Copy, Debug)]
struct StoredResult {
    at: u64,
    bytes: u64,
    status: StepStatus,
}

/// The state that results from applying all lines of the journal.
#[derive(Debug, Default)]
struct Progress {
    attempts: Vec<Attempt>,
    /// The number of the last event of the current attempt.
    received: u64,
    is_accepted: bool,
    ended: Vec<StoredResult>,
    /// The step after the last ended one has started.
    is_in_flight: bool,
    /// The current attempt, not an earlier one, started the step in flight.
    is_started_now: bool,
    has_result: bool,
}

#[derive(Debug)]
pub(super) struct Steps {
    path: PathBuf,
    file: Option<File>,
    /// Offset of the end of the last complete line.
    length: u64,
    /// Total size of the stored results.
    result_bytes: u64,
    progress: Progress,
}

/// Whether an event is already in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Novelty {
    New,
    /// The runner resent the event, because a broken connection lost the acknowledgement.
    Known,
}

impl Steps {
    /// Reads the journal that an earlier worker process left; starts with an empty one otherwise.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut steps = Self {
            path: path.to_owned(),
            file: None,
            length: 0,
            result_bytes: 0,
            progress: Progress::default(),
        };
        let file = match fs_err::OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file.into_parts().0,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(steps),
            Err(error) => return Err(error),
        };
        let mut reader = BufReader::new(&file);
        while steps.read_line(&mut reader)? {}
        file.set_len(steps.length)?;
        steps.file = Some(file);
        Ok(steps)
    }

    /// Reads the next line, and the result that belongs to it. Returns false at the end, or at a line
    /// that a crash cut off.
    fn read_line(&mut self, reader: &mut BufReader<&File>) -> io::Result<bool> {
        let mut text = Vec::new();
        reader
            .by_ref()
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut text)?;
        if !text.ends_with(b"\n") {
            return if text.len() as u64 == MAX_LINE_BYTES {
                Err(invalid("a line is too long"))
            } else {
                Ok(false)
            };
        }
        let line: Line = serde_json::from_slice(&text)?;
        let mut end = self.length + text.len() as u64;
        let mut stored = None;
        if let Line::Event {
            result: Some(result),
            ..
        } = &line
        {
            let at = end;
            end = at
                .checked_add(result.bytes)
                .and_then(|end| end.checked_add(1))
                .ok_or_else(|| invalid("a result is too long"))?;
            reader.seek(SeekFrom::Start(end - 1))?;
            let mut last = [0];
            if reader.read(&mut last)? == 0 {
                return Ok(false);
            }
            if last != *b"\n" {
                return Err(invalid("a result has another length"));
            }
            stored = Some(StoredResult {
                at,
                bytes: result.bytes,
                status: result.status,
            });
        }
        self.apply(line, stored);
        self.length = end;
        Ok(true)
    }

    fn apply(&mut self, line: Line, stored: Option<StoredResult>) {
        let progress = &mut self.progress;
        let (number, event) = match line {
            Line::Attempt(attempt) => {
                progress.attempts.push(attempt);
                progress.received = 0;
                progress.is_started_now = false;
                return;
            }
            Line::Event { number, event, .. } => (number, event),
        };
        progress.received = number;
        match event {
            Event::Accepted => progress.is_accepted = true,
            Event::StepStarted { .. } => {
                (progress.is_in_flight, progress.is_started_now) = (true, true);
            }
            Event::StepEnded { .. } => {
                (progress.is_in_flight, progress.is_started_now) = (false, false);
                if let Some(stored) = stored {
                    self.result_bytes += stored.bytes;
                    progress.ended.push(stored);
                }
            }
            Event::Result => progress.has_result = true,
        }
    }

    /// The starts of the runner so far.
    pub(super) fn attempts(&self) -> &[Attempt] {
        &self.progress.attempts
    }

    /// The number of the last event of the current attempt.
    pub(super) const fn received(&self) -> u64 {
        self.progress.received
    }

    /// Returns whether the runner has accepted the job.
    pub(super) const fn is_accepted(&self) -> bool {
        self.progress.is_accepted
    }

    /// Returns whether the result of the job is stored.
    pub(super) const fn has_result(&self) -> bool {
        self.progress.has_result
    }

    /// The number of steps that ended, successful or not.
    pub(super) fn ended(&self) -> u64 {
        self.progress.ended.len() as u64
    }

    pub(super) fn succeeded(&self) -> usize {
        let ended = self.progress.ended.iter();
        ended
            .filter(|step| step.status == StepStatus::Success)
            .count()
    }

    /// The index of the step that has started and not ended.
    pub(super) fn in_flight(&self) -> Option<u64> {
        self.progress.is_in_flight.then(|| self.ended())
    }

    /// Returns whether a step result of this size can be stored with its output.
    pub(super) const fn has_room_for(&self, bytes: u64) -> bool {
        self.result_bytes + bytes <= MAX_STEP_RESULTS_BYTES
    }

    /// Records a start of the runner. Must precede the request to the agent.
    pub(super) fn begin(&mut self, attempt: Attempt) -> io::Result<()> {
        self.append(Line::Attempt(attempt), None)
    }

    /// Checks whether an event is valid in the current state.
    pub(super) fn check(&self, number: u64, event: Event, plan: &Plan) -> Result<Novelty, String> {
        let progress = &self.progress;
        if number <= progress.received {
            return Ok(Novelty::Known);
        }
        if number != progress.received + 1 {
            return Err(format!(
                "event {number} came instead of {}",
                progress.received + 1
            ));
        }
        if progress.has_result {
            return Err("an event came after the result".to_owned());
        }
        let next = self.ended();
        match event {
            Event::Accepted if progress.received > 0 => {
                Err("the job was accepted after its first event".to_owned())
            }
            Event::StepStarted { .. } if !progress.is_accepted => {
                Err("a step started before the job was accepted".to_owned())
            }
            Event::StepStarted { index } => {
                let Some(step) = plan.step(index).filter(|_| index == next) else {
                    let (started, next) = (named(index), next.saturating_add(1));
                    return Err(format!("{started} started instead of {next}"));
                };
                if self.succeeded() as u64 != next && !plan.is_agents {
                    return Err(format!("{} started after a failed one", named(index)));
                }
                if progress.is_started_now || (progress.is_in_flight && !step.is_idempotent) {
                    return Err(format!("{} started twice", named(index)));
                }
                Ok(())
            }
            Event::StepEnded { index } if self.in_flight() != Some(index) => {
                Err(format!("{} ended and had not started", named(index)))
            }
            Event::Accepted | Event::StepEnded { .. } | Event::Result => Ok(()),
        }
        .map(|()| Novelty::New)
    }

    /// Rejects the end of a step that an earlier runner started, unless it is reported as
    /// interrupted: the current runner can't know its outcome.
    pub(super) fn check_end(&self, status: StepStatus) -> Result<(), String> {
        if self.progress.is_started_now || status == StepStatus::Interrupted {
            Ok(())
        } else {
            Err(format!(
                "{} ended, but this runner had not started it",
                named(self.ended())
            ))
        }
    }

    /// Records an event that `check` has accepted.
    pub(super) fn record(&mut self, number: u64, event: Event) -> io::Result<()> {
        let result = None;
        self.append(
            Line::Event {
                number,
                event,
                result,
            },
            None,
        )
    }

    /// Records the end of a step with the JSON of its result.
    pub(super) fn record_end(
        &mut self,
        number: u64,
        status: StepStatus,
        json: &[u8],
    ) -> io::Result<()> {
        let event = Event::StepEnded {
            index: self.ended(),
        };
        let result = Some(ResultLine {
            bytes: json.len() as u64,
            status,
        });
        self.append(
            Line::Event {
                number,
                event,
                result,
            },
            Some(json),
        )
    }

    fn append(&mut self, line: Line, result: Option<&[u8]>) -> io::Result<()> {
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        if text.len() as u64 > MAX_LINE_BYTES {
            return Err(invalid("a line is too long"));
        }
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(create(&self.path)?),
        };
        // Removes the remainder of a failed write.
        file.set_len(self.length)?;
        file.write_all_at(&text, self.length)?;
        let at = self.length + text.len() as u64;
        let mut end = at;
        if let Some(json) = result {
            file.write_all_at(json, at)?;
            end += json.len() as u64;
            // Written last: its absence shows that a crash cut the result off.
            file.write_all_at(b"\n", end)?;
            end += 1;
        }
        let stored = match (&line, result) {
            (
                Line::Event {
                    result: Some(line), ..
                },
                Some(json),
            ) => Some(StoredResult {
                at,
                bytes: json.len() as u64,
                status: line.status,
            }),
            _ => None,
        };
        self.apply(line, stored);
        self.length = end;
        Ok(())
    }

    /// The JSON of the result of a step that ended.
    pub(super) fn result(&self, index: u64) -> io::Result<Vec<u8>> {
        let stored = usize::try_from(index)
            .ok()
            .and_then(|index| self.progress.ended.get(index));
        let (Some(stored), Some(file)) = (stored, &self.file) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let mut json = vec![0; usize::try_from(stored.bytes).map_err(io::Error::other)?];
        file.read_exact_at(&mut json, stored.at)?;
        Ok(json)
    }
}

fn create(path: &Path) -> io::Result<File> {
    use fs_err::os::unix::fs::OpenOptionsExt as _;
    let created = fs_err::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    Ok(created.into_parts().0)
}

/// A step as people count.
pub(super) fn named(index: u64) -> String {
    format!("step {}", index.saturating_add(1))
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests;

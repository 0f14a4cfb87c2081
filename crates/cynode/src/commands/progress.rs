//! How far a job is, in a line on stderr for each step.

use std::{convert::Infallible, time::Duration};

use cynode_api::{Job, JobId, JobProgress};
use cynode_client::UserClient;
use tokio::time::sleep;

use crate::{failure::Failure, output, sanitize};

/// Between two looks at a job.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Tells each step of a job once.
#[derive(Debug, Default)]
pub struct StepLines {
    told: Option<(Option<u64>, Option<String>)>,
}

impl StepLines {
    pub fn tell(&mut self, job: &Job) {
        let Some(progress) = &job.progress else {
            return;
        };
        let step = (progress.step, progress.activity.clone());
        if self.told.as_ref() != Some(&step) {
            output::message(&sanitize::line(&line(progress)));
            self.told = Some(step);
        }
    }
}

/// `cynode: step 3/10, run_command, 4m left`, `cynode: turn 3: run_command, 1200 tokens, 4m left`.
fn line(progress: &JobProgress) -> String {
    let mut parts = Vec::new();
    // An agent has turns, which the activity names.
    if let Some(step) = progress.step
        && (progress.steps.is_some() || progress.activity.is_none())
    {
        let of = progress.steps.map(|steps| format!("/{steps}"));
        parts.push(format!(
            "step {}{}",
            step.saturating_add(1),
            of.unwrap_or_default()
        ));
    }
    parts.extend(progress.activity.clone());
    if progress.tokens > 0 {
        parts.push(format!("{} tokens", progress.tokens));
    }
    let left = i64::try_from(progress.remaining_seconds).unwrap_or(i64::MAX);
    parts.push(format!("{} left", output::span(left)));
    if let Some(todo) = &progress.todo {
        parts.push(format!("{} of {} done", todo.done, todo.total));
    }
    format!("cynode: {}", parts.join(", "))
}

/// Tells the steps of a job until it has ended.
pub async fn until_end(client: &UserClient, id: JobId) -> Result<Job, Failure> {
    let mut lines = StepLines::default();
    loop {
        match client.job(id).await {
            Ok(job) if job.state.is_final() => return Ok(job),
            Ok(job) => lines.tell(&job),
            Err(error) if error.is_transient() => {}
            Err(error) => return Err(error.into()),
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Tells the steps of a running job, if somebody watches.
pub async fn watch(client: &UserClient, id: JobId) -> Infallible {
    if !output::shows_progress() {
        return std::future::pending().await;
    }
    let mut lines = StepLines::default();
    loop {
        match client.job(id).await {
            Ok(job) if job.state.is_final() => return std::future::pending().await,
            Ok(job) => lines.tell(&job),
            // Whoever waits for the job reports errors.
            Err(_) => {}
        }
        sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::sba::TodoSummary;

    use super::*;

    #[test]
    fn a_step_is_counted_from_one() {
        let progress = JobProgress {
            step: Some(2),
            steps: Some(10),
            activity: Some("run_command".to_owned()),
            remaining_seconds: 240,
            todo: None,
            tokens: 0,
        };
        assert_eq!(line(&progress), "cynode: step 3/10, run_command, 4m left");
        let todo = TodoSummary {
            total: 5,
            done: 1,
            open: Vec::new(),
        };
        let turn = JobProgress {
            step: Some(0),
            todo: Some(todo),
            ..JobProgress::default()
        };
        assert_eq!(line(&turn), "cynode: step 1, 0s left, 1 of 5 done");
        let agents = JobProgress {
            activity: Some("turn 3: thinking".to_owned()),
            tokens: 1_200,
            ..turn
        };
        assert_eq!(
            line(&agents),
            "cynode: turn 3: thinking, 1200 tokens, 0s left, 1 of 5 done"
        );
    }
}

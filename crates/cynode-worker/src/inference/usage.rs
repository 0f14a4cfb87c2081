//! What the models of each job used, as the worker saw it.
//!
//! The sums are written after each call, so a worker that is killed loses none that has ended. They
//! are never content, and never what a sandbox says.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use cynode_api::{
    JobId,
    sba::{InferenceUsage, limits::MAX_MODEL_BYTES},
};
use cynode_inference::Usage;
use cynode_service::files;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::journal::blocking;

/// How long a result waits for calls that are just ending.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);
const FILE: &str = "usage.json";

/// The sums over the calls of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct ModelSums {
    requests: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    duration_ms: u64,
}

type Sums = BTreeMap<String, ModelSums>;

/// The usage of jobs whose sandboxes may call models, as long as somebody else knows the job.
#[derive(Debug, Default)]
pub(crate) struct UsageBook(Mutex<HashMap<JobId, Weak<JobUsage>>>);

impl UsageBook {
    /// The usage of a job, whose files are in `directory`.
    pub(crate) fn of(&self, id: JobId, directory: &Path) -> Arc<JobUsage> {
        let mut jobs = self.0.lock();
        if let Some(usage) = jobs.get(&id).and_then(Weak::upgrade) {
            return usage;
        }
        jobs.retain(|_, usage| usage.strong_count() > 0);
        let usage = Arc::new(JobUsage::read(directory));
        jobs.insert(id, Arc::downgrade(&usage));
        usage
    }

    /// The usage of a job that was asked for before.
    pub(super) fn get(&self, id: JobId) -> Option<Arc<JobUsage>> {
        self.0.lock().get(&id).and_then(Weak::upgrade)
    }

    pub(crate) fn forget(&self, id: JobId) {
        self.0.lock().remove(&id);
    }
}

/// The usage of one job.
#[derive(Debug)]
pub(crate) struct JobUsage {
    path: PathBuf,
    sums: Mutex<Sums>,
    /// Calls that have not ended.
    open: watch::Sender<usize>,
    writing: tokio::sync::Mutex<()>,
}

impl JobUsage {
    fn read(directory: &Path) -> Self {
        let path = directory.join(FILE);
        let read = || -> io::Result<Sums> { Ok(serde_json::from_slice(&fs_err::read(&path)?)?) };
        let sums = read().unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(%error, "The token usage of a job is unreadable.");
            }
            Sums::new()
        });
        Self {
            path,
            sums: Mutex::new(sums),
            open: watch::Sender::default(),
            writing: tokio::sync::Mutex::default(),
        }
    }

    /// Counts a call as open while the guard lives.
    pub(super) fn begin(self: &Arc<Self>) -> OpenModelCall {
        self.open.send_modify(|open| *open += 1);
        OpenModelCall(Arc::clone(self))
    }

    /// Adds a call that has ended.
    async fn add(&self, model: &str, usage: Option<Usage>, duration: Duration) {
        let usage = usage.unwrap_or_default();
        {
            let mut sums = self.sums.lock();
            let sums = sums.entry(model.to_owned()).or_default();
            sums.requests += 1;
            sums.prompt_tokens = sums.prompt_tokens.saturating_add(usage.prompt_tokens);
            sums.completion_tokens = sums
                .completion_tokens
                .saturating_add(usage.completion_tokens);
            let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
            sums.duration_ms = sums.duration_ms.saturating_add(millis);
        }
        let _writing = self.writing.lock().await;
        let json = serde_json::to_vec(&*self.sums.lock()).unwrap_or_default();
        let path = self.path.clone();
        if let Err(error) = blocking(move || files::replace(&path, &json)).await {
            tracing::warn!(%error, "Failed to store the token usage of a job.");
        }
    }

    /// Tokens of all calls so far, prompts included.
    pub(crate) fn tokens(&self) -> u64 {
        let sums = self.sums.lock();
        let tokens = sums
            .values()
            .map(|sums| sums.prompt_tokens.saturating_add(sums.completion_tokens));
        tokens.fold(0, u64::saturating_add)
    }

    /// The usage for a result, once no call is open or after a short time. `None` without calls.
    pub(crate) async fn settled(&self) -> Option<InferenceUsage> {
        let mut open = self.open.subscribe();
        let none_open = open.wait_for(|open| *open == 0);
        drop(tokio::time::timeout(SETTLE_TIMEOUT, none_open).await);
        self.total()
    }

    fn total(&self) -> Option<InferenceUsage> {
        let sums = self.sums.lock();
        let (first, _) = sums.first_key_value()?;
        let mut total = InferenceUsage {
            model: first.clone(),
            requests: 0,
            prompt_tokens: 0,
            completion_tokens: 0,
            duration_ms: 0,
        };
        for (model, sums) in &*sums {
            if model != first && total.model.len() + 2 + model.len() <= MAX_MODEL_BYTES {
                total.model.extend([", ", model]);
            }
            total.requests += sums.requests;
            total.prompt_tokens = total.prompt_tokens.saturating_add(sums.prompt_tokens);
            total.completion_tokens = total
                .completion_tokens
                .saturating_add(sums.completion_tokens);
            total.duration_ms = total.duration_ms.saturating_add(sums.duration_ms);
        }
        Some(total)
    }
}

/// A call of a job that has not ended.
#[derive(Debug)]
pub(super) struct OpenModelCall(Arc<JobUsage>);

impl OpenModelCall {
    pub(super) async fn end(self, model: &str, usage: Option<Usage>, duration: Duration) {
        self.0.add(model, usage, duration).await;
    }
}

impl Drop for OpenModelCall {
    fn drop(&mut self) {
        self.0.open.send_modify(|open| *open -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USED: Usage = Usage {
        prompt_tokens: 7,
        completion_tokens: 3,
    };

    #[tokio::test]
    async fn sums_survive_the_worker_and_name_every_model() {
        let directory = tempfile::tempdir().expect("a directory");
        let id = JobId::generate();
        let book = UsageBook::default();
        let usage = book.of(id, directory.path());
        assert_eq!((usage.tokens(), usage.settled().await), (0, None));
        for (model, used) in [("b", Some(USED)), ("a", Some(USED)), ("b", None)] {
            usage
                .begin()
                .end(model, used, Duration::from_millis(5))
                .await;
        }
        let expected = InferenceUsage {
            model: "a, b".to_owned(),
            requests: 3,
            prompt_tokens: 14,
            completion_tokens: 6,
            duration_ms: 15,
        };
        assert_eq!(usage.settled().await, Some(expected.clone()));
        let later = UsageBook::default();
        let read = later.of(id, directory.path());
        assert_eq!((read.tokens(), read.settled().await), (20, Some(expected)));
        later.forget(id);
        assert!(later.get(id).is_none());
    }

    #[test]
    fn the_usage_of_a_job_that_nobody_knows_any_more_is_forgotten() {
        let directory = tempfile::tempdir().expect("a directory");
        let (book, id) = (UsageBook::default(), JobId::generate());
        let kept = book.of(id, directory.path());
        for _ in 0..100 {
            drop(book.of(JobId::generate(), directory.path()));
        }
        assert!(book.get(id).is_some_and(|found| Arc::ptr_eq(&found, &kept)));
        assert_eq!(book.0.lock().len(), 2);
        drop(kept);
        assert!(book.get(id).is_none());
    }

    #[tokio::test]
    async fn a_result_waits_for_calls_that_are_just_ending() {
        let directory = tempfile::tempdir().expect("a directory");
        let book = UsageBook::default();
        let usage = book.of(JobId::generate(), directory.path());
        let open = usage.begin();
        let (waiting, ()) = tokio::join!(usage.settled(), async {
            tokio::task::yield_now().await;
            open.end("m", Some(USED), Duration::ZERO).await;
        });
        assert_eq!(waiting.map(|usage| usage.prompt_tokens), Some(7));
    }
}

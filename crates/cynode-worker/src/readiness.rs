//! Checks whether the worker can accept new work, for `/readyz`.
//!
//! A slow runtime is not a dead one: on a loaded machine it answers after seconds, and failing the
//! readiness check then would take the node out of service. A ping therefore runs to completion
//! regardless of waiters, one at a time; while the last one succeeded, the current one may be
//! pending for a while.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::sessions::Sessions;

/// How long a caller waits for the runtime's answer.
const CALLER_TIMEOUT: Duration = Duration::from_secs(2);
/// A runtime that has not answered for this long counts as unavailable.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Readiness {
    sessions: Arc<Sessions>,
    runtime: SlowCheck,
}

impl Readiness {
    pub(crate) fn new(sessions: Arc<Sessions>) -> Self {
        Self {
            sessions,
            runtime: SlowCheck {
                caller_timeout: CALLER_TIMEOUT,
                timeout: RUNTIME_TIMEOUT,
                last: Mutex::default(),
            },
        }
    }

    /// Fails with the reason why new work is not accepted.
    pub(crate) async fn check(&self) -> Result<(), String> {
        if let Some(reason) = self.sessions.unreconciled() {
            return Err(reason);
        }
        self.sessions
            .check_room()
            .map_err(|error| error.into_problem().detail)?;
        self.sessions.audit.check()?;
        let runtime = Arc::clone(&self.sessions.runtime);
        self.runtime
            .check(async move || runtime.ping().await.map_err(|error| error.to_string()))
            .await
    }
}

/// A check of something that may answer slowly.
#[derive(Debug)]
struct SlowCheck {
    caller_timeout: Duration,
    timeout: Duration,
    last: Mutex<Option<CheckRun>>,
}

#[derive(Clone, Debug)]
struct CheckRun {
    since: Instant,
    /// Whether the previous run succeeded.
    previous_succeeded: bool,
    result: watch::Receiver<Option<Result<(), String>>>,
}

impl SlowCheck {
    /// The pending run, or a new one.
    fn current_run<F: Future<Output = Result<(), String>> + Send + 'static>(
        &self,
        start: impl FnOnce() -> F,
    ) -> CheckRun {
        let mut last = self.last.lock();
        let last_result = last.as_ref().map(|run| run.result.borrow().clone());
        // A run whose task died is not pending.
        if let (Some(pending), Some(None)) = (&*last, &last_result)
            && pending.result.has_changed().is_ok()
        {
            return pending.clone();
        }
        let (sender, result) = watch::channel(None);
        let running = start();
        tokio::spawn(async move { sender.send_replace(Some(running.await)) });
        last.insert(CheckRun {
            since: Instant::now(),
            previous_succeeded: matches!(last_result, Some(Some(Ok(())))),
            result,
        })
        .clone()
    }

    /// The result of the check. A pending run counts as success for a while if the previous one
    /// succeeded.
    async fn check<F: Future<Output = Result<(), String>> + Send + 'static>(
        &self,
        start: impl FnOnce() -> F,
    ) -> Result<(), String> {
        let CheckRun {
            since,
            previous_succeeded,
            mut result,
        } = self.current_run(start);
        match tokio::time::timeout(self.caller_timeout, result.wait_for(Option::is_some)).await {
            Ok(Ok(result)) => result.clone().unwrap_or(Ok(())),
            Ok(Err(_)) => Err("the check of the container runtime was interrupted".to_owned()),
            Err(_) if previous_succeeded && since.elapsed() < self.timeout => Ok(()),
            Err(_) => Err(format!(
                "the container runtime has not answered for {} s",
                since.elapsed().as_secs()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_pending_check_counts_as_success_for_a_while_after_a_success_and_never_before() {
        let mut check = SlowCheck {
            caller_timeout: Duration::from_millis(20),
            timeout: Duration::MAX,
            last: Mutex::default(),
        };
        let (answer, waiting) = oneshot::channel();
        let first = check
            .check(async move || waiting.await.unwrap_or(Ok(())))
            .await;
        assert!(
            first.is_err(),
            "a pending check succeeded before any success"
        );
        answer
            .send(Ok(()))
            .expect("runs to completion although nobody waits");
        check.caller_timeout = Duration::from_secs(60);
        check
            .check(async || unreachable!("one at a time"))
            .await
            .expect("there");

        check.caller_timeout = Duration::from_millis(20);
        let (answer, waiting) = oneshot::channel();
        check
            .check(async move || waiting.await.unwrap_or(Ok(())))
            .await
            .expect("slow");
        check
            .check(async || unreachable!("one at a time"))
            .await
            .expect("still slow");
        check.timeout = Duration::ZERO;
        check
            .check(async || unreachable!("one at a time"))
            .await
            .expect_err("pending for too long");
        answer.send(Ok(())).expect("still pending");
        check.caller_timeout = Duration::from_secs(60);
        check
            .check(async || unreachable!("one at a time"))
            .await
            .expect("there again");

        // A failure is reported at once.
        check.timeout = Duration::MAX;
        assert_eq!(
            check.check(async || Err("gone".to_owned())).await,
            Err("gone".to_owned())
        );
    }
}

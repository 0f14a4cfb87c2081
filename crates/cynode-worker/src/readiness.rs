//! Whether the worker can take new work, for `/readyz`.
//!
//! A runtime that is slow is not gone: on a machine under load its answer takes seconds, and what asks for readiness would take
//! the node out of service just then. So a question to it is asked to its end, whoever waits, and only one at a time; as long
//! as the last one was answered well, the present one may be open for a while.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::sessions::Sessions;

/// How long a caller waits for the runtime's answer.
const WAIT: Duration = Duration::from_secs(2);
/// A runtime that has not answered for this long counts as gone.
const GONE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Readiness {
    sessions: Arc<Sessions>,
    runtime: Asked,
}

impl Readiness {
    pub(crate) fn new(sessions: Arc<Sessions>) -> Self {
        Self {
            sessions,
            runtime: Asked {
                wait: WAIT,
                gone: GONE,
                last: Mutex::default(),
            },
        }
    }

    /// Why no new work can be taken, if none can.
    pub(crate) async fn check(&self) -> Result<(), String> {
        if let Some(reason) = self.sessions.unsettled() {
            return Err(reason);
        }
        self.sessions.check_room().map_err(|error| error.0.detail)?;
        let runtime = Arc::clone(&self.sessions.runtime);
        self.runtime
            .answers(async move || runtime.ping().await.map_err(|error| error.to_string()))
            .await
    }
}

/// Questions to somebody who may be slow.
#[derive(Debug)]
struct Asked {
    wait: Duration,
    gone: Duration,
    last: Mutex<Option<Question>>,
}

#[derive(Clone, Debug)]
struct Question {
    since: Instant,
    /// Whether the one before it was answered well.
    after_good: bool,
    answer: watch::Receiver<Option<Result<(), String>>>,
}

impl Asked {
    /// The question that is open, or a new one.
    fn question<F: Future<Output = Result<(), String>> + Send + 'static>(
        &self,
        ask: impl FnOnce() -> F,
    ) -> Question {
        let mut last = self.last.lock();
        let answered = last
            .as_ref()
            .map(|question| question.answer.borrow().clone());
        // One that nobody will answer any more is not open.
        if let (Some(open), Some(None)) = (&*last, &answered)
            && open.answer.has_changed().is_ok()
        {
            return open.clone();
        }
        let (told, answer) = watch::channel(None);
        let asking = ask();
        tokio::spawn(async move { told.send_replace(Some(asking.await)) });
        last.insert(Question {
            since: Instant::now(),
            after_good: matches!(answered, Some(Some(Ok(())))),
            answer,
        })
        .clone()
    }

    /// The answer. None yet is a good one as long as the last was, for a while.
    async fn answers<F: Future<Output = Result<(), String>> + Send + 'static>(
        &self,
        ask: impl FnOnce() -> F,
    ) -> Result<(), String> {
        let Question {
            since,
            after_good,
            mut answer,
        } = self.question(ask);
        match tokio::time::timeout(self.wait, answer.wait_for(Option::is_some)).await {
            Ok(Ok(answer)) => answer.clone().unwrap_or(Ok(())),
            Ok(Err(_)) => Err("asking the container runtime was interrupted".to_owned()),
            Err(_) if after_good && since.elapsed() < self.gone => Ok(()),
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
    async fn silence_is_a_while_good_after_a_good_answer_and_never_before_one() {
        let mut asked = Asked {
            wait: Duration::from_millis(20),
            gone: Duration::MAX,
            last: Mutex::default(),
        };
        let (answer, waiting) = oneshot::channel();
        let first = asked
            .answers(async move || waiting.await.unwrap_or(Ok(())))
            .await;
        assert!(first.is_err(), "never heard of");
        answer
            .send(Ok(()))
            .expect("asked to its end although nobody waits");
        asked.wait = Duration::from_secs(60);
        asked
            .answers(async || unreachable!("one at a time"))
            .await
            .expect("there");

        asked.wait = Duration::from_millis(20);
        let (answer, waiting) = oneshot::channel();
        asked
            .answers(async move || waiting.await.unwrap_or(Ok(())))
            .await
            .expect("slow");
        asked
            .answers(async || unreachable!("one at a time"))
            .await
            .expect("still slow");
        asked.gone = Duration::ZERO;
        asked
            .answers(async || unreachable!("one at a time"))
            .await
            .expect_err("silent for too long");
        answer.send(Ok(())).expect("still asked");
        asked.wait = Duration::from_secs(60);
        asked
            .answers(async || unreachable!("one at a time"))
            .await
            .expect("there again");

        // A refusal is no silence.
        asked.gone = Duration::MAX;
        assert_eq!(
            asked.answers(async || Err("gone".to_owned())).await,
            Err("gone".to_owned())
        );
    }
}

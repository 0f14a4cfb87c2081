//! The protocol between a worker and the runner of a job.
//!
//! The runner is an exec of the sandbox with a socket pair to process 1, which relays whole frames
//! between it and the worker's connection ([`Request::Runner`](crate::Request::Runner)). Code in
//! the sandbox can't speak on this channel: the runner and process 1 are not dumpable.
//!
//! Each connection starts with [`ToRunner::Attach`], answered by [`FromRunner::Attached`]. A worker
//! discards every frame before that answer, and a runner drops a document that an `Attach`
//! interrupts: either may stem from a connection that broke.
//!
//! Invariants: the runner starts a step only after the worker has acknowledged its
//! [`Event::StepStarted`], and the worker acknowledges an event only when it is in the job's
//! journal. A runner that is started again therefore gets every step that finished, and the one
//! that was in flight, from the worker and never from files that steps can write.

use cynode_api::JobProgress;
use serde::{Deserialize, Serialize};

/// The version of this protocol.
pub const VERSION: u32 = 1;
/// The descriptor on which the runner has its end of the socket pair.
pub const RUNNER_FD: i32 = 3;
/// What a runner started by process 1 is called with.
pub const RUNNER_ARGUMENTS: [&str; 2] = ["run", "--supervised"];
/// The variable of a runner with the tokens that the node's models read at once, if the node's
/// operator states them.
pub const CONTEXT_TOKENS_VARIABLE: &str = "CYNODE_CONTEXT_TOKENS";
/// Largest frame in either direction. Documents are sent in pieces of
/// [`MAX_DATA`](crate::MAX_DATA).
pub use crate::MAX_AGENT_FRAME as MAX_FRAME;

/// A worker's message, as a JSON frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum ToRunner {
    /// The first message of a connection. Events after `received` are sent again.
    Attach { received: u64 },
    /// The job, to a runner without one. Two documents follow, each as `Data`…, `End`: the JSON of
    /// the job, and a list of the results of the steps that an earlier attempt finished.
    Job {
        /// 1 for the first runner of the job.
        attempt: u32,
        /// The step that the earlier runner had started and not finished.
        in_flight: Option<u64>,
        /// What is left of the job's time, on the worker's clock.
        remaining_ms: u64,
    },
    /// Every event up to this number is in the journal.
    Acknowledge { number: u64 },
    #[serde(other)]
    Unknown,
}

/// A runner's message, as a JSON frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum FromRunner {
    Attached {
        /// Without one, the worker sends the job.
        has_job: bool,
    },
    Event {
        /// Counts the events of this runner from 1.
        number: u64,
        event: Event,
    },
    /// How far the job is. It has no number and is sent once.
    Progress { progress: JobProgress },
    #[serde(other)]
    Unknown,
}

/// What a worker keeps in the job's journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The job is valid, and its first step comes next.
    Accepted,
    StepStarted {
        index: u64,
    },
    /// The step's result follows as a document: the JSON of a `StepResult`.
    StepEnded {
        index: u64,
    },
    /// The job's result follows as a document. Nothing comes after it.
    Result,
}

impl Event {
    /// Whether a document follows.
    #[must_use]
    pub const fn has_document(self) -> bool {
        matches!(self, Self::StepEnded { .. } | Self::Result)
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::sba::TodoSummary;
    use proptest::{option, prelude::*};
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::{Decoder, Frame, encode_message};

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Accepted),
            any::<u64>().prop_map(|index| Event::StepStarted { index }),
            any::<u64>().prop_map(|index| Event::StepEnded { index }),
            Just(Event::Result),
        ]
    }

    fn to_runner() -> impl Strategy<Value = ToRunner> {
        prop_oneof![
            any::<u64>().prop_map(|received| ToRunner::Attach { received }),
            (any::<u32>(), any::<Option<u64>>(), any::<u64>()).prop_map(
                |(attempt, in_flight, remaining_ms)| ToRunner::Job {
                    attempt,
                    in_flight,
                    remaining_ms
                }
            ),
            any::<u64>().prop_map(|number| ToRunner::Acknowledge { number }),
            Just(ToRunner::Unknown),
        ]
    }

    fn from_runner() -> impl Strategy<Value = FromRunner> {
        let todo = (any::<[u64; 2]>(), any::<Vec<String>>())
            .prop_map(|([total, done], open)| TodoSummary { total, done, open });
        let progress = (
            any::<[Option<u64>; 2]>(),
            any::<Option<String>>(),
            any::<[u64; 2]>(),
            option::of(todo),
        )
            .prop_map(
                |([step, steps], activity, [remaining_seconds, tokens], todo)| JobProgress {
                    step,
                    steps,
                    activity,
                    remaining_seconds,
                    todo,
                    tokens,
                },
            );
        prop_oneof![
            any::<bool>().prop_map(|has_job| FromRunner::Attached { has_job }),
            (any::<u64>(), event()).prop_map(|(number, event)| FromRunner::Event { number, event }),
            progress.prop_map(|progress| FromRunner::Progress { progress }),
            Just(FromRunner::Unknown),
        ]
    }

    fn round_trip<M: Serialize + DeserializeOwned>(message: &M) -> M {
        let mut bytes = Vec::new();
        encode_message(message, &mut bytes);
        let mut decoder = Decoder::new(MAX_FRAME);
        decoder.extend(&bytes);
        match decoder.next_frame() {
            Ok(Some(Frame::Json(json))) => serde_json::from_slice(&json).expect("a message"),
            other => panic!("expected a message, got {other:?}"),
        }
    }

    proptest! {
        #[test]
        fn messages_to_a_runner_round_trip(message in to_runner()) {
            prop_assert_eq!(round_trip(&message), message);
        }

        #[test]
        fn messages_of_a_runner_round_trip(message in from_runner()) {
            prop_assert_eq!(round_trip(&message), message);
        }
    }

    #[test]
    fn messages_of_a_newer_peer_are_unknown_and_their_new_fields_ignored() {
        let read = |json| serde_json::from_str::<ToRunner>(json).expect("a message");
        assert_eq!(read(r#"{"message":"pause","until":3}"#), ToRunner::Unknown);
        assert_eq!(
            read(r#"{"message":"acknowledge","number":3,"at":4}"#),
            ToRunner::Acknowledge { number: 3 }
        );
    }
}

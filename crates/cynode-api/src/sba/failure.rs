//! Why a job failed.

use std::fmt;

use serde::{Serialize, Serializer};

macro_rules! failure_codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal: $title:literal, $remedy:literal;)+) => {
        /// The code of a failed job. Codes never change their meaning.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum FailureCode {
            $($(#[$doc])* $name,)+
            /// A code of another runner: lowercase letters, digits and underscores.
            Other(String),
        }

        impl FailureCode {
            /// The codes that the built-in runner uses.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            #[must_use]
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$name => $code,)+
                    Self::Other(code) => code,
                }
            }

            /// What the code means.
            #[must_use]
            pub const fn title(&self) -> &'static str {
                match self {
                    $(Self::$name => $title,)+
                    Self::Other(_) => "A failure that the runner defines",
                }
            }

            /// What can be done about it.
            #[must_use]
            pub const fn remedy(&self) -> &'static str {
                match self {
                    $(Self::$name => $remedy,)+
                    Self::Other(_) => "See the documentation of the runner.",
                }
            }

            /// A code of a result; validation has checked its form.
            pub(super) fn named(code: String) -> Self {
                match code.as_str() {
                    $($code => Self::$name,)+
                    _ => Self::Other(code),
                }
            }
        }
    };
}

failure_codes! {
    SchemaValidation = "schema_validation": "The job is not valid; no step has run",
        "Correct the fields that the message names; 'cynode-sba validate' checks a file.";
    ExtNetRequired = "ext_net_required": "The job needed external network access, which was denied",
        "Set constraints.ext_net_allowed, or ask an administrator to allow the destination.";
    StepFailed = "step_failed": "A step failed",
        "See the error and the output of the last step in the result.";
    Timeout = "timeout": "The job or a step ran out of time",
        "Raise constraints.max_runtime_seconds or the step's timeout_seconds, or do less.";
    ConstraintViolation = "constraint_violation": "The job exceeded one of its constraints",
        "Raise constraints.max_output_bytes, or write output to files.";
    InferenceUnavailable = "inference_unavailable": "No allowed model could be used",
        "Check that a node serves one of inference.allowed_models.";
    NoProgress = "no_progress": "The agent repeated itself without progress",
        "Make the requirements more specific, or allow another model; the transcript shows what was tried.";
    TurnLimit = "turn_limit": "The agent reached its limit of turns or tokens",
        "Split the work into smaller jobs.";
    RunnerInterrupted = "runner_interrupted": "The runner was killed during a step that must not run twice",
        "Check what the step did, then submit a new job; mark steps that may repeat as idempotent.";
    Canceled = "canceled": "The job was stopped",
        "Submit it again if it is still wanted.";
    Internal = "internal": "The runner failed",
        "Submit the job again; if it fails again, report the message.";
}

impl fmt::Display for FailureCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for FailureCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_named_and_documented() {
        let page = include_str!("../../../../docs/errors.md");
        for code in FailureCode::ALL {
            assert_eq!(FailureCode::named(code.to_string()), *code);
            let row = format!("| `{code}` | {} | {} |", code.title(), code.remedy());
            assert!(page.contains(&row), "docs/errors.md lacks the row {row}");
        }
        let other = FailureCode::named("out_of_tea".to_owned());
        assert_eq!(other, FailureCode::Other("out_of_tea".to_owned()));
    }
}

//! What a runner that continues tells the model of its predecessor's work.

use cynode_api::sba::{StepResult, StepStatus};

use super::{dialogue::middle_cut, tools};

/// Of one finished step, and of all of them.
const MAX_STEP_BYTES: usize = 500;
const MAX_BYTES: usize = 32 * 1024;

/// Summarizes for a model the steps that an earlier runner finished, within a bound in bytes.
pub(super) fn finished_steps(results: &[StepResult], most: usize) -> Option<String> {
    if results.is_empty() {
        return None;
    }
    let mut text = "You began to work on the job before, and were interrupted. What was said is \
                    lost; the workspace is as you left it. These were your tool calls, in order, \
                    and what came of them:\n"
        .to_owned();
    let described = results.iter().map(|result| {
        let status = match result.status {
            StepStatus::Success => "succeeded",
            StepStatus::Failure => "failed",
            StepStatus::Timeout => "timed out",
            StepStatus::Interrupted => "was interrupted",
        };
        let seen = middle_cut(&tools::described(result), MAX_STEP_BYTES);
        format!(
            "- {} {status}: {}\n",
            result.kind,
            seen.replace('\n', "\n  ")
        )
    });
    text.push_str(&middle_cut(
        &described.collect::<String>(),
        most.min(MAX_BYTES),
    ));
    text.push_str("Look at the workspace, then continue.");
    Some(text)
}

//! The acceptance criteria at the end of an agent's work.
//!
//! Invariant: a criterion counts as met by the job only if the command that the job names for it
//! exited with 0, here and now. What the model says of the others is reported as the model's word.

use std::time::Duration;

use cynode_api::sba::{
    Action, CheckedCriterion, Criterion, CriterionResult, FailureCode, Step, Verifier,
};

use super::{
    super::{
        after,
        output::Encoded,
        result::bounded_to,
        steps::{Effect, Ending, StepOutcome, Task, Work},
    },
    dialogue::middle_cut,
    tools::Claim,
};

/// What a result says of a criterion. The largest job has a thousand.
const MAX_DETAIL_BYTES: usize = 512;
/// The output of a check that the model gets to see.
const MAX_CHECK_OUTPUT_BYTES: usize = 4 * 1024;

/// What came of the checks.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) results: Vec<CriterionResult>,
    /// What the model should know of each check that failed.
    pub(super) failures: Vec<String>,
    /// The positions of those criteria.
    pub(super) unmet: Vec<usize>,
}

impl Work {
    fn criteria(&self) -> &[Criterion] {
        let context = self.job.context.as_ref();
        context.map_or(&[], |context| &context.acceptance_criteria)
    }

    pub(super) fn has_checks(&self) -> bool {
        let mut criteria = self.criteria().iter();
        criteria.any(|criterion| matches!(criterion, Criterion::Checked(_)))
    }

    /// Runs the job's checks. The error is how the job ends meanwhile.
    pub(super) async fn check_criteria(&self, claims: &[Claim]) -> Result<Verdict, Ending> {
        let mut verdict = Verdict::default();
        for (index, criterion) in self.criteria().iter().enumerate() {
            let result = match criterion {
                Criterion::Checked(checked) => {
                    let (is_met, detail) = self.check(index, checked).await?;
                    if !is_met {
                        let text = criterion.text().trim();
                        verdict
                            .failures
                            .push(format!("criterion {index} ({text}): {detail}"));
                        verdict.unmet.push(index);
                    }
                    CriterionResult {
                        index: index as u64,
                        is_met,
                        verified_by: Verifier::Job,
                        detail: (!is_met).then(|| bounded_to(&detail, MAX_DETAIL_BYTES)),
                    }
                }
                Criterion::Text(_) => claimed(index, claims),
            };
            self.progress
                .todo
                .borrow_mut()
                .set_criterion(index, result.is_met);
            verdict.results.push(result);
        }
        Ok(verdict)
    }

    async fn check(
        &self,
        index: usize,
        criterion: &CheckedCriterion,
    ) -> Result<(bool, String), Ending> {
        self.progress
            .set_activity(&format!("checking criterion {index}"));
        let step = Step {
            action: Action::RunCommand(criterion.check.clone()),
            id: Some(format!("criterion {index}")),
            timeout_seconds: criterion.timeout_seconds,
            idempotent: true,
        };
        let own_deadline = criterion
            .timeout_seconds
            .map(|seconds| after(Duration::from_secs(seconds)))
            .filter(|deadline| *deadline < self.deadline);
        let deadline = own_deadline.unwrap_or(self.deadline);
        let outcome = self.run_command(&criterion.check, deadline).await;
        let (task, has_own) = (Task::Step(&step), own_deadline.is_some());
        let error = self.error_of(task, &outcome.end, has_own);
        match self.effect_of(index, task, &outcome.end, has_own) {
            Effect::None => Ok((true, String::new())),
            Effect::Failure(_) => Ok((false, detail(&error.unwrap_or_default(), outcome))),
            Effect::End(ending) => Err(match ending {
                Ending::Failure { code, message } => Ending::Failure {
                    code,
                    message: format!("while checking: {message}"),
                },
                Ending::Success => ending,
            }),
        }
    }
}

fn detail(error: &str, outcome: StepOutcome) -> String {
    let Some(Encoded { texts, .. }) = outcome.streams else {
        return error.to_owned();
    };
    let output = texts.map(|text| middle_cut(text.trim(), MAX_CHECK_OUTPUT_BYTES / 2));
    let output = output.iter().filter(|text| !text.is_empty());
    std::iter::once(error)
        .chain(output.map(String::as_str))
        .collect::<Vec<_>>()
        .join("\n")
}

/// A criterion without a check: what the model says of it, which may be nothing.
fn claimed(index: usize, claims: &[Claim]) -> CriterionResult {
    let claim = claims
        .iter()
        .rev()
        .find(|claim| claim.index == index as u64);
    CriterionResult {
        index: index as u64,
        is_met: claim.is_some_and(|claim| claim.is_met),
        verified_by: Verifier::Model,
        detail: claim.map_or(Some("the model did not say".to_owned()), |claim| {
            claim
                .detail
                .as_deref()
                .map(|detail| bounded_to(detail, MAX_DETAIL_BYTES))
        }),
    }
}

/// How a job ends whose checks keep failing.
pub(super) fn unmet(verdict: &Verdict, times: u32) -> Ending {
    let unmet: Vec<String> = verdict.unmet.iter().map(usize::to_string).collect();
    Ending::failure(
        FailureCode::NoProgress,
        format!(
            "the agent said {times} times that it had finished, but the checks of these \
             criteria fail: {}",
            unmet.join(", ")
        ),
    )
}

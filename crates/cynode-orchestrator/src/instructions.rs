//! Jobs that are submitted as a prompt: what an agent is to do, in place of a specification.
//!
//! Invariants: nodes and runners see nothing but specifications, and those of prompts pass through
//! the same code as others. The gate has scanned the prompt and its checks as they came, judged the
//! program of the checks and recorded their hash.

use std::collections::BTreeMap;

use cynode_api::{
    JobCreate, JobId, Task, job_limits,
    sba::{
        CheckedCriterion, Criterion, JobContext, JobSpec, ProtocolVersion, RunCommand, Violations,
        limits::MAX_OUTPUT_BYTES,
    },
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{Orchestrator, caller::Caller, jobs::Error};

/// What the request for an agent's job says of the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    prompt: String,
    /// Empty if the preference decides.
    allowed_models: Vec<String>,
    /// Shell commands.
    checks: Vec<String>,
}

impl Instruction {
    /// Takes the instruction out of a request.
    pub(crate) fn take(body: &mut JobCreate) -> Option<Self> {
        Some(Self {
            prompt: body.prompt.take()?,
            allowed_models: std::mem::take(&mut body.allowed_models),
            checks: std::mem::take(&mut body.checks),
        })
    }

    /// The instruction as it is stored, to be compared with a repetition.
    pub(crate) fn stored(&self) -> Value {
        let json = json!([self.prompt, self.allowed_models, self.checks]).to_string();
        json!({"sha256": hex::encode(Sha256::digest(json)), "checks": self.checks.len()})
    }

    /// The specification without its context.
    fn spec(
        task: &Task,
        job_id: JobId,
        seconds: Option<u64>,
        models: &[String],
    ) -> Result<JobSpec, Violations> {
        JobSpec::from_value(json!({
            "protocol_version": ProtocolVersion::CURRENT,
            "job_id": job_id,
            "task_id": task.id,
            "constraints": {
                "max_runtime_seconds": seconds.unwrap_or(job_limits::DEFAULT_TIMEOUT_SECONDS),
                "max_output_bytes": MAX_OUTPUT_BYTES,
            },
            "inference": {"allowed_models": models},
            "steps": [],
        }))
    }

    /// Adds the instruction to a context that has what the task says: the prompt is the first
    /// requirement, the checks are the last criteria.
    pub(crate) fn add_to(self, context: &mut JobContext) {
        context.requirements.insert(0, self.prompt);
        let checks = self.checks.into_iter().map(|script| {
            Criterion::Checked(CheckedCriterion {
                text: "This command succeeds.".to_owned(),
                check: RunCommand {
                    argv: vec![script],
                    cwd: None,
                    env: BTreeMap::new(),
                    shell: true,
                },
                timeout_seconds: None,
            })
        });
        context.acceptance_criteria.extend(checks);
    }
}

impl Orchestrator {
    /// The specification of an instruction. Its context is completed as those of others are.
    pub(crate) async fn specify(
        &self,
        caller: &Caller,
        task: &Task,
        job_id: JobId,
        seconds: Option<u64>,
        instruction: &Instruction,
    ) -> Result<JobSpec, Error> {
        let models = match instruction.allowed_models.as_slice() {
            [] => self.default_models(caller, task).await?,
            named => named.to_vec(),
        };
        Ok(Instruction::spec(task, job_id, seconds, &models)?)
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{TaskId, TaskStatus};
    use serde_json::Map;
    use time::OffsetDateTime;

    use super::*;

    fn task() -> Task {
        Task {
            id: TaskId::generate(),
            project_id: None,
            name: "repair".to_owned(),
            description: None,
            requirements: Vec::new(),
            acceptance_criteria: Vec::new(),
            status: TaskStatus::Active,
            profile: None,
            metadata: Map::new(),
            created_by: "ada".to_owned(),
            created_at: OffsetDateTime::UNIX_EPOCH,
            updated_at: OffsetDateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn an_instruction_becomes_a_valid_specification_around_what_the_task_says() {
        let mut body = JobCreate {
            prompt: Some("make the tests pass".to_owned()),
            allowed_models: vec!["m".to_owned()],
            checks: vec!["make test".to_owned()],
            ..JobCreate::default()
        };
        let instruction = Instruction::take(&mut body).expect("a prompt");
        assert_eq!(body, JobCreate::default());
        assert_eq!(Instruction::take(&mut body), None);
        let models = instruction.allowed_models.clone();
        let spec = Instruction::spec(&task(), JobId::generate(), Some(60), &models);
        let mut spec = spec.expect("valid");
        let mut context = JobContext {
            requirements: vec!["of the task".to_owned()],
            acceptance_criteria: vec![Criterion::Text("of the task".to_owned())],
            ..JobContext::default()
        };
        instruction.clone().add_to(&mut context);
        spec.context = Some(context);
        let json = serde_json::to_value(&spec).expect("JSON");
        assert_eq!(
            json["context"]["requirements"],
            json!(["make the tests pass", "of the task"])
        );
        assert_eq!(
            json["context"]["acceptance_criteria"][1]["check"],
            json!({"argv": ["make test"], "shell": true})
        );
        assert_eq!(JobSpec::from_value(json).expect("valid"), spec);
        let other = Instruction {
            checks: Vec::new(),
            ..instruction.clone()
        };
        assert_ne!(instruction.stored(), other.stored());
    }
}

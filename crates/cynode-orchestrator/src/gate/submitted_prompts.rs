//! What an agent is to do, in the body of a new job without a specification, as policies and the
//! record see it.
//!
//! Invariant: the prompt and its checks are scanned as the other members of the body are, and policies
//! judge the program of the checks. The record has the prompt's hash and no text.

use cynode_policy::Action;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::submitted_jobs::SHELL;

/// The prompt of a job, not validated yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SubmittedPrompt<'a> {
    prompt: &'a Value,
    checks: &'a Value,
}

impl<'a> SubmittedPrompt<'a> {
    /// The prompt in the body of a call. Other calls have none.
    pub(crate) fn of(action: Action, body: &'a Value) -> Option<Self> {
        let prompt = (action == Action::JobCreate).then(|| body.get("prompt"))??;
        Some(Self {
            prompt,
            checks: &body["checks"],
        })
    }

    fn checks(self) -> usize {
        self.checks.as_array().map_or(0, Vec::len)
    }

    /// The program of the checks.
    pub(crate) fn program(self) -> Option<&'static str> {
        (self.checks() > 0).then_some(SHELL)
    }

    /// What a record says of it: its hash and its size, but no text.
    pub(crate) fn describe(self) -> Value {
        let text = self.prompt.as_str().unwrap_or_default();
        json!({
            "sha256": hex::encode(Sha256::digest(text)),
            "size": text.len(),
            "checks": self.checks(),
        })
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::Flags;
    use cynode_policy::{HeldSecrets, Scanner, ShapePolicy, ShapeSetting};

    use super::{
        super::{
            leaks::{self, Leak},
            policy_calls::PolicyCalls,
        },
        *,
    };

    fn token() -> String {
        ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat()
    }

    #[test]
    fn a_prompt_is_scanned_and_recorded_without_its_text() {
        let scanner = Scanner::new(HeldSecrets::new([7; 32]), true);
        let policy = |setting: Value| -> ShapePolicy {
            (&serde_json::from_value::<ShapeSetting>(setting).expect("a setting")).into()
        };
        let scan = |body: &Value, setting: Value| -> Result<Flags, Leak> {
            leaks::scan_json(&scanner, policy(setting), Action::JobCreate, body, None)
        };
        for (body, field) in [
            (json!({"prompt": format!("use {}", token())}), "prompt"),
            (
                json!({"prompt": "x", "checks": ["true", token()]}),
                "checks[1]",
            ),
            (
                json!({"prompt": "x", "allowed_models": [token()]}),
                "allowed_models[0]",
            ),
        ] {
            let leak = scan(&body, json!(true)).expect_err("refused");
            assert_eq!(leak.field, field);
        }
        // Also where arguments of commands are only flagged.
        let body = json!({"prompt": token(), "checks": ["hidden"]});
        assert!(scan(&body, json!({"argv": "flag"})).is_err());
        let prompt = SubmittedPrompt::of(Action::JobCreate, &body).expect("a prompt");
        assert_eq!(prompt.program(), Some("sh"));
        let described = prompt.describe();
        assert_eq!(
            described,
            json!({"sha256": hex::encode(Sha256::digest(token())), "size": 40, "checks": 1})
        );
        assert!(SubmittedPrompt::of(Action::SessionExec, &body).is_none());
        let calls = PolicyCalls::new(Action::JobCreate, &body, &[], std::iter::empty(), None);
        let programs: Vec<Option<String>> = calls
            .expect("few paths")
            .iter()
            .map(|call| call.program)
            .collect();
        assert_eq!(programs, [Some("sh".to_owned())]);
    }
}

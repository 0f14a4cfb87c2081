//! The models that a job allows: the first that is served answers, and the next ones if it fails.
//!
//! Invariants: no other model is ever asked; each failure is retried a bounded number of times,
//! later each time.

use std::{collections::VecDeque, time::Duration};

use cynode_api::sba::{Inference, InferenceSource};

use super::{
    answer::Answer,
    server::{ModelServer, ServerError, ServerErrorKind},
};

/// Models whose description is asked for.
const MAX_DESCRIBED: usize = 8;
/// Attempts at one request to one model.
const MAX_ATTEMPTS: u32 = 4;
/// Before the second attempt; twice as long before each further one.
const FIRST_BACKOFF: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(super) struct Models {
    server: ModelServer,
    /// The first one is asked.
    usable: VecDeque<String>,
    /// The model that was asked last.
    asked: String,
    /// The smallest window of the usable models, as far as the server says.
    context_tokens: Option<u64>,
}

impl Models {
    /// Finds out which of the allowed models a server has.
    pub(super) async fn find(inference: &Inference, server: ModelServer) -> Result<Self, String> {
        if inference.source == Some(InferenceSource::ApiEgress) {
            return Err("inference.source is api_egress, which is not available yet".to_owned());
        }
        let allowed = &inference.allowed_models;
        let mut attempt = 1;
        let mut context_tokens = None;
        let usable: VecDeque<String> = loop {
            match server.models().await {
                Ok(listed) => {
                    let found = |model: &String| listed.iter().find(|one| is_same(&one.id, model));
                    let windows = allowed
                        .iter()
                        .filter_map(|model| found(model)?.context_tokens);
                    context_tokens = windows.min();
                    let is_listed = |model: &&String| found(model).is_some();
                    break allowed.iter().filter(is_listed).cloned().collect();
                }
                Err(error) if attempt >= MAX_ATTEMPTS || error.kind == ServerErrorKind::Refused => {
                    if error.kind == ServerErrorKind::Unreachable {
                        return Err(error.message);
                    }
                    // A server need not list its models to serve them.
                    break allowed.iter().cloned().collect();
                }
                Err(_) => tokio::time::sleep(backoff(attempt)).await,
            }
            attempt += 1;
        };
        if usable.is_empty() {
            return Err(format!(
                "the model server has none of the allowed models: {}",
                allowed.join(", ")
            ));
        }
        for model in usable.iter().take(MAX_DESCRIBED) {
            // A server that can't describe one model describes none.
            let Ok(described) = server.context_tokens(model).await else {
                break;
            };
            context_tokens = context_tokens.into_iter().chain(described).min();
        }
        Ok(Self {
            context_tokens,
            server,
            asked: usable[0].clone(),
            usable,
        })
    }

    /// The smallest window of the models, as far as the server says.
    pub(super) const fn context_tokens(&self) -> Option<u64> {
        self.context_tokens
    }

    /// The model that was asked last.
    pub(super) fn asked(&self) -> &str {
        &self.asked
    }

    /// Asks for an answer. `request` makes the JSON for a model; `failed` hears of each failure.
    pub(super) async fn ask(
        &mut self,
        request: impl Fn(&str) -> Vec<u8>,
        mut failed: impl FnMut(&str, &ServerError),
    ) -> Result<Answer, String> {
        let mut last = "no model is left".to_owned();
        while let Some(model) = self.usable.front() {
            let body = request(model);
            self.asked.clone_from(model);
            for attempt in 1..=MAX_ATTEMPTS {
                let error = match self.server.chat(body.clone()).await {
                    Ok(answer) => return Ok(answer),
                    Err(error) => error,
                };
                failed(model, &error);
                last = format!("{model}: {}", error.message);
                if error.kind == ServerErrorKind::Refused {
                    break;
                }
                if attempt < MAX_ATTEMPTS {
                    tokio::time::sleep(backoff(attempt)).await;
                }
            }
            self.usable.pop_front();
        }
        Err(last)
    }
}

fn backoff(attempt: u32) -> Duration {
    FIRST_BACKOFF * 2_u32.saturating_pow(attempt.saturating_sub(1))
}

/// Whether two names are those of one model: without a tag, the tag is `latest`.
fn is_same(one: &str, other: &str) -> bool {
    let plain = |name: &str| name.strip_suffix(":latest").unwrap_or(name).to_owned();
    plain(one) == plain(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_without_a_tag_is_its_latest() {
        assert!(is_same("llama3.2", "llama3.2:latest") && is_same("a:1b", "a:1b"));
        assert!(!is_same("llama3.2", "llama3.2:1b") && !is_same("a", "A"));
    }

    #[test]
    fn attempts_are_further_and_further_apart() {
        let waits: Vec<u128> = (1..MAX_ATTEMPTS)
            .map(|attempt| backoff(attempt).as_millis())
            .collect();
        assert_eq!(waits, [250, 500, 1_000]);
    }
}

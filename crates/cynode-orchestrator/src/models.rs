//! The models that people allow sandboxes.
//!
//! Invariants: the preference `inference.allowed_models` is set by people only (the policies forbid
//! it to agents); a job uses no model that the preference does not name. Where no scope sets it,
//! nothing is allowed, but a person who submits a job allows the models that the job names.

use cynode_api::{
    ALLOWED_MODELS, Task, TokenKind, is_model_name,
    sba::{Inference, limits::MAX_MODELS},
};
use cynode_inference::AllowedModels;
use serde_json::Value;

use crate::{
    Orchestrator,
    caller::Caller,
    db::{self, PreferenceContext},
    jobs::Error,
};

/// Models that a refusal names; the others are counted.
const SHOWN: usize = 8;

impl Orchestrator {
    /// Reduces the models of a job to those that its project, or a person, allows.
    pub(crate) async fn cut_models(
        &self,
        caller: &Caller,
        task: &Task,
        inference: &mut Inference,
    ) -> Result<(), Error> {
        let allowed = match self.preferred_models(caller.preferences(task)).await? {
            Some(allowed) => allowed,
            None if caller.kind == TokenKind::User => return Ok(()),
            None => Vec::new(),
        };
        cut(inference, &AllowedModels::new(allowed))
    }

    /// The models of a job that names none.
    pub(crate) async fn default_models(
        &self,
        caller: &Caller,
        task: &Task,
    ) -> Result<Vec<String>, Error> {
        let preferred = self.preferred_models(caller.preferences(task)).await?;
        let mut models = preferred.unwrap_or_default();
        models.truncate(MAX_MODELS);
        if models.is_empty() {
            return Err(Error::NoModel);
        }
        Ok(models)
    }

    /// The models of a session.
    pub(crate) async fn session_models(
        &self,
        context: PreferenceContext,
    ) -> Result<Vec<String>, db::Error> {
        Ok(self.preferred_models(context).await?.unwrap_or_default())
    }

    /// The preference in effect; `None` if no scope sets it.
    async fn preferred_models(
        &self,
        context: PreferenceContext,
    ) -> Result<Option<Vec<String>>, db::Error> {
        let value = self
            .db
            .effective_preference(context, ALLOWED_MODELS)
            .await?;
        Ok(value.map(|value| names(&value)))
    }
}

/// The names in a value. One that is no list allows nothing.
fn names(value: &Value) -> Vec<String> {
    let items = value.as_array().into_iter().flatten();
    let names = items.filter_map(Value::as_str);
    names
        .filter(|name| is_model_name(name))
        .map(str::to_owned)
        .collect()
}

fn cut(inference: &mut Inference, allowed: &AllowedModels) -> Result<(), Error> {
    let asked = listed(&inference.allowed_models);
    inference
        .allowed_models
        .retain(|name| allowed.find(name).is_some());
    if !inference.allowed_models.is_empty() {
        return Ok(());
    }
    let allowed = match allowed.names() {
        [] => format!("no model is: {ALLOWED_MODELS} is empty"),
        names => format!("{ALLOWED_MODELS} has {}", listed(names)),
    };
    Err(Error::ModelNotAllowed { asked, allowed })
}

fn listed(names: &[String]) -> String {
    let quoted = |name: &String| cynode_api::document::quote(name);
    let shown: Vec<String> = names.iter().take(SHOWN).map(quoted).collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        others => format!("{shown} and {others} more"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cut_to(asked: &[&str], allowed: &Value) -> Result<Vec<String>, String> {
        let mut inference = Inference {
            allowed_models: asked.iter().map(|name| (*name).to_owned()).collect(),
            source: None,
        };
        cut(&mut inference, &AllowedModels::new(names(allowed)))
            .map(|()| inference.allowed_models)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_job_keeps_the_models_that_are_allowed_and_is_refused_without_one() {
        let allowed = json!(["llama3.2", "qwen3:8b"]);
        assert_eq!(
            cut_to(&["gpt", "llama3.2:latest", "qwen3"], &allowed),
            Ok(vec!["llama3.2:latest".to_owned()])
        );
        let refused = cut_to(&["gpt\n"], &allowed).expect_err("none");
        assert!(
            refused.contains(r#"none of "gpt\u{a}""#)
                && refused.contains(r#""llama3.2", "qwen3:8b""#),
            "{refused}"
        );
    }

    #[test]
    fn a_value_that_is_no_list_of_names_allows_nothing() {
        for value in [
            json!(null),
            json!("llama3.2"),
            json!([]),
            json!([1, "", "a\nb"]),
        ] {
            let refused = cut_to(&["llama3.2"], &value).expect_err("none");
            assert!(refused.contains("is empty"), "{value}: {refused}");
        }
    }
}

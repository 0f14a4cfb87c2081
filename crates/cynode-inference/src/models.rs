//! The models that a sandbox may use.

use std::fmt::Write as _;

use cynode_api::document::quote;

use crate::{
    limits::MAX_SHOWN_MODELS,
    refusal::{Refusal, RefusalCode},
};

/// The list of allowed models, as the operator wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedModels(Vec<String>);

impl AllowedModels {
    #[must_use]
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        Self(names.into_iter().collect())
    }

    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// Finds the entry that allows a model. Requests are forwarded with the entry's name instead of
    /// the requested one, so that a server with other naming rules can't run another model.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&str> {
        let exact = self.0.iter().find(|allowed| *allowed == name);
        exact
            .or_else(|| self.0.iter().find(|allowed| same_model(allowed, name)))
            .map(String::as_str)
    }

    pub(crate) fn require(&self, name: &str) -> Result<&str, Refusal> {
        self.find(name).ok_or_else(|| self.refusal(name))
    }

    fn refusal(&self, name: &str) -> Refusal {
        let mut message = format!("the model {} is not allowed here; ", quote(name));
        if self.0.is_empty() {
            message.push_str("no model is");
        } else {
            let told: Vec<String> = self
                .0
                .iter()
                .take(MAX_SHOWN_MODELS)
                .map(|name| quote(name))
                .collect();
            message.push_str("allowed are ");
            message.push_str(&told.join(", "));
            if let Some(others @ 1..) = self.0.len().checked_sub(told.len()) {
                write!(message, " and {others} more").expect("writing to a string succeeds");
            }
        }
        Refusal::new(RefusalCode::ModelNotAllowed, message)
    }
}

/// Returns whether two names mean the same model by Ollama's rule: host, namespace and tag default
/// to `registry.ollama.ai`, `library` and `latest`. Names are case-sensitive.
#[must_use]
pub fn same_model(one: &str, other: &str) -> bool {
    let (one, other) = (parts(one), parts(other));
    !one.0.is_empty() && one == other
}

/// Splits a name into the name without default parts, and the tag.
fn parts(name: &str) -> (&str, &str) {
    // The host of a registry may contain a colon.
    let (base, tag) = match (name.rfind(':'), name.rfind('/')) {
        (Some(colon), slash) if slash.is_none_or(|slash| slash < colon) => {
            (&name[..colon], &name[colon + 1..])
        }
        _ => (name, "latest"),
    };
    let base = match base.strip_prefix("registry.ollama.ai/") {
        Some(path) if path.contains('/') => path,
        _ => base,
    };
    match base.strip_prefix("library/") {
        Some(model) if !model.contains('/') => (model, tag),
        _ => (base, tag),
    }
}

/// Returns whether the tag of a name suggests that Ollama runs the model on another host (`:cloud`,
/// `:…-cloud`). A hint only: the server itself reports a [`crate::Locality`].
#[must_use]
pub fn has_cloud_suffix(name: &str) -> bool {
    let name = name.trim().to_ascii_lowercase();
    name.rsplit_once(':').is_some_and(|(_, tag)| {
        let tag = tag.trim();
        !tag.contains('/') && (tag == "cloud" || tag.ends_with("-cloud"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_equal_by_the_defaults_of_ollama() {
        for (one, other) in [
            ("llama3.2", "llama3.2"),
            ("llama3.2", "llama3.2:latest"),
            ("library/llama3.2", "llama3.2"),
            ("registry.ollama.ai/library/llama3.2:latest", "llama3.2"),
            ("registry.ollama.ai/me/x:1", "me/x:1"),
            ("host:5000/ns/x", "host:5000/ns/x:latest"),
            ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ] {
            assert!(same_model(one, other), "{one} {other}");
            assert!(same_model(other, one), "{other} {one}");
        }
        for (one, other) in [
            ("", ""),
            ("", ":latest"),
            ("llama3.2", "llama3.2:1b"),
            ("llama3.2", "Llama3.2"),
            ("llama3.2", "llama3.2:LATEST"),
            ("llama3.2", "llama3.2 "),
            ("llama3.2", "llama3.2:"),
            ("llama3.2", "llama3.2:latest:latest"),
            ("llama3.2", "llama3.2:local"),
            ("llama3.2", "llama3.2@latest"),
            ("llama3.2", "other/llama3.2"),
            ("llama3.2", "library/library/llama3.2"),
            ("llama3.2", "registry.ollama.ai/llama3.2"),
            ("llama3.2", "registry.example.com/library/llama3.2"),
            ("llama3.2", "https://registry.ollama.ai/library/llama3.2"),
            ("gpt-oss:20b", "gpt-oss:20b-cloud"),
            ("gpt-oss", "gpt-oss:cloud"),
        ] {
            assert!(!same_model(one, other), "{one} {other}");
        }
    }

    #[test]
    fn the_name_on_the_list_is_the_one_that_counts() {
        let allowed =
            AllowedModels::new(["x:latest", "library/y", "x", "Org/Z"].map(str::to_owned));
        assert_eq!(allowed.find("x"), Some("x"));
        assert_eq!(allowed.find("x:latest"), Some("x:latest"));
        assert_eq!(allowed.find("y:latest"), Some("library/y"));
        assert_eq!(allowed.find("Org/Z"), Some("Org/Z"));
        assert_eq!(allowed.find("org/z"), None);
        assert_eq!(allowed.find(""), None);
        assert_eq!(AllowedModels::default().find("x"), None);
    }

    #[test]
    fn a_refusal_names_allowed_models_and_counts_the_others() {
        let names = |count: usize| AllowedModels::new((0..count).map(|index| format!("m{index}")));
        let message = |count| names(count).require("x\n").expect_err("refused").message;
        assert_eq!(
            message(0),
            r#"the model "x\u{a}" is not allowed here; no model is"#
        );
        assert!(message(2).ends_with(r#"allowed are "m0", "m1""#));
        assert!(message(MAX_SHOWN_MODELS).ends_with(r#""m15""#));
        assert!(message(MAX_SHOWN_MODELS + 2).ends_with(r#""m15" and 2 more"#));
    }

    #[test]
    fn the_tag_of_a_cloud_model_is_a_hint() {
        for name in [
            "gpt-oss:cloud",
            "gpt-oss:20b-cloud",
            "gpt-oss:20B-Cloud",
            "a/b:cloud ",
        ] {
            assert!(has_cloud_suffix(name), "{name}");
        }
        for name in [
            "gpt-oss",
            "cloud",
            "x-cloud",
            "cloud:latest",
            "x:clouds",
            "h:1-cloud/x",
        ] {
            assert!(!has_cloud_suffix(name), "{name}");
        }
    }
}

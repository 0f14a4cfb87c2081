//! The model server of this host.

use cynode_api::ModelServerKind;

use super::Check;
use crate::inference::{InferenceConfig, ServerCheck, probe};

const NAME: &str = "model server";

/// Checks the configured model server, or says how to use one.
pub(super) async fn check(config: &InferenceConfig) -> Check {
    let checked = probe(config).await;
    match (&config.url, checked) {
        (None, checked) => unconfigured(checked),
        (Some(url), None) => Check::problem(
            NAME,
            format!("{url} can't be asked"),
            "Correct worker.inference.url.",
        ),
        (Some(_), Some(checked)) => configured(config, &checked),
    }
}

fn unconfigured(checked: Option<ServerCheck>) -> Check {
    match checked {
        Some(ServerCheck { url, report, .. }) if report.kind.is_some() => Check::adapted(
            NAME,
            format!(
                "one answers at {url}, but sandboxes don't use it: set worker.inference.url = \
                 \"{url}\""
            ),
        ),
        _ => Check::ok(
            NAME,
            "none is configured; worker.inference.url gives sandboxes one",
        ),
    }
}

fn configured(config: &InferenceConfig, checked: &ServerCheck) -> Check {
    let ServerCheck {
        url,
        report,
        exposed,
    } = checked;
    if let Some(reason) = exposed {
        return if config.allow_beyond_loopback {
            let detail =
                format!("{url}: {reason}; worker.inference.allow_beyond_loopback allows it");
            Check::adapted(NAME, detail)
        } else {
            Check::problem(
                NAME,
                format!("{url} is not used: {reason}"),
                "Have it listen on loopback only (OLLAMA_HOST=127.0.0.1), or set \
                 worker.inference.allow_beyond_loopback = true.",
            )
        };
    }
    if let Some(problem) = &report.problem {
        return Check::problem(
            NAME,
            format!("{url}: {problem}"),
            "Start the model server, or correct worker.inference.url.",
        );
    }
    let kind = report.kind.map_or("unknown", ModelServerKind::as_str);
    let models = match report.models.as_slice() {
        [] => "no models".to_owned(),
        models => models.join(", "),
    };
    Check::ok(NAME, format!("{kind} at {url}: {models}"))
}

#[cfg(test)]
mod tests {
    use cynode_api::NodeInference;

    use super::*;
    use crate::host::Status;

    fn checked(exposed: Option<&str>, problem: Option<&str>) -> ServerCheck {
        ServerCheck {
            url: "http://127.0.0.1:11434".to_owned(),
            report: NodeInference {
                kind: Some(ModelServerKind::Ollama),
                models: vec!["llama3.2:latest".to_owned()],
                problem: problem.map(str::to_owned),
            },
            exposed: exposed.map(str::to_owned),
        }
    }

    #[test]
    fn a_server_that_others_can_reach_is_a_problem_unless_it_is_allowed_by_name() {
        let mut config = InferenceConfig::default();
        let found = configured(&config, &checked(None, None));
        assert_eq!(
            (found.status, found.detail.as_str()),
            (
                Status::Ok,
                "ollama at http://127.0.0.1:11434: llama3.2:latest"
            )
        );
        let exposed = checked(Some("it listens on 0.0.0.0"), None);
        let found = configured(&config, &exposed);
        assert_eq!(found.status, Status::Problem);
        assert!(
            found
                .fix
                .is_some_and(|fix| fix.contains("allow_beyond_loopback"))
        );
        config.allow_beyond_loopback = true;
        assert_eq!(configured(&config, &exposed).status, Status::Adapted);
        let away = checked(None, Some("it does not answer"));
        assert_eq!(configured(&config, &away).status, Status::Problem);
    }

    #[test]
    fn a_server_that_is_not_configured_is_offered() {
        assert_eq!(unconfigured(None).status, Status::Ok);
        let found = unconfigured(Some(checked(None, None)));
        assert_eq!(found.status, Status::Adapted);
        assert!(
            found.detail.contains("set worker.inference.url"),
            "{}",
            found.detail
        );
    }
}

//! `policy`.

use std::{
    io::{self, IsTerminal as _},
    path::Path,
    process::ExitCode,
};

use cynode_api::{
    API_VERSION, LimitsRequest, Policy as Object, PolicyPut, PolicyTest, PolicyVerdict,
};
use cynode_client::UserClient;
use serde_json::json;

use crate::{
    cli::{Format, Globals, Policy, PolicyTestArgs},
    connect,
    failure::{DENIED, Failure},
    output::{self, Colour},
    plane::{Outcome, done, list, moment},
    sanitize,
};

pub async fn run(globals: &Globals, command: Policy) -> Outcome {
    let client = connect::plane(globals)?;
    match command {
        Policy::List => {
            let policies = client.policies().await?;
            list(
                globals,
                &policies,
                ["POLICY", "RULES", "DEFAULT", "REVISION", "UPDATED", "BY"],
                |policy: &Object| {
                    let is_default = if policy.is_default { "yes" } else { "" };
                    let (rules, at) = (policy.rules.len().to_string(), moment(policy.updated_at));
                    [
                        policy.id.clone(),
                        rules,
                        is_default.to_owned(),
                        policy.revision.to_string(),
                        at,
                        policy.updated_by.clone(),
                    ]
                },
            )
        }
        Policy::Show { id } => show(globals, &client.policy(&id).await?),
        Policy::Put {
            id,
            file,
            if_revision,
        } => {
            let put = PolicyPut {
                version: Some(API_VERSION),
                text: text_of(&file)?,
                if_revision,
            };
            let policy = client.put_policy(&id, &put).await?;
            done(
                globals,
                &policy,
                &format!(
                    "policy {} has {} at revision {}",
                    policy.id,
                    rules(policy.rules.len()),
                    policy.revision
                ),
            )
        }
        Policy::Delete { id } => {
            client.delete_policy(&id).await?;
            done(
                globals,
                &json!({ "deleted": id }),
                &format!("deleted: {id}"),
            )
        }
        Policy::Test(args) => test(&client, globals, *args).await,
    }
}

fn rules(count: usize) -> String {
    if count == 1 {
        "1 rule".to_owned()
    } else {
        format!("{count} rules")
    }
}

fn text_of(file: &Path) -> Result<String, Failure> {
    let text = if file == Path::new("-") {
        io::read_to_string(io::stdin())
    } else {
        fs_err::read_to_string(file)
    };
    text.map_err(|error| Failure::usage(error.to_string()))
}

/// The text alone on stdout, so that it can be changed and put again; to a terminal with its control characters escaped.
fn show(globals: &Globals, policy: &Object) -> Outcome {
    if globals.output == Format::Json {
        output::json(policy)?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = policy.text.trim_end_matches('\n');
    if io::stdout().is_terminal() {
        output::line(text)?;
    } else {
        output::verbatim(text)?;
    }
    let rules: Vec<String> = policy
        .rules
        .iter()
        .map(|rule| format!("{} {}", rule.effect, rule.name))
        .collect();
    output::note(&sanitize::line(&format!(
        "revision {} by {} at {}: {}",
        policy.revision,
        policy.updated_by,
        moment(policy.updated_at),
        rules.join(", ")
    )));
    Ok(ExitCode::SUCCESS)
}

async fn test(client: &UserClient, globals: &Globals, args: PolicyTestArgs) -> Outcome {
    let question = PolicyTest {
        version: Some(API_VERSION),
        user: args.user,
        token_id: args.token,
        action: args.action,
        project_id: args.project,
        task_id: args.task,
        session_id: args.session,
        job_id: args.job,
        image: args.image,
        path: args.path,
        program: args.program,
        network: args.network,
        pty: args.pty,
        limits: Some(LimitsRequest {
            memory_bytes: args.memory,
            cpus: args.cpus,
            pids: args.pids,
            ..Default::default()
        })
        .filter(|limits| *limits != LimitsRequest::default()),
        token_kind: args.token_kind,
    };
    let verdict = client.test_policy(&question).await?;
    match globals.output {
        Format::Json => output::json(&verdict)?,
        Format::Table => {
            let (word, colour) = if verdict.allowed {
                ("allowed", Colour::Green)
            } else {
                ("denied", Colour::Red)
            };
            output::painted(word, colour, &sanitize::line(&by(&verdict)))?;
            for error in &verdict.errors {
                output::note(&sanitize::line(&format!("not evaluated: {error}")));
            }
        }
    }
    Ok(ended(&verdict))
}

/// A denial ends as a denied call does.
fn ended(verdict: &PolicyVerdict) -> ExitCode {
    if verdict.allowed {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(DENIED)
    }
}

fn by(verdict: &PolicyVerdict) -> String {
    match verdict.rules.as_slice() {
        [] if verdict.allowed => String::new(),
        [] => ": no rule permits it".to_owned(),
        rules => format!(" by {}", rules.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_names_its_rules_or_that_there_are_none() {
        let verdict = |allowed: bool, rules: &[&str]| PolicyVerdict {
            allowed,
            rules: rules.iter().map(|rule| (*rule).to_owned()).collect(),
            errors: Vec::new(),
        };
        assert_eq!(
            by(&verdict(true, &["default/owners"])),
            " by default/owners"
        );
        assert_eq!(by(&verdict(false, &["a", "b"])), " by a, b");
        assert_eq!(by(&verdict(false, &[])), ": no rule permits it");
    }
}

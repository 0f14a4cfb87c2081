//! `policy`: manages and tests policies.

use std::{
    io::{self, IsTerminal as _},
    path::Path,
    process::ExitCode,
};

use cynode_api::{
    API_VERSION, LimitsRequest, Policy as ApiPolicy, PolicyPut, PolicyTest, PolicyVerdict,
};
use cynode_client::UserClient;
use serde_json::json;

use crate::{
    cli::{Globals, OutputFormat, Policy, PolicyTestArgs},
    commands::{CommandResult, format_time, print_done, print_list},
    connect,
    failure::{DENIED, Failure},
    output::{self, Colour, TableStyle},
    resolve, sanitize,
};

pub async fn run(globals: &Globals, command: Policy) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Policy::List => {
            let policies = client.policies().await?;
            print_list(
                globals,
                TableStyle::new(false),
                &policies,
                ["POLICY", "RULES", "DEFAULT", "REVISION", "UPDATED", "BY"],
                |policy: &ApiPolicy| {
                    let is_default = if policy.is_default { "yes" } else { "" };
                    let (rules, at) = (
                        policy.rules.len().to_string(),
                        format_time(policy.updated_at),
                    );
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
        Policy::Show { id } => print_policy(globals, &client.policy(&id).await?),
        Policy::Put {
            id,
            file,
            if_revision,
        } => {
            let put = PolicyPut {
                version: Some(API_VERSION),
                text: read_text(&file)?,
                if_revision,
            };
            let policy = client.put_policy(&id, &put).await?;
            print_done(
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
            print_done(
                globals,
                &json!({ "deleted": id }),
                &format!("deleted policy {id}"),
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

fn read_text(file: &Path) -> Result<String, Failure> {
    let text = if file == Path::new("-") {
        io::read_to_string(io::stdin())
    } else {
        fs_err::read_to_string(file)
    };
    text.map_err(|error| Failure::usage(error.to_string()))
}

/// Prints only the text to stdout, so that it can be edited and stored again. Escapes control
/// characters on a terminal.
fn print_policy(globals: &Globals, policy: &ApiPolicy) -> CommandResult {
    if globals.output == OutputFormat::Json {
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
    output::message(&sanitize::line(&format!(
        "revision {} by {} at {}: {}",
        policy.revision,
        policy.updated_by,
        format_time(policy.updated_at),
        rules.join(", ")
    )));
    Ok(ExitCode::SUCCESS)
}

async fn test(client: &UserClient, globals: &Globals, args: PolicyTestArgs) -> CommandResult {
    let request = PolicyTest {
        version: Some(API_VERSION),
        user: resolve::optional(args.user.as_deref(), async |user| {
            resolve::user_text(client, user).await
        })
        .await?,
        token_id: resolve::optional(args.token.as_deref(), async |token| {
            resolve::token(client, token).await
        })
        .await?,
        action: args.action,
        project_id: resolve::optional(args.project.as_deref(), async |project| {
            resolve::project(client, project).await
        })
        .await?,
        task_id: resolve::optional(args.task.as_deref(), async |task| {
            resolve::task(client, task).await
        })
        .await?,
        session_id: resolve::optional(args.session.as_deref(), async |session| {
            resolve::session(client.sessions(), session).await
        })
        .await?,
        job_id: resolve::optional(args.job.as_deref(), async |job| {
            resolve::job(client, job).await
        })
        .await?,
        image: args.image,
        path: args.path,
        program: args.program,
        network: args.network,
        pty: args.pty,
        limits: Some(args.limits.request()).filter(|limits| *limits != LimitsRequest::default()),
        token_kind: args.token_kind,
    };
    let verdict = client.test_policy(&request).await?;
    match globals.output {
        OutputFormat::Json => output::json(&verdict)?,
        OutputFormat::Table => {
            let (word, colour) = if verdict.allowed {
                ("allowed", Colour::Green)
            } else {
                ("denied", Colour::Red)
            };
            output::line_with_colored_start(
                word,
                colour,
                &sanitize::line(&deciding_rules(&verdict)),
            )?;
            for error in &verdict.errors {
                output::message(&sanitize::line(&format!("evaluation error: {error}")));
            }
        }
    }
    Ok(exit_code(&verdict))
}

/// A denial has the exit code of a denied call.
fn exit_code(verdict: &PolicyVerdict) -> ExitCode {
    if verdict.allowed {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(DENIED)
    }
}

fn deciding_rules(verdict: &PolicyVerdict) -> String {
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
            deciding_rules(&verdict(true, &["default/owners"])),
            " by default/owners"
        );
        assert_eq!(deciding_rules(&verdict(false, &["a", "b"])), " by a, b");
        assert_eq!(deciding_rules(&verdict(false, &[])), ": no rule permits it");
    }
}

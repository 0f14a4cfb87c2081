//! A promotion as people see it: its commit, what it changes, each rule with its verdict, its
//! checks, and how it ends a command.

use std::process::ExitCode;

use cynode_api::{ErrorCode, Promotion, PromotionState, PromotionVerdict};
use serde_json::{Value, json};

use super::{CommandResult, api_name, format_time, print_object};
use crate::{
    cli::{Globals, OutputFormat},
    failure::{DENIED, Failure},
    output::{self, TableStyle},
};

/// The exit code of a command whose work somebody stopped.
const CANCELED: u8 = 130;

/// Prints a promotion, or the result of a dry run.
pub fn print(globals: &Globals, promotion: &Promotion, is_stored: bool) -> CommandResult {
    let optional = |text: &Option<String>| text.clone().unwrap_or_default();
    let reached = promotion.reached.map(|stage| api_name(&stage));
    let error = promotion
        .error
        .as_ref()
        .map(|error| format!("{}: {}", error.code, error.detail));
    let id = is_stored.then(|| promotion.id.to_string());
    let fields = [
        ("promotion", id.unwrap_or_default()),
        (
            "state",
            if is_stored {
                promotion.state.as_str().to_owned()
            } else {
                "dry run: nothing is stored or pushed".to_owned()
            },
        ),
        ("error", error.unwrap_or_default()),
        ("reached", reached.unwrap_or_default()),
        ("repository", promotion.repository.clone()),
        ("base", optional(&promotion.base)),
        ("commit", optional(&promotion.commit)),
        ("branch", promotion.branch.clone()),
        ("target", promotion.target.clone()),
        ("title", promotion.title.clone()),
        ("pull", optional(&promotion.pull_request)),
        ("approved by", optional(&promotion.approved_by)),
        ("task", promotion.task_id.to_string()),
        (
            "session",
            promotion
                .session_id
                .map(|id| id.to_string())
                .unwrap_or_default(),
        ),
        ("changeset", promotion.changeset.to_string()),
        ("created", format_time(promotion.created_at)),
        ("by", promotion.created_by.clone()),
    ];
    let printed = print_object(globals, promotion, &fields)?;
    if globals.output == OutputFormat::Table {
        print_tables(promotion)?;
    }
    Ok(printed)
}

fn print_tables(promotion: &Promotion) -> Result<(), Failure> {
    let style = TableStyle::new(false);
    if !promotion.files.is_empty() {
        output::line("")?;
        output::table(
            style,
            ["FILE", "CHANGE", "LINES", "SIZE", "MODE"],
            promotion.files.iter().map(|file| {
                [
                    file.path.clone(),
                    file.operation.clone(),
                    format!("+{} -{}", file.added_lines, file.removed_lines),
                    output::size(file.size),
                    file.mode.clone(),
                ]
            }),
        )?;
    }
    if !promotion.verdicts.is_empty() {
        output::line("")?;
        output::table(
            style,
            ["RULE", "VERDICT", "PATH", "REASON"],
            promotion.verdicts.iter().map(|verdict| {
                let word = if verdict.allowed {
                    "allowed"
                } else {
                    "refused"
                };
                [
                    verdict.rule.clone(),
                    word.to_owned(),
                    verdict.path.clone().unwrap_or_default(),
                    verdict.reason.clone(),
                ]
            }),
        )?;
    }
    if !promotion.checks.is_empty() {
        output::line("")?;
        output::table(
            style,
            ["CHECK", "STATE", "EXIT", "JOB"],
            promotion.checks.iter().map(|check| {
                [
                    check.name.clone(),
                    check.state.clone(),
                    check
                        .exit_code
                        .map(|code| code.to_string())
                        .unwrap_or_default(),
                    style.id(&check.job_id),
                ]
            }),
        )?;
    }
    Ok(())
}

/// How a promotion ends the command that waited for it.
pub fn outcome(promotion: &Promotion) -> CommandResult {
    let remedy = format!("See 'cynode promotion show {}'.", promotion.id);
    match promotion.state {
        PromotionState::Failed => Err(failure(promotion)),
        PromotionState::Rejected => {
            let detail = promotion.error.as_ref().map(|error| error.detail.clone());
            let detail = detail.unwrap_or_else(|| "a person rejected the promotion".to_owned());
            Err(Failure::new(DENIED, "rejected", detail).remedy(remedy))
        }
        PromotionState::Canceled => {
            output::message("cynode: the promotion was canceled");
            Ok(ExitCode::from(CANCELED))
        }
        PromotionState::AwaitingApproval => {
            output::message(&format!(
                "cynode: commit {} waits for a person: 'cynode promotion approve {}'",
                promotion.commit.as_deref().unwrap_or("-"),
                promotion.id
            ));
            Ok(ExitCode::SUCCESS)
        }
        PromotionState::Working | PromotionState::Checking | PromotionState::Done => {
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The outcome of a dry run: its verdicts decide.
pub fn dry_run_outcome(promotion: &Promotion) -> CommandResult {
    if promotion.error.is_some() {
        return Err(failure(promotion));
    }
    let refused: Vec<&PromotionVerdict> = promotion
        .verdicts
        .iter()
        .filter(|verdict| !verdict.allowed)
        .collect();
    let Some(first) = refused.first() else {
        return Ok(ExitCode::SUCCESS);
    };
    let more = match refused.len() {
        1 => String::new(),
        count => format!("; and {} more", count - 1),
    };
    let message = format!("the rule '{}' refuses: {}{more}", first.rule, first.reason);
    Err(
        Failure::new(DENIED, ErrorCode::ChangeRefused.as_str(), message)
            .remedy("Change what the rules refuse, or ask an administrator to allow it."),
    )
}

fn failure(promotion: &Promotion) -> Failure {
    let Some(error) = &promotion.error else {
        return Failure::internal("the promotion failed for an unknown reason");
    };
    let mut failure = Failure::of_code(&error.code, &error.detail);
    if failure.is(ErrorCode::ChangeRefused.as_str()) {
        failure.exit = DENIED;
    }
    let Some(conflict) = &error.conflict else {
        return failure;
    };
    let places = places(conflict);
    let failure = failure.with_extension("conflict", conflict.clone());
    if places.is_empty() {
        failure
    } else {
        failure.with_extension("violations", Value::Array(places))
    }
}

/// The hunks or verdicts of a conflict, as places with reasons.
fn places(conflict: &Value) -> Vec<Value> {
    let text = |item: &Value, name: &str| item[name].as_str().map(str::to_owned);
    let rejects = conflict["rejects"].as_array().into_iter().flatten();
    let verdicts = conflict["verdicts"].as_array().into_iter().flatten();
    rejects
        .chain(verdicts.filter(|verdict| verdict["allowed"] == false))
        .filter_map(|item| {
            let place = text(item, "path").or_else(|| text(item, "rule"))?;
            let place = match item["line"].as_u64() {
                Some(line) => format!("{place}:{line}"),
                None => place,
            };
            Some(json!({ "path": place, "message": text(item, "reason").unwrap_or_default() }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use cynode_api::{
        ArtifactId, ChangesetFormat, ProjectId, PromotionError, PromotionId, PromotionStage,
        RepositoryId, TaskId,
    };

    use super::*;
    use crate::failure::{INTERNAL, USAGE};

    fn promotion(state: PromotionState) -> Promotion {
        let now = time::OffsetDateTime::UNIX_EPOCH;
        Promotion {
            id: PromotionId::generate(),
            task_id: TaskId::generate(),
            project_id: ProjectId::generate(),
            repository_id: RepositoryId::generate(),
            repository: "shop".to_owned(),
            state,
            until: PromotionStage::Opened,
            reached: None,
            changeset: ArtifactId::generate(),
            changeset_sha256: String::new(),
            format: ChangesetFormat::Patch,
            session_id: None,
            base: None,
            target: "main".to_owned(),
            branch: "cynode/x/y".to_owned(),
            title: "Fix".to_owned(),
            message: "Fix".to_owned(),
            body: None,
            commit: Some("c".repeat(40)),
            pull_request: None,
            files: Vec::new(),
            verdicts: Vec::new(),
            checks: Vec::new(),
            approved_by: None,
            error: None,
            created_by: "admin".to_owned(),
            created_at: now,
            updated_at: now,
        }
    }

    #[test]
    fn a_promotion_ends_its_command_with_the_code_of_its_end() {
        for (state, exit) in [
            (PromotionState::Done, Ok(0)),
            (PromotionState::AwaitingApproval, Ok(0)),
            (PromotionState::Canceled, Ok(CANCELED)),
            (PromotionState::Rejected, Err(DENIED)),
            (PromotionState::Failed, Err(INTERNAL)),
        ] {
            let found = outcome(&promotion(state)).map_err(|failure| failure.exit);
            assert_eq!(found, exit.map(ExitCode::from), "{state:?}");
        }
        for (code, exit) in [
            (ErrorCode::DeniedByPolicy.as_str(), DENIED),
            (ErrorCode::ChangeRefused.as_str(), DENIED),
            (ErrorCode::PatchRejected.as_str(), USAGE),
            ("from_the_future", INTERNAL),
        ] {
            let mut failed = promotion(PromotionState::Failed);
            failed.error = Some(PromotionError {
                code: code.to_owned(),
                detail: "no".to_owned(),
                conflict: Some(json!({"rejects": [{"path": "a", "line": 3, "reason": "context"}]})),
            });
            let failure = outcome(&failed).expect_err(code);
            assert_eq!((failure.exit, failure.code()), (exit, code));
            assert_eq!(
                failure.violations().collect::<Vec<_>>(),
                [("a:3", "context")]
            );
        }
    }

    #[test]
    fn a_dry_run_is_refused_by_any_verdict() {
        let mut checked = promotion(PromotionState::Done);
        let verdict = |allowed| PromotionVerdict {
            rule: "paths".to_owned(),
            allowed,
            path: None,
            reason: "x".to_owned(),
        };
        checked.verdicts = vec![verdict(true)];
        assert!(dry_run_outcome(&checked).is_ok());
        checked.verdicts.push(verdict(false));
        assert_eq!(
            dry_run_outcome(&checked).map_err(|failure| failure.exit),
            Err(DENIED)
        );
    }
}

//! Errors of operations as problems.

use cynode_api::ErrorCode;
use cynode_service::ApiError;
use serde_json::json;

use crate::git::{
    change::{ChangeError, RuleError},
    command::GitError,
    forge::{ForgeError, ForgeUrlError},
    mirror::{RepositoryError, remote_problem},
    push::PushError,
};

pub(super) fn repository(error: RepositoryError) -> ApiError {
    let detail = error.to_string();
    let code = match error {
        RepositoryError::RefNotFound(_) => ErrorCode::RefNotFound,
        RepositoryError::NotAdvertised(_) => ErrorCode::NotAdvertised,
        RepositoryError::Unreachable(_) => ErrorCode::RepositoryUnreachable,
        RepositoryError::Refused(_) => ErrorCode::ForgeRefused,
        RepositoryError::TooLarge(_) => ErrorCode::TooLarge,
        RepositoryError::Unusable(_) => ErrorCode::SeedUnusable,
        RepositoryError::Git(error) => return git(&error),
        RepositoryError::Output(_) => ErrorCode::Internal,
    };
    ApiError::new(code, detail)
}

/// A command on objects. What git printed may quote a repository, so it stays out of the answer.
fn git(error: &GitError) -> ApiError {
    match error {
        GitError::Exit { command, code, .. } => ApiError::new(
            ErrorCode::Internal,
            format!("git {command} ended with code {code}"),
        ),
        GitError::Killed { .. } | GitError::TooMuchOutput { .. } => {
            ApiError::new(ErrorCode::TooLarge, error.to_string())
        }
        GitError::Timeout { .. } | GitError::Unavailable(_) => {
            ApiError::new(ErrorCode::Unavailable, error.to_string())
        }
    }
}

pub(super) fn change(error: ChangeError) -> ApiError {
    match error {
        ChangeError::Invalid(reason) => ApiError::invalid(format!("changeset: {reason}")),
        ChangeError::TooLarge(reason) => ApiError::new(ErrorCode::TooLarge, reason),
        ChangeError::Conflict(conflict) => {
            let detail = format!(
                "the changeset does not apply to {} in {} places",
                conflict.base,
                conflict.rejects.len()
            );
            ApiError::new(ErrorCode::PatchRejected, detail)
                .with("base", conflict.base.clone())
                .with("rejects", json!(conflict.rejects))
                .with("truncated", conflict.truncated)
        }
        ChangeError::Refused(verdicts) => {
            let detail = "the changeset has paths that are never promoted";
            ApiError::new(ErrorCode::ChangeRefused, detail).with("verdicts", json!(verdicts))
        }
        ChangeError::Empty => ApiError::invalid("changeset: it changes nothing"),
        ChangeError::ForeignCommit(commit) => ApiError::new(
            ErrorCode::ChangeRefused,
            format!("{commit} is not a commit that was built for this promotion and base"),
        ),
        ChangeError::Git(error) => git(&error),
        ChangeError::Output(error) => ApiError::new(ErrorCode::Internal, error.to_string()),
    }
}

pub(super) fn rules(error: &RuleError) -> ApiError {
    ApiError::invalid(format!("the repository's rules: {error}"))
}

pub(super) fn push(error: PushError) -> ApiError {
    match error {
        PushError::BranchExists { current } => ApiError::new(
            ErrorCode::BranchExists,
            format!("the branch is at {current}, which this promotion did not push"),
        )
        .with("current", current.to_string()),
        PushError::Rejected(error) => match remote_problem(error) {
            RepositoryError::Unreachable(_) => {
                ApiError::new(ErrorCode::ForgeRefused, "the remote refused the push")
            }
            other => repository(other),
        },
        PushError::Unreachable(error) => repository(remote_problem(error)),
        PushError::Output(error) => ApiError::new(ErrorCode::Internal, error.to_string()),
    }
}

pub(super) fn forge_url(error: &ForgeUrlError) -> ApiError {
    ApiError::new(ErrorCode::ForgeRefused, error.to_string())
}

pub(super) fn forge(error: &ForgeError) -> ApiError {
    let code = match error {
        ForgeError::Unsupported
        | ForgeError::Unauthorized(_)
        | ForgeError::NotFound
        | ForgeError::Validation(_)
        | ForgeError::Redirected => ErrorCode::ForgeRefused,
        ForgeError::ForeignCredential => ErrorCode::CredentialUnusable,
        ForgeError::RateLimited { .. }
        | ForgeError::Unreachable(_)
        | ForgeError::Answer(_)
        | ForgeError::Client(_) => ErrorCode::RepositoryUnreachable,
    };
    ApiError::new(code, error.to_string())
}

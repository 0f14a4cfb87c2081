//! How callers see the errors of the layers below: their codes, texts and remedies.

use axum::response::{IntoResponse, Response};
use cynode_api::{ErrorCode, Problem};
use cynode_service::ApiError;

use crate::{
    audit, blobs,
    blobs::StageError,
    db::{self, Missing, QuotaExceeded},
    egress,
    fleet::{self, CallError},
    git_workspaces, jobs, output, placement, policies, promotions, sessions,
};

impl From<db::Error> for ApiError {
    fn from(error: db::Error) -> Self {
        use db::Error;
        let code = match &error {
            Error::Unavailable => ErrorCode::StoreUnavailable,
            Error::Statement | Error::Undecodable(_) => ErrorCode::Internal,
            Error::NotFound(Missing::Session(_)) => ErrorCode::SessionNotFound,
            Error::NotFound(Missing::Job(_)) => ErrorCode::JobNotFound,
            Error::NotFound(_) => ErrorCode::NotFound,
            Error::DanglingReference | Error::CursorAhead { .. } => ErrorCode::InvalidRequest,
            Error::Duplicate | Error::ImageExists => ErrorCode::AlreadyExists,
            Error::NameTaken => ErrorCode::NameInUse,
            Error::RepositoryInUse { .. } => ErrorCode::RepositoryInUse,
            Error::TooManyRepositories => ErrorCode::TooLarge,
            Error::ImageInUse { .. } => ErrorCode::ImageInUse,
            Error::TokenRevoked(_) => ErrorCode::TokenRevoked,
            Error::ImageSeeded => {
                return Problem::new(ErrorCode::ImageInUse, error.to_string())
                    .with_remedy("Deny it instead ('cynode image deny').")
                    .into();
            }
            Error::ImageNameTaken { .. } => {
                return Problem::new(ErrorCode::AlreadyExists, error.to_string())
                    .with_remedy(
                        "Name the image by its whole reference, with registry and repository; \
                         an administrator can add a version to an image.",
                    )
                    .into();
            }
            Error::StaleRevision { .. } | Error::StalePolicy { .. } => {
                ErrorCode::PreconditionFailed
            }
            Error::CursorExpired { .. } => ErrorCode::CursorExpired,
            Error::Quota(quota) => return quota.clone().into(),
            Error::Blob(blob) => return blob.clone().into(),
        };
        Self::new(code, error.to_string())
    }
}

impl From<QuotaExceeded> for ApiError {
    fn from(error: QuotaExceeded) -> Self {
        let problem = Problem::new(ErrorCode::QuotaExceeded, error.to_string());
        match error {
            QuotaExceeded::Sandbox { max, field, .. } => problem
                .with_remedy(format!(
                    "Ask for at most {max} in limits.{field}, \
                     or have an administrator raise the quota."
                ))
                .into(),
            QuotaExceeded::Total { .. } => problem.into(),
        }
    }
}

impl From<blobs::Error> for ApiError {
    fn from(error: blobs::Error) -> Self {
        use blobs::Error;
        let code = match &error {
            Error::Unavailable => ErrorCode::StoreUnavailable,
            Error::NotFound => ErrorCode::NotFound,
            Error::TooLarge { .. } => ErrorCode::TooLarge,
            Error::HashMismatch { .. } => ErrorCode::PreconditionFailed,
            Error::NoSpace { .. } => ErrorCode::NoSpace,
        };
        Self::new(code, error.to_string())
    }
}

impl<E: Into<Self>> From<StageError<E>> for ApiError {
    fn from(error: StageError<E>) -> Self {
        match error {
            StageError::Store(error) => error.into(),
            StageError::Source(error) => error.into(),
        }
    }
}

impl From<fleet::Error> for ApiError {
    fn from(error: fleet::Error) -> Self {
        match error {
            fleet::Error::Db(error) => error.into(),
            fleet::Error::Address { .. } => {
                Self::new(ErrorCode::NodeUnreachable, error.to_string())
            }
        }
    }
}

impl From<CallError> for ApiError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(problem) => (*problem).into(),
            CallError::NotSent(_) | CallError::Unknown(_) => {
                Self::new(ErrorCode::NodeUnreachable, error.to_string())
            }
        }
    }
}

impl From<policies::Error> for ApiError {
    fn from(error: policies::Error) -> Self {
        use policies::Error;
        let message = error.to_string();
        match error {
            Error::Db(error) => error.into(),
            Error::Invalid(flaws) => {
                Self::new(ErrorCode::PolicyInvalid, message).with("flaws", flaws)
            }
            Error::LocksOut { .. } => Self::new(ErrorCode::PolicyInvalid, message),
        }
    }
}

impl From<placement::Error> for ApiError {
    fn from(error: placement::Error) -> Self {
        use placement::Error;
        let code = match error {
            Error::Db(error) => return error.into(),
            Error::Denied(denial) => return (*denial).into(),
            Error::ImageNotAllowed { .. } | Error::ImageUnpinned { .. } => {
                ErrorCode::ImageNotAllowed
            }
            Error::ImageNotCompatible { .. } => ErrorCode::ImageNotCompatible,
            Error::ImagePending { .. } => ErrorCode::ImagePending,
            Error::WorkspaceNotFound(_) => ErrorCode::WorkspaceNotFound,
            Error::WorkspaceNodeLimit { .. } | Error::LimitUnenforceable(_) => {
                ErrorCode::LimitUnenforceable
            }
            Error::WorkspaceNodeLabel { .. } | Error::NoNode(_) => ErrorCode::NoCapacity,
            Error::WorkspaceNodeOutdated { .. } => ErrorCode::AgentOutdated,
            Error::WorkspaceNodeModels { .. } => ErrorCode::InferenceUnavailable,
        };
        let problem = Problem::new(code, error.to_string());
        match error.remedy() {
            Some(remedy) => problem.with_remedy(remedy).into(),
            None => problem.into(),
        }
    }
}

impl From<sessions::Error> for ApiError {
    fn from(error: sessions::Error) -> Self {
        use sessions::Error;
        let code = match error {
            Error::Db(error) => return error.into(),
            Error::Fleet(error) => return error.into(),
            Error::Call(error) => return error.into(),
            Error::Placement(error) => return error.into(),
            Error::Seed(error) => return error.into(),
            Error::CreationPending { session_id, call } => {
                return Self::from(call).with_remedy(format!(
                    "Creation continues when the node answers: show session {session_id}, \
                     or repeat the request with it as session_id."
                ));
            }
            Error::IdInUse(_) => ErrorCode::SessionIdInUse,
            Error::NameInUse(_) => ErrorCode::NameInUse,
            Error::WorkspaceDeleted(_) => ErrorCode::WorkspaceNotFound,
            Error::Gone => ErrorCode::SessionNotFound,
            Error::Interrupted => ErrorCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}

impl From<jobs::Error> for ApiError {
    fn from(error: jobs::Error) -> Self {
        use jobs::Error;
        let code = match error {
            Error::Db(error) => return error.into(),
            Error::Placement(error) => return error.into(),
            Error::Seed(error) => return error.into(),
            Error::Invalid(violations) => return super::job_body::problem(&violations),
            Error::Refused(problem) => return (*problem).into(),
            Error::TooLarge(_) => ErrorCode::TooLarge,
            Error::ModelNotAllowed { .. } => ErrorCode::ModelNotAllowed,
            Error::IdInUse(_) => ErrorCode::JobIdInUse,
            Error::TokenInvalid => ErrorCode::Unauthorized,
        };
        Self::new(code, error.to_string())
    }
}

impl From<egress::Error> for ApiError {
    fn from(error: egress::Error) -> Self {
        use egress::Error;
        let detail = error.to_string();
        match error {
            Error::Db(error) => error.into(),
            // An answer to the orchestrator's own token says nothing about the caller's.
            Error::Refused(problem) if problem.is(ErrorCode::Unauthorized) => Self::new(
                ErrorCode::Unavailable,
                "the git role does not take the token",
            )
            .with_remedy("Compare orchestrator.egress_git_token_file with the role's token."),
            Error::Refused(problem) => (*problem).into(),
            Error::Sandbox => Self::new(ErrorCode::Forbidden, detail),
            Error::NotConfigured => Self::new(ErrorCode::Unavailable, detail).with_remedy(
                "Start 'cynode egress --role git', and set orchestrator.egress_git_url; \
                 'cynode up' does both.",
            ),
            Error::Token(_) | Error::Setup(_) | Error::Unreachable(_) => {
                Self::new(ErrorCode::Unavailable, detail)
                    .with_remedy("Start 'cynode egress --role git', then try again.")
            }
            Error::Answer(_) => Self::new(ErrorCode::Internal, detail),
        }
    }
}

impl From<git_workspaces::Error> for ApiError {
    fn from(error: git_workspaces::Error) -> Self {
        use git_workspaces::Error;
        let code = match error {
            Error::Db(error) => return error.into(),
            Error::Role(error) => return error.into(),
            Error::Refused(problem) => return (*problem).into(),
            Error::NoProject(_) | Error::Ambiguous(_) => ErrorCode::InvalidRequest,
            Error::Gone => ErrorCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}

impl From<promotions::Error> for ApiError {
    fn from(error: promotions::Error) -> Self {
        use promotions::Error;
        let code = match error {
            Error::Db(error) => return error.into(),
            Error::Blob(error) => return error.into(),
            Error::Role(error) => return error.into(),
            Error::NoBase => {
                return Self::invalid(error.to_string()).with_remedy(
                    "Export from a session that was seeded from the repository, or name the \
                     commit as base.",
                );
            }
            Error::NoProject(_) | Error::Invalid(_) => ErrorCode::InvalidRequest,
            Error::TooLarge { .. } => ErrorCode::TooLarge,
            Error::ChangesetChanged => ErrorCode::PreconditionFailed,
            Error::NotWaiting(_) => ErrorCode::PromotionNotWaiting,
            Error::OtherCommit(_) => ErrorCode::ApprovalStale,
            Error::TokenInvalid => ErrorCode::Unauthorized,
        };
        Self::new(code, error.to_string())
    }
}

impl From<output::Error> for ApiError {
    fn from(error: output::Error) -> Self {
        match error {
            output::Error::Call(error) => error.into(),
            output::Error::Store(error) => error.into(),
            output::Error::Encode(error) => Self::new(ErrorCode::Internal, error.to_string()),
        }
    }
}

impl From<audit::Error> for ApiError {
    fn from(error: audit::Error) -> Self {
        use audit::Error;
        let code = match error {
            Error::Db(error) => return error.into(),
            Error::Fleet(error) => return error.into(),
            Error::Unavailable | Error::WriterBehind => ErrorCode::StoreUnavailable,
            Error::Unaudited
            | Error::CheckpointsUnwritable
            | Error::CheckpointsUnreadable
            | Error::Interrupted => ErrorCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}

impl IntoResponse for db::Error {
    fn into_response(self) -> Response {
        ApiError::from(self).into_response()
    }
}

impl IntoResponse for audit::Error {
    fn into_response(self) -> Response {
        ApiError::from(self).into_response()
    }
}

//! Failures of stages: which are tried again, and how a promotion shows the last one.

use cynode_api::{ErrorCode, PromotionError};
use serde_json::{Value, json};

use super::Error;
use crate::{
    checks, egress, git_workspaces,
    promotions::{self, promotion_error},
};

/// The longest JSON of what an error adds, such as rejected hunks.
pub(super) const MAX_CONFLICT_BYTES: usize = 256 * 1024;

/// Why a stage is not done.
#[derive(Debug)]
pub(super) enum StageFailure {
    /// It is tried again.
    Transient(PromotionError),
    /// The promotion fails.
    Final(PromotionError),
    /// The database failed: nothing can be stored, and the lease expires.
    Unstored(Error),
}

impl From<crate::db::Error> for StageFailure {
    fn from(error: crate::db::Error) -> Self {
        Self::Unstored(error.into())
    }
}

impl From<egress::Error> for StageFailure {
    fn from(error: egress::Error) -> Self {
        let is_transient = error.is_transient();
        let error = match error {
            egress::Error::Db(error) => return error.into(),
            egress::Error::Refused(problem) => promotion_error(*problem),
            error => failed(ErrorCode::Unavailable, error.to_string()),
        };
        if is_transient {
            Self::Transient(error)
        } else {
            Self::Final(error)
        }
    }
}

impl From<promotions::Error> for StageFailure {
    fn from(error: promotions::Error) -> Self {
        match error {
            promotions::Error::Db(error) => error.into(),
            promotions::Error::Role(error) => error.into(),
            promotions::Error::Blob(crate::blobs::Error::Unavailable) => {
                Self::Transient(failed(ErrorCode::StoreUnavailable, error.to_string()))
            }
            promotions::Error::Blob(_) => {
                Self::Final(failed(ErrorCode::NotFound, "the changeset is gone"))
            }
            error => Self::Final(failed(ErrorCode::PreconditionFailed, error.to_string())),
        }
    }
}

impl From<git_workspaces::Error> for StageFailure {
    fn from(error: git_workspaces::Error) -> Self {
        match error {
            git_workspaces::Error::Db(error) => error.into(),
            git_workspaces::Error::Role(error) => error.into(),
            git_workspaces::Error::Refused(problem) if problem.status >= 500 => {
                Self::Transient(promotion_error(*problem))
            }
            git_workspaces::Error::Refused(problem) => Self::Final(promotion_error(*problem)),
            error => Self::Final(failed(ErrorCode::NotFound, error.to_string())),
        }
    }
}

impl From<checks::Error> for StageFailure {
    fn from(error: checks::Error) -> Self {
        match error {
            checks::Error::Db(error @ crate::db::Error::Quota(_)) => {
                Self::Transient(failed(ErrorCode::QuotaExceeded, error.to_string()))
            }
            checks::Error::Db(error) => error.into(),
            checks::Error::Seed(error) => error.into(),
            checks::Error::ImageNotAllowed(_) => {
                Self::Final(failed(ErrorCode::ImageNotAllowed, error.to_string()))
            }
        }
    }
}

pub(super) fn failed(code: ErrorCode, detail: impl Into<String>) -> PromotionError {
    PromotionError {
        code: code.as_str().to_owned(),
        detail: detail.into(),
        conflict: None,
    }
}

/// Whether the changeset does not fit its base.
pub(super) fn is_conflict(code: &str) -> bool {
    [
        ErrorCode::PatchRejected.as_str(),
        ErrorCode::EditRejected.as_str(),
        ErrorCode::BaseStale.as_str(),
    ]
    .contains(&code)
}

pub(super) fn with_base(
    error: PromotionError,
    base: Option<&str>,
    current: &str,
) -> PromotionError {
    if base == Some(current) {
        return error;
    }
    let mut conflict = match error.conflict {
        Some(Value::Object(members)) => members,
        Some(other) => serde_json::Map::from_iter([("conflict".to_owned(), other)]),
        None => serde_json::Map::new(),
    };
    conflict.insert("base".to_owned(), json!(base));
    conflict.insert("current_base".to_owned(), json!(current));
    PromotionError {
        detail: format!("{}; the target is at {current} now", error.detail),
        conflict: Some(Value::Object(conflict)),
        ..error
    }
}

/// Drops what is too long to be stored with the promotion.
pub(super) fn bounded(error: PromotionError) -> PromotionError {
    let is_short = |conflict: &Value| conflict.to_string().len() <= MAX_CONFLICT_BYTES;
    PromotionError {
        conflict: error.conflict.filter(is_short),
        ..error
    }
}

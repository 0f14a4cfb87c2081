//! The stages of a promotion, and the decisions of persons between them.

use cynode_api::{ForgeKind, PromotionError, PromotionStage, PromotionState, Repository};

use super::{APPROVAL_INTERVAL, Next, end};
use crate::{
    db::PromotionRow,
    promotions::{Approval, Decision},
};

/// The stages that follow one another. A stage that has nothing to do is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextStage {
    Build,
    StartOver,
    Check,
    Approve,
    Push,
    Open,
    End,
}

/// The stage that a promotion is at.
pub(super) fn stage(row: &PromotionRow, repository: &Repository) -> NextStage {
    let promotion = &row.promotion;
    let (until, reached) = (promotion.until, promotion.reached);
    if promotion.commit.is_none() {
        return NextStage::Build;
    }
    if reached >= Some(until) {
        return NextStage::End;
    }
    if reached >= Some(PromotionStage::Pushed) {
        return if repository.provider == ForgeKind::Git {
            NextStage::End
        } else {
            NextStage::Open
        };
    }
    if row.progress.revision != Some(repository.revision) {
        return NextStage::StartOver;
    }
    if !repository.checks.is_empty() && row.progress.checked != promotion.commit {
        return NextStage::Check;
    }
    if repository.rules.require_approval && !row.is_approved() {
        return NextStage::Approve;
    }
    NextStage::Push
}

/// Applies a person's decision, if there is one about what would be pushed now.
pub(super) fn decide(row: &mut PromotionRow) -> Next {
    row.promotion.error = None;
    let counts = |decision: &Decision| {
        Some(&decision.commit) == row.promotion.commit.as_ref()
            && decision.base == row.promotion.base
            && decision.revision == row.progress.revision
    };
    let Some(decision) = row.decision.clone().filter(counts) else {
        row.promotion.state = PromotionState::AwaitingApproval;
        row.promotion.approved_by = None;
        return Next::After(APPROVAL_INTERVAL);
    };
    if !decision.approves {
        let reason = decision
            .reason
            .map_or_else(String::new, |reason| format!(": {reason}"));
        end(row, PromotionState::Rejected);
        row.promotion.error = Some(PromotionError {
            code: "rejected".to_owned(),
            detail: format!("rejected by {}{reason}", decision.by),
            conflict: None,
        });
        return Next::End;
    }
    row.promotion.state = PromotionState::Working;
    row.promotion.approved_by = Some(decision.by.clone());
    row.progress.approval = Some(Approval {
        commit: decision.commit,
        base: decision.base,
        revision: decision.revision,
        by: decision.by,
    });
    Next::Now
}

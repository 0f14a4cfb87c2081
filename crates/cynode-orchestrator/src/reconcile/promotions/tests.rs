//! Stages, decisions and errors, without a role.

use cynode_api::{
    ArtifactId, ChangesetFormat, EgressPrincipal, ForgeKind, ProjectId, Promotion, PromotionError,
    PromotionId, PromotionStage, PromotionState, Repository, RepositoryId, RepositoryRules, TaskId,
};
use serde_json::json;
use time::OffsetDateTime;

use super::{
    Next, NextStage, bounded, decide, failure::MAX_CONFLICT_BYTES, is_conflict, pause, stage,
    with_base,
};
use crate::{
    db::{PromotionLease, PromotionRow},
    promotions::{Decision, Progress},
};

fn repository(rules: RepositoryRules, checks: usize) -> Repository {
    let check = cynode_api::RepositoryCheck {
        name: "test".to_owned(),
        argv: vec!["true".to_owned()],
        image_ref: None,
        timeout_seconds: None,
    };
    Repository {
        id: RepositoryId::generate(),
        project_id: ProjectId::generate(),
        name: "site".to_owned(),
        provider: ForgeKind::Github,
        url: String::new(),
        api_url: None,
        credential_id: None,
        default_branch: None,
        ca: None,
        addresses: Vec::new(),
        rules,
        checks: vec![check; checks],
        revision: 7,
        created_by: String::new(),
        created_at: OffsetDateTime::UNIX_EPOCH,
    }
}

fn row() -> PromotionRow {
    let promotion = Promotion {
        id: PromotionId::generate(),
        task_id: TaskId::generate(),
        project_id: ProjectId::generate(),
        repository_id: RepositoryId::generate(),
        repository: "site".to_owned(),
        state: PromotionState::Working,
        until: PromotionStage::Opened,
        reached: None,
        changeset: ArtifactId::generate(),
        changeset_sha256: String::new(),
        format: ChangesetFormat::Patch,
        session_id: None,
        base: Some("b".repeat(40)),
        target: "main".to_owned(),
        branch: String::new(),
        title: String::new(),
        message: String::new(),
        body: None,
        commit: None,
        pull_request: None,
        files: Vec::new(),
        verdicts: Vec::new(),
        checks: Vec::new(),
        approved_by: None,
        error: None,
        created_by: String::new(),
        created_at: OffsetDateTime::UNIX_EPOCH,
        updated_at: OffsetDateTime::UNIX_EPOCH,
    };
    PromotionRow {
        promotion,
        progress: Progress {
            principal: EgressPrincipal::User {
                id: uuid::Uuid::nil(),
                name: String::new(),
                admin: false,
                groups: Vec::new(),
            },
            at: 0,
            author: String::new(),
            round: 0,
            revision: None,
            checked: None,
            approval: None,
        },
        decision: None,
        canceled_by: None,
        attempts: 0,
        owner_id: cynode_api::UserId::generate(),
        lease: PromotionLease::for_tests(),
    }
}

fn committed() -> PromotionRow {
    let mut row = row();
    row.promotion.commit = Some("c".repeat(40));
    row.promotion.reached = Some(PromotionStage::Committed);
    row.progress.revision = Some(7);
    row
}

fn decision(row: &PromotionRow, approves: bool) -> Decision {
    Decision {
        approves,
        commit: row.promotion.commit.clone().unwrap_or_default(),
        base: row.promotion.base.clone(),
        revision: row.progress.revision,
        by: "ann".to_owned(),
        reason: None,
    }
}

#[test]
fn stages_follow_one_another_and_end_where_the_request_says() {
    let plain = repository(RepositoryRules::default(), 0);
    assert_eq!(stage(&row(), &plain), NextStage::Build);
    let mut row = committed();
    assert_eq!(stage(&row, &plain), NextStage::Push);
    for until in [PromotionStage::Applied, PromotionStage::Committed] {
        row.promotion.until = until;
        assert_eq!(stage(&row, &plain), NextStage::End);
    }
    row.promotion.until = PromotionStage::Pushed;
    row.promotion.reached = Some(PromotionStage::Pushed);
    assert_eq!(stage(&row, &plain), NextStage::End);
    row.promotion.until = PromotionStage::Opened;
    assert_eq!(stage(&row, &plain), NextStage::Open);
    let git = Repository {
        provider: ForgeKind::Git,
        ..plain.clone()
    };
    assert_eq!(stage(&row, &git), NextStage::End);
    row.promotion.reached = Some(PromotionStage::Opened);
    assert_eq!(stage(&row, &plain), NextStage::End);
}

#[test]
fn nothing_is_pushed_before_its_own_commit_passed_and_was_approved() {
    let rules = RepositoryRules {
        require_approval: true,
        ..RepositoryRules::default()
    };
    let strict = repository(rules, 1);
    let mut row = committed();
    assert_eq!(stage(&row, &strict), NextStage::Check);
    row.progress.checked = Some("d".repeat(40));
    assert_eq!(stage(&row, &strict), NextStage::Check);
    row.progress.checked.clone_from(&row.promotion.commit);
    assert_eq!(stage(&row, &strict), NextStage::Approve);
    assert!(matches!(decide(&mut row), Next::After(_)));
    assert_eq!(row.promotion.state, PromotionState::AwaitingApproval);
    row.decision = Some(decision(&row, true));
    assert!(matches!(decide(&mut row), Next::Now));
    assert_eq!(stage(&row, &strict), NextStage::Push);
    assert_eq!(row.promotion.approved_by.as_deref(), Some("ann"));
    // Other rules, another base, another commit: the approval lapses.
    let changed = Repository {
        revision: 8,
        ..strict.clone()
    };
    assert_eq!(stage(&row, &changed), NextStage::StartOver);
    let mut other = row.clone();
    other.promotion.base = Some("e".repeat(40));
    assert_eq!(stage(&other, &strict), NextStage::Approve);
    assert!(matches!(decide(&mut other), Next::After(_)));
    row.start_over();
    assert_eq!(stage(&row, &strict), NextStage::Build);
    assert!(row.progress.approval.is_none() && row.progress.checked.is_none());
}

#[test]
fn a_rejection_ends_a_promotion() {
    let mut row = committed();
    row.decision = Some(decision(&row, false));
    assert!(matches!(decide(&mut row), Next::End));
    assert_eq!(row.promotion.state, PromotionState::Rejected);
}

#[test]
fn pauses_double_up_to_the_longest() {
    let pauses: Vec<u64> = [1, 2, 3, 7, 20].map(|n| pause(n).as_secs()).to_vec();
    assert_eq!(pauses, [1, 2, 4, 60, 60]);
}

#[test]
fn a_conflict_offers_the_newer_base() {
    let error = PromotionError {
        code: "patch_rejected".to_owned(),
        detail: "no".to_owned(),
        conflict: Some(json!({"rejects": []})),
    };
    assert!(is_conflict(&error.code) && !is_conflict("denied_by_policy"));
    let offered = with_base(error.clone(), Some("a"), "b");
    assert_eq!(
        offered.conflict,
        Some(json!({"rejects": [], "base": "a", "current_base": "b"}))
    );
    assert_eq!(with_base(error.clone(), Some("b"), "b"), error);
    let long = PromotionError {
        conflict: Some(json!("x".repeat(MAX_CONFLICT_BYTES))),
        ..error
    };
    assert_eq!(bounded(long).conflict, None);
}

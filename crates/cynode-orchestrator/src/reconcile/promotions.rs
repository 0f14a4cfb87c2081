//! Promotions: built, checked, approved, pushed, opened. One stage per step.
//!
//! Invariants: each stage can be repeated, and is, when an orchestrator dies during it. A stage is
//! done once it is stored. The changeset is compared with its hash before every stage. Checks and
//! approvals count only for the commit, base and rules that they were given for.

use std::time::Duration;

use cynode_api::{
    API_VERSION, ErrorCode, ForgeKind, GitPull, GitPush, PromotionError, PromotionStage,
    PromotionState, Repository,
};
use serde_json::{Value, json};

use super::{Error, Lanes, Reconciler};
use crate::{
    Orchestrator, checks,
    db::PromotionRow,
    egress, git_workspaces,
    promotions::{self, Approval, Decision, promotion_error, read_changeset},
};

/// Promotions per lease statement.
const BATCH: usize = 8;
/// A lease is renewed while its step runs, so that it can be short: after a crash the next
/// orchestrator continues when it expires.
const LEASE: Duration = Duration::from_secs(15);
const LEASE_RENEWAL: Duration = Duration::from_secs(4);
/// How often the jobs of checks are looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// A decision wakes the promotion.
const APPROVAL_INTERVAL: Duration = Duration::from_hours(1);
/// A stage that failed for the moment is tried this often, with pauses that double up to the
/// longest: for about a quarter of an hour.
const MAX_ATTEMPTS: i32 = 20;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The longest JSON of what an error adds, such as rejected hunks.
const MAX_CONFLICT_BYTES: usize = 256 * 1024;

#[derive(Clone, Debug)]
pub(crate) struct PromotionReconciler {
    pub(crate) orchestrator: Orchestrator,
    pub(crate) lanes: Lanes,
}

impl Reconciler for PromotionReconciler {
    const NAME: &'static str = "promotions";
    const INTERVAL: Duration = Duration::from_millis(500);

    async fn round(&self) -> Result<(), Error> {
        loop {
            let room = self.lanes.free().min(BATCH);
            if room == 0 {
                return Ok(());
            }
            let rows = self.orchestrator.db.lease_promotions(room, LEASE).await?;
            let full = rows.len() == room;
            for row in rows {
                let Some(permit) = self.lanes.try_acquire(None) else {
                    continue;
                };
                let reconciler = self.clone();
                tokio::spawn(async move {
                    let id = row.promotion.id;
                    if let Err(error) = reconciler.run(row).await {
                        tracing::debug!(promotion_id = %id, %error, "A step of a promotion failed.");
                    }
                    drop(permit);
                });
            }
            if !full {
                return Ok(());
            }
        }
    }
}

/// What follows a step.
enum Next {
    /// The next stage, at once.
    Now,
    After(Duration),
    /// Nothing: the promotion has ended.
    End,
}

/// Why a stage is not done.
#[derive(Debug)]
enum Failure {
    /// It is tried again.
    Transient(PromotionError),
    /// The promotion fails.
    Final(PromotionError),
    /// The database failed: nothing can be stored, and the lease expires.
    Unstored(Error),
}

impl From<crate::db::Error> for Failure {
    fn from(error: crate::db::Error) -> Self {
        Self::Unstored(error.into())
    }
}

impl From<egress::Error> for Failure {
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

impl From<promotions::Error> for Failure {
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

impl From<git_workspaces::Error> for Failure {
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

impl From<checks::Error> for Failure {
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

fn failed(code: ErrorCode, detail: impl Into<String>) -> PromotionError {
    PromotionError {
        code: code.as_str().to_owned(),
        detail: detail.into(),
        conflict: None,
    }
}

impl PromotionReconciler {
    /// Runs one step and stores its result, unless the lease is lost meanwhile.
    async fn run(&self, row: PromotionRow) -> Result<(), Error> {
        let db = &self.orchestrator.db;
        let (id, before, mut lease) = (row.promotion.id, row.promotion.state, row.lease);
        let mut step = Box::pin(self.step(row));
        let (mut row, delay) = loop {
            tokio::select! {
                stepped = &mut step => break stepped?,
                () = tokio::time::sleep(LEASE_RENEWAL) => {
                    match db.renew_promotion(id, lease, LEASE).await {
                        Ok(Some(renewed)) => lease = renewed,
                        // Another orchestrator has it.
                        Ok(None) => return Ok(()),
                        Err(error) => tracing::debug!(%error, "A lease was not renewed."),
                    }
                }
            }
        };
        row.lease = lease;
        if db.save_promotion(&row, before, delay).await? {
            self.orchestrator.readers.notify();
            if delay.is_zero() {
                self.orchestrator.promotions_due.notify_one();
            }
        }
        Ok(())
    }

    /// Runs the next stage. Returns the promotion as it is then, and when to step it again.
    async fn step(&self, mut row: PromotionRow) -> Result<(PromotionRow, Duration), Error> {
        let next = match self.advance(&mut row).await {
            Ok(next) => {
                row.attempts = 0;
                next
            }
            Err(Failure::Unstored(error)) => return Err(error),
            Err(Failure::Transient(error)) if row.attempts < MAX_ATTEMPTS => {
                row.attempts += 1;
                // Shown while it is tried again.
                row.promotion.error = Some(error);
                Next::After(pause(row.attempts))
            }
            Err(Failure::Transient(error) | Failure::Final(error)) => {
                let error = self.with_newer_base(&row, error).await;
                end(&mut row, PromotionState::Failed);
                row.promotion.error = Some(bounded(error));
                Next::End
            }
        };
        let delay = match next {
            Next::Now | Next::End => Duration::ZERO,
            Next::After(delay) => delay,
        };
        Ok((row, delay))
    }

    async fn advance(&self, row: &mut PromotionRow) -> Result<Next, Failure> {
        if let Some(by) = &row.canceled_by {
            let detail = format!("canceled by {by}");
            checks::stop(&self.orchestrator, row).await?;
            end(row, PromotionState::Canceled);
            row.promotion.error = Some(PromotionError {
                code: "canceled".to_owned(),
                detail,
                conflict: None,
            });
            return Ok(Next::End);
        }
        let orchestrator = &self.orchestrator;
        let repository = orchestrator
            .db
            .any_repository(row.promotion.repository_id)
            .await?;
        let repository = repository.ok_or_else(|| {
            Failure::Final(failed(ErrorCode::NotFound, "the repository was removed"))
        })?;
        let stage = stage(row, &repository);
        if stage == Stage::Check && row.promotion.state == PromotionState::Checking {
            return self.check(row, &repository).await;
        }
        let sha256 = &row.promotion.changeset_sha256;
        let changeset = read_changeset(&orchestrator.blobs, sha256).await?;
        let next = match stage {
            Stage::Build => {
                let request = row.commit_request(&repository);
                let built = orchestrator.egress.commit(&request, &changeset).await?;
                row.promotion.state = PromotionState::Working;
                row.promotion.error = None;
                row.committed(built);
                Next::Now
            }
            // The rules have changed: what was checked and approved no longer counts.
            Stage::StartOver => {
                row.start_over();
                Next::Now
            }
            Stage::Check => return self.check(row, &repository).await,
            Stage::Approve => decide(row),
            Stage::Push => {
                let request = GitPush {
                    version: API_VERSION,
                    call: row.on_behalf().call(&repository),
                    base: row.promotion.base.clone().unwrap_or_default(),
                    target: row.promotion.target.clone(),
                    branch: row.promotion.branch.clone(),
                    commit: row.promotion.commit.clone().unwrap_or_default(),
                    revision: row.progress.revision.unwrap_or_default(),
                };
                orchestrator.egress.push(&request).await?;
                row.promotion.reached = Some(PromotionStage::Pushed);
                Next::Now
            }
            Stage::Open => {
                let request = GitPull {
                    version: API_VERSION,
                    call: row.on_behalf().call(&repository),
                    target: row.promotion.target.clone(),
                    branch: row.promotion.branch.clone(),
                    commit: row.promotion.commit.clone().unwrap_or_default(),
                    title: row.promotion.title.clone(),
                    body: row.promotion.body.clone(),
                };
                let opened = orchestrator.egress.pull(&request).await?;
                row.promotion.pull_request = Some(opened.url);
                row.promotion.reached = Some(PromotionStage::Opened);
                Next::Now
            }
            Stage::End => {
                end(row, PromotionState::Done);
                Next::End
            }
        };
        if matches!(stage, Stage::Push | Stage::Open) {
            row.promotion.state = PromotionState::Working;
            row.promotion.error = None;
        }
        Ok(if row.promotion.state.is_final() {
            Next::End
        } else {
            next
        })
    }

    /// Runs the repository's checks on the commit, each in a fresh sandbox.
    async fn check(
        &self,
        row: &mut PromotionRow,
        repository: &Repository,
    ) -> Result<Next, Failure> {
        row.promotion.error = None;
        let outcome = checks::run(&self.orchestrator, row, repository).await?;
        row.promotion.state = PromotionState::Checking;
        match outcome {
            checks::Outcome::Running => Ok(Next::After(CHECK_INTERVAL)),
            checks::Outcome::Passed => {
                row.progress.checked.clone_from(&row.promotion.commit);
                row.promotion.state = PromotionState::Working;
                Ok(Next::Now)
            }
            checks::Outcome::Failed(detail) => Err(Failure::Final(PromotionError {
                code: "check_failed".to_owned(),
                detail,
                conflict: Some(json!({ "checks": row.promotion.checks })),
            })),
        }
    }

    /// A changeset that does not apply may have been made against a base that is no longer the
    /// newest: the error offers the one that is.
    async fn with_newer_base(&self, row: &PromotionRow, error: PromotionError) -> PromotionError {
        if row.promotion.commit.is_some() || !is_conflict(&error.code) {
            return error;
        }
        let current = async {
            let id = row.promotion.repository_id;
            let repository = self.orchestrator.db.any_repository(id).await.ok()??;
            let request = row
                .on_behalf()
                .resolve(&repository, Some(&row.promotion.target));
            let resolved = self.orchestrator.egress.resolve(&request).await.ok()?;
            Some(resolved.commit)
        };
        match current.await {
            Some(commit) => with_base(error, row.promotion.base.as_deref(), &commit),
            None => error,
        }
    }
}

/// The stages that follow one another. A stage that has nothing to do is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Build,
    StartOver,
    Check,
    Approve,
    Push,
    Open,
    End,
}

/// The stage that a promotion is at.
fn stage(row: &PromotionRow, repository: &Repository) -> Stage {
    let promotion = &row.promotion;
    let (until, reached) = (promotion.until, promotion.reached);
    if promotion.commit.is_none() {
        return Stage::Build;
    }
    if reached >= Some(until) {
        return Stage::End;
    }
    if reached >= Some(PromotionStage::Pushed) {
        return if repository.provider == ForgeKind::Git {
            Stage::End
        } else {
            Stage::Open
        };
    }
    if row.progress.revision != Some(repository.revision) {
        return Stage::StartOver;
    }
    if !repository.checks.is_empty() && row.progress.checked != promotion.commit {
        return Stage::Check;
    }
    if repository.rules.require_approval && !row.is_approved() {
        return Stage::Approve;
    }
    Stage::Push
}

/// Applies a person's decision, if there is one about what would be pushed now.
fn decide(row: &mut PromotionRow) -> Next {
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

fn end(row: &mut PromotionRow, state: PromotionState) {
    row.promotion.state = state;
    row.promotion.error = None;
}

fn pause(attempts: i32) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1)).unwrap_or(0).min(10);
    FIRST_PAUSE.saturating_mul(1 << doublings).min(MAX_PAUSE)
}

/// Whether the changeset does not fit its base.
fn is_conflict(code: &str) -> bool {
    [
        ErrorCode::PatchRejected.as_str(),
        ErrorCode::EditRejected.as_str(),
        ErrorCode::BaseStale.as_str(),
    ]
    .contains(&code)
}

fn with_base(error: PromotionError, base: Option<&str>, current: &str) -> PromotionError {
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
fn bounded(error: PromotionError) -> PromotionError {
    let is_short = |conflict: &Value| conflict.to_string().len() <= MAX_CONFLICT_BYTES;
    PromotionError {
        conflict: error.conflict.filter(is_short),
        ..error
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{
        ArtifactId, ChangesetFormat, EgressPrincipal, Promotion, PromotionId, ProjectId,
        RepositoryId, RepositoryRules, TaskId,
    };
    use time::OffsetDateTime;

    use super::*;
    use crate::{db::PromotionLease, promotions::Progress};

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
        assert_eq!(stage(&row(), &plain), Stage::Build);
        let mut row = committed();
        assert_eq!(stage(&row, &plain), Stage::Push);
        for until in [PromotionStage::Applied, PromotionStage::Committed] {
            row.promotion.until = until;
            assert_eq!(stage(&row, &plain), Stage::End);
        }
        row.promotion.until = PromotionStage::Pushed;
        row.promotion.reached = Some(PromotionStage::Pushed);
        assert_eq!(stage(&row, &plain), Stage::End);
        row.promotion.until = PromotionStage::Opened;
        assert_eq!(stage(&row, &plain), Stage::Open);
        let git = Repository {
            provider: ForgeKind::Git,
            ..plain.clone()
        };
        assert_eq!(stage(&row, &git), Stage::End);
        row.promotion.reached = Some(PromotionStage::Opened);
        assert_eq!(stage(&row, &plain), Stage::End);
    }

    #[test]
    fn nothing_is_pushed_before_its_own_commit_passed_and_was_approved() {
        let rules = RepositoryRules {
            require_approval: true,
            ..RepositoryRules::default()
        };
        let strict = repository(rules, 1);
        let mut row = committed();
        assert_eq!(stage(&row, &strict), Stage::Check);
        row.progress.checked = Some("d".repeat(40));
        assert_eq!(stage(&row, &strict), Stage::Check);
        row.progress.checked.clone_from(&row.promotion.commit);
        assert_eq!(stage(&row, &strict), Stage::Approve);
        assert!(matches!(decide(&mut row), Next::After(_)));
        assert_eq!(row.promotion.state, PromotionState::AwaitingApproval);
        row.decision = Some(decision(&row, true));
        assert!(matches!(decide(&mut row), Next::Now));
        assert_eq!(stage(&row, &strict), Stage::Push);
        assert_eq!(row.promotion.approved_by.as_deref(), Some("ann"));
        // Other rules, another base, another commit: the approval lapses.
        let changed = Repository {
            revision: 8,
            ..strict.clone()
        };
        assert_eq!(stage(&row, &changed), Stage::StartOver);
        let mut other = row.clone();
        other.promotion.base = Some("e".repeat(40));
        assert_eq!(stage(&other, &strict), Stage::Approve);
        assert!(matches!(decide(&mut other), Next::After(_)));
        row.start_over();
        assert_eq!(stage(&row, &strict), Stage::Build);
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
}

//! Promotions: built, checked, approved, pushed, opened. One stage per step.
//!
//! Invariants: each stage can be repeated, and is, when an orchestrator dies during it. A stage is
//! done once it is stored. The changeset is compared with its hash before every stage. Checks and
//! approvals count only for the commit, base and rules that they were given for.

mod failure;
mod stage;
#[cfg(test)]
mod tests;

use std::time::Duration;

use cynode_api::{
    API_VERSION, ErrorCode, GitPull, GitPush, PromotionError, PromotionStage, PromotionState,
    Repository,
};
use serde_json::json;

use super::{Error, Lanes, Reconciler};
use crate::{Orchestrator, checks, db::PromotionRow, promotions::read_changeset};
use failure::{StageFailure, bounded, failed, is_conflict, with_base};
use stage::{NextStage, decide, stage};

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
            Err(StageFailure::Unstored(error)) => return Err(error),
            Err(StageFailure::Transient(error)) if row.attempts < MAX_ATTEMPTS => {
                row.attempts += 1;
                // Shown while it is tried again.
                row.promotion.error = Some(error);
                Next::After(pause(row.attempts))
            }
            Err(StageFailure::Transient(error) | StageFailure::Final(error)) => {
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

    async fn advance(&self, row: &mut PromotionRow) -> Result<Next, StageFailure> {
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
            StageFailure::Final(failed(ErrorCode::NotFound, "the repository was removed"))
        })?;
        let stage = stage(row, &repository);
        if stage == NextStage::Check && row.promotion.state == PromotionState::Checking {
            return self.check(row, &repository).await;
        }
        let sha256 = &row.promotion.changeset_sha256;
        let changeset = read_changeset(&orchestrator.blobs, sha256).await?;
        let next = match stage {
            NextStage::Build => {
                let request = row.commit_request(&repository);
                let built = orchestrator.egress.commit(&request, &changeset).await?;
                row.promotion.state = PromotionState::Working;
                row.promotion.error = None;
                row.committed(built);
                Next::Now
            }
            // The rules have changed: what was checked and approved no longer counts.
            NextStage::StartOver => {
                row.start_over();
                Next::Now
            }
            NextStage::Check => return self.check(row, &repository).await,
            NextStage::Approve => decide(row),
            NextStage::Push => {
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
            NextStage::Open => {
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
            NextStage::End => {
                end(row, PromotionState::Done);
                Next::End
            }
        };
        if matches!(stage, NextStage::Push | NextStage::Open) {
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
    ) -> Result<Next, StageFailure> {
        row.promotion.error = None;
        let outcome = checks::run(&self.orchestrator, row, repository).await?;
        row.promotion.state = PromotionState::Checking;
        match outcome {
            checks::ChecksOutcome::Running => Ok(Next::After(CHECK_INTERVAL)),
            checks::ChecksOutcome::Passed => {
                row.progress.checked.clone_from(&row.promotion.commit);
                row.promotion.state = PromotionState::Working;
                Ok(Next::Now)
            }
            checks::ChecksOutcome::Failed(detail) => Err(StageFailure::Final(PromotionError {
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

fn end(row: &mut PromotionRow, state: PromotionState) {
    row.promotion.state = state;
    row.promotion.error = None;
}

fn pause(attempts: i32) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1))
        .unwrap_or(0)
        .min(10);
    FIRST_PAUSE.saturating_mul(1 << doublings).min(MAX_PAUSE)
}

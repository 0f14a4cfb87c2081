//! Promotions: what callers ask for, and what persons decide. `reconcile/promotions.rs` drives them.
//!
//! Invariants: a promotion is stored before anything happens, so that any orchestrator can continue
//! it. The same changeset on the same branch is one promotion, however often it is asked for.

mod request;

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use cynode_api::{
    API_VERSION, CallId, EgressPrincipal, ErrorCode, GitCommit, GitCommitted, Problem, Promotion,
    PromotionCreate, PromotionDecision, PromotionError, PromotionId, PromotionStage,
    PromotionState, PromotionVerdict, Repository, TaskId, promotion_limits,
};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::{
    Orchestrator,
    blobs::{self, Blobs},
    caller::Caller,
    db::{self, Missing, NewPromotion, PromotionRow},
    egress::{self, OnBehalf},
};
use request::{continues, wanted};

/// How long a call waits for the reconciler to act on a decision. It is woken at once.
const DECISION_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error(transparent)]
    Blob(#[from] blobs::Error),
    #[error(transparent)]
    Role(#[from] egress::Error),
    #[error("task_id: the task {0} belongs to no project, and repositories do")]
    NoProject(TaskId),
    #[error("base: the changeset does not say which commit it was made against")]
    NoBase,
    #[error("{0}")]
    Invalid(String),
    #[error(
        "changeset: it has {size} bytes; at most {}",
        promotion_limits::MAX_CHANGESET_BYTES
    )]
    TooLarge { size: i64 },
    #[error("the bytes of the changeset are no longer those that it began with")]
    ChangesetChanged,
    #[error("the promotion is {}", .0.as_str())]
    NotWaiting(PromotionState),
    #[error("the promotion is at commit {}", .0.as_deref().unwrap_or("none"))]
    OtherCommit(Option<String>),
    /// The token expired or was revoked while its holder waited.
    #[error("the token is no longer valid")]
    TokenInvalid,
}

/// What the reconciler needs besides the promotion itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// On whose behalf the role is called.
    pub(crate) principal: EgressPrincipal,
    /// The date of the commit, in seconds since 1970: a repeated build gives the same commit.
    pub(crate) at: i64,
    pub(crate) author: String,
    /// Rises when a promotion starts over, so that checks run again.
    #[serde(default)]
    pub(crate) round: u32,
    /// The revision of the rules that the commit was inspected with.
    #[serde(default)]
    pub(crate) revision: Option<i64>,
    /// The commit that passed every check.
    #[serde(default)]
    pub(crate) checked: Option<String>,
    #[serde(default)]
    pub(crate) approval: Option<Approval>,
}

/// What a person approved. It counts for exactly this.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Approval {
    pub(crate) commit: String,
    pub(crate) base: Option<String>,
    pub(crate) revision: Option<i64>,
    pub(crate) by: String,
}

/// A person's decision, as a call stored it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Decision {
    pub(crate) approves: bool,
    pub(crate) commit: String,
    /// Base and rules as they were when the person looked.
    pub(crate) base: Option<String>,
    pub(crate) revision: Option<i64>,
    pub(crate) by: String,
    pub(crate) reason: Option<String>,
}

impl PromotionRow {
    /// Whether a person has approved what would be pushed now.
    pub(crate) fn is_approved(&self) -> bool {
        self.progress.approval.as_ref().is_some_and(|approval| {
            Some(&approval.commit) == self.promotion.commit.as_ref()
                && approval.base == self.promotion.base
                && approval.revision == self.progress.revision
        })
    }

    pub(crate) fn on_behalf(&self) -> OnBehalf {
        OnBehalf {
            principal: self.progress.principal.clone(),
            task_id: self.promotion.task_id,
            session_id: self.promotion.session_id,
            promotion_id: Some(self.promotion.id),
            call_id: None,
        }
    }

    pub(crate) fn commit_request(&self, repository: &Repository) -> GitCommit {
        commit_request(
            &self.promotion,
            &self.progress,
            repository,
            &self.on_behalf(),
        )
    }

    /// Forgets what was built, so that it is built again.
    pub(crate) fn start_over(&mut self) {
        let promotion = &mut self.promotion;
        promotion.state = PromotionState::Working;
        promotion.reached = None;
        promotion.commit = None;
        promotion.files.clear();
        promotion.verdicts.clear();
        promotion.checks.clear();
        promotion.approved_by = None;
        promotion.error = None;
        self.progress.round += 1;
        self.progress.revision = None;
        self.progress.checked = None;
        self.progress.approval = None;
        self.attempts = 0;
    }

    /// Takes over what the role built and found.
    pub(crate) fn committed(&mut self, built: GitCommitted) {
        self.progress.revision = Some(built.revision);
        take_commit(&mut self.promotion, built);
    }
}

fn commit_request(
    promotion: &Promotion,
    progress: &Progress,
    repository: &Repository,
    on_behalf: &OnBehalf,
) -> GitCommit {
    GitCommit {
        version: API_VERSION,
        call: on_behalf.call(repository),
        format: promotion.format,
        sha256: promotion.changeset_sha256.clone(),
        base: promotion.base.clone().unwrap_or_default(),
        target: promotion.target.clone(),
        branch: promotion.branch.clone(),
        message: promotion.message.clone(),
        author: progress.author.clone(),
        at: progress.at,
    }
}

fn take_commit(promotion: &mut Promotion, built: GitCommitted) {
    let GitCommitted {
        commit,
        base,
        mut files,
        mut verdicts,
        allowed,
        ..
    } = built;
    files.truncate(promotion_limits::MAX_LISTED);
    verdicts.truncate(promotion_limits::MAX_LISTED);
    if !allowed {
        promotion.error = Some(refused_change(&verdicts));
        promotion.state = PromotionState::Failed;
    }
    promotion.base = Some(base);
    promotion.commit = Some(commit);
    promotion.files = files;
    promotion.verdicts = verdicts;
    promotion.reached = allowed.then_some(PromotionStage::Committed);
}

/// The error of a change that a rule refuses.
fn refused_change(verdicts: &[PromotionVerdict]) -> PromotionError {
    let refused: Vec<&PromotionVerdict> =
        verdicts.iter().filter(|verdict| !verdict.allowed).collect();
    let detail = refused.first().map_or_else(
        || "a rule of the repository refuses the change".to_owned(),
        |verdict| match &verdict.path {
            Some(path) => format!("{}: {path}: {}", verdict.rule, verdict.reason),
            None => format!("{}: {}", verdict.rule, verdict.reason),
        },
    );
    PromotionError {
        code: ErrorCode::ChangeRefused.as_str().to_owned(),
        detail,
        conflict: Some(json!({ "verdicts": refused })),
    }
}

/// The bytes of a changeset, if they are still those that the promotion began with.
pub(crate) async fn read_changeset(blobs: &Blobs, sha256: &str) -> Result<Bytes, Error> {
    let pieces = blobs.get(sha256).await?;
    let mut pieces = std::pin::pin!(pieces);
    let (mut bytes, mut hash) = (BytesMut::new(), Sha256::new());
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|_| blobs::Error::Unavailable)?;
        if bytes.len() as u64 + piece.len() as u64 > promotion_limits::MAX_CHANGESET_BYTES {
            return Err(Error::ChangesetChanged);
        }
        hash.update(&piece);
        bytes.extend_from_slice(&piece);
    }
    if hex::encode(hash.finalize()) == sha256 {
        Ok(bytes.freeze())
    } else {
        Err(Error::ChangesetChanged)
    }
}

impl Orchestrator {
    /// Begins or continues a promotion; the flag tells whether it is new. A dry run is stored
    /// nowhere.
    pub(crate) async fn create_promotion(
        &self,
        caller: &Caller,
        body: PromotionCreate,
        call_id: Option<CallId>,
    ) -> Result<(Promotion, bool), Error> {
        if !self.egress.is_configured() {
            return Err(egress::Error::NotConfigured.into());
        }
        let task = self.db.task(&caller.scope, body.task_id).await?;
        let project = task.project_id.ok_or(Error::NoProject(task.id))?;
        let repository = self.db.repository_of(project, &body.repository).await?;
        let changeset = self.db.artifact(body.changeset).await?;
        if changeset.task_id != task.id {
            return Err(db::Error::from(Missing::Artifact(body.changeset)).into());
        }
        let on_behalf = OnBehalf {
            principal: egress::principal(caller)?,
            task_id: task.id,
            session_id: changeset.session_id,
            promotion_id: None,
            call_id,
        };
        let target = match body.target.clone().or(repository.default_branch.clone()) {
            Some(target) => target,
            None => {
                let request = on_behalf.resolve(&repository, None);
                self.egress.resolve(&request).await?.default_branch
            }
        };
        let wanted = wanted(caller, &repository, &changeset, body.clone(), target)?;
        let now = wanted.created_at;
        let progress = Progress {
            principal: on_behalf.principal.clone(),
            at: now.unix_timestamp(),
            author: caller.user_name.clone(),
            round: 0,
            revision: None,
            checked: None,
            approval: None,
        };
        if body.dry_run {
            let inspected = self
                .inspect(&repository, wanted, &progress, &on_behalf)
                .await?;
            return Ok((inspected, false));
        }
        let new = NewPromotion {
            promotion: &wanted,
            progress: &progress,
        };
        if let Some(row) = self.db.insert_promotion(&new, &caller.scope).await? {
            self.promotions_due.notify_one();
            self.readers.notify();
            return Ok((row.promotion, true));
        }
        let existing = self
            .db
            .find_promotion(task.id, repository.id, changeset.id, &wanted.branch)
            .await?
            .ok_or(Error::ChangesetChanged)?;
        let until = wanted.until;
        let row = self
            .db
            .extend_promotion(existing.promotion.id, until, |row| {
                continues(row, &wanted, progress)
            })
            .await?;
        self.promotions_due.notify_one();
        self.readers.notify();
        Ok((row.promotion, false))
    }

    /// Builds and inspects a commit without storing a promotion.
    async fn inspect(
        &self,
        repository: &Repository,
        mut promotion: Promotion,
        progress: &Progress,
        on_behalf: &OnBehalf,
    ) -> Result<Promotion, Error> {
        let bytes = read_changeset(&self.blobs, &promotion.changeset_sha256).await?;
        let request = commit_request(&promotion, progress, repository, on_behalf);
        let built = self.egress.commit(&request, &bytes).await?;
        promotion.state = PromotionState::Done;
        take_commit(&mut promotion, built);
        Ok(promotion)
    }

    /// Stores a person's decision, and waits for what becomes of it.
    pub(crate) async fn decide_promotion(
        &self,
        caller: &Caller,
        id: PromotionId,
        decision: PromotionDecision,
        approves: bool,
    ) -> Result<Promotion, Error> {
        let row = self.promotion_row(id).await?;
        if row.promotion.state != PromotionState::AwaitingApproval {
            return Err(Error::NotWaiting(row.promotion.state));
        }
        if row.promotion.commit.as_ref() != Some(&decision.commit) {
            return Err(Error::OtherCommit(row.promotion.commit));
        }
        let decision = Decision {
            approves,
            commit: decision.commit,
            base: row.promotion.base,
            revision: row.progress.revision,
            by: caller.user_name.clone(),
            reason: decision.reason,
        };
        if !self.db.decide_promotion(id, &decision).await? {
            let state = self.promotion_row(id).await?.promotion.state;
            return Err(Error::NotWaiting(state));
        }
        self.promotions_due.notify_one();
        self.wait_for_promotion(caller, id, DECISION_TIMEOUT, |promotion| {
            promotion.state != PromotionState::AwaitingApproval
        })
        .await
    }

    /// Cancels a promotion between two stages, and waits for its end.
    pub(crate) async fn cancel_promotion(
        &self,
        caller: &Caller,
        id: PromotionId,
    ) -> Result<Promotion, Error> {
        let row = self.promotion_row(id).await?;
        if row.promotion.state == PromotionState::Canceled {
            return Ok(row.promotion);
        }
        if !self.db.cancel_promotion(id, &caller.user_name).await? {
            let state = self.promotion_row(id).await?.promotion.state;
            return Err(Error::NotWaiting(state));
        }
        self.promotions_due.notify_one();
        self.wait_for_promotion(caller, id, DECISION_TIMEOUT, |promotion| {
            promotion.state.is_final()
        })
        .await
    }

    async fn promotion_row(&self, id: PromotionId) -> Result<PromotionRow, Error> {
        let row = self.db.any_promotion(id).await?;
        row.ok_or_else(|| db::Error::from(Missing::Promotion(id)).into())
    }

    /// Waits for a promotion, at most for `limit`, and returns it as it is then.
    pub(crate) async fn wait_for_promotion(
        &self,
        caller: &Caller,
        id: PromotionId,
        limit: Duration,
        is_done: impl Fn(&Promotion) -> bool,
    ) -> Result<Promotion, Error> {
        let deadline = tokio::time::Instant::now() + limit;
        let mut news = self.readers.subscribe();
        loop {
            let promotion = self.promotion_row(id).await?.promotion;
            if is_done(&promotion)
                || tokio::time::Instant::now() >= deadline
                || self.stop.is_cancelled()
            {
                return Ok(promotion);
            }
            if !caller.is_token_valid(self).await {
                return Err(Error::TokenInvalid);
            }
            // Covers a lost notification.
            let next = (tokio::time::Instant::now() + Duration::from_secs(1)).min(deadline);
            drop(tokio::time::timeout_at(next, news.changed()).await);
        }
    }
}

/// An error of the role, as the promotion shows it.
pub(crate) fn promotion_error(problem: Problem) -> PromotionError {
    PromotionError {
        code: problem.code,
        detail: problem.detail,
        conflict: (!problem.extensions.is_empty()).then(|| problem.extensions.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_refused_change_names_the_first_verdict_and_lists_all() {
        let verdict = |rule: &str, allowed, path: Option<&str>| PromotionVerdict {
            rule: rule.to_owned(),
            allowed,
            path: path.map(str::to_owned),
            reason: "no".to_owned(),
        };
        let error = refused_change(&[
            verdict("size", true, None),
            verdict("paths", false, Some("a/b")),
            verdict("modes", false, None),
        ]);
        assert_eq!(error.detail, "paths: a/b: no");
        let listed = error.conflict.expect("the verdicts");
        assert_eq!(listed["verdicts"].as_array().map(Vec::len), Some(2));
    }
}

//! Sessions, from a caller's request to a node and back.
//!
//! Invariant: a session is stored before its node is called, so that any orchestrator can finish
//! its creation or end. Every call to a node is idempotent.

use std::{sync::Arc, time::Duration};

use cynode_api::{
    CallId, ErrorCode, Session, SessionCreate, SessionEnd, SessionId, SessionState, Task,
    UserSessionCreate, WorkspaceDisposal,
};
use time::OffsetDateTime;
use tokio::sync::Notify;

use crate::{
    Config, Orchestrator,
    caller::Caller,
    db::{self, Db, NewSession, SessionRow, is_visible, to_json},
    fleet::{self, CallError, Fleet, is_transient_refusal, response_for},
    git_workspaces::{self, GitSource, SeededWorkspace},
    names,
    placement::{self, NodeRequirements, Work},
    reconcile::ExecReconciler,
    signal::EventSignal,
};

/// A node answers a create within a minute, with the state that the session has reached.
const CREATE_TIMEOUT: Duration = Duration::from_secs(70);
/// How long an end may take before it continues without its caller.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// After this, the last reported state is shown.
const SHOW_TIMEOUT: Duration = Duration::from_secs(5);
/// When the reconciler continues what a call left unfinished.
const RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error(transparent)]
    Fleet(#[from] fleet::Error),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Placement(#[from] placement::Error),
    #[error(transparent)]
    Seed(#[from] git_workspaces::Error),
    /// The node did not answer; the reconciler continues the creation.
    #[error("{call}")]
    CreationPending {
        session_id: SessionId,
        call: CallError,
    },
    #[error("session {0} was made by another request")]
    IdInUse(SessionId),
    #[error("another live session is named '{0}'")]
    NameInUse(String),
    #[error("the end of session {0} was requested before, with its workspace deleted")]
    WorkspaceDeleted(SessionId),
    #[error("the session is gone")]
    Gone,
    #[error("creating the session was interrupted")]
    Interrupted,
}

impl Error {
    /// Whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Db(error) => error.is_transient(),
            Self::Fleet(error) => error.is_transient(),
            Self::Call(call) | Self::CreationPending { call, .. } => call.is_transient(),
            Self::Placement(_)
            | Self::Seed(_)
            | Self::IdInUse(_)
            | Self::NameInUse(_)
            | Self::WorkspaceDeleted(_)
            | Self::Gone
            | Self::Interrupted => false,
        }
    }
}

impl Orchestrator {
    /// Creates a session; the flag tells whether it is new.
    pub(crate) async fn create_session(
        &self,
        caller: &Caller,
        body: UserSessionCreate,
        call_id: Option<CallId>,
    ) -> Result<(Session, bool), Error> {
        let session_id = body.session_id.unwrap_or_else(SessionId::generate);
        if body.session_id.is_some()
            && let Some(existing) = self.db.any_session(session_id).await?
        {
            return self.repeated_session(caller, existing, &body).await;
        }
        let name = || format!("session {session_id}");
        let git = GitSource::of(body.workspace_ref.as_ref(), body.workspace_depth);
        let (task, is_new) = match git {
            Some(git) => {
                let task = self.task_for_repository(caller, body.task_id, git, name);
                (task.await?, false)
            }
            None => self.task_for(caller, body.task_id, name).await?,
        };
        let task_id = task.id;
        let image = self
            .choose_image(
                caller,
                body.image_ref.as_deref(),
                Work::Agent,
                caller.preferences(&task),
            )
            .await?;
        self.check_artifact(caller, task_id, body.workspace_ref.as_ref())
            .await?;
        let seeded = match git {
            Some(git) => Some(Box::pin(self.seed_workspace(caller, &task, git, call_id)).await?),
            None => None,
        };
        let seed_ref = seeded.as_ref().map(SeededWorkspace::workspace_ref);
        let mut request = SessionCreate {
            version: Some(cynode_api::API_VERSION),
            task_id,
            session_id,
            image_ref: image.image_ref.clone(),
            image_digest: image.image_digest.clone(),
            workspace_ref: seed_ref.or_else(|| body.workspace_ref.clone()),
            env: body.env.clone(),
            limits: body.limits,
            network_policy: body.network_policy,
            max_lifetime_seconds: body.max_lifetime_seconds,
            idle_timeout_seconds: body.idle_timeout_seconds,
            pty_allowed: body.pty_allowed,
            labels: body.labels.clone(),
            allowed_models: Vec::new(),
        };
        let kept = self
            .placement
            .workspace_node(task_id, body.workspace_ref.as_ref())
            .await?;
        let wanted = NodeRequirements {
            labels: &body.node_labels,
            limits: body.limits.unwrap_or_default(),
            needs_runner: false,
            models: &[],
        };
        let node = match kept {
            Some(node_id) => {
                self.placement
                    .check_workspace_node(node_id, &wanted)
                    .await?;
                self.db.node(node_id).await?
            }
            None => match self
                .placement
                .choose_node(image.version_id, &wanted, &[])
                .await
            {
                Ok(node) => node,
                Err(error) => {
                    self.placement.check_grantable(&wanted).await?;
                    return Err(error.into());
                }
            },
        };
        // A worker without a model server may be too old to know the field.
        if node.capability.inference.is_some() {
            request.allowed_models = self.session_models(caller.preferences(&task)).await?;
        }
        let node_id = node.id;
        let new = NewSession {
            body: &body,
            name: None,
            request: &request,
            node_id,
            image_version_id: image.version_id,
            created_by: &caller.user_name,
            source: seeded.as_ref().map(|seeded| &seeded.source),
        };
        let Some(row) = self
            .insert_named(caller, &new, is_new.then_some(&task))
            .await?
        else {
            let existing = self
                .db
                .any_session(session_id)
                .await?
                .ok_or(Error::IdInUse(session_id))?;
            return self.repeated_session(caller, existing, &body).await;
        };
        // Runs to completion even when the caller disconnects.
        let sessions = self.sessions.clone();
        let session = tokio::spawn(async move { sessions.bring_up(&row).await })
            .await
            .map_err(|_| Error::Interrupted)??;
        Ok((session, true))
    }

    /// Inserts a session under the requested name, or under one that is free. `None` when the id
    /// is taken.
    async fn insert_named(
        &self,
        caller: &Caller,
        new: &NewSession<'_>,
        task: Option<&Task>,
    ) -> Result<Option<SessionRow>, Error> {
        let mut attempt = 0;
        loop {
            let name = match &new.body.name {
                Some(name) => Some(name.clone()),
                None => names::generate(attempt),
            };
            let named = NewSession {
                name: name.as_deref(),
                ..new.clone()
            };
            match self.db.insert_session(&named, task, &caller.scope).await {
                Err(db::Error::NameTaken) => {}
                inserted => return Ok(inserted?),
            }
            // The same request may have arrived twice, and the first one has the name.
            if self.db.any_session(new.request.session_id).await?.is_some() {
                return Ok(None);
            }
            if let Some(name) = &new.body.name {
                return Err(Error::NameInUse(name.clone()));
            }
            // The last attempt has no name, so it can't collide.
            attempt += 1;
        }
    }

    /// A repeated request returns the same session.
    async fn repeated_session(
        &self,
        caller: &Caller,
        existing: SessionRow,
        body: &UserSessionCreate,
    ) -> Result<(Session, bool), Error> {
        let is_visible = is_visible(self.db.session(&caller.scope, existing.session_id).await)?;
        if !is_visible || existing.body != to_json(body) {
            return Err(Error::IdInUse(existing.session_id));
        }
        if existing.state == SessionState::Creating {
            return Ok((self.sessions.bring_up(&existing).await?, false));
        }
        Ok((existing.object, false))
    }
}

/// The lifecycle of stored sessions, shared by calls and reconcilers. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Sessions {
    pub(crate) db: Db,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) config: Arc<Config>,
    pub(crate) execs: ExecReconciler,
    /// Wakes the session reconciler.
    pub(crate) due: Arc<Notify>,
    pub(crate) readers: EventSignal,
}

impl Sessions {
    /// Creates the session on its node. Idempotent: the node creates it once.
    pub(crate) async fn bring_up(&self, row: &SessionRow) -> Result<Session, Error> {
        let client = self.fleet.client(&self.db, row.node_id).await?;
        match response_for(
            row.session_id,
            self.fleet
                .call(
                    row.node_id,
                    CREATE_TIMEOUT,
                    client.create_session(&row.request),
                )
                .await,
        ) {
            Ok(session) => {
                let session = self.store_report(row, session, row.read_at).await?;
                if session.state == SessionState::Creating {
                    self.db.release_session(row.session_id, RETRY_DELAY).await?;
                }
                self.readers.notify();
                Ok(session)
            }
            Err(CallError::Refused(problem)) if !is_transient_refusal(&problem) => {
                self.db
                    .set_session_state(
                        row.session_id,
                        &[SessionState::Creating, SessionState::Ending],
                        SessionState::Failed,
                        &problem.detail,
                    )
                    .await?;
                self.readers.notify();
                Err(CallError::Refused(problem).into())
            }
            Err(call) => {
                // The reconciler retries, and so may the caller, with the same session_id.
                self.db.release_session(row.session_id, RETRY_DELAY).await?;
                self.due.notify_one();
                Err(Error::CreationPending {
                    session_id: row.session_id,
                    call,
                })
            }
        }
    }

    /// Stores a node's report that was requested at `requested_at`. When the row has been written
    /// since, the order of the two is unknown: then the node is asked again, so that the caller's
    /// next call sees what this response says.
    pub(crate) async fn store_report(
        &self,
        row: &SessionRow,
        mut session: Session,
        mut requested_at: OffsetDateTime,
    ) -> Result<Session, Error> {
        let id = session.session_id;
        let node_id = row.node_id;
        for _ in 0..5 {
            if self.db.observe_session(&session, requested_at).await? {
                break;
            }
            let Some(current) = self.db.any_session(id).await? else {
                break;
            };
            // The session ended while it was creating; the reconciler ends it on the node.
            if matches!(current.state, SessionState::Ended | SessionState::Failed) {
                self.due.notify_one();
                return Ok(current.object);
            }
            requested_at = current.read_at;
            let client = self.fleet.client(&self.db, node_id).await?;
            match response_for(
                id,
                self.fleet
                    .call(node_id, SHOW_TIMEOUT, client.get_session(id))
                    .await,
            ) {
                Ok(now) => session = now,
                // Keep the first report; the reconciler updates it.
                Err(_) => break,
            }
        }
        self.readers.notify();
        Ok(row.named(session))
    }

    /// Gives a session in a final state a new container. The request is stored first: nothing else
    /// may restart an ended session.
    pub(crate) async fn resume(&self, row: SessionRow) -> Result<Session, Error> {
        let was = match self.db.request_resume(row.session_id).await {
            Err(db::Error::NameTaken) => {
                return Err(Error::NameInUse(row.object.name.unwrap_or_default()));
            }
            was => was?,
        };
        let requested_at = self
            .db
            .any_session(row.session_id)
            .await?
            .map_or(row.read_at, |row| row.read_at);
        let client = self.fleet.client(&self.db, row.node_id).await?;
        match response_for(
            row.session_id,
            self.fleet
                .call(
                    row.node_id,
                    CREATE_TIMEOUT,
                    client.resume_session(row.session_id),
                )
                .await,
        ) {
            Ok(session) => self.store_report(&row, session, requested_at).await,
            Err(call) if !call.is_transient() => {
                if let Some(was) = was {
                    let reason = row.object.end_reason.clone().unwrap_or_default();
                    self.db
                        .set_session_state(row.session_id, &[SessionState::Creating], was, &reason)
                        .await?;
                }
                Err(call.into())
            }
            // The node may have received it: the reconciler finds out.
            Err(call) => {
                self.db.release_session(row.session_id, RETRY_DELAY).await?;
                self.due.notify_one();
                Err(call.into())
            }
        }
    }

    /// Ends a session. The request is stored first, so that the session ends even when its node is
    /// unreachable now. A later request may still delete a workspace that was to be kept.
    pub(crate) async fn end(&self, row: SessionRow, end: SessionEnd) -> Result<Session, Error> {
        let was_over = matches!(row.state, SessionState::Ended | SessionState::Failed);
        self.db.request_end(row.session_id, &end).await?;
        let Some(row) = self.db.any_session(row.session_id).await? else {
            return Err(Error::Gone);
        };
        // Only the node knows what became of the workspace of an ended session.
        if was_over && end.workspace.is_some() && row.state == SessionState::Ended {
            return self.end_on_node(&row, &end).await;
        }
        let wants_to_keep = end.workspace == Some(WorkspaceDisposal::Keep);
        // The first request decides the rest.
        let end = row.ending.clone().unwrap_or(end);
        if wants_to_keep && end.workspace != Some(WorkspaceDisposal::Keep) {
            return Err(Error::WorkspaceDeleted(row.session_id));
        }
        let node = self.db.node(row.node_id).await?;
        if !node.is_responsive(self.config.unreachable_after()) {
            return Ok(row.object);
        }
        match self.end_on_node(&row, &end).await {
            Ok(session) => Ok(session),
            // The node has forgotten the session or never had it.
            Err(Error::Call(call)) if call.is_refusal(&[ErrorCode::SessionNotFound]) => {
                self.mark_ended(&row, &end).await?;
                Ok(self
                    .db
                    .any_session(row.session_id)
                    .await?
                    .map_or(row.object, |row| row.object))
            }
            Err(error) if !error.is_transient() => Err(error),
            // The session ends when the node answers again.
            Err(error) => {
                tracing::debug!(session_id = %row.session_id, %error, "A session can't be ended on its node yet.");
                // Retry soon, not only when the lease of this call expires.
                self.db.release_session(row.session_id, RETRY_DELAY).await?;
                self.due.notify_one();
                Ok(row.object)
            }
        }
    }

    /// Ends a session that its node does not know.
    pub(crate) async fn mark_ended(&self, row: &SessionRow, end: &SessionEnd) -> Result<(), Error> {
        let reason = end
            .reason
            .clone()
            .unwrap_or_else(|| "the node does not know the session".to_owned());
        let from = [
            SessionState::Creating,
            SessionState::Running,
            SessionState::Ending,
            SessionState::Lost,
        ];
        self.db
            .set_session_state(row.session_id, &from, SessionState::Ended, &reason)
            .await?;
        self.readers.notify();
        Ok(())
    }

    /// Ends the session on its node, and stores the report.
    pub(crate) async fn end_on_node(
        &self,
        row: &SessionRow,
        end: &SessionEnd,
    ) -> Result<Session, Error> {
        let client = self.fleet.client(&self.db, row.node_id).await?;
        if let Err(error) = self.execs.record_exits(row.session_id).await {
            tracing::debug!(session_id = %row.session_id, %error, "The exits of a session's execs are unknown.");
        }
        let session = response_for(
            row.session_id,
            self.fleet
                .call(
                    row.node_id,
                    END_TIMEOUT,
                    client.end_session(row.session_id, end),
                )
                .await,
        )?;
        // An end is the node's last report: no write since is newer.
        self.db
            .observe_session(
                &session,
                OffsetDateTime::now_utc() + time::Duration::days(1),
            )
            .await?;
        self.readers.notify();
        Ok(row.named(session))
    }

    /// The current state if the node answers, else the last reported one.
    pub(crate) async fn show(&self, row: SessionRow) -> Result<Session, Error> {
        if matches!(row.state, SessionState::Ended | SessionState::Failed) {
            return Ok(row.object);
        }
        let query = async {
            let client = self.fleet.client(&self.db, row.node_id).await.ok()?;
            response_for(
                row.session_id,
                self.fleet
                    .call(
                        row.node_id,
                        SHOW_TIMEOUT,
                        client.get_session(row.session_id),
                    )
                    .await,
            )
            .ok()
        };
        if let Some(session) = query.await {
            if row.differs_from(&session) {
                self.db.observe_session(&session, row.read_at).await?;
                self.readers.notify();
            }
            let state = row.effective_state(&session);
            return Ok(Session {
                state,
                ..row.named(session)
            });
        }
        Ok(row.object)
    }
}

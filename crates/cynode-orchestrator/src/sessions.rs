//! Sessions, from a person's request to a node and back.
//!
//! What must stay true: a session is in the database before its node hears of it, so that whoever dies, somebody else brings it
//! up or to its end. Every call to a node can be repeated.

use cynode_api::{
    ErrorCode, NodeId, Session, SessionCreate, SessionEnd, SessionId, SessionState, Task, TaskId, UserSessionCreate, WorkspaceRef, session_limits,
};
use cynode_service::{ApiError, checks};
use http::StatusCode;
use time::OffsetDateTime;

use crate::{
    Orchestrator,
    caller::Caller,
    db::{NewSession, SessionRow, to_json},
    fleet::{Failed, answer_for},
    placement::Work,
};

/// A task that somebody did not care to make.
pub(crate) fn unnamed_task(id: TaskId, name: String, created_by: &str) -> Task {
    let now = OffsetDateTime::now_utc();
    Task {
        id,
        project_id: None,
        name,
        description: None,
        requirements: Vec::new(),
        acceptance_criteria: Vec::new(),
        status: cynode_api::TaskStatus::Active,
        profile: None,
        metadata: serde_json::Map::new(),
        created_by: created_by.to_owned(),
        created_at: now,
        updated_at: now,
    }
}

impl Orchestrator {
    pub(crate) async fn create_session(&self, caller: &Caller, body: UserSessionCreate) -> Result<(StatusCode, Session), ApiError> {
        check(&body)?;
        let session_id = body.session_id.unwrap_or_else(SessionId::generate);
        if body.session_id.is_some()
            && let Some(existing) = self.db.any_session(session_id).await?
        {
            return self.same_session(caller, existing, &body).await;
        }
        let task = match body.task_id {
            Some(id) => {
                self.db.task(&caller.scope, id).await?;
                None
            }
            None => Some(unnamed_task(TaskId::generate(), format!("session {session_id}"), &caller.user_name)),
        };
        let task_id = body.task_id.or(task.as_ref().map(|task| task.id)).unwrap_or_else(TaskId::generate);
        let image = self.choose_image(body.image_ref.as_deref(), Work::Agent).await?;
        let request = SessionCreate {
            version: Some(cynode_api::API_VERSION),
            task_id,
            session_id,
            image_ref: image.image_ref.clone(),
            workspace_ref: body.workspace_ref.clone(),
            env: body.env.clone(),
            limits: body.limits,
            network_policy: body.network_policy,
            max_lifetime_seconds: body.max_lifetime_seconds,
            idle_timeout_seconds: body.idle_timeout_seconds,
            pty_allowed: body.pty_allowed,
            labels: body.labels.clone(),
        };
        let kept = self.workspace_node(task_id, body.workspace_ref.as_ref()).await?;
        let node_id = match kept {
            Some(node_id) => node_id,
            None => self.choose_node(image.version_id, &[]).await?.id,
        };
        let new = NewSession { body: &body, request: &request, node_id, image_version_id: image.version_id, created_by: &caller.user_name };
        let Some(row) = self.db.insert_session(&new, task.as_ref(), &caller.scope).await? else {
            let existing = self.db.any_session(session_id).await?.ok_or_else(|| taken(session_id))?;
            return self.same_session(caller, existing, &body).await;
        };
        // To its end even when the caller goes away.
        let orchestrator = self.clone();
        let brought = tokio::spawn(async move { orchestrator.bring_up(&row).await }).await;
        let session = brought.map_err(|_| ApiError::new(ErrorCode::Internal, "creating the session was interrupted"))??;
        Ok((if session.state == SessionState::Creating { StatusCode::ACCEPTED } else { StatusCode::CREATED }, session))
    }

    /// The same request once more: the same session.
    async fn same_session(&self, caller: &Caller, existing: SessionRow, body: &UserSessionCreate) -> Result<(StatusCode, Session), ApiError> {
        let known = self.db.session(&caller.scope, existing.session_id).await.is_ok();
        if !known || existing.body != to_json(body) {
            return Err(taken(existing.session_id));
        }
        if existing.state == SessionState::Creating {
            let session = self.bring_up(&existing).await?;
            return Ok((if session.state == SessionState::Creating { StatusCode::ACCEPTED } else { StatusCode::OK }, session));
        }
        existing
            .object
            .map(|object| (StatusCode::OK, Session { state: existing.state, ..object }))
            .ok_or_else(|| ApiError::new(ErrorCode::SessionIdInUse, format!("the session failed: {}", existing.end_reason.unwrap_or_default())))
    }

    /// Asks the node for the session, as often as it takes: the node makes it once.
    pub(crate) async fn bring_up(&self, row: &SessionRow) -> Result<Session, ApiError> {
        let client = self.fleet.client(&self.db, row.node_id).await?;
        match answer_for(row.session_id, client.create_session(&row.request).await) {
            Ok(session) => {
                self.db.observe_session(&session, row.read_at).await?;
                if session.state == SessionState::Creating {
                    self.db.release_session(row.session_id, 1).await?;
                }
                self.told();
                Ok(session)
            }
            Err(Failed::Refused(error)) if !is_passing(&error) => {
                self.db.set_session_state(row.session_id, &[SessionState::Creating, SessionState::Ending], SessionState::Failed, &error.0.detail).await?;
                self.told();
                Err(error)
            }
            Err(failed) => {
                // Whoever looks next asks again. The caller may, too, with the same session_id.
                self.db.release_session(row.session_id, 1).await?;
                self.sessions_wait.notify_one();
                let mut error = failed.problem();
                error.0.remedy =
                    format!("It goes on when the node answers: ask for the session {}, or repeat the request with it as session_id.", row.session_id);
                Err(error)
            }
        }
    }

    /// The node that has the workspace which a request wants.
    async fn workspace_node(&self, task_id: TaskId, wanted: Option<&WorkspaceRef>) -> Result<Option<NodeId>, ApiError> {
        let Some(WorkspaceRef::Workspace(id)) = wanted else { return Ok(None) };
        let node = self.db.workspace_node(task_id, *id.as_uuid()).await?;
        node.map(Some).ok_or_else(|| ApiError::new(ErrorCode::WorkspaceNotFound, format!("no session of this task kept a workspace {id}")))
    }

    /// Ends a session: written down first, so that it ends also when its node can't be asked now.
    pub(crate) async fn end_session(&self, row: SessionRow, end: SessionEnd) -> Result<Session, ApiError> {
        self.db.ask_end(row.session_id, &end).await?;
        let Some(row) = self.db.any_session(row.session_id).await? else { return Err(ApiError::new(ErrorCode::SessionNotFound, "the session is gone")) };
        match self.tell_end(&row, &end).await {
            Ok(session) => Ok(session),
            Err(Failed::Refused(error)) if !is_passing(&error) => Err(error),
            Err(failed) => {
                self.sessions_wait.notify_one();
                let error = failed.problem();
                let row = self.db.any_session(row.session_id).await?.ok_or_else(|| error.clone())?;
                row.object.map(|object| Session { state: row.state, ..object }).ok_or(error)
            }
        }
    }

    /// Tells the node to end a session, and writes down what it says.
    pub(crate) async fn tell_end(&self, row: &SessionRow, end: &SessionEnd) -> Result<Session, Failed> {
        let client = self.fleet.client(&self.db, row.node_id).await.map_err(Failed::Refused)?;
        let session = answer_for(row.session_id, client.end_session(row.session_id, end).await)?;
        // An end is the node's last word on it: nothing that was written meanwhile is newer.
        self.db.observe_session(&session, OffsetDateTime::now_utc() + time::Duration::days(1)).await.map_err(Failed::Refused)?;
        self.told();
        Ok(session)
    }

    /// As it is now: the node's word when it answers, else the last one known.
    pub(crate) async fn show_session(&self, row: SessionRow) -> Result<Session, ApiError> {
        let asked = async {
            let client = self.fleet.client(&self.db, row.node_id).await.ok()?;
            answer_for(row.session_id, client.get_session(row.session_id).await).ok()
        };
        if let Some(session) = asked.await {
            self.db.observe_session(&session, row.read_at).await?;
            return Ok(session);
        }
        row.object.map(|object| Session { state: row.state, end_reason: row.end_reason.clone().or(object.end_reason.clone()), ..object }).ok_or_else(|| {
            let why = row.end_reason.unwrap_or_else(|| "its node has not answered yet".to_owned());
            ApiError::new(ErrorCode::NodeUnreachable, format!("the session is {}: {why}", row.state))
        })
    }

    /// There may be news for who waits for events.
    pub(crate) fn told(&self) {
        self.news.send_modify(|number| *number = number.wrapping_add(1));
    }
}

/// A refusal that may be none a moment later.
pub(crate) fn is_passing(error: &ApiError) -> bool {
    [ErrorCode::ShuttingDown, ErrorCode::RuntimeUnavailable, ErrorCode::NodeUnreachable, ErrorCode::StoreUnavailable, ErrorCode::Unauthorized]
        .iter()
        .any(|code| error.0.is(*code))
}

fn check(body: &UserSessionCreate) -> Result<(), ApiError> {
    checks::check_env(&body.env, session_limits::MAX_ENV, session_limits::MAX_ENV_BYTES)?;
    checks::check_labels(&body.labels)?;
    body.limits.as_ref().map_or(Ok(()), checks::check_limits)?;
    for (field, seconds) in [("max_lifetime_seconds", body.max_lifetime_seconds), ("idle_timeout_seconds", body.idle_timeout_seconds)] {
        seconds.map_or(Ok(0), |seconds| checks::check_seconds(field, seconds))?;
    }
    Ok(())
}

fn taken(id: SessionId) -> ApiError {
    ApiError::new(ErrorCode::SessionIdInUse, format!("session {id} was made by another request"))
}

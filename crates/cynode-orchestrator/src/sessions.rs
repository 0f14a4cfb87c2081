//! Sessions, from a person's request to a node and back.
//!
//! What must stay true: a session is in the database before its node hears of it, so that whoever dies, somebody else brings it
//! up or to its end. Every call to a node can be repeated.

use std::time::Duration;

use cynode_api::{
    Artifact, ArtifactId, ErrorCode, LimitsRequest, NodeId, Session, SessionCreate, SessionEnd,
    SessionId, SessionState, Task, TaskId, TokenKind, UserSessionCreate, WorkspaceRef,
    session_limits,
};
use cynode_service::{ApiError, checks};
use http::StatusCode;
use time::OffsetDateTime;

use crate::{
    Orchestrator,
    caller::Caller,
    db::{NewSession, SessionRow, to_json},
    fleet::{Failed, answer_for},
    placement::{NodeRequirements, Work, beyond, check_node_labels, missing_label},
    reconcile::settle_execs,
};

/// A node answers a create within a minute, with how far it is.
const CREATE: Duration = Duration::from_secs(70);
/// How long an end may take before it goes on without its caller.
const END: Duration = Duration::from_secs(60);
/// Who asks how a session is gets the last that is known when its node does not answer.
const SHOW: Duration = Duration::from_secs(5);

/// A task that somebody did not care to make.
fn unnamed_task(id: TaskId, name: String, created_by: &str) -> Task {
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

fn no_artifact(id: ArtifactId) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("there is no artifact {id}"))
}

impl Orchestrator {
    pub(crate) async fn create_session(
        &self,
        caller: &Caller,
        body: UserSessionCreate,
    ) -> Result<(StatusCode, Session), ApiError> {
        check(&body)?;
        check_node_labels(&body.node_labels)?;
        let session_id = body.session_id.unwrap_or_else(SessionId::generate);
        if body.session_id.is_some()
            && let Some(existing) = self.db.any_session(session_id).await?
        {
            return self.same_session(caller, existing, &body).await;
        }
        let (task, is_new) = self
            .task_for(caller, body.task_id, || format!("session {session_id}"))
            .await?;
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
        let request = SessionCreate {
            version: Some(cynode_api::API_VERSION),
            task_id,
            session_id,
            image_ref: image.image_ref.clone(),
            image_digest: image.image_digest.clone(),
            workspace_ref: body.workspace_ref.clone(),
            env: body.env.clone(),
            limits: body.limits,
            network_policy: body.network_policy,
            max_lifetime_seconds: body.max_lifetime_seconds,
            idle_timeout_seconds: body.idle_timeout_seconds,
            pty_allowed: body.pty_allowed,
            labels: body.labels.clone(),
        };
        let kept = self
            .workspace_node(task_id, body.workspace_ref.as_ref())
            .await?;
        let wanted = NodeRequirements {
            labels: &body.node_labels,
            limits: body.limits.unwrap_or_default(),
        };
        let node_id = match kept {
            Some(node_id) => self.fitting_node(node_id, &wanted).await?,
            None => match self.choose_node(image.version_id, &wanted, &[]).await {
                Ok(node) => node.id,
                Err(error) => {
                    self.check_largest(&wanted).await?;
                    return Err(error);
                }
            },
        };
        let new = NewSession {
            body: &body,
            request: &request,
            node_id,
            image_version_id: image.version_id,
            created_by: &caller.user_name,
        };
        let Some(row) = self
            .db
            .insert_session(&new, is_new.then_some(&task), &caller.scope)
            .await?
        else {
            let existing = self
                .db
                .any_session(session_id)
                .await?
                .ok_or_else(|| taken(session_id))?;
            return self.same_session(caller, existing, &body).await;
        };
        // To its end even when the caller goes away.
        let orchestrator = self.clone();
        let brought = tokio::spawn(async move { orchestrator.bring_up(&row).await }).await;
        let session = brought.map_err(|_| {
            ApiError::new(ErrorCode::Internal, "creating the session was interrupted")
        })??;
        Ok((
            if session.state == SessionState::Creating {
                StatusCode::ACCEPTED
            } else {
                StatusCode::CREATED
            },
            session,
        ))
    }

    /// The task that somebody names, or one that nobody cared to make; the flag says whether it is new.
    pub(crate) async fn task_for(
        &self,
        caller: &Caller,
        named: Option<TaskId>,
        name: impl FnOnce() -> String,
    ) -> Result<(Task, bool), ApiError> {
        match named {
            Some(id) => Ok((self.db.task(&caller.scope, id).await?, false)),
            None => Ok((
                unnamed_task(TaskId::generate(), name(), &caller.user_name),
                true,
            )),
        }
    }

    /// An artifact that a workspace begins with must be one that the caller may read; an agent's, one of the same task.
    pub(crate) async fn check_artifact(
        &self,
        caller: &Caller,
        task_id: TaskId,
        wanted: Option<&WorkspaceRef>,
    ) -> Result<(), ApiError> {
        let Some(WorkspaceRef::Artifact(id)) = wanted else {
            return Ok(());
        };
        let artifact = self.readable_artifact(caller, *id).await?;
        if caller.kind != TokenKind::User && artifact.task_id != task_id {
            return Err(no_artifact(*id));
        }
        Ok(())
    }

    pub(crate) async fn readable_artifact(
        &self,
        caller: &Caller,
        id: ArtifactId,
    ) -> Result<Artifact, ApiError> {
        let artifact = self.db.artifact(id).await?;
        if !visible(
            self.db.task(&caller.scope, artifact.task_id).await,
            ErrorCode::NotFound,
        )? {
            return Err(no_artifact(id));
        }
        Ok(artifact)
    }

    /// The same request once more: the same session.
    async fn same_session(
        &self,
        caller: &Caller,
        existing: SessionRow,
        body: &UserSessionCreate,
    ) -> Result<(StatusCode, Session), ApiError> {
        let is_visible = visible(
            self.db.session(&caller.scope, existing.session_id).await,
            ErrorCode::SessionNotFound,
        )?;
        if !is_visible || existing.body != to_json(body) {
            return Err(taken(existing.session_id));
        }
        if existing.state == SessionState::Creating {
            let session = self.bring_up(&existing).await?;
            return Ok((
                if session.state == SessionState::Creating {
                    StatusCode::ACCEPTED
                } else {
                    StatusCode::OK
                },
                session,
            ));
        }
        Ok((StatusCode::OK, existing.object))
    }

    /// Asks the node for the session, as often as it takes: the node makes it once.
    pub(crate) async fn bring_up(&self, row: &SessionRow) -> Result<Session, ApiError> {
        let client = self.fleet.client(&self.db, row.node_id).await?;
        match answer_for(
            row.session_id,
            self.fleet
                .call(row.node_id, CREATE, client.create_session(&row.request))
                .await,
        ) {
            Ok(session) => {
                let session = self.write_down(row.node_id, session, row.read_at).await?;
                if session.state == SessionState::Creating {
                    self.db.release_session(row.session_id, 1).await?;
                }
                self.told();
                Ok(session)
            }
            Err(Failed::Refused(error)) if !is_passing(&error) => {
                self.db
                    .set_session_state(
                        row.session_id,
                        &[SessionState::Creating, SessionState::Ending],
                        SessionState::Failed,
                        &error.0.detail,
                    )
                    .await?;
                self.told();
                Err(error)
            }
            Err(failed) => {
                // Whoever looks next asks again. The caller may, too, with the same session_id.
                self.db.release_session(row.session_id, 1).await?;
                self.sessions_wait.notify_one();
                let mut error = failed.problem();
                error.0.remedy = format!(
                    "It goes on when the node answers: ask for the session {}, or repeat the request with it as session_id.",
                    row.session_id
                );
                Err(error)
            }
        }
    }

    /// Writes down what a node answered to a question of `asked_at`. When somebody else wrote something meanwhile, nobody knows
    /// which is newer: then the node is asked again, so that the caller's next call finds what this answer says.
    pub(crate) async fn write_down(
        &self,
        node_id: NodeId,
        mut session: Session,
        mut asked_at: OffsetDateTime,
    ) -> Result<Session, ApiError> {
        let id = session.session_id;
        for _ in 0..5 {
            if self.db.observe_session(&session, asked_at).await? {
                break;
            }
            let Some(row) = self.db.any_session(id).await? else {
                break;
            };
            // It ended while it was being made. The reconciler ends it there.
            if matches!(row.state, SessionState::Ended | SessionState::Failed) {
                self.sessions_wait.notify_one();
                return Ok(row.object);
            }
            asked_at = row.read_at;
            let client = self.fleet.client(&self.db, node_id).await?;
            match answer_for(
                id,
                self.fleet.call(node_id, SHOW, client.get_session(id)).await,
            ) {
                Ok(now) => session = now,
                // What was answered first is true enough; the reconciler looks again.
                Err(_) => break,
            }
        }
        self.told();
        Ok(session)
    }

    /// The node that has the workspace which a request wants.
    pub(crate) async fn workspace_node(
        &self,
        task_id: TaskId,
        wanted: Option<&WorkspaceRef>,
    ) -> Result<Option<NodeId>, ApiError> {
        let Some(WorkspaceRef::Workspace(id)) = wanted else {
            return Ok(None);
        };
        let node = self.db.workspace_node(task_id, *id.as_uuid()).await?;
        node.map(Some).ok_or_else(|| {
            ApiError::new(
                ErrorCode::WorkspaceNotFound,
                format!("no session of this task kept a workspace {id}"),
            )
        })
    }

    /// A node that has a workspace, if it has the labels too and gives such limits.
    pub(crate) async fn fitting_node(
        &self,
        id: NodeId,
        wanted: &NodeRequirements<'_>,
    ) -> Result<NodeId, ApiError> {
        if wanted.labels.is_empty() && wanted.limits == LimitsRequest::default() {
            return Ok(id);
        }
        let node = self.db.node(id).await?;
        let refuse = |code, reason: String| Err(ApiError::new(code, reason));
        if let Some(excess) = beyond(&node, wanted.limits) {
            let reason = format!(
                "limits.{}: {}, which has the workspace, gives a sandbox at most {}",
                excess.limit, node.name, excess.most
            );
            return refuse(ErrorCode::LimitUnenforceable, reason);
        }
        match missing_label(&node, wanted.labels) {
            Some(reason) => refuse(
                ErrorCode::NoCapacity,
                format!("{}, which has the workspace, {reason}", node.name),
            ),
            None => Ok(id),
        }
    }

    /// Gives a session that is over a new container. That it shall run again is written down first: nothing else brings back what
    /// has ended here.
    pub(crate) async fn resume_session(&self, row: SessionRow) -> Result<Session, ApiError> {
        let was = self.db.ask_resume(row.session_id).await?;
        let asked_at = self
            .db
            .any_session(row.session_id)
            .await?
            .map_or(row.read_at, |row| row.read_at);
        let client = self.fleet.client(&self.db, row.node_id).await?;
        match answer_for(
            row.session_id,
            self.fleet
                .call(row.node_id, CREATE, client.resume_session(row.session_id))
                .await,
        ) {
            Ok(session) => self.write_down(row.node_id, session, asked_at).await,
            Err(Failed::Refused(error)) if !is_passing(&error) => {
                if let Some(was) = was {
                    let reason = row.object.end_reason.clone().unwrap_or_default();
                    self.db
                        .set_session_state(row.session_id, &[SessionState::Creating], was, &reason)
                        .await?;
                }
                Err(error)
            }
            // Nobody knows whether it came there: whoever looks next finds out.
            Err(failed) => {
                self.db.release_session(row.session_id, 1).await?;
                self.sessions_wait.notify_one();
                Err(failed.problem())
            }
        }
    }

    /// Ends a session: written down first, so that it ends also when its node can't be asked now.
    pub(crate) async fn end_session(
        &self,
        row: SessionRow,
        end: SessionEnd,
    ) -> Result<Session, ApiError> {
        self.db.ask_end(row.session_id, &end).await?;
        let Some(row) = self.db.any_session(row.session_id).await? else {
            return Err(ApiError::new(
                ErrorCode::SessionNotFound,
                "the session is gone",
            ));
        };
        // The first word on it counts.
        let end = row.ending.clone().unwrap_or(end);
        let node = self.db.node(row.node_id).await?;
        if node.is_lost || node.silent_seconds > self.config.unreachable_after() {
            return Ok(row.object);
        }
        match self.tell_end(&row, &end).await {
            Ok(session) => Ok(session),
            // The node has forgotten it, or never had it: it has ended.
            Err(Failed::Refused(error)) if error.0.is(ErrorCode::SessionNotFound) => {
                self.ended_unseen(&row, &end).await?;
                Ok(self
                    .db
                    .any_session(row.session_id)
                    .await?
                    .map_or(row.object, |row| row.object))
            }
            Err(Failed::Refused(error)) if !is_passing(&error) => Err(error),
            // It ends when the node answers again.
            Err(failed) => {
                tracing::debug!(session_id = %row.session_id, problem = %failed.problem().0, "A node can't be told of an end now.");
                // Not when the time that this call was given is over, but soon.
                self.db.release_session(row.session_id, 1).await?;
                self.sessions_wait.notify_one();
                Ok(row.object)
            }
        }
    }

    /// A session that was to end, and of which its node knows nothing.
    pub(crate) async fn ended_unseen(
        &self,
        row: &SessionRow,
        end: &SessionEnd,
    ) -> Result<(), ApiError> {
        let reason = end
            .reason
            .clone()
            .unwrap_or_else(|| "its node does not know it".to_owned());
        let from = [
            SessionState::Creating,
            SessionState::Running,
            SessionState::Ending,
            SessionState::Lost,
        ];
        self.db
            .set_session_state(row.session_id, &from, SessionState::Ended, &reason)
            .await?;
        self.told();
        Ok(())
    }

    /// Tells the node to end a session, and writes down what it says.
    pub(crate) async fn tell_end(
        &self,
        row: &SessionRow,
        end: &SessionEnd,
    ) -> Result<Session, Failed> {
        let client = self
            .fleet
            .client(&self.db, row.node_id)
            .await
            .map_err(Failed::Refused)?;
        if let Err(error) = settle_execs(self, row.session_id).await {
            tracing::debug!(session_id = %row.session_id, error = %error.0, "How its commands ended is not known.");
        }
        let session = answer_for(
            row.session_id,
            self.fleet
                .call(row.node_id, END, client.end_session(row.session_id, end))
                .await,
        )?;
        // An end is the node's last word on it: nothing that was written meanwhile is newer.
        self.db
            .observe_session(
                &session,
                OffsetDateTime::now_utc() + time::Duration::days(1),
            )
            .await
            .map_err(Failed::Refused)?;
        self.told();
        Ok(session)
    }

    /// As it is now: the node's word when it answers, else the last one known.
    pub(crate) async fn show_session(&self, row: SessionRow) -> Result<Session, ApiError> {
        if matches!(row.state, SessionState::Ended | SessionState::Failed) {
            return Ok(row.object);
        }
        let asked = async {
            let client = self.fleet.client(&self.db, row.node_id).await.ok()?;
            answer_for(
                row.session_id,
                self.fleet
                    .call(row.node_id, SHOW, client.get_session(row.session_id))
                    .await,
            )
            .ok()
        };
        if let Some(session) = asked.await {
            if row.is_news(&session) {
                self.db.observe_session(&session, row.read_at).await?;
                self.told();
            }
            return Ok(Session {
                state: row.state_by(&session),
                ..session
            });
        }
        Ok(row.object)
    }

    /// There may be news for who waits for events.
    pub(crate) fn told(&self) {
        self.news
            .send_modify(|number| *number = number.wrapping_add(1));
    }
}

/// A refusal that may be none a moment later.
pub(crate) fn is_passing(error: &ApiError) -> bool {
    [
        ErrorCode::ShuttingDown,
        ErrorCode::RuntimeUnavailable,
        ErrorCode::NodeUnreachable,
        ErrorCode::StoreUnavailable,
        ErrorCode::Unauthorized,
    ]
    .iter()
    .any(|code| error.0.is(*code))
}

fn check(body: &UserSessionCreate) -> Result<(), ApiError> {
    checks::check_env(
        &body.env,
        session_limits::MAX_ENV,
        session_limits::MAX_ENV_BYTES,
    )?;
    checks::check_labels(&body.labels)?;
    body.limits.as_ref().map_or(Ok(()), checks::check_limits)?;
    for (field, seconds) in [
        ("max_lifetime_seconds", body.max_lifetime_seconds),
        ("idle_timeout_seconds", body.idle_timeout_seconds),
    ] {
        seconds.map_or(Ok(0), |seconds| checks::check_seconds(field, seconds))?;
    }
    Ok(())
}

/// Whether a lookup in the caller's scope succeeded. A database that fails says nothing about what the caller may see.
pub(crate) fn visible<T>(found: Result<T, ApiError>, missing: ErrorCode) -> Result<bool, ApiError> {
    match found {
        Ok(_) => Ok(true),
        Err(error) if error.0.is(missing) => Ok(false),
        Err(error) => Err(error),
    }
}

fn taken(id: SessionId) -> ApiError {
    ApiError::new(
        ErrorCode::SessionIdInUse,
        format!("session {id} was made by another request"),
    )
}

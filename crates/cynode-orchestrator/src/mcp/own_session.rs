//! The session of a token: what calls on `/mcp/coding` use when they name none.
//!
//! Its id is derived from the token and a generation (`keys.rs`), so that all orchestrators agree
//! on it without a lock. The generation advances once the session that it names exists.
//!
//! Invariants: every step is a call of the user API through the gate, recorded with the tool that
//! caused it. Files are never lost silently: the first use makes a session, a session whose
//! workspace is kept is resumed, and only an explicit create replaces one whose workspace is gone.

use cynode_api::{ErrorCode, SessionId, SessionState, UserSessionCreate};
use cynode_service::ApiError;
use http::Method;
use serde_json::{Value, json};

use super::{
    Client, Gateway,
    plan::{ApiRequest, OwnSession, Plan},
    run::{ToolFailure, ToolOutput},
    tools::Tool,
};
use crate::{caller::Caller, gate::Stage};

/// How many generations one create passes over: others may make and end sessions meanwhile.
const MAX_GENERATIONS: usize = 4;

/// The codes of calls that found no running session. They had no effect.
const DOWN: [ErrorCode; 3] = [
    ErrorCode::SessionEnded,
    ErrorCode::NotRunning,
    ErrorCode::SessionNotFound,
];
/// The codes of a resume whose workspace is gone.
const GONE: [ErrorCode; 4] = [
    ErrorCode::NotResumable,
    ErrorCode::SessionEnded,
    ErrorCode::SessionNotFound,
    ErrorCode::WorkspaceNotFound,
];

fn is_one_of(failure: &ToolFailure, codes: &[ErrorCode]) -> bool {
    codes.iter().any(|code| failure.refusal.error.is(*code))
}

impl Gateway {
    /// The session of a token that names exactly one task.
    pub(super) async fn own_session(&self, caller: &Caller) -> Result<OwnSession, ApiError> {
        let &[task] = caller.task_ids.as_slice() else {
            return Err(ApiError::new(
                ErrorCode::Forbidden,
                "the token does not name exactly one task",
            ));
        };
        let db = &self.orchestrator.db;
        let generation = db.session_generation(caller.token_id).await?;
        Ok(OwnSession {
            task,
            id: self.own_session_id(caller, generation.max(1)),
            generation,
            creates: true,
        })
    }

    fn own_session_id(&self, caller: &Caller, generation: i64) -> SessionId {
        let keys = &self.orchestrator.keys;
        keys.own_session(caller.token_id, generation)
    }

    /// Runs a plan in the token's own session, which is made or resumed if need be.
    pub(super) async fn run_in_own_session(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        own: OwnSession,
        plan: Plan,
    ) -> Result<ToolOutput, ToolFailure> {
        let mut note = None;
        if own.generation == 0 {
            if !own.creates {
                let error = ApiError::new(
                    ErrorCode::SessionNotFound,
                    "this token has no session yet: the first command or file call makes it",
                );
                return Err(ToolFailure::unrecorded(Stage::Resource, error));
            }
            let body = UserSessionCreate {
                task_id: Some(own.task),
                ..UserSessionCreate::default()
            };
            let made = self
                .make_generation(client, tool, own.task, 1, &body)
                .await?;
            // A session that an interrupted call has made is used as it is.
            if made.is_some() {
                note = Some(format!(
                    "Session {} was created, with an empty workspace at /workspace.",
                    own.id
                ));
            }
        }
        match self.run_plan(client, tool, plan.clone()).await {
            Err(failure) if is_one_of(&failure, &DOWN) => {}
            Err(failure) => return Err(failure),
            Ok(output) => return Ok(output.with_note_before(note)),
        }
        // A node that has just restarted refuses commands as if its sessions had ended, although
        // their processes run on.
        let before = self.shown(client, tool, own).await?;
        let after = self.resume(client, tool, own).await.map_err(|failure| {
            if !is_one_of(&failure, &GONE) {
                return failure;
            }
            let error = ApiError::new(
                ErrorCode::SessionEnded,
                format!("session {} has ended and its workspace is gone", own.id),
            );
            let remedy = format!(
                "Call {} to start a new session. The files of this one do not come back.",
                client.surface.spelled("sandbox.session.create")
            );
            ToolFailure::recorded(Stage::Run, error.with_remedy(remedy))
        })?;
        let output = self.run_plan(client, tool, plan).await?;
        let is_new = !goes_on(before.as_ref(), &after);
        Ok(output.with_note_before(is_new.then(|| resumed(own.id))))
    }

    /// Answers the token's session if it lives, resumes it if its workspace is kept, or creates
    /// the next one. Concurrent calls agree on one session.
    pub(super) async fn create_own_session(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        own: OwnSession,
        body: UserSessionCreate,
    ) -> Result<ToolOutput, ToolFailure> {
        let mut own = own;
        for _ in 0..MAX_GENERATIONS {
            if own.generation > 0
                && let Some(output) = self.current(client, tool, own).await?
            {
                return Ok(output);
            }
            let next = own.generation + 1;
            let made = self
                .make_generation(client, tool, own.task, next, &body)
                .await?;
            if let Some(value) = made {
                let is_over = [SessionState::Ended, SessionState::Failed]
                    .iter()
                    .any(|state| value["state"] == json!(state));
                if !is_over {
                    return Ok(value.into());
                }
            }
            own = OwnSession {
                id: self.own_session_id(client.caller, next),
                generation: next,
                ..own
            };
        }
        let error = ApiError::new(
            ErrorCode::SessionIdInUse,
            "other calls with this token keep making and ending sessions",
        );
        Err(ToolFailure::recorded(Stage::Run, error))
    }

    /// The current session, if it lives or can be resumed.
    async fn current(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        own: OwnSession,
    ) -> Result<Option<ToolOutput>, ToolFailure> {
        let Some(value) = self.shown(client, tool, own).await? else {
            return Ok(None);
        };
        if lives(&value) {
            let note = format!(
                "Session {} already exists; it is answered unchanged. End it to start another.",
                own.id
            );
            return Ok(Some(ToolOutput {
                value,
                note: Some(note),
            }));
        }
        match self.resume(client, tool, own).await {
            Ok(value) => Ok(Some(ToolOutput {
                value,
                note: Some(resumed(own.id)),
            })),
            Err(failure) if is_one_of(&failure, &GONE) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// The token's session as its node reports it; `None` if there is no such session.
    async fn shown(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        own: OwnSession,
    ) -> Result<Option<Value>, ToolFailure> {
        let path = format!("/v1/sessions/{}", own.id);
        match self
            .call(client, tool, ApiRequest::get(path, own.task))
            .await
        {
            Ok(session) => Ok(Some(session)),
            Err(failure) if is_one_of(&failure, &GONE) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    async fn resume(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        own: OwnSession,
    ) -> Result<Value, ToolFailure> {
        let path = format!("/v1/sessions/{}/resume", own.id);
        let request = ApiRequest::new(Method::POST, path, own.task)
            .json(&json!({}))
            .map_err(|error| ToolFailure::unrecorded(Stage::Arguments, error))?;
        self.call(client, tool, request).await
    }

    /// Creates the session of a generation and advances to it. Answers `None` if another request
    /// has created it.
    async fn make_generation(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        task: cynode_api::TaskId,
        generation: i64,
        body: &UserSessionCreate,
    ) -> Result<Option<Value>, ToolFailure> {
        let body = UserSessionCreate {
            session_id: Some(self.own_session_id(client.caller, generation)),
            ..body.clone()
        };
        let request = ApiRequest::new(Method::POST, "/v1/sessions", task)
            .json(&body)
            .map_err(|error| ToolFailure::unrecorded(Stage::Arguments, error))?;
        let made = match self.call(client, tool, request).await {
            Ok(value) => Some(value),
            Err(failure) if is_one_of(&failure, &[ErrorCode::SessionIdInUse]) => None,
            Err(failure) => return Err(failure),
        };
        let db = &self.orchestrator.db;
        db.advance_session_generation(client.caller.token_id, generation - 1)
            .await
            .map_err(|error| ToolFailure::recorded(Stage::Run, error.into()))?;
        Ok(made)
    }
}

/// Whether a session has its container, or gets it.
fn lives(session: &Value) -> bool {
    [SessionState::Running, SessionState::Creating]
        .iter()
        .any(|state| session["state"] == json!(state))
}

/// Whether a session is the same as before a resume, which gives it another lifetime.
fn goes_on(before: Option<&Value>, after: &Value) -> bool {
    before.is_some_and(|before| lives(before) && before["expires_at"] == after["expires_at"])
}

fn resumed(id: SessionId) -> String {
    format!("Session {id} had ended and was resumed: its files are kept, its processes are gone.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_session_with_a_new_container_was_resumed() {
        let session =
            |state: &str, expires_at: &str| json!({"state": state, "expires_at": expires_at});
        let after = session("running", "2");
        // The node has restarted, and the sandbox ran on.
        assert!(goes_on(Some(&session("running", "2")), &after));
        assert!(!goes_on(Some(&session("ended", "1")), &after));
        assert!(!goes_on(Some(&session("lost", "1")), &after));
        // The node did not answer at first, so its last report was shown.
        assert!(!goes_on(Some(&session("running", "1")), &after));
        assert!(!goes_on(None, &after));
    }
}

//! Sessions: create, find, extend, end, resume.

use cynode_api::{
    Page, Session, SessionCreate, SessionEnd, SessionId, SessionPatch, SessionState, SignalName,
    SignalSession, TaskId, UserSessionCreate,
};
use http::Method;

use crate::{Error, Result, SessionClient, client::MAX_PAGES};

/// The sessions to list.
#[derive(Clone, Debug, Default)]
pub struct SessionFilter {
    pub state: Option<SessionState>,
    pub task_id: Option<TaskId>,
    /// All of them must match.
    pub labels: Vec<(String, String)>,
}

impl SessionFilter {
    fn query(&self, cursor: Option<String>) -> Vec<(&'static str, String)> {
        let mut query = Vec::new();
        query.extend(self.state.map(|state| ("state", state.to_string())));
        query.extend(self.task_id.map(|task| ("task_id", task.to_string())));
        // The API filters by one label; the client checks the others.
        query.extend(
            self.labels
                .first()
                .map(|(key, value)| ("label", format!("{key}={value}"))),
        );
        query.extend(cursor.map(|cursor| ("cursor", cursor)));
        query
    }

    fn has_labels(&self, session: &Session) -> bool {
        self.labels
            .iter()
            .all(|(key, value)| session.labels.get(key) == Some(value))
    }
}

impl SessionClient {
    /// The session may still be `creating` if its image or node is slow: poll with
    /// [`Self::get_session`].
    pub async fn create_session(&self, request: &SessionCreate) -> Result<Session> {
        self.call(Method::POST, self.sessions(), request).await
    }

    /// The same on an orchestrator, where every field has a default.
    pub async fn create_user_session(&self, request: &UserSessionCreate) -> Result<Session> {
        self.call(Method::POST, self.sessions(), request).await
    }

    pub async fn get_session(&self, id: SessionId) -> Result<Session> {
        self.get(&self.session(id, ""), &()).await
    }

    pub async fn list_sessions_page(
        &self,
        filter: &SessionFilter,
        cursor: Option<String>,
    ) -> Result<Page<Session>> {
        let mut page: Page<Session> = self.get(self.sessions(), &filter.query(cursor)).await?;
        page.items.retain(|session| filter.has_labels(session));
        Ok(page)
    }

    /// All pages of the list.
    pub async fn list_sessions(&self, filter: &SessionFilter) -> Result<Vec<Session>> {
        let mut sessions = Vec::new();
        let mut cursor = None;
        for _ in 0..MAX_PAGES {
            let page = self.list_sessions_page(filter, cursor).await?;
            sessions.extend(page.items);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(sessions);
            }
        }
        Err(Error::answer(
            self.base(),
            format!("the list has more than {MAX_PAGES} pages"),
        ))
    }

    pub async fn patch_session(&self, id: SessionId, patch: &SessionPatch) -> Result<Session> {
        self.call(Method::PATCH, &self.session(id, ""), patch).await
    }

    pub async fn end_session(&self, id: SessionId, end: &SessionEnd) -> Result<Session> {
        self.call(Method::POST, &self.session(id, "/end"), end)
            .await
    }

    /// Gives a lost or ended session a new container with its retained workspace.
    pub async fn resume_session(&self, id: SessionId) -> Result<Session> {
        self.call(
            Method::POST,
            &self.session(id, "/resume"),
            &serde_json::json!({ "version": cynode_api::API_VERSION }),
        )
        .await
    }

    /// Signals every process in the sandbox except process 1.
    pub async fn signal_session(&self, id: SessionId, signal: SignalName) -> Result<()> {
        self.call_empty(
            Method::POST,
            &self.session(id, "/signal"),
            &SignalSession {
                version: Some(cynode_api::API_VERSION),
                signal,
            },
        )
        .await
    }
}

//! The orchestrator's user API.

use std::time::Duration;

use bytes::Bytes;
use cynode_api::{
    API_VERSION, Artifact, ArtifactId, EventPage, Group, GroupCreate, GroupId, Image, ImageCreate,
    ImageId, ImagePatch, Job, JobCreate, JobId, JobState, Node, NodeDrain, NodeId, NodeKeyCreate,
    NodeKeyCreated, OutputPage, OutputQuery, Page, Preference, PreferenceScope, Project,
    ProjectCreate, ProjectId, ProjectPatch, Setting, Task, TaskCreate, TaskId, Token, TokenCreate,
    TokenCreated, TokenId, TokenRenew, User, UserCreate, UserId, ValuePut, event_limits,
};
use http::{Method, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::{Body, Response};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    Error, Readiness, Result, SessionClient, Surface, Trust,
    client::{CALL_TIMEOUT, MAX_PAGES, check_status, display_url, json, send},
};

/// The user API of an orchestrator. Cheap to clone.
#[derive(Clone, Debug)]
pub struct UserClient(pub(crate) SessionClient);

/// The streamed content of an artifact.
#[derive(Debug)]
pub struct ArtifactBody {
    /// The hash that the server reports, in hexadecimal.
    pub sha256: Option<String>,
    response: Response,
    url: String,
}

impl ArtifactBody {
    pub(crate) fn new(response: Response) -> Self {
        let sha256 = response
            .headers()
            .get("x-content-sha256")
            .and_then(|value| value.to_str().ok())
            .map(ToOwned::to_owned);
        Self {
            sha256,
            url: display_url(response.url()),
            response,
        }
    }

    /// The next piece; `None` at the end. A truncated body is an error.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        self.response
            .chunk()
            .await
            .map_err(|error| Error::broken(&self.url, error))
    }
}

/// Query parameters, without the absent ones.
pub(crate) fn query<const N: usize>(
    pairs: [(&'static str, Option<String>); N],
) -> Vec<(&'static str, String)> {
    pairs
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
}

/// Every byte that is not unreserved (RFC 3986) is escaped, slashes too.
const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// A name as one segment of a path.
pub(crate) fn segment(text: &str) -> String {
    utf8_percent_encode(text, UNRESERVED).to_string()
}

/// A path of several segments. Servers resolve `.` and `..` even when they are escaped, so both are
/// refused.
fn segments(path: &str) -> Result<String> {
    if path
        .split('/')
        .any(|segment| matches!(segment, "" | "." | ".."))
    {
        return Err(Error::Setup(format!(
            "'{path}' is not a valid artifact path: it must be relative, without '.' and '..'"
        )));
    }
    Ok(path.split('/').map(segment).collect::<Vec<_>>().join("/"))
}

impl UserClient {
    /// A client for the orchestrator at `base` (`http://127.0.0.1:12080`).
    pub fn new(base: &str, token: &str) -> Result<Self> {
        Self::trusting(base, token, Trust::Environment)
    }

    pub fn trusting(base: &str, token: &str, trust: Trust<'_>) -> Result<Self> {
        SessionClient::trusting(base, token, Surface::User, trust).map(Self)
    }

    /// The session calls, which both APIs share.
    #[must_use]
    pub fn sessions(&self) -> &SessionClient {
        &self.0
    }

    #[must_use]
    pub fn base(&self) -> &str {
        self.0.base()
    }

    pub async fn readyz(&self) -> Result<Readiness> {
        self.0.readyz().await
    }

    /// All pages of a list.
    pub(crate) async fn all<T: DeserializeOwned>(
        &self,
        path: &str,
        mut query: Vec<(&'static str, String)>,
    ) -> Result<Vec<T>> {
        let mut items = Vec::new();
        query.push(("limit", "1000".to_owned()));
        let filters = query.len();
        for _ in 0..MAX_PAGES {
            let page: Page<T> = self.0.get(path, &query).await?;
            items.extend(page.items);
            let Some(cursor) = page.next_cursor else {
                return Ok(items);
            };
            query.truncate(filters);
            query.push(("cursor", cursor));
        }
        Err(Error::answer(
            self.base(),
            format!("the list has more than {MAX_PAGES} pages"),
        ))
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T> {
        self.0.call(method, path, body).await
    }

    pub async fn create_project(&self, request: &ProjectCreate) -> Result<Project> {
        self.send(Method::POST, "/v1/projects", request).await
    }

    pub async fn project(&self, id: ProjectId) -> Result<Project> {
        self.0.get(&format!("/v1/projects/{id}"), &()).await
    }

    pub async fn patch_project(&self, id: ProjectId, patch: &ProjectPatch) -> Result<Project> {
        self.send(Method::PATCH, &format!("/v1/projects/{id}"), patch)
            .await
    }

    pub async fn create_user(&self, request: &UserCreate) -> Result<User> {
        self.send(Method::POST, "/v1/users", request).await
    }

    pub async fn user(&self, id: UserId) -> Result<User> {
        self.0.get(&format!("/v1/users/{id}"), &()).await
    }

    pub async fn create_group(&self, request: &GroupCreate) -> Result<Group> {
        self.send(Method::POST, "/v1/groups", request).await
    }

    pub async fn group(&self, id: GroupId) -> Result<Group> {
        self.0.get(&format!("/v1/groups/{id}"), &()).await
    }

    pub async fn create_task(&self, request: &TaskCreate) -> Result<Task> {
        self.send(Method::POST, "/v1/tasks", request).await
    }

    pub async fn tasks(&self, project: Option<ProjectId>) -> Result<Vec<Task>> {
        self.all(
            "/v1/tasks",
            query([("project_id", project.map(|id| id.to_string()))]),
        )
        .await
    }

    pub async fn task(&self, id: TaskId) -> Result<Task> {
        self.0.get(&format!("/v1/tasks/{id}"), &()).await
    }

    /// Creates a job without waiting for it to end. Idempotent if the caller sets `job_id`.
    pub async fn create_job(&self, request: &JobCreate) -> Result<Job> {
        self.send(Method::POST, "/v1/jobs", request).await
    }

    pub async fn jobs(&self, state: Option<JobState>, task: Option<TaskId>) -> Result<Vec<Job>> {
        self.all(
            "/v1/jobs",
            query([
                ("state", state.map(|state| state.to_string())),
                ("task_id", task.map(|id| id.to_string())),
            ]),
        )
        .await
    }

    pub async fn job(&self, id: JobId) -> Result<Job> {
        self.0.get(&format!("/v1/jobs/{id}"), &()).await
    }

    /// A job whose results are shortened to so many bytes each; 0 leaves them out.
    pub async fn job_within(&self, id: JobId, max_result_bytes: usize) -> Result<Job> {
        let query = [("max_result_bytes", max_result_bytes.to_string())];
        self.0.get(&format!("/v1/jobs/{id}"), &query).await
    }

    pub async fn job_output(&self, id: JobId, query: &OutputQuery) -> Result<OutputPage> {
        self.0.get(&format!("/v1/jobs/{id}/output"), query).await
    }

    /// Returns once the job has ended, or after a while in its current state.
    pub async fn stop_job(&self, id: JobId) -> Result<Job> {
        self.send(
            Method::POST,
            &format!("/v1/jobs/{id}/stop"),
            &serde_json::json!({ "version": API_VERSION }),
        )
        .await
    }

    pub async fn create_image(&self, request: &ImageCreate) -> Result<Image> {
        self.send(Method::POST, "/v1/images", request).await
    }

    pub async fn images(&self) -> Result<Vec<Image>> {
        self.all("/v1/images", Vec::new()).await
    }

    pub async fn patch_image(&self, id: ImageId, patch: &ImagePatch) -> Result<Image> {
        self.send(Method::PATCH, &format!("/v1/images/{id}"), patch)
            .await
    }

    pub async fn image(&self, id: ImageId) -> Result<Image> {
        self.0.get(&format!("/v1/images/{id}"), &()).await
    }

    /// Removes an image, or one version of it.
    pub async fn remove_image(&self, id: ImageId, version: Option<&str>) -> Result<()> {
        let query = query([("image_version", version.map(ToOwned::to_owned))]);
        self.delete(&format!("/v1/images/{id}"), &query).await
    }

    pub async fn node(&self, id: NodeId) -> Result<Node> {
        self.0.get(&format!("/v1/nodes/{id}"), &()).await
    }

    pub async fn nodes(&self) -> Result<Vec<Node>> {
        self.all("/v1/nodes", Vec::new()).await
    }

    pub async fn drain_node(&self, id: NodeId, drain: bool) -> Result<Node> {
        self.send(
            Method::POST,
            &format!("/v1/nodes/{id}/drain"),
            &NodeDrain {
                version: Some(API_VERSION),
                drain: Some(drain),
            },
        )
        .await
    }

    pub async fn create_node_key(&self, request: &NodeKeyCreate) -> Result<NodeKeyCreated> {
        self.send(Method::POST, "/v1/nodes/keys", request).await
    }

    pub async fn create_token(&self, request: &TokenCreate) -> Result<TokenCreated> {
        self.send(Method::POST, "/v1/tokens", request).await
    }

    pub async fn tokens(&self) -> Result<Vec<Token>> {
        self.all("/v1/tokens", Vec::new()).await
    }

    /// Replaces the secret of a token, which keeps its id.
    pub async fn renew_token(&self, id: TokenId, request: &TokenRenew) -> Result<TokenCreated> {
        self.send(Method::POST, &format!("/v1/tokens/{id}/renew"), request)
            .await
    }

    pub async fn revoke_token(&self, id: TokenId) -> Result<()> {
        self.delete(&format!("/v1/tokens/{id}"), &[]).await
    }

    async fn delete(&self, path: &str, query: &[(&'static str, String)]) -> Result<()> {
        let request = self
            .0
            .request(Method::DELETE, path)
            .query(query)
            .timeout(CALL_TIMEOUT);
        check_status(send(request).await?).await.map(drop)
    }

    pub async fn settings(&self) -> Result<Vec<Setting>> {
        self.all("/v1/settings", Vec::new()).await
    }

    pub async fn setting(&self, key: &str) -> Result<Setting> {
        self.0
            .get(&format!("/v1/settings/{}", segment(key)), &())
            .await
    }

    pub async fn put_setting(&self, key: &str, value: Value) -> Result<Setting> {
        self.send(
            Method::PUT,
            &format!("/v1/settings/{}", segment(key)),
            &put(value),
        )
        .await
    }

    /// The effective preferences of the caller, for a task or project.
    pub async fn effective_preferences(
        &self,
        task: Option<TaskId>,
        project: Option<ProjectId>,
    ) -> Result<Vec<Preference>> {
        let query = query([
            ("task_id", task.map(|id| id.to_string())),
            ("project_id", project.map(|id| id.to_string())),
        ]);
        self.all("/v1/preferences", query).await
    }

    /// The preferences of one scope; the `system` scope ignores the id.
    pub async fn preferences(&self, scope: PreferenceScope, id: &str) -> Result<Vec<Preference>> {
        self.all(
            &format!("/v1/preferences/{}/{}", scope.as_str(), segment(id)),
            Vec::new(),
        )
        .await
    }

    pub async fn put_preference(
        &self,
        scope: PreferenceScope,
        id: &str,
        key: &str,
        value: Value,
    ) -> Result<Preference> {
        self.send(
            Method::PUT,
            &format!(
                "/v1/preferences/{}/{}/{}",
                scope.as_str(),
                segment(id),
                segment(key)
            ),
            &put(value),
        )
        .await
    }

    pub async fn artifacts(&self, task: TaskId) -> Result<Vec<Artifact>> {
        self.all("/v1/artifacts", vec![("task_id", task.to_string())])
            .await
    }

    /// Stores a new version of a path. The body is streamed, without a timeout.
    pub async fn put_artifact(
        &self,
        task: TaskId,
        path: &str,
        media_type: Option<&str>,
        body: impl Into<Body>,
    ) -> Result<Artifact> {
        let request = self
            .0
            .request(
                Method::PUT,
                &format!("/v1/tasks/{task}/artifacts/{}", segments(path)?),
            )
            .header(
                header::CONTENT_TYPE,
                media_type.unwrap_or("application/octet-stream"),
            )
            .body(body);
        json(send(request).await?).await
    }

    /// The content of a version of a path, the newest by default.
    pub async fn get_artifact(
        &self,
        task: TaskId,
        path: &str,
        version: Option<i64>,
    ) -> Result<ArtifactBody> {
        let request = self.0.request(
            Method::GET,
            &format!("/v1/tasks/{task}/artifacts/{}", segments(path)?),
        );
        let request = request.query(&query([(
            "version",
            version.map(|version| version.to_string()),
        )]));
        Ok(ArtifactBody::new(check_status(send(request).await?).await?))
    }

    pub async fn artifact_content(&self, id: ArtifactId) -> Result<ArtifactBody> {
        Ok(ArtifactBody::new(
            check_status(
                send(
                    self.0
                        .request(Method::GET, &format!("/v1/artifacts/{id}/content")),
                )
                .await?,
            )
            .await?,
        ))
    }

    /// The events after a cursor; waits for new ones up to `wait`.
    pub async fn events(
        &self,
        after: i64,
        task: Option<TaskId>,
        wait: Duration,
    ) -> Result<EventPage> {
        let wait_ms = u64::try_from(wait.as_millis())
            .unwrap_or(u64::MAX)
            .min(event_limits::MAX_WAIT_MS);
        let query = query([
            ("after", Some(after.to_string())),
            ("task_id", task.map(|id| id.to_string())),
            ("wait_ms", Some(wait_ms.to_string())),
            ("limit", Some(event_limits::MAX_PAGE.to_string())),
        ]);
        self.0.get("/v1/events", &query).await
    }
}

fn put(value: Value) -> ValuePut {
    ValuePut {
        version: Some(API_VERSION),
        value,
        if_revision: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_within_their_path_segment() {
        assert_eq!(segment("a/b?c#d é"), "a%2Fb%3Fc%23d%20%C3%A9");
        assert_eq!(segments("dir/my file").expect("a path"), "dir/my%20file");
        for path in ["../up", "a/../b", "/etc", "a//b", ".", ""] {
            assert!(segments(path).is_err(), "{path}");
        }
    }
}

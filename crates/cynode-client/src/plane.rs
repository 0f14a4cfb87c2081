//! The orchestrator's user API, typed.

use std::time::Duration;

use bytes::Bytes;
use cynode_api::{
    API_VERSION, Artifact, ArtifactId, EventPage, Image, ImageCreate, ImageId, ImagePatch, Job,
    JobCreate, JobId, JobState, Node, NodeDrain, NodeId, NodeKeyCreate, NodeKeyCreated, OutputPage,
    Page, Preference, PreferenceScope, ProjectId, Setting, Task, TaskCreate, TaskId, Token,
    TokenCreate, TokenCreated, TokenId, ValuePut, event_limits,
};
use http::{Method, header};
use reqwest::{Body, Response};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    Error, OutputQuery, Readiness, Result, Surface, Trust, WorkerClient,
    client::{CALL, accept, json, send, shown},
};

/// The most pages that a whole list may take: a server that never ends its list must not hold us.
const MAX_PAGES: usize = 1_000;

/// The user API of an orchestrator. Cheap to clone.
#[derive(Clone, Debug)]
pub struct UserClient(pub(crate) WorkerClient);

/// The bytes of an artifact, read piece by piece.
#[derive(Debug)]
pub struct ArtifactBody {
    /// As the server has it, in hexadecimal digits.
    pub sha256: Option<String>,
    response: Response,
    url: String,
}

impl ArtifactBody {
    fn new(response: Response) -> Self {
        let sha256 = response
            .headers()
            .get("x-content-sha256")
            .and_then(|value| value.to_str().ok())
            .map(ToOwned::to_owned);
        Self {
            sha256,
            url: shown(response.url()),
            response,
        }
    }

    /// The next piece; `None` at the end. A body that stops too early is an error.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        self.response
            .chunk()
            .await
            .map_err(|error| Error::broken(&self.url, error))
    }
}

/// Pairs for a query, without what is absent.
pub(crate) fn query<const N: usize>(
    pairs: [(&'static str, Option<String>); N],
) -> Vec<(&'static str, String)> {
    pairs
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
}

/// One part of a path: whatever it holds, it stays one part.
pub(crate) fn part(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes()
        .map(|byte| {
            if plain(byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

/// A path whose slashes stay. Steps would be taken by whoever reads the address, however they are written.
fn parts(path: &str) -> Result<String> {
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(Error::Setup(format!(
            "'{path}' is not a path within a task: it must be relative, without '.' and '..'"
        )));
    }
    Ok(path.split('/').map(part).collect::<Vec<_>>().join("/"))
}

impl UserClient {
    /// A client for the orchestrator at `base` (`http://127.0.0.1:12080`).
    pub fn new(base: &str, token: &str) -> Result<Self> {
        Self::trusting(base, token, Trust::Environment)
    }

    pub fn trusting(base: &str, token: &str, trust: Trust<'_>) -> Result<Self> {
        WorkerClient::trusting(base, token, Surface::User, trust).map(Self)
    }

    /// The calls of sessions, which are those of the Worker API.
    #[must_use]
    pub fn sessions(&self) -> &WorkerClient {
        &self.0
    }

    #[must_use]
    pub fn base(&self) -> &str {
        self.0.base()
    }

    pub async fn readyz(&self) -> Result<Readiness> {
        self.0.readyz().await
    }

    /// A whole list, page after page.
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

    /// Accepts a job without waiting for its end. With a `job_id` of the caller's the same request is the same job.
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

    pub async fn job_output(&self, id: JobId, query: &OutputQuery) -> Result<OutputPage> {
        self.0.get(&format!("/v1/jobs/{id}/output"), query).await
    }

    /// Answers when the job has ended, or after a while with how far it is.
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

    pub async fn revoke_token(&self, id: TokenId) -> Result<()> {
        accept(
            send(
                self.0
                    .request(Method::DELETE, &format!("/v1/tokens/{id}"))
                    .timeout(CALL),
            )
            .await?,
        )
        .await
        .map(drop)
    }

    pub async fn settings(&self) -> Result<Vec<Setting>> {
        self.all("/v1/settings", Vec::new()).await
    }

    pub async fn setting(&self, key: &str) -> Result<Setting> {
        self.0
            .get(&format!("/v1/settings/{}", part(key)), &())
            .await
    }

    pub async fn put_setting(&self, key: &str, value: Value) -> Result<Setting> {
        self.send(
            Method::PUT,
            &format!("/v1/settings/{}", part(key)),
            &put(value),
        )
        .await
    }

    /// The preferences that count for somebody.
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

    /// Those of one scope; the system has no id, and whatever stands there means it.
    pub async fn preferences(&self, scope: PreferenceScope, id: &str) -> Result<Vec<Preference>> {
        self.all(
            &format!("/v1/preferences/{}/{}", scope.as_str(), part(id)),
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
                part(id),
                part(key)
            ),
            &put(value),
        )
        .await
    }

    pub async fn artifacts(&self, task: TaskId) -> Result<Vec<Artifact>> {
        self.all("/v1/artifacts", vec![("task_id", task.to_string())])
            .await
    }

    /// Stores a new version of a path. The body streams; it has no limit of time.
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
                &format!("/v1/tasks/{task}/artifacts/{}", parts(path)?),
            )
            .header(
                header::CONTENT_TYPE,
                media_type.unwrap_or("application/octet-stream"),
            )
            .body(body);
        json(send(request).await?).await
    }

    /// The bytes of a path's newest version, or of the one that is asked for.
    pub async fn get_artifact(
        &self,
        task: TaskId,
        path: &str,
        version: Option<i64>,
    ) -> Result<ArtifactBody> {
        let request = self.0.request(
            Method::GET,
            &format!("/v1/tasks/{task}/artifacts/{}", parts(path)?),
        );
        let request = request.query(&query([(
            "version",
            version.map(|version| version.to_string()),
        )]));
        Ok(ArtifactBody::new(accept(send(request).await?).await?))
    }

    pub async fn artifact_content(&self, id: ArtifactId) -> Result<ArtifactBody> {
        Ok(ArtifactBody::new(
            accept(
                send(
                    self.0
                        .request(Method::GET, &format!("/v1/artifacts/{id}/content")),
                )
                .await?,
            )
            .await?,
        ))
    }

    /// What happened after a cursor; waits for news up to `wait`.
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
    fn what_people_name_stays_in_its_part_of_the_path() {
        assert_eq!(part("a/b?c#d é"), "a%2Fb%3Fc%23d%20%C3%A9");
        assert_eq!(parts("dir/my file").expect("a path"), "dir/my%20file");
        for path in ["../up", "a/../b", "/etc", "a//b", ".", ""] {
            assert!(parts(path).is_err(), "{path}");
        }
    }
}

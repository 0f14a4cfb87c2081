//! The git egress role, as orchestrators call it.

use std::time::Duration;

use bytes::Bytes;
use cynode_api::{
    CallId, EgressInfo, EgressState, GitCommit, GitCommitted, GitPull, GitPulled, GitPush,
    GitPushed, GitResolve, GitResolved, GitSeed, SEED_NOTES_HEADER, SeedNotes, form_frame,
};
use futures_util::{Stream, StreamExt as _, stream};
use http::{HeaderValue, Method, header};
use reqwest::{Body, Response};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Error, Result, SessionClient, Surface, Trust,
    client::{check_status, display_url, json, send},
};

/// The role answers these from its memory.
const STATE_TIMEOUT: Duration = Duration::from_secs(10);
/// Asking a remote for its references.
const RESOLVE_TIMEOUT: Duration = Duration::from_mins(2);
/// Fetching a large repository comes first, the first time.
const FETCH_TIMEOUT: Duration = Duration::from_mins(30);
const PUSH_TIMEOUT: Duration = Duration::from_mins(10);
const PULL_TIMEOUT: Duration = Duration::from_mins(2);

/// A client of the role. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GitRole(SessionClient);

/// A seed while it is received. Its end without an error is the end of the archive.
#[derive(Debug)]
pub struct SeedBody {
    pub notes: SeedNotes,
    response: Response,
    url: String,
}

impl SeedBody {
    /// The pieces of the archive.
    pub fn into_stream(self) -> impl Stream<Item = Result<Bytes>> + Send {
        let Self { response, url, .. } = self;
        response
            .bytes_stream()
            .map(move |piece| piece.map_err(|error| Error::broken(&url, error)))
    }
}

impl GitRole {
    pub fn new(base: &str, token: &str, trust: Trust<'_>) -> Result<Self> {
        SessionClient::trusting(base, token, Surface::User, trust).map(Self)
    }

    /// What the role is, and the key to seal credentials to.
    pub async fn info(&self) -> Result<EgressInfo> {
        json(
            send(
                self.0
                    .request(Method::GET, "/v1/egress")
                    .timeout(STATE_TIMEOUT),
            )
            .await?,
        )
        .await
    }

    /// Replaces the role's copy of the rules.
    pub async fn put_state(&self, state: &EgressState) -> Result<()> {
        let request = self
            .0
            .request(Method::PUT, "/v1/egress/state")
            .timeout(STATE_TIMEOUT)
            .json(state);
        check_status(send(request).await?).await.map(drop)
    }

    pub async fn resolve(&self, request: &GitResolve) -> Result<GitResolved> {
        self.post("resolve", request, RESOLVE_TIMEOUT).await
    }

    pub async fn push(&self, request: &GitPush) -> Result<GitPushed> {
        self.post("pushes", request, PUSH_TIMEOUT).await
    }

    pub async fn pull(&self, request: &GitPull) -> Result<GitPulled> {
        self.post("pulls", request, PULL_TIMEOUT).await
    }

    pub async fn seed(&self, request: &GitSeed) -> Result<SeedBody> {
        let request = self
            .0
            .request(Method::POST, "/v1/egress/git/seeds")
            .timeout(FETCH_TIMEOUT)
            .json(request);
        let response = check_status(send(request).await?).await?;
        let url = display_url(response.url());
        let notes = response.headers().get(SEED_NOTES_HEADER).map_or(
            Ok(SeedNotes::default()),
            |notes| {
                serde_json::from_slice(notes.as_bytes()).map_err(|error| Error::answer(&url, error))
            },
        )?;
        Ok(SeedBody {
            notes,
            response,
            url,
        })
    }

    /// Builds the commit of a changeset.
    pub async fn commit(&self, request: &GitCommit, changeset: Bytes) -> Result<GitCommitted> {
        // Whoever wrote the changeset can't know it.
        let boundary = CallId::generate().to_string();
        let [head, between, tail] = form_frame(&boundary, "changeset");
        let request = serde_json::to_vec(request)
            .map_err(|error| Error::Setup(format!("can't encode the request: {error}")))?;
        let length = head.len() + request.len() + between.len() + changeset.len() + tail.len();
        let parts = [
            head.into(),
            request.into(),
            between.into(),
            changeset,
            tail.into(),
        ];
        let body = stream::iter(parts.map(Ok::<Bytes, std::io::Error>));
        let request = self
            .0
            .request(Method::POST, "/v1/egress/git/commits")
            .timeout(FETCH_TIMEOUT)
            .header(
                header::CONTENT_TYPE,
                format!("multipart/form-data; boundary={boundary}"),
            )
            .header(header::CONTENT_LENGTH, HeaderValue::from(length))
            .body(Body::wrap_stream(body));
        json(send(request).await?).await
    }

    async fn post<T: DeserializeOwned>(
        &self,
        call: &str,
        request: &(impl Serialize + Sync),
        timeout: Duration,
    ) -> Result<T> {
        let request = self
            .0
            .request(Method::POST, &format!("/v1/egress/git/{call}"))
            .timeout(timeout)
            .json(request);
        json(send(request).await?).await
    }

    /// A request with the role's token, for calls that have no method here.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.0.request(method, path)
    }
}

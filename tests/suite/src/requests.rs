//! Requests as a foreign client sends them: any header, any body, and the answer as it came.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use cynode_api::Problem;
use http::{HeaderMap, Method};
use reqwest::RequestBuilder;

use crate::RunningWorker;

/// A plain HTTP client of one worker. It knows the token and nothing else of the API.
#[derive(Clone, Debug)]
pub struct Http {
    client: reqwest::Client,
    base: String,
    token: String,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Http {
    pub fn new(worker: &RunningWorker) -> Result<Self> {
        Ok(Self {
            client: reqwest::Client::builder().no_proxy().build()?,
            base: worker.url()?,
            token: worker.token()?,
        })
    }

    /// A client of whoever is at an address.
    pub fn to(base: &str, token: &str) -> Result<Self> {
        Ok(Self {
            client: reqwest::Client::builder().no_proxy().build()?,
            base: base.to_owned(),
            token: token.to_owned(),
        })
    }

    /// With the token.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.anonymous(method, path).bearer_auth(&self.token)
    }

    /// Without any token.
    pub fn anonymous(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base))
    }
}

impl Answer {
    pub async fn of(request: RequestBuilder) -> Result<Self> {
        let response = request.send().await?;
        Ok(Self {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            body: response.bytes().await?,
        })
    }

    /// A header's text; empty when it is not there.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    pub fn problem(&self) -> Result<Problem> {
        serde_json::from_slice(&self.body)
            .with_context(|| format!("{}: {}", self.status, String::from_utf8_lossy(&self.body)))
    }

    /// The status and, when it is a refusal, the problem's code.
    #[must_use]
    pub fn outcome(&self) -> (u16, String) {
        (
            self.status,
            self.problem()
                .map(|problem| problem.code)
                .unwrap_or_default(),
        )
    }
}

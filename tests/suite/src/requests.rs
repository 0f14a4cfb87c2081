//! Raw HTTP requests, as a foreign client sends them: any header, any body, and the unparsed
//! response.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use cynode_api::Problem;
use http::{HeaderMap, Method};
use reqwest::RequestBuilder;

use crate::RunningWorker;

/// A plain HTTP client of one worker. It knows the token and nothing else about the API.
#[derive(Clone, Debug)]
pub struct Http {
    client: reqwest::Client,
    base: String,
    token: String,
}

/// A complete response.
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

    /// A client for an arbitrary address.
    pub fn to(base: &str, token: &str) -> Result<Self> {
        Ok(Self {
            client: reqwest::Client::builder().no_proxy().build()?,
            base: base.to_owned(),
            token: token.to_owned(),
        })
    }

    /// A request with the token.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.anonymous(method, path).bearer_auth(&self.token)
    }

    /// A request without a token.
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

    /// A header's value, or an empty string if it is missing.
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

    /// The status, and the problem's code if the response is a refusal.
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

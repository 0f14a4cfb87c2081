//! The HTTP client of forges.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use cynode_api::ForgeKind;
use cynode_patch::escaped;
use reqwest::{
    Certificate, Method, Response, StatusCode,
    header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{ForgeApi, ForgeError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A whole request with its answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// An answer. A description of a pull request has some twenty kilobytes.
const MAX_ANSWER_BYTES: usize = 4 * 1024 * 1024;
/// The part of a forge's message that an error repeats.
const MAX_MESSAGE_CHARS: usize = 300;
/// A wait that a forge asks for is not believed beyond this.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3_600);

/// A client of one forge with one credential.
pub(super) struct ForgeClient {
    http: reqwest::Client,
    pub(super) api: ForgeApi,
    /// Taken out of messages.
    secret: String,
}

impl ForgeClient {
    pub(super) fn new(
        api: ForgeApi,
        addresses: &[IpAddr],
        ca: Option<&str>,
        secret: &str,
    ) -> Result<Self, ForgeError> {
        let failed = |error: reqwest::Error| ForgeError::Client(error.without_url().to_string());
        // A host that is an address is dialled as it is, without the resolver.
        let literal = api.host.trim_matches(['[', ']']).parse::<IpAddr>();
        if addresses.is_empty() || literal.is_ok_and(|literal| !addresses.contains(&literal)) {
            return Err(ForgeError::Unreachable(
                "its address was not admitted".to_owned(),
            ));
        }
        let checked: Vec<SocketAddr> = addresses
            .iter()
            .map(|address| SocketAddr::new(*address, api.port))
            .collect();
        let mut builder = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REQUEST_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .resolve_to_addrs(&api.host, &checked)
            .user_agent(concat!("cynode/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers(api.kind, secret)?);
        if let Some(ca) = ca {
            let certificates = Certificate::from_pem_bundle(ca.as_bytes()).map_err(failed)?;
            builder = builder.tls_certs_only(certificates);
        }
        Ok(Self {
            http: builder.build().map_err(failed)?,
            api,
            secret: secret.to_owned(),
        })
    }

    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<T, ForgeError> {
        let request = self.request(Method::GET, path).query(query);
        self.answer(request).await
    }

    pub(super) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ForgeError> {
        let request = self.request(Method::POST, path).json(body);
        self.answer(request).await
    }

    /// `path` is made of validated names only.
    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.http
            .request(method, format!("{}{path}", self.api.base))
    }

    async fn answer<T: DeserializeOwned>(
        &self,
        request: reqwest::RequestBuilder,
    ) -> Result<T, ForgeError> {
        let response = request.send().await.map_err(|error| unreachable(&error))?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = read(response).await?;
        if status.is_success() {
            return serde_json::from_slice(&body)
                .map_err(|error| ForgeError::Answer(error.to_string()));
        }
        Err(self.refusal(status, &headers, &body))
    }

    fn refusal(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> ForgeError {
        let is_out_of_requests = headers
            .get("x-ratelimit-remaining")
            .is_some_and(|left| left == "0");
        let message = || self.message(status, body);
        match status.as_u16() {
            429 => limited(headers),
            403 if is_out_of_requests || headers.contains_key(RETRY_AFTER) => limited(headers),
            401 | 403 => ForgeError::Unauthorized(message()),
            404 | 410 => ForgeError::NotFound,
            400 | 409 | 422 => ForgeError::Validation(message()),
            300..=399 => ForgeError::Redirected,
            500..=599 => ForgeError::Unreachable(message()),
            _ => ForgeError::Answer(message()),
        }
    }

    /// What the forge says about a refusal, in bounds and without what must not be shown.
    fn message(&self, status: StatusCode, body: &[u8]) -> String {
        let value: Value = serde_json::from_slice(body).unwrap_or_default();
        let mut texts = Vec::new();
        for name in ["message", "error", "errors"] {
            collect_texts(&value[name], 4, &mut texts);
        }
        let said = texts.join("; ").replace(&self.secret, "(credential)");
        let said: String = escaped(said.as_bytes())
            .chars()
            .take(MAX_MESSAGE_CHARS)
            .collect();
        if said.is_empty() {
            status.to_string()
        } else {
            format!("{status}: {said}")
        }
    }
}

/// Collects the texts of a message, which forges nest differently.
fn collect_texts(value: &Value, depth: usize, texts: &mut Vec<String>) {
    if depth == 0 || texts.len() >= 8 {
        return;
    }
    match value {
        Value::String(text) => texts.push(text.clone()),
        Value::Array(values) => {
            for value in values {
                collect_texts(value, depth - 1, texts);
            }
        }
        Value::Object(members) => {
            for value in members.values() {
                collect_texts(value, depth - 1, texts);
            }
        }
        _ => {}
    }
}

fn headers(kind: ForgeKind, secret: &str) -> Result<HeaderMap, ForgeError> {
    let scheme = match kind {
        ForgeKind::Gitea => "token",
        _ => "Bearer",
    };
    let mut authorization = HeaderValue::try_from(format!("{scheme} {}", secret.trim()))
        .map_err(|_| ForgeError::Client("the credential is not one line of text".to_owned()))?;
    authorization.set_sensitive(true);
    let accept = match kind {
        ForgeKind::Github => "application/vnd.github+json",
        _ => "application/json",
    };
    let mut headers = HeaderMap::from_iter([
        (AUTHORIZATION, authorization),
        (ACCEPT, HeaderValue::from_static(accept)),
    ]);
    if kind == ForgeKind::Github {
        headers.insert(
            HeaderName::from_static("x-github-api-version"),
            HeaderValue::from_static("2022-11-28"),
        );
    }
    Ok(headers)
}

fn limited(headers: &HeaderMap) -> ForgeError {
    let seconds = |name: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.trim().parse::<u64>().ok())
            .map(Duration::from_secs)
    };
    let until_reset = || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        seconds("x-ratelimit-reset")?.checked_sub(now)
    };
    ForgeError::RateLimited {
        retry_after: seconds("retry-after")
            .or_else(until_reset)
            .map(|wait| wait.min(MAX_RETRY_AFTER)),
    }
}

/// The chain of causes, without the URL.
fn unreachable(error: &reqwest::Error) -> ForgeError {
    let mut text = String::new();
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(error) = cause {
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&error.to_string());
        cause = error.source();
    }
    if error.is_timeout() {
        "it does not answer in time".clone_into(&mut text);
    }
    ForgeError::Unreachable(escaped(text.as_bytes()))
}

async fn read(mut response: Response) -> Result<Vec<u8>, ForgeError> {
    let mut body = Vec::new();
    while let Some(piece) = response
        .chunk()
        .await
        .map_err(|error| unreachable(&error))?
    {
        if body.len() + piece.len() > MAX_ANSWER_BYTES {
            return Err(ForgeError::Answer(format!(
                "it has more than {MAX_ANSWER_BYTES} bytes"
            )));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

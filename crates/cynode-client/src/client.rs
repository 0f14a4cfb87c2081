//! The client itself: one connection pool, one way to send a request, one way to read a response.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use cynode_api::{API_VERSION, LocalImage, LocalImages, Problem, SessionId};
use http::{HeaderMap, HeaderValue, Method, header};
use reqwest::{Client, RequestBuilder, Response, Url};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Error, Result};

/// The longest problem document to read.
const MAX_PROBLEM_BYTES: usize = 1024 * 1024;
/// The longest API description to read.
const MAX_DESCRIPTION_BYTES: usize = 16 * 1024 * 1024;
const IDENTIFY_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest JSON response to read: two streams of 16 MiB fit, in base64 or escaped.
const MAX_JSON_BYTES: usize = 256 * 1024 * 1024;
/// Bounds the loop over the pages of a list, against a server whose list never ends.
pub(crate) const MAX_PAGES: usize = 1_000;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Servers close connections after 30 s of idleness; the pool drops them before that, so that no
/// request goes out on a closing connection.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// A session create waits up to 60 s for the sandbox; no other call with a JSON response takes
/// longer.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_mins(2);

/// The API that a server speaks. Both have the same session calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    /// The Worker API: `/v1/worker/sessions`.
    Worker,
    /// The orchestrator's user API: `/v1/sessions`.
    User,
}

/// The kind of server at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The orchestrator's user API.
    Orchestrator,
    /// The Worker API of a node.
    Worker,
    /// The orchestrator's control port, for nodes.
    Control,
    /// An HTTP server that is not CyNode.
    Other,
}

/// The certificate authorities to trust.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust<'a> {
    /// Those of the system, and those in the file named by `CYNODE_CA_FILE`.
    #[default]
    Environment,
    /// Those of the system, and those in this file.
    Also(&'a Path),
    /// Only those in this file.
    Only(&'a Path),
}

/// Whether a role is ready to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    NotReady(String),
}

/// What happens to the sandboxes when a worker stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sandboxes {
    /// All sandboxes end; workspaces are retained for their grace period.
    End,
    /// They keep running, and the next worker adopts them.
    Keep,
}

/// The session calls of both APIs, and the rest of the Worker API. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SessionClient {
    http: Client,
    base: Url,
    surface: Surface,
}

impl SessionClient {
    /// A client for the worker at `base` (`http://127.0.0.1:12090`).
    pub fn new(base: &str, token: &str) -> Result<Self> {
        Self::trusting(base, token, Surface::Worker, Trust::Environment)
    }

    pub fn trusting(base: &str, token: &str, surface: Surface, trust: Trust<'_>) -> Result<Self> {
        let base = parse_base(base)?;
        let mut bearer = HeaderValue::try_from(format!("Bearer {}", token.trim()))
            .map_err(|_| Error::Setup("the token must be one line of plain text".to_owned()))?;
        bearer.set_sensitive(true);
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, bearer)]);
        let mut builder = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .tcp_keepalive(Duration::from_secs(15))
            .tcp_nodelay(true)
            .user_agent(concat!("cynode/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers);
        if is_loopback(&base) {
            // A proxy from the environment can't reach this machine's loopback, and must not see
            // the token.
            builder = builder.no_proxy();
        }
        builder = match trust {
            Trust::Only(path) => builder.tls_certs_only(certificates(path)?),
            Trust::Also(path) => builder.tls_certs_merge(certificates(path)?),
            Trust::Environment => {
                match std::env::var_os("CYNODE_CA_FILE").filter(|path| !path.is_empty()) {
                    Some(path) => builder.tls_certs_merge(certificates(&PathBuf::from(path))?),
                    None => builder,
                }
            }
        };
        let http = builder
            .build()
            .map_err(|error| Error::Setup(format!("can't create the HTTP client: {error}")))?;
        Ok(Self {
            http,
            base,
            surface,
        })
    }

    /// Finds out which of the two APIs a CyNode server speaks.
    pub async fn find_surface(base: &str, token: &str, trust: Trust<'_>) -> Result<Surface> {
        let client = Self::trusting(base, token, Surface::Worker, trust)?;
        // Only a worker has this path. Any other error will show up in the call itself.
        let response = send(
            client
                .request(Method::GET, "/v1/worker/sessions?limit=1")
                .timeout(CALL_TIMEOUT),
        )
        .await?;
        Ok(if response.status().as_u16() == 404 {
            Surface::User
        } else {
            Surface::Worker
        })
    }

    /// Identifies the server at an address, without sending a token.
    pub async fn identify(base: &str, trust: Trust<'_>) -> Result<Peer> {
        #[derive(Deserialize)]
        struct Description {
            info: Info,
        }
        #[derive(Deserialize)]
        struct Info {
            title: String,
        }
        let client = Self::trusting(base, "", Surface::User, trust)?;
        let response = send(
            client
                .request(Method::GET, "/openapi.json")
                .timeout(IDENTIFY_TIMEOUT),
        )
        .await?;
        let status = response.status();
        let body = read_bounded(response, MAX_DESCRIPTION_BYTES).await?;
        if status.is_success() {
            let title = serde_json::from_slice(&body).map_or_else(
                |_| String::new(),
                |description: Description| description.info.title,
            );
            return Ok(match title.as_str() {
                "CyNode user API" => Peer::Orchestrator,
                "CyNode Worker API" => Peer::Worker,
                _ => Peer::Other,
            });
        }
        // The control port has no description, but answers with problem documents as every role
        // does.
        let is_ours = serde_json::from_slice::<Problem>(&body)
            .is_ok_and(|problem| problem.kind.starts_with("urn:cynode:error:"));
        Ok(if is_ours { Peer::Control } else { Peer::Other })
    }

    #[must_use]
    pub const fn surface(&self) -> Surface {
        self.surface
    }

    /// The base URL without a trailing slash.
    #[must_use]
    pub fn base(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    pub async fn readyz(&self) -> Result<Readiness> {
        let response = send(
            self.request(Method::GET, "/readyz")
                .timeout(Duration::from_secs(10)),
        )
        .await?;
        if response.status().is_success() {
            return Ok(Readiness::Ready);
        }
        let status = response.status().as_u16();
        let url = display_url(response.url());
        let body = read_bounded(response, MAX_PROBLEM_BYTES).await?;
        match status {
            503 => Ok(Readiness::NotReady(reason(&body))),
            _ => Err(refusal(url, status, &body)),
        }
    }

    /// Checks that the server is reachable.
    pub async fn reach(&self) -> Result<()> {
        check_status(
            send(
                self.request(Method::GET, "/healthz")
                    .timeout(Duration::from_secs(10)),
            )
            .await?,
        )
        .await
        .map(drop)
    }

    /// The images in the worker's store.
    pub async fn local_images(&self) -> Result<Vec<LocalImage>> {
        Ok(self
            .get::<LocalImages>("/v1/worker/images", &())
            .await?
            .items)
    }

    /// Asks the worker to shut down. It responds at once and stops in the background.
    pub async fn shutdown(&self, sandboxes: Sandboxes) -> Result<()> {
        #[derive(Serialize)]
        struct Shutdown {
            version: u32,
            sandboxes: Sandboxes,
        }
        self.call_empty(
            Method::POST,
            "/v1/worker/shutdown",
            &Shutdown {
                version: API_VERSION,
                sandboxes,
            },
        )
        .await
    }

    pub(crate) fn sessions(&self) -> &'static str {
        match self.surface {
            Surface::Worker => "/v1/worker/sessions",
            Surface::User => "/v1/sessions",
        }
    }

    pub(crate) fn session(&self, id: SessionId, rest: &str) -> String {
        format!("{}/{id}{rest}", self.sessions())
    }

    /// A request with the token, for forwarding calls. It has a connect timeout only.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base()))
    }

    /// Sends a JSON body and reads a JSON response.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T> {
        json(send(self.request(method, path).timeout(CALL_TIMEOUT).json(body)).await?).await
    }

    /// Sends a JSON body and discards the body of a successful response.
    pub(crate) async fn call_empty(
        &self,
        method: Method,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<()> {
        check_status(send(self.request(method, path).timeout(CALL_TIMEOUT).json(body)).await?)
            .await
            .map(drop)
    }

    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &(impl Serialize + Sync),
    ) -> Result<T> {
        json(
            send(
                self.request(Method::GET, path)
                    .timeout(CALL_TIMEOUT)
                    .query(query),
            )
            .await?,
        )
        .await
    }
}

/// Reads trusted certificates.
fn certificates(path: &Path) -> Result<Vec<reqwest::Certificate>> {
    let pem = fs_err::read(path)
        .map_err(|error| Error::Setup(format!("can't read the trusted certificates: {error}")))?;
    let certificates = reqwest::Certificate::from_pem_bundle(&pem)
        .ok()
        .filter(|certificates: &Vec<_>| !certificates.is_empty());
    certificates
        .ok_or_else(|| Error::Setup(format!("'{}' contains no PEM certificates", path.display())))
}

/// Validates a base URL; the error gives the reason.
pub fn check_base(text: &str) -> Result<()> {
    parse_base(text).map(drop)
}

fn parse_base(text: &str) -> Result<Url> {
    let bad = |why: &str| {
        Error::Setup(format!(
            "'{text}' is not a valid base URL: {why}; expected one like http://127.0.0.1:12090"
        ))
    };
    let url = Url::parse(text).map_err(|error| bad(&error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(bad("the scheme must be http or https"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        // Not shown in the message: the URL holds a password.
        return Err(Error::Setup(
            "the URL must not contain a user name or password; pass the token in CYNODE_TOKEN"
                .to_owned(),
        ));
    }
    if url.host_str().is_none() || url.query().is_some() || url.fragment().is_some() {
        return Err(bad("only scheme, host, port and path are allowed"));
    }
    Ok(url)
}

fn is_loopback(url: &Url) -> bool {
    match url.host_str() {
        Some("localhost") => true,
        Some(host) => host
            .trim_matches(['[', ']'])
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback()),
        None => false,
    }
}

/// A URL for error messages: without the query, which may be long.
pub(crate) fn display_url(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.into()
}

pub(crate) async fn send(request: RequestBuilder) -> Result<Response> {
    let (client, request) = request.build_split();
    let request =
        request.map_err(|error| Error::Setup(format!("can't build the request: {error}")))?;
    let url = display_url(request.url());
    client
        .execute(request)
        .await
        .map_err(|error| Error::transport(&url, error))
}

/// Turns an unsuccessful response into an error.
pub(crate) async fn check_status(response: Response) -> Result<Response> {
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status().as_u16();
    let url = display_url(response.url());
    let body = read_bounded(response, MAX_PROBLEM_BYTES)
        .await
        .unwrap_or_default();
    Err(refusal(url, status, &body))
}

pub(crate) async fn json<T: DeserializeOwned>(response: Response) -> Result<T> {
    let response = check_status(response).await?;
    let url = display_url(response.url());
    let body = read_bounded(response, MAX_JSON_BYTES).await?;
    serde_json::from_slice(&body).map_err(|error| Error::answer(&url, error))
}

pub(crate) fn refusal(url: String, status: u16, body: &[u8]) -> Error {
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) => Error::Problem(Box::new(problem)),
        Err(_) => Error::Status {
            url,
            status,
            body: String::from_utf8_lossy(body)
                .trim()
                .chars()
                .take(300)
                .collect(),
        },
    }
}

/// The reason in the body of an unready response: a problem document, `{"reason"}`, or plain text.
fn reason(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Reason {
        #[serde(alias = "detail")]
        reason: String,
    }
    if let Ok(Reason { reason }) = serde_json::from_slice(body) {
        return reason;
    }
    let text: String = String::from_utf8_lossy(body)
        .trim()
        .chars()
        .take(1000)
        .collect();
    if text.is_empty() {
        "no reason given".to_owned()
    } else {
        text
    }
}

pub(crate) async fn read_bounded(mut response: Response, limit: usize) -> Result<Bytes> {
    let url = display_url(response.url());
    let mut body = BytesMut::new();
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| Error::broken(&url, error))?
    {
        if body.len() + chunk.len() > limit {
            return Err(Error::answer(
                &url,
                format!("the response is longer than {limit} bytes"),
            ));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_with_credentials_is_refused_without_repeating_them() {
        let error = parse_base("http://me:secret@host:1").expect_err("credentials");
        assert!(!error.to_string().contains("secret"), "{error}");
        assert!(parse_base("ftp://host").is_err());
        assert!(parse_base("127.0.0.1:12090").is_err());
        assert_eq!(
            parse_base("http://127.0.0.1:12090/")
                .expect("good")
                .as_str(),
            "http://127.0.0.1:12090/"
        );
    }

    #[test]
    fn loopback_is_distinguished_from_other_hosts() {
        for (address, expected) in [
            ("http://127.0.0.1:1", true),
            ("http://[::1]:1", true),
            ("http://localhost", true),
            ("http://10.0.0.1", false),
            ("http://127.0.0.1.example", false),
        ] {
            assert_eq!(
                is_loopback(&parse_base(address).expect("good")),
                expected,
                "{address}"
            );
        }
    }

    #[test]
    fn the_reason_of_an_unready_worker_is_found_in_every_form() {
        assert_eq!(
            reason(br#"{"ready":false,"reason":"no podman"}"#),
            "no podman"
        );
        assert_eq!(
            reason(br#"{"type":"x","detail":"disk is full"}"#),
            "disk is full"
        );
        assert_eq!(reason(b" starting\n"), "starting");
        assert_eq!(reason(b""), "no reason given");
    }

    #[test]
    fn a_refusal_that_is_no_problem_document_keeps_its_status() {
        let error = refusal("http://h/".into(), 502, b"<html>");
        assert!(matches!(&error, Error::Status { status: 502, body, .. } if body == "<html>"));
        assert!(error.is_transient());
    }
}

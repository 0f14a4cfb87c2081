//! The client itself: one connection pool, one way to send, one way to read an answer.

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

/// The longest problem document that is read.
const MAX_PROBLEM: usize = 1024 * 1024;
/// The longest API description that is read.
const MAX_DESCRIPTION: usize = 16 * 1024 * 1024;
const IDENTIFY: Duration = Duration::from_secs(5);
/// The longest JSON answer that is read: two streams of 16 MiB in base64, or escaped, fit.
const MAX_JSON: usize = 256 * 1024 * 1024;
const CONNECT: Duration = Duration::from_secs(10);
/// A server closes a connection on which nothing was asked for 30 s; one that is about to be closed must not be used again.
const IDLE: Duration = Duration::from_secs(20);
/// A create waits up to 60 s for the sandbox; nothing that answers with an object takes longer.
pub(crate) const CALL: Duration = Duration::from_mins(2);

/// Which side of CyNode an address is. Both serve the same session calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    /// A worker: `/v1/worker/sessions`.
    Worker,
    /// The orchestrator's user API: `/v1/sessions`.
    User,
}

/// What answers at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The orchestrator's user API.
    Orchestrator,
    /// The Worker API of a node.
    Worker,
    /// The orchestrator's port for nodes.
    Control,
    /// An HTTP server that is not CyNode.
    Other,
}

/// Whose certificates are trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust<'a> {
    /// Those that the system trusts, and those in the file that `CYNODE_CA_FILE` names.
    #[default]
    Environment,
    /// Those that the system trusts, and those in this file.
    Also(&'a Path),
    /// Those in this file and no others.
    Only(&'a Path),
}

/// Whether a worker is ready to do its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    NotReady(String),
}

/// What becomes of the sandboxes when a worker stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sandboxes {
    /// Every sandbox ends; workspaces are kept for their grace period.
    End,
    /// They go on running, and the next worker adopts them.
    Keep,
}

/// The Worker API, typed. Cheap to clone.
#[derive(Clone, Debug)]
pub struct WorkerClient {
    http: Client,
    base: Url,
    surface: Surface,
}

impl WorkerClient {
    /// A client for the worker at `base` (`http://127.0.0.1:12090`).
    pub fn new(base: &str, token: &str) -> Result<Self> {
        Self::trusting(base, token, Surface::Worker, Trust::Environment)
    }

    pub fn trusting(base: &str, token: &str, surface: Surface, trust: Trust<'_>) -> Result<Self> {
        let base = parse_base(base)?;
        let mut bearer = HeaderValue::try_from(format!("Bearer {}", token.trim()))
            .map_err(|_| Error::Setup("the token holds characters that can't be sent; it must be one line of plain text".to_owned()))?;
        bearer.set_sensitive(true);
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, bearer)]);
        let mut builder = Client::builder()
            .connect_timeout(CONNECT)
            .pool_idle_timeout(IDLE)
            .redirect(reqwest::redirect::Policy::none())
            .tcp_keepalive(Duration::from_secs(15))
            .tcp_nodelay(true)
            .user_agent(concat!("cynode/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers);
        if is_loopback(&base) {
            // A proxy from the environment can't reach this machine's own loopback, and must not see the token.
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
            .map_err(|error| Error::Setup(format!("can't set up the HTTP client: {error}")))?;
        Ok(Self {
            http,
            base,
            surface,
        })
    }

    /// Which side of CyNode answers at an address that is known to be one of the two.
    pub async fn find_surface(base: &str, token: &str, trust: Trust<'_>) -> Result<Surface> {
        let client = Self::trusting(base, token, Surface::Worker, trust)?;
        // Only a worker has this path. Who is refused for another reason finds out by the call itself.
        let answer = send(
            client
                .request(Method::GET, "/v1/worker/sessions?limit=1")
                .timeout(CALL),
        )
        .await?;
        Ok(if answer.status().as_u16() == 404 {
            Surface::User
        } else {
            Surface::Worker
        })
    }

    /// What answers at an address. No token is sent.
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
                .timeout(IDENTIFY),
        )
        .await?;
        let status = response.status();
        let body = read_bounded(response, MAX_DESCRIPTION).await?;
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
        // Only the port for nodes has no description, and refuses as every role does.
        let is_ours = serde_json::from_slice::<Problem>(&body)
            .is_ok_and(|problem| problem.kind.starts_with("urn:cynode:error:"));
        Ok(if is_ours { Peer::Control } else { Peer::Other })
    }

    #[must_use]
    pub const fn surface(&self) -> Surface {
        self.surface
    }

    /// The address without a trailing slash.
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
        let url = shown(response.url());
        let body = read_bounded(response, MAX_PROBLEM).await?;
        match status {
            503 => Ok(Readiness::NotReady(reason(&body))),
            _ => Err(refusal(url, status, &body)),
        }
    }

    /// Whether it can be called at all.
    pub async fn reach(&self) -> Result<()> {
        accept(
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

    /// Asks the worker to end its process. It answers at once and goes on in the background.
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

    /// A request that carries the token, for passing on what somebody else asks. It has no limit of time but that of connecting.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base()))
    }

    /// Sends a JSON body and reads a JSON answer.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T> {
        json(send(self.request(method, path).timeout(CALL).json(body)).await?).await
    }

    /// Sends a JSON body; whatever a success answers is dropped.
    pub(crate) async fn call_empty(
        &self,
        method: Method,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<()> {
        accept(send(self.request(method, path).timeout(CALL).json(body)).await?)
            .await
            .map(drop)
    }

    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &(impl Serialize + Sync),
    ) -> Result<T> {
        json(send(self.request(Method::GET, path).timeout(CALL).query(query)).await?).await
    }
}

/// The certificates of those who are trusted.
fn certificates(path: &Path) -> Result<Vec<reqwest::Certificate>> {
    let pem = fs_err::read(path)
        .map_err(|error| Error::Setup(format!("can't read the trusted certificates: {error}")))?;
    let found = reqwest::Certificate::from_pem_bundle(&pem)
        .ok()
        .filter(|found| !found.is_empty());
    found.ok_or_else(|| Error::Setup(format!("'{}' holds no PEM certificates", path.display())))
}

/// Whether a client can be made for an address; says why not.
pub fn check_base(text: &str) -> Result<()> {
    parse_base(text).map(drop)
}

fn parse_base(text: &str) -> Result<Url> {
    let bad = |why: &str| {
        Error::Setup(format!(
            "'{text}' is not a usable address: {why}; it looks like http://127.0.0.1:12090"
        ))
    };
    let url = Url::parse(text).map_err(|error| bad(&error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(bad("it must begin with http:// or https://"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        // Not repeated: it holds a password.
        return Err(Error::Setup(
            "the address must not hold a name or password; give the token by CYNODE_TOKEN"
                .to_owned(),
        ));
    }
    if url.host_str().is_none() || url.query().is_some() || url.fragment().is_some() {
        return Err(bad("only scheme, host, port and path belong in it"));
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

/// An address as it is shown in errors: without the query, which may be long.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.into()
}

pub(crate) async fn send(request: RequestBuilder) -> Result<Response> {
    let (client, request) = request.build_split();
    let request =
        request.map_err(|error| Error::Setup(format!("can't make the request: {error}")))?;
    let url = shown(request.url());
    client
        .execute(request)
        .await
        .map_err(|error| Error::transport(&url, error))
}

/// The answer when it is a success, else the refusal as an error.
pub(crate) async fn accept(response: Response) -> Result<Response> {
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status().as_u16();
    let url = shown(response.url());
    let body = read_bounded(response, MAX_PROBLEM)
        .await
        .unwrap_or_default();
    Err(refusal(url, status, &body))
}

pub(crate) async fn json<T: DeserializeOwned>(response: Response) -> Result<T> {
    let response = accept(response).await?;
    let url = shown(response.url());
    let body = read_bounded(response, MAX_JSON).await?;
    serde_json::from_slice(&body).map_err(|error| Error::answer(&url, error))
}

fn refusal(url: String, status: u16, body: &[u8]) -> Error {
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

/// The reason in the body of an unready answer: a problem document, `{"reason"}`, or plain text.
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
        "it gave no reason".to_owned()
    } else {
        text
    }
}

async fn read_bounded(mut response: Response, limit: usize) -> Result<Bytes> {
    let url = shown(response.url());
    let mut body = BytesMut::new();
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| Error::broken(&url, error))?
    {
        if body.len() + chunk.len() > limit {
            return Err(Error::answer(
                &url,
                format!("the answer is longer than {limit} bytes"),
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
    fn loopback_is_told_from_other_hosts() {
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
        assert_eq!(reason(b""), "it gave no reason");
    }

    #[test]
    fn a_refusal_that_is_no_problem_document_keeps_its_status() {
        let error = refusal("http://h/".into(), 502, b"<html>");
        assert!(matches!(&error, Error::Status { status: 502, body, .. } if body == "<html>"));
        assert!(error.is_passing());
    }
}

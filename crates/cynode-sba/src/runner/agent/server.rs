//! The model server: plain HTTP, over the node's socket or, without a node, over TCP.
//!
//! Invariants: every wait has a timeout and everything that is read a bound, so no server can hold
//! the loop or fill its memory. No name is resolved: that would need threads, and the runner forks.
//! A runner of a node never uses loopback: a process that a step left behind can take the port of
//! the listeners, and its answers would decide how the job ends. The mount of the socket is
//! read-only, so nobody in the sandbox can replace it.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use cynode_sba_proto::proxy::Listener;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    client::conn::http1,
    header::{ACCEPT, CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    task::JoinHandle,
    time::timeout,
};

use super::{
    answer::{Answer, InvalidAnswer, message_of, shown},
    events::{EventReader, TooLong},
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to try to reach the node's worker, which may be restarting.
const NODE_CONNECT_TIMEOUT: Duration = Duration::from_secs(8);
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// A server may load the model and read the whole prompt before it answers.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(600);
/// Between two pieces of an answer.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(300);
/// A whole answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1_800);
/// Lists of models, and messages of errors.
const SHORT_TIMEOUT: Duration = Duration::from_secs(10);
/// A streamed answer with everything around its text.
const MAX_STREAM_BYTES: usize = 32 * 1024 * 1024;
const MAX_LIST_BYTES: usize = 1024 * 1024;
const MAX_ERROR_BYTES: usize = 16 * 1024;
const DEFAULT_PORT: u16 = 80;

/// Where models are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelServer {
    place: Place,
    /// Host and port, as in the URL.
    authority: String,
    /// Before `/v1`.
    path: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// The worker's socket.
    Node(PathBuf),
    Addresses(Vec<SocketAddr>),
}

/// A model that the server lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListedModel {
    pub(super) id: String,
    /// The tokens that it reads at once, as vLLM says.
    pub(super) context_tokens: Option<u64>,
}

/// Why a request had no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerError {
    pub(super) message: String,
    pub(super) kind: ServerErrorKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerErrorKind {
    /// Nothing listens at the address.
    Unreachable,
    /// The same request may succeed later.
    Temporary,
    /// The server refuses the request, or the model.
    Refused,
}

impl ServerError {
    fn temporary(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            kind: ServerErrorKind::Temporary,
        }
    }
}

impl From<InvalidAnswer> for ServerError {
    fn from(error: InvalidAnswer) -> Self {
        Self::temporary(error.to_string())
    }
}

impl From<TooLong> for ServerError {
    fn from(TooLong: TooLong) -> Self {
        InvalidAnswer::TooLong.into()
    }
}

impl From<hyper::Error> for ServerError {
    fn from(error: hyper::Error) -> Self {
        Self::temporary(format!("the connection to the model server broke: {error}"))
    }
}

/// An answer, while its connection is driven.
struct Exchange {
    response: Response<Incoming>,
    connection: JoinHandle<()>,
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

type RequestSender = http1::SendRequest<Full<Bytes>>;

impl ModelServer {
    /// The models that the node serves at its socket.
    pub(super) fn of_node(socket: &Path) -> Self {
        Self {
            place: Place::Node(socket.to_owned()),
            authority: "localhost".to_owned(),
            path: String::new(),
        }
    }

    /// Reads a URL such as `http://localhost:11434`.
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let unusable = |reason: &str| format!("OLLAMA_BASE_URL is {:?}: {reason}", shown(url));
        let rest = url
            .strip_prefix("http://")
            .ok_or_else(|| unusable("must begin with http://"))?;
        let (authority, path) = match rest.find('/') {
            Some(slash) => rest.split_at(slash),
            None => (rest, ""),
        };
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                let port = port.parse().map_err(|_| unusable("has no valid port"))?;
                (host, port)
            }
            _ => (authority, DEFAULT_PORT),
        };
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let addresses: Vec<IpAddr> = match bare.unwrap_or(host) {
            "localhost" => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            host => {
                let address = host.parse();
                vec![address.map_err(|_| unusable("names neither localhost nor an address"))?]
            }
        };
        let path = path.trim_end_matches('/');
        if !path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(unusable("has an invalid path"));
        }
        let addresses = addresses.into_iter();
        Ok(Self {
            place: Place::Addresses(
                addresses
                    .map(|address| SocketAddr::new(address, port))
                    .collect(),
            ),
            authority: authority.to_owned(),
            path: path.to_owned(),
        })
    }

    /// The models that the server lists.
    pub(super) async fn models(&self) -> Result<Vec<ListedModel>, ServerError> {
        let listed = async {
            let exchange = self.send(Method::GET, "/v1/models", Vec::new()).await?;
            let body = read(exchange, MAX_LIST_BYTES).await?;
            let list: Value = serde_json::from_slice(&body)
                .map_err(|_| ServerError::temporary("the list of models is not JSON"))?;
            let Some(models) = list["data"].as_array() else {
                return Err(ServerError::temporary("the list of models has no data"));
            };
            let named = models.iter().filter_map(|model| {
                Some(ListedModel {
                    id: model["id"].as_str()?.to_owned(),
                    context_tokens: model["max_model_len"].as_u64(),
                })
            });
            Ok(named.collect())
        };
        let late = |_| ServerError::temporary("the model server did not list its models in time");
        timeout(SHORT_TIMEOUT, listed).await.map_err(late)?
    }

    /// The window of a model, if the server has Ollama's description of it.
    pub(super) async fn context_tokens(&self, model: &str) -> Result<Option<u64>, ServerError> {
        let described = async {
            let request = json!({"model": model}).to_string().into_bytes();
            let exchange = self.send(Method::POST, "/api/show", request).await?;
            let body = read(exchange, MAX_LIST_BYTES).await?;
            let description: Value = serde_json::from_slice(&body)
                .map_err(|_| ServerError::temporary("the description of a model is not JSON"))?;
            let info = description["model_info"].as_object().into_iter().flatten();
            let sizes = info.filter(|(name, _)| name.ends_with(".context_length"));
            Ok(sizes.filter_map(|(_, tokens)| tokens.as_u64()).min())
        };
        let late = |_| ServerError::temporary("the model server did not describe a model in time");
        timeout(SHORT_TIMEOUT, described).await.map_err(late)?
    }

    /// The answer to the JSON of a streamed chat completion.
    pub(super) async fn chat(&self, request: Vec<u8>) -> Result<Answer, ServerError> {
        let answered = async {
            let mut exchange = self
                .send(Method::POST, "/v1/chat/completions", request)
                .await?;
            let (mut events, mut answer) = (EventReader::default(), Answer::default());
            let mut bytes = 0;
            while let Some(frame) = within_pause(exchange.response.body_mut().frame()).await? {
                let Ok(piece) = frame?.into_data() else {
                    continue;
                };
                bytes += piece.len();
                if bytes > MAX_STREAM_BYTES {
                    return Err(InvalidAnswer::TooLong.into());
                }
                for event in events.feed(&piece)? {
                    answer.add(&event)?;
                }
            }
            if let Some(event) = events.end()? {
                answer.add(&event)?;
            }
            Ok(answer.finished()?)
        };
        let late = |_| ServerError::temporary("the model did not end its answer in time");
        timeout(ANSWER_TIMEOUT, answered).await.map_err(late)?
    }

    /// Sends a request; an answer that is an error becomes one here.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Exchange, ServerError> {
        let (mut sender, connection) = self.connect().await?;
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.path))
            .header(HOST, &self.authority)
            .header(ACCEPT, "text/event-stream, application/json")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| ServerError {
                message: format!("the request to the model server is invalid: {error}"),
                kind: ServerErrorKind::Refused,
            })?;
        let response = timeout(FIRST_BYTE_TIMEOUT, sender.send_request(request)).await;
        let response = match response {
            Ok(Ok(response)) => response,
            failed => {
                connection.abort();
                return Err(match failed {
                    Ok(Err(error)) => error.into(),
                    _ => ServerError::temporary("the model server did not answer in time"),
                });
            }
        };
        let exchange = Exchange {
            response,
            connection,
        };
        let status = exchange.response.status();
        if status == StatusCode::OK {
            return Ok(exchange);
        }
        let read = timeout(SHORT_TIMEOUT, read(exchange, MAX_ERROR_BYTES)).await;
        let body = read.ok().and_then(Result::ok).unwrap_or_default();
        let message = match serde_json::from_slice(&body) {
            Ok(error) => message_of(&error),
            Err(_) => shown(&String::from_utf8_lossy(&body)),
        };
        let is_temporary = status.is_server_error()
            || status == StatusCode::TOO_MANY_REQUESTS
            || status == StatusCode::REQUEST_TIMEOUT;
        Err(ServerError {
            message: format!("the model server answered {}: {message}", status.as_u16()),
            kind: if is_temporary {
                ServerErrorKind::Temporary
            } else {
                ServerErrorKind::Refused
            },
        })
    }

    async fn connect(&self) -> Result<(RequestSender, JoinHandle<()>), ServerError> {
        let unreachable = |reason: &str| ServerError {
            message: format!("no model server at {}: {reason}", self.authority),
            kind: ServerErrorKind::Unreachable,
        };
        match &self.place {
            Place::Node(socket) => {
                let connected = timeout(NODE_CONNECT_TIMEOUT, connect_to_node(socket)).await;
                let stream = connected
                    .map_err(|_| unreachable("the node's worker did not accept a connection"))?;
                handshake(stream).await
            }
            Place::Addresses(addresses) => {
                let mut reason = "no address".to_owned();
                for address in addresses {
                    match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
                        Ok(Ok(stream)) => return handshake(stream).await,
                        Ok(Err(error)) => reason = error.to_string(),
                        Err(_) => "it did not answer".clone_into(&mut reason),
                    }
                }
                Err(unreachable(&reason))
            }
        }
    }
}

/// Connects to the worker, which does not listen while it restarts.
async fn connect_to_node(socket: &Path) -> UnixStream {
    loop {
        if let Ok(mut stream) = UnixStream::connect(socket).await
            && stream
                .write_all(&Listener::Inference.preamble())
                .await
                .is_ok()
        {
            return stream;
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

async fn handshake(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
) -> Result<(RequestSender, JoinHandle<()>), ServerError> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::task::spawn_local(async move {
        // The request reports what went wrong.
        drop(connection.await);
    });
    Ok((sender, connection))
}

async fn within_pause<T>(piece: impl Future<Output = T>) -> Result<T, ServerError> {
    let late = |_| ServerError::temporary("the model stopped in the middle of its answer");
    timeout(PAUSE_TIMEOUT, piece).await.map_err(late)
}

/// Reads a short body whole.
async fn read(mut exchange: Exchange, limit: usize) -> Result<Vec<u8>, ServerError> {
    let mut body = Vec::new();
    while let Some(frame) = exchange.response.body_mut().frame().await {
        if let Ok(piece) = frame?.into_data() {
            if body.len() + piece.len() > limit {
                return Err(InvalidAnswer::TooLong.into());
            }
            body.extend_from_slice(&piece);
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_on_this_machine_or_has_an_address() {
        let addresses = |server: &ModelServer| match &server.place {
            Place::Addresses(addresses) => addresses.iter().map(SocketAddr::to_string).collect(),
            Place::Node(_) => Vec::new(),
        };
        let server = ModelServer::parse("http://localhost:11434").expect("valid");
        assert_eq!(addresses(&server), ["127.0.0.1:11434", "[::1]:11434"]);
        assert_eq!(
            (server.authority.as_str(), server.path.as_str()),
            ("localhost:11434", "")
        );
        let server = ModelServer::parse("http://[::1]:8000/base/").expect("valid");
        assert_eq!(addresses(&server), ["[::1]:8000"]);
        assert_eq!(server.path, "/base");
        let server = ModelServer::parse("http://[::1]").expect("valid");
        assert_eq!(addresses(&server), ["[::1]:80"]);
        for bad in [
            "",
            "localhost:11434",
            "https://localhost",
            "http://",
            "http://example.org",
            "http://localhost:x",
            "http://localhost:99999",
            "http://127.0.0.1/a b",
            "http://user@localhost",
        ] {
            assert!(ModelServer::parse(bad).is_err(), "{bad}");
        }
    }
}

//! A scripted model server that speaks the HTTP of Ollama and of OpenAI's API.
//!
//! It reads and writes HTTP by hand, so that it can also misbehave: stay silent, never end, send
//! garbage. Needs tokio and serde_json only, so that unit tests of other crates can include this
//! file.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::{JoinHandle, JoinSet},
};

/// Which API the server has. Ollama has both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelApi {
    Ollama,
    Openai,
}

/// What the server answers to one request for a computation.
#[derive(Clone, Debug)]
pub enum ModelReply {
    /// The pieces of a text, each in a chunk of its own if the client asked for a stream.
    Text(Vec<String>),
    /// A whole message: `content`, `tool_calls`, ….
    Message(Value),
    /// As `Text`, with a pause before each piece.
    Slow(Vec<String>, Duration),
    /// Nothing, ever.
    Silence,
    /// A stream without an end.
    Endless,
    /// The same in large pieces, as fast as they are read.
    Flood,
    /// The same with a pause before each piece.
    Trickle(Duration),
    /// One piece of a stream, then nothing, ever.
    Stall,
    /// A stream that breaks off after its pieces.
    Cut(Vec<String>),
    /// Bytes in place of the body of a successful answer, with their content type.
    Body(&'static str, Vec<u8>),
    /// Bytes in place of the whole HTTP response.
    Bytes(Vec<u8>),
    /// An error with its status and its message.
    Error(u16, String),
    /// A redirect to another address.
    Redirect(String),
    /// As `Text`, and the answer says that another host computed it.
    Remote(Vec<String>),
}

impl ModelReply {
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self::Text(text.split_inclusive(' ').map(str::to_owned).collect())
    }

    /// One call of a tool. The arguments are JSON.
    #[must_use]
    pub fn tool_call(id: &str, name: &str, arguments: &Value) -> Self {
        Self::Message(json!({
            "content": null,
            "tool_calls": [{
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": arguments.to_string()},
            }],
        }))
    }
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct ModelRequest {
    pub method: String,
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// Null if there is none.
    pub body: Value,
}

/// Tokens that every answer reports, unless it is broken.
pub const PROMPT_TOKENS: u64 = 7;
pub const COMPLETION_TOKENS: u64 = 3;

#[derive(Debug)]
struct Script {
    api: ModelApi,
    /// Names, and whether another host runs the model.
    models: Vec<(String, bool)>,
    replies: VecDeque<ModelReply>,
    received: Vec<ModelRequest>,
}

#[derive(Debug)]
struct Shared {
    script: Mutex<Script>,
    /// Answers that the client did not wait for.
    abandoned: AtomicUsize,
    /// Answers in progress.
    open: AtomicUsize,
}

impl Shared {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running server. Without a script it answers every computation with a short text.
#[derive(Debug)]
pub struct ModelServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl ModelServer {
    /// Starts a server with these models on a free port of the loopback interface.
    pub async fn start(api: ModelApi, models: &[&str]) -> io::Result<Self> {
        Self::start_at("127.0.0.1:0", api, models).await
    }

    pub async fn start_at(address: &str, api: ModelApi, models: &[&str]) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            script: Mutex::new(Script {
                api,
                models: models
                    .iter()
                    .map(|name| ((*name).to_owned(), false))
                    .collect(),
                replies: VecDeque::new(),
                received: Vec::new(),
            }),
            abandoned: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
        });
        let serving = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            // They end with this task.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = Arc::clone(&serving);
                connections.spawn(async move { drop(serve(stream, &shared).await) });
            }
        });
        Ok(Self {
            address,
            shared,
            task,
        })
    }

    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Adds an answer. Answers are given in the order in which they were added.
    pub fn reply(&self, reply: ModelReply) {
        self.shared.script().replies.push_back(reply);
    }

    /// Drops the answers that were not given yet.
    pub fn forget_replies(&self) {
        self.shared.script().replies.clear();
    }

    /// Replaces the models. The flag says whether another host runs the model.
    pub fn set_models(&self, models: &[(&str, bool)]) {
        self.shared.script().models = models
            .iter()
            .map(|(name, is_remote)| ((*name).to_owned(), *is_remote))
            .collect();
    }

    /// All requests so far.
    #[must_use]
    pub fn received(&self) -> Vec<ModelRequest> {
        self.shared.script().received.clone()
    }

    /// The requests for a computation so far.
    #[must_use]
    pub fn computations(&self) -> Vec<ModelRequest> {
        let mut received = self.received();
        received.retain(|request| computes(&request.path));
        received
    }

    /// Answers that the client hung up on.
    #[must_use]
    pub fn abandoned(&self) -> usize {
        self.shared.abandoned.load(Ordering::SeqCst)
    }

    /// Answers in progress.
    #[must_use]
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn computes(path: &str) -> bool {
    matches!(
        path,
        "/api/chat"
            | "/api/generate"
            | "/api/embed"
            | "/api/embeddings"
            | "/v1/chat/completions"
            | "/v1/completions"
            | "/v1/embeddings"
    )
}

async fn serve(stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let (mut read, mut write) = stream.into_split();
    let mut buffer = Vec::new();
    while let Some(request) = next_request(&mut read, &mut buffer).await? {
        let reply = {
            let mut script = shared.script();
            script.received.push(request.clone());
            if computes(&request.path) {
                let default = ModelReply::text("a short answer");
                Some(script.replies.pop_front().unwrap_or(default))
            } else {
                None
            }
        };
        let Some(reply) = reply else {
            write.write_all(&described(shared, &request)).await?;
            continue;
        };
        shared.open.fetch_add(1, Ordering::SeqCst);
        let mut unexpected = [0; 1];
        let answered = tokio::select! {
            answered = answer(&mut write, &request, reply) => answered,
            // Clients send nothing while they wait, so this is the end.
            _ = read.read(&mut unexpected) => Err(io::ErrorKind::ConnectionReset.into()),
        };
        shared.open.fetch_sub(1, Ordering::SeqCst);
        match answered {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => {
                shared.abandoned.fetch_add(1, Ordering::SeqCst);
                return Err(error);
            }
        }
    }
    Ok(())
}

async fn next_request(
    read: &mut OwnedReadHalf,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<ModelRequest>> {
    let head_end = loop {
        if let Some(at) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            break at;
        }
        if read.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let head = String::from_utf8_lossy(&buffer[..head_end]).into_owned();
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let mut text = || first.next().unwrap_or_default().to_owned();
    let (method, path) = (text(), text());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length = headers
        .iter()
        .find(|(name, _)| name == "content-length")
        .and_then(|(_, value)| value.parse().ok())
        .unwrap_or(0_usize);
    buffer.drain(..head_end + 4);
    while buffer.len() < length {
        if read.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    let body: Vec<u8> = buffer.drain(..length).collect();
    Ok(Some(ModelRequest {
        method,
        path,
        headers,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
    }))
}

/// An answer that describes the server or its models.
fn described(shared: &Shared, request: &ModelRequest) -> Vec<u8> {
    let script = shared.script();
    let is_ollama = script.api == ModelApi::Ollama;
    let body = match (request.method.as_str(), request.path.as_str()) {
        ("GET", "/api/version") if is_ollama => json!({"version": "0.0.1-scripted"}),
        ("GET", "/api/tags") if is_ollama => {
            let models: Vec<Value> = script.models.iter().map(tag).collect();
            json!({"models": models})
        }
        ("POST", "/api/show") if is_ollama => json!({
            "license": "secret", "modelfile": "FROM /var/lib/models/x", "system": "secret",
            "details": {"family": "scripted"}, "capabilities": ["completion", "tools"],
            "model_info": {"general.architecture": "scripted", "scripted.context_length": 4096},
        }),
        ("GET", "/v1/models") => {
            let model = |(name, _): &(String, bool)| json!({"id": name, "object": "model", "owned_by": "library"});
            let models: Vec<Value> = script.models.iter().map(model).collect();
            json!({"object": "list", "data": models})
        }
        ("GET", path) if path.starts_with("/v1/models/") => {
            json!({"id": &path["/v1/models/".len()..], "object": "model", "owned_by": "library"})
        }
        _ => return whole(404, "text/plain", b"404 page not found"),
    };
    whole(200, "application/json", body.to_string().as_bytes())
}

fn tag((name, is_remote): &(String, bool)) -> Value {
    let mut tag = json!({
        "name": name, "model": name, "size": 1_000, "digest": "0f".repeat(32),
        "modified_at": "2026-01-01T00:00:00Z",
        "details": {"format": "gguf", "family": "scripted", "parameter_size": "1B"},
    });
    if *is_remote {
        tag["remote_host"] = json!("https://models.example.com:443");
        tag["remote_model"] = json!(name);
    }
    tag
}

/// A response with a length.
fn whole(status: u16, content_type: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Answers a computation. Returns whether the connection can serve another request.
async fn answer(
    write: &mut OwnedWriteHalf,
    request: &ModelRequest,
    reply: ModelReply,
) -> io::Result<bool> {
    let form = Form::of(request);
    let no_pause = Duration::ZERO;
    match reply {
        ModelReply::Silence => forever().await,
        ModelReply::Bytes(bytes) => {
            write.write_all(&bytes).await?;
            return Ok(false);
        }
        ModelReply::Body(content_type, body) => {
            write.write_all(&whole(200, content_type, &body)).await?;
        }
        ModelReply::Error(status, message) => {
            let body = if form.is_openai {
                json!({"error": {"message": message, "type": "error", "code": null}})
            } else {
                json!({"error": message})
            };
            let body = body.to_string();
            write
                .write_all(&whole(status, "application/json", body.as_bytes()))
                .await?;
        }
        ModelReply::Redirect(location) => {
            let head =
                format!("HTTP/1.1 307 X\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n");
            write.write_all(head.as_bytes()).await?;
        }
        ModelReply::Text(pieces) => form.text(write, &pieces, no_pause, false).await?,
        ModelReply::Slow(pieces, pause) => form.text(write, &pieces, pause, false).await?,
        ModelReply::Remote(pieces) => form.text(write, &pieces, no_pause, true).await?,
        ModelReply::Message(message) => form.message(write, &message).await?,
        ModelReply::Endless => {
            form.begin_stream(write).await?;
            loop {
                form.piece(write, &json!({"content": "more "})).await?;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        ModelReply::Flood => {
            form.begin_stream(write).await?;
            let text = "more ".repeat(3_000);
            loop {
                form.piece(write, &json!({"content": text})).await?;
            }
        }
        ModelReply::Trickle(pause) => {
            form.begin_stream(write).await?;
            loop {
                tokio::time::sleep(pause).await;
                form.piece(write, &json!({"content": "more "})).await?;
            }
        }
        ModelReply::Stall => {
            form.begin_stream(write).await?;
            form.piece(write, &json!({"content": "one "})).await?;
            forever().await;
        }
        ModelReply::Cut(pieces) => {
            form.begin_stream(write).await?;
            for piece in pieces {
                form.piece(write, &json!({"content": piece})).await?;
            }
            return Ok(false);
        }
    }
    Ok(true)
}

async fn forever() {
    std::future::pending::<()>().await;
}

/// How the answers to one request look.
struct Form {
    model: Value,
    path: String,
    is_openai: bool,
    streams: bool,
}

impl Form {
    fn of(request: &ModelRequest) -> Self {
        let is_openai = request.path.starts_with("/v1/");
        let streams = request.body["stream"].as_bool();
        Self {
            model: request.body["model"].clone(),
            path: request.path.clone(),
            is_openai,
            streams: streams.unwrap_or(!is_openai) && !request.path.contains("embed"),
        }
    }

    async fn text(
        &self,
        write: &mut OwnedWriteHalf,
        pieces: &[String],
        pause: Duration,
        is_remote: bool,
    ) -> io::Result<()> {
        if self.path.contains("embed") {
            let body = self.embeddings().to_string();
            return write
                .write_all(&whole(200, "application/json", body.as_bytes()))
                .await;
        }
        if !self.streams {
            tokio::time::sleep(pause * u32::try_from(pieces.len()).unwrap_or(1)).await;
            let message = json!({"role": "assistant", "content": pieces.concat()});
            return self.whole_message(write, &message, is_remote).await;
        }
        self.begin_stream(write).await?;
        for piece in pieces {
            tokio::time::sleep(pause).await;
            self.piece(write, &json!({"role": "assistant", "content": piece}))
                .await?;
        }
        self.end_stream(write, "stop", is_remote).await
    }

    async fn message(&self, write: &mut OwnedWriteHalf, message: &Value) -> io::Result<()> {
        let mut message = message.clone();
        message["role"] = json!("assistant");
        if !self.streams {
            return self.whole_message(write, &message, false).await;
        }
        let calls_tools = message["tool_calls"].is_array();
        for (index, call) in message["tool_calls"]
            .as_array_mut()
            .into_iter()
            .flatten()
            .enumerate()
        {
            call["index"] = json!(index);
        }
        self.begin_stream(write).await?;
        self.piece(write, &message).await?;
        let reason = if calls_tools { "tool_calls" } else { "stop" };
        self.end_stream(write, reason, false).await
    }

    async fn whole_message(
        &self,
        write: &mut OwnedWriteHalf,
        message: &Value,
        is_remote: bool,
    ) -> io::Result<()> {
        let body = if self.is_openai {
            let reason = if message["tool_calls"].is_array() {
                "tool_calls"
            } else {
                "stop"
            };
            json!({
                "id": "scripted", "object": "chat.completion", "created": 1, "model": self.model,
                "choices": [self.choice(message, "message", &json!(reason))],
                "usage": usage(),
            })
        } else {
            self.last_line(message, is_remote)
        };
        let body = body.to_string();
        write
            .write_all(&whole(200, "application/json", body.as_bytes()))
            .await
    }

    fn choice(&self, message: &Value, name: &str, reason: &Value) -> Value {
        let mut choice = json!({"index": 0, "finish_reason": reason});
        if self.path == "/v1/completions" {
            choice["text"] = message["content"].clone();
        } else {
            choice[name] = message.clone();
        }
        choice
    }

    /// A line of Ollama's, without its end.
    fn line(&self, message: &Value) -> Value {
        let mut line = json!({
            "model": self.model, "created_at": "2026-01-01T00:00:00Z", "done": false,
        });
        if self.path == "/api/generate" {
            line["response"] = message["content"].clone();
        } else {
            line["message"] = message.clone();
        }
        line
    }

    fn last_line(&self, message: &Value, is_remote: bool) -> Value {
        let mut line = self.line(message);
        line["done"] = json!(true);
        line["done_reason"] = json!("stop");
        line["prompt_eval_count"] = json!(PROMPT_TOKENS);
        line["eval_count"] = json!(COMPLETION_TOKENS);
        if is_remote {
            line["remote_host"] = json!("https://models.example.com:443");
            line["remote_model"] = self.model.clone();
        }
        line
    }

    fn embeddings(&self) -> Value {
        let vector = json!([0.25, -0.5, 1.0]);
        match self.path.as_str() {
            "/v1/embeddings" => json!({
                "object": "list", "model": self.model,
                "data": [{"object": "embedding", "index": 0, "embedding": vector}],
                "usage": {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS},
            }),
            "/api/embed" => json!({
                "model": self.model, "embeddings": [vector], "prompt_eval_count": PROMPT_TOKENS,
            }),
            _ => json!({"embedding": vector}),
        }
    }

    async fn begin_stream(&self, write: &mut OwnedWriteHalf) -> io::Result<()> {
        let content_type = if self.is_openai {
            "text/event-stream"
        } else {
            "application/x-ndjson"
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        );
        write.write_all(head.as_bytes()).await
    }

    async fn piece(&self, write: &mut OwnedWriteHalf, message: &Value) -> io::Result<()> {
        let piece = if self.is_openai {
            json!({
                "id": "scripted", "object": "chat.completion.chunk", "created": 1,
                "model": self.model, "choices": [self.choice(message, "delta", &Value::Null)],
            })
        } else {
            self.line(message)
        };
        self.framed(write, &piece).await
    }

    async fn end_stream(
        &self,
        write: &mut OwnedWriteHalf,
        reason: &str,
        is_remote: bool,
    ) -> io::Result<()> {
        if self.is_openai {
            let empty = json!({"content": ""});
            let last = json!({
                "id": "scripted", "object": "chat.completion.chunk", "created": 1,
                "model": self.model, "choices": [self.choice(&empty, "delta", &json!(reason))],
            });
            self.framed(write, &last).await?;
            let counted = json!({
                "id": "scripted", "object": "chat.completion.chunk", "created": 1,
                "model": self.model, "choices": [], "usage": usage(),
            });
            self.framed(write, &counted).await?;
            chunk(write, b"data: [DONE]\n\n").await?;
        } else {
            let last = self.last_line(&json!({"role": "assistant", "content": ""}), is_remote);
            self.framed(write, &last).await?;
        }
        write.write_all(b"0\r\n\r\n").await
    }

    async fn framed(&self, write: &mut OwnedWriteHalf, value: &Value) -> io::Result<()> {
        let text = if self.is_openai {
            format!("data: {value}\n\n")
        } else {
            format!("{value}\n")
        };
        chunk(write, text.as_bytes()).await
    }
}

fn usage() -> Value {
    json!({
        "prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS,
        "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
    })
}

async fn chunk(write: &mut OwnedWriteHalf, bytes: &[u8]) -> io::Result<()> {
    let framed = [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
    write.write_all(&framed).await?;
    write.flush().await
}

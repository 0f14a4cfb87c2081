//! A model server that follows a script, in OpenAI's form.

use std::{
    io::{BufRead as _, BufReader, Read, Write},
    net::TcpListener,
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use cynode_sba_proto::proxy::{Listener, PREAMBLE_BYTES};
use serde_json::{Value, json};

/// What the server answers to a chat completion.
pub(crate) enum Reply {
    /// A text and tool calls: their names and the text of their arguments.
    Answer {
        text: String,
        calls: Vec<(String, String)>,
        tokens: u64,
    },
    /// A status, and a body that is not streamed.
    Status(u16, String),
    /// A stream of these bytes.
    Stream(String),
    /// An answer whose text has no end.
    EndlessText,
    /// A stream with comments, and nothing else, that has no end.
    EndlessPause,
    Disconnect,
}

pub(crate) fn says(text: &str) -> Reply {
    Reply::Answer {
        text: text.to_owned(),
        calls: Vec::new(),
        tokens: 10,
    }
}

/// An answer that calls one tool.
pub(crate) fn calls(name: &str, arguments: &Value) -> Reply {
    calls_all(&[(name, arguments.clone())])
}

pub(crate) fn calls_all(calls: &[(&str, Value)]) -> Reply {
    let calls = calls.iter();
    Reply::Answer {
        text: String::new(),
        calls: calls
            .map(|(name, arguments)| ((*name).to_owned(), arguments.to_string()))
            .collect(),
        tokens: 10,
    }
}

pub(crate) fn finishes() -> Reply {
    calls("finish", &json!({"summary": "It works."}))
}

pub(crate) struct ModelServer {
    port: u16,
    requests: Arc<Mutex<Vec<Value>>>,
}

impl ModelServer {
    /// A server of these models. `script` gets the number of each request, from 0, and its body.
    pub(crate) fn start(
        models: &[&str],
        script: impl FnMut(usize, &Value) -> Reply + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (server, requests) = Server::new(models, script);
        std::thread::spawn(move || {
            server.run(listener.incoming().map(|stream| {
                let stream = stream?;
                Ok((stream.try_clone()?, stream))
            }));
        });
        Self { port, requests }
    }

    /// The same at a socket, as a node's worker offers it.
    pub(crate) fn start_at(
        socket: &Path,
        models: &[&str],
        script: impl FnMut(usize, &Value) -> Reply + Send + 'static,
    ) -> Self {
        let listener = UnixListener::bind(socket).expect("a socket");
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(socket, open).expect("mode");
        let (server, requests) = Server::new(models, script);
        std::thread::spawn(move || {
            server.run(listener.incoming().map(|stream| {
                let mut stream = stream?;
                let mut preamble = [0; PREAMBLE_BYTES];
                stream.read_exact(&mut preamble)?;
                assert_eq!(Listener::parse(&preamble), Ok(Listener::Inference));
                Ok((stream.try_clone()?, stream))
            }));
        });
        Self { port: 0, requests }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The bodies of all chat completions so far.
    pub(crate) fn requests(&self) -> Vec<Value> {
        self.requests.lock().expect("the requests").clone()
    }
}

/// Answers the request with this number.
type Script = Box<dyn FnMut(usize, &Value) -> Reply + Send>;

struct Server {
    list: Value,
    requests: Arc<Mutex<Vec<Value>>>,
    script: Script,
}

impl Server {
    fn new(
        models: &[&str],
        script: impl FnMut(usize, &Value) -> Reply + Send + 'static,
    ) -> (Self, Arc<Mutex<Vec<Value>>>) {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let models = models
            .iter()
            .map(|model| json!({"id": model, "object": "model"}));
        let server = Self {
            list: json!({"object": "list", "data": models.collect::<Vec<_>>()}),
            requests: Arc::clone(&requests),
            script: Box::new(script),
        };
        (server, requests)
    }

    fn run<R: Read, W: Write>(mut self, streams: impl Iterator<Item = std::io::Result<(R, W)>>) {
        for stream in streams {
            // A client may leave whenever it likes.
            drop(stream.and_then(|(reader, writer)| self.serve(reader, writer)));
        }
    }

    fn serve(&mut self, reader: impl Read, mut stream: impl Write) -> std::io::Result<()> {
        let mut reader = BufReader::new(reader);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let is_list = line.starts_with("GET /v1/models ");
        let is_description = line.starts_with("POST /api/show ");
        assert!(
            is_list || is_description || line.starts_with("POST /v1/chat/completions "),
            "{line}"
        );
        let mut length = 0;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header)?;
            if header.trim().is_empty() {
                break;
            }
            let header = header.to_ascii_lowercase();
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length");
            }
        }
        if is_list {
            return respond(&mut stream, 200, &self.list.to_string());
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        if is_description {
            // Only Ollama describes models.
            return respond(&mut stream, 404, "404 page not found");
        }
        let body: Value = serde_json::from_slice(&body)?;
        let number = {
            let mut requests = self.requests.lock().expect("the requests");
            requests.push(body.clone());
            requests.len() - 1
        };
        match (self.script)(number, &body) {
            Reply::Answer {
                text,
                calls,
                tokens,
            } => {
                begin_stream(&mut stream)?;
                stream.write_all(streamed(&text, &calls, tokens).as_bytes())
            }
            Reply::Status(status, body) => respond(&mut stream, status, &body),
            Reply::Stream(text) => {
                begin_stream(&mut stream)?;
                stream.write_all(text.as_bytes())
            }
            Reply::EndlessText => {
                begin_stream(&mut stream)?;
                let piece = event(&json!({"content": "again and again ".repeat(100)}), None);
                loop {
                    stream.write_all(piece.as_bytes())?;
                }
            }
            Reply::EndlessPause => {
                begin_stream(&mut stream)?;
                loop {
                    stream.write_all(b": wait\n\n")?;
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            Reply::Disconnect => Ok(()),
        }
    }
}

fn respond(stream: &mut impl Write, status: u16, body: &str) -> std::io::Result<()> {
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
}

fn begin_stream(stream: &mut impl Write) -> std::io::Result<()> {
    stream.write_all(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n",
    )
}

fn event(delta: &Value, finish: Option<&str>) -> String {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    format!(
        "data: {}\n\n",
        json!({"object": "chat.completion.chunk", "choices": [choice]})
    )
}

/// An answer in small pieces.
fn streamed(text: &str, calls: &[(String, String)], tokens: u64) -> String {
    let mut stream = event(&json!({"role": "assistant", "content": ""}), None);
    let characters: Vec<char> = text.chars().collect();
    for piece in characters.chunks(7) {
        stream += &event(&json!({"content": piece.iter().collect::<String>()}), None);
    }
    for (index, (name, arguments)) in calls.iter().enumerate() {
        let call = |function: Value, id: Option<String>| {
            let call = json!({"index": index, "id": id, "type": "function", "function": function});
            event(&json!({"tool_calls": [call]}), None)
        };
        let function = json!({"name": name, "arguments": ""});
        stream += &call(function, Some(format!("server {index}")));
        let characters: Vec<char> = arguments.chars().collect();
        for piece in characters.chunks(1_000) {
            stream += &call(json!({"arguments": piece.iter().collect::<String>()}), None);
        }
    }
    let reason = if calls.is_empty() {
        "stop"
    } else {
        "tool_calls"
    };
    stream += &event(&json!({}), Some(reason));
    let usage =
        json!({"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1});
    let usage = json!({"choices": [], "usage": usage});
    format!("{stream}data: {usage}\n\ndata: [DONE]\n\n")
}

/// All text of a prompt, in order.
pub(crate) fn prompt_text(request: &Value) -> String {
    let messages = request["messages"].as_array().expect("messages");
    let contents = messages
        .iter()
        .filter_map(|message| message["content"].as_str());
    contents.collect::<Vec<_>>().join("\n")
}

/// The results of tools that a request ends with: what came of the last answer.
pub(crate) fn last_results(request: &Value) -> Vec<String> {
    let messages = request["messages"].as_array().expect("messages");
    let mut results: Vec<String> = messages
        .iter()
        .rev()
        .skip_while(|message| message["role"] == "user")
        .take_while(|message| message["role"] == "tool")
        .map(|message| message["content"].as_str().expect("a text").to_owned())
        .collect();
    results.reverse();
    results
}

//! Forwards the messages of one client: each as one request to the gateway, its answers in order.
//!
//! Invariants: every request gets exactly one answer, unless the client cancels it. A server that
//! can't be reached is an error of the request; the next one tries again. What a client sends is
//! bounded: by line, by the number of requests in flight, and by their bytes.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use cynode_client::McpAnswer;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{
    io::AsyncRead,
    task::{AbortHandle, JoinHandle, JoinSet},
};

use super::{
    lines::{ClientLine, Lines, MAX_LINE_BYTES, Output},
    message::{self, INTERNAL_ERROR, INVALID_REQUEST, Message, Outline, SERVER_ERROR},
    refusal::Refusal,
    upstream::Upstream,
    workspace::{CREATE, Workspace},
};
use crate::{output, sanitize};

/// The longest message that the gateway takes.
const MAX_MESSAGE_BYTES: usize = 10 * 1024 * 1024;
/// Messages that are being answered.
const MAX_IN_FLIGHT: usize = 64;
const MAX_IN_FLIGHT_BYTES: usize = 64 * 1024 * 1024;
/// How long calls in flight may still answer after the client has closed its side.
const END_GRACE: Duration = Duration::from_secs(10);
/// As the gateway does it.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// The gateway counts progress in seconds from 2 on, and progress must rise.
const PROGRESS_STEP: f64 = 0.001;
/// Tools that need no session.
const WITHOUT_SESSION: &str = "help_get";

#[derive(Debug)]
pub struct Bridge {
    upstream: Arc<Upstream>,
    workspace: Workspace,
    output: Output,
    flights: Mutex<Flights>,
    /// The revision that the handshake agreed on.
    negotiated: Mutex<Option<String>>,
}

/// Messages that are being answered.
#[derive(Debug, Default)]
struct Flights {
    /// Requests by their ids, notifications by their numbers.
    flights: HashMap<Key, Flight>,
    bytes: usize,
    next_number: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Request(String),
    Notification(u64),
}

#[derive(Debug)]
struct Flight {
    /// Tells it from later ones with the same id.
    number: u64,
    bytes: usize,
    task: Option<AbortHandle>,
}

impl Flights {
    /// Makes room for a message, or says why there is none.
    fn admit(&mut self, message: &Message) -> Result<(Key, u64), Refusal> {
        let bytes = message.line.len();
        if bytes > MAX_MESSAGE_BYTES {
            return Err(too_large(MAX_MESSAGE_BYTES));
        }
        let number = self.next_number;
        let key = match &message.id {
            Some(id) => Key::Request(id.to_string()),
            None => Key::Notification(number),
        };
        if self.flights.contains_key(&key) {
            return Err(Refusal::new(
                "invalid_request",
                "id: another request in flight has it",
            ));
        }
        let count = self.flights.len();
        if count >= MAX_IN_FLIGHT || self.bytes + bytes > MAX_IN_FLIGHT_BYTES {
            return Err(Refusal::new(
                "too_many_requests",
                format!("{count} requests are in flight"),
            )
            .remedy("Wait for some of them to be answered, then try again."));
        }
        self.next_number += 1;
        self.bytes += bytes;
        let flight = Flight {
            number,
            bytes,
            task: None,
        };
        self.flights.insert(key.clone(), flight);
        Ok((key, number))
    }

    fn remove(&mut self, key: &Key) -> Option<Flight> {
        let flight = self.flights.remove(key)?;
        self.bytes -= flight.bytes;
        Some(flight)
    }
}

/// Ends a flight when its task does, however that ends.
#[derive(Debug)]
struct Landing {
    bridge: Arc<Bridge>,
    key: Key,
    number: u64,
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut flights = self.bridge.flights.lock();
        let is_its_own = |flight: &Flight| flight.number == self.number;
        if flights.flights.get(&self.key).is_some_and(is_its_own) {
            drop(flights.remove(&self.key));
        }
    }
}

impl Bridge {
    pub fn new(upstream: Arc<Upstream>, workspace: Workspace, output: Output) -> Self {
        Self {
            upstream,
            workspace,
            output,
            flights: Mutex::default(),
            negotiated: Mutex::default(),
        }
    }

    /// Serves until the client closes its input or stops reading.
    pub async fn run(self, input: impl AsyncRead + Unpin, mut writer: JoinHandle<()>) {
        let bridge = Arc::new(self);
        let mut lines = Lines::new(input, MAX_LINE_BYTES);
        let mut tasks = JoinSet::new();
        loop {
            tokio::select! {
                line = lines.next() => match line {
                    Ok(Some(line)) => Self::accept(&bridge, line, &mut tasks).await,
                    Ok(None) => break,
                    Err(error) => {
                        log(&format!("can't read standard input: {error}"));
                        break;
                    }
                },
                Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
                _ = &mut writer => return,
            }
        }
        let rest = async { while tasks.join_next().await.is_some() {} };
        drop(tokio::time::timeout(END_GRACE, rest).await);
        tasks.abort_all();
        while tasks.join_next().await.is_some() {}
        // Without the last sender, the writer ends once it has written everything.
        drop(bridge);
        drop(tokio::time::timeout(END_GRACE, writer).await);
    }

    /// Starts to answer a line.
    async fn accept(bridge: &Arc<Self>, line: ClientLine, tasks: &mut JoinSet<()>) {
        let line = match line {
            ClientLine::Text(line) => line,
            ClientLine::TooLong => {
                let refusal = too_large(MAX_LINE_BYTES);
                return bridge
                    .write(message::error(None, INVALID_REQUEST, &refusal))
                    .await;
            }
        };
        let message = match Message::parse(line) {
            Ok(Some(message)) => message,
            Ok(None) => return,
            Err(malformed) => {
                let refusal = Refusal::new("invalid_request", malformed.message);
                let id = malformed.id.as_ref();
                return bridge
                    .write(message::error(id, malformed.code, &refusal))
                    .await;
            }
        };
        if let Some(request) = message.cancelled() {
            // The gateway cancels a call whose connection closes.
            let key = Key::Request(request.to_string());
            let cancelled = bridge.flights.lock().remove(&key);
            if let Some(task) = cancelled.and_then(|flight| flight.task) {
                task.abort();
            }
            return;
        }
        let admitted = bridge.flights.lock().admit(&message);
        match admitted {
            Ok((key, number)) => {
                let landing = Landing {
                    bridge: Arc::clone(bridge),
                    key: key.clone(),
                    number,
                };
                let task = tasks.spawn(async move {
                    landing.bridge.serve(message).await;
                    drop(landing);
                });
                if let Some(flight) = bridge.flights.lock().flights.get_mut(&key) {
                    flight.task = Some(task);
                }
            }
            Err(refusal) if message.id.is_some() => {
                let id = message.id.as_ref();
                bridge
                    .write(message::error(id, INVALID_REQUEST, &refusal))
                    .await;
            }
            Err(refusal) => log(&format!("a notification is dropped: {}", refusal.text())),
        }
    }

    async fn serve(&self, message: Message) {
        let Some(id) = message.id.clone() else {
            if let Err(refusal) = self.notify(&message).await {
                log(&format!("{} is lost: {}", message.method, refusal.text()));
            }
            return;
        };
        let answer = match self.answer(&message).await {
            Ok(answer) => answer,
            Err(refusal) if refusal.code == "internal" => {
                message::error(Some(&id), INTERNAL_ERROR, &refusal)
            }
            Err(refusal) => message::error(Some(&id), SERVER_ERROR, &refusal),
        };
        // From here on it can't be cancelled.
        let key = Key::Request(id.to_string());
        drop(self.flights.lock().remove(&key));
        self.write(answer).await;
    }

    async fn notify(&self, message: &Message) -> Result<(), Refusal> {
        let headers = message.headers(self.negotiated.lock().as_deref());
        self.upstream.send(&headers, message.line.clone()).await?;
        Ok(())
    }

    /// The final answer to a request.
    async fn answer(&self, message: &Message) -> Result<Vec<u8>, Refusal> {
        if !message.is_tool_call() || message.tool() == WITHOUT_SESSION {
            return self.forward(message, message.line.clone()).await;
        }
        // The session may have ended since the last call, also by others.
        let begins_with_directory =
            !self.workspace.is_default() && !message.has_argument("workspace_ref");
        if message.tool() == CREATE
            && !message.has_argument("session_id")
            && (begins_with_directory || !self.workspace.is_ready())
        {
            return self.create(message).await;
        }
        if !self.workspace.is_ready()
            && let Err(refusal) = self.with_progress(message, self.workspace.prepare()).await
        {
            return Ok(message.tool_failure(&refusal));
        }
        self.forward(message, message.line.clone()).await
    }

    /// Forwards the creation of the session, with the directory as its workspace unless the client
    /// names another.
    async fn create(&self, message: &Message) -> Result<Vec<u8>, Refusal> {
        let wants_directory = !message.has_argument("workspace_ref");
        let prepared = async {
            let claim = self.workspace.claim().await?;
            let arguments = if wants_directory {
                claim.arguments().await?
            } else {
                serde_json::Map::new()
            };
            Ok((claim, arguments))
        };
        let (claim, arguments) = match self.with_progress(message, prepared).await {
            Ok(prepared) => prepared,
            Err(refusal) => return Ok(message.tool_failure(&refusal)),
        };
        let has_directory = arguments.contains_key("workspace_ref");
        let answer = self
            .forward(message, message.with_arguments(arguments))
            .await?;
        let mut told: Value = serde_json::from_slice(&answer).unwrap_or_default();
        let result = &mut told["result"];
        if result["isError"] != false {
            return Ok(answer);
        }
        let structure = &result["structuredContent"];
        let session = structure["session_id"]
            .as_str()
            .and_then(|id| id.parse().ok());
        // A note tells that the session existed.
        let is_new = structure["note"].is_null();
        // One that exists is remembered already, unless its creation was interrupted.
        let is_directorys = has_directory && (is_new || !claim.is_repeated());
        claim.fulfil(session.filter(|_| is_directorys)).await?;
        if is_new
            && has_directory
            && let Some(content) = result["content"].as_array_mut()
        {
            let note = "The workspace begins with the files of the user's directory.";
            content.push(json!({"type": "text", "text": note}));
            return Ok(told.to_string().into_bytes());
        }
        Ok(answer)
    }

    /// Sends a request and relays what comes before its answer.
    async fn forward(&self, message: &Message, line: Bytes) -> Result<Vec<u8>, Refusal> {
        let headers = message.headers(self.negotiated.lock().as_deref());
        let (answer, _in_use) = self.upstream.send(&headers, line).await?;
        let answer = match answer {
            McpAnswer::Message(answer) => answer.to_vec(),
            McpAnswer::Accepted => return Err(invalid_answer()),
            McpAnswer::Events(mut events) => loop {
                let Some(event) = events.next().await.map_err(interrupted)? else {
                    return Err(interrupted(cynode_client::Error::Broken {
                        url: super::upstream::PATH.to_owned(),
                        source: None,
                    }));
                };
                let event = event.into_bytes();
                match Outline::of(&event) {
                    Some(outline) if outline.is_answer() => break event,
                    Some(_) => self.write(message::on_one_line(event)).await,
                    None => return Err(invalid_answer()),
                }
            },
        };
        self.checked(message, answer)
    }

    /// The answer, if it is the one to this request.
    fn checked(&self, message: &Message, answer: Vec<u8>) -> Result<Vec<u8>, Refusal> {
        let outline = Outline::of(&answer)
            .filter(Outline::is_answer)
            .ok_or_else(invalid_answer)?;
        if outline.id.is_null()
            && let Some(error) = outline.error
        {
            let answer = json!({"jsonrpc": "2.0", "id": message.id, "error": error});
            return Ok(answer.to_string().into_bytes());
        }
        if Some(&outline.id) != message.id.as_ref() {
            return Err(invalid_answer());
        }
        if message.method == "initialize"
            && let Some(result) = &outline.result
            && let Ok(result) = serde_json::from_str::<Value>(result.get())
        {
            *self.negotiated.lock() = result["protocolVersion"].as_str().map(str::to_owned);
        }
        Ok(message::on_one_line(answer))
    }

    /// Does work for a request, and tells a client that asked for progress that it lasts.
    async fn with_progress<T>(&self, message: &Message, work: impl Future<Output = T>) -> T {
        let Some(token) = message.progress_token() else {
            return work.await;
        };
        let text = sanitize::line(&self.workspace.progress());
        let report = async {
            let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
            ticks.tick().await;
            let mut progress = 0.0;
            loop {
                ticks.tick().await;
                progress += PROGRESS_STEP;
                self.write(message::progress(token, progress, &text)).await;
            }
        };
        tokio::select! {
            done = work => done,
            () = report => unreachable!("progress is reported forever"),
        }
    }

    /// Writes a line. A client that is gone is noticed by whoever reads its input.
    async fn write(&self, line: Vec<u8>) {
        drop(self.output.send(line).await);
    }
}

fn too_large(limit: usize) -> Refusal {
    Refusal::new(
        "too_large",
        format!("the message is longer than {limit} bytes"),
    )
    .remedy("Send less at once: write long files in parts, with commands.")
}

fn invalid_answer() -> Refusal {
    Refusal::new("internal", "the server's answer is not valid")
        .remedy("Check that the server is a CyNode of the same version: see 'cynode status'.")
}

fn interrupted(error: cynode_client::Error) -> Refusal {
    Refusal::from(error).remedy(
        "The call may have had an effect: look before you repeat it. If this lasts, see 'cynode \
         status'.",
    )
}

fn log(text: &str) {
    output::message(&format!("cynode: {}", sanitize::line(text)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(id: &str, bytes: usize) -> Message {
        let line = format!(
            r#"{{"jsonrpc":"2.0",{id}"method":"ping","params":"{}"}}"#,
            "x".repeat(bytes)
        );
        Message::parse(Bytes::from(line))
            .expect("valid")
            .expect("a message")
    }

    fn request(number: usize, bytes: usize) -> Message {
        message(&format!("\"id\":{number},"), bytes)
    }

    #[test]
    // invariant: bounded
    fn messages_in_flight_are_bounded_by_number_and_bytes() {
        let mut flights = Flights::default();
        for number in 0..MAX_IN_FLIGHT - 1 {
            flights.admit(&request(number, 1)).expect("room");
        }
        let refused = |flights: &mut Flights, message: &Message| {
            flights.admit(message).map_err(|refusal| refusal.code)
        };
        assert_eq!(
            refused(&mut flights, &request(0, 1)),
            Err("invalid_request".to_owned())
        );
        let (notification, _) = flights.admit(&message("", 1)).expect("room");
        assert_eq!(
            refused(&mut flights, &request(MAX_IN_FLIGHT, 1)),
            Err("too_many_requests".to_owned())
        );
        assert!(flights.remove(&notification).is_some());
        assert!(flights.remove(&Key::Request("0".to_owned())).is_some());
        flights.admit(&request(0, 1)).expect("room again");

        let mut flights = Flights::default();
        let large = MAX_MESSAGE_BYTES - 100;
        for number in 0..6 {
            flights.admit(&request(number, large)).expect("room");
        }
        assert_eq!(
            refused(&mut flights, &request(6, large)),
            Err("too_many_requests".to_owned())
        );
        assert_eq!(
            refused(&mut flights, &request(6, MAX_MESSAGE_BYTES)),
            Err("too_large".to_owned())
        );
        for number in 0..6 {
            drop(flights.remove(&Key::Request(number.to_string())));
        }
        assert_eq!((flights.bytes, flights.flights.len()), (0, 0));
    }
}

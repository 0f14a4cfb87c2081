//! The MCP gateway, for a program that forwards the messages of a client: one POST for each.

use bytes::Bytes;
use cynode_api::Problem;
use http::{HeaderValue, Method, header};

use crate::{
    Result, SessionClient,
    client::{display_url, read_bounded, refusal, send},
    events::RawEvents,
    execs::EVENT_STREAM,
};

/// The longest answer to one message. A tool's result has at most two streams or files of 1 MiB,
/// once as text and once as structure, and escapes take up to six bytes each.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;

/// What a message says about itself in headers, which the gateway compares with the message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct McpHeaders {
    /// `MCP-Protocol-Version`
    pub protocol_version: Option<String>,
    /// `Mcp-Method`
    pub method: Option<String>,
    /// `Mcp-Name`, encoded
    pub name: Option<String>,
}

/// The answer to a message.
#[derive(Debug)]
pub enum McpAnswer {
    /// The message was a notification: nothing follows.
    Accepted,
    /// One message.
    Message(Bytes),
    /// Several messages, in order.
    Events(Box<McpEvents>),
}

/// Messages that arrive one after the other.
#[derive(Debug)]
pub struct McpEvents(RawEvents);

impl McpEvents {
    /// The next message; `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<String>> {
        loop {
            match self.0.next().await? {
                // Events that only prepare a reconnection have no data.
                Some(event) if event.data.is_empty() => {}
                event => return Ok(event.map(|event| event.data)),
            }
        }
    }
}

impl SessionClient {
    /// Sends one message to a path of the gateway. There is no timeout: a tool may run for hours.
    /// Dropping the future, or the events, cancels the call.
    pub async fn mcp(&self, path: &str, headers: &McpHeaders, message: Bytes) -> Result<McpAnswer> {
        let mut request = self
            .request(Method::POST, path)
            .header(header::ACCEPT, "application/json, text/event-stream")
            .header(header::CONTENT_TYPE, "application/json")
            .body(message);
        for (name, value) in [
            ("mcp-protocol-version", &headers.protocol_version),
            ("mcp-method", &headers.method),
            ("mcp-name", &headers.name),
        ] {
            // Without a header that the gateway demands, its refusal says so.
            if let Some(value) = value
                .as_deref()
                .and_then(|it| HeaderValue::from_str(it).ok())
            {
                request = request.header(name, value);
            }
        }
        let response = send(request).await?;
        let status = response.status().as_u16();
        let url = display_url(response.url());
        let is_events = response
            .headers()
            .get(header::CONTENT_TYPE)
            .and_then(|kind| kind.to_str().ok())
            .is_some_and(|kind| kind.starts_with(EVENT_STREAM));
        if status == 200 && is_events {
            return Ok(McpAnswer::Events(Box::new(McpEvents(RawEvents::new(
                response,
            )))));
        }
        let body = read_bounded(response, MAX_ANSWER_BYTES).await?;
        match status {
            202 | 204 => Ok(McpAnswer::Accepted),
            200 => Ok(McpAnswer::Message(body)),
            // The protocol answers some errors with another status, and a message all the same.
            _ if is_message(&body) => Ok(McpAnswer::Message(body)),
            _ => Err(refusal(url, status, &body)),
        }
    }
}

/// Whether the body of a refusal is a message of the protocol, not a problem document.
fn is_message(body: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Message {
        jsonrpc: String,
    }
    serde_json::from_slice::<Problem>(body).is_err()
        && serde_json::from_slice::<Message>(body).is_ok_and(|message| message.jsonrpc == "2.0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_a_message_or_a_problem() {
        assert!(is_message(
            br#"{"jsonrpc":"2.0","id":1,"error":{"code":-32020,"message":"x"}}"#
        ));
        for other in [
            &br#"{"type":"urn:cynode:error:forbidden","title":"x","status":403,"detail":"x","code":"forbidden","remedy":"x"}"#[..],
            b"Bad Gateway",
            b"{}",
            br#"{"jsonrpc":"1.0"}"#,
        ] {
            assert!(!is_message(other), "{}", String::from_utf8_lossy(other));
        }
    }
}

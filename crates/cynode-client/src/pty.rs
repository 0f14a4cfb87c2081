//! A terminal in a session, over WebSocket.
//!
//! The upgrade uses the same HTTP client as all other calls, and so the same TLS settings and error
//! handling.

use bytes::Bytes;
use cynode_api::SessionId;
use futures_util::{SinkExt, StreamExt};
use http::{Method, StatusCode, header};
use reqwest::Upgraded;
use serde::{Deserialize, Serialize};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::{client::generate_key, derive_accept_key},
        protocol::{Role, WebSocketConfig},
    },
};

use crate::{
    Error, Result, SessionClient,
    client::{check_status, display_url, send},
};

/// The largest frame and message to accept.
const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// The options of a new terminal.
#[derive(Clone, Debug)]
pub struct PtyOpen {
    pub cols: u16,
    pub rows: u16,
    /// The image's shell if empty.
    pub argv: Vec<String>,
}

/// A message from the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PtyMessage {
    Ready,
    Data(Bytes),
    Exit {
        exit_code: Option<i32>,
        signal: Option<String>,
    },
    Error {
        code: String,
        detail: String,
    },
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum TextFrame {
    Ready,
    Exit {
        #[serde(default)]
        exit_code: Option<i32>,
        #[serde(default)]
        signal: Option<String>,
    },
    Error {
        code: String,
        #[serde(default)]
        detail: String,
    },
    #[serde(other)]
    Unknown,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Control {
    Resize { cols: u16, rows: u16 },
}

#[derive(Debug)]
pub struct Pty {
    socket: WebSocketStream<Upgraded>,
    url: String,
}

impl SessionClient {
    pub async fn open_pty(&self, session: SessionId, open: &PtyOpen) -> Result<Pty> {
        let mut query = vec![
            ("cols", open.cols.to_string()),
            ("rows", open.rows.to_string()),
        ];
        query.extend(open.argv.iter().map(|argument| ("argv", argument.clone())));
        let key = generate_key();
        let request = self
            .request(Method::GET, &self.session(session, "/pty"))
            .query(&query)
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, &key);
        let response = send(request).await?;
        let url = display_url(response.url());
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let status = check_status(response).await?.status();
            return Err(Error::answer(
                &url,
                format!("expected 101 Switching Protocols, not {status}"),
            ));
        }
        if response
            .headers()
            .get(header::SEC_WEBSOCKET_ACCEPT)
            .map(header::HeaderValue::as_bytes)
            != Some(derive_accept_key(key.as_bytes()).as_bytes())
        {
            return Err(Error::answer(&url, "the WebSocket handshake is invalid"));
        }
        let upgraded = response
            .upgrade()
            .await
            .map_err(|error| Error::broken(&url, error))?;
        let config = WebSocketConfig::default()
            .max_message_size(Some(MAX_MESSAGE_BYTES))
            .max_frame_size(Some(MAX_MESSAGE_BYTES));
        Ok(Pty {
            socket: WebSocketStream::from_raw_socket(upgraded, Role::Client, Some(config)).await,
            url,
        })
    }
}

impl Pty {
    /// The next message; `None` once the server has closed the connection. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<PtyMessage>> {
        while let Some(message) = self.socket.next().await {
            let message = message.map_err(|error| Error::Broken {
                url: self.url.clone(),
                source: Some(error.into()),
            })?;
            let text = match message {
                Message::Binary(data) => return Ok(Some(PtyMessage::Data(data))),
                Message::Text(text) => text,
                Message::Close(_) => return Ok(None),
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => continue,
            };
            match serde_json::from_str(&text).map_err(|error| Error::answer(&self.url, error))? {
                TextFrame::Ready => return Ok(Some(PtyMessage::Ready)),
                TextFrame::Exit { exit_code, signal } => {
                    return Ok(Some(PtyMessage::Exit { exit_code, signal }));
                }
                TextFrame::Error { code, detail } => {
                    return Ok(Some(PtyMessage::Error { code, detail }));
                }
                TextFrame::Unknown => {}
            }
        }
        Ok(None)
    }

    pub async fn write(&mut self, data: impl Into<Bytes>) -> Result<()> {
        self.send(Message::Binary(data.into())).await
    }

    pub async fn resize(&mut self, cols: u16, rows: u16) -> Result<()> {
        let text = serde_json::to_string(&Control::Resize { cols, rows })
            .map_err(|error| Error::answer(&self.url, error))?;
        self.send(Message::text(text)).await
    }

    /// Closes the connection; the server ends the terminal.
    pub async fn close(mut self) -> Result<()> {
        self.socket
            .close(None)
            .await
            .map_err(|error| Error::Broken {
                url: self.url.clone(),
                source: Some(error.into()),
            })
    }

    async fn send(&mut self, message: Message) -> Result<()> {
        self.socket
            .send(message)
            .await
            .map_err(|error| Error::Broken {
                url: self.url.clone(),
                source: Some(error.into()),
            })
    }
}

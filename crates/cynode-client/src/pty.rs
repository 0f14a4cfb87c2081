//! A terminal in a session, over WebSocket.
//!
//! The upgrade goes through the same HTTP client as every other call, so TLS, certificates and refusals are the same.

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
    Error, Result, WorkerClient,
    client::{accept, send, shown},
};

/// The largest frame and message that is taken.
const MAX_MESSAGE: usize = 4 * 1024 * 1024;

/// How a terminal is opened.
#[derive(Clone, Debug)]
pub struct PtyOpen {
    pub cols: u16,
    pub rows: u16,
    /// Empty: the shell of the image.
    pub argv: Vec<String>,
}

/// What the sandbox's side says.
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

impl WorkerClient {
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
        let url = shown(response.url());
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let status = accept(response).await?.status();
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
            return Err(Error::answer(
                &url,
                "the WebSocket handshake does not match",
            ));
        }
        let upgraded = response
            .upgrade()
            .await
            .map_err(|error| Error::broken(&url, error))?;
        let config = WebSocketConfig::default()
            .max_message_size(Some(MAX_MESSAGE))
            .max_frame_size(Some(MAX_MESSAGE));
        Ok(Pty {
            socket: WebSocketStream::from_raw_socket(upgraded, Role::Client, Some(config)).await,
            url,
        })
    }
}

impl Pty {
    /// The next message; `None` when the other side has closed. Safe to drop and call again.
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

    /// Says goodbye; the other side ends the terminal.
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

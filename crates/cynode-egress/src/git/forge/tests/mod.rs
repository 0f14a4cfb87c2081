//! Tests with a server that answers like each of the forges.

mod derivation;
mod recorded;

use std::{collections::VecDeque, net::IpAddr, sync::Arc};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, Method, StatusCode, Uri},
    response::Response,
};
use cynode_api::{CredentialPlaintext, ForgeKind, ProjectId};
use parking_lot::Mutex;
use reqwest::Url;
use serde_json::Value;

use super::{Forge, ForgeApi, ForgeError, connect};

const SECRET: &str = "forge-secret-1234567890";
const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// A request as the server saw it.
struct SeenRequest {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Value,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

#[derive(Default)]
struct Script {
    answers: VecDeque<Answer>,
    seen: Vec<SeenRequest>,
}

/// A server that gives its answers one after the other.
#[derive(Clone, Default)]
struct RecordedForge {
    script: Arc<Mutex<Script>>,
    port: u16,
}

impl RecordedForge {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0))
            .await
            .expect("a port");
        let forge = Self {
            port: listener.local_addr().expect("an address").port(),
            ..Self::default()
        };
        let app = Router::new().fallback(answer).with_state(forge.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.expect("served") });
        forge
    }

    fn says(&self, status: u16, body: &str) -> &Self {
        self.says_with(status, &[], body)
    }

    fn says_with(&self, status: u16, headers: &[(&'static str, &str)], body: &str) -> &Self {
        // The recordings name this host.
        let here = format!("http://forge.example:{}", self.port);
        self.script.lock().answers.push_back(Answer {
            status,
            headers: headers
                .iter()
                .map(|(name, value)| (*name, (*value).to_owned()))
                .collect(),
            body: body.replace("https://forge.example", &here).into_bytes(),
        });
        self
    }

    fn seen(&self) -> Vec<SeenRequest> {
        std::mem::take(&mut self.script.lock().seen)
    }

    fn api(&self, kind: ForgeKind, base: &str, path: &str) -> ForgeApi {
        let url = |path: &str| {
            Url::parse(&format!("http://forge.example:{}{path}", self.port)).expect("a URL")
        };
        ForgeApi::new(kind, url(path), &url(base)).expect("an API")
    }

    fn credential(&self) -> CredentialPlaintext {
        CredentialPlaintext {
            version: 1,
            project_id: ProjectId::generate(),
            scheme: "http".to_owned(),
            host: "forge.example".to_owned(),
            port: self.port,
            path_prefix: "/".to_owned(),
            username: "x-access-token".to_owned(),
            secret: SECRET.to_owned(),
        }
    }

    fn connect(&self, kind: ForgeKind) -> Box<dyn Forge> {
        let (base, path) = match kind {
            ForgeKind::Github => ("/api/v3", "/org/app.git"),
            ForgeKind::Gitlab => ("/api/v4", "/group/sub/app.git"),
            _ => ("/api/v1", "/org/app"),
        };
        let api = self.api(kind, base, path);
        // The name exists nowhere: only the checked address is dialled.
        connect(api, &[LOCAL], None, &self.credential()).expect("a client")
    }
}

async fn answer(
    State(forge): State<RecordedForge>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut script = forge.script.lock();
    script.seen.push(SeenRequest {
        method,
        uri,
        headers,
        body: serde_json::from_slice(&body).unwrap_or_default(),
    });
    let Some(answer) = script.answers.pop_front() else {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        return response;
    };
    let mut response = Response::builder().status(answer.status);
    for (name, value) in answer.headers {
        response = response.header(name, value);
    }
    response.body(Body::from(answer.body)).expect("a response")
}

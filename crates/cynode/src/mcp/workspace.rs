//! The workspace of the agent's session: the directory, brought in before the first tool call.
//!
//! Invariants: a session that exists is never filled again. Each session that the agent creates
//! explicitly begins with the directory as it is then: only the server knows whether the creation
//! makes one, so the directory is uploaded first.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use cynode_api::SessionId;
use cynode_client::{McpAnswer, McpHeaders};
use serde_json::{Map, Value, json};
use tokio::sync::Mutex;

use super::{
    agent::{Agent, AgentFile},
    message::Outline,
    refusal::Refusal,
    upstream::Upstream,
};
use crate::{
    bring::{self, BringOptions},
    directories::Directories,
    failure::Failure,
};

/// The tool that makes the session of a token.
pub const CREATE: &str = "sandbox_session_create";
/// The revision of the bridge's own call.
const REVISION: &str = "2025-06-18";

/// How sessions are made.
#[derive(Clone, Debug, Default)]
pub struct SessionOptions {
    /// The directory to upload; without one, the workspace is empty at first.
    pub directory: Option<PathBuf>,
    pub image: Option<String>,
    pub gitignore: bool,
}

#[derive(Debug)]
pub struct Workspace {
    upstream: Arc<Upstream>,
    options: SessionOptions,
    /// One call at a time makes the session. Holds how many attempts have been made, and why the
    /// last one failed.
    turn: Mutex<Option<(u64, Refusal)>>,
    attempts: AtomicU64,
    is_ready: AtomicBool,
}

/// The right to make the session, among all bridges of the directory.
#[derive(Debug)]
pub struct Claim<'a> {
    workspace: &'a Workspace,
    file: AgentFile,
    agent: Agent,
    _lock: fs_err::File,
}

impl Claim<'_> {
    /// Brings the directory in. Returns the arguments of the call that makes the session.
    pub async fn arguments(&self) -> Result<Map<String, Value>, Refusal> {
        let Workspace {
            upstream, options, ..
        } = self.workspace;
        let mut arguments = Map::new();
        if let Some(directory) = &options.directory {
            let bring_options = BringOptions {
                gitignore: options.gitignore,
            };
            let user = upstream.user()?;
            let uploaded =
                bring::upload(&user, self.agent.task_id, directory, &bring_options).await;
            let artifact = match uploaded {
                Ok(uploaded) => uploaded.artifact,
                Err(failure) => return Err(upstream.explained(failure).await.into()),
            };
            let reference = format!("artifact:{artifact}");
            arguments.insert("workspace_ref".to_owned(), json!(reference));
        }
        if let Some(image) = &options.image {
            arguments.insert("image_ref".to_owned(), json!(image));
        }
        Ok(arguments)
    }

    /// Whether a session of the token was made with its workspace before.
    pub const fn is_repeated(&self) -> bool {
        self.agent.has_workspace
    }

    /// The session exists.
    pub async fn fulfil(self, session: Option<SessionId>) -> Result<(), Refusal> {
        self.file.set_workspace(self.agent.token_id).await?;
        self.workspace.is_ready.store(true, Ordering::Relaxed);
        self.workspace.remember(session);
        Ok(())
    }
}

impl Workspace {
    pub fn new(upstream: Arc<Upstream>, options: SessionOptions) -> Self {
        // The server makes a session with its defaults on first use.
        let mut workspace = Self {
            upstream,
            options,
            turn: Mutex::default(),
            attempts: AtomicU64::new(0),
            is_ready: AtomicBool::new(false),
        };
        workspace.is_ready = AtomicBool::new(workspace.is_default());
        workspace
    }

    /// Whether sessions begin with the server's defaults.
    pub const fn is_default(&self) -> bool {
        self.options.directory.is_none() && self.options.image.is_none()
    }

    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    /// Makes the session with its workspace, unless that was done before. Calls that wait for an
    /// attempt share its failure; later ones try again.
    pub async fn prepare(&self) -> Result<(), Refusal> {
        let seen = self.attempts.load(Ordering::Relaxed);
        let mut turn = self.turn.lock().await;
        if self.is_ready() {
            return Ok(());
        }
        if let Some((attempt, refusal)) = &*turn
            && *attempt > seen
        {
            return Err(refusal.clone());
        }
        let made = async {
            let claim = self.claimed().await?;
            if claim.is_repeated() {
                self.is_ready.store(true, Ordering::Relaxed);
                return Ok(());
            }
            let session = self.create(claim.arguments().await?).await?;
            claim.fulfil(session).await
        };
        let made = made.await;
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        *turn = made.clone().err().map(|refusal| (attempt, refusal));
        made
    }

    /// Lets a call of the client make the session.
    pub async fn claim(&self) -> Result<Claim<'_>, Refusal> {
        let _turn = self.turn.lock().await;
        self.claimed().await
    }

    async fn claimed(&self) -> Result<Claim<'_>, Refusal> {
        let (file, _) = self.upstream.agent().await?;
        // Another bridge of this directory may be making it.
        let lock = file.lock_for_long("workspace").await?;
        let (file, agent) = self.upstream.agent().await?;
        Ok(Claim {
            workspace: self,
            file,
            agent,
            _lock: lock,
        })
    }

    /// Creates the session of the token, or finds the one that exists.
    async fn create(&self, arguments: Map<String, Value>) -> Result<Option<SessionId>, Refusal> {
        let call = json!({
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": CREATE, "arguments": arguments},
        });
        let headers = McpHeaders {
            protocol_version: Some(REVISION.to_owned()),
            method: Some("tools/call".to_owned()),
            name: Some(CREATE.to_owned()),
        };
        let (answer, _in_use) = self
            .upstream
            .send(&headers, Bytes::from(call.to_string()))
            .await?;
        let outline = match answer {
            McpAnswer::Message(message) => Outline::of(&message),
            McpAnswer::Accepted | McpAnswer::Events(_) => None,
        };
        let unexpected = || Refusal::new("internal", "the server's answer is not valid");
        let outline = outline.ok_or_else(unexpected)?;
        if let Some(error) = outline.error {
            let message = error["message"].as_str().unwrap_or_default();
            return Err(Refusal::new("internal", message));
        }
        let result = outline.result.ok_or_else(unexpected)?;
        let result: Value = serde_json::from_str(result.get()).map_err(|_| unexpected())?;
        let structure = &result["structuredContent"];
        if result["isError"] == true {
            let text = |name: &str| structure[name].as_str().unwrap_or_default().to_owned();
            return Err(Refusal::new(&text("code"), text("message")).remedy(text("remedy")));
        }
        Ok(structure["session_id"]
            .as_str()
            .and_then(|id| id.parse().ok()))
    }

    /// The agent's session becomes the session of the directory for the user's commands, so that
    /// they show and fetch what the agent did.
    fn remember(&self, session: Option<SessionId>) {
        if let (Some(directory), Some(session)) = (&self.options.directory, session)
            && let Ok(user) = self.upstream.user()
            && let Some(directories) = Directories::of(user.base())
        {
            directories.remember_agents(directory, session);
        }
    }

    /// What calls are told while they wait.
    pub fn progress(&self) -> String {
        match &self.options.directory {
            Some(directory) => format!("bringing {} into the sandbox", directory.display()),
            None => "making the sandbox".to_owned(),
        }
    }
}

/// Forgets the agent of a directory and revokes its token.
pub async fn forget(upstream: &Upstream) -> Result<bool, Failure> {
    let file = upstream.file().await?;
    let Some(token) = file.forget().await? else {
        return Ok(false);
    };
    if let Err(error) = upstream.user()?.revoke_token(token).await
        && !error.is(cynode_api::ErrorCode::NotFound)
    {
        let failure = Failure::from(error);
        let message = format!(
            "the agent is forgotten, but its token is still valid: {}",
            failure.message()
        );
        return Err(Failure::new(failure.exit, failure.code(), message)
            .remedy(format!("Revoke it with 'cynode token revoke {token}'.")));
    }
    Ok(true)
}

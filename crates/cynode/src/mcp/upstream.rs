//! The way to the gateway: one POST for each message, with the token of the agent.

use std::path::PathBuf;

use bytes::Bytes;
use cynode_api::ErrorCode;
use cynode_client::{McpAnswer, McpHeaders, SessionClient, UserClient};
use parking_lot::Mutex;

use super::agent::{Agent, AgentFile, AgentKey, InUse, Lifetime};
use crate::{cli::Globals, connect, failure::Failure, resolve};

/// The address for agents that work on one task.
pub const PATH: &str = "/mcp/coding";

/// Which agent the bridge speaks for.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    pub directory: PathBuf,
    pub uploads_directory: bool,
    pub task: Option<String>,
}

#[derive(Debug)]
pub struct Upstream {
    globals: Globals,
    /// The user's client state directory.
    state: PathBuf,
    options: AgentOptions,
    connections: Mutex<Connections>,
}

/// What is found out once, until it proves wrong.
#[derive(Debug, Default)]
struct Connections {
    user: Option<UserClient>,
    file: Option<AgentFile>,
    agent: Option<(String, SessionClient)>,
}

impl Upstream {
    pub fn new(globals: &Globals, state: PathBuf, options: AgentOptions) -> Self {
        Self {
            globals: globals.clone(),
            state,
            options,
            connections: Mutex::default(),
        }
    }

    /// Sends a message. The call uses the token for as long as the second value lives.
    pub async fn send(
        &self,
        headers: &McpHeaders,
        message: Bytes,
    ) -> Result<(McpAnswer, InUse), Failure> {
        match self.try_send(headers, message).await {
            Err(failure) => Err(self.explained(failure).await),
            sent => sent,
        }
    }

    async fn try_send(
        &self,
        headers: &McpHeaders,
        message: Bytes,
    ) -> Result<(McpAnswer, InUse), Failure> {
        let file = self.try_file().await?;
        let agent = file.current(|| self.user()).await?;
        let in_use = file.in_use().await?;
        let client = self.client(&agent)?;
        match client.mcp(PATH, headers, message.clone()).await {
            // Refused before it had any effect: another bridge may have renewed the token.
            Err(error) if error.is(ErrorCode::Unauthorized) => {}
            sent => return Ok((sent?, in_use)),
        }
        drop(in_use);
        let agent = file.instead_of(&agent.token, || self.user()).await?;
        let in_use = file.in_use().await?;
        let client = self.client(&agent)?;
        Ok((client.mcp(PATH, headers, message).await?, in_use))
    }

    /// The agent's file and its agent, with a valid token.
    pub async fn agent(&self) -> Result<(AgentFile, Agent), Failure> {
        let found = async {
            let file = self.try_file().await?;
            let agent = file.current(|| self.user()).await?;
            Ok((file, agent))
        };
        match found.await {
            Err(failure) => Err(self.explained(failure).await),
            found => found,
        }
    }

    /// The file of the agent, whether or not it exists.
    pub async fn file(&self) -> Result<AgentFile, Failure> {
        match self.try_file().await {
            Err(failure) => Err(self.explained(failure).await),
            file => file,
        }
    }

    async fn try_file(&self) -> Result<AgentFile, Failure> {
        if let Some(file) = self.connections.lock().file.clone() {
            return Ok(file);
        }
        let user = self.user()?;
        let task = resolve::optional(self.options.task.as_deref(), async |task| {
            resolve::task(&user, task).await
        })
        .await?;
        let key = AgentKey {
            server: user.base().to_owned(),
            directory: self.options.directory.clone(),
            uploads_directory: self.options.uploads_directory,
            task,
            purpose: "bridge".to_owned(),
        };
        let file = AgentFile::new(&self.state, key, Lifetime::BRIDGE);
        self.connections.lock().file = Some(file.clone());
        Ok(file)
    }

    /// A client with the user's own credential: for the agent's token and its workspace only.
    pub fn user(&self) -> Result<UserClient, Failure> {
        let mut connections = self.connections.lock();
        if let Some(user) = &connections.user {
            return Ok(user.clone());
        }
        let user = connect::user_client(&self.globals)?;
        connections.user = Some(user.clone());
        Ok(user)
    }

    fn client(&self, agent: &Agent) -> Result<SessionClient, Failure> {
        let mut connections = self.connections.lock();
        if let Some((token, client)) = &connections.agent
            && *token == agent.token
        {
            return Ok(client.clone());
        }
        let client = connect::agent_client(&self.globals, &agent.token)?;
        connections.agent = Some((agent.token.clone(), client.clone()));
        Ok(client)
    }

    /// Adds the cause and its remedy. The next call finds the server anew: it may have moved, or
    /// the user's token may be another.
    pub async fn explained(&self, failure: Failure) -> Failure {
        if failure.remote_problem.is_none() {
            return failure;
        }
        *self.connections.lock() = Connections::default();
        connect::explain(&self.globals, failure).await
    }
}

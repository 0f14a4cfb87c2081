//! The git egress role: calls to it, and the copy of the rules that it decides with.
//!
//! Invariants: a call goes out only after the role has acknowledged the newest rules that this
//! orchestrator knows. Names, paths and branches are never its to decide: calls name ids, and the
//! role decides again.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use cynode_api::{
    API_VERSION, CallId, EgressCall, EgressInfo, EgressPrincipal, ErrorCode, GitCommit,
    GitCommitted, GitPull, GitPulled, GitPush, GitPushed, GitResolve, GitResolved, GitSeed,
    Problem, PromotionId, Repository, SessionId, TaskId,
};
use cynode_client::{Error as ClientError, GitRole, SeedBody, Trust};
use cynode_policy::Principal;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{
    Config,
    caller::Caller,
    db::{self, Db},
};

/// The role permits nothing by a copy that is older than 10 s.
const PUSH_INTERVAL: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error("no git role is configured (orchestrator.egress_git_url)")]
    NotConfigured,
    #[error("the token of the git role can't be read")]
    Token(#[source] io::Error),
    #[error("the git role can't be called: {0}")]
    Setup(String),
    #[error("the git role does not answer: {0}")]
    Unreachable(String),
    #[error("the git role's answer is not valid: {0}")]
    Answer(String),
    #[error("{}", .0.detail)]
    Refused(Box<Problem>),
    #[error("the tokens of sandboxes reach no repository")]
    Sandbox,
}

impl Error {
    /// Whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Db(error) => error.is_transient(),
            Self::NotConfigured | Self::Token(_) | Self::Setup(_) | Self::Unreachable(_) => true,
            // The role's token was replaced, the role restarts, or the forge is down.
            Self::Refused(problem) => {
                problem.status >= 500 && !problem.is(ErrorCode::Internal)
                    || problem.is(ErrorCode::Unauthorized)
                    || problem.is(ErrorCode::TooManyRequests)
            }
            Self::Answer(_) | Self::Sandbox => false,
        }
    }

    /// Whether the role refused because its copy of the rules is too old.
    fn is_stale(&self) -> bool {
        matches!(self, Self::Refused(problem) if problem.is(ErrorCode::EgressStale))
    }

    /// Whether the role has newer rules: another orchestrator was faster, or the database was
    /// restored to an earlier day.
    fn is_outdated(&self) -> bool {
        matches!(self, Self::Refused(problem) if problem.is(ErrorCode::StateOutdated))
    }
}

impl From<ClientError> for Error {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Problem(problem) => Self::Refused(problem),
            ClientError::Setup(reason) => Self::Setup(reason),
            ClientError::Answer { .. } => Self::Answer(error.chain()),
            error => Self::Unreachable(error.chain()),
        }
    }
}

/// Where the role listens, and what it must never dial. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct GitEgress {
    db: Db,
    config: Arc<Config>,
    /// The addresses that this orchestrator listens on.
    listeners: Arc<[String]>,
    /// The token that was last read, and the client with it.
    client: Arc<Mutex<Option<(String, GitRole)>>>,
    /// The revision that the role acknowledged last.
    acknowledged: Arc<Mutex<Option<i64>>>,
    /// Notified when the rules have changed.
    pub(crate) changed: Arc<Notify>,
}

impl GitEgress {
    pub(crate) fn new(db: Db, config: Arc<Config>, listeners: Vec<String>) -> Self {
        Self {
            db,
            config,
            listeners: listeners.into(),
            client: Arc::default(),
            acknowledged: Arc::default(),
            changed: Arc::default(),
        }
    }

    pub(crate) fn is_configured(&self) -> bool {
        self.config.egress_git_url.is_some()
    }

    /// A client with the token as it is in its file now: the role creates it at its first start.
    pub(crate) fn client(&self) -> Result<GitRole, Error> {
        let url = self.config.egress_git_url.as_deref();
        let url = url.ok_or(Error::NotConfigured)?;
        let path: PathBuf = self.config.egress_git_token_file();
        let token = fs_err::read_to_string(path).map_err(Error::Token)?;
        let mut client = self.client.lock();
        if let Some((known, client)) = &*client
            && *known == token
        {
            return Ok(client.clone());
        }
        let authority = self.config.egress_git_ca.as_deref();
        let trust = authority.map_or(Trust::Environment, Trust::Only);
        let made = GitRole::new(url, &token, trust)?;
        *client = Some((token, made.clone()));
        Ok(made)
    }

    /// The role's public key, from the role itself.
    pub(crate) async fn info(&self) -> Result<EgressInfo, Error> {
        Ok(self.client()?.info().await?)
    }

    pub(crate) async fn resolve(&self, request: &GitResolve) -> Result<GitResolved, Error> {
        self.call(move |role| async move { role.resolve(request).await })
            .await
    }

    pub(crate) async fn seed(&self, request: &GitSeed) -> Result<SeedBody, Error> {
        self.call(move |role| async move { role.seed(request).await })
            .await
    }

    pub(crate) async fn commit(
        &self,
        request: &GitCommit,
        changeset: &Bytes,
    ) -> Result<GitCommitted, Error> {
        self.call(move |role| async move { role.commit(request, changeset.clone()).await })
            .await
    }

    pub(crate) async fn push(&self, request: &GitPush) -> Result<GitPushed, Error> {
        self.call(move |role| async move { role.push(request).await })
            .await
    }

    pub(crate) async fn pull(&self, request: &GitPull) -> Result<GitPulled, Error> {
        self.call(move |role| async move { role.pull(request).await })
            .await
    }

    /// Calls the role with the newest rules. A role that has just started has none yet: it gets
    /// them, and the call is repeated once. Every call can be.
    async fn call<T, F: Future<Output = Result<T, ClientError>> + Send>(
        &self,
        call: impl Fn(GitRole) -> F + Send,
    ) -> Result<T, Error> {
        self.push_newer_rules().await?;
        let answer = call(self.client()?).await.map_err(Error::from);
        match answer {
            Err(error) if error.is_stale() => {
                self.push_rules().await?;
                call(self.client()?).await.map_err(Error::from)
            }
            answer => answer,
        }
    }

    async fn push_newer_rules(&self) -> Result<(), Error> {
        let revision = self.db.egress_revision().await?;
        if *self.acknowledged.lock() == Some(revision) {
            return Ok(());
        }
        self.push_rules().await
    }

    /// Sends the role its copy of the rules.
    async fn push_rules(&self) -> Result<(), Error> {
        match self.push_current_rules().await {
            Err(error) if error.is_outdated() => self.push_current_rules().await,
            pushed => pushed,
        }
    }

    async fn push_current_rules(&self) -> Result<(), Error> {
        let mut state = self.db.egress_state().await?;
        state.own_listeners = self.listeners.to_vec();
        for node in self.db.nodes().await? {
            let url = reqwest::Url::parse(&node.api_url).ok();
            state
                .own_listeners
                .extend(url.as_ref().and_then(socket_address));
        }
        state.own_listeners.sort();
        state.own_listeners.dedup();
        self.client()?.put_state(&state).await?;
        *self.acknowledged.lock() = Some(state.revision);
        Ok(())
    }

    /// Sends the rules when they change, and every few seconds, until the orchestrator stops.
    pub(crate) async fn follow(self, stop: CancellationToken) {
        if !self.is_configured() {
            return;
        }
        let mut was_reached = true;
        loop {
            match self.push_rules().await {
                Ok(()) => was_reached = true,
                Err(error) => {
                    *self.acknowledged.lock() = None;
                    if std::mem::take(&mut was_reached) {
                        tracing::warn!(%error, "The git role does not take its rules; it permits nothing meanwhile.");
                    }
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.changed.notified() => {}
                () = tokio::time::sleep(PUSH_INTERVAL) => {}
            }
        }
    }
}

/// The addresses of URLs, of those that name none by name.
pub(crate) fn socket_addresses<'a>(urls: impl IntoIterator<Item = &'a String>) -> Vec<String> {
    urls.into_iter()
        .filter_map(|url| reqwest::Url::parse(url).ok())
        .filter_map(|url| socket_address(&url))
        .collect()
}

/// The address of a URL that names none by name.
fn socket_address(url: &reqwest::Url) -> Option<String> {
    let host = url.host_str()?.trim_matches(['[', ']']);
    let address: std::net::IpAddr = host.parse().ok()?;
    let port = url.port_or_known_default()?;
    Some(std::net::SocketAddr::new(address, port).to_string())
}

/// On whose behalf the role is called, and for what.
#[derive(Clone, Debug)]
pub(crate) struct OnBehalf {
    pub(crate) principal: EgressPrincipal,
    pub(crate) task_id: TaskId,
    pub(crate) session_id: Option<SessionId>,
    pub(crate) promotion_id: Option<PromotionId>,
    pub(crate) call_id: Option<CallId>,
}

impl OnBehalf {
    pub(crate) fn call(&self, repository: &Repository) -> EgressCall {
        EgressCall {
            call_id: self.call_id,
            principal: self.principal.clone(),
            task_id: self.task_id,
            project_id: repository.project_id,
            session_id: self.session_id,
            promotion_id: self.promotion_id,
            repository_id: repository.id,
        }
    }

    pub(crate) fn resolve(&self, repository: &Repository, reference: Option<&str>) -> GitResolve {
        GitResolve {
            version: API_VERSION,
            call: self.call(repository),
            reference: reference.map(str::to_owned),
        }
    }
}

/// The caller as the role's policies see it.
pub(crate) fn principal(caller: &Caller) -> Result<EgressPrincipal, Error> {
    match caller.principal() {
        Principal::User {
            id,
            name,
            admin,
            groups,
        } => Ok(EgressPrincipal::User {
            id,
            name,
            admin,
            groups,
        }),
        Principal::Agent {
            token,
            role,
            user,
            project,
            tasks,
        } => Ok(EgressPrincipal::Agent {
            token,
            role: role.as_str().to_owned(),
            user,
            project,
            tasks,
        }),
        Principal::Sandbox { .. } => Err(Error::Sandbox),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_listeners_are_those_without_a_name() {
        for (url, address) in [
            ("http://127.0.0.1:12090", Some("127.0.0.1:12090")),
            ("https://[fd00::1]/x", Some("[fd00::1]:443")),
            ("https://node.example:12090", None),
        ] {
            let url = reqwest::Url::parse(url).expect("a URL");
            assert_eq!(socket_address(&url).as_deref(), address, "{url}");
        }
    }
}

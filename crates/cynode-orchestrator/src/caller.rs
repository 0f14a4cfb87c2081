//! The authenticated caller of the user API, and the extractors that handlers take it with.

use std::time::Duration;

use axum::extract::FromRequestParts;
use cynode_api::{
    AuditSubject, ErrorCode, NodeId, ProjectId, Task, TaskId, TokenId, TokenKind, UserId,
};
use cynode_policy::{Principal, Role};
use cynode_service::{ApiError, connections::CallerId};
use http::request::Parts;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::{
    Orchestrator,
    db::{Authenticated, PreferenceContext},
};

/// The rows that a caller may see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope {
    pub(crate) is_admin: bool,
    /// Skips ownership checks: for administrators, and for calls that the gate has authorized.
    pub(crate) sees_all: bool,
    pub(crate) user_id: UserId,
}

#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) kind: TokenKind,
    pub(crate) token_id: TokenId,
    pub(crate) user_name: String,
    /// The names of the user's groups.
    groups: Vec<String>,
    pub(crate) project_id: Option<ProjectId>,
    pub(crate) task_ids: Vec<TaskId>,
    pub(crate) scope: Scope,
    /// Identifies the token when its validity is re-checked.
    token_hash: [u8; 32],
}

impl Caller {
    pub(crate) fn new(authenticated: Authenticated, token_hash: [u8; 32]) -> Self {
        // An agent's token never carries the administrator rights of its creator.
        let is_admin = authenticated.is_admin && authenticated.kind == TokenKind::User;
        Self {
            kind: authenticated.kind,
            token_id: authenticated.token_id,
            groups: authenticated.groups,
            user_name: authenticated.user_name,
            project_id: authenticated.project_id,
            task_ids: authenticated.task_ids,
            scope: Scope {
                is_admin,
                sees_all: is_admin,
                user_id: authenticated.user_id,
            },
            token_hash,
        }
    }

    /// An agent whose call the gate has authorized: handlers skip the ownership check.
    pub(crate) fn authorized_by_gate(self) -> Self {
        Self {
            scope: Scope {
                sees_all: true,
                ..self.scope
            },
            ..self
        }
    }

    /// The projects and tasks that the caller's token is restricted to.
    pub(crate) fn token_scope(&self) -> TokenScope {
        TokenScope {
            all: self.kind == TokenKind::User,
            project: self.project_id.map(|id| *id.as_uuid()),
            tasks: self.task_ids.iter().map(|id| *id.as_uuid()).collect(),
        }
    }

    /// Whether the token is still valid. It counts as valid while the database is unavailable.
    pub(crate) async fn is_token_valid(&self, orchestrator: &Orchestrator) -> bool {
        !matches!(
            orchestrator.db.authenticate(&self.token_hash, None).await,
            Ok(None)
        )
    }

    /// Resolves when the token is no longer valid, so that long calls end with it.
    pub(crate) fn revoked(
        &self,
        orchestrator: &Orchestrator,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (caller, orchestrator) = (self.clone(), orchestrator.clone());
        async move {
            loop {
                tokio::time::sleep(TOKEN_CHECK_INTERVAL).await;
                if !caller.is_token_valid(&orchestrator).await {
                    return;
                }
            }
        }
    }

    /// Whose preferences count for what this caller does for a task.
    pub(crate) const fn preferences(&self, task: &Task) -> PreferenceContext {
        PreferenceContext {
            task: Some(task.id),
            project: task.project_id,
            user: Some(self.scope.user_id),
        }
    }

    /// Whether the caller is one of the owners, or an administrator.
    pub(crate) fn owns(&self, owners: &[Uuid]) -> bool {
        self.scope.is_admin || owners.contains(self.scope.user_id.as_uuid())
    }

    /// The caller as policies see it.
    pub(crate) fn principal(&self) -> Principal {
        let (token, user) = (*self.token_id.as_uuid(), *self.scope.user_id.as_uuid());
        let tasks = || self.task_ids.iter().map(|id| *id.as_uuid()).collect();
        let agent = |role| Principal::Agent {
            token,
            role,
            user,
            project: self.project_id.map(|id| *id.as_uuid()),
            tasks: tasks(),
        };
        match self.kind {
            TokenKind::User => Principal::User {
                id: user,
                name: self.user_name.clone(),
                admin: self.scope.is_admin,
                groups: self.groups.clone(),
            },
            TokenKind::ProjectManager => agent(Role::ProjectManager),
            TokenKind::ProjectAnalyst => agent(Role::ProjectAnalyst),
            TokenKind::Sandbox => Principal::Sandbox {
                token,
                task: self
                    .task_ids
                    .first()
                    .map_or(Uuid::nil(), |id| *id.as_uuid()),
            },
        }
    }

    /// The key by which connections, permits and spooled bytes are shared between callers.
    pub(crate) fn id(&self) -> CallerId {
        let user = *self.scope.user_id.as_uuid();
        match self.kind {
            TokenKind::User if self.scope.is_admin => CallerId::Administrator(user),
            TokenKind::User => CallerId::User(user),
            TokenKind::ProjectManager | TokenKind::ProjectAnalyst | TokenKind::Sandbox => {
                CallerId::Agent {
                    user,
                    token: *self.token_id.as_uuid(),
                }
            }
        }
    }

    /// The caller as audit records name it.
    pub(crate) fn subject(&self) -> AuditSubject {
        AuditSubject {
            kind: self.kind.as_str().to_owned(),
            name: Some(self.user_name.clone()),
            user_id: Some(self.scope.user_id),
            token_id: Some(self.token_id),
            ..AuditSubject::default()
        }
    }
}

/// What a token gives access to: everything that its user sees, or one project, or some tasks.
#[derive(Clone, Debug)]
pub(crate) struct TokenScope {
    pub(crate) all: bool,
    pub(crate) project: Option<Uuid>,
    pub(crate) tasks: Vec<Uuid>,
}

/// The tool by which a call of the user API came, and the task that the tool call named. The MCP
/// gateway has already checked that the tool is open to this kind of caller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToolOrigin {
    pub(crate) name: &'static str,
    pub(crate) task: Option<TaskId>,
}

/// Extracts a user, or any caller that came by a tool. The gate has already refused agents here;
/// this is the second check.
#[derive(Clone, Debug)]
pub(crate) struct Person(pub(crate) Caller);

impl<S: Send + Sync> FromRequestParts<S> for Person {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let AnyCaller(caller) = AnyCaller::from_request_parts(parts, state).await?;
        if caller.kind == TokenKind::User || parts.extensions.get::<ToolOrigin>().is_some() {
            Ok(Self(caller))
        } else {
            Err(ApiError::new(
                ErrorCode::Forbidden,
                "agents' tokens are not accepted on this route",
            ))
        }
    }
}

/// Extracts a user or an agent; a sandbox only if it came by a tool.
#[derive(Clone, Debug)]
pub(crate) struct AnyCaller(pub(crate) Caller);

impl<S: Send + Sync> FromRequestParts<S> for AnyCaller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Self::Rejection> {
        let caller =
            parts.extensions.get::<Caller>().cloned().ok_or_else(|| {
                ApiError::new(ErrorCode::Unauthorized, "no bearer token was sent")
            })?;
        if caller.kind == TokenKind::Sandbox && parts.extensions.get::<ToolOrigin>().is_none() {
            return Err(ApiError::new(
                ErrorCode::Forbidden,
                "sandboxes' tokens are not accepted on this route",
            ));
        }
        Ok(Self(caller))
    }
}

/// How often a call in progress checks that its token is still valid.
const TOKEN_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// How often a call in progress checks that its node is still reachable.
const NODE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

impl Orchestrator {
    /// Resolves when a call to a node must end early: the caller's token is no longer valid, or the
    /// node is unreachable.
    pub(crate) fn call_must_end(
        &self,
        caller: &Caller,
        node_id: NodeId,
    ) -> impl Future<Output = EndReason> + Send + use<> {
        let (revoked, orchestrator) = (caller.revoked(self), self.clone());
        async move {
            let gone = async {
                loop {
                    tokio::time::sleep(NODE_CHECK_INTERVAL).await;
                    if let Ok(node) = orchestrator.db.node(node_id).await
                        && (node.is_lost
                            || node.silent_for > 2 * orchestrator.config.unreachable_after())
                    {
                        return;
                    }
                }
            };
            tokio::select! {
                () = revoked => EndReason::Revoked,
                () = gone => EndReason::NodeGone,
            }
        }
    }
}

/// Why a call to a node ended before its answer was complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndReason {
    Revoked,
    NodeGone,
}

impl EndReason {
    pub(crate) fn problem(self) -> ApiError {
        match self {
            Self::Revoked => ApiError::new(ErrorCode::Unauthorized, "the token is no longer valid"),
            Self::NodeGone => ApiError::new(
                ErrorCode::NodeUnreachable,
                "the node of this session has stopped sending heartbeats",
            ),
        }
    }
}

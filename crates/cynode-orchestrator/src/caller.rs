//! Who calls: found out by the token, at every call.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    extract::{FromRequestParts, Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use cynode_api::{
    AuditSubject, ErrorCode, NodeId, ProjectId, SessionId, Task, TaskId, TokenId, TokenKind, UserId,
};
use cynode_policy::{Principal, Role};
use cynode_service::{
    ApiError, admin,
    answers::Payer,
    auth,
    connections::{self, CallerId},
    listen::Peer,
};
use http::request::Parts;
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::{
    Orchestrator,
    audit::{Failure, Surface},
    db::{self, Authenticated, Of, PlacedSession},
    gate,
    mcp::ByTool,
};

/// What a caller may see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope {
    pub(crate) is_admin: bool,
    /// Whether it is looked at what belongs to whom: not for administrators, nor where the gate has seen to it.
    pub(crate) sees_all: bool,
    pub(crate) user_id: UserId,
}

#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) kind: TokenKind,
    pub(crate) token_id: TokenId,
    pub(crate) user_name: String,
    /// The groups of the user, by name.
    groups: Vec<String>,
    pub(crate) project_id: Option<ProjectId>,
    pub(crate) task_ids: Vec<TaskId>,
    pub(crate) scope: Scope,
    /// Of the token, by which it is found out whether that is still good.
    token_hash: [u8; 32],
}

impl Caller {
    pub(crate) fn new(found: Authenticated, token_hash: [u8; 32]) -> Self {
        // An agent has no more than what its token names, whoever made it.
        let is_admin = found.is_admin && found.kind == TokenKind::User;
        Self {
            kind: found.kind,
            token_id: found.token_id,
            groups: found.groups,
            user_name: found.user_name,
            project_id: found.project_id,
            task_ids: found.task_ids,
            scope: Scope {
                is_admin,
                sees_all: is_admin,
                user_id: found.user_id,
            },
            token_hash,
        }
    }

    /// An agent that the gate has let do one thing with what it named. Whose that is, is not asked again.
    pub(crate) fn let_through(self) -> Self {
        Self {
            scope: Scope {
                sees_all: true,
                ..self.scope
            },
            ..self
        }
    }

    /// What the caller's token names, if it speaks for no more than that.
    pub(crate) fn named(&self) -> Named {
        Named {
            all: self.kind == TokenKind::User,
            project: self.project_id.map(|id| *id.as_uuid()),
            tasks: self.task_ids.iter().map(|id| *id.as_uuid()).collect(),
        }
    }

    /// Whether the token is still good. While the database can't say, it is.
    pub(crate) async fn is_good(&self, orchestrator: &Orchestrator) -> bool {
        !matches!(
            orchestrator.db.authenticate(&self.token_hash, None).await,
            Ok(None)
        )
    }

    /// Comes when the token is no longer good: what was begun with it ends then.
    pub(crate) fn revoked(
        &self,
        orchestrator: &Orchestrator,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (caller, orchestrator) = (self.clone(), orchestrator.clone());
        async move {
            loop {
                tokio::time::sleep(LOOK).await;
                if !caller.is_good(&orchestrator).await {
                    return;
                }
            }
        }
    }

    /// Whose preferences count for what this caller does for a task.
    pub(crate) const fn preferences(&self, task: &Task) -> Of {
        Of {
            task: Some(task.id),
            project: task.project_id,
            user: Some(self.scope.user_id),
        }
    }

    /// Whether something is the caller's, or the caller an administrator.
    pub(crate) fn owns(&self, owners: &[Uuid]) -> bool {
        self.scope.is_admin || owners.contains(self.scope.user_id.as_uuid())
    }

    /// As policies see the caller.
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

    /// Whose share of connections, permits and spooled bytes a call takes.
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

    /// As records name the caller.
    pub(crate) fn subject(&self) -> AuditSubject {
        AuditSubject {
            kind: self.kind.as_str().to_owned(),
            name: Some(self.user_name.clone()),
            user_id: Some(self.scope.user_id),
            token_id: Some(self.token_id),
            node_id: None,
        }
    }
}

/// What a token speaks for: everything that its user sees, or a project, or tasks.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) all: bool,
    pub(crate) project: Option<Uuid>,
    pub(crate) tasks: Vec<Uuid>,
}

/// A person, or a program in a person's name. That it is no agent was seen to before; here it is made sure of.
#[derive(Clone, Debug)]
pub(crate) struct Person(pub(crate) Caller);

impl<S: Send + Sync> FromRequestParts<S> for Person {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let Agent(caller) = Agent::from_request_parts(parts, state).await?;
        // A tool was looked at before for whom it is.
        if caller.kind == TokenKind::User || parts.extensions.get::<ByTool>().is_some() {
            Ok(Self(caller))
        } else {
            Err(ApiError::new(
                ErrorCode::Forbidden,
                "this address is not for agents' tokens",
            ))
        }
    }
}

/// A person or an agent that manages or analyses a project.
#[derive(Clone, Debug)]
pub(crate) struct Agent(pub(crate) Caller);

impl<S: Send + Sync> FromRequestParts<S> for Agent {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Self::Rejection> {
        let caller =
            parts.extensions.get::<Caller>().cloned().ok_or_else(|| {
                ApiError::new(ErrorCode::Unauthorized, "no bearer token was sent")
            })?;
        if caller.kind == TokenKind::Sandbox && parts.extensions.get::<ByTool>().is_none() {
            return Err(ApiError::new(
                ErrorCode::Forbidden,
                "this address is not for sandboxes",
            ));
        }
        Ok(Self(caller))
    }
}

/// How often it is looked whether the token of a call that goes on is still good.
const LOOK: Duration = Duration::from_secs(2);
/// And whether the node that it waits for is still there.
const LOOK_FOR_NODE: Duration = Duration::from_secs(5);
/// What was read with the token counts for so long.
const MOMENT: Duration = Duration::from_millis(100);
/// How long somebody waits who shows a token that is not good.
const PENALTY: Duration = Duration::from_millis(300);
/// So many wait at once; more are refused at once with 429, and learn nothing. They are counted like the others.
static WAITING: Semaphore = Semaphore::const_new(32);

/// Finds out who calls, and refuses whoever shows no good token.
pub(crate) async fn authenticate(
    State(orchestrator): State<Orchestrator>,
    mut request: Request,
    next: Next,
) -> Response {
    let offered = match auth::offered(request.headers()) {
        Ok(offered) => hash(offered),
        Err(error) => return error.into_response(),
    };
    let session = session_of(request.uri().path());
    let makes_sure = session.filter(|_| gate::makes_sure(&request));
    if let Some(guess) = makes_sure.and_then(|id| orchestrator.known.guess(offered, id)) {
        let caller = introduce(
            request.extensions_mut(),
            offered,
            session,
            guess.facts.clone(),
            Instant::now(),
        );
        if let Err(error) = connections::attribute(request.extensions(), caller.id()) {
            return error.into_response();
        }
        request.extensions_mut().insert(guess);
        return next.run(request).await;
    }
    let at = Instant::now();
    match db::soon(orchestrator.db.authenticate(&offered, session)).await {
        Ok(found) => {
            if let Some(session_id) = makes_sure {
                orchestrator.known.learn(offered, session_id, &found);
            }
            let Some(facts) = found else {
                let peer = request.extensions().get::<Peer>().map(|peer| peer.0.ip());
                return refused(
                    &orchestrator,
                    Failure::new(Surface::of_path(request.uri().path()), peer, &offered),
                )
                .await
                .into_response();
            };
            let caller = introduce(request.extensions_mut(), offered, session, facts, at);
            match connections::attribute(request.extensions(), caller.id()) {
                Ok(()) => next.run(request).await,
                Err(error) => error.into_response(),
            }
        }
        Err(error) => error.into_response(),
    }
}

/// Admits to the metrics whoever has their token, and administrators.
pub(crate) fn metrics_reader(
    orchestrator: &Orchestrator,
    own: Option<auth::Token>,
) -> admin::MetricsReader {
    let orchestrator = orchestrator.clone();
    Arc::new(move |offered, peer| {
        let is_own = own.as_ref().is_some_and(|own| own.admits(&offered));
        let orchestrator = orchestrator.clone();
        Box::pin(async move {
            if is_own {
                return Ok(());
            }
            let offered = hash(&offered);
            match db::soon(orchestrator.db.authenticate(&offered, None)).await? {
                Some((found, _)) if Caller::new(found.clone(), offered).scope.is_admin => Ok(()),
                Some(_) => Err(admin::no_reader("the token is not an administrator's")),
                None => Err(refused(
                    &orchestrator,
                    Failure::new(Surface::Metrics, peer, &offered),
                )
                .await),
            }
        })
    })
}

/// Tells whoever takes a call who calls, and where the session was that it is about.
pub(crate) fn introduce(
    extensions: &mut http::Extensions,
    token_hash: [u8; 32],
    session: Option<SessionId>,
    (found, placed): (Authenticated, Option<PlacedSession>),
    at: Instant,
) -> Caller {
    let caller = Caller::new(found, token_hash);
    extensions.insert(Payer(caller.scope.user_id.as_uuid().as_u128()));
    extensions.insert(caller.clone());
    extensions.remove::<Seen>();
    if let Some((session_id, placed)) = session.zip(placed) {
        extensions.insert(Seen {
            session_id,
            placed,
            at,
        });
    }
    caller
}

/// The session that a path is about.
fn session_of(path: &str) -> Option<SessionId> {
    path.strip_prefix("/v1/sessions/")?
        .split('/')
        .next()?
        .parse()
        .ok()
}

/// A session as it was when the caller was found out.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    session_id: SessionId,
    placed: PlacedSession,
    at: Instant,
}

impl Seen {
    /// As long as that was a moment ago.
    pub(crate) fn of(self, id: SessionId) -> Option<PlacedSession> {
        (self.session_id == id && self.at.elapsed() < MOMENT).then_some(self.placed)
    }
}

/// The refusal of a token: recorded, or counted for a record to come, and slow enough that guessing leads nowhere. Good tokens never
/// wait.
pub(crate) async fn refused(orchestrator: &Orchestrator, failure: Failure) -> ApiError {
    metrics::counter!("cynode_refused_tokens_total").increment(1);
    if orchestrator.failures.note(&failure, Instant::now())
        && let Err(error) = orchestrator.audit.note(vec![failure.record()]).await
    {
        orchestrator.failures.count(&failure);
        return error;
    }
    let Ok(_waiting) = WAITING.try_acquire() else {
        return ApiError::new(
            ErrorCode::TooManyAttempts,
            "too many tokens that are not good are being tried",
        );
    };
    tokio::time::sleep(PENALTY).await;
    ApiError::new(ErrorCode::Unauthorized, "the token is not valid here")
}

pub(crate) fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

impl Orchestrator {
    /// Comes when a call to a node that goes on has to end: the caller's token is no longer good, or the node is gone.
    pub(crate) fn over(
        &self,
        caller: &Caller,
        node_id: NodeId,
    ) -> impl Future<Output = Over> + Send + use<> {
        let (revoked, orchestrator) = (caller.revoked(self), self.clone());
        async move {
            let gone = async {
                loop {
                    tokio::time::sleep(LOOK_FOR_NODE).await;
                    if let Ok(node) = orchestrator.db.node(node_id).await
                        && (node.is_lost
                            || node.silent_seconds > 2.0 * orchestrator.config.unreachable_after())
                    {
                        return;
                    }
                }
            };
            tokio::select! {
                () = revoked => Over::Revoked,
                () = gone => Over::NodeGone,
            }
        }
    }
}

/// Why a call that went on has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    Revoked,
    NodeGone,
}

impl Over {
    pub(crate) fn problem(self) -> ApiError {
        match self {
            Self::Revoked => ApiError::new(ErrorCode::Unauthorized, "the token is no longer valid"),
            Self::NodeGone => ApiError::new(
                ErrorCode::NodeUnreachable,
                "the node of this session is not heard of any more",
            ),
        }
    }
}

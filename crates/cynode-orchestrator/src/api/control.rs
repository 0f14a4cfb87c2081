//! The control plane for nodes: registration, heartbeats, configuration, job notifications,
//! artifacts, audit records.

use std::time::Duration;

use axum::{
    Extension, Json, Router,
    extract::{DefaultBodyLimit, Request, State},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use cynode_api::{
    ArtifactId, ErrorCode, Heartbeat, HeartbeatAnswer, JobId, LocalImage, NewTokens, NodeConfig,
    NodeId, NodeRegister, NodeRegistered, node_audit_limits,
};
use cynode_service::{
    ApiError, auth,
    connections::{self, CallerId},
    edge,
    listen::Peer,
};
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, StatusCode};
use serde_json::Value;
use time::OffsetDateTime;

use super::{Body, Id, check_name, check_text, check_version};
use crate::{
    Orchestrator,
    audit::{EntryPoint, Failure},
    caller::hash,
    db::{NodeRow, Registration},
    identity,
};

/// Anybody may send a registration; most of it is the node's image list.
const MAX_REGISTRATION_BYTES: usize = 1024 * 1024;
/// How long a node may take to list its images.
const IMAGES_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_CONCURRENT_QUERIES: usize = 16;

pub(super) fn routes(orchestrator: Orchestrator) -> Router {
    let nodes = Router::new()
        .route("/v1/nodes/heartbeat", post(heartbeat))
        .route("/v1/nodes/config", get(config))
        .route("/v1/nodes/jobs/{id}/status", post(job_status))
        .route("/v1/nodes/artifacts/{id}", get(artifact))
        .route(
            "/v1/nodes/audit:batch",
            post(super::node_audit::merge).layer(Extension(edge::BodyLimit(
                node_audit_limits::MAX_BATCH_BYTES,
            ))),
        )
        .layer(middleware::from_fn_with_state(
            orchestrator.clone(),
            authenticate,
        ));
    Router::new()
        .route(
            "/v1/nodes/register",
            post(register).layer(Extension(edge::BodyLimit(MAX_REGISTRATION_BYTES))),
        )
        .merge(nodes)
        .method_not_allowed_fallback(edge::method_not_allowed)
        .fallback(edge::not_found)
        .layer(DefaultBodyLimit::max(edge::MAX_BODY))
        .with_state(orchestrator)
}

/// The authenticated node of a call.
#[derive(Clone, Debug)]
pub(super) struct CallingNode(pub(super) NodeRow);

async fn authenticate(
    State(orchestrator): State<Orchestrator>,
    mut request: Request,
    next: Next,
) -> Response {
    let offered = match auth::offered(request.headers()) {
        Ok(offered) => hash(offered),
        Err(error) => return error.into_response(),
    };
    match orchestrator.db.authenticate_node(&offered).await {
        Ok(Some(node)) => {
            if let Err(error) = connections::assign_to_caller(
                request.extensions(),
                CallerId::Node(*node.id.as_uuid()),
            ) {
                return error.into_response();
            }
            request.extensions_mut().insert(CallingNode(node));
            next.run(request).await
        }
        Ok(None) => {
            let peer = request.extensions().get::<Peer>().map(|peer| peer.0.ip());
            identity::reject_token(
                &orchestrator,
                Failure::new(EntryPoint::Control, peer, &offered),
            )
            .await
            .into_response()
        }
        Err(error) => error.into_response(),
    }
}

async fn register(
    State(orchestrator): State<Orchestrator>,
    peer: Option<axum::Extension<Peer>>,
    Body(body): Body<NodeRegister>,
) -> Result<(StatusCode, Json<NodeRegistered>), ApiError> {
    check_version(body.version)?;
    check_name("node_name", &body.node_name)?;
    check_api_url(&body.api_url)?;
    let registration = Registration {
        node_id: body.node_id.unwrap_or_else(NodeId::generate),
        name: body.node_name,
        api_url: body.api_url,
        capability: body.capability,
        key_hash: hash(&body.psk),
        silent_after: orchestrator.config.unreachable_after(),
    };
    let id = registration.node_id;
    let token = |epoch| hash(&orchestrator.keys.node_token(id, epoch));
    let registered = orchestrator
        .db
        .register_node(&registration, &orchestrator.config.seed_images, token)
        .await?;
    let Some(node) = registered else {
        let failure = Failure::new(
            EntryPoint::Control,
            peer.map(|peer| peer.0.0.ip()),
            &registration.key_hash,
        );
        return Err(identity::reject_token(&orchestrator, failure).await);
    };
    orchestrator.record_registration(&node).await?;
    tracing::info!(node_id = %node.id, name = node.name, "A node registered.");
    orchestrator.jobs_due.notify_one();
    let registered = NodeRegistered {
        node_id: node.id,
        node_token: orchestrator.keys.node_token(node.id, node.token_epoch),
        worker_token: orchestrator.keys.worker_token(node.id, node.token_epoch),
        config: orchestrator.node_config().await?,
    };
    Ok((StatusCode::CREATED, Json(registered)))
}

/// A node with an uncallable address could never be reached.
fn check_api_url(url: &str) -> Result<(), ApiError> {
    cynode_client::check_base(url).map_err(|error| ApiError::invalid(format!("api_url: {error}")))
}

async fn heartbeat(
    State(orchestrator): State<Orchestrator>,
    axum::Extension(CallingNode(node)): axum::Extension<CallingNode>,
    Body(beat): Body<Heartbeat>,
) -> Result<Json<HeartbeatAnswer>, ApiError> {
    check_version(beat.version)?;
    check_text("not_ready", beat.not_ready.as_ref())?;
    beat.api_url.as_deref().map_or(Ok(()), check_api_url)?;
    let returned = orchestrator.db.heartbeat(node.id, &beat).await?;
    if let Some(capability) = &beat.capability {
        orchestrator
            .db
            .report_images(
                node.id,
                &capability.images,
                &orchestrator.config.seed_images,
            )
            .await?;
    }
    if returned
        || node.silent_for > orchestrator.config.unreachable_after()
        || node.not_ready != beat.not_ready
    {
        orchestrator.db.wake_jobs_on(node.id).await?;
        orchestrator.jobs_due.notify_one();
        orchestrator.sessions_due.notify_one();
    }
    let due = OffsetDateTime::now_utc() - node.tokens_rotated_at
        > time::Duration::hours(orchestrator.config.rotate_tokens_hours.into());
    let rotate = if due || node.rotating {
        // Both tokens are valid until the node uses the new one; repeated offers are identical.
        let (node_token, worker_token) = (
            orchestrator.keys.node_token(node.id, node.token_epoch + 1),
            orchestrator
                .keys
                .worker_token(node.id, node.token_epoch + 1),
        );
        orchestrator
            .db
            .offer_token(node.id, node.token_epoch, &hash(&node_token))
            .await?;
        Some(NewTokens {
            node_token,
            worker_token,
        })
    } else {
        None
    };
    let config_revision = orchestrator.node_config().await?.revision;
    Ok(Json(HeartbeatAnswer {
        config_revision,
        rotate,
        resend_capability: false,
    }))
}

async fn config(State(orchestrator): State<Orchestrator>) -> Result<Json<NodeConfig>, ApiError> {
    Ok(Json(orchestrator.node_config().await?))
}

/// Schedules a job's next step. The reported status is not trusted, only that something happened.
async fn job_status(
    State(orchestrator): State<Orchestrator>,
    axum::Extension(CallingNode(node)): axum::Extension<CallingNode>,
    Id(id): Id<JobId>,
    Body(_): Body<Value>,
) -> Result<StatusCode, ApiError> {
    if !orchestrator
        .db
        .wake_job(id, node.id, Duration::ZERO)
        .await?
    {
        return Err(ApiError::new(
            ErrorCode::JobNotFound,
            format!("this node has no job {id}"),
        ));
    }
    orchestrator.jobs_due.notify_one();
    Ok(StatusCode::NO_CONTENT)
}

/// The bytes of an artifact, for a node whose work starts from it.
async fn artifact(
    State(orchestrator): State<Orchestrator>,
    axum::Extension(CallingNode(node)): axum::Extension<CallingNode>,
    Id(id): Id<ArtifactId>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    if !orchestrator.db.needs_artifact(node.id, id).await? {
        return Err(ApiError::new(
            ErrorCode::NotFound,
            format!("no work of this node starts from an artifact {id}"),
        ));
    }
    let artifact = orchestrator.db.artifact(id).await?;
    orchestrator
        .record_artifact_download(&node, &artifact)
        .await?;
    super::artifacts::send(&orchestrator, &artifact, &headers).await
}

impl Orchestrator {
    /// The configuration of nodes. It follows the settings and shares their revision.
    pub(crate) async fn node_config(&self) -> Result<NodeConfig, ApiError> {
        let setting = self.db.setting(cynode_api::DEFAULT_IMAGE_KEY).await?;
        Ok(NodeConfig {
            revision: setting.as_ref().map_or(0, |setting| setting.revision),
            heartbeat_seconds: self.config.heartbeat_seconds,
            default_image: setting.and_then(|setting| setting.value.as_str().map(str::to_owned)),
        })
    }

    /// Asks the nodes for their images and updates the register. For a node that does not answer,
    /// its last report counts.
    pub(crate) async fn refresh_images(&self) -> Result<(), ApiError> {
        let nodes = self.db.nodes().await?;
        let queries = stream::iter(nodes)
            .map(|node| async move { (self.local_images(&node).await, node) })
            .buffer_unordered(MAX_CONCURRENT_QUERIES);
        let mut answers: Vec<_> = queries.collect().await;
        // Current answers are applied before old reports.
        answers.sort_by_key(|(answer, _)| answer.is_none());
        for (answer, node) in answers {
            self.db
                .report_images(
                    node.id,
                    answer.as_ref().unwrap_or(&node.capability.images),
                    &self.config.seed_images,
                )
                .await?;
        }
        Ok(())
    }

    async fn local_images(&self, node: &NodeRow) -> Option<Vec<LocalImage>> {
        if !node.is_responsive(self.config.unreachable_after())
            || self.fleet.connection_error(node.id).is_some()
        {
            return None;
        }
        let client = self.fleet.client_for(node).ok()?;
        tokio::time::timeout(IMAGES_TIMEOUT, client.local_images())
            .await
            .ok()?
            .ok()
    }
}

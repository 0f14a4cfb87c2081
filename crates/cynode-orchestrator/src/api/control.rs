//! What nodes call: registration, heartbeats, their configuration, and words about jobs.

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
    NodeId, NodeRegister, NodeRegistered,
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
    audit::{Failure, Surface},
    caller::{self, hash},
    db::{NodeRow, Registration},
};

/// A registration: anybody may send one, and most of it is the images that a node has.
const MAX_REGISTRATION_BYTES: usize = 1024 * 1024;
/// How long a node may take to list its images.
const IMAGES: Duration = Duration::from_secs(5);
const ASKED_AT_ONCE: usize = 16;

pub(super) fn routes(orchestrator: Orchestrator) -> Router {
    let nodes = Router::new()
        .route("/v1/nodes/heartbeat", post(heartbeat))
        .route("/v1/nodes/config", get(config))
        .route("/v1/nodes/jobs/{id}/status", post(job_status))
        .route("/v1/nodes/artifacts/{id}", get(artifact))
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

/// The node that a call comes from.
#[derive(Clone, Debug)]
struct Calling(NodeRow);

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
            if let Err(error) =
                connections::attribute(request.extensions(), CallerId::Node(*node.id.as_uuid()))
            {
                return error.into_response();
            }
            request.extensions_mut().insert(Calling(node));
            next.run(request).await
        }
        Ok(None) => {
            let peer = request.extensions().get::<Peer>().map(|peer| peer.0.ip());
            caller::refused(
                &orchestrator,
                Failure::new(Surface::Control, peer, &offered),
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
            Surface::Control,
            peer.map(|peer| peer.0.0.ip()),
            &registration.key_hash,
        );
        return Err(caller::refused(&orchestrator, failure).await);
    };
    orchestrator.note_registration(&node).await?;
    tracing::info!(node_id = %node.id, name = node.name, "A node has registered.");
    orchestrator.jobs_wait.notify_one();
    let registered = NodeRegistered {
        node_id: node.id,
        node_token: orchestrator.keys.node_token(node.id, node.token_epoch),
        worker_token: orchestrator.keys.worker_token(node.id, node.token_epoch),
        config: orchestrator.node_config().await?,
    };
    Ok((StatusCode::CREATED, Json(registered)))
}

/// An address that we can call. What is not one would be a node that nobody ever reaches.
fn check_api_url(url: &str) -> Result<(), ApiError> {
    cynode_client::check_base(url).map_err(|error| ApiError::invalid(format!("api_url: {error}")))
}

async fn heartbeat(
    State(orchestrator): State<Orchestrator>,
    axum::Extension(Calling(node)): axum::Extension<Calling>,
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
        || node.silent_seconds > orchestrator.config.unreachable_after()
        || node.not_ready != beat.not_ready
    {
        orchestrator.db.wake_jobs_of(node.id).await?;
        orchestrator.jobs_wait.notify_one();
        orchestrator.sessions_wait.notify_one();
    }
    let due = OffsetDateTime::now_utc() - node.tokens_rotated_at
        > time::Duration::hours(orchestrator.config.rotate_tokens_hours.into());
    let rotate = if due || node.rotating {
        // Until the node shows the new one, both are good; what it is offered is the same each time.
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
    orchestrator.node_config().await.map(Json)
}

/// Something happened to a job: it is asked for now. What the node says here is not believed, only that it says something.
async fn job_status(
    State(orchestrator): State<Orchestrator>,
    axum::Extension(Calling(node)): axum::Extension<Calling>,
    Id(id): Id<JobId>,
    Body(_): Body<Value>,
) -> Result<StatusCode, ApiError> {
    if !orchestrator.db.wake_job(id, node.id, 0.0).await? {
        return Err(ApiError::new(
            ErrorCode::JobNotFound,
            format!("this node was not given a job {id}"),
        ));
    }
    orchestrator.jobs_wait.notify_one();
    Ok(StatusCode::NO_CONTENT)
}

/// The bytes of an artifact, for a node that was given work which begins with it.
async fn artifact(
    State(orchestrator): State<Orchestrator>,
    axum::Extension(Calling(node)): axum::Extension<Calling>,
    Id(id): Id<ArtifactId>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    if !orchestrator.db.needs_artifact(node.id, id).await? {
        return Err(ApiError::new(
            ErrorCode::NotFound,
            format!("no work of this node begins with an artifact {id}"),
        ));
    }
    let artifact = orchestrator.db.artifact(id).await?;
    orchestrator.note_artifact(&node, &artifact).await?;
    super::artifacts::send(&orchestrator, &artifact, &headers).await
}

impl Orchestrator {
    /// What nodes keep to. It follows the settings; its number is theirs.
    pub(crate) async fn node_config(&self) -> Result<NodeConfig, ApiError> {
        let setting = self.db.setting(cynode_api::DEFAULT_IMAGE_KEY).await?;
        Ok(NodeConfig {
            revision: setting.as_ref().map_or(0, |setting| setting.revision),
            heartbeat_seconds: self.config.heartbeat_seconds,
            default_image: setting.and_then(|setting| setting.value.as_str().map(str::to_owned)),
        })
    }

    /// Asks the nodes which images they have, and matches that against the register. Of a node that does not answer, its last report counts.
    pub(crate) async fn look_for_images(&self) -> Result<(), ApiError> {
        let nodes = self.db.nodes().await?;
        let asked = stream::iter(nodes)
            .map(|node| async move { (self.ask_for_images(&node).await, node) })
            .buffer_unordered(ASKED_AT_ONCE);
        let mut answers: Vec<_> = asked.collect().await;
        // What a node has now is learned before what another had once.
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

    async fn ask_for_images(&self, node: &NodeRow) -> Option<Vec<LocalImage>> {
        if node.is_lost
            || node.silent_seconds > self.config.unreachable_after()
            || self.fleet.trouble(node.id).is_some()
        {
            return None;
        }
        let client = self.fleet.client_of(node).ok()?;
        tokio::time::timeout(IMAGES, client.local_images())
            .await
            .ok()?
            .ok()
    }
}

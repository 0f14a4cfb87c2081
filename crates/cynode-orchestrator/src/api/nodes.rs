//! Nodes, as people see them.

use std::time::Duration;

use axum::{Json, extract::State};
use cynode_api::{
    Node, NodeDrain, NodeId, NodeKeyCreate, NodeKeyCreated, NodeState, Page, Problem,
};
use cynode_service::{ApiError, QueryParams};
use http::StatusCode;
use time::OffsetDateTime;

use super::{Body, Id, Paging, check_version};
use crate::{
    Orchestrator,
    caller::{self, Person},
    db::NodeRow,
    keys,
};

impl Orchestrator {
    /// A node as it is seen from here: one that says it is ready and can't be called is not.
    fn node_object(&self, node: &NodeRow) -> Node {
        let object = node.object(self.config.unreachable_after());
        match self.fleet.trouble(node.id) {
            Some(why) if object.state == NodeState::Ready => Node {
                state: NodeState::Unreachable,
                reason: Some(format!("the orchestrator can't call it: {why}")),
                ..object
            },
            _ => object,
        }
    }
}

/// List nodes.
#[utoipa::path(get, path = "/v1/nodes", tag = "nodes", params(Paging),
    responses((status = 200, body = Page<Node>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    QueryParams(paging): QueryParams<Paging>,
) -> Result<Json<Page<Node>>, ApiError> {
    let mut nodes = orchestrator.db.nodes().await?;
    nodes.sort_by_key(|node| node.id);
    let (cursor, limit) = (paging.after()?, paging.limit()?);
    let items = nodes
        .iter()
        .filter(|node| cursor.is_none_or(|cursor| *node.id.as_uuid() > cursor))
        .map(|node| orchestrator.node_object(node));
    Ok(Json(crate::db::page(items, limit, |node: &Node| {
        node.id.to_string()
    })))
}

/// Show a node.
#[utoipa::path(get, path = "/v1/nodes/{id}", tag = "nodes", params(("id" = NodeId, Path)),
    responses((status = 200, body = Node), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<NodeId>,
) -> Result<Json<Node>, ApiError> {
    Ok(Json(
        orchestrator.node_object(&orchestrator.db.node(id).await?),
    ))
}

/// Give a node no new work, or some again. Administrators only.
#[utoipa::path(post, path = "/v1/nodes/{id}/drain", tag = "nodes", params(("id" = NodeId, Path)), request_body = NodeDrain,
    responses((status = 200, body = Node), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn drain(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<NodeId>,
    Body(body): Body<NodeDrain>,
) -> Result<Json<Node>, ApiError> {
    check_version(body.version)?;
    Ok(Json(
        orchestrator.node_object(
            &orchestrator
                .db
                .drain_node(id, body.drain.unwrap_or(true))
                .await?,
        ),
    ))
}

/// Make a key by which a node registers. Administrators only.
#[utoipa::path(post, path = "/v1/nodes/keys", tag = "nodes", request_body = NodeKeyCreate,
    responses((status = 201, body = NodeKeyCreated), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create_key(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<NodeKeyCreate>,
) -> Result<(StatusCode, Json<NodeKeyCreated>), ApiError> {
    check_version(body.version)?;
    let seconds = body
        .expires_in_seconds
        .unwrap_or(cynode_api::DEFAULT_TOKEN_SECONDS);
    if !(1..=cynode_api::MAX_TOKEN_SECONDS).contains(&seconds) {
        return Err(ApiError::invalid(format!(
            "expires_in_seconds: must lie between 1 and {}",
            cynode_api::MAX_TOKEN_SECONDS
        )));
    }
    let psk = keys::random_token();
    let expires_at = OffsetDateTime::now_utc() + Duration::from_secs(seconds);
    let id = orchestrator
        .db
        .insert_node_key(
            &caller::hash(&psk),
            body.reusable,
            &caller.user_name,
            Some(expires_at),
        )
        .await?;
    Ok((
        StatusCode::CREATED,
        Json(NodeKeyCreated {
            id,
            psk,
            expires_at,
        }),
    ))
}

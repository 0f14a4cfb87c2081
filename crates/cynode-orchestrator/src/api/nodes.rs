//! Nodes, for people.

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
    db::{NodeRow, Order},
    keys,
};

impl Orchestrator {
    /// A node as this orchestrator sees it: one that claims to be ready but is unreachable from
    /// here is not.
    fn node_view(&self, node: &NodeRow) -> Node {
        let object = node.object(self.config.unreachable_after());
        match self.fleet.connection_error(node.id) {
            Some(why) if object.state == NodeState::Ready => Node {
                state: NodeState::Unreachable,
                reason: Some(format!("the orchestrator can't reach the node: {why}")),
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
    let page = paging.request()?;
    nodes.sort_by_key(|node| node.id);
    if page.order == Order::Newest {
        nodes.reverse();
    }
    let items = nodes
        .iter()
        .filter(|node| page.includes(node.id.as_uuid()))
        .filter(|node| page.name.as_ref().is_none_or(|name| node.name == *name))
        .map(|node| orchestrator.node_view(node));
    Ok(Json(crate::db::page(items, page.limit, |node: &Node| {
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
        orchestrator.node_view(&orchestrator.db.node(id).await?),
    ))
}

/// Stop or resume giving a node new work. Administrators only.
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
        orchestrator.node_view(
            &orchestrator
                .db
                .drain_node(id, body.drain.unwrap_or(true))
                .await?,
        ),
    ))
}

/// Create a registration key for nodes. Administrators only.
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

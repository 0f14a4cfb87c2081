//! The register of sandbox images.

use axum::{Json, extract::State};
use cynode_api::{Image, ImageCreate, ImageId, ImagePatch, Page, Problem, TokenKind};
use cynode_policy::{Action, CallContext, Resource};
use cynode_service::{ApiError, QueryParams};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;

use super::{
    Body, Id, check_metadata, check_name, check_text, check_version, page_by_name, page_request,
};
use crate::{
    Orchestrator,
    caller::Person,
    db::{NewImage, Order, name_and_tag},
};

/// Add a version of an image, and ask the nodes for it. A known version is re-pinned to what the
/// nodes have now. Administrators only.
#[utoipa::path(post, path = "/v1/images", tag = "images", request_body = ImageCreate,
    responses((status = 201, body = Image), (status = 200, description = "The version was known and is re-pinned.", body = Image), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<ImageCreate>,
) -> Result<(StatusCode, Json<Image>), ApiError> {
    check_version(body.version)?;
    check_reference(&body.image_ref)?;
    check_text("description", body.description.as_ref())?;
    check_metadata(body.capabilities.as_ref())?;
    let hexadecimal = |digest: &str| {
        digest
            .strip_prefix("sha256:")
            .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    if body
        .image_digest
        .as_deref()
        .is_some_and(|digest| !hexadecimal(digest))
    {
        return Err(ApiError::invalid(
            "image_digest: must be 'sha256:' and 64 hexadecimal digits",
        ));
    }
    let is_agent = caller.kind != TokenKind::User;
    if is_agent && !body.image_ref.contains('/') {
        // An unqualified reference is a short name itself, and would shadow an image that a person
        // adds later.
        return Err(ApiError::invalid(
            "image_ref: must name the registry and the repository, such as registry.example/tools/python:3",
        ));
    }
    let (name, tag) = name_and_tag(&body.image_ref);
    let name = body.name.unwrap_or(name);
    check_name("name", &name)?;
    let new = NewImage {
        name: &name,
        description: body.description.as_deref(),
        version: &tag,
        image_ref: &body.image_ref,
        image_digest: body.image_digest.as_deref(),
        capabilities: body.capabilities.unwrap_or_default(),
        is_allowed: body.is_allowed,
        by: &caller.user_name,
    };
    // Re-pinning a known version changes what others use.
    if !is_agent
        && let Some(id) = orchestrator.db.known_version(&new).await?
        && let Some((reference, agent_compatible, pinned)) = orchestrator.db.image_place(id).await?
    {
        orchestrator.check(
            &caller,
            Action::ImageUpdate,
            &Resource::Image {
                reference,
                agent_compatible,
                pinned,
            },
            &CallContext::default(),
        )?;
    }
    // An agent must not change people's decisions on an image, nor the meaning of a name.
    let (id, is_new) = orchestrator.db.insert_image(&new, is_agent).await?;
    // Nodes may have the image already.
    orchestrator.refresh_images().await?;
    Ok((
        if is_new {
            StatusCode::CREATED
        } else {
            StatusCode::OK
        },
        Json(orchestrator.db.image(id).await?),
    ))
}

fn check_reference(reference: &str) -> Result<(), ApiError> {
    let plain = |byte: u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'/' | b':' | b'@')
    };
    if reference.is_empty()
        || reference.len() > 500
        || !reference.bytes().all(plain)
        || !reference.starts_with(|c: char| c.is_ascii_alphanumeric())
    {
        return Err(ApiError::invalid(
            "image_ref: is not a valid image reference",
        ));
    }
    Ok(())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ImageQuery {
    /// Only versions that are allowed.
    allowed: Option<bool>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
    /// The whole name.
    name: Option<String>,
}

/// List images with their versions and the nodes that have them.
#[utoipa::path(get, path = "/v1/images", tag = "images", params(ImageQuery),
    responses((status = 200, body = Page<Image>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    QueryParams(query): QueryParams<ImageQuery>,
) -> Result<Json<Page<Image>>, ApiError> {
    let page = page_request(
        query.limit,
        query.cursor.as_deref(),
        query.order,
        query.id_part,
    )?;
    let page = page_by_name(page, query.name)?;
    Ok(Json(
        orchestrator
            .db
            .images(None, query.allowed.unwrap_or(false), &page)
            .await?,
    ))
}

/// Show an image.
#[utoipa::path(get, path = "/v1/images/{id}", tag = "images", params(("id" = ImageId, Path)),
    responses((status = 200, body = Image), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<ImageId>,
) -> Result<Json<Image>, ApiError> {
    Ok(Json(orchestrator.db.image(id).await?))
}

/// Allow or deny an image, or change its description. Administrators only.
#[utoipa::path(patch, path = "/v1/images/{id}", tag = "images", params(("id" = ImageId, Path)), request_body = ImagePatch,
    responses((status = 200, body = Image), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn patch(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<ImageId>,
    Body(patch): Body<ImagePatch>,
) -> Result<Json<Image>, ApiError> {
    check_version(patch.version)?;
    check_text("description", patch.description.as_ref())?;
    Ok(Json(
        orchestrator
            .db
            .patch_image(id, &patch, &caller.user_name)
            .await?,
    ))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ImageRemoval {
    /// Only this version; the image goes with its last one.
    image_version: Option<String>,
}

/// Remove an image, or one version of it, that no live session and no unfinished job uses. Nodes
/// keep their copies. Administrators only.
#[utoipa::path(delete, path = "/v1/images/{id}", tag = "images", params(("id" = ImageId, Path), ImageRemoval),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn remove(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<ImageId>,
    QueryParams(query): QueryParams<ImageRemoval>,
) -> Result<StatusCode, ApiError> {
    let version = query.image_version.as_deref();
    if version.is_some_and(|version| version.contains('\0')) {
        return Err(ApiError::invalid(
            "image_version: must not contain the character NUL",
        ));
    }
    orchestrator
        .db
        .remove_image(id, version, &orchestrator.config.seed_images)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

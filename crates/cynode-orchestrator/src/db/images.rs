//! The image tables: images, their allowed versions, and which nodes have them.

use std::collections::BTreeMap;

use cynode_api::{
    Image, ImageId, ImagePatch, ImageState, ImageVersion, ImageVersionId, LABEL_AGENT_COMPATIBLE,
    LABEL_PURPOSE, LocalImage, NodeId, Page,
};
use serde_json::{Map, Value, json};
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use uuid::Uuid;

use super::{Db, Error, Missing, PageReader, PageRequest};

/// The image version that a request resolves to.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedImage {
    pub(crate) version_id: ImageVersionId,
    pub(crate) image_ref: String,
    pub(crate) image_digest: Option<String>,
    /// `None` until a node has inspected it.
    pub(crate) agent_compatible: Option<bool>,
}

fn version(row: &PgRow) -> Result<ImageVersion, sqlx::Error> {
    let capabilities: Value = row.try_get("capabilities")?;
    let nodes: Value = row.try_get("nodes")?;
    Ok(ImageVersion {
        id: ImageVersionId::from_uuid(row.try_get("id")?),
        version: row.try_get("version")?,
        image_ref: row.try_get("image_ref")?,
        image_digest: row.try_get("image_digest")?,
        capabilities: if let Value::Object(map) = capabilities {
            map
        } else {
            Map::new()
        },
        is_allowed: row.try_get("is_allowed")?,
        nodes: serde_json::from_value::<BTreeMap<String, String>>(nodes).unwrap_or_default(),
        state: match (row.try_get("is_available")?, row.try_get("is_replaced")?) {
            (true, _) => ImageState::Available,
            (false, true) => ImageState::AwaitingPinned,
            (false, false) => ImageState::AwaitingNode,
        },
    })
}

/// Derives capabilities from an image's labels.
pub(crate) fn capabilities(labels: &BTreeMap<String, String>) -> Map<String, Value> {
    let mut found = Map::new();
    found.insert(
        "agent_compatible".to_owned(),
        json!(
            labels
                .get(LABEL_AGENT_COMPATIBLE)
                .is_some_and(|value| value == "true")
        ),
    );
    if let Some(purpose) = labels.get(LABEL_PURPOSE) {
        let tokens: Vec<&str> = purpose
            .split([',', ' '])
            .filter(|token| !token.is_empty())
            .collect();
        found.insert("purpose".to_owned(), json!(tokens));
    }
    found
}

#[derive(Clone, Debug)]
pub(crate) struct NewImage<'a> {
    pub(crate) name: &'a str,
    pub(crate) description: Option<&'a str>,
    pub(crate) version: &'a str,
    pub(crate) image_ref: &'a str,
    pub(crate) image_digest: Option<&'a str>,
    pub(crate) capabilities: Map<String, Value>,
    /// For a known version `None` leaves the flag unchanged, for a new one it means false.
    pub(crate) is_allowed: Option<bool>,
    pub(crate) by: &'a str,
}

async fn insert(connection: &mut PgConnection, new: &NewImage<'_>) -> Result<ImageId, Error> {
    let image_id: Uuid = sqlx::query_scalar(
        "insert into sandbox_images (id, name, description, updated_by) values ($1, $2, $3, $4)
         on conflict (name) do update set updated_at = now(), updated_by = excluded.updated_by,
             description = coalesce(excluded.description, sandbox_images.description) returning id",
    )
    .bind(Uuid::now_v7())
    .bind(new.name)
    .bind(new.description)
    .bind(new.by)
    .fetch_one(&mut *connection)
    .await?;
    sqlx::query(
        "insert into sandbox_image_versions (id, sandbox_image_id, version, image_ref, image_digest, capabilities, is_allowed)
         values ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(Uuid::now_v7())
    .bind(image_id)
    .bind(new.version)
    .bind(new.image_ref)
    .bind(new.image_digest)
    .bind(Value::Object(new.capabilities.clone()))
    .bind(new.is_allowed.unwrap_or_default())
    .execute(connection)
    .await?;
    Ok(ImageId::from_uuid(image_id))
}

/// Fails when a reference, a name, or a name with a version of the new image already identifies
/// another one.
async fn check_new(connection: &mut PgConnection, new: &NewImage<'_>) -> Result<(), Error> {
    // Blocks inserts between the check and the insert.
    sqlx::query("lock table sandbox_images in share row exclusive mode")
        .execute(&mut *connection)
        .await?;
    let added: bool = sqlx::query_scalar(
        "select exists (select from sandbox_image_versions where image_ref = $1)",
    )
    .bind(new.image_ref)
    .fetch_one(&mut *connection)
    .await?;
    if added {
        return Err(Error::ImageExists);
    }
    let own = [
        new.image_ref.to_owned(),
        new.name.to_owned(),
        format!("{}:{}", new.name, new.version),
    ];
    let holder: Option<(String, String, String)> = sqlx::query_as(
        "select called, i.name, coalesce(v.image_ref, i.name)
         from sandbox_images i left join sandbox_image_versions v on v.sandbox_image_id = i.id,
              unnest(array[v.image_ref, i.name, i.name || ':' || v.version]) as called
         where called = any($1) order by length(called), v.created_at limit 1",
    )
    .bind(&own[..])
    .fetch_optional(connection)
    .await?;
    let Some((called, name, reference)) = holder else {
        return Ok(());
    };
    Err(Error::ImageNameTaken {
        called,
        name,
        reference,
    })
}

/// Re-pins the version if it exists.
async fn renew(
    connection: &mut PgConnection,
    new: &NewImage<'_>,
) -> Result<Option<ImageId>, Error> {
    let known: Option<Uuid> = sqlx::query_scalar(
        "update sandbox_image_versions v set image_digest = $4, capabilities = $5, is_allowed = coalesce($6, v.is_allowed), updated_at = now()
         from sandbox_images i where i.id = v.sandbox_image_id and i.name = $1 and v.version = $2 and v.image_ref = $3 returning i.id",
    )
    .bind(new.name)
    .bind(new.version)
    .bind(new.image_ref)
    .bind(new.image_digest)
    .bind(Value::Object(new.capabilities.clone()))
    .bind(new.is_allowed)
    .fetch_optional(&mut *connection)
    .await?;
    let Some(id) = known else { return Ok(None) };
    sqlx::query("update sandbox_images set updated_at = now(), updated_by = $2, description = coalesce($3, description) where id = $1")
        .bind(id)
        .bind(new.by)
        .bind(new.description)
        .execute(connection)
        .await?;
    Ok(Some(ImageId::from_uuid(id)))
}

impl Db {
    /// The image that already has this version.
    pub(crate) async fn known_version(&self, new: &NewImage<'_>) -> Result<Option<ImageId>, Error> {
        let query = "select i.id from sandbox_images i join sandbox_image_versions v on v.sandbox_image_id = i.id
                     where i.name = $1 and v.version = $2 and v.image_ref = $3";
        let query = sqlx::query_scalar(query)
            .bind(new.name)
            .bind(new.version)
            .bind(new.image_ref);
        let id: Option<Uuid> = query.fetch_optional(&self.pool).await?;
        Ok(id.map(ImageId::from_uuid))
    }

    /// Adds a version, and returns whether it is new. A version with the same name and reference is
    /// re-pinned: its digest and capabilities are learned again from the nodes. With `must_be_new`,
    /// no name of the image may be taken.
    pub(crate) async fn insert_image(
        &self,
        new: &NewImage<'_>,
        must_be_new: bool,
    ) -> Result<(ImageId, bool), Error> {
        let mut transaction = self.begin().await?;
        if must_be_new {
            check_new(&mut transaction, new).await?;
        }
        let renewed = match renew(&mut transaction, new).await? {
            Some(id) => (id, false),
            None => (insert(&mut transaction, new).await?, true),
        };
        super::commit(transaction).await?;
        Ok(renewed)
    }

    pub(crate) async fn image(&self, id: ImageId) -> Result<Image, Error> {
        let page = PageRequest {
            limit: 1,
            ..PageRequest::default()
        };
        self.images(Some(id), false, &page)
            .await?
            .items
            .pop()
            .ok_or(Error::NotFound(Missing::Image(id)))
    }

    pub(crate) async fn images(
        &self,
        only: Option<ImageId>,
        allowed: bool,
        page: &PageRequest,
    ) -> Result<Page<Image>, Error> {
        let mut pages = PageReader::new(page.limit, page.after);
        while let Some(count) = pages.wanted().await {
            let rows = sqlx::query(page_of!(
                page.order,
                [
                    "select * from sandbox_images i where ($1::uuid is null or id = $1)
                       and (not $4 or exists (select from sandbox_image_versions v where v.sandbox_image_id = i.id and v.is_allowed))
                       and ($6::text is null or name = $6)"
                ],
                "id",
                "$2",
                "$5",
                "$3"
            ))
            .bind(only.map(|id| *id.as_uuid()))
            .bind(pages.after())
            .bind(count)
            .bind(allowed)
            .bind(page.id_part.clone())
            .bind(page.name.clone())
            .fetch_all(&self.pool)
            .await?;
            let mut items = Vec::with_capacity(rows.len());
            for row in rows {
                let id: Uuid = row.try_get("id")?;
                let versions = sqlx::query(
                    "select v.*, coalesce((select jsonb_object_agg(n.name, a.status) from node_sandbox_image_availability a join nodes n on n.id = a.node_id
                                           where a.sandbox_image_version_id = v.id), '{}') as nodes,
                         exists (select from node_sandbox_image_availability a where a.sandbox_image_version_id = v.id and a.status = 'available') as is_available,
                         exists (select from node_sandbox_image_availability a where a.sandbox_image_version_id = v.id and a.status = 'evicted'
                                 and a.details->>'digest' <> v.image_digest) as is_replaced
                     from sandbox_image_versions v where v.sandbox_image_id = $1 and (not $2 or v.is_allowed) order by v.id",
                )
                .bind(id)
                .bind(allowed)
                .fetch_all(&self.pool)
                .await?;
                let image = || -> Result<Image, sqlx::Error> {
                    Ok(Image {
                        id: ImageId::from_uuid(id),
                        name: row.try_get("name")?,
                        description: row.try_get("description")?,
                        versions: versions.iter().map(version).collect::<Result<_, _>>()?,
                        created_at: row.try_get("created_at")?,
                        updated_at: row.try_get("updated_at")?,
                        updated_by: row.try_get("updated_by")?,
                    })
                };
                items.push(image()?);
            }
            pages.add(items, |image: &Image| *image.id.as_uuid());
        }
        Ok(pages.finish())
    }

    pub(crate) async fn patch_image(
        &self,
        id: ImageId,
        patch: &ImagePatch,
        by: &str,
    ) -> Result<Image, Error> {
        let mut transaction = self.begin().await?;
        let found = sqlx::query("update sandbox_images set description = coalesce($2, description), updated_at = now(), updated_by = $3 where id = $1")
            .bind(id.as_uuid())
            .bind(&patch.description)
            .bind(by)
            .execute(&mut *transaction)
            .await?;
        if found.rows_affected() == 0 {
            return Err(Error::NotFound(Missing::Image(id)));
        }
        if patch.is_allowed.is_some() || patch.image_version.is_some() {
            let changed = sqlx::query(
                "update sandbox_image_versions set is_allowed = coalesce($2, is_allowed), updated_at = now()
                 where sandbox_image_id = $1 and ($3::text is null or version = $3)",
            )
            .bind(id.as_uuid())
            .bind(patch.is_allowed)
            .bind(&patch.image_version)
            .execute(&mut *transaction)
            .await?;
            if changed.rows_affected() == 0 {
                return Err(Error::NotFound(Missing::ImageVersion));
            }
        }
        super::commit(transaction).await?;
        self.image(id).await
    }

    /// Removes an image, or one version of it. Ended work forgets which version it used; live work
    /// prevents the removal.
    pub(crate) async fn remove_image(
        &self,
        id: ImageId,
        version: Option<&str>,
        seeded: &[String],
    ) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        let image = sqlx::query("select from sandbox_images where id = $1 for update")
            .bind(id.as_uuid())
            .fetch_optional(&mut *transaction)
            .await?;
        if image.is_none() {
            return Err(Error::NotFound(Missing::Image(id)));
        }
        // New work that refers to a version waits for this lock, and then fails.
        let versions: Vec<(Uuid, String)> = sqlx::query_as(
            "select id, image_ref from sandbox_image_versions where sandbox_image_id = $1 and ($2::text is null or version = $2) for update",
        )
        .bind(id.as_uuid())
        .bind(version)
        .fetch_all(&mut *transaction)
        .await?;
        if version.is_some() && versions.is_empty() {
            return Err(Error::NotFound(Missing::ImageVersion));
        }
        if versions
            .iter()
            .any(|(_, reference)| seeded.contains(reference))
        {
            return Err(Error::ImageSeeded);
        }
        let ids: Vec<Uuid> = versions.into_iter().map(|(id, _)| id).collect();
        let (sessions, jobs): (i64, i64) = sqlx::query_as(
            "select (select count(*) from sessions where image_version_id = any($1) and state in ('creating', 'running', 'ending', 'lost')),
                    (select count(*) from jobs where image_version_id = any($1) and state in ('accepted', 'in_progress'))",
        )
        .bind(&ids)
        .fetch_one(&mut *transaction)
        .await?;
        if sessions > 0 || jobs > 0 {
            return Err(Error::ImageInUse { sessions, jobs });
        }
        for statement in [
            "update sessions set image_version_id = null where image_version_id = any($1)",
            "update jobs set image_version_id = null where image_version_id = any($1)",
            "delete from sandbox_image_versions where id = any($1)",
        ] {
            sqlx::query(statement)
                .bind(&ids)
                .execute(&mut *transaction)
                .await?;
        }
        sqlx::query(
            "delete from sandbox_images i where id = $1 and not exists (select from sandbox_image_versions v where v.sandbox_image_id = i.id)",
        )
        .bind(id.as_uuid())
        .execute(&mut *transaction)
        .await?;
        super::commit(transaction).await
    }

    /// The newest allowed version that a reference identifies: by its own reference, or by the
    /// image's name with or without a version.
    pub(crate) async fn allowed_image(
        &self,
        reference: &str,
    ) -> Result<Option<ResolvedImage>, Error> {
        let row = sqlx::query(
            "select v.id, v.image_ref, v.image_digest, v.capabilities->'agent_compatible' = 'true'::jsonb as agent_compatible
             from sandbox_image_versions v join sandbox_images i on i.id = v.sandbox_image_id
             where v.is_allowed and (v.image_ref = $1 or i.name = $1 or i.name || ':' || v.version = $1)
             order by v.image_ref = $1 desc, v.created_at desc limit 1",
        )
        .bind(reference)
        .fetch_optional(&self.pool)
        .await?;
        let chosen = |row: PgRow| -> Result<ResolvedImage, sqlx::Error> {
            Ok(ResolvedImage {
                version_id: ImageVersionId::from_uuid(row.try_get("id")?),
                image_ref: row.try_get("image_ref")?,
                image_digest: row.try_get("image_digest")?,
                agent_compatible: row.try_get("agent_compatible")?,
            })
        };
        row.map(chosen).transpose().map_err(Error::from)
    }

    /// Stores the images of a node.
    pub(crate) async fn report_images(
        &self,
        node_id: NodeId,
        images: &[LocalImage],
        seeded: &[String],
    ) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        report(&mut transaction, node_id, images, seeded).await?;
        super::commit(transaction).await
    }

    pub(crate) async fn nodes_with(&self, version: ImageVersionId) -> Result<Vec<NodeId>, Error> {
        let ids: Vec<Uuid> = sqlx::query_scalar(
            "select a.node_id from node_sandbox_image_availability a join sandbox_image_versions v on v.id = a.sandbox_image_version_id
                 where v.id = $1 and a.status <> 'failed' and (v.image_digest is null or a.details->>'digest' = v.image_digest)",
        )
        .bind(version.as_uuid())
        .fetch_all(&self.pool)
        .await?;
        Ok(ids.into_iter().map(NodeId::from_uuid).collect())
    }
}

/// Stores the images of a node. Built-in images (`seeded`) become allowed versions and follow what
/// is loaded; others only gain missing details.
pub(super) async fn report(
    connection: &mut PgConnection,
    node_id: NodeId,
    images: &[LocalImage],
    seeded: &[String],
) -> Result<(), Error> {
    for image in images {
        if seeded.contains(&image.reference) {
            let known: Option<Uuid> =
                sqlx::query_scalar("select id from sandbox_image_versions where image_ref = $1")
                    .bind(&image.reference)
                    .fetch_optional(&mut *connection)
                    .await?;
            if known.is_none() {
                let (name, tag) = name_and_tag(&image.reference);
                let new = NewImage {
                    name: &name,
                    description: Some("comes with CyNode"),
                    version: &tag,
                    image_ref: &image.reference,
                    image_digest: Some(&image.digest),
                    capabilities: capabilities(&image.labels),
                    is_allowed: Some(true),
                    by: "system",
                };
                insert(connection, &new).await?;
            }
        }
        let is_seeded = seeded.contains(&image.reference);
        sqlx::query(
            "update sandbox_image_versions v set image_digest = case when $4 then $2 else coalesce(image_digest, $2) end,
                 capabilities = $3 || capabilities, updated_at = now()
             where image_ref = $1 and (image_digest is null or not capabilities ? 'agent_compatible'
                 or ($4 and image_digest <> $2 and not exists (
                     select from node_sandbox_image_availability a join nodes n on n.id = a.node_id
                     where a.sandbox_image_version_id = v.id and a.node_id <> $5 and not n.is_lost and a.details->>'digest' = v.image_digest)))",
        )
        .bind(&image.reference)
        .bind(&image.digest)
        .bind(Value::Object(capabilities(&image.labels)))
        .bind(is_seeded)
        .bind(node_id.as_uuid())
        .execute(&mut *connection)
        .await?;
    }
    let references: Vec<&str> = images
        .iter()
        .map(|image| image.reference.as_str())
        .collect();
    let digests: Vec<&str> = images.iter().map(|image| image.digest.as_str()).collect();
    sqlx::query(
        "insert into node_sandbox_image_availability (id, node_id, sandbox_image_version_id, status, details)
         select gen_random_uuid(), $1, v.id, case when v.image_digest is null or v.image_digest = have.digest then 'available' else 'evicted' end,
                jsonb_build_object('digest', have.digest)
         from unnest($2::text[], $3::text[]) as have (reference, digest) join sandbox_image_versions v on v.image_ref = have.reference
         on conflict (node_id, sandbox_image_version_id) do update set status = excluded.status, details = excluded.details, last_checked_at = now()",
    )
    .bind(node_id.as_uuid())
    .bind(&references)
    .bind(&digests)
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "update node_sandbox_image_availability a set status = 'evicted', last_checked_at = now()
         from sandbox_image_versions v where v.id = a.sandbox_image_version_id and a.node_id = $1 and not v.image_ref = any($2)",
    )
    .bind(node_id.as_uuid())
    .bind(&references)
    .execute(&mut *connection)
    .await?;
    Ok(())
}

/// The last segment of a reference's repository, and its tag.
pub(crate) fn name_and_tag(reference: &str) -> (String, String) {
    let without_digest = reference.split('@').next().unwrap_or(reference);
    let last = without_digest.rsplit('/').next().unwrap_or(without_digest);
    match last.split_once(':') {
        Some((name, tag)) => (name.to_owned(), tag.to_owned()),
        None => (last.to_owned(), "latest".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_references_name_and_tag_are_found() {
        for (reference, name, tag) in [
            ("localhost/cynode/sba-runner:latest", "sba-runner", "latest"),
            ("localhost:5000/tools/python", "python", "latest"),
            ("docker.io/library/python:3.12@sha256:ab", "python", "3.12"),
        ] {
            assert_eq!(
                name_and_tag(reference),
                (name.to_owned(), tag.to_owned()),
                "{reference}"
            );
        }
    }
}

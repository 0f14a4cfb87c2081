//! `image`: manages images and which of them are allowed.

use cynode_api::{
    API_VERSION, Image as ApiImage, ImageCreate, ImagePatch, ImageState, ImageVersion,
    LABEL_AGENT_COMPATIBLE,
};
use cynode_client::UserClient;
use serde_json::json;

use super::{
    CommandResult, api_name, format_time, image_check, newest, print_created, print_done,
    print_list, print_object,
};
use crate::{
    cli::{Globals, Image, ImageName},
    connect,
    failure::{Failure, USAGE},
    output::{Progress, TableStyle},
    resolve,
};

pub async fn run(globals: &Globals, command: Image) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Image::Add(args) => {
            let request = ImageCreate {
                version: Some(API_VERSION),
                name: args.name,
                description: args.description,
                image_ref: args.reference,
                image_digest: args.digest,
                capabilities: None,
                // Without the flag an existing version keeps its state.
                is_allowed: args.allow.then_some(true),
            };
            let progress = Progress::start("looking for the image on the nodes");
            let image = client.create_image(&request).await?;
            drop(progress);
            let Some(version) = image
                .versions
                .iter()
                .find(|version| version.image_ref == request.image_ref)
            else {
                return print_created(
                    globals,
                    &image,
                    &image.id.to_string(),
                    &format!("image '{}' is registered", image.name),
                );
            };
            let allowed = if version.is_allowed {
                "allowed".to_owned()
            } else {
                format!(
                    "not allowed (allow it with 'cynode image allow {}')",
                    version.image_ref
                )
            };
            print_created(
                globals,
                &image,
                &image.id.to_string(),
                &format!(
                    "image '{}' version {} is {allowed}; {}",
                    image.name,
                    version.version,
                    availability(version)
                ),
            )
        }
        Image::Allow(args) => set(&client, globals, &args, true).await,
        Image::Deny(args) => set(&client, globals, &args, false).await,
        Image::Remove(args) => remove(&client, globals, &args).await,
        Image::Check(args) => image_check::run(&client, globals, &args).await,
        Image::List { list } => {
            let images: Vec<ApiImage> = newest(&client, list, Vec::new(), |_| true).await?;
            let style = TableStyle::new(list.wide);
            let versions: Vec<(&ApiImage, &ImageVersion)> = images
                .iter()
                .flat_map(|image| image.versions.iter().map(move |version| (image, version)))
                .collect();
            if globals.output == crate::cli::OutputFormat::Json {
                return print_list(globals, style, &images, [], |_| []);
            }
            print_list(
                globals,
                style,
                &versions,
                ["IMAGE", "VERSION", "ALLOWED", "STATE", "NODES", "REFERENCE"],
                |(image, version)| {
                    let nodes: Vec<&str> = version
                        .nodes
                        .iter()
                        .filter(|(_, state)| *state == "available")
                        .map(|(name, _)| name.as_str())
                        .collect();
                    let state = api_name(&version.state);
                    [
                        image.name.clone(),
                        version.version.clone(),
                        allowed(version).to_owned(),
                        state,
                        nodes.join(","),
                        version.image_ref.clone(),
                    ]
                },
            )
        }
        Image::Show { image } => {
            let (image, _) = find(&client, &image).await?;
            let mut fields = vec![
                ("image", image.id.to_string()),
                ("name", image.name.clone()),
                ("description", image.description.clone().unwrap_or_default()),
                (
                    "changed",
                    format!("{} by {}", format_time(image.updated_at), image.updated_by),
                ),
            ];
            for version in &image.versions {
                let nodes: Vec<String> = version
                    .nodes
                    .iter()
                    .map(|(name, state)| format!("{state} on {name}"))
                    .collect();
                let digest = version.image_digest.as_deref().unwrap_or("no digest yet");
                let parts = [
                    version.image_ref.as_str(),
                    digest,
                    if version.is_allowed {
                        "allowed"
                    } else {
                        "not allowed"
                    },
                    &nodes.join(", "),
                ];
                fields.push((
                    "version",
                    format!(
                        "{}: {}",
                        version.version,
                        parts
                            .into_iter()
                            .filter(|part| !part.is_empty())
                            .collect::<Vec<_>>()
                            .join("; ")
                    ),
                ));
                fields.push(("state", availability(version)));
            }
            print_object(globals, &image, &fields)
        }
    }
}

/// The nodes that have a version and its purpose, or what the version waits for.
fn availability(version: &ImageVersion) -> String {
    let on = |status: &str| {
        version
            .nodes
            .iter()
            .filter(|(_, state)| *state == status)
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let reference = &version.image_ref;
    match version.state {
        ImageState::Available => {
            let purpose = match version.agent_compatible() {
                Some(true) => "sessions and jobs".to_owned(),
                _ => format!(
                    "plain commands only: the label {LABEL_AGENT_COMPATIBLE}=true is missing"
                ),
            };
            format!("available on {}, for {purpose}", on("available"))
        }
        ImageState::AwaitingNode => {
            let command = if reference.starts_with("localhost/") {
                "'podman build' or 'podman load'".to_owned()
            } else {
                format!("'podman pull {reference}'")
            };
            format!(
                "awaiting a node that has it: load it there as the worker's user with {command}; \
                 the node reports it within seconds"
            )
        }
        ImageState::AwaitingPinned => {
            format!(
                "awaiting the pinned image: {} has another one under this reference; pin that one \
                 with 'cynode image add {reference}'",
                on("evicted")
            )
        }
    }
}

fn allowed(version: &ImageVersion) -> &'static str {
    if version.is_allowed { "yes" } else { "no" }
}

async fn set(
    client: &UserClient,
    globals: &Globals,
    args: &ImageName,
    is_allowed: bool,
) -> CommandResult {
    let (image, image_version) = find_version(client, args).await?;
    let patch = ImagePatch {
        version: Some(API_VERSION),
        description: None,
        image_version: image_version.clone(),
        is_allowed: Some(is_allowed),
    };
    let changed = client.patch_image(image.id, &patch).await?;
    let which = image_version.map_or_else(
        || "every version".to_owned(),
        |version| format!("version {version}"),
    );
    print_done(
        globals,
        &changed,
        &format!(
            "image '{}', {which}: {}",
            changed.name,
            if is_allowed { "allowed" } else { "denied" }
        ),
    )
}

async fn remove(client: &UserClient, globals: &Globals, args: &ImageName) -> CommandResult {
    let (image, version) = find_version(client, args).await?;
    client.remove_image(image.id, version.as_deref()).await?;
    let which = version
        .as_ref()
        .map_or_else(String::new, |version| format!(" version {version}"));
    print_done(
        globals,
        &json!({ "removed": image.id, "image_version": version }),
        &format!("removed image '{}'{which}", image.name),
    )
}

/// The image that a command names, and the version if it names one.
async fn find_version(
    client: &UserClient,
    args: &ImageName,
) -> Result<(ApiImage, Option<String>), Failure> {
    let (image, by_reference) = find(client, &args.image).await?;
    let version = args.version.clone().or(by_reference);
    if let Some(wanted) = &version
        && !image
            .versions
            .iter()
            .any(|version| version.version == *wanted)
    {
        return Err(Failure::new(
            USAGE,
            "not_found",
            format!("image '{}' has no version '{wanted}'", image.name),
        )
        .remedy("See 'cynode image show'."));
    }
    Ok((image, version))
}

/// Finds an image by name, id or part of the id, or by the reference of a version, which is
/// returned too.
pub(super) async fn find(
    client: &UserClient,
    wanted: &str,
) -> Result<(ApiImage, Option<String>), Failure> {
    let failure = match resolve::image(client, wanted).await {
        Err(failure) if failure.is("not_found") => failure,
        found => return found.map(|image| (image, None)),
    };
    for image in client.images().await? {
        let version = image
            .versions
            .iter()
            .find(|version| version.image_ref == wanted)
            .map(|version| version.version.clone());
        if version.is_some() {
            return Ok((image, version));
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn availability_shows_nodes_and_purpose_or_what_is_pending() {
        let id = "01890000-0000-7000-8000-000000000001";
        let version = |reference: &str,
                       state: &str,
                       nodes: serde_json::Value,
                       capabilities: serde_json::Value|
         -> String {
            let version = json!({
                "id": id, "version": "1", "image_ref": reference, "capabilities": capabilities,
                "is_allowed": true, "nodes": nodes, "state": state,
            });
            availability(&serde_json::from_value(version).expect("a version"))
        };
        let available = version(
            "localhost/m:1",
            "available",
            json!({"one": "available", "two": "evicted"}),
            json!({"agent_compatible": true}),
        );
        assert_eq!(available, "available on one, for sessions and jobs");
        assert!(
            version(
                "localhost/m:1",
                "available",
                json!({"one": "available"}),
                json!({"agent_compatible": false})
            )
            .contains("agent-compatible=true")
        );
        assert!(
            version("localhost/m:1", "awaiting_node", json!({}), json!({}))
                .contains("podman build")
        );
        assert!(
            version("r.example/m:1", "awaiting_node", json!({}), json!({}))
                .contains("'podman pull r.example/m:1'")
        );
        assert!(
            version(
                "localhost/m:1",
                "awaiting_pinned",
                json!({"one": "evicted"}),
                json!({})
            )
            .contains("one has another one")
        );
    }
}

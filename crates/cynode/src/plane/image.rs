//! `image`.

use cynode_api::{API_VERSION, Image as Object, ImageCreate, ImagePatch, ImageVersion};
use cynode_client::UserClient;

use super::{Outcome, done, list, made, moment, none_such, show};
use crate::{
    cli::{Globals, Image, ImageName},
    connect,
    failure::{Failure, USAGE},
};

pub async fn run(globals: &Globals, command: Image) -> Outcome {
    let client = connect::plane(globals)?;
    match command {
        Image::Add(args) => {
            let request = ImageCreate {
                version: Some(API_VERSION),
                name: args.name,
                description: args.description,
                image_ref: args.reference,
                image_digest: args.digest,
                capabilities: None,
                is_allowed: Some(args.allow),
            };
            let image = client.create_image(&request).await?;
            let word = format!("image '{}' is known{}", image.name, if args.allow { " and allowed" } else { "; allow it with 'cynode image allow'" });
            made(globals, &image, &image.id.to_string(), &word)
        }
        Image::Allow(args) => set(&client, globals, &args, true).await,
        Image::Deny(args) => set(&client, globals, &args, false).await,
        Image::List => {
            let images = client.images().await?;
            let versions: Vec<(&Object, &ImageVersion)> = images.iter().flat_map(|image| image.versions.iter().map(move |version| (image, version))).collect();
            if globals.output == crate::cli::Format::Json {
                return list(globals, &images, [], |_| []);
            }
            list(globals, &versions, ["IMAGE", "VERSION", "ALLOWED", "NODES", "REFERENCE"], |(image, version)| {
                let nodes: Vec<&str> = version.nodes.iter().filter(|(_, state)| *state == "available").map(|(name, _)| name.as_str()).collect();
                [image.name.clone(), version.version.clone(), allowed(version).to_owned(), nodes.join(","), version.image_ref.clone()]
            })
        }
        Image::Show { image } => {
            let (image, _) = find(client.images().await?, &image)?;
            let mut fields = vec![
                ("image", image.id.to_string()),
                ("name", image.name.clone()),
                ("description", image.description.clone().unwrap_or_default()),
                ("changed", format!("{} by {}", moment(image.updated_at), image.updated_by)),
            ];
            for version in &image.versions {
                let nodes: Vec<String> = version.nodes.iter().map(|(name, state)| format!("{state} on {name}")).collect();
                let digest = version.image_digest.as_deref().unwrap_or("no digest yet");
                let parts = [version.image_ref.as_str(), digest, if version.is_allowed { "allowed" } else { "not allowed" }, &nodes.join(", ")];
                fields.push(("version", format!("{}: {}", version.version, parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; "))));
            }
            show(globals, &image, &fields)
        }
    }
}

fn allowed(version: &ImageVersion) -> &'static str {
    if version.is_allowed { "yes" } else { "no" }
}

async fn set(client: &UserClient, globals: &Globals, args: &ImageName, is_allowed: bool) -> Outcome {
    let (image, by_reference) = find(client.images().await?, &args.image)?;
    let image_version = args.version.clone().or(by_reference);
    if let Some(wanted) = &image_version
        && !image.versions.iter().any(|version| version.version == *wanted)
    {
        return Err(Failure::new(USAGE, "not_found", format!("image '{}' has no version '{wanted}'", image.name)).remedy("See 'cynode image show'."));
    }
    let patch = ImagePatch { version: Some(API_VERSION), description: None, image_version: image_version.clone(), is_allowed: Some(is_allowed) };
    let changed = client.patch_image(image.id, &patch).await?;
    let which = image_version.map_or_else(|| "every version".to_owned(), |version| format!("version {version}"));
    done(globals, &changed, &format!("image '{}', {which}: {}", changed.name, if is_allowed { "allowed" } else { "denied" }))
}

/// By id or name, or by the reference of a version, which then is the one that is meant.
fn find(images: Vec<Object>, wanted: &str) -> Result<(Object, Option<String>), Failure> {
    let version = |image: &Object| image.versions.iter().find(|version| version.image_ref == wanted).map(|version| version.version.clone());
    let named = images.iter().position(|image| image.name == wanted || image.id.to_string() == wanted);
    let index = named.or_else(|| images.iter().position(|image| version(image).is_some()));
    let image = index.and_then(|index| images.into_iter().nth(index)).ok_or_else(|| none_such("image", wanted))?;
    let version = if named.is_some() { None } else { version(&image) };
    Ok((image, version))
}

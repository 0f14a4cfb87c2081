//! `artifact`.

use std::{path::Path, process::ExitCode};

use cynode_api::Artifact as Object;
use cynode_client::{ArtifactBody, Body, UserClient};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};

use super::{Outcome, age, list, made};
use crate::{
    archive,
    cli::{Artifact, ArtifactGet, ArtifactPut, Globals},
    connect,
    failure::{Failure, INTERNAL},
    output,
    session::{stdio, transfer::local},
    staged::{Staged, unless_interrupted},
};

pub async fn run(globals: &Globals, command: Artifact) -> Outcome {
    let client = connect::plane(globals)?;
    match command {
        Artifact::Put(args) => put(&client, globals, args).await,
        Artifact::Get(args) => get(&client, &args).await,
        Artifact::List { task } => {
            let artifacts = client.artifacts(task).await?;
            list(
                globals,
                &artifacts,
                ["ARTIFACT", "PATH", "VERSION", "SIZE", "TYPE", "AGE", "BY"],
                |artifact: &Object| {
                    let size = output::size(u64::try_from(artifact.size).unwrap_or_default());
                    let (age, by) = (age(artifact.created_at), artifact.created_by.clone());
                    [
                        artifact.id.to_string(),
                        artifact.path.clone(),
                        artifact.version.to_string(),
                        size,
                        artifact.media_type.clone(),
                        age,
                        by,
                    ]
                },
            )
        }
    }
}

async fn put(client: &UserClient, globals: &Globals, args: ArtifactPut) -> Outcome {
    let is_stdin = args.file == Path::new("-");
    let name = args
        .file
        .file_name()
        .filter(|_| !is_stdin)
        .and_then(|name| name.to_str())
        .map(ToOwned::to_owned);
    let path = args.path.or(name).ok_or_else(|| {
        Failure::usage("standard input needs a path to go to").remedy("Add a path after '-'.")
    })?;
    let body = if is_stdin {
        streamed(tokio::io::stdin())
    } else {
        streamed(
            fs_err::tokio::File::open(&args.file)
                .await
                .map_err(|error| Failure::usage(error.to_string()))?,
        )
    };
    let artifact = client
        .put_artifact(args.task, &path, args.media_type.as_deref(), body)
        .await?;
    let word = format!(
        "{} version {}, {} bytes, sha256 {}",
        artifact.path, artifact.version, artifact.size, artifact.sha256
    );
    made(globals, &artifact, &artifact.id.to_string(), &word)
}

/// Piece by piece; never whole in memory.
fn streamed(mut from: impl AsyncRead + Unpin + Send + 'static) -> Body {
    let (to, pieces) = archive::channel();
    tokio::spawn(async move {
        let mut buffer = vec![0; 256 * 1024];
        loop {
            let piece = match from.read(&mut buffer).await {
                Ok(0) => return,
                Ok(count) => Ok(bytes::Bytes::copy_from_slice(&buffer[..count])),
                Err(error) => Err(error),
            };
            let failed = piece.is_err();
            if to.send(piece).await.is_err() || failed {
                return;
            }
        }
    });
    Body::wrap_stream(archive::stream(pieces))
}

async fn get(client: &UserClient, args: &ArtifactGet) -> Outcome {
    let body = match (args.task, args.id()) {
        (Some(task), _) => {
            client
                .get_artifact(task, &args.artifact, args.version)
                .await?
        }
        (None, Some(id)) => client.artifact_content(id).await?,
        (None, None) => {
            return Err(
                Failure::usage(format!("'{}' is not an artifact's id", args.artifact))
                    .remedy("Name the task of a path with --task."),
            );
        }
    };
    if args.to == Path::new("-") {
        let mut stdout = stdio::stdout(args.raw);
        checked(body, async |piece| stdout.write(piece).await).await?;
        stdout.finish().await?;
    } else {
        unless_interrupted(to_file(body, &args.to)).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Beside its place first: what broke off does not replace what was there.
async fn to_file(body: ArtifactBody, path: &Path) -> Result<(), Failure> {
    if fs_err::metadata(path).is_ok_and(|found| !found.is_file()) {
        // A device or a pipe is written to, not replaced.
        let mut out = fs_err::tokio::OpenOptions::new()
            .write(true)
            .open(path)
            .await
            .map_err(|error| local(&error))?;
        checked(body, async |piece| out.write_all(piece).await).await?;
        return Ok(out.flush().await?);
    }
    let (staged, file) = Staged::create(path, 0o666)?;
    let mut file = tokio::fs::File::from_std(file.into_parts().0);
    checked(body, async |piece| file.write_all(piece).await).await?;
    // Waits for the last write, too.
    file.sync_all().await?;
    Ok(staged.commit()?)
}

/// Takes all of it, and compares its hash with what the server says it is.
async fn checked(
    mut body: ArtifactBody,
    mut take: impl AsyncFnMut(&[u8]) -> std::io::Result<()>,
) -> Result<(), Failure> {
    let mut hash = Sha256::new();
    while let Some(piece) = body.chunk().await? {
        hash.update(&piece);
        take(&piece).await?;
    }
    let found = crate::output::hex(&hash.finalize());
    match &body.sha256 {
        Some(expected) if !expected.eq_ignore_ascii_case(&found) => Err(Failure::new(
            INTERNAL,
            "damaged",
            format!("the bytes have the hash {found}, not {expected}"),
        )
        .remedy("Get it again.")),
        _ => Ok(()),
    }
}

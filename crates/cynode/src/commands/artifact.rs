//! `artifact`: stores and fetches files of tasks.

use std::{path::Path, process::ExitCode};

use cynode_api::{Artifact as ApiArtifact, ErrorCode, TaskId};
use cynode_client::{ArtifactBody, Body, UserClient};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};

use super::{CommandResult, age, newest, print_created, print_list};
use crate::{
    archive,
    cli::{Artifact, ArtifactGet, ArtifactPut, Globals},
    connect,
    failure::{Failure, INTERNAL},
    output::{self, TableStyle},
    resolve,
    session::{stdio, transfer::local_failure},
    staged::{StagedFile, unless_interrupted},
};

pub async fn run(globals: &Globals, command: Artifact) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Artifact::Put(args) => put(&client, globals, args).await,
        Artifact::Get(args) => get(&client, &args).await,
        Artifact::List { task, list } => {
            let task = resolve::task(&client, &task).await?;
            let query = vec![("task_id", task.to_string())];
            let artifacts: Vec<ApiArtifact> = newest(&client, list, query, |_| true).await?;
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &artifacts,
                ["ARTIFACT", "PATH", "VERSION", "SIZE", "TYPE", "AGE", "BY"],
                |artifact: &ApiArtifact| {
                    let size = output::size(u64::try_from(artifact.size).unwrap_or_default());
                    let (age, by) = (age(artifact.created_at), artifact.created_by.clone());
                    [
                        style.id(&artifact.id),
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

async fn put(client: &UserClient, globals: &Globals, args: ArtifactPut) -> CommandResult {
    let is_stdin = args.file == Path::new("-");
    let name = args
        .file
        .file_name()
        .filter(|_| !is_stdin)
        .and_then(|name| name.to_str())
        .map(ToOwned::to_owned);
    let path = args.path.or(name).ok_or_else(|| {
        Failure::usage("standard input needs a path within the task")
            .remedy("Add a path after '-'.")
    })?;
    let body = if is_stdin {
        stream(tokio::io::stdin())
    } else {
        stream(
            fs_err::tokio::File::open(&args.file)
                .await
                .map_err(|error| Failure::usage(error.to_string()))?,
        )
    };
    let task = resolve::task(client, &args.task).await?;
    let artifact = client
        .put_artifact(task, &path, args.media_type.as_deref(), body)
        .await?;
    let note = format!(
        "{} version {}, {} bytes, sha256 {}",
        artifact.path, artifact.version, artifact.size, artifact.sha256
    );
    print_created(globals, &artifact, &artifact.id.to_string(), &note)
}

/// Streams the content: it may not fit into memory.
fn stream(mut from: impl AsyncRead + Unpin + Send + 'static) -> Body {
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

async fn get(client: &UserClient, args: &ArtifactGet) -> CommandResult {
    let task = resolve::optional(args.task.as_deref(), async |task| {
        resolve::task(client, task).await
    })
    .await?;
    let body = match (task, args.id()) {
        (Some(task), _) => by_path_or_part(client, task, args).await?,
        (None, Some(id)) => client.artifact_content(id).await?,
        (None, None) => {
            return Err(
                Failure::usage(format!("'{}' is not an artifact's id", args.artifact))
                    .remedy("To fetch by path or by a part of the id, add --task."),
            );
        }
    };
    if args.to == Path::new("-") {
        let mut stdout = stdio::stdout(args.raw);
        copy_checked(body, async |piece| stdout.write(piece).await).await?;
        stdout.finish().await?;
    } else {
        unless_interrupted(to_file(body, &args.to)).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// An artifact of a task, by its path, or else by a part of its id.
async fn by_path_or_part(
    client: &UserClient,
    task: TaskId,
    args: &ArtifactGet,
) -> Result<ArtifactBody, Failure> {
    let by_path = client
        .get_artifact(task, &args.artifact, args.version)
        .await;
    let is_missing = by_path
        .as_ref()
        .is_err_and(|error| error.is(ErrorCode::NotFound));
    if !is_missing || args.version.is_some() || resolve::id_part(&args.artifact).is_none() {
        return Ok(by_path?);
    }
    let id = resolve::artifact(client, task, &args.artifact).await?;
    Ok(client.artifact_content(id).await?)
}

/// Writes the file atomically: a failed transfer keeps the existing file.
pub(super) async fn to_file(body: ArtifactBody, path: &Path) -> Result<(), Failure> {
    if fs_err::metadata(path).is_ok_and(|existing| !existing.is_file()) {
        // Write to a device or a pipe instead of replacing it.
        let mut out = fs_err::tokio::OpenOptions::new()
            .write(true)
            .open(path)
            .await
            .map_err(|error| local_failure(&error))?;
        copy_checked(body, async |piece| out.write_all(piece).await).await?;
        return Ok(out.flush().await?);
    }
    let (staged, file) = StagedFile::create(path, 0o666)?;
    let mut file = tokio::fs::File::from_std(file.into_parts().0);
    copy_checked(body, async |piece| file.write_all(piece).await).await?;
    // Also waits for the last write.
    file.sync_all().await?;
    Ok(staged.commit()?)
}

/// Copies the body and compares its hash with the one from the server.
async fn copy_checked(
    mut body: ArtifactBody,
    mut write: impl AsyncFnMut(&[u8]) -> std::io::Result<()>,
) -> Result<(), Failure> {
    let mut hash = Sha256::new();
    while let Some(piece) = body.chunk().await? {
        hash.update(&piece);
        write(&piece).await?;
    }
    let actual = hex::encode(hash.finalize());
    match &body.sha256 {
        Some(expected) if !expected.eq_ignore_ascii_case(&actual) => Err(Failure::new(
            INTERNAL,
            "damaged",
            format!("the content has the hash {actual}, not {expected}"),
        )
        .remedy("Fetch it again.")),
        _ => Ok(()),
    }
}

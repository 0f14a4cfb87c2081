//! `promote`: turns the changes of a session, or an artifact, into a commit on a branch and a pull
//! request.

use std::{io::Read as _, path::Path, process::ExitCode};

use cynode_api::{
    API_VERSION, ArtifactId, ChangesetFormat, ErrorCode, ExportFormat, ExportRequest,
    PromotionCreate, PromotionId, TaskId, promotion_limits,
};
use cynode_client::UserClient;
use tokio::signal::unix::{SignalKind, signal};

use super::{CommandResult, print_created, promotion::until_settled, promotion_view};
use crate::{
    cli::{Globals, Promote},
    connect,
    failure::{Failure, USAGE},
    output::{self, Progress},
    resolve,
};

/// The exit code that a shell gives to a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// What the changes of a session without a repository are relative to: its files when it began.
const BROUGHT: &str = "brought";

struct ChangesetArtifact {
    task: TaskId,
    id: ArtifactId,
    format: ChangesetFormat,
}

pub async fn run(globals: &Globals, args: Promote) -> CommandResult {
    let client = connect::user_client(globals)?;
    let body = match &args.body_file {
        Some(path) => Some(read_body(path)?),
        None => None,
    };
    let changeset = match &args.changeset {
        Some(artifact) => named_artifact(&client, &args, artifact).await?,
        None => exported(&client, args.session.as_deref().unwrap_or(".")).await?,
    };
    let request = PromotionCreate {
        version: Some(API_VERSION),
        task_id: changeset.task,
        repository: repository(&client, changeset.task, &args.repo).await?,
        changeset: changeset.id,
        format: changeset.format,
        base: args.base,
        target: args.target,
        branch: args.branch,
        message: args.message,
        title: args.title,
        body,
        until: args.until.into(),
        dry_run: args.dry_run,
    };
    if args.dry_run {
        let progress = Progress::start("building and inspecting the commit");
        let inspected = client.create_promotion(&request).await?;
        drop(progress);
        promotion_view::print(globals, &inspected, false)?;
        return promotion_view::dry_run_outcome(&inspected);
    }
    let promotion = client.create_promotion(&request).await?;
    let id = promotion.id;
    if args.detach {
        let note = format!(
            "the promotion is {}; follow it with 'cynode promotion show --follow {id}'",
            promotion.state.as_str()
        );
        return print_created(globals, &promotion, &id.to_string(), &note);
    }
    let settled = tokio::select! {
        settled = until_settled(&client, id, args.wait) => settled?,
        () = interrupted() => {
            return Ok(not_waiting(id));
        }
    };
    promotion_view::print(globals, &settled, true)?;
    promotion_view::outcome(&settled)
}

fn not_waiting(id: PromotionId) -> ExitCode {
    output::message(&format!(
        "cynode: no longer waiting; the promotion goes on: see 'cynode promotion show {id}', stop \
         it with 'cynode promotion cancel {id}'"
    ));
    ExitCode::from(INTERRUPTED)
}

async fn interrupted() {
    let (Ok(mut interrupt), Ok(mut terminate)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
    ) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

/// Stores the changes of a session as an artifact.
async fn exported(client: &UserClient, session: &str) -> Result<ChangesetArtifact, Failure> {
    let session = resolve::session(client.sessions(), session).await?;
    let source = client.sessions().get_session(session).await?.base_commit;
    let request = ExportRequest {
        version: Some(API_VERSION),
        format: ExportFormat::Patch,
        // The default is the commit that the workspace was seeded from.
        base: source.is_none().then(|| BROUGHT.to_owned()),
        path: None,
    };
    let progress = Progress::start("exporting the session's changes");
    let artifact = client
        .export_artifact(session, &request)
        .await
        .map_err(|error| {
            let has_no_snapshot = error.is(ErrorCode::NotARepository);
            let failure = Failure::from(error);
            if has_no_snapshot {
                failure.remedy(
                    "Create the session with 'cynode session create --repo REPOSITORY', or promote \
                     an artifact with --changeset.",
                )
            } else {
                failure
            }
        })?;
    drop(progress);
    if artifact.size == 0 {
        return Err(Failure::new(
            USAGE,
            "nothing_to_promote",
            format!("session {session} has changed nothing"),
        )
        .remedy("See 'cynode session diff'."));
    }
    Ok(ChangesetArtifact {
        task: artifact.task_id,
        id: artifact.id,
        format: ChangesetFormat::Patch,
    })
}

/// An artifact that exists.
async fn named_artifact(
    client: &UserClient,
    args: &Promote,
    text: &str,
) -> Result<ChangesetArtifact, Failure> {
    let format = args.format.into();
    if let Some(task) = args.task.as_deref() {
        let task = resolve::task(client, task).await?;
        let id = resolve::artifact(client, task, text).await?;
        return Ok(ChangesetArtifact { task, id, format });
    }
    let id = text.parse().map_err(|_| {
        Failure::usage(format!("'{text}' is not an artifact's id"))
            .remedy("To name it by a part of the id, add --task.")
    })?;
    let task = client.artifact(id).await?.task_id;
    Ok(ChangesetArtifact { task, id, format })
}

/// The repository as the API takes it: a name, or a whole id.
async fn repository(client: &UserClient, task: TaskId, text: &str) -> Result<String, Failure> {
    if resolve::id_part(text).is_none() {
        return Ok(text.to_owned());
    }
    let project = client.task(task).await?.project_id;
    let repository = resolve::repository(client, project, text).await?;
    Ok(repository.id.to_string())
}

/// Reads the description of the pull request, bounded.
fn read_body(path: &Path) -> Result<String, Failure> {
    let limit = promotion_limits::MAX_BODY_BYTES;
    let mut body = String::new();
    let read = if path == Path::new("-") {
        let input = std::io::stdin().lock();
        input.take(limit as u64 + 1).read_to_string(&mut body)
    } else {
        fs_err::File::open(path)
            .and_then(|file| file.take(limit as u64 + 1).read_to_string(&mut body))
    };
    read.map_err(|error| Failure::usage(format!("--body-file: {error}")))?;
    if body.len() > limit {
        return Err(Failure::usage(format!(
            "--body-file: the description is longer than {}",
            output::size(limit as u64)
        )));
    }
    Ok(body)
}

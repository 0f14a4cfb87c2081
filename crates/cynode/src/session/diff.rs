//! `session diff`: prints what changed in a workspace.

use std::process::ExitCode;

use cynode_api::{API_VERSION, ErrorCode, ExportFormat, ExportRequest, SessionId};
use cynode_client::{FileBody, SessionClient};
use cynode_patch::Patch;
use serde_json::json;

use super::stdio;
use crate::{
    apply::{self, FileSummary, Summary},
    cli::{Diff, Globals, OutputFormat},
    failure::{Failure, USAGE},
    output::{self, Progress, TableStyle},
};

/// The base that means what the session began with.
pub(super) const BROUGHT: &str = "brought";
/// The longest patch that is read into memory. Printing one needs no memory.
const MAX_PATCH_BYTES: usize = 256 * 1024 * 1024;

pub async fn run(
    client: &SessionClient,
    globals: &Globals,
    args: Diff,
) -> Result<ExitCode, Failure> {
    let id = super::target(client, args.session.as_deref()).await?;
    let mut body = export(client, id, &args.base).await?;
    if globals.output == OutputFormat::Table && !args.stat {
        let mut stdout = stdio::stdout(args.raw);
        while let Some(piece) = body.chunk().await? {
            stdout.write(&piece).await?;
        }
        stdout.finish().await?;
        return Ok(ExitCode::SUCCESS);
    }
    let patch = read(body).await?;
    let summary = Summary::new(&parse(&patch)?);
    if globals.output == OutputFormat::Json {
        let mut document = json!({ "session_id": id, "base": args.base, "files": summary.files });
        if !args.stat {
            match std::str::from_utf8(&patch) {
                Ok(text) => document["patch"] = json!(text),
                Err(_) => document["patch_b64"] = json!(cynode_api::Base64Bytes(patch)),
            }
        }
        output::json(&document)?;
    } else {
        print(&summary)?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn export(client: &SessionClient, id: SessionId, base: &str) -> Result<FileBody, Failure> {
    let request = ExportRequest {
        version: Some(API_VERSION),
        format: ExportFormat::Patch,
        base: Some(base.to_owned()),
        path: None,
    };
    client.export(id, &request).await.map_err(|error| {
        let is_unknown_base = error.is(ErrorCode::NotARepository);
        let failure = Failure::from(error);
        if is_unknown_base {
            failure.remedy(
                "Create the session with a directory ('cynode session create DIR'), or name a \
                 commit of the repository in its workspace with --base.",
            )
        } else {
            failure
        }
    })
}

/// Why the changes of a session that has just begun can't be exported, if they can't.
pub(super) async fn missing_snapshot(client: &SessionClient, id: SessionId) -> Option<String> {
    let request = ExportRequest {
        version: Some(API_VERSION),
        format: ExportFormat::Patch,
        base: Some(BROUGHT.to_owned()),
        path: None,
    };
    let error = client.export(id, &request).await.err()?;
    // Others, such as a policy's denial, say nothing about the snapshot.
    let is_missing = error.is(ErrorCode::NotARepository) || error.is(ErrorCode::ExecFailed);
    is_missing.then(|| error.chain())
}

/// The changes of a session as a patch, whole.
pub(super) async fn fetch(
    client: &SessionClient,
    id: SessionId,
    base: &str,
) -> Result<Vec<u8>, Failure> {
    read(export(client, id, base).await?).await
}

async fn read(mut body: FileBody) -> Result<Vec<u8>, Failure> {
    let progress = Progress::start("fetching the changes");
    let mut patch = Vec::new();
    while let Some(piece) = body.chunk().await? {
        if patch.len() + piece.len() > MAX_PATCH_BYTES {
            return Err(Failure::new(
                USAGE,
                "too_large",
                format!(
                    "the changes take more than {} as a patch",
                    output::size(MAX_PATCH_BYTES as u64)
                ),
            )
            .remedy(
                "Delete generated files in the session, or list them in its .gitignore, and retry.",
            ));
        }
        patch.extend_from_slice(&piece);
        progress.set_bytes("fetching the changes", patch.len() as u64);
    }
    Ok(patch)
}

/// Parses the changes of a session.
pub(super) fn parse(patch: &[u8]) -> Result<Patch<'_>, Failure> {
    apply::parse(patch).map_err(|error| invalid(&error))
}

pub(super) fn invalid(error: &apply::Error) -> Failure {
    Failure::new(USAGE, "invalid_patch", error.to_string()).remedy(
        "See the patch itself with 'cynode session diff', and undo in the session what can't be \
         pulled.",
    )
}

/// Prints the changed files, and their total to stderr.
pub(super) fn print(summary: &Summary) -> Result<(), Failure> {
    let (files, added, removed) = summary.totals();
    if files == 0 {
        output::message("nothing has changed");
        return Ok(());
    }
    output::table(
        // A long directory must not push the name of a file, or its note, out of sight.
        TableStyle::WHOLE,
        ["FILE", "CHANGE", "LINES", "NOTE"],
        summary.files.iter().map(row),
    )?;
    output::message(&format!(
        "{files} files, {added} lines added, {removed} removed"
    ));
    Ok(())
}

fn row(file: &FileSummary) -> [String; 4] {
    let name = file.from.as_ref().map_or_else(
        || file.path.clone(),
        |from| format!("{} (from {from})", file.path),
    );
    let lines = if file.binary {
        "binary".to_owned()
    } else {
        format!("+{} -{}", file.added, file.removed)
    };
    [
        name,
        file.operation.to_owned(),
        lines,
        file.warnings.join(", "),
    ]
}

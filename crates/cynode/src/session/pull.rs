//! `session pull`: shows what the changes of a session would do to a local directory, and makes
//! them on request.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use cynode_api::SessionId;
use cynode_client::SessionClient;
use cynode_patch::{Patch, Reject, escaped};
use serde_json::{Value, json};

use super::{diff, transfer::local_failure};
use crate::{
    apply::{self, CommitError, FileSummary, Prepared, Summary},
    bring,
    cli::{Globals, OutputFormat, Pull},
    directories::Directories,
    failure::{Failure, INTERNAL, USAGE},
    output,
    pulled::Pulled,
    sanitize::line,
    staged::outlast_signals,
};

/// The base that means what the session began with.
const BROUGHT: &str = "brought";
/// Rejected hunks that are printed.
const MAX_REJECTS: usize = 50;

pub async fn run(
    client: &SessionClient,
    globals: &Globals,
    args: Pull,
) -> Result<ExitCode, Failure> {
    let id = super::target(client, args.session.as_deref()).await?;
    let directory = directory(client, id, args.directory.as_deref())?;
    let patch = diff::fetch(client, id, &args.base).await?;
    warn_of_leftovers(&directory);
    // Changes since a commit don't count from the session's beginning.
    let pulled = (args.base == BROUGHT)
        .then(|| Pulled::of(client.base(), id, &directory))
        .flatten();
    let earlier = pulled.as_ref().map(Pulled::read).unwrap_or_default();
    let parsed = diff::parse(&patch)?;
    let prepared = apply::prepare(&directory, &parsed, &earlier)
        .map_err(|error| failure(&directory, error, globals.output))?;
    let summary = summary(&parsed, &prepared);
    if globals.output == OutputFormat::Table {
        diff::print(&summary)?;
    }
    let is_applied = args.apply && !summary.files.is_empty();
    if is_applied {
        outlast_signals()?;
        let record = prepared
            .commit()
            .map_err(|error| failure(&directory, error, globals.output))?;
        if let Some(pulled) = pulled {
            pulled.write(record.as_ref());
        }
    }
    report(globals, id, &directory, &summary, is_applied)
}

/// What would change now.
fn summary(patch: &Patch<'_>, prepared: &Prepared) -> Summary {
    let mut summary = Summary::of_sections(patch, |path| !prepared.has_already(path));
    let restored = prepared.restored();
    let restored = restored
        .iter()
        .map(|path| FileSummary::restored(path.as_bytes()));
    summary.files.extend(restored);
    summary
}

/// The directory to change.
fn directory(
    client: &SessionClient,
    id: SessionId,
    given: Option<&Path>,
) -> Result<PathBuf, Failure> {
    let brought =
        || Directories::of(client.base()).and_then(|directories| directories.brought_from(id));
    match given {
        Some(directory) => bring::root(directory),
        None => bring::root(&brought().unwrap_or_else(|| PathBuf::from("."))),
    }
}

fn failure(directory: &Path, error: apply::Error, format: OutputFormat) -> Failure {
    match error {
        apply::Error::Rejected { rejects, is_cut } => rejected(directory, &rejects, is_cut, format),
        apply::Error::Read(error) => local_failure(&io::Error::new(
            error.kind(),
            format!("reading {} failed: {error}", directory.display()),
        )),
        apply::Error::Invalid(_) | apply::Error::TooLarge(_) => diff::invalid(&error),
        apply::Error::Commit(error) => not_applied(&error),
    }
}

/// The changes conflict with local ones.
fn rejected(directory: &Path, rejects: &[Reject], is_cut: bool, format: OutputFormat) -> Failure {
    if format == OutputFormat::Table {
        for reject in rejects.iter().take(MAX_REJECTS) {
            print_reject(reject);
        }
        let more = rejects.len().saturating_sub(MAX_REJECTS);
        if more > 0 {
            output::message(&format!("cynode: {more} more conflicts"));
        }
    }
    let files: BTreeSet<&[u8]> = rejects.iter().map(|reject| &reject.path[..]).collect();
    let at_least = if is_cut { "at least " } else { "" };
    Failure::new(
        USAGE,
        "patch_rejected",
        format!(
            "the changes do not fit {at_least}{} of the files in {}; nothing was changed",
            files.len(),
            line(&directory.to_string_lossy())
        ),
    )
    .remedy(
        "Undo or move aside the local changes to these files, or apply the output of \
         'cynode session diff' by hand.",
    )
    .with_extension("rejects", rejects.iter().map(document).collect())
}

fn print_reject(reject: &Reject) {
    let place = match (reject.hunk, reject.line) {
        (Some(hunk), Some(at)) => format!(", hunk {hunk} at line {at}"),
        (Some(hunk), None) => format!(", hunk {hunk}"),
        _ => String::new(),
    };
    output::message(&format!(
        "cynode: {}{place}: {}",
        line(&escaped(&reject.path)),
        line(&reject.reason)
    ));
    for (title, lines) in [("expected", &reject.expected), ("found", &reject.found)] {
        if !lines.is_empty() {
            output::message(&format!("  {title}:"));
        }
        for quoted in lines {
            output::message(&format!("    {}", line(quoted)));
        }
    }
}

fn document(reject: &Reject) -> Value {
    json!({
        "path": String::from_utf8_lossy(&reject.path),
        "hunk": reject.hunk,
        "line": reject.line,
        "reason": reject.reason,
        "expected": reject.expected,
        "found": reject.found,
    })
}

fn not_applied(error: &CommitError) -> Failure {
    let failure = Failure::new(INTERNAL, "not_applied", error.to_string());
    match error {
        CommitError::Stale { .. } => failure.remedy("Retry."),
        CommitError::Unchanged { .. } => {
            failure.remedy("Remove what is in the way, or make room, and retry.")
        }
        CommitError::Partial { .. } => {
            failure.remedy("Move the old files back from there, and remove the directory.")
        }
    }
}

/// Says that an earlier command died while it changed files.
fn warn_of_leftovers(directory: &Path) {
    for left in apply::leftovers(directory) {
        output::message(&format!(
            "cynode: an earlier command was killed while it changed files; {} has the old ones. \
             Remove it when they are no longer needed.",
            line(&left.to_string_lossy())
        ));
    }
}

fn report(
    globals: &Globals,
    id: SessionId,
    directory: &Path,
    summary: &Summary,
    is_applied: bool,
) -> Result<ExitCode, Failure> {
    let files = summary.files.len();
    let name = line(&directory.to_string_lossy());
    match globals.output {
        OutputFormat::Json => output::json(&json!({
            "session_id": id,
            "directory": directory.to_string_lossy(),
            "applied": is_applied,
            "files": summary.files,
        }))?,
        OutputFormat::Table if is_applied => {
            output::message(&format!("changed {files} files in {name}"))
        }
        OutputFormat::Table if files > 0 => output::message(&format!(
            "nothing was changed in {name}; add --apply to make these changes"
        )),
        OutputFormat::Table => {}
    }
    Ok(ExitCode::SUCCESS)
}

//! `session pull`: shows what the changes of a session would do to a local directory, and makes
//! them on request.

use std::{
    collections::BTreeSet,
    io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use cynode_api::SessionId;
use cynode_client::SessionClient;
use cynode_patch::{Location, Patch, Reject, escaped};
use serde_json::{Value, json};

use super::{diff, transfer::local_failure};
use crate::{
    apply::{self, CommitError, Summary},
    bring,
    cli::{Globals, OutputFormat, Pull},
    directories::Directories,
    failure::{Failure, INTERNAL, USAGE},
    output,
    pulled::Pulled,
    sanitize::line,
    staged::outlast_signals,
};

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
    let pulled = (args.base == diff::BROUGHT)
        .then(|| Pulled::of(client.base(), id, &directory))
        .flatten();
    let mut earlier = pulled.as_ref().map(Pulled::read).unwrap_or_default();
    let mut parsed = diff::parse(&patch)?;
    let mut excluded = Exclusions::parse(&args.exclude)?;
    excluded.complete(&parsed);
    parsed.retain(|path| !excluded.contains(path));
    // What was pulled before stays as it is, and is remembered.
    let left_out = earlier.split_off(|path| !excluded.contains(path));
    let fail = |error| failure(&directory, error, globals.output);
    let prepared = apply::prepare(&directory, &parsed, &earlier).map_err(fail)?;
    let summary = prepared.summary(&parsed).map_err(fail)?;
    if globals.output == OutputFormat::Table {
        diff::print(&summary)?;
    }
    let is_applied = args.apply && !summary.files.is_empty();
    if is_applied {
        outlast_signals()?;
        let mut record = prepared.commit().map_err(fail)?;
        if let Some(record) = &mut record {
            record.append(left_out);
        }
        if let Some(pulled) = pulled {
            pulled.write(record.as_ref());
        }
    }
    report(globals, id, &directory, &summary, is_applied)
}

/// Files and directories that are left as they are.
struct Exclusions(Vec<Location>);

impl Exclusions {
    fn parse(paths: &[PathBuf]) -> Result<Self, Failure> {
        let parse = |path: &PathBuf| {
            let bytes = path.as_os_str().as_bytes();
            let name = bytes.strip_suffix(b"/").unwrap_or(bytes);
            // A path that can't be applied may be named, so that the others can.
            let parts = name.split(|byte| *byte == b'/');
            let parts: Vec<&[u8]> = parts.filter(|part| !matches!(*part, b"" | b".")).collect();
            if name.starts_with(b"/") || parts.is_empty() || parts.contains(&&b".."[..]) {
                let path = line(&path.to_string_lossy());
                return Err(
                    Failure::usage(format!("--exclude {path}: not a path below DIR"))
                        .remedy("Write the path as the list of changes shows it."),
                );
            }
            Ok(Location::from_parts(parts))
        };
        Ok(Self(paths.iter().map(parse).collect::<Result<_, _>>()?))
    }

    /// Adds the other path of each rename with an excluded path: a rename is left out as a whole.
    fn complete(&mut self, patch: &Patch<'_>) {
        let mut count = None;
        while count != Some(self.0.len()) {
            count = Some(self.0.len());
            for section in patch.sections() {
                let paths = || section.old.iter().chain(&section.new);
                if !paths().any(|path| self.contains(path)) {
                    continue;
                }
                for path in paths() {
                    if !self.contains(path) {
                        let parts = path.split(|byte| *byte == b'/');
                        self.0.push(Location::from_parts(parts));
                    }
                }
            }
        }
    }

    fn contains(&self, path: &[u8]) -> bool {
        let is_at_or_below = |excluded: &Location| {
            let rest = path.strip_prefix(excluded.as_bytes());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        };
        self.0.iter().any(is_at_or_below)
    }
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
        "Undo or move aside the local changes to these files, or pull the other changes with \
         --exclude PATH.",
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
            output::message(&format!("changed {files} files in {name}"));
        }
        OutputFormat::Table if files > 0 => output::message(&format!(
            "nothing was changed in {name}; add --apply to make these changes"
        )),
        OutputFormat::Table => {}
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rename_is_left_out_as_a_whole() {
        let rename = |from: &str, to: &str| {
            format!(
                "diff --git a/{from} b/{to}\nsimilarity index 100%\nrename from {from}\n\
                 rename to {to}\n"
            )
        };
        // The second is found only after the first.
        let text = rename("c", "b") + &rename("b", "sub/a") + &rename("x", "y");
        let mut patch = diff::parse(text.as_bytes()).unwrap_or_default();
        let mut excluded = Exclusions::parse(&["sub".into()]).expect("valid");
        excluded.complete(&patch);
        patch.retain(|path| !excluded.contains(path));
        assert_eq!(patch.sections().len(), 1);
        assert!(excluded.contains(b"c") && !excluded.contains(b"x"));
    }

    #[test]
    fn exclusions_hold_for_files_and_all_below_directories() {
        let excluded = Exclusions::parse(&["./a//b/".into(), "c".into(), ".git".into()]);
        let excluded = excluded.expect("valid");
        for (path, expected) in [
            (&b"a/b"[..], true),
            (b"a/b/c", true),
            (b"a/bc", false),
            (b"a", false),
            (b"c", true),
            (b".git/config", true),
        ] {
            assert_eq!(excluded.contains(path), expected, "{path:?}");
        }
        for path in ["", ".", "/a", "../a", "a/.."] {
            assert!(Exclusions::parse(&[path.into()]).is_err(), "{path}");
        }
    }
}

//! `files:patch` on the files of a simulated session, which has no links and no directories of its
//! own.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc};

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, FromRequest as _, Path, Request, State},
    response::{IntoResponse as _, Response},
    routing::post,
};
use cynode_api::{
    ENCODED_PATCH, ErrorCode, FileChanges, PatchOperation, PatchRepair, PatchRequest, PatchResult,
    PatchedFile, file_limits::DEFAULT_STRIP,
};
use cynode_patch::{
    File, FileEffect, Kind, Location, MAX_WIRE_BYTES, Operation, Patch, Problem, Repair, Tree,
    TreeNode, plan,
};
use cynode_service::{ApiError, JsonBody};
use cynode_worker::calls::with_result;
use http::header;

use super::{Shared, files::sha256, run::absolute, sessions::ApiResult};

pub(super) fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/v1/worker/sessions/{id}/files:patch", post(patch))
        .layer(DefaultBodyLimit::max(MAX_WIRE_BYTES))
}

/// A patch as the node received it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedPatch {
    pub is_encoded: bool,
    pub body: Vec<u8>,
}

type StoredFiles = BTreeMap<String, (Vec<u8>, u32)>;

struct Stored<'a>(&'a StoredFiles);

fn key(location: &Location) -> String {
    absolute(&String::from_utf8_lossy(location.as_bytes()))
}

impl Tree for Stored<'_> {
    type Stamp = ();
    type Failure = Infallible;

    fn locate(&self, path: &Location) -> Result<Location, Problem<Infallible>> {
        Ok(path.clone())
    }

    fn load(&self, location: &Location) -> Result<TreeNode<()>, Problem<Infallible>> {
        let key = key(location);
        let is_directory = self.0.keys().any(|file| {
            file.strip_prefix(&key)
                .is_some_and(|rest| rest.starts_with('/'))
        });
        Ok(match self.0.get(&key) {
            Some((bytes, mode)) => TreeNode::File(
                (),
                File {
                    kind: Kind::Regular(*mode),
                    bytes: bytes.clone(),
                },
            ),
            None if is_directory => TreeNode::Directory(()),
            None => TreeNode::Nothing,
        })
    }

    fn files_below(
        &self,
        _directory: &Location,
        _limit: usize,
    ) -> Result<Vec<Location>, Problem<Infallible>> {
        Err(Problem::Reject("is a directory".to_owned()))
    }

    fn digest(&self, bytes: &[u8]) -> String {
        sha256(bytes)
    }
}

async fn patch(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    request: Request,
) -> ApiResult<Response> {
    let kind = request.headers().get(header::CONTENT_TYPE).cloned();
    let reads_encoded = *shared.encoded_patches.lock().expect("not poisoned") > 0;
    let is_encoded =
        reads_encoded && kind.is_some_and(|kind| kind.as_bytes() == ENCODED_PATCH.as_bytes());
    let mut dry_run = request.uri().query() == Some("dry_run=true");
    let (patch_text, strip) = if is_encoded {
        let bytes = Bytes::from_request(request, &()).await;
        let bytes = bytes.map_err(|error| ApiError::invalid(error.body_text()))?;
        (bytes.to_vec(), 0)
    } else {
        let JsonBody(request) = JsonBody::<PatchRequest>::from_request(request, &()).await?;
        dry_run = request.dry_run;
        let strip = request.strip.unwrap_or(DEFAULT_STRIP);
        (request.diff.into_bytes(), strip)
    };
    let received = ReceivedPatch {
        is_encoded,
        body: patch_text.clone(),
    };
    let mut patches = shared.patches.lock().expect("not poisoned");
    patches.push(received);
    drop(patches);
    let read = if is_encoded {
        Patch::from_wire(&patch_text).map(|patch| (patch, Vec::new()))
    } else if reads_encoded {
        Patch::parse_any(&patch_text, strip)
    } else {
        Patch::parse(&patch_text, strip).map(|patch| (patch, Vec::new()))
    };
    let (patch, repairs) =
        read.map_err(|error| ApiError::invalid(format!("the diff is invalid: {error}")))?;
    let (_, files) = shared.state().live(&text)?;
    let mut files = files.lock().expect("not poisoned");
    let files: &mut StoredFiles = &mut files;
    let result = PatchResult {
        files: apply(files, &patch, dry_run)?,
        repaired: repairs
            .into_iter()
            .map(|Repair { path, hunk, what }| PatchRepair { path, hunk, what })
            .collect(),
        ..PatchResult::default()
    };
    let changes = if dry_run {
        FileChanges::default()
    } else {
        FileChanges::from(&result)
    };
    Ok(with_result(&changes, axum::Json(result)).into_response())
}

fn apply(files: &mut StoredFiles, patch: &Patch<'_>, dry_run: bool) -> ApiResult<Vec<PatchedFile>> {
    let Ok(plan) = plan(&Stored(files), patch) else {
        return Err(ApiError::new(ErrorCode::TooLarge, "the patch is too large"));
    };
    if !plan.rejects.is_empty() {
        return Err(ApiError::new(
            ErrorCode::PatchRejected,
            format!("the patch does not apply: {:?}", plan.rejects),
        ));
    }
    for (location, entry) in plan.entries.into_iter().filter(|_| !dry_run) {
        match entry.now {
            Some(File { kind, bytes }) => {
                let mode = if let Kind::Regular(mode) = kind {
                    mode
                } else {
                    0o777
                };
                files.insert(key(&location), (bytes, mode));
            }
            None => drop(files.remove(&key(&location))),
        }
    }
    Ok(plan.effects.into_iter().map(patched).collect())
}

fn patched(effect: FileEffect) -> PatchedFile {
    let text = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
    PatchedFile {
        path: text(&effect.path),
        path_b64: None,
        operation: match effect.operation {
            Operation::Create => PatchOperation::Create,
            Operation::Modify => PatchOperation::Modify,
            Operation::Delete => PatchOperation::Delete,
            Operation::Rename => PatchOperation::Rename,
            Operation::Copy => PatchOperation::Copy,
        },
        sha256_before: effect.digest_before,
        sha256_after: effect.digest_after,
        from: effect.from.as_deref().map(text),
        from_b64: None,
    }
}

//! Files of a session, stored by path, and the changes that each call reports.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{Path, State},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use cynode_api::{
    EditRequest, ErrorCode, FileChange, FileChanges, FileEdited, FileType, FileWritten, Flags,
};
use cynode_service::{ApiError, JsonBody, QueryParams};
use cynode_worker::{calls::with_result, edit::Edit};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::{Shared, run::absolute, sessions::ApiResult};

pub(super) fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route(
            "/v1/worker/sessions/{id}/files",
            get(read).head(read).put(write).delete(delete),
        )
        .route("/v1/worker/sessions/{id}/files:edit", post(edit))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileQuery {
    path: String,
    #[serde(default)]
    recursive: bool,
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn etag(sha256: &str) -> String {
    format!("\"sha256:{sha256}\"")
}

/// Reports whether the path is a directory, that is, whether any file lies below it.
fn is_directory(files: &BTreeMap<String, (Vec<u8>, u32)>, path: &str) -> bool {
    files.keys().any(|file| {
        file.strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('/'))
    })
}

async fn read(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    QueryParams(query): QueryParams<FileQuery>,
) -> ApiResult<Response> {
    let (_, files) = shared.state().live(&text)?;
    let (path, files) = (absolute(&query.path), files.lock().expect("not poisoned"));
    if is_directory(&files, &path) {
        return Err(ApiError::new(
            ErrorCode::NotAFile,
            format!("{path} is a directory"),
        ));
    }
    let (bytes, mode) = files
        .get(&path)
        .ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("{path} is not there")))?;
    let sha256 = sha256(bytes);
    let headers = [
        ("etag", etag(&sha256)),
        ("x-content-sha256", sha256),
        ("x-mode", format!("{mode:04o}")),
        ("x-type", "file".to_owned()),
    ];
    Ok((headers, bytes.clone()).into_response())
}

async fn write(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<FileQuery>,
    body: Bytes,
) -> ApiResult<Response> {
    let (_, files) = shared.state().live(&text)?;
    let (path, mut files) = (absolute(&query.path), files.lock().expect("not poisoned"));
    let current = files.get(&path).map(|(bytes, mode)| (sha256(bytes), *mode));
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let expected = header("if-match").is_none_or(|tag| {
        current
            .as_ref()
            .is_some_and(|(current, _)| etag(current) == tag)
    });
    if !expected || (header("if-none-match").is_some() && current.is_some()) {
        return Err(ApiError::new(
            ErrorCode::PreconditionFailed,
            format!("{path} is not what was expected"),
        ));
    }
    let (sha256_before, old_mode) = current.unzip();
    let mode = header("x-mode")
        .and_then(|mode| u32::from_str_radix(mode, 8).ok())
        .or(old_mode)
        .unwrap_or(0o644);
    let (status, sha256) = (
        if old_mode.is_some() {
            StatusCode::OK
        } else {
            StatusCode::CREATED
        },
        sha256(&body),
    );
    let size = body.len() as u64;
    files.insert(path, (body.to_vec(), mode));
    let change = FileChange::new(query.path.as_bytes())
        .before(sha256_before.clone())
        .after(Some(sha256.clone()));
    let tag = etag(&sha256);
    let written = FileWritten {
        sha256,
        size,
        mode: format!("{mode:04o}"),
        created: old_mode.is_none(),
        sha256_before,
        flags: Flags::default(),
    };
    Ok(with_result(
        &FileChanges::from_iter([change]),
        (status, [("etag", tag)], Json(written)),
    ))
}

async fn edit(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    JsonBody(request): JsonBody<EditRequest>,
) -> ApiResult<Response> {
    let (_, files) = shared.state().live(&text)?;
    let (path, mut files) = (absolute(&request.path), files.lock().expect("not poisoned"));
    let missing = || ApiError::new(ErrorCode::NotFound, format!("{path} is not there"));
    let (bytes, _) = files.get_mut(&path).ok_or_else(missing)?;
    let sha256_before = sha256(bytes);
    if request
        .if_match
        .is_some_and(|expected| expected != sha256_before)
    {
        return Err(ApiError::new(
            ErrorCode::PreconditionFailed,
            format!("{path} is not what was expected"),
        ));
    }
    let edit = Edit::plan(bytes, &request.old, &request.new, request.all)?;
    let (replaced, edited) = (edit.replaced, edit.pieces().collect::<Vec<_>>().concat());
    *bytes = edited;
    let sha256 = sha256(bytes);
    let change = FileChange::new(request.path.as_bytes())
        .before(Some(sha256_before.clone()))
        .after(Some(sha256.clone()));
    let edited = FileEdited {
        sha256,
        size: bytes.len() as u64,
        replaced,
        sha256_before: Some(sha256_before),
        flags: Flags::default(),
    };
    Ok(with_result(&FileChanges::from_iter([change]), Json(edited)))
}

async fn delete(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    QueryParams(query): QueryParams<FileQuery>,
) -> ApiResult<Response> {
    let (_, files) = shared.state().live(&text)?;
    let (path, mut files) = (absolute(&query.path), files.lock().expect("not poisoned"));
    let (below, change) = (format!("{path}/"), FileChange::new(query.path.as_bytes()));
    let change = if is_directory(&files, &path) {
        if !query.recursive {
            return Err(ApiError::new(
                ErrorCode::NotEmpty,
                format!("{path} is not empty"),
            ));
        }
        files.retain(|file, _| !file.starts_with(&below));
        change.of_kind(FileType::Dir)
    } else {
        let (bytes, _) = files
            .remove(&path)
            .ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("{path} is not there")))?;
        change.before(Some(sha256(&bytes)))
    };
    Ok(with_result(
        &FileChanges::from_iter([change]),
        StatusCode::NO_CONTENT,
    ))
}

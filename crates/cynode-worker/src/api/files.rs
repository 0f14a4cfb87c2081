//! File routes. The agent performs every operation inside the sandbox, with the sandbox's
//! privileges.

use std::{ops::RangeInclusive, time::Duration};

use axum::{
    Json,
    body::{Body, Bytes},
    extract::State,
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{
    Base64Bytes, ErrorCode, ExportFormat, ExportRequest, FileChange, FileChanges, FileType,
    FileWritten, Flags, ListRequest, ListResult, MkdirRequest, MoveRequest, Problem, SearchRequest,
    SearchResult, SessionId,
    file_limits::{
        MAX_CONTEXT_LINES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH_BYTES, MAX_PATTERN_BYTES,
        MAX_PUT_BYTES, MAX_RESULTS, SEARCH_MS,
    },
};
use cynode_sba_proto::{BROUGHT, BROUGHT_NOTHING, FileOp, FileStat, Frame, Reply, Request};
use cynode_service::{ApiError, JsonBody, QueryParams, body};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use utoipa::IntoParams;

use super::{Api, sessions::Id};
use crate::{
    calls::with_result,
    sandbox::{
        Channel, REPLY_TIMEOUT, changes_of_request, is_sha256, unavailable, unexpected,
        validate_changes,
    },
    sessions::{Activity, check_version},
};

/// How long the agent may take to hash or pack before it sends the first byte.
pub(super) const FILE_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FileQuery {
    /// Relative paths start at `/workspace`.
    path: Option<String>,
    /// A path that is not UTF-8, in base64.
    path_b64: Option<String>,
    /// For DELETE: removes a directory with its contents.
    #[serde(default)]
    recursive: bool,
}

impl FileQuery {
    fn path(&self) -> Result<Base64Bytes, ApiError> {
        match (&self.path, &self.path_b64) {
            (Some(path), None) => check_path(path.clone().into_bytes(), "path"),
            (None, Some(path)) => check_path(
                STANDARD
                    .decode(path)
                    .map_err(|error| ApiError::invalid(format!("path_b64: not base64: {error}")))?,
                "path_b64",
            ),
            (None, None) => Err(ApiError::invalid("path: is required")),
            (Some(_), Some(_)) => Err(ApiError::invalid(
                "path and path_b64 are mutually exclusive",
            )),
        }
    }
}

pub(super) fn check_path(path: Vec<u8>, field: &str) -> Result<Base64Bytes, ApiError> {
    if path.is_empty() || path.len() > MAX_PATH_BYTES || path.contains(&0) {
        return Err(ApiError::invalid(format!(
            "{field}: must have 1 to {MAX_PATH_BYTES} bytes and no NUL"
        )));
    }
    Ok(Base64Bytes(path))
}

pub(super) fn check_text_path(path: &str, field: &str) -> Result<Base64Bytes, ApiError> {
    check_path(path.as_bytes().to_vec(), field)
}

pub(super) fn check_range(
    value: Option<u32>,
    range: RangeInclusive<u32>,
    field: &str,
) -> Result<(), ApiError> {
    match value {
        Some(value) if !range.contains(&value) => Err(ApiError::invalid(format!(
            "{field}: must be between {} and {}",
            range.start(),
            range.end()
        ))),
        _ => Ok(()),
    }
}

/// Starts an operation on a session. The session counts as active while the guard lives.
pub(super) async fn open(
    api: &Api,
    id: SessionId,
    op: FileOp,
) -> Result<(Channel, Activity), ApiError> {
    let (_, live) = api.sessions.live(id)?;
    if matches!(
        op,
        FileOp::Write { .. } | FileOp::Patch { dry_run: false, .. } | FileOp::Import { .. }
    ) {
        api.sessions.check_room_for_work()?;
    }
    let activity = live.activity();
    let channel = live
        .link()?
        .open(&Request::File { op })
        .await
        .map_err(unavailable)?;
    Ok((channel, activity))
}

async fn change(api: &Api, id: SessionId, op: FileOp) -> Result<Response, ApiError> {
    let expected = changes_of_request(&op);
    let (mut channel, _activity) = open(api, id, op).await?;
    match channel.reply(FILE_TIMEOUT).await? {
        Reply::Ok { changed } => Ok(with_result(
            &changed.map_or(expected, validate_changes),
            StatusCode::NO_CONTENT,
        )),
        other => Err(unexpected(&format!("{other:?}"))),
    }
}

pub(super) async fn stat_of(
    api: &Api,
    id: SessionId,
    op: FileOp,
) -> Result<(FileStat, Channel, Activity), ApiError> {
    let (mut channel, activity) = open(api, id, op).await?;
    match channel.reply(FILE_TIMEOUT).await? {
        Reply::Stat(stat) => Ok((stat, channel, activity)),
        other => Err(unexpected(&format!("{other:?}"))),
    }
}

fn file_headers(stat: &FileStat) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut insert = |name: http::HeaderName, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    };
    if let Some(sha256) = stat.sha256.as_ref().filter(|sha256| is_sha256(sha256)) {
        insert(header::ETAG, format!("\"sha256:{sha256}\""));
        insert(
            http::HeaderName::from_static("x-content-sha256"),
            sha256.clone(),
        );
    }
    insert(
        http::HeaderName::from_static("x-mode"),
        format!("{:04o}", stat.mode & 0o7777),
    );
    let kind = match stat.kind {
        FileType::File => "file",
        FileType::Dir => "dir",
        FileType::Symlink => "symlink",
        FileType::Other => "other",
    };
    insert(http::HeaderName::from_static("x-type"), kind.to_owned());
    if let Ok(at) = time::OffsetDateTime::from_unix_timestamp(stat.mtime) {
        let format = time::macros::format_description!(
            "[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT"
        );
        insert(
            header::LAST_MODIFIED,
            at.format(&format).unwrap_or_default(),
        );
    }
    insert(header::ACCEPT_RANGES, "bytes".to_owned());
    headers
}

/// One range of bytes: a start with an optional end, or a suffix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ByteRange {
    From(u64, Option<u64>),
    Last(u64),
}

/// Parses a `Range` header with one range. Others are ignored, as the standard allows.
fn parse_range(headers: &HeaderMap) -> Option<ByteRange> {
    let text = headers
        .get(header::RANGE)?
        .to_str()
        .ok()?
        .strip_prefix("bytes=")?
        .trim();
    // Digits only: the integer parser would accept a sign.
    if !text
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'-' || byte == b' ')
    {
        return None;
    }
    let (start, end) = text.split_once('-')?;
    match (start.trim(), end.trim()) {
        ("", last) => last.parse().ok().map(ByteRange::Last),
        (start, "") => Some(ByteRange::From(start.parse().ok()?, None)),
        (start, end) => {
            let (start, end): (u64, u64) = (start.parse().ok()?, end.parse().ok()?);
            (start <= end).then_some(ByteRange::From(start, Some(end)))
        }
    }
}

/// Read a file or a range of it. A range of a file over 64 MiB has no ETag and no X-Content-SHA256:
/// they cover the whole file, which would have to be read first.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/files", tag = "files",
    params(("id" = SessionId, Path), FileQuery),
    responses(
        (status = 200, content_type = "application/octet-stream", body = Vec<u8>),
        (status = 206, content_type = "application/octet-stream", body = Vec<u8>),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn read(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<FileQuery>,
) -> Result<Response, ApiError> {
    let path = query.path()?;
    let range = parse_range(&headers);
    let (start, end) = match range {
        None => (0, None),
        // Always with an end: that is how the agent recognizes a range.
        Some(ByteRange::From(start, end)) => (
            start,
            Some(end.map_or(u64::MAX, |end| end.saturating_add(1))),
        ),
        Some(ByteRange::Last(count)) => {
            let (stat, ..) = stat_of(
                &api,
                id,
                FileOp::Stat {
                    path: path.clone(),
                    hash: false,
                },
            )
            .await?;
            if count == 0 {
                return Err(ApiError::new(
                    ErrorCode::RangeNotSatisfiable,
                    "the range is empty",
                ));
            }
            (stat.size.saturating_sub(count), Some(u64::MAX))
        }
    };
    let (stat, channel, activity) = stat_of(&api, id, FileOp::Read { path, start, end }).await?;
    if range.is_some() && stat.size == 0 {
        return Err(ApiError::new(
            ErrorCode::RangeNotSatisfiable,
            "the file is empty",
        ));
    }
    let end = end.unwrap_or(stat.size).min(stat.size);
    let mut response_headers = file_headers(&stat);
    response_headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    response_headers.insert(
        header::CONTENT_LENGTH,
        HeaderValue::from(end.saturating_sub(start)),
    );
    let status = if range.is_some() {
        if let Ok(value) = HeaderValue::from_str(&format!(
            "bytes {start}-{}/{}",
            end.saturating_sub(1),
            stat.size
        )) {
            response_headers.insert(header::CONTENT_RANGE, value);
        }
        StatusCode::PARTIAL_CONTENT
    } else {
        StatusCode::OK
    };
    Ok((status, response_headers, body_of(channel, activity)).into_response())
}

/// Streams the rest of a channel as a body. A failure breaks the connection, so that the body can't
/// be mistaken for complete.
fn body_of(channel: Channel, activity: Activity) -> Body {
    Body::from_stream(stream::unfold(Some((channel, activity)), async |state| {
        let (mut channel, activity) = state?;
        match channel.data(FILE_TIMEOUT).await {
            Ok(Some(piece)) => Some((Ok(Bytes::from(piece)), Some((channel, activity)))),
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(error = %error, "A file transfer was interrupted.");
                Some((Err(std::io::Error::other(error.to_string())), None))
            }
        }
    }))
}

/// Stat a file or directory; the hash of a file up to 100 MiB is in the ETag.
#[utoipa::path(head, path = "/v1/worker/sessions/{id}/files", tag = "files",
    params(("id" = SessionId, Path), FileQuery),
    responses((status = 200), (status = "default")))]
pub(super) async fn stat(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    QueryParams(query): QueryParams<FileQuery>,
) -> Result<Response, ApiError> {
    let (stat, ..) = stat_of(
        &api,
        id,
        FileOp::Stat {
            path: query.path()?,
            hash: true,
        },
    )
    .await?;
    let mut headers = file_headers(&stat);
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(stat.size));
    Ok((StatusCode::OK, headers).into_response())
}

/// The content hashes that `If-Match` accepts; `*` matches any.
fn if_match(headers: &HeaderMap) -> Result<Option<Vec<String>>, ApiError> {
    let mut allowed = Vec::new();
    for value in headers.get_all(header::IF_MATCH) {
        for tag in value
            .to_str()
            .map_err(|_| ApiError::invalid("If-Match: is not text"))?
            .split(',')
        {
            let tag = tag.trim();
            match tag
                .strip_prefix('"')
                .and_then(|tag| tag.strip_suffix('"'))
                .and_then(|tag| tag.strip_prefix("sha256:"))
            {
                Some(sha256) if is_sha256(sha256) => allowed.push(sha256.to_ascii_lowercase()),
                _ if tag == "*" => allowed.push("*".to_owned()),
                // A foreign tag matches nothing.
                _ => allowed.push("-".to_owned()),
            }
        }
    }
    Ok((!allowed.is_empty()).then_some(allowed))
}

/// Write a file atomically, creating parent directories. `X-Mode` sets its permissions;
/// `X-Content-SHA256` is verified.
#[utoipa::path(put, path = "/v1/worker/sessions/{id}/files", tag = "files",
    params(("id" = SessionId, Path), FileQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses(
        (status = 201, body = FileWritten),
        (status = 200, body = FileWritten),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn write(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<FileQuery>,
    body: Body,
) -> Result<Response, ApiError> {
    let path = query.path()?;
    let too_large = || {
        ApiError::new(
            ErrorCode::TooLarge,
            format!("the file exceeds {MAX_PUT_BYTES} bytes"),
        )
    };
    let length = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.parse::<u64>().ok());
    if length.is_some_and(|length| length > MAX_PUT_BYTES) {
        return Err(too_large());
    }
    let mode =
        match headers.get("x-mode") {
            None => None,
            Some(value) => {
                // Digits only: the integer parser would accept a sign.
                let digits = value
                    .to_str()
                    .ok()
                    .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
                let mode = digits
                    .and_then(|text| u32::from_str_radix(text, 8).ok())
                    .filter(|mode| *mode <= 0o777);
                Some(mode.ok_or_else(|| {
                    ApiError::invalid("X-Mode: must be an octal number up to 0777")
                })?)
            }
        };
    let expected = match headers.get("x-content-sha256") {
        None => None,
        Some(value) => Some(
            value
                .to_str()
                .ok()
                .filter(|text| is_sha256(text))
                .map(str::to_ascii_lowercase)
                .ok_or_else(|| {
                    ApiError::invalid("X-Content-SHA256: must be 64 hexadecimal digits")
                })?,
        ),
    };
    let if_none_match = match headers.get(header::IF_NONE_MATCH) {
        None => false,
        Some(value) if value == "*" => true,
        Some(_) => {
            return Err(ApiError::invalid("If-None-Match: only '*' is supported"));
        }
    };
    let op = FileOp::Write {
        path: path.clone(),
        mode,
        if_match: if_match(&headers)?,
        if_none_match,
        max_bytes: MAX_PUT_BYTES,
    };
    let (mut channel, _activity) = open(&api, id, op).await?;
    let mut hash = Sha256::new();
    let mut total: u64 = 0;
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        // The agent changes nothing until the body is complete.
        let piece = piece.map_err(|error| body::problem(&error, "the body was interrupted"))?;
        total += piece.len() as u64;
        if total > MAX_PUT_BYTES {
            return Err(too_large());
        }
        hash.update(&piece);
        if let Err(error) = channel.send_data(&piece).await {
            return Err(channel.send_error(error).await);
        }
    }
    let sha256 = hex::encode(hash.finalize());
    if expected.is_some_and(|expected| expected != sha256) {
        return Err(ApiError::invalid(
            "X-Content-SHA256: does not match the body; nothing was written",
        ));
    }
    if let Err(error) = channel.send(&Frame::End).await {
        return Err(channel.send_error(error).await);
    }
    match channel.reply(FILE_TIMEOUT).await? {
        // The hash is known from the body: a reply with another one is not trusted.
        Reply::Written(written) if written.sha256 == sha256 => {
            let status = if written.created {
                StatusCode::CREATED
            } else {
                StatusCode::OK
            };
            let etag = format!("\"sha256:{sha256}\"");
            let sha256_before = written.sha256_before.filter(|sha256| is_sha256(sha256));
            let change = FileChange::new(&path.0)
                .before(sha256_before.clone())
                .after(Some(sha256.clone()));
            let body = FileWritten {
                sha256,
                size: written.size,
                mode: format!("{:04o}", written.mode & 0o7777),
                created: written.created,
                sha256_before,
                flags: Flags::default(),
            };
            Ok(with_result(
                &FileChanges::from_iter([change]),
                (status, [(header::ETAG, etag)], Json(body)),
            ))
        }
        other => Err(unexpected(&format!("{other:?}"))),
    }
}

/// Delete a file, or a directory.
#[utoipa::path(delete, path = "/v1/worker/sessions/{id}/files", tag = "files",
    params(("id" = SessionId, Path), FileQuery),
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn delete(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<FileQuery>,
) -> Result<Response, ApiError> {
    change(
        &api,
        id,
        FileOp::Delete {
            path: query.path()?,
            recursive: query.recursive,
            if_match: if_match(&headers)?,
        },
    )
    .await
}

/// List a directory.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/files:list", tag = "files",
    params(("id" = SessionId, Path)), request_body = ListRequest,
    responses(
        (status = 200, body = ListResult),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<ListRequest>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    match (&request.path, &request.path_b64) {
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "path and path_b64 are mutually exclusive",
            ));
        }
        (Some(path), None) => drop(check_text_path(path, "path")?),
        (None, Some(path)) => drop(check_path(path.0.clone(), "path_b64")?),
        (None, None) => {}
    }
    check_range(request.depth, 1..=MAX_DEPTH, "depth")?;
    check_range(request.max_entries, 1..=MAX_ENTRIES, "max_entries")?;
    let (mut channel, _activity) = open(&api, id, FileOp::List { request }).await?;
    Ok(channel
        .body::<ListResult>(FILE_TIMEOUT, &api.sessions.config.directory())
        .await?
        .into_response()
        .await)
}

/// Search files with a regular expression, for at most 10 s.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/files:search", tag = "files",
    params(("id" = SessionId, Path)), request_body = SearchRequest,
    responses(
        (status = 200, body = SearchResult),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn search(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<SearchRequest>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    if request.pattern.is_empty()
        || request.pattern.len() > MAX_PATTERN_BYTES
        || request
            .glob
            .as_ref()
            .is_some_and(|glob| glob.len() > MAX_PATTERN_BYTES)
    {
        return Err(ApiError::invalid(format!(
            "pattern and glob: must have 1 to {MAX_PATTERN_BYTES} bytes each"
        )));
    }
    if let Some(path) = &request.path {
        check_text_path(path, "path")?;
    }
    check_range(
        request.context_lines,
        0..=MAX_CONTEXT_LINES,
        "context_lines",
    )?;
    check_range(request.max_results, 1..=MAX_RESULTS, "max_results")?;
    let (mut channel, _activity) = open(&api, id, FileOp::Search { request }).await?;
    let timeout = Duration::from_millis(SEARCH_MS) + REPLY_TIMEOUT;
    Ok(channel
        .body::<SearchResult>(timeout, &api.sessions.config.directory())
        .await?
        .into_response()
        .await)
}

/// Move a file or directory.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/files:move", tag = "files",
    params(("id" = SessionId, Path)), request_body = MoveRequest,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn rename(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<MoveRequest>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    let (from, to) = (
        check_text_path(&request.from, "from")?,
        check_text_path(&request.to, "to")?,
    );
    change(
        &api,
        id,
        FileOp::Move {
            from,
            to,
            overwrite: request.overwrite,
        },
    )
    .await
}

/// Create a directory.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/files:mkdir", tag = "files",
    params(("id" = SessionId, Path)), request_body = MkdirRequest,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn mkdir(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<MkdirRequest>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    change(
        &api,
        id,
        FileOp::Mkdir {
            path: check_text_path(&request.path, "path")?,
            parents: request.parents,
        },
    )
    .await
}

/// Export the workspace's changes as a git patch, or a directory as a tar archive.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/export", tag = "files",
    params(("id" = SessionId, Path)), request_body = ExportRequest,
    responses(
        (status = 200, content((Vec<u8> = "application/x-tar"), (Vec<u8> = "text/x-diff"))),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn export(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<ExportRequest>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    let (op, kind) = match request.format {
        ExportFormat::Tar if request.base.is_some() => {
            return Err(ApiError::invalid("base: applies only to format patch"));
        }
        ExportFormat::Tar => (
            FileOp::ExportTar {
                path: check_text_path(request.path.as_deref().unwrap_or("."), "path")?,
            },
            "application/x-tar",
        ),
        ExportFormat::Patch if request.path.is_some() => {
            return Err(ApiError::invalid("path: applies only to format tar"));
        }
        ExportFormat::Patch => {
            let base = match request.base {
                // Only the record of the session tells this from a snapshot that was not taken.
                Some(base) if base == BROUGHT && api.sessions.get(id)?.began_empty() => {
                    Some(BROUGHT_NOTHING.to_owned())
                }
                base => base,
            };
            (FileOp::ExportPatch { base }, "text/x-diff")
        }
    };
    let (mut channel, activity) = open(&api, id, op).await?;
    match channel.reply(FILE_TIMEOUT).await? {
        Reply::Body => {
            Ok(([(header::CONTENT_TYPE, kind)], body_of(channel, activity)).into_response())
        }
        other => Err(unexpected(&format!("{other:?}"))),
    }
}

/// Unpack a tar archive into a directory, which is created if it is missing.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/import", tag = "files",
    params(("id" = SessionId, Path), FileQuery),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn import(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    QueryParams(query): QueryParams<FileQuery>,
    body: Body,
) -> Result<Response, ApiError> {
    let op = FileOp::Import {
        path: query.path()?,
    };
    let expected = changes_of_request(&op);
    let (mut channel, _activity) = open(&api, id, op).await?;
    let interrupted = |error| {
        body::problem(
            &error,
            "the body was interrupted; the part received may have been unpacked",
        )
    };
    let changed = channel
        .import(body.into_data_stream().map_err(interrupted))
        .await?;
    Ok(with_result(
        &changed.unwrap_or(expected),
        StatusCode::NO_CONTENT,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Option<ByteRange> {
        parse_range(&HeaderMap::from_iter([(
            header::RANGE,
            HeaderValue::from_str(text).expect("a header"),
        )]))
    }

    #[test]
    fn ranges_are_parsed_as_the_standard_defines_them() {
        assert_eq!(range("bytes=0-9"), Some(ByteRange::From(0, Some(9))));
        assert_eq!(range("bytes=5-"), Some(ByteRange::From(5, None)));
        assert_eq!(range("bytes=-3"), Some(ByteRange::Last(3)));
        assert_eq!(range("bytes=9-3"), None);
        assert_eq!(range("lines=1-2"), None);
        assert_eq!(range("bytes=0-1,4-5"), None);
        for signed in [
            "bytes=+1-+2",
            "bytes=+1-",
            "bytes=-+3",
            "bytes=1-+2",
            "bytes=--3",
        ] {
            assert_eq!(range(signed), None, "{signed}");
        }
    }

    #[test]
    fn a_foreign_etag_matches_nothing() {
        let headers = HeaderMap::from_iter([(
            header::IF_MATCH,
            HeaderValue::from_static("W/\"abc\", \"x\""),
        )]);
        assert_eq!(
            if_match(&headers).expect("text"),
            Some(vec!["-".to_owned(), "-".to_owned()])
        );
    }
}

//! `files:patch`: applies a patch in the sandbox.
//!
//! An orchestrator sends a patch that its gate has parsed and encoded. Other callers send text in
//! any form, which is parsed here. The agent gets encoded patches only, so it never reads another
//! patch than the one that was checked.

use axum::{
    body::Bytes,
    extract::{FromRequest as _, FromRequestParts as _, Request, State},
    response::Response,
};
use cynode_api::{
    ENCODED_PATCH, ErrorCode, FileChanges, PatchRepair, PatchRequest, PatchResult, Problem,
    SessionId,
    file_limits::{DEFAULT_STRIP, MAX_PATCH_BYTES, MAX_STRIP},
};
use cynode_patch::{MAX_WIRE_BYTES, Patch, Repair, WIRE_VERSION};
use cynode_sba_proto::{FileOp, Frame};
use cynode_service::{ApiError, JsonBody, QueryParams, compute, edge::RawBytes};
use http::header;
use serde::Deserialize;

use super::{
    Api,
    files::{FILE_TIMEOUT, check_range, open},
    sessions::Id,
};
use crate::{calls::with_result, sandbox::validate_changes, sessions::check_version};

/// Apply a patch to the workspace, completely or not at all. An orchestrator sends the patch
/// encoded, with `dry_run` as a parameter.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/files:patch", tag = "files",
    params(("id" = SessionId, Path), ("dry_run" = Option<bool>, Query)),
    request_body(content((PatchRequest = "application/json"), (Vec<u8> = "application/vnd.cynode.patch"))),
    responses(
        (status = 200, body = PatchResult),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn patch(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    request: Request,
) -> Result<Response, ApiError> {
    let patch = EncodedPatch::read(request).await?;
    let op = FileOp::Patch {
        strip: 0,
        dry_run: patch.dry_run,
        encoded: true,
    };
    let (mut channel, _activity) = open(&api, id, op).await?;
    let reads = channel.encoded_patches();
    compute::run(patch.bytes.len(), || check_agent(&patch.bytes, reads)).await?;
    let sent = match channel.send_data(&patch.bytes).await {
        Ok(()) => channel.send(&Frame::End).await,
        Err(error) => Err(error),
    };
    if let Err(error) = sent {
        return Err(channel.send_error(error).await);
    }
    let EncodedPatch {
        dry_run, repaired, ..
    } = patch;
    let directory = api.sessions.config.directory();
    let mut result = channel
        .body::<PatchResult>(FILE_TIMEOUT, &directory)
        .await
        .map_err(|error| with_repairs(error, &repaired))?;
    let changes = if dry_run {
        FileChanges::default()
    } else {
        validate_changes(FileChanges::from(&result.value))
    };
    // Not the agent's to say: it gets the patch without mistakes.
    result.value.repaired = repaired;
    Ok(with_result(&changes, result.into_response().await))
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PatchQuery {
    #[serde(default)]
    dry_run: bool,
}

/// A patch as the agent gets it.
#[derive(Debug)]
struct EncodedPatch {
    bytes: Bytes,
    dry_run: bool,
    /// The hunks of a text that were read in another way than they are written.
    repaired: Vec<PatchRepair>,
    /// Holds the permit for the size of the bytes.
    _raw: Option<RawBytes>,
}

impl EncodedPatch {
    async fn read(request: Request) -> Result<Self, ApiError> {
        let kind = request.headers().get(header::CONTENT_TYPE);
        if kind.is_none_or(|kind| kind.as_bytes() != ENCODED_PATCH.as_bytes()) {
            let JsonBody(request) = JsonBody::<PatchRequest>::from_request(request, &()).await?;
            return Self::of_text(request).await;
        }
        let (mut parts, body) = request.into_parts();
        let QueryParams(PatchQuery { dry_run }) =
            QueryParams::from_request_parts(&mut parts, &()).await?;
        let raw = RawBytes::read(Request::from_parts(parts, body), MAX_WIRE_BYTES).await?;
        Ok(Self {
            bytes: raw.bytes.clone(),
            dry_run,
            repaired: Vec::new(),
            _raw: Some(raw),
        })
    }

    /// Parses a text as an orchestrator would.
    async fn of_text(request: PatchRequest) -> Result<Self, ApiError> {
        check_version(request.version)?;
        let size = request.diff.len();
        if size as u64 > MAX_PATCH_BYTES {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("diff: more than {MAX_PATCH_BYTES} bytes"),
            ));
        }
        check_range(request.strip, 0..=MAX_STRIP, "strip")?;
        let strip = request.strip.unwrap_or(DEFAULT_STRIP);
        let encode = || {
            let (patch, repairs) = Patch::parse_any(request.diff.as_bytes(), strip)?;
            Ok((patch.to_wire()?, repairs))
        };
        let invalid =
            |error: cynode_patch::Error| ApiError::invalid(format!("the diff is invalid: {error}"));
        let (bytes, repairs) = compute::run(size, encode).await.map_err(invalid)?;
        let repaired = repairs.into_iter();
        Ok(Self {
            bytes: bytes.into(),
            dry_run: request.dry_run,
            repaired: repaired
                .map(|Repair { path, hunk, what }| PatchRepair { path, hunk, what })
                .collect(),
            _raw: None,
        })
    }
}

/// Refuses a patch that an agent would take for an invalid diff. `reads` is the newest version of
/// encoded patches that it reads, 0 for diffs only.
fn check_agent(patch: &[u8], reads: u32) -> Result<(), ApiError> {
    let needs_extensions = || Patch::from_wire(patch).is_ok_and(|patch| patch.needs_extensions());
    if reads >= WIRE_VERSION || !needs_extensions() {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorCode::AgentOutdated,
        "the agent of this session reads unified diffs with line numbers only",
    ))
}

/// A rejection, with what was repaired: it explains the hunks that were tried.
fn with_repairs(error: ApiError, repaired: &[PatchRepair]) -> ApiError {
    if repaired.is_empty() || !error.is(ErrorCode::PatchRejected) {
        return error;
    }
    error.with(
        "repaired",
        serde_json::to_value(repaired).unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_of_an_earlier_version_gets_diffs_only() {
        let diff = b"cynode-patch 1\n--- \"x\"\n+++ \"x\"\n@@ -1,1 +1,1 @@\n-a\n+b\n";
        let unique = b"cynode-patch 1\n--- \"x\"\n+++ \"x\"\n@@ unique -1 +1 @@\n-a\n+b\n";
        let deletion = b"cynode-patch 1\ndiff --git \"x\" \"x\"\ndeleted file any content\n";
        for patch in [&unique[..], deletion] {
            let error = check_agent(patch, 0).expect_err("refused");
            assert!(error.is(ErrorCode::AgentOutdated), "{error}");
            assert!(check_agent(patch, WIRE_VERSION).is_ok());
        }
        assert!(check_agent(diff, 0).is_ok());
        // The agent says what is wrong with it.
        assert!(check_agent(b"no patch", 0).is_ok());
    }

    #[tokio::test]
    async fn a_text_becomes_the_patch_that_the_agent_gets() {
        let of = async |diff: &str| {
            let request = PatchRequest {
                diff: diff.to_owned(),
                ..PatchRequest::default()
            };
            EncodedPatch::of_text(request).await
        };
        let patch = of("--- a/x\n+++ b/x\n@@ @@\n-a\n+b\n").await.expect("read");
        assert_eq!(
            &patch.bytes[..],
            b"cynode-patch 1\n--- \"x\"\n+++ \"x\"\n@@ unique -1 +1 @@\n-a\n+b\n"
        );
        assert_eq!(patch.repaired.len(), 1);
        let error = of("no diff").await.expect_err("refused");
        assert!(error.detail.starts_with("the diff is invalid: "), "{error}");
    }
}

//! Patches on their way to a node: what the gate has admitted, never the caller's text.

use axum::body::Bytes;
use cynode_api::{ENCODED_PATCH, ErrorCode, PatchRequest, file_limits::MAX_STRIP};
use cynode_patch::WIRE_VERSION;
use cynode_service::{ApiError, edge};
use http::HeaderValue;

use super::check_version;
use crate::gate::AdmittedPatch;

/// The body of a patch call to a node.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OutgoingPatch {
    pub(super) body: Bytes,
    pub(super) media_type: HeaderValue,
    pub(super) query: Option<String>,
}

/// The body for a node that reads encoded patches up to the version `reads`. Older nodes read the
/// encoded patch as a diff without leading components in its names, if it is one.
pub(super) fn outgoing(
    request: &PatchRequest,
    patch: Option<AdmittedPatch>,
    reads: Option<u32>,
) -> Result<OutgoingPatch, ApiError> {
    check_version(request.version)?;
    if request.strip.is_some_and(|strip| strip > MAX_STRIP) {
        return Err(ApiError::invalid(format!(
            "strip: must be between 0 and {MAX_STRIP}"
        )));
    }
    let missing = || ApiError::new(ErrorCode::Internal, "the gate has admitted no patch");
    let AdmittedPatch {
        encoded,
        needs_extensions,
    } = patch.ok_or_else(missing)?;
    if reads.is_some_and(|version| version >= WIRE_VERSION) {
        return Ok(OutgoingPatch {
            body: encoded,
            media_type: HeaderValue::from_static(ENCODED_PATCH),
            query: request.dry_run.then(|| "dry_run=true".to_owned()),
        });
    }
    if needs_extensions {
        return Err(ApiError::new(
            ErrorCode::AgentOutdated,
            "the node of this session reads unified diffs with line numbers only",
        ));
    }
    let unreadable = || ApiError::invalid("diff: is not UTF-8");
    let diff = String::from_utf8(encoded.into()).map_err(|_| unreadable())?;
    let body = serde_json::to_vec(&PatchRequest {
        diff,
        strip: Some(0),
        dry_run: request.dry_run,
        ..PatchRequest::default()
    })
    .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
    if body.len() > edge::MAX_BODY {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!(
                "diff: takes {} bytes with complete names, and the node of this session accepts {}",
                body.len(),
                edge::MAX_BODY
            ),
        ));
    }
    Ok(OutgoingPatch {
        body: body.into(),
        media_type: HeaderValue::from_static("application/json"),
        query: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIFF: &str = "cynode-patch 1\n--- \"d/x\"\n+++ \"d/x\"\n@@ -1,1 +1,1 @@\n-a\n+b\n";

    fn patch(encoded: &str, needs_extensions: bool) -> AdmittedPatch {
        AdmittedPatch {
            encoded: Bytes::copy_from_slice(encoded.as_bytes()),
            needs_extensions,
        }
    }

    fn request(dry_run: bool) -> PatchRequest {
        PatchRequest {
            diff: "the caller's text".to_owned(),
            strip: Some(3),
            dry_run,
            ..PatchRequest::default()
        }
    }

    #[test]
    fn a_node_gets_the_encoded_patch_or_the_same_as_a_diff() {
        for dry_run in [false, true] {
            let new = outgoing(
                &request(dry_run),
                Some(patch(DIFF, true)),
                Some(WIRE_VERSION),
            )
            .expect("encoded");
            assert_eq!(
                (&new.body[..], new.media_type.to_str().ok(), new.query),
                (
                    DIFF.as_bytes(),
                    Some(ENCODED_PATCH),
                    dry_run.then(|| "dry_run=true".to_owned())
                )
            );
            let old = outgoing(&request(dry_run), Some(patch(DIFF, false)), None).expect("a diff");
            let sent: PatchRequest = edge::parse(&old.body).expect("JSON");
            assert_eq!(
                (sent.diff.as_str(), sent.strip, sent.dry_run, old.query),
                (DIFF, Some(0), dry_run, None)
            );
            let read = cynode_patch::Patch::parse(sent.diff.as_bytes(), 0).expect("a diff");
            assert_eq!(read.paths().into_iter().collect::<Vec<_>>(), [b"d/x"]);
        }
        let error = outgoing(&request(false), Some(patch(DIFF, true)), None).expect_err("refused");
        assert!(error.is(ErrorCode::AgentOutdated), "{error}");
        let error = outgoing(&request(false), None, None).expect_err("refused");
        assert!(error.is(ErrorCode::Internal), "{error}");
    }

    #[test]
    fn a_patch_that_an_old_node_could_not_take_is_refused_here() {
        let json = |text: &str| serde_json::to_string(text).expect("JSON").len();
        let empty = r#"{"diff":,"strip":0}"#.len();
        let of = |size: usize| {
            let rest = size - empty - json(DIFF) - json("+\n") + 2;
            format!("{DIFF}+{}\n", "x".repeat(rest))
        };
        let most = outgoing(
            &request(false),
            Some(patch(&of(edge::MAX_BODY), false)),
            None,
        );
        assert_eq!(
            most.map(|patch| patch.body.len()).ok(),
            Some(edge::MAX_BODY)
        );
        let more = Some(patch(&of(edge::MAX_BODY + 1), false));
        let error = outgoing(&request(false), more.clone(), None).expect_err("refused");
        assert!(error.is(ErrorCode::TooLarge), "{error}");
        assert!(outgoing(&request(false), more, Some(WIRE_VERSION)).is_ok());
    }

    #[test]
    fn members_are_checked_before_anything_is_sent() {
        let with = |version, strip| {
            let request = PatchRequest {
                version,
                strip,
                ..request(false)
            };
            outgoing(&request, Some(patch(DIFF, false)), None).err()
        };
        assert!(with(Some(1), Some(MAX_STRIP)).is_none());
        let strip = with(None, Some(MAX_STRIP + 1)).expect("refused");
        assert!(strip.is(ErrorCode::InvalidRequest) && strip.detail.contains("strip"));
        assert!(with(Some(2), None).is_some_and(|error| error.is(ErrorCode::UnsupportedVersion)));
    }
}

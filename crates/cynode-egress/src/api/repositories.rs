//! Repositories on their way in: references and seeds.

use std::fmt::Write as _;

use axum::{
    Json,
    body::{Body, Bytes},
    extract::State,
    response::{IntoResponse as _, Response},
};
use cynode_api::{
    ErrorCode, GitResolve, GitResolved, GitSeed, SEED_NOTES_HEADER, SeedNotes, repository_limits,
};
use cynode_policy::CallContext;
use cynode_service::{ApiError, JsonBody};
use futures_util::stream;
use http::{HeaderName, HeaderValue, header};

use super::{Api, check_version, errors, to_the_end};
use crate::{
    audit::RoleAction,
    git::{
        change::ObjectId,
        resolve::branch_of,
        seed::{Seed, SeedRequest},
    },
};

pub(super) async fn resolve(
    State(api): State<Api>,
    JsonBody(request): JsonBody<GitResolve>,
) -> Result<Json<GitResolved>, ApiError> {
    check_version(request.version)?;
    to_the_end(async move { find(&api, &request).await })
        .await
        .map(Json)
}

async fn find(api: &Api, request: &GitResolve) -> Result<GitResolved, ApiError> {
    let reference = request.reference.as_deref();
    if reference.is_some_and(|reference| reference.len() > repository_limits::MAX_REF_BYTES) {
        return Err(ApiError::invalid(format!(
            "reference: must have at most {} bytes",
            repository_limits::MAX_REF_BYTES
        )));
    }
    let role = &api.role;
    let subject = [("reference", reference.unwrap_or("(default)"))];
    let mut operation = role
        .begin(
            &request.call,
            RoleAction::Fetch,
            &CallContext::default(),
            &subject,
        )
        .await?;
    let found = async {
        let opened = role.open(&operation).await?;
        role.mirrors
            .resolve(&opened.access, reference)
            .await
            .map_err(errors::repository)
    };
    let found = found.await;
    if let Ok(found) = &found {
        operation.note("commit", found.commit.to_string());
    }
    let found = role.end(&operation, found).await?;
    Ok(GitResolved {
        commit: found.commit.to_string(),
        reference: found.reference,
        default_branch: found.default_branch,
    })
}

pub(super) async fn seed(
    State(api): State<Api>,
    JsonBody(request): JsonBody<GitSeed>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    let seed = to_the_end(async move { build(&api, &request).await }).await?;
    let notes = HeaderValue::from_str(&ascii_json(&seed.notes)?)
        .map_err(|_| ApiError::new(ErrorCode::Internal, "the notes are no header"))?;
    // Ends with an error when the archive is not whole, which closes the connection early.
    let pieces = stream::unfold(seed.pieces, async |mut pieces| {
        pieces
            .recv()
            .await
            .map(|piece: std::io::Result<Bytes>| (piece, pieces))
    });
    let mut response = Body::from_stream(pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-tar"),
    );
    headers.insert(HeaderName::from_static(SEED_NOTES_HEADER), notes);
    Ok(response)
}

async fn build(api: &Api, request: &GitSeed) -> Result<Seed, ApiError> {
    let commit = ObjectId::parse(&request.commit)
        .ok_or_else(|| ApiError::invalid("commit: must be a whole id, in lower case"))?;
    let branch = branch_of(&request.reference)
        .ok_or_else(|| ApiError::invalid("reference: must be as 'resolve' returned it"))?
        .to_owned();
    if request.depth == Some(0) {
        return Err(ApiError::invalid("depth: must be at least 1"));
    }
    let role = &api.role;
    let subject = [
        ("reference", request.reference.as_str()),
        ("commit", request.commit.as_str()),
        ("seed", "true"),
    ];
    let operation = role
        .begin(
            &request.call,
            RoleAction::Fetch,
            &CallContext::default(),
            &subject,
        )
        .await?;
    let built = async {
        let opened = role.open(&operation).await?;
        let request = SeedRequest {
            commit,
            branch,
            depth: request.depth,
        };
        role.mirrors
            .seed(&opened.access, request)
            .await
            .map_err(errors::repository)
    };
    let built = built.await;
    role.end(&operation, built).await
}

/// JSON without characters that a header can't have.
fn ascii_json(notes: &SeedNotes) -> Result<String, ApiError> {
    let text = serde_json::to_string(notes)
        .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
    let mut ascii = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_ascii() && !character.is_ascii_control() {
            ascii.push(character);
        } else {
            let mut units = [0; 2];
            for unit in character.encode_utf16(&mut units) {
                let _infallible = write!(ascii, "\\u{unit:04x}");
            }
        }
    }
    Ok(ascii)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_fit_into_a_header_and_are_read_back() {
        let notes = SeedNotes {
            submodules: vec!["ünï/\u{1f600}\u{7f}\n".to_owned()],
            submodules_total: 1,
            ..SeedNotes::default()
        };
        let text = ascii_json(&notes).expect("text");
        let value = HeaderValue::from_str(&text).expect("a header");
        assert!(value.to_str().is_ok());
        assert_eq!(
            serde_json::from_str::<SeedNotes>(&text).expect("notes"),
            notes
        );
    }
}

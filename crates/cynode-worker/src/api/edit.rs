//! `files:edit`: replaces an exact text in a file.
//!
//! The worker reads the file, replaces the text, and writes the file on condition that its content
//! is still what was read. Agents of earlier versions serve both steps.
//!
//! Invariants: no change of the file between the two steps is lost; memory for a large file is held
//! only while the text is replaced, never while the agent is waited for.

use std::{
    io::{Read as _, Seek as _, Write as _},
    time::Duration,
};

use axum::{Json, extract::State, response::Response};
use cynode_api::{
    Base64Bytes, EditRequest, ErrorCode, FileChange, FileChanges, FileEdited, Flags, Problem,
    SessionId,
    file_limits::{MAX_EDITED_FILE_BYTES, MAX_PUT_BYTES},
};
use cynode_sba_proto::{FileOp, Frame, MAX_DATA, Reply};
use cynode_service::{ApiError, JsonBody, compute, json};
use sha2::{Digest as _, Sha256};
use tempfile::SpooledTempFile;

use super::{
    Api,
    files::{FILE_TIMEOUT, check_text_path, open, stat_of},
    sessions::Id,
};
use crate::{
    calls::with_result,
    edit::{Edit, check_texts, too_large},
    sandbox::{is_sha256, unexpected},
    sessions::check_version,
};

/// How often an edit is tried when the file changes meanwhile.
const MAX_EDIT_ATTEMPTS: usize = 5;
/// Longer contents are kept in files.
const IN_MEMORY_BYTES: usize = 64 * 1024;
/// How long an edit waits for others in the same session.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the agent may take to send a file.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

/// Replace an exact text in a file: once, or everywhere with `all`. Conditional with `if_match`.
/// The file keeps its mode; a symbolic link is followed.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/files:edit", tag = "files",
    params(("id" = SessionId, Path)), request_body = EditRequest,
    responses(
        (status = 200, body = FileEdited),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn edit(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<EditRequest>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    let path = check_text_path(&request.path, "path")?;
    let expected = request
        .if_match
        .as_deref()
        .map(|hash| {
            let hash = hash.strip_prefix("sha256:").unwrap_or(hash);
            is_sha256(hash)
                .then(|| hash.to_ascii_lowercase())
                .ok_or_else(|| ApiError::invalid("if_match: must be 64 hexadecimal digits"))
        })
        .transpose()?;
    check_texts(&request.old, &request.new)?;
    let (_, live) = api.sessions.live(id)?;
    let _activity = live.activity();
    let busy = |_| {
        ApiError::new(
            ErrorCode::AgentUnavailable,
            "earlier edits in this session have not ended in time",
        )
    };
    let _turn = tokio::time::timeout(QUEUE_TIMEOUT, live.edits.lock())
        .await
        .map_err(busy)?;
    for _ in 0..MAX_EDIT_ATTEMPTS {
        let content = FileContent::read(&api, id, path.clone()).await?;
        if let Some(expected) = expected.as_ref().filter(|hash| **hash != content.sha256) {
            return Err(ApiError::new(
                ErrorCode::PreconditionFailed,
                format!(
                    "the file does not have the sha256 {expected}; its sha256 is {}",
                    content.sha256
                ),
            ));
        }
        let sha256_before = content.sha256.clone();
        let (edited, replaced) = content.replace(&api, &request).await?;
        match edited.write(&api, id, path.clone(), &sha256_before).await {
            Err(error) if error.is(ErrorCode::PreconditionFailed) && expected.is_none() => {}
            Err(error) => return Err(error),
            Ok(FileContent { sha256, size, .. }) => {
                let change = FileChange::new(&path.0)
                    .before(Some(sha256_before.clone()))
                    .after(Some(sha256.clone()));
                let edited = FileEdited {
                    sha256,
                    size,
                    replaced,
                    sha256_before: Some(sha256_before),
                    flags: Flags::default(),
                };
                return Ok(with_result(&FileChanges::from_iter([change]), Json(edited)));
            }
        }
    }
    Err(ApiError::new(
        ErrorCode::PreconditionFailed,
        format!("the file changed during each of {MAX_EDIT_ATTEMPTS} attempts"),
    )
    .with_remedy("Stop the program that keeps changing the file, or edit another one."))
}

/// The content of a file, in memory if it is small.
#[derive(Debug)]
struct FileContent {
    file: SpooledTempFile,
    size: u64,
    sha256: String,
}

/// Collects a content and its hash.
struct BodyCollector {
    file: SpooledTempFile,
    /// What the file does not have yet: an edit makes many small pieces.
    buffer: Vec<u8>,
    size: u64,
    hash: Sha256,
}

impl BodyCollector {
    fn new(api: &Api) -> Self {
        let directory = api.sessions.config.directory();
        Self {
            file: tempfile::spooled_tempfile_in(IN_MEMORY_BYTES, directory),
            buffer: Vec::new(),
            size: 0,
            hash: Sha256::new(),
        }
    }

    fn add(&mut self, piece: &[u8]) -> Result<(), ApiError> {
        self.size += piece.len() as u64;
        if self.size > MAX_EDITED_FILE_BYTES {
            return Err(too_large());
        }
        self.buffer.extend_from_slice(piece);
        if self.buffer.len() >= IN_MEMORY_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), ApiError> {
        self.hash.update(&self.buffer);
        self.file
            .write_all(&self.buffer)
            .map_err(|error| stored(&error))?;
        self.buffer.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<FileContent, ApiError> {
        self.flush()?;
        self.file.rewind().map_err(|error| stored(&error))?;
        Ok(FileContent {
            file: self.file,
            size: self.size,
            sha256: hex::encode(self.hash.finalize()),
        })
    }
}

fn stored(error: &std::io::Error) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("storing the content of the file: {error}"),
    )
}

impl FileContent {
    async fn read(api: &Api, id: SessionId, path: Base64Bytes) -> Result<Self, ApiError> {
        let op = FileOp::Read {
            path,
            start: 0,
            end: None,
        };
        let read = async {
            let (stat, mut channel, _activity) = stat_of(api, id, op).await?;
            if stat.size > MAX_EDITED_FILE_BYTES {
                return Err(too_large());
            }
            let mut content = BodyCollector::new(api);
            while let Some(piece) = channel.data(READ_TIMEOUT).await? {
                content.add(&piece)?;
            }
            content.finish()
        };
        let slow = |_| {
            ApiError::new(
                ErrorCode::AgentUnavailable,
                "the agent did not send the file in time",
            )
        };
        tokio::time::timeout(READ_TIMEOUT, read)
            .await
            .map_err(slow)?
    }

    /// The content with the text replaced, and the number of replacements.
    async fn replace(mut self, api: &Api, request: &EditRequest) -> Result<(Self, u64), ApiError> {
        let size = usize::try_from(self.size).unwrap_or(usize::MAX);
        let _room = json::room(size, 0).await;
        let work = || {
            let mut bytes = Vec::with_capacity(size);
            self.file
                .read_to_end(&mut bytes)
                .map_err(|error| stored(&error))?;
            let edit = Edit::plan(&bytes, &request.old, &request.new, request.all)?;
            let mut edited = BodyCollector::new(api);
            for piece in edit.pieces() {
                edited.add(piece)?;
            }
            Ok((edited.finish()?, edit.replaced))
        };
        compute::run(size + request.new.len(), work).await
    }

    /// Writes the content if the file still has the given hash.
    async fn write(
        mut self,
        api: &Api,
        id: SessionId,
        path: Base64Bytes,
        sha256_before: &str,
    ) -> Result<Self, ApiError> {
        let op = FileOp::Write {
            path,
            mode: None,
            if_match: Some(vec![sha256_before.to_owned()]),
            if_none_match: false,
            max_bytes: MAX_PUT_BYTES,
        };
        let (mut channel, _activity) = open(api, id, op).await?;
        let mut piece = vec![0; MAX_DATA.min(usize::try_from(self.size).unwrap_or(MAX_DATA))];
        loop {
            let count = self.file.read(&mut piece).map_err(|error| stored(&error))?;
            if count == 0 {
                break;
            }
            if let Err(error) = channel.send_data(&piece[..count]).await {
                return Err(channel.send_error(error).await);
            }
        }
        if let Err(error) = channel.send(&Frame::End).await {
            return Err(channel.send_error(error).await);
        }
        match channel.reply(FILE_TIMEOUT).await? {
            // The hash is known from the content: a reply with another one is not trusted.
            Reply::Written(written) if written.sha256 == self.sha256 => Ok(self),
            other => Err(unexpected(&format!("{other:?}"))),
        }
    }
}

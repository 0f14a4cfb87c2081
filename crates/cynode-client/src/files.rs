//! Files in a sandbox. Bodies stream both ways; paths may be any bytes.

use std::{os::unix::ffi::OsStrExt, path::Path};

use bytes::Bytes;
use cynode_api::{
    Base64Bytes, EditRequest, ExportRequest, FileEdited, FileType, ImportResult, ListRequest,
    ListResult, MkdirRequest, MoveRequest, PatchRequest, PatchResult, SearchRequest, SearchResult,
    SessionId,
};
use http::{HeaderMap, Method, StatusCode, header};
use reqwest::{Body, Response};
use serde::Serialize;

use crate::{
    Error, FileEvents, Result, SessionClient,
    client::{CALL_TIMEOUT, check_status, display_url, json, send},
    execs::EVENT_STREAM,
};

/// File metadata from response headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileInfo {
    /// Absent for a regular file.
    pub kind: Option<FileType>,
    /// Permission bits.
    pub mode: Option<u32>,
    pub size: Option<u64>,
    pub sha256: Option<String>,
    pub etag: Option<String>,
}

impl FileInfo {
    fn from_headers(headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        Self {
            kind: text("x-type").and_then(|kind| serde_json::from_value(kind.into()).ok()),
            mode: text("x-mode")
                .and_then(|mode| u32::from_str_radix(mode, 8).ok())
                .map(|mode| mode & 0o7777),
            size: text("content-length").and_then(|size| size.parse().ok()),
            sha256: text("x-content-sha256").map(ToOwned::to_owned),
            etag: text("etag").map(ToOwned::to_owned),
        }
    }
}

/// A streamed body.
#[derive(Debug)]
pub struct FileBody {
    pub info: FileInfo,
    response: Response,
    url: String,
}

impl FileBody {
    fn new(response: Response) -> Self {
        Self {
            info: FileInfo::from_headers(response.headers()),
            url: display_url(response.url()),
            response,
        }
    }

    /// The next piece; `None` at the end. A truncated body is an error.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        self.response
            .chunk()
            .await
            .map_err(|error| Error::broken(&self.url, error))
    }
}

#[derive(Clone, Debug, Default)]
pub struct PutOptions {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Only if the file has this ETag.
    pub if_match: Option<String>,
    /// Only if the file does not exist.
    pub create_new: bool,
}

/// A path in a query: text if it is UTF-8, base64 otherwise.
#[derive(Serialize)]
struct PathQuery<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_b64: Option<Base64Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recursive: Option<bool>,
}

impl<'a> PathQuery<'a> {
    fn new(path: &'a Path) -> Self {
        let text = path.to_str();
        let path_b64 = text
            .is_none()
            .then(|| Base64Bytes(path.as_os_str().as_bytes().to_vec()));
        Self {
            path: text,
            path_b64,
            recursive: None,
        }
    }
}

impl SessionClient {
    pub async fn get_file(&self, session: SessionId, path: &Path) -> Result<FileBody> {
        let request = self
            .request(Method::GET, &self.session(session, "/files"))
            .query(&PathQuery::new(path));
        Ok(FileBody::new(check_status(send(request).await?).await?))
    }

    /// Stat. Responses to HEAD have no body, so a refusal is [`Error::Status`].
    pub async fn head_file(&self, session: SessionId, path: &Path) -> Result<FileInfo> {
        let request = self
            .request(Method::HEAD, &self.session(session, "/files"))
            .timeout(CALL_TIMEOUT)
            .query(&PathQuery::new(path));
        Ok(FileInfo::from_headers(
            check_status(send(request).await?).await?.headers(),
        ))
    }

    pub async fn put_file(
        &self,
        session: SessionId,
        path: &Path,
        body: impl Into<Body>,
        options: &PutOptions,
    ) -> Result<FileInfo> {
        let mut request = self
            .request(Method::PUT, &self.session(session, "/files"))
            .query(&PathQuery::new(path))
            .body(body);
        if let Some(mode) = options.mode {
            request = request.header("X-Mode", format!("{mode:04o}"));
        }
        if let Some(etag) = &options.if_match {
            request = request.header(header::IF_MATCH, etag);
        }
        if options.create_new {
            request = request.header(header::IF_NONE_MATCH, "*");
        }
        Ok(FileInfo::from_headers(
            check_status(send(request).await?).await?.headers(),
        ))
    }

    pub async fn delete_file(
        &self,
        session: SessionId,
        path: &Path,
        recursive: bool,
    ) -> Result<()> {
        let query = PathQuery {
            recursive: recursive.then_some(true),
            ..PathQuery::new(path)
        };
        check_status(
            send(
                self.request(Method::DELETE, &self.session(session, "/files"))
                    .timeout(CALL_TIMEOUT)
                    .query(&query),
            )
            .await?,
        )
        .await
        .map(drop)
    }

    pub async fn list_files(
        &self,
        session: SessionId,
        request: &ListRequest,
    ) -> Result<ListResult> {
        self.call(Method::POST, &self.session(session, "/files:list"), request)
            .await
    }

    pub async fn search_files(
        &self,
        session: SessionId,
        request: &SearchRequest,
    ) -> Result<SearchResult> {
        self.call(
            Method::POST,
            &self.session(session, "/files:search"),
            request,
        )
        .await
    }

    pub async fn patch_files(
        &self,
        session: SessionId,
        request: &PatchRequest,
    ) -> Result<PatchResult> {
        self.call(
            Method::POST,
            &self.session(session, "/files:patch"),
            request,
        )
        .await
    }

    pub async fn edit_file(&self, session: SessionId, request: &EditRequest) -> Result<FileEdited> {
        self.call(Method::POST, &self.session(session, "/files:edit"), request)
            .await
    }

    /// Watches a file, or a directory with what is below it. Returns when the watch has begun.
    pub async fn watch_files(&self, session: SessionId, path: &Path) -> Result<FileEvents> {
        let request = self
            .request(Method::GET, &self.session(session, "/files:watch"))
            .header(header::ACCEPT, EVENT_STREAM)
            .query(&PathQuery::new(path));
        Ok(FileEvents::new(check_status(send(request).await?).await?))
    }

    pub async fn move_file(&self, session: SessionId, request: &MoveRequest) -> Result<()> {
        self.call_empty(Method::POST, &self.session(session, "/files:move"), request)
            .await
    }

    pub async fn make_dir(&self, session: SessionId, request: &MkdirRequest) -> Result<()> {
        self.call_empty(
            Method::POST,
            &self.session(session, "/files:mkdir"),
            request,
        )
        .await
    }

    pub async fn export(&self, session: SessionId, request: &ExportRequest) -> Result<FileBody> {
        // The user API stores an export as an artifact unless the bytes are requested.
        let request = self
            .request(Method::POST, &self.session(session, "/export"))
            .header(header::ACCEPT, "application/octet-stream")
            .json(request);
        Ok(FileBody::new(check_status(send(request).await?).await?))
    }

    /// Unpacks a tar archive below `path`.
    pub async fn import(
        &self,
        session: SessionId,
        path: &Path,
        tar: impl Into<Body>,
    ) -> Result<ImportResult> {
        let request = self
            .request(Method::POST, &self.session(session, "/import"))
            .query(&PathQuery::new(path))
            .header(header::CONTENT_TYPE, "application/x-tar")
            .body(tar);
        let answer = check_status(send(request).await?).await?;
        if answer.status() == StatusCode::NO_CONTENT {
            Ok(ImportResult::default())
        } else {
            json(answer).await
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn a_path_that_is_not_utf8_travels_as_base64() {
        let client = SessionClient::new("http://127.0.0.1:1", "t").expect("client");
        let query = |path: &Path| {
            client
                .request(Method::GET, "/x")
                .query(&PathQuery::new(path))
                .build()
                .expect("request")
                .url()
                .query()
                .map(ToOwned::to_owned)
        };
        assert_eq!(
            query(Path::new("a b/ü&+")).as_deref(),
            Some("path=a+b%2F%C3%BC%26%2B")
        );
        assert_eq!(
            query(Path::new(OsStr::from_bytes(b"\xff\xfe\xff"))).as_deref(),
            Some("path_b64=%2F%2F7%2F")
        );
    }

    #[test]
    fn the_mode_is_octal() {
        let headers = HeaderMap::from_iter([(
            header::HeaderName::from_static("x-mode"),
            header::HeaderValue::from_static("0755"),
        )]);
        assert_eq!(FileInfo::from_headers(&headers).mode, Some(0o755));
    }
}

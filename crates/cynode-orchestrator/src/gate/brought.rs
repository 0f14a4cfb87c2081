//! What a call brings: taken whole where it is looked through before any of it goes on.

use std::{
    io::{Read, Seek as _, SeekFrom, Write as _},
    sync::{Arc, OnceLock},
};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use cynode_api::{ErrorCode, artifact_limits, file_limits};
use cynode_policy::{Hit, Scanner, Watch};
use cynode_service::{ApiError, body, edge};
use futures_util::{StreamExt as _, stream};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tokio_util::io::ReaderStream;

use super::rules::Takes;
use crate::{Orchestrator, blobs::hex};

/// What stays in memory; more goes to a file without a name.
const IN_MEMORY: usize = 256 * 1024;
/// So many entries of an archive are looked at and told.
const MAX_ENTRIES: usize = 10_000;
/// The longest header of an entry that is longer than usual.
const MAX_HEADER: u64 = 64 * 1024;
const TOLD_ENTRIES: usize = 100;

/// So many bodies are written to files at once; others wait.
static SPOOLS: Semaphore = Semaphore::const_new(8);
/// After so many bytes more it is looked whether there is still room.
const LOOK_AFTER: u64 = 16 * 1024 * 1024;

/// The body of a call, as it comes to the gate.
#[derive(Debug)]
pub(crate) enum Incoming {
    Coming(Body),
    /// It was taken already, or could not be.
    Here(Result<Bytes, ApiError>),
}

impl Incoming {
    async fn json(self) -> Result<Bytes, ApiError> {
        match self {
            Self::Coming(body) => json_bytes(body).await,
            Self::Here(taken) => taken,
        }
    }

    fn into_body(self) -> Result<Body, ApiError> {
        match self {
            Self::Coming(body) => Ok(body),
            Self::Here(taken) => taken.map(Body::from),
        }
    }
}

/// The body of a call, before it goes on.
#[derive(Debug)]
pub(crate) enum Brought {
    Nothing(Body),
    /// What it says, if it can be read; who takes the call reads it again, strictly.
    Json(Bytes, Value),
    Held(Held),
    /// Looked through on its way.
    Passing(Body, Found),
}

/// What was found in a body on its way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found(Arc<OnceLock<&'static str>>);

impl Found {
    pub(crate) fn what(&self) -> Option<&'static str> {
        self.0.get().copied()
    }
}

/// Bytes that came whole.
#[derive(Debug)]
pub(crate) struct Held {
    begin: Bytes,
    rest: Option<std::fs::File>,
    pub(crate) size: u64,
    pub(crate) sha256: String,
    pub(crate) hit: Option<Hit>,
    /// Names in an archive, and what is told of them.
    pub(crate) entries: Vec<String>,
    told: Vec<Value>,
}

impl Brought {
    pub(crate) async fn take(orchestrator: &Orchestrator, takes: Takes, enters: bool, incoming: Incoming) -> Result<Self, ApiError> {
        match takes {
            Takes::Json => {
                let bytes = incoming.json().await?;
                let value = edge::parse(&bytes).unwrap_or_default();
                Ok(Self::Json(bytes, value))
            }
            Takes::File => hold(orchestrator, incoming.into_body()?, file_limits::MAX_PUT_BYTES).await.map(Self::Held),
            Takes::Archive => {
                let held = hold(orchestrator, incoming.into_body()?, artifact_limits::MAX_BYTES).await?;
                let read = tokio::task::spawn_blocking(move || held.with_entries()).await;
                read.unwrap_or_else(|_| Err(ApiError::new(ErrorCode::Internal, "reading the archive was interrupted"))).map(Self::Held)
            }
            Takes::Stream if enters => {
                let found = Found::default();
                Ok(Self::Passing(watched(orchestrator.scanner.watch(), incoming.into_body()?, found.clone()), found))
            }
            Takes::Stream => incoming.into_body().map(Self::Nothing),
            // Whoever sends something with a call that takes nothing does not make it wait for that.
            Takes::Nothing => Ok(Self::Nothing(Body::empty())),
        }
    }

    pub(crate) fn json(&self) -> &Value {
        match self {
            Self::Json(_, value) => value,
            _ => &Value::Null,
        }
    }

    pub(crate) fn entries(&self) -> &[String] {
        match self {
            Self::Held(held) => &held.entries,
            _ => &[],
        }
    }

    /// Gives what is to be made its id, so that it can be found by it whatever happens. Says the id.
    pub(crate) fn identify(&mut self, name: &str, new: impl FnOnce() -> String) -> Option<String> {
        let Self::Json(bytes, value) = self else { return None };
        let members = value.as_object_mut()?;
        if let Some(id) = members.get(name).filter(|id| !id.is_null()) {
            return id.as_str().map(str::to_owned);
        }
        let id = new();
        members.insert(name.to_owned(), json!(id));
        *bytes = value.to_string().into();
        Some(id)
    }

    /// Where a secret is, and what kind.
    pub(crate) fn secret(&self, scanner: &Scanner) -> Option<(String, &'static str)> {
        match self {
            Self::Json(_, value) => scanner.find_in_json(value).map(|(field, hit)| (field, hit.what)),
            Self::Held(held) => held.hit.as_ref().map(|hit| ("body".to_owned(), hit.what)),
            Self::Nothing(_) | Self::Passing(..) => None,
        }
    }

    pub(crate) fn tell(&self, detail: &mut Map<String, Value>) {
        if let Self::Held(held) = self {
            detail.insert("body".to_owned(), json!({"size": held.size, "sha256": held.sha256}));
            if !held.told.is_empty() {
                detail.insert("entries".to_owned(), Value::Array(held.told.clone()));
                detail.insert("entry_count".to_owned(), json!(held.entries.len()));
            }
        }
    }

    pub(crate) fn into_body(self) -> (Body, Found) {
        match self {
            Self::Nothing(body) => (body, Found::default()),
            Self::Json(bytes, _) => (Body::from(bytes), Found::default()),
            Self::Held(held) => (held.into_body(), Found::default()),
            Self::Passing(body, found) => (body, found),
        }
    }
}

pub(crate) async fn json_bytes(body: Body) -> Result<Bytes, ApiError> {
    let mut pieces = body.into_data_stream();
    let mut bytes = BytesMut::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| body::problem(&error, "the body could not be read to its end"))?;
        if bytes.len() + piece.len() > edge::MAX_BODY {
            return Err(ApiError::new(ErrorCode::TooLarge, format!("the body exceeds {} bytes", edge::MAX_BODY)));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.freeze())
}

async fn hold(orchestrator: &Orchestrator, body: Body, limit: u64) -> Result<Held, ApiError> {
    let mut watch = orchestrator.scanner.watch();
    let mut pieces = body.into_data_stream();
    let mut spooling = None;
    let mut looked_at = 0;
    let mut begin = BytesMut::new();
    let mut rest: Option<std::fs::File> = None;
    let (mut size, mut hash, mut hit) = (0_u64, Sha256::new(), None);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| body::problem(&error, "the body could not be read to its end"))?;
        size += piece.len() as u64;
        if size > limit {
            return Err(ApiError::new(ErrorCode::TooLarge, format!("the body exceeds {limit} bytes")));
        }
        hash.update(&piece);
        hit = hit.or_else(|| watch.feed(&piece));
        if hit.is_some() {
            break;
        }
        if rest.is_none() && begin.len() + piece.len() <= IN_MEMORY {
            begin.extend_from_slice(&piece);
            continue;
        }
        if rest.is_none() {
            spooling = Some(SPOOLS.acquire().await.map_err(|_| ApiError::new(ErrorCode::ShuttingDown, "the orchestrator is stopping"))?);
            let directory = orchestrator.config.state_dir.join("orchestrator");
            rest = Some(tempfile::tempfile_in(directory).map_err(|error| no_room(&error))?);
        }
        if size > looked_at {
            orchestrator.blobs.check_room()?;
            looked_at = size + LOOK_AFTER;
        }
        if let Some(file) = &mut rest {
            tokio::task::block_in_place(|| file.write_all(&piece)).map_err(|error| no_room(&error))?;
        }
    }
    drop(spooling);
    Ok(Held { begin: begin.freeze(), rest, size, sha256: hex(&hash.finalize()), hit, entries: Vec::new(), told: Vec::new() })
}

#[expect(clippy::needless_pass_by_value, reason = "it is a step of map_err")]
fn unreadable(error: std::io::Error) -> ApiError {
    ApiError::invalid(format!("the archive can't be read: {error}"))
}

fn no_room(error: &std::io::Error) -> ApiError {
    tracing::warn!(%error, "A body could not be held.");
    ApiError::new(ErrorCode::NoSpace, "the orchestrator has no room for the body")
}

impl Held {
    fn reader(&mut self) -> std::io::Result<Box<dyn Read + '_>> {
        let begin = std::io::Cursor::new(self.begin.clone());
        match &mut self.rest {
            Some(file) => {
                file.seek(SeekFrom::Start(0))?;
                Ok(Box::new(begin.chain(file)))
            }
            None => Ok(Box::new(begin)),
        }
    }

    /// Looks at the names in an archive. What can't be read here to its end is refused: nobody could say what gets in.
    fn with_entries(mut self) -> Result<Self, ApiError> {
        if self.hit.is_some() {
            return Ok(self);
        }
        self.check_headers().map_err(unreadable)?;
        let (mut entries, mut told) = (Vec::new(), Vec::new());
        let mut archive = tar::Archive::new(self.reader().map_err(unreadable)?);
        for entry in archive.entries().map_err(unreadable)? {
            let mut entry = entry.map_err(unreadable)?;
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            if told.len() < TOLD_ENTRIES {
                let mut hash = Sha256::new();
                let is_file = entry.header().entry_type().is_file();
                let read = is_file && std::io::copy(&mut entry, &mut HashWriter(&mut hash)).is_ok();
                told.push(if read { json!({"path": name, "sha256_after": hex(&hash.finalize())}) } else { json!({"path": name}) });
            }
            entries.push(name);
        }
        drop(archive);
        Ok(Self { entries, told, ..self })
    }

    /// Bounds what headers may say, before anybody reads them whole.
    fn check_headers(&mut self) -> std::io::Result<()> {
        let bad = |why: &str| Err(std::io::Error::other(why.to_owned()));
        let mut archive = tar::Archive::new(self.reader()?);
        // Names that stand before an entry: with two, two readers could take two.
        let mut names = 0;
        for (index, entry) in archive.entries()?.raw(true).enumerate() {
            let mut entry = entry?;
            if index >= MAX_ENTRIES {
                return bad("it has too many entries");
            }
            let kind = entry.header().entry_type();
            if kind.is_gnu_longname() || kind.is_gnu_longlink() || kind.is_pax_local_extensions() || kind.is_pax_global_extensions() {
                let mut text = Vec::new();
                if entry.size() > MAX_HEADER || (&mut entry).take(MAX_HEADER).read_to_end(&mut text).is_err() {
                    return bad("a header is too long");
                }
                names += if kind.is_gnu_longname() { 1 } else { memchr::memmem::find_iter(&text, b" path=").count() };
                if names > 1 {
                    return bad("an entry is named twice");
                }
            } else {
                names = 0;
            }
        }
        Ok(())
    }

    fn into_body(mut self) -> Body {
        let begin = stream::iter([Ok::<_, std::io::Error>(self.begin.clone())]);
        match self.rest.take() {
            Some(mut file) => {
                let rest = match file.seek(SeekFrom::Start(0)) {
                    Ok(_) => ReaderStream::new(tokio::fs::File::from_std(file)).left_stream(),
                    Err(error) => stream::iter([Err(error)]).right_stream(),
                };
                Body::from_stream(begin.chain(rest))
            }
            None => Body::from(self.begin),
        }
    }
}

struct HashWriter<'a>(&'a mut Sha256);

impl std::io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A body that breaks off where a secret is.
fn watched(mut watch: Watch, body: Body, found: Found) -> Body {
    Body::from_stream(body.into_data_stream().map(move |piece| {
        let piece = piece.map_err(std::io::Error::other)?;
        match watch.feed(&piece) {
            Some(hit) => {
                found.0.get_or_init(|| hit.what);
                Err(std::io::Error::other("a secret was found"))
            }
            None => Ok(piece),
        }
    }))
}

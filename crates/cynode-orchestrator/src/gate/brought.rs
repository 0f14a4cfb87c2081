//! What a call brings: taken whole where it is looked through before any of it goes on.

use std::{
    io::{Read, Seek as _, SeekFrom, Write as _},
    sync::{Arc, OnceLock},
};

use axum::body::{Body, HttpBody as _};
use bytes::{Bytes, BytesMut};
use cynode_api::{ErrorCode, Flags, artifact_limits, exec_form, exec_limits, file_limits};
use cynode_archive::{Archive, Kind, Reader};
use cynode_policy::{Action, Channel, Hit, ShapePolicy};
use cynode_service::{
    ApiError, compute, edge,
    json::{self, Room},
    multipart::{self, ExecForm},
};
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, HeaderValue};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use tokio_util::io::ReaderStream;

use super::{
    leaks::{self, ArchiveScan, Leak},
    rules::{Rule, Takes},
    seeds::{EntryError, SeedScan, watched},
};
use crate::{
    Orchestrator,
    blobs::hex,
    budget::{self, IN_MEMORY, Reservation, SPOOLED},
    caller::Caller,
    turns::Turns,
};

/// Largest number of entries of an archive.
const MAX_ENTRIES: usize = 10_000;
/// Paths and hard links' targets of all entries of an archive together.
const MAX_ENTRY_PATH_BYTES: usize = 4 * 1024 * 1024;
const TOLD_ENTRIES: usize = 100;

/// Bodies that are written to files at once; others wait for their turn.
const SPOOLED_AT_ONCE: usize = 8;
static SPOOLS: Turns = Turns::new(SPOOLED_AT_ONCE);
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
    async fn json(
        self,
        orchestrator: &Orchestrator,
        caller: &Caller,
        limit: usize,
    ) -> Result<(Bytes, Room), ApiError> {
        match self {
            Self::Coming(body) => json_body_up_to(orchestrator, caller, body, limit).await,
            Self::Here(taken) => {
                let bytes = taken?;
                let nodes = json::count(&bytes)?;
                Ok((bytes.clone(), json::room(bytes.len(), nodes).await))
            }
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
#[expect(
    clippy::large_enum_variant,
    reason = "one exists per call, and it moves once"
)]
pub(crate) enum Brought {
    Nothing(Body),
    /// What it says, if it can be read; who takes the call reads it again, strictly.
    Json(Bytes, Value, Room),
    /// A command and its input, which is taken when the command may run.
    Form(Form),
    Held(Held),
    /// Looked through on its way.
    Passing(Body, Found, SeedScan),
}

/// What is known of a call before its body is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Intake<'a> {
    pub(crate) caller: &'a Caller,
    pub(crate) rule: &'a Rule,
    pub(crate) shapes: ShapePolicy,
    /// Where a file, an archive or an artifact is to be.
    pub(crate) path: &'a str,
    pub(crate) headers: &'a HeaderMap,
}

/// A command that comes as a form.
#[derive(Debug)]
pub(crate) struct Form {
    request: Bytes,
    value: Value,
    _room: Room,
    /// The input, as long as it has not been taken.
    coming: Option<ExecForm>,
    stdin: Option<Held>,
}

/// What goes on behind the gate.
#[derive(Debug)]
pub(crate) struct Passage {
    pub(crate) body: Body,
    pub(crate) found: Found,
    pub(crate) scan: Option<SeedScan>,
    /// Where it is another than the caller's.
    pub(crate) content_type: Option<HeaderValue>,
}

impl From<Body> for Passage {
    fn from(body: Body) -> Self {
        Self {
            body,
            found: Found::default(),
            scan: None,
            content_type: None,
        }
    }
}

/// What was found in a body on its way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found(Arc<OnceLock<&'static str>>);

impl Found {
    pub(crate) fn what(&self) -> Option<&'static str> {
        self.0.get().copied()
    }

    pub(crate) fn set(&self, what: &'static str) {
        self.0.get_or_init(|| what);
    }
}

/// Bytes that came whole.
#[derive(Debug)]
pub(crate) struct Held {
    begin: Bytes,
    rest: Option<std::fs::File>,
    /// What it takes of its caller's budget.
    spooled: Option<Reservation>,
    pub(crate) size: u64,
    pub(crate) sha256: String,
    /// What must not enter.
    leak: Option<Leak>,
    flags: Flags,
    /// Paths of an archive's entries, and what is told of them.
    pub(crate) entries: Vec<String>,
    /// Paths that hard links of an archive lead to.
    link_targets: Vec<String>,
    told: Vec<Value>,
}

impl Brought {
    pub(crate) async fn take(
        orchestrator: &Orchestrator,
        intake: Intake<'_>,
        incoming: Incoming,
    ) -> Result<Self, ApiError> {
        let Intake {
            caller,
            rule,
            shapes,
            path,
            headers,
        } = intake;
        if rule.takes == Takes::Exec
            && let Some(boundary) = multipart::boundary(headers)?
        {
            let (request, form) = ExecForm::open(incoming.into_body()?, &boundary).await?;
            let nodes = json::count(&request)?;
            let room = json::room(request.len(), nodes).await;
            let value =
                compute::apart(request.len(), || edge::parse(&request).unwrap_or_default()).await;
            return Ok(Self::Form(Form {
                request,
                value,
                _room: room,
                coming: Some(form),
                stdin: None,
            }));
        }
        match rule.takes {
            Takes::Json | Takes::Exec => {
                let limit = if rule.takes == Takes::Exec {
                    exec_limits::MAX_REQUEST_BYTES
                } else {
                    edge::MAX_BODY
                };
                let (bytes, room) = incoming.json(orchestrator, caller, limit).await?;
                let value =
                    compute::apart(bytes.len(), || edge::parse(&bytes).unwrap_or_default()).await;
                Ok(Self::Json(bytes, value, room))
            }
            Takes::File => {
                let mut content = orchestrator
                    .scanner
                    .content(path, shapes.action(Channel::Files));
                let mut watch = orchestrator.system_scanner.watch();
                let look = |piece: &[u8]| {
                    content.feed(piece);
                    Ok(watch.feed(piece))
                };
                let mut held = hold(
                    orchestrator,
                    caller,
                    incoming.into_body()?,
                    file_limits::MAX_PUT_BYTES,
                    look,
                )
                .await?;
                if held.leak.is_none() {
                    held.leak = leaks::judge("body", path, content, &mut held.flags).err();
                }
                Ok(Self::Held(held))
            }
            Takes::Archive => {
                let mut watch = orchestrator.system_scanner.watch();
                let held = hold(
                    orchestrator,
                    caller,
                    incoming.into_body()?,
                    artifact_limits::MAX_BYTES,
                    |piece| Ok(watch.feed(piece)),
                )
                .await?;
                let action = shapes.action(Channel::Archives);
                let scan = ArchiveScan {
                    scanner: orchestrator.scanner.clone(),
                    action,
                    base: path.to_owned(),
                    flags: Flags::default(),
                };
                let read = tokio::task::spawn_blocking(move || held.with_entries(scan)).await;
                read.unwrap_or_else(|_| {
                    Err(ApiError::new(
                        ErrorCode::Internal,
                        "reading the archive was interrupted",
                    ))
                })
                .map(Self::Held)
            }
            Takes::Stream if rule.enters => {
                let (found, action) = (Found::default(), shapes.action(Channel::Seeds));
                let scan = SeedScan::new(orchestrator.scanner.content(path, action), action);
                let body = watched(
                    orchestrator.system_scanner.watch(),
                    incoming.into_body()?,
                    found.clone(),
                    scan.clone(),
                );
                Ok(Self::Passing(body, found, scan))
            }
            Takes::Stream => incoming.into_body().map(Self::Nothing),
            // Whoever sends something with a call that takes nothing does not make it wait for that.
            Takes::Nothing => Ok(Self::Nothing(Body::empty())),
        }
    }

    pub(crate) fn json(&self) -> &Value {
        match self {
            Self::Json(_, value, _) | Self::Form(Form { value, .. }) => value,
            _ => &Value::Null,
        }
    }

    /// How much of it there is to work on.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Json(bytes, ..) | Self::Form(Form { request: bytes, .. }) => bytes.len(),
            Self::Held(_) => self.archive_paths().map(str::len).sum(),
            Self::Nothing(_) | Self::Passing(..) => 0,
        }
    }

    /// Every path of an archive that rules are asked about.
    pub(crate) fn archive_paths(&self) -> impl Iterator<Item = &str> {
        let (entries, targets) = match self {
            Self::Held(held) => (held.entries.as_slice(), held.link_targets.as_slice()),
            _ => (&[][..], &[][..]),
        };
        entries.iter().chain(targets).map(String::as_str)
    }

    /// Gives what is to be made its id, so that it can be found by it whatever happens. Says the id.
    pub(crate) fn identify(&mut self, name: &str, new: impl FnOnce() -> String) -> Option<String> {
        let (Self::Json(bytes, value, _)
        | Self::Form(Form {
            request: bytes,
            value,
            ..
        })) = self
        else {
            return None;
        };
        let members = value.as_object_mut()?;
        if let Some(id) = members.get(name).filter(|id| !id.is_null()) {
            return id.as_str().map(str::to_owned);
        }
        let id = new();
        members.insert(name.to_owned(), json!(id));
        *bytes = value.to_string().into();
        Some(id)
    }

    /// What must not enter, or what of it is flagged. What passes is judged later.
    pub(crate) fn judge(
        &self,
        orchestrator: &Orchestrator,
        action: Action,
        shapes: ShapePolicy,
    ) -> Result<Flags, Leak> {
        match self {
            Self::Json(_, value, _) | Self::Form(Form { value, .. }) => {
                let secret = orchestrator.system_scanner.find_in_json(value);
                secret.map_or(Ok(()), |(field, hit)| {
                    Err(Leak::of_system(&field, hit.what))
                })?;
                leaks::in_json(&orchestrator.scanner, shapes, action, value)
            }
            Self::Held(held) => held
                .leak
                .clone()
                .map_or_else(|| Ok(held.flags.clone()), Err),
            Self::Nothing(_) | Self::Passing(..) => Ok(Flags::default()),
        }
    }

    pub(crate) fn tell(&self, detail: &mut Map<String, Value>) {
        if let Self::Held(held) = self {
            detail.insert(
                "body".to_owned(),
                json!({"size": held.size, "sha256": held.sha256}),
            );
            if !held.told.is_empty() {
                detail.insert("entries".to_owned(), Value::Array(held.told.clone()));
                detail.insert("entry_count".to_owned(), json!(held.entries.len()));
            }
        }
    }

    /// Takes the input of a command that may run: all of it, before it starts.
    pub(crate) async fn take_input(
        &mut self,
        orchestrator: &Orchestrator,
        caller: &Caller,
        shapes: ShapePolicy,
    ) -> Result<Option<Input>, ApiError> {
        let Self::Form(form) = self else {
            return Ok(None);
        };
        let Some(coming) = form.coming.take() else {
            return Ok(None);
        };
        let mut content = orchestrator
            .scanner
            .content("", shapes.action(Channel::Stdin));
        let pieces = stream::try_unfold(coming, async |mut coming| {
            let piece = coming.next_piece().await.map_err(budget::Refusal)?;
            Ok::<_, budget::Refusal>(piece.map(|piece| (piece, coming)))
        });
        let mut watch = orchestrator.system_scanner.watch();
        let look = |piece: &[u8]| {
            content.feed(piece);
            Ok(watch.feed(piece))
        };
        let held = hold(
            orchestrator,
            caller,
            Body::from_stream(pieces),
            exec_limits::MAX_FORM_STDIN_BYTES,
            look,
        )
        .await?;
        let mut flags = Flags::default();
        let system = held.leak.clone().map(|leak| Leak {
            field: "stdin".to_owned(),
            ..leak
        });
        let judged = system.map_or(Ok(()), Err).and_then(|()| {
            leaks::judge("stdin", "stdin", content, &mut flags)
                .map_err(|leak| Leak { path: None, ..leak })
        });
        let input = Input {
            record: json!({"size": held.size, "sha256": held.sha256}),
            judged: judged.map(|()| flags),
        };
        form.stdin = Some(held);
        Ok(Some(input))
    }

    pub(crate) fn into_passage(self) -> Passage {
        match self {
            Self::Nothing(body) => body.into(),
            Self::Json(bytes, _, room) => json::body(bytes, room).into(),
            Self::Form(form) => form.into_passage(),
            Self::Held(held) => held.into_body().into(),
            Self::Passing(body, found, scan) => Passage {
                body,
                found,
                scan: Some(scan),
                content_type: None,
            },
        }
    }
}

/// A JSON body, whole. A long one waits in a file until there is room for what it becomes.
pub(crate) async fn json_body(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: Body,
) -> Result<(Bytes, Room), ApiError> {
    json_body_up_to(orchestrator, caller, body, edge::MAX_BODY).await
}

async fn json_body_up_to(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: Body,
    limit: usize,
) -> Result<(Bytes, Room), ApiError> {
    if body
        .size_hint()
        .upper()
        .is_some_and(|size| size <= IN_MEMORY as u64)
    {
        let bytes = json_bytes(body).await?;
        let nodes = json::count(&bytes)?;
        let room = json::room(bytes.len(), nodes).await;
        return Ok((bytes, room));
    }
    let mut scan = json::Scan::default();
    let mut held = hold(orchestrator, caller, body, limit as u64, |piece| {
        scan.feed(piece).map(|()| None)
    })
    .await?;
    let size = usize::try_from(held.size).unwrap_or(usize::MAX);
    let room = json::room(size, scan.nodes()).await;
    let read = move || {
        let mut bytes = Vec::with_capacity(size);
        held.reader()?.read_to_end(&mut bytes)?;
        std::io::Result::Ok(Bytes::from(bytes))
    };
    let bytes = compute::apart(size, read)
        .await
        .map_err(|error| no_room(&error))?;
    Ok((bytes, room))
}

pub(crate) async fn json_bytes(body: Body) -> Result<Bytes, ApiError> {
    let mut pieces = body.into_data_stream();
    let mut bytes = BytesMut::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| budget::problem(&error))?;
        if bytes.len() + piece.len() > edge::MAX_BODY {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("the body exceeds {} bytes", edge::MAX_BODY),
            ));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.freeze())
}

/// Input that was taken: what the record says of it, and what was found in it.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) record: Value,
    pub(crate) judged: Result<Flags, Leak>,
}

impl Form {
    /// As the node takes it: with the id that the command was given here.
    fn into_passage(self) -> Passage {
        let boundary = format!("cynode-{}", uuid::Uuid::new_v4());
        let (head, tail) = exec_form(&boundary, &self.request);
        let stdin = self
            .stdin
            .map_or_else(Body::empty, Held::into_body)
            .into_data_stream();
        let ends = |bytes: Vec<u8>| stream::iter([Ok::<_, axum::Error>(Bytes::from(bytes))]);
        let body = Body::from_stream(ends(head).chain(stdin).chain(ends(tail)));
        let content_type =
            HeaderValue::from_str(&format!("multipart/form-data; boundary={boundary}")).ok();
        Passage {
            content_type,
            ..body.into()
        }
    }
}

/// Holds a body, and stops where `look` finds something.
async fn hold(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: Body,
    limit: u64,
    mut look: impl FnMut(&[u8]) -> Result<Option<Hit>, ApiError> + Send,
) -> Result<Held, ApiError> {
    let announced = body.size_hint().exact();
    let mut pieces = SPOOLS.read(caller.id(), body.into_data_stream());
    let mut spooled = SPOOLED.reservation(caller.id());
    let mut looked_at = 0;
    let mut begin = BytesMut::new();
    let mut rest: Option<std::fs::File> = None;
    let (mut size, mut hash, mut hit) = (0_u64, Sha256::new(), None);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| budget::problem(&error))?;
        size += piece.len() as u64;
        if size > limit {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("the body exceeds {limit} bytes"),
            ));
        }
        hash.update(&piece);
        hit = look(&piece)?;
        if hit.is_some() {
            break;
        }
        if rest.is_none() && begin.len() + piece.len() <= IN_MEMORY {
            begin.extend_from_slice(&piece);
            continue;
        }
        if !spooled.covers(size) {
            // Others have their turn while this body waits for the rest of its caller's.
            pieces.rest();
            spooled
                .grow_to(announced.unwrap_or(size + LOOK_AFTER).min(limit))
                .await?;
        }
        pieces.begin().await;
        if rest.is_none() {
            let directory = orchestrator.config.state_dir.join("orchestrator");
            rest = Some(tempfile::tempfile_in(directory).map_err(|error| no_room(&error))?);
        }
        if size > looked_at {
            orchestrator.blobs.check_room()?;
            looked_at = size + LOOK_AFTER;
        }
        if let Some(file) = &mut rest {
            tokio::task::block_in_place(|| file.write_all(&piece))
                .map_err(|error| no_room(&error))?;
        }
    }
    let spooled = rest.is_some().then_some(spooled);
    let leak = hit.map(|hit| Leak::of_system("body", hit.what));
    Ok(Held {
        begin: begin.freeze(),
        rest,
        spooled,
        size,
        sha256: hex(&hash.finalize()),
        leak,
        flags: Flags::default(),
        entries: Vec::new(),
        link_targets: Vec::new(),
        told: Vec::new(),
    })
}

fn unreadable(problem: &impl std::fmt::Display) -> ApiError {
    ApiError::invalid(format!("the archive can't be read: {problem}"))
}

fn no_room(error: &std::io::Error) -> ApiError {
    tracing::warn!(%error, "A body could not be held.");
    ApiError::new(
        ErrorCode::NoSpace,
        "the orchestrator has no room for the body",
    )
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

    /// Reads an archive to its end with the reader that unpacks it, and collects its paths. What that reader refuses is refused here.
    /// Each entry is looked through as the file that it becomes.
    fn with_entries(mut self, mut scan: ArchiveScan) -> Result<Self, ApiError> {
        if self.leak.is_some() {
            return Ok(self);
        }
        let mut leak = None;
        let (mut entries, mut link_targets, mut told) = (Vec::new(), Vec::new(), Vec::new());
        let mut path_bytes = 0;
        let mut archive = Archive::new(Reader::new(
            self.reader().map_err(|error| unreadable(&error))?,
        ));
        while let Some(entry) = archive.next_entry().map_err(|error| unreadable(&error))? {
            if entries.len() >= MAX_ENTRIES {
                return Err(unreadable(&format!(
                    "it has more than {MAX_ENTRIES} entries; split it"
                )));
            }
            path_bytes += entry.path.len()
                + if entry.kind == Kind::HardLink {
                    entry.link.len()
                } else {
                    0
                };
            if path_bytes > MAX_ENTRY_PATH_BYTES {
                return Err(unreadable(&format!(
                    "the paths of its entries have more than {MAX_ENTRY_PATH_BYTES} bytes together; split it"
                )));
            }
            let name = String::from_utf8_lossy(&entry.path).into_owned();
            let target = (entry.kind == Kind::HardLink)
                .then(|| String::from_utf8_lossy(&entry.link).into_owned());
            if entry.kind == Kind::Special {
                return Err(unreadable(&format!(
                    "the entry '{}' is a device or a FIFO",
                    entry.path.escape_ascii()
                )));
            }
            let mut hash = (told.len() < TOLD_ENTRIES).then(Sha256::new);
            match scan.entry(&mut archive, &entry, |piece| {
                hash.iter_mut().for_each(|hash| hash.update(piece))
            }) {
                Ok(()) => {}
                Err(EntryError::Leak(found)) => {
                    leak = Some(found);
                    break;
                }
                Err(EntryError::Read(error)) => return Err(unreadable(&error)),
            }
            if let Some(hash) = hash {
                told.push(match (&target, entry.kind) {
                    (Some(target), _) => json!({"path": name, "hard_link": target}),
                    (None, Kind::File) => {
                        json!({"path": name, "sha256_after": hex(&hash.finalize())})
                    }
                    (None, _) => json!({"path": name}),
                });
            }
            entries.push(name);
            link_targets.extend(target);
        }
        drop(archive);
        Ok(Self {
            leak,
            flags: scan.flags,
            entries,
            link_targets,
            told,
            ..self
        })
    }

    fn into_body(mut self) -> Body {
        let begin = stream::iter([Ok::<_, std::io::Error>(self.begin.clone())]);
        match self.rest.take() {
            Some(mut file) => {
                let spooled = self.spooled.take();
                let rest = match file.seek(SeekFrom::Start(0)) {
                    Ok(_) => ReaderStream::new(tokio::fs::File::from_std(file)).left_stream(),
                    Err(error) => stream::iter([Err(error)]).right_stream(),
                };
                // The file is gone with the last of the body, and counts until then.
                Body::from_stream(begin.chain(rest).inspect(move |_| {
                    let _counted = &spooled;
                }))
            }
            None => Body::from(self.begin),
        }
    }
}

#[cfg(test)]
mod tests {
    use tar::{EntryType, Header};

    use super::*;

    #[derive(Default)]
    struct Maker(Vec<u8>);

    impl Maker {
        fn add(mut self, kind: EntryType, name: &[u8], link: &[u8], content: &[u8]) -> Self {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(content.len() as u64);
            header.as_old_mut().name[..name.len()].copy_from_slice(name);
            header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
            header.set_cksum();
            self.0.extend_from_slice(header.as_bytes());
            self.0.extend_from_slice(content);
            self.0.resize(self.0.len().next_multiple_of(512), 0);
            self
        }

        fn file(self, name: &str) -> Self {
            self.add(EntryType::Regular, name.as_bytes(), b"", b"x")
        }

        /// A file whose path stands in a long name.
        fn long(self, path: &str) -> Self {
            self.add(
                EntryType::GNULongName,
                b"L",
                b"",
                format!("{path}\0").as_bytes(),
            )
            .file("x")
        }

        fn read(self) -> Result<Brought, String> {
            let held = Held {
                size: self.0.len() as u64,
                begin: self.0.into(),
                rest: None,
                spooled: None,
                sha256: String::new(),
                leak: None,
                flags: Flags::default(),
                entries: Vec::new(),
                link_targets: Vec::new(),
                told: Vec::new(),
            };
            let scanner = cynode_policy::Scanner::new(cynode_policy::Held::new([7; 32]), true);
            let scan = ArchiveScan {
                scanner,
                action: cynode_policy::ShapeAction::Flag,
                base: ".".to_owned(),
                flags: Flags::default(),
            };
            held.with_entries(scan)
                .map(Brought::Held)
                .map_err(|error| error.0.detail.clone())
        }
    }

    fn paths(brought: &Brought) -> Vec<&str> {
        brought.archive_paths().collect()
    }

    #[test]
    fn an_archive_names_every_path_that_the_agent_unpacks() {
        // The length of the comment spans the newline: only the second record is a path.
        let records = b"26 comment=x\n14 path=fine\n20 path=protected/x\n";
        let read = Maker::default()
            .add(EntryType::XHeader, b"x", b"", records)
            .file("fine")
            .read()
            .expect("read");
        assert_eq!(paths(&read), ["protected/x"]);
        let mut detail = Map::new();
        read.tell(&mut detail);
        assert_eq!(
            (&detail["entries"][0]["path"], &detail["entry_count"]),
            (&json!("protected/x"), &json!(1))
        );
        let linked = Maker::default()
            .file("a")
            .add(EntryType::Link, b"hard", b"protected/kept", b"")
            .read()
            .expect("read");
        assert_eq!(paths(&linked), ["a", "hard", "protected/kept"]);
        for (archive, expected) in [
            (
                Maker::default()
                    .add(EntryType::Symlink, b"l", b"protected", b"")
                    .file("l/x"),
                "symbolic link of the same archive",
            ),
            (
                Maker::default()
                    .add(
                        EntryType::XGlobalHeader,
                        b"g",
                        b"",
                        b"20 path=protected/x\n",
                    )
                    .file("fine"),
                "global",
            ),
            (
                Maker::default().add(EntryType::Fifo, b"p", b"", b""),
                "FIFO",
            ),
            (Maker::default().file("../x"), "'..'"),
        ] {
            let refused = archive.read().expect_err(expected);
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn entries_and_their_paths_are_bounded() {
        let files = |count: usize| {
            (0..count).fold(Maker::default(), |archive, number| {
                archive.file(&number.to_string())
            })
        };
        assert_eq!(
            paths(&files(MAX_ENTRIES).read().expect("read")).len(),
            MAX_ENTRIES
        );
        assert!(
            files(MAX_ENTRIES + 1)
                .read()
                .expect_err("refused")
                .contains("10000 entries")
        );
        let rest = MAX_ENTRY_PATH_BYTES % 4_000;
        let exact = |extra: usize| {
            let path = "p".repeat(4_000);
            let archive = (0..MAX_ENTRY_PATH_BYTES / path.len())
                .fold(Maker::default(), |archive, _| archive.long(&path));
            archive.long(&"r".repeat(rest + extra))
        };
        assert!(exact(0).read().is_ok());
        assert!(
            exact(1)
                .read()
                .expect_err("refused")
                .contains("bytes together")
        );
    }
}

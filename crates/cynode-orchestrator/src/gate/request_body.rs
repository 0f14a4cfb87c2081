//! The body of a call: scanned for secrets before it is forwarded, or while it streams through.

use std::sync::{Arc, OnceLock};

use axum::body::Body;
use bytes::Bytes;
use cynode_api::{ErrorCode, Flags, artifact_limits, exec_form_frame, exec_limits, file_limits};
use cynode_policy::{Action, Channel, ShapePolicy};
use cynode_service::{
    ApiError, compute, edge,
    json::{self, Room},
    multipart::{self, ExecForm},
};
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, HeaderValue};
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::{
    leaks::{self, ArchiveScan, Leak},
    patches::CallerPatch,
    routes::{BodyKind, RouteSpec},
    seeds::{SeedScan, scan_stream},
    spool::{SpooledBody, json_body_up_to, room_for, spool},
};
use crate::{Orchestrator, budget, caller::Caller};

/// A body with a credential is kept in memory: longer ones are refused before they are spooled.
const MAX_SECRET_BODY_BYTES: usize = 64 * 1024;
const _: () = assert!(MAX_SECRET_BODY_BYTES <= budget::MAX_BUFFERED_BYTES);

/// The body of a call as it arrives at the gate.
#[derive(Debug)]
pub(crate) enum IncomingBody {
    Streaming(Body),
    /// Already read, or failed to be.
    Buffered(Result<Bytes, ApiError>),
    Parsed(ToolBody),
}

/// The small JSON body of a tool call, which needs no parsing. A request extension.
#[derive(Clone, Debug)]
pub(crate) struct ToolBody {
    pub(crate) bytes: Bytes,
    pub(crate) value: Value,
}

impl IncomingBody {
    async fn json(
        self,
        orchestrator: &Orchestrator,
        caller: &Caller,
        limit: usize,
    ) -> Result<(Bytes, Value, Room), ApiError> {
        let (bytes, room) = match self {
            Self::Streaming(body) => json_body_up_to(orchestrator, caller, body, limit).await?,
            Self::Buffered(result) => {
                let bytes = result?;
                let room = room_for(&bytes).await?;
                (bytes, room)
            }
            Self::Parsed(ToolBody { bytes, value }) => {
                let room = room_for(&bytes).await?;
                return Ok((bytes, value, room));
            }
        };
        let value = compute::run(bytes.len(), || edge::parse(&bytes).unwrap_or_default()).await;
        Ok((bytes, value, room))
    }

    fn into_body(self) -> Result<Body, ApiError> {
        match self {
            Self::Streaming(body) => Ok(body),
            Self::Buffered(result) => result.map(Body::from),
            Self::Parsed(body) => Ok(Body::from(body.bytes)),
        }
    }
}

/// The body of a call between its arrival and its forwarding.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one exists per call, and it moves once"
)]
pub(crate) enum RequestBody {
    /// Empty, or forwarded unread.
    Unread(Body),
    /// Parsed leniently; the handler parses the bytes strictly.
    Json(Bytes, Value, Room),
    /// A command and its standard input, which is read once the command is authorized.
    Form(ExecFormBody),
    Spooled(SpooledBody),
    /// Scanned while it streams through.
    Streaming(Body, SecretHit, SeedScan),
}

/// What determines how the body of a call is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyContext<'a> {
    pub(crate) caller: &'a Caller,
    pub(crate) route: &'a RouteSpec,
    pub(crate) shapes: ShapePolicy,
    /// Where an uploaded file, archive or artifact goes.
    pub(crate) path: &'a str,
    pub(crate) headers: &'a HeaderMap,
}

/// A command sent as a form.
#[derive(Debug)]
pub(crate) struct ExecFormBody {
    request: Bytes,
    /// The request, once its place in memory is given up.
    spooled_request: Option<SpooledBody>,
    value: Value,
    room: Room,
    /// The rest of the form, until the standard input is read from it.
    unread: Option<ExecForm>,
    stdin: Option<SpooledBody>,
}

/// The body as the handler gets it.
#[derive(Debug)]
pub(crate) struct ForwardedBody {
    pub(crate) body: Body,
    pub(crate) secret: SecretHit,
    pub(crate) scan: Option<SeedScan>,
    /// Replaces the caller's content type.
    pub(crate) content_type: Option<HeaderValue>,
}

impl From<Body> for ForwardedBody {
    fn from(body: Body) -> Self {
        Self {
            body,
            secret: SecretHit::default(),
            scan: None,
            content_type: None,
        }
    }
}

/// The first secret found in a body that streams through.
#[derive(Clone, Debug, Default)]
pub(crate) struct SecretHit(Arc<OnceLock<&'static str>>);

impl SecretHit {
    pub(crate) fn kind(&self) -> Option<&'static str> {
        self.0.get().copied()
    }

    pub(crate) fn set(&self, kind: &'static str) {
        self.0.get_or_init(|| kind);
    }
}

impl RequestBody {
    /// Reads the body as its route requires.
    pub(crate) async fn read(
        orchestrator: &Orchestrator,
        context: BodyContext<'_>,
        incoming: IncomingBody,
    ) -> Result<Self, ApiError> {
        let BodyContext {
            caller,
            route,
            shapes,
            path,
            headers,
        } = context;
        if route.body == BodyKind::Exec
            && let Some(boundary) = multipart::boundary(headers)?
        {
            let form = ExecForm::open(incoming.into_body()?, &boundary).await?;
            let (request, room, form) = read_request(orchestrator, caller, form).await?;
            let value =
                compute::run(request.len(), || edge::parse(&request).unwrap_or_default()).await;
            return Ok(Self::Form(ExecFormBody {
                request,
                spooled_request: None,
                value,
                room,
                unread: Some(form),
                stdin: None,
            }));
        }
        match route.body {
            BodyKind::Json | BodyKind::Secret | BodyKind::Exec => {
                let limit = match route.body {
                    BodyKind::Exec => exec_limits::MAX_REQUEST_BYTES,
                    BodyKind::Secret => MAX_SECRET_BODY_BYTES,
                    _ => edge::MAX_BODY,
                };
                let (bytes, value, room) = incoming.json(orchestrator, caller, limit).await?;
                Ok(Self::Json(bytes, value, room))
            }
            BodyKind::File => {
                let mut content = orchestrator
                    .scanner
                    .content(path, shapes.action(Channel::Files));
                let mut watch = orchestrator.system_scanner.watch();
                let inspect = |piece: &[u8]| {
                    content.feed(piece);
                    Ok(watch.feed(piece))
                };
                let mut spooled = spool(
                    orchestrator,
                    caller,
                    incoming.into_body()?,
                    file_limits::MAX_PUT_BYTES,
                    inspect,
                )
                .await?;
                if spooled.leak.is_none() {
                    spooled.leak =
                        leaks::refuse_or_flag("body", path, content, &mut spooled.flags).err();
                }
                Ok(Self::Spooled(spooled))
            }
            BodyKind::Archive => {
                let mut watch = orchestrator.system_scanner.watch();
                let spooled = spool(
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
                let read = tokio::task::spawn_blocking(move || spooled.with_entries(scan)).await;
                read.unwrap_or_else(|_| {
                    Err(ApiError::new(
                        ErrorCode::Internal,
                        "reading the archive was interrupted",
                    ))
                })
                .map(Self::Spooled)
            }
            BodyKind::Stream if route.enters_sandbox => {
                let (secret, action) = (SecretHit::default(), shapes.action(Channel::Seeds));
                let scan = SeedScan::new(orchestrator.scanner.content(path, action), action);
                let body = scan_stream(
                    orchestrator.system_scanner.watch(),
                    incoming.into_body()?,
                    secret.clone(),
                    scan.clone(),
                );
                Ok(Self::Streaming(body, secret, scan))
            }
            BodyKind::Stream => incoming.into_body().map(Self::Unread),
            // Does not wait for a body that the call ignores.
            BodyKind::Empty => Ok(Self::Unread(Body::empty())),
        }
    }

    pub(crate) fn json(&self) -> &Value {
        match self {
            Self::Json(_, value, _) | Self::Form(ExecFormBody { value, .. }) => value,
            _ => &Value::Null,
        }
    }

    /// The number of bytes to scan.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Json(bytes, ..) | Self::Form(ExecFormBody { request: bytes, .. }) => bytes.len(),
            Self::Spooled(_) => self.archive_paths().map(str::len).sum(),
            Self::Unread(_) | Self::Streaming(..) => 0,
        }
    }

    /// Every path of an archive that policies must allow.
    pub(crate) fn archive_paths(&self) -> impl Iterator<Item = &str> {
        let (entries, targets) = match self {
            Self::Spooled(spooled) => (spooled.entries.as_slice(), spooled.link_targets.as_slice()),
            _ => (&[][..], &[][..]),
        };
        entries.iter().chain(targets).map(String::as_str)
    }

    /// Returns the id of the object to be created. Generates one if the caller did not choose it,
    /// so that the object can be found after a crash.
    pub(crate) fn assign_id(&mut self, name: &str, new: impl FnOnce() -> String) -> Option<String> {
        let (Self::Json(bytes, value, _)
        | Self::Form(ExecFormBody {
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

    /// Refuses a body with a secret, or returns what is admitted but flagged. Streaming bodies are
    /// scanned later.
    pub(crate) fn check_secrets(
        &self,
        orchestrator: &Orchestrator,
        action: Action,
        shapes: ShapePolicy,
        patch: Option<&CallerPatch<'_>>,
    ) -> Result<Flags, Leak> {
        match self {
            Self::Json(_, value, _) | Self::Form(ExecFormBody { value, .. }) => {
                let secret = orchestrator.system_scanner.find_in_json(value);
                secret.map_or(Ok(()), |(field, hit)| Err(Leak::system(&field, hit.what)))?;
                leaks::scan_json(&orchestrator.scanner, shapes, action, value, patch)
            }
            Self::Spooled(spooled) => spooled
                .leak
                .clone()
                .map_or_else(|| Ok(spooled.flags.clone()), Err),
            Self::Unread(_) | Self::Streaming(..) => Ok(Flags::default()),
        }
    }

    /// Adds the size, hash and entries of a spooled body to the record.
    pub(crate) fn describe(&self, detail: &mut Map<String, Value>) {
        if let Self::Spooled(spooled) = self {
            detail.insert(
                "body".to_owned(),
                json!({"size": spooled.size, "sha256": spooled.sha256}),
            );
            if !spooled.entry_records.is_empty() {
                detail.insert(
                    "entries".to_owned(),
                    Value::Array(spooled.entry_records.clone()),
                );
                detail.insert("entry_count".to_owned(), json!(spooled.entries.len()));
            }
        }
    }

    /// Reads the standard input of an authorized command, all of it before the command starts.
    pub(crate) async fn read_stdin(
        &mut self,
        orchestrator: &Orchestrator,
        caller: &Caller,
        shapes: ShapePolicy,
    ) -> Result<Option<Stdin>, ApiError> {
        let Self::Form(form) = self else {
            return Ok(None);
        };
        let Some(unread) = form.unread.take() else {
            return Ok(None);
        };
        form.release_memory(orchestrator, caller).await?;
        let mut content = orchestrator
            .scanner
            .content("", shapes.action(Channel::Stdin));
        let pieces = stream::try_unfold(unread, async |mut unread| {
            let piece = unread.next_piece().await.map_err(budget::BodyError)?;
            Ok::<_, budget::BodyError>(piece.map(|piece| (piece, unread)))
        });
        let mut watch = orchestrator.system_scanner.watch();
        let inspect = |piece: &[u8]| {
            content.feed(piece);
            Ok(watch.feed(piece))
        };
        let spooled = spool(
            orchestrator,
            caller,
            Body::from_stream(pieces),
            exec_limits::MAX_FORM_STDIN_BYTES,
            inspect,
        )
        .await?;
        let mut flags = Flags::default();
        let system = spooled.leak.clone().map(|leak| Leak {
            field: "stdin".to_owned(),
            ..leak
        });
        let verdict = system.map_or(Ok(()), Err).and_then(|()| {
            leaks::refuse_or_flag("stdin", "stdin", content, &mut flags)
                .map_err(|leak| Leak { path: None, ..leak })
        });
        let stdin = Stdin {
            record: json!({"size": spooled.size, "sha256": spooled.sha256}),
            verdict: verdict.map(|()| flags),
        };
        form.stdin = Some(spooled);
        Ok(Some(stdin))
    }

    pub(crate) fn into_forwarded(self) -> ForwardedBody {
        match self {
            Self::Unread(body) => body.into(),
            Self::Json(bytes, _, room) => json::body(bytes, room).into(),
            Self::Form(form) => form.into_forwarded(),
            Self::Spooled(spooled) => spooled.into_body().into(),
            Self::Streaming(body, secret, scan) => ForwardedBody {
                body,
                secret,
                scan: Some(scan),
                content_type: None,
            },
        }
    }
}

/// The standard input of a command: its record, and the verdict on its content.
#[derive(Debug)]
pub(crate) struct Stdin {
    pub(crate) record: Value,
    pub(crate) verdict: Result<Flags, Leak>,
}

/// Reads the request of a form as any other JSON body: a long one waits in a file until there is
/// memory to parse it.
async fn read_request(
    orchestrator: &Orchestrator,
    caller: &Caller,
    form: ExecForm,
) -> Result<(Bytes, Room, ExecForm), ApiError> {
    let (give_back, mut given_back) = oneshot::channel();
    let pieces = stream::try_unfold((form, give_back), async |(mut form, give_back)| {
        let piece = form.next_request_piece().await.map_err(budget::BodyError)?;
        let Some(piece) = piece else {
            drop(give_back.send(form));
            return Ok(None);
        };
        Ok::<_, budget::BodyError>(Some((piece, (form, give_back))))
    });
    let limit = exec_limits::MAX_REQUEST_BYTES;
    let (request, room) =
        json_body_up_to(orchestrator, caller, Body::from_stream(pieces), limit).await?;
    let form = given_back
        .try_recv()
        .map_err(|_| ApiError::new(ErrorCode::Internal, "the form was not read to its end"))?;
    Ok((request, room, form))
}

impl ExecFormBody {
    /// Gives up the memory of the request while the input is read, which may take an hour. The
    /// call is authorized, so nothing looks at the parsed request any more.
    async fn release_memory(
        &mut self,
        orchestrator: &Orchestrator,
        caller: &Caller,
    ) -> Result<(), ApiError> {
        if self.request.len() <= compute::INLINE_BYTES {
            return Ok(());
        }
        let request = Body::from(std::mem::take(&mut self.request));
        let limit = exec_limits::MAX_REQUEST_BYTES as u64;
        let spooled = spool(orchestrator, caller, request, limit, |_| Ok(None)).await?;
        self.spooled_request = Some(spooled);
        self.value = Value::Null;
        self.room = Room::default();
        Ok(())
    }

    /// Rebuilds the form, whose request now contains the id of the command.
    fn into_forwarded(self) -> ForwardedBody {
        let boundary = format!("cynode-{}", uuid::Uuid::new_v4());
        let [head, between, tail] = exec_form_frame(&boundary);
        let request = match self.spooled_request {
            Some(request) => request.into_body(),
            None => json::body(self.request, self.room),
        };
        let stdin = self.stdin.map_or_else(Body::empty, SpooledBody::into_body);
        let ends = |bytes: Vec<u8>| stream::iter([Ok::<_, axum::Error>(Bytes::from(bytes))]);
        let body = Body::from_stream(
            ends(head)
                .chain(request.into_data_stream())
                .chain(ends(between))
                .chain(stdin.into_data_stream())
                .chain(ends(tail)),
        );
        let content_type =
            HeaderValue::from_str(&format!("multipart/form-data; boundary={boundary}")).ok();
        ForwardedBody {
            content_type,
            ..body.into()
        }
    }
}

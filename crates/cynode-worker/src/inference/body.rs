//! Bodies of requests, within bounds of size, time and memory.
//!
//! Invariant: a body that has not arrived takes nothing that others need. Long ones arrive in files;
//! only whole ones take the places in memory, and those for the time of a check.

use std::{
    io::{self, Read as _, Seek as _, Write as _},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use cynode_inference::{Refusal, RefusalCode, limits::MAX_BODY_NODES};
use cynode_service::{compute::INLINE_BYTES, json};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use tempfile::SpooledTempFile;
use tokio::sync::SemaphorePermit;

use super::Inference;
use crate::{journal::blocking, proxies::ProxyBody};

/// Bodies over 64 KiB that are in memory and checked at once.
pub(super) const LARGE_BODIES: usize = 6;
/// The time for all of a body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// A body that has arrived.
pub(super) struct ReadBody<'a> {
    pub(super) bytes: Bytes,
    /// The share of memory for the body and its values.
    pub(super) room: json::Room,
    _permit: Option<SemaphorePermit<'a>>,
}

/// A body on its way into memory.
struct SpooledBody {
    file: SpooledTempFile,
    bytes: usize,
    /// An upper bound of its values and names.
    nodes: usize,
}

fn refuse(code: RefusalCode, message: impl Into<String>) -> Refusal {
    Refusal::new(code, message)
}

fn not_stored(error: &io::Error) -> Refusal {
    tracing::warn!(%error, "A request to a model could not be stored.");
    let message = "the node could not store the request";
    refuse(RefusalCode::InferenceUnavailable, message)
}

impl Inference {
    /// Reads a whole body.
    pub(super) async fn read_body(
        self: &Arc<Self>,
        body: ProxyBody,
    ) -> Result<ReadBody<'_>, Refusal> {
        let spooled = tokio::time::timeout(BODY_TIMEOUT, self.spool(body)).await;
        let SpooledBody {
            mut file,
            bytes,
            nodes,
        } = spooled.unwrap_or_else(|_| {
            let seconds = BODY_TIMEOUT.as_secs();
            let message = format!("the body did not arrive within {seconds} s");
            Err(refuse(RefusalCode::InvalidRequest, message))
        })?;
        // Shared fairly among sandboxes. Taken first, because it may be held for long by bodies that
        // wait for the model server.
        let room = json::room(bytes, nodes).await;
        let permit = if bytes > INLINE_BYTES {
            // The semaphore is never closed.
            self.large_bodies.acquire().await.ok()
        } else {
            None
        };
        let mut read = move || {
            let mut read = Vec::with_capacity(bytes);
            file.rewind()?;
            file.read_to_end(&mut read)?;
            io::Result::Ok(read)
        };
        let read = if permit.is_some() {
            blocking(read).await
        } else {
            read()
        };
        Ok(ReadBody {
            bytes: read.map_err(|error| not_stored(&error))?.into(),
            room,
            _permit: permit,
        })
    }

    async fn spool(&self, mut body: ProxyBody) -> Result<SpooledBody, Refusal> {
        let most = self.config.max_body_bytes;
        let too_large = || {
            let message = format!("the body has more than {most} bytes");
            refuse(RefusalCode::TooLarge, message)
        };
        let announced = body.size_hint().lower();
        if announced > most as u64 {
            return Err(too_large());
        }
        let mut file = tempfile::spooled_tempfile_in(INLINE_BYTES, &self.spool_directory);
        let mut bytes = 0;
        let mut scan = json::Scan::up_to(MAX_BODY_NODES);
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|_| refuse(RefusalCode::InvalidRequest, "the body broke off"))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            bytes += data.len();
            if bytes > most {
                return Err(too_large());
            }
            scan.feed(&data).map_err(|_| {
                let message = format!("the body has more than {MAX_BODY_NODES} values and names");
                refuse(RefusalCode::TooLarge, message)
            })?;
            file.write_all(&data).map_err(|error| not_stored(&error))?;
        }
        Ok(SpooledBody {
            file,
            bytes,
            nodes: scan.nodes(),
        })
    }
}

//! Bodies of requests, within bounds of size, time and memory.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use cynode_inference::{Refusal, RefusalCode, limits::MAX_BODY_NODES};
use cynode_service::{compute::INLINE_BYTES, json};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use tokio::{sync::SemaphorePermit, time::Instant};

use super::Inference;
use crate::proxies::ProxyBody;

/// Bodies over 64 KiB that are read and checked at once.
pub(super) const LARGE_BODIES: usize = 6;
/// The time for all of a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// A body that has arrived.
pub(super) struct ReadBody<'a> {
    pub(super) bytes: Bytes,
    /// An upper bound of its values and names.
    pub(super) nodes: usize,
    _permit: Option<SemaphorePermit<'a>>,
}

fn refuse(code: RefusalCode, message: impl Into<String>) -> Refusal {
    Refusal::new(code, message)
}

impl Inference {
    /// Reads a whole body.
    pub(super) async fn read_body(
        self: &Arc<Self>,
        body: ProxyBody,
    ) -> Result<ReadBody<'_>, Refusal> {
        let deadline = Instant::now() + BODY_TIMEOUT;
        tokio::time::timeout_at(deadline, self.read(body))
            .await
            .unwrap_or_else(|_| {
                let seconds = BODY_TIMEOUT.as_secs();
                let message = format!("the body did not arrive within {seconds} s");
                Err(refuse(RefusalCode::InvalidRequest, message))
            })
    }

    async fn read(&self, mut body: ProxyBody) -> Result<ReadBody<'_>, Refusal> {
        let most = self.config.max_body_bytes;
        let too_large = || {
            let message = format!("the body has more than {most} bytes");
            refuse(RefusalCode::TooLarge, message)
        };
        let announced = body.size_hint().lower();
        if announced > most as u64 {
            return Err(too_large());
        }
        let mut permit = None;
        let mut bytes = BytesMut::new();
        let mut scan = json::Scan::up_to(MAX_BODY_NODES);
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|_| refuse(RefusalCode::InvalidRequest, "the body broke off"))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if bytes.len() + data.len() > most {
                return Err(too_large());
            }
            if permit.is_none() && bytes.len() + data.len() > INLINE_BYTES {
                // The semaphore is never closed.
                permit = self.large_bodies.acquire().await.ok();
            }
            scan.feed(&data).map_err(|_| {
                let message = format!("the body has more than {MAX_BODY_NODES} values and names");
                refuse(RefusalCode::TooLarge, message)
            })?;
            bytes.extend_from_slice(&data);
        }
        Ok(ReadBody {
            bytes: bytes.freeze(),
            nodes: scan.nodes(),
            _permit: permit,
        })
    }
}

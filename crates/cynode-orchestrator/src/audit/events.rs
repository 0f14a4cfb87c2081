//! Copies the events of sessions and jobs into the audit trail, each once.

use std::{sync::Arc, time::Duration};

use cynode_api::{AuditBody, AuditKind, AuditSubject, Event};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Error, OwnHeads};
use crate::db::{Db, to_json};

/// The stream of event records, separate because they are written in the transaction that stores
/// the position.
#[derive(Clone, Debug)]
pub(crate) struct EventPump(Arc<Mutex<Uuid>>);

impl EventPump {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Uuid::now_v7())))
    }

    pub(crate) fn stream(&self) -> Uuid {
        *self.0.lock()
    }
}

/// Copies events into the trail.
#[derive(Debug)]
pub(crate) struct EventCopier {
    pub(crate) db: Db,
    pub(crate) pump: EventPump,
    pub(crate) heads: OwnHeads,
    /// The name of this process.
    pub(crate) writer: String,
}

impl EventCopier {
    /// Copies new events until the orchestrator has answered all calls.
    pub(crate) async fn run(self, mut events: watch::Receiver<u64>, closing: CancellationToken) {
        let mut is_open = false;
        loop {
            if let Err(error) = self.round(&mut is_open).await {
                tracing::debug!(%error, "Events were not copied into the audit trail; the next round retries.");
            }
            tokio::select! {
                () = closing.cancelled() => break,
                _ = events.changed() => {}
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
        }
        drop(self.round(&mut is_open).await);
        drop(self.db.close_stream(self.pump.stream()).await);
    }

    async fn round(&self, is_open: &mut bool) -> Result<(), Error> {
        loop {
            if !*is_open {
                self.db
                    .open_stream(self.pump.stream(), &format!("{} events", self.writer))
                    .await?;
                *is_open = true;
            }
            match self.db.audit_events(self.pump.stream(), record).await? {
                Some(None) => return Ok(()),
                Some(Some(head)) => self.heads.committed(self.pump.stream(), head),
                // Another orchestrator considered this stream dead: continue in a new one.
                None => {
                    *self.pump.0.lock() = Uuid::now_v7();
                    *is_open = false;
                }
            }
        }
    }
}

/// The record of an event; for an ended job, with its result.
fn record(event: &Event, ended: Option<&Map<String, Value>>) -> Value {
    let mut body = AuditBody::new(AuditKind::Event, event.kind.as_str());
    body.subject = Some(AuditSubject {
        kind: "system".to_owned(),
        ..AuditSubject::default()
    });
    body.project_id = event.project_id;
    body.task_id = Some(event.task_id);
    body.session_id = event.session_id;
    body.job_id = event.job_id;
    body.detail.insert("state".to_owned(), json!(event.state));
    body.detail
        .insert("event_cursor".to_owned(), json!(event.cursor));
    body.detail.extend(ended.cloned().unwrap_or_default());
    to_json(&body)
}

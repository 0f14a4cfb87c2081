//! What happened to sessions and jobs, whoever made it happen: each event is told in the trail, once.

use std::{sync::Arc, time::Duration};

use cynode_api::{AuditBody, AuditKind, AuditSubject, Event};
use cynode_service::ApiError;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::{Orchestrator, db::to_json};

/// A stream of its own: its records are written in the transaction that says how far it has come.
#[derive(Clone, Debug)]
pub(crate) struct Pump(Arc<Mutex<Uuid>>);

impl Pump {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Uuid::now_v7())))
    }

    pub(crate) fn stream(&self) -> Uuid {
        *self.0.lock()
    }

    /// Tells what is new until the orchestrator stops.
    pub(crate) async fn run(orchestrator: Orchestrator, writer: String) {
        let mut news = orchestrator.news.subscribe();
        let mut is_open = false;
        loop {
            if let Err(error) = round(&orchestrator, &writer, &mut is_open).await {
                tracing::debug!(error = %error.0, "Events were not told in the audit trail; the next round does.");
            }
            tokio::select! {
                () = orchestrator.closing.cancelled() => break,
                _ = news.changed() => {}
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
        }
        drop(round(&orchestrator, &writer, &mut is_open).await);
        drop(
            orchestrator
                .db
                .close_stream(orchestrator.pump.stream())
                .await,
        );
    }
}

async fn round(
    orchestrator: &Orchestrator,
    writer: &str,
    is_open: &mut bool,
) -> Result<(), ApiError> {
    loop {
        if !*is_open {
            orchestrator
                .db
                .open_stream(orchestrator.pump.stream(), &format!("{writer} events"))
                .await?;
            *is_open = true;
        }
        match orchestrator
            .db
            .audit_events(orchestrator.pump.stream(), told)
            .await?
        {
            Some(None) => return Ok(()),
            Some(Some(head)) => orchestrator
                .audit
                .heads
                .committed(orchestrator.pump.stream(), head),
            // Taken for dead: on in a new one.
            None => {
                *orchestrator.pump.0.lock() = Uuid::now_v7();
                *is_open = false;
            }
        }
    }
}

/// The record of an event; of a job that has ended, with how.
fn told(event: &Event, ended: Option<&Map<String, Value>>) -> Value {
    let mut body = AuditBody::new(AuditKind::Event, event.kind.as_str());
    body.subject = Some(AuditSubject {
        kind: "system".to_owned(),
        name: None,
        user_id: None,
        token_id: None,
        node_id: None,
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

//! Timers: lifetimes, idle timeouts, workspace grace periods and the retention of old records.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::SessionState;
use cynode_sba_proto::proxy::LISTENERS_NAME;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use super::{EndRequest, Live, SessionEntry, Sessions, blocking};
use crate::{
    journal::{Disposal, SessionRecord},
    process,
};

const TICK_INTERVAL: Duration = Duration::from_secs(1);
/// Expired workspaces and old records are deleted every `CLEANUP_TICKS` ticks.
const CLEANUP_TICKS: u64 = 5;
/// Retention of an ended session's record.
const RECORD_RETENTION: time::Duration = time::Duration::days(1);
/// Records of ended sessions; the oldest are dropped first.
const MAX_ENDED_SESSIONS: usize = 5_000;

impl Sessions {
    /// Checks all sessions once a second until stopped.
    pub(crate) async fn run_timers(self: Arc<Self>, stop: CancellationToken) {
        if stop.run_until_cancelled(self.reconciled()).await.is_none() {
            return;
        }
        let mut ticks: u64 = 0;
        while stop
            .run_until_cancelled(tokio::time::sleep(TICK_INTERVAL))
            .await
            .is_some()
        {
            let entries: Vec<Arc<SessionEntry>> = self.by_id.lock().values().cloned().collect();
            let running = entries
                .iter()
                .filter(|entry| entry.state() == SessionState::Running && !entry.belongs_to_job())
                .count();
            #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
            {
                metrics::gauge!("cynode_sessions_running").set(running as f64);
                metrics::gauge!("cynode_execs_open").set(
                    entries
                        .iter()
                        .map(|entry| entry.execs.running_count())
                        .sum::<u32>(),
                );
            }
            for entry in entries {
                if let Some(reason) = Self::expiry_reason(&entry) {
                    let sessions = Arc::clone(&self);
                    tokio::spawn(async move {
                        if let Err(error) = sessions
                            .end_entry(
                                &entry,
                                EndRequest {
                                    reason: reason.to_owned(),
                                    workspace: Disposal::KeepForAWhile,
                                },
                            )
                            .await
                        {
                            tracing::error!(
                                error = %error,
                                "Failed to end an expired session; will retry."
                            );
                        }
                    });
                }
            }
            ticks += 1;
            if ticks.is_multiple_of(CLEANUP_TICKS) {
                self.retry_removals().await;
                self.delete_expired().await;
            }
        }
    }

    /// The reason to end a session now, if any.
    fn expiry_reason(entry: &SessionEntry) -> Option<&'static str> {
        let record = entry.record();
        match record.session.state {
            SessionState::Running => {}
            // Retry an end that failed, e.g. while the runtime was unavailable.
            SessionState::Ending if entry.step.try_lock().is_ok() => return Some("ended"),
            _ => return None,
        }
        // A job has its own deadline and ends its sandbox.
        if record.job_id.is_some() {
            return None;
        }
        if OffsetDateTime::now_utc() >= record.session.expires_at {
            return Some("expired");
        }
        let live = entry.live.lock().clone()?;
        if live.is_active() {
            return None;
        }
        let last = live.last_active().max(*entry.last_activity.lock());
        if last.elapsed() < Duration::from_secs(record.idle_timeout_seconds) {
            return None;
        }
        if has_background_processes(&live) {
            *entry.last_activity.lock() = Instant::now();
            return None;
        }
        Some("idle")
    }

    /// Deletes workspaces past their grace period, and old records.
    async fn delete_expired(&self) {
        let now = OffsetDateTime::now_utc();
        // No session may mount a workspace between the check and its deletion.
        let _admission = self.admission_lock.lock().await;
        let entries: Vec<Arc<SessionEntry>> = self.by_id.lock().values().cloned().collect();
        let (live, mut ended): (Vec<_>, Vec<_>) = entries
            .iter()
            .map(|entry| entry.record())
            .partition(SessionRecord::is_live);
        let mut deleted = false;
        let journal = self.journal.clone();
        for workspace in blocking(move || journal.workspaces())
            .await
            .unwrap_or_default()
        {
            let in_use = live
                .iter()
                .any(|record| record.session.workspace_id == workspace.workspace_id);
            if !in_use && workspace.delete_at.is_some_and(|at| at <= now) {
                if let Err(error) = self.delete_workspace(workspace.workspace_id).await {
                    tracing::warn!(%error, "Failed to delete an expired workspace; will retry.");
                }
                deleted = true;
            }
        }
        // The sandbox of a job is forgotten with its job.
        ended.retain(|record| record.job_id.is_none());
        ended.sort_by_key(|record| record.session.ended_at);
        let excess = ended.len().saturating_sub(MAX_ENDED_SESSIONS);
        let retention = RECORD_RETENTION.max(time::Duration::seconds(
            i64::try_from(self.config.workspace_grace_seconds).unwrap_or(i64::MAX),
        ));
        for (index, record) in ended.iter().enumerate() {
            if index < excess
                || record
                    .session
                    .ended_at
                    .is_some_and(|at| now - at > retention)
            {
                let id = record.session.session_id;
                self.by_id.lock().remove(&id);
                drop(self.journal.discard(&self.journal.session_directory(id)));
                deleted = true;
            }
        }
        if deleted {
            drop(self.empty_trash());
        }
    }
}

/// Background processes count as activity. An idle process 1 has no child but the listeners. A
/// process that takes their name only makes its own session idle sooner.
fn has_background_processes(live: &Live) -> bool {
    let init = live.init.pid;
    let processes = process::in_namespace_of(init);
    if !live.has_agent() {
        // The shell that idles.
        return processes.len() > 1;
    }
    match processes.as_slice() {
        [] => false,
        [only] => only.parent != init || process::name(only.pid).as_deref() != Some(LISTENERS_NAME),
        _ => true,
    }
}

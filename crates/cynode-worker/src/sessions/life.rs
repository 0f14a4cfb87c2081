//! Time passing: lifetimes, idleness, kept workspaces, records of what has ended.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::SessionState;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use super::{Ending, Entry, Sessions, blocking};
use crate::{
    journal::{Disposal, SessionRecord},
    process,
};

const TICK: Duration = Duration::from_secs(1);
/// Kept workspaces and old records are looked at every so many ticks.
const FORGET_EVERY: u64 = 5;
/// How long the record of an ended session stays.
const REMEMBER: time::Duration = time::Duration::days(1);
/// And how many of them at most.
const MAX_REMEMBERED: usize = 5_000;

impl Sessions {
    /// Looks at everything once a second until it is told to stop.
    pub(crate) async fn keep_time(self: Arc<Self>, stop: CancellationToken) {
        if stop.run_until_cancelled(self.settled()).await.is_none() {
            return;
        }
        let mut ticks: u64 = 0;
        while stop
            .run_until_cancelled(tokio::time::sleep(TICK))
            .await
            .is_some()
        {
            let entries: Vec<Arc<Entry>> = self.known.lock().values().cloned().collect();
            let running = entries
                .iter()
                .filter(|entry| entry.state() == SessionState::Running && !entry.is_jobs())
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
                if let Some(reason) = Self::is_over(&entry) {
                    let sessions = Arc::clone(&self);
                    tokio::spawn(async move {
                        if let Err(error) = sessions
                            .end_entry(
                                &entry,
                                Ending {
                                    reason: reason.to_owned(),
                                    workspace: Disposal::KeepForAWhile,
                                },
                            )
                            .await
                        {
                            tracing::error!(error = %error.0, "Ending an expired session failed; it is tried again.");
                        }
                    });
                }
            }
            ticks += 1;
            if ticks.is_multiple_of(FORGET_EVERY) {
                self.remove_doomed().await;
                self.forget().await;
            }
        }
    }

    /// Why a session's time is over, if it is.
    fn is_over(entry: &Entry) -> Option<&'static str> {
        let record = entry.record();
        match record.session.state {
            SessionState::Running => {}
            // An end that could not be finished, the runtime being away, is taken up again.
            SessionState::Ending if entry.step.try_lock().is_ok() => return Some("ended"),
            _ => return None,
        }
        // A job has a deadline of its own, and its sandbox ends with it.
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
        // What an exec left running is activity too. Process 1 itself has no children when idle.
        let idle_shell = usize::from(!live.has_agent());
        if process::in_namespace_of(live.init.pid).len() > idle_shell {
            *entry.last_activity.lock() = Instant::now();
            return None;
        }
        Some("idle")
    }

    /// Deletes workspaces whose grace is over, and old records.
    async fn forget(&self) {
        let now = OffsetDateTime::now_utc();
        // Nobody may take a workspace into use between the look and its deletion.
        let _gate = self.gate.lock().await;
        let entries: Vec<Arc<Entry>> = self.known.lock().values().cloned().collect();
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
                    tracing::warn!(%error, "Deleting a workspace whose grace is over failed; it is tried again.");
                }
                deleted = true;
            }
        }
        // The sandbox of a job is forgotten with its job.
        ended.retain(|record| record.job_id.is_none());
        ended.sort_by_key(|record| record.session.ended_at);
        let excess = ended.len().saturating_sub(MAX_REMEMBERED);
        let remember = REMEMBER.max(time::Duration::seconds(
            i64::try_from(self.config.workspace_grace_seconds).unwrap_or(i64::MAX),
        ));
        for (index, record) in ended.iter().enumerate() {
            if index < excess
                || record
                    .session
                    .ended_at
                    .is_some_and(|at| now - at > remember)
            {
                let id = record.session.session_id;
                self.known.lock().remove(&id);
                drop(self.journal.discard(&self.journal.session_directory(id)));
                deleted = true;
            }
        }
        if deleted {
            drop(self.empty_trash());
        }
    }
}

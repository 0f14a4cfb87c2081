//! Reconciles sessions with running containers after a worker start.
//!
//! Idempotent, and safe to interrupt anywhere: the next start repeats it. Its only inputs are the
//! journal and the runtime's list of containers. Containers of this node without a session are
//! removed. A session whose process still runs is adopted by its recorded process, before the
//! runtime is queried.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use cynode_api::{ExecVia, LABEL_NODE_ID, SessionState};

use super::{Live, SessionEntry, Sessions};
use crate::{
    disk,
    execs::{adopt_by_agent, end_orphans},
    journal::{SessionRecord, container_name},
    proxies::ProxySocket,
    sandbox::AgentLink,
};

/// A live agent reconnects at once; this allows for a loaded host.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(30);

impl Sessions {
    /// Recovers all sessions of an earlier worker process.
    pub(crate) async fn reconcile(self: &Arc<Self>) {
        self.sweep_mounts().await;
        let entries: Vec<Arc<SessionEntry>> = self.by_id.lock().values().cloned().collect();
        // Running sessions first: they only need new sockets.
        let mut adopting = tokio::task::JoinSet::new();
        for entry in entries
            .iter()
            .filter(|entry| entry.state() == SessionState::Running)
        {
            let (sessions, entry) = (Arc::clone(self), Arc::clone(entry));
            adopting.spawn(async move { sessions.adopt(&entry).await });
        }
        adopting.join_all().await;
        self.remove_orphans().await;
        let mut rest = tokio::task::JoinSet::new();
        for entry in entries {
            let sessions = Arc::clone(self);
            match entry.state() {
                SessionState::Creating => {
                    rest.spawn(async move { sessions.bring_up(&entry).await });
                }
                SessionState::Ending => {
                    rest.spawn(async move {
                        let _step = entry.step.lock().await;
                        if let Err(error) = sessions.finish_end(&entry).await {
                            tracing::error!(
                                error = %error,
                                "Failed to finish ending a session; will retry."
                            );
                        }
                    });
                }
                _ => {}
            }
        }
        rest.join_all().await;
        self.sweep_directories().await;
        drop(self.empty_trash());
        self.unreconciled.send_replace(None);
    }

    async fn adopt(self: &Arc<Self>, entry: &Arc<SessionEntry>) {
        let record = entry.record();
        let Some(init) = record.init.filter(|init| init.is_alive()) else {
            return self
                .mark_lost(entry, "its container was gone when the worker started")
                .await;
        };
        let directory = self.journal.sandbox_directory(record.sandbox_id);
        let link = match self.config.exec_via {
            ExecVia::Runtime => None,
            ExecVia::Agent => match AgentLink::listen(&directory, Some(init)) {
                Ok(link) => Some(link),
                Err(error) => {
                    tracing::error!(%error, "Failed to reopen a control socket.");
                    return self
                        .mark_lost(entry, "its control socket could not be reopened")
                        .await;
                }
            },
        };
        let proxies = link.as_ref().and_then(|_| {
            ProxySocket::listen(&directory, &self.proxies)
                .inspect_err(|error| {
                    tracing::error!(%error, "Failed to reopen the socket of a sandbox's proxies.");
                })
                .ok()
        });
        let live = Live::new(
            record.container(),
            init,
            Arc::clone(&self.runtime),
            link,
            proxies,
            None,
        );
        live.serve_proxies(entry);
        if let Ok(link) = live.link() {
            if !link.present(ADOPT_TIMEOUT).await {
                live.kill_container().await;
                return self.mark_lost(entry, "its agent did not reconnect").await;
            }
            if let Err(error) = adopt_by_agent(
                Arc::clone(&live),
                Arc::clone(&entry.execs),
                record.job_id.is_some(),
            )
            .await
            {
                tracing::error!(error = %error, "Failed to adopt a session's execs.");
                entry.execs.mark_all_lost();
            }
        } else {
            end_orphans(&live, &entry.execs).await;
        }
        *entry.live.lock() = Some(Arc::clone(&live));
        entry.touch();
        // Wakes the job, which waits for the container rather than for a state change.
        entry.state.send_modify(|_| {});
        self.watch(entry, live);
        tracing::info!(
            session_id = %record.session.session_id,
            has_proxies = record.has_proxies,
            "Adopted a session."
        );
    }

    /// Removes containers of this node without a session. Retries until the runtime answers.
    async fn remove_orphans(&self) {
        let containers = loop {
            match self
                .runtime
                .list(LABEL_NODE_ID, &self.node_id.to_string())
                .await
            {
                Ok(containers) => break containers,
                Err(error) => {
                    tracing::error!(%error, "Failed to list containers; retrying.");
                    self.unreconciled
                        .send_replace(Some(format!("recovering earlier sessions: {error}")));
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        };
        let wanted: HashSet<String> = self
            .by_id
            .lock()
            .values()
            .filter(|entry| entry.live.lock().is_some())
            .map(|entry| entry.record.lock().container())
            .collect();
        for container in containers
            .into_iter()
            .filter(|container| !wanted.contains(&container.name))
        {
            tracing::info!(
                container = container.name,
                "Removing an orphaned container."
            );
            if let Err(error) = self.runtime.remove(&container.name).await {
                tracing::error!(
                    container = container.name,
                    %error,
                    "Failed to remove an orphaned container."
                );
            }
        }
    }

    /// Unmounts disks without a session: those of retained workspaces, or of workspaces being
    /// deleted.
    async fn sweep_mounts(&self) {
        let wanted: HashSet<PathBuf> = self
            .by_id
            .lock()
            .values()
            .map(|entry| entry.record.lock().clone())
            .filter(SessionRecord::is_live)
            .map(|record| self.journal.workspace_disk(record.session.workspace_id).1)
            .collect();
        for mounted in self
            .journal
            .mounts()
            .unwrap_or_default()
            .into_iter()
            .filter(|path| !wanted.contains(path))
        {
            if let Err(error) = disk::unmount(&mounted).await {
                tracing::error!(
                    path = %mounted.display(),
                    %error,
                    "Failed to unmount a disk without a session."
                );
            }
        }
    }

    /// Removes sandbox directories without a session, and workspaces that a crash left between two
    /// writes.
    async fn sweep_directories(&self) {
        let (sandboxes, workspaces): (HashSet<_>, HashSet<_>) = self
            .by_id
            .lock()
            .values()
            .map(|entry| {
                let record = entry.record.lock();
                (
                    record.is_live().then_some(record.sandbox_id),
                    record.session.workspace_id,
                )
            })
            .unzip();
        for id in self.journal.sandboxes().unwrap_or_default() {
            if !sandboxes.contains(&Some(id))
                && let Err(error) = self.journal.discard(&self.journal.sandbox_directory(id))
            {
                tracing::warn!(
                    container = container_name(id),
                    %error,
                    "Failed to remove a sandbox's directory."
                );
            }
        }
        // Delete workspaces without a session and without files: a crash came right after their
        // creation. All other retained workspaces have files.
        for workspace in self.journal.workspaces().unwrap_or_default() {
            let (image, data) = self.journal.workspace_disk(workspace.workspace_id);
            let is_missing = |path: &Path| {
                fs_err::symlink_metadata(path)
                    .is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
            };
            let empty = is_missing(&image) && is_missing(&data);
            if !workspaces.contains(&workspace.workspace_id) && empty {
                drop(self.delete_workspace(workspace.workspace_id).await);
            }
        }
    }
}

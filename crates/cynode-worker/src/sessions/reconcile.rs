//! After a start: what should run, and what does.
//!
//! Idempotent, takes no input but the journal and the runtime's own list, and may be cut off anywhere: the next start does
//! it again. Nothing is done by guess: a container of ours that no session wants goes, a session whose process still runs
//! is adopted by the recorded process, before the runtime is even asked.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use cynode_api::{ExecVia, LABEL_NODE_ID, SessionState};

use super::{Entry, Live, Sessions};
use crate::{
    disk,
    execs::{Leftovers, adopt_by_agent},
    journal::{SessionRecord, container_name},
    sandbox::AgentLink,
};

/// An agent that is alive connects within moments; under load this is generous.
const ADOPT_WAIT: Duration = Duration::from_secs(30);

impl Sessions {
    /// Takes up all that an earlier worker left. Returns when everything is in order.
    pub(crate) async fn reconcile(self: &Arc<Self>) {
        self.sweep_mounts().await;
        let entries: Vec<Arc<Entry>> = self.known.lock().values().cloned().collect();
        // Running sessions first: they only need their sockets back.
        let mut adopting = tokio::task::JoinSet::new();
        for entry in entries
            .iter()
            .filter(|entry| entry.state() == SessionState::Running)
        {
            let (sessions, entry) = (Arc::clone(self), Arc::clone(entry));
            adopting.spawn(async move { sessions.adopt(&entry).await });
        }
        adopting.join_all().await;
        self.remove_strangers().await;
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
                            tracing::error!(error = %error.0, "Finishing an end failed; it is tried again.");
                        }
                    });
                }
                _ => {}
            }
        }
        rest.join_all().await;
        self.sweep_directories().await;
        drop(self.empty_trash());
        self.unsettled.send_replace(None);
    }

    async fn adopt(self: &Arc<Self>, entry: &Arc<Entry>) {
        let record = entry.record();
        let Some(init) = record.init.filter(|init| init.is_alive()) else {
            return self
                .lose(entry, "its container was gone when the worker started")
                .await;
        };
        let directory = self.journal.sandbox_directory(record.sandbox_id);
        let link = match self.config.exec_via {
            ExecVia::Runtime => None,
            ExecVia::Agent => match AgentLink::listen(&directory, Some(init)) {
                Ok(link) => Some(link),
                Err(error) => {
                    tracing::error!(%error, "Opening a control socket again failed.");
                    return self
                        .lose(entry, "its control socket could not be opened again")
                        .await;
                }
            },
        };
        let live = Live::new(
            record.container(),
            init,
            Arc::clone(&self.runtime),
            link,
            None,
        );
        if let Ok(link) = live.link() {
            if !link.present(ADOPT_WAIT).await {
                live.kill_container().await;
                return self.lose(entry, "its agent did not come back").await;
            }
            if let Err(error) = adopt_by_agent(
                Arc::clone(&live),
                Arc::clone(&entry.execs),
                record.job_id.is_some(),
            )
            .await
            {
                tracing::error!(error = %error.0, "Taking up a session's execs failed.");
                entry.execs.lose_all();
            }
        } else {
            Leftovers::end(&live, &entry.execs);
        }
        *entry.live.lock() = Some(Arc::clone(&live));
        entry.touch();
        // Its job waits for the container and not for a change of state.
        entry.state.send_modify(|_| {});
        self.watch(entry, live);
        tracing::info!(session_id = %record.session.session_id, "Adopted a session.");
    }

    /// Removes containers of this node that no session wants. Tries until the runtime answers.
    async fn remove_strangers(&self) {
        let containers = loop {
            match self
                .runtime
                .list(LABEL_NODE_ID, &self.node_id.to_string())
                .await
            {
                Ok(containers) => break containers,
                Err(error) => {
                    tracing::error!(%error, "Listing containers failed; trying again.");
                    self.unsettled.send_replace(Some(format!(
                        "taking up what an earlier worker left: {error}"
                    )));
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        };
        let wanted: HashSet<String> = self
            .known
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
                "Removing a container that no session wants."
            );
            if let Err(error) = self.runtime.remove(&container.name).await {
                tracing::error!(container = container.name, %error, "Removing it failed.");
            }
        }
    }

    /// Unmounts disks that no session has: of workspaces that are kept, or that were on their way to the trash.
    async fn sweep_mounts(&self) {
        let wanted: HashSet<PathBuf> = self
            .known
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
                tracing::error!(path = %mounted.display(), %error, "Unmounting a disk that no session has failed.");
            }
        }
    }

    /// Removes directories of sandboxes that no session has, and workspaces that a crash left between two writes.
    async fn sweep_directories(&self) {
        let (sandboxes, workspaces): (HashSet<_>, HashSet<_>) = self
            .known
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
                tracing::warn!(container = container_name(id), %error, "Removing a sandbox's directory failed.");
            }
        }
        // A workspace that no session ever got: the crash came right after it was made. Kept ones belong to a session's
        // record, or were kept on purpose and carry no date; only those younger than any record can be such leftovers.
        for workspace in self.journal.workspaces().unwrap_or_default() {
            let (image, data) = self.journal.workspace_disk(workspace.workspace_id);
            let is_missing = |path: &Path| matches!(fs_err::symlink_metadata(path), Err(error) if error.kind() == std::io::ErrorKind::NotFound);
            let empty = is_missing(&image) && is_missing(&data);
            if !workspaces.contains(&workspace.workspace_id) && empty {
                drop(self.delete_workspace(workspace.workspace_id).await);
            }
        }
    }
}

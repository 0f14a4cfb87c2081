//! Starts a sandbox: directory, disk, container, agent, and a check that its limits are enforced.
//!
//! A sandbox does not depend on the session that it will serve, so a pooled sandbox is equivalent
//! to one started on demand.

use std::{
    collections::BTreeMap, io, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc,
    time::Duration,
};

use cynode_api::{
    ErrorCode, ExecVia, LABEL_NODE_ID, LABEL_SANDBOX_ID, Limits, SandboxId, Unenforced, WorkspaceId,
};
use cynode_sba_proto::{AGENT_BINARY, HOME, JOB, WORKSPACE};
use cynode_service::ApiError;

use super::{Live, Sessions, runtime_problem, workspace::Directories};
use crate::{
    capacity::ParentCgroup,
    disk,
    journal::container_name,
    limits,
    proxies::ProxySocket,
    runtime::{self, Mount, Spec},
    sandbox::{AgentLink, InitProcess, namespace, terminals},
};

/// From the start of the container to the agent's first connection.
const AGENT_CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// The parameters of a sandbox.
#[derive(Clone, Debug)]
pub(super) struct Sandbox {
    pub(super) sandbox_id: SandboxId,
    pub(super) image_id: String,
    pub(super) workspace_id: WorkspaceId,
    pub(super) id_block: u32,
    /// Size of the workspace's disk; `None` if it has no disk of its own.
    pub(super) disk_bytes: Option<u64>,
    /// The sandbox resumes a session, so its job directory is kept.
    pub(super) keeps_job_directory: bool,
    pub(super) limits: Limits,
}

#[derive(Debug)]
pub(super) struct StartedSandbox {
    pub(super) live: Arc<Live>,
    /// Limits that this host does not enforce, with the operator's permission.
    pub(super) unenforced: Vec<Unenforced>,
}

impl Sessions {
    /// Creates the container and waits for its agent. Removes leftovers of an earlier attempt first.
    pub(super) async fn start(&self, sandbox: &Sandbox) -> Result<StartedSandbox, ApiError> {
        let container = container_name(sandbox.sandbox_id);
        let runtime_failed = |error: runtime::RuntimeError| ApiError::from(runtime_problem(&error));
        let host_failed = |error: io::Error| {
            let code = match error.kind() {
                io::ErrorKind::StorageFull => ErrorCode::NoSpace,
                // The file system may have a smaller limit for one file than its free space.
                io::ErrorKind::FileTooLarge => {
                    return ApiError::new(
                        ErrorCode::LimitUnenforceable,
                        "limits.disk_bytes: the file system of this node has no file of this size",
                    );
                }
                _ => ErrorCode::Internal,
            };
            // Callers see this message, so it must not reveal the path of the state directory.
            let state_dir = format!("{}/", self.config.state_dir.display());
            let reason = error.to_string().replace(&state_dir, "");
            ApiError::new(code, format!("preparing the sandbox: {reason}"))
        };
        let directory = self.journal.sandbox_directory(sandbox.sandbox_id);
        self.prepare_sandbox(&directory).map_err(host_failed)?;
        self.prepare_disk(sandbox.workspace_id, sandbox.disk_bytes)
            .await
            .map_err(host_failed)?;
        let has_stale_job_directory = !sandbox.keeps_job_directory
            && self
                .has_job_directory(sandbox.workspace_id)
                .map_err(host_failed)?;
        if has_stale_job_directory {
            // The host opens that directory, so a container of an interrupted attempt must be gone.
            self.runtime
                .remove(&container)
                .await
                .map_err(runtime_failed)?;
            self.remove_job_directory(sandbox.workspace_id)
                .await
                .map_err(host_failed)?;
        }
        let directories = self
            .prepare_directories(sandbox.workspace_id, sandbox.id_block)
            .map_err(host_failed)?;
        let (image, data) = self.journal.workspace_disk(sandbox.workspace_id);
        let initial_usage = sandbox
            .disk_bytes
            .and_then(|_| disk::usage(&image, &data).ok());
        let by_agent = self.config.exec_via == ExecVia::Agent;
        let link = by_agent
            .then(|| AgentLink::listen(&directory, None))
            .transpose()
            .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        let proxies = by_agent
            .then(|| ProxySocket::listen(&directory, &self.proxies))
            .transpose()
            .map_err(host_failed)?;
        if let Some(Err(error)) = self.parent.as_ref().map(ParentCgroup::limit) {
            tracing::warn!(%error, "Failed to set the limits of all sandboxes together.");
        }
        let spec = self.spec(sandbox, &directory, &directories);
        match self.runtime.create(&spec).await {
            Ok(_) => {}
            // A crash or a hung runtime interrupted an earlier attempt, which left this container.
            // Only this worker uses the name.
            Err(
                runtime::RuntimeError::NameInUse(_)
                | runtime::RuntimeError::Timeout { .. }
                | runtime::RuntimeError::Unavailable(_),
            ) => {
                self.runtime
                    .remove(&container)
                    .await
                    .map_err(runtime_failed)?;
                self.runtime.create(&spec).await.map_err(runtime_failed)?;
            }
            Err(error) => return Err(runtime_failed(error)),
        }
        self.runtime
            .start(&container)
            .await
            .map_err(runtime_failed)?;
        let pid = self
            .runtime
            .inspect(&container)
            .await
            .map_err(runtime_failed)?
            .pid;
        let init = InitProcess::of(pid).ok_or_else(|| {
            ApiError::new(ErrorCode::Internal, "the sandbox's process 1 ended at once")
        })?;
        // Runs before any command can. A failure is harmless: the host's own limit still applies.
        if let Err(error) = namespace::limit(pid).await {
            tracing::warn!(container, %error, "Failed to limit a sandbox's inotify instances.");
        }
        if let Err(error) = limits::raise_oom_score(pid) {
            tracing::warn!(
                container,
                %error,
                "Failed to make a sandbox the preferred victim of the OOM killer."
            );
        }
        terminals::limit(pid).map_err(|error| {
            let detail = format!(
                "this host can't limit the terminals of a sandbox, so one could use them all: \
                 {error}"
            );
            ApiError::new(ErrorCode::LimitUnenforceable, detail)
        })?;
        if let Some(proxies) = &proxies {
            proxies.set_init(init);
        }
        if let Some(link) = &link {
            link.set_init(init);
            if !link.present(AGENT_CONNECT_TIMEOUT).await {
                return Err(ApiError::new(
                    ErrorCode::AgentUnavailable,
                    "the agent in the sandbox did not connect",
                ));
            }
        }
        let parent_cgroup = self.parent.as_ref().map(|parent| parent.name.as_str());
        if parent_cgroup.is_some_and(|parent| !limits::is_below(init.pid, parent)) {
            tracing::warn!(
                container,
                parent = parent_cgroup,
                "The container runtime placed a sandbox outside the cgroup that limits all of them."
            );
        }
        let mut unenforced = limits::unenforced(
            init.pid,
            &sandbox.limits,
            self.ids.map(sandbox.id_block),
            parent_cgroup,
        );
        unenforced.extend(self.ids.unenforced());
        if sandbox.disk_bytes.is_none() {
            unenforced.push(Unenforced::Disk);
        }
        unenforced.sort_unstable();
        unenforced.dedup();
        self.check_enforced(&unenforced)?;
        Ok(StartedSandbox {
            live: Live::new(
                container,
                init,
                Arc::clone(&self.runtime),
                link,
                proxies,
                initial_usage,
            ),
            unenforced,
        })
    }

    /// Rejects limits that this host does not enforce, unless the operator allowed each by name.
    pub(super) fn check_enforced(&self, unenforced: &[Unenforced]) -> Result<(), ApiError> {
        let refused: Vec<Unenforced> = unenforced
            .iter()
            .copied()
            .filter(|name| !self.may_go_unenforced(*name))
            .collect();
        if refused.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = refused
            .iter()
            .map(|name| format!("limits.{name}"))
            .collect();
        let reason = match &self.disks {
            Err(reason) if refused.contains(&Unenforced::Disk) => {
                format!(" (no disk can be mounted here: {reason})")
            }
            _ => String::new(),
        };
        let detail = format!(
            "{}: this host can't enforce this limit{reason}; set {} to allow it",
            names.join(", "),
            self.config.allowance(&refused)
        );
        Err(ApiError::new(ErrorCode::LimitUnenforceable, detail))
    }

    /// Prepares the directory mounted at `/run/cynode`: the agent's binary and the sockets.
    fn prepare_sandbox(&self, directory: &Path) -> io::Result<()> {
        fs_err::create_dir_all(directory)?;
        fs_err::set_permissions(directory, std::fs::Permissions::from_mode(0o755))?;
        let binary = directory.join("cynode-sba");
        match fs_err::hard_link(&self.agent_binary, &binary) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    fn spec(&self, sandbox: &Sandbox, directory: &Path, directories: &Directories) -> Spec {
        let argv = match self.config.exec_via {
            ExecVia::Agent => vec![AGENT_BINARY.to_owned(), "agent".to_owned()],
            // Sleeps, and exits immediately on SIGTERM.
            ExecVia::Runtime => [
                "/bin/sh",
                "-c",
                "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done",
            ]
            .map(str::to_owned)
            .to_vec(),
        };
        let mount = |source: &Path, target: &str, read_only| Mount {
            source: source.to_owned(),
            target: target.to_owned(),
            read_only,
        };
        Spec {
            name: container_name(sandbox.sandbox_id),
            labels: BTreeMap::from([
                (LABEL_SANDBOX_ID.to_owned(), sandbox.sandbox_id.to_string()),
                (LABEL_NODE_ID.to_owned(), self.node_id.to_string()),
            ]),
            image_id: sandbox.image_id.clone(),
            argv,
            env: vec![(
                "PATH".to_owned(),
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
            )],
            ids: self.ids.map(sandbox.id_block),
            mounts: vec![
                mount(directory, "/run/cynode", true),
                mount(&directories.workspace, WORKSPACE, false),
                mount(&directories.home, HOME, false),
                mount(&directories.job, JOB, false),
            ],
            limits: sandbox.limits,
            cgroup_parent: self.parent.as_ref().map(|parent| parent.name.clone()),
        }
    }
}

//! Workspaces that are seeded from repositories: a reference becomes a commit, the commit an
//! archive, and the archive an artifact of the task, which the node fetches like any other.
//!
//! Invariants: a reference is resolved at the remote each time, on behalf of the caller. An archive
//! becomes an artifact only once it has been scanned and accepted, like any other input.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::LazyLock,
};

use axum::body::Body;
use cynode_api::{
    API_VERSION, Artifact, CallId, GitSeed, Problem, Repository, SeedNotes, Task, TaskId,
    WorkspaceRef, egress_limits,
};
use tokio::sync::Mutex;

use crate::{
    Orchestrator,
    caller::Caller,
    db::{self, Missing, SeedKey, SessionSource, StoredArtifact, StoredSeed},
    egress::{self, OnBehalf},
    placement::implicit_task,
};

const MEDIA_TYPE: &str = "application/x-tar";
/// Builds of different commits that may run at once; two of the same commit never do.
const BUILD_LOCKS: usize = 64;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error(transparent)]
    Role(#[from] egress::Error),
    #[error("workspace_ref: the task {0} belongs to no project, and repositories do")]
    NoProject(TaskId),
    #[error("workspace_ref: several of the caller's projects have a repository '{0}'")]
    Ambiguous(String),
    /// The gate's refusal of what the archive would bring into the sandbox, or of its size.
    #[error("{}", .0.detail)]
    Refused(Box<Problem>),
    #[error("the seed disappeared from the store")]
    Gone,
}

/// A repository in the request for a session or job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GitSource<'a> {
    pub(crate) repository: &'a str,
    pub(crate) reference: Option<&'a str>,
    pub(crate) depth: Option<u32>,
}

impl<'a> GitSource<'a> {
    pub(crate) fn of(wanted: Option<&'a WorkspaceRef>, depth: Option<u32>) -> Option<Self> {
        match wanted? {
            WorkspaceRef::Git {
                repository,
                reference,
            } => Some(Self {
                repository,
                reference: reference.as_deref(),
                depth,
            }),
            _ => None,
        }
    }
}

/// The artifact that a workspace starts from, and what is known of it.
#[derive(Clone, Debug)]
pub(crate) struct SeededWorkspace {
    pub(crate) artifact: Artifact,
    pub(crate) source: SessionSource,
}

impl SeededWorkspace {
    /// What the node is asked for instead of the repository.
    pub(crate) fn workspace_ref(&self) -> WorkspaceRef {
        WorkspaceRef::Artifact(self.artifact.id)
    }
}

impl Orchestrator {
    /// The task of a request that names a repository and maybe no task: a new one then belongs to
    /// the repository's project, which must be the caller's own.
    pub(crate) async fn task_for_repository(
        &self,
        caller: &Caller,
        named: Option<TaskId>,
        source: GitSource<'_>,
        name: impl FnOnce() -> String,
    ) -> Result<Task, Error> {
        if let Some(id) = named {
            return Ok(self.db.task(&caller.scope, id).await?);
        }
        let found = self
            .db
            .repositories_called(&caller.scope, source.repository)
            .await?;
        let repository = match found.as_slice() {
            [repository] => repository,
            [] => {
                return Err(
                    db::Error::from(Missing::Repository(source.repository.to_owned())).into(),
                );
            }
            _ => return Err(Error::Ambiguous(source.repository.to_owned())),
        };
        let task = Task {
            project_id: Some(repository.project_id),
            ..implicit_task(TaskId::generate(), name(), &caller.user_name)
        };
        Ok(self.db.insert_task(&task, &caller.scope).await?)
    }

    /// Resolves a reference on behalf of the caller, and makes its commit an artifact of the task.
    pub(crate) async fn seed_workspace(
        &self,
        caller: &Caller,
        task: &Task,
        source: GitSource<'_>,
        call_id: Option<CallId>,
    ) -> Result<SeededWorkspace, Error> {
        let project = task.project_id.ok_or(Error::NoProject(task.id))?;
        let repository = self.db.repository_of(project, source.repository).await?;
        let on_behalf = OnBehalf {
            principal: egress::principal(caller)?,
            task_id: task.id,
            session_id: None,
            promotion_id: None,
            call_id,
        };
        let request = on_behalf.resolve(&repository, source.reference);
        let resolved = self.egress.resolve(&request).await?;
        let request = GitSeed {
            version: API_VERSION,
            call: on_behalf.call(&repository),
            reference: resolved.reference,
            commit: resolved.commit,
            depth: source.depth,
        };
        let (artifact, notes) = self
            .seed_artifact(&repository, &request, &caller.user_name)
            .await?;
        Ok(SeededWorkspace {
            artifact,
            source: SessionSource {
                repository_id: repository.id,
                base_commit: request.commit,
                notes,
            },
        })
    }

    /// A commit as an artifact of the task. The same commit is fetched and scanned once.
    pub(crate) async fn seed_artifact(
        &self,
        repository: &Repository,
        request: &GitSeed,
        created_by: &str,
    ) -> Result<(Artifact, SeedNotes), Error> {
        let shapes = self.seed_shapes(repository.project_id);
        let shapes_name = format!("{shapes:?}");
        let key = SeedKey {
            repository_id: repository.id,
            credential_id: repository.credential_id,
            reference: &request.reference,
            commit: &request.commit,
            depth: request.depth,
            shapes: &shapes_name,
        };
        let _building = build_lock(&key).lock().await;
        let path = format!("git/{}/{}.tar", repository.name, request.commit);
        let task_id = request.call.task_id;
        if let Some(seed) = self.db.find_seed(&key).await?
            && let Some(artifact) = self.add_seed(task_id, &path, created_by, &seed).await?
        {
            return Ok((artifact, seed.notes));
        }
        // A credential that is added while the archive is scanned may be missed: the archive must
        // count as older than that credential.
        let scanned_at = self.db.now().await?;
        self.held.refresh(&self.db).await?;
        let body = self.egress.seed(request).await?;
        let notes = body.notes.clone();
        let (staged, flags) = self
            .stage_seed(
                Body::from_stream(body.into_stream()),
                &path,
                shapes,
                egress_limits::MAX_SEED_BYTES,
            )
            .await
            .map_err(|error| Error::Refused(error.into_problem()))?;
        let seed = StoredSeed {
            sha256: staged.sha256.clone(),
            size: i64::try_from(staged.size).unwrap_or(i64::MAX),
            notes,
            flags,
        };
        let stored = self
            .db
            .store_seed(&key, &staged, &seed, scanned_at, &self.blobs)
            .await;
        self.blobs.discard(&staged).await;
        stored?;
        let artifact = self.add_seed(task_id, &path, created_by, &seed).await?;
        Ok((artifact.ok_or(Error::Gone)?, seed.notes))
    }

    async fn add_seed(
        &self,
        task_id: TaskId,
        path: &str,
        created_by: &str,
        seed: &StoredSeed,
    ) -> Result<Option<Artifact>, db::Error> {
        let new = StoredArtifact {
            task_id,
            path,
            sha256: &seed.sha256,
            size: seed.size,
            media_type: MEDIA_TYPE,
            created_by,
            flags: &seed.flags,
        };
        self.db.ensure_stored_artifact(&new, &self.blobs).await
    }
}

/// Two requests for one commit take the same lock; so may two for different ones.
fn build_lock(key: &SeedKey<'_>) -> &'static Mutex<()> {
    static LOCKS: LazyLock<(Vec<Mutex<()>>, RandomState)> = LazyLock::new(|| {
        let locks = (0..BUILD_LOCKS).map(|_| Mutex::default());
        (locks.collect(), RandomState::new())
    });
    let (locks, hasher) = &*LOCKS;
    let hash = hasher.hash_one((key.repository_id, key.commit, key.depth));
    let count = BUILD_LOCKS as u64;
    &locks[usize::try_from(hash % count).unwrap_or_default()]
}

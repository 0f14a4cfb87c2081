//! Stores what a node's final report of a job refers to, before the node may forget the job:
//! output, result and artifacts.
//!
//! Invariants: repeating this after a crash stores nothing twice. What can't be stored is listed
//! with the reason, and does not keep the job from ending.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cynode_api::{
    Artifact, ErrorCode, Flags, Job, JobId, NodeId, TaskId, artifact_limits,
    sba::limits::MAX_ARTIFACTS,
};
use cynode_client::{ArtifactBody, SessionClient};
use futures_util::{Stream, stream};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    blobs::{self, Blobs, StageError, StagedBlob},
    db::{self, Db, JobRow, Lease, NewArtifact, ReportBlobs},
    fleet::{CallError, Fleet},
    job_results::{self, ResultSummary},
    output,
    reconcile::Lanes,
};

/// Total size of one job's artifacts.
const MAX_JOB_ARTIFACT_BYTES: u64 = 1 << 30;
/// Jobs whose artifacts are fetched at once, in total and from one node; others wait.
const MAX_CONCURRENT_FETCHES: usize = 8;
const MAX_CONCURRENT_FETCHES_PER_NODE: usize = 2;
/// Time for a node to start sending an artifact, and for each piece of it.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);
/// Lease of the job during a fetch, so that no other reconciler steps it.
const LEASE: Duration = Duration::from_secs(60);
/// Interval of renewals of the lease.
const LEASE_RENEWAL: Duration = Duration::from_secs(15);
/// Longest shown name of a dropped file.
const MAX_SHOWN_PATH: usize = 1_024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Client(#[from] cynode_client::Error),
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error(transparent)]
    Store(#[from] blobs::Error),
    #[error("the output can't be fetched: {0}")]
    Output(#[from] output::Error),
    #[error("the node sent nothing for {} s", PIECE_TIMEOUT.as_secs())]
    Stalled,
    #[error("other artifacts are being fetched")]
    Busy,
    #[error("another reconciler has the job")]
    LeaseLost,
}

/// Stores what reports refer to. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Collector {
    db: Db,
    fleet: Arc<Fleet>,
    pub(crate) blobs: Blobs,
    /// Each fetch buffers some MiB.
    fetches: Lanes,
}

/// A job on the node that ran it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReportSource<'a> {
    pub(crate) job_id: JobId,
    pub(crate) task_id: TaskId,
    pub(crate) created_by: &'a str,
    pub(crate) node_id: NodeId,
    pub(crate) client: &'a SessionClient,
}

impl<'a> ReportSource<'a> {
    pub(crate) fn new(row: &'a JobRow, node_id: NodeId, client: &'a SessionClient) -> Self {
        Self {
            job_id: row.job_id,
            task_id: row.task_id,
            created_by: &row.created_by,
            node_id,
            client,
        }
    }
}

/// A final report whose artifacts are stored and whose blobs are staged.
#[derive(Debug)]
pub(crate) struct Collected {
    /// The report without its result.
    pub(crate) job: Job,
    output: Option<StagedBlob>,
    result: Option<(StagedBlob, ResultSummary)>,
}

impl Collected {
    pub(crate) fn blobs<'a>(&'a self, store: &'a Blobs) -> ReportBlobs<'a> {
        let result = self.result.as_ref();
        ReportBlobs {
            store,
            output: self.output.as_ref(),
            result: result.map(|(staged, _)| staged),
            summary: result.map(|(_, summary)| summary),
        }
    }
}

/// The part of the output to store, besides artifacts and result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// All of the output.
    Output,
    /// Only the excerpt in the job object, for a late report.
    Excerpt,
}

impl Collector {
    pub(crate) fn new(db: Db, fleet: Arc<Fleet>, blobs: Blobs) -> Self {
        let fetches = Lanes::new(
            MAX_CONCURRENT_FETCHES,
            MAX_CONCURRENT_FETCHES_PER_NODE,
            Arc::default(),
        );
        Self {
            db,
            fleet,
            blobs,
            fetches,
        }
    }

    /// Collects a report while the job is leased. Of a job without a lease, another process may
    /// collect the same at the same time.
    pub(crate) async fn collect(
        &self,
        source: ReportSource<'_>,
        job: Job,
        wanted: Wanted,
        lease: Option<Lease>,
    ) -> Result<Collected, Error> {
        let Some(lease) = lease else {
            return self.collect_all(source, job, wanted).await;
        };
        let mut lease = self.extend(source.job_id, lease).await?;
        let mut collecting = Box::pin(self.collect_all(source, job, wanted));
        loop {
            tokio::select! {
                collected = &mut collecting => return collected,
                () = tokio::time::sleep(LEASE_RENEWAL) => {
                    lease = self.extend(source.job_id, lease).await?;
                }
            }
        }
    }

    /// Stores the report of a node about a job that was given up or given to another node.
    pub(crate) async fn store_late(
        &self,
        source: ReportSource<'_>,
        job: Job,
        lease: Option<Lease>,
    ) -> Result<(), Error> {
        let collected = self.collect(source, job, Wanted::Excerpt, lease).await?;
        let blobs = collected.blobs(&self.blobs);
        self.db
            .insert_late_result(source.job_id, &collected.job, blobs)
            .await?;
        Ok(())
    }

    async fn extend(&self, id: JobId, lease: Lease) -> Result<Lease, Error> {
        let extended = self.db.extend_lease(id, lease, LEASE).await?;
        extended.ok_or(Error::LeaseLost)
    }

    async fn collect_all(
        &self,
        source: ReportSource<'_>,
        mut job: Job,
        wanted: Wanted,
    ) -> Result<Collected, Error> {
        // Artifacts come first: a failure later leaves nothing staged, and repeating this finds
        // them.
        let mut listed = std::mem::take(&mut job.artifacts);
        let excess = listed.len().saturating_sub(MAX_ARTIFACTS);
        listed.truncate(MAX_ARTIFACTS);
        job.artifacts_omitted = job.artifacts_omitted.saturating_add(excess as u64);
        job.artifacts = self.take_artifacts(source, listed).await?;
        let output = match wanted {
            Wanted::Excerpt => None,
            Wanted::Output => self.output(source).await?,
        };
        let result = match job_results::stage(&self.blobs, &mut job).await {
            Ok(result) => result,
            Err(error) => {
                if let Some(output) = &output {
                    self.blobs.discard(output).await;
                }
                return Err(error.into());
            }
        };
        Ok(Collected {
            job,
            output,
            result,
        })
    }

    async fn output(&self, source: ReportSource<'_>) -> Result<Option<StagedBlob>, Error> {
        let ReportSource {
            node_id,
            client,
            job_id,
            ..
        } = source;
        match output::collect(&self.fleet, &self.blobs, node_id, client, job_id).await {
            Ok(output) => Ok(output),
            // The output is too large to keep: only the excerpt in the object stays.
            Err(error) if error.is_too_large() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Stores the artifacts that a report lists. Returns them as the job's object lists them.
    async fn take_artifacts(
        &self,
        source: ReportSource<'_>,
        listed: Vec<Value>,
    ) -> Result<Vec<Value>, Error> {
        if listed.is_empty() {
            return Ok(listed);
        }
        let lane = self.fetches.try_acquire(Some(source.node_id));
        let lane = lane.ok_or(Error::Busy)?;
        let (mut taken, mut bytes) = (Vec::new(), 0_u64);
        for entry in listed {
            let Ok(entry) = serde_json::from_value::<ListedArtifact>(entry) else {
                continue;
            };
            let stored = self
                .take_artifact(source, &entry, MAX_JOB_ARTIFACT_BYTES.saturating_sub(bytes))
                .await?;
            taken.push(match stored {
                Ok(artifact) => {
                    bytes = bytes.saturating_add(u64::try_from(artifact.size).unwrap_or(0));
                    json!({
                        "artifact_id": artifact.id, "path": artifact.path,
                        "version": artifact.version, "sha256": artifact.sha256,
                        "size": artifact.size,
                    })
                }
                Err(reason) => entry.dropped(source.job_id, &reason),
            });
        }
        drop(lane);
        Ok(taken)
    }

    /// Stores one artifact. The inner error says why it can't be kept.
    async fn take_artifact(
        &self,
        source: ReportSource<'_>,
        entry: &ListedArtifact,
        max_bytes: u64,
    ) -> Result<Result<Artifact, String>, Error> {
        let path = task_path(source.job_id, &entry.path);
        if !artifact_limits::is_path(&path) {
            return Ok(Err(format!(
                "its path is no path of an artifact: relative, without '.' or '..', of at most {} \
                 bytes with 'jobs/<id>/'",
                artifact_limits::MAX_PATH
            )));
        }
        if let Some(sha256) = &entry.sha256
            && let Some(artifact) = self.db.artifact_with(source.task_id, &path, sha256).await?
        {
            return Ok(Ok(artifact));
        }
        let body = self.fleet.call(
            source.node_id,
            PIECE_TIMEOUT,
            source.client.job_artifact(source.job_id, &entry.path),
        );
        let body = match body.await {
            Ok(body) => body,
            Err(CallError::Refused(problem)) if is_gone(&problem) => {
                return Ok(Err(format!("the node does not have it: {}", problem.code)));
            }
            Err(error) => return Err(error.into()),
        };
        let staged = self
            .blobs
            .stage(pieces(body), max_bytes, entry.sha256.as_deref())
            .await;
        let staged = match staged {
            Ok(staged) => staged,
            Err(StageError::Store(blobs::Error::TooLarge { .. })) => {
                return Ok(Err(format!(
                    "the artifacts of a job have at most {MAX_JOB_ARTIFACT_BYTES} bytes together"
                )));
            }
            Err(StageError::Store(error @ blobs::Error::HashMismatch { .. })) => {
                return Ok(Err(error.to_string()));
            }
            Err(StageError::Store(error)) => return Err(error.into()),
            Err(StageError::Source(error)) => return Err(error),
        };
        let new = NewArtifact {
            task_id: source.task_id,
            path: &path,
            staged: &staged,
            media_type: "application/octet-stream",
            created_by: source.created_by,
            flags: &Flags::default(),
            source: None,
        };
        match self.db.ensure_artifact(&new, &self.blobs).await {
            Ok(artifact) => Ok(Ok(artifact)),
            Err(db::Error::Quota(quota)) => Ok(Err(quota.to_string())),
            Err(error) => Err(error.into()),
        }
    }
}

/// The path of a job's artifact within its task.
fn task_path(job_id: JobId, path: &str) -> String {
    format!("jobs/{job_id}/{path}")
}

/// A node that refuses the file once refuses it always.
fn is_gone(problem: &cynode_api::Problem) -> bool {
    let codes = [
        ErrorCode::NotFound,
        ErrorCode::JobNotFound,
        ErrorCode::OutputExpired,
        ErrorCode::InvalidRequest,
    ];
    codes.iter().any(|code| problem.is(*code))
}

/// The pieces of an artifact, each within its time.
fn pieces(body: ArtifactBody) -> impl Stream<Item = Result<Bytes, Error>> {
    stream::try_unfold(body, async |mut body| {
        let piece = tokio::time::timeout(PIECE_TIMEOUT, body.chunk())
            .await
            .map_err(|_| Error::Stalled)??;
        Ok(piece.map(|piece| (piece, body)))
    })
}

/// An artifact as a node lists it.
#[derive(Debug, Deserialize)]
struct ListedArtifact {
    /// Below the job's directory of artifacts.
    path: String,
    size: Option<u64>,
    sha256: Option<String>,
}

impl ListedArtifact {
    fn dropped(&self, job_id: JobId, reason: &str) -> Value {
        let path: String = task_path(job_id, &self.path)
            .chars()
            .take(MAX_SHOWN_PATH)
            .collect();
        // PostgreSQL can't store NUL.
        let path = path.replace('\0', "\u{fffd}");
        let mut entry = json!({"path": path, "dropped": reason});
        if let Some(size) = self.size {
            entry["size"] = json!(size);
        }
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_file_is_listed_with_a_bounded_name_that_can_be_stored() {
        let entry = ListedArtifact {
            path: format!("a\0{}", "b".repeat(5_000)),
            size: Some(7),
            sha256: None,
        };
        let id = JobId::generate();
        let dropped = entry.dropped(id, "too large");
        let path = dropped["path"].as_str().expect("a path");
        assert!(
            path.starts_with(&format!("jobs/{id}/a\u{fffd}b"))
                && path.chars().count() == MAX_SHOWN_PATH
        );
        assert_eq!(
            (&dropped["size"], &dropped["dropped"]),
            (&json!(7), &json!("too large"))
        );
    }
}

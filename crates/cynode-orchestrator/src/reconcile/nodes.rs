//! Nodes: silent ones are marked lost, and their orphaned jobs are stopped when they return.

use std::{sync::Arc, time::Duration};

use cynode_api::ErrorCode;
use tokio::sync::Notify;

use super::{Error, Lanes, Reconciler};
use crate::{
    Config,
    db::{Db, OrphanedJob},
    fleet::Fleet,
    job_artifacts::{Collector, ReportSource},
};

/// Bounds each call to a node.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Clone, Debug)]
pub(crate) struct NodeReconciler {
    pub(crate) db: Db,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) collector: Collector,
    pub(crate) config: Arc<Config>,
    pub(crate) lanes: Lanes,
    /// Wake the other reconcilers when a node is lost.
    pub(crate) jobs_due: Arc<Notify>,
    pub(crate) sessions_due: Arc<Notify>,
}

impl Reconciler for NodeReconciler {
    const NAME: &'static str = "nodes";
    const INTERVAL: Duration = Duration::from_secs(1);

    async fn round(&self) -> Result<(), Error> {
        let lost = self
            .db
            .mark_silent_nodes_lost(Duration::from_secs(self.config.node_lost_after))
            .await?;
        for id in &lost {
            tracing::warn!(node_id = %id, "A node is lost: no heartbeat for too long.");
        }
        if !lost.is_empty() {
            self.jobs_due.notify_one();
            self.sessions_due.notify_one();
        }
        self.stop_orphans().await
    }
}

impl NodeReconciler {
    /// A node that returns may still run jobs that were rescheduled meanwhile.
    async fn stop_orphans(&self) -> Result<(), Error> {
        let orphans = self
            .db
            .orphaned_jobs(self.config.unreachable_after())
            .await?;
        for orphan in orphans {
            let Some(permit) = self.lanes.try_acquire(Some(orphan.node_id)) else {
                continue;
            };
            let reconciler = self.clone();
            tokio::spawn(async move {
                if let Err(error) = reconciler.stop_orphan(&orphan).await {
                    tracing::debug!(
                        job_id = %orphan.job_id,
                        %error,
                        "An orphaned job can't be stopped yet."
                    );
                }
                drop(permit);
            });
        }
        Ok(())
    }

    async fn stop_orphan(&self, orphan: &OrphanedJob) -> Result<(), Error> {
        let OrphanedJob {
            job_id,
            task_id,
            node_id,
            ..
        } = *orphan;
        // The job was assigned to the same node again, which reports its end itself.
        if self
            .db
            .any_job(job_id)
            .await?
            .is_some_and(|job| job.node_id == Some(node_id))
        {
            return Ok(self.db.delete_orphan(job_id, node_id).await?);
        }
        let client = self.fleet.client(&self.db, node_id).await?;
        let stopped = self
            .fleet
            .call(node_id, CALL_TIMEOUT, client.stop_job(task_id, job_id))
            .await;
        match stopped {
            Ok(job) if !job.state.is_final() => {}
            // A node that did not have the job remembers it as stopped, so that it never runs
            // there: that is not a result.
            Ok(job) if job.acknowledged => self.db.mark_orphan_stopped(job_id, node_id).await?,
            Ok(job) => {
                let source = ReportSource {
                    job_id,
                    task_id,
                    created_by: &orphan.created_by,
                    node_id,
                    client: &client,
                };
                self.collector
                    .store_late(source, super::jobs::storable(job), None)
                    .await?;
                drop(
                    self.fleet
                        .call(node_id, CALL_TIMEOUT, client.ack_job(job_id))
                        .await,
                );
                self.db.mark_orphan_stopped(job_id, node_id).await?;
            }
            Err(error) if error.is_refusal(&[ErrorCode::JobNotFound]) => {
                self.db.delete_orphan(job_id, node_id).await?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

//! Reconcilers: each compares the actual state with the desired state in the database, and moves it
//! one step closer, again and again.
//!
//! Invariants of each: it is woken by a signal and by a timer, so that a lost signal costs only
//! time; its only input is the database; repeating a round, or running it on two orchestrators at
//! once, is harmless; it does not retry, the next round does. A round waits for no node:
//! the work that it starts runs concurrently, in lanes.

mod execs;
mod jobs;
mod lanes;
mod nodes;
mod promotions;
mod retention;
mod sessions;

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

pub(crate) use execs::ExecReconciler;
pub(crate) use jobs::JobReconciler;
pub(crate) use lanes::Lanes;
pub(crate) use nodes::NodeReconciler;
pub(crate) use promotions::PromotionReconciler;
pub(crate) use retention::Retention;
pub(crate) use sessions::SessionReconciler;

use crate::{
    Config, audit, blobs,
    db::{self, Db},
    fleet::{self, CallError, Fleet},
    job_artifacts, placement,
    shapes::ShapePolicies,
    signal::EventSignal,
};

/// Why a round, or a step of one, failed. The next round retries.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error(transparent)]
    Fleet(#[from] fleet::Error),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Session(#[from] crate::sessions::Error),
    #[error(transparent)]
    Placement(#[from] placement::Error),
    #[error(transparent)]
    Blob(#[from] blobs::Error),
    #[error(transparent)]
    Audit(#[from] audit::Error),
    #[error(transparent)]
    Report(#[from] job_artifacts::Error),
    #[error("the job has no image")]
    NoImage,
}

/// One of the loops that move the system towards the state that the database asks for.
pub(crate) trait Reconciler: Send + Sync + 'static {
    const NAME: &'static str;
    /// The longest pause between rounds.
    const INTERVAL: Duration;

    fn round(&self) -> impl Future<Output = Result<(), Error>> + Send;
}

/// Runs rounds until the orchestrator stops, also whenever `wake` is notified.
pub(crate) fn spawn<R: Reconciler>(
    reconciler: R,
    wake: Arc<Notify>,
    stop: CancellationToken,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            if let Err(error) = reconciler.round().await {
                tracing::debug!(
                    reconciler = R::NAME,
                    %error,
                    "A reconciler round failed; the next one continues."
                );
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = wake.notified() => {}
                () = tokio::time::sleep(R::INTERVAL) => {}
            }
        }
    })
}

/// Checks which nodes are reachable from this orchestrator.
#[derive(Debug)]
pub(crate) struct Reachability {
    pub(crate) db: Db,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) config: Arc<Config>,
}

impl Reconciler for Reachability {
    const NAME: &'static str = "reach";
    const INTERVAL: Duration = Duration::from_secs(2);

    async fn round(&self) -> Result<(), Error> {
        let nodes = self.db.nodes().await?;
        let responsive = nodes
            .iter()
            .filter(|node| node.is_responsive(self.config.unreachable_after()));
        stream::iter(responsive)
            .for_each_concurrent(None, |node| self.fleet.probe(node))
            .await;
        Ok(())
    }
}

impl Reconciler for audit::CallCloser {
    const NAME: &'static str = "open calls";
    const INTERVAL: Duration = Duration::from_secs(2);

    async fn round(&self) -> Result<(), Error> {
        Ok(self.close_dead_streams().await?)
    }
}

/// Follows changes of the settings for credential shapes that other orchestrators made.
#[derive(Debug)]
pub(crate) struct ShapeReconciler {
    pub(crate) db: Db,
    pub(crate) shapes: Arc<ShapePolicies>,
}

impl Reconciler for ShapeReconciler {
    const NAME: &'static str = "shapes";
    const INTERVAL: Duration = Duration::from_secs(1);

    async fn round(&self) -> Result<(), Error> {
        Ok(self.shapes.refresh(&self.db).await?)
    }
}

/// Listens for events of other orchestrators, so that local readers need not wait for their timers.
pub(crate) async fn listen(
    db: Db,
    readers: EventSignal,
    policy_changes: watch::Sender<u64>,
    stop: CancellationToken,
) {
    let listening = async {
        loop {
            if let Ok(mut listener) = db.listener().await {
                while let Ok(notification) = listener.recv().await {
                    if notification.channel() == db::POLICY_CHANNEL {
                        policy_changes.send_modify(|number| *number = number.wrapping_add(1));
                    } else {
                        readers.notify();
                    }
                }
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    stop.run_until_cancelled(listening).await;
}

//! Reconcilers: each looks at what the database says should be and brings it a step nearer, again and again.
//!
//! What must stay true of each: it is woken by a signal and by a timer, so that a lost signal costs time and nothing else; it
//! takes no input but the database; doing it twice, or on two orchestrators at once, does no harm; it does not retry by
//! itself, the next round does. A round waits for no node: what it begins goes on beside it, in lanes.

mod execs;
mod jobs;
mod lanes;
mod nodes;
mod retention;
mod sessions;

use std::{sync::Arc, time::Duration};

use cynode_service::ApiError;
use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};
use tokio::{sync::Notify, task::JoinHandle};

pub(crate) use execs::settle as settle_execs;
pub(crate) use lanes::Lanes;

use crate::Orchestrator;

type Round<'a> = BoxFuture<'a, Result<(), ApiError>>;

/// Starts them all. They end when the orchestrator stops.
pub(crate) fn spawn(orchestrator: &Orchestrator) -> Vec<JoinHandle<()>> {
    let (jobs_wait, sessions_wait) = (
        Arc::clone(&orchestrator.jobs_wait),
        Arc::clone(&orchestrator.sessions_wait),
    );
    vec![
        every(
            orchestrator,
            "jobs",
            Duration::from_millis(500),
            jobs_wait,
            |orchestrator| jobs::round(orchestrator).boxed(),
        ),
        every(
            orchestrator,
            "sessions",
            Duration::from_secs(1),
            sessions_wait,
            |orchestrator| sessions::round(orchestrator).boxed(),
        ),
        every(
            orchestrator,
            "nodes",
            Duration::from_secs(1),
            Arc::default(),
            |orchestrator| nodes::round(orchestrator).boxed(),
        ),
        every(
            orchestrator,
            "reach",
            Duration::from_secs(2),
            Arc::default(),
            |orchestrator| reach(orchestrator).boxed(),
        ),
        every(
            orchestrator,
            "execs",
            Duration::from_secs(1),
            Arc::default(),
            |orchestrator| execs::round(orchestrator).boxed(),
        ),
        every(
            orchestrator,
            "open calls",
            Duration::from_secs(2),
            Arc::default(),
            |orchestrator| crate::audit::close_round(orchestrator).boxed(),
        ),
        every(
            orchestrator,
            "shapes",
            Duration::from_secs(1),
            Arc::default(),
            |orchestrator| crate::shapes::round(orchestrator).boxed(),
        ),
        every(
            orchestrator,
            "retention",
            Duration::from_secs(600),
            Arc::default(),
            |orchestrator| retention::round(orchestrator).boxed(),
        ),
        tokio::spawn(listen(orchestrator.clone())),
        tokio::spawn(crate::policies::Policies::follow(orchestrator.clone())),
    ]
}

/// Runs rounds until the orchestrator stops.
fn every(
    orchestrator: &Orchestrator,
    what: &'static str,
    pause: Duration,
    wake: Arc<Notify>,
    round: for<'a> fn(&'a Orchestrator) -> Round<'a>,
) -> JoinHandle<()> {
    let orchestrator = orchestrator.clone();
    tokio::spawn(async move {
        loop {
            if let Err(error) = round(&orchestrator).await {
                tracing::debug!(what, error = %error.0, "A round of reconciling failed; the next one goes on.");
            }
            tokio::select! {
                () = orchestrator.stop.cancelled() => return,
                () = wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    })
}

/// Which nodes can be called from here.
async fn reach(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    let nodes = orchestrator.db.nodes().await?;
    let heard = nodes.iter().filter(|node| {
        !node.is_lost && node.silent_seconds <= orchestrator.config.unreachable_after()
    });
    stream::iter(heard)
        .for_each_concurrent(None, |node| orchestrator.fleet.try_node(node))
        .await;
    Ok(())
}

/// Hears of events that other orchestrators wrote, so that readers here need not wait for their timer.
async fn listen(orchestrator: Orchestrator) {
    let heard = async {
        loop {
            if let Ok(mut listener) = orchestrator.db.listener().await {
                while let Ok(heard) = listener.recv().await {
                    if heard.channel() == crate::db::POLICY_CHANNEL {
                        orchestrator
                            .policy_news
                            .send_modify(|number| *number = number.wrapping_add(1));
                    } else {
                        orchestrator.told();
                    }
                }
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    orchestrator.stop.run_until_cancelled(heard).await;
}

//! Concurrency limits for work on nodes, in total and per node, so that a node that hangs delays
//! only its own work.

use std::{collections::HashMap, sync::Arc};

use cynode_api::NodeId;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    all: Arc<Semaphore>,
    per_node: usize,
    nodes: Arc<Mutex<HashMap<NodeId, Arc<Semaphore>>>>,
    /// Notified when a permit is released, so that a reconciler that found none tries again.
    released: Arc<Notify>,
}

/// A permit for one unit of work; released on drop.
#[derive(Debug)]
pub(crate) struct LanePermit {
    all: Option<OwnedSemaphorePermit>,
    node: Option<OwnedSemaphorePermit>,
    released: Arc<Notify>,
}

impl Drop for LanePermit {
    fn drop(&mut self) {
        drop((self.all.take(), self.node.take()));
        self.released.notify_one();
    }
}

impl Lanes {
    pub(crate) fn new(all: usize, per_node: usize, released: Arc<Notify>) -> Self {
        Self {
            all: Arc::new(Semaphore::new(all)),
            per_node,
            nodes: Arc::default(),
            released,
        }
    }

    /// The number of free permits over all nodes.
    pub(crate) fn free(&self) -> usize {
        self.all.available_permits()
    }

    /// A permit for work on a node, or for work without a node yet. `None` when there is no room.
    pub(crate) fn try_acquire(&self, node: Option<NodeId>) -> Option<LanePermit> {
        let all = Arc::clone(&self.all).try_acquire_owned().ok()?;
        let node = match node {
            Some(id) => {
                let lane = Arc::clone(
                    self.nodes
                        .lock()
                        .entry(id)
                        .or_insert_with(|| Arc::new(Semaphore::new(self.per_node))),
                );
                Some(lane.try_acquire_owned().ok()?)
            }
            None => None,
        };
        Some(LanePermit {
            all: Some(all),
            node,
            released: Arc::clone(&self.released),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_cannot_take_all_lanes() {
        let lanes = Lanes::new(3, 2, Arc::default());
        let (one, other) = (NodeId::generate(), NodeId::generate());
        let held = [lanes.try_acquire(Some(one)), lanes.try_acquire(Some(one))];
        assert!(held.iter().all(Option::is_some));
        assert!(
            lanes.try_acquire(Some(one)).is_none(),
            "a node got more than its lanes"
        );
        let third = lanes.try_acquire(Some(other));
        assert!(third.is_some() && lanes.free() == 0);
        assert!(
            lanes.try_acquire(None).is_none(),
            "more lanes than exist were taken"
        );
        drop(held);
        assert!(lanes.try_acquire(Some(one)).is_some());
    }
}

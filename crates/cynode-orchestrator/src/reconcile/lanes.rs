//! Room for work on nodes: so much in all and so much on each, so that a node that hangs holds up nobody else's work.

use std::{collections::HashMap, sync::Arc};

use cynode_api::NodeId;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    all: Arc<Semaphore>,
    per_node: usize,
    nodes: Arc<Mutex<HashMap<NodeId, Arc<Semaphore>>>>,
    /// Told when somebody has left, so that who found no room looks again.
    left: Arc<Notify>,
}

/// A place; it is free again when this goes.
#[derive(Debug)]
pub(crate) struct Place {
    all: Option<OwnedSemaphorePermit>,
    node: Option<OwnedSemaphorePermit>,
    left: Arc<Notify>,
}

impl Drop for Place {
    fn drop(&mut self) {
        drop((self.all.take(), self.node.take()));
        self.left.notify_one();
    }
}

impl Lanes {
    pub(crate) fn new(all: usize, per_node: usize, left: Arc<Notify>) -> Self {
        Self {
            all: Arc::new(Semaphore::new(all)),
            per_node,
            nodes: Arc::default(),
            left,
        }
    }

    /// How many more can be taken, wherever they go.
    pub(crate) fn free(&self) -> usize {
        self.all.available_permits()
    }

    /// A place for work on a node, or for work that has none yet. `None` when there is no room.
    pub(crate) fn enter(&self, node: Option<NodeId>) -> Option<Place> {
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
        Some(Place {
            all: Some(all),
            node,
            left: Arc::clone(&self.left),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_can_not_take_the_room_of_all() {
        let lanes = Lanes::new(3, 2, Arc::default());
        let (one, other) = (NodeId::generate(), NodeId::generate());
        let held = [lanes.enter(Some(one)), lanes.enter(Some(one))];
        assert!(held.iter().all(Option::is_some));
        assert!(lanes.enter(Some(one)).is_none(), "its own room is taken");
        let third = lanes.enter(Some(other));
        assert!(third.is_some() && lanes.free() == 0);
        assert!(lanes.enter(None).is_none(), "all room is taken");
        drop(held);
        assert!(lanes.enter(Some(one)).is_some());
    }
}

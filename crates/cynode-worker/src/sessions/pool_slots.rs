//! The bookkeeping of the pool: which spares are ready, starting, evicted or being removed.

/// Spares by stage.
#[derive(Debug)]
pub(super) struct PoolSlots<S> {
    pub(super) ready: Vec<S>,
    pub(super) starting: usize,
    /// How many of those being started are evicted. A start is not interrupted: they are removed
    /// once they are up.
    pub(super) evicted: usize,
    /// Being removed.
    pub(super) removing: usize,
}

impl<S> Default for PoolSlots<S> {
    fn default() -> Self {
        Self {
            ready: Vec::new(),
            starting: 0,
            evicted: 0,
            removing: 0,
        }
    }
}

/// The result of evicting a spare.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Eviction<S> {
    Ready(S),
    /// One that is still starting.
    Starting,
    /// The pool is empty.
    None,
}

impl<S> PoolSlots<S> {
    /// Spares that are ready or starting and not evicted.
    pub(super) fn count(&self) -> usize {
        self.ready.len() + self.starting - self.evicted
    }

    /// Adds a started spare, or returns it for removal if it was evicted meanwhile.
    pub(super) fn add_started(&mut self, spare: S) -> Option<S> {
        self.starting -= 1;
        if self.evicted == 0 {
            self.ready.push(spare);
            return None;
        }
        self.evicted -= 1;
        self.removing += 1;
        Some(spare)
    }

    /// Records that a start failed.
    pub(super) fn start_failed(&mut self) {
        self.starting -= 1;
        self.evicted = self.evicted.min(self.starting);
    }

    pub(super) fn evict(&mut self) -> Eviction<S> {
        if let Some(spare) = self.ready.pop() {
            self.removing += 1;
            return Eviction::Ready(spare);
        }
        if self.evicted < self.starting {
            self.evicted += 1;
            return Eviction::Starting;
        }
        Eviction::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_and_starting_spares_can_be_evicted() {
        let mut slots = PoolSlots {
            starting: 3,
            ..PoolSlots::default()
        };
        assert_eq!(slots.add_started("first"), None);
        assert_eq!(slots.count(), 3);
        assert_eq!(
            [slots.evict(), slots.evict()],
            [Eviction::Ready("first"), Eviction::Starting]
        );
        assert_eq!((slots.count(), slots.removing), (1, 1));
        // The first to start is removed; the other stays.
        assert_eq!(
            (slots.add_started("second"), slots.add_started("third")),
            (Some("second"), None)
        );
        assert_eq!((slots.count(), slots.removing), (1, 2));
        // An evicted spare whose start fails needs no removal.
        slots.starting = 1;
        assert_eq!(
            [slots.evict(), slots.evict(), slots.evict()],
            [Eviction::Ready("third"), Eviction::Starting, Eviction::None]
        );
        slots.start_failed();
        assert_eq!((slots.count(), slots.evicted), (0, 0));
    }
}

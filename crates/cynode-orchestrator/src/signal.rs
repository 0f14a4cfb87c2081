//! Wakes readers that wait for events.

use tokio::sync::watch;

/// Notified whenever there may be new events. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct EventSignal(watch::Sender<u64>);

impl EventSignal {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    pub(crate) fn notify(&self) {
        self.0
            .send_modify(|number| *number = number.wrapping_add(1));
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}

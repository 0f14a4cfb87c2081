//! Moves long computations off the serving threads.
//!
//! A role has half as many threads as the machine has CPUs. A thread that parses a body for a
//! second serves nothing else meanwhile, not even health checks.

use std::sync::LazyLock;

use tokio::runtime::{Handle, RuntimeFlavor};

use crate::fair::{FairBudget, Share};

/// Work on at most this many bytes runs inline: it takes about a millisecond.
pub const INLINE_BYTES: usize = 64 * 1024;

/// One permit per CPU; the serving threads compete with the computations.
static PERMITS: LazyLock<FairBudget> = LazyLock::new(|| {
    FairBudget::new(
        std::thread::available_parallelism()
            .map_or(2, usize::from)
            .max(2),
    )
});

/// A permit for a long computation.
#[derive(Debug)]
pub struct Permit(Option<Share>);

/// Waits for a permit to process `bytes` of input. Small inputs need none.
pub async fn permit(bytes: usize) -> Permit {
    Permit(if bytes > INLINE_BYTES {
        Some(PERMITS.acquire(1).await)
    } else {
        None
    })
}

impl Permit {
    /// Runs the work, off the serving threads if it is large.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> T {
        let is_much = self.0.is_some();
        // Single-threaded runtimes, in tests, have no other thread to run it.
        if is_much && Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread {
            tokio::task::block_in_place(work)
        } else {
            work()
        }
    }
}

/// Runs work on `bytes` of input, off the serving threads if the input is large.
pub async fn run<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    permit(bytes).await.run(work)
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn long_work_leaves_the_thread_within_the_permits() {
        let permits = PERMITS.free();
        let (running, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, waiting) = std::sync::mpsc::channel::<()>();
        let waiting = Arc::new(parking_lot::Mutex::new(waiting));
        let tasks: Vec<_> = (0..2 * permits)
            .map(|_| {
                let (running, peak, waiting) = (
                    Arc::clone(&running),
                    Arc::clone(&peak),
                    Arc::clone(&waiting),
                );
                tokio::spawn(run(INLINE_BYTES + 1, move || {
                    peak.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    waiting.lock().recv().expect("a word");
                    running.fetch_sub(1, Ordering::SeqCst);
                }))
            })
            .collect();
        while running.load(Ordering::SeqCst) < permits {
            tokio::task::yield_now().await;
        }
        // The only thread keeps serving while all permits are in use.
        tokio::spawn(async {}).await.expect("served");
        for _ in 0..2 * permits {
            done.send(()).expect("heard");
        }
        for task in tasks {
            task.await.expect("done");
        }
        assert_eq!(peak.load(Ordering::SeqCst), permits);
    }
}

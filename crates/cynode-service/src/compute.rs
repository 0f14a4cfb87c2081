//! Work that takes long leaves the threads that serve everybody.
//!
//! A role has half as many threads as the machine has processors. One of them that parses a body for a second answers nobody
//! meanwhile, health checks included.

use std::sync::LazyLock;

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Semaphore, SemaphorePermit},
};

/// Work on at most this many bytes is done on the spot: it takes about a millisecond.
pub const INLINE_BYTES: usize = 64 * 1024;

/// As many at once as there are processors; the threads that serve connections compete with them.
static PERMITS: LazyLock<Semaphore> = LazyLock::new(|| {
    Semaphore::new(
        std::thread::available_parallelism()
            .map_or(2, usize::from)
            .max(2),
    )
});

/// Leave to run work that may take long.
#[derive(Debug)]
pub struct Permit(Option<SemaphorePermit<'static>>);

/// Waits for leave to work on `bytes` of input. Little work needs none.
pub async fn permit(bytes: usize) -> Permit {
    // The semaphore is never closed.
    Permit(if bytes > INLINE_BYTES {
        PERMITS.acquire().await.ok()
    } else {
        None
    })
}

impl Permit {
    /// Runs the work, apart from the serving threads when it is much.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> T {
        let is_much = self.0.is_some();
        // Runtimes of one thread, in tests, have nowhere else to run it.
        if is_much && Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread {
            tokio::task::block_in_place(work)
        } else {
            work()
        }
    }
}

/// Runs work on `bytes` of input, apart from the serving threads when they are many.
pub async fn apart<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
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
    async fn long_work_leaves_the_thread_and_no_more_of_it_runs_than_there_are_permits() {
        let most = PERMITS.available_permits();
        let (running, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, waiting) = std::sync::mpsc::channel::<()>();
        let waiting = Arc::new(parking_lot::Mutex::new(waiting));
        let tasks: Vec<_> = (0..2 * most)
            .map(|_| {
                let (running, peak, waiting) = (
                    Arc::clone(&running),
                    Arc::clone(&peak),
                    Arc::clone(&waiting),
                );
                tokio::spawn(apart(INLINE_BYTES + 1, move || {
                    peak.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    waiting.lock().recv().expect("a word");
                    running.fetch_sub(1, Ordering::SeqCst);
                }))
            })
            .collect();
        while running.load(Ordering::SeqCst) < most {
            tokio::task::yield_now().await;
        }
        // The only thread serves others although all permits compute.
        tokio::spawn(async {}).await.expect("served");
        for _ in 0..2 * most {
            done.send(()).expect("heard");
        }
        for task in tasks {
            task.await.expect("done");
        }
        assert_eq!(peak.load(Ordering::SeqCst), most);
    }
}

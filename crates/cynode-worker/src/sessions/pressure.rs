//! The host's disk while sandboxes fill it.
//!
//! The disks of workspaces are sparse files: together they may grow beyond what the host has. A write that the host can't
//! take is lost in a sandbox that was told that it is done, and its file system breaks. What must stay true: it never comes
//! to that. Below a mark everything is killed in those sandboxes whose disk grows; their sessions and files stay, and what
//! does not write goes on.
//!
//! What programs have written and the kernel still has in memory counts as taken: it comes to the disk whoever is killed.

use std::{collections::HashMap, sync::Arc, time::Duration};

use cynode_api::{ExecVia, SessionId, SessionState};
use cynode_sba_proto::Request;
use tokio_util::sync::CancellationToken;

use super::{Entry, Live, Sessions, blocking};
use crate::{
    disk::{self, Claim},
    execs::kill_everything_by_runtime,
};

/// Bytes a second that nothing here writes faster than. The next look comes before the room above the mark can be used up.
const FASTEST: u64 = 4 << 30;
/// But not sooner and not later than this.
const SOONEST: Duration = Duration::from_millis(50);
const LATEST: Duration = Duration::from_secs(2);
/// How much a disk may grow below the mark before its sandbox is stopped: a line in a log is not worth a command.
const SLACK: u64 = 1 << 20;
/// How long the agent may take to kill everything before it is done from outside.
const STOP: Duration = Duration::from_millis(500);

/// Who grows while there is little room.
#[derive(Debug, Default)]
struct Growth {
    /// What each had when it was last right.
    before: HashMap<SessionId, u64>,
}

impl Growth {
    /// Takes in what each session has now; below the mark, gives those that grew.
    fn look(&mut self, below_mark: bool, now: &HashMap<SessionId, u64>) -> Vec<SessionId> {
        if !below_mark {
            self.before.clone_from(now);
            return Vec::new();
        }
        self.before.retain(|id, _| now.contains_key(id));
        let mut grew = Vec::new();
        for (id, bytes) in now {
            let before = self.before.entry(*id).or_insert(*bytes);
            if *bytes > *before + SLACK {
                grew.push(*id);
                *before = *bytes;
            }
            *before = (*before).min(*bytes);
        }
        grew
    }
}

/// When to look again.
fn pause(free: u64, mark: u64) -> Duration {
    #[expect(clippy::cast_precision_loss, reason = "a time to sleep")]
    let seconds = free.saturating_sub(mark) as f64 / FASTEST as f64;
    Duration::from_secs_f64(seconds).clamp(SOONEST, LATEST)
}

impl Sessions {
    /// Looks after the host's disk until it is told to stop.
    pub(crate) async fn watch_disk(self: Arc<Self>, stop: CancellationToken) {
        let mut growth = Growth::default();
        let mut pause = Duration::ZERO;
        while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            pause = self.look_at_disk(&mut growth).await;
        }
    }

    async fn look_at_disk(self: &Arc<Self>, growth: &mut Growth) -> Duration {
        let entries: Vec<Arc<Entry>> = self.known.lock().values().filter(|entry| entry.state() == SessionState::Running).cloned().collect();
        let running: HashMap<SessionId, (Arc<Entry>, Arc<Live>)> = entries
            .into_iter()
            .filter_map(|entry| {
                let live = entry.live.lock().clone()?;
                let id = entry.record.lock().session.session_id;
                Some((id, (entry, live)))
            })
            .collect();
        let disks: Vec<_> = running.iter().map(|(id, (entry, _))| (*id, self.journal.workspace_disk(entry.record.lock().session.workspace_id))).collect();
        let state_dir = self.config.state_dir.clone();
        let looked = blocking(move || {
            // One that is just being unmounted, or has no disk of its own, claims nothing.
            let claims: HashMap<SessionId, Claim> = disks.into_iter().filter_map(|(id, (image, data))| Some((id, disk::claim(&image, &data).ok()?))).collect();
            Ok((disk::free_bytes(&state_dir)?, claims))
        });
        let (free, claims) = match looked.await {
            Ok(looked) => looked,
            Err(error) => {
                tracing::error!(%error, "Looking at the node's disk failed; trying again.");
                return LATEST;
            }
        };
        let free = free.saturating_sub(claims.values().map(|claim| claim.promised).sum());
        #[expect(clippy::cast_precision_loss, reason = "a gauge")]
        metrics::gauge!("cynode_disk_free_bytes").set(free as f64);
        let mark = self.config.min_free_bytes / 2;
        let no_room = free < self.config.min_free_bytes / 4;
        for (_, live) in running.values() {
            live.set_no_room(no_room);
        }
        let sizes = claims.iter().map(|(id, claim)| (*id, claim.written + claim.promised)).collect();
        for id in growth.look(free < mark, &sizes) {
            let Some((_, live)) = running.get(&id) else { continue };
            tracing::warn!(session_id = %id, free, "The node's disk is nearly full; killing everything in a sandbox that fills it.");
            metrics::counter!("cynode_disk_stops_total").increment(1);
            // Not waited for: one that is slow to obey must not keep the others from being looked at.
            tokio::spawn(self.stop_all(Arc::clone(live)));
        }
        pause(free, mark)
    }

    /// Kills everything in a sandbox but its process 1.
    fn stop_all(&self, live: Arc<Live>) -> impl Future<Output = ()> + 'static + use<> {
        let by_agent = self.config.exec_via == ExecVia::Agent;
        live.set_stopped();
        async move {
            if by_agent
                && let Ok(link) = live.link()
                && matches!(tokio::time::timeout(STOP, link.call(&Request::SignalAll { signal: 9 })).await, Ok(Ok(_)))
            {
                return;
            }
            kill_everything_by_runtime(&live, 9);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn only_who_grows_below_the_mark_is_stopped() {
        let (writer, quiet, late) = (SessionId::generate(), SessionId::generate(), SessionId::generate());
        let mut growth = Growth::default();
        let mut look = |below_mark, sizes: &[(SessionId, u64)]| growth.look(below_mark, &sizes.iter().copied().collect());
        assert_eq!(look(false, &[(writer, 10 * MIB), (quiet, 100 * MIB)]), []);
        assert_eq!(look(false, &[(writer, 90 * MIB), (quiet, 100 * MIB)]), [], "there is room");
        // A quiet one writes a little all the same; one that was not there before has grown by nothing yet.
        let now = [(writer, 190 * MIB), (quiet, 100 * MIB + 4_096), (late, 50 * MIB)];
        assert_eq!(look(true, &now), [writer]);
        assert_eq!(look(true, &now), [], "stopped, it grows no more");
        assert_eq!(look(true, &[(writer, 150 * MIB), (quiet, 100 * MIB), (late, 50 * MIB)]), [], "what was deleted is not held against it");
        assert_eq!(look(true, &[(writer, 152 * MIB), (quiet, 100 * MIB), (late, 52 * MIB)]).len(), 2);
        // However slowly it comes.
        let creeping: Vec<_> = (1..=20).filter(|step| !look(true, &[(quiet, 100 * MIB + step * MIB / 10)]).is_empty()).collect();
        assert_eq!(creeping, [11]);
    }

    #[test]
    fn the_less_room_the_sooner_the_next_look() {
        assert_eq!(pause(1 << 40, 512 * MIB), LATEST);
        assert_eq!(pause(512 * MIB + FASTEST, 512 * MIB), Duration::from_secs(1));
        assert_eq!([pause(513 * MIB, 512 * MIB), pause(0, 512 * MIB)], [SOONEST; 2]);
    }
}

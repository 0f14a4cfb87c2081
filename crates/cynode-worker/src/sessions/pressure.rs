//! The host's disk while sandboxes fill it.
//!
//! The disks of workspaces are sparse files: together they may grow beyond what the host has. A write that the host can't
//! take is lost in a sandbox that was told that it is done, and its file system breaks. What must stay true: it never comes
//! to that. Below a mark everything is killed in those sandboxes whose disk grows; their sessions and files stay, and what
//! does not write goes on.
//!
//! What programs have written and the kernel still has in memory counts as taken: it comes to the disk whoever is killed.

use std::{collections::HashMap, ops::RangeInclusive, sync::Arc, time::Duration};

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
/// Of what is left below the mark, this part may be grown into by all sandboxes together, each by a share of it within bounds.
const SLACK_PART: u64 = 4;
const SLACK: RangeInclusive<u64> = 256 << 10..=4 << 20;
/// How long the agent may take to kill everything before it is done from outside.
const STOP: Duration = Duration::from_millis(200);

/// Who grows while there is little room.
#[derive(Debug, Default)]
struct Growth {
    before: HashMap<SessionId, Level>,
}

#[derive(Clone, Copy, Debug)]
struct Level {
    /// At the last look.
    last: Claim,
    /// What it may have: the most of what it had. To be back where it was is not growth.
    most: Claim,
    /// It was stopped, and what its programs wrote until they were dead is not held against those that come after them.
    stopping: bool,
}

/// How much more a disk may have below the mark before its sandbox is stopped: a line in a log is not worth a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slack {
    used: u64,
    /// Of what is on the host or on its way there. More, because bytes between memory and disk are counted nowhere for a moment.
    taken: u64,
}

impl Slack {
    /// All together have no more than a part of what is left below the mark.
    fn of(mark: u64, running: usize) -> Self {
        let share = (mark / SLACK_PART / (running as u64).max(1)).max(*SLACK.start());
        Self {
            used: share.min(*SLACK.end()),
            taken: share,
        }
    }
}

impl Claim {
    fn taken(&self) -> u64 {
        self.written + self.promised
    }

    fn has_more_than(&self, before: &Self, slack: Slack) -> bool {
        self.used > before.used + slack.used || self.taken() > before.taken() + slack.taken
    }

    fn or_more(self, other: Self) -> Self {
        let (more, less) = if self.taken() > other.taken() {
            (self, other)
        } else {
            (other, self)
        };
        Self {
            used: more.used.max(less.used),
            ..more
        }
    }
}

impl Growth {
    /// Takes in what each session has now; below the mark, gives those that grew by more than the slack.
    /// `first` is what a session had before anything ran in it, as far as that is known.
    fn look(
        &mut self,
        below_mark: bool,
        slack: Slack,
        now: &HashMap<SessionId, Claim>,
        first: impl Fn(SessionId) -> Option<Claim>,
        is_stopping: impl Fn(SessionId) -> bool,
    ) -> Vec<SessionId> {
        self.before.retain(|id, _| now.contains_key(id));
        let mut grew = Vec::new();
        for (id, &claim) in now {
            let level = self.before.entry(*id).or_insert_with(|| {
                let had = first(*id).unwrap_or(claim);
                Level {
                    last: had,
                    most: had,
                    stopping: false,
                }
            });
            if !below_mark {
                (level.most, level.stopping) = (claim.or_more(level.last), false);
            } else if level.stopping {
                level.most = level.most.or_more(claim);
                level.stopping = is_stopping(*id);
            } else if claim.has_more_than(&level.most, slack) {
                grew.push(*id);
                (level.most, level.stopping) = (level.most.or_more(claim), true);
            }
            level.last = claim;
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
        while stop
            .run_until_cancelled(tokio::time::sleep(pause))
            .await
            .is_some()
        {
            pause = self.look_at_disk(&mut growth).await;
        }
    }

    async fn look_at_disk(self: &Arc<Self>, growth: &mut Growth) -> Duration {
        let entries: Vec<Arc<Entry>> = self
            .known
            .lock()
            .values()
            .filter(|entry| entry.state() == SessionState::Running)
            .cloned()
            .collect();
        let running: HashMap<SessionId, (Arc<Entry>, Arc<Live>)> = entries
            .into_iter()
            .filter_map(|entry| {
                let live = entry.live.lock().clone()?;
                let id = entry.record.lock().session.session_id;
                Some((id, (entry, live)))
            })
            .collect();
        let disks: Vec<_> = running
            .iter()
            .map(|(id, (entry, _))| {
                (
                    *id,
                    self.journal
                        .workspace_disk(entry.record.lock().session.workspace_id),
                )
            })
            .collect();
        let state_dir = self.config.state_dir.clone();
        let looked = blocking(move || {
            // One that is just being unmounted, or has no disk of its own, claims nothing.
            let claims: HashMap<SessionId, Claim> = disks
                .into_iter()
                .filter_map(|(id, (image, data))| Some((id, disk::claim(&image, &data).ok()?)))
                .collect();
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
        let is_stopping = |id| running.get(&id).is_some_and(|(_, live)| live.is_stopping());
        let first = |id| running.get(&id).and_then(|(_, live)| live.first_claim());
        for id in growth.look(
            free < mark,
            Slack::of(mark, running.len()),
            &claims,
            first,
            is_stopping,
        ) {
            let Some((_, live)) = running.get(&id) else {
                continue;
            };
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
        live.begin_stop();
        async move {
            let killed = match live.link() {
                Ok(link) if by_agent => matches!(
                    tokio::time::timeout(STOP, link.call(&Request::SignalAll { signal: 9 })).await,
                    Ok(Ok(_))
                ),
                _ => false,
            };
            if !killed {
                kill_everything_by_runtime(&live, 9);
            }
            live.end_stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const SLACK: Slack = Slack {
        used: MIB,
        taken: 10 * MIB,
    };

    /// With so much in its files, all of it on the host.
    fn with(bytes: u64) -> Claim {
        Claim {
            used: bytes,
            written: bytes,
            promised: 0,
        }
    }

    #[test]
    fn only_who_grows_below_the_mark_is_stopped() {
        let (writer, quiet, late) = (
            SessionId::generate(),
            SessionId::generate(),
            SessionId::generate(),
        );
        let mut growth = Growth::default();
        let mut look = |below_mark, sizes: &[(SessionId, u64)]| {
            growth.look(
                below_mark,
                SLACK,
                &sizes
                    .iter()
                    .map(|(id, bytes)| (*id, with(*bytes)))
                    .collect(),
                |_| None,
                |_| false,
            )
        };
        assert_eq!(look(false, &[(writer, 10 * MIB), (quiet, 100 * MIB)]), []);
        assert_eq!(
            look(false, &[(writer, 90 * MIB), (quiet, 100 * MIB)]),
            [],
            "there is room"
        );
        // A quiet one writes a little all the same; one that was not there before has grown by nothing yet.
        let now = [
            (writer, 190 * MIB),
            (quiet, 100 * MIB + 4_096),
            (late, 50 * MIB),
        ];
        assert_eq!(look(true, &now), [writer]);
        assert_eq!(look(true, &now), [], "stopped, it grows no more");
        assert_eq!(
            look(
                true,
                &[(writer, 150 * MIB), (quiet, 90 * MIB), (late, 50 * MIB)]
            ),
            []
        );
        assert_eq!(
            look(
                true,
                &[(writer, 190 * MIB), (quiet, 100 * MIB), (late, 52 * MIB)]
            ),
            [late],
            "back where they were, and one beyond"
        );
        // However slowly it comes.
        let creeping: Vec<_> = (1..=20)
            .filter(|step| !look(true, &[(quiet, 100 * MIB + step * MIB / 10)]).is_empty())
            .collect();
        assert_eq!(creeping, [11]);
    }

    #[test]
    fn what_comes_to_the_disk_late_is_no_growth_and_what_fills_space_set_aside_is() {
        let id = SessionId::generate();
        let mut growth = Growth::default();
        let mut look = |used: u64, written: u64, promised: u64| {
            let claim = Claim {
                used: used * MIB,
                written: written * MIB,
                promised: promised * MIB,
            };
            growth
                .look(
                    true,
                    SLACK,
                    &HashMap::from([(id, claim)]),
                    |_| None,
                    |_| false,
                )
                .len()
        };
        assert_eq!(look(500, 100, 400), 0);
        // On its way it is counted nowhere; then it is there.
        assert_eq!(
            [look(500, 100, 300), look(500, 200, 250), look(500, 500, 0)],
            [0, 0, 0]
        );
        // Files have had this space for long, and only now is something written into it.
        assert_eq!([look(500, 505, 0), look(500, 505, 10)], [0, 1]);
    }

    #[test]
    fn what_was_written_until_a_stop_took_hold_is_no_reason_for_another() {
        let writer = SessionId::generate();
        let mut growth = Growth::default();
        let mut look = |bytes: u64, stopping: bool| {
            growth
                .look(
                    true,
                    SLACK,
                    &HashMap::from([(writer, with(bytes * MIB))]),
                    |_| None,
                    |_| stopping,
                )
                .len()
        };
        assert_eq!((look(10, false), look(20, false)), (0, 1));
        assert_eq!((look(30, true), look(40, false)), (0, 0), "its last words");
        assert_eq!(
            (look(40, false), look(50, false)),
            (0, 1),
            "somebody else's first ones"
        );
    }

    #[test]
    fn one_that_fills_the_disk_before_the_first_look_has_grown() {
        let (writer, adopted) = (SessionId::generate(), SessionId::generate());
        let now = HashMap::from([(writer, with(90 * MIB)), (adopted, with(500 * MIB))]);
        let first = |id| (id == writer).then(|| with(MIB));
        assert_eq!(
            Growth::default().look(true, SLACK, &now, first, |_| false),
            [writer]
        );
    }

    #[test]
    fn all_together_may_grow_by_a_part_of_what_is_left() {
        assert_eq!(
            Slack::of(512 * MIB, 2),
            Slack {
                used: 4 * MIB,
                taken: 64 * MIB
            }
        );
        assert_eq!(
            Slack::of(512 * MIB, 128),
            Slack {
                used: MIB,
                taken: MIB
            }
        );
        assert_eq!(
            Slack::of(0, 0),
            Slack {
                used: 256 << 10,
                taken: 256 << 10
            }
        );
    }

    #[test]
    fn the_less_room_the_sooner_the_next_look() {
        assert_eq!(pause(1 << 40, 512 * MIB), LATEST);
        assert_eq!(
            pause(512 * MIB + FASTEST, 512 * MIB),
            Duration::from_secs(1)
        );
        assert_eq!(
            [pause(513 * MIB, 512 * MIB), pause(0, 512 * MIB)],
            [SOONEST; 2]
        );
    }
}

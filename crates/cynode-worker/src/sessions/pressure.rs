//! Protects the host's disk from sandboxes that fill it.
//!
//! The disks of workspaces are sparse files and can outgrow the host's disk together. A write that
//! the host can't store is lost after the sandbox was told that it succeeded, and the sandbox's
//! file system breaks. Invariant: this never happens. When free space falls below a mark, the
//! worker kills everything in the sandboxes whose disks grow. Their sessions and files stay, and
//! sandboxes that don't write are not affected.
//!
//! Dirty pages count as used: the kernel writes them back even after their process is killed.

use std::{collections::HashMap, ops::RangeInclusive, sync::Arc, time::Duration};

use cynode_api::{ExecVia, SessionId, SessionState};
use cynode_sba_proto::Request;
use tokio_util::sync::CancellationToken;

use super::{Live, SessionEntry, Sessions, blocking};
use crate::{
    disk::{self, DiskUsage},
    execs::kill_everything_by_runtime,
};

/// Assumed maximum write rate in bytes per second. The next check comes before the space above the
/// mark can be used up at this rate.
const ASSUMED_WRITE_RATE: u64 = 4 << 30;
/// Bounds of the interval between checks.
const SHORTEST_CHECK_INTERVAL: Duration = Duration::from_millis(50);
const LONGEST_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// All sandboxes together may grow into this fraction of the space below the mark, each by an equal
/// share within `SLACK_BYTES`.
const SLACK_DIVISOR: u64 = 4;
const SLACK_BYTES: RangeInclusive<u64> = 256 << 10..=4 << 20;
/// How long the agent may take to kill everything before the worker does it from the host.
const AGENT_KILL_TIMEOUT: Duration = Duration::from_millis(200);

/// Tracks which sandboxes grow while space is low.
#[derive(Debug, Default)]
struct GrowthTracker {
    before: HashMap<SessionId, DiskLevel>,
}

#[derive(Clone, Copy, Debug)]
struct DiskLevel {
    /// At the last check.
    last: DiskUsage,
    /// The highest usage so far. Growing back to it does not count as growth.
    peak: DiskUsage,
    /// The sandbox is being stopped. Output written until its processes died is not counted against
    /// later ones.
    stopping: bool,
}

/// How far a disk may grow below the mark before its sandbox is stopped, so that a log line does
/// not cost a running command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slack {
    used: u64,
    /// For bytes on the host's disk and dirty pages. Larger, because bytes in transit between the
    /// two are counted in neither.
    taken: u64,
}

impl Slack {
    /// Divides a fraction of the space below the mark among the running sandboxes.
    fn new(mark: u64, running: usize) -> Self {
        let share = (mark / SLACK_DIVISOR / (running as u64).max(1)).max(*SLACK_BYTES.start());
        Self {
            used: share.min(*SLACK_BYTES.end()),
            taken: share,
        }
    }
}

impl DiskUsage {
    fn taken(&self) -> u64 {
        self.written + self.pending
    }

    fn exceeds(&self, before: &Self, slack: Slack) -> bool {
        self.used > before.used + slack.used || self.taken() > before.taken() + slack.taken
    }

    fn max(self, other: Self) -> Self {
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

impl GrowthTracker {
    /// Records the current usage of each session. `slack` is set while free space is below the
    /// mark; the sessions that grew by more are returned. `first` is a session's usage before
    /// anything ran in it, if known.
    fn observe(
        &mut self,
        slack: Option<Slack>,
        now: &HashMap<SessionId, DiskUsage>,
        first: impl Fn(SessionId) -> Option<DiskUsage>,
        is_stopping: impl Fn(SessionId) -> bool,
    ) -> Vec<SessionId> {
        self.before.retain(|id, _| now.contains_key(id));
        let mut grew = Vec::new();
        for (id, &usage) in now {
            let level = self.before.entry(*id).or_insert_with(|| {
                let initial = first(*id).unwrap_or(usage);
                DiskLevel {
                    last: initial,
                    peak: initial,
                    stopping: false,
                }
            });
            match slack {
                None => (level.peak, level.stopping) = (usage.max(level.last), false),
                Some(_) if level.stopping => {
                    level.peak = level.peak.max(usage);
                    level.stopping = is_stopping(*id);
                }
                Some(slack) if usage.exceeds(&level.peak, slack) => {
                    grew.push(*id);
                    (level.peak, level.stopping) = (level.peak.max(usage), true);
                }
                Some(_) => {}
            }
            level.last = usage;
        }
        grew
    }
}

/// The interval until the next check.
fn check_interval(free: u64, mark: u64) -> Duration {
    #[expect(clippy::cast_precision_loss, reason = "a time to sleep")]
    let seconds = free.saturating_sub(mark) as f64 / ASSUMED_WRITE_RATE as f64;
    Duration::from_secs_f64(seconds).clamp(SHORTEST_CHECK_INTERVAL, LONGEST_CHECK_INTERVAL)
}

impl Sessions {
    /// Monitors the host's disk until stopped.
    pub(crate) async fn watch_disk(self: Arc<Self>, stop: CancellationToken) {
        let mut growth = GrowthTracker::default();
        let mut pause = Duration::ZERO;
        while stop
            .run_until_cancelled(tokio::time::sleep(pause))
            .await
            .is_some()
        {
            pause = self.check_disk(&mut growth).await;
        }
    }

    async fn check_disk(self: &Arc<Self>, growth: &mut GrowthTracker) -> Duration {
        let entries: Vec<Arc<SessionEntry>> = self
            .by_id
            .lock()
            .values()
            .filter(|entry| entry.state() == SessionState::Running)
            .cloned()
            .collect();
        let running: HashMap<SessionId, (Arc<SessionEntry>, Arc<Live>)> = entries
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
        let usage = blocking(move || {
            // A disk that is being unmounted, or a workspace without its own disk, has no usage.
            let usages: HashMap<SessionId, DiskUsage> = disks
                .into_iter()
                .filter_map(|(id, (image, data))| Some((id, disk::usage(&image, &data).ok()?)))
                .collect();
            Ok((disk::free_bytes(&state_dir)?, usages))
        });
        let (free, usages) = match usage.await {
            Ok(usage) => usage,
            Err(error) => {
                tracing::error!(%error, "Failed to read the node's disk usage; retrying.");
                return LONGEST_CHECK_INTERVAL;
            }
        };
        let free = free.saturating_sub(usages.values().map(|usage| usage.pending).sum());
        #[expect(clippy::cast_precision_loss, reason = "a gauge")]
        metrics::gauge!("cynode_disk_free_bytes").set(free as f64);
        let mark = self.config.min_free_bytes / 2;
        let no_room = free < self.config.min_free_bytes / 4;
        for (_, live) in running.values() {
            live.block_output(no_room);
        }
        let is_stopping = |id| running.get(&id).is_some_and(|(_, live)| live.is_stopping());
        let first = |id| running.get(&id).and_then(|(_, live)| live.initial_usage());
        for id in growth.observe(
            (free < mark).then(|| Slack::new(mark, running.len())),
            &usages,
            first,
            is_stopping,
        ) {
            let Some((_, live)) = running.get(&id) else {
                continue;
            };
            tracing::warn!(
                session_id = %id,
                free,
                "The node's disk is nearly full; killing everything in a sandbox that fills it."
            );
            metrics::counter!("cynode_disk_stops_total").increment(1);
            // Not awaited: a slow kill must not delay the other sandboxes.
            tokio::spawn(self.kill_all(Arc::clone(live)));
        }
        check_interval(free, mark)
    }

    /// Kills everything in a sandbox except its process 1.
    fn kill_all(&self, live: Arc<Live>) -> impl Future<Output = ()> + 'static + use<> {
        let by_agent = self.config.exec_via == ExecVia::Agent;
        live.begin_stop();
        async move {
            let killed = match live.link() {
                Ok(link) if by_agent => matches!(
                    tokio::time::timeout(
                        AGENT_KILL_TIMEOUT,
                        link.call(&Request::SignalAll { signal: 9 })
                    )
                    .await,
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

    /// Usage of `bytes`, all of it on the host's disk.
    fn usage(bytes: u64) -> DiskUsage {
        DiskUsage {
            used: bytes,
            written: bytes,
            pending: 0,
        }
    }

    #[test]
    fn only_sandboxes_that_grow_below_the_mark_are_stopped() {
        let (writer, quiet, late) = (
            SessionId::generate(),
            SessionId::generate(),
            SessionId::generate(),
        );
        let mut growth = GrowthTracker::default();
        let mut observe = |below_mark: bool, sizes: &[(SessionId, u64)]| {
            growth.observe(
                below_mark.then_some(SLACK),
                &sizes
                    .iter()
                    .map(|(id, bytes)| (*id, usage(*bytes)))
                    .collect(),
                |_| None,
                |_| false,
            )
        };
        assert_eq!(
            observe(false, &[(writer, 10 * MIB), (quiet, 100 * MIB)]),
            []
        );
        assert_eq!(
            observe(false, &[(writer, 90 * MIB), (quiet, 100 * MIB)]),
            [],
            "a sandbox was stopped although there is space"
        );
        // A quiet one still writes a little; a new one has not grown yet.
        let now = [
            (writer, 190 * MIB),
            (quiet, 100 * MIB + 4_096),
            (late, 50 * MIB),
        ];
        assert_eq!(observe(true, &now), [writer]);
        assert_eq!(
            observe(true, &now),
            [],
            "a stopped sandbox was stopped again"
        );
        assert_eq!(
            observe(
                true,
                &[(writer, 150 * MIB), (quiet, 90 * MIB), (late, 50 * MIB)]
            ),
            []
        );
        assert_eq!(
            observe(
                true,
                &[(writer, 190 * MIB), (quiet, 100 * MIB), (late, 52 * MIB)]
            ),
            [late],
            "other sandboxes than the one beyond its peak were stopped"
        );
        // Slow growth counts too.
        let creeping: Vec<_> = (1..=20)
            .filter(|step| !observe(true, &[(quiet, 100 * MIB + step * MIB / 10)]).is_empty())
            .collect();
        assert_eq!(creeping, [11]);
    }

    #[test]
    fn late_write_back_is_no_growth_and_filling_preallocated_space_is() {
        let id = SessionId::generate();
        let mut growth = GrowthTracker::default();
        let mut observe = |used: u64, written: u64, pending: u64| {
            let usage = DiskUsage {
                used: used * MIB,
                written: written * MIB,
                pending: pending * MIB,
            };
            growth
                .observe(
                    Some(SLACK),
                    &HashMap::from([(id, usage)]),
                    |_| None,
                    |_| false,
                )
                .len()
        };
        assert_eq!(observe(500, 100, 400), 0);
        // Bytes in transit are counted in neither; then they reach the disk.
        assert_eq!(
            [
                observe(500, 100, 300),
                observe(500, 200, 250),
                observe(500, 500, 0)
            ],
            [0, 0, 0]
        );
        // The files were preallocated, and only now are they written to.
        assert_eq!([observe(500, 505, 0), observe(500, 505, 10)], [0, 1]);
    }

    #[test]
    fn writes_before_a_kill_takes_effect_do_not_trigger_another() {
        let writer = SessionId::generate();
        let mut growth = GrowthTracker::default();
        let mut observe = |bytes: u64, stopping: bool| {
            growth
                .observe(
                    Some(SLACK),
                    &HashMap::from([(writer, usage(bytes * MIB))]),
                    |_| None,
                    |_| stopping,
                )
                .len()
        };
        assert_eq!((observe(10, false), observe(20, false)), (0, 1));
        assert_eq!(
            (observe(30, true), observe(40, false)),
            (0, 0),
            "writes before the kill triggered another one"
        );
        assert_eq!(
            (observe(40, false), observe(50, false)),
            (0, 1),
            "writes of a later command were ignored"
        );
    }

    #[test]
    fn filling_the_disk_before_the_first_check_is_growth() {
        let (writer, adopted) = (SessionId::generate(), SessionId::generate());
        let now = HashMap::from([(writer, usage(90 * MIB)), (adopted, usage(500 * MIB))]);
        let first = |id| (id == writer).then(|| usage(MIB));
        assert_eq!(
            GrowthTracker::default().observe(Some(SLACK), &now, first, |_| false),
            [writer]
        );
    }

    #[test]
    fn all_sandboxes_together_may_grow_into_a_fraction_of_the_space_left() {
        assert_eq!(
            Slack::new(512 * MIB, 2),
            Slack {
                used: 4 * MIB,
                taken: 64 * MIB
            }
        );
        assert_eq!(
            Slack::new(512 * MIB, 128),
            Slack {
                used: MIB,
                taken: MIB
            }
        );
        assert_eq!(
            Slack::new(0, 0),
            Slack {
                used: 256 << 10,
                taken: 256 << 10
            }
        );
    }

    #[test]
    fn the_less_space_is_left_the_sooner_the_next_check() {
        assert_eq!(check_interval(1 << 40, 512 * MIB), LONGEST_CHECK_INTERVAL);
        assert_eq!(
            check_interval(512 * MIB + ASSUMED_WRITE_RATE, 512 * MIB),
            Duration::from_secs(1)
        );
        assert_eq!(
            [
                check_interval(513 * MIB, 512 * MIB),
                check_interval(0, 512 * MIB)
            ],
            [SHORTEST_CHECK_INTERVAL; 2]
        );
    }
}

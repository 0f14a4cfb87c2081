//! Ids on the host for sandboxes: each workspace has a block of its own, so that no two sandboxes share an owner.
//!
//! A worker claims one of a few ranges: as root above what systemd hands out and below 2³¹, as an ordinary user within
//! the user's subordinate ids. The claim names the state directory, and a range whose owner is gone, or does not run and
//! has no workspace left, is free again. The block belongs to the workspace, not to the container, because files keep
//! their owner when a workspace is mounted again.

use std::{
    collections::BTreeSet,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use cynode_api::Unenforced;
use cynode_service::private;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};

use crate::{
    rootless,
    runtime::{IdMap, IdSpace},
};

pub(crate) const FIRST: u32 = 0x7000_0000;
pub(crate) const BLOCK: u32 = 65_536;
/// Uid and gid of the sandbox's user, inside.
pub(crate) const AGENT_ID: u32 = 1_000;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("can't claim a range of ids under {path}")]
    Claim { path: PathBuf, source: io::Error },
    #[error("all {ranges} ranges of ids are claimed by other workers here ({registry} names them)")]
    AllClaimed { ranges: u32, registry: PathBuf },
}

/// How ids are divided among workers and workspaces.
#[derive(Clone, Copy, Debug)]
struct Layout {
    first: u32,
    /// Ids in a block.
    size: u32,
    /// Blocks in a range.
    blocks: u32,
    ranges: u32,
}

/// Of root: eight workers, 512 workspaces each.
const ROOTS: Layout = Layout {
    first: FIRST,
    size: BLOCK,
    blocks: 512,
    ranges: 8,
};

impl Layout {
    /// Of an ordinary user. Most have ids for 32 sandboxes, and one worker then gets them all; with more, others have
    /// their share.
    fn within(ids: IdMap) -> Self {
        let all = ids.count / rootless::BLOCK;
        let ranges = (all / 32).clamp(1, ROOTS.ranges);
        Self {
            first: ids.first,
            size: rootless::BLOCK,
            blocks: (all / ranges).min(ROOTS.blocks),
            ranges,
        }
    }
}

#[derive(Debug)]
pub(crate) struct IdBlocks {
    space: IdSpace,
    first: u32,
    size: u32,
    count: u32,
    used: Mutex<BTreeSet<u32>>,
}

/// How many sandboxes a worker can have of so many subordinate ids, kept workspaces counted.
pub(crate) fn sandboxes_within(ids: u32) -> u32 {
    Layout::within(IdMap {
        first: 1,
        count: ids,
    })
    .blocks
}

/// Whether no worker runs on this directory and no file of a sandbox is in it.
fn is_unused(directory: &Path) -> bool {
    let holds_none = |name: &str| {
        fs_err::read_dir(directory.join(name)).is_ok_and(|mut entries| entries.next().is_none())
    };
    // Shared, so that two who look do not take one another for a worker. A worker that starts in this moment tries again.
    let runs = || {
        fs_err::File::open(directory.join("lock"))
            .is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
    };
    !directory.is_dir() || (holds_none("workspaces") && holds_none("trash") && !runs())
}

/// Removes a lock that earlier versions made for everybody to read: somebody may hold it open still. It is held only for a moment, by a worker
/// that starts, and nobody else can make another in this directory.
fn replace_open_lock(path: &Path) -> io::Result<()> {
    match fs_err::symlink_metadata(path) {
        Ok(found) if found.is_file() && found.mode() & 0o077 != 0 => fs_err::remove_file(path),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Claims a range for the worker of `state_dir`, the same one as before when it had one.
fn claim(ranges: u32, registry: &Path, state_dir: &Path) -> Result<u32, Error> {
    let failed = |source| Error::Claim {
        path: registry.to_owned(),
        source,
    };
    // Whoever could open the lock could hold it, and no worker would start.
    private::closed_directory(registry).map_err(failed)?;
    replace_open_lock(&registry.join("lock")).map_err(failed)?;
    let lock = private::open_lock(&registry.join("lock")).map_err(failed)?;
    flock(&lock, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
    let mut free = None;
    for range in 0..ranges {
        let owner = fs_err::read_to_string(registry.join(range.to_string())).unwrap_or_default();
        if Path::new(owner.trim()) == state_dir {
            return Ok(range);
        }
        if free.is_none()
            && (owner.trim().is_empty() || is_unused(&Path::new(owner.trim()).join("worker")))
        {
            free = Some(range);
        }
    }
    let range = free.ok_or_else(|| Error::AllClaimed {
        ranges,
        registry: registry.to_owned(),
    })?;
    fs_err::write(
        registry.join(range.to_string()),
        state_dir.display().to_string(),
    )
    .map_err(failed)?;
    Ok(range)
}

impl IdBlocks {
    /// The blocks that a worker has on a runtime like this: a range of its own, or what all sandboxes share.
    pub(crate) fn on(space: IdSpace, registry: &Path, state_dir: &Path) -> Result<Self, Error> {
        let (layout, shared) = match space {
            IdSpace::Own => (ROOTS, None),
            IdSpace::Within(ids) => (Layout::within(ids), None),
            IdSpace::Shared(map) => (ROOTS, Some(map.first)),
            IdSpace::Host => (ROOTS, Some(0)),
        };
        let (first, count) = match shared {
            Some(first) => (first, 1),
            None => (
                layout.first
                    + claim(layout.ranges, registry, state_dir)? * layout.blocks * layout.size,
                layout.blocks,
            ),
        };
        Ok(Self {
            space,
            first,
            size: layout.size,
            count,
            used: Mutex::default(),
        })
    }

    /// The ids on this host of a block that is one sandbox's alone.
    pub(crate) fn own(&self, block: u32) -> Option<std::ops::Range<u32>> {
        let IdMap { first, count } = self.map(block);
        matches!(self.space, IdSpace::Own).then(|| first..first.saturating_add(count))
    }

    /// What these blocks do not keep apart.
    pub(crate) const fn unenforced(&self) -> &'static [Unenforced] {
        self.space.unenforced()
    }

    /// Marks a block as used, as the journal says.
    pub(crate) fn reserve(&self, block: u32) {
        self.used.lock().insert(block);
    }

    /// A block that nobody uses, or the one that all share; `None` when all are taken.
    pub(crate) fn take(&self) -> Option<u32> {
        if matches!(self.space, IdSpace::Shared(_) | IdSpace::Host) {
            return Some(self.first);
        }
        let mut used = self.used.lock();
        // The lowest that is free: without root each block has a copy of its own of every image that it was used with.
        let block = (0..self.count)
            .map(|index| self.first + index * self.size)
            .find(|block| !used.contains(block))?;
        used.insert(block);
        Some(block)
    }

    /// How many blocks there are; absent when all share one.
    pub(crate) fn count(&self) -> Option<usize> {
        (!matches!(self.space, IdSpace::Shared(_) | IdSpace::Host)).then_some(self.count as usize)
    }

    pub(crate) fn give_back(&self, block: u32) {
        self.used.lock().remove(&block);
    }

    #[must_use]
    pub(crate) const fn map(&self, block: u32) -> IdMap {
        IdMap {
            first: block,
            count: self.size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_workers_get_ranges_that_do_not_meet_and_keep_them() {
        let registry = tempfile::tempdir().expect("a directory");
        let (one, two) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        for state in [&one, &two] {
            fs_err::create_dir(state.path().join("worker")).expect("a directory");
        }
        let first = IdBlocks::on(IdSpace::Own, registry.path(), one.path()).expect("a range");
        let second = IdBlocks::on(IdSpace::Own, registry.path(), two.path()).expect("a range");
        assert_ne!(first.first, second.first);
        assert_eq!(
            IdBlocks::on(IdSpace::Own, registry.path(), one.path())
                .expect("a range")
                .first,
            first.first
        );
        drop(one);
        let third = tempfile::tempdir().expect("a directory");
        assert_eq!(
            IdBlocks::on(IdSpace::Own, registry.path(), third.path())
                .expect("the freed range")
                .first,
            first.first
        );
    }

    #[test]
    fn nobody_else_can_hold_the_lock_of_the_registry() {
        use std::os::unix::fs::PermissionsExt as _;
        let (root, state) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        let registry = root.path().join("ids");
        // As earlier versions made it, with somebody who holds the lock by reading it.
        fs_err::create_dir(&registry).expect("made");
        fs_err::set_permissions(&registry, std::fs::Permissions::from_mode(0o755)).expect("opened");
        fs_err::write(registry.join("lock"), "").expect("written");
        fs_err::set_permissions(
            registry.join("lock"),
            std::fs::Permissions::from_mode(0o644),
        )
        .expect("opened");
        fs_err::write(registry.join("3"), state.path().display().to_string()).expect("a claim");
        let stranger = fs_err::File::open(registry.join("lock")).expect("anybody could read it");
        flock(&stranger, FlockOperation::NonBlockingLockExclusive).expect("and hold it");
        assert_eq!(
            claim(8, &registry, state.path()).expect("a range"),
            3,
            "claims stay"
        );
        let mode =
            |name: &str| fs_err::metadata(registry.join(name)).expect("there").mode() & 0o777;
        assert_eq!((mode("."), mode("lock")), (0o700, 0o600));
        // A link in place of the registry, or of the lock, is refused.
        fs_err::remove_file(registry.join("lock")).expect("removed");
        std::os::unix::fs::symlink("/dev/null", registry.join("lock")).expect("linked");
        assert!(claim(8, &registry, state.path()).is_err());
        std::os::unix::fs::symlink(&registry, root.path().join("link")).expect("linked");
        assert!(claim(8, &root.path().join("link"), state.path()).is_err());
    }

    #[test]
    fn who_looks_for_a_free_range_stops_no_worker_that_starts() {
        let state = tempfile::tempdir().expect("a directory");
        let config = crate::Config {
            state_dir: state.path().to_owned(),
            ..Default::default()
        };
        drop(crate::hold(&config).expect("a first time"));
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::SeqCst) {
                    is_unused(&config.directory());
                }
            });
            let held = (0..50)
                .map(|_| crate::hold(&config).map(drop))
                .collect::<Result<Vec<_>, _>>();
            over.store(true, std::sync::atomic::Ordering::SeqCst);
            held.expect("nobody else runs");
        });
        let _held = crate::hold(&config).expect("holds");
        assert!(!is_unused(&config.directory()), "one that runs is seen");
        assert!(crate::hold(&config).is_err(), "and has no second beside it");
    }

    #[test]
    fn an_ordinary_user_has_small_blocks_within_the_subordinate_ids() {
        let registry = tempfile::tempdir().expect("a directory");
        let (one, two) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        for state in [&one, &two] {
            fs_err::create_dir(state.path().join("worker")).expect("a directory");
        }
        let usual = IdSpace::Within(IdMap {
            first: 1,
            count: 65_536,
        });
        let blocks = IdBlocks::on(usual, registry.path(), one.path()).expect("a range");
        let all: Vec<IdMap> = std::iter::from_fn(|| blocks.take())
            .map(|block| blocks.map(block))
            .collect();
        assert_eq!((all.len(), all[0].first), (32, 1));
        assert!(
            all.iter()
                .all(|map| map.count > AGENT_ID && map.first + map.count <= 65_537)
        );
        assert!(
            IdBlocks::on(usual, registry.path(), two.path()).is_err(),
            "one worker has them all"
        );
        let more = IdSpace::Within(IdMap {
            first: 1,
            count: 131_072,
        });
        assert_eq!(
            IdBlocks::on(more, registry.path(), two.path())
                .expect("a range")
                .take(),
            Some(65_537)
        );
        assert_eq!(
            [
                sandboxes_within(65_536),
                sandboxes_within(131_072),
                sandboxes_within(1 << 20),
                sandboxes_within(u32::MAX)
            ],
            [32, 32, 64, 512]
        );
    }

    #[test]
    fn where_the_runtime_has_one_map_all_workspaces_have_its_ids() {
        let registry = tempfile::tempdir().expect("a directory");
        let shared = IdSpace::Shared(IdMap {
            first: 100_000,
            count: BLOCK,
        });
        let blocks = IdBlocks::on(shared, registry.path(), Path::new("/nowhere"))
            .expect("no claim is needed");
        assert_eq!(
            (blocks.take(), blocks.take()),
            (Some(100_000), Some(100_000))
        );
        assert_eq!(blocks.unenforced(), [Unenforced::IdRange]);
        let host = IdBlocks::on(IdSpace::Host, registry.path(), Path::new("/nowhere"))
            .expect("no claim is needed");
        assert_eq!(
            (host.take(), host.unenforced()),
            (
                Some(0),
                [Unenforced::Userns, Unenforced::IdRange].as_slice()
            )
        );
    }

    #[test]
    fn a_block_is_used_once_until_it_is_given_back() {
        let registry = tempfile::tempdir().expect("a directory");
        let blocks =
            IdBlocks::on(IdSpace::Own, registry.path(), Path::new("/nowhere")).expect("a range");
        let all: BTreeSet<u32> = std::iter::from_fn(|| blocks.take()).collect();
        assert_eq!(all.len(), ROOTS.blocks as usize);
        assert!(
            all.iter()
                .all(|block| u64::from(*block) + u64::from(BLOCK) <= 1 << 31)
        );
        blocks.give_back(*all.first().expect("blocks"));
        assert_eq!(blocks.take(), all.first().copied());
    }
}

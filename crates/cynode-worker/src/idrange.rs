//! Host ids for sandboxes: each workspace has its own block, so that no two sandboxes share an
//! owner.
//!
//! The workers of a host share a fixed number of ranges: for root above the ids of systemd and below
//! 2³¹, for an ordinary user within the subordinate ids. A worker claims one by writing its state
//! directory to the registry. A range is free again when that directory is gone, or when its worker
//! is not running and has no workspace left. A block belongs to the workspace rather than the
//! container, because files keep their owner when a workspace is mounted again.

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

pub(crate) const FIRST_ID: u32 = 0x7000_0000;
pub(crate) const BLOCK_SIZE: u32 = 65_536;
/// Uid and gid of the sandbox's user, inside the sandbox.
pub(crate) const AGENT_ID: u32 = 1_000;

#[derive(Debug, thiserror::Error)]
pub enum IdRangeError {
    #[error("failed to claim a range of ids in {path}")]
    Claim { path: PathBuf, source: io::Error },
    #[error("all {ranges} ranges of ids are claimed by other workers (see {registry})")]
    AllClaimed { ranges: u32, registry: PathBuf },
}

/// How ids are divided among workers and workspaces.
#[derive(Clone, Copy, Debug)]
struct IdLayout {
    first: u32,
    /// Ids per block.
    size: u32,
    /// Blocks per range.
    blocks: u32,
    ranges: u32,
}

/// The layout for root: eight workers with 512 workspaces each.
const ROOT_LAYOUT: IdLayout = IdLayout {
    first: FIRST_ID,
    size: BLOCK_SIZE,
    blocks: 512,
    ranges: 8,
};

impl IdLayout {
    /// The layout for an ordinary user: one worker gets all ids if they suffice for at most 32
    /// sandboxes, as is usual. More ids are divided among several workers.
    fn within(ids: IdMap) -> Self {
        let block_count = ids.count / rootless::ROOTLESS_BLOCK_SIZE;
        let ranges = (block_count / 32).clamp(1, ROOT_LAYOUT.ranges);
        Self {
            first: ids.first,
            size: rootless::ROOTLESS_BLOCK_SIZE,
            blocks: (block_count / ranges).min(ROOT_LAYOUT.blocks),
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

/// How many sandboxes, including retained workspaces, a worker can have with `ids` subordinate ids.
pub(crate) fn sandboxes_within(ids: u32) -> u32 {
    IdLayout::within(IdMap {
        first: 1,
        count: ids,
    })
    .blocks
}

/// Returns whether no worker runs on this directory and no sandbox files are left in it.
fn is_unused(directory: &Path) -> bool {
    let is_empty = |name: &str| {
        fs_err::read_dir(directory.join(name)).is_ok_and(|mut entries| entries.next().is_none())
    };
    // A shared lock, so that two concurrent checks don't mistake each other for a worker. A worker
    // that starts at this moment retries.
    let is_locked = || {
        fs_err::File::open(directory.join("lock"))
            .is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
    };
    !directory.is_dir() || (is_empty("workspaces") && is_empty("trash") && !is_locked())
}

/// Removes a lock file that an earlier version created world-readable: another user may have it
/// open and could block workers. Replacing it is safe: workers lock it only briefly at startup, and
/// the directory is writable by its owner alone.
fn replace_open_lock(path: &Path) -> io::Result<()> {
    match fs_err::symlink_metadata(path) {
        Ok(found) if found.is_file() && found.mode() & 0o077 != 0 => fs_err::remove_file(path),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Claims a range for the worker of `state_dir`; returns its earlier range if it has one.
fn claim(ranges: u32, registry: &Path, state_dir: &Path) -> Result<u32, IdRangeError> {
    let failed = |source| IdRangeError::Claim {
        path: registry.to_owned(),
        source,
    };
    // Anybody who could open the lock could hold it and prevent workers from starting.
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
    let range = free.ok_or_else(|| IdRangeError::AllClaimed {
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
    /// The worker's blocks for a runtime's id space: its own range, or the ids that all sandboxes
    /// share.
    pub(crate) fn new(
        space: IdSpace,
        registry: &Path,
        state_dir: &Path,
    ) -> Result<Self, IdRangeError> {
        let (layout, shared) = match space {
            IdSpace::Own => (ROOT_LAYOUT, None),
            IdSpace::Within(ids) => (IdLayout::within(ids), None),
            IdSpace::Shared(map) => (ROOT_LAYOUT, Some(map.first)),
            IdSpace::Host => (ROOT_LAYOUT, Some(0)),
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

    /// The host ids of a block, if it belongs to a single sandbox.
    pub(crate) fn exclusive_ids(&self, block: u32) -> Option<std::ops::Range<u32>> {
        let IdMap { first, count } = self.map(block);
        matches!(self.space, IdSpace::Own).then(|| first..first.saturating_add(count))
    }

    pub(crate) const fn space(&self) -> IdSpace {
        self.space
    }

    /// The limits that this id space can't enforce.
    pub(crate) const fn unenforced(&self) -> &'static [Unenforced] {
        self.space.unenforced()
    }

    /// Marks a block from the journal as used.
    pub(crate) fn reserve(&self, block: u32) {
        self.used.lock().insert(block);
    }

    /// Allocates a free block, or returns the shared one; `None` if all are used.
    pub(crate) fn allocate(&self) -> Option<u32> {
        if matches!(self.space, IdSpace::Shared(_) | IdSpace::Host) {
            return Some(self.first);
        }
        let mut used = self.used.lock();
        // Prefer the lowest: a rootless runtime keeps a copy of every image for each block it ran
        // with.
        let block = (0..self.count)
            .map(|index| self.first + index * self.size)
            .find(|block| !used.contains(block))?;
        used.insert(block);
        Some(block)
    }

    /// The number of blocks; `None` if all sandboxes share one.
    pub(crate) fn count(&self) -> Option<usize> {
        (!matches!(self.space, IdSpace::Shared(_) | IdSpace::Host)).then_some(self.count as usize)
    }

    pub(crate) fn release(&self, block: u32) {
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
    // invariant: host-ids
    fn two_workers_get_disjoint_ranges_and_keep_them() {
        let registry = tempfile::tempdir().expect("a directory");
        let (one, two) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        for state in [&one, &two] {
            fs_err::create_dir(state.path().join("worker")).expect("a directory");
        }
        let first = IdBlocks::new(IdSpace::Own, registry.path(), one.path()).expect("a range");
        let second = IdBlocks::new(IdSpace::Own, registry.path(), two.path()).expect("a range");
        assert_ne!(first.first, second.first);
        assert_eq!(
            IdBlocks::new(IdSpace::Own, registry.path(), one.path())
                .expect("a range")
                .first,
            first.first
        );
        drop(one);
        let third = tempfile::tempdir().expect("a directory");
        assert_eq!(
            IdBlocks::new(IdSpace::Own, registry.path(), third.path())
                .expect("the freed range")
                .first,
            first.first
        );
    }

    #[test]
    // invariant: host-ids
    fn no_other_user_can_hold_the_registry_lock() {
        use std::os::unix::fs::PermissionsExt as _;
        let (root, state) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        let registry = root.path().join("ids");
        // As created by earlier versions, with another user holding the lock.
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
            "an earlier claim was lost"
        );
        let mode =
            |name: &str| fs_err::metadata(registry.join(name)).expect("there").mode() & 0o777;
        assert_eq!((mode("."), mode("lock")), (0o700, 0o600));
        // A symlink in place of the registry or the lock is rejected.
        fs_err::remove_file(registry.join("lock")).expect("removed");
        std::os::unix::fs::symlink("/dev/null", registry.join("lock")).expect("linked");
        assert!(claim(8, &registry, state.path()).is_err());
        std::os::unix::fs::symlink(&registry, root.path().join("link")).expect("linked");
        assert!(claim(8, &root.path().join("link"), state.path()).is_err());
    }

    #[test]
    fn looking_for_a_free_range_does_not_stop_a_worker_from_starting() {
        let state = tempfile::tempdir().expect("a directory");
        let config = crate::Config {
            state_dir: state.path().to_owned(),
            ..Default::default()
        };
        drop(crate::lock_state(&config).expect("a first time"));
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                    is_unused(&config.directory());
                }
            });
            let held = (0..50)
                .map(|_| crate::lock_state(&config).map(drop))
                .collect::<Result<Vec<_>, _>>();
            stop.store(true, std::sync::atomic::Ordering::SeqCst);
            held.expect("nobody else runs");
        });
        let _held = crate::lock_state(&config).expect("holds");
        assert!(
            !is_unused(&config.directory()),
            "a running worker was not detected"
        );
        assert!(
            crate::lock_state(&config).is_err(),
            "a second worker got the lock"
        );
    }

    #[test]
    // invariant: host-ids
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
        let blocks = IdBlocks::new(usual, registry.path(), one.path()).expect("a range");
        let all: Vec<IdMap> = std::iter::from_fn(|| blocks.allocate())
            .map(|block| blocks.map(block))
            .collect();
        assert_eq!((all.len(), all[0].first), (32, 1));
        assert!(
            all.iter()
                .all(|map| map.count > AGENT_ID && map.first + map.count <= 65_537)
        );
        assert!(
            IdBlocks::new(usual, registry.path(), two.path()).is_err(),
            "a second worker got blocks although the first has all"
        );
        let more = IdSpace::Within(IdMap {
            first: 1,
            count: 131_072,
        });
        assert_eq!(
            IdBlocks::new(more, registry.path(), two.path())
                .expect("a range")
                .allocate(),
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
    fn with_one_map_all_workspaces_share_its_ids() {
        let registry = tempfile::tempdir().expect("a directory");
        let shared = IdSpace::Shared(IdMap {
            first: 100_000,
            count: BLOCK_SIZE,
        });
        let blocks = IdBlocks::new(shared, registry.path(), Path::new("/nowhere"))
            .expect("no claim is needed");
        assert_eq!(
            (blocks.allocate(), blocks.allocate()),
            (Some(100_000), Some(100_000))
        );
        assert_eq!(blocks.unenforced(), [Unenforced::IdRange]);
        let host = IdBlocks::new(IdSpace::Host, registry.path(), Path::new("/nowhere"))
            .expect("no claim is needed");
        assert_eq!(
            (host.allocate(), host.unenforced()),
            (
                Some(0),
                [Unenforced::Userns, Unenforced::IdRange].as_slice()
            )
        );
    }

    #[test]
    // invariant: host-ids
    fn a_block_is_used_once_until_it_is_released() {
        let registry = tempfile::tempdir().expect("a directory");
        let blocks =
            IdBlocks::new(IdSpace::Own, registry.path(), Path::new("/nowhere")).expect("a range");
        let all: BTreeSet<u32> = std::iter::from_fn(|| blocks.allocate()).collect();
        assert_eq!(all.len(), ROOT_LAYOUT.blocks as usize);
        assert!(
            all.iter()
                .all(|block| u64::from(*block) + u64::from(BLOCK_SIZE) <= 1 << 31)
        );
        blocks.release(*all.first().expect("blocks"));
        assert_eq!(blocks.allocate(), all.first().copied());
    }
}

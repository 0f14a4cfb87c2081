//! Watches a directory tree, or one file, for changes.
//!
//! Invariants: at most [`MAX_WATCHED_DIRECTORIES`] are watched and [`MAX_PENDING_CHANGES`] wait to
//! be sent; what exceeds either is reported as one overflow. Links are never followed below the
//! watched path.

use std::{
    collections::{HashMap, VecDeque},
    mem::MaybeUninit,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use cynode_api::{
    Base64Bytes, FileEvent, FileEventKind, FileType,
    file_limits::{MAX_PENDING_CHANGES, MAX_WATCHED_DIRECTORIES},
};
use cynode_sba_proto::{MAX_DATA, Reply};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{
        CWD, FileType as Kind, Mode, OFlags,
        inotify::{self, CreateFlags, ReadFlags, WatchFlags},
        openat,
    },
    io::Errno,
};

use super::{
    error::{Failure, FailureContext, Outcome},
    path::{self, Files},
    walk::{AtLimit, Step, walk},
};
use crate::peer::Peer;

/// Changes within this time are sent together, each path once.
const COALESCING: Duration = Duration::from_millis(50);

impl Files {
    pub(super) fn watch(&self, path: &[u8], peer: &mut Peer) -> Outcome<()> {
        let full_path = self.locate(path)?;
        let stat = path::stat(&full_path)?;
        let mut watch = Watch::new()?;
        if path::kind(&stat) == FileType::Dir {
            let prefix = path::printed_prefix(path);
            watch.add_tree(&full_path, &prefix)?;
        } else {
            // A file is often replaced by another of its name, so its directory is watched.
            let (parent, name) = path::split(&full_path)?;
            let mut prefix = path::printed_prefix(path);
            prefix.truncate(prefix.len() - name.len());
            while prefix.len() > 1 && prefix.ends_with(b"/") {
                prefix.pop();
            }
            watch.add_directory(parent, &prefix)?;
            watch.only = Some(path::bytes(Path::new(name)).to_vec());
        }
        peer.reply(&Reply::Body).map_err(Failure::Connection)?;
        watch.serve(peer)
    }
}

struct Directory {
    full_path: PathBuf,
    /// As the caller sees it.
    printed: Vec<u8>,
}

struct Watch {
    inotify: OwnedFd,
    directories: HashMap<i32, Directory>,
    /// The only name to report, if a file is watched.
    only: Option<Vec<u8>>,
    pending: Pending,
}

impl Watch {
    fn new() -> Outcome<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .doing("watching", b"files")?;
        Ok(Self {
            inotify,
            directories: HashMap::new(),
            only: None,
            pending: Pending::default(),
        })
    }

    fn add_directory(&mut self, full_path: &Path, printed: &[u8]) -> Outcome<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ONLYDIR
            | WatchFlags::EXCL_UNLINK;
        let id = inotify::add_watch(&self.inotify, full_path, flags)
            .doing("watching", path::bytes(full_path))?;
        self.directories.insert(
            id,
            Directory {
                full_path: full_path.to_owned(),
                printed: printed.to_vec(),
            },
        );
        Ok(())
    }

    /// Watches a directory and those below it, as far as the limit allows.
    fn add_tree(&mut self, top: &Path, printed: &[u8]) -> Outcome<()> {
        if self.directories.len() >= MAX_WATCHED_DIRECTORIES {
            self.pending.overflowed = true;
            return Ok(());
        }
        self.add_directory(top, printed)?;
        let directory = openat(
            CWD,
            top,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .doing("opening the directory", path::bytes(top))?;
        let mut is_full = false;
        let complete = walk(directory, None, AtLimit::Skip, |entry| {
            if entry.kind != Kind::Directory {
                return Ok(Step::Over);
            }
            if self.directories.len() >= MAX_WATCHED_DIRECTORIES {
                is_full = true;
                return Ok(Step::Stop);
            }
            let below = top.join(Path::new(as_os(entry.path)));
            let mut name = printed.to_vec();
            path::join(&mut name, entry.path);
            // A directory that can't be read, or is gone already, has no changes to report.
            match (self.add_directory(&below, &name), entry.open_directory()) {
                (Ok(()), Ok(opened)) => Ok(Step::Into(opened)),
                _ => Ok(Step::Over),
            }
        })?;
        self.pending.overflowed |= is_full || !complete;
        Ok(())
    }

    /// Sends changes until the connection breaks. The supervisor ends this process when the worker
    /// disconnects.
    fn serve(&mut self, peer: &mut Peer) -> Outcome<()> {
        let mut deadline = self
            .pending
            .is_waiting()
            .then(|| Instant::now() + COALESCING);
        loop {
            let timeout = deadline.map(|at| {
                let left = at.saturating_duration_since(Instant::now());
                Timespec {
                    tv_sec: 0,
                    tv_nsec: i64::from(left.subsec_nanos()),
                }
            });
            let ready = {
                let mut fds = [PollFd::from_borrowed_fd(
                    self.inotify.as_fd(),
                    PollFlags::IN,
                )];
                match poll(&mut fds, timeout.as_ref()) {
                    Ok(count) => count > 0,
                    Err(Errno::INTR) => false,
                    Err(errno) => return Err(Failure::system(errno, "watching", b"files")),
                }
            };
            if ready {
                self.read()?;
                if self.pending.is_waiting() && deadline.is_none() {
                    deadline = Some(Instant::now() + COALESCING);
                }
            }
            // What the kernel has reported already belongs to the same batch, within limits.
            let patience = if ready {
                4 * COALESCING
            } else {
                Duration::ZERO
            };
            if deadline.is_some_and(|at| at + patience <= Instant::now()) {
                deadline = None;
                for batch in self.pending.take() {
                    peer.data(&batch).map_err(Failure::Connection)?;
                }
            }
        }
    }

    /// Reads what the kernel has reported.
    fn read(&mut self) -> Outcome<()> {
        let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
        let mut changes = Vec::new();
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => changes.push((
                    event.wd(),
                    event.events(),
                    event.cookie(),
                    event.file_name().map(|name| name.to_bytes().to_vec()),
                )),
                Err(Errno::WOULDBLOCK) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Failure::system(errno, "watching", b"files")),
            }
            // The kernel keeps the rest until the next round.
            if reader.is_buffer_empty() && changes.len() >= MAX_PENDING_CHANGES {
                break;
            }
        }
        for (id, flags, cookie, name) in changes {
            self.note(id, flags, cookie, name);
        }
        Ok(())
    }

    fn note(&mut self, id: i32, flags: ReadFlags, cookie: u32, name: Option<Vec<u8>>) {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.pending.overflowed = true;
            return;
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.directories.remove(&id);
            return;
        }
        let (Some(directory), Some(name)) = (self.directories.get(&id), name) else {
            return;
        };
        if self.only.as_ref().is_some_and(|only| *only != name) {
            return;
        }
        let mut printed = directory.printed.clone();
        path::join(&mut printed, &name);
        let full_path = directory.full_path.join(Path::new(as_os(&name)));
        let is_directory = flags.contains(ReadFlags::ISDIR);
        let mut is_new = false;
        if flags.contains(ReadFlags::MOVED_FROM) {
            if is_directory {
                self.forget_below(&full_path);
            }
            self.pending.moved_from(cookie, printed.clone());
        } else if flags.contains(ReadFlags::MOVED_TO) {
            is_new = !self.pending.moved_to(cookie, &printed);
        } else if flags.contains(ReadFlags::CREATE) {
            is_new = true;
            self.pending
                .add(printed.clone(), FileEventKind::Created, None);
        } else if flags.contains(ReadFlags::DELETE) {
            self.pending
                .add(printed.clone(), FileEventKind::Deleted, None);
        } else if flags.contains(ReadFlags::MODIFY) {
            self.pending
                .add(printed.clone(), FileEventKind::Modified, None);
        }
        let arrived = flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        if is_directory && arrived && self.only.is_none() {
            // It may be gone again already.
            let is_watched = self.add_tree(&full_path, &printed).is_ok();
            if is_watched && is_new {
                self.report_content(&full_path, &printed);
            }
        }
    }

    /// Stops watching a directory that was moved away, with everything below it.
    fn forget_below(&mut self, full_path: &Path) {
        let gone: Vec<i32> = self
            .directories
            .iter()
            .filter(|(_, directory)| directory.full_path.starts_with(full_path))
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.directories.remove(&id);
            // The kernel may have removed it already.
            inotify::remove_watch(&self.inotify, id).ok();
        }
    }

    /// Reports what was put into a new directory before it was watched.
    fn report_content(&mut self, full_path: &Path, printed: &[u8]) {
        let Ok(directory) = openat(
            CWD,
            full_path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        ) else {
            return;
        };
        let pending = &mut self.pending;
        let walked = walk(directory, None, AtLimit::Skip, |entry| {
            let mut name = printed.to_vec();
            path::join(&mut name, entry.path);
            pending.add(name, FileEventKind::Created, None);
            if pending.overflowed {
                return Ok(Step::Stop);
            }
            match (entry.kind, entry.open_directory()) {
                (Kind::Directory, Ok(opened)) => Ok(Step::Into(opened)),
                _ => Ok(Step::Over),
            }
        });
        self.pending.overflowed |= !matches!(walked, Ok(true));
    }
}

fn as_os(bytes: &[u8]) -> &std::ffi::OsStr {
    std::os::unix::ffi::OsStrExt::from_bytes(bytes)
}

/// Changes that wait to be sent, one for each path.
#[derive(Default)]
struct Pending {
    changes: VecDeque<(Vec<u8>, FileEventKind, Option<Vec<u8>>)>,
    places: HashMap<Vec<u8>, usize>,
    /// Former paths of what is being moved, by the kernel's cookie.
    leaving: Vec<(u32, Vec<u8>)>,
    overflowed: bool,
}

impl Pending {
    fn is_waiting(&self) -> bool {
        self.overflowed || !self.changes.is_empty() || !self.leaving.is_empty()
    }

    fn add(&mut self, path: Vec<u8>, kind: FileEventKind, from: Option<Vec<u8>>) {
        if let Some(place) = self.places.get(&path) {
            let (_, known, known_from) = &mut self.changes[*place];
            // What was just created or moved here is new to the reader, whatever is written to it.
            let stays = kind == FileEventKind::Modified
                && matches!(known, FileEventKind::Created | FileEventKind::Moved);
            if !stays {
                (*known, *known_from) = (kind, from);
            }
            return;
        }
        if self.changes.len() + self.leaving.len() >= MAX_PENDING_CHANGES {
            self.overflowed = true;
            return;
        }
        self.places.insert(path.clone(), self.changes.len());
        self.changes.push_back((path, kind, from));
    }

    fn moved_from(&mut self, cookie: u32, path: Vec<u8>) {
        if self.changes.len() + self.leaving.len() >= MAX_PENDING_CHANGES {
            self.overflowed = true;
            return;
        }
        self.leaving.push((cookie, path));
    }

    /// Returns whether it was in the watched tree before.
    fn moved_to(&mut self, cookie: u32, path: &[u8]) -> bool {
        let place = self.leaving.iter().position(|(known, _)| *known == cookie);
        let from = place.map(|place| self.leaving.swap_remove(place).1);
        let was_inside = from.is_some();
        let kind = if was_inside {
            FileEventKind::Moved
        } else {
            FileEventKind::Created
        };
        self.add(path.to_vec(), kind, from);
        was_inside
    }

    /// Takes all changes as lists of JSON, each within one frame.
    fn take(&mut self) -> Vec<Vec<u8>> {
        // What did not arrive anywhere has left the watched tree.
        for (_, path) in std::mem::take(&mut self.leaving) {
            self.add(path, FileEventKind::Deleted, None);
        }
        self.places.clear();
        let mut events: Vec<FileEvent> = std::mem::take(&mut self.changes)
            .into_iter()
            .map(|(path, kind, from)| event(path, kind, from))
            .collect();
        if std::mem::take(&mut self.overflowed) {
            events.push(event(Vec::new(), FileEventKind::Overflow, None));
        }
        let (mut batches, mut batch) = (Vec::new(), vec![b'[']);
        for event in &events {
            let json = serde_json::to_vec(event).unwrap_or_default();
            if batch.len() + json.len() + 2 > MAX_DATA && batch.len() > 1 {
                batch.push(b']');
                batches.push(std::mem::replace(&mut batch, vec![b'[']));
            }
            if batch.len() > 1 {
                batch.push(b',');
            }
            batch.extend(json);
        }
        batch.push(b']');
        batches.push(batch);
        batches
    }
}

fn event(path: Vec<u8>, kind: FileEventKind, from: Option<Vec<u8>>) -> FileEvent {
    let text = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
    FileEvent {
        path: text(&path),
        from: from.map(|from| text(&from)),
        path_b64: std::str::from_utf8(&path)
            .is_err()
            .then_some(Base64Bytes(path)),
        kind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(pending: &mut Pending) -> Vec<(String, FileEventKind, Option<String>)> {
        pending
            .take()
            .iter()
            .flat_map(|batch| {
                assert!(batch.len() <= MAX_DATA);
                serde_json::from_slice::<Vec<FileEvent>>(batch).expect("a list")
            })
            .map(|event| (event.path, event.kind, event.from))
            .collect()
    }

    #[test]
    fn changes_of_a_path_are_merged() {
        use FileEventKind::{Created, Deleted, Modified, Moved};
        let mut pending = Pending::default();
        pending.add(b"a".to_vec(), Created, None);
        pending.add(b"b".to_vec(), Modified, None);
        pending.add(b"a".to_vec(), Modified, None);
        pending.add(b"b".to_vec(), Deleted, None);
        pending.moved_from(1, b"old".to_vec());
        assert!(pending.moved_to(1, b"new"));
        assert!(!pending.moved_to(2, b"from-outside"));
        pending.moved_from(3, b"to-outside".to_vec());
        let some = |text: &str| text.to_owned();
        assert_eq!(
            taken(&mut pending),
            [
                (some("a"), Created, None),
                (some("b"), Deleted, None),
                (some("new"), Moved, Some(some("old"))),
                (some("from-outside"), Created, None),
                (some("to-outside"), Deleted, None),
            ]
        );
        assert!(!pending.is_waiting());
    }

    #[test]
    fn too_many_changes_are_one_overflow() {
        let mut pending = Pending::default();
        for number in 0..MAX_PENDING_CHANGES {
            pending.add(
                format!("{number}{}", "x".repeat(200)).into_bytes(),
                FileEventKind::Created,
                None,
            );
        }
        assert!(!pending.overflowed);
        for _ in 0..2 {
            pending.add(b"one more".to_vec(), FileEventKind::Created, None);
        }
        let taken = taken(&mut pending);
        assert_eq!(taken.len(), MAX_PENDING_CHANGES + 1);
        assert_eq!(
            taken.last().map(|(_, kind, _)| *kind),
            Some(FileEventKind::Overflow)
        );
    }
}

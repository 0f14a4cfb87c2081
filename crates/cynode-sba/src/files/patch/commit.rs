//! Writing what a plan worked out.
//!
//! First every new content is written under a hidden name beside its place, so that a full disk shows before anything
//! changes. Then the files are swapped in one by one; the old ones keep hidden names until all is done. A failure on the
//! way is undone in reverse. Only the end of the process between two swaps leaves a part of the diff applied.

use std::{collections::BTreeMap, io::Write as _, os::fd::OwnedFd};

use cynode_api::ErrorCode;
use cynode_sba_proto::AgentError;
use rustix::{
    fs::{AtFlags, Mode, RenameFlags, Stat, fchmod, renameat, renameat_with, statat, unlinkat},
    io::Errno,
};

use super::{
    super::{
        confined::Confined,
        error::{Failure, Outcome, shown},
        read::same,
        staged::{Staged, rename_to_free_name, with_hidden_name},
    },
    plan::{Entry, Key},
};

/// One file to change.
struct Swap<'a> {
    key: &'a Key,
    before: Option<Stat>,
    /// The hidden name: of the new content before the swap, of the old one after it.
    hidden: Option<String>,
    /// Whether there is a new content.
    writes: bool,
}

impl Swap<'_> {
    fn directory(&self, root: &Confined) -> Result<OwnedFd, Errno> {
        let parents: Vec<&[u8]> = self.key.iter().take(self.key.len() - 1).map(Vec::as_slice).collect();
        root.directory(&parents)
    }

    fn name(&self) -> &[u8] {
        self.key.last().map_or(b"", Vec::as_slice)
    }

    /// Puts the new state in place. The old one then has the hidden name, if there was one.
    fn swap(&mut self, root: &Confined) -> Result<(), Errno> {
        let directory = self.directory(root)?;
        match (&self.before, &self.hidden) {
            (Some(before), hidden) => {
                let now = statat(&directory, self.name(), AtFlags::SYMLINK_NOFOLLOW)?;
                if !same(before, &now) {
                    return Err(Errno::AGAIN);
                }
                if let Some(hidden) = hidden {
                    return exchange(&directory, hidden.as_bytes(), self.name());
                }
                let (hidden, ()) = with_hidden_name(|hidden| rename_free(&directory, self.name(), hidden.as_bytes()))?;
                self.hidden = Some(hidden);
                Ok(())
            }
            (None, Some(hidden)) => {
                rename_free(&directory, hidden.as_bytes(), self.name())?;
                self.hidden = None;
                Ok(())
            }
            (None, None) => Ok(()),
        }
    }

    /// Takes a finished swap back. What was new then has the hidden name, or is gone.
    fn undo(&mut self, root: &Confined) -> Result<(), Errno> {
        let directory = self.directory(root)?;
        match (&self.before, &self.hidden) {
            (Some(_), Some(hidden)) if self.writes => exchange(&directory, hidden.as_bytes(), self.name()),
            (Some(_), Some(hidden)) => {
                rename_free(&directory, hidden.as_bytes(), self.name())?;
                self.hidden = None;
                Ok(())
            }
            _ => unlinkat(&directory, self.name(), AtFlags::empty()),
        }
    }

    fn discard_hidden(&mut self, root: &Confined) {
        if let Some(hidden) = self.hidden.take()
            && let Ok(directory) = self.directory(root)
        {
            // A hidden file that stays is untidy, no more.
            let _gone = unlinkat(&directory, hidden, AtFlags::empty());
        }
    }
}

fn rename_free(directory: &OwnedFd, from: &[u8], to: &[u8]) -> Result<(), Errno> {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};
    rename_to_free_name(directory, Path::new(OsStr::from_bytes(from)), directory, Path::new(OsStr::from_bytes(to)))
}

/// Lets two files change names.
fn exchange(directory: &OwnedFd, one: &[u8], other: &[u8]) -> Result<(), Errno> {
    match renameat_with(directory, one, directory, other, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS) => {
            let (aside, ()) = with_hidden_name(|aside| rename_free(directory, other, aside.as_bytes()))?;
            renameat(directory, one, directory, other)?;
            renameat(directory, aside, directory, one)
        }
        result => result,
    }
}

pub(super) fn commit(root: &Confined, entries: &BTreeMap<Key, Entry>) -> Outcome<()> {
    let mut made = Vec::new();
    let mut swaps = Vec::new();
    for (key, entry) in entries.iter().filter(|(_, entry)| entry.changed && (entry.stat.is_some() || entry.now.is_some())) {
        match stage(root, key, entry, &mut made) {
            Ok(swap) => swaps.push(swap),
            Err(errno) => {
                let failure = failed(errno, "writing", key);
                clear(root, &mut swaps, &made);
                return Err(failure);
            }
        }
    }
    for index in 0..swaps.len() {
        if let Err(errno) = swaps[index].swap(root) {
            let failure = match errno {
                Errno::AGAIN => Failure::new(
                    ErrorCode::Internal,
                    format!("{} changed while the diff was applied; nothing was changed", shown(&swaps[index].key.join(&b'/'))),
                ),
                errno => failed(errno, "replacing", swaps[index].key),
            };
            let mut stuck = Vec::new();
            for swap in swaps[..index].iter_mut().rev() {
                if swap.undo(root).is_err() {
                    // The hidden name has the only copy of the old content.
                    stuck.push(format!("{} (kept as {})", shown(&swap.key.join(&b'/')), swap.hidden.as_deref().unwrap_or("-")));
                    swap.hidden = None;
                }
            }
            clear(root, &mut swaps, &made);
            return Err(if stuck.is_empty() { failure } else { half_done(failure, &stuck) });
        }
    }
    for swap in &mut swaps {
        swap.discard_hidden(root);
    }
    Ok(())
}

fn stage<'a>(root: &Confined, key: &'a Key, entry: &Entry, made: &mut Vec<(&'a Key, usize)>) -> Result<Swap<'a>, Errno> {
    let mut swap = Swap { key, before: entry.stat, hidden: None, writes: entry.now.is_some() };
    if let Some(content) = &entry.now {
        let parents: Vec<&[u8]> = key.iter().take(key.len() - 1).map(Vec::as_slice).collect();
        let directory = root.make_directory(&parents, Mode::from_raw_mode(0o755), |count| made.push((key, count)))?;
        let mut staged = Staged::named(directory)?;
        staged.file().write_all(&content.bytes).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        fchmod(staged.file(), Mode::from_raw_mode(content.mode))?;
        swap.hidden = staged.keep();
    }
    Ok(swap)
}

/// Deletes hidden files, and directories that were made for nothing.
fn clear(root: &Confined, swaps: &mut [Swap<'_>], made: &[(&Key, usize)]) {
    for swap in swaps {
        swap.discard_hidden(root);
    }
    for (key, count) in made.iter().rev() {
        let parts: Vec<&[u8]> = key.iter().take(*count).map(Vec::as_slice).collect();
        if let Some((name, parents)) = parts.split_last()
            && let Ok(directory) = root.directory(parents)
        {
            // Somebody may have put something into it meanwhile; then it stays.
            let _gone = unlinkat(directory, *name, AtFlags::REMOVEDIR);
        }
    }
}

fn failed(errno: Errno, doing: &str, key: &Key) -> Failure {
    match Failure::system(errno, doing, &key.join(&b'/')) {
        Failure::Refused(error) => Failure::Refused(AgentError { message: format!("{}; nothing was changed", error.message), ..error }),
        gone @ Failure::Connection(_) => gone,
    }
}

fn half_done(failure: Failure, stuck: &[String]) -> Failure {
    let reason = match failure {
        Failure::Refused(error) => error.message,
        Failure::Connection(error) => error.to_string(),
    };
    Failure::new(ErrorCode::Internal, format!("{reason}; but what was already written can't be taken back in {}", stuck.join(", ")))
}

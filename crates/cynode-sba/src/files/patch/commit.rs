//! Writes the changes of a plan.
//!
//! First writes every new content under a hidden name next to its destination, so that a full disk
//! shows before anything changes. Then swaps the files in one by one; the old ones keep hidden
//! names until the end. A failure rolls back in reverse order. Only the death of the process
//! between two swaps leaves the diff partially applied.
//!
//! Swaps are ordered by location, so a file that becomes a directory is moved away before its new
//! entries come, and a directory that becomes a file is moved aside with everything that the diff
//! deletes below it.

use std::{collections::BTreeMap, ffi::OsStr, io::Write as _, os::fd::OwnedFd, path::Path};

use cynode_api::ErrorCode;
use cynode_patch::{Entry, File, Kind, Location, PriorState};
use cynode_sba_proto::AgentError;
use rustix::{
    fs::{
        AtFlags, Mode, OFlags, RenameFlags, Stat, fchmod, openat, renameat, renameat_with, statat,
        symlinkat, unlinkat,
    },
    io::Errno,
};

use super::{
    super::{
        confined::ConfinedRoot,
        error::{Failure, Outcome, shown},
        read::same_version,
        staged::{StagedFile, rename_to_free_name, with_hidden_name},
        tree::remove_tree,
    },
    disk::files_below,
};

type Entries = BTreeMap<Location, Entry<Stat>>;

/// One file to change.
struct Swap<'a> {
    location: &'a Location,
    before: &'a PriorState<Stat>,
    /// The swap has new content to publish.
    writes: bool,
    /// The hidden name of the new content before the swap, of the old file after it.
    hidden: Option<String>,
    /// Depth of the staging directory in leading path parts; less than that of the parent directory
    /// while one of the parents is still a file or a link.
    staged_depth: usize,
    /// The depths of the directories that the swap created, in leading path parts.
    created_depths: Vec<usize>,
    /// The hidden name of the directory that the file has replaced.
    replaced_directory: Option<String>,
}

impl Swap<'_> {
    fn directory(&self, root: &ConfinedRoot) -> Result<OwnedFd, Errno> {
        let parts = self.location.parts();
        root.real_directory(&parts[..parts.len() - 1])
    }

    fn name(&self) -> &[u8] {
        self.location.parts().last().copied().unwrap_or_default()
    }

    /// Swaps the new state in. The old file, if any, keeps the hidden name.
    fn swap(&mut self, root: &ConfinedRoot, entries: &Entries) -> Result<(), Errno> {
        match self.before {
            PriorState::File(before) => {
                let directory = self.directory(root)?;
                if !same_version(
                    before,
                    &statat(&directory, self.name(), AtFlags::SYMLINK_NOFOLLOW)?,
                ) {
                    return Err(Errno::AGAIN);
                }
                if let Some(hidden) = &self.hidden {
                    return exchange(&directory, hidden.as_bytes(), self.name());
                }
                let (hidden, ()) = with_hidden_name(|hidden| {
                    rename_without_replacing(&directory, self.name(), &directory, hidden.as_bytes())
                })?;
                self.hidden = Some(hidden);
                Ok(())
            }
            PriorState::Directory(before) => self.replace_directory(root, before, entries),
            PriorState::Nothing => {
                let Some(hidden) = self.hidden.clone() else {
                    return Ok(());
                };
                let parts = self.location.parts();
                let mut created_depths = Vec::new();
                let directory = root.make_real_directory(
                    &parts[..parts.len() - 1],
                    Mode::from_raw_mode(0o755),
                    |count| created_depths.push(count),
                );
                self.created_depths = created_depths;
                rename_without_replacing(
                    &root.real_directory(&parts[..self.staged_depth])?,
                    hidden.as_bytes(),
                    &directory?,
                    self.name(),
                )?;
                self.hidden = None;
                Ok(())
            }
        }
    }

    fn replace_directory(
        &mut self,
        root: &ConfinedRoot,
        before: &Stat,
        entries: &Entries,
    ) -> Result<(), Errno> {
        let Some(hidden) = self.hidden.clone() else {
            return Ok(());
        };
        let directory = self.directory(root)?;
        let now = statat(&directory, self.name(), AtFlags::SYMLINK_NOFOLLOW)?;
        if (before.st_dev, before.st_ino) != (now.st_dev, now.st_ino) {
            return Err(Errno::AGAIN);
        }
        let (aside, ()) = with_hidden_name(|aside| {
            rename_without_replacing(&directory, self.name(), &directory, aside.as_bytes())
        })?;
        // No process can add to the directory by name once it is hidden, so its content is final.
        let is_deleted = |location: &Location| {
            entries
                .get(location)
                .is_some_and(|entry| entry.changed && entry.now.is_none())
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let is_empty =
            openat(&directory, aside.as_str(), flags, Mode::empty()).is_ok_and(|opened| {
                files_below(opened, self.location, entries.len())
                    .is_ok_and(|below| below.iter().all(is_deleted))
            });
        let replaced = if is_empty {
            rename_without_replacing(&directory, hidden.as_bytes(), &directory, self.name())
        } else {
            Err(Errno::AGAIN)
        };
        match replaced {
            Ok(()) => (self.hidden, self.replaced_directory) = (None, Some(aside)),
            Err(_) => {
                rename_without_replacing(&directory, aside.as_bytes(), &directory, self.name())?;
            }
        }
        replaced
    }

    /// Rolls back a finished swap. The new file then has the hidden name, or is deleted.
    fn undo(&mut self, root: &ConfinedRoot) -> Result<(), Errno> {
        let directory = self.directory(root)?;
        match (self.before, &self.hidden) {
            (PriorState::File(_), Some(hidden)) if self.writes => {
                exchange(&directory, hidden.as_bytes(), self.name())
            }
            (PriorState::File(_), Some(hidden)) => {
                rename_without_replacing(&directory, hidden.as_bytes(), &directory, self.name())?;
                self.hidden = None;
                Ok(())
            }
            (PriorState::Directory(_), _) => {
                let Some(aside) = self.replaced_directory.take() else {
                    return Ok(());
                };
                unlinkat(&directory, self.name(), AtFlags::empty())?;
                rename_without_replacing(&directory, aside.as_bytes(), &directory, self.name())
            }
            _ => {
                unlinkat(&directory, self.name(), AtFlags::empty())?;
                self.remove_created_directories(root);
                Ok(())
            }
        }
    }

    fn remove_created_directories(&mut self, root: &ConfinedRoot) {
        for count in std::mem::take(&mut self.created_depths).into_iter().rev() {
            remove_directory(root, self.location, count);
        }
    }

    fn discard_hidden(&mut self, root: &ConfinedRoot) {
        let parts = self.location.parts();
        // A leftover hidden file is harmless.
        if let Some(hidden) = self.hidden.take()
            && let Ok(directory) = root.real_directory(&parts[..self.staged_depth])
        {
            let _gone = unlinkat(&directory, hidden, AtFlags::empty());
        }
        if let Some(aside) = self.replaced_directory.take()
            && let Ok(directory) = self.directory(root)
        {
            let _gone = remove_tree(directory, OsStr::new(&aside), Path::new(&aside));
        }
    }
}

fn rename_without_replacing(
    from_directory: &OwnedFd,
    from: &[u8],
    to_directory: &OwnedFd,
    to: &[u8],
) -> Result<(), Errno> {
    use std::os::unix::ffi::OsStrExt as _;
    rename_to_free_name(
        from_directory,
        Path::new(OsStr::from_bytes(from)),
        to_directory,
        Path::new(OsStr::from_bytes(to)),
    )
}

/// Exchanges the names of two files.
fn exchange(directory: &OwnedFd, one: &[u8], other: &[u8]) -> Result<(), Errno> {
    match renameat_with(directory, one, directory, other, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS) => {
            let (aside, ()) = with_hidden_name(|aside| {
                rename_without_replacing(directory, other, directory, aside.as_bytes())
            })?;
            renameat(directory, one, directory, other)?;
            renameat(directory, aside, directory, one)
        }
        result => result,
    }
}

pub(super) fn commit(root: &ConfinedRoot, entries: &Entries) -> Outcome<()> {
    let mut created = Vec::new();
    let mut swaps: Vec<Swap<'_>> = Vec::new();
    let mut replaced: Option<&Location> = None;
    for (location, entry) in entries.iter().filter(|(_, entry)| entry.changed) {
        if replaced.is_some_and(|directory| directory.is_above(location))
            || (matches!(entry.before, PriorState::Nothing) && entry.now.is_none())
        {
            continue;
        }
        if matches!(entry.before, PriorState::Directory(_)) {
            replaced = Some(location);
        }
        let mut swap = Swap {
            location,
            before: &entry.before,
            writes: entry.now.is_some(),
            hidden: None,
            staged_depth: location.parts().len() - 1,
            created_depths: Vec::new(),
            replaced_directory: None,
        };
        if let Some(file) = &entry.now
            && let Err(errno) = stage(root, &mut swap, file, &mut created)
        {
            let failure = unchanged_failure(errno, "writing", location);
            clean_up(root, &mut swaps, &created);
            return Err(failure);
        }
        swaps.push(swap);
    }
    for index in 0..swaps.len() {
        if let Err(errno) = swaps[index].swap(root, entries) {
            let failure = match errno {
                Errno::AGAIN => Failure::new(
                    ErrorCode::Internal,
                    format!(
                        "{} changed while the diff was applied; nothing was changed",
                        shown(swaps[index].location.as_bytes())
                    ),
                ),
                errno => unchanged_failure(errno, "replacing", swaps[index].location),
            };
            swaps[index].remove_created_directories(root);
            let mut not_rolled_back = Vec::new();
            for swap in swaps[..index].iter_mut().rev() {
                if swap.undo(root).is_err() {
                    // The hidden file is the only copy of the old content.
                    let kept = swap
                        .hidden
                        .take()
                        .or_else(|| swap.replaced_directory.take());
                    not_rolled_back.push(format!(
                        "{} (kept as {})",
                        shown(swap.location.as_bytes()),
                        kept.as_deref().unwrap_or("-")
                    ));
                }
            }
            clean_up(root, &mut swaps, &created);
            return Err(if not_rolled_back.is_empty() {
                failure
            } else {
                partial_failure(failure, &not_rolled_back)
            });
        }
    }
    for swap in &mut swaps {
        swap.discard_hidden(root);
    }
    Ok(())
}

/// Writes new content under a hidden name in its directory, or in an ancestor while that directory
/// can't be created.
fn stage<'a>(
    root: &ConfinedRoot,
    swap: &mut Swap<'a>,
    file: &File,
    created: &mut Vec<(&'a Location, usize)>,
) -> Result<(), Errno> {
    let location = swap.location;
    let parts = location.parts();
    let mut directory = root.make_real_directory(
        &parts[..swap.staged_depth],
        Mode::from_raw_mode(0o755),
        |count| created.push((location, count)),
    );
    while matches!(directory, Err(Errno::NOTDIR | Errno::XDEV | Errno::NOENT))
        && swap.staged_depth > 0
    {
        swap.staged_depth -= 1;
        directory = root.real_directory(&parts[..swap.staged_depth]);
    }
    let directory = directory?;
    match file.kind {
        Kind::Symlink => {
            let (hidden, ()) =
                with_hidden_name(|hidden| symlinkat(file.bytes.as_slice(), &directory, hidden))?;
            swap.hidden = Some(hidden);
        }
        Kind::Regular(mode) => {
            let mut staged = StagedFile::named(directory)?;
            staged
                .file()
                .write_all(&file.bytes)
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            fchmod(staged.file(), Mode::from_raw_mode(mode))?;
            swap.hidden = staged.keep();
        }
    }
    Ok(())
}

/// Deletes hidden files and unused new directories.
fn clean_up(root: &ConfinedRoot, swaps: &mut [Swap<'_>], created: &[(&Location, usize)]) {
    for swap in swaps {
        swap.discard_hidden(root);
    }
    for (location, count) in created.iter().rev() {
        remove_directory(root, location, *count);
    }
}

fn remove_directory(root: &ConfinedRoot, location: &Location, count: usize) {
    let parts = location.parts();
    if let Some((name, parents)) = parts[..count].split_last()
        && let Ok(directory) = root.real_directory(parents)
    {
        // It stays if another process added a file meanwhile.
        let _gone = unlinkat(directory, *name, AtFlags::REMOVEDIR);
    }
}

fn unchanged_failure(errno: Errno, doing: &str, location: &Location) -> Failure {
    match Failure::system(errno, doing, location.as_bytes()) {
        Failure::Refused(error) => Failure::Refused(AgentError {
            message: format!("{}; nothing was changed", error.message),
            ..error
        }),
        gone @ Failure::Connection(_) => gone,
    }
}

fn partial_failure(failure: Failure, not_rolled_back: &[String]) -> Failure {
    let reason = match failure {
        Failure::Refused(error) => error.message,
        Failure::Connection(error) => error.to_string(),
    };
    Failure::new(
        ErrorCode::Internal,
        format!(
            "{reason}; the changes to {} could not be rolled back",
            not_rolled_back.join(", ")
        ),
    )
}

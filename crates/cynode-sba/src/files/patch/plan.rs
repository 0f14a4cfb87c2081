//! Working out what a diff makes of the workspace, without touching it.
//!
//! Sections apply in order to a picture of the files; the picture is read from disk as it is needed. Renames and copies
//! take what was on disk, as git means them: their sources may be changed by other sections of the same diff.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    os::fd::OwnedFd,
};

use cynode_api::{Base64Bytes, ErrorCode, PatchOperation, PatchedFile};
use rustix::{
    fs::{Access, AtFlags, FileType as Kind, Mode, OFlags, Stat, accessat, fstat, openat, statat},
    io::Errno,
};

use super::{
    super::{
        confined::{self, Confined},
        digest,
        error::{Failure, Outcome},
        path,
    },
    Rejects,
    hunks::{self, Effort},
    parse::{Change, Hunk, Section},
};

/// Largest file that a diff may touch.
const MAX_FILE_BYTES: u64 = 32 * 1024 * 1024;
/// All contents that a diff makes, together.
const MAX_TOTAL_BYTES: usize = 128 * 1024 * 1024;
/// All contents that sections are applied to, one after the other.
const MAX_WORKED_BYTES: u64 = 1024 * 1024 * 1024;

/// A file's real path below the root, in parts.
pub(super) type Key = Vec<Vec<u8>>;

#[derive(Clone, Debug)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    pub(super) mode: u32,
}

/// A file in the picture.
#[derive(Debug)]
pub(super) struct Entry {
    /// What is on disk.
    pub(super) stat: Option<Stat>,
    pub(super) now: Option<Content>,
    /// The diff has given it a content.
    pub(super) written: bool,
    /// Something about it differs from the disk.
    pub(super) changed: bool,
}

pub(super) struct Plan<'a> {
    root: &'a Confined,
    pub(super) entries: BTreeMap<Key, Entry>,
    pub(super) files: Vec<PatchedFile>,
    pub(super) rejects: Rejects,
    /// Files that the diff renames or deletes, so that others may take their names.
    leaving: BTreeSet<Vec<u8>>,
    bytes: usize,
    worked: u64,
    effort: Effort,
}

/// Why a section as a whole can't be applied.
struct Reject(Vec<u8>, String);

enum Stop {
    Reject(Reject),
    Failure(Failure),
}

type Step<T> = Result<T, Stop>;

fn reject<T>(path: &[u8], reason: impl Into<String>) -> Step<T> {
    Err(Stop::Reject(Reject(path.to_vec(), reason.into())))
}

impl<'a> Plan<'a> {
    pub(super) fn new(root: &'a Confined, sections: &[Section<'_>]) -> Self {
        let leaves = |section: &&Section<'_>| matches!(section.change, Change::Rename | Change::Delete);
        let leaving = sections.iter().filter(leaves).filter_map(|section| section.old.clone()).collect();
        Self { root, entries: BTreeMap::new(), files: Vec::new(), rejects: Rejects::default(), leaving, bytes: 0, worked: 0, effort: Effort::default() }
    }

    /// Adds a section to the picture, or what keeps it out to the rejects.
    pub(super) fn add(&mut self, section: &Section<'_>) -> Outcome<()> {
        match self.apply(section) {
            Ok(()) => Ok(()),
            Err(Stop::Reject(Reject(path, reason))) => {
                self.rejects.push(&path, None, None, reason);
                Ok(())
            }
            Err(Stop::Failure(failure)) => Err(failure),
        }
    }

    fn apply(&mut self, section: &Section<'_>) -> Step<()> {
        let named = section.new.as_deref().or(section.old.as_deref()).unwrap_or_default();
        for mode in [section.old_mode, section.new_mode].into_iter().flatten() {
            match mode & 0o170_000 {
                0o100_000 => {}
                0o120_000 => return reject(named, "symbolic links (mode 120000) are not changed by patches"),
                0o160_000 => return reject(named, "submodules (mode 160000) are not changed by patches"),
                _ => return reject(named, format!("the mode {mode:o} is not one of a regular file")),
            }
        }
        if section.binary {
            return reject(named, "binary changes can't be applied; write the file instead");
        }
        match section.change {
            Change::Create => self.create(section, named),
            Change::Modify => self.modify(section),
            Change::Delete => self.delete(section, named),
            Change::Rename | Change::Copy => self.carry(section),
        }
    }

    fn create(&mut self, section: &Section<'_>, name: &[u8]) -> Step<()> {
        let key = self.look_up(name)?;
        if self.entries.get(&key).is_some_and(|entry| entry.now.is_some()) {
            return reject(name, "the file already exists");
        }
        let Some(bytes) = self.changed(name, b"", &section.hunks, section.crlf)? else { return Ok(()) };
        let after = digest::of(&bytes);
        let mode = if section.new_mode.is_some_and(|mode| mode & 0o111 != 0) { 0o755 } else { 0o644 };
        self.set(&key, Some(Content { bytes, mode }))?;
        self.record(name, PatchOperation::Create, None, Some(after), None);
        Ok(())
    }

    fn modify(&mut self, section: &Section<'_>) -> Step<()> {
        let mut candidates: Vec<&[u8]> = section.new.iter().chain(&section.old).map(Vec::as_slice).collect();
        candidates.dedup();
        let mut found = None;
        for candidate in &candidates {
            let key = self.look_up(candidate)?;
            if self.entries.get(&key).is_some_and(|entry| entry.now.is_some()) {
                found = Some((*candidate, key));
                break;
            }
        }
        let name = candidates.first().copied().unwrap_or_default();
        let Some((name, key)) = found else {
            // Many write a creation without naming /dev/null.
            if matches!(section.hunks.as_slice(), [hunk] if hunk.old_start == 0 && hunk.old_count == 0) {
                return self.create(section, name);
            }
            return reject(name, "no such file");
        };
        let Some(Content { bytes: old, mode }) = self.entries.get(&key).and_then(|entry| entry.now.clone()) else { return reject(name, "no such file") };
        let Some(bytes) = self.changed(name, &old, &section.hunks, section.crlf)? else { return Ok(()) };
        let (before, after) = (digest::of(&old), digest::of(&bytes));
        self.set(&key, Some(Content { bytes, mode: new_mode(mode, section.new_mode) }))?;
        self.record(name, PatchOperation::Modify, Some(before), Some(after), None);
        Ok(())
    }

    fn delete(&mut self, section: &Section<'_>, name: &[u8]) -> Step<()> {
        let key = self.look_up(name)?;
        let Some(old) = self.entries.get(&key).and_then(|entry| entry.now.clone()) else { return reject(name, "no such file") };
        let Some(left) = self.changed(name, &old.bytes, &section.hunks, section.crlf)? else { return Ok(()) };
        if !left.is_empty() {
            return reject(name, "the file has content that the diff does not delete");
        }
        self.set(&key, None)?;
        self.record(name, PatchOperation::Delete, Some(digest::of(&old.bytes)), None, None);
        Ok(())
    }

    /// A rename or a copy.
    fn carry(&mut self, section: &Section<'_>) -> Step<()> {
        let (from, to) = (section.old.as_deref().unwrap_or_default(), section.new.as_deref().unwrap_or_default());
        let (source, target) = (self.look_up(from)?, self.look_up(to)?);
        let Some(Content { bytes: old, mode }) = self.on_disk(&source, from)? else { return reject(from, "no such file") };
        let taken = self.entries.get(&target).is_some_and(|entry| entry.now.is_some() && (entry.written || !self.leaving.contains(to)));
        if taken && source != target {
            return reject(to, "the file already exists");
        }
        let Some(bytes) = self.changed(to, &old, &section.hunks, section.crlf)? else { return Ok(()) };
        let (before, after) = (digest::of(&old), digest::of(&bytes));
        let operation = if section.change == Change::Rename { PatchOperation::Rename } else { PatchOperation::Copy };
        if section.change == Change::Rename && source != target && self.entries.get(&source).is_some_and(|entry| !entry.written) {
            self.set(&source, None)?;
        }
        self.set(&target, Some(Content { bytes, mode: new_mode(mode, section.new_mode) }))?;
        self.record(to, operation, Some(before), Some(after), Some(from));
        Ok(())
    }

    /// The content after the hunks; `None` when some were rejected.
    fn changed(&mut self, name: &[u8], old: &[u8], hunks: &[Hunk<'_>], crlf: bool) -> Step<Option<Vec<u8>>> {
        self.worked += old.len() as u64;
        if self.worked > MAX_WORKED_BYTES {
            let message = "the diff changes large files too often; split it. Nothing was changed";
            return Err(Stop::Failure(Failure::new(ErrorCode::TooLarge, message)));
        }
        // In a converted diff a new file has no carriage returns of its own; an old file shows whether it has.
        let first = hunks::apply(old, hunks, crlf && old.is_empty(), &mut self.effort);
        let result = if crlf && first.is_err() { hunks::apply(old, hunks, true, &mut self.effort).or(first) } else { first };
        match result {
            Ok(bytes) => Ok(Some(bytes)),
            Err(misses) => {
                for miss in misses {
                    self.rejects.push(name, Some(miss.hunk), Some(miss.line), miss.reason);
                }
                Ok(None)
            }
        }
    }

    fn set(&mut self, key: &Key, content: Option<Content>) -> Step<()> {
        let Some(entry) = self.entries.get_mut(key) else { return Ok(()) };
        self.bytes -= entry.now.as_ref().map_or(0, |content| content.bytes.len());
        self.bytes += content.as_ref().map_or(0, |content| content.bytes.len());
        entry.written = content.is_some();
        entry.changed = true;
        entry.now = content;
        self.check_size()
    }

    fn check_size(&self) -> Step<()> {
        if self.bytes <= MAX_TOTAL_BYTES {
            return Ok(());
        }
        let message = format!("the files that the diff touches have more than {MAX_TOTAL_BYTES} bytes together; nothing was changed");
        Err(Stop::Failure(Failure::new(ErrorCode::TooLarge, message)))
    }

    fn record(&mut self, path: &[u8], operation: PatchOperation, sha256_before: Option<String>, sha256_after: Option<String>, from: Option<&[u8]>) {
        let text = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
        let bytes = |path: &[u8]| std::str::from_utf8(path).is_err().then(|| Base64Bytes(path.to_vec()));
        let (path, path_b64, from, from_b64) = (text(path), bytes(path), from.map(text), from.and_then(bytes));
        self.files.push(PatchedFile { path, path_b64, operation, sha256_before, sha256_after, from, from_b64 });
    }

    /// Checks a name and brings the file into the picture, if it exists.
    fn look_up(&mut self, name: &[u8]) -> Step<Key> {
        let (directory, key) = self.locate(name)?;
        if !self.entries.contains_key(&key) {
            let found = match &directory {
                Some(directory) => load(directory, name, key.last().map_or(&b""[..], Vec::as_slice))?,
                None => None,
            };
            let (stat, now) = found.map_or((None, None), |(stat, content)| (Some(stat), Some(content)));
            self.bytes += now.as_ref().map_or(0, |content| content.bytes.len());
            self.entries.insert(key.clone(), Entry { stat, now, written: false, changed: false });
            self.check_size()?;
        }
        Ok(key)
    }

    /// The content before the diff, which the picture may have lost by now.
    fn on_disk(&mut self, key: &Key, name: &[u8]) -> Step<Option<Content>> {
        let Some(entry) = self.entries.get(key) else { return Ok(None) };
        if !entry.changed || entry.stat.is_none() {
            return Ok(entry.now.clone());
        }
        match self.locate(name)?.0 {
            Some(directory) => Ok(load(&directory, name, key.last().map_or(&b""[..], Vec::as_slice))?.map(|(_, content)| content)),
            None => Ok(None),
        }
    }

    /// The directory of a name, when it exists, and the file's real path.
    fn locate(&self, name: &[u8]) -> Step<(Option<OwnedFd>, Key)> {
        let parts = match confined::parts(name) {
            Ok(parts) => parts,
            Err(reason) => return reject(name, reason),
        };
        if name.ends_with(b"/") {
            return reject(name, "the path names a directory");
        }
        let parents = parts.len() - 1;
        for depth in (0..=parents).rev() {
            let directory = match self.root.directory(&parts[..depth]) {
                Ok(directory) => directory,
                Err(Errno::NOENT) if depth > 0 => continue,
                Err(Errno::XDEV) => return reject(name, "the path passes through a symbolic link that leads outside of the workspace"),
                Err(Errno::NOTDIR) => return reject(name, "a part of the path is not a directory"),
                Err(errno) => return Err(Stop::Failure(Failure::system(errno, "opening the directory of", name))),
            };
            let mut key = self.root.real_parts(&directory).unwrap_or_else(|| parts[..depth].iter().map(|part| part.to_vec()).collect());
            key.extend(parts[depth..].iter().map(|part| part.to_vec()));
            if key.iter().any(|part| part.eq_ignore_ascii_case(b".git")) {
                return reject(name, "the path lies in a .git directory");
            }
            return Ok(((depth == parents).then_some(directory), key));
        }
        reject(name, "the path is empty")
    }
}

/// Reads a regular file.
fn load(directory: &OwnedFd, name: &[u8], last: &[u8]) -> Step<Option<(Stat, Content)>> {
    let failure = |errno| Stop::Failure(Failure::system(errno, "reading", name));
    let stat = match statat(directory, last, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::NAMETOOLONG) => return reject(name, "a part of the path is too long"),
        Err(errno) => return Err(failure(errno)),
    };
    match Kind::from_raw_mode(stat.st_mode) {
        Kind::RegularFile => {}
        Kind::Symlink => return reject(name, "it is a symbolic link, which patches do not change"),
        Kind::Directory => return reject(name, "it is a directory"),
        _ => return reject(name, "it is not a regular file"),
    }
    if path::size(&stat) > MAX_FILE_BYTES {
        return reject(name, format!("the file has more than {MAX_FILE_BYTES} bytes"));
    }
    if accessat(directory, last, Access::READ_OK | Access::WRITE_OK, AtFlags::empty()).is_err() {
        return reject(name, "the sandbox's user may not read and write the file");
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = openat(directory, last, flags, Mode::empty()).map_err(failure)?;
    let stat = fstat(&file).map_err(failure)?;
    let mut bytes = Vec::new();
    let read = std::fs::File::from(file).take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| Stop::Failure(Failure::io(&error, "reading", name)))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return reject(name, format!("the file has more than {MAX_FILE_BYTES} bytes"));
    }
    let mode = path::permissions(&stat) & 0o1777;
    Ok(Some((stat, Content { bytes, mode })))
}

/// Only whether a file can be executed is in a diff; the rest of its permissions stays.
const fn new_mode(old: u32, new: Option<u32>) -> u32 {
    match new {
        Some(new) if new & 0o111 != 0 => old | ((old & 0o444) >> 2),
        Some(_) => old & !0o111,
        None => old,
    }
}

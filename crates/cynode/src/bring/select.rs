//! Selects the entries of a directory to upload, by names, types and sizes, without reading
//! contents.

use std::{
    collections::BTreeSet,
    io::{self, Read as _},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use cynode_policy::{Scanner, local_directory, local_file};

use super::{Skipped, too_large};
use crate::{archive, failure::Failure, output, session::transfer::local_failure};

/// Size limit of a `.git` file, which contains one path.
const MAX_POINTER_BYTES: u64 = 8 * 1024;
/// Size of the end of a tar archive.
const END_BYTES: u64 = 1_024;

/// Limits of one upload.
#[derive(Clone, Copy, Debug)]
pub(super) struct UploadLimits {
    pub(super) entries: usize,
    /// Size of the archive.
    pub(super) bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Directory,
    File,
    /// A symbolic link with its target.
    Link(PathBuf),
}

/// The selected entries in the order of the archive: directories before their contents.
#[derive(Debug)]
pub(super) struct Selection {
    pub(super) root: PathBuf,
    pub(super) entries: Vec<(PathBuf, Kind)>,
    /// The approximate size of the archive.
    pub(super) archive_bytes: u64,
    pub(super) skipped: Vec<Skipped>,
    bounds: UploadLimits,
}

impl Selection {
    /// Selects all entries below `root`, or only those in `listed`.
    pub(super) fn new(
        root: &Path,
        listed: Option<BTreeSet<PathBuf>>,
        scanner: &Scanner,
        bounds: UploadLimits,
    ) -> Result<Self, Failure> {
        let mut selection = Self {
            root: root.to_owned(),
            entries: Vec::new(),
            archive_bytes: END_BYTES,
            skipped: Vec::new(),
            bounds,
        };
        match listed {
            None => selection.add_below(PathBuf::new(), scanner)?,
            Some(listed) => selection.add_listed(listed, scanner)?,
        }
        selection
            .entries
            .sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(selection)
    }

    /// Adds all entries below a directory. Iterative, because a deep tree must not overflow the
    /// stack.
    fn add_below(&mut self, directory: PathBuf, scanner: &Scanner) -> Result<(), Failure> {
        let mut directories = vec![directory];
        while let Some(relative) = directories.pop() {
            let entries = match fs_err::read_dir(self.root.join(&relative)) {
                Ok(entries) => entries,
                // An unreadable directory is skipped, and the upload continues.
                Err(error) if !relative.as_os_str().is_empty() => {
                    self.skip_unreadable(&relative, &error);
                    continue;
                }
                Err(error) => return Err(local_failure(&error)),
            };
            for entry in entries {
                let entry = entry.map_err(|error| local_failure(&error))?;
                let path = relative.join(entry.file_name());
                if self.add(&path, scanner)? == Some(Kind::Directory) {
                    directories.push(path);
                }
            }
        }
        Ok(())
    }

    /// Adds the listed entries and their parent directories.
    fn add_listed(&mut self, listed: BTreeSet<PathBuf>, scanner: &Scanner) -> Result<(), Failure> {
        let mut parents = BTreeSet::new();
        for path in listed {
            let above = path.ancestors().skip(1);
            for parent in above.filter(|parent| !parent.as_os_str().is_empty()) {
                if parents.insert(parent.to_owned()) {
                    self.add(parent, scanner)?;
                }
            }
            let is_git = path.file_name().is_some_and(|name| name == ".git");
            if self.add(&path, scanner)? == Some(Kind::Directory) && is_git {
                self.add_below(path, scanner)?;
            }
        }
        Ok(())
    }

    /// Adds one entry, or skips it. Returns its kind if it was added.
    fn add(&mut self, path: &Path, scanner: &Scanner) -> Result<Option<Kind>, Failure> {
        let full_path = self.root.join(path);
        let metadata = match fs_err::symlink_metadata(&full_path) {
            Ok(metadata) => metadata,
            // The entry was deleted since it was listed, or git lists it although it is deleted.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                self.skip_unreadable(path, &error);
                return Ok(None);
            }
        };
        let mut size = 0;
        let kind = if metadata.is_dir() {
            Kind::Directory
        } else if metadata.is_file() {
            size = metadata.len();
            Kind::File
        } else if metadata.is_symlink() {
            match fs_err::read_link(&full_path) {
                Ok(target) => Kind::Link(target),
                Err(error) => {
                    self.skip_unreadable(path, &error);
                    return Ok(None);
                }
            }
        } else {
            // git's file system monitor has a socket in `.git`.
            if !is_in_git_directory(path) {
                self.skip(path, "it is not a file, directory or link");
            }
            return Ok(None);
        };
        if let Some(skipped) = self.reason_to_skip(path, &kind, scanner) {
            self.skipped.push(skipped);
            return Ok(None);
        }
        self.archive_bytes += archive::entry_bytes(size);
        self.entries.push((path.to_owned(), kind.clone()));
        self.check_bounds()?;
        Ok(Some(kind))
    }

    fn check_bounds(&self) -> Result<(), Failure> {
        let UploadLimits { entries, bytes } = self.bounds;
        let directory = self.root.display();
        if self.entries.len() > entries {
            return Err(too_large(format!(
                "{directory} has more than {entries} files, directories and links"
            )));
        }
        if self.archive_bytes > bytes {
            return Err(too_large(format!(
                "the files in {directory} take more than {}",
                output::size(bytes)
            )));
        }
        Ok(())
    }

    /// The reason to skip an entry because of its name, if any.
    fn reason_to_skip(&self, path: &Path, kind: &Kind, scanner: &Scanner) -> Option<Skipped> {
        // The gate would refuse the whole archive because of such a name, so the name is not shown
        // either.
        let in_name = |bytes: &[u8]| scanner.find(bytes).map(|hit| hit.what);
        if let Some(what) = in_name(path.as_os_str().as_bytes()) {
            let parent = path.parent().unwrap_or(Path::new(""));
            return Some(Skipped::new(
                &parent.join("(name)"),
                format!("its name contains what looks like {what}"),
            ));
        }
        let full_path = self.root.join(path);
        let text = full_path.to_string_lossy();
        let reason = match kind {
            Kind::Directory => local_directory(&text).map(|what| format!("it is {what}")),
            Kind::Link(target) => in_name(target.as_os_str().as_bytes())
                .map(|what| format!("its target contains what looks like {what}")),
            Kind::File => local_file(&text)
                .map(|what| format!("it is {what}"))
                .or_else(|| self.leads_outside(path)),
        };
        reason.map(|reason| Skipped::new(path, reason))
    }

    /// Returns whether this is a `.git` file that names a repository elsewhere, as in a linked
    /// worktree. git in the sandbox would fail on it.
    fn leads_outside(&self, path: &Path) -> Option<String> {
        if path.file_name()? != ".git" {
            return None;
        }
        let full_path = self.root.join(path);
        let mut text = Vec::new();
        let file = fs_err::File::open(&full_path).ok()?;
        file.take(MAX_POINTER_BYTES).read_to_end(&mut text).ok()?;
        let target = text.strip_prefix(b"gitdir:")?.trim_ascii();
        let target = Path::new(std::ffi::OsStr::from_bytes(target));
        let target = fs_err::canonicalize(full_path.parent()?.join(target)).ok();
        let is_inside = target.is_some_and(|target| target.starts_with(&self.root));
        (!is_inside).then(|| "it names a repository outside of the directory".to_owned())
    }

    fn skip(&mut self, path: &Path, reason: &str) {
        self.skipped.push(Skipped::new(path, reason));
    }

    fn skip_unreadable(&mut self, path: &Path, error: &io::Error) {
        self.skipped.push(unreadable(path, error));
    }
}

pub(super) fn unreadable(path: &Path, error: &io::Error) -> Skipped {
    Skipped::new(path, format!("it can't be read ({})", error.kind()))
}

fn is_in_git_directory(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == ".git")
}

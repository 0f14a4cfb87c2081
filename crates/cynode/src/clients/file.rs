//! A client's configuration file on disk.
//!
//! Invariants: no symbolic link is followed, neither in the place of the file nor, in a project,
//! on the way to it: a project may come from somebody else. The file is replaced as a whole, keeps
//! its mode, and is left alone if it changed since it was read.

use std::{
    io::{self, Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, open};

use crate::{failure::Failure, staged::StagedFile};

/// The largest file that is edited.
const MAX_CONFIG_BYTES: u64 = 16 * 1024 * 1024;
const BYTE_ORDER_MARK: &str = "\u{feff}";

/// Why a file is left alone.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{} is a symbolic link to {}", .0.display(), .1.display())]
    Link(PathBuf, PathBuf),
    #[error("{} is not a {}", .0.display(), .1)]
    Kind(PathBuf, &'static str),
    #[error("{} belongs to another user", .0.display())]
    Owner(PathBuf),
    #[error("{} is longer than {MAX_CONFIG_BYTES} bytes", .0.display())]
    TooLong(PathBuf),
    #[error("{} is not UTF-8 text", .0.display())]
    NotText(PathBuf),
    #[error("{} changed meanwhile", .0.display())]
    Changed(PathBuf),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Staging(String),
}

impl From<Failure> for FileError {
    fn from(failure: Failure) -> Self {
        Self::Staging(failure.message().to_owned())
    }
}

#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    original: Option<Original>,
}

#[derive(Debug, PartialEq, Eq)]
struct Original {
    text: String,
    has_mark: bool,
    mode: u32,
}

impl ConfigFile {
    /// Reads a file, which need not exist. `project` is the directory that it belongs to.
    pub fn open(path: &Path, project: Option<&Path>) -> Result<Self, FileError> {
        if let Some(project) = project {
            check_way(project, path)?;
        }
        Ok(Self {
            path: path.to_owned(),
            original: read(path)?,
        })
    }

    pub fn text(&self) -> Option<&str> {
        self.original
            .as_ref()
            .map(|original| original.text.as_str())
    }

    /// Replaces the file. Returns the directories that had to be made for it.
    pub fn write(&self, text: &str, is_secret: bool) -> Result<Vec<PathBuf>, FileError> {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let missing = directory.ancestors().take_while(|path| !path.exists());
        let made: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        fs_err::create_dir_all(directory)?;
        let mode = if is_secret { 0o600 } else { 0o644 };
        let (staged, mut file) = StagedFile::create(&self.path, mode)?;
        if let Some(original) = &self.original {
            file.set_permissions(std::fs::Permissions::from_mode(original.mode))?;
            if original.has_mark {
                file.write_all(BYTE_ORDER_MARK.as_bytes())?;
            }
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        self.check_unchanged()?;
        staged.commit()?;
        Ok(made)
    }

    /// Removes the file, and these directories if nothing is left in them.
    pub fn remove(&self, directories: &[PathBuf]) -> Result<(), FileError> {
        self.check_unchanged()?;
        fs_err::remove_file(&self.path)?;
        for directory in directories {
            if fs_err::remove_dir(directory).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn check_unchanged(&self) -> Result<(), FileError> {
        if read(&self.path)? == self.original {
            Ok(())
        } else {
            Err(FileError::Changed(self.path.clone()))
        }
    }
}

/// The directories between a project and a file in it must be directories.
fn check_way(project: &Path, path: &Path) -> Result<(), FileError> {
    let parent = path.parent().unwrap_or(project);
    for directory in parent.ancestors().take_while(|path| *path != project) {
        match fs_err::symlink_metadata(directory) {
            Ok(found) if found.is_symlink() => {
                return Err(link(directory));
            }
            Ok(found) if !found.is_dir() => {
                return Err(FileError::Kind(directory.to_owned(), "directory"));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

fn link(path: &Path) -> FileError {
    let target = fs_err::read_link(path).unwrap_or_default();
    FileError::Link(path.to_owned(), target)
}

fn read(path: &Path) -> Result<Option<Original>, FileError> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match open(path, flags, Mode::empty()) {
        Ok(file) => std::fs::File::from(file),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(rustix::io::Errno::LOOP) => return Err(link(path)),
        Err(error) => {
            let error = io::Error::from(error);
            let text = format!("{}: {error}", path.display());
            return Err(io::Error::new(error.kind(), text).into());
        }
    };
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(FileError::Kind(path.to_owned(), "file"));
    }
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Err(FileError::Owner(path.to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_CONFIG_BYTES {
        return Err(FileError::TooLong(path.to_owned()));
    }
    let text = String::from_utf8(bytes).map_err(|_| FileError::NotText(path.to_owned()))?;
    let (has_mark, text) = match text.strip_prefix(BYTE_ORDER_MARK) {
        Some(text) => (true, text.to_owned()),
        None => (false, text),
    };
    Ok(Some(Original {
        text,
        has_mark,
        mode: found.permissions().mode() & 0o7777,
    }))
}

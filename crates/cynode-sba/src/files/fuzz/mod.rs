//! Fuzz targets of the file operations; see [`crate::fuzz`].

mod archives;
mod patches;
mod paths;
mod searches;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileTypeExt as _, MetadataExt as _, symlink},
    },
    path::{Path, PathBuf},
};

pub use self::{
    archives::archives,
    patches::{forms, patches},
    paths::paths,
    searches::searches,
};
pub use super::patch::fuzz::diffs;
use super::path::Files;

/// A workspace, with files outside of it that must not change.
struct FuzzWorkspace {
    directory: tempfile::TempDir,
    files: Files,
}

/// Files by path: type and permissions, then a file's content or a link's target.
type Tree = BTreeMap<PathBuf, (u32, Vec<u8>)>;

impl FuzzWorkspace {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("temp dir");
        // The temporary directory may be behind a link, and the tests compare real paths.
        let place = fs::canonicalize(directory.path()).expect("a place");
        fs::create_dir(place.join("outside")).expect("made");
        fs::write(place.join("outside/secret"), "secret\n").expect("written");
        let root = place.join("workspace");
        fs::create_dir(&root).expect("made");
        Self {
            directory,
            files: Files::new(root),
        }
    }

    fn root(&self) -> &Path {
        &self.files.root
    }

    fn put(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("parents");
        fs::write(path, content).expect("written");
    }

    fn link(&self, path: &str, target: impl AsRef<Path>) {
        symlink(target, self.root().join(path)).expect("linked");
    }

    /// The content of the workspace.
    fn inside(&self) -> Tree {
        tree(self.root(), None)
    }

    /// Asserts that nothing outside the workspace was created or changed.
    fn assert_outside_is_untouched(&self) {
        let names: Vec<PathBuf> = tree(self.directory.path(), Some(self.root()))
            .into_keys()
            .collect();
        assert_eq!(
            names,
            [
                Path::new("outside"),
                Path::new("outside/secret"),
                Path::new("workspace")
            ]
        );
        assert_eq!(
            fs::read(self.directory.path().join("outside/secret")).expect("read"),
            b"secret\n"
        );
    }
}

/// All files below a directory by relative path, without following links and without the content of
/// `except`.
fn tree(top: &Path, except: Option<&Path>) -> Tree {
    let mut found = Tree::new();
    let mut open = vec![top.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).expect("listed") {
            let path = entry.expect("entry").path();
            let metadata = fs::symlink_metadata(&path).expect("there");
            let kind = metadata.file_type();
            assert!(
                !kind.is_char_device() && !kind.is_block_device() && !kind.is_fifo(),
                "{} is a device",
                path.display()
            );
            let content = if kind.is_file() {
                fs::read(&path).expect("read")
            } else if kind.is_symlink() {
                fs::read_link(&path)
                    .expect("a target")
                    .as_os_str()
                    .as_bytes()
                    .to_vec()
            } else {
                Vec::new()
            };
            if kind.is_dir() && Some(path.as_path()) != except {
                open.push(path.clone());
            }
            found.insert(
                path.strip_prefix(top).expect("below").to_owned(),
                (metadata.mode(), content),
            );
        }
    }
    found
}

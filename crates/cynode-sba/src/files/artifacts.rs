//! Lists what a job left in its directory of artifacts.
//!
//! Invariant: links are neither followed nor listed, and what doesn't fit is left out. The list is
//! information for people: whoever stores the files hashes them again.

use std::{
    fs::File,
    io,
    path::Path,
    time::{Duration, Instant},
};

use cynode_api::{FileType, json_text_bytes, sba::limits::MAX_ARTIFACTS};
use cynode_sba_proto::Reply;
use rustix::fs::{CWD, FileType as Kind, Mode, OFlags, fstat, openat};
use serde::{Deserialize, Serialize};

use super::{
    digest, path,
    walk::{AtLimit, Entry, Step, walk},
};
use crate::peer::Peer;

/// Paths of all artifacts, as JSON.
const MAX_PATH_BYTES: usize = 1024 * 1024;
/// Bytes that are hashed.
const MAX_HASHED_BYTES: u64 = 1024 * 1024 * 1024;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Artifact {
    /// Relative to the directory.
    pub(crate) path: String,
    pub(crate) size: u64,
    /// Absent if there was no time to hash the file.
    pub(crate) sha256: Option<String>,
}

/// Sends the list of regular files below a directory.
pub(crate) fn serve_artifacts(directory: &Path, time: Duration, peer: &mut Peer) -> io::Result<()> {
    let artifacts = list(directory, Instant::now() + time);
    peer.reply(&Reply::Body)?;
    peer.data(&serde_json::to_vec(&artifacts)?)?;
    peer.end()
}

fn list(directory: &Path, deadline: Instant) -> Vec<Artifact> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(top) = openat(CWD, directory, flags, Mode::empty()) else {
        return Vec::new();
    };
    let mut listing = ArtifactListing {
        artifacts: Vec::new(),
        path_bytes: 0,
        unhashed: MAX_HASHED_BYTES,
        deadline,
    };
    // A walk that fails has found something already.
    let _complete = walk(top, Some(deadline), AtLimit::Skip, |entry| {
        Ok(listing.visit(entry))
    });
    let mut artifacts = listing.artifacts;
    artifacts.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    artifacts
}

struct ArtifactListing {
    artifacts: Vec<Artifact>,
    path_bytes: usize,
    /// How many more bytes may be hashed.
    unhashed: u64,
    deadline: Instant,
}

impl ArtifactListing {
    fn visit(&mut self, entry: &Entry<'_>) -> Step {
        match entry.kind {
            Kind::Directory => entry.open_directory().map_or(Step::Over, Step::Into),
            Kind::RegularFile => {
                let Some(artifact) = self.inspect(entry) else {
                    return Step::Over;
                };
                self.path_bytes += json_text_bytes(&artifact.path);
                if self.path_bytes > MAX_PATH_BYTES {
                    return Step::Stop;
                }
                self.artifacts.push(artifact);
                if self.artifacts.len() == MAX_ARTIFACTS {
                    Step::Stop
                } else {
                    Step::Over
                }
            }
            _ => Step::Over,
        }
    }

    fn inspect(&mut self, entry: &Entry<'_>) -> Option<Artifact> {
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = openat(entry.directory, entry.name, flags, Mode::empty()).ok()?;
        let stat = fstat(&file).ok()?;
        if path::kind(&stat) != FileType::File {
            return None;
        }
        let size = path::size(&stat);
        let sha256 = self.hash(&File::from(file), size);
        Some(Artifact {
            path: String::from_utf8_lossy(entry.path).into_owned(),
            size,
            sha256,
        })
    }

    fn hash(&mut self, file: &File, size: u64) -> Option<String> {
        self.unhashed = self.unhashed.checked_sub(size)?;
        let (mut hasher, mut count) = (digest::Hasher::default(), 0);
        digest::for_each_chunk(file, 0, size, |piece| {
            hasher.update(piece);
            count += piece.len() as u64;
            if Instant::now() < self.deadline {
                Ok(())
            } else {
                Err(io::Error::from(io::ErrorKind::TimedOut))
            }
        })
        .ok()?;
        (count == size).then(|| hasher.hex())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::{super::tests::*, *};

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn regular_files_are_listed_with_their_hashes_and_links_are_not() {
        let workspace = TestWorkspace::new();
        workspace.put("top/b", "hello");
        workspace.put("top/a/x", "");
        workspace.put("secret", "hello");
        workspace.fifo("top/fifo");
        symlink("../secret", workspace.path("top/link")).expect("link");
        symlink("..", workspace.path("top/up")).expect("link");
        let found = list(&workspace.path("top"), soon());
        let paths: Vec<&str> = found
            .iter()
            .map(|artifact| artifact.path.as_str())
            .collect();
        assert_eq!(paths, ["a/x", "b"]);
        assert_eq!(
            (found[1].size, found[1].sha256.as_deref()),
            (5, Some(HELLO))
        );
        symlink("top", workspace.path("artifacts")).expect("link");
        assert_eq!(list(&workspace.path("artifacts"), soon()), []);
        assert_eq!(list(&workspace.path("none"), soon()), []);
    }

    #[test]
    fn a_list_has_as_many_files_as_a_result_may_have() {
        let workspace = TestWorkspace::new();
        for number in 0..=MAX_ARTIFACTS {
            workspace.put(&format!("top/{number:05}"), "");
        }
        let found = list(&workspace.path("top"), soon());
        assert_eq!(found.len(), MAX_ARTIFACTS);
        assert_eq!(
            found[MAX_ARTIFACTS - 1].path,
            format!("{:05}", MAX_ARTIFACTS - 1)
        );
        std::fs::remove_file(workspace.path("top/00000")).expect("removed");
        assert_eq!(list(&workspace.path("top"), soon()).len(), MAX_ARTIFACTS);
    }

    #[test]
    fn files_that_would_take_too_long_are_listed_without_a_hash() {
        let workspace = TestWorkspace::new();
        workspace.put("top/huge", "");
        workspace.put("top/small", "hello");
        std::fs::OpenOptions::new()
            .write(true)
            .open(workspace.path("top/huge"))
            .and_then(|file| file.set_len(MAX_HASHED_BYTES + 1))
            .expect("sparse");
        let found = list(&workspace.path("top"), soon());
        assert_eq!(
            (found[0].size, &found[0].sha256),
            (MAX_HASHED_BYTES + 1, &None)
        );
        assert_eq!(found[1].sha256.as_deref(), Some(HELLO));
        let late = list(&workspace.path("top"), Instant::now());
        assert!(
            late.iter().all(|artifact| artifact.sha256.is_none()),
            "{late:?}"
        );
    }
}

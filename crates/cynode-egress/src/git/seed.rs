//! Builds a seed: the files of one commit and a `.git` of its own, as a tar.
//!
//! The files come from objects, never from a checkout, so no filter and no attribute has a say. The
//! `.git` has one pack of what the commit reaches, one branch and an index; no remote, no hook.
//!
//! Invariant: a seed contains nothing that its commit does not reach.

use std::{
    collections::{HashMap, HashSet},
    io,
    sync::Arc,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use cynode_api::{SeedNotes, egress_limits};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader},
    sync::{Semaphore, mpsc, oneshot},
};
use uuid::Uuid;

use super::{
    change::{ObjectId, UnexpectedOutput, tree_entries},
    command::{GitCommand, GitError, GitRunner as _},
    mirror::{MAX_LINES_BYTES, Mirrors, RepositoryAccess, RepositoryError},
    tar::{TarKind, TarStream},
};

/// The listing of a commit's files: about a million.
const MAX_LISTING_BYTES: u64 = 128 * 1024 * 1024;
/// Commits with their parents, when a depth is wanted: about a million.
const MAX_HISTORY_BYTES: u64 = 128 * 1024 * 1024;
/// Path or target that can be unpacked.
const MAX_PATH_BYTES: usize = 4_095;
/// Submodules, and LFS pointers, that the notes name.
const MAX_NOTED: usize = 20;
/// A name in the notes, in characters.
const MAX_NOTED_CHARACTERS: usize = 200;
/// Larger files are no LFS pointers, smaller ones neither.
const MAX_POINTER_BYTES: u64 = 1_024;
const MIN_POINTER_BYTES: u64 = 100;
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\n";
/// LFS candidates that are read. Beyond it, pointers are not looked for.
const MAX_CANDIDATE_BYTES: u64 = 64 * 1024 * 1024;
/// Seeds that are built and sent at once.
const MAX_CONCURRENT_SEEDS: usize = 4;
/// Pieces of an archive that wait for their reader.
const QUEUED_PIECES: usize = 8;

static SEEDS: Semaphore = Semaphore::const_new(MAX_CONCURRENT_SEEDS);

const SYMLINK: u32 = 0o120_000;
const EXECUTABLE: u32 = 0o100_755;
const GITLINK: u32 = 0o160_000;

const CONFIG: &[u8] = b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\
    \tlogallrefupdates = true\n";

/// What a seed is to contain.
#[derive(Clone, Debug)]
pub(crate) struct SeedRequest {
    pub(crate) commit: ObjectId,
    pub(crate) branch: String,
    pub(crate) depth: Option<u32>,
}

/// A seed whose archive is being sent. It ends with an error if it is not whole.
#[derive(Debug)]
pub(crate) struct Seed {
    pub(crate) notes: SeedNotes,
    pub(crate) pieces: mpsc::Receiver<io::Result<Bytes>>,
}

/// A file or a submodule of the commit.
#[derive(Debug)]
struct SeedFile {
    path: Vec<u8>,
    id: ObjectId,
    mode: u32,
    size: u64,
}

/// Everything that is known before the first byte is sent.
struct Plan {
    operation: String,
    files: Vec<SeedFile>,
    notes: SeedNotes,
    pack: String,
    shallow: Vec<ObjectId>,
    time: u64,
}

impl Mirrors {
    /// Builds a seed. Returns when everything is known that could refuse it.
    pub(crate) async fn seed(
        self: &Arc<Self>,
        access: &RepositoryAccess,
        request: SeedRequest,
    ) -> Result<Seed, RepositoryError> {
        let (planned, plan) = oneshot::channel();
        let (to, pieces) = mpsc::channel(QUEUED_PIECES);
        let (mirrors, access) = (Arc::clone(self), access.clone());
        // It cleans up after itself, even if the caller is gone.
        tokio::spawn(async move {
            let operation = format!("seed-{}", Uuid::new_v4().simple());
            match mirrors.plan(&access, &request, operation.clone()).await {
                Ok(plan) => {
                    if planned.send(Ok(plan.notes.clone())).is_ok()
                        && let Err(error) = mirrors.send(&access, &request, &plan, &to).await
                    {
                        tracing::warn!(%error, "Sending a seed failed.");
                        TarStream::fail(&to, io::Error::other("the seed is incomplete")).await;
                    }
                }
                Err(error) => drop(planned.send(Err(error))),
            }
            mirrors.runner.forget(&access.mirror, &operation).await;
        });
        let notes = plan.await.map_err(|_| {
            GitError::Unavailable("the building of the seed was abandoned".to_owned())
        })??;
        Ok(Seed { notes, pieces })
    }

    async fn plan(
        &self,
        access: &RepositoryAccess,
        request: &SeedRequest,
        operation: String,
    ) -> Result<Plan, RepositoryError> {
        self.fetch(access).await?;
        self.containing(&access.mirror, request.commit).await?;
        let files = self.files(access, request.commit).await?;
        let notes = self.notes(access, &files).await?;
        let shallow = self.boundary(access, request).await?;
        self.runner.scratch(&access.mirror, &operation).await?;
        let pack = self.pack(access, request, &shallow, &operation).await?;
        let index = GitCommand {
            index: Some(operation.clone()),
            ..self.command(
                ["read-tree".to_owned(), request.commit.to_string()],
                MAX_LINES_BYTES,
            )
        };
        self.runner.run(&access.mirror, index).await?;
        Ok(Plan {
            time: self.time_of(access, request.commit).await?,
            operation,
            files,
            notes,
            pack,
            shallow,
        })
    }

    async fn time_of(
        &self,
        access: &RepositoryAccess,
        commit: ObjectId,
    ) -> Result<u64, RepositoryError> {
        let name = commit.to_string();
        let show = self.command(
            [
                "show",
                "--no-patch",
                "--no-show-signature",
                "--format=%ct",
                &name,
            ],
            MAX_LINES_BYTES,
        );
        let output = self.runner.run(&access.mirror, show).await?;
        let text = String::from_utf8_lossy(&output.stdout);
        // Before 1970, or beyond what an archive can say: the time does not matter.
        let time = text.trim().parse().unwrap_or(0);
        Ok(if time > 0o77_777_777_777 { 0 } else { time })
    }

    /// The files of a commit, with their sizes.
    async fn files(
        &self,
        access: &RepositoryAccess,
        commit: ObjectId,
    ) -> Result<Vec<SeedFile>, RepositoryError> {
        let name = commit.to_string();
        let list = self.command(
            ["ls-tree", "-r", "-z", "--full-tree", &name],
            MAX_LISTING_BYTES,
        );
        let listing = self.runner.run(&access.mirror, list).await?.stdout;
        let entries = tree_entries(&listing)?;
        let mut ids = BytesMut::new();
        let mut known = HashSet::new();
        for entry in &entries {
            if let Err(problem) = check_path(&entry.path) {
                return Err(unusable(&entry.path, problem));
            }
            if entry.mode != GITLINK && known.insert(entry.id) {
                ids.put_slice(format!("{}\n", entry.id).as_bytes());
            }
        }
        let sizes = self.sizes(access, ids.freeze()).await?;
        let mut total = 0_u64;
        let mut files = Vec::with_capacity(entries.len());
        for entry in entries {
            let size = match sizes.get(&entry.id) {
                _ if entry.mode == GITLINK => 0,
                Some(size) => *size,
                None => return Err(UnexpectedOutput("no size of a blob").into()),
            };
            if entry.mode == SYMLINK && !(1..=MAX_PATH_BYTES as u64).contains(&size) {
                return Err(unusable(&entry.path, "is a link whose target is no path"));
            }
            total = total.saturating_add(size);
            files.push(SeedFile {
                path: entry.path,
                id: entry.id,
                mode: entry.mode,
                size,
            });
        }
        check_total(total)?;
        Ok(files)
    }

    async fn sizes(
        &self,
        access: &RepositoryAccess,
        ids: Bytes,
    ) -> Result<HashMap<ObjectId, u64>, RepositoryError> {
        let check = GitCommand {
            input: ids,
            ..self.command(
                [
                    "cat-file",
                    "--batch-check=%(objectname) %(objecttype) %(objectsize)",
                ],
                MAX_LISTING_BYTES,
            )
        };
        let output = self.runner.run(&access.mirror, check).await?;
        let text = std::str::from_utf8(&output.stdout)
            .map_err(|_| UnexpectedOutput("a size that is not text"))?;
        let mut sizes = HashMap::new();
        for line in text.lines() {
            let mut fields = line.split(' ');
            let (id, kind, size) = (fields.next(), fields.next(), fields.next());
            match (id.and_then(ObjectId::parse), kind, size.map(str::parse)) {
                (Some(id), Some("blob"), Some(Ok(size))) => sizes.insert(id, size),
                _ => return Err(UnexpectedOutput("that a blob is missing").into()),
            };
        }
        Ok(sizes)
    }

    /// What a seed does not contain.
    async fn notes(
        &self,
        access: &RepositoryAccess,
        files: &[SeedFile],
    ) -> Result<SeedNotes, RepositoryError> {
        let mut notes = SeedNotes::default();
        let mut candidates: HashMap<ObjectId, bool> = HashMap::new();
        for file in files {
            if file.mode == GITLINK {
                notes.submodules_total += 1;
                note(&mut notes.submodules, &file.path);
            } else if is_candidate(file) {
                candidates.insert(file.id, false);
            }
        }
        self.find_pointers(access, &mut candidates).await?;
        for file in files {
            if is_candidate(file) && candidates.get(&file.id) == Some(&true) {
                notes.lfs_files_total += 1;
                note(&mut notes.lfs_files, &file.path);
            }
        }
        Ok(notes)
    }

    /// Marks the blobs that are LFS pointers.
    async fn find_pointers(
        &self,
        access: &RepositoryAccess,
        candidates: &mut HashMap<ObjectId, bool>,
    ) -> Result<(), RepositoryError> {
        let most = usize::try_from(MAX_CANDIDATE_BYTES / MAX_POINTER_BYTES).unwrap_or(usize::MAX);
        if candidates.is_empty() || candidates.len() > most {
            return Ok(());
        }
        let ids: Vec<ObjectId> = candidates.keys().copied().collect();
        let mut blobs = self.blobs(access, &ids).await?;
        for id in ids {
            let size = blobs.next(id).await?;
            let mut content = vec![0; usize::try_from(size).unwrap_or(0)];
            blobs.read(&mut content).await?;
            candidates.insert(id, content.starts_with(POINTER));
        }
        Ok(())
    }

    /// The commits whose parents are left out at a depth.
    async fn boundary(
        &self,
        access: &RepositoryAccess,
        request: &SeedRequest,
    ) -> Result<Vec<ObjectId>, RepositoryError> {
        let Some(depth) = request.depth else {
            return Ok(Vec::new());
        };
        let name = request.commit.to_string();
        let mut args = vec!["rev-list", "--parents"];
        if depth <= 1 {
            args.push("--max-count=1");
        }
        args.extend([name.as_str(), "--"]);
        let list = self.command(args, MAX_HISTORY_BYTES);
        let output = match self.runner.run(&access.mirror, list).await {
            Err(GitError::TooMuchOutput { .. }) => {
                return Err(RepositoryError::TooLarge(
                    "the history is too long to be cut: use depth 1, or all of it".to_owned(),
                ));
            }
            other => other?,
        };
        let text = std::str::from_utf8(&output.stdout)
            .map_err(|_| UnexpectedOutput("a history that is not text"))?;
        boundary_of(text, request.commit, depth).map_err(RepositoryError::from)
    }

    /// Packs what the commit reaches. Returns the pack's name without its extension.
    async fn pack(
        &self,
        access: &RepositoryAccess,
        request: &SeedRequest,
        shallow: &[ObjectId],
        operation: &str,
    ) -> Result<String, RepositoryError> {
        let base = self.runner.scratch_path(&access.mirror, operation, "pack");
        let mut input = lines("--shallow ", shallow);
        input += &lines("", &[request.commit]);
        let mut args: Vec<std::ffi::OsString> = ["pack-objects", "--revs", "--quiet"]
            .iter()
            .map(Into::into)
            .collect();
        args.extend([
            "--delta-base-offset".into(),
            "--no-write-bitmap-index".into(),
        ]);
        if !shallow.is_empty() {
            args.push("--shallow".into());
        }
        args.push(base.into());
        let pack = GitCommand {
            input: input.into(),
            timeout: self.limits.transfer,
            ..self.command(args, MAX_LINES_BYTES)
        };
        let output = self.runner.run(&access.mirror, pack).await?;
        let name = String::from_utf8_lossy(&output.stdout);
        ObjectId::parse(name.trim())
            .map(|id| format!("pack-{id}"))
            .ok_or_else(|| UnexpectedOutput("no name of a pack").into())
    }

    async fn blobs(
        &self,
        access: &RepositoryAccess,
        ids: &[ObjectId],
    ) -> Result<BlobReader, RepositoryError> {
        let cat = GitCommand {
            input: lines("", ids).into(),
            timeout: self.limits.transfer,
            ..self.command(
                ["cat-file", "--batch", "--buffer"],
                2 * egress_limits::MAX_SEED_BYTES,
            )
        };
        let stream = self.runner.stream(&access.mirror, cat).await?;
        Ok(BlobReader {
            from: BufReader::with_capacity(128 * 1024, stream.stdout),
            _ended: stream.ended,
            has_content: false,
        })
    }

    /// Sends the archive.
    async fn send(
        &self,
        access: &RepositoryAccess,
        request: &SeedRequest,
        plan: &Plan,
        to: &mpsc::Sender<io::Result<Bytes>>,
    ) -> Result<(), RepositoryError> {
        let Ok(_permit) = SEEDS.acquire().await else {
            return Err(broken(io::ErrorKind::Other.into()));
        };
        let mut tar = TarStream::new(to.clone(), plan.time);
        self.send_git(access, request, plan, &mut tar).await?;
        let ids: Vec<ObjectId> = plan
            .files
            .iter()
            .filter(|file| file.mode != GITLINK)
            .map(|file| file.id)
            .collect();
        let mut blobs = self.blobs(access, &ids).await?;
        let mut directories = Directories::default();
        for file in &plan.files {
            directories.enter(&mut tar, &file.path).await?;
            if file.mode == GITLINK {
                // As a clone without submodules has it.
                tar.empty(TarKind::Directory, &file.path, b"")
                    .await
                    .map_err(broken)?;
                continue;
            }
            if blobs.next(file.id).await? != file.size {
                return Err(UnexpectedOutput("another size of a blob").into());
            }
            if file.mode == SYMLINK {
                let mut target = vec![0; usize::try_from(file.size).unwrap_or(0)];
                blobs.read(&mut target).await?;
                tar.empty(TarKind::Symlink, &file.path, &target)
                    .await
                    .map_err(broken)?;
                continue;
            }
            let kind = if file.mode == EXECUTABLE {
                TarKind::Executable
            } else {
                TarKind::File
            };
            tar.file(kind, &file.path, file.size, blobs.content())
                .await
                .map_err(broken)?;
        }
        tar.finish().await.map_err(broken)
    }

    async fn send_git(
        &self,
        access: &RepositoryAccess,
        request: &SeedRequest,
        plan: &Plan,
        tar: &mut TarStream,
    ) -> Result<(), RepositoryError> {
        let reference = format!("refs/heads/{}", request.branch);
        let mut directories = Directories::default();
        let (head, branch) = (
            format!("ref: {reference}\n"),
            format!("{}\n", request.commit),
        );
        let shallow = lines("", &plan.shallow);
        let mut files: Vec<(String, &[u8])> = vec![
            (".git/HEAD".to_owned(), head.as_bytes()),
            (".git/config".to_owned(), CONFIG),
            (format!(".git/{reference}"), branch.as_bytes()),
        ];
        if !shallow.is_empty() {
            files.push((".git/shallow".to_owned(), shallow.as_bytes()));
        }
        for (path, content) in files {
            directories.enter(tar, path.as_bytes()).await?;
            tar.bytes(path.as_bytes(), content).await.map_err(broken)?;
        }
        for directory in [".git/objects/info", ".git/refs/tags"] {
            directories.enter(tar, directory.as_bytes()).await?;
            tar.empty(TarKind::Directory, directory.as_bytes(), b"")
                .await
                .map_err(broken)?;
        }
        let parts = [
            ("index".to_owned(), ".git/index".to_owned()),
            (
                format!("{}.pack", plan.pack),
                format!(".git/objects/pack/{}.pack", plan.pack),
            ),
            (
                format!("{}.idx", plan.pack),
                format!(".git/objects/pack/{}.idx", plan.pack),
            ),
        ];
        for (name, path) in parts {
            let file = self
                .runner
                .read_scratch(&access.mirror, &plan.operation, &name)
                .await?;
            check_total(file.length)?;
            directories.enter(tar, path.as_bytes()).await?;
            tar.file(TarKind::File, path.as_bytes(), file.length, file.content)
                .await
                .map_err(broken)?;
        }
        Ok(())
    }
}

/// The reader of a seed is gone, or the runner's pipe broke.
fn broken(error: io::Error) -> RepositoryError {
    RepositoryError::Git(GitError::Unavailable(error.to_string()))
}

fn unusable(path: &[u8], problem: &str) -> RepositoryError {
    let path = String::from_utf8_lossy(path);
    let path: String = path.escape_debug().take(MAX_NOTED_CHARACTERS).collect();
    RepositoryError::Unusable(format!("'{path}' {problem}"))
}

fn check_total(bytes: u64) -> Result<(), RepositoryError> {
    if bytes > egress_limits::MAX_SEED_BYTES {
        return Err(RepositoryError::TooLarge(format!(
            "the seed would have more than {} bytes",
            egress_limits::MAX_SEED_BYTES
        )));
    }
    Ok(())
}

/// A line for each id.
fn lines(prefix: &str, ids: &[ObjectId]) -> String {
    let mut text = String::new();
    for id in ids {
        text += prefix;
        text += &id.to_string();
        text.push('\n');
    }
    text
}

fn is_candidate(file: &SeedFile) -> bool {
    !matches!(file.mode, GITLINK | SYMLINK)
        && (MIN_POINTER_BYTES..=MAX_POINTER_BYTES).contains(&file.size)
}

fn note(names: &mut Vec<String>, path: &[u8]) {
    if names.len() < MAX_NOTED {
        let name = String::from_utf8_lossy(path);
        names.push(name.chars().take(MAX_NOTED_CHARACTERS).collect());
    }
}

/// Names that would change the seed's own `.git` or leave its directory. git's checks of objects
/// refuse them too.
fn check_path(path: &[u8]) -> Result<(), &'static str> {
    if path.len() > MAX_PATH_BYTES {
        return Err("is longer than 4095 bytes");
    }
    let is_bad = |part: &[u8]| {
        part.is_empty() || part == b"." || part == b".." || part.eq_ignore_ascii_case(b".git")
    };
    if path.split(|byte| *byte == b'/').any(is_bad) {
        return Err("is no name of a file");
    }
    Ok(())
}

/// The commits at a depth that have parents. `history` is of `rev-list --parents`.
fn boundary_of(
    history: &str,
    commit: ObjectId,
    depth: u32,
) -> Result<Vec<ObjectId>, UnexpectedOutput> {
    let mut parents: HashMap<ObjectId, Vec<ObjectId>> = HashMap::new();
    for line in history.lines() {
        let mut ids = line.split(' ').map(ObjectId::parse);
        let id = ids
            .next()
            .flatten()
            .ok_or(UnexpectedOutput("an invalid line of a history"))?;
        let of: Option<Vec<ObjectId>> = ids.collect();
        parents.insert(id, of.ok_or(UnexpectedOutput("an invalid parent"))?);
    }
    let mut level = vec![commit];
    let mut seen: HashSet<ObjectId> = level.iter().copied().collect();
    for _ in 1..depth.max(1) {
        let next: Vec<ObjectId> = level
            .iter()
            .filter_map(|id| parents.get(id))
            .flatten()
            .copied()
            .filter(|id| seen.insert(*id))
            .collect();
        if next.is_empty() {
            return Ok(Vec::new());
        }
        level = next;
    }
    let mut boundary: Vec<ObjectId> = level
        .into_iter()
        .filter(|id| parents.get(id).is_some_and(|parents| !parents.is_empty()))
        .collect();
    boundary.sort_unstable();
    Ok(boundary)
}

/// Writes each directory before the first entry in it.
#[derive(Default)]
struct Directories {
    known: HashSet<Vec<u8>>,
}

impl Directories {
    async fn enter(&mut self, tar: &mut TarStream, path: &[u8]) -> Result<(), RepositoryError> {
        let ends = path
            .iter()
            .enumerate()
            .filter(|(_, byte)| **byte == b'/')
            .map(|(at, _)| at);
        for end in ends {
            if self.known.contains(&path[..end]) {
                continue;
            }
            self.known.insert(path[..end].to_vec());
            tar.empty(TarKind::Directory, &path[..end], b"")
                .await
                .map_err(broken)?;
        }
        Ok(())
    }
}

/// The output of `cat-file --batch`.
struct BlobReader {
    from: BufReader<Box<dyn AsyncRead + Send + Unpin>>,
    /// Dropping it ends git.
    _ended: oneshot::Receiver<Result<(), GitError>>,
    /// Whether a content was begun, whose line end is still to come.
    has_content: bool,
}

impl BlobReader {
    /// The size of the next blob, which must be this one.
    async fn next(&mut self, id: ObjectId) -> Result<u64, RepositoryError> {
        if self.has_content && self.from.read_u8().await.map_err(broken)? != b'\n' {
            return Err(UnexpectedOutput("a blob of another size").into());
        }
        self.has_content = true;
        let mut line = Vec::new();
        (&mut self.from)
            .take(200)
            .read_until(b'\n', &mut line)
            .await
            .map_err(broken)?;
        let text = std::str::from_utf8(&line).unwrap_or_default();
        let mut fields = text.trim_end().split(' ');
        match (
            fields.next().and_then(ObjectId::parse),
            fields.next(),
            fields.next().map(str::parse),
        ) {
            (Some(found), Some("blob"), Some(Ok(size))) if found == id => Ok(size),
            _ => Err(UnexpectedOutput("another blob than it was asked for").into()),
        }
    }

    async fn read(&mut self, content: &mut [u8]) -> Result<(), RepositoryError> {
        self.from
            .read_exact(content)
            .await
            .map(drop)
            .map_err(broken)
    }

    fn content(&mut self) -> &mut BufReader<Box<dyn AsyncRead + Send + Unpin>> {
        &mut self.from
    }
}

#[cfg(test)]
mod tests;

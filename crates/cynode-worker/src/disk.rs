//! A disk for each workspace: a sparse file with an ext4 file system, mounted through a loop
//! device.
//!
//! Invariant: a sandbox that fills its disk fills nothing else. The file system is formatted once
//! per size and then copied sparsely, which takes a tenth of the time. Nothing here reads what a
//! sandbox wrote.

use std::{
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::fs::SeekFrom as SparseSeek;
use tempfile::TempPath;

use crate::{journal::blocking, process};

/// Formatting, mounting and unmounting normally take milliseconds.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// `noinit_itable`: background zeroing of inode tables would fill the holes. `discard`: space freed
/// inside is also freed on the host.
const MOUNT_OPTIONS: &str = "loop,nosuid,nodev,noatime,noinit_itable,discard,errors=remount-ro";
/// Generous: interrupting the check or resize of a file system risks its data.
const GROW_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a loop device may take to release a file after its last unmount.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Extensions of a template, and of an image that is not complete yet.
const TEMPLATE: &str = "img";
const STAGED: &str = "new";
/// Size of the image that `probe` creates.
const PROBE_BYTES: u64 = 16 << 20;
/// Formatted images retained as templates.
const MAX_TEMPLATES: usize = 8;
/// Callers choose the sizes, and formatting takes processor time.
const MAX_CONCURRENT_FORMATS: usize = 2;

#[derive(Debug)]
pub(crate) struct Disks {
    templates: PathBuf,
    /// The size of most disks, whose template is never evicted.
    default_bytes: u64,
    /// A permit for each template that is being formatted.
    formats: tokio::sync::Semaphore,
}

impl Disks {
    /// `directory` holds the templates and is used by this process alone.
    pub(crate) fn new(directory: PathBuf, default_bytes: u64) -> Self {
        Self {
            templates: directory,
            default_bytes,
            formats: tokio::sync::Semaphore::new(MAX_CONCURRENT_FORMATS),
        }
    }

    /// Checks that disks can be created and mounted on this host, by doing so.
    pub(crate) async fn probe(&self) -> Result<(), String> {
        let directory = self
            .templates
            .join(format!(".probe-{}", uuid::Uuid::new_v4().simple()));
        let (image, target) = (directory.join("disk.img"), directory.join("mounted"));
        // Format anew each time: a leftover of an earlier probe proves nothing.
        drop(fs_err::remove_file(self.template_path(PROBE_BYTES)));
        // Left by a worker that was killed while formatting.
        for (_, unfinished) in self.files(STAGED) {
            drop(fs_err::remove_file(unfinished));
        }
        let attempt = async {
            fs_err::create_dir_all(&target)?;
            self.make(&image, PROBE_BYTES).await?;
            mount(&image, &target).await?;
            unmount(&target).await
        };
        let result = attempt.await.map_err(|error| error.to_string());
        drop(fs_err::remove_dir_all(&directory));
        result
    }

    /// Creates an image of this size. An existing one is retained, and grown if it is smaller.
    pub(crate) async fn make(&self, image: &Path, bytes: u64) -> io::Result<()> {
        match fs_err::metadata(image) {
            // Repeat a growth that was interrupted at any point.
            Ok(found) if found.len() < bytes || growing(image).exists() => {
                return grow(image, bytes.max(found.len())).await;
            }
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let template = self.template(bytes).await?;
        let image = image.to_owned();
        blocking(move || {
            let staged = TempPath::try_from_path(image.with_extension(STAGED))?;
            copy_sparse(template, &staged)?;
            Ok(staged.persist(&image)?)
        })
        .await
    }

    /// Opens a formatted image of this size; the open file can be copied even if it is evicted
    /// meanwhile.
    async fn template(&self, bytes: u64) -> io::Result<fs_err::File> {
        let path = self.template_path(bytes);
        // Without a permit: an existing template must not wait until others are formatted.
        if let Some(template) = open_template(&path)? {
            return Ok(template);
        }
        let _permit = self.formats.acquire().await.map_err(io::Error::other)?;
        // Another request may have formatted it meanwhile. Two may also format the same size at
        // once: each has its own file, and either may stay.
        if let Some(template) = open_template(&path)? {
            return Ok(template);
        }
        fs_err::create_dir_all(&self.templates)?;
        let staged = tempfile::Builder::new()
            .suffix(&format!(".{STAGED}"))
            .tempfile_in(&self.templates)?;
        staged.as_file().set_len(bytes)?;
        let staged = staged.into_temp_path();
        run(
            "mkfs.ext4",
            &[
                "-q",
                "-F",
                "-m",
                "0",
                "-E",
                "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
            ],
            &[&staged],
        )
        .await?;
        let formatted = fs_err::File::open(&staged)?;
        formatted.sync_all()?;
        staged.persist(&path)?;
        // Last, so that concurrent formats leave no more than the limit.
        self.evict_templates();
        Ok(formatted)
    }

    fn template_path(&self, bytes: u64) -> PathBuf {
        self.templates.join(format!("{bytes}.{TEMPLATE}"))
    }

    /// Evicts the templates beyond the limit that were not used for longest.
    fn evict_templates(&self) {
        let default = self.template_path(self.default_bytes);
        let mut templates = self.files(TEMPLATE);
        templates.retain(|(_, path)| *path != default);
        templates.sort_unstable_by_key(|(used, _)| std::cmp::Reverse(*used));
        for (_, path) in templates.into_iter().skip(MAX_TEMPLATES - 1) {
            drop(fs_err::remove_file(path));
        }
    }

    /// The files with an extension in the directory of templates, with the time of their last use.
    fn files(&self, extension: &str) -> Vec<(SystemTime, PathBuf)> {
        let Ok(entries) = fs_err::read_dir(&self.templates) else {
            return Vec::new();
        };
        entries
            .flatten()
            .filter(|entry| entry.path().extension().is_some_and(|own| own == extension))
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect()
    }
}

/// Opens a template, if it exists, and marks it as used.
fn open_template(path: &Path) -> io::Result<Option<fs_err::File>> {
    match fs_err::File::open(path) {
        Ok(template) => {
            drop(template.file().set_modified(SystemTime::now()));
            Ok(Some(template))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Mounts an image; does nothing if it is already mounted.
pub(crate) async fn mount(image: &Path, target: &Path) -> io::Result<()> {
    if is_mounted(target)? {
        Ok(())
    } else {
        run(
            "mount",
            &["-t", "ext4", "-o", MOUNT_OPTIONS],
            &[image, target],
        )
        .await
    }
}

/// Unmounts a directory and detaches its loop device; does nothing if it is not mounted.
pub(crate) async fn unmount(target: &Path) -> io::Result<()> {
    if !is_mounted(target)? {
        return Ok(());
    }
    let unmounted = run("umount", &[], &[target]).await;
    // Still in use: detach it now; the kernel unmounts it when it is released.
    if unmounted.is_err() && is_mounted(target)? {
        run("umount", &["--lazy"], &[target]).await
    } else {
        Ok(())
    }
}

fn is_mounted(target: &Path) -> io::Result<bool> {
    let device = |path: &Path| match fs_err::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata.dev())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let own = device(target)?;
    Ok(own.is_some() && own != device(target.parent().unwrap_or(Path::new("/")))?)
}

/// All mounts below a directory, innermost first.
pub(crate) fn mounted_below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mounts = fs_err::read_to_string("/proc/self/mountinfo")?;
    let mut found: Vec<PathBuf> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(unescape)
        .filter(|path| path != directory && path.starts_with(directory))
        .collect();
    found.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
    Ok(found)
}

/// Decodes a path in `/proc`, where space, tab, newline and backslash are octal escapes.
pub(crate) fn unescape(text: &str) -> PathBuf {
    PathBuf::from(
        text.replace("\\040", " ")
            .replace("\\011", "\t")
            .replace("\\012", "\n")
            .replace("\\134", "\\"),
    )
}

/// Grows an image that is not mounted.
async fn grow(image: &Path, bytes: u64) -> io::Result<()> {
    // A container being created may still hold a copy of the mount; changing the file would corrupt
    // it.
    let deadline = tokio::time::Instant::now() + RELEASE_TIMEOUT;
    while is_attached(image)? {
        if tokio::time::Instant::now() >= deadline {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the disk is still in use and can't grow now",
            ));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let marker = growing(image);
    fs_err::File::create(&marker)?.sync_all()?;
    fs_err::OpenOptions::new()
        .write(true)
        .open(image)?
        .set_len(bytes)?;
    // The lock on the marker serializes growth, even with a process that an earlier worker left
    // running.
    let script = r#"e2fsck -f -p "$1"; code=$?; [ $code -le 1 ] || exit $code; resize2fs "$1""#;
    let mut command = command("flock");
    command
        .arg(&marker)
        .args(["/bin/sh", "-c", script, "grow"])
        .arg(image)
        .kill_on_drop(false);
    finish("growing a disk", command, GROW_TIMEOUT).await?;
    fs_err::remove_file(&marker)
}

/// The marker file that exists while an image is being grown.
fn growing(image: &Path) -> PathBuf {
    image.with_extension("growing")
}

/// Returns whether a loop device is attached to this file.
fn is_attached(image: &Path) -> io::Result<bool> {
    let image = fs_err::canonicalize(image)?;
    let devices = fs_err::read_dir("/sys/block")?
        .flatten()
        .filter(|device| device.file_name().to_string_lossy().starts_with("loop"));
    Ok(devices.into_iter().any(|device| {
        fs_err::read_to_string(device.path().join("loop/backing_file"))
            .is_ok_and(|file| Path::new(file.trim_end_matches('\n')) == image)
    }))
}

async fn run(program: &str, options: &[&str], paths: &[&Path]) -> io::Result<()> {
    let mut command = command(program);
    command.args(options).args(paths);
    finish(program, command, COMMAND_TIMEOUT)
        .await
        .map_err(|error| without_directories(&error, paths))
}

/// The error with the names of these paths alone: callers see it, and the directories of the host
/// are not theirs.
fn without_directories(error: &io::Error, paths: &[&Path]) -> io::Error {
    let text = paths.iter().fold(error.to_string(), |text, path| {
        let name = path.file_name().unwrap_or_default();
        text.replace(&*path.to_string_lossy(), &name.to_string_lossy())
    });
    io::Error::new(error.kind(), text)
}

fn command(program: &str) -> tokio::process::Command {
    let mut command = process::command(program);
    command
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    // An ordinary user's PATH often lacks the sbin directories.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

async fn finish(
    program: &str,
    mut command: tokio::process::Command,
    limit: Duration,
) -> io::Result<()> {
    let output = tokio::time::timeout(limit, command.output())
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("{program} timed out")))??;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!(
        "{program}: {}",
        stderr
            .trim()
            .lines()
            .last()
            .unwrap_or("failed without a message")
    )))
}

fn create_sparse(path: &Path, bytes: u64) -> io::Result<fs_err::File> {
    use fs_err::os::unix::fs::OpenOptionsExt as _;
    let file = fs_err::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.set_len(bytes)?;
    Ok(file)
}

/// Copies a file, preserving its holes.
fn copy_sparse(mut source: fs_err::File, to: &Path) -> io::Result<()> {
    let length = source.metadata()?.len();
    let mut target = create_sparse(to, length)?;
    let mut at = 0;
    loop {
        // No more data: only the hole up to the end remains.
        let Ok(start) = rustix::fs::seek(&source, SparseSeek::Data(at)) else {
            return Ok(());
        };
        let end = rustix::fs::seek(&source, SparseSeek::Hole(start))?;
        source.seek(SeekFrom::Start(start))?;
        target.seek(SeekFrom::Start(start))?;
        let mut left = (&mut source).take(end - start);
        let mut buffer = vec![0; 256 * 1024];
        loop {
            let count = left.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            target.write_all(&buffer[..count])?;
        }
        at = end;
    }
}

/// The size of the file system of a path, or of the directory that it will be created in.
pub(crate) fn capacity_bytes(path: &Path) -> io::Result<u64> {
    let existing = path.ancestors().find(|path| path.exists());
    let stat = rustix::fs::statvfs(existing.unwrap_or(Path::new("/")))?;
    Ok(stat.f_blocks.saturating_mul(stat.f_frsize))
}

/// Free bytes available to this process on the file system of a path.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// How much of the host's disk a mounted disk uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskUsage {
    /// Bytes of the files in it, on disk or in memory. Exact, but does not show writes into
    /// preallocated space.
    pub(crate) used: u64,
    /// Bytes that its image occupies on the host. Complete, but lags behind writes.
    pub(crate) written: u64,
    /// Bytes that may still reach the host even if all processes are killed: dirty pages, and
    /// preallocated space, writes into which show nowhere before they are on the host.
    pub(crate) pending: u64,
}

/// The usage of the disk `image`, mounted at `target`. Inspects the file system only, not its
/// contents.
pub(crate) fn usage(image: &Path, target: &Path) -> io::Result<DiskUsage> {
    let written = fs_err::metadata(image)?.blocks() * 512;
    let device = fs_err::symlink_metadata(target)?.dev();
    let device = fs_err::read_link(format!(
        "/sys/dev/block/{}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device)
    ))?;
    let dirty = Path::new("/sys/fs/ext4")
        .join(device.file_name().unwrap_or_default())
        .join("delayed_allocation_blocks");
    let dirty: u64 = fs_err::read_to_string(dirty)?
        .trim()
        .parse()
        .map_err(io::Error::other)?;
    // The kernel briefly counts a block twice while allocating it, but not in two consecutive
    // reads.
    let (one, two) = (rustix::fs::statvfs(target)?, rustix::fs::statvfs(target)?);
    let used = one.f_blocks.saturating_sub(one.f_bfree.max(two.f_bfree));
    let (used, dirty) = (
        used.saturating_mul(one.f_frsize),
        dirty.saturating_mul(one.f_frsize),
    );
    Ok(DiskUsage {
        used,
        written,
        pending: dirty.max(used.saturating_sub(written)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparse_copy_has_the_same_bytes_and_the_same_holes() {
        let directory = tempfile::tempdir().expect("a directory");
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        let mut file = create_sparse(&from, 64 << 20).expect("a file");
        for (place, text) in [(0, "start"), (5 << 20, "middle"), ((64 << 20) - 3, "end")] {
            file.seek(SeekFrom::Start(place)).expect("seeks");
            file.write_all(text.as_bytes()).expect("writes");
        }
        copy_sparse(fs_err::File::open(&from).expect("opens"), &to).expect("copies");
        assert_eq!(
            fs_err::read(&from).expect("reads"),
            fs_err::read(&to).expect("reads")
        );
        let blocks = |path: &Path| fs_err::metadata(path).expect("there").blocks();
        assert!(
            blocks(&to) <= blocks(&from) + 8,
            "{} {}",
            blocks(&to),
            blocks(&from)
        );
    }

    const MIB: u64 = 1 << 20;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs_err::read_dir(directory)
            .expect("a directory")
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn a_disk_with_a_template_does_not_wait_until_others_are_formatted() {
        let directory = tempfile::tempdir().expect("a directory");
        let disks = Disks::new(directory.path().to_owned(), MIB);
        fs_err::write(disks.template_path(MIB), "formatted").expect("a template");
        let all = u32::try_from(MAX_CONCURRENT_FORMATS).expect("few");
        let _busy = disks.formats.acquire_many(all).await.expect("open");
        let image = directory.path().join("disk");
        tokio::time::timeout(Duration::from_secs(10), disks.make(&image, MIB))
            .await
            .expect("it waited for a format")
            .expect("a copy");
        assert_eq!(fs_err::read_to_string(image).expect("there"), "formatted");
    }

    #[tokio::test]
    async fn a_disk_that_was_formatted_meanwhile_is_not_formatted_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let disks = Disks::new(directory.path().to_owned(), MIB);
        let all = u32::try_from(MAX_CONCURRENT_FORMATS).expect("few");
        let busy = disks.formats.acquire_many(all).await.expect("open");
        let image = directory.path().join("disk");
        let mut making = Box::pin(disks.make(&image, MIB));
        assert!(
            futures_util::poll!(&mut making).is_pending(),
            "more formats at once than permitted"
        );
        fs_err::write(disks.template_path(MIB), "formatted").expect("a template");
        drop(busy);
        making.await.expect("a copy");
        assert_eq!(fs_err::read_to_string(&image).expect("there"), "formatted");
    }

    #[tokio::test]
    async fn a_failed_format_leaves_no_file_and_names_no_directory() {
        let directory = tempfile::tempdir().expect("a directory");
        let templates = directory.path().join("disks");
        let disks = Disks::new(templates.clone(), MIB);
        // Too small for a file system, and too large for any file.
        for bytes in [4_096, u64::MAX] {
            let image = directory.path().join("disk.img");
            let error = disks.make(&image, bytes).await.expect_err("impossible");
            let text = error.to_string();
            assert!(
                !text.contains(&*directory.path().to_string_lossy()),
                "{text}"
            );
            assert_eq!(names(&templates), [""; 0], "{bytes}: {text}");
            assert_eq!(names(directory.path()), ["disks"], "{bytes}: {text}");
        }
    }

    #[test]
    fn the_default_template_and_those_used_last_are_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let disks = Disks::new(directory.path().to_owned(), 0);
        // 0 was used first and 11 last; then 3 is used again.
        for number in 0..12 {
            let template = fs_err::File::create(disks.template_path(number)).expect("a file");
            let used = SystemTime::UNIX_EPOCH + Duration::from_secs(number);
            template.file().set_modified(used).expect("a time");
        }
        let staged = directory.path().join("unfinished.new");
        fs_err::write(&staged, "").expect("a file");
        assert!(
            open_template(&disks.template_path(3))
                .expect("opens")
                .is_some()
        );
        disks.evict_templates();
        fs_err::remove_file(staged).expect("a file that is being formatted was evicted");
        assert_eq!(
            names(directory.path()),
            [
                "0.img", "10.img", "11.img", "3.img", "6.img", "7.img", "8.img", "9.img"
            ]
        );
    }
}

//! The environment and the options of every git command, and the layout of the runner's directory.

use std::{
    ffi::OsString,
    io,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use rustix::fs::{Mode, OFlags};
use sha2::{Digest as _, Sha256};

use super::wire::{RunRequest, RunnerSettings, WireRemote, is_name};

/// The variable that names the socket of a command's credential.
pub(super) const CREDENTIAL_SOCKET: &str = "CYNODE_GIT_CREDENTIAL_SOCKET";

/// A remote that sends less than [`LOW_SPEED_LIMIT`] bytes a second for this long is given up.
const LOW_SPEED_SECONDS: u32 = 60;
const LOW_SPEED_LIMIT: u32 = 1_000;

/// The configuration of a mirror. Repeated by options of each command where safety depends on it.
const CONFIG: &str = "[core]\n\
    \trepositoryformatversion = 0\n\
    \tbare = true\n\
    \tlogAllRefUpdates = false\n\
    [gc]\n\
    \tauto = 0\n\
    [maintenance]\n\
    \tauto = false\n";

/// Options of every command. Whatever a repository contains, git runs no program for it.
const OPTIONS: &[&str] = &[
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.protectHFS=true",
    "core.protectNTFS=true",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.askPass=",
    "transfer.fsckObjects=true",
    "fetch.fsckObjects=true",
    "receive.fsckObjects=true",
    "fetch.unpackLimit=1",
    "fetch.writeCommitGraph=false",
    "submodule.recurse=false",
    "fetch.recurseSubmodules=false",
    "push.recurseSubmodules=no",
    "push.gpgSign=false",
    "commit.gpgSign=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.allow=never",
    "http.followRedirects=false",
    "http.sslVerify=true",
    "http.proxy=",
    "credential.useHttpPath=true",
    "credential.helper=",
    // Memory: windows instead of whole packs, large blobs as streams.
    "core.packedGitWindowSize=32m",
    "core.packedGitLimit=256m",
    "core.bigFileThreshold=16m",
    "pack.windowMemory=64m",
    "pack.deltaCacheSize=64m",
    "pack.threads=2",
];

/// Where the runner keeps things. Names were checked.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(super) fn new(settings: &RunnerSettings) -> Self {
        Self {
            root: settings.directory.clone(),
        }
    }

    /// Creates the directories, and removes what operations of an earlier process left.
    pub(super) fn open(&self) -> io::Result<()> {
        let work = self.root.join("work");
        if work.exists() {
            fs_err::remove_dir_all(&work)?;
        }
        for directory in [work, self.root.join("ca"), self.home()] {
            fs_err::create_dir_all(directory)?;
        }
        for mirror in fs_err::read_dir(&self.root)? {
            let path = mirror?.path();
            if path.extension().is_some_and(|extension| extension == "git") {
                remove_stale(&path)?;
            }
        }
        Ok(())
    }

    /// An empty directory: no configuration and no certificates.
    pub(super) fn home(&self) -> PathBuf {
        self.root.join("home")
    }

    pub(super) fn mirror(&self, mirror: &str) -> io::Result<PathBuf> {
        checked(mirror).map(|mirror| self.root.join(format!("{mirror}.git")))
    }

    /// The directory of one operation.
    pub(super) fn scratch(&self, mirror: &str, name: &str) -> io::Result<PathBuf> {
        Ok(self
            .root
            .join("work")
            .join(checked(mirror)?)
            .join(checked(name)?))
    }

    /// Writes a bare repository unless it exists.
    pub(super) fn prepare(&self, mirror: &str) -> io::Result<()> {
        let path = self.mirror(mirror)?;
        if path.join("HEAD").is_file() {
            return Ok(());
        }
        for directory in ["objects/info", "objects/pack", "refs/heads", "refs/tags"] {
            fs_err::create_dir_all(path.join(directory))?;
        }
        fs_err::write(path.join("config"), CONFIG)?;
        // Last: a repository without it is not one.
        fs_err::write(path.join("HEAD"), "ref: refs/heads/main\n")
    }

    /// Creates a quarantine whose objects include those of the mirror.
    fn quarantine(&self, mirror: &str, name: &str) -> io::Result<PathBuf> {
        let objects = self.scratch(mirror, name)?.join("objects");
        if !objects.join("info/alternates").is_file() {
            fs_err::create_dir_all(objects.join("info"))?;
            fs_err::create_dir_all(objects.join("pack"))?;
            let mut line = self
                .mirror(mirror)?
                .join("objects")
                .into_os_string()
                .into_vec();
            line.push(b'\n');
            fs_err::write(objects.join("info/alternates"), line)?;
        }
        Ok(objects)
    }

    /// Moves the objects of a quarantine into the mirror. A pack's index comes last: it makes the
    /// pack visible.
    pub(super) fn accept(&self, mirror: &str, name: &str) -> io::Result<()> {
        let from = self.scratch(mirror, name)?.join("objects");
        let to = self.mirror(mirror)?.join("objects");
        if !from.is_dir() {
            return Ok(());
        }
        for entry in fs_err::read_dir(&from)? {
            let entry = entry?;
            let name = entry.file_name();
            let is_fan_out =
                name.len() == 2 && name.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit);
            if is_fan_out {
                fs_err::create_dir_all(to.join(&name))?;
                for object in fs_err::read_dir(entry.path())? {
                    let object = object?;
                    move_new(&object.path(), &to.join(&name).join(object.file_name()))?;
                }
            }
        }
        let mut packs: Vec<PathBuf> = Vec::new();
        for entry in fs_err::read_dir(from.join("pack"))? {
            packs.push(entry?.path());
        }
        packs.sort_by_key(|path| path.extension().is_some_and(|extension| extension == "idx"));
        for path in packs {
            let is_kept = path
                .extension()
                .is_some_and(|extension| extension == "keep");
            let name = path.file_name().filter(|name| {
                !is_kept && name.to_str().is_some_and(|name| name.starts_with("pack-"))
            });
            if let Some(name) = name {
                move_new(&path, &to.join("pack").join(name))?;
            }
        }
        fs_err::remove_dir_all(from)
    }

    pub(super) fn forget(&self, mirror: &str, name: &str) -> io::Result<()> {
        remove_if_there(&self.scratch(mirror, name)?)
    }

    pub(super) fn remove(&self, mirror: &str) -> io::Result<()> {
        remove_if_there(&self.root.join("work").join(checked(mirror)?))?;
        remove_if_there(&self.mirror(mirror)?)
    }

    /// Opens a file of an operation.
    pub(super) fn open_scratch(
        &self,
        mirror: &str,
        name: &str,
        file: &str,
    ) -> io::Result<fs_err::File> {
        let path = self.scratch(mirror, name)?.join(checked(file)?);
        let file = rustix::fs::open(
            &path,
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|error| {
            io::Error::new(
                io::Error::from(error).kind(),
                format!("{}: {}", path.display(), io::Error::from(error)),
            )
        })?;
        Ok(fs_err::File::from_parts(std::fs::File::from(file), path))
    }

    /// The file with a remote's certificates.
    fn certificates(&self, pem: &str) -> io::Result<PathBuf> {
        let name = format!("{}.pem", hex::encode(Sha256::digest(pem.as_bytes())));
        let path = self.root.join("ca").join(name);
        if !path.is_file() {
            let staged = self
                .root
                .join("ca")
                .join(format!(".{}", uuid::Uuid::new_v4().simple()));
            let mut file = fs_err::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&staged)?;
            io::Write::write_all(&mut file, pem.as_bytes())?;
            fs_err::rename(&staged, &path)?;
        }
        Ok(path)
    }
}

fn checked(name: &str) -> io::Result<&str> {
    if is_name(name) {
        Ok(name)
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the name of a mirror or of an operation is not valid",
        ))
    }
}

/// Removes locks and temporary packs of processes that were killed.
fn remove_stale(mirror: &Path) -> io::Result<()> {
    let mut directories = vec![mirror.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs_err::read_dir(&directory)? {
            let entry = entry?;
            let path = entry.path();
            let name = entry.file_name();
            let name = name.as_encoded_bytes();
            if entry.file_type()?.is_dir() {
                // Loose objects have no locks, and are many.
                if name.len() != 2 {
                    directories.push(path);
                }
            } else if name.ends_with(b".lock") || name.starts_with(b"tmp_") {
                fs_err::remove_file(path)?;
            }
        }
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs_err::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// An object that is there already is the same.
fn move_new(from: &Path, to: &Path) -> io::Result<()> {
    if to.exists() {
        fs_err::remove_file(from)
    } else {
        fs_err::rename(from, to)
    }
}

/// The bytes and the packs of a mirror.
pub(super) fn measure(mirror: &Path) -> io::Result<(u64, u64)> {
    let (mut bytes, mut packs) = (0, 0);
    let mut directories = vec![mirror.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs_err::read_dir(&directory)? {
            let entry = entry?;
            // A fetch renames its files meanwhile.
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            if metadata.is_dir() {
                directories.push(entry.path());
            } else {
                bytes += metadata.len();
                packs += u64::from(entry.path().extension().is_some_and(|kind| kind == "pack"));
            }
        }
    }
    Ok((bytes, packs))
}

/// Everything that a git command is started with.
pub(super) struct Invocation {
    pub(super) args: Vec<OsString>,
    pub(super) environment: Vec<(&'static str, OsString)>,
}

/// Builds the options and the environment of a command. `helper` is how a shell starts our
/// credential helper.
pub(super) fn invocation(
    layout: &Layout,
    request: &RunRequest,
    helper: &str,
) -> io::Result<Invocation> {
    let mirror = layout.mirror(&request.mirror)?;
    let home = layout.home();
    let mut environment: Vec<(&'static str, OsString)> = vec![
        ("PATH", super::launch::PATH.into()),
        ("HOME", home.clone().into()),
        ("LC_ALL", "C".into()),
        ("GIT_DIR", mirror.into()),
        ("GIT_CONFIG_NOSYSTEM", "1".into()),
        ("GIT_CONFIG_GLOBAL", "/dev/null".into()),
        ("GIT_ATTR_NOSYSTEM", "1".into()),
        ("GIT_TERMINAL_PROMPT", "0".into()),
        ("GIT_NO_REPLACE_OBJECTS", "1".into()),
        ("GIT_NO_LAZY_FETCH", "1".into()),
        ("GIT_OPTIONAL_LOCKS", "0".into()),
    ];
    let mut options: Vec<OsString> = OPTIONS.iter().map(Into::into).collect();
    match &request.remote {
        Some(remote) => {
            // Tests fetch from repositories of their own.
            let scheme = if cfg!(test) && remote.scheme == "file" {
                "file"
            } else {
                "https"
            };
            environment.push(("GIT_ALLOW_PROTOCOL", scheme.into()));
            options.push(format!("protocol.{scheme}.allow=always").into());
            add_remote(
                layout,
                remote,
                &home,
                helper,
                &mut options,
                &mut environment,
            )?;
        }
        // Not empty: git would then permit the protocols of its configuration.
        None => environment.push(("GIT_ALLOW_PROTOCOL", "none".into())),
    }
    if let Some(name) = &request.index {
        let directory = layout.scratch(&request.mirror, name)?;
        fs_err::create_dir_all(&directory)?;
        environment.push(("GIT_INDEX_FILE", directory.join("index").into()));
    }
    if let Some(name) = &request.quarantine {
        let objects = layout.quarantine(&request.mirror, name)?;
        environment.push(("GIT_OBJECT_DIRECTORY", objects.into()));
    }
    let mut args = Vec::with_capacity(2 * options.len() + request.args.len());
    for option in options {
        args.push("-c".into());
        args.push(option);
    }
    args.extend(
        request
            .args
            .iter()
            .map(|argument| OsString::from_vec(argument.0.clone())),
    );
    Ok(Invocation { args, environment })
}

fn add_remote(
    layout: &Layout,
    remote: &WireRemote,
    home: &Path,
    helper: &str,
    options: &mut Vec<OsString>,
    environment: &mut Vec<(&'static str, OsString)>,
) -> io::Result<()> {
    if !remote.addresses.is_empty() {
        let addresses: Vec<String> = remote
            .addresses
            .iter()
            .map(|address| match address {
                std::net::IpAddr::V4(address) => address.to_string(),
                std::net::IpAddr::V6(address) => format!("[{address}]"),
            })
            .collect();
        options.push(
            format!(
                "http.curloptResolve={}:{}:{}",
                remote.host,
                remote.port,
                addresses.join(",")
            )
            .into(),
        );
    }
    options.push(format!("http.lowSpeedLimit={LOW_SPEED_LIMIT}").into());
    options.push(format!("http.lowSpeedTime={LOW_SPEED_SECONDS}").into());
    if let Some(pem) = &remote.ca {
        let mut option = OsString::from("http.sslCAInfo=");
        option.push(layout.certificates(pem)?);
        options.push(option);
        // Those of the system would be trusted too.
        let mut option = OsString::from("http.sslCAPath=");
        option.push(home);
        options.push(option);
    }
    if let Some(socket) = &remote.credential_socket {
        options.push(format!("credential.helper={helper}").into());
        environment.push((CREDENTIAL_SOCKET, socket.clone().into()));
    }
    Ok(())
}

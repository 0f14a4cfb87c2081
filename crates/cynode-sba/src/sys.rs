//! Safe wrappers of system calls that need `unsafe`.
//!
//! Invariants: the agent is single-threaded, so a forked child may run ordinary code; a forked
//! child never returns into the async runtime but ends in [`exit_now`].
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use tokio::io::{Interest, unix::AsyncFd};

/// Registers a descriptor with the async runtime.
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open descriptor from here until `AsyncFd` drops it.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(Into::into)
}

pub(crate) enum Fork {
    Parent(i32),
    Child,
}

pub(crate) fn fork() -> io::Result<Fork> {
    // SAFETY: the process is single-threaded (no thread is ever spawned), so the child's heap and
    // locks are consistent.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => Ok(Fork::Parent(pid)),
    }
}

/// Exits a forked child immediately, without destructors and exit handlers.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: `_exit` has no preconditions.
    unsafe { libc::_exit(code) }
}

/// Closes every descriptor from 3 on, except those in `keep`, which are in ascending order.
pub(crate) fn close_all_but(keep: &[RawFd]) {
    let mut first = 3;
    for keep in keep.iter().filter_map(|fd| u32::try_from(*fd).ok()) {
        if keep > first {
            close_range(first, keep - 1);
        }
        first = first.max(keep.saturating_add(1));
    }
    close_range(first, u32::MAX);
}

fn close_range(first: u32, last: u32) {
    // SAFETY: only called in a forked child, which uses none of the closed descriptors afterwards.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

pub(crate) fn close_standard_streams() {
    for fd in 0..3 {
        // SAFETY: only called in a forked child that no longer uses its standard streams.
        unsafe { libc::close(fd) };
    }
}

/// Duplicates `fd` to another number, without close-on-exec.
pub(crate) fn become_fd(fd: RawFd, target: RawFd) -> io::Result<()> {
    // SAFETY: both are plain descriptor numbers; `dup2` checks them.
    if unsafe { libc::dup2(fd, target) } == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Takes over a descriptor that this process was started with.
pub(crate) fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: `fcntl` checks the number. Whoever calls this does so once, before anything else
    // opens a descriptor, so nothing else owns the number.
    unsafe {
        if libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

pub(crate) fn set_not_dumpable() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 0)
}

pub(crate) fn become_subreaper() -> io::Result<()> {
    prctl(libc::PR_SET_CHILD_SUBREAPER, 1)
}

pub(crate) fn set_name(name: &CStr) {
    // SAFETY: `PR_SET_NAME` reads a NUL-terminated string.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

fn prctl(option: i32, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: these options take one integer.
    if unsafe { libc::prctl(option, value, 0, 0, 0) } == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Whether a child is currently stopped. Doesn't reap it.
pub(crate) fn is_stopped(pid: i32) -> bool {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(pid).is_some_and(|pid| matches!(waitid(WaitId::Pid(pid), options), Ok(Some(_))))
}

/// Blocks every signal that can be blocked.
pub(crate) fn block_all_signals() {
    // SAFETY: the set is initialized by `sigfillset` before it is used.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
    }
}

/// A descriptor that reads the given signals, which get blocked.
pub(crate) fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: the set is initialized by `sigemptyset`; `signalfd` copies it.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) == -1 {
            return Err(io::Error::last_os_error());
        }
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd == -1 {
            Err(io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

/// A received signal.
pub(crate) struct ReceivedSignal {
    pub(crate) signal: i32,
    /// The process that sent it with a plain `kill`; 0 for one outside of this pid namespace.
    pub(crate) sender: Option<u32>,
}

/// The next signal of a [`signal_fd`]; `WouldBlock` if there is none.
pub(crate) fn read_signal(fd: &OwnedFd) -> io::Result<ReceivedSignal> {
    // SAFETY: `signalfd_siginfo` is plain old data; the kernel fills exactly one or returns an
    // error.
    unsafe {
        let mut info: libc::signalfd_siginfo = std::mem::zeroed();
        let size = size_of::<libc::signalfd_siginfo>();
        let count = libc::read(fd.as_raw_fd(), (&raw mut info).cast(), size);
        if count == -1 {
            return Err(io::Error::last_os_error());
        }
        if count.unsigned_abs() != size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // A sender inside can forge `ssi_pid` with `sigqueue`, but not together with the code of
        // `kill`.
        Ok(ReceivedSignal {
            signal: info.ssi_signo.cast_signed(),
            sender: (info.ssi_code == libc::SI_USER).then_some(info.ssi_pid),
        })
    }
}

pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: `kill` takes two integers.
    if unsafe { libc::kill(pid, signal) } == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

pub(crate) enum WaitOutcome {
    Child(i32, i32),
    NoneReady,
    NoChildren,
}

/// Reaps any one child.
pub(crate) fn wait_any(block: bool) -> WaitOutcome {
    loop {
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        match unsafe { libc::waitpid(-1, &raw mut status, if block { 0 } else { libc::WNOHANG }) } {
            0 => return WaitOutcome::NoneReady,
            -1 if io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
            -1 => return WaitOutcome::NoChildren,
            pid => return WaitOutcome::Child(pid, status),
        }
    }
}

/// The exit code or signal in a wait status.
pub(crate) fn decode_status(status: i32) -> (Option<i32>, Option<i32>) {
    if libc::WIFEXITED(status) {
        (Some(libc::WEXITSTATUS(status)), None)
    } else if libc::WIFSIGNALED(status) {
        (None, Some(libc::WTERMSIG(status)))
    } else {
        (None, None)
    }
}

/// The number of unread bytes in a pipe.
pub(crate) fn bytes_waiting(fd: &OwnedFd) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: `FIONREAD` writes one int.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count) } == -1 {
        0
    } else {
        usize::try_from(count).unwrap_or(0)
    }
}

// In glibc since 2.26, but the libc crate lacks it for some targets.
const POSIX_SPAWN_SETSID: i16 = 0x80;

/// Starts `path` in a new session with default signal handling and inherited standard streams.
/// Returns the error of `execve`.
pub(crate) fn spawn(path: &CStr, argv: &[CString], env: &[CString]) -> io::Result<i32> {
    let pointers = |strings: &[CString]| -> Vec<*mut libc::c_char> {
        strings
            .iter()
            .map(|string| string.as_ptr().cast_mut())
            .chain([ptr::null_mut()])
            .collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: attributes and sets are initialized before use and destroyed after; argv and env are
    // arrays of pointers to NUL-terminated strings that outlive the call, and end in a null
    // pointer.
    unsafe {
        let mut attributes: libc::posix_spawnattr_t = std::mem::zeroed();
        let code = libc::posix_spawnattr_init(&raw mut attributes);
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
        let (mut all, mut none) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::sigemptyset(&raw mut none);
        libc::posix_spawnattr_setsigdefault(&raw mut attributes, &raw const all);
        libc::posix_spawnattr_setsigmask(&raw mut attributes, &raw const none);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the flags are small constants"
        )]
        let flags = (libc::POSIX_SPAWN_SETSIGDEF | libc::POSIX_SPAWN_SETSIGMASK) as i16
            | POSIX_SPAWN_SETSID;
        libc::posix_spawnattr_setflags(&raw mut attributes, flags);
        let mut pid = 0;
        let code = libc::posix_spawn(
            &raw mut pid,
            path.as_ptr(),
            ptr::null(),
            &raw const attributes,
            argv.as_ptr(),
            env.as_ptr(),
        );
        libc::posix_spawnattr_destroy(&raw mut attributes);
        if code == 0 {
            Ok(pid)
        } else {
            Err(io::Error::from_raw_os_error(code))
        }
    }
}

/// The symbolic name of an errno.
pub(crate) fn errno_name(errno: i32) -> String {
    let name = match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EIO => "EIO",
        libc::E2BIG => "E2BIG",
        libc::ENOEXEC => "ENOEXEC",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EEXIST => "EEXIST",
        libc::EXDEV => "EXDEV",
        libc::ENOTDIR => "ENOTDIR",
        libc::EISDIR => "EISDIR",
        libc::EINVAL => "EINVAL",
        libc::ENFILE => "ENFILE",
        libc::EMFILE => "EMFILE",
        libc::ETXTBSY => "ETXTBSY",
        libc::EFBIG => "EFBIG",
        libc::ENOSPC => "ENOSPC",
        libc::EROFS => "EROFS",
        libc::ENAMETOOLONG => "ENAMETOOLONG",
        libc::ENOTEMPTY => "ENOTEMPTY",
        libc::ELOOP => "ELOOP",
        libc::EDQUOT => "EDQUOT",
        libc::EBUSY => "EBUSY",
        other => return format!("E{other}"),
    };
    name.to_owned()
}

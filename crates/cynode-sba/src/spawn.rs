//! Starts a command under its own subreaper.
//!
//! Process 1 forks a subreaper, which starts the command and adopts its orphans. So all processes
//! of an exec, including daemons, are descendants of one known process. The subreaper reports over
//! a pipe that no other process can write: whether the command started, then its wait status. It
//! exits when it has no child left.
//!
//! Invariants: the subreaper holds no descriptor except its report pipe, so that the command's
//! pipes close with their last writer; it ignores every signal except SIGKILL and SIGSTOP. Only a
//! job's runner inherits a descriptor beyond the standard streams.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStringExt as _,
    },
    path::PathBuf,
};

use cynode_api::ErrorCode;
use cynode_sba_proto::{AgentError, ExecStart, WORKSPACE, runner::RUNNER_FD};
use rustix::{
    fs::{Access, Mode, OFlags},
    net::{AddressFamily, SocketFlags, SocketType},
    pipe::PipeFlags,
};

use crate::sys::{self, Fork, WaitOutcome};

/// The search path for execs without a PATH of their own.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug)]
pub(crate) struct SpawnedExec {
    pub(crate) subreaper: i32,
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// Reads [`Report`]s.
    pub(crate) report: OwnedFd,
    /// The other end of the runner's socket pair.
    pub(crate) runner: Option<OwnedFd>,
}

/// A subreaper's report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    Started { pid: i32 },
    CwdFailed { errno: i32 },
    StartFailed { errno: i32 },
    Ended { status: i32 },
}

impl Report {
    pub(crate) const SIZE: usize = 5;

    fn encode(self) -> [u8; Self::SIZE] {
        let (kind, value) = match self {
            Self::Started { pid } => (1, pid),
            Self::CwdFailed { errno } => (2, errno),
            Self::StartFailed { errno } => (3, errno),
            Self::Ended { status } => (4, status),
        };
        let [a, b, c, d] = value.to_le_bytes();
        [kind, a, b, c, d]
    }

    pub(crate) fn decode([kind, value @ ..]: [u8; Self::SIZE]) -> Option<Self> {
        let value = i32::from_le_bytes(value);
        match kind {
            1 => Some(Self::Started { pid: value }),
            2 => Some(Self::CwdFailed { errno: value }),
            3 => Some(Self::StartFailed { errno: value }),
            4 => Some(Self::Ended { status: value }),
            _ => None,
        }
    }
}

/// Everything that is prepared before the fork, so that the child has little to do.
struct PreparedCommand {
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: CString,
}

impl PreparedCommand {
    fn new(start: &ExecStart) -> Result<Self, AgentError> {
        let invalid = |message: &str| AgentError::new(ErrorCode::InvalidRequest, message);
        let string = |text: &str, field: &str| {
            CString::new(text).map_err(|_| invalid(&format!("{field} contains a NUL byte")))
        };
        let program = start
            .argv
            .first()
            .filter(|program| !program.is_empty())
            .ok_or_else(|| invalid("argv must name a command"))?;
        let candidates = if program.contains('/') {
            vec![string(program, "argv[0]")?]
        } else {
            let path = start
                .env
                .iter()
                .find(|(name, _)| name == "PATH")
                .map_or(DEFAULT_PATH, |(_, value)| value);
            path.split(':')
                .filter(|directory| !directory.is_empty())
                .map(|directory| string(&format!("{directory}/{program}"), "argv[0]"))
                .collect::<Result<_, _>>()?
        };
        Ok(Self {
            candidates,
            argv: start
                .argv
                .iter()
                .map(|argument| string(argument, "argv"))
                .collect::<Result<_, _>>()?,
            env: start
                .env
                .iter()
                .map(|(name, value)| string(&format!("{name}={value}"), "env"))
                .collect::<Result<_, _>>()?,
            cwd: CString::new(
                PathBuf::from(WORKSPACE)
                    .join(&start.cwd)
                    .into_os_string()
                    .into_vec(),
            )
            .map_err(|_| invalid("cwd contains a NUL byte"))?,
        })
    }
}

pub(crate) fn spawn(start: &ExecStart) -> Result<SpawnedExec, AgentError> {
    let command = PreparedCommand::new(start)?;
    let pipe = || {
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
            .map_err(|error| sandbox_error("opening a pipe", error.raw_os_error()))
    };
    let (report, report_out) = pipe()?;
    let (stdout, stdout_in) = pipe()?;
    let (stderr, stderr_in) = pipe()?;
    let (stdin_out, stdin) = if start.stdin {
        let (reader, writer) = pipe()?;
        (reader, Some(writer))
    } else {
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| sandbox_error("opening /dev/null", error.raw_os_error()))?;
        (null, None)
    };
    let (runner, runner_end) = if start.runner {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|error| sandbox_error("opening a socket pair", error.raw_os_error()))?;
        (Some(ours), Some(theirs))
    } else {
        (None, None)
    };
    match sys::fork() {
        Ok(Fork::Child) => {
            // A panic in the child must not unwind into the parent's async runtime.
            let _ended = std::panic::catch_unwind(|| {
                let inherited = Inherited {
                    streams: [&stdin_out, &stdout_in, &stderr_in],
                    runner: runner_end.as_ref(),
                };
                subreaper(&command, &inherited, &report_out)
            });
            sys::exit_now(70)
        }
        Ok(Fork::Parent(subreaper)) => {
            let ours = [Some(&stdout), Some(&stderr), Some(&report)];
            for fd in ours
                .into_iter()
                .chain([stdin.as_ref(), runner.as_ref()])
                .flatten()
            {
                rustix::io::ioctl_fionbio(fd, true)
                    .map_err(|error| sandbox_error("preparing a pipe", error.raw_os_error()))?;
            }
            Ok(SpawnedExec {
                subreaper,
                stdin,
                stdout,
                stderr,
                report,
                runner,
            })
        }
        Err(error) => Err(sandbox_error(
            "starting the command",
            error.raw_os_error().unwrap_or(libc::EAGAIN),
        )),
    }
}

/// An error for exhausted sandbox resources, as opposed to an error of the command.
fn sandbox_error(operation: &str, errno: i32) -> AgentError {
    let (code, detail) = match errno {
        libc::EAGAIN => (ErrorCode::PidsExhausted, "no process slot is free"),
        libc::ENOMEM => (
            ErrorCode::PidsExhausted,
            "there is no memory for another process",
        ),
        libc::EMFILE => (
            ErrorCode::ExecFailed,
            "too many concurrent commands for the sandbox's limit of open files (limits.nofile)",
        ),
        libc::ENFILE => (
            ErrorCode::Internal,
            "the host has reached its limit of open files",
        ),
        _ => (ErrorCode::Internal, "unexpected"),
    };
    AgentError {
        errno: Some(sys::errno_name(errno)),
        ..AgentError::new(code, format!("{operation}: {detail}"))
    }
}

/// The error of a command that did not start.
pub(crate) fn start_error(start: &ExecStart, report: Report) -> AgentError {
    let error = |errno: i32, problem: String| AgentError {
        errno: Some(sys::errno_name(errno)),
        ..AgentError::new(
            ErrorCode::ExecFailed,
            format!("{problem}: {}", io::Error::from_raw_os_error(errno)),
        )
    };
    match report {
        Report::CwdFailed { errno } => {
            error(errno, format!("can't change to directory {:?}", start.cwd))
        }
        Report::StartFailed {
            errno: errno @ (libc::EAGAIN | libc::ENOMEM),
        } => sandbox_error("starting the command", errno),
        Report::StartFailed { errno } => error(
            errno,
            format!(
                "can't start {:?}",
                start.argv.first().map_or("", String::as_str)
            ),
        ),
        Report::Started { .. } | Report::Ended { .. } => AgentError::new(
            ErrorCode::Internal,
            "the command's supervisor sent reports out of order",
        ),
    }
}

/// The descriptors that a command inherits.
struct Inherited<'a> {
    streams: [&'a OwnedFd; 3],
    runner: Option<&'a OwnedFd>,
}

impl Inherited<'_> {
    /// Gives the descriptors the numbers that the command expects.
    fn place(&self) -> io::Result<()> {
        for (target, fd) in (0..).zip(self.streams) {
            sys::become_fd(fd.as_raw_fd(), target)?;
        }
        if let Some(runner) = self.runner {
            let runner = above_runner_fd(runner)?;
            sys::become_fd(runner.as_raw_fd(), RUNNER_FD)?;
        }
        Ok(())
    }
}

/// A copy with a number that [`Inherited::place`] does not overwrite.
fn above_runner_fd(fd: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, RUNNER_FD + 1)?)
}

/// The main function of the forked subreaper.
fn subreaper(command: &PreparedCommand, inherited: &Inherited<'_>, report: &OwnedFd) -> ! {
    sys::block_all_signals();
    let moved;
    let report = match inherited.runner.map(|_| above_runner_fd(report)) {
        None => report,
        Some(Ok(copy)) => {
            moved = copy;
            &moved
        }
        Some(Err(_)) => sys::exit_now(70),
    };
    // Well below PIPE_BUF, so the write is atomic. The descriptor is above the standard streams,
    // which Rust's runtime opens in every process.
    let send_report = |message: Report| {
        if rustix::io::write(report, &message.encode()) != Ok(Report::SIZE) {
            sys::exit_now(70);
        }
    };
    if let Err(error) = inherited.place() {
        send_report(Report::StartFailed {
            errno: error.raw_os_error().unwrap_or(libc::EINVAL),
        });
        sys::exit_now(0);
    }
    if inherited.runner.is_some() {
        sys::close_all_but(&[RUNNER_FD, report.as_raw_fd()]);
    } else {
        sys::close_all_but(&[report.as_raw_fd()]);
    }
    sys::set_name(c"cynode-exec");
    if sys::become_subreaper().is_err() {
        sys::exit_now(70);
    }
    rustix::process::umask(Mode::from_raw_mode(0o022));
    if let Err(error) = rustix::process::chdir(&command.cwd) {
        send_report(Report::CwdFailed {
            errno: error.raw_os_error(),
        });
        sys::exit_now(0);
    }
    let main = match start(command) {
        Ok(pid) => pid,
        Err(errno) => {
            send_report(Report::StartFailed { errno });
            sys::exit_now(0);
        }
    };
    sys::close_standard_streams();
    sys::close_all_but(&[report.as_raw_fd()]);
    send_report(Report::Started { pid: main });
    loop {
        match sys::wait_any(true) {
            WaitOutcome::Child(pid, status) if pid == main => send_report(Report::Ended { status }),
            WaitOutcome::Child(..) | WaitOutcome::NoneReady => {}
            WaitOutcome::NoChildren => sys::exit_now(0),
        }
    }
}

/// Searches like `execvp`: skips missing candidates, and remembers one that is not executable.
fn start(command: &PreparedCommand) -> Result<i32, i32> {
    let mut errno_to_report = libc::ENOENT;
    for candidate in &command.candidates {
        // A check is far cheaper than a failing spawn.
        if command.candidates.len() > 1 && rustix::fs::access(candidate, Access::EXISTS).is_err() {
            continue;
        }
        match sys::spawn(candidate, &command.argv, &command.env) {
            Ok(pid) => return Ok(pid),
            Err(error) => match error.raw_os_error().unwrap_or(libc::EINVAL) {
                libc::ENOENT | libc::ENOTDIR if command.candidates.len() > 1 => {}
                libc::EACCES if command.candidates.len() > 1 => errno_to_report = libc::EACCES,
                errno => return Err(errno),
            },
        }
    }
    Err(errno_to_report)
}

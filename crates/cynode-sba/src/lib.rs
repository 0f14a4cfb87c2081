//! `cynode-sba`: process 1 of every sandbox, and the runner of jobs.
//!
//! Process 1 runs commands, serves files and reaps orphans for a worker, which it connects to
//! through one Unix socket. It holds no secrets and enforces no policy: it runs with the sandbox's
//! own rights, inside the hostile part of the system. It guarantees order: each command's processes
//! stay traceable, timeouts hold, and output is neither lost nor duplicated.
//!
//! A child of it, the listeners ([`listeners`]), forwards connections on loopback to the worker.
//!
//! The runner ([`runner`]) works one job, on the same code and with the same guarantees.
//!
//! It is a library only so that fuzz targets can call the code that parses hostile input; the
//! program is [`main`].
#![allow(
    clippy::disallowed_methods,
    reason = "every path here is inside the sandbox, opened with the sandbox's own rights"
)]

mod exec;
mod file_child;
mod files;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod link;
mod listeners;
mod peer;
mod processes;
mod relay;
mod runner;
mod spawn;
mod sys;
mod validate;

use std::{os::fd::OwnedFd, path::PathBuf, process::ExitCode, rc::Rc, time::Duration};

use cynode_sba_proto::CONTROL_SOCKET;
use tokio::io::{Interest, unix::AsyncFd};

use crate::{exec::Execs, link::Link, listeners::Listeners, validate::Format};

const USAGE: &str = "usage: cynode-sba agent [--control SOCKET] | \
                     run [--stdio | --supervised] [--job-dir DIR] [--workspace DIR] \
                     [--proxy SOCKET] | schema | validate FILE|- [--output json] | --version";
const EXIT_USAGE: u8 = 64;
const EXIT_UNSAFE: u8 = 77;

/// Runs the program.
pub fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let control = match arguments.as_slice() {
        ["--version"] => {
            #[expect(clippy::print_stdout, reason = "the answer to --version")]
            {
                println!("cynode-sba {}", env!("CARGO_PKG_VERSION"));
            }
            return ExitCode::SUCCESS;
        }
        ["schema"] => return validate::print_schema(),
        ["validate", file] if is_file(file) => return validate::run(file, Format::Text),
        ["validate", file, "--output", "json"] | ["validate", "--output", "json", file]
            if is_file(file) =>
        {
            return validate::run(file, Format::Json);
        }
        ["run", rest @ ..] => {
            return match runner::Options::parse(rest) {
                Some(options) => runner::main(&options),
                None => fail(EXIT_USAGE, USAGE),
            };
        }
        ["agent"] => PathBuf::from(CONTROL_SOCKET),
        ["agent", "--control", path] => PathBuf::from(path),
        _ => return fail(EXIT_USAGE, USAGE),
    };
    if let Err(reason) = harden() {
        return fail(EXIT_UNSAFE, &format!("refusing to run: {reason}"));
    }
    match tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
    {
        Ok(runtime) => agent(&runtime, control),
        Err(error) => fail(1, &format!("can't start: {error}")),
    }
}

/// Whether an argument names a file, or standard input.
fn is_file(argument: &str) -> bool {
    argument == "-" || !argument.starts_with('-')
}

fn fail(code: u8, message: &str) -> ExitCode {
    #[expect(clippy::print_stderr, reason = "there is no connection to a worker")]
    {
        eprintln!("cynode-sba: {message}");
    }
    ExitCode::from(code)
}

/// Refuses rights that a sandbox must not have, and protects this process from other code of the
/// same user.
fn harden() -> Result<(), String> {
    if rustix::process::geteuid().is_root() || rustix::process::getuid().is_root() {
        return Err("uid 0; the sandbox must run as an ordinary user".to_owned());
    }
    let status = std::fs::read_to_string("/proc/self/status")
        .map_err(|error| format!("can't read /proc/self/status: {error}"))?;
    for name in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        let value = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim);
        if value.is_none_or(|value| value.bytes().any(|digit| digit != b'0')) {
            return Err(format!(
                "{name} is {}; the sandbox must have no capabilities",
                value.unwrap_or("unknown")
            ));
        }
    }
    sys::set_not_dumpable().map_err(|error| format!("can't become undumpable: {error}"))?;
    if std::process::id() != 1 {
        sys::become_subreaper().map_err(|error| format!("can't become a subreaper: {error}"))?;
    }
    Ok(())
}

/// Runs process 1. The runtime is left only to fork the listeners, which have one of their own.
fn agent(runtime: &tokio::runtime::Runtime, control: PathBuf) -> ExitCode {
    let local = tokio::task::LocalSet::new();
    let execs = Rc::new(Execs::default());
    let started = local.block_on(runtime, async {
        let signals = sys::signal_fd(&[libc::SIGCHLD, libc::SIGTERM])
            .and_then(|fd| sys::watch(fd, Interest::READABLE))?;
        // Without a network namespace of its own, this would be the host's loopback.
        Ok::<_, std::io::Error>((signals, has_listeners().then(Listeners::new)))
    });
    let (signals, mut listeners) = match started {
        Ok(started) => started,
        Err(error) => return fail(1, &format!("can't watch signals: {error}")),
    };
    // Before the worker can start anything that uses them.
    if let Some(listeners) = &mut listeners {
        listeners.start(&execs.processes);
        local.block_on(runtime, listeners.ready());
    }
    local.spawn_local(Link::new(control, Rc::clone(&execs)).run());
    loop {
        match local.block_on(runtime, attend(&execs, &signals, listeners.as_mut())) {
            Need::Listeners => {
                if let Some(listeners) = &mut listeners {
                    listeners.start(&execs.processes);
                }
            }
            Need::Exit => break,
            Need::Failure(error) => return fail(1, &format!("can't read signals: {error}")),
        }
    }
    execs.processes.signal_all(libc::SIGTERM);
    local.block_on(runtime, tokio::time::sleep(Duration::from_millis(500)));
    execs.processes.signal_all(libc::SIGKILL);
    ExitCode::SUCCESS
}

/// Whether this agent starts listeners: as process 1 of a sandbox.
fn has_listeners() -> bool {
    std::process::id() == 1
}

/// What process 1 has to do outside of the runtime.
enum Need {
    Listeners,
    Exit,
    Failure(std::io::Error),
}

/// Handles signals.
async fn attend(
    execs: &Execs,
    signals: &AsyncFd<OwnedFd>,
    mut listeners: Option<&mut Listeners>,
) -> Need {
    loop {
        let received = tokio::select! {
            received = signals.async_io(Interest::READABLE, sys::read_signal) => received,
            () = due(listeners.as_deref_mut()) => return Need::Listeners,
        };
        match received {
            Ok(received) if received.signal == libc::SIGCHLD => {
                execs.processes.reap();
                if let Some(listeners) = &listeners {
                    listeners.kill_stopped();
                }
            }
            Ok(received) if received.sender == Some(0) => return Need::Exit,
            // SIGTERM from inside the sandbox: hostile or mistaken, but not the owner of this
            // sandbox.
            Ok(_) => {}
            Err(error) => return Need::Failure(error),
        }
    }
}

async fn due(listeners: Option<&mut Listeners>) {
    match listeners {
        Some(listeners) => listeners.due().await,
        None => std::future::pending().await,
    }
}

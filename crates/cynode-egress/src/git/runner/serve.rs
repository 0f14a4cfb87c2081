//! The runner process: takes commands, starts git, kills what the role no longer waits for.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{net::UnixDatagram as StdDatagram, process::CommandExt as _},
    },
    path::PathBuf,
    process::{ExitCode, Stdio},
    sync::Arc,
    time::Duration,
};

use rustix::process::{DumpableBehavior, Pid, Signal, kill_process_group, set_dumpable_behavior};
use tokio::{
    io::AsyncReadExt as _,
    net::{UnixDatagram, UnixStream},
};
use tokio_util::task::TaskTracker;

use super::{
    environment::{Layout, invocation, measure},
    launch::{self, LAUNCH, command, launcher_args, own_program},
    wire::{self, MAX_DATAGRAM_BYTES, RunRequest, RunnerReply, RunnerRequest, RunnerSettings},
};

/// The hidden subcommand `egress-runner`: the process that runs git for the role that started it.
/// Its standard input is a socket of that role. Must not be called within an async runtime.
#[must_use]
pub fn run_runner(args: &[OsString]) -> ExitCode {
    let result = match args.split_first() {
        Some((first, rest)) if first == LAUNCH => Err(launch::launch(rest)),
        Some(_) => Err(io::Error::from(io::ErrorKind::InvalidInput)),
        None => run_until_closed(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            drop(io::Write::write_fmt(
                &mut io::stderr(),
                format_args!("cynode egress-runner: {error}\n"),
            ));
            ExitCode::FAILURE
        }
    }
}

fn run_until_closed() -> io::Result<()> {
    // Other processes of this user run git.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    let control = io::stdin().as_fd().try_clone_to_owned()?;
    // One thread: git is killed when the thread that started it ends.
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(serve(control))
}

/// How long commands may take to end after the role is gone.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// What every command needs.
struct Runner {
    settings: RunnerSettings,
    layout: Layout,
    /// This program, for the launcher and the credential helper.
    program: PathBuf,
    _program: OwnedFd,
}

/// Serves a role until it is gone.
pub(super) async fn serve(control: OwnedFd) -> io::Result<()> {
    let control = StdDatagram::from(control);
    control.set_nonblocking(true)?;
    let control = UnixDatagram::from_std(control)?;
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    let mut runner: Option<Arc<Runner>> = None;
    let commands = TaskTracker::new();
    loop {
        let Some((request, descriptors)) =
            wire::receive::<RunnerRequest>(&control, &mut buffer).await?
        else {
            // The role is gone: every command sees the end of its own socket.
            commands.close();
            drop(tokio::time::timeout(END_TIMEOUT, commands.wait()).await);
            return Ok(());
        };
        let mut descriptors = descriptors.into_iter();
        let Some(reply) = descriptors.next() else {
            continue;
        };
        let reply = stream_of(reply)?;
        let streams: Vec<OwnedFd> = descriptors.collect();
        let Some(runner) = &runner else {
            let outcome = match request {
                RunnerRequest::Configure(settings) => match Runner::open(settings) {
                    Ok(opened) => {
                        runner = Some(Arc::new(opened));
                        RunnerReply::Done
                    }
                    Err(error) => failed(error),
                },
                _ => failed("the runner is not configured"),
            };
            answer(reply, outcome).await;
            continue;
        };
        let runner = Arc::clone(runner);
        if let RunnerRequest::Run(run) = request {
            commands.spawn(async move { runner.run(*run, reply, streams).await });
        } else {
            tokio::task::spawn_blocking(move || {
                let outcome = runner.perform(request, streams);
                tokio::runtime::Handle::current().block_on(answer(reply, outcome));
            });
        }
    }
}

fn stream_of(descriptor: OwnedFd) -> io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(descriptor);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

fn failed(reason: impl ToString) -> RunnerReply {
    RunnerReply::Failed(reason.to_string())
}

async fn answer(mut to: UnixStream, reply: RunnerReply) {
    // Whoever asked may be gone.
    drop(wire::reply(&mut to, &reply).await);
}

impl Runner {
    fn open(settings: RunnerSettings) -> io::Result<Self> {
        let layout = Layout::new(&settings);
        layout.open()?;
        let (descriptor, program) = own_program()?;
        Ok(Self {
            settings,
            layout,
            program,
            _program: descriptor,
        })
    }

    /// Requests that start no program.
    fn perform(&self, request: RunnerRequest, streams: Vec<OwnedFd>) -> RunnerReply {
        let done = |result: io::Result<()>| match result {
            Ok(()) => RunnerReply::Done,
            Err(error) => failed(error),
        };
        match request {
            RunnerRequest::Prepare { mirror } => done(self.layout.prepare(&mirror)),
            RunnerRequest::Accept { mirror, quarantine } => {
                done(self.layout.accept(&mirror, &quarantine))
            }
            RunnerRequest::Forget { mirror, name } => done(self.layout.forget(&mirror, &name)),
            RunnerRequest::Scratch { mirror, name } => done(
                self.layout
                    .scratch(&mirror, &name)
                    .and_then(fs_err::create_dir_all),
            ),
            RunnerRequest::Remove { mirror } => done(self.layout.remove(&mirror)),
            RunnerRequest::Measure { mirror } => {
                let measured = self.layout.mirror(&mirror).and_then(|path| measure(&path));
                match measured {
                    Ok((bytes, packs)) => RunnerReply::Measured { bytes, packs },
                    Err(error) => failed(error),
                }
            }
            RunnerRequest::Read { mirror, name, file } => {
                let Some(output) = streams.into_iter().next() else {
                    return failed("a file without a stream");
                };
                match self.layout.open_scratch(&mirror, &name, &file) {
                    Ok(file) => self.copy(file, output),
                    Err(error) => failed(error),
                }
            }
            RunnerRequest::Configure(_) | RunnerRequest::Run(_) => failed("unexpected"),
        }
    }

    /// Copies a file in the background, because its reader waits for its length first.
    fn copy(&self, mut file: fs_err::File, output: OwnedFd) -> RunnerReply {
        let length = match file.metadata() {
            Ok(metadata) if metadata.len() <= self.settings.file_bytes => metadata.len(),
            Ok(_) => return failed("the file is too large"),
            Err(error) => return failed(error),
        };
        std::thread::spawn(move || {
            let mut output = fs_err::File::from_parts(std::fs::File::from(output), "pipe");
            // A reader that left, or a file that was cut off: the reader counts the bytes.
            drop(io::copy(&mut file, &mut output));
        });
        RunnerReply::Length(length)
    }

    /// Runs one command. Ends it when its time is over, or when the role has dropped it.
    async fn run(&self, request: RunRequest, mut reply: UnixStream, streams: Vec<OwnedFd>) {
        let timeout = Duration::from_millis(request.timeout_ms);
        let mut child = match self.start(&request, streams) {
            Ok(child) => child,
            Err(error) => return answer(reply, failed(error)).await,
        };
        let group = child
            .id()
            .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        // The child is not reaped yet, so the group is still its own.
        let kill = || group.map(|group| kill_process_group(group, Signal::KILL));
        let mut byte = [0; 1];
        let outcome = tokio::select! {
            status = child.wait() => match status {
                Ok(status) => status.code().map_or(RunnerReply::Killed, RunnerReply::Exit),
                Err(error) => failed(error),
            },
            () = tokio::time::sleep(timeout) => {
                kill();
                drop(child.wait().await);
                RunnerReply::Timeout
            }
            // The role sends nothing: this is the end of its side.
            _ = reply.read(&mut byte) => {
                kill();
                drop(child.wait().await);
                return;
            }
        };
        answer(reply, outcome).await;
    }

    fn start(
        &self,
        request: &RunRequest,
        streams: Vec<OwnedFd>,
    ) -> io::Result<tokio::process::Child> {
        let [stdin, stdout, stderr] = <[OwnedFd; 3]>::try_from(streams)
            .map_err(|_| io::Error::other("a command without its streams"))?;
        let helper = format!("{} git-credential", self.program.display());
        let invocation = invocation(&self.layout, request, &helper)?;
        let mut child = if self.settings.launches {
            let mut launcher = command(&self.program);
            launcher
                .arg0("cynode")
                .args(launcher_args(
                    &self.settings,
                    request.timeout_ms.div_ceil(1_000),
                ))
                .arg(&self.settings.git);
            launcher
        } else {
            command(&self.settings.git)
        };
        child
            .args(invocation.args)
            .env_clear()
            .envs(invocation.environment)
            .current_dir(self.layout.home())
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::from(stdout))
            .stderr(Stdio::from(stderr))
            .process_group(0);
        let mut child = tokio::process::Command::from(child);
        child.kill_on_drop(true).spawn()
    }
}

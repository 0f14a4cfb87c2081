//! A runtime without containers, for tests of the code above the trait: a "container" is a plain
//! host process.
//!
//! It isolates nothing. It passes the same contract suite as Podman, and can be told to fail or
//! time out.

use std::{
    collections::{BTreeMap, HashMap},
    pin::Pin,
    process::Stdio,
    sync::Arc,
    task::{Context, Poll},
};

use async_trait::async_trait;
use bytes::Bytes;
use cynode_api::{LocalImage, SignalName, Stream};
use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use tokio::{
    io::AsyncRead,
    process::Child,
    sync::{mpsc, watch},
};
use tokio_util::io::ReaderStream;

use super::{
    Container, ExecSpec, IdSpace, Image, Runtime, RuntimeError, RuntimeExec, RuntimeExecState, Spec,
};
use crate::process;

/// A failure to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call of this name fails with `Refused`.
    Refuse(&'static str),
    /// The call of this name times out.
    Hang(&'static str),
}

#[derive(Clone, Debug, Default)]
pub struct FakeImage {
    pub labels: BTreeMap<String, String>,
    pub env: Vec<(String, String)>,
}

#[derive(Debug, Default)]
pub struct Fake {
    images: BTreeMap<String, FakeImage>,
    containers: Mutex<HashMap<String, FakeContainer>>,
    execs: Mutex<HashMap<String, watch::Receiver<RuntimeExecState>>>,
    fault: Mutex<Option<Fault>>,
    counter: std::sync::atomic::AtomicU64,
}

#[derive(Debug)]
struct FakeContainer {
    id: String,
    spec: Spec,
    state: Option<watch::Receiver<RuntimeExecState>>,
}

impl Fake {
    #[must_use]
    pub fn new(images: impl IntoIterator<Item = (String, FakeImage)>) -> Self {
        Self {
            images: images.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Makes the next matching call fail.
    pub fn inject(&self, fault: Fault) {
        *self.fault.lock() = Some(fault);
    }

    fn check(&self, call: &'static str) -> Result<(), RuntimeError> {
        let mut fault = self.fault.lock();
        match *fault {
            Some(Fault::Refuse(name)) if name == call => {
                *fault = None;
                Err(RuntimeError::Refused {
                    call,
                    message: "injected fault".to_owned(),
                })
            }
            Some(Fault::Hang(name)) if name == call => {
                *fault = None;
                Err(RuntimeError::Timeout {
                    call,
                    limit: std::time::Duration::ZERO,
                })
            }
            _ => Ok(()),
        }
    }

    fn number(&self) -> u64 {
        self.counter
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    fn running_pid(&self, name: &str) -> Result<i32, RuntimeError> {
        let containers = self.containers.lock();
        let entry = containers
            .get(name)
            .ok_or_else(|| RuntimeError::NotFound(name.to_owned()))?;
        match entry.state.as_ref().map(|state| *state.borrow()) {
            Some(RuntimeExecState {
                running: true, pid, ..
            }) => Ok(pid),
            _ => Err(RuntimeError::Refused {
                call: "exec",
                message: "the container is not running".to_owned(),
            }),
        }
    }
}

fn spawn(
    call: &'static str,
    argv: &[String],
    env: &[(String, String)],
    cwd: Option<&str>,
    piped: bool,
) -> Result<Child, RuntimeError> {
    let (program, arguments) = argv.split_first().ok_or_else(|| RuntimeError::Refused {
        call,
        message: "no command".to_owned(),
    })?;
    let mut command = process::command(program);
    command
        .args(arguments)
        .env_clear()
        .envs(env.iter().cloned())
        .process_group(0)
        .kill_on_drop(true);
    if let Some(cwd) = cwd.filter(|cwd| std::path::Path::new(cwd).is_dir()) {
        command.current_dir(cwd);
    }
    let stream = || if piped { Stdio::piped() } else { Stdio::null() };
    command.stdin(stream()).stdout(stream()).stderr(stream());
    command.spawn().map_err(|error| RuntimeError::Refused {
        call,
        message: format!("{program}: executable file not found or not runnable: {error}"),
    })
}

/// Tracks a child to its exit.
fn follow(mut child: Child) -> watch::Receiver<RuntimeExecState> {
    let pid = child.id().map_or(0, u32::cast_signed);
    let (sender, receiver) = watch::channel(RuntimeExecState {
        running: true,
        exit_code: None,
        pid,
    });
    tokio::spawn(async move {
        let status = child.wait().await;
        let exit_code = status.ok().map(|status| {
            use std::os::unix::process::ExitStatusExt as _;
            i64::from(
                status
                    .code()
                    .unwrap_or_else(|| 128 + status.signal().unwrap_or_default()),
            )
        });
        // There may be no receiver left.
        let _unsent = sender.send(RuntimeExecState {
            running: false,
            exit_code,
            pid,
        });
    });
    receiver
}

fn container(name: &str, entry: &FakeContainer) -> Container {
    let state = entry.state.as_ref().map(|state| *state.borrow());
    let running = state.is_some_and(|state| state.running);
    Container {
        id: entry.id.clone(),
        name: name.to_owned(),
        running,
        pid: state.filter(|_| running).map_or(0, |state| state.pid),
        exit_code: state.and_then(|state| state.exit_code),
        labels: entry.spec.labels.clone(),
    }
}

#[async_trait]
impl Runtime for Fake {
    async fn ping(&self) -> Result<(), RuntimeError> {
        self.check("ping")
    }

    async fn ids(&self) -> Result<IdSpace, RuntimeError> {
        self.check("ids")?;
        Ok(IdSpace::Own)
    }

    async fn image(&self, reference: &str) -> Result<Image, RuntimeError> {
        self.check("image")?;
        let image = self
            .images
            .get(reference)
            .ok_or_else(|| RuntimeError::NotFound(reference.to_owned()))?;
        Ok(Image {
            id: reference.to_owned(),
            digest: reference.to_owned(),
            labels: image.labels.clone(),
            env: image.env.clone(),
        })
    }

    async fn images(&self) -> Result<Vec<LocalImage>, RuntimeError> {
        self.check("images")?;
        let local = |(name, image): (&String, &FakeImage)| LocalImage {
            reference: name.clone(),
            digest: name.clone(),
            labels: image.labels.clone(),
        };
        Ok(self.images.iter().map(local).collect())
    }

    async fn create(&self, spec: &Spec) -> Result<String, RuntimeError> {
        self.check("create")?;
        if !self.images.contains_key(&spec.image_id) {
            return Err(RuntimeError::NotFound(spec.image_id.clone()));
        }
        let mut containers = self.containers.lock();
        if containers.contains_key(&spec.name) {
            return Err(RuntimeError::NameInUse(spec.name.clone()));
        }
        let id = format!("{:064x}", self.number());
        containers.insert(
            spec.name.clone(),
            FakeContainer {
                id: id.clone(),
                spec: spec.clone(),
                state: None,
            },
        );
        Ok(id)
    }

    async fn start(&self, name: &str) -> Result<(), RuntimeError> {
        self.check("start")?;
        let mut containers = self.containers.lock();
        let entry = containers
            .get_mut(name)
            .ok_or_else(|| RuntimeError::NotFound(name.to_owned()))?;
        if entry
            .state
            .as_ref()
            .is_some_and(|state| state.borrow().running)
        {
            return Ok(());
        }
        entry.state = Some(follow(spawn(
            "start",
            &entry.spec.argv,
            &entry.spec.env,
            None,
            false,
        )?));
        Ok(())
    }

    async fn inspect(&self, name: &str) -> Result<Container, RuntimeError> {
        self.check("inspect")?;
        self.containers
            .lock()
            .get(name)
            .map(|entry| container(name, entry))
            .ok_or_else(|| RuntimeError::NotFound(name.to_owned()))
    }

    async fn list(&self, label: &str, value: &str) -> Result<Vec<Container>, RuntimeError> {
        self.check("list")?;
        Ok(self
            .containers
            .lock()
            .iter()
            .filter(|(_, entry)| {
                entry
                    .spec
                    .labels
                    .get(label)
                    .is_some_and(|found| found == value)
            })
            .map(|(name, entry)| container(name, entry))
            .collect())
    }

    async fn kill(&self, name: &str, signal: &str) -> Result<(), RuntimeError> {
        self.check("kill")?;
        let pid = self.running_pid(name)?;
        let number = signal
            .parse::<SignalName>()
            .map_err(|message| RuntimeError::Refused {
                call: "kill",
                message,
            })?
            .number();
        process::kill(pid, number);
        Ok(())
    }

    async fn remove(&self, name: &str) -> Result<(), RuntimeError> {
        self.check("remove")?;
        let entry = self.containers.lock().remove(name);
        if let Some(mut state) = entry.and_then(|entry| entry.state) {
            let RuntimeExecState { pid, running, .. } = *state.borrow();
            if running {
                process::kill(pid, 9);
                drop(state.wait_for(|state| !state.running).await);
            }
        }
        Ok(())
    }

    async fn exec(&self, name: &str, spec: &ExecSpec) -> Result<RuntimeExec, RuntimeError> {
        self.check("exec")?;
        self.running_pid(name)?;
        let mut child = spawn("exec", &spec.argv, &spec.env, Some(&spec.cwd), true)?;
        let missing = || RuntimeError::Refused {
            call: "exec",
            message: "a stream is missing".to_owned(),
        };
        let (stdin, stdout, stderr) = (
            child.stdin.take().ok_or_else(missing)?,
            child.stdout.take().ok_or_else(missing)?,
            child.stderr.take().ok_or_else(missing)?,
        );
        let id = format!("exec-{}", self.number());
        self.execs.lock().insert(id.clone(), follow(child));
        let input: Pin<Box<dyn tokio::io::AsyncWrite + Send>> = if spec.stdin {
            Box::pin(ChildInput(Some(stdin)))
        } else {
            Box::pin(tokio::io::sink())
        };
        Ok(RuntimeExec {
            id,
            input,
            output: Box::pin(merge(stdout, stderr)),
        })
    }

    async fn exec_state(&self, id: &str) -> Result<RuntimeExecState, RuntimeError> {
        self.check("exec_state")?;
        self.execs
            .lock()
            .get(id)
            .map(|state| *state.borrow())
            .ok_or_else(|| RuntimeError::NotFound(id.to_owned()))
    }

    async fn exec_resize(&self, id: &str, _columns: u16, _rows: u16) -> Result<(), RuntimeError> {
        self.check("exec_resize")?;
        if self.execs.lock().contains_key(id) {
            Ok(())
        } else {
            Err(RuntimeError::NotFound(id.to_owned()))
        }
    }

    async fn close(&self) {}
}

/// Merges both streams in order of arrival.
fn merge(
    stdout: impl AsyncRead + Send + Unpin + 'static,
    stderr: impl AsyncRead + Send + Unpin + 'static,
) -> impl futures_util::Stream<Item = Result<(Stream, Bytes), RuntimeError>> + Send {
    let (sender, receiver) = mpsc::channel(4);
    let sender = Arc::new(sender);
    let pump = |reader: Box<dyn AsyncRead + Send + Unpin>, kind: Stream| {
        let sender = Arc::clone(&sender);
        tokio::spawn(async move {
            let mut pieces = ReaderStream::new(reader);
            while let Some(Ok(piece)) = pieces.next().await {
                if sender.send(Ok((kind, piece))).await.is_err() {
                    return;
                }
            }
        });
    };
    pump(Box::new(stdout), Stream::Stdout);
    pump(Box::new(stderr), Stream::Stderr);
    stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|piece| (piece, receiver))
    })
}

/// Standard input of a process; `shutdown` closes it, as dropping it does.
struct ChildInput(Option<tokio::process::ChildStdin>);

impl tokio::io::AsyncWrite for ChildInput {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        match &mut self.0 {
            Some(stdin) => Pin::new(stdin).poll_write(context, bytes),
            None => Poll::Ready(Err(std::io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        self.0.as_mut().map_or(Poll::Ready(Ok(())), |stdin| {
            Pin::new(stdin).poll_flush(context)
        })
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.0 = None;
        Poll::Ready(Ok(()))
    }
}

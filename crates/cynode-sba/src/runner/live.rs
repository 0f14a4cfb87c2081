//! Copies the output of steps to the runner's own standard output and error as it arrives.
//!
//! Invariants: a slow or missing reader delays no step and no deadline. The queue for it is
//! bounded, because the output of a job is.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    time::Duration,
};

use cynode_api::Stream;
use rustix::fs::{FileType, Mode, OFlags, fstat};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
};

use crate::sys;

/// The runner's standard output and standard error.
#[derive(Debug)]
pub(super) struct LiveOutput {
    stdout: Option<Rc<Sink>>,
    stderr: Rc<Sink>,
}

impl LiveOutput {
    /// Without `stdout`, all output goes to standard error.
    pub(super) fn start(stdout: bool) -> Self {
        Self {
            stdout: stdout.then(|| Sink::start(&io::stdout(), 1)),
            stderr: Sink::start(&io::stderr(), 2),
        }
    }

    pub(super) fn write(&self, stream: Stream, data: &[u8]) {
        match (stream, &self.stdout) {
            (Stream::Stdout, Some(stdout)) => stdout.push(data),
            _ => self.stderr.push(data),
        }
    }

    /// The sink for the result. If standard output and standard error are the same pipe, the result
    /// is queued behind the remaining output, so that they don't mix.
    pub(super) fn stdout(&self) -> Rc<Sink> {
        match &self.stdout {
            Some(stdout) => Rc::clone(stdout),
            None if is_same_file(&io::stdout(), &io::stderr()) => Rc::clone(&self.stderr),
            None => Sink::start(&io::stdout(), 1),
        }
    }

    /// Waits up to `limit` until everything is written.
    pub(super) async fn flush(&self, limit: Duration) {
        let flushed = async {
            for sink in [Some(&self.stderr), self.stdout.as_ref()]
                .into_iter()
                .flatten()
            {
                drop(sink.flush().await);
            }
        };
        drop(tokio::time::timeout(limit, flushed).await);
    }
}

fn is_same_file(one: &impl AsFd, other: &impl AsFd) -> bool {
    fstat(one)
        .and_then(|one| Ok((one, fstat(other)?)))
        .is_ok_and(|(one, other)| (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}

/// A descriptor with a queue of output to write.
#[derive(Debug, Default)]
pub(super) struct Sink {
    queue: RefCell<VecDeque<Vec<u8>>>,
    /// A write is in progress.
    is_writing: Cell<bool>,
    /// The reader is gone.
    is_closed: Cell<bool>,
    pushed: Notify,
    written: Notify,
}

impl Sink {
    /// Starts a task that writes to the stream with this descriptor number.
    pub(super) fn start(stream: &impl AsFd, number: i32) -> Rc<Self> {
        let sink = Rc::new(Self::default());
        match SinkWriter::open(stream, number) {
            Ok(writer) => {
                tokio::task::spawn_local(Rc::clone(&sink).run(writer));
            }
            Err(_) => sink.is_closed.set(true),
        }
        sink
    }

    pub(super) fn push(&self, data: &[u8]) {
        if !self.is_closed.get() {
            self.queue.borrow_mut().push_back(data.to_vec());
            self.pushed.notify_one();
        }
    }

    /// Waits until everything is written. Fails if the reader is gone.
    pub(super) async fn flush(&self) -> io::Result<()> {
        loop {
            let written = self.written.notified();
            if self.is_closed.get() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if self.queue.borrow().is_empty() && !self.is_writing.get() {
                return Ok(());
            }
            written.await;
        }
    }

    async fn run(self: Rc<Self>, writer: SinkWriter) {
        loop {
            let next = self.queue.borrow_mut().pop_front();
            let Some(data) = next else {
                self.written.notify_waiters();
                self.pushed.notified().await;
                continue;
            };
            self.is_writing.set(true);
            let result = writer.write_all(&data).await;
            self.is_writing.set(false);
            if result.is_err() {
                self.is_closed.set(true);
                self.queue.borrow_mut().clear();
                self.written.notify_waiters();
                return;
            }
        }
    }
}

enum SinkWriter {
    /// A pipe, socket or terminal, whose writes can block.
    Waiting(AsyncFd<OwnedFd>),
    /// A file or device, whose writes don't block.
    Direct(OwnedFd),
}

impl SinkWriter {
    fn open(stream: &impl AsFd, number: i32) -> io::Result<Self> {
        let stream = stream.as_fd();
        let copy = stream.try_clone_to_owned()?;
        let kind = FileType::from_raw_mode(fstat(stream)?.st_mode);
        let fd = match kind {
            FileType::Fifo | FileType::CharacterDevice => reopened(number).unwrap_or(copy),
            FileType::Socket => copy,
            _ => return Ok(Self::Direct(copy)),
        };
        rustix::io::ioctl_fionbio(&fd, true)?;
        let direct = fd.try_clone()?;
        // epoll does not support devices such as /dev/null.
        Ok(sys::watch(fd, Interest::WRITABLE).map_or(Self::Direct(direct), Self::Waiting))
    }

    async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let write = |fd: &OwnedFd| rustix::io::write(fd, data).map_err(io::Error::from);
            let result = match self {
                Self::Waiting(fd) => fd.async_io(Interest::WRITABLE, write).await,
                Self::Direct(fd) => write(fd),
            };
            match result {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => data = &data[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Opens a pipe or terminal again, in non-blocking mode. Other processes share the inherited
/// descriptor, so its mode must not change.
fn reopened(number: i32) -> Option<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(format!("/proc/self/fd/{number}"), flags, Mode::empty()).ok()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use rustix::pipe::PipeFlags;
    use tokio::task::LocalSet;

    use super::*;

    #[tokio::test]
    async fn a_reader_that_does_not_read_blocks_nobody_and_gets_everything_later() {
        LocalSet::new()
            .run_until(async {
                let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
                let sink = Sink::start(&writer, -1);
                for byte in 0..100 {
                    sink.push(&[byte; 10_000]);
                }
                let flushed = tokio::time::timeout(Duration::from_millis(200), sink.flush());
                assert!(flushed.await.is_err());
                drop(writer);
                let read = std::thread::spawn(move || {
                    let mut read = vec![0; 1_000_000];
                    std::fs::File::from(reader)
                        .read_exact(&mut read)
                        .map(|()| read)
                });
                sink.flush().await.expect("read");
                let read = read.join().expect("the reader").expect("everything");
                assert!(
                    read.chunks(10_000)
                        .zip(0..)
                        .all(|(piece, byte)| piece == [byte; 10_000])
                );
            })
            .await;
    }

    #[tokio::test]
    async fn a_reader_that_is_gone_ends_the_copying() {
        LocalSet::new()
            .run_until(async {
                let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
                drop(reader);
                let sink = Sink::start(&writer, -1);
                sink.push(b"lost");
                assert!(sink.flush().await.is_err());
                sink.push(b"lost");
                assert!(sink.queue.borrow().is_empty());
            })
            .await;
    }

    #[tokio::test]
    async fn files_and_devices_are_written_directly() {
        LocalSet::new()
            .run_until(async {
                let file = tempfile::NamedTempFile::new().expect("a file");
                let null = std::fs::OpenOptions::new()
                    .write(true)
                    .open("/dev/null")
                    .expect("opened");
                for sink in [Sink::start(file.as_file(), -1), Sink::start(&null, -1)] {
                    sink.push(b"one ");
                    sink.push(b"two");
                    sink.flush().await.expect("written");
                }
                assert_eq!(std::fs::read(file.path()).expect("read"), b"one two");
            })
            .await;
    }
}

//! Relays frames between a job's runner and the worker's connection.
//!
//! Invariants: the runner receives only complete frames, even if the worker's connection breaks in
//! the middle of one, and no frame of an older connection after one of a newer. The runner's output
//! is not read while no worker is connected, so the runner waits.

use std::{cell::Cell, io, os::fd::OwnedFd, rc::Rc};

use cynode_sba_proto::{Decoder, Frame, Reply, encode, runner::MAX_FRAME};
use tokio::{
    io::{AsyncWriteExt as _, Interest},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Mutex, Notify, mpsc},
};

use crate::link::send_reply;

const READ_BUFFER_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(crate) struct Relay {
    /// Frames for the runner. A separate task writes them, so that each is completed.
    to_runner: mpsc::Sender<Frame>,
    from_runner: Mutex<FrameReader>,
    /// Counts connections; only the newest is served.
    generation: Cell<u64>,
    replaced: Notify,
}

impl Relay {
    /// `runner` is process 1's end of the socket pair.
    pub(crate) fn new(runner: OwnedFd) -> io::Result<Rc<Self>> {
        let stream = UnixStream::from_std(runner.into())?;
        let (reader, writer) = stream.into_split();
        let (to_runner, frames) = mpsc::channel(1);
        tokio::task::spawn_local(write_frames(writer, frames));
        Ok(Rc::new(Self {
            to_runner,
            from_runner: Mutex::new(FrameReader::new(reader, Decoder::new(MAX_FRAME))),
            generation: Cell::new(0),
            replaced: Notify::new(),
        }))
    }

    /// Serves a connection of the worker until one of its ends closes or a newer one comes.
    /// `decoder` holds data that was read from the connection already.
    pub(crate) async fn serve(&self, mut stream: UnixStream, decoder: Decoder) {
        let generation = self.generation.get() + 1;
        self.generation.set(generation);
        self.replaced.notify_waiters();
        let replaced = self.replaced.notified();
        let accepted = Reply::Ok { changed: None };
        if send_reply(&mut stream, &accepted).await.is_err() {
            return;
        }
        let (reader, writer) = stream.into_split();
        let worker = FrameReader::new(reader, decoder.with_limit(MAX_FRAME));
        tokio::select! {
            () = replaced => {}
            () = self.relay_to_runner(worker, generation) => {}
            () = self.relay_to_worker(writer) => {}
        }
    }

    async fn relay_to_runner(&self, mut worker: FrameReader, generation: u64) {
        while let Ok(Some(frame)) = worker.next().await {
            let Ok(permit) = self.to_runner.reserve().await else {
                return;
            };
            // This connection may have been replaced since it was last polled.
            if self.generation.get() != generation {
                return;
            }
            permit.send(frame);
        }
    }

    async fn relay_to_worker(&self, mut worker: OwnedWriteHalf) {
        // Becomes free as soon as the older connection is dropped.
        let mut runner = self.from_runner.lock().await;
        let mut out = Vec::new();
        while let Ok(Some(frame)) = runner.next().await {
            out.clear();
            encode(&frame, &mut out);
            if worker.write_all(&out).await.is_err() {
                return;
            }
        }
    }
}

/// Writes frames to the runner until it is gone.
async fn write_frames(mut runner: OwnedWriteHalf, mut frames: mpsc::Receiver<Frame>) {
    let mut out = Vec::new();
    while let Some(frame) = frames.recv().await {
        out.clear();
        encode(&frame, &mut out);
        if runner.write_all(&out).await.is_err() {
            return;
        }
    }
}

#[derive(Debug)]
pub(crate) struct FrameReader {
    reader: OwnedReadHalf,
    decoder: Decoder,
}

impl FrameReader {
    pub(crate) const fn new(reader: OwnedReadHalf, decoder: Decoder) -> Self {
        Self { reader, decoder }
    }

    /// The next frame; `None` at the end. If the returned future is dropped, no frame is lost.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(io::Error::other)? {
                return Ok(Some(frame));
            }
            // Idle connections have no buffer.
            self.reader.ready(Interest::READABLE).await?;
            let mut buffer = vec![0; READ_BUFFER_BYTES];
            match self.reader.try_read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(count) => self.decoder.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cynode_sba_proto::MAX_WORKER_FRAME;
    use tokio::{io::AsyncReadExt as _, task::LocalSet};

    use super::*;

    /// Creates a relay; also returns the runner's end.
    fn relay() -> (Rc<Relay>, UnixStream) {
        let (ours, runner) = std::os::unix::net::UnixStream::pair().expect("a pair");
        for end in [&ours, &runner] {
            end.set_nonblocking(true).expect("non-blocking");
        }
        (
            Relay::new(ours.into()).expect("a relay"),
            UnixStream::from_std(runner).expect("registered"),
        )
    }

    /// Connects a worker and reads the answer.
    async fn connect(relay: &Rc<Relay>) -> UnixStream {
        let (ours, mut worker) = UnixStream::pair().expect("a pair");
        let relay = Rc::clone(relay);
        tokio::task::spawn_local(async move {
            relay.serve(ours, Decoder::new(MAX_WORKER_FRAME)).await;
        });
        assert!(
            matches!(read(&mut worker).await, Frame::Json(json) if json == br#"{"reply":"ok"}"#)
        );
        worker
    }

    async fn write(stream: &mut UnixStream, frame: &Frame) {
        let mut bytes = Vec::new();
        encode(frame, &mut bytes);
        stream.write_all(&bytes).await.expect("written");
    }

    /// Reads exactly one frame.
    async fn read(stream: &mut UnixStream) -> Frame {
        let whole = async {
            let length = stream.read_u32_le().await.expect("open");
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.resize(4 + length as usize, 0);
            stream.read_exact(&mut bytes[4..]).await.expect("open");
            bytes
        };
        let bytes = tokio::time::timeout(Duration::from_secs(10), whole);
        let mut decoder = Decoder::new(MAX_WORKER_FRAME);
        decoder.extend(&bytes.await.expect("in time"));
        decoder.next_frame().expect("a frame").expect("whole")
    }

    fn data(byte: u8, size: usize) -> Frame {
        Frame::Data(vec![byte; size])
    }

    async fn is_closed(mut stream: UnixStream) -> bool {
        let mut rest = Vec::new();
        let end = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut rest));
        // Closing with unread data resets the connection.
        end.await.is_ok()
    }

    #[tokio::test]
    async fn whole_frames_pass_both_ways_and_the_end_of_the_runner_closes_the_connection() {
        LocalSet::new()
            .run_until(async {
                let (relay, mut runner) = relay();
                let mut worker = connect(&relay).await;
                for size in [0, 1, 700_000] {
                    write(&mut worker, &data(1, size)).await;
                    assert!(read(&mut runner).await == data(1, size));
                    write(&mut runner, &data(2, size)).await;
                    assert!(read(&mut worker).await == data(2, size));
                }
                write(&mut runner, &Frame::End).await;
                drop(runner);
                assert_eq!(read(&mut worker).await, Frame::End);
                assert!(is_closed(worker).await);
            })
            .await;
    }

    #[tokio::test]
    async fn a_newer_connection_replaces_an_older_one_between_frames() {
        LocalSet::new()
            .run_until(async {
                let (relay, mut runner) = relay();
                let mut old = connect(&relay).await;
                // Far more than the runner's buffer holds, so that the frame is half written.
                write(&mut old, &data(1, 900_000)).await;
                runner.readable().await.expect("open");
                let mut partial = Vec::new();
                encode(&data(2, 100), &mut partial);
                old.write_all(&partial[..50]).await.expect("written");
                let mut new = connect(&relay).await;
                assert!(is_closed(old).await);
                write(&mut new, &data(3, 10)).await;
                assert!(read(&mut runner).await == data(1, 900_000));
                assert!(read(&mut runner).await == data(3, 10));
                write(&mut runner, &data(4, 10)).await;
                assert!(read(&mut new).await == data(4, 10));
            })
            .await;
    }

    #[tokio::test]
    async fn a_frame_of_the_runner_that_a_broken_connection_cut_does_not_shift_the_next() {
        LocalSet::new()
            .run_until(async {
                let (relay, mut runner) = relay();
                let mut frame = Vec::new();
                encode(&data(1, 1_000), &mut frame);
                let mut old = connect(&relay).await;
                runner.write_all(&frame[..300]).await.expect("written");
                write(&mut old, &Frame::End).await;
                assert_eq!(read(&mut runner).await, Frame::End);
                drop(old);
                let mut new = connect(&relay).await;
                runner.write_all(&frame[300..]).await.expect("written");
                assert!(read(&mut new).await == data(1, 1_000));
            })
            .await;
    }

    #[tokio::test]
    async fn without_a_worker_the_runner_is_not_read() {
        LocalSet::new()
            .run_until(async {
                let (relay, mut runner) = relay();
                drop(connect(&relay).await);
                let mut frame = Vec::new();
                encode(&data(1, 500_000), &mut frame);
                let mut sent = 0;
                let blocked = async {
                    while let Ok(count) = runner.write(&frame[sent..]).await {
                        sent += count;
                    }
                };
                assert!(
                    tokio::time::timeout(Duration::from_millis(300), blocked)
                        .await
                        .is_err()
                );
                assert!(sent < frame.len());
                let mut worker = connect(&relay).await;
                let (wrote, got) =
                    tokio::join!(runner.write_all(&frame[sent..]), read(&mut worker));
                wrote.expect("written");
                assert!(got == data(1, 500_000));
            })
            .await;
    }

    #[tokio::test]
    async fn a_frame_over_the_limit_closes_the_connection_and_no_other() {
        LocalSet::new()
            .run_until(async {
                let (relay, mut runner) = relay();
                let mut worker = connect(&relay).await;
                let mut bytes = Vec::new();
                encode(&data(1, MAX_FRAME), &mut bytes);
                worker.write_all(&bytes[..100]).await.expect("written");
                assert!(is_closed(worker).await);
                let mut worker = connect(&relay).await;
                write(&mut worker, &Frame::End).await;
                assert_eq!(read(&mut runner).await, Frame::End);
            })
            .await;
    }
}

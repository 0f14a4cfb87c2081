//! The runner's side of the protocol with the worker ([`cynode_sba_proto::runner`]), which process
//! 1 relays.
//!
//! Two tasks own the socket: one reads, one writes. Events that are not acknowledged are kept, and
//! resent when a worker attaches again.
//!
//! Invariants: each frame is written completely, and no other frame comes between those of a
//! document. After an `Attach`, the rest of the current document is dropped, and `Attached` is sent
//! before anything else.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    io,
    rc::Rc,
    time::Duration,
};

use cynode_api::{
    JobProgress,
    sba::limits::{MAX_JOB_BYTES, MAX_RESULT_BYTES},
};
use cynode_sba_proto::{
    Decoder, Frame, MAX_DATA, encode, encode_data, encode_message,
    runner::{Event, FromRunner, MAX_FRAME, ToRunner},
};
use tokio::{
    io::AsyncWriteExt as _,
    net::{UnixStream, unix::OwnedWriteHalf},
    sync::{Notify, watch},
    task::JoinHandle,
    time::Instant,
};

use super::after;
use crate::relay::FrameReader;

/// The job as the worker sent it.
#[derive(Debug)]
pub(super) struct Assignment {
    pub(super) attempt: u32,
    pub(super) in_flight: Option<u64>,
    pub(super) deadline: Instant,
    /// The JSON of the job.
    pub(super) job: Vec<u8>,
    /// The JSON of the results of finished steps.
    pub(super) finished: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Control {
    /// Events that the worker has not acknowledged.
    unacknowledged: RefCell<VecDeque<Outgoing>>,
    /// The number of the last event.
    number: Cell<u64>,
    acknowledged: watch::Sender<u64>,
    /// Number of `Attach` messages so far.
    attachments: Cell<u64>,
    has_job: watch::Sender<bool>,
    /// Set until the runner has taken it.
    assignment: RefCell<Option<Assignment>>,
    /// The latest progress that is not sent yet.
    progress: RefCell<Option<JobProgress>>,
    work: Notify,
    lost: watch::Sender<bool>,
}

#[derive(Clone, Debug)]
struct Outgoing {
    number: u64,
    event: Event,
    document: Option<Rc<[u8]>>,
}

impl Control {
    /// Starts the reading and the writing task.
    pub(super) fn start(stream: UnixStream) -> Rc<Self> {
        let control = Rc::new(Self {
            unacknowledged: RefCell::default(),
            number: Cell::new(0),
            acknowledged: watch::Sender::new(0),
            attachments: Cell::new(0),
            has_job: watch::Sender::new(false),
            assignment: RefCell::default(),
            progress: RefCell::default(),
            work: Notify::new(),
            lost: watch::Sender::new(false),
        });
        let (reader, writer) = stream.into_split();
        let reader = FrameReader::new(reader, Decoder::new(MAX_FRAME));
        control.watch(tokio::task::spawn_local(Rc::clone(&control).read(reader)));
        control.watch(tokio::task::spawn_local(Rc::clone(&control).write(writer)));
        control
    }

    /// Sets `lost` when a task ends or panics, so that the job does not wait for acknowledgements
    /// forever.
    fn watch<T: 'static>(self: &Rc<Self>, task: JoinHandle<T>) {
        let control = Rc::clone(self);
        tokio::task::spawn_local(async move {
            drop(task.await);
            control.lost.send_replace(true);
        });
    }

    /// Waits until the worker has sent the job, and takes it.
    pub(super) async fn assignment(&self) -> Assignment {
        drop(self.has_job.subscribe().wait_for(|has_job| *has_job).await);
        let assignment = self.assignment.borrow_mut().take();
        match assignment {
            Some(assignment) => assignment,
            // The assignment has been taken already.
            None => std::future::pending().await,
        }
    }

    /// Waits until process 1 has closed its end of the socket.
    pub(super) async fn lost(&self) {
        drop(self.lost.subscribe().wait_for(|lost| *lost).await);
    }

    /// Reports an event; returns its number.
    pub(super) fn report(&self, event: Event, document: Option<Vec<u8>>) -> u64 {
        let number = self.number.get() + 1;
        self.number.set(number);
        self.unacknowledged.borrow_mut().push_back(Outgoing {
            number,
            event,
            document: document.map(Rc::from),
        });
        self.work.notify_one();
        number
    }

    /// Waits until the worker has an event in its journal.
    pub(super) async fn acknowledged(&self, number: u64) {
        let mut acknowledged = self.acknowledged.subscribe();
        drop(acknowledged.wait_for(|last| *last >= number).await);
    }

    pub(super) fn progress(&self, progress: JobProgress) {
        *self.progress.borrow_mut() = Some(progress);
        self.work.notify_one();
    }

    fn acknowledge(&self, number: u64) {
        let number = number.min(self.number.get());
        let mut unacknowledged = self.unacknowledged.borrow_mut();
        while unacknowledged
            .front()
            .is_some_and(|outgoing| outgoing.number <= number)
        {
            unacknowledged.pop_front();
        }
        self.acknowledged
            .send_if_modified(|last| std::mem::replace(last, number.max(*last)) < number);
    }

    async fn read(self: Rc<Self>, mut worker: FrameReader) {
        let mut incoming = None;
        while let Ok(Some(frame)) = worker.next().await {
            match frame {
                Frame::Json(json) => match serde_json::from_slice(&json) {
                    Ok(ToRunner::Attach { received }) => {
                        incoming = None;
                        self.acknowledge(received);
                        self.attachments.set(self.attachments.get() + 1);
                        self.work.notify_one();
                    }
                    Ok(ToRunner::Job {
                        attempt,
                        in_flight,
                        remaining_ms,
                    }) if !*self.has_job.borrow() => {
                        incoming = Some(Incoming::new(attempt, in_flight, remaining_ms));
                    }
                    Ok(ToRunner::Acknowledge { number }) => self.acknowledge(number),
                    Ok(ToRunner::Job { .. } | ToRunner::Unknown) => {}
                    Err(_) => return,
                },
                Frame::Data(piece) => {
                    if incoming
                        .as_mut()
                        .is_some_and(|incoming| !incoming.add(&piece))
                    {
                        return;
                    }
                }
                Frame::End => match incoming.take().map(Incoming::end) {
                    Some(Ok(assignment)) => {
                        *self.assignment.borrow_mut() = Some(assignment);
                        self.has_job.send_replace(true);
                    }
                    Some(Err(half)) => incoming = Some(half),
                    None => {}
                },
                Frame::Output { .. } | Frame::Ack(_) => return,
            }
        }
    }

    async fn write(self: Rc<Self>, mut worker: OwnedWriteHalf) -> io::Result<()> {
        let (mut attached, mut sent) = (0, 0);
        loop {
            if self.attachments.get() != attached {
                attached = self.attachments.get();
                sent = *self.acknowledged.borrow();
                let has_job = *self.has_job.borrow();
                send(&mut worker, &FromRunner::Attached { has_job }).await?;
                continue;
            }
            if attached > 0 {
                if let Some(next) = self.next_after(sent) {
                    let event = FromRunner::Event {
                        number: next.number,
                        event: next.event,
                    };
                    send(&mut worker, &event).await?;
                    if let Some(document) = next.document {
                        self.send_document(&mut worker, &document, attached).await?;
                    }
                    sent = next.number;
                    continue;
                }
                let progress = self.progress.borrow_mut().take();
                if let Some(progress) = progress {
                    send(&mut worker, &FromRunner::Progress { progress }).await?;
                    continue;
                }
            }
            self.work.notified().await;
        }
    }

    /// The first unacknowledged event after this number.
    fn next_after(&self, number: u64) -> Option<Outgoing> {
        let unacknowledged = self.unacknowledged.borrow();
        let mut later = unacknowledged.iter();
        later.find(|outgoing| outgoing.number > number).cloned()
    }

    /// Sends a document. Stops if the worker attaches again.
    async fn send_document(
        &self,
        worker: &mut OwnedWriteHalf,
        document: &[u8],
        attached: u64,
    ) -> io::Result<()> {
        let mut out = Vec::new();
        for piece in document.chunks(MAX_DATA) {
            if self.attachments.get() != attached {
                return Ok(());
            }
            out.clear();
            encode_data(piece, &mut out);
            worker.write_all(&out).await?;
        }
        if self.attachments.get() == attached {
            out.clear();
            encode(&Frame::End, &mut out);
            worker.write_all(&out).await?;
        }
        Ok(())
    }
}

async fn send(worker: &mut OwnedWriteHalf, message: &FromRunner) -> io::Result<()> {
    let mut out = Vec::new();
    encode_message(message, &mut out);
    worker.write_all(&out).await
}

/// A job whose documents are still arriving.
#[derive(Debug)]
struct Incoming {
    assignment: Assignment,
    /// The first document is complete.
    has_job: bool,
}

impl Incoming {
    fn new(attempt: u32, in_flight: Option<u64>, remaining_ms: u64) -> Self {
        Self {
            assignment: Assignment {
                attempt,
                in_flight,
                deadline: after(Duration::from_millis(remaining_ms)),
                job: Vec::new(),
                finished: Vec::new(),
            },
            has_job: false,
        }
    }

    /// Appends to the current document. Returns false if it is too long.
    fn add(&mut self, piece: &[u8]) -> bool {
        let (document, limit) = if self.has_job {
            (&mut self.assignment.finished, MAX_RESULT_BYTES)
        } else {
            (&mut self.assignment.job, MAX_JOB_BYTES)
        };
        document.extend_from_slice(piece);
        document.len() <= limit
    }

    fn end(self) -> Result<Assignment, Self> {
        if self.has_job {
            Ok(self.assignment)
        } else {
            Err(Self {
                has_job: true,
                ..self
            })
        }
    }
}

#[cfg(test)]
mod tests;

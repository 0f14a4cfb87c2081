use tokio::task::LocalSet;

use super::*;

/// A worker that is connected directly, without process 1.
struct Worker {
    stream: UnixStream,
    decoder: Decoder,
}

/// A message, with as much of its document as was received.
#[derive(Debug, PartialEq)]
enum Said {
    Message(FromRunner),
    Data(usize),
    End,
}

impl Worker {
    async fn say(&mut self, message: &ToRunner) {
        let mut out = Vec::new();
        encode_message(message, &mut out);
        self.stream.write_all(&out).await.expect("sent");
    }

    async fn send(&mut self, frame: &Frame) {
        let mut out = Vec::new();
        encode(frame, &mut out);
        self.stream.write_all(&out).await.expect("sent");
    }

    async fn send_document(&mut self, json: &[u8]) {
        for piece in json.chunks(7) {
            self.send(&Frame::Data(piece.to_vec())).await;
        }
        self.send(&Frame::End).await;
    }

    async fn next(&mut self) -> Said {
        use tokio::io::AsyncReadExt as _;
        loop {
            match self.decoder.next_frame().expect("frames") {
                Some(Frame::Json(json)) => {
                    return Said::Message(serde_json::from_slice(&json).expect("a message"));
                }
                Some(Frame::Data(data)) => return Said::Data(data.len()),
                Some(Frame::End) => return Said::End,
                Some(other) => panic!("unexpected {other:?}"),
                None => {}
            }
            let mut buffer = vec![0; MAX_DATA];
            let read = tokio::time::timeout(Duration::from_secs(10), self.stream.read(&mut buffer));
            let count = read.await.expect("in time").expect("open");
            assert_ne!(count, 0, "closed");
            self.decoder.extend(&buffer[..count]);
        }
    }

    async fn expect_event(&mut self, number: u64, event: Event) {
        let expected = FromRunner::Event { number, event };
        assert_eq!(self.next().await, Said::Message(expected));
    }

    async fn attach(&mut self, received: u64, has_job: bool) {
        self.say(&ToRunner::Attach { received }).await;
        let attached = FromRunner::Attached { has_job };
        while self.next().await != Said::Message(attached.clone()) {}
    }
}

async fn with_worker<F: Future<Output = ()>>(test: impl FnOnce(Rc<Control>, Worker) -> F) {
    LocalSet::new()
        .run_until(async {
            let (runner, stream) = UnixStream::pair().expect("a pair");
            let decoder = Decoder::new(MAX_FRAME);
            test(Control::start(runner), Worker { stream, decoder }).await;
        })
        .await;
}

const JOB: ToRunner = ToRunner::Job {
    attempt: 2,
    in_flight: Some(1),
    remaining_ms: 60_000,
};

#[tokio::test]
async fn a_job_whose_documents_were_interrupted_is_sent_again() {
    with_worker(|control, mut worker| async move {
        worker.attach(0, false).await;
        worker.say(&JOB).await;
        worker.send_document(b"an earlier").await;
        worker.send(&Frame::Data(b"[half".to_vec())).await;
        worker.attach(0, false).await;
        // Late frames of the earlier connection are ignored.
        worker.send_document(b"late").await;
        worker.say(&JOB).await;
        worker.send_document(b"the job").await;
        worker.send_document(b"[]").await;
        let assignment = control.assignment().await;
        assert_eq!((assignment.attempt, assignment.in_flight), (2, Some(1)));
        assert_eq!(
            (&assignment.job[..], &assignment.finished[..]),
            (&b"the job"[..], &b"[]"[..])
        );
        worker.attach(0, true).await;
        // A second job is ignored.
        worker.say(&JOB).await;
        worker.send_document(b"another").await;
        worker.send_document(b"[]").await;
        worker.attach(0, true).await;
    })
    .await;
}

#[tokio::test]
async fn events_are_repeated_until_they_are_acknowledged() {
    with_worker(|control, mut worker| async move {
        control.report(Event::Accepted, None);
        let started = control.report(Event::StepStarted { index: 0 }, None);
        worker.attach(0, false).await;
        worker.expect_event(1, Event::Accepted).await;
        worker.attach(0, false).await;
        worker.expect_event(1, Event::Accepted).await;
        worker
            .expect_event(2, Event::StepStarted { index: 0 })
            .await;
        worker.say(&ToRunner::Acknowledge { number: 1 }).await;
        let waits = tokio::time::timeout(Duration::from_millis(50), control.acknowledged(started));
        assert!(waits.await.is_err());
        worker.attach(1, false).await;
        worker
            .expect_event(2, Event::StepStarted { index: 0 })
            .await;
        // More than there is counts as all.
        worker.say(&ToRunner::Acknowledge { number: 99 }).await;
        control.acknowledged(started).await;
        control.report(Event::StepEnded { index: 0 }, Some(b"{}".to_vec()));
        worker.expect_event(3, Event::StepEnded { index: 0 }).await;
        assert_eq!(worker.next().await, Said::Data(2));
        assert_eq!(worker.next().await, Said::End);
        worker.attach(3, false).await;
        assert!(control.unacknowledged.borrow().is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_document_that_an_attach_interrupts_begins_again() {
    with_worker(|control, mut worker| async move {
        // Far more than the socket's buffer holds.
        let size = 5 << 20;
        worker.attach(0, false).await;
        control.report(Event::Result, Some(vec![b'x'; size]));
        worker.expect_event(1, Event::Result).await;
        assert_eq!(worker.next().await, Said::Data(MAX_DATA));
        worker.say(&ToRunner::Attach { received: 0 }).await;
        let mut before = 0;
        loop {
            match worker.next().await {
                Said::Data(count) => before += count,
                Said::End => panic!("the document was not dropped"),
                Said::Message(message) => {
                    assert_eq!(message, FromRunner::Attached { has_job: false });
                    break;
                }
            }
        }
        assert!(before < size - MAX_DATA, "{before}");
        worker.expect_event(1, Event::Result).await;
        let mut count = 0;
        while let Said::Data(piece) = worker.next().await {
            count += piece;
        }
        assert_eq!(count, size);
    })
    .await;
}

#[tokio::test]
async fn only_the_newest_progress_is_sent() {
    with_worker(|control, mut worker| async move {
        let progress = |step| JobProgress {
            step: Some(step),
            ..JobProgress::default()
        };
        for step in 0..10 {
            control.progress(progress(step));
        }
        worker.attach(0, false).await;
        let newest = FromRunner::Progress {
            progress: progress(9),
        };
        assert_eq!(worker.next().await, Said::Message(newest));
        control.report(Event::Accepted, None);
        worker.expect_event(1, Event::Accepted).await;
    })
    .await;
}

#[tokio::test]
async fn the_end_of_the_connection_and_broken_messages_are_noticed() {
    with_worker(|control, worker| async move {
        drop(worker);
        control.lost().await;
    })
    .await;
    with_worker(|control, mut worker| async move {
        worker.send(&Frame::Json(b"{".to_vec())).await;
        control.lost().await;
    })
    .await;
}

#[tokio::test]
async fn a_job_that_is_too_long_is_not_kept() {
    with_worker(|control, mut worker| async move {
        worker.attach(0, false).await;
        worker.say(&JOB).await;
        let sending = async {
            let mut out = Vec::new();
            encode_data(&vec![0; MAX_FRAME - 1], &mut out);
            while worker.stream.write_all(&out).await.is_ok() {}
        };
        tokio::select! {
            () = sending => {}
            () = control.lost() => {}
        }
        assert!(!*control.has_job.borrow());
    })
    .await;
}

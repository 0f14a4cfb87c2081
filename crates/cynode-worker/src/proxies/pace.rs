//! The pace of a sandbox's requests, and of the readers of answers.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};

/// Time between requests of one sandbox, and between its connections, after a burst.
pub(super) const REQUEST_INTERVAL: Duration = Duration::from_millis(5);
/// Requests, or connections, at once.
pub(super) const BURST: u32 = 400;
/// How long an answer may wait for its reader without progress.
const MAX_READER_PAUSE: Duration = Duration::from_secs(60);

/// Spreads the requests or connections of one sandbox, so that a busy loop in it costs the worker little.
#[derive(Debug, Default)]
pub(super) struct RequestRate {
    /// When the requests so far would have come at the steady rate.
    earned_at: Mutex<Option<Instant>>,
}

impl RequestRate {
    /// Waits until the next request may be answered.
    pub(super) async fn wait(&self) {
        let until = self.next(Instant::now());
        tokio::time::sleep_until(until).await;
    }

    fn next(&self, now: Instant) -> Instant {
        let mut earned_at = self.earned_at.lock();
        let earned = earned_at.map_or(now, |at| at.max(now)) + REQUEST_INTERVAL;
        *earned_at = Some(earned);
        earned
            .checked_sub(REQUEST_INTERVAL * BURST)
            .map_or(now, |at| at.max(now))
    }
}

/// A stream whose writes fail when the reader takes nothing for [`MAX_READER_PAUSE`].
#[derive(Debug)]
pub(super) struct ImpatientStream<S> {
    stream: S,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> ImpatientStream<S> {
    pub(super) const fn new(stream: S) -> Self {
        Self {
            stream,
            timer: None,
        }
    }

    fn limit<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(MAX_READER_PAUSE)));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the answer is not being read",
        )))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ImpatientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ImpatientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limit(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.limit(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[test]
    fn a_burst_of_requests_is_answered_at_once_and_then_one_by_one() {
        let rate = RequestRate::default();
        let now = Instant::now();
        for number in 0..BURST {
            assert_eq!(rate.next(now), now, "{number}");
        }
        assert_eq!(rate.next(now), now + REQUEST_INTERVAL);
        assert_eq!(rate.next(now), now + 2 * REQUEST_INTERVAL);
        // What was earned meanwhile does not exceed one burst.
        let later = now + Duration::from_secs(3_600);
        for number in 0..BURST {
            assert_eq!(rate.next(later), later, "{number}");
        }
        assert!(rate.next(later) > later);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_nobody_reads_is_given_up() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let mut stream = ImpatientStream::new(ours);
        let began = Instant::now();
        let error = stream.write_all(&[0; 64]).await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= MAX_READER_PAUSE);
    }
}

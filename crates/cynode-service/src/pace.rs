//! The pace of a connection: a client that sends a head or reads a response below a minimum rate is
//! disconnected.
//!
//! Invariant: only the client's own time counts. The clock of a head starts with its first byte;
//! the clock of a response runs only while bytes wait for the client, never while there is nothing
//! to send.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep},
};

use crate::connections::{Connection, Place};

/// For a head: the time before the minimum rate applies, the rate in bytes per second, and the
/// total time.
const HEAD_SLACK: Duration = Duration::from_secs(5);
const HEAD_RATE: u64 = 128;
const MAX_HEAD_TIME: Duration = Duration::from_secs(15);
/// For a response, while its bytes wait for the client: the same, and the longest time without
/// progress.
const ANSWER_SLACK: Duration = Duration::from_secs(120);
const ANSWER_RATE: u64 = 256;
const MAX_ANSWER_PAUSE: Duration = Duration::from_secs(60);
/// The same for event streams and upgraded connections, whose readers may pause for longer.
const MAX_STREAM_PAUSE: Duration = Duration::from_secs(600);

/// A minimum pace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// The time before the rate applies.
    pub(crate) slack: Duration,
    /// Bytes per second.
    pub(crate) rate: u64,
    /// The total time.
    pub(crate) total: Duration,
}

impl Pace {
    /// The time that `bytes` may take.
    pub(crate) fn allowance(&self, bytes: u64) -> Duration {
        let earned = bytes
            .saturating_mul(1_000)
            .checked_div(self.rate)
            .map_or(Duration::MAX, Duration::from_millis);
        self.slack.saturating_add(earned).min(self.total)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Paces {
    pub(crate) head: Pace,
    pub(crate) answer: Pace,
    pub(crate) answer_pause: Duration,
    pub(crate) stream_pause: Duration,
}

impl Default for Paces {
    fn default() -> Self {
        Self {
            head: Pace {
                slack: HEAD_SLACK,
                rate: HEAD_RATE,
                total: MAX_HEAD_TIME,
            },
            answer: Pace {
                slack: ANSWER_SLACK,
                rate: ANSWER_RATE,
                total: Duration::MAX,
            },
            answer_pause: MAX_ANSWER_PAUSE,
            stream_pause: MAX_STREAM_PAUSE,
        }
    }
}

#[derive(Debug)]
struct HeadClock {
    number: u64,
    first: Instant,
    bytes: u64,
}

#[derive(Debug, Default)]
struct ResponseClock {
    number: u64,
    bytes: u64,
    /// How long bytes have waited for the client, without the current wait.
    waited: Duration,
    since: Option<Instant>,
}

/// A connection with a minimum pace. It keeps its place in its share until dropped, even after an
/// upgrade.
#[derive(Debug)]
pub(crate) struct PacedStream {
    stream: TcpStream,
    place: Place,
    paces: Paces,
    head: Option<HeadClock>,
    head_timer: Option<Pin<Box<Sleep>>>,
    answer: ResponseClock,
    answer_timer: Option<Pin<Box<Sleep>>>,
}

impl PacedStream {
    pub(crate) fn new(stream: TcpStream, place: Place, paces: Paces) -> Self {
        Self {
            stream,
            place,
            paces,
            head: None,
            head_timer: None,
            answer: ResponseClock::default(),
            answer_timer: None,
        }
    }

    fn connection(&self) -> &Connection {
        self.place.connection()
    }

    fn count_head(&mut self, bytes: usize) {
        let Some(number) = self.connection().head().filter(|_| bytes > 0) else {
            return;
        };
        let head = self
            .head
            .take()
            .filter(|head| head.number == number)
            .unwrap_or_else(|| HeadClock {
                number,
                first: Instant::now(),
                bytes: 0,
            });
        self.head = Some(HeadClock {
            bytes: head.bytes + bytes as u64,
            ..head
        });
        self.head_timer = None;
    }

    fn poll_head(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        let Some(head) = self
            .head
            .as_ref()
            .filter(|head| self.place.connection().head() == Some(head.number))
        else {
            return Poll::Pending;
        };
        let deadline = head.first + self.paces.head.allowance(head.bytes);
        ready!(
            self.head_timer
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)))
                .as_mut()
                .poll(context)
        );
        Poll::Ready(io::Error::new(
            io::ErrorKind::TimedOut,
            "the head of a request arrived too slowly",
        ))
    }

    fn count_answer(&mut self, bytes: usize) {
        let number = self.connection().requests();
        if self.answer.number != number {
            self.answer = ResponseClock {
                number,
                ..ResponseClock::default()
            };
        }
        self.answer.bytes += bytes as u64;
        if let Some(since) = self.answer.since.take() {
            self.answer.waited += since.elapsed();
            self.answer_timer = None;
        }
    }

    fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        let streams = self.connection().streams();
        let (paces, answer) = (self.paces, &mut self.answer);
        let since = *answer.since.get_or_insert_with(Instant::now);
        let left = if streams {
            paces.stream_pause
        } else {
            paces.answer_pause.min(
                paces
                    .answer
                    .allowance(answer.bytes)
                    .saturating_sub(answer.waited),
            )
        };
        ready!(
            self.answer_timer
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(since + left)))
                .as_mut()
                .poll(context)
        );
        metrics::counter!("cynode_unread_answers_total").increment(1);
        Poll::Ready(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client is not reading its response",
        ))
    }

    fn on_write(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Ok(bytes)) => self.count_answer(bytes),
            Poll::Ready(Err(_)) => {}
            Poll::Pending => return self.poll_answer(context).map(Err),
        }
        written
    }
}

impl AsyncRead for PacedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Pending => self.poll_head(context).map(Err),
            ready @ Poll::Ready(_) => {
                self.count_head(buffer.filled().len() - before);
                ready
            }
        }
    }
}

impl AsyncWrite for PacedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.on_write(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.on_write(context, written)
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
    use super::*;

    #[test]
    fn slack_rate_and_total_bound_how_long_bytes_may_take() {
        let pace = Pace {
            slack: Duration::from_secs(5),
            rate: 100,
            total: Duration::from_secs(20),
        };
        for (bytes, seconds) in [
            (0, 5),
            (99, 5),
            (100, 6),
            (1_499, 19),
            (1_500, 20),
            (u64::MAX, 20),
        ] {
            assert_eq!(pace.allowance(bytes).as_secs(), seconds, "{bytes}");
        }
        assert_eq!(Pace { rate: 0, ..pace }.allowance(0), pace.total);
    }
}

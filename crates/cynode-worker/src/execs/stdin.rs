//! Standard input for a running command, which may not read it.

use std::time::Duration;

use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use super::Exec;

/// The outcome of offering a piece of standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StdinDelivery {
    /// The piece is in the command's pipe.
    Taken,
    /// The piece is queued and reaches the command when it reads.
    Queued,
    /// The queue is full: an earlier piece is still in it.
    QueueFull,
    /// The command accepts no more input.
    Closed,
}

impl Exec {
    /// Forwards a piece of standard input, `None` being its end, and waits up to `limit` for the
    /// command to accept it.
    pub(crate) async fn offer_stdin(
        &self,
        data: Option<Vec<u8>>,
        limit: Duration,
    ) -> StdinDelivery {
        let deadline = Instant::now() + limit;
        let Some(sender) = self.stdin.lock().clone() else {
            return StdinDelivery::Closed;
        };
        let slot = match timeout_at(deadline, sender.reserve()).await {
            Ok(Ok(slot)) => slot,
            Ok(Err(_)) => return StdinDelivery::Closed,
            Err(_) => return StdinDelivery::QueueFull,
        };
        if data.is_none() {
            self.stdin.lock().take();
        }
        let (taken, answer) = oneshot::channel();
        slot.send((data, taken));
        match timeout_at(deadline, answer).await {
            Ok(Ok(true)) => StdinDelivery::Taken,
            Ok(_) => StdinDelivery::Closed,
            Err(_) => StdinDelivery::Queued,
        }
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::ExecId;
    use time::OffsetDateTime;
    use tokio::sync::mpsc;

    use super::{
        super::{collect::SpillSpace, registry::ExecRecord, spool::Spool},
        *,
    };

    const SHORT_WAIT: Duration = Duration::from_millis(50);

    fn record(exec_id: ExecId) -> ExecRecord {
        ExecRecord {
            exec_id,
            argv: vec!["cat".to_owned()],
            argv_truncated: false,
            cwd: "/workspace".to_owned(),
            background: true,
            timeout_ms: 0,
            max_output_bytes: 0,
            fingerprint: String::new(),
            started_at: OffsetDateTime::now_utc(),
        }
    }

    #[tokio::test]
    async fn offered_input_is_accepted_queued_refused_or_too_late() {
        let directory = tempfile::tempdir().expect("a directory");
        let id = ExecId::generate();
        let spill_space = SpillSpace::new(directory.path().to_owned(), 0);
        let exec = Exec::new(
            record(id),
            Spool::new(directory.path().to_owned(), id),
            None,
            None,
            spill_space,
        );
        let piece = || Some(b"piece".to_vec());
        assert_eq!(
            exec.offer_stdin(piece(), SHORT_WAIT).await,
            StdinDelivery::Closed
        );

        let (sender, mut receiver) = mpsc::channel(1);
        *exec.stdin.lock() = Some(sender);
        let taking = async {
            let (data, taken) = receiver.recv().await.expect("a piece");
            assert_eq!(data, piece());
            taken.send(true).expect("somebody waits");
        };
        assert_eq!(
            tokio::join!(exec.offer_stdin(piece(), 100 * SHORT_WAIT), taking).0,
            StdinDelivery::Taken
        );
        // Nobody reads any more: the first piece is queued, the second does not fit.
        assert_eq!(
            exec.offer_stdin(piece(), SHORT_WAIT).await,
            StdinDelivery::Queued
        );
        assert_eq!(
            exec.offer_stdin(piece(), SHORT_WAIT).await,
            StdinDelivery::QueueFull
        );
        assert!(
            receiver.try_recv().is_ok() && receiver.try_recv().is_err(),
            "other input than the queued piece was delivered"
        );

        assert_eq!(
            exec.offer_stdin(None, SHORT_WAIT).await,
            StdinDelivery::Queued
        );
        assert_eq!(
            exec.offer_stdin(piece(), SHORT_WAIT).await,
            StdinDelivery::Closed
        );
    }
}

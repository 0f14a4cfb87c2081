//! Standard input for a command that may not read it.

use std::time::Duration;

use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use super::Exec;

/// What became of a piece of standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offered {
    /// The command's pipe has it.
    Taken,
    /// It is on its way and reaches the command when that reads.
    Waiting,
    /// Not even its way is free: an earlier piece waits there.
    Refused,
    /// The command takes no more.
    Closed,
}

impl Exec {
    /// Passes a piece of standard input on, `None` being its end, and waits so long until the command has taken it.
    pub(crate) async fn offer_stdin(&self, data: Option<Vec<u8>>, limit: Duration) -> Offered {
        let deadline = Instant::now() + limit;
        let Some(sender) = self.stdin.lock().clone() else {
            return Offered::Closed;
        };
        let room = match timeout_at(deadline, sender.reserve()).await {
            Ok(Ok(room)) => room,
            Ok(Err(_)) => return Offered::Closed,
            Err(_) => return Offered::Refused,
        };
        if data.is_none() {
            self.stdin.lock().take();
        }
        let (taken, answer) = oneshot::channel();
        room.send((data, taken));
        match timeout_at(deadline, answer).await {
            Ok(Ok(true)) => Offered::Taken,
            Ok(_) => Offered::Closed,
            Err(_) => Offered::Waiting,
        }
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::ExecId;
    use time::OffsetDateTime;
    use tokio::sync::mpsc;

    use super::{
        super::{collect::Overflow, record::ExecRecord, spool::Spool},
        *,
    };

    const SOON: Duration = Duration::from_millis(50);

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
    async fn what_is_offered_is_taken_or_waits_or_has_no_room_or_comes_too_late() {
        let directory = tempfile::tempdir().expect("a directory");
        let id = ExecId::generate();
        let overflow = Overflow::new(directory.path().to_owned(), 0);
        let exec = Exec::new(
            record(id),
            Spool::new(directory.path().to_owned(), id),
            None,
            None,
            overflow,
        );
        let piece = || Some(b"piece".to_vec());
        assert_eq!(exec.offer_stdin(piece(), SOON).await, Offered::Closed);

        let (sender, mut receiver) = mpsc::channel(1);
        *exec.stdin.lock() = Some(sender);
        let taking = async {
            let (data, taken) = receiver.recv().await.expect("a piece");
            assert_eq!(data, piece());
            taken.send(true).expect("somebody waits");
        };
        assert_eq!(
            tokio::join!(exec.offer_stdin(piece(), 100 * SOON), taking).0,
            Offered::Taken
        );
        // Nobody takes anything any more: the first one is on its way, the second one is not.
        assert_eq!(exec.offer_stdin(piece(), SOON).await, Offered::Waiting);
        assert_eq!(exec.offer_stdin(piece(), SOON).await, Offered::Refused);
        assert!(
            receiver.try_recv().is_ok() && receiver.try_recv().is_err(),
            "exactly what was said to wait"
        );

        assert_eq!(exec.offer_stdin(None, SOON).await, Offered::Waiting);
        assert_eq!(exec.offer_stdin(piece(), SOON).await, Offered::Closed);
    }
}

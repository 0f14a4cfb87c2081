//! Progress notifications: while a command runs, the last line of its output.
//!
//! The gate has authorized and recorded the exec whose output this is, and the answer of the call
//! contains it, so reading it early is no call of its own.

use std::time::Duration;

use cynode_api::{ExecId, OutputQuery, SessionId};
use parking_lot::Mutex;

use super::{Gateway, plain};

/// Bytes of output in which the last line is searched.
const TAIL_BYTES: u64 = 1_024;
/// The longest line, in characters.
const MAX_LINE: usize = 200;
/// A node that does not answer in time costs the notification its text, nothing else.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(super) struct FollowedExec {
    pub(super) session: SessionId,
    pub(super) exec: ExecId,
}

/// The command that a tool call is running, if any.
#[derive(Debug, Default)]
pub(super) struct Running(Mutex<Option<FollowedExec>>);

impl Running {
    pub(super) fn set(&self, exec: FollowedExec) {
        *self.0.lock() = Some(exec);
    }

    fn get(&self) -> Option<FollowedExec> {
        *self.0.lock()
    }
}

impl Gateway {
    /// The last line of output of the running command.
    pub(super) async fn last_line(&self, running: &Running) -> Option<String> {
        let FollowedExec { session, exec } = running.get()?;
        let orchestrator = &self.orchestrator;
        let read = async {
            let row = orchestrator.db.any_session(session).await.ok()??;
            let client = orchestrator
                .fleet
                .client(&orchestrator.db, row.node_id)
                .await
                .ok()?;
            let query = OutputQuery {
                tail_bytes: Some(TAIL_BYTES),
                max_bytes: Some(TAIL_BYTES),
                ..OutputQuery::default()
            };
            client.exec_output(session, exec, &query).await.ok()
        };
        let page = tokio::time::timeout(READ_TIMEOUT, read).await.ok()??;
        let bytes: Vec<u8> = page
            .chunks
            .into_iter()
            .flat_map(|chunk| match (chunk.data, chunk.data_b64) {
                (Some(text), _) => text.into_bytes(),
                (None, Some(bytes)) => bytes.0,
                (None, None) => Vec::new(),
            })
            .collect();
        last_line(&bytes)
    }
}

fn last_line(output: &[u8]) -> Option<String> {
    let text = plain::text(&String::from_utf8_lossy(output));
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty())?;
    Some(line.chars().take(MAX_LINE).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_plain_and_short() {
        assert_eq!(last_line(b""), None);
        assert_eq!(last_line(b"\n \n"), None);
        assert_eq!(
            last_line(b"one\n\x1b[32mtwo\x1b[0m 50%\r\x1b[Kthree\n\n"),
            Some("three".to_owned())
        );
        let long = last_line("\u{fc}".repeat(500).as_bytes()).expect("a line");
        assert_eq!(long.chars().count(), MAX_LINE);
    }
}

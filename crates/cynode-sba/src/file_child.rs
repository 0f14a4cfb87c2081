//! File operations in forked children.
//!
//! A child owns one end of a connection and serves one operation, so that the memory of the
//! operation is the child's, and an out-of-memory kill hits the child.

use std::{
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    rc::Rc,
    time::Duration,
};

use cynode_api::ErrorCode;
use cynode_sba_proto::{AgentError, Decoder, Reply};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::oneshot,
};

use crate::{
    peer::Peer,
    processes::Processes,
    sys::{self, Fork},
};

/// File operations that take longer are killed: the worker has stopped waiting long before.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(3_600);
/// Time from the worker's disconnect to killing the child that serves the connection.
const GRACE_PERIOD: Duration = Duration::from_secs(2);
/// How often to check whether a child is stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Passes the connection to a child that serves one operation; returns the child. `decoder` holds
/// data that was read from the connection already.
pub(crate) fn start(
    processes: &Rc<Processes>,
    stream: UnixStream,
    decoder: Decoder,
    serve: impl FnOnce(&mut Peer) -> io::Result<()>,
) -> Option<i32> {
    match sys::fork() {
        Ok(Fork::Child) => {
            sys::set_name(c"cynode-file");
            sys::close_all_but(&[stream.as_raw_fd()]);
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                stream.set_nonblocking(false)?;
                serve(&mut Peer::new(stream, decoder))
            }));
            sys::exit_now(i32::from(!matches!(served, Ok(Ok(())))))
        }
        Ok(Fork::Parent(pid)) => {
            let ended = processes.adopt(pid);
            let connection = sys::watch(stream.into(), Interest::READABLE).ok();
            let processes = Rc::clone(processes);
            tokio::task::spawn_local(async move {
                supervise(&processes, pid, ended, connection, OPERATION_TIMEOUT).await;
            });
            Some(pid)
        }
        Err(_) => {
            // One small frame into an empty socket buffer doesn't block.
            let refusal = AgentError {
                errno: Some("EAGAIN".to_owned()),
                ..AgentError::new(
                    ErrorCode::PidsExhausted,
                    "no process slot is free for the file operation",
                )
            };
            drop(Peer::new(stream, decoder).reply(&Reply::Error(refusal)));
            None
        }
    }
}

/// Waits for a child that serves a file operation. Kills it and its descendants when the other
/// end gives up by closing the connection, after `limit`, and immediately when the child is stopped:
/// only hostile code in the sandbox stops it, to make the caller wait forever, and a stopped child
/// can't time itself out.
async fn supervise(
    processes: &Processes,
    pid: i32,
    ended: oneshot::Receiver<i32>,
    connection: Option<AsyncFd<OwnedFd>>,
    limit: Duration,
) {
    let mut ended = std::pin::pin!(ended);
    let closed = async {
        match &connection {
            Some(connection) => closed(connection).await,
            None => std::future::pending().await,
        }
    };
    let grace = tokio::select! {
        _ = &mut ended => return,
        () = closed => GRACE_PERIOD,
        () = stopped(pid) => Duration::ZERO,
        () = tokio::time::sleep(limit) => Duration::ZERO,
    };
    drop(connection);
    if tokio::time::timeout(grace, ended).await.is_err() {
        processes.end_tree(pid).await;
    }
}

async fn stopped(pid: i32) {
    while !sys::is_stopped(pid) {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until the worker closes its end of a connection, without reading data.
async fn closed(connection: &AsyncFd<OwnedFd>) {
    loop {
        match connection.readable().await {
            Ok(mut ready) if !ready.ready().is_read_closed() => ready.clear_ready(),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A long-running child, and its connection to the worker.
    #[expect(clippy::zombie_processes, reason = "its owner reaps it")]
    fn child(
        processes: &Processes,
    ) -> (
        i32,
        oneshot::Receiver<i32>,
        AsyncFd<OwnedFd>,
        std::os::unix::net::UnixStream,
    ) {
        let child = Command::new("sleep").arg("1000").spawn().expect("started");
        let pid = child.id().cast_signed();
        let (ours, workers) = std::os::unix::net::UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("non-blocking");
        (
            pid,
            processes.adopt(pid),
            sys::watch(ours.into(), Interest::READABLE).expect("watched"),
            workers,
        )
    }

    #[tokio::test]
    async fn a_stopped_late_or_abandoned_file_operation_is_killed() {
        let hour = Duration::from_secs(3_600);
        for (reason, stop, limit, close) in [
            ("stopped", true, hour, false),
            ("late", false, Duration::from_millis(50), false),
            ("closed", false, hour, true),
        ] {
            let processes = Processes::default();
            let (pid, ended, connection, worker) = child(&processes);
            if stop {
                sys::kill(pid, libc::SIGSTOP).expect("stopped");
            }
            let worker = (!close).then_some(worker);
            supervise(&processes, pid, ended, Some(connection), limit).await;
            drop(worker);
            assert!(
                !processes.is_owned(pid) && sys::kill(pid, 0).is_err(),
                "{reason}"
            );
        }
    }

    #[tokio::test]
    async fn a_running_file_operation_is_not_killed() {
        let processes = Processes::default();
        let (pid, ended, connection, _worker) = child(&processes);
        let attending = supervise(
            &processes,
            pid,
            ended,
            Some(connection),
            Duration::from_secs(3_600),
        );
        assert!(
            tokio::time::timeout(3 * POLL_INTERVAL, attending)
                .await
                .is_err()
        );
        assert!(processes.is_owned(pid));
        processes.end_tree(pid).await;
    }
}

//! Terminals over WebSocket, with misbehaving programs and clients.

use std::{io::Write as _, time::Duration};

use anyhow::{Context as _, Result};
use cynode_api::{SessionCreate, SessionId};
use cynode_client::{Pty, PtyMessage, PtyOpen, SessionClient};
use cynode_tests::{Options, RunningWorker, World, eventually, session, sh};

const LIMIT: Duration = Duration::from_secs(60);

struct Terminals {
    client: SessionClient,
    id: SessionId,
    worker: RunningWorker,
    _world: World,
}

impl Terminals {
    async fn new() -> Result<Self> {
        Self::with(&Options::default()).await
    }

    async fn with(options: &Options) -> Result<Self> {
        let world = World::new()?;
        let worker = world.worker(options).await?;
        let client = worker.client()?;
        let id = client
            .create_session(&SessionCreate {
                pty_allowed: Some(true),
                ..session()
            })
            .await?
            .session_id;
        Ok(Self {
            client,
            id,
            worker,
            _world: world,
        })
    }

    async fn open(&self, argv: &[&str]) -> Result<Pty> {
        let argv = argv.iter().map(|&argument| argument.to_owned()).collect();
        Ok(self
            .client
            .open_pty(
                self.id,
                &PtyOpen {
                    cols: 101,
                    rows: 33,
                    argv,
                },
            )
            .await?)
    }

    async fn runs(&self, command: &str) -> Result<bool> {
        let inside = self
            .client
            .exec(
                self.id,
                &sh("for d in /proc/[0-9]*; do tr '\\0' ' ' < $d/cmdline 2>/dev/null; echo; done"),
            )
            .await?
            .stdout;
        Ok(inside.lines().any(|line| line.trim() == command))
    }

    async fn ends(&self, command: &str) -> Result<()> {
        eventually("the terminal's processes end", LIMIT, async || {
            Ok(!self.runs(command).await?)
        })
        .await
    }
}

/// Reads until a text appears, or to the end if none is given; returns the whole output.
async fn read_until(pty: &mut Pty, text: Option<&str>) -> Result<String> {
    let mut seen = String::new();
    let reading = async {
        while text.is_none_or(|text| !seen.contains(text)) {
            match pty.next().await? {
                Some(PtyMessage::Data(data)) => seen.push_str(&String::from_utf8_lossy(&data)),
                Some(PtyMessage::Ready) => {}
                Some(PtyMessage::Exit { .. }) if text.is_none() => break,
                other => anyhow::bail!("{other:?}"),
            }
        }
        Ok(())
    };
    let read = tokio::time::timeout(LIMIT, reading).await;
    read.with_context(|| format!("{text:?} was not shown in time"))?
        .with_context(|| format!("{text:?} was not shown"))?;
    Ok(seen)
}

#[tokio::test]
async fn a_terminal_has_its_size_before_its_program_looks() -> Result<()> {
    let terminals = Terminals::new().await?;
    for _ in 0..5 {
        assert_eq!(
            read_until(&mut terminals.open(&["stty", "size"]).await?, None).await?,
            "33 101\r\n"
        );
    }
    // An initial size reaches the program too.
    let mut pty = terminals
        .open(&[
            "sh",
            "-c",
            "while [ \"$(stty size)\" != '40 120' ]; do :; done; echo resized",
        ])
        .await?;
    pty.resize(120, 40).await?;
    read_until(&mut pty, Some("resized")).await?;
    Ok(())
}

#[tokio::test]
async fn a_caller_that_disconnects_while_a_terminal_opens_leaves_nothing_running() -> Result<()> {
    let terminals = Terminals::new().await?;
    let address = terminals
        .worker
        .url()?
        .trim_start_matches("http://")
        .to_owned();
    let request = format!(
        "GET /v1/worker/sessions/{}/pty?argv=sleep&argv=7777 HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {}\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        terminals.id,
        terminals.worker.token()?
    );
    for answers in (0..1_000).step_by(50) {
        let mut stream = std::net::TcpStream::connect(&address)?;
        stream.write_all(request.as_bytes())?;
        // Each waits a little longer than the one before, so that the disconnects hit every step.
        for _ in 0..answers {
            terminals.client.get_session(terminals.id).await?;
        }
        // Disconnected without a close frame.
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
        drop(stream);
    }
    // This terminal was opened after them, so theirs have been opened too, if at all.
    assert_eq!(
        read_until(&mut terminals.open(&["echo", "through"]).await?, None).await?,
        "through\r\n"
    );
    terminals.ends("sleep 7777").await
}

/// A program that never reads its input.
const DEAF: &str = "stty raw -echo; echo begun; while :; do sleep 0.1; done";

#[tokio::test]
// invariant: deadlines
async fn a_terminal_whose_program_does_not_read_can_be_left_at_once() -> Result<()> {
    let terminals = Terminals::new().await?;
    // More than the buffers on the way hold, followed by a close frame.
    let mut pty = terminals.open(&["sh", "-c", DEAF]).await?;
    read_until(&mut pty, Some("begun")).await?;
    for _ in 0..16 {
        pty.write(vec![b'x'; 60_000]).await?;
    }
    pty.close().await?;
    terminals.ends(&format!("sh -c {DEAF}")).await?;

    // More than the flow control admits: the client blocks without a close frame, and its absence
    // is still noticed.
    let mut pty = terminals.open(&["sh", "-c", DEAF]).await?;
    read_until(&mut pty, Some("begun")).await?;
    let writing = async {
        loop {
            pty.write(vec![b'x'; 60_000]).await?;
        }
    };
    let written: Result<Result<()>, _> =
        tokio::time::timeout(Duration::from_secs(5), writing).await;
    assert!(written.is_err(), "{written:?}");
    drop(pty);
    terminals.ends(&format!("sh -c {DEAF}")).await
}

#[tokio::test]
async fn a_vanished_client_is_disconnected_and_a_quiet_one_is_not() -> Result<()> {
    let terminals = Terminals::with(&Options::default().set("pty_timeout_seconds", "2")).await?;
    let mut quiet = terminals.open(&["sh"]).await?;
    // The connection stays open but nobody reads from it, as when a machine vanishes.
    let silent = terminals.open(&["sleep", "7778"]).await?;
    let missed = async {
        eventually("the terminal runs", LIMIT, async || {
            terminals.runs("sleep 7778").await
        })
        .await?;
        terminals.ends("sleep 7778").await
    };
    tokio::select! {
        missed = missed => missed?,
        ended = read_until(&mut quiet, Some("nothing says this")) => anyhow::bail!("the quiet one ended: {ended:?}"),
    }
    quiet.write("echo al''ive\n").await?;
    read_until(&mut quiet, Some("alive")).await?;
    drop(silent);
    Ok(())
}

//! The agent and its channel, with hostile peers on both ends.

use std::{
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, ExecId};
use cynode_sba_proto::{
    Decoder, ExecStart, FileOp, Frame, MAX_AGENT_FRAME, MAX_WORKER_FRAME, Reply, Request, Role,
    encode, encode_message,
};
use cynode_tests::{BASE, Options, World, eventually, exec, repository, session, sh};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
};

fn binary() -> PathBuf {
    repository().join("target/sba/cynode-sba")
}

/// An agent that runs as an ordinary process of an unprivileged user, and the socket that it
/// connects to.
struct Agent {
    child: Child,
    listener: UnixListener,
    /// Kills the agent and removes its directory even when the test is killed.
    _world: World,
}

impl Agent {
    fn start() -> Result<Self> {
        let world = World::new()?;
        let directory = world.directory();
        fs_err::set_permissions(directory, std::fs::Permissions::from_mode(0o755))?;
        let socket = directory.join("control.sock");
        let listener = UnixListener::bind(&socket)?;
        fs_err::set_permissions(&socket, std::fs::Permissions::from_mode(0o666))?;
        let program = directory.join("cynode-sba");
        fs_err::copy(binary(), &program)?;
        let mut command = Command::new(&program);
        command
            .args(["agent", "--control"])
            .arg(&socket)
            .uid(1000)
            .gid(1000)
            .stdin(Stdio::null());
        let child = command.spawn()?;
        world.kill_on_cleanup(child.id())?;
        Ok(Self {
            child,
            listener,
            _world: world,
        })
    }

    /// Accepts the next parked connection and reads its hello.
    async fn parked(&self) -> Result<Peer> {
        loop {
            let (stream, _) = tokio::time::timeout(Duration::from_secs(10), self.listener.accept())
                .await
                .context("the agent connects")??;
            let mut peer = Peer {
                stream,
                decoder: Decoder::new(MAX_AGENT_FRAME),
            };
            match peer.reply().await? {
                Reply::Hello(hello) if hello.role == Role::Request => return Ok(peer),
                // The agent exits when the watch connection closes, so it stays open for the whole
                // test.
                Reply::Hello(_) => std::mem::forget(peer),
                other => anyhow::bail!("no hello: {other:?}"),
            }
        }
    }

    fn is_alive(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

struct Peer {
    stream: UnixStream,
    decoder: Decoder,
}

impl Peer {
    async fn send(&mut self, request: &Request) -> Result<()> {
        let mut bytes = Vec::new();
        encode_message(request, &mut bytes);
        Ok(self.stream.write_all(&bytes).await?)
    }

    async fn frame(&mut self) -> Result<Option<Frame>> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(Some(frame));
            }
            let count =
                tokio::time::timeout(Duration::from_secs(10), self.stream.read(&mut buffer))
                    .await
                    .context("an answer")??;
            if count == 0 {
                return Ok(None);
            }
            self.decoder.extend(&buffer[..count]);
        }
    }

    async fn reply(&mut self) -> Result<Reply> {
        match self.frame().await?.context("a frame")? {
            Frame::Json(json) => Ok(serde_json::from_slice(&json)?),
            other => anyhow::bail!("{other:?}"),
        }
    }
}

fn start(argv: &[&str]) -> Request {
    Request::Exec(ExecStart {
        exec_id: ExecId::generate(),
        argv: argv.iter().map(|argument| (*argument).to_owned()).collect(),
        cwd: "/".to_owned(),
        env: Vec::new(),
        timeout_ms: 20_000,
        grace_ms: 500,
        drain_ms: 250,
        stdin: false,
        runner: false,
    })
}

#[tokio::test]
async fn a_bad_frame_from_the_worker_is_answered_and_harms_no_exec() -> Result<()> {
    let mut agent = Agent::start()?;
    let mut too_large = u32::try_from(MAX_WORKER_FRAME + 1)?.to_le_bytes().to_vec();
    too_large.push(1);
    let mut data = Vec::new();
    encode(&Frame::Data(b"out of turn".to_vec()), &mut data);
    let mut not_json = Vec::new();
    encode(&Frame::Json(b"{\"request\":".to_vec()), &mut not_json);
    let mut wrong_shape = Vec::new();
    encode(
        &Frame::Json(br#"{"request":"exec","argv":7}"#.to_vec()),
        &mut wrong_shape,
    );
    let mut unknown = Vec::new();
    encode(
        &Frame::Json(br#"{"request":"make_coffee"}"#.to_vec()),
        &mut unknown,
    );
    let mut deep = Vec::new();
    encode(&Frame::Json("[".repeat(100_000).into_bytes()), &mut deep);
    for (what, bytes) in [
        ("too large", too_large),
        ("out of turn", data),
        ("not JSON", not_json),
        ("wrong shape", wrong_shape),
        ("unknown", unknown),
        ("deep", deep),
        ("unknown kind", vec![1, 0, 0, 0, 77]),
        ("empty", vec![0; 4]),
    ] {
        let mut peer = agent.parked().await?;
        peer.stream.write_all(&bytes).await?;
        match peer.reply().await.with_context(|| what.to_owned())? {
            Reply::Error(error) => assert_eq!(error.code, ErrorCode::InvalidRequest, "{what}"),
            other => panic!("{what}: {other:?}"),
        }
        assert!(agent.is_alive()?, "{what}");
    }
    // Break connections at every possible place.
    let mut whole = Vec::new();
    encode_message(&start(&["true"]), &mut whole);
    for cut in [0, 1, 4, 5, 20, whole.len() - 1] {
        let mut peer = agent.parked().await?;
        peer.stream.write_all(&whole[..cut]).await?;
    }
    let mut peer = agent.parked().await?;
    peer.send(&start(&["/bin/true"])).await?;
    assert!(matches!(peer.reply().await?, Reply::Started { .. }));
    match peer.reply().await? {
        Reply::Exited(report) => assert_eq!(report.code, Some(0)),
        other => panic!("{other:?}"),
    }
    assert!(agent.is_alive()?);
    Ok(())
}

#[tokio::test]
async fn output_is_sent_again_until_it_is_acknowledged_and_then_forgotten() -> Result<()> {
    let mut agent = Agent::start()?;
    let request = start(&["/bin/sh", "-c", "echo one; echo two >&2; exit 4"]);
    let Request::Exec(exec_start) = &request else {
        unreachable!("an exec")
    };
    let exec_id = exec_start.exec_id;
    let mut peer = agent.parked().await?;
    peer.send(&request).await?;
    assert!(matches!(peer.reply().await?, Reply::Started { .. }));
    drop(peer);
    let collect = async |peer: &mut Peer| -> Result<(Vec<u64>, Option<i32>)> {
        let mut pieces = Vec::new();
        loop {
            match peer.frame().await?.context("a frame")? {
                Frame::Output { seq, .. } => pieces.push(seq),
                Frame::Json(json) => match serde_json::from_slice(&json)? {
                    Reply::Exited(report) => return Ok((pieces, report.code)),
                    other => anyhow::bail!("{other:?}"),
                },
                other => anyhow::bail!("{other:?}"),
            }
        }
    };
    for _ in 0..2 {
        let mut peer = agent.parked().await?;
        peer.send(&Request::Attach {
            exec_id,
            after_seq: 0,
        })
        .await?;
        let (pieces, code) = collect(&mut peer).await?;
        assert_eq!((pieces, code), (vec![1, 2], Some(4)));
    }
    let mut peer = agent.parked().await?;
    peer.send(&Request::Attach {
        exec_id,
        after_seq: 1,
    })
    .await?;
    let (pieces, _) = collect(&mut peer).await?;
    assert_eq!(pieces.len(), 1);
    let mut bytes = Vec::new();
    encode(&Frame::ACK_EXIT, &mut bytes);
    peer.stream.write_all(&bytes).await?;
    ensure!(
        peer.frame().await?.is_none(),
        "the connection outlived the acknowledgement"
    );
    // The agent removes the entry just after it closes our connection.
    eventually(
        "the exec is forgotten",
        Duration::from_secs(20),
        async || {
            let mut peer = agent.parked().await?;
            peer.send(&Request::Execs).await?;
            Ok(matches!(peer.reply().await?, Reply::Execs { execs } if execs.is_empty()))
        },
    )
    .await?;
    assert!(agent.is_alive()?);
    Ok(())
}

#[tokio::test]
async fn a_file_operation_that_the_worker_abandons_is_killed() -> Result<()> {
    let agent = Agent::start()?;
    let mut peer = agent.parked().await?;
    let path = cynode_api::Base64Bytes(b"/proc/self/status".to_vec());
    peer.send(&Request::File {
        op: FileOp::Write {
            path: path.clone(),
            mode: None,
            if_match: None,
            if_none_match: false,
            max_bytes: 10,
        },
    })
    .await?;
    let children = || -> Result<usize> {
        Ok(
            fs_err::read_to_string(format!("/proc/{0}/task/{0}/children", agent.child.id()))?
                .split_whitespace()
                .count(),
        )
    };
    drop(peer);
    eventually(
        "no child process is left",
        Duration::from_secs(10),
        async || Ok(children()? == 0),
    )
    .await?;
    let mut peer = agent.parked().await?;
    peer.send(&Request::File {
        op: FileOp::Stat { path, hash: false },
    })
    .await?;
    assert!(matches!(
        peer.reply().await?,
        Reply::Stat(_) | Reply::Error(_)
    ));
    Ok(())
}

#[test]
fn the_agent_refuses_root_and_is_small() -> Result<()> {
    let refused = Command::new(binary())
        .args(["agent", "--control", "/nonexistent"])
        .output()?;
    assert_eq!(refused.status.code(), Some(77));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("uid 0"));
    let usage = Command::new(binary()).arg("nonsense").output()?;
    assert_eq!(usage.status.code(), Some(64));
    assert!(fs_err::metadata(binary())?.len() <= 5 << 20);
    let description = Command::new("ldd").arg(binary()).output()?;
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&description.stdout),
        String::from_utf8_lossy(&description.stderr)
    );
    assert!(
        said.contains("not a dynamic executable") || said.contains("statically linked"),
        "{said}"
    );
    Ok(())
}

/// The host's pid of the container's process 1.
fn agent_pid(world: &World) -> Result<i32> {
    let output = world.podman().args(["ps", "--quiet"]).output()?;
    let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let output = world
        .podman()
        .args(["inspect", "--format", "{{.State.Pid}}", &id])
        .output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse()?)
}

#[tokio::test]
async fn an_idle_agent_takes_little_memory_also_after_work() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    let resident = |pid: i32| -> Result<u64> {
        let status = fs_err::read_to_string(format!("/proc/{pid}/status"))?;
        status
            .lines()
            .find_map(|line| {
                line.strip_prefix("VmRSS:")?
                    .trim()
                    .strip_suffix(" kB")?
                    .trim()
                    .parse::<u64>()
                    .ok()
            })
            .context("VmRSS")
    };
    let pid = agent_pid(&world)?;
    assert!(
        resident(pid)? <= 4 << 10,
        "{} kB when fresh",
        resident(pid)?
    );
    client.exec(id, &sh("head -c 20000000 /dev/zero")).await?;
    for _ in 0..50 {
        client.exec(id, &exec(["true"])).await?;
    }
    client
        .put_file(
            id,
            std::path::Path::new("big"),
            vec![7; 20_000_000],
            &cynode_client::PutOptions::default(),
        )
        .await?;
    eventually(
        "the agent's memory is small again",
        Duration::from_secs(5),
        async || Ok(resident(pid)? <= 4 << 10),
    )
    .await
    .with_context(|| format!("{} kB", resident(pid).unwrap_or(0)))
}

const STRANGER: &str = r#"
import socket, sys, os
hello = b'{"reply":"hello","protocol":1,"version":"evil","role":"request"}'
frame = (len(hello) + 1).to_bytes(4, "little") + b"\x01" + hello
turned_away = 0
for attempt in range(int(sys.argv[1])):
    s = socket.socket(socket.AF_UNIX); s.settimeout(10)
    try:
        s.connect("/run/cynode/control.sock")
        s.sendall(frame)
        if s.recv(1) == b"": turned_away += 1
    except (ConnectionResetError, BrokenPipeError): turned_away += 1
print(turned_away)
for what in ("environ", "mem", "fd", "maps"):
    try: (os.listdir if what == "fd" else lambda p: open(p, "rb").read(1))("/proc/1/" + what); print("open", what)
    except OSError as error: print("closed", what)
try: open("/run/cynode/cynode-sba", "rb"); print("readable")
except OSError: print("unreadable")
try: os.unlink("/run/cynode/control.sock"); print("unlinked")
except OSError: print("stays")
for sig in (15, 2, 1, 9, 19):
    os.kill(1, sig)
"#;

// part of: CYNAI.SANDBX.SandboxConnectivity
#[tokio::test]
async fn only_process_one_may_speak_for_the_sandbox() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    request.image_ref = BASE.to_owned();
    let id = client.create_session(&request).await?.session_id;
    let result = client
        .exec(id, &exec(["python3", "-c", STRANGER, "500"]))
        .await?;
    assert_eq!(
        result.stdout,
        "500\nclosed environ\nclosed mem\nclosed fd\nclosed maps\nunreadable\nstays\n",
        "{}",
        result.stderr
    );
    // Signals sent to process 1 from inside had no effect either.
    assert_eq!(
        client.exec(id, &sh("echo still here")).await?.stdout,
        "still here\n"
    );
    Ok(())
}

/// A worker that dies after its request repeats the request when it is back, while the first may
/// still be in flight.
#[tokio::test]
// invariant: jobs
async fn an_exec_id_is_started_once_however_often_it_is_requested() -> Result<()> {
    let agent = Agent::start()?;
    let request = start(&["/bin/sh", "-c", "echo $$"]);
    let mut started = Vec::new();
    let mut peers = Vec::new();
    for _ in 0..4 {
        let mut peer = agent.parked().await?;
        peer.send(&request).await?;
        peers.push(peer);
    }
    for mut peer in peers {
        match peer.reply().await? {
            Reply::Started { .. } => started.push(peer),
            Reply::Error(error) => assert_eq!(error.code, ErrorCode::ExecIdInUse),
            other => anyhow::bail!("{other:?}"),
        }
    }
    assert_eq!(started.len(), 1, "not exactly one request started the exec");
    let mut peer = started.remove(0);
    loop {
        match peer.frame().await?.context("a frame")? {
            Frame::Output { seq, .. } => {
                let mut acknowledged = Vec::new();
                encode(&Frame::Ack(seq), &mut acknowledged);
                peer.stream.write_all(&acknowledged).await?;
            }
            Frame::Json(_) => break,
            other => anyhow::bail!("{other:?}"),
        }
    }
    let mut acknowledged = Vec::new();
    encode(&Frame::ACK_EXIT, &mut acknowledged);
    peer.stream.write_all(&acknowledged).await?;
    while peer.frame().await?.is_some() {}
    // The exec has ended and the worker has acknowledged it; the id stays taken.
    let mut late = agent.parked().await?;
    late.send(&request).await?;
    ensure!(
        matches!(late.reply().await?, Reply::Error(error) if error.code == ErrorCode::ExecIdInUse)
    );
    // A command that failed to start can be retried.
    let failing = start(&["/none"]);
    for _ in 0..2 {
        let mut peer = agent.parked().await?;
        peer.send(&failing).await?;
        ensure!(
            matches!(peer.reply().await?, Reply::Error(error) if error.code == ErrorCode::ExecFailed)
        );
    }
    Ok(())
}

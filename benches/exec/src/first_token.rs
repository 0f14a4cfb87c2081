//! The time to the first token of a model: through a sandbox's way to models, and from the model
//! server itself.
//!
//! The worker serves only processes in the sandbox's pid namespace. This program is the client for
//! both ways, and runs itself in that namespace for one of them.

use std::{
    env,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cynode_sba_proto::proxy::Listener;
use cynode_tests::{
    Options, World,
    models::{ModelApi, ModelServer},
};

use crate::{Plan, clean_up, ours::Ours, samples::Samples};

/// What this program is called with as the client.
pub(crate) const PROBE: &str = "--probe-first-token";
pub(crate) const THROUGH: &str = "from a sandbox";
pub(crate) const DIRECT: &str = "from the model server itself";

const MODEL: &str = "m";
const SOCKET: &str = "proxy.sock";
/// Requests of one client. The ways take turns.
const ROUNDS_PER_CLIENT: u32 = 20;
/// A sandbox that asks for more within a short time is refused.
const MAX_ROUNDS: u32 = 400;
/// The length of a record.
const APPENDED_BYTES: usize = 700;

#[derive(Debug, Default)]
pub(crate) struct FirstToken {
    /// Ours first.
    pub(crate) ways: Vec<Samples>,
    /// One durable append to a file, as each call needs before it leaves the node.
    pub(crate) append: Vec<Samples>,
}

pub(crate) async fn measure(plan: &Plan) -> Result<FirstToken> {
    let world = World::new()?;
    let server = ModelServer::start(ModelApi::Openai, &[MODEL]).await?;
    let url = format!("{{ url = {:?} }}", server.url());
    let mut ours = Ours::start(&world, &Options::default().set("inference", &url)).await?;
    let mut request = cynode_tests::session();
    request.allowed_models = vec![MODEL.to_owned()];
    let session = ours.create(&request).await?;
    let pid = ours.sandbox(session)?.pid;
    let directory = socket_directory(&world)?;
    let (mut through, mut direct) = (Samples::new(THROUGH), Samples::new(DIRECT));
    let mut append = Samples::new("a durable append");
    let mut file = fs_err::File::create(world.directory().join("appended"))?;
    let address = server.address().to_string();
    for _ in 0..plan.exec_rounds.min(MAX_ROUNDS).div_ceil(ROUNDS_PER_CLIENT) {
        let mut inside = Command::new("nsenter");
        inside
            .args(["--target", &pid.to_string(), "--pid", "--"])
            .arg(env::current_exe()?)
            .args([PROBE, SOCKET])
            .current_dir(&directory);
        let mut outside = Command::new(env::current_exe()?);
        outside.args([PROBE, &address]);
        for (command, samples) in [(inside, &mut through), (outside, &mut direct)] {
            for time in times(command).await? {
                samples.push(time);
            }
        }
        for _ in 0..ROUNDS_PER_CLIENT {
            let began = Instant::now();
            file.write_all(&[b'x'; APPENDED_BYTES])?;
            file.sync_data()?;
            append.push(began.elapsed());
        }
    }
    ours.shut_down().await?;
    clean_up(world).await;
    Ok(FirstToken {
        ways: vec![through, direct],
        append: vec![append],
    })
}

/// The directory with the socket of the only sandbox. Its path is too long to connect to.
fn socket_directory(world: &World) -> Result<PathBuf> {
    for entry in fs_err::read_dir(world.state_dir().join("worker/sandboxes"))? {
        let path = entry?.path();
        if path.join(SOCKET).exists() {
            return Ok(path);
        }
    }
    bail!("the sandbox has no socket to its proxies")
}

/// Runs a client, whose server is on this thread.
async fn times(mut command: Command) -> Result<Vec<Duration>> {
    let output = tokio::task::spawn_blocking(move || command.output()).await??;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the client failed: {errors}");
    let text = String::from_utf8(output.stdout)?;
    text.lines()
        .map(|line| Ok(Duration::from_nanos(line.parse()?)))
        .collect()
}

/// The client: prints how many nanoseconds each first token took.
pub(crate) fn probe(server: &Path) -> Result<()> {
    let address = server
        .to_str()
        .and_then(|text| text.parse::<SocketAddr>().ok());
    for _ in 0..ROUNDS_PER_CLIENT {
        let began = Instant::now();
        let time = if let Some(address) = address {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            first_token(stream, began)?
        } else {
            let mut stream = UnixStream::connect(server)?;
            stream.write_all(&Listener::Inference.preamble())?;
            first_token(stream, began)?
        };
        println!("{}", time.as_nanos());
    }
    Ok(())
}

fn first_token(mut stream: impl Read + Write, began: Instant) -> Result<Duration> {
    let body = format!(
        r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"x"}}],"stream":true}}"#
    );
    let length = body.len();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: \
         application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let (mut answer, mut first) = (Vec::new(), None);
    let has = |answer: &[u8], text: &str| {
        let text = text.as_bytes();
        answer.windows(text.len()).any(|window| window == text)
    };
    loop {
        let mut piece = [0; 4096];
        let count = stream.read(&mut piece)?;
        answer.extend_from_slice(&piece[..count]);
        if first.is_none() && has(&answer, "data: ") {
            first = Some(began.elapsed());
        }
        if has(&answer, "data: [DONE]") {
            return first.context("no token");
        }
        ensure!(count > 0, "{}", String::from_utf8_lossy(&answer));
    }
}

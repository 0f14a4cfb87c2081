//! Throughput of output and files.

use std::{
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::SessionId;
use cynode_client::{ExecEvent, PutOptions};
use cynode_tests::exec;

use crate::{
    Plan,
    ours::Ours,
    rivals::{Rivals, drain, run},
    samples::{Samples, timed},
};

/// Different ways to move the same bytes.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    pub(crate) ways: Vec<Samples>,
}

/// Lines of text, like the log of a build.
fn text(bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes + 100);
    let mut number: u64 = 0;
    while out.len() < bytes {
        out.extend_from_slice(
            format!(
                "{number:08} the quick brown fox jumps over the lazy dog \"and\" a tab\there\n"
            )
            .as_bytes(),
        );
        number += 1;
    }
    out.truncate(bytes);
    out
}

/// Pseudorandom bytes from a xorshift generator.
fn binary(bytes: usize) -> Vec<u8> {
    let mut state: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

pub(crate) async fn measure(
    plan: &Plan,
    ours: &Ours,
    session: SessionId,
    rivals: &Rivals,
    scratch: &Path,
) -> Result<Vec<Transfer>> {
    let bytes = plan.transfer_bytes;
    let (text_data, binary_data) = (text(bytes), binary(bytes));
    let local = scratch.join("data");
    fs_err::write(&local, &binary_data)?;
    for (name, data) in [("text", &text_data), ("binary", &binary_data)] {
        ours.client
            .put_file(
                session,
                Path::new(name),
                data.clone(),
                &PutOptions::default(),
            )
            .await?;
    }

    let mut stream_text = [
        Samples::new("session exec, event stream"),
        Samples::new("podman exec cat"),
    ];
    let mut stream_binary = [
        Samples::new("session exec, event stream"),
        Samples::new("podman exec cat"),
    ];
    let mut get = [
        Samples::new("GET files"),
        Samples::new("podman exec cat"),
        Samples::new("podman cp to -"),
    ];
    let mut put = [
        Samples::new("PUT files"),
        Samples::new("podman exec -i, cat > file"),
        Samples::new("podman cp FILE"),
    ];
    for _ in 0..plan.transfer_rounds {
        for (name, ways) in [("text", &mut stream_text), ("binary", &mut stream_binary)] {
            let (time, count) = timed(stream(ours, session, name)).await;
            whole(count?, bytes)?;
            ways[0].push(time);
            ways[1].push(podman_cat(rivals, name, bytes)?);
        }
        let (time, count) = timed(download(ours, session, "binary")).await;
        whole(count?, bytes)?;
        get[0].push(time);
        get[1].push(podman_cat(rivals, "binary", bytes)?);
        let started = Instant::now();
        // A tar stream is slightly larger than the file.
        let count = drain(
            rivals
                .podman()
                .arg("cp")
                .arg(format!("{}:/workspace/binary", rivals.container()))
                .arg("-"),
        )?;
        ensure!(count >= bytes as u64, "podman cp gave {count} bytes");
        get[2].push(started.elapsed());

        let body = binary_data.clone();
        let (time, written) =
            timed(
                ours.client
                    .put_file(session, Path::new("put"), body, &PutOptions::default()),
            )
            .await;
        written?;
        put[0].push(time);
        let started = Instant::now();
        let file = fs_err::File::open(&local)?.into_parts().0;
        run(rivals
            .podman()
            .args([
                "exec",
                "--interactive",
                rivals.container(),
                "sh",
                "-c",
                "cat > /workspace/put-by-exec",
            ])
            .stdin(Stdio::from(file)))?;
        put[1].push(started.elapsed());
        let started = Instant::now();
        run(rivals
            .podman()
            .arg("cp")
            .arg(&local)
            .arg(format!("{}:/workspace/put-by-cp", rivals.container())))?;
        put[2].push(started.elapsed());
    }
    let transfer = |name, ways: Vec<Samples>| Transfer { name, bytes, ways };
    Ok(vec![
        transfer("output, text", stream_text.into()),
        transfer("output, binary", stream_binary.into()),
        transfer("file out", get.into()),
        transfer("file in", put.into()),
    ])
}

fn whole(count: u64, bytes: usize) -> Result<()> {
    ensure!(
        count == bytes as u64,
        "{count} bytes came instead of {bytes}"
    );
    Ok(())
}

fn podman_cat(rivals: &Rivals, name: &str, bytes: usize) -> Result<Duration> {
    let started = Instant::now();
    whole(
        drain(&mut rivals.podman_exec(&["cat", &format!("/workspace/{name}")]))?,
        bytes,
    )?;
    Ok(started.elapsed())
}

async fn stream(ours: &Ours, session: SessionId, name: &str) -> Result<u64> {
    let mut events = ours
        .client
        .exec_stream(session, &exec(["cat", name]))
        .await?;
    let mut total = 0;
    while let Some(event) = events.next().await? {
        match event {
            ExecEvent::Output { data, .. } => total += data.len() as u64,
            ExecEvent::Exit(exit) => ensure!(exit.exit_code == Some(0), "cat ended with {exit:?}"),
            ExecEvent::Start { .. } => {}
        }
    }
    Ok(total)
}

async fn download(ours: &Ours, session: SessionId, name: &str) -> Result<u64> {
    let mut body = ours
        .client
        .get_file(session, Path::new(name))
        .await
        .context("reading a file")?;
    let mut total = 0;
    while let Some(piece) = body.chunk().await? {
        total += piece.len() as u64;
    }
    Ok(total)
}

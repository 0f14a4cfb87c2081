//! An orchestrator streams and doesn't buffer: large transfers cost no more memory than small ones,
//! and slow readers block nobody else.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ExecRequest, Stream, TaskCreate};
use cynode_client::{Body, ExecEvent, OutputQuery};
use cynode_tests::{eventually, memory, reset_memory_peak, sh};
use futures_util::stream;
use sha2::{Digest as _, Sha256};

use super::nodes::{Fleet, TIMEOUT, session_with_labels};

const GIBIBYTE: u64 = 1 << 30;
/// The memory bound of an orchestrator while it forwards streams.
const MAX_MEMORY: u64 = 100 << 20;

/// A piece whose position follows from its content.
fn piece(number: u64) -> Vec<u8> {
    (0..(64 << 10) / 8)
        .flat_map(|word: u64| (number << 20 | word).to_le_bytes())
        .collect()
}

// proves: REQ-SANDBX-0105 with
// an_asynchronous_job_runs_on_and_its_output_is_readable_during_and_after_the_run
#[tokio::test]
// invariant: control-plane
async fn a_gibibyte_of_output_passes_through_a_small_orchestrator() -> Result<()> {
    let fleet = Fleet::new().await?;
    let _worker = fleet.node("one").await?;
    let sessions = fleet.orchestrator.sessions()?;
    let id = sessions
        .create_user_session(&session_with_labels(&[]))
        .await?
        .session_id;
    let request = ExecRequest {
        timeout_ms: 600_000,
        ..sh("yes 0123456789abcdefghijklmnopqrstuvwxyz | head -c 1073741824")
    };
    reset_memory_peak(fleet.orchestrator.pid())?;
    let mut events = sessions.exec_stream(id, &request).await?;
    let line = b"0123456789abcdefghijklmnopqrstuvwxyz\n";
    let cycle: Vec<u8> = line
        .iter()
        .copied()
        .cycle()
        .take(line.len() + (1 << 20))
        .collect();
    let (mut bytes, mut seq) = (0_u64, 0);
    loop {
        match events
            .next()
            .await?
            .context("the stream ended without an exit")?
        {
            ExecEvent::Output {
                data,
                seq: now,
                stream: Stream::Stdout,
                ..
            } => {
                // Complete and in order.
                let place = usize::try_from(bytes % line.len() as u64)?;
                ensure!(
                    now == seq + 1 && cycle[place..].starts_with(&data),
                    "after {bytes} bytes: {now} after {seq}"
                );
                seq = now;
                bytes += data.len() as u64;
            }
            ExecEvent::Exit(exit) => {
                assert_eq!((exit.exit_code, exit.bytes.stdout), (Some(0), GIBIBYTE));
                break;
            }
            _ => {}
        }
    }
    assert_eq!(bytes, GIBIBYTE);
    let (_, peak) = memory(fleet.orchestrator.pid())?;
    assert!(peak < MAX_MEMORY, "the orchestrator took {peak} bytes");
    Ok(())
}

#[tokio::test]
// invariant: control-plane
async fn a_large_artifact_goes_in_and_out_of_a_small_orchestrator() -> Result<()> {
    let fleet = Fleet::new().await?;
    let client = fleet.orchestrator.client()?;
    let task = client
        .create_task(&TaskCreate {
            name: "large".to_owned(),
            ..Default::default()
        })
        .await?
        .id;
    let size = 256 << 20;
    let pieces = size / piece(0).len() as u64;
    let body = Body::wrap_stream(stream::iter(
        (0..pieces).map(|number| Ok::<_, std::io::Error>(piece(number))),
    ));
    reset_memory_peak(fleet.orchestrator.pid())?;
    let artifact = client.put_artifact(task, "large", None, body).await?;
    assert_eq!(u64::try_from(artifact.size)?, size);
    let mut hash = Sha256::new();
    let mut content = client.artifact_content(artifact.id).await?;
    let mut bytes = 0;
    while let Some(data) = content.chunk().await? {
        bytes += data.len() as u64;
        hash.update(&data);
    }
    assert_eq!(
        (bytes, hex::encode(hash.finalize())),
        (size, artifact.sha256)
    );
    let (_, peak) = memory(fleet.orchestrator.pid())?;
    assert!(peak < MAX_MEMORY, "the orchestrator took {peak} bytes");
    Ok(())
}

#[tokio::test]
// invariant: control-plane
async fn a_slow_reader_of_an_orchestrator_holds_up_its_own_program_and_nobody_else() -> Result<()> {
    let fleet = Fleet::new().await?;
    let _worker = fleet.node("one").await?;
    let sessions = fleet.orchestrator.sessions()?;
    let id = sessions
        .create_user_session(&session_with_labels(&[]))
        .await?
        .session_id;
    let other = sessions
        .create_user_session(&session_with_labels(&[]))
        .await?
        .session_id;
    let request = ExecRequest {
        timeout_ms: 600_000,
        background: true,
        stdin_open: true,
        ..sh("read go; head -c 100000000 /dev/zero; echo done > finished")
    };
    let exec_id = sessions.exec_background(id, &request).await?.exec_id;
    reset_memory_peak(fleet.orchestrator.pid())?;
    let mut events = sessions.exec_output_stream(id, exec_id, 0).await?;
    sessions
        .write_stdin(id, exec_id, b"go\n".to_vec(), true)
        .await?;
    // Not reading: the program must block well before its end, while others continue, in its own
    // sandbox and elsewhere.
    eventually("output arrives", TIMEOUT, async || {
        let page = sessions
            .exec_output(
                id,
                exec_id,
                &OutputQuery {
                    after_seq: Some(100),
                    ..Default::default()
                },
            )
            .await?;
        Ok(!page.chunks.is_empty())
    })
    .await?;
    for _ in 0..20 {
        assert_eq!(
            sessions
                .exec(id, &sh("test ! -e finished && echo waiting"))
                .await?
                .stdout,
            "waiting\n"
        );
        assert_eq!(
            sessions
                .exec(other, &sh("head -c 1000000 /dev/zero | wc -c"))
                .await?
                .stdout,
            "1000000\n"
        );
    }
    let mut bytes = 0;
    let reading = async {
        while let Some(event) = events.next().await? {
            match event {
                ExecEvent::Output { data, .. } => bytes += data.len(),
                ExecEvent::Exit(exit) => ensure!(exit.exit_code == Some(0), "{exit:?}"),
                ExecEvent::Start { .. } => {}
            }
        }
        Ok(())
    };
    tokio::time::timeout(Duration::from_secs(120), reading).await??;
    assert_eq!(bytes, 100_000_000);
    assert_eq!(
        sessions.exec(id, &sh("cat finished")).await?.stdout,
        "done\n"
    );
    let (_, peak) = memory(fleet.orchestrator.pid())?;
    assert!(peak < MAX_MEMORY, "the orchestrator took {peak} bytes");
    Ok(())
}

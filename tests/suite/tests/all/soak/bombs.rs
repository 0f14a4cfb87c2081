//! Ten sandboxes that each exhaust a resource, and a neighbour that works.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ExecRequest, LimitsRequest, SessionCreate, SessionEnd, SessionState};
use cynode_client::{PutOptions, Readiness};
use cynode_tests::{BOMBS, Options, Random, World, session, sh};

use super::{Tally, length};

/// The timeout of a single call, whatever runs beside it.
const LIMIT: Duration = Duration::from_secs(60);

/// Run by `make soak`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn soak_a_neighbour_of_ten_bombs_works_on() -> Result<()> {
    let mut random = Random::seeded();
    let (seed, length) = (random.seed(), length(60));
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let neighbour = client.create_session(&session()).await?.session_id;
    let cluster = LimitsRequest {
        memory_bytes: Some(128 << 20),
        pids: Some(128),
        cpus: Some(0.5),
        disk_bytes: Some(256 << 20),
        ..Default::default()
    };
    let mut bombs = Vec::new();
    for script in BOMBS {
        let id = client
            .create_session(&SessionCreate {
                limits: Some(cluster),
                ..session()
            })
            .await?
            .session_id;
        client
            .exec_background(
                id,
                &ExecRequest {
                    background: true,
                    timeout_ms: 0,
                    ..sh(script)
                },
            )
            .await
            .context(script)?;
        bombs.push(id);
    }
    let mut done = Tally::default();
    let mut slowest = Duration::ZERO;
    let until = Instant::now() + length;
    while Instant::now() < until {
        let (word, name) = (random.number(), format!("file-{}", random.below(50)));
        let begun = Instant::now();
        let step = async {
            Ok(match random.below(4) {
                0 => {
                    client
                        .put_file(
                            neighbour,
                            Path::new(&name),
                            word.to_string(),
                            &PutOptions::default(),
                        )
                        .await?;
                    let found = client.exec(neighbour, &sh(&format!("cat {name}"))).await?;
                    ensure!(found.stdout == word.to_string(), "{found:?}");
                    "file"
                }
                1 => {
                    let readiness = client.readyz().await?;
                    ensure!(matches!(readiness, Readiness::Ready), "{readiness:?}");
                    "ready"
                }
                _ => {
                    let result = client.exec(neighbour, &sh(&format!("echo {word}"))).await?;
                    ensure!(
                        result.stdout == format!("{word}\n") && result.exit.exit_code == Some(0),
                        "{result:?}"
                    );
                    "exec"
                }
            })
        };
        done.count(
            tokio::time::timeout(LIMIT, step)
                .await
                .with_context(|| format!("a call took more than {LIMIT:?}"))??,
        );
        slowest = slowest.max(begun.elapsed());
    }
    for id in bombs {
        let found = client.get_session(id).await?.state;
        ensure!(
            matches!(found, SessionState::Running | SessionState::Lost),
            "{found:?}"
        );
        client.end_session(id, &SessionEnd::default()).await?;
    }
    worker.shut_down().await?;
    world.assert_clean().await?;
    #[expect(clippy::print_stdout, reason = "the report of the run")]
    {
        println!(
            "soak: bombs: {} for {} s, their neighbour did {} things, all right, the slowest in \
             {} ms, nothing left; {done}; CYNODE_SEED={seed}",
            BOMBS.len(),
            length.as_secs(),
            done.total(),
            slowest.as_millis()
        );
    }
    Ok(())
}

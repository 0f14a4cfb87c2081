//! Files that a job leaves for its caller.

use anyhow::{Context as _, Result};
use cynode_api::{ErrorCode, Job, JobState};
use cynode_client::SessionClient;
use cynode_tests::{Options, World, job, on_every_runtime, run_step, sba_job, specification};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{Ended, no_container};

on_every_runtime!(artifacts_are_kept_until_they_are_acknowledged);

fn listed(job: &Job) -> Result<Vec<(String, u64, String)>> {
    let entry = |entry: &Value| {
        Some((
            entry["path"].as_str()?.to_owned(),
            entry["size"].as_u64()?,
            entry["sha256"].as_str()?.to_owned(),
        ))
    };
    job.artifacts
        .iter()
        .map(|artifact| entry(artifact).with_context(|| format!("{artifact}")))
        .collect()
}

fn described(path: &str, content: &[u8]) -> (String, u64, String) {
    let hash = hex::encode(Sha256::digest(content));
    (path.to_owned(), content.len() as u64, hash)
}

async fn read(client: &SessionClient, job: &Job, path: &str) -> Result<Vec<u8>> {
    let mut body = client.job_artifact(job.job_id, path).await?;
    let mut content = Vec::new();
    while let Some(piece) = body.chunk().await? {
        content.extend_from_slice(&piece);
    }
    Ok(content)
}

// part of: REQ-SANDBX-0114, CYNAI.SANDBX.ArtifactsDataExchange,
// CYNAI.SBAGNT.ResultAndArtifactDelivery
// invariant: jobs
async fn artifacts_are_kept_until_they_are_acknowledged(world: World) -> Result<()> {
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let leave = "cd $CYNODE_ARTIFACTS_DIR && mkdir -p 'a b' && echo one > 'a b/1.txt' && \
                 head -c 300000 /dev/zero > zero && ln -s /etc/passwd link && \
                 ln -s / root && mkfifo fifo && : > empty";
    let big = vec![0; 300_000];
    let expected = [
        described("a b/1.txt", b"one\n"),
        described("empty", b""),
        described("zero", &big),
    ];
    // Of a specification, also a failed one, and of a plain command.
    let failing = specification(&[run_step(leave), run_step("exit 1")]);
    let specified = sba_job(&failing);
    let plain = job(&format!("{leave}; exit 1"));
    for request in [&specified, &plain] {
        let done = client.run_job(request).await?;
        assert_eq!(done.state, JobState::Failed, "{done:?}");
        assert_eq!(
            (listed(&done)?, done.artifacts_omitted),
            (expected.to_vec(), 0)
        );
        if request.job.is_some() {
            let ended = Ended::of(done)?;
            let named: Vec<_> = ended
                .result
                .artifacts
                .iter()
                .map(|artifact| {
                    let hash = artifact.sha256.clone().unwrap_or_default();
                    (artifact.path.clone(), artifact.size.unwrap_or(0), hash)
                })
                .collect();
            assert_eq!(named, expected);
        }
    }
    no_container(&world).await?;
    // Another worker still has them.
    worker.kill()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    for request in [&specified, &plain] {
        let done = client.job(request.job_id).await?;
        assert_eq!(read(&client, &done, "a b/1.txt").await?, b"one\n");
        assert_eq!(read(&client, &done, "zero").await?, big);
        for absent in ["link", "root", "fifo", "../job.json", "/etc/passwd"] {
            let refused = client
                .job_artifact(done.job_id, absent)
                .await
                .expect_err("absent");
            assert!(refused.is(ErrorCode::NotFound), "{absent}: {refused}");
        }
        client.ack_job(done.job_id).await?;
        let gone = client
            .job_artifact(done.job_id, "zero")
            .await
            .expect_err("dropped");
        assert!(gone.is(ErrorCode::OutputExpired), "{gone}");
    }
    Ok(())
}

// part of: CYNAI.SBAGNT.ResultAndArtifactDelivery
// invariant: jobs
#[tokio::test]
async fn artifacts_of_a_sandbox_that_was_removed_are_taken_from_its_disk() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let request = sba_job(&specification(&[
        run_step("echo kept > /job/artifacts/kept; ln -s /etc/passwd /job/artifacts/link"),
        run_step("exec sleep 777"),
    ]));
    client.run_job_async(&request).await?;
    super::until_step(&client, &request, 1).await?;
    let name = format!("cynode-{}", request.job_id);
    let removed = world
        .podman()
        .args(["rm", "--force", "--time", "0", &name])
        .output()?;
    assert!(removed.status.success(), "{removed:?}");
    let ended = Ended::after(&client, &request).await?;
    assert_eq!(
        ended.verdict(),
        (JobState::Failed, "runner_interrupted", "worker")
    );
    assert_eq!(listed(&ended.job)?, [described("kept", b"kept\n")]);
    assert_eq!(read(&client, &ended.job, "kept").await?, b"kept\n");
    Ok(())
}

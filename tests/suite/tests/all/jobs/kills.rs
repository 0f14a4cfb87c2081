//! The worker, or a job's sandbox, dies at an inconvenient moment.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, Job, JobRun, JobState};
use cynode_client::{JobFilter, OutputQuery, SessionClient};
use cynode_tests::{Options, Random, RunningWorker, World, eventually, job};

use super::{TIMEOUT, code, no_container, started};

const JOBS: u64 = 10;

/// A job that prints its id, works for a while, and finally prints how often it was started in its
/// sandbox.
fn counting_job(number: u64) -> JobRun {
    job(&format!(
        "cat /proc/sys/kernel/random/uuid; echo x >> begun; i=0; while [ $i -lt {} ]; do \
         i=$((i+1)); echo $i; sleep 0.05; done; wc -l < begun; exit {}",
        number * 5,
        number % 3
    ))
}

/// The final output of a job except for its first line, and that line.
fn check(number: u64, done: &Job) -> Result<String> {
    let (identity, rest) = done
        .output
        .stdout
        .split_once('\n')
        .with_context(|| format!("{done:?}"))?;
    let counted: String = (1..=number * 5)
        .map(|line| line.to_string() + "\n")
        .collect();
    ensure!(
        identity.len() == 36 && rest == format!("{counted}1\n"),
        "{done:?}"
    );
    let state = if number.is_multiple_of(3) {
        JobState::Completed
    } else {
        JobState::Failed
    };
    ensure!(
        done.state == state
            && done.exit_code == i32::try_from(number % 3).ok()
            && done.error.is_none(),
        "{done:?}"
    );
    Ok(identity.to_owned())
}

/// The output of a job, as far as it is available.
async fn output_so_far(client: &SessionClient, request: &JobRun) -> String {
    let page = client
        .job_output(request.job_id, &OutputQuery::default())
        .await;
    page.map(|page| {
        page.chunks
            .into_iter()
            .filter_map(|chunk| chunk.data)
            .collect()
    })
    .unwrap_or_default()
}

/// Reports whether the worker began to start the command, by its log from `from` on.
fn starts(worker: &RunningWorker, from: u64) -> Result<bool> {
    let log = fs_err::read(worker.log())?;
    Ok(
        String::from_utf8_lossy(&log[usize::try_from(from)?.min(log.len())..])
            .contains("Starting the command of a job."),
    )
}

/// Each round submits jobs and kills the worker up to `most_kills` times meanwhile. Every job must
/// run once, to its own end.
async fn kill_again_and_again(rounds: usize, most_kills: u64) -> Result<()> {
    let mut random = Random::seeded();
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let mut hit: BTreeMap<&str, usize> = BTreeMap::new();
    for round in 0..rounds {
        let requests: Vec<JobRun> = (0..JOBS).map(counting_job).collect();
        let client = worker.client()?;
        let handing: Vec<_> = requests
            .iter()
            .map(|request| {
                let (client, request) = (client.clone(), request.clone());
                tokio::spawn(async move { client.run_job_async(&request).await.is_ok() })
            })
            .collect();
        let mut outputs = vec![String::new(); requests.len()];
        for _ in 0..=random.below(most_kills) {
            // Every second kill hits the short moment in which a command starts.
            let at_a_start = random.below(2) == 0;
            let moment = Instant::now()
                + Duration::from_millis(random.below(if at_a_start { 500 } else { 6_000 }));
            let client = worker.client()?;
            while Instant::now() < moment {
                for (request, output) in requests.iter().zip(&mut outputs) {
                    let now = output_so_far(&client, request).await;
                    ensure!(
                        now.starts_with(output.as_str()),
                        "round {round}: {output:?} became {now:?}"
                    );
                    *output = now;
                }
            }
            for job in client.list_jobs(&JobFilter::default()).await? {
                *hit.entry(job.state.as_str()).or_default() += 1;
            }
            let (from, patience) = (
                fs_err::metadata(worker.log())?.len(),
                Instant::now() + Duration::from_secs(3),
            );
            while at_a_start && Instant::now() < patience {
                if starts(&worker, from)? {
                    tokio::time::sleep(Duration::from_micros(random.below(2_000))).await;
                    *hit.entry("at a start").or_default() += 1;
                    break;
                }
                tokio::task::yield_now().await;
            }
            worker.kill()?;
            worker = world.worker(&Options::default()).await?;
        }
        let mut accepted = Vec::new();
        for handed in handing {
            accepted.push(handed.await?);
        }
        let client = worker.client()?;
        let mut first = Vec::new();
        for (number, request) in requests.iter().enumerate() {
            // Accepted jobs exist without a repeated request.
            if accepted[number] {
                client
                    .job(request.job_id)
                    .await
                    .with_context(|| format!("round {round}: an accepted job is gone"))?;
            }
            let done = client.run_job(request).await?;
            let identity = check(number as u64, &done).with_context(|| format!("round {round}"))?;
            ensure!(
                done.output.stdout.starts_with(&outputs[number]),
                "round {round}: {:?} became {done:?}",
                outputs[number]
            );
            ensure!(!first.contains(&identity), "two jobs with one identity");
            ensure!(
                output_so_far(&client, request).await == done.output.stdout,
                "round {round}: output and result differ"
            );
            first.push(identity);
            if number % 2 == 0 {
                client.ack_job(request.job_id).await?;
            }
        }
        // The same later, with another worker.
        worker.kill()?;
        worker = world.worker(&Options::default()).await?;
        let client = worker.client()?;
        for (number, request) in requests.iter().enumerate() {
            let again = client.run_job(request).await?;
            if number % 2 == 0 {
                ensure!(
                    again.acknowledged && again.output.stdout.is_empty(),
                    "{again:?}"
                );
            } else {
                ensure!(
                    check(number as u64, &again)? == first[number],
                    "round {round}: {again:?}"
                );
                client.ack_job(request.job_id).await?;
            }
        }
        no_container(&world).await?;
        ensure!(client.list_jobs(&JobFilter::default()).await?.is_empty());
        eventually("no output is left", TIMEOUT, async || {
            Ok(fs_err::read_dir(world.state_dir().join("worker/sessions"))?.count() == 0)
        })
        .await?;
    }
    #[expect(clippy::print_stdout, reason = "the report of the run")]
    {
        println!(
            "{rounds} rounds of {JOBS} jobs; states of jobs when the worker was killed: {hit:?}"
        );
    }
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: nothing-lost
async fn jobs_run_once_and_keep_their_result_however_often_the_worker_is_killed() -> Result<()> {
    kill_again_and_again(3, 2).await
}

#[tokio::test]
async fn soak_jobs_survive_many_deaths_of_the_worker() -> Result<()> {
    kill_again_and_again(30, 4).await
}

#[tokio::test]
// invariant: jobs
async fn a_job_whose_sandbox_is_gone_has_failed_and_is_not_run_again() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let (first, second) = (
        job("cat /proc/sys/kernel/random/uuid; exec sleep 999"),
        job("cat /proc/sys/kernel/random/uuid; exec sleep 999"),
    );
    let mut outputs = Vec::new();
    for request in [&first, &second] {
        started(&client, request).await?;
        eventually("the job has printed something", TIMEOUT, async || {
            Ok(output_so_far(&client, request).await.len() == 37)
        })
        .await?;
        outputs.push(output_so_far(&client, request).await);
    }
    let remove = |request: &JobRun| -> Result<()> {
        let removed = world
            .podman()
            .args([
                "rm",
                "--force",
                "--time",
                "0",
                &format!("cynode-{}", request.job_id),
            ])
            .output()?;
        ensure!(removed.status.success(), "{removed:?}");
        Ok(())
    };
    // With a worker watching, and without one.
    remove(&first)?;
    let gone = client.run_job(&first).await?;
    assert_eq!(
        (gone.state, code(&gone), gone.output.stdout.as_str()),
        (
            JobState::Failed,
            Some("runner_interrupted"),
            outputs[0].as_str()
        )
    );
    worker.kill()?;
    remove(&second)?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let gone = client.run_job(&second).await?;
    assert_eq!(
        (gone.state, code(&gone), gone.output.stdout.as_str()),
        (
            JobState::Failed,
            Some("runner_interrupted"),
            outputs[1].as_str()
        )
    );
    no_container(&world).await?;
    eventually("no workspace is left", TIMEOUT, async || {
        Ok(fs_err::read_dir(world.state_dir().join("worker/workspaces"))?.count() == 0)
    })
    .await
}

#[tokio::test]
// invariant: jobs
async fn a_worker_killed_during_a_start_finds_the_command_and_starts_no_other() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let request = job("echo x >> begun; sleep 5; wc -l < begun");
    started(&worker.client()?, &request).await?;
    worker.kill()?;
    let session = fs_err::read_dir(world.state_dir().join("worker/sessions"))?
        .next()
        .context("a sandbox")??
        .path();
    fs_err::write(session.join("execs/log"), "")?;
    worker = world.worker(&Options::default()).await?;
    let done = worker.client()?.run_job(&request).await?;
    assert_eq!(
        (done.state, done.output.stdout.as_str()),
        (JobState::Completed, "1\n"),
        "{done:?}"
    );
    Ok(())
}

#[tokio::test]
// invariant: jobs
async fn a_job_whose_record_can_not_be_read_is_not_run_again() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let request = job("exec sleep 999");
    started(&worker.client()?, &request).await?;
    worker.kill()?;
    let record = world
        .state_dir()
        .join(format!("worker/jobs/{}.json", request.job_id));
    fs_err::write(&record, "{")?;
    let worker = world.worker(&Options::default()).await?;
    let refused = worker
        .client()?
        .run_job(&request)
        .await
        .expect_err("the job's record is gone");
    assert!(
        refused.is(ErrorCode::JobIdInUse) && refused.to_string().contains("unreadable"),
        "{refused}"
    );
    assert!(
        record.with_extension("unreadable").is_file(),
        "the unreadable record was not kept"
    );
    no_container(&world).await
}

#[tokio::test]
// invariant: jobs
async fn a_stopping_node_cancels_its_jobs_and_keeps_unacknowledged_results() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let done = client.run_job(&job("echo kept; exit 4")).await?;
    let running = job("trap 'echo bye; exit 0' TERM; echo begun; while :; do sleep 0.1; done");
    started(&client, &running).await?;
    eventually("its trap is set", TIMEOUT, async || {
        Ok(!output_so_far(&client, &running).await.is_empty())
    })
    .await?;
    let waiting = tokio::spawn({
        let (client, running) = (client.clone(), running.clone());
        async move { client.run_job(&running).await }
    });
    let starting = job("exec sleep 999");
    client.run_job_async(&starting).await?;
    worker.shut_down().await?;
    world.assert_clean().await?;
    assert!(
        waiting.await?.is_err(),
        "a waiting caller got a result although the worker stopped"
    );

    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    assert_eq!(client.job(done.job_id).await?, done);
    assert_eq!(
        client
            .job_output(done.job_id, &OutputQuery::default())
            .await?
            .chunks
            .len(),
        1
    );
    let stopped = client.run_job(&running).await?;
    assert_eq!(
        (
            stopped.state,
            code(&stopped),
            stopped.output.stdout.as_str()
        ),
        (JobState::Canceled, Some("node_stopped"), "begun\nbye\n")
    );
    let stopped = client.job(starting.job_id).await?;
    assert_eq!(
        (stopped.state, code(&stopped)),
        (JobState::Canceled, Some("node_stopped"))
    );
    worker.shut_down().await?;
    world.assert_clean().await
}

//! Whoever can write the database can hold locks in it: signing goes on, or that it does not is noticed.

use anyhow::{Result, ensure};
use cynode_api::TaskCreate;
use cynode_client::UserClient;
use cynode_tests::{Plane, RunningOrchestrator, eventually};

use super::{PATIENCE, intact, signed, stream, tasks, verdict};

/// What `/readyz` answers.
async fn readiness(orchestrator: &RunningOrchestrator) -> Result<(u16, String)> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let answer = http
        .get(format!("{}/readyz", orchestrator.url()?))
        .send()
        .await?;
    Ok((answer.status().as_u16(), answer.text().await?))
}

async fn task(client: &UserClient, name: &str) -> Result<()> {
    client
        .create_task(&TaskCreate {
            name: name.to_owned(),
            ..Default::default()
        })
        .await?;
    Ok(())
}

fn has(verdict: &cynode_api::AuditVerdict, what: &str) -> bool {
    verdict.problems.iter().any(|problem| problem.what == what)
}

#[tokio::test]
async fn locks_that_somebody_holds_do_not_stop_the_signing() -> Result<()> {
    let plane = Plane::new().await?;
    let orchestrator = plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    tasks(&plane, &orchestrator, 1).await?;
    let newest = || -> Result<u64> {
        Ok(plane
            .postgres
            .ask("select max(number) from audit_checkpoints")?
            .parse()?)
    };
    // The advisory lock that signing once waited for, the rows that say what is signed, and those that say that it is signed already.
    plane
        .postgres
        .ask("update audit_signed set seq = 1000000000")?;
    for held in [
        "select pg_advisory_lock(7167881646797252980)",
        "select seq from audit_signed for update",
        "lock table audit_signed",
    ] {
        let _held = plane.postgres.hold_by(held)?;
        let before = newest()?;
        task(&client, "while it is held").await?;
        eventually(
            &format!("it is signed while somebody does: {held}"),
            PATIENCE,
            async || Ok(newest()? > before),
        )
        .await?;
        eventually("all of it is", PATIENCE, async || {
            Ok(verdict(&client).await?.unsigned <= 2)
        })
        .await?;
        intact(&client).await?;
        assert_eq!(readiness(&orchestrator).await?.0, 200);
    }
    signed(&plane, &orchestrator).await
}

#[tokio::test]
async fn a_checkpoint_that_can_not_be_written_is_noticed_and_what_was_removed_meanwhile_is_found()
-> Result<()> {
    let plane = Plane::new().await?;
    let mut orchestrator = plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    tasks(&plane, &orchestrator, 1).await?;

    // Everybody may read, and nobody writes.
    let held = plane
        .postgres
        .hold_by("lock table audit_checkpoints in share mode")?;
    task(&client, "not signed").await?;
    eventually("it is not ready", PATIENCE, async || {
        Ok(readiness(&orchestrator).await?.0 == 503)
    })
    .await?;
    let (_, why) = readiness(&orchestrator).await?;
    ensure!(why.contains("have not been signed for"), "{why}");
    let found = verdict(&client).await?;
    ensure!(
        !found.intact
            && has(&found, "checkpoint_overdue")
            && found.problems.len() == 1
            && found.unsigned >= 2,
        "{found:#?}"
    );
    let http = reqwest::Client::builder().no_proxy().build()?;
    let is_counted = async || {
        let metrics = http
            .get(format!("{}/metrics", orchestrator.url()?))
            .send()
            .await?
            .text()
            .await?;
        let value = |name: &str| {
            metrics
                .lines()
                .find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok())
                .unwrap_or_default()
        };
        Ok(value("cynode_audit_checkpoints_overdue_total") >= 1.0
            && value("cynode_audit_unsigned_seconds") > 10.0)
    };
    eventually("it is counted", PATIENCE, is_counted).await?;
    drop(held);
    eventually("it is ready again", PATIENCE, async || {
        Ok(readiness(&orchestrator).await?.0 == 200)
    })
    .await?;
    signed(&plane, &orchestrator).await?;
    intact(&client).await?;

    // Once more, and now somebody removes what is not signed, as if it had never been.
    let held = plane
        .postgres
        .hold_by("lock table audit_checkpoints in share mode")?;
    let (live, beside) = (
        stream(&plane)?,
        orchestrator
            .state_dir()
            .join("orchestrator/audit-heads.jsonl"),
    );
    let last = plane.postgres.ask(&format!(
        "select seq from audit_streams where stream = '{live}'"
    ))?;
    task(&client, "removed").await?;
    eventually("it is signed beside the database", PATIENCE, async || {
        Ok(fs_err::read_to_string(&beside).is_ok_and(|line| line.contains(&live)))
    })
    .await?;
    plane.postgres.ask(&format!(
        "delete from audit_events where stream = '{live}' and seq > {last};
         update audit_streams set seq = {last}, hash = (select hash from audit_events where stream = '{live}' and seq = {last}) where stream = '{live}'"
    ))?;
    let found = verdict(&client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "tail_missing"
                && problem.stream.is_some_and(|id| id.to_string() == live)),
        "{found:#?}"
    );
    // The process that knew it is gone, and so is the lock.
    orchestrator.kill()?;
    drop(held);
    let orchestrator = plane.orchestrator("", &[]).await?;
    signed(&plane, &orchestrator).await?;
    let found = verdict(&orchestrator.client()?).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "tail_missing"
                && problem.detail.contains("the file outside the database")),
        "{found:#?}"
    );
    ensure!(!has(&found, "checkpoint_overdue"), "{found:#?}");
    Ok(())
}

//! Anyone with write access to the database can hold locks in it: signing goes on, or its absence
//! is noticed.

use anyhow::{Result, ensure};
use cynode_api::TaskCreate;
use cynode_client::UserClient;
use cynode_tests::{ControlPlane, RunningOrchestrator, eventually};

use super::{TIMEOUT, assert_trail_intact, create_tasks, stream, verdict, wait_until_signed};

/// The response of `/readyz`.
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

fn has_problem(verdict: &cynode_api::AuditVerdict, what: &str) -> bool {
    verdict.problems.iter().any(|problem| problem.what == what)
}

#[tokio::test]
// invariant: audit-trail
async fn signing_continues_while_others_hold_locks() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    create_tasks(&control_plane, &orchestrator, 1).await?;
    let newest = || -> Result<u64> {
        Ok(control_plane
            .postgres
            .query("select max(number) from audit_checkpoints")?
            .parse()?)
    };
    // The advisory lock that signing once waited for, the rows that record what is signed, and rows
    // that claim that everything is signed already.
    control_plane
        .postgres
        .query("update audit_signed set seq = 1000000000")?;
    for held in [
        "select pg_advisory_lock(7167881646797252980)",
        "select seq from audit_signed for update",
        "lock table audit_signed",
    ] {
        let _held = control_plane.postgres.hold_locks_of(held)?;
        let before = newest()?;
        task(&client, "while it is held").await?;
        eventually(
            &format!("signing continues during: {held}"),
            TIMEOUT,
            async || Ok(newest()? > before),
        )
        .await?;
        eventually("all records are signed", TIMEOUT, async || {
            Ok(verdict(&client).await?.unsigned <= 2)
        })
        .await?;
        assert_trail_intact(&client).await?;
        assert_eq!(readiness(&orchestrator).await?.0, 200);
    }
    wait_until_signed(&control_plane, &orchestrator).await
}

#[tokio::test]
// invariant: audit-trail
async fn an_unwritable_checkpoint_is_noticed_and_records_removed_meanwhile_are_found() -> Result<()>
{
    let control_plane = ControlPlane::new().await?;
    let mut orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    create_tasks(&control_plane, &orchestrator, 1).await?;

    // Everybody may read, nobody may write.
    let held = control_plane
        .postgres
        .hold_locks_of("lock table audit_checkpoints in share mode")?;
    task(&client, "not signed").await?;
    eventually("the orchestrator is not ready", TIMEOUT, async || {
        Ok(readiness(&orchestrator).await?.0 == 503)
    })
    .await?;
    let (_, why) = readiness(&orchestrator).await?;
    ensure!(why.contains("have been unsigned for"), "{why}");
    let found = verdict(&client).await?;
    ensure!(
        !found.intact
            && has_problem(&found, "checkpoint_overdue")
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
    eventually("the metrics count it", TIMEOUT, is_counted).await?;
    drop(held);
    eventually("the orchestrator is ready again", TIMEOUT, async || {
        Ok(readiness(&orchestrator).await?.0 == 200)
    })
    .await?;
    wait_until_signed(&control_plane, &orchestrator).await?;
    assert_trail_intact(&client).await?;

    // Again, and now the unsigned records are removed as if they had never existed.
    let held = control_plane
        .postgres
        .hold_locks_of("lock table audit_checkpoints in share mode")?;
    let (live, beside) = (
        stream(&control_plane)?,
        orchestrator
            .state_dir()
            .join("orchestrator/audit-heads.jsonl"),
    );
    let last = control_plane.postgres.query(&format!(
        "select seq from audit_streams where stream = '{live}'"
    ))?;
    task(&client, "removed").await?;
    eventually("the checkpoint file has it", TIMEOUT, async || {
        Ok(fs_err::read_to_string(&beside).is_ok_and(|line| line.contains(&live)))
    })
    .await?;
    control_plane.postgres.query(&format!(
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
    // The process that knew the records is gone, and so is the lock.
    orchestrator.kill()?;
    drop(held);
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    wait_until_signed(&control_plane, &orchestrator).await?;
    let found = verdict(&orchestrator.client()?).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "tail_missing"
                && problem.detail.contains("the file outside the database")),
        "{found:#?}"
    );
    ensure!(!has_problem(&found, "checkpoint_overdue"), "{found:#?}");
    Ok(())
}

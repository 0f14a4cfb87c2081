//! Retention removes old records, signs the removal, and conceals nothing by it.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::AuditKind;
use cynode_tests::{ControlPlane, eventually};

use super::{
    TIMEOUT, assert_trail_intact, create_tasks, records_of_action, stream, verdict,
    wait_until_signed,
};

const NO_RETENTION: (&str, &str) = ("audit_days", "0");

fn number(control_plane: &ControlPlane, statement: &str) -> Result<u64> {
    control_plane
        .postgres
        .query(statement)?
        .parse()
        .with_context(|| statement.to_owned())
}

/// Keeps records from here on: marks a call in them as open and the writer as alive.
fn pin_records(control_plane: &ControlPlane, stream: &str, from: u64) -> Result<()> {
    let set = format!("open_from = {from}, seen_at = now() + interval '1 hour'");
    control_plane
        .postgres
        .query(&format!(
            "update audit_streams set {set} where stream = '{stream}'"
        ))
        .map(drop)
}

async fn truncated(control_plane: &ControlPlane, at_least: u64) -> Result<()> {
    eventually("the old records are removed", TIMEOUT, async || {
        Ok(number(control_plane, "select truncated from audit_head")? >= at_least)
    })
    .await
}

#[tokio::test]
// invariant: audit-trail
async fn retention_leaves_an_intact_trail_but_a_plain_delete_is_found() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut orchestrator = control_plane.orchestrator("", &[]).await?;
    create_tasks(&control_plane, &orchestrator, 5).await?;
    let old = stream(&control_plane)?;
    let last = number(
        &control_plane,
        &format!("select max(seq) from audit_events where stream = '{old}'"),
    )?;
    let from = last - 3;
    let before = number(&control_plane, "select count(*) from audit_events")?;

    // The same rows, removed by somebody else.
    let old_rows = format!("stream = '{old}' and seq < {from}");
    control_plane.postgres.query(&format!(
        "create table kept as select cursor, stream, seq, at, body, hash from audit_events where \
         {old_rows}; delete from audit_events where {old_rows}"
    ))?;
    let client = orchestrator.client()?;
    let found = verdict(&client).await?;
    let names = |what: &str, seq: u64| {
        found
            .problems
            .iter()
            .any(|problem| problem.what == what && problem.seq == Some(seq))
    };
    ensure!(!found.intact && names("record_missing", 1), "{found:#?}");
    control_plane.postgres.query(
        "insert into audit_events (cursor, stream, seq, at, body, hash) select * from kept",
    )?;
    assert_trail_intact(&client).await?;
    wait_until_signed(&control_plane, &orchestrator).await?;

    // By retention.
    orchestrator.kill()?;
    pin_records(&control_plane, &old, from)?;
    let orchestrator = control_plane.orchestrator("", &[NO_RETENTION]).await?;
    let client = orchestrator.client()?;
    truncated(&control_plane, from - 1).await?;
    assert_eq!(
        number(
            &control_plane,
            &format!("select min(seq) from audit_events where stream = '{old}'")
        )?,
        from
    );
    let whole = assert_trail_intact(&client).await?;
    assert_eq!(whole.truncated, from - 1);
    assert!(whole.records < before + 10, "{whole:?}");
    eventually("the truncation is a record itself", TIMEOUT, async || {
        Ok(!records_of_action(&client, "audit.truncate")
            .await?
            .is_empty())
    })
    .await?;
    let truncations = records_of_action(&client, "audit.truncate").await?;
    assert_eq!(
        (
            truncations.len(),
            truncations[0].body.kind,
            truncations[0].body.detail["records"].as_u64(),
            truncations[0].body.detail["days"].as_u64()
        ),
        (1, AuditKind::Event, Some(from - 1), Some(0))
    );
    let page = client
        .audit(0, &cynode_client::AuditFilter::default(), Duration::ZERO)
        .await?;
    assert_eq!(
        page.items
            .first()
            .map(|record| (record.stream.to_string(), record.seq)),
        Some((old.clone(), from))
    );

    // The stream goes on, and changes after the cut are found as before.
    create_tasks(&control_plane, &orchestrator, 2).await?;
    assert_trail_intact(&client).await?;
    let change = |value: &str| {
        control_plane.postgres.query(&format!(
            "update audit_events set at = at {value} interval \
             '1 second' where stream = '{old}' and seq = {last}"
        ))
    };
    change("+")?;
    let found = verdict(&client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "record_changed" && problem.seq == Some(last)),
        "{found:#?}"
    );
    change("-")?;
    // So are a row that comes back, and one more that is removed.
    control_plane.postgres.query(
        "insert into audit_events (cursor, stream, seq, at, body, hash) \
         select * from kept order by seq desc limit 1",
    )?;
    let found = verdict(&client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "record_inserted" && problem.seq == Some(from - 1)),
        "{found:#?}"
    );
    control_plane.postgres.query(&format!(
        "delete from audit_events where stream = '{old}' and seq <= {from}"
    ))?;
    let found = verdict(&client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "record_missing" && problem.seq == Some(from)),
        "{found:#?}"
    );
    Ok(())
}

#[tokio::test]
async fn truncation_of_a_quiet_stream_is_kept_when_others_are_truncated_again() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut first = control_plane.orchestrator("", &[]).await?;
    create_tasks(&control_plane, &first, 3).await?;
    let quiet = stream(&control_plane)?;
    let last = number(
        &control_plane,
        &format!("select max(seq) from audit_events where stream = '{quiet}'"),
    )?;
    first.kill()?;
    pin_records(&control_plane, &quiet, last)?;
    let mut before = 0;
    for _ in 0..3 {
        let mut orchestrator = control_plane.orchestrator("", &[NO_RETENTION]).await?;
        truncated(&control_plane, before + 1).await?;
        create_tasks(&control_plane, &orchestrator, 2).await?;
        let whole = assert_trail_intact(&orchestrator.client()?).await?;
        ensure!(whole.truncated > before, "{whole:?}");
        before = whole.truncated;
        wait_until_signed(&control_plane, &orchestrator).await?;
        // The rest of the quiet stream keeps everything after it.
        pin_records(&control_plane, &quiet, last + 1)?;
        orchestrator.kill()?;
    }
    Ok(())
}

#[tokio::test]
async fn records_removed_before_retention_are_still_missed_after_it() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut orchestrator = control_plane.orchestrator("", &[]).await?;
    create_tasks(&control_plane, &orchestrator, 5).await?;
    let old = stream(&control_plane)?;
    let last = number(
        &control_plane,
        &format!("select max(seq) from audit_events where stream = '{old}'"),
    )?;
    orchestrator.kill()?;
    // The last two records are removed, and the stream's position agrees.
    let end = last - 2;
    control_plane.postgres.query(&format!(
        "delete from audit_events where stream = '{old}' and seq > {end}; update audit_signed set seq = {end} where stream = '{old}';
         update audit_streams set seq = {end}, hash = (select hash from audit_events where stream = '{old}' and seq = {end}) where stream = '{old}'"
    ))?;
    pin_records(&control_plane, &old, end - 2)?;
    let orchestrator = control_plane.orchestrator("", &[NO_RETENTION]).await?;
    // Retention may refuse to continue where the trail is broken. Where it continues, it must not
    // sign the damage away.
    eventually("retention has run", TIMEOUT, async || {
        let log = fs_err::read_to_string(orchestrator.log())?;
        let has_refused = log.contains("The audit trail is not intact, so it is not truncated");
        Ok(has_refused || number(&control_plane, "select truncated from audit_head")? > 0)
    })
    .await?;
    let found = verdict(&orchestrator.client()?).await?;
    ensure!(
        !found.intact
            && found
                .problems
                .iter()
                .any(|problem| problem.stream.is_some_and(|id| id.to_string() == old)),
        "{found:#?}"
    );
    Ok(())
}

/// With a limit this small, checkpoints are folded every few seconds.
const FEW_CHECKPOINTS: (&str, &str) = ("audit_checkpoints", "3");

#[tokio::test]
async fn two_orchestrators_fold_the_checkpoints_of_both() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let one = control_plane.orchestrator("", &[FEW_CHECKPOINTS]).await?;
    let state_dir = control_plane.world.directory().join("orchestrator-two");
    fs_err::create_dir_all(&state_dir)?;
    fs_err::copy(
        one.state_dir().join("admin.token"),
        state_dir.join("admin.token"),
    )?;
    let two = control_plane
        .orchestrator("two", &[FEW_CHECKPOINTS])
        .await?;
    let first = || number(&control_plane, "select min(number) from audit_checkpoints");
    for _ in 0..3 {
        let before = first()?;
        eventually("the checkpoints are folded", TIMEOUT, async || {
            for orchestrator in [&one, &two] {
                orchestrator
                    .client()?
                    .create_task(&cynode_api::TaskCreate {
                        name: "one more".to_owned(),
                        ..Default::default()
                    })
                    .await?;
            }
            Ok(first()? > before)
        })
        .await?;
        for orchestrator in [&one, &two] {
            let whole = assert_trail_intact(&orchestrator.client()?).await?;
            assert_eq!(
                (whole.truncated, whole.streams >= 2),
                (0, true),
                "{whole:?}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
// invariant: audit-trail
async fn folding_many_checkpoints_into_one_hides_nothing() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[FEW_CHECKPOINTS]).await?;
    let client = orchestrator.client()?;
    let file = orchestrator
        .state_dir()
        .join("orchestrator/audit-checkpoints.jsonl");
    let first = |control_plane: &ControlPlane| {
        number(control_plane, "select min(number) from audit_checkpoints")
    };
    let until_folded = async |after: u64| {
        eventually("the checkpoints are folded", TIMEOUT, async || {
            create_tasks(&control_plane, &orchestrator, 1).await?;
            Ok(first(&control_plane)? > after)
        })
        .await
    };
    until_folded(1).await?;
    let folded = first(&control_plane)?;
    until_folded(folded).await?;
    wait_until_signed(&control_plane, &orchestrator).await?;
    let lines = fs_err::read_to_string(&file)?;
    assert!(
        lines.lines().count() < 10
            && lines
                .lines()
                .next()
                .context("a line")?
                .contains(r#"\"full\":true"#),
        "{lines}"
    );
    let whole = assert_trail_intact(&client).await?;
    assert_eq!(
        (whole.truncated, whole.checkpoints <= 12),
        (0, true),
        "{whole:?}"
    );

    // Changes under folded lines are found as before.
    let stream = stream(&control_plane)?;
    let changed = |value: &str| {
        control_plane.postgres.query(&format!(
            "update audit_events set at = at {value} interval \
             '1 second' where stream = '{stream}' and seq = 2"
        ))
    };
    changed("+")?;
    let found = verdict(&client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "record_changed" && problem.seq == Some(2)),
        "{found:#?}"
    );
    changed("-")?;

    // A changed checkpoint is evidence: nothing is folded over it. Folding may happen at that very
    // moment.
    let until_done = async |statement: &str| {
        let mut changed = None;
        eventually("one checkpoint is changed", TIMEOUT, async || {
            create_tasks(&control_plane, &orchestrator, 1).await?;
            changed = control_plane
                .postgres
                .query(statement)?
                .lines()
                .next()
                .and_then(|number| number.parse::<u64>().ok());
            Ok(changed.is_some())
        })
        .await?;
        changed.context("a number")
    };
    let swap = |from: &str, to: &str, which: &str| {
        format!(
            "update audit_checkpoints set line = replace(line, 'signature\":\"{from}', \
             'signature\":\"{to}') where {which} returning number"
        )
    };
    let many_more = async || {
        let before = fs_err::read_to_string(&file)?.lines().count();
        eventually("many more records follow", TIMEOUT, async || {
            client
                .create_task(&cynode_api::TaskCreate {
                    name: "one more".to_owned(),
                    ..Default::default()
                })
                .await?;
            Ok(fs_err::read_to_string(&file)?.lines().count() > before + 4)
        })
        .await
    };
    let newest = until_done(&swap(
        "",
        "AAAA",
        "number = (select max(number) from audit_checkpoints)",
    ))
    .await?;
    let start = first(&control_plane)?;
    many_more().await?;
    assert_eq!(first(&control_plane)?, start);
    let found = verdict(&client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.checkpoint == Some(newest)),
        "{found:#?}"
    );
    control_plane
        .postgres
        .query(&swap("AAAA", "", &format!("number = {newest}")))?;
    until_folded(start).await?;
    wait_until_signed(&control_plane, &orchestrator).await?;
    assert_trail_intact(&client).await?;

    // An end that was cut off in the database is not folded away either: the file still has it.
    until_done(
        "delete from audit_checkpoints where number = (select max(number) from \
         audit_checkpoints) and (select count(*) from audit_checkpoints) > 1 returning \
         number",
    )
    .await?;
    let start = first(&control_plane)?;
    many_more().await?;
    let found = verdict(&client).await?;
    ensure!(
        !found.intact
            && found
                .problems
                .iter()
                .any(|problem| problem.what.starts_with("checkpoint")),
        "{found:#?}"
    );
    assert_eq!(first(&control_plane)?, start);
    Ok(())
}

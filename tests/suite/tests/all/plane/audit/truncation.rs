//! Records grow old: retention removes them, signs that it did, and hides nothing by it.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::AuditKind;
use cynode_tests::{Plane, eventually};

use super::{PATIENCE, intact, of_action, signed, stream, tasks, verdict};

const NOW: (&str, &str) = ("audit_days", "0");

fn number(plane: &Plane, statement: &str) -> Result<u64> {
    plane
        .postgres
        .ask(statement)?
        .parse()
        .with_context(|| statement.to_owned())
}

/// Records from here on stay: a call in them is taken for open, and the writer for alive.
fn stays(plane: &Plane, stream: &str, from: u64) -> Result<()> {
    let set = format!("open_from = {from}, seen_at = now() + interval '1 hour'");
    plane
        .postgres
        .ask(&format!(
            "update audit_streams set {set} where stream = '{stream}'"
        ))
        .map(drop)
}

async fn truncated(plane: &Plane, at_least: u64) -> Result<()> {
    eventually("the old part is gone", PATIENCE, async || {
        Ok(number(plane, "select truncated from audit_head")? >= at_least)
    })
    .await
}

#[tokio::test]
async fn the_old_part_goes_and_the_rest_is_whole_but_a_plain_delete_is_found() -> Result<()> {
    let plane = Plane::new().await?;
    let mut orchestrator = plane.orchestrator("", &[]).await?;
    tasks(&plane, &orchestrator, 5).await?;
    let old = stream(&plane)?;
    let last = number(
        &plane,
        &format!("select max(seq) from audit_events where stream = '{old}'"),
    )?;
    let from = last - 3;
    let before = number(&plane, "select count(*) from audit_events")?;

    // The same rows, removed by somebody else.
    let goes = format!("stream = '{old}' and seq < {from}");
    plane.postgres.ask(&format!(
        "create table kept as select cursor, stream, seq, at, body, hash from audit_events where {goes}; delete from audit_events where {goes}"
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
    plane
        .postgres
        .ask("insert into audit_events (cursor, stream, seq, at, body, hash) select * from kept")?;
    intact(&client).await?;
    signed(&plane, &orchestrator).await?;

    // By retention.
    orchestrator.kill()?;
    stays(&plane, &old, from)?;
    let orchestrator = plane.orchestrator("", &[NOW]).await?;
    let client = orchestrator.client()?;
    truncated(&plane, from - 1).await?;
    assert_eq!(
        number(
            &plane,
            &format!("select min(seq) from audit_events where stream = '{old}'")
        )?,
        from
    );
    let whole = intact(&client).await?;
    assert_eq!(whole.truncated, from - 1);
    assert!(whole.records < before + 10, "{whole:?}");
    eventually("it is a record itself", PATIENCE, async || {
        Ok(!of_action(&client, "audit.truncate").await?.is_empty())
    })
    .await?;
    let told = of_action(&client, "audit.truncate").await?;
    assert_eq!(
        (
            told.len(),
            told[0].body.kind,
            told[0].body.detail["records"].as_u64(),
            told[0].body.detail["days"].as_u64()
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

    // It goes on, and what is changed behind the cut is found as before.
    tasks(&plane, &orchestrator, 2).await?;
    intact(&client).await?;
    let change = |value: &str| {
        plane.postgres.ask(&format!("update audit_events set at = at {value} interval '1 second' where stream = '{old}' and seq = {last}"))
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
    // And so is one that comes back, and one more that goes.
    plane.postgres.ask("insert into audit_events (cursor, stream, seq, at, body, hash) select * from kept order by seq desc limit 1")?;
    let found = verdict(&client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "record_inserted" && problem.seq == Some(from - 1)),
        "{found:#?}"
    );
    plane.postgres.ask(&format!(
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
async fn what_was_cut_from_a_quiet_stream_is_remembered_when_others_are_cut_again() -> Result<()> {
    let plane = Plane::new().await?;
    let mut first = plane.orchestrator("", &[]).await?;
    tasks(&plane, &first, 3).await?;
    let quiet = stream(&plane)?;
    let last = number(
        &plane,
        &format!("select max(seq) from audit_events where stream = '{quiet}'"),
    )?;
    first.kill()?;
    stays(&plane, &quiet, last)?;
    let mut before = 0;
    for _ in 0..3 {
        let mut orchestrator = plane.orchestrator("", &[NOW]).await?;
        truncated(&plane, before + 1).await?;
        tasks(&plane, &orchestrator, 2).await?;
        let whole = intact(&orchestrator.client()?).await?;
        ensure!(whole.truncated > before, "{whole:?}");
        before = whole.truncated;
        signed(&plane, &orchestrator).await?;
        // What is left of the quiet one lets nothing after it go.
        stays(&plane, &quiet, last + 1)?;
        orchestrator.kill()?;
    }
    Ok(())
}

#[tokio::test]
async fn what_somebody_cut_off_before_retention_came_is_found_after_it() -> Result<()> {
    let plane = Plane::new().await?;
    let mut orchestrator = plane.orchestrator("", &[]).await?;
    tasks(&plane, &orchestrator, 5).await?;
    let old = stream(&plane)?;
    let last = number(
        &plane,
        &format!("select max(seq) from audit_events where stream = '{old}'"),
    )?;
    orchestrator.kill()?;
    // The last two records go, and where the stream stands says so too.
    let end = last - 2;
    plane.postgres.ask(&format!(
        "delete from audit_events where stream = '{old}' and seq > {end}; update audit_signed set seq = {end} where stream = '{old}';
         update audit_streams set seq = {end}, hash = (select hash from audit_events where stream = '{old}' and seq = {end}) where stream = '{old}'"
    ))?;
    stays(&plane, &old, end - 2)?;
    let orchestrator = plane.orchestrator("", &[NOW]).await?;
    // Retention may refuse to go on where something is broken. Where it does go on, it must not sign that away.
    eventually(
        "the orchestrator has looked for what is old",
        PATIENCE,
        async || {
            let log = fs_err::read_to_string(orchestrator.log())?;
            let has_refused = log.contains("nothing of it is removed");
            Ok(has_refused || number(&plane, "select truncated from audit_head")? > 0)
        },
    )
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

/// With so few checkpoints they are folded every few seconds.
const FOLDED: (&str, &str) = ("audit_checkpoints", "3");

#[tokio::test]
async fn two_orchestrators_fold_the_checkpoints_of_both() -> Result<()> {
    let plane = Plane::new().await?;
    let one = plane.orchestrator("", &[FOLDED]).await?;
    let state_dir = plane.world.directory().join("orchestrator-two");
    fs_err::create_dir_all(&state_dir)?;
    fs_err::copy(
        one.state_dir().join("admin.token"),
        state_dir.join("admin.token"),
    )?;
    let two = plane.orchestrator("two", &[FOLDED]).await?;
    let first = || number(&plane, "select min(number) from audit_checkpoints");
    for _ in 0..3 {
        let before = first()?;
        eventually("they are folded", PATIENCE, async || {
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
            let whole = intact(&orchestrator.client()?).await?;
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
async fn many_checkpoints_become_one_and_hide_nothing() -> Result<()> {
    let plane = Plane::new().await?;
    let orchestrator = plane.orchestrator("", &[FOLDED]).await?;
    let client = orchestrator.client()?;
    let file = orchestrator
        .state_dir()
        .join("orchestrator/audit-checkpoints.jsonl");
    let first = |plane: &Plane| number(plane, "select min(number) from audit_checkpoints");
    let until_folded = async |after: u64| {
        eventually("they are folded", PATIENCE, async || {
            tasks(&plane, &orchestrator, 1).await?;
            Ok(first(&plane)? > after)
        })
        .await
    };
    until_folded(1).await?;
    let folded = first(&plane)?;
    until_folded(folded).await?;
    signed(&plane, &orchestrator).await?;
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
    let whole = intact(&client).await?;
    assert_eq!(
        (whole.truncated, whole.checkpoints <= 12),
        (0, true),
        "{whole:?}"
    );

    // What lies under lines that are gone is found as before.
    let stream = stream(&plane)?;
    let changed = |value: &str| {
        plane.postgres.ask(&format!("update audit_events set at = at {value} interval '1 second' where stream = '{stream}' and seq = 2"))
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

    // One that was changed is evidence: nothing is folded over it.
    // They may be folded at that very moment.
    let until_done = async |statement: &str| {
        let mut done = None;
        eventually("it is done to one", PATIENCE, async || {
            tasks(&plane, &orchestrator, 1).await?;
            done = plane
                .postgres
                .ask(statement)?
                .lines()
                .next()
                .and_then(|number| number.parse::<u64>().ok());
            Ok(done.is_some())
        })
        .await?;
        done.context("a number")
    };
    let swap = |from: &str, to: &str, which: &str| {
        format!(
            "update audit_checkpoints set line = replace(line, 'signature\":\"{from}', 'signature\":\"{to}') where {which} returning number"
        )
    };
    let many_more = async || {
        let before = fs_err::read_to_string(&file)?.lines().count();
        eventually("many more come", PATIENCE, async || {
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
    let start = first(&plane)?;
    many_more().await?;
    assert_eq!(first(&plane)?, start);
    let found = verdict(&client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.checkpoint == Some(newest)),
        "{found:#?}"
    );
    plane
        .postgres
        .ask(&swap("AAAA", "", &format!("number = {newest}")))?;
    until_folded(start).await?;
    signed(&plane, &orchestrator).await?;
    intact(&client).await?;

    // An end that was cut off in the database is not folded away either: the file has it.
    until_done("delete from audit_checkpoints where number = (select max(number) from audit_checkpoints) and (select count(*) from audit_checkpoints) > 1 returning number").await?;
    let start = first(&plane)?;
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
    assert_eq!(first(&plane)?, start);
    Ok(())
}

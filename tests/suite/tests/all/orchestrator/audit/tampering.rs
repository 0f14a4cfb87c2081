//! Somebody with the database's password changes, removes, adds and swaps rows: verification finds
//! and names each.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{AuditProblem, AuditVerdict, TaskCreate};
use cynode_client::UserClient;
use cynode_tests::{ControlPlane, eventually};
use serde_json::Value;

use super::{TIMEOUT, assert_trail_intact, create_tasks, stream, verdict, wait_until_signed};

/// A trail of two processes, the first of which is gone, with some checkpoints.
struct TamperedTrail {
    control_plane: ControlPlane,
    client: UserClient,
    /// The stream of the first process.
    old: String,
}

impl TamperedTrail {
    async fn new() -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let mut first = control_plane.orchestrator("", &[]).await?;
        for _ in 0..3 {
            create_tasks(&control_plane, &first, 2).await?;
        }
        let old = stream(&control_plane)?;
        first.kill()?;
        let orchestrator = control_plane.orchestrator("", &[]).await?;
        create_tasks(&control_plane, &orchestrator, 1).await?;
        let trail = Self {
            client: orchestrator.client()?,
            control_plane,
            old,
        };
        trail.query(
            "create table kept_events as select cursor, stream, seq, at, body, hash from audit_events where stream = 'OLD';
             create table kept_checkpoints as table audit_checkpoints;
             create table kept_streams as select * from audit_streams where stream = 'OLD';
             create table kept_signed as select * from audit_signed where stream = 'OLD'",
        )?;
        Ok(trail)
    }

    /// Runs a statement in which `OLD` stands for the stream of the first process.
    fn query(&self, statement: &str) -> Result<String> {
        self.control_plane
            .postgres
            .query(&statement.replace("OLD", &self.old))
    }

    fn number(&self, expression: &str) -> Result<u64> {
        Ok(self
            .query(&format!(
                "select {expression} from audit_events where stream = 'OLD'"
            ))?
            .parse()?)
    }

    /// Undoes all changes.
    fn restore(&self) -> Result<()> {
        self.query(
            "delete from audit_events where stream = 'OLD' or cursor <= 0;
             insert into audit_events (cursor, stream, seq, at, body, hash) select cursor, stream, seq, at, body, hash from kept_events;
             delete from audit_checkpoints where number in (select number from kept_checkpoints);
             insert into audit_checkpoints select * from kept_checkpoints;
             insert into audit_streams select * from kept_streams on conflict do nothing;
             insert into audit_signed select * from kept_signed on conflict do nothing",
        )
        .map(drop)
    }

    /// Returns the verdict after a statement. The trail must be intact before it and after undoing
    /// it.
    async fn verdict_after(&self, statement: &str) -> Result<AuditVerdict> {
        self.query(statement)?;
        let found = verdict(&self.client).await?;
        self.restore()?;
        assert_trail_intact(&self.client)
            .await
            .with_context(|| format!("after undoing {statement}"))?;
        ensure!(
            !found.intact && !found.problems.is_empty(),
            "not found: {statement}"
        );
        Ok(found)
    }
}

/// A problem that verification must find: its code, and the number of its record or checkpoint.
#[derive(Debug)]
enum ExpectedProblem {
    Record(&'static str, u64),
    Stream(&'static str),
    Checkpoint(&'static str, u64),
}

impl ExpectedProblem {
    fn matches(&self, problem: &AuditProblem, stream: &str) -> bool {
        let of_stream = problem.stream.is_some_and(|id| id.to_string() == stream);
        match self {
            Self::Record(what, seq) => {
                of_stream && problem.what == *what && problem.seq == Some(*seq)
            }
            Self::Stream(what) => of_stream && problem.what == *what,
            Self::Checkpoint(what, number) => {
                problem.what == *what && problem.checkpoint == Some(*number)
            }
        }
    }
}

// part of: ISC-22
#[tokio::test]
// invariant: audit-trail
async fn tampering_with_rows_is_found_and_the_record_is_named() -> Result<()> {
    use ExpectedProblem::{Checkpoint, Record, Stream};
    let trail = TamperedTrail::new().await?;
    let whole = assert_trail_intact(&trail.client).await?;
    assert!(
        whole.records > 14
            && whole.streams >= 2
            && whole.checkpoints >= 4
            && whole.open == 0
            && whole.truncated == 0,
        "{whole:?}"
    );
    assert!(
        whole.last_signed_at.is_some() && whole.key.starts_with("ed25519:"),
        "{whole:?}"
    );

    let last = trail.number("max(seq)")?;
    let [early, late] = [("min", "intent"), ("max", "intent")].map(|(which, kind)| {
        trail.number(&format!(
            "{which}(seq) filter (where action = 'task.create' and kind = '{kind}')"
        ))
    });
    let (early, late) = (early?, late?);
    let outcome = early + 1;
    ensure!(
        trail.number(&format!(
            "count(*) filter (where seq = {outcome} and kind = 'outcome')"
        ))? == 1,
        "the intent is not followed by its outcome"
    );
    let at = |seq: u64, set: &str| {
        format!("update audit_events set {set} where stream = 'OLD' and seq = {seq}")
    };
    let swap = |column: &str, [one, other]: [u64; 2]| {
        let take = |to: &str, seq: u64| {
            format!("update audit_events set {column} = {to} where stream = 'OLD' and seq = {seq};")
        };
        let kept = |seq: u64| format!("(select {column} from kept_events where seq = {seq})");
        // Cursors are unique, even within a transaction.
        let aside = if column == "cursor" {
            take("-1", one)
        } else {
            String::new()
        };
        format!(
            "{aside}{}{}",
            take(&kept(one), other),
            take(&kept(other), one)
        )
    };
    // Makes room before the end of the old stream and inserts a record there.
    let added = "update audit_events set cursor = cursor - 1000000 where stream = 'OLD'; update audit_events set cursor = cursor + 999999 where stream = 'OLD';
         insert into audit_events (cursor, stream, seq, at, body, hash)
         select cursor + 1, stream, seq + 1, at, '{\"version\": 1, \"kind\": \"event\", \"action\": \"session.state\"}', hash from audit_events
         where stream = 'OLD' order by seq desc limit 1";
    let cases: Vec<(String, Vec<ExpectedProblem>)> = vec![
        (at(early, "body = jsonb_set(body, '{detail,name}', '\"harmless\"')"), vec![Record("record_changed", early)]),
        (at(early, "body = jsonb_set(body, '{subject,name}', '\"somebody\"')"), vec![Record("record_changed", early)]),
        (at(outcome, "body = jsonb_set(body, '{status}', '403')"), vec![Record("record_changed", outcome)]),
        (at(early, "body = body - 'rules'"), vec![Record("record_changed", early)]),
        (at(early, "body = body || '{\"colour\": 1}'"), vec![Record("record_changed", early)]),
        (at(last, "body = body || '{\"colour\": 1}'"), vec![Record("record_changed", last)]),
        (at(early, "at = at + interval '1 microsecond'"), vec![Record("record_changed", early)]),
        (at(early, "hash = sha256('another')"), vec![Record("record_changed", early)]),
        (at(early, "hash = ''"), vec![Record("record_changed", early)]),
        (format!("delete from audit_events where stream = 'OLD' and seq = {outcome}"), vec![Record("record_missing", outcome)]),
        (
            format!("delete from audit_events where stream = 'OLD' and seq = {early}"),
            vec![Record("record_missing", early), Record("outcome_without_intent", outcome)],
        ),
        ("delete from audit_events where stream = 'OLD' and seq = 1".to_owned(), vec![Record("record_missing", 1)]),
        (added.to_owned(), vec![Record("record_inserted", last + 1)]),
        (swap("body", [early, late]), vec![Record("record_changed", early), Record("record_changed", late)]),
        (swap("cursor", [early, outcome]), vec![Record("order_changed", early)]),
        (format!("delete from audit_events where stream = 'OLD' and seq > {last} - 2"), vec![Record("tail_missing", last - 1)]),
        // The stream's position is reset too, as if the last records had never existed.
        (
            format!(
                "delete from audit_events where stream = 'OLD' and seq > {last} - 2; update audit_signed set seq = {last} - 2 where stream = 'OLD';
                 update audit_streams set seq = {last} - 2, hash = (select hash from kept_events where seq = {last} - 2) where stream = 'OLD'"
            ),
            vec![Record("tail_missing", last - 1)],
        ),
        (
            "delete from audit_events where stream = 'OLD'; delete from audit_streams where \
             stream = 'OLD'; delete from audit_signed where stream = 'OLD'"
                .to_owned(),
            vec![Stream("stream_missing")],
        ),
        ("delete from audit_checkpoints where number = 2".to_owned(), vec![Checkpoint("checkpoint_missing", 2)]),
        ("delete from audit_checkpoints where number = 1".to_owned(), vec![Checkpoint("checkpoint_missing", 1)]),
        (
            r"update audit_checkpoints set line = regexp_replace(line, '(cursor[^0-9]*)[0-9]+', '\1999999') where number = 2".to_owned(),
            vec![Checkpoint("signature_bad", 2)],
        ),
        ("update audit_checkpoints set line = 'nothing' where number = 2".to_owned(), vec![Checkpoint("checkpoint_changed", 2)]),
        (
            "update audit_checkpoints set line = (select line from kept_checkpoints where number \
             = 1) where number = 2".to_owned(),
            vec![Checkpoint("checkpoint_changed", 2)],
        ),
    ];
    for (statement, expected) in &cases {
        let found = trail.verdict_after(statement).await?;
        for names in expected {
            ensure!(
                found
                    .problems
                    .iter()
                    .any(|problem| names.matches(problem, &trail.old)),
                "{statement}\nlacks {names:?}: {:#?}",
                found.problems
            );
        }
        // Intact streams raise no problem.
        let others = found
            .problems
            .iter()
            .filter(|problem| problem.stream.is_some_and(|id| id.to_string() != trail.old))
            .count();
        ensure!(
            others == 0 && found.problems.len() <= expected.len() + 1,
            "{statement}: {:#?}",
            found.problems
        );
        for problem in found.problems.iter().filter(|problem| {
            matches!(
                problem.what.as_str(),
                "record_changed" | "record_inserted" | "order_changed"
            )
        }) {
            ensure!(
                problem.cursor.is_some() && !problem.detail.is_empty(),
                "{problem:?}"
            );
        }
    }

    // A row of a stream that no writer ever had.
    let foreign = "insert into audit_events (cursor, stream, seq, at, body, hash) select 0, '01890000-0000-7000-8000-000000000001', 1, at,
         '{\"version\": 1, \"kind\": \"event\", \"action\": \"session.state\"}', hash from audit_events where stream = 'OLD' and seq = 1";
    let found = trail.verdict_after(foreign).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "record_inserted"
                && problem.cursor == Some(0)
                && problem.seq == Some(1)),
        "{found:#?}"
    );

    // The columns that filters use can't differ from the body.
    for column in [
        "kind",
        "action",
        "call_id",
        "subject",
        "project_id",
        "task_id",
        "session_id",
        "job_id",
        "decision",
    ] {
        let refused = trail.query(&format!(
            "update audit_events set {column} = null where stream = 'OLD'"
        ));
        ensure!(
            refused
                .as_ref()
                .is_err_and(|error| error.to_string().contains("can only be updated to DEFAULT")),
            "{column}: {refused:?}"
        );
    }
    // Unless somebody first separates the two, and hides a record from searches.
    trail.query(&format!(
        "alter table audit_events alter column subject drop expression; update audit_events set \
         subject = 'nobody' where stream = 'OLD' and seq = {early}"
    ))?;
    let found = verdict(&trail.client).await?;
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| Record("column_changed", early).matches(problem, &trail.old)),
        "{found:#?}"
    );
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "table_changed"
                && problem.detail.contains("audit_events.subject")),
        "{found:#?}"
    );
    trail.query(
        "update audit_events set subject = body #>> '{subject,name}'; alter table \
         audit_streams enable row level security",
    )?;
    let found = verdict(&trail.client).await?;
    let tables: Vec<&str> = found
        .problems
        .iter()
        .filter(|problem| problem.what == "table_changed")
        .map(|problem| problem.detail.as_str())
        .collect();
    assert_eq!(
        tables,
        [
            "audit_streams hides rows by policies",
            "audit_events.subject is no longer generated from the body"
        ]
    );
    Ok(())
}

#[tokio::test]
// invariant: audit-trail
async fn a_restored_older_database_is_found_by_the_file_outside_it() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut first = control_plane.orchestrator("", &[]).await?;
    create_tasks(&control_plane, &first, 2).await?;
    let names = [
        "audit_events",
        "audit_streams",
        "audit_head",
        "audit_checkpoints",
        "audit_signed",
    ];
    let columns = |name: &str| {
        if name == "audit_events" {
            "cursor, stream, seq, at, body, hash"
        } else {
            "*"
        }
    };
    for name in names {
        control_plane.postgres.query(&format!(
            "create table kept_{name} as select {} from {name}",
            columns(name)
        ))?;
    }
    // The records to be hidden.
    create_tasks(&control_plane, &first, 2).await?;
    assert_trail_intact(&first.client()?).await?;
    wait_until_signed(&control_plane, &first).await?;
    first.kill()?;
    for name in names {
        let into = if name == "audit_events" {
            "audit_events (cursor, stream, seq, at, body, hash)"
        } else {
            name
        };
        control_plane.postgres.query(&format!(
            "delete from {name}; insert into {into} select * from kept_{name}"
        ))?;
    }
    let second = control_plane.orchestrator("", &[]).await?;
    let found = verdict(&second.client()?).await?;
    ensure!(!found.intact, "{found:?}");
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "tail_missing"),
        "{:#?}",
        found.problems
    );
    ensure!(
        found
            .problems
            .iter()
            .any(|problem| problem.what.starts_with("checkpoint_")),
        "{:#?}",
        found.problems
    );
    Ok(())
}

// A row added without care takes the next cursor.
#[tokio::test]
async fn a_row_appended_by_others_is_found_and_calls_continue() -> Result<()> {
    let trail = TamperedTrail::new().await?;
    trail.query(
        "insert into audit_events (cursor, stream, seq, at, body, hash) select (select max(cursor) + 1 from audit_events), stream, seq + 1, at,
         '{\"version\": 1, \"kind\": \"event\", \"action\": \"session.state\"}', hash from audit_events where stream = 'OLD' order by seq desc limit 1",
    )?;
    let find = async || {
        let Ok(verdict) = verdict(&trail.client).await else {
            return Ok(false);
        };
        Ok(verdict
            .problems
            .iter()
            .any(|problem| problem.stream.is_some_and(|id| id.to_string() == trail.old)))
    };
    eventually("the problem is found", TIMEOUT, find).await?;
    trail
        .client
        .create_task(&TaskCreate {
            name: "after it".to_owned(),
            ..Default::default()
        })
        .await?;
    Ok(())
}

#[tokio::test]
// invariant: audit-trail
async fn the_trail_verifies_at_every_moment_under_load() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    let work = |number: usize| {
        let client = client.clone();
        async move {
            for count in 0..100 {
                client
                    .create_task(&TaskCreate {
                        name: format!("task {number} {count}"),
                        ..Default::default()
                    })
                    .await?;
            }
            anyhow::Ok(())
        }
    };
    let callers: Vec<_> = (0..4).map(|number| tokio::spawn(work(number))).collect();
    let mut looks = 0;
    while callers.iter().any(|caller| !caller.is_finished()) {
        assert_trail_intact(&client).await?;
        looks += 1;
    }
    for caller in callers {
        caller.await??;
    }
    ensure!(looks > 2, "verified {looks} times");
    let whole = assert_trail_intact(&client).await?;
    ensure!(whole.open == 0 && whole.records >= 800, "{whole:?}");
    Ok(())
}

#[tokio::test]
async fn operators_of_the_database_owner_hide_no_records() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut first = control_plane.orchestrator("", &[]).await?;
    let task = first
        .client()?
        .create_task(&TaskCreate {
            name: "hidden".to_owned(),
            ..Default::default()
        })
        .await?;
    let id = task.id;
    get(&first.client()?, &format!("/v1/tasks/{id}")).await?;
    let records = format!("/v1/audit?task_id={id}");
    let is_listed = |page: &Value| {
        page["items"]
            .as_array()
            .is_some_and(|list| !list.is_empty())
    };
    let page = get(&first.client()?, &records).await?;
    ensure!(is_listed(&page), "{page}");
    first.stop().await?;
    control_plane.postgres.query(&format!(
        "create schema own;
         create function own.equal(uuid, uuid) returns boolean language sql immutable as
           $$ select $1::text <> '{id}' and $1::text = $2::text $$;
         create operator own.= (leftarg = uuid, rightarg = uuid, function = own.equal);
         do $$ begin execute format('alter database %I set search_path = own, pg_catalog, public', current_database()); end $$"
    ))?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let page = get(&orchestrator.client()?, &records).await?;
    ensure!(is_listed(&page), "{page}");
    Ok(())
}

async fn get(client: &UserClient, path: &str) -> Result<Value> {
    let request = client.sessions().request(http::Method::GET, path);
    Ok(request.send().await?.error_for_status()?.json().await?)
}

//! Fills the trail with records of execs as the orchestrator writes them, in a separate stream.
//! Running that many execs would take days.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cynode_audit::{Chain, Link};
use cynode_bench::{
    print_progress,
    through::{Stack, run_true},
};
use serde_json::Value;
use sqlx::{Connection as _, PgConnection};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

/// Records per transaction.
const BATCH_RECORDS: u64 = 100_000;
/// The number of sessions that the records belong to.
const SESSIONS: u64 = 1_000;
/// How long the checkpoints may take to catch up.
const SIGNING_TIMEOUT: Duration = Duration::from_mins(1);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Filled {
    pub(crate) records: u64,
    pub(crate) time: Duration,
    /// The size of the table and its indexes.
    pub(crate) bytes: u64,
}

pub(crate) async fn fill(stack: &Stack, records: u64) -> Result<Filled> {
    let started = Instant::now();
    let mut database = PgConnection::connect(stack.database()).await?;
    let models = templates(stack, &mut database).await?;
    let sessions: Vec<Value> = (0..SESSIONS)
        .map(|_| Uuid::now_v7().to_string().into())
        .collect();
    let mut chain = Chain::new(Uuid::now_v7());
    sqlx::query(
        "insert into audit_streams (stream, writer, hash, closed_at, settled_at) \
         values ($1, 'bench', $2, now(), now())",
    )
    .bind(chain.stream())
    .bind(chain.head().hash.as_slice())
    .execute(&mut database)
    .await?;
    let mut call = Uuid::now_v7();
    let mut written = 0;
    while written < records {
        let count = BATCH_RECORDS.min(records - written);
        let mut transaction = database.begin().await?;
        let last: i64 = sqlx::query_scalar("update audit_head set last = last + $1 returning last")
            .bind(i64::try_from(count)?)
            .fetch_one(&mut *transaction)
            .await?;
        let mut cursor = last - i64::try_from(count)?;
        let mut copy = transaction
            .copy_in_raw("copy audit_events (cursor, stream, seq, at, body, hash) from stdin")
            .await?;
        let mut text = String::with_capacity(2 << 20);
        for number in written..written + count {
            let mut body = models[usize::from(number % 2 == 1)].clone();
            if number % 2 == 0 {
                call = Uuid::now_v7();
            }
            body["call_id"] = call.to_string().into();
            body["exec_id"] = call.to_string().into();
            body["session_id"] = sessions[usize::try_from(number / 2 * 7_919 % SESSIONS)?].clone();
            cursor += 1;
            row(
                &mut text,
                cursor,
                &chain.append(OffsetDateTime::now_utc(), body),
            )?;
            if text.len() > 1 << 20 {
                copy.send(text.as_bytes()).await?;
                text.clear();
            }
        }
        copy.send(text.as_bytes()).await?;
        copy.finish().await?;
        sqlx::query(
            "update audit_streams set seq = $2, hash = $3, open_from = $2 + 1 where stream = $1",
        )
        .bind(chain.stream())
        .bind(i64::try_from(chain.head().seq)?)
        .bind(chain.head().hash.as_slice())
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        written += count;
        if written % 1_000_000 == 0 {
            print_progress(&format!(
                "{written} records, {:.0} s",
                started.elapsed().as_secs_f64()
            ));
        }
    }
    wait_until_signed(&mut database, &chain).await?;
    // As autovacuum would leave it after days.
    sqlx::query("vacuum analyze audit_events")
        .execute(&mut database)
        .await?;
    sqlx::query("checkpoint").execute(&mut database).await?;
    let bytes: i64 = sqlx::query_scalar("select pg_total_relation_size('audit_events')")
        .fetch_one(&mut database)
        .await?;
    Ok(Filled {
        records,
        time: started.elapsed(),
        bytes: u64::try_from(bytes)?,
    })
}

/// The two records of a real exec, as templates.
async fn templates(stack: &Stack, database: &mut PgConnection) -> Result<[Value; 2]> {
    let session = stack.session().await?;
    run_true(&stack.through, session).await?;
    let bodies: Vec<Value> = sqlx::query_scalar(
        "select body from audit_events \
         where session_id = $1 and action = 'session.exec' order by cursor",
    )
    .bind(session.as_uuid())
    .fetch_all(database)
    .await?;
    bodies
        .try_into()
        .ok()
        .context("an exec has not left two records")
}

/// A record in the format of COPY.
fn row(text: &mut String, cursor: i64, link: &Link) -> Result<()> {
    write!(
        text,
        "{cursor}\t{}\t{}\t{}\t",
        link.stream,
        link.seq,
        link.at.format(&Rfc3339)?
    )?;
    text.push_str(&link.body.to_string().replace('\\', "\\\\"));
    writeln!(text, "\t\\\\x{}", hex::encode(link.hash))?;
    Ok(())
}

/// Waits until the orchestrator has signed the records.
async fn wait_until_signed(database: &mut PgConnection, chain: &Chain) -> Result<()> {
    let deadline = Instant::now() + SIGNING_TIMEOUT;
    loop {
        let seq: Option<i64> = sqlx::query_scalar("select seq from audit_signed where stream = $1")
            .bind(chain.stream())
            .fetch_optional(&mut *database)
            .await?;
        if seq == Some(i64::try_from(chain.head().seq)?) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no checkpoint was made in time");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

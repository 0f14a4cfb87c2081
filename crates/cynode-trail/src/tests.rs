use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
};

use cynode_api::{AuditBody, AuditKind, NODE_REFUSED_ACTION};
use serde_json::{Value, json};

use super::*;

fn open(directory: &Path) -> Trail<TotalLedger> {
    let settings = TrailSettings {
        directory: directory.to_owned(),
        writer: AuditSubject {
            kind: "test".to_owned(),
            ..AuditSubject::default()
        },
        name: "this test",
        thread: "test-audit",
        metrics: TrailMetrics {
            backlog_records: "test_backlog_records",
            backlog_bytes: "test_backlog_bytes",
            lag_seconds: "test_lag_seconds",
            refused: "test_refused_total",
        },
        keep_bytes: None,
    };
    Trail::open(settings, TotalLedger::new(u64::MAX)).expect("opens")
}

async fn write(trail: &Trail<TotalLedger>, number: u64) -> Result<(), NotWritten> {
    let mut body = AuditBody::new(AuditKind::Event, "test");
    body.detail.insert("number".to_owned(), json!(number));
    let body = serde_json::to_value(body).expect("serializes");
    let record = trail.with_ledger(|ledger| ledger.admit(body, false));
    let record = record.expect("admitted");
    trail.write(OffsetDateTime::now_utc(), record, true).await
}

fn number(body: &Value) -> Option<u64> {
    body.pointer("/detail/number").and_then(Value::as_u64)
}

/// All records that wait, which are acknowledged.
async fn drain(trail: &Trail<TotalLedger>) -> Vec<Value> {
    let mut bodies = Vec::new();
    while let Some(batch) = trail.next_batch().await.expect("readable") {
        let next = batch.records.last().expect("not empty").seq + 1;
        bodies.extend(batch.records.into_iter().map(|record| record.body));
        let verdict = Verdict::Stored { next };
        let concluded = trail.conclude(batch.stream, verdict).await;
        assert_eq!(concluded.expect("stored"), Conclusion::Continued);
    }
    bodies
}

#[tokio::test]
async fn records_of_many_callers_are_durable_and_charged_until_they_are_acknowledged() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("audit");
    let trail = open(&path);
    let writes = (0..300).map(|number| write(&trail, number));
    for written in futures_util::future::join_all(writes).await {
        written.expect("written");
    }
    drop(trail);
    let trail = open(&path);
    assert!(trail.with_ledger(|ledger| ledger.total()) > 300);
    let numbers: Vec<u64> = drain(&trail).await.iter().filter_map(number).collect();
    assert_eq!(numbers, (0..300).collect::<Vec<_>>());
    assert_eq!(trail.with_ledger(|ledger| ledger.total()), 0);
    assert_eq!(trail.check(), Ok(()));
}

#[tokio::test]
async fn an_effect_that_nobody_waits_for_has_a_record_that_it_did_not_follow() {
    let directory = tempfile::tempdir().expect("a directory");
    let trail = open(&directory.path().join("audit"));
    write(&trail, 1).await.expect("written");
    // The disk is slow, and the caller gives up.
    let disk = trail.0.shared.store.lock();
    let mut abandoned = Box::pin(write(&trail, 2));
    assert!(futures_util::poll!(&mut abandoned).is_pending());
    std::thread::sleep(Duration::from_millis(200));
    drop(abandoned);
    drop(disk);
    trail.flush().await;
    let bodies = drain(&trail).await;
    let results: Vec<_> = bodies
        .iter()
        .filter(|body| number(body) == Some(2))
        .map(|body| body["result"].as_str())
        .collect();
    assert_eq!(results, [None, Some("not_started")], "{bodies:?}");
}

#[tokio::test]
async fn a_verdict_about_another_stream_or_other_records_changes_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let trail = open(&directory.path().join("audit"));
    for number in 0..3 {
        write(&trail, number).await.expect("written");
    }
    let batch = trail.next_batch().await.expect("readable").expect("some");
    let refused = |seq: u64| Verdict::Refused(BTreeMap::from([(seq, "no".to_owned())]));
    for (stream, verdict) in [
        (Uuid::now_v7(), Verdict::Stored { next: 3 }),
        (Uuid::now_v7(), Verdict::OutOfOrder { expected: None }),
        (batch.stream, refused(77)),
    ] {
        let concluded = trail.conclude(stream, verdict).await.expect("stored");
        assert_eq!(concluded, Conclusion::Stale);
    }
    assert_eq!(trail.next_batch().await.expect("readable"), Some(batch));
}

#[tokio::test]
async fn what_the_orchestrator_refuses_or_lost_is_shipped_in_another_stream() {
    let directory = tempfile::tempdir().expect("a directory");
    let trail = open(&directory.path().join("audit"));
    for number in 0..3 {
        write(&trail, number).await.expect("written");
    }
    let batch = trail.next_batch().await.expect("readable").expect("some");
    let verdict = Verdict::Refused(BTreeMap::from([(3, "no".to_owned())]));
    let concluded = trail.conclude(batch.stream, verdict.clone()).await;
    assert_eq!(concluded.expect("stored"), Conclusion::Rebased);
    // A second orchestrator refuses the same batch.
    let concluded = trail.conclude(batch.stream, verdict).await;
    assert_eq!(concluded.expect("stored"), Conclusion::Stale);
    let batch = trail.next_batch().await.expect("readable").expect("some");
    assert_eq!(batch.records[2].body["action"], NODE_REFUSED_ACTION);
    let verdict = Verdict::Stored { next: 3 };
    trail.conclude(batch.stream, verdict).await.expect("stored");
    // The database was restored. The first records are still in the file.
    let verdict = Verdict::OutOfOrder { expected: Some(1) };
    let concluded = trail.conclude(batch.stream, verdict).await;
    assert_eq!(concluded.expect("stored"), Conclusion::Continued);
    assert_eq!(
        trail.next_batch().await.expect("readable"),
        Some(batch.clone())
    );
    let verdict = Verdict::OutOfOrder { expected: None };
    let concluded = trail.conclude(batch.stream, verdict).await;
    assert_eq!(concluded.expect("stored"), Conclusion::Rebased);
    let numbers: Vec<u64> = drain(&trail).await.iter().filter_map(number).collect();
    assert_eq!(numbers, [2]);
}

/// The variable that makes `child` a writer.
const CHILD_DIRECTORY: &str = "TRAIL_TEST_DIRECTORY";

/// Not a test of its own: the process that the next test kills. It reports each record once it is
/// durable (`w`), and each that it ships (`s`) before the acknowledgment.
#[tokio::test]
async fn child() {
    let Some(directory) = std::env::var_os(CHILD_DIRECTORY) else {
        return;
    };
    let trail = open(Path::new(&directory));
    let mut out = std::io::stdout();
    let first = u64::try_from(OffsetDateTime::now_utc().unix_timestamp_nanos()).expect("a time");
    for count in 0..100_000 {
        write(&trail, first + count).await.expect("written");
        writeln!(out, "w {}", first + count).expect("the parent reads");
        if count % 7 != 6 {
            continue;
        }
        let Some(batch) = trail.next_batch().await.expect("readable") else {
            continue;
        };
        for record in &batch.records {
            let (stream, number) = (batch.stream, number(&record.body).unwrap_or_default());
            writeln!(out, "s {stream} {} {number}", record.seq).expect("the parent reads");
        }
        let next = batch.records.last().expect("not empty").seq + 1;
        let concluded = trail.conclude(batch.stream, Verdict::Stored { next }).await;
        concluded.expect("stored");
    }
}

#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "starts this program again")]
async fn a_writer_that_is_killed_at_any_point_loses_and_doubles_nothing() {
    const ROUNDS: usize = 6;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("audit");
    let mut written = BTreeSet::new();
    // What an orchestrator merged: each number of a stream once.
    let mut merged: BTreeMap<(String, u64), u64> = BTreeMap::new();
    for round in 1..=ROUNDS {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "tests::child", "--nocapture"])
            .env(CHILD_DIRECTORY, &path)
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        let mut seen = 0;
        loop {
            line.clear();
            // A line without its end was cut off by the kill.
            if lines.read_line(&mut line).expect("readable") == 0 || !line.ends_with('\n') {
                break;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["w", number] => {
                    written.insert(number.parse::<u64>().expect("a number"));
                }
                ["s", stream, seq, number] => {
                    let key = ((*stream).to_owned(), seq.parse().expect("a number"));
                    let number = number.parse().expect("a number");
                    let before = merged.insert(key, number);
                    assert!(before.is_none_or(|before| before == number));
                }
                _ => continue,
            }
            seen += 1;
            if seen == 13 * round {
                child.kill().expect("killed");
            }
        }
        child.wait().expect("ended");
    }
    let trail = open(&path);
    while let Some(batch) = trail.next_batch().await.expect("readable") {
        for record in &batch.records {
            let number = number(&record.body).unwrap_or_default();
            let before = merged.insert((batch.stream.to_string(), record.seq), number);
            assert!(before.is_none_or(|before| before == number));
        }
        let next = batch.records.last().expect("not empty").seq + 1;
        let verdict = Verdict::Stored { next };
        trail.conclude(batch.stream, verdict).await.expect("stored");
    }
    let numbers: Vec<u64> = merged.into_values().filter(|number| *number > 0).collect();
    let distinct: BTreeSet<u64> = numbers.iter().copied().collect();
    assert_eq!(numbers.len(), distinct.len(), "a record is there twice");
    let lost: Vec<_> = written.difference(&distinct).collect();
    assert!(lost.is_empty(), "records were lost: {lost:?}");
    assert!(written.len() > ROUNDS * 10);
}

use std::collections::BTreeMap;

use cynode_api::{JobId, NODE_REFUSED_ACTION, SessionId, TaskId};
use cynode_audit::Hash;
use proptest::prelude::*;

use super::*;
use crate::audit::decision::AuditedSandbox;

/// A directory that is removed at the end.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("audit")
    }

    fn open(&self) -> Store {
        Store::open(self.path(), node()).expect("opens")
    }

    /// The files with records, by name.
    fn segments(&self) -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = fs_err::read_dir(self.path())
            .expect("readable")
            .map(|entry| entry.expect("readable").path())
            .filter(|path| path.extension().is_some_and(|kind| kind == "jsonl"))
            .collect();
        found.sort();
        found
    }
}

fn node() -> NodeId {
    "01890000-0000-7000-8000-000000000001"
        .parse()
        .expect("an id")
}

fn sandbox() -> AuditedSandbox {
    AuditedSandbox {
        owner: SandboxOwner::Session(SessionId::generate()),
        task_id: TaskId::generate(),
    }
}

fn body(sandbox: AuditedSandbox, number: usize) -> Value {
    let mut body = sandbox.body(node(), "proxy.connect");
    body.detail.insert("number".to_owned(), json!(number));
    serde_json::to_value(body).expect("serializes")
}

fn append(store: &mut Store, numbers: std::ops::Range<usize>) {
    let sandbox = sandbox();
    let records = numbers
        .map(|number| (OffsetDateTime::now_utc(), body(sandbox, number)))
        .collect();
    store.append(records).expect("appended");
}

/// What an orchestrator would have: it accepts each stream's records in order, once.
#[derive(Default)]
struct Received {
    chains: BTreeMap<Uuid, Chain>,
    order: Vec<Uuid>,
    numbers: Vec<u64>,
    bodies: Vec<Value>,
}

impl Received {
    fn take(&mut self, batch: &NodeAuditBatch) -> u64 {
        if !self.chains.contains_key(&batch.stream) {
            self.order.push(batch.stream);
        }
        let chain = self
            .chains
            .entry(batch.stream)
            .or_insert_with(|| Chain::new(batch.stream));
        for record in &batch.records {
            let link = Link::from_node_record(batch.stream, record.clone()).expect("a record");
            if link.seq <= chain.head().seq {
                continue;
            }
            assert!(chain.follow(&link), "a gap or another chain: {link:?}");
            if let Some(number) = link.body.pointer("/detail/number").and_then(Value::as_u64) {
                self.numbers.push(number);
            }
            self.bodies.push(link.body);
        }
        chain.head().seq + 1
    }

    /// Takes all that a store has.
    fn drain(&mut self, store: &mut Store) {
        while let Some(batch) = store.next_batch().expect("readable") {
            let next = self.take(&batch);
            assert!(
                store
                    .acknowledge(batch.stream, next)
                    .expect("stored")
                    .is_some()
            );
        }
    }
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

#[test]
fn records_are_shipped_in_order_across_restarts_and_deleted_once_acknowledged() {
    let directory = Directory::new();
    let mut received = Received::default();
    let mut store = directory.open();
    append(&mut store, 0..3);
    append(&mut store, 3..5);
    let first = store.next_batch().expect("readable").expect("a batch");
    received.take(&first);
    // Acknowledged in part, then restarted twice.
    store.acknowledge(first.stream, 3).expect("stored");
    drop(store);
    let mut store = directory.open();
    append(&mut store, 5..6);
    drop(store);
    let mut store = directory.open();
    assert_eq!(store.backlog().records, 4 + 2);
    append(&mut store, 6..8);
    received.drain(&mut store);
    assert_eq!(received.numbers, numbers(0..8));
    assert_eq!(
        received.order.len(),
        3,
        "one stream per process that records"
    );
    assert_eq!(store.backlog(), Backlog::default());
    assert_eq!(directory.segments().len(), 1, "acknowledged files stay");
    drop(store);
    let mut store = directory.open();
    assert_eq!(directory.segments().len(), 0);
    assert_eq!(store.next_batch().expect("readable"), None);
    // A process that records nothing opens no stream; the next one continues after it.
    drop(store);
    let mut store = directory.open();
    append(&mut store, 8..9);
    received.drain(&mut store);
    assert_eq!(received.numbers, numbers(0..9));
}

#[test]
fn what_was_sent_but_not_acknowledged_is_sent_again_after_a_restart() {
    let directory = Directory::new();
    let mut received = Received::default();
    let mut store = directory.open();
    append(&mut store, 0..4);
    let batch = store.next_batch().expect("readable").expect("a batch");
    received.take(&batch);
    drop(store);
    let mut store = directory.open();
    let again = store.next_batch().expect("readable").expect("a batch");
    assert_eq!(again, batch, "the repeated batch differs");
    received.drain(&mut store);
    assert_eq!(received.numbers, numbers(0..4));
}

#[test]
fn long_streams_are_split_into_segments_and_batches() {
    let directory = Directory::new();
    let mut received = Received::default();
    let mut store = directory.open();
    for start in (0..6_000).step_by(500) {
        append(&mut store, start..start + 500);
    }
    assert!(directory.segments().len() > 1);
    drop(store);
    let mut store = directory.open();
    let batch = store.next_batch().expect("readable").expect("a batch");
    let bytes = serde_json::to_vec(&batch).expect("serializes").len();
    assert!(
        batch.records.len() <= node_audit_limits::MAX_RECORDS
            && bytes <= node_audit_limits::MAX_BATCH_BYTES
    );
    received.drain(&mut store);
    assert_eq!(received.numbers, numbers(0..6_000));
}

#[test]
fn an_orchestrator_that_lost_records_gets_them_again_while_they_are_held() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..4);
    let mut received = Received::default();
    received.drain(&mut store);
    let stream = received.order[0];
    // Its database was restored to a state before.
    let mut restored = Received::default();
    assert!(store.resend(stream, 1));
    append(&mut store, 4..5);
    restored.drain(&mut store);
    assert_eq!(restored.numbers, numbers(0..5));
    assert!(!store.resend(stream, 7), "a record that never was");
    assert!(!store.resend(Uuid::now_v7(), 1));
    assert!(
        store.acknowledge(stream, 9).expect("stored").is_none(),
        "more was acknowledged than there is"
    );
}

#[test]
fn what_was_lost_after_its_deletion_does_not_keep_the_rest_from_being_shipped() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..2);
    Received::default().drain(&mut store);
    drop(store);
    let mut store = directory.open();
    append(&mut store, 2..4);
    store.acknowledge(store.streams[0].id, 2).expect("stored");
    drop(store);
    let mut store = directory.open();
    append(&mut store, 4..6);
    store
        .rebase("the orchestrator has lost records", &BTreeMap::new())
        .expect("rebased");
    append(&mut store, 6..7);
    let mut received = Received::default();
    received.drain(&mut store);
    assert_eq!(received.numbers, numbers(2..7));
    assert_eq!(received.order.len(), 1);
    assert!(received.bodies[0]["detail"]["continues"].is_object());
    drop(store);
    let mut store = directory.open();
    assert_eq!(store.next_batch().expect("readable"), None);
}

#[test]
fn a_refused_record_stays_as_one_of_the_node_alone() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..4);
    let refused = BTreeMap::from([(3, "it is foreign".to_owned())]);
    store.rebase("refused", &refused).expect("rebased");
    let mut received = Received::default();
    received.drain(&mut store);
    assert_eq!(received.numbers, [0, 2, 3]);
    let record = received
        .bodies
        .iter()
        .find(|body| body["action"] == NODE_REFUSED_ACTION)
        .expect("the refused record");
    assert_eq!(owner_of(record), None, "it is still attributed");
    assert_eq!(record["detail"]["record"]["body"]["detail"]["number"], 1);
    assert_eq!(record["detail"]["reason"], "it is foreign");
}

/// A node that was away for longer than the orchestrator takes records.
#[test]
fn the_nodes_own_records_that_are_refused_do_not_keep_others_from_being_shipped() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..2);
    let refused = |seqs: &[u64]| {
        let reasons = seqs.iter().map(|seq| (*seq, "it is too old".to_owned()));
        reasons.collect::<BTreeMap<_, _>>()
    };
    let before = OffsetDateTime::now_utc();
    // The first record of the stream and one of a sandbox; then the record of that refusal.
    store.rebase("refused", &refused(&[1, 2])).expect("rebased");
    store.rebase("refused", &refused(&[1, 2])).expect("rebased");
    append(&mut store, 2..3);
    let batch = store.next_batch().expect("readable").expect("a batch");
    assert!(batch.records[..2].iter().all(|record| record.at >= before));
    let mut received = Received::default();
    received.drain(&mut store);
    assert_eq!(received.numbers, [1, 2]);
    let first = &received.bodies[0];
    assert_eq!(first["action"], NODE_STREAM_ACTION);
    assert_eq!(first["detail"]["dropped"]["reason"], "it is too old");
    let kept = &received.bodies[1];
    assert_eq!(kept["action"], NODE_REFUSED_ACTION);
    assert_eq!(kept["detail"]["record"]["body"]["detail"]["number"], 0);
}

#[test]
// invariant: no-starvation
fn a_trail_that_is_too_long_keeps_what_quiet_sandboxes_did() {
    let directory = Directory::new();
    let mut store = directory.open();
    let (quiet, busy) = (sandbox(), sandbox());
    let now = OffsetDateTime::now_utc();
    store.append(vec![(now, body(quiet, 0))]).expect("appended");
    for start in (1..2_001).step_by(100) {
        let records = (start..start + 100).map(|number| (now, body(busy, number)));
        store.append(records.collect()).expect("appended");
    }
    let bytes = store.backlog().bytes;
    store.evict(bytes).expect("short enough");
    assert_eq!(store.backlog().bytes, bytes);
    store.evict(bytes / 2).expect("evicted");
    assert!(store.backlog().bytes <= bytes / 2);
    let last = (now, body(busy, 2_001));
    store.append(vec![last]).expect("appended");
    drop(store);
    let mut received = Received::default();
    received.drain(&mut directory.open());
    assert_eq!(received.numbers[0], 0, "the quiet sandbox's record is gone");
    assert!(received.numbers.len() > 500);
    let newest = received.numbers[1..].to_vec();
    assert_eq!(newest, numbers(newest[0]..2_002));
}

#[test]
fn a_lost_position_loses_no_record() {
    for damage in [None, Some("nonsense")] {
        let directory = Directory::new();
        let mut store = directory.open();
        append(&mut store, 0..4);
        let before = directory.segments().remove(0);
        let bytes = fs_err::read(&before).expect("readable");
        store.rebase("test", &BTreeMap::new()).expect("rebased");
        append(&mut store, 4..5);
        drop(store);
        // The file before the rebase may still be there.
        fs_err::write(before, bytes).expect("written");
        let position = directory.path().join("position.json");
        match damage {
            None => fs_err::remove_file(position).expect("removed"),
            Some(text) => fs_err::write(position, text).expect("written"),
        }
        drop(directory.open());
        let mut store = directory.open();
        append(&mut store, 5..6);
        let mut received = Received::default();
        received.drain(&mut store);
        received.numbers.sort_unstable();
        received.numbers.dedup();
        assert_eq!(received.numbers, numbers(0..6), "{damage:?}");
        // From then on the position is known.
        drop(store);
        assert_eq!(directory.open().next_batch().expect("readable"), None);
    }
}

#[test]
fn a_rebase_that_can_not_store_its_position_leaves_the_records_as_they_are() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..2);
    let position = directory.path().join("position.json");
    fs_err::remove_file(&position).expect("removed");
    fs_err::create_dir_all(position.join("in-the-way")).expect("made");
    assert!(store.rebase("test", &BTreeMap::new()).is_err());
    // Nobody knows which files count after a crash, so nothing may be added to either.
    let record = (OffsetDateTime::now_utc(), body(sandbox(), 9));
    assert!(store.append(vec![record]).is_err());
    assert!(store.rebase("test", &BTreeMap::new()).is_err());
    assert_eq!(directory.segments().len(), 2);
    fs_err::remove_dir_all(&position).expect("removed");
    append(&mut store, 2..3);
    assert_eq!(directory.segments().len(), 1);
    drop(store);
    let mut received = Received::default();
    received.drain(&mut directory.open());
    assert_eq!(received.numbers, numbers(0..3));
}

#[test]
fn a_rebase_that_a_crash_interrupted_never_counts() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..4);
    let before: Vec<(PathBuf, Vec<u8>)> = directory
        .segments()
        .into_iter()
        .map(|path| (path.clone(), fs_err::read(path).expect("readable")))
        .collect();
    let position = fs_err::read(directory.path().join("position.json")).expect("readable");
    store.rebase("test", &BTreeMap::new()).expect("rebased");
    // As if the process had died before the position was stored.
    fs_err::write(directory.path().join("position.json"), position).expect("written");
    for (path, bytes) in before {
        fs_err::write(path, bytes).expect("written");
    }
    assert_eq!(directory.segments().len(), 2);
    drop(store);
    let mut store = directory.open();
    let mut received = Received::default();
    received.drain(&mut store);
    assert_eq!(received.numbers, numbers(0..4));
}

#[test]
fn a_disk_without_space_refuses_records_and_leaves_the_stream_intact() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..2);
    // Writing fails, after which the file is repaired.
    let path = directory.segments().remove(0);
    let readable = fs_err::File::open(&path).expect("opens");
    let writable = std::mem::replace(&mut store.active.as_mut().expect("active").file, readable);
    let record = (OffsetDateTime::now_utc(), body(sandbox(), 99));
    assert!(store.append(vec![record.clone()]).is_err());
    assert!(store.append(vec![record]).is_err());
    store.active.as_mut().expect("active").file = writable;
    append(&mut store, 2..4);
    drop(store);
    let mut received = Received::default();
    received.drain(&mut directory.open());
    assert_eq!(received.numbers, numbers(0..4));
}

#[test]
fn a_damaged_file_is_set_aside_and_the_rest_is_shipped() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..3);
    drop(store);
    let mut store = directory.open();
    append(&mut store, 3..5);
    drop(store);
    let damaged = directory.segments().remove(0);
    let text = fs_err::read_to_string(&damaged).expect("readable");
    fs_err::write(&damaged, text.replace("\"number\":1", "\"number\":7")).expect("written");
    let mut store = directory.open();
    append(&mut store, 5..6);
    let mut received = Received::default();
    received.drain(&mut store);
    assert_eq!(
        received.numbers,
        [0, 3, 4, 5],
        "a changed record was shipped"
    );
    assert!(damaged.with_extension("unreadable").exists());
    let says_so = |body: &Value| body["detail"]["lost_records"] == true;
    assert!(received.bodies.iter().any(says_so));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a crash leaves of the last write, exactly the records before it are kept.
    #[test]
    fn a_stream_cut_or_garbled_at_any_byte_keeps_the_records_before(
        cut in any::<prop::sample::Index>(),
        garbage in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let directory = Directory::new();
        let mut store = directory.open();
        append(&mut store, 0..6);
        let stream = store.streams[0].id;
        drop(store);
        let path = directory.segments().remove(0);
        let intact = fs_err::read(&path).expect("readable");
        let mut bytes = intact[..cut.index(intact.len() + 1)].to_vec();
        bytes.extend(&garbage);
        fs_err::write(&path, &bytes).expect("written");
        let same = intact.iter().zip(&bytes).take_while(|(one, other)| one == other);
        // Lines: the header, the stream's first record, then the numbered ones.
        let whole = same.filter(|(byte, _)| **byte == b'\n').count();

        let mut store = directory.open();
        append(&mut store, 6..8);
        let mut received = Received::default();
        received.drain(&mut store);
        let kept = u64::try_from(whole.saturating_sub(2)).expect("few");
        let expected: Vec<u64> = (0..kept).chain(6..8).collect();
        prop_assert_eq!(&received.numbers, &expected);
        prop_assert!(received.order.last() != Some(&stream), "an old stream was continued");
    }

    /// Records, restarts, lost answers, partial acknowledgments: each record arrives once.
    #[test]
    fn each_record_arrives_once_and_in_order(
        steps in prop::collection::vec(0..5_u8, 1..40),
    ) {
        let directory = Directory::new();
        let mut store = directory.open();
        let mut received = Received::default();
        let mut next = 0;
        for step in steps {
            match step {
                0 | 1 => {
                    append(&mut store, next..next + 2);
                    next += 2;
                }
                2 => {
                    drop(store);
                    store = directory.open();
                }
                // The answer is lost.
                3 => {
                    if let Some(batch) = store.next_batch().expect("readable") {
                        received.take(&batch);
                    }
                }
                _ => {
                    if let Some(batch) = store.next_batch().expect("readable") {
                        let end = received.take(&batch);
                        store.acknowledge(batch.stream, end.min(3)).expect("stored");
                    }
                }
            }
        }
        received.drain(&mut store);
        prop_assert_eq!(received.numbers, numbers(0..next as u64));
        prop_assert_eq!(store.backlog(), Backlog::default());
    }
}

#[test]
fn jobs_and_sessions_own_their_records() {
    let job = AuditedSandbox {
        owner: SandboxOwner::Job(JobId::generate()),
        task_id: TaskId::generate(),
    };
    assert_eq!(owner_of(&body(job, 1)), Some(job.owner));
    let hash: Hash = segment::start(Uuid::nil()).hash;
    assert_eq!(hash, cynode_audit::genesis(Uuid::nil()));
}

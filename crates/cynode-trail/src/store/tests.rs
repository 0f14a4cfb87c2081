use std::collections::BTreeMap;

use cynode_api::{NODE_REFUSED_ACTION, NodeId, SessionId};
use cynode_audit::Hash;
use proptest::prelude::*;

use super::*;

/// A directory that is removed at the end.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("audit")
    }

    fn open(&self) -> Store<SessionId> {
        Store::open(self.path(), node(), owner_of).expect("opens")
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

fn node() -> AuditSubject {
    let id: Result<NodeId, _> = "01890000-0000-7000-8000-000000000001".parse();
    AuditSubject {
        kind: "node".to_owned(),
        node_id: Some(id.expect("an id")),
        ..AuditSubject::default()
    }
}

fn owner_of(body: &Value) -> Option<SessionId> {
    body.get("session_id")?.as_str()?.parse().ok()
}

fn body(session_id: SessionId, number: usize) -> Value {
    let mut body = AuditBody::new(AuditKind::Event, "proxy.connect");
    body.subject = Some(node());
    body.session_id = Some(session_id);
    body.detail.insert("number".to_owned(), json!(number));
    serde_json::to_value(body).expect("serializes")
}

fn append(store: &mut Store<SessionId>, numbers: std::ops::Range<usize>) {
    let session = SessionId::generate();
    let records = numbers
        .map(|number| (OffsetDateTime::now_utc(), body(session, number)))
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
    fn drain(&mut self, store: &mut Store<SessionId>) {
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
fn a_refused_record_stays_as_one_of_the_writer_alone() {
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
    // The node's own records can't be refused for ever in new streams.
    drop(store);
    let mut store = directory.open();
    append(&mut store, 4..5);
    let first = BTreeMap::from([(1, "no".to_owned())]);
    assert!(store.rebase("refused", &first).is_err());
    received.drain(&mut store);
    assert_eq!(received.numbers, [0, 2, 3, 4]);
}

#[test]
fn records_of_a_writer_under_an_earlier_name_can_be_refused_as_a_whole() {
    let directory = Directory::new();
    let mut store = directory.open();
    append(&mut store, 0..2);
    drop(store);
    let renamed = AuditSubject {
        node_id: Some(NodeId::generate()),
        ..node()
    };
    let mut store = Store::open(directory.path(), renamed.clone(), owner_of).expect("opens");
    let refused = (1..=3).map(|seq| (seq, "it is foreign".to_owned()));
    store
        .rebase("refused", &refused.collect())
        .expect("rebased");
    let mut received = Received::default();
    received.drain(&mut store);
    let actions: Vec<_> = received.bodies.iter().map(|body| &body["action"]).collect();
    assert_eq!(actions[0], NODE_STREAM_ACTION);
    assert!(
        actions[1..]
            .iter()
            .all(|action| **action == NODE_REFUSED_ACTION)
    );
    assert_eq!(actions.len(), 4, "a record was dropped");
    let renamed = serde_json::to_value(renamed).expect("serializes");
    assert!(
        received
            .bodies
            .iter()
            .all(|body| body["subject"] == renamed)
    );
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
    let record = (OffsetDateTime::now_utc(), body(SessionId::generate(), 99));
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
fn records_are_charged_to_their_owner_after_a_restart_too() {
    let directory = Directory::new();
    let session = SessionId::generate();
    let mut store = directory.open();
    let record = (OffsetDateTime::now_utc(), body(session, 1));
    store.append(vec![record]).expect("appended");
    drop(store);
    let charges: Vec<Charge<SessionId>> = directory.open().pending().collect();
    let owners: Vec<_> = charges.iter().map(|(owner, _)| *owner).collect();
    assert_eq!(owners, [None, Some(session)]);
    assert!(charges.iter().all(|(_, cost)| *cost > RECORD_OVERHEAD));
    let hash: Hash = segment::start(Uuid::nil()).hash;
    assert_eq!(hash, cynode_audit::genesis(Uuid::nil()));
}

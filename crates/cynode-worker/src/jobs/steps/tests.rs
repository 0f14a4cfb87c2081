use cynode_api::{JobId, TaskId, sba::JobSpec};

use super::*;

fn plan() -> Plan {
    let json = serde_json::json!({
        "protocol_version": "1.0",
        "job_id": JobId::generate(),
        "task_id": TaskId::generate(),
        "constraints": {"max_runtime_seconds": 1, "max_output_bytes": 1},
        "steps": [
            {"type": "list_tree", "args": {}},
            {"type": "list_tree", "args": {}, "idempotent": true},
            {"type": "list_tree", "args": {}},
        ],
    });
    Plan::of(&JobSpec::from_value(json).expect("valid"))
}

fn attempt(number: u32) -> Attempt {
    Attempt {
        number,
        exec_id: ExecId::generate(),
        timeout_ms: 1,
        job_began_at: OffsetDateTime::UNIX_EPOCH,
    }
}

fn started(index: u64) -> Event {
    Event::StepStarted { index }
}

fn ended(index: u64) -> Event {
    Event::StepEnded { index }
}

struct Journal {
    directory: tempfile::TempDir,
    plan: Plan,
    steps: Steps,
}

impl Journal {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let steps = Steps::open(&directory.path().join("steps")).expect("opens");
        Self {
            plan: plan(),
            steps,
            directory,
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("steps")
    }

    /// Reopens the journal, as a restarted worker does.
    fn reopened(mut self) -> Self {
        self.steps = Steps::open(&self.path()).expect("opens");
        self
    }

    fn begin(&mut self) -> Attempt {
        let number = u32::try_from(self.steps.attempts().len()).expect("few") + 1;
        let attempt = attempt(number);
        self.steps.begin(attempt.clone()).expect("recorded");
        attempt
    }

    fn judge(&self, event: Event) -> Result<Novelty, String> {
        self.steps
            .check(self.steps.received() + 1, event, &self.plan)
    }

    /// Checks and records the next event of the runner.
    fn take(&mut self, event: Event) {
        assert_eq!(self.judge(event), Ok(Novelty::New), "{event:?}");
        let number = self.steps.received() + 1;
        if matches!(event, Event::StepEnded { .. }) {
            let json = format!("{{\"step\":{}}}", self.steps.ended());
            let status = StepStatus::Success;
            self.steps.record_end(number, status, json.as_bytes())
        } else {
            self.steps.record(number, event)
        }
        .expect("recorded");
    }

    fn refuses(&self, event: Event) {
        assert!(self.judge(event).is_err(), "{event:?}");
    }
}

#[test]
fn another_worker_finds_every_acknowledged_event() {
    let mut journal = Journal::new();
    let first = journal.begin();
    for event in [Event::Accepted, started(0), ended(0), started(1)] {
        journal.take(event);
    }
    let journal = journal.reopened();
    let steps = &journal.steps;
    assert_eq!(steps.attempts(), [first]);
    assert_eq!(
        (steps.received(), steps.ended(), steps.in_flight()),
        (4, 1, Some(1))
    );
    assert!(steps.is_accepted() && !steps.has_result());
    assert_eq!(steps.result(0).expect("stored"), b"{\"step\":0}");
    assert!(steps.result(1).is_err());
}

#[test]
fn a_line_that_a_crash_cut_off_never_happened() {
    let mut journal = Journal::new();
    journal.begin();
    for event in [Event::Accepted, started(0)] {
        journal.take(event);
    }
    let whole = journal.steps.length;
    journal.take(ended(0));
    let text = fs_err::read(journal.path()).expect("readable");
    for length in whole..text.len() as u64 {
        let kept = usize::try_from(length).expect("short");
        fs_err::write(journal.path(), &text[..kept]).expect("written");
        journal = journal.reopened();
        assert_eq!(
            (journal.steps.received(), journal.steps.in_flight()),
            (2, Some(0)),
            "{length}"
        );
        assert_eq!(journal.steps.length, whole);
        // The runner resends the event.
        journal.take(ended(0));
        journal.take(started(1));
        journal = journal.reopened();
        assert_eq!(journal.steps.in_flight(), Some(1));
        assert_eq!(journal.steps.result(0).expect("stored"), b"{\"step\":0}");
    }
}

#[test]
fn a_journal_that_makes_no_sense_is_not_used() {
    let mut journal = Journal::new();
    journal.begin();
    journal.take(Event::Accepted);
    let text = fs_err::read_to_string(journal.path()).expect("readable");
    for damaged in [
        format!("{text}nonsense\n"),
        text.replace("attempt", "attempts"),
        format!(
            "{text}{{\"event\":{{\"number\":2,\"event\":{{\"event\":\"step_ended\",\"index\":0}},\
             \"result\":{{\"bytes\":3,\"status\":\"success\"}}}}}}\n{{\"step\":0}}\n"
        ),
        "x".repeat(10_000),
    ] {
        fs_err::write(journal.path(), &damaged).expect("written");
        assert!(Steps::open(&journal.path()).is_err(), "{damaged}");
    }
}

#[test]
fn steps_run_in_order_and_once() {
    let mut journal = Journal::new();
    journal.begin();
    for early in [started(0), ended(0)] {
        journal.refuses(early);
    }
    journal.take(Event::Accepted);
    journal.refuses(Event::Accepted);
    for wrong in [started(1), ended(0), ended(u64::MAX)] {
        journal.refuses(wrong);
    }
    journal.take(started(0));
    for wrong in [started(0), started(1), ended(1)] {
        journal.refuses(wrong);
    }
    journal.take(ended(0));
    for wrong in [started(0), ended(0), started(2)] {
        journal.refuses(wrong);
    }
    for index in [1, 2] {
        journal.take(started(index));
        journal.take(ended(index));
    }
    for wrong in [started(3), ended(3)] {
        journal.refuses(wrong);
    }
    assert_eq!(journal.steps.succeeded(), 3);
    journal.take(Event::Result);
    for late in [Event::Accepted, started(3), Event::Result] {
        journal.refuses(late);
    }
}

#[test]
fn no_step_follows_a_failed_one() {
    let mut journal = Journal::new();
    journal.begin();
    journal.take(Event::Accepted);
    journal.take(started(0));
    let failed = journal.steps.record_end(3, StepStatus::Failure, b"{}");
    failed.expect("recorded");
    journal.refuses(started(1));
    assert_eq!(journal.steps.succeeded(), 0);
    journal.take(Event::Result);
}

#[test]
fn an_event_that_is_repeated_is_known_and_a_gap_is_refused() {
    let mut journal = Journal::new();
    journal.begin();
    journal.take(Event::Accepted);
    journal.take(started(0));
    let check = |number, event| journal.steps.check(number, event, &journal.plan);
    for (number, event) in [(1, Event::Accepted), (2, started(0)), (0, Event::Result)] {
        assert_eq!(check(number, event), Ok(Novelty::Known));
    }
    assert!(check(4, ended(0)).is_err());
}

#[test]
fn a_second_runner_repeats_only_an_idempotent_step() {
    // The first runner dies in a step. The second may repeat it only if it is idempotent.
    for (interrupted, may_repeat) in [(0, false), (1, true)] {
        let mut journal = Journal::new();
        journal.begin();
        journal.take(Event::Accepted);
        for index in 0..interrupted {
            journal.take(started(index));
            journal.take(ended(index));
        }
        journal.take(started(interrupted));
        journal.begin();
        let mut journal = journal.reopened();
        assert_eq!(
            (journal.steps.received(), journal.steps.in_flight()),
            (0, Some(interrupted))
        );
        journal.refuses(started(interrupted + 1));
        assert_eq!(journal.judge(ended(interrupted)), Ok(Novelty::New));
        assert!(journal.steps.check_end(StepStatus::Success).is_err());
        assert_eq!(journal.steps.check_end(StepStatus::Interrupted), Ok(()));
        assert_eq!(journal.judge(started(interrupted)).is_ok(), may_repeat);
        if may_repeat {
            journal.take(started(interrupted));
            journal.refuses(started(interrupted));
            assert_eq!(journal.steps.check_end(StepStatus::Success), Ok(()));
            journal.take(ended(interrupted));
            journal.take(started(interrupted + 1));
        }
    }
}

#[test]
fn a_write_that_failed_leaves_nothing() {
    let mut journal = Journal::new();
    journal.begin();
    journal.take(Event::Accepted);
    // A full disk leaves part of a line.
    let file = fs_err::OpenOptions::new()
        .append(true)
        .open(journal.path())
        .expect("opens");
    std::io::Write::write_all(&mut file.into_parts().0, b"{\"event\":{\"numb").expect("written");
    journal.take(started(0));
    let journal = journal.reopened();
    assert_eq!(journal.steps.in_flight(), Some(0));
}

#[test]
fn results_are_kept_whole_up_to_a_limit() {
    let mut journal = Journal::new();
    journal.begin();
    journal.take(Event::Accepted);
    journal.take(started(0));
    let most = MAX_STEP_RESULTS_BYTES;
    assert!(journal.steps.has_room_for(most) && !journal.steps.has_room_for(most + 1));
    let status = StepStatus::Success;
    let stored = journal.steps.record_end(3, status, &[b'x'; 1_000]);
    stored.expect("recorded");
    let journal = journal.reopened();
    assert!(journal.steps.has_room_for(most - 1_000) && !journal.steps.has_room_for(most - 999));
}

#[test]
fn steps_that_an_agent_makes_may_follow_a_failed_one_and_are_never_repeated() {
    let mut journal = Journal::new();
    let json = serde_json::json!({
        "protocol_version": "1.0",
        "job_id": JobId::generate(),
        "task_id": TaskId::generate(),
        "constraints": {"max_runtime_seconds": 1, "max_output_bytes": 1},
        "inference": {"allowed_models": ["m"]},
        "steps": [],
    });
    journal.plan = Plan::of(&JobSpec::from_value(json).expect("valid"));
    journal.begin();
    journal.take(Event::Accepted);
    journal.take(started(0));
    let number = journal.steps.received() + 1;
    let recorded = journal.steps.record_end(number, StepStatus::Failure, b"{}");
    recorded.expect("recorded");
    journal.refuses(started(0));
    journal.refuses(started(2));
    journal.take(started(1));
    journal.begin();
    journal.refuses(started(1));
    journal.take(ended(1));
    journal.refuses(started(
        u64::try_from(cynode_api::sba::limits::MAX_STEPS).expect("small"),
    ));
}

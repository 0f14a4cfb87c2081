//! Orchestrator, worker and PostgreSQL are killed under load: nothing is lost, runs twice or is
//! left behind, and the audit trail records everything once.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::TcpListener,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use cynode_api::{
    AuditResult, AuditVerdict, Event, ExecId, ExecRequest, ExecResult, JobCreate, JobId, JobState,
    LimitsRequest, Retry, Session, SessionCreate, SessionEnd, SessionId, SessionState, TaskCreate,
    TaskId,
};
use cynode_client::{JobFilter, OutputQuery, SessionFilter, UserClient};
use cynode_tests::{
    Answer, AuditTrail, ControlPlane, IMAGE, Options, Random, RecordingCaller, RunningOrchestrator,
    RunningWorker, eventually, sh, wait_until_settled, whole_trail,
};
use http::Method;
use serde_json::Value;

pub(super) const TIMEOUT: Duration = Duration::from_secs(180);
/// The delay before a caller retries a broken call.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// Calls that a killed writer left open are closed once its heartbeat is a quarter of a minute old.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A free port; a restarted role must keep its port.
pub(super) fn free_port() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

pub(super) fn small_limits() -> LimitsRequest {
    LimitsRequest {
        memory_bytes: Some(64 << 20),
        disk_bytes: Some(32 << 20),
        cpus: Some(0.5),
        ..Default::default()
    }
}

/// The three roles, each of which can be killed and restarted.
pub(super) struct KillableStack {
    pub(super) control_plane: ControlPlane,
    pub(super) orchestrator: RunningOrchestrator,
    pub(super) worker: RunningWorker,
    settings: Vec<(String, String)>,
    options: Options,
}

impl KillableStack {
    pub(super) async fn start() -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let key = control_plane
            .world
            .directory()
            .join("registration.key")
            .display()
            .to_string();
        let control = free_port()?;
        let settings: Vec<(String, String)> = [
            ("listen", free_port()?),
            ("control_listen", control.clone()),
            ("registration_key_file", key.clone()),
            ("seed_images", format!("[{IMAGE:?}]")),
            ("heartbeat_seconds", "1".to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .to_vec();
        let orchestrator = start(&control_plane, &settings).await?;
        let options = Options::default()
            .set(
                "orchestrator_url",
                &format!("{:?}", format!("http://{control}")),
            )
            .set("registration_key_file", &format!("{key:?}"))
            .set("name", "\"node-1\"");
        let worker = control_plane.world.worker(&options).await?;
        let stack = Self {
            control_plane,
            orchestrator,
            worker,
            settings,
            options,
        };
        let client = stack.orchestrator.client()?;
        let ready = async || {
            Ok(client
                .nodes()
                .await?
                .iter()
                .any(|node| node.state == cynode_api::NodeState::Ready))
        };
        eventually("the node has registered", TIMEOUT, ready).await?;
        Ok(stack)
    }

    /// Kills a role with SIGKILL and restarts it.
    pub(super) async fn kill(&mut self, role: Victim) -> Result<()> {
        match role {
            Victim::Orchestrator => {
                self.orchestrator.kill()?;
                self.orchestrator = start(&self.control_plane, &self.settings).await?;
            }
            Victim::Worker => {
                self.worker.kill()?;
                self.worker = self.control_plane.world.worker(&self.options).await?;
            }
            Victim::Postgres => {
                self.control_plane
                    .postgres
                    .kill_and_restart(&self.control_plane.world)
                    .await?;
            }
        }
        Ok(())
    }
}

async fn start(
    control_plane: &ControlPlane,
    settings: &[(String, String)],
) -> Result<RunningOrchestrator> {
    let settings: Vec<(&str, &str)> = settings
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    control_plane.orchestrator("", &settings).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Orchestrator,
    Worker,
    Postgres,
}

/// The calls in flight.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    pub(super) job_creates: AtomicUsize,
    pub(super) session_creates: AtomicUsize,
    pub(super) execs: AtomicUsize,
    /// The last state of each job, by its events.
    jobs: Mutex<HashMap<JobId, String>>,
}

impl InFlight {
    fn phases(&self) -> Vec<String> {
        let mut phases = Vec::new();
        for (name, count) in [
            ("job create", &self.job_creates),
            ("session create", &self.session_creates),
            ("exec", &self.execs),
        ] {
            if count.load(Ordering::SeqCst) > 0 {
                phases.push(name.to_owned());
            }
        }
        let jobs = self.jobs.lock().expect("not poisoned");
        for state in ["accepted", "in_progress"] {
            if jobs.values().any(|known| known == state) {
                phases.push(format!("job {state}"));
            }
        }
        phases
    }
}

/// Retries a call until it is answered.
pub(super) async fn retry_until_answered<T>(
    counter: &AtomicUsize,
    mut call: impl AsyncFnMut() -> cynode_client::Result<T>,
) -> Result<T> {
    counter.fetch_add(1, Ordering::SeqCst);
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    let outcome = loop {
        match call().await {
            Ok(answer) => break Ok(answer),
            Err(error)
                if error.status().is_none_or(|status| status >= 500)
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(RETRY_DELAY).await;
            }
            Err(error) => break Err(error.into()),
        }
    };
    counter.fetch_sub(1, Ordering::SeqCst);
    outcome
}

/// Like `retry_until_answered`, and records every response.
async fn call_until_answered(
    counter: &AtomicUsize,
    recorder: &RecordingCaller,
    method: Method,
    path: &str,
    body: &Value,
) -> Result<Answer> {
    counter.fetch_add(1, Ordering::SeqCst);
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    let outcome = loop {
        match recorder.call(method.clone(), path, body).await {
            Some(answer) if answer.status < 300 => break Ok(answer),
            answer
                if answer.as_ref().is_none_or(|answer| answer.status >= 500)
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(RETRY_DELAY).await;
            }
            answer => break Err(anyhow::anyhow!("{path}: {answer:?}")),
        }
    };
    counter.fetch_sub(1, Ordering::SeqCst);
    outcome
}

/// A call that must succeed at the first attempt.
async fn call_ok(recorder: &RecordingCaller, path: &str, body: &Value) -> Result<Answer> {
    match recorder.call(Method::POST, path, body).await {
        Some(answer) if answer.status < 300 => Ok(answer),
        answer => bail!("{path}: {answer:?}"),
    }
}

/// Reads every event in order, resuming from the last cursor after a failure, until everything has
/// ended.
pub(super) async fn read_events(
    next: impl Fn() -> UserClient,
    open: Arc<InFlight>,
    last: impl Fn() -> Option<i64>,
) -> Result<Vec<Event>> {
    let mut seen: Vec<Event> = Vec::new();
    let mut cursor = 0;
    let deadline = tokio::time::Instant::now() + 3 * TIMEOUT;
    while last().is_none_or(|last| cursor < last) {
        ensure!(
            tokio::time::Instant::now() < deadline,
            "the events did not end"
        );
        match next()
            .events(cursor, None, Duration::from_millis(500))
            .await
        {
            Ok(page) => {
                for event in page.items {
                    ensure!(
                        event.cursor == seen.last().map_or(0, |event| event.cursor) + 1,
                        "after {:?} came {event:?}",
                        seen.last()
                    );
                    if let Some(id) = event.job_id {
                        open.jobs
                            .lock()
                            .expect("not poisoned")
                            .insert(id, event.state.clone());
                    }
                    seen.push(event);
                }
                cursor = page.next_cursor;
            }
            Err(error) if error.status().is_none_or(|status| status >= 500) => {
                tokio::time::sleep(RETRY_DELAY).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(seen)
}

/// A job that prints a unique name, so that a second run would show, and exits with a given code.
pub(super) fn job(task_id: TaskId, number: usize, random: &mut Random) -> JobCreate {
    let (pause, code) = (random.below(20), number % 3);
    let script = format!(
        "cat /proc/sys/kernel/random/uuid; sleep {}.{}; echo number {number}; exit {code}",
        pause / 10,
        pause % 10
    );
    JobCreate {
        task_id: Some(task_id),
        job_id: Some(JobId::generate()),
        command: vec!["sh".to_owned(), "-c".to_owned(), script],
        timeout_seconds: Some(120),
        limits: Some(small_limits()),
        retry: Some(Retry::Never),
        ..Default::default()
    }
}

/// A caller that creates a session and runs a command in it, whatever fails meanwhile.
async fn use_session(
    recorder: &RecordingCaller,
    open: &InFlight,
    task: TaskId,
    id: SessionId,
) -> Result<()> {
    let request = SessionCreate {
        limits: Some(small_limits()),
        ..SessionCreate::new(task, id, "default")
    };
    call_until_answered(
        &open.session_creates,
        recorder,
        Method::POST,
        "/v1/sessions",
        &serde_json::to_value(&request)?,
    )
    .await?;
    let running = async || {
        let answer = call_until_answered(
            &open.session_creates,
            recorder,
            Method::GET,
            &format!("/v1/sessions/{id}"),
            &Value::Null,
        )
        .await?;
        let state = serde_json::from_slice::<Session>(&answer.body)?.state;
        ensure!(
            !matches!(state, SessionState::Failed | SessionState::Lost),
            "session {id} is {state}"
        );
        Ok(state == SessionState::Running)
    };
    eventually("the session runs", TIMEOUT, running).await?;
    // A lost response is retried with the same exec id: the command runs once.
    let exec = ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh(&format!("echo {id} >> mark; cat mark"))
    };
    let answer = call_until_answered(
        &open.execs,
        recorder,
        Method::POST,
        &format!("/v1/sessions/{id}/exec"),
        &serde_json::to_value(&exec)?,
    )
    .await?;
    let answer: ExecResult = serde_json::from_slice(&answer.body)?;
    ensure!(answer.stdout == format!("{id}\n"), "{answer:?}");
    Ok(())
}

/// The ids of everything that calls have created, on the node and in the database.
#[derive(Debug, Default)]
struct CreatedIds {
    execs: BTreeSet<String>,
    sessions: BTreeSet<String>,
    jobs: BTreeSet<String>,
}

impl CreatedIds {
    async fn find(stack: &KillableStack, sessions: &[SessionId]) -> Result<Self> {
        let (node, rows) = (stack.worker.client()?, |statement| {
            stack.control_plane.postgres.query(statement)
        });
        let mut made = Self::default();
        for id in sessions {
            made.execs.extend(
                node.list_execs(*id)
                    .await?
                    .items
                    .iter()
                    .map(|exec| exec.exec_id.to_string()),
            );
        }
        made.sessions.extend(
            node.list_sessions(&SessionFilter::default())
                .await?
                .iter()
                .map(|session| session.session_id.to_string()),
        );
        made.sessions.extend(
            rows("select session_id from sessions")?
                .lines()
                .map(str::to_owned),
        );
        made.jobs.extend(
            node.list_jobs(&JobFilter::default())
                .await?
                .iter()
                .map(|job| job.job_id.to_string()),
        );
        made.jobs
            .extend(rows("select job_id from jobs")?.lines().map(str::to_owned));
        Ok(made)
    }
}

/// Checks that the trail contains all responses and all effects, each call with one intent and one
/// outcome. Returns the number of calls that were closed by reconciliation.
async fn check_trail(
    client: &UserClient,
    recorder: &RecordingCaller,
    made: &CreatedIds,
) -> Result<(AuditVerdict, usize)> {
    let verdict = wait_until_settled(client, SETTLE_TIMEOUT).await?;
    let trail = AuditTrail::new(whole_trail(client).await?);
    trail.check(&recorder.answers())?;
    let (mut begun, mut done, mut found_out) = (CreatedIds::default(), CreatedIds::default(), 0);
    for (intent, outcome) in trail.pairs()? {
        let body = &intent.body;
        found_out += usize::from(outcome.body.detail.contains_key("found_out"));
        for (ids, counts) in [
            (&mut begun, true),
            (&mut done, outcome.body.result == Some(AuditResult::Done)),
        ] {
            match body.action.as_str() {
                "session.exec" if counts => {
                    ids.execs.extend(body.exec_id.map(|id| id.to_string()));
                }
                "session.create" if counts => ids
                    .sessions
                    .extend(body.session_id.map(|id| id.to_string())),
                "job.create" if counts => ids.jobs.extend(body.job_id.map(|id| id.to_string())),
                _ => {}
            }
        }
    }
    ensure!(
        !made.execs.is_empty() && made.execs.is_subset(&begun.execs),
        "without an intent: {:?}",
        made.execs.difference(&begun.execs)
    );
    // Everything that exists was created by a call that is recorded as done.
    ensure!(
        made.sessions == done.sessions,
        "created: {:?}, recorded: {:?}",
        made.sessions,
        done.sessions
    );
    ensure!(
        made.jobs == done.jobs,
        "created: {:?}, recorded: {:?}",
        made.jobs,
        done.jobs
    );
    Ok((verdict, found_out))
}

async fn rounds(rounds: usize, jobs: usize, sessions: usize) -> Result<()> {
    let mut random = Random::seeded();
    let mut stack = KillableStack::start().await?;
    let client = stack.orchestrator.client()?;
    let recorder = RecordingCaller::new(client.clone());
    let task = client
        .create_task(&TaskCreate {
            name: "faults".to_owned(),
            ..Default::default()
        })
        .await?
        .id;
    let open = Arc::new(InFlight::default());
    let last_event = Arc::new(Mutex::new(None));
    let reader = tokio::spawn({
        let (client, open, last_event) =
            (client.clone(), Arc::clone(&open), Arc::clone(&last_event));
        async move {
            read_events(
                || client.clone(),
                open,
                || *last_event.lock().expect("not poisoned"),
            )
            .await
        }
    });

    let mut all_jobs = BTreeMap::new();
    let mut all_sessions = Vec::new();
    let mut report = Vec::new();
    for round in 0..rounds {
        let jobs_of_round: Vec<JobCreate> = (0..jobs / rounds)
            .map(|number| job(task, round * 1000 + number, &mut random))
            .collect();
        all_jobs.extend(jobs_of_round.iter().enumerate().map(|(number, job)| {
            (
                job.job_id.expect("the request has an id"),
                round * 1000 + number,
            )
        }));
        let ids: Vec<SessionId> = (0..sessions / rounds)
            .map(|_| SessionId::generate())
            .collect();
        all_sessions.extend(ids.iter().copied());
        let callers = jobs_of_round.into_iter().map(|job| {
            let (recorder, open) = (recorder.clone(), Arc::clone(&open));
            tokio::task::spawn_local(async move {
                let body = serde_json::to_value(&job)?;
                call_until_answered(
                    &open.job_creates,
                    &recorder,
                    Method::POST,
                    "/v1/jobs",
                    &body,
                )
                .await
                .map(drop)
            })
        });
        let users = ids.into_iter().map(|id| {
            let (recorder, open) = (recorder.clone(), Arc::clone(&open));
            tokio::task::spawn_local(async move { use_session(&recorder, &open, task, id).await })
        });
        let work: Vec<tokio::task::JoinHandle<Result<()>>> = callers.chain(users).collect();
        for role in random.shuffled([Victim::Orchestrator, Victim::Worker, Victim::Postgres]) {
            // At a random moment.
            drop(
                tokio::time::timeout(
                    Duration::from_millis(random.below(1_500)),
                    std::future::pending::<()>(),
                )
                .await,
            );
            report.push(format!("{role:?}: {}", open.phases().join(", ")));
            stack
                .kill(role)
                .await
                .with_context(|| format!("killing {role:?}"))?;
        }
        for caller in work {
            caller.await??;
        }
    }

    for (id, number) in &all_jobs {
        let ended = async || Ok(client.job(*id).await.is_ok_and(|job| job.state.is_final()));
        eventually("every job ends", TIMEOUT, ended)
            .await
            .with_context(|| format!("job {id}"))?;
        let job = client.job(*id).await?;
        let code = i32::try_from(number % 3)?;
        let expected = if code == 0 {
            JobState::Completed
        } else {
            JobState::Failed
        };
        ensure!(
            (job.state, job.exit_code) == (expected, Some(code)),
            "job {number}: {job:?}"
        );
        let lines: Vec<&str> = job.output.stdout.lines().collect();
        ensure!(
            lines.len() == 2 && lines[1] == format!("number {number}"),
            "job {number} printed {:?}",
            job.output.stdout
        );
        let page = client.job_output(*id, &OutputQuery::default()).await?;
        let kept: String = page
            .chunks
            .into_iter()
            .filter_map(|chunk| chunk.data)
            .collect();
        ensure!(kept == job.output.stdout, "job {number} kept {kept:?}");
    }
    for id in &all_sessions {
        let answer = call_ok(
            &recorder,
            &format!("/v1/sessions/{id}/exec"),
            &serde_json::to_value(sh("cat mark"))?,
        )
        .await?;
        let answer: ExecResult = serde_json::from_slice(&answer.body)?;
        ensure!(answer.stdout == format!("{id}\n"), "{answer:?}");
    }
    let made = CreatedIds::find(&stack, &all_sessions).await?;
    for id in &all_sessions {
        call_ok(
            &recorder,
            &format!("/v1/sessions/{id}/end"),
            &serde_json::to_value(SessionEnd::default())?,
        )
        .await?;
    }
    for id in &all_sessions {
        // The node learns of an end a little later if the first attempt failed.
        let ended =
            async || Ok(client.sessions().get_session(*id).await?.state == SessionState::Ended);
        eventually("every session ends", TIMEOUT, ended)
            .await
            .with_context(|| format!("session {id}"))?;
    }
    let unseen = client.events(i64::MAX - 1, None, Duration::ZERO).await;
    ensure!(unseen.is_err(), "a cursor beyond the newest was accepted");
    let newest = newest(&client).await?;
    *last_event.lock().expect("not poisoned") = Some(newest);
    let events = reader.await??;
    check_events(&events, &all_jobs, &all_sessions)?;
    let clean = async || Ok(stack.control_plane.world.containers()?.is_empty());
    eventually("no container is left", TIMEOUT, clean).await?;
    let (verdict, found_out) = check_trail(&client, &recorder, &made).await?;
    stack.worker.shut_down().await?;
    #[expect(clippy::print_stdout, reason = "the report of a run")]
    {
        println!(
            "faults: {} jobs, {} sessions, {} events",
            all_jobs.len(),
            all_sessions.len(),
            events.len()
        );
        println!(
            "  answers: {}; records: {} in {} streams; closed by asking: {found_out}",
            recorder.answers().len(),
            verdict.records,
            verdict.streams
        );
        for line in report {
            println!("  killed {line}");
        }
    }
    Ok(())
}

pub(super) async fn newest(client: &UserClient) -> Result<i64> {
    let mut cursor = 0;
    loop {
        let page = client.events(cursor, None, Duration::ZERO).await?;
        if page.items.is_empty() {
            return Ok(page.next_cursor);
        }
        cursor = page.next_cursor;
    }
}

/// Each job: accepted, perhaps in progress, one end. Each session: creating, running, ended.
pub(super) fn check_events(
    events: &[Event],
    jobs: &BTreeMap<JobId, usize>,
    sessions: &[SessionId],
) -> Result<()> {
    for id in jobs.keys() {
        let states: Vec<&str> = events
            .iter()
            .filter(|event| event.job_id == Some(*id))
            .map(|event| event.state.as_str())
            .collect();
        let middle = states
            .get(1..states.len().saturating_sub(1))
            .unwrap_or_default();
        let is_valid = states.first() == Some(&"accepted")
            && middle.iter().all(|state| *state == "in_progress")
            && middle.len() <= 1;
        ensure!(
            is_valid
                && states
                    .last()
                    .is_some_and(|state| matches!(*state, "completed" | "failed"))
                && states.len() >= 2,
            "job {id}: {states:?}"
        );
    }
    for id in sessions {
        let states: Vec<&str> = events
            .iter()
            .filter(|event| event.session_id == Some(*id))
            .map(|event| event.state.as_str())
            .collect();
        ensure!(
            states.first() == Some(&"creating")
                && states.contains(&"running")
                && states.last() == Some(&"ended"),
            "session {id}: {states:?}"
        );
        ensure!(
            states.iter().filter(|state| **state == "ended").count() == 1,
            "session {id}: {states:?}"
        );
    }
    Ok(())
}

// part of: CYNAI.SBAGNT.JobLifecycle, ISC-22
#[tokio::test]
// invariant: intent-and-outcome
async fn kills_of_any_role_lose_nothing_and_repeat_nothing() -> Result<()> {
    tokio::task::LocalSet::new()
        .run_until(rounds(3, 51, 21))
        .await
}

#[tokio::test]
async fn soak_kills_of_any_role_lose_nothing_and_repeat_nothing() -> Result<()> {
    tokio::task::LocalSet::new()
        .run_until(rounds(15, 300, 90))
        .await
}

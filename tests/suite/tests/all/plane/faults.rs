//! Orchestrator, worker and PostgreSQL killed in the middle of everything: nothing is lost, nothing runs twice, nothing is left,
//! and all of it is told in the audit trail, once.

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
    Answer, IMAGE, Options, Plane, Random, RunningOrchestrator, RunningWorker, Trail, Witness,
    eventually, sh, until_settled, whole_trail,
};
use http::Method;
use serde_json::Value;

pub(super) const PATIENCE: Duration = Duration::from_secs(180);
/// Between two tries of a caller whose call was cut off.
const AGAIN: Duration = Duration::from_millis(200);
/// What a writer that was killed left open is closed when it has not been heard of for a quarter of a minute.
const CLOSED: Duration = Duration::from_secs(60);

/// A port that is free now; a role that is started again must have the same.
pub(super) fn free_port() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

pub(super) fn small() -> LimitsRequest {
    LimitsRequest {
        memory_bytes: Some(64 << 20),
        disk_bytes: Some(32 << 20),
        cpus: Some(0.5),
        ..Default::default()
    }
}

/// The three roles, each of which can be killed and started again.
struct Stack {
    plane: Plane,
    orchestrator: RunningOrchestrator,
    worker: RunningWorker,
    settings: Vec<(String, String)>,
    options: Options,
}

impl Stack {
    async fn start() -> Result<Self> {
        let plane = Plane::new().await?;
        let key = plane
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
        let orchestrator = start(&plane, &settings).await?;
        let options = Options::default()
            .set(
                "orchestrator_url",
                &format!("{:?}", format!("http://{control}")),
            )
            .set("registration_key_file", &format!("{key:?}"))
            .set("name", "\"node-1\"");
        let worker = plane.world.worker(&options).await?;
        let stack = Self {
            plane,
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
        eventually("the node has registered", PATIENCE, ready).await?;
        Ok(stack)
    }

    /// SIGKILL, and the same role again.
    async fn kill(&mut self, role: Role) -> Result<()> {
        match role {
            Role::Orchestrator => {
                self.orchestrator.kill()?;
                self.orchestrator = start(&self.plane, &self.settings).await?;
            }
            Role::Worker => {
                self.worker.kill()?;
                self.worker = self.plane.world.worker(&self.options).await?;
            }
            Role::Postgres => {
                self.plane
                    .postgres
                    .kill_and_restart(&self.plane.world)
                    .await?
            }
        }
        Ok(())
    }
}

async fn start(plane: &Plane, settings: &[(String, String)]) -> Result<RunningOrchestrator> {
    let settings: Vec<(&str, &str)> = settings
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    plane.orchestrator("", &settings).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Orchestrator,
    Worker,
    Postgres,
}

/// What callers wait for at a moment.
#[derive(Debug, Default)]
pub(super) struct Open {
    pub(super) job_creates: AtomicUsize,
    pub(super) session_creates: AtomicUsize,
    pub(super) execs: AtomicUsize,
    /// The last state of each job that was told.
    jobs: Mutex<HashMap<JobId, String>>,
}

impl Open {
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

/// Calls again until it is answered, as a caller does who was cut off.
pub(super) async fn persist<T>(
    counter: &AtomicUsize,
    mut call: impl AsyncFnMut() -> cynode_client::Result<T>,
) -> Result<T> {
    counter.fetch_add(1, Ordering::SeqCst);
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let outcome = loop {
        match call().await {
            Ok(answer) => break Ok(answer),
            Err(error)
                if error.status().is_none_or(|status| status >= 500)
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(AGAIN).await
            }
            Err(error) => break Err(error.into()),
        }
    };
    counter.fetch_sub(1, Ordering::SeqCst);
    outcome
}

/// The same, with every answer remembered.
async fn insist(
    counter: &AtomicUsize,
    witness: &Witness,
    method: Method,
    path: &str,
    body: &Value,
) -> Result<Answer> {
    counter.fetch_add(1, Ordering::SeqCst);
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let outcome = loop {
        match witness.call(method.clone(), path, body).await {
            Some(answer) if answer.status < 300 => break Ok(answer),
            answer
                if answer.as_ref().is_none_or(|answer| answer.status >= 500)
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(AGAIN).await
            }
            answer => break Err(anyhow::anyhow!("{path}: {answer:?}")),
        }
    };
    counter.fetch_sub(1, Ordering::SeqCst);
    outcome
}

/// One call that must be good.
async fn good(witness: &Witness, path: &str, body: &Value) -> Result<Answer> {
    match witness.call(Method::POST, path, body).await {
        Some(answer) if answer.status < 300 => Ok(answer),
        answer => bail!("{path}: {answer:?}"),
    }
}

/// Reads every event in order, from the last cursor again when it was cut off, until everything has ended.
pub(super) async fn read_events(
    next: impl Fn() -> UserClient,
    open: Arc<Open>,
    last: impl Fn() -> Option<i64>,
) -> Result<Vec<Event>> {
    let mut seen: Vec<Event> = Vec::new();
    let mut cursor = 0;
    let deadline = tokio::time::Instant::now() + 3 * PATIENCE;
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
                tokio::time::sleep(AGAIN).await
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(seen)
}

/// A job that says a name nobody else has, so that a second run would show, and ends as it is told.
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
        limits: Some(small()),
        retry: Some(Retry::Never),
        ..Default::default()
    }
}

/// Somebody who makes a session and runs a command in it, whatever happens meanwhile.
async fn use_session(witness: &Witness, open: &Open, task: TaskId, id: SessionId) -> Result<()> {
    let request = SessionCreate {
        limits: Some(small()),
        ..SessionCreate::new(task, id, "default")
    };
    insist(
        &open.session_creates,
        witness,
        Method::POST,
        "/v1/sessions",
        &serde_json::to_value(&request)?,
    )
    .await?;
    let running = async || {
        let answer = insist(
            &open.session_creates,
            witness,
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
    eventually("the session runs", PATIENCE, running).await?;
    // The same exec again, should the answer be lost: it runs once.
    let exec = ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh(&format!("echo {id} >> mark; cat mark"))
    };
    let answer = insist(
        &open.execs,
        witness,
        Method::POST,
        &format!("/v1/sessions/{id}/exec"),
        &serde_json::to_value(&exec)?,
    )
    .await?;
    let answer: ExecResult = serde_json::from_slice(&answer.body)?;
    ensure!(answer.stdout == format!("{id}\n"), "{answer:?}");
    Ok(())
}

/// What there is on the node and in the database that calls have made, by id.
#[derive(Debug, Default)]
struct Made {
    execs: BTreeSet<String>,
    sessions: BTreeSet<String>,
    jobs: BTreeSet<String>,
}

impl Made {
    async fn find(stack: &Stack, sessions: &[SessionId]) -> Result<Self> {
        let (node, rows) = (stack.worker.client()?, |statement| {
            stack.plane.postgres.ask(statement)
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

/// Everything that was answered and everything that was done is in the trail, each call with one intent and one outcome.
/// Says how many calls were closed by somebody who found out what had become of them.
async fn check_trail(
    client: &UserClient,
    witness: &Witness,
    made: &Made,
) -> Result<(AuditVerdict, usize)> {
    let verdict = until_settled(client, CLOSED).await?;
    let trail = Trail::new(whole_trail(client).await?);
    trail.check(&witness.answered())?;
    let (mut begun, mut done, mut found_out) = (Made::default(), Made::default(), 0);
    for (intent, outcome) in trail.pairs()? {
        let body = &intent.body;
        found_out += usize::from(outcome.body.detail.contains_key("found_out"));
        for (told, counts) in [
            (&mut begun, true),
            (&mut done, outcome.body.result == Some(AuditResult::Done)),
        ] {
            match body.action.as_str() {
                "session.exec" if counts => {
                    told.execs.extend(body.exec_id.map(|id| id.to_string()))
                }
                "session.create" if counts => told
                    .sessions
                    .extend(body.session_id.map(|id| id.to_string())),
                "job.create" if counts => told.jobs.extend(body.job_id.map(|id| id.to_string())),
                _ => {}
            }
        }
    }
    ensure!(
        !made.execs.is_empty() && made.execs.is_subset(&begun.execs),
        "without an intent: {:?}",
        made.execs.difference(&begun.execs)
    );
    // What is there was made by a call that is told as done.
    ensure!(
        made.sessions == done.sessions,
        "made: {:?}, told: {:?}",
        made.sessions,
        done.sessions
    );
    ensure!(
        made.jobs == done.jobs,
        "made: {:?}, told: {:?}",
        made.jobs,
        done.jobs
    );
    Ok((verdict, found_out))
}

async fn rounds(rounds: usize, jobs: usize, sessions: usize) -> Result<()> {
    let mut random = Random::seeded();
    let mut stack = Stack::start().await?;
    let client = stack.orchestrator.client()?;
    let witness = Witness::new(client.clone());
    let task = client
        .create_task(&TaskCreate {
            name: "faults".to_owned(),
            ..Default::default()
        })
        .await?
        .id;
    let open = Arc::new(Open::default());
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
        let asked: Vec<JobCreate> = (0..jobs / rounds)
            .map(|number| job(task, round * 1000 + number, &mut random))
            .collect();
        all_jobs.extend(
            asked
                .iter()
                .enumerate()
                .map(|(number, job)| (job.job_id.expect("it has one"), round * 1000 + number)),
        );
        let ids: Vec<SessionId> = (0..sessions / rounds)
            .map(|_| SessionId::generate())
            .collect();
        all_sessions.extend(ids.iter().copied());
        let callers = asked.into_iter().map(|job| {
            let (witness, open) = (witness.clone(), Arc::clone(&open));
            tokio::task::spawn_local(async move {
                let body = serde_json::to_value(&job)?;
                insist(&open.job_creates, &witness, Method::POST, "/v1/jobs", &body)
                    .await
                    .map(drop)
            })
        });
        let users = ids.into_iter().map(|id| {
            let (witness, open) = (witness.clone(), Arc::clone(&open));
            tokio::task::spawn_local(async move { use_session(&witness, &open, task, id).await })
        });
        let work: Vec<tokio::task::JoinHandle<Result<()>>> = callers.chain(users).collect();
        for role in random.shuffled([Role::Orchestrator, Role::Worker, Role::Postgres]) {
            // At a moment that nobody chose.
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
        eventually("every job ends", PATIENCE, ended)
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
            "job {number} said {:?}",
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
        let answer = good(
            &witness,
            &format!("/v1/sessions/{id}/exec"),
            &serde_json::to_value(sh("cat mark"))?,
        )
        .await?;
        let answer: ExecResult = serde_json::from_slice(&answer.body)?;
        ensure!(answer.stdout == format!("{id}\n"), "{answer:?}");
    }
    let made = Made::find(&stack, &all_sessions).await?;
    for id in &all_sessions {
        good(
            &witness,
            &format!("/v1/sessions/{id}/end"),
            &serde_json::to_value(SessionEnd::default())?,
        )
        .await?;
    }
    for id in &all_sessions {
        // An end that its node did not hear of at once comes to it a little later.
        let ended =
            async || Ok(client.sessions().get_session(*id).await?.state == SessionState::Ended);
        eventually("every session ends", PATIENCE, ended)
            .await
            .with_context(|| format!("session {id}"))?;
    }
    let unseen = client.events(i64::MAX - 1, None, Duration::ZERO).await;
    ensure!(unseen.is_err(), "a cursor beyond the newest is refused");
    let newest = newest(&client).await?;
    *last_event.lock().expect("not poisoned") = Some(newest);
    let events = reader.await??;
    check_events(&events, &all_jobs, &all_sessions)?;
    let clean = async || Ok(stack.plane.world.containers()?.is_empty());
    eventually("no container is left", PATIENCE, clean).await?;
    let (verdict, found_out) = check_trail(&client, &witness, &made).await?;
    stack.worker.shut_down().await?;
    #[expect(clippy::print_stdout, reason = "the report of what was hit")]
    {
        println!(
            "faults: {} jobs, {} sessions, {} events",
            all_jobs.len(),
            all_sessions.len(),
            events.len()
        );
        println!(
            "  answers: {}; records: {} in {} streams; closed by asking: {found_out}",
            witness.answered().len(),
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
        let good = states.first() == Some(&"accepted")
            && middle.iter().all(|state| *state == "in_progress")
            && middle.len() <= 1;
        ensure!(
            good && states
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

// proves: CYNAI.SBAGNT.JobLifecycle
// proves: ISC-22
#[tokio::test]
async fn whoever_is_killed_nothing_is_lost_or_done_twice() -> Result<()> {
    tokio::task::LocalSet::new()
        .run_until(rounds(3, 51, 21))
        .await
}

#[tokio::test]
async fn soak_whoever_is_killed_nothing_is_lost_or_done_twice() -> Result<()> {
    tokio::task::LocalSet::new()
        .run_until(rounds(15, 300, 90))
        .await
}

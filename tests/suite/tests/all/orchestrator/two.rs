//! Two orchestrators on one database: both work, and either one suffices.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ExecId, ExecRequest, JobCreate, JobState, SessionCreate, SessionEnd, SessionId, SessionState,
    TaskCreate,
};
use cynode_client::{OutputQuery, UserClient};
use cynode_tests::{
    ControlPlane, IMAGE, Options, Random, Relay, RunningOrchestrator, eventually, sh,
};

use super::faults::{
    InFlight, TIMEOUT, check_events, free_port, job, newest, read_events, retry_until_answered,
    small_limits,
};

const NAMES: [&str; 2] = ["one", "two"];

/// Callers that switch to the other orchestrator when a call fails, and sometimes without a
/// failure.
#[derive(Debug)]
struct Callers([UserClient; 2], AtomicUsize);

impl Callers {
    fn next(&self) -> &UserClient {
        &self.0[self.1.fetch_add(1, Ordering::SeqCst) % 2]
    }
}

struct Pair {
    control_plane: ControlPlane,
    both: [RunningOrchestrator; 2],
    settings: [Vec<(&'static str, String)>; 2],
    /// The node's control plane address: a relay to whichever orchestrator runs.
    control: Relay,
}

async fn start(
    control_plane: &ControlPlane,
    name: &str,
    settings: &[(&str, String)],
) -> Result<RunningOrchestrator> {
    let settings: Vec<(&str, &str)> = settings
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect();
    control_plane.orchestrator(name, &settings).await
}

impl Pair {
    async fn start() -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let at = |name: &str| {
            control_plane
                .world
                .directory()
                .join(name)
                .display()
                .to_string()
        };
        let settings = || -> Result<Vec<(&'static str, String)>> {
            Ok(vec![
                ("listen", free_port()?),
                ("registration_key_file", at("registration.key")),
                ("artifact_store", at("artifacts")),
                ("seed_images", format!("[{IMAGE:?}]")),
                ("heartbeat_seconds", "1".to_owned()),
            ])
        };
        let settings = [settings()?, settings()?];
        // Both share the key and the administrator's token: an orchestrator with another token
        // would revoke the first.
        fs_err::write(
            control_plane.world.directory().join("orchestrator.key"),
            "what-only-these-two-know",
        )?;
        for name in NAMES {
            let state_dir = control_plane
                .world
                .directory()
                .join(format!("orchestrator-{name}"));
            fs_err::create_dir_all(&state_dir)?;
            fs_err::write(
                state_dir.join("admin.token"),
                "cyn_two-orchestrators-one-administrator",
            )?;
        }
        // At the same time: one of them creates the tables.
        let (one, two) = tokio::join!(
            start(&control_plane, NAMES[0], &settings[0]),
            start(&control_plane, NAMES[1], &settings[1])
        );
        let both = [one?, two?];
        let control = Relay::new().await?;
        control.route_to(&both[0].control_url()?)?;
        Ok(Self {
            control_plane,
            both,
            settings,
            control,
        })
    }

    /// Kills an orchestrator with SIGKILL and routes the node to the other.
    fn kill(&mut self, number: usize) -> Result<()> {
        self.both[number].kill()?;
        self.control.route_to(&self.both[1 - number].control_url()?)
    }

    async fn restart(&mut self, number: usize) -> Result<()> {
        self.both[number] =
            start(&self.control_plane, NAMES[number], &self.settings[number]).await?;
        Ok(())
    }
}

async fn two_orchestrators() -> Result<()> {
    let mut random = Random::seeded();
    let mut pair = Pair::start().await?;
    let options = Options::default()
        .set("orchestrator_url", &format!("{:?}", pair.control.url()))
        .set(
            "registration_key_file",
            &format!(
                "{:?}",
                pair.control_plane
                    .world
                    .directory()
                    .join("registration.key")
                    .display()
                    .to_string()
            ),
        );
    let mut worker = pair.control_plane.world.worker(&options).await?;
    let callers = Arc::new(Callers(
        [pair.both[0].client()?, pair.both[1].client()?],
        AtomicUsize::new(0),
    ));
    eventually("the node has reported its images", TIMEOUT, async || {
        Ok(!callers.next().images().await?.is_empty())
    })
    .await?;
    let task = callers
        .next()
        .create_task(&TaskCreate {
            name: "two".to_owned(),
            ..Default::default()
        })
        .await?
        .id;
    let open = Arc::new(InFlight::default());
    let last_event = Arc::new(Mutex::new(None));
    let reader = tokio::spawn({
        let (callers, open, last_event) = (
            Arc::clone(&callers),
            Arc::clone(&open),
            Arc::clone(&last_event),
        );
        async move {
            read_events(
                || callers.next().clone(),
                open,
                || *last_event.lock().expect("not poisoned"),
            )
            .await
        }
    });

    let (mut jobs, mut sessions) = (BTreeMap::new(), Vec::new());
    for victim in random.shuffled([0, 1]) {
        let jobs_of_round: Vec<JobCreate> = (0..8)
            .map(|number| job(task, victim * 1000 + number, &mut random))
            .collect();
        jobs.extend(jobs_of_round.iter().enumerate().map(|(number, job)| {
            (
                job.job_id.expect("the request has an id"),
                victim * 1000 + number,
            )
        }));
        let ids: Vec<SessionId> = (0..2).map(|_| SessionId::generate()).collect();
        sessions.extend(ids.iter().copied());
        let mut work: Vec<tokio::task::JoinHandle<Result<()>>> = Vec::new();
        for job in jobs_of_round {
            let (callers, open) = (Arc::clone(&callers), Arc::clone(&open));
            work.push(tokio::task::spawn_local(async move {
                retry_until_answered(&open.job_creates, async || {
                    callers.next().create_job(&job).await
                })
                .await
                .map(drop)
            }));
        }
        for id in ids {
            let (callers, open) = (Arc::clone(&callers), Arc::clone(&open));
            work.push(tokio::task::spawn_local(async move {
                let request = SessionCreate {
                    limits: Some(small_limits()),
                    ..SessionCreate::new(task, id, "default")
                };
                retry_until_answered(&open.session_creates, async || {
                    callers.next().sessions().create_session(&request).await
                })
                .await?;
                let running = async || {
                    let session = retry_until_answered(&open.session_creates, async || {
                        callers.next().sessions().get_session(id).await
                    })
                    .await?;
                    ensure!(
                        !matches!(session.state, SessionState::Failed | SessionState::Lost),
                        "{session:?}"
                    );
                    Ok(session.state == SessionState::Running)
                };
                eventually("the session runs", TIMEOUT, running).await?;
                let exec = ExecRequest {
                    exec_id: Some(ExecId::generate()),
                    ..sh(&format!("echo {id} >> mark; cat mark"))
                };
                let answer = retry_until_answered(&open.execs, async || {
                    callers.next().sessions().exec(id, &exec).await
                })
                .await?;
                ensure!(answer.stdout == format!("{id}\n"), "{answer:?}");
                Ok(())
            }));
        }
        // At a random moment.
        drop(
            tokio::time::timeout(
                Duration::from_millis(random.below(1_000)),
                std::future::pending::<()>(),
            )
            .await,
        );
        pair.kill(victim)?;
        for caller in work {
            caller.await??;
        }
        // The remaining one does all the work.
        let survivor = &callers.0[1 - victim];
        for id in jobs.keys() {
            eventually("every job ends", TIMEOUT, async || {
                Ok(survivor.job(*id).await?.state.is_final())
            })
            .await
            .with_context(|| format!("job {id}"))?;
        }
        pair.restart(victim).await?;
    }

    for (id, number) in &jobs {
        let code = i32::try_from(number % 3)?;
        let expected = if code == 0 {
            JobState::Completed
        } else {
            JobState::Failed
        };
        for client in &callers.0 {
            let job = client.job(*id).await?;
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
            let kept: String = client
                .job_output(*id, &OutputQuery::default())
                .await?
                .chunks
                .into_iter()
                .filter_map(|chunk| chunk.data)
                .collect();
            ensure!(kept == job.output.stdout, "job {number} kept {kept:?}");
        }
    }
    for id in &sessions {
        for client in &callers.0 {
            ensure!(
                client.sessions().exec(*id, &sh("cat mark")).await?.stdout == format!("{id}\n"),
                "session {id}"
            );
        }
        callers
            .next()
            .sessions()
            .end_session(*id, &SessionEnd::default())
            .await?;
    }
    for id in &sessions {
        let ended = async || {
            Ok(callers.0[0].sessions().get_session(*id).await?.state == SessionState::Ended)
        };
        eventually("every session ends", TIMEOUT, ended).await?;
    }
    *last_event.lock().expect("not poisoned") = Some(newest(callers.next()).await?);
    let events = reader.await??;
    check_events(&events, &jobs, &sessions)?;
    for client in &callers.0 {
        let page = client.events(0, None, Duration::ZERO).await?;
        ensure!(
            page.items == events,
            "the orchestrators report different events"
        );
    }
    eventually("no container is left", TIMEOUT, async || {
        Ok(pair.control_plane.world.containers()?.is_empty())
    })
    .await?;
    worker.shut_down().await
}

#[tokio::test]
// invariant: exactly-once
async fn two_orchestrators_share_the_work_and_survive_each_others_death() -> Result<()> {
    tokio::task::LocalSet::new()
        .run_until(two_orchestrators())
        .await
}

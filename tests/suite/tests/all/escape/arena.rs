//! A worker on one runtime with two sandboxes: one attacks, the other must stay unaffected.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use cynode_api::{ExecId, ExecRequest, SessionCreate, SessionId, Unenforced};
use cynode_client::{OutputQuery, PutOptions, SessionClient};
use cynode_tests::{Engine, Options, RunningWorker, World, exec, repository, session, sh};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;

/// A call of the neighbour that takes longer counts as a hang.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The interval between two probes of the neighbour.
const PACE: Duration = Duration::from_millis(50);

pub(crate) struct Arena {
    pub(crate) world: World,
    pub(crate) worker: RunningWorker,
    pub(crate) client: SessionClient,
    http: reqwest::Client,
    pub(crate) attacker: SessionId,
    pub(crate) neighbour: SessionId,
    /// Limits that this host does not enforce on the attacker, as the worker reports them.
    unenforced: Vec<Unenforced>,
    /// Rows of the table: the attempt and its outcome.
    attempts: Vec<(String, String)>,
    /// Values that differ between runs, and their placeholders in the table.
    named: Vec<(String, String)>,
    table: PathBuf,
}

/// One line of output of `attempts.c`.
#[derive(Debug, Deserialize)]
struct Line {
    name: String,
    outcome: String,
    errno: Option<i32>,
    signal: Option<i32>,
}

impl Arena {
    /// Two sandboxes of the small image.
    pub(crate) async fn new(world: World, topic: &str) -> Result<Self> {
        Self::with(world, topic, session(), &[]).await
    }

    /// Creates an arena with a custom attacker and additional worker settings.
    pub(crate) async fn with(
        world: World,
        topic: &str,
        mut attacker: SessionCreate,
        settings: &[(&str, &str)],
    ) -> Result<Self> {
        // The names that `cargo xtask escape` expects.
        let runtime = match world.engine() {
            Engine::Podman => "podman-root",
            Engine::Rootless => "podman-rootless",
            Engine::Docker => "docker",
            other => bail!("{other:?} has no column in the table"),
        };
        let table = repository().join("target/escape").join(runtime).join(topic);
        // Results of an earlier run must not count for this one.
        drop(fs_err::remove_file(&table));
        world.load(&attacker.image_ref).await?;
        let options = settings
            .iter()
            .fold(Options::default(), |options, (key, value)| {
                options.set(key, value)
            });
        let worker = world.worker(&options).await?;
        let client = worker.client()?;
        let http = reqwest::Client::builder().timeout(TIMEOUT).build()?;
        attacker.pty_allowed = Some(true);
        let neighbour = SessionCreate {
            pty_allowed: Some(true),
            ..session()
        };
        let (attacker, neighbour) = tokio::try_join!(
            client.create_session(&attacker),
            client.create_session(&neighbour)
        )?;
        let (unenforced, attacker, neighbour) = (
            attacker.unenforced,
            attacker.session_id,
            neighbour.session_id,
        );
        Ok(Self {
            world,
            worker,
            client,
            http,
            attacker,
            neighbour,
            unenforced,
            attempts: Vec::new(),
            named: Vec::new(),
            table,
        })
    }

    /// Reports whether an attempt can run: if only an unenforced limit would stop it, the attempt
    /// is recorded but not made. `each_limit_that_nobody_enforces_is_refused_by_name` and
    /// `ids_that_sandboxes_share_must_be_allowed_by_name` show that such a host refuses sandboxes
    /// unless its operator allows each of these limits by name.
    pub(crate) fn bounded_by(&mut self, limit: Unenforced, attempt: &str) -> bool {
        let enforced = !self.unenforced.contains(&limit);
        if !enforced {
            self.attempts.push((
                attempt.to_owned(),
                format!("not enforced, refused by default: {limit}"),
            ));
        }
        enforced
    }

    /// Replaces a value that differs between runs by a placeholder in the table.
    pub(crate) fn name(&mut self, text: impl Into<String>, name: &str) {
        self.named.push((text.into(), name.to_owned()));
    }

    /// Copies the `attempts` program into a sandbox.
    pub(crate) async fn copy_attempts_program(&self, id: SessionId) -> Result<()> {
        let program = fs_err::read(attempts_program()?)?;
        self.client
            .put_file(
                id,
                Path::new("attempts"),
                program,
                &PutOptions {
                    mode: Some(0o755),
                    ..Default::default()
                },
            )
            .await?;
        Ok(())
    }

    /// Checks that the neighbour's sandbox and the worker respond.
    pub(crate) async fn check_others_respond(&self) -> Result<()> {
        let answer = tokio::time::timeout(
            TIMEOUT,
            self.client
                .exec(self.neighbour, &exec(["echo", "unharmed"])),
        )
        .await;
        let answer = answer
            .context("the neighbour hangs")?
            .context("the neighbour fails")?;
        ensure!(
            answer.stdout == "unharmed\n",
            "the neighbour responds {answer:?}"
        );
        let health = self
            .http
            .get(format!("{}/healthz", self.worker.url()?))
            .send()
            .await
            .context("the worker does not respond")?;
        ensure!(
            health.status().is_success(),
            "the worker responds with {}",
            health.status()
        );
        Ok(())
    }

    /// Runs an attack while probing the neighbour and the worker, and probes once more afterwards.
    pub(crate) async fn attack<T>(&self, attack: impl Future<Output = Result<T>>) -> Result<T> {
        let (over, ended) = (AtomicBool::new(false), Notify::new());
        let attack = async {
            let outcome = attack.await;
            over.store(true, Ordering::SeqCst);
            ended.notify_one();
            outcome
        };
        let watch = async {
            loop {
                let last = over.load(Ordering::SeqCst);
                self.check_others_respond().await?;
                if last {
                    return Ok::<_, anyhow::Error>(());
                }
                // Paced, so that the probes are not the load.
                drop(tokio::time::timeout(PACE, ended.notified()).await);
            }
        };
        let (outcome, watched) = tokio::join!(attack, watch);
        watched.context("while the attack ran")?;
        outcome
    }

    /// Records an attempt; `held` is true if the attempt failed for the attacker.
    pub(crate) fn expect(
        &mut self,
        attempt: impl Into<String>,
        held: bool,
        seen: impl std::fmt::Debug,
    ) -> Result<()> {
        let attempt = attempt.into();
        ensure!(held, "'{attempt}' had success: {seen:?}");
        self.attempts.push((attempt, "refused".to_owned()));
        Ok(())
    }

    /// Makes an attempt with a script in the attacker's sandbox and judges it by its output.
    pub(crate) async fn script(
        &mut self,
        attempt: &str,
        script: &str,
        held: impl FnOnce(&str) -> bool,
    ) -> Result<()> {
        let result = self
            .attack(async { Ok(self.client.exec(self.attacker, &sh(script)).await?) })
            .await
            .with_context(|| attempt.to_owned())?;
        let seen = format!("{}{}", result.stdout, result.stderr);
        self.expect(attempt, held(&seen), &seen)
    }

    /// Checks the output of the `attempts` program: every line must report a refusal, and the final
    /// line must be present.
    pub(crate) fn expect_lines(&mut self, printed: &str, prefix: &str) -> Result<usize> {
        let mut succeeded = Vec::new();
        let mut count = 0;
        let mut done = false;
        for line in printed.lines().filter(|line| line.starts_with('{')) {
            let mut line: Line = serde_json::from_str(line).with_context(|| line.to_owned())?;
            line.name = self
                .named
                .iter()
                .fold(line.name, |name, (text, word)| name.replace(text, word));
            if line.name == "done" {
                done = true;
                continue;
            }
            count += 1;
            match (line.outcome.as_str(), line.errno, line.signal) {
                ("refused", Some(errno), _) => self.attempts.push((
                    format!("{prefix}{}", line.name),
                    format!("refused, errno {errno}"),
                )),
                ("refused", _, Some(signal)) => self.attempts.push((
                    format!("{prefix}{}", line.name),
                    format!("refused, signal {signal}"),
                )),
                _ => succeeded.push(line),
            }
        }
        ensure!(
            succeeded.is_empty(),
            "these had success: {succeeded:#?}\n{printed}"
        );
        ensure!(done, "the attempts did not finish:\n{printed}");
        Ok(count)
    }

    /// Starts a background command of the attacker and waits until it has printed a word.
    pub(crate) async fn start_and_wait_for(
        &self,
        id: SessionId,
        argv: &[&str],
        word: &str,
    ) -> Result<ExecId> {
        let request = ExecRequest {
            background: true,
            timeout_ms: 0,
            ..exec(argv.iter().copied())
        };
        let exec_id = self.client.exec_background(id, &request).await?.exec_id;
        let mut printed = String::new();
        let mut after_seq = 0;
        while !printed.contains(word) {
            let query = OutputQuery {
                after_seq: Some(after_seq),
                wait_ms: Some(20_000),
                ..Default::default()
            };
            let page = self.client.exec_output(id, exec_id, &query).await?;
            ensure!(
                !page.chunks.is_empty(),
                "{argv:?} did not print '{word}': {printed} {:?}",
                page.exit
            );
            after_seq = page.next_seq;
            printed.extend(page.chunks.into_iter().filter_map(|chunk| chunk.data));
        }
        Ok(exec_id)
    }

    /// Kills all processes in the attacker's sandbox and waits until commands run there again.
    pub(crate) async fn recover(&self) -> Result<()> {
        self.client
            .signal_session(self.attacker, cynode_api::SignalName::KILL)
            .await?;
        cynode_tests::eventually(
            "the attacker's sandbox is usable again",
            TIMEOUT,
            async || {
                Ok(self
                    .client
                    .exec(self.attacker, &exec(["true"]))
                    .await
                    .is_ok_and(|result| result.exit.exit_code == Some(0)))
            },
        )
        .await
    }

    /// Writes the table and shuts everything down; nothing may be left.
    pub(crate) async fn end(mut self) -> Result<()> {
        self.check_others_respond().await?;
        let mut text = String::new();
        for (attempt, outcome) in &self.attempts {
            writeln!(text, "{attempt}\t{outcome}")?;
        }
        if !text.is_empty() {
            fs_err::create_dir_all(self.table.parent().context("a directory")?)?;
            fs_err::write(&self.table, text)?;
        }
        self.worker.shut_down().await?;
        self.world.assert_clean().await
    }
}

/// Compiles the `attempts` program, once for each version of its source.
fn attempts_program() -> Result<PathBuf> {
    let source = repository().join("tests/suite/escape/attempts.c");
    let directory = repository().join("target/escape");
    let program = directory.join(format!(
        "attempts-{}",
        &hex::encode(Sha256::digest(fs_err::read(&source)?))[..16]
    ));
    if !program.is_file() {
        fs_err::create_dir_all(&directory)?;
        // Several tests may compile at once, so each renames a complete file into place.
        let staged = directory.join(format!(".{}", uuid::Uuid::new_v4().simple()));
        let compiled = Command::new("cc")
            .args(["-static", "-O1", "-Wall", "-o"])
            .arg(&staged)
            .arg(&source)
            .output()
            .context("running cc")?;
        ensure!(
            compiled.status.success(),
            "cc: {}",
            String::from_utf8_lossy(&compiled.stderr)
        );
        fs_err::rename(&staged, &program)?;
    }
    Ok(program)
}

//! Eight clients make random calls, and each predicts every response.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cynode_api::{
    ErrorCode, ExecRequest, ExecState, LimitsRequest, ListRequest, PatchRequest, SessionCreate,
    SessionEnd, SessionId, SessionPatch, SessionState, TaskId, WorkspaceDisposal,
};
use cynode_client::{Error, OutputQuery, PtyMessage, PtyOpen, PutOptions, SessionClient};
use cynode_tests::{Options, Random, World, sh};

use super::{Tally, length};

const CLIENTS: usize = 8;
/// The maximum number of sessions of one client.
const MAX_SESSIONS_PER_CLIENT: usize = 4;
/// A file that only patches change.
const PATCHED_FILE: &str = "patched.txt";
/// The timeout of a single call, whatever runs beside it.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// The expected state of a session.
struct Model {
    id: SessionId,
    running: bool,
    files: BTreeMap<String, Vec<u8>>,
}

struct Client {
    client: SessionClient,
    random: Random,
    sessions: Vec<Model>,
    done: Tally,
}

/// The steps of a client, weighted by repetition.
const STEPS: [Step; 24] = [
    ("create", |client| Box::pin(client.create())),
    ("create", |client| Box::pin(client.create())),
    ("exec", |client| Box::pin(client.exec())),
    ("exec", |client| Box::pin(client.exec())),
    ("exec", |client| Box::pin(client.exec())),
    ("exec", |client| Box::pin(client.exec())),
    ("exec with input", |client| {
        Box::pin(client.exec_with_input())
    }),
    ("exec past its deadline", |client| {
        Box::pin(client.exec_past_its_deadline())
    }),
    ("exec in the background", |client| {
        Box::pin(client.exec_in_background())
    }),
    ("file by a command", |client| {
        Box::pin(client.write_by_command())
    }),
    ("put", |client| Box::pin(client.put())),
    ("put", |client| Box::pin(client.put())),
    ("put", |client| Box::pin(client.put())),
    ("get", |client| Box::pin(client.get())),
    ("get", |client| Box::pin(client.get())),
    ("get", |client| Box::pin(client.get())),
    ("delete", |client| Box::pin(client.delete())),
    ("list", |client| Box::pin(client.list())),
    ("patch", |client| Box::pin(client.patch())),
    ("patch", |client| Box::pin(client.patch())),
    ("change labels", |client| Box::pin(client.change_labels())),
    ("terminal", |client| Box::pin(client.terminal())),
    ("end", |client| Box::pin(client.end())),
    ("resume", |client| Box::pin(client.resume())),
];

/// A step's name and its action, which returns false if it can't be done now.
type Step = (
    &'static str,
    for<'a> fn(&'a mut Client) -> std::pin::Pin<Box<dyn Future<Output = Result<bool>> + Send + 'a>>,
);

fn refused_with<T: std::fmt::Debug>(answer: Result<T, Error>, code: ErrorCode) -> Result<()> {
    match answer {
        Err(error) if error.is(code) => Ok(()),
        other => bail!("expected {code:?}, got {other:?}"),
    }
}

impl Client {
    /// A random running session.
    fn pick(&mut self) -> Option<usize> {
        let running: Vec<usize> = (0..self.sessions.len())
            .filter(|index| self.sessions[*index].running)
            .collect();
        (!running.is_empty()).then(|| running[self.below(running.len())])
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.random.below(bound as u64)).expect("below a usize")
    }

    fn name(&mut self) -> String {
        format!("file-{}", self.below(12))
    }

    async fn create(&mut self) -> Result<bool> {
        if self.sessions.len() == MAX_SESSIONS_PER_CLIENT {
            return Ok(false);
        }
        let mut request = SessionCreate::new(TaskId::generate(), SessionId::generate(), "default");
        request.pty_allowed = Some(true);
        // Half of them match the pool.
        if self.below(2) == 0 {
            request.limits = Some(LimitsRequest {
                pids: Some(100),
                disk_bytes: Some((64 + self.random.below(8)) << 20),
                ..Default::default()
            });
        }
        let made = self.client.create_session(&request).await?;
        ensure!(
            made.state == SessionState::Running
                && made.session_id == request.session_id
                && made.task_id == request.task_id,
            "{made:?}"
        );
        let again = self.client.create_session(&request).await?;
        ensure!(
            again.workspace_id == made.workspace_id,
            "the same request created {again:?} after {made:?}"
        );
        self.sessions.push(Model {
            id: request.session_id,
            running: true,
            files: BTreeMap::new(),
        });
        Ok(true)
    }

    async fn exec(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let (id, code, word) = (
            self.sessions[index].id,
            self.random.below(200),
            self.random.number(),
        );
        let result = self
            .client
            .exec(
                id,
                &sh(&format!(
                    "echo {word}; echo $CYNODE_SESSION_ID >&2; exit {code}"
                )),
            )
            .await?;
        ensure!(
            (
                result.stdout.as_str(),
                result.stderr.as_str(),
                result.exit.exit_code
            ) == (
                &format!("{word}\n"),
                &format!("{id}\n"),
                i32::try_from(code).ok()
            ),
            "{result:?}"
        );
        Ok(true)
    }

    async fn exec_with_input(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let text = "0123456789abcde\n".repeat(self.below(8_000));
        let request = ExecRequest {
            stdin: Some(text.clone()),
            ..sh("cat")
        };
        let result = self.client.exec(self.sessions[index].id, &request).await?;
        ensure!(
            result.stdout == text && result.exit.exit_code == Some(0),
            "{} bytes of {}: {:?}",
            result.stdout.len(),
            text.len(),
            result.exit
        );
        Ok(true)
    }

    async fn exec_past_its_deadline(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let request = ExecRequest {
            timeout_ms: 1 + self.random.below(300),
            ..sh("sleep 1000 & sleep 1000")
        };
        let result = self.client.exec(self.sessions[index].id, &request).await?;
        ensure!(result.exit.timed_out && !result.exit.lost, "{result:?}");
        Ok(true)
    }

    async fn exec_in_background(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let (id, lines) = (self.sessions[index].id, 1 + self.below(2_000));
        let request = ExecRequest {
            background: true,
            timeout_ms: 0,
            ..sh(&format!(
                "i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo $i; done"
            ))
        };
        let exec = self.client.exec_background(id, &request).await?.exec_id;
        let (mut text, mut seq) = (String::new(), 0);
        loop {
            let page = self
                .client
                .exec_output(
                    id,
                    exec,
                    &OutputQuery {
                        after_seq: Some(seq),
                        wait_ms: Some(5_000),
                        ..Default::default()
                    },
                )
                .await?;
            for chunk in page.chunks {
                ensure!(chunk.seq == seq + 1, "chunk {} after {seq}", chunk.seq);
                seq = chunk.seq;
                text.push_str(chunk.data.as_deref().context("text")?);
            }
            if page.exit.is_some() {
                break;
            }
        }
        ensure!(
            text.lines()
                .map(str::parse::<usize>)
                .eq((1..=lines).map(Ok)),
            "expected {lines} lines, got {text:?}"
        );
        ensure!(self.client.get_exec(id, exec).await?.state == ExecState::Exited);
        Ok(true)
    }

    async fn write_by_command(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let (name, text) = (self.name(), self.random.number().to_string());
        let result = self
            .client
            .exec(
                self.sessions[index].id,
                &sh(&format!("printf %s {text} > {name}")),
            )
            .await?;
        ensure!(result.exit.exit_code == Some(0), "{result:?}");
        self.sessions[index].files.insert(name, text.into_bytes());
        Ok(true)
    }

    async fn put(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let name = self.name();
        let size = match self.below(4) {
            0 => 0,
            1 => self.below(1 << 20),
            _ => self.below(4_096),
        };
        let bytes: Vec<u8> = (0..size)
            .map(|_| self.random.number().to_le_bytes()[0])
            .collect();
        let written = self
            .client
            .put_file(
                self.sessions[index].id,
                Path::new(&name),
                bytes.clone(),
                &PutOptions::default(),
            )
            .await?;
        ensure!(
            written.etag == Some(format!("\"sha256:{}\"", sha256(&bytes))),
            "{written:?}"
        );
        self.sessions[index].files.insert(name, bytes);
        Ok(true)
    }

    async fn get(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let name = self.name();
        self.check(index, &name).await?;
        Ok(true)
    }

    /// Checks a file against its expected content.
    async fn check(&self, index: usize, name: &str) -> Result<()> {
        let Model { id, files, .. } = &self.sessions[index];
        let answer = self.client.get_file(*id, Path::new(name)).await;
        let Some(expected) = files.get(name) else {
            return refused_with(answer.map(drop), ErrorCode::NotFound);
        };
        let mut body = answer?;
        let mut found = Vec::new();
        while let Some(piece) = body.chunk().await? {
            found.extend_from_slice(&piece);
        }
        ensure!(
            found == *expected,
            "{name} of {id} has {} bytes that differ from the {} written",
            found.len(),
            expected.len()
        );
        Ok(())
    }

    async fn delete(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let name = self.name();
        let answer = self
            .client
            .delete_file(self.sessions[index].id, Path::new(&name), false)
            .await;
        match self.sessions[index].files.remove(&name) {
            Some(_) => answer?,
            None => refused_with(answer, ErrorCode::NotFound)?,
        }
        Ok(true)
    }

    async fn list(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let Model { id, files, .. } = &self.sessions[index];
        let mut found: Vec<(String, u64)> = self
            .client
            .list_files(*id, &ListRequest::default())
            .await?
            .entries
            .into_iter()
            .map(|entry| (entry.path, entry.size))
            .collect();
        found.sort();
        ensure!(
            found
                .iter()
                .map(|(path, size)| (path.as_str(), *size))
                .eq(files
                    .iter()
                    .map(|(path, bytes)| (path.as_str(), bytes.len() as u64))),
            "{found:?}"
        );
        Ok(true)
    }

    async fn patch(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let (line, fits) = (self.random.number().to_string(), self.below(4) > 0);
        let Model { id, files, .. } = &mut self.sessions[index];
        let diff = |before: &str| {
            format!("--- a/{PATCHED_FILE}\n+++ b/{PATCHED_FILE}\n@@ -1 +1 @@\n-{before}\n+{line}\n")
        };
        let diff = match files.get(PATCHED_FILE) {
            None => format!("--- /dev/null\n+++ b/{PATCHED_FILE}\n@@ -0,0 +1 @@\n+{line}\n"),
            Some(_) if !fits => diff("never written"),
            Some(before) => diff(std::str::from_utf8(before)?.trim_end()),
        };
        let answer = self
            .client
            .patch_files(
                *id,
                &PatchRequest {
                    diff,
                    ..Default::default()
                },
            )
            .await;
        if files.contains_key(PATCHED_FILE) && !fits {
            refused_with(answer, ErrorCode::PatchRejected)?;
        } else {
            answer?;
            files.insert(PATCHED_FILE.to_owned(), format!("{line}\n").into_bytes());
        }
        self.check(index, PATCHED_FILE).await?;
        Ok(true)
    }

    async fn change_labels(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let labels = BTreeMap::from([("round".to_owned(), self.random.number().to_string())]);
        let patch = SessionPatch {
            labels: Some(labels.clone()),
            idle_timeout_seconds: Some(3_600),
            ..Default::default()
        };
        self.client
            .patch_session(self.sessions[index].id, &patch)
            .await?;
        let found = self.client.get_session(self.sessions[index].id).await?;
        ensure!(
            found.labels == labels && found.state == SessionState::Running,
            "{found:?}"
        );
        Ok(true)
    }

    async fn terminal(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let (word, code) = (self.random.number(), self.random.below(100));
        let argv = [
            "sh",
            "-c",
            "read line; echo \"heard $line\"; exit $1",
            "sh",
            &code.to_string(),
        ]
        .map(str::to_owned)
        .to_vec();
        let mut pty = self
            .client
            .open_pty(
                self.sessions[index].id,
                &PtyOpen {
                    cols: 80,
                    rows: 24,
                    argv,
                },
            )
            .await?;
        let (mut shown, mut typed) = (String::new(), false);
        let exit = loop {
            match pty
                .next()
                .await?
                .context("the terminal closed without an exit message")?
            {
                PtyMessage::Ready if !typed => {
                    typed = true;
                    pty.write(format!("{word}\n")).await?;
                }
                PtyMessage::Ready => {}
                PtyMessage::Data(data) => shown.push_str(&String::from_utf8_lossy(&data)),
                PtyMessage::Exit { exit_code, .. } => break exit_code,
                error @ PtyMessage::Error { .. } => bail!("{error:?}"),
            }
        };
        ensure!(
            shown.contains(&format!("heard {word}")) && exit == i32::try_from(code).ok(),
            "{exit:?} after {shown:?}"
        );
        Ok(true)
    }

    async fn end(&mut self) -> Result<bool> {
        let Some(index) = self.pick() else {
            return Ok(false);
        };
        let (id, keep) = (self.sessions[index].id, self.below(2) == 0);
        let workspace = if keep {
            WorkspaceDisposal::Keep
        } else {
            WorkspaceDisposal::Delete
        };
        let ended = self
            .client
            .end_session(
                id,
                &SessionEnd {
                    workspace: Some(workspace),
                    ..Default::default()
                },
            )
            .await?;
        ensure!(ended.state == SessionState::Ended, "{ended:?}");
        refused_with(
            self.client.exec(id, &sh("true")).await,
            ErrorCode::SessionEnded,
        )?;
        if keep {
            self.sessions[index].running = false;
        } else {
            self.sessions.remove(index);
            refused_with(
                self.client.resume_session(id).await,
                ErrorCode::NotResumable,
            )?;
        }
        Ok(true)
    }

    async fn resume(&mut self) -> Result<bool> {
        let Some(index) = self.sessions.iter().position(|model| !model.running) else {
            return Ok(false);
        };
        let resumed = self.client.resume_session(self.sessions[index].id).await?;
        ensure!(resumed.state == SessionState::Running, "{resumed:?}");
        self.sessions[index].running = true;
        let names: Vec<String> = self.sessions[index].files.keys().cloned().collect();
        for name in names {
            self.check(index, &name).await?;
        }
        Ok(true)
    }

    async fn run(mut self, until: Instant) -> Result<Self> {
        while Instant::now() < until {
            let (name, step) = STEPS[self.below(STEPS.len())];
            let done = tokio::time::timeout(CALL_TIMEOUT, step(&mut self))
                .await
                .with_context(|| format!("{name} took more than {CALL_TIMEOUT:?}"))?;
            if done.with_context(|| name.to_owned())? {
                self.done.count(name);
            }
        }
        Ok(self)
    }
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    hex::encode(sha2::Sha256::digest(bytes))
}

/// Run by `make soak`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn soak_eight_clients_at_random_get_the_right_answers() -> Result<()> {
    let mut random = Random::seeded();
    let (seed, length) = (random.seed(), length(240));
    let world = World::new()?;
    let mut worker = world
        .worker(&Options::default().set("pool_size", "4"))
        .await?;
    let until = Instant::now() + length;
    let mut running = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let client = Client {
            client: worker.client()?,
            random: random.fork(),
            sessions: Vec::new(),
            done: Tally::default(),
        };
        running.spawn(async move {
            client
                .run(until)
                .await
                .with_context(|| format!("client {number}"))
        });
    }
    let mut done = Tally::default();
    while let Some(client) = running.join_next().await {
        let client = client??;
        done.add(&client.done);
        for model in client.sessions {
            client
                .client
                .end_session(model.id, &SessionEnd::default())
                .await?;
        }
    }
    let (now, most) = worker.memory()?;
    worker.shut_down().await?;
    world.assert_clean().await?;
    #[expect(clippy::print_stdout, reason = "the report of the run")]
    {
        println!(
            "soak: mix: {CLIENTS} clients for {} s, {} steps, all answers right, nothing left; \
             worker's memory {} MiB, at most {} MiB; {done}; CYNODE_SEED={seed}",
            length.as_secs(),
            done.total(),
            now >> 20,
            most >> 20
        );
    }
    Ok(())
}

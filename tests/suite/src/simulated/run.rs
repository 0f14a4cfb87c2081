//! Simulated commands: a small subset of the shell with the same meaning as in a sandbox.
//!
//! `true`, `false`, `echo …` (also `>&2` and `>> FILE`), `cat FILE`, `exit N`, `yes | head -c N`,
//! and `sleep N`, which lasts until the test ends all sleeps of that duration or the command is
//! killed. `sh -c` takes several of them, separated by `;`.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use cynode_api::{
    ByteCounts, Chunk, ErrorCode, ExecExit, ExecId, ExecResult, ExecVia, OutputPage, Problem,
    SignalName, Stream, StreamHashes, Truncated, encode_streams, exec_limits::KEPT_PER_EXEC,
};
use cynode_service::ApiError;
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use tokio::sync::watch;

/// The chunk size of long output.
const PIECE: usize = 64 * 1024;

/// The files of a workspace: contents and permission bits by path.
pub(super) type Files = Arc<Mutex<BTreeMap<String, (Vec<u8>, u32)>>>;

/// Normalizes a path; relative paths start at the workspace.
pub(super) fn absolute(path: &str) -> String {
    if path.starts_with('/') {
        path.to_owned()
    } else {
        format!("/workspace/{path}")
    }
}

#[derive(Debug)]
enum Statement {
    Echo(String, Option<String>),
    Cat(String),
    Yes(usize),
    Sleep(String),
    Exit(i32),
    Unknown(String),
}

fn statement(text: &str) -> Statement {
    let text = text.trim();
    if let Some(count) = text
        .strip_prefix("yes | head -c ")
        .and_then(|count| count.parse().ok())
    {
        return Statement::Yes(count);
    }
    let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
    let unquoted = |text: &str| format!("{}\n", text.trim());
    match word {
        "true" => Statement::Exit(0),
        "false" => Statement::Exit(1),
        "exit" => Statement::Exit(rest.parse().unwrap_or(2)),
        "sleep" => Statement::Sleep(rest.to_owned()),
        "cat" => Statement::Cat(rest.to_owned()),
        "echo" => match rest.split_once('>') {
            None => Statement::Echo(unquoted(rest), None),
            Some((said, to)) => Statement::Echo(
                unquoted(said),
                Some(to.trim_start_matches('>').trim().to_owned()),
            ),
        },
        _ => Statement::Unknown(word.to_owned()),
    }
}

/// Parses a command. Fails with ENOENT for an unknown program, like a sandbox does.
fn script(argv: &[String]) -> Result<Vec<Statement>, ApiError> {
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    let statements: Vec<Statement> = match argv.as_slice() {
        ["sh" | "/bin/sh", "-c", script] => script.split(';').map(statement).collect(),
        words => vec![statement(&words.join(" "))],
    };
    match statements.first() {
        Some(Statement::Unknown(word)) if argv.len() < 3 || argv[1] != "-c" => Err(Problem::new(
            ErrorCode::ExecFailed,
            format!("{word} can't be started"),
        )
        .with("errno", "ENOENT")
        .into()),
        _ => Ok(statements),
    }
}

#[derive(Debug, Default)]
struct Progress {
    chunks: VecDeque<Chunk>,
    last_seq: u64,
    kept: u64,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    end: Option<(ExecExit, OffsetDateTime)>,
}

/// A running or finished command.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) id: ExecId,
    pub(super) started_at: OffsetDateTime,
    started: Instant,
    progress: watch::Sender<Progress>,
    signal: watch::Sender<Option<String>>,
}

impl Run {
    pub(super) fn start(
        id: ExecId,
        argv: &[String],
        files: Files,
        limit: Option<Duration>,
        mut finished_sleeps: watch::Receiver<BTreeSet<String>>,
    ) -> Result<Arc<Self>, ApiError> {
        let script = script(argv)?;
        let (progress, signal) = (
            watch::Sender::new(Progress::default()),
            watch::Sender::new(None),
        );
        let run = Arc::new(Self {
            id,
            started_at: OffsetDateTime::now_utc(),
            started: Instant::now(),
            progress,
            signal,
        });
        let task_run = Arc::clone(&run);
        tokio::spawn(async move {
            let deadline = async {
                match limit {
                    Some(limit) => tokio::time::sleep(limit).await,
                    None => std::future::pending().await,
                }
            };
            let mut signal = task_run.signal.subscribe();
            let (code, signal, timed_out) = tokio::select! {
                code = task_run.interpret(script, &files, &mut finished_sleeps) => (Some(code), None, false),
                signal = signal.wait_for(Option::is_some) => (None, signal.ok().and_then(|signal| signal.clone()), false),
                () = deadline => (None, Some("TERM".to_owned()), true),
            };
            task_run.finish(code, signal, timed_out);
        });
        Ok(run)
    }

    async fn interpret(
        &self,
        script: Vec<Statement>,
        files: &Files,
        finished_sleeps: &mut watch::Receiver<BTreeSet<String>>,
    ) -> i32 {
        let mut code = 0;
        for statement in script {
            match statement {
                Statement::Exit(code) => return code,
                Statement::Echo(text, None) => self.write_output(Stream::Stdout, text.as_bytes()),
                Statement::Echo(text, Some(to)) if to == "&2" => {
                    self.write_output(Stream::Stderr, text.as_bytes());
                }
                Statement::Echo(text, Some(to)) => {
                    files
                        .lock()
                        .expect("not poisoned")
                        .entry(absolute(&to))
                        .or_insert_with(|| (Vec::new(), 0o644))
                        .0
                        .extend(text.into_bytes());
                }
                Statement::Cat(path) => {
                    let found = files
                        .lock()
                        .expect("not poisoned")
                        .get(&absolute(&path))
                        .map(|(bytes, _)| bytes.clone());
                    code = i32::from(found.is_none());
                    self.write_output(Stream::Stdout, &found.unwrap_or_default());
                }
                Statement::Yes(count) => b"y\n".repeat(count.div_ceil(2))[..count]
                    .chunks(PIECE)
                    .for_each(|piece| self.write_output(Stream::Stdout, piece)),
                Statement::Sleep(seconds) => drop(
                    finished_sleeps
                        .wait_for(|finished_sleeps| finished_sleeps.contains(&seconds))
                        .await,
                ),
                Statement::Unknown(word) => {
                    code = 127;
                    self.write_output(
                        Stream::Stderr,
                        format!("sh: {word}: not found\n").as_bytes(),
                    );
                }
            }
        }
        code
    }

    fn write_output(&self, stream: Stream, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.progress.send_modify(|progress| {
            progress.last_seq += 1;
            progress.kept += bytes.len() as u64;
            let data = Some(String::from_utf8_lossy(bytes).into_owned());
            progress.chunks.push_back(Chunk {
                seq: progress.last_seq,
                stream,
                at: OffsetDateTime::now_utc(),
                data,
                data_b64: None,
            });
            if stream == Stream::Stdout {
                &mut progress.stdout
            } else {
                &mut progress.stderr
            }
            .extend_from_slice(bytes);
            while progress.kept > KEPT_PER_EXEC
                && let Some(oldest) = progress.chunks.pop_front()
            {
                progress.kept -= size(&oldest);
            }
        });
    }

    fn finish(&self, exit_code: Option<i32>, signal: Option<String>, timed_out: bool) {
        self.progress.send_modify(|progress| {
            let bytes = ByteCounts {
                stdout: progress.stdout.len() as u64,
                stderr: progress.stderr.len() as u64,
            };
            let of = |stream: &[u8]| hex::encode(Sha256::digest(stream));
            let sha256 = Some(StreamHashes {
                stdout: of(&progress.stdout),
                stderr: of(&progress.stderr),
            });
            let duration_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            progress.end = Some((
                ExecExit {
                    exit_code,
                    signal,
                    timed_out,
                    bytes,
                    sha256,
                    duration_ms,
                    ..ExecExit::never_ran(ExecVia::Agent)
                },
                OffsetDateTime::now_utc(),
            ));
        });
    }

    pub(super) fn end(&self) -> Option<(ExecExit, OffsetDateTime)> {
        self.progress.borrow().end.clone()
    }

    /// Returns false if the command has already ended.
    pub(super) fn kill(&self, signal: SignalName) -> bool {
        let runs = self.end().is_none();
        if runs {
            self.signal
                .send_replace(Some(SignalName::name_of(signal.number())));
        }
        runs
    }

    /// Waits for the end and returns the result, with at most `limit` bytes of each stream.
    pub(super) async fn result(&self, limit: u64) -> ExecResult {
        let mut changes = self.progress.subscribe();
        let progress = changes
            .wait_for(|progress| progress.end.is_some())
            .await
            .expect("we hold the sender");
        let (stdout, stderr) = (cut(&progress.stdout, limit), cut(&progress.stderr, limit));
        let truncated = Truncated {
            stdout: stdout.len() < progress.stdout.len(),
            stderr: stderr.len() < progress.stderr.len(),
        };
        let (stdout, stderr, encoding) = encode_streams(stdout, stderr);
        let exit = progress.end.clone().expect("the end was awaited").0;
        ExecResult {
            exec_id: self.id,
            exit,
            stdout,
            stderr,
            encoding: encoding.to_owned(),
            truncated,
        }
    }

    /// Returns the output after a sequence number, waiting up to `wait` for more.
    pub(super) async fn page(&self, after_seq: u64, max_bytes: u64, wait: Duration) -> OutputPage {
        let mut changes = self.progress.subscribe();
        drop(
            tokio::time::timeout(
                wait,
                changes
                    .wait_for(|progress| progress.last_seq > after_seq || progress.end.is_some()),
            )
            .await,
        );
        let progress = self.progress.borrow();
        let first = progress
            .chunks
            .front()
            .map_or(progress.last_seq + 1, |chunk| chunk.seq);
        let mut bytes = 0;
        let wanted = progress.chunks.iter().filter(|chunk| chunk.seq > after_seq);
        let chunks: Vec<Chunk> = wanted
            .take_while(|chunk| {
                let room = bytes < max_bytes;
                bytes += size(chunk);
                room
            })
            .cloned()
            .collect();
        let lost_before_seq = (after_seq + 1 < first).then_some(first);
        let next_seq = chunks
            .last()
            .map_or_else(|| after_seq.min(progress.last_seq), |chunk| chunk.seq);
        let exit = progress
            .end
            .as_ref()
            .filter(|_| next_seq >= progress.last_seq)
            .map(|(exit, _)| exit.clone());
        OutputPage {
            chunks,
            next_seq,
            lost_before_seq,
            exit,
        }
    }
}

fn size(chunk: &Chunk) -> u64 {
    chunk.data.as_ref().map_or(0, String::len) as u64
}

/// Keeps the first and the last half of the limit.
fn cut(bytes: &[u8], limit: u64) -> Vec<u8> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if bytes.len() <= limit {
        bytes.to_vec()
    } else {
        [
            &bytes[..limit.div_ceil(2)],
            &bytes[bytes.len() - limit / 2..],
        ]
        .concat()
    }
}

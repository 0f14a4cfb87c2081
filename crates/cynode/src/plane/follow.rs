//! A job's output as it comes, and its end.
//!
//! Read in pages that wait for more: whoever is asked (the node while it has the output, the orchestrator after) may change between
//! two of them, and a connection that breaks costs nothing.

use std::time::Duration;

use cynode_api::{Chunk, ErrorCode, ExecExit, Job, JobId, Stream};
use cynode_client::{Error, OutputQuery, UserClient};
use tokio::time::{Instant, sleep};

use crate::{failure::Failure, output, sanitize, session::stdio};

/// How long the orchestrator, or the way to it, may be away.
const PATIENCE: Duration = Duration::from_mins(2);
const WAIT_MS: u64 = 20_000;

/// The job at its end, and what its process said of it.
#[derive(Debug)]
pub struct Ended {
    pub job: Job,
    pub exit: Option<ExecExit>,
}

/// Follows one job.
#[derive(Debug)]
pub struct Follower<'a> {
    client: &'a UserClient,
    id: JobId,
    last_seq: u64,
    exit: Option<ExecExit>,
    raw: bool,
}

impl<'a> Follower<'a> {
    pub const fn new(client: &'a UserClient, id: JobId, raw: bool) -> Self {
        Self {
            client,
            id,
            last_seq: 0,
            exit: None,
            raw,
        }
    }

    /// Prints what there is. With `to_the_end` until the job has ended.
    pub async fn print(&mut self, to_the_end: bool) -> Result<Ended, Failure> {
        let (mut stdout, mut stderr) = (stdio::stdout(self.raw), stdio::stderr(self.raw));
        let mut pause = Duration::from_millis(20);
        loop {
            // Asked before the output: what ended before has all of its output now.
            let job = self
                .patiently(async |client, id| client.job(id).await)
                .await?;
            let came = loop {
                let chunks = self.page(to_the_end && !job.state.is_final()).await?;
                if chunks.is_empty() {
                    break false;
                }
                for chunk in &chunks {
                    let data = bytes(chunk);
                    match chunk.stream {
                        Stream::Stdout => stdout.write(data).await?,
                        Stream::Stderr => stderr.write(data).await?,
                    }
                }
                if to_the_end && !job.state.is_final() {
                    break true;
                }
            };
            if job.state.is_final() || !to_the_end {
                stdout.finish().await?;
                stderr.finish().await?;
                if let Some(quota) = &job.output.truncated_by {
                    output::note(&sanitize::line(&format!(
                        "cynode: not all output is kept: {quota}"
                    )));
                }
                return Ok(Ended {
                    job,
                    exit: self.exit.take(),
                });
            }
            if came {
                pause = Duration::from_millis(20);
            } else {
                // It has no node yet, or its node does not wait.
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            }
        }
    }

    async fn page(&mut self, wait: bool) -> Result<Vec<Chunk>, Failure> {
        let query = OutputQuery {
            after_seq: Some(self.last_seq),
            wait_ms: wait.then_some(WAIT_MS),
            ..OutputQuery::default()
        };
        let asked = self.patiently(
            async |client, id| match client.job_output(id, &query).await {
                // Between the node, which has forgotten it, and the orchestrator, which has not noted that it has it.
                Err(error)
                    if error.is(ErrorCode::JobNotFound) || error.is(ErrorCode::OutputExpired) =>
                {
                    Ok(None)
                }
                page => page.map(Some),
            },
        );
        let Some(page) = asked.await? else {
            return Ok(Vec::new());
        };
        if page
            .lost_before_seq
            .is_some_and(|lost| lost > self.last_seq + 1)
        {
            output::note("cynode: some output is no longer kept and is missing here");
        }
        if page.exit.is_some() {
            self.exit = page.exit;
        }
        let chunks: Vec<Chunk> = page
            .chunks
            .into_iter()
            .filter(|chunk| chunk.seq > self.last_seq)
            .collect();
        if let Some(last) = chunks.last() {
            self.last_seq = last.seq;
        }
        Ok(chunks)
    }

    /// Asks again while the other side may be back soon.
    async fn patiently<T>(
        &self,
        ask: impl AsyncFn(&UserClient, JobId) -> Result<T, Error>,
    ) -> Result<T, Failure> {
        let deadline = Instant::now() + PATIENCE;
        let mut pause = Duration::from_millis(200);
        loop {
            match ask(self.client, self.id).await {
                Err(error) if error.is_passing() && Instant::now() + pause < deadline => {
                    sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(3));
                }
                result => return Ok(result?),
            }
        }
    }
}

fn bytes(chunk: &Chunk) -> &[u8] {
    chunk.data.as_ref().map_or_else(
        || chunk.data_b64.as_ref().map_or(&[][..], |data| &data.0),
        |text| text.as_bytes(),
    )
}

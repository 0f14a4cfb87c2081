//! Follows a job's output until the job ends.
//!
//! Uses long polling: the source of the output (first the node, later the orchestrator) may change
//! between pages, and a broken connection loses nothing.

use std::time::Duration;

use backon::Retryable as _;
use cynode_api::{Chunk, ErrorCode, ExecExit, Job, JobId, Stream};
use cynode_client::{Error, OutputQuery, UserClient};
use tokio::time::{Instant, sleep};

use crate::{failure::Failure, output, retry, sanitize, session::stdio};

/// How long the orchestrator may be unreachable.
const RETRY_TIMEOUT: Duration = Duration::from_mins(2);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(3);
/// How long the server holds a request until there is new output.
const WAIT_MS: u64 = 20_000;

/// A job that has ended, with the exit status of its process if it is known.
#[derive(Debug)]
pub struct FinishedJob {
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

    /// Prints the available output. With `until_end`, continues until the job has ended.
    pub async fn print(&mut self, until_end: bool) -> Result<FinishedJob, Failure> {
        let (mut stdout, mut stderr) = (stdio::stdout(self.raw), stdio::stderr(self.raw));
        let mut pause = Duration::from_millis(20);
        loop {
            // Read the state before the output: the output of an ended job is complete.
            let job = self
                .with_retries(async |client, id| client.job(id).await)
                .await?;
            let has_output = loop {
                let chunks = self.page(until_end && !job.state.is_final()).await?;
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
                if until_end && !job.state.is_final() {
                    break true;
                }
            };
            if job.state.is_final() || !until_end {
                stdout.finish().await?;
                stderr.finish().await?;
                if let Some(quota) = &job.output.truncated_by {
                    output::message(&sanitize::line(&format!(
                        "cynode: the stored output is truncated: {quota}"
                    )));
                }
                return Ok(FinishedJob {
                    job,
                    exit: self.exit.take(),
                });
            }
            if has_output {
                pause = Duration::from_millis(20);
            } else {
                // The job has no node yet, or its node does not support waiting.
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
        let answer =
            self.with_retries(
                async |client, id| match client.job_output(id, &query).await {
                    // The node has dropped the output, and the orchestrator has not stored it yet.
                    Err(error)
                        if error.is(ErrorCode::JobNotFound)
                            || error.is(ErrorCode::OutputExpired) =>
                    {
                        Ok(None)
                    }
                    page => page.map(Some),
                },
            );
        let Some(page) = answer.await? else {
            return Ok(Vec::new());
        };
        if page
            .lost_before_seq
            .is_some_and(|lost| lost > self.last_seq + 1)
        {
            output::message("cynode: some output is missing: it is no longer stored");
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

    /// Repeats a request while its failure is temporary.
    async fn with_retries<T>(
        &self,
        request: impl AsyncFn(&UserClient, JobId) -> Result<T, Error>,
    ) -> Result<T, Failure> {
        let deadline = Instant::now() + RETRY_TIMEOUT;
        let request = async || request(self.client, self.id).await;
        Ok(request
            .retry(retry::backoff(MAX_RETRY_DELAY))
            .when(|error| error.is_transient() && Instant::now() < deadline)
            .await?)
    }
}

fn bytes(chunk: &Chunk) -> &[u8] {
    chunk.data.as_ref().map_or_else(
        || chunk.data_b64.as_ref().map_or(&[][..], |data| &data.0),
        |text| text.as_bytes(),
    )
}

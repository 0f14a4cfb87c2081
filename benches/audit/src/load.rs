//! Twenty concurrent sessions, each running short commands sequentially.

use std::time::{Duration, Instant};

use anyhow::Result;
use cynode_api::SessionEnd;
use cynode_bench::{
    samples::{Samples, timed},
    through::{Stack, run_true},
};
use futures_util::future::try_join_all;

const SESSIONS: usize = 20;

#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) sessions: usize,
    pub(crate) per_second: f64,
    pub(crate) times: Samples,
}

pub(crate) async fn measure(seconds: u64, stack: &Stack) -> Result<Load> {
    let sessions = try_join_all((0..SESSIONS).map(|_| stack.session())).await?;
    let started = Instant::now();
    let until = started + Duration::from_secs(seconds);
    let clients = sessions.iter().map(async |session| {
        let mut times = Vec::new();
        while Instant::now() < until {
            let (time, result) = timed(run_true(&stack.through, *session)).await;
            result?;
            times.push(time);
        }
        Ok::<_, anyhow::Error>(times)
    });
    let mut times = Samples::new("exec, twenty sessions at once");
    for time in try_join_all(clients).await?.into_iter().flatten() {
        times.push(time);
    }
    let per_second = times.len() as f64 / started.elapsed().as_secs_f64();
    for session in sessions {
        stack
            .through
            .end_session(session, &SessionEnd::default())
            .await?;
    }
    Ok(Load {
        sessions: SESSIONS,
        per_second,
        times,
    })
}

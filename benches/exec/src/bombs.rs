//! A sandbox beside ten others that each exhaust a resource.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cynode_api::{ExecRequest, LimitsRequest, SessionCreate};
use cynode_tests::{BOMBS, session, sh};

use crate::{
    Plan,
    ours::Ours,
    samples::{Samples, timed},
};

#[derive(Debug, Default)]
pub(crate) struct Neighbour {
    pub(crate) seconds: u64,
    pub(crate) idle: Option<Samples>,
    pub(crate) beside: Option<Samples>,
    pub(crate) failed: usize,
}

pub(crate) async fn measure(plan: &Plan, ours: &Ours) -> Result<Neighbour> {
    let measured = ours.session().await?;
    let mut idle = Samples::new("exec of true, nothing beside it");
    for _ in 0..plan.exec_rounds {
        let (time, done) = timed(ours.client.exec(measured, &sh("true"))).await;
        done?;
        idle.push(time);
    }
    let small = LimitsRequest {
        memory_bytes: Some(128 << 20),
        pids: Some(128),
        cpus: Some(0.5),
        disk_bytes: Some(256 << 20),
        ..Default::default()
    };
    let mut bombs = Vec::new();
    for script in BOMBS {
        let id = ours
            .create(&SessionCreate {
                limits: Some(small),
                ..session()
            })
            .await?;
        let lit = ExecRequest {
            background: true,
            timeout_ms: 0,
            ..sh(script)
        };
        ours.client
            .exec_background(id, &lit)
            .await
            .with_context(|| script.to_owned())?;
        bombs.push(id);
    }
    let mut beside = Samples::new("the same beside ten bombs");
    let mut failed = 0;
    let until = Instant::now() + Duration::from_secs(plan.bomb_seconds);
    while Instant::now() < until {
        let (time, done) = timed(ours.client.exec(measured, &sh("true"))).await;
        if done.is_ok_and(|result| result.exit.exit_code == Some(0)) {
            beside.push(time);
        } else {
            failed += 1;
        }
    }
    for id in bombs.into_iter().chain([measured]) {
        ours.end(id).await?;
    }
    Ok(Neighbour {
        seconds: plan.bomb_seconds,
        idle: Some(idle),
        beside: Some(beside),
        failed,
    })
}

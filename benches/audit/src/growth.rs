//! A long trail: its effect on new records, and the speed of verification.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{AuditDecision, AuditVerdict, AuditVerifyLine};
use cynode_bench::{
    samples::Samples,
    through::{Stack, run_true},
};
use cynode_client::AuditFilter;
use time::OffsetDateTime;

use crate::cost::push;

#[derive(Debug)]
pub(crate) struct Growth {
    pub(crate) long: Samples,
    pub(crate) empty: Samples,
}

impl Growth {
    /// How much longer an exec takes, in percent.
    pub(crate) fn percent(&self) -> f64 {
        (self.long.p50().as_secs_f64() / self.empty.p50().as_secs_f64() - 1.0) * 100.0
    }
}

#[derive(Debug)]
pub(crate) struct Verified {
    pub(crate) time: Duration,
    pub(crate) verdict: AuditVerdict,
}

impl Verified {
    pub(crate) fn per_minute(&self) -> f64 {
        self.verdict.records as f64 / self.time.as_secs_f64() * 60.0
    }
}

pub(crate) async fn measure(rounds: u32, long: &Stack, empty: &Stack) -> Result<Growth> {
    let (session, other) = (long.session().await?, empty.session().await?);
    let mut growth = Growth {
        long: Samples::new("exec, long trail"),
        empty: Samples::new("exec, empty trail"),
    };
    for _ in 0..20 {
        run_true(&long.through, session).await?;
        run_true(&empty.through, other).await?;
    }
    for _ in 0..rounds {
        push(&mut growth.long, run_true(&long.through, session)).await?;
        push(&mut growth.empty, run_true(&empty.through, other)).await?;
    }
    Ok(growth)
}

/// Typical queries of a long trail, and the time of one page each.
pub(crate) async fn read(stack: &Stack) -> Result<Vec<(&'static str, Duration)>> {
    let session = stack.session().await?;
    run_true(&stack.through, session).await?;
    let recent = OffsetDateTime::now_utc() - Duration::from_secs(1);
    let ways = [
        (
            "one session",
            AuditFilter {
                session: Some(session),
                ..AuditFilter::default()
            },
        ),
        (
            "a subject that is not in it",
            AuditFilter {
                subject: Some("nobody-at-all".to_owned()),
                ..AuditFilter::default()
            },
        ),
        (
            "an action that is rare",
            AuditFilter {
                action: Some("session.create".to_owned()),
                ..AuditFilter::default()
            },
        ),
        (
            "what was denied",
            AuditFilter {
                decision: Some(AuditDecision::Deny),
                ..AuditFilter::default()
            },
        ),
        (
            "the last second",
            AuditFilter {
                since: Some(recent),
                ..AuditFilter::default()
            },
        ),
        (
            "before there was any",
            AuditFilter {
                until: Some(recent - Duration::from_hours(48)),
                ..AuditFilter::default()
            },
        ),
    ];
    let mut times = Vec::new();
    for (name, filter) in ways {
        let started = Instant::now();
        stack.user.audit(0, &filter, Duration::ZERO).await?;
        times.push((name, started.elapsed()));
    }
    Ok(times)
}

/// Verifies through the orchestrator, as `cynode audit verify` does.
pub(crate) async fn verify(stack: &Stack) -> Result<Verified> {
    let started = Instant::now();
    let mut lines = stack.user.verify_audit().await?;
    let mut found = None;
    while let Some(line) = lines.next().await? {
        if let AuditVerifyLine::Verdict { verdict } = line {
            found = Some(verdict);
        }
    }
    let verdict = found.context("verifying ended without a verdict")?;
    ensure!(
        verdict.intact,
        "the trail is not intact: {:?}",
        verdict.problems
    );
    Ok(Verified {
        time: started.elapsed(),
        verdict,
    })
}

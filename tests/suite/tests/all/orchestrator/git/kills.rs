//! Roles that are killed in the middle of a promotion.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{Hold, eventually};
use http::Method;
use rustix::process::Signal;

use super::{GitFixture, TIMEOUT, creates};
use crate::orchestrator::stack::kill;

/// A restarted role waits for up to ten seconds.
const RECOVERY: Duration = Duration::from_secs(120);

/// The steps of a promotion at which its request to the server is kept waiting.
fn steps() -> [(&'static str, Hold); 5] {
    let hold = |method, path, after_effect| Hold {
        method,
        path,
        after_effect,
    };
    [
        (
            "asks for references",
            hold(Method::GET, "service=git-upload-pack", false),
        ),
        ("pushes", hold(Method::POST, "git-receive-pack", false)),
        ("has pushed", hold(Method::POST, "git-receive-pack", true)),
        ("opens the request", hold(Method::POST, "/pulls", false)),
        ("has opened the request", hold(Method::POST, "/pulls", true)),
    ]
}

/// Kills a role at each step of a promotion of its own.
async fn kill_at_each_step(fixture: &GitFixture, role: &str, round: usize) -> Result<()> {
    for (number, (step, hold)) in steps().into_iter().enumerate() {
        let place = format!("{role} while it {step}, round {round}");
        let branch = format!("{role}-{number}-{round}");
        let path = format!("{branch}.txt");
        let artifact = fixture.patch(&branch, &creates(&path, "100644", "x\n"))?;
        let base = fixture.served.tip("main")?;
        let pulls = fixture.server.pulls().len();
        fixture.server.hold(hold);
        let started = fixture.cli(&[
            "promote",
            "--changeset",
            &artifact,
            "--repo",
            "shop",
            "--base",
            &base,
            "--branch",
            &branch,
            "--title",
            &branch,
            "--detach",
        ])?;
        let id = started.success()?.trim_end().to_owned();
        eventually(&place, TIMEOUT, async || Ok(fixture.server.held() > 0)).await?;
        let pid = fixture.role(role)?;
        kill(pid, Signal::KILL)?;
        fixture.server.release();
        eventually(&place, RECOVERY, async || {
            // The API may be the one that was killed.
            let Ok(promotion) = fixture.promotion(&id) else {
                return Ok(false);
            };
            let state = promotion["state"].as_str().context("a state")?;
            ensure!(state != "failed", "{place}: {promotion}");
            Ok(state == "done")
        })
        .await?;
        let promotion = fixture.promotion(&id)?;
        let name = promotion["branch"].as_str().context("a branch")?;
        assert_eq!(promotion["commit"], fixture.served.tip(name)?.as_str());
        assert_eq!(fixture.served.updates(name)?, 1, "{place}: pushed twice");
        assert_eq!(
            fixture.server.pulls().len(),
            pulls + 1,
            "{place}: opened twice"
        );
        ensure!(
            fixture.server.pulls().iter().any(|pull| pull.head == name),
            "{place}"
        );
    }
    Ok(())
}

const ROLES: [&str; 4] = ["git", "orchestrator", "postgres", "worker"];

#[tokio::test]
// invariant: exactly-once
async fn a_killed_role_pushes_nothing_twice() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    for role in ROLES {
        kill_at_each_step(&fixture, role, 0).await?;
    }
    fixture.cli(&["audit", "verify"])?.success()?;
    fixture.down()
}

#[tokio::test]
async fn soak_roles_killed_at_each_step_of_promotions_push_nothing_twice() -> Result<()> {
    const ROUNDS: usize = 10;
    let fixture = GitFixture::start("github").await?;
    for round in 0..ROUNDS {
        for role in ROLES {
            kill_at_each_step(&fixture, role, round).await?;
        }
    }
    fixture.cli(&["audit", "verify"])?.success()?;
    println!(
        "soak: {} promotions with a killed role",
        ROUNDS * ROLES.len() * 5
    );
    fixture.down()
}

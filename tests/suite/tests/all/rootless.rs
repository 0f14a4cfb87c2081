//! What is specific to rootless operation: subordinate ids, the runtime directory, unenforced
//! limits.

use std::{
    collections::BTreeSet, os::unix::fs::MetadataExt as _, process::Command, time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, SessionCreate, SessionEnd, SessionId, TaskId, Unenforced};
use cynode_tests::{Engine, Options, World, eventually, session, sh};
use serde_json::Value;

fn check(output: &std::process::Output, name: &str) -> Result<Value> {
    let report: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    report["checks"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|check| check["name"] == name)
        .cloned()
        .with_context(|| format!("no check '{name}' in {report}"))
}

fn doctor(world: &World, options: &Options) -> Result<std::process::Output> {
    Ok(world
        .command()?
        .args(["doctor", "--output", "json", "--state-dir"])
        .arg(world.state_dir())
        .arg("--config")
        .arg(world.config(options)?)
        .output()?)
}

#[tokio::test]
// invariant: host-ids
async fn each_sandbox_has_ids_of_its_own_among_the_users() -> Result<()> {
    let world = World::on(Engine::Rootless).await?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut made = Vec::new();
    for _ in 0..3 {
        let id = client.create_session(&session()).await?.session_id;
        // Owners that only the sandbox can create, and a tree that only its owner can remove.
        client
            .exec(id, &sh("mkdir -p a/b; touch a/b/c; chmod 000 a/b"))
            .await?;
        made.push(id);
    }
    let mut owners = BTreeSet::new();
    for entry in fs_err::read_dir(world.state_dir().join("worker/workspaces"))? {
        owners.insert(fs_err::metadata(entry?.path().join("data/workspace"))?.uid());
    }
    assert!(
        owners.len() == 3 && owners.iter().all(|owner| *owner >= 100_000),
        "{owners:?}"
    );
    assert_eq!(
        fs_err::metadata(world.state_dir().join("worker.token"))?.uid(),
        world.user()?,
        "a file of the worker belongs to another user"
    );
    // Signals reach processes with other ids, and their trees are removed.
    client
        .signal_session(made[0], cynode_api::SignalName::KILL)
        .await?;
    for id in made {
        client.end_session(id, &SessionEnd::default()).await?;
    }
    eventually(
        "every workspace is gone",
        Duration::from_secs(30),
        async || Ok(fs_err::read_dir(world.state_dir().join("worker/workspaces"))?.count() == 0),
    )
    .await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

/// Limits that this host enforces only for root (here all of them: cgroups v1, and no disk mounts).
#[tokio::test]
// invariant: fail-closed
async fn each_limit_that_nobody_enforces_is_refused_by_name() -> Result<()> {
    let world = World::on(Engine::Rootless).await?;
    // As the worker reports them, with all of them allowed.
    let mut worker = world.worker(&Options::default()).await?;
    let unenforced = worker
        .client()?
        .create_session(&session())
        .await?
        .unenforced;
    worker.shut_down().await?;
    assert!(unenforced.contains(&Unenforced::Disk), "{unenforced:?}");
    for name in &unenforced {
        let others: Vec<String> = unenforced
            .iter()
            .filter(|other| *other != name)
            .map(ToString::to_string)
            .collect();
        let mut worker = world
            .worker(&Options::default().set("allow_unenforced", &format!("{others:?}")))
            .await?;
        let error = worker
            .client()?
            .create_session(&session())
            .await
            .expect_err("the limit is not enforced");
        assert!(error.is(ErrorCode::LimitUnenforceable), "{name}: {error}");
        let message = error.to_string();
        assert!(
            message.contains(&format!("limits.{name}:"))
                && others
                    .iter()
                    .all(|other| !message.contains(&format!("limits.{other}"))),
            "{name}: {message}"
        );
        worker.shut_down().await?;
    }
    world.assert_clean().await
}

#[tokio::test]
async fn an_ordinary_user_can_have_a_larger_pool() -> Result<()> {
    let world = World::on(Engine::Rootless).await?;
    let mut worker = world
        .worker(&Options::default().set("pool_size", "10"))
        .await?;
    let client = worker.client()?;
    let url = worker.url()?;
    // Fewer if the user has few ids: a quarter of 32 blocks.
    let full = async || -> Result<bool> {
        let text = reqwest::get(format!("{url}/metrics")).await?.text().await?;
        Ok(text
            .lines()
            .find_map(|line| {
                line.strip_prefix("cynode_pool_ready")?
                    .trim()
                    .parse::<u64>()
                    .ok()
            })
            .is_some_and(|ready| ready >= 8))
    };
    eventually("the pool is full", Duration::from_secs(120), full).await?;
    let made = client
        .create_session(&SessionCreate::new(
            TaskId::generate(),
            SessionId::generate(),
            "default",
        ))
        .await?;
    assert!(made.warm, "{made:?}");
    assert_eq!(
        client.exec(made.session_id, &sh("id -u")).await?.stdout,
        "1000\n"
    );
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
async fn doctor_reports_an_ordinary_users_capabilities() -> Result<()> {
    let world = World::on(Engine::Rootless).await?;
    let output = doctor(&world, &Options::default())?;
    let privileges = check(&output, "privileges")?;
    assert!(
        privileges["status"] == "adapted"
            && privileges["detail"]
                .as_str()
                .is_some_and(|detail| detail.contains("subordinate ids")),
        "{privileges}"
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );

    // What an image costs is said for the pool as it is, and as it is by default.
    let copies = |setting: &str| -> Result<String> {
        let path = world.config(&Options::default())?;
        let text = fs_err::read_to_string(&path)?;
        ensure!(text.contains("pool_size = 0\n"), "{text}");
        fs_err::write(&path, text.replace("pool_size = 0\n", setting))?;
        let output = world
            .command()?
            .args(["doctor", "--output", "json", "--state-dir"])
            .arg(world.state_dir())
            .arg("--config")
            .arg(&path)
            .output()?;
        let copies = check(&output, "image copies")?;
        ensure!(copies["status"] == "adapted", "{copies}");
        Ok(copies["detail"].as_str().context("a text")?.to_owned())
    };
    for (setting, warm) in [("", "2"), ("pool_size = 5\n", "5")] {
        let told = copies(setting)?;
        ensure!(
            told.contains("id blocks keeps its own copy")
                && told.contains(&format!("for the {warm} warm sandboxes")),
            "{told}"
        );
    }

    // A limit that is unenforced for an ordinary user is a problem unless it is allowed by name.
    let allowed = check(&output, "cgroups")?;
    let strict = check(
        &doctor(&world, &Options::default().set("allow_unenforced", "[]"))?,
        "cgroups",
    )?;
    match allowed["status"].as_str() {
        Some("ok") => assert_eq!(strict, allowed),
        Some("adapted") => {
            assert_eq!(strict["status"], "problem", "{strict}");
            assert!(
                strict["fix"]
                    .as_str()
                    .is_some_and(|fix| fix.contains("worker.allow_unenforced = [\"memory\"")),
                "{strict}"
            );
        }
        other => panic!("{other:?}: {allowed}"),
    }
    Ok(())
}

#[tokio::test]
async fn a_user_without_subordinate_ids_sees_the_remedy() -> Result<()> {
    let world = World::on(Engine::Rootless).await?;
    let nobody = world.directory().join("nobody");
    fs_err::create_dir_all(&nobody)?;
    fs_err::create_dir_all(world.directory().join("n"))?;
    for directory in [nobody.clone(), world.directory().join("n")] {
        std::os::unix::fs::chown(directory, Some(65_534), Some(65_534))?;
    }
    let run = |arguments: &[&str]| -> Result<std::process::Output> {
        let mut command = Command::new("setpriv");
        command
            .args([
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "env",
                "--ignore-environment",
                "--chdir",
            ])
            .arg(&nobody);
        command
            .arg(format!("PATH={}", std::env::var("PATH")?))
            .arg(format!("HOME={}", nobody.display()))
            .arg(format!("XDG_RUNTIME_DIR={}", nobody.display()));
        command
            .arg(world.directory().join("bin/cynode"))
            .args(arguments)
            .arg("--state-dir")
            .arg(nobody.join("state"));
        // Podman limits the length of this path.
        Ok(command
            .arg("--set")
            .arg(format!(
                "podman_runroot={}",
                world.directory().join("n").display()
            ))
            .output()?)
    };
    let privileges = check(&run(&["doctor", "--output", "json"])?, "privileges")?;
    assert!(
        privileges["status"] == "problem"
            && privileges["fix"]
                .as_str()
                .is_some_and(|fix| fix.contains("usermod --add-subuids")),
        "{privileges}"
    );
    let worker = run(&["worker"])?;
    let message = String::from_utf8_lossy(&worker.stderr).into_owned();
    assert!(
        !worker.status.success() && message.contains("usermod --add-subuids"),
        "{message}"
    );
    Ok(())
}

#[tokio::test]
// invariant: host-ids
async fn up_and_down_work_for_an_ordinary_user_without_a_login_session() -> Result<()> {
    let world = World::on(Engine::RootlessWithoutSession).await?;
    let config = world.config(&Options::default())?;
    let cynode = |arguments: &[&str]| -> Result<String> {
        let mut command = world.command()?;
        let output = command
            .args(arguments)
            .arg("--state-dir")
            .arg(world.state_dir())
            .arg("--config")
            .arg(&config)
            .output()?;
        ensure!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let exec = |id: &str, script: &str| -> Result<String> {
        let output = world
            .command()?
            .args(["session", "exec", "--state-dir"])
            .arg(world.state_dir())
            .args([id, "--", "sh", "-c", script])
            .output()?;
        ensure!(
            output.status.success(),
            "{script}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    cynode(&["up", "--worker-only", "--detach"])?;
    let id = cynode(&["session", "create"])?;
    assert_eq!(
        exec(
            &id,
            "id -u; mkdir -p tree/sub; touch tree/sub/file; chmod 500 tree/sub"
        )?,
        "1000\n"
    );
    cynode(&["session", "end", &id])?;
    cynode(&["session", "create"])?;

    // A worker that can't respond: `down` removes its sandboxes and leftovers without it.
    let runs = |name: &str| -> Result<Vec<rustix::process::Pid>> {
        let mut found = Vec::new();
        for entry in fs_err::read_dir("/proc")? {
            let path = entry?.path();
            let command =
                String::from_utf8_lossy(&fs_err::read(path.join("cmdline")).unwrap_or_default())
                    .replace('\0', " ");
            if command.contains(&format!("bin/cynode {name} "))
                && command.contains(&world.directory().display().to_string())
            {
                found.extend(
                    path.file_name()
                        .and_then(|pid| pid.to_str()?.parse().ok())
                        .and_then(rustix::process::Pid::from_raw),
                );
            }
        }
        Ok(found)
    };
    for pid in runs("up")?.into_iter().chain(runs("worker")?) {
        rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    }
    eventually(
        "both processes are gone",
        Duration::from_secs(10),
        async || Ok(runs("up")?.is_empty() && runs("worker")?.is_empty()),
    )
    .await?;
    assert_eq!(world.containers()?.len(), 1);
    cynode(&["down"])?;
    world.assert_clean().await
}

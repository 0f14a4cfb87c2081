//! Data with a retention time is removed when the time is over, and nothing else is.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Result, ensure};
use cynode_api::TaskCreate;
use cynode_tests::{ControlPlane, eventually};

const TIMEOUT: Duration = Duration::from_secs(60);

/// The files of the store.
fn stored(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs_err::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else {
                found.push(path);
            }
        }
    }
    Ok(found)
}

fn make_old(path: &Path) -> Result<()> {
    let touched = Command::new("touch")
        .args(["-d", "3 days ago"])
        .arg(path)
        .status()?;
    ensure!(touched.success(), "touch");
    Ok(())
}

#[tokio::test]
// invariant: control-plane
async fn bytes_that_nobody_needs_are_removed() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    let task = client
        .create_task(&TaskCreate {
            name: "t".to_owned(),
            ..Default::default()
        })
        .await?
        .id;
    for (path, text) in [
        ("kept", "one"),
        ("kept", "two"),
        ("young", "three"),
        ("gone", "four"),
        ("twice", "four"),
    ] {
        client
            .put_artifact(task, path, None, text.as_bytes().to_vec())
            .await?;
    }
    let directory = orchestrator.state_dir().join("artifacts");
    assert_eq!(
        stored(&directory)?.len(),
        4,
        "equal bytes were stored twice"
    );
    let old = "update artifacts set created_at = now() - interval '40 days' where path in \
               ('kept', 'gone', 'twice')";
    control_plane.postgres.query(old)?;
    control_plane
        .postgres
        .query("delete from artifacts where path = 'gone'")?;
    for file in stored(&directory)? {
        make_old(&file)?;
    }
    fs_err::create_dir_all(directory.join("incoming"))?;
    for (name, is_old) in [("abandoned", true), ("under-way", false)] {
        let path = directory.join("incoming").join(name);
        fs_err::write(&path, "half")?;
        if is_old {
            make_old(&path)?;
        }
    }
    fs_err::create_dir_all(directory.join("sha256/00"))?;
    let unknown = directory.join(format!("sha256/00/{}", "00".repeat(32)));
    fs_err::write(&unknown, "")?;
    make_old(&unknown)?;
    let fresh = directory.join(format!("sha256/00/{}", "01".repeat(32)));
    fs_err::write(&fresh, "")?;

    orchestrator.kill()?;
    let orchestrator = control_plane
        .orchestrator("", &[("artifact_days", "30"), ("event_days", "30")])
        .await?;
    let client = orchestrator.client()?;
    // 'one' was superseded long ago; the rest is the newest of an open task, or recent.
    let expected = async || Ok(client.artifacts(task).await?.len() == 3 && !unknown.exists());
    eventually("expired data is removed", TIMEOUT, expected).await?;
    let mut left: Vec<String> = client
        .artifacts(task)
        .await?
        .iter()
        .map(|artifact| format!("{} {}", artifact.path, artifact.version))
        .collect();
    left.sort();
    assert_eq!(left, ["kept 2", "twice 1", "young 1"]);
    for path in ["kept", "twice", "young"] {
        let mut body = client.get_artifact(task, path, None).await?;
        assert!(body.chunk().await?.is_some(), "{path}");
    }
    let settled = async || Ok(stored(&directory)?.len() == 5);
    eventually(
        "three artifacts, one recent job, one running job",
        TIMEOUT,
        settled,
    )
    .await?;
    assert!(
        fresh.exists()
            && directory.join("incoming/under-way").exists()
            && !directory.join("incoming/abandoned").exists()
    );
    Ok(())
}

#[tokio::test]
// invariant: quotas
async fn expired_output_is_not_counted_and_unmeasured_output_is_measured() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    let task = client
        .create_task(&TaskCreate {
            name: "t".to_owned(),
            ..Default::default()
        })
        .await?
        .id;
    client
        .put_artifact(task, "a", None, vec![b'x'; 1_234])
        .await?;
    // Jobs of earlier versions: the size of their output was not recorded.
    let job = |name: &str, age: u32| {
        let object = r#"{"stdout": "12345", "stderr": "é"}"#;
        control_plane.postgres.query(&format!(
            "insert into jobs (job_id, task_id, state, body, request, retry, object, output_sha256, owner_id, created_by, acknowledged, updated_at)
             select '{name}', task_id, 'completed', '{{}}', '{{}}', 'never', '{object}', sha256, (select id from users limit 1), 'admin', true,
                 now() - interval '{age} days' from artifacts"
        ))
    };
    let (young, old) = (
        "01890000-0000-7000-8000-000000000001",
        "01890000-0000-7000-8000-000000000002",
    );
    job(young, 1)?;
    job(old, 40)?;
    control_plane.postgres.query(&format!(
        "update jobs set output_bytes = 99, output_sha256 = null where job_id = '{old}'"
    ))?;
    orchestrator.kill()?;
    let _orchestrator = control_plane
        .orchestrator("", &[("output_days", "30")])
        .await?;
    let bytes = |name: &str| {
        control_plane.postgres.query(&format!(
            "select output_bytes from jobs where job_id = '{name}'"
        ))
    };
    let settled = async || Ok((bytes(young)?.as_str(), bytes(old)?.as_str()) == ("1241", "0"));
    eventually(
        "the recent job counts with its blob and streams, the old one doesn't count",
        TIMEOUT,
        settled,
    )
    .await
}

#[tokio::test]
// invariant: control-plane
async fn old_events_are_removed_and_their_cursors_are_refused() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    let task = client
        .create_task(&TaskCreate {
            name: "t".to_owned(),
            ..Default::default()
        })
        .await?
        .id;
    control_plane.postgres.query(&format!(
        "insert into events (cursor, at, type, task_id, state) select n, now() - make_interval(days => 12000 - n), 'job.state', '{task}', 'accepted'
         from generate_series(1, 12000) n; update event_head set last = 12000"
    ))?;
    orchestrator.kill()?;
    let orchestrator = control_plane
        .orchestrator("", &[("event_days", "30")])
        .await?;
    let client = orchestrator.client()?;
    let expired = async || {
        Ok(control_plane
            .postgres
            .query("select count(*) from events")?
            == "30")
    };
    eventually("old events are removed", TIMEOUT, expired).await?;
    let refused = client
        .events(5, None, Duration::ZERO)
        .await
        .expect_err("gone");
    assert!(
        refused.is(cynode_api::ErrorCode::CursorExpired),
        "{refused}"
    );
    let page = client.events(0, None, Duration::ZERO).await?;
    assert_eq!(
        (
            page.items.len(),
            page.items.first().map(|event| event.cursor),
            page.next_cursor
        ),
        (30, Some(11_971), 12_000)
    );
    Ok(())
}

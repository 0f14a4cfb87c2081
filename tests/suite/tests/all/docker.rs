//! What is specific to Docker: its id mapping, and what must be allowed by name because of it.

use std::{process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, Unenforced};
use cynode_tests::{Engine, IMAGE, OTHER_RUNTIME, Options, World, session, sh};
use serde_json::Value;

/// The result of one check of `cynode doctor`, and whether all checks passed.
fn doctor(world: &World, options: &Options) -> Result<(Value, bool)> {
    let mut command = Command::new(World::cynode()?);
    command
        .args(["doctor", "--output", "json", "--state-dir"])
        .arg(world.state_dir())
        .arg("--config")
        .arg(world.config(options)?);
    let output = command.output()?;
    Ok((
        serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?,
        output.status.success(),
    ))
}

fn check<'a>(report: &'a Value, name: &str) -> Result<&'a Value> {
    report["checks"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|check| check["name"] == name)
        .with_context(|| format!("no check '{name}' in {report}"))
}

/// Starts a worker that must refuse to start, and returns its message.
async fn refusal(world: &World, options: &Options) -> Result<String> {
    let mut worker = world.start_worker(options)?;
    ensure!(
        !worker.wait(Duration::from_secs(60)).await?.success(),
        "the worker succeeded"
    );
    Ok(fs_err::read_to_string(
        world.directory().join("worker.log"),
    )?)
}

#[tokio::test]
// invariant: host-ids
async fn ids_that_sandboxes_share_must_be_allowed_by_name() -> Result<()> {
    let world = World::on(Engine::Docker).await?;
    let strict = Options::default().set("allow_unenforced", "[\"disk\"]");
    let message = refusal(&world, &strict).await?;
    assert!(
        message.contains(r#"worker.allow_unenforced = ["disk","id_range"]"#),
        "{message}"
    );
    assert!(world.containers()?.is_empty());
    let (report, all_passed) = doctor(&world, &strict)?;
    let ids = check(&report, "user namespace")?;
    assert!(
        !all_passed
            && ids["status"] == "problem"
            && ids["fix"]
                .as_str()
                .is_some_and(|fix| fix.contains("id_range")),
        "{ids}"
    );
    Ok(())
}

#[tokio::test]
// invariant: host-ids
async fn without_a_map_of_ids_docker_must_be_allowed_by_name() -> Result<()> {
    let world = World::on(Engine::DockerUnmapped).await?;
    let message = refusal(
        &world,
        &Options::default().set("allow_unenforced", "[\"id_range\"]"),
    )
    .await?;
    assert!(
        message.contains("from the host's") && message.contains(r#"["userns","id_range"]"#),
        "{message}"
    );

    // The world's default setting allows both.
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let made = client.create_session(&session()).await?;
    assert!(
        made.unenforced.contains(&Unenforced::Userns)
            && made.unenforced.contains(&Unenforced::IdRange),
        "{:?}",
        made.unenforced
    );
    assert_eq!(
        client
            .exec(
                made.session_id,
                &sh("echo here > file; cat file; id -u; awk '{ print $1, $2 }' /proc/self/uid_map")
            )
            .await?
            .stdout,
        "here\n1000\n0 0\n"
    );
    Ok(())
}

#[tokio::test]
async fn doctor_reports_dockers_features_and_the_oci_runtime() -> Result<()> {
    let world = World::on(Engine::Docker).await?;
    let (report, all_passed) = doctor(&world, &Options::default())?;
    assert!(all_passed, "{report}");
    for (name, words) in [
        ("container engine", "Docker "),
        ("user namespace", "userns-remap"),
        ("cgroups", "driver cgroupfs"),
        ("OCI runtime", "runc ran a container"),
        ("storage driver", "overlay2"),
        ("seccomp", "on"),
        ("default image", IMAGE),
    ] {
        let found = check(&report, name)?;
        assert!(
            found["status"] != "problem"
                && found["detail"]
                    .as_str()
                    .is_some_and(|detail| detail.contains(words)),
            "{name}: {found}"
        );
    }
    assert!(
        world.containers()?.is_empty(),
        "the trial's container is left"
    );

    let (report, all_passed) = doctor(&world, &Options::default().set("oci_runtime", "\"runsc\""))?;
    let runtime = check(&report, "OCI runtime")?;
    assert!(
        !all_passed
            && runtime["status"] == "problem"
            && runtime["detail"]
                .as_str()
                .is_some_and(|detail| detail.contains("runsc")),
        "{runtime}"
    );
    let message = refusal(&world, &Options::default().set("oci_runtime", "\"runsc\"")).await?;
    assert!(message.contains("'runsc'"), "{message}");

    let (report, all_passed) = doctor(
        &world,
        &Options::default().set("docker_socket", "\"/nowhere/sock\""),
    )?;
    assert!(
        !all_passed && check(&report, "container engine")?["status"] == "problem",
        "{report}"
    );
    Ok(())
}

#[tokio::test]
async fn an_oci_runtime_by_name_is_what_runs_the_sandboxes() -> Result<()> {
    let world = World::on(Engine::Docker).await?;
    let worker = world
        .worker(&Options::default().set("oci_runtime", &format!("{OTHER_RUNTIME:?}")))
        .await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    assert_eq!(client.exec(id, &sh("echo here")).await?.stdout, "here\n");
    let container = world.containers()?.pop().context("a container")?;
    let docker = reqwest::Client::builder()
        .unix_socket(world.docker_socket())
        .build()?;
    let found: Value = docker
        .get(format!("http://docker/containers/{container}/json"))
        .send()
        .await?
        .json()
        .await?;
    assert_eq!(found["HostConfig"]["Runtime"], OTHER_RUNTIME);
    Ok(())
}

#[tokio::test]
async fn an_oci_runtime_named_to_podman_is_looked_for() -> Result<()> {
    let world = World::new()?;
    let (report, all_passed) = doctor(&world, &Options::default().set("oci_runtime", "\"runsc\""))?;
    let runtime = check(&report, "OCI runtime")?;
    assert!(
        !all_passed
            && runtime["status"] == "problem"
            && runtime["detail"]
                .as_str()
                .is_some_and(|detail| detail.contains("runsc")),
        "{runtime}"
    );
    Ok(())
}

#[tokio::test]
async fn an_unknown_limit_cannot_be_allowed() -> Result<()> {
    let world = World::new()?;
    let mut worker =
        world.start_worker(&Options::default().set("allow_unenforced", "[\"everything\"]"))?;
    assert_eq!(worker.wait(Duration::from_secs(60)).await?.code(), Some(64));
    let message = fs_err::read_to_string(world.directory().join("worker.log"))?;
    assert!(
        message.contains("worker.allow_unenforced") && message.contains("id_range"),
        "{message}"
    );
    Ok(())
}

/// Builds an image that declares a volume.
async fn image_with_volume(world: &World, name: &str, path: &str) -> Result<()> {
    let client = reqwest::Client::builder()
        .unix_socket(world.docker_socket())
        .build()?;
    let call = async |request: reqwest::RequestBuilder| -> Result<()> {
        let answer = request.send().await?;
        let status = answer.status();
        ensure!(status.is_success(), "{status}: {}", answer.text().await?);
        Ok(())
    };
    let body = serde_json::json!({ "Image": IMAGE, "HostConfig": { "NetworkMode": "none" } });
    call(
        client
            .post("http://docker/containers/create?name=base")
            .json(&body),
    )
    .await?;
    let commit = [
        ("container", "base"),
        ("repo", name),
        ("tag", "latest"),
        ("changes", &format!("VOLUME {path}")),
    ];
    call(
        client
            .post("http://docker/commit")
            .query(&commit)
            .json(&serde_json::json!({})),
    )
    .await?;
    call(client.delete("http://docker/containers/base")).await
}

#[tokio::test]
async fn volumes_declared_by_an_image_are_not_writable() -> Result<()> {
    let world = World::on(Engine::Docker).await?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    image_with_volume(&world, "localhost/cynode/volume", "/srv/data").await?;
    let mut request = session();
    "localhost/cynode/volume:latest".clone_into(&mut request.image_ref);
    let id = client.create_session(&request).await?.session_id;
    let looked = client
        .exec(
            id,
            &sh("stat -f -c %T /srv/data; touch /srv/data/x 2>/dev/null || echo closed"),
        )
        .await?;
    assert_eq!(looked.stdout, "tmpfs\nclosed\n", "{looked:?}");

    // A volume below a mount would be created within the caller's files.
    image_with_volume(&world, "localhost/cynode/within", "/workspace/within").await?;
    let mut request = session();
    "localhost/cynode/within:latest".clone_into(&mut request.image_ref);
    let refused = client.create_session(&request).await.expect_err("refused");
    assert!(
        refused.is(ErrorCode::Internal) && refused.to_string().contains("/workspace/within"),
        "{refused}"
    );
    Ok(())
}

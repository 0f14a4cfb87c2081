//! The contract of the container runtime, which every runtime and the fake must meet.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::Result;
use cynode_api::{LABEL_AGENT_COMPATIBLE, Limits, Stream};
use cynode_tests::{Engine, IMAGE, UNLABELLED, World, eventually, on_every_runtime};
use cynode_worker::runtime::{
    Docker, DockerOptions, ExecSpec, Fake, FakeImage, Fault, IdMap, IdSpace, Podman, PodmanOptions,
    Runtime, RuntimeError, ServiceOptions, Spec,
};
use futures_util::StreamExt as _;
use tokio::io::AsyncWriteExt as _;

const LABEL: &str = "io.cynodeai.test";

fn podman(world: &World) -> Arc<dyn Runtime> {
    let command = world.podman();
    let command = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    // The place where the world's cleanup looks for it.
    let directory = world.state_dir().join("worker/podman");
    Arc::new(Podman::new(PodmanOptions {
        socket: None,
        service: ServiceOptions { command, directory },
        oci_runtime: Some("runc".to_owned()),
        call_limit: Duration::from_secs(30),
    }))
}

fn docker(world: &World) -> Arc<dyn Runtime> {
    Arc::new(Docker::new(DockerOptions {
        socket: world.docker_socket(),
        directory: world.state_dir().join("worker/docker"),
        oci_runtime: None,
        call_limit: Duration::from_secs(30),
    }))
}

fn runtime(world: &World) -> Arc<dyn Runtime> {
    match world.engine() {
        Engine::Podman | Engine::Rootless | Engine::RootlessWithoutSession => podman(world),
        Engine::Docker | Engine::DockerUnmapped => docker(world),
    }
}

fn fake() -> Arc<dyn Runtime> {
    let marked = FakeImage {
        labels: BTreeMap::from([(LABEL_AGENT_COMPATIBLE.to_owned(), "true".to_owned())]),
        env: Vec::new(),
    };
    Arc::new(Fake::new([
        (IMAGE.to_owned(), marked),
        (UNLABELLED.to_owned(), FakeImage::default()),
    ]))
}

async fn spec(runtime: &dyn Runtime, name: &str, script: &str) -> Result<Spec> {
    Ok(Spec {
        name: name.to_owned(),
        labels: BTreeMap::from([(LABEL.to_owned(), name.to_owned())]),
        image_id: runtime.image(IMAGE).await?.id,
        argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        env: vec![("PATH".to_owned(), "/bin:/usr/bin".to_owned())],
        ids: match runtime.ids().await? {
            IdSpace::Own => IdMap {
                first: 0x7f00_0000,
                count: 65_536,
            },
            IdSpace::Within(map) => IdMap {
                first: map.first + 2_048,
                count: 2_048,
            },
            IdSpace::Shared(map) => map,
            IdSpace::Host => IdMap {
                first: 0,
                count: 65_536,
            },
        },
        mounts: Vec::new(),
        limits: Limits {
            memory_bytes: 64 << 20,
            pids: 64,
            ..Limits::default()
        },
        cgroup_parent: None,
    })
}

async fn run(runtime: &dyn Runtime, name: &str, script: &str) -> Result<()> {
    let spec = spec(runtime, name, script).await?;
    runtime.create(&spec).await?;
    Ok(runtime.start(name).await?)
}

struct ExecOutput {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    code: Option<i64>,
}

async fn exec(
    runtime: &dyn Runtime,
    name: &str,
    script: &str,
    stdin: Option<&[u8]>,
) -> Result<ExecOutput> {
    let spec = ExecSpec {
        argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        env: vec![
            ("PATH".to_owned(), "/bin:/usr/bin".to_owned()),
            ("COLOUR".to_owned(), "blue".to_owned()),
        ],
        cwd: "/tmp".to_owned(),
        stdin: stdin.is_some(),
        tty: None,
    };
    let mut started = runtime.exec(name, &spec).await?;
    if let Some(bytes) = stdin {
        started.input.write_all(bytes).await?;
        started.input.shutdown().await?;
    }
    let mut ran = ExecOutput {
        stdout: Vec::new(),
        stderr: Vec::new(),
        code: None,
    };
    while let Some(piece) = started.output.next().await {
        match piece? {
            (Stream::Stdout, data) => ran.stdout.extend_from_slice(&data),
            (Stream::Stderr, data) => ran.stderr.extend_from_slice(&data),
        }
    }
    eventually("the exec has ended", Duration::from_secs(10), async || {
        Ok(!runtime.exec_state(&started.id).await?.running)
    })
    .await?;
    ran.code = runtime.exec_state(&started.id).await?.exit_code;
    Ok(ran)
}

/// The whole contract. Each part names in its message what broke.
async fn hold_the_contract(runtime: Arc<dyn Runtime>) -> Result<()> {
    let runtime = runtime.as_ref();
    runtime.ping().await?;

    let image = runtime.image(IMAGE).await?;
    assert_eq!(
        image.labels.get(LABEL_AGENT_COMPATIBLE).map(String::as_str),
        Some("true"),
        "labels were not read"
    );
    assert!(
        !runtime
            .image(UNLABELLED)
            .await?
            .labels
            .contains_key(LABEL_AGENT_COMPATIBLE)
    );
    assert!(
        matches!(
            runtime.image("localhost/cynode/none:latest").await,
            Err(RuntimeError::NotFound(_))
        ),
        "an unknown image was found"
    );

    let name = format!("contract-{}", uuid::Uuid::new_v4().simple());
    let mut unknown = spec(runtime, &name, "true").await?;
    unknown.image_id = "0".repeat(64);
    assert!(
        matches!(
            runtime.create(&unknown).await,
            Err(RuntimeError::NotFound(_))
        ),
        "creating from an unknown image did not fail as such"
    );
    // Bounded, because the fake runs processes on the host: a killed test must not leave them
    // forever.
    let waiting = "trap 'exit 3' TERM; i=0; while [ $i -lt 2000 ]; do sleep 0.02; i=$((i+1)); done";
    run(runtime, &name, waiting).await?;
    assert!(
        matches!(
            runtime.create(&spec(runtime, &name, "true").await?).await,
            Err(RuntimeError::NameInUse(_))
        ),
        "a name was taken twice"
    );
    runtime.start(&name).await?;

    let found = runtime.inspect(&name).await?;
    assert!(
        found.running && found.pid > 0 && found.name == name,
        "{found:?}"
    );
    assert_eq!(found.labels.get(LABEL), Some(&name));
    assert!(
        fs_err::metadata(format!("/proc/{}", found.pid)).is_ok(),
        "the process is not on this host"
    );
    let listed = runtime.list(LABEL, &name).await?;
    assert_eq!(
        listed
            .iter()
            .map(|container| container.name.as_str())
            .collect::<Vec<_>>(),
        [name.as_str()],
        "the list by label differs"
    );
    assert!(runtime.list(LABEL, "other").await?.is_empty());

    let ran = exec(
        runtime,
        &name,
        "echo out; echo err >&2; echo $COLOUR; pwd; exit 7",
        None,
    )
    .await?;
    assert_eq!(
        (ran.stdout.as_slice(), ran.stderr.as_slice(), ran.code),
        (
            b"out\nblue\n/tmp\n".as_slice(),
            b"err\n".as_slice(),
            Some(7)
        ),
        "exec has other streams, env, cwd or exit code"
    );
    let big = vec![b'x'; 300_000];
    let ran = exec(runtime, &name, "wc -c", Some(&big)).await?;
    assert_eq!(
        String::from_utf8_lossy(&ran.stdout).trim(),
        "300000",
        "exec did not read its input to the end"
    );
    let missing = ExecSpec {
        argv: vec!["/no/such/program".to_owned()],
        cwd: "/".to_owned(),
        ..ExecSpec::default()
    };
    let outcome = match runtime.exec(&name, &missing).await {
        Err(_) => true,
        Ok(mut started) => {
            while started.output.next().await.is_some() {}
            !matches!(runtime.exec_state(&started.id).await?.exit_code, Some(0))
        }
    };
    assert!(outcome, "a missing command did not fail");
    assert!(
        matches!(
            runtime.exec_state("nothing").await,
            Err(RuntimeError::NotFound(_))
        ),
        "an unknown exec was found"
    );

    runtime.kill(&name, "TERM").await?;
    eventually(
        "TERM ends the process",
        Duration::from_secs(10),
        async || Ok(!runtime.inspect(&name).await?.running),
    )
    .await?;
    assert_eq!(
        runtime.inspect(&name).await?.exit_code,
        Some(3),
        "the exit code was lost"
    );
    assert!(
        runtime.exec(&name, &missing).await.is_err(),
        "a command ran in a stopped container"
    );
    runtime.remove(&name).await?;
    assert!(
        matches!(runtime.inspect(&name).await, Err(RuntimeError::NotFound(_))),
        "a removed container still exists"
    );
    runtime.remove(&name).await?;

    // A process that ignores TERM is removed too, at once.
    run(
        runtime,
        &name,
        "trap '' TERM; i=0; while [ $i -lt 2000 ]; do sleep 0.02; i=$((i+1)); done",
    )
    .await?;
    let pid = runtime.inspect(&name).await?.pid;
    runtime.remove(&name).await?;
    assert!(
        fs_err::metadata(format!("/proc/{pid}")).is_err(),
        "the container's process still exists"
    );
    assert!(matches!(
        runtime.inspect("nothing").await,
        Err(RuntimeError::NotFound(_))
    ));
    assert!(matches!(
        runtime.start("nothing").await,
        Err(RuntimeError::NotFound(_))
    ));
    runtime.close().await;
    Ok(())
}

on_every_runtime!(
    every_runtime_fulfils_the_runtime_contract,
    every_runtime_gives_a_resizable_terminal
);

// proves: REQ-SANDBX-0104
// invariant: api-boundaries
async fn every_runtime_fulfils_the_runtime_contract(world: World) -> Result<()> {
    hold_the_contract(runtime(&world)).await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: api-boundaries
async fn the_fake_runtime_fulfils_the_runtime_contract() -> Result<()> {
    hold_the_contract(fake()).await
}

// part of: CYNAI.SANDBX.LongRunningSession
async fn every_runtime_gives_a_resizable_terminal(world: World) -> Result<()> {
    // The call may return before the terminal has its new size.
    const SCRIPT: &str = "test -t 0 && echo tty; read line; i=0; while [ \"$(stty size)\" != '37 \
                          101' ] && [ $i -lt 2000 ]; do i=$((i+1)); done; stty size; exit 6";
    let runtime = runtime(&world);
    run(runtime.as_ref(), "terminal", "while :; do sleep 1; done").await?;
    let spec = ExecSpec {
        argv: ["/bin/sh", "-c", SCRIPT].map(str::to_owned).to_vec(),
        env: vec![("PATH".to_owned(), "/bin".to_owned())],
        cwd: "/".to_owned(),
        stdin: true,
        tty: Some((80, 24)),
    };
    let mut started = runtime.exec("terminal", &spec).await?;
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains("tty") {
        text.extend_from_slice(&started.output.next().await.expect("output")?.1);
    }
    runtime.exec_resize(&started.id, 101, 37).await?;
    started.input.write_all(b"go\n").await?;
    while let Some(Ok((_, data))) = started.output.next().await {
        text.extend_from_slice(&data);
    }
    assert!(
        String::from_utf8_lossy(&text).contains("37 101"),
        "{}",
        String::from_utf8_lossy(&text)
    );
    eventually(
        "the exit code is known",
        Duration::from_secs(5),
        async || Ok(runtime.exec_state(&started.id).await?.exit_code == Some(6)),
    )
    .await?;
    runtime.remove("terminal").await?;
    runtime.close().await;
    Ok(())
}

#[tokio::test]
async fn the_fake_runtime_fails_on_request() -> Result<()> {
    let fake = Fake::new([(IMAGE.to_owned(), FakeImage::default())]);
    fake.inject(Fault::Refuse("image"));
    assert!(matches!(
        fake.image(IMAGE).await,
        Err(RuntimeError::Refused { call: "image", .. })
    ));
    fake.inject(Fault::Hang("remove"));
    assert!(fake.image(IMAGE).await.is_ok());
    assert!(matches!(
        fake.remove("x").await,
        Err(RuntimeError::Timeout { call: "remove", .. })
    ));
    assert!(fake.remove("x").await.is_ok());
    Ok(())
}

#[tokio::test]
async fn a_closed_runtime_is_not_restarted_by_later_calls() -> Result<()> {
    let world = World::new()?;
    let runtime = podman(&world);
    runtime.ping().await?;
    runtime.close().await;
    assert!(matches!(
        runtime.ping().await,
        Err(RuntimeError::Unavailable(_))
    ));
    world.assert_clean().await
}

//! The OpenAPI documents against real responses: schemathesis sends valid and invalid requests and
//! checks that the document promises each response.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{Options, Random, World, repository};
use serde_json::{Value, json};

use super::cluster::{Cluster, session, text};

/// The same requests in each run.
const SEED: u64 = 20_260_101;

/// The extent of a run.
struct Effort {
    seed: u64,
    examples: u32,
    limit: Duration,
}

const DEFAULT_EFFORT: Effort = Effort {
    seed: SEED,
    examples: 10,
    limit: Duration::from_secs(240),
};

fn program() -> Result<PathBuf> {
    let program = repository().join("target/schemathesis/bin/schemathesis");
    ensure!(
        program.is_file(),
        "schemathesis is not installed; 'scripts/setup test' installs it"
    );
    Ok(program)
}

/// Hooks: an archive is bytes.
const HOOKS: &str = "import schemathesis\nschemathesis.serializer.alias('application/x-tar', \
                     'application/octet-stream')\n";

/// The document without `default` responses: only listed statuses count. Watches are left out,
/// because an accepted one lasts an hour.
fn strict(mut document: Value) -> Value {
    if let Some(paths) = document["paths"].as_object_mut() {
        paths.retain(|path, _| !path.ends_with("files:watch"));
    }
    for operation in document["paths"]
        .as_object_mut()
        .into_iter()
        .flatten()
        .flat_map(|(_, operations)| operations.as_object_mut().into_iter().flatten())
    {
        operation.1["responses"]
            .as_object_mut()
            .map(|responses| responses.remove("default"));
    }
    document
}

/// Settings by route: real ids often enough that something is found, few examples where each
/// creates a container.
fn settings(effort: &Effort, ids: &Value, spare: &str, costly: &[&str]) -> String {
    let few = (effort.examples / 4).max(1);
    let mut lines = vec![
        "hooks = \"hooks.py\"".to_owned(),
        "[generation]\nallow-x00 = true".to_owned(),
    ];
    // Every refusal of a request counts, also that a session has ended.
    lines.push("[checks.negative_data_rejection]\nexpected-statuses = [\"4xx\"]".to_owned());
    lines.push(format!("[dictionaries.spare]\nvalues = [{spare:?}]"));
    let ids = || ids.as_object().into_iter().flatten();
    lines.extend(ids().map(|(name, values)| format!("[dictionaries.{name}]\nvalues = {values}")));
    lines.push("[parameters]".to_owned());
    lines.extend(ids().map(|(name, _)| {
        format!("\"path.{name}\" = {{ dictionary = \"{name}\", probability = 0.7 }}")
    }));
    // Calls that end a session, or shorten its life, use a separate one, so that the others
    // survive.
    for operation in ["sessions_end", "sessions_patch"] {
        lines.push(format!(
            "[[operations]]\ninclude-operation-id = {operation:?}\n[operations.parameters]"
        ));
        lines.push("\"path.id\" = { dictionary = \"spare\", probability = 0.7 }".to_owned());
    }
    lines.extend(costly.iter().map(|operation| {
        format!(
            "[[operations]]\ninclude-operation-id = \
             {operation:?}\n[operations.generation]\nmax-examples = {few}"
        )
    }));
    lines.join("\n")
}

/// Runs schemathesis; a failure contains its output.
async fn run_schemathesis(
    world: &World,
    document: Value,
    (url, token): (&str, &str),
    settings: &str,
    effort: &Effort,
) -> Result<()> {
    let directory = world.directory().join("schemathesis");
    fs_err::create_dir_all(&directory)?;
    fs_err::write(directory.join("openapi.json"), strict(document).to_string())?;
    fs_err::write(directory.join("schemathesis.toml"), settings)?;
    fs_err::write(directory.join("hooks.py"), HOOKS)?;
    let mut command = Command::new(program()?);
    command
        .arg("--config-file")
        .arg(directory.join("schemathesis.toml"))
        .arg("run")
        .arg(directory.join("openapi.json"))
        .args(["--url", url]);
    command
        .arg("--header")
        .arg(format!("Authorization: Bearer {token}"));
    command.args(["--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection"]);
    command.args([
        "--phases",
        "examples,coverage,fuzzing",
        "--suppress-health-check",
        "all",
        "--generation-database",
        "none",
        "--warnings",
        "off",
        "--no-color",
    ]);
    command
        .arg(format!("--seed={}", effort.seed))
        .arg(format!("--max-examples={}", effort.examples))
        .args(["--request-timeout", "100", "--continue-on-failure"]);
    command
        .current_dir(&directory)
        .env("HOME", &directory)
        .env("NO_PROXY", "*")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped());
    #[expect(clippy::print_stdout, reason = "the seed repeats a failed run")]
    {
        println!("schemathesis: CYNODE_SEED={}", effort.seed);
    }
    let child = tokio::process::Command::from(command)
        .kill_on_drop(true)
        .spawn()?;
    let output = tokio::time::timeout(effort.limit, child.wait_with_output())
        .await
        .context("timed out")??;
    let report = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let end = report
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect::<Vec<_>>()
        .join("\n");
    ensure!(
        output.status.success(),
        "responses violate the description (seed {}):\n{end}",
        effort.seed
    );
    let tried = end
        .lines()
        .find(|line| line.contains(" generated"))
        .and_then(|line| {
            line.split_whitespace()
                .next()?
                .replace(',', "")
                .parse::<u32>()
                .ok()
        });
    let tried = tried.with_context(|| format!("no summary in the output:\n{end}"))?;
    ensure!(
        tried > effort.examples * 20,
        "only {tried} requests were made:\n{end}"
    );
    #[expect(clippy::print_stdout, reason = "the summary of a long run")]
    {
        println!("soak: schemathesis, seed {}: {tried} requests", effort.seed);
    }
    Ok(())
}

async fn user_api(effort: &Effort) -> Result<()> {
    let cluster = Cluster::start().await?;
    // A separate token: revoking it must not affect ours.
    let admin = cluster.orchestrator.token()?;
    let token = text(
        &cluster
            .make(&admin, "/v1/tokens", &json!({"kind": "user"}))
            .await?["token"],
    )?;
    let mut ids = json!({
        "id": [],
        "exec_id": [],
        "task_id": [],
        "key": ["some.key", "sandbox.default_image"],
        "path": ["a", "a/b"]
    });
    let mut found =
        |name: &str, id: &Value| ids[name].as_array_mut().map(|ids| ids.push(id.clone()));
    let project = cluster
        .make(&admin, "/v1/projects", &json!({"name": "p"}))
        .await?;
    let task = cluster
        .make(
            &admin,
            "/v1/tasks",
            &json!({"name": "t", "project_id": project["id"]}),
        )
        .await?;
    let made = cluster.session(&admin, &session()).await?;
    let exec = json!({"argv": ["sh", "-c", "echo x > a; echo y"], "timeout_ms": 10_000});
    let exec = cluster
        .make(&admin, &format!("/v1/sessions/{made}/exec"), &exec)
        .await?;
    let job = cluster
        .make(&admin, "/v1/jobs", &json!({"command": ["echo", "x"]}))
        .await?;
    let (user, _) = cluster.user("ann").await?;
    let group = cluster
        .make(
            &admin,
            "/v1/groups",
            &json!({"name": "g", "members": ["ann"]}),
        )
        .await?;
    for id in [
        &project["id"],
        &task["id"],
        &json!(made),
        &job["job_id"],
        &json!(user),
        &group["id"],
    ] {
        found("id", id);
    }
    found("task_id", &task["id"]);
    found("exec_id", &exec["exec_id"]);
    let spare = cluster.session(&admin, &session()).await?;
    let costly = [
        "sessions_create",
        "jobs_create",
        "sessions_resume",
        "sessions_exec",
    ];
    run_schemathesis(
        &cluster.control_plane.world,
        cynode_orchestrator::openapi(),
        (&cluster.orchestrator.url()?, &token),
        &settings(effort, &ids, &spare, &costly),
        effort,
    )
    .await?;
    // Whatever it did, everything still exists.
    cluster.orchestrator.wait_until_ready().await?;
    cluster.worker.wait_until_ready().await
}

async fn worker_api(effort: &Effort) -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let made = client.create_session(&cynode_tests::session()).await?;
    let exec = client
        .exec(made.session_id, &cynode_tests::sh("echo x > a; echo y"))
        .await?;
    let job = client.run_job(&cynode_tests::job("echo x")).await?;
    let ids = json!({"id": [made.session_id], "exec_id": [exec.exec_id], "job_id": [job.job_id]});
    let mut document = cynode_worker::openapi();
    // This call would end the test.
    document["paths"]
        .as_object_mut()
        .map(|paths| paths.remove("/v1/worker/shutdown"));
    let spare = client
        .create_session(&cynode_tests::session())
        .await?
        .session_id
        .to_string();
    let costly = [
        "sessions_create",
        "jobs_run",
        "sessions_resume",
        "execs_start",
    ];
    run_schemathesis(
        &world,
        document,
        (&worker.url()?, &worker.token()?),
        &settings(effort, &ids, &spare, &costly),
        effort,
    )
    .await?;
    worker.wait_until_ready().await
}

#[tokio::test]
// invariant: api-boundaries
async fn the_user_api_answers_as_it_is_described() -> Result<()> {
    user_api(&DEFAULT_EFFORT).await
}

#[tokio::test]
async fn the_worker_api_answers_as_it_is_described() -> Result<()> {
    worker_api(&DEFAULT_EFFORT).await
}

fn long() -> Effort {
    Effort {
        seed: Random::seeded().seed(),
        examples: 100,
        limit: Duration::from_secs(1_800),
    }
}

#[tokio::test]
async fn soak_the_user_api_answers_as_it_is_described() -> Result<()> {
    user_api(&long()).await
}

#[tokio::test]
async fn soak_the_worker_api_answers_as_it_is_described() -> Result<()> {
    worker_api(&long()).await
}

//! Jobs with a specification through the user API and the command line, on a real node.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, Job, JobCreate, JobId, JobState, LimitsRequest, NodeState, PreferenceScope,
    WorkspaceRef, sba::JobSpec,
};
use cynode_client::UserClient;
use cynode_tests::{
    Answer, UNLABELLED, eventually, run_step, specification, step, wait_until_settled, whole_trail,
    with,
};
use http::Method;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::cluster::{Cluster, text};
use crate::{
    cli::{CommandResult, cynode, run},
    sba::{Ended, TIMEOUT},
};

/// Changes a request.
type Change<'a> = &'a dyn Fn(&mut Value);

/// A request for a specification, for a task that exists.
fn request(task: &str, steps: &[Value]) -> Result<JobCreate> {
    let spec = with(specification(steps), "task_id", task);
    Ok(JobCreate {
        job: Some(Box::new(JobSpec::from_value(spec)?)),
        limits: Some(LimitsRequest {
            memory_bytes: Some(64 << 20),
            disk_bytes: Some(32 << 20),
            ..Default::default()
        }),
        ..Default::default()
    })
}

pub(super) async fn task(cluster: &Cluster, body: &Value) -> Result<String> {
    let admin = cluster.orchestrator.token()?;
    text(&cluster.make(&admin, "/v1/tasks", body).await?["id"])
}

pub(super) async fn ended(client: &UserClient, id: JobId) -> Result<Job> {
    eventually("the job ends", TIMEOUT, async || {
        Ok(client.job(id).await?.state.is_final())
    })
    .await?;
    Ok(client.job(id).await?)
}

async fn run_to_end(client: &UserClient, request: &JobCreate) -> Result<Ended> {
    let id = client.create_job(request).await?.job_id;
    Ended::of(ended(client, id).await?)
}

/// Reads an artifact of a task.
pub(super) async fn artifact(cluster: &Cluster, task: &str, path: &str) -> Result<Vec<u8>> {
    let path = format!("/v1/tasks/{task}/artifacts/{}", path.replace(' ', "%20"));
    let answer = Answer::of(cluster.request(Method::GET, &path)?).await?;
    ensure!(answer.status == 200, "{path}: {answer:?}");
    Ok(answer.body.to_vec())
}

pub(super) async fn nothing_is_left_on_the_node(cluster: &Cluster) -> Result<()> {
    let worker = cluster.control_plane.world.state_dir().join("worker");
    eventually("the sandbox and its disk are gone", TIMEOUT, async || {
        let workspaces = fs_err::read_dir(worker.join("workspaces"))?.count();
        let jobs = fs_err::read_dir(worker.join("jobs"))?;
        let kept = jobs.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().is_dir()));
        let containers = cluster.control_plane.world.containers()?;
        Ok(workspaces == 0 && kept.count() == 0 && containers.is_empty())
    })
    .await
}

// proves: REQ-SANDBX-0110, REQ-SANDBX-0114,
// CYNAI.SANDBX.ArtifactsDataExchange with a_sandbox_does_not_reach_the_database,
// REQ-SANDBX-0001 with no_secret_enters_through_any_channel_or_is_stored_anywhere and
// the_systems_own_keys_and_tokens_are_kept_out and
// commands_see_their_task_and_session_and_nothing_of_the_host and
// a_sandbox_has_loopback_and_no_other_way_out and
// a_shell_is_a_terminal_that_can_be_resized_and_ends_with_its_own_code and
// every_runtime_fulfils_the_runtime_contract and a_sandbox_does_not_reach_the_database
// part of: CYNAI.SBAGNT.ResultAndArtifactDelivery, CYNAI.SBAGNT.JobLifecycle
// invariant: jobs
#[tokio::test]
async fn an_artifact_uploaded_from_inside_is_read_after_its_sandbox_is_gone() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let task = task(&cluster, &json!({"name": "exchange"})).await?;
    let first = request(
        &task,
        &[
            run_step("echo lost > lost; mkdir -p $CYNODE_ARTIFACTS_DIR/out && echo kept > kept"),
            run_step(
                "tar -cf $CYNODE_ARTIFACTS_DIR/out/files.tar kept; head -c 3000000 \
                      /dev/urandom > $CYNODE_ARTIFACTS_DIR/random; \
                      sha256sum < $CYNODE_ARTIFACTS_DIR/random",
            ),
        ],
    )?;
    let done = run_to_end(&client, &first).await?.success()?;
    let id = done.job.job_id;
    nothing_is_left_on_the_node(&cluster).await?;

    let listed: Vec<String> = done
        .job
        .artifacts
        .iter()
        .map(|entry| text(&entry["path"]))
        .collect::<Result<_>>()?;
    assert_eq!(
        listed,
        [
            format!("jobs/{id}/out/files.tar"),
            format!("jobs/{id}/random")
        ]
    );
    let random = artifact(&cluster, &task, &format!("jobs/{id}/random")).await?;
    let hash = hex::encode(Sha256::digest(&random));
    assert_eq!(done.job.artifacts[1]["sha256"], hash.as_str());
    assert_eq!(done.stdout(1)?, format!("{hash}  -\n"));
    assert_eq!(done.result.artifacts.len(), 2);
    assert_eq!(
        done.result.artifacts[1].sha256.as_deref(),
        Some(hash.as_str())
    );

    // Nothing of the workspace comes back, except what was uploaded and is named.
    let look = || request(&task, &[run_step("ls")]);
    let empty = run_to_end(&client, &look()?).await?.success()?;
    assert_eq!(empty.stdout(0)?, "");
    let mut again = look()?;
    let uploaded = text(&done.job.artifacts[0]["artifact_id"])?;
    again.workspace_ref = Some(WorkspaceRef::Artifact(uploaded.parse()?));
    let again = run_to_end(&client, &again).await?.success()?;
    assert_eq!(again.stdout(0)?, "kept\n");
    Ok(())
}

// part of: CYNAI.SBAGNT.JobContext, CYNAI.SBAGNT.WorkerApiIntegration
#[tokio::test]
async fn the_context_of_a_job_is_completed_from_its_project_task_and_preferences() -> Result<()> {
    let cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let client = cluster.orchestrator.client()?;
    let project = cluster
        .make(
            &admin,
            "/v1/projects",
            &json!({"name": "Rockets", "slug": "rockets"}),
        )
        .await?;
    let project = text(&project["id"])?;
    let task = task(
        &cluster,
        &json!({
            "name": "fix the valve", "project_id": project,
            "requirements": ["no leaks"], "acceptance_criteria": ["pressure holds"],
        }),
    )
    .await?;
    let additional = "agents.sandbox_agent.additional_context";
    for (scope, id, key, value) in [
        (
            PreferenceScope::System,
            "system",
            additional,
            "from the system",
        ),
        (PreferenceScope::System, "system", "style.indent", "2"),
        (
            PreferenceScope::Project,
            project.as_str(),
            additional,
            "from the project",
        ),
        (
            PreferenceScope::Project,
            project.as_str(),
            "style.indent",
            "4",
        ),
        (PreferenceScope::System, "system", "style.quotes", "single"),
    ] {
        client.put_preference(scope, id, key, json!(value)).await?;
    }
    let show = [
        run_step("cat /job/job.json"),
        run_step("cd /job/context; grep -r . . | sort"),
    ];
    let mut bare = request(&task, &show)?;
    let done = run_to_end(&client, &bare).await?.success()?;
    let found: Value = serde_json::from_str(done.stdout(0)?)?;
    let context = &found["context"];
    for (name, texts) in [
        (
            "project_context",
            vec!["Rockets", "rockets", project.as_str()],
        ),
        (
            "task_context",
            vec!["fix the valve", task.as_str(), "pressure holds"],
        ),
    ] {
        let shown = text(&context[name])?;
        assert!(
            texts.iter().all(|text| shown.contains(text)),
            "{name}: {shown}"
        );
    }
    assert_eq!(context["requirements"], json!(["no leaks"]));
    assert_eq!(context["acceptance_criteria"], json!(["pressure holds"]));
    assert_eq!(
        context["preferences"],
        json!({"style.indent": "4", "style.quotes": "single"})
    );
    assert_eq!(context["additional_context"], "from the project");
    for line in [
        "./additional.md:from the project",
        "./requirements.md:- no leaks",
        "./acceptance_criteria.md:- pressure holds",
    ] {
        assert!(
            done.stdout(1)?.lines().any(|found| found == line),
            "{line}: {done:?}"
        );
    }
    // The ids inside are those outside.
    assert_eq!(
        (&found["job_id"], &found["task_id"]),
        (&json!(done.job.job_id), &json!(task))
    );

    // The task's preference comes first, and what the job says itself is kept.
    let scope = PreferenceScope::Task;
    client
        .put_preference(scope, &task, additional, json!("from the task"))
        .await?;
    let spec = bare.job.as_mut().context("a job")?;
    let mut own = serde_json::to_value(&**spec)?;
    own["job_id"] = json!(JobId::generate());
    own["context"] = json!({
        "requirements": ["of the job"], "skills": [{"name": "weld", "content": "slowly"}],
        "preferences": {"style.indent": 8},
    });
    **spec = JobSpec::from_value(own)?;
    let done = run_to_end(&client, &bare).await?.success()?;
    let found: Value = serde_json::from_str(done.stdout(0)?)?;
    let context = &found["context"];
    assert_eq!(context["additional_context"], "from the task");
    assert_eq!(context["requirements"], json!(["of the job"]));
    assert_eq!(context["preferences"], json!({"style.indent": 8}));
    assert!(
        done.stdout(1)?.contains("./skills/1-weld.md:slowly"),
        "{done:?}"
    );
    Ok(())
}

// proves: REQ-SANDBX-0124 with only_marked_images_are_accepted_and_their_config_is_ignored and
// a_plain_command_runs_on_an_image_that_is_not_marked_for_sessions and
// a_rule_restricts_plain_commands_to_agent_compatible_images
// part of: CYNAI.SBAGNT.SchemaValidation
#[tokio::test]
async fn a_job_that_can_not_be_run_is_refused_with_every_reason() -> Result<()> {
    let cluster = Cluster::start().await?;
    let task = task(&cluster, &json!({"name": "refused"})).await?;
    let submit = async |change: &dyn Fn(&mut Value)| {
        let spec = with(specification(&[run_step("true")]), "task_id", task.as_str());
        let mut body = json!({ "job": spec });
        change(&mut body);
        Answer::of(cluster.request(Method::POST, "/v1/jobs")?.json(&body)).await
    };
    let places = |problem: &cynode_api::Problem| -> Vec<String> {
        let listed = problem
            .extensions
            .get("violations")
            .and_then(Value::as_array);
        listed
            .into_iter()
            .flatten()
            .map(|violation| violation["path"].as_str().unwrap_or_default().to_owned())
            .collect()
    };
    let other = self::task(&cluster, &json!({"name": "another"})).await?;
    let other_job = JobId::generate();
    let cases: [(Change<'_>, &[&str]); 4] = [
        (
            &|body| {
                body["job"]["steps"][0]["args"]["argv"] = json!([]);
                body["job"]["steps"][0]["retries"] = json!(3);
            },
            &["job.steps[0].args.argv", "job.steps[0].retries"],
        ),
        (&|body| body["job_id"] = json!(other_job), &["job.job_id"]),
        (&|body| body["task_id"] = json!(other), &["job.task_id"]),
        (
            &|body| body["timeout_seconds"] = json!(1),
            &["timeout_seconds"],
        ),
    ];
    for (change, expected) in cases {
        let problem = submit(change).await?.problem()?;
        assert_eq!(
            (problem.status, problem.code.as_str()),
            (400, "invalid_request")
        );
        let mut found = places(&problem);
        found.sort();
        assert_eq!(found, expected, "{problem:?}");
    }
    let skilled = submit(&|body| body["job"]["context"] = json!({"skill_ids": ["a"]})).await?;
    assert_eq!(skilled.outcome(), (503, "unavailable".to_owned()));

    // A specification needs an image for agents; a plain command does not.
    let admin = cluster.orchestrator.token()?;
    let image = cluster
        .make(
            &admin,
            "/v1/images",
            &json!({"image_ref": UNLABELLED, "is_allowed": true}),
        )
        .await;
    image.context("adding an image")?;
    let refused = submit(&|body| body["image_ref"] = json!(UNLABELLED)).await?;
    assert_eq!(
        refused.outcome().1,
        ErrorCode::ImageNotCompatible.as_str(),
        "{refused:?}"
    );
    Ok(())
}

// part of: ISC-22, REQ-SANDBX-0120
#[tokio::test]
async fn the_trail_has_what_a_job_is_and_the_hash_of_its_result_but_no_content() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let task = task(&cluster, &json!({"name": "audited"})).await?;
    let secret = "swordfish-and-chips";
    let done = run_to_end(
        &client,
        &request(
            &task,
            &[
                step("write_file", &json!({"path": "a", "content": secret})),
                run_step(&format!("cat a; echo {secret} >&2; exit 4")),
            ],
        )?,
    )
    .await?;
    let result = done.job.sba_result.context("a result")?;
    wait_until_settled(&client, TIMEOUT).await?;
    let records: Vec<Value> = whole_trail(&client)
        .await?
        .into_iter()
        .map(serde_json::to_value)
        .collect::<Result<_, _>>()?;
    let id = json!(done.job.job_id);
    let of_job: Vec<&Value> = records
        .iter()
        .filter(|record| record.to_string().contains(id.as_str().unwrap_or_default()))
        .collect();
    let submitted = of_job
        .iter()
        .find(|record| record["detail"]["job"].is_object());
    let described = &submitted.context("a record of the submission")?["detail"]["job"];
    assert_eq!(
        (&described["kind"], &described["steps"], &described["types"]),
        (
            &json!("steps"),
            &json!(2),
            &json!({"run_command": 1, "write_file": 1})
        ),
        "{described}"
    );
    let ends: Vec<&&Value> = of_job
        .iter()
        .filter(|record| record["detail"]["result_sha256"].is_string())
        .collect();
    assert_eq!(ends.len(), 1, "{of_job:#?}");
    let end = &ends[0]["detail"];
    let stored = hex::encode(Sha256::digest(result.to_string()));
    assert_eq!(end["result_sha256"], stored.as_str(), "{end}");
    assert_eq!(
        (&end["failure_code"], &end["steps"]),
        (&json!("step_failed"), &json!({"success": 1, "failure": 1}))
    );
    ensure!(
        !records
            .iter()
            .any(|record| record.to_string().contains(secret)),
        "the trail has content"
    );
    Ok(())
}

pub(super) struct Commands<'a>(pub(super) &'a Cluster);

impl Commands<'_> {
    fn command(&self) -> Result<std::process::Command> {
        let mut command = cynode(&self.0.control_plane.world)?;
        command
            .env("CYNODE_URL", self.0.orchestrator.url()?)
            .env("CYNODE_TOKEN", self.0.orchestrator.token()?);
        Ok(command)
    }

    pub(super) fn run(&self, arguments: &[&str], stdin: &[u8]) -> Result<CommandResult> {
        run(self.command()?.args(arguments), stdin)
    }
}

/// A table with what differs from run to run replaced.
fn steady(table: &str) -> String {
    let is_time = |word: &str| {
        let digits = word.trim_end_matches("ms").trim_end_matches('s');
        digits != word && digits.parse::<f64>().is_ok()
    };
    let mut lines = Vec::new();
    for line in table.lines() {
        if ["job ", "task ", "digest ", "node ", "started ", "ended "]
            .iter()
            .any(|name| line.starts_with(name))
        {
            continue;
        }
        let words = line.split_whitespace();
        let words = words.map(|word| if is_time(word) { "TIME" } else { word });
        lines.push(words.collect::<Vec<_>>().join(" "));
    }
    lines.join("\n")
}

// part of: CYNAI.SBAGNT.JobLifecycle
#[tokio::test]
async fn a_job_file_is_run_followed_and_shown_as_a_timeline() -> Result<()> {
    let cluster = Cluster::start().await?;
    let commands = Commands(&cluster);
    let mut file = specification(&[
        with(
            step("write_file", &json!({"path": "a", "content": "one\n"})),
            "id",
            "write",
        ),
        step(
            "apply_unified_diff",
            &json!({"diff": "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-one\n+two\n"}),
        ),
        run_step("echo working; echo note > /job/artifacts/note.txt"),
        with(
            run_step("head -c 2048 /dev/zero | tr '\\0' x; sleep 1.2; exit 3"),
            "id",
            "test",
        ),
        run_step("true"),
    ]);
    // Ids that a file leaves out are made up.
    for name in ["job_id", "task_id"] {
        file.as_object_mut().context("an object")?.remove(name);
    }
    let path = cluster.control_plane.world.directory().join("job.json");
    fs_err::write(&path, file.to_string())?;
    let path = path.display().to_string();
    let ran = commands.run(&["job", "run", &path], b"")?;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.text().starts_with("working\nxxx"), "{ran:?}");
    assert!(
        ran.stderr.contains("the job failed: step_failed: step 4"),
        "{ran:?}"
    );
    let client = cluster.orchestrator.client()?;
    let job = client.jobs(None, None).await?.pop().context("a job")?;
    let id = job.job_id.to_string();

    let shown = commands.run(&["job", "show", &id], b"")?.success()?;
    assert_eq!(
        steady(&shown),
        "state failed\n\
         exit 1\n\
         error step_failed: step 4 (run_command, \"test\"): the command exited with 3\n\
         image localhost/cynode/test-busybox:latest\n\
         by admin\n\
         todo 3 of 5 done\n\
         open test: run_command head -c 2048 /dev/zero | tr '\\0' x; sleep 1.2; exit 3\n\
         open run_command true\n\
         artifact jobs/ID/note.txt (5 B)\n\
         \n\
         STEP ID TYPE STATUS TIME EXIT FILES OUTPUT\n\
         1 write write_file success TIME 1\n\
         2 apply_unified_diff success TIME 1\n\
         3 run_command success TIME 0 8 B\n\
         4 test run_command failure TIME 3 2 KiB"
            .replace("ID/note", &format!("{id}/note")),
        "{shown}"
    );
    let json = commands
        .run(&["job", "show", &id, "--output", "json"], b"")?
        .json()?;
    assert_eq!(json["sba_result"]["failure_code"], "step_failed");

    // From standard input, in JSON, and with an error in it.
    let ran = commands.run(
        &["job", "run", "-", "--output", "json"],
        file.to_string().as_bytes(),
    )?;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let printed: Value = serde_json::from_slice(&ran.stdout)?;
    assert_eq!(printed["state"], "failed");
    file["steps"][0]["args"]["contents"] = json!("");
    let refused = commands.run(&["job", "run", "-"], file.to_string().as_bytes())?;
    assert_eq!(refused.failure().0, 64, "{refused:?}");
    assert!(
        refused.stderr.contains("steps[0].args.contents"),
        "{refused:?}"
    );
    Ok(())
}

// part of: CYNAI.SBAGNT.JobLifecycle
#[tokio::test]
async fn a_running_job_is_followed_step_by_step() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let node = client.nodes().await?.pop().context("a node")?;
    assert_eq!(node.state, NodeState::Ready);
    let task = task(&cluster, &json!({"name": "followed"})).await?;
    let wait = |name: &str| run_step(&format!("while [ ! -e /tmp/{name} ]; do sleep 0.1; done"));
    let slow = run_step("sleep 3");
    let request = request(
        &task,
        &[slow.clone(), slow, with(wait("go"), "timeout_seconds", 3)],
    )?;
    let id = client.create_job(&request).await?.job_id;
    eventually("progress is visible", TIMEOUT, async || {
        let job = client.job(id).await?;
        ensure!(!job.state.is_final(), "{job:?}");
        Ok(job
            .progress
            .is_some_and(|progress| progress.steps == Some(3)))
    })
    .await?;
    let commands = Commands(&cluster);
    let shown = commands
        .run(&["job", "show", &id.to_string()], b"")?
        .success()?;
    assert!(shown.contains("of 3, run_command"), "{shown}");
    let followed = commands.run(&["job", "show", "--follow", &id.to_string()], b"")?;
    assert!(followed.text().contains("timeout"), "{followed:?}");
    assert!(
        followed.stderr.contains("cynode: step 3/3, run_command"),
        "{followed:?}"
    );
    let done = Ended::of(ended(&client, id).await?)?;
    assert_eq!(done.verdict(), (JobState::Timeout, "timeout", "worker"));
    // A stop, too, has a result.
    let request = self::request(&task, &[run_step("sleep 777")])?;
    let id = client.create_job(&request).await?.job_id;
    eventually("the job runs", TIMEOUT, async || {
        Ok(client.job(id).await?.state == JobState::InProgress)
    })
    .await?;
    client.stop_job(id).await?;
    let stopped = Ended::of(ended(&client, id).await?)?;
    assert_eq!(
        stopped.verdict(),
        (JobState::Canceled, "canceled", "worker")
    );
    Ok(())
}

//! Jobs that an agent works, with a scripted model behind a real worker.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, Job, JobCreate, JobId, JobState, LimitsRequest, PreferenceScope, TaskId,
    sba::{StepStatus, Verifier},
};
use cynode_client::UserClient;
use cynode_tests::{
    BASE, IMAGE, Options, eventually,
    models::{COMPLETION_TOKENS, ModelApi, ModelReply, ModelServer, PROMPT_TOKENS},
    whole_trail,
};
use serde_json::{Value, json};

use super::{
    cluster::{Cluster, text},
    mcp::McpAgent,
    sba_jobs::{Commands, artifact, ended, nothing_is_left_on_the_node, task},
};
use crate::sba::{
    Ended, TIMEOUT,
    restarts::{kill, runners},
};

const KEY: &str = "inference.allowed_models";
const PROMPT: &str = "make the tests pass, swordfish";

/// A cluster whose node serves the models `m` and `other`.
struct AgentCluster {
    cluster: Cluster,
    models: ModelServer,
}

impl AgentCluster {
    /// `settings` are more of `worker.inference`.
    async fn start(image: &str, api: ModelApi, settings: &str) -> Result<Self> {
        let models = ModelServer::start(api, &["m", "other"]).await?;
        let inference = format!("{{ url = {:?}{settings} }}", models.url());
        let serving = |options: Options| options.set("inference", &inference);
        let cluster = Cluster::with_options(image, serving).await?;
        let client = cluster.orchestrator.client()?;
        eventually("the node serves its models", TIMEOUT, async || {
            Ok(client.nodes().await?.iter().any(|node| {
                let inference = node.capability.inference.as_ref();
                inference.is_some_and(|inference| inference.models.len() == 2)
            }))
        })
        .await?;
        Ok(Self { cluster, models })
    }

    /// Answers of the model, and then no other ones.
    fn script(&self, replies: impl IntoIterator<Item = ModelReply>) {
        self.models.forget_replies();
        for reply in replies {
            self.models.reply(reply);
        }
    }

    async fn run(&self, client: &UserClient, request: &JobCreate) -> Result<Ended> {
        let id = client.create_job(request).await?.job_id;
        Ended::of(ended(client, id).await?)
    }
}

fn call(tool: &str, arguments: &Value) -> ModelReply {
    ModelReply::tool_call("call", tool, arguments)
}

fn run_command(argv: &[&str]) -> ModelReply {
    call("run_command", &json!({"argv": argv}))
}

fn prompt(text: &str, model: &str) -> JobCreate {
    JobCreate {
        prompt: Some(text.to_owned()),
        allowed_models: vec![model.to_owned()],
        timeout_seconds: Some(60),
        limits: Some(LimitsRequest {
            memory_bytes: Some(64 << 20),
            disk_bytes: Some(32 << 20),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Each line with one space between its words.
fn plain_lines(table: &str) -> Vec<String> {
    let lines = table.lines();
    lines
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect()
}

// proves: CYNAI.SBAGNT.TodoList with
// an_agent_repairs_a_program_until_the_jobs_check_succeeds and
// status_and_todo_list_are_in_files_while_the_job_runs_and_after_it and
// progress_is_visible_while_a_job_runs_and_gone_after_it
// part of: CYNAI.SBAGNT.JobContext, REQ-SANDBX-0106, CYNAI.SANDBX.NodeLocalInference
// invariant: jobs
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_repairs_a_directory_and_leaves_its_patch_and_transcript() -> Result<()> {
    let agents = AgentCluster::start(BASE, ModelApi::Openai, "").await?;
    let cluster = &agents.cluster;
    let client = cluster.orchestrator.client()?;
    let admin = cluster.orchestrator.token()?;
    let project = cluster.control_plane.world.directory().join("project");
    fs_err::create_dir(&project)?;
    fs_err::write(project.join("add.sh"), "echo $(($1 - $2))\n")?;
    fs_err::write(
        project.join("test.sh"),
        "got=$(sh add.sh 2 3)\n[ \"$got\" = 5 ] || { echo got $got; exit 1; }\n",
    )?;
    let task = task(
        cluster,
        &json!({"name": "repair", "acceptance_criteria": ["The code is clean"]}),
    )
    .await?;
    let diff = "--- a/add.sh\n+++ b/add.sh\n@@ -1 +1 @@\n-echo $(($1 - $2))\n+echo $(($1 + $2))\n";
    let words = ["It ", "is ", "done."].map(str::to_owned);
    let claim = json!({"index": 0, "is_met": true, "detail": "I read it"});
    agents.script([
        // Slow enough to be seen at work, and not true: the check says so.
        ModelReply::Slow(words.to_vec(), Duration::from_secs(2)),
        run_command(&["sh", "test.sh"]),
        call("todo_add", &json!({"title": "Add instead of subtracting"})),
        call("apply_unified_diff", &json!({"diff": diff})),
        run_command(&["sh", "test.sh"]),
        call(
            "finish",
            &json!({"summary": "It adds now.", "criteria": [claim]}),
        ),
    ]);
    let patch = cluster.control_plane.world.directory().join("patch");
    let (brought, patch_file) = (project.display().to_string(), patch.display().to_string());
    let commands = Commands(cluster);
    #[rustfmt::skip]
    let ran = commands.run(
        &["job", "run", "--agent", "--image", BASE, "--model", "m", "--check", "sh test.sh", "--workspace",
          &brought, "--task", &task, "--timeout", "2m", "--patch", &patch_file, PROMPT],
        b"",
    )?;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for line in [
        "cynode: 1 files changed, 1 lines added, 1 removed",
        "cynode:   modify add.sh (+1 -1)",
        "cynode: the transcript is the artifact ",
    ] {
        assert!(ran.stderr.contains(line), "{line}: {ran:?}");
    }
    // The directory is as it was, and the patch is outside of it.
    let original = fs_err::read_to_string(project.join("add.sh"))?;
    assert_eq!(original, "echo $(($1 - $2))\n");
    let patch = fs_err::read_to_string(patch)?;
    assert!(patch.contains("+echo $(($1 + $2))"), "{patch}");

    let job = client.jobs(None, None).await?.pop().context("a job")?;
    let done = Ended::of(client.job(job.job_id).await?)?.success()?;
    let steps: Vec<(&str, StepStatus)> = done
        .result
        .steps
        .iter()
        .map(|step| (step.kind.as_str(), step.status))
        .collect();
    assert_eq!(
        steps,
        [
            ("run_command", StepStatus::Failure),
            ("apply_unified_diff", StepStatus::Success),
            ("run_command", StepStatus::Success),
        ]
    );
    let criteria = done.result.criteria.iter();
    assert_eq!(
        criteria
            .map(|criterion| (criterion.is_met, criterion.verified_by))
            .collect::<Vec<_>>(),
        [(true, Verifier::Model), (true, Verifier::Job)]
    );
    let todo = done.result.todo.as_ref().context("a summary")?;
    let added = "Add instead of subtracting";
    ensure!(todo.open.iter().any(|title| title == added), "{todo:?}");
    let usage = done.result.usage.as_ref().context("usage")?;
    assert_eq!(
        (
            usage.model.as_str(),
            usage.requests,
            usage.prompt_tokens,
            usage.completion_tokens
        ),
        ("m", 6, 6 * PROMPT_TOKENS, 6 * COMPLETION_TOKENS)
    );
    assert!(usage.duration_ms >= 6_000, "{usage:?}");
    for request in agents.models.computations() {
        let system = request.body["messages"][0]["content"].as_str();
        let system = system.unwrap_or_default();
        assert!(
            request.body["model"] == "m"
                && system.contains(PROMPT)
                && system.contains("The code is clean"),
            "{request:?}"
        );
    }

    nothing_is_left_on_the_node(cluster).await?;
    the_artifacts_are_kept(cluster, &task, &done.job, &patch).await?;
    the_trail_has_every_call_and_no_content(&client, &done.job).await?;
    the_job_is_shown(&commands, &done.job)?;
    agents_learn_of_the_progress(cluster, &admin, &task, &done.job).await
}

async fn the_artifacts_are_kept(
    cluster: &Cluster,
    task: &str,
    job: &Job,
    patch: &str,
) -> Result<()> {
    let kept = async |name: &str| {
        let path = format!("jobs/{}/{name}", job.job_id);
        anyhow::Ok(String::from_utf8(artifact(cluster, task, &path).await?)?)
    };
    assert_eq!(kept("changes.patch").await?, patch);
    let transcript = kept("transcript.jsonl").await?;
    let entries: Vec<Value> = transcript
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let kinds: Vec<&str> = entries
        .iter()
        .filter_map(|entry| entry["type"].as_str())
        .collect();
    assert_eq!(kinds.first(), Some(&"context"), "{kinds:?}");
    assert_eq!(kinds.last(), Some(&"end"), "{kinds:?}");
    let count = |kind: &str| kinds.iter().filter(|found| **found == kind).count();
    assert_eq!((count("answer"), count("finish")), (6, 2), "{transcript}");
    assert!(
        entries[0]["text"]
            .as_str()
            .is_some_and(|text| text.contains(PROMPT))
    );
    Ok(())
}

async fn the_trail_has_every_call_and_no_content(client: &UserClient, job: &Job) -> Result<()> {
    let id = job.job_id.to_string();
    let mut records = Vec::new();
    eventually("the node's records have arrived", TIMEOUT, async || {
        records = whole_trail(client)
            .await?
            .into_iter()
            .map(serde_json::to_value)
            .collect::<Result<Vec<Value>, _>>()?;
        let is_end = |record: &&Value| record["action"] == "model.ended";
        Ok(records.iter().filter(is_end).count() == 6)
    })
    .await?;
    let calls: Vec<&Value> = records
        .iter()
        .filter(|record| record["action"] == "model.call")
        .collect();
    assert_eq!(calls.len(), 6, "{calls:#?}");
    for call in calls {
        assert_eq!(call["detail"]["model"], "m", "{call}");
        assert_eq!(call["job_id"], id.as_str(), "{call}");
        let end = records.iter().find(|record| {
            record["action"] == "model.ended" && record["detail"]["call"] == call["detail"]["call"]
        });
        let end = &end.context("an end")?["detail"];
        assert_eq!(
            (&end["prompt_tokens"], &end["completion_tokens"]),
            (&json!(PROMPT_TOKENS), &json!(COMPLETION_TOKENS))
        );
        assert!(end["duration_ms"].is_u64(), "{end}");
    }
    let submitted = records
        .iter()
        .find(|record| record["detail"]["prompt"].is_object())
        .context("a record of the submission")?;
    let described = &submitted["detail"];
    assert_eq!(
        (&described["prompt"]["checks"], &described["programs"]),
        (&json!(1), &json!(["sh"])),
        "{submitted}"
    );
    for content in ["swordfish", "It adds now", "subtracting", "test.sh"] {
        let found = records
            .iter()
            .find(|record| record.to_string().contains(content));
        ensure!(found.is_none(), "{content}: {found:?}");
    }
    Ok(())
}

fn the_job_is_shown(commands: &Commands<'_>, job: &Job) -> Result<()> {
    let id = job.job_id.to_string();
    let shown = commands.run(&["job", "show", &id], b"")?.success()?;
    let lines = plain_lines(&shown);
    let starts = |start: &str| lines.iter().any(|line| line.starts_with(start));
    for start in [
        "criterion 1 met, the model's word: I read it",
        "criterion 2 met, checked by the job",
        "tokens 60 (m, 6 requests in ",
        "changed modify add.sh (+1 -1)",
        "1 run_command failure ",
        "2 apply_unified_diff success ",
        "3 run_command success ",
    ] {
        assert!(starts(start), "{start}: {shown}");
    }
    Ok(())
}

/// Both kinds of agents see that the job got further, and what came of it.
async fn agents_learn_of_the_progress(
    cluster: &Cluster,
    admin: &str,
    task: &str,
    job: &Job,
) -> Result<()> {
    for kind in ["project_manager", "project_analyst"] {
        let agent = McpAgent::with_token_for(cluster, admin, kind, &[task]).await?;
        let page = agent
            .call_ok("events.list", json!({"task_id": task}))
            .await?;
        let events = page["items"].as_array().context("items")?;
        let progress = events.iter().find(|event| event["type"] == "job.progress");
        let progress = progress.with_context(|| format!("{kind}: {page}"))?;
        assert_eq!(progress["job_id"], job.job_id.to_string().as_str());
        assert_eq!(progress["state"], "in_progress");
        let progress = &progress["progress"];
        assert!(
            progress["activity"]
                .as_str()
                .is_some_and(|activity| activity.starts_with("turn "))
                && progress["todo"]["total"].is_u64()
                && progress["todo"]["open"] == json!([]),
            "{progress}"
        );
        let shown = json!({"task_id": task, "job_id": job.job_id});
        let answer = agent.call("db.job.get", shown).await?;
        let words = text(&answer["result"]["content"][0]["text"])?;
        assert!(
            words.contains("criteria: 2 of 2 met, 1 of them checked by the job's commands")
                && words.contains("tokens: 60 (m)"),
            "{words}"
        );
    }
    Ok(())
}

/// A job that can't succeed, and its end.
struct FailingJob {
    name: &'static str,
    replies: Vec<ModelReply>,
    seconds: u64,
    state: JobState,
    code: &'static str,
    message: &'static str,
}

impl FailingJob {
    fn new(
        name: &'static str,
        replies: Vec<ModelReply>,
        code: &'static str,
        message: &'static str,
    ) -> Self {
        Self {
            name,
            replies,
            seconds: 60,
            state: JobState::Failed,
            code,
            message,
        }
    }
}

/// Each misbehaviour of a model has a definite end.
// proves: CYNAI.SBAGNT.JobInferenceModel with people_allow_models_and_agents_do_not and
// a_job_goes_to_a_node_that_serves_one_of_its_models_or_fails_with_the_reason and
// a_job_uses_its_own_models_and_its_result_has_the_tokens_that_the_node_saw and
// only_allowed_models_are_asked_and_without_one_the_job_fails
// part of: CYNAI.SBAGNT.FailureCodes
// invariant: jobs
#[tokio::test]
async fn a_model_that_misbehaves_ends_its_job_with_a_definite_failure() -> Result<()> {
    // Without the setting, the server's small window would end each job.
    let agents = AgentCluster::start(IMAGE, ModelApi::Ollama, ", context_tokens = 65536").await?;
    let client = agents.cluster.orchestrator.client()?;
    let garbage = ModelReply::Body("text/event-stream", b"data: nonsense\n\n".to_vec());
    let outside = call("read_file", &json!({"path": "/etc/passwd"}));
    for job in [
        FailingJob::new(
            "it repeats itself",
            vec![run_command(&["true"]); 7],
            "no_progress",
            "repeated itself",
        ),
        FailingJob::new(
            "it sends garbage",
            vec![garbage; 4],
            "inference_unavailable",
            "no allowed model answered",
        ),
        FailingJob::new(
            "its answer is a flood",
            vec![ModelReply::Flood; 4],
            "inference_unavailable",
            "too long",
        ),
        FailingJob {
            seconds: 4,
            state: JobState::Timeout,
            ..FailingJob::new(
                "its answer trickles",
                vec![ModelReply::Trickle(Duration::from_millis(100))],
                "timeout",
                "",
            )
        },
        FailingJob::new(
            "it reads nothing but files of the system",
            vec![outside.clone(); 7],
            "no_progress",
            "repeated itself",
        ),
    ] {
        agents.script(job.replies);
        let mut request = prompt(job.name, "m");
        request.timeout_seconds = Some(job.seconds);
        let done = agents.run(&client, &request).await?;
        assert_eq!(
            done.verdict(),
            (job.state, job.code, "worker"),
            "{}: {done:#?}",
            job.name
        );
        assert!(done.message().contains(job.message), "{done:#?}");
        let usage = done.result.usage.as_ref().context(job.name)?;
        assert_eq!(usage.model, "m", "{usage:?}");
        eventually("no request is left at the server", TIMEOUT, async || {
            Ok(agents.models.open() == 0)
        })
        .await?;
    }
    a_refused_path_is_told_to_the_model(&agents, &client, outside).await?;
    a_model_must_be_allowed_and_served(&agents, &client).await?;
    a_runner_that_is_killed_in_a_call_ends_the_job(&agents, &client).await
}

async fn a_refused_path_is_told_to_the_model(
    agents: &AgentCluster,
    client: &UserClient,
    outside: ModelReply,
) -> Result<()> {
    let change = json!({"path": "/etc/motd", "content": "x"});
    agents.script([
        outside,
        call("write_file", &change),
        call("finish", &json!({"summary": "I stay inside."})),
    ]);
    let done = agents.run(client, &prompt("look around", "m")).await?;
    let done = done.success()?;
    assert_eq!(done.statuses(), [StepStatus::Failure; 2]);
    let last = agents.models.computations().pop().context("a request")?;
    let messages = last.body["messages"].as_array().context("messages")?;
    let told = messages.iter().filter(|message| message["role"] == "tool");
    for message in told {
        let text = message["content"].as_str().unwrap_or_default();
        assert!(text.starts_with("error: "), "{message}");
    }
    assert!(!last.body.to_string().contains("root:"), "{last:?}");
    Ok(())
}

async fn a_model_must_be_allowed_and_served(
    agents: &AgentCluster,
    client: &UserClient,
) -> Result<()> {
    let refusal = async |request: &JobCreate| client.create_job(request).await.err();
    let mut unnamed = prompt("x", "m");
    unnamed.allowed_models.clear();
    let refused = refusal(&unnamed).await.context("no model is allowed")?;
    ensure!(refused.is(ErrorCode::ModelNotAllowed), "{refused}");
    client
        .put_preference(PreferenceScope::System, "-", KEY, json!(["m", "absent"]))
        .await?;
    let refused = refusal(&prompt("x", "other"))
        .await
        .context("not allowed")?;
    ensure!(refused.is(ErrorCode::ModelNotAllowed), "{refused}");
    let before = agents.models.computations().len();

    let id = client.create_job(&prompt("x", "absent")).await?.job_id;
    let job = ended(client, id).await?;
    let error = job.error.context("an error")?;
    assert_eq!(
        (job.state, error.code.as_str()),
        (JobState::Failed, "inference_unavailable")
    );
    ensure!(
        error.detail.contains("serves none of \"absent\""),
        "{error:?}"
    );
    assert_eq!(agents.models.computations().len(), before);

    // A job without a list has the preference's.
    agents.script([call("finish", &json!({"summary": "Done."}))]);
    let done = agents.run(client, &unnamed).await?.success()?;
    let usage = done.result.usage.context("usage")?;
    assert_eq!((usage.model.as_str(), usage.requests), ("m", 1));
    Ok(())
}

async fn a_runner_that_is_killed_in_a_call_ends_the_job(
    agents: &AgentCluster,
    client: &UserClient,
) -> Result<()> {
    agents.script([
        run_command(&["sleep", "777"]),
        call("finish", &json!({"summary": "Never said."})),
    ]);
    let before = agents.models.computations().len();
    let id = client.create_job(&prompt("wait", "m")).await?.job_id;
    eventually("the agent runs its command", TIMEOUT, async || {
        let job = client.job(id).await?;
        ensure!(!job.state.is_final(), "{job:?}");
        let activity = job.progress.and_then(|progress| progress.activity);
        Ok(activity.as_deref() == Some("turn 1: run_command"))
    })
    .await?;
    let world = &agents.cluster.control_plane.world;
    let running = runners(world)?;
    assert_eq!(running.len(), 1, "{running:?}");
    kill(running[0])?;
    let done = Ended::of(ended(client, id).await?)?;
    assert_eq!(
        done.verdict(),
        (JobState::Failed, "runner_interrupted", "worker"),
        "{done:#?}"
    );
    assert_eq!(done.statuses(), [StepStatus::Interrupted]);
    assert_eq!(agents.models.computations().len(), before + 1);
    assert_eq!(final_events(client, done.job.task_id, id).await?, 1);
    Ok(())
}

async fn final_events(client: &UserClient, task: TaskId, id: JobId) -> Result<usize> {
    let page = client.events(0, Some(task), Duration::ZERO).await?;
    let is_final = |state: &str| !matches!(state, "accepted" | "in_progress");
    let finals = page.items.iter();
    Ok(finals
        .filter(|event| event.job_id == Some(id) && is_final(&event.state))
        .count())
}

/// The context of a job is never shortened: a model that can't read it is not asked.
#[tokio::test]
async fn a_context_that_does_not_fit_into_the_models_window_fails_the_job() -> Result<()> {
    // The scripted server says that its models read 4,096 tokens.
    let agents = AgentCluster::start(IMAGE, ModelApi::Ollama, "").await?;
    let client = agents.cluster.orchestrator.client()?;
    let long = "repair it ".repeat(1_000);
    let done = agents.run(&client, &prompt(&long, "m")).await?;
    assert_eq!(
        done.verdict(),
        (JobState::Failed, "inference_unavailable", "worker"),
        "{done:#?}"
    );
    ensure!(done.message().contains("reads 4096 at once"), "{done:#?}");
    assert_eq!(agents.models.computations().len(), 0);
    Ok(())
}

/// Changes a request.
type Change<'a> = &'a dyn Fn(&mut JobCreate);

#[tokio::test]
async fn a_prompt_stands_alone_and_is_scanned_as_a_specification_is() -> Result<()> {
    let agents = AgentCluster::start(IMAGE, ModelApi::Openai, "").await?;
    let client = agents.cluster.orchestrator.client()?;
    let token = ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat();
    let cases: [(&str, ErrorCode, Change<'_>); 7] = [
        (
            "command: must be left out",
            ErrorCode::InvalidRequest,
            &|job| {
                job.command = vec!["true".to_owned()];
            },
        ),
        ("prompt: must say", ErrorCode::InvalidRequest, &|job| {
            job.prompt = Some(" \n".to_owned());
        }),
        ("checks[1]: ", ErrorCode::InvalidRequest, &|job| {
            job.checks = vec!["true".to_owned(), String::new()];
        }),
        (
            "checks: belongs to a prompt",
            ErrorCode::InvalidRequest,
            &|job| {
                job.prompt = None;
                job.allowed_models.clear();
                job.command = vec!["true".to_owned()];
                job.checks = vec!["true".to_owned()];
            },
        ),
        ("prompt: 65537 is more", ErrorCode::TooLarge, &|job| {
            job.prompt = Some("x".repeat(65_537));
        }),
        ("prompt", ErrorCode::SecretInInput, &|job| {
            job.prompt = Some(format!("log in with {token}"));
        }),
        ("checks[0]", ErrorCode::SecretInInput, &|job| {
            job.checks = vec![format!("curl -H {token} x")];
        }),
    ];
    for (detail, code, change) in cases {
        let mut request = prompt("repair it", "m");
        change(&mut request);
        let refused = client.create_job(&request).await.err().context(detail)?;
        ensure!(
            refused.is(code) && refused.chain().contains(detail),
            "{detail}: {}",
            refused.chain()
        );
    }
    let step = json!([{"type": "run_command", "args": {"argv": ["true"]}}]);
    let mut both = prompt("repair it", "m");
    both.timeout_seconds = None;
    let mut spec = cynode_tests::specification(step.as_array().context("steps")?);
    spec["task_id"] = json!(task(&agents.cluster, &json!({"name": "both"})).await?);
    both.job = Some(Box::new(cynode_api::sba::JobSpec::from_value(spec)?));
    let refused = client.create_job(&both).await.err().context("both")?;
    ensure!(
        refused.chain().contains("job: must be left out"),
        "{}",
        refused.chain()
    );
    assert_eq!(agents.models.computations().len(), 0);

    // The same request is the same job; another prompt is another request.
    agents.script([call("finish", &json!({"summary": "Done."}))]);
    let mut request = prompt("repair it", "m");
    request.job_id = Some(JobId::generate());
    let done = agents.run(&client, &request).await?.success()?;
    assert_eq!(client.create_job(&request).await?.job_id, done.job.job_id);
    request.prompt = Some("repair something else".to_owned());
    let refused = client.create_job(&request).await.err().context("another")?;
    ensure!(refused.is(ErrorCode::JobIdInUse), "{refused}");
    Ok(())
}

//! Credentials, repositories and promotions against a scripted git role: what reaches it, what is
//! kept, and what becomes of a promotion when a stage fails or an orchestrator dies.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, TokenKind};
use cynode_tests::{
    Answer, ControlPlane, IMAGE, RoleFault, RunningOrchestrator, ScriptedRole, SimulatedWorker,
    eventually,
};
use http::Method;
use serde_json::{Value, json};

const SECRET: &str = "planted-credential-0123456789";
const ROTATED: &str = "rotated-credential-9876543210";
const TIMEOUT: Duration = Duration::from_secs(60);

/// One orchestrator, a scripted role, a project with a task, and a changeset.
struct World {
    plane: ControlPlane,
    role: ScriptedRole,
    orchestrator: RunningOrchestrator,
    http: reqwest::Client,
    project: String,
    task: String,
    changeset: String,
}

impl World {
    async fn start() -> Result<Self> {
        let plane = ControlPlane::new().await?;
        let role = ScriptedRole::start(plane.world.directory()).await?;
        let orchestrator = start(&plane, &role, "").await?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(TIMEOUT)
            .build()?;
        let mut world = Self {
            plane,
            role,
            orchestrator,
            http,
            project: String::new(),
            task: String::new(),
            changeset: String::new(),
        };
        let project = world.post("/v1/projects", json!({"name": "p"})).await?;
        world.project = text(&project["id"])?;
        let task = json!({"name": "t", "project_id": world.project});
        world.task = text(&world.post("/v1/tasks", task).await?["id"])?;
        world.changeset = world
            .put("change.patch", "--- a/README\n+++ b/README\n")
            .await?;
        Ok(world)
    }

    fn request(&self, method: Method, path: &str) -> Result<reqwest::RequestBuilder> {
        let url = self.orchestrator.url()?;
        let request = self.http.request(method, format!("{url}{path}"));
        Ok(request.bearer_auth(self.orchestrator.token()?))
    }

    async fn post(&self, path: &str, body: Value) -> Result<Value> {
        let answer = Answer::of(self.request(Method::POST, path)?.json(&body)).await?;
        ensure!(
            answer.status < 300,
            "{path}: {} {}",
            answer.status,
            String::from_utf8_lossy(&answer.body)
        );
        Ok(serde_json::from_slice(&answer.body)?)
    }

    async fn refused(&self, path: &str, body: Value) -> Result<(u16, String)> {
        Ok(Answer::of(self.request(Method::POST, path)?.json(&body))
            .await?
            .outcome())
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let answer = Answer::of(self.request(Method::GET, path)?).await?;
        ensure!(answer.status == 200, "{path}: {}", answer.status);
        Ok(serde_json::from_slice(&answer.body)?)
    }

    /// Stores an artifact of the task, and returns its id.
    async fn put(&self, path: &str, content: &str) -> Result<String> {
        let path = format!("/v1/tasks/{}/artifacts/{path}", self.task);
        let request = self.request(Method::PUT, &path)?.body(content.to_owned());
        let answer = Answer::of(request).await?;
        ensure!(answer.status == 201, "{path}: {:?}", answer.outcome());
        text(&serde_json::from_slice::<Value>(&answer.body)?["id"])
    }

    async fn credential(&self) -> Result<Value> {
        self.post(
            "/v1/credentials",
            json!({
                "project_id": self.project, "name": "forge",
                "url": "https://forge.example/team", "secret": SECRET,
            }),
        )
        .await
    }

    /// Registers a repository with more members.
    async fn repository(&self, name: &str, more: Value) -> Result<Value> {
        let mut body = json!({
            "project_id": self.project, "name": name, "provider": "github",
            "url": "https://forge.example/team/site", "default_branch": "main",
        });
        if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
            body.extend(more);
        }
        self.post("/v1/repositories", body).await
    }

    fn promotion(&self, repository: &str) -> Value {
        json!({
            "task_id": self.task, "repository": repository, "changeset": self.changeset,
            "base": "b".repeat(40), "title": "Change the file",
        })
    }

    /// Promotes the changeset, and waits for its end or a person.
    async fn promote(&self, body: &Value) -> Result<Value> {
        let request = self.request(Method::POST, "/v1/promotions")?;
        let answer = Answer::of(request.header("prefer", "wait=50").json(body)).await?;
        ensure!(answer.status < 300, "{:?}", answer.problem());
        Ok(serde_json::from_slice(&answer.body)?)
    }

    async fn shown(&self, promotion: &Value) -> Result<Value> {
        self.get(&format!("/v1/promotions/{}", text(&promotion["id"])?))
            .await
    }

    async fn reaches(&self, promotion: &Value, state: &str) -> Result<Value> {
        let is_there = async || Ok(self.shown(promotion).await?["state"] == state);
        let what = format!("the promotion is {state}");
        if let Err(error) = eventually(&what, TIMEOUT, is_there).await {
            return Err(error.context(self.shown(promotion).await?.to_string()));
        }
        self.shown(promotion).await
    }

    /// A node that runs jobs.
    async fn worker(&self) -> Result<SimulatedWorker> {
        let worker = SimulatedWorker::start("node-1", &[IMAGE]).await?;
        let key = self.plane.world.directory().join("registration.key");
        let key = fs_err::read_to_string(key)?;
        let control = self.orchestrator.control_url()?;
        worker.join(&control, key.trim()).await?;
        let is_ready = async || {
            let nodes = self.get("/v1/nodes").await?;
            Ok(nodes["items"][0]["state"] == "ready")
        };
        eventually("the node is ready", TIMEOUT, is_ready).await?;
        Ok(worker)
    }

    /// Kills the orchestrator, and starts another on its state.
    async fn kill_and_restart(&mut self) -> Result<()> {
        self.orchestrator.kill()?;
        self.role.clear_faults();
        self.orchestrator = start(&self.plane, &self.role, "").await?;
        Ok(())
    }
}

async fn start(
    plane: &ControlPlane,
    role: &ScriptedRole,
    name: &str,
) -> Result<RunningOrchestrator> {
    let key = plane.world.directory().join("registration.key");
    let key = key.display().to_string();
    let images = format!("[{IMAGE:?}]");
    let [(url_key, url), (token_key, token)] = role.settings();
    let settings = [
        (url_key, url.as_str()),
        (token_key, token.as_str()),
        ("registration_key_file", key.as_str()),
        ("seed_images", images.as_str()),
        ("heartbeat_seconds", "1"),
    ];
    plane.orchestrator(name, &settings).await
}

fn text(value: &Value) -> Result<String> {
    Ok(value.as_str().context("a text")?.to_owned())
}

fn code(promotion: &Value) -> &str {
    promotion["error"]["code"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn a_credential_reaches_the_role_and_nothing_else() -> Result<()> {
    let world = World::start().await?;
    let credential = world.credential().await?;
    let id = text(&credential["id"])?;
    ensure!(credential.get("secret").is_none() && !credential.to_string().contains(SECRET));
    let opened = async || Ok(world.role.open(id.parse()?).is_ok());
    eventually("the credential has arrived", TIMEOUT, opened).await?;
    let plaintext = world.role.open(id.parse()?)?;
    assert_eq!(plaintext.secret, SECRET);
    assert_eq!(
        (
            plaintext.host.as_str(),
            plaintext.port,
            plaintext.path_prefix.as_str()
        ),
        ("forge.example", 443, "/team")
    );
    assert_eq!(plaintext.project_id.to_string(), world.project);

    // Malformed bodies with the value in odd places, and one that is too long to be kept in memory.
    for body in [
        json!({"project_id": world.project, "name": SECRET, "url": "x", "secret": SECRET}),
        json!({"project_id": world.project, "name": "a", "url": format!("https://a:{SECRET}@f.example"), "secret": SECRET}),
        json!({"project_id": world.project, "name": 7, "url": "https://f.example", "secret": SECRET, "role": SECRET}),
        json!({"project_id": world.project, "name": "a", "url": "https://f.example", "secret": format!("{SECRET}\n"), "username": SECRET}),
        json!({"project_id": world.project, "name": "a", "url": "https://f.example", "secret": SECRET.repeat(20_000)}),
    ] {
        let request = world.request(Method::POST, "/v1/credentials")?.json(&body);
        let answer = Answer::of(request).await?;
        ensure!((400..500).contains(&answer.status), "{}", answer.status);
        ensure!(!String::from_utf8_lossy(&answer.body).contains(SECRET));
    }

    let path = format!("/v1/credentials/{id}/rotate");
    world.post(&path, json!({"secret": ROTATED})).await?;
    let rotated = async || Ok(world.role.open(id.parse()?)?.secret == ROTATED);
    eventually("the new value has arrived", TIMEOUT, rotated).await?;

    // Neither value is in the database, the log, the audit trail or the state directory.
    let trail = world.get("/v1/audit?limit=1000").await?.to_string();
    let log = fs_err::read_to_string(world.orchestrator.log())?;
    let tables = "select string_agg(t::text, ' ') from (select query_to_xml('select * from ' || table_name, false, false, '')::text as t
                  from information_schema.tables where table_schema = 'public') all_tables";
    let stored = world.plane.postgres.query(tables)?;
    ensure!(stored.contains("forge.example") && trail.contains("credential.add"));
    let directory = world.orchestrator.state_dir().display().to_string();
    let found = std::process::Command::new("grep")
        .args(["-r", "-l", "-a", "-F", SECRET, &directory])
        .output()?;
    ensure!(found.stdout.is_empty(), "{:?}", found);
    for secret in [SECRET, ROTATED] {
        for (place, content) in [("trail", &trail), ("log", &log), ("database", &stored)] {
            ensure!(!content.contains(secret), "{secret} is in the {place}");
        }
    }

    // Disabled, it is no longer sent.
    let path = format!("/v1/credentials/{id}/disable");
    let disabled = world.post(&path, json!({})).await?;
    ensure!(disabled["disabled_at"].is_string());
    let gone = async || {
        Ok(world
            .role
            .state()
            .is_some_and(|state| state.credentials.is_empty()))
    };
    eventually("the credential is withdrawn", TIMEOUT, gone).await?;
    let path = format!("/v1/credentials/{id}/rotate");
    assert_eq!(
        world.refused(&path, json!({"secret": SECRET})).await?.0,
        404
    );
    Ok(())
}

#[tokio::test]
async fn every_orchestrator_refuses_a_credential_as_input_also_after_a_restart() -> Result<()> {
    let mut world = World::start().await?;
    let admin = world.orchestrator.state_dir().join("admin.token");
    let state = world.plane.world.directory().join("orchestrator-two");
    fs_err::create_dir_all(&state)?;
    fs_err::copy(admin, state.join("admin.token"))?;
    let second = start(&world.plane, &world.role, "two").await?;
    world.credential().await?;
    let refused = async |url: String| -> Result<bool> {
        let request = world
            .http
            .put(format!("{url}/v1/tasks/{}/artifacts/note", world.task))
            .bearer_auth(world.orchestrator.token()?)
            .body(format!("a note with {SECRET} in it"));
        Ok(Answer::of(request).await?.outcome() == (422, "secret_in_input".to_owned()))
    };
    ensure!(refused(world.orchestrator.url()?).await?, "at once");
    let elsewhere = async || refused(second.url()?).await;
    eventually("the other refuses it", Duration::from_secs(5), elsewhere).await?;
    world.kill_and_restart().await?;
    let request = world
        .request(
            Method::PUT,
            &format!("/v1/tasks/{}/artifacts/note", world.task),
        )?
        .body(SECRET);
    assert_eq!(Answer::of(request).await?.outcome().0, 422);
    Ok(())
}

#[tokio::test]
async fn the_role_gets_the_rules_whenever_they_change_and_after_its_restart() -> Result<()> {
    let world = World::start().await?;
    let repository = world.repository("site", json!({})).await?;
    let arrived = async || {
        Ok(world
            .role
            .state()
            .is_some_and(|state| state.repositories.len() == 1 && !state.policies.is_empty()))
    };
    eventually("the rules have arrived", TIMEOUT, arrived).await?;
    let first = world.role.state().context("rules")?.revision;
    let policy =
        json!({"text": "permit (principal, action == CyNode::Action::\"node.list\", resource);"});
    let request = world.request(Method::PUT, "/v1/policies/site")?;
    ensure!(Answer::of(request.json(&policy)).await?.status == 200);
    let newer = async || {
        Ok(world.role.state().is_some_and(|state| {
            state.revision > first && state.policies.iter().any(|policy| policy.id == "site")
        }))
    };
    eventually("the new policy has arrived", TIMEOUT, newer).await?;
    ensure!(
        !world
            .role
            .state()
            .context("rules")?
            .own_listeners
            .is_empty()
    );
    // The next call brings the rules with it, with the new token.
    world.role.restart()?;
    let mut dry_run = world.promotion("site");
    dry_run["dry_run"] = json!(true);
    let inspected = world.post("/v1/promotions", dry_run).await?;
    assert_eq!(inspected["state"], "done");
    assert_eq!(inspected["reached"], "committed");
    assert_eq!(
        world.role.state().map(|state| state.repositories.len()),
        Some(1)
    );
    ensure!(world.get("/v1/promotions").await?["items"] == json!([]));
    let path = format!("/v1/repositories/{}", text(&repository["id"])?);
    let removed = Answer::of(world.request(Method::DELETE, &path)?).await?;
    assert_eq!(removed.status, 204);
    Ok(())
}

#[tokio::test]
async fn without_a_role_calls_say_how_to_start_one() -> Result<()> {
    let plane = ControlPlane::new().await?;
    let orchestrator = plane.orchestrator("", &[]).await?;
    let http = reqwest::Client::builder().no_proxy().build()?;
    let post = async |path: &str, body: Value| -> Result<Answer> {
        let url = format!("{}{path}", orchestrator.url()?);
        Answer::of(
            http.post(url)
                .bearer_auth(orchestrator.token()?)
                .json(&body),
        )
        .await
    };
    let project = post("/v1/projects", json!({"name": "p"})).await?;
    let project: Value = serde_json::from_slice(&project.body)?;
    let body = json!({
        "project_id": project["id"], "name": "a", "url": "https://f.example", "secret": SECRET,
    });
    let problem = post("/v1/credentials", body).await?.problem()?;
    assert_eq!(problem.code, "unavailable");
    ensure!(
        problem.remedy.contains("cynode egress --role git"),
        "{problem:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_changeset_becomes_a_pull_request_once() -> Result<()> {
    let world = World::start().await?;
    world.repository("site", json!({})).await?;
    let done = world.promote(&world.promotion("site")).await?;
    assert_eq!(done["state"], "done", "{done}");
    assert_eq!(done["reached"], "opened");
    ensure!(done["pull_request"].is_string() && done["commit"].is_string());
    let branch = format!("cynode/{}/change-the-file", world.task);
    assert_eq!(done["branch"], json!(branch));
    assert_eq!(
        world.role.branches().get(&branch),
        Some(&text(&done["commit"])?)
    );
    // Asked for again, it is the same one.
    let again = world.promote(&world.promotion("site")).await?;
    assert_eq!(again["id"], done["id"]);
    assert_eq!(world.role.requests("pushes").len(), 1);
    assert_eq!(world.role.requests("pulls").len(), 1);
    let events = world.get("/v1/events?limit=1000").await?.to_string();
    ensure!(events.contains("promotion.state"), "{events}");
    Ok(())
}

#[tokio::test]
async fn a_promotion_stops_where_it_is_told_and_continues_from_there() -> Result<()> {
    let world = World::start().await?;
    world.repository("site", json!({})).await?;
    let mut body = world.promotion("site");
    let mut ids = Vec::new();
    for (until, reached, pushes, pulls) in [
        ("applied", "committed", 0, 0),
        ("committed", "committed", 0, 0),
        ("pushed", "pushed", 1, 0),
        ("opened", "opened", 1, 1),
        // Never less far.
        ("applied", "opened", 1, 1),
    ] {
        body["until"] = json!(until);
        let promotion = world.promote(&body).await?;
        assert_eq!(promotion["state"], "done", "{promotion}");
        assert_eq!(promotion["reached"], reached, "{until}");
        assert_eq!(world.role.requests("pushes").len(), pushes, "{until}");
        assert_eq!(world.role.requests("pulls").len(), pulls, "{until}");
        ids.push(promotion["id"].clone());
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
    assert_eq!(world.role.requests("commits").len(), 1);
    Ok(())
}

#[tokio::test]
async fn each_stage_is_tried_again_after_a_failure_that_passes() -> Result<()> {
    let world = World::start().await?;
    world.repository("site", json!({})).await?;
    for call in ["commits", "pushes", "pulls"] {
        let fault = RoleFault::Refuse(ErrorCode::ShuttingDown, json!({}));
        world.role.plan(call, 2, fault);
    }
    let done = world.promote(&world.promotion("site")).await?;
    assert_eq!(done["state"], "done", "{done}");
    ensure!(done.get("error").is_none_or(Value::is_null), "{done}");
    for call in ["commits", "pushes", "pulls"] {
        assert_eq!(world.role.requests(call).len(), 3, "{call}");
    }
    Ok(())
}

#[tokio::test]
async fn a_stage_that_is_refused_ends_the_promotion_with_the_reason() -> Result<()> {
    let world = World::start().await?;
    world.repository("site", json!({})).await?;
    world.role.set_head(&"d".repeat(40));
    for (number, (call, fault, expected)) in [
        (
            "commits",
            RoleFault::Refuse(
                ErrorCode::PatchRejected,
                json!({"rejects": [{"path": "README"}]}),
            ),
            "patch_rejected",
        ),
        ("commits", RoleFault::Deny, "change_refused"),
        (
            "pushes",
            RoleFault::Refuse(ErrorCode::DeniedByPolicy, json!({"rules": ["site/no"]})),
            "denied_by_policy",
        ),
        (
            "pulls",
            RoleFault::Refuse(ErrorCode::InvalidRequest, json!({})),
            "invalid_request",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let mut body = world.promotion("site");
        body["branch"] = json!(format!("case-{number}"));
        world.role.plan(call, 1, fault);
        let failed = world.promote(&body).await?;
        assert_eq!(failed["state"], "failed", "{failed}");
        assert_eq!(code(&failed), expected);
        if call == "commits" && expected == "patch_rejected" {
            let conflict = &failed["error"]["conflict"];
            assert_eq!(conflict["current_base"], json!("d".repeat(40)));
            assert_eq!(conflict["rejects"][0]["path"], "README");
        }
        // Asked for again, it begins again.
        let done = world.promote(&body).await?;
        assert_eq!(done["state"], "done", "{done}");
        assert_eq!(done["id"], failed["id"]);
    }
    Ok(())
}

// part of: ISC-11
#[tokio::test]
async fn an_orchestrator_that_dies_at_any_stage_pushes_and_opens_nothing_twice() -> Result<()> {
    let mut world = World::start().await?;
    world.repository("site", json!({})).await?;
    for (number, call) in ["commits", "pushes", "pulls"].into_iter().enumerate() {
        let mut body = world.promotion("site");
        body["branch"] = json!(format!("killed-{number}"));
        let before = world.role.requests(call).len();
        world.role.plan(call, 1, RoleFault::HangAfter);
        let promotion = world.post("/v1/promotions", body).await?;
        let called = async || Ok(world.role.requests(call).len() > before);
        eventually("the stage is under way", TIMEOUT, called).await?;
        world.kill_and_restart().await?;
        let done = world.reaches(&promotion, "done").await?;
        assert_eq!(done["reached"], "opened");
        let branch = text(&done["branch"])?;
        assert_eq!(
            world.role.branches().get(&branch),
            Some(&text(&done["commit"])?)
        );
        assert_eq!(world.role.pulls().get(&branch), Some(&1));
        // One commit, however often it was built.
        let builds: Vec<Value> = world
            .role
            .requests("commits")
            .into_iter()
            .filter(|build| build["branch"] == json!(branch))
            .collect();
        ensure!(builds.windows(2).all(|pair| pair[0]["at"] == pair[1]["at"]));
    }
    Ok(())
}

#[tokio::test]
async fn a_promotion_waits_for_a_person_and_no_agent_decides() -> Result<()> {
    let world = World::start().await?;
    let rules = json!({"rules": {"require_approval": true}});
    world.repository("site", rules).await?;
    let waiting = world.promote(&world.promotion("site")).await?;
    assert_eq!(waiting["state"], "awaiting_approval", "{waiting}");
    ensure!(world.role.branches().is_empty());
    let path = format!("/v1/promotions/{}/approve", text(&waiting["id"])?);
    let decision = json!({"commit": waiting["commit"]});

    // Not by an agent, whatever a rule says; not about another commit.
    let permissive = json!({"text": "permit (principal, action, resource);"});
    let request = world.request(Method::PUT, "/v1/policies/all")?;
    ensure!(Answer::of(request.json(&permissive)).await?.status == 200);
    let token = world
        .post(
            "/v1/tokens",
            json!({"kind": TokenKind::ProjectManager.as_str(), "task_ids": [world.task]}),
        )
        .await?;
    let url = world.orchestrator.url()?;
    let by_agent = world
        .http
        .post(format!("{url}{path}"))
        .bearer_auth(text(&token["token"])?)
        .json(&decision);
    assert_eq!(Answer::of(by_agent).await?.status, 403);
    let other = json!({"commit": "0".repeat(40)});
    assert_eq!(
        world.refused(&path, other).await?,
        (409, "approval_stale".to_owned())
    );
    assert_eq!(world.shown(&waiting).await?["state"], "awaiting_approval");

    world.post(&path, decision.clone()).await?;
    let done = world.reaches(&waiting, "done").await?;
    assert_eq!(done["approved_by"], "admin");
    assert_eq!(world.role.branches().len(), 1);
    assert_eq!(
        world.refused(&path, decision).await?,
        (409, "promotion_not_waiting".to_owned())
    );

    // Rejected, nothing is pushed.
    let mut body = world.promotion("site");
    body["branch"] = json!("rejected");
    let waiting = world.promote(&body).await?;
    let path = format!("/v1/promotions/{}/reject", text(&waiting["id"])?);
    let decision = json!({"commit": waiting["commit"], "reason": "not now"});
    let rejected = world.post(&path, decision).await?;
    assert_eq!(rejected["state"], "rejected", "{rejected}");
    ensure!(
        rejected["error"]["detail"]
            .as_str()
            .is_some_and(|text| text.contains("not now"))
    );
    assert_eq!(world.role.branches().len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_canceled_promotion_goes_no_further() -> Result<()> {
    let world = World::start().await?;
    let rules = json!({"rules": {"require_approval": true}});
    let repository = world.repository("site", rules).await?;
    let waiting = world.promote(&world.promotion("site")).await?;
    let removal = format!("/v1/repositories/{}", text(&repository["id"])?);
    let removed = Answer::of(world.request(Method::DELETE, &removal)?).await?;
    assert_eq!(removed.outcome(), (409, "repository_in_use".to_owned()));
    let path = format!("/v1/promotions/{}/cancel", text(&waiting["id"])?);
    let canceled = world.post(&path, json!({})).await?;
    assert_eq!(canceled["state"], "canceled", "{canceled}");
    ensure!(world.role.branches().is_empty());
    assert_eq!(world.post(&path, json!({})).await?["state"], "canceled");
    Ok(())
}

// part of: ISC-10
#[tokio::test]
async fn a_commit_is_pushed_only_after_its_checks_passed_in_sandboxes() -> Result<()> {
    let world = World::start().await?;
    let _worker = world.worker().await?;
    let check = |argv: &[&str]| json!({"checks": [{"name": "test", "argv": argv}]});
    world.repository("good", check(&["true"])).await?;
    world.repository("bad", check(&["false"])).await?;
    let done = world.promote(&world.promotion("good")).await?;
    assert_eq!(done["state"], "done", "{done}");
    assert_eq!(done["checks"][0]["exit_code"], 0);
    assert_eq!(done["checks"][0]["commit"], done["commit"]);
    let seeds = world.role.requests("seeds");
    assert_eq!(seeds[0]["commit"], done["commit"]);
    let failed = world.promote(&world.promotion("bad")).await?;
    assert_eq!(
        (&failed["state"], code(&failed)),
        (&json!("failed"), "check_failed")
    );
    assert_eq!(world.role.branches().len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_changeset_of_another_task_and_a_repository_of_another_project_are_not_found()
-> Result<()> {
    let world = World::start().await?;
    world.repository("site", json!({})).await?;
    let project = world.post("/v1/projects", json!({"name": "q"})).await?;
    let task = json!({"name": "t", "project_id": project["id"]});
    let task = world.post("/v1/tasks", task).await?;
    let lone = world.post("/v1/tasks", json!({"name": "lone"})).await?;
    for (member, value, expected) in [
        ("task_id", &task["id"], (404, "not_found")),
        ("task_id", &lone["id"], (400, "invalid_request")),
        ("repository", &json!("other"), (404, "not_found")),
        ("changeset", &task["id"], (404, "not_found")),
        ("base", &json!("main"), (400, "invalid_request")),
        ("base", &Value::Null, (400, "invalid_request")),
        ("branch", &json!("../main"), (400, "invalid_request")),
        ("target", &json!("-x"), (400, "invalid_request")),
        ("title", &json!(" "), (400, "invalid_request")),
    ] {
        let mut body = world.promotion("site");
        body[member] = value.clone();
        let outcome = world.refused("/v1/promotions", body).await?;
        assert_eq!(
            (outcome.0, outcome.1.as_str()),
            expected,
            "{member}: {value}"
        );
    }
    assert_eq!(world.role.requests("commits").len(), 0);
    Ok(())
}

#[tokio::test]
async fn the_same_commit_is_fetched_once_and_scanned_like_any_input() -> Result<()> {
    let world = World::start().await?;
    world.repository("site", json!({})).await?;
    let job = |more: Value| {
        let mut body = json!({
            "task_id": world.task, "command": ["true"], "workspace_ref": "git:site@main",
        });
        if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
            body.extend(more);
        }
        body
    };
    let _worker = world.worker().await?;
    for _ in 0..2 {
        world.post("/v1/jobs", job(json!({}))).await?;
    }
    assert_eq!(world.role.requests("resolve").len(), 2);
    assert_eq!(world.role.requests("seeds").len(), 1);
    let artifacts = format!("/v1/artifacts?task_id={}", world.task);
    let artifacts = world.get(&artifacts).await?;
    let path = format!("git/site/{}.tar", "a".repeat(40));
    ensure!(artifacts.to_string().contains(&path), "{artifacts}");
    // Another depth and another commit are other seeds.
    world
        .post("/v1/jobs", job(json!({"workspace_depth": 1})))
        .await?;
    world.role.set_head(&"e".repeat(40));
    world.post("/v1/jobs", job(json!({}))).await?;
    assert_eq!(world.role.requests("seeds").len(), 3);
    // A seed with a secret of the system becomes no artifact.
    world.credential().await?;
    world.role.set_content(SECRET.as_bytes());
    let outcome = world.refused("/v1/jobs", job(json!({}))).await?;
    assert_eq!(outcome, (422, "secret_in_input".to_owned()));
    for (more, status) in [
        (json!({"workspace_ref": "git:other"}), 404),
        (
            json!({"workspace_ref": "git:site", "workspace_depth": 0}),
            400,
        ),
        (json!({"workspace_ref": "new", "workspace_depth": 1}), 400),
        (json!({"workspace_ref": "git:Site"}), 400),
    ] {
        assert_eq!(
            world.refused("/v1/jobs", job(more.clone())).await?.0,
            status,
            "{more}"
        );
    }
    Ok(())
}

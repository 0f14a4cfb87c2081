//! Policies: validation, propagation, decisions, and their audit records.

mod paths;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{CALL_HEADER, NodeKeyCreate};
use cynode_tests::{Answer, ControlPlane, RunningOrchestrator, SimulatedWorker, eventually};
use http::Method;
use serde_json::{Value, json};

use super::cluster::text;

pub(super) const ONE: &str = "localhost/cynode/one:latest";
pub(super) const TWO: &str = "localhost/cynode/two:latest";
const PLAIN: &str = "localhost/cynode/unlabelled:latest";
const TIMEOUT: Duration = Duration::from_secs(30);

/// An orchestrator with one simulated node, and its administrator. Unused fields are dropped last.
pub(super) struct PolicyFixture {
    pub(super) node: SimulatedWorker,
    pub(super) orchestrator: RunningOrchestrator,
    pub(super) control_plane: ControlPlane,
    pub(super) admin: String,
    http: reqwest::Client,
}

impl PolicyFixture {
    pub(super) async fn start() -> Result<Self> {
        Self::start_with(&[]).await
    }

    pub(super) async fn start_with(settings: &[(&str, &str)]) -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let orchestrator = Self::orchestrator(&control_plane, "", settings).await?;
        let node = SimulatedWorker::start("node", &[ONE, TWO, PLAIN]).await?;
        let key = orchestrator
            .client()?
            .create_node_key(&NodeKeyCreate::default())
            .await?
            .psk;
        node.join(&orchestrator.control_url()?, &key).await?;
        let admin = orchestrator.token()?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(60))
            .build()?;
        Ok(Self {
            node,
            orchestrator,
            control_plane,
            admin,
            http,
        })
    }

    async fn orchestrator(
        control_plane: &ControlPlane,
        name: &str,
        settings: &[(&str, &str)],
    ) -> Result<RunningOrchestrator> {
        let seeds = format!("[{ONE:?}, {TWO:?}, {PLAIN:?}]");
        let defaults = [
            ("seed_images", seeds.as_str()),
            ("default_image", ONE),
            ("heartbeat_seconds", "1"),
        ];
        control_plane
            .orchestrator(name, &[&defaults, settings].concat())
            .await
    }

    /// Starts another orchestrator with the same database, key and administrator.
    pub(super) async fn second(&self) -> Result<RunningOrchestrator> {
        let state_dir = self
            .control_plane
            .world
            .directory()
            .join("orchestrator-two");
        fs_err::create_dir_all(&state_dir)?;
        fs_err::copy(
            self.orchestrator.state_dir().join("admin.token"),
            state_dir.join("admin.token"),
        )?;
        Self::orchestrator(&self.control_plane, "two", &[]).await
    }

    pub(super) async fn call(
        &self,
        token: &str,
        method: Method,
        path: &str,
        body: &Value,
    ) -> Result<Answer> {
        self.call_at(&self.orchestrator, token, method, path, body)
            .await
    }

    pub(super) async fn call_at(
        &self,
        orchestrator: &RunningOrchestrator,
        token: &str,
        method: Method,
        path: &str,
        body: &Value,
    ) -> Result<Answer> {
        let request = self
            .http
            .request(method, format!("{}{path}", orchestrator.url()?))
            .bearer_auth(token);
        Answer::of(if body.is_null() {
            request
        } else {
            request.json(body)
        })
        .await
    }

    pub(super) async fn get(&self, path: &str) -> Result<Value> {
        object(
            &self
                .call(&self.admin, Method::GET, path, &Value::Null)
                .await?,
        )
    }

    /// Creates something with a POST request and returns the response.
    pub(super) async fn make(&self, token: &str, path: &str, body: &Value) -> Result<Value> {
        object(&self.call(token, Method::POST, path, body).await?).with_context(|| path.to_owned())
    }

    /// Creates a user, and a token for them.
    pub(super) async fn user(&self, name: &str) -> Result<(String, String)> {
        let user = self
            .make(&self.admin, "/v1/users", &json!({"name": name}))
            .await?;
        let token = self
            .make(
                &self.admin,
                "/v1/tokens",
                &json!({"kind": "user", "user": name}),
            )
            .await?;
        Ok((text(&user["id"])?, text(&token["token"])?))
    }

    pub(super) async fn task(&self, token: &str) -> Result<String> {
        text(
            &self
                .make(token, "/v1/tasks", &json!({"name": "task"}))
                .await?["id"],
        )
    }

    pub(super) async fn session(&self, token: &str, task: &str) -> Result<String> {
        text(
            &self
                .make(token, "/v1/sessions", &json!({"task_id": task}))
                .await?["session_id"],
        )
    }

    async fn put(&self, id: &str, document: &str) -> Result<Answer> {
        self.call(
            &self.admin,
            Method::PUT,
            &format!("/v1/policies/{id}"),
            &json!({"text": document}),
        )
        .await
    }

    async fn put_good(&self, id: &str, document: &str) -> Result<Value> {
        object(&self.put(id, document).await?)
    }

    async fn exec(
        &self,
        orchestrator: &RunningOrchestrator,
        token: &str,
        session: &str,
    ) -> Result<Answer> {
        let body = json!({"argv": ["echo", "on"], "timeout_ms": 10_000});
        self.call_at(
            orchestrator,
            token,
            Method::POST,
            &format!("/v1/sessions/{session}/exec"),
            &body,
        )
        .await
    }

    /// The audit records that a query selects.
    async fn records(&self, query: &str) -> Result<Vec<Value>> {
        Ok(
            self.get(&format!("/v1/audit?limit=1000&{query}")).await?["items"]
                .as_array()
                .context("records")?
                .clone(),
        )
    }

    /// All policies in the database.
    fn policies(&self) -> Result<String> {
        self.control_plane.postgres.query(
            "select (select revision from policy_head), (select json_agg(p order by id) from policies p),
                 (select json_agg(v order by revision) from policy_versions v)",
        )
    }
}

/// The body of a successful response.
pub(super) fn object(answer: &Answer) -> Result<Value> {
    ensure!(
        (200..300).contains(&answer.status),
        "{}: {}",
        answer.status,
        String::from_utf8_lossy(&answer.body)
    );
    Ok(if answer.body.is_empty() {
        Value::Null
    } else {
        serde_json::from_slice(&answer.body)?
    })
}

/// The body of a refusal with this status and code.
pub(super) fn refusal(answer: &Answer, status: u16, code: &str) -> Result<Value> {
    ensure!(
        answer.outcome() == (status, code.to_owned()),
        "{status} {code}, not {}: {}",
        answer.status,
        String::from_utf8_lossy(&answer.body)
    );
    Ok(serde_json::from_slice(&answer.body)?)
}

#[tokio::test]
async fn the_default_policies_exist_from_the_start() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let listed = fixture.get("/v1/policies").await?["items"].clone();
    assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
    let default = &listed[0];
    assert_eq!(
        (
            &default["id"],
            &default["is_default"],
            &default["updated_by"]
        ),
        (&json!("default"), &json!(true), &json!("system"))
    );
    let rules: Vec<&Value> = default["rules"]
        .as_array()
        .context("rules")?
        .iter()
        .collect();
    for (name, effect) in [
        ("default/administrators", "permit"),
        ("default/owners", "permit"),
        ("default/preferences-of-administrators", "forbid"),
    ] {
        ensure!(
            rules.contains(&&json!({"name": name, "effect": effect})),
            "{name}: {rules:?}"
        );
    }
    // A new user can work, but not act as an administrator.
    let (_, ann) = fixture.user("ann").await?;
    let task = fixture.task(&ann).await?;
    let session = fixture.session(&ann, &task).await?;
    object(&fixture.exec(&fixture.orchestrator, &ann, &session).await?)?;
    let tested = async |body: Value| {
        fixture
            .make(&fixture.admin, "/v1/policies:test", &body)
            .await
    };
    let verdict =
        tested(json!({"user": "ann", "action": "session.exec", "session_id": session})).await?;
    assert_eq!(
        (&verdict["allowed"], &verdict["rules"]),
        (&json!(true), &json!(["default/owners"]))
    );
    let verdict = tested(json!({"user": "ann", "action": "image.add"})).await?;
    assert_eq!(
        (&verdict["allowed"], &verdict["rules"]),
        (&json!(false), &json!([]))
    );
    refusal(
        &fixture
            .call(&ann, Method::GET, "/v1/policies", &Value::Null)
            .await?,
        403,
        "denied_by_policy",
    )?;
    refusal(
        &fixture
            .call(&ann, Method::PUT, "/v1/policies/mine", &json!({"text": ""}))
            .await?,
        403,
        "denied_by_policy",
    )?;
    Ok(())
}

#[tokio::test]
// invariant: policies
async fn an_invalid_policy_is_refused_with_its_position_and_changes_nothing() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let before = fixture.policies()?;
    let flawed = [
        (
            "syntax",
            "permit (principal, action, resource);\nforbid (principal action, resource);\n",
            "line 2",
        ),
        (
            "action",
            "// One that there is not.\n\nforbid (principal, action == \
             CyNode::Action::\"session.fly\", resource);\n",
            "line 3",
        ),
        (
            "attribute",
            "forbid (principal is CyNode::User, action, resource)\nwhen \
             {\n  principal.colour == \"red\"\n};\n",
            "line 3",
        ),
        (
            "type",
            "forbid (principal is CyNode::User, action, resource)\nwhen \
             { principal.admin == \"yes\" };\n",
            "line 2",
        ),
        (
            "thing",
            "forbid (principal, action, resource == CyNode::Castle::\"x\");\n",
            "line 1",
        ),
        (
            "twins",
            "@id(\"a\")\npermit (principal, action, resource);\n@id(\"a\")\nforbid (principal, \
             action, resource);\n",
            "'a'",
        ),
    ];
    for (id, document, place) in flawed {
        let refused = refusal(&fixture.put(id, document).await?, 422, "policy_invalid")
            .with_context(|| id.to_owned())?;
        let flaw = text(&refused["flaws"][0])?;
        ensure!(
            flaw.starts_with(&format!("{id}: "))
                && flaw.contains(place)
                && text(&refused["detail"])?.contains(&flaw),
            "{id}: {refused}"
        );
        refusal(
            &fixture
                .call(
                    &fixture.admin,
                    Method::GET,
                    &format!("/v1/policies/{id}"),
                    &Value::Null,
                )
                .await?,
            404,
            "not_found",
        )?;
    }
    assert_eq!(fixture.policies()?, before);
    // An existing valid policy stays unchanged.
    fixture
        .put_good(
            "kept",
            "permit (principal, action == CyNode::Action::\"node.list\", resource);",
        )
        .await?;
    let before = fixture.policies()?;
    refusal(
        &fixture.put("kept", "permit (").await?,
        422,
        "policy_invalid",
    )?;
    refusal(
        &fixture.put("NOT-A-NAME", "").await?,
        400,
        "invalid_request",
    )?;
    assert_eq!(fixture.policies()?, before);
    Ok(())
}

const CONTEXT_RULES: &str = r#"
@id("no-shells")
forbid (principal, action in [CyNode::Action::"session.exec", CyNode::Action::"session.pty"], resource)
when { context has program_name && context.program_name == "bash" };
@id("no-jobs-of-rm")
forbid (principal, action == CyNode::Action::"job.create", resource) when { context has program_name && context.program_name == "rm" };
@id("no-pty")
forbid (principal, action == CyNode::Action::"session.create", resource) when { context.pty };
@id("no-two")
forbid (principal, action == CyNode::Action::"session.create", resource) when { context has image && context.image like "*two*" };
@id("no-net")
forbid (principal, action == CyNode::Action::"job.create", resource) when { context has network && context.network == "open" };
@id("no-managers")
forbid (principal, action == CyNode::Action::"token.create", resource) when { context has token_kind && context.token_kind == "project_manager" };
"#;

#[tokio::test]
async fn a_policy_test_evaluates_the_same_context_as_the_call() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    fixture.put_good("looks", CONTEXT_RULES).await?;
    let session = fixture
        .session(&fixture.admin, &fixture.task(&fixture.admin).await?)
        .await?;
    for (query, rule) in [
        (
            json!({"action": "session.exec", "session_id": session, "program": "bash"}),
            Some("looks/no-shells"),
        ),
        (
            json!({"action": "session.exec", "session_id": session, "program": "/usr/bin/bash"}),
            Some("looks/no-shells"),
        ),
        (
            json!({"action": "session.pty", "session_id": session, "program": "./bash"}),
            Some("looks/no-shells"),
        ),
        (
            json!({"action": "session.pty", "session_id": session}),
            None,
        ),
        (
            json!({"action": "session.exec", "session_id": session, "program": "sh"}),
            None,
        ),
        (
            json!({"action": "job.create", "program": "/bin/rm"}),
            Some("looks/no-jobs-of-rm"),
        ),
        (
            json!({"action": "session.create", "pty": true}),
            Some("looks/no-pty"),
        ),
        (
            json!({"action": "session.create", "pty": false, "image": ONE}),
            None,
        ),
        (
            json!({"action": "session.create", "image": TWO}),
            Some("looks/no-two"),
        ),
        (
            json!({"action": "job.create", "network": "open"}),
            Some("looks/no-net"),
        ),
        (
            json!({"action": "job.create", "network": "none", "program": "bash"}),
            None,
        ),
        (
            json!({"action": "token.create", "token_kind": "project_manager"}),
            Some("looks/no-managers"),
        ),
        (
            json!({"action": "token.create", "token_kind": "user"}),
            None,
        ),
    ] {
        let verdict = fixture
            .make(&fixture.admin, "/v1/policies:test", &query)
            .await?;
        assert_eq!(verdict["errors"], json!([]), "{query}: {verdict}");
        match rule {
            Some(rule) => assert_eq!(
                (&verdict["allowed"], &verdict["rules"]),
                (&json!(false), &json!([rule])),
                "{query}"
            ),
            None => assert_eq!(verdict["allowed"], json!(true), "{query}: {verdict}"),
        }
    }
    // The calls themselves, by name and by path.
    let exec = format!("/v1/sessions/{session}/exec");
    for program in ["bash", "/bin/bash", "//usr/bin/../bin/bash"] {
        let refused = refusal(
            &fixture
                .call(
                    &fixture.admin,
                    Method::POST,
                    &exec,
                    &json!({"argv": [program, "-c", "true"]}),
                )
                .await?,
            403,
            "denied_by_policy",
        )?;
        assert_eq!(refused["rules"], json!(["looks/no-shells"]), "{program}");
    }
    for program in ["rm", "/bin/rm"] {
        let refused = refusal(
            &fixture
                .call(
                    &fixture.admin,
                    Method::POST,
                    "/v1/jobs",
                    &json!({"command": [program, "x"]}),
                )
                .await?,
            403,
            "denied_by_policy",
        )?;
        assert_eq!(
            refused["rules"],
            json!(["looks/no-jobs-of-rm"]),
            "{program}"
        );
    }
    Ok(())
}

const ARTIFACTS: &str = r#"
@id("no-get")
forbid (principal, action == CyNode::Action::"artifact.get", resource);
@id("no-put")
forbid (principal, action == CyNode::Action::"artifact.put", resource);
"#;

#[tokio::test]
async fn a_rule_about_artifacts_also_applies_through_a_sandbox() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (_, ann) = fixture.user("ann").await?;
    let task = fixture.task(&ann).await?;
    let session = fixture.session(&ann, &task).await?;
    let seed = object(
        &fixture
            .call(
                &ann,
                Method::PUT,
                &format!("/v1/tasks/{task}/artifacts/seed.tar"),
                &json!({}),
            )
            .await?,
    )?;
    let seeded = json!({
        "task_id": task,
        "workspace_ref": format!("artifact:{}", text(&seed["id"])?),
        "command": ["true"]
    });
    let mut seeded_session = seeded.clone();
    seeded_session
        .as_object_mut()
        .context("an object")?
        .remove("command");
    let export = format!("/v1/sessions/{session}/export");
    fixture.put_good("artifacts", ARTIFACTS).await?;
    let before = (
        fixture.get("/v1/sessions").await?["items"]
            .as_array()
            .map(Vec::len),
        fixture.get("/v1/jobs").await?["items"]
            .as_array()
            .map(Vec::len),
    );
    for (method, path, body, rule) in [
        (
            Method::GET,
            format!("/v1/artifacts/{}/content", text(&seed["id"])?),
            Value::Null,
            "artifacts/no-get",
        ),
        (
            Method::POST,
            "/v1/sessions".to_owned(),
            seeded_session.clone(),
            "artifacts/no-get",
        ),
        (
            Method::POST,
            "/v1/jobs".to_owned(),
            seeded.clone(),
            "artifacts/no-get",
        ),
        (
            Method::PUT,
            format!("/v1/tasks/{task}/artifacts/other"),
            json!({}),
            "artifacts/no-put",
        ),
        (
            Method::POST,
            export.clone(),
            json!({"format": "tar"}),
            "artifacts/no-put",
        ),
        (
            Method::POST,
            export.clone(),
            json!({"format": "patch"}),
            "artifacts/no-put",
        ),
    ] {
        let answer = fixture.call(&ann, method, &path, &body).await?;
        let refused = refusal(&answer, 403, "denied_by_policy").with_context(|| path.clone())?;
        assert_eq!(refused["rules"], json!([rule]), "{path}");
        let records = fixture
            .records(&format!("call_id={}", answer.header(CALL_HEADER)))
            .await?;
        assert_eq!(
            (
                &records[0]["decision"],
                &records[0]["stage"],
                &records[0]["rules"]
            ),
            (&json!("deny"), &json!("policy"), &json!([rule])),
            "{path}"
        );
    }
    // The same holds for an agent's tools, which make the same calls.
    let manager = text(
        &fixture
            .make(
                &fixture.admin,
                "/v1/tokens",
                &json!({"kind": "project_manager", "task_ids": [task]}),
            )
            .await?["token"],
    )?;
    for (tool, arguments) in [
        (
            "sandbox.session.create",
            json!({
                "task_id": task,
                "session_id": "01890000-0000-7000-8000-00000000000a",
                "image_ref": ONE,
                "workspace_ref": seeded["workspace_ref"],
                "constraints": {}
            }),
        ),
        (
            "sandbox.workspace.export_patch",
            json!({"task_id": task, "session_id": session}),
        ),
    ] {
        let body_of_call = json!({
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": tool, "arguments": arguments}
        });
        let request = fixture
            .http
            .post(format!("{}/mcp", fixture.orchestrator.url()?))
            .bearer_auth(&manager)
            .header("accept", "application/json, text/event-stream");
        let answer =
            String::from_utf8(Answer::of(request.json(&body_of_call)).await?.body.to_vec())?;
        ensure!(answer.contains("denied_by_policy"), "{tool}: {answer}");
    }
    assert_eq!(
        (
            fixture.get("/v1/sessions").await?["items"]
                .as_array()
                .map(Vec::len),
            fixture.get("/v1/jobs").await?["items"]
                .as_array()
                .map(Vec::len)
        ),
        before
    );
    // Unstored bytes are not an artifact, and another user's artifact stays unknown.
    let bytes = fixture
        .http
        .post(format!("{}{export}", fixture.orchestrator.url()?))
        .bearer_auth(&ann)
        .header("accept", "application/x-tar");
    assert_ne!(
        Answer::of(bytes.json(&json!({"format": "tar"})))
            .await?
            .status,
        403
    );
    object(
        &fixture
            .call(
                &fixture.admin,
                Method::DELETE,
                "/v1/policies/artifacts",
                &Value::Null,
            )
            .await?,
    )?;
    let (_, ben) = fixture.user("ben").await?;
    let theirs = json!({"workspace_ref": seeded["workspace_ref"], "command": ["true"]});
    refusal(
        &fixture
            .call(&ben, Method::POST, "/v1/jobs", &theirs)
            .await?,
        404,
        "not_found",
    )?;
    object(
        &fixture
            .call(&ann, Method::POST, "/v1/jobs", &seeded)
            .await?,
    )?;
    Ok(())
}

const ADMINISTRATORS: &str =
    "@id(\"all\")\npermit (principal is CyNode::User, action, resource) when { principal.admin };";

#[tokio::test]
// invariant: fail-closed, policies
async fn rules_under_which_no_administrator_could_change_them_are_refused() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let before = fixture.policies()?;
    let delete = async |id: &str| {
        fixture
            .call(
                &fixture.admin,
                Method::DELETE,
                &format!("/v1/policies/{id}"),
                &Value::Null,
            )
            .await
    };
    for document in [
        "forbid (principal, action, resource);",
        "forbid (principal, action == CyNode::Action::\"policy.put\", resource);",
        "forbid (principal, action == CyNode::Action::\"policy.delete\", resource);",
        "forbid (principal, action in CyNode::Action::\"administer\", resource) when \
         { principal is CyNode::User && principal.admin };",
    ] {
        let refused = refusal(&fixture.put("lock", document).await?, 422, "policy_invalid")
            .with_context(|| document.to_owned())?;
        ensure!(text(&refused["detail"])?.contains("policy."), "{refused}");
    }
    refusal(&fixture.put("default", "").await?, 422, "policy_invalid")?;
    refusal(&delete("default").await?, 422, "policy_invalid")?;
    assert_eq!(fixture.policies()?, before);
    // Once others replace them, the default policies may be removed.
    fixture.put_good("mine", ADMINISTRATORS).await?;
    object(&delete("default").await?)?;
    refusal(&delete("mine").await?, 422, "policy_invalid")?;
    let (_, ann) = fixture.user("ann").await?;
    refusal(
        &fixture
            .call(&ann, Method::GET, "/v1/tasks", &Value::Null)
            .await?,
        403,
        "denied_by_policy",
    )?;
    assert_eq!(fixture.get("/v1/tasks").await?["items"], json!([]));
    Ok(())
}

#[tokio::test]
async fn rules_that_lock_out_the_only_administrator_by_name_are_refused() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let before = fixture.policies()?;
    let admin = fixture
        .control_plane
        .postgres
        .query("select id from users where is_admin")?;
    let document = format!(
        "forbid (principal == CyNode::User::\"{admin}\", action in \
         CyNode::Action::\"administer\", resource);"
    );
    refusal(
        &fixture.put("lock", &document).await?,
        422,
        "policy_invalid",
    )?;
    assert_eq!(fixture.policies()?, before);
    object(&fixture.put("still-open", "").await?)?;
    Ok(())
}

#[tokio::test]
// invariant: policies
async fn a_change_names_the_revision_that_it_changes_and_every_version_is_kept() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let put = async |text: &str, if_revision: i64| {
        fixture
            .call(
                &fixture.admin,
                Method::PUT,
                "/v1/policies/some",
                &json!({"text": text, "if_revision": if_revision}),
            )
            .await
    };
    let texts = ["// One.\n", "// Two.\n"];
    refusal(&put(texts[0], 7).await?, 412, "precondition_failed")?;
    let first = object(&put(texts[0], 0).await?)?["revision"]
        .as_i64()
        .context("a revision")?;
    refusal(&put(texts[1], 0).await?, 412, "precondition_failed")?;
    refusal(&put(texts[1], first + 1).await?, 412, "precondition_failed")?;
    let second = object(&put(texts[1], first).await?)?["revision"]
        .as_i64()
        .context("a revision")?;
    ensure!(second > first, "{second} after {first}");
    refusal(&put(texts[0], first).await?, 412, "precondition_failed")?;
    let shown = fixture.get("/v1/policies/some").await?;
    assert_eq!(
        (&shown["text"], &shown["revision"], &shown["updated_by"]),
        (&json!(texts[1]), &json!(second), &json!("admin"))
    );
    object(
        &fixture
            .call(
                &fixture.admin,
                Method::DELETE,
                "/v1/policies/some",
                &Value::Null,
            )
            .await?,
    )?;
    refusal(
        &fixture
            .call(
                &fixture.admin,
                Method::DELETE,
                "/v1/policies/some",
                &Value::Null,
            )
            .await?,
        404,
        "not_found",
    )?;
    let kept = fixture.control_plane.postgres.query(
        "select json_agg(json_build_array(revision, text, created_by) order by revision) \
         from policy_versions where policy_id = 'some'",
    )?;
    let kept: Value = serde_json::from_str(&kept)?;
    assert_eq!(
        (&kept[0], &kept[1]),
        (
            &json!([first, texts[0], "admin"]),
            &json!([second, texts[1], "admin"])
        )
    );
    ensure!(
        kept[2][0].as_i64() > Some(second)
            && kept[2][1].is_null()
            && kept.as_array().map(Vec::len) == Some(3),
        "{kept}"
    );
    // Of many concurrent updates of one revision, one succeeds.
    let bodies: Vec<Value> = (0..8)
        .map(|number| json!({"text": format!("// {number}\n"), "if_revision": 0}))
        .collect();
    let racing = bodies
        .iter()
        .map(|body| fixture.call(&fixture.admin, Method::PUT, "/v1/policies/raced", body));
    let answers = futures_util::future::try_join_all(racing).await?;
    let mut statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 412, 412, 412, 412, 412, 412, 412]);
    Ok(())
}

#[tokio::test]
// invariant: policies
async fn a_rule_applies_on_every_orchestrator_until_it_is_removed() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let two = fixture.second().await?;
    let both = [&fixture.orchestrator, &two];
    let (_, ann) = fixture.user("ann").await?;
    let (task, other_task) = (fixture.task(&ann).await?, fixture.task(&ann).await?);
    let (session, other) = (
        fixture.session(&ann, &task).await?,
        fixture.session(&ann, &other_task).await?,
    );
    for orchestrator in both {
        object(&fixture.exec(orchestrator, &ann, &session).await?)?;
    }
    let until = async |status: u16| -> Result<Duration> {
        let began = Instant::now();
        for orchestrator in both {
            let reached =
                async || Ok(fixture.exec(orchestrator, &ann, &session).await?.status == status);
            eventually("the change is in effect", TIMEOUT, reached).await?;
        }
        Ok(began.elapsed())
    };
    let document = format!(
        "@id(\"no-commands\")\nforbid (principal, action == CyNode::Action::\"session.exec\", \
         resource in CyNode::Task::\"{task}\");"
    );
    fixture.put_good("quiet", &document).await?;
    let put_after = until(403).await?;
    for orchestrator in both {
        let refused = refusal(
            &fixture.exec(orchestrator, &ann, &session).await?,
            403,
            "denied_by_policy",
        )?;
        ensure!(
            refused["rules"] == json!(["quiet/no-commands"])
                && text(&refused["detail"])?.contains("quiet/no-commands"),
            "{refused}"
        );
        refusal(
            &fixture.exec(orchestrator, &fixture.admin, &session).await?,
            403,
            "denied_by_policy",
        )?;
        object(&fixture.exec(orchestrator, &ann, &other).await?)?;
        let query = json!({"user": "ann", "action": "session.exec", "session_id": session});
        let verdict = object(
            &fixture
                .call_at(
                    orchestrator,
                    &fixture.admin,
                    Method::POST,
                    "/v1/policies:test",
                    &query,
                )
                .await?,
        )?;
        assert_eq!(
            (&verdict["allowed"], &verdict["rules"]),
            (&json!(false), &json!(["quiet/no-commands"]))
        );
    }
    // Each refusal is recorded as an intent and an outcome, and none reached the node.
    let denied = fixture
        .records(&format!(
            "session_id={session}&action=session.exec&decision=deny"
        ))
        .await?;
    let intents: Vec<&Value> = denied
        .iter()
        .filter(|record| record["kind"] == "intent")
        .collect();
    ensure!(intents.len() >= 4, "{denied:?}");
    for intent in intents {
        assert_eq!(
            (&intent["stage"], &intent["rules"]),
            (&json!("policy"), &json!(["quiet/no-commands"]))
        );
        assert_eq!(
            (&intent["task_id"], &intent["detail"]["argv"]),
            (&json!(task), &json!(["echo", "on"]))
        );
        let call = fixture
            .records(&format!("call_id={}", text(&intent["call_id"])?))
            .await?;
        assert_eq!(
            (
                call.len(),
                &call[1]["kind"],
                &call[1]["result"],
                &call[1]["status"],
                &call[1]["code"]
            ),
            (
                2,
                &json!("outcome"),
                &json!("refused"),
                &json!(403),
                &json!("denied_by_policy")
            )
        );
    }
    let runs = async || {
        Ok::<_, anyhow::Error>(
            fixture
                .node
                .client()?
                .list_execs(session.parse()?)
                .await?
                .items
                .len(),
        )
    };
    let ran = runs().await?;
    refusal(
        &fixture.exec(&two, &ann, &session).await?,
        403,
        "denied_by_policy",
    )?;
    assert_eq!(runs().await?, ran);
    object(
        &fixture
            .call(
                &fixture.admin,
                Method::DELETE,
                "/v1/policies/quiet",
                &Value::Null,
            )
            .await?,
    )?;
    let removed_after = until(200).await?;
    #[expect(
        clippy::print_stdout,
        reason = "the propagation delay is worth knowing"
    )]
    {
        println!("effective on both after {put_after:?}, removed after {removed_after:?}");
    }
    Ok(())
}

// part of: REQ-SANDBX-0120, CYNAI.SANDBX.AccessControlAuditing
#[tokio::test]
async fn no_session_or_job_uses_a_forbidden_image() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (_, ann) = fixture.user("ann").await?;
    fixture
        .put_good(
            "images",
            &format!(
                "@id(\"not-two\")\nforbid (principal, action == \
                 CyNode::Action::\"image.use\", resource == \
                 CyNode::Image::\"{TWO}\");"
            ),
        )
        .await?;
    for (path, body) in [
        ("/v1/sessions", json!({"image_ref": TWO})),
        ("/v1/jobs", json!({"image_ref": TWO, "command": ["true"]})),
    ] {
        let answer = fixture.call(&ann, Method::POST, path, &body).await?;
        let refused = refusal(&answer, 403, "denied_by_policy").with_context(|| path.to_owned())?;
        assert_eq!(refused["rules"], json!(["images/not-two"]));
        let call = fixture
            .records(&format!("call_id={}", answer.header(CALL_HEADER)))
            .await?;
        let (intent, outcome) = (
            call.first().context("an intent")?,
            call.last().context("an outcome")?,
        );
        assert_eq!(
            (
                &intent["detail"]["image_ref"],
                &intent["subject"]["name"],
                &outcome["code"]
            ),
            (&json!(TWO), &json!("ann"), &json!("denied_by_policy"))
        );
    }
    assert_eq!(
        fixture.control_plane.postgres.query(
            "select (select count(*) from sessions) + \
             (select count(*) from jobs) + (select count(*) from tasks)"
        )?,
        "0"
    );
    ensure!(
        fixture.node.sessions().is_empty(),
        "a session reached the node"
    );
    fixture
        .make(&ann, "/v1/sessions", &json!({"image_ref": ONE}))
        .await?;
    fixture
        .make(
            &ann,
            "/v1/jobs",
            &json!({"image_ref": ONE, "command": ["true"]}),
        )
        .await?;
    let verdict = fixture
        .make(
            &fixture.admin,
            "/v1/policies:test",
            &json!({"user": "ann", "action": "image.use", "image": TWO}),
        )
        .await?;
    assert_eq!(
        (&verdict["allowed"], &verdict["rules"]),
        (&json!(false), &json!(["images/not-two"]))
    );
    Ok(())
}

// part of: REQ-SANDBX-0124, CYNAI.SANDBX.ImageCompatibilityTaskType
#[tokio::test]
async fn a_rule_restricts_plain_commands_to_agent_compatible_images() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let job = async |image: &str| {
        fixture
            .call(
                &fixture.admin,
                Method::POST,
                "/v1/jobs",
                &json!({"image_ref": image, "command": ["true"]}),
            )
            .await
    };
    eventually("the node has reported its images", TIMEOUT, async || {
        Ok(fixture
            .get("/v1/images")
            .await?
            .to_string()
            .contains("agent_compatible"))
    })
    .await?;
    object(&job(PLAIN).await?)?;
    refusal(
        &fixture
            .call(
                &fixture.admin,
                Method::POST,
                "/v1/sessions",
                &json!({"image_ref": PLAIN}),
            )
            .await?,
        422,
        "image_not_compatible",
    )?;
    let document = "@id(\"agents-images\")\nforbid (principal, action == \
                    CyNode::Action::\"image.use\", resource is CyNode::Image) unless \
                    { resource.agent_compatible };";
    fixture.put_good("narrow", document).await?;
    let refused = refusal(&job(PLAIN).await?, 403, "denied_by_policy")?;
    assert_eq!(refused["rules"], json!(["narrow/agents-images"]));
    object(&job(ONE).await?)?;
    Ok(())
}

#[tokio::test]
async fn a_rule_about_a_group_applies_only_to_its_members() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let ((_, ann), (_, ben)) = (fixture.user("ann").await?, fixture.user("ben").await?);
    fixture
        .make(
            &fixture.admin,
            "/v1/groups",
            &json!({"name": "guests", "members": ["ann"]}),
        )
        .await?;
    let document = "@id(\"guests-look\")\nforbid (principal in CyNode::Group::\"guests\", action \
                    in CyNode::Action::\"run\", resource);";
    fixture.put_good("guests", document).await?;
    let refused = refusal(
        &fixture
            .call(&ann, Method::POST, "/v1/sessions", &json!({}))
            .await?,
        403,
        "denied_by_policy",
    )?;
    assert_eq!(refused["rules"], json!(["guests/guests-look"]));
    refusal(
        &fixture
            .call(
                &ann,
                Method::POST,
                "/v1/jobs",
                &json!({"command": ["true"]}),
            )
            .await?,
        403,
        "denied_by_policy",
    )?;
    fixture.task(&ann).await?;
    fixture.make(&ben, "/v1/sessions", &json!({})).await?;
    for (name, allowed) in [("ann", false), ("ben", true)] {
        let verdict = fixture
            .make(
                &fixture.admin,
                "/v1/policies:test",
                &json!({"user": name, "action": "session.create"}),
            )
            .await?;
        assert_eq!(verdict["allowed"], json!(allowed), "{name}: {verdict}");
    }
    Ok(())
}

// part of: REQ-SANDBX-0120, CYNAI.SANDBX.AccessControlAuditing
#[tokio::test]
async fn a_rule_grants_one_user_an_administrators_action() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let ((id, ann), (_, ben)) = (fixture.user("ann").await?, fixture.user("ben").await?);
    let add = async |token: &str, name: &str| {
        fixture
            .call(
                token,
                Method::POST,
                "/v1/images",
                &json!({"image_ref": format!("localhost/{name}:1")}),
            )
            .await
    };
    refusal(&add(&ann, "early").await?, 403, "denied_by_policy")?;
    let document = format!(
        "@id(\"ann-adds\")\npermit (principal == CyNode::User::\"{id}\", action == \
         CyNode::Action::\"image.add\", resource);"
    );
    fixture.put_good("keepers", &document).await?;
    let answer = add(&ann, "added").await?;
    let added = object(&answer)?;
    assert_eq!(added["updated_by"], json!("ann"));
    refusal(&add(&ben, "others").await?, 403, "denied_by_policy")?;
    refusal(
        &fixture
            .call(
                &ann,
                Method::PATCH,
                &format!("/v1/images/{}", text(&added["id"])?),
                &json!({"is_allowed": true}),
            )
            .await?,
        403,
        "denied_by_policy",
    )?;
    let call = fixture
        .records(&format!("call_id={}", answer.header(CALL_HEADER)))
        .await?;
    assert_eq!(
        (call.len(), &call[0]["rules"], &call[0]["decision"]),
        (2, &json!(["keepers/ann-adds"]), &json!("allow"))
    );
    assert_eq!(
        (&call[0]["subject"]["name"], &call[0]["detail"]["image_ref"]),
        (&json!("ann"), &json!("localhost/added:1"))
    );
    Ok(())
}

#[tokio::test]
// invariant: fail-closed
async fn no_rule_gives_a_sandbox_or_agent_more_than_its_kind_of_token() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let task = fixture.task(&fixture.admin).await?;
    let session = fixture.session(&fixture.admin, &task).await?;
    let token = async |body: Value| {
        text(&fixture.make(&fixture.admin, "/v1/tokens", &body).await?["token"])
    };
    let sandbox =
        token(json!({"kind": "sandbox", "task_ids": [task], "session_id": session})).await?;
    let manager = token(json!({"kind": "project_manager", "task_ids": [task]})).await?;
    fixture
        .put_good(
            "open",
            "@id(\"everybody\")\npermit (principal, action, resource);",
        )
        .await?;
    for (kind, token) in [("sandbox", &sandbox), ("project_manager", &manager)] {
        let calls = [
            ("GET", "/v1/tasks".to_owned()),
            ("POST", format!("/v1/sessions/{session}/exec")),
            ("PUT", "/v1/policies/mine".to_owned()),
            ("GET", "/v1/audit".to_owned()),
        ];
        for (method, path) in calls {
            let answer = fixture
                .call(
                    token,
                    method.parse()?,
                    &path,
                    &if method == "GET" {
                        Value::Null
                    } else {
                        json!({})
                    },
                )
                .await?;
            refusal(&answer, 403, "forbidden")
                .with_context(|| format!("{kind}: {method} {path}"))?;
            let call = fixture
                .records(&format!("call_id={}", answer.header(CALL_HEADER)))
                .await?;
            assert_eq!(
                (
                    call.len(),
                    &call[0]["stage"],
                    &call[0]["decision"],
                    &call[0]["subject"]["kind"]
                ),
                (2, &json!("agent_type"), &json!("deny"), &json!(kind)),
                "{path}"
            );
        }
    }
    refusal(
        &fixture
            .call(&sandbox, Method::GET, "/v1/events", &Value::Null)
            .await?,
        403,
        "forbidden",
    )?;
    object(
        &fixture
            .call(&manager, Method::GET, "/v1/events", &Value::Null)
            .await?,
    )?;
    Ok(())
}
